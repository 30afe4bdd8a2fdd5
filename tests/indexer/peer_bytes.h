// SPDX-License-Identifier: Apache-2.0
/** Bytes of a ZMTP publisher, written by hand: for tests of the parser and of the connection. */
#ifndef KV_TESTS_INDEXER_PEER_BYTES_H
#define KV_TESTS_INDEXER_PEER_BYTES_H

#include <endian.h>

#include "base/core/buf.h"

enum { PEER_MORE = 1, PEER_LONG = 2, PEER_COMMAND = 4 };

static inline void put_greeting(struct kv_buf *out, uint8_t major, uint8_t minor,
                                const char *mechanism)
{
    uint8_t bytes[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, major, minor};

    memcpy(bytes + 12, mechanism, strlen(mechanism));
    kv_buf_append(out, bytes, sizeof(bytes));
}

/* @flags: PEER_LONG for a length of 8 bytes, which a longer body gets anyway. */
static inline void put_frame_bytes(struct kv_buf *out, uint8_t flags, const void *body, size_t len)
{
    uint64_t be = htobe64(len);
    uint8_t head[2] = {(uint8_t)(len > 255 ? flags | PEER_LONG : flags), (uint8_t)len};

    if (head[0] & PEER_LONG) {
        kv_buf_append(out, head, 1);
        kv_buf_append(out, &be, sizeof(be));
    } else {
        kv_buf_append(out, head, sizeof(head));
    }
    kv_buf_append(out, body, len);
}

static inline void put_ready(struct kv_buf *out, const char *socket_type)
{
    uint8_t body[64] = "\5READY\13Socket-Type";
    size_t len = strlen(socket_type);

    body[21] = (uint8_t)len;
    memcpy(body + 22, socket_type, len);
    put_frame_bytes(out, PEER_COMMAND, body, 22 + len);
}

/* A batch as engines send it. */
static inline void put_batch(struct kv_buf *out, const char *topic, uint64_t sequence,
                             const void *payload, size_t len)
{
    uint64_t be = htobe64(sequence);

    put_frame_bytes(out, PEER_MORE, topic, strlen(topic));
    put_frame_bytes(out, PEER_MORE, &be, sizeof(be));
    put_frame_bytes(out, 0, payload, len);
}

#endif
