/*
 * nemo_key.c
 *	  Order-preserving encodings of index keys (nemo_key.h has the contract): the description of an index's key, the
 *	  forms of fixed-width types, and the entry points.  nemo_keytypes.c has the types of variable width.
 *
 * A type is one row of a table: the comparison function that the operator class must have, and how to write and read
 * the form that sorts as that function does.  The function, not the name of the operator class, decides; what is not
 * in the table is refused.
 *
 * Forms, ascending.  "tag" is the first byte; it is never 0x00 or 0xFF, also not when complemented for DESC:
 *
 *	signed integer		tag 0x80 + n for v >= 0, 0x7F - n for v < 0; then the n low bytes of v, big-endian, where n is
 *						the least that holds v (for v < 0, holds ~v).  int2/int4/int8, date, time, timestamp(tz), money
 *	unsigned integer	tag 0x80 + n, then n bytes.  oid, xid8, pg_lsn
 *	bool				tag 0x80 or 0x81
 *	float4, float8		tag 0x80; 8 bytes of the double, sign bit flipped, or all bits when negative; NaN is 0xFF...
 *	timetz				signed integer: microseconds in UTC; 4 bytes: zone
 *	interval			signed integer: days (a month has 30); 5 bytes: microseconds of the day
 *	enum				tag 0x80; 4 bytes: the label's sort order, as a float; 4 bytes: its oid
 *	"char", uuid, macaddr, macaddr8, tid	tag 0x80; the bytes, big-endian
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/nbtree.h"
#include "access/transam.h"
#include "catalog/index.h"
#include "catalog/pg_am.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_type.h"
#include "commands/defrem.h"
#include "storage/itemptr.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/date.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/pg_lsn.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
#include "utils/xid8.h"

#include "nemo_key.h"
#include "nemo_keytypes.h"

#include <math.h>

#define KEY_NULL_FIRST	0x00
#define KEY_NULL_LAST	0xFF

struct NemoKeyDesc
{
	int			natts;
	KeyColumn	cols[FLEXIBLE_ARRAY_MEMBER];
};

/* ---- reading ----------------------------------------------------------------------------------------------------- */

void
key_malformed(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("malformed key in a nemo index"),
			 errhint("REINDEX the index, and check that the store holds the data of this server.")));
}

/* n bytes, complemented back when the column is DESC */
void
key_read(KeyReader *r, void *dst, size_t n)
{
	uint8	   *d = dst;

	if ((size_t) (r->end - r->p) < n)
		key_malformed();
	for (size_t i = 0; i < n; i++)
		d[i] = r->p[i] ^ r->flip;
	r->p += n;
}

uint8
key_read_byte(KeyReader *r)
{
	uint8		b;

	key_read(r, &b, 1);
	return b;
}

/* n (at most 8) bytes as a big-endian number */
uint64
key_read_fixed(KeyReader *r, int n)
{
	uint8		b[8];
	uint64		v = 0;

	key_read(r, b, n);
	for (int i = 0; i < n; i++)
		v = v << 8 | b[i];
	return v;
}

void
key_read_tag(KeyReader *r)
{
	if (key_read_byte(r) != KEY_TAG)
		key_malformed();
}

/* ---- integers ---------------------------------------------------------------------------------------------------- */

/* the n (at most 8) low bytes of v, big-endian */
void
key_put_fixed(StringInfo out, uint64 v, int n)
{
	uint8		b[8];

	for (int i = n; i-- > 0; v >>= 8)
		b[i] = (uint8) v;
	appendBinaryStringInfo(out, (char *) b, n);
}

static int
significant_bytes(uint64 v)
{
	int			n = 0;

	for (; v != 0; v >>= 8)
		n++;
	return n;
}

void
key_put_unsigned(StringInfo out, uint64 v)
{
	int			n = significant_bytes(v);

	appendStringInfoCharMacro(out, (char) (KEY_TAG + n));
	key_put_fixed(out, v, n);
}

/* a longer number is a larger one, and the tag says the length; for negative ones the other way round */
void
key_put_signed(StringInfo out, int64 v)
{
	if (v >= 0)
		key_put_unsigned(out, (uint64) v);
	else
	{
		int			n = significant_bytes(~(uint64) v);

		appendStringInfoCharMacro(out, (char) (KEY_TAG - 1 - n));
		key_put_fixed(out, (uint64) v, n);
	}
}

uint64
key_get_unsigned(KeyReader *r, uint64 max)
{
	int			n = key_read_byte(r) - KEY_TAG;
	uint64		v;

	if (n < 0 || n > 8)
		key_malformed();
	v = key_read_fixed(r, n);
	if (significant_bytes(v) != n || v > max)
		key_malformed();
	return v;
}

int64
key_get_signed(KeyReader *r, int64 min, int64 max)
{
	uint8		tag = key_read_byte(r);
	bool		negative = tag < KEY_TAG;
	int			n = negative ? KEY_TAG - 1 - tag : tag - KEY_TAG;
	uint64		u;
	int64		v;

	if (n > 8)
		key_malformed();
	u = key_read_fixed(r, n);
	if (negative)
		u = ~u & (n == 8 ? PG_UINT64_MAX : (UINT64CONST(1) << (8 * n)) - 1);
	if (significant_bytes(u) != n || u > PG_INT64_MAX)
		key_malformed();
	v = negative ? ~(int64) u : (int64) u;
	if (v < min || v > max)
		key_malformed();
	return v;
}

static void
put_int2(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	key_put_signed(out, DatumGetInt16(value));
}

static Datum
get_int2(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	return Int16GetDatum((int16) key_get_signed(r, PG_INT16_MIN, PG_INT16_MAX));
}

static void
put_int4(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	key_put_signed(out, DatumGetInt32(value));
}

static Datum
get_int4(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	return Int32GetDatum((int32) key_get_signed(r, PG_INT32_MIN, PG_INT32_MAX));
}

static void
put_int8(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	key_put_signed(out, DatumGetInt64(value));
}

static Datum
get_int8(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	int64		v = key_get_signed(r, PG_INT64_MIN, PG_INT64_MAX);

	return want ? Int64GetDatum(v) : (Datum) 0;
}

static void
put_oid(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	key_put_unsigned(out, DatumGetObjectId(value));
}

static Datum
get_oid(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	return ObjectIdGetDatum((Oid) key_get_unsigned(r, PG_UINT32_MAX));
}

static void
put_uint8(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	key_put_unsigned(out, DatumGetUInt64(value));
}

static Datum
get_uint8(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	uint64		v = key_get_unsigned(r, PG_UINT64_MAX);

	return want ? UInt64GetDatum(v) : (Datum) 0;
}

/* ---- other types of fixed width ---------------------------------------------------------------------------------- */

static void
put_bool(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	appendStringInfoCharMacro(out, (char) (KEY_TAG + (DatumGetBool(value) ? 1 : 0)));
}

static Datum
get_bool(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	int			v = key_read_byte(r) - KEY_TAG;

	if (v != 0 && v != 1)
		key_malformed();
	return BoolGetDatum(v == 1);
}

static void
put_char(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	appendStringInfoCharMacro(out, (char) KEY_TAG);
	appendStringInfoCharMacro(out, DatumGetChar(value));
}

static Datum
get_char(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	key_read_tag(r);
	return CharGetDatum((char) key_read_byte(r));
}

/* bits of an IEEE number, so that unsigned order is numeric order */
static uint64
sortable_double(double v)
{
	uint64		bits;

	if (isnan(v))
		return PG_UINT64_MAX;
	if (v == 0)
		v = 0;					/* drops the sign of -0 */
	memcpy(&bits, &v, sizeof(bits));
	return (bits & UINT64CONST(0x8000000000000000)) ? ~bits : bits | UINT64CONST(0x8000000000000000);
}

static void
put_float(double v, StringInfo out)
{
	appendStringInfoCharMacro(out, (char) KEY_TAG);
	key_put_fixed(out, sortable_double(v), 8);
}

/* a float4 is widened, so that both types share one form */
static void
put_float4(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	put_float(DatumGetFloat4(value), out);
}

static void
put_float8(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	put_float(DatumGetFloat8(value), out);
}

/* the sign of -0 and the bits of a NaN are lost: step over it only */
static Datum
get_float(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	key_read_tag(r);
	(void) key_read_fixed(r, 8);
	return (Datum) 0;
}

static void
put_timetz(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	TimeTzADT  *t = DatumGetTimeTzADTP(value);

	key_put_signed(out, t->time + t->zone * USECS_PER_SEC);
	key_put_fixed(out, (uint32) t->zone ^ 0x80000000, 4);
}

static Datum
get_timetz(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	/* zone is less than 16 hours; these bounds only keep the arithmetic from overflowing */
	int64		utc = key_get_signed(r, -PG_INT32_MAX * USECS_PER_SEC, PG_INT32_MAX * USECS_PER_SEC);
	int32		zone = (int32) ((uint32) key_read_fixed(r, 4) ^ 0x80000000);
	TimeTzADT  *t;

	if (!want)
		return (Datum) 0;
	t = palloc(sizeof(TimeTzADT));
	t->time = utc - zone * USECS_PER_SEC;
	t->zone = zone;
	return TimeTzADTPGetDatum(t);
}

static void
put_interval(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	Interval   *i = DatumGetIntervalP(value);
	int64		days = i->month * INT64CONST(30) + i->day + i->time / USECS_PER_DAY;
	int64		rest = i->time % USECS_PER_DAY;

	if (rest < 0)
	{
		rest += USECS_PER_DAY;
		days--;
	}
	key_put_signed(out, days);
	key_put_fixed(out, (uint64) rest, 5);
}

/* equal intervals have many spellings: step over it only */
static Datum
get_interval(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	(void) key_get_signed(r, PG_INT64_MIN, PG_INT64_MAX);
	if (key_read_fixed(r, 5) >= USECS_PER_DAY)
		key_malformed();
	return (Datum) 0;
}

/*
 * The position of a label among the others is a float that ADD VALUE chooses between two neighbours and that stays, as
 * long as the type is not renumbered (nemo_key_enum_renumbers).  The oid makes the form decodable.
 */
static void
put_enum(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	Oid			oid = DatumGetObjectId(value);
	HeapTuple	tup = SearchSysCache1(ENUMOID, ObjectIdGetDatum(oid));
	float4		order;
	uint32		bits;

	if (!HeapTupleIsValid(tup))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_BINARY_REPRESENTATION),
				 errmsg("invalid internal value for enum: %u", oid)));
	order = ((Form_pg_enum) GETSTRUCT(tup))->enumsortorder;
	ReleaseSysCache(tup);

	if (order == 0)
		order = 0;				/* drops the sign of -0 */
	memcpy(&bits, &order, sizeof(bits));
	bits = (bits & 0x80000000) ? ~bits : bits | 0x80000000;
	appendStringInfoCharMacro(out, (char) KEY_TAG);
	key_put_fixed(out, bits, 4);
	key_put_fixed(out, oid, 4);
}

static Datum
get_enum(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	key_read_tag(r);
	(void) key_read_fixed(r, 4);
	return ObjectIdGetDatum((Oid) key_read_fixed(r, 4));
}

/* uuid, macaddr and macaddr8 compare as their bytes in memory; c->type->width of them */
static void
put_bytes(const KeyColumn *c, Datum value, StringInfo out)
{
	appendStringInfoCharMacro(out, (char) KEY_TAG);
	appendBinaryStringInfo(out, DatumGetPointer(value), c->type->width);
}

static Datum
get_bytes(const KeyColumn *c, KeyReader *r, bool want)
{
	uint8		buf[UUID_LEN];
	void	   *result;

	Assert(c->type->width <= UUID_LEN);
	key_read_tag(r);
	key_read(r, buf, c->type->width);
	if (!want)
		return (Datum) 0;
	result = palloc(c->type->width);
	memcpy(result, buf, c->type->width);
	return PointerGetDatum(result);
}

static void
put_tid(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	ItemPointer tid = (ItemPointer) DatumGetPointer(value);

	appendStringInfoCharMacro(out, (char) KEY_TAG);
	key_put_fixed(out, ItemPointerGetBlockNumberNoCheck(tid), 4);
	key_put_fixed(out, ItemPointerGetOffsetNumberNoCheck(tid), 2);
}

static Datum
get_tid(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	BlockNumber block;
	OffsetNumber offset;
	ItemPointer tid;

	key_read_tag(r);
	block = (BlockNumber) key_read_fixed(r, 4);
	offset = (OffsetNumber) key_read_fixed(r, 2);
	if (!want)
		return (Datum) 0;
	tid = palloc(sizeof(ItemPointerData));
	ItemPointerSet(tid, block, offset);
	return PointerGetDatum(tid);
}

/* ---- the table of types ------------------------------------------------------------------------------------------ */

/*
 * KEY_LOSSY: never decodable.  KEY_COLLATED: order, and whether it is decodable, depend on the collation.  KEY_INTEGER:
 * eligible for nemo_key_is_integer.
 */
static const KeyType key_types[] = {
	{BOOLOID, F_BTBOOLCMP, put_bool, get_bool, 0, 0},
	{CHAROID, F_BTCHARCMP, put_char, get_char, 0, 0},
	{INT2OID, F_BTINT2CMP, put_int2, get_int2, 0, KEY_INTEGER},
	{INT4OID, F_BTINT4CMP, put_int4, get_int4, 0, KEY_INTEGER},
	{INT8OID, F_BTINT8CMP, put_int8, get_int8, 0, KEY_INTEGER},
	{FLOAT4OID, F_BTFLOAT4CMP, put_float4, get_float, 0, KEY_LOSSY},
	{FLOAT8OID, F_BTFLOAT8CMP, put_float8, get_float, 0, KEY_LOSSY},
	{NUMERICOID, F_NUMERIC_CMP, key_put_numeric, key_get_numeric, 0, KEY_LOSSY},
	{CASHOID, F_CASH_CMP, put_int8, get_int8, 0, 0},
	{DATEOID, F_DATE_CMP, put_int4, get_int4, 0, 0},
	{TIMEOID, F_TIME_CMP, put_int8, get_int8, 0, 0},
	{TIMETZOID, F_TIMETZ_CMP, put_timetz, get_timetz, 0, 0},
	{TIMESTAMPOID, F_TIMESTAMP_CMP, put_int8, get_int8, 0, 0},
	{TIMESTAMPTZOID, F_TIMESTAMPTZ_CMP, put_int8, get_int8, 0, 0},
	{INTERVALOID, F_INTERVAL_CMP, put_interval, get_interval, 0, KEY_LOSSY},
	{UUIDOID, F_UUID_CMP, put_bytes, get_bytes, UUID_LEN, 0},
	{BYTEAOID, F_BYTEACMP, key_put_bytea, key_get_bytea, 0, 0},
	{TEXTOID, F_BTTEXTCMP, key_put_text, key_get_text, 0, KEY_COLLATED},
	{TEXTOID, F_BTTEXT_PATTERN_CMP, key_put_text, key_get_text, 0, 0},
	{BPCHAROID, F_BPCHARCMP, key_put_bpchar, key_get_bpchar, 0, KEY_COLLATED | KEY_LOSSY},
	{BPCHAROID, F_BTBPCHAR_PATTERN_CMP, key_put_bpchar, key_get_bpchar, 0, KEY_LOSSY},
	{NAMEOID, F_BTNAMECMP, key_put_name, key_get_name, 0, KEY_COLLATED},
	{OIDOID, F_BTOIDCMP, put_oid, get_oid, 0, 0},
	{OIDVECTOROID, F_BTOIDVECTORCMP, key_put_oidvector, key_get_oidvector, 0, 0},
	{XID8OID, F_XID8CMP, put_uint8, get_uint8, 0, 0},
	{PG_LSNOID, F_PG_LSN_CMP, put_uint8, get_uint8, 0, 0},
	{TIDOID, F_BTTIDCMP, put_tid, get_tid, 0, 0},
	{INETOID, F_NETWORK_CMP, key_put_inet, key_get_inet, 0, 0},
	{MACADDROID, F_MACADDR_CMP, put_bytes, get_bytes, 6, 0},
	{MACADDR8OID, F_MACADDR8_CMP, put_bytes, get_bytes, 8, 0},
	{BITOID, F_BITCMP, key_put_bit, key_get_bit, 0, 0},
	{VARBITOID, F_VARBITCMP, key_put_bit, key_get_bit, 0, 0},
	{ANYENUMOID, F_ENUM_CMP, put_enum, get_enum, 0, 0},
};

/* ---- descriptions ------------------------------------------------------------------------------------------------ */

static void
describe_column(KeyColumn *c, Oid coltype, Oid opfamily, Oid opcintype, Oid collation, int16 indoption)
{
	Oid			cmp = get_opfamily_proc(opfamily, opcintype, opcintype, BTORDER_PROC);
	bool		known_type = false;

	memset(c, 0, sizeof(*c));
	for (size_t i = 0; i < lengthof(key_types); i++)
	{
		if (key_types[i].opcintype != opcintype)
			continue;
		known_type = true;
		if (key_types[i].cmp == cmp)
			c->type = &key_types[i];
	}
	if (c->type == NULL && known_type)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" does not support this operator class for type %s", "nemo_index",
						format_type_be(coltype)),
				 OidIsValid(cmp) ?
				 errdetail("The order of function %s has no key encoding.", format_procedure(cmp)) :
				 errdetail("The operator class has no comparison function of a btree operator class."),
				 errhint("Use the default operator class of the type.")));
	if (c->type == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("access method \"%s\" does not support key columns of type %s", "nemo_index",
						format_type_be(coltype)),
				 errdetail("There is no order-preserving key encoding for this type."),
				 errhint("Index an expression of a supported type, or list the column under INCLUDE.")));

	c->desc = (indoption & INDOPTION_DESC) != 0;
	c->nulls_first = (indoption & INDOPTION_NULLS_FIRST) != 0;
	c->ordered = true;
	c->decodable = (c->type->flags & KEY_LOSSY) == 0;
	if (c->type->flags & KEY_COLLATED)
		key_describe_collation(c, collation);
}

NemoKeyDesc *
nemo_key_desc(Relation index, MemoryContext cxt)
{
	int			natts = IndexRelationGetNumberOfKeyAttributes(index);
	NemoKeyDesc *d = MemoryContextAlloc(cxt, offsetof(NemoKeyDesc, cols) + natts * sizeof(KeyColumn));

	d->natts = natts;
	for (int i = 0; i < natts; i++)
		describe_column(&d->cols[i], TupleDescAttr(RelationGetDescr(index), i)->atttypid,
						index->rd_opfamily[i], index->rd_opcintype[i],
						index->rd_indcollation[i], index->rd_indoption[i]);
	return d;
}

int
nemo_key_natts(const NemoKeyDesc *d)
{
	return d->natts;
}

static inline const KeyColumn *
key_column(const NemoKeyDesc *d, int col)
{
	Assert(col >= 0 && col < d->natts);
	return &d->cols[col];
}

bool
nemo_key_ordered(const NemoKeyDesc *d, int col)
{
	return key_column(d, col)->ordered;
}

bool
nemo_key_decodable(const NemoKeyDesc *d, int col)
{
	return key_column(d, col)->decodable;
}

bool
nemo_key_is_integer(const NemoKeyDesc *d)
{
	return d->natts == 1 && (d->cols[0].type->flags & KEY_INTEGER) != 0 && !d->cols[0].desc;
}

int64
nemo_key_integer(const NemoKeyDesc *d, Datum value)
{
	switch (d->cols[0].type->opcintype)
	{
		case INT2OID:
			return DatumGetInt16(value);
		case INT4OID:
			return DatumGetInt32(value);
		case INT8OID:
			return DatumGetInt64(value);
		default:
			elog(ERROR, "the key is not an integer");
			return 0;
	}
}

/* ---- encoding ---------------------------------------------------------------------------------------------------- */

static void
put_value(const KeyColumn *c, const KeyType *form, Datum value, StringInfo out)
{
	int			start = out->len;

	form->put(c, value, out);
	if (c->desc)
		for (int i = start; i < out->len; i++)
			out->data[i] = ~out->data[i];
}

void
nemo_key_encode(const NemoKeyDesc *d, int col, Datum value, bool isnull, StringInfo out)
{
	const KeyColumn *c = key_column(d, col);

	if (isnull)
		appendStringInfoCharMacro(out, (char) (c->nulls_first ? KEY_NULL_FIRST : KEY_NULL_LAST));
	else
		put_value(c, c->type, value, out);
}

/* the form of another type, by the function that orders it by default */
static const KeyType *
form_of(Oid type)
{
	for (size_t i = 0; i < lengthof(key_types); i++)
		if (key_types[i].opcintype == type)
			return &key_types[i];
	return NULL;
}

/*
 * Where core compares a date with a timestamp, or either with a timestamptz, it converts the one to the other's type.
 * The conversion of the scan key is used when it is exact; the other direction, which would convert each indexed value,
 * only from a timestamp at midnight to a date.
 */
static bool
convert_datetime(Oid from, Oid to, Datum value, Datum *result)
{
	int			overflow = 0;

	if (from == DATEOID && to == TIMESTAMPOID)
		*result = TimestampGetDatum(date2timestamp_opt_overflow(DatumGetDateADT(value), &overflow));
	else if (from == DATEOID && to == TIMESTAMPTZOID)
		*result = TimestampTzGetDatum(date2timestamptz_opt_overflow(DatumGetDateADT(value), &overflow));
	else if (from == TIMESTAMPOID && to == TIMESTAMPTZOID)
		*result = TimestampTzGetDatum(timestamp2timestamptz_opt_overflow(DatumGetTimestamp(value), &overflow));
	else if (from == TIMESTAMPOID && to == DATEOID)
	{
		Timestamp	t = DatumGetTimestamp(value);

		if (TIMESTAMP_IS_NOBEGIN(t))
			*result = DateADTGetDatum(DATEVAL_NOBEGIN);
		else if (TIMESTAMP_IS_NOEND(t))
			*result = DateADTGetDatum(DATEVAL_NOEND);
		else if (t % USECS_PER_DAY == 0)
			*result = DateADTGetDatum((DateADT) (t / USECS_PER_DAY));
		else
			return false;
	}
	else
		return false;
	return overflow == 0;
}

bool
nemo_key_encode_as(const NemoKeyDesc *d, int col, Oid subtype, Datum value, StringInfo out)
{
	const KeyColumn *c = key_column(d, col);
	Oid			own = c->type->opcintype;

	if (!OidIsValid(subtype) || subtype == own)
	{
		put_value(c, c->type, value, out);
		return true;
	}
	switch (own)
	{
		case INT2OID:
		case INT4OID:
		case INT8OID:
			if (subtype != INT2OID && subtype != INT4OID && subtype != INT8OID)
				return false;
			put_value(c, form_of(subtype), value, out);
			return true;
		case FLOAT4OID:
		case FLOAT8OID:
			if (subtype != FLOAT4OID && subtype != FLOAT8OID)
				return false;
			put_value(c, form_of(subtype), value, out);
			return true;
		case TEXTOID:
		case NAMEOID:
			if (subtype == VARCHAROID)
				subtype = TEXTOID;
			if (subtype != TEXTOID && subtype != NAMEOID)
				return false;
			/* the collation is the column's, whatever the type of the value */
			put_value(c, form_of(subtype), value, out);
			return true;
		case INETOID:
			if (subtype != CIDROID)
				return false;
			put_value(c, c->type, value, out);
			return true;
		case DATEOID:
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
			if (!convert_datetime(subtype, own, value, &value))
				return false;
			put_value(c, c->type, value, out);
			return true;
		case ANYENUMOID:
			if (!type_is_enum(subtype))
				return false;
			put_value(c, c->type, value, out);
			return true;
		default:
			return false;
	}
}

/* ---- decoding ---------------------------------------------------------------------------------------------------- */

void
nemo_key_decode(const NemoKeyDesc *d, int col, const uint8 **p, const uint8 *end, Datum *value, bool *isnull)
{
	const KeyColumn *c = key_column(d, col);
	KeyReader	r = {*p, end, c->desc ? 0xFF : 0x00};
	Datum		v;

	if (*p >= end)
		key_malformed();
	if (**p == (c->nulls_first ? KEY_NULL_FIRST : KEY_NULL_LAST))
	{
		(*p)++;
		if (value != NULL)
			*value = (Datum) 0;
		if (isnull != NULL)
			*isnull = true;
		return;
	}
	if (value != NULL && !c->decodable)
		elog(ERROR, "key column %d cannot be rebuilt from its encoding", col + 1);

	v = c->type->get(c, &r, value != NULL);
	*p = r.p;
	if (value != NULL)
		*value = v;
	if (isnull != NULL)
		*isnull = false;
}

/* ---- enum labels ------------------------------------------------------------------------------------------------- */

/*
 * Core puts a new label halfway between its neighbours and renumbers the whole type when no float is left between them.
 * Same arithmetic here; the caller holds a lock that keeps the labels as they are.
 */
bool
nemo_key_enum_renumbers(Oid enumtype, const char *neighbour, bool after)
{
	CatCList   *labels = SearchSysCacheList1(ENUMTYPOIDNAME, ObjectIdGetDatum(enumtype));
	bool		found = false,
				between = false;
	float4		at = 0,
				other = 0;
	volatile float4 midpoint;

	for (int i = 0; i < labels->n_members && !found; i++)
	{
		Form_pg_enum en = (Form_pg_enum) GETSTRUCT(&labels->members[i]->tuple);

		if (strcmp(NameStr(en->enumlabel), neighbour) == 0)
		{
			found = true;
			at = en->enumsortorder;
		}
	}
	for (int i = 0; i < labels->n_members && found; i++)
	{
		float4		order = ((Form_pg_enum) GETSTRUCT(&labels->members[i]->tuple))->enumsortorder;

		if (after ? order <= at : order >= at)
			continue;
		if (!between || (after ? order < other : order > other))
			other = order;
		between = true;
	}
	ReleaseSysCacheList(labels);

	if (!between)
		return false;
	midpoint = (at + other) / 2;
	return midpoint == at || midpoint == other;
}

/* ---- SQL --------------------------------------------------------------------------------------------------------- */

/* what one call site of nemo_key() keeps between calls */
typedef struct KeyCall
{
	bool		descending;
	bool		nulls_first;
	NemoKeyDesc *desc;
} KeyCall;

static NemoKeyDesc *
describe_argument(Oid type, Oid collation, bool descending, bool nulls_first, MemoryContext cxt)
{
	Oid			opclass = GetDefaultOpClass(getBaseType(type), BTREE_AM_OID);
	NemoKeyDesc *d;

	if (!OidIsValid(opclass))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("data type %s has no default operator class for access method \"%s\"",
						format_type_be(type), "btree")));
	d = MemoryContextAlloc(cxt, offsetof(NemoKeyDesc, cols) + sizeof(KeyColumn));
	d->natts = 1;
	describe_column(&d->cols[0], type, get_opclass_family(opclass), get_opclass_input_type(opclass), collation,
					(descending ? INDOPTION_DESC : 0) | (nulls_first ? INDOPTION_NULLS_FIRST : 0));
	return d;
}

/* the description for argument "arg" of a call, and the "descending" and "nulls_first" that follow it */
static NemoKeyDesc *
describe_call(FunctionCallInfo fcinfo, int arg)
{
	KeyCall    *call = fcinfo->flinfo->fn_extra;
	bool		descending = PG_GETARG_BOOL(arg + 1);
	bool		nulls_first = PG_GETARG_BOOL(arg + 2);

	if (call == NULL || call->descending != descending || call->nulls_first != nulls_first)
	{
		MemoryContext cxt = fcinfo->flinfo->fn_mcxt;
		Oid			type = get_fn_expr_argtype(fcinfo->flinfo, arg);

		if (!OidIsValid(type))
			elog(ERROR, "could not determine the type of the value");
		call = MemoryContextAlloc(cxt, sizeof(KeyCall));
		call->descending = descending;
		call->nulls_first = nulls_first;
		call->desc = describe_argument(type, PG_GET_COLLATION(), descending, nulls_first, cxt);
		fcinfo->flinfo->fn_extra = call;
	}
	return call->desc;
}

PG_FUNCTION_INFO_V1(nemo_key_sql);

/* nemo_key(value, descending, nulls_first): the key that an index with the type's default order would store */
Datum
nemo_key_sql(PG_FUNCTION_ARGS)
{
	NemoKeyDesc *d;
	StringInfoData out;

	if (PG_ARGISNULL(1) || PG_ARGISNULL(2))
		PG_RETURN_NULL();
	d = describe_call(fcinfo, 0);
	initStringInfo(&out);
	appendStringInfoSpaces(&out, VARHDRSZ);
	nemo_key_encode(d, 0, PG_ARGISNULL(0) ? (Datum) 0 : PG_GETARG_DATUM(0), PG_ARGISNULL(0), &out);
	SET_VARSIZE(out.data, out.len);
	PG_RETURN_BYTEA_P(out.data);
}

PG_FUNCTION_INFO_V1(nemo_key_value_sql);

/* nemo_key_value(key, of, descending, nulls_first): what nemo_key() was made from; "of" only gives the type */
Datum
nemo_key_value_sql(PG_FUNCTION_ARGS)
{
	NemoKeyDesc *d;
	bytea	   *key;
	const uint8 *p,
			   *end;
	Datum		value = (Datum) 0;
	bool		isnull,
				decodable;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(2) || PG_ARGISNULL(3))
		PG_RETURN_NULL();
	d = describe_call(fcinfo, 1);
	decodable = nemo_key_decodable(d, 0);
	key = PG_GETARG_BYTEA_PP(0);
	p = (const uint8 *) VARDATA_ANY(key);
	end = p + VARSIZE_ANY_EXHDR(key);
	nemo_key_decode(d, 0, &p, end, decodable ? &value : NULL, &isnull);
	if (p != end)
		key_malformed();
	if (isnull)
		PG_RETURN_NULL();
	if (!decodable)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("values of type %s cannot be rebuilt from a key",
						format_type_be(get_fn_expr_argtype(fcinfo->flinfo, 1)))));
	PG_RETURN_DATUM(value);
}
