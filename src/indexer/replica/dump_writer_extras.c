// SPDX-License-Identifier: Apache-2.0
/* Facts of a dump beside runs of blocks: windows, copies, sources. */
#include "indexer/replica/dump_writer.h"

static void write_window(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    bool all = extra->window.needs == KV_NEEDS_ALL;

    if (extra->kind == KVI_EXTRA_RULE) {
        kv_json_member_bool(&d->w, "alone", extra->alone);
        kv_json_member_bool(&d->w, "eagle_drop", extra->drops);
        if (extra->main_keeps)
            kv_json_member_bool(&d->w, "main_keeps", true);
        if (extra->kept_groups)
            kv_json_member_u64(&d->w, "kept_groups", extra->kept_groups);
        return;
    }
    kv_json_member_u64(&d->w, "group", extra->window.group);
    if (extra->window.part)
        kv_json_member_u64(&d->w, "part", extra->window.part);
    if (extra->kind == KVI_EXTRA_WINDOW) {
        kv_json_member_u64(&d->w, "window", extra->window.window);
        kv_json_member_u64(&d->w, "need", all ? UINT32_MAX : extra->window.need);
        kv_json_member_u64(&d->w, "stride", extra->window.stride);
        kv_json_member_u64(&d->w, "state", all ? 0 : (uint64_t)extra->window.needs);
        if (extra->window.parts > 1)
            kv_json_member_u64(&d->w, "parts", extra->window.parts);
        return;
    }
    kv_json_member_u64(&d->w, "tier", (uint64_t)extra->tier);
    kv_json_member_u64(&d->w, "block_hash", extra->hash);
    if (extra->kind == KVI_EXTRA_WINDOW_BLOCK) {
        kv_json_member_u64(&d->w, "copies", extra->copies);
        return;
    }
    kv_json_member_u64(&d->w, "tokens_hash", extra->tokens_hash);
    if (extra->has_parent)
        kv_json_member_u64(&d->w, "parent_hash", extra->parent);
}

static void write_block(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    kv_json_member_u64(&d->w, "block_hash", extra->hash);
    if (extra->tiers) {
        kv_json_member_u64(&d->w, "parent_hash", extra->parent);
        kv_json_member_u64(&d->w, "tokens_hash", extra->tokens_hash);
        kv_json_member_u64(&d->w, "tiers", extra->tiers);
    } else {
        kv_json_member_u64(&d->w, "tier", (uint64_t)extra->tier);
        kv_json_member_u64(&d->w, "copies", extra->copies);
    }
}

static void write_tier(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    kv_json_member_u64(&d->w, "implied_source", extra->implied);
    kv_json_member_u64(&d->w, "counting", extra->counting);
    kv_json_member_u64(&d->w, "stored_again", extra->stored_again);
}

static void write_copies(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    kv_json_member_u64(&d->w, "block_hash", extra->hash);
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

static void write_about_sources(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    kv_json_member_u64(&d->w, "tier", (uint64_t)extra->tier);
    if (extra->in_window)
        kv_json_member_u64(&d->w, "window_group", extra->window.group);
    if (extra->in_window && extra->window.part)
        kv_json_member_u64(&d->w, "part", extra->window.part);
    if (extra->kind == KVI_EXTRA_TIER)
        write_tier(d, extra);
    else
        write_copies(d, extra);
}

void ki_dump_write_extra(struct ki_dump_writer *d, const struct kvi_extra *extra)
{
    kv_json_begin_object(&d->w);
    kv_json_member_u64(&d->w, "worker_id", extra->holder.worker);
    kv_json_member_u64(&d->w, "dp_rank", extra->holder.rank);
    if (extra->kind == KVI_EXTRA_BLOCK)
        write_block(d, extra);
    else if (extra->kind == KVI_EXTRA_TIER || extra->kind == KVI_EXTRA_COPIES)
        write_about_sources(d, extra);
    else
        write_window(d, extra);
    kv_json_end_object(&d->w);
}
