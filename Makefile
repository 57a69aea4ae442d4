# Nemo: PostgreSQL extension.  `make`, `make install`, `make installcheck` as every extension's;
# `make demo` and `make check` set up everything they need by themselves, `make stress` runs the long versions.

MODULE_big = nemo
EXTENSION = nemo
DATA = nemo--1.0.sql
PGFILEDESC = "nemo - tables in an ordered key-value store"

OBJS = $(patsubst %.c,%.o,$(wildcard nemo*.c buffer/*.c locking/*.c remote/*.c))

REGRESS = $(patsubst sql/%.sql,%,$(sort $(wildcard sql/*.sql)))
REGRESS_OPTS = --inputdir=. --load-extension=nemo

PG_CPPFLAGS = -I$(srcdir)
PG_CFLAGS = -std=gnu11 -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers \
	-Wno-declaration-after-statement -Wno-vla
SHLIB_LINK = -llmdb

PG_CONFIG ?= pg_config
own_goals = demo check stress
ifneq ($(filter $(own_goals),$(MAKECMDGOALS)),)
# these call make again for the parts; PGXS has a "check" of its own
demo:
	scripts/demo

check:
	scripts/check

stress:
	scripts/check --stress

.PHONY: $(own_goals)
else ifeq ($(shell command -v $(PG_CONFIG)),)
# without the server's development files only the goals that install them work
.DEFAULT_GOAL := all
all install installcheck:
	@echo "pg_config not found: run 'make demo' or 'make check', or install postgresql-server-dev-15" >&2; exit 1
else
PGXS := $(shell $(PG_CONFIG) --pgxs)
# bitcode for JIT inlining is of no use here
override with_llvm = no
include $(PGXS)
$(OBJS): $(wildcard *.h buffer/*.h locking/*.h remote/*.h)
endif
