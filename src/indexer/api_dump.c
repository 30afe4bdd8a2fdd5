// SPDX-License-Identifier: Apache-2.0
/*
 * GET /dump (docs/formats.md): all indexes as one JSON document. A thread writes it piece by piece
 * into the reply's pipe. However large the index and slow the client, a dump needs one buffer, one
 * pipe, a slice of the index, and a copy of one stream's state at a time. No lock is held while the
 * pipe is full.
 */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "event/packed_event.h"
#include "event/reader_state.h"
#include "indexer/dump_reader.h"
#include "indexer/handover.h"
#include "indexer/lookup.h"
#include "indexer/service.h"
#include "indexer/tables.h"

#define FLUSH_AT (64u << 10)
/* Longer chains become several events, since a client needs a bounded buffer. */
#define EVENT_BLOCKS KVE_PACKED_BLOCKS

struct dump {
    struct ki_pipe *pipe;
    struct kv_buf buf;
    struct kv_json_writer w;
    uint64_t event_id;
    struct kve_packed *packed; /* NULL: events are JSON */
};

static int flush(struct dump *d, size_t at)
{
    int rc = 0;

    if (d->buf.error)
        return d->buf.error;
    if (d->buf.len < at)
        return 0;
    rc = ki_pipe_write(d->pipe, d->buf.data, d->buf.len);
    kv_buf_clear(&d->buf);
    return rc;
}

static int write_run(void *arg, const struct kvi_dump_run *run)
{
    struct dump *d = arg;
    struct kve_router_event event = {
        .holder = run->holder,
        .type = KVE_OP_STORE,
        .tier = run->tier,
        .has_parent = run->parent != NULL,
        .parent = run->parent ? *run->parent : 0,
    };
    int rc = 0;

    for (size_t done = 0; done < run->n && rc == 0; done += event.n) {
        event.event_id = d->event_id++;
        event.blocks = run->blocks + done;
        event.n = KV_MIN(run->n - done, (size_t)EVENT_BLOCKS);
        if (d->packed)
            kve_packed_write(d->packed, &d->buf, &event);
        else
            kve_router_event_write(&d->w, &event);
        event.has_parent = true;
        event.parent = event.blocks[event.n - 1].hash;
        rc = flush(d, FLUSH_AT);
    }
    return rc;
}

static void put_field(struct dump *d, const char *name, uint64_t value)
{
    kv_json_key(&d->w, name);
    kv_json_put_u64(&d->w, value);
}

static void put_flag(struct dump *d, const char *name, bool value)
{
    kv_json_key(&d->w, name);
    kv_json_put_bool(&d->w, value);
}

static void write_window(struct dump *d, const struct kvi_extra *extra)
{
    if (extra->kind == KVI_EXTRA_RULE) {
        put_flag(d, "alone", extra->alone);
        put_flag(d, "eagle_drop", extra->drops);
        if (extra->main_keeps)
            put_flag(d, "main_keeps", true);
        if (extra->kept_groups)
            put_field(d, "kept_groups", extra->kept_groups);
        return;
    }
    put_field(d, "group", extra->window.group);
    if (extra->window.part)
        put_field(d, "part", extra->window.part);
    if (extra->kind == KVI_EXTRA_WINDOW) {
        put_field(d, "window", extra->window.window);
        put_field(d, "need", extra->window.need);
        put_field(d, "stride", extra->window.stride);
        put_field(d, "state", extra->window.state);
        if (extra->window.parts > 1)
            put_field(d, "parts", extra->window.parts);
        return;
    }
    put_field(d, "tier", (uint64_t)extra->tier);
    put_field(d, "block_hash", extra->hash);
    if (extra->kind == KVI_EXTRA_WINDOW_BLOCK) {
        put_field(d, "copies", extra->copies);
        return;
    }
    put_field(d, "tokens_hash", extra->tokens_hash);
    if (extra->has_parent)
        put_field(d, "parent_hash", extra->parent);
}

static void write_block(struct dump *d, const struct kvi_extra *extra)
{
    put_field(d, "block_hash", extra->hash);
    if (extra->tiers) {
        put_field(d, "parent_hash", extra->parent);
        put_field(d, "tokens_hash", extra->tokens_hash);
        put_field(d, "tiers", extra->tiers);
    } else {
        put_field(d, "tier", (uint64_t)extra->tier);
        put_field(d, "copies", extra->copies);
    }
}

static void write_tier(struct dump *d, const struct kvi_extra *extra)
{
    put_field(d, "implied_source", extra->implied);
    put_field(d, "counting", extra->counting);
    put_field(d, "stored_again", extra->stored_again);
}

/* Write the copies of source 0 on their own, for readers that don't know sources. */
static void write_copies(struct dump *d, const struct kvi_extra *extra)
{
    put_field(d, "block_hash", extra->hash);
    if (extra->copies && !extra->in_window)
        put_field(d, "copies", extra->copies);
    kv_json_key(&d->w, "sources");
    kv_json_begin_array(&d->w);
    for (size_t i = 0; i < extra->n_sources; i++) {
        kv_json_begin_array(&d->w);
        kv_json_put_u64(&d->w, extra->sources[i].source);
        kv_json_put_u64(&d->w, extra->sources[i].copies);
        if (extra->sources[i].taken)
            kv_json_put_u64(&d->w, 1);
        kv_json_end_array(&d->w);
    }
    kv_json_end_array(&d->w);
}

static void write_about_sources(struct dump *d, const struct kvi_extra *extra)
{
    put_field(d, "tier", (uint64_t)extra->tier);
    if (extra->in_window)
        put_field(d, "window_group", extra->window.group);
    if (extra->in_window && extra->window.part)
        put_field(d, "part", extra->window.part);
    if (extra->kind == KVI_EXTRA_TIER)
        write_tier(d, extra);
    else
        write_copies(d, extra);
}

static int write_extra(void *arg, const struct kvi_extra *extra)
{
    struct dump *d = arg;

    kv_json_begin_object(&d->w);
    put_field(d, "worker_id", extra->holder.worker);
    put_field(d, "dp_rank", extra->holder.rank);
    if (extra->kind == KVI_EXTRA_BLOCK)
        write_block(d, extra);
    else if (extra->kind == KVI_EXTRA_TIER || extra->kind == KVI_EXTRA_COPIES)
        write_about_sources(d, extra);
    else
        write_window(d, extra);
    kv_json_end_object(&d->w);
    return flush(d, FLUSH_AT);
}

static int write_doubt(void *arg, const struct ki_unsure_told *told)
{
    struct dump *d = arg;

    kv_json_begin_object(&d->w);
    put_field(d, "worker_id", told->instance);
    put_field(d, "dp_rank", told->rank);
    put_field(d, "block_hash", told->entry.hash);
    put_field(d, "possible", told->entry.copies);
    put_field(d, "unsure_group", told->entry.group);
    put_flag(d, "open", told->entry.open);
    put_flag(d, "counted", told->suspect);
    if (!told->suspect)
        put_field(d, "tokens_hash", told->entry.tokens_hash);
    if (told->entry.has_parent)
        put_field(d, "parent_hash", told->entry.parent);
    kv_json_end_object(&d->w);
    return flush(d, FLUSH_AT);
}

static void write_watermarks(struct dump *d, const struct ki_watermark *marks, long n)
{
    kv_json_key(&d->w, "watermarks");
    kv_json_begin_array(&d->w);
    for (long i = 0; i < n; i++) {
        kv_json_begin_object(&d->w);
        kv_json_key(&d->w, "worker_id");
        kv_json_put_u64(&d->w, marks[i].holder.worker);
        kv_json_key(&d->w, "dp_rank");
        kv_json_put_u64(&d->w, marks[i].holder.rank);
        kv_json_key(&d->w, "seq");
        kv_json_put_u64(&d->w, marks[i].sequence);
        kv_json_key(&d->w, "timestamp");
        kv_json_put_double(&d->w, marks[i].timestamp);
        kv_json_key(&d->w, "partial");
        kv_json_put_bool(&d->w, marks[i].partial);
        kv_json_key(&d->w, "stream_rank");
        kv_json_put_u64(&d->w, marks[i].stream_rank);
        kv_json_end_object(&d->w);
    }
    kv_json_end_array(&d->w);
}

static const struct ki_watermark *find_mark(const struct ki_watermark *marks, long n,
                                            struct kv_holder holder)
{
    struct ki_watermark key = {.holder = holder};

    return n ? bsearch(&key, marks, (size_t)n, sizeof(key), ki_marks_compare) : NULL;
}

static uint64_t turns_of(const struct ki_model *model, struct kv_holder holder)
{
    struct kvi_holder_info info;

    return kvi_get_holder(model->index, holder, &info) == 0 ? info.turns : 0;
}

/*
 * Return true when the dump may lack some of the rank's blocks. @now is the rank's mark after the
 * dump, or NULL.
 */
static bool is_torn(const struct ki_model *model, const struct ki_watermark *before,
                    const struct ki_watermark *now)
{
    return !now || now->generation != before->generation ||
           before->turns != turns_of(model, before->holder);
}

static void write_end(struct dump *d, const struct ki_watermark *mark)
{
    put_field(d, "seq", mark->end);
    if (!mark->has_copies)
        return;
    put_flag(d, "copies", true);
    put_flag(d, "partial", mark->end_partial);
    put_flag(d, "has_reports", mark->end_reports);
    put_flag(d, "suspects_reports", mark->end_suspects);
    if (!mark->has_doubts)
        return;
    put_flag(d, "doubts", true);
    put_flag(d, "partial_beside", mark->end_beside);
    put_flag(d, "trusts_copies", mark->end_trusted);
    put_field(d, "real_copies", mark->end_real);
}

/*
 * Write how the ranks' streams moved during the dump. Ranks whose blocks were forgotten at once (a
 * restart, an unregistration) are torn: the dump may have only some of their blocks, and no later
 * event brings the rest. So are ranks with a change to all blocks of a tier after some were
 * written. For the other ranks, write the stream's position now, and the copies of its blocks: the
 * dump has nothing of later batches.
 */
static int write_ends(struct ki_service *service, struct dump *d, const struct ki_model *model,
                      const struct ki_watermark *marks, long n)
{
    struct kv_buf marks_after = KV_BUF_INIT;
    struct ki_watermark *after;
    long n_after;
    int rc;

    kv_json_key(&d->w, "end_copies");
    kv_json_begin_array(&d->w);
    rc = ki_registry_ends(service->registry, model, &marks_after, write_extra, write_doubt, d);
    kv_json_end_array(&d->w);
    after = (struct ki_watermark *)(void *)marks_after.data;
    n_after = (long)(marks_after.len / sizeof(*after));
    if (n_after)
        qsort(after, (size_t)n_after, sizeof(*after), ki_marks_compare);
    for (int torn = 1; torn >= 0 && !rc; torn--) {
        kv_json_key(&d->w, torn ? "torn" : "ends");
        kv_json_begin_array(&d->w);
        for (long i = 0; i < n; i++) {
            const struct ki_watermark *now = find_mark(after, n_after, marks[i].holder);

            if (is_torn(model, &marks[i], now) != torn || (!torn && !now->has_end))
                continue;
            kv_json_begin_object(&d->w);
            put_field(d, "worker_id", marks[i].holder.worker);
            put_field(d, "dp_rank", marks[i].holder.rank);
            if (!torn)
                write_end(d, now);
            kv_json_end_object(&d->w);
        }
        kv_json_end_array(&d->w);
    }
    kv_buf_fini(&marks_after);
    return rc;
}

static int compare_model(const void *key, const void *item)
{
    const struct ki_model *wanted = key, *model = *(struct ki_model *const *)item;

    return -ki_model_compare(model, wanted->name, wanted->tenant);
}

/*
 * True when another model, with a shorter name and the rest of ours in its tenant, has the same
 * "name:tenant". The other model keeps the key: the original splits it at the first colon.
 */
static bool is_key_taken(struct ki_model *const *models, long n, const struct ki_model *model)
{
    struct kv_buf text = KV_BUF_INIT;
    bool taken = false;

    for (const char *p = strchr(model->name, ':'); p && !taken; p = strchr(p + 1, ':')) {
        struct ki_model other = {.name = NULL};
        size_t len = (size_t)(p - model->name);

        kv_buf_clear(&text);
        kv_buf_append(&text, model->name, len + 1);
        kv_buf_puts(&text, p + 1);
        kv_buf_putc(&text, ':');
        kv_buf_puts(&text, model->tenant);
        if (!kv_buf_cstr(&text))
            break;
        text.data[len] = '\0';
        other.name = text.data;
        other.tenant = text.data + len + 1;
        taken = bsearch(&other, models, (size_t)n, sizeof(struct ki_model *), compare_model);
    }
    kv_buf_fini(&text);
    return taken;
}

static void write_key(struct dump *d, const struct ki_model *model, bool escaped)
{
    struct kv_buf key = KV_BUF_INIT;

    for (const char *p = model->name; *p; p++) {
        if (escaped && *p == ':')
            kv_buf_puts(&key, "%3A");
        else
            kv_buf_putc(&key, *p);
    }
    kv_buf_putc(&key, ':');
    kv_buf_puts(&key, model->tenant);
    kv_json_key(&d->w, kv_buf_cstr(&key));
    kv_buf_fini(&key);
}

/* Write the lookaheads of the forms in one half of the bits. */
static void write_lookaheads(struct dump *d, const char *name, uint32_t forms)
{
    kv_json_key(&d->w, name);
    kv_json_begin_array(&d->w);
    for (; forms; forms &= forms - 1)
        kv_json_put_u64(&d->w, (uint64_t)__builtin_ctz(forms));
    kv_json_end_array(&d->w);
}

/* Write the forms of the model's hashes, when there are others than the plain one. */
static void write_forms(struct dump *d, uint64_t forms)
{
    if ((uint32_t)forms & ~1u)
        write_lookaheads(d, "hash_lookahead", (uint32_t)forms);
    if (forms >> 32)
        write_lookaheads(d, "placed_mm_lookahead", (uint32_t)(forms >> 32));
}

static int write_stream(void *arg, const struct ki_handover *h)
{
    struct dump *d = arg;
    bool more = true;
    size_t at = 0;
    int rc = 0;

    kv_json_begin_object(&d->w);
    ki_handover_write(h, &d->w);
    kv_json_key(&d->w, "salts");
    kv_json_begin_array(&d->w);
    while (more && rc == 0) {
        more = kve_reader_write_salts(h->reader, &at, &d->w);
        rc = flush(d, FLUSH_AT);
    }
    kv_json_end_array(&d->w);
    kv_json_end_object(&d->w);
    return rc;
}

/* Write each stream as it was at one moment. Comes before the events, like the watermarks. */
static int write_streams(struct ki_service *service, struct dump *d, const struct ki_model *model)
{
    int rc;

    kv_json_key(&d->w, "streams");
    kv_json_begin_array(&d->w);
    rc = ki_registry_handovers(service->registry, model, write_stream, d);
    kv_json_end_array(&d->w);
    return rc;
}

static int write_events(struct dump *d, const struct ki_model *model)
{
    struct kvi_stats stats = {.size = sizeof(stats)};
    int rc;

    d->event_id = 0;
    kvi_get_stats(model->index, &stats);
    put_field(d, "expected_blocks", stats.blocks);
    kv_json_key(&d->w, "parked");
    kv_json_begin_array(&d->w);
    rc = stats.parked ? kvi_dump_parked(model->index, write_extra, d) : 0;
    kv_json_end_array(&d->w);
    if (rc)
        return rc;
    if (d->packed) {
        d->packed->n = 0;
        kv_json_key(&d->w, "packed_events");
        kv_json_put_raw(&d->w, "#", 1);
        rc = kvi_dump(model->index, write_run, d);
        kve_packed_end(&d->buf);
    } else {
        kv_json_key(&d->w, "events");
        kv_json_begin_array(&d->w);
        rc = kvi_dump(model->index, write_run, d);
        kv_json_end_array(&d->w);
    }
    return rc;
}

/*
 * Write one model. Takes and writes its watermarks before its events, so that the events are at
 * least as new.
 */
static int write_model(struct ki_service *service, struct dump *d, const struct ki_model *model,
                       bool escaped)
{
    struct ki_watermark *marks;
    long n = ki_registry_watermarks(service->registry, model, &marks);
    int rc;

    write_key(d, model, escaped);
    kv_json_begin_object(&d->w);
    if (n < 0) {
        kv_json_key(&d->w, "error");
        kv_json_put_str(&d->w, "out of memory");
        kv_json_end_object(&d->w);
        return flush(d, FLUSH_AT);
    }
    kv_json_key(&d->w, "block_size");
    kv_json_put_u64(&d->w, model->block_size);
    kv_json_key(&d->w, "model_name");
    kv_json_put_str(&d->w, model->name);
    kv_json_key(&d->w, "tenant_id");
    kv_json_put_str(&d->w, model->tenant);
    write_forms(d, ki_model_forms(model));
    write_watermarks(d, marks, n);
    for (long i = 0; i < n; i++)
        marks[i].turns = turns_of(model, marks[i].holder);
    kvi_keep_copies(model->index, true); /* for write_ends */
    rc = write_streams(service, d, model);
    if (rc == 0)
        rc = write_events(d, model);
    if (rc == 0) { /* after the events, because a reader restores it on top of them */
        kv_json_key(&d->w, "extras");
        kv_json_begin_array(&d->w);
        rc = kvi_dump_extras(model->index, write_extra, d);
        kv_json_end_array(&d->w);
    }
    if (rc == 0)
        rc = write_ends(service, d, model, marks, n);
    kvi_keep_copies(model->index, false);
    free(marks);
    kv_json_end_object(&d->w);
    return rc < 0 ? rc : flush(d, FLUSH_AT);
}

static int produce_all(struct ki_service *service, struct dump *d)
{
    struct ki_model **models;
    long n = ki_registry_models(service->registry, &models);
    int rc = 0;

    if (n < 0)
        return (int)n;
    kv_json_writer_init(&d->w, &d->buf);
    kv_json_begin_object(&d->w);
    for (long i = 0; i < n; i++) {
        if (rc == 0)
            rc = write_model(service, d, models[i], is_key_taken(models, n, models[i]));
    }
    for (long i = 0; i < n; i++)
        ki_model_release(models[i]);
    free(models);
    kv_json_end_object(&d->w);
    if (rc == 0)
        rc = flush(d, 0);
    kv_buf_fini(&d->buf);
    return rc;
}

static int produce(void *arg, struct ki_pipe *pipe)
{
    struct dump d = {.pipe = pipe};

    return produce_all(arg, &d);
}

static int produce_packed(void *arg, struct ki_pipe *pipe)
{
    struct kve_packed packed = {.n = 0};
    struct dump d = {.pipe = pipe, .packed = &packed};

    return produce_all(arg, &d);
}

void ki_api_dump(void *arg, struct ki_request *request, struct ki_reply *reply)
{
    struct kv_str accept;

    reply->produce = produce;
    reply->produce_arg = arg;
    if (ki_request_header(request, "Accept", &accept) && kv_str_eq(accept, KI_DUMP_PACKED_TYPE)) {
        reply->produce = produce_packed;
        reply->content_type = KI_DUMP_PACKED_TYPE;
    }
}
