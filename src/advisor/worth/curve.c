// SPDX-License-Identifier: Apache-2.0
/*
 * Keys that are followed, by time of use:
 *
 *     marks     1 1 0 1 0 0 1 1 ...    a bit for each moment: some key was used then last
 *     sums      Fenwick tree over the marks' words: how many marks are before
 *     entries   key, moment, place in the heap of ranks
 *
 * The distance of a key is the number of marks behind its moment. When moments run out, the marks
 * move together.
 */
#include "advisor/worth/curve.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/mix.h"

#define EXACT 512u /* distances below have a bucket each */
#define EXACT_BITS 9u
#define STEPS 256u /* buckets of each power of two above */
#define BUCKETS (EXACT + (64 - EXACT_BITS) * STEPS)
#define FIRST_MOMENTS 1024u

struct entry {
    uint64_t key, rank;
    uint32_t moment;
    uint32_t heap; /* place in the heap */
};

struct kva_curve {
    uint32_t samples;               /* most keys followed */
    uint32_t live, capacity, spare; /* entries in use and with memory; 1 + a free one below live */
    struct entry *entries;
    uint32_t *heap;  /* [capacity] entries, the one of highest rank first */
    uint32_t *table; /* [mask + 1] 1 + entry, by kv_mix of its key */
    uint32_t mask;
    uint64_t threshold; /* keys of a lower rank are followed; UINT64_MAX: all are */
    uint64_t *marks;    /* [moments / 64] */
    uint32_t *sums;     /* [moments / 64 + 1] */
    uint32_t *whose;    /* [moments] the entry, where there is a mark */
    uint32_t moments, now;
    uint64_t references, most;
    double seen; /* references that the sampled ones stand for */
    double hits[BUCKETS];
};

/* The same in each run: figures of a trace can be repeated. */
static uint64_t rank_of(uint64_t key)
{
    return kv_mix_fold(
        kv_mix_fold(key ^ UINT64_C(0x6a09e667f3bcc909), UINT64_C(0xbb67ae8584caa73b)),
        UINT64_C(0xd6e8feb86659fd93));
}

static double share_of(const struct kva_curve *curve)
{
    return curve->threshold == UINT64_MAX ? 1 : ldexp((double)curve->threshold, -64);
}

/* -- buckets of distances ------------------------------------------------------------------------ */

static uint32_t bucket_of(uint64_t distance)
{
    uint32_t bits;

    if (distance < EXACT)
        return (uint32_t)distance;
    bits = 63 - (uint32_t)__builtin_clzll(distance);
    return EXACT + (bits - EXACT_BITS) * STEPS + ((distance >> (bits - 8)) & (STEPS - 1));
}

/* The first distance of a bucket. */
static double start_of(uint32_t bucket)
{
    uint32_t above = bucket - EXACT;

    if (bucket < EXACT)
        return bucket;
    return ldexp(STEPS + above % STEPS, (int)(EXACT_BITS - 8 + above / STEPS));
}

/* -- keys by name -------------------------------------------------------------------------------- */

static uint32_t find(const struct kva_curve *curve, uint64_t key)
{
    for (uint32_t at = (uint32_t)kv_mix(key) & curve->mask; curve->table[at];
         at = (at + 1) & curve->mask)
        if (curve->entries[curve->table[at] - 1].key == key)
            return curve->table[at];
    return 0;
}

static void put(struct kva_curve *curve, uint32_t entry)
{
    uint32_t at = (uint32_t)kv_mix(curve->entries[entry].key) & curve->mask;

    while (curve->table[at])
        at = (at + 1) & curve->mask;
    curve->table[at] = entry + 1;
}

/* Take an entry out: those behind it that it has pushed on move back. */
static void forget(struct kva_curve *curve, uint32_t entry)
{
    uint32_t hole = (uint32_t)kv_mix(curve->entries[entry].key) & curve->mask, at;

    while (curve->table[hole] != entry + 1)
        hole = (hole + 1) & curve->mask;
    for (at = (hole + 1) & curve->mask; curve->table[at]; at = (at + 1) & curve->mask) {
        uint32_t home = (uint32_t)kv_mix(curve->entries[curve->table[at] - 1].key) & curve->mask;

        if (((at - home) & curve->mask) < ((at - hole) & curve->mask))
            continue;
        curve->table[hole] = curve->table[at];
        hole = at;
    }
    curve->table[hole] = 0;
}

/* -- keys by rank -------------------------------------------------------------------------------- */

static void place(struct kva_curve *curve, uint32_t at, uint32_t entry)
{
    curve->heap[at] = entry;
    curve->entries[entry].heap = at;
}

static void rise(struct kva_curve *curve, uint32_t at, uint32_t entry)
{
    uint64_t rank = curve->entries[entry].rank;

    for (; at && curve->entries[curve->heap[(at - 1) / 2]].rank < rank; at = (at - 1) / 2)
        place(curve, at, curve->heap[(at - 1) / 2]);
    place(curve, at, entry);
}

static void sink(struct kva_curve *curve, uint32_t at, uint32_t entry, uint32_t n)
{
    uint64_t rank = curve->entries[entry].rank;

    for (uint32_t kid; (kid = 2 * at + 1) < n; at = kid) {
        if (kid + 1 < n &&
            curve->entries[curve->heap[kid + 1]].rank > curve->entries[curve->heap[kid]].rank)
            kid++;
        if (curve->entries[curve->heap[kid]].rank <= rank)
            break;
        place(curve, at, curve->heap[kid]);
    }
    place(curve, at, entry);
}

/* -- keys by moment ------------------------------------------------------------------------------ */

static void add_sum(struct kva_curve *curve, uint32_t word, uint32_t n)
{
    for (uint32_t i = word + 1; i <= curve->moments / 64; i += i & -i)
        curve->sums[i] += n;
}

static void mark(struct kva_curve *curve, uint32_t entry)
{
    uint32_t moment = curve->now++;

    curve->entries[entry].moment = moment;
    curve->whose[moment] = entry;
    curve->marks[moment / 64] |= UINT64_C(1) << moment % 64;
    add_sum(curve, moment / 64, 1);
}

static void unmark(struct kva_curve *curve, uint32_t moment)
{
    curve->marks[moment / 64] &= ~(UINT64_C(1) << moment % 64);
    add_sum(curve, moment / 64, -1u);
}

/* Marks behind a moment that has one. */
static uint32_t marks_behind(const struct kva_curve *curve, uint32_t moment)
{
    uint32_t word = moment / 64, n = curve->live;

    for (uint32_t i = word + 1; i; i -= i & -i)
        n -= curve->sums[i];
    return n + (uint32_t)__builtin_popcountll(curve->marks[word] >> moment % 64 >> 1);
}

/* Move the marks together, into arrays of @moments. */
static int move_together(struct kva_curve *curve, uint32_t moments)
{
    uint64_t *old = curve->marks;
    uint32_t *whose = malloc(moments * sizeof(*whose)), *old_whose = curve->whose;
    uint32_t *sums = calloc(moments / 64 + 1, sizeof(*sums));
    uint64_t *marks = calloc(moments / 64, sizeof(*marks));
    uint32_t old_moments = curve->moments;

    if (!whose || !sums || !marks) {
        free(whose);
        free(sums);
        free(marks);
        return -ENOMEM;
    }
    free(curve->sums);
    curve->marks = marks;
    curve->sums = sums;
    curve->whose = whose;
    curve->moments = moments;
    curve->now = 0;
    for (uint32_t w = 0; w < old_moments / 64; w++)
        for (uint64_t bits = old[w]; bits; bits &= bits - 1)
            mark(curve, old_whose[w * 64 + (uint32_t)__builtin_ctzll(bits)]);
    free(old);
    free(old_whose);
    return 0;
}

/* -- room ---------------------------------------------------------------------------------------- */

static int grow_entries(struct kva_curve *curve, uint32_t capacity)
{
    struct entry *entries = realloc(curve->entries, capacity * sizeof(*entries));
    uint32_t *heap = entries ? realloc(curve->heap, capacity * sizeof(*heap)) : NULL, *table;
    uint32_t places = 16;

    if (entries)
        curve->entries = entries;
    if (heap)
        curve->heap = heap;
    while (places < 2 * capacity)
        places *= 2;
    table = heap ? calloc(places, sizeof(*table)) : NULL;
    if (!table)
        return -ENOMEM;
    free(curve->table);
    curve->table = table;
    curve->mask = places - 1;
    curve->capacity = capacity;
    for (uint32_t i = 0; i < curve->live; i++) /* none is spare: all memory is there by then */
        put(curve, curve->heap[i]);
    return 0;
}

/* Make room for @n new keys, and for as many uses. */
static int reserve(struct kva_curve *curve, size_t n)
{
    uint64_t keys = (uint64_t)curve->live + n + 1, most = (uint64_t)curve->samples + 1, moments;
    uint32_t capacity = KV_MAX(curve->capacity, 64u);
    int rc = 0;

    if (n > KVA_MAX_SAMPLES || (curve->samples == KVA_MAX_SAMPLES && keys > most))
        return -ENOSPC;
    keys = KV_MIN(keys, most);
    while (capacity < keys)
        capacity *= 2;
    if (capacity > curve->capacity)
        rc = grow_entries(curve, capacity);
    moments = KV_MAX(curve->moments, FIRST_MOMENTS);
    while (moments < 2 * (uint64_t)curve->live + n)
        moments *= 2;
    if (!rc && curve->now + n > curve->moments)
        rc = move_together(curve, (uint32_t)moments);
    return rc;
}

int kva_curve_create(uint32_t samples, struct kva_curve **ret)
{
    struct kva_curve *curve;

    if (samples > KVA_MAX_SAMPLES)
        return -EINVAL;
    curve = calloc(1, sizeof(*curve));
    if (!curve)
        return -ENOMEM;
    curve->samples = samples ? samples : KVA_MAX_SAMPLES;
    curve->threshold = UINT64_MAX;
    *ret = curve;
    return 0;
}

void kva_curve_destroy(struct kva_curve *curve)
{
    if (!curve)
        return;
    free(curve->entries);
    free(curve->heap);
    free(curve->table);
    free(curve->marks);
    free(curve->sums);
    free(curve->whose);
    free(curve);
}

int kva_curve_copy(const struct kva_curve *curve, struct kva_curve **ret)
{
    struct kva_curve *copy = malloc(sizeof(*copy));

    if (!copy)
        return -ENOMEM;
    *copy = *curve;
    copy->entries = NULL;
    copy->heap = copy->table = NULL;
    copy->marks = NULL;
    copy->sums = copy->whose = NULL;
    *ret = copy;
    return 0;
}

/* -- requests ------------------------------------------------------------------------------------ */

/* Follow the key of highest rank no more, nor any of its rank or a higher one. */
static void drop_highest(struct kva_curve *curve)
{
    uint32_t entry = curve->heap[0], last = curve->heap[curve->live - 1];

    curve->threshold = curve->entries[entry].rank;
    unmark(curve, curve->entries[entry].moment);
    forget(curve, entry);
    curve->live--;
    if (last != entry)
        sink(curve, 0, last, curve->live);
    curve->spare = entry + 1;
}

static void follow(struct kva_curve *curve, uint64_t key, uint64_t rank)
{
    uint32_t entry = curve->spare ? curve->spare - 1 : curve->live;

    curve->spare = 0;
    curve->entries[entry] = (struct entry){.key = key, .rank = rank};
    rise(curve, curve->live++, entry);
    put(curve, entry);
    mark(curve, entry);
    if (curve->live > curve->samples)
        drop_highest(curve);
}

static void look_up(struct kva_curve *curve, uint64_t key, double weight)
{
    uint32_t found = find(curve, key);
    uint64_t distance;

    curve->seen += weight;
    if (!found)
        return;
    distance = (uint64_t)(marks_behind(curve, curve->entries[found - 1].moment) * weight);
    curve->hits[bucket_of(distance)] += weight;
    curve->most = KV_MAX(curve->most, distance + 1);
}

int kva_curve_use(struct kva_curve *curve, const uint64_t *keys, size_t n)
{
    double weight = 1 / share_of(curve);
    int rc = reserve(curve, n);

    if (rc)
        return rc;
    curve->references += n;
    for (size_t i = 0; i < n; i++)
        if (rank_of(keys[i]) < curve->threshold)
            look_up(curve, keys[i], weight);
    for (size_t i = n; i-- > 0;) {
        uint64_t rank = rank_of(keys[i]);
        uint32_t found;

        if (rank >= curve->threshold)
            continue;
        found = find(curve, keys[i]);
        if (!found) {
            follow(curve, keys[i], rank);
            continue;
        }
        unmark(curve, curve->entries[found - 1].moment);
        mark(curve, found - 1);
    }
    return 0;
}

/* -- answers ------------------------------------------------------------------------------------- */

double kva_curve_hits(const struct kva_curve *curve, double blocks)
{
    double sum = 0;

    if (!curve->references || blocks < 1)
        return 0;
    for (uint32_t b = 0; b < BUCKETS && start_of(b) < blocks; b++) {
        double end = KV_MIN(start_of(b + 1), (double)curve->most); /* no distance is beyond */

        if (curve->hits[b] > 0)
            sum += curve->hits[b] * KV_MIN(1.0, (blocks - start_of(b)) / (end - start_of(b)));
    }
    sum += (double)curve->references - curve->seen;
    return KV_MIN(1.0, KV_MAX(0.0, sum / (double)curve->references));
}

void kva_curve_get(const struct kva_curve *curve, struct kva_curve_info *ret)
{
    *ret = (struct kva_curve_info){.references = curve->references,
                                   .followed = curve->live,
                                   .share = share_of(curve),
                                   .distinct = curve->live / share_of(curve),
                                   .most = (double)curve->most};
}
