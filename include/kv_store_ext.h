// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store_ext.h: optional functions of a backend beyond kv_store_abi.h.
 *
 * A backend exports a second symbol, kv_store_get_ext, which returns a table that starts with its
 * own size. A consumer uses a function only when the table is long enough to have it and the
 * pointer isn't NULL; otherwise it does without. The table is Kvasir's own extension, not part of
 * the specification.
 *
 * Functions return 0 (or a count) on success and a negative errno on failure. They are thread-safe
 * like those of the vtable, and take handles that its open returned. A backend with this table says
 * in errno why its open returned NULL; 0 there: -EIO.
 */
#ifndef KV_STORE_EXT_H
#define KV_STORE_EXT_H

#include <sys/uio.h>

#include "kv_store_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The optional symbol that a backend exports. */
#define KV_STORE_EXT_SYMBOL "kv_store_get_ext"
#define KV_STORE_EXT_VERSION 1u

/** Length that get_chunks gives a chunk whose bytes did not verify. */
#define KV_STORE_LEN_BAD SIZE_MAX

/** Length that get_chunks gives a chunk of which nothing is known: a part of the store that may have it
 * didn't answer. The answers about the others hold. */
#define KV_STORE_LEN_UNKNOWN (SIZE_MAX - 1)

/** Answer of exists_chunks for such a chunk. */
#define KV_STORE_PRESENT_UNKNOWN 3

/** Answer of exists_chunks for a chunk that is stored, but damaged as far as a look without its
 * bytes tells. A put of it replaces it. */
#define KV_STORE_PRESENT_BAD 2

/** One object of a listing. Pointers are valid during the callback only. */
typedef struct {
    size_t size;
    const char *name;    /* name of a manifest; NULL for chunks */
    const uint8_t *hash; /* key of a chunk; NULL for manifests */
    size_t hash_len;
    uint64_t len;    /* bytes of content as put; UINT64_MAX when the listing doesn't tell */
    uint64_t used_s; /* last put, hit or touch, seconds since 1970; 0 when unknown */
} kv_store_entry;

/** Callback of a listing. A non-zero return ends the listing, which returns that value. */
typedef int (*kv_store_each_fn)(void *arg, const kv_store_entry *entry);

/**
 * Decide whether a chunk must stay (non-zero). Called with the backend's locks held: the callback
 * must not call the backend.
 */
typedef int (*kv_store_live_fn)(void *arg, const uint8_t *hash, size_t hash_len);

/**
 * Take a piece of a chunk: @len bytes from byte @offset on, valid during the call. Offset 0 begins
 * anew: pieces before it don't count. A non-zero return ends the stream, which returns that value.
 */
typedef int (*kv_store_piece_fn)(void *arg, uint64_t offset, const uint8_t *piece, size_t len);

/** Sizes of a store and counters of a handle. */
typedef struct {
    size_t size;               /* as the caller was built */
    uint64_t n_chunks;         /* chunks stored; UINT64_MAX when only a listing could tell */
    uint64_t n_manifests;      /* manifests stored; UINT64_MAX likewise */
    uint64_t bytes;            /* bytes stored; UINT64_MAX likewise */
    uint64_t limit_bytes;      /* 0: none */
    uint64_t puts, put_hits;   /* of this handle: chunks stored; found there already */
    uint64_t gets, get_misses; /* of this handle */
    uint64_t bad_chunks;       /* of this handle: did not verify, set aside */
    uint64_t evicted;          /* of this handle: chunks removed for room */
    uint64_t bytes_written, bytes_read; /* of this handle, as stored */
    uint64_t round_trips;               /* of this handle: waits for a server; 0 for local stores */
    uint64_t errors; /* of this handle: calls that failed for another reason than a miss */
} kv_store_stats;

/** Result of sweep_chunks, in chunks and bytes. */
typedef struct {
    size_t size;
    uint64_t kept, deleted, deleted_bytes, errors;
} kv_store_swept;

/** Room for the version of a chunk's object, with its end. */
#define KV_STORE_TAG_MAX 96

/** A part of a chunk to be read (get_ranges). Elements of an array: the struct never changes. */
typedef struct {
    const uint8_t *hash; /* key of the chunk */
    size_t hash_len;
    uint64_t offset; /* first byte to be read */
    size_t len;      /* bytes to be read, 1 at least */
    /* Memory of the consumer for them, filled one part after the other; parts have @len bytes in all. */
    const struct iovec *parts;
    size_t n_parts;
    /* The version of the stored object, text of the backend's. "": read any, and set to the version
     * read. Otherwise read this version only. */
    char tag[KV_STORE_TAG_MAX];
    int rc; /* answer, see get_ranges */
    uint32_t reserved[3];
} kv_store_range;

/** Options of pack_chunks. Zeros mean defaults. */
typedef struct {
    size_t size;
    const char *to;     /* name of the member that gets the packs */
    const char *from;   /* name of the member whose chunks are packed; NULL: @to */
    uint64_t min_bytes; /* of a pack's chunks: too few are left as they are; 0: 8 MiB */
    uint64_t max_bytes; /* of a pack's chunks, 64 MiB at most; 0: 64 MiB */
    uint64_t idle_s;    /* leave chunks alone that were used within this time; 0: none */
} kv_store_pack_opts;

/** Result of pack_chunks. */
typedef struct {
    size_t size;
    uint64_t packs, packed_bytes; /* written by this call */
    uint64_t packed;              /* chunks that are in packs now */
    uint64_t removed;             /* single chunks removed */
    uint64_t in_use;              /* chunks left: used within idle_s */
    uint64_t left;                /* chunks left: too few for a pack, or too long */
    uint64_t missing, errors;
} kv_store_packed;

/** Optional functions of a backend. Each pointer may be NULL. */
typedef struct {
    size_t size;      /* sizeof(kv_store_ext) as the backend was built */
    uint32_t version; /* KV_STORE_EXT_VERSION */
    uint32_t reserved;

    /**
     * Set ret_present[i] to 1 when chunk i is there, else to 0, or to KV_STORE_PRESENT_BAD or
     * KV_STORE_PRESENT_UNKNOWN. Puts
     * that this handle has buffered count as there.
     */
    int (*exists_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present);

    /**
     * Get @n chunks in one go; keys may repeat. Returns the number found.
     *
     * The consumer sets all of out_data to NULL first. For a found chunk the backend sets
     * out_data[i] to a malloc'd buffer of out_len[i] bytes, which the consumer frees. out_data[i]
     * stays NULL where the chunk is missing or did not verify; for the latter out_len[i] is
     * KV_STORE_LEN_BAD when the backend can tell, or KV_STORE_LEN_UNKNOWN when nothing is known of
     * the chunk. On a negative return the backend has freed its
     * buffers, and the consumer ignores out_data.
     */
    int (*get_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len);

    /**
     * Put @n chunks in one go. ret_each[i] (@ret_each may be NULL) is the return value that
     * put_chunk would have for chunk i.
     */
    int (*put_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *data_len, int *ret_each);

    /**
     * Remove a chunk at once, also when manifests need it. Returns 0 also when there is none. After
     * an error the chunk may be there or not, and a put of it on this handle that isn't published
     * yet is dropped: put it again before a manifest lists it.
     */
    int (*delete_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len);

    /** Call @each for every manifest. */
    int (*list_manifests)(kv_store_v1 *self, kv_store_each_fn each, void *arg);

    /** Call @each for every chunk. */
    int (*list_chunks)(kv_store_v1 *self, kv_store_each_fn each, void *arg);

    /**
     * Call @each for every chunk that was put or hit on the handle that published manifest @name,
     * as the backend noted them. A manifest of unknown format may need these. Returns 0 without a
     * call for one of 0 bytes whose handle had put and hit nothing. -ENOENT: none noted, so it may
     * need any chunk.
     */
    int (*list_refs)(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg);

    /** Mark chunks as used now; missing ones are skipped. Returns the number marked. */
    int (*touch_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

    /** Make buffered puts durable without a manifest. */
    int (*flush)(kv_store_v1 *self);

    /**
     * Delete chunks that were not used for @min_age_s seconds and for which @live returns 0.
     * Safe against writers of other handles and processes: a chunk hit meanwhile stays.
     */
    int (*sweep_chunks)(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                        kv_store_swept *ret);

    /** Read sizes and counters into *@ret, as far as ret->size reaches. */
    int (*stats)(kv_store_v1 *self, kv_store_stats *ret);

    /**
     * Call @each for the pieces of a chunk, in order, as they are read. @buf, of @room bytes, is the
     * consumer's for the backend to read them into; pieces may lie elsewhere, and be longer. An
     * empty chunk is one piece of no bytes. Returns 0 when all pieces were given and verified;
     * -ENOENT, -EBADMSG, another error: the consumer drops what it was given. For backends of which
     * a call costs no round trip: consumers prefer it to get_chunks.
     */
    int (*stream_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                        size_t room, kv_store_piece_fn each, void *arg);

    /**
     * Get a chunk into the consumer's memory: into @n_parts parts, filled one after the other.
     * @parts are the consumer's, and so are the bytes; no byte outside of them is written. Sets
     * *out_len to the chunk's length, on -EMSGSIZE as well. Returns 0 when all bytes were given and
     * verified; -ENOENT; -EBADMSG; -EMSGSIZE (the parts have less room than the chunk has bytes);
     * another error. The parts' bytes mean nothing after a failure. For backends that read
     * straight into them, of which a call costs no round trip: consumers prefer it to get_chunks.
     */
    int (*get_parts)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts, size_t *out_len);

    /**
     * Put a chunk whose bytes lie in @n_parts parts, one after the other. Returns as put_chunk. For
     * backends that write them without joining them first, of which a call costs no round trip:
     * consumers prefer it to put_chunks for chunks of several parts.
     */
    int (*put_parts)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts);

    /**
     * Remove a chunk whose content is @data, also when manifests need it. The backend compares and
     * removes in one step, so that a chunk that another writer stores meanwhile stays. Returns 1
     * when it removed the chunk; 0 when the chunk is missing, has other content, or was put on
     * this handle and is not published yet.
     */
    int (*delete_chunk_if)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len);

    /**
     * For backends that buffer puts, and learn only later whether a chunk was there: set ret_new[i]
     * to 0 when put_chunk returned 0 for chunk i and a publication of this handle found it there, else
     * to 1. Call it after put_manifest or flush. Answers from the handle's memory, without a round
     * trip; a chunk of which the handle no longer knows counts as new.
     */
    int (*new_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t *ret_new);

    /**
     * For backends of which some handles are near and others not: return 1 when a call costs this
     * handle no round trip, else 0. Of a handle that isn't near, the consumer leaves stream_chunk,
     * get_parts and put_parts aside and prefers batches.
     */
    int (*is_near)(kv_store_v1 *self);

    /**
     * Read @n parts of chunks, at once where a call costs a round trip. Returns the number of parts
     * read, or an error that leaves all unanswered (-EINVAL, -ECHILD, -ENOMEM). ranges[i].rc becomes
     *   0         buf has the bytes, tag the version that they were read from
     *   -ENOENT   the chunk is missing
     *   -ERANGE   the chunk has no such part: its end comes earlier
     *   -ESTALE   the chunk has another version than tag: it was replaced
     *   -EBADMSG  the chunk is damaged, as far as its part tells
     *   -ENOTSUP  the server doesn't read parts
     *   another error of the read.
     * Bytes of a part are NOT verified: a backend's checksum covers the whole chunk. The consumer
     * needs one of its own. The parts' bytes mean nothing after a failure.
     */
    int (*get_ranges)(kv_store_v1 *self, kv_store_range *ranges, size_t n);

    /**
     * For stores of several members: rewrite @n chunks of a member, in this order, into few long objects
     * (packs), which are read by parts, and remove the single ones. Readers find each chunk all
     * the time. Waits between both as long as the store's configuration says. The same call again goes
     * on where one was cut off. Returns 0 (see @ret); -ENOENT: no such member; -ENOTSUP: the member can't have
     * packs; -EROFS; another error, after which *@ret counts what was done.
     */
    int (*pack_chunks)(kv_store_v1 *self, const kv_store_pack_opts *opts, const uint8_t *hashes,
                       size_t hash_len, size_t n, kv_store_packed *ret);
} kv_store_ext;

/** Optional export of a backend. The table is valid as long as the library is loaded. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const kv_store_ext *
kv_store_get_ext(void);

#ifdef __cplusplus
}
#endif

#endif
