/*
 * fakestore.h
 *	  A store for tests: remote/store.h's functions over a private sorted map that fails, delays, truncates and forgets
 *	  as seeded, and that watches what the buffer sends.
 *
 * One fs_store is the map; every thread opens an st_store of its own on it.  Thread-safe.  Hooks and observers run in
 * the requesting thread with no lock of the fake held.
 */
#ifndef NEMO_RB_FAKESTORE_H
#define NEMO_RB_FAKESTORE_H

#include "../../remote/store.h"

typedef struct fs_store fs_store;

/* Chances per thousand requests; delays are uniform up to the maximum. */
typedef struct fs_faults
{
	uint32_t	fail_get, fail_range;
	uint32_t	fail_write;		/* nothing happened */
	uint32_t	partial;		/* some operations acknowledged, the others did not happen */
	uint32_t	ambiguous;		/* some acknowledged; each of the others has landed, will land, or never will */
	uint32_t	fail_resolve, fail_sync, fail_delete_range;
	uint32_t	truncate;		/* a range answers with fewer records than it could */
	uint32_t	max_delay_us;
} fs_faults;

typedef enum fs_point
{
	FS_BEFORE,					/* the request is on its way: the store has not seen it */
	FS_AFTER					/* the store has done it: the answer is on its way */
} fs_point;

typedef void (*fs_hook) (void *arg, fs_point point, st_opcode op);
typedef void (*fs_observer) (void *arg, const st_op *ops, uint32_t nops);

extern fs_store *fs_create(uint64_t seed);
extern void fs_destroy(fs_store *fs);
extern st_store *fs_open(fs_store *fs);		/* closed by st_close */
extern void fs_set_faults(fs_store *fs, const fs_faults *faults);	/* NULL = none */
/* hook: at both points of every get, range and write; observe: at the start of every write */
extern void fs_set_hook(fs_store *fs, fs_hook hook, fs_observer observe, void *arg);

/* The next `count` requests of this kind fail with status; ambiguous writes stay in flight until landed or resolved. */
extern void fs_fail_next(fs_store *fs, st_opcode op, uint32_t count, st_status status, bool ambiguous);
/* Of the next write of several operations only the first n are acknowledged. */
extern void fs_partial_next(fs_store *fs, uint32_t n);
/* Ranges answer with at most n records whatever the limit; 0 = off. */
extern void fs_set_page(fs_store *fs, uint32_t n);
/* Every write in flight after an ambiguous failure lands now. */
extern void fs_land(fs_store *fs);
extern uint32_t fs_in_flight(fs_store *fs);

/* Behind the buffer's back: never counted, delayed or failed. */
extern void fs_poke(fs_store *fs, const void *key, size_t klen, const void *val, size_t vlen);
extern void fs_remove(fs_store *fs, const void *key, size_t klen);
/* a malloc'ed copy, or NULL = absent */
extern uint8_t *fs_peek(fs_store *fs, const void *key, size_t klen, size_t *vlen);
/* calls visit for each record in order, with the map locked */
extern void fs_each(fs_store *fs, void (*visit) (void *arg, const st_record *rec), void *arg);
extern uint32_t fs_count(fs_store *fs);

/* What was written since the last good st_sync is lost, key by key with chance half; nothing stays in flight. */
extern void fs_crash(fs_store *fs);

extern uint64_t fs_requests(fs_store *fs, st_opcode op);
/* Keys written while an earlier write of theirs was outstanding (INVARIANTS C4); names the first in *words. */
extern uint64_t fs_violations(fs_store *fs, const char **words);

#endif							/* NEMO_RB_FAKESTORE_H */
