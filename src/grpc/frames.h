// SPDX-License-Identifier: Apache-2.0
/** Messages out of the bytes of a gRPC stream: a flag, the length, the message; cut anywhere. */
#ifndef KV_GRPC_FRAMES_H
#define KV_GRPC_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

#define KG_HEAD 5 /* bytes before a message */

struct kg_frames {
    size_t max;       /* bytes of a message */
    size_t head_have; /* 0..KG_HEAD; KG_HEAD: the message's bytes are next */
    uint8_t head[KG_HEAD];
    size_t want;        /* bytes of the message, once the head is complete */
    struct kv_buf body; /* bytes of a message that is incomplete */
};

/** Receive a message. Returns false to take no more of them. */
typedef bool (*kg_frame_fn)(void *arg, const void *data, size_t len);

/**
 * Take @len bytes and call @fn for each message that they complete. Returns 0; -EMSGSIZE: a message
 * is longer than max; -EPROTO: the flag isn't 0; -ENOMEM.
 */
int kg_frames_feed(struct kg_frames *frames, const void *data, size_t len, kg_frame_fn fn,
                   void *arg);

/** Return true between two messages. */
static inline bool kg_frames_whole(const struct kg_frames *frames)
{
    return frames->head_have == 0;
}

/** Write the head of a message of @len bytes. */
void kg_frame_head(uint8_t *ret, uint32_t len);

#endif
