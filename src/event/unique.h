// SPDX-License-Identifier: Apache-2.0
/** Whether the hashes of an event are all different. */
#ifndef KV_EVENT_UNIQUE_H
#define KV_EVENT_UNIQUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Memory of the check, reused: a table in which a slot counts only while its mark is the current
 * check's, so that nothing is ever cleared.
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

/** Returns 1 when @hashes (and *@parent, unless NULL) are all different, 0 when not, or -ENOMEM. */
int kve_unique_check(struct kve_unique *unique, const uint64_t *parent, const uint64_t *hashes,
                     size_t n);

/** A random odd number, so that nobody outside can choose what collides. */
uint64_t kve_secret(void);

/**
 * Where a key, already multiplied by a secret, goes in a table of @capacity (a power of two, at
 * least 2) slots: the top bits of the product. Only they depend on every bit of the key; with bits
 * from further down, keys that differ in their high bits alone would all collide, whatever the
 * secret.
 */
static inline size_t kve_slot_of(uint64_t product, size_t capacity)
{
    return (size_t)(product >> (__builtin_clzll(capacity) + 1));
}

#endif
