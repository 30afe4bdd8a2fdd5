// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded first-in first-out queue of fixed-size elements between threads. One mutex; producers
 * never block, consumers may wait with a deadline.
 */
#ifndef KV_BASE_QUEUE_H
#define KV_BASE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_queue;

int kv_queue_create(size_t element_bytes, size_t capacity, struct kv_queue **ret);
void kv_queue_destroy(struct kv_queue *queue); /* drops the contents; NULL is a no-op */

/** Append an element. Returns 0, -EAGAIN when full, -EPIPE when closed. */
int kv_queue_push(struct kv_queue *queue, const void *element);

/**
 * Take up to @max elements. Waits until there is one, until @deadline_ns (monotonic, 0: don't wait)
 * passes (-ETIMEDOUT), or until the queue is closed and empty (-EPIPE). Returns the number taken.
 */
long kv_queue_pop(struct kv_queue *queue, void *elements, size_t max, uint64_t deadline_ns);

/** Refuse further pushes and wake the waiting consumers. */
void kv_queue_close(struct kv_queue *queue);
size_t kv_queue_len(struct kv_queue *queue);

#endif
