// SPDX-License-Identifier: Apache-2.0
/*
 * tier_bench's figures of the manager:
 *
 *   manager    cost of a block in a store and a load job with little to copy (2 KiB, some 100 ns):
 *              wall clock from prepare to the job's end, jobs of 256 blocks, one at a time. The end
 *              is waited for (the thread helps to copy), or polled when the manager's descriptor is
 *              readable
 *   onboard    time of a load of 8 blocks of 2 MiB from the disk, p50 and p99: idle, and while
 *              stores saturate the disk
 */
#ifndef KV_BENCH_TIER_MANAGER_H
#define KV_BENCH_TIER_MANAGER_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_manager.h"
#include "support.h"

enum {
    MANAGER_JOB = 256,
    MANAGER_JOBS = 64,
    MANAGER_ROUNDS = 9,
    ONBOARD_LOADS = 200,
    ONBOARD_BLOCKS = 8
};

static inline void manager_must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "tier_bench: %s: %s\n", what, strerror((int)-rc));
    exit(1);
}

struct manager_bench {
    struct kvbm_layout_config block;
    struct kvbm_manager *m;
    struct kvbm_layout *layout;
    struct kvbm_cache *cache;
    bool polls; /* polls for ends */
};

static inline void manager_open(struct manager_bench *b, uint32_t cache_blocks, uint32_t inner,
                                struct kvbm_manager_opts *opts)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .huge_pages = true, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};

    b->block = (struct kvbm_layout_config){.size = sizeof(b->block),
                                           .kind = KVBM_FULLY_CONTIGUOUS,
                                           .num_blocks = cache_blocks,
                                           .num_layers = 32,
                                           .outer_dim = 2,
                                           .page_size = 16,
                                           .inner_dim = inner,
                                           .dtype_width_bytes = 2,
                                           .num_heads = 1,
                                           .dtype = KVX_DTYPE_BF16};
    opts->size = sizeof(*opts);
    opts->block = &b->block;
    opts->fingerprint = "bench";
    opts->huge_pages = true;
    manager_must(kvbm_manager_create(opts, &b->m), "manager");
    manager_must(kvbm_layout_allocate(&b->block, &allocator, &b->layout), "layout");
    cache.layout = b->layout;
    manager_must(kvbm_cache_attach(b->m, &cache, &b->cache), "attach");
}

static inline void manager_close(struct manager_bench *b)
{
    kvbm_cache_detach(b->cache);
    kvbm_manager_destroy(b->m, 60000);
    kvbm_layout_destroy(b->layout);
}

static inline void manager_poll(struct manager_bench *b, struct kvbm_done *ret)
{
    struct pollfd fd = {.fd = kvbm_manager_fd(b->m), .events = POLLIN};

    while (kvbm_manager_poll(b->m, ret, 1) != 1)
        manager_must(poll(&fd, 1, 60000) == 1 ? 0 : -ETIMEDOUT, "poll");
}

/* Run a job over n keys from @first on and wait for it. Returns the number of blocks that
 * arrived. */
static inline uint32_t manager_job(struct manager_bench *b, uint64_t first, uint32_t n, bool store,
                                   uint32_t block)
{
    uint64_t keys[MANAGER_JOB];
    uint32_t blocks[MANAGER_JOB];
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_job job = {.size = sizeof(job), .cache = b->cache, .blocks = blocks};
    struct kvbm_done done;
    int64_t id;

    for (uint32_t i = 0; i < n; i++) {
        keys[i] = (first + i) * UINT64_C(0x9e3779b97f4a7c15);
        blocks[i] = block + i;
    }
    manager_must(store ? kvbm_manager_prepare_store(b->m, &chain, n, &job.pin)
                       : kvbm_manager_prepare_load(b->m, &chain, n, NULL, &job.pin),
                 "prepare");
    id = kvbm_manager_submit(b->m, &job);
    manager_must(id, "submit");
    kvbm_pin_release(job.pin);
    if (b->polls)
        manager_poll(b, &done);
    else
        manager_must(kvbm_manager_wait(b->m, (uint64_t)id, 60000, &done), "wait");
    return done.n_ok;
}

/* Return nanoseconds per block of MANAGER_JOBS jobs. */
static inline double manager_round(struct manager_bench *b, uint64_t first, bool store)
{
    uint64_t start = kv_now_ns();

    for (uint32_t j = 0; j < MANAGER_JOBS; j++)
        if (manager_job(b, first + j * MANAGER_JOB, MANAGER_JOB, store, 0) != MANAGER_JOB)
            manager_must(-EIO, store ? "store" : "load");
    return (double)(kv_now_ns() - start) / (MANAGER_JOB * MANAGER_JOBS);
}

static inline void tier_bench_manager(void)
{
    /* One job more than is loaded again: the order of eviction is exact to some releases only. */
    struct kvbm_manager_opts opts = {.host_bytes =
                                         (uint64_t)MANAGER_JOB * (MANAGER_JOBS + 1) * 4096};
    struct bench_samples ns[2][2] = {0}; /* [polls][store] */
    struct manager_bench b = {0};

    manager_open(&b, MANAGER_JOB, 1, &opts); /* 2 KiB a block */
    for (int round = 0; round < 2 * MANAGER_ROUNDS; round++) {
        b.polls = round & 1;
        for (int load = 0; load < 2; load++)
            bench_sample(&ns[b.polls][!load],
                         manager_round(&b, (uint64_t)(round + 1) * 1000000, !load));
    }
    manager_close(&b);
    for (int polls = 0; polls < 2; polls++)
        bench_line("tier.manager",
                   "'figure':'tier_manager','job_blocks':%d,'end':'%s','clock':'wall','rounds':%d,'"
                   "store_ns_per_block':%.0f,'load_ns_per_block':%.0f,'target_ns':1000",
                   MANAGER_JOB, polls ? "polled" : "waited", MANAGER_ROUNDS,
                   bench_middle(&ns[polls][1]), bench_middle(&ns[polls][0]));
}

/* ---- onboard while offloading ---- */

struct onboard_writer {
    struct manager_bench *b;
    atomic_bool stop;
};

static inline void *onboard_write(void *arg)
{
    struct onboard_writer *w = arg;

    for (uint64_t key = 1000000000; !atomic_load(&w->stop); key += 16)
        manager_job(w->b, key, 16, true, 16);
    return NULL;
}

/* Load blocks that only the disk has. Returns how many loads were incomplete (no room in the host
 * tier for a moment). */
static inline uint32_t onboard_loads(struct manager_bench *b, uint32_t n_stored, double *ms)
{
    uint32_t lost = 0;

    for (uint32_t i = 0; i < ONBOARD_LOADS; i++) {
        uint64_t first = 1 + (uint64_t)(i * ONBOARD_BLOCKS) % n_stored, start;
        uint64_t keys[ONBOARD_BLOCKS];

        for (uint32_t k = 0; k < ONBOARD_BLOCKS; k++)
            keys[k] = (first + k) * UINT64_C(0x9e3779b97f4a7c15);
        kvbm_pool_reset_keys(kvbm_manager_pool(b->m, KV_TIER_HOST), 0, keys, ONBOARD_BLOCKS, NULL);
        kvbm_pool_touch(kvbm_manager_pool(b->m, KV_TIER_DISK), 0, keys, ONBOARD_BLOCKS);
        start = kv_now_ns();
        lost += manager_job(b, first, ONBOARD_BLOCKS, false, 0) != ONBOARD_BLOCKS;
        ms[i] = (double)(kv_now_ns() - start) / 1e6;
    }
    qsort(ms, ONBOARD_LOADS, sizeof(*ms), bench_by_value);
    return lost;
}

static inline void tier_bench_onboard(const char *directory)
{
    struct kvbm_manager_opts opts = {
        .host_bytes = UINT64_C(512) << 21, .disk = directory, .disk_bytes = UINT64_C(1024) << 21};
    static double idle[ONBOARD_LOADS], busy[ONBOARD_LOADS];
    struct manager_bench b = {0};
    struct onboard_writer writer = {.b = &b};
    const uint32_t stored = 256;
    struct kvbm_manager_stats before = {.size = sizeof(before)}, after = {.size = sizeof(after)};
    uint32_t lost;
    uint64_t written, start;
    pthread_t thread;

    manager_open(&b, 64, 1024, &opts);
    for (uint32_t i = 0; i < stored; i += ONBOARD_BLOCKS) {
        manager_job(&b, 1 + i, ONBOARD_BLOCKS, true, 0);
        kvbm_manager_drain(b.m, 60000);
    }
    lost = onboard_loads(&b, stored, idle);
    if (pthread_create(&thread, NULL, onboard_write, &writer))
        manager_must(-EAGAIN, "thread");
    kvbm_manager_get_stats(b.m, &before);
    start = kv_now_ns();
    lost += onboard_loads(&b, stored, busy);
    written = kv_now_ns() - start;
    kvbm_manager_get_stats(b.m, &after);
    atomic_store(&writer.stop, true);
    pthread_join(thread, NULL);
    manager_close(&b);
    bench_line("tier.manager",
               "'figure':'tier_onboard','blocks':%d,'block_bytes':%d,'loads':%d,'idle_p50_ms':%.2f,"
               "'idle_p99_ms':%.2f,'busy_p50_ms':%.2f,'busy_p99_ms':%.2f,'busy_of_idle_p99':%.2f,'"
               "target':3,'offload_gb_per_s':%.2f,'incomplete':%u",
               ONBOARD_BLOCKS, 2 << 20, ONBOARD_LOADS, idle[ONBOARD_LOADS / 2],
               idle[ONBOARD_LOADS * 99 / 100], busy[ONBOARD_LOADS / 2],
               busy[ONBOARD_LOADS * 99 / 100],
               busy[ONBOARD_LOADS * 99 / 100] / idle[ONBOARD_LOADS * 99 / 100],
               (double)(after.disk.bytes_in - before.disk.bytes_in) / (double)written, lost);
}

#endif
