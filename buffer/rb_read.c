/*
 * rb_read.c
 *	  Point reads: what memory knows about a key, and fetching what it does not.
 *
 * A miss puts a sentinel in the key's place and marks it as being fetched, so that one thread asks the store and the
 * others wait (INVARIANTS B3).  A sentinel that nobody wrote over by the time the answer is here has seen no write of
 * its key, so the answer is still true; else it is dropped.  When there is no room for a sentinel, or later for the
 * record, the answer is handed on from private memory and not admitted (B4): nothing newer that was in the buffer when
 * the key was missed can have been older than the store's answer.
 */
#include <stdlib.h>
#include "rb_private.h"

#define PATIENCE	3			/* rounds after which what was fetched is kept privately in any case */

/* ---- blocks held until they are in the tree ---------------------------------------------------------------------- */

bool
rb_hold(rb_thread *t, rb_off block)
{
	if (t->nheld == t->held_cap)
	{
		uint32_t	cap = t->held_cap ? 2 * t->held_cap : 64;
		rb_off	   *p = realloc(t->held, cap * sizeof(*p));

		if (!p)
		{
			rb_free(t->rb, block);
			return false;
		}
		t->held = p;
		t->held_cap = cap;
	}
	t->held[t->nheld++] = block;
	return true;
}

void
rb_unhold(rb_thread *t, uint32_t to)
{
	t->nheld = to;
}

void
rb_release_held(rb_thread *t, uint32_t to)
{
	while (t->nheld > to)
		rb_free(t->rb, t->held[--t->nheld]);
}

/* ---- versions from stored records -------------------------------------------------------------------------------- */

typedef struct builder
{
	rb_thread  *t;
	bool		shared;
	rb_version *head;
	rb_version *last;
	bool		listed;
	bool		nomem;			/* private memory */
	bool		full;			/* shared memory */
} builder;

static rb_version *
private_version(rb_thread *t, uint32_t len, bool settled)
{
	rb_version *v = rb_pm_alloc(t, (settled ? sizeof(rb_version) : sizeof(rb_xversion)) + (size_t) len);

	if (!v)
		return NULL;
	memset(v, 0, settled ? sizeof(rb_version) : sizeof(rb_xversion));
	v->len = len;
	atomic_store_explicit(&v->flags, settled ? RB_SETTLED : 0, memory_order_relaxed);
	return v;
}

static bool
build_one(void *arg, const rb_stored_version *sv)
{
	builder    *b = arg;
	bool		settled = sv->xid == 0;
	rb_version *v;

	if (b->shared)
	{
		v = rb_version_alloc(b->t->rb, sv->data.len, settled);
		b->full = !v;
		if (v && !rb_hold(b->t, rb_offset(b->t->rb, settled ? (void *) v : (void *) rb_prefix(v))))
		{
			b->nomem = true;
			return false;
		}
	}
	else
	{
		v = private_version(b->t, sv->data.len, settled);
		b->nomem = !v;
	}
	if (!v)
		return false;
	v->kind = sv->kind;
	v->tag = sv->tag;
	if (sv->data.len)
		memcpy((uint8_t *) rb_data(v), sv->data.data, sv->data.len);
	if (!settled)
	{
		rb_xversion *x = (rb_xversion *) v;

		x->xid = sv->xid;
		x->cid = sv->cid;
		x->aux = sv->aux;
		b->listed = true;
	}
	if (b->last)
		atomic_store_explicit(&((rb_xversion *) b->last)->older, v, memory_order_relaxed);
	else
		b->head = v;
	b->last = v;
	return true;
}

rb_status
rb_build(rb_thread *t, st_slice bytes, bool shared, rb_version **head, bool *listed, rb_error *err)
{
	builder		b = {.t = t, .shared = shared};
	bool		ok = rb_decode_record(bytes.data, bytes.len, build_one, &b);

	*head = b.head;
	*listed = b.listed;
	if (b.nomem)
		return rb_fail(err, RB_NOMEM, "out of memory");
	if (b.full)
		return rb_fail(err, RB_FULL, "no room for a record in the record buffer: increase nemo.buffer_size");
	if (!ok)
		return rb_fail(err, RB_CORRUPT, "a stored record is damaged");
	return RB_OK;
}

/* ---- looking ----------------------------------------------------------------------------------------------------- */

rb_known
rb_look(rb_thread *t, const rb_key *k, const rb_version **head)
{
	rb_seen		seen;

	*head = NULL;
	rb_run_forward(t->rb, k, &seen, 1);
	if (rb_cmp_entry(seen.e, k) == 0)
	{
		if (seen.flags & RB_SENTINEL)
			return (seen.flags & RB_FETCHING) ? RB_K_FETCHING : RB_K_MISS;
		rb_touch(seen.e, seen.flags);
		*head = rb_ver_at(t->rb, seen.head);
		return *head ? RB_K_HEAD : RB_K_TOMBSTONE;
	}
	if ((seen.flags & RB_GAP) || !rb_in_tree(seen.e, k->tree))
		return RB_K_MISS;
	rb_touch(seen.e, seen.flags);
	return RB_K_GAP;
}

static void
count_look(rb_thread *t, rb_known known)
{
	rb_count(t, RB_C_LOOKUPS, 1);
	switch (known)
	{
		case RB_K_HEAD:
			rb_count(t, RB_C_HITS, 1);
			break;
		case RB_K_TOMBSTONE:
			rb_count(t, RB_C_TOMBSTONE_HITS, 1);
			break;
		case RB_K_GAP:
			rb_count(t, RB_C_GAP_HITS, 1);
			break;
		case RB_K_MISS:
		case RB_K_FETCHING:
			rb_count(t, RB_C_MISSES, 1);
			break;
	}
}

static inline bool
unknown(rb_known known)
{
	return known == RB_K_MISS || known == RB_K_FETCHING;
}

/* A miss is counted by the read that follows it. */
rb_status
rb_lookup(rb_thread *t, rb_slice key, const rb_version **head)
{
	rb_key		k = rb_mkkey(key.data, key.len);
	rb_known	known = rb_look(t, &k, head);

	if (unknown(known))
		return RB_UNKNOWN;
	count_look(t, known);
	return RB_OK;
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */

uint32_t
rb_fetch_channel(const void *key, uint32_t len)
{
	const uint8_t *p = key;
	uint32_t	h = 2166136261u;

	for (uint32_t i = 0; i < len; i++)
		h = (h ^ p[i]) * 16777619u;
	return RB_CH_FETCH + h % (RB_CHANNELS - RB_CH_FETCH);
}

rb_status
rb_await_fetch(rb_thread *t, rb_slice key, uint32_t round, rb_error *err)
{
	if (t->port->interrupted(t->port->ctx))
		return rb_fail(err, RB_CANCELED, "canceled while waiting for another process to fetch a record");
	rb_wait(t, &t->rb->fetch_waiters, rb_fetch_channel(key.data, key.len), round < 20 ? 1 : 10);
	return RB_OK;
}

/* Under the latch: is this still the sentinel that we put there or took over? */
static rb_entry *
find_mine(rb_thread *t, const rb_mine *m)
{
	rb_key		k = rb_mkkey(m->key.data, m->key.len);
	rb_path		path;
	bool		equal;
	rb_entry   *e = rb_find(t->rb, &k, &path, &equal);
	uint16_t	f = rb_flags(e);

	if (!equal || rb_offset(t->rb, e) != m->entry || !(f & RB_FETCHING))
		return NULL;
	/* a later sentinel in the same place would be somebody else's */
	if ((f & RB_SENTINEL) && atomic_load(&e->owner) != t->slotno)
		return NULL;
	return e;
}

static void
wake_fetch(rb_thread *t, rb_slice key)
{
	if (atomic_load(&t->rb->fetch_waiters))
		t->port->wake(t->port->ctx, rb_fetch_channel(key.data, key.len));
}

/* What is left of a fetch that came to nothing: the sentinels stay, and whoever comes next may fetch them. */
void
rb_release_mine(rb_thread *t)
{
	while (t->nmine)
	{
		rb_mine		m = t->mine[--t->nmine];
		rb_entry   *e;

		rb_lock(&t->rb->latch);
		e = find_mine(t, &m);
		if (e)
			rb_clear(e, RB_FETCHING);
		rb_unlock(&t->rb->latch);
		wake_fetch(t, m.key);
	}
}

typedef enum point_state
{
	P_TODO,
	P_KNOWN,					/* in the buffer when last looked at */
	P_CLAIMED,					/* fetched by this thread, with a sentinel */
	P_BARE,						/* fetched by this thread, without */
	P_AWAIT,					/* fetched by somebody else */
	P_PRIVATE					/* the answer is in `value` */
} point_state;

typedef struct point
{
	point_state state;
	rb_off		entry;			/* P_CLAIMED */
	bool		found;			/* P_PRIVATE */
	st_slice	value;
} point;

/* Under the latch: take the key for this thread.  block: room for a sentinel, or 0; set to 0 when used. */
static point_state
claim(rb_thread *t, rb_slice key, rb_off *block, point *p)
{
	rb_buffer  *rb = t->rb;
	rb_key		k = rb_mkkey(key.data, key.len);
	rb_path		path;
	bool		equal;
	rb_entry   *e = rb_find(rb, &k, &path, &equal);

	if (equal)
	{
		if (!(rb_flags(e) & RB_SENTINEL))
			return P_KNOWN;
		if (rb_flags(e) & RB_FETCHING)
			/* our own: the same key once more */
			return atomic_load(&e->owner) == t->slotno ? P_KNOWN : P_AWAIT;
		atomic_store(&e->owner, (uint16_t) t->slotno);
		rb_set(e, RB_FETCHING);
		p->entry = rb_offset(rb, e);
		return P_CLAIMED;
	}
	if (rb_in_tree(e, k.tree) && !(rb_flags(e) & RB_GAP))
		return P_KNOWN;
	if (!*block)
		return P_BARE;
	e = rb_entry_init(rb, *block, key, RB_GAP | RB_SENTINEL | RB_FETCHING, 0);
	atomic_store(&e->owner, (uint16_t) t->slotno);
	if (!rb_entry_add(rb, &path, e))
		return P_BARE;
	*block = 0;
	p->entry = rb_offset(rb, e);
	return P_CLAIMED;
}

static rb_status
claim_all(rb_thread *t, const rb_slice *keys, point *pt, const uint32_t *miss, uint32_t nmiss, rb_error *err)
{
	for (uint32_t i = 0; i < nmiss; i++)
	{
		uint32_t	m = miss[i];
		rb_status	status;
		rb_error	why = {0};
		rb_off		block = rb_alloc_evict(t, sizeof(rb_entry) + keys[m].len, &status, &why);
		uint32_t	held = t->nheld;

		if (!block && status == RB_CANCELED)
		{
			*err = why;
			return status;
		}
		if (block && !rb_hold(t, block))
			return rb_fail(err, RB_NOMEM, "out of memory");
		rb_lock(&t->rb->latch);
		pt[m].state = claim(t, keys[m], &block, &pt[m]);
		if (pt[m].state == P_CLAIMED)
			t->mine[t->nmine++] = (rb_mine) {pt[m].entry, keys[m]};
		rb_unlock(&t->rb->latch);
		if (block)
			rb_release_held(t, held);
		else
			rb_unhold(t, held);
	}
	return RB_OK;
}

static bool
keep_private(rb_thread *t, point *p, const st_record *rec)
{
	void	   *copy = rb_pm_alloc(t, rec->value.len + 1);

	if (!copy)
		return false;
	if (rec->value.len)
		memcpy(copy, rec->value.data, rec->value.len);
	p->found = rec->found;
	p->value = (st_slice) {copy, rec->value.len};
	p->state = P_PRIVATE;
	return true;
}

/* The store's answer for a key that has a sentinel. */
static rb_status
settle_claim(rb_thread *t, rb_slice key, point *p, const st_record *rec, bool keep, rb_error *err)
{
	rb_buffer  *rb = t->rb;
	rb_mine		m = {p->entry, key};
	rb_version *head = NULL;
	bool		listed = false,
				admitted = true;
	uint32_t	held = t->nheld;
	rb_entry   *e;
	rb_status	status = RB_OK;

	if (rec->found)
	{
		status = rb_build(t, rec->value, true, &head, &listed, err);
		if (status == RB_FULL)
		{
			rb_release_held(t, held);
			status = rb_clear_space(t, rec->value.len, err);
			if (status == RB_OK)
				status = rb_build(t, rec->value, true, &head, &listed, err);
		}
		if (status != RB_OK)
		{
			rb_release_held(t, held);
			if (status != RB_FULL)
				return status;
			admitted = false;
		}
	}
	rb_lock(&rb->latch);
	e = find_mine(t, &m);
	if (e && admitted && (rb_flags(e) & RB_SENTINEL))
	{
		rb_entry_resolve(rb, e, rb_offset(rb, head));
		if (listed)
			rb_set(e, RB_LISTED);
		rb_unhold(t, held);
		rb_count(t, RB_C_ADMITTED, 1);
	}
	if (e)
		rb_clear(e, RB_FETCHING);
	rb_unlock(&rb->latch);
	rb_release_held(t, held);
	wake_fetch(t, key);
	p->state = P_TODO;
	if ((!admitted || keep) && !keep_private(t, p, rec))
		return rb_fail(err, RB_NOMEM, "out of memory");
	return RB_OK;
}

/* One request for all that this thread has to fetch. */
static rb_status
fetch_points(rb_thread *t, const rb_slice *keys, point *pt, const uint32_t *miss, uint32_t nmiss, bool keep,
			 rb_error *err)
{
	st_slice   *ask = rb_pm_alloc(t, nmiss * sizeof(st_slice));
	uint32_t   *which = rb_pm_alloc(t, nmiss * sizeof(uint32_t));
	uint32_t	n = 0;
	st_store   *store;
	rb_status	status = RB_OK;

	if (!ask || !which)
		return rb_fail(err, RB_NOMEM, "out of memory");
	for (uint32_t i = 0; i < nmiss; i++)
		if (pt[miss[i]].state == P_CLAIMED || pt[miss[i]].state == P_BARE)
		{
			which[n] = miss[i];
			ask[n++] = (st_slice) {keys[miss[i]].data, keys[miss[i]].len};
		}
	if (n == 0)
		return RB_OK;
	store = rb_store(t, err);
	if (!store || st_get(store, ask, n, &t->result, &err->st) != ST_OK)
		return rb_fail_store(err);
	if (t->result.nrecs != n)
		return rb_fail(err, RB_STORE, "the store answered for %u keys instead of %u", t->result.nrecs, n);
	for (uint32_t i = 0; i < n && status == RB_OK; i++)
	{
		point	   *p = &pt[which[i]];
		const st_record *rec = &t->result.recs[i];

		if (p->state == P_CLAIMED)
			status = settle_claim(t, keys[which[i]], p, rec, keep, err);
		else if (!keep_private(t, p, rec))
			status = rb_fail(err, RB_NOMEM, "out of memory");
	}
	if (status == RB_OK)
		t->nmine = 0;			/* all of them are settled */
	return status;
}

/* Brings keys[from..n) into the buffer or private memory. */
static rb_status
gather(rb_thread *t, const rb_slice *keys, point *pt, uint32_t from, uint32_t n, bool first, bool keep, rb_error *err)
{
	uint32_t   *miss = rb_pm_alloc(t, (n - from) * sizeof(uint32_t));

	if (!miss)
		return rb_fail(err, RB_NOMEM, "out of memory");
	for (uint32_t round = 0;; round++)
	{
		uint32_t	nmiss = 0,
					await = n;
		rb_status	status;

		rb_enter(t);
		for (uint32_t i = from; i < n; i++)
		{
			rb_key		k = rb_mkkey(keys[i].data, keys[i].len);
			const rb_version *head;
			rb_known	known;

			if (pt[i].state == P_PRIVATE)
				continue;
			known = rb_look(t, &k, &head);
			pt[i].state = known == RB_K_MISS ? P_TODO : known == RB_K_FETCHING ? P_AWAIT : P_KNOWN;
			if (pt[i].state == P_TODO)
				miss[nmiss++] = i;
			else if (pt[i].state == P_AWAIT && await == n)
				await = i;
			if (first)
				count_look(t, known);
		}
		rb_leave(t);
		first = false;
		if (nmiss == 0 && await == n)
			return RB_OK;
		if (nmiss == 0)
			status = rb_await_fetch(t, keys[await], round, err);
		else
		{
			t->mine = rb_pm_alloc(t, nmiss * sizeof(rb_mine));
			t->nmine = 0;
			if (!t->mine)
				return rb_fail(err, RB_NOMEM, "out of memory");
			status = claim_all(t, keys, pt, miss, nmiss, err);
			if (status == RB_OK)
				status = fetch_points(t, keys, pt, miss, nmiss, keep || round >= PATIENCE, err);
			rb_release_mine(t);
		}
		if (status != RB_OK)
			return status;
	}
}

/* Shows one key; false = it is no longer known. */
static bool
show(rb_thread *t, rb_slice key, const point *p, uint32_t i, rb_visit visit, void *arg, bool *more, rb_status *status,
	 rb_error *err)
{
	rb_key		k = rb_mkkey(key.data, key.len);
	const rb_version *head = NULL;
	rb_version *built = NULL;
	bool		listed;

	*status = RB_OK;
	if (p->state == P_PRIVATE)
	{
		if (p->found)
			*status = rb_build(t, p->value, false, &built, &listed, err);
		head = built;
		if (*status != RB_OK)
			return true;
	}
	rb_enter(t);
	if (p->state != P_PRIVATE && unknown(rb_look(t, &k, &head)))
	{
		rb_leave(t);
		return false;
	}
	*more = visit(arg, i, key, head);
	rb_leave(t);
	return true;
}

static rb_status
read_keys(rb_thread *t, const rb_slice *keys, uint32_t n, rb_visit visit, void *arg, rb_error *err)
{
	point	   *pt = rb_pm_alloc(t, n * sizeof(point));
	uint32_t	next = 0,
				visits = 0;
	bool		more = true;
	rb_status	status;

	if (!pt)
		return rb_fail(err, RB_NOMEM, "out of memory");
	memset(pt, 0, n * sizeof(point));
	while (next < n && more)
	{
		status = gather(t, keys, pt, next, n, visits == 0, visits >= PATIENCE, err);
		if (status != RB_OK)
			return status;
		visits++;
		while (next < n && more && show(t, keys[next], &pt[next], next, visit, arg, &more, &status, err))
		{
			if (status != RB_OK)
				return status;
			next++;
		}
	}
	return RB_OK;
}

rb_status
rb_read_keys(rb_thread *t, const rb_slice *keys, uint32_t n, rb_visit visit, void *arg, rb_error *err)
{
	rb_status	status;

	for (uint32_t i = 0; i < n; i++)
		if (keys[i].len > RB_MAX_KEY || keys[i].len < RB_TREE_LEN)
			return rb_fail(err, RB_TOOLONG, "key of %u bytes, at most %u are possible", keys[i].len, RB_MAX_KEY);
	if (n == 1)
	{
		rb_key		k = rb_mkkey(keys->data, keys->len);
		const rb_version *head;
		rb_known	known;

		rb_enter(t);
		known = rb_look(t, &k, &head);
		if (!unknown(known))
		{
			count_look(t, known);
			visit(arg, 0, *keys, head);
			rb_leave(t);
			return RB_OK;
		}
		rb_leave(t);
	}
	if (n == 0)
		return RB_OK;
	status = read_keys(t, keys, n, visit, arg, err);
	rb_release_mine(t);
	rb_release_held(t, 0);
	rb_pm_free(t);
	st_result_free(&t->result);
	return status;
}
