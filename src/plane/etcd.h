// SPDX-License-Identifier: Apache-2.0
/**
 * A client of etcd: records kept under a lease, and a prefix watched. Directories of agents and
 * Dynamo's discovery use it.
 */
#ifndef KV_PLANE_ETCD_H
#define KV_PLANE_ETCD_H

#include <stdatomic.h>

#include "plane/etcd_wire.h"
#include "plane/http_abi.h"

#define ETCD_MAX_HOSTS 8
#define ETCD_MAX_RECORDS 8

/** Servers of an URL: "etcd://HOST:PORT[,HOST:PORT...][/PATH]", or "etcds:..." for TLS. */
struct kvp_etcd_url {
    char *hosts[ETCD_MAX_HOSTS]; /* "http://HOST:PORT" */
    size_t n_hosts;
    const char *path; /* in the URL: from the first slash on; empty without one */
};
/** Return true for a text that begins as such an URL. */
bool kvp_etcd_url_is(const char *url);
/** Parse. Returns 0; -EINVAL with a phrase in *@why; -ENOMEM. Free with fini, in any case. */
int kvp_etcd_url_parse(const char *url, struct kvp_etcd_url *ret, const char **why);
void kvp_etcd_url_fini(struct kvp_etcd_url *url);

/** A key that exists as long as this client lives. */
struct kvp_etcd_record {
    const char *key;
    const void *value;
    size_t len;
};

/** Everything is borrowed for the run. Callbacks are called by its thread. */
struct kvp_etcd_opts {
    const char *const *hosts; /* [n_hosts], "http://HOST:PORT" or "https:..." */
    size_t n_hosts;
    const char *user, *password;             /* NULL: none */
    const char *tls_ca, *tls_cert, *tls_key; /* PEM files; NULL: none */
    uint32_t ttl_s;                          /* of the lease */
    uint32_t timeout_ms;                     /* of a request; at most a third of ttl_s counts */
    const struct kvbm_http_abi *http;

    const struct kvp_etcd_record *records; /* [n_records], at most ETCD_MAX_RECORDS */
    size_t n_records;
    const char *prefix;        /* of the keys to watch, as etcd_write_range; NULL: none are */
    uint32_t max_keys;         /* asked for at a look */
    size_t max_answer;         /* bytes of an answer */
    struct etcd_limits limits; /* of each key in it */

    const atomic_bool *stop; /* release: set before wake_fd becomes readable */
    int wake_fd;             /* readable: stop; -1: stop is looked at every 50 ms */

    /** A look at all keys begins, or has ended: keys that it hasn't told are gone. NULL without a prefix. */
    void (*look)(void *arg, bool begins);
    /** A key of the prefix, but for the records, has this value, or was deleted. */
    void (*key)(void *arg, struct kv_str key, struct kv_str value, bool deleted);
    /** Return true to look again: a look had left out keys for which there is room now. */
    bool (*wants_look)(void *arg);
    /** Everything told is current, and the records are there; or no server answers for now. */
    void (*state)(void *arg, bool current);
    void (*failed)(void *arg, const char *what, const char *why);
    void *arg;
};

/**
 * Run until *stop, then give back the lease, so that the records vanish. Failures are told, and
 * everything begins anew with the next server.
 */
void kvp_etcd_run(const struct kvp_etcd_opts *opts);

#endif
