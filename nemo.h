/*
 * nemo.h
 *	  What the glue files of the extension share: relations, keys, rows, visibility, logging, trees.
 *
 * Layers: nemo_am.c (table AM) and nemo_index.c (index AM) sit on nemo_mvcc.c (visibility, conflicts, installing
 * versions), nemo_rel.c (per-relation facts), nemo_row.c (row format) and nemo_key.c (key encodings); those on the
 * record buffer (buffer/rb.h) and the log (nemo_wal.c).  nemo_tree.c keeps the registry of trees, nemo_recovery.c
 * checkpoint and replay.  doc/architecture.md has the picture.
 */
#ifndef NEMO_H
#define NEMO_H

#include "postgres.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xlogdefs.h"
#include "executor/tuptable.h"
#include "lib/stringinfo.h"
#include "nodes/execnodes.h"
#include "nodes/lockoptions.h"
#include "storage/lmgr.h"
#include "utils/rel.h"
#include "utils/snapshot.h"

#include "buffer/rb.h"
#include "nemo_compat.h"
#include "nemo_key.h"

/* ---- settings (nemo.c) --------------------------------------------------------------------------------------------- */

extern char *nemo_store_url;			/* nemo.store; default "lmdb:nemo/store", relative to the data directory */
extern int	nemo_buffer_size_kb;		/* nemo.buffer_size */
extern int	nemo_checkpoint_interval_s; /* nemo.checkpoint_interval */
extern int	nemo_flush_workers;			/* nemo.flush_workers */
extern double nemo_simulated_latency_ms;	/* nemo.simulated_latency */
extern int	nemo_max_trees;				/* nemo.max_trees */

/* ---- trees --------------------------------------------------------------------------------------------------------- */

/* database oid << 32 | relfilenode: the first 8 bytes (big-endian) of every key.  Tree 0 holds Nemo's own records. */
typedef uint64 NemoTree;

extern NemoTree nemo_tree_of(Relation rel);

#define NEMO_TREE_TABLE		0x0001
#define NEMO_TREE_INDEX		0x0002
#define NEMO_TREE_INTKEY	0x0004	/* table: a fitting integer primary key is the rowid */
#define NEMO_TREE_UNIQUE_KEY 0x0008	/* index: key alone is unique (no locator suffix unless a column is null) */

/* one registry record; fixed for the life of the tree except where said */
typedef struct NemoTreeInfo
{
	NemoTree	tree;
	NemoTree	row_tree;		/* table: the tree that holds its rows (itself, or its clustered primary key's);
								 * index: the table tree its locators refer to */
	uint64		creator_xid;	/* 64-bit (sub)transaction id that created it; 0 = long committed */
	uint32		flags;
} NemoTreeInfo;

/* nemo_tree.c.  Directory in shared memory, logged, persisted at checkpoints. */
extern void nemo_tree_create(NemoTree tree, NemoTree row_tree, uint32 flags);	/* by the current (sub)transaction */
extern bool nemo_tree_get(NemoTree tree, NemoTreeInfo *info);
/* only for a tree created by the current subtransaction and still empty */
extern void nemo_tree_set_placement(NemoTree table, NemoTree row_tree, uint32 flags);
extern bool nemo_tree_is_new(const NemoTreeInfo *info);	/* created by the current subtransaction */
/* rowids are allocated in logged batches and never reused; returns the first of n consecutive ones (all >= 2^35) */
extern uint64 nemo_rowid_alloc(NemoTree table, uint32 n);
/* running estimates for the planner: rows and bytes added or removed */
extern void nemo_tree_count(NemoTree tree, int64 rows, int64 bytes);
extern void nemo_tree_estimate(NemoTree tree, double *rows, double *bytes);
extern bool nemo_database_has_trees(Oid dboid);
extern void nemo_tree_init(void);		/* _PG_init: transaction callbacks that follow pending relfilenode deletes (F6) */
extern Size nemo_tree_shmem_size(void);
extern void nemo_tree_shmem_init(bool found_unused);

/* ---- process state and the buffer (nemo.c) ------------------------------------------------------------------------- */

/*
 * This process's buffer thread.  First use attaches; raises 55000 when the library was not preloaded, 57P03 while
 * replay is under way (waits for it first, interruptibly), 0A000 on a standby.  Every AM entry point calls it.
 */
extern rb_thread *nemo_thread(void);
extern rb_thread *nemo_worker_thread(void);	/* the same without waiting for replay: for the workers */
extern rb_buffer *nemo_buffer(void);
extern st_store *nemo_store(void);		/* this process's store; raises when it cannot be opened */
/* the only place where lower-layer failures become ereport(ERROR) with SQLSTATE, DETAIL and HINT */
extern void nemo_raise(rb_status status, const rb_error *err) pg_attribute_noreturn();
extern void nemo_raise_store(st_status status, const st_error *err) pg_attribute_noreturn();
/* 64-bit form of a recent xid, and the settle horizon: xids before it are settled or aborted */
extern uint64 nemo_full_xid(TransactionId xid);
extern uint64 nemo_current_full_xid(void);	/* of the current subtransaction; assigns one */
extern uint64 nemo_settle_horizon(void);
extern bool nemo_commit_is_durable(TransactionId xid);	/* of a committed transaction */

/* ---- log (nemo_wal.c) ---------------------------------------------------------------------------------------------- */

typedef struct NemoChange
{
	rb_slice	key;
	rb_version *v;				/* RB_DATA or RB_DELETE, installed and pending */
} NemoChange;

extern void nemo_wal_init(void);		/* RegisterCustomRmgr */
/* log n installed pending versions in one record and stamp them; in a critical section of its own.  Inside the guard. */
extern void nemo_log_changes(const NemoChange *changes, int n);
extern XLogRecPtr nemo_log_withdraw(rb_slice key);	/* replay: key becomes absent */
#define NEMO_LOG_TREE_CREATE	1
#define NEMO_LOG_TREE_PLACEMENT	2
#define NEMO_LOG_ROWID			3
extern XLogRecPtr nemo_log_tree(int what, const NemoTreeInfo *info, uint64 next_rowid);

/* ---- checkpoint, replay, workers (nemo_recovery.c) ----------------------------------------------------------------- */

extern void nemo_recovery_init(void);	/* registers the background workers */
extern Size nemo_recovery_shmem_size(void);
extern void nemo_recovery_shmem_init(void);
extern void nemo_wait_ready(void);		/* returns when nemo tables may be used, raises when that has failed */
extern void nemo_request_checkpoint(bool wait);	/* raises if it failed */
extern void nemo_checkpoint_status(XLogRecPtr *checkpoint_lsn, XLogRecPtr *insert_lsn);
extern bool nemo_claimed_owner(char *owner /* 65 */, uint64 *epoch);	/* for nemo_store(): who we write as */

/* ---- keys and rows ------------------------------------------------------------------------------------------------- */

/* rowids: 36 bits.  An integer key in [0, 2^35) is its own rowid; allocated ones are >= 2^35. */
#define NEMO_ROWID_BITS		36
#define NEMO_ROWID_FIRST	(UINT64CONST(1) << 35)
#define NEMO_ROWID_MAX		((UINT64CONST(1) << NEMO_ROWID_BITS) - 1)

/* ctid = rowid and 4-bit version tag: block = rowid >> 4, offset = 1 + ((rowid & 15) << 4 | tag) */
static inline void
nemo_tid_set(ItemPointer tid, uint64 rowid, uint8 tag)
{
	ItemPointerSet(tid, (BlockNumber) (rowid >> 4), (OffsetNumber) (1 + ((rowid & 15) << 4 | (tag & 15))));
}
static inline bool
nemo_tid_get(const ItemPointerData *tid, uint64 *rowid, uint8 *tag)	/* false: not a ctid of ours */
{
	uint32		off = ItemPointerGetOffsetNumberNoCheck(tid);

	if (off < 1 || off > 256)
		return false;
	*rowid = (uint64) ItemPointerGetBlockNumberNoCheck(tid) << 4 | (off - 1) >> 4;
	*tag = (off - 1) & 15;
	return true;
}

/*
 * Row format (nemo_row.c), the data of a version in a row tree:
 *	flags byte (NEMO_ROW_*), [8-byte rowid when it cannot be had from the key], natts and null bitmap, heap-format data.
 * In a table tree that is not the row tree, the record of a rowid is the primary key suffix (the map).
 */
extern void nemo_row_form(Relation rel, TupleTableSlot *slot, bool with_rowid, uint64 rowid, StringInfo out);
extern bool nemo_row_rowid(const uint8 *data, uint32 len, uint64 *rowid);	/* false: not in the row: from the key */
/* palloc'ed heap tuple in CurrentMemoryContext with t_self, t_tableOid, xmin; raises ERRCODE_DATA_CORRUPTED */
extern HeapTuple nemo_row_tuple(Relation rel, const uint8 *data, uint32 len, uint64 rowid, uint8 tag, uint64 xid);

/* ---- per-relation facts (nemo_rel.c), cached per backend, rebuilt after invalidation ------------------------------- */

typedef struct NemoIndexInfo
{
	Oid			oid;
	NemoTree	tree;
	bool		clustered;		/* its tree is the table's row tree */
	bool		unique;			/* key decides uniqueness at once (immediate): NEMO_TREE_UNIQUE_KEY */
	NemoKeyDesc *desc;
	struct IndexInfo *ii;		/* for FormIndexDatum; see nemo_index_estate() for expression and predicate states */
	bool		plain;			/* neither expressions nor predicate */
	struct Bitmapset *attrs;	/* columns it depends on, offset by FirstLowInvalidHeapAttributeNumber */
} NemoIndexInfo;

typedef struct NemoRelInfo
{
	Oid			relid;
	NemoTree	tree;			/* table tree */
	NemoTree	row_tree;
	bool		clustered;		/* row_tree != tree */
	bool		intkey;			/* clustered on one integer column */
	int			nindexes;
	NemoIndexInfo *indexes;		/* ready ones (indisready), the clustered one first if any */
	/* what an UPDATE compares */
	int			nwatched;
	AttrNumber *watched;		/* columns that some index depends on */
	bool	   *watched_key;	/* a change of this one takes the stronger lock */
	bool		watch_all;		/* an index depends on the whole row */
} NemoRelInfo;

/*
 * Never NULL; valid until the end of the transaction (memory of an outdated one is kept until then).  A clustered table
 * whose clustered index has just been dropped still has clustered = true and no clustered entry in indexes.
 */
extern NemoRelInfo *nemo_rel(Relation rel);

/* key of a row: 8 bytes row tree + rowid (8 bytes) or encoded primary key.  Appends to out (reset first). */
extern void nemo_rowid_key(NemoTree tree, uint64 rowid, StringInfo out);
/*
 * Row key from a rowid.  Integer keys are computed; otherwise the rows recently handled by this backend, then the map
 * record (I/O).  false: there is no such row.
 */
extern bool nemo_row_key(NemoRelInfo *info, uint64 rowid, Snapshot snapshot, StringInfo out);
/* remember rowid -> primary key suffix for nemo_row_key() */
extern void nemo_remember_row(NemoRelInfo *info, uint64 rowid, rb_slice row_key);
/* rowid of a row found at row_key with this data */
extern uint64 nemo_rowid_of(NemoRelInfo *info, rb_slice row_key, const uint8 *data, uint32 len);

/* ---- visibility and conflicts (nemo_mvcc.c) ------------------------------------------------------------------------ */

/*
 * The version that a snapshot sees, or NULL.  MVCC, SELF, DIRTY (fills snapshot->xmin/xmax/speculativeToken), ANY (the
 * newest version not aborted, deleted or not).  Never returns LOCK versions; returns a DELETE version only for ANY.
 * Inside the guard.
 */
extern const rb_version *nemo_visible(const rb_version *head, Snapshot snapshot);

typedef struct NemoChain
{
	const rb_version *head;
	const rb_version *live;		/* newest data or delete version that is not aborted: ours, running or committed; or NULL */
	bool		live_own;		/* written by the current transaction (any of its subtransactions) */
	TransactionId wait_xid;		/* somebody else's running transaction that a writer/locker in `mode` must wait for */
	uint32		speculative_token;	/* of wait_xid's speculative insertion, or 0 */
	TransactionId live_xid;		/* somebody else's running transaction that wrote live, in any mode */
	const rb_version *stable;	/* newest data or delete version that is ours or committed; or NULL */
	bool		locked;			/* a running transaction's row lock is, or may be, in the chain */
	int			finished;		/* row locks below keep whose transactions are over */
	int			own_lock;		/* strongest LockTupleMode that we hold on it explicitly, -1 none */
	const rb_version *keep;		/* for rb_put_args */
	const rb_version *cut;
} NemoChain;

/* Inside the guard.  mode: what the caller wants to do to the row (LockTupleMode). */
extern void nemo_examine(const rb_version *head, LockTupleMode mode, NemoChain *chain);

/*
 * A private version ready to install (xid, pending LSN set).  kind RB_DATA/RB_DELETE/RB_LOCK.  Outside the guard; may
 * evict; raises.  mode is kept in aux for RB_LOCK and, for writers, says NoKeyExclusive or Exclusive.
 */
extern rb_version *nemo_prepare(uint32 key_len, rb_kind kind, uint8 tag, CommandId cid, uint32 aux,
								const void *data, uint32 len);
extern void nemo_discard(rb_version *v);
/* Install v over chain->head and log it.  false: the head has changed, examine again.  Inside the guard. */
extern bool nemo_install(rb_slice key, rb_version *v, const NemoChain *chain);

/*
 * Wait for another transaction outside the guard, under a wait policy; false = would block (skip), raises 55P03 for
 * NOWAIT.  Speculative tokens are waited for as such.
 */
extern bool nemo_wait_for(Relation rel, ItemPointer tid, TransactionId xid, uint32 token, LockWaitPolicy policy,
						  XLTW_Oper oper);
/* rb_lookup that fetches on a miss (probe = for an insertion).  Returns with the guard held. */
extern void nemo_lookup_enter(rb_slice key, bool probe, const rb_version **head);

/* ---- between table AM and index AM --------------------------------------------------------------------------------- */

extern const TableAmRoutine nemo_table_am_routine;

/* what the index scan hands to index_fetch_tuple: the scan's xs_heapfetch is one of these when the table is ours */
typedef struct NemoIndexFetch
{
	IndexFetchTableData base;
	NemoRelInfo *info;
	bool		have;			/* the index scan has just found this row: */
	bool		index_only;		/* the row itself is not wanted: existence was decided by the index entry */
	ItemPointerData tid;
	HeapTuple	tuple;			/* clustered scan: the visible row, owned by the index scan until its next call */
	StringInfoData row_key;		/* secondary scan: full key of the row in the row tree; empty = by rowid */
} NemoIndexFetch;

/*
 * A row of a clustered table is formed by the table AM (insert, or update that moves it) and placed when the executor
 * inserts its primary key entry: nemo_index_insert on the clustered index calls this.  false = conflicting key under
 * UNIQUE_CHECK_PARTIAL (nothing placed).  Raises unique_violation with heap's texts.  A tid that is not pending is an
 * update that left the row in place: returns true at once.
 */
extern bool nemo_place_row(Relation rel, Relation index, Datum *values, bool *isnull, ItemPointer tid,
						   IndexUniqueCheck check);
/* raise unique_violation with btree's message and detail */
extern void nemo_unique_violation(Relation index, Datum *values, bool *isnull, Relation rel) pg_attribute_noreturn();

/* true: the update just done by tuple_update left this index's entry for tid as it is: nothing to insert */
extern bool nemo_update_left_index(Relation rel, Oid indexoid, ItemPointer tid);

/*
 * true: the row was inserted a moment ago by this transaction, and no snapshot sees any other row of that rowid; so the
 * trees of secondary indexes hold no entry of it.
 */
extern bool nemo_row_is_fresh(const NemoRelInfo *info, uint64 rowid);

/* nemo_index.c: versioned delete of one entry, by DELETE and by UPDATEs that change the key */
extern void nemo_index_delete_entry(Relation rel, NemoRelInfo *info, NemoIndexInfo *index, Datum *values, bool *isnull,
									uint64 rowid, rb_slice row_key, CommandId cid);
extern bool nemo_index_insert(Relation index, Datum *values, bool *isnull, ItemPointer tid, Relation heap,
							  IndexUniqueCheck check, bool unchanged, struct IndexInfo *ii);

/* nemo_place.c: see nemo_ddl.h */
extern void nemo_fix_placement(Oid relid);

#endif							/* NEMO_H */
