// SPDX-License-Identifier: Apache-2.0
/* A host tier in memory of the caller: another process writes and reads its blocks through a mapping
 * of its own, and the manager touches nothing beside them. */
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "../skip.h"
#include "tier/kitchen.h"

#define N 8u

/* Shared memory, mapped twice: by the manager's process, and as another process would. A page without
 * access follows the first mapping. */
struct shared {
    int fd;
    size_t len;
    char *mine, *theirs;
};

static void shared_open(struct shared *s, size_t len)
{
    char *room = mmap(NULL, len + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    *s = (struct shared){.fd = memfd_create("kvasir-test", MFD_CLOEXEC), .len = len};
    assert_true(s->fd >= 0 && room != MAP_FAILED);
    assert_int_equal(ftruncate(s->fd, (off_t)len), 0);
    s->mine = mmap(room, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s->fd, 0);
    s->theirs = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
    assert_true(s->mine == room && s->theirs != MAP_FAILED);
}

static void shared_close(struct shared *s)
{
    munmap(s->mine, s->len + 4096);
    munmap(s->theirs, s->len);
    close(s->fd);
}

/* A manager's options, with the whole of a new shared memory as its host tier. */
static void lend(struct world *w, struct shared *s, size_t len)
{
    world_init(w, N);
    shared_open(s, len);
    w->opts.host_memory = s->mine;
    w->opts.host_bytes = s->len;
}

static void start(struct world *w, struct shared *s, uint64_t extra)
{
    lend(w, s, N * HOST_STRIDE + extra);
    w->opts.disk = w->disk;
    w->opts.disk_bytes = UINT64_C(64) * HOST_STRIDE;
    w->opts.disk_buffered = true;
    w->opts.fingerprint = "test";
    world_start(w);
}

static unsigned char byte_of(uint64_t key, uint32_t i)
{
    return (unsigned char)(key * 31 + i % 251);
}

/* Run in another process: write the blocks' bytes, or compare them. True: the bytes were right. */
static bool elsewhere(const struct shared *s, const uint32_t *blocks, const uint64_t *keys,
                      uint32_t n, bool write)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t k = 0; k < BLOCK_BYTES; k++) {
                char *at = s->theirs + (size_t)blocks[i] * HOST_STRIDE + k;

                if (write)
                    *at = (char)byte_of(keys[i], k);
                else if ((unsigned char)*at != byte_of(keys[i], k))
                    _exit(1);
            }
        }
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void store_elsewhere(struct world *w, const struct shared *s, uint64_t first)
{
    uint64_t keys[N];
    uint32_t blocks[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    world_keys(first, keys, N);
    assert_int_equal(kvbm_manager_prepare_store(w->m, &chain, N, &pin), N);
    assert_int_equal(kvbm_pin_blocks(pin, blocks), N);
    assert_true(elsewhere(s, blocks, keys, N, true));
    assert_int_equal(kvbm_pin_commit(pin, NULL), N);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_drain(w->m, 60000), 0);
}

static void load_elsewhere(struct world *w, const struct shared *s, uint64_t first)
{
    uint64_t keys[N];
    uint32_t blocks[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    world_keys(first, keys, N);
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, N, NULL, &pin), N);
    assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
    assert_int_equal(kvbm_pin_blocks(pin, blocks), N);
    assert_true(elsewhere(s, blocks, keys, N, false));
    kvbm_pin_release(pin);
}

/* Each prompt fills the host tier: the one before it is on the disk only, also after a restart. */
static void test_blocks_of_another_process(void **state)
{
    struct shared s;
    struct world w;

    (void)state;
    start(&w, &s, 0);
    for (uint64_t first = 1000; first < 5000; first += 1000)
        store_elsewhere(&w, &s, first);
    for (uint64_t first = 1000; first < 5000; first += 1000)
        load_elsewhere(&w, &s, first);
    world_stop(&w);
    memset(s.mine, 0xee, s.len);
    world_start(&w);
    for (uint64_t first = 1000; first < 5000; first += 1000)
        load_elsewhere(&w, &s, first);
    world_fini(&w);
    shared_close(&s);
}

/* A cache's blocks go through the caller's memory, and nothing behind the last whole block changes. */
static void test_nothing_else_is_touched(void **state)
{
    struct kvbm_view view;
    struct shared s;
    struct world w;

    (void)state;
    start(&w, &s, 4096);
    memset(s.mine + (size_t)N * HOST_STRIDE, 0x5a, 4096);
    assert_int_equal(kvbm_layout_block(kvbm_manager_host_layout(w.m), N - 1, &view), 0);
    assert_int_equal(view.addr, (uintptr_t)s.mine + (size_t)(N - 1) * HOST_STRIDE);
    assert_int_equal(kvbm_layout_get_shape(kvbm_manager_host_layout(w.m))->block_stride,
                     HOST_STRIDE);
    world_attach(&w, false);
    for (uint64_t first = 1000; first < 4000; first += 1000) {
        assert_int_equal(world_store(&w, first, N), N);
        assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    }
    for (uint64_t first = 1000; first < 4000; first += 1000)
        assert_int_equal(world_load(&w, first, N), N);
    assert_int_equal(world_stats(&w).host.capacity, N);
    world_stop(&w);
    for (uint32_t i = 0; i < 4096; i++)
        assert_int_equal((unsigned char)s.mine[(size_t)N * HOST_STRIDE + i], 0x5a);
    world_fini(&w);
    shared_close(&s);
}

static void test_refusals(void **state)
{
    struct kvbm_manager *made = NULL;
    struct shared s;
    struct world w;

    (void)state;
    world_init(&w, N);
    shared_open(&s, N * HOST_STRIDE);
    w.opts.host_memory = s.mine + 512;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_memory = s.mine;
    w.opts.host_bytes = HOST_STRIDE - 1; /* no block */
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_bytes = 0;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_bytes = s.len;
    w.opts.huge_pages = true;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.huge_pages = false;
    w.opts.host_pinned = true;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_pinned = false;
    w.opts.size = offsetof(struct kvbm_manager_opts, host_memory); /* an older caller */
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    assert_null(memchr(s.mine, 1, s.len));
    world_fini(&w);
    shared_close(&s);
}

/* ---- memory without pages ---- */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* False before Linux 5.14, and under emulators that ignore the advice. */
static bool kernel_populates(void)
{
    struct shared s;
    bool does;

    shared_open(&s, 8192);
    assert_int_equal(ftruncate(s.fd, 4096), 0);
    does = madvise(s.mine, s.len, MADV_POPULATE_WRITE) < 0 && errno == EFAULT;
    shared_close(&s);
    if (!does)
        skip_because("the kernel has no MADV_POPULATE_WRITE");
    return does;
}

/* Memory beyond its file's end is refused: a copy into it would end the process by SIGBUS. */
static void test_memory_beyond_its_file(void **state)
{
    struct kvbm_manager *made = NULL;
    struct shared s;
    struct world w;

    (void)state;
    if (!kernel_populates())
        return;
    lend(&w, &s, N * HOST_STRIDE);
    assert_int_equal(ftruncate(s.fd, (off_t)(s.len - 4096)), 0);
    for (int again = 0; again < 2; again++) /* a refusal gives the memory back */
        assert_int_equal(kvbm_manager_create(&w.opts, &made), -ENOSPC);
    w.opts.host_bytes = s.len - HOST_STRIDE; /* the file has all pages of these blocks */
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    world_fini(&w);
    shared_close(&s);
}

/* Every page of the blocks is there after create, with the bytes that it had. */
static void test_memory_is_touched(void **state)
{
    unsigned char pages[N * HOST_STRIDE / 4096];
    struct kvbm_manager *made = NULL;
    struct shared s;
    struct world w;

    (void)state;
    if (!kernel_populates())
        return;
    lend(&w, &s, N * HOST_STRIDE);
    memset(s.theirs, 0x5a, 4096);
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_int_equal(mincore(s.theirs, s.len, pages), 0);
    for (size_t i = 0; i < sizeof(pages); i++)
        assert_true(pages[i] & 1);
    for (size_t i = 0; i < s.len; i++)
        assert_int_equal((unsigned char)s.theirs[i], i < 4096 ? 0x5a : 0);
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    world_fini(&w);
    shared_close(&s);
}

/* ---- memory of two managers ---- */

/* Two managers in one memory would overwrite each other's blocks: one has it at a time. */
static void test_one_manager_at_a_time(void **state)
{
    struct kvbm_manager *first = NULL, *second = NULL;
    struct shared s;
    struct world w;

    (void)state;
    world_init(&w, N);
    shared_open(&s, 3 * N * HOST_STRIDE);
    w.opts.host_memory = s.mine + N * HOST_STRIDE;
    w.opts.host_bytes = N * HOST_STRIDE;
    assert_int_equal(kvbm_manager_create(&w.opts, &first), 0);
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.host_bytes = HOST_STRIDE; /* within */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.host_memory = s.mine + (2 * N - 1) * HOST_STRIDE; /* its end, and behind */
    w.opts.host_bytes = N * HOST_STRIDE;
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.host_memory = s.mine; /* around */
    w.opts.host_bytes = s.len;
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.host_bytes = N * HOST_STRIDE + 4096; /* before, and its beginning */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.host_bytes = N * HOST_STRIDE; /* beside */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), 0);
    assert_int_equal(kvbm_manager_destroy(second, 10000), 0);
    w.opts.host_memory = s.mine + 2 * N * HOST_STRIDE; /* beside, behind */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), 0);
    assert_int_equal(kvbm_manager_destroy(first, 10000), 0);
    w.opts.host_memory = s.mine;
    w.opts.host_bytes = 2 * N * HOST_STRIDE; /* the first one's, free again */
    assert_int_equal(kvbm_manager_create(&w.opts, &first), 0);
    assert_int_equal(kvbm_manager_destroy(first, 10000), 0);
    assert_int_equal(kvbm_manager_destroy(second, 10000), 0);
    world_fini(&w);
    shared_close(&s);
}

/* A destroy that did nothing keeps the memory. */
static void test_kept_by_a_busy_manager(void **state)
{
    struct kvbm_manager *made = NULL;
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct shared s;
    struct world w;

    (void)state;
    start(&w, &s, 0);
    world_keys(1000, keys, N);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, N, &pin), N);
    assert_int_equal(kvbm_manager_destroy(w.m, 0), -EBUSY);
    w.opts.disk = NULL;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EBUSY);
    kvbm_pin_release(pin);
    world_stop(&w);
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    world_fini(&w);
    shared_close(&s);
}

#if !defined(__SANITIZE_THREAD__) /* which lets no child of several threads start one */
/* A child has none of its parent's managers: it makes one in its own copy of the memory. */
static void test_child(void **state)
{
    char *memory =
        mmap(NULL, N * HOST_STRIDE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct kvbm_manager *parents = NULL, *childs = NULL;
    struct world w;
    int status;
    pid_t child;

    (void)state;
    assert_true(memory != MAP_FAILED);
    world_init(&w, N);
    w.opts.host_memory = memory;
    w.opts.host_bytes = N * HOST_STRIDE;
    assert_int_equal(kvbm_manager_create(&w.opts, &parents), 0);
    child = fork();
    if (child == 0)
        _exit(kvbm_manager_create(&w.opts, &childs) < 0 ||
              kvbm_manager_create(&w.opts, &parents) != -EBUSY ||
              kvbm_manager_destroy(childs, 10000) < 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(kvbm_manager_create(&w.opts, &childs), -EBUSY);
    assert_int_equal(kvbm_manager_destroy(parents, 10000), 0);
    world_fini(&w);
    munmap(memory, N * HOST_STRIDE);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_of_another_process),
        cmocka_unit_test(test_nothing_else_is_touched),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_memory_beyond_its_file),
        cmocka_unit_test(test_memory_is_touched),
        cmocka_unit_test(test_one_manager_at_a_time),
        cmocka_unit_test(test_kept_by_a_busy_manager),
#if !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(test_child),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
