// SPDX-License-Identifier: Apache-2.0
/* Facts that the events of a dump can't say: copies, windows, sources, parked blocks. */
#include "indexer/replica/dump_reader_impl.h"

#include <errno.h>

#include "event/reader/sources.h"

#define MAX_SOURCE_BYTES (KVE_MAX_SOURCES * sizeof(struct kvi_source_copies)) /* of one block */

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
        extra->window.needs = (enum kv_needs)kv_json_u64(json, KV_NEEDS_CHUNK);
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
        extra->counting = (uint32_t)kv_json_u64(json, 1);
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

/* Restore an extra; a rank with windows that can't be is torn. Returns 0 or a negative errno. */
static int restore(struct ki_dumped_model *m, const struct kvi_extra *extra, struct ki_mark *mark)
{
    int rc = kvi_restore_extra(m->index, extra);

    if (extra->kind == KVI_EXTRA_WINDOW && (rc == -EEXIST || rc == -ENOSPC))
        rc = -EINVAL;
    mark->torn |= extra->kind == KVI_EXTRA_WINDOW && rc < 0;
    return rc == -EINVAL ? 0 : rc;
}

void ki_dump_read_extra(struct ki_dump_reader *reader, struct kv_json *json,
                        struct ki_dumped_model *m)
{
    struct kvi_extra extra = {.copies = 0};
    struct ki_mark *mark;
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
    if (extra.window.need == UINT32_MAX) {
        extra.window.need = 1;
        extra.window.needs = KV_NEEDS_ALL;
    }
    if (extra.kind == KVI_EXTRA_WINDOW_BLOCK && extra.window.need)
        extra.kind = KVI_EXTRA_WINDOW;
    else if (extra.kind == KVI_EXTRA_WINDOW_BLOCK && is_placed)
        extra.kind = KVI_EXTRA_PLACE;
    mark = kv_json_failed(json) ? NULL : ki_dump_mark(reader, json, m, extra.holder);
    if (!mark)
        return;
    rc = restore(m, &extra, mark);
    if (rc == 0 && ki_dump_is_too_large(reader, m))
        kv_json_fail(json, -EFBIG, "it would take more memory than --recovery-memory");
    else if (rc < 0)
        kv_json_fail(json, rc, "the index can't take more");
}
