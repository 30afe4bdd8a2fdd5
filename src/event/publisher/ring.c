// SPDX-License-Identifier: Apache-2.0
#include "event/publisher/ring.h"

#include <errno.h>
#include <stdlib.h>

int kve_ring_init(struct kve_ring *ring, size_t max_batches, size_t max_bytes)
{
    *ring = (struct kve_ring){.capacity = max_batches, .max_bytes = max_bytes};
    ring->slots = calloc(max_batches, sizeof(*ring->slots));
    return ring->slots ? 0 : -ENOMEM;
}

static struct kve_ring_batch *slot(const struct kve_ring *ring, size_t i)
{
    size_t at = ring->first + i;

    return &ring->slots[at < ring->capacity ? at : at - ring->capacity];
}

static void drop_oldest(struct kve_ring *ring)
{
    struct kve_ring_batch *batch = slot(ring, 0);

    ring->bytes -= zmq_msg_size(&batch->payload);
    zmq_msg_close(&batch->payload);
    ring->first = ring->first + 1 == ring->capacity ? 0 : ring->first + 1;
    ring->n--;
}

void kve_ring_fini(struct kve_ring *ring)
{
    while (ring->n)
        drop_oldest(ring);
    free(ring->slots);
    ring->slots = NULL;
}

void kve_ring_push(struct kve_ring *ring, uint64_t sequence, zmq_msg_t *payload)
{
    size_t len = zmq_msg_size(payload);
    struct kve_ring_batch *batch;

    while (ring->n && (ring->n == ring->capacity || ring->bytes + len > ring->max_bytes))
        drop_oldest(ring);
    batch = slot(ring, ring->n);
    batch->sequence = sequence;
    zmq_msg_init(&batch->payload);
    if (zmq_msg_copy(&batch->payload, payload) < 0)
        return;
    ring->bytes += len;
    ring->n++;
}

struct kve_ring_batch *kve_ring_at_least(struct kve_ring *ring, uint64_t sequence)
{
    size_t low = 0, high = ring->n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (slot(ring, middle)->sequence < sequence)
            low = middle + 1;
        else
            high = middle;
    }
    return low < ring->n ? slot(ring, low) : NULL;
}
