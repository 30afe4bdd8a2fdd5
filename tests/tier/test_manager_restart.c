// SPDX-License-Identifier: Apache-2.0
/* A manager that is started again tells its disk's blocks with their tokens, which the disk keeps. */
#include "base/unit.h"
#include "bm/events/events.h"
#include "kvbm_events.h"
#include "tier/kitchen.h"

#define FIRST 1000u
#define N 6u

/* Stored blocks of each tier by what their events had. */
struct told {
    uint32_t with[KV_N_TIERS], without[KV_N_TIERS], again[KV_N_TIERS];
};

static uint64_t keys[N];
static uint32_t tokens[N * PAGE];

static void take(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct told *told = arg;

    assert_int_equal(lost, 0);
    for (size_t k = 0; k < n; k++) {
        const struct kvbm_event *e = &events[k];

        if (e->type != KVBM_EVENT_STORED)
            continue;
        assert_true(e->position < N);
        assert_memory_equal(e->key, &keys[e->position], sizeof(keys[0]));
        assert_int_equal(e->parent != NULL, e->position != 0);
        if (e->parent)
            assert_memory_equal(e->parent, &keys[e->position - 1], sizeof(keys[0]));
        if (e->n_tokens) {
            assert_int_equal(e->n_tokens, PAGE);
            assert_memory_equal(e->tokens, tokens + e->position * PAGE, PAGE * sizeof(*tokens));
        }
        (e->again ? told->again : e->n_tokens ? told->with : told->without)[e->tier]++;
    }
}

static void begin(struct world *w, struct told *told)
{
    static const struct kvbm_sink_ops ops = {.fn = take, .again = true};

    memset(told, 0, sizeof(*told));
    assert_int_equal(kvbm_events_create(NULL, &w->opts.events), 0);
    assert_true(kvbm_events_add_sink(w->opts.events, KVBM_EVENTS_PER_TIER, &ops, told) > 0);
    world_start(w);
    world_attach(w, false);
    assert_int_equal(kvbm_events_flush(w->opts.events, 60000), 0);
}

static void end(struct world *w)
{
    world_stop(w);
    assert_int_equal(kvbm_events_destroy(w->opts.events), 0);
    w->opts.events = NULL;
}

static struct kvbm_chain chain_of(bool with)
{
    struct kvbm_chain chain = world_chain(keys);

    chain.tokens = with ? tokens : NULL;
    return chain;
}

static void store(struct world *w, bool with)
{
    struct kvbm_chain chain = chain_of(with);
    uint32_t blocks[N];

    for (uint32_t i = 0; i < N; i++) {
        blocks[i] = i;
        world_fill(w, i, keys[i]);
    }
    assert_int_equal(kvbm_cache_store(w->cache, &chain, N, blocks, 60000), N);
    assert_int_equal(kvbm_manager_drain(w->m, 60000), 0);
}

static void prepare(struct world *w, uint32_t host_blocks)
{
    world_keys(FIRST, keys, N);
    for (uint32_t i = 0; i < N * PAGE; i++)
        tokens[i] = 7 * i + 1;
    world_init(w, host_blocks);
    world_with_disk(w, 100);
}

/* With a host tier, and with staging buffers, whose blocks no pool knows before the disk has them. */
static void test_told_by_itself(void **state)
{
    struct told told;
    struct world w;

    (void)state;
    for (uint32_t host_blocks = 0; host_blocks <= 12; host_blocks += 12) {
        prepare(&w, host_blocks);
        begin(&w, &told);
        store(&w, true);
        end(&w);
        for (int round = 0; round < 2; round++) {
            begin(&w, &told);
            assert_int_equal(told.with[KV_TIER_DISK], N);
            assert_int_equal(told.without[KV_TIER_DISK] + told.again[KV_TIER_DISK], 0);
            assert_int_equal(world_load(&w, FIRST, N), N);
            end(&w);
        }
        world_fini(&w);
    }
}

/* Files of a manager without events have no room for tokens: a request brings them. So it does for
 * copies that a reader without tokens had made before. @with_events: files with room, blocks without. */
static void told_by_a_request(bool with_events, bool stores)
{
    struct kvbm_chain chain = chain_of(true);
    uint8_t at[N];
    struct told told;
    struct world w;

    prepare(&w, 12);
    if (with_events) {
        begin(&w, &told);
    } else {
        world_start(&w);
        world_attach(&w, false);
    }
    store(&w, false);
    if (with_events)
        end(&w);
    else
        world_stop(&w);
    begin(&w, &told);
    assert_int_equal(world_load(&w, FIRST, N), N);
    assert_int_equal(kvbm_events_flush(w.opts.events, 60000), 0);
    assert_int_equal(told.without[KV_TIER_DISK], N);
    assert_int_equal(told.without[KV_TIER_HOST], N);
    assert_int_equal(told.with[KV_TIER_HOST] + told.again[KV_TIER_DISK], 0);
    if (stores)
        store(&w, true);
    else
        assert_int_equal(kvbm_manager_lookup(w.m, &chain, N, at), N);
    assert_int_equal(kvbm_events_flush(w.opts.events, 60000), 0);
    assert_int_equal(told.again[KV_TIER_DISK], N);
    assert_int_equal(told.again[KV_TIER_HOST], N);
    end(&w);
    world_fini(&w);
}

static void test_told_by_a_request(void **state)
{
    (void)state;
    told_by_a_request(false, false);
    told_by_a_request(false, true);
    told_by_a_request(true, false);
}

/* A manager without events uses files with room for tokens, and leaves what they have. */
static void test_without_events_between(void **state)
{
    struct told told;
    struct world w;

    (void)state;
    prepare(&w, 12);
    begin(&w, &told);
    store(&w, true);
    end(&w);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_load(&w, FIRST, N), N);
    world_stop(&w);
    begin(&w, &told);
    assert_int_equal(told.with[KV_TIER_DISK], N);
    end(&w);
    world_fini(&w);
}

struct followed {
    uint64_t stored, lost;
};

static void follow_slowly(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct followed *followed = arg;

    usleep(1000);
    followed->lost += lost;
    for (size_t k = 0; k < n; k++)
        followed->stored += events[k].type == KVBM_EVENT_STORED;
}

/* A queue that is shorter than the disk's blocks: opening waits for the sinks before it is full. */
static void test_short_queue(void **state)
{
    const struct kvbm_events_opts opts = {.size = sizeof(opts), .queue_bytes = 2048};
    struct followed followed = {0};
    struct world w;

    (void)state;
    world_init(&w, 64);
    world_with_disk(&w, 300);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 25; i++) {
        assert_int_equal(world_store(&w, FIRST * (i + 1), 12), 12);
        assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    }
    world_stop(&w);
    assert_int_equal(kvbm_events_create(&opts, &w.opts.events), 0);
    assert_true(kvbm_events_add_callback(w.opts.events, KVBM_EVENTS_PER_TIER, follow_slowly,
                                         &followed) > 0);
    world_start(&w);
    assert_int_equal(kvbm_events_flush(w.opts.events, 60000), 0);
    assert_int_equal(followed.lost, 0);
    assert_int_equal(followed.stored, 300);
    world_attach(&w, false);
    end(&w);
    world_fini(&w);
}

struct order {
    uint64_t keys[120], parents[120];
    uint32_t n;
};

static void take_order(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct order *order = arg;

    assert_int_equal(lost, 0);
    for (size_t k = 0; k < n; k++) {
        if (events[k].type != KVBM_EVENT_STORED)
            continue;
        assert_true(order->n < 120);
        memcpy(&order->keys[order->n], events[k].key, sizeof(order->keys[0]));
        if (events[k].parent)
            memcpy(&order->parents[order->n], events[k].parent, sizeof(order->parents[0]));
        order->n++;
    }
}

/* A restart tells parents before their children, also where slots were used again: followers may drop a block
 * whose parent they don't know, as Dynamo's router does. */
static void test_parents_first(void **state)
{
    struct order order = {0};
    struct world w;

    (void)state;
    world_init(&w, 64);
    world_with_disk(&w, 120);
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 18; i++) {
        assert_int_equal(world_store(&w, FIRST * (i + 1), 12), 12);
        assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    }
    world_stop(&w);
    assert_int_equal(kvbm_events_create(NULL, &w.opts.events), 0);
    assert_true(kvbm_events_add_callback(w.opts.events, KVBM_EVENTS_PER_TIER, take_order, &order) >
                0);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(kvbm_events_flush(w.opts.events, 60000), 0);
    end(&w);
    assert_int_equal(order.n, 120);
    for (uint32_t i = 0; i < order.n; i++)
        for (uint32_t k = i; k < order.n; k++)
            assert_true(!order.parents[i] || order.keys[k] != order.parents[i]);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_told_by_itself),         cmocka_unit_test(test_told_by_a_request),
        cmocka_unit_test(test_without_events_between), cmocka_unit_test(test_short_queue),
        cmocka_unit_test(test_parents_first),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
