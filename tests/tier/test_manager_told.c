// SPDX-License-Identifier: Apache-2.0
/* Mistakes of callers are told: refused with an error, and the log says what was wrong. */
#include <time.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "kvbm.h"
#include "tier/kitchen.h"

#define N 8u
#define LONG_MS 60000

static char log_lines[1 << 16];
static size_t log_len;

static void take_line(void *arg, int level, const char *line)
{
    size_t len = KV_MIN(strlen(line), sizeof(log_lines) - 1 - log_len);

    (void)arg, (void)level;
    memcpy(log_lines + log_len, line, len);
    log_len += len;
    log_lines[log_len] = '\0';
}

static void forget_lines(void)
{
    log_len = 0;
    log_lines[0] = '\0';
}

static void expect_line(const char *what)
{
    if (!strstr(log_lines, what))
        fail_msg("not told: %s\nbut: %s", what, log_lines);
}

static void expect_told(const char *what)
{
    expect_line(what);
    forget_lines();
}

static int listen(void **state)
{
    (void)state;
    kvbm_set_log(take_line, NULL);
    forget_lines();
    return 0;
}

static int listen_no_more(void **state)
{
    (void)state;
    kvbm_set_log(NULL, NULL);
    return 0;
}

/* ---- create and destroy ---- */

static void refuse(const struct world *w, void (*spoil)(struct kvbm_manager_opts *), int want,
                   const char *what)
{
    struct kvbm_manager_opts opts = w->opts;
    struct kvbm_manager *m = NULL;

    spoil(&opts);
    assert_int_equal(kvbm_manager_create(&opts, &m), want);
    assert_null(m);
    expect_line(what);
    expect_told("manager not created");
}

static void no_block(struct kvbm_manager_opts *o)
{
    o->block = NULL;
}
static void short_key(struct kvbm_manager_opts *o)
{
    o->key_len = 3;
}
static void long_key(struct kvbm_manager_opts *o)
{
    o->key_len = 65;
}
static void small_host(struct kvbm_manager_opts *o)
{
    o->host_bytes = 100;
}
static void small_disk(struct kvbm_manager_opts *o)
{
    o->disk_bytes = 100;
}
static void vast_disk(struct kvbm_manager_opts *o)
{
    o->disk_bytes = UINT64_MAX / 2;
}
static void no_such_io(struct kvbm_manager_opts *o)
{
    o->io = (enum kvbm_io)77;
}
static void many_volumes(struct kvbm_manager_opts *o)
{
    static char list[4000];

    memset(list, 0, sizeof(list));
    for (size_t i = 0; i < 1000; i++)
        strcat(list, "/a:");
    o->disk = list;
}
static void no_such_store(struct kvbm_manager_opts *o)
{
    o->disk = NULL;
    o->object = "nosuch://x";
}
static void no_elements(struct kvbm_manager_opts *o)
{
    static struct kvbm_layout_config block;

    block = world_block();
    block.inner_dim = 0;
    o->block = &block;
}
static void older_opts(struct kvbm_manager_opts *o)
{
    o->size = 3 * sizeof(size_t);
}

static void test_create(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 4);
    world_with_disk(&w, 64);
    refuse(&w, no_block, -EINVAL, "block");
    refuse(&w, short_key, -EINVAL, "key");
    refuse(&w, long_key, -EINVAL, "key");
    refuse(&w, small_host, -EINVAL, "host");
    refuse(&w, small_disk, -EINVAL, "disk");
    refuse(&w, vast_disk, -EINVAL, "disk");
    refuse(&w, no_such_io, -EINVAL, "copier");
    refuse(&w, many_volumes, -EINVAL, "disk");
    refuse(&w, no_such_store, -ENOENT, "object");
    refuse(&w, no_elements, -EINVAL, "host");
    refuse(&w, older_opts, -EINVAL, "size");
    assert_int_equal(kvbm_manager_create(&w.opts, NULL), -EINVAL);
    expect_told("manager not created");
    world_fini(&w);
}

static void test_forgotten_pin(void **state)
{
    struct kvbm_pin *pin;
    struct kvbm_chain chain;
    uint64_t keys[N];
    struct world w;

    (void)state;
    world_init(&w, N);
    world_start(&w);
    world_keys(100, keys, N);
    chain = world_chain(keys);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 2, &pin), 2);
    forget_lines();
    assert_int_equal(kvbm_manager_destroy(w.m, 1000), -EBUSY);
    expect_told("pins=1");
    kvbm_pin_release(pin);
    world_attach(&w, true);
    assert_int_equal(kvbm_manager_destroy(w.m, 1000), -EBUSY);
    expect_told("a pool of its registry exists");
    world_fini(&w);
}

/* A cache outlives its manager until it is detached; other calls refuse it meanwhile. */
static void test_detach_after_destroy(void **state)
{
    struct kvbm_chain chain;
    uint32_t blocks[1] = {0};
    uint64_t keys[1] = {5};
    struct world w;

    (void)state;
    world_init(&w, N);
    world_start(&w);
    world_attach(&w, false);
    chain = world_chain(keys);
    world_fill(&w, 0, 5);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 1, blocks, LONG_MS), 1);
    assert_int_equal(kvbm_manager_destroy(w.m, LONG_MS), 0);
    w.m = NULL;
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 1, blocks, LONG_MS), -EINVAL);
    assert_int_equal(kvbm_cache_load(w.cache, &chain, 1, blocks, LONG_MS), -EINVAL);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 1, 0, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_offload(w.cache, NULL, 0, 0), -EINVAL);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    w.cache = NULL;
    assert_int_equal(kvbm_cache_detach(NULL), 0);
    world_fini(&w);
}

static void test_no_shared_memory(void **state)
{
    const struct kvbm_allocator allocator = kvbm_shared_allocator(NULL);
    const struct kvbm_layout_config block = world_block();
    struct kvbm_layout *layout = NULL;

    (void)state;
    assert_int_equal(kvbm_layout_allocate(&block, &allocator, &layout), -EINVAL);
    assert_null(layout);
}

/* ---- ranks ---- */

static struct kvbm_shard heads_from(uint32_t first)
{
    return (struct kvbm_shard){.rank = first / HEADS,
                               .n_ranks = 2,
                               .axis = KVBM_SHARD_HEADS,
                               .first_head = first,
                               .total_heads = 2 * HEADS};
}

/* Store blocks, or look for them, as the rank that has these heads; returns how many there are. */
static long as_rank(struct world *w, struct kvbm_shard shard, bool store)
{
    long n;

    w->opts.shard = shard;
    forget_lines();
    world_start(w);
    world_attach(w, false);
    n = store ? world_store(w, 100, N) : world_load(w, 100, N);
    world_stop(w); /* with what is queued for the lower tiers */
    return n;
}

static void wrong_heads(struct kvbm_manager_opts *o)
{
    o->shard = heads_from(HEADS + 1);
}
static void wrong_rank(struct kvbm_manager_opts *o)
{
    o->shard.rank = 2;
    o->shard.n_ranks = 2;
}

/* Ranks under one fingerprint have equal keys and unlike bytes: neither the disk nor the store gives a
 * rank another's blocks. */
static void ranks(const char *disk, const char *object)
{
    const struct kvbm_shard whole = {.rank = 1, .n_ranks = 2}, none = {.rank = 0};
    struct world w;

    world_init(&w, 2 * N);
    w.opts.disk = disk ? w.disk : NULL;
    w.opts.disk_bytes = disk ? UINT64_C(64) * HOST_STRIDE : 0;
    w.opts.object = object ? w.object : NULL;
    refuse(&w, wrong_heads, -EINVAL, "shard");
    refuse(&w, wrong_rank, -EINVAL, "shard");
    assert_int_equal(as_rank(&w, heads_from(0), true), N);
    assert_int_equal(as_rank(&w, heads_from(HEADS), false), 0);
    if (disk)
        expect_line("another model's or rank's");
    assert_int_equal(as_rank(&w, none, false), 0);
    assert_int_equal(as_rank(&w, heads_from(0), false), N);
    assert_null(strstr(log_lines, "rank's"));
    /* a rank that holds all heads has the bytes of any other */
    assert_int_equal(as_rank(&w, none, true), N);
    assert_int_equal(as_rank(&w, whole, false), N);
    world_fini(&w);
}

static void test_ranks_on_disk(void **state)
{
    (void)state;
    ranks("disk", NULL);
}

static void test_ranks_in_a_store(void **state)
{
    (void)state;
    ranks(NULL, "object");
}

/* ---- positions ---- */

/* Tokens in place of blocks: the second half of a prompt is refused, and stored under the right
 * position afterwards. */
static void positions(uint32_t host_blocks)
{
    struct kvbm_chain first, second;
    uint32_t blocks[N];
    uint64_t keys[2 * N];
    struct kvbm_pin *pin;
    struct world w;

    world_init(&w, host_blocks);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 2 * N);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = i;
    first = second = world_chain(keys);
    second.keys = keys + N;
    second.parent = keys + N - 1;
    second.position = N * PAGE; /* tokens */
    assert_int_equal(kvbm_cache_store(w.cache, &first, N, blocks, LONG_MS), N);
    forget_lines();
    assert_int_equal(kvbm_cache_store(w.cache, &second, N, blocks, LONG_MS), -EINVAL);
    expect_told("positions count blocks");
    assert_int_equal(kvbm_manager_prepare_store(w.m, &second, N, &pin), -EINVAL);
    second.position = N;
    assert_int_equal(kvbm_cache_store(w.cache, &second, N, blocks, LONG_MS), N);
    assert_int_equal(kvbm_cache_load(w.cache, &second, N, blocks, LONG_MS), N);
    /* a key of the chain, too, not only its parent */
    first.keys = keys + 1;
    assert_int_equal(kvbm_cache_store(w.cache, &first, N, blocks, LONG_MS), -EINVAL);
    second.position = 0; /* with a parent */
    assert_int_equal(kvbm_cache_store(w.cache, &second, N, blocks, LONG_MS), -EINVAL);
    world_fini(&w);
}

static void test_positions(void **state)
{
    (void)state;
    positions(4 * N);
    positions(0);
}

/* A load from the object store by a wrong position misses, and the log says why. */
static void test_load_at_another_position(void **state)
{
    struct kvbm_chain chain, wrong;
    uint32_t blocks[N];
    uint64_t keys[N];
    struct world w;

    (void)state;
    world_init(&w, 4 * N);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, N);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = i;
    chain = wrong = world_chain(keys);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, N, blocks, LONG_MS), N);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    wrong.keys = keys + 1; /* its first key is at 1 */
    forget_lines();
    assert_int_equal(kvbm_cache_load(w.cache, &wrong, N - 1, blocks, LONG_MS), 0);
    expect_told("positions count blocks");
    assert_int_equal(kvbm_cache_load(w.cache, &chain, N, blocks, LONG_MS), N);
    world_fini(&w);
}

/* ---- deadlines ---- */

static uint64_t realtime_in_5_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return ((uint64_t)now.tv_sec + 5) * KV_NS_PER_S;
}

static void test_another_clock(void **state)
{
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = realtime_in_5_s()};
    struct kvbm_job job = KVBM_JOB_INIT;
    struct kvbm_chain chain;
    uint32_t blocks[1] = {0};
    uint64_t keys[1] = {5};
    struct kvbm_pin *pin;
    struct world w;
    int64_t id;

    (void)state;
    world_init(&w, N);
    world_start(&w);
    world_attach(&w, false);
    chain = world_chain(keys);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 1, &opts, &pin), -EINVAL);
    expect_told("CLOCK_MONOTONIC");
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &job.pin), 1);
    job.cache = w.cache;
    job.blocks = blocks;
    job.deadline_ns = opts.deadline_ns;
    assert_int_equal(kvbm_manager_submit(w.m, &job), -EINVAL);
    expect_told("CLOCK_MONOTONIC");
    for (int i = 0; i < 2; i++) {
        job.deadline_ns = i ? UINT64_MAX : INT64_MAX; /* none */
        id = kvbm_manager_submit(w.m, &job);
        assert_true(id > 0);
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, LONG_MS, NULL), 0);
    }
    kvbm_pin_release(job.pin);
    world_fini(&w);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, listen, listen_no_more)
    const struct CMUnitTest tests[] = {
        CASE(test_create),           CASE(test_forgotten_pin), CASE(test_detach_after_destroy),
        CASE(test_no_shared_memory), CASE(test_positions),     CASE(test_load_at_another_position),
        CASE(test_another_clock),    CASE(test_ranks_on_disk), CASE(test_ranks_in_a_store),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
