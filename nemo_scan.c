/*
 * nemo_scan.c
 *	  Passes over a table: sequential, parallel, by range of ctids, and by bitmap.
 *
 * A pass reads the row tree in batches.  What is visible in a batch is copied under the guard and handed out from the
 * copies; the batch knows its bounds in the tree, so a pass may turn around anywhere and still see each row once.
 */
#include "nemo_table.h"

#include "access/heapam.h"
#include "access/relscan.h"
#include "access/valid.h"
#include "miscadmin.h"
#include "nodes/tidbitmap.h"
#include "pgstat.h"
#include "port/atomics.h"
#include "storage/predicate.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_index.h"

#define FIRST_STEP		32		/* records asked for at first; doubles */
#define LAST_STEP		1024
#define BATCH_BYTES		(4 * 1024 * 1024)

/* what a parallel scan's processes share: one of them reads */
typedef struct ParallelScan
{
	ParallelTableScanDescData base;
	pg_atomic_uint32 claimed;
} ParallelScan;

static void
set_bytes(StringInfo to, const void *data, uint32 len)
{
	resetStringInfo(to);
	appendBinaryStringInfo(to, data, (int) len);
}

/* ---- begin, end ---------------------------------------------------------------------------------------------------- */

static void
set_bounds(NemoScan *scan)
{
	uint8		fence[RB_TREE_LEN];

	nemo_put_be64(fence, scan->info->row_tree);
	set_bytes(&scan->first, fence, sizeof(fence));
	nemo_put_be64(fence, scan->info->row_tree + 1);
	set_bytes(&scan->last, fence, sizeof(fence));
	/* rows that are kept by rowid are in the order of their ctids */
	if (scan->by_tid && !scan->info->clustered)
	{
		uint64		block = ItemPointerGetBlockNumberNoCheck(&scan->min_tid);

		nemo_rowid_key(scan->info->tree, block << 4, &scan->first);
		block = ItemPointerGetBlockNumberNoCheck(&scan->max_tid);
		nemo_rowid_key(scan->info->tree, (block + 1) << 4, &scan->last);
	}
}

void
nemo_scan_restart(NemoScan *scan)
{
	set_bounds(scan);
	scan->started = false;
	scan->step = FIRST_STEP;
	scan->nrows = 0;
	scan->pos = -1;
	scan->next_row = 0;
	scan->next_block = 0;
	scan->block_rows = 0;
	scan->bitmap_pos = 0;
	MemoryContextReset(scan->batch_cxt);
}

TableScanDesc
nemo_scan_begin(Relation rel, Snapshot snapshot, int nkeys, struct ScanKeyData *keys, ParallelTableScanDesc pscan,
				uint32 flags)
{
	NemoScan   *scan = palloc0(sizeof(NemoScan));
	TableScanDesc base = &scan->base;

	(void) nemo_thread();
	RelationIncrementReferenceCount(rel);
	base->rs_rd = rel;
	base->rs_snapshot = snapshot;
	base->rs_nkeys = nkeys;
	base->rs_flags = flags;
	base->rs_parallel = pscan;
	base->rs_key = nkeys > 0 ? palloc(sizeof(ScanKeyData) * nkeys) : NULL;
	if (nkeys > 0 && keys != NULL)
		memcpy(base->rs_key, keys, nkeys * sizeof(ScanKeyData));

	scan->info = nemo_rel(rel);
	scan->cxt = CurrentMemoryContext;
	scan->batch_cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo scan", ALLOCSET_DEFAULT_SIZES);
	scan->max_rows = 64;
	scan->rows = palloc(scan->max_rows * sizeof(ScanRow));
	initStringInfo(&scan->first);
	initStringInfo(&scan->last);
	initStringInfo(&scan->lo);
	initStringInfo(&scan->hi);
	initStringInfo(&scan->keys);
	scan->snapshot = snapshot;
	if (snapshot != NULL && IsMVCCSnapshot(snapshot))
		PredicateLockRelation(rel, snapshot);
	else if (snapshot == NULL ||
			 (snapshot->snapshot_type != SNAPSHOT_SELF && snapshot->snapshot_type != SNAPSHOT_DIRTY))
		/* ANALYZE and such count what is there now */
		scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	nemo_scan_restart(scan);
	if (flags & SO_TYPE_SEQSCAN)
		pgstat_count_heap_scan(rel);
	return base;
}

void
nemo_scan_end(TableScanDesc base)
{
	NemoScan   *scan = (NemoScan *) base;

	if (scan->snapshot != base->rs_snapshot)
		UnregisterSnapshot(scan->snapshot);
	if (base->rs_flags & SO_TEMP_SNAPSHOT)
		UnregisterSnapshot(base->rs_snapshot);
	RelationDecrementReferenceCount(base->rs_rd);
	MemoryContextDelete(scan->batch_cxt);
	if (scan->block_cxt != NULL)
		MemoryContextDelete(scan->block_cxt);
	pfree(scan->first.data);
	pfree(scan->last.data);
	pfree(scan->lo.data);
	pfree(scan->hi.data);
	pfree(scan->keys.data);
	pfree(scan->rows);
	if (base->rs_key != NULL)
		pfree(base->rs_key);
	pfree(scan);
}

void
nemo_scan_rescan(TableScanDesc base, struct ScanKeyData *keys, bool set_params, bool allow_strat, bool allow_sync,
				 bool allow_pagemode)
{
	NemoScan   *scan = (NemoScan *) base;

	(void) set_params;
	(void) allow_strat;
	(void) allow_sync;
	(void) allow_pagemode;
	if (keys != NULL && base->rs_nkeys > 0)
		memcpy(base->rs_key, keys, base->rs_nkeys * sizeof(ScanKeyData));
	scan->claimed = false;
	scan->by_tid = false;
	nemo_scan_restart(scan);
	if (base->rs_flags & SO_TYPE_SEQSCAN)
		pgstat_count_heap_scan(base->rs_rd);
}

void
nemo_scan_set_tidrange(TableScanDesc base, ItemPointer mintid, ItemPointer maxtid)
{
	NemoScan   *scan = (NemoScan *) base;

	ItemPointerCopy(mintid, &scan->min_tid);
	ItemPointerCopy(maxtid, &scan->max_tid);
	scan->by_tid = true;
	nemo_scan_restart(scan);
}

/* ---- batches ------------------------------------------------------------------------------------------------------- */

static ScanRow *
new_row(NemoScan *scan)
{
	if (scan->nrows == scan->max_rows)
	{
		scan->max_rows *= 2;
		scan->rows = repalloc(scan->rows, scan->max_rows * sizeof(ScanRow));
	}
	return &scan->rows[scan->nrows++];
}

static inline bool
is_dirty(const NemoScan *scan)
{
	return scan->snapshot->snapshot_type == SNAPSHOT_DIRTY;
}

/* inside the guard; in batch_cxt */
static void
take(NemoScan *scan, rb_slice key, const rb_version *v)
{
	ScanRow    *row = new_row(scan);

	row->rowid = nemo_rowid_of(scan->info, key, rb_data(v), v->len);
	row->tuple = nemo_row_tuple(scan->base.rs_rd, rb_data(v), v->len, row->rowid, v->tag,
								rb_is_settled(v) ? 0 : rb_x(v)->xid);
	row->key = (uint32) scan->keys.len;
	row->key_len = key.len;
	appendBinaryStringInfo(&scan->keys, (const char *) key.data, (int) key.len);
	scan->batch_bytes += row->tuple->t_len;
}

/* what a running update replaces, or NULL: until it commits, the row is still that for everybody else */
static const rb_version *
replaced_by(const rb_version *v)
{
	while ((v = rb_older(v)) != NULL)
	{
		NemoWriter	writer;

		if (v->kind == RB_LOCK)
			continue;
		writer = nemo_writer(v);
		if (writer == NEMO_OWN || writer == NEMO_COMMITTED)
			return v->kind == RB_DATA ? v : NULL;
	}
	return NULL;
}

/* inside the guard; in batch_cxt */
static bool
collect(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	NemoScan   *scan = arg;
	const rb_version *v = nemo_visible(head, scan->snapshot);

	(void) i;
	if (v == NULL || v->kind != RB_DATA)
		return true;
	take(scan, key, v);
	if (!is_dirty(scan))
		return scan->batch_bytes < BATCH_BYTES;

	/*
	 * A dirty snapshot tells about the last row looked at, which must be the one that is handed out: a batch is one
	 * record, as the running update has it and as it was before.
	 */
	if (TransactionIdIsValid(scan->snapshot->xmin) && (v = replaced_by(v)) != NULL)
		take(scan, key, v);
	return false;
}

/* Whom a dirty snapshot names for row i of the batch, when there are two versions of one. */
static void
name_writer(NemoScan *scan, int i)
{
	TransactionId writer = HeapTupleHeaderGetRawXmin(scan->rows[0].tuple->t_data);

	if (scan->nrows < 2)
		return;
	scan->snapshot->xmin = i == 0 ? writer : InvalidTransactionId;
	scan->snapshot->xmax = i == 0 ? InvalidTransactionId : writer;
}

static void
reverse_rows(NemoScan *scan)
{
	for (int i = 0, j = scan->nrows - 1; i < j; i++, j--)
	{
		ScanRow		row = scan->rows[i];

		scan->rows[i] = scan->rows[j];
		scan->rows[j] = row;
	}
}

/* A new batch_cxt; the one before, with the row that was handed out last, hangs below it until the next turn. */
static void
turn_over(NemoScan *scan)
{
	MemoryContext before = scan->batch_cxt;

	MemoryContextDeleteChildren(before);
	scan->batch_cxt = AllocSetContextCreate(scan->cxt, "nemo scan", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSetParent(before, scan->batch_cxt);
}

/*
 * The batch before or behind the present one, rows in ascending order; false = there is none.
 * keep: a slot may still refer to a row of the present batch.
 */
static bool
load_batch(NemoScan *scan, bool backward, bool keep)
{
	rb_slice	start = nemo_slice(&scan->first);
	rb_slice	end = nemo_slice(&scan->last);
	uint8		resume[RB_MAX_KEY + 1];
	uint32		resume_len = 0;
	bool		done = true;
	rb_error	err = {0};
	rb_status	status;
	MemoryContext old;

	CHECK_FOR_INTERRUPTS();
	if (scan->started)
	{
		if (backward ? scan->at_first : scan->at_last)
			return false;
		if (backward)
		{
			set_bytes(&scan->hi, scan->lo.data, (uint32) scan->lo.len);
			end = nemo_slice(&scan->hi);
			scan->at_last = false;
		}
		else
		{
			set_bytes(&scan->lo, scan->hi.data, (uint32) scan->hi.len);
			start = nemo_slice(&scan->lo);
			scan->at_first = false;
		}
	}
	else
	{
		scan->started = true;
		scan->at_first = scan->at_last = true;
		set_bytes(&scan->lo, start.data, start.len);
		set_bytes(&scan->hi, end.data, end.len);
	}
	scan->nrows = 0;
	scan->batch_bytes = 0;
	resetStringInfo(&scan->keys);
	if (keep)
		turn_over(scan);
	else
		MemoryContextResetOnly(scan->batch_cxt);

	old = MemoryContextSwitchTo(scan->batch_cxt);
	if (nemo_slice_compare(start, end) < 0)
	{
		status = rb_read_range(nemo_thread(), start, end, backward, scan->step, scan->step, collect, scan, &done,
							   resume, &resume_len, &err);
		if (status != RB_OK)
			nemo_raise(status, &err);
	}
	MemoryContextSwitchTo(old);
	scan->step = Min(scan->step * 2, LAST_STEP);

	if (backward)
	{
		if (!is_dirty(scan))
			reverse_rows(scan);
		scan->at_first = done;
		if (done)
			set_bytes(&scan->lo, scan->first.data, (uint32) scan->first.len);
		else
			set_bytes(&scan->lo, resume, resume_len);
		scan->pos = scan->nrows;
	}
	else
	{
		scan->at_last = done;
		if (done)
			set_bytes(&scan->hi, scan->last.data, (uint32) scan->last.len);
		else
			set_bytes(&scan->hi, resume, resume_len);
		scan->pos = -1;
	}
	return true;
}

static bool
wanted(NemoScan *scan, const ScanRow *row)
{
	if (scan->by_tid && (ItemPointerCompare(&row->tuple->t_self, &scan->min_tid) < 0 ||
						 ItemPointerCompare(&row->tuple->t_self, &scan->max_tid) > 0))
		return false;
	if (scan->base.rs_nkeys > 0)
	{
		TupleDesc	desc = RelationGetDescr(scan->base.rs_rd);

		for (int i = 0; i < scan->base.rs_nkeys; i++)
		{
			ScanKey		key = &scan->base.rs_key[i];
			bool		isnull;
			Datum		value;

			if (key->sk_flags & SK_ISNULL)
				return false;
			value = heap_getattr(row->tuple, key->sk_attno, desc, &isnull);
			if (isnull || !DatumGetBool(FunctionCall2Coll(&key->sk_func, key->sk_collation, value, key->sk_argument)))
				return false;
		}
	}
	return true;
}

ScanRow *
nemo_scan_row(NemoScan *scan, ScanDirection direction)
{
	bool		backward = ScanDirectionIsBackward(direction);
	bool		keep = scan->nrows > 0;

	for (;;)
	{
		int			next = backward ? scan->pos - 1 : scan->pos + 1;

		if (scan->started && next >= 0 && next < scan->nrows)
		{
			scan->pos = next;
			if (!wanted(scan, &scan->rows[next]))
				continue;
			if (is_dirty(scan))
				name_writer(scan, next);
			return &scan->rows[next];
		}
		if (!load_batch(scan, backward, keep))
		{
			/* beyond the end: turning around starts with the last row */
			scan->pos = backward ? -1 : scan->nrows;
			return NULL;
		}
		keep = false;
	}
}

static bool
claim(NemoScan *scan)
{
	ParallelScan *shared = (ParallelScan *) scan->base.rs_parallel;

	if (shared == NULL || scan->claimed)
		return true;
	scan->claimed = pg_atomic_exchange_u32(&shared->claimed, 1) == 0;
	return scan->claimed;
}

bool
nemo_scan_next(TableScanDesc base, ScanDirection direction, TupleTableSlot *slot)
{
	NemoScan   *scan = (NemoScan *) base;
	ScanRow    *row = claim(scan) ? nemo_scan_row(scan, direction) : NULL;

	if (row == NULL)
	{
		ExecClearTuple(slot);
		return false;
	}
	/* an UPDATE or DELETE of the row will ask for its key */
	nemo_remember_row(scan->info, row->rowid, (rb_slice) {(const uint8 *) scan->keys.data + row->key, row->key_len});
	ExecStoreHeapTuple(row->tuple, slot, false);
	slot->tts_tableOid = RelationGetRelid(base->rs_rd);
	pgstat_count_heap_getnext(base->rs_rd);
	return true;
}

/* ---- parallel ------------------------------------------------------------------------------------------------------ */

Size
nemo_parallelscan_estimate(Relation rel)
{
	(void) rel;
	return sizeof(ParallelScan);
}

Size
nemo_parallelscan_initialize(Relation rel, ParallelTableScanDesc pscan)
{
	ParallelScan *shared = (ParallelScan *) pscan;

#if PG_VERSION_NUM >= 180000
	pscan->phs_locator = rel->rd_locator;
#else
	pscan->phs_relid = RelationGetRelid(rel);
#endif
	pscan->phs_syncscan = false;
	pg_atomic_init_u32(&shared->claimed, 0);
	return sizeof(ParallelScan);
}

void
nemo_parallelscan_reinitialize(Relation rel, ParallelTableScanDesc pscan)
{
	(void) rel;
	pg_atomic_write_u32(&((ParallelScan *) pscan)->claimed, 0);
}

/* ---- bitmaps ------------------------------------------------------------------------------------------------------- */

#if PG_VERSION_NUM < 180000

typedef struct BitmapPage
{
	NemoScan   *scan;
	int			n;
	uint64		rowid[16];
	StringInfoData key[16];
} BitmapPage;

static bool
collect_page(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	BitmapPage *page = arg;
	NemoScan   *scan = page->scan;

	/* a key that has been used again holds another row, which the bitmap did not name */
	if (head != NULL)
	{
		int			n = scan->nrows;

		(void) collect(scan, i, key, head);
		if (scan->nrows > n && scan->rows[n].rowid != page->rowid[i])
			scan->nrows = n;
	}
	return true;
}

/* The index names rows, not versions: an offset stands for its rowid whatever the tag. */
static void
rows_of_page(BitmapPage *page, const TBMIterateResult *tbm)
{
	uint16		set = 0;
	NemoScan   *scan = page->scan;

	if (tbm->ntuples < 0)
		set = 0xFFFF;
	for (int i = 0; i < tbm->ntuples; i++)
		set |= (uint16) (1 << (((tbm->offsets[i] - 1) >> 4) & 15));
	page->n = 0;
	for (int i = 0; i < 16; i++)
	{
		uint64		rowid = (uint64) tbm->blockno << 4 | i;

		if (!(set & (1 << i)))
			continue;
		initStringInfo(&page->key[page->n]);
		if (nemo_row_key(scan->info, rowid, scan->snapshot, &page->key[page->n]))
			page->rowid[page->n++] = rowid;
	}
}

bool
nemo_scan_bitmap_next_block(TableScanDesc base, struct TBMIterateResult *tbm)
{
	NemoScan   *scan = (NemoScan *) base;
	BitmapPage	page = {scan};
	rb_slice	keys[16];
	rb_error	err = {0};
	rb_status	status;
	MemoryContext old;

	CHECK_FOR_INTERRUPTS();
	MemoryContextReset(scan->batch_cxt);
	resetStringInfo(&scan->keys);
	scan->nrows = 0;
	scan->batch_bytes = 0;
	scan->bitmap_pos = 0;

	old = MemoryContextSwitchTo(scan->batch_cxt);
	rows_of_page(&page, tbm);
	for (int i = 0; i < page.n; i++)
		keys[i] = nemo_slice(&page.key[i]);
	status = rb_read_keys(nemo_thread(), keys, (uint32) page.n, collect_page, &page, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	MemoryContextSwitchTo(old);
	return scan->nrows > 0;
}

bool
nemo_scan_bitmap_next_tuple(TableScanDesc base, struct TBMIterateResult *tbm, TupleTableSlot *slot)
{
	NemoScan   *scan = (NemoScan *) base;
	ScanRow    *row;

	(void) tbm;
	if (scan->bitmap_pos >= scan->nrows)
		return false;
	row = &scan->rows[scan->bitmap_pos++];
	nemo_remember_row(scan->info, row->rowid, (rb_slice) {(const uint8 *) scan->keys.data + row->key, row->key_len});
	ExecStoreHeapTuple(row->tuple, slot, false);
	slot->tts_tableOid = RelationGetRelid(base->rs_rd);
	pgstat_count_heap_fetch(base->rs_rd);
	return true;
}

#endif
