// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks of a prefix cache (docs/formats.md): those of libkvasir_llama, which verification and
 * collection know as well. Their keys are 20 bytes: three letters, the kind, and a hash. So a key
 * alone tells that a chunk belongs to no object and expires by its last use.
 *
 *     'b'  block:     header, tokens, checksum │ cells' extras, K of all layers, V of all layers
 *     's'  snapshot:  header, tokens, checksum │ state's length, then key's hash and length per part
 *     'l'  layout:    header, checksum         │ what a reader must know to put blocks together
 *     'p'  part of a snapshot: any bytes, whose XXH3-128 is the key's hash
 */
#ifndef KV_BASE_PREFIX_BLOCK_H
#define KV_BASE_PREFIX_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KV_PREFIX_KEY 20u
#define KV_PREFIX_TAG 4u /* bytes of a key before its hash */
#define KV_PREFIX_HASH 16u
#define KV_PREFIX_HEADER 88u /* bytes before the tokens */
#define KV_PREFIX_TOKENS_MAX (1u << 20)

enum kv_prefix_kind {
    KV_PREFIX_BLOCK = 'b',
    KV_PREFIX_SNAPSHOT = 's',
    KV_PREFIX_LAYOUT = 'l',
    KV_PREFIX_PART = 'p'
};

/** Header of a chunk; not of a part, which has none. */
struct kv_prefix_header {
    uint8_t key[KV_PREFIX_KEY];
    uint8_t
        parent[KV_PREFIX_HASH]; /* hash of the key of the block before; of the first: the root */
    uint8_t payload_sum[KV_PREFIX_HASH]; /* XXH3-128 of the payload, canonical */
    uint32_t first_token;                /* position of the first token */
    uint32_t n_tokens;
    uint64_t payload_bytes;
};

/** Bytes of a header with its tokens and checksum. */
static inline size_t kv_prefix_header_bytes(uint32_t n_tokens)
{
    return KV_PREFIX_HEADER + (size_t)n_tokens * 4 + KV_PREFIX_HASH;
}

/** Make the key of @kind with @hash. */
void kv_prefix_key(enum kv_prefix_kind kind, const uint8_t hash[KV_PREFIX_HASH],
                   uint8_t ret[KV_PREFIX_KEY]);

/** true when @key is one of a prefix cache's chunk */
bool kv_prefix_is_key(const void *key, size_t len);

/** Compute XXH3-128 of @len bytes, canonical. */
void kv_prefix_sum(const void *data, size_t len, uint8_t ret[KV_PREFIX_HASH]);

/** Write a header: kv_prefix_header_bytes(h->n_tokens) bytes. */
void kv_prefix_encode(const struct kv_prefix_header *h, const int32_t *tokens, uint8_t *ret);

/**
 * Read a header from the first @len bytes of a chunk under @key. Returns 0; -EBADMSG when it is
 * damaged, of another version, or of another key. The payload isn't looked at.
 */
int kv_prefix_decode(const uint8_t key[KV_PREFIX_KEY], const void *data, size_t len,
                     struct kv_prefix_header *ret);

/** Token @i of a chunk whose header was decoded. */
int32_t kv_prefix_token(const void *data, size_t i);

/**
 * Check a whole chunk under @key (one of kv_prefix_is_key). Returns 0 or -EBADMSG. The parts of a
 * snapshot are chunks of their own; see kv_prefix_parts.
 */
int kv_prefix_check(const uint8_t key[KV_PREFIX_KEY], const void *data, size_t len);

enum {
    KV_PREFIX_PART_REF = 20,     /* bytes per part in a snapshot: hash (16), length (4) */
    KV_PREFIX_PART_MAX = 1 << 20 /* bytes of a part */
};

/** Parts of a snapshot: @n references of KV_PREFIX_PART_REF bytes. */
struct kv_prefix_parts {
    const uint8_t *first;
    size_t n;
    uint64_t state_bytes;
};

/**
 * Find the parts in a snapshot that kv_prefix_check accepted. Returns 0; -EBADMSG when the list
 * doesn't fit the chunk, or the lengths don't add up to the state's.
 */
int kv_prefix_parts(const void *data, size_t len, struct kv_prefix_parts *ret);

#endif
