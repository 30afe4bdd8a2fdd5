// SPDX-License-Identifier: Apache-2.0
/**
 * lend_bench's figure of a manager that loads from a peer's shared memory:
 *
 *   manager   prepare_load and load job of blocks that only the peer has: left where they are
 *             (in_place), and through the host tier. Yardstick: the same of the same blocks, which the
 *             host tier has by then
 */
#ifndef BENCH_LEND_MANAGER_H
#define BENCH_LEND_MANAGER_H

#include "kvbm_manager.h"
#include "lend.h"

#define LEND_MANAGER_BYTES \
    (UINT64_C(512) << 20) /* of each side: an eighth may be leased in place */

struct lend_manager {
    struct lend_bench b;
    struct kvbm_manager *m;
    struct kvbm_cache *cache;
};

static void lend_manager_open(struct lend_manager *l)
{
    const struct kvbm_layout_config block = lend_config_of(&l->b.of);
    struct kvbm_manager_opts opts = {.size = sizeof(opts),
                                     .block = &block,
                                     .fingerprint = "",
                                     .host_bytes = 2 * LEND_MANAGER_BYTES};
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};

    lend_open(&l->b);
    opts.agent = l->b.agent;
    cache.layout = l->b.to;
    lend_must(kvbm_manager_create(&opts, &l->m), "manager");
    lend_must(kvbm_cache_attach(l->m, &cache, &l->cache), "cache");
}

/* Load all blocks, in batches. Returns the time. */
static double lend_manager_load(struct lend_manager *l, bool in_place)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = in_place};
    const struct lend_case *of = &l->b.of;
    uint64_t begin = kv_now_ns();

    for (uint32_t i = 0; i < of->n_blocks; i += of->batch) {
        const struct kvbm_chain chain = {
            .size = sizeof(chain), .keys = l->b.keys + i, .scattered = true};
        struct kvbm_job job = {
            .size = sizeof(job), .cache = l->cache, .blocks = l->b.to_blocks + i};
        struct kvbm_done done;
        int64_t id;

        lend_must(kvbm_manager_prepare_load(l->m, &chain, of->batch, &opts, &job.pin), "prepare");
        id = kvbm_manager_submit(l->m, &job);
        lend_must(id, "submit");
        kvbm_pin_release(job.pin);
        lend_must(kvbm_manager_wait(l->m, (uint64_t)id, 60000, &done), "wait");
        if (done.n_ok != of->batch)
            bench_die("blocks are missing", 0);
    }
    return (double)(kv_now_ns() - begin);
}

static void lend_through_manager(struct lend_case of)
{
    struct lend_manager l = {.b = {.of = of}};
    struct bench_samples place = {.n = 0}, peer = {.n = 0}, host = {.n = 0};
    struct kvbm_manager_stats stats = KVBM_MANAGER_STATS_INIT;
    double bytes;

    l.b.of.n_blocks = (uint32_t)(LEND_MANAGER_BYTES / of.block_bytes);
    bytes = (double)l.b.of.n_blocks * (double)of.block_bytes;
    lend_manager_open(&l);
    (void)lend_manager_load(&l, true); /* maps the pages */
    (void)lend_manager_load(&l, false);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        (void)kvbm_pool_reset_inactive(kvbm_manager_pool(l.m, KV_TIER_HOST));
        bench_sample(&place, bytes / lend_manager_load(&l, true));
        bench_sample(&peer, bytes / lend_manager_load(&l, false));
        bench_sample(&host, bytes / lend_manager_load(&l, false));
    }
    lend_must(kvbm_manager_get_stats(l.m, &stats), "stats");
    if (stats.peer.blocks_out != 2 * (LEND_ROUNDS + 1) * (uint64_t)l.b.of.n_blocks ||
        stats.host.blocks_in != (LEND_ROUNDS + 1) * (uint64_t)l.b.of.n_blocks)
        bench_die("blocks came from elsewhere", 0);
    bench_line("peer_manager",
               "'case':'%s','in_place_gbs':%.2f,'gbs':%.2f,'host_gbs':%.2f,'in_place_ratio':%.2f,"
               "'ratio':%.2f",
               of.name, bench_middle(&place), bench_middle(&peer), bench_middle(&host),
               bench_middle(&place) / bench_middle(&host),
               bench_middle(&peer) / bench_middle(&host));
    lend_must(kvbm_cache_detach(l.cache), "detach");
    lend_must(kvbm_manager_destroy(l.m, 1000), "destroy");
    lend_close(&l.b);
}

#endif
