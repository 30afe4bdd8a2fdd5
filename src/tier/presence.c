// SPDX-License-Identifier: Apache-2.0
/*
 * What is known of the object store, of which nobody knows but itself: the keys that were put or found there are kept
 * as blocks of a pool without bytes, those that were not there for a moment in a small table, and the rest is
 * asked for in the background.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager.h"

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

bool kvbm_object_ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n)
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
