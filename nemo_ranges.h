/*
 * nemo_ranges.h
 *	  What the scan keys of an index scan come down to: byte ranges in index order, filters, and a recheck.
 *
 * Scan keys become conditions on the bytes of one key column each.  Equalities on the leading columns, and the bounds
 * on the column after them, make ranges: one for each combination of array elements, in key order and disjoint, so
 * that the ranges in turn give the index order.  They are computed from their number when needed.  Where all columns
 * of a unique key are given, the ranges are points.  Conditions that make no bound are compared with the column's
 * bytes (filters); what has no bytes is left to the executor (recheck).
 */
#ifndef NEMO_RANGES_H
#define NEMO_RANGES_H

#include "nemo.h"

typedef struct Span
{
	uint32		off;			/* in the pool */
	uint32		len;
} Span;

typedef enum CondKind
{
	COND_IN,					/* one of n spans, ascending and distinct; null is a value like others */
	COND_LT, COND_LE, COND_GE, COND_GT, /* in the order of the bytes; null never matches */
	COND_NOT_NULL
} CondKind;

typedef struct Cond
{
	CondKind	kind;
	int			col;
	bool		row;			/* span covers col and columns after it: good as a bound only */
	bool		used;			/* the ranges imply it */
	int			first;			/* in spans */
	int			n;
} Cond;

typedef struct NemoRanges
{
	const NemoIndexInfo *ix;
	bool		empty;			/* the keys contradict each other */
	bool		recheck;		/* xs_recheck */
	bool		points;			/* each range is one whole key */
	uint64		nranges;

	StringInfoData pool;		/* bytes of all spans */
	Span	   *spans;
	int			nspans,
				max_spans;
	Cond	   *conds;
	int			nconds,
				max_conds;
	int			nfilters;		/* conditions not used */
	int			filter_cols;	/* leading columns that filters look at */
	Cond	   *equal[INDEX_MAX_KEYS];	/* leading columns with equality */
	int			nequal;
	bool		bounded;		/* low and high bound the column after them */
	Span		low;
	Span		high;
} NemoRanges;

static inline rb_slice
span_in(const StringInfoData *s, Span span)
{
	return (rb_slice) {(const uint8_t *) s->data + span.off, span.len};
}

/* memory is taken from CurrentMemoryContext and kept for the next reading */
extern void nemo_ranges_init(NemoRanges *q);
extern void nemo_ranges_free(NemoRanges *q);
/* scratch memory is left in CurrentMemoryContext */
extern void nemo_ranges_read(NemoRanges *q, IndexScanDesc scan, const NemoIndexInfo *ix);
/* append tree and equal columns of range r: where they are points, the whole key */
extern void nemo_ranges_point(const NemoRanges *q, uint64 r, StringInfo out);
/* [start, end) of range r < nranges */
extern void nemo_ranges_bounds(NemoRanges *q, uint64 r, StringInfo start, StringInfo end);
extern bool nemo_ranges_pass(const NemoRanges *q, rb_slice key);

#endif							/* NEMO_RANGES_H */
