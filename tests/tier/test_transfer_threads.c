// SPDX-License-Identifier: Apache-2.0
/* Many threads use one copier: they submit, cancel, wait and poll; blocks reported whole are whole.
 * For the thread sanitizer. */
#include <pthread.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "transfer_unit.h"

#define PRODUCERS 6
#define EACH 16 /* blocks of a producer, which nobody else uses */

static struct kvbm_copier *copier;
static struct kvbm_layout *src, *dst;
static _Atomic uint32_t n_whole, n_cancelled, n_late, n_refused;

struct producer {
    uint32_t number;
    long rounds;
    sem_t called;
    struct kvbm_done done;
};

static unsigned char *byte_of(struct kvbm_layout *layout, uint32_t block, uint32_t layer)
{
    struct kvbm_view view;

    assert_int_equal(kvbm_layout_region(layout, block, layer, 0, &view), 0);
    return (unsigned char *)(uintptr_t)view.addr;
}

static void called(void *arg, const struct kvbm_done *done)
{
    struct producer *p = arg;

    p->done = *done;
    sem_post(&p->called);
}

static void finish(struct producer *p, struct kvbm_transfer *t, int64_t id, struct rng *rng)
{
    if (rng_below(rng, 4) == 0)
        kvbm_copier_cancel(copier, (uint64_t)id);
    if (t->done)
        sem_wait(&p->called);
    else
        assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &p->done), 0);
    assert_int_equal(p->done.id, id);
}

static void check(struct producer *p, const struct kvbm_transfer *t, unsigned char mark)
{
    uint32_t n_ok = 0;

    for (uint32_t i = 0; i < t->n; i++) {
        if (!(t->ok[i / 8] >> i % 8 & 1))
            continue;
        n_ok++;
        for (uint32_t layer = 0; layer < 3; layer++)
            assert_int_equal(*byte_of(dst, t->dst_blocks[i], layer), mark);
    }
    assert_int_equal(n_ok, p->done.n_ok);
    switch (p->done.status) {
    case 0:
        assert_int_equal(n_ok, t->n);
        n_whole++;
        break;
    case -ECANCELED:
        n_cancelled++;
        break;
    default:
        assert_int_equal(p->done.status, -ETIMEDOUT);
        n_late++;
    }
}

static void *produce(void *arg)
{
    struct producer *p = arg;
    struct rng rng = {test_seed() + p->number};
    uint32_t ids[EACH];
    int ready = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    for (uint32_t i = 0; i < EACH; i++)
        ids[i] = p->number * EACH + i;
    for (long round = 0; round < p->rounds; round++) {
        unsigned char mark = (unsigned char)(1 + round % 250);
        uint64_t number = 1;
        struct kvbm_copier_stats stats = {.size = sizeof(stats)};
        uint8_t ok[EACH / 8];
        struct kvbm_transfer t = {.size = sizeof(t),
                                  .src = src,
                                  .dst = dst,
                                  .src_blocks = ids,
                                  .dst_blocks = ids,
                                  .n = 1 + rng_below(&rng, EACH),
                                  .flow = rng_below(&rng, 2),
                                  .priority = (int32_t)rng_below(&rng, 3),
                                  .ok = ok,
                                  .arg = p};
        bool watched = rng_below(&rng, 3) == 0;
        int64_t id;

        for (uint32_t i = 0; i < t.n && !watched; i++) {
            for (uint32_t layer = 0; layer < 3; layer++)
                *byte_of(src, ids[i], layer) = mark;
        }
        t.ready_fd = watched ? ready : 0;
        t.done = rng_below(&rng, 2) ? called : NULL;
        if (rng_below(&rng, 8) == 0)
            t.deadline_ns = kv_now_ns() + rng_below(&rng, 200000);
        id = kvbm_copier_submit(copier, &t);
        if (id == -EAGAIN) {
            n_refused++;
            continue;
        }
        assert_true(id > 0);
        if (watched) { /* the source is written while the job waits */
            for (uint32_t i = 0; i < t.n; i++) {
                for (uint32_t layer = 0; layer < 3; layer++)
                    *byte_of(src, ids[i], layer) = mark;
            }
            kvbm_copier_get_stats(copier,
                                  &stats); /* a lock: tsan doesn't know that eventfds order */
            assert_int_equal(write(ready, &number, sizeof(number)), sizeof(number));
        }
        finish(p, &t, id, &rng);
        check(p, &t, mark);
        if (watched)
            assert_int_equal(read(ready, &number, sizeof(number)), sizeof(number));
    }
    close(ready);
    return NULL;
}

static void test_producers(void **state)
{
    struct kvbm_copier_opts opts = {
        .size = sizeof(opts), .n_threads = 3, .max_jobs = PRODUCERS - 1};
    struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = PRODUCERS * EACH,
                                   .num_layers = 3,
                                   .outer_dim = 2,
                                   .page_size = 4,
                                   .inner_dim = 64};
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    struct kvbm_copier_stats stats = {.size = sizeof(stats)};

    (void)state;
    src = unit_layout(&c, &memory);
    c.kind = KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS;
    dst = unit_layout(&c, &memory);
    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){.number = i, .rounds = test_rounds(3000)};
        sem_init(&producers[i].called, 0, 0);
        assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (uint32_t i = 0; i < PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    kvbm_copier_get_stats(copier, &stats);
    assert_int_equal(stats.done, n_whole);
    assert_int_equal(stats.cancelled, n_cancelled);
    assert_int_equal(stats.late, n_late);
    assert_int_equal(stats.refused, n_refused);
    assert_int_equal(stats.jobs_now, 0);
    assert_int_equal(stats.blocks_now, 0);
    assert_int_equal(stats.failed, 0);
    assert_true(n_whole > 0 && n_cancelled > 0);
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_producers)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
