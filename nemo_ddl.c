/*
 * nemo_ddl.c
 *	  Catalog plumbing: how PRIMARY KEY, UNIQUE, CREATE INDEX and ALTER TABLE reach nemo_index.
 *
 * Core asks for btree wherever an index stands behind a constraint.  On a nemo table the new index's pg_class row is
 * turned to nemo_index as it is born, inside index_create() between its insertion and the command counter increment
 * after which the relcache first builds the entry; the operator classes stay btree's, so that foreign keys, ordering
 * and pg_dump need nothing.  Places in core that insist on btree by the catalog row are shown a masked relcache copy
 * (nemo_plan.c).
 * Rules that tables of ours must obey (logged, no tablespace, only nemo_index) are enforced at the same events, which
 * every path passes; checks by statement (nemo_utility.c) only give better words earlier.
 *
 * In a database without the extension every hook leaves after one cached test.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/catalog.h"
#include "catalog/dependency.h"
#include "catalog/index.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_am.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_index.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_language.h"
#include "catalog/pg_opclass.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/defrem.h"
#include "miscadmin.h"
#include "nemo_compat.h"
#include "nemo_ddl.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#define MAX_METHODS	16			/* access methods of ours in one database; two are usual */

static struct
{
	object_access_hook_type object_access;	/* the hook before ours */

	/* access methods of this database that run our handlers */
	bool		methods_valid;
	uint64		methods_generation; /* counts invalidations of pg_am */
	int			nmethods;
	Oid			methods[MAX_METHODS];
	Oid			index_method;	/* the one new indexes get, or InvalidOid */

} state;

/* ---- access methods ------------------------------------------------------------------------------------------ */

/* 't' or 'i' when the handler is ours: the C function of that name, in this very library; else 0 */
static char
handler_kind(Oid handler)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	PGFunction	expected = NULL;
	char		kind = 0;
	FmgrInfo	function;

	if (!HeapTupleIsValid(tuple))
		return 0;
	if (((Form_pg_proc) GETSTRUCT(tuple))->prolang == ClanguageId)
	{
		bool		isnull;
		Datum		source = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_prosrc, &isnull);
		char	   *symbol = isnull ? pstrdup("") : TextDatumGetCString(source);

		if (strcmp(symbol, "nemo_table_handler") == 0)
		{
			kind = AMTYPE_TABLE;
			expected = nemo_table_handler;
		}
		else if (strcmp(symbol, "nemo_index_handler") == 0)
		{
			kind = AMTYPE_INDEX;
			expected = nemo_index_handler;
		}
		pfree(symbol);
	}
	ReleaseSysCache(tuple);
	if (kind == 0)
		return 0;
	fmgr_info(handler, &function);
	return function.fn_addr == expected ? kind : 0;
}

static void
load_methods(void)
{
	uint64		generation = state.methods_generation;
	Relation	rel = table_open(AccessMethodRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, AmOidIndexId, true, NULL, 0, NULL);
	HeapTuple	tuple;

	state.nmethods = 0;
	state.index_method = InvalidOid;
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_am	am = (Form_pg_am) GETSTRUCT(tuple);
		char		kind;

		if (am->oid < FirstNormalObjectId || (kind = handler_kind(am->amhandler)) == 0)
			continue;
		if (state.nmethods == MAX_METHODS)
			ereport(ERROR,
					(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					 errmsg("too many access methods use Nemo's handlers"),
					 errdetail("The limit is %d.", MAX_METHODS)));
		state.methods[state.nmethods++] = am->oid;
		if (kind == AMTYPE_INDEX && !OidIsValid(state.index_method))
			state.index_method = am->oid;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	/* an invalidation that came in meanwhile makes this good for one use only */
	state.methods_valid = (generation == state.methods_generation);
}

static void
methods_callback(Datum arg, int cacheid, uint32 hashvalue)
{
	(void) arg;
	(void) cacheid;
	(void) hashvalue;
	state.methods_generation++;
	state.methods_valid = false;
}

Oid
nemo_index_am_oid(void)
{
	if (!state.methods_valid)
		load_methods();
	return state.index_method;
}

bool
nemo_is_nemo_am(Oid amoid)
{
	if (amoid < FirstNormalObjectId)
		return false;
	if (!state.methods_valid)
		load_methods();
	for (int i = 0; i < state.nmethods; i++)
	{
		if (state.methods[i] == amoid)
			return true;
	}
	return false;
}

/* pg_class.relam as the syscache has it; InvalidOid when there is no such relation */
Oid
nemo_relation_method(Oid relid)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid			method = InvalidOid;

	if (HeapTupleIsValid(tuple))
	{
		method = ((Form_pg_class) GETSTRUCT(tuple))->relam;
		ReleaseSysCache(tuple);
	}
	return method;
}

static bool
has_storage_as_table(char relkind)
{
	return relkind == RELKIND_RELATION || relkind == RELKIND_MATVIEW;
}

bool
nemo_is_nemo_table(Oid relid)
{
	return nemo_is_nemo_am(nemo_relation_method(relid)) && has_storage_as_table(get_rel_relkind(relid));
}

/* Can the hooks look at catalogs, and is there anything of ours in this database? */
bool
nemo_hooks_apply(void)
{
	return IsNormalProcessingMode() && IsTransactionState() && OidIsValid(MyDatabaseId) &&
		OidIsValid(nemo_index_am_oid());
}

/* ---- catalog rows just written ------------------------------------------------------------------------------- */

/*
 * A copy of a row found by oid, as the running command has left it: before its CommandCounterIncrement only
 * SnapshotSelf sees it.  NULL when there is none.
 */
static HeapTuple
fresh_row(Relation catalog, Oid index, AttrNumber oid_column, Oid oid)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, oid_column, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(oid));
	scan = systable_beginscan(catalog, index, true, SnapshotSelf, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		tuple = heap_copytuple(tuple);
	systable_endscan(scan);
	return tuple;
}

/*
 * Overwrite a row that the running command has inserted; the new one has the same length and the same keys.  Nobody
 * else can see it, and the invalidation queued for the insertion has yet to go out.
 */
static void
overwrite_fresh_row(Relation catalog, HeapTuple tuple)
{
#if PG_VERSION_NUM < 180000
	heap_inplace_update(catalog, tuple);
#else
	Buffer		buffer = ReadBuffer(catalog, ItemPointerGetBlockNumber(&tuple->t_self));
	Page		page = BufferGetPage(buffer);
	ItemId		item;
	HeapTupleData old;

	LockTuple(catalog, &tuple->t_self, InplaceUpdateTupleLock);
	LockBuffer(buffer, BUFFER_LOCK_EXCLUSIVE);
	item = PageGetItemId(page, ItemPointerGetOffsetNumber(&tuple->t_self));
	old.t_self = tuple->t_self;
	old.t_tableOid = RelationGetRelid(catalog);
	old.t_data = (HeapTupleHeader) PageGetItem(page, item);
	old.t_len = ItemIdGetLength(item);
	/* releases the page's lock and the tuple's */
	heap_inplace_update_and_unlock(catalog, &old, tuple, buffer);
	ReleaseBuffer(buffer);
#endif
}

/* ---- rules for relations of ours ----------------------------------------------------------------------------- */

static void
refuse_method(Oid method, Oid table_method)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("access method \"%s\" is not supported on tables using %s", get_am_name(method),
					get_am_name(table_method)),
			 errdetail("Indexes on such tables are kept in the same ordered store as the rows."),
			 errhint("Use access method \"%s\", which \"btree\" is taken to mean there.",
					 get_am_name(nemo_index_am_oid()))));
}

/*
 * pg_class row of a table or index of ours, new or altered.  A tablespace has no meaning for data that is not in files,
 * and trees are named by database and relfilenode, which is unique only within one tablespace.
 */
static void
check_relation_rules(Form_pg_class row)
{
	char	   *method = get_am_name(row->relam);

	if (row->relpersistence == RELPERSISTENCE_TEMP)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" does not support temporary tables", method),
				 errdetail("Its rows are logged and live in a store that outlasts the session."),
				 errhint("Create the temporary table with USING heap.")));
	if (row->relpersistence == RELPERSISTENCE_UNLOGGED)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" does not support unlogged tables", method),
				 errdetail("All its changes are logged."),
				 errhint("Leave out UNLOGGED, or use access method \"heap\".")));
	if (OidIsValid(row->reltablespace))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" does not support tablespaces", method),
				 errdetail("The data is kept in Nemo's store, not in files of the database cluster."),
				 errhint("Leave out the tablespace, and leave default_tablespace empty.")));
}

/* ---- indexes: btree <-> nemo_index --------------------------------------------------------------------------- */

/* Type of a key column of an index that may have been created by the running command */
static Oid
index_column_type(Oid indexoid, int column)
{
	Relation	catalog = table_open(AttributeRelationId, AccessShareLock);
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			type = InvalidOid;

	ScanKeyInit(&key[0], Anum_pg_attribute_attrelid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(indexoid));
	ScanKeyInit(&key[1], Anum_pg_attribute_attnum, BTEqualStrategyNumber, F_INT2EQ, Int16GetDatum(column + 1));
	scan = systable_beginscan(catalog, AttributeRelidNumIndexId, true, SnapshotSelf, 2, key);
	if (HeapTupleIsValid(tuple = systable_getnext(scan)))
		type = ((Form_pg_attribute) GETSTRUCT(tuple))->atttypid;
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return type;
}

/*
 * The btree operator class that one of ours stands for: the mirror of a name stands for btree's of that name and
 * schema, the one for anyelement for the type's default.  Any other class is returned as it is.
 */
static Oid
btree_opclass(Oid opclass, Oid indexoid, int column)
{
	HeapTuple	tuple = SearchSysCache1(CLAOID, ObjectIdGetDatum(opclass));
	Form_pg_opclass row;
	Oid			type;
	Oid			result = opclass;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for operator class %u", opclass);
	row = (Form_pg_opclass) GETSTRUCT(tuple);
	if (nemo_is_nemo_am(row->opcmethod))
	{
		type = index_column_type(indexoid, column);
		if (row->opcintype == ANYELEMENTOID)
			result = GetDefaultOpClass(type, BTREE_AM_OID);
		else
			result = GetSysCacheOid3(CLAAMNAMENSP, Anum_pg_opclass_oid, ObjectIdGetDatum(BTREE_AM_OID),
									 NameGetDatum(&row->opcname), ObjectIdGetDatum(row->opcnamespace));
		if (!OidIsValid(result))
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_OBJECT),
					 errmsg("data type %s has no default operator class for access method \"%s\"",
							format_type_be(type), "btree"),
					 errhint("Specify an operator class for the index, or define a default one for the data type.")));
	}
	ReleaseSysCache(tuple);
	return result;
}

/* The index shall depend on the classes after, no longer on those before; one row stands for a class used twice. */
static void
move_opclass_dependencies(Oid indexoid, int ncolumns, const Oid *before, const Oid *after)
{
	ObjectAddress index;
	ObjectAddress class;

	ObjectAddressSet(index, RelationRelationId, indexoid);
	for (int i = 0; i < ncolumns; i++)
	{
		bool		moved = false;	/* the dependency on before[i], for an earlier column */
		bool		added = false;	/* one on after[i] */

		if (after[i] == before[i])
			continue;
		for (int j = 0; j < i; j++)
		{
			moved |= (before[j] == before[i]);
			added |= (after[j] == after[i]);
		}
		if (!moved && added)
			(void) deleteDependencyRecordsForSpecific(RelationRelationId, indexoid, DEPENDENCY_NORMAL,
													  OperatorClassRelationId, before[i]);
		else if (!moved)
			(void) changeDependencyFor(RelationRelationId, indexoid, OperatorClassRelationId, before[i], after[i]);
		else if (!added)
		{
			ObjectAddressSet(class, OperatorClassRelationId, after[i]);
			recordDependencyOn(&index, &class, DEPENDENCY_NORMAL);
		}
	}
}

/*
 * Operator classes of a new index: btree's, always.  pg_index row: found and, if need be, overwritten.
 * The dependencies recorded for our mirrors are moved, for which they must be visible: index_create() increments the
 * command counter next, so when that is where we are (created) doing it here changes nothing else.
 */
static void
map_opclasses(Relation catalog, HeapTuple index, bool created)
{
	Form_pg_index row = (Form_pg_index) GETSTRUCT(index);
	bool		isnull;
	oidvector  *classes = (oidvector *)
		DatumGetPointer(fastgetattr(index, Anum_pg_index_indclass, RelationGetDescr(catalog), &isnull));
	Oid			before[INDEX_MAX_KEYS];
	bool		changed = false;

	for (int i = 0; i < row->indnkeyatts; i++)
	{
		before[i] = classes->values[i];
		classes->values[i] = btree_opclass(before[i], row->indexrelid, i);
		changed |= (classes->values[i] != before[i]);
	}
	if (!changed)
		return;
	overwrite_fresh_row(catalog, index);
	if (created)
	{
		CommandCounterIncrement();
		move_opclass_dependencies(row->indexrelid, row->indnkeyatts, before, classes->values);
	}
}

/*
 * An entry that the relcache has built too early, with the other method's routine, is initialised anew.  Nothing can
 * have been cached under it: the index has not been built yet.
 */
static void
repair_relcache(Oid indexoid, Oid method)
{
	Relation	rel = RelationIdGetRelation(indexoid);

	if (!RelationIsValid(rel))
		return;
	if (rel->rd_indexcxt != NULL && nemo_relation_is_nemo_index(rel) != nemo_is_nemo_am(method))
	{
		MemoryContextDelete(rel->rd_indexcxt);
		rel->rd_indexcxt = NULL;
		rel->rd_rel->relam = method;
		RelationInitIndexAccessInfo(rel);
	}
	RelationClose(rel);
}

static void
depend_on_method(Oid indexoid, Oid method)
{
	ObjectAddress index;
	ObjectAddress am;

	ObjectAddressSet(index, RelationRelationId, indexoid);
	ObjectAddressSet(am, AccessMethodRelationId, method);
	recordDependencyOn(&index, &am, DEPENDENCY_NORMAL);
}

/*
 * pg_class row of an index that the running command has inserted: give it the method that its table calls for.
 * created: called by index_create() at its end, not earlier by its constraint.
 */
static void
settle_new_index(Relation classes, HeapTuple row, bool created)
{
	Form_pg_class class = (Form_pg_class) GETSTRUCT(row);
	Relation	catalog;
	HeapTuple	index;
	Oid			table;
	Oid			table_method;
	Oid			method = class->relam;
	bool		ours = nemo_is_nemo_am(method);
	bool		ready;

	catalog = table_open(IndexRelationId, RowExclusiveLock);
	index = fresh_row(catalog, IndexRelidIndexId, Anum_pg_index_indexrelid, class->oid);
	if (!HeapTupleIsValid(index))
		elog(ERROR, "could not find pg_index row of index %u", class->oid);
	table = ((Form_pg_index) GETSTRUCT(index))->indrelid;
	ready = ((Form_pg_index) GETSTRUCT(index))->indisready;
	table_method = nemo_relation_method(table);

	if (nemo_is_nemo_am(table_method))
	{
		if (!ours && method != BTREE_AM_OID)
			refuse_method(method, table_method);
		/* only a concurrent build creates an index that is not ready for insertions */
		if (!ready && created)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("indexes on tables using %s cannot be built concurrently", get_am_name(table_method)),
					 errhint("Leave out CONCURRENTLY.")));
		method = ours ? method : nemo_index_am_oid();
	}
	else if (ours)
		method = BTREE_AM_OID;

	if (method != class->relam)
	{
		class->relam = method;
		overwrite_fresh_row(classes, row);
	}
	if (method == BTREE_AM_OID || nemo_is_nemo_am(method))
		map_opclasses(catalog, index, created);
	table_close(catalog, RowExclusiveLock);

	if (nemo_is_nemo_am(method))
	{
		check_relation_rules(class);
		nemo_note_table(table);
		if (created)
			depend_on_method(class->oid, method);
	}
	if (ours || nemo_is_nemo_am(method))
		repair_relcache(class->oid, method);
}

/*
 * REFRESH MATERIALIZED VIEW CONCURRENTLY collects the new rows in a temporary copy, made like the view itself.  Of a
 * view of ours that copy is made a heap: only its row says otherwise so far, its file is an empty one.
 */
static void
make_heap(Relation classes, HeapTuple row)
{
	Form_pg_class class = (Form_pg_class) GETSTRUCT(row);

	class->relam = HEAP_TABLE_AM_OID;
	if (!TransactionIdIsNormal(class->relfrozenxid))
		class->relfrozenxid = RecentXmin;
	if (!MultiXactIdIsValid(class->relminmxid))
		class->relminmxid = GetOldestMultiXactId();
	overwrite_fresh_row(classes, row);
}

/* OAT_POST_CREATE of a pg_class row */
static void
relation_created(Oid relid)
{
	Relation	classes = table_open(RelationRelationId, RowExclusiveLock);
	HeapTuple	row = fresh_row(classes, ClassOidIndexId, Anum_pg_class_oid, relid);

	if (HeapTupleIsValid(row))
	{
		Form_pg_class class = (Form_pg_class) GETSTRUCT(row);

		if (class->relkind == RELKIND_INDEX)
			settle_new_index(classes, row, true);
		else if (has_storage_as_table(class->relkind) && nemo_is_nemo_am(class->relam))
		{
			if (class->relpersistence == RELPERSISTENCE_TEMP && nemo_refreshing_concurrently())
				make_heap(classes, row);
			else
				check_relation_rules(class);
		}
	}
	table_close(classes, RowExclusiveLock);
}

/*
 * OAT_POST_CREATE of a pg_constraint row.  CREATE of a deferrable constraint's trigger increments the command counter
 * before index_create() announces the index, so its row must be settled by now.  And an index that becomes a primary
 * key says where the rows belong.
 */
static void
constraint_created(Oid constraint)
{
	Relation	catalog = table_open(ConstraintRelationId, AccessShareLock);
	HeapTuple	row = fresh_row(catalog, ConstraintOidIndexId, Anum_pg_constraint_oid, constraint);
	Form_pg_constraint con;

	table_close(catalog, AccessShareLock);
	if (!HeapTupleIsValid(row))
		return;
	con = (Form_pg_constraint) GETSTRUCT(row);
	if ((con->contype == CONSTRAINT_PRIMARY || con->contype == CONSTRAINT_UNIQUE ||
		 con->contype == CONSTRAINT_EXCLUSION) && OidIsValid(con->conindid))
	{
		Relation	classes = table_open(RelationRelationId, RowExclusiveLock);
		HeapTuple	index = fresh_row(classes, ClassOidIndexId, Anum_pg_class_oid, con->conindid);

		/* an index that exists already (ADD CONSTRAINT ... USING INDEX) has been settled when it was created */
		if (HeapTupleIsValid(index) && ((Form_pg_class) GETSTRUCT(index))->relkind == RELKIND_INDEX)
		{
			if (!SearchSysCacheExists1(RELOID, ObjectIdGetDatum(con->conindid)))
				settle_new_index(classes, index, false);
			if (nemo_is_nemo_table(con->conrelid))
				nemo_note_table(con->conrelid);
		}
		table_close(classes, RowExclusiveLock);
	}
}

/* An ordinary update of a pg_class row, kept apart from in-place updates by the lock that newer servers want. */
static void
update_class_row(Relation classes, HeapTuple row)
{
	ItemPointerData tid = row->t_self;	/* the update moves t_self to the new version */

#ifdef InplaceUpdateTupleLock
	LockTuple(classes, &tid, InplaceUpdateTupleLock);
#endif
	CatalogTupleUpdate(classes, &tid, row);
#ifdef InplaceUpdateTupleLock
	UnlockTuple(classes, &tid, InplaceUpdateTupleLock);
#endif
}

/*
 * ALTER TABLE ... SET ACCESS METHOD has just put the new method into the table's row.  Its indexes are built again
 * next: change their rows too, by ordinary updates.
 */
static void
switch_indexes(Relation classes, Oid table, Oid table_method)
{
	bool		to_nemo = nemo_is_nemo_am(table_method);
	Relation	rel = RelationIdGetRelation(table);
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	RelationClose(rel);
	foreach(lc, indexes)
	{
		HeapTuple	row = SearchSysCacheCopy1(RELOID, ObjectIdGetDatum(lfirst_oid(lc)));
		Form_pg_class class;

		if (!HeapTupleIsValid(row))
			elog(ERROR, "cache lookup failed for relation %u", lfirst_oid(lc));
		class = (Form_pg_class) GETSTRUCT(row);
		if (to_nemo && class->relam != BTREE_AM_OID && !nemo_is_nemo_am(class->relam))
			refuse_method(class->relam, table_method);
		if (to_nemo == nemo_is_nemo_am(class->relam))
			continue;
		if (!to_nemo)
			deleteDependencyRecordsForSpecific(RelationRelationId, class->oid, DEPENDENCY_NORMAL,
											   AccessMethodRelationId, class->relam);
		class->relam = to_nemo ? nemo_index_am_oid() : BTREE_AM_OID;
		if (to_nemo)
		{
			check_relation_rules(class);
			depend_on_method(class->oid, class->relam);
		}
		update_class_row(classes, row);
		heap_freetuple(row);
	}
	list_free(indexes);
}

/* OAT_POST_ALTER of a pg_class row; the syscache still has it as it was before */
static void
relation_altered(Oid relid)
{
	HeapTuple	old_row = SearchSysCacheCopy1(RELOID, ObjectIdGetDatum(relid));
	Form_pg_class before;
	Form_pg_class now;
	Relation	classes;
	HeapTuple	row;

	if (!HeapTupleIsValid(old_row))
		return;
	before = (Form_pg_class) GETSTRUCT(old_row);
	if (before->relkind != RELKIND_INDEX && !has_storage_as_table(before->relkind))
		return;
	classes = table_open(RelationRelationId, RowExclusiveLock);
	row = fresh_row(classes, ClassOidIndexId, Anum_pg_class_oid, relid);
	if (HeapTupleIsValid(row))
	{
		bool		is_table = has_storage_as_table(before->relkind);
		bool		ours;

		now = (Form_pg_class) GETSTRUCT(row);
		ours = nemo_is_nemo_am(now->relam);
		if (ours)
			check_relation_rules(now);
		if (is_table && now->relam != before->relam && (ours || nemo_is_nemo_am(before->relam)))
			switch_indexes(classes, relid, now->relam);
		if (is_table && ours && (now->relam != before->relam || now->relfilenode != before->relfilenode))
			nemo_note_table(relid);
	}
	table_close(classes, RowExclusiveLock);
}

/* OAT_DROP of a relation */
static void
relation_dropped(Oid relid)
{
	Oid			table;

	if (!nemo_is_nemo_am(nemo_relation_method(relid)) || get_rel_relkind(relid) != RELKIND_INDEX)
		return;
	table = IndexGetRelation(relid, true);
	if (OidIsValid(table))
		nemo_note_table(table);
}

static void
object_access(ObjectAccessType access, Oid class, Oid object, int sub, void *arg)
{
	if (state.object_access)
		state.object_access(access, class, object, sub, arg);
	if (sub != 0 || (class != RelationRelationId && class != ConstraintRelationId) ||
		(access != OAT_POST_CREATE && access != OAT_POST_ALTER && access != OAT_DROP && access != OAT_TRUNCATE) ||
		!nemo_hooks_apply())
		return;
	if (class == ConstraintRelationId)
	{
		if (access == OAT_POST_CREATE)
			constraint_created(object);
	}
	else if (access == OAT_POST_CREATE)
		relation_created(object);
	else if (access == OAT_POST_ALTER)
		relation_altered(object);
	else if (access == OAT_DROP)
		relation_dropped(object);
	else if (nemo_is_nemo_table(object))
		nemo_note_table(object);		/* truncated */
}

/* ---- start --------------------------------------------------------------------------------------------------- */

void
nemo_ddl_init(void)
{
	state.object_access = object_access_hook;
	object_access_hook = object_access;
	CacheRegisterSyscacheCallback(AMOID, methods_callback, (Datum) 0);
	nemo_utility_init();
	nemo_plan_init();
}
