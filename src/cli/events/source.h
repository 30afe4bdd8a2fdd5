// SPDX-License-Identifier: Apache-2.0
/**
 * Messages of publishers at a URL, live: over ZMQ one connection to a publisher, or an address to which
 * up to KC_MAX_CONNECTIONS publishers connect; over NATS all that is published on a subject.
 * Thread-confined.
 *
 *     source.c  chooses   source_zmq.c  source_nats.c
 */
#ifndef KV_CLI_EVENTS_SOURCE_H
#define KV_CLI_EVENTS_SOURCE_H

#include <stdbool.h>

#include "base/core/error.h"
#include "cli/events/message.h"
#include "plane/nats.h"
#include "plane/nats_args.h"

#define KC_MAX_CONNECTIONS 64
/** Longest message in bytes; one that is longer ends its connection. */
#define KC_MAX_MESSAGE (64 << 20)

struct kc_source;

/** How far a source has got. */
struct kc_source_state {
    unsigned connected;  /* connections now */
    bool ever;           /* there was a connection */
    bool binds;          /* publishers connect to it */
    bool nats;           /* connected to a server, not to publishers */
    uint64_t missed;     /* NATS: messages that this program was too slow for */
    const char *problem; /* what is in the way, or ended the last connection; NULL: nothing */
};

/** Return true for a URL of a NATS server: nats:// or tls://. */
bool kc_is_nats(const char *url);

/**
 * Begin to follow @url: [bind:]tcp://HOST:PORT[#TOPIC], ipc://PATH, or nats://HOST:PORT[/SUBJECT] with
 * the credentials of @nats. @durable (NULL: plain NATS): a durable consumer, whose messages are taken
 * when kc_source_run's function returns 0 or less. Returns 0; -EINVAL for another form, -ENOTSUP without libkv_nats, or
 * another errno, with @error.
 */
int kc_source_open(const char *url, const struct kvp_nats_args *nats,
                   const struct kvp_nats_durable *durable, struct kc_source **ret,
                   struct kv_error *error);

/**
 * Hand messages to @fn until it returns another value than 0, which is returned; until @deadline_ns, or
 * the first ^C: 0.
 */
int kc_source_run(struct kc_source *source, uint64_t deadline_ns, kc_message_fn fn, void *arg);

void kc_source_state(const struct kc_source *source, struct kc_source_state *ret);
void kc_source_close(struct kc_source *source); /* NULL is a no-op */

#endif
