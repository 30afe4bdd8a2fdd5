// SPDX-License-Identifier: Apache-2.0
/**
 * Queue of changes, as the registry writes it. Between begin and end the queue belongs to the
 * calling thread. Never waits for sinks.
 */
#ifndef KVBM_BM_EVENTS_H
#define KVBM_BM_EVENTS_H

#include "kvbm_events.h"

void kvbm_events_begin(struct kvbm_events *events);
/** Copied; dropped and counted when the queue is full. sequence and time_ns are filled in. */
void kvbm_events_put(struct kvbm_events *events, const struct kvbm_event *event);
void kvbm_events_end(struct kvbm_events *events);

/** A registry begins or ends to use it: it isn't destroyed meanwhile. */
void kvbm_events_use(struct kvbm_events *events, bool use);

/**
 * A sink of the library's own: close(@arg) is called once, when it is removed or the manager goes.
 */
int kvbm_events_add_sink(struct kvbm_events *events, enum kvbm_event_scope scope, kvbm_event_fn fn,
                         void (*close)(void *arg), void *arg);

#endif
