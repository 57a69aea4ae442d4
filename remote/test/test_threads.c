/*
 * test_threads.c
 *	  Several threads, each with a store of its own on the same records; meant for TSan.
 *
 * Each thread writes keys of its own and reads them back.  One writer replaces a long value again and again while all
 * others read it: whoever reads sees a value that was written, whole.  Usage: test_threads [seconds].
 */
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "../driver.h"
#include "harness.h"

#define NTHREADS 4
#define LONG_VALUE 5000

static const char *url;
static st_stats stats;
static atomic_bool stop;
static atomic_int failures;
static atomic_long reads;

#define EXPECT(condition) \
	do { \
		if (!(condition)) \
		{ \
			printf("# %s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition, err.message); \
			atomic_fetch_add(&failures, 1); \
			atomic_store(&stop, true); \
		} \
	} while (0)

static bool
all_equal(st_slice value)
{
	const char *bytes = value.data;

	for (size_t i = 1; i < value.len; i++)
		if (bytes[i] != bytes[0])
			return false;
	return value.len > 0;
}

static void *
work(void *arg)
{
	unsigned	me = *(unsigned *) arg;
	st_options	options = {.create = true, .stats = &stats, .map_size = (uint64_t) 1 << 28};
	st_error	err = {0};
	st_store   *s;
	st_result	result = {0};
	char		value[LONG_VALUE];

	EXPECT(st_open(url, &options, &s, &err) == ST_OK);
	if (s == NULL)
		return NULL;
	for (unsigned round = 0; !atomic_load(&stop); round++)
	{
		char		key[2][16];
		st_op		ops[2] = {{{key[0], 15}, {&round, sizeof(round)}, false}, {{key[1], 15}, {0}, true}};
		bool		acked[2];
		st_slice	shared = {"shared", 6};

		snprintf(key[0], sizeof(key[0]), "t%04u%010u", me, round % 50);
		snprintf(key[1], sizeof(key[1]), "t%04u%010u", me, (round + 25) % 50);
		EXPECT(st_write(s, ops, 2, acked, &err) == ST_OK && acked[0] && acked[1]);
		EXPECT(st_get(s, &ops[0].key, 1, &result, &err) == ST_OK && result.recs[0].found &&
			   st_compare(result.recs[0].value, ops[0].value) == 0);
		if (me == 0)
		{
			st_op		op = {shared, {value, LONG_VALUE - round % 1000}, false};

			memset(value, 'a' + round % 26, sizeof(value));
			EXPECT(st_write(s, &op, 1, acked, &err) == ST_OK);
		}
		EXPECT(st_get(s, &shared, 1, &result, &err) == ST_OK);
		EXPECT(result.nrecs == 1 && (!result.recs[0].found || all_equal(result.recs[0].value)));
		EXPECT(st_get_range(s, (st_slice) {"s", 1}, (st_slice) {"t", 1}, 0, 0, round % 2 == 0, &result, &err) == ST_OK);
		EXPECT(result.nrecs <= 1 && (result.nrecs == 0 || all_equal(result.recs[0].value)));
		atomic_fetch_add(&reads, 2);
	}
	EXPECT(st_sync(s, &err) == ST_OK);
	st_result_free(&result);
	st_close(s);
	return NULL;
}

static double run_seconds = 1;

static void
test_one_store_per_thread(void)
{
	pthread_t	threads[NTHREADS];
	unsigned	numbers[NTHREADS];
	uint64_t	total = 0;

	atomic_store(&stop, false);
	atomic_store(&failures, 0);
	memset(&stats, 0, sizeof(stats));
	for (unsigned i = 0; i < NTHREADS; i++)
	{
		numbers[i] = i;
		CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
	}
	usleep((useconds_t) (run_seconds * 1e6));
	atomic_store(&stop, true);
	for (unsigned i = 0; i < NTHREADS; i++)
		pthread_join(threads[i], NULL);
	CHECK(atomic_load(&failures) == 0);
	for (int i = 0; i < ST_LATENCY_BUCKETS; i++)
		total += stats.op[ST_OP_SYNC].latency[i];
	CHECK(total == NTHREADS && stats.op[ST_OP_GET].errors == 0);
}

int
main(int argc, char **argv)
{
	char		directory[] = "/tmp/nemo_store_XXXXXX";
	char		lmdb_url[64];
	char		command[64];

	if (argc > 1)
		run_seconds = atof(argv[1]);
	if (mkdtemp(directory) == NULL)
	{
		perror("mkdtemp");
		return EXIT_FAILURE;
	}
	snprintf(lmdb_url, sizeof(lmdb_url), "lmdb:%s", directory);
	url = "mem:wide";
	harness_run("mem: ", "one_store_per_thread", test_one_store_per_thread);
	url = "mem:narrow?max_value=500&max_batch_ops=3&page=2";
	harness_run("narrow mem: ", "one_store_per_thread", test_one_store_per_thread);
	url = lmdb_url;
	harness_run("lmdb: ", "one_store_per_thread", test_one_store_per_thread);
	st_mem_forget("wide");
	st_mem_forget("narrow");
	snprintf(command, sizeof(command), "rm -rf %s", directory);
	if (system(command) != 0)
		perror("rm");
	return harness_end();
}
