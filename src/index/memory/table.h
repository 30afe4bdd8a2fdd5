// SPDX-License-Identifier: Apache-2.0
/**
 * A hash table of 32-bit values that keeps no keys: about 6 bytes an entry.
 *
 * Entries are in chunks of one cache line: 12 one-byte tags, 12 values, and 8 small counts. An
 * entry whose chunk is full goes on by one of eight steps, chosen by its tag. Each chunk that it
 * passes counts it under that step. A search therefore goes on only where an entry of the same step
 * went on before, and removing leaves no tombstones. (At a fill of 0.85 an absent key costs 1.15
 * chunks, 1.9 after long churn. With one count and a step to the next chunk it is 2.6 and more.)
 * Steps are powers of two and the number of chunks is odd, so every step visits every chunk.
 *
 * The table asks for a value's key (mix_of) only to rebuild its segment. Searches return the values
 * whose tag fits, for the caller to check. Several values may share a key.
 *
 *     directory (top bits of the mixed key) -> segment { chunk, chunk, ... }
 *
 * A segment that is 88 % full grows by an eighth, to a fill of 79 %. Where it would get too large,
 * at SEG_MAX chunks at the latest, it splits in two instead. Below 4M entries it grows by half, to
 * 58 %: a fifth of the rebuilding, for 1.1 bytes an entry. A segment less than 60 % full (40 % below
 * 4M entries) shrinks, or joins its buddy again. No step ever rebuilds more than one segment (about
 * 11,000 entries).
 *
 * Threads: the owner's lock.
 */
#ifndef KV_INDEX_MEMORY_TABLE_H
#define KV_INDEX_MEMORY_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/core/mix.h"
#include "index/memory/mem.h"

#define KVI_CHUNK_ENTRIES 12

struct kvi_chunk {
    uint8_t tag[KVI_CHUNK_ENTRIES]; /* 0: empty */
    /* 4 bits per step: entries that passed this chunk; 15 sticks. */
    uint32_t passed;
    uint32_t value[KVI_CHUNK_ENTRIES];
};

struct kvi_segment {
    _Alignas(64) uint32_t n_chunks;
    uint32_t n; /* entries */
    uint32_t depth;
    uint32_t reserved;
    struct kvi_chunk chunks[] __attribute__((aligned(64)));
};

struct kvi_table {
    struct kvi_segment_ref {
        struct kvi_segment *segment;
        uint32_t n_chunks; /* copied here, to spare a read of the segment's head */
    } * directory;         /* 1 << depth of them */
    uint32_t depth;
    uint32_t n_deepest; /* segments whose depth is the directory's */
    uint64_t n;
    struct kvi_mem *mem;
    uint64_t (*mix_of)(const void *arg, uint32_t value);
    /* Brings into the cache what mix_of will read. */
    void (*prefetch)(const void *arg, uint32_t value);
    const void *arg;
};

/** Make an empty table, which needs only one small segment. Returns 0 or -ENOMEM. */
int kvi_table_init(struct kvi_table *table, struct kvi_mem *mem,
                   uint64_t (*mix_of)(const void *arg, uint32_t value),
                   void (*prefetch)(const void *arg, uint32_t value), const void *arg);
void kvi_table_fini(struct kvi_table *table);

/** Give an empty table room for @n entries at once. Returns 0; -ENOMEM: the table is unchanged. */
int kvi_table_reserve(struct kvi_table *table, uint64_t n);

/** Add @value under the mixed key @mix. Returns 0 or -ENOMEM. */
int kvi_table_insert(struct kvi_table *table, uint64_t mix, uint32_t value);
bool kvi_table_erase(struct kvi_table *table, uint64_t mix, uint32_t value);
/** Change a value in place; its key stays. Never needs memory. */
bool kvi_table_replace(struct kvi_table *table, uint64_t mix, uint32_t value, uint32_t other);

/* -- searching --------------------------------------------------------------------------------- */

struct kvi_probe {
    const struct kvi_chunk *chunks, *chunk;
    uint32_t n_chunks, left;
    uint32_t hits; /* entries of this chunk that the search hasn't returned yet */
    uint8_t tag;
};

static inline uint8_t kvi_tag_of(uint64_t mix)
{
    uint8_t tag = (uint8_t)(mix >> 32);

    return tag ? tag : 1;
}

static inline uint32_t kvi_chunk_of(uint64_t mix, uint32_t n_chunks)
{
    return (uint32_t)((mix & 0xffffffff) * n_chunks >> 32);
}

/** Return the chunk where entries with @tag continue after chunk @c. */
static inline uint32_t kvi_chunk_after(uint32_t c, uint8_t tag, uint32_t n_chunks)
{
    c += 1u << (tag & 7);
    return c < n_chunks ? c : c % n_chunks;
}

/** Return how many entries continued from this chunk; 15: unknown. */
static inline uint32_t kvi_chunk_passed(const struct kvi_chunk *chunk, uint8_t tag)
{
    return chunk->passed >> (tag & 7) * 4 & 15;
}

static inline const struct kvi_segment_ref *kvi_table_ref(const struct kvi_table *table,
                                                          uint64_t mix)
{
    return &table->directory[table->depth ? mix >> (64 - table->depth) : 0];
}

/** Bit i: entry i of the chunk has this tag. */
static inline uint32_t kvi_chunk_match(const struct kvi_chunk *chunk, uint8_t tag)
{
#ifdef __SSE2__
    __m128i tags = _mm_load_si128((const __m128i *)(const void *)chunk);

    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8((char)tag))) & 0xfff;
#else
    uint32_t hits = 0;

    for (uint32_t i = 0; i < KVI_CHUNK_ENTRIES; i++)
        hits |= (uint32_t)(chunk->tag[i] == tag) << i;
    return hits;
#endif
}

/* Bring a line into the cache to write it: another core may have written it last. */
static inline void kvi_prefetch_write(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line)); /* gcc asks for -mprfchw */
#else
    __builtin_prefetch(line, 1);
#endif
}

static inline void kvi_table_prefetch(const struct kvi_table *table, uint64_t mix)
{
    const struct kvi_segment_ref *ref = kvi_table_ref(table, mix);

    kvi_prefetch_write(&ref->segment->n);
    kvi_prefetch_write(&ref->segment->chunks[kvi_chunk_of(mix, ref->n_chunks)]);
}

static inline void kvi_probe_init(struct kvi_probe *probe, const struct kvi_table *table,
                                  uint64_t mix)
{
    const struct kvi_segment_ref *ref = kvi_table_ref(table, mix);

    probe->chunks = ref->segment->chunks;
    probe->n_chunks = probe->left = ref->n_chunks;
    probe->chunk = &probe->chunks[kvi_chunk_of(mix, ref->n_chunks)];
    probe->tag = kvi_tag_of(mix);
    probe->hits = kvi_chunk_match(probe->chunk, probe->tag);
}

/** Find the next value whose tag fits. */
static inline bool kvi_probe_next(struct kvi_probe *probe, uint32_t *ret)
{
    while (!probe->hits) {
        if (!kvi_chunk_passed(probe->chunk, probe->tag) || !--probe->left)
            return false;
        probe->chunk = probe->chunks + kvi_chunk_after((uint32_t)(probe->chunk - probe->chunks),
                                                       probe->tag, probe->n_chunks);
        probe->hits = kvi_chunk_match(probe->chunk, probe->tag);
    }
    *ret = probe->chunk->value[__builtin_ctz(probe->hits)];
    probe->hits &= probe->hits - 1;
    return true;
}

#endif
