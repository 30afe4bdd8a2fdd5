// SPDX-License-Identifier: Apache-2.0
#include "event/wire/encode.h"

#include <string.h>

#include "base/json/msgpack.h"
#include "event/wire/extra_keys.h"

static const char *const media[KV_N_TIERS] = {
    [KV_TIER_DEVICE] = "GPU",
    [KV_TIER_HOST] = "CPU_PINNED",
    [KV_TIER_DISK] = "DISK",
    [KV_TIER_EXTERNAL] = "EXTERNAL",
};

#define MAX_ITEMS (4u << 20) /* most hashes or tokens in an event: the default limit of readers */

int kve_event_check(const struct kve_event *event)
{
    if (event->size < sizeof(*event) || (unsigned)event->type > KVE_CLEARED ||
        (unsigned)event->tier >= KV_N_TIERS || event->group < -1)
        return -EINVAL;
    if (event->type == KVE_CLEARED)
        return 0;
    if (event->n_hashes > MAX_ITEMS || (event->n_hashes && !event->hashes))
        return -EINVAL;
    if (event->type == KVE_REMOVED || !event->n_tokens)
        return 0;
    if (!event->tokens || !event->block_size || event->n_tokens > MAX_ITEMS ||
        event->n_tokens % event->block_size ||
        event->n_tokens / event->block_size != event->n_hashes)
        return -EINVAL;
    return 0;
}

static bool has_text(const char *text)
{
    return text && *text;
}

static void put_optional(struct kv_buf *out, const char *text)
{
    if (has_text(text))
        kv_msgpack_put_str(out, text);
    else
        kv_msgpack_put_nil(out);
}

static void put_hashes(struct kv_buf *out, const struct kve_event *event)
{
    kv_msgpack_put_array(out, (uint32_t)event->n_hashes);
    kv_msgpack_put_u64s(out, event->hashes, event->n_hashes);
}

static void put_tokens(struct kv_buf *out, const struct kve_event *event)
{
    kv_msgpack_put_array(out, (uint32_t)event->n_tokens);
    kv_msgpack_put_u32s(out, event->tokens, event->n_tokens);
}

/*
 * Write the parent and tokens. Engines write block size 0 and no parent for known blocks without
 * tokens.
 */
static void put_parent(struct kv_buf *out, const struct kve_event *event)
{
    if (event->parent && event->n_tokens)
        kv_msgpack_put_u64(out, *event->parent);
    else
        kv_msgpack_put_nil(out);
}

static uint32_t told_block_size(const struct kve_event *event)
{
    return event->n_tokens ? event->block_size : 0;
}

/* -- maps -------------------------------------------------------------------------------------- */

static void put_stored_map(struct kv_buf *out, const struct kve_event *event)
{
    bool salt = has_text(event->cache_salt), group = event->group >= 0;

    kv_msgpack_put_map(out, 8u + salt + group);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_str(out, "block_hashes");
    put_hashes(out, event);
    kv_msgpack_put_str(out, "parent_block_hash");
    put_parent(out, event);
    kv_msgpack_put_str(out, "token_ids");
    put_tokens(out, event);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, told_block_size(event));
    kv_msgpack_put_str(out, "lora_id");
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, media[event->tier]);
    kv_msgpack_put_str(out, "lora_name");
    put_optional(out, event->lora_name);
    if (salt) {
        kv_msgpack_put_str(out, "cache_salt");
        kv_msgpack_put_str(out, event->cache_salt);
    }
    if (group) {
        kv_msgpack_put_str(out, "group_idx");
        kv_msgpack_put_u64(out, (uint32_t)event->group);
    }
}

static void put_removed_map(struct kv_buf *out, const struct kve_event *event)
{
    bool group = event->group >= 0;

    kv_msgpack_put_map(out, 3u + group);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockRemoved");
    kv_msgpack_put_str(out, "block_hashes");
    put_hashes(out, event);
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, media[event->tier]);
    if (group) {
        kv_msgpack_put_str(out, "group_idx");
        kv_msgpack_put_u64(out, (uint32_t)event->group);
    }
}

/* -- arrays ------------------------------------------------------------------------------------ */

/*
 * Write the extra keys, one entry per block. The salt goes with the first block; its prefix marks
 * it as a salt.
 */
static void put_extra_keys(struct kv_buf *out, const struct kve_event *event)
{
    static const char prefix[] = KVE_SALT_PREFIX;
    struct kv_buf salt = KV_BUF_INIT;

    if (!has_text(event->cache_salt) || !event->n_hashes) {
        kv_msgpack_put_nil(out);
        return;
    }
    kv_buf_puts(&salt, prefix);
    kv_buf_puts(&salt, event->cache_salt);
    if (salt.error && !out->error)
        out->error = salt.error;
    kv_msgpack_put_array(out, (uint32_t)event->n_hashes);
    kv_msgpack_put_array(out, 1);
    kv_msgpack_put_strn(out, salt.data, salt.len);
    for (size_t i = 1; i < event->n_hashes; i++)
        kv_msgpack_put_nil(out);
    kv_buf_fini(&salt);
}

static void put_stored_array(struct kv_buf *out, const struct kve_event *event)
{
    bool group = event->group >= 0, extra = group || has_text(event->cache_salt);

    kv_msgpack_put_array(out, 8u + extra + group);
    kv_msgpack_put_str(out, "BlockStored");
    put_hashes(out, event);
    put_parent(out, event);
    put_tokens(out, event);
    kv_msgpack_put_u64(out, told_block_size(event));
    kv_msgpack_put_nil(out); /* lora_id */
    kv_msgpack_put_str(out, media[event->tier]);
    put_optional(out, event->lora_name);
    if (extra)
        put_extra_keys(out, event);
    if (group)
        kv_msgpack_put_u64(out, (uint32_t)event->group);
}

static void put_removed_array(struct kv_buf *out, const struct kve_event *event)
{
    bool group = event->group >= 0;

    kv_msgpack_put_array(out, 3u + group);
    kv_msgpack_put_str(out, "BlockRemoved");
    put_hashes(out, event);
    kv_msgpack_put_str(out, media[event->tier]);
    if (group)
        kv_msgpack_put_u64(out, (uint32_t)event->group);
}

void kve_event_encode(struct kv_buf *out, const struct kve_event *event, enum kve_encoding encoding)
{
    bool map = encoding == KVE_ENCODING_MAP;

    switch (event->type) {
    case KVE_STORED:
        (map ? put_stored_map : put_stored_array)(out, event);
        break;
    case KVE_REMOVED:
        (map ? put_removed_map : put_removed_array)(out, event);
        break;
    default:
        if (map) {
            kv_msgpack_put_map(out, 1);
            kv_msgpack_put_str(out, "type");
        } else {
            kv_msgpack_put_array(out, 1);
        }
        kv_msgpack_put_str(out, "AllBlocksCleared");
        break;
    }
}

/* -- batches ----------------------------------------------------------------------------------- */

size_t kve_batch_head(uint8_t out[KVE_BATCH_HEAD], double timestamp, uint32_t n_events)
{
    char room[KVE_BATCH_HEAD + 16] = {0};
    struct kv_buf buf = {.data = room, .capacity = sizeof(room) - 1, .limit = sizeof(room) - 1};

    kv_msgpack_put_array(&buf, 3);
    kv_msgpack_put_double(&buf, timestamp);
    kv_msgpack_put_array(&buf, n_events);
    memcpy(out, room, buf.len);
    return buf.len;
}

size_t kve_batch_tail(uint8_t out[KVE_BATCH_TAIL], uint32_t rank)
{
    char room[KVE_BATCH_TAIL + 16] = {0};
    struct kv_buf buf = {.data = room, .capacity = sizeof(room) - 1, .limit = sizeof(room) - 1};

    kv_msgpack_put_u64(&buf, rank);
    memcpy(out, room, buf.len);
    return buf.len;
}
