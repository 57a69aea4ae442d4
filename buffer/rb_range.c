/*
 * rb_range.c
 *	  Range reads: walking what is known, fetching the holes, and admitting what came back.
 *
 * A walk goes from entry to entry; the gap bits say how far it may go on memory alone.  At a hole one request is made,
 * under a ticket (INVARIANTS B2), for as much of what follows as is not known.  Its answer is admitted, the gaps between
 * its records are sealed (A2, A8-A10), and the walk goes on over the union of the buffer and the answer, where the buffer
 * wins (B1).  The answer is the window in which the walk needs no gap bits, so what did not find room in the buffer
 * is returned all the same (B4).
 */
#include "rb_private.h"

#define RUN				64		/* entries looked at in one guard */
#define STEP			32		/* gaps sealed under one latch */
#define LEAST_FETCH		32		/* records */
#define MOST_FETCH		1024
#define FETCH_BYTES		(4 * 1024 * 1024)
#define PROBE_FETCH		8
#define PROBE_BYTES		(64 * 1024)
#define PATIENCE		3		/* broken tickets before a firm one is taken */

typedef struct bound
{
	uint32_t	len;
	uint8_t		data[RB_MAX_KEY + 8];
} bound;

static inline rb_slice
slice(const bound *b)
{
	return (rb_slice) {b->data, b->len};
}

static void
set_bound(bound *b, const void *data, uint32_t len)
{
	memmove(b->data, data, len);
	b->len = len;
}

static inline void
copy_bound(bound *to, const bound *from)
{
	set_bound(to, from->data, from->len);
}

static inline int
cmp_bound(const void *data, uint32_t len, const bound *b)
{
	return rb_cmp(data, len, b->data, b->len);
}

static inline int
cmp_rec(const st_record *rec, const bound *b)
{
	return cmp_bound(rec->key.data, (uint32_t) rec->key.len, b);
}

void
rb_succ(uint8_t *buf, uint32_t *len)
{
	buf[(*len)++] = 0;
}

/* Is b the very next key after data[0..len)? */
static bool
follows(const bound *b, const uint8_t *data, uint32_t len)
{
	return b->len == len + 1 && b->data[len] == 0 && memcmp(b->data, data, len) == 0;
}

typedef struct range
{
	rb_thread  *t;
	uint64_t	tree;
	bool		backward;
	bound		start, end;		/* of the whole request; end is not beyond the tree's */
	bound		tree_end;
	bound		cursor;			/* forward: what is left begins here; backward: ends here */
	bound		hole;			/* its other end */
	uint32_t	limit;			/* records to ask for */
	size_t		bytes;
	uint32_t	broken;			/* tickets */

	/* the window: the answer of the last request, while its ticket is held */
	bool		window;
	bound		lo, hi;
	uint32_t	next;			/* of t->result.recs */

	rb_visit	visit;
	void	   *arg;
	uint32_t	visited, max;
} range;

typedef enum step
{
	STEP_ON, STEP_HOLE, STEP_STOP, STEP_END, STEP_FAILED
} step;

static inline bool
is_known(const range *r, const rb_seen *s)
{
	return !(s->flags & RB_GAP) && rb_in_tree(s->e, r->tree);
}

static void
close_window(range *r)
{
	rb_ticket_release(r->t);
	r->window = false;
}

/* ---- admission --------------------------------------------------------------------------------------------------- */

/* The record's entry and versions are held since `held`, the entry's block first.  RB_FULL = no node. */
static rb_status
insert_record(rb_thread *t, const rb_key *k, rb_off block, rb_version *v, bool listed, uint32_t held)
{
	rb_buffer  *rb = t->rb;
	rb_status	status = RB_OK;
	rb_path		path;
	bool		equal;
	rb_entry   *e;

	rb_lock(&rb->latch);
	e = rb_find(rb, k, &path, &equal);
	if (rb_ticket_broken_latched(t))
		status = RB_UNKNOWN;
	else if (equal && (rb_flags(e) & RB_SENTINEL))
	{
		rb_entry_resolve(rb, e, rb_offset(rb, v));
		if (listed)
			rb_set(e, RB_LISTED);
		rb_free(rb, block);
		rb_unhold(t, held);
		rb_count(t, RB_C_ADMITTED, 1);
	}
	else if (!equal && (!rb_in_tree(e, k->tree) || (rb_flags(e) & RB_GAP)))
	{
		/* the gap behind it is opened until it is sealed (A2) */
		e = rb_entry_init(rb, block, (rb_slice) {k->data, k->len}, RB_GAP | (listed ? RB_LISTED : 0),
						  rb_offset(rb, v));
		if (rb_entry_add(rb, &path, e))
		{
			rb_unhold(t, held);
			rb_count(t, RB_C_ADMITTED, 1);
		}
		else
			status = RB_FULL;
	}
	rb_unlock(&rb->latch);
	return status;
}

rb_status
rb_admit(rb_thread *t, const st_record *rec, rb_error *err)
{
	rb_buffer  *rb = t->rb;
	rb_slice	key = {rec->key.data, (uint32_t) rec->key.len};
	rb_key		k = rb_mkkey(key.data, key.len);
	uint32_t	held = t->nheld;
	const rb_version *old;
	rb_version *v;
	bool		listed;
	rb_status	status;
	rb_known	known;
	rb_off		block;

	rb_enter(t);
	known = rb_look(t, &k, &old);
	rb_leave(t);
	if (known != RB_K_MISS && known != RB_K_FETCHING)
		return RB_OK;
	block = rb_alloc_evict(t, sizeof(rb_entry) + key.len, &status, err);
	if (!block)
		return status;
	if (!rb_hold(t, block))
		return rb_fail(err, RB_NOMEM, "out of memory");
	status = rb_build(t, rec->value, true, &v, &listed, err);
	for (uint32_t tries = 0; status == RB_FULL && tries < 3; tries++)
	{
		rb_release_held(t, held + 1);
		status = rb_clear_space(t, rec->value.len, err);
		if (status == RB_OK)
			status = rb_build(t, rec->value, true, &v, &listed, err);
	}
	if (status != RB_OK)
	{
		rb_release_held(t, held);
		return status;
	}

	/* a split that goes up needs a node for each level */
	for (uint32_t tries = 0; tries <= RB_MAX_LEVELS; tries++)
	{
		rb_off		node;

		status = insert_record(t, &k, block, v, listed, held);
		if (status != RB_FULL)
			break;
		node = rb_alloc_evict(t, RB_NODE_BYTES, &status, err);
		if (!node)
			break;
		rb_pool_add(rb, node);
		status = rb_fail(err, RB_FULL, "no room for a node in the record buffer: increase nemo.buffer_size");
	}
	rb_release_held(t, held);
	return status;
}

/* Under the latch: makes lo a place from which a gap can be sealed; *path leads to the entry at or before it. */
static rb_entry *
seal_start(rb_thread *t, const range *r, const bound *lo, rb_off *block, rb_path *path)
{
	rb_buffer  *rb = t->rb;
	rb_key		k = rb_mkkey(lo->data, lo->len);
	bool		equal;
	rb_entry   *e = rb_find(rb, &k, path, &equal);

	if (equal)
	{
		/* the answer has no record of this key, or it would be resolved */
		if (rb_flags(e) & RB_SENTINEL)
			rb_entry_resolve(rb, e, 0);
		return e;
	}
	if (rb_in_tree(e, r->tree) && (!(rb_flags(e) & RB_GAP) || follows(lo, e->key, e->klen)))
		return e;
	if (*block)
	{
		e = rb_entry_init(rb, *block, slice(lo), RB_GAP, 0);
		if (rb_entry_add(rb, path, e))
		{
			*block = 0;
			return rb_find(rb, &k, path, &equal);
		}
	}
	/* without: from the first entry in the range on */
	e = rb_path_next(rb, path);
	return e && rb_in_tree(e, r->tree) ? e : NULL;
}

/* Under the latch: an end of the range that is no entry becomes an unresolved sentinel, so that the last gap ends there. */
static void
seal_end(rb_thread *t, const range *r, const bound *hi, rb_off *block)
{
	rb_buffer  *rb = t->rb;
	rb_key		k = rb_mkkey(hi->data, hi->len);
	rb_path		path;
	bool		equal;
	rb_entry   *e;

	if (!*block)
		return;
	e = rb_find(rb, &k, &path, &equal);
	if (equal || (rb_in_tree(e, r->tree) && !(rb_flags(e) & RB_GAP)))
		return;
	if (rb_entry_add(rb, &path, rb_entry_init(rb, *block, slice(hi), RB_GAP | RB_SENTINEL, 0)))
		*block = 0;
}

/*
 * Clears the gap bits of [lo, hi), all of whose stored records are in the buffer and stay there (ticket).
 * anchor_end: hi itself may have to be put there as the end of the last gap.
 */
static rb_status
seal(rb_thread *t, const range *r, const bound *lo, const bound *hi, bool anchor_end, rb_error *err)
{
	rb_buffer  *rb = t->rb;
	uint32_t	held = t->nheld;
	bool		to_tree_end = rb_cmp(hi->data, hi->len, r->tree_end.data, r->tree_end.len) == 0;
	rb_off		first = 0,
				last = 0;
	rb_path		path;
	rb_entry   *x;
	bound		at;
	rb_status	status = RB_OK;
	rb_error	why = {0};

	if (lo->len <= RB_MAX_KEY)
		first = rb_alloc_evict(t, sizeof(rb_entry) + lo->len, &status, &why);
	status = RB_OK;
	if (first && !rb_hold(t, first))
		return rb_fail(err, RB_NOMEM, "out of memory");
	if (anchor_end && !to_tree_end && hi->len <= RB_MAX_KEY)
	{
		last = rb_alloc(rb, sizeof(rb_entry) + hi->len);
		if (last && !rb_hold(t, last))
			return rb_fail(err, RB_NOMEM, "out of memory");
	}

	rb_lock(&rb->latch);
	if (rb_ticket_broken_latched(t))
		status = RB_UNKNOWN;
	else
	{
		/* what is used leaves the two variables 0, what is not is freed below */
		t->nheld = held;
		seal_end(t, r, hi, &last);
		x = seal_start(t, r, lo, &first, &path);
		for (uint32_t n = 0; x; n++)
		{
			rb_path		here = path;
			rb_entry   *y = rb_path_next(rb, &path);
			int			c;

			if (!y || !rb_in_tree(y, r->tree))
			{
				if (to_tree_end)
					rb_set_gap(&here, x, false);
				break;
			}
			c = cmp_bound(y->key, y->klen, hi);
			if (c > 0)
				break;
			rb_set_gap(&here, x, false);
			if (c == 0)
				break;
			if (rb_flags(y) & RB_SENTINEL)
				rb_entry_resolve(rb, y, 0);
			x = y;
			if (n % STEP == STEP - 1)
			{
				rb_key		k;
				bool		equal;

				set_bound(&at, x->key, x->klen);
				rb_unlock(&rb->latch);
				rb_lock(&rb->latch);
				if (rb_ticket_broken_latched(t))
				{
					status = RB_UNKNOWN;
					break;
				}
				k = rb_mkkey(at.data, at.len);
				x = rb_find(rb, &k, &path, &equal);
				if (!equal)
					break;
			}
		}
	}
	rb_unlock(&rb->latch);
	if (t->nheld > held)
		rb_release_held(t, held);
	else
	{
		rb_free(rb, first);
		rb_free(rb, last);
	}
	return status;
}

/* Admits as much of the answer as there is room for, and seals what it covers. */
static rb_status
admit_answer(range *r, rb_error *err)
{
	rb_thread  *t = r->t;
	const st_result *res = &t->result;
	uint32_t	n = 0;
	bound		lo,
				hi;
	bool		anchor_end = r->backward || res->complete;
	rb_status	status = RB_OK;
	rb_error	why = {0};
	size_t		bytes = 0;

	copy_bound(&lo, &r->lo);
	copy_bound(&hi, &r->hi);
	for (uint32_t i = 0; i < res->nrecs; i++)
		bytes += res->recs[i].value.len + res->recs[i].key.len + 64;
	rb_make_room(t, bytes < t->rb->heap_bytes / 8 ? bytes : t->rb->heap_bytes / 8);
	while (n < res->nrecs && (status = rb_admit(t, &res->recs[n], &why)) == RB_OK)
		n++;
	if (status == RB_CORRUPT || status == RB_NOMEM || status == RB_CANCELED)
	{
		*err = why;
		return status;
	}
	if (status == RB_UNKNOWN)
		return status;
	if (n < res->nrecs)
	{
		const st_record *rec;

		if (n == 0)
			return RB_OK;
		rec = &res->recs[n - 1];
		if (r->backward)
			set_bound(&lo, rec->key.data, (uint32_t) rec->key.len);
		else
		{
			set_bound(&hi, rec->key.data, (uint32_t) rec->key.len);
			rb_succ(hi.data, &hi.len);
			anchor_end = false;
		}
	}
	return seal(t, r, &lo, &hi, anchor_end, err);
}

/* Are the records in [lo, hi), in order, and can their keys be ours? */
static bool
sane(const range *r, const bound *lo, const bound *hi)
{
	const st_result *res = &r->t->result;

	for (uint32_t i = 0; i < res->nrecs; i++)
	{
		const st_record *rec = &res->recs[i];

		if (rec->key.len > RB_MAX_KEY || cmp_rec(rec, lo) < 0 || cmp_rec(rec, hi) >= 0)
			return false;
		if (i > 0)
		{
			const st_record *before = &res->recs[i - 1];
			int			c = rb_cmp(before->key.data, (uint32_t) before->key.len, rec->key.data,
								   (uint32_t) rec->key.len);

			if (r->backward ? c <= 0 : c >= 0)
				return false;
		}
	}
	return true;
}

/* Asks for the hole; on RB_OK the window is open. */
static rb_status
fetch(range *r, rb_error *err)
{
	rb_thread  *t = r->t;
	st_result  *res = &t->result;
	const bound *lo = r->backward ? &r->hole : &r->cursor,
			   *hi = r->backward ? &r->cursor : &r->hole;
	st_store   *store = rb_store(t, err);
	rb_status	status;

	if (!store)
		return rb_fail_store(err);
	for (;;)
	{
		rb_ticket_take(t, slice(lo), slice(hi), r->broken < PATIENCE ? RB_TICKET_SOFT : RB_TICKET_FIRM);
		rb_count(t, RB_C_RANGE_FETCHES, 1);
		if (st_get_range(store, (st_slice) {lo->data, lo->len}, (st_slice) {hi->data, hi->len}, r->limit, r->bytes,
						 r->backward, res, &err->st) != ST_OK)
			status = rb_fail_store(err);
		else if (res->nrecs == 0 && !res->complete)
			status = rb_fail(err, RB_STORE, "the store returned neither records nor the end of a range");
		else if (!sane(r, lo, hi))
			status = rb_fail(err, RB_CORRUPT, "the store returned records that were not asked for");
		else
		{
			copy_bound(&r->lo, lo);
			copy_bound(&r->hi, hi);
			if (!res->complete)
			{
				const st_record *last = &res->recs[res->nrecs - 1];

				if (r->backward)
					set_bound(&r->lo, last->key.data, (uint32_t) last->key.len);
				else
				{
					set_bound(&r->hi, last->key.data, (uint32_t) last->key.len);
					rb_succ(r->hi.data, &r->hi.len);
				}
			}
			/* a smaller ticket lets eviction make room for what is to come */
			rb_ticket_narrow(t, slice(&r->lo), slice(&r->hi));
			status = admit_answer(r, err);
			if (status == RB_OK)
			{
				r->window = true;
				r->next = 0;
				return RB_OK;
			}
		}
		rb_ticket_release(t);
		if (status != RB_UNKNOWN)
			return status;
		r->broken++;
	}
}

/* ---- walking ----------------------------------------------------------------------------------------------------- */

/* In the guard.  After it, the cursor is behind the record. */
static step
show(range *r, const uint8_t *key, uint32_t len, const rb_version *head)
{
	bool		more = r->visit(r->arg, r->visited, (rb_slice) {key, len}, head);

	set_bound(&r->cursor, key, len);
	if (!r->backward)
		rb_succ(r->cursor.data, &r->cursor.len);
	r->visited++;
	return !more || r->visited == r->max ? STEP_STOP : STEP_ON;
}

static step
show_record(range *r, const st_record *rec, rb_error *err, rb_status *status)
{
	rb_version *head;
	bool		listed;

	*status = rb_build(r->t, rec->value, false, &head, &listed, err);
	return *status == RB_OK ? show(r, rec->key.data, (uint32_t) rec->key.len, head) : STEP_FAILED;
}

/*
 * Records of the answer before the key in the walk's direction; NULL = all.  at: the key's own record is shown too if
 * there is one, otherwise passed over.
 */
static step
show_answer(range *r, const uint8_t *key, uint32_t len, bool at, rb_error *err, rb_status *status)
{
	const st_result *res = &r->t->result;

	while (r->window && r->next < res->nrecs)
	{
		const st_record *rec = &res->recs[r->next];
		int			c = key ? rb_cmp(rec->key.data, (uint32_t) rec->key.len, key, len) : -1;
		step		s;

		if (key && r->backward)
			c = -c;
		if (c > 0)
			break;
		r->next++;
		/* what lies behind the cursor was shown from the buffer before the window closed on it */
		if (r->backward ? cmp_rec(rec, &r->cursor) >= 0 : cmp_rec(rec, &r->cursor) < 0)
			continue;
		if (c == 0 && !at)
			continue;
		s = show_record(r, rec, err, status);
		if (s != STEP_ON)
			return s;
	}
	return STEP_ON;
}

/* The hole at the cursor reaches up to the next entry behind which something is known. */
static step
hole_forward(range *r, const rb_seen *run, uint32_t i, uint32_t n)
{
	copy_bound(&r->hole, &r->end);
	for (; i < n && cmp_bound(run[i].e->key, run[i].e->klen, &r->end) < 0; i++)
		if (!(run[i].flags & (RB_SENTINEL | RB_GAP)) && cmp_bound(run[i].e->key, run[i].e->klen, &r->cursor) > 0)
		{
			set_bound(&r->hole, run[i].e->key, run[i].e->klen);
			break;
		}
	return STEP_HOLE;
}

static step
walk_forward(range *r, rb_error *err, rb_status *status)
{
	rb_thread  *t = r->t;
	rb_seen		run[RUN];
	rb_key		k = rb_mkkey(r->cursor.data, r->cursor.len);
	uint32_t	n = rb_run_forward(t->rb, &k, run, RUN),
				i = rb_cmp_entry(run[0].e, &k) < 0;
	bool		known = i ? is_known(r, &run[0]) : true;

	if (r->window && rb_ticket_broken(t))
	{
		close_window(r);
		r->broken++;
	}
	for (bool once = true; once || i < n; once = false, i++)
	{
		/* nothing after run[0]: that is the end of everything */
		rb_entry   *e = i < n ? run[i].e : NULL;
		bool		beyond = !e || cmp_bound(e->key, e->klen, &r->end) >= 0;
		const uint8_t *upto = beyond ? r->end.data : e->key;
		uint32_t	upto_len = beyond ? r->end.len : e->klen;
		step		s;

		if (!known && rb_cmp(upto, upto_len, r->cursor.data, r->cursor.len) > 0)
		{
			if (!r->window || rb_cmp(r->cursor.data, r->cursor.len, r->hi.data, r->hi.len) >= 0)
				return hole_forward(r, run, i, n);
			if (rb_cmp(r->hi.data, r->hi.len, upto, upto_len) < 0)
			{
				s = show_answer(r, NULL, 0, false, err, status);
				if (s != STEP_ON)
					return s;
				copy_bound(&r->cursor, &r->hi);
				close_window(r);
				return hole_forward(r, run, i, n);
			}
		}
		/* a sentinel that was not resolved for want of memory, or came since: the answer has it, if it is there */
		s = show_answer(r, upto, upto_len, !beyond && (run[i].flags & RB_SENTINEL), err, status);
		if (s != STEP_ON)
			return s;
		if (beyond)
			return STEP_END;
		if (!(run[i].flags & RB_SENTINEL))
		{
			const rb_version *head = rb_ver_at(t->rb, run[i].head);

			rb_touch(e, run[i].flags);
			s = head ? show(r, e->key, e->klen, head) : STEP_ON;
		}
		else if (!r->window || cmp_bound(e->key, e->klen, &r->hi) >= 0)
		{
			set_bound(&r->cursor, e->key, e->klen);
			return hole_forward(r, run, i, n);
		}
		set_bound(&r->cursor, e->key, e->klen);
		rb_succ(r->cursor.data, &r->cursor.len);
		if (s != STEP_ON)
			return s;
		known = is_known(r, &run[i]);
	}
	return STEP_ON;
}

static step
hole_backward(range *r, const rb_seen *run, uint32_t i, uint32_t n)
{
	copy_bound(&r->hole, &r->start);
	for (; i + 1 < n && cmp_bound(run[i].e->key, run[i].e->klen, &r->start) >= 0; i++)
		if (!(run[i].flags & RB_SENTINEL) && is_known(r, &run[i + 1]) &&
			cmp_bound(run[i].e->key, run[i].e->klen, &r->cursor) < 0)
		{
			set_bound(&r->hole, run[i].e->key, run[i].e->klen);
			rb_succ(r->hole.data, &r->hole.len);
			/* nothing fits in between: the hole is further down */
			if (rb_cmp(r->hole.data, r->hole.len, r->cursor.data, r->cursor.len) < 0)
				break;
			copy_bound(&r->hole, &r->start);
		}
	return STEP_HOLE;
}

static step
walk_backward(range *r, rb_error *err, rb_status *status)
{
	rb_thread  *t = r->t;
	rb_seen		run[RUN];
	rb_key		k = rb_mkkey(r->cursor.data, r->cursor.len);
	uint32_t	n = rb_run_backward(t->rb, &k, run, RUN);

	if (r->window && rb_ticket_broken(t))
	{
		close_window(r);
		r->broken++;
	}
	for (uint32_t i = 0; i < n; i++)
	{
		rb_entry   *e = run[i].e;
		bool		beyond = cmp_bound(e->key, e->klen, &r->start) < 0;
		step		s;

		/* the gap between e, or the start, and the cursor */
		if (!is_known(r, &run[i]) && !follows(&r->cursor, e->key, e->klen) &&
			rb_cmp(r->start.data, r->start.len, r->cursor.data, r->cursor.len) < 0)
		{
			if (!r->window || rb_cmp(r->lo.data, r->lo.len, r->cursor.data, r->cursor.len) >= 0)
				return hole_backward(r, run, i, n);
			if (beyond ? rb_cmp(r->lo.data, r->lo.len, r->start.data, r->start.len) > 0 :
				cmp_bound(e->key, e->klen, &r->lo) < 0 && !follows(&r->lo, e->key, e->klen))
			{
				s = show_answer(r, NULL, 0, false, err, status);
				if (s != STEP_ON)
					return s;
				copy_bound(&r->cursor, &r->lo);
				close_window(r);
				return hole_backward(r, run, i, n);
			}
		}
		s = show_answer(r, beyond ? r->start.data : e->key, beyond ? r->start.len : e->klen,
						beyond || (run[i].flags & RB_SENTINEL), err, status);
		if (s != STEP_ON)
			return s;
		if (beyond)
			return STEP_END;
		if (!(run[i].flags & RB_SENTINEL))
		{
			const rb_version *head = rb_ver_at(t->rb, run[i].head);

			rb_touch(e, run[i].flags);
			s = head ? show(r, e->key, e->klen, head) : STEP_ON;
		}
		else if (!r->window || cmp_bound(e->key, e->klen, &r->lo) < 0)
		{
			set_bound(&r->cursor, e->key, e->klen);
			rb_succ(r->cursor.data, &r->cursor.len);
			return hole_backward(r, run, i, n);
		}
		set_bound(&r->cursor, e->key, e->klen);
		if (s != STEP_ON)
			return s;
	}
	return STEP_ON;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static rb_status
read_range(range *r, rb_error *err)
{
	rb_thread  *t = r->t;
	bool		missed = false;

	rb_count(t, RB_C_RANGE_LOOKUPS, 1);
	for (;;)
	{
		rb_status	status = RB_OK;
		step		s = STEP_END;

		if (rb_cmp(r->start.data, r->start.len, r->end.data, r->end.len) < 0)
		{
			rb_enter(t);
			s = r->backward ? walk_backward(r, err, &status) : walk_forward(r, err, &status);
			rb_leave(t);
		}
		switch (s)
		{
			case STEP_FAILED:
				return status;
			case STEP_STOP:
			case STEP_END:
				if (!missed)
					rb_count(t, RB_C_RANGE_HITS, 1);
				if (s == STEP_END)
					copy_bound(&r->cursor, r->backward ? &r->start : &r->end);
				return RB_OK;
			case STEP_ON:
				break;
			case STEP_HOLE:
				missed = true;
				close_window(r);
				rb_pm_free(t);
				status = fetch(r, err);
				if (status != RB_OK)
					return status;
				break;
		}
	}
}

static void
init_range(range *r, rb_thread *t, rb_slice start, rb_slice end)
{
	r->t = t;
	r->tree = rb_be64(start.data);
	rb_put_be64(r->tree_end.data, r->tree + 1);
	r->tree_end.len = RB_TREE_LEN;
	set_bound(&r->start, start.data, start.len);
	if (rb_cmp(end.data, end.len, r->tree_end.data, RB_TREE_LEN) < 0)
		set_bound(&r->end, end.data, end.len);
	else
		copy_bound(&r->end, &r->tree_end);
	r->broken = 0;
	r->window = false;
	r->visited = r->max = 0;
}

rb_status
rb_read_range(rb_thread *t, rb_slice start, rb_slice end, bool backward, uint32_t max, uint32_t hint, rb_visit visit,
			  void *arg, bool *done, uint8_t *resume, uint32_t *resume_len, rb_error *err)
{
	range		r;
	rb_status	status;

	if (start.len < RB_TREE_LEN || start.len > RB_MAX_KEY + 1 || end.len > RB_MAX_KEY + 1)
		return rb_fail(err, RB_TOOLONG, "bound of %u bytes, at most %u are possible",
					   start.len > end.len ? start.len : end.len, RB_MAX_KEY);
	init_range(&r, t, start, end);
	r.backward = backward;
	copy_bound(&r.cursor, backward ? &r.end : &r.start);
	r.limit = hint < LEAST_FETCH ? LEAST_FETCH : hint > MOST_FETCH ? MOST_FETCH : hint;
	r.bytes = FETCH_BYTES;
	r.visit = visit;
	r.arg = arg;
	r.max = max;
	status = read_range(&r, err);
	*done = rb_cmp(r.cursor.data, r.cursor.len, backward ? r.start.data : r.end.data,
				   backward ? r.start.len : r.end.len) == 0;
	if (status == RB_OK && !*done)
	{
		memcpy(resume, r.cursor.data, r.cursor.len);
		*resume_len = r.cursor.len;
	}
	rb_ticket_release(t);
	rb_release_held(t, 0);
	rb_pm_free(t);
	st_result_free(&t->result);
	return status;
}

rb_status
rb_probe(rb_thread *t, rb_slice key, rb_error *err)
{
	rb_key		k = rb_mkkey(key.data, key.len);
	rb_status	status = RB_OK;
	range		r;

	if (key.len < RB_TREE_LEN || key.len > RB_MAX_KEY)
		return rb_fail(err, RB_TOOLONG, "key of %u bytes, at most %u are possible", key.len, RB_MAX_KEY);
	init_range(&r, t, key, key);
	copy_bound(&r.end, &r.tree_end);
	r.backward = false;
	r.limit = PROBE_FETCH;
	r.bytes = PROBE_BYTES;
	for (uint32_t round = 0; status == RB_OK; round++)
	{
		const rb_version *head;
		rb_known	known;

		rb_enter(t);
		known = rb_look(t, &k, &head);
		rb_leave(t);
		if (known == RB_K_FETCHING)
			status = rb_await_fetch(t, key, round, err);
		else if (known != RB_K_MISS)
			break;
		else if (round > 10)
			status = rb_fail(err, RB_FULL, "no room for a fetched record: increase nemo.buffer_size");
		else
		{
			if (round == 0)
			{
				rb_count(t, RB_C_LOOKUPS, 1);
				rb_count(t, RB_C_MISSES, 1);
			}
			set_bound(&r.cursor, key.data, key.len);
			copy_bound(&r.hole, &r.tree_end);
			status = fetch(&r, err);
			close_window(&r);
		}
	}
	rb_ticket_release(t);
	rb_release_held(t, 0);
	rb_pm_free(t);
	st_result_free(&t->result);
	return status;
}
