// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of agents, block sets, sessions and leases with a struct each: part of test_sizes.c, which
 * includes this header once its own state is declared.
 */
#ifndef TESTS_TIER_SIZES_PEERS_H
#define TESTS_TIER_SIZES_PEERS_H

static struct kvbm_agent_opts agent_ = {
    .name = "a", .worker = 5, .fingerprint = "b", .key_len = 16, .max_sets = 3, .max_bytes = 1000};
static struct kvbm_blockset_opts blockset_ = {
    .id = 5, .writable = true, .shard = {.n_ranks = 1}, .lifetime_ms = 1000};

static struct kvbm_shared_opts shared_ = {.bytes = 100, .n_blocks = 1, .touch_threads = 1};

static int agent(void *opts)
{
    struct kvbm_agent *made = NULL;
    int rc = kvbm_agent_create(opts, &made);

    return rc < 0 ? rc : kvbm_agent_destroy(made);
}

static int blockset(void *opts)
{
    struct kvbm_blockset *made = NULL;
    int rc = kvbm_blockset_export(t.agent, opts, &made);

    kvbm_blockset_destroy(made);
    return rc;
}

static int shared(void *opts)
{
    struct kvbm_shared *made = NULL;
    int rc = kvbm_shared_create(opts, &made);

    kvbm_shared_destroy(made);
    return rc;
}

static int remote_layout(void *ret)
{
    return kvbm_remote_set_layout(t.remote, ret);
}

static int remote_info(void *ret)
{
    return kvbm_remote_set_get_info(t.remote, ret);
}

static int hint(void *ret)
{
    static const char text[] = "{\"source_control_endpoint\":\"tcp://a:1\",\"mode\":\"move\","
                               "\"no_retain\":true,\"block_hashes\":[1]}";
    long n = kvbm_hint_parse(text, sizeof(text) - 1, ret, NULL, 0);

    return n < 0 ? (int)n : 0;
}

static int session(void *opts)
{
    struct kvbm_session *made = NULL;
    char endpoint[128];
    int rc;

    assert_true(kvbm_agent_endpoint(t.peer, 0, endpoint, sizeof(endpoint), NULL) > 0);
    rc = kvbm_session_open(t.agent, endpoint, opts, &made);
    assert_int_equal(kvbm_session_close(made), 0);
    return rc;
}

static int session_info(void *ret)
{
    return kvbm_session_get_info(t.session, ret);
}

static void find_nothing(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    (void)arg, (void)group, (void)keys;
    memset(tiers, KVBM_NO_TIER, n);
}

static void hold_first(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                       void *to)
{
    uint32_t blocks[16] = {0};

    (void)arg, (void)group, (void)keys;
    held(to, n <= 16 ? 0 : -EINVAL, blocks, NULL);
}

static void unhold(void *arg, void *hold)
{
    (void)arg, (void)hold;
}

static struct kvbm_block_source source_ = {
    .lookup = find_nothing, .hold = hold_first, .unhold = unhold};

static int source(void *memory)
{
    struct kvbm_blockset_opts opts = {
        .size = sizeof(opts), .id = 10, .layout = t.other, .source = memory};
    struct kvbm_blockset *made = NULL;
    int rc = kvbm_blockset_export(t.peer, &opts, &made);

    kvbm_blockset_destroy(made);
    return rc;
}

static struct kvbm_lease_read_opts read_ = {.to_blocks = &other_block, .n = 1};

static int lease_read(void *opts)
{
    struct kvbm_lease *lease = NULL;
    long n;

    assert_int_equal(kvbm_session_lease(t.session, 9, 0, &key_, 1, 60000,
                                        kv_now_ns() + 60 * KV_NS_PER_S, &lease),
                     0);
    n = kvbm_lease_read(lease, opts);
    kvbm_lease_release(lease);
    return n < 0 ? (int)n : 0;
}

static struct kvbm_plan_source plan_source;
static struct kvbm_plan_read_opts plan_read_ = {
    .sources = &plan_source, .keys = &key_, .to_blocks = &other_block, .n = 1};

static int plan_read(void *opts)
{
    const struct kvbm_plan_rank rank = {.layout = kvbm_layout_get_config(read_.to)};
    struct kvbm_plan *plan = NULL;
    long n;

    plan_source = (struct kvbm_plan_source){.session = t.session, .set = 9};
    assert_int_equal(kvbm_plan_create(&rank, &rank, 1, NULL, &plan), 0);
    n = kvbm_plan_read(plan, opts);
    kvbm_plan_destroy(plan);
    return n < 0 ? (int)n : 0;
}

/* ---- a group of one rank: the peer leads, the agent works ---- */

static int leader(void *opts)
{
    struct kvbm_leader *made = NULL;
    int rc = kvbm_leader_create(t.peer, opts, &made);

    return rc < 0 ? rc : kvbm_leader_destroy(made);
}

static struct kvbm_leader_opts leader_ = {.n_ranks = 1, .max_transfers = 5};
static struct kvbm_group_place place_;
static struct kvbm_worker_opts worker_ = {.n_ranks = 1, .places = &place_, .n_places = 1};

/* Join as @opts say, and hand out a transfer if there is one. */
static int in_group(void *opts, void *transfer)
{
    const struct kvbm_leader_opts leading = {.size = sizeof(leading), .n_ranks = 1};
    struct kvbm_leader *made = NULL;
    struct kvbm_worker *joined = NULL;
    int64_t rc;

    assert_int_equal(kvbm_leader_create(t.peer, &leading, &made), 0);
    rc = kvbm_worker_join(t.session, opts, &joined);
    if (transfer) {
        assert_int_equal(rc, 0);
        rc = kvbm_leader_submit(made, transfer);
    }
    if (rc > 0)
        rc = kvbm_leader_wait(made, (uint64_t)rc, 30000, NULL);
    kvbm_worker_leave(joined);
    assert_int_equal(kvbm_leader_destroy(made), 0);
    return (int)rc;
}

static int worker(void *opts)
{
    return in_group(opts, NULL);
}

static struct kvbm_group_transfer group_transfer_ = {
    .src_blocks = &block_, .dst_blocks = &other_block, .n = 1, .priority = 5, .tag = 5};

static int group_transfer(void *transfer)
{
    struct kvbm_worker_opts opts = worker_;

    opts.size = sizeof(opts);
    return in_group(&opts, transfer);
}

#endif
