// SPDX-License-Identifier: Apache-2.0
/**
 * An open store inside the room: the backend's tables as they are believed, and the checked calls
 * that the public header doesn't have. Thread-safe as kv_store.h says.
 */
#ifndef KV_STORE_STORE_H
#define KV_STORE_STORE_H

#include <stdbool.h>

#include "kv_store.h"

/* A value longer than this is a backend's mistake, not data. */
#define KVS_VALUE_MAX ((size_t)64 << 30)
/* Keys beyond this are refused before a backend sees them: as hex digits they are a file name. */
#define KVS_HASH_MAX 120

struct kvs_store {
    kv_store_v1 *backend;
    const kv_store_vtable *table;  /* the backend's own, which may be shorter than ours */
    const kv_store_ext *ext_table; /* likewise; NULL when it has none */
    kv_store_vtable calls;         /* copies: what the backend doesn't have is NULL here */
    kv_store_ext ext;
    bool batches;  /* puts go in batches: it has them, and they save it something */
    void *library; /* dlopen's; NULL when built in */
    char *label;   /* the URI as logs may show it */
};

/**
 * Open @uri with these tables, which must outlive the store; @ext may be NULL. -EPROTO when they
 * aren't what kv_store_abi.h says; when open fails, -EIO with a line. A @built_in backend has told
 * why in a line of its own and in errno: that is returned.
 */
int kvs_open_with(const kv_store_vtable *table, const kv_store_ext *ext, const char *uri,
                  bool built_in, struct kvs_store **ret);

/** kvs_open that makes no file store: -ENOENT when its directory is missing, and where that holds no
 * store nothing is written. */
int kvs_open_existing(const char *uri, struct kvs_store **ret);

#endif
