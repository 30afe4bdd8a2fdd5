// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/dump_reader_impl.h"

#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/mix.h"
#include "indexer/model/lookup.h"

/* Bounds on the memory that one model may take while it is read, beside its index. */
#define MAX_MARK_BYTES (32u << 20)
#define MAX_NAME_BYTES 65536

static void model_fini(struct ki_dumped_model *m)
{
    free(m->name);
    free(m->tenant);
    kvi_destroy(m->index);
    kv_buf_fini(&m->marks);
    kv_buf_fini(&m->names);
    free(m->slots);
    for (size_t i = 0; i < m->n_snapshots; i++)
        ki_snapshot_free(m->snapshots[i]);
    free(m->snapshots);
}

void ki_dump_reader_fini(struct ki_dump_reader *reader)
{
    for (size_t i = 0; i < reader->n; i++)
        model_fini(&reader->models[i]);
    free(reader->models);
    kv_buf_fini(&reader->sources);
    memset(reader, 0, sizeof(*reader));
}

int ki_dump_make_index(const struct ki_dump_reader *reader, uint64_t expected_blocks,
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
    m->names.limit = MAX_MARK_BYTES;
    if (ki_dump_make_index(reader, 0, &m->index) < 0)
        return NULL;
    reader->n++;
    return m;
}

bool ki_dump_is_too_large(const struct ki_dump_reader *reader, const struct ki_dumped_model *m)
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

/* Read the name of an instance. */
static void read_instance_name(struct kv_json *json, struct ki_dumped_model *m)
{
    uint64_t instance = 0;
    struct kv_str key;
    char *name = NULL;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id"))
            instance = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "name") && !name)
            name = read_name(json);
        else
            kv_json_skip(json);
    }
    if (!name || !kv_instance_is(instance, name, strlen(name)))
        kv_json_fail(json, -EPROTO, "a name that isn't of its worker_id");
    if (name && !kv_json_failed(json)) {
        kv_buf_append(&m->names, &instance, sizeof(instance));
        kv_buf_append(&m->names, name, strlen(name) + 1);
    }
    if (m->names.error)
        kv_json_fail(json, m->names.error, "too many names");
    free(name);
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
        ki_dump_read_events(reader, json, m);
    } else if (kv_str_eq(key, "expected_blocks")) {
        ki_dump_read_expected_blocks(reader, json, m);
    } else if (kv_str_eq(key, "packed_events")) {
        ki_dump_read_packed_events(reader, json, m);
    } else if (kv_str_eq(key, "model_name") && !m->name) {
        m->name = read_name(json);
    } else if (kv_str_eq(key, "tenant_id") && !m->tenant) {
        m->tenant = read_name(json);
    } else if (kv_str_eq(key, "names")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_instance_name(json, m);
    } else if (kv_str_eq(key, "streams")) {
        m->has_streams = true;
        kv_json_array(json);
        while (kv_json_next_item(json))
            ki_dump_read_stream(reader, json, m);
    } else {
        m->failed |= kv_str_eq(key, "error");
        kv_json_skip(json);
    }
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
    ki_dump_judge_streams(reader, m);
    if (!kv_json_failed(json) && !m->failed && m->block_size == 0)
        kv_json_fail(json, -EPROTO, "a model without block_size");
    if (name_from_key(m, key_text) < 0)
        kv_json_fail(json, -ENOMEM, "out of memory");
    free(key_text);
}

int ki_dump_read(struct ki_dump_reader *reader, struct kv_json *json)
{
    struct kv_str key;

    reader->secret = kv_secret();
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        read_model(reader, json, key);
        if (!kv_json_failed(json) && reader->max_bytes && reader->done_bytes > reader->max_bytes)
            kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
    }
    return kv_json_finish(json);
}
