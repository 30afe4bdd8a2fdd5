// SPDX-License-Identifier: Apache-2.0
/* A host tier in memory of the caller: another process writes and reads its blocks through a mapping
 * of its own, and the manager touches nothing beside them. */
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "manager_world.h"

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

static void start(struct world *w, struct shared *s, uint64_t extra)
{
    world_init(w, N);
    shared_open(s, N * HOST_STRIDE + extra);
    w->opts.host_memory = s->mine;
    w->opts.host_bytes = s->len;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_of_another_process),
        cmocka_unit_test(test_nothing_else_is_touched),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
