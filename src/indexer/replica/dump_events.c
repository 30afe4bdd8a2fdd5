// SPDX-License-Identifier: Apache-2.0
/* The events of a dump, in either form. */
#include "indexer/replica/dump_reader_impl.h"

#include "event/router/packed_event.h"

#define MAX_EVENT_BYTES (16u << 20) /* in memory at a time */
#define MAX_EXPECTED_BLOCKS (UINT64_C(1) << 28)
#define BLOCK_BYTES 24    /* least memory of a block in an index */
#define CHECK_BLOCKS 4096 /* blocks between two checks of an index's memory */

static int apply_event(struct ki_dump_reader *reader, struct kvi_index *index,
                       const struct kve_router_event *event, struct ki_mark *mark)
{
    struct kvi_stored stored = {0};
    long rc = 0;

    reader->events++;
    reader->blocks += event->n;
    switch (event->type) {
    case KVE_OP_STORE:
        rc = kvi_store(index, event->holder, event->tier, event->has_parent ? &event->parent : NULL,
                       event->blocks, event->n, &stored);
        break;
    case KVE_OP_REMOVE:
        rc = kvi_remove(index, event->holder, event->tier, event->hashes, event->n);
        break;
    case KVE_OP_CLEAR:
        rc = kvi_clear(index, event->holder);
        break;
    case KVE_OP_STORE_KNOWN: /* no dump has this type */
        break;
    }
    /*
     * The original writes a dump while the index changes: a parent may have gone, or got another name,
     * by the time its child is written. No live event brings the child again, so the rank's whole
     * stream must be asked for.
     */
    if (stored.parked || rc == -EINVAL) {
        reader->orphans++;
        mark->torn = true;
        return 0;
    }
    return rc < 0 ? (int)rc : 0;
}

/* Apply one event. Returns false when @json has failed. */
static bool take_event(struct ki_dump_reader *reader, struct kv_json *json,
                       struct ki_dumped_model *m, const struct kve_router_event *event)
{
    struct ki_mark *mark = ki_dump_mark(reader, json, m, event->holder);
    int rc;

    if (!mark)
        return false;
    rc = apply_event(reader, m->index, event, mark);
    if (rc == 0 && reader->blocks >= reader->check_at) {
        reader->check_at = reader->blocks + CHECK_BLOCKS;
        if (ki_dump_is_too_large(reader, m)) {
            kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
            return false;
        }
    }
    if (rc < 0)
        kv_json_fail(json, rc, "the index can't take more");
    return rc == 0;
}

void ki_dump_read_expected_blocks(struct ki_dump_reader *reader, struct kv_json *json,
                                  struct ki_dumped_model *m)
{
    uint64_t n = kv_json_u64(json, UINT64_MAX), most = MAX_EXPECTED_BLOCKS;
    struct kvi_index *roomy;
    struct kvi_stats stats = {.size = sizeof(stats)};

    if (reader->max_bytes)
        most = KV_MIN(most, (reader->max_bytes - KV_MIN(reader->max_bytes, reader->done_bytes)) /
                                BLOCK_BYTES);
    kvi_get_stats(m->index, &stats);
    if (kv_json_failed(json) || stats.holders ||
        ki_dump_make_index(reader, KV_MIN(n, most), &roomy) < 0) /* the index grows then */
        return;
    kvi_destroy(m->index);
    m->index = roomy;
}

/* The events of one model, in either form. */
struct event_source {
    struct kv_json *json;
    bool is_packed;
    struct kve_packed packed;
    struct kve_router_scratch scratch[2]; /* of the latest two events */
    unsigned last;
};

/*
 * Read the next event, valid until the call after the next. Returns false when there is none, or
 * @json has failed.
 */
static bool next_event(struct event_source *source, struct kve_router_event *ret)
{
    if (source->is_packed)
        return kve_packed_read(&source->packed, source->json, ret) > 0;
    source->last = !source->last;
    return kv_json_next_item(source->json) &&
           kve_router_event_read(source->json, &source->scratch[source->last], ret) == 0;
}

/* Prefetch the memory that an event needs while the one before is applied. */
static void take_events(struct ki_dump_reader *reader, struct ki_dumped_model *m,
                        struct event_source *source)
{
    struct kve_router_event event, next;
    bool more = next_event(source, &event);

    while (more) {
        more = next_event(source, &next);
        if (more && next.type == KVE_OP_STORE)
            kvi_store_soon(m->index, next.blocks, next.n);
        if (!take_event(reader, source->json, m, &event))
            return;
        event = next;
    }
}

void ki_dump_read_events(struct ki_dump_reader *reader, struct kv_json *json,
                         struct ki_dumped_model *m)
{
    struct event_source source = {.json = json, .is_packed = false};

    source.scratch[0].items.limit = source.scratch[1].items.limit = MAX_EVENT_BYTES;
    if (kv_json_array(json))
        take_events(reader, m, &source);
    kve_router_scratch_fini(&source.scratch[0]);
    kve_router_scratch_fini(&source.scratch[1]);
}

void ki_dump_read_packed_events(struct ki_dump_reader *reader, struct kv_json *json,
                                struct ki_dumped_model *m)
{
    struct event_source source = {.json = json, .is_packed = true};

    if (kv_json_raw_open(json))
        take_events(reader, m, &source);
}
