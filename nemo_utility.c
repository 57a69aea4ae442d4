/*
 * nemo_utility.c
 *	  Utility statements: what must be arranged before core runs them, what we refuse, and what follows them.
 *
 * Before: names of our index method in places where only btree's operators will do, masks for comparisons of indexes
 * (nemo_plan.c), locks that core's are too weak for.  After: the rows of tables whose indexes, constraints or files
 * changed move to where they belong (nemo_fix_placement).  A lock is taken only after the check of privileges that core
 * makes too, and in core's order: parent before partitions, table before index.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_inherits.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "commands/tablecmds.h"
#include "miscadmin.h"
#include "nemo_compat.h"
#include "nemo_ddl.h"
#include "storage/lmgr.h"
#include "nemo_key.h"
#include "nodes/makefuncs.h"
#include "parser/parse_type.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/acl.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* A utility statement under way, subcommands counted with it */
typedef struct UtilityLevel
{
	struct UtilityLevel *outer;
	List	   *tables;			/* oids of nemo tables whose rows may have to move when it is done */
	bool		refresh_concurrently;
} UtilityLevel;

static struct
{
	ProcessUtility_hook_type process_utility;	/* the hook before ours */
	UtilityLevel *level;		/* innermost, in TopMemoryContext */
} state;

/* Tables whose rows may have to move when the running utility statement is done */
void
nemo_note_table(Oid relid)
{
	MemoryContext old;

	if (state.level == NULL)
		return;
	old = MemoryContextSwitchTo(TopMemoryContext);
	state.level->tables = list_append_unique_oid(state.level->tables, relid);
	MemoryContextSwitchTo(old);
}

/* Is the running statement itself, not one that it runs, REFRESH MATERIALIZED VIEW CONCURRENTLY of a view of ours? */
bool
nemo_refreshing_concurrently(void)
{
	return state.level != NULL && state.level->refresh_concurrently;
}

/* Mask the indexes of a table, or of all tables of a partition tree, locking the tables. */
static void
mask_tables(Oid relid, LOCKMODE lockmode, const void *tag)
{
	List	   *tables = find_all_inheritors(relid, lockmode, NULL);
	ListCell   *table;

	foreach(table, tables)
	{
		Relation	rel;
		List	   *indexes;
		ListCell   *index;

		if (!nemo_is_nemo_table(lfirst_oid(table)))
			continue;
		rel = table_open(lfirst_oid(table), NoLock);
		indexes = RelationGetIndexList(rel);
		table_close(rel, NoLock);
		foreach(index, indexes)
			nemo_mask_index_oid(lfirst_oid(index), tag);
		list_free(indexes);
	}
	list_free(tables);
}


/* EXCLUDE USING nemo_index, on whatever table: as btree, whose operators it uses; the table decides the method. */
static void
plain_constraint(Node *node)
{
	Constraint *con = (Constraint *) node;

	if (node != NULL && IsA(node, Constraint) && con->contype == CONSTR_EXCLUSION && con->access_method != NULL &&
		nemo_is_nemo_am(get_am_oid(con->access_method, true)))
		con->access_method = pstrdup("btree");
}

/*
 * default_table_access_method is about tables that last: a temporary table that does not ask for a method of ours is a
 * heap.  REFRESH MATERIALIZED VIEW CONCURRENTLY makes such tables by itself.
 */
static void
settle_temporary(RangeVar *relation, char **method)
{
	bool		temporary = relation->relpersistence == RELPERSISTENCE_TEMP ||
		(relation->schemaname != NULL && strcmp(relation->schemaname, "pg_temp") == 0);

	if (temporary && *method == NULL &&
		nemo_is_nemo_am(get_table_am_oid(default_table_access_method, true)))
		*method = pstrdup("heap");
}

static void
prepare_create(CreateStmt *stmt)
{
	ListCell   *lc;

	if (!IsA(stmt, CreateForeignTableStmt) && stmt->partspec == NULL)
		settle_temporary(stmt->relation, &stmt->accessMethod);
	foreach(lc, stmt->tableElts)
		plain_constraint(lfirst(lc));
	foreach(lc, stmt->constraints)
		plain_constraint(lfirst(lc));
}

static void
prepare_index(IndexStmt *stmt, const void *tag)
{
	Oid			table;

	/* the same index then gets the same catalog rows however it was asked for */
	if (stmt->accessMethod != NULL && nemo_is_nemo_am(get_am_oid(stmt->accessMethod, true)))
		stmt->accessMethod = pstrdup("btree");
	if (stmt->relation == NULL || stmt->concurrent || !stmt->relation->inh)
		return;
	/* on a partitioned table: equal indexes of the partitions shall be found (CompareIndexInfo) */
	table = RangeVarGetRelid(stmt->relation, NoLock, true);
	if (!OidIsValid(table) || get_rel_relkind(table) != RELKIND_PARTITIONED_TABLE)
		return;
	table = RangeVarGetRelidExtended(stmt->relation, ShareLock, RVR_MISSING_OK, RangeVarCallbackOwnsRelation, NULL);
	if (OidIsValid(table))
		mask_tables(table, ShareLock, tag);
}

static bool
has_subcommand(AlterTableStmt *stmt, AlterTableType type)
{
	ListCell   *lc;

	foreach(lc, stmt->cmds)
	{
		if (lfirst_node(AlterTableCmd, lc)->subtype == type)
			return true;
	}
	return false;
}

/* An index to be dropped cannot be masked at the same time: a mask keeps it open. */
static bool
drops_indexes(AlterTableStmt *stmt)
{
	return has_subcommand(stmt, AT_DropConstraint) || has_subcommand(stmt, AT_DropColumn) ||
		has_subcommand(stmt, AT_AlterColumnType);
}

/* One subcommand: what it does not do to relations of ours, and what core must be shown as btree for it. */
static void
prepare_subcommand(AlterTableStmt *stmt, AlterTableCmd *cmd, Oid relid, LOCKMODE lockmode, const void *tag)
{
	bool		ours = nemo_is_nemo_am(nemo_relation_method(relid));

	if (cmd->subtype == AT_SetTableSpace && ours && !has_subcommand(stmt, AT_SetAccessMethod))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot change the tablespace of \"%s\"", get_rel_name(relid)),
				 errdetail("The data of relations using %s is kept in Nemo's store, not in files of the cluster.",
						   get_am_name(nemo_relation_method(relid)))));
	else if (cmd->subtype == AT_ClusterOn && ours)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot mark index \"%s\" as clustered", cmd->name),
				 errdetail("Rows of tables using %s are always kept in the order of the primary key.",
						   get_am_name(nemo_relation_method(relid)))));
	else if (cmd->subtype == AT_AttachPartition)
	{
		RangeVar   *name = ((PartitionCmd *) cmd->def)->name;
		Oid			child;

		if (stmt->objtype == OBJECT_INDEX)
		{
			child = RangeVarGetRelid(name, NoLock, true);
			if (OidIsValid(child))
				nemo_mask_index_oid(child, tag);
			return;
		}
		child = RangeVarGetRelidExtended(name, AccessExclusiveLock, RVR_MISSING_OK, RangeVarCallbackOwnsRelation,
										 NULL);
		if (OidIsValid(child))
			mask_tables(child, AccessExclusiveLock, tag);
	}
	else if (cmd->subtype == AT_AddConstraint && cmd->def != NULL && IsA(cmd->def, Constraint))
	{
		Constraint *con = (Constraint *) cmd->def;

		plain_constraint(cmd->def);
		if (con->indexname != NULL)
		{
			Oid			index = get_relname_relid(con->indexname, get_rel_namespace(relid));

			if (OidIsValid(index))
				nemo_mask_index_oid(index, tag);
		}
		else if (get_rel_relkind(relid) == RELKIND_PARTITIONED_TABLE && !drops_indexes(stmt) &&
				 (con->contype == CONSTR_PRIMARY || con->contype == CONSTR_UNIQUE))
			mask_tables(relid, lockmode, tag);
	}
}

static void
prepare_alter(AlterTableStmt *stmt, const void *tag)
{
	Oid			relid;
	LOCKMODE	lockmode;
	ListCell   *lc;

	if (!has_subcommand(stmt, AT_SetTableSpace) && !has_subcommand(stmt, AT_ClusterOn) &&
		!has_subcommand(stmt, AT_AttachPartition) && !has_subcommand(stmt, AT_AddConstraint))
		return;
	if (!OidIsValid(RangeVarGetRelid(stmt->relation, NoLock, true)))
		return;
	lockmode = AlterTableGetLockLevel(stmt->cmds);
	relid = RangeVarGetRelidExtended(stmt->relation, lockmode, RVR_MISSING_OK, RangeVarCallbackOwnsRelation, NULL);
	if (!OidIsValid(relid))
		return;
	foreach(lc, stmt->cmds)
		prepare_subcommand(stmt, lfirst_node(AlterTableCmd, lc), relid, lockmode, tag);
}

static void
prepare_refresh(RefreshMatViewStmt *stmt, UtilityLevel *level)
{
	Oid			view;

	if (!stmt->concurrent)
		return;
#if PG_VERSION_NUM >= 170000
	view = RangeVarGetRelidExtended(stmt->relation, ExclusiveLock, RVR_MISSING_OK, RangeVarCallbackMaintainsTable,
									NULL);
#else
	view = RangeVarGetRelidExtended(stmt->relation, ExclusiveLock, RVR_MISSING_OK, RangeVarCallbackOwnsTable, NULL);
#endif
	if (!OidIsValid(view) || !nemo_is_nemo_table(view))
		return;
	level->refresh_concurrently = true;
	mask_tables(view, NoLock, level);
}

static bool
has_relations_of_ours(void)
{
	Relation	classes = table_open(RelationRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(classes, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	row;
	bool		found = false;

	while (!found && HeapTupleIsValid(row = systable_getnext(scan)))
		found = nemo_is_nemo_am(((Form_pg_class) GETSTRUCT(row))->relam);
	systable_endscan(scan);
	table_close(classes, AccessShareLock);
	return found;
}

/* REINDEX (TABLESPACE ...) moves indexes without any event; many at once are refused if any of them may be ours. */
static void
check_reindex_tablespace(ReindexStmt *stmt, Oid relid)
{
	ListCell   *lc;
	bool		single = OidIsValid(relid) && get_rel_relkind(relid) != RELKIND_PARTITIONED_TABLE &&
		get_rel_relkind(relid) != RELKIND_PARTITIONED_INDEX;

	foreach(lc, stmt->params)
	{
		if (strcmp(lfirst_node(DefElem, lc)->defname, "tablespace") != 0)
			continue;
		if (single ? nemo_is_nemo_am(nemo_relation_method(relid)) : has_relations_of_ours())
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("cannot move indexes of access method \"%s\" to a tablespace",
							get_am_name(nemo_index_am_oid())),
					 errdetail("Their data is kept in Nemo's store, not in files of the database cluster."),
					 errhint("Leave out TABLESPACE, or name the tables that do not use Nemo one by one.")));
	}
}

/*
 * A rebuilt primary key is a new tree of rows, and nobody may be reading the old one: core's ShareLock on the table is
 * not enough.  Without the privilege nothing is locked and core refuses.
 */
static void
prepare_reindex(ReindexStmt *stmt)
{
	Oid			relid = InvalidOid;
	Oid			table;

	if (stmt->relation != NULL)
		relid = RangeVarGetRelid(stmt->relation, NoLock, true);
	check_reindex_tablespace(stmt, relid);
	if (!OidIsValid(relid) || !nemo_is_nemo_am(nemo_relation_method(relid)))
		return;
	table = (get_rel_relkind(relid) == RELKIND_INDEX) ? IndexGetRelation(relid, true) : relid;
	if (!OidIsValid(table))
		return;
#if PG_VERSION_NUM >= 170000
	if (pg_class_aclcheck(table, GetUserId(), ACL_MAINTAIN) != ACLCHECK_OK)
		return;
#else
	if (!nemo_owns_relation(table, GetUserId()))
		return;
#endif
	LockRelationOid(table, AccessExclusiveLock);
	nemo_note_table(table);
}

static void
prepare_cluster(ClusterStmt *stmt)
{
	Oid			relid;

	if (stmt->relation == NULL)
		return;
	relid = RangeVarGetRelid(stmt->relation, NoLock, true);
	if (OidIsValid(relid) && nemo_is_nemo_table(relid))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot cluster table \"%s\"", get_rel_name(relid)),
				 errdetail("Rows of tables using %s are always kept in the order of the primary key.",
						   get_am_name(nemo_relation_method(relid))),
				 errhint("Choose the primary key that gives the order you want.")));
}

/* A copy of a template's files would be an empty shell: the rows are in the store, under the template's oid. */
static void
check_template(CreatedbStmt *stmt)
{
	const char *template = "template1";
	Oid			database;
	ListCell   *lc;

	foreach(lc, stmt->options)
	{
		DefElem    *option = lfirst_node(DefElem, lc);

		if (strcmp(option->defname, "template") == 0 && option->arg != NULL)
			template = defGetString(option);
	}
	database = get_database_oid(template, true);
	if (OidIsValid(database) && nemo_database_has_trees(database))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("database \"%s\" cannot be a template: it has tables using Nemo", template),
				 errdetail("CREATE DATABASE copies files, but the rows of these tables are in Nemo's store."),
				 errhint("Use template0 and restore a dump into the new database.")));
}

/* Is there a nemo_index with a key column of this type? */
static bool
type_is_indexed(Oid type)
{
	Relation	attributes = table_open(AttributeRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(attributes, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	tuple;
	bool		found = false;

	while (!found && (tuple = systable_getnext(scan)) != NULL)
	{
		Form_pg_attribute att = (Form_pg_attribute) GETSTRUCT(tuple);

		if (att->atttypid == type && get_rel_relkind(att->attrelid) == RELKIND_INDEX)
		{
			HeapTuple	class = SearchSysCache1(RELOID, ObjectIdGetDatum(att->attrelid));

			if (HeapTupleIsValid(class))
			{
				found = ((Form_pg_class) GETSTRUCT(class))->relam == nemo_index_am_oid();
				ReleaseSysCache(class);
			}
		}
	}
	systable_endscan(scan);
	table_close(attributes, AccessShareLock);
	return found;
}

/* Keys hold the labels' sort positions: they must not be renumbered under an index. */
static void
prepare_enum(AlterEnumStmt *stmt)
{
	Oid			type;

	if (stmt->oldVal != NULL || stmt->newValNeighbor == NULL)
		return;
	type = LookupTypeNameOid(NULL, makeTypeNameFromNameList(stmt->typeName), true);
	if (OidIsValid(type) && nemo_key_enum_renumbers(type, stmt->newValNeighbor, stmt->newValIsAfter) &&
		type_is_indexed(type))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("no room for another label next to \"%s\" of type %s", stmt->newValNeighbor,
						format_type_be(type)),
				 errdetail("PostgreSQL would renumber the labels, whose positions are in the keys of nemo indexes."),
				 errhint("Drop the nemo indexes on columns of this type, add the label, and create them again.")));
}

static void
prepare_utility(Node *stmt, UtilityLevel *level)
{
	switch (nodeTag(stmt))
	{
		case T_CreateStmt:
			prepare_create((CreateStmt *) stmt);
			break;
		case T_CreateTableAsStmt:
			if (((CreateTableAsStmt *) stmt)->into->rel != NULL)
				settle_temporary(((CreateTableAsStmt *) stmt)->into->rel,
								 &((CreateTableAsStmt *) stmt)->into->accessMethod);
			break;
		case T_IndexStmt:
			prepare_index((IndexStmt *) stmt, level);
			break;
		case T_AlterTableStmt:
			prepare_alter((AlterTableStmt *) stmt, level);
			break;
		case T_RefreshMatViewStmt:
			prepare_refresh((RefreshMatViewStmt *) stmt, level);
			break;
		case T_ReindexStmt:
			prepare_reindex((ReindexStmt *) stmt);
			break;
		case T_ClusterStmt:
			prepare_cluster((ClusterStmt *) stmt);
			break;
		case T_AlterEnumStmt:
			prepare_enum((AlterEnumStmt *) stmt);
			break;
		default:
			break;
	}
}

/* The statement is done and its effects are to be seen: let the rows of the tables it concerned follow. */
static void
fix_placements(List *tables)
{
	ListCell   *lc;

	CommandCounterIncrement();
	foreach(lc, tables)
	{
		if (!nemo_is_nemo_table(lfirst_oid(lc)))
			continue;
		PushActiveSnapshot(GetTransactionSnapshot());
		nemo_fix_placement(lfirst_oid(lc));
		PopActiveSnapshot();
		CommandCounterIncrement();
	}
}

static void
next_process_utility(PlannedStmt *pstmt, const char *query, bool read_only, ProcessUtilityContext context,
					 ParamListInfo params, QueryEnvironment *env, DestReceiver *dest, QueryCompletion *completion)
{
	if (state.process_utility)
		state.process_utility(pstmt, query, read_only, context, params, env, dest, completion);
	else
		standard_ProcessUtility(pstmt, query, read_only, context, params, env, dest, completion);
}

static UtilityLevel *
push_level(void)
{
	UtilityLevel *level = MemoryContextAllocZero(TopMemoryContext, sizeof(UtilityLevel));

	level->outer = state.level;
	state.level = level;
	return level;
}

/* Returns what the level has noted, in CurrentMemoryContext. */
static List *
pop_level(UtilityLevel *level)
{
	List	   *tables = list_copy(level->tables);

	state.level = level->outer;
	list_free(level->tables);
	pfree(level);
	return tables;
}

/* Run the statement at its level, and return the tables noted there, in CurrentMemoryContext. */
static pg_noinline List *
run_at_level(UtilityLevel *level, PlannedStmt *pstmt, const char *query, bool read_only, ProcessUtilityContext context,
			 ParamListInfo params, QueryEnvironment *env, DestReceiver *dest, QueryCompletion *completion)
{
	PG_TRY();
	{
		prepare_utility(pstmt->utilityStmt, level);
		next_process_utility(pstmt, query, read_only, context, params, env, dest, completion);
		nemo_unmask(level);
	}
	PG_CATCH();
	{
		/* the abort of the transaction or subtransaction removes the masks */
		list_free(pop_level(level));
		PG_RE_THROW();
	}
	PG_END_TRY();
	return pop_level(level);
}

/*
 * Subcommands of a statement (CREATE SCHEMA's elements, what CREATE TABLE and ALTER TABLE break into) belong to its
 * level: half-way through it a table cannot be rearranged.  A statement run by a function has a level of its own.
 */
static void
process_utility(PlannedStmt *pstmt, const char *query, bool read_only, ProcessUtilityContext context,
				ParamListInfo params, QueryEnvironment *env, DestReceiver *dest, QueryCompletion *completion)
{
	NodeTag		kind = nodeTag(pstmt->utilityStmt);

	if (kind == T_CreatedbStmt && IsTransactionState())
		check_template((CreatedbStmt *) pstmt->utilityStmt);
	if (kind == T_TransactionStmt || !nemo_hooks_apply())
	{
		next_process_utility(pstmt, query, read_only, context, params, env, dest, completion);
		return;
	}
	/* those that prepare_utility() may change */
	if (read_only && (kind == T_CreateStmt || kind == T_CreateTableAsStmt || kind == T_IndexStmt ||
					  kind == T_AlterTableStmt))
	{
		pstmt = copyObject(pstmt);
		read_only = false;
	}
	if (context == PROCESS_UTILITY_SUBCOMMAND && state.level != NULL)
	{
		/* its masks stay to the end of the whole statement */
		prepare_utility(pstmt->utilityStmt, state.level);
		next_process_utility(pstmt, query, read_only, context, params, env, dest, completion);
	}
	else
	{
		List	   *tables = run_at_level(push_level(), pstmt, query, read_only, context, params, env, dest,
										  completion);

		if (tables != NIL && IsTransactionState())
			fix_placements(tables);
	}
}

void
nemo_utility_init(void)
{
	state.process_utility = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
}
