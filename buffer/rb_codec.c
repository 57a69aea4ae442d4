/*
 * rb_codec.c
 *	  The stored form of a record.  Integers are big-endian.
 *
 *	settled			0x10 | tag	crc:4	data
 *	version list	0x20		crc:4	n:4, then n times { xid:8 cid:4 aux:4 kind:1 tag:1 len:4 data }
 *
 * The CRC-32C covers everything but itself.  xid 0 = settled; only the oldest version of a list can be.
 */
#include "rb_private.h"

#define PLAIN	0x10
#define LIST	0x20
#define HEADER	5
#define EACH	22

static uint32_t
take32(const uint8_t *p)
{
	return (uint32_t) p[0] << 24 | (uint32_t) p[1] << 16 | (uint32_t) p[2] << 8 | p[3];
}

static void
put32(uint8_t *p, uint32_t v)
{
	for (int i = 3; i >= 0; i--, v >>= 8)
		p[i] = (uint8_t) v;
}

static uint32_t
crc_slow(uint32_t crc, const uint8_t *p, size_t len)
{
	/* four bits at a time */
	static const uint32_t table[16] = {
		0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
		0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75
	};

	for (; len > 0; len--)
	{
		crc ^= *p++;
		crc = table[crc & 15] ^ (crc >> 4);
		crc = table[crc & 15] ^ (crc >> 4);
	}
	return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t
crc_fast(uint32_t crc, const uint8_t *p, size_t len)
{
	uint64_t	c = crc;

	for (; len >= 8; len -= 8, p += 8)
	{
		uint64_t	w;

		memcpy(&w, p, 8);
		c = __builtin_ia32_crc32di(c, w);
	}
	for (; len > 0; len--)
		c = __builtin_ia32_crc32qi((uint32_t) c, *p++);
	return (uint32_t) c;
}
#endif

static uint32_t
crc32c(uint32_t crc, const uint8_t *p, size_t len)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2"))
		return crc_fast(crc, p, len);
#endif
	return crc_slow(crc, p, len);
}

static uint32_t
checksum(const uint8_t *bytes, size_t len)
{
	uint32_t	crc = crc32c(0xffffffff, bytes, 1);

	return ~crc32c(crc, bytes + HEADER, len - HEADER);
}

static bool
is_plain(const rb_stored_version *v, uint32_t n)
{
	return n == 1 && v->xid == 0 && v->cid == 0 && v->aux == 0 && v->kind == RB_DATA;
}

size_t
rb_encoded_size(const rb_stored_version *v, uint32_t n)
{
	size_t		size = HEADER + 4 + (size_t) n * EACH;

	if (is_plain(v, n))
		return HEADER + v->data.len;
	for (uint32_t i = 0; i < n; i++)
		size += v[i].data.len;
	return size;
}

void
rb_encode_record(const rb_stored_version *v, uint32_t n, uint8_t *out)
{
	uint8_t    *p = out + HEADER;

	if (is_plain(v, n))
	{
		out[0] = PLAIN | (v->tag & 15);
		if (v->data.len)
			memcpy(p, v->data.data, v->data.len);
	}
	else
	{
		out[0] = LIST;
		put32(p, n);
		p += 4;
		for (uint32_t i = 0; i < n; i++)
		{
			rb_put_be64(p, v[i].xid);
			put32(p + 8, v[i].cid);
			put32(p + 12, v[i].aux);
			p[16] = v[i].kind;
			p[17] = v[i].tag & 15;
			put32(p + 18, v[i].data.len);
			p += EACH;
			if (v[i].data.len)
				memcpy(p, v[i].data.data, v[i].data.len);
			p += v[i].data.len;
		}
	}
	put32(out + 1, checksum(out, rb_encoded_size(v, n)));
}

/* One version of a list; false = it does not fit into what is left. */
static bool
take_version(const uint8_t **p, size_t *left, rb_stored_version *v)
{
	const uint8_t *b = *p;

	if (*left < EACH)
		return false;
	v->xid = rb_be64(b);
	v->cid = take32(b + 8);
	v->aux = take32(b + 12);
	v->kind = b[16];
	v->tag = b[17];
	v->data = (rb_slice) {b + EACH, take32(b + 18)};
	*left -= EACH;
	if (v->kind > RB_DELETE || v->tag > 15 || v->data.len > *left || v->data.len > RB_MAX_VALUE)
		return false;
	*left -= v->data.len;
	*p = b + EACH + v->data.len;
	return true;
}

bool
rb_decode_record(const uint8_t *bytes, size_t len, bool (*emit) (void *arg, const rb_stored_version *v), void *arg)
{
	rb_stored_version v = {0};
	const uint8_t *p = bytes + HEADER;
	size_t		left = len - HEADER;
	uint32_t	n;

	if (len < HEADER || len - HEADER > UINT32_MAX || take32(bytes + 1) != checksum(bytes, len))
		return false;
	if ((bytes[0] & 0xf0) == PLAIN)
	{
		v.tag = bytes[0] & 15;
		v.data = (rb_slice) {p, (uint32_t) left};
		if (left > RB_MAX_VALUE)
			return false;
		(void) emit(arg, &v);
		return true;
	}
	if (bytes[0] != LIST || left < 4)
		return false;
	n = take32(p);
	p += 4;
	left -= 4;
	if (n == 0 || n > left / EACH)
		return false;
	/* all of it is checked before any of it is handed out */
	for (int pass = 0; pass < 2; pass++)
	{
		const uint8_t *q = p;
		size_t		rest = left;

		for (uint32_t i = 0; i < n; i++)
		{
			if (!take_version(&q, &rest, &v) || (v.xid == 0 && i + 1 < n))
				return false;
			if (pass == 1 && !emit(arg, &v))
				return true;
		}
		if (rest)
			return false;
	}
	return true;
}
