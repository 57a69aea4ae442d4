/*
 * nemo_replay.c
 *	  Applies the log since Nemo's checkpoint to the record buffer (INVARIANTS E4-E6, F6).
 *
 * Runs in the checkpointer, after the server's own recovery, while no backend touches nemo tables.  Changes are full
 * images in LSN order, of committed transactions only: the commit status of every id in the log is final, as a nemo
 * transaction cannot be prepared and none runs before replay has ended.  Applying a prefix of the log twice is harmless:
 * whatever state the buffer and the store are in, the rest of the log overtakes it.
 */
#include "nemo_replay.h"

#include "access/rmgr.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xlogutils.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#define NOTE_EVERY 1000			/* records */

#if PG_VERSION_NUM >= 170000
#define OLDEST_CLOG_XID (TransamVariables->oldestClogXid)
#else
#define OLDEST_CLOG_XID (ShmemVariableCache->oldestClogXid)
#endif

/* ---- transactions -------------------------------------------------------------------------------------------------- */

typedef enum XidFate
{
	XID_COMMITTED,
	XID_NOT_COMMITTED,
	XID_FORGOTTEN				/* its status has been truncated */
} XidFate;

static XidFate
xid_fate(TransactionId xid)
{
	XidFate		fate;

	/* the status of an id in reach must not be truncated between the test and the look */
	LWLockAcquire(XactTruncationLock, LW_SHARED);
	if (TransactionIdPrecedes(xid, OLDEST_CLOG_XID))
		fate = XID_FORGOTTEN;
	else
		fate = TransactionIdDidCommit(xid) ? XID_COMMITTED : XID_NOT_COMMITTED;
	LWLockRelease(XactTruncationLock);
	return fate;
}

/*
 * A creator older than all transaction status committed: VACUUM removes the status of old ids only, and the trees of
 * aborted ones are removed as they abort, or by the first replay after the crash that ended them.
 */
bool
nemo_full_xid_committed(uint64 full)
{
	uint64		next = U64FromFullTransactionId(ReadNextFullTransactionId());

	if (full >= next)
		return false;			/* its log was lost in the crash, and so was its id */
	if (next - full > PG_INT32_MAX)
		return true;			/* beyond the reach of 32-bit comparisons */
	return xid_fate((TransactionId) full) != XID_NOT_COMMITTED;
}

static bool
record_committed(TransactionId xid)
{
	static TransactionId last = InvalidTransactionId;
	static bool last_committed = false;

	if (!TransactionIdIsNormal(xid))
		return false;
	if (xid != last)
	{
		XidFate		fate = xid_fate(xid);

		if (fate == XID_FORGOTTEN)
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("cannot replay changes of transaction %u: its status has been removed", xid),
					 errdetail("Nemo's last checkpoint is too old."),
					 errhint("Restore the cluster and the store from backups taken together.")));
		last_committed = fate == XID_COMMITTED;
		last = xid;
	}
	return last_committed;
}

/* ---- applying ------------------------------------------------------------------------------------------------------ */

static uint64
tree_in_key(const uint8 *key)
{
	uint64		tree = 0;

	for (int i = 0; i < RB_TREE_LEN; i++)
		tree = tree << 8 | key[i];
	return tree;
}

static void
apply(rb_slice key, uint8 kind, uint8 tag, rb_slice data)
{
	rb_thread  *thread = nemo_worker_thread();
	rb_version *v;
	rb_error	err = {0};
	rb_put_args args = {0};
	rb_status	status;

	if (kind != RB_DATA)
		data.len = 0;			/* where a row moved matters only to those who waited for its deleter */
	status = rb_version_new(thread, key.len, data.len, true, &v, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	v->len = data.len;
	v->kind = kind == RB_DATA ? RB_DATA : RB_DELETE;
	v->tag = tag;
	if (data.len > 0)
		memcpy((uint8 *) rb_data(v), data.data, data.len);

	args.key = key;
	args.v = v;
	args.blind = true;
	args.dirty = true;
	rb_enter(thread);
	status = rb_put(thread, &args);
	rb_leave(thread);
	if (status != RB_OK)
	{
		rb_version_free(thread, v);
		elog(ERROR, "nemo replay could not place a change: status %d", (int) status);
	}
}

static void
apply_changes(XLogReaderState *record)
{
	const char *at = XLogRecGetData(record);
	const char *end = at + XLogRecGetDataLen(record);
	NemoTree	last = 0;
	bool		last_live = false;
	NemoWalChange head;
	rb_slice	key;
	rb_slice	data;

	if (!record_committed(XLogRecGetXid(record)))
		return;
	while (at < end)
	{
		NemoTree	tree;

		if (!nemo_wal_next(&at, end, &head, &key, &data))
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("malformed nemo log record at %X/%X", LSN_FORMAT_ARGS(record->ReadRecPtr))));
		tree = tree_in_key(key.data);
		if (tree != last)
		{
			/* an unknown tree was dropped before the registry was last stored */
			last_live = nemo_tree_live(tree);
			last = tree;
		}
		if (last_live)
			apply(key, head.kind, head.tag, data);
	}
}

static void
apply_tree(XLogReaderState *record)
{
	NemoWalTree wal;

	if (XLogRecGetDataLen(record) != sizeof(wal))
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("malformed nemo log record at %X/%X", LSN_FORMAT_ARGS(record->ReadRecPtr))));
	memcpy(&wal, XLogRecGetData(record), sizeof(wal));
	/* a number used again: what is left of the dropped tree goes before the new one begins */
	if (wal.what == NEMO_LOG_TREE_CREATE && nemo_tree_any_dropped() && !nemo_tree_live(wal.tree))
		nemo_remove_dropped();
	/* a placement is part of the transaction that created the tree: if it aborted, the whole tree goes anyway */
	nemo_tree_redo(&wal);
}

static void
drop_files(const NemoRelFile *files, int n, XLogRecPtr lsn)
{
	for (int i = 0; i < n; i++)
		(void) nemo_tree_mark_dropped((uint64) NEMO_RELFILE_DB(files[i]) << 32 | NEMO_RELFILE_NUMBER(files[i]), lsn);
}

#if PG_VERSION_NUM >= 160000
#define PARSED_FILES(parsed) ((parsed).xlocators)
#else
#define PARSED_FILES(parsed) ((parsed).xnodes)
#endif

static void
follow_xact(XLogReaderState *record)
{
	uint8		info = XLogRecGetInfo(record);

	switch (info & XLOG_XACT_OPMASK)
	{
		case XLOG_XACT_COMMIT:
		case XLOG_XACT_COMMIT_PREPARED:
			{
				xl_xact_parsed_commit parsed;

				ParseCommitRecord(info, (xl_xact_commit *) XLogRecGetData(record), &parsed);
				drop_files(PARSED_FILES(parsed), parsed.nrels, record->EndRecPtr);
				break;
			}
		case XLOG_XACT_ABORT:
		case XLOG_XACT_ABORT_PREPARED:
			{
				xl_xact_parsed_abort parsed;

				ParseAbortRecord(info, (xl_xact_abort *) XLogRecGetData(record), &parsed);
				drop_files(PARSED_FILES(parsed), parsed.nrels, record->EndRecPtr);
				break;
			}
		default:
			break;
	}
}

static void
apply_record(XLogReaderState *record)
{
	switch (XLogRecGetInfo(record) & ~XLR_INFO_MASK)
	{
		case NEMO_XLOG_CHANGES:
			apply_changes(record);
			break;
		case NEMO_XLOG_WITHDRAW:
			if (XLogRecGetDataLen(record) >= RB_TREE_LEN && XLogRecGetDataLen(record) <= RB_MAX_KEY &&
				record_committed(XLogRecGetXid(record)))
			{
				rb_slice	key = {(const uint8 *) XLogRecGetData(record), XLogRecGetDataLen(record)};

				if (nemo_tree_live(tree_in_key(key.data)))
					apply(key, RB_DELETE, 0, (rb_slice) {NULL, 0});
			}
			break;
		case NEMO_XLOG_TREE:
			apply_tree(record);
			break;
		default:
			break;
	}
}

/* End of the record before, at a page boundary, is not where a record can begin: that is behind the page header. */
static XLogRecPtr
record_start(XLogRecPtr at)
{
	if (at % XLOG_BLCKSZ != 0)
		return at;
	return at + (XLogSegmentOffset(at, wal_segment_size) == 0 ? SizeOfXLogLongPHD : SizeOfXLogShortPHD);
}

/* The reader stands at `at`. */
static XLogRecPtr
read_records(XLogReaderState *reader, XLogRecPtr at, XLogRecPtr to, bool changes, void (*note) (XLogRecPtr at))
{
	uint64		count = 0;

	while (at < to)
	{
		char	   *problem = NULL;

		CHECK_FOR_INTERRUPTS();
		if (ShutdownRequestPending)
			proc_exit(1);		/* nothing is lost: the next start replays from the same position */
		if (XLogReadRecord(reader, &problem) == NULL)
		{
			if (((ReadLocalXLogPageNoWaitPrivate *) reader->private_data)->end_of_wal)
				break;
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("could not read the log at %X/%X for replay of nemo tables", LSN_FORMAT_ARGS(at)),
					 problem != NULL ? errdetail_internal("%s", problem) : 0));
		}
		if (XLogRecGetRmid(reader) == RM_XACT_ID)
			follow_xact(reader);
		else if (changes && XLogRecGetRmid(reader) == NEMO_RM_ID)
			apply_record(reader);
		at = reader->EndRecPtr;
		if (++count % NOTE_EVERY == 0)
			note(at);
	}
	return at;
}

XLogRecPtr
nemo_replay(XLogRecPtr from, XLogRecPtr to, bool changes, void (*note) (XLogRecPtr at))
{
	ReadLocalXLogPageNoWaitPrivate private = {0};
	XLogReaderState *reader;
	volatile XLogRecPtr at = from;

	if (from >= to)
		return from;
	reader = XLogReaderAllocate(wal_segment_size, NULL,
								XL_ROUTINE(.page_read = &read_local_xlog_page_no_wait,
										   .segment_open = &wal_segment_open,
										   .segment_close = &wal_segment_close),
								&private);
	if (reader == NULL)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	XLogBeginRead(reader, record_start(from));
	PG_TRY();
	{
		at = read_records(reader, at, to, changes, note);
	}
	PG_FINALLY();
	{
		XLogReaderFree(reader);	/* closes the segment it had open */
	}
	PG_END_TRY();
	return at;
}

/* ---- trees that are gone ------------------------------------------------------------------------------------------- */

/* Marks trees of databases that no longer exist.  A tree's database is committed before the tree can be made. */
static void
drop_lost_databases(const NemoTreeRecord *records, int n)
{
	Oid			last = InvalidOid;
	bool		last_exists = true;

	StartTransactionCommand();
	for (int i = 0; i < n; i++)
	{
		Oid			database = (Oid) (records[i].info.tree >> 32);

		if (records[i].dropped)
			continue;
		if (database != last)
		{
			last_exists = SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(database));
			last = database;
		}
		/* DROP DATABASE waits for its commit to be durable before we can see it, but that costs nothing to be sure of */
		if (!last_exists)
			(void) nemo_tree_mark_dropped(records[i].info.tree, GetXLogWriteRecPtr());
	}
	CommitTransactionCommand();
}

/*
 * crashed: no transaction of ours is under way (end of replay), so an id that did not commit never will, and a commit
 * that deletes a tree has happened or not.
 */
void
nemo_drop_orphans(bool crashed)
{
	MemoryContext old = CurrentMemoryContext;
	uint64		horizon = nemo_settle_horizon();
	NemoTreeRecord *records;
	int			n;

	records = nemo_tree_copy(true, &n);
	if (n == 0)
	{
		pfree(records);
		return;
	}
	for (int i = 0; i < n; i++)
	{
		NemoTreeRecord *r = &records[i];

		if (r->dropped)
			continue;
		if (crashed && r->drop_xid != 0 && !nemo_full_xid_committed(r->drop_xid))
		{
			nemo_tree_keep(r->info.tree);
			r->drop_xid = 0;
		}
		if (crashed && ((r->info.creator_xid != 0 && !nemo_full_xid_committed(r->info.creator_xid)) ||
						r->drop_xid != 0))
		{
			(void) nemo_tree_mark_dropped(r->info.tree, InvalidXLogRecPtr);
			r->dropped = true;
		}
		else if (r->info.creator_xid != 0 && r->info.creator_xid < horizon &&
				 nemo_full_xid_committed(r->info.creator_xid))
			nemo_tree_settle(r->info.tree);
	}
	drop_lost_databases(records, n);
	MemoryContextSwitchTo(old);
	pfree(records);
}

/*
 * The log is durable before anything goes (a lost commit would bring the table back, empty); the rows are gone durably
 * before the registry forgets the tree (else they would turn up in a tree that uses the number again).
 */
void
nemo_remove_dropped(void)
{
	rb_thread  *thread = nemo_worker_thread();
	st_store   *store;
	st_error	err = {0};
	st_status	status;
	XLogRecPtr	lsn;
	NemoTree   *trees;
	int			n;

	if (!nemo_tree_any_dropped())
		return;
	store = nemo_store();
	trees = nemo_tree_dropped(&n, &lsn);
	if (lsn != InvalidXLogRecPtr)
		XLogFlush(lsn);
	for (int i = 0; i < n; i++)
	{
		uint8		bounds[2][RB_TREE_LEN];

		CHECK_FOR_INTERRUPTS();
		for (int b = 0; b < 2; b++)
			for (int j = 0; j < RB_TREE_LEN; j++)
				bounds[b][j] = (uint8) ((trees[i] + (uint64) b) >> (56 - 8 * j));
		rb_tree_drop(thread, trees[i], trees[i] + 1);
		status = st_delete_range(store, (st_slice) {bounds[0], RB_TREE_LEN}, (st_slice) {bounds[1], RB_TREE_LEN}, &err);
		if (status != ST_OK)
			nemo_raise_store(status, &err);
	}
	status = st_sync(store, &err);
	if (status != ST_OK)
		nemo_raise_store(status, &err);
	nemo_registry_delete(store, trees, n);
	for (int i = 0; i < n; i++)
		nemo_tree_forget(trees[i]);
	pfree(trees);
}
