// SPDX-License-Identifier: Apache-2.0
/*
 * --dynamo: a Dynamo deployment's own discovery (plane/discovery/discovery.h) as a source. A worker whose
 * publisher is another one has restarted: the publisher is its incarnation, so no block of the old
 * process stays. Publishers without a ZMQ channel are followed on NATS (dynamo_nats.h), if a server is
 * given.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "indexer/discover/reconcile.h"
#include "plane/etcd_auth.h"

#define LOOK_MS 1000 /* interval at which the discovery's state is read */
#define NATS_MS 100  /* the same with NATS: of ticks, too */

struct dynamo {
    char *where; /* without credentials; they point behind it */
    struct kvp_etcd_auth auth;
    char subject[KVP_DYNAMO_SUBJECT];
    struct kvp_discovery *discovery;
    struct ki_dynamo_nats *nats; /* NULL: not given */
};

/* Split the text of --dynamo. A folder's name may have a question mark. */
static int read_where(struct dynamo *dynamo, const char *where, struct kv_error *error)
{
    dynamo->where = strdup(where);
    if (!dynamo->where)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    if (strncmp(where, "file:", strlen("file:")) == 0)
        return 0;
    return kvp_etcd_auth_cut(dynamo->where, &dynamo->auth, error);
}

int ki_dynamo_check(const char *where, struct kv_error *error)
{
    struct dynamo dynamo = {.where = NULL};
    int rc = read_where(&dynamo, where, error);

    if (rc == 0)
        rc = kvp_discovery_check(dynamo.where, error);
    free(dynamo.where);
    return rc;
}

static void on_workers(void *arg, const struct kvp_dynamo_worker *workers, size_t n,
                       size_t unreachable)
{
    struct ki_source *source = arg;
    struct dynamo *dynamo = source->own;
    struct ki_found_set set = {0};
    struct kv_error why = {0};
    int rc = dynamo->nats ? ki_dynamo_nats_set(dynamo->nats, workers, n) : 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        struct ki_found found = source->base;

        found.registration.instance = workers[i].worker;
        found.registration.rank = workers[i].rank;
        found.registration.endpoint = workers[i].address ? workers[i].address : dynamo->subject;
        found.registration.fed = !workers[i].address;
        found.registration.has_publisher = true;
        found.registration.publisher = found.incarnation = workers[i].publisher;
        rc = ki_found_add(&set, &found, &why);
    }
    if (unreachable && dynamo->nats)
        ki_found_leave_out(&set, "channels", "records that their owners no longer keep");
    else if (unreachable)
        ki_found_leave_out(&set, "NATS",
                           "publishers without a ZMQ channel are followed with --dynamo-nats");
    if (unreachable)
        set.left_out = unreachable;
    if (rc == 0)
        ki_source_publish(source, &set);
    else
        ki_source_failed(source, "%s", *why.text ? why.text : "out of memory");
    ki_found_set_fini(&set);
}

static int open_nats(struct ki_source *source, struct dynamo *dynamo, struct kv_error *error)
{
    const struct ki_dynamo_nats_opts opts = {
        .url = source->options.dynamo_nats,
        .subject = dynamo->subject,
        .args = &source->options.nats_args,
        .registry = source->of->registry,
    };

    return opts.url ? ki_dynamo_nats_open(&opts, &dynamo->nats, error) : 0;
}

static int open_dynamo(struct ki_source *source, struct kv_error *error)
{
    struct dynamo *dynamo = calloc(1, sizeof(*dynamo));
    struct kvp_discovery_opts opts = {.nats = source->options.dynamo_nats != NULL};
    int rc;

    if (!dynamo)
        return -ENOMEM;
    source->own = dynamo;
    rc = read_where(dynamo, source->where, error);
    if (rc == 0)
        rc = kvp_etcd_auth_open(&dynamo->auth, error);
    if (rc == 0)
        rc = kvp_discovery_subject(dynamo->where, dynamo->subject);
    if (rc == 0)
        rc = open_nats(source, dynamo, error);
    if (rc < 0)
        return rc;
    opts.where = dynamo->where;
    opts.user = dynamo->auth.user;
    opts.password = dynamo->auth.user ? dynamo->auth.password : NULL;
    opts.tls_ca = dynamo->auth.ca ? dynamo->auth.ca : source->options.cacert;
    opts.tls_cert = dynamo->auth.cert;
    opts.tls_key = dynamo->auth.key;
    return kvp_discovery_follow(&opts, on_workers, source, &dynamo->discovery, error);
}

static void close_dynamo(struct ki_source *source)
{
    struct dynamo *dynamo = source->own;

    if (!dynamo)
        return;
    kvp_discovery_close(dynamo->discovery);
    ki_dynamo_nats_close(dynamo->nats);
    kvp_etcd_auth_fini(&dynamo->auth);
    free(dynamo->where);
    free(dynamo);
}

static bool nats_stats(const struct ki_source *source, struct ki_dynamo_nats_stats *ret)
{
    const struct dynamo *dynamo = source->own;

    if (dynamo->nats)
        ki_dynamo_nats_get_stats(dynamo->nats, ret);
    return dynamo->nats != NULL;
}

static void run(struct ki_source *source)
{
    struct dynamo *dynamo = source->own;
    uint64_t look_ns = 0;

    while (!ki_source_is_stopped(source)) {
        struct kvp_discovery_info info;

        ki_source_wait(source, -1, dynamo->nats ? NATS_MS : LOOK_MS);
        if (dynamo->nats)
            ki_dynamo_nats_tick(dynamo->nats);
        if (kv_now_ns() < look_ns)
            continue;
        look_ns = kv_now_ns() + LOOK_MS * KV_NS_PER_MS;
        kvp_discovery_get_info(dynamo->discovery, &info);
        if (info.current)
            ki_source_confirm(source);
        else
            ki_source_failed(source, "%s", info.error);
    }
}

const struct ki_source_ops ki_source_dynamo = {.scheme = "",
                                               .form = "",
                                               .check = ki_dynamo_check,
                                               .open = open_dynamo,
                                               .run = run,
                                               .close = close_dynamo,
                                               .nats_stats = nats_stats,
                                               .at_once = true};
