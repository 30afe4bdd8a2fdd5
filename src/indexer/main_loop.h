// SPDX-License-Identifier: Apache-2.0
/** The main thread between start and stop: it waits for signals, and returns memory to the system. */
#ifndef KV_INDEXER_MAIN_LOOP_H
#define KV_INDEXER_MAIN_LOOP_H

#include <stdint.h>

#include "base/thread/thread.h"
#include "indexer/service.h"

/** Flags that the signal handlers set. Lock-free atomics, because a handler runs in any thread. */
struct ki_signals {
    _Atomic int stop;    /* number of the signal that ends the service; 0: none */
    _Atomic int reload;  /* SIGHUP came */
    struct kv_wake wake; /* wakes the main thread */
};
extern struct ki_signals ki_signals;

/** Catch the signals of a service. Returns 0 or a negative errno. Close ki_signals.wake at the end. */
int ki_signals_catch(void);

/** Serve until a signal stops the service. Tells systemd when the service is ready, and reloads. */
void ki_main_loop(struct ki_service *service, uint16_t port);

#endif
