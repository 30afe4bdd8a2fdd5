// SPDX-License-Identifier: Apache-2.0
/** Encode events and batches as msgpack, in the encodings that engines publish. */
#ifndef KV_EVENT_WIRE_ENCODE_H
#define KV_EVENT_WIRE_ENCODE_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "kv_event.h"

/** Check the fields of @event against one another. Returns 0 or -EINVAL. */
int kve_event_check(const struct kve_event *event);

/** Append one event. Errors stick in @out. */
void kve_event_encode(struct kv_buf *out, const struct kve_event *event,
                      enum kve_encoding encoding);

/** Most bytes that a batch has before and behind its events. */
#define KVE_BATCH_HEAD 16
#define KVE_BATCH_TAIL 8
size_t kve_batch_head(uint8_t out[KVE_BATCH_HEAD], double timestamp, uint32_t n_events);
size_t kve_batch_tail(uint8_t out[KVE_BATCH_TAIL], uint32_t rank);

#endif
