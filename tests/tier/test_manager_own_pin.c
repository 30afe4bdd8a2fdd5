// SPDX-License-Identifier: Apache-2.0
/* Loads of a prompt whose middle fills the host tier, while its beginning is in the object store
 * alone: the load's own pin holds all host blocks. The beginning comes at once. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include "tier/kitchen.h"

#define BEGINNING 4u
#define MIDDLE 8u /* blocks of the host tier */
#define N (BEGINNING + MIDDLE)

struct prompt {
    struct world w;
    uint64_t keys[N];
    uint32_t blocks[N];
    bool scattered;
};

static struct kvbm_chain chain_from(const struct prompt *p, uint32_t i)
{
    struct kvbm_chain chain = world_chain(p->keys + i);

    chain.scattered = p->scattered;
    if (i && !p->scattered) {
        chain.parent = &p->keys[i - 1];
        chain.position = i;
    }
    return chain;
}

/* Store the beginning with one manager, and the middle with the next one, which never saw the
 * beginning. Blocks of the middle are in its host tier alone. */
static void begin(struct prompt *p, bool scattered, bool hang)
{
    struct world *w = &p->w;
    struct kvbm_chain chain;

    memset(p, 0, sizeof(*p));
    p->scattered = scattered;
    shaky_start(w, MIDDLE);
    world_keys(100, p->keys, N);
    for (uint32_t i = 0; i < N; i++) {
        p->blocks[i] = i;
        world_fill(w, i, p->keys[i]);
    }
    chain = chain_from(p, 0);
    assert_int_equal(kvbm_cache_store(w->cache, &chain, BEGINNING, p->blocks, 30000), BEGINNING);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    world_stop(w);
    w->opts.object_when_evicted = !hang;
    world_start(w);
    world_attach(w, false);
    atomic_store(&shaky->hang_puts, hang);
    for (uint32_t i = 0; i < N; i++)
        world_fill(w, i, p->keys[i]);
}

/* Store the middle without waiting for the tiers below. */
static void store_middle(struct prompt *p)
{
    struct kvbm_chain chain = chain_from(p, BEGINNING);
    struct kvbm_job job = {
        .size = sizeof(job), .cache = p->w.cache, .blocks = p->blocks + BEGINNING};
    int64_t id;

    assert_int_equal(kvbm_manager_prepare_store(p->w.m, &chain, MIDDLE, &job.pin), MIDDLE);
    id = kvbm_manager_submit(p->w.m, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(p->w.m, (uint64_t)id, 30000, NULL), 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(world_stats(&p->w).host.used, MIDDLE);
}

/* Load the whole prompt. The beginning arrives, and of the middle what made no room for it. */
static void load(struct prompt *p)
{
    struct kvbm_chain chain = chain_from(p, 0);
    long n;

    world_wipe(&p->w);
    n = kvbm_cache_load(p->w.cache, &chain, N, p->blocks, 60000);
    assert_in_range(n, MIDDLE, N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&p->w, p->blocks[i], i < n ? p->keys[i] : ~UINT64_C(0)));
}

static void end(struct prompt *p)
{
    atomic_store(&shaky->hang_puts, false);
    world_fini(&p->w);
}

/* Blocks wait in the host tier until they are about to be evicted, which held ones aren't. */
static void test_written_when_evicted(void **state)
{
    struct prompt p;

    (void)state;
    begin(&p, false, false);
    store_middle(&p);
    load(&p);
    end(&p);
}

/* The object store hangs in puts: what the host tier has can't be written. Gets go on. */
static void test_puts_hang(void **state)
{
    struct prompt p;

    (void)state;
    begin(&p, false, true);
    store_middle(&p);
    load(&p);
    end(&p);
}

/* Keys of no sequence: a pin of them gives none of its blocks up for others. */
static void test_scattered(void **state)
{
    struct prompt p;

    (void)state;
    begin(&p, true, false);
    store_middle(&p);
    load(&p);
    end(&p);
}

/* A pin, too, gives the end up for the beginning. */
static void test_pin(void **state)
{
    struct kvbm_chain chain;
    struct kvbm_pin *pin;
    struct prompt p;

    (void)state;
    begin(&p, false, false);
    store_middle(&p);
    chain = chain_from(&p, 0);
    assert_true(kvbm_manager_prepare_load(p.w.m, &chain, N, NULL, &pin) > 0);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    assert_in_range(kvbm_pin_state(pin, NULL), 1, N);
    kvbm_pin_release(pin);
    end(&p);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_written_when_evicted),
        cmocka_unit_test(test_puts_hang),
        cmocka_unit_test(test_scattered),
        cmocka_unit_test(test_pin),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
