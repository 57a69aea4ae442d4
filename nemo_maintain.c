/*
 * nemo_maintain.c
 *	  New files, TRUNCATE, VACUUM, VACUUM FULL and the reading half of index builds.
 *
 * The rows of a relation are in the tree that its relation file names; the file itself stays empty.  Whatever gives a
 * relation a new file gives it a new, empty tree, and the old tree goes when PostgreSQL deletes the old file (F6).
 */
#include "nemo_table.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/relscan.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_class.h"
#include "catalog/storage.h"
#include "commands/dbcommands.h"
#include "commands/progress.h"
#include "commands/vacuum.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/smgr.h"
#include "utils/backend_progress.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "nemo_ddl.h"
#include "nemo_index.h"
#include "nemo_log.h"

#define COPY_ROWS		256		/* rows that a rewrite inserts at a time, at most */
#define COPY_BYTES		(1024 * 1024)	/* or so many bytes */
#define PROGRESS_EVERY	1000	/* rows between two reports of an index build */

/* ---- new files ----------------------------------------------------------------------------------------------------- */

/*
 * The file comes first: its deletion at abort takes the tree along.  A relation that is not permanent gets no tree.  It
 * is refused as soon as its catalog row exists (nemo_ddl.c) or turns out to be a heap, and the number of a temporary
 * file may be that of some permanent one's tree.
 */
void
nemo_set_new_file(Relation rel, const NemoRelFile *file, char persistence, TransactionId *freeze_xid,
				  MultiXactId *minmulti)
{
	NemoTree	tree = (uint64) NEMO_RELFILE_DB(*file) << 32 | NEMO_RELFILE_NUMBER(*file);
	SMgrRelation smgr;

	(void) rel;
	if (persistence == RELPERSISTENCE_PERMANENT)
		(void) nemo_thread();
	*freeze_xid = RecentXmin;
	*minmulti = GetOldestMultiXactId();
	smgr = RelationCreateStorage(*file, persistence, true);
	smgrclose(smgr);
	if (persistence == RELPERSISTENCE_PERMANENT)
		nemo_tree_create(tree, tree, NEMO_TREE_TABLE);
}

/*
 * TRUNCATE of a table whose file is of this subtransaction's making: core would empty files in place and build the
 * indexes anew in theirs.  A tree is never emptied, so table and indexes get new files here as well, and the builds that
 * follow find new trees to fill.
 */
void
nemo_nontransactional_truncate(Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	nemo_relation_set_new_file(rel, rel->rd_rel->relpersistence);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessExclusiveLock);

		nemo_relation_set_new_file(index, index->rd_rel->relpersistence);
		index_close(index, NoLock);
	}
	list_free(indexes);
}

void
nemo_copy_data(Relation rel, const NemoRelFile *file)
{
	(void) file;
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("cannot change the tablespace of nemo table \"%s\"", RelationGetRelationName(rel)),
			 errdetail("Its rows are kept in Nemo's store, not in files of the database cluster."),
			 errhint("Leave the table in the default tablespace of its database.")));
}

/* ---- rewriting ----------------------------------------------------------------------------------------------------- */

typedef struct Rewrite
{
	Relation	new;
	CommandId	cid;
	MemoryContext cxt;			/* scratch of one batch */
	TupleTableSlot *slots[COPY_ROWS];
	int			n;
	Size		bytes;
	double		rows;
} Rewrite;

static void
write_batch(Rewrite *w)
{
	MemoryContext old;

	if (w->n == 0)
		return;
	old = MemoryContextSwitchTo(w->cxt);
	nemo_multi_insert(w->new, w->slots, w->n, w->cid, 0, NULL);
	MemoryContextSwitchTo(old);
	MemoryContextReset(w->cxt);
	for (int i = 0; i < w->n; i++)
		ExecClearTuple(w->slots[i]);
	w->rows += w->n;
	w->n = 0;
	w->bytes = 0;
	pgstat_progress_update_param(PROGRESS_CLUSTER_HEAP_TUPLES_WRITTEN, (int64) w->rows);
}

static void
write_row(Rewrite *w, Relation old, HeapTuple tuple)
{
	CHECK_FOR_INTERRUPTS();
	if (w->slots[w->n] == NULL)
		w->slots[w->n] = table_slot_create(old, NULL);
	ExecStoreHeapTuple(heap_copytuple(tuple), w->slots[w->n++], true);
	w->bytes += tuple->t_len;
	pgstat_progress_update_param(PROGRESS_CLUSTER_HEAP_TUPLES_SCANNED, (int64) w->rows + w->n);
	if (w->n == COPY_ROWS || w->bytes >= COPY_BYTES)
		write_batch(w);
}

static void
rewrite_in_index_order(Rewrite *w, Relation old, Relation index, Snapshot snapshot)
{
	TupleTableSlot *slot = table_slot_create(old, NULL);
	IndexScanDesc scan;

#if PG_VERSION_NUM >= 180000
	scan = index_beginscan(old, index, snapshot, NULL, 0, 0);
#else
	scan = index_beginscan(old, index, snapshot, 0, 0);
#endif
	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, slot))
		write_row(w, old, ExecFetchSlotHeapTuple(slot, false, NULL));
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
}

static void
rewrite_in_row_order(Rewrite *w, Relation old, Snapshot snapshot)
{
	TableScanDesc scan = nemo_scan_begin(old, snapshot, 0, NULL, NULL, SO_TYPE_SEQSCAN);
	ScanRow    *row;

	while ((row = nemo_scan_row((NemoScan *) scan, ForwardScanDirection)) != NULL)
		write_row(w, old, row->tuple);
	nemo_scan_end(scan);
}

/*
 * VACUUM FULL.  The new table has no index yet, so its rows are keyed by new rowids; nemo_fix_placement() puts them into
 * the primary key's tree afterwards.  They are this transaction's: as after TRUNCATE, older snapshots see no rows.  An
 * index gives its order as it is read, sorting (use_sort) would gain nothing.
 */
void
nemo_copy_for_cluster(Relation old, Relation new, Relation index, bool use_sort, TransactionId oldest,
					  TransactionId *xid_cutoff, MultiXactId *multi_cutoff, double *num_tuples,
					  double *tups_vacuumed, double *tups_recently_dead)
{
	Rewrite    *w = palloc0(sizeof(Rewrite));
	Snapshot	snapshot;

	(void) use_sort;
	(void) oldest;
	(void) xid_cutoff;
	(void) multi_cutoff;
	(void) nemo_thread();
	/* nothing written here is older than the cutoffs, and a checkpoint puts the log beyond them, as for VACUUM */
	nemo_request_checkpoint(true);
	snapshot = RegisterSnapshot(GetLatestSnapshot());

	w->new = new;
	w->cid = GetCurrentCommandId(true);
	w->cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo rewrite", ALLOCSET_DEFAULT_SIZES);
	pgstat_progress_update_param(PROGRESS_CLUSTER_PHASE, index != NULL ? PROGRESS_CLUSTER_PHASE_INDEX_SCAN_HEAP :
								 PROGRESS_CLUSTER_PHASE_SEQ_SCAN_HEAP);
	if (index != NULL)
		rewrite_in_index_order(w, old, index, snapshot);
	else
		rewrite_in_row_order(w, old, snapshot);
	write_batch(w);
	UnregisterSnapshot(snapshot);

	*num_tuples = w->rows;
	*tups_vacuumed = *tups_recently_dead = 0;
	for (int i = 0; i < COPY_ROWS && w->slots[i] != NULL; i++)
		ExecDropSingleTupleTableSlot(w->slots[i]);
	MemoryContextDelete(w->cxt);
	pfree(w);
}

/* ---- reading for an index build ------------------------------------------------------------------------------------ */

typedef struct BuildProgress
{
	bool		wanted;
	double		rows;			/* estimates of the whole table */
	BlockNumber pages;
} BuildProgress;

static void
begin_progress(BuildProgress *progress, Relation rel, bool wanted)
{
	progress->wanted = wanted;
	if (!wanted)
		return;
	nemo_relation_estimate(rel, &progress->rows, &progress->pages);
	pgstat_progress_update_param(PROGRESS_SCAN_BLOCKS_TOTAL, progress->pages);
	pgstat_progress_update_param(PROGRESS_SCAN_BLOCKS_DONE, 0);
}

static void
report_progress(const BuildProgress *progress, double rows, bool done)
{
	double		part = done ? 1.0 : Min(rows / Max(progress->rows, 1.0), 1.0);

	if (progress->wanted)
		pgstat_progress_update_param(PROGRESS_SCAN_BLOCKS_DONE, (int64) (part * progress->pages));
}

/*
 * The rows as they are now: what is committed, and what earlier commands of this transaction did.  Versions that only
 * older snapshots see get no entry, which the builder tells the planner (nemo_index_build.c, F8).  Rows still being
 * written by others are none: the build's lock on the table keeps writers out.
 */
double
nemo_build_range_scan(Relation rel, Relation index, struct IndexInfo *ii, bool allow_sync, bool anyvisible,
					  bool progress, BlockNumber start, BlockNumber nblocks, IndexBuildCallback callback, void *state,
					  TableScanDesc scan)
{
	NemoRelInfo *info;
	Snapshot	snapshot = NULL;
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	EState	   *estate = CreateExecutorState();
	ExprContext *econtext = GetPerTupleExprContext(estate);
	ExprState  *predicate;
	BuildProgress report;
	ScanRow    *row;
	uint64		rows = 0;

	(void) allow_sync;
	(void) anyvisible;
	if (start != 0 || nblocks != InvalidBlockNumber)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("index \"%s\" cannot be built on a part of nemo table \"%s\"",
						RelationGetRelationName(index), RelationGetRelationName(rel)),
				 errdetail("The rows of the table have no physical order."),
				 errhint("Use access method \"nemo_index\".")));

	(void) nemo_thread();
	info = nemo_rel(rel);
	econtext->ecxt_scantuple = slot;
	predicate = ExecPrepareQual(ii->ii_Predicate, estate);
	begin_progress(&report, rel, progress);
	if (scan == NULL)
	{
		snapshot = RegisterSnapshot(GetLatestSnapshot());
		scan = nemo_scan_begin(rel, snapshot, 0, NULL, NULL, SO_TYPE_SEQSCAN);
	}

	while ((row = nemo_scan_row((NemoScan *) scan, ForwardScanDirection)) != NULL)
	{
		NemoScan   *pass = (NemoScan *) scan;
		Datum		values[INDEX_MAX_KEYS];
		bool		isnull[INDEX_MAX_KEYS];

		CHECK_FOR_INTERRUPTS();
		rows++;
		if (rows % PROGRESS_EVERY == 0)
			report_progress(&report, (double) rows, false);
		MemoryContextReset(econtext->ecxt_per_tuple_memory);
		ExecStoreHeapTuple(row->tuple, slot, false);
		if (predicate != NULL && !ExecQual(predicate, econtext))
			continue;
		FormIndexDatum(ii, slot, estate, values, isnull);
		/* the callback asks for the row's key */
		nemo_remember_row(info, row->rowid,
						  (rb_slice) {(const uint8_t *) pass->keys.data + row->key, row->key_len});
		callback(index, &row->tuple->t_self, values, isnull, true, state);
	}
	report_progress(&report, (double) rows, true);

	table_endscan(scan);
	if (snapshot != NULL)
		UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	FreeExecutorState(estate);
	/* they were the estate's */
	ii->ii_ExpressionsState = NIL;
	ii->ii_PredicateState = NULL;
	return (double) rows;
}

void
nemo_validate_scan(Relation rel, Relation index, struct IndexInfo *ii, Snapshot snapshot,
				   struct ValidateIndexState *state)
{
	(void) ii;
	(void) snapshot;
	(void) state;
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("index \"%s\" on nemo table \"%s\" cannot be built concurrently",
					RelationGetRelationName(index), RelationGetRelationName(rel)),
			 errdetail("Rows that are written while such an index is built cannot be told from those already in it."),
			 errhint("Drop the index and create it without CONCURRENTLY.")));
}

/* ---- VACUUM -------------------------------------------------------------------------------------------------------- */

/* every version of the tree that a transaction before the horizon wrote becomes settled, or goes */
static void
settle_tree(NemoTree tree)
{
	uint8		start[RB_TREE_LEN];
	uint8		end[RB_TREE_LEN];
	rb_error	err = {0};
	rb_status	status;

	CHECK_FOR_INTERRUPTS();
	nemo_put_be64(start, tree);
	nemo_put_be64(end, tree + 1);
	status = rb_settle_range(nemo_thread(), (rb_slice) {start, RB_TREE_LEN}, (rb_slice) {end, RB_TREE_LEN}, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
}

static void
settle_relation(Relation rel, List *indexes)
{
	NemoRelInfo *info = nemo_rel(rel);
	bool		rows_done = !info->clustered;
	ListCell   *lc;

	pgstat_progress_update_param(PROGRESS_VACUUM_PHASE, PROGRESS_VACUUM_PHASE_SCAN_HEAP);
	settle_tree(info->tree);

	pgstat_progress_update_param(PROGRESS_VACUUM_PHASE, PROGRESS_VACUUM_PHASE_VACUUM_INDEX);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);
		NemoTree	tree = nemo_tree_of(index);
		NemoTreeInfo known;

		if (nemo_relation_is_nemo_index(index) && nemo_tree_get(tree, &known))
		{
			settle_tree(tree);
			rows_done |= tree == info->row_tree;
		}
		index_close(index, NoLock);
	}
	/* the index that held the rows has just been dropped */
	if (!rows_done)
		settle_tree(info->row_tree);
}

static void
update_statistics(Relation rel, BlockNumber pages, double rows, bool has_index, TransactionId frozen,
				  MultiXactId minmulti)
{
	/* no visibility map is needed to read an index only: all pages count as visible */
	BlockNumber visible = rel->rd_rel->relkind == RELKIND_INDEX ? 0 : pages;

#if PG_VERSION_NUM >= 180000
	vac_update_relstats(rel, pages, rows, visible, 0, has_index, frozen, minmulti, NULL, NULL, false);
#else
	vac_update_relstats(rel, pages, rows, visible, has_index, frozen, minmulti, NULL, NULL, false);
#endif
}

static void
update_index_statistics(List *indexes)
{
	ListCell   *lc;

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);
		BlockNumber pages;
		double		rows;
		int			height;

		if (nemo_relation_is_nemo_index(index))
		{
			nemo_index_estimate(RelationGetRelid(index), &pages, &rows, &height);
			update_statistics(index, pages, rows, false, InvalidTransactionId, InvalidMultiXactId);
		}
		index_close(index, NoLock);
	}
}

/*
 * Reads all that the relation has in the store and in memory, and settles it; then no transaction before the horizon is
 * named there any more (F7).  The log may name older ones until a checkpoint has passed, so that comes before
 * relfrozenxid moves: replay asks the commit log about every writer it meets.  Nothing is dead after that, as writers
 * drop outdated versions and entries themselves.
 */
void
nemo_relation_vacuum(Relation rel, struct VacuumParams *params, BufferAccessStrategy strategy)
{
	List	   *indexes = RelationGetIndexList(rel);
	TimestampTz started = GetCurrentTimestamp();
	MultiXactId minmulti = GetOldestMultiXactId();
	TransactionId frozen;
	BlockNumber pages;
	double		rows;
	int			level = (params->options & VACOPT_VERBOSE) ? INFO : DEBUG2;

	(void) strategy;
	(void) nemo_thread();
	pgstat_progress_start_command(PROGRESS_COMMAND_VACUUM, RelationGetRelid(rel));
	ereport(level,
			(errmsg("vacuuming \"%s.%s.%s\"", get_database_name(MyDatabaseId),
					get_namespace_name(RelationGetNamespace(rel)), RelationGetRelationName(rel))));

	/* what is settled below is settled by this horizon or a later one */
	nemo_horizon_refresh();
	frozen = (TransactionId) nemo_settle_horizon();
	settle_relation(rel, indexes);

	pgstat_progress_update_param(PROGRESS_VACUUM_PHASE, PROGRESS_VACUUM_PHASE_FINAL_CLEANUP);
	nemo_request_checkpoint(true);

	nemo_relation_estimate(rel, &rows, &pages);
	update_statistics(rel, pages, rows, indexes != NIL, frozen, minmulti);
	update_index_statistics(indexes);
#if PG_VERSION_NUM >= 180000
	pgstat_report_vacuum(RelationGetRelid(rel), rel->rd_rel->relisshared, (PgStat_Counter) rows, 0, started);
#else
	pgstat_report_vacuum(RelationGetRelid(rel), rel->rd_rel->relisshared, (PgStat_Counter) rows, 0);
#endif
	pgstat_progress_end_command();
	ereport(level,
			(errmsg("finished vacuuming \"%s\": %.0f rows, %d indexes, new relfrozenxid: %u, %ld ms",
					RelationGetRelationName(rel), rows, list_length(indexes), frozen,
					TimestampDifferenceMilliseconds(started, GetCurrentTimestamp()))));
	list_free(indexes);
}
