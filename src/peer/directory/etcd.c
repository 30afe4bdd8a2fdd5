// SPDX-License-Identifier: Apache-2.0
/* A directory in etcd (plane/etcd.h): this agent's record, and the peers of the prefix. */
#include "plane/etcd.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/error.h"
#include "peer/directory/directory.h"
#include "peer/directory/peer_record.h"

struct etcd {
    struct kvbm_directory *d;
    uint64_t left_out; /* records that make no sense */
};

static void on_look(void *arg, bool begins)
{
    struct etcd *e = arg;

    if (!begins) {
        peer_list_end(&e->d->peers);
        return;
    }
    e->left_out = 0;
    peer_list_begin(&e->d->peers);
}

static void on_peer(void *arg, const char *key, const struct kvbm_directory_peer *peer,
                    bool deleted)
{
    struct etcd *e = arg;

    if (peer) {
        (void)peer_list_put(&e->d->peers, key, peer); /* counts those that don't fit */
        return;
    }
    e->left_out += !deleted;
    peer_list_remove(&e->d->peers, key);
}

static void on_key(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    struct etcd *e = arg;

    if (etcd_tell_peer(e->d->etcd.prefix, key, value, deleted, on_peer, e) < 0)
        e->left_out++;
}

/* Peers were left out for want of room, and others have gone since. */
static bool has_room(void *arg)
{
    const struct etcd *e = arg;

    return e->d->peers.left_out && e->d->peers.n < e->d->peers.max;
}

static void on_state(void *arg, bool current)
{
    struct etcd *e = arg;

    directory_is(e->d, current, current && e->d->has_self, e->d->peers.left_out + e->left_out);
}

static void on_failed(void *arg, const char *what, const char *why)
{
    struct etcd *e = arg;

    directory_failed(e->d, what, why);
}

/* The longest key that a server may answer with. */
#define MAX_KEY (ETCD_MAX_PREFIX + KVBM_MAX_PEER_KEY + 2)

static int write_self(const struct kvbm_directory *d, char key[MAX_KEY + 1], struct kv_buf *value,
                      struct kvp_etcd_record *ret)
{
    char name[KVBM_MAX_PEER_KEY + 1];

    etcd_key(&d->self, name);
    snprintf(key, MAX_KEY + 1, "%s%s", d->etcd.prefix, name);
    etcd_write_peer(value, &d->self);
    *ret = (struct kvp_etcd_record){key, value->data, value->len};
    return value->error;
}

void etcd_run(struct kvbm_directory *d)
{
    struct etcd e = {.d = d};
    struct kv_buf value = KV_BUF_INIT;
    struct kvp_etcd_record self;
    char key[MAX_KEY + 1];
    struct kvp_etcd_opts opts = {
        .hosts = (const char *const *)d->etcd.url.hosts,
        .n_hosts = d->etcd.url.n_hosts,
        .user = d->etcd.user,
        .password = d->etcd.password,
        .tls_ca = d->etcd.tls_ca,
        .tls_cert = d->etcd.tls_cert,
        .tls_key = d->etcd.tls_key,
        .ttl_s = d->etcd.ttl_s,
        .timeout_ms = d->etcd.timeout_ms,
        .http = d->etcd.http,
        .records = &self,
        .n_records = d->has_self,
        .prefix = d->etcd.prefix,
        .max_keys = (uint32_t)d->peers.max + 1,
        .max_answer = (size_t)d->peers.max * (2 * ETCD_MAX_VALUE) + 65536,
        .limits = {MAX_KEY, ETCD_MAX_VALUE},
        .stop = &d->stop,
        .wake_fd = d->wake.fd,
        .look = on_look,
        .key = on_key,
        .wants_look = has_room,
        .state = on_state,
        .failed = on_failed,
        .arg = &e,
    };

    if (d->has_self && write_self(d, key, &value, &self) < 0)
        directory_failed(d, "registration", "no memory");
    else
        kvp_etcd_run(&opts);
    kv_buf_fini(&value);
}
