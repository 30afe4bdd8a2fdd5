// SPDX-License-Identifier: Apache-2.0
#include "event/wire/frames.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

void kve_sequence_put(uint8_t bytes[KVE_SEQUENCE_BYTES], uint64_t sequence)
{
    uint64_t be = htobe64(sequence);

    memcpy(bytes, &be, sizeof(be));
}

uint64_t kve_sequence_get(const uint8_t bytes[KVE_SEQUENCE_BYTES])
{
    uint64_t be;

    memcpy(&be, bytes, sizeof(be));
    return be64toh(be);
}

/* Read sequence and payload, the last two frames of every form. */
static int parse_tail(const struct kve_span *frames, size_t n, struct kve_message *ret)
{
    if (frames[n - 2].len != KVE_SEQUENCE_BYTES)
        return -EPROTO;
    ret->sequence = kve_sequence_get(frames[n - 2].data);
    ret->payload = frames[n - 1];
    ret->is_end = false;
    ret->has_publisher = false;
    ret->publisher = 0;
    return 0;
}

#define DIRECT_VERSION 1

void kve_direct_head_put(uint8_t bytes[KVE_DIRECT_HEAD], size_t len)
{
    uint32_t be = htobe32((uint32_t)len);

    bytes[0] = DIRECT_VERSION;
    memcpy(bytes + 1, &be, sizeof(be));
}

/* Read what Dynamo adds: the publisher, and a head in the last frame. */
static int parse_direct(const struct kve_span *frames, struct kve_message *ret)
{
    const uint8_t *bytes = frames[3].data;
    uint32_t be;

    if (frames[1].len != sizeof(ret->publisher) || frames[3].len < KVE_DIRECT_HEAD ||
        bytes[0] != DIRECT_VERSION)
        return -EPROTO;
    memcpy(&be, bytes + 1, sizeof(be));
    if (be32toh(be) != frames[3].len - KVE_DIRECT_HEAD)
        return -EPROTO;
    ret->has_publisher = true;
    ret->publisher = kve_sequence_get(frames[1].data);
    ret->payload = (struct kve_span){bytes + KVE_DIRECT_HEAD, frames[3].len - KVE_DIRECT_HEAD};
    return 0;
}

int kve_message_parse_live(const struct kve_span *frames, size_t n, struct kve_message *ret)
{
    struct kve_message message;

    if ((n != 3 && n != 4) || parse_tail(frames, n, &message) < 0)
        return -EPROTO;
    if (n == 4 && parse_direct(frames, &message) < 0)
        return -EPROTO;
    message.topic = frames[0];
    *ret = message;
    return 0;
}

/* Return true for the first byte of an array, a map, or bytes that hold one. */
static bool may_be_batch(const struct kve_span *frame)
{
    uint8_t first = frame->len ? *(const uint8_t *)frame->data : 0xc0;

    return (first >= 0x80 && first < 0xa0) || (first >= 0xc4 && first <= 0xc6) ||
           (first >= 0xdc && first <= 0xdf);
}

/* A topic of eight bytes is a word; no publisher has sent 2^48 batches. */
static bool is_sequence(const struct kve_span *frame)
{
    return frame->len == KVE_SEQUENCE_BYTES && kve_sequence_get(frame->data) >> 48 == 0;
}

int kve_message_parse_short(const struct kve_span *frames, size_t n, struct kve_message *ret,
                            bool *ret_numbered)
{
    bool numbered = n == 2 && is_sequence(&frames[0]);

    if (n < 1 || n > 2 || !may_be_batch(&frames[n - 1]))
        return -EPROTO;
    *ret = (struct kve_message){.payload = frames[n - 1]};
    if (numbered)
        ret->sequence = kve_sequence_get(frames[0].data);
    else if (n == 2)
        ret->topic = frames[0];
    *ret_numbered = numbered;
    return 0;
}

int kve_message_parse_replay(const struct kve_span *frames, size_t n, struct kve_message *ret)
{
    struct kve_message message = {0};

    if (n < 2 || n > 4 || parse_tail(frames, n, &message) < 0)
        return -EPROTO;
    /*
     * Delimiter and topic precede them, or one of the two. A single empty frame may be either: the
     * result is the same.
     */
    if (n == 4 && frames[0].len)
        return -EPROTO;
    if (n >= 3)
        message.topic = frames[n - 3];
    if (message.sequence == KVE_END_SEQUENCE) {
        if (message.payload.len)
            return -EPROTO;
        message.is_end = true;
    }
    *ret = message;
    return 0;
}

void kve_replay_request_init(struct kve_replay_request *request, uint64_t start_sequence)
{
    kve_sequence_put(request->bytes, start_sequence);
    request->frames[0] = (struct kve_span){"", 0};
    request->frames[1] = (struct kve_span){request->bytes, sizeof(request->bytes)};
}
