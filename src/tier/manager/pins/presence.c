// SPDX-License-Identifier: Apache-2.0
/*
 * Presence: which keys the object store has, as far as known. Keys that were put or found there are
 * blocks of a pool without bytes. Other keys are asked for in the background. A set-associative
 * table of beliefs keeps the state of these questions:
 *
 *   (none) ── asked ──► being asked ── not there ──────────────────────► absent, for 2 s
 *                        ▲     │                                             ▲
 *                        │     ├── no answer (failed, queue full) ─► pauses  │
 *                        └─────│─────────────────────────────────────┘       │
 *                              └── no answer, 2 s after the first question ──┘
 *
 * A lookup answers KVBM_PENDING for two seconds at most, or for the timeout of one batch if that is
 * less. A question that hangs goes on in the background, and its answer counts when it comes. While
 * the breaker is open no key is asked for, and no lookup waits for the breaker's probe.
 *
 * Misses for want of an answer are counted. A key whose set is full of valid beliefs is such a miss:
 * replacing one of them would ask for that key again, and answer KVBM_PENDING from the beginning.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/pins/pin.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"

#define ABSENT_NS (2 * KV_NS_PER_S) /* time for which "absent" is believed */
#define PATIENCE_NS (2 * KV_NS_PER_S)
#define BEING_ASKED UINT64_MAX

/* ---- beliefs ---- */

/* Compute the time after the first question for which a lookup waits for a key's answer. */
static uint64_t patience_ns(const struct kvbm_manager *m)
{
    return KV_MIN(PATIENCE_NS, m->opts.object_timeout_ms * KV_NS_PER_MS);
}

static const struct kvbm_belief *look_up(const struct kvbm_manager *m, uint64_t hash)
{
    const struct kvbm_belief *set = m->presence.beliefs[hash % KVBM_BELIEFS];

    for (int i = 0; i < KVBM_BELIEF_WAYS; i++) {
        if (set[i].hash == hash && set[i].until_ns)
            return &set[i];
    }
    return NULL;
}

static struct kvbm_belief *find(struct kvbm_manager *m, uint64_t hash)
{
    return (struct kvbm_belief *)look_up(m, hash);
}

static bool is_over(const struct kvbm_belief *belief, uint64_t now)
{
    if (!belief->until_ns)
        return true;
    if (belief->until_ns == BEING_ASKED)
        return false;
    /* A waiting lookup asks again after the pause. */
    return now >= belief->until_ns + (belief->since_ns ? PATIENCE_NS : 0);
}

/* Find the belief about a key, or an empty one. NULL: its set is full. */
static struct kvbm_belief *find_or_make(struct kvbm_manager *m, uint64_t hash)
{
    struct kvbm_belief *set = m->presence.beliefs[hash % KVBM_BELIEFS], *belief = find(m, hash);
    uint64_t now = kv_now_ns();

    if (belief)
        return belief;
    for (int i = 0; i < KVBM_BELIEF_WAYS; i++) {
        if (!is_over(&set[i], now))
            continue;
        set[i] = (struct kvbm_belief){.hash = hash};
        return &set[i];
    }
    return NULL;
}

static void set_absent(struct kvbm_belief *belief)
{
    belief->since_ns = 0;
    belief->until_ns = kv_now_ns() + ABSENT_NS;
}

bool kvbm_presence_known_absent(const struct kvbm_manager *m, uint64_t hash)
{
    const struct kvbm_belief *belief = look_up(m, hash);
    uint64_t now = belief ? kv_now_ns() : 0;

    if (!belief)
        return false;
    if (!belief->since_ns)
        return now < belief->until_ns;
    return kvbm_set_has(&m->presence.asked, hash) && now - belief->since_ns >= patience_ns(m);
}

enum kvbm_presence kvbm_presence_of(const struct kvbm_manager *m, uint64_t hash)
{
    const struct kvbm_belief *belief = look_up(m, hash);
    bool asked = kvbm_set_has(&m->presence.asked, hash);

    /* A key that is asked for without a belief found its set full: the time of its first question
     * is unknown. */
    if (kvbm_presence_known_absent(m, hash) || (asked && !belief))
        return KVBM_PRESENCE_ABSENT;
    if (asked || (belief && belief->since_ns && belief->until_ns != BEING_ASKED &&
                  kv_now_ns() < belief->until_ns))
        return KVBM_PRESENCE_ASKED;
    return KVBM_PRESENCE_UNKNOWN;
}

/* Note that a key is being asked for. If it was asked for lately in vain, its time counts from then:
 * else lookups would wait for it again and again. NULL: its set is full. */
static struct kvbm_belief *begin_asking(struct kvbm_manager *m, uint64_t hash, uint64_t now)
{
    struct kvbm_belief *belief = find_or_make(m, hash);

    if (!belief) {
        m->stats.object_unanswered++;
        return NULL;
    }
    if (!belief->since_ns || (belief->until_ns != BEING_ASKED && is_over(belief, now)))
        belief->since_ns = now;
    belief->until_ns = BEING_ASKED;
    return belief;
}

/* Note that a question about a key ended with @rc @now, the same for its other keys: they are asked
 * for again together. */
static void unanswered(struct kvbm_manager *m, uint64_t hash, int rc, uint64_t now)
{
    struct kvbm_belief *belief = find(m, hash);
    uint64_t patience = patience_ns(m), pause = patience / 20;

    /* the key arrived meanwhile, or the query was about a key of another tier */
    if (!belief || !belief->since_ns)
        return;
    if (rc != -EHOSTDOWN && now + pause - belief->since_ns < patience) {
        belief->until_ns = now + pause;
        return;
    }
    m->stats.object_unanswered++;
    /* a retry costs nothing while the breaker is open, and finds the store as soon as it is back */
    if (rc == -EHOSTDOWN)
        belief->until_ns = 0;
    else
        set_absent(belief);
}

/* ---- what is known ---- */

void kvbm_presence_absent(struct kvbm_manager *m, uint32_t group, const void *key, bool sure)
{
    struct kvbm_belief *belief;

    if (sure)
        kvbm_pool_reset_keys(m->object, group, key, 1, NULL);
    belief = find_or_make(m, kvbm_key_hash(m, group, key));
    if (belief) /* NULL: the next lookup asks again */
        set_absent(belief);
}

void kvbm_presence_not_absent(struct kvbm_manager *m, uint32_t group, const void *key)
{
    struct kvbm_belief *belief = find(m, kvbm_key_hash(m, group, key));

    if (belief)
        belief->until_ns = 0;
}

static void overtake_fetches(struct kvbm_pin *pin, uint32_t group, const void *key)
{
    for (struct kvbm_fetch *fetch = pin->group == group ? pin->fetches : NULL; fetch;
         fetch = fetch->next) {
        for (uint32_t k = 0; k < fetch->n && !fetch->asks; k++)
            if (!memcmp(kvbm_pin_key(pin, fetch->index[k]), key, pin->manager->key_len))
                fetch->overtaken |= 1u << k;
    }
}

/* Let the questions and gets of a key that are under way tell nothing about it. */
static void overtake(struct kvbm_manager *m, uint32_t group, const void *key)
{
    uint64_t hash = kvbm_key_hash(m, group, key);

    for (struct kvbm_ask *ask = kvbm_set_has(&m->presence.asked, hash) ? m->presence.asks : NULL;
         ask; ask = ask->next) {
        for (uint32_t i = 0; i < ask->n && ask->group == group; i++)
            if (!memcmp(ask->keys + (size_t)(i + 1) * m->key_len, key, m->key_len))
                ask->overtaken |= 1u << i;
    }
    for (struct kvbm_pin *pin = kvbm_key_is_pending(m, hash) ? m->pins.first : NULL; pin;
         pin = pin->next)
        overtake_fetches(pin, group, key);
}

void kvbm_presence_stored(struct kvbm_manager *m, uint32_t group, const void *key)
{
    kvbm_presence_not_absent(m, group, key);
    overtake(m, group, key);
}

void kvbm_presence_removed(struct kvbm_manager *m, uint32_t group, const void *key)
{
    overtake(m, group, key);
    kvbm_presence_absent(m, group, key, true);
}

bool kvbm_presence_add(struct kvbm_manager *m, const struct kvbm_chain *chain,
                       const struct kvbm_immutable *like)
{
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    int rc;

    kvbm_presence_not_absent(m, chain->group, chain->keys);
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
        kvbm_mutable_release(&block); /* the pool has the key at another position: not remembered */
        return false;
    }
    kvbm_immutable_release(&held);
    return true;
}

/* ---- asking ---- */

static void answered(struct kvbm_manager *m, const struct kvbm_ask *ask, uint32_t i, uint64_t now)
{
    const uint8_t *key = ask->keys + (size_t)(i + 1) * m->key_len;
    struct kvbm_chain chain = {
        .size = sizeof(chain), .group = ask->group, .keys = key, .scattered = ask->scattered};
    int status = ask->ios[i].status;
    bool absent = status == -ENOENT || status == -EBADMSG; /* damaged: no tier can load it */

    if (!ask->scattered) {
        chain.parent = i || ask->has_parent ? key - m->key_len : NULL;
        chain.position = ask->position + i;
    }
    kvbm_stats_of(m, KV_TIER_EXTERNAL)->bad += status == -EBADMSG;
    if (status && !absent)
        unanswered(m, kvbm_key_hash(m, ask->group, key), status, now);
    /* also absent: a key that can't be remembered */
    else if (status || !kvbm_presence_add(m, &chain, NULL))
        kvbm_presence_absent(m, ask->group, key, absent);
}

static void asked(struct kvbm_manager *m, void *operation)
{
    struct kvbm_ask *ask = operation, **at = &m->presence.asks;
    uint64_t now = kv_now_ns();

    m->mover.running--;
    m->presence.n_asks--;
    while (*at != ask)
        at = &(*at)->next;
    *at = ask->next;
    for (uint32_t i = 0; i < ask->n; i++) {
        const uint8_t *key = ask->keys + (size_t)(i + 1) * m->key_len;

        kvbm_set_drop(&m->presence.asked, kvbm_key_hash(m, ask->group, key));
        if (!(ask->overtaken >> i & 1))
            answered(m, ask, i, now);
    }
    free(ask);
    pthread_cond_broadcast(&m->changed);
}

static void ask_done(struct kvbm_object_batch *batch)
{
    struct kvbm_ask *ask = batch->arg;

    kvbm_note(ask->manager, asked, ask);
}

/* Make a query. NULL: out of memory. */
static struct kvbm_ask *ask_new(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                                uint32_t n)
{
    const uint8_t *keys = chain->keys;
    struct kvbm_ask *q = calloc(1, sizeof(*q));

    if (!q || kvbm_set_reserve(&m->presence.asked, n) < 0) {
        free(q);
        return NULL;
    }
    q->manager = m;
    q->group = chain->group;
    q->position = chain->position + (uint32_t)i;
    q->n = n;
    q->scattered = kvbm_chain_scattered(chain);
    q->has_parent = !q->scattered && (i || chain->parent);
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
    return q;
}

int kvbm_presence_ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n,
                      uint32_t unknown)
{
    struct kvbm_ask *q = ask_new(m, chain, i, n);
    int rc = q ? kvbm_object_submit(m->object_store, &q->batch) : -ENOMEM;
    uint64_t now = kv_now_ns();

    for (uint32_t k = 0; k < n; k++) {
        const uint8_t *key = (const uint8_t *)chain->keys + (i + k) * m->key_len;
        uint64_t hash = kvbm_key_hash(m, chain->group, key);
        struct kvbm_belief *belief = unknown >> k & 1 ? begin_asking(m, hash, now) : NULL;

        if (rc == 0)
            kvbm_set_add(&m->presence.asked, hash);
        else if (belief)
            unanswered(m, hash, rc, now);
        if (belief && rc == 0 && q->batch.probe_) /* this query is the breaker's probe */
            belief->since_ns = 1;
    }
    if (rc < 0) {
        free(q);
        return rc;
    }
    q->next = m->presence.asks;
    m->presence.asks = q;
    m->presence.n_asks++;
    m->mover.running++;
    return 0;
}
