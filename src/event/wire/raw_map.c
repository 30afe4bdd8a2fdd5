// SPDX-License-Identifier: Apache-2.0
/* Events as maps with named fields. */
#include <string.h>

#include "event/wire/raw_fields.h"

/*
 * Return the event type called @s in "event_type", which a cache master writes beside or instead of
 * "type".
 */
static enum kve_raw_type event_type_of(struct kv_str s)
{
    if (kv_str_eq(s, "stored"))
        return KVE_RAW_STORED;
    if (kv_str_eq(s, "removed"))
        return KVE_RAW_REMOVED;
    if (kv_str_eq(s, "cleared"))
        return KVE_RAW_CLEARED;
    return KVE_RAW_UNKNOWN;
}

/* Note where a value lies that a rule reads later, once the hashes are known. */
static void take_later(struct kv_msgpack *m, struct kve_raw_value *ret)
{
    const uint8_t *before = m->p;

    *ret = (struct kve_raw_value){0};
    if (kve_take_nil(m))
        return;
    kv_msgpack_skip(m);
    *ret = (struct kve_raw_value){before, m->p};
}

static void take_rank(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_rank = !kve_take_nil(m);
    if (ev->has_rank)
        kv_msgpack_u32s(m, 1, &ev->rank);
}

enum field {
    FIELD_OTHER,
    FIELD_TYPE,
    FIELD_EVENT_TYPE,
    FIELD_HASHES,
    FIELD_PARENT,
    FIELD_TOKENS,
    FIELD_BLOCK_SIZE,
    FIELD_MEDIUM,
    FIELD_LORA_NAME,
    FIELD_CACHE_SALT,
    FIELD_METADATA,
    FIELD_EXTRA_KEYS,
    FIELD_MM_INFOS,
    FIELD_GROUP,
    FIELD_KIND,
    FIELD_LOCALITY,
    FIELD_RANK,
    FIELD_WINDOW,
    FIELD_OWNERSHIP,
    FIELD_LOOKAHEAD,
    FIELD_REMAINING,
    FIELD_LORA_ID,
    FIELD_COMPONENTS
};

#define IS(text) (memcmp(key.p, text, sizeof(text) - 1) == 0)

/* Find a field by its name. Selects by length first, and compares at most three candidates. */
static enum field field_of(struct kv_str key)
{
    switch (key.len) {
    case 4:
        return IS("type") ? FIELD_TYPE : FIELD_OTHER;
    case 6:
        return IS("medium") ? FIELD_MEDIUM : FIELD_OTHER;
    case 7:
        return IS("dp_rank") ? FIELD_RANK : IS("lora_id") ? FIELD_LORA_ID : FIELD_OTHER;
    case 8:
        return IS("locality") ? FIELD_LOCALITY : IS("metadata") ? FIELD_METADATA : FIELD_OTHER;
    case 9:
        return IS("token_ids")   ? FIELD_TOKENS
               : IS("group_idx") ? FIELD_GROUP
               : IS("lora_name") ? FIELD_LORA_NAME
               : IS("ownership") ? FIELD_OWNERSHIP
                                 : FIELD_OTHER;
    case 10:
        return IS("block_size")   ? FIELD_BLOCK_SIZE
               : IS("extra_keys") ? FIELD_EXTRA_KEYS
               : IS("cache_salt") ? FIELD_CACHE_SALT
               : IS("event_type") ? FIELD_EVENT_TYPE
                                  : FIELD_OTHER;
    case 12:
        return IS("block_hashes") ? FIELD_HASHES : FIELD_OTHER;
    case 14:
        return IS("block_mm_infos") ? FIELD_MM_INFOS : FIELD_OTHER;
    case 15:
        return IS("component_types") ? FIELD_COMPONENTS : FIELD_OTHER;
    case 17:
        return IS("parent_block_hash") ? FIELD_PARENT : FIELD_OTHER;
    case 18:
        return IS("kv_cache_spec_kind") ? FIELD_KIND : FIELD_OTHER;
    case 19:
        return IS("lookahead_token_ids") ? FIELD_LOOKAHEAD : FIELD_OTHER;
    case 21:
        return IS("remaining_copy_counts") ? FIELD_REMAINING : FIELD_OTHER;
    case 28:
        return IS("kv_cache_spec_sliding_window") ? FIELD_WINDOW : FIELD_OTHER;
    default:
        return FIELD_OTHER;
    }
}
#undef IS

/* Read a small field of a map. The caller reads the fields that can exceed memory or limits. */
static void take_field(struct kv_msgpack *m, enum field field, struct kve_raw_event *ev)
{
    switch (field) {
    case FIELD_PARENT:
        kve_take_parent(m, ev);
        break;
    case FIELD_BLOCK_SIZE:
        kve_take_block_size(m, ev);
        break;
    case FIELD_MEDIUM:
        ev->medium = kve_take_optional_str(m);
        break;
    case FIELD_LORA_NAME:
        ev->lora_name = kve_take_optional_str(m);
        break;
    case FIELD_CACHE_SALT:
        ev->cache_salt = kve_take_optional_str(m);
        break;
    case FIELD_METADATA:
        if (kv_msgpack_peek(m) == KV_MSGPACK_MAP)
            kve_take_metadata(m, ev);
        else
            kv_msgpack_skip(m);
        break;
    case FIELD_EXTRA_KEYS:
        kve_take_extra_keys(m, ev);
        break;
    case FIELD_MM_INFOS:
        kve_take_per_block(m, &ev->mm_infos);
        break;
    case FIELD_GROUP:
        kve_take_group(m, ev);
        break;
    case FIELD_KIND:
        ev->kind = kve_take_optional_str(m);
        break;
    case FIELD_LOCALITY:
        ev->locality = kve_take_optional_str(m);
        break;
    case FIELD_RANK:
        take_rank(m, ev);
        break;
    case FIELD_WINDOW:
        kve_take_window(m, ev);
        break;
    case FIELD_OWNERSHIP:
        ev->ownership = kve_take_optional_str(m);
        break;
    case FIELD_LOOKAHEAD:
        take_later(m, &ev->lookahead);
        break;
    case FIELD_REMAINING:
        take_later(m, &ev->remaining);
        break;
    case FIELD_LORA_ID:
        kve_take_lora_id(m, ev);
        break;
    case FIELD_COMPONENTS:
        kve_take_components(m, ev);
        break;
    default:
        if (!kve_take_nil(m))
            kv_msgpack_skip(m);
        break;
    }
}

/* Read the name of a field, which may be of any type. */
static enum field read_name(struct kv_msgpack *m)
{
    if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
        return field_of(kv_msgpack_str(m));
    kv_msgpack_skip(m);
    return FIELD_OTHER;
}

/*
 * Find the type of a malformed event. The type may stand anywhere in the map, and an unknown type
 * may give any field another meaning. Such an event is of unknown type rather than malformed.
 */
static enum kve_raw_type find_type(const uint8_t *p, const uint8_t *end)
{
    enum kve_raw_type type = KVE_RAW_NONE, event_type = KVE_RAW_NONE;
    struct kv_msgpack m;

    kv_msgpack_init(&m, p, (size_t)(end - p));
    for (uint32_t n = kv_msgpack_map(&m); n && !kv_msgpack_failed(&m); n--) {
        enum field field = read_name(&m);

        if (field == FIELD_TYPE && kv_msgpack_peek(&m) == KV_MSGPACK_STR)
            type = kve_raw_type_of(kv_msgpack_str(&m));
        else if (field == FIELD_EVENT_TYPE && kv_msgpack_peek(&m) == KV_MSGPACK_STR)
            event_type = event_type_of(kv_msgpack_str(&m));
        else
            kv_msgpack_skip(&m);
    }
    return type == KVE_RAW_NONE ? event_type : type;
}

bool kve_raw_find_rank(const uint8_t *p, const uint8_t *end, uint32_t *ret)
{
    struct kve_raw_event ev = {.has_rank = false};
    struct kv_msgpack m;

    kv_msgpack_init(&m, p, (size_t)(end - p));
    if (kv_msgpack_peek(&m) != KV_MSGPACK_MAP)
        return false;
    for (uint32_t n = kv_msgpack_map(&m); n && !kv_msgpack_failed(&m); n--) {
        enum field field = read_name(&m);

        if (field == FIELD_RANK)
            take_rank(&m, &ev);
        else
            kv_msgpack_skip(&m);
    }
    if (kv_msgpack_failed(&m) || !ev.has_rank)
        return false;
    *ret = ev.rank;
    return true;
}

static int read_fields(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    enum kve_raw_type event_type = KVE_RAW_NONE;
    int rc = 0;

    for (uint32_t n = kve_take_map(m); n && !rc; n--) {
        enum field field = FIELD_OTHER;

        if (KV_LIKELY(kve_at_short_str(m) || kv_msgpack_peek(m) == KV_MSGPACK_STR))
            field = field_of(kve_take_str(m));
        else
            kv_msgpack_skip(m);
        if (field == FIELD_HASHES)
            rc = kve_take_hashes(m, scratch, ev);
        else if (field == FIELD_TOKENS)
            rc = kve_take_tokens(m, scratch, ev);
        else if (field == FIELD_TYPE)
            ev->type = kve_raw_type_of(kve_take_str(m));
        else if (field == FIELD_EVENT_TYPE)
            event_type = event_type_of(kve_take_optional_str(m));
        else
            take_field(m, field, ev);
        if (!rc)
            rc = kve_raw_verdict(m);
    }
    if (ev->type == KVE_RAW_NONE)
        ev->type = event_type;
    return rc ? rc : kve_raw_verdict(m);
}

int kve_raw_read_map(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    const uint8_t *before = m->p, *end = m->end;
    int rc = read_fields(m, scratch, ev);

    if (rc == KVE_SKIP_RC(MALFORMED)) {
        enum kve_raw_type type = find_type(before, end);

        if (type == KVE_RAW_UNKNOWN)
            rc = KVE_SKIP_RC(UNKNOWN_TYPE);
        if (type == KVE_RAW_IGNORED) {
            ev->type = type;
            m->p = before;
            m->error.code = 0;
            kv_msgpack_skip(m);
            rc = kve_raw_verdict(m);
        }
    }
    return rc;
}
