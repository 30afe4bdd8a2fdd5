// SPDX-License-Identifier: Apache-2.0
#include "index/memory/table.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/core/error.h"

/* Chunks; a segment splits between half of this size and all of it. */
#define SEG_MAX 1024u
#define PAGED ((size_t)8 << 10) /* larger segments are page runs */
/* Entries of a segment that was reserved at once. */
#define SEG_RESERVED (SEG_MAX * KVI_CHUNK_ENTRIES / 2)
#define LOOK_AHEAD 4 /* chunks to prefetch while rebuilding */
/* Chunks of the largest segment whose rebuilding keeps counts: others split, unless keys collide. */
#define FILL_CHUNKS (SEG_MAX + 64)

/*
 * Entries up to which a table is small. Its segments grow in larger steps: rebuilding one reads a
 * key elsewhere for each entry, nine times an entry with the steps of large tables, twice with
 * those of small ones.
 */
#define SMALL (4u << 20)

/* Return the number of entries at which a segment grows: 88 %. */
static uint32_t full_at(uint32_t n_chunks)
{
    return n_chunks == 1 ? KVI_CHUNK_ENTRIES : n_chunks * KVI_CHUNK_ENTRIES * 88 / 100;
}

/* Return the number of entries below which a segment shrinks. */
static uint32_t sparse_at(const struct kvi_table *table, uint32_t n_chunks)
{
    return n_chunks == 1 ? 0 : n_chunks * KVI_CHUNK_ENTRIES * (table->n < SMALL ? 40 : 60) / 100;
}

/*
 * Return the number of chunks for @n entries that should take @percent of the room. Always odd: the
 * head takes one line, so that large segments fill whole pages.
 */
static uint32_t chunks_at(uint32_t n, uint32_t percent)
{
    uint32_t n_chunks = (n * 100 / (KVI_CHUNK_ENTRIES * percent) + 1) | 1;

    return n_chunks < PAGED / 64 ? n_chunks : n_chunks | 63;
}

/* Return the number of chunks to which a segment of @n entries is rebuilt. */
static uint32_t chunks_for(const struct kvi_table *table, uint32_t n)
{
    return chunks_at(n, table->n < SMALL ? 58 : 79);
}

/* Return the segment's size. Small segments come from the heap, others are pages of their own. */
static size_t segment_bytes(uint32_t n_chunks)
{
    return sizeof(struct kvi_segment) + n_chunks * sizeof(struct kvi_chunk);
}

static struct kvi_segment *segment_new(struct kvi_mem *mem, uint32_t n_chunks, uint32_t depth)
{
    size_t bytes = segment_bytes(n_chunks);
    struct kvi_segment *segment =
        bytes > PAGED ? kvi_mem_map(mem, bytes) : kvi_mem_alloc_lines(mem, bytes);

    if (segment) {
        segment->n_chunks = n_chunks;
        segment->depth = depth;
    }
    return segment;
}

static void segment_free(struct kvi_mem *mem, struct kvi_segment *segment)
{
    if (segment && segment_bytes(segment->n_chunks) > PAGED)
        kvi_mem_unmap(mem, segment, segment_bytes(segment->n_chunks));
    else
        kvi_mem_free(mem, segment);
}

static void count_passed(struct kvi_chunk *chunk, uint8_t tag, int more)
{
    if (kvi_chunk_passed(chunk, tag) < 15)
        chunk->passed += (uint32_t)more << (tag & 7) * 4;
}

/* Put a value into a segment that has room for it. */
static void put(struct kvi_segment *segment, uint64_t mix, uint32_t value)
{
    uint32_t c = kvi_chunk_of(mix, segment->n_chunks), empty;
    struct kvi_chunk *chunk = &segment->chunks[c];
    uint8_t tag = kvi_tag_of(mix);

    while (!(empty = kvi_chunk_match(chunk, 0))) {
        count_passed(chunk, tag, 1);
        c = kvi_chunk_after(c, tag, segment->n_chunks);
        chunk = &segment->chunks[c];
    }
    chunk->tag[__builtin_ctz(empty)] = tag;
    chunk->value[__builtin_ctz(empty)] = value;
    segment->n++;
}

int kvi_table_init(struct kvi_table *table, struct kvi_mem *mem,
                   uint64_t (*mix_of)(const void *arg, uint32_t value),
                   void (*prefetch)(const void *arg, uint32_t value), const void *arg)
{
    *table = (struct kvi_table){
        .mem = mem, .mix_of = mix_of, .prefetch = prefetch, .arg = arg, .n_deepest = 1};
    table->directory = kvi_mem_alloc(mem, sizeof(table->directory[0]));
    if (!table->directory)
        return -ENOMEM;
    table->directory[0].segment = segment_new(mem, 1, 0);
    table->directory[0].n_chunks = 1;
    return table->directory[0].segment ? 0 : -ENOMEM;
}

static uint64_t first_ref(const struct kvi_table *table, uint64_t mix, uint32_t depth)
{
    return depth ? mix >> (64 - depth) << (table->depth - depth) : 0;
}

/* Set all directory entries whose top @depth bits are those of @mix. */
static void point_at(struct kvi_table *table, uint64_t mix, struct kvi_segment *segment)
{
    uint64_t first = first_ref(table, mix, segment->depth);
    uint64_t n = UINT64_C(1) << (table->depth - segment->depth);

    for (uint64_t i = first; i < first + n; i++)
        table->directory[i] = (struct kvi_segment_ref){segment, segment->n_chunks};
}

void kvi_table_fini(struct kvi_table *table)
{
    uint64_t n = table->directory ? UINT64_C(1) << table->depth : 0;

    for (uint64_t i = 0; i < n;) {
        struct kvi_segment *segment = table->directory[i].segment;

        if (!segment)
            break;
        i += UINT64_C(1) << (table->depth - segment->depth);
        segment_free(table->mem, segment);
    }
    kvi_mem_free(table->mem, table->directory);
    table->directory = NULL;
}

/* Make the 1 << @depth segments of a new table. */
static int add_segments(struct kvi_table *table, uint32_t depth, uint32_t n_chunks)
{
    uint64_t n = UINT64_C(1) << depth;

    table->directory = kvi_mem_alloc(table->mem, n * sizeof(table->directory[0]));
    if (!table->directory)
        return -ENOMEM;
    table->depth = depth;
    table->n_deepest = (uint32_t)n;
    for (uint64_t i = 0; i < n; i++) {
        table->directory[i].segment = segment_new(table->mem, n_chunks, depth);
        table->directory[i].n_chunks = n_chunks;
        if (!table->directory[i].segment)
            return -ENOMEM;
    }
    return 0;
}

int kvi_table_reserve(struct kvi_table *table, uint64_t n)
{
    struct kvi_table wide = *table;
    uint32_t depth = 0;
    int rc;

    assert(table->n == 0);
    n = KV_MIN(n, (uint64_t)UINT32_MAX);
    if (n <= KVI_CHUNK_ENTRIES)
        return 0;
    while (n >> depth > SEG_RESERVED)
        depth++;
    rc = add_segments(&wide, depth, chunks_at((uint32_t)((n >> depth) + 1), n < SMALL ? 70 : 79));
    kvi_table_fini(rc ? &wide : table);
    if (!rc)
        *table = wide;
    return rc;
}

/* Number of entries in each chunk of a segment that is being filled. */
struct fill {
    struct kvi_segment *segment;
    uint8_t n[FILL_CHUNKS]; /* unused in larger segments */
};

static void fill_init(struct fill *fill, struct kvi_segment *segment)
{
    fill->segment = segment;
    if (segment->n_chunks <= FILL_CHUNKS)
        memset(fill->n, 0, segment->n_chunks);
}

/*
 * Put a value into a segment that only these calls fill. Unlike put, doesn't read the tags that the
 * last call may just have written: a wide load of narrow stores waits for them.
 */
static void fill_put(struct fill *fill, uint64_t mix, uint32_t value)
{
    struct kvi_segment *segment = fill->segment;
    uint32_t n_chunks = segment->n_chunks, c = kvi_chunk_of(mix, n_chunks), i;
    uint8_t tag = kvi_tag_of(mix);

    if (KV_UNLIKELY(n_chunks > FILL_CHUNKS)) {
        put(segment, mix, value);
        return;
    }
    while ((i = fill->n[c]) == KVI_CHUNK_ENTRIES) {
        count_passed(&segment->chunks[c], tag, 1);
        c = kvi_chunk_after(c, tag, n_chunks);
    }
    fill->n[c] = (uint8_t)(i + 1);
    segment->chunks[c].tag[i] = tag;
    segment->chunks[c].value[i] = value;
    segment->n++;
}

static uint32_t used_in(const struct kvi_chunk *chunk)
{
    return ~kvi_chunk_match(chunk, 0) & ((1u << KVI_CHUNK_ENTRIES) - 1);
}

/* Bring into the cache what the keys of the chunk's entries are read from. */
static void prefetch_keys(const struct kvi_table *table, const struct kvi_chunk *chunk)
{
    for (uint32_t used = used_in(chunk); used; used &= used - 1)
        table->prefetch(table->arg, chunk->value[__builtin_ctz(used)]);
}

/* Move all entries of @from to @low, or to @high where the key has @bit set. */
static void pour(const struct kvi_table *table, const struct kvi_segment *from, struct fill *low,
                 struct fill *high, uint64_t bit)
{
    for (uint32_t c = 0; c < from->n_chunks + LOOK_AHEAD; c++) {
        const struct kvi_chunk *chunk;

        if (c < from->n_chunks)
            prefetch_keys(table, &from->chunks[c]);
        if (c < LOOK_AHEAD)
            continue;
        chunk = &from->chunks[c - LOOK_AHEAD];
        for (uint32_t used = used_in(chunk); used; used &= used - 1) {
            uint32_t value = chunk->value[__builtin_ctz(used)];
            uint64_t mix = table->mix_of(table->arg, value);

            fill_put(mix & bit ? high : low, mix, value);
        }
    }
}

static int resize(struct kvi_table *table, uint64_t mix, uint32_t n_chunks)
{
    struct kvi_segment *old = kvi_table_ref(table, mix)->segment;
    struct kvi_segment *segment = segment_new(table->mem, n_chunks, old->depth);
    struct fill fill;

    if (!segment)
        return -ENOMEM;
    fill_init(&fill, segment);
    pour(table, old, &fill, &fill, 0);
    point_at(table, mix, segment);
    segment_free(table->mem, old);
    return 0;
}

static int set_depth(struct kvi_table *table, uint32_t depth)
{
    uint64_t n = UINT64_C(1) << depth;
    struct kvi_segment_ref *directory = kvi_mem_alloc(table->mem, n * sizeof(*directory));

    if (!directory)
        return -ENOMEM;
    for (uint64_t i = 0; i < n; i++)
        directory[i] = table->directory[depth > table->depth ? i >> 1 : i << 1];
    kvi_mem_free(table->mem, table->directory);
    table->directory = directory;
    table->depth = depth;
    return 0;
}

static void count_deepest(struct kvi_table *table)
{
    uint64_t n = UINT64_C(1) << table->depth;

    table->n_deepest = 0;
    for (uint64_t i = 0; i < n; i++)
        table->n_deepest += table->directory[i].segment->depth == table->depth;
}

/* Count the entries of @segment whose key has @bit set. */
static uint32_t count_high(const struct kvi_table *table, const struct kvi_segment *segment,
                           uint64_t bit)
{
    uint32_t n = 0;

    for (uint32_t c = 0; c < segment->n_chunks + LOOK_AHEAD; c++) {
        const struct kvi_chunk *chunk;

        if (c < segment->n_chunks)
            prefetch_keys(table, &segment->chunks[c]);
        if (c < LOOK_AHEAD)
            continue;
        chunk = &segment->chunks[c - LOOK_AHEAD];
        for (uint32_t used = used_in(chunk); used; used &= used - 1)
            n += (table->mix_of(table->arg, chunk->value[__builtin_ctz(used)]) & bit) != 0;
    }
    return n;
}

static int split(struct kvi_table *table, uint64_t mix)
{
    struct kvi_segment *old = kvi_table_ref(table, mix)->segment, *low, *high;
    uint64_t bit = UINT64_C(1) << (63 - old->depth);
    uint32_t n_high = count_high(table, old, bit);
    struct fill fills[2];

    if (old->depth == table->depth) {
        int rc = set_depth(table, table->depth + 1);

        if (rc)
            return rc;
        table->n_deepest = 0;
    }
    low = segment_new(table->mem, chunks_for(table, old->n - n_high), old->depth + 1);
    high = segment_new(table->mem, chunks_for(table, n_high), old->depth + 1);
    if (!low || !high) {
        segment_free(table->mem, low);
        segment_free(table->mem, high);
        return -ENOMEM;
    }
    fill_init(&fills[0], low);
    fill_init(&fills[1], high);
    pour(table, old, &fills[0], &fills[1], bit);
    if (old->depth + 1 == table->depth)
        table->n_deepest += 2;
    point_at(table, mix & ~bit, low);
    point_at(table, mix | bit, high);
    segment_free(table->mem, old);
    return 0;
}

/*
 * Return the size at which a segment splits. It differs from segment to segment, evenly over an
 * octave. Segments that all split at one size would grow in step, and none could use the space that
 * another has just left.
 */
static uint32_t splits_above(uint64_t mix, uint32_t depth)
{
    uint64_t prefix = depth ? mix >> (64 - depth) : 0;
    uint32_t dice = (uint32_t)kv_mix(prefix << 6 | depth) % 256, half = SEG_MAX / 2;

    /* approximates half * 2^(dice / 256) */
    return half + half * dice / 256 * (168 * 256 + 88 * dice) / (256 * 256);
}

/* Splitting pays while keys spread. If they don't (a hostile engine), segments just get larger. */
static bool may_split(const struct kvi_table *table, const struct kvi_segment *segment)
{
    if (segment->depth < table->depth)
        return true;
    return UINT64_C(1) << table->depth <= 8 + 8 * table->n / (SEG_MAX * KVI_CHUNK_ENTRIES / 2);
}

static int make_room(struct kvi_table *table, uint64_t mix)
{
    const struct kvi_segment *segment = kvi_table_ref(table, mix)->segment;
    uint32_t n_chunks = KV_MAX(chunks_for(table, segment->n), segment->n_chunks + 2);

    if (n_chunks > splits_above(mix, segment->depth) && may_split(table, segment))
        return split(table, mix);
    return resize(table, mix, n_chunks);
}

int kvi_table_insert(struct kvi_table *table, uint64_t mix, uint32_t value)
{
    struct kvi_segment *segment = kvi_table_ref(table, mix)->segment;

    while (KV_UNLIKELY(segment->n >= full_at(segment->n_chunks))) {
        int rc = make_room(table, mix);

        if (rc)
            return rc;
        segment = kvi_table_ref(table, mix)->segment;
    }
    put(segment, mix, value);
    table->n++;
    return 0;
}

/* Join a segment with its buddy. Best effort: without memory, it stays. */
static void join(struct kvi_table *table, uint64_t mix, struct kvi_segment *segment,
                 struct kvi_segment *buddy)
{
    struct kvi_segment *both =
        segment_new(table->mem, chunks_for(table, segment->n + buddy->n), segment->depth - 1);
    struct fill fill;

    if (!both)
        return;
    fill_init(&fill, both);
    pour(table, segment, &fill, &fill, 0);
    pour(table, buddy, &fill, &fill, 0);
    if (segment->depth == table->depth)
        table->n_deepest -= 2;
    point_at(table, mix, both);
    segment_free(table->mem, segment);
    segment_free(table->mem, buddy);
    if (table->n_deepest == 0 && table->depth > 0 && !set_depth(table, table->depth - 1))
        count_deepest(table);
}

static void shrink(struct kvi_table *table, uint64_t mix)
{
    struct kvi_segment *segment = kvi_table_ref(table, mix)->segment;

    if (segment->depth > 0) {
        uint64_t other = mix ^ UINT64_C(1) << (64 - segment->depth);
        struct kvi_segment *buddy = kvi_table_ref(table, other)->segment;

        if (buddy->depth == segment->depth &&
            chunks_for(table, segment->n + buddy->n) <= SEG_MAX / 3) {
            join(table, mix, segment, buddy);
            return;
        }
    }
    if (chunks_for(table, segment->n) < segment->n_chunks)
        (void)resize(table, mix, chunks_for(table, segment->n));
}

/* Find the entry of exactly this value; *@ret_chunk is its chunk. Returns its index, or -1. */
static int find_value(const struct kvi_segment *segment, uint64_t mix, uint32_t value,
                      struct kvi_chunk **ret_chunk)
{
    uint32_t c = kvi_chunk_of(mix, segment->n_chunks);
    uint8_t tag = kvi_tag_of(mix);

    for (uint32_t left = segment->n_chunks; left; left--) {
        const struct kvi_chunk *chunk = &segment->chunks[c];

        for (uint32_t hits = kvi_chunk_match(chunk, tag); hits; hits &= hits - 1) {
            int i = __builtin_ctz(hits);

            if (chunk->value[i] == value) {
                *ret_chunk = (struct kvi_chunk *)chunk;
                return i;
            }
        }
        if (!kvi_chunk_passed(chunk, tag))
            break;
        c = kvi_chunk_after(c, tag, segment->n_chunks);
    }
    return -1;
}

bool kvi_table_erase(struct kvi_table *table, uint64_t mix, uint32_t value)
{
    struct kvi_segment *segment = kvi_table_ref(table, mix)->segment;
    uint32_t c = kvi_chunk_of(mix, segment->n_chunks);
    uint8_t tag = kvi_tag_of(mix);
    struct kvi_chunk *chunk;
    int i = find_value(segment, mix, value, &chunk);

    if (i < 0)
        return false;
    for (; &segment->chunks[c] != chunk; c = kvi_chunk_after(c, tag, segment->n_chunks))
        count_passed(&segment->chunks[c], tag, -1);
    chunk->tag[i] = 0;
    table->n--;
    if (KV_UNLIKELY(--segment->n < sparse_at(table, segment->n_chunks)))
        shrink(table, mix);
    return true;
}

bool kvi_table_replace(struct kvi_table *table, uint64_t mix, uint32_t value, uint32_t other)
{
    struct kvi_chunk *chunk;
    int i = find_value(kvi_table_ref(table, mix)->segment, mix, value, &chunk);

    if (i < 0)
        return false;
    chunk->value[i] = other;
    return true;
}
