/*
 * nemo_index.c
 *	  The index access method: its handler, the form of entries, inserting and deleting one, and unique checks.
 *
 * Entries are versioned records like rows (INVARIANTS F2): they are deleted by the UPDATE or DELETE that outdates
 * them, so a snapshot that sees an entry sees the row version it was made from.  A unique check is decided on the
 * chain of the one key there can be (F10): a running writer of it is waited for and the key looked at again.
 */
#include "nemo_table.h"

#include "access/amapi.h"
#include "access/nbtree.h"
#include "access/reloptions.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "commands/vacuum.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "storage/lmgr.h"
#include "utils/datum.h"
#include "utils/index_selfuncs.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_ddl.h"
#include "nemo_index.h"

/* scratch of one insertion or deletion; these do not nest */
static struct
{
	bool		ready;
	StringInfoData key;
	StringInfoData value;
	StringInfoData row_key;
}			scratch;

static void
scratch_reset(void)
{
	if (unlikely(!scratch.ready))
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		initStringInfo(&scratch.key);
		initStringInfo(&scratch.value);
		initStringInfo(&scratch.row_key);
		scratch.ready = true;
		MemoryContextSwitchTo(old);
	}
	resetStringInfo(&scratch.key);
	resetStringInfo(&scratch.value);
	resetStringInfo(&scratch.row_key);
}

static inline rb_slice
slice_of(const StringInfoData *s)
{
	return (rb_slice) {(const uint8_t *) s->data, (uint32_t) s->len};
}

/* ---- entries ----------------------------------------------------------------------------------------------------- */

NemoIndexInfo *
nemo_index_describe(NemoRelInfo *info, Relation index, MemoryContext cxt)
{
	NemoIndexInfo *ix;
	MemoryContext old;

	for (int i = 0; i < info->nindexes; i++)
		if (info->indexes[i].oid == RelationGetRelid(index) && info->indexes[i].tree == nemo_tree_of(index))
			return &info->indexes[i];

	old = MemoryContextSwitchTo(cxt);
	ix = palloc0(sizeof(NemoIndexInfo));
	ix->oid = RelationGetRelid(index);
	ix->tree = nemo_tree_of(index);
	ix->clustered = info->clustered && ix->tree == info->row_tree;
	ix->unique = index->rd_index->indisunique && index->rd_index->indimmediate;
	ix->desc = nemo_key_desc(index, cxt);
	ix->ii = BuildIndexInfo(index);
	MemoryContextSwitchTo(old);
	return ix;
}

void
nemo_entry_key(const NemoIndexInfo *ix, const Datum *values, const bool *isnull, rb_slice row_key,
			   StringInfo key, uint32 *prefix, bool *null_distinct)
{
	int			natts = nemo_key_natts(ix->desc);
	uint8		tree[RB_TREE_LEN];
	bool		anynull = false;

	nemo_put_be64(tree, ix->tree);
	appendBinaryStringInfo(key, (char *) tree, RB_TREE_LEN);
	for (int i = 0; i < natts; i++)
	{
		anynull |= isnull[i];
		nemo_key_encode(ix->desc, i, values[i], isnull[i], key);
	}
	*prefix = key->len;
	*null_distinct = anynull && !ix->ii->ii_NullsNotDistinct;
	if (!ix->unique || *null_distinct)
		appendBinaryStringInfo(key, (const char *) row_key.data + RB_TREE_LEN, row_key.len - RB_TREE_LEN);
	if (key->len > NEMO_MAX_KEY)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("key of %d bytes exceeds the maximum of %d bytes for index \"%s\"",
						key->len, NEMO_MAX_KEY, get_rel_name(ix->oid)),
				 errhint("Long values cannot be indexed. Consider an index on a hash of the value.")));
}

/* is column i of the index kept in the value? */
static inline bool
is_extra(const NemoIndexInfo *ix, int i)
{
	return i >= nemo_key_natts(ix->desc) || !nemo_key_decodable(ix->desc, i);
}

void
nemo_entry_value(const NemoRelInfo *info, const NemoIndexInfo *ix, TupleDesc desc, const Datum *values,
				 const bool *isnull, uint64 rowid, rb_slice row_key, StringInfo value)
{
	uint8		header[ENTRY_HEADER_LEN];
	uint32		n = nemo_key_from_rowid(info, rowid) ? 0 : row_key.len - RB_TREE_LEN;

	nemo_put_be64(header, rowid);
	header[ENTRY_ROWID_LEN] = (uint8) (n >> 8);
	header[ENTRY_ROWID_LEN + 1] = (uint8) n;
	appendBinaryStringInfo(value, (char *) header, ENTRY_HEADER_LEN);
	if (n > 0)
		appendBinaryStringInfo(value, (const char *) row_key.data + RB_TREE_LEN, n);

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		Datum		v = values[i];
		char	   *to;
		Size		size;

		if (!is_extra(ix, i))
			continue;
		if (!isnull[i] && att->attlen == -1)
			v = PointerGetDatum(PG_DETOAST_DATUM_PACKED(v));
		size = datumEstimateSpace(v, isnull[i], att->attbyval, att->attlen);
		enlargeStringInfo(value, (int) size);
		to = value->data + value->len;
		datumSerialize(v, isnull[i], att->attbyval, att->attlen, &to);
		value->len += (int) size;
	}
}

void
nemo_entry_parse(const uint8 *data, uint32 len, NemoEntryValue *out)
{
	uint32		n;

	if (len < ENTRY_HEADER_LEN ||
		(n = (uint32) data[ENTRY_ROWID_LEN] << 8 | data[ENTRY_ROWID_LEN + 1]) > len - ENTRY_HEADER_LEN)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("malformed entry in a nemo index"),
				 errhint("REINDEX the index, and check that the store holds the data of this server.")));
	out->rowid = nemo_get_be64(data);
	out->suffix = (rb_slice) {data + ENTRY_HEADER_LEN, n};
	out->extra = (rb_slice) {data + ENTRY_HEADER_LEN + n, len - ENTRY_HEADER_LEN - n};
}

void
nemo_entry_columns(const NemoIndexInfo *ix, TupleDesc desc, rb_slice key, rb_slice extra, Datum *values, bool *isnull)
{
	const uint8 *p = key.data + RB_TREE_LEN;
	char	   *from = (char *) extra.data;

	for (int i = 0; i < desc->natts; i++)
	{
		bool		stored = is_extra(ix, i);

		if (i < nemo_key_natts(ix->desc))
			nemo_key_decode(ix->desc, i, &p, key.data + key.len, stored ? NULL : &values[i], &isnull[i]);
		if (stored)
			values[i] = datumRestore(&from, &isnull[i]);
	}
}

const rb_version *
nemo_entry_any(const rb_version *head)
{
	const rb_version *v = nemo_visible(head, SnapshotAny);

	while (v != NULL && v->kind != RB_DATA)
	{
		head = rb_older(v);
		v = head == NULL ? NULL : nemo_visible(head, SnapshotAny);
	}
	return v;
}

void
nemo_key_successor(StringInfo s)
{
	while (s->len > 0 && (uint8) s->data[s->len - 1] == 0xFF)
		s->len--;
	Assert(s->len > 0);
	s->data[s->len - 1] = (char) ((uint8) s->data[s->len - 1] + 1);
	s->data[s->len] = '\0';
}

void
nemo_check_index_layout(Relation index, const NemoRelInfo *info, NemoTreeInfo *tree)
{
	if (!nemo_tree_get(nemo_tree_of(index), tree) || tree->row_tree != info->tree)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("index \"%s\" refers to an earlier layout of its table", RelationGetRelationName(index)),
				 errhint("REINDEX the index.")));
}

/* ---- unique checks of deferrable constraints --------------------------------------------------------------------- */

typedef struct OthersArg
{
	uint64		rowid;			/* ours */
	bool		found;			/* a live entry of another row, or one that may be */
	TransactionId wait_xid;
	uint32		token;
} OthersArg;

static bool
others_visit(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	OthersArg  *a = arg;
	const rb_version *v = nemo_entry_any(head);
	NemoChain	chain;

	(void) i;
	(void) key;
	if (v == NULL || v->len < ENTRY_ROWID_LEN || nemo_get_be64(rb_data(v)) == a->rowid)
		return true;
	nemo_examine(head, LockTupleExclusive, &chain);
	if (TransactionIdIsValid(chain.wait_xid))
	{
		a->found = true;
		a->wait_xid = chain.wait_xid;
		a->token = chain.speculative_token;
		return false;
	}
	if (chain.live != NULL && chain.live->kind == RB_DATA)
	{
		a->found = true;
		return false;
	}
	return true;
}

/*
 * Does a row other than rowid have a live entry with these key columns?  With wait, running writers of such entries
 * are waited for; else they count as rows.
 */
static bool
others_exist(Relation heap, rb_slice prefix, uint64 rowid, ItemPointer tid, bool wait)
{
	uint8_t		resume[RB_MAX_KEY + 1];
	uint32_t	resume_len;
	bool		done;
	rb_error	err;
	StringInfoData end;

	initStringInfo(&end);
	appendBinaryStringInfo(&end, (const char *) prefix.data, prefix.len);
	nemo_key_successor(&end);
	for (;;)
	{
		OthersArg	arg = {.rowid = rowid, .wait_xid = InvalidTransactionId};
		rb_status	status = rb_read_range(nemo_thread(), prefix, slice_of(&end), false, 0, 32, others_visit, &arg,
										   &done, resume, &resume_len, &err);

		if (status != RB_OK)
			nemo_raise(status, &err);
		if (!arg.found || !TransactionIdIsValid(arg.wait_xid) || !wait)
		{
			pfree(end.data);
			return arg.found;
		}
		(void) nemo_wait_for(heap, tid, arg.wait_xid, arg.token, LockWaitBlock, XLTW_InsertIndexUnique);
	}
}

/* ---- insert and delete ------------------------------------------------------------------------------------------- */

static inline bool
is_entry_of(const rb_version *v, uint64 rowid)
{
	return v != NULL && v->kind == RB_DATA && v->len >= ENTRY_ROWID_LEN && nemo_get_be64(rb_data(v)) == rowid;
}

/* Put scratch.key/value in the tree.  false: the key is another row's, or may become so (UNIQUE_CHECK_PARTIAL only). */
static bool
insert_entry(Relation heap, Relation index, NemoIndexInfo *ix, Datum *values, bool *isnull, uint64 rowid,
			 ItemPointer tid, IndexUniqueCheck check)
{
	rb_thread  *thread = nemo_thread();
	rb_slice	key = slice_of(&scratch.key);
	CommandId	cid = GetCurrentCommandId(true);
	rb_version *v = NULL;

	for (;;)
	{
		const rb_version *head;
		NemoChain	chain;

		if (v == NULL)
			v = nemo_prepare(key.len, RB_DATA, 0, cid, LockTupleExclusive, scratch.value.data, scratch.value.len);
		nemo_lookup_enter(key, true, &head);
		nemo_examine(head, LockTupleExclusive, &chain);

		if (TransactionIdIsValid(chain.wait_xid))
		{
			rb_leave(thread);
			nemo_discard(v);
			v = NULL;
			if (check == UNIQUE_CHECK_PARTIAL)
				return false;
			(void) nemo_wait_for(heap, tid, chain.wait_xid, chain.speculative_token, LockWaitBlock,
								 XLTW_InsertIndexUnique);
			continue;
		}
		if (chain.live != NULL && chain.live->kind == RB_DATA)
		{
			bool		same_row = is_entry_of(chain.live, rowid);

			if (!same_row || (chain.live->len == (uint32_t) scratch.value.len &&
							  memcmp(rb_data(chain.live), scratch.value.data, scratch.value.len) == 0))
			{
				rb_leave(thread);
				nemo_discard(v);
				if (same_row)
					return true;
				if (check == UNIQUE_CHECK_PARTIAL)
					return false;
				nemo_unique_violation(index, values, isnull, heap);
			}
		}
		if (nemo_install(key, v, &chain))
		{
			rb_leave(thread);
			nemo_tree_count(ix->tree, 1, key.len + scratch.value.len);
			return true;
		}
		rb_leave(thread);
	}
}

/*
 * An entry that ends in the key of a row that is new itself: nobody has to look whether it is there.  false: something
 * is known about the key, so looking costs nothing.
 */
static bool
insert_new_entry(NemoIndexInfo *ix)
{
	rb_thread  *thread = nemo_thread();
	NemoChange	change = {slice_of(&scratch.key), NULL};
	const rb_version *head;
	rb_status	status;

	rb_enter(thread);
	status = rb_lookup(thread, change.key, &head);
	rb_leave(thread);
	if (status != RB_UNKNOWN)
		return false;
	change.v = nemo_prepare(change.key.len, RB_DATA, 0, GetCurrentCommandId(true), LockTupleExclusive,
							scratch.value.data, scratch.value.len);
	nemo_install_fresh(&change, 1);
	nemo_tree_count(ix->tree, 1, change.key.len + scratch.value.len);
	return true;
}

/* aminsert */
bool
nemo_index_insert(Relation index, Datum *values, bool *isnull, ItemPointer tid, Relation heap,
				  IndexUniqueCheck check, bool unchanged, IndexInfo *ii)
{
	NemoRelInfo *info;
	NemoIndexInfo *ix;
	uint64		rowid;
	uint8		tag;
	uint32		prefix;
	bool		null_distinct;
	rb_slice	row_key;

	(void) unchanged;
	(void) ii;
	(void) nemo_thread();
	info = nemo_rel(heap);
	ix = nemo_index_describe(info, index, CurrentMemoryContext);
	if (ix->clustered)
		return nemo_place_row(heap, index, values, isnull, tid, check);
	if (check != UNIQUE_CHECK_EXISTING && nemo_update_left_index(heap, ix->oid, tid))
		return true;
	if (!nemo_tid_get(tid, &rowid, &tag))
		elog(ERROR, "unexpected ctid (%u,%u) for index \"%s\"", ItemPointerGetBlockNumberNoCheck(tid),
			 ItemPointerGetOffsetNumberNoCheck(tid), RelationGetRelationName(index));

	scratch_reset();
	if (!nemo_row_key(info, rowid, SnapshotSelf, &scratch.row_key) &&
		!(ActiveSnapshotSet() && nemo_row_key(info, rowid, GetActiveSnapshot(), &scratch.row_key)))
		elog(ERROR, "row " UINT64_FORMAT " of table \"%s\" was not found", rowid, RelationGetRelationName(heap));
	row_key = slice_of(&scratch.row_key);
	nemo_entry_key(ix, values, isnull, row_key, &scratch.key, &prefix, &null_distinct);

	if (check != UNIQUE_CHECK_EXISTING)
	{
		nemo_entry_value(info, ix, RelationGetDescr(index), values, isnull, rowid, row_key, &scratch.value);
		if (!((!ix->unique || null_distinct) && nemo_row_is_fresh(info, rowid) && insert_new_entry(ix)) &&
			!insert_entry(heap, index, ix, values, isnull, rowid, tid, ix->unique ? check : UNIQUE_CHECK_NO))
			return false;
	}

	/* a deferrable constraint: entries of several rows may stand side by side until it is checked */
	if (check != UNIQUE_CHECK_NO && !ix->unique && !null_distinct &&
		others_exist(heap, (rb_slice) {(const uint8_t *) scratch.key.data, prefix}, rowid, tid,
					 check != UNIQUE_CHECK_PARTIAL))
	{
		if (check == UNIQUE_CHECK_PARTIAL)
			return false;
		nemo_unique_violation(index, values, isnull, heap);
	}
	return true;
}

/* Deleting an entry that is not there, or is another row's by now, does nothing. */
void
nemo_index_delete_entry(Relation rel, NemoRelInfo *info, NemoIndexInfo *ix, Datum *values, bool *isnull,
						uint64 rowid, rb_slice row_key, CommandId cid)
{
	rb_thread  *thread = nemo_thread();
	rb_version *v = NULL;
	rb_slice	key;
	uint32		prefix;
	bool		null_distinct;

	(void) info;
	if (ix->clustered)
		return;
	scratch_reset();
	nemo_entry_key(ix, values, isnull, row_key, &scratch.key, &prefix, &null_distinct);
	key = slice_of(&scratch.key);

	for (;;)
	{
		const rb_version *head;
		NemoChain	chain;

		if (v == NULL)
			v = nemo_prepare(key.len, RB_DELETE, 0, cid, LockTupleExclusive, NULL, 0);
		nemo_lookup_enter(key, false, &head);
		nemo_examine(head, LockTupleExclusive, &chain);
		if (TransactionIdIsValid(chain.wait_xid) && is_entry_of(nemo_entry_any(head), rowid))
		{
			ItemPointerData tid;

			rb_leave(thread);
			nemo_discard(v);
			v = NULL;
			nemo_tid_set(&tid, rowid, 0);
			(void) nemo_wait_for(rel, &tid, chain.wait_xid, chain.speculative_token, LockWaitBlock, XLTW_Delete);
			continue;
		}
		if (!is_entry_of(chain.live, rowid))
		{
			rb_leave(thread);
			nemo_discard(v);
			return;
		}
		if (nemo_install(key, v, &chain))
		{
			rb_leave(thread);
			nemo_tree_count(ix->tree, -1, -(int64) key.len);
			return;
		}
		rb_leave(thread);
	}
}

/* ---- vacuum ------------------------------------------------------------------------------------------------------ */

typedef struct TidsArg
{
	int			n;
	ItemPointerData tids[1024];
} TidsArg;

static bool
tids_visit(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	TidsArg    *a = arg;
	const rb_version *v = nemo_entry_any(head);

	(void) i;
	(void) key;
	if (v != NULL && v->len >= ENTRY_ROWID_LEN)
		nemo_tid_set(&a->tids[a->n++], nemo_get_be64(rb_data(v)), 0);
	return a->n < (int) lengthof(a->tids);
}

static IndexBulkDeleteResult *
vacuum_result(IndexVacuumInfo *vacuum, IndexBulkDeleteResult *stats)
{
	double		rows,
				bytes;

	if (stats == NULL)
		stats = palloc0(sizeof(IndexBulkDeleteResult));
	nemo_tree_estimate(nemo_tree_of(vacuum->index), &rows, &bytes);
	stats->num_index_tuples = rows;
	stats->estimated_count = true;
	stats->num_pages = (BlockNumber) Max(1.0, Min(bytes / BLCKSZ, (double) MaxBlockNumber));
	return stats;
}

/*
 * Entries are deleted by the statements that outdate their rows; nothing is left to vacuum.  CREATE INDEX
 * CONCURRENTLY learns from this call which rows have an entry.
 */
static IndexBulkDeleteResult *
bulk_delete(IndexVacuumInfo *vacuum, IndexBulkDeleteResult *stats, IndexBulkDeleteCallback callback, void *state)
{
	rb_thread  *thread = nemo_thread();
	NemoTree	tree = nemo_tree_of(vacuum->index);
	uint8_t		start[RB_MAX_KEY + 1];
	uint32_t	start_len = RB_TREE_LEN;
	uint8_t		end[RB_TREE_LEN];
	TidsArg    *arg = palloc(sizeof(TidsArg));
	bool		done = callback == NULL;

	nemo_put_be64(start, tree);
	nemo_put_be64(end, tree + 1);
	while (!done)
	{
		uint8_t		resume[RB_MAX_KEY + 1];
		uint32_t	resume_len = 0;
		rb_error	err;
		rb_status	status;

		CHECK_FOR_INTERRUPTS();
		arg->n = 0;
		status = rb_read_range(thread, (rb_slice) {start, start_len}, (rb_slice) {end, RB_TREE_LEN}, false, 0, 1024,
							   tids_visit, arg, &done, resume, &resume_len, &err);
		if (status != RB_OK)
			nemo_raise(status, &err);
		for (int i = 0; i < arg->n; i++)
			(void) callback(&arg->tids[i], state);
		if (!done)
		{
			memcpy(start, resume, resume_len);
			start_len = resume_len;
		}
	}
	pfree(arg);
	return vacuum_result(vacuum, stats);
}

static IndexBulkDeleteResult *
vacuum_cleanup(IndexVacuumInfo *vacuum, IndexBulkDeleteResult *stats)
{
	return vacuum->analyze_only ? stats : vacuum_result(vacuum, stats);
}

/* ---- for the planner --------------------------------------------------------------------------------------------- */

#define ESTIMATED_ENTRY_BYTES 64	/* of an entry beside its row, where rows and index are one tree */

void
nemo_index_estimate(Oid indexoid, BlockNumber *pages, double *tuples, int *height)
{
	Relation	index = index_open(indexoid, NoLock);
	double		bytes;
	double		fanout;

	nemo_tree_estimate(nemo_tree_of(index), tuples, &bytes);
	*tuples = Max(*tuples, 0.0);
	bytes = Max(0.0, Min(bytes, *tuples * ESTIMATED_ENTRY_BYTES));
	*pages = (BlockNumber) Max(1.0, Min(bytes / BLCKSZ, (double) MaxBlockNumber));
	*height = 0;
	for (fanout = 128.0; fanout < *tuples; fanout *= 128.0)
		(*height)++;
	index_close(index, NoLock);
}

bool
nemo_index_column_ordered(Oid indexoid, int col)
{
	Relation	index = index_open(indexoid, NoLock);
	Relation	heap = table_open(index->rd_index->indrelid, NoLock);
	NemoIndexInfo *ix = nemo_index_describe(nemo_rel(heap), index, CurrentMemoryContext);
	bool		ordered = nemo_key_ordered(ix->desc, col);

	table_close(heap, NoLock);
	index_close(index, NoLock);
	return ordered;
}

/* ---- handler ----------------------------------------------------------------------------------------------------- */

static bool
can_return(Relation index, int attno)
{
	(void) index;
	(void) attno;
	return true;
}

/* operator classes are btree's, and have been validated as such */
static bool
validate(Oid opclass)
{
	(void) opclass;
	return true;
}

PG_FUNCTION_INFO_V1(nemo_index_handler);

Datum
nemo_index_handler(PG_FUNCTION_ARGS)
{
	IndexAmRoutine *am = makeNode(IndexAmRoutine);

	am->amstrategies = BTMaxStrategyNumber;
	am->amsupport = BTNProcs;
	am->amoptsprocnum = BTOPTIONS_PROC;
	am->amcanorder = true;
	am->amcanorderbyop = false;
	am->amcanbackward = true;
	am->amcanunique = true;
	am->amcanmulticol = true;
	am->amoptionalkey = true;
	am->amsearcharray = true;
	am->amsearchnulls = true;
	am->amstorage = true;
	am->amclusterable = false;
	am->ampredlocks = false;
	am->amcanparallel = false;
	am->amcaninclude = true;
	am->amusemaintenanceworkmem = false;
	am->amparallelvacuumoptions = 0;
	am->amkeytype = InvalidOid;
#if PG_VERSION_NUM >= 180000
	am->amconsistentequality = true;
	am->amconsistentordering = true;
	am->amtranslatestrategy = bttranslatestrategy;
	am->amtranslatecmptype = bttranslatecmptype;
#endif

	am->ambuild = nemo_index_build;
	am->ambuildempty = nemo_index_build_empty;
	am->aminsert = nemo_index_insert;
	am->ambulkdelete = bulk_delete;
	am->amvacuumcleanup = vacuum_cleanup;
	am->amcanreturn = can_return;
	am->amcostestimate = btcostestimate;
	am->amoptions = btoptions;
	am->amvalidate = validate;
	am->ambeginscan = nemo_index_begin_scan;
	am->amrescan = nemo_index_rescan;
	am->amgettuple = nemo_index_get_tuple;
	am->amgetbitmap = nemo_index_get_bitmap;
	am->amendscan = nemo_index_end_scan;
	am->ammarkpos = nemo_index_mark;
	am->amrestrpos = nemo_index_restore;

	PG_RETURN_POINTER(am);
}
