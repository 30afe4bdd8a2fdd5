// SPDX-License-Identifier: Apache-2.0
/*
 * The publisher against plain ZMQ sockets and our own reader. `test-event-publisher serve ENCODING
 * FRAMING` is an engine for tests/e2e/test_publisher.py: it publishes a batch for every line of its
 * input.
 */
#include "base/unit.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "event/wire/frames.h"
#include "kv_event.h"

#define SECONDS 20 /* to wait for anything */

/* -- sockets ----------------------------------------------------------------------------------- */

struct received {
    zmq_msg_t parts[KVE_MAX_FRAMES];
    struct kve_span frames[KVE_MAX_FRAMES];
    size_t n;
};

static void *context;
static int n_sockets; /* open ones: ending the context would wait for them for ever */

static void close_socket(void *socket)
{
    zmq_close(socket);
    n_sockets--;
}

static void *open_socket(int type, const char *endpoint, bool bind)
{
    int timeout = SECONDS * 1000, none = 0;
    void *socket = zmq_socket(context, type);

    assert_non_null(socket);
    n_sockets++;
    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof(timeout));
    zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof(none));
    zmq_setsockopt(socket, ZMQ_RCVHWM, &none, sizeof(none));
    if (type == ZMQ_SUB)
        zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0);
    assert_int_equal((bind ? zmq_bind : zmq_connect)(socket, endpoint), 0);
    return socket;
}

static bool receive_within(void *socket, struct received *ret, long ms)
{
    zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};

    ret->n = 0;
    if (zmq_poll(&item, 1, ms) <= 0)
        return false;
    do {
        zmq_msg_t *part = &ret->parts[ret->n];

        assert_true(ret->n < KVE_MAX_FRAMES);
        zmq_msg_init(part);
        assert_true(zmq_msg_recv(part, socket, 0) >= 0);
        ret->frames[ret->n++] = (struct kve_span){zmq_msg_data(part), zmq_msg_size(part)};
    } while (zmq_msg_more(&ret->parts[ret->n - 1]));
    return true;
}

static void receive(void *socket, struct received *ret)
{
    assert_true(receive_within(socket, ret, SECONDS * 1000));
}

static void release(struct received *received)
{
    while (received->n)
        zmq_msg_close(&received->parts[--received->n]);
}

/* The next live message; @ret_message points into @received. */
static void receive_live(void *socket, struct received *received, struct kve_message *ret_message)
{
    receive(socket, received);
    assert_int_equal(kve_message_parse_live(received->frames, received->n, ret_message), 0);
}

static void request_replay(void *dealer, uint64_t start)
{
    struct kve_replay_request request;

    kve_replay_request_init(&request, start);
    assert_true(zmq_send(dealer, "", 0, ZMQ_SNDMORE) == 0);
    assert_true(zmq_send(dealer, request.frames[1].data, request.frames[1].len, 0) == 8);
}

/* -- publishers -------------------------------------------------------------------------------- */

static struct kve_publisher_opts default_opts(void)
{
    return (struct kve_publisher_opts){.size = sizeof(struct kve_publisher_opts),
                                       .endpoint = "tcp://127.0.0.1:*",
                                       .replay_endpoint = "tcp://127.0.0.1:*"};
}

static struct kve_publisher *make_publisher(const struct kve_publisher_opts *opts)
{
    struct kve_publisher *publisher;

    assert_int_equal(kve_publisher_create(opts, &publisher), 0);
    return publisher;
}

static struct kve_event removed(const uint64_t *hashes, size_t n)
{
    return (struct kve_event){.size = sizeof(struct kve_event),
                              .type = KVE_REMOVED,
                              .hashes = hashes,
                              .n_hashes = n,
                              .group = -1};
}

static void publish_hash(struct kve_publisher *publisher, uint64_t hash)
{
    struct kve_event event = removed(&hash, 1);

    assert_int_equal(kve_publisher_publish(publisher, &event, 1), 0);
}

/* One batch with one event. */
static void publish_batch(struct kve_publisher *publisher, uint64_t hash)
{
    publish_hash(publisher, hash);
    assert_int_equal(kve_publisher_flush(publisher, SECONDS * 1000), 0);
}

static struct kve_reader *make_reader(void)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 4};
    struct kve_reader *reader;

    assert_int_equal(kve_reader_create(&opts, &reader), 0);
    return reader;
}

static struct kve_batch decode(struct kve_reader *reader, struct kve_span payload)
{
    struct kve_batch batch;

    assert_int_equal(kve_reader_decode(reader, payload.data, payload.len, &batch), 0);
    for (int i = 0; i < KVE_N_SKIPS; i++)
        assert_int_equal(batch.skipped[i], 0);
    return batch;
}

static uint64_t first_hash(struct kve_reader *reader, struct kve_span payload)
{
    struct kve_batch batch = decode(reader, payload);

    assert_true(batch.n_ops >= 1);
    return batch.ops[0].hashes[0];
}

/* Publish until the subscriber hears it: from then on nothing is missed. Reads to the last batch,
 * however late it arrives, and returns its sequence. Nothing may have been dropped before. */
static uint64_t join(struct kve_publisher *publisher, void *sub, uint64_t first_sequence)
{
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct received received;
    struct kve_message message = {0};
    uint64_t last;
    bool any = false;

    for (int i = 0; i < SECONDS * 100 && !any; i++) {
        publish_batch(publisher, 0);
        any = receive_within(sub, &received, 10);
    }
    assert_true(any);
    kve_publisher_get_stats(publisher, &stats);
    last = first_sequence + stats.batches - 1;
    for (;;) {
        assert_int_equal(kve_message_parse_live(received.frames, received.n, &message), 0);
        release(&received);
        if (message.sequence == last)
            return last;
        receive(sub, &received);
    }
}

/* -- live -------------------------------------------------------------------------------------- */

static void check_all_kinds(struct kve_batch batch, const uint32_t *tokens)
{
    const struct kve_op *ops = batch.ops;

    assert_true(batch.has_rank);
    assert_int_equal(batch.rank, 3);
    assert_true(batch.timestamp > 1.6e9 && batch.timestamp < 4e9);
    assert_int_equal(batch.n_ops, 6);
    assert_int_equal(ops[0].type, KVE_OP_STORE);
    assert_int_equal(ops[0].n, 2);
    assert_false(ops[0].has_parent);
    assert_true(ops[0].blocks[0].hash == 1 && ops[0].blocks[1].hash == UINT64_MAX);
    assert_true(ops[0].blocks[1].tokens_hash ==
                kve_hash_block(kve_seed("lora", 4, "salt", 4), tokens + 4, 4, NULL, 0));
    /* The child says no salt: its parent's is remembered. */
    assert_int_equal(ops[1].type, KVE_OP_STORE);
    assert_true(ops[1].has_parent && ops[1].parent == UINT64_MAX);
    assert_int_equal(ops[1].tier, KV_TIER_DEVICE);
    assert_true(ops[1].blocks[0].tokens_hash ==
                kve_hash_block(kve_seed("lora", 4, "salt", 4), tokens, 4, NULL, 0));
    assert_int_equal(ops[2].type, KVE_OP_STORE_KNOWN);
    assert_int_equal(ops[2].tier, KV_TIER_HOST);
    assert_int_equal(ops[2].n, 2);
    assert_int_equal(ops[3].type, KVE_OP_REMOVE);
    assert_int_equal(ops[3].tier, KV_TIER_EXTERNAL);
    assert_int_equal(ops[4].type, KVE_OP_REMOVE);
    assert_int_equal(ops[4].tier, KV_TIER_DISK);
    assert_int_equal(ops[5].type, KVE_OP_CLEAR);
    assert_int_equal(ops[5].rank, 3);
}

static void publish_all_kinds(struct kve_publisher *publisher, const uint32_t *tokens)
{
    static const uint64_t hashes[] = {1, UINT64_MAX}, child = 77;
    struct kve_event events[6];

    for (int i = 0; i < 6; i++)
        events[i] = removed(hashes, 2);
    events[0].type = events[1].type = events[2].type = KVE_STORED;
    events[0].tokens = tokens;
    events[0].n_tokens = 8;
    events[0].block_size = events[1].block_size = events[2].block_size = 4;
    events[0].lora_name = events[1].lora_name = "lora";
    events[0].cache_salt = "salt";
    events[0].group = 0;
    events[1].hashes = &child;
    events[1].n_hashes = 1;
    events[1].tokens = tokens;
    events[1].n_tokens = 4;
    events[1].parent = &hashes[1];
    events[2].tier = KV_TIER_HOST;
    events[3].tier = KV_TIER_EXTERNAL;
    events[4].tier = KV_TIER_DISK;
    events[4].group = 0;
    events[5].type = KVE_CLEARED;
    assert_int_equal(kve_publisher_publish(publisher, events, 6), 0);
}

static void check_live(enum kve_encoding encoding)
{
    static const uint32_t tokens[] = {1, 200, 70000, UINT32_MAX, 5, 6, 7, 8};
    struct kve_publisher_opts opts = default_opts();
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;
    struct kve_reader *reader = make_reader();
    struct kve_message message;
    struct received received;
    uint64_t heard;
    void *sub;

    opts.encoding = encoding;
    opts.rank = 3;
    opts.topic = "kv-events";
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    heard = join(publisher, sub, 0);
    publish_all_kinds(publisher, tokens);
    receive_live(sub, &received, &message);
    assert_true(message.sequence == heard + 1);
    assert_int_equal(message.topic.len, 9);
    check_all_kinds(decode(reader, message.payload), tokens);
    release(&received);
    assert_int_equal(kve_publisher_flush(publisher, 10000), 0); /* then the counters are current */
    kve_publisher_get_stats(publisher, &stats);
    assert_true(stats.batches == heard + 2);
    assert_true(stats.events == heard + 1 + 6);
    assert_true(stats.dropped_events == 0);
    close_socket(sub);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

static void test_live_maps(void **state)
{
    (void)state;
    check_live(KVE_ENCODING_MAP);
}

static void test_live_arrays(void **state)
{
    (void)state;
    check_live(KVE_ENCODING_ARRAY);
}

/* The indexer binds, engines connect to it. */
static void test_connect(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_publisher *publisher;
    char endpoint[256];
    size_t len = sizeof(endpoint);
    void *sub = open_socket(ZMQ_SUB, "tcp://127.0.0.1:*", true);

    (void)state;
    assert_int_equal(zmq_getsockopt(sub, ZMQ_LAST_ENDPOINT, endpoint, &len), 0);
    opts.endpoint = endpoint;
    opts.connect = true;
    opts.first_sequence = 1000;
    publisher = make_publisher(&opts);
    assert_true(join(publisher, sub, opts.first_sequence) >= 1000);
    kve_publisher_destroy(publisher);
    close_socket(sub);
}

static void test_batch_limit_and_linger(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher *publisher;
    struct received received;
    struct kve_message message;
    uint64_t started;
    void *sub;

    (void)state;
    opts.batch_events = 4;
    opts.linger_us = 60000000;
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    join(publisher, sub, 0); /* which flushes, and so doesn't linger */
    started = kv_now_ns();
    for (uint64_t i = 0; i < 4; i++) /* full: sent at once */
        publish_hash(publisher, i);
    receive_live(sub, &received, &message);
    assert_int_equal(decode(reader, message.payload).n_events, 4);
    release(&received);
    assert_true(kv_now_ns() - started < 59 * KV_NS_PER_S);
    kve_publisher_destroy(publisher);
    close_socket(sub);

    opts.linger_us = 3000000;
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    join(publisher, sub, 0);
    started = kv_now_ns();
    publish_hash(publisher, 7); /* alone: waits for company */
    publish_hash(publisher, 8);
    receive_live(sub, &received, &message);
    assert_true(kv_now_ns() - started > 2900 * KV_NS_PER_MS);
    assert_int_equal(decode(reader, message.payload).n_events, 2);
    release(&received);
    publish_hash(publisher, 9); /* what is left when the publisher ends is sent */
    kve_publisher_destroy(publisher);
    receive_live(sub, &received, &message);
    assert_true(first_hash(reader, message.payload) == 9);
    release(&received);
    close_socket(sub);
    kve_reader_destroy(reader);
}

static struct kve_event stored(const uint64_t *hash, const uint32_t *tokens, uint32_t n)
{
    struct kve_event event = removed(hash, 1);

    event.type = KVE_STORED;
    event.tokens = tokens;
    event.n_tokens = event.block_size = n;
    return event;
}

/* However large events are, a batch stays below what subscribers accept. */
static void test_batch_bytes(void **state)
{
    enum { TOKENS = 300000, EVENTS = 9 }; /* of 1.5 MB each */
    struct kve_publisher_opts opts = default_opts();
    uint32_t *tokens = calloc(TOKENS, sizeof(*tokens));
    struct kve_reader_opts reader_opts = {.size = sizeof(reader_opts), .block_size = TOKENS};
    struct kve_reader *reader;
    struct kve_event events[EVENTS];
    static const uint64_t hash = 1;
    struct kve_publisher *publisher;
    struct kve_message message;
    struct received received;
    uint64_t heard;
    void *sub;

    (void)state;
    assert_non_null(tokens);
    memset(tokens, 0xff, TOKENS * sizeof(*tokens));
    assert_int_equal(kve_reader_create(&reader_opts, &reader), 0);
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    heard = join(publisher, sub, 0);
    for (size_t i = 0; i < EVENTS; i++)
        events[i] = stored(&hash, tokens, TOKENS);
    assert_int_equal(kve_publisher_publish(publisher, events, EVENTS), 0);
    for (size_t left = EVENTS; left;) {
        receive_live(sub, &received, &message);
        assert_true(message.sequence == ++heard);
        assert_true(message.payload.len <= 5 << 20);
        left -= decode(reader, message.payload).n_ops;
        release(&received);
    }
    close_socket(sub);
    free(tokens);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

/* Events that don't fit the queue are dropped and leave a gap in the sequence numbers. */
static void test_drop_is_a_gap(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    static const uint64_t hashes[11] = {1};
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;
    struct kve_event events[11];
    struct kve_message message;
    struct received received;
    uint64_t heard;
    void *sub;

    (void)state;
    opts.queue_events = 10;
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    heard = join(publisher, sub, 0);
    for (int i = 0; i < 11; i++)
        events[i] = removed(hashes, 1);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(kve_publisher_publish(publisher, events, 11), -EAGAIN);
        assert_int_equal(kve_publisher_publish(publisher, events, 10), 0);
        receive_live(sub, &received, &message);
        assert_true(message.sequence == heard + 2);
        heard = message.sequence;
        release(&received);
        assert_int_equal(kve_publisher_flush(publisher, SECONDS * 1000), 0);
    }
    kve_publisher_get_stats(publisher, &stats);
    assert_true(stats.dropped_events == 33);
    close_socket(sub);
    kve_publisher_destroy(publisher);
}

/* Told of events that were lost before they came, it leaves a gap as for its own. */
static void test_lost_is_a_gap(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;
    struct kve_message message;
    struct received received;
    uint64_t heard;
    void *sub;

    (void)state;
    publisher = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    heard = join(publisher, sub, 0);
    assert_int_equal(kve_publisher_lost(publisher, 0), 0); /* nothing: no gap */
    for (uint64_t round = 0; round < 4; round++) {
        publish_batch(publisher, 10 + round);
        receive_live(sub, &received, &message);
        assert_true(message.sequence == heard + (round ? 2 : 1));
        assert_true(first_hash(reader, message.payload) == 10 + round);
        heard = message.sequence;
        release(&received);
        assert_int_equal(kve_publisher_lost(publisher, 5), 0);
        if (round == 1)
            usleep(50 * 1000); /* the thread has seen it, and waits for what follows */
    }
    /* in one queue with what is around it, one after the other: one number */
    assert_int_equal(kve_publisher_flush(publisher, SECONDS * 1000), 0);
    publish_batch(publisher, 20);
    receive_live(sub, &received, &message);
    assert_true(message.sequence == heard + 2);
    release(&received);
    kve_publisher_get_stats(publisher, &stats);
    assert_true(stats.dropped_events == 20);
    assert_int_equal(kve_publisher_lost(NULL, 1), -EINVAL);
    close_socket(sub);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* takes 256 MiB */
/* The queue is bounded in bytes too, within one call and for what follows. */
static void test_queue_bytes(void **state)
{
    enum { TOKENS = 4 << 20, EVENTS = 20 }; /* of 20 MB each */
    struct kve_publisher_opts opts = default_opts();
    uint32_t *tokens = calloc(TOKENS, sizeof(*tokens));
    struct kve_event events[EVENTS];
    static const uint64_t hash = 1;
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;

    (void)state;
    assert_non_null(tokens);
    memset(tokens, 0xff, TOKENS * sizeof(*tokens));
    publisher = make_publisher(&opts);
    for (size_t i = 0; i < EVENTS; i++)
        events[i] = stored(&hash, tokens, TOKENS);
    assert_int_equal(kve_publisher_publish(publisher, events, EVENTS), -EAGAIN);
    assert_int_equal(kve_publisher_publish(publisher, events, 2), 0);
    assert_int_equal(kve_publisher_flush(publisher, SECONDS * 1000), 0);
    kve_publisher_get_stats(publisher, &stats);
    assert_true(stats.dropped_events == EVENTS);
    assert_true(stats.events == 2 && stats.batches == 2);
    free(tokens);
    kve_publisher_destroy(publisher);
}
#endif

/* -- replay ------------------------------------------------------------------------------------ */

/* Reads one replay to its end. Returns the number of batches; @first is the sequence it must start
 * at. */
static size_t read_replay(void *dealer, struct kve_reader *reader, size_t n_frames, uint64_t first)
{
    for (size_t n = 0;; n++) {
        struct received received;
        struct kve_message message;
        bool is_end;

        receive(dealer, &received);
        assert_int_equal(received.n, n_frames);
        assert_int_equal(received.frames[0].len, 0);
        assert_int_equal(kve_message_parse_replay(received.frames, received.n, &message), 0);
        is_end = message.is_end;
        if (is_end) {
            for (size_t i = 0; i + 2 < n_frames; i++)
                assert_int_equal(received.frames[i].len, 0);
        } else {
            assert_true(message.sequence == first + n);
            assert_int_equal(message.topic.len, n_frames == 4 ? 5 : 0);
            assert_true(first_hash(reader, message.payload) == message.sequence);
        }
        release(&received);
        if (is_end)
            return n;
    }
}

static void check_replay(enum kve_replay_framing framing)
{
    size_t n_frames = framing == KVE_REPLAY_WITH_TOPIC ? 4 : 3;
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;
    void *dealer;

    opts.replay_framing = framing;
    opts.topic = "topic";
    opts.buffer_batches = 100;
    publisher = make_publisher(&opts);
    dealer = open_socket(ZMQ_DEALER, kve_publisher_replay_endpoint(publisher), false);
    request_replay(dealer, 0);
    assert_int_equal(read_replay(dealer, reader, n_frames, 0), 0);
    for (uint64_t i = 0; i < 150; i++)
        publish_batch(publisher, i);
    request_replay(dealer, 140);
    assert_int_equal(read_replay(dealer, reader, n_frames, 140), 10);
    request_replay(dealer, 0); /* older than what is kept */
    assert_int_equal(read_replay(dealer, reader, n_frames, 50), 100);
    request_replay(dealer, 150);
    assert_int_equal(read_replay(dealer, reader, n_frames, 150), 0);
    request_replay(dealer, UINT64_MAX);
    assert_int_equal(read_replay(dealer, reader, n_frames, 0), 0);
    /* The counters are as of the thread's next turn. */
    for (int i = 0; i < 100; i++) {
        publish_batch(publisher, 0);
        kve_publisher_get_stats(publisher, &stats);
    }
    assert_true(stats.replay_requests == 5);
    assert_true(stats.replayed_batches == 110);
    close_socket(dealer);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

static void test_replay_with_topic(void **state)
{
    (void)state;
    check_replay(KVE_REPLAY_WITH_TOPIC);
}

static void test_replay_without_topic(void **state)
{
    (void)state;
    check_replay(KVE_REPLAY_WITHOUT_TOPIC);
}

static void test_replay_kept_bytes(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher *publisher;
    void *dealer;

    (void)state;
    opts.buffer_bytes = 1;
    opts.topic = "topic";
    publisher = make_publisher(&opts);
    dealer = open_socket(ZMQ_DEALER, kve_publisher_replay_endpoint(publisher), false);
    for (uint64_t i = 0; i < 5; i++)
        publish_batch(publisher, i);
    request_replay(dealer, 0);
    assert_int_equal(read_replay(dealer, reader, 4, 4), 1);
    close_socket(dealer);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

/* Requests that are none are passed over; the next good one is served. */
static void test_bad_requests(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher *publisher;
    struct received received;
    void *dealer;

    (void)state;
    opts.topic = "topic";
    publisher = make_publisher(&opts);
    dealer = open_socket(ZMQ_DEALER, kve_publisher_replay_endpoint(publisher), false);
    publish_batch(publisher, 0);
    zmq_send(dealer, "", 0, 0);
    zmq_send(dealer, "12345678", 8, 0);
    zmq_send(dealer, "x", 1, ZMQ_SNDMORE);
    zmq_send(dealer, "12345678", 8, 0);
    zmq_send(dealer, "", 0, ZMQ_SNDMORE);
    zmq_send(dealer, "1234567", 7, 0);
    zmq_send(dealer, "", 0, ZMQ_SNDMORE);
    zmq_send(dealer, "12345678", 8, ZMQ_SNDMORE);
    zmq_send(dealer, "more", 4, 0);
    assert_false(receive_within(dealer, &received, 200));
    request_replay(dealer, 0);
    assert_int_equal(read_replay(dealer, reader, 4, 0), 1);
    close_socket(dealer);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

/* A client that asks for everything and reads nothing holds nobody up, and gets it all in the end.
 */
static void test_slow_replay_client(void **state)
{
    enum { BATCHES = 4000, WORDS = 2000 };
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    struct kve_publisher *publisher;
    uint64_t *hashes = calloc(WORDS, sizeof(*hashes)), sent;
    struct kve_message message;
    struct received received;
    void *dealer, *sub;
    int hwm = 1;

    (void)state;
    assert_non_null(hashes);
    opts.topic = "topic";
    publisher = make_publisher(&opts);
    for (uint64_t i = 0; i < BATCHES; i++) {
        struct kve_event event = removed(hashes, WORDS);

        memset(hashes, 0xff, WORDS * sizeof(*hashes));
        hashes[0] = i;
        assert_int_equal(kve_publisher_publish(publisher, &event, 1), 0);
        assert_int_equal(kve_publisher_flush(publisher, SECONDS * 1000), 0);
    }
    dealer = zmq_socket(context, ZMQ_DEALER);
    assert_non_null(dealer);
    n_sockets++;
    zmq_setsockopt(dealer, ZMQ_RCVHWM, &hwm, sizeof(hwm));
    hwm = 0;
    zmq_setsockopt(dealer, ZMQ_LINGER, &hwm, sizeof(hwm));
    assert_int_equal(zmq_connect(dealer, kve_publisher_replay_endpoint(publisher)), 0);
    request_replay(dealer, 0);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(publisher), false);
    sent = join(publisher, sub, 0);
    for (int i = 0; i < 50; i++) {
        uint64_t before = kv_now_ns();

        publish_hash(publisher, 1);
        receive_live(sub, &received, &message);
        assert_true(message.sequence == ++sent);
        release(&received);
        assert_true(kv_now_ns() - before < SECONDS / 2 * KV_NS_PER_S);
    }
    for (uint64_t i = 0; i < BATCHES; i++) {
        receive(dealer, &received);
        assert_int_equal(kve_message_parse_replay(received.frames, received.n, &message), 0);
        assert_true(message.sequence == i);
        release(&received);
    }
    close_socket(dealer);
    close_socket(sub);
    free(hashes);
    kve_reader_destroy(reader);
    kve_publisher_destroy(publisher);
}

/* -- threads ----------------------------------------------------------------------------------- */

enum { THREADS = 4, PER_THREAD = 2000 };
static struct kve_publisher *shared;

static void *publish_many(void *arg)
{
    uint64_t base = (uint64_t)(uintptr_t)arg << 32;

    for (uint64_t i = 0; i < PER_THREAD; i++) {
        uint64_t hash = base | i;
        struct kve_event event = removed(&hash, 1);
        struct kve_publisher_stats stats = {.size = sizeof(stats)};

        while (kve_publisher_publish(shared, &event, 1) == -EAGAIN)
            kve_publisher_flush(shared, 1000);
        if (i % 100 == 0)
            kve_publisher_get_stats(shared, &stats);
    }
    return NULL;
}

/* Everything arrives, in each thread's order, in batches numbered without a gap. */
static void test_many_threads(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_reader *reader = make_reader();
    uint64_t next[THREADS] = {0}, sequence, left = THREADS * PER_THREAD;
    pthread_t threads[THREADS];
    void *sub;

    (void)state;
    shared = make_publisher(&opts);
    sub = open_socket(ZMQ_SUB, kve_publisher_endpoint(shared), false);
    sequence = join(shared, sub, 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, publish_many, (void *)i), 0);
    while (left) {
        struct received received;
        struct kve_message message;
        struct kve_batch batch;

        receive_live(sub, &received, &message);
        assert_true(message.sequence == ++sequence);
        batch = decode(reader, message.payload);
        for (size_t i = 0; i < batch.n_ops; i++, left--) {
            uint64_t hash = batch.ops[i].hashes[0];

            assert_true(hash >> 32 < THREADS);
            assert_true((hash & UINT32_MAX) == next[hash >> 32]++);
        }
        release(&received);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    close_socket(sub);
    kve_reader_destroy(reader);
    kve_publisher_destroy(shared);
}

/* -- errors ------------------------------------------------------------------------------------ */

static void test_bad_options(void **state)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_publisher *publisher = make_publisher(&opts), *other;

    (void)state;
    opts.endpoint = kve_publisher_endpoint(publisher);
    assert_int_equal(kve_publisher_create(&opts, &other), -EADDRINUSE);
    opts = default_opts();
    opts.replay_endpoint = kve_publisher_replay_endpoint(publisher);
    assert_int_equal(kve_publisher_create(&opts, &other), -EADDRINUSE);
    opts = default_opts();
    opts.endpoint = NULL;
    assert_int_equal(kve_publisher_create(&opts, &other), -EINVAL);
    assert_int_equal(kve_publisher_create(NULL, &other), -EINVAL);
    opts.endpoint = "nonsense";
    assert_true(kve_publisher_create(&opts, &other) < 0);
    opts = default_opts();
    opts.replay_endpoint = NULL;
    assert_int_equal(kve_publisher_create(&opts, &other), 0);
    assert_null(kve_publisher_replay_endpoint(other));
    kve_publisher_destroy(other);
    kve_publisher_destroy(publisher);
    kve_publisher_destroy(NULL);
}

static void test_bad_events(void **state)
{
    static const uint64_t hashes[] = {1, 2};
    static const uint32_t tokens[8] = {0};
    struct kve_publisher_opts opts = default_opts();
    struct kve_publisher *publisher = make_publisher(&opts);
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_event good = removed(hashes, 2), bad[10];

    (void)state;
    for (size_t i = 0; i < 10; i++)
        bad[i] = good;
    bad[8].n_hashes = bad[9].n_hashes = (4u << 20) + 1; /* more than readers take */
    bad[9].type = KVE_STORED;
    bad[0].size = 8;
    bad[1].tier = KV_N_TIERS;
    bad[2].hashes = NULL;
    bad[3].group = -2;
    for (size_t i = 4; i < 8; i++) {
        bad[i].type = KVE_STORED;
        bad[i].tokens = tokens;
        bad[i].n_tokens = 8;
        bad[i].block_size = 4;
    }
    bad[4].n_tokens = 7;
    bad[5].block_size = 0;
    bad[6].tokens = NULL;
    bad[7].block_size = 2;
    for (size_t i = 0; i < 10; i++) {
        struct kve_event pair[2] = {good, bad[i]};

        assert_int_equal(kve_publisher_publish(publisher, &bad[i], 1), -EINVAL);
        assert_int_equal(kve_publisher_publish(publisher, pair, 2), -EINVAL);
    }
    assert_int_equal(kve_publisher_publish(publisher, NULL, 0), 0);
    assert_int_equal(kve_publisher_flush(publisher, 1000), 0);
    kve_publisher_get_stats(publisher, &stats);
    assert_true(stats.events == 0 && stats.batches == 0);
    kve_publisher_destroy(publisher);
}

/* -- an engine for the Python test ------------------------------------------------------------- */

static int serve(const char *encoding, const char *framing)
{
    struct kve_publisher_opts opts = default_opts();
    struct kve_publisher *publisher;
    uint32_t tokens[8];
    char line[16];

    opts.encoding = strcmp(encoding, "array") == 0 ? KVE_ENCODING_ARRAY : KVE_ENCODING_MAP;
    opts.replay_framing =
        strcmp(framing, "plain") == 0 ? KVE_REPLAY_WITHOUT_TOPIC : KVE_REPLAY_WITH_TOPIC;
    opts.topic = "kv-events";
    opts.rank = 2;
    if (kve_publisher_create(&opts, &publisher) < 0)
        return 1;
    printf("%s %s\n", kve_publisher_endpoint(publisher), kve_publisher_replay_endpoint(publisher));
    fflush(stdout);
    for (uint64_t i = 0; fgets(line, sizeof(line), stdin); i++) {
        uint64_t hashes[] = {UINT64_MAX - 2 * i, UINT64_MAX - 2 * i - 1},
                 parent = UINT64_MAX - 2 * i + 1;
        struct kve_event events[3] = {removed(hashes, 2), removed(hashes, 1), removed(hashes, 1)};

        for (uint32_t t = 0; t < 8; t++)
            tokens[t] = 1000u * (uint32_t)i + 40000u * t;
        events[0].type = KVE_STORED;
        events[0].tokens = tokens;
        events[0].n_tokens = 8;
        events[0].block_size = 4;
        events[0].parent = i ? &parent : NULL;
        events[0].lora_name = i % 2 ? "lora" : NULL;
        events[0].cache_salt = i % 3 ? NULL : "salt";
        events[1].tier = KV_TIER_HOST;
        events[2].type = KVE_CLEARED;
        if (kve_publisher_publish(publisher, events, 3) < 0 ||
            kve_publisher_flush(publisher, 10000) < 0)
            return 1;
        printf("%" PRIu64 "\n", i);
        fflush(stdout);
    }
    kve_publisher_destroy(publisher);
    return 0;
}

static int set_up(void **state)
{
    (void)state;
    context = zmq_ctx_new();
    return context ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    /* A test that failed has left its sockets open. */
    if (!n_sockets)
        zmq_ctx_term(context);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_live_maps),
        cmocka_unit_test(test_live_arrays),
        cmocka_unit_test(test_connect),
        cmocka_unit_test(test_batch_limit_and_linger),
        cmocka_unit_test(test_batch_bytes),
        cmocka_unit_test(test_drop_is_a_gap),
        cmocka_unit_test(test_lost_is_a_gap),
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(test_queue_bytes),
#endif
        cmocka_unit_test(test_replay_with_topic),
        cmocka_unit_test(test_replay_without_topic),
        cmocka_unit_test(test_replay_kept_bytes),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_slow_replay_client),
        cmocka_unit_test(test_many_threads),
        cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_bad_events),
    };

    if (argc == 4 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2], argv[3]);
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
