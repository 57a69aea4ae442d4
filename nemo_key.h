/*
 * nemo_key.h
 *	  Order-preserving encodings of index keys: memcmp of two encoded keys is the index's own comparison.
 *
 * What every encoding keeps, for the values a and b of one column:
 *	- a sorts before b in the index (operator class, collation, ASC/DESC, NULLS FIRST/LAST) <=> bytes(a) < bytes(b),
 *	  unless the column is not "ordered" (see nemo_key_ordered);
 *	- a equals b by the operator class <=> bytes(a) = bytes(b), always;
 *	- no encoding is a proper prefix of another one, so concatenated columns compare column by column, and the bytes
 *	  of the leading columns are an exact bound for all keys that share them.
 *
 * The first byte of a column is 0x00 for a null that sorts first and 0xFF for one that sorts last; no other value
 * starts with either.  A DESC column is the complement of its ascending form, nulls excepted.  nemo_key.c lists the
 * forms by type.
 */
#ifndef NEMO_KEY_H
#define NEMO_KEY_H

#include "postgres.h"

#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/rel.h"

/* bytes, the whole key including the 8 bytes of its tree; the caller checks */
#define NEMO_MAX_KEY 2048

/* How the key columns of one index are encoded.  Immutable, and holds no pointer into the relcache. */
typedef struct NemoKeyDesc NemoKeyDesc;

/*
 * Built from an open index relation, in one allocation in the given context.  Raises 0A000 naming the type (or the
 * operator class's comparison function) when a key column has no encoding.  Reads catalogs.
 */
extern NemoKeyDesc *nemo_key_desc(Relation index, MemoryContext cxt);

extern int	nemo_key_natts(const NemoKeyDesc *d);

/*
 * Append the encoding of one key column (0-based).  Detoasts; scratch memory is left in CurrentMemoryContext.  Enum
 * columns read a catalog.  Does not limit the length.
 */
extern void nemo_key_encode(const NemoKeyDesc *d, int col, Datum value, bool isnull, StringInfo out);

/*
 * The same for a value that a scan key compares with: "subtype" is its sk_subtype (InvalidOid: the column's type).
 * True: appended bytes stand in the same relation to every key as the value does to the indexed value.  False: there
 * are no such bytes, nothing was appended, and the caller has to do without this bound and recheck.
 */
extern bool nemo_key_encode_as(const NemoKeyDesc *d, int col, Oid subtype, Datum value, StringInfo out);

/* false: only equality means anything (collation of the C library other than C and POSIX) */
extern bool nemo_key_ordered(const NemoKeyDesc *d, int col);

/* true: the bytes give back the very value, so that an index-only scan needs nothing else */
extern bool nemo_key_decodable(const NemoKeyDesc *d, int col);

/*
 * Decode the column at *p, or step over it when value is NULL, and advance *p.  By-reference results are allocated in
 * CurrentMemoryContext.  Raises XX001 on bytes that no encoding produces, and never reads at or after end.  A value
 * (not a null, not a step) may only be asked of a decodable column.
 */
extern void nemo_key_decode(const NemoKeyDesc *d, int col, const uint8 **p, const uint8 *end,
							Datum *value, bool *isnull);

/* Is the key one ascending column of type int2, int4 or int8?  Then its values, nulls excepted, as an int64: */
extern bool nemo_key_is_integer(const NemoKeyDesc *d);
extern int64 nemo_key_integer(const NemoKeyDesc *d, Datum value);

/*
 * Would ALTER TYPE ... ADD VALUE new BEFORE/AFTER neighbour renumber the labels of an enum type?  Then the stored keys
 * of that type stop agreeing with the catalog, and indexes on it have to be refused or rebuilt.
 */
extern bool nemo_key_enum_renumbers(Oid enumtype, const char *neighbour, bool after);

/* SQL: nemo_key(value anyelement, descending bool, nulls_first bool) returns bytea */
extern PGDLLEXPORT Datum nemo_key_sql(PG_FUNCTION_ARGS);
/* SQL, for tests: nemo_key_value(key bytea, of anyelement, descending bool, nulls_first bool) returns anyelement */
extern PGDLLEXPORT Datum nemo_key_value_sql(PG_FUNCTION_ARGS);

#endif							/* NEMO_KEY_H */
