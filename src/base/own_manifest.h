// SPDX-License-Identifier: Apache-2.0
/**
 * Recognise manifests that kvs_save wrote (docs/formats.md). Such a manifest lists its chunks
 * itself; for others a backend must note the chunks that the manifest may need.
 */
#ifndef KV_BASE_OWN_MANIFEST_H
#define KV_BASE_OWN_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define KV_OWN_MAGIC "KVS-OBJ\n"

enum { KV_OWN_MAGIC_LEN = 8, KV_OWN_VERSION = 1 };

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

#endif
