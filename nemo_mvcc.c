/*
 * nemo_mvcc.c
 *	  Visibility, conflicts between writers, and installing versions in the record buffer.
 *
 * A version names its writer, and PostgreSQL's own answers about that transaction decide (DESIGN 3, F3).  All of it works
 * on the chain of one key inside the epoch guard: what was seen stays readable, and whether it is still current is
 * decided by the compare-and-swap of rb_put() (D6).  locking/README.md has the protocol of row locks.
 *
 * Errors may leave these functions at any point inside a guard: the abort of the (sub)transaction resets the buffer
 * thread and gives back versions that were prepared and never installed.
 */
#include "nemo_table.h"

#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/predicate.h"
#include "storage/procarray.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "locking/lk_mode.h"
#include "nemo_index.h"
#include "nemo_log.h"

/* aux of a writer's version: LockTupleMode, and whether locks were running below it when it was installed */
#define AUX_MODE			0x00FF
#define AUX_LOCKS_BELOW		0x0100

#define CUT_SEARCH			32		/* versions looked at to find where a chain may be cut */
#define FINISHED_LOCKS		8		/* locks that are over and may stay in the middle of a chain */
#define LOOKUP_ATTEMPTS		1000	/* fetches of one key that may fail to keep it in memory */
#define PRESSED_EVERY		32		/* versions prepared under pressure for one call for the flushers */
#define COUNT_EVERY			1000	/* rows counted before other processes hear of them */

StaticAssertDecl((int) LK_KEY_SHARE == (int) LockTupleKeyShare && (int) LK_EXCLUSIVE == (int) LockTupleExclusive,
				 "lock modes are PostgreSQL's");

static struct
{
	bool		ready;

	/* prepared, not yet installed */
	rb_version **prepared;
	int			nprepared;
	int			max_prepared;

	uint32		pressed;		/* versions prepared while memory was short */

	/* the speculative insertion under way */
	bool		speculative;
	uint32		token;
	int			ntrees;
	NemoTree   *trees;			/* in which its versions are; in cxt */
	List	   *keys;			/* of bytea *, installed so far; in cxt */
	MemoryContext cxt;

	/* rows and bytes not yet published */
	NemoTree	count_tree;
	int64		count_rows;
	int64		count_bytes;
}			state;

/* ---- who wrote a version ------------------------------------------------------------------------------------------- */

static inline uint16
hints_of(const rb_version *v)
{
	return atomic_load_explicit(&((rb_version *) v)->flags, memory_order_relaxed);
}

/* The hint says only what the commit log says; whether that is durable is the flusher's business. */
static inline bool
did_commit(const rb_version *v, TransactionId xid)
{
	if (TransactionIdDidCommit(xid))
	{
		rb_hint(v, RB_HINT_COMMITTED);
		return true;
	}
	rb_hint(v, RB_HINT_ABORTED);
	return false;
}

NemoWriter
nemo_writer(const rb_version *v)
{
	uint16		hints = hints_of(v);
	TransactionId xid;

	if (hints & (RB_SETTLED | RB_HINT_COMMITTED))
		return NEMO_COMMITTED;
	if (hints & RB_HINT_ABORTED)
		return NEMO_ABORTED;
	xid = (TransactionId) rb_x(v)->xid;
	if (TransactionIdIsCurrentTransactionId(xid))
		return NEMO_OWN;
	if (TransactionIdIsInProgress(xid))
		return NEMO_RUNNING;
	return did_commit(v, xid) ? NEMO_COMMITTED : NEMO_ABORTED;
}

/* ---- visibility ---------------------------------------------------------------------------------------------------- */

/*
 * A serializable transaction has not seen what a concurrent one wrote.  Which table it was does not matter to the
 * check, so a description that takes part in predicate locking stands for all.
 */
static void
note_unseen(TransactionId xid, Snapshot snapshot)
{
	static FormData_pg_class form;
	static RelationData any_table;

	form.relkind = RELKIND_RELATION;
	form.relpersistence = RELPERSISTENCE_PERMANENT;
	any_table.rd_rel = &form;
	any_table.rd_id = FirstNormalObjectId;
	CheckForSerializableConflictOut(&any_table, xid, snapshot);
}

static const rb_version *
decide_mvcc(const rb_version *head, Snapshot snapshot)
{
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
	{
		uint16		hints = hints_of(v);
		TransactionId xid;

		if (v->kind == RB_LOCK || (hints & RB_HINT_ABORTED))
			continue;
		if (hints & RB_SETTLED)
			return v;
		xid = (TransactionId) rb_x(v)->xid;
		if (!(hints & RB_HINT_COMMITTED) && TransactionIdIsCurrentTransactionId(xid))
		{
			if (rb_x(v)->cid < snapshot->curcid)
				return v;
			continue;
		}
		if (XidInMVCCSnapshot(xid, snapshot))
		{
			if (unlikely(IsolationIsSerializable()))
				note_unseen(xid, snapshot);
			continue;
		}
		if ((hints & RB_HINT_COMMITTED) || did_commit(v, xid))
			return v;
	}
	return NULL;
}

/* SELF: what is committed or ours.  DIRTY: running ones count, too, and are named in the snapshot. */
static const rb_version *
decide_now(const rb_version *head, Snapshot snapshot, bool dirty)
{
	TransactionId deleter = InvalidTransactionId;

	if (dirty)
	{
		snapshot->xmin = snapshot->xmax = InvalidTransactionId;
		snapshot->speculativeToken = 0;
	}
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
	{
		NemoWriter	writer;

		if (v->kind == RB_LOCK)
			continue;
		writer = nemo_writer(v);
		if (writer == NEMO_ABORTED)
			continue;
		if (writer != NEMO_RUNNING)
		{
			if (dirty && v->kind == RB_DATA)
				snapshot->xmax = deleter;
			return v;
		}
		if (!dirty)
			continue;
		if (v->kind == RB_DELETE)
		{
			/* still there for everybody else, until its deleter commits */
			if (!TransactionIdIsValid(deleter))
				deleter = (TransactionId) rb_x(v)->xid;
			continue;
		}
		snapshot->xmax = deleter;
		snapshot->xmin = (TransactionId) rb_x(v)->xid;
		if (hints_of(v) & RB_SPECULATIVE)
			snapshot->speculativeToken = rb_x(v)->aux;
		return v;
	}
	return NULL;
}

static const rb_version *
decide_any(const rb_version *head)
{
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
		if (v->kind != RB_LOCK && nemo_writer(v) != NEMO_ABORTED)
			return v;
	return NULL;
}

const rb_version *
nemo_decide(const rb_version *head, Snapshot snapshot)
{
	switch (snapshot->snapshot_type)
	{
		case SNAPSHOT_MVCC:
			return decide_mvcc(head, snapshot);
		case SNAPSHOT_SELF:
		case SNAPSHOT_TOAST:
			return decide_now(head, snapshot, false);
		case SNAPSHOT_DIRTY:
			return decide_now(head, snapshot, true);
		case SNAPSHOT_ANY:
		case SNAPSHOT_NON_VACUUMABLE:
			return decide_any(head);
		case SNAPSHOT_HISTORIC_MVCC:
			break;
	}
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("nemo tables cannot be read with a snapshot of logical decoding")));
	return NULL;
}

const rb_version *
nemo_visible(const rb_version *head, Snapshot snapshot)
{
	const rb_version *v = nemo_decide(head, snapshot);

	if (v != NULL && v->kind == RB_DELETE && snapshot->snapshot_type != SNAPSHOT_ANY)
		return NULL;
	return v;
}

/* ---- conflicts ----------------------------------------------------------------------------------------------------- */

/*
 * In which mode does a running writer hold the row?  Its version says so if it replaced a row; whatever else it is takes
 * the strongest (aux may be a speculative token then).
 */
static LockTupleMode
writer_mode(const rb_version *v)
{
	const rb_version *older;

	if (v->kind != RB_DATA || (hints_of(v) & RB_SPECULATIVE) ||
		(rb_x(v)->aux & AUX_MODE) != LockTupleNoKeyExclusive)
		return LockTupleExclusive;
	for (older = rb_older(v); older != NULL; older = rb_older(older))
		if (older->kind != RB_LOCK && nemo_writer(older) != NEMO_ABORTED)
			break;
	return older != NULL && older->kind == RB_DATA ? LockTupleNoKeyExclusive : LockTupleExclusive;
}

static inline bool
locks_below(const rb_version *v)
{
	return (rb_x(v)->aux & AUX_LOCKS_BELOW) != 0;
}

/*
 * Walks until nothing below can matter: locks only ever come on top, so below a version that had none under it there
 * are none, and a chain that is not cut this time is cut by one of the next writers.
 */
void
nemo_examine(const rb_version *head, LockTupleMode mode, NemoChain *chain)
{
	uint64		horizon = 0;
	int			beyond = 0;

	memset(chain, 0, sizeof(*chain));
	chain->head = head;
	chain->own_lock = -1;
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
	{
		NemoWriter	writer = nemo_writer(v);
		TransactionId xid;

		if (v->kind == RB_LOCK)
		{
			if (writer != NEMO_OWN && writer != NEMO_RUNNING)
			{
				chain->finished += chain->keep != NULL;
				continue;
			}
			chain->locked = true;
			chain->cut = NULL;	/* it would go with the rest */
			if (chain->keep == NULL)
				chain->keep = v;
			if (writer == NEMO_OWN)
				chain->own_lock = Max(chain->own_lock, (int) rb_x(v)->aux);
			else if (!TransactionIdIsValid(chain->wait_xid) && lk_conflict(rb_x(v)->aux, (lk_mode) mode))
				chain->wait_xid = (TransactionId) rb_x(v)->xid;
			continue;
		}

		if (writer == NEMO_ABORTED)
			continue;
		if (chain->keep == NULL)
			chain->keep = v;
		if (chain->live == NULL)
		{
			chain->live = v;
			chain->live_own = writer == NEMO_OWN;
			if (writer == NEMO_RUNNING)
				chain->live_xid = (TransactionId) rb_x(v)->xid;
		}
		if (writer != NEMO_RUNNING && chain->stable == NULL)
			chain->stable = v;
		if (rb_is_settled(v))
			break;

		xid = (TransactionId) rb_x(v)->xid;
		if (writer == NEMO_RUNNING && !TransactionIdIsValid(chain->wait_xid) &&
			lk_conflict((lk_mode) writer_mode(v), (lk_mode) mode))
		{
			chain->wait_xid = xid;
			chain->speculative_token = (hints_of(v) & RB_SPECULATIVE) ? rb_x(v)->aux : 0;
		}
		if (writer == NEMO_COMMITTED && chain->cut == NULL)
		{
			if (horizon == 0)
				horizon = nemo_settle_horizon();
			if (rb_x(v)->xid < horizon && nemo_commit_is_durable(xid))
				chain->cut = v;
		}
		if (locks_below(v))
			chain->locked = true;
		else if (chain->stable != NULL && (chain->cut != NULL || ++beyond > CUT_SEARCH))
			break;
	}
}

/* ---- preparing and installing -------------------------------------------------------------------------------------- */

static void
add_prepared(rb_version *v)
{
	Assert(state.nprepared < state.max_prepared);
	state.prepared[state.nprepared++] = v;
}

static void
forget_prepared(const rb_version *v)
{
	/* the last one, as a rule */
	for (int i = state.nprepared; i-- > 0;)
		if (state.prepared[i] == v)
		{
			memmove(&state.prepared[i], &state.prepared[i + 1],
					(state.nprepared - i - 1) * sizeof(state.prepared[0]));
			state.nprepared--;
			return;
		}
}

rb_version *
nemo_prepare(uint32 key_len, rb_kind kind, uint8 tag, CommandId cid, uint32 aux, const void *data, uint32 len)
{
	rb_thread  *thread = nemo_thread();
	uint64		xid = nemo_current_full_xid();
	rb_version *v;
	rb_xversion *x;
	rb_error	err = {0};
	rb_status	status;

	nemo_mvcc_init();
	if (unlikely(state.nprepared == state.max_prepared))
	{
		int			n = state.max_prepared == 0 ? 64 : state.max_prepared * 2;

		state.prepared = state.prepared == NULL ?
			MemoryContextAlloc(TopMemoryContext, n * sizeof(rb_version *)) :
			repalloc(state.prepared, n * sizeof(rb_version *));
		state.max_prepared = n;
	}
	status = rb_version_new(thread, key_len, len, false, &v, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	add_prepared(v);
	/* room is better made before it is needed; the flushers look by themselves only now and then */
	if (unlikely(rb_wants_eviction(nemo_buffer())) && state.pressed++ % PRESSED_EVERY == 0)
		nemo_wake_flushers();

	x = (rb_xversion *) v;
	v->kind = (uint8) kind;
	v->tag = tag;
	x->xid = xid;
	x->cid = cid;
	x->aux = aux;
	atomic_store_explicit(&x->lsn, kind == RB_LOCK ? 0 : RB_LSN_PENDING, memory_order_relaxed);
	if (len > 0)
		memcpy((uint8 *) rb_data(v), data, len);
	return v;
}

void
nemo_discard(rb_version *v)
{
	forget_prepared(v);
	rb_version_free(nemo_thread(), v);
}

static void
remember_key(rb_slice key)
{
	MemoryContext old;
	bytea	   *copy;
	ListCell   *lc;

	/* a version may be prepared anew for a key that could not be put at once */
	foreach(lc, state.keys)
	{
		copy = lfirst(lc);
		if (VARSIZE(copy) - VARHDRSZ == key.len && memcmp(VARDATA(copy), key.data, key.len) == 0)
			return;
	}
	old = MemoryContextSwitchTo(state.cxt);
	copy = palloc(VARHDRSZ + key.len);
	SET_VARSIZE(copy, VARHDRSZ + key.len);
	memcpy(VARDATA(copy), key.data, key.len);
	state.keys = lappend(state.keys, copy);
	MemoryContextSwitchTo(old);
}

/* Is this key one of the speculative insertion's?  Then mark the version, and remember the key. */
static void
mark_speculative(rb_slice key, rb_version *v)
{
	NemoTree	tree = nemo_get_be64(key.data);

	for (int i = 0; i < state.ntrees; i++)
		if (state.trees[i] == tree)
		{
			remember_key(key);
			((rb_xversion *) v)->aux = state.token;
			rb_hint(v, RB_SPECULATIVE);
			return;
		}
}

/* take finished locks out of the middle of a chain that has come to hold many of them; inside the guard */
static void
unlink_finished_locks(rb_slice key, const NemoChain *chain)
{
	rb_thread  *thread = nemo_thread();
	const rb_version *older;

	for (const rb_version *v = chain->keep; v != NULL; v = older)
	{
		NemoWriter	writer;

		older = rb_older(v);
		if (v->kind != RB_LOCK)
			continue;
		writer = nemo_writer(v);
		if (writer == NEMO_COMMITTED || writer == NEMO_ABORTED)
			rb_withdraw(thread, key, (rb_version *) v);
	}
}

bool
nemo_install_with(rb_slice key, rb_version *v, const NemoChain *chain, const NemoChange *fresh)
{
	rb_thread  *thread = nemo_thread();
	rb_put_args args = {
		.key = key,
		.v = v,
		.expect = chain->head,
		.keep = chain->keep,
		.cut = chain->cut,
		.dirty = v->kind != RB_LOCK,
	};
	NemoChange	changes[2] = {{key, v}};
	int			n = 1;
	rb_status	status;

	if (v->kind != RB_LOCK)
	{
		if (chain->locked)
			((rb_xversion *) v)->aux |= AUX_LOCKS_BELOW;
		if (unlikely(state.speculative) && v->kind == RB_DATA && !(hints_of(v) & RB_SPECULATIVE))
			mark_speculative(key, v);
	}
	if (fresh != NULL && unlikely(state.speculative) && !(hints_of(fresh->v) & RB_SPECULATIVE))
		mark_speculative(fresh->key, fresh->v);

	status = rb_put(thread, &args);
	if (status == RB_CHANGED || status == RB_UNKNOWN)
		return false;
	if (status != RB_OK)
		elog(PANIC, "record buffer did not take a version: status %d", (int) status);
	forget_prepared(v);

	if (fresh != NULL)
	{
		nemo_put_fresh(fresh);
		changes[n++] = *fresh;
	}
	if (v->kind == RB_LOCK)
		nemo_touch_xact();
	else
		nemo_log_changes(changes, n);
	if (chain->finished > FINISHED_LOCKS)
		unlink_finished_locks(key, chain);
	return true;
}

void
nemo_installed(rb_version *v)
{
	forget_prepared(v);
}

void
nemo_put_fresh(const NemoChange *change)
{
	rb_put_args put = {.key = change->key, .v = change->v, .blind = true, .dirty = true};
	rb_status	status = rb_put(nemo_thread(), &put);

	/* a failure must not leave others without their log record: room was reserved by nemo_prepare() */
	if (status != RB_OK)
		elog(PANIC, "record buffer did not take a new record: status %d", (int) status);
	forget_prepared(change->v);
}

bool
nemo_install(rb_slice key, rb_version *v, const NemoChain *chain)
{
	return nemo_install_with(key, v, chain, NULL);
}

void
nemo_install_fresh(const NemoChange *changes, int n)
{
	rb_thread  *thread = nemo_thread();

	if (unlikely(state.speculative))
		for (int i = 0; i < n; i++)
			mark_speculative(changes[i].key, changes[i].v);

	rb_enter(thread);
	for (int i = 0; i < n; i++)
		nemo_put_fresh(&changes[i]);
	nemo_log_changes(changes, n);
	rb_leave(thread);
}

/* ---- waiting ------------------------------------------------------------------------------------------------------- */

bool
nemo_wait_for(Relation rel, ItemPointer tid, TransactionId xid, uint32 token, LockWaitPolicy policy, XLTW_Oper oper)
{
	switch (policy)
	{
		case LockWaitBlock:
			if (token != 0)
				SpeculativeInsertionWait(xid, token);
			else
				XactLockTableWait(xid, rel, tid, oper);
			return true;
		case LockWaitSkip:
			return ConditionalXactLockTableWait(xid);
		case LockWaitError:
			if (!ConditionalXactLockTableWait(xid))
				ereport(ERROR,
						(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
						 errmsg("could not obtain lock on row in relation \"%s\"", RelationGetRelationName(rel))));
			return true;
	}
	return true;
}

/* ---- looking ------------------------------------------------------------------------------------------------------- */

static bool
visit_nothing(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) arg;
	(void) i;
	(void) key;
	(void) head;
	return true;
}

void
nemo_lookup_enter(rb_slice key, bool probe, const rb_version **head)
{
	rb_thread  *thread = nemo_thread();

	for (int attempt = 0; attempt < LOOKUP_ATTEMPTS; attempt++)
	{
		rb_error	err = {0};
		rb_status	status;

		rb_enter(thread);
		status = rb_lookup(thread, key, head);
		if (likely(status == RB_OK))
			return;
		rb_leave(thread);
		if (status != RB_UNKNOWN)
			nemo_raise(status, &err);
		CHECK_FOR_INTERRUPTS();
		status = probe ? rb_probe(thread, key, &err) :
			rb_read_keys(thread, &key, 1, visit_nothing, NULL, &err);
		if (status != RB_OK)
			nemo_raise(status, &err);
	}
	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY),
			 errmsg("the record buffer is full"),
			 errdetail("A record is pushed out before it can be used."),
			 errhint("Increase nemo.buffer_size.")));
}

typedef struct LookArg
{
	NemoLook	look;
	void	   *arg;
} LookArg;

static bool
visit_look(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	LookArg    *a = arg;

	(void) i;
	(void) key;
	a->look(a->arg, head);
	return true;
}

void
nemo_look(rb_slice key, NemoLook look, void *arg)
{
	rb_thread  *thread = nemo_thread();
	const rb_version *head;
	rb_status	status;
	rb_error	err = {0};

	rb_enter(thread);
	status = rb_lookup(thread, key, &head);
	if (likely(status == RB_OK))
	{
		look(arg, head);
		rb_leave(thread);
		return;
	}
	rb_leave(thread);
	if (status == RB_UNKNOWN)
	{
		LookArg		a = {look, arg};

		status = rb_read_keys(thread, &key, 1, visit_look, &a, &err);
	}
	if (status != RB_OK)
		nemo_raise(status, &err);
}

/* ---- speculative insertion ----------------------------------------------------------------------------------------- */

static void
speculative_reset(void)
{
	state.speculative = false;
	state.ntrees = 0;
	state.trees = NULL;
	state.keys = NIL;
	if (state.cxt != NULL)
		MemoryContextReset(state.cxt);
}

void
nemo_speculative_begin(const NemoRelInfo *info, uint32 token)
{
	nemo_mvcc_init();
	if (state.speculative)
		elog(ERROR, "a speculative insertion is already under way");
	if (state.cxt == NULL)
		state.cxt = AllocSetContextCreate(TopMemoryContext, "nemo speculative insertion", ALLOCSET_SMALL_SIZES);
	state.trees = MemoryContextAlloc(state.cxt, (info->nindexes + 2) * sizeof(NemoTree));
	state.ntrees = 0;
	state.trees[state.ntrees++] = info->tree;
	state.trees[state.ntrees++] = info->row_tree;
	for (int i = 0; i < info->nindexes; i++)
		state.trees[state.ntrees++] = info->indexes[i].tree;
	state.token = token;
	state.keys = NIL;
	state.speculative = true;
}

/*
 * The version may have been to the store and back since it was installed, so it is found by its writer: the newest one
 * of the current subtransaction.  Withdrawn without a trace (F10): replay makes the key absent, too, which is what it was
 * when the insertion was let through.
 */
static void
end_one(rb_slice key, bool confirm)
{
	rb_thread  *thread = nemo_thread();
	uint64		xid = nemo_current_full_xid();
	const rb_version *head;

	nemo_lookup_enter(key, false, &head);
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
	{
		if (v->kind == RB_LOCK || nemo_writer(v) == NEMO_ABORTED)
			continue;
		if (v->kind != RB_DATA || rb_is_settled(v) || rb_x(v)->xid != xid)
			break;
		if (confirm)
			rb_confirm((rb_version *) v);
		else
		{
			(void) nemo_log_withdraw(key);
			rb_withdraw(thread, key, (rb_version *) v);
		}
		break;
	}
	rb_leave(thread);
}

void
nemo_speculative_end(bool confirm)
{
	ListCell   *lc;

	if (!state.speculative)
		return;
	state.speculative = false;
	foreach(lc, state.keys)
	{
		bytea	   *key = lfirst(lc);

		end_one((rb_slice) {(uint8_t *) VARDATA(key), VARSIZE(key) - VARHDRSZ}, confirm);
	}
	speculative_reset();
}

/* ---- counting ------------------------------------------------------------------------------------------------------ */

static void
publish_count(void)
{
	if (state.count_rows != 0 || state.count_bytes != 0)
		nemo_tree_count(state.count_tree, state.count_rows, state.count_bytes);
	state.count_rows = state.count_bytes = 0;
}

void
nemo_count(NemoTree tree, int64 rows, int64 bytes)
{
	if (rows == 0 && bytes == 0)
		return;
	if (state.count_tree != tree)
	{
		publish_count();
		state.count_tree = tree;
	}
	state.count_rows += rows;
	state.count_bytes += bytes;
	if (state.count_rows >= COUNT_EVERY || state.count_rows <= -COUNT_EVERY)
		publish_count();
}

/* ---- ends of transactions ------------------------------------------------------------------------------------------ */

static void
give_back(void)
{
	rb_thread  *thread = state.nprepared > 0 ? nemo_worker_thread() : NULL;

	while (state.nprepared > 0)
		rb_version_free(thread, state.prepared[--state.nprepared]);
	speculative_reset();
}

static void
mvcc_xact_callback(XactEvent event, void *arg)
{
	(void) arg;
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			publish_count();
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
			state.count_rows = state.count_bytes = 0;
			give_back();
			break;
		default:
			break;
	}
}

static void
mvcc_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	(void) my;
	(void) parent;
	(void) arg;
	if (event == SUBXACT_EVENT_ABORT_SUB)
		give_back();
}

void
nemo_mvcc_init(void)
{
	if (likely(state.ready))
		return;
	RegisterXactCallback(mvcc_xact_callback, NULL);
	RegisterSubXactCallback(mvcc_subxact_callback, NULL);
	state.ready = true;
}
