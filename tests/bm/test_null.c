// SPDX-License-Identifier: Apache-2.0
/* NULL for each argument of each public function: an error or a no-op, never a crash. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/unit.h"
#include "bm.h"
#include "kvbm.h"
#include "skip.h"

/* Valid arguments of the calls, beside the NULL under test. */
static struct bm bm;
static uint64_t key = 1, number;
static uint32_t token = 2, type;
static uint8_t byte;
static char text[64];
static void *value;
static size_t len;
static struct kvbm_sequence *sequence;
static struct kvbm_sequence_opts sequence_opts = {.size = sizeof(sequence_opts), .block_size = 4};
static struct kvbm_token_block token_block;
static struct kvbm_mm_run run = {.hash = 1, .n = 1};
static struct kvbm_hash128 hash128;
static struct kvbm_storage *storage;
static struct kvbm_storage_opts storage_opts = {
    .size = sizeof(storage_opts), .kind = KVBM_STORAGE_NULL, .bytes = 1 << 20};
static struct kvbm_allocator allocator;
static struct kvbm_layout *layout;
static struct kvbm_layout_config config = {.size = sizeof(config),
                                           .kind = KVBM_FULLY_CONTIGUOUS,
                                           .num_blocks = 4,
                                           .num_layers = 1,
                                           .outer_dim = 1,
                                           .page_size = BM_BLOCK,
                                           .inner_dim = 8};
static struct kvbm_layout_shape shape;
static struct kvbm_view view;
static kvx_cache_desc_t cache;
static struct kvbm_pool_opts pool_opts = {
    .size = sizeof(pool_opts), .tier = KV_TIER_HOST, .n_blocks = 1, .block_size = BM_BLOCK};
static struct kvbm_mutable mutable;
static struct kvbm_complete complete;
static struct kvbm_immutable held, another;
static struct kvbm_weak weak;
static struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key};
static struct kvbm_fill fill;
static struct kvbm_block_info info = {.size = sizeof(info)};
static struct kvbm_pool_stats pool_stats = {.size = sizeof(pool_stats)};
static struct kvbm_events_stats events_stats = {.size = sizeof(events_stats)};
static struct kvbm_named_registry named = {.name = "a"}, unnamed;
static struct kvbm_event_ring *ring;
static struct kvbm_event event;
static struct kve_publisher_opts publisher = {.size = sizeof(publisher)};
static struct kvbm_nats_opts nats = {.size = sizeof(nats), .worker = "w"};
static struct kvbm_nats_stats nats_stats = {.size = sizeof(nats_stats)};
static struct kvbm_zmq_opts zmq = {.size = sizeof(zmq), .publisher = &publisher, .block_size = 4};
static struct kvbm_zmq_opts no_publisher = {.size = sizeof(zmq), .block_size = 4};
static struct kvbm_dynamo_opts dynamo = {.size = sizeof(dynamo)};
static struct kvbm_dynamo_stats dynamo_stats = KVBM_DYNAMO_STATS_INIT;

static void release(void *arg)
{
    (void)arg;
}

static void on_touch(void *arg, enum kv_tier tier, uint32_t group, const void *keys, size_t n)
{
    (void)arg, (void)tier, (void)group, (void)keys, (void)n;
}

#define R bm.registry
#define P bm.pool

/*
 * IS(value, call): what it returns. NIL(call): a pointer, NULL. NONE(call): it returns nothing, and
 * does nothing. FINE(call): whatever it returns, NULL is allowed there.
 */
#define TOKENS(IS, NIL, NONE, FINE)                                                   \
    FINE(kvbm_salt_hash(NULL, 0))                                                     \
    FINE(kvbm_salt_hash(NULL, 5))                                                     \
    IS(0, kvbm_salt_hash_json(NULL, NULL, &number))                                   \
    IS(-EINVAL, kvbm_salt_hash_json("a", "b", NULL))                                  \
    IS(0, kvbm_block_hash(1, NULL, 4))                                                \
    FINE(kvbm_block_hash(1, NULL, 0))                                                 \
    IS(0, kvbm_block_hash_mm(1, NULL, 4, 0, &run, 1))                                 \
    FINE(kvbm_block_hash_mm(1, &token, 1, 0, NULL, 1))                                \
    FINE(kvbm_sequence_hash(NULL, 1, 1, KVBM_CHAIN_SEED_ZERO))                        \
    IS(0, kvbm_hash_tokens(NULL, 8, 4, 0, KVBM_CHAIN_SEED_ZERO, NULL, &number, NULL)) \
    IS(1, kvbm_hash_tokens(&token, 1, 1, 0, KVBM_CHAIN_SEED_ZERO, NULL, NULL, NULL))  \
    IS(-EINVAL, kvbm_positional_hash(1, 1, 1, NULL))                                  \
    IS(0, kvbm_positional_hash(1, 1, 1, &hash128))                                    \
    IS(-EINVAL, kvbm_sequence_create(NULL, &sequence))                                \
    IS(-EINVAL, kvbm_sequence_create(&sequence_opts, NULL))                           \
    NONE(kvbm_sequence_destroy(NULL))                                                 \
    IS(-EINVAL, kvbm_sequence_append(NULL, 1))                                        \
    IS(-EINVAL, kvbm_sequence_extend(NULL, &token, 1))                                \
    IS(-EINVAL, kvbm_sequence_extend(NULL, NULL, 0))                                  \
    IS(-EINVAL, kvbm_sequence_extend(sequence, NULL, 1))                              \
    IS(0, kvbm_sequence_extend(sequence, NULL, 0))                                    \
    IS(-EINVAL, kvbm_sequence_pop(NULL, &token))                                      \
    IS(-EINVAL, kvbm_sequence_truncate(NULL, 0))                                      \
    IS(-EINVAL, kvbm_sequence_unwind(NULL, 0))                                        \
    NONE(kvbm_sequence_clear(NULL))                                                   \
    IS(0, kvbm_sequence_len(NULL))                                                    \
    IS(0, kvbm_sequence_n_blocks(NULL))                                               \
    NIL(kvbm_sequence_tail(NULL, &len))                                               \
    NIL(kvbm_sequence_tail(sequence, NULL))                                           \
    IS(-EINVAL, kvbm_sequence_block(NULL, 0, &token_block))                           \
    IS(-EINVAL, kvbm_sequence_block(sequence, 0, NULL))                               \
    NIL(kvbm_sequence_tokens(NULL, 0, 0))                                             \
    NIL(kvbm_sequence_hashes(NULL))

#define LAYOUTS(IS, NIL, NONE, FINE)                                                      \
    IS(-EINVAL, kvbm_storage_create(NULL, &storage))                                      \
    IS(-EINVAL, kvbm_storage_create(&storage_opts, NULL))                                 \
    NONE(kvbm_storage_destroy(NULL))                                                      \
    IS(0, kvbm_storage_get_kind(NULL))                                                    \
    IS(0, kvbm_storage_bytes(NULL))                                                       \
    IS(0, kvbm_storage_addr(NULL))                                                        \
    IS(0, kvbm_storage_device_id(NULL))                                                   \
    NIL(kvbm_storage_host_memory(NULL))                                                   \
    IS(-EINVAL, kvbm_storage_read(NULL, 0, &byte, 1))                                     \
    IS(-EINVAL, kvbm_storage_read(storage, 0, NULL, 1))                                   \
    IS(-EINVAL, kvbm_storage_write(NULL, 0, &byte, 1))                                    \
    IS(-EINVAL, kvbm_storage_write(storage, 0, NULL, 1))                                  \
    IS(-EINVAL, kvbm_storage_register(NULL, "a", release, NULL))                          \
    IS(-EINVAL, kvbm_storage_register(storage, NULL, release, NULL))                      \
    IS(-EINVAL, kvbm_storage_register(storage, "a", NULL, NULL))                          \
    NIL(kvbm_storage_registration(NULL, "a"))                                             \
    NIL(kvbm_storage_registration(storage, NULL))                                         \
    IS(-EINVAL, kvbm_storage_unregister(NULL, "a"))                                       \
    IS(-EINVAL, kvbm_storage_unregister(storage, NULL))                                   \
    NIL(kvbm_allocator_of(NULL).arg)                                                      \
    IS(-EINVAL, kvbm_layout_compute(NULL, &shape))                                        \
    IS(-EINVAL, kvbm_layout_compute(&config, NULL))                                       \
    IS(-EINVAL, kvbm_layout_create(NULL, &storage, 1, &layout))                           \
    IS(-EINVAL, kvbm_layout_create(&config, NULL, 1, &layout))                            \
    IS(-EINVAL, kvbm_layout_create(&config, &storage, 1, NULL))                           \
    IS(-EINVAL, kvbm_layout_create(&config, (struct kvbm_storage *[]){NULL}, 1, &layout)) \
    IS(-EINVAL, kvbm_layout_allocate(NULL, &allocator, &layout))                          \
    IS(-EINVAL, kvbm_layout_allocate(&config, NULL, &layout))                             \
    IS(-EINVAL, kvbm_layout_allocate(&config, &allocator, NULL))                          \
    NONE(kvbm_layout_destroy(NULL))                                                       \
    NIL(kvbm_layout_get_config(NULL))                                                     \
    NIL(kvbm_layout_get_shape(NULL))                                                      \
    NIL(kvbm_layout_storage(NULL, 0))                                                     \
    IS(-EINVAL, kvbm_layout_region(NULL, 0, 0, 0, &view))                                 \
    IS(-EINVAL, kvbm_layout_region(layout, 0, 0, 0, NULL))                                \
    IS(-EINVAL, kvbm_layout_layer(NULL, 0, 0, &view))                                     \
    IS(-EINVAL, kvbm_layout_layer(layout, 0, 0, NULL))                                    \
    IS(-EINVAL, kvbm_layout_block(NULL, 0, &view))                                        \
    IS(-EINVAL, kvbm_layout_block(layout, 0, NULL))                                       \
    IS(-EINVAL, kvbm_layout_to_kvx(NULL, 0, &cache))                                      \
    IS(-EINVAL, kvbm_layout_to_kvx(layout, 0, NULL))                                      \
    IS(-EINVAL, kvbm_layout_from_kvx(NULL, 1, &layout))                                   \
    IS(-EINVAL, kvbm_layout_from_kvx((const kvx_cache_desc_t *[]){NULL}, 1, &layout))     \
    IS(-EINVAL, kvbm_layout_from_kvx((const kvx_cache_desc_t *[]){&cache}, 1, NULL))      \
    IS(-EINVAL, kvbm_layout_serialise(NULL, text, sizeof(text), &len))                    \
    IS(-ENOSPC, kvbm_layout_serialise(layout, NULL, 0, NULL))                             \
    IS(-EINVAL, kvbm_layout_deserialise(NULL, 100, &layout))                              \
    IS(-EINVAL, kvbm_layout_deserialise(text, sizeof(text), NULL))

#define POOLS(IS, NIL, NONE, FINE)                                             \
    FINE(kvbm_state_name(9)[0])                                                \
    IS(-EINVAL, kvbm_registry_create(NULL, NULL))                              \
    IS(0, kvbm_registry_destroy(NULL))                                         \
    IS(-EINVAL, kvbm_registry_locate(NULL, 0, &key, 1, &byte))                 \
    IS(-EINVAL, kvbm_registry_locate(R, 0, NULL, 1, &byte))                    \
    IS(-EINVAL, kvbm_registry_locate(R, 0, &key, 1, NULL))                     \
    IS(-EINVAL, kvbm_attachment_type(NULL, "a", true, release, &type))         \
    IS(-EINVAL, kvbm_attachment_type(R, NULL, true, release, &type))           \
    IS(-EINVAL, kvbm_attachment_type(R, "a", true, release, NULL))             \
    IS(0, kvbm_attachment_type(R, "a", true, NULL, &type))                     \
    IS(-EINVAL, kvbm_registry_attach(NULL, 0, &key, type, &key))               \
    IS(-EINVAL, kvbm_registry_attach(R, 0, NULL, type, &key))                  \
    IS(0, kvbm_registry_attach(R, 0, &key, type, NULL))                        \
    IS(-EINVAL, kvbm_registry_attachments(NULL, 0, &key, type, &value, 1))     \
    IS(-EINVAL, kvbm_registry_attachments(R, 0, NULL, type, &value, 1))        \
    IS(-EINVAL, kvbm_registry_attachments(R, 0, &key, type, NULL, 1))          \
    IS(1, kvbm_registry_attachments(R, 0, &key, type, NULL, 0))                \
    IS(-EINVAL, kvbm_registry_on_touch(NULL, on_touch, NULL))                  \
    IS(-EINVAL, kvbm_registry_on_touch(R, NULL, NULL))                         \
    IS(-EINVAL, kvbm_pool_create(NULL, &pool_opts, &bm.pool))                  \
    IS(-EINVAL, kvbm_pool_create(R, NULL, &bm.pool))                           \
    IS(-EINVAL, kvbm_pool_create(R, &pool_opts, NULL))                         \
    IS(0, kvbm_pool_destroy(NULL))                                             \
    IS(-EINVAL, kvbm_pool_allocate(NULL, 1, &mutable, NULL))                   \
    IS(-EINVAL, kvbm_pool_allocate(P, 1, NULL, NULL))                          \
    IS(-ENOSPC, kvbm_pool_allocate(P, 100, &mutable, NULL))                    \
    IS(0, kvbm_pool_allocate(P, 0, NULL, NULL))                                \
    IS(0, kvbm_mutable_release(NULL))                                          \
    IS(0, kvbm_complete_release(NULL))                                         \
    IS(0, kvbm_immutable_release(NULL))                                        \
    IS(-EINVAL, kvbm_pool_release_mutable(NULL, &mutable, 1))                  \
    IS(-EINVAL, kvbm_pool_release_mutable(P, NULL, 1))                         \
    IS(-EINVAL, kvbm_pool_release_complete(NULL, &complete, 1))                \
    IS(-EINVAL, kvbm_pool_release_complete(P, NULL, 1))                        \
    IS(-EINVAL, kvbm_pool_release(NULL, &held, 1))                             \
    IS(-EINVAL, kvbm_pool_release(P, NULL, 1))                                 \
    IS(-EINVAL, kvbm_mutable_init_sequence(NULL, NULL))                        \
    IS(-EINVAL, kvbm_mutable_add_token(NULL, 1))                               \
    IS(-EINVAL, kvbm_mutable_add_tokens(NULL, &token, 1))                      \
    IS(-EINVAL, kvbm_mutable_add_tokens(&mutable, NULL, 1))                    \
    IS(-EINVAL, kvbm_mutable_pop_tokens(NULL, 0))                              \
    IS(-EINVAL, kvbm_mutable_commit(NULL, &complete))                          \
    IS(-EINVAL, kvbm_mutable_commit(&mutable, NULL))                           \
    IS(-EINVAL, kvbm_mutable_reset(NULL))                                      \
    IS(-EINVAL, kvbm_complete_reset(NULL, &mutable))                           \
    IS(-EINVAL, kvbm_complete_reset(&complete, NULL))                          \
    IS(-EINVAL, kvbm_mutable_fill(NULL, &fill, &token, 1))                     \
    IS(-EINVAL, kvbm_mutable_fill(&mutable, NULL, &token, 1))                  \
    IS(0, kvbm_mutable_fill(&mutable, &fill, NULL, 1))                         \
    IS(-EINVAL, kvbm_complete_fill(NULL, &fill, &token, 1))                    \
    IS(-EINVAL, kvbm_complete_fill(&complete, NULL, &token, 1))                \
    IS(-EINVAL, kvbm_pool_complete(NULL, &mutable, 1, &chain, &complete))      \
    IS(-EINVAL, kvbm_pool_complete(P, NULL, 1, &chain, &complete))             \
    IS(-EINVAL, kvbm_pool_complete(P, &mutable, 1, NULL, &complete))           \
    IS(-EINVAL, kvbm_pool_complete(P, &mutable, 1, &chain, NULL))              \
    IS(-EINVAL, kvbm_pool_register_chain(NULL, &mutable, 1, &chain, &another)) \
    IS(-EINVAL, kvbm_pool_register_chain(P, NULL, 1, &chain, &another))        \
    IS(-EINVAL, kvbm_pool_register_chain(P, &mutable, 1, NULL, &another))      \
    IS(-EINVAL, kvbm_pool_register_chain(P, &mutable, 1, &chain, NULL))        \
    IS(-EINVAL, kvbm_pool_register(NULL, &complete, 1, &another))              \
    IS(-EINVAL, kvbm_pool_register(P, NULL, 1, &another))                      \
    IS(-EINVAL, kvbm_pool_register(P, &complete, 1, NULL))                     \
    IS(-EINVAL, kvbm_pool_adopt(NULL, &mutable, 1, &held, &another))           \
    IS(-EINVAL, kvbm_pool_adopt(P, NULL, 1, &held, &another))                  \
    IS(-EINVAL, kvbm_pool_adopt(P, &mutable, 1, NULL, &another))               \
    IS(-EINVAL, kvbm_pool_adopt(P, &mutable, 1, &held, NULL))                  \
    IS(-EINVAL, kvbm_immutable_clone(NULL, &another))                          \
    IS(-EINVAL, kvbm_immutable_clone(&held, NULL))                             \
    IS(-EINVAL, kvbm_immutable_try_return(NULL))                               \
    IS(-EINVAL, kvbm_immutable_downgrade(NULL, &weak))                         \
    IS(-EINVAL, kvbm_immutable_downgrade(&held, NULL))                         \
    IS(-EINVAL, kvbm_weak_upgrade(NULL, &another))                             \
    IS(-EINVAL, kvbm_weak_upgrade(&weak, NULL))                                \
    IS(-EINVAL, kvbm_immutable_info(NULL, &info))                              \
    IS(-EINVAL, kvbm_immutable_info(&held, NULL))                              \
    IS(-EINVAL, kvbm_pool_match(NULL, 0, &key, 1, 0, &another))                \
    IS(-EINVAL, kvbm_pool_match(P, 0, NULL, 1, 0, &another))                   \
    IS(-EINVAL, kvbm_pool_match(P, 0, &key, 1, 0, NULL))                       \
    IS(-EINVAL, kvbm_pool_match_scattered(NULL, 0, &key, 1, 0, &another))      \
    IS(-EINVAL, kvbm_pool_match_scattered(P, 0, NULL, 1, 0, &another))         \
    IS(-EINVAL, kvbm_pool_match_scattered(P, 0, &key, 1, 0, NULL))             \
    IS(-EINVAL, kvbm_pool_probe(NULL, 0, &key, 1))                             \
    IS(-EINVAL, kvbm_pool_probe(P, 0, NULL, 1))                                \
    IS(-EINVAL, kvbm_pool_touch(NULL, 0, &key, 1))                             \
    IS(-EINVAL, kvbm_pool_touch(P, 0, NULL, 1))                                \
    IS(-EINVAL, kvbm_pool_retain(NULL, 0, &key, 1, 1, 0))                      \
    IS(-EINVAL, kvbm_pool_retain(P, 0, NULL, 1, 1, 0))                         \
    IS(-EINVAL, kvbm_pool_reset_keys(NULL, 0, &key, 1, NULL))                  \
    IS(-EINVAL, kvbm_pool_reset_keys(P, 0, NULL, 1, NULL))                     \
    IS(0, kvbm_pool_reset_keys(P, 0, &key, 1, NULL))                           \
    IS(-EINVAL, kvbm_pool_reset_inactive(NULL))                                \
    IS(-EINVAL, kvbm_pool_reset(NULL))                                         \
    IS(-EINVAL, kvbm_pool_view(NULL, 0, 0, 0, &view))                          \
    IS(-EINVAL, kvbm_pool_view(P, 0, 0, 0, NULL))                              \
    IS(-EINVAL, kvbm_pool_get_stats(NULL, &pool_stats))                        \
    IS(-EINVAL, kvbm_pool_get_stats(P, NULL))                                  \
    IS(-EINVAL, kvbm_registry_metrics(NULL, text, sizeof(text)))               \
    IS(-EINVAL, kvbm_registry_metrics(R, NULL, sizeof(text)))                  \
    IS(-EINVAL, kvbm_metrics(NULL, 1, text, sizeof(text)))                     \
    IS(-EINVAL, kvbm_metrics(&named, 1, NULL, sizeof(text)))                   \
    IS(-EINVAL, kvbm_metrics(&unnamed, 1, text, sizeof(text)))                 \
    IS(-EINVAL, kvbm_pool_dump(NULL, stdout, 1))                               \
    IS(-EINVAL, kvbm_pool_dump(P, NULL, 1))                                    \
    IS(-EINVAL, kvbm_registry_check(NULL))

#define EVENTS(IS, NIL, NONE, FINE)                                                    \
    IS(-EINVAL, kvbm_events_create(NULL, NULL))                                        \
    NONE(kvbm_set_log(NULL, NULL))                                                     \
    IS(0, kvbm_events_destroy(NULL))                                                   \
    IS(-EINVAL, kvbm_events_add_callback(NULL, KVBM_EVENTS_PER_TIER, bm_record, NULL)) \
    IS(-EINVAL, kvbm_events_add_callback(bm.events, KVBM_EVENTS_PER_TIER, NULL, NULL)) \
    IS(-EINVAL, kvbm_events_add_ring(NULL, KVBM_EVENTS_PER_TIER, 0, &ring))            \
    IS(-EINVAL, kvbm_events_add_ring(bm.events, KVBM_EVENTS_PER_TIER, 0, NULL))        \
    IS(-EINVAL, kvbm_event_ring_drain(NULL, &event, 1, NULL))                          \
    IS(-EINVAL, kvbm_event_ring_drain(ring, NULL, 1, NULL))                            \
    IS(0, kvbm_event_ring_drain(ring, NULL, 0, NULL))                                  \
    IS(-EINVAL, kvbm_events_add_zmq(NULL, &zmq, NULL))                                 \
    IS(-EINVAL, kvbm_events_add_zmq(bm.events, NULL, NULL))                            \
    IS(-EINVAL, kvbm_events_add_zmq(bm.events, &no_publisher, NULL))                   \
    IS(-EINVAL, kvbm_events_add_dynamo(NULL, &dynamo, NULL))                           \
    IS(-EINVAL, kvbm_events_add_dynamo(bm.events, NULL, NULL))                         \
    IS(-EINVAL, kvbm_dynamo_get_stats(NULL, &dynamo_stats))                            \
    IS(-EINVAL, kvbm_events_remove_sink(NULL, 1))                                      \
    IS(-EINVAL, kvbm_events_flush(NULL, 1))                                            \
    IS(-EINVAL, kvbm_events_add_nats(NULL, &nats, NULL))                               \
    IS(-EINVAL, kvbm_events_add_nats(bm.events, NULL, NULL))                           \
    IS(-EINVAL, kvbm_events_add_nats(bm.events, &nats, NULL))                          \
    IS(-EINVAL, kvbm_nats_get_stats(NULL, &nats_stats))                                \
    IS(-EINVAL, kvbm_nats_metrics(NULL, NULL, 0))                                      \
    IS(-EINVAL, kvbm_events_get_stats(NULL, &events_stats))                            \
    IS(-EINVAL, kvbm_events_get_stats(bm.events, NULL))

#define ALL(IS, NIL, NONE, FINE) \
    TOKENS(IS, NIL, NONE, FINE)  \
    LAYOUTS(IS, NIL, NONE, FINE) POOLS(IS, NIL, NONE, FINE) EVENTS(IS, NIL, NONE, FINE)

static void setup(void)
{
    uint64_t second = 2;

    bm_open(&bm, NULL);
    assert_true(kvbm_events_add_ring(bm.events, KVBM_EVENTS_CONSOLIDATED, 0, &ring) > 0);
    assert_int_equal(kvbm_sequence_create(&sequence_opts, &sequence), 0);
    assert_int_equal(kvbm_storage_create(&storage_opts, &storage), 0);
    assert_int_equal(kvbm_layout_create(&config, &storage, 1, &layout), 0);
    allocator = kvbm_allocator_of(&storage_opts);
    bm_put(bm.pool, &key, 1, &held);
    assert_int_equal(kvbm_immutable_downgrade(&held, &weak), 0);
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, &second, 1, &complete), 0);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &mutable, NULL), 0);
    named.registry = bm.registry;
    assert_int_equal(kvbm_events_flush(bm.events, 60000), 0);
    while (kvbm_event_ring_drain(ring, &event, 1, NULL) > 0)
        ;
}

/* All that was given is still there, and unchanged. */
static void teardown(void)
{
    struct kvbm_block_info now = {.size = sizeof(now)};

    assert_int_equal(kvbm_immutable_info(&held, &now), 0);
    assert_int_equal(now.handles, 1);
    assert_null(another.handle.pool);
    assert_int_equal(kvbm_sequence_len(sequence), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_complete_release(&complete), 0);
    assert_int_equal(kvbm_mutable_release(&mutable), 0);
    kvbm_layout_destroy(layout);
    kvbm_storage_destroy(storage);
    kvbm_sequence_destroy(sequence);
    bm_close(&bm);
}

#define CALL_IS(what, call)                                               \
    if ((long)(call) != (what)) {                                         \
        print_error("%s isn't %s but %ld\n", #call, #what, (long)(call)); \
        bad++;                                                            \
    }
#define CALL_NIL(call)                         \
    if ((call) != NULL) {                      \
        print_error("%s isn't NULL\n", #call); \
        bad++;                                 \
    }
#define CALL_NONE(call) call;
#define CALL_FINE(call) (void)(call);

static void test_nulls(void **state)
{
    int bad = 0;
    (void)state;

    setup();
    ALL(CALL_IS, CALL_NIL, CALL_NONE, CALL_FINE)
    assert_int_equal(bad, 0);
    teardown();
}

/* ---- that none was forgotten ---- */

static const char *const called[] = {
#define NAME_IS(what, call) #call,
#define NAME(call) #call,
    ALL(NAME_IS, NAME, NAME, NAME)};

static bool is_called(const char *name, size_t n)
{
    for (size_t i = 0; i < KV_COUNT(called); i++) {
        if (!strncmp(called[i], name, n) && called[i][n] == '(')
            return true;
    }
    return false;
}

/* Each function that a header declares, by its name in front of the first parenthesis behind
 * KV_API. */
static void test_all_are_called(void **state)
{
    static const char *const headers[] = {"tokens", "layout", "pool", "events"};
    const char *root = getenv("KV_SOURCE_DIR");
    size_t n = 0;
    (void)state;

    if (!root)
        skip_because("KV_SOURCE_DIR isn't set");
    for (size_t h = 0; h < KV_COUNT(headers); h++) {
        static char source[1 << 17];
        char path[512];
        FILE *file;

        snprintf(path, sizeof(path), "%s/include/kvbm_%s.h", root, headers[h]);
        file = fopen(path, "r");
        assert_non_null(file);
        source[fread(source, 1, sizeof(source) - 1, file)] = 0;
        fclose(file);
        for (const char *at = source; (at = strstr(at, "\nKV_API ")) != NULL; n++) {
            const char *end = strchr(at, '('), *begin = end;

            while (isalnum((unsigned char)begin[-1]) || begin[-1] == '_')
                begin--;
            if (!is_called(begin, (size_t)(end - begin)))
                fail_msg("%.*s isn't called with NULL", (int)(end - begin), begin);
            at = end;
        }
    }
    assert_true(n > 90);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nulls),
        cmocka_unit_test(test_all_are_called),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
