// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded block cache with LRU eviction, like an engine's prefix cache. It holds only names
 * (chain hashes), no bytes.
 *
 * Thread-confined.
 */
#ifndef KV_CLI_REPLAY_CACHE_H
#define KV_CLI_REPLAY_CACHE_H

#include <stddef.h>
#include <stdint.h>

struct kc_cache;

/** Which block of a chain counts as used last, and is evicted last. */
enum kc_cache_order {
    /* The root: leaves are evicted first, so the rest is always a set of prefixes. */
    KC_LEAF_FIRST,
    KC_PLAIN_LRU /* the end of the chain: textbook LRU over the references in order */
};

/** Create a cache of @capacity blocks; 0: unlimited. Returns 0 or -ENOMEM. */
int kc_cache_create(uint64_t capacity, enum kc_cache_order order, struct kc_cache **ret);
void kc_cache_destroy(struct kc_cache *cache);

/** Return the number of leading hashes of a chain in the cache. Changes nothing. */
size_t kc_cache_lookup(const struct kc_cache *cache, const uint64_t *chain, size_t n);

/** Effect of serving one prompt on the cache. */
struct kc_cache_use {
    size_t held;             /* leading blocks that were in the cache */
    size_t end;              /* blocks [held, end) were added */
    const uint64_t *evicted; /* evicted blocks, in order; valid until the next use */
    size_t n_evicted;
};

/**
 * Serve a prompt: make the chain the most recently used, add its missing blocks, evict the least
 * recently used. A leaf-first cache adds as much of a chain as it has room for (vLLM would refuse
 * the request); chains must then name each prefix by one hash, and no hash twice. Returns 0 or
 * -ENOMEM (nothing changed).
 */
int kc_cache_use(struct kc_cache *cache, const uint64_t *chain, size_t n, struct kc_cache_use *ret);

/** Remove all blocks. */
void kc_cache_clear(struct kc_cache *cache);

uint64_t kc_cache_len(const struct kc_cache *cache);

#endif
