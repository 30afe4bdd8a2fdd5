// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir bench tiers`: move blocks from a cache in memory or on a GPU through the tiers of a block
 * manager and back, beside a plain copy of the same bytes. Every block that comes back is compared.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/args/args.h"
#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/core/xxh.h"
#include "base/json/json.h"
#include "cli/commands.h"
#include "cli/show/format.h"
#include "kvbm.h"
#include "kvbm_transfer.h"

#define LAYERS 32u
#define PAGE 16u
#define CHAIN 16u /* blocks of a request */
#define WAIT_MS 600000
#define NO_GPU UINT64_MAX

struct options {
    const char *config, *disk, *object, *order;
    uint64_t block, blocks, host, disk_bytes;
    uint64_t gpu; /* number; NO_GPU: the cache lies in host memory */
    bool json;
};

static const struct kv_arg ARGS[] = {
    {.name = "config",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, config),
     .value = "FILE",
     .help = "Options of the tiers, as kvbm_manager_configure takes them. What follows wins."},
    {.name = "host",
     .type = KV_ARG_SIZE,
     .offset = offsetof(struct options, host),
     .value = "SIZE",
     .help = "Size of the host tier. Default: 1.25 times the blocks moved."},
    {.name = "disk",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, disk),
     .value = "DIR[:DIR...]",
     .help = "Disk tier: a directory per volume. Its files (kvbm-cache.*) are left there."},
    {.name = "disk-bytes",
     .type = KV_ARG_SIZE,
     .offset = offsetof(struct options, disk_bytes),
     .value = "SIZE",
     .help = "Size of the disk tier. Default: 1.25 times the blocks moved."},
    {.name = "object",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, object),
     .value = "URI",
     .help = "Object tier: any kv_store URI. Its blocks stay there."},
    {.name = "block",
     .type = KV_ARG_SIZE,
     .offset = offsetof(struct options, block),
     .value = "SIZE",
     .min = 16384,
     .max = 64 << 20,
     .help = "Bytes of a block: a multiple of 16KiB. Default: 2MiB."},
    {.name = "blocks",
     .type = KV_ARG_U64,
     .offset = offsetof(struct options, blocks),
     .value = "N",
     .min = 16,
     .max = 1 << 20,
     .help = "Number of blocks to move. Default: 128."},
    {.name = "order",
     .type = KV_ARG_CHOICE,
     .offset = offsetof(struct options, order),
     .value = "nhd|hnd",
     .choices = "nhd|hnd",
     .help = "Order of tokens and heads in the cache. The host tier is nhd, so hnd converts. "
             "Default: nhd."},
    {.name = "gpu",
     .type = KV_ARG_U64,
     .offset = offsetof(struct options, gpu),
     .value = "N",
     .min = 0,
     .max = 63,
     .help =
         "Cache in the memory of GPU N, a storage per layer, and a pinned host tier. Default: a "
         "cache in host memory."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = offsetof(struct options, json),
     .help = "One JSON object."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir bench tiers",
    .usage = "[--disk DIR] [--object URI] [OPTION ...]",
    .brief = "move blocks through the tiers of a block manager and back, and time it",
    .summary = "Moves blocks from a cache in memory or on a GPU to the host tier, the disk and the "
               "object\n"
               "store, and back, and reports the speed of each step beside a plain copy.",
    .footer = "Exit status: 0; 1 when a block came back with other bytes, or not at all; 2 usage; "
              "5 else.",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

struct figure {
    const char *name, *words;
    double seconds;
    uint64_t bytes;
    uint32_t missing; /* loads: blocks that no tier had */
};

struct bench {
    struct options opts;
    struct kvbm_layout_config block;
    struct kvbm_manager_opts tiers;
    struct kvbm_manager *manager;
    struct kvbm_layout *layout; /* of the cache */
    struct kvbm_layout
        *image; /* host memory with the cache's contents: the layout, or of a GPU's */
    struct kvbm_copier *copier; /* between the two; NULL: they are one */
    struct kvbm_cache *cache;
    uint32_t n;
    uint64_t *keys, *sums;
    uint32_t *numbers;
    uint8_t *ok;
    uint64_t wrong, missing; /* of all loads */
    struct figure figures[16];
    size_t n_figures;
};

/* ---- blocks ---- */

static void *block_at(const struct bench *b, uint32_t i)
{
    struct kvbm_view view;

    kvbm_layout_block(b->image, i, &view);
    return (void *)(uintptr_t)view.addr; // NOLINT(performance-no-int-to-ptr)
}

static void fill(struct bench *b)
{
    uint64_t state = kv_wall_ns() | 1;

    for (uint32_t i = 0; i < b->n; i++) {
        uint64_t *words = block_at(b, i);

        for (size_t k = 0; k < b->opts.block / 8; k++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            words[k] = state;
        }
        b->sums[i] = kv_xxh64(words, b->opts.block, 0);
        b->keys[i] = state;
        b->numbers[i] = i;
    }
}

/* Copy all blocks between the cache and its image. Without a GPU the two are one. */
static int mirror(const struct bench *b, bool to_cache)
{
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = to_cache ? b->image : b->layout,
                              .dst = to_cache ? b->layout : b->image,
                              .src_blocks = b->numbers,
                              .dst_blocks = b->numbers,
                              .n = b->n};
    struct kvbm_done done = {0};
    int64_t id;
    int rc;

    if (!b->copier)
        return 0;
    id = kvbm_copier_submit(b->copier, &t);
    rc = id < 0 ? (int)id : kvbm_copier_wait(b->copier, (uint64_t)id, WAIT_MS, &done);
    return rc < 0 ? rc : done.status;
}

/* Forget the cache's contents. */
static int wipe(struct bench *b)
{
    for (uint32_t i = 0; i < b->n; i++)
        memset(block_at(b, i), 0, b->opts.block);
    return mirror(b, true);
}

/* Compare what the last load has brought, and count the blocks that it didn't find. */
static int check(struct bench *b)
{
    struct figure *loaded = &b->figures[b->n_figures - 1];
    int rc = mirror(b, false);

    for (uint32_t i = 0; i < b->n && rc == 0; i++) {
        if (b->ok[i / 8] >> (i % 8) & 1)
            b->wrong += kv_xxh64(block_at(b, i), b->opts.block, 0) != b->sums[i];
        else
            loaded->missing++;
    }
    b->missing += loaded->missing;
    return rc < 0 ? rc : wipe(b);
}

static void note(struct bench *b, const char *name, const char *words, uint64_t start_ns)
{
    b->figures[b->n_figures++] = (struct figure){
        name, words, (double)(kv_now_ns() - start_ns) / 1e9, b->n * b->opts.block, 0};
}

/* ---- moving ---- */

static int begin(struct bench *b, uint32_t at, bool store, int64_t *ret)
{
    uint32_t n = KV_MIN(b->n - at, CHAIN);
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = b->keys + at};
    struct kvbm_job job = {
        .size = sizeof(job), .cache = b->cache, .blocks = b->numbers + at, .ok = b->ok + at / 8};
    long rc = store ? kvbm_manager_prepare_store(b->manager, &chain, n, &job.pin)
                    : kvbm_manager_prepare_load(b->manager, &chain, n, NULL, &job.pin);

    if (rc < 0)
        return (int)rc;
    *ret = kvbm_manager_submit(b->manager, &job);
    kvbm_pin_release(job.pin);
    return *ret < 0 ? (int)*ret : 0;
}

/* Store or load all blocks, CHAIN of them a request. */
static int move_all(struct bench *b, bool store)
{
    uint32_t n = KV_MAX(b->n / CHAIN, 1u); /* b->n is a multiple of CHAIN */
    int64_t *ids = calloc(n, sizeof(*ids));
    int rc = ids ? 0 : -ENOMEM;

    for (uint32_t i = 0; rc == 0 && i < n; i++) {
        rc = begin(b, i * CHAIN, store, &ids[i]);
        if (i >= 64 && rc == 0) /* keep no more requests open than a server would */
            rc = kvbm_manager_wait(b->manager, (uint64_t)ids[i - 64], WAIT_MS, NULL);
    }
    for (uint32_t i = n > 64 ? n - 64 : 0; rc == 0 && i < n; i++)
        rc = kvbm_manager_wait(b->manager, (uint64_t)ids[i], WAIT_MS, NULL);
    free(ids);
    return rc;
}

static int load(struct bench *b, const char *name, const char *words)
{
    uint64_t start_ns;
    int rc;

    memset(b->ok, 0, b->n / 8 + 1);
    start_ns = kv_now_ns();
    rc = move_all(b, false);
    note(b, name, words, start_ns);
    return rc < 0 ? rc : check(b);
}

static void forget(struct bench *b, enum kv_tier tier)
{
    if (kvbm_manager_pool(b->manager, tier))
        kvbm_pool_reset_inactive(kvbm_manager_pool(b->manager, tier));
}

/* Time a plain copy of the same bytes: by memcpy, or from pinned memory to the GPU in one job. */
static int yardstick(struct bench *b)
{
    char *to = b->copier ? NULL : malloc(b->opts.block * b->n);
    uint64_t start_ns;
    int rc;

    if (b->copier) {
        rc = mirror(b, true); /* opens the lane */
        start_ns = kv_now_ns();
        rc = rc < 0 ? rc : mirror(b, true);
        note(b, "copy", "pinned memory to GPU, one job", start_ns);
        return rc;
    }
    if (!to)
        return -ENOMEM;
    memset(to, 1, b->opts.block * b->n);
    start_ns = kv_now_ns();
    for (uint32_t i = 0; i < b->n; i++)
        memcpy(to + i * b->opts.block, block_at(b, i), b->opts.block);
    note(b, "memcpy", "memcpy, one thread", start_ns);
    free(to);
    return 0;
}

static int run(struct bench *b)
{
    uint64_t start_ns;
    int rc;

    fill(b);
    rc = yardstick(b);
    start_ns = kv_now_ns();
    if (rc == 0)
        rc = move_all(b, true);
    note(b, "store", "cache to host", start_ns);
    if (rc == 0 && (b->tiers.disk || b->tiers.object)) {
        rc = kvbm_manager_drain(b->manager, WAIT_MS);
        note(b, "down", "cache to the tiers below, durable", start_ns);
    }
    if (rc == 0)
        rc = wipe(b);
    if (rc == 0 && b->tiers.host_bytes)
        rc = load(b, "load", "host to cache");
    if (rc == 0 && b->tiers.disk) {
        forget(b, KV_TIER_HOST);
        rc = load(b, "load_disk", "disk to cache");
    }
    if (rc == 0 && b->tiers.object) {
        forget(b, KV_TIER_HOST);
        forget(b, KV_TIER_DISK);
        rc = load(b, "load_object", "object store to cache");
    }
    return rc;
}

/* ---- around it ---- */

/* Allocate the cache and, when it lies on a GPU, its image and what copies between the two. */
static int allocate(struct bench *b)
{
    bool gpu = b->opts.gpu != NO_GPU;
    const struct kvbm_storage_opts storage = {.size = sizeof(storage),
                                              .kind =
                                                  gpu ? KVBM_STORAGE_DEVICE : KVBM_STORAGE_SYSTEM,
                                              .device_id = gpu ? (uint32_t)b->opts.gpu : 0,
                                              .huge_pages = !gpu,
                                              .bytes = 1},
                                   host = {.size = sizeof(host),
                                           .kind = KVBM_STORAGE_PINNED,
                                           .device_id = storage.device_id,
                                           .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage),
                                pinned = kvbm_allocator_of(&host);
    struct kvbm_layout_config config = b->block;
    int rc;

    if (gpu)
        config.kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS; /* as engines have it */
    rc = kvbm_layout_allocate(&config, &allocator, &b->layout);
    b->image = b->layout;
    if (rc < 0 || !gpu)
        return rc;
    config.kind = KVBM_FULLY_CONTIGUOUS;
    b->image = NULL;
    rc = kvbm_layout_allocate(&config, &pinned, &b->image);
    return rc < 0 ? rc : kvbm_copier_create(NULL, &b->copier);
}

static int set_up(struct bench *b, char **strings)
{
    uint32_t inner = (uint32_t)(b->opts.block / (LAYERS * 2 * PAGE * 2));
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};
    int rc;

    b->block = (struct kvbm_layout_config){.size = sizeof(b->block),
                                           .kind = KVBM_FULLY_CONTIGUOUS,
                                           .num_blocks = b->n,
                                           .num_layers = LAYERS,
                                           .outer_dim = 2,
                                           .page_size = PAGE,
                                           .inner_dim = inner,
                                           .dtype_width_bytes = 2,
                                           .num_heads = inner % 128 ? 1 : inner / 128,
                                           .dtype = KVX_DTYPE_BF16};
    b->tiers = (struct kvbm_manager_opts){.size = sizeof(b->tiers),
                                          .fingerprint = "kvasir bench tiers",
                                          .huge_pages = b->opts.gpu == NO_GPU};
    rc = kvbm_manager_configure(&b->tiers, b->opts.config, strings);
    if (rc < 0)
        return rc;
    b->tiers.block = &b->block;
    b->tiers.host_pinned |= b->opts.gpu != NO_GPU;
    b->tiers.disk = b->opts.disk ? b->opts.disk : b->tiers.disk;
    b->tiers.object = b->opts.object ? b->opts.object : b->tiers.object;
    if (b->opts.host || !b->tiers.host_bytes)
        b->tiers.host_bytes = b->opts.host ? b->opts.host : (b->n + b->n / 4) * b->opts.block;
    if (b->opts.disk_bytes || !b->tiers.disk_bytes)
        b->tiers.disk_bytes =
            b->opts.disk_bytes ? b->opts.disk_bytes : (b->n + b->n / 4) * b->opts.block;
    rc = kvbm_manager_create(&b->tiers, &b->manager);
    if (rc == 0 && b->opts.order && !strcmp(b->opts.order, "hnd"))
        b->block.order = KVBM_ORDER_HND;
    if (rc == 0)
        rc = allocate(b);
    cache.layout = b->layout;
    return rc < 0 ? rc : kvbm_cache_attach(b->manager, &cache, &b->cache);
}

static void print_json(const struct bench *b)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_u64(&json, "block_bytes", b->opts.block);
    kv_json_member_u64(&json, "blocks", b->n);
    kv_json_member_u64(&json, "wrong", b->wrong);
    kv_json_member_u64(&json, "missing", b->missing);
    for (size_t i = 0; i < b->n_figures; i++) {
        kv_json_key(&json, b->figures[i].name);
        kv_json_begin_object(&json);
        kv_json_member_double(&json, "seconds", b->figures[i].seconds);
        kv_json_member_double(&json, "gb_per_s",
                              (double)b->figures[i].bytes / b->figures[i].seconds / 1e9);
        kv_json_end_object(&json);
    }
    kv_json_end_object(&json);
    printf("%s\n", kv_buf_cstr(&out));
    kv_buf_fini(&out);
}

static void print(const struct bench *b)
{
    printf("%" PRIu32 " blocks of %s:\n\n", b->n, kc_bytes((double)b->opts.block).s);
    for (size_t i = 0; i < b->n_figures; i++) {
        const struct figure *f = &b->figures[i];

        printf("  %-34s %8s  %10s/s", f->words, kc_duration((uint64_t)(f->seconds * 1e9)).s,
               kc_bytes((double)f->bytes / f->seconds).s);
        if (i)
            printf("  %.2f times %s time", f->seconds / b->figures[0].seconds,
                   b->copier ? "the plain copy's" : "memcpy's");
        putchar('\n');
    }
    if (b->wrong || b->missing)
        putchar('\n');
    if (b->wrong)
        printf("%" PRIu64 " blocks did not come back as they were.\n", b->wrong);
    for (size_t i = 0; i < b->n_figures; i++)
        if (b->figures[i].missing)
            printf("%s: %" PRIu32 " of %" PRIu32 " blocks were not there: a tier is too small, "
                   "or its policy left them out.\n",
                   b->figures[i].words, b->figures[i].missing, b->n);
}

static void tear_down(struct bench *b)
{
    if (b->cache)
        kvbm_cache_detach(b->cache);
    kvbm_manager_destroy(b->manager, WAIT_MS);
    kvbm_copier_destroy(b->copier);
    if (b->image != b->layout)
        kvbm_layout_destroy(b->image);
    kvbm_layout_destroy(b->layout);
    free(b->keys);
    free(b->sums);
    free(b->numbers);
    free(b->ok);
}

static int bench(struct bench *b)
{
    char *strings = NULL;
    int rc;

    b->opts.block = b->opts.block ? b->opts.block : 2 << 20;
    b->n = (uint32_t)(b->opts.blocks ? (b->opts.blocks + CHAIN - 1) / CHAIN * CHAIN : 128);
    b->keys = calloc(b->n, sizeof(*b->keys));
    b->sums = calloc(b->n, sizeof(*b->sums));
    b->numbers = calloc(b->n, sizeof(*b->numbers));
    b->ok = calloc(b->n / 8 + 1, 1);
    rc = b->keys && b->sums && b->numbers && b->ok ? set_up(b, &strings) : -ENOMEM;
    if (rc == 0)
        rc = run(b);
    if (rc < 0)
        fprintf(stderr, "kvasir bench tiers: %s\n", strerror(-rc));
    else if (b->opts.json)
        print_json(b);
    else
        print(b);
    tear_down(b);
    free(strings);
    return rc < 0 ? 5 : b->wrong || b->missing ? 1 : 0;
}

/* Exit at once on ^C: the tiers are crash-safe, and a disk may take long to answer. */
static void on_interrupt(int number)
{
    static const char text[] =
        "\nkvasir bench tiers: interrupted; files of the disk tier and objects are left behind\n";
    ssize_t n = write(STDERR_FILENO, text, sizeof(text) - 1);

    (void)n;
    _exit(128 + number);
}

int kc_bench_tiers_main(int argc, char **argv)
{
    struct bench b = {.opts.gpu = NO_GPU};
    struct kv_error error = {0};
    int rc;

    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);
    rc = kv_args_parse(&PROGRAM, argc, argv, &b.opts, NULL, &error);
    if (rc == 0 && b.opts.block % 16384) {
        rc = -EINVAL;
        snprintf(error.text, sizeof(error.text), "--block must be a multiple of 16KiB");
    }
    if (rc < 0) {
        fprintf(stderr, "kvasir bench tiers: %s\n", error.text);
        return 2;
    }
    return rc ? 0 : bench(&b);
}
