/*
 * nemo_registry.c
 *	  What outlives the server besides the rows: the state file under the data directory and the trees in tree 0.
 *
 * The state file (nemo/state) says from where the log must be replayed and which store this cluster writes to.  It is
 * replaced as a whole, durably, and only by the checkpointer.  Registry records are ordinary records of the store, with
 * keys in tree 0 that begin with 'T'; they bypass the record buffer, which never holds keys of tree 0.
 */
#include "nemo_log.h"

#include <sys/stat.h>
#include <unistd.h>

#include "access/xlog.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"

#define STATE_DIR		"nemo"
#define STATE_FILE		STATE_DIR "/state"
#define STATE_TEMP		STATE_DIR "/state.tmp"
#define STATE_MAGIC		0x4E454D4F	/* NEMO */
#define STATE_VERSION	1

#define KEY_LEN			(RB_TREE_LEN + 1 + 8)	/* tree 0, 'T', tree */
#define VALUE_LEN		(1 + 8 * 7 + 4 + 1 + 4)
#define VALUE_VERSION	1
#define LOAD_BATCH		1000	/* records */
#define WRITE_BATCH		256		/* records */

/* ---- state file ---------------------------------------------------------------------------------------------------- */

static pg_crc32c
crc_of(const void *data, size_t len)
{
	pg_crc32c	crc;

	INIT_CRC32C(crc);
	COMP_CRC32C(crc, data, len);
	FIN_CRC32C(crc);
	return crc;
}

NemoStateFile
nemo_state_read(NemoState *state)
{
	int			fd = OpenTransientFile(STATE_FILE, O_RDONLY | PG_BINARY);
	ssize_t		got;

	memset(state, 0, sizeof(*state));
	if (fd < 0)
	{
		if (errno == ENOENT)
			return NEMO_STATE_MISSING;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not open file \"%s\": %m", STATE_FILE)));
	}
	got = read(fd, state, sizeof(*state));
	if (got < 0)
	{
		int			save = errno;

		CloseTransientFile(fd);
		errno = save;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not read file \"%s\": %m", STATE_FILE)));
	}
	CloseTransientFile(fd);
	if (got != sizeof(*state) || state->magic != STATE_MAGIC || state->version != STATE_VERSION ||
		!EQ_CRC32C(state->crc, crc_of(state, offsetof(NemoState, crc))))
		return NEMO_STATE_CORRUPT;
	return NEMO_STATE_OK;
}

void
nemo_state_write(NemoState *state)
{
	int			fd;

	if (MakePGDirectory(STATE_DIR) < 0 && errno != EEXIST)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create directory \"%s\": %m", STATE_DIR)));
	fsync_fname(".", true);

	state->magic = STATE_MAGIC;
	state->version = STATE_VERSION;
	state->system_id = GetSystemIdentifier();
	state->crc = crc_of(state, offsetof(NemoState, crc));

	fd = OpenTransientFile(STATE_TEMP, O_RDWR | O_CREAT | O_TRUNC | PG_BINARY);
	if (fd < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create file \"%s\": %m", STATE_TEMP)));
	errno = 0;
	if (write(fd, state, sizeof(*state)) != sizeof(*state) || pg_fsync(fd) != 0)
	{
		int			save = errno != 0 ? errno : ENOSPC;

		CloseTransientFile(fd);
		errno = save;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not write file \"%s\": %m", STATE_TEMP)));
	}
	if (CloseTransientFile(fd) != 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not close file \"%s\": %m", STATE_TEMP)));
	(void) durable_rename(STATE_TEMP, STATE_FILE, ERROR);
}

/* ---- registry records ---------------------------------------------------------------------------------------------- */

static uint8 *
put64(uint8 *to, uint64 value)
{
	for (int i = 0; i < 8; i++)
		to[i] = (uint8) (value >> (56 - 8 * i));
	return to + 8;
}

static const uint8 *
take64(const uint8 *from, uint64 *value)
{
	*value = 0;
	for (int i = 0; i < 8; i++)
		*value = *value << 8 | from[i];
	return from + 8;
}

static void
make_key(uint8 *key, NemoTree tree)
{
	memset(key, 0, RB_TREE_LEN);
	key[RB_TREE_LEN] = 'T';
	(void) put64(key + RB_TREE_LEN + 1, tree);
}

static void
encode(uint8 *value, const NemoTreeRecord *r)
{
	uint8	   *p = value;
	pg_crc32c	crc;

	*p++ = VALUE_VERSION;
	p = put64(p, r->info.tree);
	p = put64(p, r->info.row_tree);
	p = put64(p, r->info.creator_xid);
	p = put64(p, r->next_rowid);
	p = put64(p, (uint64) r->rows);
	p = put64(p, (uint64) r->bytes);
	p = put64(p, r->drop_xid);
	for (int i = 0; i < 4; i++)
		*p++ = (uint8) (r->info.flags >> (24 - 8 * i));
	*p++ = r->dropped;
	crc = crc_of(value, (size_t) (p - value));
	for (int i = 0; i < 4; i++)
		*p++ = (uint8) (crc >> (24 - 8 * i));
	Assert(p == value + VALUE_LEN);
}

static bool
decode(st_slice key, st_slice value, NemoTreeRecord *r)
{
	const uint8 *p = value.data;
	uint64		in_key;
	uint64		rows;
	uint64		bytes;
	uint32		crc = 0;

	memset(r, 0, sizeof(*r));
	if (key.len != KEY_LEN || value.len != VALUE_LEN || *p != VALUE_VERSION)
		return false;
	for (int i = 0; i < 4; i++)
		crc = crc << 8 | p[VALUE_LEN - 4 + i];
	if (crc != crc_of(p, VALUE_LEN - 4))
		return false;
	(void) take64((const uint8 *) key.data + RB_TREE_LEN + 1, &in_key);
	p = take64(p + 1, &r->info.tree);
	p = take64(p, &r->info.row_tree);
	p = take64(p, &r->info.creator_xid);
	p = take64(p, &r->next_rowid);
	p = take64(p, &rows);
	p = take64(p, &bytes);
	p = take64(p, &r->drop_xid);
	r->rows = (int64) rows;
	r->bytes = (int64) bytes;
	for (int i = 0; i < 4; i++)
		r->info.flags = r->info.flags << 8 | *p++;
	r->dropped = *p != 0;
	return r->info.tree == in_key;
}

void
nemo_registry_load(st_store *store)
{
	uint8		start_key[KEY_LEN + 1] = {0};
	uint8		end_key[RB_TREE_LEN + 1] = {0};
	st_slice	start = {start_key, RB_TREE_LEN + 1};
	st_slice	end = {end_key, RB_TREE_LEN + 1};
	bool		complete = false;
	NemoTreeRecord *records = palloc(sizeof(NemoTreeRecord) * LOAD_BATCH);

	start_key[RB_TREE_LEN] = 'T';
	end_key[RB_TREE_LEN] = 'T' + 1;
	while (!complete)
	{
		st_result	result = {0};
		st_error	err = {0};
		st_status	status = st_get_range(store, start, end, LOAD_BATCH, 0, false, &result, &err);
		bool		sound = true;
		uint32		n = 0;

		while (status == ST_OK && sound && n < result.nrecs && n < LOAD_BATCH)
		{
			sound = decode(result.recs[n].key, result.recs[n].value, &records[n]);
			n++;
		}
		if (n > 0 && sound)
		{
			/* go on behind the last key: the same with a zero byte appended */
			memcpy(start_key, result.recs[n - 1].key.data, KEY_LEN);
			start_key[KEY_LEN] = 0;
			start.len = KEY_LEN + 1;
		}
		complete = result.complete || n == 0;
		st_result_free(&result);
		if (status != ST_OK)
			nemo_raise_store(status, &err);
		if (!sound)
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("the registry of trees in the nemo store is damaged"),
					 errhint("Restore the store from a backup taken together with this cluster.")));
		for (uint32 i = 0; i < n; i++)
			nemo_tree_load(&records[i]);
	}
	pfree(records);
}

static void
write_batch(st_store *store, const st_op *ops, int n)
{
	bool		acked[WRITE_BATCH];
	st_error	err = {0};
	st_status	status = st_write(store, ops, (uint32) n, acked, &err);

	/*
	 * The checkpointer alone writes these keys, and it does not write one again before the store says that the earlier
	 * request can no longer land (C4).
	 */
	if (status != ST_OK)
	{
		if (err.ambiguous)
		{
			st_error	ignored = {0};

			(void) st_resolve(store, &ignored);
		}
		nemo_raise_store(status, &err);
	}
}

/* In doubt after an earlier failure of this process: settle that first. */
static void
resolve(st_store *store)
{
	st_error	err = {0};
	st_status	status = st_resolve(store, &err);

	if (status != ST_OK)
		nemo_raise_store(status, &err);
}

void
nemo_registry_write(st_store *store, const NemoTreeRecord *records, int n)
{
	st_op		ops[WRITE_BATCH];
	uint8		keys[WRITE_BATCH][KEY_LEN];
	uint8		values[WRITE_BATCH][VALUE_LEN];

	resolve(store);
	for (int first = 0; first < n; first += WRITE_BATCH)
	{
		int			count = Min(WRITE_BATCH, n - first);

		for (int i = 0; i < count; i++)
		{
			make_key(keys[i], records[first + i].info.tree);
			encode(values[i], &records[first + i]);
			ops[i].key = (st_slice) {keys[i], KEY_LEN};
			ops[i].value = (st_slice) {values[i], VALUE_LEN};
			ops[i].del = false;
		}
		write_batch(store, ops, count);
	}
}

void
nemo_registry_delete(st_store *store, const NemoTree *trees, int n)
{
	st_op		ops[WRITE_BATCH];
	uint8		keys[WRITE_BATCH][KEY_LEN];

	resolve(store);
	for (int first = 0; first < n; first += WRITE_BATCH)
	{
		int			count = Min(WRITE_BATCH, n - first);

		for (int i = 0; i < count; i++)
		{
			make_key(keys[i], trees[first + i]);
			ops[i].key = (st_slice) {keys[i], KEY_LEN};
			ops[i].value = (st_slice) {NULL, 0};
			ops[i].del = true;
		}
		write_batch(store, ops, count);
	}
}
