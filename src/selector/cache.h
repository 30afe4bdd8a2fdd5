// SPDX-License-Identifier: Apache-2.0
/**
 * Choices of /select that POST /reservations may book by their id alone, once. A cache: the oldest makes
 * room, and one whose time is over is gone. The owner has the lock.
 */
#ifndef KV_SELECTOR_CACHE_H
#define KV_SELECTOR_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_select.h"

/** A choice, with what a booking needs of its request. */
struct ksel_kept {
    struct ksel_kept *newer, *older; /* by age */
    struct ksel_kept *next;          /* in its bucket */
    uint64_t until_ns;
    struct kvsel_choice choice;
    const char *model, *group, *lora, *session; /* lora, session: or NULL */
    uint64_t tokens;
    uint32_t block_size;
    uint64_t *hashes;
    size_t n_hashes;
    bool no_prefill;
    char *id;
    size_t id_len;
};

/** Zero-initialise, and set max. */
struct ksel_cache {
    struct ksel_kept **buckets;
    size_t n_buckets; /* 0 or a power of two */
    struct ksel_kept *oldest, *newest;
    size_t n, max, bytes;
};

#define KSEL_CACHE_BYTES ((size_t)256 << 20)

void ksel_cache_fini(struct ksel_cache *cache);

/**
 * Keep a copy of @kept, whose id may have been kept before: the new one counts. Without memory nothing is
 * kept.
 */
void ksel_cache_put(struct ksel_cache *cache, const struct ksel_kept *kept, uint64_t now_ns);

/** Take a choice out. NULL: there is none, or its time is over. Free it with free(). */
struct ksel_kept *ksel_cache_take(struct ksel_cache *cache, const char *id, size_t len,
                                  uint64_t now_ns);

#endif
