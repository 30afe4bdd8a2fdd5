// SPDX-License-Identifier: Apache-2.0
#include "redis/entry.h"

#include <sys/mman.h>

#include "base/core/error.h"
#include "base/core/xxh.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define SLAB_SIZE (16 * HUGE_PAGE)

static struct rds_slab *slab_create(size_t len)
{
    struct rds_slab *slab = calloc(1, sizeof(*slab));

    if (!slab)
        return NULL;
    slab->size = KV_MAX((len + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, SLAB_SIZE);
    slab->base = aligned_alloc(HUGE_PAGE, slab->size);
    if (!slab->base) {
        free(slab);
        return NULL;
    }
    madvise(slab->base, slab->size, MADV_HUGEPAGE); /* a hint to the kernel */
    return slab;
}

char *rds_arena_take(struct rds_arena *arena, size_t len, struct rds_slab **ret_slab)
{
    struct rds_slab *slab = arena->slabs;

    if (!slab || slab->size - slab->used < len) {
        slab = slab_create(len);
        if (!slab)
            return NULL;
        slab->next = arena->slabs;
        arena->slabs = slab;
    }
    slab->n_values++;
    slab->used += len;
    *ret_slab = slab;
    return slab->base + slab->used - len;
}

void rds_arena_give(struct rds_arena *arena, struct rds_slab *slab)
{
    struct rds_slab **at = &arena->slabs;

    if (--slab->n_values > 0)
        return;
    slab->used = 0;
    if (slab == arena->slabs && slab->size == SLAB_SIZE)
        return; /* keep the slab for the next save */
    while (*at != slab)
        at = &(*at)->next;
    *at = slab->next;
    free(slab->base);
    free(slab);
}

void rds_arena_fini(struct rds_arena *arena)
{
    while (arena->slabs) {
        struct rds_slab *slab = arena->slabs;

        arena->slabs = slab->next;
        free(slab->base);
        free(slab);
    }
}

static size_t bucket_of(const struct rds_table *table, const void *hash, size_t hash_len)
{
    return (size_t)kv_xxh64(hash, hash_len, 0) & (table->n_buckets - 1);
}

/* Return the link to the entry, or where it would be inserted. */
static struct rds_entry **find(const struct rds_table *table, const void *hash, size_t hash_len)
{
    struct rds_entry **at = &table->buckets[bucket_of(table, hash, hash_len)];

    while (*at && ((*at)->hash_len != hash_len || memcmp((*at)->hash, hash, hash_len) != 0))
        at = &(*at)->next;
    return at;
}

struct rds_entry *rds_table_find(const struct rds_table *table, const void *hash, size_t hash_len)
{
    return table->n_buckets == 0 ? NULL : *find(table, hash, hash_len);
}

static int grow(struct rds_table *table)
{
    size_t n_buckets = KV_MAX(2 * table->n_buckets, (size_t)64);
    struct rds_table bigger = {NULL, n_buckets, table->n};

    bigger.buckets = calloc(bigger.n_buckets, sizeof(struct rds_entry *));
    if (!bigger.buckets)
        return -ENOMEM;
    for (size_t i = 0; i < table->n_buckets; i++)
        while (table->buckets[i]) {
            struct rds_entry *entry = table->buckets[i], **to;

            to = &bigger.buckets[bucket_of(&bigger, entry->hash, entry->hash_len)];
            table->buckets[i] = entry->next;
            entry->next = *to;
            *to = entry;
        }
    free(table->buckets);
    *table = bigger;
    return 0;
}

struct rds_entry *rds_table_add(struct rds_table *table, const void *hash, size_t hash_len)
{
    struct rds_entry *entry = rds_table_find(table, hash, hash_len);

    if (entry)
        return entry;
    if (table->n >= table->n_buckets && grow(table) < 0)
        return NULL;
    entry = calloc(1, sizeof(*entry) + hash_len);
    if (!entry)
        return NULL;
    entry->hash_len = (uint8_t)hash_len;
    memcpy(entry->hash, hash, hash_len);
    *find(table, hash, hash_len) = entry;
    table->n++;
    return entry;
}

static void unhook(struct rds_table *table, struct rds_entry **at)
{
    struct rds_entry *entry = *at;

    *at = entry->next;
    table->n--;
    if (!entry->slab)
        free(entry->value);
    free(entry);
}

void rds_table_remove(struct rds_table *table, const void *hash, size_t hash_len)
{
    struct rds_entry **at = table->n_buckets == 0 ? NULL : find(table, hash, hash_len);

    if (at && *at)
        unhook(table, at);
}

void rds_table_purge(struct rds_table *table, bool (*drop)(const struct rds_entry *entry))
{
    for (size_t i = 0; i < table->n_buckets; i++) {
        struct rds_entry **at = &table->buckets[i];

        while (*at)
            if (!drop || drop(*at))
                unhook(table, at);
            else
                at = &(*at)->next;
    }
    if (!drop) {
        free(table->buckets);
        memset(table, 0, sizeof(*table));
    }
}

/* -- values ------------------------------------------------------------------------------------ */

static void put_trailer(char *trailer, const char *magic, const char *content, size_t len,
                        uint64_t seed)
{
    XXH128_canonical_t sum;

    XXH128_canonicalFromHash(&sum, XXH3_128bits_withSeed(content, len, seed));
    memcpy(trailer, magic, 8);
    for (int i = 0; i < 8; i++)
        trailer[8 + i] = (char)((uint64_t)len >> (8 * i));
    memcpy(trailer + 16, sum.digest, 16);
}

void rds_seal(char *value, size_t len, const void *name, size_t name_len)
{
    put_trailer(value + len, RDS_MANIFEST_MAGIC, value, len, kv_xxh64(name, name_len, 0));
}

void rds_seal_chunk(char *value, size_t len, const void *hash, size_t hash_len)
{
    memset(value + len, '0', RDS_STAMP);
    put_trailer(value + len + RDS_STAMP, RDS_CHUNK_MAGIC, value, len, kv_xxh64(hash, hash_len, 0));
}

void rds_stamp(char *value, size_t len, uint64_t now_s)
{
    static const char digits[] = "0123456789abcdef";

    for (int i = 0; i < RDS_STAMP; i++)
        value[len - RDS_CHUNK_TRAILER + (size_t)i] =
            digits[now_s >> (4 * (RDS_STAMP - 1 - i)) & 15];
}

bool rds_ends_like_ours(const char *value, size_t len)
{
    return len >= RDS_CHUNK_TRAILER && memcmp(value + len - RDS_TRAILER, RDS_CHUNK_MAGIC, 8) == 0;
}

bool rds_stamp_of(const char *tail, size_t len, uint64_t *ret_s)
{
    uint64_t seconds = 0;

    if (!rds_ends_like_ours(tail, len))
        return false;
    tail += len - RDS_CHUNK_TRAILER;
    for (int i = 0; i < RDS_STAMP; i++) {
        int digit = tail[i] >= '0' && tail[i] <= '9'   ? tail[i] - '0'
                    : tail[i] >= 'a' && tail[i] <= 'f' ? tail[i] - 'a' + 10
                                                       : -1;

        if (digit < 0)
            return false;
        seconds = seconds << 4 | (uint64_t)digit;
    }
    *ret_s = seconds;
    return true;
}

/* Verify a value that has @behind bytes behind its content, the last RDS_TRAILER with @magic. */
static bool verify(const char *value, size_t len, const char *magic, size_t behind, uint64_t seed,
                   size_t *ret_len)
{
    const unsigned char *trailer;
    XXH128_canonical_t sum;
    uint64_t content = 0;

    if (len < behind)
        return false;
    trailer = (const unsigned char *)value + len - RDS_TRAILER;
    if (memcmp(trailer, magic, 8) != 0)
        return false;
    for (int i = 0; i < 8; i++)
        content |= (uint64_t)trailer[8 + i] << (8 * i);
    if (content != len - behind)
        return false;
    XXH128_canonicalFromHash(&sum, XXH3_128bits_withSeed(value, (size_t)content, seed));
    if (memcmp(trailer + 16, sum.digest, 16) != 0)
        return false;
    *ret_len = (size_t)content;
    return true;
}

bool rds_verify(const char *value, size_t len, const void *name, size_t name_len, size_t *ret_len)
{
    return verify(value, len, RDS_MANIFEST_MAGIC, RDS_TRAILER, kv_xxh64(name, name_len, 0),
                  ret_len);
}

bool rds_verify_chunk(const char *value, size_t len, const void *hash, size_t hash_len,
                      size_t *ret_len)
{
    return verify(value, len, RDS_CHUNK_MAGIC, RDS_CHUNK_TRAILER, kv_xxh64(hash, hash_len, 0),
                  ret_len);
}
