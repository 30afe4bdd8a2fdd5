// SPDX-License-Identifier: Apache-2.0
/*
 * Buckets of eight words, a cache line each. A word is 0 (free) or 60 bits of the key's hash and, in
 * the lowest four bits, the member.
 *
 *     hash ──► bucket   | 60 bits, member | 60 bits, member | 0 | ...
 *
 * A new key takes a free word, or that of another key, chosen by the hash. Words are written and read
 * as a whole, relaxed: a reader sees an older place at worst. Two keys with the same 60 bits share a
 * word, and each gets the other's place now and then: a hint that is wrong.
 */
#include "tiered/places.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/core/error.h"
#include "base/core/xxh.h"

enum { WAYS = 8, MEMBER_BITS = 15 };

struct trd_places {
    uint64_t n_buckets; /* a power of two */
    _Atomic uint64_t *words;
};

int trd_places_create(uint64_t n, struct trd_places **ret)
{
    struct trd_places *places = calloc(1, sizeof(*places));
    uint64_t buckets = 1;

    while (buckets * WAYS < n)
        buckets *= 2;
    if (places)
        places->words = calloc(buckets * WAYS, sizeof(*places->words));
    if (!places || !places->words) {
        free(places);
        return -ENOMEM;
    }
    places->n_buckets = buckets;
    *ret = places;
    return 0;
}

void trd_places_destroy(struct trd_places *places)
{
    if (!places)
        return;
    free(places->words);
    free(places);
}

/* Find a key's bucket; *@ret_tag: its word without the member. Never 0, which is a free word. */
static _Atomic uint64_t *bucket_of(const struct trd_places *places, const void *hash,
                                   size_t hash_len, uint64_t *ret_tag)
{
    XXH128_hash_t h = XXH3_128bits(hash, hash_len);

    *ret_tag = h.low64 & ~(uint64_t)MEMBER_BITS;
    if (*ret_tag == 0)
        *ret_tag = MEMBER_BITS + 1;
    return places->words + (h.high64 & (places->n_buckets - 1)) * WAYS;
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

int trd_places_find(const struct trd_places *places, const void *hash, size_t hash_len)
{
    uint64_t tag;
    const _Atomic uint64_t *bucket = bucket_of(places, hash, hash_len, &tag);

    for (size_t i = 0; i < WAYS; i++) {
        uint64_t word = load(&bucket[i]);

        if ((word & ~(uint64_t)MEMBER_BITS) == tag)
            return (int)(word & MEMBER_BITS);
    }
    return -1;
}

void trd_places_note(struct trd_places *places, const void *hash, size_t hash_len, unsigned member)
{
    uint64_t tag;
    _Atomic uint64_t *bucket = bucket_of(places, hash, hash_len, &tag), *free_word = NULL;

    for (size_t i = 0; i < WAYS; i++) {
        uint64_t word = load(&bucket[i]);

        if (word == (tag | member))
            return; /* no write, which would take the line from other processors */
        if ((word & ~(uint64_t)MEMBER_BITS) == tag) {
            atomic_store_explicit(&bucket[i], tag | member, memory_order_relaxed);
            return;
        }
        if (!word && !free_word)
            free_word = &bucket[i];
    }
    if (!free_word)
        free_word = &bucket[tag >> 61];
    atomic_store_explicit(free_word, tag | member, memory_order_relaxed);
}

void trd_places_forget(struct trd_places *places, const void *hash, size_t hash_len)
{
    uint64_t tag;
    _Atomic uint64_t *bucket = bucket_of(places, hash, hash_len, &tag);

    for (size_t i = 0; i < WAYS; i++)
        if ((load(&bucket[i]) & ~(uint64_t)MEMBER_BITS) == tag)
            atomic_store_explicit(&bucket[i], 0, memory_order_relaxed);
}
