/*
 * nemo_insert.c
 *	  INSERT of rows.
 *
 * Without a clustered index a new row is installed at once, under a rowid nobody has used.  With one, the row is formed
 * here and waits in this process until the executor inserts its primary key entry: that is when its key is known to be
 * free, and row and rowid map go in together (nemo_place_row).  Rows of one multi-row insertion whose keys are known to
 * be free go in before that, many with one log record.
 */
#include "nemo_table.h"

#include "access/xact.h"
#include "catalog/index.h"
#include "lib/ilist.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/predicate.h"
#include "utils/memutils.h"

#include "nemo_index.h"

#define FRESH_ROWS		64		/* rows that are installed and logged together, at most */
#define FRESH_BYTES		(256 * 1024)

/* a row that was formed and waits for its primary key entry */
typedef struct Pending
{
	dlist_node	node;
	NemoTree	row_tree;
	uint64		rowid;
	SubTransactionId subid;
	CommandId	cid;
	uint32		key_len;
	uint32		data_len;
	uint8		bytes[];		/* key, data */
} Pending;

static struct
{
	bool		ready;
	dlist_head	pending;		/* oldest first; in TopTransactionContext */

	/* rows just inserted where no version of any row was before, in the order in which their entries come */
	NemoTree	fresh_tree;
	int			nfresh;
	int			max_fresh;
	int			next_fresh;
	uint64	   *fresh;

	/* scratch, in TopMemoryContext */
	StringInfoData data;
	StringInfoData key;
} state;

/* ---- rows that wait to be placed ----------------------------------------------------------------------------------- */

static void
forget_pending(Pending *p)
{
	dlist_delete(&p->node);
	pfree(p);
}

static void
insert_xact_callback(XactEvent event, void *arg)
{
	(void) arg;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (!dlist_is_empty(&state.pending))
				elog(ERROR, "a row of a nemo table was formed, and its primary key entry never came");
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
			/* the memory goes with the transaction */
			dlist_init(&state.pending);
			break;
		default:
			break;
	}
	state.fresh_tree = 0;
}

static void
insert_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	dlist_mutable_iter i;

	(void) arg;
	if (event != SUBXACT_EVENT_ABORT_SUB && event != SUBXACT_EVENT_COMMIT_SUB)
		return;
	dlist_foreach_modify(i, &state.pending)
	{
		Pending    *p = dlist_container(Pending, node, i.cur);

		if (p->subid != my)
			continue;
		if (event == SUBXACT_EVENT_ABORT_SUB)
			forget_pending(p);
		else
			p->subid = parent;
	}
	state.fresh_tree = 0;
}

static void
init(void)
{
	MemoryContext old;

	if (likely(state.ready))
		return;
	old = MemoryContextSwitchTo(TopMemoryContext);
	initStringInfo(&state.data);
	initStringInfo(&state.key);
	MemoryContextSwitchTo(old);
	dlist_init(&state.pending);
	RegisterXactCallback(insert_xact_callback, NULL);
	RegisterSubXactCallback(insert_subxact_callback, NULL);
	state.ready = true;
}

/* rows are placed in the order in which they came, as a rule */
static Pending *
find_pending(NemoTree row_tree, uint64 rowid)
{
	dlist_iter	i;

	if (!state.ready)
		return NULL;
	dlist_foreach(i, &state.pending)
	{
		Pending    *p = dlist_container(Pending, node, i.cur);

		if (p->rowid == rowid && p->row_tree == row_tree)
			return p;
	}
	return NULL;
}

void
nemo_add_pending(NemoRelInfo *info, uint64 rowid, CommandId cid, rb_slice key, const StringInfoData *data)
{
	Pending    *p = MemoryContextAllocHuge(TopTransactionContext, offsetof(Pending, bytes) + key.len + data->len);

	init();
	p->row_tree = info->row_tree;
	p->rowid = rowid;
	p->subid = GetCurrentSubTransactionId();
	p->cid = cid;
	p->key_len = key.len;
	p->data_len = (uint32) data->len;
	memcpy(p->bytes, key.data, key.len);
	memcpy(p->bytes + key.len, data->data, data->len);
	dlist_push_tail(&state.pending, &p->node);
}

bool
nemo_pending_key(NemoTree row_tree, uint64 rowid, StringInfo out)
{
	Pending    *p = find_pending(row_tree, rowid);

	if (p == NULL)
		return false;
	resetStringInfo(out);
	appendBinaryStringInfo(out, (const char *) p->bytes, (int) p->key_len);
	return true;
}

static void
note_fresh(const NemoRelInfo *info, uint64 rowid, bool more)
{
	if (!more || state.fresh_tree != info->tree)
		state.nfresh = 0;
	if (state.nfresh == state.max_fresh)
	{
		state.max_fresh = Max(64, state.max_fresh * 2);
		state.fresh = state.fresh == NULL ? MemoryContextAlloc(TopMemoryContext, state.max_fresh * sizeof(uint64)) :
			repalloc(state.fresh, state.max_fresh * sizeof(uint64));
	}
	state.fresh_tree = info->tree;
	state.fresh[state.nfresh++] = rowid;
	state.next_fresh = 0;
}

bool
nemo_row_is_fresh(const NemoRelInfo *info, uint64 rowid)
{
	if (state.fresh_tree != info->tree)
		return false;
	/* entries come row by row */
	for (int i = state.next_fresh; i < state.nfresh; i++)
		if (state.fresh[i] == rowid)
		{
			state.next_fresh = i;
			return true;
		}
	return false;
}

/* ---- keys of rows -------------------------------------------------------------------------------------------------- */

void
nemo_map_key(const NemoRelInfo *info, uint64 rowid, uint8 *key)
{
	nemo_put_be64(key, info->tree);
	nemo_put_be64(key + RB_TREE_LEN, rowid);
}

void
nemo_primary_key(Relation rel, NemoIndexInfo *pk, TupleTableSlot *slot, StringInfo key)
{
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];
	uint32		prefix;
	bool		null_distinct;

	/* a primary key has plain columns only */
	for (int i = 0; i < pk->ii->ii_NumIndexAttrs; i++)
	{
		AttrNumber	attno = pk->ii->ii_IndexAttrNumbers[i];

		values[i] = slot_getattr(slot, attno, &isnull[i]);
		if (isnull[i] && i < pk->ii->ii_NumIndexKeyAttrs)
			ereport(ERROR,
					(errcode(ERRCODE_NOT_NULL_VIOLATION),
					 errmsg("null value in column \"%s\" of relation \"%s\" violates not-null constraint",
							NameStr(TupleDescAttr(RelationGetDescr(rel), attno - 1)->attname),
							RelationGetRelationName(rel)),
					 errtablecol(rel, attno)));
	}
	resetStringInfo(key);
	nemo_entry_key(pk, values, isnull, (rb_slice) {NULL, 0}, key, &prefix, &null_distinct);
}

/* Form the row of a clustered table that is in the slot, and let it wait for its place. */
static void
form_pending(Relation rel, NemoRelInfo *info, TupleTableSlot *slot, CommandId cid)
{
	uint64		rowid;
	rb_slice	key;
	bool		in_key;

	init();
	nemo_primary_key(rel, nemo_clustered_index(rel, info), slot, &state.key);
	key = nemo_slice(&state.key);
	in_key = nemo_key_is_rowid(info, key, &rowid);
	if (!in_key)
		rowid = nemo_rowid_alloc(info->tree, 1);
	nemo_row_form(rel, slot, !in_key, rowid, &state.data);
	nemo_add_pending(info, rowid, cid, key, &state.data);
	nemo_remember_row(info, rowid, key);
	slot->tts_tableOid = RelationGetRelid(rel);
	nemo_tid_set(&slot->tts_tid, rowid, 0);
}

/* ---- INSERT -------------------------------------------------------------------------------------------------------- */

static void
insert_fresh(Relation rel, NemoRelInfo *info, TupleTableSlot **slots, int nslots, CommandId cid)
{
	NemoChange	changes[FRESH_ROWS];
	uint8		keys[FRESH_ROWS][RB_TREE_LEN + 8];
	int			n = 0;
	int64		bytes = 0;
	uint64		rowid = nemo_rowid_alloc(info->tree, (uint32) nslots);

	for (int i = 0; i < nslots; i++, rowid++)
	{
		TupleTableSlot *slot = slots[i];

		nemo_row_form(rel, slot, false, rowid, &state.data);
		note_fresh(info, rowid, i > 0);
		nemo_map_key(info, rowid, keys[n]);
		changes[n].key = (rb_slice) {keys[n], sizeof(keys[n])};
		changes[n].v = nemo_prepare(sizeof(keys[n]), RB_DATA, 0, cid, LockTupleExclusive, state.data.data,
									(uint32) state.data.len);
		n++;
		bytes += sizeof(keys[0]) + state.data.len;
		slot->tts_tableOid = RelationGetRelid(rel);
		nemo_tid_set(&slot->tts_tid, rowid, 0);
		if (n == FRESH_ROWS || bytes >= FRESH_BYTES || i == nslots - 1)
		{
			nemo_install_fresh(changes, n);
			nemo_count(info->tree, n, bytes);
			n = 0;
			bytes = 0;
		}
	}
}

void
nemo_tuple_insert(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
				  struct BulkInsertStateData *bistate)
{
	NemoRelInfo *info;

	(void) options;
	(void) bistate;
	(void) nemo_thread();
	init();
	info = nemo_rel(rel);
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	if (info->clustered)
		form_pending(rel, info, slot, cid);
	else
		insert_fresh(rel, info, &slot, 1, cid);
	pgstat_count_heap_insert(rel, 1);
}

void
nemo_tuple_insert_speculative(Relation rel, TupleTableSlot *slot, CommandId cid, int options,
							  struct BulkInsertStateData *bistate, uint32 token)
{
	(void) nemo_thread();
	nemo_speculative_begin(nemo_rel(rel), token);
	nemo_tuple_insert(rel, slot, cid, options, bistate);
}

void
nemo_tuple_complete_speculative(Relation rel, TupleTableSlot *slot, uint32 token, bool succeeded)
{
	NemoRelInfo *info = nemo_rel(rel);
	uint64		rowid;
	uint8		tag;
	Pending    *p = NULL;

	(void) token;
	if (nemo_tid_get(&slot->tts_tid, &rowid, &tag))
		p = find_pending(info->row_tree, rowid);
	nemo_speculative_end(succeeded);
	if (succeeded)
		return;
	if (p != NULL)
		forget_pending(p);
	else
		nemo_count(info->tree, -1, 0);
}

static bool
visit_nothing(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) arg;
	(void) i;
	(void) key;
	(void) head;
	return true;
}

/*
 * Place those of the n oldest rows that wait whose keys are known to be free, in one log record for FRESH_ROWS of them.
 * The others wait on, for nemo_place_row() to fetch, to wait for somebody, or to complain.  On return slots[] of those
 * that were placed are right as they are: the tag of a new row is 0.
 */
static void
place_known(NemoRelInfo *info, int n)
{
	rb_thread  *thread = nemo_thread();
	dlist_node *node = dlist_head_node(&state.pending);
	bool		more = false;

	while (n > 0)
	{
		Pending    *rows[FRESH_ROWS];
		rb_version *v[FRESH_ROWS];
		NemoChange	changes[2 * FRESH_ROWS];
		NemoChange	maps[FRESH_ROWS];
		uint8		map_keys[FRESH_ROWS][RB_TREE_LEN + 8];
		bool		placed[FRESH_ROWS];
		int			batch = 0;
		int			nchanges = 0;
		int64		bytes = 0;
		int64		nplaced = 0;

		for (; batch < FRESH_ROWS && batch < n && bytes < FRESH_BYTES; batch++)
		{
			Pending    *p = dlist_container(Pending, node, node);

			rows[batch] = p;
			node = node->next;
			bytes += p->key_len + p->data_len;
			v[batch] = nemo_prepare(p->key_len, RB_DATA, 0, p->cid, LockTupleExclusive, p->bytes + p->key_len,
									p->data_len);
			maps[batch].v = NULL;
			if (nemo_rowid_in_key(info, p->rowid))
				continue;
			nemo_map_key(info, p->rowid, map_keys[batch]);
			maps[batch].key = (rb_slice) {map_keys[batch], sizeof(map_keys[batch])};
			maps[batch].v = nemo_prepare(sizeof(map_keys[batch]), RB_DATA, 0, p->cid, LockTupleExclusive,
										 p->bytes + RB_TREE_LEN, p->key_len - RB_TREE_LEN);
		}

		rb_enter(thread);
		for (int i = 0; i < batch; i++)
		{
			rb_put_args put = {.key = {rows[i]->bytes, rows[i]->key_len}, .v = v[i], .dirty = true};

			/* expects a key that is known and absent */
			placed[i] = rb_put(thread, &put) == RB_OK;
			if (!placed[i])
				continue;
			nemo_installed(v[i]);
			changes[nchanges++] = (NemoChange) {put.key, v[i]};
			if (maps[i].v != NULL)
			{
				nemo_put_fresh(&maps[i]);
				changes[nchanges++] = maps[i];
			}
		}
		if (nchanges > 0)
			nemo_log_changes(changes, nchanges);
		rb_leave(thread);

		bytes = 0;
		for (int i = 0; i < batch; i++)
		{
			if (placed[i])
			{
				note_fresh(info, rows[i]->rowid, more);
				more = true;
				nplaced++;
				bytes += rows[i]->key_len + rows[i]->data_len;
				forget_pending(rows[i]);
				continue;
			}
			nemo_discard(v[i]);
			if (maps[i].v != NULL)
				nemo_discard(maps[i].v);
		}
		nemo_count(info->tree, nplaced, bytes);
		n -= batch;
	}
}

void
nemo_multi_insert(Relation rel, TupleTableSlot **slots, int nslots, CommandId cid, int options,
				  struct BulkInsertStateData *bistate)
{
	NemoRelInfo *info;
	rb_slice   *keys;
	rb_error	err = {0};
	rb_status	status;
	bool		alone;

	(void) options;
	(void) bistate;
	(void) nemo_thread();
	init();
	info = nemo_rel(rel);
	CheckForSerializableConflictIn(rel, NULL, InvalidBlockNumber);
	pgstat_count_heap_insert(rel, nslots);
	if (!info->clustered)
	{
		insert_fresh(rel, info, slots, nslots, cid);
		return;
	}

	/* what is not known about their keys comes in one request, before they are placed */
	alone = dlist_is_empty(&state.pending);
	keys = palloc(nslots * sizeof(rb_slice));
	for (int i = 0; i < nslots; i++)
	{
		Pending    *p;

		form_pending(rel, info, slots[i], cid);
		p = dlist_tail_element(Pending, node, &state.pending);
		keys[i] = (rb_slice) {p->bytes, p->key_len};
	}
	status = rb_read_keys(nemo_thread(), keys, (uint32) nslots, visit_nothing, NULL, &err);
	if (status != RB_OK)
		nemo_raise(status, &err);
	pfree(keys);
	if (alone)
		place_known(info, nslots);
}

void
nemo_unique_violation(Relation index, Datum *values, bool *isnull, Relation rel)
{
	char	   *key = BuildIndexValueDescription(index, values, isnull);

	ereport(ERROR,
			(errcode(ERRCODE_UNIQUE_VIOLATION),
			 errmsg("duplicate key value violates unique constraint \"%s\"", RelationGetRelationName(index)),
			 key != NULL ? errdetail("Key %s already exists.", key) : 0,
			 errtableconstraint(rel, RelationGetRelationName(index))));
}

/*
 * The key is free unless the newest version is a row: a committed one, ours, or one that somebody is about to update
 * without changing keys.  Row locks for foreign keys do not matter to who wants the key itself, hence KEY SHARE.
 */
bool
nemo_place_row(Relation rel, Relation index, Datum *values, bool *isnull, ItemPointer tid, IndexUniqueCheck check)
{
	rb_thread  *thread = nemo_thread();
	NemoRelInfo *info = nemo_rel(rel);
	rb_version *v = NULL;
	uint8		map_key[RB_TREE_LEN + 8];
	NemoChange	map = {{map_key, sizeof(map_key)}, NULL};
	bool		in_key;
	rb_slice	key;
	uint64		rowid;
	uint8		tag;
	Pending    *p;

	if (!nemo_tid_get(tid, &rowid, &tag) || (p = find_pending(info->row_tree, rowid)) == NULL)
		return true;
	key = (rb_slice) {p->bytes, p->key_len};
	in_key = nemo_rowid_in_key(info, rowid);
	nemo_map_key(info, rowid, map_key);

	for (;;)
	{
		const rb_version *head;
		NemoChain	chain;
		bool		placed;

		CHECK_FOR_INTERRUPTS();
		if (v == NULL)
		{
			v = nemo_prepare(key.len, RB_DATA, 0, p->cid, LockTupleExclusive, p->bytes + p->key_len, p->data_len);
			if (!in_key)
				map.v = nemo_prepare(sizeof(map_key), RB_DATA, 0, p->cid, LockTupleExclusive,
									 key.data + RB_TREE_LEN, key.len - RB_TREE_LEN);
		}
		nemo_lookup_enter(key, true, &head);
		nemo_examine(head, LockTupleKeyShare, &chain);

		if (TransactionIdIsValid(chain.wait_xid) || (chain.live != NULL && chain.live->kind == RB_DATA))
		{
			rb_leave(thread);
			nemo_discard(v);
			if (!in_key)
				nemo_discard(map.v);
			v = NULL;
			if (check == UNIQUE_CHECK_PARTIAL)
				return false;
			if (!TransactionIdIsValid(chain.wait_xid))
				nemo_unique_violation(index, values, isnull, rel);
			(void) nemo_wait_for(rel, tid, chain.wait_xid, chain.speculative_token, LockWaitBlock,
								 XLTW_InsertIndex);
			continue;
		}
		/* who holds a ctid of the row that was here must not take this one for it */
		v->tag = chain.live != NULL ? (chain.live->tag + 1) & 15 : 0;
		tag = v->tag;
		if (head == NULL)
			note_fresh(info, rowid, false);
		else
			state.fresh_tree = 0;
		placed = nemo_install_with(key, v, &chain, in_key ? NULL : &map);
		rb_leave(thread);
		if (placed)
			break;
	}
	nemo_tid_set(tid, rowid, tag);
	nemo_count(info->tree, 1, key.len + p->data_len);
	forget_pending(p);
	return true;
}
