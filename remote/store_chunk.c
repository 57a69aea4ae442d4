/*
 * store_chunk.c
 *	  Values longer than one record of the driver: cut into chunks, found again through a manifest.
 *
 * In a store of a driver with short values every stored value begins with a kind byte (stored.h).  A long value is
 * written as chunks under a fresh random id in the chunk space, then as a manifest under its key: the single write of
 * the manifest is what makes the new value appear, whole.  Chunks are never changed, so a reader sees the value its
 * manifest names or finds chunks missing, and then looks at the key again.
 *
 * A write reads the present values of its keys first, for the chunks they will leave behind; that costs one more
 * request.  Chunks that nobody names any more may stay behind after a failure.  They are never seen.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "store_internal.h"
#include "stored.h"

#define MAX_LOOKS 16			/* a key that changes this often between two requests is given up */
#define CHUNKS_PER_REQUEST_BYTES ((size_t) 4 << 20)

/* ---------- reading ---------- */

/* How many chunks to ask for at once. */
static uint32_t
chunks_at_once(const st_store *store, const st_manifest *manifest)
{
	size_t		step = CHUNKS_PER_REQUEST_BYTES / manifest->chunk;

	if (step > store->native.max_batch_ops)
		step = store->native.max_batch_ops;
	return step > 0 ? (uint32_t) step : 1;
}

/* Copy the value into `to`.  *whole false: a chunk is missing or not what the manifest says. */
static st_status
read_chunks(st_store *store, const st_manifest *manifest, unsigned char *to, bool *whole, st_error *err)
{
	uint32_t	nchunks = st_manifest_chunks(manifest);
	uint32_t	step = chunks_at_once(store, manifest);
	uint8_t		(*names)[ST_CHUNK_KEY_LEN] = malloc(step * sizeof(*names));
	st_slice   *keys = malloc(step * sizeof(*keys));
	st_result	page = {0};
	size_t		at = 0;
	st_status	status = ST_OK;

	*whole = true;
	if (names == NULL || keys == NULL)
		status = st_fail(err, ST_NOMEM, "out of memory");
	for (uint32_t done = 0; done < nchunks && *whole && status == ST_OK; done += step)
	{
		uint32_t	n = nchunks - done < step ? nchunks - done : step;

		for (uint32_t i = 0; i < n; i++)
		{
			st_chunk_key(names[i], manifest, done + i);
			keys[i] = (st_slice) {names[i], ST_CHUNK_KEY_LEN};
		}
		st_answer_begin(&page);
		status = st_raw_get(store, ST_OP_GET, ST_SPACE_CHUNK, keys, n, &page, err);
		for (uint32_t i = 0; i < n && *whole && status == ST_OK; i++)
		{
			st_slice	chunk = page.recs[i].value;
			size_t		want = manifest->length - at < manifest->chunk ? manifest->length - at : manifest->chunk;

			*whole = page.recs[i].found && chunk.len == want;
			if (*whole)
				memcpy(to + at, chunk.data, want);
			at += want;
		}
	}
	if (status == ST_OK && *whole)
		*whole = st_checksum(to, manifest->length) == manifest->sum;
	st_result_free(&page);
	free(names);
	free(keys);
	return status;
}

/*
 * Add what a stored record stands for to result.  While chunks are missing the key is read again; when the same
 * manifest comes back, they are really gone.  A key that was deleted meanwhile gives found = false.
 */
static st_status
add_value(st_store *store, const st_record *stored, st_result *result, st_error *err)
{
	st_result	again = {0};
	st_slice	current = stored->value;
	bool		found = stored->found;
	st_manifest seen = {0};
	st_status	status = ST_OK;

	for (int look = 0;; look++)
	{
		uint32_t	before = result->nrecs;
		bool		chunked;
		bool		whole;
		st_slice	value = {0};
		st_manifest manifest;
		unsigned char *to;

		if (!found || (st_value_decode(current, &chunked, &value, &manifest) && !chunked))
		{
			if (!st_answer_add(result, stored->key, value, found))
				status = st_fail(err, ST_NOMEM, "out of memory");
			break;
		}
		if (!st_value_decode(current, &chunked, &value, &manifest))
		{
			status = st_fail(err, ST_CORRUPT, "store is damaged: a stored value cannot be read");
			break;
		}
		if (look > 0 && memcmp(seen.id, manifest.id, ST_CHUNK_ID_LEN) == 0)
		{
			status = st_fail(err, ST_CORRUPT, "store is damaged: a chunk of a long value is missing");
			break;
		}
		if (look == MAX_LOOKS)
		{
			status = st_fail(err, ST_UNAVAILABLE, "a long value changes too often to be read");
			break;
		}
		to = st_answer_reserve(result, stored->key, manifest.length);
		if (to == NULL)
		{
			status = st_fail(err, ST_NOMEM, "out of memory for a value of %llu bytes",
							 (unsigned long long) manifest.length);
			break;
		}
		status = read_chunks(store, &manifest, to, &whole, err);
		if (status != ST_OK || whole)
			break;
		result->nrecs = before;
		seen = manifest;
		st_answer_begin(&again);
		status = st_raw_get(store, ST_OP_GET, ST_SPACE_DATA, &stored->key, 1, &again, err);
		if (status != ST_OK)
			break;
		current = again.recs[0].value;
		found = again.recs[0].found;
	}
	st_result_free(&again);
	return status;
}

st_status
st_chunked_get(st_store *store, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err)
{
	st_result	stored = {0};
	st_status	status = st_raw_get(store, ST_OP_GET, ST_SPACE_DATA, keys, nkeys, &stored, err);

	for (uint32_t i = 0; i < nkeys && status == ST_OK; i++)
		status = add_value(store, &stored.recs[i], result, err);
	st_result_free(&stored);
	return status;
}

/*
 * max_bytes is about whole values, of which the driver sees only manifests: it gets the number as it is, and what
 * the long ones add is counted here.  When every record of an incomplete answer was deleted meanwhile, the range is
 * asked for again: an answer must bring its caller on.
 */
st_status
st_chunked_get_range(st_store *store, st_slice start, st_slice end, uint32_t limit, size_t max_bytes, bool reverse,
					 st_result *result, st_error *err)
{
	st_result	stored = {0};
	size_t		bytes = 0;
	uint32_t	taken;
	st_status	status;

	do
	{
		st_answer_begin(&stored);
		taken = 0;
		status = st_raw_get_range(store, ST_OP_GET_RANGE, start, end, limit, max_bytes, reverse, &stored, err);
		while (taken < stored.nrecs && status == ST_OK && (max_bytes == 0 || taken == 0 || bytes < max_bytes))
		{
			status = add_value(store, &stored.recs[taken++], result, err);
			if (status != ST_OK)
				break;
			if (result->recs[result->nrecs - 1].found)
				bytes += result->recs[result->nrecs - 1].value.len;
			else
				result->nrecs--;
		}
	} while (status == ST_OK && result->nrecs == 0 && !stored.complete);
	result->complete = status == ST_OK && stored.complete && taken == stored.nrecs;
	st_result_free(&stored);
	return status;
}

/* ---------- writing ---------- */

typedef struct chunked_batch
{
	st_store   *store;
	const st_op *ops;
	uint32_t	nops;
	bool	   *acked;
	st_op	   *stored;			/* the operations as the driver gets them */
	st_manifest *fresh;			/* length 0 = not a long value */
	st_manifest *old;
	unsigned char *bytes;		/* values of `stored` */
} chunked_batch;

static bool
is_long(const st_store *store, const st_op *op)
{
	return !op->del && op->value.len + 1 > store->native.max_value;
}

/* Deletes what it can: what stays behind is never seen. */
static void
delete_chunks(st_store *store, const st_manifest *manifest)
{
	uint32_t	nchunks = st_manifest_chunks(manifest);
	uint32_t	step = store->native.max_batch_ops < 1024 ? store->native.max_batch_ops : 1024;
	uint8_t		(*names)[ST_CHUNK_KEY_LEN] = malloc(step * sizeof(*names));
	st_op	   *ops = calloc(step, sizeof(*ops));
	bool	   *acked = calloc(step, sizeof(*acked));
	st_error	why = {0};

	for (uint32_t done = 0; names != NULL && ops != NULL && acked != NULL && done < nchunks; done += step)
	{
		uint32_t	n = nchunks - done < step ? nchunks - done : step;

		for (uint32_t i = 0; i < n; i++)
		{
			st_chunk_key(names[i], manifest, done + i);
			ops[i] = (st_op) {.key = {names[i], ST_CHUNK_KEY_LEN}, .del = true};
		}
		if (st_raw_write(store, ST_SPACE_CHUNK, ops, n, acked, &why) != ST_OK)
			break;
	}
	free(names);
	free(ops);
	free(acked);
}

static st_status
write_chunks(st_store *store, st_slice value, st_manifest *manifest, st_error *err)
{
	uint32_t	step = store->native.max_batch_ops < 1024 ? store->native.max_batch_ops : 1024;
	uint8_t		(*names)[ST_CHUNK_KEY_LEN] = malloc(step * sizeof(*names));
	st_op	   *ops = calloc(step, sizeof(*ops));
	bool	   *acked = calloc(step, sizeof(*acked));
	st_status	status = ST_OK;
	uint32_t	nchunks;

	if (names == NULL || ops == NULL || acked == NULL)
		status = st_fail(err, ST_NOMEM, "out of memory");
	else if (getrandom(manifest->id, ST_CHUNK_ID_LEN, 0) != ST_CHUNK_ID_LEN)
		status = st_fail(err, ST_UNAVAILABLE, "could not get random bytes for the id of a long value");
	manifest->length = value.len;
	manifest->chunk = store->native.max_value > UINT32_MAX ? UINT32_MAX : (uint32_t) store->native.max_value;
	manifest->sum = st_checksum(value.data, value.len);
	nchunks = st_manifest_chunks(manifest);
	for (uint32_t done = 0; done < nchunks && status == ST_OK; done += step)
	{
		uint32_t	n = nchunks - done < step ? nchunks - done : step;

		for (uint32_t i = 0; i < n; i++)
		{
			size_t		at = (size_t) (done + i) * manifest->chunk;
			size_t		len = value.len - at < manifest->chunk ? value.len - at : manifest->chunk;

			st_chunk_key(names[i], manifest, done + i);
			ops[i] = (st_op) {{names[i], ST_CHUNK_KEY_LEN}, {(const unsigned char *) value.data + at, len}, false};
		}
		status = st_raw_write(store, ST_SPACE_CHUNK, ops, n, acked, err);
	}
	free(names);
	free(ops);
	free(acked);
	return status;
}

/* The manifests that this batch replaces. */
static st_status
read_old(chunked_batch *b, st_error *err)
{
	st_slice   *keys = malloc(b->nops * sizeof(*keys));
	st_result	present = {0};
	st_status	status;

	if (keys == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	for (uint32_t i = 0; i < b->nops; i++)
		keys[i] = b->ops[i].key;
	status = st_raw_get(b->store, ST_OP_GET, ST_SPACE_DATA, keys, b->nops, &present, err);
	for (uint32_t i = 0; i < b->nops && status == ST_OK; i++)
	{
		bool		chunked;
		st_slice	value;

		/* a value that cannot be read is overwritten: whoever reads it is told */
		if (present.recs[i].found && !(st_value_decode(present.recs[i].value, &chunked, &value, &b->old[i]) && chunked))
			b->old[i].length = 0;
	}
	st_result_free(&present);
	free(keys);
	return status;
}

/* Chunks go out first; then `stored` is ready. */
static st_status
encode_values(chunked_batch *b, st_error *err)
{
	size_t		total = 0;
	unsigned char *to;

	for (uint32_t i = 0; i < b->nops; i++)
		if (!b->ops[i].del)
			total += is_long(b->store, &b->ops[i]) ? ST_MANIFEST_LEN : b->ops[i].value.len + 1;
	b->bytes = to = malloc(total > 0 ? total : 1);
	if (to == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");
	for (uint32_t i = 0; i < b->nops; i++)
	{
		const st_op *op = &b->ops[i];

		b->stored[i] = *op;
		if (op->del)
			continue;
		b->stored[i].value.data = to;
		if (is_long(b->store, op))
		{
			st_status	status = write_chunks(b->store, op->value, &b->fresh[i], err);

			if (status != ST_OK)
				return status;
			st_manifest_encode(to, &b->fresh[i]);
			b->stored[i].value.len = ST_MANIFEST_LEN;
		}
		else
		{
			to[0] = 0;
			if (op->value.len > 0)
				memcpy(to + 1, op->value.data, op->value.len);
			b->stored[i].value.len = op->value.len + 1;
		}
		to += b->stored[i].value.len;
	}
	return ST_OK;
}

static st_status
write_batch(chunked_batch *b, st_error *err)
{
	bool		in_doubt = false;
	bool		sent = false;
	st_status	status = read_old(b, err);

	if (status == ST_OK)
	{
		status = encode_values(b, err);
		if (status == ST_OK)
		{
			sent = true;
			status = st_raw_write(b->store, ST_SPACE_DATA, b->stored, b->nops, b->acked, err);
			in_doubt = status != ST_OK && err->ambiguous;
		}
		else
			/* only chunks may land late, under ids that no manifest names */
			err->ambiguous = false;
	}
	for (uint32_t i = 0; i < b->nops; i++)
	{
		if (sent && b->acked[i] && b->old[i].length > 0)
			delete_chunks(b->store, &b->old[i]);
		if (!b->acked[i] && !in_doubt && b->fresh[i].length > 0)
			delete_chunks(b->store, &b->fresh[i]);
	}
	return status;
}

st_status
st_chunked_write(st_store *store, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	uint32_t	step = store->native.max_batch_ops;
	st_status	status = ST_OK;

	for (uint32_t done = 0; done < nops && status == ST_OK; done += step)
	{
		chunked_batch b = {.store = store, .ops = ops + done, .acked = acked + done};

		b.nops = nops - done < step ? nops - done : step;
		b.stored = calloc(b.nops, sizeof(*b.stored));
		b.fresh = calloc(b.nops, sizeof(*b.fresh));
		b.old = calloc(b.nops, sizeof(*b.old));
		if (b.stored == NULL || b.fresh == NULL || b.old == NULL)
			status = st_fail(err, ST_NOMEM, "out of memory");
		else
			status = write_batch(&b, err);
		free(b.stored);
		free(b.fresh);
		free(b.old);
		free(b.bytes);
	}
	return status;
}
