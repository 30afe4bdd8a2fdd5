// SPDX-License-Identifier: Apache-2.0
/*
 * Load blocks into a cache's pool: a prompt's prefix by hashes, or the blocks of handles.
 *
 *   match in the pool ─► pin for the rest ─► wait for its fetches ─► targets ─► copy ─► register
 *
 * Blocks that the pool has are held; the rest is loaded and registered there. The targets are
 * allocated after the wait: a slow store mustn't keep the cache's blocks from others.
 */
#include <errno.h>
#include <stdlib.h>

#include "bm/deadline.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

struct onboard {
    struct kvbm_cache *cache;
    struct kvbm_pin *pin;
    uint64_t deadline_ns;
    /* deadline of fetches from lower tiers; the rest of the time is for the copy */
    uint64_t fetched_ns;
    bool
        at_once; /* a timeout of 0: take the blocks of the host tier, and wait for the copy alone */
    struct kvbm_mutable *targets;
    uint32_t n_targets;
    uint8_t *state;   /* [n of the pin] */
    uint32_t *blocks; /* [n of the pin] */
    uint32_t *target; /* [n of the pin], packed: items with a block */
    uint8_t *ok;
};

/* Begin to onboard. Fetches get three quarters of the time, so that blocks fetched by then can
 * still be copied. */
static struct onboard begin(struct kvbm_cache *cache, uint32_t timeout_ms)
{
    uint64_t now = kv_now_ns(), all = timeout_ms * KV_NS_PER_MS;

    return (struct onboard){.cache = cache,
                            .deadline_ns = now + all,
                            .fetched_ns = now + all / 4 * 3,
                            .at_once = !timeout_ms};
}

/* Give back what an onboard still holds: targets that weren't registered, and the pin. */
static void fini(struct onboard *o)
{
    if (o->targets)
        kvbm_pool_release_mutable(o->cache->pool, o->targets, o->n_targets); /* holes are allowed */
    kvbm_pin_release(o->pin);
    free(o->targets);
    free(o->state);
    free(o->blocks);
    free(o->target);
    free(o->ok);
}

/* Return the error that explains why no block of the pin has arrived. */
static int why_none(const struct onboard *o)
{
    /* Past this time don't wait for fetches of other pins: treat their blocks as missing. */
    if (!kvbm_ms_until(o->fetched_ns))
        return -ETIMEDOUT;
    for (uint32_t i = 0; i < o->pin->n; i++) {
        if (o->state[i] == KVBM_BUSY)
            return -EBUSY;
    }
    return -ENOENT;
}

/* Return the error that explains why the first block of the pin hasn't arrived; 0: no tier has it.
 * @comes: a tier had it when the pin was made, or another pin was bringing it. */
static long why_not_first(const struct onboard *o, bool comes)
{
    if (o->state[0] == KVBM_BUSY)
        return -EBUSY;
    return comes && !kvbm_ms_until(o->fetched_ns) ? -ETIMEDOUT : 0;
}

/* Wait for the pin's blocks, if @comes. Returns the length of the prefix that has arrived; state
 * says where each block is. */
static long settle(struct onboard *o, bool comes)
{
    uint32_t n = o->pin ? o->pin->n : 0;

    if (!n)
        return -ENOENT;
    o->state = malloc(n);
    o->blocks = malloc(n * sizeof(*o->blocks));
    o->target = calloc(n, sizeof(*o->target));
    o->ok = calloc((n + 7) / 8, 1);
    if (!o->state || !o->blocks || !o->target || !o->ok)
        return -ENOMEM;
    /* else nothing that comes is of use: the first key is missing */
    if (comes)
        kvbm_pin_wait(o->pin, kvbm_ms_until(o->fetched_ns));
    return kvbm_pin_state(o->pin, o->state);
}

/* Allocate a target for each READY block among the first @n, as far as there is room. */
static int take_targets(struct onboard *o, uint32_t n)
{
    uint32_t wanted = 0, given = 0;

    for (uint32_t i = 0; i < n; i++)
        wanted += o->state[i] == KVBM_READY;
    if (!wanted)
        return why_none(o);
    o->targets = calloc(wanted, sizeof(*o->targets));
    if (!o->targets)
        return -ENOMEM;
    o->n_targets = kvbm_take_blocks(o->cache->pool, o->targets, wanted);
    if (!o->n_targets)
        return -ENOSPC;
    for (uint32_t i = 0; i < o->pin->n; i++) {
        o->blocks[i] = UINT32_MAX;
        if (i >= n || o->state[i] != KVBM_READY || given == o->n_targets)
            continue;
        o->target[i] = given;
        o->blocks[i] = o->targets[given++].handle.block;
    }
    return 0;
}

/* True when the block of item @i had a target, and has been copied into it. */
static bool arrived(const struct onboard *o, uint32_t i)
{
    return o->blocks[i] != UINT32_MAX && o->ok[i / 8] >> (i % 8) & 1;
}

/* Copy the blocks and wait for the copy. No transfer writes into the targets on return. Returns
 * -ETIMEDOUT when the time ended before any block had arrived. */
static int load(struct onboard *o)
{
    const struct kvbm_job job = {.size = sizeof(job),
                                 .pin = o->pin,
                                 .cache = o->cache,
                                 .blocks = o->blocks,
                                 .deadline_ns = o->at_once ? 0 : o->deadline_ns,
                                 .ok = o->ok};
    int rc = kvbm_job_run(o->cache->manager, &job);

    if (rc < 0 || o->at_once || kvbm_ms_until(o->deadline_ns))
        return rc;
    for (uint32_t i = 0; i < o->pin->n; i++) {
        if (arrived(o, i))
            return rc;
    }
    return -ETIMEDOUT;
}

/* Register the target of item @i, which has arrived. */
static int register_one(struct onboard *o, uint32_t i, struct kvbm_immutable *ret)
{
    const struct kvbm_item *item = &o->pin->items[i];
    struct kvbm_mutable *target = &o->targets[o->target[i]];
    struct kvbm_chain chain = kvbm_pin_chain(o->pin, i);
    struct kvbm_complete complete;
    int rc;

    if (o->pin->likes)
        return kvbm_pool_adopt(o->cache->pool, target, 1, &o->pin->likes[i], ret);
    /* held in the host tier: its key, parent and position are known there */
    if (item->state == ITEM_HELD)
        return kvbm_pool_adopt_tokens(o->cache->pool, target,
                                      (const struct kvbm_immutable *)&item->host,
                                      kvbm_pin_tokens(o->pin, i), ret);
    rc = kvbm_pool_complete(o->cache->pool, target, 1, &chain, &complete);
    return rc < 0 ? rc : kvbm_pool_register(o->cache->pool, &complete, 1, ret);
}

/* ---- by hashes ---- */

/* Bring the first blocks of a chain that the pool lacks. Returns how many are held in @ret now. */
static long bring(struct onboard *o, const struct kvbm_chain *chain, size_t n,
                  struct kvbm_immutable *ret)
{
    struct kvbm_manager *m = o->cache->manager;
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = o->fetched_ns};
    long rc = kvbm_manager_prepare_load(m, chain, n, &opts, &o->pin), ready;
    uint32_t done = 0;

    if (rc < 0)
        return rc;
    ready = settle(o, rc > 0);
    if (ready <= 0)
        return ready < 0 ? ready : why_not_first(o, rc > 0);
    rc = take_targets(o, (uint32_t)ready);
    if (rc == 0)
        rc = load(o);
    if (rc < 0)
        return rc;
    while (done < (uint32_t)ready && arrived(o, done) && register_one(o, done, &ret[done]) == 0)
        done++;
    return done;
}

long kvbm_manager_onboard(struct kvbm_cache *cache, const struct kvbm_chain *chain, size_t n,
                          uint32_t timeout_ms, struct kvbm_immutable *ret)
{
    struct onboard o = begin(cache, timeout_ms);
    long found = cache ? kvbm_manager_usable(cache->manager) : -EINVAL, more = 0;
    struct kvbm_chain rest;

    if (found < 0)
        return found;
    if (!cache->pool || !kv_sized(chain, "kvbm_chain") ||
        chain->size < offsetof(struct kvbm_chain, tokens) || (n && (!chain->keys || !ret)))
        return -EINVAL;
    found = kvbm_pool_match(cache->pool, chain->group, chain->keys, n, 0, ret);
    if (found < 0 || (size_t)found == n)
        return found;
    rest = (struct kvbm_chain){.size = sizeof(rest),
                               .group = chain->group,
                               .keys = (const uint8_t *)chain->keys +
                                       (size_t)found * cache->manager->key_len,
                               .parent = chain->parent,
                               .position = chain->position + (uint32_t)found,
                               .tokens = KV_OPT(chain, tokens, NULL)};
    if (rest.tokens)
        rest.tokens += (size_t)found * cache->manager->block_tokens;
    if (kvbm_chain_scattered(chain)) {
        rest.scattered = true;
        rest.position = chain->position;
    } else if (found) {
        rest.parent = (const uint8_t *)rest.keys - cache->manager->key_len;
    }
    more = bring(&o, &rest, n - (size_t)found, ret + found);
    fini(&o);
    return found || more > 0 ? found + KV_MAX(more, 0L) : more;
}

/* ---- by handles ---- */

/* The caller's blocks, with handles of our own, and their keys. */
struct given {
    struct kvbm_immutable *likes; /* [n] */
    uint8_t *keys;
    uint32_t group;
};

static void given_fini(struct given *given, size_t n)
{
    for (size_t i = n; given->likes && i-- > 0;)
        kvbm_immutable_release(&given->likes[i]);
    free(given->likes);
    free(given->keys);
}

/* True for pools whose handles a call takes: the manager's own, and @also. */
static bool is_ours(const struct kvbm_manager *m, const struct kvbm_pool *pool,
                    const struct kvbm_pool *also)
{
    return pool == m->host || pool == m->disk || pool == m->object || pool == also;
}

/* Take handle @i of the caller's: a handle of our own keeps the block until the call's end. */
static int given_take(const struct kvbm_manager *m, struct given *given, size_t i,
                      const struct kvbm_immutable *block, const struct kvbm_pool *also)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    int rc = !block->handle.pool ? -EINVAL
             : !is_ours(m, block->handle.pool, also)
                 ? -EXDEV
                 : kvbm_immutable_clone(block, &given->likes[i]);

    if (rc < 0)
        return rc;
    kvbm_immutable_info(&given->likes[i], &info);
    if (i == 0)
        given->group = info.group;
    memcpy(given->keys + i * m->key_len, info.key, m->key_len);
    return info.group == given->group ? 0 : -EINVAL;
}

/* Collect the caller's handles. @also: another pool that the handles may be of. Call given_fini
 * afterwards, also after a failure. */
static int given_init(const struct kvbm_manager *m, struct given *given,
                      const struct kvbm_immutable *blocks, size_t n, const struct kvbm_pool *also)
{
    int rc = (n && !blocks) || n > KVBM_MAX_PIN ? -EINVAL : 0;

    if (rc < 0)
        return rc;
    given->likes = calloc(n + 1, sizeof(*given->likes));
    given->keys = malloc((n + 1) * m->key_len);
    if (!given->likes || !given->keys)
        return -ENOMEM;
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = given_take(m, given, i, &blocks[i], also);
    return rc;
}

long kvbm_manager_prepare_load_blocks(struct kvbm_manager *m, const struct kvbm_immutable *blocks,
                                      size_t n, const struct kvbm_pin_opts *opts,
                                      struct kvbm_pin **ret)
{
    long rc = ret && kv_sized_or_null(opts, "kvbm_pin_opts") ? kvbm_manager_usable(m) : -EINVAL;
    struct given given = {0};
    struct kvbm_chain chain;
    struct kvbm_pin *pin;

    if (rc == 0)
        rc = kvbm_deadline_check(KV_OPT(opts, deadline_ns, 0));
    if (rc < 0)
        return rc;
    rc = given_init(m, &given, blocks, n, m->host);
    chain = (struct kvbm_chain){.size = sizeof(chain), .group = given.group, .keys = given.keys};
    kvbm_manager_enter(m);
    if (rc == 0)
        rc = m->stopping ? -ESHUTDOWN : kvbm_pin_new(m, &chain, n, false, &pin);
    if (rc == 0) {
        pin->likes = given.likes; /* parents and positions come from these blocks */
        given.likes = NULL;
        rc = kvbm_pin_load(pin, opts);
        *ret = pin;
    }
    kvbm_manager_leave(m);
    given_fini(&given, n);
    return rc;
}

/* List the blocks of @given that the cache lacks, packed; @index holds their indices. Returns their
 * number. */
static uint32_t still_to_come(const struct given *given, const struct kvbm_immutable *ret, size_t n,
                              struct kvbm_immutable *blocks, uint32_t *index)
{
    uint32_t rest = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (ret[i].handle.pool)
            continue;
        blocks[rest] = given->likes[i];
        index[rest++] = i;
    }
    return rest;
}

/* Bring the blocks that the cache lacks. They are of no sequence: each arrives or fails
 * by itself. */
static long bring_blocks(struct onboard *o, const struct kvbm_immutable *blocks, uint32_t n,
                         const uint32_t *index, struct kvbm_immutable *ret)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = o->fetched_ns};
    long rc = kvbm_manager_prepare_load_blocks(o->cache->manager, blocks, n, &opts, &o->pin);
    long done = 0;
    int failed = -ENOENT;

    if (rc >= 0)
        rc = settle(o, true);
    if (rc >= 0)
        rc = take_targets(o, n);
    if (rc >= 0)
        rc = load(o);
    for (uint32_t i = 0; rc >= 0 && i < n; i++) {
        int one = arrived(o, i) ? register_one(o, i, &ret[index[i]]) : failed;

        failed = one < 0 ? one : failed;
        done += one == 0;
    }
    return rc < 0 ? rc : done ? done : failed;
}

long kvbm_manager_onboard_blocks(struct kvbm_cache *cache, const struct kvbm_immutable *blocks,
                                 size_t n, uint32_t timeout_ms, struct kvbm_immutable *ret)
{
    struct onboard o = begin(cache, timeout_ms);
    long found = cache ? kvbm_manager_usable(cache->manager) : -EINVAL, more = 0;
    struct kvbm_immutable *rest = NULL;
    struct given given = {0};
    uint32_t *index = NULL, n_rest;

    if (found < 0)
        return found;
    if (!cache->pool || (n && (!blocks || !ret)))
        return -EINVAL;
    found = given_init(cache->manager, &given, blocks, n, cache->pool);
    if (found == 0 && n) {
        rest = malloc(n * sizeof(*rest));
        index = malloc(n * sizeof(*index));
        found = rest && index
                    ? kvbm_pool_match_scattered(cache->pool, given.group, given.keys, n, 0, ret)
                    : -ENOMEM;
    }
    if (found >= 0 && (size_t)found < n) {
        n_rest = still_to_come(&given, ret, n, rest, index);
        more = bring_blocks(&o, rest, n_rest, index, ret);
        fini(&o);
    }
    given_fini(&given, n);
    free(rest);
    free(index);
    return found || more > 0 ? found + KV_MAX(more, 0L) : more;
}
