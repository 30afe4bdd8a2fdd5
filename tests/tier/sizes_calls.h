// SPDX-License-Identifier: Apache-2.0
/*
 * Calls with a struct each: part of test_sizes.c, which includes this header once its own state is
 * declared.
 */
#ifndef TESTS_TIER_SIZES_CALLS_H
#define TESTS_TIER_SIZES_CALLS_H

#include "kvbm_directory.h"
#include "kvbm_hit.h"

/* ---- caches ---- */

static struct kvbm_cache_opts cache_ = {.n_heads = HEADS};
static struct kvbm_store_opts store_ = {.timeout_ms = 5};

static int cache(void *opts)
{
    struct kvbm_cache *made = NULL;
    int rc = kvbm_cache_attach(t.w.m, opts, &made);

    return rc < 0 ? rc : kvbm_cache_detach(made);
}

static int store_opts(void *opts)
{
    const struct kvbm_cache_opts attach = {.size = sizeof(attach), .layout = t.w.layout};
    const struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_cache *made = NULL;
    long n;

    assert_int_equal(kvbm_cache_attach(t.w.m, &attach, &made), 0);
    n = kvbm_cache_store_with(made, &chain, 0, NULL, opts);
    assert_int_equal(kvbm_cache_detach(made), 0);
    return (int)n;
}

/* ---- hits ---- */

static struct kvbm_hit_opts hit_ = {.limit = PAGE, .unit = PAGE};

static int hit_of(const struct kvbm_hit_opts *opts, struct kvbm_hit *ret)
{
    const struct kvbm_chain chain = world_chain(&key_);
    uint8_t where;
    struct kvbm_hit_group group = {
        .group = {KV_NEEDS_ALL, PAGE, 0}, .chain = &chain, .n = 1, .where = &where};

    return kvbm_manager_hit(t.w.m, &group, 1, opts, ret, NULL);
}

static int hit_opts(void *opts)
{
    struct kvbm_hit ret = KVBM_HIT_INIT;
    int rc = hit_of(opts, &ret);

    assert_true(rc < 0 || ret.tokens == PAGE);
    return rc;
}

static int hit_found(void *ret)
{
    return hit_of(NULL, ret);
}

/* ---- directories ---- */

static void ignore_peer(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    (void)arg;
    (void)peer;
    (void)there;
}

static int directory(void *opts)
{
    struct kvbm_directory *made = NULL;
    int rc = kvbm_directory_open(opts, &made);

    kvbm_directory_close(made);
    return rc;
}

static int directory_self(void *self)
{
    struct kvbm_directory_opts opts = {
        .size = sizeof(opts), .peers = "unix:/a", .changed = ignore_peer, .self = self};

    return directory(&opts);
}

/* Each call reads a directory of its own, at a time when its state no longer changes. */
static int directory_info(void *ret)
{
    struct kvbm_directory_opts opts = {
        .size = sizeof(opts), .peers = "unix:/a", .changed = ignore_peer};
    struct kvbm_directory_info settled = KVBM_DIRECTORY_INFO_INIT;
    struct kvbm_directory *made = NULL;
    int rc = kvbm_directory_open(&opts, &made);

    while (rc == 0 && !(settled.current && settled.n_peers == 1)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        rc = kvbm_directory_get_info(made, &settled);
    }
    if (rc == 0)
        rc = kvbm_directory_get_info(made, ret);
    kvbm_directory_close(made);
    return rc;
}

static struct kvbm_agent *follower_agent(void)
{
    const struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = "follower"};
    struct kvbm_agent *agent = NULL;

    (void)kvbm_agent_create(&opts, &agent);
    return agent;
}

static int follow(void *opts)
{
    struct kvbm_agent *agent = follower_agent();
    struct kvbm_follower *made = NULL;
    int rc = kvbm_agent_follow(agent, opts, &made);

    (void)kvbm_follower_close(made);
    (void)kvbm_agent_destroy(agent);
    return rc;
}

static struct kvbm_directory_opts nobody_ = {.size = sizeof(nobody_),
                                             .peers = "unix:/nobody/is/here"};
static struct kvbm_follow_opts follow_ = {.directory = &nobody_};

/* Nobody is in the directory: the state doesn't change. */
static int follower_info(void *ret)
{
    const struct kvbm_directory_opts empty = {.size = sizeof(empty), .peers = "file:/dev/null"};
    const struct kvbm_follow_opts opts = {.size = sizeof(opts), .directory = &empty};
    struct kvbm_agent *agent = follower_agent();
    struct kvbm_follower *made = NULL;
    int rc = kvbm_agent_follow(agent, &opts, &made);

    if (rc == 0)
        rc = kvbm_follower_get_info(made, ret);
    (void)kvbm_follower_close(made);
    (void)kvbm_agent_destroy(agent);
    return rc;
}

static struct kvbm_directory_opts directory_ = {.peers = "unix:/a", .changed = ignore_peer};
static struct kvbm_directory_peer directory_peer_ = {.n_endpoints = 1, .endpoints = {"unix:/b"}};

/* ---- the index, events and stores ---- */

static int index_(void *opts)
{
    struct kvi_index *made = NULL;
    int rc = kvi_create(opts, &made);

    kvi_destroy(made);
    return rc;
}

static int index_stats(void *ret)
{
    return kvi_get_stats(t.index, ret);
}

static int index_holder(void *ret)
{
    return kvi_get_holder(t.index, (struct kv_holder){1, 0}, ret);
}

static int reader(void *opts)
{
    struct kve_reader *made = NULL;
    int rc = kve_reader_create(opts, &made);

    kve_reader_destroy(made);
    return rc;
}

static int nats_stats(void *ret)
{
    struct kvbm_nats_opts opts = {
        .size = sizeof(opts), .server = &nats_server, .worker = "w", .window_ms = UINT32_MAX};
    static struct kvbm_nats_sink *sink; /* lives as long as the manager */

    if (!sink)
        assert_true(kvbm_events_add_nats(t.events, &opts, &sink) > 0);
    assert_int_equal(kvbm_events_flush(t.events, 60000), 0); /* its first message is counted */
    return kvbm_nats_get_stats(sink, ret);
}

static int plane_header(void *ret)
{
    static const char text[] = "{\"kind\":\"alive\",\"publisher\":\"a\",\"events\":[]}";

    return kvp_read(text, strlen(text), ret, NULL, NULL);
}

/* Nobody can write there: the records wait. */
static struct kvbm_dynamo_opts dynamo_ = {.discovery = "file:///proc/none",
                                          .endpoint = "a.b.c",
                                          .worker = 7,
                                          .block_size = 16,
                                          .address = "tcp://127.0.0.1:*",
                                          .scope = KVBM_EVENTS_CONSOLIDATED};

static int dynamo(void *opts)
{
    int id = kvbm_events_add_dynamo(t.events, opts, NULL);

    return id < 0 ? id : kvbm_events_remove_sink(t.events, id);
}

static struct kvbm_dynamo *publishes; /* a sink whose statistics don't change */

static int dynamo_stats(void *ret)
{
    struct kvbm_dynamo_opts opts = dynamo_;
    struct kvbm_dynamo_stats now = KVBM_DYNAMO_STATS_INIT;
    char where[128];

    if (!publishes) {
        snprintf(where, sizeof(where), "file://%s/discovery", t.w.dir);
        opts.size = sizeof(opts);
        opts.discovery = where;
        assert_true(kvbm_events_add_dynamo(t.events, &opts, &publishes) > 0);
    }
    while (!now.announced) {
        assert_int_equal(kvbm_dynamo_get_stats(publishes, &now), 0);
        usleep(1000);
    }
    return kvbm_dynamo_get_stats(publishes, ret);
}

static int nats_opts(void *opts)
{
    struct kvp_nats_opts copy;
    int err = kvp_nats_opts_copy(opts, &copy);

    if (err == 0)
        kvp_nats_opts_fini(&copy);
    return err;
}

static int publisher_of(void *opts)
{
    struct kve_publisher *made = NULL;
    int rc = kve_publisher_create(opts, &made);

    kve_publisher_destroy(made);
    return rc;
}

static int publish(void *event)
{
    return kve_publisher_publish(t.publisher, event, 1);
}

static int publisher_stats(void *ret)
{
    return kve_publisher_get_stats(t.quiet, ret);
}

static int64_t read_nothing(void *arg, void *buf, size_t cap)
{
    (void)arg, (void)buf, (void)cap;
    return 0;
}

static int64_t read_once(void *arg, void *buf, size_t cap)
{
    size_t *left = arg, n = *left < cap ? *left : cap;

    memset(buf, 'x', n);
    *left -= n;
    return (int64_t)n;
}

static int drop(void *arg, const void *data, size_t len)
{
    (void)arg, (void)data, (void)len;
    return 0;
}

static int save(void *opts)
{
    return kvs_save(t.store, "empty", read_nothing, NULL, opts, NULL);
}

static int restore(void *opts)
{
    return kvs_restore(t.store, "kept", drop, NULL, opts, NULL);
}

static int restored(void *ret)
{
    return kvs_restore(t.store, "kept", drop, NULL, NULL, ret);
}

static int verified(void *ret)
{
    return kvs_verify(t.store, "kept", NULL, NULL, NULL, ret);
}

static int gc(void *opts)
{
    return kvs_gc(t.store, opts, NULL);
}

static int gc_result(void *ret)
{
    const struct kvs_gc_opts opts = {.size = sizeof(opts), .dry_run = true};

    return kvs_gc(t.store, &opts, ret);
}

static int async_open(void *opts)
{
    struct kvs_async *async;
    int rc = kvs_async_open(t.store, opts, &async);

    return rc < 0 ? rc : kvs_async_close(async, 10000);
}

static int async_submit(void *request)
{
    struct kvs_async *async;
    int64_t rc;

    assert_int_equal(kvs_async_open(t.store, NULL, &async), 0);
    rc = kvs_async_submit(async, request);
    assert_int_equal(kvs_async_drain(async, 60000), 0);
    assert_int_equal(kvs_async_close(async, 60000), 0);
    return (int)KV_MIN(rc, 0);
}

static int open_llama(const struct kvl_opts *opts)
{
    struct kvl_cache *made = NULL;
    int rc = kvl_open(t.store, opts, &made);

    kvl_close(made);
    return rc;
}

static int llama(void *opts)
{
    return open_llama(opts);
}

static int libllama(void *table)
{
    const struct kvl_opts opts = {
        .size = sizeof(opts), .fingerprint = "model A", .libllama = table};

    return open_llama(&opts);
}

static struct kvl_cache *llama_cache(void)
{
    const struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "model A"};
    struct kvl_cache *made = NULL;

    assert_int_equal(kvl_open(t.store, &opts, &made), 0);
    return made;
}

static const int32_t llama_tokens[] = {1, 2, 3};

static int llama_saved(void *ret)
{
    struct kvl_cache *cache = llama_cache();
    int64_t n = kvl_save_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, "state", 5, NULL);

    assert_int_equal(n, 3); /* so that nothing of it is new below */
    n = kvl_save_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, "state", 5, ret);
    kvl_close(cache);
    return n < 0 ? (int)n : 0;
}

static int llama_loaded(void *ret)
{
    struct kvl_cache *cache = llama_cache();
    size_t len;
    void *state;
    int64_t n = kvl_load_state(cache, llama_tokens, 3, KVL_FORM_SEQUENCE, &state, &len, ret);

    if (n > 0)
        free(state);
    kvl_close(cache);
    return n < 0 ? (int)n : 0;
}

static void open_others(void)
{
    struct kve_publisher_opts opts = KVE_PUBLISHER_OPTS_INIT;
    struct kvs_save_opts with = KVS_SAVE_OPTS_INIT;
    size_t left = 100000;
    char path[128];

    opts.endpoint = "tcp://127.0.0.1:*";
    assert_int_equal(kve_publisher_create(&opts, &t.publisher), 0);
    assert_int_equal(kve_publisher_create(&opts, &t.quiet), 0);
    assert_int_equal(kvi_create(NULL, &t.index), 0);
    assert_int_equal(kvi_store(t.index, (struct kv_holder){1, 0}, KV_TIER_DEVICE, NULL,
                               &(struct kv_block){7, 70}, 1, NULL),
                     0);
    snprintf(path, sizeof(path), "%s/store", t.w.dir);
    assert_int_equal(kvs_open(path, &t.store), 0);
    with.fingerprint = "model A";
    assert_int_equal(kvs_save(t.store, "kept", read_once, &left, &with, NULL), 0);
}

/* ---- agents, block sets, sessions and leases ---- */

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

/* ---- volumes ---- */

static struct kvbm_volume *volume_of_peer; /* of t.agent: nobody has such a name */

static struct kvbm_volume_opts volume_ = {.name = "sizes", .peer = "nobody"};
static const struct kvbm_chain volume_chain = {.size = sizeof(volume_chain), .keys = &key_};
static struct kvbm_volume_io volume_io_ = {
    .chain = &volume_chain, .n = 1, .blocks = &other_block, .ok = ok_};

static void open_volume(void)
{
    volume_.size = sizeof(volume_);
    volume_.block = &t.w.block;
    volume_.agent = t.agent;
    volume_io_.layout = t.other;
    assert_int_equal(kvbm_volume_register(&volume_, &volume_of_peer), 0);
}

static int volume(void *opts)
{
    struct kvbm_volume *made = NULL;
    int rc = kvbm_volume_register(opts, &made);

    return rc < 0 ? rc : kvbm_volume_unregister(made, 10000);
}

static int volume_io(void *io)
{
    return (int)kvbm_volume_get(volume_of_peer, io);
}

static int volume_info(void *ret)
{
    return kvbm_volume_get_info(volume_of_peer, ret);
}

/* Rows of the table. */
#define VOLUME_ROWS                                                                             \
    {"kvbm_volume_opts", sizeof(volume_), UP_TO(kvbm_volume_opts, agent), &volume_, volume, 0}, \
        {"kvbm_volume_io", sizeof(volume_io_), UP_TO(kvbm_volume_io, blocks),                   \
         &volume_io_,      volume_io,          0},                                              \
    {                                                                                           \
        "kvbm_volume_info", sizeof(struct kvbm_volume_info), LEAST, NULL, volume_info, 0        \
    }

#endif
