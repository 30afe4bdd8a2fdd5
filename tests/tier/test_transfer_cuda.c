// SPDX-License-Identifier: Apache-2.0
/* The copier's CUDA lanes on an emulated driver (emulated_cuda.c, emulated_backend.c): streams,
 * events, pieces, launches, failures. For a real GPU: tests/gpu/gpu_transfer.c. */
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "transfer_unit.h"

static void (*faults)(int copy, int event, int us);
static int (*copies)(void);
static int (*batches)(void);
static void (*fail_batch)(int code);
static int (*capture)(int on);
static int (*contexts)(int device);
static int (*alive)(void);
static void (*happen)(void *event);
static int (*event_create)(void **ret, unsigned flags);
static int (*event_record)(void *event, void *stream);
static int (*event_destroy)(void *event);
static int (*retain)(void **ret, int device);
static bool batching; /* whether this driver copies in batches */

static struct kvbm_storage_opts device = {.size = sizeof(device), .kind = KVBM_STORAGE_DEVICE};
static struct kvbm_storage_opts other_device = {
    .size = sizeof(device), .kind = KVBM_STORAGE_DEVICE, .device_id = 1};
static struct kvbm_storage_opts pinned = {.size = sizeof(pinned), .kind = KVBM_STORAGE_PINNED};
static struct kvbm_storage_opts plain = {.size = sizeof(plain), .kind = KVBM_STORAGE_SYSTEM};

static void find(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);

    assert_non_null(symbol);
    memcpy(slot, &symbol, sizeof(symbol));
}

/* The driver that is loaded first is the one that libkvbm gets when it asks for libcuda.so.1. */
static void *open_driver(const char *folder)
{
    const char *version = getenv("EMULATED_CUDA");
    char path[4096];

    batching = !version || atoi(version) >= 12;
    if (!version)
        return dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(path, sizeof(path), "%s/tests/cuda%s/libcuda.so.1", folder, version);
    return dlopen(path, RTLD_NOW);
}

static int set_up(void **state)
{
    const char *folder = getenv("KV_BUILD_DIR") ? getenv("KV_BUILD_DIR") : "build";
    void *library = open_driver(folder);
    char path[4096];

    (void)state;
    assert_non_null(library);
    find(library, "emulated_cuda_faults", &faults);
    find(library, "emulated_cuda_copies", &copies);
    find(library, "emulated_cuda_batches", &batches);
    find(library, "emulated_cuda_fail_batch", &fail_batch);
    find(library, "emulated_cuda_capture", &capture);
    find(library, "emulated_cuda_contexts", &contexts);
    find(library, "cuDevicePrimaryCtxRetain", &retain);
    find(library, "emulated_cuda_alive", &alive);
    find(library, "emulated_cuda_happen", &happen);
    find(library, "cuEventCreate", &event_create);
    find(library, "cuEventRecord", &event_record);
    find(library, "cuEventDestroy_v2", &event_destroy);
    snprintf(path, sizeof(path), "%s/tests/libkvx_emulated.so", folder);
    setenv("KVX_CUDA_LIBRARY", path, 1);
    return 0;
}

static struct kvbm_copier *copier_with(enum kvbm_gpu_copy how)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 1, .gpu_copy = how};
    struct kvbm_copier *copier = NULL;

    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    return copier;
}

static struct kvbm_copier *copier_of(void)
{
    return copier_with(KVBM_GPU_AUTO);
}

static int wait_for(struct kvbm_copier *copier, const struct kvbm_transfer *t,
                    struct kvbm_done *ret)
{
    int64_t id = kvbm_copier_submit(copier, t);

    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, ret), 0);
    return ret->status;
}

/*
 * A process that works on GPU 1 gets no context on GPU 0, which would take memory of another's: not
 * for pinned memory, and not for asking for events. First of all tests, since contexts are kept.
 */
static void test_other_gpus_are_left_alone(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 2,
                                   .num_layers = 1,
                                   .outer_dim = 1,
                                   .page_size = 1,
                                   .inner_dim = 64};
    struct kvbm_storage_opts file = {.size = sizeof(file), .kind = KVBM_STORAGE_DISK};
    struct kvbm_copier *copier = copier_of();
    struct kvbm_layout *to, *from, *disk;
    const uint32_t a = 0;
    struct kvbm_transfer t = {
        .size = sizeof(t), .src_blocks = &a, .dst_blocks = &a, .n = 1, .flow = KVBM_ONBOARD};
    struct kvbm_done done;
    void *context, *event;

    (void)state;
    assert_int_equal(retain(&context, 1), 0); /* the application's */
    from = unit_layout(&c, &pinned);
    to = unit_layout(&c, &other_device);
    disk = unit_layout(&c, &file);
    assert_int_equal(event_create(&event, 0), 0);
    t.ready_event = event;
    for (int i = 0; i < 3; i++) { /* to the GPU, to a file, from it */
        t.src = i == 2 ? disk : from;
        t.dst = i == 0 ? to : i == 1 ? disk : from;
        assert_int_equal(wait_for(copier, &t, &done), 0);
    }
    assert_int_equal(contexts(0), 0);
    assert_true(contexts(1) > 1);
    event_destroy(event);
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(from);
    kvbm_layout_destroy(to);
    kvbm_layout_destroy(disk);
    assert_int_equal(alive(), 0);
}

static void test_every_pair(void **state)
{
    struct kvbm_storage_opts *pairs[][2] = {{&device, &pinned}, {&pinned, &device},
                                            {&device, &device}, {&device, &plain},
                                            {&plain, &device},  {&device, &other_device}};
    struct kvbm_copier *copiers[] = {copier_with(KVBM_GPU_AUTO), copier_with(KVBM_GPU_ENGINES),
                                     copier_with(KVBM_GPU_SINGLE)};
    struct rng rng = {test_seed()};
    long refused = 0, rounds = test_rounds(900);

    (void)state;
    faults(0, 0, 20);
    batches();
    for (long i = 0; i < rounds; i++) {
        struct kvbm_copier *copier = copiers[i % 3];
        struct kvbm_transfer t = {.flow = rng_below(&rng, 2)};
        size_t pair = rng_below(&rng, KV_COUNT(pairs));
        bool apart = pairs[pair][0] == &plain || pairs[pair][1] == &plain ||
                     pairs[pair][1] == &other_device; /* no kernel reaches both */
        struct kvbm_layout_config c[2];
        uint32_t src[64], dst[64];
        struct kvbm_layout *a, *b;
        int rc;

        unit_configs(&rng, c);
        a = unit_layout(&c[0], pairs[pair][0]);
        b = unit_layout(&c[1], pairs[pair][1]);
        t.src = a;
        t.dst = b;
        unit_ranges(&rng, &t, src, dst);
        rc = unit_round(copier, &t, &rng);
        assert_true(rc == 0 || (rc == -ENOTSUP && apart));
        refused += rc < 0;
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
    }
    assert_true(refused < rounds / 2);
    assert_int_equal(batches() > 0, batching);
    faults(0, 0, 0);
    for (int i = 0; i < 3; i++)
        kvbm_copier_destroy(copiers[i]);
    assert_int_equal(alive(), 0);
}

/* Memory of others is believed to be where they say; a device that can't be is refused, not looked up. */
static void test_no_such_device(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 2,
                                   .num_layers = 1,
                                   .outer_dim = 1,
                                   .page_size = 1,
                                   .inner_dim = 64};
    static char memory[4096];
    struct kvbm_storage_opts external = {.size = sizeof(external),
                                         .kind = KVBM_STORAGE_EXTERNAL,
                                         .of = KVBM_STORAGE_DEVICE,
                                         .memory = memory,
                                         .device_id = 1000};
    const uint32_t a = 0;
    struct kvbm_layout *from = unit_layout(&c, &device), *to = unit_layout(&c, &pinned), *none;
    struct kvbm_transfer t = {
        .size = sizeof(t), .src = from, .dst = to, .src_blocks = &a, .dst_blocks = &a, .n = 1};
    struct kvbm_copier *copier = copier_of();
    struct kvbm_done done;

    (void)state;
    none = unit_layout(&c, &external);
    for (int i = 0; i < 2; i++) { /* before the lanes are there, and after */
        t.src = none;
        assert_int_equal(kvbm_copier_submit(copier, &t), -ENOTSUP);
        t.src = from;
        assert_int_equal(
            kvbm_copier_wait(copier, (uint64_t)kvbm_copier_submit(copier, &t), 60000, &done), 0);
        assert_int_equal(done.status, 0);
    }
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(from);
    kvbm_layout_destroy(to);
    kvbm_layout_destroy(none);
}

/* Whole blocks by copy engines, a call for neighbours; small pieces by kernels; a chunk's worth a launch. */
static void test_who_copies(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 32,
                                   .num_layers = 4,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 1024};
    uint32_t ids[32];
    struct kvbm_copier *copier = copier_of();
    struct kvbm_layout *whole = unit_layout(&c, &device), *host = unit_layout(&c, &pinned), *layers,
                       *small, *unpinned;
    struct kvbm_transfer t = {
        .size = sizeof(t), .dst = host, .src_blocks = ids, .dst_blocks = ids, .n = 32};
    struct kvbm_done done;

    (void)state;
    c.inner_dim = 256;
    small = unit_layout(&c, &pinned);
    unpinned = unit_layout(&c, &plain);
    c.kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS;
    layers = unit_layout(&c, &device);
    for (uint32_t i = 0; i < 32; i++)
        ids[i] = i;
    copies();
    for (int i = 0; i < 3; i++) {
        t.src = i == 0 ? whole : layers;
        t.dst = i == 0 ? host : i == 1 ? small : unpinned;
        assert_int_equal(
            kvbm_copier_wait(copier, (uint64_t)kvbm_copier_submit(copier, &t), 60000, &done), 0);
        assert_int_equal(done.status, 0);
        /* 256 KiB a block, 2 MiB a chunk; a kernel; 16 KiB a layer, and no kernel reaches the memory */
        assert_int_equal(copies(), i == 0 ? 4 : i == 1 ? 0 : 32 * 4);
    }
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(whole);
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(small);
    kvbm_layout_destroy(unpinned);
    kvbm_layout_destroy(layers);
}

/* Layers that lie apart on the GPU, in whole blocks here: 64 KiB pieces, a chunk's worth a call. */
static void test_batches(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS,
                                   .num_blocks = 32,
                                   .num_layers = 4,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 1024};
    struct kvbm_layout *layers = unit_layout(&c, &device), *host, *unpinned, *far;
    uint32_t ids[32];
    struct kvbm_transfer t = {.size = sizeof(t), .src_blocks = ids, .dst_blocks = ids, .n = 32};
    struct kvbm_done done;

    (void)state;
    c.kind = KVBM_FULLY_CONTIGUOUS;
    host = unit_layout(&c, &pinned);
    unpinned = unit_layout(&c, &plain);
    far = unit_layout(&c, &other_device);
    for (uint32_t i = 0; i < 32; i++)
        ids[i] = i;
    batches(), copies();
    for (int i = 0; i < 4; i++) {
        bool one_call = batching && i == 0; /* memory that moves, and other GPUs': piece by piece */
        struct kvbm_copier *copier = copier_with(i == 3 ? KVBM_GPU_SINGLE : KVBM_GPU_ENGINES);

        t.src = layers;
        t.dst = i == 1 ? unpinned : i == 2 ? far : host;
        assert_int_equal(wait_for(copier, &t, &done), 0);
        assert_int_equal(batches(), one_call ? 4 : 0);
        assert_int_equal(copies(), one_call ? 0 : 32 * 4);
        kvbm_copier_destroy(copier);
    }
    kvbm_layout_destroy(layers);
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(unpinned);
    kvbm_layout_destroy(far);
}

/* Scattered blocks of 256 KiB, eight a call. A driver without batches can't fail in one. */
static void check_batch_that_fails(int code, bool refused)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 32,
                                   .num_layers = 4,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 1024};
    struct kvbm_layout *src = unit_layout(&c, &device), *dst = unit_layout(&c, &pinned);
    struct kvbm_copier *copier = copier_of();
    uint32_t from_ids[32], to_ids[32], lost = 0;
    uint8_t ok[4];
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = src,
                              .dst = dst,
                              .src_blocks = from_ids,
                              .dst_blocks = to_ids,
                              .n = 32,
                              .ok = ok};
    size_t block = (size_t)kvbm_layout_get_shape(src)->natural_block_bytes;
    struct rng rng = {test_seed()};
    struct kvbm_done done;
    struct bytes from, got;

    for (uint32_t i = 0; i < 32; i++) {
        from_ids[i] = i * 7 % 32;
        to_ids[i] = i * 5 % 32;
    }
    unit_fill(src, &rng, false);
    unit_fill(dst, &rng, false);
    batches(), copies();
    fail_batch(code);
    assert_int_equal(wait_for(copier, &t, &done), refused ? 0 : -EIO);
    assert_int_equal(batches(), !batching ? 0 : refused ? 1 : 4);
    assert_int_equal(copies(), refused ? 32 : 0);
    from = unit_snapshot(src);
    got = unit_snapshot(dst);
    for (uint32_t i = 0; i < 32; i++) {
        if (ok[i / 8] >> i % 8 & 1)
            assert_memory_equal(from.at + from_ids[i] * block, got.at + to_ids[i] * block, block);
        else
            lost++;
    }
    assert_int_equal(lost, refused ? 0 : 8);
    assert_int_equal(done.n_ok, 32 - lost);
    free(from.at);
    free(got.at);
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
}

/* A driver that gives a batch up in the middle: as one that has none where it says so, else the chunk is lost. */
static void test_batches_fail(void **state)
{
    (void)state;
    faults(0, 0, 50);
    check_batch_that_fails(1, true);   /* CUDA_ERROR_INVALID_VALUE */
    check_batch_that_fails(801, true); /* CUDA_ERROR_NOT_SUPPORTED */
    check_batch_that_fails(700, !batching);
    faults(0, 0, 0);
    fail_batch(0);
    assert_int_equal(alive(), 0);
}

/* While another thread captures a graph, everything that waits or allocates would break that capture. */
static void test_capture_elsewhere(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 4,
                                   .num_layers = 2,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 64};
    const uint32_t ids[] = {0, 2, 3};
    struct kvbm_transfer t = {.size = sizeof(t), .src_blocks = ids, .dst_blocks = ids, .n = 3};
    struct kvbm_layout *src, *dst;
    struct kvbm_copier *copier;
    struct rng rng = {test_seed()};
    void *event;

    (void)state;
    capture(1);
    src = unit_layout(&c, &device);
    dst = unit_layout(&c, &pinned);
    t.src = src;
    t.dst = dst;
    copier = copier_of();
    assert_int_equal(event_create(&event, 0), 0);
    t.ready_event = event;
    assert_int_equal(unit_round(copier, &t, &rng), 0);
    kvbm_copier_destroy(copier);
    event_destroy(event);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
    assert_int_equal(capture(0), 0);
    assert_int_equal(alive(), 0);
}

/* Locked pages stay behind: a child that has none of them costs its parent no copy. */
static void test_children_have_no_pinned_memory(void **state)
{
    struct kvbm_storage_opts opts = pinned;
    struct kvbm_storage *storage = NULL;
    unsigned char in_core;
    int status = -1;
    pid_t child;

    (void)state;
    opts.bytes = 4096;
    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    child = fork();
    if (child == 0)
        _exit(mincore(kvbm_storage_host_memory(storage), 4096, &in_core) == 0 || errno != ENOMEM);
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    assert_int_equal(status, 0);
    assert_int_equal(mincore(kvbm_storage_host_memory(storage), 4096, &in_core), 0);
    kvbm_storage_destroy(storage);
}

/* A copy or a record that fails takes its chunk's blocks with it, no others, and nothing hangs. */
static void test_failures(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 20,
                                   .num_layers = 4,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 8192};
    struct kvbm_copier *copier = copier_of();
    struct kvbm_layout *src = unit_layout(&c, &device), *dst = unit_layout(&c, &pinned);
    uint32_t ids[20];
    uint8_t ok[3];
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = src,
                              .dst = dst,
                              .src_blocks = ids,
                              .dst_blocks = ids,
                              .n = 20,
                              .ok = ok};
    struct rng rng = {test_seed()};

    (void)state;
    for (uint32_t i = 0; i < 20; i++)
        ids[i] = i;
    for (int copy = 0; copy < 2; copy++) {
        struct bytes from, got;
        struct kvbm_done done;
        uint32_t lost = 0;
        size_t block = (size_t)kvbm_layout_get_shape(src)->natural_block_bytes;

        unit_fill(src, &rng, false);
        unit_fill(dst, &rng, false);
        faults(copy ? 7 : 0, copy ? 0 : 5, 100);
        assert_int_equal(
            kvbm_copier_wait(copier, (uint64_t)kvbm_copier_submit(copier, &t), 60000, &done), 0);
        assert_int_equal(done.status, -EIO);
        from = unit_snapshot(src);
        got = unit_snapshot(dst);
        for (uint32_t i = 0; i < 20; i++) {
            if (ok[i / 8] >> i % 8 & 1)
                assert_memory_equal(from.at + i * block, got.at + i * block, block);
            else
                lost++;
        }
        assert_int_equal(lost, 1);
        assert_int_equal(done.n_ok, 19);
        free(from.at);
        free(got.at);
        faults(0, 0, 0);
    }
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
    assert_int_equal(alive(), 0);
}

/* Nothing is read before the event; what waits for one can be given up; others aren't kept waiting. */
static void test_events(void **state)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 4,
                                   .num_layers = 2,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 64};
    struct kvbm_copier *copier = copier_of();
    struct kvbm_layout *src = unit_layout(&c, &device), *dst = unit_layout(&c, &pinned);
    const uint32_t a = 0, b = 1;
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = src,
                              .dst = dst,
                              .src_blocks = &a,
                              .dst_blocks = &a,
                              .n = 1},
                         next = t;
    unsigned char *to = kvbm_storage_host_memory(kvbm_layout_storage(dst, 0));
    struct kvbm_done done;
    int64_t first, late, given_up;
    void *event;

    (void)state;
    next.src_blocks = next.dst_blocks = &b;
    assert_int_equal(event_create(&event, 0), 0);
    assert_int_equal(event_record(event, NULL), 0);
    memset(to, 0, 16);
    t.ready_event = event;
    first = kvbm_copier_submit(copier, &t);
    given_up = kvbm_copier_submit(copier, &t);
    t.deadline_ns = kv_now_ns() + 5 * KV_NS_PER_MS;
    late = kvbm_copier_submit(copier, &t);
    assert_true(first > 0 && given_up > 0 && late > 0);
    assert_int_equal(
        kvbm_copier_wait(copier, (uint64_t)kvbm_copier_submit(copier, &next), 60000, &done), 0);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)late, 60000, &done), 0);
    assert_int_equal(done.status, -ETIMEDOUT);
    assert_int_equal(kvbm_copier_cancel(copier, (uint64_t)given_up), 0);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)given_up, 60000, &done), 0);
    assert_int_equal(done.status, -ECANCELED);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)first, 20, &done), -ETIMEDOUT);
    assert_int_equal(to[0], 0);
    memset((void *)(uintptr_t)kvbm_storage_addr(kvbm_layout_storage(src, 0)), 0x42, 16);
    happen(event);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)first, 60000, &done), 0);
    assert_int_equal(done.status, 0);
    assert_int_equal(to[0], 0x42);
    assert_int_equal(event_record(event, NULL), 0); /* and one that is never going to happen */
    t.deadline_ns = 0;
    assert_true(kvbm_copier_submit(copier, &t) > 0);
    kvbm_copier_destroy(copier);
    event_destroy(event);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
    assert_int_equal(alive(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_gpus_are_left_alone), /* the first */
        cmocka_unit_test(test_every_pair),
        cmocka_unit_test(test_no_such_device),
        cmocka_unit_test(test_who_copies),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_batches_fail),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_capture_elsewhere),
        cmocka_unit_test(test_children_have_no_pinned_memory),
    };

    return cmocka_run_group_tests(tests, set_up, NULL);
}
