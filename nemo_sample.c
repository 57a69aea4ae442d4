/*
 * nemo_sample.c
 *	  ANALYZE, TABLESAMPLE and size estimates.
 *
 * A table has no blocks.  Where PostgreSQL wants some, they are runs of consecutive rows of one ordered pass: 64 rows for
 * TABLESAMPLE; for ANALYZE as many as make the blocks come out at the size that the table claims to have.  Blocks are
 * asked for in ascending order, so one pass serves all of them.
 */
#include "nemo_table.h"

#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/tsmapi.h"
#include "miscadmin.h"
#include "optimizer/plancat.h"
#include "pgstat.h"
#include "utils/memutils.h"

#define SAMPLE_ROWS		64		/* rows of a block for TABLESAMPLE */
#define LEAST_PAGES		10		/* for the planner */
#define MOST_PAGES		131071	/* a table claims to have no more: one segment */

/* ---- size ---------------------------------------------------------------------------------------------------------- */

void
nemo_relation_estimate(Relation rel, double *rows, BlockNumber *pages)
{
	double		bytes;

	(void) nemo_thread();
	nemo_tree_estimate(nemo_tree_of(rel), rows, &bytes);
	*pages = (BlockNumber) Min(bytes / BLCKSZ + 1, (double) MOST_PAGES);
}

uint64
nemo_relation_size(Relation rel, ForkNumber fork)
{
	double		rows;
	BlockNumber pages;

	if (fork != MAIN_FORKNUM && fork != InvalidForkNumber)
		return 0;
	nemo_relation_estimate(rel, &rows, &pages);
	return (uint64) pages * BLCKSZ;
}

/*
 * The running count of rows is as good as what VACUUM would have found, and right for tables it has not seen.  Only when
 * it is lost (it lives in memory and in checkpoints) pg_class is asked.  A pass over a table handles record after record,
 * a lookup one: even a small table has pages enough for an index to be worth it, as a heap has that was never vacuumed.
 */
void
nemo_relation_estimate_size(Relation rel, int32 *attr_widths, BlockNumber *pages, double *tuples, double *allvisfrac)
{
	(void) attr_widths;
	nemo_relation_estimate(rel, tuples, pages);
	if (*tuples <= 0 && rel->rd_rel->reltuples > 0)
	{
		*tuples = rel->rd_rel->reltuples;
		*pages = (BlockNumber) Max(rel->rd_rel->relpages, 1);
	}
	*pages = Max(*pages, LEAST_PAGES);
	/* index-only scans never visit the rows */
	*allvisfrac = 1.0;
}

/* ---- one pass ------------------------------------------------------------------------------------------------------ */

static ScanRow *
next_row(NemoScan *scan)
{
	ScanRow    *row = nemo_scan_row(scan, ForwardScanDirection);

	if (row != NULL)
		scan->next_row++;
	return row;
}

static bool
skip_to(NemoScan *scan, uint64 number)
{
	while (scan->next_row < number)
		if (next_row(scan) == NULL)
			return false;
	return true;
}

static void
store(NemoScan *scan, HeapTuple tuple, TupleTableSlot *slot)
{
	ExecStoreHeapTuple(tuple, slot, false);
	slot->tts_tableOid = RelationGetRelid(scan->base.rs_rd);
}

/* ---- ANALYZE ------------------------------------------------------------------------------------------------------- */

bool
nemo_analyze_next_block(TableScanDesc base, BlockNumber block, BufferAccessStrategy strategy)
{
	NemoScan   *scan = (NemoScan *) base;
	uint64		first;

	(void) strategy;
	if (scan->nblocks == 0)
	{
		BlockNumber pages;
		double		rows;

		nemo_relation_estimate(base->rs_rd, &rows, &pages);
		scan->nrows_total = (uint64) Max(rows, (double) pages);
		scan->nblocks = pages;
	}
	/* the table may have grown since its size was asked for */
	if (block >= scan->nblocks)
		return false;
	first = scan->nrows_total * block / scan->nblocks;
	scan->block_left = block == scan->nblocks - 1 ? PG_UINT64_MAX :
		scan->nrows_total * (block + 1) / scan->nblocks - first;
	return skip_to(scan, first);
}

bool
nemo_analyze_next_tuple(TableScanDesc base, TransactionId oldest, double *live, double *dead, TupleTableSlot *slot)
{
	NemoScan   *scan = (NemoScan *) base;
	ScanRow    *row;

	(void) oldest;
	(void) dead;
	if (scan->block_left == 0 || (row = next_row(scan)) == NULL)
	{
		ExecClearTuple(slot);
		return false;
	}
	scan->block_left--;
	*live += 1;
	store(scan, row->tuple, slot);
	return true;
}

/* ---- TABLESAMPLE --------------------------------------------------------------------------------------------------- */

static void
count_blocks(NemoScan *scan)
{
	while (next_row(scan) != NULL)
		;
	scan->nrows_total = scan->next_row;
	scan->nblocks = (scan->nrows_total + SAMPLE_ROWS - 1) / SAMPLE_ROWS;
	nemo_scan_restart(scan);
}

/* the rows of a block are kept, as a method may pick them in any order */
static void
load_block(NemoScan *scan)
{
	MemoryContext old;

	if (scan->block_cxt == NULL)
		scan->block_cxt = AllocSetContextCreate(scan->cxt, "nemo sample", ALLOCSET_DEFAULT_SIZES);
	MemoryContextReset(scan->block_cxt);
	old = MemoryContextSwitchTo(scan->block_cxt);
	scan->block = palloc(SAMPLE_ROWS * sizeof(HeapTuple));
	for (scan->block_rows = 0; scan->block_rows < SAMPLE_ROWS; scan->block_rows++)
	{
		ScanRow    *row = next_row(scan);

		if (row == NULL)
			break;
		scan->block[scan->block_rows] = heap_copytuple(row->tuple);
	}
	MemoryContextSwitchTo(old);
}

bool
nemo_sample_next_block(TableScanDesc base, struct SampleScanState *sample)
{
	NemoScan   *scan = (NemoScan *) base;
	TsmRoutine *tsm = sample->tsmroutine;

	CHECK_FOR_INTERRUPTS();
	if (tsm->NextSampleBlock == NULL)
	{
		load_block(scan);
		scan->next_block = (BlockNumber) ((scan->next_row - 1) / SAMPLE_ROWS);
		return scan->block_rows > 0;
	}
	if (!scan->started)
		count_blocks(scan);
	scan->next_block = tsm->NextSampleBlock(sample, (BlockNumber) scan->nblocks);
	if (!BlockNumberIsValid(scan->next_block))
		return false;
	/* a method of some extension may go back */
	if ((uint64) scan->next_block * SAMPLE_ROWS < scan->next_row)
	{
		BlockNumber block = scan->next_block;

		nemo_scan_restart(scan);
		scan->next_block = block;
	}
	scan->block_rows = 0;
	if (skip_to(scan, (uint64) scan->next_block * SAMPLE_ROWS))
		load_block(scan);
	return true;
}

bool
nemo_sample_next_tuple(TableScanDesc base, struct SampleScanState *sample, TupleTableSlot *slot)
{
	NemoScan   *scan = (NemoScan *) base;

	for (;;)
	{
		OffsetNumber offset = sample->tsmroutine->NextSampleTuple(sample, scan->next_block,
																  (OffsetNumber) scan->block_rows);

		if (!OffsetNumberIsValid(offset))
		{
			ExecClearTuple(slot);
			return false;
		}
		if (offset > scan->block_rows)
			continue;
		store(scan, scan->block[offset - 1], slot);
		pgstat_count_heap_getnext(base->rs_rd);
		return true;
	}
}
