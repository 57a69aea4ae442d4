/*
 * rb.h
 *	  The record buffer: a shared-memory B+tree over hot records, the gaps between them, and what is known absent.
 *
 * One ordered map of byte-string keys.  Bytes 0..7 of every key name its tree (big-endian); the rest is the tree's own
 * key.  A bare 8-byte key is the tree's low fence.  The buffer is a partial cache of the store's map, holds writes until
 * they are flushed, and remembers absence: a tombstone for one key, a gap bit for the span up to the next entry
 * (paper sections 4.1, 5; INVARIANTS A-C, E1-E3; buffer/README.md is the algorithm).
 *
 * Plain C11.  All shared state lies in one arena that the caller maps at the same address in every process.
 * Nothing here longjmps and no latch is held across a callback, a store call or a wait; callbacks of rb_port and
 * visitors may longjmp, after which the caller must call rb_reset() before using its rb_thread again.
 *
 * Memory reachable from the buffer (versions, keys) may be read only between rb_enter() and rb_leave(); inside, a
 * pointer once seen stays readable (epoch reclamation) although it may no longer be current.
 */
#ifndef NEMO_RB_H
#define NEMO_RB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../remote/store.h"

typedef struct rb_slice
{
	const uint8_t *data;
	uint32_t	len;
} rb_slice;

#define RB_TREE_LEN		8		/* bytes of every key that name the tree */
#define RB_MAX_KEY		2048	/* bytes, tree included */
#define RB_MAX_VALUE	(16 * 1024 * 1024)	/* bytes of one version's data */
#define RB_LSN_PENDING	UINT64_MAX	/* installed, its log record not yet inserted (INVARIANTS C9) */

/* ---- versions ---------------------------------------------------------------------------------------------------- */

typedef enum rb_kind
{
	RB_DATA = 0,				/* the record */
	RB_DELETE = 1,				/* the record was deleted; data may say where it moved */
	RB_LOCK = 2					/* an explicit row lock: no data change, `aux` is its mode; never logged */
} rb_kind;

/* hint bits, set by readers with relaxed atomics; the rest of a version never changes */
#define RB_HINT_COMMITTED	0x0001
#define RB_HINT_ABORTED		0x0002
#define RB_SETTLED			0x0004	/* short form: no xid, cid, aux, LSN and nothing older */
#define RB_SPECULATIVE		0x0008	/* ON CONFLICT insertion not yet confirmed; aux is its token */

typedef struct rb_version
{
	uint32_t	len;			/* bytes of data */
	uint8_t		kind;			/* rb_kind */
	uint8_t		tag;			/* version tag, 4 bits */
	_Atomic uint16_t flags;		/* RB_HINT_*, RB_SETTLED, RB_SPECULATIVE */
} rb_version;					/* settled: data follows */

typedef struct rb_xversion
{
	rb_version	v;
	_Atomic(rb_version *) older;
	uint64_t	xid;			/* 64-bit (epoch-extended) transaction id of the writer */
	_Atomic uint64_t lsn;		/* end of its log record; RB_LSN_PENDING before; 0 = needs none */
	uint32_t	cid;			/* command id */
	uint32_t	aux;			/* lock mode or speculative token */
} rb_xversion;					/* data follows */

static inline bool
rb_is_settled(const rb_version *v)
{
	return (atomic_load_explicit(&((rb_version *) v)->flags, memory_order_relaxed) & RB_SETTLED) != 0;
}
static inline const uint8_t *
rb_data(const rb_version *v)
{
	return (const uint8_t *) v + (rb_is_settled(v) ? sizeof(rb_version) : sizeof(rb_xversion));
}
static inline const rb_xversion *
rb_x(const rb_version *v)		/* NULL when settled */
{
	return rb_is_settled(v) ? NULL : (const rb_xversion *) v;
}
static inline const rb_version *
rb_older(const rb_version *v)
{
	return rb_is_settled(v) ? NULL : atomic_load_explicit(&((rb_xversion *) v)->older, memory_order_acquire);
}
static inline void
rb_hint(const rb_version *v, uint16_t hint)
{
	atomic_fetch_or_explicit(&((rb_version *) v)->flags, hint, memory_order_relaxed);
}

/* ---- the port: what the buffer asks of its host ------------------------------------------------------------------- */

typedef enum rb_xid_state
{
	RB_XID_RUNNING,				/* in progress (or prepared) */
	RB_XID_ABORTED,
	RB_XID_COMMITTED,			/* committed, some live snapshot may not see it */
	RB_XID_SETTLED				/* committed before every live snapshot */
} rb_xid_state;

typedef struct rb_port
{
	void	   *ctx;
	rb_xid_state (*xid_state) (void *ctx, uint64_t xid);
	/* make the log durable up to lsn; 0 = done, else the write is not attempted (INVARIANTS C2) */
	int			(*wal_flush) (void *ctx, uint64_t lsn);
	/* sleep until wake(channel) or the time is over; channel < RB_CHANNELS; spurious returns are fine */
	void		(*wait) (void *ctx, uint32_t channel, uint32_t timeout_ms);
	void		(*wake) (void *ctx, uint32_t channel);
	bool		(*interrupted) (void *ctx);	/* true = give up waiting (RB_CANCELED) */
	/* a stored version list with this oldest xid went to the store for `tree` (INVARIANTS C8, F7); before the write */
	void		(*note_unsettled) (void *ctx, uint64_t tree, uint64_t oldest_xid);
} rb_port;
#define RB_CHANNELS 64

/* ---- set-up ------------------------------------------------------------------------------------------------------- */

typedef struct rb_buffer rb_buffer;	/* the shared part, at the start of the arena */
typedef struct rb_thread rb_thread;	/* one per process or thread, private malloc'ed memory plus a shared slot */

/* Lay an empty buffer in `size` bytes at `arena` (page aligned, zeroed), for at most max_threads users.  NULL = too small. */
extern rb_buffer *rb_create(void *arena, size_t size, uint32_t max_threads);
extern size_t rb_min_size(uint32_t max_threads);

/* slot < max_threads, used by nobody else now.  store may be NULL until the first miss: set by rb_set_store(). */
extern rb_thread *rb_attach(rb_buffer *rb, uint32_t slot, const rb_port *port);
extern void rb_detach(rb_thread *t);
/* open is called when a store is first needed; it returns NULL and fills err on failure.  rb_detach() closes the store. */
extern void rb_set_store(rb_thread *t, st_store *(*open) (void *arg, st_error *err), void *arg);
/* After an error exit: gives back tickets, fetching sentinels, the epoch guard and private memory of any call under way. */
extern void rb_reset(rb_thread *t);

extern void rb_enter(rb_thread *t);	/* nests */
extern void rb_leave(rb_thread *t);

typedef enum rb_status
{
	RB_OK = 0,
	RB_CHANGED,					/* rb_put: the head is not the one expected: look again */
	RB_UNKNOWN,					/* rb_put, rb_lookup: nothing is known about the key: fetch it first */
	RB_FULL,					/* no memory could be freed; names nemo.buffer_size in the error (INVARIANTS C6) */
	RB_STORE,					/* the store failed: err->st has its words */
	RB_CORRUPT,					/* a stored record does not decode */
	RB_CANCELED,
	RB_TOOLONG,
	RB_NOMEM					/* private memory */
} rb_status;

typedef struct rb_error
{
	st_error	st;
} rb_error;						/* code and message are filled for every status that is an error */

/* ---- reading ------------------------------------------------------------------------------------------------------ */

/*
 * What is in memory about one key.  RB_OK: *head is the newest version, or NULL = known absent (tombstone or gap 0; the
 * reference bits are set).  RB_UNKNOWN: a miss.  Inside rb_enter/rb_leave.  Never does I/O.  counts lookups/hits.
 */
extern rb_status rb_lookup(rb_thread *t, rb_slice key, const rb_version **head);

/*
 * Called for each record under the guard, in order.  head is never NULL for ranges (absent keys are not visited); it may
 * be a DELETE or LOCK version: the visitor decides visibility down the chain.  Returns true to go on, false to stop
 * after this record.  Must copy what it wants to keep.  i: index into keys[] (rb_read_keys), running number otherwise.
 */
typedef bool (*rb_visit) (void *arg, uint32_t i, rb_slice key, const rb_version *head);

/*
 * Read many keys (need not be sorted; duplicates allowed); misses travel in one st_get, single flight per key
 * (INVARIANTS B3).  visit gets each key exactly once, in input order, with head = NULL when it is absent.
 * Not inside a guard.  Visits happen after all fetching.
 */
extern rb_status rb_read_keys(rb_thread *t, const rb_slice *keys, uint32_t n, rb_visit visit, void *arg, rb_error *err);

/*
 * Read [start, end) of one tree (both begin with the same 8 tree bytes, or end is the next tree's fence), forward or
 * backward, until visit says stop, `max` records were visited (0 = no limit), or the range is exhausted.  Holes are
 * found by the gap bits, fetched under a ticket, admitted, and merged: the buffer wins (INVARIANTS A, B1, B2).
 * hint: how many records the caller expects to want now (sizes the fetch, 32..1024).
 * On RB_OK *done says whether the range is exhausted; if not, `resume` (a buffer of RB_MAX_KEY + 1 bytes, *resume_len)
 * receives the new start (forward) or new end (backward) of what is left.  Not inside a guard.
 */
extern rb_status rb_read_range(rb_thread *t, rb_slice start, rb_slice end, bool backward, uint32_t max, uint32_t hint,
							   rb_visit visit, void *arg, bool *done, uint8_t *resume, uint32_t *resume_len,
							   rb_error *err);

/*
 * Existence probe for an insertion: like rb_read_keys of one key, but a miss fetches a short range from key on, so that
 * the gap behind it becomes known too (one round trip either way).
 */
extern rb_status rb_probe(rb_thread *t, rb_slice key, rb_error *err);

/* ---- writing ------------------------------------------------------------------------------------------------------ */

/*
 * Private memory for a version to be installed; may evict (I/O) to make room: not inside a guard.  Also reserves what
 * the tree needs to insert one entry with a key of key_len bytes, so that rb_put cannot fail for memory.
 * settled: short form (replay).  The caller fills data (rb_data) and the header fields.
 */
extern rb_status rb_version_new(rb_thread *t, uint32_t key_len, uint32_t data_len, bool settled, rb_version **v,
								rb_error *err);
extern void rb_version_free(rb_thread *t, rb_version *v);	/* never installed */

typedef struct rb_put_args
{
	rb_slice	key;
	rb_version *v;				/* from rb_version_new; owned by the buffer after RB_OK */
	const rb_version *expect;	/* head the caller decided on; NULL = it saw "known absent" */
	const rb_version *keep;		/* existing version that becomes v's older: expect, or something below it when newer
								 * ones are aborted; NULL = nothing older is needed */
	const rb_version *cut;		/* at or below keep: what is older than it is dropped; NULL = no cut */
	bool		blind;			/* replay: ignore expect/keep/cut, replace whatever is there or unknown */
	bool		dirty;			/* false only for RB_LOCK versions */
} rb_put_args;

/*
 * Install v as the newest version of key.  RB_OK, RB_CHANGED (head differs from expect), RB_UNKNOWN (key fell out of the
 * buffer).  The caller sets v->lsn = RB_LSN_PENDING first and calls rb_stamp() after logging; in between the entry is
 * neither flushed nor evicted.  A new entry inherits its predecessor's gap bit (A6).  Must be called inside a guard that
 * also covers the read of `expect`.
 */
extern rb_status rb_put(rb_thread *t, const rb_put_args *args);
extern void rb_stamp(rb_thread *t, rb_version *v, uint64_t lsn);

/*
 * Take back version v of key (a speculative insertion that lost): unlink it wherever it is in the chain.  The entry
 * stays dirty; with nothing left it is a dirty tombstone.  The record that logs the withdrawal is inserted before.
 */
extern void rb_withdraw(rb_thread *t, rb_slice key, rb_version *v);
/* clear RB_SPECULATIVE */
extern void rb_confirm(rb_version *v);

/* ---- trees -------------------------------------------------------------------------------------------------------- */

/* A tree that is known to be empty in the store too: its fence gets gap bit 0 (A7).  May need memory. */
extern rb_status rb_tree_create(rb_thread *t, uint64_t tree, rb_error *err);
/* Forget every entry of [tree, next_tree), dirty or not; the caller knows that nobody uses them and deletes the range in the store. */
extern void rb_tree_drop(rb_thread *t, uint64_t tree, uint64_t next_tree);
/* Flush, then drop all unlocked records of the tree from memory (nemo_evict).  Entries that cannot go stay. */
extern rb_status rb_tree_evict(rb_thread *t, uint64_t tree, rb_error *err);

/* ---- background work ---------------------------------------------------------------------------------------------- */

/* Free at least `bytes` if possible: second-chance eviction from random leaves, dirty victims written in one batch. */
extern rb_status rb_evict(rb_thread *t, size_t bytes, size_t *freed, rb_error *err);
/* true when the background should evict: free memory is below the head-room */
extern bool rb_wants_eviction(rb_buffer *rb);

/*
 * Checkpoint sweep: every entry that was dirty when the call began is flushed and acknowledged when it returns RB_OK
 * (E1, E2, E3); waits for pending versions (C9).  Does not sync the store: the caller does.  Also settles and prunes.
 */
extern rb_status rb_flush_all(rb_thread *t, rb_error *err);
/* Rewrite stored version lists of [start, end) and in-memory ones whose writers are settled or aborted (VACUUM, F7). */
extern rb_status rb_settle_range(rb_thread *t, rb_slice start, rb_slice end, rb_error *err);

/* ---- statistics --------------------------------------------------------------------------------------------------- */

typedef struct rb_stats
{
	uint64_t	size_bytes, used_bytes;
	uint64_t	entries, tombstones, dirty;
	uint64_t	lookups, hits, tombstone_hits, gap_hits, misses;
	uint64_t	range_lookups, range_hits, range_fetches;
	uint64_t	admitted, evicted, flushed;
	uint64_t	key_bytes, value_bytes;	/* live bytes of keys and settled data: overhead = used - these */
} rb_stats;
extern void rb_get_stats(rb_buffer *rb, rb_stats *out);
extern void rb_stats_reset(rb_buffer *rb);	/* counters, not gauges */

/* Check every structural invariant (order, links, counts, accounting); quiescent use only.  NULL = fine, else words. */
extern const char *rb_check(rb_buffer *rb);

/* ---- stored form (rb_codec.c) -------------------------------------------------------------------------------------- */

/*
 * A record in the store: format byte (settled | version list, and tag), CRC-32C, then plain data or the versions newest
 * first with 64-bit xids.  rb_decode_record walks it without allocating: calls emit for each version, newest first;
 * false = malformed.  Fuzzed.
 */
typedef struct rb_stored_version
{
	uint64_t	xid;			/* 0 = settled */
	uint32_t	cid, aux;
	uint8_t		kind, tag;
	rb_slice	data;
} rb_stored_version;
extern bool rb_decode_record(const uint8_t *bytes, size_t len,
							 bool (*emit) (void *arg, const rb_stored_version *v), void *arg);
/* size needed / encode; v[] newest first; a single settled version gives the plain form */
extern size_t rb_encoded_size(const rb_stored_version *v, uint32_t n);
extern void rb_encode_record(const rb_stored_version *v, uint32_t n, uint8_t *out);

#endif							/* NEMO_RB_H */
