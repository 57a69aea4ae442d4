/*
 * model.c
 *	  Model test: seeded random operations on the record buffer against a plain array of versions per key.
 *
 * One process, two rb_threads: the second runs inside hooks of the fake store, in the middle of the first one's
 * requests.  The model knows each key's versions and each transaction's state; the log and the store survive restarts,
 * the buffer does not.  Two chains agree when every snapshot reads the same from both (model.h).  Always checked
 * (INVARIANTS):
 *	- what the buffer says about a key is what the model says; where it says nothing, the store says it (base, A, B);
 *	- what goes to the store is the newest, logged, durable and noted (C1-C4, C8, C9);
 *	- after a crash at any point of the log, replay from the last completed checkpoint brings all of it back (E1-E5).
 *
 *	model [--seed N] [--ops N] [--trace]
 */
#include "model.h"

/* ---- what the store is told -------------------------------------------------------------------------------------- */

static mtree *
tree_of(const void *key, size_t len, int *k)
{
	const uint8_t *b = key;
	uint64_t	id = 0;

	if (len < RB_TREE_LEN)
		die("key of %zu bytes in the store", len);
	for (int i = 0; i < RB_TREE_LEN; i++)
		id = id << 8 | b[i];
	for (int i = 0; i < NTREES; i++)
		if (trees[i].id == id)
		{
			*k = findkey(b + RB_TREE_LEN, len - RB_TREE_LEN);
			if (!iskey(*k, b + RB_TREE_LEN, len - RB_TREE_LEN))
				die("a key nobody wrote");
			return &trees[i];
		}
	return NULL;
}

static bool
lowest_xid(void *arg, const rb_stored_version *v)
{
	uint64_t   *low = arg;

	if (v->xid && (!*low || v->xid < *low))
		*low = v->xid;
	return true;
}

/* The log position that must be durable before the key may be written: aborted versions are not written. */
static uint64_t
needed_lsn(const mkey *k)
{
	uint64_t	lsn = 0;

	for (uint32_t i = 0; i < k->n; i++)
		if (xstate[k->v[i].xid] != RB_XID_ABORTED && k->v[i].lsn > lsn)
			lsn = k->v[i].lsn;
	return lsn;
}

static void
observe(void *arg, const st_op *ops, uint32_t nops)
{
	(void) arg;
	for (uint32_t i = 0; i < nops; i++)
	{
		int			k;
		uint64_t	low = 0;
		chain		c;
		mtree	   *t = tree_of(ops[i].key.data, ops[i].key.len, &k);

		if (!t)
			die("write to a dropped tree");
		if (is_pending(t, (uint32_t) k))
			die("key %s written while a version is pending (C9)", keyname(t, (uint32_t) k));
		if (needed_lsn(&t->key[k]) > durable)
			die("key %s written before its log (C2)", keyname(t, (uint32_t) k));
		chain_stored(&c, ops[i].del ? NULL : ops[i].value.data, ops[i].value.len);
		compare("write to the store", &c, t, (uint32_t) k);
		if (ops[i].del)
			continue;
		rb_decode_record(ops[i].value.data, ops[i].value.len, lowest_xid, &low);
		if (low && (!t->noted || t->note > low))
			die("key %s written with xid %lu and no note (C8)", keyname(t, (uint32_t) k), low);
	}
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static mtree *
any_tree(void)
{
	return &trees[tl_below(&rng, NTREES)];
}

/* A few keys are hot, so that chains form. */
static uint32_t
any_key(void)
{
	return tl_below(&rng, tl_permille(&rng, 300) ? 8 : NKEYS);
}

/* Looks at one key; a miss must be answered by the store. */
static void
check_key(mtree *t, uint32_t k, bool look_in_store)
{
	tl_key		key = mkkey(t, k);
	const rb_version *head;
	chain		c;
	rb_status	s;

	rb_enter(th[1]);
	s = rb_lookup(th[1], tl_slice(&key), &head);
	if (s == RB_OK)
	{
		chain_buffer(&c, head, t->key[k].lock_xid);
		compare("lookup", &c, t, k);
		if (t->key[k].lock_xid && xstate[t->key[k].lock_xid] == RB_XID_RUNNING && !c.locked)
			die("lock of xid %lu on %s is gone", t->key[k].lock_xid, keyname(t, k));
	}
	else if (s != RB_UNKNOWN)
		die("lookup: %s", tl_status(s));
	else if (t->key[k].lock_xid && xstate[t->key[k].lock_xid] == RB_XID_RUNNING)
		die("entry %s with a lock of xid %lu was evicted (C5)", keyname(t, k), t->key[k].lock_xid);
	else if (is_pending(t, k))
		die("entry %s was evicted while pending (C9)", keyname(t, k));
	rb_leave(th[1]);
	if (s == RB_UNKNOWN && look_in_store)
	{
		size_t		len;
		uint8_t    *rec = fs_peek(fs, key.b, key.len, &len);

		chain_stored(&c, rec, len);
		compare("not in the buffer; in the store", &c, t, k);
		free(rec);
	}
}

static void
check_all(void)
{
	for (int t = 0; t < NTREES; t++)
		for (uint32_t k = 0; k < NKEYS; k++)
			check_key(&trees[t], k, true);
	check_structure();
}

static void
check_store_has_all(const char *why, const mtree *only)
{
	for (int t = 0; t < NTREES; t++)
		for (uint32_t k = 0; k < NKEYS; k++)
		{
			tl_key		key = mkkey(&trees[t], k);
			size_t		len;
			uint8_t    *rec;
			chain		c;

			if (trees[t].key[k].touched || (only && only != &trees[t]))
				continue;
			rec = fs_peek(fs, key.b, key.len, &len);
			chain_stored(&c, rec, len);
			compare(why, &c, &trees[t], k);
			free(rec);
		}
}

typedef struct batch
{
	tl_key		key[24];
	mtree	   *tree[24];
	int			idx[24];		/* -1 = a key that never existed */
	uint32_t	n, next;
} batch;

static bool
visit_key(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	batch	   *b = arg;
	chain		c;

	if (i != b->next++)
		die("read_keys: visited %u out of order", i);
	if (tl_cmp(key.data, key.len, b->key[i].b, b->key[i].len) != 0)
		die("read_keys: wrong key");
	if (b->idx[i] < 0)
	{
		if (head)
			die("read_keys: a key that never existed");
		return true;
	}
	if (b->tree[i]->key[b->idx[i]].touched)
		return true;
	chain_buffer(&c, head, 0);
	compare("read_keys", &c, b->tree[i], (uint32_t) b->idx[i]);
	return true;
}

/* own part of a bound or of an absent key: near a key, often a prefix of one */
static uint32_t
near_key(uint8_t *own)
{
	uint32_t	k = tl_below(&rng, NKEYS);
	uint32_t	len = keys[k].len;

	memcpy(own, keys[k].b, len);
	switch (tl_below(&rng, 5))
	{
		case 0:
			return 1 + tl_below(&rng, len);
		case 1:
			own[len] = 0;
			return len + 1;
		case 2:
			own[len - 1]++;
			return len;
		case 3:
			own[len] = 0xff;
			return len + 1;
		default:
			return len;
	}
}

static void
op_read_keys(rb_thread *t)
{
	batch		b;
	rb_slice	slices[24];
	rb_error	err = {0};
	rb_status	s;

	opname = "read_keys";
	b.n = 1 + tl_below(&rng, 24);
	b.next = 0;
	for (uint32_t i = 0; i < b.n; i++)
	{
		b.tree[i] = any_tree();
		if (tl_permille(&rng, 100))
		{
			uint8_t		own[64];
			uint32_t	len = near_key(own);
			int			k = findkey(own, len);

			b.idx[i] = iskey(k, own, len) ? k : -1;
			b.key[i] = tl_makekey(b.tree[i]->id, own, len);
		}
		else
		{
			b.idx[i] = (int) any_key();
			b.key[i] = mkkey(b.tree[i], (uint32_t) b.idx[i]);
		}
		slices[i] = tl_slice(&b.key[i]);
	}
	count.reads++;
	s = rb_read_keys(t, slices, b.n, visit_key, &b, &err);
	if (ok("read_keys", s, &err) && b.next != b.n)
		die("read_keys: %u of %u visited", b.next, b.n);
}

typedef struct scan
{
	mtree	   *tree;
	bool		backward;
	int			last;
	uint32_t	stop_after, calls, number;
	bool		seen[NKEYS];
	tl_key		start, end;
} scan;

static bool
visit_range(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	scan	   *sc = arg;
	int			k;
	mtree	   *t = tree_of(key.data, key.len, &k);
	chain		c;

	if (t != sc->tree)
		die("read_range: a key of another tree");
	if (!head)
		die("read_range: visited without a version");
	if (i != sc->number++)
		die("read_range: number %u, not %u", i, sc->number - 1);
	if (tl_cmp(key.data, key.len, sc->start.b, sc->start.len) < 0 ||
		tl_cmp(key.data, key.len, sc->end.b, sc->end.len) >= 0)
		die("read_range: key %s is out of bounds", keyname(t, (uint32_t) k));
	if (sc->last >= 0 && (sc->backward ? k >= sc->last : k <= sc->last))
		die("read_range: key %s is out of order or twice", keyname(t, (uint32_t) k));
	sc->last = k;
	sc->seen[k] = true;
	if (!t->key[k].touched)
	{
		chain_buffer(&c, head, 0);
		compare("read_range", &c, t, (uint32_t) k);
	}
	sc->calls++;
	return sc->calls != sc->stop_after;
}

static void
op_read_range(rb_thread *th_)
{
	scan		sc = {.last = -1};
	uint8_t		own[64];
	tl_key		lo,
				hi;
	uint8_t		resume[RB_MAX_KEY + 1];
	bool		done = false;

	opname = "read_range";
	sc.tree = any_tree();
	sc.backward = tl_permille(&rng, 500);
	if (tl_permille(&rng, 250))
		lo = tl_makekey(sc.tree->id, NULL, 0);
	else
	{
		uint32_t	len = near_key(own);

		lo = tl_makekey(sc.tree->id, own, len);
	}
	if (tl_permille(&rng, 250))
		hi = tl_makekey(sc.tree->id + 1, NULL, 0);
	else
	{
		uint32_t	len = near_key(own);

		hi = tl_makekey(sc.tree->id, own, len);
	}
	if (tl_cmp(lo.b, lo.len, hi.b, hi.len) > 0)
	{
		tl_key		x = lo;

		lo = hi;
		hi = x;
	}
	sc.start = lo;
	sc.end = hi;
	count.reads++;
	for (uint32_t rounds = 0; !done; rounds++)
	{
		rb_error	err = {0};
		uint32_t	max = tl_permille(&rng, 500) ? 0 : 1 + tl_below(&rng, 12);
		uint32_t	before = sc.calls,
					rlen = 0;

		if (rounds > 4 * NKEYS)
			die("read_range: no end");
		sc.stop_after = tl_permille(&rng, 200) ? sc.calls + 1 + tl_below(&rng, 5) : UINT32_MAX;
		sc.number = 0;
		if (!ok("read_range", rb_read_range(th_, tl_slice(&lo), tl_slice(&hi), sc.backward, max, tl_below(&rng, 100),
											visit_range, &sc, &done, resume, &rlen, &err), &err))
			return;
		if (max && sc.calls - before > max)
			die("read_range: %u visited, at most %u asked", sc.calls - before, max);
		if (done)
			break;
		if (sc.calls == before)
			die("read_range: nothing visited, not done");
		if (rlen > sizeof(lo.b))
			die("read_range: resume of %u bytes", rlen);
		if (sc.backward)
		{
			memcpy(hi.b, resume, rlen);
			hi.len = rlen;
		}
		else
		{
			memcpy(lo.b, resume, rlen);
			lo.len = rlen;
		}
	}
	for (uint32_t k = 0; k < NKEYS; k++)
	{
		tl_key		key = mkkey(sc.tree, k);
		chain		m;

		if (sc.seen[k] || sc.tree->key[k].touched ||
			tl_cmp(key.b, key.len, sc.start.b, sc.start.len) < 0 || tl_cmp(key.b, key.len, sc.end.b, sc.end.len) >= 0)
			continue;
		chain_model(&m, &sc.tree->key[k]);
		if (m.n)
			die("read_range: key %s was missed (%s)", keyname(sc.tree, k), sc.backward ? "backward" : "forward");
	}
}

/*
 * Brings the key's head into view.  On true the guard is held, *head is known and *v is memory for a version.
 */
static bool
open_key(rb_thread *t, const tl_key *key, uint32_t len, rb_version **v, const rb_version **head)
{
	rb_error	err = {0};

	for (int tries = 0; tries < 20; tries++)
	{
		rb_status	s;

		if (!ok("version_new", rb_version_new(t, key->len, len, false, v, &err), &err))
			return false;
		rb_enter(t);
		s = rb_lookup(t, tl_slice(key), head);
		if (s == RB_OK)
			return true;
		rb_leave(t);
		rb_version_free(t, *v);
		if (s != RB_UNKNOWN)
			die("lookup: %s", tl_status(s));
		count.retried++;
		if (tl_permille(&rng, 500))
			s = rb_probe(t, tl_slice(key), &err);
		else
		{
			batch		b = {.n = 1, .idx = {-2}};
			rb_slice	slice = tl_slice(key);
			int			k;

			b.key[0] = *key;
			b.tree[0] = tree_of(key->b, key->len, &k);
			b.idx[0] = k;
			s = rb_read_keys(t, &slice, 1, visit_key, &b, &err);
		}
		if (!ok("fetch for put", s, &err))
			return false;
	}
	return false;
}

/* The newest version of the chain that is not dead, and the one below which nothing is read. */
static const rb_version *
alive(const rb_version *v, const rb_version **cut)
{
	const rb_version *keep;

	while (v && rb_x(v) && (xstate[rb_x(v)->xid] == RB_XID_ABORTED ||
							(v->kind == RB_LOCK && xstate[rb_x(v)->xid] != RB_XID_RUNNING)))
		v = rb_older(v);
	keep = v;
	while (v && rb_x(v) && (v->kind == RB_LOCK || xstate[rb_x(v)->xid] != RB_XID_SETTLED))
		v = rb_older(v);
	*cut = v;
	return keep;
}

static void
op_put(rb_thread *t)
{
	mtree	   *tr = any_tree();
	uint32_t	k = any_key();
	mkey	   *mk = &tr->key[k];
	uint32_t	slot = tl_below(&rng, NXIDS);
	tl_key		key = mkkey(tr, k);
	uint32_t	len = tl_permille(&rng, 20) ? 4000 : tl_permille(&rng, 50) ? 0 : tl_below(&rng, 300);
	rb_put_args a = {0};
	rb_version *v;
	rb_xversion *x;
	const rb_version *head,
			   *cut;
	rb_kind		kind = RB_DATA;
	bool		spec = false,
				absent;
	chain		m;
	rb_status	s;
	uint64_t	xid;

	opname = "put";
	prune(mk);
	if (!running[slot])
		running[slot] = new_xid();
	xid = running[slot];
	if ((mk->n && xstate[mk->v[0].xid] == RB_XID_RUNNING && mk->v[0].xid != xid) ||
		(mk->lock_xid && xstate[mk->lock_xid] == RB_XID_RUNNING && mk->lock_xid != xid) || mk->n >= MAXV - 1)
		return;
	chain_model(&m, mk);
	absent = m.n == 0 || m.v[0].kind == RB_DELETE;
	if (!absent && tl_permille(&rng, 100))
		kind = RB_LOCK;
	else if (tl_permille(&rng, absent ? 20 : 300))
		kind = RB_DELETE;
	else if (m.n == 0)
		spec = tl_permille(&rng, 100);
	if (kind != RB_DATA)
		len = tl_permille(&rng, 500) && kind == RB_DELETE ? 9 : 0;
	if (!open_key(t, &key, len, &v, &head))
		return;
	/* the state may have moved on in a hook */
	prune(mk);
	if ((mk->n && xstate[mk->v[0].xid] == RB_XID_RUNNING && mk->v[0].xid != xid) ||
		(mk->lock_xid && xstate[mk->lock_xid] == RB_XID_RUNNING && mk->lock_xid != xid) || running[slot] != xid ||
		mk->touched)
	{
		rb_leave(t);
		rb_version_free(t, v);
		return;
	}
	x = (rb_xversion *) v;
	x->v.len = len;
	x->v.kind = (uint8_t) kind;
	x->v.tag = next_val & 15;
	x->xid = xid;
	x->cid = next_cid++;
	x->aux = kind == RB_LOCK || spec ? 7 : 0;
	atomic_store_explicit(&x->lsn, kind == RB_LOCK ? 0 : RB_LSN_PENDING, memory_order_relaxed);
	if (spec)
		atomic_fetch_or_explicit(&v->flags, RB_SPECULATIVE, memory_order_relaxed);
	fill((uint8_t *) rb_data(v), len, next_val);
	a.key = tl_slice(&key);
	a.v = v;
	a.expect = head;
	a.keep = alive(head, &cut);
	a.cut = tl_permille(&rng, 700) ? cut : NULL;
	if (kind != RB_LOCK && m.n == 0 && tl_permille(&rng, 500) && !mk->lock_xid)
		a.keep = a.cut = NULL;
	a.dirty = kind != RB_LOCK;
	if (trace)
		printf("%lu put %s xid %lu kind %d len %u val %lu %s\n", step, keyname(tr, k), xid, kind, len, next_val,
			   spec ? "speculative" : "");
	s = rb_put(t, &a);
	if (s != RB_OK)
		die("put: %s with nobody else at work", tl_status(s));
	count.puts++;
	if (depth)
		mk->touched = true;
	if (kind == RB_LOCK)
		mk->lock_xid = xid;
	else
	{
		pending    *p = &pend[npend++];

		memmove(mk->v + 1, mk->v, mk->n * sizeof(mver));
		mk->n++;
		mk->v[0] = (mver) {.xid = xid, .val = next_val, .len = len, .cid = x->cid, .kind = (uint8_t) kind,
		.tag = next_val & 15};
		*p = (pending) {.tree = tr, .key = k, .v = v, .rec = {.type = LOG_PUT, .xid = xid, .tree = tr->id,
		.val = next_val, .key = k, .len = len, .kind = (uint8_t) kind, .tag = next_val & 15}};
		/* the log has the versions of a key in their order */
		if (tl_permille(&rng, 500))
			for (uint32_t i = 0; i < npend; i++)
				log_pending(&pend[i]);
		next_val++;
		if (spec || npend > 8 || tl_permille(&rng, 900))
			stamp_all();
	}
	if (spec && tl_permille(&rng, 500))
		rb_confirm(v);
	else if (spec)
	{
		wal_add((logrec) {.type = LOG_WITHDRAW, .xid = xid, .tree = tr->id, .key = k});
		if (trace)
			printf("%lu withdraw %s\n", step, keyname(tr, k));
		rb_withdraw(t, tl_slice(&key), v);
		memmove(mk->v, mk->v + 1, --mk->n * sizeof(mver));
	}
	rb_leave(t);
	next_val++;
}

static void
op_evict(rb_thread *t)
{
	rb_error	err = {0};
	size_t		freed = 0;

	opname = "evict";
	ok("evict", rb_evict(t, tl_below(&rng, 20000), &freed, &err), &err);
}

static void
op_tree_evict(rb_thread *t)
{
	rb_error	err = {0};

	opname = "tree_evict";
	ok("tree_evict", rb_tree_evict(t, any_tree()->id, &err), &err);
}

static void
op_probe(rb_thread *t)
{
	rb_error	err = {0};
	mtree	   *tr = any_tree();
	uint8_t		own[64];
	uint32_t	len = near_key(own);
	tl_key		key = tl_makekey(tr->id, own, len);

	opname = "probe";
	ok("probe", rb_probe(t, tl_slice(&key), &err), &err);
}

static void
op_checkpoint(rb_thread *t)
{
	rb_error	err = {0};
	uint64_t	x = wal_end();

	opname = "checkpoint";
	if (!ok("flush_all", rb_flush_all(t, &err), &err))
		return;
	check_store_has_all("after flush_all", NULL);
	if (depth || st_sync(ctl, &err.st) != ST_OK)
		return;
	count.checkpoints++;
	checkpoint = x;
	if (durable < x)
		durable = x;
	if (x > wal_base)
	{
		memmove(wal, wal + (x - wal_base), (wal_n - (x - wal_base)) * sizeof(logrec));
		wal_n -= x - wal_base;
		wal_base = x;
	}
}

static void
op_settle(rb_thread *t)
{
	rb_error	err = {0};
	mtree	   *tr = any_tree();
	tl_key		lo = tl_makekey(tr->id, NULL, 0),
				hi = tl_makekey(tr->id + 1, NULL, 0);

	opname = "settle_range";
	stamp_all();
	if (!ok("settle_range", rb_settle_range(t, tl_slice(&lo), tl_slice(&hi), &err), &err) || depth)
		return;
	for (uint32_t k = 0; k < NKEYS; k++)
	{
		tl_key		key = mkkey(tr, k);
		size_t		len;
		uint64_t	low = 0;
		uint8_t    *rec = fs_peek(fs, key.b, key.len, &len);

		if (rec && !tr->key[k].touched)
		{
			rb_decode_record(rec, len, lowest_xid, &low);
			if (low && (xstate[low] == RB_XID_SETTLED || xstate[low] == RB_XID_ABORTED))
				die("after settle_range %s is stored with xid %lu, state %u", keyname(tr, k), low, xstate[low]);
		}
		free(rec);
	}
	tr->noted = false;
	/* what stays unsettled stays noted */
	for (uint32_t k = 0; k < NKEYS; k++)
	{
		tl_key		key = mkkey(tr, k);
		size_t		len;
		uint8_t    *rec = fs_peek(fs, key.b, key.len, &len);
		uint64_t	low = 0;

		if (rec)
			rb_decode_record(rec, len, lowest_xid, &low);
		if (low && (!tr->noted || low < tr->note))
		{
			tr->noted = true;
			tr->note = low;
		}
		free(rec);
	}
}

static void
op_tree(void)
{
	mtree	   *tr = any_tree();
	tl_key		lo = tl_makekey(tr->id, NULL, 0),
				hi = tl_makekey(tr->id + 1, NULL, 0);
	fs_faults	none = {0};
	rb_error	err = {0};

	opname = "tree drop and create";
	if (trace)
		printf("%lu drop %lu create %lu\n", step, tr->id, next_tree);
	stamp_all();
	rb_tree_drop(th[0], tr->id, tr->id + 1);
	memset(tr, 0, sizeof(*tr));
	tr->id = next_tree++;
	if (!faulty)
		fs_set_faults(fs, &none);
	while (st_delete_range(ctl, (st_slice) {lo.b, lo.len}, (st_slice) {hi.b, hi.len}, &err.st) != ST_OK)
		;
	ok("tree_create", rb_tree_create(th[0], tr->id, &err), &err);
}

/* ---- crash and replay -------------------------------------------------------------------------------------------- */

static void
replay_put(mtree *tr, const logrec *rec)
{
	tl_key		key = mkkey(tr, rec->key);
	rb_error	err = {0};
	rb_version *v;
	rb_put_args a = {0};
	uint32_t	len = rec->type == LOG_PUT ? rec->len : 0;
	rb_status	s;

	for (int tries = 0;; tries++)
	{
		s = rb_version_new(th[0], key.len, len, true, &v, &err);
		if (s == RB_OK)
			break;
		if (tries > 1000)
			die("replay: version_new: %s (%s)", tl_status(s), err.st.message);
		ok("replay: version_new", s, &err);
		waits = 0;
	}
	v->len = len;
	v->kind = rec->type == LOG_PUT ? rec->kind : RB_DELETE;
	v->tag = rec->tag;
	fill((uint8_t *) rb_data(v), len, rec->val);
	a = (rb_put_args) {.key = tl_slice(&key), .v = v, .blind = true, .dirty = true};
	rb_enter(th[0]);
	s = rb_put(th[0], &a);
	if (s != RB_OK)
		die("replay: put: %s", tl_status(s));
	rb_leave(th[0]);
	count.replayed++;
}

static void
op_restart(void)
{
	uint64_t	cut;

	opname = "restart";
	count.restarts++;
	/* a version installed and never logged dies with the memory; a logged one without its stamp does not */
	npend = 0;
	if (durable < checkpoint)
		durable = checkpoint;
	cut = durable + tl_below(&rng, (uint32_t) (wal_end() - durable) + 1);
	if (trace)
		printf("%lu restart: log ends at %lu of %lu, checkpoint %lu\n", step, cut, wal_end(), checkpoint);
	wal_n = cut - wal_base;
	for (uint32_t i = 0; i < ncommits; i++)
		xstate[commits[i].xid] = commits[i].lsn <= cut ? RB_XID_SETTLED : RB_XID_ABORTED;
	ncommits = 0;
	for (uint32_t i = 0; i < NXIDS; i++)
	{
		if (running[i])
			xstate[running[i]] = RB_XID_ABORTED;
		running[i] = 0;
	}
	for (int t = 0; t < NTREES; t++)
	{
		trees[t].noted = false;
		for (uint32_t k = 0; k < NKEYS; k++)
		{
			prune(&trees[t].key[k]);
			trees[t].key[k].lock_xid = 0;
		}
	}
	durable = cut;
	rb_detach(th[0]);
	rb_detach(th[1]);
	tl_arena_free(arena, arena_size);
	if (tl_permille(&rng, 700))
		fs_crash(fs);
	start_buffer();
	for (uint64_t i = checkpoint - wal_base; i < wal_n; i++)
	{
		if (wal[i].type == LOG_COMMIT || xstate[wal[i].xid] != RB_XID_SETTLED)
			continue;
		for (int t = 0; t < NTREES; t++)
			if (trees[t].id == wal[i].tree)
				replay_put(&trees[t], &wal[i]);
	}
	/* the notes of the last life are in the store (tree 0) in a real host */
	for (int t = 0; t < NTREES; t++)
	{
		trees[t].noted = true;
		trees[t].note = 1;
	}
}

/* ---- hooks ------------------------------------------------------------------------------------------------------- */

static void
hook(void *arg, fs_point point, st_opcode op)
{
	const char *name = opname;
	uint32_t	w = waits;

	(void) arg;
	(void) point;
	(void) op;
	if (depth || !tl_permille(&rng, hook_permille))
		return;
	depth++;
	count.hooks++;
	waits = 0;
	switch (tl_below(&rng, 10))
	{
		case 0:
		case 1:
		case 2:
			op_put(th[1]);
			break;
		case 3:
		case 4:
			op_evict(th[1]);
			break;
		case 5:
			op_tree_evict(th[1]);
			break;
		case 6:
			op_read_keys(th[1]);
			break;
		case 7:
			op_read_range(th[1]);
			break;
		case 8:
			op_checkpoint(th[1]);
			break;
		default:
			op_probe(th[1]);
			break;
	}
	depth--;
	waits = w;
	opname = name;
}

static void
new_weather(void)
{
	fs_faults	f = {0};
	uint32_t	p = tl_below(&rng, 4);

	/* keys in doubt are settled before the sun shines again */
	faulty = p >= 2;
	if (p == 2)
		f = (fs_faults) {.fail_get = 20, .fail_range = 20, .fail_write = 20, .partial = 50, .fail_sync = 50,
	.truncate = 100};
	if (p == 3)
		f = (fs_faults) {.fail_get = 10, .fail_range = 10, .fail_write = 50, .partial = 100, .ambiguous = 150,
	.fail_resolve = 200, .fail_sync = 50, .truncate = 200};
	if (p == 1)
		f.truncate = 300;
	fs_set_faults(fs, &f);
	hook_permille = tl_permille(&rng, 300) ? 0 : 100;
}

static void
one_step(void)
{
	uint32_t	what = tl_below(&rng, 10000);

	waits = 0;
	for (int t = 0; t < NTREES; t++)
		for (uint32_t k = 0; k < NKEYS; k++)
			trees[t].key[k].touched = false;
	if (what < 3500)
		op_put(th[0]);
	else if (what < 5000)
		op_read_keys(th[0]);
	else if (what < 6500)
		op_read_range(th[0]);
	else if (what < 8000)
		check_key(any_tree(), any_key(), true);
	else if (what < 8900)
		end_xid(tl_below(&rng, NXIDS), tl_permille(&rng, 800));
	else if (what < 9200)
		settle_some(1 + tl_below(&rng, 4));
	else if (what < 9400)
		stamp_all();
	else if (what < 9700)
		op_evict(th[0]);
	else if (what < 9800)
		op_probe(th[0]);
	else if (what < 9850)
		op_tree_evict(th[0]);
	else if (what < 9900)
		op_checkpoint(th[0]);
	else if (what < 9940)
		op_settle(th[0]);
	else if (what < 9960)
		op_tree();
	else if (what < 9980)
		op_restart();
	else
		new_weather();
}

static int
cmp_keys(const void *a, const void *b)
{
	const typeof(keys[0]) *x = a,
			   *y = b;

	return tl_cmp(x->b, x->len, y->b, y->len);
}

static void
make_keys(void)
{
	static const uint8_t alphabet[] = {0x00, 'a', 'b', 0xff};

	for (uint32_t n = 0; n < NKEYS;)
	{
		uint32_t	len = 1 + tl_below(&rng, 5);
		bool		twice = false;

		for (uint32_t i = 0; i < len; i++)
			keys[n].b[i] = alphabet[tl_below(&rng, 4)];
		if (tl_permille(&rng, 150))
			while (len < 40)
				keys[n].b[len++] = 'x';
		keys[n].len = len;
		for (uint32_t i = 0; i < n; i++)
			twice = twice || cmp_keys(&keys[i], &keys[n]) == 0;
		n += !twice;
	}
	qsort(keys, NKEYS, sizeof(keys[0]), cmp_keys);
}

int
main(int argc, char **argv)
{
	uint64_t	ops = 100000;

	for (int i = 1; i < argc; i++)
	{
		if (strcmp(argv[i], "--trace") == 0)
			trace = true;
		else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
			seed = strtoull(argv[++i], NULL, 0);
		else if (strcmp(argv[i], "--ops") == 0 && i + 1 < argc)
			ops = strtoull(argv[++i], NULL, 0);
		else
		{
			fprintf(stderr, "usage: model [--seed N] [--ops N] [--trace]\n");
			return 2;
		}
	}
	printf("model: seed %lu, %lu operations\n", seed, ops);
	fflush(stdout);
	rng.s = seed * 1000003;
	new_xid();					/* 0 is none; the first real one is 2 */
	xstate[1] = RB_XID_SETTLED;
	make_keys();
	fs = fs_create(seed);
	ctl = fs_open(fs);
	fs_set_hook(fs, hook, observe, NULL);
	for (int t = 0; t < NTREES; t++)
		trees[t].id = next_tree++;
	start_buffer();
	for (step = 0; step < ops; step++)
	{
		one_step();
		if (step % 64 == 0)
			check_structure();
		if (step % 1024 == 0)
			check_all();
	}
	opname = "end";
	fs_set_faults(fs, NULL);
	hook_permille = 0;
	faulty = false;
	waits = 0;
	for (uint32_t i = 0; i < NXIDS; i++)
		end_xid(i, true);
	op_checkpoint(th[0]);
	op_restart();
	check_all();
	rb_detach(th[0]);
	rb_detach(th[1]);
	tl_arena_free(arena, arena_size);
	st_close(ctl);
	fs_destroy(fs);
	free(wal);
	free(xstate);
	free(commits);
	printf("reads %lu puts %lu fetched first %lu hooks %lu checkpoints %lu restarts %lu replayed %lu; "
		   "errors: full %lu store %lu canceled %lu\n", count.reads, count.puts, count.retried, count.hooks,
		   count.checkpoints, count.restarts, count.replayed, count.full, count.store, count.canceled);
	printf("%lu passed, 0 failed\n", ops);
	return 0;
}
