/*
 * fuzz_record.c
 *	  Fuzz target of the stored form: arbitrary bytes are decoded without harm, and what decodes survives a round trip.
 *
 * With clang's libFuzzer (FUZZ_LIBFUZZER) an ordinary target; otherwise a program that mutates valid records by itself:
 * fuzz_record [--seed N] [--runs N].
 */
#include "testlib.h"

#define MOST 64

typedef struct list
{
	rb_stored_version v[MOST];
	uint32_t	n;
	const uint8_t *lo,
			   *hi;
} list;

static bool
collect(void *arg, const rb_stored_version *v)
{
	list	   *l = arg;

	/* data lies within the input, whatever the input says */
	if (v->data.len && (v->data.data < l->lo || v->data.data + v->data.len > l->hi))
		abort();
	if (l->n == MOST)
		return false;
	l->v[l->n++] = *v;
	return true;
}

static void
check_same(const list *a, const list *b)
{
	if (a->n != b->n)
		abort();
	for (uint32_t i = 0; i < a->n; i++)
	{
		const rb_stored_version *x = &a->v[i],
				   *y = &b->v[i];

		if (x->xid != y->xid || x->cid != y->cid || x->aux != y->aux || x->kind != y->kind || x->tag != y->tag ||
			tl_cmp(x->data.data, x->data.len, y->data.data, y->data.len) != 0)
			abort();
	}
}

/* Encodes, decodes and compares; the encoding goes to a block of exactly its size. */
static uint8_t *
round_trip(const list *l, size_t *size)
{
	size_t		n = rb_encoded_size(l->v, l->n);
	uint8_t    *out = malloc(n ? n : 1);
	list		back = {.n = 0, .lo = out, .hi = out + n};

	rb_encode_record(l->v, l->n, out);
	if (!rb_decode_record(out, n, collect, &back))
		abort();
	check_same(l, &back);
	*size = n;
	return out;
}

int			LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	/* a copy of exact size lets the sanitizer see the smallest overrun */
	uint8_t    *copy = malloc(size ? size : 1);
	list		l = {.n = 0, .lo = copy, .hi = copy + size};

	if (size)
		memcpy(copy, data, size);
	if (rb_decode_record(copy, size, collect, &l))
	{
		if (l.n == 0)
			abort();
		free(round_trip(&l, &size));
	}
	free(copy);
	return 0;
}

/* A version list made of the input's bytes, encoded, decoded, and then damaged in one place. */
static void
from_random(tl_rng *r)
{
	uint8_t		pool[512];
	list		l = {.n = 0};
	size_t		size;
	uint8_t    *out;

	for (uint32_t i = 0; i < sizeof(pool); i++)
		pool[i] = (uint8_t) tl_rand(r);
	l.n = 1 + tl_below(r, tl_permille(r, 500) ? 1 : MOST);
	for (uint32_t i = 0; i < l.n; i++)
	{
		rb_stored_version *v = &l.v[i];
		bool		settled = i == l.n - 1 && tl_permille(r, 600);

		memset(v, 0, sizeof(*v));
		v->xid = settled ? 0 : 1 + (tl_rand(r) >> tl_below(r, 63));
		v->cid = settled ? 0 : (uint32_t) (tl_rand(r) >> tl_below(r, 64));
		v->kind = l.n > 1 && tl_permille(r, 200) ? RB_DELETE : RB_DATA;
		v->tag = tl_below(r, 16);
		v->data.len = tl_permille(r, 200) ? 0 : tl_below(r, 500);
		v->data.data = pool + tl_below(r, 12);
	}
	out = round_trip(&l, &size);
	if (tl_permille(r, 500) && size)
	{
		list		damaged = {.n = 0, .lo = out, .hi = out + size};

		out[tl_below(r, (uint32_t) size)] ^= (uint8_t) (1 << tl_below(r, 8));
		/* the checksum finds every single flipped bit */
		if (rb_decode_record(out, size, collect, &damaged))
			abort();
	}
	else if (size)
	{
		/* a record cut short is not a record */
		size_t		shorter = tl_below(r, (uint32_t) size);
		uint8_t    *part = malloc(shorter ? shorter : 1);
		list		damaged = {.n = 0, .lo = part, .hi = part + shorter};

		memcpy(part, out, shorter);
		if (rb_decode_record(part, shorter, collect, &damaged))
			abort();
		free(part);
	}
	free(out);
}

#ifndef FUZZ_LIBFUZZER
int
main(int argc, char **argv)
{
	uint64_t	seed = 1,
				runs = 200000;
	tl_rng		r;

	for (int i = 1; i + 1 < argc; i += 2)
	{
		if (strcmp(argv[i], "--seed") == 0)
			seed = strtoull(argv[i + 1], NULL, 0);
		else if (strcmp(argv[i], "--runs") == 0)
			runs = strtoull(argv[i + 1], NULL, 0);
	}
	printf("fuzz_record: seed %lu, %lu runs\n", seed, runs);
	fflush(stdout);
	r.s = seed;
	for (uint64_t n = 0; n < runs; n++)
	{
		uint8_t		raw[256];
		uint32_t	len = tl_below(&r, sizeof(raw));

		from_random(&r);
		for (uint32_t i = 0; i < len; i++)
			raw[i] = (uint8_t) (tl_rand(&r) >> tl_below(&r, 60));
		LLVMFuzzerTestOneInput(raw, len);
	}
	printf("%lu passed, 0 failed\n", runs);
	return 0;
}
#else
int			LLVMFuzzerInitialize(int *argc, char ***argv);

int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
	tl_rng		r = {.s = 1};

	(void) argc;
	(void) argv;
	for (int i = 0; i < 10000; i++)
		from_random(&r);
	return 0;
}
#endif
