/*
 * nemo_stat.h
 *	  What the views and maintenance functions (nemo_stat.c, nemo_verify.c) share, and take from nemo.c.
 */
#ifndef NEMO_STAT_H
#define NEMO_STAT_H

#include "remote/store.h"
#include "utils/rel.h"

extern st_stats *nemo_store_stats(void);	/* shared counters of every process's requests */
extern void nemo_store_options(st_options *options);	/* what every process opens the store with */
/* a nemo table that the user owns; raises for anything else */
extern Relation nemo_open_table(Oid relid, LOCKMODE lockmode);

#endif							/* NEMO_STAT_H */
