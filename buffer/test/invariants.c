/*
 * invariants.c
 *	  For every rule A1-A10, B1-B4, C1-C9, E1-E3 of INVARIANTS: the hole, dug on purpose, and the right answer.
 *
 * One process, two rb_threads: th[0] runs the test, th[1] acts in a hook in the middle of th[0]'s request.  In a hook
 * th[0] cannot go on, so th[1] gives up (RB_CANCELED) where it would have to wait for it.  Entries are kept in memory
 * by a row lock of a running transaction, and put out by rb_tree_evict.  The random counterpart is model.c.
 *
 *	invariants [NAME-PREFIX]
 */
#include "harness.h"

/* ---- A: coverage ------------------------------------------------------------------------------------------------- */

static void
A1_evicted_tombstone_opens_its_predecessor(void)
{
	stored("a", "1");
	stored("x", "2");
	GET("m", "-");				/* a tombstone with an unknown gap */
	GET("a", "1");
	range(th[0], "a", "m", false, 0, 100);
	lock_row("a");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	CHECK(strcmp(known(th[0], "x"), "-") != 0, "x is taken for absent");
	GET("x", "2");
	RANGE(NULL, NULL, "a=1 x=2");
}

static void
A1_evicted_record_opens_its_predecessor(void)
{
	stored("a", "1");
	stored("b", "2");
	stored("c", "3");
	RANGE(NULL, NULL, "a=1 b=2 c=3");
	lock_row("a");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	KNOWN("a", "1");
	KNOWN("b", "?");
	KNOWN("c", "?");
	GET("b", "2");
	RANGE(NULL, NULL, "a=1 b=2 c=3");
}

static void
insert_b(fs_point point, st_opcode op)
{
	if (point == FS_AFTER && op == ST_OP_GET_RANGE && hook_calls++ == 0)
		CHECK(blind(th[1], "b", "new") == RB_OK, "blind put");
}

static void
A2_gaps_are_sealed_after_looking_at_what_is_buffered(void)
{
	stored("a", "1");
	stored("c", "3");
	hook_fn = insert_b;
	range(th[0], NULL, NULL, false, 0, 100);
	CHECK(hook_calls, "the hook did not run");
	hook_fn = NULL;
	KNOWN("b", "new");
	RANGE(NULL, NULL, "a=1 b=new c=3");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	RANGE(NULL, NULL, "a=1 b=new c=3");
}

static void
A3_predecessor_in_the_leaf_to_the_left(void)
{
	enum
	{
		N = 3000
	};
	char		k[16];
	uint32_t	unknown = 0;
	uint64_t	before;
	rb_error	err = {0};
	size_t		freed;

	for (int i = 0; i < N; i += 2)
	{
		sprintf(k, "%05d", i);
		stored(k, "x");
	}
	range(th[0], NULL, NULL, false, 0, 1000);
	before = requests();
	for (int i = 1; i < N; i += 2)
	{
		sprintf(k, "%05d", i);
		unknown += strcmp(known(th[0], k), "-") != 0;
	}
	CHECK(unknown == 0, "%u keys between the records of a full scan are not known absent", unknown);
	CHECK(requests() == before, "lookups asked the store");
	/* thin out, a few at a time; no record may turn into an absent key */
	for (int round = 0; round < 30; round++)
	{
		rb_evict(th[0], 5000, &freed, &err);
		for (int i = 0; i < N; i++)
		{
			sprintf(k, "%05d", i);
			if (i % 2 == 0)
				CHECK(strcmp(known(th[0], k), "-") != 0, "%s is taken for absent after eviction", k);
			else
				CHECK(strcmp(known(th[0], k), "x") != 0, "%s appeared", k);
			if (broken)
				return;
		}
	}
	for (int i = 0; i < N; i++)
	{
		sprintf(k, "%05d", i);
		GET(k, i % 2 ? "-" : "x");
	}
}

static void
look_at_sentinel(fs_point point, st_opcode op)
{
	(void) point;
	if (op == ST_OP_GET && hook_calls++ == 0)
	{
		const char *s;

		IS(known(th[1], "k"), "k", "?");
		IS(known(th[1], "kk"), "kk", "?");
		s = range(th[1], "j", "l", false, 0, 10);
		CHECK(strcmp(s, "k=1 kk=2") == 0 || s[0] == '!', "scan over a sentinel: \"%s\"", s);
	}
}

static void
A4_sentinel_is_a_miss(void)
{
	stored("k", "1");
	stored("kk", "2");
	hook_fn = look_at_sentinel;
	GET("k", "1");
	hook_fn = NULL;
	CHECK(hook_calls, "the hook did not run");
	RANGE(NULL, NULL, "k=1 kk=2");
}

static void
A5_sentinel_inherits_the_gap(void)
{
	uint64_t	before;

	stored("a", "1");
	stored("n", "2");
	GET("m", "-");
	KNOWN("l", "?");
	KNOWN("n", "?");
	GET("n", "2");
	RANGE(NULL, NULL, "a=1 n=2");
	before = requests();
	GET("b", "-");				/* in a known gap */
	GET("b", "-");
	KNOWN("c", "-");
	CHECK(requests() == before, "a key in a known gap was asked for");
}

static void
A6_insert_inherits_update_keeps(void)
{
	stored("a", "1");
	stored("n", "2");
	CHECK(blind(th[0], "m", "new") == RB_OK, "put");
	KNOWN("n", "?");
	KNOWN("l", "?");
	GET("n", "2");
	PUT("n", "3");
	KNOWN("o", "?");			/* its own bit stays */
	RANGE(NULL, NULL, "a=1 m=new n=3");
	PUT("c", "4");				/* into a known gap: both halves stay known */
	KNOWN("b", "-");
	KNOWN("d", "-");
	PUT("c", NULL);
	KNOWN("b", "-");
	KNOWN("c", "-");
	KNOWN("d", "-");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	RANGE(NULL, NULL, "a=1 m=new n=3");
}

static void
A7_bounds_that_are_no_keys(void)
{
	uint64_t	before;
	rb_error	err = {0};
	tl_key		other = tl_strkey(TREE + 1, "x"),
				made = tl_strkey(TREE + 3, "x");
	const rb_version *head;

	stored("aa", "1");
	stored("ab", "2");
	stored("ba", "3");
	tl_store_settled(fs, &other, "y", 1);
	RANGE("a", "b", "aa=1 ab=2");
	KNOWN("aaa", "-");
	KNOWN("a0", "-");
	KNOWN("az", "-");
	CHECK(strcmp(known(th[0], "ba"), "-") != 0, "ba lies beyond the bound");
	GET("ba", "3");
	RANGE(NULL, NULL, "aa=1 ab=2 ba=3");
	before = requests();
	GET("zz", "-");
	GET("A", "-");
	CHECK(requests() == before, "beyond a scan to both ends the store was asked");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&other), &head) == RB_UNKNOWN, "the next tree is taken for known");
	rb_leave(th[0]);
	CHECK(rb_tree_create(th[0], TREE + 3, &err) == RB_OK, "create");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&made), &head) == RB_OK && !head, "a new tree is not known empty");
	made = tl_strkey(TREE + 4, "x");
	CHECK(rb_lookup(th[0], tl_slice(&made), &head) == RB_UNKNOWN, "the tree after a new one is taken for empty");
	made = tl_strkey(TREE + 2, "x");
	CHECK(rb_lookup(th[0], tl_slice(&made), &head) == RB_UNKNOWN, "the tree before a new one is taken for empty");
	rb_leave(th[0]);
	/* dropped and forgotten: nothing is known */
	rb_tree_drop(th[0], TREE + 3, TREE + 4);
	made = tl_strkey(TREE + 3, "x");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&made), &head) == RB_UNKNOWN, "a dropped tree is known");
	rb_leave(th[0]);
}

static void
A8_exclusive_bound(void)
{
	stored("a", "1");
	stored("m", "2");
	stored("z", "3");
	RANGE("a", "m", "a=1");
	CHECK(strcmp(known(th[0], "m"), "-") != 0, "the bound is taken for absent");
	GET("m", "2");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	IS(range(th[0], "b", "m", true, 0, 10), "b..m", "");
	CHECK(strcmp(known(th[0], "m"), "-") != 0, "the bound is taken for absent");
	RANGE("b", NULL, "m=2 z=3");
}

static void
A9_truncated_result(void)
{
	char		k[16];
	char		want[256] = "";

	for (int i = 0; i < 10; i++)
	{
		sprintf(k, "%d", i);
		stored(k, "x");
		sprintf(want + strlen(want), "%s%d=x", i ? " " : "", i);
	}
	fs_set_page(fs, 3);
	IS(range(th[0], NULL, NULL, false, 3, 3), "first three", "0=x 1=x 2=x");
	for (int i = 3; i < 10; i++)
	{
		sprintf(k, "%d", i);
		CHECK(strcmp(known(th[0], k), "-") != 0, "%s is taken for absent", k);
	}
	KNOWN("z", "?");
	KNOWN("1a", "-");
	RANGE(NULL, NULL, want);
	fs_set_page(fs, 0);
	RANGE(NULL, NULL, want);
}

static void
A10_backward_scan(void)
{
	char		k[16];

	for (int i = 0; i < 10; i++)
	{
		sprintf(k, "%d", i);
		stored(k, "x");
	}
	GET("2", "x");
	fs_set_page(fs, 3);
	IS(range(th[0], NULL, NULL, true, 3, 3), "last three", "9=x 8=x 7=x");
	for (int i = 0; i < 7; i++)
	{
		sprintf(k, "%d", i);
		CHECK(strcmp(known(th[0], k), "-") != 0, "%s is taken for absent", k);
	}
	CHECK(strcmp(known(th[0], "6a"), "-") != 0 || strcmp(known(th[0], "6"), "x") == 0, "below the lowest is sealed");
	KNOWN("2a", "?");
	IS(range(th[0], NULL, NULL, true, 0, 4), "all", "9=x 8=x 7=x 6=x 5=x 4=x 3=x 2=x 1=x 0=x");
}

/* ---- B: admission ------------------------------------------------------------------------------------------------ */

static void
B1_the_buffer_wins(void)
{
	stored("a", "1");
	stored("b", "2");
	stored("c", "3");
	stored("d", "4");
	PUT("b", "new");
	PUT("c", NULL);
	RANGE(NULL, NULL, "a=1 b=new d=4");
	KNOWN("b", "new");
	KNOWN("c", "-");
	CHECK(flush(th[0]) == RB_OK, "flush");
	STORED("b", "new");
	STORED("c", "-");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	RANGE(NULL, NULL, "a=1 b=new d=4");
}

static void
update_flush_evict(fs_point point, st_opcode op)
{
	if (point != FS_AFTER || (op != ST_OP_GET_RANGE && op != ST_OP_GET) || hook_calls++)
		return;
	hook_wrote = blind(th[1], "b", "new") == RB_OK;
	flush(th[1]);
	evict_tree(th[1]);
}

static void
B2_old_range_result_after_flush_and_evict(void)
{
	for (int backward = 0; backward < 2; backward++)
	{
		stored("a", "1");
		stored("b", "old");
		stored("c", "3");
		hook_calls = 0;
		hook_wrote = false;
		hook_fn = update_flush_evict;
		range(th[0], NULL, NULL, backward, 0, 100);
		hook_fn = NULL;
		CHECK(hook_wrote, "the hook could not write");
		GET("b", "new");
		RANGE(NULL, NULL, "a=1 b=new c=3");
		CHECK(evict_tree(th[0]) == RB_OK, "evict");
		GET("b", "new");
		CHECK(evict_tree(th[0]) == RB_OK, "evict");
	}
}

static void
B3_negative_result_that_races_with_an_insertion(void)
{
	stored("a", "1");
	stored("c", "3");
	hook_wrote = false;
	hook_fn = update_flush_evict;
	get(th[0], "b");
	hook_fn = NULL;
	CHECK(hook_wrote, "the hook could not write");
	GET("b", "new");
	RANGE(NULL, NULL, "a=1 b=new c=3");

	/* the same with a range, and with a probe */
	for (int probe = 0; probe < 2; probe++)
	{
		tl_key		k = tl_strkey(TREE, probe ? "ab" : "b");
		rb_error	err = {0};

		CHECK(blind(th[0], "b", NULL) == RB_OK && evict_tree(th[0]) == RB_OK, "delete and evict");
		STORED("b", "-");
		hook_calls = 0;
		hook_wrote = false;
		hook_fn = update_flush_evict;
		if (probe)
			rb_probe(th[0], tl_slice(&k), &err);
		else
			range(th[0], "a", "c", false, 0, 10);
		hook_fn = NULL;
		CHECK(hook_wrote, "the hook could not write");
		GET("b", "new");
		RANGE(NULL, NULL, "a=1 b=new c=3");
	}
}

static void
B3_failed_fetch_leaves_no_trace(void)
{
	char		out[128];

	stored("b", "2");
	fs_fail_next(fs, ST_OP_GET, 1, ST_UNAVAILABLE, false);
	CHECK(try_read(th[0], "b", out) == RB_STORE, "a failed read");
	KNOWN("b", "?");
	GET("b", "2");
	fs_fail_next(fs, ST_OP_GET_RANGE, 1, ST_UNAVAILABLE, false);
	CHECK(range(th[0], NULL, NULL, false, 0, 10)[0] == '!', "a failed range");
	CHECK(strcmp(known(th[0], "c"), "-") != 0, "a failed range sealed a gap");
	RANGE(NULL, NULL, "b=2");
}

static void
B4_result_larger_than_the_buffer(void)
{
	uint32_t	n = (uint32_t) (arena_size / 50000) + 20;
	static char big[50001];
	char		k[16];
	static list l;
	tl_key		from = tl_strkey(TREE, ""),
				to = tl_strkey(TREE + 1, "");
	bool		done = false;
	uint8_t		resume[RB_MAX_KEY + 1];
	rb_error	err = {0};

	memset(big, 'v', sizeof(big) - 1);
	for (uint32_t i = 0; i < n; i++)
	{
		sprintf(k, "%05u", i);
		stored(k, big);
	}
	l.n = 0;
	while (!done)
	{
		uint32_t	rlen = 0;
		rb_status	s = rb_read_range(th[0], tl_slice(&from), tl_slice(&to), false, 0, 1000, visit_list, &l, &done,
									  resume, &rlen, &err);

		CHECK(s == RB_OK, "range: %s (%s)", tl_status(s), err.st.message);
		if (s != RB_OK)
			return;
		if (!done)
		{
			memcpy(from.b, resume, rlen);
			from.len = rlen;
		}
	}
	CHECK(l.n == n, "%u records of %u", l.n, n);
}

/* ---- C: flush and eviction --------------------------------------------------------------------------------------- */

static void
C1_only_what_was_acknowledged(void)
{
	stored("a", "1");
	stored("b", "2");
	stored("c", "3");
	PUT("a", "a2");
	PUT("b", NULL);
	PUT("c", "c2");
	for (uint32_t n = 0; n < 3; n++)
	{
		fs_partial_next(fs, n);
		evict_tree(th[0]);
		GET("a", "a2");
		GET("b", "-");
		GET("c", "c2");
	}
	fs_fail_next(fs, ST_OP_UPSERT, 1, ST_FULL, false);
	evict_tree(th[0]);
	CHECK(flush(th[0]) == RB_OK, "flush");
	STORED("a", "a2");
	STORED("b", "-");
	STORED("c", "c2");
}

static void
C2_log_first(void)
{
	uint64_t	before = fs_requests(fs, ST_OP_UPSERT);

	PUT("a", "1");
	wal_broken = true;
	CHECK(flush(th[0]) != RB_OK, "flush succeeds without the log");
	evict_tree(th[0]);
	CHECK(fs_requests(fs, ST_OP_UPSERT) == before, "a write went out before its log");
	STORED("a", "-");
	KNOWN("a", "1");
	wal_broken = false;
	CHECK(flush(th[0]) == RB_OK, "flush");
	CHECK(durable >= lsn - 1, "log durable to %lu of %lu", durable, lsn - 1);
	STORED("a", "1");
}

static fs_point change_at;
static const char *change_to;
static void
change_in_flight(fs_point point, st_opcode op)
{
	if (op == ST_OP_UPSERT && point == change_at && hook_calls++ == 0)
		hook_wrote = put(th[1], "b", change_to) == RB_OK;
}

static void
C3_changed_while_its_flush_is_under_way(void)
{
	static const char *const to[] = {"v2", NULL};

	stored("b", "0");
	for (int evict = 0; evict < 2; evict++)
		for (int at = 0; at < 2; at++)
			for (int del = 0; del < 2; del++)
				for (int from_del = 0; from_del < 2; from_del++)
				{
					const char *want = to[del] ? to[del] : "-";

					PUT("b", "v0");
					PUT("b", from_del ? NULL : "v1");
					hook_calls = 0;
					hook_wrote = false;
					change_at = at ? FS_AFTER : FS_BEFORE;
					change_to = to[del];
					hook_fn = change_in_flight;
					if (evict)
						evict_tree(th[0]);
					else
						flush(th[0]);
					hook_fn = NULL;
					CHECK(hook_wrote, "the hook could not write");
					GET("b", want);
					CHECK(flush(th[0]) == RB_OK, "flush");
					STORED("b", want);
					CHECK(evict_tree(th[0]) == RB_OK, "evict");
					GET("b", want);
				}
}

static void
C4_old_write_that_lands_late(void)
{
	for (int del = 0; del < 2; del++)
		for (int land = 0; land < 2; land++)
		{
			PUT("b", "v1");
			fs_fail_next(fs, ST_OP_UPSERT, 1, ST_TIMEOUT, true);
			flush(th[0]);
			PUT("b", del ? NULL : "v2");
			if (land)
				fs_land(fs);
			flush(th[0]);
			CHECK(flush(th[0]) == RB_OK, "flush");
			fs_land(fs);
			STORED("b", del ? "-" : "v2");
			CHECK(evict_tree(th[0]) == RB_OK, "evict");
			GET("b", del ? "-" : "v2");
		}
}

static void
C4_key_in_doubt_is_read_right(void)
{
	stored("b", "v0");
	PUT("b", "v1");
	fs_fail_next(fs, ST_OP_UPSERT, 1, ST_TIMEOUT, true);
	evict_tree(th[0]);
	GET("b", "v1");
	RANGE(NULL, NULL, "b=v1");
	evict_tree(th[1]);
	IS(get(th[1], "b"), "b", "v1");
	fs_land(fs);
	GET("b", "v1");
}

static void
C5_locked_entries_stay(void)
{
	tl_key		key = tl_strkey(TREE, "b");
	const rb_version *head;
	rb_error	err = {0};
	size_t		freed;

	stored("a", "1");
	stored("b", "2");
	RANGE(NULL, NULL, "a=1 b=2");
	lock_row("b");
	evict_tree(th[0]);
	for (int i = 0; i < 20; i++)
		rb_evict(th[0], 1 << 20, &freed, &err);
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&key), &head) == RB_OK && head && head->kind == RB_LOCK, "the lock is gone");
	rb_leave(th[0]);
	GET("b", "2");
	STORED("b", "2");
}

static void
give_up_on_sentinel(fs_point point, st_opcode op)
{
	char		out[128];

	(void) point;
	if (op != ST_OP_GET || hook_calls++)
		return;
	/* waits for th[0]'s fetch, gives up; the anchor must stay th[0]'s */
	CHECK(try_read(th[1], "b", out) != RB_OK || strcmp(out, "2") == 0, "read %s", out);
	rb_reset(th[1]);
	evict_tree(th[1]);
	hook_wrote = blind(th[1], "b", "new") == RB_OK;
	flush(th[1]);
	evict_tree(th[1]);
}

static void
C5_one_waiter_gives_up_on_a_sentinel(void)
{
	stored("b", "2");
	hook_fn = give_up_on_sentinel;
	get(th[0], "b");
	hook_fn = NULL;
	CHECK(hook_calls && hook_wrote, "the hook could not write");
	GET("b", "new");
}

static void
C6_full_is_an_error(void)
{
	static char big[2001];
	rb_version *pending[4096];
	uint32_t	n = 0;
	rb_status	s = RB_OK;
	char		k[16];
	rb_error	err = {0};
	rb_version *v;
	uint32_t	most = (uint32_t) (arena_size / 2000) + 10;

	memset(big, 'v', sizeof(big) - 1);
	CHECK(rb_tree_create(th[0], TREE, &err) == RB_OK, "create");
	while (n < 4096 && n < most)
	{
		sprintf(k, "%05u", n);
		s = write_as(th[0], k, big, XID_COMMITTED, &pending[n]);
		if (s != RB_OK)
			break;
		n++;
	}
	CHECK(s == RB_FULL, "%u pending versions in %zu bytes, then %s", n, arena_size, tl_status(s));
	s = rb_version_new(th[0], 10, 2000, false, &v, &err);
	CHECK(s == RB_FULL && strstr(err.st.message, "nemo.buffer_size"), "%s: \"%s\" does not name the setting",
		  tl_status(s), err.st.message);
	for (uint32_t i = 0; i < n; i++)
		rb_stamp(th[0], pending[i], lsn++);
	waits = 0;
	for (uint32_t i = 0; i < 100; i++)
	{
		sprintf(k, "z%04u", i);
		PUT(k, big);
	}
	for (uint32_t i = 0; i < n; i++)
	{
		sprintf(k, "%05u", i);
		CHECK(strncmp(get(th[0], k), "vvvv", 4) == 0, "%s is lost", k);
	}
}

static void
C7_what_was_seen_stays_readable(void)
{
	tl_key		key = tl_strkey(TREE, "b");
	const rb_version *head = NULL;
	char		k[16];

	stored("b", "precious");
	GET("b", "precious");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&key), &head) == RB_OK && head, "lookup");
	CHECK(evict_tree(th[1]) == RB_OK, "evict");
	for (int i = 0; i < 50; i++)
	{
		sprintf(k, "k%d", i);
		put(th[1], k, "overwritten");
		put(th[1], k, "overwritten again");
	}
	CHECK(head && head->len == 8 && memcmp(rb_data(head), "precious", 8) == 0, "memory in view was used again");
	rb_leave(th[0]);
	GET("b", "precious");
}

static void
C8_unsettled_versions_travel(void)
{
	tl_key		key = tl_strkey(TREE, "b");
	const rb_version *head;

	stored("b", "old");
	CHECK(write_as(th[0], "b", "new", XID_COMMITTED, NULL) == RB_OK, "put");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	KNOWN("b", "?");
	CHECK(noted, "a version list was stored without a note");
	GET("b", "new");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&key), &head) == RB_OK && head && rb_x(head) && rb_x(head)->xid == XID_COMMITTED,
		  "xid is lost");
	head = head ? rb_older(head) : NULL;
	CHECK(head && head->len == 3 && memcmp(rb_data(head), "old", 3) == 0, "what an old snapshot reads is lost");
	rb_leave(th[0]);
	/* a deletion some snapshot does not see keeps the row in the store */
	CHECK(write_as(th[0], "b", NULL, XID_COMMITTED, NULL) == RB_OK, "delete");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	GET("b", "-");
	rb_enter(th[0]);
	CHECK(rb_lookup(th[0], tl_slice(&key), &head) == RB_OK && head && head->kind == RB_DELETE && rb_older(head),
		  "what was deleted is lost to an old snapshot");
	rb_leave(th[0]);
}

static void
C8_aborted_versions_do_not(void)
{
	stored("b", "old");
	CHECK(write_as(th[0], "b", "new", XID_ABORTED, NULL) == RB_OK, "put");
	CHECK(write_as(th[0], "c", "new", XID_ABORTED, NULL) == RB_OK, "put");
	CHECK(evict_tree(th[0]) == RB_OK, "evict");
	GET("b", "old");
	GET("c", "-");
	STORED("b", "old");
	STORED("c", "-");
}

static void
C9_pending_is_not_flushed(void)
{
	rb_version *v = NULL;
	rb_error	err = {0};
	size_t		freed;

	CHECK(write_as(th[0], "b", "1", next_xid++, &v) == RB_OK, "put");
	evict_tree(th[0]);
	rb_evict(th[0], 1 << 20, &freed, &err);
	STORED("b", "-");
	KNOWN("b", "1");
	unstamped = v;
	waits = 0;
	CHECK(flush(th[0]) == RB_OK, "flush");
	CHECK(!unstamped, "the checkpoint did not wait for the log");
	STORED("b", "1");
}

/* ---- E: checkpoint ----------------------------------------------------------------------------------------------- */

static void
change_behind_the_sweep(fs_point point, st_opcode op)
{
	(void) point;
	if (op != ST_OP_UPSERT || hook_calls++)
		return;
	hook_wrote = put(th[1], "a", "late") == RB_OK;
	put(th[1], "m", "late");
}

static void
E1_dirty_before_the_sweep(void)
{
	PUT("a", "1");
	PUT("z", "2");
	hook_fn = change_behind_the_sweep;
	CHECK(flush(th[0]) == RB_OK, "flush");
	hook_fn = NULL;
	CHECK(hook_wrote, "the hook could not write");
	CHECK(strcmp(in_store("a"), "-") != 0, "a was dirty before the sweep and is not in the store");
	STORED("z", "2");
	CHECK(flush(th[0]) == RB_OK, "flush");
	STORED("a", "late");
	STORED("m", "late");
}

static void
E2_no_success_without_every_write(void)
{
	char		k[16];

	for (int round = 0; round < 6; round++)
	{
		rb_status	s;
		uint32_t	missing = 0;
		char		value[16];

		sprintf(value, "v%d", round);
		for (int i = 0; i < 200; i++)
		{
			sprintf(k, "%03d", i);
			PUT(k, value);
		}
		if (round < 2)
			fs_fail_next(fs, ST_OP_UPSERT, 1, ST_UNAVAILABLE, false);
		else if (round < 4)
			fs_fail_next(fs, ST_OP_UPSERT, 1, ST_TIMEOUT, true);
		else
			fs_partial_next(fs, (uint32_t) (round * 20));
		s = flush(th[0]);
		for (int i = 0; i < 200; i++)
		{
			sprintf(k, "%03d", i);
			missing += strcmp(in_store(k), value) != 0;
		}
		CHECK(s != RB_OK || missing == 0, "round %d: flush says OK, %u records are missing", round, missing);
		CHECK(flush(th[0]) == RB_OK, "flush in round %d", round);
		fs_land(fs);
		for (int i = 0; i < 200; i++)
		{
			sprintf(k, "%03d", i);
			STORED(k, value);
		}
	}
}

static void
split_under_the_sweep(fs_point point, st_opcode op)
{
	char		k[24];

	if (op != ST_OP_UPSERT || point != FS_BEFORE || hook_calls++ > 20)
		return;
	for (uint32_t i = 0; i < 200; i++)
	{
		sprintf(k, "%05u+%u", (hook_calls * 7919 + i * 13) % 3000, hook_calls);
		put(th[1], k, "new");
	}
	evict_tree(th[1]);
}

static void
E3_splits_and_merges_hide_nothing(void)
{
	rb_error	err = {0};
	char		k[16];
	uint32_t	missing = 0;

	CHECK(rb_tree_create(th[0], TREE, &err) == RB_OK, "create");
	for (int i = 0; i < 3000; i++)
	{
		sprintf(k, "%05d", (i * 1009) % 3000);
		PUT(k, "x");
	}
	hook_fn = split_under_the_sweep;
	waits = 0;
	CHECK(flush(th[0]) == RB_OK, "flush");
	hook_fn = NULL;
	CHECK(hook_calls, "the hook did not run");
	for (int i = 0; i < 3000; i++)
	{
		sprintf(k, "%05d", i);
		missing += strcmp(in_store(k), "x") != 0;
	}
	CHECK(missing == 0, "%u records are missing", missing);
}

/* ---- run --------------------------------------------------------------------------------------------------------- */

#define T(f, bytes) {#f, f, bytes}
static const struct
{
	const char *name;
	void		(*fn) (void);
	size_t		extra;			/* arena beyond the least */
}			tests[] = {
	T(A1_evicted_tombstone_opens_its_predecessor, 4 << 20),
	T(A1_evicted_record_opens_its_predecessor, 4 << 20),
	T(A2_gaps_are_sealed_after_looking_at_what_is_buffered, 4 << 20),
	T(A3_predecessor_in_the_leaf_to_the_left, 4 << 20),
	T(A4_sentinel_is_a_miss, 4 << 20),
	T(A5_sentinel_inherits_the_gap, 4 << 20),
	T(A6_insert_inherits_update_keeps, 4 << 20),
	T(A7_bounds_that_are_no_keys, 4 << 20),
	T(A8_exclusive_bound, 4 << 20),
	T(A9_truncated_result, 4 << 20),
	T(A10_backward_scan, 4 << 20),
	T(B1_the_buffer_wins, 4 << 20),
	T(B2_old_range_result_after_flush_and_evict, 4 << 20),
	T(B3_negative_result_that_races_with_an_insertion, 4 << 20),
	T(B3_failed_fetch_leaves_no_trace, 4 << 20),
	T(B4_result_larger_than_the_buffer, 256 << 10),
	T(C1_only_what_was_acknowledged, 4 << 20),
	T(C2_log_first, 4 << 20),
	T(C3_changed_while_its_flush_is_under_way, 4 << 20),
	T(C4_old_write_that_lands_late, 4 << 20),
	T(C4_key_in_doubt_is_read_right, 4 << 20),
	T(C5_locked_entries_stay, 4 << 20),
	T(C5_one_waiter_gives_up_on_a_sentinel, 4 << 20),
	T(C6_full_is_an_error, 64 << 10),
	T(C7_what_was_seen_stays_readable, 256 << 10),
	T(C8_unsettled_versions_travel, 4 << 20),
	T(C8_aborted_versions_do_not, 4 << 20),
	T(C9_pending_is_not_flushed, 4 << 20),
	T(E1_dirty_before_the_sweep, 4 << 20),
	T(E2_no_success_without_every_write, 4 << 20),
	T(E3_splits_and_merges_hide_nothing, 4 << 20),
};

int
main(int argc, char **argv)
{
	uint32_t	passed = 0,
				failed = 0;

	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
	{
		if (argc > 1 && strncmp(tests[i].name, argv[1], strlen(argv[1])) != 0)
			continue;
		broken = false;
		hook_wrote = false;
		start(tests[i].extra);
		tests[i].fn();
		waits = 0;
		finish();
		printf("%s %s\n", broken ? "not ok" : "ok", tests[i].name);
		fflush(stdout);
		if (broken)
			failed++;
		else
			passed++;
	}
	printf("%u passed, %u failed\n", passed, failed);
	return failed ? 1 : 0;
}
