// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded block cache with LRU eviction, as an engine's prefix cache keeps it: what is in it is
 * only names (chain hashes); the bytes would be the engine's business.
 *
 * Thread-confined.
 */
#ifndef KV_CLI_CACHE_H
#define KV_CLI_CACHE_H

#include <stddef.h>
#include <stdint.h>

struct kc_cache;

/** Which block of a chain counts as used last, and so goes last. */
enum kc_cache_order {
    KC_LEAF_FIRST, /* the root: leaves are evicted first, what remains is always a set of prefixes
                    */
    KC_PLAIN_LRU   /* the end of the chain: textbook LRU over the references in order */
};

/** @capacity blocks; 0: unlimited. Returns 0 or -ENOMEM. */
int kc_cache_create(uint64_t capacity, enum kc_cache_order order, struct kc_cache **ret);
void kc_cache_destroy(struct kc_cache *cache);

/** How many leading hashes of a chain are there. Changes nothing. */
size_t kc_cache_lookup(const struct kc_cache *cache, const uint64_t *chain, size_t n);

/** Effect of serving one prompt on the cache. */
struct kc_cache_use {
    size_t held;             /* leading blocks that were there */
    size_t end;              /* blocks [held, end) were brought in */
    const uint64_t *evicted; /* what left, in order; valid until the next use */
    size_t n_evicted;
};

/**
 * Serve a prompt: the chain becomes the most recently used, missing blocks are brought in, the
 * least recently used go. A leaf-first cache brings in as much of a chain as it has room for (vLLM
 * would refuse the request); chains must then name each prefix by one hash, and no hash twice.
 * Returns 0 or -ENOMEM (nothing changed).
 */
int kc_cache_use(struct kc_cache *cache, const uint64_t *chain, size_t n, struct kc_cache_use *ret);

/** Forget everything. */
void kc_cache_clear(struct kc_cache *cache);

uint64_t kc_cache_len(const struct kc_cache *cache);

#endif
