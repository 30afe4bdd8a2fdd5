// SPDX-License-Identifier: Apache-2.0
/**
 * ZMTP 3, the protocol of ZMQ sockets, as a subscriber speaks it: bytes in, messages out. No I/O.
 *
 *     subscriber (here)                      publisher (PUB or XPUB)
 *     greeting, 64 bytes  ----------------->
 *                         <----------------- greeting: version 3.x, mechanism NULL
 *     READY, Socket-Type=SUB -------------->
 *                         <----------------- READY, Socket-Type=PUB
 *     SUBSCRIBE to all    ----------------->  a message for 3.0, a command since 3.1
 *                         <----------------- messages and PING
 *     PING and PONG       ----------------->
 *
 * A message is a row of frames. Each frame has a byte of flags, its length in 1 or 8 bytes, and its
 * body. Commands have the form of frames, and may come between the frames of a message. The format:
 * RFC 23 (3.0) and RFC 37 (3.1) of ZeroMQ.
 *
 * The caller keeps the bytes of an incomplete message and gives them again, with more behind them.
 * The parser remembers its place in them, so no byte is looked at twice.
 *
 * Not understood: ZMTP 1 and 2 (libzmq before 4.0) and mechanisms other than NULL.
 */
#ifndef KV_INDEXER_ZMQ_ZMTP_H
#define KV_INDEXER_ZMQ_ZMTP_H

#include <stdbool.h>
#include <stdint.h>

#include "event/wire/frames.h"

#define KI_ZMTP_GREETING 64
/** Longest command, in bytes. Longer ones break the protocol. */
#define KI_ZMTP_MAX_COMMAND 8192
/** Bytes that a message may have beside the limit: topic, sequence, headers, commands within it. */
#define KI_ZMTP_SLACK 65536

enum ki_zmtp_state { KI_ZMTP_GREETS, KI_ZMTP_SHAKES, KI_ZMTP_TALKS };

/** Bytes to send; the caller removes what it has sent. */
struct ki_zmtp_out {
    uint8_t bytes[512];
    size_t len;
};

struct ki_zmtp {
    enum ki_zmtp_state state;
    uint64_t max_message; /* bytes */
    uint8_t minor;        /* of the peer's version 3.x */
    bool answers;         /* the peer has answered a PING */
    uint16_t
        peer_ttl_ds; /* tenths of a second after which the peer expects silence to be cut; 0: never */
    struct ki_zmtp_out out;

    /* The message being collected: offsets from its first byte. */
    size_t scanned;  /* bytes of it that were parsed */
    size_t needed;   /* bytes of it that must be there for the next step */
    size_t n_frames; /* may exceed KVE_MAX_FRAMES */
    struct {
        size_t at, len;
    } frames[KVE_MAX_FRAMES];
};

/** A message; the spans point into the caller's bytes. */
struct ki_zmtp_message {
    size_t n_frames; /* more than KVE_MAX_FRAMES: too many, and spans has the first ones */
    struct kve_span spans[KVE_MAX_FRAMES];
};

/** Begin a connection: puts our greeting into zmtp->out. */
void ki_zmtp_init(struct ki_zmtp *zmtp, uint64_t max_message);

/**
 * Parse @data, which begins with the first byte not yet used. *@ret_used: the bytes that the caller
 * must leave out of the next call. Returns
 *   1                  *@ret is a message;
 *   0                  no message is complete, or zmtp->state has changed: call again when there
 *                      are zmtp->needed bytes;
 *   -EPROTO            the peer broke the protocol, or is no publisher;
 *   -EPROTONOSUPPORT   the peer speaks another version, or wants another mechanism;
 *   -EMSGSIZE          a message is larger than the limit.
 * After an error the connection must be closed.
 */
int ki_zmtp_parse(struct ki_zmtp *zmtp, const uint8_t *data, size_t len,
                  struct ki_zmtp_message *ret, size_t *ret_used);

/** Put a PING into zmtp->out, which asks the peer to cut the connection after @ttl_ds of silence. */
void ki_zmtp_ping(struct ki_zmtp *zmtp, uint16_t ttl_ds);

/** Remove @n sent bytes from the front of @out. */
void ki_zmtp_sent(struct ki_zmtp_out *out, size_t n);

#endif
