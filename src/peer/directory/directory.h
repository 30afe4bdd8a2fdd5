// SPDX-License-Identifier: Apache-2.0
/**
 * Internals of directories of agents.
 *
 *   directory.c   options, state, the thread
 *   peer_list.c   the peers that are known, and the calls of the callback
 *   peer_file.c   lists and files
 *   etcd.c        registration and watch, by plane/etcd.h
 *   peer_record.c an agent's record there
 */
#ifndef KVBM_PEER_DIRECTORY_DIRECTORY_H
#define KVBM_PEER_DIRECTORY_DIRECTORY_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/core/buf.h"
#include "base/thread/thread.h"
#include "kvbm_directory.h"
#include "plane/etcd.h"

/* ---- the peers that are known: used by the directory's thread only ---- */

/** Longest key of a peer: its name, its incarnation, an endpoint. */
#define KVBM_MAX_PEER_KEY 127

struct peer_list {
    struct peer_slot **slots; /* [n], sorted by key */
    size_t n, max;
    uint64_t look;     /* number of the last look at all peers */
    bool looking;      /* between its begin and its end */
    size_t n_look;     /* peers that it has brought */
    uint64_t left_out; /* peers beyond max, of this look and since */
    kvbm_directory_fn changed;
    void *arg;
};

void peer_list_init(struct peer_list *list, size_t max, kvbm_directory_fn changed, void *arg);
void peer_list_fini(struct peer_list *list);
/** Begin a look at all peers; those that aren't put before its end are gone. */
void peer_list_begin(struct peer_list *list);
void peer_list_end(struct peer_list *list);
/** Put or replace a peer. Returns 0; -ENOSPC; -ENOMEM. */
int peer_list_put(struct peer_list *list, const char *key, const struct kvbm_directory_peer *peer);
void peer_list_remove(struct peer_list *list, const char *key);

/** Check an endpoint's syntax: unix:/PATH, tcp:HOST:PORT. *@why (may be NULL): a fixed phrase. */
bool peer_endpoint_is_valid(const char *text, const char **why);

/* ---- directories ---- */

enum directory_kind { DIRECTORY_LIST, DIRECTORY_FILE, DIRECTORY_ETCD };

struct kvbm_directory {
    enum directory_kind kind;
    char *where; /* list, or path of the file */
    struct {
        struct kvp_etcd_url url;
        char prefix[ETCD_MAX_PREFIX + 2]; /* with a slash at both ends */
        char *tls_ca, *tls_cert, *tls_key, *user, *password;
        uint32_t ttl_s, timeout_ms;
        const struct kvbm_http_abi *http;
    } etcd;
    uint32_t reread_ms;
    bool has_self;
    struct kvbm_directory_peer self;
    struct peer_list peers;
    pthread_t thread;
    struct kv_wake wake; /* signalled once, to stop */
    atomic_bool stop;
    pthread_mutex_t lock;            /* of info */
    struct kvbm_directory_info info; /* as get_info tells it */
};

/** True on the directory's own thread, which calls `changed` and can't wait for itself. */
bool directory_is_own_thread(const struct kvbm_directory *d);
/** Note and log a failure; the same words again are logged once. */
void directory_failed(struct kvbm_directory *d, const char *what, const char *why);
/** Publish the state. */
void directory_is(struct kvbm_directory *d, bool current, bool registered, uint64_t left_out);

/** Threads of the three kinds: run until d->stop. */
void peer_file_run(struct kvbm_directory *d);
void etcd_run(struct kvbm_directory *d);

/** Read a file of at most @max bytes. Returns 0 or an error. */
int peer_file_read(const char *path, size_t max, struct kv_buf *ret);

#endif
