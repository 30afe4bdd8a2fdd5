// SPDX-License-Identifier: Apache-2.0
/* Frequency of recent uses of keys: a count-min sketch of 4-bit counters (TinyLFU). A key has four
 * counters in one cache line; its count is the least of them. Counters are halved over time.
 * Halving all of them every 10 n uses would stop the pool for milliseconds, so every ten uses halve
 * one word. */
#ifndef KVBM_BM_POOL_SKETCH_H
#define KVBM_BM_POOL_SKETCH_H

#include <stddef.h>
#include <stdint.h>

#include "bm/storage/memory.h"

#define KVBM_SKETCH_MAX 15
#define KVBM_SKETCH_PERIOD 10 /* uses per key before its count is halved */

struct kvbm_sketch {
    uint64_t *words; /* n_lines * 8 words of 16 counters; NULL: counts nothing */
    uint32_t n_lines;
    uint32_t uses, next;
    size_t mapped;
};

static inline int kvbm_sketch_init(struct kvbm_sketch *s, uint32_t n_keys)
{
    s->n_lines = n_keys / 8 + 1; /* 16 counters a key */
    s->words = kvbm_map((size_t)s->n_lines * 64, &s->mapped);
    return s->words ? 0 : -1;
}

static inline void kvbm_sketch_fini(struct kvbm_sketch *s)
{
    kvbm_unmap(s->words, s->mapped);
}

static inline uint64_t kvbm_sketch_spread(uint32_t tag)
{
    uint64_t x = (tag + UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xbf58476d1ce4e5b9);

    return (x ^ x >> 29) * UINT64_C(0x94d049bb133111eb);
}

static inline uint64_t *kvbm_sketch_line(const struct kvbm_sketch *s, uint64_t spread)
{
    return s->words + (size_t)((spread >> 32) * s->n_lines >> 32) * 8;
}

static inline uint32_t kvbm_sketch_count(const struct kvbm_sketch *s, uint32_t tag)
{
    uint64_t spread = kvbm_sketch_spread(tag);
    const uint64_t *line = kvbm_sketch_line(s, spread);
    uint32_t least = KVBM_SKETCH_MAX;

    for (unsigned i = 0; i < 4; i++) { /* each has two words of its own, so the four differ */
        uint32_t bits = (uint32_t)(spread >> (i * 5)) & 31;
        uint32_t count = (uint32_t)(line[2 * i + (bits >> 4)] >> ((bits & 15) * 4)) & 15;

        least = count < least ? count : least;
    }
    return least;
}

static inline void kvbm_sketch_age(struct kvbm_sketch *s)
{
    if (++s->uses < KVBM_SKETCH_PERIOD)
        return;
    s->uses = 0;
    s->words[s->next] = s->words[s->next] >> 1 & UINT64_C(0x7777777777777777);
    s->next = s->next + 1 == s->n_lines * 8 ? 0 : s->next + 1;
}

static inline void kvbm_sketch_use(struct kvbm_sketch *s, uint32_t tag)
{
    uint64_t spread = kvbm_sketch_spread(tag);
    uint64_t *line = kvbm_sketch_line(s, spread);

    for (unsigned i = 0; i < 4; i++) {
        uint32_t bits = (uint32_t)(spread >> (i * 5)) & 31;
        unsigned at = (bits & 15) * 4;

        if ((line[2 * i + (bits >> 4)] >> at & 15) < KVBM_SKETCH_MAX)
            line[2 * i + (bits >> 4)] += UINT64_C(1) << at;
    }
    kvbm_sketch_age(s);
}

#endif
