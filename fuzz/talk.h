// SPDX-License-Identifier: Apache-2.0
/**
 * A server controlled by the fuzzer, for whole conversations of a plugin. The input is a list of
 * pieces, each with a length of two bytes. After each message of the client the next piece is the
 * answer; an empty piece closes the connection. Behind the last piece each answer is `rest`, and
 * then the connection is closed.
 */
#ifndef KV_FUZZ_TALK_H
#define KV_FUZZ_TALK_H

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "require.h"

enum { TALK_CLIENTS = 32 };

struct talk {
    const uint8_t *data;
    size_t len;
    const char *rest;
    int listener, port;
    int clients[TALK_CLIENTS];
    int n_clients;
    _Atomic bool stop;
    pthread_t thread;
};

static inline void talk_send(int fd, const void *data, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = send(fd, (const char *)data + done, len - done, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n <= 0)
            return; /* the client has closed, or doesn't read: don't wait */
        done += (size_t)n;
    }
}

/* Answer a message. Returns true when the connection stays open. */
static inline bool talk_answer(struct talk *t, int fd)
{
    char heard[65536];
    size_t len;

    if (recv(fd, heard, sizeof(heard), MSG_DONTWAIT) <= 0)
        return false;
    if (t->len < 2) {
        talk_send(fd, t->rest, strlen(t->rest));
        return false;
    }
    len = (size_t)t->data[0] | (size_t)t->data[1] << 8;
    t->data += 2;
    t->len -= 2;
    if (len > t->len)
        len = t->len;
    talk_send(fd, t->data, len);
    t->data += len;
    t->len -= len;
    return len > 0;
}

static inline void *talk_run(void *arg)
{
    struct talk *t = arg;

    while (!atomic_load(&t->stop)) {
        struct pollfd polled[TALK_CLIENTS + 1] = {{.fd = t->listener, .events = POLLIN}};
        int n = t->n_clients, kept = 0;

        for (int i = 0; i < n; i++)
            polled[i + 1] = (struct pollfd){.fd = t->clients[i], .events = POLLIN};
        if (poll(polled, (nfds_t)n + 1, 20) <= 0)
            continue;
        for (int i = 0; i < n; i++) {
            if (!polled[i + 1].revents || talk_answer(t, t->clients[i]))
                t->clients[kept++] = t->clients[i];
            else
                close(t->clients[i]);
        }
        t->n_clients = kept;
        if (polled[0].revents) {
            int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);

            if (fd >= 0 && t->n_clients < TALK_CLIENTS)
                t->clients[t->n_clients++] = fd;
            else if (fd >= 0)
                close(fd);
        }
    }
    return NULL;
}

static inline void talk_start(struct talk *t, const uint8_t *data, size_t len, const char *rest)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(at);

    *t = (struct talk){.data = data, .len = len, .rest = rest};
    t->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(bind(t->listener, (struct sockaddr *)&at, sizeof(at)) == 0);
    REQUIRE(listen(t->listener, 64) == 0);
    REQUIRE(getsockname(t->listener, (struct sockaddr *)&at, &size) == 0);
    t->port = ntohs(at.sin_port);
    REQUIRE(pthread_create(&t->thread, NULL, talk_run, t) == 0);
}

static inline void talk_stop(struct talk *t)
{
    atomic_store(&t->stop, true);
    pthread_join(t->thread, NULL);
    for (int i = 0; i < t->n_clients; i++)
        close(t->clients[i]);
    close(t->listener);
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

/** Run one conversation of the plugin. @format makes its URI from the port. */
static inline void talk(const uint8_t *data, size_t size, const char *format, const char *rest)
{
    struct talk t;
    kv_store_v1 *h;
    char uri[256];

    kv_log_set_sink(talk_quiet, NULL);
    talk_start(&t, data, size, rest);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(uri, sizeof(uri), format, t.port);
#pragma GCC diagnostic pop
    h = kv_store_get_vtable()->open(uri);
    if (h) {
        talk_all(kv_store_get_vtable(), kv_store_get_ext(), h);
        kv_store_get_vtable()->close(h);
    }
    talk_stop(&t);
}

#endif
