// SPDX-License-Identifier: Apache-2.0
/*
 * Callers compiled with another version of the headers. Every public struct with a size is passed
 * with every size that an older version could have, and with a larger one. Behind the struct lies a
 * protected page, so that an access beyond its size ends the test.
 *
 * Callers that forgot the size: each such struct with an impossible size is refused with one log
 * line that names it. The test reads the structs' names from the headers, so a new struct without a
 * row here fails.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <poll.h>
#include <sys/mman.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "kv_event.h"
#include "kv_index.h"
#include "kv_llama.h"
#include "kv_store.h"
#include "kvbm.h"
#include "plane/nats_opts.h"
#include "tier/kitchen.h"
#include "tier/sizes_select.h"

#define STEP sizeof(size_t) /* such structs end at multiples of it */
#define LEAST (2 * STEP)    /* the smallest that is believed: the size and a field */
#define NEWER 64            /* bytes more than there are today */
#define UNTOUCHED 0xa5

/*
 * Structs without a size never change: callers hold them by value, in arrays or within others.
 * PLAIN ones don't from the first release on.
 */
#define PLAIN_STRUCTS(FROZEN, PLAIN) \
    FROZEN(kvbm_handle, 16)          \
    FROZEN(kvbm_mutable, 16)         \
    FROZEN(kvbm_complete, 16)        \
    FROZEN(kvbm_immutable, 16)       \
    FROZEN(kvbm_weak, 16)            \
    FROZEN(kvbm_shortage, 16)        \
    FROZEN(kvbm_fill, 12)            \
    FROZEN(kvbm_reset_result, 24)    \
    FROZEN(kvbm_named_registry, 16)  \
    FROZEN(kvbm_event, 72)           \
    FROZEN(kvp_record, 96)           \
    FROZEN(kvbm_mm_run, 24)          \
    FROZEN(kvbm_hash128, 16)         \
    FROZEN(kvbm_token_block, 40)     \
    FROZEN(kvbm_layout_shape, 64)    \
    FROZEN(kvbm_view, 40)            \
    FROZEN(kvbm_done, 56)            \
    FROZEN(kvbm_tier_policy, 12)     \
    FROZEN(kvbm_tier_stats, 376)     \
    FROZEN(kvbm_shard, 32)           \
    FROZEN(kvbm_transport_key, 16)   \
    FROZEN(kvbm_block_at, 16)        \
    FROZEN(kvbm_plan_rank, 40)       \
    FROZEN(kvbm_plan_part, 16)       \
    FROZEN(kvbm_plan_copy, 136)      \
    FROZEN(kvbm_plan_piece, 24)      \
    FROZEN(kvbm_plan_heads, 8)       \
    FROZEN(kvbm_plan_source, 16)     \
    FROZEN(kvbm_group_place, 16)     \
    FROZEN(kvbm_group_done, 48)      \
    FROZEN(kvs_chunk_ref, 20)        \
    FROZEN(kvs_done, 80)             \
    FROZEN(kv_block, 16)             \
    FROZEN(kv_holder, 16)            \
    FROZEN(kv_cache_group, 12)       \
    FROZEN(kvbm_hit_group, 48)       \
    FROZEN(kvbm_hit_blocks, 16)      \
    PLAIN(kve_source)                \
    PLAIN(kve_op)                    \
    PLAIN(kve_batch)                 \
    PLAIN(kvi_stored)                \
    SELECT_STRUCTS(FROZEN, PLAIN)

#define NAME(name, ...) #name,
#define NOTHING(name)
#define HAS_SIZE(name, bytes) _Static_assert(sizeof(struct name) == (bytes), #name);
static const char *const plain[] = {PLAIN_STRUCTS(NAME, NAME)};
#if UINTPTR_MAX == UINT64_MAX
PLAIN_STRUCTS(HAS_SIZE, NOTHING)
#endif

static struct {
    struct world w; /* with a pool, and one key stored */
    struct kvbm_events *events;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_immutable held;
    struct kvbm_copier *copier;
    struct kvbm_agent *agent, *peer;
    struct kvbm_remote_set *remote;          /* a set of peer that agent has imported */
    struct kvbm_session *session;            /* of agent with peer */
    struct kvbm_blockset *lent;              /* of peer: blocks that agent may lease */
    struct kvbm_layout *other;               /* like the cache's */
    struct kve_publisher *publisher, *quiet; /* quiet: publishes nothing */
    struct kvi_index *index;
    struct kvs_store *store; /* with one object, "kept" */
    char *wall;              /* not to be touched from here on */
} t;

static uint64_t key_ = 77, next_key = 1000;
static uint32_t block_ = 3, other_block = 5;
static uint8_t ok_[1];

/* The log. */
static struct {
    int n;
    char line[KV_LOG_MAX_LINE + 1];
} heard;

/* ---- what takes a struct ---- */

static int registry(void *opts)
{
    struct kvbm_registry *made = NULL;
    int rc = kvbm_registry_create(opts, &made);

    return rc < 0 ? rc : kvbm_registry_destroy(made);
}

static int pool(void *opts)
{
    struct kvbm_pool *made = NULL;
    int rc = kvbm_pool_create(t.registry, opts, &made);

    return rc < 0 ? rc : kvbm_pool_destroy(made);
}

static int init_sequence(void *start)
{
    struct kvbm_mutable block;
    int rc;

    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &block, NULL), 0);
    rc = kvbm_mutable_init_sequence(&block, start);
    kvbm_mutable_release(&block);
    return rc;
}

static int complete(void *chain)
{
    struct kvbm_complete done;
    struct kvbm_mutable block;
    int rc;

    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &block, NULL), 0);
    rc = kvbm_pool_complete(t.pool, &block, 1, chain, &done);
    if (rc == 0)
        kvbm_complete_release(&done);
    else
        kvbm_mutable_release(&block);
    return rc;
}

static int storage(void *opts)
{
    struct kvbm_storage *made = NULL;
    int rc = kvbm_storage_create(opts, &made);

    if (rc == 0)
        kvbm_storage_destroy(made);
    return rc;
}

static int storage_like(void *opts)
{
    const struct kvbm_allocator allocator = kvbm_allocator_of(opts);
    struct kvbm_storage *made = NULL;
    int rc = allocator.allocate(allocator.arg, 4096, &made);

    if (rc == 0)
        kvbm_storage_destroy(made);
    return rc;
}

static int layout_of(const struct kvbm_layout_config *config,
                     const struct kvbm_allocator *allocator)
{
    struct kvbm_layout *made = NULL;
    int rc = kvbm_layout_allocate(config, allocator, &made);

    if (rc == 0)
        kvbm_layout_destroy(made);
    return rc;
}

static int allocate(void *allocator)
{
    return layout_of(&t.w.block, allocator);
}

static int config(void *config)
{
    const struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_shape shape;
    int rc = kvbm_layout_compute(config, &shape);

    heard.n = 0; /* of the first call */
    assert_int_equal(layout_of(config, &allocator), rc);
    return rc;
}

static int sequence(void *opts)
{
    struct kvbm_sequence *made = NULL;
    int rc = kvbm_sequence_create(opts, &made);

    kvbm_sequence_destroy(made);
    return rc;
}

static int events(void *opts)
{
    struct kvbm_events *made = NULL;
    int rc = kvbm_events_create(opts, &made);

    return rc < 0 ? rc : kvbm_events_destroy(made);
}

static struct kvp_nats_opts nats_server = {.size = sizeof(nats_server),
                                           .url = "nats://127.0.0.1:1"};

static int nats_sink(void *opts)
{
    int id = kvbm_events_add_nats(t.events, opts, NULL);

    return id < 0 ? id : kvbm_events_remove_sink(t.events, id);
}

static int zmq(void *opts)
{
    int id = kvbm_events_add_zmq(t.events, opts, NULL);

    return id < 0 ? id : kvbm_events_remove_sink(t.events, id);
}

static int copier(void *opts)
{
    struct kvbm_copier *made = NULL;
    int rc = kvbm_copier_create(opts, &made);

    kvbm_copier_destroy(made);
    return rc;
}

static int transfer(void *transfer)
{
    int64_t id = kvbm_copier_submit(t.copier, transfer);
    struct kvbm_done done;

    if (id < 0)
        return (int)id;
    assert_int_equal(kvbm_copier_wait(t.copier, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 1);
    return done.status;
}

static int manager(void *opts)
{
    struct kvbm_manager *made = NULL;
    int rc = kvbm_manager_create(opts, &made);

    return rc < 0 ? rc : kvbm_manager_destroy(made, 10000);
}

static int manager_of_block(void *config)
{
    struct kvbm_manager_opts opts = {
        .size = sizeof(opts), .block = config, .host_bytes = UINT64_C(8) * HOST_STRIDE};

    return manager(&opts);
}

static int lookup(void *chain)
{
    long n = kvbm_manager_lookup(t.w.m, chain, 1, NULL);

    return n < 0 ? (int)n : 0;
}

static int pinned(long n, struct kvbm_pin *pin)
{
    kvbm_pin_release(pin);
    return n < 0 ? (int)n : 0;
}

static int prepare_load(void *chain)
{
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_load(t.w.m, chain, 1, NULL, &pin);

    return pinned(n, pin);
}

static int prepare_store(void *chain)
{
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_store(t.w.m, chain, 1, &pin);

    return pinned(n, pin);
}

static int onboard(void *chain)
{
    struct kvbm_immutable held;
    long n = kvbm_manager_onboard(t.w.cache, chain, 1, 10000, &held);

    if (n == 1)
        kvbm_immutable_release(&held);
    return n < 0 ? (int)n : 0;
}

static int load_opts(void *opts)
{
    const struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_load(t.w.m, &chain, 1, opts, &pin);

    return pinned(n, pin);
}

static int load_blocks_opts(void *opts)
{
    struct kvbm_pin *pin = NULL;
    struct kvbm_immutable found;
    long n;

    assert_int_equal(
        kvbm_pool_match(kvbm_manager_pool(t.w.m, KV_TIER_HOST), 0, &key_, 1, 0, &found), 1);
    n = kvbm_manager_prepare_load_blocks(t.w.m, &found, 1, opts, &pin);
    kvbm_immutable_release(&found);
    return pinned(n, pin);
}

static int job(void *memory)
{
    const struct kvbm_chain chain = world_chain(&next_key);
    struct kvbm_job *job = memory;
    struct kvbm_done done;
    int64_t id;

    if (job->size < offsetof(struct kvbm_job, cache)) /* there is no pin to be written */
        return (int)kvbm_manager_submit(t.w.m, job);
    next_key++;
    assert_int_equal(kvbm_manager_prepare_store(t.w.m, &chain, 1, &job->pin), 1);
    id = kvbm_manager_submit(t.w.m, job);
    kvbm_pin_release(job->pin);
    job->pin = NULL;
    if (id < 0)
        return (int)id;
    assert_int_equal(kvbm_manager_wait(t.w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 1);
    return done.status;
}

static int block_info(void *ret)
{
    return kvbm_immutable_info(&t.held, ret);
}

static int pool_stats(void *ret)
{
    return kvbm_pool_get_stats(t.pool, ret);
}

static int events_stats(void *ret)
{
    return kvbm_events_get_stats(t.events, ret);
}

static int copier_stats(void *ret)
{
    return kvbm_copier_get_stats(t.copier, ret);
}

static int removed(void *ret)
{
    uint64_t nothing = 12345;

    return kvbm_manager_remove(t.w.m, 0, &nothing, 1, 0, ret);
}

static int manager_stats(void *ret)
{
    return kvbm_manager_get_stats(t.w.m, ret);
}

/* ---- peers, the other libraries ---- */

#include "sizes_calls.h"

/* ---- the table ---- */

#define OPTIONAL LEAST /* all of it is */
#define UP_TO(type, field) \
    ((offsetof(struct type, field) + sizeof(((struct type *)0)->field) + STEP - 1) / STEP * STEP)

static struct kvbm_session_opts session_ = {.timeout_ms = 60000};
static struct kvbm_storage_opts storage_ = {.kind = KVBM_STORAGE_SYSTEM,
                                            .bytes = 10000,
                                            .huge_pages = true,
                                            .touch_threads = 1,
                                            .path = "unused",
                                            .directory = "unused",
                                            .direct = true,
                                            .keep = true};
static struct kvbm_allocator allocator_;
static struct kvbm_layout_config block;
static struct kve_publisher_opts publisher = {.size = sizeof(publisher),
                                              .endpoint = "tcp://127.0.0.1:*"};
static struct kvbm_registry_opts registry_ = {.key_len = 16};
static struct kvbm_pool_opts pool_ = {.name = "sizes",
                                      .tier = KV_TIER_DISK,
                                      .groups = 4,
                                      .n_blocks = 5,
                                      .block_size = PAGE,
                                      .eviction = KVBM_EVICT_LFU,
                                      .lfu_thresholds = {2, 3, 4},
                                      .reject_duplicates = true,
                                      .reset_on_release = true,
                                      .track_handles = true};
static struct kvbm_block_start start = {.salt_hash = 5, .chain = KVBM_CHAIN_SEED_SALT};
static uint32_t tokens[PAGE];
static struct kvbm_chain chain_ = {.keys = &key_, .tokens = tokens};
static struct kvbm_sequence_opts sequence_ = {
    .block_size = 16, .salt_hash = 5, .chain = KVBM_CHAIN_SEED_SALT, .max_tokens = 100};
static struct kvp_nats_opts nats_ = {
    .url = "nats://127.0.0.1:4222", .name = "a", .queue_bytes = 4096, .timeout_ms = 100};
static struct kvbm_events_opts events_ = {.max_batch = 5, .window_us = 100, .queue_bytes = 65536};
static struct kvbm_zmq_opts zmq_ = {.publisher = &publisher,
                                    .scope = KVBM_EVENTS_CONSOLIDATED,
                                    .block_size = PAGE,
                                    .lora_name = "a",
                                    .cache_salt = "b"};
static struct kvbm_nats_opts nats_sink_ = {
    .server = &nats_server, .worker = "w", .block_bytes = 5, .window_ms = 100, .max_bytes = 2048};
static struct kvbm_copier_opts copier_ = {.n_threads = 1,
                                          .max_jobs = 3,
                                          .max_blocks = 9,
                                          .io = KVBM_IO_THREADS,
                                          .io_depth = 2,
                                          .gpu_copy = KVBM_GPU_SINGLE};
static struct kvbm_transfer transfer_ = {.src_blocks = &block_,
                                         .dst_blocks = &other_block,
                                         .n = 1,
                                         .first_layer = 1,
                                         .n_layers = 1,
                                         .n_heads = HEADS,
                                         .flow = KVBM_ONBOARD,
                                         .priority = 5,
                                         .deadline_ns = UINT64_MAX,
                                         .ok = ok_,
                                         .tag = 5};
static struct kvbm_manager_opts manager_, with_disk;
static struct kvbm_pin_opts pin_ = {.deadline_ns = UINT64_MAX, .no_fetch = true};
static struct kvbm_job job_ = {
    .blocks = &block_, .priority = 5, .deadline_ns = UINT64_MAX, .ok = ok_, .tag = 5};

static struct kvi_opts index_opts = {.max_blocks = 1000};
static struct kve_reader_opts reader_ = {.block_size = 16, .ignore_mm_keys = true};
static struct kve_publisher_opts publisher_ = {.endpoint = "tcp://127.0.0.1:*",
                                               .buffer_bytes = 4096};
static struct kve_event event_ = {.type = KVE_CLEARED, .group = -1};
static struct kvs_save_opts save_ = {.chunk_tokens = 256, .fingerprint = "a"};
static struct kvs_restore_opts restore_ = {.fingerprint = "model A", .verify_first = true};
static struct kvs_async_opts async_ = {.threads = 1, .max_requests = 3};
static struct kvs_request request_ = {.op = KVS_OP_FLUSH, .priority = 5, .tag = 5};
static struct kvl_libllama libllama_;
static struct kvl_opts llama_ = {.fingerprint = "model A", .block_tokens = 16};
static struct kvs_gc_opts gc_ = {.grace_s = 1000, .dry_run = true};

/* A name is the struct's, and behind a comma the call's. */
static const struct row {
    const char *name;
    size_t size;  /* today's */
    size_t least; /* what a caller must have; below: -EINVAL */
    void *like;   /* with its fields; NULL: it is written */
    int (*call)(void *struct_);
    size_t from; /* smaller ones aren't tried: as the row above */
} rows[] = {
    {"kvbm_registry_opts", sizeof(registry_), OPTIONAL, &registry_, registry, 0},
    {"kvbm_pool_opts", sizeof(pool_), UP_TO(kvbm_pool_opts, block_size), &pool_, pool, 0},
    {"kvbm_block_start", sizeof(start), OPTIONAL, &start, init_sequence, 0},
    {"kvbm_chain, complete", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, complete, 0},
    {"kvbm_chain, lookup", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, lookup, 0},
    {"kvbm_chain, load", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, prepare_load, 0},
    {"kvbm_chain, store", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, prepare_store, 0},
    {"kvbm_chain, onboard", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, onboard, 0},
    {"kvbm_storage_opts", sizeof(storage_), UP_TO(kvbm_storage_opts, bytes), &storage_, storage, 0},
    {"kvbm_storage_opts, alike", sizeof(storage_), UP_TO(kvbm_storage_opts, kind), &storage_,
     storage_like, 0},
    {"kvbm_allocator", sizeof(allocator_), UP_TO(kvbm_allocator, arg), &allocator_, allocate, 0},
    {"kvbm_layout_config", sizeof(block), UP_TO(kvbm_layout_config, inner_dim), &block, config, 0},
    {"kvbm_layout_config, manager", sizeof(block), UP_TO(kvbm_layout_config, inner_dim), &block,
     manager_of_block, 0},
    {"kvbm_sequence_opts", sizeof(sequence_), UP_TO(kvbm_sequence_opts, block_size), &sequence_,
     sequence, 0},
    {"kvbm_events_opts", sizeof(events_), OPTIONAL, &events_, events, 0},
    {"kvbm_nats_opts", sizeof(nats_sink_), UP_TO(kvbm_nats_opts, worker), &nats_sink_, nats_sink,
     0},
    {"kvbm_nats_stats", sizeof(struct kvbm_nats_stats), LEAST, NULL, nats_stats, 0},
    {"kvp_header", sizeof(struct kvp_header), LEAST, NULL, plane_header, 0},
    {"kvbm_zmq_opts", sizeof(zmq_), UP_TO(kvbm_zmq_opts, block_size), &zmq_, zmq, 0},
    {"kvbm_dynamo_opts", sizeof(dynamo_), UP_TO(kvbm_dynamo_opts, address), &dynamo_, dynamo, 0},
    {"kvbm_copier_opts", sizeof(copier_), OPTIONAL, &copier_, copier, 0},
    {"kvbm_transfer", sizeof(transfer_), UP_TO(kvbm_transfer, n), &transfer_, transfer, 0},
    {"kvbm_manager_opts", sizeof(manager_), UP_TO(kvbm_manager_opts, staging_blocks), &manager_,
     manager, 0},
    {"kvbm_manager_opts, disk", sizeof(with_disk), OPTIONAL, &with_disk, manager,
     UP_TO(kvbm_manager_opts, disk_bytes)},
    {"kvbm_cache_opts", sizeof(cache_), UP_TO(kvbm_cache_opts, layout), &cache_, cache, 0},
    {"kvbm_store_opts", sizeof(store_), OPTIONAL, &store_, store_opts, 0},
    {"kvbm_pin_opts, load", sizeof(pin_), OPTIONAL, &pin_, load_opts, 0},
    {"kvbm_pin_opts, load_blocks", sizeof(pin_), OPTIONAL, &pin_, load_blocks_opts, 0},
    {"kvbm_job", sizeof(job_), UP_TO(kvbm_job, blocks), &job_, job, 0},
    {"kvbm_block_info", sizeof(struct kvbm_block_info), LEAST, NULL, block_info, 0},
    {"kvbm_pool_stats", sizeof(struct kvbm_pool_stats), LEAST, NULL, pool_stats, 0},
    {"kvbm_events_stats", sizeof(struct kvbm_events_stats), LEAST, NULL, events_stats, 0},
    {"kvbm_dynamo_stats", sizeof(struct kvbm_dynamo_stats), LEAST, NULL, dynamo_stats, 0},
    {"kvbm_copier_stats", sizeof(struct kvbm_copier_stats), LEAST, NULL, copier_stats, 0},
    {"kvbm_remove_result", sizeof(struct kvbm_remove_result), LEAST, NULL, removed, 0},
    {"kvbm_manager_stats", sizeof(struct kvbm_manager_stats), LEAST, NULL, manager_stats, 0},
    {"kvbm_hit_opts", sizeof(hit_), OPTIONAL, &hit_, hit_opts, 0},
    {"kvbm_hit", sizeof(struct kvbm_hit), LEAST, NULL, hit_found, 0},
    {"kvbm_agent_opts", sizeof(agent_), UP_TO(kvbm_agent_opts, name), &agent_, agent, 0},
    {"kvbm_blockset_opts", sizeof(blockset_), UP_TO(kvbm_blockset_opts, layout), &blockset_,
     blockset, 0},
    {"kvbm_block_source", sizeof(source_), UP_TO(kvbm_block_source, unhold), &source_, source, 0},
    {"kvbm_lease_read_opts", sizeof(read_), UP_TO(kvbm_lease_read_opts, n), &read_, lease_read, 0},
    {"kvbm_plan_read_opts", sizeof(plan_read_), UP_TO(kvbm_plan_read_opts, n), &plan_read_,
     plan_read, 0},
    {"kvbm_shared_opts", sizeof(shared_), UP_TO(kvbm_shared_opts, n_blocks), &shared_, shared, 0},
    {"kvbm_layout_config, remote", sizeof(struct kvbm_layout_config), LEAST, NULL, remote_layout,
     0},
    {"kvbm_directory_opts", sizeof(directory_), UP_TO(kvbm_directory_opts, changed), &directory_,
     directory, 0},
    {"kvbm_directory_peer", sizeof(directory_peer_), sizeof(directory_peer_), &directory_peer_,
     directory_self, 0},
    {"kvbm_directory_info", sizeof(struct kvbm_directory_info), LEAST, NULL, directory_info, 0},
    {"kvbm_follow_opts", sizeof(follow_), UP_TO(kvbm_follow_opts, directory), &follow_, follow, 0},
    {"kvbm_follower_info", sizeof(struct kvbm_follower_info), LEAST, NULL, follower_info, 0},
    VOLUME_ROWS,
    {"kvbm_session_opts", sizeof(session_), OPTIONAL, &session_, session, 0},
    {"kvbm_session_info", sizeof(struct kvbm_session_info), LEAST, NULL, session_info, 0},
    {"kvbm_remote_set_info", sizeof(struct kvbm_remote_set_info), LEAST, NULL, remote_info, 0},
    {"kvbm_leader_opts", sizeof(leader_), UP_TO(kvbm_leader_opts, n_ranks), &leader_, leader, 0},
    {"kvbm_worker_opts", sizeof(worker_), UP_TO(kvbm_worker_opts, copier), &worker_, worker, 0},
    {"kvbm_group_transfer", sizeof(group_transfer_), UP_TO(kvbm_group_transfer, n),
     &group_transfer_, group_transfer, 0},
    {"kvbm_hint", sizeof(struct kvbm_hint), LEAST, NULL, hint, 0},
    SELECT_ROWS,
    {"kve_reader_opts", sizeof(reader_), UP_TO(kve_reader_opts, block_size), &reader_, reader, 0},
    {"kve_publisher_opts", sizeof(publisher_), UP_TO(kve_publisher_opts, endpoint), &publisher_,
     publisher_of, 0},
    {"kvp_nats_opts", sizeof(nats_), UP_TO(kvp_nats_opts, url), &nats_, nats_opts, 0},
    {"kve_event", sizeof(event_), sizeof(event_), &event_, publish, 0},
    {"kve_publisher_stats", sizeof(struct kve_publisher_stats), LEAST, NULL, publisher_stats, 0},
    {"kvs_save_opts", sizeof(save_), OPTIONAL, &save_, save, 0},
    {"kvs_restore_opts", sizeof(restore_), OPTIONAL, &restore_, restore, 0},
    {"kvs_result", sizeof(struct kvs_result), LEAST, NULL, restored, 0},
    {"kvs_verify_result", sizeof(struct kvs_verify_result), LEAST, NULL, verified, 0},
    {"kvs_gc_opts", sizeof(gc_), OPTIONAL, &gc_, gc, 0},
    {"kvs_gc_result", sizeof(struct kvs_gc_result), LEAST, NULL, gc_result, 0},
    {"kvl_libllama", sizeof(libllama_), OPTIONAL, &libllama_, libllama, 0},
    {"kvl_opts", sizeof(llama_), UP_TO(kvl_opts, fingerprint), &llama_, llama, 0},
    {"kvl_result, load", sizeof(struct kvl_result), LEAST, NULL, llama_loaded, 0},
    {"kvl_result, save", sizeof(struct kvl_result), LEAST, NULL, llama_saved, 0},
    {"kvs_async_opts", sizeof(async_), OPTIONAL, &async_, async_open, 0},
    {"kvs_request", sizeof(request_), OPTIONAL, &request_, async_submit, 0},
};

/* ---- trying it ---- */

/* A struct of @size bytes right before the wall, with as much of @like as there is. */
static void *place(size_t size, const void *like, size_t len)
{
    char *at = t.wall - (size < STEP ? STEP : size); /* the size itself is always there */

    memset(t.wall - 4096, UNTOUCHED, 4096);
    if (like)
        memcpy(at, like, len < size ? len : size);
    memcpy(at, &size, sizeof(size));
    return at;
}

static bool untouched(const char *at, size_t len)
{
    while (len && (unsigned char)*at == UNTOUCHED)
        at++, len--;
    return !len;
}

static void try_given(const struct row *row, size_t size)
{
    char *at = place(size, row->like, row->size), before[4096];
    int rc;

    memcpy(before, t.wall - sizeof(before), sizeof(before));
    rc = row->call(at);
    if (rc != (size < row->least ? -EINVAL : 0))
        fail_msg("%s of %zu bytes: %d", row->name, size, rc);
    if (memcmp(before, t.wall - sizeof(before), sizeof(before)) != 0)
        fail_msg("%s of %zu bytes was changed", row->name, size);
}

static void try_written(const struct row *row, size_t size, const char *whole)
{
    char *at = place(size, NULL, 0);
    size_t known = size < row->size ? size : row->size, told;
    int rc = row->call(at);

    memcpy(&told, at, sizeof(told));
    if (rc != (size < LEAST ? -EINVAL : 0) || told != size)
        fail_msg("%s of %zu bytes: %d", row->name, size, rc);
    if (!untouched(t.wall - 4096, (size_t)(at - t.wall + 4096)))
        fail_msg("%s of %zu bytes: written before it", row->name, size);
    if (size >= LEAST && memcmp(at + STEP, whole + STEP, known - STEP) != 0)
        fail_msg("%s of %zu bytes: not what is there", row->name, size);
    if (size > known && !untouched(at + known, size - known))
        fail_msg("%s of %zu bytes: more was written than there is", row->name, size);
}

static void test_sizes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct row *row = &rows[i];
        char whole[4096];

        assert_true(row->size % STEP == 0 && row->size + NEWER <= sizeof(whole));
        if (!row->like) {
            memset(whole, 0, sizeof(whole));
            memcpy(whole, &row->size, sizeof(row->size));
            assert_int_equal(row->call(whole), 0);
        }
        for (size_t size = row->from; size <= row->size + NEWER; size += STEP) {
            if (row->like)
                try_given(row, size);
            else
                try_written(row, size, whole);
        }
    }
}

/* ---- sizes that were forgotten ---- */

static void hear(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    if (level == KV_LOG_ERROR) {
        heard.n++;
        memcpy(heard.line, line, len);
        heard.line[len] = '\0';
    }
}

/* The name up to a comma. */
static size_t name_len(const struct row *row)
{
    return strcspn(row->name, ",");
}

/* Forgotten, a pointer's, garbage: -EINVAL, nothing is written, and the log names the struct once. */
static void test_forgotten(void **state)
{
    static const size_t sizes[] = {0, sizeof(void *), KV_MAX_STRUCT + 1, SIZE_MAX};

    (void)state;
    kv_log_set_sink(hear, NULL);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
            char *at = place(rows[i].size, rows[i].like, rows[i].size), before[4096], want[96];

            memcpy(at, &sizes[k], sizeof(sizes[k]));
            memcpy(before, t.wall - sizeof(before), sizeof(before));
            heard.n = 0;
            if (rows[i].call(at) != -EINVAL || heard.n != 1)
                fail_msg("%s of size %zu: %d log lines", rows[i].name, sizes[k], heard.n);
            snprintf(want, sizeof(want), "struct=%.*s ", (int)name_len(&rows[i]), rows[i].name);
            if (!strstr(heard.line, want))
                fail_msg("%s of size %zu: %s", rows[i].name, sizes[k], heard.line);
            assert_memory_equal(before, t.wall - sizeof(before), sizeof(before));
        }
    }
    kv_log_set_sink(NULL, NULL);
}

/* Reads "model B" where "model A" is kept: a fingerprint that is there is compared. */
static void test_not_ignored(void **state)
{
    struct kvs_restore_opts opts = KVS_RESTORE_OPTS_INIT;

    (void)state;
    opts.fingerprint = "model B";
    assert_int_equal(kvs_restore(t.store, "kept", drop, NULL, &opts, NULL), -ESTALE);
    opts.size = 0;
    assert_int_equal(kvs_restore(t.store, "kept", drop, NULL, &opts, NULL), -EINVAL);
}

/* ---- no struct is forgotten ---- */

static bool has_row(const char *name, bool sized)
{
    for (size_t i = 0; sized && i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strlen(name) == name_len(&rows[i]) && strncmp(name, rows[i].name, strlen(name)) == 0)
            return true;
    for (size_t i = 0; !sized && i < sizeof(plain) / sizeof(plain[0]); i++)
        if (strcmp(name, plain[i]) == 0)
            return true;
    return false;
}

/* Look for "struct NAME {" at the start of a line, and the line behind it. Returns the number of structs. */
static int read_header(const char *path)
{
    char line[512], name[96] = "", init[128] = "";
    FILE *file = fopen(path, "r");
    int n = 0;

    if (!file)
        fail_msg("%s can't be read", path);
    while (fgets(line, sizeof(line), file)) {
        bool sized = strncmp(line, "    size_t size;", 16) == 0;

        if (*name) {
            n++;
            if (!has_row(name, sized))
                fail_msg("%s: struct %s is %s: add a row for it to this test", path, name,
                         sized ? "not tried"
                               : "without a size, and not among those that never change");
            if (sized) { /* its initialiser comes behind it */
                snprintf(init, sizeof(init), " KV_INIT_(%s)", name);
            }
            *name = '\0';
        }
        if (*init && strncmp(line, "#define ", 8) == 0 && strstr(line, init))
            *init = '\0';
        if (sscanf(line, "struct %90[a-z0-9_] {", name) == 1 && strchr(line, '{')) {
            if (*init)
                fail_msg("%s: no initialiser:%s", path, init);
        } else {
            *name = '\0';
        }
    }
    if (*init)
        fail_msg("%s: no initialiser:%s", path, init);
    fclose(file);
    return n;
}

static void test_all_structs(void **state)
{
    static const char *const headers[] = {
        "kv_types.h",       "kv_event.h",       "kv_index.h",    "kv_store.h",    "kvbm.h",
        "kvbm_tokens.h",    "kvbm_layout.h",    "kvbm_pool.h",   "kvbm_events.h", "kvbm_transfer.h",
        "kvbm_manager.h",   "kv_store_async.h", "kvbm_remote.h", "kvbm_lease.h",  "kvbm_plan.h",
        "kvbm_directory.h", "kvbm_volume.h",    "kvbm_group.h",  "kv_plane.h",    "kvbm_hit.h",
        "kv_select.h"};
    const char *tree = getenv("KV_SOURCE_DIR");
    int n = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        char path[512];

        snprintf(path, sizeof(path), "%s/include/%s", tree ? tree : ".", headers[i]);
        n += read_header(path);
    }
    assert_true(n > 50);
}

/* ---- configuring: what is given is written, too ---- */

static void write_line(const char *path, const char *line)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(line, file);
    assert_int_equal(fclose(file), 0);
}

/* A key of the file is set where there is room for it, and else as one that isn't known. */
static void try_configure(const char *line, size_t offset, size_t len, size_t size)
{
    char *at = place(size, NULL, 0), *strings = NULL, path[128];
    size_t told;
    int rc;

    snprintf(path, sizeof(path), "%s/configuration", t.w.dir);
    write_line(path, line);
    rc = kvbm_manager_configure((struct kvbm_manager_opts *)(void *)at, path, &strings);
    assert_int_equal(rc, offset + len <= size && size >= LEAST ? 0 : -EINVAL);
    memcpy(&told, at, sizeof(told));
    assert_int_equal(told, size);
    for (size_t i = STEP; i < size; i++) {
        if (rc < 0 || i < offset || i >= offset + len)
            assert_int_equal((unsigned char)at[i], UNTOUCHED);
    }
    if (rc == 0)
        assert_false(untouched(at + offset, len));
    free(strings);
}

static void test_configure(void **state)
{
#define FIELD(name) \
    offsetof(struct kvbm_manager_opts, name), sizeof(((struct kvbm_manager_opts *)0)->name)
    const size_t all = sizeof(struct kvbm_manager_opts);
    const size_t last = offsetof(struct kvbm_manager_opts, gpu_copy) + sizeof(enum kvbm_gpu_copy);
    char *strings = NULL;

    (void)state;
    for (size_t size = STEP; size <= all + NEWER; size += STEP) {
        try_configure("host_bytes = 1GiB\n", FIELD(host_bytes), size);
        try_configure("host_threshold = 3\n", FIELD(host_policy.threshold), size);
        try_configure("disk = /somewhere\n", FIELD(disk), size);
        try_configure("io_registered = yes\n", FIELD(io_registered), size);
        try_configure("gpu_copy = single\n", FIELD(gpu_copy), size);
    }
    /* A variable of the environment may be meant for another program. */
    assert_int_equal(setenv("KVBM_GPU_COPY", "single", 1), 0);
    for (size_t size = 0; size <= all + NEWER; size += STEP) {
        struct kvbm_manager_opts *opts = place(size, NULL, 0);

        assert_int_equal(kvbm_manager_configure(opts, NULL, &strings), size >= LEAST ? 0 : -EINVAL);
        if (size >= last)
            assert_int_equal(opts->gpu_copy, KVBM_GPU_SINGLE);
        else if (size >= STEP)
            assert_true(untouched((char *)opts + STEP, size - STEP));
        free(strings);
        strings = NULL;
    }
    unsetenv("KVBM_GPU_COPY");
}

/* ---- a world of each ---- */

static void open_registry(void)
{
    const struct kvbm_registry_opts opts = {.size = sizeof(opts)};
    const struct kvbm_pool_opts pool_opts = {
        .size = sizeof(pool_opts), .tier = KV_TIER_HOST, .n_blocks = 8, .block_size = PAGE};
    struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_complete done;
    struct kvbm_mutable free_;

    assert_int_equal(kvbm_registry_create(&opts, &t.registry), 0);
    assert_int_equal(kvbm_pool_create(t.registry, &pool_opts, &t.pool), 0);
    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &free_, NULL), 0);
    assert_int_equal(kvbm_pool_complete(t.pool, &free_, 1, &chain, &done), 0);
    assert_int_equal(kvbm_pool_register(t.pool, &done, 1, &t.held), 0);
}

static void open_manager(void)
{
    world_init(&t.w, 64);
    world_start(&t.w);
    world_attach(&t.w, true);
    assert_int_equal(world_store(&t.w, key_, 1), 1);
    block = t.w.block;
    cache_.layout = t.w.layout;
    cache_.pool = t.w.pool;
    job_.cache = t.w.cache;
    transfer_.src = t.w.layout;
    manager_ = (struct kvbm_manager_opts){.block = &t.w.block,
                                          .fingerprint = "test",
                                          .key_len = 16,
                                          .events = t.events,
                                          .host_bytes = UINT64_C(8) * HOST_STRIDE,
                                          .staging_blocks = 4,
                                          .host_eviction = KVBM_EVICT_LINEAGE,
                                          .huge_pages = true,
                                          .host_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .disk_eviction = KVBM_EVICT_LFU,
                                          .disk_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .object_blocks = 100,
                                          .object_timeout_ms = 100,
                                          .object_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .copy_threads = 1,
                                          .io = KVBM_IO_THREADS,
                                          .io_depth = 2,
                                          .max_offload = 10,
                                          .max_jobs = 10,
                                          .gpu_copy = KVBM_GPU_SINGLE};
    with_disk = manager_;
    with_disk.disk = t.w.disk;
    with_disk.disk_bytes = UINT64_C(8) * HOST_STRIDE;
    with_disk.disk_buffered = with_disk.disk_volatile = true;
}

static void open_peers(void)
{
    struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = "sizes"};
    struct kvbm_blockset_opts set_opts = {.size = sizeof(set_opts), .layout = t.other};
    const char *const loopback = "tcp:127.0.0.1:0";
    struct kvbm_blockset_opts lent = {
        .size = sizeof(lent), .id = 9, .layout = t.other, .source = &source_};
    struct kvbm_blockset *set = NULL;
    char endpoint[128];
    uint8_t bytes[4096];
    long len;

    blockset_.layout = t.other;
    read_.to = t.other;
    plan_read_.to = t.other;
    plan_read_.copier = t.copier;
    place_.layout = t.other;
    worker_.copier = t.copier;
    source_.size = sizeof(source_);
    assert_int_equal(kvbm_agent_create(&opts, &t.agent), 0);
    opts.name = "peer";
    opts.worker = 1;
    opts.listen = &loopback;
    opts.n_listen = 1;
    assert_int_equal(kvbm_agent_create(&opts, &t.peer), 0);
    assert_int_equal(kvbm_blockset_export(t.peer, &set_opts, &set), 0);
    len = kvbm_blockset_serialise(set, bytes, sizeof(bytes), NULL);
    assert_true(len > 0);
    kvbm_blockset_destroy(set);
    assert_int_equal(kvbm_blockset_import(t.agent, bytes, (size_t)len, &t.remote), 0);
    assert_true(kvbm_agent_endpoint(t.peer, 0, endpoint, sizeof(endpoint), NULL) > 0);
    assert_int_equal(kvbm_blockset_export(t.peer, &lent, &t.lent), 0);
    assert_int_equal(kvbm_session_open(t.agent, endpoint, NULL, &t.session), 0);
    open_volume();
}

static int setup(void **state)
{
    const struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    static struct kvbm_storage_opts like = {
        .size = sizeof(like), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)state;
    assert_true(pages != MAP_FAILED);
    t.wall = pages + 4096;
    assert_int_equal(mprotect(t.wall, 4096, PROT_NONE), 0);
    assert_int_equal(kvbm_events_create(NULL, &t.events), 0);
    assert_int_equal(kvbm_copier_create(NULL, &t.copier), 0);
    open_registry();
    open_manager();
    open_others();
    allocator_ = kvbm_allocator_of(&like);
    assert_int_equal(kvbm_layout_allocate(&t.w.block, &allocator, &t.other), 0);
    transfer_.dst = t.other;
    open_peers();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kve_publisher_destroy(t.publisher);
    kve_publisher_destroy(t.quiet);
    kvi_destroy(t.index);
    kvs_close(t.store);
    kvbm_copier_destroy(t.copier);
    assert_int_equal(kvbm_volume_unregister(volume_of_peer, 0), 0);
    assert_int_equal(kvbm_session_close(t.session), 0);
    kvbm_blockset_destroy(t.lent);
    assert_int_equal(kvbm_agent_destroy(t.agent), 0);
    assert_int_equal(kvbm_agent_destroy(t.peer), 0);
    kvbm_layout_destroy(t.other);
    kvbm_immutable_release(&t.held);
    assert_int_equal(kvbm_pool_destroy(t.pool), 0);
    assert_int_equal(kvbm_registry_destroy(t.registry), 0);
    world_fini(&t.w);
    assert_int_equal(kvbm_events_destroy(t.events), 0);
    munmap(t.wall - 4096, 8192);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),       cmocka_unit_test(test_forgotten),
        cmocka_unit_test(test_not_ignored), cmocka_unit_test(test_all_structs),
        cmocka_unit_test(test_configure),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
