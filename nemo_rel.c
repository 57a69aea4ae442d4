/*
 * nemo_rel.c
 *	  Per-relation facts, cached in this process, and the way from a rowid to the row's key.
 *
 * Facts are built from the relcache and the tree directory, and marked stale by relcache invalidations of the table or
 * of any of its indexes.  Stale ones keep their memory until the end of the transaction, as callers hold on to them.
 * A rowid names one key for ever (an UPDATE that changes the key gives the row a new rowid), so what is remembered about
 * rows needs no invalidation; whoever uses it checks the rowid of what it finds there.
 */
#include "nemo_table.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/bitmapset.h"
#include "optimizer/optimizer.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/relcache.h"

#include "nemo_ddl.h"
#include "nemo_index.h"

#define RECENT_ROWS		2048	/* power of two; more than COPY inserts at once */
#define BUILD_ATTEMPTS	10

typedef struct RelEntry
{
	Oid			relid;			/* hash key */
	bool		valid;
	NemoRelInfo *info;
	MemoryContext cxt;			/* of info */
	EState	   *estate;			/* for index expressions, in TopTransactionContext; or NULL */
} RelEntry;

typedef struct RecentRow
{
	NemoTree	row_tree;
	uint64		rowid;
	uint16		len;
	uint16		room;
	uint8	   *suffix;			/* in TopMemoryContext */
} RecentRow;

static struct
{
	HTAB	   *rels;
	uint64		invalidations;
	RelEntry   *last;			/* most callers ask for the same one again */
	List	   *outdated;		/* of MemoryContext, in TopMemoryContext */
	bool		any_estate;
	RecentRow  *recent;
}			state;

/* ---- invalidation -------------------------------------------------------------------------------------------------- */

static bool
concerns(const RelEntry *entry, Oid relid)
{
	if (!OidIsValid(relid) || entry->relid == relid)
		return true;
	for (int i = 0; i < entry->info->nindexes; i++)
		if (entry->info->indexes[i].oid == relid)
			return true;
	return false;
}

/* may be called at any time, also outside of transactions: only marks */
static void
invalidate(Datum arg, Oid relid)
{
	HASH_SEQ_STATUS scan;
	RelEntry   *entry;

	(void) arg;
	state.invalidations++;
	hash_seq_init(&scan, state.rels);
	while ((entry = hash_seq_search(&scan)) != NULL)
		if (entry->valid && concerns(entry, relid))
			entry->valid = false;
}

/* expression states are only good for the (sub)transaction that made them, which may have failed inside of one */
static void
drop_estates(void)
{
	HASH_SEQ_STATUS scan;
	RelEntry   *entry;

	if (!state.any_estate)
		return;
	hash_seq_init(&scan, state.rels);
	while ((entry = hash_seq_search(&scan)) != NULL)
	{
		if (entry->estate == NULL)
			continue;
		entry->estate = NULL;
		for (int i = 0; i < entry->info->nindexes; i++)
		{
			entry->info->indexes[i].ii->ii_ExpressionsState = NIL;
			entry->info->indexes[i].ii->ii_PredicateState = NULL;
		}
	}
	state.any_estate = false;
}

static void
rel_xact_callback(XactEvent event, void *arg)
{
	ListCell   *lc;

	(void) arg;
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE &&
		event != XACT_EVENT_PARALLEL_COMMIT && event != XACT_EVENT_PARALLEL_ABORT)
		return;
	drop_estates();
	foreach(lc, state.outdated)
		MemoryContextDelete(lfirst(lc));
	list_free(state.outdated);
	state.outdated = NIL;
}

static void
rel_subxact_callback(SubXactEvent event, SubTransactionId my, SubTransactionId parent, void *arg)
{
	(void) my;
	(void) parent;
	(void) arg;
	if (event == SUBXACT_EVENT_ABORT_SUB)
		drop_estates();
}

static void
init(void)
{
	HASHCTL		ctl = {0};

	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(RelEntry);
	ctl.hcxt = TopMemoryContext;
	state.recent = MemoryContextAllocZero(TopMemoryContext, RECENT_ROWS * sizeof(RecentRow));
	state.rels = hash_create("nemo relations", 64, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	CacheRegisterRelcacheCallback(invalidate, (Datum) 0);
	RegisterXactCallback(rel_xact_callback, NULL);
	RegisterSubXactCallback(rel_subxact_callback, NULL);
	nemo_mvcc_init();
}

/* ---- building ------------------------------------------------------------------------------------------------------ */

static void
describe_index(NemoIndexInfo *ix, Relation index, const NemoRelInfo *info, MemoryContext cxt)
{
	Bitmapset  *attrs = NULL;

	ix->oid = RelationGetRelid(index);
	ix->tree = nemo_tree_of(index);
	ix->clustered = info->clustered && ix->tree == info->row_tree;
	ix->unique = index->rd_index->indisunique && index->rd_index->indimmediate;
	ix->desc = nemo_key_desc(index, cxt);
	ix->ii = BuildIndexInfo(index);
	ix->plain = ix->ii->ii_Expressions == NIL && ix->ii->ii_Predicate == NIL;
	for (int i = 0; i < ix->ii->ii_NumIndexAttrs; i++)
		if (ix->ii->ii_IndexAttrNumbers[i] != 0)
			attrs = bms_add_member(attrs, ix->ii->ii_IndexAttrNumbers[i] - FirstLowInvalidHeapAttributeNumber);
	pull_varattnos((Node *) ix->ii->ii_Expressions, 1, &attrs);
	pull_varattnos((Node *) ix->ii->ii_Predicate, 1, &attrs);
	ix->attrs = attrs;
}

static void
watch_columns(NemoRelInfo *info, Relation rel)
{
	Bitmapset  *all = NULL;
	Bitmapset  *keys = RelationGetIndexAttrBitmap(rel, INDEX_ATTR_BITMAP_KEY);
	int			bit = -1;

	for (int i = 0; i < info->nindexes; i++)
		all = bms_add_members(all, info->indexes[i].attrs);
	all = bms_add_members(all, keys);
	info->watched = palloc(sizeof(AttrNumber) * (bms_num_members(all) + 1));
	info->watched_key = palloc(sizeof(bool) * (bms_num_members(all) + 1));
	while ((bit = bms_next_member(all, bit)) >= 0)
	{
		AttrNumber	attno = (AttrNumber) (bit + FirstLowInvalidHeapAttributeNumber);

		if (attno <= 0)
		{
			info->watch_all = true;
			continue;
		}
		info->watched[info->nwatched] = attno;
		info->watched_key[info->nwatched++] = bms_is_member(bit, keys);
	}
}

/* in CurrentMemoryContext, which is cxt */
static NemoRelInfo *
build(Relation rel, MemoryContext cxt)
{
	NemoRelInfo *info = palloc0(sizeof(NemoRelInfo));
	List	   *oids = RelationGetIndexList(rel);
	NemoTreeInfo tree;
	ListCell   *lc;

	info->relid = RelationGetRelid(rel);
	info->tree = nemo_tree_of(rel);
	if (!nemo_tree_get(info->tree, &tree))
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("nemo does not know the storage of table \"%s\"", RelationGetRelationName(rel)),
				 errhint("The table was not created by this cluster's nemo; restore it from a backup.")));
	info->row_tree = tree.row_tree;
	info->clustered = tree.row_tree != tree.tree;
	info->intkey = info->clustered && (tree.flags & NEMO_TREE_INTKEY);

	info->indexes = palloc0(sizeof(NemoIndexInfo) * (list_length(oids) + 1));
	foreach(lc, oids)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		if (index->rd_index->indisready && nemo_relation_is_nemo_index(index))
		{
			NemoIndexInfo *ix = &info->indexes[info->nindexes++];

			describe_index(ix, index, info, cxt);
			if (ix->clustered && ix != info->indexes)
			{
				NemoIndexInfo first = info->indexes[0];

				info->indexes[0] = *ix;
				*ix = first;
			}
		}
		index_close(index, AccessShareLock);
	}
	watch_columns(info, rel);
	return info;
}

static void
retire(RelEntry *entry)
{
	MemoryContext old;

	if (entry->cxt == NULL)
		return;
	old = MemoryContextSwitchTo(TopMemoryContext);
	state.outdated = lappend(state.outdated, entry->cxt);
	MemoryContextSwitchTo(old);
	entry->cxt = NULL;
	entry->info = NULL;
	entry->estate = NULL;
}

static NemoRelInfo *
rebuild(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	MemoryContext cxt = NULL;
	NemoRelInfo *info = NULL;
	RelEntry   *entry;
	bool		current = false;
	bool		found;

	/* catalogs may change while they are read; whatever locks the caller holds, the last result is as good as any */
	for (int attempt = 0; !current && attempt < BUILD_ATTEMPTS; attempt++)
	{
		uint64		invalidations = state.invalidations;
		MemoryContext old;

		if (cxt != NULL)
			MemoryContextDelete(cxt);
		cxt = AllocSetContextCreate(CurrentMemoryContext, "nemo relation", ALLOCSET_SMALL_SIZES);
		old = MemoryContextSwitchTo(cxt);
		info = build(rel, cxt);
		MemoryContextSwitchTo(old);
		current = invalidations == state.invalidations;
	}

	entry = hash_search(state.rels, &relid, HASH_ENTER, &found);
	if (!found)
	{
		entry->cxt = NULL;
		entry->info = NULL;
		entry->estate = NULL;
		entry->valid = false;
	}
	retire(entry);
	MemoryContextSetParent(cxt, CacheMemoryContext);
	entry->cxt = cxt;
	entry->info = info;
	entry->valid = current;
	state.last = entry;
	return info;
}

NemoRelInfo *
nemo_rel(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	RelEntry   *entry = state.last;

	if (likely(entry != NULL && entry->relid == relid && entry->valid && entry->info->tree == nemo_tree_of(rel)))
		return entry->info;
	if (unlikely(state.rels == NULL))
		init();
	entry = hash_search(state.rels, &relid, HASH_FIND, NULL);
	if (entry != NULL && entry->valid && entry->info->tree == nemo_tree_of(rel))
	{
		state.last = entry;
		return entry->info;
	}
	return rebuild(rel);
}

/* ---- indexes ------------------------------------------------------------------------------------------------------- */

NemoIndexInfo *
nemo_clustered_index(Relation rel, NemoRelInfo *info)
{
	if (info->nindexes == 0 || !info->indexes[0].clustered)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the primary key that held the rows of nemo table \"%s\" is gone",
						RelationGetRelationName(rel)),
				 errhint("VACUUM FULL moves the rows.")));
	return &info->indexes[0];
}

EState *
nemo_index_estate(NemoRelInfo *info)
{
	RelEntry   *entry = hash_search(state.rels, &info->relid, HASH_FIND, NULL);
	MemoryContext old;

	if (entry != NULL && entry->info == info && entry->estate != NULL)
		return entry->estate;
	old = MemoryContextSwitchTo(TopTransactionContext);
	for (int i = 0; i < info->nindexes; i++)
	{
		info->indexes[i].ii->ii_ExpressionsState = NIL;
		info->indexes[i].ii->ii_PredicateState = NULL;
	}
	/* facts that are outdated already live no longer than the transaction, nor does this */
	if (entry == NULL || entry->info != info)
	{
		EState	   *estate = CreateExecutorState();

		MemoryContextSwitchTo(old);
		return estate;
	}
	entry->estate = CreateExecutorState();
	state.any_estate = true;
	MemoryContextSwitchTo(old);
	return entry->estate;
}

bool
nemo_index_wants(NemoIndexInfo *ix, TupleTableSlot *slot, EState *estate)
{
	ExprContext *econtext;

	if (ix->ii->ii_Predicate == NIL)
		return true;
	if (ix->ii->ii_PredicateState == NULL)
		ix->ii->ii_PredicateState = ExecPrepareQual(ix->ii->ii_Predicate, estate);
	econtext = GetPerTupleExprContext(estate);
	econtext->ecxt_scantuple = slot;
	return ExecQual(ix->ii->ii_PredicateState, econtext);
}

/* ---- row keys ------------------------------------------------------------------------------------------------------ */

void
nemo_rowid_key(NemoTree tree, uint64 rowid, StringInfo out)
{
	uint8		key[RB_TREE_LEN + 8];

	nemo_put_be64(key, tree);
	nemo_put_be64(key + RB_TREE_LEN, rowid);
	resetStringInfo(out);
	appendBinaryStringInfo(out, (char *) key, sizeof(key));
}

/* An integer key as nemo_key.c writes it: 0x80 + n and the n significant bytes. */
static void
integer_key(NemoTree row_tree, uint64 value, StringInfo out)
{
	uint8		key[RB_TREE_LEN + 9];
	int			n = 0;

	nemo_put_be64(key, row_tree);
	for (uint64 v = value; v != 0; v >>= 8)
		n++;
	key[RB_TREE_LEN] = (uint8) (0x80 + n);
	for (int i = 0; i < n; i++)
		key[RB_TREE_LEN + 1 + i] = (uint8) (value >> (8 * (n - 1 - i)));
	resetStringInfo(out);
	appendBinaryStringInfo(out, (char *) key, RB_TREE_LEN + 1 + n);
}

static bool
integer_of_key(rb_slice key, uint64 *value)
{
	int			n;

	if (key.len < RB_TREE_LEN + 1)
		return false;
	n = key.data[RB_TREE_LEN] - 0x80;
	if (n < 0 || n > 8 || key.len != (uint32) (RB_TREE_LEN + 1 + n))
		return false;
	*value = 0;
	for (int i = 0; i < n; i++)
		*value = *value << 8 | key.data[RB_TREE_LEN + 1 + i];
	return true;
}

bool
nemo_key_is_rowid(const NemoRelInfo *info, rb_slice row_key, uint64 *rowid)
{
	return info->intkey && integer_of_key(row_key, rowid) && *rowid < NEMO_ROWID_FIRST;
}

static inline RecentRow *
recent_slot(uint64 rowid)
{
	return &state.recent[rowid & (RECENT_ROWS - 1)];
}

void
nemo_remember_row(NemoRelInfo *info, uint64 rowid, rb_slice row_key)
{
	RecentRow  *row;
	uint32		len = row_key.len - RB_TREE_LEN;

	if (nemo_rowid_in_key(info, rowid))
		return;
	row = recent_slot(rowid);
	if (row->rowid == rowid && row->row_tree == info->row_tree)
		return;
	row->rowid = 0;				/* in case that allocating fails */
	if (row->room < len)
	{
		uint16		room = (uint16) Max(len, 32);

		if (row->suffix != NULL)
			pfree(row->suffix);
		row->suffix = NULL;
		row->room = 0;
		row->suffix = MemoryContextAlloc(TopMemoryContext, room);
		row->room = room;
	}
	memcpy(row->suffix, row_key.data + RB_TREE_LEN, len);
	row->len = (uint16) len;
	row->row_tree = info->row_tree;
	row->rowid = rowid;
}

static void
put_row_key(NemoTree row_tree, const uint8 *suffix, uint32 len, StringInfo out)
{
	uint8		tree[RB_TREE_LEN];

	nemo_put_be64(tree, row_tree);
	resetStringInfo(out);
	appendBinaryStringInfo(out, (char *) tree, RB_TREE_LEN);
	appendBinaryStringInfo(out, (const char *) suffix, (int) len);
}

typedef struct MapArg
{
	NemoTree	row_tree;
	StringInfo	out;
	bool		found;
} MapArg;

/* any version will do: what a rowid maps to never changes */
static void
look_map(void *arg, const rb_version *head)
{
	MapArg	   *a = arg;

	for (const rb_version *v = head; v != NULL; v = rb_older(v))
		if (v->kind == RB_DATA)
		{
			put_row_key(a->row_tree, rb_data(v), v->len, a->out);
			a->found = true;
			return;
		}
}

bool
nemo_row_key(NemoRelInfo *info, uint64 rowid, Snapshot snapshot, StringInfo out)
{
	const RecentRow *row;
	uint8		key[RB_TREE_LEN + 8];
	MapArg		arg = {info->row_tree, out, false};

	(void) snapshot;
	if (!info->clustered)
	{
		nemo_rowid_key(info->tree, rowid, out);
		return true;
	}
	if (nemo_rowid_in_key(info, rowid))
	{
		integer_key(info->row_tree, rowid, out);
		return true;
	}
	row = recent_slot(rowid);
	if (row->rowid == rowid && row->row_tree == info->row_tree)
	{
		put_row_key(info->row_tree, row->suffix, row->len, out);
		return true;
	}
	if (nemo_pending_key(info->row_tree, rowid, out))
		return true;
	nemo_put_be64(key, info->tree);
	nemo_put_be64(key + RB_TREE_LEN, rowid);
	nemo_look((rb_slice) {key, sizeof(key)}, look_map, &arg);
	if (arg.found)
		nemo_remember_row(info, rowid, nemo_slice(out));
	return arg.found;
}

uint64
nemo_rowid_of(NemoRelInfo *info, rb_slice row_key, const uint8 *data, uint32 len)
{
	uint64		rowid;

	if (nemo_row_rowid(data, len, &rowid))
		return rowid;
	if (!info->clustered)
	{
		if (row_key.len == RB_TREE_LEN + 8)
			return nemo_get_be64(row_key.data + RB_TREE_LEN);
	}
	else if (info->intkey && integer_of_key(row_key, &rowid))
		return rowid;
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("row without a row number in a nemo table"),
			 errhint("Check that the store holds the data of this server.")));
	return 0;
}
