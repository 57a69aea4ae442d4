/*
 * nemo_table.h
 *	  What the files of the table access method share (nemo_am.c, nemo_scan.c, nemo_modify.c, nemo_mvcc.c, nemo_rel.c,
 *	  nemo_row.c).
 */
#ifndef NEMO_TABLE_H
#define NEMO_TABLE_H

#include "nemo.h"

#include "nodes/execnodes.h"

static inline rb_slice
nemo_slice(const StringInfoData *s)
{
	return (rb_slice) {(const uint8_t *) s->data, (uint32_t) s->len};
}

/* ---- nemo_mvcc.c --------------------------------------------------------------------------------------------------- */

typedef enum NemoWriter
{
	NEMO_OWN,					/* the current transaction, any of its subtransactions */
	NEMO_RUNNING,
	NEMO_COMMITTED,
	NEMO_ABORTED
} NemoWriter;

extern NemoWriter nemo_writer(const rb_version *v);
/* as nemo_visible(), but returns the version that decides, also when it says "deleted" */
extern const rb_version *nemo_decide(const rb_version *head, Snapshot snapshot);
/*
 * Let `look` see what is known about one key, fetching it if need be.  It runs inside the guard and must copy what it
 * wants to keep; head is NULL when the key is absent.
 */
typedef void (*NemoLook) (void *arg, const rb_version *head);
extern void nemo_look(rb_slice key, NemoLook look, void *arg);
/* the caller has put this prepared version by himself */
extern void nemo_installed(rb_version *v);
/* put one version of a key that has never existed; the caller logs it.  Inside the guard */
extern void nemo_put_fresh(const NemoChange *change);
/* Install versions of keys that have never existed (new rowids), without looking, and log them.  Outside the guard. */
extern void nemo_install_fresh(const NemoChange *changes, int n);
/* nemo_install(), with one more version of a key that has never existed (v NULL: none) in the same log record */
extern bool nemo_install_with(rb_slice key, rb_version *v, const NemoChain *chain, const NemoChange *fresh);

/*
 * Between these two, data versions in the table's and its indexes' trees are installed as speculative, and remembered.
 * The end confirms them or takes them back.
 */
extern void nemo_speculative_begin(const NemoRelInfo *info, uint32 token);
extern void nemo_speculative_end(bool confirm);

/* running counts for the planner, collected in this process and published now and then, at the latest at commit */
extern void nemo_count(NemoTree tree, int64 rows, int64 bytes);

extern void nemo_mvcc_init(void);	/* transaction callbacks, once per process */

/* ---- nemo_rel.c ---------------------------------------------------------------------------------------------------- */

/* an integer key is its own rowid when it is in range */
static inline bool
nemo_rowid_in_key(const NemoRelInfo *info, uint64 rowid)
{
	return !info->clustered || (info->intkey && rowid < NEMO_ROWID_FIRST);
}

/* the rowid that a key of the row tree is by itself; false: it is not */
extern bool nemo_key_is_rowid(const NemoRelInfo *info, rb_slice row_key, uint64 *rowid);
/* The clustered index; raises when the table is between two primary keys. */
extern NemoIndexInfo *nemo_clustered_index(Relation rel, NemoRelInfo *info);
/* executor state in which the index expressions and predicates of this table are evaluated; the caller resets it */
extern EState *nemo_index_estate(NemoRelInfo *info);
/* does the row in the slot belong in the index?  estate from nemo_index_estate() */
extern bool nemo_index_wants(NemoIndexInfo *ix, TupleTableSlot *slot, EState *estate);

/* ---- nemo_insert.c ------------------------------------------------------------------------------------------------- */

/* a formed row waits to be placed under its key; the bytes are copied */
extern void nemo_add_pending(NemoRelInfo *info, uint64 rowid, CommandId cid, rb_slice key, const StringInfoData *data);
/* the row tree's key of a row in a slot; reset first.  Raises 23502 */
extern void nemo_primary_key(Relation rel, NemoIndexInfo *pk, TupleTableSlot *slot, StringInfo key);
/* the key (16 bytes) of a rowid in the table's tree: the row itself, or its map record */
extern void nemo_map_key(const NemoRelInfo *info, uint64 rowid, uint8 *key);

/* key of a row that was formed but not yet placed; false: there is no such row */
extern bool nemo_pending_key(NemoTree row_tree, uint64 rowid, StringInfo out);

extern void nemo_tuple_insert(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
							  struct BulkInsertStateData *bistate);
extern void nemo_tuple_insert_speculative(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
										  struct BulkInsertStateData *bistate, uint32 token);
extern void nemo_tuple_complete_speculative(Relation rel, TupleTableSlot *slot, uint32 token, bool succeeded);
extern void nemo_multi_insert(Relation rel, TupleTableSlot **slots, int nslots, CommandId cid, int options,
							  struct BulkInsertStateData *bistate);

/* ---- nemo_modify.c, nemo_lock.c ------------------------------------------------------------------------------------ */

extern TM_Result nemo_tuple_delete(Relation rel, ItemPointer tid, CommandId cid, Snapshot snapshot,
								   Snapshot crosscheck, bool wait, TM_FailureData *tmfd, bool changing_part);
extern TM_Result nemo_tuple_update(Relation rel, ItemPointer otid, TupleTableSlot *slot, CommandId cid,
								   Snapshot snapshot, Snapshot crosscheck, bool wait, TM_FailureData *tmfd,
								   LockTupleMode *lockmode, NemoUpdateIndexes *update_indexes);
extern TM_Result nemo_tuple_lock(Relation rel, ItemPointer tid, Snapshot snapshot, TupleTableSlot *slot, CommandId cid,
								 LockTupleMode mode, LockWaitPolicy policy, uint8 flags, TM_FailureData *tmfd);

/* ---- nemo_target.c ------------------------------------------------------------------------------------------------- */

/* What a ctid leads to, in the eyes of a writer or locker. */
typedef struct NemoTarget
{
	TM_Result	result;			/* Ok, Invisible, SelfModified, Updated, Deleted */
	const rb_version *version;	/* the version the ctid names, or NULL */
	bool		newest;			/* it is the newest one, and the ctid's holder may know that */
	bool		moved;			/* the row went on at `ctid`, under another key or in another partition */
	ItemPointerData ctid;		/* where the newest version is */
	TransactionId xmax;			/* who outdated it ... */
	CommandId	cmax;			/* ... and when, if it was us */
} NemoTarget;

/*
 * Judge a ctid on a chain.  trust_tag: the tag alone identifies the newest version (see nemo_target.c).
 * Inside the guard.
 */
extern void nemo_target(NemoRelInfo *info, rb_slice key, const NemoChain *chain, ItemPointer tid, Snapshot snapshot,
						CommandId cid, bool trust_tag, NemoTarget *target);
/* the version that SnapshotAny means by (rowid, tag); raises when it cannot tell.  Inside the guard */
extern const rb_version *nemo_version_of(Relation rel, NemoRelInfo *info, rb_slice key, const rb_version *head,
										 uint64 rowid, uint8 tag);

/* ---- nemo_lock.c --------------------------------------------------------------------------------------------------- */

/* One row that is to be changed or locked. */
typedef struct NemoRow
{
	Relation	rel;
	NemoRelInfo *info;
	ItemPointerData tid;
	uint64		rowid;
	StringInfoData key;			/* in the row tree */
	NemoChain	chain;			/* as last looked at */
	NemoTarget	target;
	bool		queued;			/* holds the heavyweight tuple lock */
	LOCKMODE	queue_mode;
} NemoRow;

/* false: no row was ever there.  Memory in CurrentMemoryContext; nemo_row_done() gives back lock and memory. */
extern bool nemo_row_begin(NemoRow *row, Relation rel, ItemPointer tid, Snapshot snapshot);
/*
 * Judge the row until it is settled whether it may be changed or locked in `mode`, waiting for others.  TM_Ok: the guard
 * is held; TM_BeingModified only if not wait, TM_WouldBlock for LockWaitSkip.
 */
extern TM_Result nemo_row_judge(NemoRow *row, LockTupleMode mode, Snapshot snapshot, CommandId cid, bool trust_tag,
								bool wait, LockWaitPolicy policy, XLTW_Oper oper);
extern void nemo_row_failure(const NemoRow *row, TM_FailureData *tmfd);
extern void nemo_row_done(NemoRow *row);
/* a copy of a version's data in CurrentMemoryContext; inside the guard */
extern StringInfo nemo_copy_version(const rb_version *v);

/* ---- nemo_scan.c, nemo_sample.c ------------------------------------------------------------------------------------ */

typedef struct ScanRow
{
	HeapTuple	tuple;
	uint64		rowid;
	uint32		key;			/* offset in the batch's keys */
	uint32		key_len;
} ScanRow;

/*
 * An ordered pass over the rows of a table.  A batch is what is visible in [lo, hi) of the row tree; it knows its bounds,
 * so the scan may turn around anywhere.
 */
typedef struct NemoScan
{
	TableScanDescData base;
	NemoRelInfo *info;
	Snapshot	snapshot;		/* base.rs_snapshot, or what stands for it */
	MemoryContext cxt;			/* of the scan */
	MemoryContext batch_cxt;	/* rows of the batch; reset for each */

	StringInfoData first;		/* bounds of the whole scan */
	StringInfoData last;
	StringInfoData lo;			/* bounds of the batch */
	StringInfoData hi;
	bool		started;
	bool		at_first;		/* lo is first */
	bool		at_last;		/* hi is last */
	uint32		step;			/* records to ask for next */
	ScanRow    *rows;
	int			nrows;
	int			max_rows;
	int			pos;			/* of the current row */
	Size		batch_bytes;
	StringInfoData keys;
	ItemPointerData min_tid;	/* range of ctids */
	ItemPointerData max_tid;
	bool		by_tid;
	bool		claimed;		/* parallel scan: this process reads */

	/* sample scan and ANALYZE: blocks of consecutive rows */
	uint64		next_row;		/* number of the row the pass returns next */
	uint64		nrows_total;
	uint64		nblocks;
	BlockNumber next_block;
	HeapTuple  *block;
	int			block_rows;
	MemoryContext block_cxt;
	uint64		block_left;

	/* bitmap scan */
	int			bitmap_pos;
} NemoScan;

extern TableScanDesc nemo_scan_begin(Relation rel, Snapshot snapshot, int nkeys, struct ScanKeyData *keys,
									 ParallelTableScanDesc pscan, uint32 flags);
extern void nemo_scan_end(TableScanDesc scan);
extern void nemo_scan_rescan(TableScanDesc scan, struct ScanKeyData *keys, bool set_params, bool allow_strat,
							 bool allow_sync, bool allow_pagemode);
extern bool nemo_scan_next(TableScanDesc scan, ScanDirection direction, TupleTableSlot *slot);
/* the next visible row of the pass, or NULL; valid until the next call */
extern ScanRow *nemo_scan_row(NemoScan *scan, ScanDirection direction);
extern void nemo_scan_restart(NemoScan *scan);
extern void nemo_scan_set_tidrange(TableScanDesc scan, ItemPointer mintid, ItemPointer maxtid);
extern Size nemo_parallelscan_estimate(Relation rel);
extern Size nemo_parallelscan_initialize(Relation rel, ParallelTableScanDesc pscan);
extern void nemo_parallelscan_reinitialize(Relation rel, ParallelTableScanDesc pscan);
#if PG_VERSION_NUM < 180000
extern bool nemo_scan_bitmap_next_block(TableScanDesc scan, struct TBMIterateResult *tbm);
extern bool nemo_scan_bitmap_next_tuple(TableScanDesc scan, struct TBMIterateResult *tbm, TupleTableSlot *slot);
#endif

extern bool nemo_sample_next_block(TableScanDesc scan, struct SampleScanState *sample);
extern bool nemo_sample_next_tuple(TableScanDesc scan, struct SampleScanState *sample, TupleTableSlot *slot);
extern bool nemo_analyze_next_block(TableScanDesc scan, BlockNumber block, BufferAccessStrategy strategy);
extern bool nemo_analyze_next_tuple(TableScanDesc scan, TransactionId oldest, double *live, double *dead,
									TupleTableSlot *slot);
extern void nemo_relation_estimate(Relation rel, double *rows, BlockNumber *pages);
extern uint64 nemo_relation_size(Relation rel, ForkNumber fork);
extern void nemo_relation_estimate_size(Relation rel, int32 *attr_widths, BlockNumber *pages, double *tuples,
										double *allvisfrac);

/* ---- nemo_maintain.c ----------------------------------------------------------------------------------------------- */

extern void nemo_relation_vacuum(Relation rel, struct VacuumParams *params, BufferAccessStrategy strategy);
extern void nemo_set_new_file(Relation rel, const NemoRelFile *file, char persistence, TransactionId *freeze_xid,
							  MultiXactId *minmulti);
extern void nemo_nontransactional_truncate(Relation rel);
extern void nemo_copy_data(Relation rel, const NemoRelFile *file);
extern void nemo_copy_for_cluster(Relation old, Relation new, Relation index, bool use_sort, TransactionId oldest,
								  TransactionId *xid_cutoff, MultiXactId *multi_cutoff, double *num_tuples,
								  double *tups_vacuumed, double *tups_recently_dead);
extern double nemo_build_range_scan(Relation rel, Relation index, struct IndexInfo *ii, bool allow_sync,
									bool anyvisible, bool progress, BlockNumber start, BlockNumber nblocks,
									IndexBuildCallback callback, void *state, TableScanDesc scan);
extern void nemo_validate_scan(Relation rel, Relation index, struct IndexInfo *ii, Snapshot snapshot,
							   struct ValidateIndexState *state);

#endif							/* NEMO_TABLE_H */
