/*
 * nemo_keytypes.c
 *	  Order-preserving encodings of the types of variable width (see nemo_key.c for the others and the table of types).
 *
 * Forms, ascending, each after the tag 0x80 unless it says otherwise:
 *
 *	text, varchar, name, bpchar		by the collation's text form: [ICU sort key, ends with 0x00], [bytes, 0x00].  Text
 *						never holds a zero byte.  bpchar without its trailing blanks, which do not count
 *	bytea				the bytes, 0x00 written as 0x00 0xFF; then 0x00 0x01
 *	bit, varbit			as bytea, with the last byte padded with zero bits; then one byte: bits used in the last byte
 *	numeric				tag by class: -Infinity, negative, zero, positive, Infinity, NaN.  Then 2 bytes: weight of the
 *						first base-10000 digit; then the digits without leading and trailing zeros, 2 bytes each: the
 *						digit times 2, plus 1 when another one follows.  After the tag complemented when negative
 *	inet, cidr			family; address with the bits behind the prefix cleared; prefix length; 0x00 when the address
 *						has no bit set behind the prefix, else 0x01 and the address
 *	oidvector			unsigned integer: number of oids (shorter ones sort first); 4 bytes each
 */
#include "postgres.h"

#include <sys/socket.h>

#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/inet.h"
#include "utils/numeric.h"
#include "utils/pg_locale.h"
#include "utils/varbit.h"

#include "nemo_key.h"
#include "nemo_keytypes.h"

#ifdef USE_ICU
#include <unicode/ucol.h>
#endif

static inline void
put_byte(StringInfo out, uint8 b)
{
	appendStringInfoCharMacro(out, (char) b);
}

static inline void
free_copy(void *detoasted, Datum original)
{
	if (detoasted != DatumGetPointer(original))
		pfree(detoasted);
}

/* ---- collations -------------------------------------------------------------------------------------------------- */

/*
 * The C library offers no sort keys that can be trusted to agree with its comparison, so its collations other than C
 * and POSIX keep the bytes: equality is right, as such collations are always deterministic, and order is given up.
 */
void
key_describe_collation(KeyColumn *c, Oid collation)
{
	pg_locale_t locale;

	if (!OidIsValid(collation))
		ereport(ERROR,
				(errcode(ERRCODE_INDETERMINATE_COLLATION),
				 errmsg("could not determine which collation to use for an index key"),
				 errhint("Use the COLLATE clause to set the collation explicitly.")));
	c->text_form = KEY_TEXT_BYTES;
	if (lc_collate_is_c(collation))
		return;

	locale = pg_newlocale_from_collation(collation);
	if (locale == NULL || locale->provider != COLLPROVIDER_ICU)
	{
		Assert(locale == NULL || locale->deterministic);
		c->ordered = false;
		return;
	}
	c->locale = locale;
	c->text_form = locale->deterministic ? KEY_TEXT_SORTKEY_BYTES : KEY_TEXT_SORTKEY;
	if (!locale->deterministic)
		c->decodable = false;
}

#ifdef USE_ICU
/* ends with the only zero byte in it */
static void
put_sort_key(const KeyColumn *c, const char *s, int len, StringInfo out)
{
	UChar	   *u;
	int32_t		ulen = icu_to_uchar(&u, s, len);
	int32_t		room = Max(4 * ulen, 16),
				need;

	for (;;)
	{
		enlargeStringInfo(out, room);
		need = ucol_getSortKey(c->locale->info.icu.ucol, u, ulen, (uint8_t *) out->data + out->len, room);
		if (need <= room)
			break;
		room = need;
	}
	pfree(u);
	if (need <= 0 || memchr(out->data + out->len, 0, need) != out->data + out->len + need - 1)
		ereport(ERROR,
				(errcode(ERRCODE_EXTERNAL_ROUTINE_EXCEPTION),
				 errmsg("could not make a sort key for an index key")));
	out->len += need;
	out->data[out->len] = '\0';
}
#endif

/* ---- text -------------------------------------------------------------------------------------------------------- */

static void
put_string(const KeyColumn *c, const char *s, int len, StringInfo out)
{
	if (memchr(s, 0, len) != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_CHARACTER_NOT_IN_REPERTOIRE),
				 errmsg("text value in an index key contains a zero byte")));
	put_byte(out, KEY_TAG);
#ifdef USE_ICU
	if (c->text_form != KEY_TEXT_BYTES)
		put_sort_key(c, s, len, out);
#endif
	if (c->text_form != KEY_TEXT_SORTKEY)
	{
		appendBinaryStringInfo(out, s, len);
		put_byte(out, 0);
	}
}

/* step over what ends with a zero byte; *len is its length without that */
static const uint8 *
read_terminated(KeyReader *r, int *len)
{
	const uint8 *start = r->p;
	const uint8 *zero = memchr(start, r->flip, r->end - start);

	if (zero == NULL)
		key_malformed();
	*len = zero - start;
	r->p = zero + 1;
	return start;
}

/* the string's place in the key, still complemented if it is */
static const uint8 *
read_string(const KeyColumn *c, KeyReader *r, int *len)
{
	const uint8 *s;

	key_read_tag(r);
	s = read_terminated(r, len);
	if (c->text_form == KEY_TEXT_SORTKEY_BYTES)
		s = read_terminated(r, len);
	return s;
}

static void
copy_flipped(void *dst, const uint8 *src, int len, uint8 flip)
{
	for (int i = 0; i < len; i++)
		((uint8 *) dst)[i] = src[i] ^ flip;
}

void
key_put_text(const KeyColumn *c, Datum value, StringInfo out)
{
	text	   *t = DatumGetTextPP(value);

	put_string(c, VARDATA_ANY(t), VARSIZE_ANY_EXHDR(t), out);
	free_copy(t, value);
}

Datum
key_get_text(const KeyColumn *c, KeyReader *r, bool want)
{
	int			len;
	const uint8 *s = read_string(c, r, &len);
	text	   *t;

	if (!want)
		return (Datum) 0;
	t = palloc(VARHDRSZ + len);
	SET_VARSIZE(t, VARHDRSZ + len);
	copy_flipped(VARDATA(t), s, len, r->flip);
	return PointerGetDatum(t);
}

void
key_put_bpchar(const KeyColumn *c, Datum value, StringInfo out)
{
	BpChar	   *t = DatumGetBpCharPP(value);
	char	   *s = VARDATA_ANY(t);

	put_string(c, s, bpchartruelen(s, VARSIZE_ANY_EXHDR(t)), out);
	free_copy(t, value);
}

/* how many blanks there were is lost: step over it only */
Datum
key_get_bpchar(const KeyColumn *c, KeyReader *r, bool want pg_attribute_unused())
{
	int			len;

	(void) read_string(c, r, &len);
	return (Datum) 0;
}

/* btree's operator class stores a name as a cstring; both end with a zero byte or at NAMEDATALEN */
void
key_put_name(const KeyColumn *c, Datum value, StringInfo out)
{
	const char *s = DatumGetPointer(value);

	put_string(c, s, strnlen(s, NAMEDATALEN), out);
}

/* padded to NAMEDATALEN, so that it serves as a name and as a cstring */
Datum
key_get_name(const KeyColumn *c, KeyReader *r, bool want)
{
	int			len;
	const uint8 *s = read_string(c, r, &len);
	char	   *name;

	if (len >= NAMEDATALEN)
		key_malformed();
	if (!want)
		return (Datum) 0;
	name = palloc0(NAMEDATALEN);
	copy_flipped(name, s, len, r->flip);
	return PointerGetDatum(name);
}

/* ---- bytea and bit strings --------------------------------------------------------------------------------------- */

#define ESC			0x00
#define ESC_ZERO	0xFF
#define ESC_END		0x01

static void
put_escaped(const uint8 *s, size_t len, StringInfo out)
{
	while (len > 0)
	{
		const uint8 *zero = memchr(s, 0, len);
		size_t		n = zero ? (size_t) (zero - s) : len;

		appendBinaryStringInfo(out, (const char *) s, n);
		if (zero)
		{
			put_byte(out, ESC);
			put_byte(out, ESC_ZERO);
			n++;
		}
		s += n;
		len -= n;
	}
	put_byte(out, ESC);
	put_byte(out, ESC_END);
}

/* unescape into dst, unless it is NULL; returns the length */
static size_t
read_escaped(KeyReader *r, uint8 *dst)
{
	size_t		len = 0;

	for (;; len++)
	{
		uint8		b = key_read_byte(r);

		if (b == ESC)
		{
			uint8		what = key_read_byte(r);

			if (what == ESC_END)
				return len;
			if (what != ESC_ZERO)
				key_malformed();
		}
		if (dst)
			dst[len] = b;
	}
}

void
key_put_bytea(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	bytea	   *b = DatumGetByteaPP(value);

	put_byte(out, KEY_TAG);
	put_escaped((uint8 *) VARDATA_ANY(b), VARSIZE_ANY_EXHDR(b), out);
	free_copy(b, value);
}

Datum
key_get_bytea(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	KeyReader	again;
	size_t		len;
	bytea	   *b;

	key_read_tag(r);
	again = *r;
	len = read_escaped(r, NULL);
	if (!want)
		return (Datum) 0;
	b = palloc(VARHDRSZ + len);
	SET_VARSIZE(b, VARHDRSZ + len);
	read_escaped(&again, (uint8 *) VARDATA(b));
	return PointerGetDatum(b);
}

void
key_put_bit(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	VarBit	   *b = DatumGetVarBitP(value);
	int			bits = VARBITLEN(b);

	put_byte(out, KEY_TAG);
	put_escaped(VARBITS(b), VARBITBYTES(b), out);
	put_byte(out, bits == 0 ? 0 : (bits - 1) % BITS_PER_BYTE + 1);
	free_copy(b, value);
}

Datum
key_get_bit(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	KeyReader	again;
	size_t		len;
	uint8		used;
	VarBit	   *b;

	key_read_tag(r);
	again = *r;
	len = read_escaped(r, NULL);
	used = key_read_byte(r);
	if (used > BITS_PER_BYTE || (used == 0) != (len == 0))
		key_malformed();
	if (!want)
		return (Datum) 0;
	b = palloc(VARHDRSZ + VARBITHDRSZ + len);
	SET_VARSIZE(b, VARHDRSZ + VARBITHDRSZ + len);
	VARBITLEN(b) = len == 0 ? 0 : (int32) ((len - 1) * BITS_PER_BYTE + used);
	read_escaped(&again, VARBITS(b));
	return PointerGetDatum(b);
}

/* ---- numeric ----------------------------------------------------------------------------------------------------- */

#define NUM_MINUS_INFINITY	0x10
#define NUM_NEGATIVE		0x20
#define NUM_ZERO			0x80
#define NUM_POSITIVE		0xD0
#define NUM_INFINITY		0xE0
#define NUM_NAN				0xE1

/* numeric's binary wire format, which unlike its storage format is public */
#define WIRE_HEADER			8	/* bytes: number of digits, weight, sign, display scale, 2 each */
#define WIRE_POS			0x0000
#define WIRE_NEG			0x4000
#define WIRE_NAN			0xC000
#define WIRE_PINF			0xD000
#define WIRE_NINF			0xF000

static inline uint16
wire_uint16(const uint8 *p)
{
	return (uint16) (p[0] << 8 | p[1]);
}

/* weight and digits of a nonzero number; flip is 0xFF for a negative one */
static void
put_digits(const uint8 *digits, int n, int weight, uint8 flip, StringInfo out)
{
	int			start = out->len;

	key_put_fixed(out, (uint64) (weight + 0x8000), 2);
	for (int i = 0; i < n; i++)
		key_put_fixed(out, (uint64) wire_uint16(digits + 2 * i) << 1 | (i < n - 1), 2);
	for (int i = start; i < out->len; i++)
		out->data[i] ^= flip;
}

void
key_put_numeric(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	bytea	   *wire = DatumGetByteaPP(DirectFunctionCall1(numeric_send, value));
	const uint8 *p = (uint8 *) VARDATA_ANY(wire);
	const uint8 *digits = p + WIRE_HEADER;
	int			n = wire_uint16(p);
	int			weight = (int16) wire_uint16(p + 2);
	uint16		sign = wire_uint16(p + 4);

	switch (sign)
	{
		case WIRE_NAN:
			put_byte(out, NUM_NAN);
			break;
		case WIRE_PINF:
			put_byte(out, NUM_INFINITY);
			break;
		case WIRE_NINF:
			put_byte(out, NUM_MINUS_INFINITY);
			break;
		case WIRE_POS:
		case WIRE_NEG:
			for (; n > 0 && wire_uint16(digits) == 0; n--, weight--)
				digits += 2;
			while (n > 0 && wire_uint16(digits + 2 * (n - 1)) == 0)
				n--;
			if (n == 0)
			{
				put_byte(out, NUM_ZERO);
				break;
			}
			put_byte(out, sign == WIRE_NEG ? NUM_NEGATIVE : NUM_POSITIVE);
			put_digits(digits, n, weight, sign == WIRE_NEG ? 0xFF : 0x00, out);
			break;
		default:
			elog(ERROR, "unrecognized numeric sign: %d", sign);
	}
	pfree(wire);
}

/* the display scale is lost: step over it only */
Datum
key_get_numeric(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want pg_attribute_unused())
{
	uint8		tag = key_read_byte(r);
	uint16		flip = tag == NUM_NEGATIVE ? 0xFFFF : 0;

	switch (tag)
	{
		case NUM_NAN:
		case NUM_INFINITY:
		case NUM_MINUS_INFINITY:
		case NUM_ZERO:
			break;
		case NUM_POSITIVE:
		case NUM_NEGATIVE:
			{
				uint16		word;

				(void) key_read_fixed(r, 2);
				do
				{
					word = (uint16) key_read_fixed(r, 2) ^ flip;
					if (word >> 1 > 9999)
						key_malformed();
				} while (word & 1);
				break;
			}
		default:
			key_malformed();
	}
	return (Datum) 0;
}

/* ---- inet and cidr ----------------------------------------------------------------------------------------------- */

#define INET_NO_HOST	0x00
#define INET_HOST		0x01

/* an address without the bits behind its prefix */
static void
clear_host(uint8 *network, const uint8 *address, int size, int bits)
{
	for (int i = 0; i < size; i++)
	{
		int			keep = Min(Max(bits - i * BITS_PER_BYTE, 0), BITS_PER_BYTE);

		network[i] = address[i] & (uint8) (0xFF00 >> keep);
	}
}

/*
 * Core compares the bits that both prefixes have, then the prefix lengths, then the whole addresses.  With what is
 * behind the prefix cleared, comparing whole addresses and then prefix lengths does the same as the first two steps.
 */
void
key_put_inet(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	inet	   *a = DatumGetInetPP(value);
	int			size = ip_addrsize(a);
	int			bits = ip_bits(a);
	uint8		network[16];

	clear_host(network, ip_addr(a), size, bits);
	put_byte(out, KEY_TAG);
	put_byte(out, ip_family(a));
	appendBinaryStringInfo(out, (char *) network, size);
	put_byte(out, (uint8) bits);
	if (memcmp(network, ip_addr(a), size) == 0)
		put_byte(out, INET_NO_HOST);
	else
	{
		put_byte(out, INET_HOST);
		appendBinaryStringInfo(out, (char *) ip_addr(a), size);
	}
	free_copy(a, value);
}

Datum
key_get_inet(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	inet_struct data;
	int			size;
	uint8		network[16],
				cleared[16],
				host;
	inet	   *a;

	memset(&data, 0, sizeof(data));
	key_read_tag(r);
	data.family = key_read_byte(r);
	if (data.family != PGSQL_AF_INET && data.family != PGSQL_AF_INET6)
		key_malformed();
	size = data.family == PGSQL_AF_INET ? 4 : 16;
	key_read(r, network, size);
	data.bits = key_read_byte(r);
	host = key_read_byte(r);
	if (data.bits > size * BITS_PER_BYTE || (host != INET_NO_HOST && host != INET_HOST))
		key_malformed();
	if (host == INET_HOST)
		key_read(r, data.ipaddr, size);
	else
		memcpy(data.ipaddr, network, size);
	clear_host(cleared, data.ipaddr, size, data.bits);
	if (memcmp(cleared, network, size) != 0 || (host == INET_HOST && memcmp(network, data.ipaddr, size) == 0))
		key_malformed();
	if (!want)
		return (Datum) 0;
	a = palloc0(sizeof(inet));
	a->inet_data = data;
	SET_INET_VARSIZE(a);
	return InetPGetDatum(a);
}

/* ---- oidvector --------------------------------------------------------------------------------------------------- */

void
key_put_oidvector(const KeyColumn *c pg_attribute_unused(), Datum value, StringInfo out)
{
	oidvector  *v = (oidvector *) PG_DETOAST_DATUM(value);

	if (v->ndim != 1 || v->dataoffset != 0 || v->elemtype != OIDOID)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("array is not a valid oidvector")));
	key_put_unsigned(out, (uint64) v->dim1);
	for (int i = 0; i < v->dim1; i++)
		key_put_fixed(out, v->values[i], 4);
	free_copy(v, value);
}

Datum
key_get_oidvector(const KeyColumn *c pg_attribute_unused(), KeyReader *r, bool want)
{
	int			n = (int) key_get_unsigned(r, PG_INT32_MAX);
	oidvector  *v = NULL;

	if ((r->end - r->p) / 4 < n)
		key_malformed();
	if (want)
		v = buildoidvector(NULL, n);
	for (int i = 0; i < n; i++)
	{
		Oid			oid = (Oid) key_read_fixed(r, 4);

		if (want)
			v->values[i] = oid;
	}
	return PointerGetDatum(v);
}
