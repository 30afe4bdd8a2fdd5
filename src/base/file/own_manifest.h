// SPDX-License-Identifier: Apache-2.0
/**
 * Recognise manifests that kvs_save wrote (docs/formats.md). Such a manifest lists its chunks
 * itself; for others a backend must note the chunks that the manifest may need.
 */
#ifndef KV_BASE_OWN_MANIFEST_H
#define KV_BASE_OWN_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/core/le.h"

#define KV_OWN_MAGIC "KVS-OBJ\n"

enum {
    KV_OWN_MAGIC_LEN = 8,
    KV_OWN_VERSION = 1,
    KV_OWN_HEADER = 48,
    KV_OWN_SUM = 16,
    KV_OWN_KEY = 16,
    KV_OWN_CHUNK = KV_OWN_KEY + 4
};

/** Chunks that a manifest lists: @n entries of KV_OWN_CHUNK bytes, which begin with the key. */
struct kv_own_chunks {
    const uint8_t *first;
    size_t n;
};

/**
 * Return true for a manifest of version 1, which collection can read. Manifests of later versions
 * are as opaque as another program's.
 */
static inline bool kv_is_own_manifest(const void *data, size_t len)
{
    static const char version[2] = {KV_OWN_VERSION, 0};
    const char *at = data;

    return len >= KV_OWN_MAGIC_LEN + sizeof(version) &&
           memcmp(at, KV_OWN_MAGIC, KV_OWN_MAGIC_LEN) == 0 &&
           memcmp(at + KV_OWN_MAGIC_LEN, version, sizeof(version)) == 0;
}

/**
 * Find the chunks in the bytes of a manifest, whose checksum is not looked at. Returns false when it
 * isn't of version 1, or its counts don't fit.
 */
static inline bool kv_own_manifest_chunks(const void *data, size_t len, struct kv_own_chunks *ret)
{
    const uint8_t *at = data;
    uint64_t header, before, n;

    if (len < KV_OWN_HEADER + KV_OWN_SUM || !kv_is_own_manifest(data, len))
        return false;
    header = kv_get_le(at + 12, 4);
    before = header + kv_get_le(at + 44, 4); /* and fingerprint */
    n = kv_get_le(at + 32, 8);
    if (header < KV_OWN_HEADER || before > len - KV_OWN_SUM ||
        n > (len - KV_OWN_SUM - before) / KV_OWN_CHUNK)
        return false;
    *ret = (struct kv_own_chunks){at + before, (size_t)n};
    return true;
}

#endif
