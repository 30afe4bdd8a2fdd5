// SPDX-License-Identifier: Apache-2.0
/*
 * Batches of Dynamo's event plane: an envelope around RouterEvents, whose blocks are hashed already.
 *
 *     envelope ──► publisher as expected? ──► each event: worker and rank as expected? ──► operation
 *                                             └─ event_id: one more than the last, or events are missing
 *
 * Such publishers name a block once however many copies they have, so operations are single ones.
 */
#include "event/reader/reader.h"

#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"

#define ALL_TIERS ((1u << KV_N_TIERS) - 1)

void kve_reader_expect(struct kve_reader *reader, uint64_t publisher, uint64_t worker,
                       uint32_t rank)
{
    reader->expected = (struct kve_expected){true, publisher, worker, rank};
}

/* Note the number of an event of the expected rank: each has one more than the one before. */
static void note_event_id(struct kve_reader *reader, uint64_t id)
{
    reader->misses_events |= reader->has_event_id && id != reader->event_id + 1;
    reader->has_event_id = true;
    reader->event_id = id;
}

/* Put the hashes of @ev's blocks behind those of the scratch, for the check for duplicates. */
static int put_hashes(struct kve_reader *reader, const struct kve_router_event *ev)
{
    struct kve_scratch *scratch = &reader->scratch;
    uint64_t *hashes;

    if (kve_grow(&scratch->hashes, &scratch->hashes_capacity, scratch->n_hashes + ev->n,
                 sizeof(*scratch->hashes)) < 0)
        return -ENOMEM;
    if (!ev->n) /* there may be no array yet */
        return 0;
    hashes = scratch->hashes + scratch->n_hashes;
    if (ev->type == KVE_OP_REMOVE)
        memcpy(hashes, ev->hashes, ev->n * sizeof(*hashes));
    for (size_t i = 0; ev->type == KVE_OP_STORE && i < ev->n; i++)
        hashes[i] = ev->blocks[i].hash;
    return 0;
}

/* Show the event, whose hashes are at the end of the scratch, as an engine's own is shown. */
static void show(struct kve_reader *reader, const struct kve_router_event *ev)
{
    const char *tier = kve_tier_name(ev->tier);
    struct kve_raw_event raw = {.type = KVE_RAW_CLEARED};

    if (ev->type != KVE_OP_CLEAR)
        raw = (struct kve_raw_event){.type = ev->type == KVE_OP_STORE ? KVE_RAW_STORED
                                                                      : KVE_RAW_REMOVED,
                                     .has_parent = ev->has_parent,
                                     .parent = ev->parent,
                                     .n_hashes = ev->n,
                                     .medium = {tier, strlen(tier)}};
    reader->watch(reader->watch_arg, &(struct kve_seen){&raw, kve_event_hashes(reader),
                                                        ev->holder.rank, true, ev->holder.worker});
}

static int add_stored(struct kve_reader *reader, const struct kve_router_event *ev,
                      struct kve_op *op)
{
    size_t start = reader->n_blocks;
    int rc = kve_unique_check(&reader->unique, ev->has_parent ? &ev->parent : NULL,
                              kve_event_hashes(reader), ev->n);

    if (rc <= 0)
        return rc ? rc : KVE_SKIP_RC(DUPLICATE_HASH);
    if (kve_grow(&reader->blocks, &reader->blocks_capacity, start + ev->n,
                 sizeof(*reader->blocks)) < 0)
        return -ENOMEM;
    memcpy(reader->blocks + start, ev->blocks, ev->n * sizeof(*ev->blocks));
    op->has_parent = ev->has_parent;
    op->parent = ev->parent;
    op->n = ev->n;
    rc = kve_add_op(reader, op, start);
    if (!rc)
        reader->n_blocks += ev->n;
    return rc;
}

static int add_event(struct kve_reader *reader, const struct kve_router_event *ev)
{
    struct kve_op op = {
        .type = ev->type, .tier = ev->tier, .rank = ev->holder.rank, .single = true};
    int rc = ev->type == KVE_OP_CLEAR ? 0 : put_hashes(reader, ev);

    if (rc < 0)
        return rc;
    if (KV_UNLIKELY(reader->watch))
        show(reader, ev);
    if (ev->type == KVE_OP_CLEAR) { /* Dynamo's router empties all tiers of the rank */
        op.tiers = ALL_TIERS;
        return kve_add_op(reader, &op, 0);
    }
    if (!ev->n)
        return 0;
    if (ev->type == KVE_OP_STORE)
        return add_stored(reader, ev, &op);
    return kve_add_hashes_op(reader, &op, ev->n);
}

/* Return true when an event is the expected rank's, or all are. */
static bool is_expected(const struct kve_reader *reader, const struct kve_router_event *ev)
{
    const struct kve_expected *e = &reader->expected;

    return !e->given || (ev->holder.worker == e->worker && ev->holder.rank == e->rank);
}

/* Read one event. Returns 0, KVE_SKIP_RC(...), -EPROTO (no msgpack) or -ENOMEM. */
static int read_event(struct kve_reader *reader, struct kv_msgpack *m)
{
    const uint8_t *before = m->p;
    struct kve_router_event ev;
    int rc = kve_router_event_unpack(m, &reader->routed, &ev);

    if (rc > 0) { /* reading has stopped anywhere: go behind the event */
        m->p = before;
        m->error.code = 0;
        kv_msgpack_skip(m);
        if (kv_msgpack_failed(m))
            return -EPROTO;
    }
    if (rc < 0)
        return rc;
    if (rc == KVE_SKIP_RC(MALFORMED) && reader->expected.given) /* it may not tell whose it is */
        return rc;
    reader->event.rank = ev.holder.rank;
    if (rc != KVE_SKIP_RC(MALFORMED) && !is_expected(reader, &ev))
        return KVE_SKIP_RC(REMOTE);
    if (reader->expected.given)
        note_event_id(reader, ev.event_id);
    if (!rc)
        reader->event.tiers = 1u << ev.tier;
    return rc ? rc : add_event(reader, &ev);
}

static int read_events(struct kve_reader *reader, struct kv_str payload, struct kve_batch *batch)
{
    uint32_t rank = reader->expected.given ? reader->expected.rank : reader->rank, n;
    struct kv_msgpack m;

    kv_msgpack_init(&m, payload.p, payload.len);
    n = kv_msgpack_array(&m);
    if (kv_msgpack_failed(&m))
        return -EPROTO;
    batch->n_events = n;
    for (uint32_t i = 0; i < n; i++) {
        int rc;

        if (i == reader->max_events) {
            batch->skipped[KVE_SKIP_TOO_LARGE] += n - i;
            reader->event = (struct kve_lost){rank, 0, ALL_TIERS};
            kve_note_lost(reader);
            return 0;
        }
        reader->event = (struct kve_lost){rank, 0, ALL_TIERS};
        rc = read_event(reader, &m);
        if (rc < 0)
            return rc;
        if (rc > 0)
            batch->skipped[rc - 1]++;
        if (rc > 0 && rc != KVE_SKIP_RC(REMOTE))
            kve_note_lost(reader);
    }
    return m.p == m.end ? 0 : -EPROTO;
}

int kve_read_routed(struct kve_reader *reader, const void *data, size_t len,
                    struct kve_batch *batch)
{
    struct kve_envelope envelope;

    reader->misses_events = false;
    if (kve_envelope_read(data, len, &envelope) < 0)
        return -EPROTO;
    if (reader->expected.given && envelope.publisher != reader->expected.publisher)
        return -EPROTO;
    batch->timestamp = (double)envelope.published_ms / 1000;
    if (!reader->routed.items.limit) /* of one event: as many blocks as tokens of an engine's */
        reader->routed.items.limit = reader->scratch.max_items * sizeof(struct kv_block);
    return read_events(reader, envelope.payload, batch);
}
