// SPDX-License-Identifier: Apache-2.0
/** Sets of keys, as XXH3-128 of each: 16 bytes a key, twice to four times that in memory. */
#ifndef KV_TIERED_KEYS_H
#define KV_TIERED_KEYS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/core/buf.h"
#include "base/core/xxh.h"

struct trd_keys {
    XXH128_hash_t *slots; /* low64 is 0 in a free one */
    size_t n, capacity;   /* a power of two, or 0 */
};

/** Add a key. Returns 1 when it is new, 0 when it was there, -ENOMEM. Not thread-safe. */
int trd_keys_add(struct trd_keys *keys, const void *hash, size_t hash_len);
bool trd_keys_has(const struct trd_keys *keys, const void *hash, size_t hash_len);
void trd_keys_fini(struct trd_keys *keys); /* the set can be used again */

/** Keys that were put to a member and are not published there: a set, and the keys themselves. */
struct trd_pending {
    struct trd_keys set;
    struct kv_buf keys; /* length byte and key of each */
    bool many;          /* some are missing here: the member counts as holding any key */
};

/** Limit of keys in a trd_pending; with more, `many` is set. */
#define TRD_PENDING_MAX ((size_t)1 << 20)

void trd_pending_add(struct trd_pending *pending, const void *hash, size_t hash_len);
/** Add all keys of @more. */
void trd_pending_merge(struct trd_pending *pending, const struct trd_pending *more);
/** Remove the keys that @other has. */
void trd_pending_subtract(struct trd_pending *pending, const struct trd_pending *other);
void trd_pending_fini(struct trd_pending *pending); /* it can be used again */

static inline bool trd_pending_any(const struct trd_pending *pending)
{
    return pending->set.n > 0 || pending->many;
}

/** Step to the next of its keys, from *@at on, at first 0. False: that was the last. */
bool trd_pending_next(const struct trd_pending *pending, size_t *at, const uint8_t **ret_hash,
                      size_t *ret_len);

#endif
