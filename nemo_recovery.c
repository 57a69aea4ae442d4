/*
 * nemo_recovery.c
 *	  The background workers: the checkpointer (start-up, replay, checkpoints, removal of dropped trees) and the flushers.
 *
 * Nemo's checkpoint is its own (paper, decoupled recovery): take X, the insert position; flush every entry that was dirty
 * then; store the registry of trees; sync the store; persist X; only then let the replication slot nemo_checkpoint give
 * up the log before X (INVARIANTS E1, E2, E5).  After any start the checkpointer replays the log from X (nemo_replay.c);
 * nemo tables wait for it in nemo_wait_ready().
 *
 * The checkpointer alone writes the state file, the registry and the slot.  When the start-up fails the reason is kept
 * in shared memory, every use of a nemo table raises it, and the checkpointer tries again.  A worker that dies on an error
 * is started again by the postmaster; what it had reached is in shared memory.
 */
#include "nemo_replay.h"

#include <sys/stat.h>
#include <unistd.h>

#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xloginsert.h"
#include "access/xlogrecovery.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "replication/slot.h"
#include "storage/condition_variable.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "nemo_stat.h"

#define SLOT_NAME		"nemo_checkpoint"
#define HORIZON_AGE_US	5000	/* how old the settle horizon may get */
#define PROGRESS_US		(10 * USECS_PER_SEC)	/* between messages about replay */
#define PATIENCE_MS		60000	/* how long a backend waits for a replay that makes no progress */
#define BACKOFF_MIN_MS	1000
#define BACKOFF_MAX_MS	60000
#define EVICT_BYTES		(1024 * 1024)	/* per step of a flusher, at most */
#define MAX_FLUSHERS	64
#define WORKER_RESTART_S 1

typedef enum NemoPhase
{
	PHASE_STARTING,
	PHASE_REPLAYING,
	PHASE_READY,
	PHASE_FAILED
} NemoPhase;

typedef struct NemoFailure
{
	int			sqlstate;
	char		message[256];
	char		detail[512];
	char		hint[256];
} NemoFailure;

/* `mutex` protects everything but the atomics */
typedef struct RecoveryShared
{
	slock_t		mutex;
	NemoPhase	phase;
	NemoFailure failure;		/* why PHASE_FAILED */
	ConditionVariable phase_cv;

	bool		claimed;		/* since this shared memory was made */
	uint64		epoch;
	char		owner[65];

	XLogRecPtr	checkpoint;		/* X */
	XLogRecPtr	replay_at;
	XLogRecPtr	replay_end;
	XLogRecPtr	tail_from;		/* drops logged from here on may not have been followed; 0 = all have been */

	uint64		requested;		/* checkpoints asked for, */
	uint64		finished;		/* done with, one way or the other, */
	uint64		succeeded;		/* and the last one that succeeded */
	NemoFailure checkpoint_failure;
	ConditionVariable finished_cv;

	Latch	   *checkpointer;	/* NULL: not running */
	Latch	   *flushers[MAX_FLUSHERS];

	pg_atomic_uint64 horizon;
	pg_atomic_uint64 horizon_time;	/* microseconds */
} RecoveryShared;

static RecoveryShared *shared = NULL;

/* the checkpointer's own */
static NemoState state;
static XLogRecPtr idle_at = InvalidXLogRecPtr;	/* insert position right after the last checkpoint */
static MemoryContext work_context = NULL;
static bool deposed = false;	/* the store is another cluster's: claiming it again and again would harm that one */

PGDLLEXPORT void nemo_checkpointer_main(Datum arg);
PGDLLEXPORT void nemo_flusher_main(Datum arg);

Size
nemo_recovery_shmem_size(void)
{
	return MAXALIGN(sizeof(RecoveryShared));
}

void
nemo_recovery_shmem_init(void)
{
	bool		found;

	shared = ShmemInitStruct("nemo recovery", sizeof(RecoveryShared), &found);
	if (found)
		return;
	memset(shared, 0, sizeof(RecoveryShared));
	SpinLockInit(&shared->mutex);
	ConditionVariableInit(&shared->phase_cv);
	ConditionVariableInit(&shared->finished_cv);
	pg_atomic_init_u64(&shared->horizon, 0);
	pg_atomic_init_u64(&shared->horizon_time, 0);
}

/* ---- what other processes ask -------------------------------------------------------------------------------------- */

static void
raise_failure(const NemoFailure *failure)
{
	ereport(ERROR,
			(errcode(failure->sqlstate),
			 errmsg_internal("%s", failure->message),
			 failure->detail[0] != '\0' ? errdetail_internal("%s", failure->detail) : 0,
			 failure->hint[0] != '\0' ? errhint("%s", failure->hint) : 0));
}

void
nemo_wait_ready(void)
{
	XLogRecPtr	last_at = InvalidXLogRecPtr;
	int			idle_ms = 0;

	ConditionVariablePrepareToSleep(&shared->phase_cv);
	for (;;)
	{
		NemoPhase	phase;
		NemoFailure failure;
		XLogRecPtr	at;
		XLogRecPtr	end;

		SpinLockAcquire(&shared->mutex);
		phase = shared->phase;
		failure = shared->failure;
		at = shared->replay_at;
		end = shared->replay_end;
		SpinLockRelease(&shared->mutex);
		if (phase == PHASE_READY)
			break;
		if (phase == PHASE_FAILED)
		{
			ConditionVariableCancelSleep();
			raise_failure(&failure);
		}
		if (at != last_at)
		{
			last_at = at;
			idle_ms = 0;
		}
		if (idle_ms >= PATIENCE_MS)
		{
			ConditionVariableCancelSleep();
			if (phase == PHASE_STARTING)
				ereport(ERROR,
						(errcode(ERRCODE_CANNOT_CONNECT_NOW),
						 errmsg("nemo tables cannot be used yet"),
						 errdetail("The background worker \"nemo checkpointer\" has not started."),
						 errhint("See the server log; max_worker_processes may be too small.")));
			ereport(ERROR,
					(errcode(ERRCODE_CANNOT_CONNECT_NOW),
					 errmsg("nemo tables cannot be used yet"),
					 errdetail("The log is being replayed: at %X/%X of %X/%X.", LSN_FORMAT_ARGS(at),
							   LSN_FORMAT_ARGS(end)),
					 errhint("Try again later.")));
		}
		if (ConditionVariableTimedSleep(&shared->phase_cv, 1000, PG_WAIT_EXTENSION))
			idle_ms += 1000;
	}
	ConditionVariableCancelSleep();
}

bool
nemo_claimed_owner(char *owner, uint64 *epoch)
{
	bool		claimed;

	SpinLockAcquire(&shared->mutex);
	claimed = shared->claimed;
	memcpy(owner, shared->owner, sizeof(shared->owner));
	*epoch = shared->epoch;
	SpinLockRelease(&shared->mutex);
	return claimed;
}

void
nemo_wake_checkpointer(void)
{
	Latch	   *latch;

	SpinLockAcquire(&shared->mutex);
	latch = shared->checkpointer;
	SpinLockRelease(&shared->mutex);
	if (latch != NULL)
		SetLatch(latch);
}

void
nemo_wake_flushers(void)
{
	for (int i = 0; i < MAX_FLUSHERS; i++)
	{
		Latch	   *latch;

		SpinLockAcquire(&shared->mutex);
		latch = shared->flushers[i];
		SpinLockRelease(&shared->mutex);
		if (latch != NULL)
			SetLatch(latch);
	}
}

void
nemo_request_checkpoint(bool wait)
{
	uint64		mine;
	bool		ok = true;
	NemoFailure failure;

	(void) nemo_buffer();
	nemo_wait_ready();
	SpinLockAcquire(&shared->mutex);
	mine = ++shared->requested;
	SpinLockRelease(&shared->mutex);
	nemo_wake_checkpointer();
	if (!wait)
		return;

	ConditionVariablePrepareToSleep(&shared->finished_cv);
	for (;;)
	{
		bool		done;

		SpinLockAcquire(&shared->mutex);
		done = shared->finished >= mine;
		ok = shared->succeeded >= mine;
		failure = shared->checkpoint_failure;
		SpinLockRelease(&shared->mutex);
		if (done)
			break;
		/* wake it again: it may have been started anew since */
		if (ConditionVariableTimedSleep(&shared->finished_cv, 1000, PG_WAIT_EXTENSION))
			nemo_wake_checkpointer();
	}
	ConditionVariableCancelSleep();
	if (!ok)
		raise_failure(&failure);
}

void
nemo_checkpoint_status(XLogRecPtr *checkpoint_lsn, XLogRecPtr *insert_lsn)
{
	(void) nemo_buffer();
	SpinLockAcquire(&shared->mutex);
	*checkpoint_lsn = shared->checkpoint;
	SpinLockRelease(&shared->mutex);
	*insert_lsn = GetXLogInsertRecPtr();
}

/* ---- settle horizon ------------------------------------------------------------------------------------------------ */

void
nemo_horizon_refresh(void)
{
	uint64		horizon = nemo_full_xid(GetOldestNonRemovableTransactionId(NULL));
	uint64		known = pg_atomic_read_u64(&shared->horizon);

	while (known < horizon && !pg_atomic_compare_exchange_u64(&shared->horizon, &known, horizon))
		;
	pg_atomic_write_u64(&shared->horizon_time, (uint64) GetCurrentTimestamp());
}

uint64
nemo_settle_horizon(void)
{
	int64		age = GetCurrentTimestamp() - (int64) pg_atomic_read_u64(&shared->horizon_time);

	if (age > HORIZON_AGE_US || age < 0)
		nemo_horizon_refresh();
	return pg_atomic_read_u64(&shared->horizon);
}

/* ---- slot ---------------------------------------------------------------------------------------------------------- */

static void
create_slot(void)
{
#if PG_VERSION_NUM >= 170000
	ReplicationSlotCreate(SLOT_NAME, false, RS_PERSISTENT, false, false, false);
#else
	ReplicationSlotCreate(SLOT_NAME, false, RS_PERSISTENT, false);
#endif
}

/* The slot that this process holds keeps the log from `lsn` on, durably. */
static void
set_slot(XLogRecPtr lsn)
{
	SpinLockAcquire(&MyReplicationSlot->mutex);
	MyReplicationSlot->data.restart_lsn = lsn;
	SpinLockRelease(&MyReplicationSlot->mutex);
	ReplicationSlotMarkDirty();
	ReplicationSlotsComputeRequiredLSN();
	ReplicationSlotSave();
}

/* Give up and remove the slot that this process holds. */
static void
drop_slot(void)
{
	ReplicationSlotRelease();
	ReplicationSlotDrop(SLOT_NAME, true);
}

static void
raise_log_gone(XLogRecPtr lsn)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("the log that nemo needs has been removed"),
			 errdetail("Replay must begin at %X/%X, but replication slot \"%s\" was missing or invalidated.",
					   LSN_FORMAT_ARGS(lsn), SLOT_NAME),
			 errhint("Restore the cluster and the store from backups taken together.")));
}

/* A new slot at `lsn`.  Raises, without one, when the log from there on is gone. */
static void
recreate_slot(XLogRecPtr lsn)
{
	XLogSegNo	segno;
	char		path[MAXPGPATH];
	struct stat st;
	bool		present;

	create_slot();
	LWLockAcquire(ReplicationSlotAllocationLock, LW_EXCLUSIVE);
	SpinLockAcquire(&MyReplicationSlot->mutex);
	MyReplicationSlot->data.restart_lsn = lsn;
	SpinLockRelease(&MyReplicationSlot->mutex);
	ReplicationSlotsComputeRequiredLSN();
	LWLockRelease(ReplicationSlotAllocationLock);

	XLByteToSeg(lsn, segno, wal_segment_size);
	present = XLogGetLastRemovedSegno() < segno;
	if (present && !RecoveryInProgress())
	{
		/* after a start it is not known what was removed before; on an older timeline the reader finds out */
		TimeLineID	tli;

		(void) GetFlushRecPtr(&tli);
		XLogFilePath(path, tli, segno, wal_segment_size);
		if (tli == 1 && stat(path, &st) != 0)
			present = false;
	}
	if (!present)
	{
		drop_slot();
		raise_log_gone(lsn);
	}
	set_slot(lsn);
	ereport(LOG, (errmsg("nemo: replication slot \"%s\" was created again at %X/%X", SLOT_NAME, LSN_FORMAT_ARGS(lsn))));
}

static bool
slot_invalidated(void)
{
	bool		bad;

	SpinLockAcquire(&MyReplicationSlot->mutex);
#if PG_VERSION_NUM >= 160000
	bad = MyReplicationSlot->data.invalidated != RS_INVAL_NONE;
#else
	bad = MyReplicationSlot->data.invalidated_at != InvalidXLogRecPtr;
#endif
	SpinLockRelease(&MyReplicationSlot->mutex);
	return bad;
}

/*
 * Hold the slot.  lsn: where replay will begin; invalid = nowhere yet (first start, or everything since is in memory):
 * then a slot that is missing or invalid is made anew at a position that PostgreSQL chooses.  True when it was.
 */
static bool
hold_slot(XLogRecPtr lsn)
{
	if (MyReplicationSlot == NULL && SearchNamedReplicationSlot(SLOT_NAME, true) != NULL)
	{
#if PG_VERSION_NUM >= 180000
		ReplicationSlotAcquire(SLOT_NAME, true, false);
#else
		ReplicationSlotAcquire(SLOT_NAME, true);
#endif
	}
	if (MyReplicationSlot != NULL)
	{
		if (SlotIsLogical(MyReplicationSlot))
		{
			ReplicationSlotRelease();
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("replication slot \"%s\" is not nemo's", SLOT_NAME),
					 errhint("Drop it: nemo needs a physical slot of this name.")));
		}
		if (!slot_invalidated() && MyReplicationSlot->data.restart_lsn != InvalidXLogRecPtr)
			return false;
		drop_slot();
	}
	if (lsn != InvalidXLogRecPtr)
		recreate_slot(lsn);
	else
	{
		create_slot();
		ReplicationSlotReserveWal();
		ReplicationSlotMarkDirty();
		ReplicationSlotSave();
	}
	return true;
}

/*
 * In the startup process, before redo: a base backup carries the state file but no slots, and the first checkpoint of
 * this cluster must not remove the log from X on.  On a standby nemo does not run and nothing would ever move the slot.
 * Not being able to is no reason to fail here: the checkpointer looks again.
 */
void
nemo_recovery_startup(void)
{
	NemoState	found;

	if (StandbyMode || access(STANDBY_SIGNAL_FILE, F_OK) == 0 || max_replication_slots == 0 ||
		nemo_state_read(&found) != NEMO_STATE_OK || !found.initialised || found.system_id != GetSystemIdentifier() ||
		SearchNamedReplicationSlot(SLOT_NAME, true) != NULL)
		return;
	create_slot();
	set_slot(found.checkpoint);
	ReplicationSlotRelease();
	ereport(LOG,
			(errmsg("nemo: replication slot \"%s\" was created again at %X/%X", SLOT_NAME,
					LSN_FORMAT_ARGS(found.checkpoint))));
}

/* ---- start-up ------------------------------------------------------------------------------------------------------ */

static void
set_phase(NemoPhase phase)
{
	SpinLockAcquire(&shared->mutex);
	shared->phase = phase;
	SpinLockRelease(&shared->mutex);
	ConditionVariableBroadcast(&shared->phase_cv);
}

static void
keep_failure(NemoFailure *failure, const ErrorData *error)
{
	failure->sqlstate = error->sqlerrcode;
	strlcpy(failure->message, error->message ? error->message : "unknown error", sizeof(failure->message));
	strlcpy(failure->detail, error->detail ? error->detail : "", sizeof(failure->detail));
	strlcpy(failure->hint, error->hint ? error->hint : "", sizeof(failure->hint));
}

static void
read_state(void)
{
	switch (nemo_state_read(&state))
	{
		case NEMO_STATE_CORRUPT:
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("the file \"nemo/state\" is damaged"),
					 errdetail("It says from where the log must be replayed."),
					 errhint("Restore the cluster and the store from backups taken together.")));
			break;
		case NEMO_STATE_MISSING:
			memset(&state, 0, sizeof(state));
			break;
		case NEMO_STATE_OK:
			if (state.system_id != GetSystemIdentifier())
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
						 errmsg("the file \"nemo/state\" belongs to another cluster"),
						 errdetail("It was written by the cluster with system identifier " UINT64_FORMAT ".",
								   state.system_id),
						 errhint("Restore the cluster and the store from backups taken together.")));
			break;
	}
}

/*
 * Take the store for this cluster (E7), once per life of shared memory.  Each try is counted in the state file first, so
 * that we know which epochs can be our own: any other one means that somebody else wrote to the store since this data
 * directory was last in use, such as the cluster that it was copied from.
 */
static void
claim_store(void)
{
	st_options	options;
	st_store   *store = NULL;
	st_error	err = {0};
	st_status	status;
	char		owner[65];
	uint64		epoch = 0;

	nemo_store_options(&options);
	options.create = !state.initialised;
	snprintf(owner, sizeof(owner), "postgresql-" UINT64_FORMAT, GetSystemIdentifier());
	if (!state.initialised)
		nemo_state_write(&state);	/* also makes the directory that the default store lies in */
	status = st_open(nemo_store_url, &options, &store, &err);
	if (status != ST_OK)
	{
		if (state.initialised && status == ST_UNAVAILABLE)
			ereport(ERROR,
					(errcode(ERRCODE_IO_ERROR),
					 errmsg("the nemo store is missing or not available"),
					 errdetail_internal("%s", err.message),
					 errhint("This cluster has used it before: check nemo.store, or restore the store together with the "
							 "cluster.")));
		nemo_raise_store(status, &err);
	}
	PG_TRY();
	{
		state.attempts++;
		state.clean = false;
		nemo_state_write(&state);
		status = st_claim(store, owner, &epoch, &err);
		if (status != ST_OK)
		{
			/* only a claim that cannot have been counted by the store is taken back */
			if (status == ST_REFUSED)
			{
				state.attempts--;
				nemo_state_write(&state);
			}
			nemo_raise_store(status, &err);
		}
		if (epoch > state.epoch + state.attempts || epoch <= state.epoch)
		{
			deposed = true;
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the nemo store does not match this data directory"),
					 errdetail("The store has been claimed " UINT64_FORMAT " times, this data directory knows of "
							   UINT64_FORMAT ".", epoch, state.epoch + state.attempts),
					 errhint("Restore the cluster and the store from backups taken together.")));
		}
	}
	PG_FINALLY();
	{
		st_close(store);
	}
	PG_END_TRY();

	SpinLockAcquire(&shared->mutex);
	shared->claimed = true;
	shared->epoch = epoch;
	strlcpy(shared->owner, owner, sizeof(shared->owner));
	SpinLockRelease(&shared->mutex);
}

static TimestampTz replay_said;

static void
note_replay(XLogRecPtr at)
{
	TimestampTz now = GetCurrentTimestamp();
	XLogRecPtr	end;

	SpinLockAcquire(&shared->mutex);
	shared->replay_at = at;
	end = shared->replay_end;
	SpinLockRelease(&shared->mutex);
	if (now - replay_said >= PROGRESS_US)
	{
		replay_said = now;
		ereport(LOG,
				(errmsg("nemo: replaying the log, at %X/%X of %X/%X", LSN_FORMAT_ARGS(at), LSN_FORMAT_ARGS(end))));
	}
}

/*
 * Drops committed while replay was under way: their backends did not find the tree in the directory when it had not
 * been replayed yet.  From tail_from on; what the directory knew then was marked by the backends themselves.
 */
static void
follow_tail(void)
{
	XLogRecPtr	from = shared->tail_from;
	XLogRecPtr	to;

	if (from == InvalidXLogRecPtr)
		return;
	to = nemo_log_mark();
	XLogFlush(to);
	(void) nemo_replay(from, to, false, note_replay);
	SpinLockAcquire(&shared->mutex);
	shared->tail_from = InvalidXLogRecPtr;
	SpinLockRelease(&shared->mutex);
}

static void
start_up(void)
{
	XLogRecPtr	end;
	TimestampTz began = GetCurrentTimestamp();
	bool		first;

	if (wal_level < WAL_LEVEL_REPLICA)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("nemo needs wal_level \"replica\" or higher"),
				 errhint("Set wal_level and restart the server.")));
	if (max_replication_slots == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("nemo needs a replication slot"),
				 errdetail("It keeps the log that nemo has to replay after a crash."),
				 errhint("Set max_replication_slots to 1 or more and restart the server.")));

	read_state();
	first = !state.initialised;
	if (!shared->claimed)
		claim_store();
	state.epoch = shared->epoch;
	state.attempts = 0;
	(void) hold_slot(state.checkpoint);
	if (first)
		state.checkpoint = MyReplicationSlot->data.restart_lsn;
	state.initialised = true;
	nemo_state_write(&state);
	set_slot(state.checkpoint);

	end = GetFlushRecPtr(NULL);
	SpinLockAcquire(&shared->mutex);
	shared->checkpoint = state.checkpoint;
	shared->replay_at = state.checkpoint;
	shared->replay_end = end;
	SpinLockRelease(&shared->mutex);
	set_phase(PHASE_REPLAYING);
	replay_said = began;
	ereport(LOG,
			(errmsg("nemo: replay of the log starts at %X/%X, to %X/%X", LSN_FORMAT_ARGS(state.checkpoint),
					LSN_FORMAT_ARGS(end))));

	nemo_tree_reset();
	nemo_registry_load(nemo_store());
	end = nemo_replay(state.checkpoint, end, true, note_replay);
	nemo_drop_orphans(true);

	SpinLockAcquire(&shared->mutex);
	shared->replay_at = end;
	shared->tail_from = Max(end, state.checkpoint);
	SpinLockRelease(&shared->mutex);
	set_phase(PHASE_READY);
	ereport(LOG,
			(errmsg("nemo: replay of the log is done at %X/%X, nemo tables are ready", LSN_FORMAT_ARGS(end)),
			 errdetail("It took %.1f s.", (double) (GetCurrentTimestamp() - began) / USECS_PER_SEC)));
}

/* ---- checkpoint ---------------------------------------------------------------------------------------------------- */

static void
do_checkpoint(bool shutdown)
{
	rb_thread  *thread = nemo_worker_thread();
	st_store   *store = nemo_store();
	NemoTreeRecord *records;
	int			n;
	rb_error	err = {0};
	rb_status	status;
	st_error	store_err = {0};
	st_status	store_status;
	NemoState	next;
	XLogRecPtr	x;
	XLogRecPtr	mark;

	/* X first, the sweep second (E1): what is logged before X had been marked dirty before */
	x = GetXLogInsertRecPtr();
	status = rb_flush_all(thread, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);

	/*
	 * What the copies say has been logged; it must be durable before the store says it.  The mark also keeps the end of
	 * the log behind X through a crash: else new records could come to lie before X.
	 */
	records = nemo_tree_copy(false, &n);
	mark = nemo_log_mark();
	XLogFlush(mark);
	idle_at = GetXLogInsertRecPtr();
	nemo_registry_write(store, records, n);

	store_status = st_sync(store, &store_err);
	if (store_status != ST_OK)
		nemo_raise_store(store_status, &store_err);
	nemo_tree_saved(records, n);

	/* drops that were logged during replay must be in the directory before the log that tells of them may go */
	if (shared->tail_from != InvalidXLogRecPtr)
		x = Min(x, shared->tail_from);
	next = state;
	next.checkpoint = Max(x, state.checkpoint);
	next.clean = shutdown;
	nemo_state_write(&next);
	state = next;
	set_slot(state.checkpoint);

	SpinLockAcquire(&shared->mutex);
	shared->checkpoint = state.checkpoint;
	SpinLockRelease(&shared->mutex);
	pfree(records);
}

/* After an ERROR caught in a worker: give back everything it may hold. */
static void
clean_up(void)
{
	HOLD_INTERRUPTS();
	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	pgstat_report_wait_end();
	XLogResetInsertion();
	rb_reset(nemo_worker_thread());
	AbortOutOfAnyTransaction();
	AtEOXact_Files(false);
	RESUME_INTERRUPTS();
}

/* Run one step of the checkpointer's work.  false: it failed, and *failure and the log say why (once per reason). */
static bool
attempt(void (*step) (void), const char *what, NemoFailure *failure)
{
	static char said[256];
	volatile bool ok = true;

	MemoryContextReset(work_context);
	MemoryContextSwitchTo(work_context);
	PG_TRY();
	{
		step();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(work_context);
		error = CopyErrorData();
		FlushErrorState();
		keep_failure(failure, error);
		clean_up();
		MemoryContextSwitchTo(work_context);
		ok = false;
	}
	PG_END_TRY();
	if (ok)
		said[0] = '\0';
	else if (strncmp(said, failure->message, sizeof(said) - 1) != 0)
	{
		strlcpy(said, failure->message, sizeof(said));
		ereport(LOG,
				(errcode(failure->sqlstate),
				 errmsg("nemo: %s failed and will be tried again: %s", what, failure->message),
				 failure->detail[0] != '\0' ? errdetail_internal("%s", failure->detail) : 0,
				 failure->hint[0] != '\0' ? errhint("%s", failure->hint) : 0));
	}
	return ok;
}

static void
step_checkpoint(void)
{
	do_checkpoint(false);
	nemo_drop_orphans(false);
}

static void
step_last_checkpoint(void)
{
	do_checkpoint(true);
}

/* A worker that was started again: the buffer and the directory are in shared memory, only the slot may be gone. */
static void
step_rejoin(void)
{
	read_state();
	state.epoch = shared->epoch;
	if (hold_slot(InvalidXLogRecPtr) || MyReplicationSlot->data.restart_lsn > state.checkpoint)
	{
		ereport(WARNING,
				(errmsg("nemo: replication slot \"%s\" was lost and has been created again", SLOT_NAME),
				 errdetail("Until the next nemo checkpoint has completed a crash may lose changes of nemo tables."),
				 errhint("Check max_slot_wal_keep_size.")));
		do_checkpoint(false);
	}
}

/* ---- the checkpointer ---------------------------------------------------------------------------------------------- */

static void
checkpointer_exit(int code, Datum arg)
{
	(void) code;
	(void) arg;
	SpinLockAcquire(&shared->mutex);
	shared->checkpointer = NULL;
	SpinLockRelease(&shared->mutex);
}

static void
worker_setup(void)
{
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	work_context = AllocSetContextCreate(TopMemoryContext, "nemo worker", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(work_context);
	(void) nemo_worker_thread();
}

/* Sleep until woken or the time is over; takes care of the signals that do not end the worker. */
static void
nap(long ms)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, ms, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
}

static void
nap_backoff(int *backoff_ms)
{
	TimestampTz until = GetCurrentTimestamp() + (int64) *backoff_ms * 1000;

	while (!ShutdownRequestPending && GetCurrentTimestamp() < until)
		nap(Min(*backoff_ms, 1000));
	*backoff_ms = Min(*backoff_ms * 2, BACKOFF_MAX_MS);
}

static void
finish_requests(uint64 upto, bool ok, const NemoFailure *failure)
{
	SpinLockAcquire(&shared->mutex);
	shared->finished = upto;
	if (ok)
		shared->succeeded = upto;
	else
		shared->checkpoint_failure = *failure;
	SpinLockRelease(&shared->mutex);
	ConditionVariableBroadcast(&shared->finished_cv);
}

/* Returns when tables are ready, or a shutdown is asked for. */
static void
become_ready(void)
{
	int			backoff_ms = BACKOFF_MIN_MS;
	bool		rejoin = shared->phase == PHASE_READY;
	NemoFailure failure;

	while (!ShutdownRequestPending &&
		   !attempt(rejoin ? step_rejoin : start_up, rejoin ? "resuming work" : "start", &failure))
	{
		if (!rejoin)
		{
			SpinLockAcquire(&shared->mutex);
			shared->failure = failure;
			SpinLockRelease(&shared->mutex);
			set_phase(PHASE_FAILED);
		}
		do
			nap_backoff(&backoff_ms);
		while (deposed && !ShutdownRequestPending);
	}
}

void
nemo_checkpointer_main(Datum arg)
{
	TimestampTz last;
	int			backoff_ms = BACKOFF_MIN_MS;
	int			drop_backoff_ms = BACKOFF_MIN_MS;
	TimestampTz retry_at = 0;
	TimestampTz drop_retry_at = 0;
	NemoFailure failure;

	(void) arg;
	worker_setup();
	before_shmem_exit(checkpointer_exit, (Datum) 0);
	SpinLockAcquire(&shared->mutex);
	shared->checkpointer = MyLatch;
	SpinLockRelease(&shared->mutex);

	become_ready();
	last = GetCurrentTimestamp();
	while (!ShutdownRequestPending)
	{
		TimestampTz now;
		uint64		asked;
		bool		wanted;
		bool		due;

		nemo_horizon_refresh();
		now = GetCurrentTimestamp();

		if (now >= drop_retry_at && (shared->tail_from != InvalidXLogRecPtr || nemo_tree_any_dropped()))
		{
			if (attempt(follow_tail, "following dropped tables", &failure) &&
				attempt(nemo_remove_dropped, "removal of dropped tables", &failure))
				drop_backoff_ms = BACKOFF_MIN_MS;
			else
			{
				drop_retry_at = GetCurrentTimestamp() + (int64) drop_backoff_ms * 1000;
				drop_backoff_ms = Min(drop_backoff_ms * 2, BACKOFF_MAX_MS);
			}
		}

		SpinLockAcquire(&shared->mutex);
		asked = shared->requested;
		wanted = asked > shared->finished;
		SpinLockRelease(&shared->mutex);
		due = now >= retry_at &&
			(now - last >= (int64) nemo_checkpoint_interval_s * USECS_PER_SEC ||
			 GetXLogInsertRecPtr() - state.checkpoint > (uint64) max_wal_size_mb * 1024 * 1024) &&
			GetXLogInsertRecPtr() != idle_at;
		if (wanted || due)
		{
			bool		ok = attempt(step_checkpoint, "checkpoint", &failure);

			finish_requests(asked, ok, &failure);
			last = GetCurrentTimestamp();
			if (ok)
			{
				backoff_ms = BACKOFF_MIN_MS;
				retry_at = 0;
			}
			else
			{
				/* X stays; the interval need not pass again before the next try */
				retry_at = last + (int64) backoff_ms * 1000;
				last -= (int64) nemo_checkpoint_interval_s * USECS_PER_SEC;
				backoff_ms = Min(backoff_ms * 2, BACKOFF_MAX_MS);
			}
			continue;
		}
		nap(1000);
	}

	/* what is logged after this is replayed at the next start */
	if (shared->phase == PHASE_READY && MyReplicationSlot != NULL)
		(void) attempt(step_last_checkpoint, "last checkpoint", &failure);
	/* 1: start it again, unless the server is going down */
	proc_exit(1);
}

/* ---- the flushers -------------------------------------------------------------------------------------------------- */

static void
flusher_exit(int code, Datum arg)
{
	(void) code;
	SpinLockAcquire(&shared->mutex);
	shared->flushers[DatumGetInt32(arg)] = NULL;
	SpinLockRelease(&shared->mutex);
}

static void
step_evict(void)
{
	rb_thread  *thread = nemo_worker_thread();
	rb_buffer  *buffer = nemo_buffer();
	size_t		bytes = Min((size_t) EVICT_BYTES, (size_t) nemo_buffer_size_kb * 1024 / 32);

	while (!ShutdownRequestPending && rb_wants_eviction(buffer))
	{
		size_t		freed = 0;
		rb_error	err = {0};
		rb_status	status = rb_evict(thread, bytes, &freed, &err);

		if (status != RB_OK)
			nemo_raise(status, &err);
		CHECK_FOR_INTERRUPTS();
		if (freed == 0)
			break;				/* everything is in use: look again later */
	}
}

void
nemo_flusher_main(Datum arg)
{
	int			backoff_ms = BACKOFF_MIN_MS;
	NemoFailure failure;

	worker_setup();
	before_shmem_exit(flusher_exit, arg);
	SpinLockAcquire(&shared->mutex);
	shared->flushers[DatumGetInt32(arg)] = MyLatch;
	SpinLockRelease(&shared->mutex);

	while (!ShutdownRequestPending)
	{
		if (shared->phase == PHASE_READY && rb_wants_eviction(nemo_buffer()))
		{
			if (attempt(step_evict, "eviction", &failure))
				backoff_ms = BACKOFF_MIN_MS;
			else
			{
				nap_backoff(&backoff_ms);
				continue;
			}
		}
		nap(100);
	}
	proc_exit(1);
}

/* ---- registration -------------------------------------------------------------------------------------------------- */

static void
register_worker(const char *name, const char *function, Datum arg)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = WORKER_RESTART_S;
	strlcpy(worker.bgw_library_name, "nemo", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, function, sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, name, sizeof(worker.bgw_name));
	strlcpy(worker.bgw_type, name, sizeof(worker.bgw_type));
	worker.bgw_main_arg = arg;
	RegisterBackgroundWorker(&worker);
}

void
nemo_recovery_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
	register_worker("nemo checkpointer", "nemo_checkpointer_main", (Datum) 0);
	for (int i = 0; i < Min(nemo_flush_workers, MAX_FLUSHERS); i++)
		register_worker("nemo flusher", "nemo_flusher_main", Int32GetDatum(i));
}
