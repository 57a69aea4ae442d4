/*
 * nemo_index_scan.c
 *	  Scans of nemo_index: ranges (nemo_ranges.h) read in batches, rows handed to the table AM.
 *
 * A batch is what is visible in a piece of one range, or in a window of the points, in key order.  It knows which
 * piece it covers, so a scan may turn around anywhere, and a mark is the piece and a position: with the same MVCC
 * snapshot reading the piece again gives the same batch.
 */
#include "nemo.h"

#include "access/htup_details.h"
#include "access/itup.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/predicate.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_ddl.h"
#include "nemo_index.h"
#include "nemo_ranges.h"

#define POINTS_PER_REQUEST	256
#define FIRST_BATCH			8		/* records examined; grows fourfold */
#define LARGEST_BATCH		1024
#define FETCH_HINT			32		/* records wanted from the store, at least */
#define BATCH_BYTES			(1024 * 1024)	/* of rows: a batch ends when it has more */

typedef struct ScanItem
{
	uint64		rowid;
	HeapTuple	tuple;			/* clustered: the version seen, in batch_cxt */
	Span		key;			/* in bytes, where wanted */
	Span		value;			/* secondary, in bytes */
	uint8		tag;
} ScanItem;

/* the piece of the scan that a batch covers */
typedef struct Piece
{
	bool		started;		/* false: before the first batch */
	uint64		from;			/* points: window [from, to) */
	uint64		to;
	uint64		range;			/* ranges: the range, and the bytes [lo, hi) of it */
	bool		at_start;		/* lo is the start of the range */
	bool		at_end;			/* hi is its end */
	StringInfoData lo;
	StringInfoData hi;
} Piece;

typedef struct NemoIndexScan
{
	/* for the life of the scan */
	bool		ready;
	NemoRelInfo *info;
	NemoIndexInfo *ix;
	NemoIndexFetch *fetch;		/* NULL: bitmap scan */
	bool		mvcc;
	MemoryContext scan_cxt;
	MemoryContext batch_cxt;	/* rows of the batch; reset for each */
	IndexTuple	itup;
	TupleDesc	wide_desc;		/* for rows that no index tuple can hold */

	NemoRanges	q;				/* from the scan keys */

	/* position */
	Piece		at;
	uint64		serial;			/* of the batch */
	ScanItem   *items;
	int			nitems,
				max_items;
	int			pos;
	int			batch_size;
	Size		batch_bytes;
	bool		whole;			/* reading a piece again: no limit of bytes */
	StringInfoData bytes;
	StringInfoData start;		/* scratch: bounds and keys */
	StringInfoData end;
	StringInfoData keys;
	rb_slice   *slices;
	uint32		max_slices;

	bool		marked;
	Piece		mark;
	uint64		mark_serial;
	int			mark_pos;
} NemoIndexScan;

static inline rb_slice
slice_of(const StringInfoData *s)
{
	return (rb_slice) {(const uint8_t *) s->data, (uint32_t) s->len};
}

static void
set_bytes(StringInfo to, rb_slice from)
{
	resetStringInfo(to);
	appendBinaryStringInfo(to, (const char *) from.data, (int) from.len);
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

typedef struct VisitArg
{
	IndexScanDesc scan;
	NemoIndexScan *so;
} VisitArg;

static Span
keep_bytes(NemoIndexScan *so, rb_slice s)
{
	Span		span = {so->bytes.len, s.len};

	appendBinaryStringInfo(&so->bytes, (const char *) s.data, (int) s.len);
	return span;
}

/* rb_visit: take what the snapshot sees into the batch */
static bool
visit(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	IndexScanDesc scan = ((VisitArg *) arg)->scan;
	NemoIndexScan *so = ((VisitArg *) arg)->so;
	const rb_version *v;
	ScanItem   *item;

	(void) i;
	if (head == NULL || (so->q.nfilters > 0 && !nemo_ranges_pass(&so->q, key)))
		return true;
	v = so->mvcc ? nemo_visible(head, scan->xs_snapshot) : nemo_entry_any(head);
	if (v == NULL)
		return true;

	if (so->nitems == so->max_items)
	{
		so->max_items *= 2;
		so->items = repalloc(so->items, so->max_items * sizeof(ScanItem));
	}
	item = &so->items[so->nitems++];
	item->tag = v->tag;
	item->tuple = NULL;
	if (so->ix->clustered)
	{
		const rb_xversion *x = rb_x(v);

		item->rowid = nemo_rowid_of(so->info, key, rb_data(v), v->len);
		if (so->fetch != NULL)
		{
			/* a row that is not decided on here is only needed for the columns of the index */
			if (so->mvcc || scan->xs_want_itup)
				item->tuple = nemo_row_tuple(scan->heapRelation, rb_data(v), v->len, item->rowid, v->tag,
											 x == NULL ? 0 : x->xid);
			if (!so->mvcc || !nemo_key_from_rowid(so->info, item->rowid))
				item->key = keep_bytes(so, key);
		}
		so->batch_bytes += v->len;
	}
	else
	{
		if (v->len < ENTRY_HEADER_LEN)
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("malformed entry in index \"%s\"", RelationGetRelationName(scan->indexRelation))));
		item->rowid = nemo_get_be64(rb_data(v));
		if (so->fetch != NULL)
		{
			item->value = keep_bytes(so, (rb_slice) {rb_data(v), v->len});
			if (scan->xs_want_itup)
				item->key = keep_bytes(so, key);
		}
		so->batch_bytes += v->len;
	}
	return so->whole || so->batch_bytes < BATCH_BYTES;
}

static bool
visit_point(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) visit(arg, i, key, head);
	return true;
}

static bool
visit_nothing(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) arg;
	(void) i;
	(void) key;
	(void) head;
	return true;
}

static void
want_slices(NemoIndexScan *so, uint32 n)
{
	if (n <= so->max_slices)
		return;
	so->max_slices = Max(n, 64);
	if (so->slices != NULL)
		pfree(so->slices);
	so->slices = MemoryContextAlloc(so->scan_cxt, so->max_slices * sizeof(rb_slice));
}

static void
begin_batch(NemoIndexScan *so)
{
	CHECK_FOR_INTERRUPTS();
	MemoryContextReset(so->batch_cxt);
	resetStringInfo(&so->bytes);
	so->nitems = 0;
	so->batch_bytes = 0;
	so->serial++;
}

/* full key of an entry's row in the row tree, appended; false: only its rowid is known */
static bool
append_row_key(const NemoIndexScan *so, rb_slice value, StringInfo out)
{
	NemoEntryValue parts;
	uint8		tree[RB_TREE_LEN];

	nemo_entry_parse(value.data, value.len, &parts);
	if (parts.suffix.len == 0)
		return false;
	nemo_put_be64(tree, so->info->row_tree);
	appendBinaryStringInfo(out, (char *) tree, RB_TREE_LEN);
	appendBinaryStringInfo(out, (const char *) parts.suffix.data, (int) parts.suffix.len);
	return true;
}

/* bring the rows of a batch of entries into memory in one request */
static void
prefetch_rows(NemoIndexScan *so)
{
	StringInfoData one;
	uint32		n = 0;
	uint32		off = 0;
	rb_error	err;
	rb_status	status;

	want_slices(so, so->nitems);
	resetStringInfo(&so->keys);
	initStringInfo(&one);
	for (int i = 0; i < so->nitems; i++)
	{
		resetStringInfo(&one);
		if (append_row_key(so, span_in(&so->bytes, so->items[i].value), &one) ||
			(nemo_key_from_rowid(so->info, so->items[i].rowid) &&
			 nemo_row_key(so->info, so->items[i].rowid, NULL, &one)))
		{
			appendBinaryStringInfo(&so->keys, one.data, one.len);
			so->slices[n++].len = (uint32_t) one.len;
		}
	}
	pfree(one.data);
	for (uint32 i = 0; i < n; i++)
	{
		so->slices[i].data = (const uint8_t *) so->keys.data + off;
		off += so->slices[i].len;
	}
	if (n < 2)
		return;
	status = rb_read_keys(nemo_thread(), so->slices, n, visit_nothing, NULL, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
}

static void
end_batch(IndexScanDesc scan, NemoIndexScan *so)
{
	if (so->nitems > 1 && so->fetch != NULL && !so->ix->clustered && !(scan->xs_want_itup && so->mvcc))
		prefetch_rows(so);
}

static void
load_points(IndexScanDesc scan, NemoIndexScan *so, uint64 from, uint64 to)
{
	VisitArg	arg = {scan, so};
	uint32		n = (uint32) (to - from);
	uint32		kept = 0;
	uint32		off = 0;
	MemoryContext old;
	rb_error	err;
	rb_status	status;

	begin_batch(so);
	want_slices(so, n);
	resetStringInfo(&so->keys);
	for (uint32 i = 0; i < n; i++)
	{
		nemo_ranges_point(&so->q, from + i, &so->keys);
		/* no key is that long */
		if (so->keys.len - off > NEMO_MAX_KEY)
		{
			so->keys.len = (int) off;
			continue;
		}
		so->slices[kept++].len = so->keys.len - off;
		off = so->keys.len;
	}
	off = 0;
	for (uint32 i = 0; i < kept; i++)
	{
		so->slices[i].data = (const uint8_t *) so->keys.data + off;
		off += so->slices[i].len;
	}
	old = MemoryContextSwitchTo(so->batch_cxt);
	status = kept == 0 ? RB_OK : rb_read_keys(nemo_thread(), so->slices, kept, visit_point, &arg, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	so->at.started = true;
	so->at.from = from;
	so->at.to = to;
	end_batch(scan, so);
	MemoryContextSwitchTo(old);
}

/*
 * Read up to max records of [start, end), which must not be at's own bounds, from the side the scan comes from; at
 * then says what was read.
 */
static void
load_range(IndexScanDesc scan, NemoIndexScan *so, bool backward, uint32 max)
{
	VisitArg	arg = {scan, so};
	uint8_t		resume[RB_MAX_KEY + 1];
	uint32_t	resume_len = 0;
	bool		done = true;
	MemoryContext old;
	rb_error	err;
	rb_status	status;

	begin_batch(so);
	old = MemoryContextSwitchTo(so->batch_cxt);
	status = rb_read_range(nemo_thread(), slice_of(&so->start), slice_of(&so->end), backward, max,
						   Max(max, FETCH_HINT), visit, &arg, &done, resume, &resume_len, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);

	set_bytes(&so->at.lo, slice_of(&so->start));
	set_bytes(&so->at.hi, slice_of(&so->end));
	if (!done)
		set_bytes(backward ? &so->at.lo : &so->at.hi, (rb_slice) {resume, resume_len});
	if (backward)
	{
		so->at.at_start = done;
		for (int i = 0, j = so->nitems - 1; i < j; i++, j--)
		{
			ScanItem	t = so->items[i];

			so->items[i] = so->items[j];
			so->items[j] = t;
		}
	}
	else
		so->at.at_end = done;
	so->at.started = true;
	end_batch(scan, so);
	MemoryContextSwitchTo(old);
}

/* The batch after (before) the present one, perhaps empty; false: there is none, and the present one stays. */
static bool
next_batch(IndexScanDesc scan, NemoIndexScan *so, bool backward)
{
	Piece	   *at = &so->at;
	uint32		max;

	if (so->q.empty)
		return false;
	if (!at->started)
		pgstat_count_index_scan(scan->indexRelation);
	if (so->q.points)
	{
		uint64		from = backward ? 0 : at->started ? at->to : 0;
		uint64		to = !backward ? so->q.nranges : at->started ? at->from : so->q.nranges;

		if (from >= to)
			return false;
		if (backward)
			from = to - Min(to, POINTS_PER_REQUEST);
		else
			to = Min(to, from + POINTS_PER_REQUEST);
		load_points(scan, so, from, to);
		return true;
	}

	if (!at->started || (backward ? at->at_start : at->at_end))
	{
		uint64		r;

		if (!at->started)
			r = backward ? so->q.nranges - 1 : 0;
		else if (backward ? at->range == 0 : at->range + 1 >= so->q.nranges)
			return false;
		else
			r = backward ? at->range - 1 : at->range + 1;
		nemo_ranges_bounds(&so->q, r, &so->start, &so->end);
		at->range = r;
		at->at_start = at->at_end = true;
	}
	else
	{
		nemo_ranges_bounds(&so->q, at->range, &so->start, &so->end);
		if (backward)
		{
			set_bytes(&so->end, slice_of(&at->lo));
			at->at_end = false;
		}
		else
		{
			set_bytes(&so->start, slice_of(&at->hi));
			at->at_start = false;
		}
	}
	max = so->batch_size;
	so->batch_size = Min(so->batch_size * 4, LARGEST_BATCH);
	load_range(scan, so, backward, max);
	return true;
}

/* ---- handing over ------------------------------------------------------------------------------------------------ */

/* index tuples are limited to 8 kB; a wider row goes out as a heap tuple of the same columns */
static void
return_wide(IndexScanDesc scan, NemoIndexScan *so, Datum *values, bool *isnull)
{
	TupleDesc	desc = RelationGetDescr(scan->indexRelation);

	if (so->wide_desc == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(so->scan_cxt);

		so->wide_desc = CreateTupleDescCopy(desc);
		for (int i = 0; i < desc->natts; i++)
			if (TupleDescAttr(desc, i)->attlen == -2)
				TupleDescInitEntry(so->wide_desc, (AttrNumber) (i + 1), NULL, NAMEOID, -1, 0);
		MemoryContextSwitchTo(old);
	}
	for (int i = 0; i < desc->natts; i++)
		if (TupleDescAttr(desc, i)->attlen == -2 && !isnull[i])
		{
			Name		name = palloc0(NAMEDATALEN);

			strlcpy(NameStr(*name), DatumGetCString(values[i]), NAMEDATALEN);
			values[i] = NameGetDatum(name);
		}
	scan->xs_hitupdesc = so->wide_desc;
	scan->xs_hitup = heap_form_tuple(so->wide_desc, values, isnull);
}

static void
return_columns(IndexScanDesc scan, NemoIndexScan *so, const ScanItem *item)
{
	TupleDesc	desc = RelationGetDescr(scan->indexRelation);
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];
	MemoryContext old;

	if (so->itup != NULL)
		pfree(so->itup);
	so->itup = NULL;
	scan->xs_hitup = NULL;
	old = MemoryContextSwitchTo(so->batch_cxt);
	if (so->ix->clustered)
	{
		for (int i = 0; i < desc->natts; i++)
			values[i] = heap_getattr(item->tuple, scan->indexRelation->rd_index->indkey.values[i],
									 RelationGetDescr(scan->heapRelation), &isnull[i]);
	}
	else
	{
		rb_slice	value = span_in(&so->bytes, item->value);
		NemoEntryValue parts;

		nemo_entry_parse(value.data, value.len, &parts);
		nemo_entry_columns(so->ix, desc, span_in(&so->bytes, item->key), parts.extra, values, isnull);
	}
	if (heap_compute_data_size(desc, values, isnull) > INDEX_SIZE_MASK - 256)
		return_wide(scan, so, values, isnull);
	else
	{
		MemoryContextSwitchTo(so->scan_cxt);
		so->itup = index_form_tuple(desc, values, isnull);
	}
	scan->xs_itup = so->itup;
	MemoryContextSwitchTo(old);
}

static void
hand_over(IndexScanDesc scan, NemoIndexScan *so)
{
	const ScanItem *item = &so->items[so->pos];
	NemoIndexFetch *fetch = so->fetch;

	nemo_tid_set(&scan->xs_heaptid, item->rowid, so->ix->clustered ? item->tag : 0);
	/* without a snapshot, entries of versions that are gone may come up, too */
	scan->xs_recheck = so->q.recheck || (!so->mvcc && !so->ix->clustered);
	if (scan->xs_want_itup)
		return_columns(scan, so, item);
	if (fetch == NULL)
		return;

	fetch->have = true;
	fetch->index_only = scan->xs_want_itup && so->mvcc;
	fetch->tid = scan->xs_heaptid;
	fetch->tuple = NULL;
	if (unlikely(fetch->row_key.data == NULL))
	{
		MemoryContext old = MemoryContextSwitchTo(so->scan_cxt);

		initStringInfo(&fetch->row_key);
		MemoryContextSwitchTo(old);
	}
	resetStringInfo(&fetch->row_key);
	if (!so->ix->clustered)
		(void) append_row_key(so, span_in(&so->bytes, item->value), &fetch->row_key);
	else if (so->mvcc)
	{
		fetch->tuple = item->tuple;
		/* an UPDATE or DELETE of the row will ask for its key */
		if (!nemo_key_from_rowid(so->info, item->rowid))
			nemo_remember_row(so->info, item->rowid, span_in(&so->bytes, item->key));
	}
	else
		set_bytes(&fetch->row_key, span_in(&so->bytes, item->key));
}

/* ---- access method callbacks ------------------------------------------------------------------------------------- */

IndexScanDesc
nemo_index_begin_scan(Relation index, int nkeys, int norderbys)
{
	IndexScanDesc scan = RelationGetIndexScan(index, nkeys, norderbys);
	NemoIndexScan *so = palloc0(sizeof(NemoIndexScan));

	so->scan_cxt = CurrentMemoryContext;
	so->batch_cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo index scan", ALLOCSET_DEFAULT_SIZES);
	nemo_ranges_init(&so->q);
	so->max_items = 8;
	so->items = palloc(so->max_items * sizeof(ScanItem));
	initStringInfo(&so->bytes);
	initStringInfo(&so->start);
	initStringInfo(&so->end);
	initStringInfo(&so->keys);
	initStringInfo(&so->at.lo);
	initStringInfo(&so->at.hi);
	scan->opaque = so;
	scan->xs_itupdesc = RelationGetDescr(index);
	return scan;
}

/*
 * A rebuilt index holds what its builder saw, under the builder's xid: a snapshot older than that would find it
 * empty. Core keeps such snapshots from a new index by indcheckxmin, but not from one that was rebuilt.
 */
static void
check_snapshot(Relation index, Snapshot snapshot, const NemoTreeInfo *tree, NemoTree table)
{
	TransactionId creator = (TransactionId) tree->creator_xid;
	NemoTreeInfo table_tree;

	if (tree->creator_xid == 0 || TransactionIdIsCurrentTransactionId(creator) ||
		!XidInMVCCSnapshot(creator, snapshot))
		return;
	if (nemo_tree_get(table, &table_tree) && table_tree.creator_xid != 0 &&
		XidInMVCCSnapshot((TransactionId) table_tree.creator_xid, snapshot))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent build of index \"%s\"",
					RelationGetRelationName(index)),
			 errhint("The transaction might succeed if retried.")));
}

/* what is known only after the scan has begun: the table and the snapshot */
static void
prepare_scan(IndexScanDesc scan, NemoIndexScan *so)
{
	Relation	index = scan->indexRelation;
	Relation	heap = scan->heapRelation;
	NemoTreeInfo tree;

	(void) nemo_thread();
	if (heap == NULL)
		heap = table_open(index->rd_index->indrelid, NoLock);
	so->info = nemo_rel(heap);
	so->ix = nemo_index_describe(so->info, index, so->scan_cxt);
	nemo_check_index_layout(index, so->info, &tree);
	so->mvcc = scan->xs_snapshot != NULL && IsMVCCSnapshot(scan->xs_snapshot);
	if (so->mvcc)
	{
		check_snapshot(index, scan->xs_snapshot, &tree, so->info->tree);
		PredicateLockRelation(heap, scan->xs_snapshot);
	}
	if (scan->heapRelation == NULL)
		table_close(heap, NoLock);
	else if (nemo_relation_is_nemo_table(scan->heapRelation))
		so->fetch = (NemoIndexFetch *) scan->xs_heapfetch;
	so->ready = true;
}

void
nemo_index_rescan(IndexScanDesc scan, ScanKey keys, int nkeys, ScanKey orderbys, int norderbys)
{
	NemoIndexScan *so = scan->opaque;
	MemoryContext old;

	(void) nkeys;
	(void) orderbys;
	(void) norderbys;
	if (keys != NULL && scan->numberOfKeys > 0)
		memmove(scan->keyData, keys, scan->numberOfKeys * sizeof(ScanKeyData));
	if (!so->ready)
		prepare_scan(scan, so);

	MemoryContextReset(so->batch_cxt);
	old = MemoryContextSwitchTo(so->batch_cxt);
	nemo_ranges_read(&so->q, scan, so->ix);
	MemoryContextSwitchTo(old);
	so->at.started = false;
	so->marked = false;
	so->whole = false;
	so->nitems = 0;
	so->pos = -1;
	so->batch_size = FIRST_BATCH;
}

bool
nemo_index_get_tuple(IndexScanDesc scan, ScanDirection dir)
{
	NemoIndexScan *so = scan->opaque;

	if (ScanDirectionIsBackward(dir))
	{
		so->pos--;
		while (so->pos < 0)
		{
			if (!next_batch(scan, so, true))
			{
				so->pos = -1;
				return false;
			}
			so->pos = so->nitems - 1;
		}
	}
	else
	{
		so->pos++;
		while (so->pos >= so->nitems)
		{
			if (!next_batch(scan, so, false))
			{
				so->pos = so->nitems;
				return false;
			}
			so->pos = 0;
		}
	}
	hand_over(scan, so);
	return true;
}

int64
nemo_index_get_bitmap(IndexScanDesc scan, TIDBitmap *tbm)
{
	NemoIndexScan *so = scan->opaque;
	int64		n = 0;

	while (next_batch(scan, so, false))
	{
		ItemPointerData tids[64];
		int			ntids = 0;

		for (int i = 0; i < so->nitems; i++)
		{
			/* without the tag: another index must name the row alike */
			nemo_tid_set(&tids[ntids++], so->items[i].rowid, 0);
			if (ntids == lengthof(tids) || i == so->nitems - 1)
			{
				tbm_add_tuples(tbm, tids, ntids, so->q.recheck);
				ntids = 0;
			}
		}
		n += so->nitems;
	}
	return n;
}

void
nemo_index_end_scan(IndexScanDesc scan)
{
	NemoIndexScan *so = scan->opaque;

	MemoryContextDelete(so->batch_cxt);
	if (so->itup != NULL)
		pfree(so->itup);
	if (so->slices != NULL)
		pfree(so->slices);
	if (so->mark.lo.data != NULL)
	{
		pfree(so->mark.lo.data);
		pfree(so->mark.hi.data);
	}
	pfree(so->at.lo.data);
	pfree(so->at.hi.data);
	nemo_ranges_free(&so->q);
	pfree(so->bytes.data);
	pfree(so->start.data);
	pfree(so->end.data);
	pfree(so->keys.data);
	pfree(so->items);
	pfree(so);
}

static void
copy_piece(Piece *to, const Piece *from)
{
	StringInfoData lo = to->lo;
	StringInfoData hi = to->hi;

	set_bytes(&lo, slice_of(&from->lo));
	set_bytes(&hi, slice_of(&from->hi));
	*to = *from;
	to->lo = lo;
	to->hi = hi;
}

void
nemo_index_mark(IndexScanDesc scan)
{
	NemoIndexScan *so = scan->opaque;

	if (so->mark.lo.data == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(so->scan_cxt);

		initStringInfo(&so->mark.lo);
		initStringInfo(&so->mark.hi);
		MemoryContextSwitchTo(old);
	}
	so->marked = true;
	so->mark_pos = so->pos;
	if (so->mark_serial != so->serial)
		copy_piece(&so->mark, &so->at);
	so->mark_serial = so->serial;
	so->mark.started = so->at.started;
}

void
nemo_index_restore(IndexScanDesc scan)
{
	NemoIndexScan *so = scan->opaque;

	if (!so->marked)
		return;
	if (so->mark_serial != so->serial)
	{
		so->nitems = 0;
		so->at.started = false;
		if (so->mark.started && so->q.points)
			load_points(scan, so, so->mark.from, so->mark.to);
		else if (so->mark.started)
		{
			set_bytes(&so->start, slice_of(&so->mark.lo));
			set_bytes(&so->end, slice_of(&so->mark.hi));
			so->whole = true;
			load_range(scan, so, false, 0);
			so->whole = false;
			copy_piece(&so->at, &so->mark);
		}
		so->mark_serial = so->serial;
	}
	so->pos = so->mark_pos;
}
