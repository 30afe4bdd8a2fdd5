// SPDX-License-Identifier: Apache-2.0
/**
 * Queue of events, for the registry. Between begin and end the queue belongs to the calling thread.
 * Never waits for sinks.
 */
#ifndef KVBM_BM_EVENTS_EVENTS_H
#define KVBM_BM_EVENTS_EVENTS_H

#include "kvbm_events.h"

void kvbm_events_begin(struct kvbm_events *events);
/**
 * Append a copy of @event; sequence and time_ns are filled in. When the queue is full the event is
 * dropped and counted.
 */
void kvbm_events_put(struct kvbm_events *events, const struct kvbm_event *event);
void kvbm_events_end(struct kvbm_events *events);

/** Count a registry as user, or end that: a manager in use isn't destroyed. */
void kvbm_events_use(struct kvbm_events *events, bool use);

/**
 * Add a sink of the library: close(@arg) is called once, when the sink is removed or the manager is
 * destroyed.
 */
int kvbm_events_add_sink(struct kvbm_events *events, enum kvbm_event_scope scope, kvbm_event_fn fn,
                         void (*close)(void *arg), void *arg);

/** Return a key as the ZMQ sink names its block: a number, of long keys that of the last 8 bytes. */
uint64_t kvbm_event_hash(const void *key, uint32_t len);

#endif
