// SPDX-License-Identifier: Apache-2.0
/**
 * Parts of a block's hash beside its tokens: multimodal objects, and the salt of its chain.
 *
 * Engines publish them per block, in one of two fields.
 *
 *   block_mm_infos  nil, or {"mm_objects": [{"mm_hash": 7, "offsets": ...}, ...]}, or the same as
 *                   arrays
 *   extra_keys      nil, or a list of keys, untagged or tagged:
 *
 *       "adapter"   {"type": "lora", "name": ...}           the adapter, which the event also names
 *       ["id", 0]   {"type": "mm", "hash": ..., "offset"}   an object and its offset in the block
 *       "salt"      {"type": "cache_salt", "salt": ...}     in the first block of a chain
 *       b"..."      {"type": "prompt_embeds", "hash": ...}  digest of prompt embeddings
 *
 * Untagged strings are told apart by their place. vLLM writes adapter, objects, salt, embeddings in
 * this order, and since it writes events as maps, objects always as pairs: a string in the first
 * block is the adapter, if the event names that one, or the salt. In events that are arrays a
 * string of 64 hex digits is an object's digest, too.
 *
 * A key that isn't understood makes its block unmatchable: nothing tells which prompts it serves.
 */
#ifndef KV_EVENT_WIRE_EXTRA_KEYS_H
#define KV_EVENT_WIRE_EXTRA_KEYS_H

#include "event/wire/raw_event.h"

/** Most identities in one block; the reader refuses blocks with more. */
#define KVE_MAX_MM 256

/** Prefix of a salt that arrives through an engine's extra keys; the tenant's own salt follows. */
#define KVE_SALT_PREFIX "dynamo-cache-salt:"

/**
 * Return the salt of the chain that starts (or goes on) with this event; empty: the event names
 * none.
 */
struct kv_str kve_extra_salt(const struct kve_raw_event *ev);

/**
 * Return the adapter: the event's lora_name, or the one that a tagged key of its first block names.
 */
struct kv_str kve_extra_adapter(const struct kve_raw_event *ev);

/** A walk over the blocks of an event, in order. */
struct kve_extra_walk {
    struct kv_msgpack m;
    uint32_t left;   /* entries still to read */
    bool infos;      /* read block_mm_infos rather than extra_keys */
    bool is_map;     /* the event is a map */
    bool is_first;   /* the next entry is the first block of a chain */
    bool no_ids;     /* ignore identities in extra_keys */
    bool no_offsets; /* ignore offsets in extra_keys */
    bool placed;     /* some identity so far had an offset: see kve_mm_placed */
    struct kv_str salt, adapter;
};
void kve_extra_walk_init(struct kve_extra_walk *walk, const struct kve_raw_event *ev);

/**
 * Read the identities of the next block's objects. Returns their number; -E2BIG above KVE_MAX_MM;
 * -EINVAL for a key of unknown meaning; -EPROTO for an object without an identity.
 */
int kve_extra_walk_next(struct kve_extra_walk *walk, uint64_t ret[KVE_MAX_MM]);

/** Return true when no further block has anything. Call after the event's last block. */
bool kve_extra_walk_is_over(struct kve_extra_walk *walk);

#endif
