// SPDX-License-Identifier: Apache-2.0
/* Events as positional arrays, and values that are read after the hashes. Maps: raw_map.c. */
#include "event/wire/raw_event.h"

#include <stdlib.h>
#include <string.h>

#include "event/wire/raw_fields.h"

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

/* -- arrays ------------------------------------------------------------------------------------ */

/*
 * Return true when the elements behind the fields of all versions have their final order:
 *     group, kind, sliding window, locality, ownership
 * Some versions wrote any of these, and block_mm_infos before them, without the others. The final
 * order counts when the types fit it. Else each element's type decides its field.
 */
static bool tail_is_fixed(const struct kv_msgpack *m, uint32_t n)
{
    struct kv_msgpack probe;

    kv_msgpack_init(&probe, m->p, (size_t)(m->end - m->p));
    for (uint32_t i = 0; i < n && i < 4; i++) {
        if (kve_take_nil(&probe))
            continue;
        if (kv_msgpack_peek(&probe) != (i % 2 ? KV_MSGPACK_STR : KV_MSGPACK_UINT))
            return false;
        kv_msgpack_skip(&probe);
    }
    return true;
}

/* Read a string. Returns "" for nil and for another type, which later versions may put here. */
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
            kve_take_group(m, ev);
        else if (i == 1)
            ev->kind = kve_take_optional_str(m);
        else if (i == 2)
            kve_take_window(m, ev);
        else if (i == 3)
            ev->locality = kve_take_optional_str(m);
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
            kve_take_per_block(m, &ev->mm_infos);
        } else if (type == KV_MSGPACK_UINT && !ev->has_group && !strings) {
            kve_take_group(m, ev);
        } else if (type == KV_MSGPACK_UINT && !ev->window) {
            kve_take_window(m, ev);
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

/*
 * Read hashes, parent, tokens, block size | lora id, medium, lora name or metadata, extra keys |
 * tail.
 */
static int read_stored(struct kv_msgpack *m, uint32_t n, struct kve_scratch *scratch,
                       struct kve_raw_event *ev)
{
    int rc;

    if (n < 4)
        return KVE_SKIP_RC(MALFORMED);
    rc = kve_take_hashes(m, scratch, ev);
    if (rc)
        return rc;
    kve_take_parent(m, ev);
    rc = kve_take_tokens(m, scratch, ev);
    if (rc)
        return rc;
    kve_take_block_size(m, ev);
    if (n > 4)
        kve_take_lora_id(m, ev);
    if (n > 5)
        ev->medium = kve_take_optional_str(m);
    if (n > 6 && !kve_take_nil(m)) {
        if (kv_msgpack_peek(m) == KV_MSGPACK_MAP)
            kve_take_metadata(m, ev);
        else
            ev->lora_name = kve_take_str(m);
    }
    if (n > 7)
        kve_take_extra_keys(m, ev);
    if (n > 8)
        take_tail(m, n - 8, ev);
    return kve_raw_verdict(m);
}

static int read_removed(struct kv_msgpack *m, uint32_t n, struct kve_scratch *scratch,
                        struct kve_raw_event *ev)
{
    int rc;

    if (n < 1)
        return KVE_SKIP_RC(MALFORMED);
    rc = kve_take_hashes(m, scratch, ev);
    if (rc)
        return rc;
    if (n > 1)
        ev->medium = kve_take_optional_str(m);
    if (n > 2)
        take_tail(m, n - 2, ev);
    return kve_raw_verdict(m);
}

/* Read [tag] or [tag, ownership], the tag being read already. */
static int read_cleared(struct kv_msgpack *m, uint32_t n, struct kve_raw_event *ev)
{
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        if (i == 0)
            ev->ownership = take_str_if_any(m);
        else
            kv_msgpack_skip(m);
    }
    return kve_raw_verdict(m);
}

static int read_array(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev)
{
    uint32_t n = kv_msgpack_array(m);

    if (!n)
        return KVE_SKIP_RC(MALFORMED);
    ev->type = kve_raw_type_of(kve_take_str(m));
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
        return kve_raw_verdict(m);
    }
}

/* -- values that wait for the others ----------------------------------------------------------- */

/*
 * Read one block's lookahead tokens, which must agree with the tokens of the next block in the
 * event.
 */
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
    if (KV_LIKELY(kve_at_short_map(m))) {
        ret->is_map = true;
        return kve_raw_read_map(m, scratch, ret);
    }
    switch (kv_msgpack_peek(m)) {
    case KV_MSGPACK_MAP:
        ret->is_map = true;
        return kve_raw_read_map(m, scratch, ret);
    case KV_MSGPACK_ARRAY:
        return read_array(m, scratch, ret);
    default:
        return KVE_SKIP_RC(MALFORMED);
    }
}
