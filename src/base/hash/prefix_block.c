// SPDX-License-Identifier: Apache-2.0
#include "base/hash/prefix_block.h"

#include <string.h>

#include "base/core/error.h"
#include "base/core/le.h"
#include "base/hash/hash.h"

#define MAGIC "KVS-PFX\n"

enum {
    VERSION = 1,
    AT_VERSION = 8,
    AT_KIND = 10,
    AT_N_TOKENS = 12,
    AT_FIRST = 16,
    AT_PAYLOAD = 24,
    AT_KEY = 32, /* 20 bytes and 4 of zero */
    AT_PARENT = 56,
    AT_SUM = 72
};

_Static_assert(AT_SUM + KV_PREFIX_HASH == KV_PREFIX_HEADER, "docs/formats.md says so");

void kv_prefix_key(enum kv_prefix_kind kind, const uint8_t hash[KV_PREFIX_HASH],
                   uint8_t ret[KV_PREFIX_KEY])
{
    const uint8_t tag[KV_PREFIX_TAG] = {'K', 'V', 'P', (uint8_t)kind};

    memcpy(ret, tag, sizeof(tag));
    memcpy(ret + sizeof(tag), hash, KV_PREFIX_HASH);
}

bool kv_prefix_is_key(const void *key, size_t len)
{
    const uint8_t *at = key;

    return len == KV_PREFIX_KEY && memcmp(at, "KVP", 3) == 0 &&
           (at[3] == KV_PREFIX_BLOCK || at[3] == KV_PREFIX_SNAPSHOT || at[3] == KV_PREFIX_LAYOUT ||
            at[3] == KV_PREFIX_PART);
}

void kv_prefix_sum(const void *data, size_t len, uint8_t ret[KV_PREFIX_HASH])
{
    kv_hash(data, len, ret);
}

static void put_le(uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

void kv_prefix_encode(const struct kv_prefix_header *h, const int32_t *tokens, uint8_t *ret)
{
    size_t end = KV_PREFIX_HEADER + (size_t)h->n_tokens * 4;

    memset(ret, 0, KV_PREFIX_HEADER);
    memcpy(ret, MAGIC, sizeof(MAGIC) - 1);
    put_le(ret + AT_VERSION, VERSION, 2);
    put_le(ret + AT_KIND, h->key[3], 2);
    put_le(ret + AT_N_TOKENS, h->n_tokens, 4);
    put_le(ret + AT_FIRST, h->first_token, 4);
    put_le(ret + AT_PAYLOAD, h->payload_bytes, 8);
    memcpy(ret + AT_KEY, h->key, KV_PREFIX_KEY);
    memcpy(ret + AT_PARENT, h->parent, KV_PREFIX_HASH);
    memcpy(ret + AT_SUM, h->payload_sum, KV_PREFIX_HASH);
    for (size_t i = 0; i < h->n_tokens; i++)
        put_le(ret + KV_PREFIX_HEADER + 4 * i, (uint32_t)tokens[i], 4);
    kv_prefix_sum(ret, end, ret + end);
}

int kv_prefix_decode(const uint8_t key[KV_PREFIX_KEY], const void *data, size_t len,
                     struct kv_prefix_header *ret)
{
    const uint8_t *at = data;
    struct kv_prefix_header h;
    uint8_t sum[KV_PREFIX_HASH];
    size_t end;

    if (len < KV_PREFIX_HEADER + KV_PREFIX_HASH || memcmp(at, MAGIC, sizeof(MAGIC) - 1) != 0 ||
        kv_get_le(at + AT_VERSION, 2) != VERSION || kv_get_le(at + AT_KIND, 2) != key[3] ||
        memcmp(at + AT_KEY, key, KV_PREFIX_KEY) != 0)
        return -EBADMSG;
    h.n_tokens = (uint32_t)kv_get_le(at + AT_N_TOKENS, 4);
    if (h.n_tokens > KV_PREFIX_TOKENS_MAX || len < kv_prefix_header_bytes(h.n_tokens))
        return -EBADMSG;
    end = KV_PREFIX_HEADER + (size_t)h.n_tokens * 4;
    kv_prefix_sum(at, end, sum);
    if (memcmp(sum, at + end, sizeof(sum)) != 0)
        return -EBADMSG;
    h.first_token = (uint32_t)kv_get_le(at + AT_FIRST, 4);
    h.payload_bytes = kv_get_le64(at + AT_PAYLOAD);
    memcpy(h.key, at + AT_KEY, sizeof(h.key));
    memcpy(h.parent, at + AT_PARENT, sizeof(h.parent));
    memcpy(h.payload_sum, at + AT_SUM, sizeof(h.payload_sum));
    *ret = h;
    return 0;
}

int32_t kv_prefix_token(const void *data, size_t i)
{
    return (int32_t)(uint32_t)kv_get_le((const uint8_t *)data + KV_PREFIX_HEADER + 4 * i, 4);
}

int kv_prefix_check(const uint8_t key[KV_PREFIX_KEY], const void *data, size_t len)
{
    uint8_t sum[KV_PREFIX_HASH];
    struct kv_prefix_header h;
    struct kv_prefix_parts parts;
    size_t header;

    if (key[3] == KV_PREFIX_PART) {
        kv_prefix_sum(data, len, sum);
        return memcmp(sum, key + KV_PREFIX_TAG, sizeof(sum)) == 0 ? 0 : -EBADMSG;
    }
    if (kv_prefix_decode(key, data, len, &h) < 0)
        return -EBADMSG;
    header = kv_prefix_header_bytes(h.n_tokens);
    if (h.payload_bytes != len - header)
        return -EBADMSG;
    kv_prefix_sum((const uint8_t *)data + header, len - header, sum);
    if (memcmp(sum, h.payload_sum, sizeof(sum)) != 0)
        return -EBADMSG;
    return key[3] == KV_PREFIX_SNAPSHOT ? kv_prefix_parts(data, len, &parts) : 0;
}

int kv_prefix_parts(const void *data, size_t len, struct kv_prefix_parts *ret)
{
    const uint8_t *at = data;
    struct kv_prefix_parts parts;
    uint64_t left;
    size_t header;

    if (len < KV_PREFIX_HEADER)
        return -EBADMSG;
    header = kv_prefix_header_bytes((uint32_t)kv_get_le(at + AT_N_TOKENS, 4));
    if (len < header + 8 || (len - header - 8) % KV_PREFIX_PART_REF != 0)
        return -EBADMSG;
    parts = (struct kv_prefix_parts){at + header + 8, (len - header - 8) / KV_PREFIX_PART_REF,
                                     kv_get_le64(at + header)};
    left = parts.state_bytes;
    for (size_t i = 0; i < parts.n; i++) {
        uint64_t part = kv_get_le(parts.first + i * KV_PREFIX_PART_REF + KV_PREFIX_HASH, 4);

        if (!part || part > left || part > KV_PREFIX_PART_MAX)
            return -EBADMSG;
        left -= part;
    }
    if (left)
        return -EBADMSG;
    *ret = parts;
    return 0;
}
