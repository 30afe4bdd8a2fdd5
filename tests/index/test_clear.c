// SPDX-License-Identifier: Apache-2.0
/* Long calls proceed in slices, and other holders' writers run in between: clearing a holder of a wide
 * index, whose own writers wait, and storing many chains. */
#include <dlfcn.h>
#include <sched.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/unit.h"
#include "index/tree/tree.h"
#include "random.h"

#define N_CHAINS 5000u /* a fan of children */
#define DEADLINE_NS (UINT64_C(60) * 1000000000)

static const struct kv_holder cleared = {1, 0}, beside = {2, 0}, other_rank = {1, 1};

static struct world {
    struct kvi_index *ix;
    pthread_t clearing, thread;
    void *(*writer)(void *arg); /* runs from the first step of the clear on */
    struct kv_holder watched;
    bool started;
    long n_steps_before,
        n_steps_after; /* of the clear, before and after the writer's first block was there */
    bool waited;
    bool trunk; /* all chains hang below one */
    struct kvi_matches matches;
} world;

static const struct kv_block trunk[] = {{900001, 900001}, {900002, 900002}, {900003, 900003}};

static const uint64_t *parent(void)
{
    return world.trunk ? &trunk[2].hash : NULL;
}

static void store(struct kv_holder holder, uint64_t first, uint64_t n)
{
    for (uint64_t i = first; i < first + n; i++) {
        const struct kv_block block = {i, i};

        assert_int_equal(kvi_store(world.ix, holder, KV_TIER_DEVICE, parent(), &block, 1, NULL), 0);
    }
}

/* With all chains below one, lookups see the holder there whole, or not at all and then never
 * again. */
static void look(void)
{
    const uint64_t path[] = {trunk[0].tokens_hash, trunk[1].tokens_hash, trunk[2].tokens_hash,
                             N_CHAINS / 4};
    uint32_t reach = 0;

    if (kvi_find(world.ix, path, KV_COUNT(path), &world.matches))
        abort();
    for (size_t i = 0; i < world.matches.n; i++)
        if (!memcmp(&world.matches.items[i].holder, &cleared, sizeof(cleared)))
            reach = world.matches.items[i].reach[KV_TIER_DEVICE];
    if (reach != 0)
        abort(); /* the first step was the whole loss */
}

static bool arrived(void)
{
    const struct kvi_holder *holder = kvi_holder_find(world.ix, world.watched);
    struct kvi_place place;

    return holder && kvi_locate(world.ix, holder, N_CHAINS + 1, &place, NULL);
}

/* In the middle of the clear, with its lock: let the writer begin, and come as far as the gate. */
static void on_step(void)
{
    uint64_t deadline = kv_now_ns() + DEADLINE_NS;

    if (!pthread_equal(pthread_self(), world.clearing))
        return;
    if (world.trunk)
        look();
    if (world.started) {
        *(arrived() ? &world.n_steps_after : &world.n_steps_before) += 1;
        return;
    }
    world.started = true;
    if (pthread_create(&world.thread, NULL, world.writer, NULL))
        abort();
    while (!world.waited && kv_now_ns() < deadline) {
        world.waited = pthread_mutex_trylock(&world.ix->gate) == EBUSY;
        if (!world.waited)
            pthread_mutex_unlock(&world.ix->gate);
        sched_yield();
    }
}

static void write_one(struct kv_holder holder, uint64_t hash)
{
    const struct kv_block block = {hash, hash};

    if (kvi_store(world.ix, holder, KV_TIER_DEVICE, parent(), &block, 1, NULL))
        abort();
}

static void begin(void *(*writer)(void *arg), struct kv_holder watched)
{
    world = (struct world){.clearing = pthread_self(), .writer = writer, .watched = watched};
    assert_int_equal(kvi_create(NULL, &world.ix), 0);
    store(cleared, 1, N_CHAINS);
    store(other_rank, 1, N_CHAINS / 2);
    store(beside, 1, N_CHAINS);
    kvi_step_hook = on_step;
}

static void end(uint64_t n_cleared, uint64_t n_other, uint64_t n_beside)
{
    pthread_join(world.thread, NULL);
    kvi_step_hook = NULL;
    assert_true(world.waited);
    assert_int_equal(kvi_holder_blocks(world.ix, cleared), n_cleared);
    assert_int_equal(kvi_holder_blocks(world.ix, other_rank), n_other);
    assert_int_equal(kvi_holder_blocks(world.ix, beside), n_beside);
    assert_null(kvi_check(world.ix));
    kvi_matches_fini(&world.matches);
    kvi_destroy(world.ix);
}

static void *write_beside(void *arg)
{
    write_one(beside, N_CHAINS + 1);
    return arg;
}

static void test_others_go_on(void **state)
{
    (void)state;
    begin(write_beside, beside);
    assert_int_equal(kvi_clear(world.ix, cleared), 0);
    assert_true(world.n_steps_before < N_CHAINS / 5); /* it came in at the first pause */
    assert_true(world.n_steps_after > N_CHAINS / 2);
    end(0, N_CHAINS / 2, N_CHAINS + 1);

    begin(write_beside, beside);
    assert_int_equal(kvi_remove_worker(world.ix, cleared.worker), 0);
    assert_true(world.n_steps_before < N_CHAINS / 5); /* it came in at the first pause */
    assert_true(world.n_steps_after > N_CHAINS / 2);
    end(0, 0, N_CHAINS + 1);
}

static void begin_trunk(void *(*writer)(void *arg), struct kv_holder watched)
{
    const struct kv_holder all[] = {cleared, other_rank, beside};

    world = (struct world){.clearing = pthread_self(), .writer = writer, .watched = watched};
    assert_int_equal(kvi_create(NULL, &world.ix), 0);
    for (size_t i = 0; i < KV_COUNT(all); i++)
        assert_int_equal(
            kvi_store(world.ix, all[i], KV_TIER_DEVICE, NULL, trunk, KV_COUNT(trunk), NULL), 0);
    world.trunk = true;
    store(cleared, 1, N_CHAINS);
    store(other_rank, N_CHAINS + 10, 80); /* few, in a wide set */
    store(beside, N_CHAINS / 2, N_CHAINS / 2);
    kvi_step_hook = on_step;
}

/* The chain where the clear stands is split by another one. */
static void *split_trunk(void *arg)
{
    const struct kv_block block = {N_CHAINS + 1, N_CHAINS + 1};

    if (kvi_store(world.ix, beside, KV_TIER_DEVICE, &trunk[1].hash, &block, 1, NULL))
        abort();
    return arg;
}

/* As real prompts are: the root has one child. */
static void test_below_one_chain(void **state)
{
    void *(*const writers[])(void *arg) = {write_beside, split_trunk};
    (void)state;

    for (size_t i = 0; i < KV_COUNT(writers); i++) {
        begin_trunk(writers[i], beside);
        assert_int_equal(kvi_clear(world.ix, cleared), 0);
        assert_true(world.n_steps_before < N_CHAINS / 5); /* it came in at the first pause */
        assert_true(world.n_steps_after > N_CHAINS / 2);
        end(0, 3 + 80, 3 + N_CHAINS / 2 + 1);
    }
    begin_trunk(write_beside, beside);
    assert_int_equal(kvi_remove_worker(world.ix, cleared.worker), 0);
    assert_true(world.n_steps_before < N_CHAINS / 5);
    end(0, 0, 3 + N_CHAINS / 2 + 1);
}

/*
 * A line of chains, which the clear goes down and up again. At a pause on its way up others join
 * the chain where it stands with the one below, already left, and split both elsewhere: the clear
 * then stands at a part that its holder isn't in.
 */
#define LINE 72u
static struct kv_block line[2 * LINE];

static void put_fork(uint32_t at)
{
    const struct kv_block fork = {2000000 + at, 2000000 + at};

    if (kvi_store(world.ix, other_rank, KV_TIER_DEVICE, NULL, line, at, NULL) ||
        kvi_store(world.ix, other_rank, KV_TIER_DEVICE, &line[at - 1].hash, &fork, 1, NULL))
        abort();
}

/* With the gate, so that the clear pauses until all is done. */
static void *move_forks(void *arg)
{
    pthread_mutex_lock(&world.ix->gate);
    pthread_mutex_lock(&world.ix->lock);
    pthread_mutex_unlock(&world.ix->lock);
    for (uint32_t at = 2; at < 24; at += 2) {
        const uint64_t fork = 2000000 + at;

        if (kvi_remove(world.ix, other_rank, KV_TIER_DEVICE, &fork, 1) != 1)
            abort();
    }
    for (uint32_t at = 23; at > 1; at -= 2)
        put_fork(at);
    pthread_mutex_unlock(&world.ix->gate);
    return arg;
}

static void on_step_up(void)
{
    const struct kvi_holder *holder = kvi_holder_find(world.ix, cleared);

    if (pthread_equal(pthread_self(), world.clearing) && !world.started && holder &&
        holder->blocks <= 16)
        on_step();
}

static void test_joined_and_split(void **state)
{
    (void)state;
    world = (struct world){.clearing = pthread_self(), .writer = move_forks, .watched = beside};
    assert_int_equal(kvi_create(NULL, &world.ix), 0);
    for (uint32_t i = 0; i < 2 * LINE; i++)
        line[i] = (struct kv_block){i + 1, i + 1};
    for (uint32_t at = 2; at < 2 * LINE; at += 2)
        put_fork(at);
    assert_int_equal(kvi_store(world.ix, cleared, KV_TIER_DEVICE, NULL, line, 2 * LINE, NULL), 0);
    assert_int_equal(kvi_store(world.ix, beside, KV_TIER_DEVICE, NULL, line, 2 * LINE, NULL), 0);
    kvi_step_hook = on_step_up;
    assert_int_equal(kvi_clear(world.ix, cleared), 0);
    end(0, kvi_holder_blocks(world.ix, other_rank), 2 * LINE);
}

/* Stores of the same holder during a clear take effect after it, all of them. */
static void *write_same(void *arg)
{
    for (uint64_t i = 1; i <= 40; i++)
        write_one(cleared, N_CHAINS + i);
    return arg;
}

static void test_its_own_wait(void **state)
{
    (void)state;
    begin(write_same, cleared);
    assert_int_equal(kvi_clear(world.ix, cleared), 0);
    assert_int_equal(world.n_steps_after, 0);
    end(40, N_CHAINS / 2, N_CHAINS);

    begin(write_same, cleared);
    assert_int_equal(kvi_remove_holder(world.ix, cleared), 0);
    assert_int_equal(world.n_steps_after, 0);
    end(40, N_CHAINS / 2, N_CHAINS);
}

/* A worker goes as a whole: a rank whose turn is yet to come is as good as gone. */
static void *write_ranks(void *arg)
{
    write_one(other_rank, N_CHAINS + 1);
    write_one(cleared, N_CHAINS + 2);
    return arg;
}

static void test_ranks_wait_together(void **state)
{
    (void)state;
    begin(write_ranks, other_rank);
    assert_int_equal(kvi_remove_worker(world.ix, cleared.worker), 0);
    assert_int_equal(world.n_steps_after, 0);
    end(1, 1, N_CHAINS);
}

/* Calls that clear the same holders, at once and again and again, beside one that grows and shrinks
 * the root: none waits for ever. */
static void *clear_all(void *arg)
{
    for (long i = 0, n = test_rounds(300); i < n; i++) {
        (void)kvi_clear(world.ix, i % 2 ? cleared : other_rank);
        (void)kvi_remove_worker(world.ix, cleared.worker);
        write_one(i % 3 ? cleared : other_rank, 1 + (uint64_t)i % N_CHAINS);
        (void)kvi_remove_holder(world.ix, i % 2 ? other_rank : cleared);
    }
    return arg;
}

static void *resize(void *arg)
{
    for (long i = 0, n = test_rounds(10); i < n; i++) {
        for (uint64_t k = 1; k < 3000; k++)
            write_one(k % 2 ? cleared : beside, k);
        (void)kvi_clear(world.ix, beside);
    }
    return arg;
}

static void test_many_clear(void **state)
{
    void *(*const roles[])(void *) = {clear_all, clear_all, resize};
    pthread_t threads[KV_COUNT(roles)];
    (void)state;

    world = (struct world){0};
    assert_int_equal(kvi_create(NULL, &world.ix), 0);
    for (size_t i = 0; i < KV_COUNT(roles); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, roles[i], NULL), 0);
    for (size_t i = 0; i < KV_COUNT(roles); i++)
        pthread_join(threads[i], NULL);
    (void)kvi_remove_worker(world.ix, cleared.worker);
    (void)kvi_clear(world.ix, beside);
    assert_int_equal(kvi_holder_blocks(world.ix, cleared), 0);
    assert_null(kvi_check(world.ix));
    kvi_destroy(world.ix);
}

/* Storing many chains in one call: a writer that comes meanwhile waits for a part of them. */
static void test_many_chains(void **state)
{
    static struct kvi_new_chain chains[N_CHAINS];
    static struct kv_block blocks[N_CHAINS];
    int rc;
    (void)state;

    for (uint32_t i = 0; i < N_CHAINS; i++) {
        blocks[i] = (struct kv_block){2 * N_CHAINS + i, 2 * N_CHAINS + i};
        chains[i] = (struct kvi_new_chain){
            .holder = cleared, .has_parent = true, .parent = i + 1, .blocks = &blocks[i], .n = 1};
    }
    begin(write_beside, beside);
    assert_int_equal(kvi_add_chains(world.ix, chains, N_CHAINS, NULL, &rc), N_CHAINS);
    assert_int_equal(rc, 0);
    assert_true(world.n_steps_before < N_CHAINS / 5);
    assert_true(world.n_steps_after > N_CHAINS / 2);
    end(2 * N_CHAINS, N_CHAINS / 2, N_CHAINS + 1);
}

/*
 * To its holder's writers a call that clears is one change. Here a writer comes where the call has let
 * the lock go and asks for it again, in case it does: a moment of nanoseconds otherwise.
 */
static int locks_to_pass;
static void (*at_lock)(void);
static int (*real_trylock)(pthread_mutex_t *mutex);

/* Instead of the C library's. */
int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    void (*writer)(void) = locks_to_pass ? NULL : at_lock;

    if (at_lock && locks_to_pass)
        locks_to_pass--;
    if (writer) {
        at_lock = NULL;
        writer();
    }
    return real_trylock(mutex);
}

static void store_in_host(void)
{
    const struct kv_block block = {2, 2};

    if (kvi_store(world.ix, cleared, KV_TIER_HOST, NULL, &block, 1, NULL))
        abort();
}

static void test_other_tiers_stay(void **state)
{
    (void)state;
    world = (struct world){0};
    assert_int_equal(kvi_create(NULL, &world.ix), 0);
    store(cleared, 1, 1);
    locks_to_pass = 1; /* the call's first */
    at_lock = store_in_host;
    assert_int_equal(kvi_clear_tiers(world.ix, cleared, 1u << KV_TIER_DEVICE, 0), 0);
    if (at_lock) { /* the call has let nobody in: the writer comes behind it */
        at_lock = NULL;
        store_in_host();
    }
    assert_int_equal(kvi_holder_blocks(world.ix, cleared), 1);
    assert_null(kvi_check(world.ix));
    kvi_destroy(world.ix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_others_go_on),        cmocka_unit_test(test_below_one_chain),
        cmocka_unit_test(test_joined_and_split),    cmocka_unit_test(test_its_own_wait),
        cmocka_unit_test(test_ranks_wait_together), cmocka_unit_test(test_many_clear),
        cmocka_unit_test(test_many_chains),         cmocka_unit_test(test_other_tiers_stay),
    };

    real_trylock = (int (*)(pthread_mutex_t *))(uintptr_t)dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
