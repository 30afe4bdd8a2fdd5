// SPDX-License-Identifier: Apache-2.0
#include "event/frames.h"

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
    return 0;
}

int kve_message_parse_live(const struct kve_span *frames, size_t n, struct kve_message *ret)
{
    struct kve_message message;

    if (n != 3 || parse_tail(frames, n, &message) < 0)
        return -EPROTO;
    message.topic = frames[0];
    *ret = message;
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
