// SPDX-License-Identifier: Apache-2.0
/* Jobs of the copier: their order, refusals, and every way to end. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "starve.h"
#include "tier/transfer/transfer.h"
#include "transfer_unit.h"

#define BLOCKS 2048

static struct {
    struct kvbm_copier *copier;
    struct kvbm_layout *src, *dst; /* small blocks */
    uint32_t ids[BLOCKS];
    sem_t gate, at_gate;
    pthread_mutex_t lock;
    struct kvbm_done told[BLOCKS];
    uint32_t n_told;
} w;

static struct kvbm_layout *blocks_of(uint32_t n, uint32_t inner)
{
    struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = n,
                                   .num_layers = 2,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = inner};

    return unit_layout(&c, &memory);
}

static void open_engine(struct kvbm_copier_opts opts)
{
    opts.size = sizeof(opts);
    assert_int_equal(kvbm_copier_create(&opts, &w.copier), 0);
    w.n_told = 0;
}

static int set_up(void **state)
{
    (void)state;
    w.src = blocks_of(BLOCKS, 16);
    w.dst = blocks_of(BLOCKS, 16);
    for (uint32_t i = 0; i < BLOCKS; i++)
        w.ids[i] = i;
    sem_init(&w.gate, 0, 0);
    sem_init(&w.at_gate, 0, 0);
    pthread_mutex_init(&w.lock, NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvbm_layout_destroy(w.src);
    kvbm_layout_destroy(w.dst);
    return 0;
}

static void tell(void *arg, const struct kvbm_done *done)
{
    (void)arg;
    pthread_mutex_lock(&w.lock);
    w.told[w.n_told++ % BLOCKS] = *done;
    pthread_mutex_unlock(&w.lock);
}

static uint32_t n_told(void)
{
    uint32_t n;

    pthread_mutex_lock(&w.lock);
    n = w.n_told;
    pthread_mutex_unlock(&w.lock);
    return n;
}

static void stop_at_gate(void *arg, const struct kvbm_done *done)
{
    (void)arg, (void)done;
    sem_post(&w.at_gate);
    sem_wait(&w.gate);
}

static struct kvbm_transfer one(uint32_t first, uint32_t n)
{
    return (struct kvbm_transfer){.size = sizeof(struct kvbm_transfer),
                                  .src = w.src,
                                  .dst = w.dst,
                                  .src_blocks = w.ids + first,
                                  .dst_blocks = w.ids + first,
                                  .n = n};
}

static int64_t submit(struct kvbm_transfer t)
{
    return kvbm_copier_submit(w.copier, &t);
}

/* From here on the only thread of the copier is in a callback, until the gate is opened. */
static void close_gate(void)
{
    struct kvbm_transfer t = one(BLOCKS - 1, 1);

    t.done = stop_at_gate;
    assert_true(submit(t) > 0);
    sem_wait(&w.at_gate);
}

static void open_gate(void)
{
    sem_post(&w.gate);
}

static void wait_told(uint32_t n)
{
    uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S;

    while (n_told() < n && kv_now_ns() < until)
        usleep(500);
    assert_int_equal(n_told(), n);
}

static void pause_ms(uint32_t ms)
{
    usleep(ms * 1000);
}

static struct kvbm_copier_stats stats(void)
{
    struct kvbm_copier_stats s = {.size = sizeof(s)};

    kvbm_copier_get_stats(w.copier, &s);
    return s;
}

static void ends(int64_t id, int status, uint32_t n_ok)
{
    struct kvbm_done done;

    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)id, 60000, &done), 0);
    assert_int_equal(done.id, id);
    assert_int_equal(done.status, status);
    assert_int_equal(done.n_ok, n_ok);
}

/* ---- order ---- */

static void test_order(void **state)
{
    struct rng rng = {test_seed()};
    uint32_t n = 500;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    close_gate();
    for (uint32_t i = 0; i < n; i++) {
        struct kvbm_transfer t = one(i, 1 + rng_below(&rng, 3));

        t.flow = rng_below(&rng, 2) ? KVBM_ONBOARD : KVBM_OFFLOAD;
        t.priority = (int32_t)rng_below(&rng, 5) - 2;
        t.done = tell;
        t.tag = (uint64_t)(t.flow == KVBM_OFFLOAD) << 32 | (uint64_t)(100 - t.priority);
        assert_true(submit(t) > 0);
    }
    open_gate();
    wait_told(n);
    for (uint32_t i = 1; i < n; i++) {
        assert_true(w.told[i - 1].tag <= w.told[i].tag);
        if (w.told[i - 1].tag == w.told[i].tag)
            assert_true(w.told[i - 1].id < w.told[i].id);
        assert_int_equal(w.told[i].status, 0);
        assert_true(w.told[i].wait_ns > 0);
    }
    kvbm_copier_destroy(w.copier);
}

/* 512 MiB from a few blocks of 1 MiB: some 50 ms of a thread at least. */
static struct kvbm_layout *large_src, *large_dst;
#define LARGE 512

static struct kvbm_transfer large(void)
{
    static uint32_t from[LARGE];
    struct kvbm_transfer t = one(0, LARGE);

    for (uint32_t i = 0; i < LARGE; i++)
        from[i] = i % 4;
    t.src = large_src;
    t.dst = large_dst;
    t.src_blocks = from;
    return t;
}

static void begin_large(void)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 4,
                                   .num_layers = 2,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 8192};
    struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};

    large_src = unit_layout(&c, &memory);
    c.num_blocks = LARGE;
    large_dst = unit_layout(&c, &memory);
    memset(kvbm_storage_host_memory(kvbm_layout_storage(large_src, 0)), 0x77, (size_t)4 << 20);
}

static void end_large(void)
{
    kvbm_layout_destroy(large_src);
    kvbm_layout_destroy(large_dst);
}

static void wait_begun(uint64_t pieces)
{
    wait_until(stats().pieces != pieces);
}

/* A job under way doesn't keep a more urgent one waiting until its end. */
static void test_overtaking(void **state)
{
    struct kvbm_transfer t = large(), urgent = one(0, 1);
    int64_t slow, fast;

    (void)state;
    begin_large();
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    t = large();
    t.done = tell;
    urgent.flow = KVBM_ONBOARD;
    urgent.done = tell;
    slow = submit(t);
    wait_begun(0);
    fast = submit(urgent);
    assert_true(slow > 0 && fast > 0);
    wait_told(2);
    assert_int_equal(w.told[0].id, fast);
    assert_int_equal(w.told[1].id, slow);
    assert_true(w.told[0].wait_ns < w.told[1].run_ns);
    kvbm_copier_destroy(w.copier);
    end_large();
}

/* ---- bounds ---- */

static void test_bounds(void **state)
{
    struct kvbm_done done[8];
    int64_t id;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1, .max_jobs = 4, .max_blocks = 100});
    close_gate();
    assert_int_equal(submit(one(0, 101)), -EINVAL); /* whoever tries again would for ever */
    id = submit(one(0, 90));
    assert_true(id > 0);
    assert_int_equal(submit(one(0, 11)), -EAGAIN);
    assert_true(submit(one(0, 5)) > 0);
    assert_true(submit(one(0, 5)) > 0);
    assert_int_equal(stats().blocks_now, 100);
    assert_int_equal(submit(one(0, 1)), -EAGAIN);
    assert_int_equal(stats().refused, 2);
    open_gate();
    ends(id, 0, 90);
    wait_until(
        !stats()
             .blocks_now); /* ended, but not polled: they have no blocks, and still a place each */
    assert_int_equal(stats().jobs_now, 2);
    assert_true(submit(one(0, 100)) > 0);
    wait_until(!stats().blocks_now);
    while (submit(one(0, 1)) > 0)
        ;
    assert_int_equal(stats().jobs_now, 4);
    wait_until(!stats().blocks_now);
    assert_int_equal(kvbm_copier_poll(w.copier, done, 8), 4);
    assert_int_equal(stats().jobs_now, 0);
    kvbm_copier_destroy(w.copier);
}

static void test_poll_and_descriptor(void **state)
{
    struct pollfd fd;
    struct kvbm_done done[3];
    int64_t ids[5];

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    fd = (struct pollfd){.fd = kvbm_copier_fd(w.copier), .events = POLLIN};
    assert_int_equal(poll(&fd, 1, 0), 0);
    for (int i = 0; i < 5; i++)
        assert_true((ids[i] = submit(one(0, 1))) > 0);
    assert_int_equal(poll(&fd, 1, 60000), 1);
    wait_until(!stats().blocks_now);
    assert_int_equal(kvbm_copier_poll(w.copier, done, 3), 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(done[i].id, ids[i]);
    assert_int_equal(poll(&fd, 1, 0), 1);
    ends(ids[4], 0, 1); /* out of turn */
    assert_int_equal(kvbm_copier_poll(w.copier, done, 3), 1);
    assert_int_equal(done[0].id, ids[3]);
    assert_int_equal(poll(&fd, 1, 0), 0);
    assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)ids[4], 0, done), -ENOENT);
    assert_int_equal(kvbm_copier_wait(w.copier, 0, 0, done), -ENOENT);
    assert_int_equal(kvbm_copier_wait(w.copier, UINT64_MAX, 0, done), -ENOENT);
    assert_int_equal(kvbm_copier_cancel(w.copier, (uint64_t)ids[4]), -ENOENT);
    assert_int_equal(kvbm_copier_cancel(w.copier, 0), -ENOENT);
    kvbm_copier_destroy(w.copier);
}

/* A waiting thread helps to copy; not when no work is left, and not jobs that aren't ready. */
static void test_waiting_helps(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct kvbm_transfer t = one(0, 8);
    struct kvbm_done done;
    int64_t id;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    close_gate();
    id = submit(one(0, 8));
    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)id, 0, &done), -ETIMEDOUT);
    ends(id, 0, 8);
    t.done =
        tell; /* it isn't waited for, nor its callback called by who tries: he may hold what that takes */
    id = submit(t);
    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)id, 60000, &done), -ENOENT);
    assert_int_equal(n_told(), 0);
    t.done = NULL;
    t.dst_blocks = w.ids + 8;
    t.ready_fd = ready;
    id = submit(t);
    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)id, 20, &done), -ETIMEDOUT);
    assert_int_equal(eventfd_write(ready, 1), 0);
    open_gate();
    ends(id, 0, 8);
    kvbm_copier_destroy(w.copier);
    close(ready);
}

/* ---- cancel ---- */

static void test_cancel_before(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct kvbm_transfer t;
    uint8_t ok[2] = {0xFF, 0xFF};
    int64_t queued, waiting, called;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    close_gate();
    t = one(0, 9);
    t.ok = ok;
    queued = submit(t);
    t.ok = NULL;
    t.ready_fd = ready;
    waiting = submit(t);
    t.done = tell;
    called = submit(t);
    assert_int_equal(kvbm_copier_cancel(w.copier, (uint64_t)queued), 0);
    ends(queued, -ECANCELED, 0);
    assert_int_equal(ok[0], 0);
    assert_int_equal(ok[1], 0);
    assert_int_equal(kvbm_copier_cancel(w.copier, (uint64_t)waiting), 0);
    ends(waiting, -ECANCELED, 0);
    assert_int_equal(kvbm_copier_cancel(w.copier, (uint64_t)called), 0);
    assert_int_equal(kvbm_copier_cancel(w.copier, (uint64_t)called), -ENOENT); /* it ended */
    assert_int_equal(n_told(), 0); /* callbacks are the copier's threads' to call */
    open_gate();
    wait_told(1);
    assert_int_equal(w.told[0].status, -ECANCELED);
    assert_int_equal(stats().cancelled, 3);
    close(ready);
    kvbm_copier_destroy(w.copier);
}

/* Blocks begun are finished, others stay unchanged, and the bitmap tells which. */
static void test_cancel_under_way(void **state)
{
    struct kvbm_transfer t;
    bool cut = false;

    (void)state;
    begin_large();
    open_engine((struct kvbm_copier_opts){.n_threads = 2});
    for (int i = 0; i < 50 && !cut; i++) {
        unsigned char *bytes = kvbm_storage_host_memory(kvbm_layout_storage(large_dst, 0));
        uint64_t pieces = stats().pieces;
        uint8_t ok[LARGE / 8];
        struct kvbm_done done;
        uint32_t n_ok = 0;
        int64_t id;

        memset(bytes, 0, (size_t)LARGE << 20);
        t = large();
        t.ok = ok;
        id = submit(t);
        assert_true(id > 0);
        wait_begun(pieces);
        assert_true(kvbm_copier_cancel(w.copier, (uint64_t)id) <= 0);
        assert_int_equal(kvbm_copier_wait(w.copier, (uint64_t)id, 60000, &done), 0);
        for (uint32_t k = 0; k < LARGE; k++) {
            bool is = ok[k / 8] >> k % 8 & 1;

            n_ok += is;
            assert_int_equal(bytes[((size_t)k << 20)], is ? 0x77 : 0);
            assert_int_equal(bytes[((size_t)k << 20) + (1 << 20) - 1], is ? 0x77 : 0);
        }
        assert_int_equal(done.n_ok, n_ok);
        assert_int_equal(done.bytes, (uint64_t)n_ok << 20);
        cut = n_ok < LARGE;
        assert_int_equal(done.status, cut ? -ECANCELED : 0);
        assert_true(n_ok > 0);
    }
    assert_true(cut);
    kvbm_copier_destroy(w.copier);
    end_large();
}

/* ---- deadlines ---- */

static void test_deadline_storm(void **state)
{
    struct rng rng = {test_seed()};
    uint32_t n = 1000, late = 0;
    struct kvbm_copier_stats told;
    uint64_t begin;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1, .max_jobs = 2000});
    close_gate();
    begin = kv_now_ns();
    for (uint32_t i = 0; i < n; i++) {
        struct kvbm_transfer t = one(i, 1);

        t.deadline_ns = rng_below(&rng, 5) ? begin + rng_below(&rng, 40) * KV_NS_PER_MS
                                           : begin + 3600 * KV_NS_PER_S;
        t.tag = t.deadline_ns;
        t.done = tell;
        assert_true(submit(t) > 0);
    }
    pause_ms(60);
    told = stats();
    assert_int_equal(told.late + told.blocks_now, n); /* ended on time, one by one */
    open_gate();
    wait_told(n);
    for (uint32_t i = 0; i < n; i++) {
        bool was_late = w.told[i].tag < begin + 3000 * KV_NS_PER_S;

        assert_int_equal(w.told[i].status, was_late ? -ETIMEDOUT : 0);
        assert_int_equal(w.told[i].n_ok, !was_late);
        if (was_late) /* no sooner, and not much later */
            assert_true(begin + 10 * KV_NS_PER_S > w.told[i].tag);
        late += was_late;
    }
    assert_true(late > n / 2);
    assert_int_equal(stats().late, late);
    kvbm_copier_destroy(w.copier);
}

/* ---- ready ---- */

static void test_ready_descriptor(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC), pipe_fds[2],
        file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    unsigned char *from = kvbm_storage_host_memory(kvbm_layout_storage(w.src, 0)),
                  *to = kvbm_storage_host_memory(kvbm_layout_storage(w.dst, 0));
    size_t len = (size_t)kvbm_layout_get_shape(w.src)->data_bytes;
    struct kvbm_transfer t = one(0, BLOCKS);
    int64_t first, second, late;
    uint64_t number = 1;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 2});
    memset(from, 1, len);
    memset(to, 0, len);
    t.ready_fd = ready;
    first = submit(t);
    t = one(0, 1); /* on the same descriptor, to the same block: the same bytes */
    t.ready_fd = ready;
    second = submit(t);
    t.deadline_ns = kv_now_ns() + 5 * KV_NS_PER_MS;
    late = submit(t);
    ends(late, -ETIMEDOUT, 0);
    pause_ms(30);
    assert_int_equal(to[0], 0);
    memset(from, 2, len); /* nothing was read before: this is what must arrive */
    stats(); /* takes the lock: the thread sanitizer doesn't see the order that a descriptor makes */
    assert_int_equal(write(ready, &number, sizeof(number)), sizeof(number));
    ends(first, 0, BLOCKS);
    ends(second, 0, 1);
    for (size_t i = 0; i < len; i++)
        assert_int_equal(to[i], 2);
    assert_int_equal(read(ready, &number, sizeof(number)), sizeof(number)); /* left for its owner */

    assert_int_equal(pipe(pipe_fds), 0);
    t = one(0, 1);
    t.ready_fd = pipe_fds[0];
    first = submit(t);
    pause_ms(10);
    close(pipe_fds[1]); /* the producer died */
    ends(first, -EPIPE, 0);
    close(pipe_fds[0]);
    t.ready_fd = file; /* can always be read */
    ends(submit(t), 0, 1);
    close(file);
    close(ready);
    kvbm_copier_destroy(w.copier);
}

/* ---- callbacks ---- */

static void submit_next(void *arg, const struct kvbm_done *done)
{
    struct kvbm_transfer t = one((uint32_t)done->tag % BLOCKS, 1);

    (void)arg;
    assert_int_equal(done->status, 0);
    if (done->tag == 1000) {
        tell(NULL, done);
        return;
    }
    t.tag = done->tag + 1;
    t.done = submit_next;
    assert_true(submit(t) > 0); /* though there may be one job only: the ended one has gone */
}

static void test_callbacks_submit(void **state)
{
    struct kvbm_transfer t = one(0, 1);

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 2, .max_jobs = 1, .max_blocks = 1});
    t.done = submit_next;
    assert_true(submit(t) > 0);
    wait_told(1);
    assert_int_equal(stats().done, 1001);
    assert_int_equal(stats().refused, 0);
    kvbm_copier_destroy(w.copier);
}

/* ---- the end ---- */

static void *wait_for(void *arg)
{
    struct kvbm_done done;
    uint64_t id = (uint64_t)(uintptr_t)arg;

    assert_int_equal(kvbm_copier_wait(w.copier, id, 60000, &done), 0);
    assert_int_equal(done.status, -ECANCELED);
    return NULL;
}

static void submit_again(void *arg, const struct kvbm_done *done)
{
    struct kvbm_transfer t = one(0, 1);
    int64_t id;

    t.done = submit_again;
    id = submit(t);
    assert_true(id > 0 || id == -ESHUTDOWN);
    if (id < 0)
        tell(arg, done);
}

static void test_destroy_while_busy(void **state)
{
    struct rng rng = {test_seed()};

    (void)state;
    begin_large();
    for (long round = 0; round < test_rounds(40); round++) {
        int ready = eventfd(0, EFD_CLOEXEC);
        struct kvbm_transfer t = one(0, 3);
        pthread_t waiter;
        int64_t id;

        open_engine((struct kvbm_copier_opts){.n_threads = 1 + rng_below(&rng, 3)});
        t.ready_fd = ready;
        id = submit(t);
        assert_int_equal(pthread_create(&waiter, NULL, wait_for, (void *)(uintptr_t)id), 0);
        for (bool inside = false; !inside;
             usleep(100)) { /* else it would come to a destroyed copier */
            pthread_mutex_lock(&w.copier->lock);
            inside = w.copier->n_waiters > 0;
            pthread_mutex_unlock(&w.copier->lock);
        }
        t.done = tell;
        t.deadline_ns = kv_now_ns() + rng_below(&rng, 3) * KV_NS_PER_MS;
        assert_true(submit(t) > 0);
        t = large();
        t.done = tell;
        assert_true(submit(t) > 0);
        t = one(0, 1);
        t.done = submit_again;
        assert_true(submit(t) > 0);
        for (int i = 0; i < 20; i++)
            assert_true(submit(one(0, 1)) > 0);
        while (kvbm_copier_wait(w.copier, (uint64_t)id, 0, NULL) != -ETIMEDOUT)
            ;
        usleep(rng_below(&rng, 3000));
        kvbm_copier_destroy(w.copier);
        pthread_join(waiter, NULL);
        assert_int_equal(w.n_told, 3);
        close(ready);
    }
    kvbm_copier_destroy(NULL);
    end_large();
}

/* Stopped is stopped: 0 says that no callback runs, or will run, either. */
static void test_stop_waits_for_callbacks(void **state)
{
    struct kvbm_transfer t = one(0, 1);

    (void)state;
    t.done = tell;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    close_gate();
    assert_true(submit(t) > 0); /* cancelled, and its callback behind the one that is held up */
    assert_int_equal(kvbm_copier_stop(w.copier, 50), -ETIMEDOUT);
    assert_int_equal(submit(t), -ESHUTDOWN);
    open_gate();
    assert_int_equal(kvbm_copier_stop(w.copier, 60000), 0);
    assert_int_equal(n_told(), 1);
    kvbm_copier_destroy(w.copier);
    assert_int_equal(n_told(), 1);
}

static void test_fork(void **state)
{
    struct kvbm_done done;
    int64_t id;
    int status;
    pid_t child;

    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 2});
    id = submit(one(0, 1));
    child = fork();
    if (child == 0) {
        bool right = submit(one(0, 1)) == -ESHUTDOWN &&
                     kvbm_copier_wait(w.copier, (uint64_t)id, 1000, &done) == -ENOENT &&
                     kvbm_copier_poll(w.copier, &done, 1) == 0 &&
                     kvbm_copier_cancel(w.copier, (uint64_t)id) == -ENOENT &&
                     stats().submitted == 0;

        kvbm_copier_destroy(w.copier);
        _exit(right ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    ends(id, 0, 1);
    kvbm_copier_destroy(w.copier);
}

/* ---- memory ---- */

static void test_starved(void **state)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 2, .max_jobs = 8};
    struct kvbm_copier_stats before = {.size = sizeof(before)};
    struct kvbm_transfer t = one(0, 200);
    long n;
    int64_t rc;

    (void)state;
    for (n = 1;; n++) {
        starve_at(n);
        rc = kvbm_copier_create(&opts, &w.copier);
        if (!starved())
            break;
        starve_at(0);
        assert_int_equal(rc, -ENOMEM);
    }
    starve_at(0);
    assert_int_equal(rc, 0);
    assert_true(n > 10);
    before = stats();
    for (n = 1;; n++) {
        struct kvbm_copier_stats now = {.size = sizeof(now)};

        starve_at(n);
        rc = kvbm_copier_submit(w.copier, &t);
        if (!starved())
            break;
        starve_at(0);
        assert_int_equal(rc, -ENOMEM);
        now = stats();
        assert_memory_equal(&now, &before, sizeof(now));
    }
    starve_at(0);
    assert_int_equal(n, 2); /* a job is one allocation, however large */
    ends(rc, 0, 200);
    kvbm_copier_destroy(w.copier);
}

/* The first job of a file opens the lanes for it: half-opened ones are taken down, and the next job
 * tries again. */
static void test_starved_file(void **state)
{
    struct kvbm_copier_opts opts = {
        .size = sizeof(opts), .n_threads = 1, .io = KVBM_IO_THREADS, .io_depth = 2};
    struct kvbm_storage_opts disk = {.size = sizeof(disk), .kind = KVBM_STORAGE_DISK};
    struct kvbm_layout *file = unit_layout(kvbm_layout_get_config(w.src), &disk);
    struct kvbm_transfer t = one(0, 3);
    bool happened = true;
    long refused = 0;

    (void)state;
    t.dst = file;
    for (long n = 1; happened; n++) {
        int64_t id;

        assert_int_equal(kvbm_copier_create(&opts, &w.copier), 0);
        starve_at(n);
        id = kvbm_copier_submit(w.copier, &t);
        happened = starved();
        starve_at(0);
        assert_true(id > 0 ||
                    (happened && id == -ENOMEM)); /* the executor can do with fewer threads */
        refused += id < 0;
        ends(id > 0 ? id : submit(t), 0, 3);
        kvbm_copier_destroy(w.copier);
    }
    assert_true(refused > 6);
    kvbm_layout_destroy(file);
}

static void test_options(void **state)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 100000};

    (void)state;
    assert_int_equal(kvbm_copier_create(&opts, &w.copier), -EINVAL);
    opts = (struct kvbm_copier_opts){.size = sizeof(opts), .max_jobs = UINT32_MAX};
    assert_int_equal(kvbm_copier_create(&opts, &w.copier), -EINVAL);
    opts = (struct kvbm_copier_opts){.size = sizeof(opts), .io = (enum kvbm_io)9};
    assert_int_equal(kvbm_copier_create(&opts, &w.copier), -EINVAL);
    assert_int_equal(kvbm_copier_create(NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_copier_create(NULL, &w.copier), 0);
    assert_int_equal(kvbm_copier_submit(w.copier, NULL), -EINVAL);
    assert_int_equal(kvbm_copier_submit(NULL, NULL), -EINVAL);
    kvbm_copier_destroy(w.copier);
}

/* The only thread finds out itself that a job is late, and calls the job's callback: nobody would
 * wake it for that. */
static void test_late_alone(void **state)
{
    (void)state;
    open_engine((struct kvbm_copier_opts){.n_threads = 1});
    for (uint32_t i = 0; i < 300; i++) {
        struct kvbm_transfer t = one(0, 1);

        t.done = tell;
        t.deadline_ns = 1; /* who watches deadlines may come later than it */
        assert_true(submit(t) > 0);
        wait_told(i + 1);
        assert_int_equal(w.told[i].status, -ETIMEDOUT);
    }
    kvbm_copier_destroy(w.copier);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_overtaking),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_poll_and_descriptor),
        cmocka_unit_test(test_waiting_helps),
        cmocka_unit_test(test_cancel_before),
        cmocka_unit_test(test_cancel_under_way),
        cmocka_unit_test(test_deadline_storm),
        cmocka_unit_test(test_late_alone),
        cmocka_unit_test(test_ready_descriptor),
        cmocka_unit_test(test_callbacks_submit),
        cmocka_unit_test(test_destroy_while_busy),
        cmocka_unit_test(test_stop_waits_for_callbacks),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_starved),
        cmocka_unit_test(test_starved_file),
        cmocka_unit_test(test_options),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
