// SPDX-License-Identifier: Apache-2.0
/**
 * A server controlled by the fuzzer, for whole conversations of a plugin. The input is a list of
 * pieces, each with a length of two bytes. After each message of the client the next piece is the
 * answer; an empty piece closes the connection. Behind the last piece each answer is `rest`, and
 * then the connection is closed.
 *
 * The server is in the fuzzer's process. A fuzzer takes the place of the functions by which its plugin
 * reaches a network. The monotonic clock jumps where the plugin would wait.
 */
#ifndef KV_FUZZ_TALK_H
#define KV_FUZZ_TALK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "require.h"

struct talk {
    const uint8_t *data;
    size_t len;
    const char *rest;
};

static struct talk talk_server;
static _Atomic uint64_t talk_skipped_ns; /* of waits that did not happen */

/** Take the next answer. Returns false when the server closes the connection behind it. */
static inline bool talk_next(const uint8_t **ret, size_t *ret_len)
{
    struct talk *t = &talk_server;

    if (t->len < 2) {
        *ret = (const uint8_t *)t->rest;
        *ret_len = strlen(t->rest);
        return false;
    }
    *ret_len = (size_t)t->data[0] | (size_t)t->data[1] << 8;
    t->data += 2;
    t->len -= 2;
    if (*ret_len > t->len)
        *ret_len = t->len;
    *ret = t->data;
    t->data += *ret_len;
    t->len -= *ret_len;
    return *ret_len > 0;
}

/* -- the clock (linked with --wrap) ------------------------------------------------------------ */

int __real_clock_gettime(clockid_t id, struct timespec *ret);
int __wrap_clock_gettime(clockid_t id, struct timespec *ret);
int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left);

int __wrap_clock_gettime(clockid_t id, struct timespec *ret)
{
    int rc = __real_clock_gettime(id, ret);

    if (rc == 0 && id == CLOCK_MONOTONIC)
        *ret = kv_timespec(kv_timespec_ns(ret) + atomic_load(&talk_skipped_ns));
    return rc;
}

int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left)
{
    (void)left;
    atomic_fetch_add(&talk_skipped_ns, kv_timespec_ns(wanted));
    return 0;
}

/* -- the client's calls ------------------------------------------------------------------------ */

static inline void talk_quiet(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level, (void)line, (void)len;
}

static inline int talk_each(void *arg, const kv_store_entry *entry)
{
    size_t *n = arg;

    REQUIRE(entry->name || (entry->hash && entry->hash_len));
    if (entry->name)
        REQUIRE(strlen(entry->name) > 0);
    return ++*n > 100; /* stop an endless listing */
}

static inline int talk_live(void *arg, const uint8_t *hash, size_t len)
{
    (void)arg;
    REQUIRE(hash && len);
    return 0;
}

/* Check a result: an errno or success; returned memory can be read and freed. */
static inline void talk_take(int rc, uint8_t *data, size_t len)
{
    static volatile uint8_t sum;

    REQUIRE(rc <= 0 && rc > -4096);
    for (size_t i = 0; rc == 0 && i < len; i++)
        sum = (uint8_t)(sum ^ data[i]);
    (void)sum;
    if (rc == 0)
        free(data);
}

static inline void talk_all(const kv_store_vtable *vt, const kv_store_ext *ext, kv_store_v1 *h)
{
    static const uint8_t bytes[300] = "bytes", keys[32] = "key of sixteen.1key of sixteen.2";
    const uint8_t *values[2] = {bytes, bytes};
    kv_store_stats stats = {.size = sizeof(stats)};
    kv_store_swept swept = {.size = sizeof(swept)};
    uint8_t *data = NULL, *many[2], present[2];
    size_t len = 0, lens[2] = {300, 20}, n = 0;
    int rc;

    rc = vt->put_chunk(h, keys, 16, bytes, sizeof(bytes));
    REQUIRE(rc <= 1 && rc > -4096);
    rc = vt->get_chunk(h, keys + 16, 16, &data, &len);
    talk_take(rc, data, len);
    rc = vt->put_manifest(h, "name", bytes, 20);
    REQUIRE(rc <= 0 && rc > -4096);
    rc = vt->get_manifest(h, "name", &data, &len);
    talk_take(rc, data, len);
    (void)ext->put_chunks(h, keys, 16, 2, values, lens, NULL);
    (void)ext->exists_chunks(h, keys, 16, 2, present);
    rc = ext->get_chunks(h, keys, 16, 2, many, lens);
    for (int i = 0; i < 2 && rc >= 0; i++)
        talk_take(many[i] ? 0 : -1, many[i], lens[i]);
    (void)ext->list_manifests(h, talk_each, &n);
    (void)ext->list_chunks(h, talk_each, &n);
    (void)ext->list_refs(h, "name", talk_each, &n);
    (void)ext->touch_chunks(h, keys, 16, 2);
    (void)ext->sweep_chunks(h, 10, talk_live, NULL, &swept);
    (void)ext->delete_chunk(h, keys, 16);
    (void)vt->delete_manifest(h, "name");
    (void)ext->stats(h, &stats);
}

const kv_store_vtable *kv_store_get_vtable(void);
const kv_store_ext *kv_store_get_ext(void);

/** Run one conversation of the plugin, opened as @uri. */
static inline void talk(const uint8_t *data, size_t size, const char *uri, const char *rest)
{
    kv_store_v1 *h;

    kv_log_set_sink(talk_quiet, NULL);
    talk_server = (struct talk){data, size, rest};
    h = kv_store_get_vtable()->open(uri);
    if (h) {
        talk_all(kv_store_get_vtable(), kv_store_get_ext(), h);
        kv_store_get_vtable()->close(h);
    }
}

#endif
