/*
 * bench_store.c
 *	  How long one call takes on the embedded store; for comparing changes of this layer, not stores.
 */
#include <time.h>
#include <unistd.h>

#include "../driver.h"
#include "harness.h"

#define NKEYS 100000
#define NREADS 500000

static double
seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double) now.tv_sec + (double) now.tv_nsec / 1e9;
}

static void
report(const char *what, double begin, unsigned n)
{
	printf("%-36s %9.3f us\n", what, (seconds() - begin) * 1e6 / n);
}

static void
bench(const char *url)
{
	static st_stats stats;
	static st_op ops[NKEYS];
	static char keys[NKEYS][24];
	static bool acked[NKEYS];
	st_options	options = {.create = true, .stats = &stats, .map_size = (uint64_t) 1 << 32};
	st_error	err = {0};
	st_store   *s;
	st_result	result = {0};
	char		value[200];
	uint64_t	random = 1;
	double		begin;

	memset(value, 'v', sizeof(value));
	CHECK_OK(st_open(url, &options, &s, &err));
	for (unsigned i = 0; i < NKEYS; i++)
	{
		snprintf(keys[i], sizeof(keys[i]), "key%016u", i);
		ops[i] = (st_op) {{keys[i], 19}, {value, sizeof(value)}, false};
	}
	begin = seconds();
	CHECK_OK(st_write(s, ops, NKEYS, acked, &err));
	report("write, large ordered batches", begin, NKEYS);
	begin = seconds();
	for (unsigned i = 0; i < NREADS; i++)
	{
		random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		CHECK_OK(st_get(s, &ops[(random >> 33) % NKEYS].key, 1, &result, &err));
	}
	report("get of one random key", begin, NREADS);
	begin = seconds();
	for (unsigned i = 0; i < NREADS / 100; i++)
	{
		random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		CHECK_OK(st_get_range(s, ops[(random >> 33) % NKEYS].key, (st_slice) {0}, 100, 0, false, &result, &err));
	}
	report("range of 100", begin, NREADS / 100);
	begin = seconds();
	for (unsigned i = 0; i < 500; i++)
		CHECK_OK(st_write(s, &ops[i * 199], 1, acked, &err));
	report("write of one key", begin, 500);
	begin = seconds();
	for (unsigned i = 0; i < 100; i++)
		CHECK_OK(st_write(s, &ops[i * 900], 100, acked, &err));
	report("write of 100 keys", begin, 100);
	begin = seconds();
	CHECK_OK(st_sync(s, &err));
	report("sync", begin, 1);
	st_result_free(&result);
	st_close(s);
}

static char url[64];

static void
test_bench(void)
{
	bench(url);
}

int
main(void)
{
	char		directory[] = "/tmp/nemo_store_XXXXXX";
	char		command[64];

	if (mkdtemp(directory) == NULL)
	{
		perror("mkdtemp");
		return EXIT_FAILURE;
	}
	snprintf(url, sizeof(url), "lmdb:%s", directory);
	harness_run("lmdb: ", "bench", test_bench);
	snprintf(command, sizeof(command), "rm -rf %s", directory);
	if (system(command) != 0)
		perror("rm");
	return harness_end();
}
