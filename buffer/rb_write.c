/*
 * rb_write.c
 *	  New versions: memory, installation, log position, withdrawal.
 *
 * What may fail is done before: a version comes with the blocks that its installation may need (rb_reserve), so rb_put
 * fails only for what it finds.
 */
#include <stdlib.h>
#include "rb_private.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static bool
grow_reserves(rb_thread *t)
{
	if (t->nreserves == t->reserves_cap)
	{
		uint32_t	cap = t->reserves_cap ? 2 * t->reserves_cap : 8;
		rb_reserve *p = realloc(t->reserves, cap * sizeof(rb_reserve));

		if (!p)
			return false;
		t->reserves = p;
		t->reserves_cap = cap;
	}
	return true;
}

static void
drop_pieces(rb_buffer *rb, rb_reserve *r)
{
	rb_free(rb, r->entry);
	rb_free(rb, r->carrier);
	if (r->v)
		rb_version_block_free(rb, r->v);
}

/* The pieces one by one: a fragmented heap may have room for each of them and not for the sum. */
static rb_status
get_pieces(rb_thread *t, rb_reserve *r, uint32_t data_len, bool settled, rb_error *err)
{
	rb_buffer  *rb = t->rb;
	rb_status	status = RB_OK;
	rb_off		block;

	if (t->spare && t->spare_klen == r->klen)
	{
		r->entry = t->spare;
		t->spare = 0;
	}
	else if (!(r->entry = rb_alloc_evict(t, sizeof(rb_entry) + r->klen, &status, err)))
		return status;
	if (settled && !(r->carrier = rb_alloc_evict(t, sizeof(rb_carrier), &status, err)))
		return status;
	block = rb_alloc_evict(t, rb_version_size(data_len, settled), &status, err);
	if (!block)
		return status;
	r->v = rb_version_init(rb, block, data_len, settled);
	while (!rb_pool_reserve(rb))
	{
		block = rb_alloc_evict(t, RB_NODE_BYTES, &status, err);
		if (!block)
			return status;
		rb_pool_add(rb, block);
	}
	return RB_OK;
}

rb_status
rb_version_new(rb_thread *t, uint32_t key_len, uint32_t data_len, bool settled, rb_version **v, rb_error *err)
{
	rb_reserve *r;
	rb_status	status;

	*v = NULL;
	if (key_len > RB_MAX_KEY || key_len < RB_TREE_LEN)
		return rb_fail(err, RB_TOOLONG, "key of %u bytes, at most %u are possible", key_len, RB_MAX_KEY);
	if (data_len > RB_MAX_VALUE)
		return rb_fail(err, RB_TOOLONG, "record of %u bytes, at most %u are possible", data_len, RB_MAX_VALUE);
	if (!grow_reserves(t))
		return rb_fail(err, RB_NOMEM, "out of memory");

	rb_make_room(t, rb_version_size(data_len, settled) + sizeof(rb_entry) + key_len);
	r = &t->reserves[t->nreserves];
	memset(r, 0, sizeof(*r));
	r->klen = key_len;
	status = get_pieces(t, r, data_len, settled, err);
	if (status != RB_OK)
	{
		drop_pieces(t->rb, r);
		return status;
	}
	t->nreserves++;
	*v = r->v;
	return RB_OK;
}

static rb_reserve *
find_reserve(rb_thread *t, const rb_version *v)
{
	for (uint32_t i = t->nreserves; i-- > 0;)
		if (t->reserves[i].v == v)
			return &t->reserves[i];
	return NULL;
}

/* Gives back what is left of a reserve. */
static void
end_reserve(rb_thread *t, rb_reserve *r)
{
	if (r->entry)
	{
		rb_free(t->rb, t->spare);
		t->spare = r->entry;
		t->spare_klen = r->klen;
	}
	rb_free(t->rb, r->carrier);
	*r = t->reserves[--t->nreserves];
	rb_pool_unreserve(t->rb);
}

void
rb_version_free(rb_thread *t, rb_version *v)
{
	rb_reserve *r = find_reserve(t, v);

	if (!r)
		return;
	rb_version_block_free(t->rb, v);
	end_reserve(t, r);
}

/* ---- installation ------------------------------------------------------------------------------------------------ */

/* What was below the new head and is not kept: `old` down to keep (not included), and what hangs below cut. */
static void
drop_old(rb_buffer *rb, const rb_put_args *a, rb_version *old, rb_reserve *r)
{
	rb_version *v = a->v;
	const rb_version *keep = a->blind || rb_is_settled(v) ? NULL : a->keep;

	if (keep)
	{
		for (rb_version *w = old, *below; w && w != keep && !rb_is_settled(w); w = below)
		{
			below = (rb_version *) rb_older(w);
			rb_retire(rb, RB_DEAD_ONE, rb_offset(rb, w));
		}
		if (a->cut && !rb_is_settled(a->cut))
		{
			rb_xversion *cut = (rb_xversion *) a->cut;
			rb_version *below = (rb_version *) rb_older(&cut->v);

			if (below)
			{
				atomic_store_explicit(&cut->older, NULL, memory_order_release);
				rb_retire_below(rb, &cut->v, below);
			}
		}
	}
	else if (old && !rb_is_settled(v))
		rb_retire_below(rb, v, old);
	else if (old && !rb_is_settled(old))
		rb_retire(rb, RB_DEAD_CHAIN, rb_offset(rb, old));
	else if (old)
	{
		rb_carrier *c = rb_at(rb, r->carrier);

		c->version = rb_offset(rb, old);
		rb_retire(rb, RB_DEAD_CARRIED, r->carrier);
		r->carrier = 0;
	}
}

rb_status
rb_put(rb_thread *t, const rb_put_args *a)
{
	rb_buffer  *rb = t->rb;
	rb_key		k = rb_mkkey(a->key.data, a->key.len);
	rb_reserve *r = find_reserve(t, a->v);
	rb_version *v = a->v;
	rb_off		off = rb_offset(rb, v);
	rb_path		path;
	rb_entry   *e;
	bool		equal;
	rb_status	status = RB_OK;

	if (!r || r->klen < a->key.len)
		return RB_CHANGED;
	if (!rb_is_settled(v))
		atomic_store_explicit(&((rb_xversion *) v)->older, a->blind ? NULL : (rb_version *) a->keep,
							  memory_order_relaxed);

	rb_lock(&rb->latch);
	e = rb_find(rb, &k, &path, &equal);
	if (equal)
	{
		bool		sentinel = rb_flags(e) & RB_SENTINEL;
		rb_version *old = rb_ver_at(rb, rb_head(e));

		if (sentinel && !a->blind)
			status = RB_UNKNOWN;
		else if (!a->blind && old != a->expect)
			status = RB_CHANGED;
		else
		{
			/*
			 * Dirty before anybody can see the version, and so before its log record (E1).  A lock changes no data, but
			 * what it leaves out of the chain may still be in the stored list.
			 */
			if (a->dirty || ((rb_flags(e) & RB_LISTED) && (old != a->keep || a->cut)))
				rb_entry_dirty(rb, e);
			rb_set(e, RB_RENEWED | RB_REF);
			if (sentinel)
				rb_entry_resolve(rb, e, off);
			else
				rb_entry_set_head(rb, e, off);
			drop_old(rb, a, old, r);
		}
	}
	else
	{
		/* A6: the new entry splits the gap of its predecessor */
		bool		gap = !rb_in_tree(e, k.tree) || (rb_flags(e) & RB_GAP);

		if (!a->blind && gap)
			status = RB_UNKNOWN;
		else if (!a->blind && a->expect)
			status = RB_CHANGED;
		else
		{
			uint16_t	flags = (gap ? RB_GAP : 0) | (a->dirty ? RB_DIRTY : 0) | RB_REF;

			if (!rb_is_settled(v))
				atomic_store_explicit(&((rb_xversion *) v)->older, NULL, memory_order_relaxed);
			if (rb_entry_add(rb, &path, rb_entry_init(rb, r->entry, a->key, flags, off)))
				r->entry = 0;
			else
				status = RB_CHANGED;
		}
	}
	rb_unlock(&rb->latch);
	if (status == RB_OK)
		end_reserve(t, r);
	return status;
}

void
rb_stamp(rb_thread *t, rb_version *v, uint64_t lsn)
{
	if (rb_is_settled(v))
		return;
	atomic_store(&((rb_xversion *) v)->lsn, lsn);
	if (atomic_load(&t->rb->stamp_waiters))
		t->port->wake(t->port->ctx, RB_CH_STAMP);
}

void
rb_withdraw(rb_thread *t, rb_slice key, rb_version *v)
{
	rb_buffer  *rb = t->rb;
	rb_key		k = rb_mkkey(key.data, key.len);
	rb_path		path;
	rb_entry   *e;
	bool		equal;

	rb_lock(&rb->latch);
	e = rb_find(rb, &k, &path, &equal);
	if (equal)
	{
		rb_version *w = rb_ver_at(rb, rb_head(e));
		rb_version *above = NULL;

		while (w && w != v && !rb_is_settled(w))
		{
			above = w;
			w = (rb_version *) rb_older(w);
		}
		if (w == v && !rb_is_settled(v))
		{
			rb_version *below = (rb_version *) rb_older(v);

			rb_entry_dirty(rb, e);
			rb_set(e, RB_RENEWED);
			if (above)
				atomic_store_explicit(&((rb_xversion *) above)->older, below, memory_order_release);
			else
				rb_entry_set_head(rb, e, rb_offset(rb, below));
			rb_retire(rb, RB_DEAD_ONE, rb_offset(rb, v));
		}
	}
	rb_unlock(&rb->latch);
}

void
rb_confirm(rb_version *v)
{
	atomic_fetch_and_explicit(&v->flags, (uint16_t) ~RB_SPECULATIVE, memory_order_relaxed);
}
