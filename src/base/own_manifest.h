// SPDX-License-Identifier: Apache-2.0
/**
 * Beginning of the manifests that kvs_save writes (docs/formats.md). Backends look at it to learn
 * whether a manifest names its chunks itself, or whether they must note what it may need.
 */
#ifndef KV_BASE_OWN_MANIFEST_H
#define KV_BASE_OWN_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define KV_OWN_MAGIC "KVS-OBJ\n"

enum { KV_OWN_MAGIC_LEN = 8, KV_OWN_VERSION = 1 };

/** Whether the manifest is of version 1, which collection can read. A manifest of a later version is
 * as opaque as another program's. */
static inline bool kv_is_own_manifest(const void *data, size_t len)
{
    static const char version[2] = {KV_OWN_VERSION, 0};
    const char *at = data;

    return len >= KV_OWN_MAGIC_LEN + sizeof(version) &&
           memcmp(at, KV_OWN_MAGIC, KV_OWN_MAGIC_LEN) == 0 &&
           memcmp(at + KV_OWN_MAGIC_LEN, version, sizeof(version)) == 0;
}

#endif
