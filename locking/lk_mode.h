/*
 * lk_mode.h
 *	  Row lock modes and which of them conflict.
 *
 * The four modes are PostgreSQL's, in the order of its LockTupleMode, so that a mode is the same number in both worlds
 * and a larger one is a stronger one.  locking/README.md says where locks are kept and who waits for whom.
 */
#ifndef NEMO_LK_MODE_H
#define NEMO_LK_MODE_H

#include <stdbool.h>

typedef enum lk_mode
{
	LK_KEY_SHARE = 0,			/* FOR KEY SHARE, foreign keys */
	LK_SHARE = 1,				/* FOR SHARE */
	LK_NO_KEY_EXCLUSIVE = 2,	/* FOR NO KEY UPDATE, UPDATE that leaves the keys alone */
	LK_EXCLUSIVE = 3			/* FOR UPDATE, DELETE, UPDATE of a key, INSERT */
} lk_mode;

#define LK_MODES 4

/* May two different transactions not hold these on one row at the same time?  Modes out of range conflict with all. */
extern bool lk_conflict(lk_mode held, lk_mode wanted);

extern const char *lk_mode_name(lk_mode mode);

#endif							/* NEMO_LK_MODE_H */
