/*
 * fuzz_stored.c
 *	  libFuzzer target: bytes that the store hands back, as they may be after damage.
 *
 * The input goes to each decoder of stored.h by itself, then as a stored value of a store with short values, as a
 * chunk of a long value, and as the target of a marker of a long key in LMDB.  Reading must end with a value or
 * ST_CORRUPT, and a decoded record must encode to the same bytes.
 */
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "../lmdb_keys.h"
#include "../stored.h"

#define MUST(condition) \
	do { \
		if (!(condition)) \
		{ \
			fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
			abort(); \
		} \
	} while (0)

extern int	LLVMFuzzerInitialize(int *argc, char ***argv);
extern int	LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static st_store *chunked;
static void *driver_state;
static st_options options = {.create = true};
static MDB_env *env;
static char directory[] = "/tmp/nemo_fuzz_XXXXXX";

static void
remove_directory(void)
{
	char		path[64];

	mdb_env_close(env);
	snprintf(path, sizeof(path), "%s/data.mdb", directory);
	remove(path);
	snprintf(path, sizeof(path), "%s/lock.mdb", directory);
	remove(path);
	remove(directory);
}

int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
	st_error	err;
	st_limits	limits;

	(void) argc;
	(void) argv;
	MUST(st_open("mem:fuzz?max_value=64", &options, &chunked, &err) == ST_OK);
	MUST(st_mem_driver.open("fuzz", &options, &driver_state, &limits, &err) == ST_OK);
	MUST(mkdtemp(directory) != NULL);
	MUST(mdb_env_create(&env) == 0 && mdb_env_set_maxdbs(env, 3) == 0);
	MUST(mdb_env_open(env, directory, MDB_NOSYNC, 0600) == 0);
	atexit(remove_directory);
	return 0;
}

static void
fuzz_decoders(st_slice input)
{
	st_owner	owner;
	st_manifest manifest;
	st_slice	value;
	uint64_t	id;
	uint32_t	version;
	bool		is_manifest;
	uint8_t		bytes[128];

	if (st_owner_decode(input, &owner))
		MUST(st_owner_encode(bytes, &owner) == input.len && memcmp(bytes, input.data, input.len) == 0);
	if (st_format_decode(input, &version) && version == ST_FORMAT_VERSION)
	{
		st_format_encode(bytes);
		MUST(memcmp(bytes, input.data, input.len) == 0);
	}
	if (st_branch_decode(input, &id))
	{
		st_put_u64(bytes, id);
		MUST(memcmp(bytes, input.data, input.len) == 0);
	}
	if (st_value_decode(input, &is_manifest, &value, &manifest))
	{
		if (is_manifest)
		{
			MUST(st_manifest_chunks(&manifest) > 0);
			st_manifest_encode(bytes, &manifest);
			MUST(memcmp(bytes, input.data, input.len) == 0);
		}
		else
			MUST(value.len == input.len - 1);
	}
}

static void
write_raw(st_space space, st_slice key, st_slice value)
{
	st_op		op = {key, value, false};
	bool		acked;
	st_error	err;

	MUST(st_mem_driver.write(driver_state, space, &op, 1, &acked, &err) == ST_OK);
}

/* The input as a value, or as the last chunk of one. */
static void
fuzz_chunked(st_slice input)
{
	st_slice	key = {"k", 1};
	st_result	result = {0};
	st_error	err;
	st_status	status;
	st_manifest manifest = {.length = 64 + 10, .chunk = 64};
	uint8_t		stored[ST_MANIFEST_LEN];
	uint8_t		name[ST_CHUNK_KEY_LEN];
	uint8_t		whole[64 + 10];

	if (input.len > 64)
		return;
	write_raw(ST_SPACE_DATA, key, input);
	status = st_get(chunked, &key, 1, &result, &err);
	MUST(status == ST_OK || status == ST_CORRUPT || status == ST_NOMEM);
	status = st_get_range(chunked, (st_slice) {0}, (st_slice) {0}, 0, 0, false, &result, &err);
	MUST(status == ST_OK || status == ST_CORRUPT || status == ST_NOMEM);

	memset(whole, 'w', sizeof(whole));
	manifest.sum = st_checksum(whole, sizeof(whole));
	st_manifest_encode(stored, &manifest);
	write_raw(ST_SPACE_DATA, key, (st_slice) {stored, sizeof(stored)});
	st_chunk_key(name, &manifest, 0);
	write_raw(ST_SPACE_CHUNK, (st_slice) {name, sizeof(name)}, (st_slice) {whole, 64});
	st_chunk_key(name, &manifest, 1);
	write_raw(ST_SPACE_CHUNK, (st_slice) {name, sizeof(name)}, input);
	status = st_get(chunked, &key, 1, &result, &err);
	if (input.len == 10 && memcmp(input.data, whole, 10) == 0)
		MUST(status == ST_OK && result.recs[0].value.len == sizeof(whole));
	else
		MUST(status == ST_CORRUPT);
	st_result_free(&result);
}

/*
 * Records of the input behind a marker: pairs of a length and so many bytes, as keys in `long` under branch 1, the
 * rest as what the marker and the last key hold.
 */
static void
fuzz_branches(st_slice input)
{
	const uint8_t *bytes = input.data;
	lmdb_databases dbs;
	lmdb_range	range = {0};
	MDB_txn    *txn;
	MDB_cursor *cursor;
	uint8_t		marker[511] = {0};
	uint8_t		physical[511] = {0, 0, 0, 0, 0, 0, 0, 1};
	MDB_val		key = {sizeof(marker), marker};
	MDB_val		value;
	st_result	result = {0};
	st_error	err;
	bool		complete;
	size_t		at = 0;

	MUST(mdb_txn_begin(env, NULL, 0, &txn) == 0);
	MUST(mdb_dbi_open(txn, "data", MDB_CREATE, &dbs.data) == 0);
	MUST(mdb_dbi_open(txn, "long", MDB_CREATE, &dbs.longs) == 0);
	MUST(mdb_dbi_open(txn, "meta", MDB_CREATE, &dbs.meta) == 0);
	while (at + 3 < input.len)
	{
		size_t		len = (size_t) bytes[at] * 2 + 1;

		memset(physical + 8, bytes[at + 1], sizeof(physical) - 8);
		physical[7] = bytes[at + 2] & 3;
		physical[len > 8 ? len - 1 : 8] = 0;
		key = (MDB_val) {len, physical};
		value = (MDB_val) {8, physical};
		MUST(mdb_put(txn, dbs.longs, &key, &value, 0) == 0);
		at += 3;
	}
	key = (MDB_val) {sizeof(marker), marker};
	value = (MDB_val) {input.len >= 8 ? 8 : input.len, (void *) (bytes + input.len - (input.len >= 8 ? 8 : input.len))};
	MUST(mdb_put(txn, dbs.data, &key, &value, 0) == 0);
	for (int reverse = 0; reverse < 2; reverse++)
	{
		st_status	status;

		range.reverse = reverse == 1;
		range.limit = 1000;
		MUST(mdb_cursor_open(txn, dbs.data, &cursor) == 0);
		status = lmdb_scan(&dbs, txn, cursor, &range, &result, &complete, &err);
		MUST(status == ST_OK || status == ST_CORRUPT);
		mdb_cursor_close(cursor);
		st_answer_begin(&result);
	}
	{
		uint8_t		long_key[1500] = {0};
		st_slice	found;
		int			rc = lmdb_find(&dbs, txn, (st_slice) {long_key, sizeof(long_key)}, &found);

		MUST(rc == 0 || rc == MDB_NOTFOUND || rc == MDB_CORRUPTED);
		rc = lmdb_delete(&dbs, txn, (st_slice) {long_key, sizeof(long_key)});
		MUST(rc == 0 || rc == MDB_CORRUPTED);
	}
	st_result_free(&result);
	mdb_txn_abort(txn);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	st_slice	input = {data, size};

	fuzz_decoders(input);
	fuzz_chunked(input);
	fuzz_branches(input);
	return 0;
}
