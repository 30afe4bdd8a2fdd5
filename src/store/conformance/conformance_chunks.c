// SPDX-License-Identifier: Apache-2.0
/* Checks of chunks: puts and gets, keys, duplicates, and who owns the memory; by one thread. */
#include <stdio.h>

#include "store/conformance/conformance.h"

static enum kvs_verdict check_sizes(struct kvs_conf *c)
{
    static const size_t SIZES[] = {0,    1,    2,     7,     255,   256,           4095,
                                   4096, 4097, 65535, 65536, 65537, (1 << 20) - 1, 16 << 20};
    struct kvs_conf_key keys[KV_COUNT(SIZES)];
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 16 << 20, c->run);
    kv_store_v1 *other;

    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        keys[i] = kvs_conf_key(c, 8);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], data + i, SIZES[i] - KV_MIN(SIZES[i], i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "sizes", 5));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        size_t len = SIZES[i] - KV_MIN(SIZES[i], i);

        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], data + i, len));
        KVS_CONF_TRY(kvs_conf_get(c, other, &keys[i], data + i, len));
    }
    return KVS_PASS;
}

/* Zeros (as after a lost write), text that compresses well, noise. */
static enum kvs_verdict check_contents(struct kvs_conf *c)
{
    const size_t len = 1 << 20;
    uint8_t *data[3] = {kvs_conf_alloc(c, len), kvs_conf_alloc(c, len), kvs_conf_data(c, len, 7)};
    struct kvs_conf_key keys[3];

    for (size_t i = 0; i < len; i++)
        data[1][i] = (uint8_t) "KV state. "[i % 10];
    for (size_t i = 0; i < 3; i++) {
        keys[i] = kvs_conf_key(c, 16);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], data[i], len, 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < 3; i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], data[i], len));
    return KVS_PASS;
}

static enum kvs_verdict check_empty(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 32);
    const char *name = kvs_conf_name(c, "");

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "", 0, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "", 0));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "", 0));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, name, "", 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "", 0, -1));
    return KVS_PASS;
}

/* True when puts wait for the manifest: until then another handle doesn't see them. */
static bool is_buffering(struct kvs_conf *c, kv_store_v1 *other)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *got;
    size_t len;

    if (c->vt->put_chunk(c->h, key.bytes, key.len, (const uint8_t *)"x", 1) != 0)
        return false;
    if (c->vt->get_chunk(other, key.bytes, key.len, &got, &len) < 0)
        return true;
    free(got);
    return false;
}

/* A backend may look for duplicates only when it writes, at put_manifest (the specification allows
 * it). One that writes at once must report the duplicate at put_chunk. */
static enum kvs_verdict check_duplicates(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 1000, 1);
    kv_store_v1 *other;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 1000, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    rc = c->vt->put_chunk(other, key.bytes, key.len, data, 1000);
    if (rc == 0 && !is_buffering(c, other))
        return kvs_conf_fail(c, "put_chunk returned 0, although it writes at once");
    if (rc != 0 && rc != 1)
        return kvs_conf_fail(c, "put_chunk returned %d", rc);
    KVS_CONF_TRY(kvs_conf_publish(c, other, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_get(c, other, &key, data, 1000));
    return rc == 1 ? KVS_PASS
                   : kvs_conf_skip(c, "buffers: until put_manifest consumers count chunks as new");
}

/* Put a chunk twice before the manifest. A backend that writes at once must call the second put a
 * hit; for one that buffers, an advice is recorded. */
static enum kvs_verdict check_duplicate_buffered(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 1000, 1);
    kv_store_v1 *other;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 1000, 0));
    rc = c->vt->put_chunk(c->h, key.bytes, key.len, data, 1000);
    if (rc != 0 && rc != 1)
        return kvs_conf_fail(c, "put_chunk returned %d", rc);
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    if (rc == 0 && !is_buffering(c, other))
        return kvs_conf_fail(c, "put_chunk returned 0, although it writes at once");
    if (rc == 0)
        kvs_conf_advise(c, "the second put returned 0: consumers count it as new");
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, data, 1000);
}

static enum kvs_verdict check_immutable(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *first = kvs_conf_data(c, 500, 1), *second = kvs_conf_data(c, 500, 2);

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, first, 500, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    c->vt->put_chunk(c->h, key.bytes, key.len, second, 500); /* a hit or refused, never stored */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, first, 500);
}

/* Each get hands out memory of its own, which the caller may change and frees. */
static enum kvs_verdict check_outputs(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 300, 1), *a = NULL, *b = NULL;
    const char *name = kvs_conf_name(c, "");
    size_t len;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 300, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 300));
    for (unsigned manifest = 0; manifest < 2; manifest++) {
        rc = manifest ? c->vt->get_manifest(c->h, name, &a, &len)
                      : c->vt->get_chunk(c->h, key.bytes, key.len, &a, &len);
        if (rc != 0 || !a || len != 300)
            return kvs_conf_fail(c, "the first get returned %d", rc);
        memset(a, 0, len);
        rc = manifest ? c->vt->get_manifest(c->h, name, &b, &len)
                      : c->vt->get_chunk(c->h, key.bytes, key.len, &b, &len);
        if (rc == 0 && a == b)
            /* a shared buffer: freeing it could crash */
            return kvs_conf_fail(c, "two gets gave the same memory");
        free(a);
        if (rc != 0 || !b || len != 300)
            return kvs_conf_fail(c, "the second get returned %d", rc);
        rc = memcmp(b, data, len);
        free(b);
        if (rc != 0)
            return kvs_conf_fail(c, "writing to an output changed what is stored");
    }
    return KVS_PASS;
}

/* Inputs are valid during the call only, and may lie at any address. */
static enum kvs_verdict check_inputs(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *good = kvs_conf_data(c, 70000, 1), *data = kvs_conf_alloc(c, 70001) + 1;
    uint8_t *hash = kvs_conf_alloc(c, 9) + 1;
    const char *name = kvs_conf_name(c, "");
    char *lent = (char *)kvs_conf_alloc(c, 100) + 1;

    memcpy(hash, key.bytes, key.len);
    memcpy(data, good, 70000);
    snprintf(lent, 99, "%s", name);
    if (c->vt->put_chunk(c->h, hash, key.len, data, 70000) != 0)
        return kvs_conf_fail(c, "put_chunk from odd addresses failed");
    memset(hash, 0xee, key.len);
    memset(data, 0xee, 70000);
    memcpy(data, good, 50);
    if (c->vt->put_manifest(c->h, lent, data, 50) != 0)
        return kvs_conf_fail(c, "put_manifest from odd addresses failed");
    memset(data, 0xee, 50);
    memset(lent, 'e', 20);
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, good, 70000));
    return kvs_conf_read(c, c->h, name, good, 50);
}

static enum kvs_verdict check_key_lengths(struct kvs_conf *c)
{
    static const size_t LENS[] = {8, 16, 20, 32};
    struct kvs_conf_key key = kvs_conf_key(c, 32), keys[KV_COUNT(LENS)];

    for (size_t i = 0; i < KV_COUNT(LENS); i++) { /* each a prefix of the next */
        keys[i] = key;
        keys[i].len = LENS[i];
        kvs_conf_forget_key(c, &keys[i]);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &LENS[i], sizeof(LENS[i]), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(LENS); i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &LENS[i], sizeof(LENS[i])));
    key.len = 24;
    return kvs_conf_get_none(c, c->h, &key);
}

/* Keys are bytes, not text: NUL, '/', line ends and high bytes count as any other. */
static enum kvs_verdict check_key_bytes(struct kvs_conf *c)
{
    static const uint8_t BYTES[] = {0x00, 0x01, '\n', '\r', ' ', '%',
                                    '*',  '/',  '{',  'A',  'a', 0xff};
    struct kvs_conf_key keys[2 * KV_COUNT(BYTES)], base = kvs_conf_key(c, 8);

    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        keys[i] = base;
        keys[i].bytes[i % 2 ? 7 : 3] = BYTES[i / 2];
        if (i % 2)
            keys[i].bytes[3] = 0x00; /* bytes behind a NUL count, too */
        else
            keys[i].bytes[7] = 0x5c;
        kvs_conf_forget_key(c, &keys[i]);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(keys); i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    return KVS_PASS;
}

static enum kvs_verdict check_missing_chunk(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8), wide = kvs_conf_key(c, 32);

    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &key));
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &wide));
    /* the backend must not remember the miss */
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "late", 4, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, "late", 4);
}

/* Get a handle's own puts before the manifest. The specification leaves open whether a handle sees
 * them; wrong bytes are a failure. */
static enum kvs_verdict check_own_puts(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 5000, 1), *got = NULL;
    size_t len = 0;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 5000, 0));
    rc = c->vt->get_chunk(c->h, key.bytes, key.len, &got, &len);
    if (rc < 0)
        return kvs_conf_advise(c, "not before put_manifest (%d); some consumers expect it", rc);
    if (!got || len != 5000 || memcmp(got, data, len) != 0)
        rc = -1;
    free(got);
    return rc == 0 ? KVS_PASS : kvs_conf_fail(c, "gave other bytes than were put");
}

static enum kvs_verdict check_many(struct kvs_conf *c)
{
    enum { N = 1000 };
    struct kvs_conf_key *keys = (struct kvs_conf_key *)kvs_conf_alloc(c, N * sizeof(*keys));

    for (uint64_t i = 0; i < N; i++) {
        keys[i] = kvs_conf_key(c, 8);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (uint64_t i = 0; i < N; i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    return KVS_PASS;
}

const struct kvs_conf_check KVS_CONF_CHUNKS[] = {
    {"chunks: 0 B to 16 MiB come back as put", check_sizes},
    {"chunks: zeros, text and noise come back", check_contents},
    {"chunks, manifests: empty ones exist", check_empty},
    {"chunks: a duplicate returns 1", check_duplicates},
    {"chunks: a buffered duplicate returns 1", check_duplicate_buffered},
    {"chunks: never change", check_immutable},
    {"chunks: 8- to 32-byte keys coexist", check_key_lengths},
    {"chunks: keys are bytes, not text", check_key_bytes},
    {"chunks: a missing one is an error", check_missing_chunk},
    {"chunks: a handle sees its own puts", check_own_puts},
    {"chunks: 1000 in one save", check_many},
    {"outputs: malloc'd, the caller's own", check_outputs},
    {"inputs: borrowed for the call only", check_inputs},
    {NULL, NULL},
};
