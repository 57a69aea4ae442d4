/*
 * model.h
 *	  The model of model.c: keys and their versions, transactions, the log, and the port that answers from them.
 *
 * Included once; everything is static.  Two version chains are the same when every snapshot reads the same from both:
 * chain_*() bring a chain of the model, of the buffer or of the store into the form in which they are compared.
 */
#ifndef NEMO_RB_MODEL_H
#define NEMO_RB_MODEL_H

#include "testlib.h"

#define NKEYS	48
#define NTREES	4
#define MAXV	40
#define NXIDS	4				/* running at a time */

typedef struct mver
{
	uint64_t	xid, lsn, val;
	uint32_t	len, cid;
	uint8_t		kind, tag;
} mver;

typedef struct mkey
{
	mver		v[MAXV];		/* newest first */
	uint32_t	n;
	uint64_t	lock_xid;
	bool		touched;		/* changed by a hook during the present operation */
} mkey;

typedef struct mtree
{
	uint64_t	id;
	bool		noted;
	uint64_t	note;			/* lowest xid the buffer gave notice of */
	mkey		key[NKEYS];
} mtree;

typedef enum logtype
{
	LOG_PUT, LOG_WITHDRAW, LOG_COMMIT
} logtype;

typedef struct logrec
{
	logtype		type;
	uint64_t	xid, tree, val;
	uint32_t	key, len;
	uint8_t		kind, tag;
} logrec;

typedef struct pending
{
	mtree	   *tree;
	uint32_t	key;
	rb_version *v;
	logrec		rec;
	uint64_t	lsn;			/* 0 = not logged yet */
} pending;

typedef struct commit
{
	uint64_t	xid, lsn;
} commit;

static tl_rng rng;
static uint64_t seed = 1, step;
static bool trace;
static const char *opname = "start";

static struct
{
	uint8_t		b[48];
	uint32_t	len;
}			keys[NKEYS];
static mtree trees[NTREES];
static uint64_t next_tree = 1000;

static uint8_t *xstate;
static uint64_t nxids = 1, xcap;
static uint64_t running[NXIDS];
static commit *commits;			/* committed, not settled, oldest first */
static uint32_t ncommits, commits_cap;
static uint32_t next_cid = 1;

static logrec *wal;				/* wal[i] has LSN wal_base + i + 1 */
static uint64_t wal_base, wal_n, wal_cap, durable, checkpoint;

static pending pend[16];
static uint32_t npend;

static fs_store *fs;
static st_store *ctl;
static bool faulty;
static void *arena;
static size_t arena_size;
static rb_buffer *rb;
static rb_thread *th[2];
static uint32_t depth;			/* in a hook */
static uint32_t waits;
static uint64_t next_val = 1;
static uint32_t hook_permille;

static struct
{
	uint64_t	reads, puts, full, store, canceled, retried, restarts, checkpoints, hooks, replayed;
}			count;

static void __attribute__((noreturn, format(printf, 1, 2)))
die(const char *fmt, ...)
{
	va_list		ap;

	printf("FAILED: seed %lu step %lu op %s depth %u: ", seed, step, opname, depth);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n%lu passed, 1 failed\n", step);
	fflush(stdout);
	abort();
}

static const char *
keyname(const mtree *t, uint32_t k)
{
	static char buf[4][160];
	static int	which;
	char	   *s = buf[which++ % 4];
	int			at = snprintf(s, 160, "%lu/#%u:", t->id, k);

	for (uint32_t i = 0; i < keys[k].len && at < 150; i++)
		at += snprintf(s + at, (size_t) (160 - at), "%02x", keys[k].b[i]);
	return s;
}

static tl_key
mkkey(const mtree *t, uint32_t k)
{
	return tl_makekey(t->id, keys[k].b, keys[k].len);
}

static int
findkey(const uint8_t *own, size_t len)
{
	int			lo = 0,
				hi = NKEYS;

	while (lo < hi)
	{
		int			mid = (lo + hi) / 2;

		if (tl_cmp(keys[mid].b, keys[mid].len, own, len) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static bool
iskey(int i, const uint8_t *own, size_t len)
{
	return i < NKEYS && tl_cmp(keys[i].b, keys[i].len, own, len) == 0;
}

/* ---- values: eight bytes repeated -------------------------------------------------------------------------------- */

static void
fill(uint8_t *p, uint32_t len, uint64_t val)
{
	uint64_t	pat = val * 0x9e3779b97f4a7c15ULL;

	for (uint32_t i = 0; i < len; i += 8)
		memcpy(p + i, &pat, len - i < 8 ? len - i : 8);
}

static bool
filled(const uint8_t *p, uint32_t len, uint64_t val)
{
	uint64_t	pat = val * 0x9e3779b97f4a7c15ULL;

	for (uint32_t i = 0; i < len; i += 8)
		if (memcmp(p + i, &pat, len - i < 8 ? len - i : 8) != 0)
			return false;
	return true;
}

/* ---- chains ------------------------------------------------------------------------------------------------------ */

typedef struct cver
{
	uint64_t	xid;			/* 0 = settled */
	uint64_t	val;			/* of the model; the buffer's bytes are at data */
	const uint8_t *data;
	uint32_t	cid, len;
	uint8_t		kind, tag;
} cver;

typedef struct chain
{
	uint32_t	n;
	bool		ended;			/* a settled version was reached */
	bool		locked;			/* by lock_xid */
	cver		v[MAXV + 8];
} chain;

/* Adds one version, newest first; false = nothing below matters. */
static bool
chain_add(chain *c, uint64_t xid, cver v)
{
	uint8_t		state = xid ? xstate[xid] : RB_XID_SETTLED;

	if (c->ended || xid >= nxids)
		return false;
	if (v.kind == RB_LOCK || state == RB_XID_ABORTED)
		return true;
	/* of one committed transaction only the last version of a key is ever read */
	if (c->n && state == RB_XID_COMMITTED && c->v[c->n - 1].xid == xid)
		return true;
	if (c->n >= MAXV + 8)
		die("chain too long");
	v.xid = state == RB_XID_SETTLED ? 0 : xid;
	if (!v.xid)
		v.cid = 0;
	c->v[c->n++] = v;
	c->ended = state == RB_XID_SETTLED;
	return !c->ended;
}

static void
chain_end(chain *c)
{
	while (c->n && c->v[c->n - 1].kind == RB_DELETE)
		c->n--;
}

static void
chain_model(chain *c, const mkey *k)
{
	c->n = 0;
	c->ended = c->locked = false;
	for (uint32_t i = 0; i < k->n; i++)
	{
		const mver *m = &k->v[i];

		chain_add(c, m->xid, (cver) {.val = m->val, .cid = m->cid, .len = m->len, .kind = m->kind, .tag = m->tag});
	}
	chain_end(c);
}

static void
chain_buffer(chain *c, const rb_version *head, uint64_t lock_xid)
{
	uint32_t	steps = 0;

	c->n = 0;
	c->ended = c->locked = false;
	for (const rb_version *v = head; v; v = rb_older(v))
	{
		const rb_xversion *x = rb_x(v);

		if (++steps > 10000)
			die("endless version chain");
		if (x && (x->xid == 0 || x->xid >= nxids))
			die("version with xid %lu", x->xid);
		if (x && v->kind == RB_LOCK && x->xid == lock_xid)
			c->locked = true;
		chain_add(c, x ? x->xid : 0, (cver) {.data = rb_data(v), .cid = x ? x->cid : 0, .len = v->len,
				  .kind = v->kind, .tag = v->tag});
	}
	chain_end(c);
}

static bool
emit(void *arg, const rb_stored_version *v)
{
	chain_add(arg, v->xid, (cver) {.data = v->data.data, .cid = v->cid, .len = v->data.len, .kind = v->kind,
			  .tag = v->tag});
	return true;
}

/* NULL = the store has no record */
static void
chain_stored(chain *c, const void *bytes, size_t len)
{
	c->n = 0;
	c->ended = c->locked = false;
	if (bytes && !rb_decode_record(bytes, len, emit, c))
		die("stored record does not decode");
	chain_end(c);
}

static void
show(const char *what, const chain *c)
{
	printf("%s:", what);
	for (uint32_t i = 0; i < c->n; i++)
		printf(" [xid %lu cid %u kind %u tag %u len %u val %lu]", c->v[i].xid, c->v[i].cid, c->v[i].kind, c->v[i].tag,
			   c->v[i].len, c->v[i].val);
	printf("\n");
}

static bool
same(const chain *b, const chain *m)
{
	if (b->n != m->n)
		return false;
	for (uint32_t i = 0; i < b->n; i++)
	{
		const cver *x = &b->v[i],
				   *y = &m->v[i];

		if (x->xid != y->xid || x->cid != y->cid || x->kind != y->kind || x->len != y->len || x->tag != y->tag ||
			!filled(x->data, x->len, y->val))
			return false;
	}
	return true;
}

static void
compare(const char *where, const chain *b, const mtree *t, uint32_t k)
{
	chain		m;

	chain_model(&m, &t->key[k]);
	if (!same(b, &m))
	{
		show("found", b);
		show("model", &m);
		die("%s: key %s differs", where, keyname(t, k));
	}
}

/* Drops from the model what no snapshot reads any more. */
static void
prune(mkey *k)
{
	uint32_t	n = 0;

	for (uint32_t i = 0; i < k->n; i++)
	{
		if (xstate[k->v[i].xid] == RB_XID_ABORTED)
			continue;
		k->v[n++] = k->v[i];
		if (xstate[k->v[i].xid] == RB_XID_SETTLED)
			break;
	}
	k->n = n;
}

/* ---- log and transactions ---------------------------------------------------------------------------------------- */

static uint64_t
wal_end(void)
{
	return wal_base + wal_n;
}

static uint64_t
wal_add(logrec rec)
{
	if (wal_n == wal_cap)
	{
		wal_cap = wal_cap ? wal_cap * 2 : 1024;
		wal = realloc(wal, wal_cap * sizeof(logrec));
	}
	wal[wal_n++] = rec;
	return wal_end();
}

static void
log_pending(pending *p)
{
	mkey	   *k = &p->tree->key[p->key];

	if (p->lsn)
		return;
	p->lsn = wal_add(p->rec);
	for (uint32_t i = 0; i < k->n; i++)
		if (k->v[i].val == p->rec.val)
			k->v[i].lsn = p->lsn;
}

static void
stamp(uint32_t i)
{
	log_pending(&pend[i]);
	rb_stamp(th[1], pend[i].v, pend[i].lsn);
	pend[i] = pend[--npend];
}

static void
stamp_all(void)
{
	/* records of one key in the order of its versions: oldest pending first */
	for (uint32_t i = 0; i < npend; i++)
		log_pending(&pend[i]);
	while (npend)
		stamp(npend - 1);
}

static bool
is_pending(const mtree *t, uint32_t k)
{
	for (uint32_t i = 0; i < npend; i++)
		if (pend[i].tree == t && pend[i].key == k)
			return true;
	return false;
}

static uint64_t
new_xid(void)
{
	if (nxids >= xcap)
	{
		xcap = xcap ? xcap * 2 : 1024;
		xstate = realloc(xstate, xcap);
	}
	xstate[nxids] = RB_XID_RUNNING;
	return nxids++;
}

static void
settle_some(uint32_t n)
{
	if (n > ncommits)
		n = ncommits;
	for (uint32_t i = 0; i < n; i++)
	{
		if (commits[i].lsn > durable)
			durable = commits[i].lsn;
		xstate[commits[i].xid] = RB_XID_SETTLED;
	}
	ncommits -= n;
	if (ncommits)
		memmove(commits, commits + n, ncommits * sizeof(commit));
}

static void
end_xid(uint32_t slot, bool ok)
{
	uint64_t	xid = running[slot];

	if (!xid)
		return;
	running[slot] = 0;
	stamp_all();
	if (!ok)
	{
		xstate[xid] = RB_XID_ABORTED;
		return;
	}
	if (ncommits == commits_cap)
	{
		commits_cap = commits_cap ? commits_cap * 2 : 64;
		commits = realloc(commits, commits_cap * sizeof(commit));
	}
	commits[ncommits++] = (commit) {xid, wal_add((logrec) {.type = LOG_COMMIT, .xid = xid})};
	if (tl_permille(&rng, 700))
		durable = wal_end();
	xstate[xid] = RB_XID_COMMITTED;
	/* chains of the model are short arrays */
	if (ncommits > 6)
		settle_some(ncommits - 6 + tl_below(&rng, 6));
}

/* ---- the port ---------------------------------------------------------------------------------------------------- */

static rb_xid_state
port_xid_state(void *ctx, uint64_t xid)
{
	(void) ctx;
	if (xid == 0 || xid >= nxids)
		die("asked for the state of xid %lu", xid);
	return xstate[xid];
}

static int
port_wal_flush(void *ctx, uint64_t lsn)
{
	(void) ctx;
	if (lsn > wal_end())
		die("asked to flush the log to %lu, its end is %lu", lsn, wal_end());
	if (faulty && tl_permille(&rng, 10))
		return -1;
	if (lsn > durable)
		durable = lsn;
	return 0;
}

static void
port_wait(void *ctx, uint32_t channel, uint32_t timeout_ms)
{
	(void) ctx;
	(void) timeout_ms;
	if (channel >= RB_CHANNELS)
		die("wait on channel %u", channel);
	waits++;
	if (waits > 100000)
		die("waits without end");
	stamp_all();
}

static void
port_wake(void *ctx, uint32_t channel)
{
	(void) ctx;
	if (channel >= RB_CHANNELS)
		die("wake on channel %u", channel);
}

static bool
port_interrupted(void *ctx)
{
	(void) ctx;
	/* in a hook the first thread cannot go on: whoever waits for it must give up */
	return waits > (depth ? 3 : 300);
}

static void
port_note(void *ctx, uint64_t tree, uint64_t oldest)
{
	(void) ctx;
	for (int i = 0; i < NTREES; i++)
		if (trees[i].id == tree && (!trees[i].noted || oldest < trees[i].note))
		{
			trees[i].noted = true;
			trees[i].note = oldest;
		}
}

static const rb_port port = {NULL, port_xid_state, port_wal_flush, port_wait, port_wake, port_interrupted, port_note};

static st_store *
open_store(void *arg, st_error *err)
{
	(void) arg;
	(void) err;
	return fs_open(fs);
}

static void
start_buffer(void)
{
	size_t		least = rb_min_size(4);

	arena_size = least + (tl_permille(&rng, 600) ? tl_below(&rng, 96) * 1024 : 4 << 20);
	arena_size = (arena_size + 4095) & ~(size_t) 4095;
	arena = tl_arena(arena_size);
	rb = rb_create(arena, arena_size, 4);
	if (!rb)
		die("rb_create failed with %zu bytes, least is %zu", arena_size, least);
	for (uint32_t i = 0; i < 2; i++)
	{
		th[i] = rb_attach(rb, i, &port);
		if (!th[i])
			die("rb_attach failed");
		rb_set_store(th[i], open_store, NULL);
	}
}

static void
check_structure(void)
{
	const char *words = rb_check(rb);
	const char *twice;

	if (words)
		die("rb_check: %s", words);
	if (fs_violations(fs, &twice))
		die("%s", twice);
}

/* An error is fine only where something can have caused it. */
static bool
ok(const char *what, rb_status s, const rb_error *err)
{
	if (s == RB_OK)
		return true;
	if (s == RB_FULL)
		count.full++;
	else if (s == RB_STORE && faulty)
		count.store++;
	else if (s == RB_CANCELED && (depth || faulty))
		count.canceled++;
	else
		die("%s: %s (%s)", what, tl_status(s), err->st.message);
	if (!err->st.message[0])
		die("%s: %s without a message", what, tl_status(s));
	return false;
}

#endif							/* NEMO_RB_MODEL_H */
