/*
 * nemo_log.h
 *	  What nemo_wal.c, nemo_tree.c and nemo_recovery.c share: layout of log records, the tree directory, wake-ups.
 */
#ifndef NEMO_LOG_H
#define NEMO_LOG_H

#include "nemo.h"

#include "access/xlogreader.h"
#include "access/xlogrecord.h"

/* The resource manager's id: the one place to change it.  Log written under another id cannot be replayed. */
#define NEMO_RM_ID				135

#define NEMO_XLOG_CHANGES		0x10	/* NemoWalChange, key, data; repeated to the end of the record */
#define NEMO_XLOG_WITHDRAW		0x20	/* key */
#define NEMO_XLOG_TREE			0x30	/* NemoWalTree */
#define NEMO_XLOG_MARK			0x40	/* nothing: pins a position in the log */

typedef struct NemoWalChange
{
	uint32		data_len;
	uint16		key_len;
	uint8		kind;			/* rb_kind */
	uint8		tag;
} NemoWalChange;

typedef struct NemoWalTree
{
	uint64		tree;
	uint64		row_tree;
	uint64		creator_xid;
	uint64		next_rowid;
	uint32		flags;
	uint32		what;			/* NEMO_LOG_* */
} NemoWalTree;

/* ---- nemo_wal.c ---------------------------------------------------------------------------------------------------- */

/* Take the next change off [*at, end).  false: none is left, or the bytes are malformed (then *at != end). */
extern bool nemo_wal_next(const char **at, const char *end, NemoWalChange *head, rb_slice *key, rb_slice *data);
extern XLogRecPtr nemo_log_mark(void);	/* end of the record */

/* The current transaction wrote to, or locked rows of, nemo relations: it cannot be prepared (D10). */
extern void nemo_touch_xact(void);
extern bool nemo_xact_touched(bool reset);

/* ---- nemo_tree.c: the directory ------------------------------------------------------------------------------------ */

/* What tree 0 keeps of a tree. */
typedef struct NemoTreeRecord
{
	NemoTreeInfo info;
	uint64		next_rowid;		/* none at or above it has been handed out */
	int64		rows;
	int64		bytes;
	uint64		drop_xid;		/* transaction about to commit a drop of it, or 0 */
	bool		dropped;
	uint64		changes;		/* directory's change counter when this was copied; not stored */
} NemoTreeRecord;

extern void nemo_tree_reset(void);		/* empty the directory */
extern void nemo_tree_load(const NemoTreeRecord *record);
extern void nemo_tree_redo(const NemoWalTree *wal);
/* true: the tree is known, and has not been dropped */
extern bool nemo_tree_live(NemoTree tree);
/* Mark as dropped; flush the log up to lsn before anything is removed.  false: no such tree. */
extern bool nemo_tree_mark_dropped(NemoTree tree, XLogRecPtr lsn);
/* palloc'ed copies of the records that differ from what is stored, or (all) of every one */
extern NemoTreeRecord *nemo_tree_copy(bool all, int *n);
extern void nemo_tree_saved(const NemoTreeRecord *records, int n);
extern void nemo_tree_settle(NemoTree tree);	/* its creator committed before every live snapshot */
extern void nemo_tree_keep(NemoTree tree);	/* the drop that was in doubt did not commit */
extern bool nemo_tree_any_dropped(void);
/* palloc'ed: dropped trees, and the log position that must be durable before they are removed */
extern NemoTree *nemo_tree_dropped(int *n, XLogRecPtr *lsn);
extern void nemo_tree_forget(NemoTree tree);

/* ---- nemo_recovery.c ----------------------------------------------------------------------------------------------- */

extern void nemo_wake_checkpointer(void);	/* trees were dropped; never raises */
extern void nemo_wake_flushers(void);
extern void nemo_horizon_refresh(void);
extern void nemo_recovery_startup(void);	/* rm_startup: a base backup carries the state but no slot */

/* ---- nemo_registry.c: tree 0 and the state file -------------------------------------------------------------------- */

typedef struct NemoState
{
	uint32		magic;
	uint32		version;
	uint64		system_id;
	uint64		epoch;			/* of our last successful claim of the store */
	XLogRecPtr	checkpoint;		/* X: everything logged before it is in the store */
	uint32		attempts;		/* claims begun since `epoch` was written */
	uint8		initialised;	/* store and slot exist */
	uint8		clean;			/* written by a shutdown */
	uint8		pad[2];
	pg_crc32c	crc;
} NemoState;

typedef enum NemoStateFile
{
	NEMO_STATE_MISSING,
	NEMO_STATE_OK,
	NEMO_STATE_CORRUPT
} NemoStateFile;

extern NemoStateFile nemo_state_read(NemoState *state);
extern void nemo_state_write(NemoState *state);	/* durable on return; raises */
extern void nemo_registry_load(st_store *store);	/* into the directory; raises */
extern void nemo_registry_write(st_store *store, const NemoTreeRecord *records, int n);
extern void nemo_registry_delete(st_store *store, const NemoTree *trees, int n);

#endif							/* NEMO_LOG_H */
