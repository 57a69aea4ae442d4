/*
 * nemo_lock.c
 *	  Judging a row that is to be changed or locked, waiting for others, and SELECT FOR UPDATE and its kin.
 *
 * locking/README.md has the protocol: look inside the guard, wait outside of it, look again; then put a version on the
 * head that was looked at.
 */
#include "nemo_table.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/lmgr.h"
#include "storage/predicate.h"
#include "utils/snapmgr.h"

/* ---- waiting in line ----------------------------------------------------------------------------------------------- */

static LOCKMODE
queue_mode(LockTupleMode mode)
{
	switch (mode)
	{
		case LockTupleKeyShare:
			return AccessShareLock;
		case LockTupleShare:
			return RowShareLock;
		case LockTupleNoKeyExclusive:
			return ExclusiveLock;
		case LockTupleExclusive:
			break;
	}
	return AccessExclusiveLock;
}

/* All versions of a row stand in one line. */
static void
queue_tid(const NemoRow *row, ItemPointer tid)
{
	nemo_tid_set(tid, row->rowid, 0);
}

static void
raise_no_lock(Relation rel)
{
	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("could not obtain lock on row in relation \"%s\"", RelationGetRelationName(rel))));
}

/* false: would block */
static bool
stand_in_line(NemoRow *row, LockTupleMode mode, LockWaitPolicy policy)
{
	ItemPointerData tid;

	if (row->queued || row->chain.own_lock >= 0)
		return true;
	queue_tid(row, &tid);
	row->queue_mode = queue_mode(mode);
	if (policy == LockWaitBlock)
		LockTuple(row->rel, &tid, row->queue_mode);
	else if (!ConditionalLockTuple(row->rel, &tid, row->queue_mode))
	{
		if (policy == LockWaitError)
			raise_no_lock(row->rel);
		return false;
	}
	row->queued = true;
	return true;
}

/* ---- judging ------------------------------------------------------------------------------------------------------- */

bool
nemo_row_begin(NemoRow *row, Relation rel, ItemPointer tid, Snapshot snapshot)
{
	uint8		tag;

	(void) nemo_thread();
	memset(row, 0, sizeof(*row));
	row->rel = rel;
	row->info = nemo_rel(rel);
	row->tid = *tid;
	row->target.result = TM_Deleted;
	row->target.ctid = *tid;
	row->target.cmax = InvalidCommandId;
	initStringInfo(&row->key);
	return nemo_tid_get(tid, &row->rowid, &tag) && nemo_row_key(row->info, row->rowid, snapshot, &row->key);
}

void
nemo_row_done(NemoRow *row)
{
	if (row->queued)
	{
		ItemPointerData tid;

		queue_tid(row, &tid);
		UnlockTuple(row->rel, &tid, row->queue_mode);
		row->queued = false;
	}
	pfree(row->key.data);
}

TM_Result
nemo_row_judge(NemoRow *row, LockTupleMode mode, Snapshot snapshot, CommandId cid, bool trust_tag, bool wait,
			   LockWaitPolicy policy, XLTW_Oper oper)
{
	rb_thread  *thread = nemo_thread();
	rb_slice	key = nemo_slice(&row->key);

	for (;;)
	{
		const rb_version *head;
		TM_Result	result;

		CHECK_FOR_INTERRUPTS();
		nemo_lookup_enter(key, false, &head);
		nemo_examine(head, mode, &row->chain);
		nemo_target(row->info, key, &row->chain, &row->tid, snapshot, cid, trust_tag, &row->target);
		result = row->target.result;
		/* a row that has gone on is not waited for: what became of it is what counts */
		if (result == TM_Ok && !TransactionIdIsValid(row->chain.wait_xid))
			return TM_Ok;
		rb_leave(thread);
		if (result != TM_Ok)
			return result;
		row->target.xmax = row->chain.wait_xid;
		if (!wait)
			return TM_BeingModified;
		if (!stand_in_line(row, mode, policy) ||
			!nemo_wait_for(row->rel, &row->tid, row->chain.wait_xid, row->chain.speculative_token, policy, oper))
			return TM_WouldBlock;
	}
}

void
nemo_row_failure(const NemoRow *row, TM_FailureData *tmfd)
{
	tmfd->ctid = row->target.ctid;
	tmfd->xmax = row->target.xmax;
	tmfd->cmax = row->target.cmax;
}

StringInfo
nemo_copy_version(const rb_version *v)
{
	StringInfo	copy = makeStringInfo();

	appendBinaryStringInfo(copy, (const char *) rb_data(v), (int) v->len);
	return copy;
}

/* ---- row locks ----------------------------------------------------------------------------------------------------- */

static void
raise_moved(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("tuple to be locked was already moved to another partition due to concurrent update")));
}

/* the version that was judged, for the slot; inside the guard */
typedef struct Judged
{
	StringInfo	data;
	uint64		xid;
	uint8		tag;
} Judged;

static void
copy_judged(const NemoRow *row, Judged *judged)
{
	const rb_version *v = row->target.version;

	judged->data = nemo_copy_version(v);
	judged->xid = rb_is_settled(v) ? 0 : rb_x(v)->xid;
	judged->tag = v->tag;
}

static void
free_judged(Judged *judged)
{
	pfree(judged->data->data);
	pfree(judged->data);
}

static void
store_judged(const NemoRow *row, Judged *judged, TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(slot->tts_mcxt);
	HeapTuple	tuple = nemo_row_tuple(row->rel, (uint8 *) judged->data->data, (uint32) judged->data->len, row->rowid,
									   judged->tag, judged->xid);

	MemoryContextSwitchTo(old);
	ExecForceStoreHeapTuple(tuple, slot, true);
	slot->tts_tableOid = RelationGetRelid(row->rel);
	nemo_tid_set(&slot->tts_tid, row->rowid, judged->tag);
	free_judged(judged);
}

/* What this very command wrote is shown all the same: the executor says why it may not be touched again. */
static void
show_invisible(NemoRow *row, TupleTableSlot *slot)
{
	rb_thread  *thread = nemo_thread();
	const rb_version *head;
	Judged		judged;

	nemo_lookup_enter(nemo_slice(&row->key), false, &head);
	row->target.version = nemo_visible(head, SnapshotSelf);
	if (row->target.version == NULL)
	{
		rb_leave(thread);
		return;
	}
	copy_judged(row, &judged);
	rb_leave(thread);
	store_judged(row, &judged, slot);
}

/* The row at row->tid as it is by now: puts the lock on it and the row into the slot. */
static TM_Result
lock_row(NemoRow *row, Snapshot snapshot, CommandId cid, LockTupleMode mode, LockWaitPolicy policy, bool trust_tag,
		 TupleTableSlot *slot)
{
	rb_thread  *thread = nemo_thread();
	rb_version *lock = NULL;
	Judged		judged;

	for (;;)
	{
		TM_Result	result;
		bool		need;

		if (lock == NULL)
			lock = nemo_prepare((uint32) row->key.len, RB_LOCK, 0, cid, mode, NULL, 0);
		result = nemo_row_judge(row, mode, snapshot, cid, trust_tag, true, policy, XLTW_Lock);
		if (result != TM_Ok)
		{
			nemo_discard(lock);
			if (result == TM_Invisible)
				show_invisible(row, slot);
			return result;
		}
		need = row->chain.own_lock < (int) mode;
		copy_judged(row, &judged);
		if (!need || nemo_install(nemo_slice(&row->key), lock, &row->chain))
		{
			rb_leave(thread);
			if (!need)
				nemo_discard(lock);
			break;
		}
		rb_leave(thread);
		free_judged(&judged);
	}
	store_judged(row, &judged, slot);
	return TM_Ok;
}

TM_Result
nemo_tuple_lock(Relation rel, ItemPointer tid, Snapshot snapshot, TupleTableSlot *slot, CommandId cid,
				LockTupleMode mode, LockWaitPolicy policy, uint8 flags, TM_FailureData *tmfd)
{
	bool		follow = (flags & TUPLE_LOCK_FLAG_FIND_LAST_VERSION) != 0;
	/* a ctid that was found without a snapshot (ON CONFLICT) */
	bool		trust_tag = !follow && !IsolationUsesXactSnapshot();
	ItemPointerData at = *tid;
	TM_Result	result = TM_Deleted;

	tmfd->traversed = false;
	for (;;)
	{
		NemoRow		row;
		bool		there = nemo_row_begin(&row, rel, &at, snapshot);

		if (there)
			result = lock_row(&row, snapshot, cid, mode, policy, trust_tag, slot);
		/* reached by following, but this command wrote it: the command has nothing to do with it */
		if (result == TM_Invisible && tmfd->traversed)
			result = TM_SelfModified;
		nemo_row_failure(&row, tmfd);
		nemo_row_done(&row);
		if (!there || result != TM_Updated || !follow)
			break;
		if (ItemPointerIndicatesMovedPartitions(&tmfd->ctid))
			raise_moved();
		/* the newest version is wanted now, whoever sees it */
		at = tmfd->ctid;
		trust_tag = true;
		tmfd->traversed = true;
	}
	/* the caller goes on with the version that was locked, as after heap's */
	*tid = at;
	return result;
}
