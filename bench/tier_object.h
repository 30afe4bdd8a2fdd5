// SPDX-License-Identifier: Apache-2.0
/*
 * The object tier beside its store. Blocks are put and got as a manager does it (batches of 32,
 * four at a time). The raw loop moves the same bytes over another handle of the same store:
 * kvs_put_chunk with one publication, and kvs_prefetch with kvs_get_chunk. The raw loop computes no
 * checksum and leaves the bytes in the store's buffers; the tier verifies each block and copies it
 * to its target. They run one directly after the other, in alternating order; the ratio is the
 * median of the rounds' own. Gets are from the page cache or the server's memory.
 *
 * Included by tier_bench.c only.
 */
#ifndef KV_BENCH_TIER_OBJECT_H
#define KV_BENCH_TIER_OBJECT_H

#include <ftw.h>
#include <limits.h>
#include <semaphore.h>
#include <sys/resource.h>

#include "store_redis.h"
#include "support.h"
#include "tier/object/impl.h"

enum { OBJECT_BLOCKS = 128, OBJECT_BATCH = 32, OBJECT_ROUNDS = 9 };

struct object_bench {
    const char *name;
    struct kvbm_object *tier;
    struct kvbm_object_format format;
    struct kvs_store *raw;
    struct load load;
    uint8_t *back; /* the bytes got */
};

struct object_row {
    struct bench_samples tier, raw, ratio, cpu, raw_cpu;
};

static void object_done(struct kvbm_object_batch *batch)
{
    sem_post(batch->arg);
}

/* Transfer all blocks. Returns nanoseconds. */
static double object_pass(struct object_bench *b, enum kvbm_object_op op)
{
    static struct kvbm_object_io ios[OBJECT_BLOCKS];
    struct kvbm_object_batch batches[OBJECT_BLOCKS / OBJECT_BATCH];
    uint64_t begin = kv_now_ns();
    double ns;
    sem_t sem;

    sem_init(&sem, 0, 0);
    for (uint32_t i = 0; i < OBJECT_BLOCKS; i++)
        ios[i] = (struct kvbm_object_io){.key = b->load.keys + (size_t)i * KEY,
                                         .data = (op == KVBM_OBJECT_PUT ? b->load.data : b->back) +
                                                 i * b->load.len};
    for (uint32_t i = 0; i < OBJECT_BLOCKS / OBJECT_BATCH; i++) {
        batches[i] =
            (struct kvbm_object_batch){.op = op,
                                       .flow = op == KVBM_OBJECT_PUT ? KVBM_OFFLOAD : KVBM_ONBOARD,
                                       .deadline_ns = begin + 60 * KV_NS_PER_S,
                                       .ios = ios + (size_t)i * OBJECT_BATCH,
                                       .n = OBJECT_BATCH,
                                       .done = object_done,
                                       .arg = &sem};
        if (kvbm_object_submit(b->tier, &batches[i]) < 0)
            bench_die("submit", -EAGAIN);
    }
    for (uint32_t i = 0; i < OBJECT_BLOCKS / OBJECT_BATCH; i++)
        while (sem_wait(&sem) < 0)
            ;
    ns = (double)(kv_now_ns() - begin);
    for (uint32_t i = 0; i < OBJECT_BLOCKS; i++)
        if (ios[i].status < 0)
            bench_die("object", ios[i].status);
    sem_destroy(&sem);
    return ns;
}

static double object_raw_pass(struct object_bench *b, enum kvbm_object_op op)
{
    size_t hits;

    return op == KVBM_OBJECT_PUT ? load_save(b->raw, &b->load, &hits)
                                 : load_restore(b->raw, &b->load);
}

/* Compare all bytes just got, outside the measured time. */
static void object_compare(struct object_bench *b, bool raw)
{
    if (raw)
        load_get_all(b->raw, &b->load, true);
    else if (memcmp(b->back, b->load.data, OBJECT_BLOCKS * b->load.len) != 0)
        bench_die("wrong bytes", -EBADMSG);
}

static void object_turns(struct object_bench *b, enum kvbm_object_op op, int round,
                         struct object_row *row)
{
    double bytes = (double)(OBJECT_BLOCKS * b->load.len), ns[2] = {0}, cpu[2] = {0};

    for (int turn = 0; turn < 2; turn++) {
        int raw = (turn + round) & 1;

        cpu[raw] = -bench_cpu_ns();
        ns[raw] = raw ? object_raw_pass(b, op) : object_pass(b, op);
        cpu[raw] += bench_cpu_ns();
        if (op == KVBM_OBJECT_GET)
            object_compare(b, raw);
    }
    if (round < 0) /* the first round starts threads, folders, buffers */
        return;
    bench_sample(&row->tier, bytes / ns[0] * 1e3);
    bench_sample(&row->raw, bytes / ns[1] * 1e3);
    bench_sample(&row->ratio, ns[1] / ns[0]);
    bench_sample(&row->cpu, cpu[0] / OBJECT_BLOCKS / 1e3);
    bench_sample(&row->raw_cpu, cpu[1] / OBJECT_BLOCKS / 1e3);
}

/* Delete a round's objects, so that the disk and the server hold one round at a time. */
static void object_forget(struct object_bench *b)
{
    for (size_t i = 0; i < OBJECT_BLOCKS; i++) {
        uint8_t key[KVBM_OBJECT_CHUNK_KEY];

        kvbm_object_chunk_key(&b->format, 0, b->load.keys + i * KEY, key);
        (void)kvs_delete_chunk(b->raw, key, sizeof(key));
        (void)kvs_delete_chunk(b->raw, b->load.keys + i * KEY, KEY);
    }
}

static void object_print(const struct object_bench *b, const char *what, struct object_row *row)
{
    double ratio = bench_middle(&row->ratio);

    bench_line("tier.object",
               "'figure':'%s','store':'%s','blocks':%d,'block_bytes':%zu,'mb_per_s':%.0f,'raw_mb_"
               "per_s':%.0f,'ratio':%.2f,'ratio_min':%.2f,'ratio_max':%.2f,'cpu_us_per_block':%.0f,"
               "'raw_cpu_us_per_block':%.0f,'rounds':%d",
               what, b->name, OBJECT_BLOCKS, b->load.len, bench_middle(&row->tier),
               bench_middle(&row->raw), ratio, row->ratio.of[0], row->ratio.of[row->ratio.n - 1],
               bench_middle(&row->cpu), bench_middle(&row->raw_cpu), row->ratio.n);
}

static void object_store(const char *name, const char *uri, size_t block_bytes)
{
    struct object_bench b = {.name = name};
    struct object_row put = {0}, get = {0};
    struct kvbm_object_opts opts = {.size = sizeof(opts),
                                    .uri = uri,
                                    .fingerprint = "bench",
                                    .key_len = KEY,
                                    .block_bytes = block_bytes};
    int rc = kvs_open(uri, &b.raw);

    if (rc < 0) {
        bench_line("tier.object",
                   "'store':'%s','skipped':'no such plugin ($KV_STORE_LIBRARY_PATH)'", name);
        return;
    }
    rc = kvbm_object_open(&opts, &b.tier);
    if (rc < 0)
        bench_die("object tier", rc);
    kvbm_object_format_init(&b.format, opts.fingerprint, KEY, block_bytes);
    load_init(&b.load, OBJECT_BLOCKS, block_bytes);
    b.back = malloc(OBJECT_BLOCKS * block_bytes);
    if (!b.back)
        bench_die("memory", -ENOMEM);
    for (int round = -1; round < OBJECT_ROUNDS; round++) {
        load_next(&b.load);
        memset(b.back, 0xee, OBJECT_BLOCKS * block_bytes);
        object_turns(&b, KVBM_OBJECT_PUT, round, &put);
        object_turns(&b, KVBM_OBJECT_GET, round, &get);
        object_forget(&b);
    }
    object_print(&b, "put", &put);
    object_print(&b, "get", &get);
    kvbm_object_close(b.tier);
    kvs_close(b.raw);
    load_fini(&b.load);
    free(b.back);
}

static int object_remove(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static void tier_bench_object(const char *dir)
{
    static const size_t sizes[] = {256 << 10, 1 << 20};
    struct redis redis;
    char path[PATH_MAX + 16], uri[64];

    snprintf(path, sizeof(path), "%s/object", dir);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        object_store("file", path, sizes[i]);
        nftw(path, object_remove, 16, FTW_DEPTH | FTW_PHYS);
    }
    if (redis_start(&redis, dir) < 0) {
        bench_line("tier.object", "'store':'redis','skipped':'no redis-server here'");
        return;
    }
    snprintf(uri, sizeof(uri), "redis://127.0.0.1:%d/0", redis.port);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        object_store("redis", uri, sizes[i]);
    redis_stop(&redis);
}

#endif
