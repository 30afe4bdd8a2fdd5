// SPDX-License-Identifier: Apache-2.0
/**
 * One event as it stands in a batch, before any rule is applied to it.
 *
 * Engines write an event as a map with named fields or as a positional array that grew over the
 * years; both end up in the same struct. Strings and spans point into the payload, hashes and
 * tokens into the scratch.
 */
#ifndef KV_EVENT_RAW_EVENT_H
#define KV_EVENT_RAW_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/msgpack.h"
#include "kv_event.h"

/** Return value of a reading function that leaves an event out: positive. Others: 0 or an errno. */
#define KVE_SKIP_RC(reason) (1 + (int)KVE_SKIP_##reason)

/** Tokens of lookahead, at most: forms of hashing are told apart by them (see struct kve_op). */
#define KVE_MAX_LOOKAHEAD 31

enum kve_raw_type {
    KVE_RAW_NONE, /* no type seen */
    KVE_RAW_STORED,
    KVE_RAW_REMOVED,
    KVE_RAW_CLEARED,
    KVE_RAW_IGNORED, /* a type that says so itself */
    KVE_RAW_UNKNOWN
};

/** A value to be read later; p is NULL when there is none. */
struct kve_raw_value {
    const uint8_t *p, *end;
};

struct kve_raw_event {
    enum kve_raw_type type;
    bool has_hashes, has_parent, has_block_size, has_group, has_rank;
    bool is_map;
    bool pairs; /* tokens came as pairs: there is one more than n_tokens */
    size_t n_hashes;
    size_t n_tokens;
    uint64_t parent;
    uint64_t block_size;
    uint64_t group;
    uint64_t window; /* of a sliding window, in tokens; 0: not told */
    uint32_t rank;
    struct kv_str medium, lora_name, cache_salt, kind, locality, ownership; /* empty: none */
    struct kve_raw_value extra_keys, mm_infos, lookahead, remaining;
};

/**
 * Memory that events are read into, reused. Hashes of one batch are appended (they may become part
 * of its operations): an event's are at hashes + n_hashes, and count once n_hashes is moved on.
 */
struct kve_scratch {
    uint64_t *hashes;
    size_t n_hashes, hashes_capacity;
    uint32_t *tokens; /* always with room for KVE_MAX_LOOKAHEAD more */
    size_t tokens_capacity;
    size_t max_items; /* limit on hashes and on tokens of one event */
};

/** Room for @need elements of @bytes each in *@memory. Returns 0 or -ENOMEM. */
int kve_grow_slowly(void *memory, size_t *capacity, size_t need, size_t bytes);
static inline int kve_grow(void *memory, size_t *capacity, size_t need, size_t bytes)
{
    return KV_LIKELY(need <= *capacity) ? 0 : kve_grow_slowly(memory, capacity, need, bytes);
}

/**
 * Read the event where @m stands. Returns 0; KVE_SKIP_RC(...) with @m anywhere in it; -ENOMEM.
 */
int kve_raw_event_read(struct kv_msgpack *m, struct kve_scratch *scratch,
                       struct kve_raw_event *ret);

/**
 * The tokens after each of the first @n_blocks blocks that its hash covers. @tokens are the
 * event's, those after the last block are put behind it. Returns 0 with their number for each
 * block, or KVE_SKIP_RC(...): too many, not the same number for all, or other tokens than the next
 * block's.
 */
int kve_raw_lookahead(const struct kve_raw_event *ev, uint32_t *tokens, size_t n_blocks,
                      uint32_t block_size, uint32_t *ret);

/** Copies that are left of each hash of a removal, when ev->remaining is there. As above. */
int kve_raw_remaining(const struct kve_raw_event *ev, uint32_t *ret);

#endif
