// SPDX-License-Identifier: Apache-2.0
/**
 * The last batches of a publisher, for replay. Sequence numbers ascend but may have holes. Payloads
 * are ZMQ messages shared with the sockets that send them, so each batch is in memory once.
 */
#ifndef KV_EVENT_PUBLISHER_RING_H
#define KV_EVENT_PUBLISHER_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

struct kve_ring_batch {
    uint64_t sequence;
    zmq_msg_t payload;
};

struct kve_ring {
    struct kve_ring_batch *slots;
    size_t capacity; /* in batches */
    size_t first, n;
    size_t bytes, max_bytes;
};

int kve_ring_init(struct kve_ring *ring, size_t max_batches, size_t max_bytes);
void kve_ring_fini(struct kve_ring *ring);

/**
 * Keep another reference to @payload under @sequence, which exceeds all earlier ones. Drops the
 * oldest batch when full.
 */
void kve_ring_push(struct kve_ring *ring, uint64_t sequence, zmq_msg_t *payload);

/** Return the oldest kept batch with a sequence of at least @sequence, or NULL. */
struct kve_ring_batch *kve_ring_at_least(struct kve_ring *ring, uint64_t sequence);

#endif
