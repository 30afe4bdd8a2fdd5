// SPDX-License-Identifier: Apache-2.0
/**
 * The manifest of an object: as a structure, as bytes (docs/formats.md), and its weaves. A decoded
 * manifest is immutable and may be read from any thread.
 */
#ifndef KVS_OBJECT_MANIFEST_H
#define KVS_OBJECT_MANIFEST_H

#include "base/core/buf.h"
#include "kv_store.h"

#define KVS_FINGERPRINT_MAX 4096u
/**
 * Upper limit of a weave's region, which is held in memory as a whole. A manifest with a larger one
 * is damaged.
 */
#define KVS_WEAVE_MAX (32u << 20)

/**
 * @n regions of @rows rows of @row_bytes, one after the other from byte @offset of the object.
 * Chunks of the regions hold them column by column: the first @piece_bytes of every row, then the next
 * @piece_bytes of every row, and so on. So rows that all grow at their ends (transposed V) keep the
 * chunks of their beginnings.
 */
struct kvs_weave {
    uint64_t offset;
    uint32_t rows, row_bytes, piece_bytes, n;
};

struct kvs_manifest {
    enum kvs_format format; /* BYTES or LLAMA */
    uint64_t bytes, created_s;
    char *fingerprint;
    struct kvs_chunk_ref *chunks;
    size_t n_chunks, chunks_capacity;
    struct kvs_weave *weaves;
    size_t n_weaves, weaves_capacity;
};

/**
 * Append a chunk of the object. Returns 0, -ENOMEM, or -EFBIG when the object's length overflows.
 */
int kvs_manifest_add(struct kvs_manifest *m, const uint8_t key[16], uint32_t len);
/** Append one region, which lies behind those before. Equal neighbours become one weave. */
int kvs_manifest_add_weave(struct kvs_manifest *m, uint64_t offset, uint32_t rows,
                           uint32_t row_bytes, uint32_t piece_bytes);
/**
 * Append the bytes of @m to an empty @ret. Returns 0, -EINVAL (fingerprint too long) or -ENOMEM.
 */
int kvs_manifest_encode(const struct kvs_manifest *m, struct kv_buf *ret);
/**
 * Decode a manifest from @len bytes, borrowed for the call. The caller frees *@ret with
 * kvs_manifest_free. Returns 0; -EMEDIUMTYPE (not a manifest of this library); -EBADMSG (damaged).
 */
int kvs_manifest_decode(const void *data, size_t len, struct kvs_manifest **ret);

/** Compute the key of a chunk: XXH3-128 of its bytes in canonical (big-endian) order. */
void kvs_chunk_key(const void *data, size_t len, uint8_t ret[16]);

/** Convert a region from the object's order (@plain) to columns (@woven). */
void kvs_weave_into(const struct kvs_weave *w, const uint8_t *plain, uint8_t *woven);
void kvs_weave_out_of(const struct kvs_weave *w, const uint8_t *woven, uint8_t *plain);

static inline size_t kvs_weave_region(const struct kvs_weave *w)
{
    return (size_t)w->rows * w->row_bytes;
}

#endif
