/*
 * store.c
 *	  The layer above the drivers: opening, requests with retries, faults and statistics, batches, results.
 *
 * Contract in store.h, what a driver owes in driver.h.  Values longer than a driver takes go through store_chunk.c.
 * An st_store belongs to one thread; there is no locking here.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "store_internal.h"

#define DEFAULT_TIMEOUT_MS 30000
#define SLEEP_SLICE_NS INT64_C(10000000)	/* longest sleep between two looks at interrupted() */
#define BACKOFF_FIRST_NS INT64_C(5000000)
#define BACKOFF_MAX_NS INT64_C(1000000000)
#define RESULT_KEEP_BYTES ((size_t) 256 * 1024) /* memory a reused result may keep */
#define RESULT_KEEP_RECORDS 4096
#define BLOCK_MAX_BYTES ((size_t) 1024 * 1024)
#define DELETE_PAGE_BYTES ((size_t) 1024 * 1024)	/* values read to delete a range the slow way */
#define NS_PER_SECOND INT64_C(1000000000)

static const st_driver *const drivers[] = {&st_lmdb_driver, &st_mem_driver};

/* ---------- errors ---------- */

st_status
st_fail(st_error *err, st_status code, const char *format, ...)
{
	va_list		args;

	err->code = code;
	err->ambiguous = false;
	va_start(args, format);
	vsnprintf(err->message, sizeof(err->message), format, args);
	va_end(args);
	return code;
}

const char *
st_status_name(st_status status)
{
	switch (status)
	{
		case ST_OK:
			return "ok";
		case ST_INVALID:
			return "invalid";
		case ST_UNAVAILABLE:
			return "unavailable";
		case ST_TIMEOUT:
			return "timeout";
		case ST_CANCELED:
			return "canceled";
		case ST_REFUSED:
			return "refused";
		case ST_FULL:
			return "full";
		case ST_CORRUPT:
			return "corrupt";
		case ST_NOMEM:
			return "out of memory";
	}
	return "unknown";
}

/* Callers may pass no err: then the words go to *scratch. */
static st_error *
begin_error(st_error *err, st_error *scratch)
{
	if (err == NULL)
		err = scratch;
	err->code = ST_OK;
	err->ambiguous = false;
	err->message[0] = '\0';
	return err;
}

/* ---------- results ---------- */

/*
 * The records point into blocks that never move; a result that is used again keeps its newest block, which is the
 * largest unless one record outgrew it.
 */
typedef struct result_block
{
	struct result_block *next;
	size_t		size;
	size_t		used;
	unsigned char data[];
} result_block;

typedef struct result_memory
{
	result_block *blocks;
	uint32_t	nrecs_max;
} result_memory;

static void
free_blocks(result_block *block)
{
	while (block != NULL)
	{
		result_block *next = block->next;

		free(block);
		block = next;
	}
}

void
st_answer_begin(st_result *result)
{
	result_memory *memory = result->mem;

	result->nrecs = 0;
	result->complete = false;
	if (memory == NULL)
		return;
	if (memory->blocks != NULL)
	{
		free_blocks(memory->blocks->next);
		memory->blocks->next = NULL;
		memory->blocks->used = 0;
		if (memory->blocks->size > RESULT_KEEP_BYTES)
		{
			free(memory->blocks);
			memory->blocks = NULL;
		}
	}
	if (memory->nrecs_max > RESULT_KEEP_RECORDS)
	{
		free(result->recs);
		result->recs = NULL;
		memory->nrecs_max = 0;
	}
}

void *
st_answer_reserve(st_result *result, st_slice key, size_t value_len)
{
	result_memory *memory = result->mem;
	result_block *block;
	size_t		need = key.len + value_len;
	unsigned char *to;

	if (memory == NULL)
	{
		memory = calloc(1, sizeof(*memory));
		if (memory == NULL)
			return NULL;
		result->mem = memory;
		result->recs = NULL;
	}
	if (result->nrecs == memory->nrecs_max)
	{
		uint32_t	nrecs_max = memory->nrecs_max == 0 ? 4 : memory->nrecs_max * 2;
		st_record  *recs = realloc(result->recs, nrecs_max * sizeof(st_record));

		if (recs == NULL)
			return NULL;
		result->recs = recs;
		memory->nrecs_max = nrecs_max;
	}
	block = memory->blocks;
	if (block == NULL || block->size - block->used < need)
	{
		size_t		size = block == NULL ? 512 : block->size * 2;

		if (size > BLOCK_MAX_BYTES)
			size = BLOCK_MAX_BYTES;
		if (size < need)
			size = need;
		block = malloc(sizeof(*block) + size);
		if (block == NULL)
			return NULL;
		block->next = memory->blocks;
		block->size = size;
		block->used = 0;
		memory->blocks = block;
	}
	to = block->data + block->used;
	block->used += need;
	if (key.len > 0)
		memcpy(to, key.data, key.len);
	result->recs[result->nrecs++] = (st_record)
	{
		{to, key.len}, {to + key.len, value_len}, true
	};
	return to + key.len;
}

bool
st_answer_add(st_result *result, st_slice key, st_slice value, bool found)
{
	void	   *to = st_answer_reserve(result, key, found ? value.len : 0);

	if (to == NULL)
		return false;
	if (!found)
		result->recs[result->nrecs - 1].found = false;
	else if (value.len > 0)
		memcpy(to, value.data, value.len);
	return true;
}

void
st_result_free(st_result *result)
{
	result_memory *memory = result->mem;

	if (memory != NULL)
	{
		free_blocks(memory->blocks);
		free(result->recs);
		free(memory);
	}
	*result = (st_result) {0};
}

/* ---------- statistics ---------- */

/*
 * Buckets of microseconds: 0..3 one each, then four per power of two up to 16 ms, then one per power of two; the last
 * takes the rest.
 */
#define FINE_FIRST_BIT 2
#define FINE_END_BIT 14
#define COARSE_BUCKET (4 + (FINE_END_BIT - FINE_FIRST_BIT) * 4)

static unsigned
latency_bucket(uint64_t us)
{
	unsigned	bit;

	if (us < 4)
		return (unsigned) us;
	bit = 63 - (unsigned) __builtin_clzll(us);
	if (bit < FINE_END_BIT)
		return 4 + (bit - FINE_FIRST_BIT) * 4 + (unsigned) ((us >> (bit - 2)) & 3);
	bit += COARSE_BUCKET - FINE_END_BIT;
	return bit < ST_LATENCY_BUCKETS ? bit : ST_LATENCY_BUCKETS - 1;
}

static uint64_t
latency_bucket_edge(unsigned bucket)
{
	if (bucket < 4)
		return bucket + 1;
	if (bucket < COARSE_BUCKET)
		return (uint64_t) (5 + (bucket - 4) % 4) << ((bucket - 4) / 4);
	return UINT64_C(1) << (bucket - COARSE_BUCKET + FINE_END_BIT + 1);
}

uint64_t
st_stats_percentile_us(const st_op_stats *stats, double fraction)
{
	uint64_t	counts[ST_LATENCY_BUCKETS];
	uint64_t	total = 0;
	uint64_t	below = 0;
	double		rank;

	for (unsigned i = 0; i < ST_LATENCY_BUCKETS; i++)
	{
		counts[i] = atomic_load_explicit(&stats->latency[i], memory_order_relaxed);
		total += counts[i];
	}
	if (total == 0)
		return 0;
	if (!(fraction > 0))
		fraction = 0;
	if (fraction > 1)
		fraction = 1;
	rank = fraction * (double) total;
	for (unsigned i = 0; i < ST_LATENCY_BUCKETS; i++)
	{
		below += counts[i];
		if (counts[i] > 0 && (double) below >= rank)
			return latency_bucket_edge(i);
	}
	return latency_bucket_edge(ST_LATENCY_BUCKETS - 1);
}

static inline void
count(_Atomic uint64_t *counter, uint64_t by)
{
	if (by > 0)
		atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* ---------- waiting ---------- */

static int64_t
now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_SECOND + now.tv_nsec;
}

static bool
interrupted(st_store *store)
{
	return store->options.interrupted != NULL && store->options.interrupted(store->options.callback_arg);
}

/* False when interrupted first. */
static bool
sleep_until(st_store *store, int64_t deadline)
{
	for (;;)
	{
		int64_t		now = now_ns();
		int64_t		until;
		struct timespec at;

		if (interrupted(store))
			return false;
		if (now >= deadline)
			return true;
		until = deadline - now > SLEEP_SLICE_NS ? now + SLEEP_SLICE_NS : deadline;
		at = (struct timespec) {(time_t) (until / NS_PER_SECOND), (long) (until % NS_PER_SECOND)};
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
	}
}

static bool
sleep_transfer(st_store *store, uint64_t latency_us, uint64_t bytes)
{
	double		ns = (double) latency_us * 1e3;

	if (store->options.inject.bandwidth > 0)
		ns += (double) bytes * 1e9 / (double) store->options.inject.bandwidth;
	return ns < 1 || sleep_until(store, now_ns() + (int64_t) ns);
}

/* xorshift64*: quality does not matter, only that processes differ. */
static uint64_t
next_random(st_store *store)
{
	store->random ^= store->random >> 12;
	store->random ^= store->random << 25;
	store->random ^= store->random >> 27;
	return store->random * UINT64_C(2685821657736338717);
}

/* ---------- requests ---------- */

static st_status
call_driver(st_store *store, st_request *r, st_error *err)
{
	const st_driver *driver = store->driver;

	switch (r->kind)
	{
		case ST_REQ_GET:
			return driver->get(store->state, r->space, r->keys, r->nkeys, r->result, err);
		case ST_REQ_GET_RANGE:
			return driver->get_range(store->state, r->start, r->end, r->limit, r->max_bytes, r->reverse, r->result,
									 &r->complete, err);
		case ST_REQ_WRITE:
			return driver->write(store->state, r->space, r->ops, r->nkeys, r->acked, err);
		case ST_REQ_DELETE_RANGE:
			return driver->delete_range(store->state, r->start, r->end, &r->ndeleted, &r->more, err);
		case ST_REQ_SYNC:
			return driver->sync(store->state, err);
	}
	return st_fail(err, ST_INVALID, "unknown request kind %d", (int) r->kind);
}

static size_t
request_bytes(const st_request *r)
{
	size_t		bytes = r->start.len + r->end.len;

	if (r->kind == ST_REQ_GET)
		for (uint32_t i = 0; i < r->nkeys; i++)
			bytes += r->keys[i].len;
	else if (r->kind == ST_REQ_WRITE)
		for (uint32_t i = 0; i < r->nkeys; i++)
			bytes += r->ops[i].key.len + (r->ops[i].del ? 0 : r->ops[i].value.len);
	return bytes;
}

static size_t
answer_bytes(const st_request *r, uint32_t nrecs_before)
{
	size_t		bytes = 0;

	if (r->result != NULL)
		for (uint32_t i = nrecs_before; i < r->result->nrecs; i++)
			bytes += r->result->recs[i].value.len + (r->kind == ST_REQ_GET_RANGE ? r->result->recs[i].key.len : 0);
	return bytes;
}

/* The caller sees no records of a request that failed. */
static void
forget_records(st_request *r, uint32_t nrecs_before)
{
	if (r->result != NULL)
		r->result->nrecs = nrecs_before;
}

/* Hide what a write did; returns whether it did, or may have done, anything. */
static bool
forget_acks(st_request *r, st_status status)
{
	bool		did = status == ST_OK && (r->kind == ST_REQ_WRITE || r->kind == ST_REQ_DELETE_RANGE);

	if (r->kind == ST_REQ_WRITE)
		for (uint32_t i = 0; i < r->nkeys; i++)
		{
			did = did || r->acked[i];
			r->acked[i] = false;
		}
	return did;
}

/*
 * A fault after the request hides what it did.  A write has then taken effect although nobody was told, so its
 * failure is ambiguous whatever the hook says.
 */
static st_status
call_with_faults(st_store *store, st_request *r, uint32_t nrecs_before, st_error *err)
{
	const st_inject *inject = &store->options.inject;
	st_status	status = ST_OK;
	st_status	injected;

	if (inject->fault != NULL)
		status = inject->fault(inject->fault_arg, r->op, false, err);
	if (status == ST_OK)
	{
		status = call_driver(store, r, err);
		if (inject->fault != NULL && (injected = inject->fault(inject->fault_arg, r->op, true, err)) != ST_OK)
		{
			bool		did = forget_acks(r, status);

			forget_records(r, nrecs_before);
			err->ambiguous = err->ambiguous || did;
			status = injected;
		}
	}
	if (status != ST_OK)
	{
		err->code = status;
		if (err->message[0] == '\0')
			snprintf(err->message, sizeof(err->message), "store request failed: %s", st_status_name(status));
	}
	return status;
}

static st_status
run_once(st_store *store, st_request *r, uint32_t nrecs_before, st_error *err)
{
	st_op_stats *stats = store->options.stats == NULL ? NULL : &store->options.stats->op[r->op];
	const st_inject *inject = &store->options.inject;
	bool		slow = inject->latency_us > 0 || inject->bandwidth > 0;
	int64_t		begin = stats != NULL ? now_ns() : 0;
	size_t		sent = stats != NULL || slow ? request_bytes(r) : 0;
	size_t		received;
	uint64_t	nkeys;
	st_status	status;

	if (slow && !sleep_transfer(store, inject->latency_us, sent))
		return st_fail(err, ST_CANCELED, "canceled before the request was sent to the store");

	status = inject->fault == NULL ? call_driver(store, r, err) : call_with_faults(store, r, nrecs_before, err);

	received = stats != NULL || slow ? answer_bytes(r, nrecs_before) : 0;
	/* A write has happened by now: being interrupted only ends the wait. */
	if (slow && received > 0 && !sleep_transfer(store, 0, received))
	{
		forget_records(r, nrecs_before);
		status = st_fail(err, ST_CANCELED, "canceled while the store's answer was arriving");
	}
	if (stats == NULL)
		return status;

	nkeys = r->nkeys;
	if (r->kind == ST_REQ_GET_RANGE)
		nkeys = r->result->nrecs - nrecs_before;
	else if (r->kind == ST_REQ_DELETE_RANGE)
		nkeys = r->ndeleted;
	count(&stats->requests, 1);
	count(&stats->keys, nkeys);
	count(&stats->bytes_sent, sent);
	count(&stats->bytes_received, received);
	count(&stats->errors, status != ST_OK);
	count(&stats->latency[latency_bucket((uint64_t) (now_ns() - begin) / 1000)], 1);
	return status;
}

static st_status
resolve(st_store *store, st_error *err)
{
	st_status	status = ST_OK;

	if (store->driver->resolve != NULL)
		status = store->driver->resolve(store->state, err);
	if (status == ST_OK)
		store->ambiguous = false;
	return status;
}

/*
 * Run one request, again after a failure that may pass.  All requests are idempotent, but a write that failed
 * ambiguously is sent again only when the first one can no longer land after it (INVARIANTS C4).
 */
st_status
st_run(st_store *store, st_request *r, st_error *err)
{
	uint32_t	nrecs_before = r->result == NULL ? 0 : r->result->nrecs;
	int64_t		deadline = 0;
	int64_t		backoff = BACKOFF_FIRST_NS;

	if (store->options.retries > 0)
		deadline = now_ns() + (int64_t) store->options.timeout_ms * 1000000;
	for (uint32_t attempt = 0;; attempt++)
	{
		st_status	status = run_once(store, r, nrecs_before, err);
		int64_t		wake;

		if (status == ST_OK)
			return ST_OK;
		forget_records(r, nrecs_before);
		if (err->ambiguous)
			store->ambiguous = true;
		if ((status != ST_UNAVAILABLE && status != ST_TIMEOUT) || attempt >= store->options.retries)
			return status;

		/* between half and all of the backoff */
		wake = now_ns() + backoff / 2 + (int64_t) (next_random(store) % (uint64_t) (backoff / 2));
		if (wake >= deadline)
			return status;
		backoff = backoff * 2 > BACKOFF_MAX_NS ? BACKOFF_MAX_NS : backoff * 2;
		if (!sleep_until(store, wake))
		{
			bool		ambiguous = err->ambiguous;

			st_fail(err, ST_CANCELED, "canceled while waiting to ask the store again");
			err->ambiguous = ambiguous;
			return ST_CANCELED;
		}
		if (err->ambiguous)
		{
			st_error	why;

			begin_error(&why, NULL);
			if (resolve(store, &why) != ST_OK)
				return status;
		}
		begin_error(err, NULL);
		if (store->options.stats != NULL)
			count(&store->options.stats->op[r->op].retries, 1);
	}
}

/* ---------- requests of any size ---------- */

st_status
st_raw_get(st_store *store, st_opcode op, st_space space, const st_slice *keys, uint32_t nkeys, st_result *result,
		   st_error *err)
{
	uint32_t	step = store->native.multi_get ? store->native.max_batch_ops : 1;

	for (uint32_t done = 0; done < nkeys; done += step)
	{
		st_request	r = {.kind = ST_REQ_GET, .op = op, .space = space, .keys = keys + done, .result = result};
		uint32_t	before = result->nrecs;
		st_status	status;

		r.nkeys = nkeys - done < step ? nkeys - done : step;
		status = st_run(store, &r, err);
		if (status != ST_OK)
			return status;
		if (result->nrecs - before != r.nkeys)
			return st_fail(err, ST_CORRUPT, "store answered %u keys instead of %u", result->nrecs - before, r.nkeys);
	}
	return ST_OK;
}

/* Turn a forward range around and keep its first `limit` and about `max_bytes`. */
static void
reverse_answer(st_result *result, uint32_t first, uint32_t limit, size_t max_bytes)
{
	size_t		bytes = 0;

	for (uint32_t low = first, high = result->nrecs; low + 1 < high; low++)
	{
		st_record	swap = result->recs[low];

		result->recs[low] = result->recs[--high];
		result->recs[high] = swap;
	}
	for (uint32_t i = first; i < result->nrecs; i++)
	{
		if ((limit > 0 && i - first == limit) || (max_bytes > 0 && bytes >= max_bytes))
		{
			result->nrecs = i;
			result->complete = false;
			return;
		}
		bytes += result->recs[i].value.len;
	}
}

/*
 * A driver that has no reverse ranges costs a read of the whole range: nothing less finds its end.
 */
st_status
st_raw_get_range(st_store *store, st_opcode op, st_slice start, st_slice end, uint32_t limit, size_t max_bytes,
				 bool reverse, st_result *result, st_error *err)
{
	bool		turn = reverse && !store->native.reverse;
	uint32_t	first = result->nrecs;
	size_t		bytes = 0;
	unsigned char *next = NULL; /* start of the page after this one, in memory of ours */
	st_status	status;

	result->complete = false;
	for (;;)
	{
		uint32_t	before = result->nrecs;
		st_request	r = {.kind = ST_REQ_GET_RANGE, .op = op, .start = start, .end = end, .result = result};
		st_slice	last;

		r.reverse = reverse && !turn;
		r.limit = turn || limit == 0 ? 0 : limit - (before - first);
		r.max_bytes = turn || max_bytes == 0 ? 0 : max_bytes - bytes;
		status = st_run(store, &r, err);
		if (status != ST_OK)
			break;
		result->complete = r.complete;
		if (r.complete)
			break;
		if (result->nrecs == before)
		{
			status = st_fail(err, ST_CORRUPT, "store answered an empty page of a range that it says goes on");
			break;
		}
		for (uint32_t i = before; i < result->nrecs; i++)
			bytes += result->recs[i].value.len;
		if (!turn && ((limit > 0 && result->nrecs - first >= limit) || (max_bytes > 0 && bytes >= max_bytes)))
			break;
		last = result->recs[result->nrecs - 1].key;
		if (r.reverse)
			end = last;
		else
		{
			unsigned char *grown = realloc(next, last.len + 1);

			if (grown == NULL)
			{
				status = st_fail(err, ST_NOMEM, "out of memory");
				break;
			}
			next = grown;
			memcpy(next, last.data, last.len);
			next[last.len] = 0;
			start = (st_slice) {next, last.len + 1};
		}
		if (interrupted(store))
		{
			status = st_fail(err, ST_CANCELED, "canceled between two pages of a range");
			break;
		}
	}
	free(next);
	if (status == ST_OK && turn)
		reverse_answer(result, first, limit, max_bytes);
	return status;
}

st_status
st_raw_write(st_store *store, st_space space, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	for (uint32_t done = 0; done < nops;)
	{
		st_request	r = {.kind = ST_REQ_WRITE, .op = ST_OP_DELETE, .space = space, .ops = ops + done};
		size_t		bytes = 0;
		st_status	status;

		r.acked = acked + done;
		while (done + r.nkeys < nops && r.nkeys < store->native.max_batch_ops)
		{
			const st_op *op = &r.ops[r.nkeys];

			bytes += op->key.len + (op->del ? 0 : op->value.len);
			if (r.nkeys > 0 && bytes > store->native.max_batch_bytes)
				break;
			if (!op->del)
				r.op = ST_OP_UPSERT;
			r.nkeys++;
		}
		status = st_run(store, &r, err);
		if (status != ST_OK)
			return status;
		done += r.nkeys;
	}
	return ST_OK;
}

/* ---------- the interface ---------- */

static void
set_limits(st_store *store)
{
	st_limits  *native = &store->native;

	if (native->max_batch_bytes < native->max_value + native->max_key && native->max_value < ST_MAX_VALUE)
		native->max_value = native->max_batch_bytes - native->max_key;
	store->chunked = native->max_value < ST_MAX_VALUE;
	store->limits = *native;
	store->limits.max_value = ST_MAX_VALUE;
}

st_status
st_open(const char *url, const st_options *options, st_store **store, st_error *err)
{
	st_error	scratch;
	const char *colon = url == NULL ? NULL : strchr(url, ':');
	st_store   *new;
	st_status	status = ST_INVALID;

	*store = NULL;
	err = begin_error(err, &scratch);
	if (colon == NULL || colon[1] == '\0')
		return st_fail(err, ST_INVALID, "store URL \"%.100s\" is not of the form scheme:place", url == NULL ? "" : url);
	new = calloc(1, sizeof(*new));
	if (new == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	if (options != NULL)
		new->options = *options;
	if (new->options.timeout_ms == 0)
		new->options.timeout_ms = DEFAULT_TIMEOUT_MS;
	new->random = ((uint64_t) now_ns() ^ (uint64_t) (uintptr_t) new) | 1;
	for (size_t i = 0; i < sizeof(drivers) / sizeof(drivers[0]); i++)
		if (strlen(drivers[i]->scheme) == (size_t) (colon - url) &&
			strncmp(url, drivers[i]->scheme, (size_t) (colon - url)) == 0)
			new->driver = drivers[i];
	if (new->driver == NULL)
		st_fail(err, ST_INVALID, "unknown kind of store \"%.*s\"", (int) (colon - url > 100 ? 100 : colon - url), url);
	else
		status = new->driver->open(colon + 1, &new->options, &new->state, &new->native, err);
	if (status != ST_OK)
	{
		free(new);
		return status;
	}
	set_limits(new);
	*store = new;
	return ST_OK;
}

void
st_close(st_store *store)
{
	if (store == NULL)
		return;
	store->driver->close(store->state);
	free(store);
}

const st_limits *
st_get_limits(const st_store *store)
{
	return &store->limits;
}

void
st_set_inject(st_store *store, const st_inject *inject)
{
	store->options.inject = *inject;
}

static st_status
check_key(const st_store *store, st_slice key, st_error *err)
{
	if (key.len == 0 || key.data == NULL)
		return st_fail(err, ST_INVALID, "key is empty");
	if (key.len > store->limits.max_key)
		return st_fail(err, ST_INVALID, "key of %zu bytes is longer than the store's limit of %zu", key.len,
					   store->limits.max_key);
	return ST_OK;
}

st_status
st_get(st_store *store, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err)
{
	st_error	scratch;
	st_status	status = ST_OK;

	err = begin_error(err, &scratch);
	st_answer_begin(result);
	for (uint32_t i = 0; i < nkeys && status == ST_OK; i++)
		status = check_key(store, keys[i], err);
	if (status == ST_OK)
		status = store->chunked ? st_chunked_get(store, keys, nkeys, result, err)
			: st_raw_get(store, ST_OP_GET, ST_SPACE_DATA, keys, nkeys, result, err);
	if (status != ST_OK)
		result->nrecs = 0;
	result->complete = status == ST_OK;
	return status;
}

st_status
st_get_range(st_store *store, st_slice start, st_slice end, uint32_t limit, size_t max_bytes, bool reverse,
			 st_result *result, st_error *err)
{
	st_error	scratch;
	st_status	status;

	err = begin_error(err, &scratch);
	st_answer_begin(result);
	if (end.len > 0 && st_compare(start, end) >= 0)
	{
		result->complete = true;
		return ST_OK;
	}
	status = store->chunked
		? st_chunked_get_range(store, start, end, limit, max_bytes, reverse, result, err)
		: st_raw_get_range(store, ST_OP_GET_RANGE, start, end, limit, max_bytes, reverse, result, err);
	if (status != ST_OK)
	{
		result->nrecs = 0;
		result->complete = false;
	}
	return status;
}

static int
compare_op_keys(const void *a, const void *b)
{
	return st_compare((*(const st_op *const *) a)->key, (*(const st_op *const *) b)->key);
}

/* Batches usually come in key order; only others are sorted to find a key that is named twice. */
static st_status
check_batch(st_store *store, const st_op *ops, uint32_t nops, st_error *err)
{
	bool		ascending = true;
	bool		repeated = false;
	const st_op **sorted;

	for (uint32_t i = 0; i < nops; i++)
	{
		st_status	status = check_key(store, ops[i].key, err);

		if (status != ST_OK)
			return status;
		if (!ops[i].del && ops[i].value.len > store->limits.max_value)
			return st_fail(err, ST_INVALID, "value of %zu bytes is longer than the store's limit of %zu",
						   ops[i].value.len, store->limits.max_value);
		if (i > 0 && ascending)
			ascending = st_compare(ops[i - 1].key, ops[i].key) < 0;
	}
	if (ascending)
		return ST_OK;
	sorted = malloc(nops * sizeof(*sorted));
	if (sorted == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	for (uint32_t i = 0; i < nops; i++)
		sorted[i] = &ops[i];
	qsort(sorted, nops, sizeof(*sorted), compare_op_keys);
	for (uint32_t i = 1; i < nops && !repeated; i++)
		repeated = st_compare(sorted[i - 1]->key, sorted[i]->key) == 0;
	free(sorted);
	return repeated ? st_fail(err, ST_INVALID, "a batch of writes names one key twice") : ST_OK;
}

st_status
st_write(st_store *store, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	st_error	scratch;
	st_status	status;

	err = begin_error(err, &scratch);
	memset(acked, 0, nops * sizeof(bool));
	status = check_batch(store, ops, nops, err);
	if (status != ST_OK)
		return status;
	return store->chunked ? st_chunked_write(store, ops, nops, acked, err)
		: st_raw_write(store, ST_SPACE_DATA, ops, nops, acked, err);
}

st_status
st_resolve(st_store *store, st_error *err)
{
	st_error	scratch;

	err = begin_error(err, &scratch);
	return store->ambiguous ? resolve(store, err) : ST_OK;
}

/* One page of a range read, then deleted through the writes, which know about chunks. */
static st_status
delete_page(st_store *store, st_slice start, st_slice end, bool *more, st_error *err)
{
	st_result	page = {0};
	st_op	   *ops = NULL;
	bool	   *acked = NULL;
	st_status	status = st_raw_get_range(store, ST_OP_DELETE_RANGE, start, end, store->native.max_batch_ops,
										  DELETE_PAGE_BYTES, false, &page, err);

	if (status == ST_OK && page.nrecs > 0)
	{
		ops = calloc(page.nrecs, sizeof(*ops));
		acked = calloc(page.nrecs, sizeof(*acked));
		if (ops == NULL || acked == NULL)
			status = st_fail(err, ST_NOMEM, "out of memory");
		for (uint32_t i = 0; i < page.nrecs && status == ST_OK; i++)
			ops[i] = (st_op) {.key = page.recs[i].key, .del = true};
		if (status == ST_OK)
			status = store->chunked ? st_chunked_write(store, ops, page.nrecs, acked, err)
				: st_raw_write(store, ST_SPACE_DATA, ops, page.nrecs, acked, err);
	}
	*more = !page.complete;
	free(ops);
	free(acked);
	st_result_free(&page);
	return status;
}

st_status
st_delete_range(st_store *store, st_slice start, st_slice end, st_error *err)
{
	st_error	scratch;
	bool		more = true;
	st_status	status = ST_OK;

	err = begin_error(err, &scratch);
	if (end.len > 0 && st_compare(start, end) >= 0)
		return ST_OK;
	while (more && status == ST_OK)
	{
		if (interrupted(store))
			return st_fail(err, ST_CANCELED, "canceled between two pieces of a range delete");
		if (store->chunked || store->driver->delete_range == NULL)
			status = delete_page(store, start, end, &more, err);
		else
		{
			st_request	r = {.kind = ST_REQ_DELETE_RANGE, .op = ST_OP_DELETE_RANGE, .start = start, .end = end};

			status = st_run(store, &r, err);
			more = r.more;
		}
	}
	return status;
}

st_status
st_sync(st_store *store, st_error *err)
{
	st_error	scratch;
	st_request	r = {.kind = ST_REQ_SYNC, .op = ST_OP_SYNC};

	return st_run(store, &r, begin_error(err, &scratch));
}

st_status
st_claim(st_store *store, const char *owner, uint64_t *epoch, st_error *err)
{
	st_error	scratch;
	size_t		len = owner == NULL ? 0 : strlen(owner);

	err = begin_error(err, &scratch);
	if (len == 0 || len > ST_MAX_OWNER)
		return st_fail(err, ST_INVALID, "owner must have 1 to %d bytes", ST_MAX_OWNER);
	return store->driver->claim(store->state, owner, epoch, err);
}

void
st_assume(st_store *store, const char *owner, uint64_t epoch)
{
	store->driver->assume(store->state, owner == NULL ? "" : owner, epoch);
}
