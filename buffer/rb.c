/*
 * rb.c
 *	  Set-up, guards, tickets, spin latches, private memory and statistics of the record buffer.
 */
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "rb_private.h"

#define MAGIC		UINT64_C(0x6e656d6f72623031)
#define LEAST_HEAP	(96 * 1024)

/* ---- latches ----------------------------------------------------------------------------------------------------- */

bool
rb_trylock(_Atomic uint32_t *lock)
{
	uint32_t	free = 0;

	return atomic_load_explicit(lock, memory_order_relaxed) == 0 &&
		atomic_compare_exchange_strong_explicit(lock, &free, 1, memory_order_acquire, memory_order_relaxed);
}

/* The holder may have lost its processor: spin a little, then let others run, then sleep. */
void
rb_lock(_Atomic uint32_t *lock)
{
	for (uint32_t tries = 0; !rb_trylock(lock); tries++)
	{
		if (tries < 100)
		{
#if defined(__x86_64__) || defined(__i386__)
			__builtin_ia32_pause();
#endif
		}
		else if (tries < 200)
			sched_yield();
		else
			nanosleep(&(struct timespec) {0, 20000}, NULL);
	}
}

void
rb_unlock(_Atomic uint32_t *lock)
{
	atomic_store_explicit(lock, 0, memory_order_release);
}

/* ---- errors, private memory -------------------------------------------------------------------------------------- */

rb_status
rb_fail(rb_error *err, rb_status status, const char *fmt,...)
{
	va_list		ap;

	if (!err)
		return status;
	err->st.code = status == RB_CORRUPT ? ST_CORRUPT : status == RB_CANCELED ? ST_CANCELED :
		status == RB_TOOLONG ? ST_INVALID : status == RB_STORE ? ST_UNAVAILABLE : ST_NOMEM;
	err->st.ambiguous = false;
	va_start(ap, fmt);
	vsnprintf(err->st.message, sizeof(err->st.message), fmt, ap);
	va_end(ap);
	return status;
}

rb_status
rb_fail_store(rb_error *err)
{
	if (!err)
		return RB_STORE;
	if (!err->st.message[0])
		snprintf(err->st.message, sizeof(err->st.message), "the store failed: %s", st_status_name(err->st.code));
	return err->st.code == ST_CANCELED ? RB_CANCELED : RB_STORE;
}

st_store *
rb_store(rb_thread *t, rb_error *err)
{
	if (!t->store && t->open)
		t->store = t->open(t->open_arg, &err->st);
	else if (!t->store)
		rb_fail(err, RB_STORE, "no store has been set");
	return t->store;
}

struct rb_block
{
	struct rb_block *next;
	size_t		used, size;
	_Alignas(16) uint8_t bytes[];
};

void *
rb_pm_alloc(rb_thread *t, size_t size)
{
	struct rb_block *b = t->pm;
	void	   *p;

	size = (size + 15) & ~(size_t) 15;
	if (!b || b->size - b->used < size)
	{
		size_t		room = size > 8192 ? size : 8192;

		b = malloc(sizeof(*b) + room);
		if (!b)
			return NULL;
		b->next = t->pm;
		b->used = 0;
		b->size = room;
		t->pm = b;
	}
	p = b->bytes + b->used;
	b->used += size;
	return p;
}

void
rb_pm_free(rb_thread *t)
{
	while (t->pm)
	{
		struct rb_block *next = t->pm->next;

		free(t->pm);
		t->pm = next;
	}
}

uint64_t
rb_random(rb_thread *t)
{
	uint64_t	z = (t->rng += UINT64_C(0x9e3779b97f4a7c15));

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

static void
stop_waiting(rb_thread *t)
{
	if (t->waiting)
		atomic_fetch_sub(t->waiting, 1);
	t->waiting = NULL;
}

void
rb_wait(rb_thread *t, _Atomic uint32_t *waiters, uint32_t channel, uint32_t timeout_ms)
{
	if (waiters)
		atomic_fetch_add(waiters, 1);
	t->waiting = waiters;
	t->port->wait(t->port->ctx, channel, timeout_ms);
	stop_waiting(t);
}

/* ---- set-up ------------------------------------------------------------------------------------------------------ */

static size_t
fixed_bytes(uint32_t max_threads)
{
	return sizeof(rb_buffer) + (size_t) max_threads * sizeof(rb_slot);
}

size_t
rb_min_size(uint32_t max_threads)
{
	size_t		size = fixed_bytes(max_threads) + LEAST_HEAP + ((size_t) max_threads + 16) * (RB_NODE_BYTES + 8);

	return (size + 4095) & ~(size_t) 4095;
}

rb_buffer *
rb_create(void *arena, size_t size, uint32_t max_threads)
{
	rb_buffer  *rb = arena;

	if (size < rb_min_size(max_threads) || max_threads == 0 || max_threads > UINT16_MAX)
		return NULL;
	memset(arena, 0, fixed_bytes(max_threads));
	rb->size = size < RB_MAX_ARENA ? size : RB_MAX_ARENA - 4096;
	rb->max_threads = max_threads;
	rb->heap_first = fixed_bytes(max_threads);
	rb->heap_end = rb->size;
	atomic_store(&rb->epoch, 3);	/* a guard's epoch is never 0 */
	rb_heap_init(rb);
	if (!rb_tree_init(rb))
		return NULL;
	rb->magic = MAGIC;
	return rb;
}

rb_thread *
rb_attach(rb_buffer *rb, uint32_t slot, const rb_port *port)
{
	rb_thread  *t;

	if (slot >= rb->max_threads || !(t = calloc(1, sizeof(*t))))
		return NULL;
	t->rb = rb;
	t->slot = &rb->slots[slot];
	t->slotno = slot;
	t->port = port;
	t->rng = (uint64_t) slot * 7919 + 12345;
	t->flights = calloc(RB_BATCH, sizeof(rb_flight));
	t->cand = calloc(RB_BATCH, sizeof(rb_entry *));
	t->victims = calloc(RB_VICTIMS, sizeof(rb_victims));
	t->outcome = calloc(RB_BATCH, 1);
	if (!t->flights || !t->cand || !t->outcome || !t->victims)
	{
		free(t->flights);
		free(t->cand);
		free(t->victims);
		free(t->outcome);
		free(t);
		return NULL;
	}
	atomic_store(&t->slot->epoch, 0);
	atomic_store(&t->slot->attached, 1);
	return t;
}

void
rb_detach(rb_thread *t)
{
	rb_error	err = {0};

	rb_reset(t);
	while (t->nreserves)
		rb_version_free(t, t->reserves[t->nreserves - 1].v);
	rb_free(t->rb, t->spare);
	if (t->ndoubts)
		(void) rb_resolve_doubts(t, &err);
	if (t->store)
		st_close(t->store);
	rb_reclaim(t->rb);
	atomic_store(&t->slot->attached, 0);
	free(t->reserves);
	free(t->held);
	free(t->flights);
	free(t->enc);
	free(t->sv);
	free(t->cand);
	free(t->victims);
	free(t->outcome);
	free(t->doubts);
	free(t);
}

void
rb_set_store(rb_thread *t, st_store *(*open) (void *arg, st_error *err), void *arg)
{
	t->open = open;
	t->open_arg = arg;
}

void
rb_reset(rb_thread *t)
{
	stop_waiting(t);
	rb_release_held(t, 0);
	rb_abandon_flights(t);
	rb_ticket_release(t);
	rb_release_mine(t);
	t->depth = 0;
	atomic_store(&t->slot->epoch, 0);
	rb_pm_free(t);
	st_result_free(&t->result);
	t->pressed = false;
}

/* ---- guards ------------------------------------------------------------------------------------------------------ */

void
rb_enter(rb_thread *t)
{
	uint64_t	e;

	if (t->depth++)
		return;
	do
	{
		e = atomic_load(&t->rb->epoch);
		atomic_store(&t->slot->epoch, e);
	} while (atomic_load(&t->rb->epoch) != e);
}

void
rb_leave(rb_thread *t)
{
	if (--t->depth)
		return;
	atomic_store_explicit(&t->slot->epoch, 0, memory_order_release);
	if (atomic_load_explicit(&t->rb->limbo_n, memory_order_relaxed) > 128)
		rb_reclaim(t->rb);
}

/* ---- tickets ----------------------------------------------------------------------------------------------------- */

static void
set_bounds(rb_slot *s, rb_slice start, rb_slice end)
{
	memmove(s->tstart, start.data, start.len);
	memmove(s->tend, end.data, end.len);
	s->tstart_len = start.len;
	s->tend_len = end.len;
}

void
rb_ticket_take(rb_thread *t, rb_slice start, rb_slice end, uint32_t kind)
{
	rb_lock(&t->rb->latch);
	set_bounds(t->slot, start, end);
	t->slot->broken = false;
	atomic_store_explicit(&t->slot->ticket, kind, memory_order_release);
	atomic_fetch_add(&t->rb->ntickets, 1);
	rb_unlock(&t->rb->latch);
}

void
rb_ticket_narrow(rb_thread *t, rb_slice start, rb_slice end)
{
	rb_lock(&t->rb->latch);
	set_bounds(t->slot, start, end);
	rb_unlock(&t->rb->latch);
}

bool
rb_ticket_broken_latched(rb_thread *t)
{
	return t->slot->broken;
}

bool
rb_ticket_broken(rb_thread *t)
{
	bool		broken;

	rb_lock(&t->rb->latch);
	broken = t->slot->broken;
	rb_unlock(&t->rb->latch);
	return broken;
}

void
rb_ticket_release(rb_thread *t)
{
	if (!atomic_load_explicit(&t->slot->ticket, memory_order_relaxed))
		return;
	atomic_store_explicit(&t->slot->ticket, 0, memory_order_release);
	atomic_fetch_sub(&t->rb->ntickets, 1);
}

bool
rb_ticketed(rb_thread *t, const rb_entry *e)
{
	rb_buffer  *rb = t->rb;
	bool		kept = false;

	if (!atomic_load(&rb->ntickets))
		return false;
	for (int pass = 0; pass < 2 && !kept; pass++)
		for (uint32_t i = 0; i < rb->max_threads; i++)
		{
			rb_slot    *s = &rb->slots[i];
			uint32_t	ticket = atomic_load_explicit(&s->ticket, memory_order_acquire);

			if (!ticket || rb_cmp(e->key, e->klen, s->tstart, s->tstart_len) < 0 ||
				rb_cmp(e->key, e->klen, s->tend, s->tend_len) >= 0)
				continue;
			if (pass > 0)
				s->broken = true;
			else if (!t->pressed || ticket == RB_TICKET_FIRM || s == t->slot)
				kept = true;
		}
	return kept;
}

/* ---- statistics -------------------------------------------------------------------------------------------------- */

static uint64_t
counter(const rb_buffer *rb, rb_counter c)
{
	uint64_t	n = 0;

	for (uint32_t i = 0; i < rb->max_threads; i++)
		n += atomic_load_explicit((_Atomic uint64_t *) &rb->slots[i].counter[c], memory_order_relaxed);
	return n;
}

void
rb_get_stats(rb_buffer *rb, rb_stats *out)
{
	uint64_t	n[RB_COUNTERS];

	for (int c = 0; c < RB_COUNTERS; c++)
		n[c] = counter(rb, (rb_counter) c) - atomic_load(&rb->base[c]);
	*out = (rb_stats)
	{
		.size_bytes = rb->heap_bytes,
		.used_bytes = rb->heap_bytes - atomic_load(&rb->free_bytes),
		.entries = atomic_load(&rb->entries),
		.tombstones = atomic_load(&rb->tombstones),
		.dirty = atomic_load(&rb->dirty),
		.lookups = n[RB_C_LOOKUPS],
		.hits = n[RB_C_HITS],
		.tombstone_hits = n[RB_C_TOMBSTONE_HITS],
		.gap_hits = n[RB_C_GAP_HITS],
		.misses = n[RB_C_MISSES],
		.range_lookups = n[RB_C_RANGE_LOOKUPS],
		.range_hits = n[RB_C_RANGE_HITS],
		.range_fetches = n[RB_C_RANGE_FETCHES],
		.admitted = n[RB_C_ADMITTED],
		.evicted = n[RB_C_EVICTED],
		.flushed = n[RB_C_FLUSHED],
		.key_bytes = atomic_load(&rb->key_bytes),
		.value_bytes = atomic_load(&rb->value_bytes),
	};
}

void
rb_stats_reset(rb_buffer *rb)
{
	for (int c = 0; c < RB_COUNTERS; c++)
		atomic_store(&rb->base[c], counter(rb, (rb_counter) c));
}
