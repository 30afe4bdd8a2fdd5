// SPDX-License-Identifier: Apache-2.0
/*
 * Blocking calls on keys: prepare, copy, wait and release in one call. A call that finds no room
 * waits for it, whereas prepare_store and prepare_load return at once.
 *
 *   store   │ passed │ tried, to be tried again │ not tried yet │      window: as many keys as may
 *           0        from                       tried           n      be promised (promise.c)
 *
 * A blocking store reports only keys that stay: those that a tier below has, and those promised to
 * stay in the host tier until one has them. So it tries no more keys than may be promised. It passes
 * those that are safe, and waits for the tiers below when the window is full.
 *
 * Invariants: from <= tried <= n, and from never moves back, so the call ends. A call that waits
 * for room holds no pin and no block: calls can't block each other. They take turns (turn.c).
 */
#include <errno.h>
#include <stdlib.h>

#include "bm/ids.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/jobs/turn.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define LOOK 64
#define BELOW (1u << KV_TIER_DISK | 1u << KV_TIER_EXTERNAL)
#define KEPT (1u << KV_TIER_HOST | BELOW)

struct call {
    struct kvbm_cache *cache;
    struct kvbm_manager *manager;
    struct kvbm_chain chain;
    uint32_t n;
    uint64_t deadline_ns;
    uint8_t *state, *ok;
    uint32_t *host; /* host blocks of the pin */
    struct kvbm_turn turn;
    /* Store: the first key that the host tier still has to keep, or to get; those before @tried
     * have had their turn, those before @offered were offered to the policy. */
    uint32_t from, tried, offered;
    /* Load: of the keys that were tried, those before the first one that the call's own pin held;
     * all of them when there is none, or when the first one wasn't BUSY. */
    uint32_t lead;
    bool at_once;    /* a timeout of 0: wait for the copy alone */
    bool durable;    /* store: wait for a tier below the host tier */
    bool lacks_room; /* store: for keys that were tried; others wait for another pin alone */
};

/* Check a call's arguments and make its arrays. Call call_fini also after a failure. */
static int call_init(struct call *c, struct kvbm_cache *cache, const struct kvbm_chain *chain,
                     size_t n, const uint32_t *blocks, bool load, uint32_t timeout_ms)
{
    int rc = cache ? kvbm_manager_usable(cache->manager) : -EINVAL;

    *c = (struct call){.cache = cache};
    if (rc < 0)
        return rc;
    if (!kv_sized(chain, "kvbm_chain") || chain->size < offsetof(struct kvbm_chain, tokens) ||
        (n && (!chain->keys || !blocks)) || n > KVBM_MAX_PIN)
        return -EINVAL;
    c->manager = cache->manager;
    c->chain = (struct kvbm_chain){.size = sizeof(c->chain),
                                   .group = chain->group,
                                   .keys = chain->keys,
                                   .parent = chain->parent,
                                   .position = chain->position,
                                   .tokens = KV_OPT(chain, tokens, NULL),
                                   .scattered = kvbm_chain_scattered(chain)};
    c->n = (uint32_t)n;
    c->deadline_ns = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    c->at_once = !timeout_ms;
    c->state = malloc(n + 1);
    c->ok = calloc(n / 8 + 1, 1);
    c->host = malloc((n + 1) * sizeof(*c->host));
    if (!c->state || !c->ok || !c->host)
        return -ENOMEM;
    return kvbm_cache_check(cache, blocks, n, KVBM_IDS_GAPS | (load ? KVBM_IDS_ONCE : 0));
}

static void call_fini(struct call *c)
{
    kvbm_turn_end(c->manager, &c->turn);
    free(c->state);
    free(c->ok);
    free(c->host);
}

/* Return the chain of the keys from @from on. */
static struct kvbm_chain rest_of(const struct call *c, uint32_t from)
{
    const uint8_t *keys = (const uint8_t *)c->chain.keys + (size_t)from * c->manager->key_len;
    struct kvbm_chain chain = c->chain;

    chain.keys = keys;
    if (chain.tokens)
        chain.tokens += (size_t)from * c->manager->block_tokens;
    if (!chain.scattered) {
        chain.parent = from ? keys - c->manager->key_len : c->chain.parent;
        chain.position += from;
    }
    return chain;
}

/* Copy between the pin and the cache. On return no transfer uses either. */
static int copy(struct call *c, struct kvbm_pin *pin, const uint32_t *blocks)
{
    const struct kvbm_job job = {.size = sizeof(job),
                                 .pin = pin,
                                 .cache = c->cache,
                                 .blocks = blocks,
                                 .deadline_ns = c->at_once ? 0 : c->deadline_ns,
                                 .ok = c->ok};

    return kvbm_job_run(c->manager, &job);
}

/* ---- store ---- */

/* Number of keys, of @n from @from on, up to the first one that no tier of the set @of has. */
static uint32_t kept(const struct call *c, uint32_t from, uint32_t n, uint8_t of)
{
    const uint8_t *keys = (const uint8_t *)c->chain.keys + (size_t)from * c->manager->key_len;
    uint8_t tiers[LOOK];
    uint32_t i = 0;

    for (; i < n; i++) {
        if (i % LOOK == 0)
            kvbm_registry_locate(c->manager->registry, c->chain.group,
                                 keys + (size_t)i * c->manager->key_len,
                                 KV_MIN(n - i, (uint32_t)LOOK), tiers);
        if (!(tiers[i % LOOK] & of))
            break;
    }
    return i;
}

/* Count the next @n keys that found no room, or that another pin is storing; with @all also those
 * that were reserved. *@first becomes the first of them, if there are any. */
static uint32_t count_left(const struct call *c, uint32_t n, bool all, uint32_t *first)
{
    uint32_t left = 0;

    for (uint32_t i = c->from; i < c->from + n; i++) {
        if (c->state[i] != KVBM_BUSY &&
            (c->state[i] != KVBM_PENDING || (!all && c->host[i] != UINT32_MAX)))
            continue;
        *first = left++ ? *first : i;
    }
    return left;
}

/* Wait, without a host tier, until a tier below has the @n keys of a pin, or no offload of them is
 * left. */
static void wait_written(struct call *c, const struct kvbm_pin *pin, uint32_t n)
{
    struct kvbm_manager *m = c->manager;
    int rc = 0;

    kvbm_manager_enter(m);
    while (rc == 0 && pin->refs > 1 && kept(c, c->from, n, BELOW) < n)
        rc = kvbm_manager_wait_change(m, c->deadline_ns);
    kvbm_manager_leave(m);
}

/* Return how many keys, from the first that the host tier still has to keep on, are to be tried
 * now: those tried before, and as many more as may be promised. */
static uint32_t window(const struct call *c)
{
    uint64_t more = (uint64_t)(c->tried - c->from) + kvbm_promises_room(c->manager);

    return (uint32_t)KV_MIN(KV_MIN((uint64_t)(c->n - c->from), c->manager->host_blocks), more);
}

/* Store the next @n blocks, as far as there is room now. Returns the number of them to try again,
 * or an error. */
static long store_some(struct call *c, const uint32_t *blocks, uint32_t n)
{
    struct kvbm_manager *m = c->manager;
    const struct kvbm_chain chain = rest_of(c, c->from);
    const struct kvbm_pin_keeps keeps = {.n_offered = c->offered - c->from, .durable = c->durable};
    uint32_t first = c->from + n, left;
    struct kvbm_pin *pin;
    long reserved = kvbm_pin_store(m, &chain, n, &keeps, &pin), rc = 0;

    if (reserved < 0)
        return reserved;
    /* it got blocks: the next call in the line is the oldest now */
    if (reserved)
        kvbm_turn_end(m, &c->turn);
    c->offered = KV_MAX(c->offered, c->from + n);
    kvbm_pin_state(pin, c->state + c->from);
    kvbm_pin_blocks(pin, c->host + c->from);
    if (reserved)
        rc = copy(c, pin, blocks + c->from);
    /* without a host tier nothing keeps the bytes but the pin, until a tier below has them */
    if (kvbm_staging(m))
        wait_written(c, pin, n);
    if (rc >= 0 && !pin->keeps)
        rc = -ENOMEM;
    kvbm_pin_release(pin);
    left = count_left(c, n, rc == -EAGAIN /* max_jobs */, &first);
    c->tried = first;
    c->lacks_room = false;
    for (uint32_t i = c->from; i < c->from + n; i++)
        c->lacks_room |= c->state[i] == KVBM_BUSY;
    /* the statistics count a key as dropped once, however often the call tries it */
    if (left && rc != -EAGAIN) { /* try these blocks again */
        kvbm_manager_enter(m);
        for (uint32_t i = c->from; i < c->from + n; i++)
            m->stats.host.dropped -= c->state[i] == KVBM_BUSY;
        kvbm_manager_leave(m);
    }
    return rc < 0 && rc != -EAGAIN ? rc : left;
}

static const uint8_t *key_of(const struct call *c, uint32_t i)
{
    return (const uint8_t *)c->chain.keys + (size_t)i * c->manager->key_len;
}

/* Pass the keys that were tried and that no later one may evict: they are promised, or a tier below
 * has them, or the host tier lacks them. Returns true when it has passed any. */
static bool pass_some(struct call *c)
{
    const struct kvbm_manager *m = c->manager;
    uint32_t before = c->from;

    while (c->from < c->tried && (kvbm_promise_awaits(m, c->chain.group, key_of(c, c->from)) ||
                                  !kvbm_offload_awaits(m, c->chain.group, key_of(c, c->from))))
        c->from++;
    return c->from > before;
}

/* Wait until further keys may be tried. Returns -ETIMEDOUT also when none will, as nothing is
 * queued for the tiers below. */
static int wait_for_tiers_below(struct call *c)
{
    struct kvbm_manager *m = c->manager;
    int rc = 0;

    kvbm_turn_end(m, &c->turn);
    kvbm_manager_enter(m);
    m->n_waiters++;
    while (rc == 0 && !m->stopping && !pass_some(c) && window(c) <= c->tried - c->from) {
        /* room comes from moves and from other stores' claims: without either, none will come */
        if (kvbm_offload_idle(m) && !m->promises.claimed)
            rc = -ETIMEDOUT;
        else
            rc = kvbm_manager_wait_change(m, c->deadline_ns);
    }
    rc = m->stopping ? -ESHUTDOWN : rc;
    kvbm_waiter_leaves(m);
    return rc;
}

/* Store all blocks, a part of them at a time. Returns 0 or an error, also when the time is over. */
static long store_all(struct call *c, const uint32_t *blocks)
{
    struct kvbm_manager *m = c->manager;
    long rc = 0;

    if (kept(c, 0, c->n, KEPT) < c->n)
        rc = kvbm_turn_give_way(m, &c->turn, c->chain.group, c->chain.keys, c->deadline_ns);
    while (rc == 0) {
        uint32_t more = 0, n;
        long left;

        kvbm_manager_enter(m);
        (void)pass_some(c);
        n = window(c);
        /* claimed before the keys are stored: two stores mustn't promise the same room */
        if (n > c->tried - c->from)
            more = kvbm_promises_claim(m, n - (c->tried - c->from));
        kvbm_manager_leave(m);
        if (n <= c->tried - c->from) {
            rc = wait_for_tiers_below(c);
            continue;
        }
        left = store_some(c, blocks, n);
        kvbm_promises_unclaim(m, more);
        if (left < 0 || (left == 0 && c->tried == c->n))
            return left;
        if (!left)
            continue;
        if (!kvbm_ms_until(c->deadline_ns))
            return -ETIMEDOUT;
        rc = c->lacks_room ? kvbm_turn_wait(m, &c->turn, c->deadline_ns)
                           : kvbm_turn_wait_aside(m, &c->turn, c->deadline_ns);
    }
    return rc;
}

/* Wait until a tier below has the keys that were tried, or none will. */
static int wait_durable(struct call *c)
{
    struct kvbm_manager *m = c->manager;
    int rc = 0;

    kvbm_turn_end(m, &c->turn);
    kvbm_manager_enter(m);
    m->n_waiters++;
    for (uint32_t i = 0; rc == 0 && !m->stopping && i < c->tried;) {
        if (kvbm_promise_awaits(m, c->chain.group, key_of(c, i)))
            rc = kvbm_manager_wait_change(m, c->deadline_ns);
        else
            i++;
    }
    rc = m->stopping ? -ESHUTDOWN : 0;
    kvbm_waiter_leaves(m);
    return rc;
}

/* Number of keys, from the first on, that the call reports. Keys that weren't tried may be in the
 * host tier for a moment: these count if they are promised. */
static long report(const struct call *c)
{
    bool below = c->durable || kvbm_staging(c->manager);
    uint32_t n = below ? c->n : c->tried, done = kept(c, 0, n, below ? BELOW : KEPT);

    if (below || done < n)
        return done;
    kvbm_manager_enter(c->manager);
    while (done < c->n && (kvbm_promise_awaits(c->manager, c->chain.group, key_of(c, done)) ||
                           kept(c, done, 1, BELOW)))
        done++;
    kvbm_manager_leave(c->manager);
    return done;
}

/* Store the blocks, and count those that the caller may rely on. The time's end isn't an error. */
static long store(struct call *c, const uint32_t *blocks)
{
    long rc = c->n ? store_all(c, blocks) : 0;

    if (c->durable && (rc == 0 || rc == -ETIMEDOUT))
        rc = wait_durable(c);
    if (rc < 0 && rc != -ETIMEDOUT)
        return rc;
    return report(c);
}

long kvbm_cache_store_with(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                           const uint32_t *blocks, const struct kvbm_store_opts *opts)
{
    uint32_t timeout_ms = KV_OPT(opts, timeout_ms, 0);
    struct call c;
    long rc = call_init(&c, cache, chain, n, blocks, false, timeout_ms);

    c.durable = KV_OPT(opts, durable, false);
    if (rc == 0 && !kv_sized_or_null(opts, "kvbm_store_opts"))
        rc = -EINVAL;
    if (rc == 0 && (cache->partial || (c.durable && !c.manager->disk && !c.manager->object)))
        rc = -ENOTSUP;
    if (rc == 0)
        rc = store(&c, blocks);
    call_fini(&c);
    return rc;
}

long kvbm_cache_store(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                      const uint32_t *blocks, uint32_t timeout_ms)
{
    const struct kvbm_store_opts opts = {.size = sizeof(opts), .timeout_ms = timeout_ms};

    return kvbm_cache_store_with(cache, chain, n, blocks, &opts);
}

/* ---- load ---- */

/* Take blocks that a pin left out from the count of dropped ones: the call asks for them again. */
static void uncount(struct kvbm_manager *m, struct kvbm_pin *pin)
{
    kvbm_manager_enter(m);
    m->stats.host.dropped -= pin->n_dropped;
    pin->n_dropped = 0;
    kvbm_manager_leave(m);
}

/* Count the keys, of @n that were tried, before the first one that the call's pin held. */
static uint32_t lead_of(const struct call *c, uint32_t n)
{
    uint32_t i = 0;

    while (i < n && c->state[i] != KVBM_READY)
        i++;
    return i;
}

/* Load @n keys from @from on, as many blocks as the host tier has room for. Returns how many have
 * arrived, -EBUSY when there was no room for the first one, or for one job more. */
static long load_some(struct call *c, uint32_t from, uint32_t n, const uint32_t *blocks)
{
    const struct kvbm_chain chain = rest_of(c, from);
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .no_fetch = c->at_once};
    uint32_t done = 0;
    uint64_t now = kv_now_ns();
    struct kvbm_pin *pin;
    long rc, ready;

    /* fetches get three quarters of what is left: blocks that come by then can still be copied */
    opts.deadline_ns = now + (c->deadline_ns - KV_MIN(now, c->deadline_ns)) / 4 * 3;
    rc = kvbm_manager_prepare_load(c->manager, &chain, n, &opts, &pin);
    if (rc < 0)
        return rc;
    if (rc > 0) { /* else nothing that comes is of use */
        kvbm_turn_end(c->manager, &c->turn);
        kvbm_pin_wait(pin, (uint32_t)kv_ms_until(opts.deadline_ns, now));
    }
    ready = kvbm_pin_state(pin, c->state);
    uncount(c->manager, pin);
    if (ready > 0) {
        for (uint32_t i = 0; i < n; i++)
            c->host[i] = i < ready ? blocks[from + i] : UINT32_MAX;
        memset(c->ok, 0, c->n / 8 + 1);
        rc = copy(c, pin, c->host);
        while (rc == 0 && done < ready && c->ok[done / 8] >> (done % 8) & 1)
            done++;
    }
    kvbm_pin_release(pin);
    c->lead = n;
    if (rc >= 0 && ready == 0 && c->state[0] == KVBM_BUSY) {
        c->lead = lead_of(c, n);
        rc = -EAGAIN;
    }
    return rc == -EAGAIN ? -EBUSY : rc < 0 ? rc : done;
}

/* Load from key @from on. When the call's own pin had the host blocks that the first keys need, load
 * these alone: their blocks evict those behind them, of which a prompt has no use without them. */
static long load_first(struct call *c, uint32_t from, const uint32_t *blocks)
{
    uint32_t n = c->n - from;
    long rc = load_some(c, from, n, blocks);

    return rc == -EBUSY && c->lead < n ? load_some(c, from, c->lead, blocks) : rc;
}

/* Load from key @from on as soon as there is room. Returns how many blocks have arrived, 0 also
 * when the time ended before. */
static long load_when_room(struct call *c, uint32_t from, const uint32_t *blocks)
{
    const uint8_t *keys = c->chain.keys;
    long rc = kvbm_turn_give_way(c->manager, &c->turn, c->chain.group,
                                 keys + (size_t)from * c->manager->key_len, c->deadline_ns);

    if (rc == 0)
        rc = load_first(c, from, blocks);
    while (rc == -EBUSY && kvbm_ms_until(c->deadline_ns)) {
        rc = kvbm_turn_wait(c->manager, &c->turn, c->deadline_ns);
        if (rc == 0)
            rc = load_first(c, from, blocks);
    }
    return rc == -EBUSY ? 0 : rc;
}

long kvbm_cache_load(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                     const uint32_t *blocks, uint32_t timeout_ms)
{
    struct call c;
    long rc = call_init(&c, cache, chain, n, blocks, true, timeout_ms), some = 1;
    uint32_t done = 0;

    while (rc == 0 && some > 0 && done < c.n) {
        some = load_when_room(&c, done, blocks);
        done += some > 0 ? (uint32_t)some : 0;
    }
    call_fini(&c);
    return rc < 0 ? rc : some < 0 && !done ? some : (long)done;
}
