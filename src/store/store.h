// SPDX-License-Identifier: Apache-2.0
/**
 * An open store inside the room: checked copies of the backend's tables, and the checked calls that
 * the public header doesn't have. Threads: as in kv_store.h.
 */
#ifndef KV_STORE_STORE_H
#define KV_STORE_STORE_H

#include <stdbool.h>

#include "kv_store.h"

/* Upper limit for values. A longer one is a backend's mistake. */
#define KVS_VALUE_MAX ((size_t)64 << 30)
/* Upper limit for keys, in bytes: their hex digits must fit into a file name. */
#define KVS_HASH_MAX 120

struct kvs_store {
    kv_store_v1 *backend;
    /* the backend's own table, which may be shorter than this build's */
    const kv_store_vtable *table;
    const kv_store_ext *ext_table; /* NULL: no extensions */
    kv_store_vtable calls;         /* copies; functions that the backend lacks are NULL */
    kv_store_ext ext;
    bool batches;  /* puts go in batches: the backend has put_chunks, and gains by it */
    void *library; /* dlopen's handle; NULL when built in */
    char *label;   /* the URI without secrets, for logs */
};

/**
 * Open @uri with these tables, which must outlive the store; @ext may be NULL. -EPROTO: a table
 * breaks kv_store_abi.h. When the backend's open fails: -EIO and a log line, or for a @built_in
 * backend, which has logged the reason, its errno.
 */
int kvs_open_with(const kv_store_vtable *table, const kv_store_ext *ext, const char *uri,
                  bool built_in, struct kvs_store **ret);

/**
 * Open as kvs_open does, but make no file store: -ENOENT when its directory is missing. Writes
 * nothing to a directory that holds no store.
 */
int kvs_open_existing(const char *uri, struct kvs_store **ret);

#endif
