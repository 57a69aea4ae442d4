/*
 * rb_alloc.c
 *	  The arena's heap, the pool of nodes, and epoch reclamation.
 *
 * Heap: two-level segregated fit with coalescing.  A block is a 4-byte header (size in units, two flags) and the
 * payload; payloads begin at multiples of 8, headers 4 bytes before.  A free block has its list links at the payload's
 * start and its size in its last 4 bytes.  Everything is under `alloc_lock`.
 *
 * Epochs: a guard publishes the epoch it entered in.  What is unlinked in epoch e is freed in epoch e + 2; the epoch
 * moves on when every guard has seen the present one, and only after the bucket that it will fill was emptied.  One
 * thread at a time reclaims, so buckets are freed in the order of their epochs; in a bucket the versions that prefixes
 * name go before the prefixes' owners.
 */
#include <sched.h>
#include "rb_private.h"

#define FREE		1u			/* header flags */
#define PREV_FREE	2u
#define MAX_UNITS	(1u << 29)

static inline uint32_t *
header(const rb_buffer *rb, rb_off off)
{
	return (uint32_t *) ((uint8_t *) rb + (size_t) off * RB_UNIT - 4);
}

static inline uint32_t
units(const rb_buffer *rb, rb_off off)
{
	return *header(rb, off) >> 2;
}

static inline rb_off *
links(const rb_buffer *rb, rb_off off)	/* [0] next, [1] previous */
{
	return rb_at(rb, off);
}

static void
bin_of(uint32_t n, uint32_t *fl, uint32_t *sl)
{
	if (n < RB_SL)
	{
		*fl = 0;
		*sl = n;
	}
	else
	{
		uint32_t	log = 31 - (uint32_t) __builtin_clz(n);

		*fl = log - 3;
		*sl = (n >> (log - 4)) & (RB_SL - 1);
	}
}

static void
put_free(rb_buffer *rb, rb_off off, uint32_t n)
{
	uint32_t	fl,
				sl;
	rb_off	   *l = links(rb, off);

	bin_of(n, &fl, &sl);
	*header(rb, off) = n << 2 | FREE;	/* two free blocks are never neighbours */
	*(header(rb, off + n) - 1) = n;
	*header(rb, off + n) |= PREV_FREE;
	l[0] = rb->free_list[fl][sl];
	l[1] = 0;
	if (l[0])
		links(rb, l[0])[1] = off;
	rb->free_list[fl][sl] = off;
	rb->sl_map[fl] |= 1u << sl;
	rb->fl_map |= 1u << fl;
}

static void
take_free(rb_buffer *rb, rb_off off)
{
	uint32_t	fl,
				sl,
				n = units(rb, off);
	rb_off	   *l = links(rb, off);

	bin_of(n, &fl, &sl);
	if (l[0])
		links(rb, l[0])[1] = l[1];
	if (l[1])
		links(rb, l[1])[0] = l[0];
	else
	{
		rb->free_list[fl][sl] = l[0];
		if (!l[0])
		{
			rb->sl_map[fl] &= ~(1u << sl);
			if (!rb->sl_map[fl])
				rb->fl_map &= ~(1u << fl);
		}
	}
	*header(rb, off + n) &= ~PREV_FREE;
}

/* The first block of a list that is sure to be large enough, or one of the list below that happens to be. */
static rb_off
find_free(rb_buffer *rb, uint32_t n)
{
	uint32_t	fl,
				sl,
				map;
	uint32_t	up = n < RB_SL ? n : n + (1u << (31 - (uint32_t) __builtin_clz(n) - 4)) - 1;

	bin_of(up, &fl, &sl);
	if (fl < RB_FL)
	{
		map = rb->sl_map[fl] & (~0u << sl);
		if (!map)
		{
			uint32_t	fmap = fl + 1 < RB_FL ? rb->fl_map & (~0u << (fl + 1)) : 0;

			if (fmap)
			{
				fl = (uint32_t) __builtin_ctz(fmap);
				map = rb->sl_map[fl];
			}
		}
		if (map)
			return rb->free_list[fl][__builtin_ctz(map)];
	}
	bin_of(n, &fl, &sl);
	map = 0;
	for (rb_off off = rb->free_list[fl][sl]; off && map < 32; off = links(rb, off)[0], map++)
		if (units(rb, off) >= n)
			return off;
	return 0;
}

static rb_off
alloc_locked(rb_buffer *rb, size_t bytes)
{
	uint32_t	n = (uint32_t) ((bytes + 4 + RB_UNIT - 1) / RB_UNIT),
				have;
	rb_off		off;

	if (bytes > (size_t) MAX_UNITS * RB_UNIT / 2)
		return 0;
	if (n < 2)
		n = 2;
	off = find_free(rb, n);
	if (!off)
		return 0;
	have = units(rb, off);
	take_free(rb, off);
	if (have - n >= 3)
	{
		*header(rb, off) = n << 2;
		*header(rb, off + n) = 0;
		put_free(rb, off + n, have - n);
		have = n;
	}
	else
		*header(rb, off) = have << 2;
	atomic_store_explicit(&rb->free_bytes, atomic_load_explicit(&rb->free_bytes, memory_order_relaxed) -
						  (uint64_t) have * RB_UNIT, memory_order_relaxed);
	return off;
}

static void
free_locked(rb_buffer *rb, rb_off off)
{
	uint32_t	n = units(rb, off);

	atomic_store_explicit(&rb->free_bytes, atomic_load_explicit(&rb->free_bytes, memory_order_relaxed) +
						  (uint64_t) n * RB_UNIT, memory_order_relaxed);
	if (*header(rb, off) & PREV_FREE)
	{
		uint32_t	before = *(header(rb, off) - 1);

		off -= before;
		take_free(rb, off);
		n += before;
	}
	if (*header(rb, off + n) & FREE)
	{
		uint32_t	after = units(rb, off + n);

		take_free(rb, off + n);
		n += after;
	}
	put_free(rb, off, n);
}

/* The heap is cut into regions that a header can describe, each ended by a header that is always in use. */
void
rb_heap_init(rb_buffer *rb)
{
	size_t		at = (rb->heap_first + RB_UNIT - 1) / RB_UNIT + 1,
				end = rb->heap_end / RB_UNIT;

	rb->heap_bytes = 0;
	while (at + 4 < end)
	{
		size_t		n = end - 1 - at;

		if (n > MAX_UNITS - 1)
			n = MAX_UNITS - 1;
		*header(rb, (rb_off) (at + n)) = 1 << 2;
		put_free(rb, (rb_off) at, (uint32_t) n);
		rb->heap_bytes += n * RB_UNIT;
		at += n + 1;
	}
	atomic_store(&rb->free_bytes, rb->heap_bytes);
}

rb_off
rb_alloc(rb_buffer *rb, size_t bytes)
{
	rb_off		off;

	rb_lock(&rb->alloc_lock);
	off = alloc_locked(rb, bytes);
	rb_unlock(&rb->alloc_lock);
	return off;
}

void
rb_free(rb_buffer *rb, rb_off off)
{
	if (!off)
		return;
	rb_lock(&rb->alloc_lock);
	free_locked(rb, off);
	rb_unlock(&rb->alloc_lock);
}

/* The flags of a used block's header change with its neighbours, so even this needs the lock. */
size_t
rb_block_bytes(const rb_buffer *rb, rb_off off)
{
	size_t		n;

	rb_lock((_Atomic uint32_t *) &rb->alloc_lock);
	n = (size_t) units(rb, off) * RB_UNIT;
	rb_unlock((_Atomic uint32_t *) &rb->alloc_lock);
	return n;
}

/* ---- nodes ------------------------------------------------------------------------------------------------------- */

#define POOL_BASE 8				/* splits of inner nodes */

static rb_node *
pool_pop(rb_buffer *rb)
{
	rb_node    *n = rb_at(rb, rb->pool);

	rb->pool = n->link;
	rb->pool_n--;
	return n;
}

static void
pool_push(rb_buffer *rb, rb_off off)
{
	((rb_node *) rb_at(rb, off))->link = rb->pool;
	rb->pool = off;
	rb->pool_n++;
}

rb_off
rb_node_alloc(rb_buffer *rb)
{
	rb_off		off;

	rb_lock(&rb->alloc_lock);
	/* what is beyond the reserve first, then the heap, then the reserve: that is what it is for */
	if (rb->pool_n > POOL_BASE + rb->reserved || !(off = alloc_locked(rb, RB_NODE_BYTES)))
		off = rb->pool_n ? rb_offset(rb, pool_pop(rb)) : 0;
	rb_unlock(&rb->alloc_lock);
	return off;
}

/*
 * Nodes are the largest blocks of most workloads, and a heap that records have fragmented has no room for them: once
 * made, they stay nodes.
 */
static void
free_node_locked(rb_buffer *rb, rb_off off)
{
	pool_push(rb, off);
}

void
rb_pool_add(rb_buffer *rb, rb_off off)
{
	rb_lock(&rb->alloc_lock);
	pool_push(rb, off);
	rb_unlock(&rb->alloc_lock);
}

bool
rb_pool_reserve(rb_buffer *rb)
{
	bool		ok = true;

	rb_lock(&rb->alloc_lock);
	rb->reserved++;
	while (ok && rb->pool_n < POOL_BASE + rb->reserved)
	{
		rb_off		off = alloc_locked(rb, RB_NODE_BYTES);

		if (off)
			pool_push(rb, off);
		else
			ok = false;
	}
	if (!ok)
		rb->reserved--;
	rb_unlock(&rb->alloc_lock);
	return ok;
}

void
rb_pool_unreserve(rb_buffer *rb)
{
	rb_lock(&rb->alloc_lock);
	rb->reserved--;
	rb_unlock(&rb->alloc_lock);
}

/* ---- versions ---------------------------------------------------------------------------------------------------- */

size_t
rb_version_size(uint32_t len, bool settled)
{
	return (settled ? sizeof(rb_version) : sizeof(rb_xprefix) + sizeof(rb_xversion)) + len;
}

rb_version *
rb_version_init(rb_buffer *rb, rb_off off, uint32_t len, bool settled)
{
	rb_version *v = rb_at(rb, off);

	if (!settled)
	{
		rb_xprefix *p = rb_at(rb, off);
		rb_xversion *x = (rb_xversion *) (p + 1);

		memset(p, 0, sizeof(*p));
		v = &x->v;
		atomic_store_explicit(&x->older, NULL, memory_order_relaxed);
		atomic_store_explicit(&x->lsn, 0, memory_order_relaxed);
		x->xid = 0;
		x->cid = x->aux = 0;
	}
	v->len = len;
	v->kind = RB_DATA;
	v->tag = 0;
	atomic_store_explicit(&v->flags, settled ? RB_SETTLED : 0, memory_order_relaxed);
	return v;
}

rb_version *
rb_version_alloc(rb_buffer *rb, uint32_t len, bool settled)
{
	rb_off		off = rb_alloc(rb, rb_version_size(len, settled));

	return off ? rb_version_init(rb, off, len, settled) : NULL;
}

static rb_off
version_block(const rb_buffer *rb, const rb_version *v)
{
	return rb_offset(rb, rb_is_settled(v) ? (const void *) v : (const void *) rb_prefix(v));
}

void
rb_version_block_free(rb_buffer *rb, rb_version *v)
{
	rb_free(rb, version_block(rb, v));
}

size_t
rb_version_bytes(const rb_buffer *rb, const rb_version *v)
{
	return rb_block_bytes(rb, version_block(rb, v));
}

/* ---- reclamation ------------------------------------------------------------------------------------------------- */

/* What is dead keeps its contents for those who still look at it; each kind has a place for the link of its own. */
static rb_off *
dead_link(const rb_buffer *rb, rb_dead_kind kind, rb_off off)
{
	void	   *p = rb_at(rb, off);

	switch (kind)
	{
		case RB_DEAD_DROP:
			return &rb_prefix(p)->drop_link;
		case RB_DEAD_CARRIED:
			return &((rb_carrier *) p)->link;
		case RB_DEAD_ONE:
		case RB_DEAD_CHAIN:
			return &rb_prefix(p)->link;
		case RB_DEAD_ENTRY:
			return &((rb_entry *) p)->link;
		default:
			return &((rb_node *) p)->link;
	}
}

void
rb_retire(rb_buffer *rb, rb_dead_kind kind, rb_off off)
{
	uint64_t	e;

	rb_lock(&rb->limbo_lock);
	/* a read-modify-write, so that whoever enters a later epoch has seen the unlinking */
	e = atomic_fetch_add(&rb->epoch, 0);
	*dead_link(rb, kind, off) = rb->limbo[e % 3][kind];
	rb->limbo[e % 3][kind] = off;
	atomic_store_explicit(&rb->limbo_n, atomic_load_explicit(&rb->limbo_n, memory_order_relaxed) + 1,
						  memory_order_relaxed);
	rb_unlock(&rb->limbo_lock);
}

void
rb_retire_below(rb_buffer *rb, rb_version *holder, rb_version *first)
{
	if (!first)
		return;
	if (!rb_is_settled(first))
		rb_retire(rb, RB_DEAD_CHAIN, rb_offset(rb, first));
	else
	{
		rb_prefix(holder)->drop = rb_offset(rb, first);
		rb_retire(rb, RB_DEAD_DROP, rb_offset(rb, holder));
	}
}

static void
free_chain(rb_buffer *rb, rb_version *v)
{
	while (v)
	{
		rb_version *older = (rb_version *) rb_older(v);

		free_locked(rb, version_block(rb, v));
		v = older;
	}
}

static void
free_dead(rb_buffer *rb, rb_dead_kind kind, rb_off off)
{
	switch (kind)
	{
		case RB_DEAD_DROP:
			free_locked(rb, rb_prefix(rb_at(rb, off))->drop);
			break;
		case RB_DEAD_CARRIED:
			free_locked(rb, ((rb_carrier *) rb_at(rb, off))->version);
			free_locked(rb, off);
			break;
		case RB_DEAD_ONE:
			free_locked(rb, version_block(rb, rb_at(rb, off)));
			break;
		case RB_DEAD_CHAIN:
			free_chain(rb, rb_at(rb, off));
			break;
		case RB_DEAD_ENTRY:
			free_chain(rb, rb_ver_at(rb, rb_head(rb_at(rb, off))));
			free_locked(rb, off);
			break;
		default:
			free_node_locked(rb, off);
	}
}

static void
free_bucket(rb_buffer *rb, uint32_t b)
{
	rb_off		list[RB_DEAD_KINDS];
	uint64_t	freed = 0;

	rb_lock(&rb->limbo_lock);
	memcpy(list, rb->limbo[b], sizeof(list));
	memset(rb->limbo[b], 0, sizeof(list));
	rb_unlock(&rb->limbo_lock);
	for (int kind = 0; kind < RB_DEAD_KINDS; kind++)
		for (rb_off off = list[kind], next; off;)
		{
			/* others may want the heap */
			rb_lock(&rb->alloc_lock);
			for (int i = 0; off && i < 16; i++, off = next)
			{
				next = *dead_link(rb, (rb_dead_kind) kind, off);
				free_dead(rb, (rb_dead_kind) kind, off);
				freed++;
			}
			rb_unlock(&rb->alloc_lock);
		}
	if (freed)
	{
		rb_lock(&rb->limbo_lock);
		atomic_store_explicit(&rb->limbo_n, atomic_load_explicit(&rb->limbo_n, memory_order_relaxed) - freed,
							  memory_order_relaxed);
		rb_unlock(&rb->limbo_lock);
	}
}

/* Frees what no guard can see, and moves the epoch on as far as guards allow. */
void
rb_reclaim(rb_buffer *rb)
{
	if (!rb_trylock(&rb->reclaim_lock))
		return;
	for (int step = 0; step < 3; step++)
	{
		uint64_t	e = atomic_load(&rb->epoch);
		bool		seen = true;

		free_bucket(rb, (uint32_t) ((e + 1) % 3));
		for (uint32_t i = 0; seen && i < rb->max_threads; i++)
		{
			uint64_t	s = atomic_load(&rb->slots[i].epoch);

			seen = s == 0 || s == e;
		}
		if (!seen)
			break;
		atomic_fetch_add(&rb->epoch, 1);
	}
	rb_unlock(&rb->reclaim_lock);
}

/* ---- check ------------------------------------------------------------------------------------------------------- */

const char *
rb_heap_check(rb_buffer *rb)
{
	size_t		at = (rb->heap_first + RB_UNIT - 1) / RB_UNIT + 1,
				end = rb->heap_end / RB_UNIT;
	uint64_t	free_units = 0,
				listed = 0;
	const char *words = NULL;

	rb_lock(&rb->alloc_lock);
	while (!words && at + 4 < end)
	{
		bool		prev_free = false;
		size_t		n = end - 1 - at;
		size_t		stop;

		if (n > MAX_UNITS - 1)
			n = MAX_UNITS - 1;
		stop = at + n;
		while (!words && at < stop)
		{
			uint32_t	h = *header(rb, (rb_off) at);

			if ((h >> 2) < 2 || at + (h >> 2) > stop)
				words = "heap: a block has an impossible size";
			else if (((h & PREV_FREE) != 0) != prev_free)
				words = "heap: a block is wrong about its neighbour";
			else if ((h & FREE) && prev_free)
				words = "heap: two free blocks side by side";
			prev_free = h & FREE;
			if (prev_free)
				free_units += h >> 2;
			at += h >> 2;
		}
		at++;
	}
	for (int fl = 0; !words && fl < RB_FL; fl++)
		for (int sl = 0; sl < RB_SL; sl++)
			for (rb_off off = rb->free_list[fl][sl]; off; off = links(rb, off)[0])
				listed += units(rb, off);
	if (!words && (listed != free_units || free_units * RB_UNIT != atomic_load(&rb->free_bytes)))
		words = "heap: free memory does not add up";
	rb_unlock(&rb->alloc_lock);
	return words;
}
