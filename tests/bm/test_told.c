// SPDX-License-Identifier: Apache-2.0
/* Copies that were told without tokens are told again once the tokens are known. */
#include "base/unit.h"

#include "bm/bm.h"
#include "bm/events/events.h"
#include "bm/registry/registry.h"

enum { MOST = 64, N = 3 };

static const uint64_t keys[N] = {11, 12, 13};
static const uint32_t tokens[N * BM_BLOCK] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

/* A change that a sink of the library got. */
struct change {
    enum kvbm_event_type type;
    enum kv_tier tier;
    bool again;
    uint64_t key, parent; /* parent 0: none */
    uint32_t position, n_tokens, tokens[BM_BLOCK];
};

struct world {
    struct bm bm; /* its pool: of the device */
    struct kvbm_pool *disk, *host;
    struct change got[MOST];
    size_t n;
};

static void take(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct world *w = arg;

    assert_int_equal(lost, 0);
    for (size_t i = 0; i < n; i++) {
        const struct kvbm_event *e = &events[i];
        struct change *to = &w->got[w->n++];

        assert_true(w->n <= MOST && e->n_tokens <= BM_BLOCK);
        *to = (struct change){.type = e->type,
                              .tier = e->tier,
                              .again = e->again,
                              .position = e->position,
                              .n_tokens = e->n_tokens};
        memcpy(&to->key, e->key, sizeof(to->key));
        if (e->parent)
            memcpy(&to->parent, e->parent, sizeof(to->parent));
        if (e->n_tokens)
            memcpy(to->tokens, e->tokens, e->n_tokens * sizeof(*e->tokens));
    }
}

static void begin(struct world *w)
{
    static const struct kvbm_sink_ops ops = {.fn = take, .again = true};

    memset(w, 0, sizeof(*w));
    bm_open(&w->bm, &(struct kvbm_pool_opts){.n_blocks = 8});
    w->disk =
        bm_pool(&w->bm, &(struct kvbm_pool_opts){.tier = KV_TIER_DISK, .n_blocks = 8, .name = "d"});
    w->host =
        bm_pool(&w->bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST, .n_blocks = 8, .name = "h"});
    assert_true(kvbm_events_add_sink(w->bm.events, KVBM_EVENTS_PER_TIER, &ops, w) > 0);
}

static void end(struct world *w)
{
    assert_int_equal(kvbm_registry_check(w->bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(w->disk), 0);
    assert_int_equal(kvbm_pool_destroy(w->host), 0);
    bm_close(&w->bm);
}

static void wait_told(struct world *w)
{
    assert_int_equal(kvbm_events_flush(w->bm.events, 60000), 0);
}

/* Register the first @n keys, and release them. */
static void leave(struct kvbm_pool *pool, size_t n, bool with)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = with ? tokens : NULL};
    struct kvbm_mutable fresh[N] = {0};
    struct kvbm_immutable held[N] = {0};

    assert_int_equal(kvbm_pool_allocate(pool, n, fresh, NULL), 0);
    assert_int_equal(kvbm_pool_register_chain(pool, fresh, n, &chain, held), 0);
    kvbm_pool_release(pool, held, n);
}

/* Expect changes from @at on: the first @n keys once more in @tier, in order, each behind its parent. */
static void expect_again(const struct world *w, enum kv_tier tier, size_t n)
{
    size_t k = 0;

    for (size_t i = 0; i < w->n; i++) {
        const struct change *c = &w->got[i];

        if (!c->again || c->tier != tier)
            continue;
        assert_int_equal(c->type, KVBM_EVENT_STORED);
        assert_int_equal(c->key, keys[k]);
        assert_int_equal(c->parent, k ? keys[k - 1] : 0);
        assert_int_equal(c->position, k);
        assert_int_equal(c->n_tokens, BM_BLOCK);
        assert_memory_equal(c->tokens, tokens + k * BM_BLOCK, sizeof(c->tokens));
        k++;
    }
    assert_int_equal(k, n);
}

/* Callbacks get each change of a copy once: stored and removed alternate. */
static void expect_alternating(struct world *w)
{
    bool there[KV_N_TIERS][16] = {0};
    size_t n = bm_told(&w->bm);

    for (size_t i = 0; i < n; i++) {
        bool *at = &there[w->bm.told[i].tier][bm_told_key(&w->bm, i)];

        assert_int_equal(w->bm.told[i].sequence, i); /* no number is left out */
        assert_int_equal(*at, w->bm.told[i].type == KVBM_EVENT_REMOVED);
        *at = !*at;
    }
}

/* A disk's blocks after a restart, and copies that were made of them; then a request. */
static void test_by_a_store(void **state)
{
    struct world w;

    (void)state;
    begin(&w);
    leave(w.disk, N, false);
    leave(w.host, 2, false);
    leave(w.bm.pool, N, true);
    wait_told(&w);
    assert_int_equal(w.n, 2 * N + 2 + N + 2);
    expect_again(&w, KV_TIER_DISK, N);
    expect_again(&w, KV_TIER_HOST, 2);
    expect_again(&w, KV_TIER_DEVICE, 0);
    leave(w.host, N, false); /* of a key that is told */
    leave(w.bm.pool, N, true);
    wait_told(&w);
    expect_again(&w, KV_TIER_DISK, N);
    expect_again(&w, KV_TIER_HOST, 2);
    expect_alternating(&w);
    end(&w);
}

/* A copy that is gone isn't told; one that comes back without tokens is untold again. */
static void test_removed_before(void **state)
{
    struct world w;

    (void)state;
    begin(&w);
    leave(w.disk, N, false);
    leave(w.host, N, false);
    bm_churn(w.host, 8);
    leave(w.bm.pool, N, true);
    wait_told(&w);
    expect_again(&w, KV_TIER_DISK, N);
    expect_again(&w, KV_TIER_HOST, 0);
    bm_churn(w.disk, 8);
    bm_churn(w.bm.pool, 8); /* in no tier now: followers forget the keys */
    w.n = 0;
    leave(w.disk, N, false);
    leave(w.bm.pool, 1, true);
    wait_told(&w);
    expect_again(&w, KV_TIER_DISK, 1);
    expect_alternating(&w);
    end(&w);
}

static void tell(struct world *w, size_t n)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};

    kvbm_registry_tell(w->bm.registry, &chain, n, BM_BLOCK);
}

/* A lookup with tokens, and a second block of a key in its tier. */
static void test_by_others(void **state)
{
    struct world w;

    (void)state;
    begin(&w);
    tell(&w, N); /* nothing is there */
    leave(w.disk, N, false);
    tell(&w, 2);
    tell(&w, 2);
    wait_told(&w);
    expect_again(&w, KV_TIER_DISK, 2);
    leave(w.disk, N, true); /* a duplicate of the third: its tokens are the key's */
    wait_told(&w);
    expect_again(&w, KV_TIER_DISK, N);
    expect_alternating(&w);
    end(&w);
}

/* Tokens that the registry keeps: as long as a tier has the key, and in the event of a copy that comes
 * when no other is left to be told. */
static void test_kept(void **state)
{
    struct kvbm_registry_opts opts = {.size = sizeof(opts)};
    struct kvbm_pool_opts pool = {.size = sizeof(pool), .n_blocks = 8, .block_size = BM_BLOCK};
    struct kvbm_pool *first, *second;
    struct kvbm_registry *r;
    struct world w = {0};
    uint32_t found[BM_BLOCK];

    (void)state;
    assert_int_equal(kvbm_events_create(NULL, &w.bm.events), 0);
    opts.events = w.bm.events;
    assert_int_equal(kvbm_registry_create(&opts, &r), 0);
    assert_int_equal(kvbm_registry_keep_tokens(r, BM_BLOCK), 0);
    pool.name = "first";
    assert_int_equal(kvbm_pool_create(r, &pool, &first), 0);
    pool.name = "second";
    pool.tier = KV_TIER_DISK;
    leave(first, N, true);
    pool.n_blocks = 4096; /* the entries move to more memory, and their tokens */
    assert_int_equal(kvbm_pool_create(r, &pool, &second), 0);
    assert_int_equal(kvbm_registry_keep_tokens(r, 2 * BM_BLOCK), -EBUSY);
    for (size_t k = 0; k < N; k++) {
        assert_true(kvbm_registry_tokens(r, 0, &keys[k], found));
        assert_memory_equal(found, tokens + k * BM_BLOCK, sizeof(found));
    }
    leave(second, 2, false);
    bm_churn(first, 8);
    assert_true(kvbm_registry_tokens(r, 0, &keys[1], found)); /* the second tier has it */
    assert_false(kvbm_registry_tokens(r, 0, &keys[2], found));
    leave(first, N, false);
    assert_false(kvbm_registry_tokens(r, 0, &keys[2], found));
    assert_int_equal(kvbm_registry_check(r), 0);
    assert_int_equal(kvbm_pool_destroy(first), 0);
    assert_int_equal(kvbm_pool_destroy(second), 0);
    assert_int_equal(kvbm_registry_destroy(r), 0);
    assert_int_equal(kvbm_events_destroy(w.bm.events), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_a_store),
        cmocka_unit_test(test_removed_before),
        cmocka_unit_test(test_by_others),
        cmocka_unit_test(test_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
