// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/dump_writer.h"

#include <stdlib.h>

#include "event/reader/reader_state.h"
#include "indexer/registry/handover.h"
#include "indexer/registry/tables.h"

/* Longer chains become several events, since a client needs a bounded buffer. */
#define EVENT_BLOCKS KVE_PACKED_BLOCKS

int ki_dump_flush(struct ki_dump_writer *d, size_t at)
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
    struct ki_dump_writer *d = arg;
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
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    return rc;
}

static void write_watermarks(struct ki_dump_writer *d, const struct ki_mark *marks, long n)
{
    kv_json_key(&d->w, "watermarks");
    kv_json_begin_array(&d->w);
    for (long i = 0; i < n; i++) {
        kv_json_begin_object(&d->w);
        kv_json_member_u64(&d->w, "worker_id", marks[i].holder.worker);
        kv_json_member_u64(&d->w, "dp_rank", marks[i].holder.rank);
        kv_json_member_u64(&d->w, "stream_rank", marks[i].stream_rank);
        ki_state_write(&marks[i].at, &d->w);
        kv_json_end_object(&d->w);
    }
    kv_json_end_array(&d->w);
}

/* Write the names of the model's instances, where there are any. Returns 0 or -ENOMEM. */
static int write_names(struct ki_registry *registry, struct ki_dump_writer *d,
                       const struct ki_model *model)
{
    struct ki_instance_name *names = NULL;
    long n = ki_registry_names_of(registry, model, &names);

    if (n <= 0)
        return (int)n;
    kv_json_key(&d->w, "names");
    kv_json_begin_array(&d->w);
    for (long i = 0; i < n; i++) {
        kv_json_begin_object(&d->w);
        kv_json_member_u64(&d->w, "worker_id", names[i].instance);
        kv_json_member_str(&d->w, "name", names[i].name);
        kv_json_end_object(&d->w);
    }
    kv_json_end_array(&d->w);
    ki_instance_names_free(names, n);
    return 0;
}

static const struct ki_mark *find_mark(const struct ki_mark *marks, long n, struct kv_holder holder)
{
    struct ki_mark key = {.holder = holder};

    return n ? bsearch(&key, marks, (size_t)n, sizeof(key), ki_marks_compare) : NULL;
}

static uint64_t turns_of(const struct ki_model *model, struct kv_holder holder)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    return kvi_get_holder(model->index, holder, &info) == 0 ? info.turns : 0;
}

/*
 * Return true when the dump may lack some of the rank's blocks. @now is the rank's mark after the
 * dump, or NULL.
 */
static bool is_torn(const struct ki_model *model, const struct ki_mark *before,
                    const struct ki_mark *now)
{
    return !now || now->generation != before->generation ||
           before->turns != turns_of(model, before->holder);
}

/*
 * Write how the ranks' streams moved during the dump. Ranks whose blocks were forgotten at once (a
 * restart, an unregistration) are torn: the dump may have only some of their blocks, and no later
 * event brings the rest. So are ranks with a change to all blocks of a tier after some were
 * written. For the other ranks, write the stream's position now, and the copies of its blocks: the
 * dump has nothing of later batches.
 */
static int write_ends(struct ki_registry *registry, struct ki_dump_writer *d,
                      const struct ki_model *model, const struct ki_mark *marks, long n)
{
    struct kv_buf marks_after = KV_BUF_INIT;
    struct ki_mark *after;
    long n_after;
    int rc;

    kv_json_key(&d->w, "end_copies");
    kv_json_begin_array(&d->w);
    rc = ki_registry_ends(registry, model, &marks_after, ki_dump_write_extra, ki_dump_write_doubt,
                          d);
    kv_json_end_array(&d->w);
    after = (struct ki_mark *)(void *)marks_after.data;
    n_after = (long)(marks_after.len / sizeof(*after));
    if (n_after)
        qsort(after, (size_t)n_after, sizeof(*after), ki_marks_compare);
    for (int torn = 1; torn >= 0 && !rc; torn--) {
        kv_json_key(&d->w, torn ? "torn" : "ends");
        kv_json_begin_array(&d->w);
        for (long i = 0; i < n; i++) {
            const struct ki_mark *now = find_mark(after, n_after, marks[i].holder);

            if (is_torn(model, &marks[i], now) != torn || (!torn && !now->has_end))
                continue;
            kv_json_begin_object(&d->w);
            kv_json_member_u64(&d->w, "worker_id", marks[i].holder.worker);
            kv_json_member_u64(&d->w, "dp_rank", marks[i].holder.rank);
            if (!torn) {
                kv_json_member_bool(&d->w, "exact", now->has_end == KI_END_EXACT);
                ki_state_write(&now->end, &d->w);
            }
            kv_json_end_object(&d->w);
        }
        kv_json_end_array(&d->w);
    }
    kv_buf_fini(&marks_after);
    return rc;
}

static void write_key(struct ki_dump_writer *d, const struct ki_model *model, bool escaped)
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
static void write_lookaheads(struct ki_dump_writer *d, const char *name, uint32_t forms)
{
    kv_json_key(&d->w, name);
    kv_json_begin_array(&d->w);
    for (; forms; forms &= forms - 1)
        kv_json_put_u64(&d->w, (uint64_t)__builtin_ctz(forms));
    kv_json_end_array(&d->w);
}

/* Write the forms of the model's hashes, when there are others than the plain one. */
static void write_forms(struct ki_dump_writer *d, uint64_t forms)
{
    if ((uint32_t)forms & ~1u)
        write_lookaheads(d, "hash_lookahead", (uint32_t)forms);
    if (forms >> 32)
        write_lookaheads(d, "placed_mm_lookahead", (uint32_t)(forms >> 32));
}

static int write_stream(void *arg, const struct ki_handover *h)
{
    struct ki_dump_writer *d = arg;
    bool more = true;
    size_t at = 0;
    int rc = 0;

    kv_json_begin_object(&d->w);
    ki_handover_write(h, &d->w);
    kv_json_key(&d->w, "salts");
    kv_json_begin_array(&d->w);
    while (more && rc == 0) {
        more = kve_reader_write_salts(h->reader, &at, &d->w);
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    kv_json_end_array(&d->w);
    kv_json_end_object(&d->w);
    return rc;
}

/* Write each stream as it was at one moment. Comes before the events, like the watermarks. */
static int write_streams(struct ki_registry *registry, struct ki_dump_writer *d,
                         const struct ki_model *model)
{
    int rc;

    kv_json_key(&d->w, "streams");
    kv_json_begin_array(&d->w);
    rc = ki_registry_handovers(registry, model, write_stream, d);
    kv_json_end_array(&d->w);
    return rc;
}

static int write_events(struct ki_dump_writer *d, const struct ki_model *model)
{
    struct kvi_stats stats = {.size = sizeof(stats)};
    int rc;

    d->event_id = 0;
    kvi_get_stats(model->index, &stats);
    kv_json_member_u64(&d->w, "expected_blocks", stats.blocks);
    kv_json_key(&d->w, "parked");
    kv_json_begin_array(&d->w);
    rc = stats.parked ? kvi_dump_parked(model->index, ki_dump_write_extra, d) : 0;
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

/* Write the rest beside the events. Comes after them, because a reader restores it on top. */
static int write_extras(struct ki_dump_writer *d, const struct ki_model *model)
{
    int rc;

    kv_json_key(&d->w, "extras");
    kv_json_begin_array(&d->w);
    rc = kvi_dump_extras(model->index, ki_dump_write_extra, d);
    kv_json_end_array(&d->w);
    return rc;
}

int ki_dump_write_model(struct ki_registry *registry, struct ki_dump_writer *d,
                        const struct ki_model *model, bool escaped)
{
    struct ki_mark *marks;
    long n = ki_registry_marks(registry, model, &marks);
    int rc;

    write_key(d, model, escaped);
    kv_json_begin_object(&d->w);
    if (n < 0) {
        kv_json_member_str(&d->w, "error", "out of memory");
        kv_json_end_object(&d->w);
        return ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    kv_json_member_u64(&d->w, "block_size", model->block_size);
    kv_json_member_str(&d->w, "model_name", model->name);
    kv_json_member_str(&d->w, "tenant_id", model->tenant);
    write_forms(d, ki_model_forms(model));
    write_watermarks(d, marks, n);
    for (long i = 0; i < n; i++)
        marks[i].turns = turns_of(model, marks[i].holder);
    kvi_keep_copies(model->index, true); /* for write_ends */
    rc = write_names(registry, d, model);
    if (rc == 0)
        rc = write_streams(registry, d, model);
    if (rc == 0)
        rc = write_events(d, model);
    if (rc == 0)
        rc = write_extras(d, model);
    if (rc == 0)
        rc = write_ends(registry, d, model, marks, n);
    kvi_keep_copies(model->index, false);
    free(marks);
    kv_json_end_object(&d->w);
    return rc < 0 ? rc : ki_dump_flush(d, KI_DUMP_FLUSH_AT);
}
