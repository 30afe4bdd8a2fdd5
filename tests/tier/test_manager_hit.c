// SPDX-License-Identifier: Apache-2.0
/*
 * Hits of prompts in several cache groups: what each kind needs, an engine's loop over host tier and
 * disk, blocks that only the object store or a peer has, and what is refused.
 */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <pthread.h>

#include "tier/hit_unit.h"

static const struct kv_cache_group full = {KV_NEEDS_ALL, 16, 0}, window = {KV_NEEDS_RUN, 16, 33},
                                   states = {KV_NEEDS_STATE, 48, 0},
                                   chunks = {KV_NEEDS_CHUNK, 16, 64};

static void begin(struct world *w, uint32_t host_blocks, uint32_t disk_blocks)
{
    world_init(w, host_blocks);
    if (disk_blocks)
        world_with_disk(w, disk_blocks);
    world_start(w);
    world_attach(w, false);
}

static void restart(struct world *w)
{
    world_stop(w);
    world_start(w);
    world_attach(w, false);
}

/* ---- the formula ---- */

static void expect_needs(struct kv_cache_group g, uint64_t tokens, uint64_t computed, size_t first,
                         size_t n)
{
    struct kvbm_hit_blocks need = {77, 77};

    assert_int_equal(kvbm_hit_needs(&g, tokens, computed, &need), 0);
    assert_int_equal(need.first, first);
    assert_int_equal(need.n, n);
}

static void test_needs(void **state)
{
    const struct kv_cache_group one = {KV_NEEDS_RUN, 16, 1}, all = {KV_NEEDS_RUN, 16, UINT32_MAX},
                                odd = {KV_NEEDS_CHUNK, 16, 40};

    (void)state;
    expect_needs(full, 96, 0, 0, 6);
    expect_needs(full, 96, 32, 2, 4);
    expect_needs(full, 0, 0, 0, 0);
    expect_needs(window, 96, 0, 4, 2); /* ceil(32 / 16) */
    expect_needs(window, 16, 0, 0, 1);
    expect_needs(window, 96, 80, 5, 1);
    expect_needs(one, 96, 0, 6, 0); /* a token that sees itself alone */
    expect_needs(all, 96, 0, 0, 6);
    expect_needs(states, 96, 0, 1, 1);
    expect_needs(states, 96, 96, 2, 0);
    expect_needs(states, 0, 0, 0, 0);
    expect_needs(chunks, 64, 0, 4, 0); /* a new chunk begins */
    expect_needs(chunks, 80, 0, 4, 1);
    expect_needs(chunks, 128 - 16, 0, 4, 3);
    expect_needs(odd, 96, 0, 5, 1); /* the chunk's start, 80, is that of a block */
    expect_needs(odd, 64, 0, 2, 2); /* 40 is inside of block 2 */
    expect_needs(full, UINT64_MAX - 15, 0, 0, (size_t)(UINT64_MAX / 16));
}

/* The picture of kvbm_hit.h. */
static void test_picture(void **state)
{
    struct kvbm_hit_opts to_80 = {.size = sizeof(to_80), .limit = 80};
    struct prompt p;
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    prompt_init(&p, 1);
    prompt_add(&p, full, 96, false);
    prompt_add(&p, window, 96, false);
    prompt_add(&p, states, 96, true);
    prompt_store(&w, &p, 0, 0, 5);
    prompt_store(&w, &p, 1, 1, 3);
    prompt_store(&w, &p, 1, 4, 6);
    prompt_store(&w, &p, 2, 0, 2);
    assert_int_equal(prompt_hit(&w, &p).tokens, 48);
    assert_int_equal(p.need[0].n, 3);
    assert_int_equal(p.need[1].first, 1);
    assert_int_equal(p.need[1].n, 2);
    assert_int_equal(p.need[2].n, 1);
    assert_int_equal(prompt_load(&w, &p), 6);
    assert_int_equal(p.where[0][5], KVBM_MISS);
    prompt_store(&w, &p, 0, 5, 6); /* the full attention's last block */
    assert_int_equal(prompt_hit(&w, &p).tokens, 96);
    assert_int_equal(prompt_load(&w, &p), 6 + 2 + 1);
    assert_int_equal(p.where[1][3], KVBM_MISS); /* looked at with its neighbours, not needed */
    assert_int_equal(prompt_hit_of(&w, &p, &to_80).tokens, 48);
    world_fini(&w);
}

/* ---- several managers ---- */

/* Make a manager whose blocks have twice the bytes of the others. */
static void begin_large(struct world *w, uint32_t host_blocks)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);

    world_init(w, 2 * host_blocks);
    kvbm_layout_destroy(w->layout);
    w->block.page_size *= 2;
    assert_int_equal(kvbm_layout_allocate(&w->block, &allocator, &w->layout), 0);
    world_start(w);
    world_attach(w, false);
}

/* Groups whose blocks have other numbers of bytes lie in a manager each; the hit is of both. */
static void test_two_managers(void **state)
{
    struct world w, large;
    struct prompt p;

    (void)state;
    begin(&w, 64, 0);
    begin_large(&large, 64);
    prompt_init(&p, 1);
    prompt_add(&p, full, 96, false);
    prompt_add(&p, window, 96, false);
    prompt_add(&p, states, 96, true);
    p.groups[1].manager = p.groups[2].manager = large.m;
    prompt_store(&w, &p, 0, 0, 6);
    assert_int_equal(prompt_hit(&w, &p).tokens, 0);
    prompt_store(&large, &p, 2, 0, 2);
    prompt_store(&large, &p, 1, 1, 3);
    prompt_store(&w, &p, 1, 3, 6); /* in the manager of another group: no use */
    assert_int_equal(prompt_hit(&w, &p).tokens, 48);
    (void)prompt_load_group(&w, &p, 0);
    (void)prompt_load_group(&large, &p, 1);
    (void)prompt_load_group(&large, &p, 2);
    assert_int_equal(p.need[1].n, 2);
    prompt_store(&large, &p, 1, 4, 6);
    assert_int_equal(prompt_hit(&w, &p).tokens, 96);
    assert_int_equal(prompt_hit(&large, &p).tokens, 0); /* which has no full attention */
    p.groups[0].manager = w.m;
    assert_int_equal(prompt_hit(&large, &p).tokens, 96);
    assert_int_equal(kvbm_manager_remove(large.m, 1, &p.keys[5], 1, LONG_MS, NULL), 0);
    assert_int_equal(prompt_hit(&w, &p).tokens, 48);
    world_fini(&large);
    world_fini(&w);
}

struct asking {
    struct world *w;
    struct prompt p;
    bool ok;
};

static void *ask(void *arg)
{
    struct asking *a = arg;
    struct kvbm_hit hit = KVBM_HIT_INIT;

    a->ok = true;
    for (int i = 0; i < 2000 && a->ok; i++)
        a->ok = !kvbm_manager_hit(a->w->m, a->p.groups, a->p.n_groups, NULL, &hit, a->p.need) &&
                hit.tokens == 96;
    return NULL;
}

/* Threads that name the managers in other orders don't lock each other out. */
static void test_two_managers_by_threads(void **state)
{
    struct world w, large;
    struct asking a[2] = {{0}};
    pthread_t threads[2];

    (void)state;
    begin(&w, 64, 0);
    begin_large(&large, 64);
    for (int i = 0; i < 2; i++) {
        struct prompt *p = &a[i].p;

        prompt_init(p, 1);
        prompt_add(p, full, 96, false);
        prompt_add(p, window, 96, false);
        p->groups[0].manager = w.m;
        p->groups[1].manager = large.m;
        a[i].w = i ? &w : &large;
    }
    prompt_store(&w, &a[0].p, 0, 0, 6);
    prompt_store(&large, &a[0].p, 1, 0, 6);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask, &a[i]), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_true(a[i].ok);
    }
    world_fini(&large);
    world_fini(&w);
}

/* ---- an engine's loop ---- */

/* Pin the blocks of all groups that the hit needs, or nothing. */
static bool pin_all(struct world *w, const struct prompt *p, struct kvbm_pin **pins)
{
    bool all = true;

    for (uint32_t i = 0; i < p->n_groups; i++) {
        struct kvbm_chain chain = prompt_chain(p, i, p->need[i].first);
        long n = kvbm_manager_prepare_load(w->m, &chain, p->need[i].n, NULL, &pins[i]);

        assert_true(n >= 0);
        all &= (size_t)n == p->need[i].n;
    }
    for (uint32_t i = 0; i < p->n_groups && !all; i++)
        kvbm_pin_release(pins[i]);
    return all;
}

/* Copy a pinned group into blocks [first, ...) of the cache. Returns whether all came. */
static bool copy_group(struct world *w, const struct prompt *p, uint32_t i, struct kvbm_pin *pin,
                       uint32_t first)
{
    struct kvbm_job job = {.size = sizeof(job), .pin = pin, .cache = w->cache};
    uint32_t blocks[BLOCKS];
    struct kvbm_done done;
    int64_t id;

    for (uint32_t k = 0; k < p->need[i].n; k++)
        blocks[k] = first + k;
    job.blocks = blocks;
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, LONG_MS, &done), 0);
    return done.n_ok == p->need[i].n;
}

/* Find the hit, pin all that it needs, copy it, compare bytes. Returns the tokens that needn't be
 * computed. */
static uint64_t engine_loads(struct world *w, struct prompt *p)
{
    struct kvbm_pin *pins[GROUPS];
    struct kvbm_hit hit;
    uint32_t at = 0;

    world_wipe(w);
    do
        hit = prompt_settle(w, p);
    while (!pin_all(w, p, pins));
    for (uint32_t i = 0; i < p->n_groups; i++) {
        assert_true(p->need[i].n == 0 || copy_group(w, p, i, pins[i], at));
        if (p->need[i].n == 0)
            kvbm_pin_release(pins[i]);
        for (uint32_t k = 0; k < p->need[i].n; k++)
            assert_true(world_holds(w, at + k, prompt_bytes(p, i, p->need[i].first + k)));
        at += (uint32_t)p->need[i].n;
    }
    return hit.tokens;
}

static void four_groups(struct prompt *p, uint64_t number, uint32_t tokens)
{
    prompt_init(p, number);
    prompt_add(p, full, tokens, false);
    prompt_add(p, window, tokens, number % 2); /* scattered and within its sequence */
    prompt_add(p, states, tokens, !(number % 2));
    prompt_add(p, chunks, tokens, false);
}

/* Store what an engine has when it has computed @tokens tokens: windows, states and chunks alone. */
static void engine_stores(struct world *w, struct prompt *p, uint64_t tokens)
{
    for (uint32_t i = 0; i < p->n_groups; i++) {
        struct kvbm_hit_blocks need;

        assert_int_equal(kvbm_hit_needs(&p->groups[i].group, tokens, 0, &need), 0);
        prompt_store(w, p, i, need.first, need.first + need.n);
    }
}

/* Prompts of several turns come and go through a host tier that holds about one of them. */
static void test_engine(void **state)
{
    enum { PROMPTS = 6, TOKENS = 6 * 48 };
    static struct prompt p[PROMPTS];
    struct world w;

    (void)state;
    begin(&w, 32, 400);
    for (uint32_t turn = 1; turn <= 3; turn++) {
        for (uint32_t i = 0; i < PROMPTS; i++) {
            four_groups(&p[i], i + 1, TOKENS);
            assert_int_equal(engine_loads(&w, &p[i]), turn == 1 ? 0 : (turn - 1) * 96);
            engine_stores(&w, &p[i], turn * 96);
            /* what is between the turns isn't stored, and the window of the turn before still is */
            assert_int_equal(engine_loads(&w, &p[i]), turn * 96);
        }
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
        restart(&w);
    }
    for (uint32_t i = 0; i < PROMPTS; i++) {
        assert_int_equal(engine_loads(&w, &p[i]), TOKENS);
        assert_int_equal(p[i].need[0].n, TOKENS / 16);
        assert_int_equal(p[i].need[1].n, 2);
        assert_int_equal(p[i].need[2].n, 1);
        assert_int_equal(p[i].need[3].n, 2); /* 288 % 64 = 32 */
        assert_true(world_stats(&w).disk.hits > 0);
    }
    world_fini(&w);
}

/* A window's block that left all tiers makes the hit end before it, or where an older one is. */
static void test_removed(void **state)
{
    struct kvbm_remove_result removed = KVBM_REMOVE_RESULT_INIT;
    struct prompt p;
    struct world w;

    (void)state;
    begin(&w, 64, 100);
    four_groups(&p, 1, 288);
    for (uint32_t turn = 1; turn <= 3; turn++)
        engine_stores(&w, &p, turn * 96);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    assert_int_equal(engine_loads(&w, &p), 288);
    assert_int_equal(kvbm_manager_remove(w.m, 1, &p.keys[17], 1, LONG_MS, &removed), 0);
    assert_true(removed.host + removed.disk > 0);
    assert_int_equal(engine_loads(&w, &p), 192);
    assert_int_equal(kvbm_manager_remove(w.m, 2, &p.keys[3], 1, LONG_MS, NULL), 0);
    assert_int_equal(engine_loads(&w, &p), 96);
    assert_int_equal(kvbm_manager_remove(w.m, 0, &p.keys[3], 1, LONG_MS, NULL), 0);
    assert_int_equal(engine_loads(&w, &p), 0);
    world_fini(&w);
}

/* ---- blocks that others have ---- */

/* A new manager knows nothing of the object store: it asks for what is behind gaps, too. */
static void test_object(void **state)
{
    struct prompt p;
    struct world w;

    (void)state;
    world_init(&w, 128);
    w.opts.object = w.object;
    w.opts.object_timeout_ms = LONG_MS;
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t number = 1; number <= 2; number++) {
        four_groups(&p, number, 288);
        engine_stores(&w, &p, 192);
        prompt_store(&w, &p, 0, 12,
                     17); /* the full attention goes on for 5 blocks of a later turn */
    }
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    restart(&w);
    for (uint32_t number = 1; number <= 2; number++) {
        four_groups(&p, number, 288);
        while (engine_loads(&w, &p) != 192) /* a busy machine's store may answer too late */
            ;
    }
    world_fini(&w);
}

/* While the object store hangs, what the host tier has is sure. */
static void test_pending(void **state)
{
    struct kvbm_hit hit;
    struct prompt p;
    struct world w;

    (void)state;
    shaky_start(&w, 64);
    four_groups(&p, 1, 288);
    engine_stores(&w, &p, 96);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    shaky->hang = true;
    hit = prompt_hit(&w, &p);
    assert_int_equal(hit.tokens, 288);
    assert_int_equal(hit.sure, 96);
    assert_int_equal(hit.pending, 12 + 2 + 1 + 2);
    assert_int_equal(p.where[0][5], KVBM_READY);
    assert_int_equal(p.where[0][6], KVBM_PENDING);
    shaky->hang = false;
    assert_int_equal(prompt_settle(&w, &p).tokens, 96);
    assert_int_equal(prompt_load(&w, &p), 6 + 2 + 1 + 2);
    world_fini(&w);
}

/* Long prompts: 256 keys are asked for in a call, and far fewer of the window than it has blocks. */
static void test_long(void **state)
{
    struct prompt p;
    uint32_t looked = 0;
    struct world w;
    int exists;

    (void)state;
    shaky_start(&w, 1024);
    prompt_init(&p, 1);
    prompt_add(&p, full, BLOCKS * 16, false);
    prompt_add(&p, window, BLOCKS * 16, false);
    for (size_t first = 0; first < 200; first += 40) { /* at most half of the tier waits */
        prompt_store(&w, &p, 0, first, first + 40);
        assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    }
    prompt_store(&w, &p, 1, 178, 180);
    assert_int_equal(kvbm_manager_drain(w.m, LONG_MS), 0);
    restart(&w);
    exists = shaky->exists;
    while (prompt_settle(&w, &p).tokens != 180 * 16)
        ;
    for (uint32_t i = 0; i < BLOCKS; i++)
        looked += p.where[1][i] != KVBM_NOT_LOOKED;
    assert_true(looked >= 22 && looked <= 128); /* 199 to 178, and their neighbours */
    assert_true(shaky->exists > exists);
    world_fini(&w);
}

/* A peer has the window's last blocks, behind ones that nobody has, and this node the rest. */
static void test_peer(void **state)
{
    const struct kvbm_hit_opts to_128 = {.size = sizeof(to_128), .limit = 128};
    struct world reader;
    struct node owner;
    struct prompt p;

    (void)state;
    node_init(&owner, "owner", 64, NULL, true, NULL);
    prompt_init(&p, 1);
    prompt_add(&p, full, 160, false);
    prompt_add(&p, window, 160, false);
    prompt_store(&owner.w, &p, 1, 8, 10);
    world_init(&reader, 64);
    reader.opts.fingerprint = "test";
    reader.opts.peers = owner.at;
    reader.opts.peer_timeout_ms = 60000;
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, 1);
    prompt_store(&reader, &p, 0, 0, 10);
    while (prompt_hit_of(&reader, &p, &to_128).pending) /* the peer lacks blocks 0 to 7 */
        usleep(1000);
    assert_int_equal(p.where[1][7], KVBM_MISS);
    (void)prompt_hit(&reader, &p);
    assert_int_not_equal(p.where[1][9], KVBM_MISS);  /* asked for, though it is behind misses */
    while (prompt_settle(&reader, &p).tokens != 160) /* beliefs of a busy machine end in a second */
        ;
    assert_int_equal(p.where[1][9], KVBM_ON_PEER);
    assert_int_equal(prompt_load(&reader, &p), 12);
    world_fini(&reader);
    node_fini(&owner);
}

/* ---- what is refused ---- */

static void expect_refused(struct world *w, struct prompt *p, const struct kvbm_hit_opts *opts)
{
    struct kvbm_hit hit = {.size = sizeof(hit), .tokens = 5};

    p->need[0].n = 77;
    assert_int_equal(kvbm_manager_hit(w->m, p->groups, p->n_groups, opts, &hit, p->need), -EINVAL);
    assert_int_equal(hit.tokens, 5);
    assert_int_equal(p->need[0].n, 77);
}

static void test_refusals(void **state)
{
    struct kvbm_hit_opts opts = KVBM_HIT_OPTS_INIT;
    struct kvbm_hit hit = KVBM_HIT_INIT;
    struct kvbm_hit_blocks need;
    struct prompt p, good;
    struct world w;

    (void)state;
    begin(&w, 16, 0);
    four_groups(&good, 1, 288);
    opts.unit = 24;
    expect_refused(&w, &good, &opts);
    opts.unit = 96;
    assert_int_equal(prompt_hit_of(&w, &good, &opts).tokens, 0);
    for (int i = 0; i < 8; i++) {
        p = good;
        for (uint32_t k = 0; k < p.n_groups; k++)
            p.groups[k].chain = &p.chains[k];
        if (i == 0)
            p.groups[1].group.span = 0;
        else if (i == 1)
            p.groups[3].group.span = 0;
        else if (i == 2)
            p.groups[0].group.block_size = 0;
        else if (i == 3)
            p.groups[0].group.needs = (enum kv_needs)9;
        else if (i == 4)
            p.chains[0].group = KVBM_MAX_GROUPS;
        else if (i == 5)
            p.chains[0] = prompt_chain(&p, 0, 1); /* not from the first token on */
        else if (i == 6)
            p.groups[2].where = NULL;
        else
            p.groups[0].group.block_size = 65521, p.groups[1].group.block_size = 65519;
        expect_refused(&w, &p, NULL);
    }
    assert_int_equal(kvbm_manager_hit(NULL, good.groups, 1, NULL, &hit, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_hit(w.m, good.groups, 0, NULL, &hit, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_hit(w.m, NULL, 1, NULL, &hit, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_hit(w.m, good.groups, 65, NULL, &hit, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_hit(w.m, good.groups, 1, NULL, NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_hit_needs(&full, 15, 0, &need), -EINVAL);
    assert_int_equal(kvbm_hit_needs(&full, 16, 0, NULL), -EINVAL);
    assert_int_equal(kvbm_hit_needs(NULL, 16, 0, &need), -EINVAL);
    assert_int_equal(kvbm_hit_needs(&p.groups[1].group, 1, 0, &need), -EINVAL);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_needs),        cmocka_unit_test(test_picture),
        cmocka_unit_test(test_two_managers), cmocka_unit_test(test_two_managers_by_threads),
        cmocka_unit_test(test_engine),       cmocka_unit_test(test_removed),
        cmocka_unit_test(test_object),       cmocka_unit_test(test_pending),
        cmocka_unit_test(test_long),         cmocka_unit_test(test_peer),
        cmocka_unit_test(test_refusals)};

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
