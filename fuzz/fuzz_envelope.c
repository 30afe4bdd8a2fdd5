// SPDX-License-Identifier: Apache-2.0
/* Envelopes and RouterEvents in msgpack: what was read can be written, and read again as the same; and the
 * reader takes the same bytes whole, whoever is expected. */

#include "event/reader/reader.h"
#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "event/wire/frames.h"
#include "require.h"

static void again(const struct kve_router_event *event)
{
    struct kve_router_scratch scratch = {0};
    struct kv_buf once = KV_BUF_INIT, twice = KV_BUF_INIT;
    struct kve_router_event read;
    struct kv_msgpack m;

    kve_router_event_pack(&once, event);
    kv_msgpack_init(&m, once.data, once.len);
    REQUIRE(kve_router_event_unpack(&m, &scratch, &read) == 0 && m.p == m.end);
    REQUIRE(read.type == event->type && read.n == event->n && read.tier == event->tier);
    REQUIRE(read.holder.worker == event->holder.worker && read.event_id == event->event_id);
    kve_router_event_pack(&twice, &read);
    REQUIRE(twice.len == once.len && memcmp(twice.data, once.data, once.len) == 0);
    kve_router_scratch_fini(&scratch);
    kv_buf_fini(&once);
    kv_buf_fini(&twice);
}

static void read_events(struct kv_str payload)
{
    struct kve_router_scratch scratch = {.items.limit = 4096};
    struct kve_router_event event;
    struct kv_msgpack m;
    uint32_t n;

    kv_msgpack_init(&m, payload.p, payload.len);
    n = kv_msgpack_array(&m);
    for (int rc = 0; n && rc == 0 && !kv_msgpack_failed(&m); n--) {
        rc = kve_router_event_unpack(&m, &scratch, &event);
        if (rc == 0)
            again(&event);
    }
    kve_router_scratch_fini(&scratch);
}

static void decode(const void *data, size_t size, const struct kve_envelope *e)
{
    struct kve_reader_opts opts = {
        .size = sizeof(opts), .block_size = 4, .max_events = 64, .max_tokens = 256};
    struct kve_reader *reader;
    struct kve_batch batch;
    int rc;

    REQUIRE(kve_reader_create(&opts, &reader) == 0);
    rc = kve_reader_decode(reader, data, size, &batch);
    REQUIRE(rc == 0 || rc == -71 /* EPROTO */);
    kve_reader_expect(reader, e->publisher, e->sequence, 0);
    rc = kve_reader_decode(reader, data, size, &batch);
    for (size_t i = 0; rc == 0 && i < batch.n_ops; i++)
        REQUIRE(batch.ops[i].rank == 0 && batch.ops[i].single);
    kve_reader_destroy(reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t id[8] = {0};
    struct kve_span frames[4] = {{"kv-events", 9}, {id, 8}, {id, 8}, {data, size}};
    struct kve_message message;
    struct kve_envelope e, copy;
    struct kv_buf out = KV_BUF_INIT;

    if (kve_message_parse_live(frames, 4, &message) == 0)
        REQUIRE(message.payload.len + KVE_DIRECT_HEAD == size);
    if (kve_envelope_read(data, size, &e) < 0)
        return 0;
    kve_envelope_write(&out, &e);
    REQUIRE(kve_envelope_read(out.data, out.len, &copy) == 0);
    REQUIRE(copy.publisher == e.publisher && copy.sequence == e.sequence);
    REQUIRE(copy.published_ms == e.published_ms && copy.payload.len == e.payload.len);
    kv_buf_fini(&out);
    read_events(e.payload);
    decode(data, size, &e);
    return 0;
}
