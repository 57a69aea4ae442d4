/*
 * test_random.c
 *	  Random operations against a model, with faults: after each, the store holds what the model says.
 *
 * A seed names a run.  A write that fails ambiguously may or may not have happened, so the model then asks the store,
 * once st_resolve() has said that the answer is final.  Usage: test_random [first seed [number of seeds]].
 */
#include <unistd.h>

#include "../driver.h"
#include "harness.h"

#define NKEYS 64
#define MAX_KEY 1700
#define NSTEPS 400

typedef struct model_record
{
	uint8_t		key[MAX_KEY];
	size_t		key_len;
	bool		present;
	size_t		value_len;		/* the value is value_byte, so many times */
	uint8_t		value_byte;
} model_record;

static model_record model[NKEYS];	/* in key order */
static uint32_t nkeys;
static uint64_t random_state;
static uint64_t seed;
static st_store *s;
static st_error err;
static uint8_t value_bytes[256][4000];	/* row b is all b */

static uint32_t
random_below(uint32_t n)
{
	random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t) (random_state >> 33) % n;
}

static st_slice
model_key(uint32_t i)
{
	return (st_slice) {model[i].key, model[i].key_len};
}

static st_slice
model_value(uint32_t i)
{
	return (st_slice) {value_bytes[model[i].value_byte], model[i].value_len};
}

static int
compare_model(const void *a, const void *b)
{
	const model_record *x = a;
	const model_record *y = b;

	return st_compare((st_slice) {x->key, x->key_len}, (st_slice) {y->key, y->key_len});
}

static void
make_keys(void)
{
	static const uint16_t lengths[] = {1, 3, 510, 511, 512, 1012, 1013, 1514, 1515, MAX_KEY};

	memset(model, 0, sizeof(model));
	for (uint32_t i = 0; i < NKEYS; i++)
	{
		model[i].key_len = lengths[random_below(sizeof(lengths) / sizeof(lengths[0]))];
		memset(model[i].key, 'm', model[i].key_len);
		for (uint32_t change = random_below(3); change > 0; change--)
			model[i].key[random_below((uint32_t) model[i].key_len)] = (uint8_t) (random_below(3) * 127);
		model[i].key[model[i].key_len - 1] = (uint8_t) random_below(4);
	}
	qsort(model, NKEYS, sizeof(model[0]), compare_model);
	nkeys = 1;
	for (uint32_t i = 1; i < NKEYS; i++)
		if (compare_model(&model[nkeys - 1], &model[i]) != 0)
			model[nkeys++] = model[i];
}

/* Fails one request in twenty, before or after it happened. */
static st_status
sometimes(void *arg, st_opcode op, bool after, st_error *error)
{
	(void) arg;
	(void) op;
	(void) after;
	if (random_below(40) > 0)
		return ST_OK;
	snprintf(error->message, sizeof(error->message), "injected");
	return random_below(2) == 0 ? ST_REFUSED : ST_UNAVAILABLE;
}

static void
set_faults(bool on)
{
	st_set_inject(s, &(st_inject) {.fault = on ? sometimes : NULL});
}

/* After an ambiguous failure. */
static void
ask_store(uint32_t i, const model_record *wanted)
{
	st_result	result = {0};
	st_slice	key = model_key(i);
	st_record  *record;

	CHECK_OK(st_resolve(s, &err));
	set_faults(false);
	CHECK_OK(st_get(s, &key, 1, &result, &err));
	set_faults(true);
	record = &result.recs[0];
	if (record->found != model[i].present || (record->found && st_compare(record->value, model_value(i)) != 0))
	{
		model[i].present = wanted->present;
		model[i].value_len = wanted->value_len;
		model[i].value_byte = wanted->value_byte;
		CHECK(record->found == wanted->present);
		CHECK(!record->found || st_compare(record->value, model_value(i)) == 0);
	}
	st_result_free(&result);
}

static void
write_some(void)
{
	static model_record wanted[NKEYS];
	uint32_t	index[NKEYS];
	st_op		ops[NKEYS];
	bool		acked[NKEYS];
	uint32_t	n = 0;
	st_status	status;

	for (uint32_t i = 0; i < nkeys; i++)
		if (random_below(10) == 0)
		{
			wanted[n] = model[i];
			wanted[n].present = random_below(3) > 0;
			wanted[n].value_byte = (uint8_t) random_below(256);
			wanted[n].value_len = random_below(4) == 0 ? random_below(4000) : random_below(100);
			ops[n] = (st_op) {model_key(i), {value_bytes[wanted[n].value_byte], wanted[n].value_len}, !wanted[n].present};
			index[n++] = i;
		}
	status = st_write(s, ops, n, acked, &err);
	for (uint32_t i = 0; i < n; i++)
		if (acked[i])
			model[index[i]] = wanted[i];
		else
			CHECK(status != ST_OK);
	if (status != ST_OK && err.ambiguous)
		for (uint32_t i = 0; i < n; i++)
			if (!acked[i])
				ask_store(index[i], &wanted[i]);
}

static void
delete_some(void)
{
	uint32_t	first = random_below(nkeys);
	uint32_t	end = first + random_below(8);
	st_slice	stop = end < nkeys ? model_key(end) : (st_slice) {0};
	st_status	status = st_delete_range(s, model_key(first), stop, &err);

	/* a range delete that failed has done some part */
	for (uint32_t i = first; i < end && i < nkeys; i++)
	{
		model_record gone = model[i];

		gone.present = false;
		if (status != ST_OK)
			ask_store(i, &gone);
		model[i].present = status == ST_OK ? false : model[i].present;
	}
	if (status == ST_OK && end >= nkeys)
		for (uint32_t i = first; i < nkeys; i++)
			model[i].present = false;
}

static void
check_range(void)
{
	uint32_t	first = random_below(nkeys);
	uint32_t	end = first + random_below(nkeys - first) + 1;
	bool		reverse = random_below(2) == 0;
	uint32_t	limit = random_below(3) == 0 ? 1 + random_below(5) : 0;
	st_slice	stop = end < nkeys ? model_key(end) : (st_slice) {0};
	st_result	result = {0};
	uint32_t	n = 0;

	if (st_get_range(s, model_key(first), stop, limit, 0, reverse, &result, &err) == ST_OK)
	{
		for (uint32_t i = 0; i < end - first; i++)
		{
			uint32_t	at = reverse ? end - 1 - i : first + i;

			if (!model[at].present)
				continue;
			if (limit > 0 && n == limit)
			{
				CHECK(!result.complete);
				break;
			}
			CHECK(n < result.nrecs);
			CHECK(st_compare(result.recs[n].key, model_key(at)) == 0);
			CHECK(st_compare(result.recs[n].value, model_value(at)) == 0);
			n++;
		}
		CHECK(n == result.nrecs);
	}
	else
		CHECK(result.nrecs == 0);
	st_result_free(&result);
}

static void
check_gets(void)
{
	st_slice	keys[NKEYS];
	st_result	result = {0};

	for (uint32_t i = 0; i < nkeys; i++)
		keys[i] = model_key(i);
	if (st_get(s, keys, nkeys, &result, &err) == ST_OK)
		for (uint32_t i = 0; i < nkeys; i++)
		{
			CHECK(result.recs[i].found == model[i].present);
			CHECK(!model[i].present || st_compare(result.recs[i].value, model_value(i)) == 0);
		}
	st_result_free(&result);
}

static const char *url;

static void
test_against_model(void)
{
	st_options	options = {.create = true, .map_size = (uint64_t) 1 << 28};

	random_state = seed;
	make_keys();
	CHECK_OK(st_open(url, &options, &s, &err));
	CHECK_OK(st_delete_range(s, (st_slice) {0}, (st_slice) {0}, &err));
	set_faults(true);
	for (int step = 0; step < NSTEPS; step++)
		switch (random_below(8))
		{
			case 0:
			case 1:
			case 2:
				write_some();
				break;
			case 3:
				delete_some();
				break;
			case 4:
				check_gets();
				break;
			default:
				check_range();
		}
	set_faults(false);
	CHECK_OK(st_delete_range(s, (st_slice) {0}, (st_slice) {0}, &err));
	st_close(s);
}

int
main(int argc, char **argv)
{
	uint64_t	first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
	uint64_t	n = argc > 2 ? strtoull(argv[2], NULL, 10) : 5;
	char		directory[] = "/tmp/nemo_store_XXXXXX";
	char		lmdb_url[64];
	char		command[64];

	if (mkdtemp(directory) == NULL)
	{
		perror("mkdtemp");
		return EXIT_FAILURE;
	}
	snprintf(lmdb_url, sizeof(lmdb_url), "lmdb:%s", directory);
	for (int byte = 0; byte < 256; byte++)
		memset(value_bytes[byte], byte, sizeof(value_bytes[byte]));
	for (seed = first; seed < first + n; seed++)
	{
		char		name[64];

		snprintf(name, sizeof(name), "against_model, seed %llu", (unsigned long long) seed);
		url = lmdb_url;
		harness_run("lmdb: ", name, test_against_model);
		url = "mem:narrow?max_value=300&max_batch_ops=5&max_batch_bytes=6000&page=4";
		harness_run("narrow mem: ", name, test_against_model);
		url = "mem:poor?max_value=2000&max_batch_ops=3&multi_get=0&reverse=0&page=7";
		harness_run("poor mem: ", name, test_against_model);
	}
	st_mem_forget("narrow");
	st_mem_forget("poor");
	snprintf(command, sizeof(command), "rm -rf %s", directory);
	if (system(command) != 0)
		perror("rm");
	return harness_end();
}
