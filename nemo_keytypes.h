/*
 * nemo_keytypes.h
 *	  What nemo_key.c and nemo_keytypes.c share: a column's description, and writing and reading its bytes.
 */
#ifndef NEMO_KEYTYPES_H
#define NEMO_KEYTYPES_H

#include "postgres.h"

#include "lib/stringinfo.h"
#include "utils/pg_locale.h"

#define KEY_TAG			0x80	/* first byte of a value whose tag carries nothing else */

/* KeyType.flags */
#define KEY_LOSSY		0x01	/* the value cannot be rebuilt */
#define KEY_COLLATED	0x02	/* depends on the column's collation */
#define KEY_INTEGER		0x04	/* int2, int4, int8 */

typedef struct KeyColumn KeyColumn;

/* a position in an encoded key */
typedef struct KeyReader
{
	const uint8 *p;
	const uint8 *end;
	uint8		flip;			/* 0xFF in a DESC column: bytes are complements */
} KeyReader;

typedef struct KeyType
{
	Oid			opcintype;
	Oid			cmp;			/* the operator class's comparison function */
	/* append the ascending form of a value that is not null */
	void		(*put) (const KeyColumn *c, Datum value, StringInfo out);
	/* read it; when not wanted, the result is void and nothing is allocated */
	Datum		(*get) (const KeyColumn *c, KeyReader *r, bool want);
	int			width;			/* bytes, of types that are just bytes */
	int			flags;
} KeyType;

typedef enum KeyTextForm
{
	KEY_TEXT_BYTES,				/* the bytes: C and POSIX, pattern operator classes, and where only equality counts */
	KEY_TEXT_SORTKEY_BYTES,		/* ICU, deterministic: the sort key, then the bytes to tell its equals apart */
	KEY_TEXT_SORTKEY			/* ICU, not deterministic: the sort key */
} KeyTextForm;

struct KeyColumn
{
	const KeyType *type;
	KeyTextForm text_form;
	pg_locale_t locale;			/* for sort keys; lives as long as the process */
	bool		desc;
	bool		nulls_first;
	bool		ordered;
	bool		decodable;
};

/* nemo_key.c */
extern void key_malformed(void) pg_attribute_noreturn();
extern void key_read(KeyReader *r, void *dst, size_t n);
extern uint8 key_read_byte(KeyReader *r);
extern uint64 key_read_fixed(KeyReader *r, int n);
extern void key_read_tag(KeyReader *r);
extern void key_put_fixed(StringInfo out, uint64 v, int n);
extern void key_put_unsigned(StringInfo out, uint64 v);
extern void key_put_signed(StringInfo out, int64 v);
extern uint64 key_get_unsigned(KeyReader *r, uint64 max);
extern int64 key_get_signed(KeyReader *r, int64 min, int64 max);

/* nemo_keytypes.c */
extern void key_describe_collation(KeyColumn *c, Oid collation);

#define KEY_FUNCTIONS(name) \
	extern void key_put_##name(const KeyColumn *c, Datum value, StringInfo out); \
	extern Datum key_get_##name(const KeyColumn *c, KeyReader *r, bool want)

KEY_FUNCTIONS(numeric);
KEY_FUNCTIONS(bytea);
KEY_FUNCTIONS(text);
KEY_FUNCTIONS(bpchar);
KEY_FUNCTIONS(name);
KEY_FUNCTIONS(oidvector);
KEY_FUNCTIONS(inet);
KEY_FUNCTIONS(bit);

#endif							/* NEMO_KEYTYPES_H */
