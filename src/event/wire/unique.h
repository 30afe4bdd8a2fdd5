// SPDX-License-Identifier: Apache-2.0
/** Check that the hashes of an event are all different. */
#ifndef KV_EVENT_WIRE_UNIQUE_H
#define KV_EVENT_WIRE_UNIQUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Memory of the check, used again. A slot counts only while its mark is the current check's, so the
 * table is never cleared.
 */
struct kve_unique {
    struct kve_unique_slot {
        uint64_t hash;
        uint64_t mark;
    } * slots;
    size_t capacity; /* 0 or a power of two */
    uint64_t mark;
    uint64_t secret; /* odd */
};

void kve_unique_init(struct kve_unique *unique);
void kve_unique_fini(struct kve_unique *unique);

/** Return 1 when @hashes (and *@parent, unless NULL) are all different, 0 when not, or -ENOMEM. */
int kve_unique_check(struct kve_unique *unique, const uint64_t *parent, const uint64_t *hashes,
                     size_t n);

/**
 * Return the slot of a key, already multiplied by a secret, in a table of @capacity (a power of
 * two, at least 2). The slot is the top bits of the product: only they depend on every bit of the
 * key. With lower bits, keys that differ only in their high bits would all collide, whatever the
 * secret.
 */
static inline size_t kve_slot_of(uint64_t product, size_t capacity)
{
    return (size_t)(product >> (__builtin_clzll(capacity) + 1));
}

#endif
