/*
 * nemo_plan.c
 *	  What planner, executor and relcache are told about indexes of ours: masks, index descriptions, executor hooks.
 *
 * A mask lets the relcache copy of a nemo_index index read as btree, for places in core that look at the catalog row
 * where they mean what the index can do.  Execution goes by rd_indam, which is never touched: a mask that is missing is
 * a clean error, never a wrong answer, and one that stays too long does no harm.  Masks end with what they were made
 * for, or with the (sub)transaction that fails.
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_am.h"
#include "catalog/pg_amop.h"
#include "catalog/pg_class.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nemo_compat.h"
#include "nemo_ddl.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/plancat.h"
#include "optimizer/planner.h"
#include "parser/parsetree.h"
#include "utils/catcache.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/relcache.h"
#include "utils/resowner.h"
#include "utils/syscache.h"

/* A relcache entry whose rd_rel->relam reads as btree */
typedef struct Mask
{
	Relation	rel;			/* stays open as long as the mask */
	Oid			indexoid;
	Oid			true_am;
	bool		pinned;			/* opened by us, closed with the mask */
	ResourceOwner owner;		/* of that pin */
	SubTransactionId subid;
	const void *tag;			/* whose mask it is */
} Mask;

static struct
{
	/* hooks before us */
	ExecutorStart_hook_type executor_start;
	ExecutorEnd_hook_type executor_end;
	get_relation_info_hook_type get_relation_info;
	planner_hook_type planner;

	List	   *masks;			/* of Mask *, in TopMemoryContext */
	int			lifted;			/* planning inside of which masks are off */
} state;

/* ---- masks --------------------------------------------------------------------------------------------------- */

static Mask *
find_mask(Oid indexoid)
{
	ListCell   *lc;

	foreach(lc, state.masks)
	{
		if (((Mask *) lfirst(lc))->indexoid == indexoid)
			return lfirst(lc);
	}
	return NULL;
}

static void
add_mask(Relation index, bool pinned, const void *tag)
{
	Mask	   *other = find_mask(RelationGetRelid(index));
	MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
	Mask	   *mask = palloc0(sizeof(Mask));

	mask->rel = index;
	mask->indexoid = RelationGetRelid(index);
	mask->true_am = other ? other->true_am : index->rd_rel->relam;
	mask->pinned = pinned;
	mask->owner = CurrentResourceOwner;
	mask->subid = GetCurrentSubTransactionId();
	mask->tag = tag;
	state.masks = lappend(state.masks, mask);
	MemoryContextSwitchTo(old);
	index->rd_rel->relam = BTREE_AM_OID;
}

void
nemo_mask_index(Relation index, const void *tag)
{
	add_mask(index, false, tag);
}

/* The same by oid, keeping the entry open.  Only the relcache copy is touched, so no lock is needed for that. */
void
nemo_mask_index_oid(Oid indexoid, const void *tag)
{
	Relation	rel;

	if (get_rel_relkind(indexoid) != RELKIND_INDEX || !nemo_is_nemo_am(nemo_relation_method(indexoid)))
		return;
	rel = RelationIdGetRelation(indexoid);
	if (RelationIsValid(rel))
		add_mask(rel, true, tag);
}

/* Take a mask off the list; the entry shows its true method again unless another mask of it is left. */
static void
remove_mask(Mask *mask)
{
	state.masks = list_delete_ptr(state.masks, mask);
	if (state.lifted > 0 || find_mask(mask->indexoid) == NULL)
		mask->rel->rd_rel->relam = mask->true_am;
}

void
nemo_unmask(const void *tag)
{
	List	   *mine = NIL;
	ListCell   *lc;

	foreach(lc, state.masks)
	{
		if (((Mask *) lfirst(lc))->tag == tag)
			mine = lappend(mine, lfirst(lc));
	}
	foreach(lc, mine)
	{
		Mask	   *mask = lfirst(lc);

		remove_mask(mask);
		if (mask->pinned)
		{
			ResourceOwner current = CurrentResourceOwner;

			CurrentResourceOwner = mask->owner;
			RelationClose(mask->rel);
			CurrentResourceOwner = current;
		}
		pfree(mask);
	}
	list_free(mine);
}

/*
 * Abort: the entries are still held open here, resource owners give up the pins afterwards.  No catalog access, no
 * allocation.
 */
static void
forget_masks(SubTransactionId subid)
{
	for (int i = list_length(state.masks) - 1; i >= 0; i--)
	{
		Mask	   *mask = list_nth(state.masks, i);

		if (subid == InvalidSubTransactionId || mask->subid == subid)
		{
			remove_mask(mask);
			pfree(mask);
		}
	}
}

/* The relcache rereads the pg_class row of an open index when told to: put the masks back on. */
static void
relcache_callback(Datum arg, Oid relid)
{
	ListCell   *lc;

	(void) arg;
	if (state.lifted > 0)
		return;
	foreach(lc, state.masks)
	{
		Mask	   *mask = lfirst(lc);

		if (relid == InvalidOid || relid == mask->indexoid)
			mask->rel->rd_rel->relam = BTREE_AM_OID;
	}
}

static void
transaction_callback(XactEvent event, void *arg)
{
	(void) arg;
	switch (event)
	{
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PREPARE:
			forget_masks(InvalidSubTransactionId);
			nemo_upsert_forget(InvalidSubTransactionId);
			break;
		default:
			break;
	}
}

static void
subtransaction_callback(SubXactEvent event, SubTransactionId subid, SubTransactionId parent, void *arg)
{
	ListCell   *lc;

	(void) arg;
	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		forget_masks(subid);
		nemo_upsert_forget(subid);
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		foreach(lc, state.masks)
		{
			if (((Mask *) lfirst(lc))->subid == subid)
				((Mask *) lfirst(lc))->subid = parent;
		}
		nemo_upsert_reparent(subid, parent);
	}
}

/* ---- planner ------------------------------------------------------------------------------------------------- */

/*
 * A hash operator family in which the equality operator of a btree family and type is the only one, or InvalidOid:
 * what an index column looks like that can be asked for equality but has no order.
 */
static Oid
equality_family(Oid btree_family, Oid type)
{
	Oid			equal = get_opfamily_member(btree_family, type, type, BTEqualStrategyNumber);
	CatCList   *list;
	Oid			family = InvalidOid;

	if (!OidIsValid(equal))
		return InvalidOid;
	list = SearchSysCacheList1(AMOPOPID, ObjectIdGetDatum(equal));
	for (int i = 0; i < list->n_members && !OidIsValid(family); i++)
	{
		Form_pg_amop row = (Form_pg_amop) GETSTRUCT(&list->members[i]->tuple);

		if (row->amopmethod == HASH_AM_OID && row->amoplefttype == row->amoprighttype)
			family = row->amopfamily;
	}
	ReleaseSysCacheList(list);
	return family;
}

/*
 * Is the relation read by a subquery of a statement that re-checks rows (EvalPlanQual)?  The plan is then started again
 * without ExecutorStart, so nobody would turn off the prefetch of bitmap scans (see stop_prefetch).
 */
#if PG_VERSION_NUM < 180000
static bool
below_recheck(PlannerInfo *root)
{
	for (root = root->parent_root; root != NULL; root = root->parent_root)
	{
		CmdType		command = root->parse->commandType;

		if (command == CMD_UPDATE || command == CMD_DELETE || command == CMD_MERGE || root->parse->rowMarks != NIL)
			return true;
	}
	return false;
}
#endif

static void
describe_index(PlannerInfo *root, IndexOptInfo *index)
{
	bool		ordered = true;

	/* row comparisons are matched for btree only; strategies and families are btree's */
	index->relam = BTREE_AM_OID;
	/*
	 * That alone would have the planner look up the ends of the index for its estimates (get_actual_variable_range),
	 * here a request to the store per plan.  Only there does it ask whether an index of this kind is hypothetical.
	 */
	index->hypothetical = true;
	nemo_index_estimate(index->indexoid, &index->pages, &index->tuples, &index->tree_height);
	for (int i = 0; i < index->nkeycolumns; i++)
	{
		if (nemo_index_column_ordered(index->indexoid, i))
			continue;
		ordered = false;
		index->opfamily[i] = equality_family(index->opfamily[i], index->opcintype[i]);
	}
	if (!ordered)
	{
		index->sortopfamily = NULL;
		index->reverse_sort = NULL;
		index->nulls_first = NULL;
	}
#if PG_VERSION_NUM < 180000
	if (below_recheck(root))
		index->amhasgetbitmap = false;
#else
	(void) root;
#endif
}

static void
describe_relation(PlannerInfo *root, Oid relid, bool inhparent, RelOptInfo *rel)
{
	Relation	table;
	bool		ours;
	ListCell   *lc;

	if (state.get_relation_info)
		state.get_relation_info(root, relid, inhparent, rel);
	if (inhparent)
	{
		/* a partitioned table has no rows; a plain parent's own are described when it is planned as a member */
		return;
	}
	table = table_open(relid, NoLock);
	ours = nemo_relation_is_nemo_table(table);
	table_close(table, NoLock);
	if (!ours)
		return;
	rel->rel_parallel_workers = 0;
	foreach(lc, rel->indexlist)
		describe_index(root, lfirst_node(IndexOptInfo, lc));
}

/*
 * What plans a query reads the metapage of what it takes for a btree, so masks are off meanwhile: triggers and the queries
 * of REFRESH MATERIALIZED VIEW CONCURRENTLY are planned while some are on.
 */
static PlannedStmt *
plan_query(Query *query, const char *text, int options, ParamListInfo params)
{
	PlannedStmt *stmt;
	ListCell   *lc;

	if (state.masks == NIL)
		return state.planner != NULL ? state.planner(query, text, options, params) :
			standard_planner(query, text, options, params);

	foreach(lc, state.masks)
		((Mask *) lfirst(lc))->rel->rd_rel->relam = ((Mask *) lfirst(lc))->true_am;
	state.lifted++;
	PG_TRY();
	{
		stmt = state.planner != NULL ? state.planner(query, text, options, params) :
			standard_planner(query, text, options, params);
	}
	PG_FINALLY();
	{
		state.lifted--;
		foreach(lc, state.lifted == 0 ? state.masks : NIL)
			((Mask *) lfirst(lc))->rel->rd_rel->relam = BTREE_AM_OID;
	}
	PG_END_TRY();
	return stmt;
}

/* ---- executor ------------------------------------------------------------------------------------------------ */

/* What a look at a plan found */
typedef struct PlanWalk
{
	const void *tag;			/* for masks */
	List	   *rtable;
	bool		masked;
	bool		bitmap_scan;	/* a bitmap scan of a table of ours */
} PlanWalk;

static bool
has_row_comparison(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, RowCompareExpr))
		return true;
	return expression_tree_walker(node, has_row_comparison, context);
}

static void
walk_index_scan(List *quals, Oid indexoid, PlanWalk *walk)
{
	if (quals != NIL && has_row_comparison((Node *) quals, NULL))
	{
		nemo_mask_index_oid(indexoid, walk->tag);
		walk->masked = true;
	}
}

static void walk_plan(Plan *plan, PlanWalk *walk);

static void
walk_plans(List *plans, PlanWalk *walk)
{
	ListCell   *lc;

	foreach(lc, plans)
		walk_plan(lfirst(lc), walk);
}

/* Mask the indexes that a plan searches by row comparison, and look for bitmap scans of our tables. */
static void
walk_plan(Plan *plan, PlanWalk *walk)
{
	if (plan == NULL)
		return;
	check_stack_depth();
	switch (nodeTag(plan))
	{
		case T_IndexScan:
			walk_index_scan(((IndexScan *) plan)->indexqual, ((IndexScan *) plan)->indexid, walk);
			break;
		case T_IndexOnlyScan:
			walk_index_scan(((IndexOnlyScan *) plan)->indexqual, ((IndexOnlyScan *) plan)->indexid, walk);
			break;
		case T_BitmapIndexScan:
			walk_index_scan(((BitmapIndexScan *) plan)->indexqual, ((BitmapIndexScan *) plan)->indexid, walk);
			break;
		case T_BitmapHeapScan:
			if (nemo_is_nemo_table(rt_fetch(((Scan *) plan)->scanrelid, walk->rtable)->relid))
				walk->bitmap_scan = true;
			break;
		case T_Append:
			walk_plans(((Append *) plan)->appendplans, walk);
			break;
		case T_MergeAppend:
			walk_plans(((MergeAppend *) plan)->mergeplans, walk);
			break;
		case T_BitmapAnd:
			walk_plans(((BitmapAnd *) plan)->bitmapplans, walk);
			break;
		case T_BitmapOr:
			walk_plans(((BitmapOr *) plan)->bitmapplans, walk);
			break;
		case T_SubqueryScan:
			walk_plan(((SubqueryScan *) plan)->subplan, walk);
			break;
		case T_CustomScan:
			walk_plans(((CustomScan *) plan)->custom_plans, walk);
			break;
		default:
			break;
	}
	walk_plan(plan->lefttree, walk);
	walk_plan(plan->righttree, walk);
}

/*
 * Up to 17 the bitmap heap scan prefetches blocks of the table's file by itself.  Our ctids name rows, not blocks of a
 * file; 18 leaves the reading to the table method.
 */
#if PG_VERSION_NUM < 180000
static bool
stop_prefetch(PlanState *planstate, void *context)
{
	if (IsA(planstate, BitmapHeapScanState))
	{
		BitmapHeapScanState *scan = (BitmapHeapScanState *) planstate;

		if (nemo_relation_is_nemo_table(scan->ss.ss_currentRelation))
			scan->prefetch_maximum = 0;
	}
	return planstate_tree_walker(planstate, stop_prefetch, context);
}
#endif

static void
next_executor_start(QueryDesc *query, int eflags)
{
	if (state.executor_start)
		state.executor_start(query, eflags);
	else
		standard_ExecutorStart(query, eflags);
}

static void
executor_start(QueryDesc *query, int eflags)
{
	PlannedStmt *stmt = query->plannedstmt;
	PlanWalk	walk = {query, stmt->rtable, false, false};

	if (!nemo_hooks_apply())
	{
		next_executor_start(query, eflags);
		return;
	}
	walk_plan(stmt->planTree, &walk);
	walk_plans(stmt->subplans, &walk);

	next_executor_start(query, eflags);

	/* only the start looks at the masks; EvalPlanQual starts the plan again, at any time until the end */
	if (walk.masked && stmt->rowMarks == NIL && !stmt->hasModifyingCTE &&
		(stmt->commandType == CMD_SELECT || stmt->commandType == CMD_INSERT))
		nemo_unmask(query);
#if PG_VERSION_NUM < 180000
	if (walk.bitmap_scan)
		(void) stop_prefetch(query->planstate, NULL);
#endif
	nemo_upsert_start(query, eflags);
}

static void
executor_end(QueryDesc *query)
{
	nemo_upsert_end(query);
	if (state.executor_end)
		state.executor_end(query);
	else
		standard_ExecutorEnd(query);
	if (state.masks != NIL)
		nemo_unmask(query);
}

/* ---- start --------------------------------------------------------------------------------------------------- */

void
nemo_plan_init(void)
{
	state.executor_start = ExecutorStart_hook;
	ExecutorStart_hook = executor_start;
	state.executor_end = ExecutorEnd_hook;
	ExecutorEnd_hook = executor_end;
	state.get_relation_info = get_relation_info_hook;
	get_relation_info_hook = describe_relation;
	state.planner = planner_hook;
	planner_hook = plan_query;
	CacheRegisterRelcacheCallback(relcache_callback, (Datum) 0);
	RegisterXactCallback(transaction_callback, NULL);
	RegisterSubXactCallback(subtransaction_callback, NULL);
}
