// SPDX-License-Identifier: Apache-2.0
/* Every call of a manager that takes keys reads and writes its caller's arrays to their end and no
 * further: keys, a parent, tokens, block numbers, states and bits end where no memory is. */
#define CACHE_BLOCKS 256u
#include "guarded.h"
#include "kvbm_events.h"
#include "kvbm_hit.h"
#include "tier/kitchen.h"

#define MOST 140u
#define SOON_MS 60000

static struct world w;
static struct kvbm_events *events;
static struct guarded arrays[6];
static uint64_t all_keys[MOST + 1];
static uint32_t all_tokens[MOST * PAGE], all_blocks[MOST];

/* The chain of @n keys behind key @from - 1, with all arrays at their ends. */
static struct kvbm_chain chain_of(uint32_t from, uint32_t n)
{
    return (struct kvbm_chain){
        .size = sizeof(struct kvbm_chain),
        .keys = guard(&arrays[0], all_keys + from, n * sizeof(all_keys[0])),
        .parent = from ? guard(&arrays[1], &all_keys[from - 1], sizeof(all_keys[0])) : NULL,
        .position = from,
        .tokens =
            guard(&arrays[2], all_tokens + (size_t)from * PAGE, n * PAGE * sizeof(all_tokens[0]))};
}

static void blocking(uint32_t from, uint32_t n, const struct kvbm_chain *chain)
{
    const uint32_t *blocks = guard(&arrays[3], all_blocks + from, n * sizeof(*blocks));

    assert_int_equal(kvbm_cache_store(w.cache, chain, n, blocks, SOON_MS), n);
    assert_int_equal(kvbm_cache_load(w.cache, chain, n, blocks, SOON_MS), n);
    assert_true(kvbm_manager_lookup(w.m, chain, n, guard(&arrays[4], NULL, n)) >= 0);
    assert_true(kvbm_manager_touch(w.m, 0, chain->keys, n) >= 0);
}

static void with_pins(uint32_t from, uint32_t n, const struct kvbm_chain *chain)
{
    const uint32_t *blocks = guard(&arrays[3], all_blocks + from, n * sizeof(*blocks));
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = w.cache,
                           .blocks = blocks,
                           .ok = guard(&arrays[4], NULL, (n + 7) / 8)};
    int64_t id;

    assert_int_equal(kvbm_manager_prepare_load(w.m, chain, n, NULL, &job.pin), n);
    assert_int_equal(kvbm_pin_wait(job.pin, SOON_MS), 0);
    assert_int_equal(kvbm_pin_state(job.pin, guard(&arrays[5], NULL, n)), n);
    assert_int_equal(kvbm_pin_blocks(job.pin, guard(&arrays[5], NULL, n * sizeof(*blocks))), n);
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, SOON_MS, NULL), 0);
    kvbm_pin_release(job.pin);
}

/* Groups of larger blocks have fewer keys than the prompt has blocks. Each group's arrays in turn end
 * where no memory is. */
static void hits(uint32_t n)
{
    static uint8_t where[3][MOST];
    const struct kvbm_chain whole = chain_of(0, n);

    for (size_t k = 0; k < 3; k++) {
        struct kvbm_hit_group groups[] = {
            {.group = {KV_NEEDS_ALL, PAGE, 0}, .chain = &whole, .n = n},
            {.group = {KV_NEEDS_RUN, 4 * PAGE, 16 * PAGE}, .chain = &whole, .n = n / 4},
            {.group = {KV_NEEDS_STATE, 8 * PAGE, 0}, .chain = &whole, .n = n / 8},
        };
        struct kvbm_chain ends = whole;
        struct kvbm_hit hit = KVBM_HIT_INIT;

        for (size_t i = 0; i < 3; i++)
            groups[i].where = where[i];
        ends.keys = guard(&arrays[3], all_keys, groups[k].n * sizeof(all_keys[0]));
        groups[k].chain = &ends;
        groups[k].where = guard(&arrays[4], NULL, groups[k].n);
        assert_int_equal(kvbm_manager_hit(w.m, groups, 3, NULL, &hit, NULL), 0);
        assert_true(hit.tokens <= (uint64_t)n * PAGE);
    }
}

static void test_all(void **state)
{
    static const uint32_t lengths[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129};

    (void)state;
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        for (uint32_t from = 0; from <= 3; from += 3) {
            struct kvbm_chain chain = chain_of(from, lengths[i]);

            blocking(from, lengths[i], &chain);
            with_pins(from, lengths[i], &chain);
            if (!from)
                hits(lengths[i]);
        }
}

static int begin(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < MOST; i++)
        all_blocks[i] = i;
    world_keys(100, all_keys, MOST);
    for (uint32_t i = 0; i < MOST * PAGE; i++)
        all_tokens[i] = i;
    assert_int_equal(kvbm_events_create(NULL, &events), 0);
    world_init(&w, MOST);
    world_with_disk(&w, 2 * MOST);
    w.opts.events = events;
    world_start(&w);
    world_attach(&w, false);
    return 0;
}

static int end(void **state)
{
    (void)state;
    world_fini(&w);
    assert_int_equal(kvbm_events_destroy(events), 0);
    for (size_t i = 0; i < 6; i++)
        unguard(&arrays[i]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all)};

    return cmocka_run_group_tests(tests, begin, end);
}
