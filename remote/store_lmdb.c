/*
 * store_lmdb.c
 *	  The embedded store: one LMDB environment in a directory of its own.
 *
 * Three databases in the environment: `data`, `long` for what of a long key does not fit, `meta` for the store's own
 * records (stored.h).  Long keys: README.md, section "Long keys".
 *
 * LMDB allows one opening of an environment per process, and none of it may be used across fork().  Environments are
 * therefore shared by the stores of a process through a directory under a mutex, and everything opened before a fork
 * is dead in the child: it is neither used nor closed there.  Write transactions are serialised by LMDB's own lock,
 * which no signal interrupts; options.write_lock is taken around it.
 *
 * Durability: MDB_NOMETASYNC writes the data pages of each commit to disk, the meta page with the next commit or
 * mdb_env_sync().  A power loss undoes at most the commits after the last sync, and never harms the file.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lmdb_keys.h"
#include "stored.h"

#define DEFAULT_MAP_SIZE ((uint64_t) 1 << 40)
#define DEFAULT_MAX_READERS 1024
#define DELETE_PIECE 500		/* records deleted in one transaction of a range delete */
#define FREE_DATABASE 0			/* LMDB's own handle of the list of free pages */
#define READER_CHECK_WRITES 1024	/* look for dead readers every so many writes */

/* in `meta`, besides LMDB_BRANCH_KEY */
#define FORMAT_KEY "format"
#define OWNER_KEY "owner"

typedef struct environment
{
	struct environment *next;	/* in the directory */
	unsigned	references;		/* under the directory's mutex */
	dev_t		device;			/* of the data file */
	ino_t		inode;
	unsigned	generation;		/* of forks when it was opened */
	MDB_env    *env;
	lmdb_databases dbs;
	_Atomic unsigned writes;
} environment;

typedef struct lmdb_store
{
	environment *e;
	const st_options *options;
	st_owner	assumed;
	MDB_txn    *reader;			/* between reads reset, so that it pins nothing */
	MDB_cursor *cursor;			/* over `data`, renewed with reader */
} lmdb_store;

static struct
{
	pthread_mutex_t mutex;
	environment *environments;
	_Atomic unsigned generation;	/* forks that led to this process since the first opening */
	bool		watches_fork;
}			directory = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---------- transactions ---------- */

static bool
from_before_fork(const environment *e)
{
	return e->generation != atomic_load_explicit(&directory.generation, memory_order_relaxed);
}

static st_status
fail_forked(st_error *err)
{
	return st_fail(err, ST_INVALID, "store was opened before a fork and cannot be used in this process");
}

/*
 * Another process enlarged the map.  Remapping needs that nobody else in this process reads, so only the single user
 * of an environment may do it.
 */
static int
follow_map(environment *e)
{
	int			rc = MDB_MAP_RESIZED;

	pthread_mutex_lock(&directory.mutex);
	if (e->references == 1)
		rc = mdb_env_set_mapsize(e->env, 0);
	pthread_mutex_unlock(&directory.mutex);
	return rc;
}

static int
try_begin_read(lmdb_store *store)
{
	return store->reader != NULL ? mdb_txn_renew(store->reader)
		: mdb_txn_begin(store->e->env, NULL, MDB_RDONLY, &store->reader);
}

/* Ends with mdb_txn_reset(store->reader). */
static st_status
begin_read(lmdb_store *store, st_error *err)
{
	int			rc;

	if (from_before_fork(store->e))
		return fail_forked(err);
	rc = try_begin_read(store);
	if (rc == 0)
		return ST_OK;
	if (rc == MDB_READERS_FULL)
		rc = mdb_reader_check(store->e->env, NULL);
	else if (rc == MDB_MAP_RESIZED)
		rc = follow_map(store->e);
	if (rc == 0)
		rc = try_begin_read(store);
	return rc == 0 ? ST_OK : lmdb_fail(err, rc, "begin reading from the store");
}

static st_status
open_cursor(lmdb_store *store, st_error *err)
{
	int			rc = store->cursor != NULL ? mdb_cursor_renew(store->reader, store->cursor)
		: mdb_cursor_open(store->reader, store->e->dbs.data, &store->cursor);

	return rc == 0 ? ST_OK : lmdb_fail(err, rc, "open a cursor");
}

static st_status
read_owner(MDB_txn *txn, MDB_dbi meta, st_owner *owner, st_error *err)
{
	MDB_val		key = {sizeof(OWNER_KEY) - 1, OWNER_KEY};
	MDB_val		value;
	int			rc = mdb_get(txn, meta, &key, &value);

	*owner = (st_owner) {0};
	if (rc == MDB_NOTFOUND)
		return ST_OK;
	if (rc != 0)
		return lmdb_fail(err, rc, "read the owner of the store");
	if (!st_owner_decode((st_slice) {value.mv_data, value.mv_size}, owner))
		return lmdb_fail_corrupt(err, "its owner record cannot be read");
	return ST_OK;
}

/* On success the write locks are held until end_write(). */
static st_status
begin_write(lmdb_store *store, MDB_txn **txn, st_error *err)
{
	const st_options *options = store->options;
	environment *e = store->e;
	int			rc;

	if (from_before_fork(e))
		return fail_forked(err);
	if (atomic_fetch_add_explicit(&e->writes, 1, memory_order_relaxed) % READER_CHECK_WRITES == READER_CHECK_WRITES - 1)
		mdb_reader_check(e->env, NULL);
	if (options->write_lock != NULL)
		options->write_lock(options->callback_arg);
	rc = mdb_txn_begin(e->env, NULL, 0, txn);
	if (rc == MDB_MAP_RESIZED && (rc = follow_map(e)) == 0)
		rc = mdb_txn_begin(e->env, NULL, 0, txn);
	if (rc == 0)
		return ST_OK;
	if (options->write_unlock != NULL)
		options->write_unlock(options->callback_arg);
	return lmdb_fail(err, rc, "begin writing to the store");
}

/*
 * Commits when status is ST_OK.  A commit that fails for want of space left nothing behind; after any other failure
 * only a look at the store tells.
 */
static st_status
end_write(lmdb_store *store, MDB_txn *txn, st_status status, st_error *err)
{
	const st_options *options = store->options;

	if (status != ST_OK)
		mdb_txn_abort(txn);
	else
	{
		int			rc = mdb_txn_commit(txn);

		if (rc != 0)
		{
			status = lmdb_fail(err, rc, "commit to the store");
			err->ambiguous = status != ST_FULL && status != ST_NOMEM;
		}
	}
	if (options->write_unlock != NULL)
		options->write_unlock(options->callback_arg);
	return status;
}

static st_status
begin_owned_write(lmdb_store *store, MDB_txn **txn, st_error *err)
{
	st_owner	present;
	st_status	status = begin_write(store, txn, err);

	if (status != ST_OK)
		return status;
	status = read_owner(*txn, store->e->dbs.meta, &present, err);
	if (status == ST_OK)
		status = st_check_owner(&present, &store->assumed, err);
	return status == ST_OK ? ST_OK : end_write(store, *txn, status, err);
}

/* ---------- requests ---------- */

static st_status
lmdb_get(void *state, st_space space, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err)
{
	lmdb_store *store = state;
	st_status	status = begin_read(store, err);

	(void) space;
	if (status != ST_OK)
		return status;
	for (uint32_t i = 0; i < nkeys && status == ST_OK; i++)
	{
		st_slice	value = {0};
		int			rc = lmdb_find(&store->e->dbs, store->reader, keys[i], &value);

		if (rc != 0 && rc != MDB_NOTFOUND)
			status = lmdb_fail(err, rc, "read from the store");
		else if (!st_answer_add(result, keys[i], value, rc == 0))
			status = st_fail(err, ST_NOMEM, "out of memory");
	}
	mdb_txn_reset(store->reader);
	return status;
}

static st_status
lmdb_get_range(void *state, st_slice start, st_slice end, uint32_t limit, size_t max_bytes, bool reverse,
			   st_result *result, bool *complete, st_error *err)
{
	lmdb_store *store = state;
	lmdb_range	range = {.start = start, .end = end, .limit = limit, .max_bytes = max_bytes, .reverse = reverse};
	st_status	status = begin_read(store, err);

	if (status != ST_OK)
		return status;
	status = open_cursor(store, err);
	if (status == ST_OK)
		status = lmdb_scan(&store->e->dbs, store->reader, store->cursor, &range, result, complete, err);
	mdb_txn_reset(store->reader);
	return status;
}

static st_status
lmdb_write(void *state, st_space space, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	lmdb_store *store = state;
	MDB_txn    *txn;
	int			rc = 0;
	st_status	status = begin_owned_write(store, &txn, err);

	(void) space;
	if (status != ST_OK)
		return status;
	for (uint32_t i = 0; i < nops && rc == 0; i++)
		rc = ops[i].del ? lmdb_delete(&store->e->dbs, txn, ops[i].key)
			: lmdb_put(&store->e->dbs, txn, ops[i].key, ops[i].value);
	if (rc != 0)
		status = lmdb_fail(err, rc, "write to the store");
	status = end_write(store, txn, status, err);
	if (status == ST_OK)
		memset(acked, true, nops * sizeof(bool));
	return status;
}

static st_status
delete_piece(lmdb_store *store, MDB_txn *txn, st_slice start, st_slice end, uint32_t *ndeleted, bool *more,
			 st_error *err)
{
	st_result	keys = {0};
	lmdb_range	range = {.start = start, .end = end, .limit = DELETE_PIECE, .keys_only = true};
	bool		complete = true;
	MDB_cursor *cursor;
	st_status	status;
	int			rc = mdb_cursor_open(txn, store->e->dbs.data, &cursor);

	if (rc != 0)
		return lmdb_fail(err, rc, "open a cursor");
	status = lmdb_scan(&store->e->dbs, txn, cursor, &range, &keys, &complete, err);
	mdb_cursor_close(cursor);
	for (uint32_t i = 0; i < keys.nrecs && status == ST_OK; i++)
	{
		rc = lmdb_delete(&store->e->dbs, txn, keys.recs[i].key);
		if (rc != 0)
			status = lmdb_fail(err, rc, "delete from the store");
	}
	*ndeleted = keys.nrecs;
	*more = !complete;
	st_result_free(&keys);
	return status;
}

static st_status
lmdb_delete_range(void *state, st_slice start, st_slice end, uint32_t *ndeleted, bool *more, st_error *err)
{
	lmdb_store *store = state;
	MDB_txn    *txn;
	st_status	status = begin_owned_write(store, &txn, err);

	if (status != ST_OK)
		return status;
	status = delete_piece(store, txn, start, end, ndeleted, more, err);
	return end_write(store, txn, status, err);
}

static st_status
lmdb_sync(void *state, st_error *err)
{
	lmdb_store *store = state;
	int			rc;

	if (from_before_fork(store->e))
		return fail_forked(err);
	rc = mdb_env_sync(store->e->env, 1);
	return rc == 0 ? ST_OK : lmdb_fail(err, rc, "sync the store to disk");
}

static st_status
lmdb_claim(void *state, const char *owner, uint64_t *epoch, st_error *err)
{
	lmdb_store *store = state;
	st_owner	present;
	uint8_t		bytes[8 + ST_MAX_OWNER];
	MDB_txn    *txn;
	st_status	status = begin_write(store, &txn, err);

	if (status != ST_OK)
		return status;
	status = read_owner(txn, store->e->dbs.meta, &present, err);
	if (status == ST_OK)
		status = st_raise_epoch(&present, owner, err);
	if (status == ST_OK)
	{
		MDB_val		key = {sizeof(OWNER_KEY) - 1, OWNER_KEY};
		MDB_val		value = {st_owner_encode(bytes, &present), bytes};
		int			rc = mdb_put(txn, store->e->dbs.meta, &key, &value, 0);

		if (rc != 0)
			status = lmdb_fail(err, rc, "write the owner of the store");
	}
	status = end_write(store, txn, status, err);
	if (status == ST_OK)
		status = lmdb_sync(store, err);
	if (status != ST_OK)
		return status;
	store->assumed = present;
	*epoch = present.epoch;
	return ST_OK;
}

static void
lmdb_assume(void *state, const char *owner, uint64_t epoch)
{
	st_set_owner(&((lmdb_store *) state)->assumed, owner, epoch);
}

/* ---------- opening ---------- */

static void
note_fork(void)
{
	atomic_fetch_add_explicit(&directory.generation, 1, memory_order_relaxed);
}

/* The three databases, made when the environment is new and empty.  Runs in one transaction. */
static st_status
open_databases(environment *e, MDB_txn *txn, bool create, st_error *err)
{
	MDB_val		key = {sizeof(FORMAT_KEY) - 1, FORMAT_KEY};
	MDB_val		value;
	uint8_t		format[ST_FORMAT_LEN];
	uint32_t	version;
	MDB_stat	stat;
	MDB_dbi		root;
	int			rc = mdb_dbi_open(txn, "meta", 0, &e->dbs.meta);

	if (rc == MDB_NOTFOUND)
	{
		rc = mdb_dbi_open(txn, NULL, 0, &root);
		if (rc == 0)
			rc = mdb_stat(txn, root, &stat);
		if (rc != 0)
			return lmdb_fail(err, rc, "open the store");
		if (stat.ms_entries > 0)
			return st_fail(err, ST_CORRUPT, "the LMDB environment holds something else than a Nemo store");
		if (!create)
			return st_fail(err, ST_UNAVAILABLE, "the LMDB environment is empty");
		rc = mdb_dbi_open(txn, "meta", MDB_CREATE, &e->dbs.meta);
		st_format_encode(format);
		value = (MDB_val) {sizeof(format), format};
		if (rc == 0)
			rc = mdb_put(txn, e->dbs.meta, &key, &value, 0);
		if (rc == 0)
			rc = mdb_dbi_open(txn, "data", MDB_CREATE, &e->dbs.data);
		if (rc == 0)
			rc = mdb_dbi_open(txn, "long", MDB_CREATE, &e->dbs.longs);
		return rc == 0 ? ST_OK : lmdb_fail(err, rc, "create the store");
	}
	if (rc == 0)
		rc = mdb_get(txn, e->dbs.meta, &key, &value);
	if (rc == MDB_NOTFOUND ||
		(rc == 0 && !st_format_decode((st_slice) {value.mv_data, value.mv_size}, &version)))
		return st_fail(err, ST_CORRUPT, "the LMDB environment holds something else than a Nemo store");
	if (rc == 0 && version != ST_FORMAT_VERSION)
		return st_fail(err, ST_INVALID, "store has format %u, this version of Nemo reads and writes %u", version,
					   ST_FORMAT_VERSION);
	if (rc == 0)
		rc = mdb_dbi_open(txn, "data", 0, &e->dbs.data);
	if (rc == 0)
		rc = mdb_dbi_open(txn, "long", 0, &e->dbs.longs);
	if (rc == MDB_NOTFOUND)
		return lmdb_fail_corrupt(err, "a database is missing");
	return rc == 0 ? ST_OK : lmdb_fail(err, rc, "open the store");
}

/* ---------- files that were cut short ---------- */

static _Thread_local sigjmp_buf beyond_end;

static void
on_sigbus(int signal_number)
{
	(void) signal_number;
	siglongjmp(beyond_end, 1);
}

/* How many pages in first .. last the free list names, by a cursor over it. */
static int
count_free_pages(MDB_cursor *cursor, size_t first, size_t last, size_t *found)
{
	MDB_val		key;
	MDB_val		value;
	int			rc;

	while ((rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0)
	{
		size_t		npages;

		if (value.mv_size < sizeof(npages))
			return MDB_CORRUPTED;
		memcpy(&npages, value.mv_data, sizeof(npages));
		for (size_t i = 1; i <= npages && i < value.mv_size / sizeof(npages); i++)
		{
			size_t		page;

			memcpy(&page, (const char *) value.mv_data + i * sizeof(page), sizeof(page));
			*found += page >= first && page <= last;
		}
	}
	return rc == MDB_NOTFOUND ? 0 : rc;
}

/* The same, and 0 pages where the free list itself lies beyond the end of the file. */
static int
count_free_pages_carefully(MDB_txn *txn, size_t first, size_t last, size_t *found)
{
	struct sigaction catch = {.sa_handler = on_sigbus};
	struct sigaction before;
	MDB_cursor *cursor;
	volatile int rc = mdb_cursor_open(txn, FREE_DATABASE, &cursor);

	*found = 0;
	if (rc != 0)
		return rc;
	sigaction(SIGBUS, &catch, &before);
	if (sigsetjmp(beyond_end, 1) == 0)
		rc = count_free_pages(cursor, first, last, found);
	else
		*found = 0;
	sigaction(SIGBUS, &before, NULL);
	mdb_cursor_close(cursor);
	return rc;
}

/*
 * Pages beyond the end of the file would be met as SIGBUS much later.  LMDB leaves pages unwritten that a transaction
 * took and gave back, so a file may end early, but then the free list names all that is missing.  The order matters
 * while others write: a page that was missing when `last` was read is free in txn or has been written since.
 */
static st_status
check_length(environment *e, const char *file, st_error *err)
{
	MDB_envinfo info;
	MDB_stat	stats;
	MDB_txn    *txn;
	struct stat st;
	size_t		present;
	size_t		found;
	int			rc = mdb_env_info(e->env, &info);

	if (rc == 0)
		rc = mdb_env_stat(e->env, &stats);
	if (rc == 0)
		rc = mdb_txn_begin(e->env, NULL, MDB_RDONLY, &txn);
	if (rc != 0)
		return lmdb_fail(err, rc, "examine the store");
	if (stat(file, &st) != 0)
		rc = errno;
	present = rc == 0 ? (size_t) st.st_size / stats.ms_psize : 0;
	found = 0;
	if (rc == 0 && present <= info.me_last_pgno)
		rc = count_free_pages_carefully(txn, present, info.me_last_pgno, &found);
	mdb_txn_abort(txn);
	if (rc != 0)
		return lmdb_fail(err, rc, "examine the store");
	if (present + found <= info.me_last_pgno)
		return lmdb_fail_corrupt(err, "its file has been cut short");
	return ST_OK;
}

/* ---------- environments ---------- */

static st_status
begin_and_open_databases(environment *e, bool create, st_error *err)
{
	unsigned	flags = create ? 0 : MDB_RDONLY;
	MDB_txn    *txn;
	st_status	status;
	int			rc = mdb_txn_begin(e->env, NULL, flags, &txn);

	if (rc != 0)
		return lmdb_fail(err, rc, "open the store");
	status = open_databases(e, txn, create, err);
	if (status != ST_OK)
	{
		mdb_txn_abort(txn);
		return status;
	}
	rc = mdb_txn_commit(txn);
	return rc == 0 ? ST_OK : lmdb_fail(err, rc, "open the store");
}

static st_status
open_environment(environment *e, const char *path, const char *file, const st_options *options, st_error *err)
{
	uint64_t	map_size = options->map_size > 0 ? options->map_size : DEFAULT_MAP_SIZE;
	st_status	status;
	int			rc = mdb_env_create(&e->env);

	if (rc != 0)
		return lmdb_fail(err, rc, "open the store");
	mdb_env_set_maxdbs(e->env, 3);
	mdb_env_set_maxreaders(e->env, options->max_readers > 0 ? options->max_readers : DEFAULT_MAX_READERS);
	rc = mdb_env_set_mapsize(e->env, map_size);
	if (rc == 0)
		rc = mdb_env_open(e->env, path, MDB_NOTLS | MDB_NOMETASYNC, 0600);
	if (rc == 0)
		rc = mdb_reader_check(e->env, NULL);
	if (rc != 0)
		return lmdb_fail(err, rc, "open the store");
	status = check_length(e, file, err);
	if (status != ST_OK)
		return status;
	/* only a new store needs the write lock */
	status = begin_and_open_databases(e, false, err);
	if (status == ST_UNAVAILABLE && options->create)
		status = begin_and_open_databases(e, true, err);
	return status;
}

/* The data file, which must be there already unless it may be created; *st is left zero when it is not. */
static st_status
examine_place(const char *path, const char *file, bool create, struct stat *st, st_error *err)
{
	memset(st, 0, sizeof(*st));
	if (create && mkdir(path, 0700) != 0 && errno != EEXIST)
		return lmdb_fail(err, errno, "create the directory of the store");
	if (stat(file, st) != 0)
	{
		if (errno == ENOENT && create)
			return ST_OK;
		if (errno == ENOENT || errno == ENOTDIR)
			return st_fail(err, ST_UNAVAILABLE, "there is no store in \"%.150s\"", path);
		return lmdb_fail(err, errno, "look for the store");
	}
	if (!S_ISREG(st->st_mode))
		return st_fail(err, ST_CORRUPT, "\"%.150s\" is not a file", file);
	if (st->st_size == 0 && !create)
		return st_fail(err, ST_UNAVAILABLE, "the store in \"%.150s\" is empty", path);
	return ST_OK;
}

/* Under the directory's mutex. */
static st_status
acquire_environment(const char *path, const st_options *options, environment **found, st_error *err)
{
	char		file[4200];
	struct stat st;
	environment *e;
	st_status	status;

	if (snprintf(file, sizeof(file), "%s/data.mdb", path) >= (int) sizeof(file))
		return st_fail(err, ST_INVALID, "path of the store is too long");
	status = examine_place(path, file, options->create, &st, err);
	if (status != ST_OK)
		return status;
	for (e = directory.environments; e != NULL; e = e->next)
		if (st.st_ino != 0 && e->inode == st.st_ino && e->device == st.st_dev && !from_before_fork(e))
		{
			e->references++;
			*found = e;
			return ST_OK;
		}
	e = calloc(1, sizeof(*e));
	if (e == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	status = open_environment(e, path, file, options, err);
	if (status == ST_OK && stat(file, &st) != 0)
		status = lmdb_fail(err, errno, "look for the store");
	if (status != ST_OK)
	{
		if (e->env != NULL)
			mdb_env_close(e->env);
		free(e);
		return status;
	}
	e->device = st.st_dev;
	e->inode = st.st_ino;
	e->generation = atomic_load_explicit(&directory.generation, memory_order_relaxed);
	e->references = 1;
	e->next = directory.environments;
	directory.environments = e;
	*found = e;
	return ST_OK;
}

static st_status
lmdb_open(const char *rest, const st_options *options, void **state, st_limits *limits, st_error *err)
{
	lmdb_store *store = calloc(1, sizeof(*store));
	st_status	status = ST_OK;

	if (store == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	pthread_mutex_lock(&directory.mutex);
	if (!directory.watches_fork && pthread_atfork(NULL, NULL, note_fork) != 0)
		status = st_fail(err, ST_NOMEM, "out of memory");
	else
	{
		directory.watches_fork = true;
		status = acquire_environment(rest, options, &store->e, err);
	}
	pthread_mutex_unlock(&directory.mutex);
	if (status != ST_OK)
	{
		free(store);
		return status;
	}
	store->options = options;
	*limits = (st_limits)
	{
		.max_key = LMDB_MAX_KEY, .max_value = ST_MAX_VALUE, .max_batch_ops = 1024, .max_batch_bytes = (size_t) 16 << 20,
		.multi_get = true, .reverse = true
	};
	*state = store;
	return ST_OK;
}

/* What was opened before a fork belongs to the parent: its memory is given up, nothing else is touched. */
static void
lmdb_close(void *state)
{
	lmdb_store *store = state;
	environment *e = store->e;

	if (!from_before_fork(e))
	{
		if (store->cursor != NULL)
			mdb_cursor_close(store->cursor);
		if (store->reader != NULL)
			mdb_txn_abort(store->reader);
		pthread_mutex_lock(&directory.mutex);
		if (--e->references == 0)
		{
			for (environment **link = &directory.environments; *link != NULL; link = &(*link)->next)
				if (*link == e)
				{
					*link = e->next;
					break;
				}
			mdb_env_close(e->env);
			free(e);
		}
		pthread_mutex_unlock(&directory.mutex);
	}
	free(store);
}

const st_driver st_lmdb_driver = {
	.scheme = "lmdb",
	.open = lmdb_open,
	.close = lmdb_close,
	.get = lmdb_get,
	.get_range = lmdb_get_range,
	.write = lmdb_write,
	.delete_range = lmdb_delete_range,
	.sync = lmdb_sync,
	.claim = lmdb_claim,
	.assume = lmdb_assume,
};
