// SPDX-License-Identifier: Apache-2.0
/*
 * Where keys are. Of the object store nobody knows but itself: the keys that were put or found there are kept as
 * blocks of a pool without bytes, those that were not there for a moment in a small table, and the rest is
 * asked for in the background.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager.h"

#define LOOK 64
#define MAX_ASKED 256 /* keys of one call */

bool kvbm_object_known_absent(const struct kvbm_manager *m, uint64_t hash)
{
    return m->absent[hash % KVBM_ABSENT].hash == hash &&
           m->absent[hash % KVBM_ABSENT].until_ns > kv_now_ns();
}

void kvbm_object_absent(struct kvbm_manager *m, uint32_t group, const void *key, bool sure)
{
    uint64_t hash = kvbm_key_hash(m, group, key);

    if (sure)
        kvbm_pool_reset_keys(m->object, group, key, 1, NULL);
    m->absent[hash % KVBM_ABSENT].hash = hash;
    m->absent[hash % KVBM_ABSENT].until_ns = kv_now_ns() + KVBM_ABSENT_NS;
}

void kvbm_object_not_absent(struct kvbm_manager *m, uint32_t group, const void *key)
{
    uint64_t hash = kvbm_key_hash(m, group, key);

    if (m->absent[hash % KVBM_ABSENT].hash == hash)
        m->absent[hash % KVBM_ABSENT].until_ns = 0;
}

static void overtake_fetches(struct kvbm_pin *pin, uint32_t group, const void *key)
{
    for (struct kvbm_fetch *fetch = pin->group == group ? pin->fetches : NULL; fetch;
         fetch = fetch->next) {
        for (uint32_t k = 0; k < fetch->n; k++)
            if (!memcmp(kvbm_pin_key(pin, fetch->index[k]), key, pin->manager->key_len))
                fetch->overtaken |= 1u << k;
    }
}

void kvbm_object_put(struct kvbm_manager *m, uint32_t group, const void *key)
{
    uint64_t hash = kvbm_key_hash(m, group, key);

    kvbm_object_not_absent(m, group, key);
    for (struct kvbm_ask *ask = kvbm_set_has(&m->asked, hash) ? m->asks : NULL; ask;
         ask = ask->next) {
        for (uint32_t i = 0; i < ask->n && ask->group == group; i++)
            if (!memcmp(ask->keys + (size_t)(i + 1) * m->key_len, key, m->key_len))
                ask->overtaken |= 1u << i;
    }
    for (struct kvbm_pin *pin = kvbm_set_has(&m->pending, hash) ? m->pins : NULL; pin;
         pin = pin->next)
        overtake_fetches(pin, group, key);
}

bool kvbm_object_present(struct kvbm_manager *m, const struct kvbm_chain *chain,
                         const struct kvbm_immutable *like)
{
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    int rc;

    kvbm_object_not_absent(m, chain->group, chain->keys);
    if (kvbm_pool_touch(m->object, chain->group, chain->keys, 1) == 1)
        return true;
    if (kvbm_take_blocks(m->object, &block, 1) == 0)
        return false;
    if (like) {
        rc = kvbm_pool_adopt(m->object, &block, 1, like, &held);
    } else {
        rc = kvbm_pool_complete(m->object, &block, 1, chain, &complete);
        if (rc == 0)
            rc = kvbm_pool_register(m->object, &complete, 1, &held);
    }
    if (rc < 0) {
        kvbm_mutable_release(&block); /* its position was said to be another: not remembered */
        return false;
    }
    kvbm_immutable_release(&held);
    return true;
}

/* ---- asking ---- */

static void asked(struct kvbm_manager *m, struct kvbm_note *note)
{
    struct kvbm_ask *ask = (struct kvbm_ask *)note, **at = &m->asks;

    m->running--;
    m->n_asks--;
    while (*at != ask)
        at = &(*at)->next;
    *at = ask->next;
    for (uint32_t i = 0; i < ask->n; i++) {
        uint8_t *key = ask->keys + (size_t)(i + 1) * m->key_len;
        struct kvbm_chain chain = {.size = sizeof(chain),
                                   .group = ask->group,
                                   .keys = key,
                                   .parent = i || ask->has_parent ? key - m->key_len : NULL,
                                   .position = ask->position + i};

        kvbm_set_drop(&m->asked, kvbm_key_hash(m, ask->group, key));
        /* Not there, not to be had, or not remembered: for a moment it is a miss, not asked for for ever. */
        if (ask->overtaken >> i & 1)
            continue;
        if (ask->ios[i].status || !kvbm_object_present(m, &chain, NULL))
            kvbm_object_absent(m, ask->group, key, ask->ios[i].status == -ENOENT);
    }
    free(ask);
    pthread_cond_broadcast(&m->changed);
}

static void ask_done(struct kvbm_object_batch *batch)
{
    struct kvbm_ask *ask = batch->arg;

    kvbm_note(ask->manager, &ask->note, asked);
}

/* Keys [i, i + n) of the chain. False: they can't be asked for now. */
static bool ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n)
{
    const uint8_t *keys = chain->keys;
    struct kvbm_ask *q = calloc(1, sizeof(*q));

    if (!q || kvbm_set_reserve(&m->asked, n) < 0) {
        free(q);
        return false;
    }
    q->manager = m;
    q->group = chain->group;
    q->position = chain->position + (uint32_t)i;
    q->n = n;
    q->has_parent = i || chain->parent;
    if (q->has_parent)
        memcpy(q->keys, i ? keys + (i - 1) * m->key_len : chain->parent, m->key_len);
    memcpy(q->keys + m->key_len, keys + i * m->key_len, n * m->key_len);
    for (uint32_t k = 0; k < n; k++)
        q->ios[k] = (struct kvbm_object_io){.group = chain->group,
                                            .key = q->keys + (size_t)(k + 1) * m->key_len};
    q->batch = (struct kvbm_object_batch){.op = KVBM_OBJECT_EXISTS,
                                          .flow = KVBM_ONBOARD,
                                          .ios = q->ios,
                                          .n = n,
                                          .done = ask_done,
                                          .arg = q};
    if (kvbm_object_submit(m->object_store, &q->batch) < 0) {
        free(q);
        return false;
    }
    for (uint32_t k = 0; k < n; k++)
        kvbm_set_add(&m->asked, kvbm_key_hash(m, chain->group, keys + (i + k) * m->key_len));
    q->next = m->asks;
    m->asks = q;
    m->n_asks++;
    m->running++;
    return true;
}

/* ---- looking ---- */

static uint8_t where(const struct kvbm_manager *m, uint64_t hash, uint8_t tiers)
{
    if (tiers >> KV_TIER_HOST & 1)
        return KVBM_READY;
    if (kvbm_set_has(&m->pending, hash))
        return KVBM_PENDING;
    if (tiers >> KV_TIER_DISK & 1)
        return KVBM_ON_DISK;
    if (tiers >> KV_TIER_EXTERNAL & 1)
        return KVBM_REMOTE;
    return kvbm_set_has(&m->asked, hash) ? KVBM_PENDING : KVBM_MISS;
}

static bool to_be_asked(const struct kvbm_manager *m, uint64_t hash, uint8_t at)
{
    return m->object_store && at == KVBM_MISS && !kvbm_object_known_absent(m, hash);
}

/* What isn't known of [i, i + n) is asked for: all from the first such on, since they come as a sequence. */
static uint32_t ask_unknown(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                            uint8_t *at, uint32_t n)
{
    const uint8_t *keys = chain->keys;
    uint32_t first = 0, last, some;

    while (
        first < n &&
        !to_be_asked(m, kvbm_key_hash(m, chain->group, keys + (i + first) * m->key_len), at[first]))
        first++;
    for (last = first; last < n; last += some) {
        some = KV_MIN(n - last, (uint32_t)KVBM_BATCH);
        if (!ask(m, chain, i + last, some))
            break;
        for (uint32_t k = last; k < last + some; k++)
            at[k] = at[k] == KVBM_MISS ? KVBM_PENDING : at[k];
    }
    return last - first;
}

long kvbm_manager_lookup(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                         uint8_t *ret)
{
    const uint8_t *keys = chain ? chain->keys : NULL;
    uint32_t asked_for = 0, some;
    long prefix = 0, rc = kvbm_manager_usable(m);
    uint8_t at[LOOK];

    if (rc < 0)
        return rc;
    if (!chain || chain->size < offsetof(struct kvbm_chain, tokens) || (n && !keys) ||
        chain->group >= KVBM_MAX_GROUPS || !chain->parent != !chain->position)
        return -EINVAL;
    kvbm_manager_enter(m);
    for (size_t i = 0; i < n; i += some) {
        const uint8_t *key = keys + i * m->key_len;

        some = (uint32_t)KV_MIN(n - i, (size_t)LOOK);
        kvbm_registry_locate(m->registry, chain->group, key, some, at);
        for (uint32_t k = 0; k < some; k++)
            at[k] = where(m, kvbm_key_hash(m, chain->group, key + k * m->key_len), at[k]);
        if (asked_for < MAX_ASKED && m->object_store && !m->stopping)
            asked_for += ask_unknown(m, chain, i, at, some);
        for (uint32_t k = 0; k < some && prefix == (long)(i + k); k++)
            prefix += at[k] != KVBM_MISS;
        if (ret)
            memcpy(ret + i, at, some);
    }
    kvbm_manager_leave(m);
    return prefix;
}

/* Those behind a gap, too: a tier may have lost the first of a sequence and have the rest. */
static long touch(const struct kvbm_manager *m, struct kvbm_pool *pool, uint32_t group,
                  const uint8_t *keys, size_t n)
{
    long prefix = kvbm_pool_touch(pool, group, keys, n);

    for (size_t i = (size_t)prefix + 1; prefix >= 0 && i < n; i++)
        i += (size_t)kvbm_pool_touch(pool, group, keys + i * m->key_len, n - i);
    return prefix;
}

long kvbm_manager_touch(struct kvbm_manager *m, uint32_t group, const void *keys, size_t n)
{
    struct kvbm_pool *const pools[] = {m ? m->host : NULL, m ? m->disk : NULL,
                                       m ? m->object : NULL};
    long longest = kvbm_manager_usable(m);

    for (size_t i = 0; longest >= 0 && i < KV_COUNT(pools); i++) {
        long found = pools[i] ? touch(m, pools[i], group, keys, n) : 0;

        longest = found < 0 ? found : KV_MAX(longest, found);
    }
    return longest;
}
