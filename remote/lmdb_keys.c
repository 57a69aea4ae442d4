/*
 * lmdb_keys.c
 *	  Keys in LMDB: where a key of any length lies, and ranges in byte order over all of them.
 *
 * Theory in README.md, section "Long keys".  Works inside the caller's transaction; functions that return an int
 * return LMDB's code.
 */
#include <errno.h>

#include "lmdb_keys.h"
#include "stored.h"

#define MAX_PHYSICAL 511		/* LMDB's longest key; exactly this long = a marker */
#define MAX_DIRECT (MAX_PHYSICAL - 1)	/* longest physical key that is not a marker */
#define BASE_LEN 8				/* branch id in front of a key in `long` */
#define MAX_DEPTH (2 + LMDB_MAX_KEY / (MAX_DIRECT - BASE_LEN))

/* ---------- errors ---------- */

st_status
lmdb_fail(st_error *err, int rc, const char *doing)
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

st_status
lmdb_fail_corrupt(st_error *err, const char *what)
{
	return st_fail(err, ST_CORRUPT, "store is damaged: %s", what);
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
new_branch(const lmdb_databases *dbs, MDB_txn *txn, MDB_dbi dbi, MDB_val *marker, uint8_t base[BASE_LEN])
{
	MDB_val		key = {sizeof(LMDB_BRANCH_KEY) - 1, LMDB_BRANCH_KEY};
	MDB_val		value;
	uint64_t	id = 0;
	int			rc = mdb_get(txn, dbs->meta, &key, &value);

	if (rc == 0 && !st_branch_decode((st_slice) {value.mv_data, value.mv_size}, &id))
		return MDB_CORRUPTED;
	if (rc != 0 && rc != MDB_NOTFOUND)
		return rc;
	st_put_u64(base, id + 1);
	value = (MDB_val) {BASE_LEN, base};
	rc = mdb_put(txn, dbs->meta, &key, &value, 0);
	return rc != 0 ? rc : mdb_put(txn, dbi, marker, &value, 0);
}

/*
 * Find where a key belongs.  Without `create`, MDB_NOTFOUND when a branch on the way does not exist.  The markers
 * passed are left in path[0 .. at->level - 1] when path is not NULL (MAX_DEPTH places).
 */
static int
find_place(const lmdb_databases *dbs, MDB_txn *txn, st_slice rest, bool create, place *at, place *path)
{
	uint8_t		base[BASE_LEN] = {0};
	size_t		base_len = 0;

	at->dbi = dbs->data;
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
			rc = new_branch(dbs, txn, at->dbi, &marker, base);
		if (rc != 0)
			return rc;
		base_len = BASE_LEN;
		at->dbi = dbs->longs;
		at->level++;
	}
	return 0;
}

int
lmdb_find(const lmdb_databases *dbs, MDB_txn *txn, st_slice key, st_slice *value)
{
	MDB_val		physical = {key.len, (void *) key.data};
	MDB_val		data;
	MDB_dbi		dbi = dbs->data;
	place		at;
	int			rc;

	if (key.len > MAX_DIRECT)
	{
		rc = find_place(dbs, txn, key, false, &at, NULL);
		if (rc != 0)
			return rc;
		physical = (MDB_val) {at.len, at.key};
		dbi = at.dbi;
	}
	rc = mdb_get(txn, dbi, &physical, &data);
	if (rc == 0)
		*value = (st_slice) {data.mv_data, data.mv_size};
	return rc;
}

int
lmdb_put(const lmdb_databases *dbs, MDB_txn *txn, st_slice key, st_slice value)
{
	place		at;
	MDB_val		physical;
	MDB_val		data = {value.len, (void *) value.data};
	int			rc = find_place(dbs, txn, key, true, &at, NULL);

	if (rc != 0)
		return rc;
	physical = (MDB_val) {at.len, at.key};
	return mdb_put(txn, at.dbi, &physical, &data, 0);
}

static int
branch_is_empty(const lmdb_databases *dbs, MDB_txn *txn, const uint8_t *base, bool *empty)
{
	MDB_cursor *cursor;
	MDB_val		key = {BASE_LEN, (void *) base};
	MDB_val		value;
	int			rc = mdb_cursor_open(txn, dbs->longs, &cursor);

	if (rc != 0)
		return rc;
	rc = mdb_cursor_get(cursor, &key, &value, MDB_SET_RANGE);
	*empty = rc == MDB_NOTFOUND || (rc == 0 && (key.mv_size < BASE_LEN || memcmp(key.mv_data, base, BASE_LEN) != 0));
	mdb_cursor_close(cursor);
	return rc == MDB_NOTFOUND ? 0 : rc;
}

/* An absent key is no error.  The last key of a branch takes the branch with it. */
int
lmdb_delete(const lmdb_databases *dbs, MDB_txn *txn, st_slice key)
{
	place		at;
	place		path[MAX_DEPTH];
	MDB_val		physical;
	int			rc = find_place(dbs, txn, key, false, &at, path);

	if (rc != 0)
		return rc == MDB_NOTFOUND ? 0 : rc;
	physical = (MDB_val) {at.len, at.key};
	rc = mdb_del(txn, at.dbi, &physical, NULL);
	if (rc == MDB_NOTFOUND)
		return 0;
	while (rc == 0 && at.level > 0)
	{
		bool		empty = false;

		rc = branch_is_empty(dbs, txn, at.key, &empty);
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
	const lmdb_databases *dbs;
	MDB_txn    *txn;
	const lmdb_range *range;
	st_result  *result;
	st_error   *err;
	uint32_t	nrecs;
	size_t		bytes;
	bool		full;			/* there was a record more than asked for */
	uint8_t		key[LMDB_MAX_KEY];	/* what the levels above the present one stand for */
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
	l->high_inclusive = false;
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

	if (!s->range->reverse)
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
	st_slice	copied = {s->range->keys_only ? NULL : value->mv_data, s->range->keys_only ? 0 : value->mv_size};

	if ((s->range->limit > 0 && s->nrecs == s->range->limit) ||
		(s->range->max_bytes > 0 && s->bytes >= s->range->max_bytes))
	{
		s->full = true;
		return ST_OK;
	}
	if (l->prefix_len > 0)
	{
		if (l->prefix_len + rest_len > LMDB_MAX_KEY)
			return lmdb_fail_corrupt(s->err, "a key is too long");
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
		return lmdb_fail_corrupt(s->err, "the branch of a long key cannot be read");
	if (l.number >= MAX_DEPTH || l.prefix_len > LMDB_MAX_KEY)
		return lmdb_fail_corrupt(s->err, "a key is too long");
	if (!narrow_bounds(b, (st_slice) {part, part_len}, &inner))
		return ST_OK;
	memcpy(s->key + outer->prefix_len, part, part_len);
	st_put_u64(base, id);
	set_level(&l, base, &inner);
	rc = mdb_cursor_open(s->txn, s->dbs->longs, &cursor);
	if (rc != 0)
		return lmdb_fail(s->err, rc, "open a cursor");
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
		if (s->range->reverse ? below_low(l, &key) : above_high(l, &key))
			return ST_OK;
		if (key.mv_size < l->base_len)
			return lmdb_fail_corrupt(s->err, "the branch of a long key cannot be read");
		status = key.mv_size == MAX_PHYSICAL ? scan_branch(s, l, b, &key, &value) : emit(s, l, &key, &value);
		if (status == ST_OK && !s->full)
			rc = mdb_cursor_get(cursor, &key, &value, s->range->reverse ? MDB_PREV : MDB_NEXT);
	}
	if (status == ST_OK && rc != 0 && rc != MDB_NOTFOUND)
		return lmdb_fail(s->err, rc, "read a range of the store");
	return status;
}

st_status
lmdb_scan(const lmdb_databases *dbs, MDB_txn *txn, MDB_cursor *cursor, const lmdb_range *range, st_result *result,
		  bool *complete, st_error *err)
{
	static const uint8_t no_base[BASE_LEN];
	bounds		b = {range->start, range->end, range->end.len > 0};
	level		l;
	scan		s;
	st_status	status;

	/* not cleared as a whole: the key's bytes and the bounds' are written before they are read */
	s.dbs = dbs;
	s.txn = txn;
	s.range = range;
	s.result = result;
	s.err = err;
	s.nrecs = 0;
	s.bytes = 0;
	s.full = false;
	l.number = 0;
	l.base_len = 0;
	l.prefix_len = 0;
	set_level(&l, no_base, &b);
	status = scan_level(&s, &l, &b, cursor);
	*complete = !s.full;
	return status;
}
