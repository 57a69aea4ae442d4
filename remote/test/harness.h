/*
 * harness.h
 *	  The smallest test harness: named checks, a line for each test, a count at the end.
 *
 * A test is a function; CHECK stops it at its first failure.  Lines: `ok - name` or `not ok - name`.
 */
#ifndef NEMO_STORE_HARNESS_H
#define NEMO_STORE_HARNESS_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

static struct
{
	unsigned	passed;
	unsigned	failed;
	jmp_buf		out;
}			harness;

#define CHECK(condition) \
	do { \
		if (!(condition)) \
		{ \
			printf("# %s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
			longjmp(harness.out, 1); \
		} \
	} while (0)

#define CHECK_OK(call) \
	do { \
		st_status	status_ = (call); \
		if (status_ != ST_OK) \
		{ \
			printf("# %s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call, st_status_name(status_), err.message); \
			longjmp(harness.out, 1); \
		} \
	} while (0)

#define CHECK_FAILS(call, code_) \
	do { \
		st_status	status_ = (call); \
		if (status_ != (code_) || err.code != (code_) || err.message[0] == '\0') \
		{ \
			printf("# %s:%d: %s: %s (%s), not %s\n", __FILE__, __LINE__, #call, st_status_name(status_), \
				   err.message, st_status_name(code_)); \
			longjmp(harness.out, 1); \
		} \
	} while (0)

static inline void
harness_run(const char *prefix, const char *name, void (*test) (void))
{
	if (setjmp(harness.out) == 0)
	{
		test();
		harness.passed++;
		printf("ok - %s%s\n", prefix, name);
	}
	else
	{
		harness.failed++;
		printf("not ok - %s%s\n", prefix, name);
	}
	fflush(stdout);
}

static inline int
harness_end(void)
{
	printf("%u passed, %u failed\n", harness.passed, harness.failed);
	return harness.failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif							/* NEMO_STORE_HARNESS_H */
