// SPDX-License-Identifier: Apache-2.0
/* Readers beside writers. Each holder follows a script that allows only certain answers, on one
 * trunk that other holders keep splitting and joining. Readers accept only those answers. Also
 * meant for the thread sanitizer. */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "base/unit.h"
#include "index/tree/tree.h"
#include "random.h"

#define LEN 700u /* three chains at least */

enum { STILL = 1, BLINK, GROW, TIERS, DEEP, N_SCRIPTED, WINDOWED = 50, ALONE };

struct world {
    struct kvi_index *ix;
    uint64_t trunk[LEN];
    struct kv_block blocks[LEN];
    _Atomic bool stop;
    _Atomic uint64_t n_found, n_dumps;
    _Atomic uint32_t floor; /* GROW has reached at least this */
    char *_Atomic wrong;
    long rounds;
};

static void complain(struct world *world, const char *what, uint32_t got)
{
    char *text = malloc(128);

    snprintf(text, 128, "%s: %u", what, got);
    atomic_store(&world->wrong, text);
    atomic_store(&world->stop, true);
}

static struct kv_holder holder(uint64_t worker)
{
    return (struct kv_holder){worker, 0};
}

static void store(struct world *world, uint64_t worker, enum kv_tier tier, size_t from, size_t to)
{
    int rc = kvi_store(world->ix, holder(worker), tier, from ? &world->blocks[from - 1].hash : NULL,
                       world->blocks + from, to - from, NULL);

    if (rc)
        complain(world, "a store failed", (uint32_t)-rc);
}

static void take(struct world *world, uint64_t worker, enum kv_tier tier, size_t i)
{
    if (kvi_remove(world->ix, holder(worker), tier, &world->blocks[i].hash, 1) != 1)
        complain(world, "a remove failed", (uint32_t)i);
}

/* All of it, nothing, all of it; and a part of it, in the middle of a chain and at its ends. */
static void *scripted(void *arg)
{
    struct world *world = arg;
    size_t grown = 0;

    /* The others may begin late: until they have done something, too. */
    for (long i = 0; (i < world->rounds || world->n_found <= 10 || !world->n_dumps) && !world->stop;
         i++) {
        store(world, BLINK, KV_TIER_DEVICE, 0, LEN);
        if (i % 2)
            take(world, BLINK, KV_TIER_DEVICE, 0);
        else
            (void)kvi_clear(world->ix, holder(BLINK));
        take(world, TIERS, KV_TIER_DEVICE, 300);
        store(world, TIERS, KV_TIER_DEVICE, 300, 301);
        store(world, DEEP, KV_TIER_HOST, 5, LEN);
        take(world, DEEP, KV_TIER_HOST, 5);
        if (grown < LEN && i % 4 == 0) {
            store(world, GROW, KV_TIER_DEVICE, grown, grown + 1);
            atomic_store(&world->floor, (uint32_t)++grown);
        }
    }
    atomic_store(&world->stop, true);
    return NULL;
}

static void window(struct world *world, uint64_t worker, bool add, size_t from, size_t to)
{
    uint64_t names[LEN];
    long rc;

    for (size_t i = from; i < to; i++)
        names[i - from] = world->blocks[i].hash;
    rc = add ? kvi_store_known(world->ix, kvi_window_of(holder(worker), KV_TIER_DEVICE, 0, 0),
                               names, to - from)
             : kvi_take(world->ix, kvi_window_of(holder(worker), KV_TIER_DEVICE, 0, 0), names, NULL,
                        to - from);
    if (rc < 0 || (!add && rc != (long)(to - from)))
        complain(world, "a window's change failed", (uint32_t)rc);
}

/* Tell the places of the first @n blocks of ALONE, as a dump does. */
static void place_alone(struct world *world, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct kvi_extra place = {.kind = KVI_EXTRA_PLACE,
                                        .holder = holder(ALONE),
                                        .hash = world->blocks[i].hash,
                                        .tokens_hash = world->blocks[i].tokens_hash,
                                        .has_parent = i > 0,
                                        .parent = i ? world->blocks[i - 1].hash : 0,
                                        .window.group = 1};

        if (kvi_restore_extra(world->ix, &place))
            complain(world, "places can't be told", 0);
    }
}

/* A window of four blocks. WINDOWED: one block of it goes and comes back, or the holder starts over. ALONE has
 * no other group: its whole window comes and goes. */
static void *windowing(void *arg)
{
    const struct kvi_window four = {.group = 1, .window = 17, .need = 4, .stride = 1};
    struct world *world = arg;
    struct rng rng = {test_seed() + 1};

    while (!world->stop) {
        size_t at = 8 + rng_below(&rng, LEN - 12);

        if (kvi_set_window(world->ix, holder(WINDOWED), &four) != 0 ||
            kvi_set_window(world->ix, holder(ALONE), &four) != 0 ||
            kvi_set_alone(world->ix, holder(ALONE), true) != 0)
            complain(world, "a window can't be declared", 0);
        store(world, WINDOWED, KV_TIER_DEVICE, 0, LEN);
        window(world, WINDOWED, true, 0, LEN);
        for (size_t i = LEN - 4; i < LEN; i++) {
            window(world, WINDOWED, false, i, i + 1);
            window(world, WINDOWED, true, i, i + 1);
        }
        window(world, WINDOWED, false, at, LEN);
        if (rng_below(&rng, 2))
            (void)kvi_remove_holder(world->ix, holder(WINDOWED));
        else
            (void)kvi_clear(world->ix, holder(WINDOWED));
        place_alone(world, at);
        window(world, ALONE, true, at - 4, at);
        window(world, ALONE, false, at - 4, at);
        sched_yield();
    }
    return NULL;
}

/* Others fork off the trunk anywhere and leave again: chains split, join, are moved and freed. */
static void *churning(void *arg)
{
    struct world *world = arg;
    struct rng rng = {test_seed()};
    struct kv_block blocks[16];

    while (!world->stop) {
        uint64_t worker = 100 + rng_below(&rng, 40);
        size_t at = 1 + rng_below(&rng, LEN - 20), n = 1 + rng_below(&rng, 16);

        store(world, worker, KV_TIER_DEVICE, 0, at);
        for (size_t i = 0; i < n; i++)
            blocks[i] = (struct kv_block){rng_next(&rng), 1000000 + rng_below(&rng, 4)};
        (void)kvi_store(world->ix, holder(worker), KV_TIER_DEVICE, &world->blocks[at - 1].hash,
                        blocks, n, NULL);
        if (rng_below(&rng, 2))
            (void)kvi_remove_holder(world->ix, holder(100 + rng_below(&rng, 40)));
        sched_yield(); /* mutexes aren't fair; let the script go on */
    }
    return NULL;
}

static void judge(struct world *world, const struct kvi_match *m, uint32_t floor)
{
    uint32_t device = m->reach[KV_TIER_DEVICE], all = m->reach[KV_N_TIERS - 1];

    switch (m->holder.worker) {
    case STILL:
        if (all != LEN || device != LEN || m->blocks != LEN)
            complain(world, "what never changed did", all);
        break;
    case BLINK:
        if (all != LEN || device != LEN)
            complain(world, "a store or a remove was seen half done", all);
        break;
    case GROW:
        if (all < floor || device != all)
            complain(world, "what only grows shrank", all);
        break;
    case TIERS:
        if (all != LEN || (device != LEN && device != 300))
            complain(world, "a tier that never was", device);
        break;
    case DEEP:
        if (device != 5 || all < 5 || all > LEN) /* lower tiers come back part by part */
            complain(world, "the lower part reached too far", all);
        break;
    case WINDOWED: /* of any length, as its window grows block by block */
        if (all > LEN || device != all)
            complain(world, "a window's match is too long", all);
        break;
    case ALONE:
        if (all < 4 || all > LEN || device != all)
            complain(world, "a window alone matches without its blocks", all);
        break;
    default:
        if (m->holder.worker < 100 || all == 0 || all > LEN || device != all)
            complain(world, "an answer from nowhere", all);
    }
}

static void *reading(void *arg)
{
    struct world *world = arg;
    struct kvi_matches matches = {0};

    while (!world->stop) {
        uint32_t floor = atomic_load(&world->floor), seen = 0;

        if (kvi_find(world->ix, world->trunk, LEN, &matches))
            complain(world, "kvi_find failed", 0);
        for (size_t i = 0; i < matches.n; i++) {
            judge(world, &matches.items[i], floor);
            if (matches.items[i].holder.worker < N_SCRIPTED)
                seen |= 1u << matches.items[i].holder.worker;
        }
        if (!(seen >> STILL & 1) || !(seen >> TIERS & 1) || !(seen >> DEEP & 1) ||
            (floor && !(seen >> GROW & 1)))
            complain(world, "somebody is missing", seen);
        atomic_fetch_add(&world->n_found, 1);
    }
    kvi_matches_fini(&matches);
    return NULL;
}

/* Blocks of holder STILL must be in every dump, from the first to the last. */
static int still_run(void *arg, const struct kvi_dump_run *run)
{
    bool *seen = arg;

    if (run->holder.worker == STILL)
        for (size_t i = 0; i < run->n; i++)
            seen[run->blocks[i].tokens_hash - 1] = true;
    return 0;
}

static int any_extra(void *arg, const struct kvi_extra *extra)
{
    (void)arg;
    return extra->holder.rank != 0;
}

static void *dumping(void *arg)
{
    struct world *world = arg;

    while (!world->stop) {
        bool seen[LEN] = {false};
        struct kvi_stats stats = {.size = sizeof(stats)};

        if (kvi_dump(world->ix, still_run, seen))
            complain(world, "kvi_dump failed", 0);
        if (kvi_dump_extras(world->ix, any_extra, NULL))
            complain(world, "kvi_dump_extras failed", 0);
        for (uint32_t i = 0; i < LEN; i++)
            if (!seen[i])
                complain(world, "a block is missing in a dump", i);
        kvi_get_stats(world->ix, &stats);
        atomic_fetch_add(&world->n_dumps, 1);
    }
    return NULL;
}

static void test_scripts(void **state)
{
    struct world *world = calloc(1, sizeof(*world));
    void *(*const roles[])(void *) = {scripted, churning, windowing, reading, reading, dumping};
    pthread_t threads[KV_COUNT(roles)];
    (void)state;

    world->rounds = test_rounds(700);
    assert_int_equal(kvi_create(NULL, &world->ix), 0);
    for (uint32_t i = 0; i < LEN; i++) {
        world->trunk[i] = i + 1;
        world->blocks[i] = (struct kv_block){rng_scatter(i + 1), i + 1};
    }
    store(world, STILL, KV_TIER_DEVICE, 0, LEN);
    store(world, TIERS, KV_TIER_HOST, 0, LEN);
    store(world, TIERS, KV_TIER_DEVICE, 0, LEN);
    store(world, DEEP, KV_TIER_DEVICE, 0, 5);
    for (size_t i = 0; i < KV_COUNT(roles); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, roles[i], world), 0);
    for (size_t i = 0; i < KV_COUNT(roles); i++)
        pthread_join(threads[i], NULL);
    if (world->wrong)
        fail_msg("%s", world->wrong);
    print_message("%" PRIu64 " lookups, %" PRIu64 " dumps\n", world->n_found, world->n_dumps);
    assert_true(world->n_found > 10 && world->n_dumps > 0);
    assert_null(kvi_check(world->ix));
    kvi_destroy(world->ix);
    free(world);
}

/* Threads come and go; indexes too. */
static void *one_lookup(void *arg)
{
    struct kvi_matches matches = {0};
    const uint64_t hash = 1;
    long n = -1;

    if (!kvi_find(arg, &hash, 1, &matches))
        n = (long)matches.n;
    kvi_matches_fini(&matches);
    return (void *)n;
}

static void test_short_lived_threads(void **state)
{
    const struct kv_block block = {1, 1};
    struct kvi_index *ix[2];
    (void)state;

    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvi_create(NULL, &ix[i]), 0);
        assert_int_equal(kvi_store(ix[i], holder(1), KV_TIER_DEVICE, NULL, &block, 1, NULL), 0);
    }
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        void *n;

        assert_int_equal(pthread_create(&thread, NULL, one_lookup, ix[i % 2]), 0);
        assert_int_equal(kvi_clear(ix[i % 2], holder(1)), 0);
        pthread_join(thread, &n);
        assert_true((long)n == 0 || (long)n == 1);
        assert_int_equal(kvi_store(ix[i % 2], holder(1), KV_TIER_DEVICE, NULL, &block, 1, NULL), 0);
    }
    kvi_destroy(ix[0]);
    kvi_destroy(ix[1]);
}

/* A writer that changes the path at the end of every walk: the lookup must end all the same. */
struct nuisance {
    struct kvi_index *ix;
    int n_walks;
    bool locked;
};

static void *change_path(void *arg)
{
    struct kvi_index *ix = arg;
    const struct kv_block block = {1, 1};

    (void)kvi_clear(ix, holder(BLINK));
    (void)kvi_store(ix, holder(BLINK), KV_TIER_DEVICE, NULL, &block, 1, NULL);
    return NULL;
}

static void disturb(void *arg, const struct kvi_chain *chain)
{
    struct nuisance *nuisance = arg;
    pthread_t thread;

    if (chain)
        return;
    nuisance->n_walks++;
    if (nuisance->n_walks > KVI_FIND_TRIES) { /* the lookup has the lock now */
        nuisance->locked = pthread_mutex_trylock(&nuisance->ix->lock) == EBUSY;
        return;
    }
    pthread_create(&thread, NULL, change_path, nuisance->ix);
    pthread_join(thread, NULL);
}

static void test_a_lookup_ends(void **state)
{
    const struct kv_block block = {1, 1};
    struct nuisance nuisance = {0};
    struct kvi_matches matches = {0};
    const uint64_t hash = 1;
    (void)state;

    assert_int_equal(kvi_create(NULL, &nuisance.ix), 0);
    for (uint64_t w = STILL; w <= BLINK; w++)
        assert_int_equal(kvi_store(nuisance.ix, holder(w), KV_TIER_DEVICE, NULL, &block, 1, NULL),
                         0);
    nuisance.ix->find_hook_arg = &nuisance;
    nuisance.ix->find_hook = disturb;
    assert_int_equal(kvi_find(nuisance.ix, &hash, 1, &matches), 0);
    assert_int_equal(matches.n, 2);
    assert_int_equal(nuisance.n_walks, KVI_FIND_TRIES + 1);
    assert_true(nuisance.locked);
    assert_int_equal(nuisance.ix->n_walks_alone, 1);
    kvi_matches_fini(&matches);
    kvi_destroy(nuisance.ix);
}

/*
 * The lookup has found a chain when a writer replaces it by two (a fork) and then takes one holder
 * away, from there and from below. What the dead chain says and what is below it now were never
 * true together: the holder had all or nothing.
 */
struct replaced {
    struct kvi_index *ix;
    struct kv_block blocks[8];
    bool done;
};

static void replace_chain(void *arg, const struct kvi_chain *chain)
{
    struct replaced *r = arg;
    const struct kv_block fork = {100, 100};

    if (!chain || r->done)
        return;
    r->done = true;
    if (kvi_store(r->ix, holder(3), KV_TIER_DEVICE, &r->blocks[1].hash, &fork, 1, NULL) ||
        kvi_clear(r->ix, holder(1)))
        abort();
}

static void test_a_chain_dies_when_found(void **state)
{
    const struct kv_block beside = {200, 200};
    struct replaced r = {0};
    struct kvi_matches matches = {0};
    uint64_t prompt[8];
    (void)state;

    assert_int_equal(kvi_create(NULL, &r.ix), 0);
    for (uint32_t i = 0; i < 8; i++) {
        r.blocks[i] = (struct kv_block){i + 1, i + 1};
        prompt[i] = i + 1;
    }
    for (uint64_t w = 1; w <= 3; w++) { /* two chains: a child keeps them apart */
        assert_int_equal(kvi_store(r.ix, holder(w), KV_TIER_DEVICE, NULL, r.blocks, 4, NULL), 0);
        assert_int_equal(
            kvi_store(r.ix, holder(w), KV_TIER_DEVICE, &r.blocks[3].hash, &beside, 1, NULL), 0);
        assert_int_equal(
            kvi_store(r.ix, holder(w), KV_TIER_DEVICE, &r.blocks[3].hash, &r.blocks[4], 4, NULL),
            0);
    }
    r.ix->find_hook_arg = &r;
    r.ix->find_hook = replace_chain;
    assert_int_equal(kvi_find(r.ix, prompt, 8, &matches), 0);
    assert_true(r.done);
    for (size_t i = 0; i < matches.n; i++)
        assert_int_equal(matches.items[i].reach[KV_TIER_DEVICE], 8);
    assert_int_equal(matches.n, 2); /* it looked again */
    kvi_matches_fini(&matches);
    kvi_destroy(r.ix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scripts),
        cmocka_unit_test(test_a_lookup_ends),
        cmocka_unit_test(test_a_chain_dies_when_found),
        cmocka_unit_test(test_short_lived_threads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
