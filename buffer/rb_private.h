/*
 * rb_private.h
 *	  Layout and internal interfaces of the record buffer; README.md is the algorithm.
 *
 * Shared memory is addressed by rb_off: units of 8 bytes from the buffer's start, 0 = none.  So a leaf slot costs 12
 * bytes and an entry 12 bytes; an arena is used up to 32 GB.
 *
 * Latches, in the order in which they may be taken: `latch` (the one writer latch of the tree), then `limbo_lock` or
 * `alloc_lock`, which are leaves.  `reclaim_lock` is only tried, with no other latch held.  None is held across a
 * callback, a store call or a wait.
 */
#ifndef NEMO_RB_PRIVATE_H
#define NEMO_RB_PRIVATE_H

#include <string.h>
#include "rb.h"

typedef uint32_t rb_off;

#define RB_UNIT			8
#define RB_MAX_ARENA	((size_t) RB_UNIT << 32)
#define RB_CACHE_LINE	64

/* ---- entries ----------------------------------------------------------------------------------------------------- */

#define RB_GAP			0x0001	/* the span up to the next entry is unknown; changes bump the leaf's version */
#define RB_DIRTY		0x0002	/* the store has not acknowledged what is here */
#define RB_REF			0x0004	/* used since the evictor last came by */
#define RB_SENTINEL		0x0008	/* nothing is known about the key; once cleared it stays cleared */
#define RB_INFLIGHT		0x0010	/* a write of the key is outstanding: nobody else sends one, the entry stays (C4) */
#define RB_DOUBT		0x0020	/* an ambiguous write by `owner` may still land: the same */
#define RB_FETCHING		0x0040	/* somebody asks the store for the key */
#define RB_RENEWED		0x0080	/* the head changed since RB_INFLIGHT was set (C3) */
#define RB_LISTED		0x0100	/* clean, and the stored form is a version list: rewrite once settled */
#define RB_DEAD			0x0200	/* no longer in the tree */

typedef struct rb_entry
{
	uint16_t	klen;
	_Atomic uint16_t flags;
	union
	{
		struct
		{
			_Atomic uint16_t owner; /* slot of the writer (RB_INFLIGHT, RB_DOUBT) or of a sentinel's fetcher */
			uint16_t	unused;
		};
		rb_off		link;		/* in limbo */
	};
	_Atomic rb_off head;		/* newest version; 0 = tombstone, or sentinel when the flag says so */
	uint8_t		key[];
} rb_entry;

/* Before every rb_xversion in shared memory: how it, or what was cut off below it, waits for reclamation. */
typedef struct rb_xprefix
{
	rb_off		link;			/* this version is in limbo */
	rb_off		drop_link;		/* what `drop` names is in limbo */
	rb_off		drop;			/* a lone settled version that was below this one */
	uint32_t	unused;
} rb_xprefix;

/* ---- nodes ------------------------------------------------------------------------------------------------------- */

#define RB_LEAF_CAP		124
#define RB_INNER_CAP	93
#define RB_MAX_LEVELS	12
#define RB_NODE_HEADER	40
#define RB_NODE_BYTES	(RB_NODE_HEADER + 12 * RB_LEAF_CAP)

typedef struct rb_node
{
	_Atomic uint32_t ver;		/* odd while being changed, and for ever when dead */
	_Atomic uint16_t n;
	uint8_t		level;			/* 0 = leaf */
	_Atomic uint8_t mixed;		/* keys of several trees: key heads do not compare */
	_Atomic uint64_t tree;		/* of all keys unless mixed */
	_Atomic rb_off next, prev;	/* leaves; prev is for writers only */
	rb_off		link;			/* in limbo or in the pool */
	uint32_t	unused;
	uint64_t	unused2;
	_Atomic uint64_t slots[];	/* key heads, then entry offsets, then (inner) child offsets */
} rb_node;

static inline uint32_t
rb_cap(const rb_node *n)
{
	return n->level ? RB_INNER_CAP : RB_LEAF_CAP;
}
static inline _Atomic uint64_t *
rb_heads(rb_node *n)
{
	return n->slots;
}
static inline _Atomic rb_off *
rb_offs(rb_node *n)
{
	return (_Atomic rb_off *) (n->slots + rb_cap(n));
}
static inline _Atomic rb_off *
rb_children(rb_node *n)
{
	return rb_offs(n) + RB_INNER_CAP;
}

/* ---- the shared part --------------------------------------------------------------------------------------------- */

#define RB_FL	28
#define RB_SL	16

typedef enum rb_dead_kind
{
	RB_DEAD_DROP,				/* settled version named by the prefix of a living or dead version; first in order */
	RB_DEAD_CARRIED,			/* settled version named by an rb_carrier */
	RB_DEAD_ONE,				/* one version */
	RB_DEAD_CHAIN,				/* a version and all below it */
	RB_DEAD_ENTRY,				/* an entry and its versions */
	RB_DEAD_NODE,
	RB_DEAD_KINDS
} rb_dead_kind;

typedef struct rb_carrier
{
	rb_off		link;
	rb_off		version;
} rb_carrier;

typedef enum rb_counter
{
	RB_C_LOOKUPS, RB_C_HITS, RB_C_TOMBSTONE_HITS, RB_C_GAP_HITS, RB_C_MISSES, RB_C_RANGE_LOOKUPS, RB_C_RANGE_HITS,
	RB_C_RANGE_FETCHES, RB_C_ADMITTED, RB_C_EVICTED, RB_C_FLUSHED, RB_COUNTERS
} rb_counter;

#define RB_TICKET_KEY	(RB_MAX_KEY + 8)
#define RB_TICKET_SOFT	1		/* may be broken when memory is short */
#define RB_TICKET_FIRM	2

typedef struct rb_slot
{
	_Alignas(RB_CACHE_LINE) _Atomic uint64_t epoch; /* 0 = not in a guard */
	_Atomic uint32_t attached;
	_Atomic uint32_t ticket;	/* a fetch of [tstart, tend) is under way (B2): RB_TICKET_*; set under the latch */
	bool		broken;			/* an entry in there was removed all the same: read again; under the latch */
	uint32_t	tstart_len,
				tend_len;
	_Atomic uint64_t counter[RB_COUNTERS];
	uint8_t		tstart[RB_TICKET_KEY],	/* read and written under the latch */
				tend[RB_TICKET_KEY];
} rb_slot;

struct rb_buffer
{
	uint64_t	magic;
	size_t		size;			/* bytes in use of the arena */
	uint32_t	max_threads;
	size_t		heap_first,		/* bytes from the start */
				heap_end;
	uint64_t	heap_bytes;		/* what the heap can give out */

	/* the tree */
	_Alignas(RB_CACHE_LINE) _Atomic uint32_t latch;
	_Atomic rb_off root;
	_Atomic uint32_t ntickets;
	_Atomic uint64_t entries, tombstones, dirty, key_bytes, value_bytes;	/* changed under the latch */

	/* the heap: two-level segregated fit */
	_Alignas(RB_CACHE_LINE) _Atomic uint32_t alloc_lock;
	uint32_t	fl_map;
	uint32_t	sl_map[RB_FL];
	rb_off		free_list[RB_FL][RB_SL];
	_Atomic uint64_t free_bytes;
	rb_off		pool;			/* nodes kept so that an insertion cannot fail */
	uint32_t	pool_n;
	uint32_t	reserved;		/* versions handed out and not yet installed */

	/* reclamation */
	_Alignas(RB_CACHE_LINE) _Atomic uint64_t epoch;
	_Atomic uint32_t limbo_lock;
	_Atomic uint32_t reclaim_lock;
	rb_off		limbo[3][RB_DEAD_KINDS];
	_Atomic uint64_t limbo_n;

	_Atomic uint32_t stamp_waiters,
				flight_waiters,
				fetch_waiters;
	_Atomic uint64_t base[RB_COUNTERS]; /* counters at the last reset */

	_Alignas(RB_CACHE_LINE) rb_slot slots[];
};

static inline void *
rb_at(const rb_buffer *rb, rb_off off)
{
	return (uint8_t *) rb + (size_t) off * RB_UNIT;
}
static inline rb_off
rb_offset(const rb_buffer *rb, const void *p)
{
	return p ? (rb_off) (((const uint8_t *) p - (const uint8_t *) rb) / RB_UNIT) : 0;
}
static inline rb_version *
rb_ver_at(const rb_buffer *rb, rb_off off)
{
	return off ? rb_at(rb, off) : NULL;
}
static inline rb_xprefix *
rb_prefix(const rb_version *v)
{
	return (rb_xprefix *) v - 1;
}

/* ---- the private part -------------------------------------------------------------------------------------------- */

typedef struct rb_reserve
{
	rb_version *v;
	rb_off		entry;			/* block for a key of `klen` bytes */
	rb_off		carrier;		/* settled versions only */
	uint32_t	klen;
} rb_reserve;

typedef struct rb_mine
{
	rb_off		entry;			/* a sentinel that this thread fetches */
	rb_slice	key;			/* in the caller's or private memory */
} rb_mine;

typedef enum rb_outcome
{
	RB_O_CLEAN,					/* nothing to write */
	RB_O_WRITTEN,				/* acknowledged */
	RB_O_BUSY,					/* pending, in flight elsewhere, in doubt: look again later */
	RB_O_FAILED
} rb_outcome;

typedef enum rb_form
{
	RB_FORM_NONE, RB_FORM_SETTLED, RB_FORM_LIST, RB_FORM_DELETE
} rb_form;

typedef struct rb_flight
{
	rb_entry   *e;				/* RB_INFLIGHT, so it stays */
	rb_version *head;			/* that was encoded; compared under the guard only */
	rb_off		newv;			/* short version to swap in after a good write */
	rb_form		form;
	bool		keep_head;		/* a row lock must stay */
	uint32_t	cand;
	size_t		at, len;		/* encoded form in `enc` */
} rb_flight;

typedef struct rb_victims
{
	uint32_t	lo_len,
				hi_len;
	uint8_t		lo[RB_MAX_KEY + 8],	/* entries in [lo, hi) are to go */
				hi[RB_MAX_KEY + 8];
} rb_victims;

#define RB_VICTIMS		8		/* neighbourhoods that are evicted together */
#define RB_BATCH		256		/* entries flushed in one write, at most */
#define RB_BATCH_BYTES	(4 * 1024 * 1024)

struct rb_thread
{
	rb_buffer  *rb;
	rb_slot    *slot;
	uint32_t	slotno;
	uint32_t	depth;			/* of guards */
	const rb_port *port;
	st_store   *store;
	st_store   *(*open) (void *arg, st_error *err);
	void	   *open_arg;
	uint64_t	rng;

	rb_reserve *reserves;
	uint32_t	nreserves,
				reserves_cap;
	bool		pressed;		/* eviction may break tickets */
	rb_off		spare;			/* entry block for a key of spare_klen bytes */
	uint32_t	spare_klen;

	/* of the call under way; given back by rb_reset() */
	struct rb_block *pm;		/* private memory */
	st_result	result;
	_Atomic uint32_t *waiting;	/* counted in there */
	rb_mine    *mine;
	uint32_t	nmine;
	rb_off	   *held;			/* shared blocks not yet in the tree */
	uint32_t	nheld,
				held_cap;
	rb_flight  *flights;		/* RB_BATCH */
	uint32_t	nflights;
	bool		sent;			/* their write has left */
	uint8_t    *enc;
	size_t		enc_cap;
	rb_stored_version *sv;
	uint32_t	sv_cap;

	rb_victims *victims;		/* RB_VICTIMS */
	rb_entry  **cand;			/* RB_BATCH, under the guard */
	uint8_t    *outcome;
	uint32_t	ncand;

	rb_entry  **doubts;			/* RB_DOUBT and owned by this thread */
	uint32_t	ndoubts,
				doubts_cap;
};

/* ---- rb.c -------------------------------------------------------------------------------------------------------- */

extern void rb_lock(_Atomic uint32_t *lock);
extern bool rb_trylock(_Atomic uint32_t *lock);
extern void rb_unlock(_Atomic uint32_t *lock);
extern rb_status rb_fail(rb_error *err, rb_status status, const char *fmt,...) __attribute__((format(printf, 3, 4)));
extern rb_status rb_fail_store(rb_error *err);	/* err->st is the store's */
extern st_store *rb_store(rb_thread *t, rb_error *err); /* NULL: err says why */
extern void *rb_pm_alloc(rb_thread *t, size_t size);	/* NULL = no memory; freed by rb_pm_free() */
extern void rb_pm_free(rb_thread *t);
extern uint64_t rb_random(rb_thread *t);
/* port->wait, counted in *waiters (may be NULL) so that wake-ups nobody waits for can be spared. */
extern void rb_wait(rb_thread *t, _Atomic uint32_t *waiters, uint32_t channel, uint32_t timeout_ms);
/*
 * One ticket per thread: a fetch of [start, end) is under way.  No entry in it is removed, unless the ticket is soft and
 * memory is so short that it is broken (B2).
 */
extern void rb_ticket_take(rb_thread *t, rb_slice start, rb_slice end, uint32_t kind);
extern void rb_ticket_narrow(rb_thread *t, rb_slice start, rb_slice end);
extern bool rb_ticket_broken(rb_thread *t);
extern bool rb_ticket_broken_latched(rb_thread *t);	/* under the latch */
extern void rb_ticket_release(rb_thread *t);
/* Under the latch: must e stay for somebody's fetch?  When pressed, other threads' soft tickets are broken instead. */
extern bool rb_ticketed(rb_thread *t, const rb_entry *e);

static inline void
rb_count(rb_thread *t, rb_counter c, uint64_t n)
{
	_Atomic uint64_t *p = &t->slot->counter[c];

	atomic_store_explicit(p, atomic_load_explicit(p, memory_order_relaxed) + n, memory_order_relaxed);
}
static inline void
rb_gauge(_Atomic uint64_t *p, int64_t n)
{
	atomic_store_explicit(p, atomic_load_explicit(p, memory_order_relaxed) + (uint64_t) n, memory_order_relaxed);
}

/* ---- rb_alloc.c -------------------------------------------------------------------------------------------------- */

extern void rb_heap_init(rb_buffer *rb);
extern rb_off rb_alloc(rb_buffer *rb, size_t bytes);	/* 0 = none */
extern void rb_free(rb_buffer *rb, rb_off off);
extern size_t rb_block_bytes(const rb_buffer *rb, rb_off off);	/* of a block in use */
extern rb_off rb_node_alloc(rb_buffer *rb);
/* One more (less) version may be installed: keeps enough nodes aside.  false = no memory. */
extern bool rb_pool_reserve(rb_buffer *rb);
extern void rb_pool_unreserve(rb_buffer *rb);
extern void rb_pool_add(rb_buffer *rb, rb_off node);	/* for a reservation that failed */
extern size_t rb_version_size(uint32_t len, bool settled);	/* of the block */
extern rb_version *rb_version_init(rb_buffer *rb, rb_off block, uint32_t len, bool settled);
extern rb_version *rb_version_alloc(rb_buffer *rb, uint32_t len, bool settled); /* shared; NULL = none */
extern void rb_version_block_free(rb_buffer *rb, rb_version *v);	/* never visible to anybody */
extern size_t rb_version_bytes(const rb_buffer *rb, const rb_version *v);
/* What the tree no longer reaches, after it was unlinked; freed when no guard can see it. */
extern void rb_retire(rb_buffer *rb, rb_dead_kind kind, rb_off off);
extern void rb_retire_below(rb_buffer *rb, rb_version *holder, rb_version *first);	/* chain cut off below holder */
extern void rb_reclaim(rb_buffer *rb);
extern const char *rb_heap_check(rb_buffer *rb);

/* ---- rb_tree.c: nodes and their search -------------------------------------------------------------------------- */

typedef struct rb_key
{
	const uint8_t *data;
	uint32_t	len;
	uint64_t	tree,
				head;			/* bytes 8..15, big-endian, zero padded */
} rb_key;

typedef struct rb_path
{
	uint32_t	levels;
	rb_node    *node[RB_MAX_LEVELS];	/* node[0] = leaf */
	uint32_t	idx[RB_MAX_LEVELS];
} rb_path;

/* An entry as it was when its leaf was looked at. */
typedef struct rb_seen
{
	rb_entry   *e;
	uint16_t	flags;
	rb_off		head;
} rb_seen;

extern uint64_t rb_be64(const uint8_t *p);
extern void rb_put_be64(uint8_t *p, uint64_t v);
extern rb_key rb_mkkey(const void *data, uint32_t len);
extern int	rb_cmp(const void *a, uint32_t alen, const void *b, uint32_t blen);
extern bool rb_tree_init(rb_buffer *rb);

static inline int
rb_cmp_entry(const rb_entry *e, const rb_key *k)
{
	return rb_cmp(e->key, e->klen, k->data, k->len);
}
static inline bool
rb_in_tree(const rb_entry *e, uint64_t tree)
{
	return e->klen >= RB_TREE_LEN && rb_be64(e->key) == tree;
}
static inline bool
rb_same_tree(const rb_entry *a, const rb_entry *b)
{
	return a->klen >= RB_TREE_LEN && b->klen >= RB_TREE_LEN && memcmp(a->key, b->key, RB_TREE_LEN) == 0;
}
static inline uint16_t
rb_flags(const rb_entry *e)
{
	return atomic_load_explicit(&((rb_entry *) e)->flags, memory_order_acquire);
}
static inline void
rb_set(rb_entry *e, uint16_t bits)
{
	atomic_fetch_or_explicit(&e->flags, bits, memory_order_acq_rel);
}
static inline void
rb_clear(rb_entry *e, uint16_t bits)
{
	atomic_fetch_and_explicit(&e->flags, (uint16_t) ~bits, memory_order_acq_rel);
}
static inline void
rb_touch(rb_entry *e, uint16_t flags)
{
	if (!(flags & RB_REF))
		atomic_fetch_or_explicit(&e->flags, RB_REF, memory_order_relaxed);
}
static inline rb_off
rb_head(const rb_entry *e)
{
	return atomic_load_explicit(&((rb_entry *) e)->head, memory_order_acquire);
}

/* Under the latch: the entry with the largest key <= k (strict: < k); *equal says whether the key is k. */
extern rb_entry *rb_find(rb_buffer *rb, const rb_key *k, rb_path *path, bool *equal);
extern rb_entry *rb_path_next(rb_buffer *rb, rb_path *path);	/* moves on; NULL = the end (path is then unchanged) */
/* Under the latch: a gap bit, with its leaf's version. */
extern void rb_set_gap(rb_path *path, rb_entry *e, bool unknown);
/* Under the latch: puts e behind the entry at path; false = no memory for a node, nothing is changed. */
extern bool rb_link(rb_buffer *rb, rb_path *path, rb_entry *e);
/* Under the latch: takes out the entry at path, opens its predecessor's gap as A1 says, and retires it. */
extern void rb_unlink(rb_buffer *rb, rb_path *path);

/* In a guard, without latch.  run[0] = the entry <= key, the following ones in order; all of one moment (A3). */
extern uint32_t rb_run_forward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max);
/* In a guard, without latch.  run[0] = the entry < key, then descending; all of one moment.  At least one. */
extern uint32_t rb_run_backward(rb_buffer *rb, const rb_key *k, rb_seen *run, uint32_t max);
/* In a guard: the first key of a random leaf. */
extern rb_entry *rb_random_leaf(rb_thread *t);

/* ---- rb_entry.c: what happens to one entry, under the latch ------------------------------------------------------- */

extern rb_entry *rb_entry_init(rb_buffer *rb, rb_off block, rb_slice key, uint16_t flags, rb_off head);
extern bool rb_entry_add(rb_buffer *rb, rb_path *path, rb_entry *e);	/* rb_link and the gauges */
extern void rb_entry_remove(rb_buffer *rb, rb_path *path);	/* rb_unlink and the gauges */
extern void rb_entry_set_head(rb_buffer *rb, rb_entry *e, rb_off head);
extern void rb_entry_resolve(rb_buffer *rb, rb_entry *e, rb_off head);	/* sentinel: 0 = absent */
extern void rb_entry_dirty(rb_buffer *rb, rb_entry *e);
extern void rb_entry_clean(rb_buffer *rb, rb_entry *e);
extern size_t rb_entry_bytes(const rb_buffer *rb, const rb_entry *e);	/* with its versions */

/* ---- rb_read.c --------------------------------------------------------------------------------------------------- */

typedef enum rb_known
{
	RB_K_MISS, RB_K_HEAD, RB_K_TOMBSTONE, RB_K_GAP, RB_K_FETCHING
} rb_known;

extern rb_known rb_look(rb_thread *t, const rb_key *k, const rb_version **head);	/* in a guard */
/* Waits for somebody else's fetch of a key, for a while; RB_CANCELED. */
extern rb_status rb_await_fetch(rb_thread *t, rb_slice key, uint32_t round, rb_error *err);
/*
 * Builds the versions of a stored record; shared = in the arena, held until rb_unhold(); otherwise in private memory.
 * *listed = not settled.
 */
extern rb_status rb_build(rb_thread *t, st_slice bytes, bool shared, rb_version **head, bool *listed, rb_error *err);
extern bool rb_hold(rb_thread *t, rb_off block);	/* to be freed unless rb_unhold(); false = no memory, freed */
extern void rb_unhold(rb_thread *t, uint32_t to);	/* keep blocks held since */
extern void rb_release_held(rb_thread *t, uint32_t to); /* free them */
extern void rb_release_mine(rb_thread *t);

/* ---- rb_range.c -------------------------------------------------------------------------------------------------- */

extern void rb_succ(uint8_t *buf, uint32_t *len);	/* the next key after buf[0..len): one byte longer */

/*
 * Puts one record fetched under a ticket into the buffer if its key is not there.  RB_FULL = no memory; RB_UNKNOWN = the
 * ticket is broken.
 */
extern rb_status rb_admit(rb_thread *t, const st_record *rec, rb_error *err);

/* ---- rb_flush.c -------------------------------------------------------------------------------------------------- */

/*
 * Writes t->cand[0..ncand) (collected in the guard, depth 1, which is left) and fills t->outcome[].  RB_OK also when
 * some are busy.
 */
extern rb_status rb_flush_cand(rb_thread *t, rb_error *err);
/* All dirty entries in [start, end); wait = also those that are busy now. */
extern rb_status rb_flush_range(rb_thread *t, rb_slice start, rb_slice end, bool wait, rb_error *err);
extern rb_status rb_resolve_doubts(rb_thread *t, rb_error *err);
extern void rb_abandon_flights(rb_thread *t);

/* ---- rb_evict.c -------------------------------------------------------------------------------------------------- */

/* Tries to bring free memory to `bytes` above the head-room; failure to do so is no error. */
extern void rb_make_room(rb_thread *t, size_t bytes);
/* Allocates, evicting when needed.  status says why not. */
extern rb_status rb_clear_space(rb_thread *t, size_t bytes, rb_error *err);
extern rb_off rb_alloc_evict(rb_thread *t, size_t bytes, rb_status *status, rb_error *err);

/* channels of rb_port.wait */
#define RB_CH_STAMP		0
#define RB_CH_FLIGHT	1
#define RB_CH_FETCH		2		/* and up */

extern uint32_t rb_fetch_channel(const void *key, uint32_t len);

#endif							/* NEMO_RB_PRIVATE_H */
