// SPDX-License-Identifier: Apache-2.0
// Addresses on which an event thread listens for publishers that connect (bind:tcp://*:5557).
//
//     publishers                hub                              listeners
//     PUB kv@a@m ------.     +---------------------------+
//     PUB kv@b@m -------+--> | waiting connections: done | --> #kv@b@m
//     PUB kv@c@m ------'     | with the handshake, topic | --> #kv@a@m
//                            | of the first message known|
//                            +---------------------------+
//
// A connection is given to the listener that follows its topic, together with the bytes that were
// read, once its first message tells the topic. The only listener of an address, if it names no topic,
// gets it after the handshake. While that listener has a connection, further ones wait: the first
// publisher stays until its connection ends.
//
// All functions belong to the event thread; all listeners of an address have the same one.
#ifndef KV_INDEXER_STREAM_HUB_H
#define KV_INDEXER_STREAM_HUB_H

#include <sys/queue.h>

#include "indexer/stream/listener.h"

struct ki_hub;
struct ki_hub_conn;

/** Addresses of one event thread. Initialise with ki_hubs_init. */
struct ki_hubs {
    TAILQ_HEAD(ki_hub_list, ki_hub) all;
    TAILQ_HEAD(ki_hub_gone, ki_hub_conn)
    gone; /* ended in this round of events: freed by ki_hubs_tick */
    int epoll_fd;
    struct ki_sub_room *room;
};

void ki_hubs_init(struct ki_hubs *hubs, int epoll_fd, struct ki_sub_room *room);

/**
 * Listen for @l's publisher; a no-op when it does already. Returns 0; -EADDRINUSE: another listener has
 * the topic, or another program the address; another errno of making the socket.
 */
int ki_hub_join(struct ki_hubs *hubs, struct ki_listener *l);
/** Stop that; the last one closes the address. No-op for a listener that has not joined. */
void ki_hub_leave(struct ki_listener *l);
/** Give @l, which has no connection, one that waits for it. Returns true when there was one. */
bool ki_hub_offer(struct ki_listener *l, uint64_t now_ns);

/**
 * Return true while a connection waits that has told no topic yet and comes from where @l's last
 * publisher did: it may be that one, back and quiet.
 */
bool ki_hub_may_be_back(const struct ki_listener *l);

/** Accept connections: epoll has reported the hub of @data. */
void ki_hub_accept(struct ki_hub *hub, uint64_t now_ns);
/**
 * Read from a waiting connection: epoll has reported it, @ended: with its end. Returns the listener
 * that has got it, or NULL.
 */
struct ki_listener *ki_hub_read(struct ki_hub_conn *conn, bool ended, uint64_t now_ns);

/** Run the timers of waiting connections. Returns the time of the next one; 0: none. */
uint64_t ki_hubs_tick(struct ki_hubs *hubs, uint64_t now_ns);

#endif
