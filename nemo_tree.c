/*
 * nemo_tree.c
 *	  The directory of trees in shared memory: who made a tree, where its rows are, which rowids are free.
 *
 * Ownership: every field of an entry is protected by `lock`, but for the estimates, which are atomics touched under the
 * shared lock.  Changes are logged while the lock is held exclusively, so a copy taken under the lock never lags the
 * log; the checkpoint makes the log durable before it stores such copies (nemo_recovery.c).
 *
 * Trees follow the relation files of their relations (F6): what PostgreSQL is about to delete at this commit or abort is
 * marked as dropped at the same moment, from callbacks that must not fail, and removed later by the checkpointer.  A
 * commit under way is noted in drop_xid first: a checkpoint between the commit record and the mark would else lose it.
 */
#include "nemo_log.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/storage.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#define ROWID_BATCH 1024		/* rowids per log record; up to as many are lost in a crash */
#define REUSE_WAIT_MS 5000		/* for the removal of a dropped tree whose number comes up again */

typedef struct TreeEntry
{
	NemoTree	tree;			/* hash key */
	NemoTreeInfo info;
	uint64		next_rowid;		/* next to hand out */
	uint64		logged_rowid;	/* none at or above it may be handed out before another log record */
	uint64		drop_xid;		/* top-level transaction that is about to commit a drop, or 0 */
	XLogRecPtr	drop_lsn;
	bool		dropped;
	uint64		changes;		/* counts changes that must be stored */
	uint64		saved;			/* value of `changes` that has been stored */
	int64		saved_rows;
	int64		saved_bytes;
	pg_atomic_uint64 rows;		/* int64 each */
	pg_atomic_uint64 bytes;
} TreeEntry;

typedef struct TreeShared
{
	LWLock		lock;
	int			tranche;
	int			count;			/* entries in the directory */
	int			dropped;		/* of them, waiting for removal */
} TreeShared;

static TreeShared *shared = NULL;
static HTAB *directory = NULL;

Size
nemo_tree_shmem_size(void)
{
	return add_size(MAXALIGN(sizeof(TreeShared)), hash_estimate_size(nemo_max_trees, sizeof(TreeEntry)));
}

/* Called in the startup hook, under AddinShmemInitLock. */
void
nemo_tree_shmem_init(bool found_unused)
{
	HASHCTL		ctl = {0};
	bool		found;

	(void) found_unused;
	shared = ShmemInitStruct("nemo trees", sizeof(TreeShared), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(TreeShared));
		shared->tranche = LWLockNewTrancheId();
		LWLockInitialize(&shared->lock, shared->tranche);
	}
	LWLockRegisterTranche(shared->tranche, "NemoTrees");
	ctl.keysize = sizeof(NemoTree);
	ctl.entrysize = sizeof(TreeEntry);
	directory = ShmemInitHash("nemo tree directory", nemo_max_trees, nemo_max_trees, &ctl, HASH_ELEM | HASH_BLOBS);
}

static void
need_shared(void)
{
	if (shared == NULL)
		(void) nemo_buffer();	/* raises */
}

static TreeEntry *
find(NemoTree tree)
{
	return hash_search(directory, &tree, HASH_FIND, NULL);
}

/* Under the exclusive lock.  NULL: the directory is full.  An entry that existed is wiped. */
static TreeEntry *
enter(const NemoTreeInfo *info)
{
	TreeEntry  *e = find(info->tree);
	bool		found;

	if (e == NULL)
	{
		if (shared->count >= nemo_max_trees)
			return NULL;
		e = hash_search(directory, &info->tree, HASH_ENTER_NULL, &found);
		if (e == NULL)
			return NULL;
		shared->count++;
	}
	else if (e->dropped)
		shared->dropped--;
	memset((char *) e + sizeof(e->tree), 0, sizeof(*e) - sizeof(e->tree));
	e->info = *info;
	e->next_rowid = e->logged_rowid = NEMO_ROWID_FIRST;
	e->changes = 1;
	pg_atomic_init_u64(&e->rows, 0);
	pg_atomic_init_u64(&e->bytes, 0);
	return e;
}

static void
raise_full(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("too many nemo tables and indexes"),
			 errdetail("The directory of trees has room for %d.", nemo_max_trees),
			 errhint("Increase nemo.max_trees and restart the server.")));
}

static void
raise_missing(NemoTree tree)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("nemo does not know relation file %u of database %u", (uint32) tree, (uint32) (tree >> 32)),
			 errhint("The relation was not created by this cluster's nemo; restore it from a backup.")));
}

NemoTree
nemo_tree_of(Relation rel)
{
	NemoRelFile file = NEMO_RELFILE(rel);

	return (uint64) NEMO_RELFILE_DB(file) << 32 | NEMO_RELFILE_NUMBER(file);
}

/* ---- creating and asking ------------------------------------------------------------------------------------------- */

/*
 * The relation's file must have been created (and so registered for deletion at abort) before: whatever fails from here
 * on is then undone by the callbacks below.
 */
void
nemo_tree_create(NemoTree tree, NemoTree row_tree, uint32 flags)
{
	rb_thread  *thread = nemo_thread();
	NemoTreeInfo info = {0};
	TreeEntry  *e;
	rb_error	err = {0};
	rb_status	status;

	info.tree = tree;
	info.row_tree = row_tree;
	info.creator_xid = nemo_current_full_xid();
	info.flags = flags;

	/* the number of a dropped relation may come up again before its tree has been removed */
	for (int waited = 0;; waited += 50)
	{
		LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
		e = find(tree);
		if (e == NULL)
			break;
		if (!e->dropped || waited >= REUSE_WAIT_MS)
		{
			LWLockRelease(&shared->lock);
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("relation file %u still has records in the nemo store", (uint32) tree),
					 errhint("Try again; another number is then used.")));
		}
		LWLockRelease(&shared->lock);
		nemo_wake_checkpointer();
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 50, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}

	e = enter(&info);
	if (e == NULL)
	{
		LWLockRelease(&shared->lock);
		raise_full();
	}
	(void) nemo_log_tree(NEMO_LOG_TREE_CREATE, &info, e->logged_rowid);
	LWLockRelease(&shared->lock);

	status = rb_tree_create(thread, tree, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
}

bool
nemo_tree_get(NemoTree tree, NemoTreeInfo *info)
{
	TreeEntry  *e;
	bool		found;

	need_shared();
	LWLockAcquire(&shared->lock, LW_SHARED);
	e = find(tree);
	found = e != NULL && !e->dropped;
	if (found)
		*info = e->info;
	LWLockRelease(&shared->lock);
	return found;
}

bool
nemo_tree_is_new(const NemoTreeInfo *info)
{
	TransactionId xid = GetCurrentTransactionIdIfAny();

	return TransactionIdIsValid(xid) && info->creator_xid != 0 && info->creator_xid == nemo_current_full_xid();
}

void
nemo_tree_set_placement(NemoTree table, NemoTree row_tree, uint32 flags)
{
	TreeEntry  *e;
	NemoTreeInfo info;

	need_shared();
	(void) nemo_current_full_xid();
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(table);
	if (e == NULL || e->dropped)
	{
		LWLockRelease(&shared->lock);
		raise_missing(table);
	}
	info = e->info;
	info.row_tree = row_tree;
	info.flags = flags;
	e->info = info;
	e->changes++;
	(void) nemo_log_tree(NEMO_LOG_TREE_PLACEMENT, &info, e->logged_rowid);
	LWLockRelease(&shared->lock);
}

uint64
nemo_rowid_alloc(NemoTree table, uint32 n)
{
	TreeEntry  *e;
	uint64		first;

	Assert(n > 0);
	need_shared();
	/* the log record must belong to a transaction whose commit waits for it */
	(void) nemo_current_full_xid();
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(table);
	if (e == NULL || e->dropped)
	{
		LWLockRelease(&shared->lock);
		raise_missing(table);
	}
	first = e->next_rowid;
	if (first + n - 1 > NEMO_ROWID_MAX)
	{
		LWLockRelease(&shared->lock);
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("a nemo table has no more row numbers"),
				 errdetail("Row numbers of deleted rows are not used again."),
				 errhint("Rewrite the table, for example with VACUUM FULL.")));
	}
	if (first + n > e->logged_rowid)
	{
		e->logged_rowid = Min(first + Max(n, ROWID_BATCH), NEMO_ROWID_MAX + 1);
		e->changes++;
		(void) nemo_log_tree(NEMO_LOG_ROWID, &e->info, e->logged_rowid);
	}
	e->next_rowid = first + n;
	LWLockRelease(&shared->lock);
	return first;
}

void
nemo_tree_count(NemoTree tree, int64 rows, int64 bytes)
{
	TreeEntry  *e;

	need_shared();
	LWLockAcquire(&shared->lock, LW_SHARED);
	e = find(tree);
	if (e != NULL)
	{
		pg_atomic_fetch_add_u64(&e->rows, rows);
		pg_atomic_fetch_add_u64(&e->bytes, bytes);
	}
	LWLockRelease(&shared->lock);
}

void
nemo_tree_estimate(NemoTree tree, double *rows, double *bytes)
{
	TreeEntry  *e;

	need_shared();
	*rows = *bytes = 0;
	LWLockAcquire(&shared->lock, LW_SHARED);
	e = find(tree);
	if (e != NULL)
	{
		/* counts of aborted and crashed transactions are never taken back, so they drift both ways */
		*rows = (double) Max((int64) pg_atomic_read_u64(&e->rows), 0);
		*bytes = (double) Max((int64) pg_atomic_read_u64(&e->bytes), 0);
	}
	LWLockRelease(&shared->lock);
}

bool
nemo_database_has_trees(Oid dboid)
{
	HASH_SEQ_STATUS scan;
	TreeEntry  *e;
	bool		has = false;

	need_shared();
	LWLockAcquire(&shared->lock, LW_SHARED);
	hash_seq_init(&scan, directory);
	while ((e = hash_seq_search(&scan)) != NULL)
	{
		if ((Oid) (e->tree >> 32) == dboid && !e->dropped)
		{
			has = true;
			hash_seq_term(&scan);
			break;
		}
	}
	LWLockRelease(&shared->lock);
	return has;
}

/* ---- for checkpoint and replay ------------------------------------------------------------------------------------- */

void
nemo_tree_reset(void)
{
	HASH_SEQ_STATUS scan;
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	hash_seq_init(&scan, directory);
	while ((e = hash_seq_search(&scan)) != NULL)
		hash_search(directory, &e->tree, HASH_REMOVE, NULL);
	shared->count = shared->dropped = 0;
	LWLockRelease(&shared->lock);
}

void
nemo_tree_load(const NemoTreeRecord *record)
{
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = enter(&record->info);
	if (e == NULL)
	{
		LWLockRelease(&shared->lock);
		raise_full();
	}
	e->next_rowid = e->logged_rowid = record->next_rowid;
	e->drop_xid = record->drop_xid;
	e->dropped = record->dropped;
	e->saved = e->changes;
	e->saved_rows = record->rows;
	e->saved_bytes = record->bytes;
	pg_atomic_write_u64(&e->rows, (uint64) record->rows);
	pg_atomic_write_u64(&e->bytes, (uint64) record->bytes);
	if (e->dropped)
		shared->dropped++;
	LWLockRelease(&shared->lock);
}

/*
 * Replay of a tree record.  The directory may already hold a later state, stored by a checkpoint that did not complete:
 * rowids only grow, the rest is overwritten and overtaken again by the records that follow.
 */
void
nemo_tree_redo(const NemoWalTree *wal)
{
	NemoTreeInfo info = {0};
	TreeEntry  *e;

	info.tree = wal->tree;
	info.row_tree = wal->row_tree;
	info.creator_xid = wal->creator_xid;
	info.flags = wal->flags;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(wal->tree);
	if (wal->what == NEMO_LOG_TREE_CREATE && (e == NULL || e->dropped || e->info.creator_xid != wal->creator_xid))
	{
		e = enter(&info);
		if (e == NULL)
		{
			LWLockRelease(&shared->lock);
			raise_full();
		}
	}
	else if (e != NULL && wal->what == NEMO_LOG_TREE_PLACEMENT)
	{
		e->info.row_tree = wal->row_tree;
		e->info.flags = wal->flags;
	}
	if (e != NULL)
	{
		e->next_rowid = e->logged_rowid = Max(e->logged_rowid, wal->next_rowid);
		e->changes++;
	}
	LWLockRelease(&shared->lock);
}

bool
nemo_tree_live(NemoTree tree)
{
	TreeEntry  *e;
	bool		live;

	LWLockAcquire(&shared->lock, LW_SHARED);
	e = find(tree);
	live = e != NULL && !e->dropped;
	LWLockRelease(&shared->lock);
	return live;
}

bool
nemo_tree_mark_dropped(NemoTree tree, XLogRecPtr lsn)
{
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(tree);
	if (e != NULL && !e->dropped)
	{
		e->dropped = true;
		e->drop_lsn = lsn;
		e->changes++;
		shared->dropped++;
	}
	LWLockRelease(&shared->lock);
	return e != NULL;
}

NemoTreeRecord *
nemo_tree_copy(bool all, int *n)
{
	HASH_SEQ_STATUS scan;
	TreeEntry  *e;
	NemoTreeRecord *records;
	int			room;

	*n = 0;
	LWLockAcquire(&shared->lock, LW_SHARED);
	room = shared->count;
	records = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(NemoTreeRecord) * (Size) Max(room, 1));
	hash_seq_init(&scan, directory);
	while ((e = hash_seq_search(&scan)) != NULL)
	{
		NemoTreeRecord *r = &records[*n];
		int64		rows = (int64) pg_atomic_read_u64(&e->rows);
		int64		bytes = (int64) pg_atomic_read_u64(&e->bytes);

		if (!all && e->changes == e->saved && rows == e->saved_rows && bytes == e->saved_bytes)
			continue;
		Assert(*n < room);
		r->info = e->info;
		r->next_rowid = e->logged_rowid;
		r->rows = rows;
		r->bytes = bytes;
		r->drop_xid = e->drop_xid;
		r->dropped = e->dropped;
		r->changes = e->changes;
		(*n)++;
	}
	LWLockRelease(&shared->lock);
	return records;
}

void
nemo_tree_saved(const NemoTreeRecord *records, int n)
{
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < n; i++)
	{
		TreeEntry  *e = find(records[i].info.tree);

		if (e == NULL || e->info.creator_xid != records[i].info.creator_xid)
			continue;
		e->saved = records[i].changes;
		e->saved_rows = records[i].rows;
		e->saved_bytes = records[i].bytes;
	}
	LWLockRelease(&shared->lock);
}

void
nemo_tree_settle(NemoTree tree)
{
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(tree);
	if (e != NULL && e->info.creator_xid != 0)
	{
		e->info.creator_xid = 0;
		e->changes++;
	}
	LWLockRelease(&shared->lock);
}

void
nemo_tree_keep(NemoTree tree)
{
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(tree);
	if (e != NULL && e->drop_xid != 0)
	{
		e->drop_xid = 0;
		e->changes++;
	}
	LWLockRelease(&shared->lock);
}

bool
nemo_tree_any_dropped(void)
{
	bool		any;

	LWLockAcquire(&shared->lock, LW_SHARED);
	any = shared->dropped > 0;
	LWLockRelease(&shared->lock);
	return any;
}

NemoTree *
nemo_tree_dropped(int *n, XLogRecPtr *lsn)
{
	HASH_SEQ_STATUS scan;
	TreeEntry  *e;
	NemoTree   *trees;

	*n = 0;
	*lsn = InvalidXLogRecPtr;
	LWLockAcquire(&shared->lock, LW_SHARED);
	trees = palloc(sizeof(NemoTree) * (Size) Max(shared->dropped, 1));
	hash_seq_init(&scan, directory);
	while ((e = hash_seq_search(&scan)) != NULL)
	{
		if (!e->dropped)
			continue;
		trees[(*n)++] = e->tree;
		*lsn = Max(*lsn, e->drop_lsn);
	}
	LWLockRelease(&shared->lock);
	return trees;
}

void
nemo_tree_forget(NemoTree tree)
{
	TreeEntry  *e;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	e = find(tree);
	if (e != NULL)
	{
		if (e->dropped)
			shared->dropped--;
		hash_search(directory, &tree, HASH_REMOVE, NULL);
		shared->count--;
	}
	LWLockRelease(&shared->lock);
}

/* ---- following the fate of relation files (F6) --------------------------------------------------------------------- */

typedef enum FileFate
{
	FATE_DOUBT,					/* the commit that deletes it is about to be logged */
	FATE_KEPT,					/* it did not commit */
	FATE_DROPPED
} FileFate;

/*
 * files[]: what smgrGetPendingDeletes() says of the current (sub)transaction.  Does not raise once the transaction has
 * committed: the array is small, and PostgreSQL itself allocates more at that point.  Returns how many trees it met.
 */
static int
follow_files(bool for_commit, FileFate fate, uint64 xid, XLogRecPtr lsn)
{
	NemoRelFile *files;
	int			n = smgrGetPendingDeletes(for_commit, &files);
	int			met = 0;

	if (n == 0)
		return 0;
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < n; i++)
	{
		TreeEntry  *e = find((uint64) NEMO_RELFILE_DB(files[i]) << 32 | NEMO_RELFILE_NUMBER(files[i]));

		if (e == NULL)
			continue;
		met++;
		if (fate == FATE_DROPPED)
		{
			if (!e->dropped)
				shared->dropped++;
			e->dropped = true;
			e->drop_lsn = lsn;
		}
		else
			e->drop_xid = fate == FATE_DOUBT ? xid : 0;
		e->changes++;
	}
	LWLockRelease(&shared->lock);
	pfree(files);
	if (met > 0 && fate == FATE_DROPPED)
		nemo_wake_checkpointer();
	return met;
}

static void
tree_xact_callback(XactEvent event, void *arg)
{
	(void) arg;
	if (shared == NULL)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			/* a transaction that deletes files has an id, or gets one in commit: never a bare one here */
			if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
				(void) follow_files(true, FATE_DOUBT, U64FromFullTransactionId(GetTopFullTransactionId()),
									InvalidXLogRecPtr);
			break;
		case XACT_EVENT_COMMIT:
			(void) follow_files(true, FATE_DROPPED, 0, XactLastCommitEnd);
			(void) nemo_xact_touched(true);
			break;
		case XACT_EVENT_ABORT:
			/* nothing of an aborted tree is ever looked at again, so its removal need not wait for the log */
			(void) follow_files(true, FATE_KEPT, 0, InvalidXLogRecPtr);
			(void) follow_files(false, FATE_DROPPED, 0, InvalidXLogRecPtr);
			(void) nemo_xact_touched(true);
			break;
		case XACT_EVENT_PRE_PREPARE:
			if (nemo_xact_touched(false) || follow_files(true, FATE_KEPT, 0, InvalidXLogRecPtr) > 0 ||
				follow_files(false, FATE_KEPT, 0, InvalidXLogRecPtr) > 0)
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("cannot PREPARE a transaction that has changed nemo tables"),
						 errhint("Use COMMIT instead of two-phase commit.")));
			break;
		default:
			break;
	}
}

static void
tree_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	(void) my;
	(void) parent;
	(void) arg;
	if (shared != NULL && event == SUBXACT_EVENT_ABORT_SUB)
		(void) follow_files(false, FATE_DROPPED, 0, InvalidXLogRecPtr);
}

void
nemo_tree_init(void)
{
	RegisterXactCallback(tree_xact_callback, NULL);
	RegisterSubXactCallback(tree_subxact_callback, NULL);
}
