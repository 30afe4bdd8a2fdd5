// SPDX-License-Identifier: Apache-2.0
/*
 * Block events to NATS, end to end: from the event manager through the sink, a real nats-server and
 * a subscriber that counts records.
 *
 *     plane_bench [events] [bytes of a message] [blocks of a snapshot]
 *
 * The yardstick of the same round is a loop of natsConnection_Publish of ready buffers, to a
 * subscriber that counts them. The buffers have the size of the sink's messages. Events are stores of
 * blocks with 16 tokens in chains of 64, and their removals. Both loops wait for the subscriber: at
 * most 8 MiB are on their way. Medians of five rounds. A snapshot is timed from the start of a
 * follower until it is whole, beside a memcpy of its bytes.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <nats/nats.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "bm/events/events.h"
#include "plane/follow.h"
#include "support.h"

enum { ROUNDS = 5, BATCH = 1024, CHAIN = 64, TOKENS = 16, RECORD = 64 };
#define ON_THEIR_WAY (UINT64_C(8) << 20)

static char url[64];
static pid_t pid;
static _Atomic uint64_t n_received; /* records, or ready messages */

static void end_server(void)
{
    if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
}

static unsigned free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    if (bind(fd, (struct sockaddr *)&at, len) < 0 || getsockname(fd, (struct sockaddr *)&at, &len))
        bench_die("no port", -errno);
    close(fd);
    return ntohs(at.sin_port);
}

static void start_server(void)
{
    unsigned port = free_port();
    char text[16];

    snprintf(text, sizeof(text), "%u", port);
    snprintf(url, sizeof(url), "nats://127.0.0.1:%u", port);
    pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        execlp("nats-server", "nats-server", "-a", "127.0.0.1", "-p", text, "-l", "/dev/null",
               (char *)NULL);
        _exit(127);
    }
    atexit(end_server);
}

/* ---- the yardstick ---- */

static void count_message(natsConnection *connection, natsSubscription *sub, natsMsg *msg,
                          void *arg)
{
    (void)connection, (void)sub, (void)arg;
    atomic_fetch_add_explicit(&n_received, 1, memory_order_relaxed);
    natsMsg_Destroy(msg);
}

static natsConnection *connect_raw(void)
{
    natsConnection *connection;

    for (int i = 0; i < 1000; i++, usleep(10000)) { /* until the server listens */
        if (natsConnection_ConnectTo(&connection, url) == NATS_OK)
            return connection;
    }
    bench_die("nats-server doesn't listen", 0);
}

static void wait_until_received(uint64_t n)
{
    while (atomic_load_explicit(&n_received, memory_order_relaxed) < n)
        usleep(20);
}

/* Publish @n ready buffers. Returns seconds. */
static double publish_ready(uint64_t n, uint64_t bytes)
{
    natsConnection *from = connect_raw(), *to = connect_raw();
    uint64_t most = ON_THEIR_WAY / bytes ? ON_THEIR_WAY / bytes : 1, start;
    char *data = calloc(1, bytes);
    natsSubscription *sub;
    double seconds;

    if (!data || natsConnection_Subscribe(&sub, to, "ready", count_message, NULL) != NATS_OK ||
        natsConnection_Flush(to) != NATS_OK)
        bench_die("subscribe", 0);
    atomic_store(&n_received, 0);
    start = kv_now_ns();
    for (uint64_t i = 0; i < n; i++) {
        if (i >= most)
            wait_until_received(i - most);
        if (natsConnection_Publish(from, "ready", data, (int)bytes) != NATS_OK)
            bench_die("publish", 0);
    }
    (void)natsConnection_Flush(from);
    wait_until_received(n);
    seconds = (double)(kv_now_ns() - start) / 1e9;
    natsSubscription_Destroy(sub);
    natsConnection_Destroy(from);
    natsConnection_Destroy(to);
    free(data);
    return seconds;
}

/* ---- the sink ---- */

static void count_records(void *arg, const struct kvp_nats_msg *msg)
{
    struct kvp_header header = KVP_HEADER_INIT;

    (void)arg;
    if (kvp_read(msg->data, msg->len, &header, NULL, NULL) < 0)
        bench_die("a message is damaged", 0);
    atomic_fetch_add_explicit(&n_received, header.n_records, memory_order_relaxed);
}

static void put_batch(struct kvbm_events *events, uint64_t first, bool stored)
{
    static uint32_t tokens[TOKENS];

    kvbm_events_begin(events);
    for (uint64_t i = first; i < first + BATCH; i++) {
        uint64_t parent = i - 1;
        struct kvbm_event event = {
            .type = stored ? KVBM_EVENT_STORED : KVBM_EVENT_REMOVED,
            .first = stored,
            .last = !stored,
            .key_len = 8,
            .key = &i,
            .parent = stored && i % CHAIN ? &parent : NULL,
            .position = (uint32_t)(i % CHAIN),
            .n_tokens = stored ? TOKENS : 0,
            .tokens = tokens,
        };

        tokens[0] = (uint32_t)i;
        kvbm_events_put(events, &event);
    }
    kvbm_events_end(events);
}

/* Publish @n events. Returns seconds; *@ret_bytes is a message's mean length. */
static double publish_events(uint64_t n, uint32_t max_bytes, double *ret_bytes)
{
    struct kvp_nats_opts server = {.size = sizeof(server), .url = url};
    struct kvbm_nats_opts opts = {
        .size = sizeof(opts), .server = &server, .worker = "w", .max_bytes = max_bytes};
    struct kvbm_nats_stats stats = KVBM_NATS_STATS_INIT;
    struct kvbm_events *events;
    struct kvbm_nats_sink *sink;
    struct kvp_nats *to;
    struct kvp_nats_sub *sub;
    double seconds;
    uint64_t start;
    int err = kvbm_events_create(NULL, &events);

    if (err < 0 || (err = kvbm_events_add_nats(events, &opts, &sink)) < 0 ||
        (err = kvp_nats_open(&server, NULL, NULL, &to)) < 0 ||
        (err = kvp_nats_subscribe(to, "kvasir.>", 0, count_records, NULL, &sub)) < 0 ||
        (err = kvp_nats_flush(to, 10000)) < 0)
        bench_die("the sink", err);
    while (kvbm_nats_get_stats(sink, &stats) == 0 && !stats.connected)
        usleep(1000);
    atomic_store(&n_received, 0);
    start = kv_now_ns();
    for (uint64_t i = 0; i < n; i += BATCH) {
        if (i > ON_THEIR_WAY / RECORD)
            wait_until_received(i - ON_THEIR_WAY / RECORD);
        put_batch(events, i / 2 / BATCH * BATCH, i / BATCH % 2 == 0);
    }
    (void)kvbm_events_flush(events, 60000);
    wait_until_received(n);
    seconds = (double)(kv_now_ns() - start) / 1e9;
    (void)kvbm_nats_get_stats(sink, &stats);
    if (stats.lost || stats.dropped)
        bench_die("events were lost", 0);
    *ret_bytes = (double)stats.bytes / (double)stats.messages;
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(to, 0);
    (void)kvbm_events_destroy(events);
    return seconds;
}

static void measure_events(uint64_t n, uint32_t max_bytes)
{
    struct bench_samples ours = {.n = 0}, theirs = {.n = 0}, ratio = {.n = 0};
    double bytes = 0;

    for (int round = 0; round < ROUNDS; round++) {
        double mine = (double)n / publish_events(n, max_bytes, &bytes), ready;
        double per_message = bytes / RECORD;
        uint64_t messages = (uint64_t)((double)n / per_message) + 1;

        ready = (double)messages * per_message / publish_ready(messages, (uint64_t)bytes);
        bench_sample(&ours, mine);
        bench_sample(&theirs, ready);
        bench_sample(&ratio, mine / ready);
    }
    bench_line("events to NATS",
               "'events':%llu,'message_bytes':%.0f,'record_bytes':%d,'events_per_s':%.0f,"
               "'ready_buffers_events_per_s':%.0f,'ratio':%.2f",
               (unsigned long long)n, bytes, RECORD, bench_middle(&ours), bench_middle(&theirs),
               bench_middle(&ratio));
}

/* ---- a snapshot ---- */

static _Atomic uint64_t n_blocks;
static atomic_bool is_whole;

static void on_reset(void *arg, const char *publisher)
{
    (void)arg, (void)publisher;
    atomic_store(&n_blocks, 0);
}

static void on_record(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    (void)arg, (void)header, (void)record;
    atomic_fetch_add_explicit(&n_blocks, 1, memory_order_relaxed);
}

static void on_whole(void *arg, const char *publisher, bool whole)
{
    (void)arg, (void)publisher;
    atomic_store(&is_whole, whole);
}

/* Register @n blocks, in chains of CHAIN. */
static void fill(struct kvbm_pool *pool, uint64_t n)
{
    struct kvbm_mutable blocks[CHAIN];
    struct kvbm_complete full[CHAIN];
    struct kvbm_immutable held[CHAIN];
    uint64_t keys[CHAIN];
    int err = 0;

    for (uint64_t i = 0; i < n && err == 0; i += CHAIN) {
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};

        for (uint64_t j = 0; j < CHAIN; j++)
            keys[j] = i + j;
        err = kvbm_pool_allocate(pool, CHAIN, blocks, NULL);
        if (err == 0)
            err = kvbm_pool_complete(pool, blocks, CHAIN, &chain, full);
        if (err == 0)
            err = kvbm_pool_register(pool, full, CHAIN, held);
        if (err == 0)
            (void)kvbm_pool_release(pool, held, CHAIN);
    }
    if (err < 0)
        bench_die("blocks", err);
}

static double follow_once(uint64_t n)
{
    static const struct kvp_follow_ops ops = {
        .reset = on_reset, .record = on_record, .whole = on_whole};
    struct kvp_nats_opts server = {.size = sizeof(server), .url = url};
    struct kvp_follow_opts opts = {.server = &server};
    struct kvp_follow *follow;
    uint64_t start = kv_now_ns();
    double seconds;
    int err = kvp_follow_open(&opts, &ops, NULL, &follow);

    if (err < 0)
        bench_die("a follower", err);
    while (!atomic_load(&is_whole))
        usleep(200);
    seconds = (double)(kv_now_ns() - start) / 1e9;
    if (atomic_load(&n_blocks) != n)
        bench_die("the follower has other blocks", 0);
    kvp_follow_close(follow);
    atomic_store(&is_whole, false);
    return seconds;
}

static double copy_seconds(uint64_t bytes)
{
    uint64_t piece = 64 << 10, start;
    char *from = calloc(1, bytes), *to = calloc(1, piece);
    double seconds;

    if (!from || !to)
        bench_die("memory", -ENOMEM);
    memset(from, 1, bytes);
    start = kv_now_ns();
    for (uint64_t at = 0; at + piece <= bytes; at += piece) {
        memcpy(to, from + at, piece);
        __asm__ volatile("" ::: "memory"); /* each of them */
    }
    seconds = (double)(kv_now_ns() - start) / 1e9;
    if (to[piece - 1] != 1) /* the copies count */
        bench_die("memcpy", 0);
    free(from);
    free(to);
    return seconds;
}

static void measure_snapshot(uint64_t n)
{
    struct kvp_nats_opts server = {.size = sizeof(server), .url = url};
    struct kvbm_nats_opts sink = {
        .size = sizeof(sink), .server = &server, .worker = "w", .window_ms = 20};
    struct kvbm_events_opts big = {.size = sizeof(big), .queue_bytes = UINT64_C(4) << 30};
    struct kvbm_registry_opts registry = {.size = sizeof(registry)};
    struct kvbm_pool_opts pool_opts = {
        .size = sizeof(pool_opts), .n_blocks = (uint32_t)n, .block_size = TOKENS};
    struct bench_samples samples = {.n = 0};
    struct kvbm_registry *r;
    struct kvbm_pool *pool;
    int err = kvbm_events_create(&big, &registry.events);

    if (err < 0 || (err = kvbm_events_add_nats(registry.events, &sink, NULL)) < 0 ||
        (err = kvbm_registry_create(&registry, &r)) < 0 ||
        (err = kvbm_pool_create(r, &pool_opts, &pool)) < 0)
        bench_die("a registry", err);
    fill(pool, n);
    (void)kvbm_events_flush(registry.events, 60000);
    for (int round = 0; round < 3; round++)
        bench_sample(&samples, follow_once(n));
    bench_line("snapshot of a publisher",
               "'blocks':%llu,'whole_s':%.2f,'blocks_per_s':%.0f,"
               "'memcpy_s':%.3f",
               (unsigned long long)n, bench_middle(&samples), (double)n / bench_middle(&samples),
               copy_seconds(n * RECORD));
    (void)kvbm_pool_destroy(pool);
    (void)kvbm_registry_destroy(r);
    (void)kvbm_events_destroy(registry.events);
}

int main(int argc, char **argv)
{
    uint64_t n, blocks;
    uint32_t max_bytes;

    bench_usage(argc, argv, "[events] [bytes of a message] [blocks of a snapshot]");
    n = bench_number(argc, argv, 1, 2 << 20) / (2 * BATCH) * (2 * BATCH);
    max_bytes = (uint32_t)bench_number(argc, argv, 2, 64 << 10);
    blocks = bench_number(argc, argv, 3, 1 << 20) / CHAIN * CHAIN;
    if (system("command -v nats-server >/dev/null") != 0) {
        fprintf(stderr, "skipped: no nats-server\n");
        return 77;
    }
    start_server();
    natsConnection_Destroy(connect_raw());
    measure_events(n, max_bytes);
    measure_snapshot(blocks);
    return 0;
}
