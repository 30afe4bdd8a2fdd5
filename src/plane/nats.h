// SPDX-License-Identifier: Apache-2.0
/**
 * A client of NATS, over a module that holds all that needs libnats (libkv_nats, opened on first
 * use).
 *
 *   publish ──► queue (bounded) ──► thread ──► libkv_nats ──► server
 *   subscribe ──► list ────────────┘                            │
 *   callback ◄── thread of the subscription (libnats) ◄─────────┘
 *
 * One thread owns the connection. It connects in the background, again and again, and subscribes
 * anew after each loss. While there is no connection, messages wait in the queue. A message that
 * finds the queue full is dropped and counted: publishers never wait for a server.
 *
 * NATS itself delivers at most once. Messages that were on their way when a connection broke are
 * lost, and so are those that a subscriber is too slow for. Number messages, and see gaps. With
 * JetStream (an @id) the thread waits for the server's acknowledgement and repeats the message
 * until there is one, so a message is lost only in the queue.
 *
 * Threads: any function from any thread, unless its comment says otherwise.
 */
#ifndef KV_PLANE_NATS_H
#define KV_PLANE_NATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_plane.h"

struct kvp_nats;
struct kvp_nats_sub;

/** A message. Received ones are valid during the callback. */
struct kvp_nats_msg {
    const char *subject;
    const char *reply; /* subject for answers; NULL: none is wanted */
    const void *data;
    size_t len;
    /* Publishing: name of the message in a JetStream stream, which drops a second message of one
     * name. NULL: plain NATS, no stream needed. Received messages: NULL. */
    const char *id;
    bool nobody; /* received: no answer, since nobody subscribes to the request's subject */
    /* Received from a durable consumer: set *again so that the message comes again. NULL: any other. */
    bool *again;
};

/** Take a message of a subscription, on its thread, one call at a time. */
typedef void (*kvp_nats_fn)(void *arg, const struct kvp_nats_msg *msg);

/** Learn that the connection is there (again), or is gone. On one of the client's threads. */
typedef void (*kvp_nats_state_fn)(void *arg, bool connected);

/**
 * Start a client. Doesn't wait for a server. @state may be NULL.
 * Returns 0; -EINVAL (no url, a URL of another scheme, contradicting credentials; the log says
 * which); -ENOTSUP (no libkv_nats); -ENOMEM; -EAGAIN (no thread).
 */
int kvp_nats_open(const struct kvp_nats_opts *opts, kvp_nats_state_fn state, void *arg,
                  struct kvp_nats **ret);

/**
 * End a client: publish what waits, for at most @timeout_ms, if a server is connected; drop the rest,
 * and free it. Waits besides for the call to the server that is under way, and for the end of the
 * connection: up to the client's timeout_ms each (an attempt to connect: once for each server of the
 * URL). A client that nothing is queued in ends at once, whatever its server does. All subscriptions
 * must be gone. NULL is a no-op. Not from a callback.
 */
void kvp_nats_close(struct kvp_nats *nats, uint32_t timeout_ms);

/**
 * Queue a copy of a message. Never waits. Returns 0; -EAGAIN (the queue is full; counted as
 * dropped); -ENOMEM (counted as dropped); -EINVAL (no subject, or one with spaces or line ends).
 */
int kvp_nats_publish(struct kvp_nats *nats, const struct kvp_nats_msg *msg);

/**
 * Wait until the server has all messages queued before the call, for at most @timeout_ms. Returns 0;
 * -ETIMEDOUT.
 */
int kvp_nats_flush(struct kvp_nats *nats, uint32_t timeout_ms);

/**
 * Subscribe to @subject, which may have wildcards. Messages published behind this call on the same
 * client come after the subscription. @pending_bytes (0: 64 MiB) bounds messages that wait for @fn;
 * more are dropped and counted. What fails on the connection (no memory) is tried again after
 * reconnect_ms, and messages in between are missed. Returns 0; -EINVAL; -ENOMEM.
 */
int kvp_nats_subscribe(struct kvp_nats *nats, const char *subject, size_t pending_bytes,
                       kvp_nats_fn fn, void *arg, struct kvp_nats_sub **ret);

/** A durable consumer of a JetStream stream: the server remembers which messages it has taken. */
struct kvp_nats_durable {
    const char *stream; /* must exist */
    const char *name;   /* of the consumer, which is made if it isn't there; no dots or wildcards */
};

/**
 * Subscribe as a durable consumer: messages of the stream that nobody of this name has taken come first,
 * from the stream's first one on, in order and one at a time. A message is taken when @fn returns without
 * having set msg->again; else it comes again at once. One whose @fn didn't return (the program was killed,
 * the connection broke) comes again after 30 s, so some come twice. One subscriber at a time has
 * the messages; others, and all while there is no such stream, try again every reconnect_ms. Where the
 * consumer goes, with its stream or by itself, the connection is made anew after some 10 s, and the
 * consumer with it. Returns 0; -EINVAL; -ENOMEM.
 */
int kvp_nats_subscribe_durable(struct kvp_nats *nats, const char *subject,
                               const struct kvp_nats_durable *durable, kvp_nats_fn fn, void *arg,
                               struct kvp_nats_sub **ret);

/**
 * End a subscription. @fn doesn't run after the return. Waits for @fn and, as kvp_nats_close does, for
 * the call that is under way. NULL is a no-op. Not from a callback.
 */
void kvp_nats_unsubscribe(struct kvp_nats_sub *sub);

/**
 * Send a request and wait for one answer. The caller frees *@ret. Returns 0; -ETIMEDOUT; -ENOENT
 * (nobody subscribes to @subject); -EAGAIN (queue); -ENOMEM; -EINVAL. Not from a callback.
 */
int kvp_nats_request(struct kvp_nats *nats, const char *subject, const void *data, size_t len,
                     uint32_t timeout_ms, void **ret, size_t *ret_len);

#define KVP_INBOX 40
/** Write a new subject for answers to @ret. Returns 0; -EIO (no random numbers). */
int kvp_nats_inbox(char ret[KVP_INBOX]);

struct kvp_nats_stats {
    bool connected;
    uint64_t published, published_bytes; /* handed to the server; of JetStream: acknowledged */
    uint64_t dropped;                    /* messages that the queue had no room for */
    uint64_t refused; /* messages that the server can't take: too large, bad subjects */
    uint64_t queued_bytes;
    uint64_t received;
    uint64_t missed;      /* received, and dropped since a subscriber was too slow */
    uint64_t connections; /* made so far: more than one after a loss */
    uint64_t max_payload; /* bytes that the server takes in a message; 0: never connected */
    char url[128];        /* of the server, without credentials; "": not connected */
    char error[160];      /* the last failure; "": none */
};
void kvp_nats_get_stats(struct kvp_nats *nats, struct kvp_nats_stats *ret);

#endif
