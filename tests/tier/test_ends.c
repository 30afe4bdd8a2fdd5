// SPDX-License-Identifier: Apache-2.0
/* Destroying managers and copiers. Held objects make destroy refuse before it changes anything.
 * A disk that doesn't answer keeps the manager and its memory beyond the timeout, but not the
 * caller. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "base/core/clock.h"
#include "kvbm.h"
#include "skip.h"
#include "tier/kitchen.h"
#include "tier/manager/state/manager.h"

#define N 8u

/* ---- a disk that hangs ---- */

/*
 * With threads: pread and pwrite of this program, which wait at the gate. With io_uring: the slots'
 * descriptor is a pipe's for a while, which has nothing to read and no room to write: the kernel
 * has the requests, and keeps them.
 */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t open;
    bool shut;
    int n_waiting;
    int fd, saved, pipe[2];
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .open = PTHREAD_COND_INITIALIZER};

static void pass(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.n_waiting++;
    while (gate.shut)
        pthread_cond_wait(&gate.open, &gate.lock);
    gate.n_waiting--;
    pthread_mutex_unlock(&gate.lock);
}

ssize_t pread(int fd, void *to, size_t len, off_t offset)
{
    pass();
    return syscall(SYS_pread64, fd, to, len, offset);
}

ssize_t pwrite(int fd, const void *from, size_t len, off_t offset)
{
    pass();
    return syscall(SYS_pwrite64, fd, from, len, offset);
}

static int fd_of(const char *name)
{
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *entry;
    int found = -1;

    assert_non_null(dir);
    while (found < 0 && (entry = readdir(dir))) {
        char path[512], to[256];
        ssize_t len;

        snprintf(path, sizeof(path), "/proc/self/fd/%s", entry->d_name);
        len = readlink(path, to, sizeof(to) - 1);
        if (len <= 0)
            continue;
        to[len] = '\0';
        if (strstr(to, name))
            found = (int)strtol(entry->d_name, NULL, 10);
    }
    closedir(dir);
    assert_true(found >= 0);
    return found;
}

static void shut(enum kvbm_io io)
{
    if (io == KVBM_IO_THREADS) {
        pthread_mutex_lock(&gate.lock);
        gate.shut = true;
        pthread_mutex_unlock(&gate.lock);
        return;
    }
    gate.fd = fd_of("kvbm-cache.slots");
    gate.saved = fcntl(gate.fd, F_DUPFD_CLOEXEC, 3);
    assert_int_equal(pipe2(gate.pipe, O_CLOEXEC), 0);
    assert_true(dup2(gate.pipe[0], gate.fd) >= 0);
}

static bool is_hung(enum kvbm_io io)
{
    bool hung;
    int left;

    if (io == KVBM_IO_URING)
        return ioctl(gate.pipe[0], FIONREAD, &left) == 0 && left == 0;
    pthread_mutex_lock(&gate.lock);
    hung = gate.n_waiting > 0;
    pthread_mutex_unlock(&gate.lock);
    return hung;
}

/* Until the disk has a request. With io_uring: a byte was read from the pipe, and the rest of them
 * is waited for. */
static void wait_for_hung(enum kvbm_io io)
{
    if (io == KVBM_IO_URING)
        assert_int_equal(write(gate.pipe[1], "", 1), 1);
    wait_until(is_hung(io));
}

/* Let hanging requests go on; with io_uring they fail, as the pipe has ended. */
static void reopen(enum kvbm_io io)
{
    if (io == KVBM_IO_THREADS) {
        pthread_mutex_lock(&gate.lock);
        gate.shut = false;
        pthread_cond_broadcast(&gate.open);
        pthread_mutex_unlock(&gate.lock);
        return;
    }
    assert_true(dup2(gate.saved, gate.fd) >= 0);
    close(gate.saved);
    close(gate.pipe[0]);
    close(gate.pipe[1]);
}

/* ---- worlds ---- */

/* False: io_uring is refused here. */
static bool start(struct world *w, enum kvbm_io io)
{
    int rc;

    world_init(w, 32);
    w->opts.disk = w->disk;
    w->opts.disk_bytes = UINT64_C(64) * HOST_STRIDE;
    w->opts.io = io;
    w->opts.host_eviction = KVBM_EVICT_LINEAGE;
    rc = kvbm_manager_create(&w->opts, &w->m);
    if (rc == -ENOTSUP && io == KVBM_IO_URING) {
        world_fini(w);
        return false;
    }
    assert_int_equal(rc, 0);
    world_attach(w, false);
    return true;
}

static void only_on_disk(struct world *w, uint64_t first)
{
    assert_int_equal(world_store(w, first, N), N);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST)), N);
    assert_int_equal(world_where(w, first, N - 1), KVBM_ON_DISK);
}

static uint64_t ms_since(uint64_t start_ns)
{
    return (kv_now_ns() - start_ns) / KV_NS_PER_MS;
}

/* Of other blocks than world_store's, and not before @fd is readable, if it is one. */
static int64_t begin_store(struct world *w, uint64_t first, int fd)
{
    static uint32_t blocks[N];
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {
        .size = sizeof(job), .cache = w->cache, .blocks = blocks, .ready_fd = fd};
    int64_t id;

    world_keys(first, keys, N);
    for (uint32_t i = 0; i < N; i++) {
        blocks[i] = N + i;
        world_fill(w, N + i, keys[i]);
    }
    assert_int_equal(kvbm_manager_prepare_store(w->m, &chain, N, &job.pin), N);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

/* As world_load, into blocks from @to on, but it isn't waited for. */
static int64_t begin_load(struct world *w, uint64_t first, uint32_t to)
{
    static uint32_t blocks[N];
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks};
    int64_t id;

    world_keys(first, keys, N);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = to + i;
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, N, NULL, &job.pin), N);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

static struct kvbm_done ended(struct world *w, int64_t id)
{
    struct kvbm_done done;

    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, 30000, &done), 0);
    return done;
}

static void gone(struct world *w)
{
    assert_int_equal(world_destroy(w, 30000), 0);
    world_fini(w);
}

/* ---- handles that are held ---- */

struct hold {
    struct kvbm_immutable immutable, clone;
    struct kvbm_mutable mutable;
    struct kvbm_complete complete;
};

static uint64_t stored_key = 100, other_key = 5000;

static void hold_immutable(struct kvbm_pool *pool, struct hold *hold)
{
    assert_int_equal(kvbm_pool_match(pool, 0, &stored_key, 1, 0, &hold->immutable), 1);
}

/* The one that the manager moves the block with may be a second one. */
static void hold_twice(struct kvbm_pool *pool, struct hold *hold)
{
    hold_immutable(pool, hold);
    assert_int_equal(kvbm_immutable_clone(&hold->immutable, &hold->clone), 0);
}

static void hold_mutable(struct kvbm_pool *pool, struct hold *hold)
{
    assert_int_equal(kvbm_pool_allocate(pool, 1, &hold->mutable, NULL), 0);
}

static void hold_complete(struct kvbm_pool *pool, struct hold *hold)
{
    const struct kvbm_chain chain = world_chain(&other_key);
    struct kvbm_mutable block;

    assert_int_equal(kvbm_pool_allocate(pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_pool_complete(pool, &block, 1, &chain, &hold->complete), 0);
}

static const struct {
    enum kv_tier tier;
    void (*hold)(struct kvbm_pool *pool, struct hold *hold);
} holds[] = {{KV_TIER_HOST, hold_immutable}, {KV_TIER_HOST, hold_twice},
             {KV_TIER_HOST, hold_mutable},   {KV_TIER_HOST, hold_complete},
             {KV_TIER_DISK, hold_immutable}, {KV_TIER_DISK, hold_mutable}};

static void let_go(struct hold *hold)
{
    kvbm_immutable_release(&hold->immutable);
    kvbm_immutable_release(&hold->clone);
    kvbm_mutable_release(&hold->mutable);
    kvbm_complete_release(&hold->complete);
}

/* Nothing is done, whatever is under way: jobs that wait for their producer, blocks that wait to go
 * down. */
static void test_held(void **state)
{
    uint64_t one = 1;

    (void)state;
    for (size_t i = 0; i < sizeof(holds) / sizeof(holds[0]); i++) {
        struct hold hold = {0};
        struct kvbm_done done;
        struct world w;
        int ready = eventfd(0, EFD_CLOEXEC);
        int64_t waits;
        uint64_t from;

        start(&w, KVBM_IO_THREADS);
        assert_int_equal(world_store(&w, stored_key, N), N);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        holds[i].hold(kvbm_manager_pool(w.m, holds[i].tier), &hold);
        waits = begin_store(&w, 200, ready);
        from = kv_now_ns();
        assert_int_equal(kvbm_manager_destroy(w.m, 100000), -EBUSY);
        assert_true(ms_since(from) < 50000); /* it didn't wait for anything */

        assert_int_equal(write(ready, &one, sizeof(one)), sizeof(one));
        done = ended(&w, waits);
        assert_int_equal(done.status, 0);
        assert_int_equal(done.n_ok, N);
        assert_int_equal(world_store(&w, 300, N), N);
        assert_int_equal(world_load(&w, 200, N), N);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        assert_int_equal(world_stats(&w).disk.used, 3 * N);
        assert_int_equal(world_stats(&w).disk.dropped + world_stats(&w).jobs_cancelled, 0);
        assert_int_equal(kvbm_manager_destroy(w.m, 0), -EBUSY);

        let_go(&hold);
        gone(&w);
        close(ready);
    }
}

/* A manager's own handles aren't taken for somebody's: blocks on their way down and up, pins of jobs
 * that nobody waits for. */
static void test_own(void **state)
{
    (void)state;
    for (int round = 0; round < 10; round++) {
        struct world w;

        start(&w, round % 2 ? KVBM_IO_THREADS : KVBM_IO_AUTO);
        only_on_disk(&w, 100);
        begin_load(&w, 100, 0);
        begin_store(&w, 200, -1);
        begin_load(&w, 100, 2 * N);
        gone(&w);
    }
}

/* A cache with a job is as it was; the job ends, another one can be begun. */
static void test_detach(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    uint64_t one = 1;
    struct world w;
    int64_t waits;

    (void)state;
    start(&w, KVBM_IO_THREADS);
    waits = begin_store(&w, 100, ready);
    assert_int_equal(kvbm_cache_detach(w.cache), -EBUSY);
    assert_int_equal(world_store(&w, 200, N), N);
    assert_int_equal(kvbm_cache_detach(w.cache), -EBUSY);
    assert_int_equal(write(ready, &one, sizeof(one)), sizeof(one));
    assert_int_equal(ended(&w, waits).status, 0);
    assert_int_equal(world_load(&w, 100, N), N);
    world_fini(&w); /* detaches it */
    close(ready);
}

#define WAITERS 64

struct waiter {
    struct world *w;
    uint64_t id; /* 0: until nothing goes down */
    int rc;
    struct kvbm_done done;
};

static uint32_t n_waiters(struct kvbm_manager *m)
{
    uint32_t n;

    kvbm_manager_enter(m);
    n = m->n_waiters;
    kvbm_manager_leave(m);
    return n;
}

static void *wait_for(void *arg)
{
    struct waiter *waiter = arg;

    waiter->rc = waiter->id ? kvbm_manager_wait(waiter->w->m, waiter->id, 60000, &waiter->done)
                            : kvbm_manager_drain(waiter->w->m, 60000);
    return NULL;
}

/* A thread that waits for a job cancelled by destroy gets its result before the manager is
 * freed. */
static void test_waited_for(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct waiter waiters[WAITERS];
    pthread_t threads[WAITERS];
    struct world w;

    (void)state;
    for (int round = 0; round < 5; round++) {
        world_init(&w, WAITERS * N);
        world_start(&w);
        world_attach(&w, false);
        for (int i = 0; i < WAITERS; i++) {
            waiters[i] = (struct waiter){.w = &w};
            if (i % 4)
                waiters[i].id = (uint64_t)begin_store(&w, 100 * ((uint64_t)i + 1), ready);
            assert_int_equal(pthread_create(&threads[i], NULL, wait_for, &waiters[i]), 0);
        }
        for (int i = 0; i < WAITERS; i += 4) /* nothing to wait for */
            pthread_join(threads[i], NULL);
        wait_until(n_waiters(w.m) >= WAITERS / 4 * 3);
        assert_int_equal(world_destroy(&w, 0), 0);
        for (int i = 0; i < WAITERS; i++) {
            if (i % 4)
                pthread_join(threads[i], NULL);
            assert_int_equal(waiters[i].rc, 0);
            assert_int_equal(waiters[i].done.status, i % 4 ? -ECANCELED : 0);
        }
        world_fini(&w);
    }
    close(ready);
}

/* ---- a disk that doesn't answer ---- */

static const enum kvbm_io both[] = {KVBM_IO_THREADS, KVBM_IO_URING};

static void refuses_to_go(struct world *w)
{
    for (uint32_t ms = 0; ms <= 300; ms += 300) {
        uint64_t from = kv_now_ns();

        assert_int_equal(kvbm_manager_destroy(w->m, ms), -ETIMEDOUT);
        assert_in_range(ms_since(from), ms, ms + 50000); /* a second, on an idle machine */
    }
}

/* Reads that the disk has are its own until it answers. The manager is there, with all that it has
 * elsewhere. */
static void test_hung_reads(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(both) / sizeof(both[0]); i++) {
        struct kvbm_done done;
        struct world w;
        int64_t load;

        if (!start(&w, both[i]))
            skip_because("io_uring is refused here (with threads it was tried)");
        only_on_disk(&w, 100);
        assert_int_equal(world_store(&w, 200, 2), 2);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        shut(both[i]);
        load = begin_load(&w, 100, 0);
        wait_for_hung(both[i]);
        refuses_to_go(&w);
        assert_int_equal(world_load(&w, 200, 2), 2); /* of the host tier */

        reopen(both[i]);
        done = ended(&w, load);
        assert_int_equal(done.status, -ECANCELED);
        assert_int_equal(done.n_ok, 0);
        assert_int_equal(world_store(&w, 300, N), N);
        assert_int_equal(world_load(&w, 300, N), N);
        if (both[i] == KVBM_IO_THREADS) /* what came from a pipe isn't what was written */
            assert_int_equal(world_load(&w, 100, N), N);
        gone(&w);
    }
}

static void test_hung_writes(void **state)
{
    struct kvbm_manager_stats stats;
    struct world w;

    (void)state;
    start(&w, KVBM_IO_THREADS);
    only_on_disk(&w, 100);
    shut(KVBM_IO_THREADS);
    assert_int_equal(world_store(&w, 200, N), N); /* waits for the host tier only */
    wait_for_hung(KVBM_IO_THREADS);
    refuses_to_go(&w);
    assert_int_equal(world_load(&w, 200, N), N);
    reopen(KVBM_IO_THREADS);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    stats = world_stats(&w);
    assert_int_equal(stats.disk.failed + stats.disk.bad, 0);
    assert_int_equal(world_load(&w, 100, N), N);
    assert_int_equal(world_store(&w, 300, N), N);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_true(world_stats(&w).disk.used >= 2 * N);
    gone(&w);
}

/* Somebody who holds a block is told that, not that the disk hangs, and at once. */
static void test_hung_and_held(void **state)
{
    struct hold hold = {0};
    struct world w;
    int64_t load;

    (void)state;
    start(&w, KVBM_IO_THREADS);
    only_on_disk(&w, stored_key);
    hold_twice(kvbm_manager_pool(w.m, KV_TIER_DISK), &hold);
    shut(KVBM_IO_THREADS);
    load = begin_load(&w, stored_key, 0);
    wait_for_hung(KVBM_IO_THREADS);
    assert_int_equal(kvbm_manager_destroy(w.m, 20000), -EBUSY);
    let_go(&hold);
    refuses_to_go(&w);
    reopen(KVBM_IO_THREADS);
    assert_int_equal(ended(&w, load).status, -ECANCELED);
    gone(&w);
}

/* ---- a copier ---- */

static struct kvbm_layout *layout_on(enum kvbm_storage_kind kind)
{
    const struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = kind, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    const struct kvbm_layout_config config = world_block();
    struct kvbm_layout *layout = NULL;

    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    return layout;
}

/* kvbm_copier_stop returns in time while a transfer runs; afterwards destroy doesn't wait. */
static void test_engine(void **state)
{
    const struct kvbm_copier_opts opts = {.size = sizeof(opts), .io = KVBM_IO_THREADS};
    struct kvbm_layout *memory = layout_on(KVBM_STORAGE_SYSTEM),
                       *file = layout_on(KVBM_STORAGE_DISK);
    const uint32_t block = 3;
    const struct kvbm_transfer transfer = {.size = sizeof(transfer),
                                           .src = memory,
                                           .dst = file,
                                           .src_blocks = &block,
                                           .dst_blocks = &block,
                                           .n = 1};
    struct kvbm_copier *copier;
    struct kvbm_done done[2];

    (void)state;
    assert_int_equal(kvbm_copier_stop(NULL, 0), 0);
    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    assert_int_equal(kvbm_copier_stop(copier, 0), 0);
    kvbm_copier_destroy(copier);

    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    shut(KVBM_IO_THREADS);
    assert_true(kvbm_copier_submit(copier, &transfer) > 0);
    wait_for_hung(KVBM_IO_THREADS);
    for (int i = 0; i < 2; i++) {
        uint64_t from = kv_now_ns();

        assert_int_equal(kvbm_copier_stop(copier, 200), -ETIMEDOUT);
        assert_in_range(ms_since(from), 200, 50000);
        assert_int_equal(kvbm_copier_submit(copier, &transfer), -ESHUTDOWN);
        assert_int_equal(kvbm_copier_poll(copier, done, 2), 0);
    }
    reopen(KVBM_IO_THREADS);
    assert_int_equal(kvbm_copier_stop(copier, 30000), 0);
    assert_int_equal(kvbm_copier_poll(copier, done, 2), 1);
    assert_int_equal(done[0].n_ok, 1); /* it had begun */
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(memory);
    kvbm_layout_destroy(file);
}

/* A test that fails in between doesn't take the others with it. */
static int open_gate(void **state)
{
    (void)state;
    reopen(KVBM_IO_THREADS);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_own),
        cmocka_unit_test(test_detach),
        cmocka_unit_test(test_waited_for),
        cmocka_unit_test_teardown(test_hung_reads, open_gate),
        cmocka_unit_test_teardown(test_hung_writes, open_gate),
        cmocka_unit_test_teardown(test_hung_and_held, open_gate),
        cmocka_unit_test_teardown(test_engine, open_gate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
