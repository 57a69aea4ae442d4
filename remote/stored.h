/*
 * stored.h
 *	  Layouts of the bytes the store layer keeps for itself, and their decoders.
 *
 * All integers are big-endian.  A decoder returns false for bytes it did not write; it reads nothing beyond the slice.
 *
 *	format record	"nemostor" version:4
 *	owner record	epoch:8 owner:1..64
 *	branch record	id:8, not zero							(a long key continues in branch `id`, store_lmdb.c)
 *	chunked stores	0 value | 1 id:16 length:8 chunk:4 sum:8	(a manifest; chunk = bytes in each chunk but the last)
 *	chunk key		id:16 number:4
 */
#ifndef NEMO_STORED_H
#define NEMO_STORED_H

#include "driver.h"

#define ST_FORMAT_MAGIC "nemostor"
#define ST_FORMAT_VERSION 1
#define ST_FORMAT_LEN 12
#define ST_MANIFEST_LEN 37
#define ST_CHUNK_ID_LEN 16
#define ST_CHUNK_KEY_LEN 20

typedef struct st_owner
{
	uint64_t	epoch;
	char		name[ST_MAX_OWNER + 1]; /* empty = nobody */
} st_owner;

typedef struct st_manifest
{
	uint8_t		id[ST_CHUNK_ID_LEN];	/* random; a value written again gets another one */
	uint64_t	length;			/* of the value, bytes */
	uint32_t	chunk;
	uint64_t	sum;			/* st_checksum() of the value */
} st_manifest;

static inline void
st_put_u32(uint8_t *to, uint32_t value)
{
	for (int i = 0; i < 4; i++)
		to[i] = (uint8_t) (value >> (24 - 8 * i));
}

static inline void
st_put_u64(uint8_t *to, uint64_t value)
{
	st_put_u32(to, (uint32_t) (value >> 32));
	st_put_u32(to + 4, (uint32_t) value);
}

static inline uint32_t
st_take_u32(const uint8_t *from)
{
	return (uint32_t) from[0] << 24 | (uint32_t) from[1] << 16 | (uint32_t) from[2] << 8 | from[3];
}

static inline uint64_t
st_take_u64(const uint8_t *from)
{
	return (uint64_t) st_take_u32(from) << 32 | st_take_u32(from + 4);
}

static inline void
st_format_encode(uint8_t to[ST_FORMAT_LEN])
{
	memcpy(to, ST_FORMAT_MAGIC, 8);
	st_put_u32(to + 8, ST_FORMAT_VERSION);
}

static inline bool
st_format_decode(st_slice from, uint32_t *version)
{
	if (from.len != ST_FORMAT_LEN || memcmp(from.data, ST_FORMAT_MAGIC, 8) != 0)
		return false;
	*version = st_take_u32((const uint8_t *) from.data + 8);
	return true;
}

/* Returns the length. */
static inline size_t
st_owner_encode(uint8_t to[8 + ST_MAX_OWNER], const st_owner *owner)
{
	size_t		len = strlen(owner->name);

	st_put_u64(to, owner->epoch);
	memcpy(to + 8, owner->name, len);
	return 8 + len;
}

static inline bool
st_owner_decode(st_slice from, st_owner *owner)
{
	if (from.len < 9 || from.len > 8 + ST_MAX_OWNER || memchr((const char *) from.data + 8, 0, from.len - 8) != NULL)
		return false;
	owner->epoch = st_take_u64(from.data);
	memcpy(owner->name, (const char *) from.data + 8, from.len - 8);
	owner->name[from.len - 8] = '\0';
	return true;
}

static inline void
st_set_owner(st_owner *owner, const char *name, uint64_t epoch)
{
	size_t		len = strnlen(name, ST_MAX_OWNER);

	memcpy(owner->name, name, len);
	owner->name[len] = '\0';
	owner->epoch = epoch;
}

/*
 * May a store that goes by `assumed` write to one that belongs to `present`?  An unclaimed store takes writes of those
 * who assume nobody; anything else needs the same owner and epoch (INVARIANTS E7).
 */
static inline st_status
st_check_owner(const st_owner *present, const st_owner *assumed, st_error *err)
{
	if (present->epoch == assumed->epoch && strcmp(present->name, assumed->name) == 0)
		return ST_OK;
	if (present->name[0] == '\0')
		return st_fail(err, ST_REFUSED, "store is no longer claimed by \"%s\"", assumed->name);
	if (strcmp(present->name, assumed->name) != 0)
		return st_fail(err, ST_REFUSED, "store is owned by \"%s\"", present->name);
	return st_fail(err, ST_REFUSED, "store was claimed again by \"%s\": epoch %llu is over, it is now %llu",
				   present->name, (unsigned long long) assumed->epoch, (unsigned long long) present->epoch);
}

static inline st_status
st_raise_epoch(st_owner *present, const char *owner, st_error *err)
{
	if (present->name[0] != '\0' && strcmp(present->name, owner) != 0)
		return st_fail(err, ST_REFUSED, "store is owned by \"%s\"", present->name);
	st_set_owner(present, owner, present->epoch + 1);
	return ST_OK;
}

static inline bool
st_branch_decode(st_slice from, uint64_t *id)
{
	if (from.len != 8)
		return false;
	*id = st_take_u64(from.data);
	return *id != 0;
}

static inline void
st_manifest_encode(uint8_t to[ST_MANIFEST_LEN], const st_manifest *manifest)
{
	to[0] = 1;
	memcpy(to + 1, manifest->id, ST_CHUNK_ID_LEN);
	st_put_u64(to + 17, manifest->length);
	st_put_u32(to + 25, manifest->chunk);
	st_put_u64(to + 29, manifest->sum);
}

/* Splits a stored value of a chunked store: *chunked tells whether *manifest or *value was set. */
static inline bool
st_value_decode(st_slice from, bool *chunked, st_slice *value, st_manifest *manifest)
{
	const uint8_t *bytes = from.data;

	if (from.len == 0 || bytes[0] > 1)
		return false;
	*chunked = bytes[0] == 1;
	if (!*chunked)
	{
		*value = (st_slice) {bytes + 1, from.len - 1};
		return true;
	}
	if (from.len != ST_MANIFEST_LEN)
		return false;
	memcpy(manifest->id, bytes + 1, ST_CHUNK_ID_LEN);
	manifest->length = st_take_u64(bytes + 17);
	manifest->chunk = st_take_u32(bytes + 25);
	manifest->sum = st_take_u64(bytes + 29);
	return manifest->chunk >= ST_MIN_DRIVER_VALUE / 2 && manifest->length > 0 && manifest->length <= ST_MAX_VALUE;
}

static inline uint32_t
st_manifest_chunks(const st_manifest *manifest)
{
	return (uint32_t) ((manifest->length + manifest->chunk - 1) / manifest->chunk);
}

static inline void
st_chunk_key(uint8_t to[ST_CHUNK_KEY_LEN], const st_manifest *manifest, uint32_t number)
{
	memcpy(to, manifest->id, ST_CHUNK_ID_LEN);
	st_put_u32(to + ST_CHUNK_ID_LEN, number);
}

/* FNV-1a, 64 bits. */
static inline uint64_t
st_checksum(const void *data, size_t len)
{
	const uint8_t *bytes = data;
	uint64_t	sum = UINT64_C(14695981039346656037);

	for (size_t i = 0; i < len; i++)
		sum = (sum ^ bytes[i]) * UINT64_C(1099511628211);
	return sum;
}

#endif							/* NEMO_STORED_H */
