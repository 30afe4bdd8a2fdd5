// SPDX-License-Identifier: Apache-2.0
/* Marks of a dump: for each rank its stream's position, and whether the dump has all of it. */
#include "indexer/replica/dump_reader_impl.h"

#include <stdlib.h>

#include "base/xxh.h"

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

/* Read member @key, if it tells of which rank an object is. */
static bool read_holder(struct kv_holder *holder, struct kv_json *json, struct kv_str key)
{
    if (kv_str_eq(key, "worker_id"))
        holder->worker = kv_json_u64(json, UINT64_MAX);
    else if (kv_str_eq(key, "dp_rank"))
        holder->rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
    else
        return false;
    return true;
}

void ki_dump_read_mark(struct ki_dump_reader *reader, struct kv_json *json,
                       struct ki_dumped_model *m)
{
    bool has_worker = false, has_sequence = false, has_rank = false;
    /* Whose reasons aren't told is partial. */
    struct ki_mark mark = {.has_position = true, .at.reasons = KI_BECAUSE(PEER)};
    struct ki_mark *known;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        has_worker |= kv_str_eq(key, "worker_id");
        has_sequence |= kv_str_eq(key, "seq");
        if (kv_str_eq(key, "stream_rank")) {
            mark.stream_rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
            has_rank = true;
        } else if (!read_holder(&mark.holder, json, key) && !ki_state_read(&mark.at, json, key)) {
            kv_json_skip(json);
        }
    }
    if (!has_worker || !has_sequence)
        kv_json_fail(json, -EPROTO, "a watermark without worker_id or seq");
    if (!has_rank)
        mark.stream_rank = mark.holder.rank;
    known = ki_dump_mark(reader, json, m, mark.holder);
    if (!known)
        return;
    mark.torn = known->torn;
    mark.has_end = known->has_end;
    mark.end = known->end;
    *known = mark;
}

void ki_dump_read_torn(struct ki_dump_reader *reader, struct kv_json *json,
                       struct ki_dumped_model *m)
{
    struct kv_holder holder = {0};
    struct ki_mark *mark;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key))
        if (!read_holder(&holder, json, key))
            kv_json_skip(json);
    if (kv_json_failed(json))
        return;
    mark = ki_dump_mark(reader, json, m, holder);
    if (mark)
        mark->torn = true;
}

void ki_dump_read_end(struct ki_dump_reader *reader, struct kv_json *json,
                      struct ki_dumped_model *m)
{
    struct ki_state end = {.reasons = KI_BECAUSE(PEER)};
    struct kv_holder holder = {0};
    bool has_sequence = false, exact = false;
    struct ki_mark *mark;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        has_sequence |= kv_str_eq(key, "seq");
        if (kv_str_eq(key, "exact"))
            exact = kv_json_bool(json);
        else if (!read_holder(&holder, json, key) && !ki_state_read(&end, json, key))
            kv_json_skip(json);
    }
    if (kv_json_failed(json) || !has_sequence)
        return;
    mark = ki_dump_mark(reader, json, m, holder);
    if (!mark)
        return;
    mark->has_end = exact ? KI_END_EXACT : KI_END_POSITION;
    mark->end = end;
}

static int compare_ends(const void *a, const void *b)
{
    const struct kv_holder *x = &((const struct ki_end_copies *)a)->holder;
    const struct kv_holder *y = &((const struct ki_end_copies *)b)->holder;

    if (x->worker != y->worker)
        return x->worker < y->worker ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int compare_doubts(const void *a, const void *b)
{
    const struct ki_unsure_told *x = a, *y = b;

    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* Append the rows of a sorted table that compare equal to @key. */
static void append_rows(struct kv_buf *to, const struct kv_buf *table, size_t size, const void *key,
                        int (*compare)(const void *, const void *))
{
    const char *rows = (const char *)table->data;
    size_t low = 0, high = table->len / size, n = high;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (compare(rows + middle * size, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    while (high < n && compare(rows + high * size, key) == 0)
        high++;
    kv_buf_append(to, rows + low * size, (high - low) * size);
}

/*
 * Give a stream what the dump tells of its rank's end: the copies, and the possible copies. With
 * these, the replica is partial for the other reasons alone.
 */
static void give_end(struct ki_handover *h, const struct ki_dumped_model *m, struct ki_mark *mark)
{
    const struct ki_end_copies key = {.holder = mark->holder};
    const struct ki_unsure_told doubt = {.instance = mark->holder.worker,
                                         .rank = mark->holder.rank};
    const struct ki_state *end = &mark->end;

    h->has_ends &= mark->has_end == KI_END_EXACT;
    h->doubts.known = h->has_ends;
    if (mark->has_end != KI_END_EXACT)
        return;
    h->state.facts |= end->facts & (KI_FACT_REPORTS | KI_FACT_SUSPECTS);
    append_rows(&h->ends, &m->ends, sizeof(key), &key, compare_ends);
    h->has_ends &= !h->ends.error;
    mark->at.reasons = end->reasons & ~ki_reasons_told(end->reasons, KI_TOLD_BLOCKS);
    h->doubts.trusted |= (end->facts & KI_FACT_TRUSTED) != 0;
    h->doubts.n_real = KV_MAX(h->doubts.n_real, end->n_real);
    append_rows(&h->doubts.items, &m->doubts, sizeof(doubt), &doubt, compare_doubts);
    mark->at.reasons |= h->ends.error || h->doubts.items.error ? KI_BECAUSE(PEER) : 0;
}

/* Give each stream the copies of its ranks' blocks at the dump's end. */
static void give_ends(struct ki_dumped_model *m)
{
    struct ki_mark *marks = (struct ki_mark *)(void *)m->marks.data;

    if (m->ends.len)
        qsort(m->ends.data, m->ends.len / sizeof(struct ki_end_copies),
              sizeof(struct ki_end_copies), compare_ends);
    if (m->doubts.len)
        qsort(m->doubts.data, m->doubts.len / sizeof(struct ki_unsure_told),
              sizeof(struct ki_unsure_told), compare_doubts);
    for (size_t i = 0; i < m->n_handovers; i++)
        m->handovers[i]->has_ends = m->handovers[i]->doubts.known = true;
    for (size_t i = 0; i < m->marks.len / sizeof(*marks); i++) {
        struct ki_handover key = {.instance = marks[i].holder.worker, .rank = marks[i].stream_rank};
        const struct ki_handover *wanted = &key;
        struct ki_handover **found = NULL;

        if (m->n_handovers && marks[i].has_position)
            found = bsearch(&wanted, m->handovers, m->n_handovers, sizeof(struct ki_handover *),
                            ki_handover_compare);
        if (found)
            give_end(*found, m, &marks[i]);
    }
    kv_buf_fini(&m->ends);
    kv_buf_fini(&m->doubts);
}

void ki_dump_judge_marks(struct ki_dump_reader *reader, struct ki_dumped_model *m)
{
    struct ki_mark *marks = (struct ki_mark *)m->marks.data;
    struct kvi_stats stats = {.size = sizeof(stats)};

    for (size_t i = 0; m->has_marks && i < m->marks.len / sizeof(*marks); i++)
        marks[i].torn |= !marks[i].has_position;
    m->n_handovers =
        ki_handover_note(m->handovers, m->n_handovers, marks, m->marks.len / sizeof(*marks));
    give_ends(m);
    for (size_t i = 0; i < m->marks.len / sizeof(*marks); i++)
        marks[i].at.facts |= marks[i].end.facts & KI_FACT_ADRIFT;
    free(m->slots);
    m->slots = NULL;
    m->n_slots = 0;
    kvi_get_stats(m->index, &stats);
    reader->done_bytes += stats.bytes;
}
