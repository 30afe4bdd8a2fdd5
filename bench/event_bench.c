// SPDX-License-Identifier: Apache-2.0
/*
 * Parsing of events: blocks per second on one core from payloads to index operations, with the
 * hashing of 16-token blocks, for batches as engines publish them. Yardsticks of the same run, on
 * the same bytes: copying them, and skipping over their msgpack (kv_msgpack_skip).
 *
 *   prefill  a batch of 8 events of 128 blocks, as when prompts come in
 *   decode   a batch of 256 events of one block, as when many requests generate
 *
 * And envelopes of Dynamo's event plane (the encoding "envelope"), whose blocks are hashed already: beside
 * passing over the msgpack of the events in them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/json/msgpack.h"
#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "kv_event.h"
#include "support.h"

#define BLOCK_SIZE 16
#define VOCABULARY 151936
#define ROUNDS 9
#define ROUND_NS (150 * KV_NS_PER_MS)

struct shape {
    const char *name;
    unsigned events, blocks; /* per batch, per event */
    enum kve_encoding encoding;
    bool envelope; /* of Dynamo's plane: no encoding of engines */
};

static uint64_t random_state = 88172645463325252u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Token ids distributed as in text: most of them small, the rest anywhere. */
static uint32_t some_token(void)
{
    uint64_t random = next_random();

    return (uint32_t)((random >> 20) % (random % 4 ? 20000 : VOCABULARY));
}

static void put_fields(struct kv_buf *out, const struct shape *shape, unsigned which)
{
    static const char *const names[] = {
        "type",   "block_hashes", "parent_block_hash", "token_ids", "block_size",        "lora_id",
        "medium", "lora_name",    "extra_keys",        "group_idx", "kv_cache_spec_kind"};

    if (shape->encoding == KVE_ENCODING_MAP)
        kv_msgpack_put_str(out, names[which]);
}

/* Write a stored event as vLLM does: eleven fields by name, or twelve by position. */
static void put_event(struct kv_buf *out, const struct shape *shape)
{
    bool map = shape->encoding == KVE_ENCODING_MAP;
    unsigned n = shape->blocks;

    (map ? kv_msgpack_put_map : kv_msgpack_put_array)(out, map ? 11 : 12);
    put_fields(out, shape, 0);
    kv_msgpack_put_str(out, "BlockStored");
    put_fields(out, shape, 1);
    kv_msgpack_put_array(out, n);
    for (unsigned i = 0; i < n; i++)
        kv_msgpack_put_u64(out, next_random());
    put_fields(out, shape, 2);
    kv_msgpack_put_u64(out, next_random());
    put_fields(out, shape, 3);
    kv_msgpack_put_array(out, n * BLOCK_SIZE);
    for (unsigned i = 0; i < n * BLOCK_SIZE; i++)
        kv_msgpack_put_u64(out, some_token());
    put_fields(out, shape, 4);
    kv_msgpack_put_u64(out, BLOCK_SIZE);
    put_fields(out, shape, 5);
    kv_msgpack_put_nil(out);
    put_fields(out, shape, 6);
    kv_msgpack_put_str(out, "GPU");
    put_fields(out, shape, 7);
    kv_msgpack_put_nil(out);
    put_fields(out, shape, 8);
    kv_msgpack_put_array(out, n);
    for (unsigned i = 0; i < n; i++)
        kv_msgpack_put_nil(out);
    put_fields(out, shape, 9);
    kv_msgpack_put_u64(out, 0);
    put_fields(out, shape, 10);
    kv_msgpack_put_str(out, "full_attention");
    if (!map)
        kv_msgpack_put_nil(out);
}

static void make_batch(struct kv_buf *out, const struct shape *shape)
{
    kv_buf_clear(out);
    kv_msgpack_put_array(out, 3);
    kv_msgpack_put_double(out, 1757500000.25);
    kv_msgpack_put_array(out, shape->events);
    for (unsigned i = 0; i < shape->events; i++)
        put_event(out, shape);
    kv_msgpack_put_u64(out, 0);
}

/* Write an envelope of the same number of events and blocks. @ret_events: its payload, for the yardstick. */
static void make_envelope(struct kv_buf *out, struct kv_buf *ret_events, const struct shape *shape)
{
    static struct kv_block blocks[128];
    struct kve_router_event event = {.holder.worker = next_random(),
                                     .type = KVE_OP_STORE,
                                     .has_parent = true,
                                     .blocks = blocks,
                                     .n = shape->blocks};
    struct kve_envelope envelope = {.publisher = next_random(),
                                    .published_ms = UINT64_C(1757500000250),
                                    .topic = {KVE_ENVELOPE_TOPIC, strlen(KVE_ENVELOPE_TOPIC)}};

    kv_buf_clear(ret_events);
    kv_msgpack_put_array(ret_events, shape->events);
    for (unsigned i = 0; i < shape->events; i++) {
        for (unsigned k = 0; k < shape->blocks; k++)
            blocks[k] = (struct kv_block){next_random(), next_random()};
        event.event_id++;
        event.parent = next_random();
        kve_router_event_pack(ret_events, &event);
    }
    kv_buf_clear(out);
    envelope.payload = (struct kv_str){ret_events->data, ret_events->len};
    kve_envelope_write(out, &envelope);
}

/* -- measured functions ------------------------------------------------------------------------ */

struct work {
    const struct kv_buf *payload;
    struct kve_reader *reader;
    char *copy;
    size_t blocks; /* per batch */
};

static void do_decode(struct work *work)
{
    struct kve_batch batch;

    if (kve_reader_decode(work->reader, work->payload->data, work->payload->len, &batch) < 0 ||
        batch.n_blocks != work->blocks)
        abort();
}

static void do_skip(struct work *work)
{
    struct kv_msgpack m;

    kv_msgpack_init(&m, work->payload->data, work->payload->len);
    kv_msgpack_skip(&m);
    if (m.p != m.end)
        abort();
}

static void do_copy(struct work *work)
{
    memcpy(work->copy, work->payload->data, work->payload->len);
    __asm__ volatile("" : : "r"(work->copy) : "memory");
}

/* Return the nanoseconds of a call: the median of several rounds. */
static double measure(void (*fn)(struct work *), struct work *work)
{
    double ns[ROUNDS];

    for (int round = 0; round < ROUNDS; round++) {
        uint64_t started = bench_thread_cpu_ns(), now = started, calls = 0;

        do {
            for (int i = 0; i < 16; i++)
                fn(work);
            calls += 16;
            now = bench_thread_cpu_ns();
        } while (now - started < ROUND_NS / ROUNDS);
        ns[round] = (double)(now - started) / (double)calls;
    }
    qsort(ns, ROUNDS, sizeof(*ns), bench_by_value);
    return ns[ROUNDS / 2];
}

static void report(const char *what, const struct shape *shape, const struct work *work, double ns)
{
    const char *encoding = shape->envelope                       ? "envelope"
                           : shape->encoding == KVE_ENCODING_MAP ? "map"
                                                                 : "array";

    bench_line("event",
               "'figure':'%s','batch':'%s','encoding':'%s','events':%u,'blocks_per_event':%u,'"
               "block_size':%d,'payload_bytes':%zu,'ns_per_block':%.1f,'blocks_per_s':%.0f,'gb_per_"
               "s':%.2f,'time':'cpu','threads':1",
               what, shape->name, encoding, shape->events, shape->blocks, BLOCK_SIZE,
               work->payload->len, ns / (double)work->blocks, (double)work->blocks / ns * 1e9,
               (double)work->payload->len / ns);
}

static void bench_hashing(void)
{
    enum { BLOCKS = 512 };
    static uint32_t tokens[BLOCKS * BLOCK_SIZE];
    static uint64_t hashes[BLOCKS];
    uint64_t started, now, calls = 0;

    for (size_t i = 0; i < KV_COUNT(tokens); i++)
        tokens[i] = some_token();
    started = now = bench_thread_cpu_ns();
    for (; now - started < ROUND_NS; now = bench_thread_cpu_ns(), calls += 16) {
        for (int i = 0; i < 16; i++) {
            kve_hash_tokens(KVE_SEED, tokens, KV_COUNT(tokens), BLOCK_SIZE, false, hashes);
            __asm__ volatile("" : : "r"(hashes) : "memory");
        }
    }
    bench_line("event",
               "'figure':'hash_tokens','blocks':%d,'block_size':%d,'ns_per_block':%.2f,'us_per_"
               "prompt':%.2f,'time':'cpu','threads':1",
               BLOCKS, BLOCK_SIZE, (double)(now - started) / (double)(calls * BLOCKS),
               (double)(now - started) / (double)calls / 1000);
}

int main(int argc, char **argv)
{
    static const struct shape shapes[] = {
        {"prefill", 8, 128, KVE_ENCODING_MAP, false},
        {"prefill", 8, 128, KVE_ENCODING_ARRAY, false},
        {"decode", 256, 1, KVE_ENCODING_MAP, false},
        {"decode", 256, 1, KVE_ENCODING_ARRAY, false},
        {"prefill", 8, 128, 0, true},
        {"decode", 256, 1, 0, true},
    };
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = BLOCK_SIZE};
    struct kv_buf payload = KV_BUF_INIT, events = KV_BUF_INIT;
    struct work work = {.payload = &payload};

    bench_usage(argc, argv, NULL);
    if (kve_reader_create(&opts, &work.reader) < 0)
        return 1;
    for (size_t i = 0; i < KV_COUNT(shapes); i++) {
        if (shapes[i].envelope)
            make_envelope(&payload, &events, &shapes[i]);
        else
            make_batch(&payload, &shapes[i]);
        work.blocks = (size_t)shapes[i].events * shapes[i].blocks;
        work.copy = malloc(payload.len);
        if (!work.copy)
            return 1;
        report("decode", &shapes[i], &work, measure(do_decode, &work));
        work.payload = shapes[i].envelope ? &events : &payload;
        report("yardstick_skip", &shapes[i], &work, measure(do_skip, &work));
        report("yardstick_memcpy", &shapes[i], &work, measure(do_copy, &work));
        free(work.copy);
        work.payload = &payload;
    }
    bench_hashing();
    kve_reader_destroy(work.reader);
    kv_buf_fini(&payload);
    kv_buf_fini(&events);
    return 0;
}
