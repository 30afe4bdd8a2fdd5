// SPDX-License-Identifier: Apache-2.0
/* Streams of a dump, and its marks: for each rank the stream that brings it. */
#include "indexer/replica/dump_reader_impl.h"

#include <stdlib.h>

#include "base/core/xxh.h"
#include "event/reader/reader_state.h"

#define STREAM_BYTES 16384 /* memory of a stream's state, without salts */

static uint32_t *slot_of(const struct ki_dump_reader *reader, const struct ki_dumped_model *m,
                         struct kv_holder holder)
{
    const struct ki_mark *marks = (const struct ki_mark *)m->marks.data;
    size_t at = kv_xxh64(&holder.worker, sizeof(holder.worker), reader->secret + holder.rank);

    for (;; at++) {
        uint32_t *slot = &m->slots[at & (m->n_slots - 1)];

        if (!*slot || (marks[*slot - 1].holder.worker == holder.worker &&
                       marks[*slot - 1].holder.rank == holder.rank))
            return slot;
    }
}

static bool grow_slots(struct ki_dump_reader *reader, struct ki_dumped_model *m, size_t n)
{
    const struct ki_mark *marks = (const struct ki_mark *)m->marks.data;

    if (2 * n < m->n_slots)
        return true;
    free(m->slots);
    m->n_slots = m->n_slots ? 2 * m->n_slots : 64;
    m->slots = calloc(m->n_slots, sizeof(*m->slots));
    if (!m->slots)
        return false;
    for (size_t i = 0; i < n; i++)
        *slot_of(reader, m, marks[i].holder) = (uint32_t)i + 1;
    return true;
}

struct ki_mark *ki_dump_mark(struct ki_dump_reader *reader, struct kv_json *json,
                             struct ki_dumped_model *m, struct kv_holder holder)
{
    struct ki_mark fresh = {.holder = holder};
    size_t n = m->marks.len / sizeof(fresh);
    uint32_t *slot;

    if (!grow_slots(reader, m, n)) {
        m->n_slots = 0;
        kv_json_fail(json, -ENOMEM, "out of memory");
        return NULL;
    }
    slot = slot_of(reader, m, holder);
    if (!*slot) {
        kv_buf_append(&m->marks, &fresh, sizeof(fresh));
        if (m->marks.error) {
            kv_json_fail(json, m->marks.error, "too many ranks");
            return NULL;
        }
        *slot = (uint32_t)n + 1;
    }
    return (struct ki_mark *)m->marks.data + (*slot - 1);
}

/* -- streams ----------------------------------------------------------------------------------- */

static struct ki_snapshot *add_snapshot(struct kv_json *json, struct ki_dumped_model *m)
{
    struct ki_snapshot **grown =
        realloc(m->snapshots, (m->n_snapshots + 1) * sizeof(struct ki_snapshot *));

    if (grown)
        m->snapshots = grown;
    if (!grown || ki_snapshot_create(&grown[m->n_snapshots]) < 0) {
        kv_json_fail(json, -ENOMEM, "out of memory");
        return NULL;
    }
    return grown[m->n_snapshots++];
}

/* Note which stream brings a rank. Of several streams the registered one counts, or the first. */
static void note_rank(struct ki_dump_reader *reader, struct kv_json *json,
                      struct ki_dumped_model *m, const struct ki_snapshot *s, uint32_t rank)
{
    struct ki_mark *mark = ki_dump_mark(reader, json, m, (struct kv_holder){s->instance, rank});

    if (!mark || !s->has_position || (mark->has_position && rank != s->rank))
        return;
    mark->has_position = true;
    mark->stream_rank = s->rank;
    mark->sequence = s->state.sequence;
}

void ki_dump_read_stream(struct ki_dump_reader *reader, struct kv_json *json,
                         struct ki_dumped_model *m)
{
    struct ki_snapshot *s = add_snapshot(json, m);
    struct kv_str key;

    if (!s)
        return;
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "events")) {
            ki_dump_read_events(reader, json, m);
        } else if (kv_str_eq(key, "packed_events")) {
            ki_dump_read_packed_events(reader, json, m);
        } else if (kv_str_eq(key, "extras")) {
            kv_json_array(json);
            while (kv_json_next_item(json))
                ki_dump_read_extra(reader, json, m);
        } else if (!ki_snapshot_read(s, json, key)) {
            kv_json_skip(json);
        }
    }
    for (size_t i = 0; i < ki_snapshot_n_ranks(s); i++)
        note_rank(reader, json, m, s, ki_snapshot_rank(s, i));
    note_rank(reader, json, m, s, s->rank);
    reader->done_bytes += STREAM_BYTES + kve_reader_salt_bytes(s->reader) + s->ranges.capacity;
    if (!kv_json_failed(json) && ki_dump_is_too_large(reader, m))
        kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
}

/* Sort the streams. One that is told twice can't be relied on: keep it once, torn. */
static void sort_snapshots(struct ki_dumped_model *m)
{
    size_t kept = 0;

    if (m->n_snapshots)
        qsort(m->snapshots, m->n_snapshots, sizeof(struct ki_snapshot *), ki_snapshot_compare);
    for (size_t i = 0; i < m->n_snapshots; i++) {
        if (kept && ki_snapshot_compare(&m->snapshots[kept - 1], &m->snapshots[i]) == 0) {
            m->snapshots[kept - 1]->torn = true;
            ki_snapshot_free(m->snapshots[i]);
        } else {
            m->snapshots[kept++] = m->snapshots[i];
        }
    }
    m->n_snapshots = kept;
}

static struct ki_snapshot *snapshot_of(const struct ki_dumped_model *m, const struct ki_mark *mark)
{
    return mark->has_position ? ki_snapshot_find(m->snapshots, m->n_snapshots, mark->holder.worker,
                                                 mark->stream_rank)
                              : NULL;
}

void ki_dump_judge_streams(struct ki_dump_reader *reader, struct ki_dumped_model *m)
{
    struct ki_mark *marks = (struct ki_mark *)(void *)m->marks.data;
    size_t n = m->marks.len / sizeof(*marks);
    struct kvi_stats stats = {.size = sizeof(stats)};
    struct ki_snapshot *s;

    sort_snapshots(m);
    for (size_t i = 0; i < n; i++) {
        marks[i].torn |= m->has_streams && !marks[i].has_position;
        s = snapshot_of(m, &marks[i]);
        if (s)
            s->torn |= marks[i].torn || s->unusable;
    }
    for (size_t i = 0; i < n; i++) {
        s = snapshot_of(m, &marks[i]);
        marks[i].torn |= s && s->torn;
    }
    free(m->slots);
    m->slots = NULL;
    m->n_slots = 0;
    kvi_get_stats(m->index, &stats);
    reader->done_bytes += stats.bytes;
}
