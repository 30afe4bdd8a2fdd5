// SPDX-License-Identifier: Apache-2.0
/* Events that the ZMQ sink publishes, read back from its replay service with our own reader. */
#include "base/unit.h"

#include <errno.h>
#include <zmq.h>

#include "bm/bm.h"
#include "bm/events/events.h"
#include "event/wire/frames.h"
#include "kv_event.h"

enum { MOST = 256 };

/* -- what was published ------------------------------------------------------------------------ */

struct op {
    enum kve_op_type type;
    enum kv_tier tier;
    bool has_parent;
    uint64_t parent, sequence;
    size_t n;
    uint64_t hashes[64], tokens_hashes[64];
    uint32_t rank;
};

static struct {
    struct kvbm_events *events;
    struct kve_publisher *publisher;
    int id;
    struct op ops[MOST];
    size_t n_ops;
    uint64_t numbers[MOST]; /* of batches */
    size_t n_numbers;
    uint32_t skipped[KVE_N_SKIPS];
} wire;

static struct kve_publisher_opts publisher_opts(void)
{
    return (struct kve_publisher_opts){.size = sizeof(struct kve_publisher_opts),
                                       .endpoint = "tcp://127.0.0.1:*",
                                       .replay_endpoint = "tcp://127.0.0.1:*",
                                       .rank = 3};
}

static void open_wire(const struct kve_publisher_opts *publisher, const struct kvbm_zmq_opts *more,
                      uint64_t queue_bytes)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts), .queue_bytes = queue_bytes};
    struct kve_publisher_opts defaults = publisher_opts();
    struct kvbm_zmq_opts zmq = {0};

    memset(&wire, 0, sizeof(wire));
    if (more)
        zmq = *more;
    zmq.size = sizeof(zmq);
    zmq.block_size = BM_BLOCK;
    zmq.publisher = publisher ? publisher : &defaults;
    assert_int_equal(kvbm_events_create(&opts, &wire.events), 0);
    wire.id = kvbm_events_add_zmq(wire.events, &zmq, &wire.publisher);
    assert_true(wire.id > 0);
}

static void keep(const struct kve_op *op, uint64_t sequence)
{
    struct op *to = &wire.ops[wire.n_ops++];

    assert_true(wire.n_ops <= MOST && op->n <= 64);
    *to = (struct op){.type = op->type,
                      .tier = op->tier,
                      .has_parent = op->has_parent,
                      .parent = op->parent,
                      .sequence = sequence,
                      .n = op->n,
                      .rank = op->rank};
    for (size_t i = 0; i < op->n; i++) {
        to->hashes[i] = op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];
        to->tokens_hashes[i] = op->type == KVE_OP_STORE ? op->blocks[i].tokens_hash : 0;
    }
}

/* One answer of the replay service; false: the end. */
static bool read_one(void *dealer, struct kve_reader *reader)
{
    struct kve_span frames[KVE_MAX_FRAMES];
    zmq_msg_t parts[KVE_MAX_FRAMES];
    struct kve_message message;
    struct kve_batch batch;
    size_t n = 0;
    bool more;

    do {
        zmq_msg_init(&parts[n]);
        assert_true(zmq_msg_recv(&parts[n], dealer, 0) >= 0);
        frames[n] = (struct kve_span){zmq_msg_data(&parts[n]), zmq_msg_size(&parts[n])};
        n++;
    } while (zmq_msg_more(&parts[n - 1]));
    assert_int_equal(kve_message_parse_replay(frames, n, &message), 0);
    more = !message.is_end;
    if (more) {
        wire.numbers[wire.n_numbers++] = message.sequence;
        assert_int_equal(
            kve_reader_decode(reader, message.payload.data, message.payload.len, &batch), 0);
        for (size_t i = 0; i < batch.n_ops; i++)
            keep(&batch.ops[i], message.sequence);
        for (size_t i = 0; i < KVE_N_SKIPS; i++)
            wire.skipped[i] += batch.skipped[i];
    }
    while (n)
        zmq_msg_close(&parts[--n]);
    return more;
}

/* All that was published so far into wire.ops. */
static void read_all(void)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = BM_BLOCK};
    struct kve_replay_request request;
    struct kve_reader *reader;
    void *context = zmq_ctx_new(), *dealer = zmq_socket(context, ZMQ_DEALER);
    int timeout = 20000, none = 0;

    assert_int_equal(kvbm_events_flush(wire.events, 60000), 0);
    assert_int_equal(kve_publisher_flush(wire.publisher, 60000), 0);
    wire.n_ops = wire.n_numbers = 0;
    memset(wire.skipped, 0, sizeof(wire.skipped));
    assert_int_equal(kve_reader_create(&opts, &reader), 0);
    zmq_setsockopt(dealer, ZMQ_RCVTIMEO, &timeout, sizeof(timeout));
    zmq_setsockopt(dealer, ZMQ_LINGER, &none, sizeof(none));
    assert_int_equal(zmq_connect(dealer, kve_publisher_replay_endpoint(wire.publisher)), 0);
    kve_replay_request_init(&request, 0);
    assert_true(zmq_send(dealer, "", 0, ZMQ_SNDMORE) == 0);
    assert_true(zmq_send(dealer, request.frames[1].data, request.frames[1].len, 0) == 8);
    while (read_one(dealer, reader))
        ;
    zmq_close(dealer);
    zmq_ctx_term(context);
    kve_reader_destroy(reader);
}

static const struct op *expect(size_t i, enum kve_op_type type, enum kv_tier tier, size_t n)
{
    assert_true(i < wire.n_ops);
    assert_int_equal(wire.ops[i].type, type);
    assert_int_equal(wire.ops[i].n, n);
    assert_int_equal(wire.ops[i].rank, 3);
    if (type != KVE_OP_CLEAR)
        assert_int_equal(wire.ops[i].tier, tier);
    return &wire.ops[i];
}

/* -- with pools -------------------------------------------------------------------------------- */

struct tiers {
    struct bm bm;
    struct kvbm_pool *host;
};

static void open_tiers(struct tiers *t, uint32_t key_len)
{
    struct kvbm_registry_opts opts = {
        .size = sizeof(opts), .events = wire.events, .key_len = key_len};
    struct kvbm_pool_opts host = {.tier = KV_TIER_HOST, .block_size = BM_BLOCK, .groups = 1};
    struct kvbm_pool_opts device = {.block_size = BM_BLOCK, .groups = 1};

    *t = (struct tiers){0};
    assert_int_equal(kvbm_registry_create(&opts, &t->bm.registry), 0);
    t->bm.pool = bm_pool(&t->bm, &device);
    t->host = bm_pool(&t->bm, &host);
}

static void close_tiers(struct tiers *t)
{
    assert_int_equal(kvbm_pool_destroy(t->bm.pool), 0);
    assert_int_equal(kvbm_pool_destroy(t->host), 0);
    assert_int_equal(kvbm_registry_destroy(t->bm.registry), 0);
    assert_int_equal(kvbm_events_destroy(wire.events), 0);
}

/* Register a chain in @pool and let it go. */
static void leave(struct kvbm_pool *pool, const struct kvbm_chain *chain, size_t n)
{
    struct kvbm_mutable blocks[16];
    struct kvbm_complete complete[16];
    struct kvbm_immutable held[16];

    assert_int_equal(kvbm_pool_allocate(pool, n, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_complete(pool, blocks, n, chain, complete), 0);
    assert_int_equal(kvbm_pool_register(pool, complete, n, held), 0);
    assert_int_equal(kvbm_pool_release(pool, held, n), 0);
}

static const uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
static const uint64_t keys[] = {101, 0x8000000000000102, 103};

static uint64_t local(size_t block)
{
    return kve_hash_block(KVE_SEED, tokens + block * BM_BLOCK, BM_BLOCK, NULL, 0);
}

/* A chain is one event, removals of a tier are one, tiers are media. */
static void test_chains(void **state)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct tiers t;
    const struct op *op;

    (void)state;
    open_wire(NULL, NULL, 0);
    open_tiers(&t, 8);
    leave(t.bm.pool, &chain, 3);
    leave(t.host, &chain, 2);
    bm_churn(t.bm.pool, 7);
    read_all();
    assert_int_equal(wire.n_ops, 3);
    op = expect(0, KVE_OP_STORE, KV_TIER_DEVICE, 3);
    assert_false(op->has_parent);
    for (size_t i = 0; i < 3; i++) {
        assert_true(op->hashes[i] == keys[i]);
        assert_true(op->tokens_hashes[i] == local(i));
    }
    expect(1, KVE_OP_STORE, KV_TIER_HOST, 2);
    op = expect(2, KVE_OP_REMOVE, KV_TIER_DEVICE, 3);
    for (size_t i = 0; i < 3; i++)
        assert_true(op->hashes[i] == keys[2 - i]); /* the last of the chain went first */
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(wire.skipped[i], 0);
    close_tiers(&t);
}

/* Blocks that don't follow each other become events of their own: other chains, tiers, tokens. */
static void test_no_chain(void **state)
{
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .keys = &keys[1],
                               .parent = &keys[0],
                               .position = 1,
                               .tokens = tokens + BM_BLOCK};
    struct tiers t;

    (void)state;
    open_wire(NULL, NULL, 0);
    open_tiers(&t, 8);
    leave(t.bm.pool, &chain, 2); /* its parent isn't there, and told all the same */
    bm_leave(t.bm.pool, 200);
    bm_leave(t.bm.pool, 201);
    bm_leave(t.host, 200);
    bm_churn(t.host, 7);
    bm_churn(t.bm.pool, 7);
    read_all();
    assert_int_equal(wire.n_ops, 6);
    expect(0, KVE_OP_STORE, KV_TIER_DEVICE, 2);
    assert_true(wire.ops[0].has_parent && wire.ops[0].parent == keys[0]);
    assert_true(wire.ops[0].tokens_hashes[1] == local(2));
    expect(1, KVE_OP_STORE_KNOWN, KV_TIER_DEVICE, 1);
    expect(2, KVE_OP_STORE_KNOWN, KV_TIER_DEVICE, 1);
    expect(3, KVE_OP_STORE_KNOWN, KV_TIER_HOST, 1);
    expect(4, KVE_OP_REMOVE, KV_TIER_HOST, 1);
    expect(5, KVE_OP_REMOVE, KV_TIER_DEVICE, 4);
    close_tiers(&t);
}

/* Blocks of one chain with and without tokens: an event has them for all its blocks or for none. */
static void test_tokens_of_some(void **state)
{
    static const uint64_t five[] = {301, 302, 303, 304, 305};
    struct tiers t;

    (void)state;
    open_wire(NULL, NULL, 0);
    open_tiers(&t, 8);
    for (uint32_t i = 0; i < 5; i++) {
        bool with = i != 0 && i != 3;
        struct kvbm_chain chain = {.size = sizeof(chain),
                                   .keys = &five[i],
                                   .parent = i ? &five[i - 1] : NULL,
                                   .position = i,
                                   .tokens = with ? tokens : NULL};

        leave(t.bm.pool, &chain, 1);
    }
    read_all();
    assert_true(wire.n_ops >= 4);
    for (size_t i = 0, block = 0; i < wire.n_ops; i++) {
        bool known = block == 0 || block == 3;

        assert_int_equal(wire.ops[i].type, known ? KVE_OP_STORE_KNOWN : KVE_OP_STORE);
        for (size_t k = 0; k < wire.ops[i].n; k++, block++) {
            assert_true(wire.ops[i].hashes[k] == five[block]);
            assert_int_equal(block == 0 || block == 3, known);
            if (!known)
                assert_true(wire.ops[i].tokens_hashes[k] == local(0));
        }
        assert_true(i + 1 < wire.n_ops || block == 5);
    }
    close_tiers(&t);
}

/* Names of a model's adapter and salt, of all events. */
static void test_names(void **state)
{
    struct kvbm_zmq_opts opts = {.lora_name = "lora", .cache_salt = "salt"};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct tiers t;

    (void)state;
    open_wire(NULL, &opts, 0);
    open_tiers(&t, 8);
    leave(t.bm.pool, &chain, 1);
    read_all();
    expect(0, KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_true(wire.ops[0].tokens_hashes[0] ==
                kve_hash_block(kve_seed("lora", 4, "salt", 4), tokens, BM_BLOCK, NULL, 0));
    close_tiers(&t);
}

/* Keys of other lengths: the big-endian number of the last 8 bytes. */
static void test_long_keys(void **state)
{
    static const struct {
        uint32_t len;
        const char *key;
        uint64_t hash;
    } cases[] = {
        {32, "abcdefghijklmnopqrstuvwx\1\2\3\4\5\6\7\10", 0x0102030405060708},
        {9, "x\377\0\0\0\0\0\0\1", 0xff00000000000001},
        {4, "\1\2\3\4", 0x01020304},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = cases[i].key, .tokens = tokens};
        struct tiers t;

        open_wire(NULL, NULL, 0);
        open_tiers(&t, cases[i].len);
        leave(t.bm.pool, &chain, 1);
        bm_churn(t.bm.pool, 7);
        read_all();
        assert_int_equal(wire.n_ops, 2);
        assert_true(expect(0, KVE_OP_STORE, 0, 1)->hashes[0] == cases[i].hash);
        assert_true(expect(1, KVE_OP_REMOVE, 0, 1)->hashes[0] == cases[i].hash);
        close_tiers(&t);
    }
}

/* Other groups say so (readers pass over them); pools with another block size aren't published. */
static void test_groups_and_sizes(void **state)
{
    const uint32_t more[8] = {0};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct kvbm_pool_opts window = {.groups = 2, .block_size = BM_BLOCK};
    struct kvbm_pool_opts other = {.groups = 4, .block_size = 8};
    struct kvbm_pool *pools[2];
    struct tiers t;

    (void)state;
    open_wire(NULL, NULL, 0);
    open_tiers(&t, 8);
    pools[0] = bm_pool(&t.bm, &window);
    pools[1] = bm_pool(&t.bm, &other);
    chain.group = 1;
    leave(pools[0], &chain, 1);
    chain.group = 2;
    chain.tokens = more;
    leave(pools[1], &chain, 1);
    chain.group = 0;
    chain.tokens = tokens;
    leave(t.bm.pool, &chain, 1);
    read_all();
    assert_int_equal(wire.n_ops, 1);
    expect(0, KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_int_equal(wire.skipped[KVE_SKIP_GROUP], 1);
    assert_int_equal(wire.skipped[KVE_SKIP_BLOCK_SIZE], 0);
    for (size_t i = 1; i < wire.n_numbers; i++)
        assert_int_equal(wire.numbers[i], wire.numbers[i - 1] + 1); /* nothing was lost */
    assert_int_equal(kvbm_pool_destroy(pools[0]), 0);
    assert_int_equal(kvbm_pool_destroy(pools[1]), 0);
    close_tiers(&t);
}

/* Consolidated, a block comes to the first tier and leaves from the last: one medium for both. */
static void test_consolidated(void **state)
{
    struct kvbm_zmq_opts opts = {.scope = KVBM_EVENTS_CONSOLIDATED};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct tiers t;

    (void)state;
    open_wire(NULL, &opts, 0);
    open_tiers(&t, 8);
    leave(t.bm.pool, &chain, 2);
    leave(t.host, &chain, 2);
    bm_churn(t.bm.pool, 7);
    read_all();
    assert_int_equal(wire.n_ops, 1);
    bm_churn(t.host, 7);
    read_all();
    assert_int_equal(wire.n_ops, 2);
    expect(0, KVE_OP_STORE, KV_TIER_DEVICE, 2);
    expect(1, KVE_OP_REMOVE, KV_TIER_DEVICE, 2);
    close_tiers(&t);
}

/* Consolidated, a block that its first tier has without tokens is told again with the first tokens that
 * come: an event without tokens tells followers no place. */
static void test_consolidated_places(void **state)
{
    struct kvbm_zmq_opts opts = {.scope = KVBM_EVENTS_CONSOLIDATED};
    struct kvbm_chain bare = {.size = sizeof(bare), .keys = keys};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct tiers t;

    (void)state;
    open_wire(NULL, &opts, 0);
    open_tiers(&t, 8);
    for (size_t round = 0; round < 2; round++) {
        leave(t.host, &bare, 3); /* as a disk's blocks after a restart */
        leave(t.bm.pool, &chain, 2);
        bm_churn(t.bm.pool, 7);
        leave(t.bm.pool, &chain, 3); /* two of them are told already */
        bm_churn(t.host, 7);
        bm_churn(t.bm.pool, 7);
    }
    read_all();
    assert_int_equal(wire.n_ops, 6);
    for (size_t i = 0; i < 6; i += 3) {
        expect(i, KVE_OP_STORE_KNOWN, KV_TIER_DEVICE, 3);
        expect(i + 1, KVE_OP_STORE, KV_TIER_DEVICE, 3); /* each once: one run */
        for (size_t k = 0; k < 3; k++) {
            assert_true(wire.ops[i + 1].hashes[k] == keys[k]);
            assert_true(wire.ops[i + 1].tokens_hashes[k] == local(k));
        }
        expect(i + 2, KVE_OP_REMOVE, KV_TIER_DEVICE, 3);
    }
    close_tiers(&t);
}

/* -- losses ------------------------------------------------------------------------------------ */

/* There is a clear, behind it a gap, and what was published behind that is op @i. */
static void expect_loss_before(size_t i)
{
    assert_true(i > 0);
    expect(i - 1, KVE_OP_CLEAR, 0, 0);
    assert_true(wire.ops[i].sequence >= wire.ops[i - 1].sequence + 2);
}

static void put(uint64_t key, size_t n)
{
    kvbm_events_begin(wire.events);
    for (size_t i = 0; i < n; i++, key++) {
        struct kvbm_event event = {
            .type = i % 2 ? KVBM_EVENT_REMOVED : KVBM_EVENT_STORED, .key_len = 8, .key = &key};

        kvbm_events_put(wire.events, &event);
    }
    kvbm_events_end(wire.events);
}

static void test_lost_in_the_queue(void **state)
{
    struct kve_publisher_stats stats = {.size = sizeof(stats)};

    (void)state;
    open_wire(NULL, NULL, 480);
    put(1, 1);
    read_all();
    assert_int_equal(wire.n_ops, 1);
    put(2, 100);
    read_all(); /* nothing follows, and it is told */
    assert_int_equal(wire.ops[wire.n_ops - 1].type, KVE_OP_CLEAR);
    put(200, 1);
    read_all();
    expect_loss_before(wire.n_ops - 1);
    assert_true(wire.ops[wire.n_ops - 1].hashes[0] == 200);
    kve_publisher_get_stats(wire.publisher, &stats);
    assert_int_equal(stats.dropped_events, 90); /* ten of 48 bytes fit */
    put(300, 50);
    read_all();
    put(400, 17);
    read_all();
    kve_publisher_get_stats(wire.publisher, &stats);
    assert_int_equal(stats.dropped_events, 90 + 40 + 7); /* each loss is told once */
    assert_int_equal(kvbm_events_destroy(wire.events), 0);
}

/* Behind a loss consolidated followers know no block: each comes again with the first tokens, once. Copies
 * of the batch that shows the loss count, too. */
static void test_consolidated_behind_a_loss(void **state)
{
    struct kvbm_zmq_opts opts = {.scope = KVBM_EVENTS_CONSOLIDATED};
    struct kvbm_chain bare = {.size = sizeof(bare), .keys = keys};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct kvbm_pool *disk;
    struct tiers t;
    size_t at;

    (void)state;
    open_wire(NULL, &opts, 2048);
    open_tiers(&t, 8);
    disk = bm_pool(
        &t.bm, &(struct kvbm_pool_opts){.tier = KV_TIER_DISK, .block_size = BM_BLOCK, .groups = 1});
    leave(t.host, &bare, 3);
    leave(disk, &bare, 3);
    read_all();
    assert_int_equal(wire.n_ops, 1);
    put(1000, 100);
    read_all();
    at = wire.n_ops;
    assert_int_equal(wire.ops[at - 1].type, KVE_OP_CLEAR);
    leave(t.bm.pool, &chain, 2); /* three tiers have them, and two tell again */
    read_all();
    bm_churn(t.bm.pool, 7);
    leave(t.bm.pool, &chain, 3);
    read_all();
    assert_int_equal(wire.n_ops, at + 2);
    expect(at, KVE_OP_STORE, KV_TIER_DEVICE, 2);
    expect(at + 1, KVE_OP_STORE, KV_TIER_DEVICE, 1);
    assert_true(wire.ops[at + 1].hashes[0] == keys[2]);
    assert_true(wire.ops[at + 1].has_parent && wire.ops[at + 1].parent == keys[1]);
    bm_churn(t.bm.pool, 7);
    bm_churn(t.host, 7);
    read_all();
    assert_int_equal(wire.n_ops, at + 2); /* the disk has them still */
    bm_churn(disk, 7);
    read_all();
    assert_int_equal(wire.n_ops, at + 3);
    expect(at + 2, KVE_OP_REMOVE, KV_TIER_DEVICE, 3);
    assert_int_equal(kvbm_pool_destroy(disk), 0);
    close_tiers(&t);
}

/* The publisher's own queue is full: the same. */
static void test_lost_at_the_publisher(void **state)
{
    struct kve_publisher_opts opts = publisher_opts();
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    size_t clears = 0;

    (void)state;
    opts.queue_events = 3;
    opts.linger_us = 300 * 1000; /* its thread takes nothing for that long */
    open_wire(&opts, NULL, 0);
    put(1, 100);
    read_all();
    kve_publisher_get_stats(wire.publisher, &stats);
    assert_true(stats.dropped_events > 0);
    /* a clear on one side of each gap, so that nothing from before it is believed behind it */
    for (size_t i = 1; i < wire.n_ops; i++) {
        clears += wire.ops[i].type == KVE_OP_CLEAR;
        if (wire.ops[i].sequence > wire.ops[i - 1].sequence + 1)
            assert_true(wire.ops[i].type == KVE_OP_CLEAR || wire.ops[i - 1].type == KVE_OP_CLEAR);
    }
    assert_true(clears > 0);
    assert_int_equal(kvbm_events_destroy(wire.events), 0);
}

/* -- the end ----------------------------------------------------------------------------------- */

static void test_options(void **state)
{
    struct kve_publisher_opts publisher = publisher_opts();
    struct kvbm_zmq_opts opts = {.size = sizeof(opts), .publisher = &publisher};
    struct kvbm_events *events;

    (void)state;
    assert_int_equal(kvbm_events_create(NULL, &events), 0);
    assert_int_equal(kvbm_events_add_zmq(events, &opts, NULL), -EINVAL); /* block_size */
    opts.block_size = 4;
    opts.publisher = NULL;
    assert_int_equal(kvbm_events_add_zmq(events, &opts, NULL), -EINVAL);
    opts.publisher = &publisher;
    assert_int_equal(kvbm_events_add_zmq(NULL, &opts, NULL), -EINVAL);
    assert_int_equal(kvbm_events_add_zmq(events, NULL, NULL), -EINVAL);
    opts.lora_name = "caf\xe9"; /* Latin-1 */
    assert_int_equal(kvbm_events_add_zmq(events, &opts, NULL), -EINVAL);
    opts.lora_name = "caf\xc3\xa9";
    opts.cache_salt = "cut short \xe2\x82";
    assert_int_equal(kvbm_events_add_zmq(events, &opts, NULL), -EINVAL);
    opts.cache_salt = "\xe2\x82\xac";
    assert_true(kvbm_events_add_zmq(events, &opts, NULL) > 0);
    publisher.endpoint = "nonsense";
    assert_true(kvbm_events_add_zmq(events, &opts, NULL) < 0);
    publisher.endpoint = "tcp://127.0.0.1:*";
    for (int i = 0; i < 15; i++)
        assert_true(kvbm_events_add_callback(events, 0, bm_record, NULL) > 0);
    assert_int_equal(kvbm_events_add_zmq(events, &opts, NULL), -ENOSPC);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chains),
        cmocka_unit_test(test_no_chain),
        cmocka_unit_test(test_tokens_of_some),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_long_keys),
        cmocka_unit_test(test_groups_and_sizes),
        cmocka_unit_test(test_consolidated),
        cmocka_unit_test(test_consolidated_places),
        cmocka_unit_test(test_lost_in_the_queue),
        cmocka_unit_test(test_consolidated_behind_a_loss),
        cmocka_unit_test(test_lost_at_the_publisher),
        cmocka_unit_test(test_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
