// SPDX-License-Identifier: Apache-2.0
/** The socket of a replay, with its options, and whole messages. Thread-confined. */
#ifndef KV_INDEXER_ZMQ_SOCKET_H
#define KV_INDEXER_ZMQ_SOCKET_H

#include <stdbool.h>
#include <stdint.h>
#include <zmq.h>

#include "event/wire/frames.h"

/** A received message; valid until ki_envelope_fini. */
struct ki_envelope {
    zmq_msg_t frames[KVE_MAX_FRAMES];
    struct kve_span spans[KVE_MAX_FRAMES];
    size_t n;
};

/**
 * Make a socket that will connect to @endpoint, and watch its descriptor on @epoll_fd,
 * edge-triggered, with @data. Returns 0 or a negative errno (-EMFILE).
 */
int ki_socket_open(void *zmq, int type, const char *endpoint, int queue, int64_t max_message,
                   int epoll_fd, uint64_t data, void **ret);
/** Connect. Returns 0 or a negative errno (-EINVAL: no address to connect to). */
int ki_socket_connect(void *socket, const char *endpoint);
/** Watch the descriptor of an existing socket. */
int ki_socket_watch(void *socket, int epoll_fd, uint64_t data);
void ki_socket_close(void *socket, int epoll_fd); /* NULL is a no-op */

/**
 * Receive a message. Returns 0, -EAGAIN, -EPROTO (more frames than any message has; drained),
 * another errno.
 */
int ki_socket_receive(void *socket, struct ki_envelope *ret);
void ki_envelope_fini(struct ki_envelope *e);

/** Queue a replay request. */
int ki_socket_request(void *socket, uint64_t start_sequence);

#endif
