/*
 * test_store.c
 *	  One suite for every driver: it is run against LMDB and against a store in memory with wide and narrow limits.
 *
 * Each test opens a new store.  `s` is the store under test, `err` the last error; helpers take C strings.
 */
#include <time.h>

#include "suite.h"

/* ---------- helpers ---------- */

static uint64_t
requests(st_opcode op)
{
	return atomic_load(&stats.op[op].requests);
}

static int
compare_slices(const void *a, const void *b)
{
	return st_compare(*(const st_slice *) a, *(const st_slice *) b);
}

/* Deterministic, so that a failure can be repeated. */
static uint64_t random_state;

static uint32_t
random_below(uint32_t n)
{
	random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t) (random_state >> 33) % n;
}

/* ---------- records ---------- */

static void
test_get_put_delete(void)
{
	open_store();
	CHECK(has("a", NULL));
	put("a", "1");
	CHECK(has("a", "1"));
	put("a", "22");
	CHECK(has("a", "22"));
	del("a");
	CHECK(has("a", NULL));
	del("a");					/* absent: succeeds */
	CHECK(range_is("", "", 0, false, ""));
	close_store();
}

static void
test_empty_value(void)
{
	st_result	result = {0};
	st_slice	key = slice("empty");

	open_store();
	put("empty", "");
	CHECK_OK(st_get(s, &key, 1, &result, &err));
	CHECK(result.recs[0].found && result.recs[0].value.len == 0);
	CHECK(range_is("", "", 0, false, "empty"));
	st_result_free(&result);
	close_store();
}

static void
test_multi_get(void)
{
	st_slice	keys[] = {{"c", 1}, {"x", 1}, {"a", 1}, {"c", 1}};
	st_result	result = {0};

	open_store();
	put("a", "1");
	put("c", "3");
	CHECK_OK(st_get(s, keys, 4, &result, &err));
	CHECK(result.nrecs == 4);
	CHECK(result.recs[0].found && equal(result.recs[0].value, slice("3")));
	CHECK(!result.recs[1].found && equal(result.recs[1].key, slice("x")));
	CHECK(result.recs[2].found && equal(result.recs[2].value, slice("1")));
	CHECK(result.recs[3].found && equal(result.recs[3].value, slice("3")));
	CHECK_OK(st_get(s, keys, 0, &result, &err));
	CHECK(result.nrecs == 0);
	st_result_free(&result);
	close_store();
}

static void
test_byte_order(void)
{
	static const st_slice keys[] = {
		{"\x00", 1}, {"\x00\x00", 2}, {"\x00\xff", 2}, {"\x01", 1}, {"a", 1}, {"a\x00", 2}, {"a\x00z", 3}, {"aa", 2},
		{"\x7f", 1}, {"\x80", 1}, {"\xff", 1}, {"\xff\x00", 2}, {"\xff\xff", 2}, {"\xff\xff\xff", 3}
	};
	uint32_t	n = sizeof(keys) / sizeof(keys[0]);
	st_result	result = {0};

	open_store();
	for (uint32_t i = 0; i < n; i++)
		CHECK_OK(write_one(keys[(i * 5) % n], keys[(i * 5) % n], false));
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 0, 0, false, &result, &err));
	CHECK(result.nrecs == n && result.complete);
	for (uint32_t i = 0; i < n; i++)
		CHECK(equal(result.recs[i].key, keys[i]) && equal(result.recs[i].value, keys[i]));
	CHECK_OK(st_get_range(s, keys[1], keys[n - 1], 0, 0, true, &result, &err));
	CHECK(result.nrecs == n - 2);
	for (uint32_t i = 0; i < n - 2; i++)
		CHECK(equal(result.recs[i].key, keys[n - 2 - i]));
	st_result_free(&result);
	close_store();
}

static void
test_ranges(void)
{
	open_store();
	CHECK(range_is("", "", 0, true, ""));
	for (const char *key = "bdfhj"; *key != '\0'; key++)
	{
		char		text[2] = {*key, '\0'};

		put(text, text);
	}
	CHECK(range_is("", "", 0, false, "b d f h j"));
	CHECK(range_is("", "", 0, true, "j h f d b"));
	CHECK(range_is("d", "h", 0, false, "d f"));
	CHECK(range_is("d", "h", 0, true, "f d"));
	CHECK(range_is("c", "i", 0, false, "d f h"));
	CHECK(range_is("c", "i", 0, true, "h f d"));
	CHECK(range_is("k", "", 0, false, ""));
	CHECK(range_is("k", "", 0, true, ""));
	CHECK(range_is("", "b", 0, true, ""));
	CHECK(range_is("a", "b", 0, false, ""));
	CHECK(range_is("d", "d", 0, false, ""));
	CHECK(range_is("h", "d", 0, false, ""));
	CHECK(range_is("h", "d", 0, true, ""));
	close_store();
}

static void
test_limits_and_continuation(void)
{
	st_result	result = {0};

	open_store();
	put("a", "0123456789");
	put("b", "0123456789");
	put("c", "0123456789");
	put("d", "0123456789");
	CHECK(range_is("", "", 2, false, "a b..."));
	CHECK(range_is("b\x01", "", 2, false, "c d"));
	CHECK(range_is("", "", 4, false, "a b c d"));
	CHECK(range_is("", "", 3, true, "d c b..."));
	CHECK(range_is("", "b", 3, true, "a"));
	CHECK(range_is("", "c", 2, false, "a b"));
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 0, 1, false, &result, &err));
	CHECK(result.nrecs == 1 && !result.complete);
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 0, 15, true, &result, &err));
	CHECK(result.nrecs == 2 && !result.complete && equal(result.recs[1].key, slice("c")));
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 0, 1000, false, &result, &err));
	CHECK(result.nrecs == 4 && result.complete);
	st_result_free(&result);
	close_store();
}

static void
test_key_limits(void)
{
	char		key[5000];
	size_t		max_key;
	st_result	result = {0};
	st_slice	empty = {0};
	st_slice	k;

	open_store();
	memset(key, 'k', sizeof(key));
	max_key = st_get_limits(s)->max_key;
	CHECK(max_key >= 2048 && max_key < sizeof(key));
	CHECK_FAILS(write_one(empty, empty, false), ST_INVALID);
	CHECK_FAILS(st_get(s, &empty, 1, &result, &err), ST_INVALID);
	CHECK_FAILS(write_one((st_slice) {key, max_key + 1}, empty, false), ST_INVALID);
	k = (st_slice) {key, max_key};
	CHECK_OK(write_one(k, slice("v"), false));
	CHECK_OK(st_get(s, &k, 1, &result, &err));
	CHECK(result.recs[0].found);
	/* the start of a continuation is one byte longer than any key */
	key[max_key] = '\0';
	CHECK_OK(st_get_range(s, (st_slice) {key, max_key + 1}, empty, 0, 0, false, &result, &err));
	CHECK(result.nrecs == 0 && result.complete);
	CHECK_OK(st_get_range(s, empty, (st_slice) {key, max_key + 1}, 0, 0, true, &result, &err));
	CHECK(result.nrecs == 1 && result.complete);
	st_result_free(&result);
	close_store();
}

/* ---------- batches ---------- */

static void
test_batch_over_the_limit(void)
{
	uint32_t	n = 5000;
	st_op	   *ops = calloc(n, sizeof(*ops));
	bool	   *acked = calloc(n, sizeof(*acked));
	st_slice   *keys = calloc(n, sizeof(*keys));
	char		(*names)[16] = calloc(n, sizeof(*names));
	st_result	result = {0};

	open_store();
	for (uint32_t i = 0; i < n; i++)
	{
		snprintf(names[i], sizeof(names[i]), "%08u", i * 7919 % n);
		keys[i] = slice(names[i]);
		ops[i] = (st_op) {keys[i], keys[i], false};
	}
	CHECK_OK(st_write(s, ops, n, acked, &err));
	for (uint32_t i = 0; i < n; i++)
		CHECK(acked[i]);
	CHECK(requests(ST_OP_UPSERT) >= n / st_get_limits(s)->max_batch_ops);
	CHECK_OK(st_get(s, keys, n, &result, &err));
	CHECK(result.nrecs == n);
	for (uint32_t i = 0; i < n; i++)
		CHECK(result.recs[i].found && equal(result.recs[i].value, keys[i]));
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 0, 0, false, &result, &err));
	CHECK(result.nrecs == n && result.complete);
	for (uint32_t i = 1; i < n; i++)
		CHECK(st_compare(result.recs[i - 1].key, result.recs[i].key) < 0);
	CHECK_OK(st_get_range(s, (st_slice) {0}, (st_slice) {0}, 1234, 0, true, &result, &err));
	CHECK(result.nrecs == 1234 && !result.complete && equal(result.recs[0].key, slice("00004999")));
	/* mixed: delete the even, change the odd */
	for (uint32_t i = 0; i < n; i++)
		ops[i] = (st_op) {keys[i], slice("new"), i % 2 == 0};
	CHECK_OK(st_write(s, ops, n, acked, &err));
	CHECK_OK(st_get(s, keys, n, &result, &err));
	for (uint32_t i = 0; i < n; i++)
		CHECK(acked[i] && result.recs[i].found == (i % 2 == 1));
	st_result_free(&result);
	free(ops);
	free(acked);
	free(keys);
	free(names);
	close_store();
}

static void
test_repeated_key_is_refused(void)
{
	st_op		ops[] = {{{"b", 1}, {"1", 1}, false}, {{"a", 1}, {"2", 1}, false}, {{"b", 1}, {0}, true}};
	bool		acked[3] = {true, true, true};

	open_store();
	CHECK_FAILS(st_write(s, ops, 3, acked, &err), ST_INVALID);
	CHECK(!acked[0] && !acked[1] && !acked[2]);
	CHECK(range_is("", "", 0, false, ""));
	CHECK_OK(st_write(s, ops, 2, acked, &err));
	CHECK_OK(st_write(s, ops, 0, acked, &err));
	CHECK(range_is("", "", 0, false, "a b"));
	close_store();
}

static void
test_delete_range(void)
{
	char		name[16];

	open_store();
	for (int i = 0; i < 1500; i++)
	{
		snprintf(name, sizeof(name), "%04d", i);
		put(name, "v");
	}
	CHECK_OK(st_delete_range(s, slice("0001"), slice("1498"), &err));
	CHECK(range_is("", "", 0, false, "0000 1498 1499"));
	CHECK_OK(st_delete_range(s, slice("5"), slice("4"), &err));
	CHECK_OK(st_delete_range(s, slice("5"), slice(""), &err));
	CHECK(range_is("", "", 0, false, "0000 1498 1499"));
	CHECK_OK(st_delete_range(s, slice("1"), slice(""), &err));
	CHECK(range_is("", "", 0, false, "0000"));
	CHECK_OK(st_delete_range(s, slice(""), slice(""), &err));
	CHECK(range_is("", "", 0, false, ""));
	close_store();
}

/* ---------- long keys and values ---------- */

/*
 * Keys of up to 2048 bytes that share prefixes around every length where a long key is cut, in two letters next to
 * the extremes of a byte.
 */
static size_t
random_key(uint8_t *key)
{
	static const uint16_t lengths[] = {1, 500, 509, 510, 511, 512, 513, 900, 1011, 1012, 1013, 1514, 1600, 2047, 2048};
	size_t		len = lengths[random_below(sizeof(lengths) / sizeof(lengths[0]))];

	memset(key, 'p', len);
	for (uint32_t i = random_below(3); i > 0; i--)
		key[random_below(2) == 0 ? random_below((uint32_t) len) : len - 1] = (uint8_t) (random_below(2) * 255);
	return len;
}

static void
check_ranges_of(const st_slice *sorted, uint32_t n)
{
	st_result	result = {0};

	for (int round = 0; round < 60; round++)
	{
		static uint8_t bound[2][2048];
		st_slice	start = {bound[0], random_below(5) == 0 ? 0 : random_key(bound[0])};
		st_slice	end = {bound[1], random_below(5) == 0 ? 0 : random_key(bound[1])};
		uint32_t	limit = random_below(2) * (1 + random_below(20));
		bool		reverse = random_below(2) == 1;
		uint32_t	first = 0;
		uint32_t	last = n;
		uint32_t	expected;

		while (first < n && st_compare(sorted[first], start) < 0)
			first++;
		while (end.len > 0 && last > 0 && st_compare(sorted[last - 1], end) >= 0)
			last--;
		expected = last > first ? last - first : 0;
		CHECK_OK(st_get_range(s, start, end, limit, 0, reverse, &result, &err));
		CHECK(result.complete == (limit == 0 || limit >= expected));
		if (limit > 0 && limit < expected)
			expected = limit;
		CHECK(result.nrecs == expected);
		for (uint32_t i = 0; i < expected; i++)
			CHECK(equal(result.recs[i].key, sorted[reverse ? last - 1 - i : first + i]));
	}
	st_result_free(&result);
}

static void
test_long_keys(void)
{
	enum {N = 400};
	static uint8_t bytes[N][2048];
	static st_slice keys[N];
	st_result	result = {0};
	uint32_t	n = 0;

	random_state = 7;
	open_store();
	while (n < N)
	{
		uint32_t	i = 0;

		keys[n] = (st_slice) {bytes[n], random_key(bytes[n])};
		while (i < n && !equal(keys[i], keys[n]))
			i++;
		if (i < n && random_below(20) > 0)
			continue;
		CHECK_OK(write_one(keys[n], keys[n], false));
		n += i == n;
	}
	CHECK_OK(st_get(s, keys, n, &result, &err));
	for (uint32_t i = 0; i < n; i++)
		CHECK(result.recs[i].found && equal(result.recs[i].value, keys[i]));
	qsort(keys, n, sizeof(keys[0]), compare_slices);
	check_ranges_of(keys, n);
	reopen();
	check_ranges_of(keys, n);
	/* delete every second one, twice */
	for (uint32_t i = 0; i < n; i += 2)
	{
		CHECK_OK(write_one(keys[i], (st_slice) {0}, true));
		CHECK_OK(write_one(keys[i], (st_slice) {0}, true));
	}
	for (uint32_t i = 0; i < n / 2; i++)
		keys[i] = keys[2 * i + 1];
	n /= 2;
	check_ranges_of(keys, n);
	CHECK_OK(st_delete_range(s, keys[10], keys[n - 10], &err));
	memmove(&keys[10], &keys[n - 10], 10 * sizeof(keys[0]));
	check_ranges_of(keys, 20);
	CHECK_OK(st_delete_range(s, (st_slice) {0}, (st_slice) {0}, &err));
	check_ranges_of(keys, 0);
	st_result_free(&result);
	close_store();
}

static void
fill(uint8_t *value, size_t len, uint64_t seed)
{
	random_state = seed;
	for (size_t i = 0; i < len; i++)
		value[i] = (uint8_t) random_below(256);
}

static bool
has_bytes(const char *key, const uint8_t *value, size_t len)
{
	st_result	result = {0};
	st_slice	k = slice(key);
	bool		yes;

	CHECK_OK(st_get(s, &k, 1, &result, &err));
	yes = result.recs[0].found && equal(result.recs[0].value, (st_slice) {value, len});
	st_result_free(&result);
	return yes;
}

static void
test_long_values(void)
{
	size_t		sizes[] = {990, 998, 999, 1000, 1001, 1998, 2000, 2001, 65536, 1 << 20, (1 << 20) + 17};
	uint32_t	n = sizeof(sizes) / sizeof(sizes[0]);
	uint8_t    *value = malloc(2 << 20);
	char		key[16];
	st_result	result = {0};

	open_store();
	for (uint32_t i = 0; i < n; i++)
	{
		snprintf(key, sizeof(key), "k%02u", i);
		fill(value, sizes[i], i);
		CHECK_OK(write_one(slice(key), (st_slice) {value, sizes[i]}, false));
		CHECK(has_bytes(key, value, sizes[i]));
	}
	put("j", "before");
	put("l", "after");
	reopen();
	CHECK_OK(st_get_range(s, slice(""), slice(""), 0, 0, false, &result, &err));
	CHECK(result.nrecs == n + 2 && result.complete);
	for (uint32_t i = 0; i < n; i++)
	{
		fill(value, sizes[i], i);
		CHECK(equal(result.recs[i + 1].value, (st_slice) {value, sizes[i]}));
	}
	CHECK_OK(st_get_range(s, slice(""), slice(""), 0, 70000, true, &result, &err));
	CHECK(result.nrecs == 2 && !result.complete && result.recs[1].value.len == sizes[n - 1]);
	/* long to short, short to long, long to long, long to nothing */
	put("k10", "short");
	CHECK(has("k10", "short"));
	fill(value, 5000, 99);
	CHECK_OK(write_one(slice("l"), (st_slice) {value, 5000}, false));
	CHECK(has_bytes("l", value, 5000));
	CHECK_OK(write_one(slice("k09"), (st_slice) {value, 3000}, false));
	CHECK(has_bytes("k09", value, 3000));
	del("k08");
	CHECK(has("k08", NULL));
	CHECK(range_is("k08", "", 0, false, "k09 k10 l"));
	CHECK_OK(st_delete_range(s, slice("k"), slice(""), &err));
	CHECK(range_is("", "", 0, false, "j"));
	st_result_free(&result);
	free(value);
	close_store();
}

/* ---------- faults, retries, statistics ---------- */

typedef struct fault
{
	st_opcode	op;
	bool		after;
	int			skip;			/* requests to let pass first */
	int			times;
	st_status	status;
	bool		ambiguous;
} fault;

static st_status
inject_fault(void *arg, st_opcode op, bool after, st_error *error)
{
	fault	   *f = arg;

	if (op != f->op || after != f->after || (f->skip > 0 && f->skip-- > 0) || f->times == 0)
		return ST_OK;
	f->times--;
	error->ambiguous = f->ambiguous;
	snprintf(error->message, sizeof(error->message), "injected");
	return f->status;
}

static void
arm(fault *f)
{
	st_set_inject(s, &(st_inject) {.fault = inject_fault, .fault_arg = f});
}

static void
test_acked_after_fault(void)
{
	fault		f = {.op = ST_OP_UPSERT, .skip = 1, .times = 1, .status = ST_REFUSED};
	uint32_t	n = st_get_limits(s)->max_batch_ops;
	st_op	   *ops = calloc(3 * n, sizeof(*ops));
	bool	   *acked = calloc(3 * n, sizeof(*acked));
	char		(*names)[16] = calloc(3 * n, sizeof(*names));

	for (uint32_t i = 0; i < 3 * n; i++)
	{
		snprintf(names[i], sizeof(names[i]), "%08u", i);
		ops[i] = (st_op) {slice(names[i]), slice(names[i]), false};
	}
	/* before the second request: the first is acknowledged, nothing else happened */
	arm(&f);
	CHECK_FAILS(st_write(s, ops, 3 * n, acked, &err), ST_REFUSED);
	CHECK(!err.ambiguous);
	for (uint32_t i = 0; i < 3 * n; i++)
		CHECK(acked[i] == (i < n) && has(names[i], i < n ? names[i] : NULL));
	CHECK_OK(st_delete_range(s, slice(""), slice(""), &err));

	/* after the second: it did happen, and nobody may claim that it did not (C1, C4) */
	f = (fault) {.op = ST_OP_UPSERT, .after = true, .skip = 1, .times = 1, .status = ST_TIMEOUT};
	CHECK_FAILS(st_write(s, ops, 3 * n, acked, &err), ST_TIMEOUT);
	CHECK(err.ambiguous);
	for (uint32_t i = 0; i < 3 * n; i++)
		CHECK(acked[i] == (i < n) && has(names[i], i < 2 * n ? names[i] : NULL));
	CHECK_OK(st_resolve(s, &err));
	CHECK_OK(st_write(s, ops, 3 * n, acked, &err));
	for (uint32_t i = 0; i < 3 * n; i++)
		CHECK(acked[i] && has(names[i], names[i]));
	free(ops);
	free(acked);
	free(names);
}

static void
test_faults(void)
{
	open_store();
	test_acked_after_fault();
	close_store();
}

static void
test_failed_reads_show_nothing(void)
{
	fault		f = {.op = ST_OP_GET, .after = true, .times = 1, .status = ST_UNAVAILABLE};
	st_result	result = {0};
	st_slice	key = slice("a");

	open_store();
	put("a", "1");
	arm(&f);
	CHECK_FAILS(st_get(s, &key, 1, &result, &err), ST_UNAVAILABLE);
	CHECK(result.nrecs == 0 && !err.ambiguous);
	f = (fault) {.op = ST_OP_GET_RANGE, .times = 1, .status = ST_TIMEOUT};
	CHECK_FAILS(st_get_range(s, slice(""), slice(""), 0, 0, false, &result, &err), ST_TIMEOUT);
	CHECK(result.nrecs == 0 && !result.complete);
	f = (fault) {.op = ST_OP_SYNC, .times = 1, .status = ST_UNAVAILABLE};
	CHECK_FAILS(st_sync(s, &err), ST_UNAVAILABLE);
	CHECK_OK(st_sync(s, &err));
	st_result_free(&result);
	close_store();
}

static void
test_retries(void)
{
	fault		f = {.op = ST_OP_GET, .times = 2, .status = ST_UNAVAILABLE};

	new_place();
	options.retries = 3;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	put("a", "1");
	arm(&f);
	CHECK(has("a", "1"));
	CHECK(f.times == 0 && stats.op[ST_OP_GET].retries == 2 && stats.op[ST_OP_GET].errors == 2);
	/* an ambiguous write is resolved, then sent again */
	f = (fault) {.op = ST_OP_UPSERT, .after = true, .times = 1, .status = ST_TIMEOUT};
	put("a", "2");
	CHECK(has("a", "2") && !err.ambiguous && stats.op[ST_OP_UPSERT].retries == 1);
	/* what cannot pass is not tried again; what does not pass ends */
	f = (fault) {.op = ST_OP_UPSERT, .times = 1, .status = ST_FULL};
	CHECK_FAILS(write_one(slice("b"), slice(""), false), ST_FULL);
	f = (fault) {.op = ST_OP_UPSERT, .times = 4, .status = ST_UNAVAILABLE};
	CHECK_FAILS(write_one(slice("b"), slice(""), false), ST_UNAVAILABLE);
	CHECK(f.times == 0);
	close_store();
}

/* Only narrow stores have chunks. */
static void
test_chunks_go_with_their_values(void)
{
	fault		f = {.op = ST_OP_UPSERT, .skip = 3, .times = 1, .status = ST_REFUSED};
	char		name[32];
	static uint8_t value[3000];

	place.mem_options = "?max_value=1000&max_batch_ops=1";
	open_store();
	snprintf(name, sizeof(name), "test%u", place.number);
	CHECK_OK(write_one(slice("a"), (st_slice) {value, 3000}, false));
	CHECK(st_mem_count(name, ST_SPACE_CHUNK) == 3 && st_mem_count(name, ST_SPACE_DATA) == 1);
	CHECK_OK(write_one(slice("a"), (st_slice) {value, 2000}, false));
	CHECK(st_mem_count(name, ST_SPACE_CHUNK) == 2);
	/* the manifest fails, for good or perhaps not */
	arm(&f);
	CHECK_FAILS(write_one(slice("b"), (st_slice) {value, 3000}, false), ST_REFUSED);
	CHECK(f.times == 0 && st_mem_count(name, ST_SPACE_CHUNK) == 2 && has("b", NULL));
	f = (fault) {.op = ST_OP_UPSERT, .after = true, .skip = 3, .times = 1, .status = ST_TIMEOUT};
	CHECK_FAILS(write_one(slice("b"), (st_slice) {value, 3000}, false), ST_TIMEOUT);
	CHECK(err.ambiguous && has_bytes("b", value, 3000));
	put("a", "short");
	CHECK(st_mem_count(name, ST_SPACE_CHUNK) == 3);
	del("b");
	CHECK(st_mem_count(name, ST_SPACE_CHUNK) == 0 && st_mem_count(name, ST_SPACE_DATA) == 1);
	/* chunks that could not be written */
	f = (fault) {.op = ST_OP_UPSERT, .skip = 1, .times = 1, .status = ST_FULL};
	CHECK_FAILS(write_one(slice("c"), (st_slice) {value, 3000}, false), ST_FULL);
	CHECK(st_mem_count(name, ST_SPACE_CHUNK) == 0 && !err.ambiguous);
	close_store();
}

static int	polls;

static bool
interrupt_soon(void *arg)
{
	(void) arg;
	return ++polls > 3;
}

static double
seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double) now.tv_sec + (double) now.tv_nsec / 1e9;
}

static void
test_latency_and_interrupts(void)
{
	st_result	result = {0};
	st_slice	key = slice("a");
	double		begin;

	open_store();
	put("a", "1");
	memset(&stats, 0, sizeof(stats));
	st_set_inject(s, &(st_inject) {.latency_us = 20000});
	begin = seconds();
	CHECK(has("a", "1"));
	CHECK(seconds() - begin >= 0.020);
	CHECK(st_stats_percentile_us(&stats.op[ST_OP_GET], 0.5) >= 20000);
	st_set_inject(s, &(st_inject) {.bandwidth = 100});
	begin = seconds();
	CHECK(has("a", "1"));		/* one byte each way */
	CHECK(seconds() - begin >= 0.020);
	close_store();

	new_place();
	options.interrupted = interrupt_soon;
	polls = 0;
	CHECK_OK(st_open(place.url, &options, &s, &err));
	st_set_inject(s, &(st_inject) {.latency_us = 60 * 1000000});
	begin = seconds();
	CHECK_FAILS(st_get(s, &key, 1, &result, &err), ST_CANCELED);
	CHECK(seconds() - begin < 5);
	polls = 0;
	CHECK_FAILS(write_one(key, key, false), ST_CANCELED);
	CHECK(!err.ambiguous);
	st_set_inject(s, &(st_inject) {0});
	polls = -1000;
	CHECK(has("a", NULL));
	st_result_free(&result);
	close_store();
}

static void
test_statistics(void)
{
	st_slice	keys[] = {{"aa", 2}, {"bb", 2}, {"cc", 2}};
	st_result	result = {0};
	bool		narrow = place.mem_options != NULL && place.mem_options[0] != '\0';

	open_store();
	put("aa", "12345");
	put("bb", "1");
	del("zz");
	memset(&stats.op[ST_OP_GET], 0, sizeof(stats.op[ST_OP_GET]));	/* narrow stores read before they write */
	CHECK_OK(st_get(s, keys, 3, &result, &err));
	CHECK_OK(st_get_range(s, slice("a"), slice("c"), 0, 0, false, &result, &err));
	CHECK_OK(st_sync(s, &err));
	CHECK(requests(ST_OP_UPSERT) == 2 && stats.op[ST_OP_UPSERT].keys == 2);
	CHECK(requests(ST_OP_DELETE) == 1 && stats.op[ST_OP_DELETE].keys == 1);
	CHECK(stats.op[ST_OP_GET].keys == 3 && stats.op[ST_OP_GET].bytes_sent == 6);
	CHECK(stats.op[ST_OP_GET_RANGE].keys == 2);
	CHECK(requests(ST_OP_SYNC) == 1);
	if (!narrow)
	{
		CHECK(requests(ST_OP_GET) == 1 && requests(ST_OP_GET_RANGE) == 1);
		CHECK(stats.op[ST_OP_UPSERT].bytes_sent == 10 && stats.op[ST_OP_GET].bytes_received == 6);
		CHECK(stats.op[ST_OP_GET_RANGE].bytes_received == 10);
	}
	for (int op = 0; op < ST_NOPS; op++)
	{
		uint64_t	total = 0;

		for (int i = 0; i < ST_LATENCY_BUCKETS; i++)
			total += stats.op[op].latency[i];
		CHECK(total == stats.op[op].requests && stats.op[op].errors == 0);
	}
	st_result_free(&result);
	close_store();
}

static void
test_percentiles(void)
{
	st_op_stats none = {0};
	uint64_t	edge = 0;

	CHECK(st_stats_percentile_us(&none, 0.5) == 0);
	for (int i = 0; i < ST_LATENCY_BUCKETS; i++)
	{
		st_op_stats one = {0};

		one.latency[i] = 1;
		CHECK(st_stats_percentile_us(&one, 0.5) > edge);
		edge = st_stats_percentile_us(&one, 0.5);
		CHECK(st_stats_percentile_us(&one, 1.0) == edge && st_stats_percentile_us(&one, 0.0) == edge);
		none.latency[i] = 1;
	}
	CHECK(edge > 60 * 1000000);
	CHECK(st_stats_percentile_us(&none, 1.0) == edge);
	CHECK(st_stats_percentile_us(&none, 0.5) < 16384 && st_stats_percentile_us(&none, 0.0) == 1);
}

/* ---------- opening and ownership ---------- */

static void
test_reopen(void)
{
	open_store();
	put("a", "1");
	put("b", "2");
	CHECK_OK(st_sync(s, &err));
	reopen();
	CHECK(has("a", "1") && has("b", "2"));
	del("a");
	reopen();
	CHECK(range_is("", "", 0, false, "b"));
	close_store();
}

static void
test_absent_store(void)
{
	new_place();
	options.create = false;
	CHECK_FAILS(st_open(place.url, &options, &s, &err), ST_UNAVAILABLE);
	CHECK(s == NULL);
}

/* E7 */
static void
test_ownership(void)
{
	st_store   *first;
	st_store   *worker;
	st_store   *other;
	uint64_t	epoch = 0;
	uint64_t	ignored;

	open_store();
	first = s;
	CHECK_OK(st_open(place.url, &options, &worker, &err));
	CHECK_OK(st_open(place.url, &options, &other, &err));
	put("before", "claims");
	CHECK_FAILS(st_claim(s, "", &epoch, &err), ST_INVALID);
	CHECK_OK(st_claim(s, "cluster one", &epoch, &err));
	CHECK(epoch == 1);
	put("a", "1");
	/* one who does not say who he is, and one who says something else */
	s = other;
	CHECK_FAILS(write_one(slice("a"), slice("2"), false), ST_REFUSED);
	CHECK_FAILS(st_claim(other, "cluster two", &ignored, &err), ST_REFUSED);
	CHECK(strstr(err.message, "cluster one") != NULL);
	st_assume(other, "cluster two", 1);
	CHECK_FAILS(write_one(slice("a"), slice("2"), false), ST_REFUSED);
	CHECK_FAILS(st_delete_range(other, slice(""), slice(""), &err), ST_REFUSED);
	CHECK(has("a", "1"));		/* reading is free */
	/* another process of the owner */
	st_assume(worker, "cluster one", epoch);
	s = worker;
	put("a", "3");
	/* the owner restarted: old epochs are over, even for the same name */
	CHECK_OK(st_claim(other, "cluster one", &epoch, &err));
	CHECK(epoch == 2);
	CHECK_FAILS(write_one(slice("a"), slice("4"), false), ST_REFUSED);
	CHECK(!err.ambiguous);
	s = first;
	CHECK_FAILS(write_one(slice("a"), (st_slice) {0}, true), ST_REFUSED);
	s = other;
	put("b", "5");
	CHECK(has("a", "3"));
	st_close(first);
	st_close(worker);
	s = other;
	reopen();
	CHECK_OK(st_claim(s, "cluster one", &epoch, &err));
	CHECK(epoch == 3);
	close_store();
}

static void
test_urls(void)
{
	new_place();
	CHECK_FAILS(st_open("nowhere", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("mem:", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("ftp:x", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("lmdbx:x", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("mem:x?max_value=1", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("mem:x?what=1", &options, &s, &err), ST_INVALID);
	CHECK_FAILS(st_open("mem:x?page=z", &options, &s, &err), ST_INVALID);
	CHECK(st_open("mem:x", NULL, &s, NULL) == ST_UNAVAILABLE);
}

/* ---------- main ---------- */

static void
run_suite(const char *prefix, const char *mem_options)
{
	place.prefix = prefix;
	place.mem_options = mem_options;
	RUN(get_put_delete);
	RUN(empty_value);
	RUN(multi_get);
	RUN(byte_order);
	RUN(ranges);
	RUN(limits_and_continuation);
	RUN(key_limits);
	RUN(batch_over_the_limit);
	RUN(repeated_key_is_refused);
	RUN(delete_range);
	RUN(long_keys);
	RUN(long_values);
	RUN(faults);
	RUN(failed_reads_show_nothing);
	RUN(retries);
	RUN(latency_and_interrupts);
	RUN(statistics);
	RUN(reopen);
	RUN(absent_store);
	RUN(ownership);
}

int
main(void)
{
	begin_places();
	run_suite("mem: ", "");
	run_suite("narrow mem: ", "?max_value=1000&max_key=2100&max_batch_ops=7&max_batch_bytes=5000&page=3");
	run_suite("poor mem: ", "?max_value=64&max_batch_ops=1&multi_get=0&reverse=0&page=1");
	run_suite("lmdb: ", NULL);
	place.prefix = "";
	RUN(percentiles);
	RUN(chunks_go_with_their_values);
	RUN(urls);
	return end_places();
}
