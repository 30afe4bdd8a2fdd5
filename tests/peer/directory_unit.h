// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of directories: a callback that keeps what it was told as a set, and waits for
 * facts. Sleeps are polls; a fact that doesn't come within a minute fails the test.
 */
#ifndef KV_TEST_PEER_DIRECTORY_UNIT_H
#define KV_TEST_PEER_DIRECTORY_UNIT_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_directory.h"
#include "support.h"

#define SEEN_MAX 64
#define PATIENCE_NS (60 * KV_NS_PER_S)

/** Peers that a directory has told of and not taken back, by name and first endpoint. */
struct seen {
    pthread_mutex_t lock;
    struct kvbm_directory_peer peers[SEEN_MAX];
    size_t n, calls;
};

static inline void seen_init(struct seen *s)
{
    memset(s, 0, sizeof(*s));
    pthread_mutex_init(&s->lock, NULL);
}

static inline bool seen_same(const struct kvbm_directory_peer *a,
                             const struct kvbm_directory_peer *b)
{
    return strcmp(a->name, b->name) == 0 && a->incarnation == b->incarnation &&
           (*a->name || strcmp(a->endpoints[0], b->endpoints[0]) == 0);
}

static inline void seen_changed(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    struct seen *s = arg;
    size_t i = 0;

    pthread_mutex_lock(&s->lock);
    s->calls++;
    while (i < s->n && !seen_same(&s->peers[i], peer))
        i++;
    if (there) {
        if (i < SEEN_MAX)
            s->peers[i] = *peer;
        s->n += i == s->n && i < SEEN_MAX;
    } else if (i < s->n) { /* one that was never told of is none */
        s->peers[i] = s->peers[--s->n];
    } else {
        s->calls += 1000000;
    }
    pthread_mutex_unlock(&s->lock);
}

/** Find a peer by its name or its first endpoint. */
static inline bool seen_find(struct seen *s, const char *what, struct kvbm_directory_peer *ret)
{
    bool found = false;

    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n && !found; i++) {
        found = strcmp(s->peers[i].name, what) == 0 || strcmp(s->peers[i].endpoints[0], what) == 0;
        if (found && ret)
            *ret = s->peers[i];
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

static inline size_t seen_fact(struct seen *s, const size_t *fact)
{
    size_t n;

    pthread_mutex_lock(&s->lock);
    n = *fact;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static inline size_t seen_count(struct seen *s)
{
    return seen_fact(s, &s->n);
}

static inline size_t seen_calls(struct seen *s)
{
    return seen_fact(s, &s->calls);
}

static inline struct kvbm_directory_info info_of(struct kvbm_directory *d)
{
    struct kvbm_directory_info info = KVBM_DIRECTORY_INFO_INIT;

    assert_int_equal(kvbm_directory_get_info(d, &info), 0);
    return info;
}

static inline struct kvbm_directory_peer peer_named(const char *name, uint64_t incarnation)
{
    struct kvbm_directory_peer peer = KVBM_DIRECTORY_PEER_INIT;

    snprintf(peer.name, sizeof(peer.name), "%s", name);
    peer.worker = incarnation + 1;
    peer.incarnation = incarnation;
    peer.n_endpoints = 2;
    snprintf(peer.endpoints[0], sizeof(peer.endpoints[0]), "unix:/run/%s.sock", name);
    snprintf(peer.endpoints[1], sizeof(peer.endpoints[1]), "tcp:10.0.0.1:%u",
             7000 + (unsigned)incarnation);
    return peer;
}

#endif
