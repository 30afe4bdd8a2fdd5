// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plane/discovery/impl.h"

static void entry_free(struct kvp_entry *e)
{
    if (!e)
        return;
    free(e->name);
    free(e->address);
    free(e);
}

void kvp_table_fini(struct kvp_table *t)
{
    for (size_t i = 0; i < t->n; i++)
        entry_free(t->items[i]);
    free(t->items);
    *t = (struct kvp_table){0};
}

static int compare(const struct kvp_entry *e, enum kvp_bucket bucket, const char *name)
{
    return e->bucket != bucket ? (e->bucket < bucket ? -1 : 1) : strcmp(e->name, name);
}

/* Return the place of the first entry not before (bucket, name). */
static size_t bound(const struct kvp_table *t, enum kvp_bucket bucket, const char *name)
{
    size_t low = 0, high = t->n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (compare(t->items[mid], bucket, name) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

struct kvp_entry *kvp_table_find(const struct kvp_table *t, enum kvp_bucket bucket,
                                 const char *name)
{
    size_t at = bound(t, bucket, name);

    return at < t->n && compare(t->items[at], bucket, name) == 0 ? t->items[at] : NULL;
}

static void remove_at(struct kvp_table *t, size_t at)
{
    entry_free(t->items[at]);
    memmove(t->items + at, t->items + at + 1, (t->n - at - 1) * sizeof(*t->items));
    t->n--;
    t->changed = true;
}

void kvp_table_remove(struct kvp_table *t, enum kvp_bucket bucket, const char *name)
{
    size_t at = bound(t, bucket, name);

    if (at < t->n && compare(t->items[at], bucket, name) == 0)
        remove_at(t, at);
}

/* Read a record into @e. Returns false for one that makes no sense, or has another name. */
static bool read_record(struct kvp_entry *e, const char *name, const void *json, size_t len)
{
    struct kvp_dynamo_source source;
    struct kvp_dynamo_channel channel;
    struct kv_buf own = KV_BUF_INIT;
    bool is_own;

    if (e->bucket == KVP_SOURCES) {
        if (kvp_dynamo_read_source(json, len, &source) < 0)
            return false;
        e->publisher = source.publisher;
        e->worker = source.worker;
        e->rank = source.rank;
        kvp_dynamo_put_name(&own, &source.of, source.publisher);
    } else {
        if (kvp_dynamo_read_channel(json, len, &channel) < 0)
            return false;
        e->publisher = channel.publisher;
        e->address = *channel.address ? strdup(channel.address) : NULL;
        if (*channel.address && !e->address)
            return false;
        kvp_dynamo_put_name(&own, &channel.of, channel.publisher);
    }
    is_own = strcmp(kv_buf_cstr(&own), name) == 0;
    kv_buf_fini(&own);
    return is_own;
}

static struct kvp_entry *make(enum kvp_bucket bucket, const char *name, const void *json,
                              size_t len)
{
    struct kvp_entry *e = calloc(1, sizeof(*e));

    if (!e)
        return NULL;
    e->bucket = bucket;
    e->name = strdup(name);
    if (e->name && read_record(e, name, json, len))
        return e;
    entry_free(e);
    return NULL;
}

static bool is_same(const struct kvp_entry *a, const struct kvp_entry *b)
{
    return a->publisher == b->publisher && a->worker == b->worker && a->rank == b->rank &&
           !a->address == !b->address && (!a->address || strcmp(a->address, b->address) == 0);
}

/* Make room for one more entry. */
static bool reserve(struct kvp_table *t)
{
    size_t capacity = t->capacity ? 2 * t->capacity : 64;
    struct kvp_entry **items;

    if (t->n < t->capacity)
        return true;
    items = t->n < KVP_DISCOVERY_MAX ? realloc(t->items, capacity * sizeof(*items)) : NULL;
    if (!items)
        return false;
    t->items = items;
    t->capacity = capacity;
    return true;
}

struct kvp_entry *kvp_table_put(struct kvp_table *t, enum kvp_bucket bucket, const char *name,
                                const void *json, size_t len)
{
    struct kvp_entry *e, *old;
    size_t at;

    if (strncmp(name, t->only, strlen(t->only)) != 0)
        return NULL;
    at = bound(t, bucket, name);
    old = at < t->n && compare(t->items[at], bucket, name) == 0 ? t->items[at] : NULL;
    e = make(bucket, name, json, len);
    if (!e || (!old && !reserve(t))) {
        entry_free(e);
        t->left_out++;
        if (old)
            remove_at(t, at);
        return NULL;
    }
    if (old && is_same(old, e)) {
        entry_free(e);
        old->look = t->look;
        return old;
    }
    e->look = t->look;
    e->order = ++t->order;
    t->changed = true;
    if (old) {
        entry_free(old);
    } else {
        memmove(t->items + at + 1, t->items + at, (t->n - at) * sizeof(*t->items));
        t->n++;
    }
    t->items[at] = e;
    return e;
}

void kvp_table_begin(struct kvp_table *t)
{
    t->look++;
    t->left_out = 0;
}

void kvp_table_end(struct kvp_table *t)
{
    for (size_t i = t->n; i-- > 0;)
        if (t->items[i]->look != t->look)
            remove_at(t, i);
}

/* -- workers ----------------------------------------------------------------------------------- */

/* A worker, and when its channel appeared. */
struct found {
    struct kvp_dynamo_worker worker;
    uint64_t order;
};

static int by_rank(const void *a, const void *b)
{
    const struct found *x = a, *y = b;

    if (x->worker.worker != y->worker.worker)
        return x->worker.worker < y->worker.worker ? -1 : 1;
    if (x->worker.rank != y->worker.rank)
        return x->worker.rank < y->worker.rank ? -1 : 1;
    return x->order > y->order ? -1 : 1; /* the latest first */
}

/*
 * List the sources that have a channel, or may go without one. Returns their number; *@ret_lone: of the
 * others.
 */
static size_t find_workers(const struct kvp_table *t, struct found *ret, size_t *ret_lone)
{
    size_t n = 0;

    *ret_lone = 0;
    for (size_t i = 0; i < t->n && t->items[i]->bucket == KVP_SOURCES; i++) {
        const struct kvp_entry *source = t->items[i], *channel;

        if (source->expired)
            continue;
        channel = kvp_table_find(t, KVP_CHANNELS, source->name);
        if (channel && channel->address && !channel->expired)
            ret[n++] =
                (struct found){{source->publisher, source->worker, source->rank, channel->address},
                               channel->order};
        else if (t->nats && (!channel || !channel->address))
            ret[n++] = (struct found){{source->publisher, source->worker, source->rank, NULL},
                                      source->order};
        else
            ++*ret_lone;
    }
    return n;
}

int kvp_table_tell(struct kvp_table *t, kvp_discovery_fn fn, void *arg)
{
    struct found *found = calloc(t->n + 1, sizeof(*found));
    struct kvp_dynamo_worker *workers = calloc(t->n + 1, sizeof(*workers));
    size_t n_found, n = 0, lone;

    if (found && workers) {
        n_found = find_workers(t, found, &lone);
        qsort(found, n_found, sizeof(*found), by_rank);
        for (size_t i = 0; i < n_found; i++)
            if (!n || workers[n - 1].worker != found[i].worker.worker ||
                workers[n - 1].rank != found[i].worker.rank)
                workers[n++] = found[i].worker;
        t->changed = false;
        fn(arg, workers, n, lone);
    }
    free(found);
    free(workers);
    return t->changed ? -ENOMEM : 0;
}
