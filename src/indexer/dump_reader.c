// SPDX-License-Identifier: Apache-2.0
#include "indexer/dump_reader.h"

#include <stdlib.h>
#include <string.h>

#include "base/xxh.h"
#include "event/packed_event.h"
#include "event/reader_state.h"
#include "event/sources.h"
#include "event/unique.h"
#include "indexer/lookup.h"

/* Bounds on the memory that one model may take while it is read, beside its index. */
#define MAX_EVENT_BYTES (16u << 20)
#define MAX_MARK_BYTES (32u << 20)
#define MAX_NAME_BYTES 65536
#define MAX_SOURCE_BYTES (KVE_MAX_SOURCES * sizeof(struct kvi_source_copies)) /* of one block */
#define MAX_EXPECTED_BLOCKS (UINT64_C(1) << 28)
#define BLOCK_BYTES 24     /* least memory of a block in an index */
#define STREAM_BYTES 16384 /* memory of a stream's state, without salts */
#define CHECK_BLOCKS 4096  /* blocks between two checks of an index's memory */

static void model_fini(struct ki_dumped_model *m)
{
    free(m->name);
    free(m->tenant);
    kvi_destroy(m->index);
    kv_buf_fini(&m->marks);
    free(m->slots);
    for (size_t i = 0; i < m->n_handovers; i++)
        ki_handover_free(m->handovers[i]);
    free(m->handovers);
}

void ki_dump_reader_fini(struct ki_dump_reader *reader)
{
    for (size_t i = 0; i < reader->n; i++)
        model_fini(&reader->models[i]);
    free(reader->models);
    kv_buf_fini(&reader->sources);
    memset(reader, 0, sizeof(*reader));
}

static int make_index(const struct ki_dump_reader *reader, uint64_t expected_blocks,
                      struct kvi_index **ret)
{
    struct kvi_opts opts = {
        .size = sizeof(opts), .max_blocks = reader->max_blocks, .expected_blocks = expected_blocks};

    return kvi_create(&opts, ret);
}

static struct ki_dumped_model *add_model(struct ki_dump_reader *reader)
{
    struct ki_dumped_model *grown, *m;
    size_t capacity;

    if (reader->n == KI_DUMP_MAX_MODELS)
        return NULL;
    if (reader->n == reader->capacity) {
        capacity = reader->capacity ? reader->capacity * 2 : 16;
        grown = realloc(reader->models, capacity * sizeof(*grown));
        if (!grown)
            return NULL;
        reader->models = grown;
        reader->capacity = capacity;
    }
    m = &reader->models[reader->n];
    memset(m, 0, sizeof(*m));
    m->marks.limit = MAX_MARK_BYTES;
    if (make_index(reader, 0, &m->index) < 0)
        return NULL;
    reader->n++;
    return m;
}

static bool is_too_large(const struct ki_dump_reader *reader, const struct ki_dumped_model *m)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    if (!reader->max_bytes)
        return false;
    kvi_get_stats(m->index, &stats);
    return reader->done_bytes + stats.bytes > reader->max_bytes;
}

static char *read_name(struct kv_json *json)
{
    struct kv_buf scratch = {.limit = MAX_NAME_BYTES};
    struct kv_str text = kv_json_str(json, &scratch);
    char *name = NULL;

    if (!kv_json_failed(json) && text.len < MAX_NAME_BYTES && !memchr(text.p, '\0', text.len))
        name = strndup(text.p, text.len);
    if (!name)
        kv_json_fail(json, -EPROTO, "an unusable name");
    kv_buf_fini(&scratch);
    return name;
}

/* -- holders: what is told of each ----------------------------------------------------------------
 */

static uint32_t *slot_of(const struct ki_dump_reader *reader, const struct ki_dumped_model *m,
                         struct kv_holder holder)
{
    const struct ki_watermark *marks = (const struct ki_watermark *)m->marks.data;
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
    const struct ki_watermark *marks = (const struct ki_watermark *)m->marks.data;

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

/*
 * Return the entry of a holder, made when it is missing. Valid until the next call. NULL: too many
 * holders; @json has failed.
 */
static struct ki_watermark *mark_of(struct ki_dump_reader *reader, struct kv_json *json,
                                    struct ki_dumped_model *m, struct kv_holder holder)
{
    struct ki_watermark fresh = {.holder = holder, .no_position = true};
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
    return (struct ki_watermark *)m->marks.data + (*slot - 1);
}

static void read_mark(struct ki_dump_reader *reader, struct kv_json *json,
                      struct ki_dumped_model *m)
{
    struct ki_watermark *known;
    struct ki_watermark mark = {0};
    bool has_worker = false, has_sequence = false;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id")) {
            mark.holder.worker = kv_json_u64(json, UINT64_MAX);
            has_worker = true;
        } else if (kv_str_eq(key, "dp_rank")) {
            mark.holder.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        } else if (kv_str_eq(key, "seq")) {
            mark.sequence = kv_json_u64(json, UINT64_MAX);
            has_sequence = true;
        } else if (kv_str_eq(key, "timestamp")) {
            mark.timestamp = kv_json_null(json) ? 0 : kv_json_double(json);
        } else if (kv_str_eq(key, "partial")) {
            mark.partial = kv_json_bool(json);
        } else if (kv_str_eq(key, "stream_rank")) {
            mark.stream_rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
            mark.has_stream = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_worker || !has_sequence)
        kv_json_fail(json, -EPROTO, "a watermark without worker_id or seq");
    known = mark_of(reader, json, m, mark.holder);
    if (!known)
        return;
    mark.torn = known->torn;
    mark.has_end = known->has_end;
    mark.end = known->end;
    *known = mark;
}

static void read_torn(struct ki_dump_reader *reader, struct kv_json *json,
                      struct ki_dumped_model *m)
{
    struct kv_holder holder = {0};
    struct ki_watermark *mark;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id"))
            holder.worker = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "dp_rank"))
            holder.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else
            kv_json_skip(json);
    }
    if (kv_json_failed(json))
        return;
    mark = mark_of(reader, json, m, holder);
    if (mark)
        mark->torn = true;
}

/* Read the stream's position at the end of the dump. */
static void read_end(struct ki_dump_reader *reader, struct kv_json *json, struct ki_dumped_model *m)
{
    struct ki_watermark told = {0};
    struct ki_watermark *mark;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id")) {
            told.holder.worker = kv_json_u64(json, UINT64_MAX);
        } else if (kv_str_eq(key, "dp_rank")) {
            told.holder.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        } else if (kv_str_eq(key, "seq")) {
            told.end = kv_json_u64(json, UINT64_MAX);
            told.has_end = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (kv_json_failed(json) || !told.has_end)
        return;
    mark = mark_of(reader, json, m, told.holder);
    if (!mark)
        return;
    mark->has_end = true;
    mark->end = told.end;
}

/* Read a stream of the peer; its memory counts like the index's. */
static void read_stream(struct ki_dump_reader *reader, struct kv_json *json,
                        struct ki_dumped_model *m)
{
    struct ki_handover **grown =
        realloc(m->handovers, (m->n_handovers + 1) * sizeof(struct ki_handover *));

    if (grown)
        m->handovers = grown;
    if (!grown || ki_handover_create(&grown[m->n_handovers]) < 0) {
        kv_json_fail(json, -ENOMEM, "out of memory");
        return;
    }
    ki_handover_read(grown[m->n_handovers], json);
    reader->done_bytes += STREAM_BYTES + kve_reader_salt_bytes(grown[m->n_handovers]->reader);
    m->n_handovers++;
    if (!kv_json_failed(json) && is_too_large(reader, m))
        kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
}

/* -- events ------------------------------------------------------------------------------------ */

static int apply_event(struct ki_dump_reader *reader, struct kvi_index *index,
                       const struct kve_router_event *event, struct ki_watermark *mark)
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
     * A dump is weakly consistent: a parent may have gone, or got another name, while its child was
     * written. No live event brings the child again, so the rank's whole stream must be asked for.
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
    struct ki_watermark *mark = mark_of(reader, json, m, event->holder);
    int rc;

    if (!mark)
        return false;
    rc = apply_event(reader, m->index, event, mark);
    if (rc == 0 && reader->blocks >= reader->check_at) {
        reader->check_at = reader->blocks + CHECK_BLOCKS;
        if (is_too_large(reader, m)) {
            kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
            return false;
        }
    }
    if (rc < 0)
        kv_json_fail(json, rc, "the index can't take more");
    return rc == 0;
}

/*
 * Read the peer's number of distinct blocks, which precedes the events, and make room for all at
 * once. A peer that names too many gets no more room than --recovery-memory allows.
 */
static void read_expected_blocks(struct ki_dump_reader *reader, struct kv_json *json,
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
        make_index(reader, KV_MIN(n, most), &roomy) < 0) /* the index grows then */
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

static void read_events(struct ki_dump_reader *reader, struct kv_json *json,
                        struct ki_dumped_model *m)
{
    struct event_source source = {.json = json, .is_packed = false};

    source.scratch[0].items.limit = source.scratch[1].items.limit = MAX_EVENT_BYTES;
    if (kv_json_array(json))
        take_events(reader, m, &source);
    kve_router_scratch_fini(&source.scratch[0]);
    kve_router_scratch_fini(&source.scratch[1]);
}

static void read_packed_events(struct ki_dump_reader *reader, struct kv_json *json,
                               struct ki_dumped_model *m)
{
    struct event_source source = {.json = json, .is_packed = true};

    if (kv_json_raw_open(json))
        take_events(reader, m, &source);
}

/*
 * Read a field of windows. Returns true when @key is one; each kind of extra has a field of its
 * own.
 */
static bool read_window_field(struct kv_json *json, struct kv_str key, struct kvi_extra *extra)
{
    if (kv_str_eq(key, "group")) {
        extra->window.group = (uint32_t)kv_json_u64(json, UINT32_MAX);
        extra->kind = KVI_EXTRA_WINDOW_BLOCK;
    } else if (kv_str_eq(key, "window")) {
        extra->window.window = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "need")) {
        extra->window.need = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "stride")) {
        extra->window.stride = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "state")) {
        extra->window.state = (uint32_t)kv_json_u64(json, 1);
    } else if (kv_str_eq(key, "part")) {
        extra->window.part = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "parts")) {
        extra->window.parts = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "alone")) {
        extra->kind = KVI_EXTRA_RULE;
        extra->alone = kv_json_bool(json);
    } else if (kv_str_eq(key, "eagle_drop")) {
        extra->kind = KVI_EXTRA_RULE;
        extra->drops = kv_json_bool(json);
    } else if (kv_str_eq(key, "main_keeps")) {
        extra->main_keeps = kv_json_bool(json);
    } else if (kv_str_eq(key, "kept_groups")) {
        extra->kept_groups = kv_json_u64(json, UINT64_MAX);
    } else {
        return false;
    }
    return true;
}

/* Read one [source, copies, taken]. */
static void read_source(struct ki_dump_reader *reader, struct kv_json *json)
{
    struct kvi_source_copies copies = {0};
    uint64_t value[3] = {0};
    size_t n = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        if (n < KV_COUNT(value))
            value[n++] = kv_json_u64(json, UINT32_MAX - 1);
        else
            kv_json_skip(json);
    }
    if (n < 2)
        kv_json_fail(json, -EPROTO, "a source without its copies");
    copies.source = (uint32_t)value[0];
    copies.copies = (uint32_t)value[1];
    copies.taken = value[2] > 0;
    kv_buf_append(&reader->sources, &copies, sizeof(copies));
    if (reader->sources.error)
        kv_json_fail(json, reader->sources.error, "too many sources of a block");
}

/* Read a field of tiers and copies by source. Returns true when @key is one. */
static bool read_source_field(struct ki_dump_reader *reader, struct kv_json *json,
                              struct kv_str key, struct kvi_extra *extra)
{
    if (kv_str_eq(key, "window_group")) {
        extra->window.group = (uint32_t)kv_json_u64(json, UINT32_MAX);
        extra->in_window = true;
    } else if (kv_str_eq(key, "implied_source")) {
        extra->kind = KVI_EXTRA_TIER;
        extra->implied = (uint32_t)kv_json_u64(json, KVI_MAX_SOURCE);
    } else if (kv_str_eq(key, "counting")) {
        extra->counting = (uint32_t)kv_json_u64(json, 2);
    } else if (kv_str_eq(key, "stored_again")) {
        extra->stored_again = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "sources")) {
        extra->kind = KVI_EXTRA_COPIES;
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_source(reader, json);
    } else {
        return false;
    }
    return true;
}

static void read_extra_field(struct ki_dump_reader *reader, struct kv_json *json, struct kv_str key,
                             struct kvi_extra *extra)
{
    if (kv_str_eq(key, "worker_id")) {
        extra->holder.worker = kv_json_u64(json, UINT64_MAX);
    } else if (kv_str_eq(key, "dp_rank")) {
        extra->holder.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "block_hash")) {
        extra->hash = kv_json_u64(json, UINT64_MAX);
    } else if (kv_str_eq(key, "parent_hash")) {
        extra->parent = kv_json_u64(json, UINT64_MAX);
        extra->has_parent = true;
    } else if (kv_str_eq(key, "tokens_hash")) {
        extra->tokens_hash = kv_json_u64(json, UINT64_MAX);
    } else if (kv_str_eq(key, "tiers")) {
        extra->tiers = (uint32_t)kv_json_u64(json, (1u << KV_N_TIERS) - 1);
    } else if (kv_str_eq(key, "tier")) {
        extra->tier = (enum kv_tier)kv_json_u64(json, KV_N_TIERS - 1);
    } else if (kv_str_eq(key, "copies")) {
        extra->copies = (uint32_t)kv_json_u64(json, UINT32_MAX - 1);
    } else if (!read_window_field(json, key, extra) &&
               !read_source_field(reader, json, key, extra)) {
        kv_json_skip(json);
    }
}

/*
 * Forget a rank whose windows contradict one another, and begin it anew with @extra. A rank that
 * starts over while a peer dumps it may appear twice, with blocks of two sizes.
 */
static int begin_again(struct ki_dump_reader *reader, struct ki_dumped_model *m,
                       const struct kvi_extra *extra)
{
    const struct kvi_extra *rule = &reader->rule;
    int rc = 0;

    (void)kvi_remove_holder(m->index, extra->holder);
    if (rule->kind == KVI_EXTRA_RULE && rule->holder.worker == extra->holder.worker &&
        rule->holder.rank == extra->holder.rank)
        rc = kvi_restore_extra(m->index, rule);
    return rc < 0 ? rc : kvi_restore_extra(m->index, extra);
}

/* Restore an extra; a rank with windows that can't be is torn. Returns 0 or a negative errno. */
static int restore(struct ki_dump_reader *reader, struct ki_dumped_model *m,
                   const struct kvi_extra *extra, struct ki_watermark *mark)
{
    int rc = kvi_restore_extra(m->index, extra);

    if (extra->kind == KVI_EXTRA_RULE)
        reader->rule = *extra;
    if (extra->kind != KVI_EXTRA_WINDOW)
        return rc == -EINVAL ? 0 : rc;
    if (rc < 0)
        mark->torn = true;
    if (rc == -EEXIST || rc == -ENOSPC)
        rc = begin_again(reader, m, extra);
    return rc == -EINVAL ? 0 : rc;
}

static void read_extra(struct ki_dump_reader *reader, struct kv_json *json,
                       struct ki_dumped_model *m)
{
    struct kvi_extra extra = {.copies = 0};
    struct ki_watermark *mark;
    bool is_placed = false;
    struct kv_str key;
    int rc;

    kv_buf_clear(&reader->sources);
    reader->sources.limit = MAX_SOURCE_BYTES;
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        is_placed |= kv_str_eq(key, "tokens_hash");
        read_extra_field(reader, json, key, &extra);
    }
    extra.sources = (const struct kvi_source_copies *)(const void *)reader->sources.data;
    extra.n_sources = reader->sources.len / sizeof(*extra.sources);
    if (extra.kind == KVI_EXTRA_WINDOW_BLOCK && extra.window.need)
        extra.kind = KVI_EXTRA_WINDOW;
    else if (extra.kind == KVI_EXTRA_WINDOW_BLOCK && is_placed)
        extra.kind = KVI_EXTRA_PLACE;
    mark = kv_json_failed(json) ? NULL : mark_of(reader, json, m, extra.holder);
    if (!mark)
        return;
    rc = restore(reader, m, &extra, mark);
    if (rc == 0 && is_too_large(reader, m))
        kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
    else if (rc < 0)
        kv_json_fail(json, rc, "the index can't take more");
}

/* -- models ------------------------------------------------------------------------------------ */

/*
 * Split "name:tenant" for dumps that give no separate fields. The last colon counts, since names
 * contain colons more often.
 */
static int name_from_key(struct ki_dumped_model *m, const char *key)
{
    const char *colon = strrchr(key, ':');

    if (!m->name)
        m->name = colon ? strndup(key, (size_t)(colon - key)) : strdup(key);
    if (!m->tenant)
        m->tenant = strdup(colon ? colon + 1 : "default");
    return m->name && m->tenant ? 0 : -ENOMEM;
}

static void read_field(struct ki_dump_reader *reader, struct kv_json *json,
                       struct ki_dumped_model *m, struct kv_str key)
{
    if (kv_str_eq(key, "block_size")) {
        m->block_size = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "hash_lookahead")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            m->forms |= KI_FORM(kv_json_u64(json, KI_MAX_LOOKAHEAD), false);
    } else if (kv_str_eq(key, "placed_mm_lookahead")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            m->forms |= KI_FORM(kv_json_u64(json, KI_MAX_LOOKAHEAD), true);
    } else if (kv_str_eq(key, "events")) {
        read_events(reader, json, m);
    } else if (kv_str_eq(key, "expected_blocks")) {
        read_expected_blocks(reader, json, m);
    } else if (kv_str_eq(key, "packed_events")) {
        read_packed_events(reader, json, m);
    } else if (kv_str_eq(key, "model_name") && !m->name) {
        m->name = read_name(json);
    } else if (kv_str_eq(key, "tenant_id") && !m->tenant) {
        m->tenant = read_name(json);
    } else if (kv_str_eq(key, "watermarks")) {
        m->has_marks = true;
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_mark(reader, json, m);
    } else if (kv_str_eq(key, "extras") || kv_str_eq(key, "parked")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_extra(reader, json, m);
    } else if (kv_str_eq(key, "streams")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_stream(reader, json, m);
    } else if (kv_str_eq(key, "torn")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_torn(reader, json, m);
    } else if (kv_str_eq(key, "ends")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_end(reader, json, m);
    } else {
        m->failed |= kv_str_eq(key, "error");
        kv_json_skip(json);
    }
}

/*
 * Mark the holders for which a peer that dumps positions had none: their first blocks came during
 * the dump.
 */
static void judge_marks(struct ki_dump_reader *reader, struct ki_dumped_model *m)
{
    struct ki_watermark *marks = (struct ki_watermark *)m->marks.data;
    struct kvi_stats stats = {.size = sizeof(stats)};

    for (size_t i = 0; m->has_marks && i < m->marks.len / sizeof(*marks); i++)
        marks[i].torn |= marks[i].no_position;
    m->n_handovers =
        ki_handover_note(m->handovers, m->n_handovers, marks, m->marks.len / sizeof(*marks));
    free(m->slots);
    m->slots = NULL;
    m->n_slots = 0;
    kvi_get_stats(m->index, &stats);
    reader->done_bytes += stats.bytes;
}

static void read_model(struct ki_dump_reader *reader, struct kv_json *json, struct kv_str label)
{
    struct ki_dumped_model *m = add_model(reader);
    char *key_text = strndup(label.p, label.len);
    struct kv_str key;

    if (!m || !key_text) {
        kv_json_fail(json, -ENOMEM, "too many models");
        free(key_text);
        return;
    }
    kv_json_object(json);
    while (kv_json_next_key(json, &key))
        read_field(reader, json, m, key);
    judge_marks(reader, m);
    if (!kv_json_failed(json) && !m->failed && m->block_size == 0)
        kv_json_fail(json, -EPROTO, "a model without block_size");
    if (name_from_key(m, key_text) < 0)
        kv_json_fail(json, -ENOMEM, "out of memory");
    free(key_text);
}

int ki_dump_read(struct ki_dump_reader *reader, struct kv_json *json)
{
    struct kv_str key;

    reader->secret = kve_secret();
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        read_model(reader, json, key);
        if (!kv_json_failed(json) && reader->max_bytes && reader->done_bytes > reader->max_bytes)
            kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
    }
    return kv_json_finish(json);
}
