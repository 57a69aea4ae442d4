/*
 * nemo_place.c
 *	  Moving the rows of a table after its primary key came, went or changed.
 *
 * Where rows live is fixed when a table tree is new and empty (nemo_index_build), so rows move by way of a new tree:
 * all rows are set aside, the table gets a new file, its primary key is rebuilt while that is empty, the rows are
 * inserted again and the other indexes rebuilt.  As with TRUNCATE, older snapshots then see an empty table.  All of
 * it is undone with the transaction.
 */
#include "nemo.h"

#include "access/genam.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_class.h"
#include "commands/tablecmds.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

#include "nemo_ddl.h"
#include "nemo_index.h"

typedef enum Placement
{
	PLACED,						/* rows are where they should be */
	STRANDED,					/* their index is gone: they must move before its tree does */
	UNCLUSTERED					/* there is a primary key that could hold them */
} Placement;

static Placement
placement_of(Relation rel, Oid *primary)
{
	NemoTreeInfo tree;
	List	   *indexes;
	ListCell   *lc;
	bool		held = false;

	*primary = InvalidOid;
	if (!nemo_tree_get(nemo_tree_of(rel), &tree))
		return PLACED;
	indexes = RelationGetIndexList(rel);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		if (nemo_relation_is_nemo_index(index))
		{
			held |= nemo_tree_of(index) == tree.row_tree;
			if (index->rd_index->indisprimary && index->rd_index->indimmediate && index->rd_index->indisvalid)
				*primary = RelationGetRelid(index);
		}
		index_close(index, AccessShareLock);
	}
	list_free(indexes);

	if (tree.row_tree != tree.tree)
		return held ? PLACED : STRANDED;
	return OidIsValid(*primary) ? UNCLUSTERED : PLACED;
}

static Tuplestorestate *
set_rows_aside(Relation rel)
{
	Tuplestorestate *store = tuplestore_begin_heap(false, false, maintenance_work_mem);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		tuplestore_puttupleslot(store, slot);
	}
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	return store;
}

static void
insert_rows(Relation rel, Oid primary, Tuplestorestate *store)
{
	TupleTableSlot *stored = MakeSingleTupleTableSlot(RelationGetDescr(rel), &TTSOpsMinimalTuple);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	Relation	index = OidIsValid(primary) ? index_open(primary, RowExclusiveLock) : NULL;
	IndexInfo  *ii = index != NULL ? BuildIndexInfo(index) : NULL;
	CommandId	cid = GetCurrentCommandId(true);
	MemoryContext row_cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo moved row", ALLOCSET_DEFAULT_SIZES);

	while (tuplestore_gettupleslot(store, true, false, stored))
	{
		MemoryContext old;

		CHECK_FOR_INTERRUPTS();
		ExecCopySlot(slot, stored);
		old = MemoryContextSwitchTo(row_cxt);
		table_tuple_insert(rel, slot, cid, 0, NULL);
		if (index != NULL)
		{
			Datum		values[INDEX_MAX_KEYS];
			bool		isnull[INDEX_MAX_KEYS];

			/* a primary key has plain columns only */
			for (int i = 0; i < ii->ii_NumIndexAttrs; i++)
				values[i] = slot_getattr(slot, ii->ii_IndexAttrNumbers[i], &isnull[i]);
			(void) index_insert(index, values, isnull, &slot->tts_tid, rel, UNIQUE_CHECK_YES, false, ii);
		}
		MemoryContextSwitchTo(old);
		MemoryContextReset(row_cxt);
	}
	MemoryContextDelete(row_cxt);
	if (index != NULL)
		index_close(index, NoLock);
	ExecDropSingleTupleTableSlot(slot);
	ExecDropSingleTupleTableSlot(stored);
}

static void
rebuild_index(Oid index, char persistence)
{
	ReindexParams params = {0};

#if PG_VERSION_NUM >= 170000
	reindex_index(NULL, index, false, persistence, &params);
#else
	reindex_index(index, false, persistence, &params);
#endif
	CommandCounterIncrement();
}

static void
move_rows(Relation rel, Oid primary)
{
	char		persistence = rel->rd_rel->relpersistence;
	List	   *indexes = RelationGetIndexList(rel);
	Tuplestorestate *store = set_rows_aside(rel);
	ListCell   *lc;

	nemo_relation_set_new_file(rel, persistence);
	if (OidIsValid(primary))
		rebuild_index(primary, persistence);
	insert_rows(rel, primary, store);
	tuplestore_end(store);
	CommandCounterIncrement();
	foreach(lc, indexes)
		if (lfirst_oid(lc) != primary)
			rebuild_index(lfirst_oid(lc), persistence);
	list_free(indexes);
}

/* has anything of this session the table open, or waiting for it? */
static bool
in_use(Relation rel)
{
	return rel->rd_refcnt != 1 || AfterTriggerPendingOnRel(RelationGetRelid(rel));
}

void
nemo_fix_placement(Oid relid)
{
	Relation	rel = try_relation_open(relid, AccessShareLock);
	Placement	placement;
	Oid			primary;

	if (rel == NULL)
		return;
	if (!nemo_relation_is_nemo_table(rel) || !RELKIND_HAS_STORAGE(rel->rd_rel->relkind) ||
		placement_of(rel, &primary) == PLACED)
	{
		relation_close(rel, AccessShareLock);
		return;
	}
	relation_close(rel, NoLock);

	rel = table_open(relid, AccessExclusiveLock);
	placement = placement_of(rel, &primary);
	if (placement == STRANDED)
		CheckTableNotInUse(rel, "ALTER TABLE");
	if (placement == STRANDED || (placement == UNCLUSTERED && !in_use(rel)))
		move_rows(rel, primary);
	table_close(rel, NoLock);
}
