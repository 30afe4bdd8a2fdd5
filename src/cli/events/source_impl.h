// SPDX-License-Identifier: Apache-2.0
/** Shared by the files of sources. */
#ifndef KV_CLI_EVENTS_SOURCE_IMPL_H
#define KV_CLI_EVENTS_SOURCE_IMPL_H

#include "cli/events/source.h"

/** Each function does what source.h says of the one of its name. */
struct kc_source_ops {
    int (*run)(struct kc_source *source, uint64_t deadline_ns, kc_message_fn fn, void *arg);
    void (*state)(const struct kc_source *source, struct kc_source_state *ret);
    void (*close)(struct kc_source *source);
};

struct kc_source {
    const struct kc_source_ops *ops;
};

int kc_source_open_zmq(const char *url, struct kc_source **ret, struct kv_error *error);
int kc_source_open_nats(const char *url, const struct kvp_nats_args *nats,
                        const struct kvp_nats_durable *durable, struct kc_source **ret,
                        struct kv_error *error);

#endif
