/*
 * rb_tree.c
 *	  The B+tree: search, insertion, removal, and looks at neighbouring entries without a latch.
 *
 * Writers are serialised by the writer latch; every node they change has an odd version meanwhile.  Readers follow
 * versions (optimistic lock coupling): a node's version is read before its contents and again before anything is made
 * of them.  Contents are stored with release and loaded with acquire order, so that a reader that saw a new word also
 * sees the version that went with it.
 *
 * No leaf is empty, and every separator is the first key of its subtree's first leaf.  So the predecessor of a key that
 * is not there always lies in the leaf the key leads to (A3); its bit and the key's absence are validated by one
 * version.  The first entry of all has the empty key and stays for ever.
 */
#include <sched.h>
#include "rb_private.h"

#define LOAD(p)		atomic_load_explicit(p, memory_order_acquire)
#define STORE(p, v) atomic_store_explicit(p, v, memory_order_release)

/* ---- keys -------------------------------------------------------------------------------------------------------- */

uint64_t
rb_be64(const uint8_t *p)
{
	uint64_t	v;

	memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	v = __builtin_bswap64(v);
#endif
	return v;
}

void
rb_put_be64(uint8_t *p, uint64_t v)
{
	for (int i = 7; i >= 0; i--, v >>= 8)
		p[i] = (uint8_t) v;
}

static uint64_t
head_of(const uint8_t *key, uint32_t len)
{
	uint64_t	v = 0;

	if (len >= 2 * RB_TREE_LEN)
		return rb_be64(key + RB_TREE_LEN);
	for (uint32_t i = RB_TREE_LEN; i < 2 * RB_TREE_LEN; i++)
		v = v << 8 | (i < len ? key[i] : 0);
	return v;
}

rb_key
rb_mkkey(const void *data, uint32_t len)
{
	rb_key		k = {data, len, 0, 0};

	if (len >= RB_TREE_LEN)
	{
		k.tree = rb_be64(k.data);
		k.head = head_of(k.data, len);
	}
	return k;
}

int
rb_cmp(const void *a, uint32_t alen, const void *b, uint32_t blen)
{
	uint32_t	n = alen < blen ? alen : blen;
	int			c = n ? memcmp(a, b, n) : 0;

	return c ? c : (alen < blen ? -1 : alen > blen);
}

/* ---- nodes ------------------------------------------------------------------------------------------------------- */

static void
begin(rb_node *n)
{
	atomic_fetch_add_explicit(&n->ver, 1, memory_order_acq_rel);
}

static void
end(rb_node *n)
{
	atomic_fetch_add_explicit(&n->ver, 1, memory_order_release);
}

static inline bool
still(rb_node *n, uint32_t ver)
{
	return atomic_load_explicit(&n->ver, memory_order_relaxed) == ver;
}

static inline uint32_t
count(rb_node *n)
{
	uint32_t	c = LOAD(&n->n);

	return c < rb_cap(n) ? c : rb_cap(n);
}

/* Index of the last slot <= k (strict: < k); in an inner node at least 0, in a leaf -1 when there is none. */
static int
search(const rb_buffer *rb, rb_node *n, const rb_key *k, bool strict)
{
	uint32_t	lo = n->level ? 1 : 0,
				hi = count(n);
	bool		mixed = LOAD(&n->mixed);
	uint64_t	tree = LOAD(&n->tree);
	_Atomic uint64_t *heads = rb_heads(n);
	_Atomic rb_off *offs = rb_offs(n);

	if (!mixed && tree != k->tree)
		return tree < k->tree ? (int) hi - 1 : (int) lo - 1;
	while (lo < hi)
	{
		uint32_t	mid = (lo + hi) / 2;
		uint64_t	h = mixed ? 0 : LOAD(&heads[mid]);
		int			c;

		if (!mixed && h != k->head)
			c = h < k->head ? -1 : 1;
		else
		{
			rb_off		off = LOAD(&offs[mid]);

			c = off ? rb_cmp_entry(rb_at(rb, off), k) : 1;
		}
		if (c < 0 || (c == 0 && !strict))
			lo = mid + 1;
		else
			hi = mid;
	}
	return (int) lo - 1;
}

static void
set_slot(rb_node *n, uint32_t i, uint64_t head, rb_off off, rb_off child)
{
	STORE(&rb_heads(n)[i], head);
	STORE(&rb_offs(n)[i], off);
	if (n->level)
		STORE(&rb_children(n)[i], child);
}

static void
copy_slot(rb_node *to, uint32_t i, rb_node *from, uint32_t j)
{
	set_slot(to, i, LOAD(&rb_heads(from)[j]), LOAD(&rb_offs(from)[j]), from->level ? LOAD(&rb_children(from)[j]) : 0);
}

/* After any change of slots: whether key heads compare. */
static void
retag(const rb_buffer *rb, rb_node *n)
{
	uint32_t	first = n->level ? 1 : 0,
				c = count(n);
	bool		mixed = true;
	uint64_t	tree = 0;

	if (c > first)
	{
		const rb_entry *a = rb_at(rb, LOAD(&rb_offs(n)[first])),
				   *b = rb_at(rb, LOAD(&rb_offs(n)[c - 1]));

		if (rb_same_tree(a, b))
		{
			mixed = false;
			tree = rb_be64(a->key);
		}
	}
	if (LOAD(&n->tree) != tree)
		STORE(&n->tree, tree);
	if (LOAD(&n->mixed) != mixed)
		STORE(&n->mixed, mixed);
}

/* the separator of a child: its first key */
static void
copy_first(rb_node *up, uint32_t i, rb_node *child)
{
	STORE(&rb_heads(up)[i], LOAD(&rb_heads(child)[0]));
	STORE(&rb_offs(up)[i], LOAD(&rb_offs(child)[0]));
}

static void
insert_slot(rb_node *n, uint32_t at, uint64_t head, rb_off off, rb_off child)
{
	uint32_t	c = count(n);

	for (uint32_t i = c; i > at; i--)
		copy_slot(n, i, n, i - 1);
	set_slot(n, at, head, off, child);
	STORE(&n->n, (uint16_t) (c + 1));
}

static void
remove_slot(rb_node *n, uint32_t at)
{
	uint32_t	c = count(n);

	for (uint32_t i = at; i + 1 < c; i++)
		copy_slot(n, i, n, i + 1);
	STORE(&n->n, (uint16_t) (c - 1));
}

static rb_node *
new_node(rb_buffer *rb, rb_off off, uint8_t level)
{
	rb_node    *n = rb_at(rb, off);

	atomic_store_explicit(&n->ver, 0, memory_order_relaxed);
	n->level = level;
	atomic_store_explicit(&n->n, 0, memory_order_relaxed);
	atomic_store_explicit(&n->mixed, 1, memory_order_relaxed);
	atomic_store_explicit(&n->tree, 0, memory_order_relaxed);
	atomic_store_explicit(&n->next, 0, memory_order_relaxed);
	atomic_store_explicit(&n->prev, 0, memory_order_relaxed);
	return n;
}

bool
rb_tree_init(rb_buffer *rb)
{
	rb_off		root = rb_node_alloc(rb),
				block = rb_alloc(rb, sizeof(rb_entry));
	rb_node    *n;

	if (!root || !block)
		return false;
	rb_entry_init(rb, block, (rb_slice) {NULL, 0}, RB_GAP, 0);
	n = new_node(rb, root, 0);
	insert_slot(n, 0, 0, block, 0);
	STORE(&rb->root, root);
	return true;
}

/* ---- under the latch --------------------------------------------------------------------------------------------- */

static void
descend(rb_buffer *rb, const rb_key *k, bool strict, rb_path *path)
{
	rb_node    *n = rb_at(rb, LOAD(&rb->root));

	path->levels = n->level + 1u;
	for (;;)
	{
		int			i = search(rb, n, k, strict);

		path->node[n->level] = n;
		path->idx[n->level] = (uint32_t) i;
		if (!n->level)
			return;
		n = rb_at(rb, LOAD(&rb_children(n)[i]));
	}
}

static rb_entry *
at_path(const rb_buffer *rb, const rb_path *path)
{
	return rb_at(rb, LOAD(&rb_offs(path->node[0])[path->idx[0]]));
}

rb_entry *
rb_find(rb_buffer *rb, const rb_key *k, rb_path *path, bool *equal)
{
	rb_entry   *e;

	descend(rb, k, false, path);
	e = at_path(rb, path);
	*equal = rb_cmp_entry(e, k) == 0;
	return e;
}

rb_entry *
rb_path_next(rb_buffer *rb, rb_path *path)
{
	rb_node    *n = path->node[0];

	if (path->idx[0] + 1 < count(n))
		path->idx[0]++;
	else
	{
		rb_off		next = LOAD(&n->next);

		if (!next)
			return NULL;
		/* the levels above are no longer those of this leaf */
		path->node[0] = rb_at(rb, next);
		path->idx[0] = 0;
		path->levels = 0;
	}
	return at_path(rb, path);
}

void
rb_set_gap(rb_path *path, rb_entry *e, bool unknown)
{
	if (((rb_flags(e) & RB_GAP) != 0) == unknown)
		return;
	begin(path->node[0]);
	if (unknown)
		rb_set(e, RB_GAP);
	else
		rb_clear(e, RB_GAP);
	end(path->node[0]);
}

/* Splits a full node that is being changed and puts the slot in; the new right-hand node's slot is handed up. */
static void
split(rb_buffer *rb, rb_node *n, uint32_t at, rb_node *right, uint64_t *head, rb_off *off, rb_off *child)
{
	uint32_t	c = count(n),
				m = at == c ? c : c / 2;

	for (uint32_t i = m; i < c; i++)
		copy_slot(right, i - m, n, i);
	STORE(&right->n, (uint16_t) (c - m));
	STORE(&n->n, (uint16_t) m);
	if (at > m || m == c)
		insert_slot(right, at - m, *head, *off, *child);
	else
		insert_slot(n, at, *head, *off, *child);
	if (!n->level)
	{
		rb_off		next = LOAD(&n->next);

		STORE(&right->next, next);
		STORE(&right->prev, rb_offset(rb, n));
		if (next)
			STORE(&((rb_node *) rb_at(rb, next))->prev, rb_offset(rb, right));
		STORE(&n->next, rb_offset(rb, right));
	}
	retag(rb, n);
	retag(rb, right);
	*head = LOAD(&rb_heads(right)[0]);
	*off = LOAD(&rb_offs(right)[0]);
	*child = rb_offset(rb, right);
}

/* Slots [from, from + k) of a leaf become those of its neighbour from `to` on; neither is put right otherwise. */
static void
move_slots(rb_node *dest, uint32_t to, rb_node *src, uint32_t from, uint32_t k)
{
	for (uint32_t i = 0; i < k; i++)
		copy_slot(dest, to + i, src, from + i);
}

/*
 * A full leaf gives to a neighbour under the same parent that has room, which keeps leaves fuller than splitting alone,
 * and takes the new slot.  false = there is no such neighbour; nothing is changed.
 */
static bool
share(rb_buffer *rb, rb_path *path, uint64_t head, rb_off off)
{
	rb_node    *leaf = path->node[0],
			   *up,
			   *other = NULL;
	uint32_t	at = path->idx[0] + 1,
				c = count(leaf),
				i,
				n = 0,
				k;
	bool		right = false;

	/* at the end, keys come in order: a split leaves the leaf full */
	if (path->levels < 2 || at == c)
		return false;
	up = path->node[1];
	i = path->idx[1];
	if (i + 1 < count(up))
	{
		other = rb_at(rb, LOAD(&rb_children(up)[i + 1]));
		n = count(other);
		right = n <= RB_LEAF_CAP * 3 / 4;
	}
	if (!right && i > 0)
	{
		other = rb_at(rb, LOAD(&rb_children(up)[i - 1]));
		n = count(other);
	}
	if (!other || n > RB_LEAF_CAP * 3 / 4)
		return false;
	k = (c - n) / 2;

	begin(leaf);
	begin(other);
	begin(up);
	if (right)
	{
		for (uint32_t j = n; j-- > 0;)
			copy_slot(other, j + k, other, j);
		move_slots(other, 0, leaf, c - k, k);
		STORE(&other->n, (uint16_t) (n + k));
		STORE(&leaf->n, (uint16_t) (c - k));
		if (at <= c - k)
			insert_slot(leaf, at, head, off, 0);
		else
			insert_slot(other, at - (c - k), head, off, 0);
		copy_first(up, i + 1, other);
	}
	else
	{
		move_slots(other, n, leaf, 0, k);
		move_slots(leaf, 0, leaf, k, c - k);
		STORE(&other->n, (uint16_t) (n + k));
		STORE(&leaf->n, (uint16_t) (c - k));
		if (at <= k)
			insert_slot(other, n + at, head, off, 0);
		else
			insert_slot(leaf, at - k, head, off, 0);
		copy_first(up, i, leaf);
	}
	retag(rb, leaf);
	retag(rb, other);
	retag(rb, up);
	end(up);
	end(other);
	end(leaf);
	return true;
}

bool
rb_link(rb_buffer *rb, rb_path *path, rb_entry *e)
{
	rb_off		fresh[RB_MAX_LEVELS + 1];
	uint32_t	full = 0,
				need,
				got = 0,
				top;
	uint64_t	head = head_of(e->key, e->klen);
	rb_off		off = rb_offset(rb, e),
				child = 0;

	while (full < path->levels && count(path->node[full]) == rb_cap(path->node[full]))
		full++;
	if (full > 0 && share(rb, path, head, off))
		return true;
	need = full == path->levels ? full + 1 : full;
	if (need > RB_MAX_LEVELS)
		return false;
	while (got < need && (fresh[got] = rb_node_alloc(rb)) != 0)
		got++;
	if (got < need)
	{
		while (got > 0)
			rb_pool_add(rb, fresh[--got]);
		return false;
	}
	top = full == path->levels ? full - 1 : full;
	for (uint32_t l = 0; l <= top; l++)
		begin(path->node[l]);
	for (uint32_t l = 0; l < full; l++)
		split(rb, path->node[l], path->idx[l] + 1, new_node(rb, fresh[l], (uint8_t) l), &head, &off, &child);
	if (full < path->levels)
	{
		insert_slot(path->node[full], path->idx[full] + 1, head, off, child);
		retag(rb, path->node[full]);
	}
	else
	{
		rb_node    *old = path->node[full - 1],
				   *root = new_node(rb, fresh[full], (uint8_t) full);

		insert_slot(root, 0, LOAD(&rb_heads(old)[0]), LOAD(&rb_offs(old)[0]), rb_offset(rb, old));
		insert_slot(root, 1, head, off, child);
		retag(rb, root);
		STORE(&rb->root, rb_offset(rb, root));
	}
	for (uint32_t l = 0; l <= top; l++)
		end(path->node[l]);
	return true;
}

/* The first slot of the node at `level` changed: so do the separators above it. */
static void
first_changed(rb_buffer *rb, rb_path *path, uint32_t level)
{
	rb_node    *n = path->node[level];
	uint64_t	head = LOAD(&rb_heads(n)[0]);
	rb_off		off = LOAD(&rb_offs(n)[0]);

	for (uint32_t l = level + 1; l < path->levels; l++)
	{
		rb_node    *up = path->node[l];
		uint32_t	i = path->idx[l];

		STORE(&rb_heads(up)[i], head);
		STORE(&rb_offs(up)[i], off);
		retag(rb, up);
		if (i > 0)
			break;
	}
}

static void
unchain_leaf(rb_buffer *rb, rb_node *leaf)
{
	rb_off		prev = LOAD(&leaf->prev),
				next = LOAD(&leaf->next);
	rb_node    *p = rb_at(rb, prev);

	/* the very first leaf holds the first entry and is never empty */
	begin(p);
	STORE(&p->next, next);
	end(p);
	if (next)
		STORE(&((rb_node *) rb_at(rb, next))->prev, prev);
}

/* Moves all of `right` into its left neighbour; both and their parent are being changed. */
static void
absorb(rb_buffer *rb, rb_node *left, rb_node *right)
{
	uint32_t	a = count(left),
				b = count(right);

	for (uint32_t i = 0; i < b; i++)
		copy_slot(left, a + i, right, i);
	STORE(&left->n, (uint16_t) (a + b));
	retag(rb, left);
	if (!left->level)
	{
		rb_off		next = LOAD(&right->next);

		STORE(&left->next, next);
		if (next)
			STORE(&((rb_node *) rb_at(rb, next))->prev, rb_offset(rb, left));
	}
}

/* Removes the slot at path in `level`; the path's nodes from there up are being changed.  *dead gets emptied nodes. */
static void
remove_at(rb_buffer *rb, rb_path *path, uint32_t level, bool *dead)
{
	rb_node    *n = path->node[level];
	uint32_t	i = path->idx[level];

	remove_slot(n, i);
	if (count(n) == 0)
	{
		dead[level] = true;
		remove_at(rb, path, level + 1, dead);
		return;
	}
	retag(rb, n);
	if (i == 0)
		first_changed(rb, path, level);
}

void
rb_unlink(rb_buffer *rb, rb_path *path)
{
	rb_node    *leaf = path->node[0];
	bool		dead[RB_MAX_LEVELS] = {false};
	bool		high = path->idx[0] == 0 || count(leaf) <= RB_LEAF_CAP / 4;
	uint32_t	top = high ? path->levels : 1;

	if (count(leaf) == 1)
		unchain_leaf(rb, leaf);
	for (uint32_t l = 0; l < top; l++)
		begin(path->node[l]);
	remove_at(rb, path, 0, dead);

	/* small nodes join a neighbour under the same parent */
	for (uint32_t l = 0; high && l + 1 < path->levels; l++)
	{
		rb_node    *n = path->node[l],
				   *up = path->node[l + 1],
				   *left,
				   *right;
		uint32_t	i = path->idx[l + 1],
					r;

		if (dead[l] || dead[l + 1])
			continue;
		if (count(n) > rb_cap(n) / 4)
			break;
		if (i + 1 < count(up))
			r = i + 1;
		else if (i > 0)
			r = i;
		else
			break;
		left = rb_at(rb, LOAD(&rb_children(up)[r - 1]));
		right = rb_at(rb, LOAD(&rb_children(up)[r]));
		if (count(left) + count(right) > rb_cap(n) * 3 / 4)
			break;
		begin(left == n ? right : left);
		absorb(rb, left, right);
		remove_slot(up, r);
		retag(rb, up);
		if (left == n)
			rb_retire(rb, RB_DEAD_NODE, rb_offset(rb, right));
		else
		{
			end(left);
			dead[l] = true;
		}
	}
	/* a root with one child gives way to it */
	if (high)
	{
		uint32_t	l = path->levels - 1;

		while (l > 0 && count(path->node[l]) == 1)
		{
			rb_off		child = LOAD(&rb_children(path->node[l])[0]);

			STORE(&rb->root, child);
			dead[l--] = true;
			/* the next one is on the path unless it took in the path's node; then it is left for another time */
			if (rb_at(rb, child) != path->node[l] || dead[l])
				break;
		}
	}
	for (uint32_t l = 0; l < top; l++)
	{
		if (dead[l])
			rb_retire(rb, RB_DEAD_NODE, rb_offset(rb, path->node[l]));
		else
			end(path->node[l]);
	}
}

/* ---- without latch ----------------------------------------------------------------------------------------------- */

static bool
stable(rb_node *n, uint32_t *ver)
{
	*ver = LOAD(&n->ver);
	return !(*ver & 1);
}

/* One attempt to get to the leaf of k.  k NULL: to a random one. */
static bool
try_descend(rb_buffer *rb, const rb_key *k, bool strict, rb_thread *t, rb_node **leaf, uint32_t *ver)
{
	rb_off		root = LOAD(&rb->root);
	rb_node    *n = rb_at(rb, root);
	uint32_t	v;

	if (!stable(n, &v) || LOAD(&rb->root) != root)
		return false;
	while (n->level)
	{
		int			i;
		rb_off		off;
		rb_node    *child;
		uint32_t	cv;

		if (k)
			i = search(rb, n, k, strict);
		else
		{
			uint32_t	c = count(n);

			i = c ? (int) (rb_random(t) % c) : 0;
		}
		off = LOAD(&rb_children(n)[i]);
		if (!still(n, v) || !off)
			return false;
		child = rb_at(rb, off);
		if (!stable(child, &cv) || !still(n, v))
			return false;
		n = child;
		v = cv;
	}
	*leaf = n;
	*ver = v;
	return true;
}

static void
pause_after(uint32_t tries)
{
	if (tries % 16 == 15)
		sched_yield();
#if defined(__x86_64__) || defined(__i386__)
	else
		__builtin_ia32_pause();
#endif
}

static bool
see(const rb_buffer *rb, rb_node *n, uint32_t i, rb_seen *out)
{
	rb_off		off = LOAD(&rb_offs(n)[i]);

	if (!off)
		return false;
	out->e = rb_at(rb, off);
	out->flags = rb_flags(out->e);
	out->head = rb_head(out->e);
	return true;
}

#define MANY 200				/* attempts before the latch is taken */

static uint32_t
try_forward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max)
{
	rb_node    *leaf,
			   *next;
	uint32_t	ver,
				nver,
				c,
				got = 0;
	int			i;
	rb_off		off;

	if (!try_descend(rb, k, false, NULL, &leaf, &ver))
		return 0;
	i = search(rb, leaf, k, false);
	if (i < 0)
		return 0;
	c = count(leaf);
	for (uint32_t j = (uint32_t) i; j < c && got < max; j++)
		if (!see(rb, leaf, j, &run[got++]))
			return 0;
	off = LOAD(&leaf->next);
	if (!still(leaf, ver))
		return 0;
	if (got == max || !off)
		return got;
	next = rb_at(rb, off);
	if (!stable(next, &nver))
		return 0;
	c = count(next);
	for (uint32_t j = 0; j < c && got < max; j++)
		if (!see(rb, next, j, &run[got++]))
			return 0;
	return still(next, nver) && still(leaf, ver) ? got : 0;
}

uint32_t
rb_run_forward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max)
{
	rb_path		path;
	bool		equal;
	uint32_t	got;

	for (uint32_t tries = 0; tries < MANY; tries++)
	{
		got = try_forward(rb, k, run, max);
		if (got)
			return got;
		pause_after(tries);
	}
	rb_lock(&rb->latch);
	rb_find(rb, k, &path, &equal);
	got = 0;
	do
		see(rb, path.node[0], path.idx[0], &run[got++]);
	while (got < max && rb_path_next(rb, &path));
	rb_unlock(&rb->latch);
	return got;
}

static uint32_t
try_backward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max)
{
	rb_node    *leaf;
	uint32_t	ver,
				got = 0;

	if (!try_descend(rb, k, true, NULL, &leaf, &ver))
		return 0;
	for (int i = search(rb, leaf, k, true); i >= 0 && got < max; i--)
		if (!see(rb, leaf, (uint32_t) i, &run[got++]))
			return 0;
	return still(leaf, ver) ? got : 0;
}

uint32_t
rb_run_backward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max)
{
	rb_path		path;
	uint32_t	got;

	for (uint32_t tries = 0; tries < MANY; tries++)
	{
		got = try_backward(rb, k, run, max);
		if (got)
			return got;
		pause_after(tries);
	}
	rb_lock(&rb->latch);
	descend(rb, k, true, &path);
	got = 0;
	for (int i = (int) path.idx[0]; i >= 0 && got < max; i--)
		see(rb, path.node[0], (uint32_t) i, &run[got++]);
	rb_unlock(&rb->latch);
	return got;
}

rb_entry *
rb_random_leaf(rb_thread *t)
{
	rb_buffer  *rb = t->rb;
	rb_node    *leaf;
	uint32_t	ver;

	for (uint32_t tries = 0; tries < MANY; tries++)
	{
		if (try_descend(rb, NULL, false, t, &leaf, &ver))
		{
			uint32_t	c = count(leaf);
			rb_off		off = c ? LOAD(&rb_offs(leaf)[rb_random(t) % c]) : 0;

			if (off && still(leaf, ver))
				return rb_at(rb, off);
		}
		pause_after(tries);
	}
	return NULL;
}
