/*
 * nemo_modify.c
 *	  INSERT, UPDATE and DELETE of rows.
 *
 * Without a clustered index a new row is installed at once, under a rowid nobody has used.  With one, the row is formed
 * here and waits in this process until the executor inserts its primary key entry: that is when its key is known to be
 * free, and row and rowid map go in together (nemo_place_row).  UPDATE and DELETE put a version on the row's chain,
 * which is the row's lock, and then outdate the entries of secondary indexes (INVARIANTS F2).
 */
#include "nemo_table.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "lib/ilist.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/predicate.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_index.h"

#define FRESH_ROWS		64		/* rows that are installed and logged together, at most */
#define FRESH_BYTES		(256 * 1024)

/* a row that was formed and waits for its primary key entry */
typedef struct Pending
{
	dlist_node	node;
	NemoTree	row_tree;
	uint64		rowid;
	SubTransactionId subid;
	CommandId	cid;
	uint32		key_len;
	uint32		data_len;
	uint8		bytes[];		/* key, data */
} Pending;

static struct
{
	bool		ready;
	dlist_head	pending;		/* oldest first; in TopTransactionContext */

	/* the last UPDATE that stayed in place, and the indexes whose entries still stand */
	Oid			relid;
	ItemPointerData tid;
	int			nleft;
	int			max_left;
	Oid		   *left;

	/* rows just inserted where no version of any row was before, in the order in which their entries come */
	NemoTree	fresh_tree;
	int			nfresh;
	int			max_fresh;
	int			next_fresh;
	uint64	   *fresh;

	/* scratch, in TopMemoryContext */
	StringInfoData data;
	StringInfoData key;
} state;

/* ---- rows that wait to be placed ----------------------------------------------------------------------------------- */

static void
forget_pending(Pending *p)
{
	dlist_delete(&p->node);
	pfree(p);
}

static void
modify_xact_callback(XactEvent event, void *arg)
{
	(void) arg;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (!dlist_is_empty(&state.pending))
				elog(ERROR, "a row of a nemo table was formed, and its primary key entry never came");
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
			/* the memory goes with the transaction */
			dlist_init(&state.pending);
			break;
		default:
			break;
	}
	state.relid = InvalidOid;
	state.fresh_tree = 0;
}

static void
modify_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	dlist_mutable_iter i;

	(void) arg;
	if (event != SUBXACT_EVENT_ABORT_SUB && event != SUBXACT_EVENT_COMMIT_SUB)
		return;
	dlist_foreach_modify(i, &state.pending)
	{
		Pending    *p = dlist_container(Pending, node, i.cur);

		if (p->subid != my)
			continue;
		if (event == SUBXACT_EVENT_ABORT_SUB)
			forget_pending(p);
		else
			p->subid = parent;
	}
	state.relid = InvalidOid;
	state.fresh_tree = 0;
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
	dlist_init(&state.pending);
	RegisterXactCallback(modify_xact_callback, NULL);
	RegisterSubXactCallback(modify_subxact_callback, NULL);
	state.ready = true;
}

/* rows are placed in the order in which they came, as a rule */
static Pending *
find_pending(NemoTree row_tree, uint64 rowid)
{
	dlist_iter	i;

	if (!state.ready)
		return NULL;
	dlist_foreach(i, &state.pending)
	{
		Pending    *p = dlist_container(Pending, node, i.cur);

		if (p->rowid == rowid && p->row_tree == row_tree)
			return p;
	}
	return NULL;
}

static void
add_pending(NemoRelInfo *info, uint64 rowid, CommandId cid, rb_slice key, const StringInfoData *data)
{
	Pending    *p = MemoryContextAllocHuge(TopTransactionContext, offsetof(Pending, bytes) + key.len + data->len);

	p->row_tree = info->row_tree;
	p->rowid = rowid;
	p->subid = GetCurrentSubTransactionId();
	p->cid = cid;
	p->key_len = key.len;
	p->data_len = (uint32) data->len;
	memcpy(p->bytes, key.data, key.len);
	memcpy(p->bytes + key.len, data->data, data->len);
	dlist_push_tail(&state.pending, &p->node);
}

bool
nemo_pending_key(NemoTree row_tree, uint64 rowid, StringInfo out)
{
	Pending    *p = find_pending(row_tree, rowid);

	if (p == NULL)
		return false;
	resetStringInfo(out);
	appendBinaryStringInfo(out, (const char *) p->bytes, (int) p->key_len);
	return true;
}

static void
note_fresh(const NemoRelInfo *info, uint64 rowid, bool more)
{
	if (!more || state.fresh_tree != info->tree)
		state.nfresh = 0;
	if (state.nfresh == state.max_fresh)
	{
		state.max_fresh = Max(64, state.max_fresh * 2);
		state.fresh = state.fresh == NULL ? MemoryContextAlloc(TopMemoryContext, state.max_fresh * sizeof(uint64)) :
			repalloc(state.fresh, state.max_fresh * sizeof(uint64));
	}
	state.fresh_tree = info->tree;
	state.fresh[state.nfresh++] = rowid;
	state.next_fresh = 0;
}

bool
nemo_row_is_fresh(const NemoRelInfo *info, uint64 rowid)
{
	if (state.fresh_tree != info->tree)
		return false;
	/* entries come row by row */
	for (int i = state.next_fresh; i < state.nfresh; i++)
		if (state.fresh[i] == rowid)
		{
			state.next_fresh = i;
			return true;
		}
	return false;
}

/* ---- keys of rows -------------------------------------------------------------------------------------------------- */

static void
put_map_key(const NemoRelInfo *info, uint64 rowid, uint8 *key)
{
	nemo_put_be64(key, info->tree);
	nemo_put_be64(key + RB_TREE_LEN, rowid);
}

/* the row tree's key of a row in a slot; reset first */
static void
primary_key(Relation rel, NemoIndexInfo *pk, TupleTableSlot *slot, StringInfo key)
{
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];
	uint32		prefix;
	bool		null_distinct;

	/* a primary key has plain columns only */
	for (int i = 0; i < pk->ii->ii_NumIndexAttrs; i++)
	{
		AttrNumber	attno = pk->ii->ii_IndexAttrNumbers[i];

		values[i] = slot_getattr(slot, attno, &isnull[i]);
		if (isnull[i] && i < pk->ii->ii_NumIndexKeyAttrs)
			ereport(ERROR,
					(errcode(ERRCODE_NOT_NULL_VIOLATION),
					 errmsg("null value in column \"%s\" of relation \"%s\" violates not-null constraint",
							NameStr(TupleDescAttr(RelationGetDescr(rel), attno - 1)->attname),
							RelationGetRelationName(rel)),
					 errtablecol(rel, attno)));
	}
	resetStringInfo(key);
	nemo_entry_key(pk, values, isnull, (rb_slice) {NULL, 0}, key, &prefix, &null_distinct);
}

/* Form the row of a clustered table that is in the slot, and let it wait for its place. */
static void
form_pending(Relation rel, NemoRelInfo *info, TupleTableSlot *slot, CommandId cid)
{
	uint64		rowid;
	rb_slice	key;
	bool		in_key;

	init();
	primary_key(rel, nemo_clustered_index(rel, info), slot, &state.key);
	key = nemo_slice(&state.key);
	in_key = nemo_key_is_rowid(info, key, &rowid);
	if (!in_key)
		rowid = nemo_rowid_alloc(info->tree, 1);
	nemo_row_form(rel, slot, !in_key, rowid, &state.data);
	add_pending(info, rowid, cid, key, &state.data);
	nemo_remember_row(info, rowid, key);
	slot->tts_tableOid = RelationGetRelid(rel);
	nemo_tid_set(&slot->tts_tid, rowid, 0);
}

/* ---- INSERT -------------------------------------------------------------------------------------------------------- */

static void
insert_fresh(Relation rel, NemoRelInfo *info, TupleTableSlot **slots, int nslots, CommandId cid)
{
	NemoChange	changes[FRESH_ROWS];
	uint8		keys[FRESH_ROWS][RB_TREE_LEN + 8];
	int			n = 0;
	int64		bytes = 0;
	uint64		rowid = nemo_rowid_alloc(info->tree, (uint32) nslots);

	for (int i = 0; i < nslots; i++, rowid++)
	{
		TupleTableSlot *slot = slots[i];

		nemo_row_form(rel, slot, false, rowid, &state.data);
		note_fresh(info, rowid, i > 0);
		put_map_key(info, rowid, keys[n]);
		changes[n].key = (rb_slice) {keys[n], sizeof(keys[n])};
		changes[n].v = nemo_prepare(sizeof(keys[n]), RB_DATA, 0, cid, LockTupleExclusive, state.data.data,
									(uint32) state.data.len);
		n++;
		bytes += sizeof(keys[0]) + state.data.len;
		slot->tts_tableOid = RelationGetRelid(rel);
		nemo_tid_set(&slot->tts_tid, rowid, 0);
		if (n == FRESH_ROWS || bytes >= FRESH_BYTES || i == nslots - 1)
		{
			nemo_install_fresh(changes, n);
			nemo_count(info->tree, n, bytes);
			n = 0;
			bytes = 0;
		}
	}
}

void
nemo_tuple_insert(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
				  struct BulkInsertStateData *bistate)
{
	NemoRelInfo *info;

	(void) options;
	(void) bistate;
	(void) nemo_thread();
	init();
	info = nemo_rel(rel);
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	if (info->clustered)
		form_pending(rel, info, slot, cid);
	else
		insert_fresh(rel, info, &slot, 1, cid);
	pgstat_count_heap_insert(rel, 1);
}

void
nemo_tuple_insert_speculative(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
							  struct BulkInsertStateData *bistate, uint32 token)
{
	(void) nemo_thread();
	nemo_speculative_begin(nemo_rel(rel), token);
	nemo_tuple_insert(rel, slot, cid, options, bistate);
}

void
nemo_tuple_complete_speculative(Relation rel, TupleTableSlot *slot, uint32 token, bool succeeded)
{
	NemoRelInfo *info = nemo_rel(rel);
	uint64		rowid;
	uint8		tag;
	Pending    *p = NULL;

	(void) token;
	if (nemo_tid_get(&slot->tts_tid, &rowid, &tag))
		p = find_pending(info->row_tree, rowid);
	nemo_speculative_end(succeeded);
	if (succeeded)
		return;
	if (p != NULL)
		forget_pending(p);
	else
		nemo_count(info->tree, -1, 0);
}

static bool
visit_nothing(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) arg;
	(void) i;
	(void) key;
	(void) head;
	return true;
}

/*
 * Place those of the n oldest rows that wait whose keys are known to be free, in one log record for FRESH_ROWS of them.
 * The others wait on, for nemo_place_row() to fetch, to wait for somebody, or to complain.  On return slots[] of those
 * that were placed are right as they are: the tag of a new row is 0.
 */
static void
place_known(NemoRelInfo *info, int n)
{
	rb_thread  *thread = nemo_thread();
	dlist_node *node = dlist_head_node(&state.pending);
	bool		more = false;

	while (n > 0)
	{
		Pending    *rows[FRESH_ROWS];
		rb_version *v[FRESH_ROWS];
		NemoChange	changes[2 * FRESH_ROWS];
		NemoChange	maps[FRESH_ROWS];
		uint8		map_keys[FRESH_ROWS][RB_TREE_LEN + 8];
		bool		placed[FRESH_ROWS];
		int			batch = 0;
		int			nchanges = 0;
		int64		bytes = 0;
		int64		nplaced = 0;

		for (; batch < FRESH_ROWS && batch < n && bytes < FRESH_BYTES; batch++)
		{
			Pending    *p = dlist_container(Pending, node, node);

			rows[batch] = p;
			node = node->next;
			bytes += p->key_len + p->data_len;
			v[batch] = nemo_prepare(p->key_len, RB_DATA, 0, p->cid, LockTupleExclusive, p->bytes + p->key_len,
									p->data_len);
			maps[batch].v = NULL;
			if (nemo_rowid_in_key(info, p->rowid))
				continue;
			put_map_key(info, p->rowid, map_keys[batch]);
			maps[batch].key = (rb_slice) {map_keys[batch], sizeof(map_keys[batch])};
			maps[batch].v = nemo_prepare(sizeof(map_keys[batch]), RB_DATA, 0, p->cid, LockTupleExclusive,
										 p->bytes + RB_TREE_LEN, p->key_len - RB_TREE_LEN);
		}

		rb_enter(thread);
		for (int i = 0; i < batch; i++)
		{
			rb_put_args put = {.key = {rows[i]->bytes, rows[i]->key_len}, .v = v[i], .dirty = true};

			/* expects a key that is known and absent */
			placed[i] = rb_put(thread, &put) == RB_OK;
			if (!placed[i])
				continue;
			nemo_installed(v[i]);
			changes[nchanges++] = (NemoChange) {put.key, v[i]};
			if (maps[i].v != NULL)
			{
				nemo_put_fresh(&maps[i]);
				changes[nchanges++] = maps[i];
			}
		}
		if (nchanges > 0)
			nemo_log_changes(changes, nchanges);
		rb_leave(thread);

		bytes = 0;
		for (int i = 0; i < batch; i++)
		{
			if (placed[i])
			{
				note_fresh(info, rows[i]->rowid, more);
				more = true;
				nplaced++;
				bytes += rows[i]->key_len + rows[i]->data_len;
				forget_pending(rows[i]);
				continue;
			}
			nemo_discard(v[i]);
			if (maps[i].v != NULL)
				nemo_discard(maps[i].v);
		}
		nemo_count(info->tree, nplaced, bytes);
		n -= batch;
	}
}

void
nemo_multi_insert(Relation rel, TupleTableSlot **slots, int nslots, CommandId cid, int options,
				  struct BulkInsertStateData *bistate)
{
	NemoRelInfo *info;
	rb_slice   *keys;
	rb_error	err = {0};
	rb_status	status;
	bool		alone;

	(void) options;
	(void) bistate;
	(void) nemo_thread();
	init();
	info = nemo_rel(rel);
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	pgstat_count_heap_insert(rel, nslots);
	if (!info->clustered)
	{
		insert_fresh(rel, info, slots, nslots, cid);
		return;
	}

	/* what is not known about their keys comes in one request, before they are placed */
	alone = dlist_is_empty(&state.pending);
	keys = palloc(nslots * sizeof(rb_slice));
	for (int i = 0; i < nslots; i++)
	{
		Pending    *p;

		form_pending(rel, info, slots[i], cid);
		p = dlist_tail_element(Pending, node, &state.pending);
		keys[i] = (rb_slice) {p->bytes, p->key_len};
	}
	status = rb_read_keys(nemo_thread(), keys, (uint32) nslots, visit_nothing, NULL, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	pfree(keys);
	if (alone)
		place_known(info, nslots);
}

void
nemo_unique_violation(Relation index, Datum *values, bool *isnull, Relation rel)
{
	char	   *key = BuildIndexValueDescription(index, values, isnull);

	ereport(ERROR,
			(errcode(ERRCODE_UNIQUE_VIOLATION),
			 errmsg("duplicate key value violates unique constraint \"%s\"", RelationGetRelationName(index)),
			 key != NULL ? errdetail("Key %s already exists.", key) : 0,
			 errtableconstraint(rel, RelationGetRelationName(index))));
}

/*
 * The key is free unless the newest version is a row: a committed one, ours, or one that somebody is about to update
 * without changing keys.  Row locks for foreign keys do not matter to who wants the key itself, hence KEY SHARE.
 */
bool
nemo_place_row(Relation rel, Relation index, Datum *values, bool *isnull, ItemPointer tid, IndexUniqueCheck check)
{
	rb_thread  *thread = nemo_thread();
	NemoRelInfo *info = nemo_rel(rel);
	rb_version *v = NULL;
	uint8		map_key[RB_TREE_LEN + 8];
	NemoChange	map = {{map_key, sizeof(map_key)}, NULL};
	bool		in_key;
	rb_slice	key;
	uint64		rowid;
	uint8		tag;
	Pending    *p;

	if (!nemo_tid_get(tid, &rowid, &tag) || (p = find_pending(info->row_tree, rowid)) == NULL)
		return true;
	key = (rb_slice) {p->bytes, p->key_len};
	in_key = nemo_rowid_in_key(info, rowid);
	put_map_key(info, rowid, map_key);

	for (;;)
	{
		const rb_version *head;
		NemoChain	chain;
		bool		placed;

		CHECK_FOR_INTERRUPTS();
		if (v == NULL)
		{
			v = nemo_prepare(key.len, RB_DATA, 0, p->cid, LockTupleExclusive, p->bytes + p->key_len, p->data_len);
			if (!in_key)
				map.v = nemo_prepare(sizeof(map_key), RB_DATA, 0, p->cid, LockTupleExclusive,
									 key.data + RB_TREE_LEN, key.len - RB_TREE_LEN);
		}
		nemo_lookup_enter(key, true, &head);
		nemo_examine(head, LockTupleKeyShare, &chain);

		if (TransactionIdIsValid(chain.wait_xid) || (chain.live != NULL && chain.live->kind == RB_DATA))
		{
			rb_leave(thread);
			nemo_discard(v);
			if (!in_key)
				nemo_discard(map.v);
			v = NULL;
			if (check == UNIQUE_CHECK_PARTIAL)
				return false;
			if (!TransactionIdIsValid(chain.wait_xid))
				nemo_unique_violation(index, values, isnull, rel);
			(void) nemo_wait_for(rel, tid, chain.wait_xid, chain.speculative_token, LockWaitBlock,
								 XLTW_InsertIndex);
			continue;
		}
		/* who holds a ctid of the row that was here must not take this one for it */
		v->tag = chain.live != NULL ? (chain.live->tag + 1) & 15 : 0;
		tag = v->tag;
		if (head == NULL)
			note_fresh(info, rowid, false);
		else
			state.fresh_tree = 0;
		placed = nemo_install_with(key, v, &chain, in_key ? NULL : &map);
		rb_leave(thread);
		if (placed)
			break;
	}
	nemo_tid_set(tid, rowid, tag);
	nemo_count(info->tree, 1, key.len + p->data_len);
	forget_pending(p);
	return true;
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
	put_map_key(info, rowid, map_key);
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
			primary_key(old->rel, pk, slot, &state.key);
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
			primary_key(rel, nemo_clustered_index(rel, row.info), slot, &state.key);
			nemo_row_form(rel, slot, !nemo_rowid_in_key(row.info, new_rowid), new_rowid, &state.data);
			add_pending(row.info, new_rowid, cid, nemo_slice(&state.key), &state.data);
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
