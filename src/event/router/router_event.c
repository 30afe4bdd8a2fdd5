// SPDX-License-Identifier: Apache-2.0
#include "event/router/router_event.h"

#include <string.h>

static const char *const tier_names[KV_N_TIERS] = {
    [KV_TIER_DEVICE] = "device",
    [KV_TIER_HOST] = "host_pinned",
    [KV_TIER_DISK] = "disk",
    [KV_TIER_EXTERNAL] = "external",
};

const char *kve_tier_name(enum kv_tier tier)
{
    return (unsigned)tier < KV_N_TIERS ? tier_names[tier] : "unknown";
}

void kve_router_scratch_fini(struct kve_router_scratch *scratch)
{
    kv_buf_fini(&scratch->items);
    kv_buf_fini(&scratch->text);
}

/* -- reading ----------------------------------------------------------------------------------- */

static enum kv_tier read_tier(struct kv_json *json, struct kve_router_scratch *scratch)
{
    struct kv_str name = kv_json_str(json, &scratch->text);

    for (int tier = 0; tier < KV_N_TIERS; tier++) {
        if (kv_str_eq(name, tier_names[tier]))
            return (enum kv_tier)tier;
    }
    kv_json_fail(json, -EPROTO, "an unknown storage_tier");
    return KV_TIER_DEVICE;
}

static struct kv_block read_block(struct kv_json *json)
{
    struct kv_block block = {0};
    bool has_hash = false, has_tokens = false;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "block_hash")) {
            block.hash = kv_json_bits64(json);
            has_hash = true;
        } else if (kv_str_eq(key, "tokens_hash")) {
            block.tokens_hash = kv_json_bits64(json);
            has_tokens = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_hash || !has_tokens)
        kv_json_fail(json, -EPROTO, "a block without block_hash or tokens_hash");
    return block;
}

/* Read digits at @p into *@ret. Returns their end, NULL when there are none or they don't fit. */
static const char *read_digits(const char *p, const char *end, uint64_t *ret)
{
    const char *start = p;
    uint64_t value = 0;

    for (; p < end && (unsigned char)(*p - '0') < 10; p++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value))
            return NULL;
    if (p == start || (*start == '0' && p > start + 1))
        return NULL;
    *ret = value;
    return p;
}

/* Pass over @text at @p. Returns its end; NULL when other text stands there. */
static const char *pass(const char *p, const char *end, const char *text, size_t len)
{
    return p && (size_t)(end - p) >= len && memcmp(p, text, len) == 0 ? p + len : NULL;
}
#define PASS(p, end, text) pass(p, end, text, sizeof(text) - 1)

/*
 * Read a block in the exact form that indexers write, complete in the buffer, without parsing keys:
 * a dump holds millions. Returns false for any other form, which read_block then reads.
 */
static bool read_usual_block(struct kv_json *json, struct kv_block *ret)
{
    const char *end = json->end, *p = PASS(json->p, end, "{\"block_hash\":");
    struct kv_block block;

    p = p ? read_digits(p, end, &block.hash) : NULL;
    p = PASS(p, end, ",\"tokens_hash\":");
    p = p ? read_digits(p, end, &block.tokens_hash) : NULL;
    p = PASS(p, end, ",\"mm_extra_info\":null}");
    if (!p)
        return false;
    json->p = p;
    *ret = block;
    return true;
}

static void read_blocks(struct kv_json *json, struct kv_buf *items)
{
    kv_buf_clear(items);
    kv_json_array(json);
    while (kv_json_next_item(json)) {
        struct kv_block block;

        if (!read_usual_block(json, &block))
            block = read_block(json);
        kv_buf_append(items, &block, sizeof(block));
    }
}

static void read_stored(struct kv_json *json, struct kve_router_scratch *scratch,
                        struct kve_router_event *ev)
{
    bool has_blocks = false;
    struct kv_str key;

    ev->type = KVE_OP_STORE;
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "parent_hash")) {
            ev->has_parent = !kv_json_null(json);
            ev->parent = ev->has_parent ? kv_json_bits64(json) : 0;
        } else if (kv_str_eq(key, "blocks")) {
            read_blocks(json, &scratch->items);
            has_blocks = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_blocks)
        kv_json_fail(json, -EPROTO, "stored, but no blocks");
    ev->n = scratch->items.len / sizeof(struct kv_block);
}

static void read_removed(struct kv_json *json, struct kve_router_scratch *scratch,
                         struct kve_router_event *ev)
{
    bool has_hashes = false;
    struct kv_str key;

    ev->type = KVE_OP_REMOVE;
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "block_hashes")) {
            kv_buf_clear(&scratch->items);
            kv_json_bits64_array(json, &scratch->items);
            has_hashes = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_hashes)
        kv_json_fail(json, -EPROTO, "removed, but no block_hashes");
    ev->n = scratch->items.len / sizeof(uint64_t);
}

/* Read "cleared", or an object with exactly one member: stored or removed. */
static void read_data(struct kv_json *json, struct kve_router_scratch *scratch,
                      struct kve_router_event *ev)
{
    unsigned members = 0;
    struct kv_str key;

    if (kv_json_peek(json) == KV_JSON_STRING) {
        ev->type = KVE_OP_CLEAR;
        if (!kv_str_eq(kv_json_str(json, &scratch->text), "cleared"))
            kv_json_fail(json, -EPROTO, "an unknown kind of event data");
        return;
    }
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        members++;
        if (kv_str_eq(key, "stored")) {
            read_stored(json, scratch, ev);
        } else if (kv_str_eq(key, "removed")) {
            read_removed(json, scratch, ev);
        } else if (kv_str_eq(key, "cleared")) {
            ev->type = KVE_OP_CLEAR;
            kv_json_skip(json);
        } else {
            kv_json_fail(json, -EPROTO, "an unknown kind of event data");
        }
    }
    if (members != 1)
        kv_json_fail(json, -EPROTO, "event data of no or several kinds");
}

static void read_inner(struct kv_json *json, struct kve_router_scratch *scratch,
                       struct kve_router_event *ev)
{
    bool has_data = false;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "event_id")) {
            ev->event_id = kv_json_u64(json, UINT64_MAX);
        } else if (kv_str_eq(key, "dp_rank")) {
            ev->holder.rank = kv_json_null(json) ? 0 : (uint32_t)kv_json_u64(json, UINT32_MAX);
        } else if (kv_str_eq(key, "data")) {
            read_data(json, scratch, ev);
            has_data = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_data)
        kv_json_fail(json, -EPROTO, "an event without data");
}

int kve_router_event_read(struct kv_json *json, struct kve_router_scratch *scratch,
                          struct kve_router_event *ret)
{
    struct kve_router_event ev = {0};
    bool has_worker = false, has_event = false;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id")) {
            ev.holder.worker = kv_json_u64(json, UINT64_MAX);
            has_worker = true;
        } else if (kv_str_eq(key, "event")) {
            read_inner(json, scratch, &ev);
            has_event = true;
        } else if (kv_str_eq(key, "storage_tier")) {
            ev.tier = kv_json_null(json) ? KV_TIER_DEVICE : read_tier(json, scratch);
        } else {
            kv_json_skip(json);
        }
    }
    if (!has_worker || !has_event)
        kv_json_fail(json, -EPROTO, "not an event: no worker_id or no event");
    if (scratch->items.error)
        kv_json_fail(json, scratch->items.error, "an event of too many blocks");
    if (kv_json_failed(json))
        return json->error.code;
    if (ev.type == KVE_OP_STORE)
        ev.blocks = (const struct kv_block *)(const void *)scratch->items.data;
    else if (ev.type == KVE_OP_REMOVE)
        ev.hashes = (const uint64_t *)(const void *)scratch->items.data;
    *ret = ev;
    return 0;
}

/* -- writing ----------------------------------------------------------------------------------- */

/*
 * Append fixed text and a number. A dump holds millions of these, so the JSON writer only adds the
 * comma in front of the whole value.
 */
static void put(struct kv_buf *out, const char *text, uint64_t value)
{
    kv_buf_puts(out, text);
    kv_buf_put_u64(out, value);
}

static void write_stored(struct kv_buf *out, const struct kve_router_event *ev)
{
    kv_buf_puts(out, "{\"stored\":{\"parent_hash\":");
    if (ev->has_parent)
        kv_buf_put_u64(out, ev->parent);
    else
        kv_buf_puts(out, "null");
    kv_buf_puts(out, ",\"blocks\":[");
    for (size_t i = 0; i < ev->n; i++) {
        put(out, i ? ",{\"block_hash\":" : "{\"block_hash\":", ev->blocks[i].hash);
        put(out, ",\"tokens_hash\":", ev->blocks[i].tokens_hash);
        kv_buf_puts(out, ",\"mm_extra_info\":null}");
    }
    kv_buf_puts(out, "]}}");
}

static void write_removed(struct kv_buf *out, const struct kve_router_event *ev)
{
    kv_buf_puts(out, "{\"removed\":{\"block_hashes\":[");
    for (size_t i = 0; i < ev->n; i++)
        put(out, i ? "," : "", ev->hashes[i]);
    kv_buf_puts(out, "]}}");
}

void kve_router_event_write(struct kv_json_writer *writer, const struct kve_router_event *event)
{
    static const char start[] = "{\"worker_id\":";
    struct kv_buf *out = writer->out;

    kv_json_put_raw(writer, start, sizeof(start) - 1);
    kv_buf_put_u64(out, event->holder.worker);
    put(out, ",\"event\":{\"event_id\":", event->event_id);
    kv_buf_puts(out, ",\"data\":");
    if (event->type == KVE_OP_STORE)
        write_stored(out, event);
    else if (event->type == KVE_OP_REMOVE)
        write_removed(out, event);
    else
        kv_buf_puts(out, "\"cleared\"");
    put(out, ",\"dp_rank\":", event->holder.rank);
    kv_buf_puts(out, "}");
    if (event->tier != KV_TIER_DEVICE && event->type != KVE_OP_CLEAR) {
        kv_buf_puts(out, ",\"storage_tier\":\"");
        kv_buf_puts(out, kve_tier_name(event->tier));
        kv_buf_puts(out, "\"");
    }
    kv_buf_puts(out, "}");
}
