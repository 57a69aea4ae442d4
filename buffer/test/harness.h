/*
 * harness.h
 *	  Set-up, hooks and short words of invariants.c: one buffer, one fake store, two rb_threads.
 *
 * Included once; everything is static.  Keys and values are C strings in tree TREE; "-" stands for absent, "?" for a
 * miss, "!" for an error.  Transactions below 100 have the states named here, all later ones are settled.
 */
#ifndef NEMO_RB_HARNESS_H
#define NEMO_RB_HARNESS_H

#include "testlib.h"

#define TREE	500
#define XID_COMMITTED	3		/* the state of each xid is below; from 100 on all are settled */
#define XID_ABORTED		4
#define XID_RUNNING		5

static fs_store *fs;
static void *arena;
static size_t arena_size;
static rb_buffer *rb;
static rb_thread *th[2];
static uint32_t depth, waits;
static uint64_t lsn = 1, durable;
static bool wal_broken, noted;
static uint64_t next_xid = 100;
static rb_version *unstamped;	/* stamped by the next wait */

static void (*hook_fn) (fs_point point, st_opcode op);
static uint32_t hook_calls;
static bool broken;				/* the present test failed */
static bool hook_wrote;			/* a hook did what it was there for */

#define CHECK(cond, ...) \
	do { \
		if (!(cond)) \
		{ \
			printf("  %s:%d: ", __func__, __LINE__); \
			printf(__VA_ARGS__); \
			printf("\n"); \
			broken = true; \
		} \
	} while (0)

/* ---- port, set-up ------------------------------------------------------------------------------------------------ */

static rb_xid_state
port_xid_state(void *ctx, uint64_t xid)
{
	(void) ctx;
	return xid == XID_COMMITTED ? RB_XID_COMMITTED : xid == XID_ABORTED ? RB_XID_ABORTED :
		xid == XID_RUNNING ? RB_XID_RUNNING : RB_XID_SETTLED;
}

static int
port_wal_flush(void *ctx, uint64_t to)
{
	(void) ctx;
	if (wal_broken)
		return -1;
	if (to > durable)
		durable = to;
	return 0;
}

static void
port_wait(void *ctx, uint32_t channel, uint32_t timeout_ms)
{
	(void) ctx;
	(void) channel;
	(void) timeout_ms;
	waits++;
	if (unstamped)
	{
		rb_version *v = unstamped;

		unstamped = NULL;
		rb_stamp(th[1], v, lsn++);
	}
}

static void
port_wake(void *ctx, uint32_t channel)
{
	(void) ctx;
	(void) channel;
}

static bool
port_interrupted(void *ctx)
{
	(void) ctx;
	return waits > (depth ? 2 : 1000);
}

static void
port_note(void *ctx, uint64_t tree, uint64_t oldest)
{
	(void) ctx;
	(void) oldest;
	noted = noted || tree == TREE;
}

static const rb_port port = {NULL, port_xid_state, port_wal_flush, port_wait, port_wake, port_interrupted, port_note};

static void
hook(void *arg, fs_point point, st_opcode op)
{
	uint32_t	w = waits;

	(void) arg;
	if (depth || !hook_fn)
		return;
	depth++;
	waits = 0;
	hook_fn(point, op);
	waits = w;
	depth--;
}

static st_store *
open_store(void *arg, st_error *err)
{
	(void) arg;
	(void) err;
	return fs_open(fs);
}

static void
start(size_t extra)
{
	fs = fs_create(1);
	fs_set_hook(fs, hook, NULL, NULL);
	arena_size = (rb_min_size(4) + extra + 4095) & ~(size_t) 4095;
	arena = tl_arena(arena_size);
	rb = rb_create(arena, arena_size, 4);
	if (!rb)
		abort();
	for (uint32_t i = 0; i < 2; i++)
	{
		th[i] = rb_attach(rb, i, &port);
		rb_set_store(th[i], open_store, NULL);
	}
	hook_fn = NULL;
	hook_calls = 0;
	wal_broken = noted = false;
	waits = 0;
	unstamped = NULL;
}

static void
finish(void)
{
	const char *words = rb_check(rb);

	CHECK(!words, "rb_check: %s", words);
	CHECK(!fs_violations(fs, &words), "%s", words);
	rb_detach(th[0]);
	rb_detach(th[1]);
	tl_arena_free(arena, arena_size);
	fs_destroy(fs);
}

/* ---- short words ------------------------------------------------------------------------------------------------- */

static void
stored(const char *k, const char *value)
{
	tl_key		key = tl_strkey(TREE, k);

	tl_store_settled(fs, &key, value, (uint32_t) strlen(value));
}

static bool
first_value(void *arg, const rb_stored_version *v)
{
	char	   *out = arg;

	if (v->kind == RB_DELETE)
		strcpy(out, "-");
	else
	{
		memcpy(out, v->data.data, v->data.len);
		out[v->data.len] = 0;
	}
	return false;
}

/* newest value in the store; "-" = none */
static const char *
in_store(const char *k)
{
	static char buf[4][128];
	static int	which;
	char	   *out = buf[which++ % 4];
	tl_key		key = tl_strkey(TREE, k);
	size_t		len;
	uint8_t    *rec = fs_peek(fs, key.b, key.len, &len);

	strcpy(out, "-");
	if (rec)
		rb_decode_record(rec, len, first_value, out);
	free(rec);
	return out;
}

static void
newest(const rb_version *v, char *out)
{
	while (v && (v->kind == RB_LOCK || (rb_x(v) && rb_x(v)->xid == XID_ABORTED)))
		v = rb_older(v);
	if (!v || v->kind == RB_DELETE)
		strcpy(out, "-");
	else
	{
		uint32_t	n = v->len < 100 ? v->len : 100;

		memcpy(out, rb_data(v), n);
		out[n] = 0;
	}
}

/* what memory says: value, "-" = known absent, "?" = a miss */
static const char *
known(rb_thread *t, const char *k)
{
	static char buf[4][128];
	static int	which;
	char	   *out = buf[which++ % 4];
	tl_key		key = tl_strkey(TREE, k);
	const rb_version *head;

	rb_enter(t);
	if (rb_lookup(t, tl_slice(&key), &head) == RB_OK)
		newest(head, out);
	else
		strcpy(out, "?");
	rb_leave(t);
	return out;
}

static bool
visit_read(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	(void) i;
	(void) key;
	newest(head, arg);
	return true;
}

static rb_status
try_read(rb_thread *t, const char *k, char *out)
{
	tl_key		key = tl_strkey(TREE, k);
	rb_slice	s = tl_slice(&key);
	rb_error	err = {0};

	strcpy(out, "!");
	return rb_read_keys(t, &s, 1, visit_read, out, &err);
}

/* value, "-" = absent, "!" = error */
static const char *
get(rb_thread *t, const char *k)
{
	static char buf[4][128];
	static int	which;
	char	   *out = buf[which++ % 4];

	if (try_read(t, k, out) != RB_OK)
		strcpy(out, "!");
	return out;
}

#define IS(what, k, want) \
	do { \
		const char *got_ = (what); \
		CHECK(strcmp(got_, want) == 0, "%s: %s is \"%s\", not \"%s\"", #what, k, got_, want); \
	} while (0)
#define GET(k, want)	IS(get(th[0], k), k, want)
#define KNOWN(k, want)	IS(known(th[0], k), k, want)
#define STORED(k, want) IS(in_store(k), k, want)

/* value NULL deletes, LOCK locks; stamped at once unless `pending` */
static const char LOCK[] = "lock";

static rb_status
write_as(rb_thread *t, const char *k, const char *value, uint64_t xid, rb_version **pending)
{
	tl_key		key = tl_strkey(TREE, k);
	uint32_t	len = value && value != LOCK ? (uint32_t) strlen(value) : 0;
	rb_error	err = {0};

	for (int tries = 0; tries < 10; tries++)
	{
		rb_version *v;
		rb_xversion *x;
		const rb_version *head,
				   *keep,
				   *cut;
		rb_status	s = rb_version_new(t, key.len, len, false, &v, &err);
		char		out[128];

		if (s != RB_OK)
			return s;
		rb_enter(t);
		s = rb_lookup(t, tl_slice(&key), &head);
		if (s != RB_OK)
		{
			rb_leave(t);
			rb_version_free(t, v);
			s = try_read(t, k, out);
			if (s != RB_OK)
				return s;
			continue;
		}
		keep = head;
		while (keep && rb_x(keep) && rb_x(keep)->xid == XID_ABORTED)
			keep = rb_older(keep);
		cut = keep;
		while (cut && rb_x(cut) && rb_x(cut)->xid < 100)
			cut = rb_older(cut);
		x = (rb_xversion *) v;
		v->kind = value == LOCK ? RB_LOCK : value ? RB_DATA : RB_DELETE;
		v->tag = 1;
		v->len = len;
		x->xid = xid;
		x->cid = 1;
		x->aux = value == LOCK;
		atomic_store(&x->lsn, value == LOCK ? 0 : RB_LSN_PENDING);
		if (len)
			memcpy((uint8_t *) rb_data(v), value, len);
		s = rb_put(t, &(rb_put_args) {.key = tl_slice(&key), .v = v, .expect = head, .keep = keep, .cut = cut,
				   .dirty = value != LOCK});
		if (s == RB_OK && value != LOCK)
		{
			if (pending)
				*pending = v;
			else
				rb_stamp(t, v, lsn++);
		}
		rb_leave(t);
		if (s != RB_OK)
			rb_version_free(t, v);
		if (s != RB_CHANGED && s != RB_UNKNOWN)
			return s;
	}
	return RB_CHANGED;
}

static rb_status
put(rb_thread *t, const char *k, const char *value)
{
	return write_as(t, k, value, next_xid++, NULL);
}

#define PUT(k, value) \
	do { \
		rb_status s_ = put(th[0], k, value); \
		CHECK(s_ == RB_OK, "put %s: %s", k, tl_status(s_)); \
	} while (0)

static void
lock_row(const char *k)
{
	rb_status	s = write_as(th[0], k, LOCK, XID_RUNNING, NULL);

	CHECK(s == RB_OK, "lock %s: %s", k, tl_status(s));
}

/* replay's way of writing: whatever is known */
static rb_status
blind(rb_thread *t, const char *k, const char *value)
{
	tl_key		key = tl_strkey(TREE, k);
	uint32_t	len = value ? (uint32_t) strlen(value) : 0;
	rb_error	err = {0};
	rb_version *v;
	rb_status	s = rb_version_new(t, key.len, len, true, &v, &err);

	if (s != RB_OK)
		return s;
	v->len = len;
	v->kind = value ? RB_DATA : RB_DELETE;
	if (len)
		memcpy((uint8_t *) rb_data(v), value, len);
	rb_enter(t);
	s = rb_put(t, &(rb_put_args) {.key = tl_slice(&key), .v = v, .blind = true, .dirty = true});
	rb_leave(t);
	return s;
}

static rb_status
evict_tree(rb_thread *t)
{
	rb_error	err = {0};

	return rb_tree_evict(t, TREE, &err);
}

static rb_status
flush(rb_thread *t)
{
	rb_error	err = {0};

	return rb_flush_all(t, &err);
}

typedef struct list
{
	char		s[4096];
	uint32_t	n;
} list;

static bool
visit_list(void *arg, uint32_t i, rb_slice key, const rb_version *head)
{
	list	   *l = arg;
	char		value[128];

	(void) i;
	newest(head, value);
	if (strcmp(value, "-") == 0)
		return true;
	l->n++;
	if (strlen(l->s) + key.len + strlen(value) + 8 < sizeof(l->s))
		sprintf(l->s + strlen(l->s), "%s%.*s=%s", l->s[0] ? " " : "", (int) key.len - RB_TREE_LEN,
				(const char *) key.data + RB_TREE_LEN, value);
	return true;
}

/* [lo, hi); NULL = the tree's end.  At most max records; 0 = all, resuming as needed. */
static const char *
range(rb_thread *t, const char *lo, const char *hi, bool backward, uint32_t max, uint32_t hint)
{
	static list l[2];
	static int	which;
	list	   *out = &l[which++ % 2];
	tl_key		from = tl_strkey(TREE, lo ? lo : ""),
				to = hi ? tl_strkey(TREE, hi) : tl_strkey(TREE + 1, "");
	bool		done = false;
	uint8_t		resume[RB_MAX_KEY + 1];

	out->s[0] = 0;
	out->n = 0;
	while (!done)
	{
		rb_error	err = {0};
		uint32_t	rlen = 0;
		rb_status	s = rb_read_range(t, tl_slice(&from), tl_slice(&to), backward, max, hint, visit_list, out, &done,
									  resume, &rlen, &err);

		if (s != RB_OK)
		{
			sprintf(out->s, "! %s", tl_status(s));
			return out->s;
		}
		if (max)
			break;
		if (!done)
		{
			memcpy((backward ? &to : &from)->b, resume, rlen);
			(backward ? &to : &from)->len = rlen;
		}
	}
	return out->s;
}

#define RANGE(lo, hi, want) \
	do { \
		const char *got_ = range(th[0], lo, hi, false, 0, 100); \
		CHECK(strcmp(got_, want) == 0, "range %s..%s is \"%s\", not \"%s\"", #lo, #hi, got_, want); \
		got_ = range(th[0], lo, hi, true, 0, 100); \
		CHECK(strlen(got_) == strlen(want), "range backward is \"%s\", not \"%s\" reversed", got_, want); \
	} while (0)

static uint64_t
requests(void)
{
	return fs_requests(fs, ST_OP_GET) + fs_requests(fs, ST_OP_GET_RANGE);
}

#endif							/* NEMO_RB_HARNESS_H */
