/*
 * rb_flush.c
 *	  Writing entries to the store, the checkpoint's sweep, and settling (INVARIANTS C1-C4, C8, C9, E1-E3).
 *
 * One write: mark the entries in flight under the latch; look at their versions and encode them in the guard; leave it;
 * make the log durable; write; then, under the latch, clean those that were acknowledged and did not change.  An entry
 * in flight is neither written by anybody else nor removed, so it may be pointed at without a guard.
 */
#include <stdlib.h>
#include <time.h>
#include "rb_private.h"

#define STEP		32			/* entries under one latch */
#define RUN			64
#define RESOLVES	20			/* attempts to clear up an ambiguous write at once */

/* ---- in flight --------------------------------------------------------------------------------------------------- */

static void
wake_flight(rb_thread *t)
{
	if (atomic_load(&t->rb->flight_waiters))
		t->port->wake(t->port->ctx, RB_CH_FLIGHT);
}

static void
give_up(rb_thread *t, uint32_t i, rb_outcome outcome)
{
	rb_flight  *f = &t->flights[i];

	rb_free(t->rb, f->newv);
	rb_clear(f->e, RB_INFLIGHT);
	t->outcome[f->cand] = outcome;
	*f = t->flights[--t->nflights];
}

static void
give_up_all(rb_thread *t)
{
	bool		any = t->nflights > 0;

	while (t->nflights)
		give_up(t, t->nflights - 1, RB_O_FAILED);
	if (any)
		wake_flight(t);
}

static bool
grow_doubts(rb_thread *t, uint32_t more)
{
	if (t->ndoubts + more > t->doubts_cap)
	{
		uint32_t	cap = 2 * (t->ndoubts + more);
		rb_entry  **p = realloc(t->doubts, cap * sizeof(*p));

		if (!p)
			return false;
		t->doubts = p;
		t->doubts_cap = cap;
	}
	return true;
}

/* After an error exit: what has not left is free again, the rest may have landed. */
void
rb_abandon_flights(rb_thread *t)
{
	for (uint32_t i = 0; t->sent && i < t->nflights; i++)
	{
		t->doubts[t->ndoubts++] = t->flights[i].e;	/* room was made before it left */
		rb_set(t->flights[i].e, RB_DOUBT);
	}
	t->sent = false;
	while (t->nflights)
		give_up(t, t->nflights - 1, RB_O_FAILED);
}

rb_status
rb_resolve_doubts(rb_thread *t, rb_error *err)
{
	st_store   *store;

	if (!t->ndoubts)
		return RB_OK;
	store = rb_store(t, err);
	if (!store || st_resolve(store, &err->st) != ST_OK)
		return rb_fail_store(err);
	while (t->ndoubts)
		rb_clear(t->doubts[--t->ndoubts], RB_DOUBT);
	wake_flight(t);
	return RB_OK;
}

/* ---- what to write ----------------------------------------------------------------------------------------------- */

typedef struct rb_plan
{
	rb_form		form;			/* RB_FORM_NONE: busy */
	uint32_t	n;				/* of t->sv */
	bool		unsettled,		/* versions with an xid are among them */
				news,			/* something settled or aborted since it was written with its xid */
				locked;			/* a running row lock */
	uint64_t	lowest,			/* xid */
				lsn;
} rb_plan;

static bool
add_version(rb_thread *t, rb_plan *p, rb_stored_version v)
{
	if (p->n == t->sv_cap)
	{
		uint32_t	cap = t->sv_cap ? 2 * t->sv_cap : 16;
		rb_stored_version *n = realloc(t->sv, cap * sizeof(*n));

		if (!n)
			return false;
		t->sv = n;
		t->sv_cap = cap;
	}
	t->sv[p->n++] = v;
	return true;
}

/* In the guard.  false = no private memory. */
static bool
plan_chain(rb_thread *t, const rb_version *head, rb_plan *p)
{
	bool		data = false;

	memset(p, 0, sizeof(*p));
	for (const rb_version *v = head; v; v = rb_older(v))
	{
		const rb_xversion *x = rb_x(v);
		rb_stored_version sv = {.kind = v->kind, .tag = v->tag, .data = {rb_data(v), v->len}};
		uint64_t	lsn;
		uint16_t	flags;
		rb_xid_state state;

		if (!x)
		{
			if (v->kind == RB_DATA || p->n > 0)
			{
				if (!add_version(t, p, sv))
					return false;
			}
			data = data || v->kind == RB_DATA;
			break;
		}
		lsn = atomic_load(&((rb_xversion *) x)->lsn);
		flags = atomic_load_explicit(&((rb_version *) v)->flags, memory_order_acquire);
		if (lsn == RB_LSN_PENDING)
			return true;
		state = (flags & RB_HINT_ABORTED) ? RB_XID_ABORTED : t->port->xid_state(t->port->ctx, x->xid);
		if (v->kind == RB_LOCK)
		{
			p->locked = p->locked || state == RB_XID_RUNNING;
			continue;
		}
		if (state == RB_XID_ABORTED)
		{
			p->news = true;
			continue;
		}
		/* its owner still points at it, to confirm or to withdraw */
		if ((flags & RB_SPECULATIVE) && state == RB_XID_RUNNING)
			return true;
		if (lsn > p->lsn)
			p->lsn = lsn;
		if (state == RB_XID_SETTLED)
			p->news = true;
		else
		{
			sv.xid = x->xid;
			sv.cid = x->cid;
			sv.aux = x->aux;
			p->unsettled = true;
			if (!p->lowest || x->xid < p->lowest)
				p->lowest = x->xid;
		}
		if (!add_version(t, p, sv))
			return false;
		data = data || v->kind == RB_DATA;
		if (state == RB_XID_SETTLED)
			break;
	}
	/* deletions of nothing that anybody can see */
	if (!data || (p->n > 0 && t->sv[0].xid == 0 && t->sv[0].kind == RB_DELETE))
		p->form = RB_FORM_DELETE;
	else
		p->form = p->unsettled ? RB_FORM_LIST : RB_FORM_SETTLED;
	return true;
}

static uint8_t *
enc_room(rb_thread *t, size_t used, size_t more)
{
	if (used + more > t->enc_cap)
	{
		size_t		cap = 2 * t->enc_cap > used + more ? 2 * t->enc_cap : used + more + 4096;
		uint8_t    *p = realloc(t->enc, cap);

		if (!p)
			return NULL;
		t->enc = p;
		t->enc_cap = cap;
	}
	return t->enc + used;
}

/* Off the latch, for replacing a chain once the store has it settled.  Nothing is lost when there is no memory. */
static rb_off
short_version(rb_thread *t, const rb_stored_version *sv)
{
	rb_version *v = rb_version_alloc(t->rb, sv->data.len, true);

	if (!v)
		return 0;
	v->tag = sv->tag;
	if (sv->data.len)
		memcpy((uint8_t *) rb_data(v), sv->data.data, sv->data.len);
	return rb_offset(t->rb, v);
}

static void
mark_in_flight(rb_thread *t)
{
	rb_buffer  *rb = t->rb;

	t->nflights = 0;
	for (uint32_t i = 0; i < t->ncand;)
	{
		rb_lock(&rb->latch);
		for (uint32_t stop = i + STEP; i < t->ncand && i < stop; i++)
		{
			rb_entry   *e = t->cand[i];
			uint16_t	f = rb_flags(e);

			if ((f & RB_DEAD) || !(f & (RB_DIRTY | RB_LISTED)))
				t->outcome[i] = RB_O_CLEAN;
			else if (f & (RB_INFLIGHT | RB_DOUBT))
				t->outcome[i] = RB_O_BUSY;
			else
			{
				rb_clear(e, RB_RENEWED);
				rb_set(e, RB_INFLIGHT);
				atomic_store(&e->owner, (uint16_t) t->slotno);
				t->flights[t->nflights++] = (rb_flight)
				{
					.e = e, .head = rb_ver_at(rb, rb_head(e)), .cand = i
				};
			}
		}
		rb_unlock(&rb->latch);
	}
}

/* In the guard: encodes what is in flight; what cannot go now is taken out.  *lsn: the log must be durable up to it. */
static rb_status
encode_flights(rb_thread *t, uint64_t *lsn, rb_error *err)
{
	size_t		used = 0;

	*lsn = 0;
	for (uint32_t i = 0; i < t->nflights;)
	{
		rb_flight  *f = &t->flights[i];
		bool		dirty = rb_flags(f->e) & RB_DIRTY;
		rb_plan		p;
		uint8_t    *out;

		if (used >= RB_BATCH_BYTES)
		{
			give_up(t, i, RB_O_BUSY);
			continue;
		}
		if (!plan_chain(t, f->head, &p))
			return rb_fail(err, RB_NOMEM, "out of memory");
		if (p.form == RB_FORM_NONE)
		{
			give_up(t, i, RB_O_BUSY);
			continue;
		}
		/* a stored list is written again only when there is something to say */
		if (!dirty && !p.news)
		{
			give_up(t, i, RB_O_CLEAN);
			continue;
		}
		f->form = p.form;
		f->at = used;
		f->len = 0;
		f->keep_head = p.locked || !f->head || rb_is_settled(f->head);
		if (p.form != RB_FORM_DELETE)
		{
			f->len = rb_encoded_size(t->sv, p.n);
			out = enc_room(t, used, f->len);
			if (!out)
				return rb_fail(err, RB_NOMEM, "out of memory");
			rb_encode_record(t->sv, p.n, out);
			used += f->len;
		}
		if (p.form == RB_FORM_SETTLED && !f->keep_head)
		{
			f->newv = short_version(t, &t->sv[0]);
			f->keep_head = !f->newv;
		}
		if (p.form == RB_FORM_LIST)
			t->port->note_unsettled(t->port->ctx, rb_be64(f->e->key), p.lowest);
		if (p.lsn > *lsn)
			*lsn = p.lsn;
		i++;
	}
	return RB_OK;
}

/* Under the latch: the answer for one entry. */
static void
land_one(rb_thread *t, rb_flight *f, bool acked, bool ambiguous)
{
	rb_buffer  *rb = t->rb;
	rb_entry   *e = f->e;
	bool		same = !(rb_flags(e) & RB_RENEWED);

	if (acked && same)
	{
		rb_version *old = rb_ver_at(rb, rb_head(e));

		rb_entry_clean(rb, e);
		if (f->form == RB_FORM_LIST)
			rb_set(e, RB_LISTED);
		else
			rb_clear(e, RB_LISTED);
		if (!f->keep_head && f->form != RB_FORM_LIST)
		{
			rb_entry_set_head(rb, e, f->newv);
			f->newv = 0;
			rb_retire(rb, RB_DEAD_CHAIN, rb_offset(rb, old));
		}
	}
	if (!acked && ambiguous)
	{
		t->doubts[t->ndoubts++] = e;
		rb_set(e, RB_DOUBT);
	}
	rb_clear(e, RB_INFLIGHT);
	t->outcome[f->cand] = acked ? RB_O_WRITTEN : RB_O_FAILED;
}

static void
land_flights(rb_thread *t, const bool *acked, bool ambiguous)
{
	rb_buffer  *rb = t->rb;
	uint32_t	good = 0;

	for (uint32_t i = 0; i < t->nflights;)
	{
		rb_lock(&rb->latch);
		for (uint32_t stop = i + STEP; i < t->nflights && i < stop; i++)
		{
			land_one(t, &t->flights[i], acked[i], ambiguous);
			good += acked[i];
		}
		rb_unlock(&rb->latch);
	}
	for (uint32_t i = 0; i < t->nflights; i++)
		rb_free(rb, t->flights[i].newv);
	t->nflights = 0;
	rb_count(t, RB_C_FLUSHED, good);
	wake_flight(t);
}

rb_status
rb_flush_cand(rb_thread *t, rb_error *err)
{
	st_op		ops[RB_BATCH];
	bool		acked[RB_BATCH] = {false};
	uint64_t	lsn;
	st_store   *store = NULL;
	st_status	st;
	rb_status	status;

	memset(t->outcome, RB_O_FAILED, t->ncand);
	mark_in_flight(t);
	status = encode_flights(t, &lsn, err);
	rb_leave(t);
	if (status == RB_OK && t->nflights == 0)
		return RB_OK;
	/* own doubts first: nothing newer may leave before (C4) */
	if (status == RB_OK)
		status = rb_resolve_doubts(t, err);
	if (status == RB_OK && lsn && t->port->wal_flush(t->port->ctx, lsn) != 0)
		status = rb_fail(err, RB_STORE, "the log could not be made durable up to position %llu",
						 (unsigned long long) lsn);
	if (status == RB_OK && (store = rb_store(t, err)) == NULL)
		status = rb_fail_store(err);
	if (status == RB_OK && !grow_doubts(t, t->nflights))
		status = rb_fail(err, RB_NOMEM, "out of memory");
	if (status != RB_OK)
	{
		give_up_all(t);
		return status;
	}

	for (uint32_t i = 0; i < t->nflights; i++)
	{
		rb_flight  *f = &t->flights[i];

		ops[i] = (st_op)
		{
			.key = {f->e->key, f->e->klen}, .value = {t->enc + f->at, f->len}, .del = f->form == RB_FORM_DELETE
		};
	}
	err->st.ambiguous = false;
	t->sent = true;
	st = st_write(store, ops, t->nflights, acked, &err->st);
	t->sent = false;
	if (st == ST_OK)
	{
		land_flights(t, acked, false);
		return RB_OK;
	}
	land_flights(t, acked, err->st.ambiguous);
	status = rb_fail_store(err);
	/* the sooner the better: others wait for these keys and cannot do it for us */
	for (uint32_t i = 0; t->ndoubts && i < RESOLVES; i++)
	{
		rb_error	again = {0};

		if (rb_resolve_doubts(t, &again) == RB_OK)
			break;
		if (i > 4)
			nanosleep(&(struct timespec) {0, 100000}, NULL);
	}
	return status;
}

/* ---- sweeps ------------------------------------------------------------------------------------------------------ */

/* Collects candidates of [cursor, end) and moves cursor behind what was looked at; true = the end was reached. */
static bool
collect(rb_thread *t, uint8_t *cursor, uint32_t *len, rb_slice end)
{
	t->ncand = 0;
	while (t->ncand + RUN <= RB_BATCH)
	{
		rb_seen		run[RUN];
		rb_key		k = rb_mkkey(cursor, *len);
		uint32_t	n = rb_run_forward(t->rb, &k, run, RUN);
		bool		moved = false;

		for (uint32_t i = 0; i < n; i++)
		{
			rb_entry   *e = run[i].e;

			if (i == 0 && rb_cmp_entry(e, &k) < 0)
				continue;
			if (end.len && rb_cmp(e->key, e->klen, end.data, end.len) >= 0)
				return true;
			if (run[i].flags & (RB_DIRTY | RB_LISTED))
				t->cand[t->ncand++] = e;
			memcpy(cursor, e->key, e->klen);
			*len = e->klen;
			moved = true;
		}
		if (!moved)
			return true;
		rb_succ(cursor, len);
	}
	return false;
}

/*
 * end.len == 0: no upper bound.  Re-enters by key, so splits and merges hide nothing (E3).  With wait, every entry that
 * was dirty when the call began has been acknowledged on RB_OK: one that was busy is looked at again until it is not.
 */
rb_status
rb_flush_range(rb_thread *t, rb_slice start, rb_slice end, bool wait, rb_error *err)
{
	uint8_t		cursor[RB_MAX_KEY + 8],
				first[RB_MAX_KEY + 8],
				last[RB_MAX_KEY + 8];
	uint32_t	len = start.len,
				first_len,
				last_len;
	rb_status	status = rb_resolve_doubts(t, err);
	bool		done = false;

	if (status != RB_OK && wait)
		return status;
	memcpy(cursor, start.data, len);
	while (!done)
	{
		rb_slice	part_end = end;
		bool		again = false;

		memcpy(first, cursor, len);
		first_len = len;
		for (uint32_t rounds = 0; rounds == 0 || again; rounds++)
		{
			bool		reached;

			/* again: only up to where the first round came */
			if (rounds > 0)
			{
				memcpy(cursor, first, first_len);
				len = first_len;
			}
			rb_enter(t);
			reached = collect(t, cursor, &len, part_end);
			if (t->ncand)
				status = rb_flush_cand(t, err);
			else
			{
				rb_leave(t);
				status = RB_OK;
			}
			if (status != RB_OK)
				return status;
			if (rounds == 0)
			{
				done = reached;
				memcpy(last, cursor, len);
				last_len = len;
				if (!reached)
					part_end = (rb_slice) {last, last_len};
			}
			else if (!reached)
			{
				/* more came in: go on with what is left of this part later */
				done = false;
			}
			again = false;
			for (uint32_t i = 0; wait && i < t->ncand; i++)
				again = again || t->outcome[i] == RB_O_BUSY;
			if (again)
			{
				if (t->port->interrupted(t->port->ctx))
					return rb_fail(err, RB_CANCELED, "canceled while waiting for records in use to be flushed");
				rb_wait(t, rounds % 2 ? &t->rb->stamp_waiters : &t->rb->flight_waiters,
						rounds % 2 ? RB_CH_STAMP : RB_CH_FLIGHT, rounds < 10 ? 1 : 10);
			}
		}
	}
	return RB_OK;
}

rb_status
rb_flush_all(rb_thread *t, rb_error *err)
{
	return rb_flush_range(t, (rb_slice) {(const uint8_t *) "", 0}, (rb_slice) {NULL, 0}, true, err);
}

/* ---- settling ---------------------------------------------------------------------------------------------------- */

typedef struct rb_news
{
	rb_thread  *t;
	bool		news;
} rb_news;

static bool
has_news(void *arg, const rb_stored_version *v)
{
	rb_news    *n = arg;

	if (v->xid)
	{
		rb_xid_state s = n->t->port->xid_state(n->t->port->ctx, v->xid);

		n->news = n->news || s == RB_XID_SETTLED || s == RB_XID_ABORTED;
	}
	return !n->news;
}

rb_status
rb_settle_range(rb_thread *t, rb_slice start, rb_slice end, rb_error *err)
{
	uint8_t		cursor[RB_MAX_KEY + 8],
				next[RB_MAX_KEY + 8];
	uint32_t	len = start.len,
				next_len,
				rounds = 0;
	rb_status	status = RB_OK;
	bool		done = false;

	memcpy(cursor, start.data, len);
	while (status == RB_OK && !done)
	{
		st_store   *store = rb_store(t, err);

		if (!store)
			return rb_fail_store(err);
		rb_ticket_take(t, (rb_slice) {cursor, len}, end, rounds < 3 ? RB_TICKET_SOFT : RB_TICKET_FIRM);
		if (st_get_range(store, (st_slice) {cursor, len}, (st_slice) {end.data, end.len}, RB_BATCH, RB_BATCH_BYTES, false,
						 &t->result, &err->st) != ST_OK)
			status = rb_fail_store(err);
		else if (t->result.nrecs == 0 && !t->result.complete)
			status = rb_fail(err, RB_STORE, "the store returned neither records nor the end of a range");
		else
		{
			done = t->result.complete;
			memcpy(next, end.data, end.len);
			next_len = end.len;
			if (!done)
			{
				const st_record *last = &t->result.recs[t->result.nrecs - 1];

				next_len = (uint32_t) last->key.len;
				memcpy(next, last->key.data, next_len);
				rb_succ(next, &next_len);
			}
			/* a smaller ticket lets eviction make room for what is to come */
			rb_ticket_narrow(t, (rb_slice) {cursor, len}, (rb_slice) {next, next_len});
			for (uint32_t i = 0; status == RB_OK && i < t->result.nrecs; i++)
			{
				rb_news		n = {t, false};
				const st_record *rec = &t->result.recs[i];

				if (rec->key.len > RB_MAX_KEY ||
					!rb_decode_record(rec->value.data, rec->value.len, has_news, &n))
					status = rb_fail(err, RB_CORRUPT, "a stored record is damaged");
				else if (n.news)
					status = rb_admit(t, rec, err);	/* the flush that follows writes it again */
			}
			if (status == RB_UNKNOWN)
			{
				/* what was read may be old by now */
				rb_ticket_release(t);
				status = RB_OK;
				done = false;
				rounds++;
				continue;
			}
			rounds = 0;
			if (status == RB_OK)
				status = rb_flush_range(t, (rb_slice) {cursor, len}, (rb_slice) {next, next_len}, true, err);
			memcpy(cursor, next, next_len);
			len = next_len;
		}
		rb_ticket_release(t);
	}
	st_result_free(&t->result);
	rb_reclaim(t->rb);
	return status;
}
