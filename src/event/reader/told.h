// SPDX-License-Identifier: Apache-2.0
/**
 * Cache groups as a registration tells them, for what events don't tell: the length of a chunk
 * always, kind, window and block size where events have no field for them.
 */
#ifndef KV_EVENT_READER_TOLD_H
#define KV_EVENT_READER_TOLD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json/json.h" /* struct kv_str */

/** Kinds of cache groups, by vLLM's names (kv_cache_spec_kind). */
enum kve_kind {
    KVE_KIND_UNKNOWN,
    KVE_KIND_FULL,
    KVE_KIND_MLA,
    KVE_KIND_SINK_FULL,
    KVE_KIND_SLIDING,
    KVE_KIND_SLIDING_MLA,
    KVE_KIND_MAMBA,
    KVE_KIND_CHUNKED,
    KVE_N_KINDS
};

/** Return the kind of that name; KVE_KIND_UNKNOWN for any other. */
enum kve_kind kve_kind_of(struct kv_str name);
/** Return the name; NULL for KVE_KIND_UNKNOWN. */
const char *kve_kind_name(enum kve_kind kind);
static inline bool kve_kind_is_full(enum kve_kind kind)
{
    return kind == KVE_KIND_FULL || kind == KVE_KIND_MLA || kind == KVE_KIND_SINK_FULL;
}
static inline bool kve_kind_is_sliding(enum kve_kind kind)
{
    return kind == KVE_KIND_SLIDING || kind == KVE_KIND_SLIDING_MLA;
}

/** Most groups that a registration tells. */
#define KVE_MAX_TOLD 32

/** Value of kve_told_group.group: every group of the kind. */
#define KVE_ANY_GROUP UINT32_MAX

/** A group; sizes are in tokens, and 0 where they aren't told. */
struct kve_told_group {
    uint32_t group; /* its number in events, or KVE_ANY_GROUP */
    uint32_t kind;  /* enum kve_kind */
    uint32_t block_size;
    uint32_t window; /* of a sliding kind: what a token attends to, itself included */
    uint32_t chunk;  /* of KVE_KIND_CHUNKED: what tokens attend to each other within */
};

/** All groups that a registration tells, each once: sorted by number, those without one by kind. */
struct kve_told {
    uint32_t n;
    struct kve_told_group items[KVE_MAX_TOLD];
};

/**
 * Return what is told of a group: by its number, else of every group of the kind that its event names
 * (KVE_KIND_UNKNOWN: none). NULL: nothing.
 */
const struct kve_told_group *kve_told_find(const struct kve_told *told, uint64_t group,
                                           enum kve_kind kind);
/** Add a group. Returns NULL, or why it can't be. */
const char *kve_told_add(struct kve_told *told, const struct kve_told_group *group);

/**
 * Check a group beside registered blocks of @block_size tokens. Returns NULL, or why it can't be.
 */
const char *kve_told_problem(const struct kve_told_group *group, uint32_t block_size);

#endif
