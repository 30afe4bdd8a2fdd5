// SPDX-License-Identifier: Apache-2.0
/* Random operations on a manager of all tiers beside a naive model of the stored blocks. Every
 * loaded block has the bytes of its key, and only stored blocks are found. Where the tiers have
 * room for all, no stored block is lost, neither by eviction nor by a restart. */
#include "base/unit.h"
#include "index/random.h"
#include "tier/kitchen.h"

#define CHAINS 12u
#define LENGTH 24u

struct model {
    struct world w;
    struct rng random;
    uint32_t stored[CHAINS];    /* blocks [0, stored) were, at some time */
    uint32_t kept[CHAINS];      /* and of these [0, kept) were said to be there, after the store */
    uint32_t n_stores, n_whole; /* and how many of them were there then */
    bool keeps_all;             /* the lowest tier has room for all of them */
    bool restarts;              /* and outlives the manager */
    struct kvbm_pin *pins[4];
    struct world owner; /* of a peer; without one its m is NULL */
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    char at[96];
};

static uint32_t pick(struct model *model, uint32_t n)
{
    return rng_below(&model->random, n);
}

static uint64_t first_of(uint32_t chain)
{
    return (uint64_t)(chain + 1) * 1000;
}

static void settle(struct model *model)
{
    assert_int_equal(kvbm_manager_drain(model->w.m, 60000), 0);
}

/* How long the prefix of blocks [0, n) is that some tier has, for certain. */
static uint32_t is_there(struct model *model, uint32_t chain, uint32_t n)
{
    uint64_t keys[LENGTH];
    uint8_t at[LENGTH];
    struct kvbm_chain what = world_chain(keys);
    uint32_t there = 0;

    world_keys(first_of(chain), keys, n);
    assert_true(kvbm_manager_lookup(model->w.m, &what, n, at) >= 0);
    while (there < n && (at[there] == KVBM_READY || at[there] == KVBM_ON_DISK ||
                         at[there] == KVBM_REMOTE || at[there] == KVBM_ON_PEER))
        there++;
    return there;
}

static void do_store(struct model *model)
{
    uint32_t chain = pick(model, CHAINS), n = 1 + pick(model, LENGTH), kept;

    world_store(&model->w, first_of(chain), n);
    model->stored[chain] = model->stored[chain] > n ? model->stored[chain] : n;
    if (!model->keeps_all)
        return;
    settle(model); /* or the queue may lose some to eviction */
    /* A store leaves blocks to a pin that fetches them, even if no tier turns out to have them. */
    kept = is_there(model, chain, n);
    model->kept[chain] = model->kept[chain] > kept ? model->kept[chain] : kept;
    model->n_stores++;
    model->n_whole += kept == n;
}

static void do_load(struct model *model)
{
    uint32_t chain = pick(model, CHAINS), n = 1 + pick(model, LENGTH);
    long got = world_load(&model->w, first_of(chain), n);

    assert_true(got <= (long)model->stored[chain]);
    if (model->keeps_all && !model->pins[0] && !model->pins[1] && !model->pins[2] &&
        !model->pins[3])
        assert_true(got >= (long)(model->kept[chain] < n ? model->kept[chain] : n));
}

static void do_lookup(struct model *model)
{
    uint32_t chain = pick(model, CHAINS), i = pick(model, LENGTH);
    uint8_t at = world_where(&model->w, first_of(chain), i);

    if (i >= model->stored[chain])
        assert_true(at == KVBM_MISS || at == KVBM_PENDING); /* asked for */
}

static void do_pin(struct model *model)
{
    uint32_t slot = pick(model, 4), chain = pick(model, CHAINS);
    uint64_t keys[LENGTH];
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = model->w.in_place};
    struct kvbm_chain what = world_chain(keys);

    kvbm_pin_release(model->pins[slot]);
    model->pins[slot] = NULL;
    if (pick(model, 2))
        return;
    world_keys(first_of(chain), keys, LENGTH);
    assert_true(kvbm_manager_prepare_load(model->w.m, &what, 1 + pick(model, LENGTH), &opts,
                                          &model->pins[slot]) >= 0);
}

static void do_cancel(struct model *model)
{
    uint32_t chain = pick(model, CHAINS), n = 1 + pick(model, LENGTH), blocks[LENGTH];
    uint64_t keys[LENGTH];
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = model->w.in_place};
    struct kvbm_chain what = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = model->w.cache, .blocks = blocks};
    struct kvbm_done done;
    int64_t id;

    world_keys(first_of(chain), keys, n);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = i;
    assert_true(kvbm_manager_prepare_load(model->w.m, &what, n, &opts, &job.pin) >= 0);
    id = kvbm_manager_submit(model->w.m, &job);
    assert_true(id > 0);
    kvbm_manager_cancel(model->w.m, (uint64_t)id);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(model->w.m, (uint64_t)id, 30000, &done), 0);
    assert_true(done.status == 0 || done.status == -ECANCELED || done.status == -ENOENT);
}

static void let_pins_go(struct model *model)
{
    for (int i = 0; i < 4; i++) {
        kvbm_pin_release(model->pins[i]);
        model->pins[i] = NULL;
    }
}

static void do_forget_host(struct model *model)
{
    struct kvbm_pool *host = kvbm_manager_pool(model->w.m, KV_TIER_HOST);

    if (!host)
        return;
    let_pins_go(model);
    settle(model);
    kvbm_pool_reset_inactive(host);
    if (!model->w.opts.disk && !model->w.opts.object && !model->owner.m)
        memset(model->stored, 0, sizeof(model->stored));
}

static void await_peer(struct model *model)
{
    wait_until(!model->owner.m || world_stats(&model->w).peers_now);
}

static void do_restart(struct model *model)
{
    if (!model->restarts)
        return;
    let_pins_go(model);
    settle(model);
    world_stop(&model->w);
    world_start(&model->w);
    world_attach(&model->w, false);
    await_peer(model);
}

/* The peer stores a prompt, which evicts others, or loses all that nobody has leased. */
static void do_peer(struct model *model)
{
    uint32_t chain = pick(model, CHAINS), n = 1 + pick(model, LENGTH);

    if (model->keeps_all)
        return;
    if (pick(model, 8) == 0) {
        (void)kvbm_pool_reset_inactive(kvbm_manager_pool(model->owner.m, KV_TIER_HOST));
        return;
    }
    world_store(&model->owner, first_of(chain), n);
    model->stored[chain] = model->stored[chain] > n ? model->stored[chain] : n;
}

static void end_peer(struct model *model)
{
    kvbm_blockset_destroy(model->set);
    assert_int_equal(kvbm_agent_destroy(model->agent), 0);
    assert_int_equal(world_stats(&model->owner).pins_now, 0);
    world_fini(&model->owner);
}

static void run(struct model *model, long steps)
{
    static void (*const ops[])(struct model *) = {do_store, do_store,  do_store, do_load,  do_load,
                                                  do_load,  do_lookup, do_pin,   do_cancel};

    world_start(&model->w);
    world_attach(&model->w, false);
    await_peer(model);
    steps = test_rounds(steps);
    for (long i = 0; i < steps; i++) {
        if (pick(model, 40) == 0)
            do_forget_host(model);
        else if (pick(model, 60) == 0)
            do_restart(model);
        else if (model->owner.m && pick(model, 10) == 0)
            do_peer(model);
        else
            ops[pick(model, sizeof(ops) / sizeof(*ops))](model);
        if (i % 16 == 0)
            assert_int_equal(kvbm_registry_check(kvbm_manager_registry(model->w.m)), 0);
    }
    let_pins_go(model);
    world_fini(&model->w);
    if (model->owner.m)
        end_peer(model);
    assert_true(model->n_whole * 2 >= model->n_stores); /* most of them, or it showed little */
}

static void start(struct model *model, uint32_t host_blocks)
{
    memset(model, 0, sizeof(*model));
    model->random.state = test_seed();
    world_init(&model->w, host_blocks);
}

static void test_host_only(void **state)
{
    struct model model;

    (void)state;
    start(&model, 100);
    run(&model, 300);
}

static void test_disk_keeps_all(void **state)
{
    struct model model;

    (void)state;
    start(&model, 60);
    model.w.opts.disk = model.w.disk;
    model.w.opts.disk_bytes = (uint64_t)CHAINS * LENGTH * HOST_STRIDE;
    model.keeps_all = model.restarts = true;
    run(&model, 300);
}

static void test_disk_loses_some(void **state)
{
    struct model model;

    (void)state;
    start(&model, 40);
    model.w.opts.disk = model.w.disk;
    model.w.opts.disk_bytes = (uint64_t)80 * HOST_STRIDE;
    model.w.opts.disk_eviction = KVBM_EVICT_LINEAGE;
    model.restarts = true;
    run(&model, 300);
}

static void test_bypass(void **state)
{
    struct model model;

    (void)state;
    start(&model, 0);
    model.w.opts.staging_blocks = 96; /* more than pins hold */
    model.w.opts.disk = model.w.disk;
    model.w.opts.disk_bytes = (uint64_t)CHAINS * LENGTH * HOST_STRIDE;
    model.restarts = true;
    run(&model, 300);
}

static void test_object_keeps_all(void **state)
{
    struct model model;

    (void)state;
    start(&model, 60);
    model.w.opts.disk = model.w.disk;
    model.w.opts.disk_bytes = (uint64_t)60 * HOST_STRIDE;
    model.w.opts.object = model.w.object;
    model.keeps_all = model.restarts = true;
    run(&model, 200);
}

static void test_object_when_evicted(void **state)
{
    for (int disk = 0; disk < 2; disk++) {
        struct model model;

        (void)state;
        start(&model, 60);
        if (disk) {
            model.w.opts.disk = model.w.disk;
            model.w.opts.disk_bytes = (uint64_t)60 * HOST_STRIDE;
            model.w.opts.host_eviction = KVBM_EVICT_LINEAGE;
        }
        model.w.opts.object = model.w.object;
        model.w.opts.object_when_evicted = true;
        model.restarts = true;
        run(&model, 150);
    }
}

/* Give the model a peer that lends its host tier. */
static void with_peer(struct model *model, uint32_t blocks, bool shared)
{
    const char *at = model->at;
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "peer", .fingerprint = "test", .listen = &at, .n_listen = 1};
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};

    world_init(&model->owner, blocks);
    model->owner.opts.host_shared = shared;
    world_start(&model->owner);
    world_attach(&model->owner, false);
    snprintf(model->at, sizeof(model->at), "unix:%s/peer", model->owner.dir);
    assert_int_equal(kvbm_agent_create(&who, &model->agent), 0);
    source = kvbm_manager_source(model->owner.m);
    what.layout = kvbm_manager_host_layout(model->owner.m);
    what.source = &source;
    what.shared = kvbm_manager_shared(model->owner.m);
    assert_int_equal(kvbm_blockset_export(model->agent, &what, &model->set), 0);
    model->w.opts.peers = model->at;
    model->w.opts.peer_timeout_ms = 60000;
}

/* The peer has every block, and keeps it: so every load is whole. */
static void test_peer_keeps_all(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) {
        struct model model;

        start(&model, 60);
        with_peer(&model, CHAINS * LENGTH, way > 0);
        model.w.in_place = way == 2;
        for (uint32_t chain = 0; chain < CHAINS; chain++) {
            assert_int_equal(world_store(&model.owner, first_of(chain), LENGTH), LENGTH);
            model.stored[chain] = model.kept[chain] = LENGTH;
        }
        model.keeps_all = model.restarts = true;
        run(&model, 150);
    }
}

/* The peer's blocks come and go, beside a disk or an object store, or without a host tier. */
static void test_peer_loses_some(void **state)
{
    (void)state;
    for (int way = 0; way < 8; way++) {
        struct model model;
        int kind = way / 2;

        start(&model, kind == 3 ? 0 : 60);
        model.w.opts.staging_blocks = 96;
        model.w.in_place = way % 2;
        with_peer(&model, 80, kind % 2 || model.w.in_place);
        if (kind == 1 || kind == 3) {
            model.w.opts.disk = model.w.disk;
            model.w.opts.disk_bytes = (uint64_t)60 * HOST_STRIDE;
        }
        if (kind == 2)
            model.w.opts.object = model.w.object;
        model.restarts = kind > 0;
        run(&model, 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_only),        cmocka_unit_test(test_disk_keeps_all),
        cmocka_unit_test(test_disk_loses_some),  cmocka_unit_test(test_bypass),
        cmocka_unit_test(test_object_keeps_all), cmocka_unit_test(test_object_when_evicted),
        cmocka_unit_test(test_peer_keeps_all),   cmocka_unit_test(test_peer_loses_some),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
