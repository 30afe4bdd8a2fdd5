// SPDX-License-Identifier: Apache-2.0
/**
 * Cut a buffer, check that the chunks are the object, and count the chunks that it shares with
 * another.
 */
#ifndef TESTS_STORE_CUTTING_H
#define TESTS_STORE_CUTTING_H

#include <stdio.h>

#include "index/random.h"
#include "store/object/cut.h"

struct reading {
    const uint8_t *data;
    size_t len, at;
    struct rng *rng; /* reads of random lengths; NULL: as much as asked for */
    size_t fail_at;  /* -EIO when reading beyond; 0: never */
};

static inline int64_t read_some(void *arg, void *buf, size_t cap)
{
    struct reading *r = arg;
    size_t n = KV_MIN(cap, r->len - r->at);

    if (n && r->rng)
        n = 1 + rng_below(r->rng, (uint32_t)KV_MIN(n, (size_t)100000));
    if (r->fail_at && r->at + n > r->fail_at)
        return -EIO;
    if (n)
        memcpy(buf, r->data + r->at, n);
    r->at += n;
    return (int64_t)n;
}

struct cutting {
    struct kvs_manifest manifest; /* chunks and weaves */
    enum kvs_format format;
    uint64_t parsed; /* bytes cut as a state */
    size_t window;   /* most memory the window took */
    size_t longest;
};

static inline void cutting_drop(struct cutting *c)
{
    free(c->manifest.chunks);
    free(c->manifest.weaves);
}

/* Put the woven regions of @all, the chunks one after the other, as the object has them. */
static inline void unweave(const struct kvs_manifest *m, uint8_t *all)
{
    for (size_t i = 0; i < m->n_weaves; i++) {
        const struct kvs_weave *w = &m->weaves[i];
        size_t len = kvs_weave_region(w);

        for (uint32_t j = 0; j < w->n; j++) {
            uint8_t *plain = malloc(len);

            kvs_weave_out_of(w, all + w->offset + j * len, plain);
            memcpy(all + w->offset + j * len, plain, len);
            free(plain);
        }
    }
}

/* Returns whether the chunks are the object again. */
static inline bool cut_all(const uint8_t *data, size_t len, const struct kvs_save_opts *opts,
                           struct rng *rng, struct cutting *ret)
{
    struct reading reading = {.data = data, .len = len, .rng = rng};
    uint8_t *all = malloc(len + 1), key[16];
    struct kvs_cutter cutter;
    const uint8_t *chunk;
    size_t at = 0, n;
    bool good = true;
    int rc;

    memset(ret, 0, sizeof(*ret));
    good = kvs_cutter_init(&cutter, opts, read_some, &reading) == 0;
    while (good && (rc = kvs_cutter_next(&cutter, &ret->manifest, &chunk, &n)) != 0) {
        good = rc == 1 && n > 0 && n <= len - at;
        if (!good)
            break;
        memcpy(all + at, chunk, n);
        at += n;
        kvs_chunk_key(chunk, n, key);
        good = kvs_manifest_add(&ret->manifest, key, (uint32_t)n) == 0;
        ret->window = KV_MAX(ret->window, cutter.source.capacity + cutter.woven_capacity);
        ret->longest = KV_MAX(ret->longest, n);
    }
    ret->format = cutter.format;
    ret->parsed = cutter.parsed;
    kvs_cutter_fini(&cutter);
    unweave(&ret->manifest, all);
    good = good && at == len && (!len || memcmp(all, data, len) == 0);
    free(all);
    return good;
}

static inline int by_key(const void *a, const void *b)
{
    return memcmp(a, b, 16);
}

/* Bytes of @b's chunks that aren't among @a's. */
static inline uint64_t new_bytes(const struct cutting *a, const struct cutting *b)
{
    size_t n = a->manifest.n_chunks;
    struct kvs_chunk_ref *sorted = calloc(n + 1, sizeof(*sorted));
    uint64_t bytes = 0;

    if (n)
        memcpy(sorted, a->manifest.chunks, n * sizeof(*sorted));
    qsort(sorted, n, sizeof(*sorted), by_key);
    for (size_t i = 0; i < b->manifest.n_chunks; i++)
        if (!bsearch(&b->manifest.chunks[i], sorted, n, sizeof(*sorted), by_key))
            bytes += b->manifest.chunks[i].len;
    free(sorted);
    return bytes;
}

#endif
