/*
 * nemo.c
 *	  Module entry: settings, shared memory, this process's buffer thread and store, and the mapping of lower-layer
 *	  failures to SQL errors.
 *
 * The lower layers know nothing of PostgreSQL; what they need of it they get through the rb_port and st_options that
 * are filled here.
 */
#include "nemo.h"

#include "access/twophase.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "utils/wait_event.h"

#include "nemo_ddl.h"
#include "nemo_stat.h"

PG_MODULE_MAGIC;

char	   *nemo_store_url = NULL;
int			nemo_buffer_size_kb = 128 * 1024;
int			nemo_checkpoint_interval_s = 60;
int			nemo_flush_workers = 1;
double		nemo_simulated_latency_ms = 0.0;
int			nemo_max_trees = 16384;

typedef struct NemoShared
{
	st_stats	store_stats;
	LWLock	   *write_lock;		/* one writer of the embedded store at a time, before its own uninterruptible lock */
	ConditionVariable channels[RB_CHANNELS];
} NemoShared;

#define ARENA_ALIGN 4096			/* bytes */

static NemoShared *shared = NULL;
static rb_buffer *buffer = NULL;

/* this process's own */
static rb_thread *thread = NULL;
static st_store *store = NULL;

static shmem_startup_hook_type prev_shmem_startup_hook = NULL;
static shmem_request_hook_type prev_shmem_request_hook = NULL;

PGDLLEXPORT void _PG_init(void);

/* ---- shared memory ------------------------------------------------------------------------------------------------- */

static uint32
max_threads(void)
{
	return MaxBackends + NUM_AUXILIARY_PROCS + max_prepared_xacts;
}

static Size
arena_size(void)
{
	Size		size = (Size) nemo_buffer_size_kb * 1024;
	Size		least = rb_min_size(max_threads());

	return Max(size, least);
}

static void
nemo_shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(add_size(arena_size(), ARENA_ALIGN));
	RequestAddinShmemSpace(sizeof(NemoShared));
	RequestAddinShmemSpace(nemo_tree_shmem_size());
	RequestAddinShmemSpace(nemo_recovery_shmem_size());
	RequestNamedLWLockTranche("nemo", 1);
}

static void
nemo_shmem_startup(void)
{
	bool		found;
	char	   *arena;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("nemo", sizeof(NemoShared), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(NemoShared));
		shared->write_lock = &GetNamedLWLockTranche("nemo")[0].lock;
		for (int i = 0; i < RB_CHANNELS; i++)
			ConditionVariableInit(&shared->channels[i]);
	}
	arena = ShmemInitStruct("nemo record buffer", arena_size() + ARENA_ALIGN, &found);
	arena = (char *) TYPEALIGN(ARENA_ALIGN, arena);
	if (!found)
	{
		buffer = rb_create(arena, arena_size(), max_threads());
		if (buffer == NULL)
			ereport(FATAL,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("the record buffer does not fit in nemo.buffer_size"),
					 errhint("Increase nemo.buffer_size.")));
	}
	else
		buffer = (rb_buffer *) arena;
	nemo_tree_shmem_init(!found);
	nemo_recovery_shmem_init();
	LWLockRelease(AddinShmemInitLock);
}

rb_buffer *
nemo_buffer(void)
{
	if (shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("nemo has not been loaded at server start"),
				 errdetail("Its record buffer lives in shared memory and its log records need a resource manager."),
				 errhint("Add nemo to shared_preload_libraries and restart the server.")));
	return buffer;
}

st_stats *
nemo_store_stats(void)
{
	(void) nemo_buffer();
	return &shared->store_stats;
}

/* ---- the buffer's port --------------------------------------------------------------------------------------------- */

static rb_xid_state
port_xid_state(void *ctx, uint64_t full)
{
	TransactionId xid = (TransactionId) full;
	uint64		horizon;

	(void) ctx;
	/* the horizon is read first: it only grows, so an older one errs on the side of "not settled" */
	horizon = nemo_settle_horizon();
	if (TransactionIdIsCurrentTransactionId(xid) || TransactionIdIsInProgress(xid))
		return RB_XID_RUNNING;
	if (!TransactionIdDidCommit(xid))
		return RB_XID_ABORTED;
	return full < horizon && nemo_commit_is_durable(xid) ? RB_XID_SETTLED : RB_XID_COMMITTED;
}

/* Commits may be asynchronous: what such a transaction replaced must survive until its commit record does (E6). */
bool
nemo_commit_is_durable(TransactionId xid)
{
	XLogRecPtr	lsn = TransactionIdGetCommitLSN(xid);

	return XLogRecPtrIsInvalid(lsn) || !XLogNeedsFlush(lsn);
}

static int
port_wal_flush(void *ctx, uint64_t lsn)
{
	(void) ctx;
	XLogFlush((XLogRecPtr) lsn);
	return 0;
}

static void
port_wait(void *ctx, uint32_t channel, uint32_t timeout_ms)
{
	ConditionVariable *cv = &shared->channels[channel % RB_CHANNELS];

	(void) ctx;
	ConditionVariablePrepareToSleep(cv);
	(void) ConditionVariableTimedSleep(cv, (long) timeout_ms, PG_WAIT_EXTENSION);
	ConditionVariableCancelSleep();
}

static void
port_wake(void *ctx, uint32_t channel)
{
	(void) ctx;
	ConditionVariableBroadcast(&shared->channels[channel % RB_CHANNELS]);
}

static bool
port_interrupted(void *ctx)
{
	(void) ctx;
	return InterruptPending && InterruptHoldoffCount == 0 && CritSectionCount == 0 &&
		(QueryCancelPending || ProcDiePending);
}

/*
 * Stored version lists need no note of their own: VACUUM reads a table's whole key range (rb_settle_range) before it
 * lets relfrozenxid pass, whatever was written there.
 */
static void
port_note_unsettled(void *ctx, uint64_t tree, uint64_t oldest_xid)
{
	(void) ctx;
	(void) tree;
	(void) oldest_xid;
}

static const rb_port port = {
	.xid_state = port_xid_state,
	.wal_flush = port_wal_flush,
	.wait = port_wait,
	.wake = port_wake,
	.interrupted = port_interrupted,
	.note_unsettled = port_note_unsettled,
};

/* ---- this process's store ------------------------------------------------------------------------------------------ */

static void
store_write_lock(void *arg)
{
	(void) arg;
	LWLockAcquire(shared->write_lock, LW_EXCLUSIVE);
}

static void
store_write_unlock(void *arg)
{
	(void) arg;
	LWLockRelease(shared->write_lock);
}

/* Options every process opens the store with. */
void
nemo_store_options(st_options *options)
{
	memset(options, 0, sizeof(*options));
	options->stats = &shared->store_stats;
	options->inject.latency_us = (uint32_t) (nemo_simulated_latency_ms * 1000.0);
	options->retries = 3;
	options->max_readers = max_threads() + 64;
	options->write_lock = store_write_lock;
	options->write_unlock = store_write_unlock;
	options->interrupted = port_interrupted;
}

static st_store *
open_store(void *arg, st_error *err)
{
	(void) arg;
	if (store == NULL)
	{
		st_options	options;
		char		owner[65];
		uint64		epoch;

		nemo_store_options(&options);
		if (st_open(nemo_store_url, &options, &store, err) != ST_OK)
		{
			store = NULL;
			return NULL;
		}
		if (nemo_claimed_owner(owner, &epoch))
			st_assume(store, owner, epoch);
	}
	return store;
}

st_store *
nemo_store(void)
{
	st_error	err = {0};

	(void) nemo_buffer();
	if (open_store(NULL, &err) == NULL)
		nemo_raise_store(err.code, &err);
	return store;
}

static void
assign_simulated_latency(double newval, void *extra)
{
	(void) extra;
	if (store != NULL)
	{
		st_inject	inject = {0};

		inject.latency_us = (uint32_t) (newval * 1000.0);
		st_set_inject(store, &inject);
	}
}

/* ---- this process's buffer thread ---------------------------------------------------------------------------------- */

static void
detach_at_exit(int code, Datum arg)
{
	(void) code;
	(void) arg;
	if (thread != NULL)
	{
		rb_reset(thread);
		rb_detach(thread);		/* closes the store that it uses */
		thread = NULL;
		store = NULL;
	}
	if (store != NULL)
	{
		st_close(store);
		store = NULL;
	}
}

rb_thread *
nemo_worker_thread(void)
{
	if (likely(thread != NULL))
		return thread;

	(void) nemo_buffer();
	thread = rb_attach(buffer, (uint32_t) MyProc->pgprocno, &port);
	if (thread == NULL)
		ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
	rb_set_store(thread, open_store, NULL);
	before_shmem_exit(detach_at_exit, (Datum) 0);
	return thread;
}

rb_thread *
nemo_thread(void)
{
	static bool ready = false;

	if (likely(ready))
		return thread;

	(void) nemo_buffer();
	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("nemo tables cannot be used on a standby server"),
				 errhint("Promote this server or read from the primary.")));
	nemo_wait_ready();
	(void) nemo_worker_thread();
	ready = true;
	return thread;
}

/* After any error the buffer's half-done call is undone: tickets, sentinels and the epoch guard are given back. */
static void
nemo_xact_callback(XactEvent event, void *arg)
{
	(void) arg;
	if (thread != NULL && (event == XACT_EVENT_ABORT || event == XACT_EVENT_PARALLEL_ABORT))
		rb_reset(thread);
}

static void
nemo_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	(void) my;
	(void) parent;
	(void) arg;
	if (thread != NULL && event == SUBXACT_EVENT_ABORT_SUB)
		rb_reset(thread);
}

/* ---- transaction ids ----------------------------------------------------------------------------------------------- */

uint64
nemo_full_xid(TransactionId xid)
{
	FullTransactionId next = ReadNextFullTransactionId();
	uint32		epoch = EpochFromFullTransactionId(next);

	if (!TransactionIdIsNormal(xid))
		return (uint64) xid;
	if (xid > XidFromFullTransactionId(next))
		epoch--;
	return (uint64) epoch << 32 | xid;
}

uint64
nemo_current_full_xid(void)
{
	return U64FromFullTransactionId(GetCurrentFullTransactionId());
}

/* ---- errors -------------------------------------------------------------------------------------------------------- */

void
nemo_raise_store(st_status status, const st_error *err)
{
	const char *words = err->message[0] != '\0' ? err->message : st_status_name(status);

	switch (status)
	{
		case ST_CANCELED:
			CHECK_FOR_INTERRUPTS();
			ereport(ERROR,
					(errcode(ERRCODE_QUERY_CANCELED), errmsg("canceling statement during a request to the store")));
			break;
		case ST_REFUSED:
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the nemo store refused the request"),
					 errdetail_internal("%s", words),
					 errhint("One cluster owns a store. Point nemo.store at a store of this cluster's own.")));
			break;
		case ST_FULL:
			ereport(ERROR,
					(errcode(ERRCODE_DISK_FULL),
					 errmsg("the nemo store is full"),
					 errdetail_internal("%s", words),
					 errhint("Free space where nemo.store points to.")));
			break;
		case ST_CORRUPT:
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("the nemo store holds bytes that nemo did not write"),
					 errdetail_internal("%s", words),
					 errhint("Restore the store from a backup taken together with this cluster.")));
			break;
		case ST_INVALID:
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("the nemo store cannot be used as asked"),
					 errdetail_internal("%s", words),
					 errhint("Check the setting nemo.store.")));
			break;
		case ST_NOMEM:
			ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
			break;
		case ST_TIMEOUT:
			ereport(ERROR,
					(errcode(ERRCODE_CONNECTION_FAILURE),
					 errmsg("the nemo store did not answer in time"),
					 errdetail_internal("%s", words),
					 errhint("Nothing acknowledged is lost; try again when the store answers.")));
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_IO_ERROR),
					 errmsg("the nemo store is not available"),
					 errdetail_internal("%s", words),
					 errhint("Nothing acknowledged is lost; check nemo.store and try again.")));
	}
	pg_unreachable();
}

void
nemo_raise(rb_status status, const rb_error *err)
{
	switch (status)
	{
		case RB_STORE:
			nemo_raise_store(err->st.code, &err->st);
			break;
		case RB_FULL:
			ereport(ERROR,
					(errcode(ERRCODE_OUT_OF_MEMORY),
					 errmsg("the record buffer is full"),
					 errdetail_internal("%s", err->st.message),
					 errhint("Increase nemo.buffer_size, or touch fewer records in one transaction.")));
			break;
		case RB_CORRUPT:
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("a record in the nemo store is corrupted"),
					 errdetail_internal("%s", err->st.message),
					 errhint("Restore the store from a backup taken together with this cluster.")));
			break;
		case RB_CANCELED:
			CHECK_FOR_INTERRUPTS();
			ereport(ERROR,
					(errcode(ERRCODE_QUERY_CANCELED), errmsg("canceling statement during a request to the store")));
			break;
		case RB_TOOLONG:
			ereport(ERROR,
					(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					 errmsg("a record is too long for nemo"),
					 errdetail("Keys may have %d bytes, rows %d bytes.", RB_MAX_KEY, RB_MAX_VALUE)));
			break;
		case RB_NOMEM:
			ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
			break;
		default:
			elog(ERROR, "unexpected record buffer status %d", (int) status);
	}
	pg_unreachable();
}

/* ---- module entry -------------------------------------------------------------------------------------------------- */

static void
define_settings(bool preloaded)
{
	/* without preloading the AMs resolve, but every use of a table raises (nemo_buffer) */
	if (!preloaded)
		return;
	DefineCustomStringVariable("nemo.store", "Where the rows of nemo tables are kept.",
							   "lmdb:DIRECTORY, absolute or relative to the data directory.",
							   &nemo_store_url, "lmdb:nemo/store", PGC_POSTMASTER, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("nemo.buffer_size", "Shared memory for the record buffer.", NULL,
							&nemo_buffer_size_kb, 128 * 1024, 1024, INT_MAX, PGC_POSTMASTER, GUC_UNIT_KB,
							NULL, NULL, NULL);
	DefineCustomIntVariable("nemo.checkpoint_interval", "Time between checkpoints of the record buffer.", NULL,
							&nemo_checkpoint_interval_s, 60, 1, 86400, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("nemo.flush_workers", "Background workers that write back and evict records.", NULL,
							&nemo_flush_workers, 1, 0, 16, PGC_POSTMASTER, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("nemo.max_trees", "Tables and indexes that may exist in nemo at one time.", NULL,
							&nemo_max_trees, 16384, 64, 4194304, PGC_POSTMASTER, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("nemo.simulated_latency", "Milliseconds slept before each request to the store.",
							 "For tests and benchmarks.",
							 &nemo_simulated_latency_ms, 0.0, 0.0, 10000.0, PGC_SUSET, GUC_UNIT_MS,
							 NULL, assign_simulated_latency, NULL);
	MarkGUCPrefixReserved("nemo");
}

void
_PG_init(void)
{
	define_settings(process_shared_preload_libraries_in_progress);
	nemo_ddl_init();
	nemo_tree_init();
	RegisterXactCallback(nemo_xact_callback, NULL);
	RegisterSubXactCallback(nemo_subxact_callback, NULL);

	if (!process_shared_preload_libraries_in_progress)
		return;

	nemo_wal_init();
	nemo_recovery_init();
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = nemo_shmem_request;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = nemo_shmem_startup;
}
