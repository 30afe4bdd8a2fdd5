// SPDX-License-Identifier: Apache-2.0
/* Checks of manifests: publication, replacement, deletion; and of prefetch. By one thread. */
#include <stdio.h>

#include "store/conformance/conformance.h"

static enum kvs_verdict check_missing_manifest(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");

    KVS_CONF_TRY(kvs_conf_read_none(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "late", 4));
    return kvs_conf_read(c, c->h, name, "late", 4);
}

static enum kvs_verdict check_manifest_sizes(struct kvs_conf *c)
{
    static const size_t SIZES[] = {1, 100, 4096, 65537, 4 << 20};
    uint8_t *data = kvs_conf_data(c, 4 << 20, 3);
    kv_store_v1 *other;

    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        const char *name = kvs_conf_name(c, "");

        KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, SIZES[i]));
        KVS_CONF_TRY(kvs_conf_read(c, other, name, data, SIZES[i]));
    }
    return KVS_PASS;
}

static enum kvs_verdict check_manifest_replace(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 100000, 3);
    kv_store_v1 *other;

    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 100000));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data, 100000));
    /* nothing of the longer manifest remains */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data + 1, 10));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data + 1, 10));
    /* replaced through another handle as well */
    KVS_CONF_TRY(kvs_conf_publish(c, other, name, data + 2, 5000));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data + 2, 5000));
    return kvs_conf_read(c, c->h, name, data + 2, 5000);
}

static enum kvs_verdict check_delete(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");
    char *sibling = (char *)kvs_conf_alloc(c, 200);
    kv_store_v1 *other;

    snprintf(sibling, 200, "%s-sibling", name);
    kvs_conf_forget_name(c, sibling);
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name)); /* deleting a missing manifest succeeds */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "one", 3));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, sibling, "two", 3));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_read_none(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_read_none(c, other, name));
    KVS_CONF_TRY(kvs_conf_read(c, other, sibling, "two", 3));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_publish(c, other, name, "again", 5));
    return kvs_conf_read(c, c->h, name, "again", 5);
}

/* Delete one of two manifests that share a chunk. The second was published after the first and its
 * saver put the chunk again. The specification leaves open whether delete removes chunks, so a loss
 * is an advice only. */
static enum kvs_verdict check_delete_shared(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    const char *one = kvs_conf_name(c, ""), *two = kvs_conf_name(c, "");
    uint8_t *got = NULL;
    size_t len;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "shared", 6, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, one, "m", 1));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "shared", 6, -1));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, two, "m", 1));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, one));
    if (c->vt->get_chunk(c->h, key.bytes, key.len, &got, &len) < 0)
        return kvs_conf_advise(c, "a chunk of another object was deleted: a later restore "
                                  "of that is a miss");
    free(got);
    return kvs_conf_get(c, c->h, &key, "shared", 6);
}

static enum kvs_verdict check_visible(struct kvs_conf *c)
{
    enum { N = 64 };
    struct kvs_conf_key keys[N];
    const char *name = kvs_conf_name(c, "");
    kv_store_v1 *other;

    /* opened before the change, so the handle must not answer from memory */
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < N; i++) {
        keys[i] = kvs_conf_key(c, i % 2 ? 8 : 32);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "m", 1));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, "m", 1));
    for (size_t i = 0; i < N; i++) {
        KVS_CONF_TRY(kvs_conf_get(c, other, &keys[i], &i, sizeof(i)));
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    }
    return KVS_PASS;
}

static enum kvs_verdict check_reopen(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 100000, 1);

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 100000, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 99));
    kvs_conf_close(c, c->h); /* the only handle */
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, name, data, 99));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, data, 100000));
    return kvs_conf_put(c, c->h, &key, data, 100000, -1);
}

/* Prefetch, whatever it returns, must not change what gets return. */
static enum kvs_verdict check_prefetch(struct kvs_conf *c)
{
    enum { N = 20 };
    uint8_t keys[N][32], *data = kvs_conf_data(c, 3000, 1);
    struct kvs_conf_key key[N];

    if (c->vt->version < KV_STORE_VERSION_2 || !c->vt->prefetch_chunks)
        return kvs_conf_skip(c, "version 1: gets are a round trip each");
    for (size_t i = 0; i < N; i++) {
        key[i] = kvs_conf_key(c, 32);
        memcpy(keys[i], key[i].bytes, 32);
        if (i % 2)
            KVS_CONF_TRY(kvs_conf_put(c, c->h, &key[i], data + i, 2000 + i, 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    if (c->vt->prefetch_chunks(c->h, keys[0], 32, N) > 0)
        return kvs_conf_fail(c, "returned more than 0");
    c->vt->prefetch_chunks(c->h, keys[0], 32, 0);
    /* twice: prefetched chunks can be got more than once */
    for (size_t round = 0; round < 2; round++)
        for (size_t i = 0; i < N; i++)
            KVS_CONF_TRY(i % 2 ? kvs_conf_get(c, c->h, &key[i], data + i, 2000 + i)
                               : kvs_conf_get_none(c, c->h, &key[i]));
    /* missing at the prefetch, put after it */
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key[0], data, 10, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key[0], data, 10);
}

const struct kvs_conf_check KVS_CONF_MANIFESTS[] = {
    {"manifests: up to 4 MiB come back", check_manifest_sizes},
    {"manifests: replaced whole, on a second handle, too", check_manifest_replace},
    {"manifests: a missing one is an error", check_missing_manifest},
    {"delete: gone on a second handle; missing is fine", check_delete},
    {"delete: takes no chunk of another object", check_delete_shared},
    {"publish: all chunks there on a second handle", check_visible},
    {"publish: everything is there after re-open", check_reopen},
    {"prefetch: a hint that changes nothing", check_prefetch},
    {NULL, NULL},
};
