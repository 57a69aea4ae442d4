/*
 * store_mem.c
 *	  A store in the memory of the process, for tests: a skip list per space, shared by all that open one name.
 *
 * `mem:NAME?option=number&...`; options are taken from whoever creates the map: max_value, max_batch_ops,
 * max_batch_bytes, max_key (at least 2048), multi_get, reverse, page (records in one answer to a range; 0 = all).
 * They make it as narrow as any networked store, so that the layer above can be tested against all of them.
 *
 * Locking: one mutex per map, held for a whole request; the directory of maps has its own, taken first.
 */
#include <pthread.h>
#include <stdlib.h>

#include "stored.h"

#define MAX_LEVEL 16
#define MAX_NAME 64
#define MIN_KEY_LIMIT 2048

typedef struct node
{
	size_t		key_len;
	size_t		value_len;
	unsigned char *value;
	struct node *previous;		/* NULL: the first */
	int			nlevels;
	struct node *next[];		/* nlevels; the key's bytes follow */
} node;

typedef struct skiplist
{
	node	   *head[MAX_LEVEL];
	node	   *last;
} skiplist;

typedef struct mem_map
{
	struct mem_map *next;		/* in the directory */
	char		name[MAX_NAME];
	unsigned	references;		/* stores, and one for the directory; under the directory's mutex */
	st_limits	limits;
	uint32_t	page;
	pthread_mutex_t mutex;
	/* under mutex */
	skiplist	space[ST_NSPACES];
	st_owner	owner;
	uint64_t	random;
} mem_map;

typedef struct mem_store
{
	mem_map    *map;
	st_owner	assumed;
} mem_store;

static struct
{
	pthread_mutex_t mutex;
	mem_map    *maps;
}			directory = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---------- skip list ---------- */

static st_slice
node_key(const node *n)
{
	return (st_slice) {&n->next[n->nlevels], n->key_len};
}

/* First node with a key >= key; links[level] is where a node before it would be linked in. */
static node *
find(skiplist *list, st_slice key, node **links[MAX_LEVEL], node **previous)
{
	node	   *before = NULL;

	for (int level = MAX_LEVEL - 1; level >= 0; level--)
	{
		node	  **link = before == NULL ? &list->head[level] : &before->next[level];

		while (*link != NULL && st_compare(node_key(*link), key) < 0)
		{
			before = *link;
			link = &before->next[level];
		}
		links[level] = link;
	}
	*previous = before;
	return *links[0];
}

static void
free_node(node *n)
{
	free(n->value);
	free(n);
}

static void
remove_key(skiplist *list, st_slice key)
{
	node	  **links[MAX_LEVEL];
	node	   *previous;
	node	   *n = find(list, key, links, &previous);

	if (n == NULL || st_compare(node_key(n), key) != 0)
		return;
	for (int level = 0; level < n->nlevels; level++)
		*links[level] = n->next[level];
	if (n->next[0] != NULL)
		n->next[0]->previous = n->previous;
	else
		list->last = n->previous;
	free_node(n);
}

static bool
put(mem_map *map, skiplist *list, st_slice key, st_slice value)
{
	node	  **links[MAX_LEVEL];
	node	   *previous;
	node	   *n = find(list, key, links, &previous);
	unsigned char *copy = malloc(value.len > 0 ? value.len : 1);
	int			nlevels = 1;

	if (copy == NULL)
		return false;
	if (value.len > 0)
		memcpy(copy, value.data, value.len);
	if (n != NULL && st_compare(node_key(n), key) == 0)
	{
		free(n->value);
		n->value = copy;
		n->value_len = value.len;
		return true;
	}
	map->random = map->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	for (uint64_t bits = map->random >> 33; nlevels < MAX_LEVEL && (bits & 3) == 0; bits >>= 2)
		nlevels++;
	n = malloc(sizeof(*n) + (size_t) nlevels * sizeof(node *) + key.len);
	if (n == NULL)
	{
		free(copy);
		return false;
	}
	n->key_len = key.len;
	n->value = copy;
	n->value_len = value.len;
	n->nlevels = nlevels;
	n->previous = previous;
	memcpy(&n->next[nlevels], key.data, key.len);
	for (int level = 0; level < nlevels; level++)
	{
		n->next[level] = *links[level];
		*links[level] = n;
	}
	if (n->next[0] != NULL)
		n->next[0]->previous = n;
	else
		list->last = n;
	return true;
}

/* ---------- opening ---------- */

static st_status
parse_option(mem_map *map, const char *text, size_t len, st_error *err)
{
	const char *equals = memchr(text, '=', len);
	size_t		name_len = equals == NULL ? 0 : (size_t) (equals - text);
	char	   *end;
	unsigned long long number;

	if (equals == NULL)
		return st_fail(err, ST_INVALID, "store option \"%.*s\" has no value", (int) len, text);
	number = strtoull(equals + 1, &end, 10);
	if (end != text + len || end == equals + 1)
		return st_fail(err, ST_INVALID, "store option \"%.*s\" is not a number", (int) len, text);
#define IS(name) (name_len == strlen(name) && memcmp(text, name, name_len) == 0)
	if (IS("max_value") && number >= ST_MIN_DRIVER_VALUE && number <= ST_MAX_VALUE)
		map->limits.max_value = number;
	else if (IS("max_key") && number >= MIN_KEY_LIMIT && number <= ST_MAX_VALUE)
		map->limits.max_key = number;
	else if (IS("max_batch_ops") && number >= 1 && number <= UINT32_MAX)
		map->limits.max_batch_ops = (uint32_t) number;
	else if (IS("max_batch_bytes") && number >= 2 * MIN_KEY_LIMIT && number <= SIZE_MAX / 2)
		map->limits.max_batch_bytes = number;
	else if (IS("multi_get") && number <= 1)
		map->limits.multi_get = number == 1;
	else if (IS("reverse") && number <= 1)
		map->limits.reverse = number == 1;
	else if (IS("page") && number <= UINT32_MAX)
		map->page = (uint32_t) number;
	else
		return st_fail(err, ST_INVALID, "store option \"%.*s\" is unknown or out of range", (int) len, text);
#undef IS
	return ST_OK;
}

static st_status
parse_options(mem_map *map, const char *text, st_error *err)
{
	while (*text != '\0')
	{
		size_t		len = strcspn(text, "&");
		st_status	status = parse_option(map, text, len, err);

		if (status != ST_OK)
			return status;
		text += len;
		text += *text == '&';
	}
	if (map->limits.max_batch_bytes < map->limits.max_key + ST_MIN_DRIVER_VALUE)
		return st_fail(err, ST_INVALID, "max_batch_bytes has no room for a key and a value");
	return ST_OK;
}

static mem_map *
create_map(const char *name, const char *options, st_error *err)
{
	mem_map    *map = calloc(1, sizeof(*map));

	if (map == NULL)
	{
		st_fail(err, ST_NOMEM, "out of memory");
		return NULL;
	}
	strcpy(map->name, name);
	map->limits = (st_limits)
	{
		.max_key = 4096, .max_value = ST_MAX_VALUE, .max_batch_ops = 1024, .max_batch_bytes = (size_t) 16 << 20,
		.multi_get = true, .reverse = true
	};
	map->random = 1;
	if (parse_options(map, options, err) != ST_OK)
	{
		free(map);
		return NULL;
	}
	pthread_mutex_init(&map->mutex, NULL);
	map->references = 1;
	map->next = directory.maps;
	directory.maps = map;
	return map;
}

static void
release_map(mem_map *map)
{
	if (--map->references > 0)
		return;
	for (int space = 0; space < ST_NSPACES; space++)
		for (node *n = map->space[space].head[0]; n != NULL;)
		{
			node	   *next = n->next[0];

			free_node(n);
			n = next;
		}
	pthread_mutex_destroy(&map->mutex);
	free(map);
}

static st_status
mem_open(const char *rest, const st_options *options, void **state, st_limits *limits, st_error *err)
{
	size_t		len = strcspn(rest, "?");
	char		name[MAX_NAME];
	mem_store  *store;
	mem_map    *map;

	if (len == 0 || len >= MAX_NAME)
		return st_fail(err, ST_INVALID, "name of a store in memory must have 1 to %d bytes", MAX_NAME - 1);
	memcpy(name, rest, len);
	name[len] = '\0';
	store = calloc(1, sizeof(*store));
	if (store == NULL)
		return st_fail(err, ST_NOMEM, "out of memory");

	pthread_mutex_lock(&directory.mutex);
	for (map = directory.maps; map != NULL && strcmp(map->name, name) != 0; map = map->next)
		;
	if (map == NULL && options->create)
		map = create_map(name, rest[len] == '?' ? rest + len + 1 : "", err);
	else if (map == NULL)
		st_fail(err, ST_UNAVAILABLE, "there is no store in memory named \"%s\"", name);
	if (map != NULL)
		map->references++;
	pthread_mutex_unlock(&directory.mutex);

	if (map == NULL)
	{
		free(store);
		return err->code;
	}
	store->map = map;
	*limits = map->limits;
	*state = store;
	return ST_OK;
}

static void
mem_close(void *state)
{
	mem_store  *store = state;

	pthread_mutex_lock(&directory.mutex);
	release_map(store->map);
	pthread_mutex_unlock(&directory.mutex);
	free(store);
}

void
st_mem_forget(const char *name)
{
	pthread_mutex_lock(&directory.mutex);
	for (mem_map **link = &directory.maps; *link != NULL; link = &(*link)->next)
		if (strcmp((*link)->name, name) == 0)
		{
			mem_map    *map = *link;

			*link = map->next;
			release_map(map);
			break;
		}
	pthread_mutex_unlock(&directory.mutex);
}

uint64_t
st_mem_count(const char *name, st_space space)
{
	uint64_t	count = 0;

	pthread_mutex_lock(&directory.mutex);
	for (mem_map *map = directory.maps; map != NULL; map = map->next)
		if (strcmp(map->name, name) == 0)
		{
			pthread_mutex_lock(&map->mutex);
			for (node *n = map->space[space].head[0]; n != NULL; n = n->next[0])
				count++;
			pthread_mutex_unlock(&map->mutex);
		}
	pthread_mutex_unlock(&directory.mutex);
	return count;
}

/* ---------- requests ---------- */

static st_status
mem_get(void *state, st_space space, const st_slice *keys, uint32_t nkeys, st_result *result, st_error *err)
{
	mem_map    *map = ((mem_store *) state)->map;
	bool		room = true;

	if (nkeys > map->limits.max_batch_ops || (nkeys > 1 && !map->limits.multi_get))
		return st_fail(err, ST_INVALID, "more keys in one request than the store takes");
	pthread_mutex_lock(&map->mutex);
	for (uint32_t i = 0; i < nkeys && room; i++)
	{
		node	  **links[MAX_LEVEL];
		node	   *previous;
		node	   *n = find(&map->space[space], keys[i], links, &previous);

		if (n != NULL && st_compare(node_key(n), keys[i]) == 0)
			room = st_answer_add(result, keys[i], (st_slice) {n->value, n->value_len}, true);
		else
			room = st_answer_add(result, keys[i], (st_slice) {0}, false);
	}
	pthread_mutex_unlock(&map->mutex);
	return room ? ST_OK : st_fail(err, ST_NOMEM, "out of memory");
}

static st_status
mem_get_range(void *state, st_slice start, st_slice end, uint32_t limit, size_t max_bytes, bool reverse,
			  st_result *result, bool *complete, st_error *err)
{
	mem_map    *map = ((mem_store *) state)->map;
	skiplist   *list = &map->space[ST_SPACE_DATA];
	node	  **links[MAX_LEVEL];
	node	   *previous;
	node	   *n;
	uint32_t	nrecs = 0;
	size_t		bytes = 0;
	bool		room = true;

	if (reverse && !map->limits.reverse)
		return st_fail(err, ST_INVALID, "store has no reverse ranges");
	*complete = true;
	pthread_mutex_lock(&map->mutex);
	if (!reverse)
		n = find(list, start, links, &previous);
	else if (end.len == 0)
		n = list->last;
	else
	{
		find(list, end, links, &previous);
		n = previous;
	}
	for (; n != NULL && room; n = reverse ? n->previous : n->next[0])
	{
		if (reverse ? st_compare(node_key(n), start) < 0 : end.len > 0 && st_compare(node_key(n), end) >= 0)
			break;
		if ((limit > 0 && nrecs == limit) || (map->page > 0 && nrecs == map->page) ||
			(max_bytes > 0 && bytes >= max_bytes))
		{
			*complete = false;
			break;
		}
		room = st_answer_add(result, node_key(n), (st_slice) {n->value, n->value_len}, true);
		nrecs++;
		bytes += n->value_len;
	}
	pthread_mutex_unlock(&map->mutex);
	return room ? ST_OK : st_fail(err, ST_NOMEM, "out of memory");
}

static st_status
check_limits(const mem_map *map, const st_op *ops, uint32_t nops, st_error *err)
{
	size_t		bytes = 0;

	for (uint32_t i = 0; i < nops; i++)
	{
		if (ops[i].key.len > map->limits.max_key || (!ops[i].del && ops[i].value.len > map->limits.max_value))
			return st_fail(err, ST_INVALID, "key or value is longer than the store takes");
		bytes += ops[i].key.len + (ops[i].del ? 0 : ops[i].value.len);
	}
	if (nops > map->limits.max_batch_ops || (nops > 1 && bytes > map->limits.max_batch_bytes))
		return st_fail(err, ST_INVALID, "request is larger than the store takes");
	return ST_OK;
}

static st_status
mem_write(void *state, st_space space, const st_op *ops, uint32_t nops, bool *acked, st_error *err)
{
	mem_store  *store = state;
	mem_map    *map = store->map;
	st_status	status = check_limits(map, ops, nops, err);

	if (status != ST_OK)
		return status;
	pthread_mutex_lock(&map->mutex);
	status = st_check_owner(&map->owner, &store->assumed, err);
	for (uint32_t i = 0; i < nops && status == ST_OK; i++)
	{
		if (ops[i].del)
			remove_key(&map->space[space], ops[i].key);
		else if (!put(map, &map->space[space], ops[i].key, ops[i].value))
			status = st_fail(err, ST_NOMEM, "out of memory");
		acked[i] = status == ST_OK;
	}
	pthread_mutex_unlock(&map->mutex);
	return status;
}

static st_status
mem_sync(void *state, st_error *err)
{
	(void) state;
	(void) err;
	return ST_OK;
}

static st_status
mem_claim(void *state, const char *owner, uint64_t *epoch, st_error *err)
{
	mem_store  *store = state;
	mem_map    *map = store->map;
	st_status	status;

	pthread_mutex_lock(&map->mutex);
	status = st_raise_epoch(&map->owner, owner, err);
	if (status == ST_OK)
	{
		store->assumed = map->owner;
		*epoch = map->owner.epoch;
	}
	pthread_mutex_unlock(&map->mutex);
	return status;
}

static void
mem_assume(void *state, const char *owner, uint64_t epoch)
{
	st_set_owner(&((mem_store *) state)->assumed, owner, epoch);
}

const st_driver st_mem_driver = {
	.scheme = "mem",
	.open = mem_open,
	.close = mem_close,
	.get = mem_get,
	.get_range = mem_get_range,
	.write = mem_write,
	.sync = mem_sync,
	.claim = mem_claim,
	.assume = mem_assume,
};
