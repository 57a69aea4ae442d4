/*
 * rb_entry.c
 *	  Changes of one entry under the writer latch, with the counts that go with them.
 */
#include "rb_private.h"

static bool
is_tombstone(const rb_entry *e)
{
	return e->klen > RB_TREE_LEN && !(rb_flags(e) & RB_SENTINEL) && !rb_head(e);
}

static int64_t
settled_len(const rb_buffer *rb, rb_off head)
{
	const rb_version *v = rb_ver_at(rb, head);

	return v && rb_is_settled(v) ? (int64_t) v->len : 0;
}

rb_entry *
rb_entry_init(rb_buffer *rb, rb_off block, rb_slice key, uint16_t flags, rb_off head)
{
	rb_entry   *e = rb_at(rb, block);

	e->klen = (uint16_t) key.len;
	atomic_store_explicit(&e->flags, flags, memory_order_relaxed);
	atomic_store_explicit(&e->owner, 0, memory_order_relaxed);
	atomic_store_explicit(&e->head, head, memory_order_relaxed);
	if (key.len)
		memcpy(e->key, key.data, key.len);
	return e;
}

bool
rb_entry_add(rb_buffer *rb, rb_path *path, rb_entry *e)
{
	if (!rb_link(rb, path, e))
		return false;
	rb_gauge(&rb->entries, 1);
	rb_gauge(&rb->key_bytes, e->klen);
	rb_gauge(&rb->value_bytes, settled_len(rb, rb_head(e)));
	if (is_tombstone(e))
		rb_gauge(&rb->tombstones, 1);
	if (rb_flags(e) & RB_DIRTY)
		rb_gauge(&rb->dirty, 1);
	return true;
}

void
rb_entry_remove(rb_buffer *rb, rb_path *path)
{
	rb_node    *leaf = path->node[0];
	rb_entry   *e = rb_at(rb, atomic_load(&rb_offs(leaf)[path->idx[0]]));
	uint16_t	f = rb_flags(e);

	/* A1: one code path for the predecessor, in this leaf or the one to the left; opened before e is gone */
	if ((f & (RB_GAP | RB_SENTINEL)) || rb_head(e))
	{
		rb_path		before = {.levels = 0};
		rb_entry   *p;

		if (path->idx[0] > 0)
		{
			before.node[0] = leaf;
			before.idx[0] = path->idx[0] - 1;
		}
		else
		{
			before.node[0] = rb_at(rb, atomic_load(&leaf->prev));
			before.idx[0] = atomic_load(&before.node[0]->n) - 1u;
		}
		p = rb_at(rb, atomic_load(&rb_offs(before.node[0])[before.idx[0]]));
		/* the last gap of the tree before is that tree's own */
		if (rb_same_tree(p, e))
			rb_set_gap(&before, p, true);
	}
	rb_gauge(&rb->entries, -1);
	rb_gauge(&rb->key_bytes, -(int64_t) e->klen);
	rb_gauge(&rb->value_bytes, -settled_len(rb, rb_head(e)));
	if (is_tombstone(e))
		rb_gauge(&rb->tombstones, -1);
	if (f & RB_DIRTY)
		rb_gauge(&rb->dirty, -1);
	rb_unlink(rb, path);
	rb_set(e, RB_DEAD);
	rb_retire(rb, RB_DEAD_ENTRY, rb_offset(rb, e));
}

void
rb_entry_set_head(rb_buffer *rb, rb_entry *e, rb_off head)
{
	bool		was = is_tombstone(e);

	rb_gauge(&rb->value_bytes, settled_len(rb, head) - settled_len(rb, rb_head(e)));
	atomic_store_explicit(&e->head, head, memory_order_release);
	if (was != is_tombstone(e))
		rb_gauge(&rb->tombstones, was ? -1 : 1);
}

void
rb_entry_resolve(rb_buffer *rb, rb_entry *e, rb_off head)
{
	rb_gauge(&rb->value_bytes, settled_len(rb, head));
	/* who sees the flag cleared sees the head */
	atomic_store_explicit(&e->head, head, memory_order_release);
	rb_clear(e, RB_SENTINEL);
	if (is_tombstone(e))
		rb_gauge(&rb->tombstones, 1);
}

void
rb_entry_dirty(rb_buffer *rb, rb_entry *e)
{
	if (!(rb_flags(e) & RB_DIRTY))
		rb_gauge(&rb->dirty, 1);
	rb_set(e, RB_DIRTY);
}

void
rb_entry_clean(rb_buffer *rb, rb_entry *e)
{
	if (rb_flags(e) & RB_DIRTY)
		rb_gauge(&rb->dirty, -1);
	rb_clear(e, RB_DIRTY);
}

size_t
rb_entry_bytes(const rb_buffer *rb, const rb_entry *e)
{
	size_t		n = rb_block_bytes(rb, rb_offset(rb, e));

	for (const rb_version *v = rb_ver_at(rb, rb_head(e)); v; v = rb_older(v))
		n += rb_version_bytes(rb, v);
	return n;
}
