/*
 * driver.h
 *	  What a driver of the ordered key-value store provides, and what the layer above gives it.
 *
 * A driver is one file that fills one st_driver.  It sees single requests that already respect the limits it reported
 * at open; batching, chunking, retries, statistics and faults are above it (store.c, store_chunk.c).  Its state
 * belongs to one st_store, hence to one thread.  Nothing here raises; every failure is an st_status and words in err.
 */
#ifndef NEMO_STORE_DRIVER_H
#define NEMO_STORE_DRIVER_H

#include <string.h>

#include "store.h"

#define ST_MAX_VALUE ((size_t) 1 << 30)	/* longest value of any store, bytes; a driver that takes it needs no chunks */
#define ST_MAX_OWNER 64			/* longest owner, bytes */
#define ST_MIN_DRIVER_VALUE 64	/* shortest max_value a driver may report, bytes: a manifest must fit */

/*
 * Two separate maps of one store.  Chunks of long values live in the second, so that no range ever meets them.  A
 * driver whose max_value is ST_MAX_VALUE is never asked for the second.
 */
typedef enum st_space
{
	ST_SPACE_DATA, ST_SPACE_CHUNK,
	ST_NSPACES
} st_space;

typedef struct st_driver
{
	const char *scheme;			/* of the URL, without the colon */

	/* `options` stays valid until close.  Fills limits with the driver's own (max_value of one stored record). */
	st_status	(*open) (const char *rest, const st_options *options, void **state, st_limits *limits, st_error *err);
	void		(*close) (void *state);

	/* Add exactly nkeys records to result, in the order asked for. */
	st_status	(*get) (void *state, st_space space, const st_slice *keys, uint32_t nkeys, st_result *result,
						st_error *err);

	/*
	 * Add the records of the data space in [start, end) in scan order.  A driver may return fewer than asked for,
	 * but with *complete false at least one.  Bounds may have any length; end.len == 0 means no upper bound.
	 */
	st_status	(*get_range) (void *state, st_slice start, st_slice end, uint32_t limit, size_t max_bytes,
							  bool reverse, st_result *result, bool *complete, st_error *err);

	/*
	 * Sets acked[i] for what is known to have taken effect; acked comes in all false.  A request of one operation may
	 * be larger than max_batch_bytes, as far as max_key and max_value allow it.
	 */
	st_status	(*write) (void *state, st_space space, const st_op *ops, uint32_t nops, bool *acked, st_error *err);

	/* Delete some records from the start of [start, end); *more = perhaps not all.  NULL: done by range and write. */
	st_status	(*delete_range) (void *state, st_slice start, st_slice end, uint32_t *ndeleted, bool *more,
								 st_error *err);

	/* No earlier ambiguous write can land any more.  NULL: never ambiguous beyond the return of a call. */
	st_status	(*resolve) (void *state, st_error *err);
	st_status	(*sync) (void *state, st_error *err);
	st_status	(*claim) (void *state, const char *owner, uint64_t *epoch, st_error *err);
	void		(*assume) (void *state, const char *owner, uint64_t epoch);
} st_driver;

extern const st_driver st_lmdb_driver;
extern const st_driver st_mem_driver;

/* For tests: records in one space of the store in memory of that name; 0 when there is none. */
extern uint64_t st_mem_count(const char *name, st_space space);

/* Fill err (may not be NULL) and return code. */
extern st_status st_fail(st_error *err, st_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/*
 * Memory of an answer.  begin() empties the result and keeps some memory for reuse; add() copies one record into it;
 * reserve() adds one whose value the caller fills in.  false, NULL: out of memory.
 */
extern void st_answer_begin(st_result *result);
extern bool st_answer_add(st_result *result, st_slice key, st_slice value, bool found);
extern void *st_answer_reserve(st_result *result, st_slice key, size_t value_len);

/* Unsigned byte order; a proper prefix comes first. */
static inline int
st_compare(st_slice a, st_slice b)
{
	size_t		len = a.len < b.len ? a.len : b.len;
	int			order = len > 0 ? memcmp(a.data, b.data, len) : 0;

	return order != 0 ? order : (a.len > b.len) - (a.len < b.len);
}

#endif							/* NEMO_STORE_DRIVER_H */
