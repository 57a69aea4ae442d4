/*
 * test_lmdb.c
 *	  What only the embedded store can go through: strange files, fork, a full or grown map, killed writers.
 */
#include <lmdb.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "suite.h"

static void
make_file(const char *format, const void *bytes, size_t len)
{
	char		path[256];
	FILE	   *file;

	snprintf(path, sizeof(path), "%s/%u", place.directory, place.number);
	mkdir(path, 0700);
	snprintf(path, sizeof(path), format, place.directory, place.number);
	file = fopen(path, "w");
	CHECK(file != NULL && fwrite(bytes, 1, len, file) == len && fclose(file) == 0);
}

static void
test_strange_files(void)
{
	static char zeros[16384];
	static char words[8192];

	memset(words, 'w', sizeof(words));
	for (int create = 0; create < 2; create++)
	{
		new_place();
		options.create = create == 1;
		make_file("%s/%u/data.mdb", words, sizeof(words));
		CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_CORRUPT);
		make_file("%s/%u/data.mdb", words, 10);
		CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_CORRUPT);
		make_file("%s/%u/data.mdb", zeros, sizeof(zeros));
		CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_CORRUPT);
	}
	new_place();
	options.create = false;
	make_file("%s/%u/other", words, 1);
	CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_UNAVAILABLE);
	make_file("%s/%u/data.mdb", words, 0);
	CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_UNAVAILABLE);
}

static void
test_cut_short(void)
{
	char		path[256];
	static char value[100000];

	open_store();
	CHECK_OK(write_one(slice("a"), (st_slice) {value, sizeof(value)}, false));
	CHECK_OK(st_sync(s, &err));
	close_store();
	snprintf(path, sizeof(path), "%s/%u/data.mdb", place.directory, place.number);
	CHECK(truncate(path, 16384) == 0);
	CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_CORRUPT);
}

static void
test_fork(void)
{
	pid_t		child;
	int			wait_status;

	open_store();
	put("a", "1");
	fflush(stdout);
	child = fork();
	CHECK(child >= 0);
	if (child == 0)
	{
		st_result	result = {0};
		st_slice	key = slice("a");
		st_op		op = {key, {"2", 1}, false};
		bool		acked;
		bool		good = st_get(s, &key, 1, &result, &err) == ST_INVALID;

		st_close(s);
		good = good && st_open(place.url, &options, &s, &err) == ST_OK && st_write(s, &op, 1, &acked, &err) == ST_OK;
		st_close(s);
		_exit(good ? 0 : 1);
	}
	CHECK(waitpid(child, &wait_status, 0) == child && wait_status == 0);
	CHECK(has("a", "2"));
	close_store();
}

static void
test_full(void)
{
	static char value[1 << 20];
	st_status	status = ST_OK;

	new_place();
	options.map_size = 4 << 20;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	put("a", "1");
	for (char key = 'b'; key < 'z' && status == ST_OK; key++)
		status = write_one((st_slice) {&key, 1}, (st_slice) {value, sizeof(value)}, false);
	CHECK(status == ST_FULL && err.code == ST_FULL && !err.ambiguous);
	CHECK_OK(st_delete_range(s, slice("b"), slice(""), &err));
	CHECK(range_is("", "", 0, false, "a"));
	close_store();
}

static int	locked;
static int	lockings;

static void
lock(void *arg)
{
	(void) arg;
	locked++;
	lockings++;
}

static void
unlock(void *arg)
{
	(void) arg;
	locked--;
}

static void
test_write_lock(void)
{
	uint64_t	epoch;

	new_place();
	options.write_lock = lock;
	options.write_unlock = unlock;
	locked = lockings = 0;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	put("a", "1");
	CHECK(locked == 0 && lockings == 1);
	CHECK_OK(st_claim(s, "me", &epoch, &err));
	st_assume(s, "you", 1);
	CHECK_FAILS(write_one(slice("a"), slice("2"), false), ST_REFUSED);
	CHECK(locked == 0 && lockings == 3);
	close_store();
}

static uint64_t random_state;

static uint32_t
random_below(uint32_t n)
{
	random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t) (random_state >> 33) % n;
}

/* Does the closed store's file end before the last page LMDB has counted? */
static bool
ends_early(void)
{
	MDB_env    *env;
	MDB_envinfo info;
	MDB_stat	stats;
	struct stat st;
	char		path[256];

	CHECK(mdb_env_create(&env) == 0);
	snprintf(path, sizeof(path), "%s/%u", place.directory, place.number);
	CHECK(mdb_env_open(env, path, MDB_RDONLY, 0600) == 0);
	CHECK(mdb_env_info(env, &info) == 0 && mdb_env_stat(env, &stats) == 0);
	mdb_env_close(env);
	snprintf(path, sizeof(path), "%s/%u/data.mdb", place.directory, place.number);
	CHECK(stat(path, &st) == 0);
	return (size_t) st.st_size / stats.ms_psize <= info.me_last_pgno;
}

/*
 * Pages taken and given back in one transaction are never written, so that a file may end before its last page.
 * That takes some luck: random batches until it has happened.  Such a store opens.
 */
static void
test_file_ends_early(void)
{
	enum {N = 400, NKEYS = 3000};
	static char names[N][16];
	static st_op ops[N];
	static bool acked[N];
	static char value[1500];
	bool		seen = false;

	random_state = 1;
	open_store();
	for (int batch = 0; batch < 1000 && !seen; batch++)
	{
		uint32_t	base = random_below(NKEYS);
		bool		del = batch % 3 == 2;

		if (batch % 50 == 49)
		{
			close_store();
			open_store();
		}
		for (uint32_t i = 0; i < N; i++)
		{
			snprintf(names[i], sizeof(names[i]), "%06u", (base + i) % NKEYS);
			ops[i] = (st_op) {slice(names[i]), {value, random_below(sizeof(value))}, del || random_below(2) == 0};
		}
		CHECK_OK(st_write(s, ops, 1 + random_below(N), acked, &err));
		st_close(s);
		seen = ends_early();
		CHECK_OK(st_open(place.url, &options, &s, &err));
	}
	CHECK(seen);
	close_store();
}

/* Entries of one of the databases of a closed store. */
static size_t
entries_of(const char *database)
{
	MDB_env    *env;
	MDB_txn    *txn;
	MDB_dbi		dbi;
	MDB_stat	stats;
	char		path[256];

	snprintf(path, sizeof(path), "%s/%u", place.directory, place.number);
	CHECK(mdb_env_create(&env) == 0 && mdb_env_set_maxdbs(env, 3) == 0);
	CHECK(mdb_env_open(env, path, MDB_RDONLY, 0600) == 0);
	CHECK(mdb_txn_begin(env, NULL, MDB_RDONLY, &txn) == 0);
	CHECK(mdb_dbi_open(txn, database, 0, &dbi) == 0 && mdb_stat(txn, dbi, &stats) == 0);
	mdb_txn_abort(txn);
	mdb_env_close(env);
	return stats.ms_entries;
}

/* The last key of a branch takes the branch with it, and no key more. */
static void
test_branches_go_with_their_keys(void)
{
	static char key[2000];
	static const size_t lengths[] = {510, 511, 1012, 1013, 1014, 2000};
	enum {N = sizeof(lengths) / sizeof(lengths[0])};

	memset(key, 'k', sizeof(key));
	open_store();
	for (int i = 0; i < N; i++)
		CHECK_OK(write_one((st_slice) {key, lengths[i]}, slice("v"), false));
	close_store();
	CHECK(entries_of("data") == 2); /* the short one, a marker */
	CHECK(entries_of("long") == 7); /* five, two markers */
	CHECK_OK(st_open(place.url, &options, &s, &err));
	CHECK_OK(write_one((st_slice) {key, 1999}, (st_slice) {0}, true));	/* absent */
	CHECK_OK(write_one((st_slice) {key, 2000}, (st_slice) {0}, true));
	close_store();
	CHECK(entries_of("data") == 2);
	CHECK(entries_of("long") == 5);
	CHECK_OK(st_open(place.url, &options, &s, &err));
	for (int i = 0; i < N; i++)
		CHECK_OK(write_one((st_slice) {key, lengths[i]}, (st_slice) {0}, true));
	close_store();
	CHECK(entries_of("data") == 0);
	CHECK(entries_of("long") == 0);
}

/* Another process with a larger map fills it beyond ours. */
static void
test_grown_map(void)
{
	static char value[1 << 20];
	pid_t		child;
	int			wait_status;

	new_place();
	options.map_size = 8 << 20;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	put("a", "1");
	CHECK(has("a", "1"));
	fflush(stdout);
	child = fork();
	CHECK(child >= 0);
	if (child == 0)
	{
		bool		good;

		options.map_size = 64 << 20;
		good = st_open(place.url, &options, &s, &err) == ST_OK;
		for (char key = 'b'; key < 'v' && good; key++)
		{
			st_op		op = {{&key, 1}, {value, sizeof(value)}, false};
			bool		acked;

			good = st_write(s, &op, 1, &acked, &err) == ST_OK;
		}
		st_close(s);
		_exit(good ? 0 : 1);
	}
	CHECK(waitpid(child, &wait_status, 0) == child && wait_status == 0);
	CHECK(has("a", "1") && has("z", NULL));
	put("z", "2");
	CHECK(range_is("t", "", 0, false, "t u z"));
	close_store();
}

/* A writer that is killed in the middle: what it acknowledged is there, its lock and its snapshots are not. */
static void
test_killed_writer(void)
{
	uint32_t	last = 0;

	open_store();
	for (int kill_number = 0; kill_number < 8; kill_number++)
	{
		int			pipe_ends[2];
		uint32_t	number;
		int			wait_status;
		char		name[16];
		pid_t		child;

		CHECK(pipe(pipe_ends) == 0);
		fflush(stdout);
		child = fork();
		CHECK(child >= 0);
		if (child == 0)
		{
			if (st_open(place.url, &options, &s, &err) != ST_OK)
				_exit(1);
			for (number = last + 1;; number++)
			{
				st_op		op = {{name, 8}, {&number, sizeof(number)}, false};
				bool		acked;

				snprintf(name, sizeof(name), "%08u", number);
				if (st_write(s, &op, 1, &acked, &err) != ST_OK || !acked ||
					write(pipe_ends[1], &number, sizeof(number)) != sizeof(number))
					_exit(1);
			}
		}
		close(pipe_ends[1]);
		usleep(10000 + 3000 * (useconds_t) kill_number);
		kill(child, SIGKILL);
		CHECK(waitpid(child, &wait_status, 0) == child && WIFSIGNALED(wait_status));
		while (read(pipe_ends[0], &number, sizeof(number)) == sizeof(number))
			last = number;
		close(pipe_ends[0]);
		for (number = 1; number <= last; number++)
		{
			snprintf(name, sizeof(name), "%08u", number);
			CHECK(!has(name, NULL));
		}
		put("after", "kill");
	}
	CHECK(last > 0);
	close_store();
}

int
main(void)
{
	begin_places();
	place.prefix = "lmdb: ";
	RUN(strange_files);
	RUN(cut_short);
	RUN(file_ends_early);
	RUN(branches_go_with_their_keys);
	RUN(fork);
	RUN(full);
	RUN(write_lock);
	RUN(grown_map);
	RUN(killed_writer);
	return end_places();
}
