// SPDX-License-Identifier: Apache-2.0
/** The built-in durable file store, a backend. Its open takes a plain path (docs/kv-store.md). */
#ifndef KV_STORE_BACKEND_FILE_H
#define KV_STORE_BACKEND_FILE_H

#include "kv_store_abi.h"
#include "kv_store_ext.h"

const kv_store_vtable *kvs_file_vtable(void);
const kv_store_ext *kvs_file_ext(void);

/**
 * Return the number of times that puts were released otherwise than by name: by a manifest that may
 * need all chunks, or by a deletion. A save asks for it before it puts. Any thread.
 */
uint64_t kvs_file_releases(kv_store_v1 *h);

/**
 * Take back a put of a save that failed. The chunk is dropped unless a manifest has needed it or it
 * was put more often. Does nothing when kvs_file_releases() is no longer @releases: the put may be
 * released, and a later one of another save be there. Any thread.
 */
void kvs_file_take_back(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint64_t releases);

#endif
