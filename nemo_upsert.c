/*
 * nemo_upsert.c
 *	  INSERT ... ON CONFLICT on tables whose indexes are nemo_index, for PostgreSQL 15 to 17.
 *
 * Up to 17, ExecOpenIndices(speculative = true) insists that every unique index is a btree by its catalog row
 * (BuildSpeculativeIndexInfo).  A plain table's indexes are therefore opened here, right after ExecutorStart, and given
 * what that function would have computed; ExecInsert() then finds them open.  A partition is opened only when the first
 * row is routed to it, so the plan below the INSERT is wrapped: each row is routed beforehand in a shadow of the
 * routing state, as COPY FROM does it, which locks the leaf and opens its indexes; those are masked as btree before the row is
 * handed on.  The lock on the leaf keeps its set of indexes from growing in between.
 * From 18 on the index method itself translates strategies and nothing of this is needed.
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "executor/execPartition.h"
#include "executor/executor.h"
#include "nemo_ddl.h"
#include "nodes/execnodes.h"
#include "partitioning/partdesc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#if PG_VERSION_NUM < 180000

/* Shadow routing of one INSERT.  Lives in TopMemoryContext; what it points to lives in the query's context. */
typedef struct Shadow
{
	QueryDesc  *query;
	PlanState  *source;			/* the plan below the INSERT ... */
	ExecProcNodeMtd next_row;	/* ... and how it makes its rows */
	EState	   *estate;			/* of the shadow; never executes anything */
	ModifyTableState *modify;
	ResultRelInfo *root;
	PartitionTupleRouting *routing;
	ResultRelInfo *last;		/* leaf of the previous row */
	List	   *leaves;			/* those seen, their nemo_index indexes masked */
	SubTransactionId subid;
} Shadow;

static List *shadows = NIL;		/* of Shadow *, in TopMemoryContext */

/* What BuildSpeculativeIndexInfo() computes, for an index with btree's operator classes. */
static void
fill_unique_operators(Relation index, IndexInfo *info)
{
	int			n = IndexRelationGetNumberOfKeyAttributes(index);

	info->ii_UniqueOps = palloc(n * sizeof(Oid));
	info->ii_UniqueProcs = palloc(n * sizeof(Oid));
	info->ii_UniqueStrats = palloc(n * sizeof(uint16));
	for (int i = 0; i < n; i++)
	{
		Oid			type = index->rd_opcintype[i];
		Oid			equal = get_opfamily_member(index->rd_opfamily[i], type, type, BTEqualStrategyNumber);

		if (!OidIsValid(equal))
			elog(ERROR, "missing operator %d(%u,%u) in opfamily %u", BTEqualStrategyNumber, type, type,
				 index->rd_opfamily[i]);
		info->ii_UniqueStrats[i] = BTEqualStrategyNumber;
		info->ii_UniqueOps[i] = equal;
		info->ii_UniqueProcs[i] = get_opcode(equal);
	}
}

/* Open the indexes of an INSERT's plain target tables; ExecCloseResultRelations() closes them. */
static void
open_target_indexes(ModifyTableState *modify, EState *estate)
{
	MemoryContext old = MemoryContextSwitchTo(estate->es_query_cxt);

	for (int i = 0; i < modify->mt_nrels; i++)
	{
		ResultRelInfo *target = &modify->resultRelInfo[i];

		if (!nemo_relation_is_nemo_table(target->ri_RelationDesc) || target->ri_IndexRelationDescs != NULL)
			continue;
		ExecOpenIndices(target, false);
		for (int j = 0; j < target->ri_NumIndices; j++)
		{
			IndexInfo  *info = target->ri_IndexRelationInfo[j];

			if (info->ii_Unique && info->ii_UniqueOps == NULL)
				fill_unique_operators(target->ri_IndexRelationDescs[j], info);
		}
	}
	MemoryContextSwitchTo(old);
}

/* Has the partitioned table a leaf that is nemo's?  The first one ends the search. */
static bool
has_nemo_leaf(Relation root)
{
	PartitionDesc desc = RelationGetPartitionDesc(root, false);

	for (int i = 0; i < desc->nparts; i++)
	{
		Relation	part;
		bool		found;

		if (desc->is_leaf[i])
			found = nemo_is_nemo_table(desc->oids[i]);
		else
		{
			/* the lock that routing takes on its way down */
			part = relation_open(desc->oids[i], RowExclusiveLock);
			found = has_nemo_leaf(part);
			relation_close(part, NoLock);
		}
		if (found)
			return true;
	}
	return false;
}

/* A leaf is seen for the first time: its nemo_index indexes shall pass for btree when the INSERT opens them. */
static void
admit_leaf(Shadow *shadow, ResultRelInfo *leaf)
{
	MemoryContext old = MemoryContextSwitchTo(shadow->estate->es_query_cxt);

	shadow->leaves = lappend(shadow->leaves, leaf);
	MemoryContextSwitchTo(old);
	for (int i = 0; i < leaf->ri_NumIndices; i++)
	{
		if (nemo_relation_is_nemo_index(leaf->ri_IndexRelationDescs[i]))
			nemo_mask_index(leaf->ri_IndexRelationDescs[i], shadow);
	}
}

/* ExecProcNode of the wrapped plan: look where the row will go before the INSERT does. */
static TupleTableSlot *
shadow_next_row(PlanState *source)
{
	Shadow	   *shadow = NULL;
	ListCell   *lc;
	TupleTableSlot *slot;
	ResultRelInfo *leaf;

	foreach(lc, shadows)
	{
		if (((Shadow *) lfirst(lc))->source == source)
			shadow = lfirst(lc);
	}
	if (shadow == NULL)
		elog(ERROR, "routing state of INSERT ... ON CONFLICT is missing");

	slot = shadow->next_row(source);
	if (TupIsNull(slot))
		return slot;
	leaf = ExecFindPartition(shadow->modify, shadow->root, shadow->routing, slot, shadow->estate);
	ResetPerTupleExprContext(shadow->estate);
	if (leaf != shadow->last)
	{
		if (!list_member_ptr(shadow->leaves, leaf))
			admit_leaf(shadow, leaf);
		shadow->last = leaf;
	}
	return slot;
}

static void
start_shadow(ModifyTableState *modify, QueryDesc *query)
{
	Relation	target = modify->rootResultRelInfo->ri_RelationDesc;
	PlanState  *source = outerPlanState(modify);
	Shadow	   *shadow;
	MemoryContext old;

	if (!has_nemo_leaf(target))
		return;

	/* the shadow's own contexts go with the query's, however that ends */
	old = MemoryContextSwitchTo(query->estate->es_query_cxt);
	shadow = MemoryContextAllocZero(TopMemoryContext, sizeof(Shadow));
	shadow->query = query;
	shadow->source = source;
	shadow->subid = GetCurrentSubTransactionId();
	shadow->estate = CreateExecutorState();

	MemoryContextSwitchTo(shadow->estate->es_query_cxt);
	shadow->root = makeNode(ResultRelInfo);
	InitResultRelInfo(shadow->root, target, 1, NULL, 0);
	shadow->modify = makeNode(ModifyTableState);
	shadow->modify->ps.state = shadow->estate;
	shadow->modify->operation = CMD_INSERT;
	shadow->modify->mt_nrels = 1;
	shadow->modify->resultRelInfo = shadow->root;
	shadow->modify->rootResultRelInfo = shadow->root;
	shadow->routing = ExecSetupPartitionTupleRouting(shadow->estate, target);

	MemoryContextSwitchTo(TopMemoryContext);
	shadows = lappend(shadows, shadow);
	MemoryContextSwitchTo(old);

	shadow->next_row = source->ExecProcNodeReal;
	ExecSetExecProcNode(source, shadow_next_row);
}

static void
start_modify(ModifyTableState *modify, QueryDesc *query)
{
	if (((ModifyTable *) modify->ps.plan)->onConflictAction == ONCONFLICT_NONE)
		return;
	open_target_indexes(modify, query->estate);
	if (modify->mt_partition_tuple_routing != NULL)
		start_shadow(modify, query);
}

void
nemo_upsert_start(QueryDesc *query, int eflags)
{
	ListCell   *lc;

	if (eflags & EXEC_FLAG_EXPLAIN_ONLY)
		return;
	if (IsA(query->planstate, ModifyTableState))
		start_modify((ModifyTableState *) query->planstate, query);
	foreach(lc, query->estate->es_auxmodifytables)
	{
		if (lfirst(lc) != (void *) query->planstate)
			start_modify(lfirst(lc), query);
	}
}

void
nemo_upsert_end(QueryDesc *query)
{
	ListCell   *lc;

	foreach(lc, shadows)
	{
		Shadow	   *shadow = lfirst(lc);

		if (shadow->query != query)
			continue;
		nemo_unmask(shadow);	/* while the shadow still holds the indexes open */
		ExecCleanupTupleRouting(shadow->modify, shadow->routing);
		ExecResetTupleTable(shadow->estate->es_tupleTable, false);
		FreeExecutorState(shadow->estate);
		shadows = foreach_delete_current(shadows, lc);
		pfree(shadow);
	}
}

void
nemo_upsert_forget(SubTransactionId subid)
{
	ListCell   *lc;

	foreach(lc, shadows)
	{
		Shadow	   *shadow = lfirst(lc);

		if (subid == InvalidSubTransactionId || shadow->subid == subid)
		{
			shadows = foreach_delete_current(shadows, lc);
			pfree(shadow);
		}
	}
}

void
nemo_upsert_reparent(SubTransactionId subid, SubTransactionId parent)
{
	ListCell   *lc;

	foreach(lc, shadows)
	{
		Shadow	   *shadow = lfirst(lc);

		if (shadow->subid == subid)
			shadow->subid = parent;
	}
}

#else							/* 18 and later */

void
nemo_upsert_start(QueryDesc *query, int eflags)
{
	(void) query;
	(void) eflags;
}

void
nemo_upsert_end(QueryDesc *query)
{
	(void) query;
}

void
nemo_upsert_forget(SubTransactionId subid)
{
	(void) subid;
}

void
nemo_upsert_reparent(SubTransactionId subid, SubTransactionId parent)
{
	(void) subid;
	(void) parent;
}

#endif
