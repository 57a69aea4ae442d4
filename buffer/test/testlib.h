/*
 * testlib.h
 *	  What the tests of the record buffer share: a seeded generator, checks that count, keys, and an arena.
 */
#ifndef NEMO_RB_TESTLIB_H
#define NEMO_RB_TESTLIB_H

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "../rb.h"
#include "fakestore.h"

typedef struct tl_rng
{
	uint64_t	s;
} tl_rng;

static inline uint64_t
tl_rand(tl_rng *r)
{
	uint64_t	z = (r->s += 0x9e3779b97f4a7c15ULL);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	return z ^ (z >> 31);
}

/* 0 <= result < n */
static inline uint32_t
tl_below(tl_rng *r, uint32_t n)
{
	return (uint32_t) (tl_rand(r) % n);
}

static inline bool
tl_permille(tl_rng *r, uint32_t p)
{
	return tl_below(r, 1000) < p;
}

static inline double
tl_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double) ts.tv_sec + (double) ts.tv_nsec / 1e9;
}

/* A key held by value: the tree's eight bytes, then up to TL_KEY bytes of its own. */
#define TL_KEY 64
typedef struct tl_key
{
	uint8_t		b[RB_TREE_LEN + TL_KEY];
	uint32_t	len;
} tl_key;

static inline tl_key
tl_makekey(uint64_t tree, const void *own, uint32_t len)
{
	tl_key		k;

	for (int i = 0; i < RB_TREE_LEN; i++)
		k.b[i] = (uint8_t) (tree >> (56 - 8 * i));
	if (len)
		memcpy(k.b + RB_TREE_LEN, own, len);
	k.len = RB_TREE_LEN + len;
	return k;
}

static inline tl_key
tl_strkey(uint64_t tree, const char *own)
{
	return tl_makekey(tree, own, (uint32_t) strlen(own));
}

static inline rb_slice
tl_slice(const tl_key *k)
{
	return (rb_slice) {k->b, k->len};
}

static inline int
tl_cmp(const void *a, size_t alen, const void *b, size_t blen)
{
	size_t		n = alen < blen ? alen : blen;
	int			c = n ? memcmp(a, b, n) : 0;

	return c ? c : (alen < blen ? -1 : alen > blen);
}

/* A zeroed, page-aligned arena; unmapped by tl_arena_free, so that a stale pointer faults. */
static inline void *
tl_arena(size_t size)
{
	void	   *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		abort();
	return p;
}

static inline void
tl_arena_free(void *p, size_t size)
{
	munmap(p, size);
}

/* Puts a settled record straight into the store, as an earlier life of the cluster would have left it. */
static inline void
tl_store_settled(fs_store *fs, const tl_key *k, const void *data, uint32_t len)
{
	rb_stored_version sv = {.kind = RB_DATA, .data = {data, len}};
	size_t		n = rb_encoded_size(&sv, 1);
	uint8_t    *buf = malloc(n ? n : 1);

	rb_encode_record(&sv, 1, buf);
	fs_poke(fs, k->b, k->len, buf, n);
	free(buf);
}

static inline const char *
tl_status(rb_status s)
{
	static const char *const names[] = {"OK", "CHANGED", "UNKNOWN", "FULL", "STORE", "CORRUPT", "CANCELED", "TOOLONG",
		"NOMEM"};

	return (unsigned) s < sizeof(names) / sizeof(names[0]) ? names[s] : "?";
}

#endif							/* NEMO_RB_TESTLIB_H */
