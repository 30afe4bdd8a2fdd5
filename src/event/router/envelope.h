// SPDX-License-Identifier: Apache-2.0
/**
 * Envelope: what Dynamo's event plane wraps around the events of one publisher.
 *
 *     {"publisher_id": u64, "sequence": u64, "published_at": ms, "topic": "kv-events", "payload": bin}
 *
 * A msgpack map, read with its members in any order. The payload of the topic "kv-events" is an array
 * of RouterEvents (router_msgpack.h). A NATS message is an envelope; a ZMQ message has it in its
 * last frame (wire/frames.h). Source of the format: Dynamo 1.6.1, bytes in tests/event/test_envelope.c.
 */
#ifndef KV_EVENT_ROUTER_ENVELOPE_H
#define KV_EVENT_ROUTER_ENVELOPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/msgpack.h"

#define KVE_ENVELOPE_TOPIC "kv-events"

/** An envelope; topic and payload are valid as long as the bytes it was read from. */
struct kve_envelope {
    uint64_t publisher;    /* identifier of the publisher's process */
    uint64_t sequence;     /* of the message, from 0 */
    uint64_t published_ms; /* milliseconds since the epoch; 0: not told */
    struct kv_str topic;
    struct kv_str payload;
};

/**
 * Read the envelope of exactly @len bytes. Members that aren't known are passed over; the last of
 * several of one name counts. Returns 0 or -EPROTO: no such map, a member of another type, no
 * publisher_id, no payload, bytes behind it.
 */
int kve_envelope_read(const void *data, size_t len, struct kve_envelope *ret);

/** Return true when the first key of the map at @data is one of an envelope: a hint, no proof. */
bool kve_envelope_is_likely(const void *data, size_t len);

/** Append @envelope, byte for byte as Dynamo writes it. Errors stick in @out. */
void kve_envelope_write(struct kv_buf *out, const struct kve_envelope *envelope);

#endif
