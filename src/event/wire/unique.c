// SPDX-License-Identifier: Apache-2.0
#include "event/wire/unique.h"

#include <errno.h>
#include <stdlib.h>

#include "base/core/mix.h"

#define FEW 8 /* up to this many hashes are compared pairwise */
#define MIN_CAPACITY 64

void kve_unique_init(struct kve_unique *unique)
{
    *unique = (struct kve_unique){.secret = kv_secret()};
}

void kve_unique_fini(struct kve_unique *unique)
{
    free(unique->slots);
    unique->slots = NULL;
    unique->capacity = 0;
}

static bool few_differ(const uint64_t *hashes, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            if (hashes[i] == hashes[j])
                return false;
        }
    }
    return true;
}

/* Grow the table so that @n hashes fill at most half of it. */
static int make_room(struct kve_unique *unique, size_t n)
{
    size_t capacity = MIN_CAPACITY;

    if (n <= unique->capacity / 2)
        return 0;
    while (capacity / 2 < n)
        capacity *= 2;
    kve_unique_fini(unique);
    unique->slots = calloc(capacity, sizeof(*unique->slots));
    if (!unique->slots)
        return -ENOMEM;
    unique->capacity = capacity;
    unique->mark = 0;
    return 0;
}

static bool add(struct kve_unique *unique, uint64_t hash)
{
    size_t mask = unique->capacity - 1;
    size_t i = kve_slot_of(hash * unique->secret, unique->capacity);

    for (; unique->slots[i].mark == unique->mark; i = (i + 1) & mask) {
        if (unique->slots[i].hash == hash)
            return false;
    }
    unique->slots[i].hash = hash;
    unique->slots[i].mark = unique->mark;
    return true;
}

int kve_unique_check(struct kve_unique *unique, const uint64_t *parent, const uint64_t *hashes,
                     size_t n)
{
    size_t i;

    if (parent) {
        for (i = 0; i < n; i++) {
            if (hashes[i] == *parent)
                return 0;
        }
    }
    if (n <= FEW)
        return few_differ(hashes, n);
    if (make_room(unique, n) < 0)
        return -ENOMEM;
    unique->mark++;
    for (i = 0; i < n; i++) {
        if (!add(unique, hashes[i]))
            return 0;
    }
    return 1;
}
