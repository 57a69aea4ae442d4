/*
 * nemo_replay.h
 *	  Replay of the log into the record buffer: what nemo_recovery.c asks of nemo_replay.c.
 */
#ifndef NEMO_REPLAY_H
#define NEMO_REPLAY_H

#include "nemo_log.h"

/*
 * Read the log from `from` up to `to` (both record boundaries; reading may go a little further).  changes: apply changes
 * and tree records; otherwise only drops are followed.  note() is told the position now and then, and may raise; returns
 * where reading ended.  Raises.
 */
extern XLogRecPtr nemo_replay(XLogRecPtr from, XLogRecPtr to, bool changes, void (*note) (XLogRecPtr at));
/* did the (sub)transaction commit; aborted, crashed and never seen ones did not */
extern bool nemo_full_xid_committed(uint64 full);
/* after replay: trees whose creator never committed, or whose database is gone, are marked as dropped */
extern void nemo_drop_orphans(bool crashed);
/* remove dropped trees from the buffer, the store and the registry; raises */
extern void nemo_remove_dropped(void);

#endif							/* NEMO_REPLAY_H */
