// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/dump_writer.h"

#include "event/reader/reader_state.h"
#include "indexer/replica/dump_copy.h"

/* Longer chains become several events, since a client needs a bounded buffer. */
#define EVENT_BLOCKS KVE_PACKED_BLOCKS

int ki_dump_flush(struct ki_dump_writer *d, size_t at)
{
    int rc = 0;

    if (d->buf.error)
        return d->buf.error;
    if (d->buf.len < at)
        return 0;
    rc = kh_pipe_write(d->pipe, d->buf.data, d->buf.len);
    kv_buf_clear(&d->buf);
    return rc;
}

static int write_run(struct ki_dump_writer *d, const struct kvi_dump_run *run)
{
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
        if (d->form == KI_DUMP_PACKED)
            kve_packed_write(d->packed, &d->buf, &event);
        else
            kve_router_event_write(&d->w, &event);
        event.has_parent = true;
        event.parent = event.blocks[event.n - 1].hash;
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    return rc;
}

static int write_runs(void *arg, const struct ki_copied *c)
{
    struct kvi_dump_run run;
    size_t at = 0;
    int rc = 0;

    while (!rc && ki_copied_run(c, &at, &run))
        rc = write_run(arg, &run);
    return rc;
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

/* -- streams ----------------------------------------------------------------------------------- */

static int write_salts(struct ki_dump_writer *d, const struct ki_snapshot *s)
{
    bool more = true;
    size_t at = 0;
    int rc = 0;

    kv_json_key(&d->w, "salts");
    kv_json_begin_array(&d->w);
    while (more && rc == 0) {
        more = kve_reader_write_salts(s->reader, &at, &d->w);
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    kv_json_end_array(&d->w);
    return rc;
}

static int write_events(struct ki_dump_writer *d, const struct ki_copied *c)
{
    int rc;

    if (d->form == KI_DUMP_PACKED) {
        d->packed->n = 0;
        kv_json_key(&d->w, "packed_events");
        kv_json_put_raw(&d->w, "#", 1);
        rc = write_runs(d, c);
        kve_packed_end(&d->buf);
    } else {
        kv_json_key(&d->w, "events");
        kv_json_begin_array(&d->w);
        rc = write_runs(d, c);
        kv_json_end_array(&d->w);
    }
    return rc;
}

/* Write what events can't say. Comes after them, because a reader restores it on top. */
static int write_extras(struct ki_dump_writer *d, const struct ki_copied *c)
{
    struct kvi_extra extra;
    size_t at = 0;
    int rc = 0;

    kv_json_key(&d->w, "extras");
    kv_json_begin_array(&d->w);
    while (!rc && ki_copied_extra(c, &at, &extra)) {
        ki_dump_write_extra(d, &extra);
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    kv_json_end_array(&d->w);
    return rc;
}

static int write_ranges(struct ki_dump_writer *d, const struct ki_snapshot *s)
{
    int rc = 0;

    kv_json_key(&d->w, "ranges");
    kv_json_begin_array(&d->w);
    for (size_t i = 0; i < ki_snapshot_n_ranges(s) && !rc; i++) {
        ki_snapshot_write_range(ki_snapshot_range(s, i), &d->w);
        rc = ki_dump_flush(d, KI_DUMP_FLUSH_AT);
    }
    kv_json_end_array(&d->w);
    return rc;
}

static int write_stream(void *arg, const struct ki_copied *c)
{
    struct ki_dump_writer *d = arg;
    const struct ki_snapshot *s = c->snapshot;
    int rc = 0;

    kv_json_begin_object(&d->w);
    ki_snapshot_write(s, &d->w);
    if (s->has_position)
        rc = write_salts(d, s);
    if (!rc)
        rc = write_events(d, c);
    if (!rc)
        rc = write_extras(d, c);
    if (!rc && s->has_position)
        rc = write_ranges(d, s);
    kv_json_end_object(&d->w);
    return rc;
}

int ki_dump_write_model(struct ki_registry *registry, struct ki_dump_writer *d,
                        const struct ki_model *model, bool escaped)
{
    bool flat = d->form == KI_DUMP_FLAT;
    struct kvi_stats stats = {.size = sizeof(stats)};
    int rc;

    d->event_id = 0;
    kvi_get_stats(model->index, &stats);
    write_key(d, model, escaped);
    kv_json_begin_object(&d->w);
    kv_json_member_u64(&d->w, "block_size", model->block_size);
    kv_json_member_str(&d->w, "model_name", model->name);
    kv_json_member_str(&d->w, "tenant_id", model->tenant);
    rc = write_names(registry, d, model);
    kv_json_member_u64(&d->w, "expected_blocks", stats.blocks);
    kv_json_key(&d->w, flat ? "events" : "streams");
    kv_json_begin_array(&d->w);
    if (rc == 0)
        rc = ki_dump_copy(registry, model, flat ? write_runs : write_stream, d);
    kv_json_end_array(&d->w);
    write_forms(d, ki_model_forms(model)); /* last: streams may have shown more of them meanwhile */
    kv_json_end_object(&d->w);
    return rc < 0 ? rc : ki_dump_flush(d, KI_DUMP_FLUSH_AT);
}
