// SPDX-License-Identifier: Apache-2.0
/**
 * Fields of an event, for both of its forms (raw_event.c: positional arrays; raw_map.c: maps). Each
 * function reads one value where @m stands. Errors stick in @m: kve_raw_verdict says at the end.
 */
#ifndef KV_EVENT_WIRE_RAW_FIELDS_H
#define KV_EVENT_WIRE_RAW_FIELDS_H

#include <endian.h>
#include <string.h>

#include "event/wire/raw_event.h"

/** Return 0, or KVE_SKIP_RC(MALFORMED) when @m has failed. */
static inline int kve_raw_verdict(const struct kv_msgpack *m)
{
    return KV_UNLIKELY(kv_msgpack_failed(m)) ? KVE_SKIP_RC(MALFORMED) : 0;
}

/*
 * An event of one block is a dozen small values, nearly always in their shortest form. The inline
 * functions below read that form without a call and leave all others to kv_msgpack's functions.
 */

/** Return true when @m stands at a string of less than 32 bytes. */
static inline bool kve_at_short_str(const struct kv_msgpack *m)
{
    return m->p < m->end && (*m->p & 0xe0) == 0xa0;
}

static inline struct kv_str kve_take_str(struct kv_msgpack *m)
{
    if (KV_LIKELY(kve_at_short_str(m))) {
        struct kv_str s = {(const char *)m->p + 1, *m->p & 0x1f};

        if (KV_LIKELY(s.len < (size_t)(m->end - m->p))) {
            m->p += 1 + s.len;
            return s;
        }
    }
    return kv_msgpack_str(m);
}

static inline uint64_t kve_take_u64(struct kv_msgpack *m)
{
    return m->p < m->end && *m->p < 0x80 ? *m->p++ : kv_msgpack_u64(m);
}

/** Return true when @m stands at an array, or a map, of less than 16 elements, all of which may be there. */
static inline bool kve_at_short_array(const struct kv_msgpack *m)
{
    return m->end - m->p > 15 && (*m->p & 0xf0) == 0x90;
}

static inline bool kve_at_short_map(const struct kv_msgpack *m)
{
    return m->end - m->p > 30 && (*m->p & 0xf0) == 0x80;
}

static inline uint32_t kve_take_array(struct kv_msgpack *m)
{
    return KV_LIKELY(kve_at_short_array(m)) ? *m->p++ & 0x0fu : kv_msgpack_array(m);
}

static inline uint32_t kve_take_map(struct kv_msgpack *m)
{
    return KV_LIKELY(kve_at_short_map(m)) ? *m->p++ & 0x0fu : kv_msgpack_map(m);
}

/** Read a number where @m stands at one of 64 bits with a fraction. Returns false for all others. */
static inline bool kve_take_float64(struct kv_msgpack *m, double *ret)
{
    uint64_t bits;

    if (m->end - m->p < 9 || *m->p != 0xcb)
        return false;
    memcpy(&bits, m->p + 1, sizeof(bits));
    bits = be64toh(bits);
    memcpy(ret, &bits, sizeof(bits));
    m->p += 9;
    return true;
}

static inline bool kve_take_nil(struct kv_msgpack *m)
{
    if (m->p < m->end && *m->p == 0xc0) {
        m->p++;
        return true;
    }
    return false;
}

/** Read a string; "" for nil. */
static inline struct kv_str kve_take_optional_str(struct kv_msgpack *m)
{
    return kve_take_nil(m) ? (struct kv_str){"", 0} : kve_take_str(m);
}

/**
 * Read a block hash: an integer of either sign, or a digest of at least 8 bytes, whose last 8
 * count.
 */
static inline uint64_t kve_take_hash(struct kv_msgpack *m)
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

/** Read the hash of the parent block; nil, or no bytes, for none. */
static inline void kve_take_parent(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_parent = !kve_take_nil(m);
    if (ev->has_parent && m->end - m->p > 1 && m->p[0] == 0xc4 && !m->p[1]) {
        ev->has_parent = false;
        kv_msgpack_skip(m);
    }
    if (ev->has_parent)
        ev->parent = kve_take_hash(m);
}

/** Read the tokens in a block, nil for none. */
static inline void kve_take_block_size(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_block_size = !kve_take_nil(m);
    if (ev->has_block_size)
        ev->block_size = kve_take_u64(m);
}

/** Read the number of the cache group, nil for none. */
static inline void kve_take_group(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->has_group = !kve_take_nil(m);
    if (ev->has_group)
        ev->group = kve_take_u64(m);
}

/** Read the number of an adapter. Publishers without one write nil, or a negative number. */
static inline void kve_take_lora_id(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    enum kv_msgpack_type type;

    ev->has_adapter = false;
    if (kve_take_nil(m))
        return;
    type = kv_msgpack_peek(m);
    if (type == KV_MSGPACK_STR) {
        ev->has_adapter = kv_msgpack_str(m).len > 0;
        return;
    }
    ev->has_adapter = type == KV_MSGPACK_UINT;
    kv_msgpack_skip(m);
}

/** Read the length of a sliding window in tokens. Publishers without a window write nil or 0. */
static inline void kve_take_window(struct kv_msgpack *m, struct kve_raw_event *ev)
{
    ev->window = kve_take_nil(m) ? 0 : kve_take_u64(m);
}

/** Read block hashes, or tokens, into @scratch. Returns 0, KVE_SKIP_RC(...) or -ENOMEM. */
int kve_take_hashes(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev);
int kve_take_tokens(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev);

/** Return the event type called @s in "type", or in an array's first element. */
enum kve_raw_type kve_raw_type_of(struct kv_str s);

/** Read the names of components: a bit for each, KVE_COMPONENT_FULL for "FULL". */
void kve_take_components(struct kv_msgpack *m, struct kve_raw_event *ev);
/** Read `{"cache_salt": ..., "session_id": ...}`, of which the salt counts. */
void kve_take_metadata(struct kv_msgpack *m, struct kve_raw_event *ev);
/** Note where an array with one entry per block lies. An array of nils counts as none. */
void kve_take_per_block(struct kv_msgpack *m, struct kve_raw_value *ret);
/** Note where the blocks' extra keys lie, and whether there is a list of them at all. */
void kve_take_extra_keys(struct kv_msgpack *m, struct kve_raw_event *ev);

/** Read an event in map form. Returns 0, KVE_SKIP_RC(...) or -ENOMEM. */
int kve_raw_read_map(struct kv_msgpack *m, struct kve_scratch *scratch, struct kve_raw_event *ev);

#endif
