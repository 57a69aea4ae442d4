/*
 * stress.c
 *	  Threads on one record buffer over a store that delays, fails and reorders; for ThreadSanitizer and plain use.
 *
 * Three trees, each with a promise that every snapshot can verify whatever the others do (INVARIANTS A-C):
 *	accounts	transfers between records; the sum never changes, none vanishes, a record's counter never goes back
 *	pairs		of two neighbouring keys exactly one exists; a transaction swaps them
 *	nothing		keys that never existed, and an occasional insertion that is rolled back
 * Beside writers and readers, an evictor and a checkpointer (flush, sync, settle, evict a tree) run all the time.
 * Transactions are a commit counter: a snapshot is its value.
 *
 *	stress [--seconds N] [--threads N] [--seed N]
 */
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>
#include "testlib.h"

#define NACC		300
#define NPAIRS		150
#define NNONE		200
#define START		1000		/* balance of each account */
#define MAXTHREADS	16
#define MAXXIDS		(1u << 22)
#define ABORTED		UINT64_MAX
#define T_ACC		7
#define T_PAIR		8
#define T_NONE		9

typedef struct payload
{
	int64_t		balance;
	uint64_t	count;			/* of updates of this record */
} payload;

typedef struct worker
{
	uint32_t	slot;
	rb_thread  *t;
	tl_rng		rng;
	uint64_t	snap;			/* 0 = none registered */
	uint64_t	seen[NACC];
	uint64_t	commits, aborts, scans, points, errors, full, jumps;
	jmp_buf		jump;
} worker;

static fs_store *fs;
static rb_buffer *rb;
static _Atomic bool stop;
static _Atomic uint64_t failures;
static double deadline;

/* cseq[xid]: 0 = running, ABORTED, else its place among the commits */
static _Atomic uint64_t *cseq;
static _Atomic uint64_t next_xid = 1;
static pthread_mutex_t txn_mu = PTHREAD_MUTEX_INITIALIZER;
static uint64_t commit_counter = 1;
static uint64_t snaps[MAXTHREADS];
static _Atomic uint64_t horizon = 1;
static _Atomic uint64_t lsn_end = 1,
			lsn_durable;

static pthread_mutex_t ch_mu[RB_CHANNELS];
static pthread_cond_t ch_cv[RB_CHANNELS];
static _Thread_local bool impatient;

static void __attribute__((format(printf, 1, 2)))
failed(const char *fmt, ...)
{
	va_list		ap;

	flockfile(stdout);
	printf("FAILED: ");
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n");
	fflush(stdout);
	funlockfile(stdout);
	if (atomic_fetch_add(&failures, 1) > 20)
		_exit(1);
}

/* ---- transactions and port --------------------------------------------------------------------------------------- */

static void
new_horizon(void)
{
	uint64_t	h = commit_counter;

	for (int i = 0; i < MAXTHREADS; i++)
		if (snaps[i] && snaps[i] < h)
			h = snaps[i];
	atomic_store(&horizon, h);
}

static void
take_snapshot(worker *w)
{
	pthread_mutex_lock(&txn_mu);
	w->snap = snaps[w->slot] = commit_counter;
	new_horizon();
	pthread_mutex_unlock(&txn_mu);
}

static void
end_snapshot(worker *w)
{
	pthread_mutex_lock(&txn_mu);
	w->snap = snaps[w->slot] = 0;
	new_horizon();
	pthread_mutex_unlock(&txn_mu);
}

static void
end_txn(uint64_t xid, bool commit)
{
	pthread_mutex_lock(&txn_mu);
	atomic_store(&cseq[xid], commit ? ++commit_counter : ABORTED);
	new_horizon();
	pthread_mutex_unlock(&txn_mu);
}

static rb_xid_state
port_xid_state(void *ctx, uint64_t xid)
{
	uint64_t	c = atomic_load(&cseq[xid]);

	(void) ctx;
	if (c == 0)
		return RB_XID_RUNNING;
	if (c == ABORTED)
		return RB_XID_ABORTED;
	return c <= atomic_load(&horizon) ? RB_XID_SETTLED : RB_XID_COMMITTED;
}

static int
port_wal_flush(void *ctx, uint64_t lsn)
{
	uint64_t	d = atomic_load(&lsn_durable);

	(void) ctx;
	while (d < lsn && !atomic_compare_exchange_weak(&lsn_durable, &d, lsn))
		;
	return 0;
}

static void
port_wait(void *ctx, uint32_t channel, uint32_t timeout_ms)
{
	struct timespec ts;

	(void) ctx;
	clock_gettime(CLOCK_REALTIME, &ts);
	ts.tv_nsec += (long) (timeout_ms % 1000) * 1000000;
	ts.tv_sec += timeout_ms / 1000 + ts.tv_nsec / 1000000000;
	ts.tv_nsec %= 1000000000;
	pthread_mutex_lock(&ch_mu[channel]);
	pthread_cond_timedwait(&ch_cv[channel], &ch_mu[channel], &ts);
	pthread_mutex_unlock(&ch_mu[channel]);
}

static void
port_wake(void *ctx, uint32_t channel)
{
	(void) ctx;
	pthread_mutex_lock(&ch_mu[channel]);
	pthread_cond_broadcast(&ch_cv[channel]);
	pthread_mutex_unlock(&ch_mu[channel]);
}

static bool
port_interrupted(void *ctx)
{
	(void) ctx;
	return impatient;
}

static void
port_note(void *ctx, uint64_t tree, uint64_t oldest)
{
	(void) ctx;
	(void) tree;
	(void) oldest;
}

static const rb_port port = {NULL, port_xid_state, port_wal_flush, port_wait, port_wake, port_interrupted, port_note};

static st_store *
open_store(void *arg, st_error *err)
{
	(void) arg;
	(void) err;
	return fs_open(fs);
}

static bool
visible(const worker *w, const rb_version *v, payload *out)
{
	for (; v; v = rb_older(v))
	{
		const rb_xversion *x = rb_x(v);

		if (x)
		{
			uint64_t	c = atomic_load(&cseq[x->xid]);

			if (v->kind == RB_LOCK || c == 0 || c == ABORTED || c > w->snap)
				continue;
		}
		if (v->kind == RB_DELETE)
			return false;
		if (v->len < sizeof(payload))
		{
			failed("record of %u bytes", v->len);
			return false;
		}
		memcpy(out, rb_data(v), sizeof(payload));
		return true;
	}
	return false;
}

/* Fine errors are those the weather explains. */
static bool
ok(worker *w, const char *what, rb_status s, const rb_error *err)
{
	if (s == RB_OK)
		return true;
	if (s == RB_FULL)
		w->full++;
	else if (s == RB_STORE || (s == RB_CANCELED && impatient))
		w->errors++;
	else
		failed("%s: %s (%s)", what, tl_status(s), err->st.message);
	return false;
}

/* ---- writers ----------------------------------------------------------------------------------------------------- */

static tl_key
numbered(uint64_t tree, const char *fmt, uint32_t i)
{
	char		own[32];

	snprintf(own, sizeof(own), fmt, i);
	return tl_strkey(tree, own);
}

static tl_key
acc_key(uint32_t i)
{
	return numbered(T_ACC, "acct%06u", i);
}

static tl_key
pair_key(uint32_t i, bool second)
{
	return numbered(T_PAIR, second ? "pair%06u-b" : "pair%06u-a", i);
}

/* 1 = done, 0 = conflict or error: roll back.  change < 0 deletes when `pair` is set, > 0 inserts. */
static int
write_key(worker *w, const tl_key *key, uint64_t xid, bool pair, int64_t change)
{
	rb_error	err = {0};

	for (int tries = 0; tries < 1000; tries++)
	{
		uint32_t	len = sizeof(payload) + tl_below(&w->rng, 150);
		rb_version *v;
		rb_xversion *x;
		const rb_version *head,
				   *keep,
				   *cut;
		payload		p = {0};
		rb_status	s;
		bool		exists,
					running = false;
		uint64_t	lsn;

		if (!ok(w, "version_new", rb_version_new(w->t, key->len, len, false, &v, &err), &err))
			return 0;
		rb_enter(w->t);
		s = rb_lookup(w->t, tl_slice(key), &head);
		if (s != RB_OK)
		{
			rb_leave(w->t);
			rb_version_free(w->t, v);
			if (!ok(w, "probe", rb_probe(w->t, tl_slice(key), &err), &err))
				return 0;
			continue;
		}
		/* each state is read once: it may change from one look to the next */
		for (keep = head; keep && rb_x(keep); keep = rb_older(keep))
		{
			uint64_t	c = atomic_load(&cseq[rb_x(keep)->xid]);

			running = c == 0;
			if (c != ABORTED)
				break;
		}
		if (running)
		{
			rb_leave(w->t);
			rb_version_free(w->t, v);
			return 0;
		}
		cut = keep;
		while (cut && rb_x(cut) && port_xid_state(NULL, rb_x(cut)->xid) != RB_XID_SETTLED)
			cut = rb_older(cut);
		exists = keep && keep->kind == RB_DATA;
		if (exists)
			memcpy(&p, rb_data(keep), sizeof(p));
		if ((pair && exists == (change > 0)) || (!pair && !exists))
		{
			failed("a writer finds key %.*s %s", (int) key->len - RB_TREE_LEN, (const char *) key->b + RB_TREE_LEN,
				   exists ? "present" : "absent");
			rb_leave(w->t);
			rb_version_free(w->t, v);
			return 0;
		}
		p.balance += change;
		p.count++;
		x = (rb_xversion *) v;
		v->kind = pair && change < 0 ? RB_DELETE : RB_DATA;
		v->tag = p.count & 15;
		v->len = len;
		x->xid = xid;
		x->cid = 1;
		x->aux = 0;
		atomic_store_explicit(&x->lsn, RB_LSN_PENDING, memory_order_relaxed);
		memset((uint8_t *) rb_data(v), 0, len);
		memcpy((uint8_t *) rb_data(v), &p, sizeof(p));
		s = rb_put(w->t, &(rb_put_args) {.key = tl_slice(key), .v = v, .expect = head, .keep = keep, .cut = cut,
				   .dirty = true});
		if (s == RB_OK)
		{
			if (tl_permille(&w->rng, 20))
				usleep(50);
			lsn = atomic_fetch_add(&lsn_end, 1);
			rb_stamp(w->t, v, lsn);
			rb_leave(w->t);
			return 1;
		}
		rb_leave(w->t);
		rb_version_free(w->t, v);
		if (s != RB_CHANGED && s != RB_UNKNOWN)
		{
			failed("put: %s", tl_status(s));
			return 0;
		}
	}
	w->full++;
	return 0;
}

static uint64_t
new_xid(void)
{
	uint64_t	xid = atomic_fetch_add(&next_xid, 1);

	if (xid >= MAXXIDS - 64)
		atomic_store(&stop, true);
	return xid < MAXXIDS ? xid : MAXXIDS - 1;
}

static void
transfer(worker *w)
{
	uint64_t	xid = new_xid();
	uint32_t	a = tl_below(&w->rng, NACC),
				b = tl_below(&w->rng, NACC);
	tl_key		ka = acc_key(a),
				kb = acc_key(b);
	int64_t		amount = 1 + tl_below(&w->rng, 50);
	bool		good;

	good = a != b && write_key(w, &ka, xid, false, -amount) && write_key(w, &kb, xid, false, amount) &&
		!tl_permille(&w->rng, 100);
	end_txn(xid, good);
	if (good)
		w->commits++;
	else
		w->aborts++;
}

typedef struct pair_view
{
	worker	   *w;
	bool		there[2];
} pair_view;

static bool
visit_pair(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	pair_view  *pv = arg;
	payload		p;

	(void) key;
	pv->there[i] = visible(pv->w, head, &p);
	return true;
}

/* which of the pair exists now, by a snapshot of our own; -1 = could not be read */
static int
read_pair(worker *w, uint32_t i)
{
	tl_key		k[2] = {pair_key(i, false), pair_key(i, true)};
	rb_slice	s[2] = {tl_slice(&k[0]), tl_slice(&k[1])};
	pair_view	pv = {.w = w};
	rb_error	err = {0};
	bool		good;

	take_snapshot(w);
	good = ok(w, "read_keys", rb_read_keys(w->t, s, 2, visit_pair, &pv, &err), &err);
	if (good && pv.there[0] == pv.there[1])
		failed("pair %u: %s exist in snapshot %lu", i, pv.there[0] ? "both" : "none", w->snap);
	end_snapshot(w);
	w->points++;
	return good ? pv.there[1] : -1;
}

/* One writer per pair at a time, so that what it reads is still so when it writes. */
static pthread_mutex_t row[NPAIRS];

static void
swap_pair(worker *w)
{
	uint32_t	i = tl_below(&w->rng, NPAIRS);
	uint64_t	xid;
	tl_key		ka = pair_key(i, false),
				kb = pair_key(i, true);
	int			second;
	bool		good = false;

	pthread_mutex_lock(&row[i]);
	second = read_pair(w, i);
	if (second >= 0)
	{
		xid = new_xid();
		good = write_key(w, second ? &kb : &ka, xid, true, -1) && write_key(w, second ? &ka : &kb, xid, true, 1) &&
			!tl_permille(&w->rng, 150);
		end_txn(xid, good);
	}
	pthread_mutex_unlock(&row[i]);
	if (good)
		w->commits++;
	else
		w->aborts++;
}

static void
insert_nothing(worker *w)
{
	uint64_t	xid = new_xid();
	tl_key		k = numbered(T_NONE, "none%06u", tl_below(&w->rng, NNONE));

	/* rolled back always: to the next one the key is absent whatever versions lie there */
	write_key(w, &k, xid, true, 1);
	end_txn(xid, false);
	w->aborts++;
}

/* ---- readers ----------------------------------------------------------------------------------------------------- */

typedef struct scan
{
	worker	   *w;
	uint64_t	tree;
	bool		backward, jump;
	int64_t		sum;
	uint32_t	found;
	int			last;
	uint8_t		pairs[NPAIRS];
} scan;

static bool
visit_scan(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	scan	   *sc = arg;
	payload		p;
	int			n = atoi((const char *) key.data + RB_TREE_LEN + 4);
	bool		second = sc->tree == T_PAIR && key.data[key.len - 1] == 'b';
	int			place = sc->tree == T_PAIR ? 2 * n + second : n;

	(void) i;
	if (sc->jump && tl_permille(&sc->w->rng, 50))
		longjmp(sc->w->jump, 1);
	if (sc->backward ? place >= sc->last : place <= sc->last)
		failed("scan of tree %lu: place %d after %d", sc->tree, place, sc->last);
	sc->last = place;
	if (!visible(sc->w, head, &p))
		return true;
	sc->found++;
	sc->sum += p.balance;
	if (sc->tree == T_ACC && n < NACC)
	{
		if (p.count < sc->w->seen[n])
			failed("account %d went back from update %lu to %lu", n, sc->w->seen[n], p.count);
		sc->w->seen[n] = p.count;
	}
	if (sc->tree == T_PAIR && n < NPAIRS)
		sc->pairs[n]++;
	return !tl_permille(&sc->w->rng, 5);
}

static void
full_scan(worker *w, uint64_t tree)
{
	scan		sc = {.w = w, .tree = tree};
	tl_key		lo = tl_makekey(tree, NULL, 0),
				hi = tl_makekey(tree + 1, NULL, 0);
	uint8_t		resume[RB_MAX_KEY + 1];
	bool		done = false;
	volatile bool good = true;	/* outlives a longjmp only in theory */

	sc.backward = tl_permille(&w->rng, 500);
	sc.jump = tl_permille(&w->rng, 30);
	sc.last = sc.backward ? INT32_MAX : -1;
	take_snapshot(w);
	if (setjmp(w->jump))
	{
		rb_reset(w->t);
		end_snapshot(w);
		w->jumps++;
		return;
	}
	while (!done && good)
	{
		rb_error	err = {0};
		uint32_t	rlen = 0;

		good = ok(w, "read_range", rb_read_range(w->t, tl_slice(&lo), tl_slice(&hi), sc.backward,
												 tl_permille(&w->rng, 500) ? 0 : 1 + tl_below(&w->rng, 100),
												 tl_below(&w->rng, 500), visit_scan, &sc, &done, resume, &rlen, &err),
				  &err);
		if (good && !done)
		{
			tl_key	   *k = sc.backward ? &hi : &lo;

			memcpy(k->b, resume, rlen);
			k->len = rlen;
		}
	}
	if (good && tree == T_ACC && (sc.found != NACC || sc.sum != (int64_t) NACC * START))
		failed("snapshot %lu %s: %u accounts, sum %ld", w->snap, sc.backward ? "backward" : "forward", sc.found,
			   sc.sum);
	if (good && tree == T_NONE && sc.found)
		failed("%u records where there are none", sc.found);
	for (int i = 0; good && tree == T_PAIR && i < NPAIRS; i++)
		if (sc.pairs[i] != 1)
			failed("snapshot %lu %s: pair %d seen %u times", w->snap, sc.backward ? "backward" : "forward", i,
				   sc.pairs[i]);
	end_snapshot(w);
	w->scans++;
}

static void *
work(void *arg)
{
	worker	   *w = arg;

	while (!atomic_load(&stop))
	{
		uint32_t	what = tl_below(&w->rng, 100);

		impatient = tl_permille(&w->rng, 5);
		if (what < 40)
			transfer(w);
		else if (what < 65)
			swap_pair(w);
		else if (what < 70)
			insert_nothing(w);
		else if (what < 85)
			read_pair(w, tl_below(&w->rng, NPAIRS));
		else
			full_scan(w, T_ACC + tl_below(&w->rng, 3));
		impatient = false;
		if (tl_now() > deadline)
			atomic_store(&stop, true);
	}
	return NULL;
}

static void *
evictor(void *arg)
{
	worker	   *w = arg;

	while (!atomic_load(&stop))
	{
		rb_error	err = {0};
		size_t		freed;

		ok(w, "evict", rb_evict(w->t, 1 + tl_below(&w->rng, 30000), &freed, &err), &err);
		usleep(tl_below(&w->rng, 2000));
	}
	return NULL;
}

static void *
checkpointer(void *arg)
{
	worker	   *w = arg;
	st_store   *own = fs_open(fs);

	while (!atomic_load(&stop))
	{
		rb_error	err = {0};
		uint64_t	tree = T_ACC + tl_below(&w->rng, 3);
		tl_key		lo = tl_makekey(tree, NULL, 0),
					hi = tl_makekey(tree + 1, NULL, 0);

		if (ok(w, "flush_all", rb_flush_all(w->t, &err), &err))
			st_sync(own, &err.st);
		usleep(tl_below(&w->rng, 3000));
		if (tl_permille(&w->rng, 500))
			ok(w, "tree_evict", rb_tree_evict(w->t, tree, &err), &err);
		else
			ok(w, "settle_range", rb_settle_range(w->t, tl_slice(&lo), tl_slice(&hi), &err), &err);
		w->scans++;
	}
	st_close(own);
	return NULL;
}

int
main(int argc, char **argv)
{
	uint32_t	seconds = 20,
				nthreads = 4;
	uint64_t	seed = 1;
	static worker w[MAXTHREADS];
	pthread_t	th[MAXTHREADS];
	uint64_t	sum[7] = {0};
	size_t		size = rb_min_size(MAXTHREADS) + 100 * 1024;
	void	   *arena;
	fs_faults	weather = {.fail_get = 10, .fail_range = 10, .fail_write = 20, .partial = 30, .ambiguous = 30,
	.fail_resolve = 100, .truncate = 100, .max_delay_us = 300};
	const char *words;
	rb_error	err = {0};

	for (int i = 1; i + 1 < argc; i += 2)
	{
		if (strcmp(argv[i], "--seconds") == 0)
			seconds = (uint32_t) atoi(argv[i + 1]);
		else if (strcmp(argv[i], "--threads") == 0)
			nthreads = (uint32_t) atoi(argv[i + 1]);
		else if (strcmp(argv[i], "--seed") == 0)
			seed = strtoull(argv[i + 1], NULL, 0);
	}
	if (nthreads < 1 || nthreads > MAXTHREADS - 2)
		return 2;
	printf("stress: seed %lu, %u workers, %u s\n", seed, nthreads, seconds);
	fflush(stdout);
	cseq = calloc(MAXXIDS, sizeof(*cseq));
	for (int i = 0; i < RB_CHANNELS; i++)
	{
		pthread_mutex_init(&ch_mu[i], NULL);
		pthread_cond_init(&ch_cv[i], NULL);
	}
	for (int i = 0; i < NPAIRS; i++)
		pthread_mutex_init(&row[i], NULL);
	size = (size + 4095) & ~(size_t) 4095;
	arena = tl_arena(size);
	fs = fs_create(seed);
	for (uint32_t i = 0; i < NACC; i++)
	{
		payload		p = {START, 1};
		tl_key		k = acc_key(i);

		tl_store_settled(fs, &k, &p, sizeof(p));
	}
	for (uint32_t i = 0; i < NPAIRS; i++)
	{
		payload		p = {1, 1};
		tl_key		k = pair_key(i, i % 2);

		tl_store_settled(fs, &k, &p, sizeof(p));
	}
	rb = rb_create(arena, size, MAXTHREADS);
	if (!rb)
		return 2;
	fs_set_faults(fs, &weather);
	deadline = tl_now() + seconds;
	for (uint32_t i = 0; i < nthreads + 2; i++)
	{
		w[i].slot = i;
		w[i].rng.s = seed * 7919 + i * 104729;
		w[i].t = rb_attach(rb, i, &port);
		rb_set_store(w[i].t, open_store, NULL);
	}
	for (uint32_t i = 0; i < nthreads + 2; i++)
		pthread_create(&th[i], NULL, i == 0 ? evictor : i == 1 ? checkpointer : work, &w[i]);
	for (uint32_t i = 0; i < nthreads + 2; i++)
		pthread_join(th[i], NULL);

	/* fair weather: everything reaches the store, and all of it is read back from there */
	fs_set_faults(fs, NULL);
	words = rb_check(rb);
	if (words)
		failed("rb_check: %s", words);
	if (!ok(&w[0], "flush_all", rb_flush_all(w[0].t, &err), &err))
		failed("flush in fair weather: %s", err.st.message);
	for (uint64_t tree = T_ACC; tree <= T_NONE; tree++)
		if (rb_tree_evict(w[1].t, tree, &err) != RB_OK)
			failed("tree_evict in fair weather: %s", err.st.message);
	for (int i = 0; i < 4; i++)
		for (uint64_t tree = T_ACC; tree <= T_NONE; tree++)
			full_scan(&w[2], tree);
	words = rb_check(rb);
	if (words)
		failed("rb_check at the end: %s", words);
	if (fs_violations(fs, &words))
		failed("%s", words);
	for (uint32_t i = 0; i < nthreads + 2; i++)
	{
		sum[0] += w[i].commits;
		sum[1] += w[i].aborts;
		sum[2] += w[i].scans;
		sum[3] += w[i].points;
		sum[4] += w[i].errors;
		sum[5] += w[i].full;
		sum[6] += w[i].jumps;
		rb_detach(w[i].t);
	}
	tl_arena_free(arena, size);
	fs_destroy(fs);
	free(cseq);
	printf("commits %lu aborts %lu scans %lu point reads %lu store errors %lu full %lu jumps %lu\n", sum[0], sum[1],
		   sum[2], sum[3], sum[4], sum[5], sum[6]);
	printf("%lu passed, %lu failed\n", sum[0] + sum[2] + sum[3], atomic_load(&failures));
	return atomic_load(&failures) ? 1 : 0;
}
