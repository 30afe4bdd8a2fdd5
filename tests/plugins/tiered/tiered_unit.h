// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of tiered stores: two folders as members, opened as one and each alone. */
#ifndef TESTS_TIERED_UNIT_H
#define TESTS_TIERED_UNIT_H

#include "../../support.h"

#include <limits.h>

#include "kv_store.h"
#include "store/backend/store.h"
#include "tiered/member.h"

enum { LEN = 3000 };

struct world {
    char dir[PATH_MAX], uri[PATH_MAX + 64];
    struct kvs_store *store, *fast, *cold; /* as one, and each member alone */
};

static inline struct kvs_store *open_store(const char *uri)
{
    const kv_store_vtable *table = kv_store_get_vtable();
    struct kvs_store *store = NULL;
    int rc = strncmp(uri, "tiered:", 7) == 0
                 ? kvs_open_with(table, kv_store_get_ext(), uri, false, &store)
                 : kvs_open(uri, &store);

    if (rc)
        fail_msg("%s: %s", uri, strerror(-rc));
    return store;
}

static inline struct kvs_store *open_member(const struct world *w, const char *name)
{
    char path[PATH_MAX + 32];

    snprintf(path, sizeof(path), "%s/%s", w->dir, name);
    return open_store(path);
}

/**
 * Write the configuration: @top: options of the store. @fast, @cold: scheme of each member, "" for a
 * folder. @more: further lines of the first one.
 */
static inline void world_configure(struct world *w, const char *top, const char *fast,
                                   const char *more, const char *cold)
{
    char path[PATH_MAX + 32];
    FILE *file;

    if (disk_dir(w->dir, sizeof(w->dir)) < 0)
        fail_msg("no folder");
    snprintf(path, sizeof(path), "%s/kv.conf", w->dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "%s[fast]\nuri = %s%s/fast\n%s[cold]\nuri = %s%s/cold\n", top, fast, w->dir, more,
            cold, w->dir);
    fclose(file);
    snprintf(w->uri, sizeof(w->uri), "tiered:%s", path);
}

/** @top: options of the store. @cold: scheme of the second member, "" for a folder. */
static inline void world_open(struct world *w, const char *top, const char *cold)
{
    world_configure(w, top, "", "", cold);
    w->store = open_store(w->uri);
    w->fast = open_member(w, "fast");
    w->cold = open_member(w, "cold");
}

static inline void world_close(struct world *w)
{
    kvs_close(w->store);
    kvs_close(w->fast);
    kvs_close(w->cold);
    remove_dir(w->dir);
}

/** Write the key and the bytes of blob @n. */
static inline void make_blob(uint64_t n, uint8_t key[16], uint8_t data[LEN])
{
    memset(key, 0, 16);
    memcpy(key, &n, sizeof(n));
    key[15] = (uint8_t)(n * 37);
    for (size_t i = 0; i < LEN; i++)
        data[i] = (uint8_t)(n * 31 + i * 7 + i / 256);
}

static inline int put_blob(struct kvs_store *store, uint64_t n)
{
    uint8_t key[16], data[LEN];

    make_blob(n, key, data);
    return kvs_put_chunk(store, key, sizeof(key), data, LEN);
}

/** Get blob @n and compare its bytes. Returns as kvs_get_chunk. */
static inline int get_blob(struct kvs_store *store, uint64_t n)
{
    uint8_t key[16], data[LEN];
    void *got;
    size_t len;
    int rc;

    make_blob(n, key, data);
    rc = kvs_get_chunk(store, key, sizeof(key), &got, &len);
    if (rc)
        return rc;
    if (len != LEN || memcmp(got, data, LEN) != 0)
        fail_msg("other bytes of blob %llu", (unsigned long long)n);
    free(got);
    return 0;
}

static inline void publish(struct kvs_store *store, const char *name)
{
    assert_int_equal(kvs_put_manifest(store, name, "", 0), 0);
}

/** Put even blobs of the first @n into the fast member, odd ones into the other. */
static inline void world_fill(struct world *w, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(put_blob(i % 2 ? w->cold : w->fast, i), 0);
    publish(w->cold, "x");
    publish(w->fast, "x");
}

#endif
