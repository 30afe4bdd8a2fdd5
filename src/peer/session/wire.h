// SPDX-License-Identifier: Apache-2.0
/**
 * Frames of a session, and the messages by which it begins (docs/formats.md, "Sessions").
 *
 *   opener                                     listener
 *   HELLO: who, nonce ───────────────────────►
 *                    ◄───────────────────────  CHALLENGE: version, nonce
 *   PROOF: MAC by the token ─────────────────►
 *                    ◄───────────────────────  WELCOME: who, session id, MAC by the token
 *   READY ───────────────────────────────────►            (either side: REFUSE with a reason)
 */
#ifndef KVBM_PEER_SESSION_WIRE_H
#define KVBM_PEER_SESSION_WIRE_H

#include "base/core/buf.h"
#include "peer/session/session.h"

#define KVBM_FRAME_BYTES 40
#define KVBM_CHUNK_BYTES (256u << 10) /* body of one frame of a reply */
#define KVBM_WIRE_VERSION 1
#define KVBM_NONCE_BYTES 32
#define KVBM_MAC_BYTES 32
#define KVBM_JOIN_BYTES 16
#define KVBM_MAX_HELLO_BYTES 1024 /* bodies before a session is open */
#define KVBM_MAX_REASON 200
#define KVBM_MAX_REPLY_TOTAL (UINT64_C(4) << 30)

/** Types below KVBM_FIRST_SERVICE. The numbers are stable (wire). */
enum kvbm_frame_type {
    KVBM_HELLO = 1,
    KVBM_CHALLENGE = 2,
    KVBM_PROOF = 3,
    KVBM_WELCOME = 4,
    KVBM_READY = 5,
    KVBM_REFUSE = 6,
    KVBM_PING = 7,
    KVBM_PONG = 8,
    KVBM_CANCEL = 9, /* of request id: the asker has given it up */
    KVBM_SET = 10,   /* a serialised block set */
    KVBM_SET_GONE = 11,
    KVBM_SETS_TOLD = 12 /* all sets that were exported when the session began have been sent */
};

enum {
    KVBM_FRAME_REPLY = 1, /* else a request, or with id 0 a note */
    KVBM_FRAME_FD = 2,    /* a descriptor came along */
    KVBM_FRAME_CUT = 4,   /* the last frame of a reply whose other chunks won't come */
    KVBM_FRAME_FLAGS = 7
};

/** Header of a frame. A reply of several frames divides @total into chunks. */
struct kvbm_frame {
    uint16_t type, flags;
    uint64_t id;
    int32_t status;
    uint32_t len; /* of the body behind this header */
    uint64_t total, offset;
};

void kvbm_frame_write(const struct kvbm_frame *frame, uint8_t to[KVBM_FRAME_BYTES]);

/**
 * Parse a header. Returns 0, or -EPROTO: another magic, unknown flags, contradictions between the
 * fields, a body beyond the limit of its type.
 */
int kvbm_frame_parse(const uint8_t from[KVBM_FRAME_BYTES], struct kvbm_frame *ret);

/** Properties that two agents compare; body of HELLO and, with a MAC behind it, of WELCOME. */
struct kvbm_hello {
    uint16_t oldest, newest; /* versions of the protocol that the sender speaks */
    bool has_token;
    uint8_t nonce[KVBM_NONCE_BYTES];
    uint8_t join[KVBM_JOIN_BYTES]; /* HELLO: session of a data connection; zeros: a new one */
    struct kvbm_identity who;
    uint32_t key_len;
    uint32_t max_requests;             /* that the sender lets the peer have open */
    uint32_t layers, outer, page_size; /* of blocks; 0: any */
    char fingerprint[KVBM_MAX_FINGERPRINT + 1];
};

/** Append a hello. Errors stick to @to. */
void kvbm_hello_write(const struct kvbm_hello *hello, struct kv_buf *to);

/** Parse a hello that fills @len bytes. Returns 0 or -EPROTO. */
int kvbm_hello_parse(const void *from, size_t len, struct kvbm_hello *ret);

/** Body of CHALLENGE. */
struct kvbm_challenge {
    uint16_t version;
    bool has_token;
    uint8_t nonce[KVBM_NONCE_BYTES];
};
#define KVBM_CHALLENGE_BYTES 40

void kvbm_challenge_write(const struct kvbm_challenge *challenge, uint8_t to[KVBM_CHALLENGE_BYTES]);
int kvbm_challenge_parse(const void *from, size_t len, struct kvbm_challenge *ret);

#endif
