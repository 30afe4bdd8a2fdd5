// SPDX-License-Identifier: Apache-2.0
/* Events that the sink for Dynamo's plane publishes over ZMQ, read back with our own reader; its records
 * in a folder; and a follower whose blocks are those of the registry, whatever was lost. */
#include <dirent.h>
#include <errno.h>
#include <zmq.h>

#include "base/unit.h"
#include "bm/bm.h"
#include "event/reader/reader.h"
#include "event/router/envelope.h"
#include "event/wire/frames.h"
#include "plane/dynamo.h"
#include "support.h"

#define WORKER UINT64_C(0xf000000000000007)
#define N_KEYS 64 /* keys 1 to 64 */

static char folder[64];

static struct {
    struct kvbm_events *events;
    struct kvbm_dynamo *dynamo;
    int id;
    void *context, *sub;
    struct kve_reader *reader;
    bool held[KV_N_TIERS][N_KEYS + 1]; /* what a follower knows */
    uint64_t next_sequence, n_clears, n_blocks, n_messages;
    uint64_t event_id;
} wire;

static struct kvbm_dynamo_opts dynamo_opts(void)
{
    static char where[96];

    snprintf(where, sizeof(where), "file://%s", folder);
    return (struct kvbm_dynamo_opts){.size = sizeof(struct kvbm_dynamo_opts),
                                     .discovery = where,
                                     .endpoint = "ns1.backend.generate",
                                     .worker = WORKER,
                                     .rank = 3,
                                     .block_size = BM_BLOCK,
                                     .address = "tcp://127.0.0.1:*"};
}

static struct kvbm_dynamo_stats stats_of(void)
{
    struct kvbm_dynamo_stats stats = KVBM_DYNAMO_STATS_INIT;

    assert_int_equal(kvbm_dynamo_get_stats(wire.dynamo, &stats), 0);
    return stats;
}

/* -- a follower -------------------------------------------------------------------------------- */

static void apply(const struct kve_op *op)
{
    assert_int_equal(op->rank, 3);
    assert_true(op->single);
    if (op->type == KVE_OP_CLEAR) {
        memset(wire.held, 0, sizeof(wire.held));
        wire.n_clears++;
        return;
    }
    for (size_t i = 0; i < op->n; i++) {
        uint64_t hash = op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];

        assert_true(hash >= 1 && hash <= N_KEYS);
        wire.held[op->tier][hash] = op->type == KVE_OP_STORE;
        wire.n_blocks++;
    }
}

/* Take a message, if one comes in @ms. */
static bool take(int ms)
{
    uint64_t publisher = stats_of().publisher;
    zmq_msg_t parts[4];
    struct kve_span frames[4];
    struct kve_message message;
    struct kve_batch batch;
    zmq_pollitem_t item = {.socket = wire.sub, .events = ZMQ_POLLIN};

    if (zmq_poll(&item, 1, ms) <= 0)
        return false;
    for (int i = 0; i < 4; i++) {
        zmq_msg_init(&parts[i]);
        assert_true(zmq_msg_recv(&parts[i], wire.sub, 0) >= 0);
        frames[i] = (struct kve_span){zmq_msg_data(&parts[i]), zmq_msg_size(&parts[i])};
        assert_int_equal(zmq_msg_more(&parts[i]), i < 3);
    }
    assert_int_equal(kve_message_parse_live(frames, 4, &message), 0);
    assert_int_equal(message.topic.len, 9);
    assert_memory_equal(message.topic.data, "kv-events", 9);
    assert_true(message.publisher == publisher);
    assert_true(!wire.n_messages || message.sequence == wire.next_sequence);
    wire.next_sequence = message.sequence + 1;
    wire.n_messages++;
    assert_int_equal(
        kve_reader_decode(wire.reader, message.payload.data, message.payload.len, &batch), 0);
    assert_false(wire.reader->misses_events);
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], 0);
    for (size_t i = 0; i < batch.n_ops; i++)
        apply(&batch.ops[i]);
    for (int i = 0; i < 4; i++)
        zmq_msg_close(&parts[i]);
    return true;
}

/* Take all that was published. */
static void take_all(void)
{
    assert_int_equal(kvbm_events_flush(wire.events, 60000), 0);
    wait_until((take(0), wire.next_sequence == stats_of().messages));
}

static void open_wire(const struct kvbm_dynamo_opts *opts, uint64_t queue_bytes)
{
    struct kvbm_events_opts events = {.size = sizeof(events), .queue_bytes = queue_bytes};
    struct kve_reader_opts reader = {.size = sizeof(reader), .block_size = BM_BLOCK};

    memset(&wire, 0, sizeof(wire));
    assert_int_equal(kvbm_events_create(&events, &wire.events), 0);
    wire.id = kvbm_events_add_dynamo(wire.events, opts, &wire.dynamo);
    assert_true(wire.id > 0);
    assert_int_equal(kve_reader_create(&reader, &wire.reader), 0);
    kve_reader_expect(wire.reader, stats_of().publisher, WORKER, 3);
    wire.context = zmq_ctx_new();
    wire.sub = zmq_socket(wire.context, ZMQ_SUB);
    assert_int_equal(zmq_setsockopt(wire.sub, ZMQ_SUBSCRIBE, "kv-events", 9), 0);
    assert_int_equal(zmq_connect(wire.sub, stats_of().address), 0);
}

static void close_wire(void)
{
    int none = 0;

    zmq_setsockopt(wire.sub, ZMQ_LINGER, &none, sizeof(none));
    zmq_close(wire.sub);
    zmq_ctx_term(wire.context);
    kve_reader_destroy(wire.reader);
    assert_int_equal(kvbm_events_destroy(wire.events), 0);
}

/* -- pools ------------------------------------------------------------------------------------- */

struct tiers {
    struct bm bm;
    struct kvbm_pool *pools[2]; /* device, host */
};

static void open_tiers(struct tiers *t)
{
    struct kvbm_registry_opts opts = {.size = sizeof(opts), .events = wire.events};
    struct kvbm_pool_opts device = {.block_size = BM_BLOCK, .n_blocks = 16, .groups = 3};
    struct kvbm_pool_opts host = {
        .tier = KV_TIER_HOST, .block_size = BM_BLOCK, .n_blocks = 24, .groups = 1};

    *t = (struct tiers){0};
    assert_int_equal(kvbm_registry_create(&opts, &t->bm.registry), 0);
    t->pools[0] = t->bm.pool = bm_pool(&t->bm, &device);
    t->pools[1] = bm_pool(&t->bm, &host);
}

static void close_tiers(struct tiers *t)
{
    assert_int_equal(kvbm_pool_destroy(t->pools[0]), 0);
    assert_int_equal(kvbm_pool_destroy(t->pools[1]), 0);
    assert_int_equal(kvbm_registry_destroy(t->bm.registry), 0);
}

/* Register a chain of @n keys from @key on, and let it go. */
static void leave_in(struct kvbm_pool *pool, uint32_t group, uint64_t key, size_t n)
{
    uint64_t keys[8];
    uint32_t tokens[8 * BM_BLOCK];
    struct kvbm_chain chain = {
        .size = sizeof(chain), .keys = keys, .tokens = tokens, .group = group};
    struct kvbm_mutable blocks[8];
    struct kvbm_complete complete[8];
    struct kvbm_immutable held[8];

    for (size_t i = 0; i < n; i++) {
        keys[i] = key + i;
        for (size_t k = 0; k < BM_BLOCK; k++)
            tokens[i * BM_BLOCK + k] = (uint32_t)(keys[i] * BM_BLOCK + k);
    }
    assert_int_equal(kvbm_pool_allocate(pool, n, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_complete(pool, blocks, n, &chain, complete), 0);
    assert_int_equal(kvbm_pool_register(pool, complete, n, held), 0);
    assert_int_equal(kvbm_pool_release(pool, held, n), 0);
}

static void leave(struct kvbm_pool *pool, uint64_t key, size_t n)
{
    leave_in(pool, 0, key, n);
}

/* Join: messages before the subscription's arrival are lost. Ends with empty pools. */
static void join(struct tiers *t)
{
    do {
        leave(t->pools[0], 1, 1);
        bm_churn(t->pools[0], 16);
        assert_int_equal(kvbm_events_flush(wire.events, 60000), 0);
    } while (!take(20));
    take_all();
    memset(wire.held, 0, sizeof(wire.held));
}

static bool has(struct tiers *t, enum kv_tier tier, uint64_t key)
{
    uint8_t tiers;

    assert_int_equal(kvbm_registry_locate(t->bm.registry, 0, &key, 1, &tiers), 0);
    return tiers & 1u << tier;
}

/* Compare what the follower knows with the registry. Returns the number of blocks that it lacks. */
static size_t compare(struct tiers *t)
{
    size_t lacking = 0;

    for (int tier = KV_TIER_DEVICE; tier <= KV_TIER_HOST; tier++)
        for (uint64_t key = 1; key <= N_KEYS; key++) {
            bool there = has(t, (enum kv_tier)tier, key);

            if (wire.held[tier][key])
                assert_true(there); /* never more than there is */
            lacking += there && !wire.held[tier][key];
        }
    return lacking;
}

/* -- tests ------------------------------------------------------------------------------------- */

static void test_bytes(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    struct kvbm_dynamo_stats stats;
    struct tiers t;

    (void)state;
    open_wire(&opts, 0);
    open_tiers(&t);
    join(&t);
    wire.n_blocks = 0;
    leave(t.pools[0], 1, 3);
    leave(t.pools[1], 1, 2);
    take_all();
    assert_int_equal(wire.n_blocks, 5);
    assert_true(wire.held[KV_TIER_DEVICE][3] && wire.held[KV_TIER_HOST][2]);
    assert_int_equal(compare(&t), 0);
    stats = stats_of();
    assert_int_equal(stats.messages, wire.next_sequence);
    assert_int_equal(stats.losses, 0);
    assert_int_equal(stats.left_out, 0);
    bm_leave(t.pools[0], 60); /* without tokens */
    assert_int_equal(kvbm_events_flush(wire.events, 60000), 0);
    assert_int_equal(stats_of().left_out, 1);
    leave_in(t.pools[0], 1, 61, 1); /* of another group */
    assert_int_equal(kvbm_events_flush(wire.events, 60000), 0);
    assert_int_equal(stats_of().left_out, 2);
    bm_churn(t.pools[0], 16);
    take_all();
    assert_false(wire.held[KV_TIER_DEVICE][61]);
    assert_true(stats_of().left_out > 2);
    close_tiers(&t);
    close_wire();
}

/* Copies in further tiers come without tokens, and blocks of a disk before them. */
static void test_further_tiers(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    struct tiers t;

    (void)state;
    open_wire(&opts, 0);
    open_tiers(&t);
    join(&t);
    leave(t.pools[0], 1, 1);
    leave(t.pools[0], 2, 1);
    bm_leave(t.pools[1], 1);
    take_all();
    assert_true(wire.held[KV_TIER_HOST][1] && stats_of().left_out == 0);
    bm_churn(t.pools[0],
             16); /* the host's copy keeps the tokens of key 1; those of key 2 are gone */
    bm_leave(t.pools[0], 1);
    bm_leave(t.pools[1], 2);
    take_all();
    assert_true(wire.held[KV_TIER_DEVICE][1]);
    assert_false(wire.held[KV_TIER_HOST][2]);
    close_tiers(&t);
    close_wire();
}

/* Consolidated, all is said to be on the device. */
static void test_first_tokens(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    struct tiers t;

    (void)state;
    opts.scope = KVBM_EVENTS_CONSOLIDATED;
    open_wire(&opts, 0);
    open_tiers(&t);
    join(&t);
    bm_leave(t.pools[1], 1);
    take_all();
    assert_false(wire.held[KV_TIER_DEVICE][1]);
    leave(t.pools[0], 1, 1);
    take_all();
    assert_true(wire.held[KV_TIER_DEVICE][1]);
    bm_churn(t.pools[0], 16);
    take_all();
    assert_true(wire.held[KV_TIER_DEVICE][1]); /* the host has it still */
    bm_churn(t.pools[1], 24);
    take_all();
    assert_false(wire.held[KV_TIER_DEVICE][1]);
    close_tiers(&t);
    close_wire();
}

static bool queue_is_empty(void)
{
    struct kvbm_events_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvbm_events_get_stats(wire.events, &stats), 0);
    return stats.queued_bytes == 0;
}

/* A block that is told behind a loss, in the batch that shows it, keeps its tokens for further tiers. */
static void test_tiers_behind_a_loss(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    struct tiers t;

    (void)state;
    open_wire(&opts, 512);
    open_tiers(&t);
    join(&t);
    leave(t.pools[0], 1, 8); /* more than fits */
    wait_until(queue_is_empty());
    leave(t.pools[0], 9, 1);
    take_all();
    assert_int_equal(wire.n_clears, 1);
    assert_true(wire.held[KV_TIER_DEVICE][9]);
    bm_leave(t.pools[1], 9);
    take_all();
    assert_true(wire.held[KV_TIER_HOST][9]);
    close_tiers(&t);
    close_wire();
}

/* The last decoded store's hashes are those of tokens, adapter and salt. */
static void test_hashes(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    static const uint32_t tokens[] = {4, 5, 6, 7};
    struct tiers t;

    (void)state;
    opts.lora_name = "lora";
    opts.cache_salt = "salt";
    open_wire(&opts, 0);
    open_tiers(&t);
    join(&t);
    leave(t.pools[0], 1, 1);
    take_all();
    assert_true(wire.reader->n_ops && wire.reader->ops[0].type == KVE_OP_STORE);
    assert_true(wire.reader->ops[0].blocks[0].tokens_hash ==
                kve_hash_block(kve_seed("lora", 4, "salt", 4), tokens, BM_BLOCK, NULL, 0));
    close_tiers(&t);
    close_wire();
}

static unsigned n_files(const char *bucket)
{
    char path[128];
    struct dirent *file;
    unsigned n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "%s/v1/%s", folder, bucket);
    dir = opendir(path);
    while (dir && (file = readdir(dir)))
        n += *file->d_name != '.';
    if (dir)
        closedir(dir);
    return n;
}

static void test_records(void **state)
{
    struct kvbm_dynamo_opts opts = dynamo_opts();
    struct kvbm_dynamo_stats stats;

    (void)state;
    opts.address = "tcp://0.0.0.0:*";
    opts.advertise = "127.0.0.1";
    open_wire(&opts, 0);
    wait_until(stats_of().announced);
    stats = stats_of();
    assert_memory_equal(stats.address, "tcp://127.0.0.1:", 16);
    assert_true(stats.publisher && stats.publisher >> 53 == 0);
    assert_int_equal(n_files("event_sources"), 1);
    assert_int_equal(n_files("event_channels"), 1);
    assert_int_equal(kvbm_events_remove_sink(wire.events, wire.id), 0);
    assert_int_equal(n_files("event_sources"), 0);
    assert_int_equal(n_files("event_channels"), 0);
    kve_reader_destroy(wire.reader);
    zmq_close(wire.sub);
    zmq_ctx_term(wire.context);
    assert_int_equal(kvbm_events_destroy(wire.events), 0);
}

static void test_refused(void **state)
{
    struct kvbm_dynamo_opts good = dynamo_opts(), opts;
    struct kvbm_events *events;

    (void)state;
    assert_int_equal(kvbm_events_create(NULL, &events), 0);
#define REFUSED(change)                                                         \
    do {                                                                        \
        opts = good;                                                            \
        change;                                                                 \
        assert_int_equal(kvbm_events_add_dynamo(events, &opts, NULL), -EINVAL); \
    } while (0)
    REFUSED(opts.discovery = NULL);
    REFUSED(opts.discovery = "consul://a:1");
    REFUSED(opts.discovery = "etcd://a");
    REFUSED(opts.endpoint = NULL);
    REFUSED(opts.endpoint = "a.b");
    REFUSED(opts.endpoint = "a.b.c*");
    REFUSED(opts.worker = 0);
    REFUSED(opts.block_size = 0);
    REFUSED(opts.address = NULL);
    REFUSED(opts.address = "ipc:///tmp/x");
    REFUSED(opts.address = "tcp://0.0.0.0:*");
    REFUSED(opts.lora_name = "\xff");
    REFUSED(opts.size = 0);
    assert_int_equal(kvbm_events_add_dynamo(NULL, &good, NULL), -EINVAL);
    assert_int_equal(n_files("event_sources"), 0);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* Random pools, with a queue that has room for all, and one that loses: after quiet the follower knows
 * all, or never more than there is. */
static void follow_random(uint64_t queue_bytes, size_t rounds)
{
    uint64_t seed = unit_seed();
    struct kvbm_dynamo_opts opts = dynamo_opts();
    size_t lacking = 0;
    struct tiers t;

    open_wire(&opts, queue_bytes);
    open_tiers(&t);
    join(&t);
    for (size_t i = 0; i < rounds; i++) {
        size_t n = 1 + unit_below(&seed, 8);

        leave(t.pools[unit_below(&seed, 2)], 1 + 8 * unit_below(&seed, N_KEYS / 8), n);
        if (unit_below(&seed, 50) == 0) {
            take_all();
            lacking += compare(&t);
        }
    }
    take_all();
    lacking += compare(&t);
    if (queue_bytes)
        assert_true(stats_of().losses && wire.n_clears);
    else
        assert_true(lacking == 0 && !stats_of().losses);
    assert_true(wire.n_clears <= stats_of().losses);
    close_tiers(&t);
    close_wire();
}

static void test_random(void **state)
{
    (void)state;
    follow_random(0, unit_rounds(3000));
}

static void test_losses(void **state)
{
    (void)state;
    follow_random(1024, KV_MAX(unit_rounds(3000), (size_t)1000));
}

static int make_folder(void **state)
{
    (void)state;
    return temp_dir(folder, sizeof(folder));
}

static int remove_folder(void **state)
{
    (void)state;
    return remove_dir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_further_tiers),
        cmocka_unit_test(test_first_tokens),
        cmocka_unit_test(test_tiers_behind_a_loss),
    };

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
