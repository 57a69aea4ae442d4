/*
 * nemo_wal.c
 *	  The resource manager: logical log records of changes and of trees.
 *
 * Records say what happened to a key, never how the buffer looks (paper section 6).  PostgreSQL's own redo does nothing
 * with them: the checkpointer reads them again from Nemo's own checkpoint on (nemo_recovery.c), after the server is up.
 * Each record carries the id of the (sub)transaction that wrote it in its header; that id alone decides at replay.
 */
#include "nemo_log.h"

#include "access/rmgr.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "access/xloginsert.h"
#include "miscadmin.h"

/* changes per record: two pieces of data each must stay below XLR_NORMAL_RDATAS (20), so nothing is allocated */
#define CHANGES_PER_RECORD 8

static char heads[CHANGES_PER_RECORD * (sizeof(NemoWalChange) + RB_MAX_KEY)];
static bool preloaded = false;
static bool touched = false;

void
nemo_touch_xact(void)
{
	touched = true;
}

bool
nemo_xact_touched(bool reset)
{
	bool		was = touched;

	if (reset)
		touched = false;
	return was;
}

/* ---- writing ------------------------------------------------------------------------------------------------------- */

/*
 * Versions are already installed: from here on a failure would leave them pending for ever, so nothing that can fail
 * stands between (F5).  Several records are as good as one: the transaction's commit makes them one change (E6).
 */
void
nemo_log_changes(const NemoChange *changes, int n)
{
	nemo_touch_xact();
	START_CRIT_SECTION();
	for (int first = 0; first < n; first += CHANGES_PER_RECORD)
	{
		int			last = Min(n, first + CHANGES_PER_RECORD);
		char	   *at = heads;
		XLogRecPtr	lsn;

		XLogBeginInsert();
		for (int i = first; i < last; i++)
		{
			const NemoChange *change = &changes[i];
			NemoWalChange head;

			Assert(change->key.len >= RB_TREE_LEN && change->key.len <= RB_MAX_KEY);
			Assert(rb_x(change->v) != NULL &&
				   (TransactionId) rb_x(change->v)->xid == GetCurrentTransactionIdIfAny());
			head.data_len = change->v->len;
			head.key_len = (uint16) change->key.len;
			head.kind = change->v->kind;
			head.tag = change->v->tag;
			memcpy(at, &head, sizeof(head));
			memcpy(at + sizeof(head), change->key.data, change->key.len);
			XLogRegisterData(at, sizeof(head) + change->key.len);
			at += sizeof(head) + change->key.len;
			if (head.data_len > 0)
				XLogRegisterData((char *) rb_data(change->v), head.data_len);
		}
		lsn = XLogInsert(NEMO_RM_ID, NEMO_XLOG_CHANGES);
		for (int i = first; i < last; i++)
			rb_stamp(nemo_thread(), changes[i].v, lsn);
	}
	END_CRIT_SECTION();
}

XLogRecPtr
nemo_log_withdraw(rb_slice key)
{
	XLogRecPtr	lsn;

	nemo_touch_xact();
	START_CRIT_SECTION();
	XLogBeginInsert();
	XLogRegisterData((char *) key.data, key.len);
	lsn = XLogInsert(NEMO_RM_ID, NEMO_XLOG_WITHDRAW);
	END_CRIT_SECTION();
	return lsn;
}

XLogRecPtr
nemo_log_tree(int what, const NemoTreeInfo *info, uint64 next_rowid)
{
	NemoWalTree wal = {0};
	XLogRecPtr	lsn;

	if (!preloaded)
		(void) nemo_buffer();	/* raises: XLogInsert itself would take a record that nobody can replay */
	nemo_touch_xact();
	wal.tree = info->tree;
	wal.row_tree = info->row_tree;
	wal.creator_xid = info->creator_xid;
	wal.next_rowid = next_rowid;
	wal.flags = info->flags;
	wal.what = (uint32) what;

	START_CRIT_SECTION();
	XLogBeginInsert();
	XLogRegisterData((char *) &wal, sizeof(wal));
	lsn = XLogInsert(NEMO_RM_ID, NEMO_XLOG_TREE);
	END_CRIT_SECTION();
	return lsn;
}

XLogRecPtr
nemo_log_mark(void)
{
	uint64		nothing = 0;

	XLogBeginInsert();
	XLogSetRecordFlags(XLOG_MARK_UNIMPORTANT);
	XLogRegisterData((char *) &nothing, sizeof(nothing));
	return XLogInsert(NEMO_RM_ID, NEMO_XLOG_MARK);
}

/* ---- reading ------------------------------------------------------------------------------------------------------- */

bool
nemo_wal_next(const char **at, const char *end, NemoWalChange *head, rb_slice *key, rb_slice *data)
{
	const char *p = *at;
	size_t		left = (size_t) (end - p);

	if (left < sizeof(*head))
		return false;
	memcpy(head, p, sizeof(*head));
	p += sizeof(*head);
	left -= sizeof(*head);
	if (head->key_len < RB_TREE_LEN || head->key_len > RB_MAX_KEY || left < head->key_len)
		return false;
	key->data = (const uint8 *) p;
	key->len = head->key_len;
	p += head->key_len;
	left -= head->key_len;
	if (left < head->data_len)
		return false;
	data->data = (const uint8 *) p;
	data->len = head->data_len;
	*at = p + head->data_len;
	return true;
}

static uint64
tree_in_key(const uint8 *key)
{
	uint64		tree = 0;

	for (int i = 0; i < RB_TREE_LEN; i++)
		tree = tree << 8 | key[i];
	return tree;
}

static void
desc_tree(StringInfo buf, uint64 tree)
{
	appendStringInfo(buf, "tree %u/%u", (uint32) (tree >> 32), (uint32) tree);
}

/* ---- the resource manager ------------------------------------------------------------------------------------------ */

static void
wal_redo(XLogReaderState *record)
{
	/* the checkpointer replays from its own checkpoint, which may be older than the server's */
	(void) record;
}

static void
wal_desc(StringInfo buf, XLogReaderState *record)
{
	const char *at = XLogRecGetData(record);
	const char *end = at + XLogRecGetDataLen(record);

	switch (XLogRecGetInfo(record) & ~XLR_INFO_MASK)
	{
		case NEMO_XLOG_CHANGES:
			{
				NemoWalChange head;
				rb_slice	key;
				rb_slice	data;
				const char *separator = "";

				while (nemo_wal_next(&at, end, &head, &key, &data))
				{
					appendStringInfo(buf, "%s%s ", separator, head.kind == RB_DELETE ? "delete" : "put");
					desc_tree(buf, tree_in_key(key.data));
					appendStringInfo(buf, ", key %u bytes, data %u bytes, tag %u", key.len - RB_TREE_LEN, data.len,
									 head.tag);
					separator = "; ";
				}
				break;
			}
		case NEMO_XLOG_WITHDRAW:
			if (end - at >= RB_TREE_LEN)
			{
				desc_tree(buf, tree_in_key((const uint8 *) at));
				appendStringInfo(buf, ", key %u bytes", (uint32) (end - at) - RB_TREE_LEN);
			}
			break;
		case NEMO_XLOG_TREE:
			if (end - at == sizeof(NemoWalTree))
			{
				static const char *const names[] = {"?", "create", "placement", "rowids"};
				NemoWalTree wal;

				memcpy(&wal, at, sizeof(wal));
				appendStringInfo(buf, "%s ", names[wal.what <= NEMO_LOG_ROWID ? wal.what : 0]);
				desc_tree(buf, wal.tree);
				appendStringInfoString(buf, ", rows in ");
				desc_tree(buf, wal.row_tree);
				appendStringInfo(buf, ", flags 0x%04X, next rowid " UINT64_FORMAT, wal.flags, wal.next_rowid);
			}
			break;
		default:
			break;
	}
}

static const char *
wal_identify(uint8 info)
{
	switch (info & ~XLR_INFO_MASK)
	{
		case NEMO_XLOG_CHANGES:
			return "CHANGES";
		case NEMO_XLOG_WITHDRAW:
			return "WITHDRAW";
		case NEMO_XLOG_TREE:
			return "TREE";
		case NEMO_XLOG_MARK:
			return "MARK";
		default:
			return NULL;
	}
}

static const RmgrData wal_rmgr = {
	.rm_name = "nemo",
	.rm_redo = wal_redo,
	.rm_desc = wal_desc,
	.rm_identify = wal_identify,
	.rm_startup = nemo_recovery_startup,
};

void
nemo_wal_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
	RegisterCustomRmgr(NEMO_RM_ID, (RmgrData *) &wal_rmgr);
	preloaded = true;
}
