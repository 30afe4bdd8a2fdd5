// SPDX-License-Identifier: Apache-2.0
/*
 * From a ZMQ message to an answer: blocks per second through one listener. A publisher thread sends
 * batches encoded beforehand, as fast as the socket takes them. Their form is that of kve_publisher
 * and vLLM: tagged maps, events of 8 blocks of 16 tokens, 16 events a batch, ids below 200000. Time
 * runs from the first message handed to ZMQ until the index finds the last block of the last one.
 * The figure counts stored blocks; the mixed figure's removals are work that isn't counted.
 *
 * Yardstick of the same run: the same messages over the same kind of socket, received and dropped.
 * The publisher's work on this machine is in both figures.
 *
 * Dynamo's events of one block each, in chains of 64, are handed to a listener as NATS messages are: in
 * envelopes of 256 events, and of one. That figure counts seconds of the thread's processor.
 */
#include <dirent.h>
#include <inttypes.h>

#include <time.h>

#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "indexer/registry/registry.h"
#include "indexer/stream/listener.h"
#include "kv_event.h"
#include "publish_load.h"
#include "support.h"

enum {
    EVENT_BLOCKS = 8,
    BATCH_EVENTS = 16,
    PROMPT_EVENTS = 4, /* a prompt of 512 tokens: 4 events, each below the one before */
    BATCHES = 8192,
    ROUNDS = 5,
};
static const size_t batch_blocks = (size_t)BATCH_EVENTS * EVENT_BLOCKS;

struct load {
    struct batches batches;
    uint64_t blocks;
    uint64_t last[PROMPT_EVENTS * EVENT_BLOCKS]; /* local hashes of the last prompt */
};

/* -- the load ---------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* Make the load. With @cache_batches, each batch from the @cache_batches-th on also removes the
 * events of the batch @cache_batches before, as an engine whose cache is full does: the oldest prompt
 * first, and its last blocks before those above them. */
static void make_load(struct load *load, uint64_t cache_batches)
{
    uint32_t prompt[PROMPT_EVENTS * EVENT_BLOCKS * BLOCK_TOKENS];
    const uint64_t cached = cache_batches * BATCH_EVENTS;
    struct kv_buf *out = &load->batches.payloads;
    uint64_t state = 88172645463325252, n_events = 0;

    memset(load, 0, sizeof(*load));
    batches_init(&load->batches, BATCHES);
    for (size_t b = 0; b < BATCHES; b++) {
        bool full = cache_batches && b >= cache_batches;

        batch_begin(&load->batches, full ? 2 * BATCH_EVENTS : BATCH_EVENTS);
        for (size_t e = 0; e < BATCH_EVENTS; e++, n_events++) {
            size_t part = n_events % PROMPT_EVENTS;

            for (size_t i = 0; part == 0 && i < KV_COUNT(prompt); i++)
                prompt[i] = (uint32_t)(next_random(&state) % 200000);
            put_store(out, 1 + n_events * EVENT_BLOCKS, EVENT_BLOCKS, part == 0,
                      prompt + part * EVENT_BLOCKS * BLOCK_TOKENS);
            if (full) /* parts in reverse */
                put_remove(out,
                           1 + (n_events - part + PROMPT_EVENTS - 1 - part - cached) * EVENT_BLOCKS,
                           EVENT_BLOCKS);
        }
        batch_end(&load->batches);
    }
    load->blocks = BATCHES * batch_blocks;
    kve_hash_tokens(KVE_SEED, prompt, KV_COUNT(prompt), BLOCK_TOKENS, false, load->last);
}

/* -- measurement ------------------------------------------------------------------------------- */

static bool answers(struct ki_registry *registry, const struct load *load)
{
    struct ki_model *model = ki_registry_model(registry, "m", "default");
    struct kvi_matches matches = {0};
    bool whole;

    if (kvi_find(model->index, load->last, KV_COUNT(load->last), &matches) < 0)
        bench_die("out of memory", 0);
    whole = matches.n == 1 && matches.items[0].reach[0] == KV_COUNT(load->last);
    kvi_matches_fini(&matches);
    ki_model_release(model);
    return whole;
}

/* Check that the listener received all events in order; otherwise the figure is meaningless. */
static void check_worker(struct ki_registry *registry)
{
    struct ki_worker_info *infos;

    if (ki_registry_workers(registry, &infos) != 1 || infos[0].reasons || infos[0].orphans ||
        infos[0].batches != BATCHES)
        bench_die("events were lost", 0);
    ki_worker_infos_free(infos, 1);
}

/* Processor time of thread ki-event-0, in ns; 0 when unknown. */
static uint64_t event_thread_ns(void)
{
    char path[64], text[64] = "";
    uint64_t ns = 0;
    struct dirent *entry;
    DIR *tasks = opendir("/proc/self/task");
    FILE *file;

    while (tasks && (entry = readdir(tasks)) != NULL) {
        snprintf(path, sizeof(path), "/proc/self/task/%.20s/comm", entry->d_name);
        file = fopen(path, "r");
        if (!file || !fgets(text, sizeof(text), file))
            text[0] = '\0';
        if (file)
            fclose(file);
        if (strncmp(text, "ki-event-0", 10) != 0)
            continue;
        snprintf(path, sizeof(path), "/proc/self/task/%.20s/schedstat", entry->d_name);
        file = fopen(path, "r");
        if (file && fgets(text, sizeof(text), file))
            ns = strtoull(text, NULL, 10);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return ns;
}

static double indexed(const struct load *load, const char *where, double *ret_per_cpu_s)
{
    struct ki_registry_opts opts = {.threads = 1};
    struct ki_registration reg = {
        .instance = 1, .block_size = BLOCK_TOKENS, .model = "m", .tenant = "default"};
    struct ki_registry *registry;
    struct publisher p;
    struct kv_error error;
    void *zmq = zmq_ctx_new();
    uint64_t took_ns;

    publisher_open(&p, zmq, where);
    reg.endpoint = p.endpoint;
    if (ki_registry_create(&opts, &registry) < 0 ||
        ki_registry_register(registry, &reg, &error) < 0)
        bench_die("can't register", 0);
    publisher_await(&p, 1);
    publisher_start(&p, &load->batches);
    while (!answers(registry, load))
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    took_ns = kv_now_ns() - p.started_ns;
    publisher_close(&p);
    zmq_ctx_term(zmq);
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); /* counters follow the writes */
    check_worker(registry);
    *ret_per_cpu_s = (double)load->blocks * KV_NS_PER_S / ((double)event_thread_ns() + 1);
    ki_registry_destroy(registry);
    return (double)load->blocks / ((double)took_ns / KV_NS_PER_S);
}

static double thrown_away(const struct load *load, const char *where)
{
    struct publisher p;
    void *zmq = zmq_ctx_new(), *socket = zmq_socket(zmq, ZMQ_SUB);
    int queue = 16384;
    uint64_t took_ns;

    publisher_open(&p, zmq, where);
    zmq_setsockopt(socket, ZMQ_RCVHWM, &queue, sizeof(queue));
    zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0);
    if (zmq_connect(socket, p.endpoint))
        bench_die("can't connect", 0);
    publisher_await(&p, 1);
    publisher_start(&p, &load->batches);
    for (size_t i = 0; i < (size_t)3 * BATCHES; i++) {
        zmq_msg_t frame;

        zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, socket, 0) < 0)
            bench_die("can't receive", 0);
        zmq_msg_close(&frame);
    }
    took_ns = kv_now_ns() - p.started_ns;
    publisher_close(&p);
    zmq_close(socket);
    zmq_ctx_term(zmq);
    return (double)load->blocks / ((double)took_ns / KV_NS_PER_S);
}

static void measure(const char *name, const struct load *load, const char *where)
{
    double ours[ROUNDS], yardstick[ROUNDS], cpu[ROUNDS];

    for (int i = 0; i < ROUNDS; i++) {
        ours[i] = indexed(load, where, &cpu[i]);
        yardstick[i] = thrown_away(load, where);
    }
    qsort(ours, ROUNDS, sizeof(ours[0]), bench_by_value);
    qsort(yardstick, ROUNDS, sizeof(yardstick[0]), bench_by_value);
    qsort(cpu, ROUNDS, sizeof(cpu[0]), bench_by_value);
    bench_line(
        "ingest",
        "'figure':'%s','unit':'blocks/"
        "s','value':%.0f,'best':%.0f,'per_cpu_second_of_event_thread':%.0f,'yardstick_received_and_"
        "thrown_away':%.0f,'ratio':%.2f,'bytes_per_block':%.1f,'blocks':%" PRIu64
        ",'block_tokens':%d,'rounds':%d,'transport':'%.6s'",
        name, ours[ROUNDS / 2], ours[ROUNDS - 1], cpu[ROUNDS / 2], yardstick[ROUNDS / 2],
        ours[ROUNDS / 2] / yardstick[ROUNDS / 2],
        (double)load->batches.payloads.len / (double)load->blocks, load->blocks, BLOCK_TOKENS,
        ROUNDS, where);
}

/* -- Dynamo's events of one block each --------------------------------------------------------- */

enum { DYNAMO_BLOCKS = 1 << 20, DYNAMO_CHAIN = 64, DYNAMO_PUBLISHER = 42 };

/* Encode all blocks, @per_message events an envelope. */
static void make_envelopes(struct batches *ret, uint32_t per_message)
{
    struct kve_envelope envelope = {.publisher = DYNAMO_PUBLISHER,
                                    .topic = {KVE_ENVELOPE_TOPIC, strlen(KVE_ENVELOPE_TOPIC)}};
    struct kv_buf events = KV_BUF_INIT;
    struct kv_block block;
    struct kve_router_event event = {
        .holder.worker = 1, .type = KVE_OP_STORE, .blocks = &block, .n = 1};

    batches_init(ret, DYNAMO_BLOCKS / per_message);
    for (uint64_t i = 0; i < DYNAMO_BLOCKS; i++) {
        if (i % per_message == 0) {
            kv_buf_clear(&events);
            kv_msgpack_put_array(&events, per_message);
        }
        block = (struct kv_block){block_hash(i + 1), block_hash(i * 3 + 7)};
        event.event_id = i + 1;
        event.has_parent = i % DYNAMO_CHAIN;
        event.parent = block_hash(i);
        kve_router_event_pack(&events, &event);
        if (i % per_message != per_message - 1)
            continue;
        envelope.sequence = ret->n;
        envelope.payload = (struct kv_str){events.data, events.len};
        kve_envelope_write(&ret->payloads, &envelope);
        ret->offsets[++ret->n] = ret->payloads.len;
    }
    if (events.error || ret->payloads.error)
        bench_die("out of memory", 0);
    kv_buf_fini(&events);
}

static double thread_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Hand all messages to a listener. Returns blocks a second of this thread's processor. */
static double applied(const struct batches *batches)
{
    struct ki_registry_opts opts = {.threads = 1};
    const struct ki_registration reg = {.instance = 1,
                                        .block_size = BLOCK_TOKENS,
                                        .endpoint = "fed",
                                        .fed = true,
                                        .has_publisher = true,
                                        .publisher = DYNAMO_PUBLISHER,
                                        .model = "m",
                                        .tenant = "default"};
    struct ki_worker_info info = {0};
    struct ki_registry *registry;
    struct ki_listener *listener;
    struct kv_error error;
    double start;

    if (ki_registry_create(&opts, &registry) < 0 ||
        ki_registry_register(registry, &reg, &error) < 0)
        bench_die("can't register", 0);
    listener = ki_registry_listener(registry, 1, 0);
    while (!ki_listener_has_started(listener))
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    start = thread_seconds();
    for (size_t i = 0; i < batches->n; i++) {
        const char *data = (const char *)batches->payloads.data + batches->offsets[i];
        struct kve_message message = {
            .sequence = i,
            .has_publisher = true,
            .publisher = DYNAMO_PUBLISHER,
            .payload = {data, batches->offsets[i + 1] - batches->offsets[i]}};

        if (ki_listener_feed_message(listener, &message) < 0)
            bench_die("the listener is gone", 0);
    }
    start = thread_seconds() - start;
    ki_listener_info(listener, &info);
    if (info.held != DYNAMO_BLOCKS || info.reasons & ~KI_BECAUSE(STALE))
        bench_die("events were lost", 0);
    free(info.endpoint);
    free(info.model);
    free(info.tenant);
    free(info.last_error);
    free(info.groups);
    ki_listener_release(listener);
    ki_registry_destroy(registry);
    return DYNAMO_BLOCKS / start;
}

static void measure_dynamo(uint32_t per_message)
{
    struct batches batches;
    double rates[ROUNDS];

    make_envelopes(&batches, per_message);
    for (int i = 0; i < ROUNDS; i++)
        rates[i] = applied(&batches);
    qsort(rates, ROUNDS, sizeof(rates[0]), bench_by_value);
    bench_line("ingest",
               "'figure':'dynamo_single_blocks','unit':'blocks/s','events_per_message':%u,"
               "'per_cpu_second':%.0f,'best':%.0f,'blocks':%d,'bytes_per_block':%.1f,'rounds':%d",
               per_message, rates[ROUNDS / 2], rates[ROUNDS - 1], DYNAMO_BLOCKS,
               (double)batches.payloads.len / DYNAMO_BLOCKS, ROUNDS);
    batches_fini(&batches);
}

int main(int argc, char **argv)
{
    struct load load;

    bench_usage(argc, argv, NULL);
    make_load(&load, 0);
    measure("zmq_to_queryable", &load, "tcp://127.0.0.1:*");
    batches_fini(&load.batches);
    /* A cache of 100 thousand blocks; when it is full, each store evicts as many blocks. */
    make_load(&load, 100000 / batch_blocks);
    measure("zmq_to_queryable_full_cache", &load, "tcp://127.0.0.1:*");
    batches_fini(&load.batches);
    measure_dynamo(256);
    measure_dynamo(1);
    return 0;
}
