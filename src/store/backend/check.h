// SPDX-License-Identifier: Apache-2.0
/** Checks of the values that a backend returns. The library uses no value before its check. */
#ifndef KV_STORE_BACKEND_CHECK_H
#define KV_STORE_BACKEND_CHECK_H

#include "store/backend/store.h"

/** Log that @call of the backend broke the ABI; returns -EPROTO. */
int kvs_broken(const struct kvs_store *store, const char *call, const char *what);

/**
 * Check a return value that may be up to @max. Returns @rc, a negative errno, or -EPROTO with a log
 * line.
 */
int kvs_check_rc(const struct kvs_store *store, const char *call, int rc, int max);

/**
 * Check a buffer that a backend handed out. Returns NULL, or a phrase that says what is wrong; the
 * caller frees *data in either case. Replaces a missing buffer of an empty value by an allocated
 * one.
 */
const char *kvs_check_value(void **data, size_t len);

/** True when a backend may be given these @n keys of @hash_len bytes. */
bool kvs_hashes_ok(const void *hashes, size_t hash_len, size_t n);

#endif
