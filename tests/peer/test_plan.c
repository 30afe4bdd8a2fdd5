// SPDX-License-Identifier: Apache-2.0
/*
 * Plans between tensor-parallel layouts. A naive model knows the value of each element by its place
 * in the model; groups of ranks hold their parts of it. What a plan's copies bring must equal what
 * the model says, and no other byte may change. The same parts go through a copier.
 */
#include "base/core/error.h"
#include "base/unit.h"
#include "kvbm_plan.h"
#include "starve.h"
#include "tier/transfer_unit.h"

#define KEYS 3   /* blocks that are moved */
#define BLOCKS 5 /* of each layout */
#define POISON 0xA5

/* ---- the model: tensor-parallel groups that hold one model's blocks ---- */

struct model {
    uint32_t layers, outers, page, heads, dim;
};

struct group {
    struct model model;
    uint32_t n;
    bool whole; /* each rank holds all heads (MLA) */
    struct kvbm_layout_config config;
    struct rank {
        struct kvbm_layout *layout;
        struct kvbm_shard shard;
        uint32_t blocks[KEYS]; /* where the keys are */
    } ranks[32];
};

/* The share of rank @r; ranks that outnumber the heads hold replicas. */
static void share(const struct group *g, uint32_t r, uint32_t *first, uint32_t *n)
{
    uint32_t heads = g->model.heads, end = (r + 1) * heads / g->n;

    *first = g->whole ? 0 : r * heads / g->n;
    *n = g->whole ? heads : KV_MAX(end, *first + 1) - *first;
}

static void group_init(struct group *g, struct rng *rng)
{
    const struct kvbm_storage_opts storage = {.size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM};

    for (uint32_t r = 0; r < g->n; r++) {
        struct kvbm_layout_config c = g->config;
        struct rank *rank = &g->ranks[r];
        uint32_t first, heads, at = rng_below(rng, BLOCKS);

        share(g, r, &first, &heads);
        c.size = sizeof(c);
        c.num_blocks = BLOCKS;
        c.num_layers = g->model.layers;
        c.outer_dim = g->model.outers;
        c.page_size = g->model.page;
        c.inner_dim = heads * g->model.dim;
        c.num_heads = heads;
        rank->layout = unit_layout(&c, &storage);
        if (!g->whole)
            rank->shard =
                (struct kvbm_shard){r, g->n, KVBM_SHARD_HEADS, first, g->model.heads, {0}};
        else if (g->n > 1)
            rank->shard = (struct kvbm_shard){.rank = r, .n_ranks = g->n};
        for (uint32_t key = 0; key < KEYS; key++)
            rank->blocks[key] = (at + key) % BLOCKS;
        for (uint32_t i = 0; i < unit_storages(rank->layout); i++) {
            struct kvbm_storage *s = kvbm_layout_storage(rank->layout, i);

            memset((void *)(uintptr_t)kvbm_storage_addr(s), POISON, kvbm_storage_bytes(s));
        }
    }
}

static void group_fini(struct group *g)
{
    for (uint32_t r = 0; r < g->n; r++)
        kvbm_layout_destroy(g->ranks[r].layout);
}

/* The element at @p of a key, p.head counted in the model: 0 to 15, which all dtypes have. */
static uint32_t value(uint32_t key, const struct place *p)
{
    struct rng rng = {((uint64_t)key << 56) ^ ((uint64_t)p->layer << 48) ^
                      ((uint64_t)p->outer << 40) ^ ((uint64_t)p->token << 28) ^
                      ((uint64_t)p->head << 14) ^ p->dim};

    return (uint32_t)(rng_next(&rng) >> 60);
}

/* Put what the model says about a rank's part into @bytes, a snapshot of its storages. */
static void put_model(const struct group *g, uint32_t r, struct bytes *bytes)
{
    const struct kvbm_layout *layout = g->ranks[r].layout;
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    uint32_t first, heads;

    share(g, r, &first, &heads);
    for (uint32_t key = 0; key < KEYS; key++) {
        uint32_t n = c->num_layers * c->outer_dim * c->page_size * heads * g->model.dim;

        for (uint32_t e = 0; e < n; e++) {
            struct place p = {.block = g->ranks[r].blocks[key], .dim = e % g->model.dim};
            uint32_t rest = e / g->model.dim, element;
            size_t at;

            p.head = rest % heads, rest /= heads;
            p.token = rest % c->page_size, rest /= c->page_size;
            p.outer = rest % c->outer_dim;
            p.layer = rest / c->outer_dim;
            at = unit_at(layout, &p, heads);
            p.head += first;
            element = unit_encode(c->dtype, value(key, &p));
            memcpy(bytes->at + at, &element, c->dtype_width_bytes);
        }
    }
}

static void group_fill(struct group *g)
{
    for (uint32_t r = 0; r < g->n; r++) {
        struct bytes bytes = unit_snapshot(g->ranks[r].layout);

        put_model(g, r, &bytes);
        unit_put(g->ranks[r].layout, &bytes);
        free(bytes.at);
    }
}

/* Require that rank @r holds its part, and poison everywhere else. Poisons it again. */
static void check_rank(struct group *g, uint32_t r)
{
    struct bytes have = unit_snapshot(g->ranks[r].layout), want = have;

    want.at = malloc(want.len);
    assert_non_null(want.at);
    memset(want.at, POISON, want.len);
    put_model(g, r, &want);
    assert_memory_equal(have.at, want.at, want.len);
    free(want.at);
    memset(have.at, POISON, have.len);
    unit_put(g->ranks[r].layout, &have);
    free(have.at);
}

/* ---- plans, carried out ---- */

static struct kvbm_plan_rank plan_rank(const struct rank *rank)
{
    return (struct kvbm_plan_rank){kvbm_layout_get_config(rank->layout), rank->shard};
}

static int plan_of(const struct group *to, uint32_t r, const struct group *from,
                   struct kvbm_plan_heads *missing, struct kvbm_plan **ret)
{
    struct kvbm_plan_rank local = plan_rank(&to->ranks[r]), remotes[32];

    for (uint32_t i = 0; i < from->n; i++)
        remotes[i] = plan_rank(&from->ranks[i]);
    return kvbm_plan_create(&local, remotes, from->n, missing, ret);
}

static uint8_t *storage_at(const struct kvbm_layout *layout, uint32_t storage)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct kvbm_view view;

    /* block 0 begins at the aligned address */
    assert_int_equal(
        kvbm_layout_region(layout, 0, c->kind == KVBM_FULLY_CONTIGUOUS ? 0 : storage, 0, &view), 0);
    return (uint8_t *)(uintptr_t)view.addr;
}

static void copy_run(const struct kvbm_layout_config *to, uint8_t *local, uint64_t local_len,
                     const struct kvbm_layout_config *from, const uint8_t *remote,
                     uint64_t remote_len)
{
    uint64_t n = remote_len / from->dtype_width_bytes;

    assert_int_equal(n, local_len / to->dtype_width_bytes);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = 0, small = 0, element;

        memcpy(&bits, remote + i * from->dtype_width_bytes, from->dtype_width_bytes);
        while (small < 15 && unit_encode(from->dtype, small) != bits)
            small++;
        element = unit_encode(to->dtype, small);
        memcpy(local + i * to->dtype_width_bytes, &element, to->dtype_width_bytes);
    }
}

static void run_piece(const struct kvbm_plan_copy *c, const struct kvbm_plan_piece *piece,
                      const struct kvbm_layout *local, const struct kvbm_layout *remote)
{
    uint8_t *to = storage_at(local, c->local_storage) + piece->local_offset;
    const uint8_t *from = storage_at(remote, c->remote_storage) + piece->remote_offset;

    for (uint64_t i = 0; i < c->count[0]; i++) {
        for (uint64_t j = 0; j < c->count[1]; j++) {
            for (uint64_t k = 0; k < c->count[2]; k++)
                copy_run(kvbm_layout_get_config(local),
                         to + i * c->local_stride[0] + j * c->local_stride[1] +
                             k * c->local_stride[2],
                         c->local_len, kvbm_layout_get_config(remote),
                         from + i * c->remote_stride[0] + j * c->remote_stride[1] +
                             k * c->remote_stride[2],
                         c->remote_len);
        }
    }
}

static void run_copies(const struct kvbm_plan *plan, const struct group *to, uint32_t r,
                       const struct group *from)
{
    const uint32_t *remote_blocks[32] = {0};
    struct kvbm_plan_piece *pieces;
    size_t n_parts, n_copies;
    const struct kvbm_plan_part *parts = kvbm_plan_parts(plan, &n_parts);
    const struct kvbm_plan_copy *copies = kvbm_plan_copies(plan, &n_copies);
    long n;

    for (size_t i = 0; i < n_parts; i++)
        remote_blocks[parts[i].rank] = from->ranks[parts[i].rank].blocks;
    pieces = calloc(n_copies * KEYS, sizeof(*pieces));
    assert_non_null(pieces);
    assert_int_equal(kvbm_plan_apply(plan, to->ranks[r].blocks, remote_blocks, KEYS, pieces,
                                     n_copies * KEYS - 1),
                     -ENOSPC);
    n = kvbm_plan_apply(plan, to->ranks[r].blocks, remote_blocks, KEYS, pieces, n_copies * KEYS);
    assert_int_equal(n, n_copies * KEYS);
    for (long i = 0; i < n; i++) {
        const struct kvbm_plan_copy *copy = &copies[pieces[i].copy];

        run_piece(copy, &pieces[i], to->ranks[r].layout,
                  from->ranks[parts[copy->part].rank].layout);
    }
    free(pieces);
}

static void run_parts(struct kvbm_copier *copier, const struct kvbm_plan *plan,
                      const struct group *to, uint32_t r, const struct group *from)
{
    size_t n;
    const struct kvbm_plan_part *parts = kvbm_plan_parts(plan, &n);

    for (size_t i = 0; i < n; i++) {
        const struct rank *remote = &from->ranks[parts[i].rank];
        struct kvbm_transfer t = {.size = sizeof(t),
                                  .src = remote->layout,
                                  .dst = to->ranks[r].layout,
                                  .src_blocks = remote->blocks,
                                  .dst_blocks = to->ranks[r].blocks,
                                  .n = KEYS,
                                  .src_head = parts[i].remote_head,
                                  .dst_head = parts[i].local_head,
                                  .n_heads = parts[i].n_heads};
        int64_t id = kvbm_copier_submit(copier, &t);
        struct kvbm_done done;

        assert_true(id > 0);
        assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
        assert_int_equal(done.n_ok, KEYS);
    }
}

/* Fill @to from @from by copies, and check all of it; also by parts when there is a copier. */
static void pull(struct kvbm_copier *copier, struct group *to, const struct group *from)
{
    for (uint32_t r = 0; r < to->n; r++) {
        struct kvbm_plan *plan = NULL;

        assert_int_equal(plan_of(to, r, from, NULL, &plan), 0);
        if (copier) {
            run_parts(copier, plan, to, r, from);
            check_rank(to, r);
        }
        run_copies(plan, to, r, from);
        check_rank(to, r);
        run_copies(plan, to, r, from);
        kvbm_plan_destroy(plan);
    }
}

static struct group group_of(const struct model *model, uint32_t n, enum kvbm_layout_kind kind,
                             enum kvbm_block_order order, kvx_dtype_t dtype)
{
    return (struct group){
        .model = *model, .n = n, .config = {.kind = kind, .order = order, .dtype = dtype}};
}

/* From group to group and back: every byte of the first is in the last. */
static void round_trip(uint32_t a, uint32_t b, enum kvbm_block_order order_b, kvx_dtype_t dtype_b)
{
    static const struct model model = {3, 2, 4, 16, 16};
    struct group first = group_of(&model, a, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD, KVX_DTYPE_BF16);
    struct group middle =
        group_of(&model, b, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, order_b, dtype_b);
    struct group last = first;
    struct rng rng = {test_seed()};

    first.config.alignment = 512;
    group_init(&first, &rng);
    group_init(&middle, &rng);
    group_init(&last, &rng);
    group_fill(&first);
    pull(NULL, &middle, &first);
    pull(NULL, &last, &middle);
    for (uint32_t r = 0; r < a; r++)
        check_rank(&last, r);
    group_fini(&first);
    group_fini(&middle);
    group_fini(&last);
}

static void test_round_trips(void **state)
{
    (void)state;
    round_trip(4, 2, KVBM_ORDER_NHD, KVX_DTYPE_BF16);
    round_trip(4, 2, KVBM_ORDER_HND, KVX_DTYPE_BF16);
    round_trip(2, 8, KVBM_ORDER_NHD, KVX_DTYPE_BF16);
    round_trip(2, 8, KVBM_ORDER_HND, KVX_DTYPE_F32);
    round_trip(1, 16, KVBM_ORDER_HND, KVX_DTYPE_BF16);
    round_trip(16, 32, KVBM_ORDER_NHD, KVX_DTYPE_F32); /* each head twice */
}

static struct group random_group(struct rng *rng, const struct model *model, bool whole)
{
    static const kvx_dtype_t dtypes[] = {KVX_DTYPE_F32, KVX_DTYPE_BF16, KVX_DTYPE_F16,
                                         KVX_DTYPE_F8_E4M3};
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};
    struct group g = group_of(model, 1 + rng_below(rng, 12), kinds[rng_below(rng, 3)],
                              rng_below(rng, 2) ? KVBM_ORDER_HND : KVBM_ORDER_NHD,
                              dtypes[rng_below(rng, 2) ? 1 : rng_below(rng, 4)]);

    g.config.alignment = 1u << rng_below(rng, 8);
    g.whole = whole || rng_below(rng, 6) == 0;
    return g;
}

static void test_random(void **state)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 1};
    struct kvbm_copier *copier = NULL;
    struct rng rng = {test_seed() + 1};

    (void)state;
    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    for (long round = test_rounds(400); round > 0; round--) {
        struct model model = {1 + rng_below(&rng, 3), 1 + rng_below(&rng, 2),
                              1u << rng_below(&rng, 4), 1 + rng_below(&rng, 12),
                              1 + rng_below(&rng, 5)};
        bool whole = rng_below(&rng, 8) == 0;
        struct group from = random_group(&rng, &model, whole);
        struct group to = random_group(&rng, &model, whole);

        group_init(&from, &rng);
        group_init(&to, &rng);
        group_fill(&from);
        pull(copier, &to, &from);
        group_fini(&from);
        group_fini(&to);
    }
    kvbm_copier_destroy(copier);
}

/* ---- what is told, and what is refused ---- */

static struct kvbm_layout_config heads_config(uint32_t heads)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = 10,
                                       .num_layers = 2,
                                       .outer_dim = 2,
                                       .page_size = 4,
                                       .inner_dim = heads * 8,
                                       .dtype = KVX_DTYPE_BF16,
                                       .num_heads = heads};
}

static struct kvbm_plan_rank part_of(const struct kvbm_layout_config *c, uint32_t rank, uint32_t n,
                                     uint32_t first, uint32_t total)
{
    return (struct kvbm_plan_rank){c, {rank, n, KVBM_SHARD_HEADS, first, total, {0}}};
}

/* Heads that nobody holds are named, wherever they are. */
static void test_gaps(void **state)
{
    struct kvbm_layout_config four = heads_config(4), two = heads_config(2);
    struct kvbm_plan_rank local = part_of(&four, 0, 2, 0, 8);
    const struct kvbm_plan_rank all[] = {part_of(&two, 0, 4, 0, 8), part_of(&two, 1, 4, 2, 8),
                                         part_of(&two, 2, 4, 4, 8), part_of(&two, 3, 4, 6, 8)};
    struct kvbm_plan_heads gap = {99, 99};
    struct kvbm_plan *plan = NULL;
    size_t n;

    (void)state;
    assert_int_equal(kvbm_plan_create(&local, all, 2, &gap, &plan), 0);
    assert_int_equal(gap.first, 99); /* written on failure only */
    assert_int_equal(kvbm_plan_parts(plan, &n)[1].local_head, 2);
    assert_int_equal(n, 2);
    kvbm_plan_destroy(plan);
    assert_int_equal(kvbm_plan_create(&local, all, 1, &gap, &plan), -ENODATA);
    assert_true(gap.first == 2 && gap.n == 2);
    assert_int_equal(kvbm_plan_create(&local, all + 1, 3, &gap, &plan), -ENODATA);
    assert_true(gap.first == 0 && gap.n == 2);
    local.shard.first_head = 4;
    assert_int_equal(kvbm_plan_create(&local, all, 2, NULL, &plan), -ENODATA);
    assert_int_equal(kvbm_plan_create(&local, all, 2, &gap, &plan), -ENODATA);
    assert_true(gap.first == 4 && gap.n == 4);
}

/* Ranks that need the same heads read them from different replicas. */
static void test_replicas(void **state)
{
    struct kvbm_layout_config one = heads_config(1);
    struct kvbm_plan_rank remotes[16];
    uint32_t used[16] = {0};

    (void)state;
    for (uint32_t i = 0; i < 16; i++)
        remotes[i] = part_of(&one, i, 16, i / 2, 8);
    for (uint32_t r = 0; r < 32; r++) { /* each head four times here, twice there */
        struct kvbm_plan_rank local = part_of(&one, r, 32, r / 4, 8);
        struct kvbm_plan *plan = NULL;
        size_t n;

        assert_int_equal(kvbm_plan_create(&local, remotes, 16, NULL, &plan), 0);
        used[kvbm_plan_parts(plan, &n)[0].rank]++;
        assert_int_equal(n, 1);
        kvbm_plan_destroy(plan);
    }
    for (uint32_t i = 0; i < 16; i++)
        assert_int_equal(used[i], 2);
}

/* Layouts that don't know their heads, as MLA's: whole blocks, from different ranks. */
static void test_whole(void **state)
{
    struct kvbm_layout_config c = heads_config(1);
    struct kvbm_plan_rank remotes[3], local = {.layout = &c};
    uint32_t used[3] = {0};

    (void)state;
    c.num_heads = 0;
    c.outer_dim = 1;
    for (uint32_t i = 0; i < 3; i++)
        remotes[i] = (struct kvbm_plan_rank){&c, {.rank = i, .n_ranks = 3}};
    for (uint32_t r = 0; r < 6; r++) {
        const struct kvbm_plan_part *parts;
        const struct kvbm_plan_copy *copies;
        struct kvbm_plan *plan = NULL;
        size_t n;

        local.shard = (struct kvbm_shard){.rank = r, .n_ranks = 6};
        assert_int_equal(kvbm_plan_create(&local, remotes, 3, NULL, &plan), 0);
        parts = kvbm_plan_parts(plan, &n);
        assert_true(n == 1 && !parts[0].n_heads && !parts[0].remote_head);
        used[parts[0].rank]++;
        copies = kvbm_plan_copies(plan, &n);
        assert_true(n == 1 && copies[0].count[0] == 1 && copies[0].count[2] == 1);
        assert_int_equal(copies[0].remote_len, 2 * 4 * 8 * 2); /* a block in one run */
        kvbm_plan_destroy(plan);
    }
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(used[i], 2);
}

/* Change one thing of the remote rank. */
static int plan_with(struct kvbm_layout_config config, struct kvbm_shard shard)
{
    struct kvbm_layout_config mine = heads_config(4);
    struct kvbm_plan_rank local = part_of(&mine, 0, 2, 0, 8), remote = {&config, shard};
    struct kvbm_plan *plan = NULL;
    int err = kvbm_plan_create(&local, &remote, 1, NULL, &plan);

    kvbm_plan_destroy(plan);
    return err;
}

static void test_refusals(void **state)
{
    const struct kvbm_shard good = {1, 2, KVBM_SHARD_HEADS, 0, 8, {0}};
    struct kvbm_layout_config c = heads_config(4), other;
    struct kvbm_plan_rank rank = {&c, good};
    struct kvbm_plan *plan = NULL;
    struct kvbm_shard shard;

    (void)state;
    assert_int_equal(plan_with(c, good), 0);
    other = c, other.num_layers = 3;
    assert_int_equal(plan_with(other, good), -EMEDIUMTYPE);
    other = c, other.outer_dim = 1;
    assert_int_equal(plan_with(other, good), -EMEDIUMTYPE);
    other = c, other.page_size = 8;
    assert_int_equal(plan_with(other, good), -EMEDIUMTYPE);
    other = c, other.inner_dim = 64;
    assert_int_equal(plan_with(other, good), -EMEDIUMTYPE);
    other = c, other.dtype = KVX_DTYPE_S32, other.dtype_width_bytes = 4;
    assert_int_equal(plan_with(other, good), -ENOTSUP);
    other = c, other.dtype = 0, other.dtype_width_bytes = 4;
    assert_int_equal(plan_with(other, good), -ENOTSUP);
    other = c, other.page_size = 3;
    assert_int_equal(plan_with(other, good), -EINVAL);
    other = c, other.num_blocks = UINT64_MAX;
    assert_int_equal(plan_with(other, good), -EOVERFLOW);
    shard = good, shard.total_heads = 16;
    assert_int_equal(plan_with(c, shard), -EMEDIUMTYPE);
    shard = good, shard.first_head = UINT32_MAX;
    assert_int_equal(plan_with(c, shard), -EINVAL);
    shard = good, shard.rank = 2;
    assert_int_equal(plan_with(c, shard), -EINVAL);
    shard = good, shard.axis = 7;
    assert_int_equal(plan_with(c, shard), -EINVAL);
    shard = good, shard.reserved[2] = 1;
    assert_int_equal(plan_with(c, shard), -EINVAL);
    assert_int_equal(kvbm_plan_create(&rank, &rank, 0, NULL, &plan), -EINVAL);
    assert_int_equal(kvbm_plan_create(&rank, &rank, KVBM_MAX_PLAN_RANKS + 1, NULL, &plan), -EINVAL);
    assert_int_equal(kvbm_plan_create(NULL, &rank, 1, NULL, &plan), -EINVAL);
    assert_int_equal(kvbm_plan_create(&rank, NULL, 1, NULL, &plan), -EINVAL);
    assert_int_equal(kvbm_plan_create(&rank, &rank, 1, NULL, NULL), -EINVAL);
    rank.layout = NULL;
    assert_int_equal(kvbm_plan_create(&rank, &rank, 1, NULL, &plan), -EINVAL);
    assert_null(plan);
    kvbm_plan_destroy(NULL);
}

/* A layout that doesn't know its heads has heads of the other's size. */
static void test_unknown_heads(void **state)
{
    struct kvbm_layout_config c = heads_config(4), hnd = c;
    struct kvbm_plan_rank local = {.layout = &c}, remote = {.layout = &hnd};
    struct kvbm_plan *plan = NULL;
    size_t n;

    (void)state;
    hnd.order = KVBM_ORDER_HND;
    c.num_heads = 0; /* the other knows */
    assert_int_equal(kvbm_plan_create(&local, &remote, 1, NULL, &plan), 0);
    assert_int_equal(kvbm_plan_parts(plan, &n)[0].n_heads, 4);
    kvbm_plan_destroy(plan);
}

static void test_apply_refusals(void **state)
{
    struct kvbm_layout_config c = heads_config(4);
    struct kvbm_plan_rank rank = {.layout = &c};
    const uint32_t good[] = {9, 0}, bad[] = {0, 10};
    const uint32_t *remote[] = {good, NULL}, *remote_bad[] = {bad, NULL};
    const struct kvbm_plan_rank two[] = {rank, rank};
    struct kvbm_plan_piece pieces[2];
    struct kvbm_plan *plan = NULL;

    (void)state;
    assert_int_equal(kvbm_plan_create(&rank, two, 2, NULL, &plan), 0);
    assert_int_equal(kvbm_plan_apply(plan, good, remote, 2, pieces, 2), 2);
    assert_int_equal(pieces[0].local_offset, 9 * 2 * 2 * 4 * 4 * 8 * 2);
    assert_int_equal(kvbm_plan_apply(plan, good, remote, 0, NULL, 0), 0);
    assert_int_equal(kvbm_plan_apply(plan, good, remote, 2, pieces, 1), -ENOSPC);
    assert_int_equal(kvbm_plan_apply(plan, good, remote, 1, NULL, 1), -ENOSPC);
    assert_int_equal(kvbm_plan_apply(plan, bad, remote, 2, pieces, 2), -ERANGE);
    assert_int_equal(kvbm_plan_apply(plan, good, remote_bad, 2, pieces, 2), -ERANGE);
    assert_int_equal(kvbm_plan_apply(plan, good, remote + 1, 2, pieces, 2), -EINVAL);
    assert_int_equal(kvbm_plan_apply(plan, NULL, remote, 2, pieces, 2), -EINVAL);
    assert_int_equal(kvbm_plan_apply(NULL, good, remote, 2, pieces, 2), -EINVAL);
    kvbm_plan_destroy(plan);
}

/* The most ranks and layers that a peer may claim: bounded memory and time. */
static void test_limits(void **state)
{
    struct kvbm_layout_config mine = heads_config(KVBM_MAX_PLAN_RANKS), one = heads_config(1);
    struct kvbm_plan_rank local = part_of(&mine, 0, 1, 0, KVBM_MAX_PLAN_RANKS);
    struct kvbm_plan_rank *remotes = calloc(KVBM_MAX_PLAN_RANKS, sizeof(*remotes));
    struct kvbm_plan *plan = NULL;
    size_t n;

    (void)state;
    assert_non_null(remotes);
    for (uint32_t i = 0; i < KVBM_MAX_PLAN_RANKS; i++)
        remotes[i] = part_of(&one, i, KVBM_MAX_PLAN_RANKS, i, KVBM_MAX_PLAN_RANKS);
    assert_int_equal(kvbm_plan_create(&local, remotes, KVBM_MAX_PLAN_RANKS, NULL, &plan), 0);
    kvbm_plan_copies(plan, &n);
    assert_int_equal(n, KVBM_MAX_PLAN_RANKS);
    kvbm_plan_destroy(plan);
    mine.num_layers = one.num_layers = KVBM_MAX_LAYERS;
    one.kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS;
    assert_int_equal(kvbm_plan_create(&local, remotes, KVBM_MAX_PLAN_RANKS, NULL, &plan),
                     -EOVERFLOW);
    free(remotes);
}

static void test_starved(void **state)
{
    struct kvbm_layout_config c = heads_config(4);
    struct kvbm_plan_rank rank = {.layout = &c};
    int err = -ENOMEM;

    (void)state;
    for (long n = 1; err == -ENOMEM; n++) {
        struct kvbm_plan *plan = NULL;

        starve_at(n);
        err = kvbm_plan_create(&rank, &rank, 1, NULL, &plan);
        assert_true(err == (starved() ? -ENOMEM : 0));
        starve_at(0);
        kvbm_plan_destroy(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),   cmocka_unit_test(test_random),
        cmocka_unit_test(test_gaps),          cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_whole),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_unknown_heads), cmocka_unit_test(test_apply_refusals),
        cmocka_unit_test(test_limits),        cmocka_unit_test(test_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
