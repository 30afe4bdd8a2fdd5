// SPDX-License-Identifier: Apache-2.0
/**
 * Event threads. Each owns some listeners. It opens their sockets, waits on all of them at once
 * with epoll, and lets those with messages take turns of bounded length. No turn waits.
 *
 * Listeners' descriptors are watched edge-triggered, which those of libzmq are by nature (readable
 * once, when a queue stops being empty). A listener stays in the ready list until its sockets are
 * empty. The wake-up and the addresses of hubs are level-triggered: what a round leaves is reported
 * again.
 */
#ifndef KV_INDEXER_STREAM_PUMP_H
#define KV_INDEXER_STREAM_PUMP_H

#include <stdint.h>

#include "base/thread/thread.h"
#include "indexer/stream/listener.h"

/**
 * Data of an epoll event: the listener and one of its sockets (the pointer's lowest bits are free).
 */
#define KI_PUMP_SUB(listener) ((uint64_t)(uintptr_t)(listener))
#define KI_PUMP_DEALER(listener) ((uint64_t)(uintptr_t)(listener) | 1)
/** The same of an address that is listened on, and of a connection that waits there (hub.h). */
#define KI_PUMP_HUB(hub) ((uint64_t)(uintptr_t)(hub) | 2)
#define KI_PUMP_HUB_CONN(conn) ((uint64_t)(uintptr_t)(conn) | 3)

/**
 * Start a thread named @name. It signals @drained, unless NULL, when it has read a burst of some
 * MiB.
 */
int ki_pump_create(const char *name, struct kv_wake *drained, struct ki_pump **ret);
/** Stop and join the thread; close and release its listeners. NULL is a no-op. */
void ki_pump_destroy(struct ki_pump *pump);

/** Hand a listener over, with a reference. The pump releases it when it is retired and woken. */
void ki_pump_add(struct ki_pump *pump, struct ki_listener *l);
/** Check all listeners again: one was paused or retired, or recovery has ended. */
void ki_pump_wake(struct ki_pump *pump);
/* Listeners handed over and not yet released. */
uint32_t ki_pump_load(const struct ki_pump *pump);

#endif
