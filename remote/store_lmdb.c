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
#include <lmdb.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "stored.h"

#define MAX_KEY ((size_t) 4096)	/* longest key, bytes */
#define MAX_PHYSICAL 511		/* LMDB's longest key; exactly this long = a branch */
#define MAX_DIRECT (MAX_PHYSICAL - 1)	/* longest key that is not a branch */
#define BASE_LEN 8				/* branch id in front of a key in `long` */
#define MAX_DEPTH (2 + MAX_KEY / (MAX_DIRECT - BASE_LEN))
#define DEFAULT_MAP_SIZE ((uint64_t) 1 << 40)
#define DEFAULT_MAX_READERS 1024
#define DELETE_PIECE 500		/* records deleted in one transaction of a range delete */
#define READER_CHECK_WRITES 1024	/* look for dead readers every so many writes */

#define FORMAT_KEY "format"
#define OWNER_KEY "owner"
#define BRANCH_KEY "branch"		/* last branch id given out */

typedef struct environment
{
	struct environment *next;	/* in the directory */
	unsigned	references;		/* under the directory's mutex */
	dev_t		device;			/* of the data file */
	ino_t		inode;
	unsigned	generation;		/* of forks when it was opened */
	MDB_env    *env;
	MDB_dbi		data;
	MDB_dbi		longs;
	MDB_dbi		meta;
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

/* ---------- errors ---------- */

static st_status
fail_rc(st_error *err, int rc, const char *doing)
{
	st_status	code = ST_UNAVAILABLE;

	switch (rc)
	{
		case MDB_MAP_FULL:
		case MDB_TXN_FULL:
		case ENOSPC:
		case EDQUOT:
		case EFBIG:
			code = ST_FULL;
			break;
		case MDB_INVALID:
		case MDB_VERSION_MISMATCH:
		case MDB_CORRUPTED:
		case MDB_PAGE_NOTFOUND:
		case MDB_INCOMPATIBLE:
		case MDB_BAD_DBI:
			code = ST_CORRUPT;
			break;
		case EACCES:
		case EPERM:
		case EROFS:
			code = ST_REFUSED;
			break;
		case ENOMEM:
			code = ST_NOMEM;
			break;
		case MDB_BAD_VALSIZE:
		case EINVAL:
			code = ST_INVALID;
			break;
	}
	return st_fail(err, code, "could not %s: %s", doing, mdb_strerror(rc));
}

static st_status
fail_corrupt(st_error *err, const char *what)
{
	return st_fail(err, ST_CORRUPT, "store is damaged: %s", what);
}

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
	return rc == 0 ? ST_OK : fail_rc(err, rc, "begin reading from the store");
}

static st_status
open_cursor(lmdb_store *store, st_error *err)
{
	int			rc = store->cursor != NULL ? mdb_cursor_renew(store->reader, store->cursor)
		: mdb_cursor_open(store->reader, store->e->data, &store->cursor);

	return rc == 0 ? ST_OK : fail_rc(err, rc, "open a cursor");
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
		return fail_rc(err, rc, "read the owner of the store");
	if (!st_owner_decode((st_slice) {value.mv_data, value.mv_size}, owner))
		return fail_corrupt(err, "its owner record cannot be read");
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
	return fail_rc(err, rc, "begin writing to the store");
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
			status = fail_rc(err, rc, "commit to the store");
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
	status = read_owner(*txn, store->e->meta, &present, err);
	if (status == ST_OK)
		status = st_check_owner(&present, &store->assumed, err);
	return status == ST_OK ? ST_OK : end_write(store, *txn, status, err);
}

/* ---------- long keys ---------- */

/*
 * Where a key is: database and physical key, and the branches that lead there.  Level 0 is `data` without a base,
 * level n > 0 is `long` under a branch id.
 */
typedef struct place
{
	MDB_dbi		dbi;
	unsigned	level;
	size_t		len;
	uint8_t		key[MAX_PHYSICAL];
} place;

/* The physical key of `rest` under the level's base, or of the branch it continues in: then true. */
static bool
make_physical(const uint8_t *base, size_t base_len, st_slice rest, uint8_t key[MAX_PHYSICAL], size_t *len)
{
	size_t		room = MAX_DIRECT - base_len;
	size_t		take = rest.len < room ? rest.len : room;

	if (base_len > 0)
		memcpy(key, base, base_len);
	if (take > 0)
		memcpy(key + base_len, rest.data, take);
	*len = base_len + take;
	if (rest.len <= room)
		return false;
	key[(*len)++] = 0;
	return true;
}

/* Give `marker` a branch of its own; its id is returned in base. */
static int
new_branch(environment *e, MDB_txn *txn, MDB_dbi dbi, MDB_val *marker, uint8_t base[BASE_LEN])
{
	MDB_val		key = {sizeof(BRANCH_KEY) - 1, BRANCH_KEY};
	MDB_val		value;
	uint64_t	id = 0;
	int			rc = mdb_get(txn, e->meta, &key, &value);

	if (rc == 0 && !st_branch_decode((st_slice) {value.mv_data, value.mv_size}, &id))
		return MDB_CORRUPTED;
	if (rc != 0 && rc != MDB_NOTFOUND)
		return rc;
	st_put_u64(base, id + 1);
	value = (MDB_val) {BASE_LEN, base};
	rc = mdb_put(txn, e->meta, &key, &value, 0);
	return rc != 0 ? rc : mdb_put(txn, dbi, marker, &value, 0);
}

/*
 * Find where a key belongs.  Without `create`, MDB_NOTFOUND when a branch on the way does not exist.  The markers
 * passed are left in path[0 .. at->level - 1] when path is not NULL (MAX_DEPTH places).
 */
static int
find_place(environment *e, MDB_txn *txn, st_slice rest, bool create, place *at, place *path)
{
	uint8_t		base[BASE_LEN];
	size_t		base_len = 0;

	at->dbi = e->data;
	at->level = 0;
	while (make_physical(base, base_len, rest, at->key, &at->len))
	{
		MDB_val		marker = {at->len, at->key};
		MDB_val		value;
		uint64_t	id;
		int			rc = mdb_get(txn, at->dbi, &marker, &value);

		if (path != NULL)
			path[at->level] = *at;
		rest.data = (const uint8_t *) rest.data + (MAX_DIRECT - base_len);
		rest.len -= MAX_DIRECT - base_len;
		if (rc == 0)
		{
			if (!st_branch_decode((st_slice) {value.mv_data, value.mv_size}, &id))
				return MDB_CORRUPTED;
			st_put_u64(base, id);
		}
		else if (rc == MDB_NOTFOUND && create)
			rc = new_branch(e, txn, at->dbi, &marker, base);
		if (rc != 0)
			return rc;
		base_len = BASE_LEN;
		at->dbi = e->longs;
		at->level++;
	}
	return 0;
}

static int
put_record(environment *e, MDB_txn *txn, st_slice key, st_slice value)
{
	place		at;
	MDB_val		physical;
	MDB_val		data = {value.len, (void *) value.data};
	int			rc = find_place(e, txn, key, true, &at, NULL);

	if (rc != 0)
		return rc;
	physical = (MDB_val) {at.len, at.key};
	return mdb_put(txn, at.dbi, &physical, &data, 0);
}

static int
branch_is_empty(environment *e, MDB_txn *txn, const uint8_t *base, bool *empty)
{
	MDB_cursor *cursor;
	MDB_val		key = {BASE_LEN, (void *) base};
	MDB_val		value;
	int			rc = mdb_cursor_open(txn, e->longs, &cursor);

	if (rc != 0)
		return rc;
	rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
	*empty = rc == MDB_NOTFOUND || (rc == 0 && (key.mv_size < BASE_LEN || memcmp(key.mv_data, base, BASE_LEN) != 0));
	mdb_cursor_close(cursor);
	return rc == MDB_NOTFOUND ? 0 : rc;
}

/* An absent key is no error.  The last key of a branch takes the branch with it. */
static int
delete_record(environment *e, MDB_txn *txn, st_slice key)
{
	place		at;
	place		path[MAX_DEPTH];
	MDB_val		physical;
	int			rc = find_place(e, txn, key, false, &at, path);

	if (rc != 0)
		return rc == MDB_NOTFOUND ? 0 : rc;
	physical = (MDB_val) {at.len, at.key};
	rc = mdb_del(txn, at.dbi, &physical, NULL);
	if (rc == MDB_NOTFOUND)
		return 0;
	while (rc == 0 && at.level > 0)
	{
		bool		empty = false;

		rc = branch_is_empty(e, txn, at.key, &empty);
		if (rc != 0 || !empty)
			break;
		at = path[at.level - 1];
		physical = (MDB_val) {at.len, at.key};
		rc = mdb_del(txn, at.dbi, &physical, NULL);
	}
	return rc;
}

/* ---------- ranges ---------- */

typedef struct scan
{
	environment *e;
	MDB_txn    *txn;
	bool		reverse;
	bool		keys_only;		/* records get empty values */
	uint32_t	limit;
	size_t		max_bytes;
	st_result  *result;
	st_error   *err;
	uint32_t	nrecs;
	size_t		bytes;
	bool		full;			/* there was a record more than asked for */
	uint8_t		key[MAX_KEY];	/* what the levels above the present one stand for */
} scan;

/* The part of [start, end) that lies in one branch, relative to it. */
typedef struct bounds
{
	st_slice	start;
	st_slice	end;
	bool		bounded;		/* else end does not matter */
} bounds;

/*
 * One level of a scan.  Physical order within a level is key order: a marker follows the one key that is its prefix,
 * and stands for all the keys that continue it.
 */
typedef struct level
{
	unsigned	number;
	size_t		base_len;
	size_t		prefix_len;		/* bytes of scan.key */
	size_t		low_len;
	size_t		high_len;
	bool		high_inclusive;
	bool		has_high;
	uint8_t		low[MAX_PHYSICAL];	/* no smaller physical key belongs to the range */
	uint8_t		high[MAX_PHYSICAL];
} level;

static bool
starts_with(st_slice key, st_slice prefix)
{
	return key.len >= prefix.len && (prefix.len == 0 || memcmp(key.data, prefix.data, prefix.len) == 0);
}

static st_slice
skip_bytes(st_slice key, size_t by)
{
	return (st_slice) {(const uint8_t *) key.data + by, key.len - by};
}

/* False when nothing of the range begins with `prefix` and goes on. */
static bool
narrow_bounds(const bounds *outer, st_slice prefix, bounds *inner)
{
	*inner = (bounds) {0};
	if (starts_with(outer->start, prefix))
		inner->start = skip_bytes(outer->start, prefix.len);
	else if (st_compare(outer->start, prefix) > 0)
		return false;
	if (!outer->bounded)
		return true;
	if (starts_with(outer->end, prefix))
	{
		inner->end = skip_bytes(outer->end, prefix.len);
		inner->bounded = true;
		return inner->end.len > 0;
	}
	return st_compare(outer->end, prefix) > 0;
}

static void
set_level(level *l, const uint8_t *base, const bounds *b)
{
	make_physical(base, l->base_len, b->start, l->low, &l->low_len);
	l->has_high = true;
	if (b->bounded)
		l->high_inclusive = make_physical(base, l->base_len, b->end, l->high, &l->high_len);
	else if (l->base_len > 0)
	{
		/* ids stay far below 2^64 - 1 */
		st_put_u64(l->high, st_take_u64(base) + 1);
		l->high_len = BASE_LEN;
	}
	else
		l->has_high = false;
}

static bool
below_low(const level *l, const MDB_val *key)
{
	return st_compare((st_slice) {key->mv_data, key->mv_size}, (st_slice) {l->low, l->low_len}) < 0;
}

static bool
above_high(const level *l, const MDB_val *key)
{
	int			order;

	if (!l->has_high)
		return false;
	order = st_compare((st_slice) {key->mv_data, key->mv_size}, (st_slice) {l->high, l->high_len});
	return l->high_inclusive ? order > 0 : order >= 0;
}

static int
seek_first(const scan *s, const level *l, MDB_cursor *cursor, MDB_val *key, MDB_val *value)
{
	int			rc;

	if (!s->reverse)
	{
		*key = (MDB_val) {l->low_len, (void *) l->low};
		return mdb_cursor_get(cursor, key, value, l->low_len > 0 ? MDB_SET_RANGE : MDB_FIRST);
	}
	if (!l->has_high)
		return mdb_cursor_get(cursor, key, value, MDB_LAST);
	*key = (MDB_val) {l->high_len, (void *) l->high};
	rc = mdb_cursor_get(cursor, key, value, MDB_SET_RANGE);
	if (rc == MDB_NOTFOUND)
		return mdb_cursor_get(cursor, key, value, MDB_LAST);
	if (rc == 0 && above_high(l, key))
		return mdb_cursor_get(cursor, key, value, MDB_PREV);
	return rc;
}

static st_status
emit(scan *s, const level *l, const MDB_val *key, const MDB_val *value)
{
	const uint8_t *rest = (const uint8_t *) key->mv_data + l->base_len;
	size_t		rest_len = key->mv_size - l->base_len;
	st_slice	whole = {rest, rest_len};
	st_slice	copied = {s->keys_only ? NULL : value->mv_data, s->keys_only ? 0 : value->mv_size};

	if ((s->limit > 0 && s->nrecs == s->limit) || (s->max_bytes > 0 && s->bytes >= s->max_bytes))
	{
		s->full = true;
		return ST_OK;
	}
	if (l->prefix_len > 0)
	{
		if (l->prefix_len + rest_len > MAX_KEY)
			return fail_corrupt(s->err, "a key is too long");
		memcpy(s->key + l->prefix_len, rest, rest_len);
		whole = (st_slice) {s->key, l->prefix_len + rest_len};
	}
	if (!st_answer_add(s->result, whole, copied, true))
		return st_fail(s->err, ST_NOMEM, "out of memory");
	s->nrecs++;
	s->bytes += copied.len;
	return ST_OK;
}

static st_status scan_level(scan *s, const level *l, const bounds *b, MDB_cursor *cursor);

/* Scan the branch behind a marker. */
static st_status
scan_branch(scan *s, const level *outer, const bounds *b, const MDB_val *marker, const MDB_val *value)
{
	const uint8_t *part = (const uint8_t *) marker->mv_data + outer->base_len;
	size_t		part_len = MAX_DIRECT - outer->base_len;
	level		l = {.number = outer->number + 1, .base_len = BASE_LEN, .prefix_len = outer->prefix_len + part_len};
	uint8_t		base[BASE_LEN];
	uint64_t	id;
	bounds		inner;
	MDB_cursor *cursor;
	st_status	status;
	int			rc;

	if (!st_branch_decode((st_slice) {value->mv_data, value->mv_size}, &id) || id == UINT64_MAX)
		return fail_corrupt(s->err, "the branch of a long key cannot be read");
	if (l.number >= MAX_DEPTH || l.prefix_len > MAX_KEY)
		return fail_corrupt(s->err, "a key is too long");
	if (!narrow_bounds(b, (st_slice) {part, part_len}, &inner))
		return ST_OK;
	memcpy(s->key + outer->prefix_len, part, part_len);
	st_put_u64(base, id);
	set_level(&l, base, &inner);
	rc = mdb_cursor_open(s->txn, s->e->longs, &cursor);
	if (rc != 0)
		return fail_rc(s->err, rc, "open a cursor");
	status = scan_level(s, &l, &inner, cursor);
	mdb_cursor_close(cursor);
	return status;
}

static st_status
scan_level(scan *s, const level *l, const bounds *b, MDB_cursor *cursor)
{
	MDB_val		key;
	MDB_val		value;
	st_status	status = ST_OK;
	int			rc = seek_first(s, l, cursor, &key, &value);

	while (rc == 0 && status == ST_OK && !s->full)
	{
		if (s->reverse ? below_low(l, &key) : above_high(l, &key))
			return ST_OK;
		if (key.mv_size < l->base_len)
			return fail_corrupt(s->err, "the branch of a long key cannot be read");
		status = key.mv_size == MAX_PHYSICAL ? scan_branch(s, l, b, &key, &value) : emit(s, l, &key, &value);
		if (status == ST_OK && !s->full)
			rc = mdb_cursor_get(cursor, &key, &value, s->reverse ? MDB_PREV : MDB_NEXT);
	}
	if (status == ST_OK && rc != 0 && rc != MDB_NOTFOUND)
		return fail_rc(s->err, rc, "read a range of the store");
	return status;
}

/* `cursor` is over `data` in s->txn. */
static st_status
scan_range(scan *s, st_slice start, st_slice end, MDB_cursor *cursor)
{
	bounds		b = {start, end, end.len > 0};
	level		l = {0};

	set_level(&l, NULL, &b);
	return scan_level(s, &l, &b, cursor);
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
		MDB_val		value = {0, NULL};
		int			rc;

		if (keys[i].len <= MAX_DIRECT)
		{
			MDB_val		key = {keys[i].len, (void *) keys[i].data};

			rc = mdb_get(store->reader, store->e->data, &key, &value);
		}
		else
		{
			place		at;

			rc = find_place(store->e, store->reader, keys[i], false, &at, NULL);
			if (rc == 0)
			{
				MDB_val		key = {at.len, at.key};

				rc = mdb_get(store->reader, at.dbi, &key, &value);
			}
		}
		if (rc != 0 && rc != MDB_NOTFOUND)
			status = fail_rc(err, rc, "read from the store");
		else if (!st_answer_add(result, keys[i], (st_slice) {value.mv_data, value.mv_size}, rc == 0))
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
	scan		s;
	st_status	status = begin_read(store, err);

	if (status != ST_OK)
		return status;
	s.e = store->e;
	s.txn = store->reader;
	s.reverse = reverse;
	s.keys_only = false;
	s.limit = limit;
	s.max_bytes = max_bytes;
	s.result = result;
	s.err = err;
	s.nrecs = 0;
	s.bytes = 0;
	s.full = false;
	status = open_cursor(store, err);
	if (status == ST_OK)
		status = scan_range(&s, start, end, store->cursor);
	*complete = !s.full;
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
		rc = ops[i].del ? delete_record(store->e, txn, ops[i].key)
			: put_record(store->e, txn, ops[i].key, ops[i].value);
	if (rc != 0)
		status = fail_rc(err, rc, "write to the store");
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
	scan		s = {.e = store->e, .txn = txn, .keys_only = true, .limit = DELETE_PIECE, .result = &keys, .err = err};
	MDB_cursor *cursor;
	st_status	status;
	int			rc = mdb_cursor_open(txn, store->e->data, &cursor);

	if (rc != 0)
		return fail_rc(err, rc, "open a cursor");
	status = scan_range(&s, start, end, cursor);
	mdb_cursor_close(cursor);
	for (uint32_t i = 0; i < keys.nrecs && status == ST_OK; i++)
	{
		rc = delete_record(store->e, txn, keys.recs[i].key);
		if (rc != 0)
			status = fail_rc(err, rc, "delete from the store");
	}
	*ndeleted = keys.nrecs;
	*more = s.full;
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
	return rc == 0 ? ST_OK : fail_rc(err, rc, "sync the store to disk");
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
	status = read_owner(txn, store->e->meta, &present, err);
	if (status == ST_OK)
		status = st_raise_epoch(&present, owner, err);
	if (status == ST_OK)
	{
		MDB_val		key = {sizeof(OWNER_KEY) - 1, OWNER_KEY};
		MDB_val		value = {st_owner_encode(bytes, &present), bytes};
		int			rc = mdb_put(txn, store->e->meta, &key, &value, 0);

		if (rc != 0)
			status = fail_rc(err, rc, "write the owner of the store");
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
	int			rc = mdb_dbi_open(txn, "meta", 0, &e->meta);

	if (rc == MDB_NOTFOUND)
	{
		rc = mdb_dbi_open(txn, NULL, 0, &root);
		if (rc == 0)
			rc = mdb_stat(txn, root, &stat);
		if (rc != 0)
			return fail_rc(err, rc, "open the store");
		if (stat.ms_entries > 0)
			return st_fail(err, ST_CORRUPT, "the LMDB environment holds something else than a Nemo store");
		if (!create)
			return st_fail(err, ST_UNAVAILABLE, "the LMDB environment is empty");
		rc = mdb_dbi_open(txn, "meta", MDB_CREATE, &e->meta);
		st_format_encode(format);
		value = (MDB_val) {sizeof(format), format};
		if (rc == 0)
			rc = mdb_put(txn, e->meta, &key, &value, 0);
		if (rc == 0)
			rc = mdb_dbi_open(txn, "data", MDB_CREATE, &e->data);
		if (rc == 0)
			rc = mdb_dbi_open(txn, "long", MDB_CREATE, &e->longs);
		return rc == 0 ? ST_OK : fail_rc(err, rc, "create the store");
	}
	if (rc == 0)
		rc = mdb_get(txn, e->meta, &key, &value);
	if (rc == MDB_NOTFOUND ||
		(rc == 0 && !st_format_decode((st_slice) {value.mv_data, value.mv_size}, &version)))
		return st_fail(err, ST_CORRUPT, "the LMDB environment holds something else than a Nemo store");
	if (rc == 0 && version != ST_FORMAT_VERSION)
		return st_fail(err, ST_INVALID, "store has format %u, this version of Nemo reads and writes %u", version,
					   ST_FORMAT_VERSION);
	if (rc == 0)
		rc = mdb_dbi_open(txn, "data", 0, &e->data);
	if (rc == 0)
		rc = mdb_dbi_open(txn, "long", 0, &e->longs);
	if (rc == MDB_NOTFOUND)
		return fail_corrupt(err, "a database is missing");
	return rc == 0 ? ST_OK : fail_rc(err, rc, "open the store");
}

/* Pages beyond the end of the file would be met as SIGBUS. */
static st_status
check_length(environment *e, const char *file, st_error *err)
{
	MDB_envinfo info;
	MDB_stat	stats;
	struct stat st;

	if (mdb_env_info(e->env, &info) != 0 || mdb_env_stat(e->env, &stats) != 0 || stat(file, &st) != 0)
		return st_fail(err, ST_UNAVAILABLE, "could not examine \"%.150s\"", file);
	if ((uint64_t) st.st_size / stats.ms_psize < (uint64_t) info.me_last_pgno + 1)
		return fail_corrupt(err, "its file has been cut short");
	return ST_OK;
}

static st_status
open_environment(environment *e, const char *path, const char *file, const st_options *options, st_error *err)
{
	uint64_t	map_size = options->map_size > 0 ? options->map_size : DEFAULT_MAP_SIZE;
	MDB_txn    *txn;
	st_status	status;
	int			rc = mdb_env_create(&e->env);

	if (rc != 0)
		return fail_rc(err, rc, "open the store");
	mdb_env_set_maxdbs(e->env, 3);
	mdb_env_set_maxreaders(e->env, options->max_readers > 0 ? options->max_readers : DEFAULT_MAX_READERS);
	rc = mdb_env_set_mapsize(e->env, map_size);
	if (rc == 0)
		rc = mdb_env_open(e->env, path, MDB_NOTLS | MDB_NOMETASYNC, 0600);
	if (rc != 0)
		return fail_rc(err, rc, "open the store");
	status = check_length(e, file, err);
	if (status != ST_OK)
		return status;
	mdb_reader_check(e->env, NULL);
	rc = mdb_txn_begin(e->env, NULL, options->create ? 0 : MDB_RDONLY, &txn);
	if (rc == MDB_MAP_RESIZED && (rc = mdb_env_set_mapsize(e->env, 0)) == 0)
		rc = mdb_txn_begin(e->env, NULL, options->create ? 0 : MDB_RDONLY, &txn);
	if (rc != 0)
		return fail_rc(err, rc, "open the store");
	status = open_databases(e, txn, options->create, err);
	if (status != ST_OK)
	{
		mdb_txn_abort(txn);
		return status;
	}
	rc = mdb_txn_commit(txn);
	return rc == 0 ? ST_OK : fail_rc(err, rc, "open the store");
}

/* The data file, which must be there already unless it may be created; *st is left zero when it is not. */
static st_status
examine_place(const char *path, const char *file, bool create, struct stat *st, st_error *err)
{
	memset(st, 0, sizeof(*st));
	if (create && mkdir(path, 0700) != 0 && errno != EEXIST)
		return fail_rc(err, errno, "create the directory of the store");
	if (stat(file, st) != 0)
	{
		if (errno == ENOENT && create)
			return ST_OK;
		if (errno == ENOENT || errno == ENOTDIR)
			return st_fail(err, ST_UNAVAILABLE, "there is no store in \"%.150s\"", path);
		return fail_rc(err, errno, "look for the store");
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
		status = fail_rc(err, errno, "look for the store");
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
		.max_key = MAX_KEY, .max_value = ST_MAX_VALUE, .max_batch_ops = 1024, .max_batch_bytes = (size_t) 16 << 20,
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
