/*
 * nemo_stat.c
 *	  Views of the record buffer, the store and the checkpoint, and the functions that evict, checkpoint and reset.
 */
#include "nemo.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/pg_lsn.h"
#include "utils/rel.h"

#include "nemo_ddl.h"
#include "nemo_stat.h"

PG_FUNCTION_INFO_V1(nemo_stat_buffer);
PG_FUNCTION_INFO_V1(nemo_stat_store);
PG_FUNCTION_INFO_V1(nemo_stat_checkpoint);
PG_FUNCTION_INFO_V1(nemo_stat_reset);
PG_FUNCTION_INFO_V1(nemo_checkpoint);
PG_FUNCTION_INFO_V1(nemo_evict);

static Datum
one_row(FunctionCallInfo fcinfo, Datum *values, int n)
{
	TupleDesc	desc;
	bool		nulls[32] = {false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE || desc->natts != n)
		elog(ERROR, "return type must be a row of %d columns", n);
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

Datum
nemo_stat_buffer(PG_FUNCTION_ARGS)
{
	rb_stats	s;
	Datum		values[19];
	int			i = 0;

	rb_get_stats(nemo_buffer(), &s);
	values[i++] = Int64GetDatum(s.size_bytes);
	values[i++] = Int64GetDatum(s.used_bytes);
	values[i++] = Int64GetDatum(s.entries);
	values[i++] = Int64GetDatum(s.tombstones);
	values[i++] = Int64GetDatum(s.dirty);
	values[i++] = Int64GetDatum(s.lookups);
	values[i++] = Int64GetDatum(s.hits);
	values[i++] = Int64GetDatum(s.tombstone_hits);
	values[i++] = Int64GetDatum(s.gap_hits);
	values[i++] = Int64GetDatum(s.misses);
	values[i++] = Int64GetDatum(s.range_lookups);
	values[i++] = Int64GetDatum(s.range_hits);
	values[i++] = Int64GetDatum(s.range_fetches);
	values[i++] = Int64GetDatum(s.admitted);
	values[i++] = Int64GetDatum(s.evicted);
	values[i++] = Int64GetDatum(s.flushed);
	values[i++] = Int64GetDatum(s.key_bytes);
	values[i++] = Int64GetDatum(s.value_bytes);
	/* bytes per entry that are neither key nor value */
	values[i++] = Float8GetDatum(s.entries == 0 ? 0.0 :
								 ((double) s.used_bytes - s.key_bytes - s.value_bytes) / s.entries);
	return one_row(fcinfo, values, i);
}

Datum
nemo_stat_store(PG_FUNCTION_ARGS)
{
	static const char *const names[ST_NOPS] = {"get", "get_range", "upsert", "delete", "delete_range", "sync"};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	st_stats   *stats = nemo_store_stats();

	InitMaterializedSRF(fcinfo, 0);
	for (int op = 0; op < ST_NOPS; op++)
	{
		st_op_stats *s = &stats->op[op];
		Datum		values[9];
		bool		nulls[9] = {false};

		values[0] = CStringGetTextDatum(names[op]);
		values[1] = Int64GetDatum(atomic_load(&s->requests));
		values[2] = Int64GetDatum(atomic_load(&s->keys));
		values[3] = Int64GetDatum(atomic_load(&s->bytes_sent));
		values[4] = Int64GetDatum(atomic_load(&s->bytes_received));
		values[5] = Int64GetDatum(atomic_load(&s->errors));
		values[6] = Int64GetDatum(atomic_load(&s->retries));
		values[7] = Int64GetDatum(st_stats_percentile_us(s, 0.50));
		values[8] = Int64GetDatum(st_stats_percentile_us(s, 0.99));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

Datum
nemo_stat_checkpoint(PG_FUNCTION_ARGS)
{
	XLogRecPtr	checkpoint;
	XLogRecPtr	insert;
	rb_stats	s;
	Datum		values[4];

	rb_get_stats(nemo_buffer(), &s);
	nemo_checkpoint_status(&checkpoint, &insert);
	values[0] = LSNGetDatum(checkpoint);
	values[1] = LSNGetDatum(insert);
	values[2] = Int64GetDatum((int64) (insert - checkpoint));
	values[3] = Int64GetDatum(s.dirty);
	return one_row(fcinfo, values, 4);
}

Datum
nemo_stat_reset(PG_FUNCTION_ARGS)
{
	st_stats   *stats = nemo_store_stats();

	rb_stats_reset(nemo_buffer());
	for (int op = 0; op < ST_NOPS; op++)
	{
		st_op_stats *s = &stats->op[op];

		atomic_store(&s->requests, 0);
		atomic_store(&s->keys, 0);
		atomic_store(&s->bytes_sent, 0);
		atomic_store(&s->bytes_received, 0);
		atomic_store(&s->errors, 0);
		atomic_store(&s->retries, 0);
		for (int b = 0; b < ST_LATENCY_BUCKETS; b++)
			atomic_store(&s->latency[b], 0);
	}
	PG_RETURN_VOID();
}

Datum
nemo_checkpoint(PG_FUNCTION_ARGS)
{
	(void) nemo_thread();
	nemo_request_checkpoint(true);
	PG_RETURN_VOID();
}

/* Open a nemo table for a maintenance function; raises for anything else. */
Relation
nemo_open_table(Oid relid, LOCKMODE lockmode)
{
	Relation	rel = relation_open(relid, lockmode);

	if ((rel->rd_rel->relkind != RELKIND_RELATION && rel->rd_rel->relkind != RELKIND_MATVIEW) ||
		rel->rd_tableam != &nemo_table_am_routine)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("\"%s\" is not a nemo table", RelationGetRelationName(rel)),
				 errhint("Name a table created with USING nemo.")));
	if (!pg_class_ownercheck(relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_TABLE, RelationGetRelationName(rel));
	return rel;
}

static void
evict_tree(NemoTree tree)
{
	rb_error	err = {0};
	rb_status	status = rb_tree_evict(nemo_thread(), tree, &err);

	if (status != RB_OK)
		nemo_raise(status, &err);
}

Datum
nemo_evict(PG_FUNCTION_ARGS)
{
	Relation	rel = nemo_open_table(PG_GETARG_OID(0), AccessShareLock);
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	(void) nemo_thread();
	evict_tree(nemo_tree_of(rel));
	foreach(lc, indexes)
	{
		Relation	index = relation_open(lfirst_oid(lc), AccessShareLock);

		evict_tree(nemo_tree_of(index));
		relation_close(index, AccessShareLock);
	}
	list_free(indexes);
	relation_close(rel, AccessShareLock);
	PG_RETURN_VOID();
}
