/*
 * nemo_index_build.c
 *	  Building an index: claim the table for clustering while it is empty, or sort entries and load them in key order.
 *
 * A primary key that is built on a new, empty table becomes the table's row tree.  Any other index is filled with
 * entries under the builder's xid: snapshots that do not see the builder must not use it (F8), which indcheckxmin
 * tells the planner and check_snapshot() in nemo_index_scan.c enforces.
 */
#include "nemo.h"

#include "access/genam.h"
#include "access/nbtree.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "catalog/storage.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/tuplesort.h"
#include "utils/typcache.h"

#include "nemo_ddl.h"
#include "nemo_index.h"

#define CHANGES_PER_RECORD	64

/* what follows key and value in a sorted item */
typedef struct BuildTail
{
	uint16		key_len;
	uint16		prefix;
	uint16		null_distinct;
} BuildTail;

typedef struct BuildState
{
	Relation	heap;
	Relation	index;
	NemoRelInfo *info;
	NemoIndexInfo *ix;
	Tuplesortstate *sort;
	double		rows;
	StringInfoData item;
	StringInfoData value;
	StringInfoData row_key;
	MemoryContext row_cxt;

	/* loading */
	CommandId	cid;
	int			n;
	rb_slice	keys[CHANGES_PER_RECORD];
	rb_slice	values[CHANGES_PER_RECORD];
	MemoryContext chunk_cxt;
	int64		bytes;
} BuildState;

/* ---- collecting -------------------------------------------------------------------------------------------------- */

static void
collect(Relation index, ItemPointer tid, Datum *values, bool *isnull, bool alive, void *arg)
{
	BuildState *b = arg;
	MemoryContext old;
	uint64		rowid;
	uint8		tag;
	uint32		prefix;
	bool		null_distinct;
	BuildTail	tail;
	rb_slice	row_key;

	if (!alive)
		return;
	if (!nemo_tid_get(tid, &rowid, &tag))
		elog(ERROR, "unexpected ctid in table \"%s\"", RelationGetRelationName(b->heap));

	old = MemoryContextSwitchTo(b->row_cxt);
	resetStringInfo(&b->item);
	resetStringInfo(&b->value);
	resetStringInfo(&b->row_key);
	if (!nemo_row_key(b->info, rowid, SnapshotSelf, &b->row_key) &&
		!(ActiveSnapshotSet() && nemo_row_key(b->info, rowid, GetActiveSnapshot(), &b->row_key)))
		elog(ERROR, "row " UINT64_FORMAT " of table \"%s\" was not found", rowid, RelationGetRelationName(b->heap));
	row_key = (rb_slice) {(const uint8_t *) b->row_key.data, (uint32_t) b->row_key.len};

	appendStringInfoSpaces(&b->item, VARHDRSZ);
	{
		StringInfoData key;

		initStringInfo(&key);
		nemo_entry_key(b->ix, values, isnull, row_key, &key, &prefix, &null_distinct);
		/* the sort looks at the first bytes first: not at those of the tree, which are the same in all keys */
		appendBinaryStringInfo(&b->item, key.data + RB_TREE_LEN, key.len - RB_TREE_LEN);
		tail = (BuildTail) {(uint16) key.len, (uint16) prefix, null_distinct};
	}
	nemo_entry_value(b->info, b->ix, RelationGetDescr(index), values, isnull, rowid, row_key, &b->value);
	appendBinaryStringInfo(&b->item, b->value.data, b->value.len);
	appendBinaryStringInfo(&b->item, (char *) &tail, sizeof(tail));
	SET_VARSIZE(b->item.data, b->item.len);
	MemoryContextSwitchTo(old);

	tuplesort_putdatum(b->sort, PointerGetDatum(b->item.data), false);
	MemoryContextReset(b->row_cxt);
	b->rows++;
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

/* put one entry that the batch could not: something about its key had to be fetched first */
static void
load_one(BuildState *b, int i)
{
	rb_thread  *thread = nemo_thread();

	for (;;)
	{
		rb_version *v = nemo_prepare(b->keys[i].len, RB_DATA, 0, b->cid, LockTupleExclusive, b->values[i].data,
									 b->values[i].len);
		const rb_version *head;
		NemoChain	chain;
		bool		done;

		nemo_lookup_enter(b->keys[i], true, &head);
		nemo_examine(head, LockTupleExclusive, &chain);
		done = nemo_install(b->keys[i], v, &chain);
		rb_leave(thread);
		if (done)
			return;
		nemo_discard(v);
	}
}

static void
flush_chunk(BuildState *b)
{
	rb_thread  *thread = nemo_thread();
	rb_version *versions[CHANGES_PER_RECORD];
	NemoChange	changes[CHANGES_PER_RECORD];
	int			done = 0;

	for (int i = 0; i < b->n; i++)
		versions[i] = nemo_prepare(b->keys[i].len, RB_DATA, 0, b->cid, LockTupleExclusive, b->values[i].data,
								   b->values[i].len);
	rb_enter(thread);
	for (; done < b->n; done++)
	{
		rb_put_args args = {
			.key = b->keys[done],
			.v = versions[done],
			.dirty = true,
		};

		if (rb_put(thread, &args) != RB_OK)
			break;
		changes[done] = (NemoChange) {b->keys[done], versions[done]};
	}
	if (done > 0)
		nemo_log_changes(changes, done);
	rb_leave(thread);

	for (int i = done; i < b->n; i++)
		nemo_discard(versions[i]);
	for (int i = done; i < b->n; i++)
		load_one(b, i);

	nemo_tree_count(b->ix->tree, b->n, b->bytes);
	b->n = 0;
	b->bytes = 0;
	MemoryContextReset(b->chunk_cxt);
}

static void
duplicate(BuildState *b, rb_slice key, rb_slice value)
{
	TupleDesc	desc = RelationGetDescr(b->index);
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];
	NemoEntryValue parts;
	char	   *words;

	nemo_entry_parse(value.data, value.len, &parts);
	nemo_entry_columns(b->ix, desc, key, parts.extra, values, isnull);
	words = BuildIndexValueDescription(b->index, values, isnull);
	ereport(ERROR,
			(errcode(ERRCODE_UNIQUE_VIOLATION),
			 errmsg("could not create unique index \"%s\"", RelationGetRelationName(b->index)),
			 words ? errdetail("Key %s is duplicated.", words) : errdetail("Duplicate keys exist."),
			 errtableconstraint(b->heap, RelationGetRelationName(b->index))));
}

static bool
next_sorted(BuildState *b, Datum *datum)
{
	bool		isnull;

#if PG_VERSION_NUM >= 160000
	return tuplesort_getdatum(b->sort, true, true, datum, &isnull, NULL);
#else
	return tuplesort_getdatum(b->sort, true, datum, &isnull, NULL);
#endif
}

static void
load_sorted(BuildState *b)
{
	MemoryContext old = MemoryContextSwitchTo(b->chunk_cxt);
	StringInfoData last;		/* prefix of the previous entry, empty if it may have equals */
	Datum		datum;

	MemoryContextSwitchTo(old);
	initStringInfo(&last);
	MemoryContextSwitchTo(b->chunk_cxt);
	while (next_sorted(b, &datum))
	{
		bytea	   *item = DatumGetByteaP(datum);
		const uint8 *data = (const uint8 *) VARDATA_ANY(item);
		uint32		len = VARSIZE_ANY_EXHDR(item) - sizeof(BuildTail);
		BuildTail	tail;
		uint8	   *key_bytes;
		rb_slice	key;
		rb_slice	value;

		CHECK_FOR_INTERRUPTS();
		memcpy(&tail, data + len, sizeof(tail));
		key_bytes = palloc(tail.key_len);
		nemo_put_be64(key_bytes, b->ix->tree);
		memcpy(key_bytes + RB_TREE_LEN, data, tail.key_len - RB_TREE_LEN);
		key = (rb_slice) {key_bytes, tail.key_len};
		value = (rb_slice) {data + tail.key_len - RB_TREE_LEN, len + RB_TREE_LEN - tail.key_len};
		if (b->index->rd_index->indisunique)
		{
			if (!tail.null_distinct && last.len == tail.prefix && memcmp(last.data, key.data, tail.prefix) == 0)
				duplicate(b, key, value);
			resetStringInfo(&last);
			if (!tail.null_distinct)
				appendBinaryStringInfo(&last, (const char *) key.data, tail.prefix);
		}
		b->keys[b->n] = key;
		b->values[b->n] = value;
		b->n++;
		b->bytes += key.len + value.len;
		if (b->n == CHANGES_PER_RECORD || b->bytes > 1024 * 1024)
			flush_chunk(b);
	}
	if (b->n > 0)
		flush_chunk(b);
	MemoryContextSwitchTo(old);
	pfree(last.data);
}

static void
build_entries(BuildState *b, IndexInfo *ii)
{
	TypeCacheEntry *type = lookup_type_cache(BYTEAOID, TYPECACHE_LT_OPR);

#if PG_VERSION_NUM >= 150000
	b->sort = tuplesort_begin_datum(BYTEAOID, type->lt_opr, InvalidOid, false, maintenance_work_mem, NULL,
									TUPLESORT_NONE);
#endif
	b->row_cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo index build row", ALLOCSET_DEFAULT_SIZES);
	b->chunk_cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo index build chunk", ALLOCSET_DEFAULT_SIZES);
	initStringInfo(&b->item);
	initStringInfo(&b->value);
	initStringInfo(&b->row_key);
	(void) table_index_build_scan(b->heap, b->index, ii, false, true, collect, b, NULL);
	tuplesort_performsort(b->sort);
	b->cid = GetCurrentCommandId(true);
	load_sorted(b);
	tuplesort_end(b->sort);
	MemoryContextDelete(b->row_cxt);
	MemoryContextDelete(b->chunk_cxt);
	pfree(b->item.data);
	pfree(b->value.data);
	pfree(b->row_key.data);
}

/* ---- placement --------------------------------------------------------------------------------------------------- */

static bool
find_any(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) i;
	/* the fence is no record */
	if (key.len > RB_TREE_LEN && nemo_visible(head, SnapshotAny) != NULL)
	{
		*(bool *) arg = true;
		return false;
	}
	return true;
}

static bool
tree_is_empty(NemoTree tree)
{
	uint8		start[RB_TREE_LEN];
	uint8		end[RB_TREE_LEN];
	uint8_t		resume[RB_MAX_KEY + 1];
	uint32_t	resume_len;
	bool		found = false;
	bool		done;
	rb_error	err;
	rb_status	status;

	nemo_put_be64(start, tree);
	nemo_put_be64(end, tree + 1);
	status = rb_read_range(nemo_thread(), (rb_slice) {start, RB_TREE_LEN}, (rb_slice) {end, RB_TREE_LEN}, false, 0, 32,
						   find_any, &found, &done, resume, &resume_len, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	return !found;
}

/*
 * REINDEX has given the clustered index a new, empty file and scheduled the old one, whose tree holds the rows, for
 * removal.  There is nothing to rebuild in it: point the catalog at the old file again and let the new one go.
 */
static void
keep_row_tree(Relation index, NemoTree row_tree)
{
	Relation	pg_class = table_open(RelationRelationId, RowExclusiveLock);
	HeapTuple	tuple = SearchSysCacheCopy1(RELOID, ObjectIdGetDatum(RelationGetRelid(index)));
	NemoRelFile old = NEMO_RELFILE(index);

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "could not find tuple for relation %u", RelationGetRelid(index));
	NEMO_RELFILE_NUMBER(old) = (NemoRelFileNumber) (row_tree & 0xFFFFFFFF);
	RelationDropStorage(index);
	RelationPreserveStorage(old, true);
	((Form_pg_class) GETSTRUCT(tuple))->relfilenode = NEMO_RELFILE_NUMBER(old);
	CatalogTupleUpdate(pg_class, &tuple->t_self, tuple);
	heap_freetuple(tuple);
	table_close(pg_class, RowExclusiveLock);
	CommandCounterIncrement();
}

/* a table's rows must not stay behind in an index that is about to be replaced by a copy of itself */
static void
refuse_concurrent_copy(Relation heap, Relation index, NemoRelInfo *info)
{
	Form_pg_index mine = index->rd_index;

	if (!mine->indisunique)
		return;
	for (int i = 0; i < info->nindexes; i++)
	{
		Form_pg_index theirs;
		Relation	other;
		bool		same;

		if (!info->indexes[i].clustered)
			continue;
		other = index_open(info->indexes[i].oid, AccessShareLock);
		theirs = other->rd_index;
		same = mine->indnatts == theirs->indnatts && mine->indnkeyatts == theirs->indnkeyatts &&
			memcmp(mine->indkey.values, theirs->indkey.values, mine->indnatts * sizeof(int16)) == 0;
		index_close(other, NoLock);
		if (same)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("cannot build a copy of the primary key of nemo table \"%s\" concurrently",
							RelationGetRelationName(heap)),
					 errdetail("The rows of the table are stored in its primary key."),
					 errhint("Use REINDEX without CONCURRENTLY.")));
	}
}

static bool
may_cluster(Relation index, IndexInfo *ii)
{
	return index->rd_index->indisprimary && index->rd_index->indimmediate && !ii->ii_Concurrent &&
		ii->ii_Expressions == NIL && ii->ii_Predicate == NIL;
}

/* ---- access method callbacks ------------------------------------------------------------------------------------- */

IndexBuildResult *
nemo_index_build(Relation heap, Relation index, IndexInfo *ii)
{
	NemoTree	table = nemo_tree_of(heap);
	NemoTree	tree = nemo_tree_of(index);
	bool		immediate = index->rd_index->indisunique && index->rd_index->indimmediate;
	IndexBuildResult *result = palloc0(sizeof(IndexBuildResult));
	NemoTreeInfo table_tree;
	BuildState	b = {0};

	if (!nemo_relation_is_nemo_table(heap))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" indexes only nemo tables", "nemo_index"),
				 errdetail("Table \"%s\" has another access method.", RelationGetRelationName(heap))));
	(void) nemo_thread();
	if (!nemo_tree_get(table, &table_tree))
		elog(ERROR, "table \"%s\" has no tree", RelationGetRelationName(heap));

	b.heap = heap;
	b.index = index;
	b.info = nemo_rel(heap);
	if (ii->ii_Concurrent)
		refuse_concurrent_copy(heap, index, b.info);

	if (may_cluster(index, ii) && ReindexIsProcessingIndex(RelationGetRelid(index)) &&
		table_tree.row_tree != table && table_tree.row_tree != tree)
	{
		bool		owned = false;

		for (int i = 0; i < b.info->nindexes; i++)
			owned |= b.info->indexes[i].tree == table_tree.row_tree &&
				b.info->indexes[i].oid != RelationGetRelid(index);
		if (!owned && (table_tree.row_tree >> 32) == (tree >> 32))
		{
			double		rows,
						bytes;

			keep_row_tree(index, table_tree.row_tree);
			nemo_tree_estimate(table_tree.row_tree, &rows, &bytes);
			result->heap_tuples = result->index_tuples = rows;
			return result;
		}
	}

	nemo_tree_create(tree, table, NEMO_TREE_INDEX | (immediate ? NEMO_TREE_UNIQUE_KEY : 0));

	b.ix = palloc0(sizeof(NemoIndexInfo));
	b.ix->oid = RelationGetRelid(index);
	b.ix->tree = tree;
	b.ix->unique = immediate;
	b.ix->desc = nemo_key_desc(index, CurrentMemoryContext);
	b.ix->ii = ii;

	if (may_cluster(index, ii) && nemo_tree_is_new(&table_tree) && table_tree.row_tree == table && tree_is_empty(table))
	{
		nemo_tree_set_placement(table, tree, NEMO_TREE_TABLE |
								(nemo_key_is_integer(b.ix->desc) ? NEMO_TREE_INTKEY : 0));
		CacheInvalidateRelcache(heap);
		return result;
	}

	build_entries(&b, ii);
	/* sets indcheckxmin; nobody else's snapshot can matter to a table of this transaction's own */
	if (b.rows > 0 && !(table_tree.creator_xid != 0 &&
						TransactionIdIsCurrentTransactionId((TransactionId) table_tree.creator_xid)))
		ii->ii_BrokenHotChain = true;
	result->heap_tuples = result->index_tuples = b.rows;
	return result;
}

void
nemo_index_build_empty(Relation index)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("index \"%s\": nemo does not support unlogged tables", RelationGetRelationName(index)),
			 errhint("Use a permanent table.")));
}
