// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <string.h>

#include "cli/events/source_impl.h"

static bool begins_with(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

bool kc_is_nats(const char *url)
{
    return begins_with(url, "nats://") || begins_with(url, "tls://");
}

int kc_source_open(const char *url, const struct kvp_nats_args *nats,
                   const struct kvp_nats_durable *durable, struct kc_source **ret,
                   struct kv_error *error)
{
    if (kc_is_nats(url))
        return kc_source_open_nats(url, nats, durable, ret, error);
    if (durable)
        return kv_fail(error, -EINVAL, 0,
                       "a durable consumer is one of NATS: nats://HOST:PORT/SUBJECT");
    return kc_source_open_zmq(url, ret, error);
}

int kc_source_run(struct kc_source *source, uint64_t deadline_ns, kc_message_fn fn, void *arg)
{
    return source->ops->run(source, deadline_ns, fn, arg);
}

void kc_source_state(const struct kc_source *source, struct kc_source_state *ret)
{
    source->ops->state(source, ret);
}

void kc_source_close(struct kc_source *source)
{
    if (source)
        source->ops->close(source);
}
