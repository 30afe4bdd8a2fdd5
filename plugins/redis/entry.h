// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks that a handle knows: those of the save in progress with their bytes, prefetched ones, and
 * keys known to be on the server. A hash table with chaining; not thread-safe.
 */
#ifndef KV_REDIS_ENTRY_H
#define KV_REDIS_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RDS_MAX_HASH 255
/* Behind every stored value: 8 bytes that name the format, the length of the content (64 bits,
 * little endian), and XXH3-128 of the content seeded with XXH3-64 of the chunk's or manifest's name
 * (canonical). Before that, in a chunk: when it was last used, 8 hexadecimal digits of seconds
 * since 1970 by the server's clock, which the server rewrites in place. docs/formats.md. */
#define RDS_TRAILER 32
#define RDS_MAGIC "KVASIRv1" /* manifests; chunks of former writers, without a stamp */
#define RDS_STAMP 8
#define RDS_CHUNK_TRAILER (RDS_STAMP + RDS_TRAILER)
#define RDS_CHUNK_MAGIC "KVASIRv2"

/**
 * Memory for the puts of a save: large pieces of huge pages, for a first touch of each 4 KiB costs
 * more than copying them. A piece goes when no value lies in it any more; one is kept.
 */
struct rds_slab {
    struct rds_slab *next;
    char *base;
    size_t size, used, n_values;
};

struct rds_arena {
    struct rds_slab *slabs; /* the one being filled first */
};

/** Room for @len bytes, in *ret_slab; NULL: out of memory. */
char *rds_arena_take(struct rds_arena *arena, size_t len, struct rds_slab **ret_slab);
/** A value of @slab is no longer needed. */
void rds_arena_give(struct rds_arena *arena, struct rds_slab *slab);
void rds_arena_fini(struct rds_arena *arena);

struct rds_entry {
    struct rds_entry *next;
    char *value;           /* content and trailer; NULL: only the name is known */
    struct rds_slab *slab; /* where value lies; NULL: it is malloc'd */
    size_t len;            /* of value */
    bool ref;              /* of the save in progress */
    bool known;            /* was on the server when last heard of */
    bool bad;              /* is damaged there and can't be removed: to be sent again */
    bool gone;             /* of the save in progress: sent, dropped here, and not there any more */
    uint64_t by;           /* number of the one thread that put it for the save; 0: several did */
    uint64_t put_s;        /* time of its last put, monotonic */
    uint8_t hash_len;
    uint8_t hash[];
};

struct rds_table {
    struct rds_entry **buckets;
    size_t n_buckets, n; /* n_buckets: a power of two, or 0 */
};

struct rds_entry *rds_table_find(const struct rds_table *table, const void *hash, size_t hash_len);
/** The entry, made when there is none; NULL: out of memory. */
struct rds_entry *rds_table_add(struct rds_table *table, const void *hash, size_t hash_len);
/** Remove and free the entries that @drop says; NULL: all. */
void rds_table_purge(struct rds_table *table, bool (*drop)(const struct rds_entry *entry));
void rds_table_remove(struct rds_table *table, const void *hash, size_t hash_len);

/** Write the trailer of a manifest, RDS_TRAILER bytes, behind @len bytes of @value. */
void rds_seal(char *value, size_t len, const void *name, size_t name_len);
/** Append the trailer of a chunk to @value, RDS_CHUNK_TRAILER bytes, without a time of use. */
void rds_seal_chunk(char *value, size_t len, const void *hash, size_t hash_len);
/** Set the time of use of a sealed chunk, @len bytes with its trailer, to @now_s. */
void rds_stamp(char *value, size_t len, uint64_t now_s);
/**
 * Whether @value of @len bytes is what was sealed under that name; then also its content's length.
 */
bool rds_verify(const char *value, size_t len, const void *name, size_t name_len, size_t *ret_len);
/**
 * Whether what ends like @tail (at least its last RDS_CHUNK_TRAILER bytes) is a chunk's value with
 * a stamp, and which.
 */
bool rds_stamp_of(const char *tail, size_t len, uint64_t *ret_s);

/**
 * Whether a save would take it for present: its last RDS_CHUNK_TRAILER bytes are those of a chunk.
 */
bool rds_ends_like_ours(const char *value, size_t len);

#endif
