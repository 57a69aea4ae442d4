/*
 * fakestore.c
 *	  The store of fakestore.h: a sorted array of records under one mutex, and a list of writes still in flight.
 *
 * It keeps to the contract of remote/store.h and to nothing more: an answer is as short, a failure as unclear and a
 * write as late as the contract allows.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "fakestore.h"

typedef struct bytes
{
	uint8_t    *p;				/* NULL = absent */
	size_t		len;
} bytes;

typedef struct rec
{
	bytes		key, val;
	bytes		synced;			/* value at the last sync, when unsynced */
	bool		unsynced;
} rec;

/* a write that is outstanding: under way in its thread, or in doubt after an ambiguous failure */
typedef struct flight
{
	struct flight *next;
	st_store   *owner;
	bytes		key, val;
	bool		doubt;
} flight;

struct fs_store
{
	pthread_mutex_t mu;
	rec		  **recs;
	uint32_t	n, cap;
	flight	   *flights;
	uint64_t	rng;
	fs_faults	faults;
	fs_hook		hook;
	fs_observer observe;
	void	   *hook_arg;
	uint32_t	fail_count[ST_NOPS];
	st_status	fail_status[ST_NOPS];
	bool		fail_ambiguous[ST_NOPS];
	bool		partial_set;
	uint32_t	partial_n, page;
	uint64_t	requests[ST_NOPS];
	uint64_t	violations;
	char		words[200];
};

struct st_store
{
	fs_store   *fs;
};

static uint64_t
next(fs_store *fs)
{
	uint64_t	z = (fs->rng += 0x9e3779b97f4a7c15ULL);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	return z ^ (z >> 31);
}

static bool
chance(fs_store *fs, uint32_t permille)
{
	return permille && next(fs) % 1000 < permille;
}

static bytes
copy(const void *p, size_t len)
{
	bytes		b = {malloc(len + 1), len};

	if (!b.p)
		abort();
	if (len)
		memcpy(b.p, p, len);
	return b;
}

static int
cmp(const void *a, size_t alen, const void *b, size_t blen)
{
	size_t		n = alen < blen ? alen : blen;
	int			c = n ? memcmp(a, b, n) : 0;

	return c ? c : (alen < blen ? -1 : alen > blen);
}

/* index of the first record with key >= the given one */
static uint32_t
lower(fs_store *fs, const void *key, size_t klen)
{
	uint32_t	lo = 0,
				hi = fs->n;

	while (lo < hi)
	{
		uint32_t	mid = lo + (hi - lo) / 2;

		if (cmp(fs->recs[mid]->key.p, fs->recs[mid]->key.len, key, klen) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static rec *
find(fs_store *fs, const void *key, size_t klen)
{
	uint32_t	i = lower(fs, key, klen);

	if (i < fs->n && cmp(fs->recs[i]->key.p, fs->recs[i]->key.len, key, klen) == 0)
		return fs->recs[i];
	return NULL;
}

/* val.p is taken over; NULL deletes */
static void
apply(fs_store *fs, const void *key, size_t klen, bytes val)
{
	uint32_t	i = lower(fs, key, klen);
	rec		   *r;

	if (i < fs->n && cmp(fs->recs[i]->key.p, fs->recs[i]->key.len, key, klen) == 0)
		r = fs->recs[i];
	else
	{
		if (!val.p)
			return;
		if (fs->n == fs->cap)
		{
			fs->cap = fs->cap ? fs->cap * 2 : 64;
			fs->recs = realloc(fs->recs, fs->cap * sizeof(rec *));
			if (!fs->recs)
				abort();
		}
		memmove(fs->recs + i + 1, fs->recs + i, (fs->n - i) * sizeof(rec *));
		r = fs->recs[i] = calloc(1, sizeof(rec));
		r->key = copy(key, klen);
		fs->n++;
	}
	if (!r->unsynced)
	{
		r->unsynced = true;
		r->synced = r->val;
	}
	else
		free(r->val.p);
	r->val = val;
}

static void
drop_record(fs_store *fs, uint32_t i)
{
	rec		   *r = fs->recs[i];

	free(r->key.p);
	free(r->val.p);
	free(r->synced.p);
	free(r);
	memmove(fs->recs + i, fs->recs + i + 1, (fs->n - i - 1) * sizeof(rec *));
	fs->n--;
}

static void
free_flight(flight *f)
{
	free(f->key.p);
	free(f->val.p);
	free(f);
}

/* Writes in doubt of `owner` (NULL = everyone's) land with the given chance; with `final` the others never will. */
static void
land(fs_store *fs, st_store *owner, uint32_t permille, bool final)
{
	for (flight **pp = &fs->flights; *pp;)
	{
		flight	   *f = *pp;

		if (!f->doubt || (owner && f->owner != owner))
		{
			pp = &f->next;
			continue;
		}
		if (chance(fs, permille))
		{
			apply(fs, f->key.p, f->key.len, f->val);
			f->val.p = NULL;
		}
		else if (!final)
		{
			pp = &f->next;
			continue;
		}
		*pp = f->next;
		free_flight(f);
	}
}

static st_status
fail(st_error *err, st_status code, bool ambiguous)
{
	if (err)
	{
		err->code = code;
		err->ambiguous = ambiguous;
		snprintf(err->message, sizeof(err->message), "fake store: injected failure");
	}
	return code;
}

static void
call_hook(fs_store *fs, fs_point point, st_opcode op)
{
	if (fs->hook)
		fs->hook(fs->hook_arg, point, op);
}

static void
delay(fs_store *fs)
{
	uint32_t	us;
	struct timespec ts;

	if (!fs->faults.max_delay_us)
		return;
	pthread_mutex_lock(&fs->mu);
	us = (uint32_t) (next(fs) % fs->faults.max_delay_us);
	pthread_mutex_unlock(&fs->mu);
	ts.tv_sec = us / 1000000;
	ts.tv_nsec = (long) (us % 1000000) * 1000;
	nanosleep(&ts, NULL);
}

/* Locked: counts the request, lets late writes land, and says whether it fails. */
static st_status
begin(fs_store *fs, st_opcode op, uint32_t permille, bool *ambiguous)
{
	*ambiguous = false;
	fs->requests[op]++;
	if (fs->faults.ambiguous)
		land(fs, NULL, 250, false);
	if (fs->fail_count[op])
	{
		fs->fail_count[op]--;
		*ambiguous = fs->fail_ambiguous[op];
		return fs->fail_status[op];
	}
	return chance(fs, permille) ? ST_UNAVAILABLE : ST_OK;
}

/* ---- the interface of remote/store.h ----------------------------------------------------------------------------- */

void
st_close(st_store *store)
{
	if (store)
	{
		pthread_mutex_lock(&store->fs->mu);
		land(store->fs, store, 500, true);
		pthread_mutex_unlock(&store->fs->mu);
		free(store);
	}
}

const st_limits *
st_get_limits(const st_store *store)
{
	static const st_limits limits = {.max_key = 4096, .max_value = 64 << 20, .max_batch_ops = 1000,
	.max_batch_bytes = 64 << 20, .multi_get = true, .reverse = true};

	(void) store;
	return &limits;
}

void
st_set_inject(st_store *store, const st_inject *inject)
{
	(void) store;
	(void) inject;
}

void
st_result_free(st_result *result)
{
	free(result->mem);
	memset(result, 0, sizeof(*result));
}

/* rs[i] NULL = not found; keys for that case */
static void
build(st_result *result, rec **rs, uint32_t n, const st_slice *keys)
{
	size_t		size = n * sizeof(st_record) + 1;
	uint8_t    *p;

	st_result_free(result);
	for (uint32_t i = 0; i < n; i++)
		size += keys ? keys[i].len : rs[i]->key.len;
	for (uint32_t i = 0; i < n; i++)
		size += rs[i] ? rs[i]->val.len : 0;
	result->mem = malloc(size);
	if (!result->mem)
		abort();
	result->recs = result->mem;
	result->nrecs = n;
	p = (uint8_t *) (result->recs + n);
	for (uint32_t i = 0; i < n; i++)
	{
		st_record  *out = &result->recs[i];
		size_t		klen = keys ? keys[i].len : rs[i]->key.len;

		memset(out, 0, sizeof(*out));
		memcpy(p, keys ? keys[i].data : rs[i]->key.p, klen);
		out->key = (st_slice) {p, klen};
		p += klen;
		out->found = rs[i] != NULL;
		out->value = (st_slice) {p, 0};
		if (rs[i])
		{
			if (rs[i]->val.len)
				memcpy(p, rs[i]->val.p, rs[i]->val.len);
			out->value.len = rs[i]->val.len;
			p += rs[i]->val.len;
		}
	}
}

st_status
st_get(st_store *store, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err)
{
	fs_store   *fs = store->fs;
	rec		  **rs = calloc(nkeys + 1, sizeof(rec *));
	st_status	s;
	bool		amb;

	call_hook(fs, FS_BEFORE, ST_OP_GET);
	delay(fs);
	pthread_mutex_lock(&fs->mu);
	s = begin(fs, ST_OP_GET, fs->faults.fail_get, &amb);
	if (s == ST_OK)
	{
		for (uint32_t i = 0; i < nkeys; i++)
		{
			rs[i] = find(fs, keys[i].data, keys[i].len);
			if (rs[i] && !rs[i]->val.p)
				rs[i] = NULL;
		}
		build(result, rs, nkeys, keys);
		result->complete = true;
	}
	pthread_mutex_unlock(&fs->mu);
	free(rs);
	delay(fs);
	call_hook(fs, FS_AFTER, ST_OP_GET);
	return s == ST_OK ? ST_OK : fail(err, s, false);
}

st_status
st_get_range(st_store *store, st_slice start, st_slice end, uint32_t limit, size_t max_bytes, bool reverse,
			 st_result *result, st_error *err)
{
	fs_store   *fs = store->fs;
	st_status	s;
	bool		amb;

	call_hook(fs, FS_BEFORE, ST_OP_GET_RANGE);
	delay(fs);
	pthread_mutex_lock(&fs->mu);
	s = begin(fs, ST_OP_GET_RANGE, fs->faults.fail_range, &amb);
	if (s == ST_OK)
	{
		uint32_t	lo = lower(fs, start.data, start.len);
		uint32_t	hi = end.len ? lower(fs, end.data, end.len) : fs->n;
		rec		  **rs = calloc(fs->n + 1, sizeof(rec *));
		uint32_t	n = 0,
					most = limit ? limit : UINT32_MAX;
		size_t		bytes = 0;
		bool		complete = true;

		if (fs->page && fs->page < most)
			most = fs->page;
		if (chance(fs, fs->faults.truncate))
		{
			uint32_t	few = 1 + (uint32_t) (next(fs) % 4);

			most = few < most ? few : most;
		}
		for (uint32_t i = lo; i < hi; i++)
		{
			rec		   *r = fs->recs[reverse ? hi - 1 - (i - lo) : i];

			if (!r->val.p)
				continue;
			if (n == most || (n && max_bytes && bytes + r->val.len > max_bytes))
			{
				complete = false;
				break;
			}
			bytes += r->val.len;
			rs[n++] = r;
		}
		/* a store that stopped at its limit need not know that nothing follows */
		if (n == most && next(fs) % 2)
			complete = false;
		build(result, rs, n, NULL);
		result->complete = complete;
		free(rs);
	}
	pthread_mutex_unlock(&fs->mu);
	delay(fs);
	call_hook(fs, FS_AFTER, ST_OP_GET_RANGE);
	return s == ST_OK ? ST_OK : fail(err, s, false);
}

/* Locked: registers the batch as outstanding; two outstanding writes of one key break C4. */
static void
take_off(fs_store *fs, st_store *store, const st_op *ops, uint32_t nops)
{
	for (uint32_t i = 0; i < nops; i++)
	{
		flight	   *f;

		for (f = fs->flights; f; f = f->next)
			if (cmp(f->key.p, f->key.len, ops[i].key.data, ops[i].key.len) == 0)
				break;
		if (f)
		{
			int			at = 0;

			if (!fs->violations++)
			{
				at = snprintf(fs->words, sizeof(fs->words), "written twice at once (%s first write, %s store): ",
							  f->doubt ? "in doubt" : "running", f->owner == store ? "same" : "other");
				for (size_t j = 0; j < f->key.len && at < (int) sizeof(fs->words) - 3; j++)
					at += snprintf(fs->words + at, sizeof(fs->words) - (size_t) at, "%02x", f->key.p[j]);
			}
		}
		f = calloc(1, sizeof(*f));
		f->owner = store;
		f->key = copy(ops[i].key.data, ops[i].key.len);
		if (!ops[i].del)
			f->val = copy(ops[i].value.data, ops[i].value.len);
		f->next = fs->flights;
		fs->flights = f;
	}
}

/* Locked: ends the flight of one operation of this thread. */
static void
touch_down(fs_store *fs, st_store *store, const st_op *op, bool happens, bool doubt)
{
	for (flight **pp = &fs->flights; *pp; pp = &(*pp)->next)
	{
		flight	   *f = *pp;

		if (f->doubt || f->owner != store || cmp(f->key.p, f->key.len, op->key.data, op->key.len) != 0)
			continue;
		if (doubt)
		{
			f->doubt = true;
			return;
		}
		if (happens)
		{
			apply(fs, f->key.p, f->key.len, f->val);
			f->val.p = NULL;
		}
		*pp = f->next;
		free_flight(f);
		return;
	}
}

st_status
st_write(st_store *store, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	fs_store   *fs = store->fs;
	st_status	s;
	bool		ambiguous;
	uint32_t	good = nops;

	for (uint32_t i = 0; i < nops; i++)
		acked[i] = false;
	for (uint32_t i = 0; i < nops; i++)
		for (uint32_t j = 0; j < i; j++)
			if (cmp(ops[i].key.data, ops[i].key.len, ops[j].key.data, ops[j].key.len) == 0)
				return fail(err, ST_INVALID, false);
	if (fs->observe)
		fs->observe(fs->hook_arg, ops, nops);
	pthread_mutex_lock(&fs->mu);
	take_off(fs, store, ops, nops);
	pthread_mutex_unlock(&fs->mu);
	call_hook(fs, FS_BEFORE, ST_OP_UPSERT);
	delay(fs);
	pthread_mutex_lock(&fs->mu);
	s = begin(fs, ST_OP_UPSERT, fs->faults.fail_write, &ambiguous);
	if (s != ST_OK)
		good = 0;
	else if (fs->partial_set)
	{
		fs->partial_set = false;
		good = fs->partial_n < nops ? fs->partial_n : nops;
	}
	else if (chance(fs, fs->faults.partial))
		good = (uint32_t) (next(fs) % nops);
	else if (chance(fs, fs->faults.ambiguous))
	{
		good = (uint32_t) (next(fs) % nops);
		ambiguous = true;
	}
	if (s == ST_OK && good < nops)
		s = ambiguous ? ST_TIMEOUT : ST_UNAVAILABLE;
	for (uint32_t i = 0; i < nops; i++)
	{
		if (i < good)
		{
			acked[i] = true;
			touch_down(fs, store, &ops[i], true, false);
		}
		else if (ambiguous)
			touch_down(fs, store, &ops[i], false, true);
		else
			touch_down(fs, store, &ops[i], false, false);
	}
	if (ambiguous && fs->faults.ambiguous)
		land(fs, store, 300, false);
	pthread_mutex_unlock(&fs->mu);
	delay(fs);
	call_hook(fs, FS_AFTER, ST_OP_UPSERT);
	return s == ST_OK ? ST_OK : fail(err, s, ambiguous);
}

st_status
st_resolve(st_store *store, st_error *err)
{
	fs_store   *fs = store->fs;
	st_status	s = ST_OK;

	pthread_mutex_lock(&fs->mu);
	if (chance(fs, fs->faults.fail_resolve))
		s = ST_UNAVAILABLE;
	else
		land(fs, store, 500, true);
	pthread_mutex_unlock(&fs->mu);
	return s == ST_OK ? ST_OK : fail(err, s, false);
}

st_status
st_delete_range(st_store *store, st_slice start, st_slice end, st_error *err)
{
	fs_store   *fs = store->fs;
	st_status	s;
	bool		amb;

	pthread_mutex_lock(&fs->mu);
	s = begin(fs, ST_OP_DELETE_RANGE, fs->faults.fail_delete_range, &amb);
	if (s == ST_OK)
		for (uint32_t i = lower(fs, start.data, start.len); i < fs->n; i++)
		{
			rec		   *r = fs->recs[i];

			if (end.len && cmp(r->key.p, r->key.len, end.data, end.len) >= 0)
				break;
			if (r->val.p)
				apply(fs, r->key.p, r->key.len, (bytes) {NULL, 0});
		}
	pthread_mutex_unlock(&fs->mu);
	return s == ST_OK ? ST_OK : fail(err, s, false);
}

st_status
st_sync(st_store *store, st_error *err)
{
	fs_store   *fs = store->fs;
	st_status	s;
	bool		amb;

	pthread_mutex_lock(&fs->mu);
	s = begin(fs, ST_OP_SYNC, fs->faults.fail_sync, &amb);
	if (s == ST_OK)
		for (uint32_t i = fs->n; i-- > 0;)
		{
			rec		   *r = fs->recs[i];

			if (!r->unsynced)
				continue;
			free(r->synced.p);
			r->synced = (bytes) {NULL, 0};
			r->unsynced = false;
			if (!r->val.p)
				drop_record(fs, i);
		}
	pthread_mutex_unlock(&fs->mu);
	return s == ST_OK ? ST_OK : fail(err, s, false);
}

const char *
st_status_name(st_status status)
{
	return status == ST_OK ? "ok" : "failed";
}

/* ---- control ----------------------------------------------------------------------------------------------------- */

fs_store *
fs_create(uint64_t seed)
{
	fs_store   *fs = calloc(1, sizeof(*fs));

	pthread_mutex_init(&fs->mu, NULL);
	fs->rng = seed;
	return fs;
}

void
fs_destroy(fs_store *fs)
{
	while (fs->n)
		drop_record(fs, fs->n - 1);
	while (fs->flights)
	{
		flight	   *f = fs->flights;

		fs->flights = f->next;
		free_flight(f);
	}
	free(fs->recs);
	pthread_mutex_destroy(&fs->mu);
	free(fs);
}

st_store *
fs_open(fs_store *fs)
{
	st_store   *s = calloc(1, sizeof(*s));

	s->fs = fs;
	return s;
}

void
fs_set_faults(fs_store *fs, const fs_faults *faults)
{
	pthread_mutex_lock(&fs->mu);
	if (faults)
		fs->faults = *faults;
	else
		memset(&fs->faults, 0, sizeof(fs->faults));
	pthread_mutex_unlock(&fs->mu);
}

void
fs_set_hook(fs_store *fs, fs_hook hook, fs_observer observe, void *arg)
{
	fs->hook = hook;
	fs->observe = observe;
	fs->hook_arg = arg;
}

void
fs_fail_next(fs_store *fs, st_opcode op, uint32_t count, st_status status, bool ambiguous)
{
	pthread_mutex_lock(&fs->mu);
	fs->fail_count[op] = count;
	fs->fail_status[op] = status;
	fs->fail_ambiguous[op] = ambiguous;
	pthread_mutex_unlock(&fs->mu);
}

void
fs_partial_next(fs_store *fs, uint32_t n)
{
	pthread_mutex_lock(&fs->mu);
	fs->partial_set = true;
	fs->partial_n = n;
	pthread_mutex_unlock(&fs->mu);
}

void
fs_set_page(fs_store *fs, uint32_t n)
{
	fs->page = n;
}

void
fs_land(fs_store *fs)
{
	pthread_mutex_lock(&fs->mu);
	land(fs, NULL, 1000, true);
	pthread_mutex_unlock(&fs->mu);
}

uint32_t
fs_in_flight(fs_store *fs)
{
	uint32_t	n = 0;

	pthread_mutex_lock(&fs->mu);
	for (flight *f = fs->flights; f; f = f->next)
		n++;
	pthread_mutex_unlock(&fs->mu);
	return n;
}

void
fs_poke(fs_store *fs, const void *key, size_t klen, const void *val, size_t vlen)
{
	pthread_mutex_lock(&fs->mu);
	apply(fs, key, klen, copy(val, vlen));
	pthread_mutex_unlock(&fs->mu);
}

void
fs_remove(fs_store *fs, const void *key, size_t klen)
{
	pthread_mutex_lock(&fs->mu);
	apply(fs, key, klen, (bytes) {NULL, 0});
	pthread_mutex_unlock(&fs->mu);
}

uint8_t *
fs_peek(fs_store *fs, const void *key, size_t klen, size_t *vlen)
{
	rec		   *r;
	bytes		b = {NULL, 0};

	pthread_mutex_lock(&fs->mu);
	r = find(fs, key, klen);
	if (r && r->val.p)
		b = copy(r->val.p, r->val.len);
	pthread_mutex_unlock(&fs->mu);
	*vlen = b.len;
	return b.p;
}

void
fs_each(fs_store *fs, void (*visit) (void *arg, const st_record *rec), void *arg)
{
	pthread_mutex_lock(&fs->mu);
	for (uint32_t i = 0; i < fs->n; i++)
	{
		rec		   *r = fs->recs[i];
		st_record	out = {.key = {r->key.p, r->key.len}, .value = {r->val.p, r->val.len}, .found = true};

		if (r->val.p)
			visit(arg, &out);
	}
	pthread_mutex_unlock(&fs->mu);
}

static void
count_one(void *arg, const st_record *rec)
{
	(void) rec;
	++*(uint32_t *) arg;
}

uint32_t
fs_count(fs_store *fs)
{
	uint32_t	n = 0;

	fs_each(fs, count_one, &n);
	return n;
}

void
fs_crash(fs_store *fs)
{
	pthread_mutex_lock(&fs->mu);
	/* the requests of the dead processes either arrive before the new ones start or never */
	land(fs, NULL, 500, true);
	for (uint32_t i = fs->n; i-- > 0;)
	{
		rec		   *r = fs->recs[i];

		if (!r->unsynced)
			continue;
		if (next(fs) % 2)
		{
			free(r->val.p);
			r->val = r->synced;
		}
		else
			free(r->synced.p);
		r->synced = (bytes) {NULL, 0};
		r->unsynced = false;
		if (!r->val.p)
			drop_record(fs, i);
	}
	pthread_mutex_unlock(&fs->mu);
}

uint64_t
fs_requests(fs_store *fs, st_opcode op)
{
	uint64_t	n;

	pthread_mutex_lock(&fs->mu);
	n = fs->requests[op];
	pthread_mutex_unlock(&fs->mu);
	return n;
}

uint64_t
fs_violations(fs_store *fs, const char **words)
{
	uint64_t	n;

	pthread_mutex_lock(&fs->mu);
	n = fs->violations;
	if (words)
		*words = fs->words;
	pthread_mutex_unlock(&fs->mu);
	return n;
}
