// SPDX-License-Identifier: Apache-2.0
/*
 * The disk tier beside fio. In every round fio writes and reads a file in place (io_uring,
 * O_DIRECT, the same block size, depth, bytes, and random order). The tier does the same with its
 * slots, checksums and barriers included, with and without memory registered with io_uring. They
 * run one directly after the other, in a rotating order. The ratio is the median of the rounds'
 * own; CPU time is our process's, kernel included.
 *
 * Included by tier_bench.c only.
 */
#ifndef KV_BENCH_TIER_DISK_H
#define KV_BENCH_TIER_DISK_H

#include <semaphore.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/log.h"
#include "support.h"
#include "tier/disk/disk.h"

enum {
    DISK_ROUNDS = 9,
    DISK_DEPTH = 32,
    DISK_BATCHES = 4 /* at once, so that one is written while another is committed */
};
#define DISK_BYTES (UINT64_C(2) << 30)

struct disk_load {
    struct kvbm_disk *disk; /* the store being measured */
    double cpu_ns;          /* of the last pass */
    const char *dir;
    uint64_t block;
    uint32_t n_blocks;
    uint8_t *memory; /* one block for each slot of all batches */
    uint64_t *keys;
    uint32_t *order;
};

static void disk_done(struct kvbm_disk_batch *batch)
{
    sem_post(batch->arg);
}

/* Transfer all blocks in random order, by batches. Returns bytes per second. */
static double disk_pass(struct disk_load *load, bool writing)
{
    struct kvbm_disk_io *ios = calloc(load->n_blocks, sizeof(*ios));
    uint32_t each = load->n_blocks / 32;
    struct kvbm_disk_batch batches[33];
    uint32_t n = 0, at = 0;
    uint64_t begin;
    double ns;
    sem_t sem;

    if (!ios)
        bench_die("memory", -ENOMEM);
    sem_init(&sem, 0, 0);
    for (uint32_t i = load->n_blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(random() % (i + 1)), swap = load->order[i];

        load->order[i] = load->order[j];
        load->order[j] = swap;
    }
    load->cpu_ns = -bench_cpu_ns();
    begin = kv_now_ns();
    while (at < load->n_blocks || n) {
        struct kvbm_disk_batch *batch = &batches[at / each];

        if (at >= load->n_blocks || n == DISK_BATCHES) {
            while (sem_wait(&sem) < 0)
                ;
            n--;
            continue;
        }
        *batch = (struct kvbm_disk_batch){.write = writing,
                                          .flow = writing ? KVBM_OFFLOAD : KVBM_ONBOARD,
                                          .ios = ios + at,
                                          .n = each,
                                          .done = disk_done,
                                          .arg = &sem};
        for (uint32_t i = 0; i < each; i++, at++)
            ios[at] = (struct kvbm_disk_io){.slot = load->order[at],
                                            .key = &load->keys[load->order[at]],
                                            .data = load->memory +
                                                    at % (each * DISK_BATCHES) * load->block,
                                            .len = load->block};
        if (kvbm_disk_submit(load->disk, batch) < 0)
            bench_die("submit", -EAGAIN);
        n++;
    }
    ns = (double)(kv_now_ns() - begin);
    load->cpu_ns += bench_cpu_ns();
    for (uint32_t i = 0; i < load->n_blocks; i++)
        if (ios[i].status < 0)
            bench_die(writing ? "write" : "read", ios[i].status);
    sem_destroy(&sem);
    free(ios);
    return (double)load->n_blocks * (double)load->block / ns * 1e9;
}

/* Run fio. Returns bytes per second, or 0 without fio. */
static double disk_fio(const struct disk_load *load, bool writing)
{
    char command[1024], line[512];
    double found = 0;
    bool side = false;
    FILE *pipe;

    snprintf(command, sizeof(command),
             "fio --name=x --filename='%s/fio' --size=%llu --bs=%llu --iodepth=%d "
             "--ioengine=io_uring --direct=1 --rw=%s --overwrite=1 --norandommap=0 "
             "--output-format=json 2>/dev/null",
             load->dir, (unsigned long long)DISK_BYTES, (unsigned long long)load->block, DISK_DEPTH,
             writing ? "randwrite" : "randread");
    pipe = popen(command, "r");
    while (pipe && fgets(line, sizeof(line), pipe)) {
        unsigned long long bw;

        side |= strstr(line, writing ? "\"write\" : {" : "\"read\" : {") != NULL;
        if (side && found == 0 && sscanf(line, " \"bw_bytes\" : %llu", &bw) == 1)
            found = (double)bw;
    }
    if (pipe)
        pclose(pipe);
    return found;
}

/* Results of one way (registered memory or not) and direction, by round. */
struct disk_row {
    struct bench_samples own, fio, ratio, cpu_us;
};

static void disk_print(const char *what, const struct disk_load *load, struct disk_row *row,
                       struct kvbm_disk *disk)
{
    double ratio = bench_middle(&row->ratio);
    struct kvbm_disk_stats stats;

    kvbm_disk_get_stats(disk, &stats);
    bench_line("tier.disk",
               "'figure':'%s','registered':%s,'block_bytes':%llu,'depth':%d,'bytes':%llu,'mb_per_s'"
               ":%.0f,'fio_mb_per_s':%.0f,'ratio':%.2f,'ratio_min':%.2f,'ratio_max':%.2f,'rounds':%"
               "d,'cpu_us_per_block':%.1f,'blocks_per_commit':%.1f",
               what, stats.registered_bytes ? "true" : "false", (unsigned long long)load->block,
               DISK_DEPTH, (unsigned long long)DISK_BYTES, bench_middle(&row->own) / 1e6,
               bench_middle(&row->fio) / 1e6, ratio, row->ratio.of[0],
               row->ratio.of[row->ratio.n - 1], row->ratio.n, bench_middle(&row->cpu_us),
               stats.barriers ? 2.0 * (double)stats.writes / (double)stats.barriers : 0.0);
}

/* Run fio, the tier, and the tier with registered memory, in an order that rotates from round to
 * round. */
static void disk_round(struct disk_load *load, struct kvbm_disk *disks[2], struct disk_row rows[2],
                       bool writing, int round)
{
    double own[2] = {0}, fio = 0;

    for (int turn = 0; turn < 3; turn++) {
        int who = (turn + round) % 3;

        if (who == 2) {
            fio = disk_fio(load, writing);
            continue;
        }
        load->disk = disks[who];
        own[who] = disk_pass(load, writing);
        bench_sample(&rows[who].cpu_us, load->cpu_ns / load->n_blocks / 1e3);
    }
    for (int i = 0; i < 2; i++) {
        bench_sample(&rows[i].own, own[i]);
        bench_sample(&rows[i].fio, fio);
        bench_sample(&rows[i].ratio, own[i] / fio);
    }
}

static void disk_rounds(struct disk_load *load, struct kvbm_disk *disks[2])
{
    struct disk_row rows[2][2] = {0}; /* [writing][registered] */

    for (int i = 0; i < 2;
         i++) { /* files are created and then overwritten, so the first round isn't measured */
        load->disk = disks[i];
        disk_pass(load, true);
    }
    if (disk_fio(load, true) == 0) {
        bench_line("tier.disk", "'skipped':'there is no fio'");
        return;
    }
    for (int round = 0; round < DISK_ROUNDS; round++)
        for (int writing = 1; writing >= 0; writing--)
            disk_round(load, disks, rows[writing], writing, round);
    for (int i = 0; i < 2; i++) {
        disk_print("write", load, &rows[1][i], disks[i]);
        disk_print("read", load, &rows[0][i], disks[i]);
    }
}

static void disk_blocks(const char *dir, uint64_t block)
{
    struct disk_load load = {
        .dir = dir, .block = block, .n_blocks = (uint32_t)(DISK_BYTES / block)};
    struct kvbm_disk_opts opts = {.size = sizeof(opts),
                                  .directories = &dir,
                                  .n_directories = 1,
                                  .key_len = 8,
                                  .slot_bytes = block,
                                  .n_slots = load.n_blocks,
                                  .io_depth = DISK_DEPTH};
    size_t memory = (size_t)load.n_blocks / 32 * DISK_BATCHES * block;
    struct kvbm_disk *disks[2];
    int rc;

    load.keys = calloc(load.n_blocks, sizeof(load.keys[0]));
    load.order = calloc(load.n_blocks, sizeof(load.order[0]));
    if (!load.keys || !load.order || posix_memalign((void **)&load.memory, 4096, memory) != 0)
        bench_die("memory", -ENOMEM);
    for (uint32_t i = 0; i < load.n_blocks; i++) {
        load.keys[i] = i * UINT64_C(0x9e3779b97f4a7c15);
        load.order[i] = i;
    }
    for (size_t i = 0; i < memory / 8; i++)
        ((uint64_t *)load.memory)[i] = (uint64_t)random() << 32 ^ (uint64_t)random();
    rc = kvbm_disk_open(&opts, &disks[0]);
    opts.name = "registered";
    opts.memory = load.memory;
    opts.memory_bytes = memory;
    if (rc == 0)
        rc = kvbm_disk_open(&opts, &disks[1]);
    if (rc < 0)
        bench_die("open", rc);
    disk_rounds(&load, disks);
    kvbm_disk_close(disks[0]);
    kvbm_disk_close(disks[1]);
    free(load.keys);
    free(load.order);
    free(load.memory);
}

static int disk_count(void *arg, const struct kvbm_disk_record *record)
{
    (void)record;
    ++*(uint32_t *)arg;
    return 0;
}

/* Reopen an index with as many valid records as 100 GB of 256 KiB blocks have. The slots are small,
 * which the index doesn't show. */
static void disk_reopen(const char *dir)
{
    enum { N = 400000 };
    struct kvbm_disk_opts opts = {.size = sizeof(opts),
                                  .directories = &dir,
                                  .n_directories = 1,
                                  .key_len = 8,
                                  .slot_bytes = 4096,
                                  .n_slots = N,
                                  .volatile_ = true};
    struct disk_load load = {.dir = dir, .block = 4096, .n_blocks = N};
    struct bench_samples s = {.n = 0};
    double seconds;
    char path[4096];
    int rc = kvbm_disk_open(&opts, &load.disk);

    if (rc < 0)
        bench_die("open", rc);
    load.keys = calloc(N, sizeof(load.keys[0]));
    load.order = calloc(N, sizeof(load.order[0]));
    load.memory = NULL;
    if (!load.keys || !load.order ||
        posix_memalign((void **)&load.memory, 4096, N / 32 * DISK_BATCHES * 4096UL) != 0)
        bench_die("memory", -ENOMEM);
    memset(load.memory, 'x', N / 32 * DISK_BATCHES * 4096UL);
    for (uint32_t i = 0; i < N; i++)
        load.keys[i] = load.order[i] = i;
    disk_pass(&load, true);
    kvbm_disk_close(load.disk);
    snprintf(path, sizeof(path), "%s/kvbm-cache.index", dir);
    for (int round = 0; round < DISK_ROUNDS; round++) {
        uint32_t n = 0;
        uint64_t begin;
        int fd = open(path, O_RDONLY | O_CLOEXEC);

        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* so that it is read from the disk */
        close(fd);
        begin = kv_now_ns();
        rc = kvbm_disk_open(&opts, &load.disk);
        if (rc < 0 || kvbm_disk_each(load.disk, disk_count, &n) != N)
            bench_die("reopen", rc < 0 ? rc : -EBADMSG);
        bench_sample(&s, (double)(kv_now_ns() - begin) / 1e9);
        kvbm_disk_close(load.disk);
    }
    seconds = bench_middle(&s); /* also sorts */
    bench_line(
        "tier.disk",
        "'figure':'reopen','records':%d,'like':'100 GB of 256 KiB','seconds':%.3f,'worst':%.3f", N,
        seconds, s.of[s.n - 1]);
    free(load.keys);
    free(load.order);
    free(load.memory);
}

static void disk_clean(const char *dir)
{
    static const char *const names[] = {"fio", "kvbm-cache.slots", "kvbm-cache.index",
                                        "kvbm-registered.slots", "kvbm-registered.index"};
    char path[4096];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        unlink(path);
    }
}

static void tier_bench_disk(const char *dir)
{
    static const uint64_t blocks[] = {256 << 10, 2 << 20};

    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) {
        disk_blocks(dir, blocks[i]);
        disk_clean(dir);
    }
    disk_reopen(dir);
    disk_clean(dir);
}

#endif
