// SPDX-License-Identifier: Apache-2.0
/** A server in the place of kv-indexer that answers as its test tells it: right, wrong, late or never. */
#ifndef KV_TEST_PEER_LYING_INDEXER_H
#define KV_TEST_PEER_LYING_INDEXER_H

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/error.h"

enum indexer_lie {
    INDEXER_HONEST, /* says what `answer` says */
    INDEXER_UNKNOWN_MODEL,
    INDEXER_SILENT,
    INDEXER_NOT_HTTP,
    INDEXER_NOT_JSON,
    INDEXER_OTHER_JSON,
    INDEXER_WRONG_TYPES,
    INDEXER_CUT,
    INDEXER_STATUS,
    INDEXER_ENDLESS,
    INDEXER_DRIPS,    /* a byte now and then */
    INDEXER_HANGS_UP, /* without an answer */
    INDEXER_N_LIES
};

struct lying_indexer {
    int listener;
    pthread_t thread;
    char url[64];
    atomic_int lie;
    atomic_bool over;
    atomic_uint n_connections, n_requests;
    pthread_mutex_t lock;
    char answer[2048], request[4096]; /* the last request, with its header */
};

struct lying_connection {
    struct lying_indexer *indexer;
    int fd;
};

static inline bool indexer_send(struct lying_indexer *x, int fd, const char *data, size_t len)
{
    while (len && !atomic_load(&x->over)) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        struct pollfd p = {.fd = fd, .events = POLLOUT};

        if (n < 0 && errno != EAGAIN)
            return false;
        data += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
        if (n < 0)
            (void)poll(&p, 1, 20);
    }
    return len == 0;
}

static inline void indexer_says(struct lying_indexer *x, int fd, const char *status,
                                const char *json)
{
    char head[160];

    snprintf(head, sizeof(head), "HTTP/1.1 %s\r\nContent-Length: %zu\r\n\r\n", status,
             strlen(json));
    (void)(indexer_send(x, fd, head, strlen(head)) && indexer_send(x, fd, json, strlen(json)));
}

/* Answer one request. Returns false when the connection is to be closed. */
static inline bool indexer_answers(struct lying_indexer *x, int fd)
{
    static const char junk[] = "\x00\xff nonsense \r\n\r\n",
                      cut[] = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"instances\":";
    enum indexer_lie lie = (enum indexer_lie)atomic_load(&x->lie);
    char letters[4096];

    memset(letters, '{', sizeof(letters));
    switch (lie) {
    case INDEXER_HONEST:
        pthread_mutex_lock(&x->lock);
        snprintf(letters, sizeof(letters), "%s", x->answer);
        pthread_mutex_unlock(&x->lock);
        indexer_says(x, fd, "200 OK", letters);
        return true;
    case INDEXER_UNKNOWN_MODEL:
        indexer_says(x, fd, "404 Not Found", "{\"error\":\"no indexer for model=m\"}");
        return true;
    case INDEXER_NOT_JSON:
        indexer_says(x, fd, "200 OK", "<html>");
        return true;
    case INDEXER_OTHER_JSON:
        indexer_says(x, fd, "200 OK", "{\"scores\":{}}");
        return true;
    case INDEXER_WRONG_TYPES:
        indexer_says(x, fd, "200 OK", "{\"instances\":{\"7\":{\"longest_matched\":-1}}}");
        return true;
    case INDEXER_STATUS:
        indexer_says(x, fd, "503 No", "{}");
        return true;
    case INDEXER_NOT_HTTP:
        (void)indexer_send(x, fd, junk, sizeof(junk));
        return false;
    case INDEXER_CUT:
        (void)indexer_send(x, fd, cut, strlen(cut));
        return false;
    case INDEXER_ENDLESS:
        (void)indexer_send(x, fd, "HTTP/1.1 200 OK\r\n\r\n", 19);
        while (indexer_send(x, fd, letters, sizeof(letters)))
            ;
        return false;
    case INDEXER_DRIPS:
        (void)indexer_send(x, fd, cut, strlen(cut));
        while (!atomic_load(&x->over) && indexer_send(x, fd, " ", 1))
            usleep(5000);
        return false;
    case INDEXER_SILENT:
        while (!atomic_load(&x->over) && atomic_load(&x->lie) == INDEXER_SILENT)
            usleep(2000);
        return false;
    default:
        return false;
    }
}

/* Read a request. Returns false at the end of the connection. */
static inline bool indexer_hears(struct lying_indexer *x, int fd)
{
    char text[sizeof(x->request)] = "";
    size_t len = 0, body = 0;
    const char *head = NULL, *at;

    while (!head || len < (size_t)(head - text) + body) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t n = 0;

        if (atomic_load(&x->over) || len == sizeof(text) - 1)
            return false;
        if (poll(&p, 1, 20) > 0)
            n = recv(fd, text + len, sizeof(text) - 1 - len, 0);
        if (n < 0 || (p.revents && n == 0))
            return false;
        len += (size_t)n;
        text[len] = '\0';
        head = strstr(text, "\r\n\r\n");
        head = head ? head + 4 : NULL;
        at = strcasestr(text, "content-length:");
        body = at ? strtoul(at + 15, NULL, 10) : 0;
    }
    pthread_mutex_lock(&x->lock);
    memcpy(x->request, text, len + 1);
    pthread_mutex_unlock(&x->lock);
    atomic_fetch_add(&x->n_requests, 1);
    return true;
}

static inline void *indexer_talks(void *arg)
{
    struct lying_connection c = *(struct lying_connection *)arg;

    free(arg);
    while (indexer_hears(c.indexer, c.fd) && indexer_answers(c.indexer, c.fd))
        ;
    close(c.fd);
    atomic_fetch_sub(&c.indexer->n_connections, 1u << 16); /* of those that are open */
    return NULL;
}

static inline void *indexer_runs(void *arg)
{
    struct lying_indexer *x = arg;

    while (!atomic_load(&x->over)) {
        struct pollfd p = {.fd = x->listener, .events = POLLIN};
        struct lying_connection *c;
        pthread_t thread;

        if (poll(&p, 1, 20) <= 0)
            continue;
        c = calloc(1, sizeof(*c));
        c->indexer = x;
        c->fd = accept(x->listener, NULL, NULL);
        atomic_fetch_add(&x->n_connections, (1u << 16) + 1);
        pthread_create(&thread, NULL, indexer_talks, c);
        pthread_detach(thread);
    }
    return NULL;
}

static inline void lying_indexer_init(struct lying_indexer *x)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);

    memset(x, 0, sizeof(*x));
    pthread_mutex_init(&x->lock, NULL);
    x->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(x->listener, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(x->listener, 64), 0);
    assert_int_equal(getsockname(x->listener, (struct sockaddr *)&at, &len), 0);
    snprintf(x->url, sizeof(x->url), "http://127.0.0.1:%u", ntohs(at.sin_port));
    assert_int_equal(pthread_create(&x->thread, NULL, indexer_runs, x), 0);
}

static inline void lying_indexer_fini(struct lying_indexer *x)
{
    atomic_store(&x->over, true);
    pthread_join(x->thread, NULL);
    while (atomic_load(&x->n_connections) >> 16)
        usleep(1000);
    close(x->listener);
    pthread_mutex_destroy(&x->lock);
}

/** Set the answer of INDEXER_HONEST. */
static inline void lying_indexer_set(struct lying_indexer *x, const char *answer)
{
    pthread_mutex_lock(&x->lock);
    snprintf(x->answer, sizeof(x->answer), "%s", answer);
    pthread_mutex_unlock(&x->lock);
}

/** Return how many connections were made so far. */
static inline uint32_t lying_indexer_connections(struct lying_indexer *x)
{
    return atomic_load(&x->n_connections) & 0xffff;
}

#endif
