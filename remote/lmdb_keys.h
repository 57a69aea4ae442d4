/*
 * lmdb_keys.h
 *	  Keys and ranges of the LMDB store; see lmdb_keys.c.
 */
#ifndef NEMO_LMDB_KEYS_H
#define NEMO_LMDB_KEYS_H

#include <lmdb.h>

#include "driver.h"

#define LMDB_MAX_KEY ((size_t) 4096)	/* longest key, bytes */
#define LMDB_BRANCH_KEY "branch"	/* in `meta`: last branch id given out */

typedef struct lmdb_databases
{
	MDB_dbi		data;			/* keys of up to 510 bytes, and markers */
	MDB_dbi		longs;			/* what of longer keys does not fit there */
	MDB_dbi		meta;			/* the store's own records */
} lmdb_databases;

typedef struct lmdb_range
{
	st_slice	start;
	st_slice	end;			/* len 0 = no upper bound */
	uint32_t	limit;
	size_t		max_bytes;
	bool		reverse;
	bool		keys_only;		/* records get empty values */
} lmdb_range;

extern st_status lmdb_fail(st_error *err, int rc, const char *doing);
extern st_status lmdb_fail_corrupt(st_error *err, const char *what);

/* *value points into the map, until the transaction ends.  MDB_NOTFOUND leaves it alone. */
extern int	lmdb_find(const lmdb_databases *dbs, MDB_txn *txn, st_slice key, st_slice *value);
extern int	lmdb_put(const lmdb_databases *dbs, MDB_txn *txn, st_slice key, st_slice value);
/* An absent key is no error. */
extern int	lmdb_delete(const lmdb_databases *dbs, MDB_txn *txn, st_slice key);

/* Add the records of a range to result.  `cursor` is over `data` in txn. */
extern st_status lmdb_scan(const lmdb_databases *dbs, MDB_txn *txn, MDB_cursor *cursor, const lmdb_range *range,
						   st_result *result, bool *complete, st_error *err);

#endif							/* NEMO_LMDB_KEYS_H */
