// SPDX-License-Identifier: Apache-2.0
/*
 * A simple, correct backend for tests of its callers: lists in memory behind one lock. Handles
 * opened with the same URI share a space, which exists until memory_forget_all(). A test may reach
 * into a space: damage a chunk, make calls fail, set the clock.
 *
 *     struct kvs_store *store;
 *     kvs_open_with(memory_vtable(), memory_ext(), "memory://test", false, &store);
 *     memory_space("memory://test")->fail_puts = -EIO;
 */
#ifndef TESTS_STORE_MEMORY_BACKEND_H
#define TESTS_STORE_MEMORY_BACKEND_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "store/backend/parts.h"
#include "store/backend/store.h"

struct memory_object {
    struct memory_object *next;
    char *name; /* manifests */
    uint8_t *hash;
    size_t hash_len;
    uint8_t *data;
    size_t len;
    uint64_t used_s;
    uint8_t *refs; /* manifests: keys of ref_len bytes put or hit before on the handle */
    size_t n_refs, ref_len;
};

struct memory_space {
    struct memory_space *next;
    char *uri;
    pthread_mutex_t lock;
    struct memory_object *chunks, *manifests;
    uint64_t now_s;                           /* the clock; tests move it */
    int fail_puts, fail_gets, fail_manifests; /* returned instead of doing the work */
    size_t fail_puts_after;                   /* puts that still work before fail_puts counts */
    kv_store_stats stats;
    unsigned opens, prefetched;
};

struct kv_store_v1 {
    struct memory_space *space;
    uint8_t *refs; /* of the handle since its last put_manifest; one key length at a time */
    size_t n_refs, ref_len;
};

struct memory_space *memory_space(const char *uri);

void memory_free_list(struct memory_object *o);

/** When every handle is closed. */
void memory_forget_all(void);

uint8_t *memory_copy(const void *data, size_t len);

void memory_remove(struct memory_object **o);

kv_store_v1 *memory_open(const char *uri);

void memory_close(kv_store_v1 *self);

int memory_put_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t len);

int memory_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                     size_t *ret_len);

int memory_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len);

int memory_get_manifest(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *ret_len);

int memory_delete_manifest(kv_store_v1 *self, const char *name);

int memory_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

int memory_exists_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present);

int memory_get_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len);

int memory_stream_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                        size_t room, kv_store_piece_fn each, void *arg);

int memory_get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n);
int memory_get_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts, size_t *len);

int memory_put_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts);

int memory_put_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *len, int *ret_each);

int memory_delete_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len);

int memory_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg);

int memory_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg);

int memory_touch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

int memory_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                        kv_store_swept *ret);

const kv_store_vtable *memory_vtable(void);

const kv_store_ext *memory_ext(void);

int memory_store(const char *uri, struct kvs_store **ret);

#endif
