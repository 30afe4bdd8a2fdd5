// SPDX-License-Identifier: Apache-2.0
/*
 * --dynamo: a Dynamo deployment's own discovery (plane/discovery.h) as a source. A worker whose
 * publisher is another one has restarted: the publisher is its incarnation, so no block of the old
 * process stays.
 */
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "indexer/discover/source.h"
#include "plane/discovery.h"

#define LOOK_MS 1000 /* interval at which the discovery's state is read */

static void on_workers(void *arg, const struct kvp_dynamo_worker *workers, size_t n,
                       size_t unreachable)
{
    struct ki_source *source = arg;
    struct ki_found_set set = {0};
    struct kv_error why = {0};
    int rc = 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        struct ki_found found = source->base;

        found.registration.instance = workers[i].worker;
        found.registration.rank = workers[i].rank;
        found.registration.endpoint = workers[i].address;
        found.registration.has_publisher = true;
        found.registration.publisher = found.incarnation = workers[i].publisher;
        rc = ki_found_add(&set, &found, &why);
    }
    if (unreachable)
        ki_found_leave_out(&set, "NATS", "publishers without a ZMQ channel are not followed");
    if (unreachable)
        set.left_out = unreachable;
    if (rc == 0)
        ki_source_publish(source, &set);
    else
        ki_source_failed(source, "%s", why.text);
    ki_found_set_fini(&set);
}

static int open_dynamo(struct ki_source *source, struct kv_error *error)
{
    const struct kvp_discovery_opts opts = {.where = source->where,
                                            .tls_ca = source->options->cacert};
    struct kvp_discovery *discovery = NULL;
    int rc = kvp_discovery_follow(&opts, on_workers, source, &discovery, error);

    source->own = discovery;
    return rc;
}

static void close_dynamo(struct ki_source *source)
{
    kvp_discovery_close(source->own);
}

static void run(struct ki_source *source)
{
    while (!ki_source_is_stopped(source)) {
        struct kvp_discovery_info info;

        ki_source_wait(source, -1, LOOK_MS);
        kvp_discovery_get_info(source->own, &info);
        if (info.current)
            ki_source_confirm(source);
        else
            ki_source_failed(source, "%s", info.error);
    }
}

const struct ki_source_ops ki_source_dynamo = {.scheme = "",
                                               .form = "",
                                               .check = kvp_discovery_check,
                                               .open = open_dynamo,
                                               .run = run,
                                               .close = close_dynamo,
                                               .at_once = true};
