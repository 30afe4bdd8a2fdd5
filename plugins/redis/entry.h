// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks that a handle knows: those of the save in progress with their bytes, prefetched ones, and
 * keys known to be on the server. A chained hash table; not thread-safe.
 */
#ifndef KV_REDIS_ENTRY_H
#define KV_REDIS_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RDS_MAX_HASH 255
/* Trailer of every stored value (docs/formats.md): 8 bytes that name the format, the length of the
 * content (64 bits, little endian), and a checksum. The checksum is XXH3-128 of the content, seeded
 * with XXH3-64 of the chunk's or manifest's name (canonical). A chunk has its time of last use in
 * front of the trailer: 8 hexadecimal digits, seconds since 1970 by the server's clock, which the
 * server rewrites in place. */
#define RDS_TRAILER 32
#define RDS_MANIFEST_MAGIC "KVASIRm1"
#define RDS_STAMP 8
#define RDS_CHUNK_TRAILER (RDS_STAMP + RDS_TRAILER)
#define RDS_CHUNK_MAGIC "KVASIRc1"

/**
 * Memory for a save's puts: large pieces of huge pages, since first touches of 4 KiB pages cost
 * more than copying the bytes. A piece without values is freed; one is kept.
 */
struct rds_slab {
    struct rds_slab *next;
    char *base;
    size_t size, used, n_values;
};

struct rds_arena {
    struct rds_slab *slabs; /* the one being filled comes first */
};

/** Allocate @len bytes; their slab is *ret_slab. Returns NULL when out of memory. */
char *rds_arena_take(struct rds_arena *arena, size_t len, struct rds_slab **ret_slab);
/** Free one value of @slab. */
void rds_arena_give(struct rds_arena *arena, struct rds_slab *slab);
void rds_arena_fini(struct rds_arena *arena);

struct rds_entry {
    struct rds_entry *next;
    char *value;           /* content and trailer; NULL: only the key is known */
    struct rds_slab *slab; /* slab that holds value; NULL: malloc'd */
    size_t len;            /* length of value */
    bool ref;              /* belongs to the save in progress */
    size_t at;             /* ref: its index in the handle's refs */
    bool known;            /* was on the server at the last answer */
    bool bad;              /* damaged on the server and can't be removed: send again */
    bool sent;             /* of the last save with the chunk: the server did not have it */
    /* of the save in progress: sent, dropped from memory, and then lost by the server */
    bool gone;
    bool refused;   /* of the save in progress: larger than the server takes */
    uint64_t by;    /* number of the only thread that put it for the save; 0: several did */
    uint64_t put_s; /* monotonic time of its last put */
    uint8_t hash_len;
    uint8_t hash[];
};

struct rds_table {
    struct rds_entry **buckets;
    size_t n_buckets, n; /* n_buckets: a power of two, or 0 */
};

struct rds_entry *rds_table_find(const struct rds_table *table, const void *hash, size_t hash_len);
/** Find or make an entry. Returns NULL when out of memory. */
struct rds_entry *rds_table_add(struct rds_table *table, const void *hash, size_t hash_len);
/** Remove and free the entries for which @drop returns true; NULL: all. */
void rds_table_purge(struct rds_table *table, bool (*drop)(const struct rds_entry *entry));
void rds_table_remove(struct rds_table *table, const void *hash, size_t hash_len);

/** Write the trailer of a manifest, RDS_TRAILER bytes, behind @len bytes of @value. */
void rds_seal(char *value, size_t len, const void *name, size_t name_len);
/** Append the trailer of a chunk to @value, RDS_CHUNK_TRAILER bytes, without a time of use. */
void rds_seal_chunk(char *value, size_t len, const void *hash, size_t hash_len);
/** Set the time of use of a sealed chunk, @len bytes with its trailer, to @now_s. */
void rds_stamp(char *value, size_t len, uint64_t now_s);
/**
 * Verify that @value of @len bytes is a manifest sealed under that name. Returns the content's
 * length in @ret_len.
 */
bool rds_verify(const char *value, size_t len, const void *name, size_t name_len, size_t *ret_len);
/** Verify that @value is a chunk sealed under that key, as rds_verify does a manifest. */
bool rds_verify_chunk(const char *value, size_t len, const void *hash, size_t hash_len,
                      size_t *ret_len);
/**
 * Read the time of use of a chunk's value from @tail, at least its last RDS_CHUNK_TRAILER bytes.
 * False when the value has none.
 */
bool rds_stamp_of(const char *tail, size_t len, uint64_t *ret_s);

/**
 * True when a save would take the value for present: its last RDS_CHUNK_TRAILER bytes are a
 * chunk's.
 */
bool rds_ends_like_ours(const char *value, size_t len);

#endif
