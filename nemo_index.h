/*
 * nemo_index.h
 *	  What the files of the index access method share: the form of an entry, and the callbacks of the handler.
 *
 * Secondary index: one versioned record per (key, row).
 *	key   = <tree: 8 bytes> <encoded key columns> [row key suffix]
 *	value = <rowid: 8 bytes, big-endian> <n: 2 bytes> <row key suffix: n bytes> <extra columns>
 * The row key suffix is the row's key in the row tree without its 8 tree bytes.  It ends the entry's key unless the
 * key columns alone are unique: an immediate unique index, and no column null where nulls are distinct.  In the value
 * it is left out (n = 0) where the rowid tells it.  Extra columns are INCLUDE columns and key columns that cannot be
 * decoded from the key, each as datumSerialize() writes it.  No key is a proper prefix of another key of its tree.
 *
 * The clustered index has no entries: its tree holds the rows (nemo_row.c), and all of its columns are in them.
 */
#ifndef NEMO_INDEX_H
#define NEMO_INDEX_H

#include "nemo.h"

#include "nodes/tidbitmap.h"

#define ENTRY_ROWID_LEN		8
#define ENTRY_HEADER_LEN	(ENTRY_ROWID_LEN + 2)

/* the value of an entry, taken apart; slices point into it */
typedef struct NemoEntryValue
{
	uint64		rowid;
	rb_slice	suffix;			/* len 0: by rowid */
	rb_slice	extra;
} NemoEntryValue;

/* big-endian numbers in keys and values */
static inline void
nemo_put_be64(uint8 *p, uint64 v)
{
	for (int i = 8; i-- > 0; v >>= 8)
		p[i] = (uint8) v;
}

static inline uint64
nemo_get_be64(const uint8 *p)
{
	uint64		v = 0;

	for (int i = 0; i < 8; i++)
		v = v << 8 | p[i];
	return v;
}

static inline int
nemo_slice_compare(rb_slice a, rb_slice b)
{
	int			c = memcmp(a.data, b.data, Min(a.len, b.len));

	return c != 0 ? c : (a.len > b.len) - (a.len < b.len);
}

/* can the row key be had from the rowid without I/O? */
static inline bool
nemo_key_from_rowid(const NemoRelInfo *info, uint64 rowid)
{
	return !info->clustered || (info->intkey && rowid < NEMO_ROWID_FIRST);
}

/* nemo_index.c */

/* the facts of an index, from the table's if it is among them, else made in cxt (an index that is not ready yet) */
extern NemoIndexInfo *nemo_index_describe(NemoRelInfo *info, Relation index, MemoryContext cxt);

/*
 * Key of the entry for a row.  *prefix: bytes of tree and columns; *null_distinct: a null column makes it unlike any
 * other key.  Raises 54000 when too long.
 */
extern void nemo_entry_key(const NemoIndexInfo *ix, const Datum *values, const bool *isnull, rb_slice row_key,
						   StringInfo key, uint32 *prefix, bool *null_distinct);
extern void nemo_entry_value(const NemoRelInfo *info, const NemoIndexInfo *ix, TupleDesc desc, const Datum *values,
							 const bool *isnull, uint64 rowid, rb_slice row_key, StringInfo value);
/* raises XX001 */
extern void nemo_entry_parse(const uint8 *data, uint32 len, NemoEntryValue *out);
/* all columns of the index from an entry; by-reference values in CurrentMemoryContext */
extern void nemo_entry_columns(const NemoIndexInfo *ix, TupleDesc desc, rb_slice key, rb_slice extra,
							   Datum *values, bool *isnull);
/* newest data version that is not aborted, under a delete or not; NULL = none.  Inside the guard. */
extern const rb_version *nemo_entry_any(const rb_version *head);
/*
 * Smallest byte string above everything that begins with s, in place.  The first 8 bytes never overflow: tree numbers
 * are below 2^64 - 1.
 */
extern void nemo_key_successor(StringInfo s);
extern void nemo_check_index_layout(Relation index, const NemoRelInfo *info, NemoTreeInfo *tree);

/* nemo_index_build.c */
extern struct IndexBuildResult *nemo_index_build(Relation heap, Relation index, struct IndexInfo *ii);
extern void nemo_index_build_empty(Relation index);

/* nemo_index_scan.c */
extern IndexScanDesc nemo_index_begin_scan(Relation index, int nkeys, int norderbys);
extern void nemo_index_rescan(IndexScanDesc scan, ScanKey keys, int nkeys, ScanKey orderbys, int norderbys);
extern bool nemo_index_get_tuple(IndexScanDesc scan, ScanDirection dir);
extern int64 nemo_index_get_bitmap(IndexScanDesc scan, TIDBitmap *tbm);
extern void nemo_index_end_scan(IndexScanDesc scan);
extern void nemo_index_mark(IndexScanDesc scan);
extern void nemo_index_restore(IndexScanDesc scan);

#endif							/* NEMO_INDEX_H */
