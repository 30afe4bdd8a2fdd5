// SPDX-License-Identifier: Apache-2.0
/** Plugins: find and load them, and check their tables before anything in them is called. */
#ifndef KV_STORE_BACKEND_PLUGIN_H
#define KV_STORE_BACKEND_PLUGIN_H

#include "kv_store_abi.h"
#include "kv_store_ext.h"

struct kvs_plugin {
    void *library; /* NULL: the built-in file store */
    const kv_store_vtable *table;
    const kv_store_ext *ext; /* NULL: none */
};

/**
 * Load the plugin of @scheme ([a-z][a-z0-9+.-]*): libkv_store_SCHEME.so, then the library that
 * @scheme is an alias of. -ENOENT: found nowhere; -EPROTO: found, but not a plugin. Both are
 * logged.
 */
int kvs_plugin_load(const char *scheme, struct kvs_plugin *ret);
void kvs_plugin_unload(struct kvs_plugin *plugin);

/**
 * Find the backend that @uri names (store.c): the file store, or a plugin, which is loaded. Returns
 * 0, -EINVAL for a URI that can't be, or what kvs_plugin_load returns. Each is logged.
 */
int kvs_find_backend(const char *uri, struct kvs_plugin *ret);

/**
 * Copy a table into the caller's, field by field, as far as its version has them. Returns NULL, or
 * a fixed phrase that says what is wrong.
 */
const char *kvs_plugin_check(const kv_store_vtable *table, kv_store_vtable *ret);
const char *kvs_plugin_check_ext(const kv_store_ext *ext, kv_store_ext *ret);

#endif
