// SPDX-License-Identifier: Apache-2.0
/**
 * Queue of events, for the registry. Between begin and end the queue belongs to the calling thread.
 * Never waits for sinks.
 */
#ifndef KVBM_BM_EVENTS_EVENTS_H
#define KVBM_BM_EVENTS_EVENTS_H

#include <sys/queue.h>

#include "kvbm_events.h"
#include "kvbm_pool.h"

void kvbm_events_begin(struct kvbm_events *events);
/**
 * Append a copy of @event; sequence and time_ns are filled in. When the queue is full the event is
 * dropped and counted.
 */
void kvbm_events_put(struct kvbm_events *events, const struct kvbm_event *event);
void kvbm_events_end(struct kvbm_events *events);

#define KVBM_WALK 1024 /* blocks that a registry visits under its lock at a time, at most */

/** Block of a registry, in the tiers of a mask. */
struct kvbm_walked {
    uint8_t key[KVBM_MAX_KEY], parent[KVBM_MAX_KEY];
    uint32_t key_len, group, position;
    uint8_t tiers;
    bool has_parent;
};

/** A registry as the events' manager sees it. */
struct kvbm_event_source {
    /**
     * Copy up to KVBM_WALK blocks from place *@at on (0: the first), and move *@at behind them. Takes
     * the registry's lock. Returns the number of blocks; *@at 0: that was the end.
     */
    size_t (*walk)(struct kvbm_event_source *source, uint32_t *at, struct kvbm_walked *ret);
    LIST_ENTRY(kvbm_event_source) list; /* the manager's */
};

/** Count a registry as user: a manager in use isn't destroyed. */
void kvbm_events_use(struct kvbm_events *events, struct kvbm_event_source *source);
/** End that, behind walks that are under way. The registry is still whole. */
void kvbm_events_leave(struct kvbm_events *events, struct kvbm_event_source *source);

/** Return how many events of blocks with a parent the queue holds, by their keys' length and tokens. */
uint64_t kvbm_events_capacity(const struct kvbm_events *events, uint32_t key_len,
                              uint32_t n_tokens);

/**
 * Hand all blocks of all registries to @fn, at most KVBM_WALK a call, without locks of registries.
 * Each block is as it was at a moment between the call and the return. @fn returns false to end the
 * walk. Returns false when it did; also -ENOMEM counts as that.
 */
bool kvbm_events_walk(struct kvbm_events *events,
                      bool (*fn)(void *arg, const struct kvbm_walked *blocks, size_t n), void *arg);

/** Calls of a sink of the library, on the manager's thread but for close. fn is required. */
struct kvbm_sink_ops {
    kvbm_event_fn fn;
    bool again; /* fn also gets stored changes that are told again, with their tokens */
    /**
     * Do what is due; @now: also what may wait longer. Returns the time (kv_now_ns) of the next call
     * at the latest, UINT64_MAX: none.
     */
    uint64_t (*tick)(void *arg, bool now);
    /** Called once, when the sink is removed or the manager is destroyed. */
    void (*close)(void *arg);
};

/** Add a sink of the library. */
int kvbm_events_add_sink(struct kvbm_events *events, enum kvbm_event_scope scope,
                         const struct kvbm_sink_ops *ops, void *arg);

/** Tell whether @b may continue the published event of @a: the next block of a stored chain, or another
 * removal from the same tier. */
bool kvbm_event_follows(const struct kvbm_event *a, const struct kvbm_event *b);

#endif
