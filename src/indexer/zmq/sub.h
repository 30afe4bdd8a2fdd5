// SPDX-License-Identifier: Apache-2.0
/**
 * A listener's connection to its publisher: a ZMQ SUB socket of our own (zmtp.h) that subscribes to
 * everything, over tcp or ipc.
 *
 *                     connected            handshake done
 *      +--> CONNECTING ---------> SHAKING ----------------> UP
 *      |        | failed, 5 s        | lost, 10 s           | lost
 *      |        v                    v                      v
 *      +----- WAITING <--------------+<---------------------+
 *        after 0.1 s, doubling to 5 s; after a breach of the protocol 1 s, doubling to 30 s
 *
 * A PING goes out every 5 s. A publisher that sends nothing for 10 s after one is frozen, or can't be
 * reached: its connection is lost. Publishers that don't know PING (ZMTP 3.0) show that by answering
 * none; a connection that ended for it is made anew once, and endures silence.
 *
 * Why not libzmq: it hands each message from an I/O thread to ours through queues and wake-ups,
 * which cost more than reading and indexing a small batch. Here the event thread itself reads, up
 * to 64 KiB at a time, and parses messages in place.
 *
 * Memory. Bytes are read into room that all connections of an event thread share. Between turns a
 * connection keeps only the bytes of an incomplete message. One that doesn't fit the room gets
 * memory of its own, at most twice what has come of it. All connections together have a limit; one
 * that needs more is lost, and tries again. A message that takes longer than a minute to come in
 * breaks the protocol, so that a slow publisher doesn't keep others from that memory.
 *
 * Costs one descriptor. Thread-confined. The caller reads in turns:
 *
 *     begin, then next until it has nothing, fill, next ... until fill has nothing, end
 */
#ifndef KV_INDEXER_ZMQ_SUB_H
#define KV_INDEXER_ZMQ_SUB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "indexer/zmq/zmtp.h"

/** Bytes read at once into shared room. */
#define KI_SUB_READ 65536

/** Room for the bytes of one connection at a time. */
struct ki_sub_room {
    uint8_t bytes[2 * KI_SUB_READ];
};

/** Limits of what comes in, shared by all connections. Zero-initialise @used. */
struct ki_sub_limits {
    uint64_t max_message;  /* bytes */
    uint64_t max_bytes;    /* of incomplete messages; at least twice max_message */
    _Atomic uint64_t used; /* relaxed: a bound, which publishes no other data */
};

enum ki_sub_state { KI_SUB_CLOSED, KI_SUB_WAITING, KI_SUB_CONNECTING, KI_SUB_SHAKING, KI_SUB_UP };

struct ki_sub {
    enum ki_sub_state state;
    uint64_t ups;         /* connections made so far; kept when closed and opened again */
    uint64_t reopened;    /* connections made anew after a breach of the protocol */
    const char *problem;  /* NULL: none yet */
    uint64_t deadline_ns; /* time for ki_sub_tick; 0: never */
    bool changed;         /* state, ups or problem: the caller clears it */
    bool bound;           /* the publisher connects: WAITING lasts until ki_sub_take */
    bool broken;          /* WAITING: the publisher broke the protocol */
    bool ended;           /* epoll reported the end of the stream, maybe behind further bytes */
    bool dry;             /* the last read took all there was */

    int fd, epoll_fd;
    uint64_t data; /* for epoll */
    struct ki_sub_limits *limits;
    struct sockaddr_storage address;
    socklen_t address_len;
    uint64_t delay_ns, broken_delay_ns; /* before the next attempt */
    uint64_t give_up_ns;                /* CONNECTING, SHAKING: end of patience */
    uint64_t ping_ns, heard_ns;         /* UP: time of the next PING, and of the last bytes */
    uint64_t pinged_ns; /* UP: time of the oldest PING without bytes since; 0: none */
    uint64_t
        silent_ns; /* time of the PING that was not answered, where that ended the connection */
    bool answers;  /* the publisher has answered a PING, over this connection or before */
    bool deaf;     /* a connection ended without an answer to any PING: none is expected any more */

    struct ki_zmtp zmtp;
    uint8_t *bytes; /* the shared room during a turn, or own */
    size_t start, end, capacity;
    uint8_t *own;
    size_t own_capacity;
    uint64_t large_ns; /* own is large: when it became so, or the last message was complete */
};

/**
 * Begin to connect to @endpoint, tcp with a numeric address or ipc. Readiness is reported on
 * @epoll_fd, edge-triggered, with @data. Returns 0, or -EINVAL for an endpoint of another kind.
 */
int ki_sub_open(struct ki_sub *sub, const char *endpoint, struct ki_sub_limits *limits,
                int epoll_fd, uint64_t data, uint64_t now_ns);
/** Wait for a connection that the publisher makes. */
void ki_sub_await(struct ki_sub *sub, struct ki_sub_limits *limits, int epoll_fd, uint64_t data);
/** Begin with @fd, a connection that a publisher has made. Takes it over. @sub is zeroed. */
void ki_sub_accept(struct ki_sub *sub, int fd, struct ki_sub_limits *limits, int epoll_fd,
                   uint64_t data, uint64_t now_ns);
/**
 * Take the connection of @from, which is UP, with what it has read. @sub awaits one. It still expects
 * no answers to PINGs where an earlier connection ended for want of them.
 */
void ki_sub_take(struct ki_sub *sub, struct ki_sub *from, uint64_t data);
/** Close, and drop what wasn't read. No-op when closed. */
void ki_sub_close(struct ki_sub *sub);
/** Note that epoll has reported the descriptor. @ended: with the end of the stream or an error. */
void ki_sub_ready(struct ki_sub *sub, bool ended);
/** Do what is due: connect, give up, send a PING. */
void ki_sub_tick(struct ki_sub *sub, uint64_t now_ns);

/** Begin a turn of reading, in which @room belongs to @sub. */
void ki_sub_begin(struct ki_sub *sub, struct ki_sub_room *room);
/** End the turn: bytes not yet used are kept. */
void ki_sub_end(struct ki_sub *sub, uint64_t now_ns);
/**
 * Take the next message that has been read. Returns true with *@ret, whose spans are valid until
 * ki_sub_fill or ki_sub_end; false when none is complete, or when the bytes behind it have ended the
 * connection.
 */
bool ki_sub_next(struct ki_sub *sub, struct ki_zmtp_message *ret, uint64_t now_ns);
/**
 * Read more, when ki_sub_next has nothing: drives the connection too. Returns the number of bytes,
 * or 0 when there are none for now: epoll will report more.
 */
size_t ki_sub_fill(struct ki_sub *sub, uint64_t now_ns);

#endif
