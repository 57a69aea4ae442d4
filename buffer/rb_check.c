/*
 * rb_check.c
 *	  The structural invariants of the record buffer, checked from the root down and along the leaves.
 */
#include "rb_private.h"

typedef struct check
{
	const rb_buffer *rb;
	const char *words;
	rb_node    *last;			/* leaf before the one being looked at */
	const rb_entry *before;		/* entry before */
	uint64_t	entries, tombstones, dirty, key_bytes, value_bytes;
} check;

static bool
fail(check *c, const char *words)
{
	if (!c->words)
		c->words = words;
	return false;
}

static bool
check_entry(check *c, const rb_entry *e)
{
	uint16_t	f = rb_flags(e);
	const rb_version *head = rb_ver_at(c->rb, rb_head(e));

	if (f & RB_DEAD)
		return fail(c, "tree: a removed entry is in a leaf");
	if (c->before && rb_cmp(c->before->key, c->before->klen, e->key, e->klen) >= 0)
		return fail(c, "tree: keys are out of order");
	if ((f & RB_SENTINEL) && (head || (f & RB_DIRTY)))
		return fail(c, "tree: a sentinel has a record");
	if (e->klen <= RB_TREE_LEN && head)
		return fail(c, "tree: a fence has a record");
	if ((f & RB_FETCHING) || (f & RB_INFLIGHT))
		return fail(c, "tree: a fetch or a write is under way");
	if (e->klen)
	{
		c->entries++;
		c->key_bytes += e->klen;
		c->dirty += (f & RB_DIRTY) != 0;
		c->tombstones += e->klen > RB_TREE_LEN && !head && !(f & RB_SENTINEL);
		if (head && rb_is_settled(head))
			c->value_bytes += head->len;
	}
	for (const rb_version *v = head; v; v = rb_older(v))
		if (v->kind > RB_LOCK || v->tag > 15)
			return fail(c, "tree: a version is damaged");
	c->before = e;
	return true;
}

static bool
check_node(check *c, rb_node *n, uint8_t level, const rb_entry *first)
{
	uint32_t	count = atomic_load(&n->n);

	if (n->level != level || count == 0 || count > rb_cap(n))
		return fail(c, "tree: a node has a wrong level or count");
	if (atomic_load(&n->ver) & 1)
		return fail(c, "tree: a node in use is dead or being changed");
	if (first && rb_at(c->rb, atomic_load(&rb_offs(n)[0])) != first)
		return fail(c, "tree: a separator is not the first key below it");
	for (uint32_t i = 0; i < count; i++)
	{
		rb_entry   *e = rb_at(c->rb, atomic_load(&rb_offs(n)[i]));

		if (rb_mkkey(e->key, e->klen).head != atomic_load(&rb_heads(n)[i]))
			return fail(c, "tree: a key head is wrong");
		if (!atomic_load(&n->mixed) && (i > 0 || !level) && !rb_in_tree(e, atomic_load(&n->tree)))
			return fail(c, "tree: a node holds keys of more trees than it says");
		if (level ? !check_node(c, rb_at(c->rb, atomic_load(&rb_children(n)[i])), level - 1, e) : !check_entry(c, e))
			return false;
	}
	if (!level)
	{
		if (rb_at(c->rb, atomic_load(&n->prev)) != (c->last ? (void *) c->last : (void *) c->rb))
			return fail(c, "tree: a leaf's link to the left is wrong");
		if (c->last && rb_at(c->rb, atomic_load(&c->last->next)) != n)
			return fail(c, "tree: a leaf's link to the right is wrong");
		c->last = n;
	}
	return true;
}

const char *
rb_check(rb_buffer *rb)
{
	check		c = {.rb = rb};
	rb_node    *root;

	rb_lock(&rb->latch);
	root = rb_at(rb, atomic_load(&rb->root));
	if (root->level >= RB_MAX_LEVELS)
		fail(&c, "tree: the root has an impossible level");
	else if (check_node(&c, root, root->level, NULL))
	{
		if (atomic_load(&c.last->next))
			fail(&c, "tree: leaves go on behind the last one");
		else if (c.entries != atomic_load(&rb->entries) || c.key_bytes != atomic_load(&rb->key_bytes))
			fail(&c, "counts: entries or their keys do not add up");
		else if (c.tombstones != atomic_load(&rb->tombstones) || c.dirty != atomic_load(&rb->dirty))
			fail(&c, "counts: tombstones or dirty entries do not add up");
		else if (c.value_bytes != atomic_load(&rb->value_bytes))
			fail(&c, "counts: bytes of records do not add up");
	}
	rb_unlock(&rb->latch);
	return c.words ? c.words : rb_heap_check(rb);
}
