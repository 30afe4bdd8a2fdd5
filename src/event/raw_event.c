// SPDX-License-Identifier: Apache-2.0
#include "event/raw_event.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

int kve_grow_slowly(void *memory, size_t *capacity, size_t need, size_t bytes)
{
    size_t target = *capacity ? *capacity : 64;
    void *old, *grown;

    while (target < need)
        target *= 2;
    memcpy(&old, memory, sizeof(old));
    grown = reallocarray(old, target, bytes);
    if (!grown)
        return -ENOMEM;
    memcpy(memory, &grown, sizeof(grown));
    *capacity = target;
    return 0;
}

static int verdict(const struct kv_msgpack *m)
{
    return KV_UNLIKELY(kv_msgpack_failed(m)) ? KVE_SKIP_RC(MALFORMED) : 0;
}

/* -- values ------------------------------------------------------------------------------------ */

/*
 * An event of one block is a dozen small values, each of them nearly always in its shortest form:
 * that form is taken here, without a call, and everything else by the reader.
 */
static inline bool is_short_str(const struct kv_msgpack *m)
{
    return m->p < m->end && (*m->p & 0xe0) == 0xa0;
}

static inline struct kv_str take_str(struct kv_msgpack *m)
{
    if (KV_LIKELY(is_short_str(m))) {
        struct kv_str s = {(const char *)m->p + 1, *m->p & 0x1f};

        if (KV_LIKELY(s.len < (size_t)(m->end - m->p))) {
            m->p += 1 + s.len;
            return s;
        }
    }
    return kv_msgpack_str(m);
}

static inline uint64_t take_u64(struct kv_msgpack *m)
{
    return m->p < m->end && *m->p < 0x80 ? *m->p++ : kv_msgpack_u64(m);
}

static inline uint32_t take_array(struct kv_msgpack *m)
{
    size_t left = (size_t)(m->end - m->p);
    uint32_t n;

    if (KV_LIKELY(left > 15 && (*m->p & 0xf0) == 0x90)) {
        n = *m->p++ & 0x0f;
        return n;
    }
    return kv_msgpack_array(m);
}

static inline bool take_nil(struct kv_msgpack *m)
{
    if (m->p < m->end && *m->p == 0xc0) {
        m->p++;
        return true;
    }
    return false;
}

static struct kv_str take_optional_str(struct kv_msgpack *m)
{
    return take_nil(m) ? (struct kv_str){"", 0} : take_str(m);
}

/* An integer of either sign, or a digest of at least 8 bytes, of which the last 8 count. */
static inline uint64_t take_hash(struct kv_msgpack *m)
{
    struct kv_str bin;
    uint64_t be;

    if (KV_LIKELY(m->end - m->p >= 9 && *m->p == 0xcf)) {
        memcpy(&be, m->p + 1, sizeof(be));
        m->p += 9;
        return be64toh(be);
    }
    if (kv_msgpack_peek(m) != KV_MSGPACK_BIN)
        return kv_msgpack_bits64(m);
    bin = kv_msgpack_bin(m);
    if (bin.len < sizeof(be)) {
        kv_msgpack_fail(m, -EPROTO, "a block hash of less than 8 bytes");
        return 0;
    }
    memcpy(&be, bin.p + bin.len - sizeof(be), sizeof(be));
    return be64toh(be);
}

static int take_hashes(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    uint64_t *to;
    uint32_t n;

    if (take_nil(m))
        return 0;
    n = take_array(m);
    if (n > scratch->max_items)
        return KVE_SKIP_RC(TOO_LARGE);
    if (kve_grow(&scratch->hashes, &scratch->hashes_capacity, scratch->n_hashes + n + 1,
                 sizeof(*scratch->hashes)) < 0)
        return -ENOMEM;
    to = scratch->hashes + scratch->n_hashes;
    for (uint32_t i = 0; i < n; i++)
        to[i] = take_hash(m);
    ev->has_hashes = true;
    ev->n_hashes = n;
    return verdict(m);
}

/* -- tokens ------------------------------------------------------------------------------------ */

/* A token that came as text: decimal digits. */
static uint32_t take_token_text(struct kv_msgpack *m)
{
    struct kv_str s = kv_msgpack_str(m);
    uint64_t value = 0;

    for (size_t i = 0; i < s.len && value <= UINT32_MAX; i++) {
        if (s.p[i] < '0' || s.p[i] > '9')
            value = UINT64_MAX;
        else
            value = value * 10 + (uint64_t)(s.p[i] - '0');
    }
    if (!s.len || value > UINT32_MAX) {
        kv_msgpack_fail(m, -EPROTO, "a token that is no number");
        return 0;
    }
    return (uint32_t)value;
}

static bool take_mixed_tokens(struct kv_msgpack *m, uint32_t n, uint32_t *ret)
{
    for (uint32_t i = 0; i < n; i++) {
        if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
            ret[i] = take_token_text(m);
        else if (!kv_msgpack_u32s(m, 1, ret + i))
            return false;
    }
    return !kv_msgpack_failed(m);
}

/* [[a, b], [b, c], ...]: the firsts, and the last second. @ret has room for n + 1. */
static bool take_bigrams(struct kv_msgpack *m, uint32_t n, uint32_t *ret)
{
    for (uint32_t i = 0; i < n; i++) {
        if (kv_msgpack_array(m) != 2) {
            kv_msgpack_fail(m, -EPROTO, "not a pair of tokens");
            return false;
        }
        if (!kv_msgpack_u32s(m, 2, ret + i))
            return false;
    }
    return true;
}

static int take_tokens(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    const uint8_t *before;
    enum kv_msgpack_type first;
    uint32_t n;

    ev->n_tokens = 0;
    ev->pairs = false;
    if (take_nil(m))
        return 0;
    n = take_array(m);
    if (n > scratch->max_items)
        return KVE_SKIP_RC(TOO_LARGE);
    if (!n)
        return verdict(m);
    if (kve_grow(&scratch->tokens, &scratch->tokens_capacity, (size_t)n + KVE_MAX_LOOKAHEAD,
                 sizeof(*scratch->tokens)) < 0)
        return -ENOMEM;
    before = m->p;
    first = kv_msgpack_peek(m);
    ev->n_tokens = n;
    ev->pairs = first == KV_MSGPACK_ARRAY;
    if (ev->pairs)
        return take_bigrams(m, n, scratch->tokens) ? 0 : KVE_SKIP_RC(MALFORMED);
    if (first == KV_MSGPACK_UINT) {
        if (KV_LIKELY(kv_msgpack_u32s(m, n, scratch->tokens)))
            return 0;
        /* Text may come later: from the front, the slow way, with the failure forgotten. */
        m->p = before;
        m->error.code = 0;
    }
    return take_mixed_tokens(m, n, scratch->tokens) ? 0 : KVE_SKIP_RC(MALFORMED);
}

/* -- the rest of an event's fields ------------------------------------------------------------- */

static enum kve_raw_type type_of(struct kv_str s)
{
    if (kv_str_eq(s, "BlockStored") || kv_str_eq(s, "BlockStoredWithMetadata"))
        return KVE_RAW_STORED;
    if (kv_str_eq(s, "BlockRemoved"))
        return KVE_RAW_REMOVED;
    if (kv_str_eq(s, "AllBlocksCleared"))
        return KVE_RAW_CLEARED;
    if (kv_str_eq(s, "Ignored"))
        return KVE_RAW_IGNORED;
    return KVE_RAW_UNKNOWN;
}

/* The names that a cache master uses beside, or instead of, "type". */
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

static void take_parent(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_parent = !take_nil(m);
    if (ev->has_parent)
        ev->parent = take_hash(m);
}

static void take_block_size(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_block_size = !take_nil(m);
    if (ev->has_block_size)
        ev->block_size = take_u64(m);
}

static void take_group(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_group = !take_nil(m);
    if (ev->has_group)
        ev->group = take_u64(m);
}

/* Read a window's length. For no window publishers write nil or 0, or leave it out. */
static void take_window(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->window = take_nil(m) ? 0 : take_u64(m);
}

/* A value that a rule reads later, once the hashes are known. */
static void take_later(struct kv_msgpack *m, struct kve_raw_value *ret)
{
    const uint8_t *before = m->p;

    *ret = (struct kve_raw_value){0};
    if (take_nil(m))
        return;
    kv_msgpack_skip(m);
    *ret = (struct kve_raw_value){before, m->p};
}

static void take_rank(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_rank = !take_nil(m);
    if (ev->has_rank)
        kv_msgpack_u32s(m, 1, &ev->rank);
}

/* An array to be read later. One entry per block, and usually all of them nil: then there is none.
 */
static void take_per_block(struct kv_msgpack *m, struct kve_raw_value *ret)
{
    const uint8_t *before = m->p;
    uint32_t n;

    *ret = (struct kve_raw_value){0};
    if (take_nil(m))
        return;
    n = take_array(m);
    while (n && take_nil(m))
        n--;
    if (!n)
        return;
    for (; n && !kv_msgpack_failed(m); n--)
        kv_msgpack_skip(m);
    *ret = (struct kve_raw_value){before, m->p};
}

/* {"cache_salt": ..., "session_id": ...} */
static void take_metadata(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    uint32_t n = kv_msgpack_map(m);

    for (; n && !kv_msgpack_failed(m); n--) {
        bool is_salt = false;

        if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
            is_salt = kv_str_eq(kv_msgpack_str(m), "cache_salt");
        else
            kv_msgpack_skip(m);
        if (is_salt)
            ev->cache_salt = take_optional_str(m);
        else
            kv_msgpack_skip(m);
    }
}

/* -- maps -------------------------------------------------------------------------------------- */

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
    FIELD_REMAINING
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
        return IS("dp_rank") ? FIELD_RANK : FIELD_OTHER;
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

/* The small fields of a map; those that can run out of memory or limits are the caller's. */
static void take_field(struct kv_msgpack *m, enum field field, struct kve_raw_event *ev)
{
    switch (field) {
    case FIELD_PARENT:
        take_parent(m, ev);
        break;
    case FIELD_BLOCK_SIZE:
        take_block_size(m, ev);
        break;
    case FIELD_MEDIUM:
        ev->medium = take_optional_str(m);
        break;
    case FIELD_LORA_NAME:
        ev->lora_name = take_optional_str(m);
        break;
    case FIELD_CACHE_SALT:
        ev->cache_salt = take_optional_str(m);
        break;
    case FIELD_METADATA:
        if (kv_msgpack_peek(m) == KV_MSGPACK_MAP)
            take_metadata(m, ev);
        else
            kv_msgpack_skip(m);
        break;
    case FIELD_EXTRA_KEYS:
        take_per_block(m, &ev->extra_keys);
        break;
    case FIELD_MM_INFOS:
        take_per_block(m, &ev->mm_infos);
        break;
    case FIELD_GROUP:
        take_group(m, ev);
        break;
    case FIELD_KIND:
        ev->kind = take_optional_str(m);
        break;
    case FIELD_LOCALITY:
        ev->locality = take_optional_str(m);
        break;
    case FIELD_RANK:
        take_rank(m, ev);
        break;
    case FIELD_WINDOW:
        take_window(m, ev);
        break;
    case FIELD_OWNERSHIP:
        ev->ownership = take_optional_str(m);
        break;
    case FIELD_LOOKAHEAD:
        take_later(m, &ev->lookahead);
        break;
    case FIELD_REMAINING:
        take_later(m, &ev->remaining);
        break;
    default:
        if (!take_nil(m))
            kv_msgpack_skip(m);
        break;
    }
}

/*
 * The type may stand anywhere, and a type that isn't known may give any field another meaning: what
 * looks malformed until then is only an unknown type. Looked up separately, when it matters.
 */
static enum kve_raw_type find_type(const uint8_t *p, const uint8_t *end)
{
    enum kve_raw_type type = KVE_RAW_NONE, event_type = KVE_RAW_NONE;
    struct kv_msgpack m;

    kv_msgpack_init(&m, p, (size_t)(end - p));
    for (uint32_t n = kv_msgpack_map(&m); n && !kv_msgpack_failed(&m); n--) {
        enum field field = FIELD_OTHER;

        if (kv_msgpack_peek(&m) == KV_MSGPACK_STR)
            field = field_of(kv_msgpack_str(&m));
        else
            kv_msgpack_skip(&m);
        if (field == FIELD_TYPE && kv_msgpack_peek(&m) == KV_MSGPACK_STR)
            type = type_of(kv_msgpack_str(&m));
        else if (field == FIELD_EVENT_TYPE && kv_msgpack_peek(&m) == KV_MSGPACK_STR)
            event_type = event_type_of(kv_msgpack_str(&m));
        else
            kv_msgpack_skip(&m);
    }
    return type == KVE_RAW_NONE ? event_type : type;
}

static int read_fields(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    enum kve_raw_type event_type = KVE_RAW_NONE;
    int rc = 0;

    for (uint32_t n = kv_msgpack_map(m); n && !rc; n--) {
        enum field field = FIELD_OTHER;

        if (KV_LIKELY(is_short_str(m) || kv_msgpack_peek(m) == KV_MSGPACK_STR))
            field = field_of(take_str(m));
        else
            kv_msgpack_skip(m);
        if (field == FIELD_HASHES)
            rc = take_hashes(m, scratch, ev);
        else if (field == FIELD_TOKENS)
            rc = take_tokens(m, scratch, ev);
        else if (field == FIELD_TYPE)
            ev->type = type_of(take_str(m));
        else if (field == FIELD_EVENT_TYPE)
            event_type = event_type_of(take_optional_str(m));
        else
            take_field(m, field, ev);
        if (!rc)
            rc = verdict(m);
    }
    if (ev->type == KVE_RAW_NONE)
        ev->type = event_type;
    return rc ? rc : verdict(m);
}

static int read_map(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
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
            rc = verdict(m);
        }
    }
    return rc;
}

/* -- arrays ------------------------------------------------------------------------------------ */

/*
 * Read the elements behind the fields that every version has. Their final order is
 *     group, kind, sliding window, locality, ownership
 * Some versions wrote any of these, and block_mm_infos before them, without the others. Use the
 * final order when the types fit it; else take each element for the field of its type.
 */
static bool tail_is_fixed(const struct kv_msgpack *m, uint32_t n)
{
    struct kv_msgpack probe;

    kv_msgpack_init(&probe, m->p, (size_t)(m->end - m->p));
    for (uint32_t i = 0; i < n && i < 4; i++) {
        if (take_nil(&probe))
            continue;
        if (kv_msgpack_peek(&probe) != (i % 2 ? KV_MSGPACK_STR : KV_MSGPACK_UINT))
            return false;
        kv_msgpack_skip(&probe);
    }
    return true;
}

/* A string, nil, or a value of another type that a later version has in this place. */
static struct kv_str take_str_if_any(struct kv_msgpack *m)
{
    if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
        return kv_msgpack_str(m);
    kv_msgpack_skip(m);
    return (struct kv_str){"", 0};
}

static void take_fixed_tail(struct kv_msgpack *m, uint32_t n, struct kve_raw_event *ev)
{
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        if (i == 0)
            take_group(m, ev);
        else if (i == 1)
            ev->kind = take_optional_str(m);
        else if (i == 2)
            take_window(m, ev);
        else if (i == 3)
            ev->locality = take_optional_str(m);
        else if (i == 4)
            ev->ownership = take_str_if_any(m);
        else
            kv_msgpack_skip(m);
    }
}

static void take_typed_tail(struct kv_msgpack *m, uint32_t n, struct kve_raw_event *ev)
{
    unsigned strings = 0;

    for (; n && !kv_msgpack_failed(m); n--) {
        enum kv_msgpack_type type = kv_msgpack_peek(m);

        if (type == KV_MSGPACK_ARRAY && !ev->mm_infos.p) {
            take_per_block(m, &ev->mm_infos);
        } else if (type == KV_MSGPACK_UINT && !ev->has_group && !strings) {
            take_group(m, ev);
        } else if (type == KV_MSGPACK_UINT && !ev->window) {
            take_window(m, ev);
        } else if (type == KV_MSGPACK_STR) {
            struct kv_str s = kv_msgpack_str(m);

            if (strings == 0)
                ev->kind = s;
            else if (strings == 1)
                ev->locality = s;
            else if (strings == 2)
                ev->ownership = s;
            strings++;
        } else {
            kv_msgpack_skip(m);
        }
    }
}

static void take_tail(struct kv_msgpack *m, uint32_t n, struct kve_raw_event *ev)
{
    if (tail_is_fixed(m, n))
        take_fixed_tail(m, n, ev);
    else
        take_typed_tail(m, n, ev);
}

/* hashes, parent, tokens, block size | lora id, medium, lora name or metadata, extra keys | tail */
static int read_stored(struct kv_msgpack *m, uint32_t n, struct kve_scratch *scratch,
                       struct kve_raw_event *ev)
{
    int rc;

    if (n < 4)
        return KVE_SKIP_RC(MALFORMED);
    rc = take_hashes(m, scratch, ev);
    if (rc)
        return rc;
    take_parent(m, ev);
    rc = take_tokens(m, scratch, ev);
    if (rc)
        return rc;
    take_block_size(m, ev);
    if (n > 4 && !take_nil(m))
        kv_msgpack_skip(m);
    if (n > 5)
        ev->medium = take_optional_str(m);
    if (n > 6 && !take_nil(m)) {
        if (kv_msgpack_peek(m) == KV_MSGPACK_MAP)
            take_metadata(m, ev);
        else
            ev->lora_name = take_str(m);
    }
    if (n > 7)
        take_per_block(m, &ev->extra_keys);
    if (n > 8)
        take_tail(m, n - 8, ev);
    return verdict(m);
}

static int read_removed(struct kv_msgpack *m, uint32_t n, struct kve_scratch *scratch,
                        struct kve_raw_event *ev)
{
    int rc;

    if (n < 1)
        return KVE_SKIP_RC(MALFORMED);
    rc = take_hashes(m, scratch, ev);
    if (rc)
        return rc;
    if (n > 1)
        ev->medium = take_optional_str(m);
    if (n > 2)
        take_tail(m, n - 2, ev);
    return verdict(m);
}

/* [tag], [tag, ownership] */
static int read_cleared(struct kv_msgpack *m, uint32_t n, struct kve_raw_event *ev)
{
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        if (i == 0)
            ev->ownership = take_str_if_any(m);
        else
            kv_msgpack_skip(m);
    }
    return verdict(m);
}

static int read_array(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    uint32_t n = kv_msgpack_array(m);

    if (!n)
        return KVE_SKIP_RC(MALFORMED);
    ev->type = type_of(take_str(m));
    if (kv_msgpack_failed(m))
        return KVE_SKIP_RC(MALFORMED);
    switch (ev->type) {
    case KVE_RAW_STORED:
        return read_stored(m, n - 1, scratch, ev);
    case KVE_RAW_REMOVED:
        return read_removed(m, n - 1, scratch, ev);
    case KVE_RAW_CLEARED:
        return read_cleared(m, n - 1, ev);
    case KVE_RAW_UNKNOWN:
        return KVE_SKIP_RC(UNKNOWN_TYPE);
    default:
        while (--n && !kv_msgpack_failed(m))
            kv_msgpack_skip(m);
        return verdict(m);
    }
}

/* -- values that wait for the others ----------------------------------------------------------- */

/* One block's tokens of lookahead. They must be those of the next block, where it has come, too. */
static int take_lookahead(struct kv_msgpack *m, const uint32_t *next, size_t n_next,
                          uint32_t tokens[KVE_MAX_LOOKAHEAD], uint32_t *ret)
{
    uint32_t length = kv_msgpack_array(m);

    if (length > KVE_MAX_LOOKAHEAD)
        return KVE_SKIP_RC(TOO_LARGE);
    if (!kv_msgpack_u32s(m, length, tokens))
        return KVE_SKIP_RC(MALFORMED);
    if (n_next > length)
        n_next = length;
    if (n_next && memcmp(next, tokens, n_next * sizeof(*tokens)) != 0)
        return KVE_SKIP_RC(MALFORMED);
    *ret = length;
    return 0;
}

int kve_raw_lookahead(const struct kve_raw_event *ev, uint32_t *tokens, size_t n_blocks,
                      uint32_t block_size, uint32_t *ret)
{
    uint32_t length = 0, ahead[KVE_MAX_LOOKAHEAD];
    struct kv_msgpack m;

    *ret = ev->pairs ? 1 : 0;
    if (!ev->lookahead.p)
        return 0;
    kv_msgpack_init(&m, ev->lookahead.p, (size_t)(ev->lookahead.end - ev->lookahead.p));
    if (ev->pairs || kv_msgpack_array(&m) != ev->n_hashes)
        return KVE_SKIP_RC(MALFORMED);
    for (size_t i = 0; i < n_blocks; i++) {
        size_t end = (i + 1) * block_size;
        int rc = take_lookahead(&m, tokens + end, ev->n_tokens - end, ahead, &length);

        if (rc || (i && length != *ret))
            return rc ? rc : KVE_SKIP_RC(MALFORMED);
        *ret = length;
    }
    memcpy(tokens + n_blocks * block_size, ahead, length * sizeof(*ahead));
    return 0;
}

int kve_raw_remaining(const struct kve_raw_event *ev, uint32_t *ret)
{
    struct kv_msgpack m;

    kv_msgpack_init(&m, ev->remaining.p, (size_t)(ev->remaining.end - ev->remaining.p));
    if (kv_msgpack_peek(&m) != KV_MSGPACK_ARRAY || kv_msgpack_array(&m) != ev->n_hashes)
        return KVE_SKIP_RC(MALFORMED);
    return kv_msgpack_u32s(&m, (uint32_t)ev->n_hashes, ret) ? 0 : KVE_SKIP_RC(MALFORMED);
}

int kve_raw_event_read(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ret)
{
    memset(ret, 0, sizeof(*ret));
    switch (kv_msgpack_peek(m)) {
    case KV_MSGPACK_MAP:
        ret->is_map = true;
        return read_map(m, scratch, ret);
    case KV_MSGPACK_ARRAY:
        return read_array(m, scratch, ret);
    default:
        return KVE_SKIP_RC(MALFORMED);
    }
}
