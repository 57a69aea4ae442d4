/*
 * rb_evict.c
 *	  Making room: second chance in random leaves, dirty victims written in one batch, then removed if nothing happened
 *	  to them (INVARIANTS A1, B2, C1, C3, C5).
 */
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include "rb_private.h"

#define RUN		64
#define STEP	16				/* removals under one latch */

static uint64_t
free_bytes(const rb_buffer *rb)
{
	return atomic_load_explicit((_Atomic uint64_t *) &rb->free_bytes, memory_order_relaxed);
}

bool
rb_wants_eviction(rb_buffer *rb)
{
	return free_bytes(rb) < rb->heap_bytes / 16;
}

/* A running transaction's row lock has no other place than the entry (C5). */
static bool
is_locked(rb_thread *t, rb_off head)
{
	for (const rb_version *v = rb_ver_at(t->rb, head); v && !rb_is_settled(v); v = rb_older(v))
		if (v->kind == RB_LOCK && t->port->xid_state(t->port->ctx, rb_x(v)->xid) == RB_XID_RUNNING)
			return true;
	return false;
}

/* May it go, as far as its own state tells? */
static bool
removable(const rb_entry *e, uint16_t f)
{
	if (f & (RB_DIRTY | RB_INFLIGHT | RB_DOUBT | RB_FETCHING | RB_DEAD))
		return false;
	if (e->klen < RB_TREE_LEN)
		return false;
	/* a fence that knows something is permanent */
	return e->klen > RB_TREE_LEN || (f & RB_GAP);
}

/* In the guard: takes out those of seen[] that are still as they were seen. */
static size_t
remove_seen(rb_thread *t, const rb_seen *seen, uint32_t n)
{
	rb_buffer  *rb = t->rb;
	size_t		freed = 0;
	uint32_t	gone = 0;

	for (uint32_t i = 0; i < n;)
	{
		rb_lock(&rb->latch);
		for (uint32_t stop = i + STEP; i < n && i < stop; i++)
		{
			rb_entry   *e = seen[i].e;
			rb_path		path;
			bool		equal;
			rb_key		k;

			if (!removable(e, rb_flags(e)) || rb_head(e) != seen[i].head)
				continue;
			k = rb_mkkey(e->key, e->klen);
			if (rb_find(rb, &k, &path, &equal) != e || rb_ticketed(t, e))
				continue;
			freed += rb_entry_bytes(rb, e);
			rb_entry_remove(rb, &path);
			gone++;
		}
		rb_unlock(&rb->latch);
	}
	rb_count(t, RB_C_EVICTED, gone);
	return freed;
}

/*
 * Removes what may go from [lo, hi): at most `bytes`.  all: whether or not it was used lately; otherwise what was used
 * loses its reference bit and stays.
 */
static size_t
remove_range(rb_thread *t, rb_slice lo, rb_slice hi, size_t bytes, bool all)
{
	uint8_t		cursor[RB_MAX_KEY + 8];
	uint32_t	len = lo.len;
	size_t		freed = 0;

	memcpy(cursor, lo.data, len);
	for (bool more = true; more && freed < bytes;)
	{
		rb_key		k = rb_mkkey(cursor, len);
		rb_seen		run[RUN],
					out[RUN];
		uint32_t	n,
					nout = 0;
		size_t		expected = 0;

		rb_enter(t);
		n = rb_run_forward(t->rb, &k, run, RUN);
		more = false;
		for (uint32_t i = 0; i < n && freed + expected < bytes; i++)
		{
			rb_entry   *e = run[i].e;

			if (rb_cmp_entry(e, &k) < 0)
				continue;
			if (rb_cmp(e->key, e->klen, hi.data, hi.len) >= 0)
			{
				more = false;
				break;
			}
			more = true;
			memcpy(cursor, e->key, e->klen);
			len = e->klen;
			if (!removable(e, run[i].flags))
				continue;
			if (!all && (run[i].flags & RB_REF))
			{
				rb_clear(e, RB_REF);
				continue;
			}
			if (is_locked(t, run[i].head))
				continue;
			out[nout++] = run[i];
			expected += rb_entry_bytes(t->rb, e);
		}
		if (more)
			rb_succ(cursor, &len);
		freed += remove_seen(t, out, nout);
		rb_leave(t);
	}
	return freed;
}

/* The neighbourhood of a random leaf joins the victims: what is dirty in it becomes a candidate for the flush. */
static size_t
pick(rb_thread *t, size_t bytes, bool all, rb_victims *victims)
{
	rb_seen		run[RUN];
	uint32_t	n;
	size_t		expected = 0;
	rb_entry   *e = rb_random_leaf(t);
	rb_key		k;

	if (!e)
		return 0;
	k = rb_mkkey(e->key, e->klen);
	n = rb_run_forward(t->rb, &k, run, RUN);
	memcpy(victims->lo, run[0].e->key, run[0].e->klen);
	victims->lo_len = run[0].e->klen;
	for (uint32_t i = 0; i < n && expected < bytes; i++)
	{
		uint16_t	f = run[i].flags;

		e = run[i].e;
		memcpy(victims->hi, e->key, e->klen);
		victims->hi_len = e->klen;
		if (!all && (f & RB_REF))
			continue;
		if (f & RB_DIRTY)
			t->cand[t->ncand++] = e;
		else if (!removable(e, f))
			continue;
		expected += rb_entry_bytes(t->rb, e);
	}
	rb_succ(victims->hi, &victims->hi_len);
	return expected;
}

/* Flush what is dirty around a few random leaves in one write, then remove.  *freed grows. */
static rb_status
evict_once(rb_thread *t, size_t bytes, bool all, size_t *freed, rb_error *err)
{
	uint32_t	n = 0;
	size_t		expected = 0,
				start = *freed;
	rb_status	status = RB_OK;

	rb_enter(t);
	t->ncand = 0;
	while (n < RB_VICTIMS && expected < bytes && t->ncand + RUN <= RB_BATCH)
		expected += pick(t, bytes - expected, all, &t->victims[n++]);
	if (t->ncand)
		status = rb_flush_cand(t, err);	/* leaves the guard */
	else
		rb_leave(t);
	for (uint32_t i = 0; i < n && *freed - start < bytes; i++)
		*freed += remove_range(t, (rb_slice) {t->victims[i].lo, t->victims[i].lo_len},
							   (rb_slice) {t->victims[i].hi, t->victims[i].hi_len}, bytes - (*freed - start), all);
	return status;
}

rb_status
rb_evict(rb_thread *t, size_t bytes, size_t *freed, rb_error *err)
{
	rb_status	status = RB_OK;
	uint64_t	entries = atomic_load(&t->rb->entries);
	uint32_t	leaves = (uint32_t) (entries / 32) + 4,
				most = leaves > 4096 ? 4096 : leaves;
	uint32_t	idle = 0;

	*freed = 0;
	/* after a while in vain, what was used lately goes too */
	for (uint32_t i = 0; *freed < bytes && i < 4 * most + 16; i++)
	{
		size_t		before = *freed;

		status = evict_once(t, bytes - *freed, idle > 4 || i > 2 * most, freed, err);
		if (status != RB_OK)
			break;
		idle = *freed == before ? idle + 1 : 0;
		if (idle > 64 || (i % 16 == 15 && t->port->interrupted(t->port->ctx)))
			break;
	}
	rb_reclaim(t->rb);
	/* what went before a failure counts */
	return *freed >= bytes ? RB_OK : status;
}

void
rb_make_room(rb_thread *t, size_t bytes)
{
	rb_buffer  *rb = t->rb;
	size_t		room = rb->heap_bytes / 64,
				freed;
	rb_error	err = {0};

	if (free_bytes(rb) >= bytes + room)
		return;
	rb_reclaim(rb);
	if (free_bytes(rb) >= bytes + room)
		return;
	if (room > 512 * 1024)
		room = 512 * 1024;
	(void) rb_evict(t, bytes + room, &freed, &err);
}

rb_off
rb_alloc_evict(rb_thread *t, size_t bytes, rb_status *status, rb_error *err)
{
	rb_off		off;
	rb_status	last = RB_OK;
	rb_error	why = {0};
	size_t		want;

	*status = RB_OK;
	for (uint32_t tries = 0; tries < 16; tries++)
	{
		size_t		freed = 0;

		off = rb_alloc(t->rb, bytes);
		if (off)
			return off;
		rb_reclaim(t->rb);
		off = rb_alloc(t->rb, bytes);
		if (off)
			return off;
		if (bytes > t->rb->heap_bytes)
			break;
		/* what is free may be in pieces: more and more goes, at last all of it */
		want = tries < 2 ? 0 : t->rb->heap_bytes >> (tries < 10 ? 10 - tries : 0);
		t->pressed = tries >= 4;
		last = rb_evict(t, want > bytes + RB_NODE_BYTES ? want : bytes + RB_NODE_BYTES, &freed, &why);
		t->pressed = false;
		if (freed == 0)
		{
			if (t->port->interrupted(t->port->ctx))
				break;
			/* what others hold or what guards still see may come free; not for long */
			nanosleep(&(struct timespec) {0, tries < 4 ? 50000 : 1000000}, NULL);
		}
	}
	off = rb_alloc(t->rb, bytes);
	if (off)
		return off;
	if (last != RB_OK && last != RB_FULL)
	{
		*err = why;
		*status = last;
	}
	else
		*status = rb_fail(err, RB_FULL, "no room for %zu bytes in the record buffer: increase nemo.buffer_size", bytes);
	return 0;
}

/* Evicts until a record of so many bytes fits in one piece; others may be quicker to take it. */
rb_status
rb_clear_space(rb_thread *t, size_t bytes, rb_error *err)
{
	rb_status	status;
	rb_off		block = rb_alloc_evict(t, bytes + sizeof(rb_xprefix) + sizeof(rb_xversion), &status, err);

	rb_free(t->rb, block);
	return block ? RB_OK : status;
}

rb_status
rb_tree_evict(rb_thread *t, uint64_t tree, rb_error *err)
{
	uint8_t		lo[RB_TREE_LEN],
				hi[RB_TREE_LEN];
	rb_slice	from = {lo, RB_TREE_LEN},
				to = {hi, RB_TREE_LEN};
	rb_status	status;

	rb_put_be64(lo, tree);
	rb_put_be64(hi, tree + 1);
	status = rb_flush_range(t, from, to, false, err);
	(void) remove_range(t, from, to, SIZE_MAX, true);
	rb_reclaim(t->rb);
	return status;
}

/* ---- trees ------------------------------------------------------------------------------------------------------- */

rb_status
rb_tree_create(rb_thread *t, uint64_t tree, rb_error *err)
{
	rb_buffer  *rb = t->rb;
	uint8_t		key[RB_TREE_LEN];
	rb_key		k;
	rb_path		path;
	rb_entry   *e;
	bool		equal;

	rb_put_be64(key, tree);
	k = rb_mkkey(key, RB_TREE_LEN);
	for (uint32_t tries = 0; tries < 4; tries++)
	{
		rb_status	status;
		bool		ok = true;
		rb_off		block = rb_alloc_evict(t, sizeof(rb_entry) + RB_TREE_LEN, &status, err);

		if (!block)
			return status;
		rb_lock(&rb->latch);
		e = rb_find(rb, &k, &path, &equal);
		if (equal)
		{
			if (rb_flags(e) & RB_SENTINEL)
				rb_entry_resolve(rb, e, 0);
			rb_set_gap(&path, e, false);
		}
		else
		{
			ok = rb_entry_add(rb, &path, rb_entry_init(rb, block, (rb_slice) {key, RB_TREE_LEN}, RB_REF, 0));
			if (ok)
				block = 0;
		}
		rb_unlock(&rb->latch);
		rb_free(rb, block);
		if (ok)
			return RB_OK;
		rb_make_room(t, 4 * RB_NODE_BYTES);
	}
	return rb_fail(err, RB_FULL, "no room for a tree in the record buffer: increase nemo.buffer_size");
}

/* Under the latch: what must stay because a write of it is outstanding, or as somebody's anchor, forgets what it knows. */
static void
forget(rb_buffer *rb, rb_entry *e)
{
	rb_version *old = rb_ver_at(rb, rb_head(e));

	rb_entry_clean(rb, e);
	if (!old)
	{
		rb_set(e, RB_RENEWED);
		return;
	}
	if (rb_is_settled(old))
	{
		rb_off		block = rb_alloc(rb, sizeof(rb_carrier));

		if (!block)
			return;
		((rb_carrier *) rb_at(rb, block))->version = rb_offset(rb, old);
		rb_entry_set_head(rb, e, 0);
		rb_retire(rb, RB_DEAD_CARRIED, block);
	}
	else
	{
		rb_entry_set_head(rb, e, 0);
		rb_retire(rb, RB_DEAD_CHAIN, rb_offset(rb, old));
	}
	rb_set(e, RB_RENEWED);
}

/* Outstanding writes are waited for: they must not land after the caller's removal of the range from the store. */
void
rb_tree_drop(rb_thread *t, uint64_t tree, uint64_t next_tree)
{
	rb_buffer  *rb = t->rb;
	uint8_t		cursor[RB_MAX_KEY + 8];
	uint32_t	len = RB_TREE_LEN;
	uint8_t		stop[RB_TREE_LEN];
	rb_error	err = {0};

	rb_put_be64(cursor, tree);
	rb_put_be64(stop, next_tree);
	if (t->ndoubts)
		(void) rb_resolve_doubts(t, &err);
	for (bool done = false; !done;)
	{
		bool		busy = false,
					wait = !t->port->interrupted(t->port->ctx);

		rb_lock(&rb->latch);
		for (uint32_t i = 0; i < STEP && !done && !busy; i++)
		{
			rb_key		k = rb_mkkey(cursor, len);
			rb_path		path;
			bool		equal;
			rb_entry   *e = rb_find(rb, &k, &path, &equal);

			if (!equal)
			{
				rb_path		next = path;

				e = rb_path_next(rb, &next);
				if (!e || rb_cmp(e->key, e->klen, stop, RB_TREE_LEN) >= 0)
				{
					done = true;
					break;
				}
				memcpy(cursor, e->key, e->klen);
				len = e->klen;
				continue;
			}
			if (rb_flags(e) & (RB_INFLIGHT | RB_DOUBT))
			{
				if (wait)
				{
					busy = true;
					break;
				}
				forget(rb, e);
				rb_succ(cursor, &len);
			}
			else
				rb_entry_remove(rb, &path);
		}
		rb_unlock(&rb->latch);
		if (busy)
			rb_wait(t, &rb->flight_waiters, RB_CH_FLIGHT, 10);
	}
	rb_reclaim(rb);
}
