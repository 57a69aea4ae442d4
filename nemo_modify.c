/*
 * nemo_modify.c
 *	  UPDATE and DELETE of rows.
 *
 * Both put a version on the row's chain, which is the row's lock, and then outdate the entries of secondary indexes
 * (INVARIANTS F2).  An UPDATE of the primary key deletes the row under its old key, leaving its new ctid there, and lets
 * the new row wait for its place like an inserted one (nemo_insert.c).
 */
#include "nemo_table.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "pgstat.h"
#include "storage/predicate.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_index.h"

static struct
{
	bool		ready;

	/* the last UPDATE that stayed in place, and the indexes whose entries still stand */
	Oid			relid;
	ItemPointerData tid;
	int			nleft;
	int			max_left;
	Oid		   *left;

	/* scratch, in TopMemoryContext */
	StringInfoData data;
	StringInfoData key;
} state;

static void
modify_xact_callback(XactEvent event, void *arg)
{
	(void) event;
	(void) arg;
	state.relid = InvalidOid;
}

static void
modify_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	(void) event;
	(void) my;
	(void) parent;
	(void) arg;
	state.relid = InvalidOid;
}

static void
init(void)
{
	MemoryContext old;

	if (likely(state.ready))
		return;
	old = MemoryContextSwitchTo(TopMemoryContext);
	initStringInfo(&state.data);
	initStringInfo(&state.key);
	MemoryContextSwitchTo(old);
	RegisterXactCallback(modify_xact_callback, NULL);
	RegisterSubXactCallback(modify_subxact_callback, NULL);
	state.ready = true;
}

/* ---- entries of secondary indexes ---------------------------------------------------------------------------------- */

typedef struct OldRow
{
	Relation	rel;
	NemoRelInfo *info;
	uint64		rowid;
	rb_slice	key;
	CommandId	cid;
	TupleTableSlot *slot;		/* the row as it was */
	EState	   *estate;
} OldRow;

/* Does the row in the slot have an entry, and which? */
static bool
form_entry(OldRow *old, NemoIndexInfo *ix, TupleTableSlot *slot, Datum *values, bool *isnull)
{
	if (!ix->plain)
	{
		if (old->estate == NULL)
			old->estate = nemo_index_estate(old->info);
		if (!nemo_index_wants(ix, slot, old->estate))
			return false;
		GetPerTupleExprContext(old->estate)->ecxt_scantuple = slot;
	}
	FormIndexDatum(ix->ii, slot, old->estate, values, isnull);
	return true;
}

static void
delete_entry(OldRow *old, NemoIndexInfo *ix)
{
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];

	if (form_entry(old, ix, old->slot, values, isnull))
		nemo_index_delete_entry(old->rel, old->info, ix, values, isnull, old->rowid, old->key, old->cid);
	if (old->estate != NULL)
		ResetPerTupleExprContext(old->estate);
}

static void
delete_entries(OldRow *old)
{
	for (int i = 0; i < old->info->nindexes; i++)
		if (!old->info->indexes[i].clustered)
			delete_entry(old, &old->info->indexes[i]);
}

/* the rowid of a row that is gone from its key leads nowhere any more */
static void
delete_map(NemoRelInfo *info, uint64 rowid, CommandId cid)
{
	rb_thread  *thread = nemo_thread();
	uint8		map_key[RB_TREE_LEN + 8];
	rb_slice	key = {map_key, sizeof(map_key)};
	rb_version *v;

	if (nemo_rowid_in_key(info, rowid))
		return;
	nemo_map_key(info, rowid, map_key);
	v = nemo_prepare(key.len, RB_DELETE, 0, cid, LockTupleExclusive, NULL, 0);
	for (;;)
	{
		const rb_version *head;
		NemoChain	chain;
		bool		done;

		nemo_lookup_enter(key, false, &head);
		nemo_examine(head, LockTupleExclusive, &chain);
		if (chain.live == NULL || chain.live->kind != RB_DATA)
		{
			rb_leave(thread);
			nemo_discard(v);
			return;
		}
		done = nemo_install(key, v, &chain);
		rb_leave(thread);
		if (done)
			return;
	}
}

static void
begin_old(OldRow *old, const NemoRow *row, CommandId cid)
{
	memset(old, 0, sizeof(*old));
	old->rel = row->rel;
	old->info = row->info;
	old->rowid = row->rowid;
	old->key = nemo_slice(&row->key);
	old->cid = cid;
}

static void
set_old(OldRow *old, const StringInfoData *data, uint8 tag)
{
	HeapTuple	tuple = nemo_row_tuple(old->rel, (uint8 *) data->data, (uint32) data->len, old->rowid, tag, 0);

	if (old->slot == NULL)
		old->slot = MakeSingleTupleTableSlot(RelationGetDescr(old->rel), &TTSOpsHeapTuple);
	ExecForceStoreHeapTuple(tuple, old->slot, true);
	old->slot->tts_tableOid = RelationGetRelid(old->rel);
}

static void
end_old(OldRow *old)
{
	if (old->slot != NULL)
		ExecDropSingleTupleTableSlot(old->slot);
}

static bool
has_secondary(const NemoRelInfo *info)
{
	return info->nindexes > (info->clustered ? 1 : 0);
}

static inline void
free_data(StringInfo data)
{
	if (data != NULL)
	{
		pfree(data->data);
		pfree(data);
	}
}

/* foreign keys of serializable and repeatable-read transactions: the version must also be visible to this snapshot */
static bool
fails_crosscheck(const NemoRow *row, Snapshot crosscheck)
{
	return crosscheck != InvalidSnapshot && nemo_visible(row->chain.head, crosscheck) != row->target.version;
}

/* ---- DELETE -------------------------------------------------------------------------------------------------------- */

TM_Result
nemo_tuple_delete(Relation rel, ItemPointer tid, CommandId cid, Snapshot snapshot, Snapshot crosscheck, bool wait,
				  TM_FailureData *tmfd, bool changing_part)
{
	rb_thread  *thread = nemo_thread();
	rb_version *v = NULL;
	ItemPointerData moved;
	StringInfo	data = NULL;
	OldRow		old;
	NemoRow		row;
	TM_Result	result = TM_Deleted;
	uint8		tag;
	int64		bytes;

	init();
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	ItemPointerSetMovedPartitions(&moved);
	if (!nemo_row_begin(&row, rel, tid, snapshot))
	{
		nemo_row_failure(&row, tmfd);
		nemo_row_done(&row);
		return TM_Deleted;
	}
	for (;;)
	{
		bool		done;

		if (v == NULL)
			v = nemo_prepare((uint32) row.key.len, RB_DELETE, 0, cid, LockTupleExclusive,
							 changing_part ? &moved : NULL, changing_part ? sizeof(moved) : 0);
		result = nemo_row_judge(&row, LockTupleExclusive, snapshot, cid, false, wait, LockWaitBlock, XLTW_Delete);
		if (result == TM_Ok && fails_crosscheck(&row, crosscheck))
		{
			rb_leave(thread);
			result = TM_Updated;
		}
		if (result != TM_Ok)
		{
			nemo_discard(v);
			nemo_row_failure(&row, tmfd);
			nemo_row_done(&row);
			return result;
		}
		tag = row.target.version->tag;
		bytes = row.key.len + row.target.version->len;
		if (has_secondary(row.info))
			data = nemo_copy_version(row.target.version);
		v->tag = (tag + 1) & 15;
		done = nemo_install(nemo_slice(&row.key), v, &row.chain);
		rb_leave(thread);
		if (done)
			break;
		free_data(data);
		data = NULL;
	}

	begin_old(&old, &row, cid);
	if (data != NULL)
	{
		set_old(&old, data, tag);
		delete_entries(&old);
		free_data(data);
	}
	end_old(&old);
	delete_map(row.info, row.rowid, cid);
	nemo_count(row.info->tree, -1, -bytes);
	pgstat_count_heap_delete(rel);
	nemo_row_done(&row);
	return TM_Ok;
}

/* ---- UPDATE -------------------------------------------------------------------------------------------------------- */

/* which columns of interest an UPDATE changes */
typedef struct Changes
{
	Bitmapset  *attrs;			/* offset by FirstLowInvalidHeapAttributeNumber */
	bool		key;			/* one that takes the stronger lock */
	bool		moves;			/* the primary key: the row goes elsewhere */
} Changes;

static bool
same_datum(Form_pg_attribute att, Datum a, bool a_null, Datum b, bool b_null)
{
	if (a_null || b_null)
		return a_null && b_null;
	return datumIsEqual(a, b, att->attbyval, att->attlen);
}

static void
find_changes(OldRow *old, TupleTableSlot *slot, Changes *changes)
{
	NemoRelInfo *info = old->info;
	TupleDesc	desc = RelationGetDescr(old->rel);

	memset(changes, 0, sizeof(*changes));
	for (int i = 0; i < info->nwatched; i++)
	{
		AttrNumber	attno = info->watched[i];
		bool		was_null,
					is_null;
		Datum		was = slot_getattr(old->slot, attno, &was_null);
		Datum		is = slot_getattr(slot, attno, &is_null);

		if (same_datum(TupleDescAttr(desc, attno - 1), was, was_null, is, is_null))
			continue;
		changes->attrs = bms_add_member(changes->attrs, attno - FirstLowInvalidHeapAttributeNumber);
		changes->key |= info->watched_key[i];
	}
	if (info->clustered && changes->attrs != NULL)
	{
		NemoIndexInfo *pk = nemo_clustered_index(old->rel, info);

		if (bms_overlap(pk->attrs, changes->attrs))
		{
			nemo_primary_key(old->rel, pk, slot, &state.key);
			changes->moves = nemo_slice_compare(nemo_slice(&state.key), old->key) != 0;
		}
	}
}

static void
note_left(Oid indexoid)
{
	if (state.nleft == state.max_left)
	{
		state.max_left = Max(16, state.max_left * 2);
		state.left = state.left == NULL ? MemoryContextAlloc(TopMemoryContext, state.max_left * sizeof(Oid)) :
			repalloc(state.left, state.max_left * sizeof(Oid));
	}
	state.left[state.nleft++] = indexoid;
}

bool
nemo_update_left_index(Relation rel, Oid indexoid, ItemPointer tid)
{
	if (state.relid != RelationGetRelid(rel) || !ItemPointerEquals(&state.tid, tid))
		return false;
	for (int i = 0; i < state.nleft; i++)
		if (state.left[i] == indexoid)
			return true;
	return false;
}

/* One index of a row that stays where it is.  true: a new entry is to be inserted. */
static bool
update_entry(OldRow *old, NemoIndexInfo *ix, TupleTableSlot *slot, const Changes *changes)
{
	Datum		was[INDEX_MAX_KEYS],
				is[INDEX_MAX_KEYS];
	bool		was_null[INDEX_MAX_KEYS],
				is_null[INDEX_MAX_KEYS];
	bool		had,
				wants,
				same;
	TupleDesc	desc;
	Relation	index;

	if (!bms_overlap(ix->attrs, changes->attrs) && !old->info->watch_all)
	{
		note_left(ix->oid);
		return false;
	}
	had = form_entry(old, ix, old->slot, was, was_null);
	wants = form_entry(old, ix, slot, is, is_null);
	same = had == wants;
	if (had && wants)
	{
		index = RelationIdGetRelation(ix->oid);
		desc = RelationGetDescr(index);
		for (int i = 0; i < desc->natts && same; i++)
			same = same_datum(TupleDescAttr(desc, i), was[i], was_null[i], is[i], is_null[i]);
		RelationClose(index);
	}
	if (same)
		note_left(ix->oid);
	else if (had)
		nemo_index_delete_entry(old->rel, old->info, ix, was, was_null, old->rowid, old->key, old->cid);
	if (old->estate != NULL)
		ResetPerTupleExprContext(old->estate);
	return !same && wants;
}

static bool
update_entries(OldRow *old, TupleTableSlot *slot, const Changes *changes)
{
	bool		any = false;

	state.relid = InvalidOid;
	state.nleft = 0;
	for (int i = 0; i < old->info->nindexes; i++)
		if (!old->info->indexes[i].clustered)
			any |= update_entry(old, &old->info->indexes[i], slot, changes);
	state.relid = RelationGetRelid(old->rel);
	state.tid = slot->tts_tid;
	return any;
}

/* A look at the row as it is, before it is known in which mode it will have to be locked. */
static TM_Result
peek(NemoRow *row, Snapshot snapshot, CommandId cid, OldRow *old)
{
	rb_thread  *thread = nemo_thread();
	const rb_version *head;
	StringInfo	data = NULL;
	uint8		tag = 0;

	nemo_lookup_enter(nemo_slice(&row->key), false, &head);
	nemo_examine(head, LockTupleKeyShare, &row->chain);
	nemo_target(row->info, nemo_slice(&row->key), &row->chain, &row->tid, snapshot, cid, false, &row->target);
	if (row->target.result == TM_Ok)
	{
		tag = row->target.version->tag;
		data = nemo_copy_version(row->target.version);
	}
	rb_leave(thread);
	if (data != NULL)
	{
		set_old(old, data, tag);
		free_data(data);
	}
	return row->target.result;
}

TM_Result
nemo_tuple_update(Relation rel, ItemPointer otid, TupleTableSlot *slot, CommandId cid, Snapshot snapshot,
				  Snapshot crosscheck, bool wait, TM_FailureData *tmfd, LockTupleMode *lockmode,
				  NemoUpdateIndexes *update_indexes)
{
	rb_thread  *thread = nemo_thread();
	rb_version *v = NULL;
	ItemPointerData forward;
	Changes		changes = {0};
	OldRow		old;
	NemoRow		row;
	TM_Result	result;
	uint64		new_rowid = 0;
	int64		bytes;
	uint8		tag;

	init();
	*update_indexes = NEMO_UPDATE_INDEXES_NONE;
	*lockmode = LockTupleExclusive;
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	if (!nemo_row_begin(&row, rel, otid, snapshot))
	{
		nemo_row_failure(&row, tmfd);
		nemo_row_done(&row);
		return TM_Deleted;
	}
	begin_old(&old, &row, cid);
	result = peek(&row, snapshot, cid, &old);
	if (result == TM_Ok)
	{
		find_changes(&old, slot, &changes);
		*lockmode = changes.key || changes.moves ? LockTupleExclusive : LockTupleNoKeyExclusive;
		new_rowid = row.rowid;
		if (changes.moves)
		{
			/* state.key is the new key */
			if (!nemo_key_is_rowid(row.info, nemo_slice(&state.key), &new_rowid))
				new_rowid = nemo_rowid_alloc(row.info->tree, 1);
			nemo_tid_set(&forward, new_rowid, 0);
		}
		nemo_row_form(rel, slot, !nemo_rowid_in_key(row.info, new_rowid), new_rowid, &state.data);
	}
	for (; result == TM_Ok;)
	{
		bool		done;

		if (v == NULL && changes.moves)
			v = nemo_prepare((uint32) row.key.len, RB_DELETE, 0, cid, LockTupleExclusive, &forward, sizeof(forward));
		else if (v == NULL)
			v = nemo_prepare((uint32) row.key.len, RB_DATA, 0, cid, *lockmode, state.data.data,
							 (uint32) state.data.len);
		result = nemo_row_judge(&row, *lockmode, snapshot, cid, false, wait, LockWaitBlock, XLTW_Update);
		if (result == TM_Ok && fails_crosscheck(&row, crosscheck))
		{
			rb_leave(thread);
			result = TM_Updated;
		}
		if (result != TM_Ok)
		{
			nemo_discard(v);
			break;
		}
		tag = (row.target.version->tag + 1) & 15;
		bytes = (int64) state.data.len - row.target.version->len;
		v->tag = tag;
		done = nemo_install(nemo_slice(&row.key), v, &row.chain);
		rb_leave(thread);
		if (!done)
			continue;

		slot->tts_tableOid = RelationGetRelid(rel);
		if (changes.moves)
		{
			/* as after DELETE and INSERT, but in the eyes of who follows the row */
			delete_entries(&old);
			delete_map(row.info, row.rowid, cid);
			nemo_count(row.info->tree, -1, 0);
			nemo_tid_set(&slot->tts_tid, new_rowid, 0);
			nemo_primary_key(rel, nemo_clustered_index(rel, row.info), slot, &state.key);
			nemo_row_form(rel, slot, !nemo_rowid_in_key(row.info, new_rowid), new_rowid, &state.data);
			nemo_add_pending(row.info, new_rowid, cid, nemo_slice(&state.key), &state.data);
			nemo_remember_row(row.info, new_rowid, nemo_slice(&state.key));
			state.relid = InvalidOid;
			*update_indexes = NEMO_UPDATE_INDEXES_ALL;
		}
		else
		{
			nemo_tid_set(&slot->tts_tid, row.rowid, tag);
			nemo_count(row.info->tree, 0, bytes);
			if (update_entries(&old, slot, &changes))
				*update_indexes = NEMO_UPDATE_INDEXES_ALL;
		}
#if PG_VERSION_NUM >= 160000
		pgstat_count_heap_update(rel, *update_indexes == NEMO_UPDATE_INDEXES_NONE, false);
#else
		pgstat_count_heap_update(rel, !*update_indexes);
#endif
		break;
	}
	if (result != TM_Ok)
		nemo_row_failure(&row, tmfd);
	end_old(&old);
	bms_free(changes.attrs);
	nemo_row_done(&row);
	return result;
}
