// SPDX-License-Identifier: Apache-2.0
#include "indexer/registry/removals.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/mix.h"

#define FIRST_CAPACITY 64 /* a power of two, as all are */

struct ki_removal {
    struct ki_removed what;
    uint32_t next; /* in the bucket, as in buckets */
};

void ki_removals_fini(struct ki_removals *r)
{
    free(r->items);
    free(r->buckets);
    memset(r, 0, sizeof(*r));
}

static uint32_t *bucket_of(const struct ki_removals *r, uint64_t instance, uint32_t rank)
{
    return &r->buckets[kv_mix(kv_mix(instance) ^ rank) & (r->capacity - 1)];
}

static struct ki_removed *find(const struct ki_removals *r, uint64_t instance, uint32_t rank)
{
    uint32_t at = r->capacity ? *bucket_of(r, instance, rank) : 0;

    while (at && (r->items[at - 1].what.instance != instance || r->items[at - 1].what.rank != rank))
        at = r->items[at - 1].next;
    return at ? &r->items[at - 1].what : NULL;
}

const struct ki_removed *ki_removals_find(const struct ki_removals *r, uint64_t instance,
                                          uint32_t rank)
{
    return find(r, instance, rank);
}

static void link_all(struct ki_removals *r)
{
    if (r->capacity)
        memset(r->buckets, 0, r->capacity * sizeof(*r->buckets));
    for (uint32_t i = 0; i < r->n; i++) {
        uint32_t *bucket = bucket_of(r, r->items[i].what.instance, r->items[i].what.rank);

        r->items[i].next = *bucket;
        *bucket = i + 1;
    }
}

static void expire(struct ki_removals *r)
{
    uint64_t now_us = kv_wall_ns() / 1000;
    size_t kept = 0;

    for (size_t i = 0; i < r->n; i++)
        if (r->items[i].what.version + KI_REMOVED_US > now_us)
            r->items[kept++] = r->items[i];
    if (kept == r->n)
        return;
    r->n = kept;
    link_all(r);
}

/* Returns false without memory. */
static bool grow(struct ki_removals *r)
{
    size_t capacity = r->capacity ? r->capacity * 2 : FIRST_CAPACITY;
    struct ki_removal *items = realloc(r->items, capacity * sizeof(*items));
    uint32_t *buckets;

    if (!items)
        return false;
    r->items = items;
    buckets = realloc(r->buckets, capacity * sizeof(*buckets));
    if (!buckets)
        return false;
    r->buckets = buckets;
    r->capacity = capacity;
    link_all(r);
    return true;
}

static void log_no_memory(void)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 1))
        kv_log_warn("peers",
                    "no memory to remember a removal; a peer that has been cut off may bring the "
                    "worker back",
                    "error=\"%s\"", strerror(ENOMEM));
}

static int compare_newest_first(const void *a, const void *b)
{
    uint64_t va = ((const struct ki_removal *)a)->what.version;
    uint64_t vb = ((const struct ki_removal *)b)->what.version;

    return (va < vb) - (va > vb);
}

/* Forget the oldest: a sixteenth of them at once, as that takes a sort. */
static void drop_oldest(struct ki_removals *r)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 1))
        kv_log_warn("peers",
                    "too many removals within an hour; a peer that has been cut off may bring "
                    "workers back",
                    "limit=%zu", r->max);
    qsort(r->items, r->n, sizeof(*r->items), compare_newest_first);
    r->n -= r->n / 16 + (r->n > 0);
    link_all(r);
}

/* Make room for one more. Each way makes room for a part of the table, so that few calls work. */
static bool has_room(struct ki_removals *r)
{
    size_t limit = KV_MIN(r->capacity, r->max);

    if (r->n < limit)
        return true;
    expire(r);
    if (r->n <= limit - limit / 16 && limit)
        return true;
    if (r->capacity < r->max) {
        if (!grow(r))
            log_no_memory();
        return r->n < KV_MIN(r->capacity, r->max);
    }
    if (r->n)
        drop_oldest(r);
    return r->n < r->max;
}

bool ki_removals_note(struct ki_removals *r, const struct ki_removed *removed)
{
    struct ki_removed *known = find(r, removed->instance, removed->rank);
    uint32_t *bucket;

    if (known) {
        if (known->version >= removed->version)
            return false;
        *known = *removed;
        return true;
    }
    if (!has_room(r))
        return false;
    bucket = bucket_of(r, removed->instance, removed->rank);
    r->items[r->n] = (struct ki_removal){.what = *removed, .next = *bucket};
    *bucket = (uint32_t)++r->n;
    return true;
}

bool ki_removals_take_by_peer(struct ki_removals *r, uint64_t instance, const uint32_t *rank)
{
    bool found = false;

    for (size_t i = 0; i < r->n; i++) {
        struct ki_removed *removed = &r->items[i].what;

        if (removed->instance != instance || (rank && removed->rank != *rank))
            continue;
        found |= removed->by_peer;
        removed->by_peer = false;
    }
    return found;
}

long ki_removals_list(struct ki_removals *r, struct ki_removed **ret)
{
    struct ki_removed *copy;

    expire(r);
    copy = malloc((r->n + 1) * sizeof(*copy));
    if (!copy)
        return -ENOMEM;
    for (size_t i = 0; i < r->n; i++)
        copy[i] = r->items[i].what;
    *ret = copy;
    return (long)r->n;
}
