/*
 * store.h
 *	  The ordered key-value store that holds Nemo's records, and the layer above its drivers.
 *
 * A store is one ordered map of byte strings.  Everything above this header sees an `st_store`: batching to the
 * driver's limits, chunking of long values, retries, statistics and injected latency are done here, once, for every
 * driver.  A driver is one file that fills one `st_driver`.
 *
 * Contract of every driver (paper table 2, "Data Store Atomic APIs"):
 *	- a single-record write is atomic and, once acknowledged, survives after the next st_sync() has returned OK;
 *	- reads are linearizable per key;
 *	- ranges come back in unsigned byte order of the keys;
 *	- deleting an absent key succeeds.
 *
 * Plain C11: no PostgreSQL header is included here.  Nothing in this layer raises or longjmps; every failure is an
 * st_status plus words in an st_error.  Memory handed out is malloc'ed and owned by the caller through st_result.
 *
 * An st_store belongs to one thread of one process.  It must not be used across fork(): open lazily in each process.
 * Only `st_stats` (in memory the caller provides, usually shared) is touched by several threads; it is atomics only.
 */
#ifndef NEMO_STORE_H
#define NEMO_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct st_slice
{
	const void *data;
	size_t		len;
} st_slice;

typedef enum st_status
{
	ST_OK = 0,
	ST_INVALID,					/* bad URL, bad option, key or value over the store's limit */
	ST_UNAVAILABLE,				/* cannot be reached or opened now; trying later may help */
	ST_TIMEOUT,					/* no answer in time: a write may still land (err->ambiguous) */
	ST_CANCELED,				/* the caller's `interrupted` said stop */
	ST_REFUSED,					/* credentials, permissions, or owned by another cluster */
	ST_FULL,					/* no space, map full, quota */
	ST_CORRUPT,					/* bytes that are not what this layer wrote */
	ST_NOMEM
} st_status;

typedef struct st_error
{
	st_status	code;
	bool		ambiguous;		/* the request may still take effect later (INVARIANTS C4) */
	char		message[256];	/* one line, lower case, no full stop; in the store's own words where it has any */
} st_error;

/* One record of an answer.  key and value point into the st_result. */
typedef struct st_record
{
	st_slice	key;
	st_slice	value;
	bool		found;			/* st_get only: false = the store has no such key (value is then empty) */
} st_record;

/*
 * Answer of st_get / st_get_range.  Zero-initialise, pass to the call, read, st_result_free().  A result may be
 * reused by a later call: the call frees what it held.
 */
typedef struct st_result
{
	uint32_t	nrecs;
	st_record  *recs;			/* st_get: in the order of the keys asked for; st_get_range: in scan order */
	bool		complete;		/* st_get_range: nothing is left in [start, end) beyond these records */
	void	   *mem;			/* private */
} st_result;

/* One write.  Batches may mix upserts and deletes; a batch must not name a key twice (ST_INVALID). */
typedef struct st_op
{
	st_slice	key;
	st_slice	value;			/* ignored when del */
	bool		del;
} st_op;

typedef enum st_opcode
{
	ST_OP_GET, ST_OP_GET_RANGE, ST_OP_UPSERT, ST_OP_DELETE, ST_OP_DELETE_RANGE, ST_OP_SYNC,
	ST_NOPS
} st_opcode;

#define ST_LATENCY_BUCKETS 64		/* log-linear, see st_stats_percentile_us() */

/* Counters per operation.  Zero-initialised by the owner of the memory; updated with relaxed atomics. */
typedef struct st_op_stats
{
	_Atomic uint64_t requests;		/* round trips to the store: one batch that fits the driver's limit is one */
	_Atomic uint64_t keys;			/* keys asked for or written, records returned for a range */
	_Atomic uint64_t bytes_sent;	/* keys and values, not protocol framing */
	_Atomic uint64_t bytes_received;
	_Atomic uint64_t errors;
	_Atomic uint64_t retries;
	_Atomic uint64_t latency[ST_LATENCY_BUCKETS];
} st_op_stats;

typedef struct st_stats
{
	st_op_stats op[ST_NOPS];
} st_stats;

/* What a test or a benchmark injects in the layer above the drivers.  All zero = nothing. */
typedef struct st_inject
{
	uint32_t	latency_us;		/* slept (not spun) before each request */
	uint64_t	bandwidth;		/* bytes per second both ways; 0 = unlimited */
	/* test hook: called before (`after` false) and after each driver request; a non-OK answer replaces the request's */
	st_status	(*fault) (void *arg, st_opcode op, bool after, st_error *err);
	void	   *fault_arg;
} st_inject;

typedef struct st_options
{
	st_stats   *stats;			/* may be NULL */
	st_inject	inject;
	uint32_t	timeout_ms;		/* one request, including its retries; 0 = 30 s */
	uint32_t	retries;		/* attempts after the first for a failure that may pass; 0 = none */
	bool		create;			/* make an empty store where there is none; otherwise that is ST_UNAVAILABLE */
	uint64_t	map_size;		/* LMDB: size of the map in bytes; 0 = 1 TiB */
	uint32_t	max_readers;	/* LMDB: processes that may have it open; 0 = 1024 */
	/* mutual exclusion of writers across processes, where a driver wants one before its own uninterruptible lock; may be NULL */
	void		(*write_lock) (void *arg);
	void		(*write_unlock) (void *arg);
	/* polled while waiting: true = give up with ST_CANCELED; may be NULL */
	bool		(*interrupted) (void *arg);
	void	   *callback_arg;
} st_options;

typedef struct st_limits
{
	size_t		max_key;		/* longest key the layer accepts, bytes (>= 2048 for every driver) */
	size_t		max_value;		/* longest value the layer accepts, bytes, chunks included */
	uint32_t	max_batch_ops;	/* per request; the layer splits larger batches */
	size_t		max_batch_bytes;
	bool		multi_get;		/* several keys in one request */
	bool		reverse;		/* native reverse ranges */
} st_limits;

typedef struct st_store st_store;

/*
 * URL: `lmdb:DIRECTORY` (absolute, or relative to the working directory) or `mem:NAME` (tests: a map shared by all
 * stores opened in the process under that name; st_mem_forget(NAME) drops it).
 */
extern st_status st_open(const char *url, const st_options *options, st_store **store, st_error *err);
extern void st_close(st_store *store);
extern const st_limits *st_get_limits(const st_store *store);

/* May be changed while open (nemo.simulated_latency is a setting). */
extern void st_set_inject(st_store *store, const st_inject *inject);

/* All keys of one call travel in as few requests as the driver allows: one where it has multi-get. */
extern st_status st_get(st_store *store, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err);

/*
 * Records with start <= key < end in key order (reverse: descending from end), at most `limit` records (0 = no
 * limit) and about `max_bytes` of values (0 = no limit; at least one record is returned).  result->complete says
 * whether the range is exhausted.  end.len == 0 means no upper bound.  One request, unless a driver has to page.
 */
extern st_status st_get_range(st_store *store, st_slice start, st_slice end, uint32_t limit, size_t max_bytes,
							  bool reverse, st_result *result, st_error *err);

/*
 * Write a batch.  acked[i] is set true exactly for the operations that are known to have taken effect (INVARIANTS
 * C1); after a failure the others either did not happen or, when err->ambiguous, may happen until st_resolve()
 * returns OK.  Different keys of a batch need not be atomic together.
 */
extern st_status st_write(st_store *store, const st_op *ops, uint32_t nops, bool *acked, st_error *err);

/* OK once no earlier ambiguous request of this store can land any more (INVARIANTS C4). */
extern st_status st_resolve(st_store *store, st_error *err);

/* Delete every key in [start, end), in pieces that do not block other writers for long. */
extern st_status st_delete_range(st_store *store, st_slice start, st_slice end, st_error *err);

/* Everything acknowledged before the call is durable when it returns OK. */
extern st_status st_sync(st_store *store, st_error *err);

/*
 * Ownership (INVARIANTS E7).  Claim the store for `owner` (1..64 bytes, the cluster's identity).  Succeeds when the
 * store is unclaimed or already owned by the same owner; then *epoch is raised by one and kept in the store, and
 * every later write of this and other processes that pass the same epoch to st_assume() is checked against it where
 * the driver can (LMDB: inside the write transaction).  ST_REFUSED names the present owner in err->message.
 */
extern st_status st_claim(st_store *store, const char *owner, uint64_t *epoch, st_error *err);
/* For the other processes of the owner: writes go out under this owner and epoch, and are refused once deposed. */
extern void st_assume(st_store *store, const char *owner, uint64_t epoch);

extern void st_result_free(st_result *result);
extern const char *st_status_name(st_status status);
/* Upper edge in microseconds of the bucket that holds the given fraction (0..1) of the requests; 0 when none. */
extern uint64_t st_stats_percentile_us(const st_op_stats *stats, double fraction);
extern void st_mem_forget(const char *name);

#endif							/* NEMO_STORE_H */
