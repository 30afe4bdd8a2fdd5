// SPDX-License-Identifier: Apache-2.0
#include "event/wire/raw_fields.h"

#include <string.h>

#include "base/core/xxh.h"

/* -- hashes ------------------------------------------------------------------------------------ */

int kve_take_hashes(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    uint64_t *to;
    uint32_t n;

    if (kve_take_nil(m))
        return 0;
    n = kve_take_array(m);
    if (n > scratch->max_items)
        return KVE_SKIP_RC(TOO_LARGE);
    if (kve_grow(&scratch->hashes, &scratch->hashes_capacity, scratch->n_hashes + n + 1,
                 sizeof(*scratch->hashes)) < 0)
        return -ENOMEM;
    to = scratch->hashes + scratch->n_hashes;
    for (uint32_t i = 0; i < n; i++)
        to[i] = kve_take_hash(m);
    ev->has_hashes = true;
    ev->n_hashes = n;
    return kve_raw_verdict(m);
}

/* -- tokens ------------------------------------------------------------------------------------ */

/* Read a token written as text: decimal digits. */
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

/*
 * Read [[a, b], [b, c], ...]: the first of each pair, then the last pair's second. @ret has room
 * for n + 1.
 */
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

int kve_take_tokens(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    const uint8_t *before;
    enum kv_msgpack_type first;
    uint32_t n;

    ev->n_tokens = 0;
    ev->pairs = false;
    if (kve_take_nil(m))
        return 0;
    n = kve_take_array(m);
    if (n > scratch->max_items)
        return KVE_SKIP_RC(TOO_LARGE);
    if (!n)
        return kve_raw_verdict(m);
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
        /* Some token is text: read all of them again one by one, and forget the failure. */
        m->p = before;
        m->error.code = 0;
    }
    return take_mixed_tokens(m, n, scratch->tokens) ? 0 : KVE_SKIP_RC(MALFORMED);
}

/* -- small fields ------------------------------------------------------------------------------ */

enum kve_raw_type kve_raw_type_of(struct kv_str s)
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

/* Most arrays hold one nil per block: the field counts as missing then. */
void kve_take_per_block(struct kv_msgpack *m, struct kve_raw_value *ret)
{
    const uint8_t *before = m->p;
    uint32_t n;

    *ret = (struct kve_raw_value){0};
    if (kve_take_nil(m))
        return;
    n = kve_take_array(m);
    while (n && kve_take_nil(m))
        n--;
    if (!n)
        return;
    for (; n && !kv_msgpack_failed(m); n--)
        kv_msgpack_skip(m);
    *ret = (struct kve_raw_value){before, m->p};
}

void kve_take_extra_keys(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->lists_extra_keys = kv_msgpack_peek(m) == KV_MSGPACK_ARRAY;
    kve_take_per_block(m, &ev->extra_keys);
}

void kve_take_components(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    uint32_t n = kve_take_nil(m) ? 0 : kv_msgpack_array(m);

    for (ev->components = 0; n && !kv_msgpack_failed(m); n--) {
        struct kv_str name = kv_msgpack_str(m);

        if (kv_str_eq(name, "FULL") || kv_str_eq(name, "full"))
            ev->components |= KVE_COMPONENT_FULL;
        else
            ev->components |= 2u << kv_xxh64(name.p, name.len, 0) % 31;
    }
}

void kve_take_metadata(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    uint32_t n = kv_msgpack_map(m);

    for (; n && !kv_msgpack_failed(m); n--) {
        bool is_salt = false;

        if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
            is_salt = kv_str_eq(kv_msgpack_str(m), "cache_salt");
        else
            kv_msgpack_skip(m);
        if (is_salt)
            ev->cache_salt = kve_take_optional_str(m);
        else
            kv_msgpack_skip(m);
    }
}
