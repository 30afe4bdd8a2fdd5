// SPDX-License-Identifier: Apache-2.0
/**
 * The connection behind a SUB socket, as libzmq's monitor reports it: whether it is up, and whether
 * libzmq still retries.
 *
 *                 handshake done                       lost
 *       CONNECTING --------------> UP ------------------------------> LOST
 *         |  ^  ^                                                       |
 *         +--+  +------------------- a retry is reported ---------------+
 *        failed, tries again                                            |
 *                                       no report for some time         v
 *               (the socket must be closed and opened anew) <--------- dead
 *
 * libzmq stops retrying, without a report, when its peer breaks the protocol: by a message over the
 * limit, or by not speaking ZMTP at all.
 *
 * Costs two descriptors and 17 KiB. Thread-confined.
 */
#ifndef KV_INDEXER_LINK_H
#define KV_INDEXER_LINK_H

#include <stdbool.h>
#include <stdint.h>

enum ki_link_state { KI_LINK_CONNECTING, KI_LINK_UP, KI_LINK_LOST };

struct ki_link {
    void *monitor; /* NULL: closed */
    enum ki_link_state state;
    uint64_t ups;        /* connections made so far; kept when the socket is made anew */
    bool tried;          /* an attempt to connect reached the network */
    const char *problem; /* NULL: none yet */
    uint64_t dead_at_ns; /* LOST: dead at this time without a further report */
    /* Delay until then; grows with each death, kept when the socket is made anew. */
    uint64_t delay_ns;
};

/**
 * Watch @socket, which isn't connected yet. Events arrive on @epoll_fd, edge-triggered, with @data.
 * Returns 0 or a negative errno.
 */
int ki_link_open(struct ki_link *link, void *zmq, void *socket, int epoll_fd, uint64_t data);
/** Stop watching, before @socket itself is closed. No-op when closed. */
void ki_link_close(struct ki_link *link, void *socket, int epoll_fd);

/** Read the waiting events. Returns true when state, problem or ups have changed. */
bool ki_link_read(struct ki_link *link, uint64_t now_ns);
bool ki_link_is_dead(const struct ki_link *link, uint64_t now_ns);
/** Note that a link is dead. Its socket will be made anew, after a longer delay each time. */
void ki_link_back_off(struct ki_link *link);
/**
 * Note that a link has brought a message: it works. Returns true when its state or problem have
 * changed.
 */
bool ki_link_is_well(struct ki_link *link, uint64_t now_ns);

#endif
