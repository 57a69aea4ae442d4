/*
 * suite.h
 *	  What the tests of drivers share: a place for each new store, and short forms of the calls.
 *
 * Each test opens a new store.  `s` is the store under test, `err` the last error; most helpers take C strings.
 */
#ifndef NEMO_STORE_SUITE_H
#define NEMO_STORE_SUITE_H

#include <unistd.h>

#include "../driver.h"
#include "harness.h"

#define RUN(name) harness_run(place.prefix, #name, test_##name)

static struct
{
	const char *prefix;			/* of test names */
	const char *mem_options;	/* NULL = LMDB */
	char		directory[64];
	unsigned	number;
	char		url[256];
}			place;

static st_store *s;
static st_error err;
static st_stats stats;
static st_options options;

static inline st_slice
slice(const char *text)
{
	return (st_slice) {text, strlen(text)};
}

static inline void
new_place(void)
{
	place.number++;
	if (place.mem_options != NULL)
		snprintf(place.url, sizeof(place.url), "mem:test%u%s", place.number, place.mem_options);
	else
		snprintf(place.url, sizeof(place.url), "lmdb:%s/%u", place.directory, place.number);
	memset(&stats, 0, sizeof(stats));
	options = (st_options) {.create = true, .stats = &stats, .map_size = (uint64_t) 1 << 28};
}

static inline void
open_store(void)
{
	new_place();
	CHECK_OK(st_open(place.url, &options, &s, &err));
}

static inline void
close_store(void)
{
	char		name[64];

	st_close(s);
	s = NULL;
	snprintf(name, sizeof(name), "test%u", place.number);
	st_mem_forget(name);
}

static inline void
reopen(void)
{
	st_store   *old = s;

	options.create = false;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	st_close(old);
}

static inline st_status
write_one(st_slice key, st_slice value, bool del)
{
	st_op		op = {key, value, del};
	bool		acked;
	st_status	status = st_write(s, &op, 1, &acked, &err);

	CHECK(acked == (status == ST_OK));
	return status;
}

static inline void
put(const char *key, const char *value)
{
	CHECK_OK(write_one(slice(key), slice(value), false));
}

static inline void
del(const char *key)
{
	CHECK_OK(write_one(slice(key), (st_slice) {0}, true));
}

static inline bool
equal(st_slice a, st_slice b)
{
	return st_compare(a, b) == 0;
}

static inline bool
has(const char *key, const char *value)
{
	st_result	result = {0};
	st_slice	k = slice(key);
	bool		yes;

	CHECK_OK(st_get(s, &k, 1, &result, &err));
	CHECK(result.nrecs == 1 && equal(result.recs[0].key, k));
	yes = value == NULL ? !result.recs[0].found && result.recs[0].value.len == 0
		: result.recs[0].found && equal(result.recs[0].value, slice(value));
	st_result_free(&result);
	return yes;
}

/* The keys of a range, joined by blanks, with "..." where it is not complete. */
static inline bool
range_is(const char *start, const char *end, uint32_t limit, bool reverse, const char *expected)
{
	st_result	result = {0};
	char		text[1024] = "";

	CHECK_OK(st_get_range(s, slice(start), slice(end), limit, 0, reverse, &result, &err));
	for (uint32_t i = 0; i < result.nrecs; i++)
	{
		CHECK(result.recs[i].found);
		snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%.*s", i > 0 ? " " : "",
				 (int) result.recs[i].key.len, (const char *) result.recs[i].key.data);
	}
	strcat(text, result.complete ? "" : "...");
	st_result_free(&result);
	if (strcmp(text, expected) != 0)
		printf("# got \"%s\", not \"%s\"\n", text, expected);
	return strcmp(text, expected) == 0;
}

static inline void
begin_places(void)
{
	snprintf(place.directory, sizeof(place.directory), "/tmp/nemo_store_XXXXXX");
	if (mkdtemp(place.directory) == NULL)
	{
		perror("mkdtemp");
		exit(EXIT_FAILURE);
	}
}

/* Returns the exit code of the test program. */
static inline int
end_places(void)
{
	char		command[128];

	snprintf(command, sizeof(command), "rm -rf %s", place.directory);
	if (system(command) != 0)
		perror("rm");
	return harness_end();
}

#endif							/* NEMO_STORE_SUITE_H */
