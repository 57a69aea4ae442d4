/*
 * store_internal.h
 *	  The open store, and requests as store.c and store_chunk.c build them.
 *
 * A request is one round trip to the driver.  st_run() is the only place that calls a driver for data: it injects,
 * retries and counts.
 */
#ifndef NEMO_STORE_INTERNAL_H
#define NEMO_STORE_INTERNAL_H

#include "driver.h"

struct st_store
{
	const st_driver *driver;
	void	   *state;			/* the driver's */
	st_options	options;
	st_limits	native;			/* the driver's; max_value is what one stored record holds */
	st_limits	limits;			/* what the layer promises */
	bool		chunked;		/* stored values carry a kind byte, long ones are cut: store_chunk.c */
	bool		ambiguous;		/* a write failed ambiguously and has not been resolved */
	uint64_t	random;			/* jitter of retries */
};

typedef enum st_request_kind
{
	ST_REQ_GET, ST_REQ_GET_RANGE, ST_REQ_WRITE, ST_REQ_DELETE_RANGE, ST_REQ_SYNC
} st_request_kind;

typedef struct st_request
{
	st_request_kind kind;
	st_opcode	op;				/* how it is counted and what faults see */
	st_space	space;			/* get, write */
	const st_slice *keys;		/* get */
	uint32_t	nkeys;			/* get, write: keys or operations */
	const st_op *ops;			/* write */
	bool	   *acked;			/* write */
	st_slice	start;			/* ranges */
	st_slice	end;
	uint32_t	limit;
	size_t		max_bytes;
	bool		reverse;
	st_result  *result;			/* get, get_range: records are added */
	bool		complete;		/* get_range, out */
	bool		more;			/* delete_range, out */
	uint32_t	ndeleted;		/* delete_range, out */
} st_request;

extern st_status st_run(st_store *store, st_request *request, st_error *err);

/* Requests of any size, cut to the driver's limits.  Values are stored bytes, as they are. */
extern st_status st_raw_get(st_store *store, st_opcode op, st_space space, const st_slice *keys, uint32_t nkeys,
							st_result *result, st_error *err);
extern st_status st_raw_get_range(st_store *store, st_opcode op, st_slice start, st_slice end, uint32_t limit,
								  size_t max_bytes, bool reverse, st_result *result, st_error *err);
extern st_status st_raw_write(st_store *store, st_space space, const st_op *ops, uint32_t nops, bool *acked,
							  st_error *err);

/* The same for stores that need chunks; store_chunk.c. */
extern st_status st_chunked_get(st_store *store, const st_slice *keys, uint32_t nkeys, st_result *result,
								st_error *err);
extern st_status st_chunked_get_range(st_store *store, st_slice start, st_slice end, uint32_t limit, size_t max_bytes,
									  bool reverse, st_result *result, st_error *err);
extern st_status st_chunked_write(st_store *store, const st_op *ops, uint32_t nops, bool *acked, st_error *err);

#endif							/* NEMO_STORE_INTERNAL_H */
