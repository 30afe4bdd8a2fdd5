// SPDX-License-Identifier: Apache-2.0
/**
 * One event as a batch holds it, before the reader applies any rule.
 *
 * Engines write an event as a map with named fields, or as a positional array that grew over the
 * years. Both forms fill the same struct. Strings and spans point into the payload; hashes and
 * tokens into the scratch.
 */
#ifndef KV_EVENT_WIRE_RAW_EVENT_H
#define KV_EVENT_WIRE_RAW_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json/msgpack.h"
#include "kv_event.h"

/**
 * Positive return value of a reading function for an event to skip. Other values are 0 or an errno.
 */
#define KVE_SKIP_RC(reason) (1 + (int)KVE_SKIP_##reason)

/** Most tokens of lookahead. Their number tells forms of hashing apart (see struct kve_op). */
#define KVE_MAX_LOOKAHEAD 31

enum kve_raw_type {
    KVE_RAW_NONE, /* no type seen */
    KVE_RAW_STORED,
    KVE_RAW_REMOVED,
    KVE_RAW_CLEARED,
    KVE_RAW_IGNORED, /* the type "Ignored" */
    KVE_RAW_UNKNOWN
};

/** Bit of the component that a match of any length needs; the bits of others follow from their names. */
#define KVE_COMPONENT_FULL 1u

/** A value that is read later; p is NULL without one. */
struct kve_raw_value {
    const uint8_t *p, *end;
};

struct kve_raw_event {
    enum kve_raw_type type;
    bool has_hashes, has_parent, has_block_size, has_group, has_rank;
    bool is_map;
    bool
        has_adapter; /* lora_id names an adapter, by a number that depends on the order of loading */
    bool lists_extra_keys; /* extra_keys is a list, maybe of nils alone */
    bool pairs;            /* tokens came as pairs: the scratch has one more than n_tokens */
    size_t n_hashes;
    size_t n_tokens;
    uint64_t parent;
    uint64_t block_size;
    uint64_t group;
    uint64_t window; /* length of a sliding window in tokens; 0: none given */
    uint32_t rank;
    struct kv_str medium, lora_name, cache_salt, kind, locality, ownership; /* empty: none */
    uint32_t components; /* see kve_raw_components; 0: not told */
    struct kve_raw_value extra_keys, mm_infos, lookahead, remaining;
};

/**
 * Memory for the fields of events, used again for each event. Hashes of a batch's operations stay
 * in it: an event's hashes begin at hashes + n_hashes, and join the batch when n_hashes advances
 * over them.
 */
struct kve_scratch {
    uint64_t *hashes;
    size_t n_hashes, hashes_capacity;
    uint32_t *tokens; /* capacity always includes KVE_MAX_LOOKAHEAD more */
    size_t tokens_capacity;
    size_t max_items; /* most hashes, and most tokens, of one event */
};

/** Grow *@memory to @need elements of @bytes each. Returns 0 or -ENOMEM. */
int kve_grow_slowly(void *memory, size_t *capacity, size_t need, size_t bytes);
static inline int kve_grow(void *memory, size_t *capacity, size_t need, size_t bytes)
{
    return KV_LIKELY(need <= *capacity) ? 0 : kve_grow_slowly(memory, capacity, need, bytes);
}

/**
 * Read the event where @m stands. Returns 0; KVE_SKIP_RC(...), with @m at any place inside the
 * event; or -ENOMEM.
 */
int kve_raw_event_read(struct kv_msgpack *m, struct kve_scratch *scratch,
                       struct kve_raw_event *ret);

/**
 * Find the rank that the event at @p, up to @end, names for itself, whatever else it is. Returns false
 * when it names none; *@ret is the same then.
 */
bool kve_raw_find_rank(const uint8_t *p, const uint8_t *end, uint32_t *ret);

/**
 * Find the lookahead: the tokens behind each block that the block's hash covers. @tokens are the
 * event's; the lookahead of the last block is appended to them. Returns 0 with the number of
 * lookahead tokens per block in *@ret. Returns KVE_SKIP_RC(...) when there are too many, when
 * blocks differ in their number, or when they contradict the next block's tokens.
 */
int kve_raw_lookahead(const struct kve_raw_event *ev, uint32_t *tokens, size_t n_blocks,
                      uint32_t block_size, uint32_t *ret);

/**
 * Read the number of copies left of each hash of a removal; ev->remaining must be set. Returns 0 or
 * KVE_SKIP_RC(...).
 */
int kve_raw_remaining(const struct kve_raw_event *ev, uint32_t *ret);

#endif
