/*
 * nemo_verify.c
 *	  nemo_verify(regclass): compare a table's rows, index entries, rowid map and store; a row for every difference.
 *
 * Writers are kept out by a share lock.  Rows are read in one ordered pass; each must be found by its rowid and by every
 * index that should have it, and no index or map may hold more entries than that.  Then each tree is compared, key
 * by key, between the buffer's view and the store itself after a flush.
 */
#include "nemo.h"

#include "access/relation.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "nemo_index.h"
#include "nemo_stat.h"

PG_FUNCTION_INFO_V1(nemo_verify);

#define CHUNK 1000				/* records compared at a time */

typedef struct Verify
{
	ReturnSetInfo *out;
	const char *relname;		/* what is being looked at */
	Snapshot	snapshot;
} Verify;

static void
difference(Verify *v, rb_slice key, const char *problem)
{
	Datum		values[3];
	bool		nulls[3] = {false};

	values[0] = CStringGetTextDatum(v->relname);
	if (key.data == NULL)
		nulls[1] = true;
	else
	{
		bytea	   *b = palloc(VARHDRSZ + key.len);

		SET_VARSIZE(b, VARHDRSZ + key.len);
		memcpy(VARDATA(b), key.data, key.len);
		values[1] = PointerGetDatum(b);
	}
	values[2] = CStringGetTextDatum(problem);
	tuplestore_putvalues(v->out->setResult, v->out->setDesc, values, nulls);
}

static inline rb_slice
slice_of(StringInfo s)
{
	return (rb_slice) {(const uint8_t *) s->data, (uint32_t) s->len};
}

/* [start, end) of a tree */
static void
tree_range(NemoTree tree, uint8 *start, uint8 *end)
{
	nemo_put_be64(start, tree);
	nemo_put_be64(end, tree + 1);
}

/* ---- what an index or map holds ------------------------------------------------------------------------------------ */

typedef struct Find
{
	Snapshot	snapshot;
	bool		by_rowid;		/* count only the entries of this row */
	uint64		rowid;
	uint64		n;
} Find;

static bool
count_entry(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	Find	   *find = arg;
	const rb_version *seen = nemo_visible(head, find->snapshot);

	if (seen != NULL && seen->kind == RB_DATA)
	{
		if (find->by_rowid)
		{
			NemoEntryValue value;

			nemo_entry_parse(rb_data(seen), seen->len, &value);
			if (value.rowid != find->rowid)
				return true;
		}
		find->n++;
	}
	return true;
}

static uint64
count_range(rb_slice start, rb_slice end, Find *find)
{
	uint8		resume[RB_MAX_KEY + 1];
	uint32		resume_len;
	uint8		from[RB_MAX_KEY + 1];
	bool		done = false;
	rb_error	err = {0};

	find->n = 0;
	while (!done)
	{
		rb_status	status = rb_read_range(nemo_thread(), start, end, false, CHUNK, CHUNK, count_entry, find,
										   &done, resume, &resume_len, &err);

		if (status != RB_OK)
			nemo_raise(status, &err);
		if (!done)
		{
			memcpy(from, resume, resume_len);
			start = (rb_slice) {from, resume_len};
		}
		CHECK_FOR_INTERRUPTS();
	}
	return find->n;
}

static uint64
count_tree(NemoTree tree, Snapshot snapshot)
{
	uint8		start[8],
				end[8];
	Find		find = {.snapshot = snapshot};

	tree_range(tree, start, end);
	return count_range((rb_slice) {start, 8}, (rb_slice) {end, 8}, &find);
}

/* ---- rows against indexes and map ---------------------------------------------------------------------------------- */

static void
verify_rows(Verify *v, Relation rel)
{
	NemoRelInfo *info = nemo_rel(rel);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	EState	   *estate = CreateExecutorState();
	ExprContext *econtext = GetPerTupleExprContext(estate);
	TableScanDesc scan = table_beginscan(rel, v->snapshot, 0, NULL);
	uint64	   *expected = palloc0(sizeof(uint64) * (info->nindexes + 1));
	ExprState **predicates = palloc0(sizeof(ExprState *) * (info->nindexes + 1));
	uint64		mapped = 0;
	StringInfoData row_key;
	StringInfoData key;

	initStringInfo(&row_key);
	initStringInfo(&key);
	for (int i = 0; i < info->nindexes; i++)
		predicates[i] = ExecPrepareQual(info->indexes[i].ii->ii_Predicate, estate);
	econtext->ecxt_scantuple = slot;

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		uint64		rowid;
		uint8		tag;

		CHECK_FOR_INTERRUPTS();
		ResetPerTupleExprContext(estate);
		if (!nemo_tid_get(&slot->tts_tid, &rowid, &tag))
		{
			difference(v, (rb_slice) {NULL, 0}, "row without a rowid");
			continue;
		}
		if (!nemo_row_key(info, rowid, v->snapshot, &row_key))
		{
			difference(v, (rb_slice) {NULL, 0}, "row whose rowid leads nowhere");
			continue;
		}
		if (info->clustered && !(info->intkey && rowid < NEMO_ROWID_FIRST))
			mapped++;
		for (int i = 0; i < info->nindexes; i++)
		{
			NemoIndexInfo *ix = &info->indexes[i];
			Datum		values[INDEX_MAX_KEYS];
			bool		isnull[INDEX_MAX_KEYS];
			uint32		prefix;
			bool		null_distinct;
			Find		find = {.snapshot = v->snapshot, .by_rowid = true, .rowid = rowid};

			if (predicates[i] != NULL && !ExecQual(predicates[i], econtext))
				continue;
			FormIndexDatum(ix->ii, slot, estate, values, isnull);
			resetStringInfo(&key);
			nemo_entry_key(ix, values, isnull, slice_of(&row_key), &key, &prefix, &null_distinct);
			if (ix->clustered)
			{
				if (key.len != row_key.len || memcmp(key.data, row_key.data, key.len) != 0)
					difference(v, slice_of(&row_key), "row is not at its primary key");
				continue;
			}
			expected[i]++;
			{
				StringInfoData next;

				initStringInfo(&next);
				appendBinaryStringInfo(&next, key.data, key.len);
				nemo_key_successor(&next);
				if (count_range(slice_of(&key), slice_of(&next), &find) != 1)
					difference(v, slice_of(&key),
							   psprintf("%llu entries instead of one in index %s", (unsigned long long) find.n,
										get_rel_name(ix->oid)));
				pfree(next.data);
			}
		}
	}
	table_endscan(scan);

	for (int i = 0; i < info->nindexes; i++)
	{
		uint64		n;

		if (info->indexes[i].clustered)
			continue;
		n = count_tree(info->indexes[i].tree, v->snapshot);
		if (n != expected[i])
			difference(v, (rb_slice) {NULL, 0},
					   psprintf("index %s has %llu entries, %llu rows belong in it", get_rel_name(info->indexes[i].oid),
								(unsigned long long) n, (unsigned long long) expected[i]));
	}
	if (info->clustered)
	{
		uint64		n = count_tree(info->tree, v->snapshot);

		if (n != mapped)
			difference(v, (rb_slice) {NULL, 0},
					   psprintf("rowid map has %llu records, %llu rows need one", (unsigned long long) n,
								(unsigned long long) mapped));
	}
	FreeExecutorState(estate);
	ExecDropSingleTupleTableSlot(slot);
	/* the states belonged to the EState */
	for (int i = 0; i < info->nindexes; i++)
		info->indexes[i].ii->ii_ExpressionsState = NIL;
}

/* ---- buffer against store ------------------------------------------------------------------------------------------ */

typedef struct Record
{
	rb_slice	key;
	rb_slice	data;
} Record;

typedef struct Records
{
	Record	   *r;
	uint32		n;
	uint32		room;
} Records;

static rb_slice
copy_slice(rb_slice s)
{
	uint8	   *p = palloc(s.len + 1);

	memcpy(p, s.data, s.len);
	return (rb_slice) {p, s.len};
}

static void
add_record(Records *records, rb_slice key, rb_slice data)
{
	if (records->n == records->room)
	{
		records->room = records->room == 0 ? CHUNK : records->room * 2;
		records->r = records->r == NULL ? palloc(sizeof(Record) * records->room) :
			repalloc(records->r, sizeof(Record) * records->room);
	}
	records->r[records->n].key = copy_slice(key);
	records->r[records->n++].data = copy_slice(data);
}

static bool
collect_buffered(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	const rb_version *seen = nemo_visible(head, SnapshotSelf);

	if (seen != NULL && seen->kind == RB_DATA)
		add_record(arg, key, (rb_slice) {rb_data(seen), seen->len});
	return true;
}

typedef struct Stored
{
	bool		decided;
	bool		present;
	rb_slice	data;
} Stored;

/* newest version whose writer committed, or is this transaction */
static bool
pick_stored(void *arg, const rb_stored_version *sv)
{
	Stored	   *stored = arg;

	if (stored->decided || sv->kind == RB_LOCK)
		return true;
	if (sv->xid != 0)
	{
		TransactionId xid = (TransactionId) sv->xid;

		if (!TransactionIdIsCurrentTransactionId(xid) && !TransactionIdDidCommit(xid))
			return true;
	}
	stored->decided = true;
	stored->present = sv->kind == RB_DATA;
	stored->data = sv->data;
	return true;
}

static void
compare_chunk(Verify *v, const Records *buffered, const Records *stored)
{
	uint32		b = 0,
				s = 0;

	while (b < buffered->n || s < stored->n)
	{
		int			c;

		if (b == buffered->n)
			c = 1;
		else if (s == stored->n)
			c = -1;
		else
			c = nemo_slice_compare(buffered->r[b].key, stored->r[s].key);
		if (c < 0)
			difference(v, buffered->r[b++].key, "in the buffer but not in the store after a flush");
		else if (c > 0)
			difference(v, stored->r[s++].key, "in the store but not in the buffer's view");
		else
		{
			rb_slice	x = buffered->r[b].data,
						y = stored->r[s].data;

			if (x.len != y.len || memcmp(x.data, y.data, x.len) != 0)
				difference(v, buffered->r[b].key, "the store holds another value than the buffer after a flush");
			b++;
			s++;
		}
	}
}

static void
collect_stored(Verify *v, rb_slice start, rb_slice end, Records *records)
{
	st_result	result = {0};
	st_error	err = {0};
	st_status	status = st_get_range(nemo_store(), (st_slice) {start.data, start.len}, (st_slice) {end.data, end.len},
									  0, 0, false, &result, &err);

	if (status != ST_OK)
		nemo_raise_store(status, &err);
	for (uint32 i = 0; i < result.nrecs; i++)
	{
		Stored		stored = {0};
		rb_slice	key = {result.recs[i].key.data, (uint32) result.recs[i].key.len};

		if (!rb_decode_record(result.recs[i].value.data, result.recs[i].value.len, pick_stored, &stored))
			difference(v, key, "the stored record is corrupted");
		else if (stored.present)
			add_record(records, key, stored.data);
	}
	st_result_free(&result);
}

static void
verify_tree(Verify *v, NemoTree tree)
{
	uint8		first[8],
				last[8];
	uint8		from[RB_MAX_KEY + 1];
	uint8		resume[RB_MAX_KEY + 1];
	uint32		resume_len;
	rb_slice	start,
				end;
	bool		done = false;
	MemoryContext cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo verify", ALLOCSET_DEFAULT_SIZES);

	tree_range(tree, first, last);
	memcpy(from, first, 8);
	start = (rb_slice) {from, 8};
	end = (rb_slice) {last, 8};
	while (!done)
	{
		Records		buffered = {0};
		Records		stored = {0};
		rb_error	err = {0};
		rb_status	status;
		MemoryContext old = MemoryContextSwitchTo(cxt);

		status = rb_read_range(nemo_thread(), start, end, false, CHUNK, CHUNK, collect_buffered, &buffered,
							   &done, resume, &resume_len, &err);
		if (status != RB_OK)
			nemo_raise(status, &err);
		collect_stored(v, start, done ? end : (rb_slice) {resume, resume_len}, &stored);
		compare_chunk(v, &buffered, &stored);
		if (!done)
		{
			memcpy(from, resume, resume_len);
			start = (rb_slice) {from, resume_len};
		}
		MemoryContextSwitchTo(old);
		MemoryContextReset(cxt);
		CHECK_FOR_INTERRUPTS();
	}
	MemoryContextDelete(cxt);
}

Datum
nemo_verify(PG_FUNCTION_ARGS)
{
	Relation	rel = nemo_open_table(PG_GETARG_OID(0), ShareLock);
	NemoRelInfo *info;
	Verify		v = {0};
	rb_error	err = {0};
	rb_status	status;

	(void) nemo_thread();
	InitMaterializedSRF(fcinfo, 0);
	v.out = (ReturnSetInfo *) fcinfo->resultinfo;
	v.relname = RelationGetRelationName(rel);
	v.snapshot = RegisterSnapshot(GetLatestSnapshot());
	info = nemo_rel(rel);

	verify_rows(&v, rel);
	status = rb_flush_all(nemo_thread(), &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	verify_tree(&v, info->tree);
	if (info->clustered)
		verify_tree(&v, info->row_tree);
	for (int i = 0; i < info->nindexes; i++)
		if (!info->indexes[i].clustered)
		{
			v.relname = get_rel_name(info->indexes[i].oid);
			verify_tree(&v, info->indexes[i].tree);
		}
	UnregisterSnapshot(v.snapshot);
	relation_close(rel, NoLock);
	return (Datum) 0;
}
