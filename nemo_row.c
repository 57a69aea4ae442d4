/*
 * nemo_row.c
 *	  Row format: how a row of a slot becomes the data of a version, and back.
 *
 *	flags (1 byte) [rowid, 8 bytes big-endian] natts (2 bytes big-endian) [null bitmap] values
 *
 * The values are laid out as in a heap tuple, from a MAXALIGN boundary on, so reading a row is one copy.  Values are
 * never kept elsewhere: external ones are brought in, and long ones compressed as TOAST would.  There is no version
 * number in here: the store's format version (tree 0) covers it.
 */
#include "nemo.h"

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/toast_compression.h"
#include "access/toast_internals.h"
#include "catalog/pg_type.h"
#include "utils/memutils.h"

#include "nemo_index.h"

#define ROW_ROWID		0x01	/* the rowid follows */
#define ROW_NULLS		0x02	/* there is a null bitmap */
#define ROW_VARWIDTH	0x04	/* HEAP_HASVARWIDTH */
#define ROW_ALL			0x07

#define COMPRESS_ABOVE	2048	/* bytes of one value */
#define ROW_LIMIT		(RB_MAX_VALUE - 1024)	/* bytes of one row; the slack is for the version list around it */

/* Bring in and compress what is worth it.  The new value is in CurrentMemoryContext. */
static Datum
pack_value(Form_pg_attribute att, Datum value)
{
	struct varlena *v = (struct varlena *) DatumGetPointer(value);

	if (VARATT_IS_EXTERNAL(v))
		v = detoast_external_attr(v);
	if (VARSIZE_ANY(v) > COMPRESS_ABOVE && !VARATT_IS_COMPRESSED(v) && !VARATT_IS_SHORT(v) &&
		(att->attstorage == TYPSTORAGE_EXTENDED || att->attstorage == TYPSTORAGE_MAIN))
	{
		Datum		packed = toast_compress_datum(PointerGetDatum(v), att->attcompression);

		if (DatumGetPointer(packed) != NULL)
			return packed;
	}
	return PointerGetDatum(v);
}

static void
raise_too_long(Relation rel, Size len)
{
	ereport(ERROR,
			(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
			 errmsg("row of %zu bytes is too long for nemo table \"%s\"", len, RelationGetRelationName(rel)),
			 errdetail("A row may have %d bytes after compression.", (int) ROW_LIMIT),
			 errhint("Split large values over several rows.")));
}

/* Appends to out, which is reset first.  Scratch memory is left in CurrentMemoryContext. */
void
nemo_row_form(Relation rel, TupleTableSlot *slot, bool with_rowid, uint64 rowid, StringInfo out)
{
	TupleDesc	desc = RelationGetDescr(rel);
	int			natts = desc->natts;
	Datum		values[MaxTupleAttributeNumber];
	bool		isnull[MaxTupleAttributeNumber];
	bool		hasnull = false;
	uint16		infomask = 0;
	Size		header;
	Size		start;
	Size		len;
	uint8	   *p;

	slot_getallattrs(slot);
	for (int i = 0; i < natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		isnull[i] = slot->tts_isnull[i] || att->attisdropped;
		hasnull |= isnull[i];
		values[i] = slot->tts_values[i];
		if (!isnull[i] && att->attlen == -1 &&
			(VARATT_IS_EXTERNAL(DatumGetPointer(values[i])) ||
			 VARSIZE_ANY(DatumGetPointer(values[i])) > COMPRESS_ABOVE))
			values[i] = pack_value(att, values[i]);
	}

	len = heap_compute_data_size(desc, values, isnull);
	if (len > ROW_LIMIT)
		raise_too_long(rel, len);
	header = 1 + (with_rowid ? 8 : 0) + 2 + (hasnull ? BITMAPLEN(natts) : 0);

	/* heap_fill_tuple() aligns by address: build the values where it likes them, then close the gap to the header */
	resetStringInfo(out);
	start = MAXALIGN(header);
	enlargeStringInfo(out, (int) (start + len + MAXIMUM_ALIGNOF));
	p = (uint8 *) out->data;
	Assert(MAXALIGN((uintptr_t) p) == (uintptr_t) p);
	memset(p, 0, start + len);
	heap_fill_tuple(desc, values, isnull, (char *) p + start, len, &infomask,
					hasnull ? (bits8 *) p + (header - BITMAPLEN(natts)) : NULL);
	if (start > header)
		memmove(p + header, p + start, len);

	*p++ = (uint8) ((with_rowid ? ROW_ROWID : 0) | (hasnull ? ROW_NULLS : 0) |
					((infomask & HEAP_HASVARWIDTH) ? ROW_VARWIDTH : 0));
	if (with_rowid)
	{
		nemo_put_be64(p, rowid);
		p += 8;
	}
	*p++ = (uint8) (natts >> 8);
	*p++ = (uint8) natts;
	out->len = (int) (header + len);
	out->data[out->len] = '\0';
}

bool
nemo_row_rowid(const uint8 *data, uint32 len, uint64 *rowid)
{
	if (len < 9 || !(data[0] & ROW_ROWID))
		return false;
	*rowid = nemo_get_be64(data + 1);
	return true;
}

static void
raise_malformed(Relation rel)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("malformed row in nemo table \"%s\"", RelationGetRelationName(rel)),
			 errhint("Check that the store holds the data of this server.")));
}

HeapTuple
nemo_row_tuple(Relation rel, const uint8 *data, uint32 len, uint64 rowid, uint8 tag, uint64 xid)
{
	const uint8 *p = data;
	const uint8 *end = data + len;
	uint8		flags;
	int			natts;
	Size		nullsize;
	Size		hoff;
	HeapTuple	tuple;
	HeapTupleHeader td;

	if (len < 3 || ((flags = *p++) & ~ROW_ALL) != 0 || ((flags & ROW_ROWID) && len < 11))
		raise_malformed(rel);
	if (flags & ROW_ROWID)
		p += 8;
	natts = p[0] << 8 | p[1];
	p += 2;
	nullsize = (flags & ROW_NULLS) ? BITMAPLEN(natts) : 0;
	if (natts > MaxTupleAttributeNumber || (Size) (end - p) < nullsize)
		raise_malformed(rel);
	hoff = MAXALIGN(SizeofHeapTupleHeader + nullsize);
	len = (uint32) (end - p - nullsize);

	tuple = palloc(HEAPTUPLESIZE + hoff + len);
	tuple->t_len = (uint32) (hoff + len);
	tuple->t_tableOid = RelationGetRelid(rel);
	nemo_tid_set(&tuple->t_self, rowid, tag);
	tuple->t_data = td = (HeapTupleHeader) ((char *) tuple + HEAPTUPLESIZE);
	memset(td, 0, SizeofHeapTupleHeader);
	td->t_hoff = (uint8) hoff;
	td->t_infomask = HEAP_XMAX_INVALID | ((flags & ROW_NULLS) ? HEAP_HASNULL : 0) |
		((flags & ROW_VARWIDTH) ? HEAP_HASVARWIDTH : 0);
	HeapTupleHeaderSetNatts(td, natts);
	HeapTupleHeaderSetXmin(td, xid == 0 ? FrozenTransactionId : (TransactionId) xid);
	td->t_ctid = tuple->t_self;
	memcpy(td->t_bits, p, nullsize);
	memcpy((char *) td + hoff, p + nullsize, len);
	return tuple;
}
