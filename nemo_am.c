/*
 * nemo_am.c
 *	  The table access method: its handler, and fetching single rows for index scans and by ctid.
 *
 * A ctid names a row (rowid) and one of its versions (tag).  Fetching looks at the chain of the row's key once, inside
 * the guard, decides there which version is meant, and forms a tuple from a copy of it outside.  The rest of the table
 * AM is elsewhere: passes over a table in nemo_scan.c and nemo_sample.c, changes in nemo_modify.c, maintenance in
 * nemo_maintain.c.
 */
#include "nemo_table.h"

#include "access/relscan.h"
#include "catalog/pg_am.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/predicate.h"
#if PG_VERSION_NUM >= 170000
#include "storage/read_stream.h"
#endif
#include "utils/memutils.h"

#include "nemo_ddl.h"

#define SHORT_ROW		2048	/* bytes; longer ones are copied by way of palloc() */
#define LONGEST_MOVE	1000	/* rowids that a row is followed through */

static struct
{
	StringInfoData key;			/* scratch, in TopMemoryContext */
} state;

/* ---- one row ------------------------------------------------------------------------------------------------------- */

/* what is asked about a key, and the version that answers */
typedef struct Row
{
	Relation	rel;
	NemoRelInfo *info;
	rb_slice	key;
	uint64		rowid;
	Snapshot	snapshot;		/* NULL: the version with tag `tag` is wanted, visible or not */

	bool		found;
	uint8		tag;
	uint64		xid;			/* 0: settled */
	const uint8 *data;
	uint32		len;
	uint8		room[SHORT_ROW];
} Row;

static void
look_row(void *arg, const rb_version *head)
{
	Row		   *row = arg;
	const rb_version *v;
	uint8	   *data = row->room;

	if (head == NULL)
		return;
	v = row->snapshot != NULL ? nemo_visible(head, row->snapshot) :
		nemo_version_of(row->rel, row->info, row->key, head, row->rowid, row->tag);
	if (v == NULL || v->kind != RB_DATA)
		return;
	if (v->len > SHORT_ROW)
		data = palloc(v->len);
	memcpy(data, rb_data(v), v->len);
	row->data = data;
	row->len = v->len;
	row->tag = v->tag;
	row->xid = rb_is_settled(v) ? 0 : rb_x(v)->xid;
	row->found = true;
}

static void
forget_row(Row *row)
{
	if (row->found && row->data != row->room)
		pfree((uint8 *) row->data);
}

/*
 * Look for the row under its full key, or (empty) the one that its rowid leads to.  A key that has been used again holds
 * another row, which is not the one asked for.
 */
static bool
find_row(Row *row, rb_slice key)
{
	row->found = false;
	row->data = NULL;
	if (key.len == 0)
	{
		if (unlikely(state.key.data == NULL))
		{
			MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

			initStringInfo(&state.key);
			MemoryContextSwitchTo(old);
		}
		if (!nemo_row_key(row->info, row->rowid, row->snapshot, &state.key))
			return false;
		key = nemo_slice(&state.key);
	}
	row->key = key;
	nemo_look(key, look_row, row);
	if (row->found && nemo_rowid_of(row->info, key, row->data, row->len) != row->rowid)
	{
		forget_row(row);
		row->found = false;
	}
	return row->found;
}

static void
store_row(const Row *row, TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(slot->tts_mcxt);
	HeapTuple	tuple = nemo_row_tuple(row->rel, row->data, row->len, row->rowid, row->tag, row->xid);

	MemoryContextSwitchTo(old);
	ExecForceStoreHeapTuple(tuple, slot, true);
	slot->tts_tableOid = RelationGetRelid(row->rel);
	nemo_tid_set(&slot->tts_tid, row->rowid, row->tag);
}

/* ---- for index scans ----------------------------------------------------------------------------------------------- */

static IndexFetchTableData *
index_fetch_begin(Relation rel)
{
	NemoIndexFetch *fetch = palloc0(sizeof(NemoIndexFetch));

	(void) nemo_thread();
	fetch->base.rel = rel;
	fetch->info = nemo_rel(rel);
	return &fetch->base;
}

static void
index_fetch_reset(IndexFetchTableData *base)
{
	NemoIndexFetch *fetch = (NemoIndexFetch *) base;

	fetch->have = false;
	fetch->tuple = NULL;
}

static void
index_fetch_end(IndexFetchTableData *base)
{
	NemoIndexFetch *fetch = (NemoIndexFetch *) base;

	if (fetch->row_key.data != NULL)
		pfree(fetch->row_key.data);
	pfree(fetch);
}

/*
 * Index scans of ours have just found the row and hand it over; whoever else comes has only a ctid, of which the row
 * counts and not the version.
 */
static bool
index_fetch_tuple(IndexFetchTableData *base, ItemPointer tid, Snapshot snapshot, TupleTableSlot *slot,
				  bool *call_again, bool *all_dead)
{
	NemoIndexFetch *fetch = (NemoIndexFetch *) base;
	bool		have = fetch->have && ItemPointerEquals(tid, &fetch->tid);
	rb_slice	key = {NULL, 0};
	Row			row;
	uint8		tag;

	*call_again = false;
	if (all_dead != NULL)
		*all_dead = false;

	if (have && fetch->index_only)
	{
		ExecClearTuple(slot);
		return true;
	}
	if (have && fetch->tuple != NULL)
	{
		ExecForceStoreHeapTuple(fetch->tuple, slot, false);
		slot->tts_tableOid = RelationGetRelid(base->rel);
		return true;
	}

	if (have)
		key = nemo_slice(&fetch->row_key);
	else
		PredicateLockRelation(base->rel, snapshot);
	row.rel = base->rel;
	row.info = fetch->info;
	row.snapshot = snapshot;
	if (!nemo_tid_get(tid, &row.rowid, &tag) || !find_row(&row, key))
		return false;
	store_row(&row, slot);
	/* an UPDATE or DELETE of the row will ask for its key */
	nemo_remember_row(row.info, row.rowid, row.key);
	forget_row(&row);
	return true;
}

static TransactionId
index_delete_tuples(Relation rel, TM_IndexDeleteOp *delstate)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("index \"%s\" cannot ask nemo table \"%s\" for deletable entries",
					RelationGetRelationName(delstate->irel), RelationGetRelationName(rel)),
			 errdetail("Entries are deleted by the statements that outdate their rows."),
			 errhint("Drop the index and create it with access method \"nemo_index\".")));
	return InvalidTransactionId;
}

/* ---- by ctid ------------------------------------------------------------------------------------------------------- */

static bool
tuple_fetch_row_version(Relation rel, ItemPointer tid, Snapshot snapshot, TupleTableSlot *slot)
{
	bool		any = snapshot->snapshot_type == SNAPSHOT_ANY;
	Row			row;
	uint8		tag;
	bool		found;

	(void) nemo_thread();
	if (!nemo_tid_get(tid, &row.rowid, &tag))
		return false;
	if (!any)
		PredicateLockRelation(rel, snapshot);
	row.rel = rel;
	row.info = nemo_rel(rel);
	row.snapshot = any ? NULL : snapshot;
	row.tag = tag;
	if (!find_row(&row, (rb_slice) {NULL, 0}))
		return false;
	found = row.tag == tag;
	if (found)
		store_row(&row, slot);
	forget_row(&row);
	return found;
}

static bool
tuple_tid_valid(TableScanDesc scan, ItemPointer tid)
{
	uint64		rowid;
	uint8		tag;

	(void) scan;
	return nemo_tid_get(tid, &rowid, &tag);
}

typedef struct Latest
{
	NemoRelInfo *info;
	rb_slice	key;
	Snapshot	snapshot;
	ItemPointerData tid;
	bool		moved;			/* go on at tid */
} Latest;

static void
look_latest(void *arg, const rb_version *head)
{
	Latest	   *latest = arg;
	const rb_version *v = head == NULL ? NULL : nemo_decide(head, latest->snapshot);
	uint64		rowid;
	uint8		tag;

	latest->moved = false;
	if (v == NULL || !nemo_tid_get(&latest->tid, &rowid, &tag))
		return;
	if (v->kind == RB_DATA && nemo_rowid_of(latest->info, latest->key, rb_data(v), v->len) == rowid)
		nemo_tid_set(&latest->tid, rowid, v->tag);
	else
	{
		NemoChain	chain;
		NemoTarget	target;

		/* gone from here in the eyes of the snapshot: deleted, or moved on */
		nemo_examine(head, LockTupleKeyShare, &chain);
		nemo_target(latest->info, latest->key, &chain, &latest->tid, latest->snapshot, latest->snapshot->curcid, false,
					&target);
		if (target.moved && !ItemPointerIndicatesMovedPartitions(&target.ctid))
		{
			latest->tid = target.ctid;
			latest->moved = true;
		}
	}
}

/* the version of the row that the scan's snapshot sees, under whatever rowid it lives by now */
static void
tuple_get_latest_tid(TableScanDesc scan, ItemPointer tid)
{
	Latest		latest = {nemo_rel(scan->rs_rd), {NULL, 0}, scan->rs_snapshot, *tid, true};
	StringInfoData key;

	initStringInfo(&key);
	for (int i = 0; latest.moved && i < LONGEST_MOVE; i++)
	{
		uint64		rowid;
		uint8		tag;

		CHECK_FOR_INTERRUPTS();
		if (!nemo_tid_get(&latest.tid, &rowid, &tag) ||
			!nemo_row_key(latest.info, rowid, latest.snapshot, &key))
			break;
		latest.key = nemo_slice(&key);
		nemo_look(latest.key, look_latest, &latest);
		if (!latest.moved)
			*tid = latest.tid;
	}
	pfree(key.data);
}

static bool
tuple_satisfies_snapshot(Relation rel, TupleTableSlot *slot, Snapshot snapshot)
{
	Row			row;
	uint8		tag;
	bool		found;

	if (!nemo_tid_get(&slot->tts_tid, &row.rowid, &tag))
		return false;
	row.rel = rel;
	row.info = nemo_rel(rel);
	row.snapshot = snapshot;
	if (!find_row(&row, (rb_slice) {NULL, 0}))
		return false;
	found = row.tag == tag;
	forget_row(&row);
	return found;
}

#if PG_VERSION_NUM >= 170000
/* the stream only says which block is next: there is nothing of it to read; unless it is used up, reltuples becomes 0 */
static bool
analyze_next_block(TableScanDesc scan, ReadStream *stream)
{
	BufferAccessStrategy strategy = NULL;
	BlockNumber block;

	do
	{
		block = read_stream_next_block(stream, &strategy);
		if (block == InvalidBlockNumber)
			return false;
	} while (!nemo_analyze_next_block(scan, block, strategy));
	return true;
}
#endif

/* ---- handler ------------------------------------------------------------------------------------------------------- */

static const TupleTableSlotOps *
slot_callbacks(Relation rel)
{
	(void) rel;
	return &TTSOpsHeapTuple;
}

/* long values stay in their rows (nemo_row.c) */
static bool
relation_needs_toast_table(Relation rel)
{
	(void) rel;
	return false;
}

static Oid
relation_toast_am(Relation rel)
{
	(void) rel;
	return HEAP_TABLE_AM_OID;
}

const TableAmRoutine nemo_table_am_routine = {
	.type = T_TableAmRoutine,

	.slot_callbacks = slot_callbacks,

	.scan_begin = nemo_scan_begin,
	.scan_end = nemo_scan_end,
	.scan_rescan = nemo_scan_rescan,
	.scan_getnextslot = nemo_scan_next,
	.scan_set_tidrange = nemo_scan_set_tidrange,
	.scan_getnextslot_tidrange = nemo_scan_next,
	.parallelscan_estimate = nemo_parallelscan_estimate,
	.parallelscan_initialize = nemo_parallelscan_initialize,
	.parallelscan_reinitialize = nemo_parallelscan_reinitialize,

	.index_fetch_begin = index_fetch_begin,
	.index_fetch_reset = index_fetch_reset,
	.index_fetch_end = index_fetch_end,
	.index_fetch_tuple = index_fetch_tuple,
	.index_delete_tuples = index_delete_tuples,

	.tuple_fetch_row_version = tuple_fetch_row_version,
	.tuple_tid_valid = tuple_tid_valid,
	.tuple_get_latest_tid = tuple_get_latest_tid,
	.tuple_satisfies_snapshot = tuple_satisfies_snapshot,

	.tuple_insert = nemo_tuple_insert,
	.tuple_insert_speculative = nemo_tuple_insert_speculative,
	.tuple_complete_speculative = nemo_tuple_complete_speculative,
	.multi_insert = nemo_multi_insert,
	.tuple_delete = nemo_tuple_delete,
	.tuple_update = nemo_tuple_update,
	.tuple_lock = nemo_tuple_lock,

#if PG_VERSION_NUM >= 160000
	.relation_set_new_filelocator = nemo_set_new_file,
#else
	.relation_set_new_filenode = nemo_set_new_file,
#endif
	.relation_nontransactional_truncate = nemo_nontransactional_truncate,
	.relation_copy_data = nemo_copy_data,
	.relation_copy_for_cluster = nemo_copy_for_cluster,
	.relation_vacuum = nemo_relation_vacuum,
	.index_build_range_scan = nemo_build_range_scan,
	.index_validate_scan = nemo_validate_scan,

	.relation_size = nemo_relation_size,
	.relation_estimate_size = nemo_relation_estimate_size,
	.relation_needs_toast_table = relation_needs_toast_table,
	.relation_toast_am = relation_toast_am,

#if PG_VERSION_NUM >= 170000
	.scan_analyze_next_block = analyze_next_block,
#else
	.scan_analyze_next_block = nemo_analyze_next_block,
#endif
	.scan_analyze_next_tuple = nemo_analyze_next_tuple,
	/* 18 hands out bitmaps in another way; without these callbacks the planner makes no bitmap scans */
#if PG_VERSION_NUM < 180000
	.scan_bitmap_next_block = nemo_scan_bitmap_next_block,
	.scan_bitmap_next_tuple = nemo_scan_bitmap_next_tuple,
#endif
	.scan_sample_next_block = nemo_sample_next_block,
	.scan_sample_next_tuple = nemo_sample_next_tuple,
};

PG_FUNCTION_INFO_V1(nemo_table_handler);

Datum
nemo_table_handler(PG_FUNCTION_ARGS)
{
	(void) fcinfo;
	PG_RETURN_POINTER(&nemo_table_am_routine);
}
