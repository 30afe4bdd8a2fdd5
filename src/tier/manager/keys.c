// SPDX-License-Identifier: Apache-2.0
/* Blocking calls on keys: prepare, copy, wait and release in one call. A call that finds no room
 * waits for it, whereas prepare_store and prepare_load return at once. */
#include <errno.h>
#include <stdlib.h>

#include "bm/ids.h"
#include "tier/manager/job.h"
#include "tier/manager/manager.h"
#include "tier/manager/offload.h"
#include "tier/manager/pin.h"

#define LOOK 64

struct call {
    struct kvbm_cache *cache;
    struct kvbm_manager *manager;
    struct kvbm_chain chain;
    uint32_t n;
    uint64_t deadline_ns;
    uint8_t *state, *ok;
    uint32_t *host; /* host blocks of the pin */
    struct kvbm_turn turn;
    /* Store: the first key that the host tier still has to keep, or to get; those before @tried have
     * had their turn, those before @offered were offered to the policy. */
    uint32_t from, tried, offered;
    bool lacks_room; /* store: for keys that were tried; others wait for another pin alone */
};

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
                                 .deadline_ns = c->deadline_ns,
                                 .ok = c->ok};

    return kvbm_job_run(c->manager, &job);
}

/* ---- store ---- */

/* Number of keys, of @n from @from on, up to the first one that no tier of the manager has. */
static uint32_t kept(const struct call *c, uint32_t from, uint32_t n)
{
    const uint8_t *keys = (const uint8_t *)c->chain.keys + (size_t)from * c->manager->key_len;
    uint8_t tiers[LOOK];
    uint32_t i = 0;

    for (; i < n; i++) {
        if (i % LOOK == 0)
            kvbm_registry_locate(c->manager->registry, c->chain.group,
                                 keys + (size_t)i * c->manager->key_len,
                                 KV_MIN(n - i, (uint32_t)LOOK), tiers);
        if (!(tiers[i % LOOK] & ~(1u << KV_TIER_DEVICE)))
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
    while (rc == 0 && pin->refs > 1 && kept(c, c->from, n) < n)
        rc = kvbm_manager_wait_change(m, c->deadline_ns);
    kvbm_manager_leave(m);
}

/* Store the next blocks, no more than the host tier has, as far as there is room now. Returns the
 * number of them to try again, or an error. */
static long store_some(struct call *c, const uint32_t *blocks)
{
    struct kvbm_manager *m = c->manager;
    const struct kvbm_chain chain = rest_of(c, c->from);
    uint32_t n = (uint32_t)KV_MIN((uint64_t)(c->n - c->from), m->host_blocks);
    uint32_t first = c->from + n, left;
    struct kvbm_pin *pin;
    long reserved = kvbm_pin_store(m, &chain, n, c->offered - c->from, &pin), rc = 0;

    if (reserved < 0)
        return reserved;
    if (reserved)
        kvbm_turn_end(m, &c->turn);
    c->offered = KV_MAX(c->offered, c->from + n);
    kvbm_pin_state(pin, c->state + c->from);
    kvbm_pin_blocks(pin, c->host + c->from);
    if (reserved)
        rc = copy(c, pin, blocks + c->from);
    if (kvbm_staging(m))
        wait_written(c, pin, n);
    kvbm_pin_release(pin);
    left = count_left(c, n, rc == -EAGAIN /* max_jobs */, &first);
    c->tried = first;
    c->lacks_room = false;
    for (uint32_t i = c->from; i < c->from + n; i++)
        c->lacks_room |= c->state[i] == KVBM_BUSY;
    if (left && rc != -EAGAIN) { /* try these blocks again */
        kvbm_manager_enter(m);
        for (uint32_t i = c->from; i < c->from + n; i++)
            m->stats.host.dropped -= c->state[i] == KVBM_BUSY;
        kvbm_manager_leave(m);
    }
    return rc < 0 && rc != -EAGAIN ? rc : left;
}

/* Pass the keys that were tried and that the host tier need not keep any more: a tier below has
 * them, or the host tier lacks them. Those behind them would evict the others before they are
 * written. Returns true when it has passed any. */
static bool pass_some(struct call *c)
{
    const uint8_t *keys = c->chain.keys;
    uint32_t before = c->from;

    while (c->from < c->tried) {
        if (kvbm_offload_awaits(c->manager, c->chain.group,
                                keys + (size_t)c->from * c->manager->key_len))
            break;
        c->from++;
    }
    return c->from > before;
}

/* Wait until a tier below has more of the keys that were tried. Returns -ETIMEDOUT also when none
 * will, as nothing is queued for them. */
static int wait_for_tiers_below(struct call *c)
{
    struct kvbm_manager *m = c->manager;
    int rc = 0;

    kvbm_turn_end(m, &c->turn);
    kvbm_manager_enter(m);
    m->n_waiters++;
    while (rc == 0 && !m->stopping && !pass_some(c)) {
        if (kvbm_offload_idle(m))
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
    long rc = 0;

    if (kept(c, 0, c->n) < c->n)
        rc =
            kvbm_turn_give_way(c->manager, &c->turn, c->chain.group, c->chain.keys, c->deadline_ns);
    while (rc == 0) {
        long left;

        (void)pass_some(c);
        left = store_some(c, blocks);
        if (left < 0 || (left == 0 && c->tried == c->n))
            return left;
        if (!kvbm_ms_until(c->deadline_ns))
            return -ETIMEDOUT;
        rc = !left           ? wait_for_tiers_below(c)
             : c->lacks_room ? kvbm_turn_wait(c->manager, &c->turn, c->deadline_ns)
                             : kvbm_turn_wait_aside(c->manager, &c->turn, c->deadline_ns);
    }
    return rc;
}

long kvbm_cache_store(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                      const uint32_t *blocks, uint32_t timeout_ms)
{
    struct call c;
    long rc = call_init(&c, cache, chain, n, blocks, false, timeout_ms);

    if (rc == 0 && cache->partial)
        rc = -ENOTSUP;
    if (rc == 0) {
        rc = c.n ? store_all(&c, blocks) : 0;
        if (rc == 0 || rc == -ETIMEDOUT)
            rc = kept(&c, 0, c.n);
    }
    call_fini(&c);
    return rc;
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

/* Load from key @from on, as many blocks as the host tier has room for. Returns how many have
 * arrived, -EBUSY when there was no room for the first one, or for one job more. */
static long load_some(struct call *c, uint32_t from, const uint32_t *blocks)
{
    const struct kvbm_chain chain = rest_of(c, from);
    struct kvbm_pin_opts opts = {.size = sizeof(opts)};
    uint32_t n = c->n - from, done = 0;
    uint64_t now = kv_now_ns();
    struct kvbm_pin *pin;
    long rc, ready;

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
    if (rc == -EAGAIN || (rc >= 0 && ready == 0 && c->state[0] == KVBM_BUSY))
        return -EBUSY;
    return rc < 0 ? rc : done;
}

/* Load from key @from on as soon as there is room. Returns how many blocks have arrived, 0 also when
 * the time ended before. */
static long load_when_room(struct call *c, uint32_t from, const uint32_t *blocks)
{
    const uint8_t *keys = c->chain.keys;
    long rc = kvbm_turn_give_way(c->manager, &c->turn, c->chain.group,
                                 keys + (size_t)from * c->manager->key_len, c->deadline_ns);

    if (rc == 0)
        rc = load_some(c, from, blocks);
    while (rc == -EBUSY && kvbm_ms_until(c->deadline_ns)) {
        rc = kvbm_turn_wait(c->manager, &c->turn, c->deadline_ns);
        if (rc == 0)
            rc = load_some(c, from, blocks);
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
