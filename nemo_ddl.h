/*
 * nemo_ddl.h
 *	  How a stock server is brought to use nemo_index: catalog plumbing (nemo_ddl.c),
 *	  utility statements (nemo_utility.c), masks, planner and executor hooks (nemo_plan.c), ON CONFLICT (nemo_upsert.c).
 *
 * Everything here runs in a backend, inside a transaction, with no latch of the record buffer held, and may raise.
 */
#ifndef NEMO_DDL_H
#define NEMO_DDL_H

#include "postgres.h"

#include "access/amapi.h"
#include "access/tableam.h"
#include "executor/execdesc.h"
#include "fmgr.h"
#include "utils/rel.h"

/* _PG_init: installs the hooks (chaining those before) and the invalidation and transaction callbacks */
extern void nemo_ddl_init(void);

/*
 * Catalog questions, answered from the syscache: they tell what the catalogs say now, not what an open Relation runs.
 * Our methods are known by their handler functions, whatever they are called.
 */
extern bool nemo_is_nemo_am(Oid amoid); /* a table or index method of ours */
extern bool nemo_is_nemo_table(Oid relid);	/* false also when there is no such relation */
extern Oid	nemo_index_am_oid(void);	/* of this database; InvalidOid when the extension is not there */

/* What an open relation runs. */
static inline bool nemo_relation_is_nemo_table(Relation rel);
static inline bool nemo_relation_is_nemo_index(Relation rel);

/* ---- used by the hooks, implemented elsewhere ---------------------------------------------------------------- */

/* nemo_am.c, nemo_index.c */
extern Datum nemo_table_handler(PG_FUNCTION_ARGS);
extern Datum nemo_index_handler(PG_FUNCTION_ARGS);
extern const TableAmRoutine nemo_table_am_routine;
extern bool nemo_index_insert(Relation index, Datum *values, bool *isnull, ItemPointer tid, Relation heap,
							  IndexUniqueCheck check, bool unchanged, struct IndexInfo *ii);

/* for the planner: size of an index as a tree of pages, and whether key column col (from 0) is in btree's order */
extern void nemo_index_estimate(Oid indexoid, BlockNumber *pages, double *tuples, int *height);
extern bool nemo_index_column_ordered(Oid indexoid, int col);

/*
 * Put the rows of a table where its primary key wants them; nothing to do when they are there already.  Called after
 * every utility statement that created or dropped an index or constraint of the table, rewrote or truncated it, with
 * the statement's effects visible and an active snapshot set.  The statement's locks are still held unless it was one
 * that commits in between (VACUUM FULL, CLUSTER).
 */
extern void nemo_fix_placement(Oid relid);

/* does any tree belong to this database?  Must answer (false) when the library was not preloaded, too */
extern bool nemo_database_has_trees(Oid dboid);

/* ---- among these files --------------------------------------------------------------------------------------- */

extern void nemo_plan_init(void);	/* these two by nemo_ddl_init() */
extern void nemo_utility_init(void);

/* can a hook look at catalogs now, and is there anything of ours in this database?  Cheap */
extern bool nemo_hooks_apply(void);
/* pg_class.relam as the syscache has it; InvalidOid when there is no such relation */
extern Oid	nemo_relation_method(Oid relid);

/* the rows of this table may have to move when the running utility statement is done */
extern void nemo_note_table(Oid relid);
extern bool nemo_refreshing_concurrently(void);

/*
 * Let the relcache copy of an open nemo_index index read as btree until nemo_unmask(tag), or the end of the current
 * (sub)transaction by abort.  The caller keeps the index open for as long.
 */
extern void nemo_mask_index(Relation index, const void *tag);
/* The same by oid, keeping the relcache entry open by itself; does nothing unless it is an index of ours. */
extern void nemo_mask_index_oid(Oid indexoid, const void *tag);
extern void nemo_unmask(const void *tag);

extern void nemo_upsert_start(QueryDesc *query, int eflags);	/* after standard_ExecutorStart */
extern void nemo_upsert_end(QueryDesc *query);	/* before standard_ExecutorEnd */
/* at abort of subtransaction subid; InvalidSubTransactionId: at the end of the transaction.  No catalog access */
extern void nemo_upsert_forget(SubTransactionId subid);
extern void nemo_upsert_reparent(SubTransactionId subid, SubTransactionId parent);

static inline bool
nemo_relation_is_nemo_table(Relation rel)
{
	return rel->rd_tableam == &nemo_table_am_routine;
}

static inline bool
nemo_relation_is_nemo_index(Relation rel)
{
	return rel->rd_indam != NULL && rel->rd_indam->aminsert == nemo_index_insert;
}

#endif							/* NEMO_DDL_H */
