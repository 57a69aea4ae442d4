/*
 * nemo_ranges.c
 *	  From the scan keys of an index scan to byte ranges and filters (nemo_ranges.h).
 *
 * Everything is done on encoded bytes: a DESC column turns the comparison around, and nulls have bytes of their own
 * at the one or the other end of their column.
 */
#include "nemo.h"

#include "access/nbtree.h"
#include "access/relscan.h"
#include "access/skey.h"
#include "utils/array.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "nemo_index.h"
#include "nemo_ranges.h"

/* first bytes of the encodings of values that are not null lie in [VALUE_LOW, VALUE_END) */
#define VALUE_LOW			0x01
#define VALUE_END			0xFF

/* ---- conditions -------------------------------------------------------------------------------------------------- */

static Cond *
add_cond(NemoRanges *q, CondKind kind, int col)
{
	Cond	   *c;

	if (q->nconds == q->max_conds)
	{
		q->max_conds *= 2;
		q->conds = repalloc(q->conds, q->max_conds * sizeof(Cond));
	}
	c = &q->conds[q->nconds++];
	memset(c, 0, sizeof(Cond));
	c->kind = kind;
	c->col = col;
	c->first = q->nspans;
	return c;
}

/* the bytes of the pool from off on */
static void
add_span(NemoRanges *q, uint32 off)
{
	if (q->nspans == q->max_spans)
	{
		q->max_spans *= 2;
		q->spans = repalloc_huge(q->spans, q->max_spans * sizeof(Span));
	}
	q->spans[q->nspans++] = (Span) {off, q->pool.len - off};
}

static inline int
compare_spans(const NemoRanges *q, Span a, Span b)
{
	return nemo_slice_compare(span_in(&q->pool, a), span_in(&q->pool, b));
}

static int
compare_spans_arg(const void *a, const void *b, void *q)
{
	return compare_spans(q, *(const Span *) a, *(const Span *) b);
}

static bool
is_desc(IndexScanDesc scan, int col)
{
	return (scan->indexRelation->rd_indoption[col] & INDOPTION_DESC) != 0;
}

/* the condition in byte order that a btree strategy means; COND_IN for equality */
static CondKind
kind_of(int strategy, bool desc)
{
	switch (strategy)
	{
		case BTLessStrategyNumber:
			return desc ? COND_GT : COND_LT;
		case BTLessEqualStrategyNumber:
			return desc ? COND_GE : COND_LE;
		case BTEqualStrategyNumber:
			return COND_IN;
		case BTGreaterEqualStrategyNumber:
			return desc ? COND_LE : COND_GE;
		case BTGreaterStrategyNumber:
			return desc ? COND_LT : COND_GT;
		default:
			elog(ERROR, "unexpected strategy number %d", strategy);
			return COND_IN;
	}
}

/* what cannot be said in bytes: the executor checks it; at least it is never true of a null */
static void
add_unencoded(NemoRanges *q, int col)
{
	(void) add_cond(q, COND_NOT_NULL, col);
	q->recheck = true;
}

static void
add_simple(IndexScanDesc scan, NemoRanges *q, ScanKey key)
{
	int			col = key->sk_attno - 1;
	CondKind	kind = kind_of(key->sk_strategy, is_desc(scan, col));
	uint32		off = q->pool.len;
	Cond	   *c;

	if ((kind != COND_IN && !nemo_key_ordered(q->ix->desc, col)) ||
		!nemo_key_encode_as(q->ix->desc, col, key->sk_subtype, key->sk_argument, &q->pool))
	{
		add_unencoded(q, col);
		return;
	}
	c = add_cond(q, kind, col);
	c->n = 1;
	add_span(q, off);
}

static void
add_array(IndexScanDesc scan, NemoRanges *q, ScanKey key)
{
	int			col = key->sk_attno - 1;
	CondKind	kind = kind_of(key->sk_strategy, is_desc(scan, col));
	ArrayType  *array = DatumGetArrayTypeP(key->sk_argument);
	int16		typlen;
	bool		typbyval;
	char		typalign;
	Datum	   *values;
	bool	   *nulls;
	int			n;
	int			first = q->nspans;
	Span	   *spans;
	Cond	   *c;

	if (kind != COND_IN && !nemo_key_ordered(q->ix->desc, col))
	{
		add_unencoded(q, col);
		return;
	}
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &typlen, &typbyval, &typalign);
	deconstruct_array(array, ARR_ELEMTYPE(array), typlen, typbyval, typalign, &values, &nulls, &n);
	for (int i = 0; i < n; i++)
	{
		uint32		off = q->pool.len;

		if (nulls[i])
			continue;
		if (!nemo_key_encode_as(q->ix->desc, col, key->sk_subtype, values[i], &q->pool))
		{
			q->nspans = first;
			add_unencoded(q, col);
			return;
		}
		add_span(q, off);
	}
	n = q->nspans - first;
	if (n == 0)
	{
		q->empty = true;
		return;
	}

	spans = q->spans + first;
	if (n > 1)
	{
		int			kept = 1;

		qsort_arg(spans, n, sizeof(Span), compare_spans_arg, q);
		for (int i = 1; i < n; i++)
			if (compare_spans(q, spans[kept - 1], spans[i]) != 0)
				spans[kept++] = spans[i];
		n = kept;
	}
	/* "< ANY" is "< the largest" */
	if (kind == COND_LT || kind == COND_LE)
		spans[0] = spans[n - 1];
	if (kind != COND_IN)
		n = 1;
	q->nspans = first + n;
	c = add_cond(q, kind, col);
	c->first = first;
	c->n = n;
}

/*
 * A row comparison compares as the concatenated bytes do, as far as its members are columns one after the other with
 * one direction.  Nulls among the members after the first are left to the recheck: a row that compares true by an
 * earlier member lies within the bound whatever follows.
 */
static void
add_row(IndexScanDesc scan, NemoRanges *q, ScanKey header)
{
	ScanKey		key = (ScanKey) DatumGetPointer(header->sk_argument);
	int			col = key->sk_attno - 1;
	bool		desc = is_desc(scan, col);
	CondKind	kind = kind_of(header->sk_strategy, desc);
	uint32		off = q->pool.len;
	int			members = 0;
	bool		whole = false;
	Cond	   *c;

	if (key->sk_flags & SK_ISNULL)
	{
		q->empty = true;
		return;
	}
	add_unencoded(q, col);
	for (;; key++)
	{
		int			member = key->sk_attno - 1;

		if ((key->sk_flags & SK_ISNULL) || member != col + members || is_desc(scan, member) != desc ||
			!nemo_key_ordered(q->ix->desc, member) ||
			!nemo_key_encode_as(q->ix->desc, member, key->sk_subtype, key->sk_argument, &q->pool))
			break;
		members++;
		if (key->sk_flags & SK_ROW_END)
		{
			whole = true;
			break;
		}
	}
	if (members == 0 || kind == COND_IN)
		return;
	if (!whole)
		kind = kind == COND_LT ? COND_LE : kind == COND_GT ? COND_GE : kind;
	c = add_cond(q, kind, col);
	c->row = true;
	c->n = 1;
	add_span(q, off);
}

/* does a value of the column (its bytes) satisfy the condition? */
static bool
cond_holds(const NemoRanges *q, const Cond *c, rb_slice value)
{
	int			cmp;

	if (c->kind == COND_IN)
	{
		int			lo = c->first;
		int			hi = c->first + c->n;

		while (lo < hi)
		{
			int			mid = lo + (hi - lo) / 2;

			cmp = nemo_slice_compare(value, span_in(&q->pool, q->spans[mid]));
			if (cmp == 0)
				return true;
			if (cmp < 0)
				hi = mid;
			else
				lo = mid + 1;
		}
		return false;
	}
	if (value.data[0] < VALUE_LOW || value.data[0] >= VALUE_END)
		return false;
	if (c->kind == COND_NOT_NULL || c->row)
		return true;
	cmp = nemo_slice_compare(value, span_in(&q->pool, q->spans[c->first]));
	switch (c->kind)
	{
		case COND_LT:
			return cmp < 0;
		case COND_LE:
			return cmp <= 0;
		case COND_GE:
			return cmp >= 0;
		default:
			return cmp > 0;
	}
}

/* ---- ranges ------------------------------------------------------------------------------------------------------ */

/* keep those values of an equality that the other conditions on its column allow */
static void
narrow_equality(NemoRanges *q, Cond *eq)
{
	for (int i = 0; i < q->nconds; i++)
	{
		Cond	   *c = &q->conds[i];
		int			kept = 0;

		if (c == eq || c->col != eq->col)
			continue;
		c->used = true;
		for (int j = 0; j < eq->n; j++)
		{
			Span		span = q->spans[eq->first + j];

			if (cond_holds(q, c, span_in(&q->pool, span)))
				q->spans[eq->first + kept++] = span;
		}
		eq->n = kept;
	}
	eq->used = true;
	if (eq->n == 0)
		q->empty = true;
}

static Span
pool_byte(NemoRanges *q, uint8 byte)
{
	appendStringInfoCharMacro(&q->pool, (char) byte);
	return (Span) {q->pool.len - 1, 1};
}

/* a copy of the span that sorts above everything beginning with it; values never consist of 0xFF alone */
static Span
pool_successor(NemoRanges *q, Span span)
{
	uint32		off = q->pool.len;

	enlargeStringInfo(&q->pool, (int) span.len);
	appendBinaryStringInfo(&q->pool, q->pool.data + span.off, (int) span.len);
	while ((uint8) q->pool.data[q->pool.len - 1] == 0xFF)
		q->pool.len--;
	q->pool.data[q->pool.len - 1]++;
	return (Span) {off, q->pool.len - off};
}

/* low and high from all conditions on the column after the equalities */
static void
bound_column(NemoRanges *q, int col)
{
	for (int i = 0; i < q->nconds; i++)
	{
		Cond	   *c = &q->conds[i];
		Span		span;

		if (c->col != col)
			continue;
		c->used = true;
		if (!q->bounded)
		{
			q->bounded = true;
			q->low = pool_byte(q, VALUE_LOW);
			q->high = pool_byte(q, VALUE_END);
		}
		if (c->kind == COND_NOT_NULL)
			continue;
		span = q->spans[c->first];
		if (c->kind == COND_LE || c->kind == COND_GT)
			span = pool_successor(q, span);
		if (c->kind == COND_LT || c->kind == COND_LE)
		{
			if (compare_spans(q, span, q->high) < 0)
				q->high = span;
		}
		else if (compare_spans(q, span, q->low) > 0)
			q->low = span;
	}
	if (q->bounded && compare_spans(q, q->low, q->high) >= 0)
		q->empty = true;
}

static void
make_ranges(NemoRanges *q)
{
	int			natts = nemo_key_natts(q->ix->desc);
	bool		any_null = false;

	q->nequal = 0;
	q->nranges = 1;
	for (int col = 0; col < natts && !q->empty; col++)
	{
		Cond	   *eq = NULL;

		for (int i = 0; i < q->nconds && eq == NULL; i++)
			if (q->conds[i].col == col && q->conds[i].kind == COND_IN)
				eq = &q->conds[i];
		if (eq == NULL)
			break;
		narrow_equality(q, eq);
		for (int j = 0; j < eq->n; j++)
		{
			uint8		lead = (uint8) q->pool.data[q->spans[eq->first + j].off];

			any_null |= lead < VALUE_LOW || lead >= VALUE_END;
		}
		/* a product this large is never read to its end; the rest of the columns filters */
		if (q->nranges > (uint64) PG_INT64_MAX / (uint64) Max(eq->n, 1))
		{
			eq->used = false;
			break;
		}
		q->nranges *= eq->n;
		q->equal[q->nequal++] = eq;
	}
	if (q->empty)
		return;

	q->points = q->nequal == natts && (q->ix->unique || q->ix->clustered) &&
		(!any_null || q->ix->ii->ii_NullsNotDistinct);
	if (q->nequal < natts)
		bound_column(q, q->nequal);

	for (int i = 0; i < q->nconds; i++)
		if (!q->conds[i].used)
		{
			q->nfilters++;
			q->filter_cols = Max(q->filter_cols, q->conds[i].col + 1);
		}
}

void
nemo_ranges_read(NemoRanges *q, IndexScanDesc scan, const NemoIndexInfo *ix)
{
	q->ix = ix;
	q->empty = false;
	q->recheck = false;
	q->bounded = false;
	q->nspans = 0;
	q->nconds = 0;
	q->nfilters = 0;
	q->filter_cols = 0;
	resetStringInfo(&q->pool);

	for (int i = 0; i < scan->numberOfKeys && !q->empty; i++)
	{
		ScanKey		key = &scan->keyData[i];

		if (key->sk_flags & SK_SEARCHNULL)
		{
			uint32		off = q->pool.len;
			Cond	   *c = add_cond(q, COND_IN, key->sk_attno - 1);

			c->n = 1;
			nemo_key_encode(q->ix->desc, key->sk_attno - 1, (Datum) 0, true, &q->pool);
			add_span(q, off);
		}
		else if (key->sk_flags & SK_SEARCHNOTNULL)
			(void) add_cond(q, COND_NOT_NULL, key->sk_attno - 1);
		else if (key->sk_flags & SK_ROW_HEADER)
			add_row(scan, q, key);
		else if (key->sk_flags & SK_ISNULL)
			q->empty = true;
		else if (key->sk_flags & SK_SEARCHARRAY)
			add_array(scan, q, key);
		else
			add_simple(scan, q, key);
	}
	if (!q->empty)
		make_ranges(q);
}

/* append the tree and the equal columns of range r */
void
nemo_ranges_point(const NemoRanges *q, uint64 r, StringInfo out)
{
	uint8		tree[RB_TREE_LEN];
	int			digit[INDEX_MAX_KEYS];

	nemo_put_be64(tree, q->ix->tree);
	appendBinaryStringInfo(out, (char *) tree, RB_TREE_LEN);
	if (q->nranges > 1)
		for (int i = q->nequal; i-- > 0;)
		{
			digit[i] = (int) (r % (uint64) q->equal[i]->n);
			r /= (uint64) q->equal[i]->n;
		}
	for (int i = 0; i < q->nequal; i++)
	{
		rb_slice	s = span_in(&q->pool, q->spans[q->equal[i]->first + (q->nranges > 1 ? digit[i] : 0)]);

		appendBinaryStringInfo(out, (const char *) s.data, (int) s.len);
	}
}

static void
append_bound(const NemoRanges *q, Span bound, StringInfo out)
{
	rb_slice	s = span_in(&q->pool, bound);

	appendBinaryStringInfo(out, (const char *) s.data, (int) s.len);
}

/*
 * Bounds may be longer than any key can be.  Cut to RB_MAX_KEY bytes they still divide the keys in the same way, up
 * to one that is their prefix: the cut start lets it in, q does the successor of the cut end.
 */
static void
cut_bound(NemoRanges *q, StringInfo bound, bool is_end)
{
	if (bound->len <= RB_MAX_KEY)
		return;
	bound->len = RB_MAX_KEY;
	if (is_end)
		nemo_key_successor(bound);
	q->recheck = true;
}

void
nemo_ranges_bounds(NemoRanges *q, uint64 r, StringInfo start, StringInfo end)
{
	resetStringInfo(start);
	resetStringInfo(end);
	nemo_ranges_point(q, r, start);
	appendBinaryStringInfo(end, start->data, start->len);
	if (q->bounded)
	{
		append_bound(q, q->low, start);
		append_bound(q, q->high, end);
	}
	else
		nemo_key_successor(end);
	cut_bound(q, start, false);
	cut_bound(q, end, true);
}

/* ---- filters ----------------------------------------------------------------------------------------------------- */

bool
nemo_ranges_pass(const NemoRanges *q, rb_slice key)
{
	const uint8 *p = key.data + RB_TREE_LEN;

	for (int col = 0; col < q->filter_cols; col++)
	{
		const uint8 *begin = p;

		nemo_key_decode(q->ix->desc, col, &p, key.data + key.len, NULL, NULL);
		for (int i = 0; i < q->nconds; i++)
		{
			const Cond *c = &q->conds[i];

			if (!c->used && c->col == col && !cond_holds(q, c, (rb_slice) {begin, (uint32_t) (p - begin)}))
				return false;
		}
	}
	return true;
}

void
nemo_ranges_init(NemoRanges *q)
{
	memset(q, 0, sizeof(NemoRanges));
	q->max_spans = q->max_conds = 4;
	q->spans = palloc(q->max_spans * sizeof(Span));
	q->conds = palloc(q->max_conds * sizeof(Cond));
	initStringInfo(&q->pool);
}

void
nemo_ranges_free(NemoRanges *q)
{
	pfree(q->pool.data);
	pfree(q->spans);
	pfree(q->conds);
}
