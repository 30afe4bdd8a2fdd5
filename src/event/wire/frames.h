// SPDX-License-Identifier: Apache-2.0
/**
 * Parse and build the frames around a batch, as subscribers and replay clients see them.
 *
 *     live (SUB)        [topic] [sequence: 8 bytes, big-endian] [payload: msgpack]
 *                       [payload], [topic] [payload]         publishers that don't number
 *                       [topic] [publisher: 8 bytes] [sequence] [01, length: 4 bytes, payload]
 *                                                            Dynamo's event plane, direct
 *     replay request    [""] [start sequence: 8 bytes]                     (DEALER to ROUTER)
 *     replay reply      [""] [sequence] [payload]            SGLang, vLLM before 0.26
 *                       [""] [topic] [sequence] [payload]    vLLM from 0.26, TensorRT-LLM
 *     end of a replay   the same with sequence ff ff ff ff ff ff ff ff and an empty payload
 *
 * The parser tells both replies apart by position from the end, never by content. No function here
 * does I/O: a message is an array of spans, which the caller collects from its socket.
 */
#ifndef KV_EVENT_WIRE_FRAMES_H
#define KV_EVENT_WIRE_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** One frame of a message; the bytes belong to the caller. */
struct kve_span {
    const void *data;
    size_t len;
};

/**
 * More frames than any valid message has. Collect this many, and drain the rest of a longer
 * message.
 */
#define KVE_MAX_FRAMES 8

/** Sequence number of the end marker. */
#define KVE_END_SEQUENCE UINT64_MAX
#define KVE_SEQUENCE_BYTES 8

/** A parsed message; points into the frames. */
struct kve_message {
    struct kve_span topic; /* empty when there is none */
    uint64_t sequence;
    struct kve_span payload;
    bool is_end;        /* the end marker of a replay */
    bool has_publisher; /* the message names its publisher */
    uint64_t publisher;
};

/** Bytes before the payload in the last frame of Dynamo's messages. */
#define KVE_DIRECT_HEAD 5

/** Write those bytes for a payload of @len bytes, less than 4 GiB. */
void kve_direct_head_put(uint8_t bytes[KVE_DIRECT_HEAD], size_t len);

/**
 * Parse a live message of 3 frames, or of Dynamo's 4. Returns 0 or -EPROTO (frame count, width of the
 * numbers; of Dynamo's last frame, its version or length).
 */
int kve_message_parse_live(const struct kve_span *frames, size_t n, struct kve_message *ret);

/**
 * Parse a live message without a topic or a number: [sequence] [payload], or with @ret_numbered false
 * [topic] [payload] or [payload], whose sequence is 0. Returns 0, or -EPROTO for another count, or
 * where the last frame can't be a batch.
 */
int kve_message_parse_short(const struct kve_span *frames, size_t n, struct kve_message *ret,
                            bool *ret_numbered);

/**
 * Parse a replay reply of either form, with or without the empty delimiter in front. Returns 0 or
 * -EPROTO, also for sequence ff..ff with a payload, which no publisher reaches.
 */
int kve_message_parse_replay(const struct kve_span *frames, size_t n, struct kve_message *ret);

/** Write or read a sequence number as it is sent. */
void kve_sequence_put(uint8_t bytes[KVE_SEQUENCE_BYTES], uint64_t sequence);
uint64_t kve_sequence_get(const uint8_t bytes[KVE_SEQUENCE_BYTES]);

/** A replay request: the frames that a DEALER sends, in order. */
struct kve_replay_request {
    uint8_t bytes[KVE_SEQUENCE_BYTES];
    struct kve_span frames[2];
};
void kve_replay_request_init(struct kve_replay_request *request, uint64_t start_sequence);

#endif
