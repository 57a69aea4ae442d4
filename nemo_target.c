/*
 * nemo_target.c
 *	  What a ctid leads to: the version it names, and what has become of the row since.
 *
 * A ctid is a rowid and a 4-bit tag, and the tag comes round after 16 updates.  So a tag that matches the newest version
 * proves nothing to a holder who may have slept through 16 of them: the newest version is the one named only if the
 * holder's snapshot sees it, or he wrote or locked it himself.  trust_tag is for ctids that were found a moment ago
 * without a snapshot (ON CONFLICT).
 *
 * The chain of a key may hold more than one row, one after the other; only versions of the ctid's row count, and the
 * DELETE version above them.  Versions of others' running transactions do not: who has to heed them has waited.
 */
#include "nemo_table.h"

#include "commands/trigger.h"
#include "utils/snapmgr.h"

static inline bool
is_row(NemoRelInfo *info, rb_slice key, const rb_version *v, uint64 rowid)
{
	return v->kind == RB_DATA && nemo_rowid_of(info, key, rb_data(v), v->len) == rowid;
}

static inline bool
counts(const rb_version *v)
{
	NemoWriter	writer;

	if (v->kind == RB_LOCK)
		return false;
	writer = nemo_writer(v);
	return writer == NEMO_OWN || writer == NEMO_COMMITTED;
}

/* where the row went when this version deleted it; false = nowhere */
static bool
forward(const rb_version *del, ItemPointer ctid)
{
	if (del->kind != RB_DELETE || del->len != sizeof(ItemPointerData))
		return false;
	memcpy(ctid, rb_data(del), sizeof(ItemPointerData));
	return true;
}

/* the version `outdated` has been replaced or deleted by `by` */
static void
outdated(NemoTarget *target, const rb_version *by, CommandId cid)
{
	if (!rb_is_settled(by))
	{
		target->xmax = (TransactionId) rb_x(by)->xid;
		if (nemo_writer(by) == NEMO_OWN)
		{
			target->cmax = rb_x(by)->cid;
			target->result = target->cmax >= cid ? TM_SelfModified : TM_Invisible;
			return;
		}
	}
	target->result = TM_Updated;
}

/* The version that a ctid names: the one that the snapshot sees if it has the tag, else the newest that has it. */
static const rb_version *
find_named(NemoRelInfo *info, rb_slice key, const rb_version *head, uint64 rowid, uint8 tag, const rb_version *seen)
{
	if (seen != NULL && seen->tag == tag && is_row(info, key, seen, rowid))
		return seen;
	for (const rb_version *v = head; v != NULL; v = rb_older(v))
		if (v->tag == tag && counts(v) && is_row(info, key, v, rowid))
			return v;
	return NULL;
}

void
nemo_target(NemoRelInfo *info, rb_slice key, const NemoChain *chain, ItemPointer tid, Snapshot snapshot, CommandId cid,
			bool trust_tag, NemoTarget *target)
{
	const rb_version *newest = NULL;	/* of the key */
	const rb_version *above = NULL; /* replaced or deleted the one that is named */
	const rb_version *gone = NULL;	/* deleted the row */
	const rb_version *last = NULL;	/* of the row, below gone */
	const rb_version *named;
	const rb_version *seen = NULL;	/* by the snapshot */
	bool		mvcc = snapshot != NULL && IsMVCCSnapshot(snapshot);
	uint64		rowid;
	uint8		tag;

	memset(target, 0, sizeof(*target));
	target->ctid = *tid;
	target->cmax = InvalidCommandId;
	target->result = TM_Deleted;
	if (!nemo_tid_get(tid, &rowid, &tag) || chain->head == NULL)
		return;
	if (mvcc)
		seen = nemo_visible(chain->head, snapshot);
	named = find_named(info, key, chain->head, rowid, tag, seen);

	for (const rb_version *v = chain->head; v != NULL && v != named; v = rb_older(v))
	{
		if (!counts(v))
			continue;
		if (newest == NULL)
			newest = v;
		/* a key that was deleted and used again is another row, whatever its rowid */
		if (!is_row(info, key, v, rowid))
		{
			gone = v;
			last = NULL;
		}
		else if (last == NULL)
			last = v;
		above = v;
	}
	target->version = named;

	if (named != NULL && above == NULL)
	{
		bool		own = nemo_writer(named) == NEMO_OWN;

		if (own ? rb_x(named)->cid < cid : trust_tag || chain->own_lock >= 0 || named == seen || !mvcc)
		{
			target->result = TM_Ok;
			target->newest = true;
			return;
		}
		if (own)
		{
			target->result = TM_Invisible;
			target->xmax = (TransactionId) rb_x(named)->xid;
			target->cmax = rb_x(named)->cid;
			return;
		}
		/* the tag has come round: the version that was meant is not there any more */
		newest = above = named;
	}
	if (above == NULL)
		return;
	if (named == NULL && !is_row(info, key, newest, rowid))
	{
		/* what the row became is in what deleted it last, if that is still there */
		above = gone = newest;
		last = NULL;
	}

	outdated(target, above, cid);
	if (gone == NULL)
	{
		nemo_tid_set(&target->ctid, rowid, newest->tag);
		return;
	}
	if (last != NULL)
		nemo_tid_set(&target->ctid, rowid, last->tag);
	else if (forward(gone, &target->ctid))
		target->moved = true;
	else if (target->result == TM_Updated)
		target->result = TM_Deleted;
}

static bool
has_deferrable_triggers(Relation rel)
{
	TriggerDesc *desc = rel->trigdesc;

	for (int i = 0; desc != NULL && i < desc->numtriggers; i++)
		if (desc->triggers[i].tgdeferrable)
			return true;
	return false;
}

/*
 * Triggers ask for the versions that their event named: those that this transaction wrote, and the one it found.  Within a
 * statement the newest one with the tag is it; a deferred trigger may come when the tag has come round.
 */
const rb_version *
nemo_version_of(Relation rel, NemoRelInfo *info, rb_slice key, const rb_version *head, uint64 rowid, uint8 tag)
{
	const rb_version *found = NULL;
	bool		deferred = has_deferrable_triggers(rel);

	for (const rb_version *v = head; v != NULL; v = rb_older(v))
	{
		NemoWriter	writer;

		if (v->kind != RB_DATA || (writer = nemo_writer(v)) == NEMO_ABORTED || !is_row(info, key, v, rowid))
			continue;
		if (v->tag == tag)
		{
			if (!deferred)
				return v;
			if (found != NULL)
				ereport(ERROR,
						(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						 errmsg("too many updates of one row for deferred triggers on nemo table \"%s\"",
								RelationGetRelationName(rel)),
						 errdetail("A transaction may update a row 15 times while triggers that are to see its versions wait."),
						 errhint("Use SET CONSTRAINTS ALL IMMEDIATE, or several transactions.")));
			found = v;
		}
		/* the version that this transaction found, or one that it has nothing to do with */
		if (found != NULL && writer != NEMO_OWN)
			break;
	}
	return found;
}
