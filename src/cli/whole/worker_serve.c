// SPDX-License-Identifier: Apache-2.0
/* A request's walk: G1, the tiers below and other workers, then computation, then decode steps. */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/replay/random.h"
#include "cli/whole/worker.h"

#define ONBOARD_MS 5000

static struct kvbm_chain chain_of(const struct kc_worker *w, uint32_t group, uint32_t first)
{
    return (struct kvbm_chain){.size = sizeof(struct kvbm_chain),
                               .group = group,
                               .keys = w->keys + first,
                               .parent = first ? w->keys + first - 1 : NULL,
                               .position = first,
                               .tokens = w->tokens + (size_t)first * w->plan->shape.page_size};
}

static uint64_t peer_hits(const struct kc_worker *w)
{
    struct kvbm_manager_stats stats = KVBM_MANAGER_STATS_INIT;

    kvbm_manager_get_stats(w->manager, &stats);
    return stats.peer.hits;
}

/* Tell from which tier each loaded block came: the nearest that had it when the request began. */
static void count_sources(struct kc_worker *w, uint32_t have, uint32_t loaded, const uint8_t *tiers,
                          uint64_t from_peers)
{
    uint32_t *from = w->done.from, elsewhere = 0;

    from[KC_FROM_G1] = have;
    for (uint32_t i = have; i < have + loaded; i++) {
        if (tiers[i] & 1u << KV_TIER_HOST)
            from[KC_FROM_G2]++;
        else if (tiers[i] & 1u << KV_TIER_DISK)
            from[KC_FROM_G3]++;
        else
            elsewhere++;
    }
    from[KC_FROM_PEER] = (uint32_t)KV_MIN(from_peers, (uint64_t)elsewhere);
    from[KC_FROM_G4] = elsewhere - from[KC_FROM_PEER];
    from[KC_FROM_NOWHERE] = w->done.n - have - loaded;
}

/* Change a byte of a block in the host tier, of which the request asks: no checksum guards memory. */
static void flip_host(struct kc_worker *w, uint32_t have)
{
    struct kvbm_pool *host = kvbm_manager_pool(w->manager, KV_TIER_HOST);
    struct kvbm_immutable held = {0};
    struct kvbm_view view;

    if (w->flipped || kvbm_pool_match(host, 0, w->keys + have, 1, 0, &held) != 1)
        return;
    if (kvbm_layout_region(kvbm_manager_host_layout(w->manager), held.handle.block, 0, 0, &view) ==
        0) {
        *(char *)(uintptr_t)view.addr ^= 1; // NOLINT(performance-no-int-to-ptr)
        w->flipped = true;
    }
    kvbm_immutable_release(&held);
}

/* Release the blocks of a group from @to on. */
static void let_go(struct kc_worker *w, uint32_t group, uint32_t to)
{
    uint32_t from = KV_MAX(to, w->first[group]);

    if (w->held[group] > from)
        kvbm_pool_release(w->pool, w->blocks[group] + from, w->held[group] - from);
    w->held[group] = KV_MIN(w->held[group], from);
}

/* Hold blocks [@first, @end) of a group as far as G1, the tiers below and other workers have them.
 * Returns how many of them G1 had. */
static uint32_t hold(struct kc_worker *w, uint32_t group, uint32_t first, uint32_t end)
{
    struct kvbm_immutable *to = w->blocks[group] + first;
    long have = kvbm_pool_match(w->pool, group, w->keys + first, end - first, 0, to), loaded = 0;
    struct kvbm_chain chain;

    have = KV_MAX(have, 0l);
    chain = chain_of(w, group, first + (uint32_t)have);
    if (group == 0 && w->plan->flip == KC_FLIP_HOST && first + have < end)
        flip_host(w, first + (uint32_t)have);
    if (first + have < end)
        loaded = kvbm_manager_onboard(w->cache, &chain, end - first - (uint32_t)have, ONBOARD_MS,
                                      to + have);
    w->first[group] = first;
    w->held[group] = first + (uint32_t)(have + KV_MAX(loaded, 0l));
    return (uint32_t)have;
}

/*
 * Hold the window of a hit of @end blocks. Where a block of it is nowhere, the hit ends before that
 * block, and has another window. Returns the end.
 */
static uint32_t hold_window(struct kc_worker *w, uint32_t end)
{
    while (end > 0) {
        (void)hold(w, 1, kc_shape_first(&w->plan->shape, 1, end), end);
        if (w->held[1] == end)
            return end;
        end = w->held[1];
        let_go(w, 1, 0);
    }
    w->first[1] = w->held[1] = 0;
    return 0;
}

/* Hold the longest prefix that all groups have what they need of. Returns its length. */
static uint32_t load(struct kc_worker *w)
{
    uint32_t n = w->done.n, have, end;
    uint64_t began = kv_now_ns(), peers = peer_hits(w);
    uint8_t tiers[KC_PLAN_BLOCKS] = {0};

    w->first[1] = w->held[1] = 0;
    kvbm_registry_locate(kvbm_manager_registry(w->manager), 0, w->keys, n, tiers);
    have = hold(w, 0, 0, n);
    peers = peer_hits(w) - peers;
    end = w->plan->shape.window ? hold_window(w, w->held[0]) : w->held[0];
    let_go(w, 0, end);
    have = KV_MIN(have, end);
    count_sources(w, have, end - have, tiers, peers);
    w->done.onboard_ns = kv_now_ns() - began;
    w->done.phase_ns[KC_PHASE_ONBOARD] += w->done.onboard_ns;
    return end;
}

/* Compute a group's blocks [have, n): write their K and V, register them, offer them to the tiers below. */
static int compute(struct kc_worker *w, uint32_t group, uint32_t have)
{
    uint32_t n = w->done.n;
    struct kvbm_chain chain = chain_of(w, group, have);
    struct kvbm_immutable *blocks = w->blocks[group] + have;
    int rc = kvbm_pool_allocate(w->pool, n - have, w->fresh + have, NULL);

    if (rc < 0)
        return rc;
    rc = kc_rows_write(w, group, have, n);
    if (rc == 0)
        rc = kvbm_pool_register_chain(w->pool, w->fresh + have, n - have, &chain, blocks);
    if (rc < 0) {
        kvbm_pool_release_mutable(w->pool, w->fresh + have, n - have);
        return rc;
    }
    w->held[group] = n;
    if (group == 0)
        w->done.registered_ns = kv_now_ns();
    kvbm_manager_offload(w->cache, blocks, n - have, 0);
    return 0;
}

/* Decode: each step writes one token behind the prompt and attends to what its layers see before it. */
static int decode(struct kc_worker *w, uint32_t group)
{
    struct kvbm_mutable tail = {0};
    uint64_t key = kc_mix(w->keys[w->done.n - 1] ^ KC_GOLDEN);
    int rc = 0;

    if (w->plan->steps == 0)
        return kc_rows_compare(w, group, w->done.n, 0, 0, 0);
    rc = kvbm_pool_allocate(w->pool, 1, &tail, NULL);
    for (uint32_t step = 0; step < w->plan->steps && rc == 0; step++) {
        uint32_t at = step % w->plan->shape.page_size;

        rc = kc_rows_write_token(w, group, tail.handle.block, key, at);
        if (rc == 0)
            rc = kc_rows_compare(w, group, w->done.n, tail.handle.block, key,
                                 KV_MIN(step + 1, w->plan->shape.page_size));
    }
    kvbm_mutable_release(&tail);
    return rc;
}

static void count_tier(const struct kvbm_tier_stats *tier, uint64_t *bad, uint64_t *dropped)
{
    *bad = tier->bad;
    if (dropped)
        *dropped = tier->dropped;
}

static void read_counters(struct kc_worker *w)
{
    struct kc_done_message *d = &w->done;
    struct kvbm_manager_stats s = KVBM_MANAGER_STATS_INIT;
    struct kvbm_pool_stats g1 = KVBM_POOL_STATS_INIT;
    struct kvbm_events_stats events = KVBM_EVENTS_STATS_INIT;
    struct rusage usage;

    kvbm_manager_get_stats(w->manager, &s);
    kvbm_pool_get_stats(w->pool, &g1);
    kvbm_events_get_stats(w->events, &events);
    getrusage(RUSAGE_SELF, &usage);
    d->path_bytes[KC_PATH_G1_G2] = s.cache.bytes_out;
    d->path_bytes[KC_PATH_G2_G1] = s.cache.bytes_in;
    d->path_bytes[KC_PATH_TO_G3] = s.disk.bytes_in;
    d->path_bytes[KC_PATH_FROM_G3] = s.disk.bytes_out;
    d->path_bytes[KC_PATH_TO_G4] = s.object.bytes_in;
    d->path_bytes[KC_PATH_FROM_G4] = s.object.bytes_out;
    d->path_bytes[KC_PATH_FROM_PEER] = s.peer.bytes_out;
    count_tier(&s.disk, &d->bad[0], &d->dropped[1]);
    count_tier(&s.object, &d->bad[1], &d->dropped[2]);
    count_tier(&s.peer, &d->bad[2], NULL);
    d->dropped[0] = s.host.dropped;
    d->used[0] = g1.inflight_immutable + g1.inactive_pool_size;
    d->used[1] = s.host.used;
    d->used[2] = s.disk.used;
    d->used[3] = s.object.used;
    d->events_dropped = events.dropped;
    d->cpu_ns = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * KV_NS_PER_S +
                (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000;
}

/* Zero what is of one request; what counts since the start stays. */
static void begin(struct kc_worker *w, const struct kc_request_message *request)
{
    struct kc_done_message *d = &w->done;
    uint32_t page = w->plan->shape.page_size, n;

    d->number = request->number;
    d->status = 0;
    memset(d->from, 0, sizeof(d->from));
    d->rows_wrong = d->bytes_checked = d->registered_ns = d->onboard_ns = 0;
    d->wrong[0] = '\0';
    n = kc_plan_tokens(w->plan, request->ids, request->n, request->pass, w->tokens);
    d->n = (uint32_t)kvbm_hash_tokens(w->tokens, n, page, 0, KVBM_CHAIN_SEED_ZERO, NULL, NULL,
                                      w->keys);
}

static uint64_t sum_of_phases(const struct kc_worker *w)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < KC_PHASE_REST; i++)
        sum += w->done.phase_ns[i];
    return sum;
}

/* Do what follows the load, in each group. */
static int serve(struct kc_worker *w, uint32_t have, uint64_t number)
{
    uint32_t n_groups = kc_shape_groups(&w->plan->shape);
    int rc = 0;

    kc_stage_enter(w->stage, KC_STAGE_COMPARE, number);
    for (uint32_t g = 0; g < n_groups && rc == 0 && have > 0; g++)
        rc = kc_rows_compare(w, g, have, 0, 0, 0);
    kc_stage_enter(w->stage, KC_STAGE_COMPUTE, number);
    for (uint32_t g = 0; g < n_groups && rc == 0 && have < w->done.n; g++)
        rc = compute(w, g, have);
    kc_stage_enter(w->stage, KC_STAGE_DECODE, number);
    for (uint32_t g = 0; g < n_groups && rc == 0; g++)
        rc = decode(w, g);
    return rc;
}

void kc_worker_serve(struct kc_worker *w, const struct kc_request_message *request)
{
    uint64_t began = kv_now_ns(), measured = sum_of_phases(w);

    begin(w, request);
    kc_stage_enter(w->stage, KC_STAGE_LOAD, request->number);
    w->done.status = serve(w, load(w), request->number);
    kc_stage_enter(w->stage, KC_STAGE_RELEASE, request->number);
    let_go(w, 1, 0);
    let_go(w, 0, 0);
    read_counters(w);
    w->done.phase_ns[KC_PHASE_REST] += kv_now_ns() - began - (sum_of_phases(w) - measured);
}
