// SPDX-License-Identifier: Apache-2.0
/* Helpers that the parts of store_bench share: data, time, and medians of interleaved rounds. */
#ifndef KV_BENCH_STORE_MEASURE_H
#define KV_BENCH_STORE_MEASURE_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "kv_store.h"
#include "support.h"

enum { ROUNDS = 9, FILE_ROUNDS = 15, KEY = 16 };

/* Chunks that differ from each other and between rounds, and don't compress. */
struct load {
    size_t n, len;
    uint8_t *data; /* n * len */
    uint8_t *keys; /* n * KEY */
    uint64_t round;
};

static inline uint64_t load_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline void load_init(struct load *load, size_t n, size_t len)
{
    uint64_t state = n * 31 + len;

    *load = (struct load){.n = n, .len = len, .data = malloc(n * len), .keys = malloc(n * KEY)};
    if (!load->data || !load->keys)
        bench_die("memory", -ENOMEM);
    for (size_t at = 0; at + 8 <= n * len; at += 8) {
        state += UINT64_C(0x9e3779b97f4a7c15);
        *(uint64_t *)(load->data + at) = load_mix(state);
    }
}

/* Make new keys, and new bytes in each page: nothing of an earlier round matches. */
static inline void load_next(struct load *load)
{
    load->round++;
    for (size_t at = 0; at < load->n * load->len; at += 4096)
        memcpy(load->data + at, &load->round, sizeof(load->round));
    for (size_t i = 0; i < load->n * KEY / 8; i++)
        ((uint64_t *)load->keys)[i] = load_mix((load->round << 32) + i + load->len);
}

static inline void load_fini(struct load *load)
{
    free(load->data);
    free(load->keys);
}

/* Put all chunks and a manifest. Returns nanoseconds; counts hits. */
static inline double load_save(struct kvs_store *store, const struct load *load, size_t *ret_hits)
{
    uint64_t begin = kv_now_ns();
    int rc;

    *ret_hits = 0;
    for (size_t i = 0; i < load->n; i++) {
        rc = kvs_put_chunk(store, load->keys + i * KEY, KEY, load->data + i * load->len, load->len);
        if (rc < 0)
            bench_die("put", rc);
        *ret_hits += rc == 1;
    }
    rc = kvs_put_manifest(store, "bench", load->keys, load->n * KEY);
    if (rc < 0)
        bench_die("put_manifest", rc);
    return (double)(kv_now_ns() - begin);
}

/* Prefetch and get all chunks. @whole: compare all bytes, else both ends of each. */
static inline void load_get_all(struct kvs_store *store, const struct load *load, bool whole)
{
    size_t some = whole || load->len < 64 ? load->len : 64;

    (void)kvs_prefetch(store, load->keys, KEY, load->n);
    for (size_t i = 0; i < load->n; i++) {
        const uint8_t *want = load->data + i * load->len;
        void *got;
        size_t len;
        int rc = kvs_get_chunk(store, load->keys + i * KEY, KEY, &got, &len);

        if (rc < 0)
            bench_die("get", rc);
        if (len != load->len || memcmp(got, want, some) != 0 ||
            memcmp((uint8_t *)got + len - some, want + len - some, some) != 0)
            bench_die("wrong bytes", -EBADMSG);
        free(got);
    }
}

/* Time a restore in nanoseconds. Compare all bytes by a second pass (load_get_all): comparing
 * between the gets would give a store that reads ahead uncounted time. */
static inline double load_restore(struct kvs_store *store, const struct load *load)
{
    uint64_t begin = kv_now_ns();

    load_get_all(store, load, false);
    return (double)(kv_now_ns() - begin);
}

#endif
