// SPDX-License-Identifier: Apache-2.0
/* Every operation on a block in every state, and on wrong handles. */
#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"

/* ---- a block in each state ---- */

enum { RESET, EMPTY, PART, FULL, COMPLETE, REGISTERED, N_STATES };

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

static struct kvbm_handle make(struct kvbm_pool *pool, int state)
{
    struct kvbm_block_start start = {.size = sizeof(start), .salt_hash = 1337};
    struct kvbm_immutable immutable;
    struct kvbm_complete complete;
    struct kvbm_mutable block;

    assert_int_equal(kvbm_pool_allocate(pool, 1, &block, NULL), 0);
    if (state == RESET)
        return block.handle;
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), 0);
    if (state > EMPTY)
        assert_int_equal(kvbm_mutable_add_tokens(&block, tokens, state == PART ? 2 : BM_BLOCK),
                         state == PART ? 2 : BM_BLOCK);
    if (state <= FULL)
        return block.handle;
    assert_int_equal(kvbm_mutable_commit(&block, &complete), 0);
    if (state == COMPLETE)
        return complete.handle;
    assert_int_equal(kvbm_pool_register(pool, &complete, 1, &immutable), 0);
    return immutable.handle;
}

/* Any handle back to the pool, whatever it is. */
static void unmake(struct kvbm_pool *pool, struct kvbm_handle handle)
{
    struct kvbm_immutable immutable = {handle};
    struct kvbm_complete complete = {handle};
    struct kvbm_mutable block = {handle};

    assert_true(kvbm_mutable_release(&block) == 0 || kvbm_complete_release(&complete) == 0 ||
                kvbm_immutable_release(&immutable) == 0);
    assert_int_equal(kvbm_pool_reset(pool), 0);
}

/* State of a block as seen through a handle. */
struct look {
    int state;
    struct kvbm_fill fill;
    uint32_t tokens[BM_BLOCK];
};

static struct look look_at(struct kvbm_handle handle)
{
    struct kvbm_immutable immutable = {handle};
    struct kvbm_complete complete = {handle};
    struct kvbm_mutable block = {handle};
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct look look;

    memset(&look, 0, sizeof(look));
    look.state = kvbm_mutable_fill(&block, &look.fill, look.tokens, BM_BLOCK);
    if (look.state < 0)
        look.state = kvbm_complete_fill(&complete, &look.fill, look.tokens, BM_BLOCK);
    if (look.state < 0) {
        look.state = kvbm_immutable_info(&immutable, &info);
        look.fill.state = KVBM_REGISTERED;
    }
    return look;
}

/* ---- the operations, each on whatever handle ---- */

static long init(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    (void)pool;
    return kvbm_mutable_init_sequence(&block, NULL);
}

static long add_token(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    (void)pool;
    return kvbm_mutable_add_token(&block, 9);
}

static long add_tokens(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    (void)pool;
    return kvbm_mutable_add_tokens(&block, tokens, 6);
}

static long pop(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    (void)pool;
    return kvbm_mutable_pop_tokens(&block, 1);
}

static long commit(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    struct kvbm_complete ret;
    long rc = kvbm_mutable_commit(&block, &ret);
    (void)pool;
    *h = rc < 0 ? block.handle : ret.handle;
    return rc;
}

static long apply(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    uint64_t key = 77;
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key};
    struct kvbm_mutable block = {*h};
    struct kvbm_complete ret;
    long rc = kvbm_pool_complete(pool, &block, 1, &chain, &ret);

    *h = rc < 0 ? block.handle : ret.handle;
    return rc;
}

static long register_it(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_complete block = {*h};
    struct kvbm_immutable ret;
    long rc = kvbm_pool_register(pool, &block, 1, &ret);

    *h = rc < 0 ? block.handle : ret.handle;
    return rc;
}

static long reset(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    (void)pool;
    return kvbm_mutable_reset(&block);
}

static long reset_complete(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_complete block = {*h};
    struct kvbm_mutable ret;
    long rc = kvbm_complete_reset(&block, &ret);
    (void)pool;
    *h = rc < 0 ? block.handle : ret.handle;
    return rc;
}

static long fill(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    struct kvbm_fill ret;
    (void)pool;
    return kvbm_mutable_fill(&block, &ret, NULL, 0);
}

static long fill_complete(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_complete block = {*h};
    struct kvbm_fill ret;
    (void)pool;
    return kvbm_complete_fill(&block, &ret, NULL, 0);
}

static long clone_it(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h}, ret = {0};
    long rc = kvbm_immutable_clone(&block, &ret);
    (void)pool;
    if (rc == 0)
        assert_int_equal(kvbm_immutable_release(&ret), 0);
    return rc;
}

static long downgrade(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h};
    struct kvbm_weak ret;
    (void)pool;
    return kvbm_immutable_downgrade(&block, &ret);
}

static long info(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h};
    struct kvbm_block_info ret = {.size = sizeof(ret)};
    (void)pool;
    return kvbm_immutable_info(&block, &ret);
}

static long try_return(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h};
    long rc = kvbm_immutable_try_return(&block);
    (void)pool;
    *h = block.handle;
    return rc;
}

static long release(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    long rc = kvbm_mutable_release(&block);
    (void)pool;
    *h = block.handle;
    return rc;
}

static long release_complete(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_complete block = {*h};
    long rc = kvbm_complete_release(&block);
    (void)pool;
    *h = block.handle;
    return rc;
}

static long release_immutable(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h};
    long rc = kvbm_immutable_release(&block);
    (void)pool;
    *h = block.handle;
    return rc;
}

static long release_array(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_mutable block = {*h};
    long rc = kvbm_pool_release_mutable(pool, &block, 1);

    *h = block.handle;
    return rc;
}

static long release_complete_array(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_complete block = {*h};
    long rc = kvbm_pool_release_complete(pool, &block, 1);

    *h = block.handle;
    return rc;
}

static long release_immutable_array(struct kvbm_pool *pool, struct kvbm_handle *h)
{
    struct kvbm_immutable block = {*h};
    long rc = kvbm_pool_release(pool, &block, 1);

    *h = block.handle;
    return rc;
}

#define X (-EBADFD)
static const struct op {
    const char *name;
    long (*run)(struct kvbm_pool *pool, struct kvbm_handle *h);
    long expect[N_STATES];
    int after[N_STATES]; /* the state it leaves, where it succeeds; -1: nothing is held then */
    bool of_pool;        /* names the pool itself */
    bool frees;          /* a zeroed handle is fine */
} ops[] = {
    /*                                RESET  EMPTY     PART      FULL     COMPLETE REGISTERED */
    {"init", init, {0, X, X, X, X, X}, {EMPTY, 0, 0, 0, 0, 0}, 0, 0},
    {"add_token", add_token, {X, 0, 0, -ENOSPC, X, X}, {0, PART, PART, 0, 0, 0}, 0, 0},
    {"add_tokens", add_tokens, {X, 4, 2, 0, X, X}, {0, FULL, FULL, FULL, 0, 0}, 0, 0},
    {"pop", pop, {X, -ENODATA, 0, 0, X, X}, {0, 0, PART, PART, 0, 0}, 0, 0},
    {"commit", commit, {X, -ENODATA, -ENODATA, 0, X, X}, {0, 0, 0, COMPLETE, 0, 0}, 0, 0},
    {"apply", apply, {0, X, X, X, X, X}, {COMPLETE, 0, 0, 0, 0, 0}, 1, 0},
    {"register", register_it, {X, X, X, X, 0, X}, {0, 0, 0, 0, REGISTERED, 0}, 1, 0},
    {"reset", reset, {0, 0, 0, 0, X, X}, {RESET, RESET, RESET, RESET, 0, 0}, 0, 0},
    {"reset_complete", reset_complete, {X, X, X, X, 0, X}, {0, 0, 0, 0, RESET, 0}, 0, 0},
    {"fill", fill, {0, 0, 0, 0, X, X}, {RESET, EMPTY, PART, FULL, 0, 0}, 0, 0},
    {"fill_complete", fill_complete, {X, X, X, X, 0, X}, {0, 0, 0, 0, COMPLETE, 0}, 0, 0},
    {"clone", clone_it, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, REGISTERED}, 0, 0},
    {"downgrade", downgrade, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, REGISTERED}, 0, 0},
    {"info", info, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, REGISTERED}, 0, 0},
    {"try_return", try_return, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, -1}, 0, 0},
    {"release", release, {0, 0, 0, 0, X, X}, {-1, -1, -1, -1, 0, 0}, 0, 1},
    {"release_complete", release_complete, {X, X, X, X, 0, X}, {0, 0, 0, 0, -1, 0}, 0, 1},
    {"release_immutable", release_immutable, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, -1}, 0, 1},
    {"release[]", release_array, {0, 0, 0, 0, X, X}, {-1, -1, -1, -1, 0, 0}, 1, 1},
    {"release_complete[]", release_complete_array, {X, X, X, X, 0, X}, {0, 0, 0, 0, -1, 0}, 1, 1},
    {"release_immutable[]", release_immutable_array, {X, X, X, X, X, 0}, {0, 0, 0, 0, 0, -1}, 1, 1},
};
#undef X

static const enum kvbm_state seen_as[N_STATES] = {KVBM_RESET,   KVBM_PARTIAL,  KVBM_PARTIAL,
                                                  KVBM_PARTIAL, KVBM_COMPLETE, KVBM_REGISTERED};

/* Mutable, complete, immutable. */
static int kind_of(int state)
{
    return seen_as[state] <= KVBM_PARTIAL ? KVBM_PARTIAL : (int)seen_as[state];
}

static void judge(struct kvbm_pool *pool, const struct op *op, int state)
{
    struct kvbm_handle handle = make(pool, state), before = handle;
    struct look was = look_at(handle), is;
    long rc = op->run(pool, &handle);

    if (rc != op->expect[state])
        fail_msg("%s in state %d: %ld, not %ld", op->name, state, rc, op->expect[state]);
    if (rc < 0) { /* block and handle as they were */
        is = look_at(handle);
        assert_memory_equal(&handle, &before, sizeof(handle));
        assert_memory_equal(&is, &was, sizeof(is));
        assert_int_equal(is.state, 0);
    } else if (op->after[state] < 0) {
        assert_null(handle.pool);
        assert_int_equal(look_at(before).state, -ESTALE);
        assert_int_equal(kvbm_pool_reset(pool), 0);
        return;
    } else {
        is = look_at(handle);
        assert_int_equal(is.state, 0);
        assert_int_equal(is.fill.state, seen_as[op->after[state]]);
        if (kind_of(op->after[state]) != kind_of(state)) /* a copy of what was consumed */
            assert_int_equal(look_at(before).state, -ESTALE);
    }
    unmake(pool, handle);
}

static void test_table(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    for (size_t i = 0; i < KV_COUNT(ops); i++) {
        for (int s = 0; s < N_STATES; s++) {
            judge(bm.pool, &ops[i], s);
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
        }
    }
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 7);
    bm_close(&bm);
}

/* ---- handles that aren't ---- */

static void test_bad_handles(void **state)
{
    struct kvbm_pool *other;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    other = bm_pool(&bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST});
    for (size_t i = 0; i < KV_COUNT(ops); i++) {
        const struct op *op = &ops[i];

        for (int s = 0; s < N_STATES; s++) {
            struct kvbm_handle good = make(bm.pool, s), h = {0};

            assert_int_equal(op->run(bm.pool, &h), op->frees ? 0 : -EINVAL);
            h = (struct kvbm_handle){bm.pool, 7, good.generation};
            assert_int_equal(op->run(bm.pool, &h), -ERANGE);
            h = (struct kvbm_handle){bm.pool, UINT32_MAX, good.generation};
            assert_int_equal(op->run(bm.pool, &h), -ERANGE);
            h = (struct kvbm_handle){bm.pool, good.block, good.generation - 1};
            assert_int_equal(op->run(bm.pool, &h), -ESTALE);
            h = good;
            if (op->of_pool)
                assert_int_equal(op->run(other, &h), -EXDEV);
            assert_memory_equal(&h, &good, sizeof(h));
            assert_int_equal(look_at(good).state, 0);
            unmake(bm.pool, good);
            h = good; /* a copy of what has been released */
            assert_int_equal(op->run(bm.pool, &h), -ESTALE);
            assert_memory_equal(&h, &good, sizeof(h));
        }
    }
    assert_true(bm_stats(bm.pool).stale_handles > 0);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(other), 0);
    bm_close(&bm);
}

/* The block goes on, in other hands: what the earlier holder kept doesn't open it. */
static void test_stale_after_reuse(void **state)
{
    struct kvbm_handle old[N_STATES];
    struct kvbm_mutable block;
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 1});
    for (int s = 0; s < N_STATES; s++) {
        old[s] = make(bm.pool, s);
        unmake(bm.pool, old[s]);
        assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
        for (int t = 0; t <= s; t++)
            assert_int_equal(look_at(old[t]).state, -ESTALE);
        assert_int_equal(kvbm_mutable_release(&block), 0);
    }
    bm_close(&bm);
}

/* Generations go round; what was handed out before that is told from what came behind it all the
 * same. */
static void test_generations_go_round(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 1});
    for (uint32_t before = 0; before < 8; before++) {
        for (int s = 0; s < N_STATES; s++) {
            struct kvbm_handle old[N_STATES], next;
            struct kvbm_mutable block;

            bm.pool->slots[1].generation = UINT32_MAX - before;
            for (int t = 0; t <= s; t++) {
                old[t] = make(bm.pool, t);
                unmake(bm.pool, old[t]);
            }
            assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
            next = block.handle;
            for (int t = 0; t <= s; t++)
                assert_int_equal(look_at(old[t]).state, -ESTALE);
            assert_int_equal(look_at(next).state, 0);
            assert_int_equal(kvbm_mutable_release(&block), 0);
            assert_int_equal(look_at(next).state, -ESTALE);
        }
    }
    bm_close(&bm);
}

/* And so do the lives that weak handles remember. */
static void test_lives_go_round(void **state)
{
    struct kvbm_immutable held;
    struct kvbm_weak weak[4];
    uint64_t key = 5;
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.n_blocks = 1});
    bm.pool->slots[1].life = UINT32_MAX - 1;
    for (int i = 0; i < 4; i++) {
        bm_put(bm.pool, &key, 1, &held);
        assert_int_equal(kvbm_immutable_downgrade(&held, &weak[i]), 0);
        assert_int_equal(kvbm_immutable_release(&held), 0);
        for (int k = 0; k < i; k++) /* the same key in the same block, and not what they were */
            assert_int_equal(kvbm_weak_upgrade(&weak[k], &held), -ESTALE);
        assert_int_equal(kvbm_weak_upgrade(&weak[i], &held), 0);
        assert_int_equal(kvbm_immutable_release(&held), 0);
        assert_int_equal(kvbm_pool_reset(bm.pool), 0);
    }
    bm_close(&bm);
}

static void test_arrays(void **state)
{
    uint64_t keys[3] = {10, 11, 12};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_mutable blocks[3], kept[3];
    struct kvbm_complete complete[3], kept2[3];
    struct kvbm_immutable held[4];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 3, blocks, NULL), 0);
    memcpy(kept, blocks, sizeof(kept));

    /* one twice, one stale, one zeroed: none of them is consumed */
    blocks[2] = blocks[0];
    assert_int_equal(kvbm_pool_complete(bm.pool, blocks, 3, &chain, complete), -EINVAL);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 3), -EINVAL);
    blocks[2] = kept[2];
    blocks[2].handle.generation--;
    assert_int_equal(kvbm_pool_complete(bm.pool, blocks, 3, &chain, complete), -ESTALE);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 3), -ESTALE);
    blocks[2].handle = (struct kvbm_handle){0};
    assert_int_equal(kvbm_pool_complete(bm.pool, blocks, 3, &chain, complete), -EINVAL);
    assert_memory_equal(blocks, kept, 2 * sizeof(*blocks));
    assert_int_equal(bm_stats(bm.pool).inflight_mutable, 3);
    assert_int_equal(bm_stats(bm.pool).stagings, 0);

    blocks[2] = kept[2];
    assert_int_equal(kvbm_pool_complete(bm.pool, blocks, 3, &chain, complete), 0);
    for (int i = 0; i < 3; i++)
        assert_null(blocks[i].handle.pool);
    memcpy(kept2, complete, sizeof(kept2));
    complete[1] = complete[0];
    assert_int_equal(kvbm_pool_register(bm.pool, complete, 3, held), -EINVAL);
    assert_int_equal(kvbm_pool_release_complete(bm.pool, complete, 3), -EINVAL);
    complete[1] = kept2[1];
    assert_memory_equal(complete, kept2, sizeof(complete));
    assert_int_equal(bm_stats(bm.pool).registrations, 0);
    assert_int_equal(kvbm_pool_register(bm.pool, complete, 3, held), 0);

    /* an immutable handle twice is one too many, until it is two */
    held[3] = held[1];
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), -ESTALE);
    assert_int_equal(bm_stats(bm.pool).inflight_immutable, 3);
    assert_int_equal(kvbm_immutable_clone(&held[1], &held[3]), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), 0);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 3);
    for (int i = 0; i < 4; i++)
        assert_null(held[i].handle.pool);
    bm_close(&bm);
}

/* match_scattered zeroes the handles of missing keys; one call releases the whole array. */
static void test_holes(void **state)
{
    uint64_t keys[5] = {1, 2, 3, 4, 5};
    struct kvbm_immutable held[5];
    struct kvbm_complete complete[3] = {0};
    struct kvbm_mutable blocks[3] = {0};
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    bm_leave(bm.pool, 2);
    bm_leave(bm.pool, 4);
    assert_int_equal(kvbm_pool_match_scattered(bm.pool, 0, keys, 5, 0, held), 2);
    assert_null(held[0].handle.pool);
    assert_non_null(held[1].handle.pool);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 5), 0);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 2);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &blocks[1], NULL), 0);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 3), 0);
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 1, &complete[2]), 0);
    assert_int_equal(kvbm_pool_release_complete(bm.pool, complete, 3), 0);
    blocks[0].handle.block = 0x7fffff00; /* a hole is a hole, whatever else is in it */
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, 3), 0);
    assert_int_equal(bm_stats(bm.pool).reset_pool_size, 5);
    bm_close(&bm);
}

/* ---- what a block says ---- */

static uint64_t key_of(const struct kvbm_immutable *block)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    uint64_t key;

    assert_int_equal(kvbm_immutable_info(block, &info), 0);
    memcpy(&key, info.key, sizeof(key));
    return key;
}

static uint64_t committed(struct kvbm_pool *pool, const struct kvbm_block_start *start,
                          const uint32_t *what)
{
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    uint64_t key;

    assert_int_equal(kvbm_pool_allocate(pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(&block, start), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, what, BM_BLOCK), BM_BLOCK);
    assert_int_equal(kvbm_mutable_commit(&block, &complete), 0);
    assert_null(block.handle.pool);
    assert_int_equal(kvbm_pool_register(pool, &complete, 1, &held), 0);
    key = key_of(&held);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    return key;
}

/* Values of Dynamo's lib/tokens: tokens 1..8, salt hash 1337. */
static void test_hashes(void **state)
{
    const uint64_t first = UINT64_C(14643705804678351452);
    struct kvbm_block_start start = {.size = sizeof(start), .salt_hash = 1337};
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_true(committed(bm.pool, &start, tokens) == first);
    start.parent = &first;
    start.position = 1;
    assert_true(committed(bm.pool, &start, tokens + 4) == UINT64_C(13257339816715102022));
    start.chain = KVBM_CHAIN_SEED_SALT;
    assert_true(committed(bm.pool, &start, tokens + 4) == UINT64_C(4945711292740353085));
    assert_true(committed(bm.pool, NULL, tokens) == UINT64_C(8052976908588476977));
    bm_close(&bm);
}

static void test_fill(void **state)
{
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_fill fill;
    uint32_t out[8];
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_fill(&block, &fill, out, 8), 0);
    assert_int_equal(fill.state, KVBM_RESET);
    assert_int_equal(fill.len + fill.remaining, 0);
    assert_int_equal(kvbm_mutable_init_sequence(&block, NULL), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, tokens, 3), 3);
    assert_int_equal(kvbm_mutable_pop_tokens(&block, 4), -ENODATA);
    assert_int_equal(kvbm_mutable_pop_tokens(&block, 0), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, NULL, 0), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, NULL, 1), -EINVAL);
    assert_int_equal(kvbm_mutable_fill(&block, &fill, out, 2), 0);
    assert_int_equal(fill.len, 3);
    assert_int_equal(fill.remaining, 1);
    assert_memory_equal(out, tokens, 2 * sizeof(*out));
    assert_int_equal(kvbm_mutable_pop_tokens(&block, 2), 0);
    assert_int_equal(kvbm_mutable_add_tokens(&block, tokens + 4, 4), 3);
    assert_int_equal(kvbm_mutable_commit(&block, &complete), 0);
    assert_int_equal(kvbm_complete_fill(&complete, &fill, out, 8), 0);
    assert_int_equal(fill.state, KVBM_COMPLETE);
    assert_int_equal(fill.len, BM_BLOCK);
    assert_int_equal(fill.remaining, 0);
    assert_memory_equal(out, ((uint32_t[]){1, 5, 6, 7}), 4 * sizeof(*out));
    assert_int_equal(kvbm_complete_release(&complete), 0);
    bm_close(&bm);
}

/* Blocks of one token: what is kept of each still lies where its numbers may (the sanitizer says
 * so). */
static void test_small_blocks(void **state)
{
    struct kvbm_block_start start = {.size = sizeof(start), .salt_hash = 1337};
    struct kvbm_mutable blocks[3];
    struct kvbm_complete complete[3];
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.block_size = 1});
    assert_int_equal(kvbm_pool_allocate(bm.pool, 3, blocks, NULL), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvbm_mutable_init_sequence(&blocks[i], &start), 0);
        assert_int_equal(kvbm_mutable_add_tokens(&blocks[i], tokens + i, 2), 1);
    }
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvbm_mutable_commit(&blocks[i], &complete[i]), 0);
    assert_int_equal(kvbm_pool_release_complete(bm.pool, complete, 3), 0);
    bm_close(&bm);
}

static void test_bad_starts(void **state)
{
    uint64_t parent = 5;
    struct kvbm_block_start start = {.size = sizeof(start), .parent = &parent};
    struct kvbm_registry_opts wide = {.size = sizeof(wide), .key_len = 16};
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_mutable block;
    struct bm bm;
    (void)state;

    bm_open(&bm, &(struct kvbm_pool_opts){.groups = 1});
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), -EINVAL); /* a parent at 0 */
    start.parent = NULL;
    start.position = 3;
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), -EINVAL);
    start.position = 0;
    start.group = 1; /* not the pool's */
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), -EINVAL);
    start.group = 64;
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), -EINVAL);
    start.group = 0;
    start.chain = 2;
    assert_int_equal(kvbm_mutable_init_sequence(&block, &start), -EINVAL);
    assert_int_equal(kvbm_mutable_release(&block), 0);

    assert_int_equal(kvbm_registry_create(&wide, &registry), 0);
    assert_int_equal(
        kvbm_pool_create(registry,
                         &(struct kvbm_pool_opts){
                             .size = sizeof(struct kvbm_pool_opts), .n_blocks = 1, .block_size = 4},
                         &pool),
        0);
    assert_int_equal(kvbm_pool_allocate(pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(&block, NULL), -ENOTSUP);
    assert_int_equal(kvbm_mutable_release(&block), 0);
    assert_int_equal(kvbm_pool_destroy(pool), 0);
    assert_int_equal(kvbm_registry_destroy(registry), 0);
    bm_close(&bm);
}

static void leave_scope(struct kvbm_pool *pool)
{
    uint64_t keys[2] = {1, 2};
    KVBM_AUTO(mutable) struct kvbm_mutable block = {0};
    KVBM_AUTO(complete) struct kvbm_complete complete = {0};
    KVBM_AUTO(immutable) struct kvbm_immutable held = {0};
    KVBM_AUTO(immutable) struct kvbm_immutable nothing = {0};

    assert_int_equal(kvbm_pool_allocate(pool, 1, &block, NULL), 0);
    assert_int_equal(bm_complete_at(pool, 0, NULL, 0, &keys[0], 1, &complete), 0);
    bm_put(pool, &keys[1], 1, &held);
    assert_null(nothing.handle.pool);
    assert_int_equal(bm_available(pool), 4);
}

static void test_auto(void **state)
{
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    leave_scope(bm.pool);
    assert_int_equal(bm_available(bm.pool), 7);
    assert_true(bm_has(bm.pool, 2));
    assert_false(bm_has(bm.pool, 1));
    bm_close(&bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_bad_handles),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_stale_after_reuse),
        cmocka_unit_test(test_holes),
        cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_small_blocks),
        cmocka_unit_test(test_fill),
        cmocka_unit_test(test_bad_starts),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_generations_go_round),
        cmocka_unit_test(test_lives_go_round),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
