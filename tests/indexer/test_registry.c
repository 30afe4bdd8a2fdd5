// SPDX-License-Identifier: Apache-2.0
/* The registry with real sockets: an engine (PUB and ROUTER) in the same process, driven step by
 * step, and the index's answers. test_stream.c tests the rules of a stream; this test checks that
 * sockets, threads and tables apply them. */
#include "support.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/json/msgpack.h"
#include "base/thread/thread.h"
#include "event/wire/frames.h"
#include "indexer/model/lookup.h"
#include "indexer/model/model.h"
#include "indexer/registry/registry.h"
#include "indexer/replica/dump_copy.h"
#include "indexer/stream/listener.h"
#include "indexer/zmq/socket.h"

#define BLOCK_SIZE 4
#define MODEL "m"
#define TENANT "default"
#define RING 4096

/* -- an engine --------------------------------------------------------------------------------- */

struct engine {
    void *zmq, *pub, *router;
    char endpoint[128], replay_endpoint[128];
    uint64_t seq, time;
    bool with_topic;
    struct {
        uint64_t seq;
        char *data;
        size_t len;
    } ring[RING];
    size_t kept;
};

static void bind_any(void *socket, char *ret, size_t size)
{
    int linger = 0;

    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger));
    assert_int_equal(zmq_bind(socket, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, ret, &size), 0);
}

static void engine_open(struct engine *e, bool with_topic)
{
    memset(e, 0, sizeof(*e));
    e->with_topic = with_topic;
    e->time = 1000;
    e->zmq = zmq_ctx_new();
    e->pub = zmq_socket(e->zmq, ZMQ_XPUB);
    e->router = zmq_socket(e->zmq, ZMQ_ROUTER);
    zmq_setsockopt(e->pub, ZMQ_SNDHWM, &(int){0}, sizeof(int)); /* nothing is dropped here */
    zmq_setsockopt(e->pub, ZMQ_XPUB_VERBOSER, &(int){1},
                   sizeof(int)); /* each one's coming and going */
    bind_any(e->pub, e->endpoint, sizeof(e->endpoint));
    bind_any(e->router, e->replay_endpoint, sizeof(e->replay_endpoint));
}

static void engine_forget(struct engine *e)
{
    for (size_t i = 0; i < e->kept; i++)
        free(e->ring[i].data);
    e->kept = 0;
}

static void engine_close(struct engine *e)
{
    engine_forget(e);
    zmq_close(e->pub);
    zmq_close(e->router);
    zmq_ctx_term(e->zmq);
}

/* Until one more has subscribed (1): nothing is lost to slow joining from now on; or has gone (0). */
static void engine_wait_change(struct engine *e, char change)
{
    char byte = !change;

    zmq_setsockopt(e->pub, ZMQ_RCVTIMEO, &(int){60000}, sizeof(int));
    while (byte != change)
        assert_int_equal(zmq_recv(e->pub, &byte, 1, 0), 1);
}

static void engine_wait_subscriber(struct engine *e)
{
    engine_wait_change(e, 1);
}

/* A prompt is a chain of blocks whose tokens and hashes follow from its number. */
static uint64_t hash_of(uint64_t prompt, uint64_t block)
{
    return prompt << 32 | (block + 1);
}

static void put_stored(struct kv_buf *out, uint64_t prompt, uint64_t first, uint64_t n)
{
    kv_msgpack_put_array(out, 7);
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_array(out, (uint32_t)n);
    for (uint64_t i = first; i < first + n; i++)
        kv_msgpack_put_u64(out, hash_of(prompt, i));
    if (first)
        kv_msgpack_put_u64(out, hash_of(prompt, first - 1));
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_array(out, (uint32_t)n * BLOCK_SIZE);
    for (uint64_t i = 0; i < n * BLOCK_SIZE; i++)
        kv_msgpack_put_u64(out, (prompt * 1000 + first * BLOCK_SIZE + i) & 0xffffffff);
    kv_msgpack_put_u64(out, BLOCK_SIZE);
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "GPU");
}

static void send_numbered(struct engine *e, uint64_t seq, const char *data, size_t len)
{
    uint8_t bytes[KVE_SEQUENCE_BYTES];

    kve_sequence_put(bytes, seq);
    assert_int_equal(zmq_send(e->pub, "", 0, ZMQ_SNDMORE), 0);
    assert_int_equal(zmq_send(e->pub, bytes, sizeof(bytes), ZMQ_SNDMORE), sizeof(bytes));
    assert_int_equal(zmq_send(e->pub, data, len, 0), len);
}

enum fate { SENT, LOST };

static void publish_batch(struct engine *e, struct kv_buf *batch, enum fate fate)
{
    uint64_t seq = e->seq++;

    if (fate == SENT)
        send_numbered(e, seq, batch->data, batch->len);
    assert_true(e->kept < RING);
    e->ring[e->kept].seq = seq;
    e->ring[e->kept].data = batch->data;
    e->ring[e->kept++].len = batch->len;
}

static struct kv_buf batch_head(struct engine *e)
{
    struct kv_buf batch = KV_BUF_INIT;

    kv_msgpack_put_array(&batch, 3);
    kv_msgpack_put_double(&batch, (double)e->time++);
    return batch;
}

static void publish_rank(struct engine *e, uint64_t prompt, uint64_t first, uint64_t n, int rank,
                         enum fate fate)
{
    struct kv_buf batch = batch_head(e);

    kv_msgpack_put_array(&batch, 1);
    put_stored(&batch, prompt, first, n);
    if (rank < 0)
        kv_msgpack_put_nil(&batch);
    else
        kv_msgpack_put_u64(&batch, (uint64_t)rank);
    publish_batch(e, &batch, fate);
}

static void publish(struct engine *e, uint64_t prompt, uint64_t first, uint64_t n, enum fate fate)
{
    publish_rank(e, prompt, first, n, -1, fate);
}

static void publish_cleared(struct engine *e)
{
    struct kv_buf batch = batch_head(e);

    kv_msgpack_put_array(&batch, 1);
    kv_msgpack_put_array(&batch, 1);
    kv_msgpack_put_str(&batch, "AllBlocksCleared");
    kv_msgpack_put_nil(&batch);
    publish_batch(e, &batch, SENT);
}

/* Answer one replay request; returns where it starts, or -1 when none comes in time. */
static int64_t engine_replay(struct engine *e, int timeout_ms)
{
    uint8_t identity[256], bytes[KVE_SEQUENCE_BYTES];
    uint64_t start;
    int len;

    zmq_setsockopt(e->router, ZMQ_RCVTIMEO, &timeout_ms, sizeof(timeout_ms));
    len = zmq_recv(e->router, identity, sizeof(identity), 0);
    if (len < 0)
        return -1;
    assert_int_equal(zmq_recv(e->router, bytes, sizeof(bytes), 0), 0);
    assert_int_equal(zmq_recv(e->router, bytes, sizeof(bytes), 0), sizeof(bytes));
    start = kve_sequence_get(bytes);
    for (size_t i = 0; i <= e->kept; i++) {
        bool end = i == e->kept;

        if (!end && e->ring[i].seq < start)
            continue;
        kve_sequence_put(bytes, end ? KVE_END_SEQUENCE : e->ring[i].seq);
        zmq_send(e->router, identity, (size_t)len, ZMQ_SNDMORE);
        zmq_send(e->router, "", 0, ZMQ_SNDMORE);
        if (e->with_topic)
            zmq_send(e->router, "", 0, ZMQ_SNDMORE);
        zmq_send(e->router, bytes, sizeof(bytes), ZMQ_SNDMORE);
        zmq_send(e->router, end ? "" : e->ring[i].data, end ? 0 : e->ring[i].len, 0);
    }
    return (int64_t)start;
}

/* -- what the registry makes of it ------------------------------------------------------------- */

/* @patience_ms: a replay silent for so long is given up, which a busy machine must not make of
 * ours. */
static struct ki_registry *open_patient_registry(bool held, uint64_t patience_ms)
{
    struct ki_registry_opts opts = {.threads = 2,
                                    .max_registrations = 64,
                                    .replay_timeout_ms = patience_ms,
                                    .start_held = held};
    struct ki_registry *r;

    assert_int_equal(ki_registry_create(&opts, &r), 0);
    return r;
}

static struct ki_registry *open_registry(bool held)
{
    return open_patient_registry(held, 1000);
}

static int add(struct ki_registry *r, uint64_t instance, uint32_t rank, const struct engine *e,
               bool with_replay, struct kv_error *error)
{
    struct ki_registration reg = {.instance = instance,
                                  .rank = rank,
                                  .block_size = BLOCK_SIZE,
                                  .endpoint = e->endpoint,
                                  .replay_endpoint = with_replay ? e->replay_endpoint : NULL,
                                  .model = MODEL,
                                  .tenant = TENANT};

    return ki_registry_register(r, &reg, error);
}

/* An engine, and @r following it as instance 1: whatever is published from now on arrives. */
static void follow(struct ki_registry *r, struct engine *e, bool with_topic, bool with_replay)
{
    engine_open(e, with_topic);
    assert_int_equal(add(r, 1, 0, e, with_replay, NULL), 0);
    engine_wait_subscriber(e);
}

/* The same with a replay service, which is asked at once for what was published before. */
static void follow_with_replay(struct ki_registry *r, struct engine *e, bool with_topic)
{
    follow(r, e, with_topic, true);
    assert_int_equal(engine_replay(e, 60000), 0);
}

static void end(struct ki_registry *r, struct engine *e)
{
    ki_registry_destroy(r);
    engine_close(e);
}

static uint32_t reach(struct ki_registry *r, uint64_t prompt, uint64_t n, uint64_t instance,
                      uint32_t rank)
{
    struct ki_model *model = ki_registry_model(r, MODEL, TENANT);
    struct kvi_matches matches = {0};
    uint32_t tokens[256 * BLOCK_SIZE], found = 0;
    uint64_t hashes[256];

    assert_true(n <= 256);
    if (!model)
        return 0;
    for (uint64_t i = 0; i < n * BLOCK_SIZE; i++)
        tokens[i] = (uint32_t)(prompt * 1000 + i);
    kve_hash_tokens(KVE_SEED, tokens, n * BLOCK_SIZE, BLOCK_SIZE, false, hashes);
    assert_int_equal(kvi_find(model->index, hashes, n, &matches), 0);
    for (size_t i = 0; i < matches.n; i++)
        if (matches.items[i].holder.worker == instance && matches.items[i].holder.rank == rank)
            found = matches.items[i].reach[0];
    kvi_matches_fini(&matches);
    ki_model_release(model);
    return found;
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static struct ki_worker_info info_of(struct ki_registry *r, uint64_t instance, uint32_t rank)
{
    struct ki_worker_info *infos, found = {0};
    long n = ki_registry_workers(r, &infos);

    assert_true(n >= 0);
    for (long i = 0; i < n; i++)
        if (infos[i].instance == instance && infos[i].rank == rank)
            found = infos[i];
    ki_worker_infos_free(infos, n);
    found.endpoint = found.replay_endpoint = found.model = found.tenant = found.last_error = NULL;
    return found;
}

static bool is_signalled(const struct kv_wake *wake)
{
    struct pollfd pfd = {.fd = wake->fd, .events = POLLIN};

    return poll(&pfd, 1, 0) == 1;
}

/* The hook that trims memory runs after some MiB of messages, whatever their contents. */
static void bursts_are_told(void **state)
{
    struct ki_registry_opts opts = {.threads = 1};
    size_t len = 3 << 20;
    char *junk = calloc(1, len);
    struct kv_wake drained;
    struct ki_registry *r;
    struct engine e;

    (void)state;
    assert_non_null(junk);
    assert_int_equal(kv_wake_open(&drained), 0);
    opts.drained = &drained;
    assert_int_equal(ki_registry_create(&opts, &r), 0);
    follow(r, &e, true, false);
    send_numbered(&e, e.seq++, junk, len);
    publish(&e, 7, 0, 10, SENT);
    wait_until(reach(r, 7, 20, 1, 0) == 10);
    assert_false(is_signalled(&drained));
    send_numbered(&e, e.seq++, junk, len);
    wait_until(is_signalled(&drained));
    end(r, &e);
    kv_wake_close(&drained);
    free(junk);
}

static void events_become_answers(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    follow(r, &e, true, false);
    publish(&e, 7, 0, 10, SENT);
    publish(&e, 7, 10, 5, SENT);
    wait_until(reach(r, 7, 20, 1, 0) == 15);
    assert_int_equal(info_of(r, 1, 0).batches, 2);
    assert_int_equal(info_of(r, 1, 0).blocks, 15);
    assert_int_equal(info_of(r, 1, 0).status, KI_ACTIVE);
    assert_false(info_of(r, 1, 0).reasons);
    publish_cleared(&e);
    wait_until(reach(r, 7, 20, 1, 0) == 0);
    end(r, &e);
}

static void gaps_are_replayed_in_both_framings(void **state)
{
    (void)state;
    for (int with_topic = 0; with_topic < 2; with_topic++) {
        struct ki_registry *r = open_registry(false);
        struct engine e;

        follow_with_replay(r, &e, with_topic);
        publish(&e, 7, 0, 2, SENT);
        publish(&e, 7, 2, 2, LOST);
        publish(&e, 7, 4, 2, LOST);
        publish(&e, 7, 6, 2, SENT);
        publish(&e, 7, 8, 2, SENT); /* waits its turn */
        assert_int_equal(engine_replay(&e, 60000), 1);
        wait_until(reach(r, 7, 10, 1, 0) == 10);
        wait_until(info_of(r, 1, 0).status == KI_ACTIVE);
        assert_int_equal(info_of(r, 1, 0).replayed_batches, 2);
        assert_int_equal(info_of(r, 1, 0).batches, 5); /* none twice */
        assert_int_equal(info_of(r, 1, 0).missed_batches, 0);
        assert_false(info_of(r, 1, 0).reasons);
        end(r, &e);
    }
}

static void a_dead_replay_service_does_not_stop_the_stream(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    follow(r, &e, true, true);
    publish(&e, 7, 0, 2, SENT);
    publish(&e, 8, 0, 2, LOST);
    publish(&e, 9, 0, 2, SENT);
    wait_until(reach(r, 9, 2, 1, 0) == 2);
    assert_true(info_of(r, 1, 0).reasons);
    assert_int_equal(info_of(r, 1, 0).missed_batches, 1);
    assert_int_equal(info_of(r, 1, 0).failed_replays, 1);
    assert_in_range(info_of(r, 1, 0).replays, 3, 5); /* some for the new connection */
    end(r, &e);
}

static void initial_gap(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    engine_open(&e, false);
    publish(&e, 7, 0, 4, SENT);
    publish(&e, 7, 4, 4, SENT);
    assert_int_equal(add(r, 1, 0, &e, true, NULL), 0);
    assert_int_equal(add(r, 2, 0, &e, false, NULL), 0);
    engine_wait_subscriber(&e);
    engine_wait_subscriber(&e);
    assert_int_equal(engine_replay(&e, 60000), 0);
    wait_until(reach(r, 7, 8, 1, 0) == 8); /* before anything comes live */
    publish(&e, 7, 8, 4, SENT);
    wait_until(reach(r, 7, 12, 1, 0) == 12);
    assert_false(info_of(r, 1, 0).reasons);
    wait_until(info_of(r, 2, 0).batches == 1);
    assert_int_equal(info_of(r, 2, 0).orphans, 1);
    assert_true(info_of(r, 2, 0).reasons);
    end(r, &e);
}

/* Publish {"data_parallel_rank": nil, "ts": milliseconds, "events": [...]}. */
static void publish_map(struct engine *e, uint64_t prompt, uint64_t n)
{
    struct kv_buf batch = KV_BUF_INIT;

    kv_msgpack_put_map(&batch, 3);
    kv_msgpack_put_str(&batch, "data_parallel_rank");
    kv_msgpack_put_nil(&batch);
    kv_msgpack_put_str(&batch, "ts");
    kv_msgpack_put_u64(&batch, UINT64_C(1700000000000) + e->time++);
    kv_msgpack_put_str(&batch, "events");
    kv_msgpack_put_array(&batch, 1);
    put_stored(&batch, prompt, 0, n);
    publish_batch(e, &batch, SENT);
}

/* A map's timestamp counts like an array's: numbers from 1 and milliseconds lack no batch 0. */
static void timestamps_of_maps(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    follow(r, &e, true, false);
    e.seq = 1;
    publish_map(&e, 7, 2);
    wait_until(reach(r, 7, 2, 1, 0) == 2);
    assert_false(info_of(r, 1, 0).reasons);
    end(r, &e);
}

/* The same engine, its numbering and its cache new. */
static void a_restart_forgets(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    follow_with_replay(r, &e, false);
    for (uint64_t i = 0; i < 20; i++)
        publish_rank(&e, 100 + i, 0, 2, i % 2 ? 3 : -1, SENT);
    wait_until(reach(r, 119, 2, 1, 3) == 2);
    engine_forget(&e);
    e.seq = 0;
    publish(&e, 200, 0, 2, LOST);
    publish(&e, 201, 0, 2, SENT);
    assert_int_equal(engine_replay(&e, 60000), 0);
    wait_until(reach(r, 201, 2, 1, 0) == 2);
    assert_int_equal(reach(r, 200, 2, 1, 0), 2);
    assert_int_equal(reach(r, 118, 2, 1, 0), 0);
    assert_int_equal(reach(r, 119, 2, 1, 3), 0);
    assert_int_equal(info_of(r, 1, 0).restarts, 1);
    assert_false(info_of(r, 1, 0).reasons);
    end(r, &e);
}

static void unregistering_forgets_and_remembers_the_position(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct kv_error error;
    struct engine e;

    (void)state;
    follow_with_replay(r, &e, false);
    publish(&e, 7, 0, 4, SENT);
    publish_rank(&e, 8, 0, 4, 5, SENT); /* a rank nobody registered */
    wait_until(reach(r, 8, 4, 1, 5) == 4);
    assert_int_equal(ki_registry_unregister(r, 1, "other", NULL, NULL, &error), -ENOENT);
    assert_int_equal(ki_registry_unregister(r, 2, MODEL, NULL, NULL, &error), -ENOENT);
    assert_string_equal(error.text, "instance 2 not found");
    assert_int_equal(ki_registry_unregister(r, 1, MODEL, TENANT, &(uint32_t){5}, &error), -ENOENT);
    assert_string_equal(error.text, "instance 1 dp_rank 5 not found");
    assert_int_equal(ki_registry_unregister(r, 1, MODEL, NULL, NULL, &error), 0);
    assert_null(ki_registry_model(r, MODEL, TENANT));
    assert_int_equal(add(r, 1, 0, &e, true, NULL), 0);
    assert_int_equal(engine_replay(&e, 60000), 0); /* its blocks are gone: from the beginning */
    engine_wait_subscriber(&e);
    publish(&e, 7, 4, 4, SENT);
    wait_until(reach(r, 7, 8, 1, 0) == 8);
    assert_int_equal(reach(r, 8, 4, 1, 5), 4);
    end(r, &e);
}

static void refusals(void **state)
{
    struct kv_arg_list allow = {.items = {"tcp://127.0.0.1:*"}, .n = 1};
    struct ki_registry_opts opts = {.threads = 1, .max_registrations = 2, .allow = &allow};
    struct ki_registration reg = {.instance = 1,
                                  .block_size = 16,
                                  .endpoint = "tcp://127.0.0.1:1",
                                  .model = MODEL,
                                  .tenant = TENANT};
    struct ki_registration other;
    struct ki_registry *r;
    struct kv_error error;

    (void)state;
    assert_int_equal(ki_registry_create(&opts, &r), 0);
    other = reg, other.endpoint = "127.0.0.1:1";
    assert_int_equal(ki_registry_register(r, &other, &error), -EINVAL);
    assert_string_equal(error.text, "invalid ZMQ endpoint `127.0.0.1:1`: missing scheme");
    other = reg, other.endpoint = "udp://127.0.0.1:1";
    assert_int_equal(ki_registry_register(r, &other, &error), -EINVAL);
    assert_string_equal(error.text,
                        "invalid ZMQ endpoint `udp://127.0.0.1:1`: unsupported scheme `udp`");
    other = reg, other.replay_endpoint = "tcp://127.0.0.1";
    assert_int_equal(ki_registry_register(r, &other, &error), -EINVAL);
    assert_string_equal(error.text, "invalid replay endpoint `tcp://127.0.0.1`: missing TCP port");
    other = reg, other.endpoint = "tcp://10.0.0.1:5";
    assert_int_equal(ki_registry_register(r, &other, &error), -EACCES);
    other = reg, other.replay_endpoint = "tcp://10.0.0.1:5";
    assert_int_equal(ki_registry_register(r, &other, &error), -EACCES);
    other = reg, other.block_size = 0;
    assert_int_equal(ki_registry_register(r, &other, &error), -EINVAL);
    assert_null(ki_registry_model(r, MODEL, TENANT)); /* nothing is left behind */

    assert_int_equal(ki_registry_register(r, &reg, &error), 0);
    assert_int_equal(ki_registry_register(r, &reg, &error), -EEXIST);
    assert_string_equal(error.text, "instance 1 dp_rank 0 already registered");
    other = reg, other.rank = 1, other.tenant = "t2";
    assert_int_equal(ki_registry_register(r, &other, &error), -EEXIST);
    assert_string_equal(error.text, "instance 1 is already registered for model=m tenant=default");
    other = reg, other.instance = 2, other.block_size = 32;
    assert_int_equal(ki_registry_register(r, &other, &error), -EEXIST);
    assert_string_equal(
        error.text, "block_size mismatch for model=m tenant=default: existing=16, requested=32");
    other = reg, other.rank = 1;
    assert_int_equal(ki_registry_register(r, &other, &error), 0);
    other.rank = 2;
    assert_int_equal(ki_registry_register(r, &other, &error), -ENOSPC);
    assert_int_equal(ki_registry_unregister(r, 1, MODEL, NULL, &(uint32_t){1}, &error), 0);
    assert_int_equal(ki_registry_unregister(r, 1, MODEL, NULL, &(uint32_t){0}, &error), 0);
    assert_null(ki_registry_model(r, MODEL, TENANT));
    ki_registry_destroy(r);
}

/*
 * Longer than heartbeats are patient elsewhere: libzmq doesn't read them while a queue is full, and
 * aborts (its issue 3937) when a full queue outlives the connection that it cuts for that.
 */
static void a_full_queue_waits_in_peace(void **state)
{
    struct ki_registry *r = open_registry(true);
    struct engine e;

    (void)state;
    follow(r, &e, true, false);
    for (uint64_t i = 0; i < RING; i++) /* twice what the queue takes */
        publish(&e, 1000 + i, 0, 1, SENT);
    pause_ms(17000);
    ki_registry_go(r);
    wait_until(info_of(r, 1, 0).batches == RING);
    assert_int_equal(reach(r, 1000, 1, 1, 0), 1);
    assert_false(info_of(r, 1, 0).reasons);
    end(r, &e);
}

/* Events beyond the reader's limits are lost, and the view is marked partial. */
static void too_many_events_make_the_view_partial(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;
    struct kv_buf batch;

    (void)state;
    follow(r, &e, true, false);
    batch = batch_head(&e);
    kv_msgpack_put_array(&batch, 1000000);
    for (int i = 0; i < 1000000; i++) {
        kv_msgpack_put_array(&batch, 1);
        kv_msgpack_put_str(&batch, "Ignored");
    }
    kv_msgpack_put_nil(&batch);
    publish_batch(&e, &batch, SENT);
    publish(&e, 7, 0, 2, SENT);
    wait_until(reach(r, 7, 2, 1, 0) == 2);
    assert_int_equal(info_of(r, 1, 0).skipped[KVE_SKIP_TOO_LARGE], 1000000 - 65536);
    assert_true(info_of(r, 1, 0).reasons);
    end(r, &e);
}

static void pausing_loses_and_replay_brings_back(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct engine e;

    (void)state;
    follow_with_replay(r, &e, true);
    publish(&e, 7, 0, 2, SENT);
    wait_until(reach(r, 7, 2, 1, 0) == 2);
    assert_int_equal(ki_registry_pause(r, 9, NULL), -ENOENT);
    assert_int_equal(ki_registry_pause(r, 1, NULL), 0);
    assert_int_equal(ki_registry_pause(r, 1, &(uint32_t){0}), -EALREADY);
    wait_until(info_of(r, 1, 0).status == KI_PAUSED);
    engine_wait_change(&e, 0);
    publish(&e, 7, 2, 2, SENT); /* to nobody */
    assert_int_equal(ki_registry_resume(r, 1, NULL), 0);
    assert_int_equal(engine_replay(&e, 60000), 0); /* and the last known one: same process? */
    wait_until(reach(r, 7, 4, 1, 0) == 4);
    engine_wait_subscriber(&e);
    publish(&e, 7, 4, 2, SENT);
    assert_int_equal(engine_replay(&e, 60000), 1); /* by the first batch over the connection */
    wait_until(reach(r, 7, 6, 1, 0) == 6);
    assert_false(info_of(r, 1, 0).reasons);
    assert_int_equal(info_of(r, 1, 0).restarts, 0);
    end(r, &e);
}

static void noise_is_counted_and_passed_over(void **state)
{
    struct ki_registry *r = open_registry(false);
    struct kv_buf junk = KV_BUF_INIT;
    struct engine e;

    (void)state;
    follow(r, &e, true, false);
    publish(&e, 7, 0, 2, SENT);
    zmq_send(e.pub, "one frame", 9, 0);
    zmq_send(e.pub, "", 0, ZMQ_SNDMORE);
    zmq_send(e.pub, "short", 5, ZMQ_SNDMORE);
    zmq_send(e.pub, "x", 1, 0);
    for (int i = 0; i < 30; i++)
        zmq_send(e.pub, "f", 1, i < 29 ? ZMQ_SNDMORE : 0);
    kv_buf_puts(&junk, "\xc1 not msgpack");
    publish_batch(&e, &junk, SENT);
    publish(&e, 7, 2, 2, SENT);
    wait_until(reach(r, 7, 4, 1, 0) == 4);
    assert_int_equal(info_of(r, 1, 0).malformed, 4);
    assert_int_equal(info_of(r, 1, 0).gaps, 0);
    assert_true(info_of(r, 1, 0).reasons);
    end(r, &e);
}

static void held_until_go_with_a_peers_state(void **state)
{
    struct ki_registry *r = open_registry(true);
    struct ki_mark mark = {.holder = {.worker = 1}, .has_position = true, .sequence = 1};
    struct ki_snapshot *snapshot;
    struct kv_block blocks[2];
    struct kvi_index *index;
    struct ki_model *model;
    struct kv_error error;
    uint32_t tokens[2 * BLOCK_SIZE];
    uint64_t hashes[2];
    struct engine e;

    (void)state;
    follow(r, &e, true, false);
    publish(&e, 7, 0, 1, SENT);
    publish(&e, 7, 1, 1, SENT); /* what the peer has seen too */
    publish(&e, 7, 2, 2, SENT);
    pause_ms(200);
    assert_int_equal(reach(r, 7, 4, 1, 0), 0);
    assert_int_equal(info_of(r, 1, 0).status, KI_PENDING);

    for (uint32_t i = 0; i < 2 * BLOCK_SIZE; i++)
        tokens[i] = 7000 + i;
    kve_hash_tokens(KVE_SEED, tokens, 2 * BLOCK_SIZE, BLOCK_SIZE, false, hashes);
    for (uint64_t i = 0; i < 2; i++)
        blocks[i] = (struct kv_block){hash_of(7, i), hashes[i]};
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(
        kvi_store(index, (struct kv_holder){.worker = 1}, KV_TIER_DEVICE, NULL, blocks, 2, NULL),
        0);
    model = ki_registry_model(r, MODEL, TENANT);
    assert_int_equal(ki_snapshot_create(&snapshot), 0);
    snapshot->instance = 1;
    snapshot->has_position = true;
    snapshot->state = (struct ki_state){.sequence = 1, .timestamp = 1001};
    assert_int_equal(ki_registry_adopt(r, MODEL, TENANT, 99, index, &mark, 1, &snapshot, 1, &error),
                     -EEXIST);
    assert_int_equal(
        ki_registry_adopt(r, MODEL, TENANT, BLOCK_SIZE, index, &mark, 1, &snapshot, 1, &error), 0);
    ki_snapshot_free(snapshot);
    ki_model_release(model); /* whoever had the old one finishes with it */
    assert_int_equal(reach(r, 7, 4, 1, 0), 2);
    ki_registry_go(r);
    wait_until(reach(r, 7, 4, 1, 0) == 4);
    assert_int_equal(info_of(r, 1, 0).duplicates, 2);
    assert_int_equal(info_of(r, 1, 0).batches, 1);
    assert_false(info_of(r, 1, 0).reasons);
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(ki_registry_adopt(r, "n", TENANT, 4, index, NULL, 0, NULL, 0, &error), -EBUSY);
    kvi_destroy(index);
    end(r, &e);
}

/* A connection made after the peer may have copied the stream doesn't vouch for the copy. */
static void connected_behind_the_dump(void **state)
{
    const struct ki_mark mark = {.holder = {1, 0}, .has_position = true, .sequence = 1};
    const struct kv_block block = {hash_of(7, 0), 1};
    struct ki_registry *r = open_registry(true);
    struct ki_snapshot *snapshot;
    struct kvi_index *index;
    struct kv_error error;
    struct engine e;

    (void)state;
    ki_registry_await_dump(r);
    follow(r, &e, true, false);
    wait_until(info_of(r, 1, 0).connected);
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(kvi_store(index, mark.holder, KV_TIER_DEVICE, NULL, &block, 1, NULL), 0);
    assert_int_equal(ki_snapshot_create(&snapshot), 0);
    snapshot->instance = 1;
    snapshot->has_position = true;
    snapshot->state = (struct ki_state){.sequence = 1, .timestamp = 1001};
    assert_int_equal(
        ki_registry_adopt(r, MODEL, TENANT, BLOCK_SIZE, index, &mark, 1, &snapshot, 1, &error), 0);
    ki_snapshot_free(snapshot);
    ki_registry_go(r);
    wait_until(info_of(r, 1, 0).status == KI_ACTIVE);
    assert_int_equal(info_of(r, 1, 0).reasons, KI_BECAUSE(RECONNECTED));
    end(r, &e);
}

/* Forms that a registration named (--hash-lookahead) hold for the blocks of a peer's dump, too. */
static void a_dump_keeps_the_registered_forms(void **state)
{
    struct ki_registry *r = open_registry(true);
    const struct ki_registration reg = {.instance = 1,
                                        .block_size = BLOCK_SIZE,
                                        .endpoint = "ipc:///nobody/listens",
                                        .model = MODEL,
                                        .tenant = TENANT};
    struct kvi_index *index;
    struct ki_model *model;
    struct kv_error error;

    (void)state;
    assert_int_equal(ki_registry_register(r, &reg, &error), 0);
    ki_registry_note_forms(r, MODEL, TENANT, KI_FORM(1, false));
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(
        ki_registry_adopt(r, MODEL, TENANT, BLOCK_SIZE, index, NULL, 0, NULL, 0, &error), 0);
    model = ki_registry_model(r, MODEL, TENANT);
    assert_ptr_equal(model->index, index);
    assert_int_equal(ki_model_forms(model), KI_FORM(1, false));
    ki_model_release(model);
    ki_registry_destroy(r);
}

/* Registrations come and go while events flow and others look on: for the thread sanitizer. */
struct churn {
    struct ki_registry *r;
    struct engine *e;
    atomic_bool stop;
};

/*
 * The peer's stream brought blocks of a rank that isn't its own, and none of that: its snapshot isn't
 * kept for a later registration. Then the blocks are of an unknown batch, and go when a whole view comes.
 */
static void blocks_of_another_rank_alone(void **state)
{
    const struct kv_block gone = {hash_of(5, 0), 0};
    struct ki_mark marks[2] = {
        {.holder = {1, 0}, .has_position = true, .stream_rank = 0, .sequence = 1},
        {.holder = {1, 3}, .has_position = true, .stream_rank = 0, .sequence = 1}};
    struct ki_registry *r = open_registry(true);
    struct kvi_index *index;
    struct ki_model *model;
    struct kv_error error;
    struct engine e;

    (void)state;
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(kvi_store(index, marks[1].holder, KV_TIER_DEVICE, NULL, &gone, 1, NULL), 0);
    assert_int_equal(
        ki_registry_adopt(r, MODEL, TENANT, BLOCK_SIZE, index, marks, 2, NULL, 0, &error), 0);
    ki_registry_go(r);
    engine_open(&e, false);
    for (uint64_t prompt = 6; prompt < 9; prompt++)
        publish_rank(&e, prompt, 0, 1, 3, LOST);
    assert_int_equal(add(r, 1, 0, &e, true, NULL), 0);
    assert_int_equal(engine_replay(&e, 60000), 0);
    wait_until(reach(r, 8, 1, 1, 3) == 1);
    model = ki_registry_model(r, MODEL, TENANT);
    assert_int_equal(kvi_holder_blocks(model->index, marks[1].holder), 3);
    ki_model_release(model);
    assert_false(info_of(r, 1, 0).reasons);
    end(r, &e);
}

static int pass_over(void *arg, const struct ki_copied *c)
{
    (void)arg;
    (void)c;
    return 0;
}

static void *look_on(void *arg)
{
    struct churn *c = arg;

    while (!atomic_load(&c->stop)) {
        struct ki_worker_info *infos;
        struct ki_model *model;
        long n = ki_registry_workers(c->r, &infos);

        ki_worker_infos_free(infos, n);
        model = ki_registry_model(c->r, MODEL, TENANT);
        if (model)
            assert_int_equal(ki_dump_copy(c->r, model, pass_over, NULL), 0);
        ki_model_release(model);
    }
    return NULL;
}

static void *come_and_go(void *arg)
{
    struct churn *c = arg;

    for (int i = 0; !atomic_load(&c->stop); i++) {
        add(c->r, 2 + i % 3, (uint32_t)i % 2, c->e, false, NULL);
        pause_ms(3);
        ki_registry_pause(c->r, 2, NULL);
        ki_registry_resume(c->r, 2, NULL);
        ki_registry_unregister(c->r, 2 + (i + 1) % 3, MODEL, NULL, NULL, NULL);
    }
    return NULL;
}

static void churn_while_events_flow(void **state)
{
    struct engine e;
    struct churn c = {.r = open_registry(false), .e = &e};
    pthread_t threads[2];

    (void)state;
    follow(c.r, &e, true, false);
    pthread_create(&threads[0], NULL, look_on, &c);
    pthread_create(&threads[1], NULL, come_and_go, &c);
    for (uint64_t i = 0; i < 600; i++) {
        publish(&e, 1000 + i, 0, 2, SENT);
        pause_ms(1);
    }
    wait_until(reach(c.r, 1599, 2, 1, 0) == 2);
    atomic_store(&c.stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (uint64_t i = 0; i < 600; i += 37)
        assert_int_equal(reach(c.r, 1000 + i, 2, 1, 0), 2);
    assert_false(info_of(c.r, 1, 0).reasons);
    for (uint64_t i = 2; i < 5; i++) {
        ki_registry_unregister(c.r, i, MODEL, NULL, NULL, NULL);
        assert_int_equal(reach(c.r, 1599, 2, i, 0), 0); /* nothing arrives after it left */
    }
    end(c.r, &e);
}

/* Nobody reads: what a replay can pile up in our process ends at so many messages. */
static void a_replay_piles_up_little(void **state)
{
    enum { LEN = 64 << 10, MOST = 80 << 20 }; /* the kernel's buffers included */
    struct epoll_event event;
    void *zmq = zmq_ctx_new(), *router = zmq_socket(zmq, ZMQ_ROUTER), *dealer;
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC), one = 1, timeout_ms = 500, id_len, sent;
    char endpoint[128], id[256], request[16], *payload = calloc(1, LEN);

    (void)state;
    assert_non_null(payload);
    zmq_setsockopt(router, ZMQ_SNDHWM, &one, sizeof(one));
    zmq_setsockopt(router, ZMQ_ROUTER_MANDATORY, &one, sizeof(one)); /* waits instead of dropping */
    zmq_setsockopt(router, ZMQ_SNDTIMEO, &timeout_ms, sizeof(timeout_ms));
    bind_any(router, endpoint, sizeof(endpoint));
    assert_int_equal(ki_socket_open(zmq, ZMQ_DEALER, endpoint, KI_REPLAY_QUEUE, KI_MAX_MESSAGE,
                                    epoll_fd, 1, &dealer),
                     0);
    assert_int_equal(ki_socket_connect(dealer, endpoint), 0);
    assert_int_equal(ki_socket_request(dealer, 0), 0);
    id_len = zmq_recv(router, id, sizeof(id), 0);
    assert_true(id_len > 0);
    assert_int_equal(zmq_recv(router, request, sizeof(request), 0), 0);
    assert_int_equal(zmq_recv(router, request, sizeof(request), 0), KVE_SEQUENCE_BYTES);
    for (sent = 0; sent < 20000; sent++) {
        if (zmq_send(router, id, (size_t)id_len, ZMQ_SNDMORE) < 0)
            break;
        assert_int_equal(zmq_send(router, payload, LEN, 0), LEN);
    }
    assert_in_range(sent, 2, MOST / LEN);
    assert_int_equal(epoll_wait(epoll_fd, &event, 1, 10000), 1);
    ki_socket_close(dealer, epoll_fd);
    zmq_close(router);
    zmq_ctx_term(zmq);
    close(epoll_fd);
    free(payload);
}

/* Batches that didn't fit are asked for again, until none is missing. */
static void a_ring_beyond_the_queue_is_replayed(void **state)
{
    enum { N = 3000, BLOCKS = 50 }; /* the ROUTER drops what is over 1000 */
    struct ki_registry *r = open_patient_registry(false, 2000);
    struct engine e;
    int requests = 0;

    (void)state;
    follow(r, &e, true, true);
    for (uint64_t i = 0; i < N; i++)
        publish(&e, i, 0, BLOCKS, LOST);
    publish(&e, N, 0, BLOCKS, SENT);
    for (uint64_t limit = kv_now_ns() + 100 * KV_NS_PER_S;
         kv_now_ns() < limit && reach(r, N, BLOCKS, 1, 0) != BLOCKS;)
        requests += engine_replay(&e, 100) >= 0;
    assert_int_equal(reach(r, N, BLOCKS, 1, 0), BLOCKS);
    for (uint64_t i = 0; i < N; i += 99)
        assert_int_equal(reach(r, i, BLOCKS, 1, 0), BLOCKS);
    print_message("%d requests\n", requests);
    assert_int_equal(info_of(r, 1, 0).missed_batches, 0);
    assert_int_equal(info_of(r, 1, 0).replayed_batches, N);
    assert_false(info_of(r, 1, 0).reasons);
    end(r, &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_become_answers),
        cmocka_unit_test(bursts_are_told),
        cmocka_unit_test(gaps_are_replayed_in_both_framings),
        cmocka_unit_test(a_dead_replay_service_does_not_stop_the_stream),
        cmocka_unit_test(initial_gap),
        cmocka_unit_test(timestamps_of_maps),
        cmocka_unit_test(a_restart_forgets),
        cmocka_unit_test(unregistering_forgets_and_remembers_the_position),
        cmocka_unit_test(refusals),
        cmocka_unit_test(pausing_loses_and_replay_brings_back),
        cmocka_unit_test(noise_is_counted_and_passed_over),
        cmocka_unit_test(held_until_go_with_a_peers_state),
        cmocka_unit_test(connected_behind_the_dump),
        cmocka_unit_test(a_dump_keeps_the_registered_forms),
        cmocka_unit_test(blocks_of_another_rank_alone),
        cmocka_unit_test(too_many_events_make_the_view_partial),
        cmocka_unit_test(a_full_queue_waits_in_peace),
        cmocka_unit_test(a_replay_piles_up_little),
        cmocka_unit_test(a_ring_beyond_the_queue_is_replayed),
        cmocka_unit_test(churn_while_events_flow),
    };

    kv_log_set_level(KV_LOG_ERROR); /* what is provoked here would fill pages */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
