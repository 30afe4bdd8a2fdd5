// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_events.h: what comes into and goes out of the tiers, told to whoever wants to know.
 *
 * A registry writes each change into a bounded queue, in the order in which it happened, while it holds its
 * lock; one thread takes them out, in batches by size and time, and hands each batch to every sink: a
 * callback, a ring to poll, the ZMQ publisher of kv_event.h in the format that engines speak (so that
 * kv-indexer follows a block manager).
 *
 * There are two kinds of change, and each carries what consolidates them over tiers: stored in a tier (first:
 * in none before) and removed from a tier (last: now in none). A NULL where there must be something is -EINVAL.
 */
#ifndef KVBM_EVENTS_H
#define KVBM_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_event.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvbm_event_type { KVBM_EVENT_STORED = 1, KVBM_EVENT_REMOVED = 2 };

/** One change. Pointers live during the callback (a ring's: until the next drain). */
struct kvbm_event {
    enum kvbm_event_type type;
    enum kv_tier tier;
    bool first; /* STORED: the key was registered in no tier before */
    bool last;  /* REMOVED: it is in no tier now */
    uint32_t group;
    uint32_t key_len;
    const void *key;
    const void *parent; /* STORED: NULL at a sequence's start */
    uint32_t position;  /* in blocks */
    uint32_t n_tokens;  /* STORED: block_size, or 0 when they weren't given */
    const uint32_t *tokens;
    uint64_t sequence; /* of this manager, from 0, without gaps but for dropped ones */
    uint64_t time_ns;  /* since the epoch, when the registry wrote it */
};

struct kvbm_events;

struct kvbm_events_opts {
    size_t size;
    uint32_t max_batch; /* events; 0: 1024. More than 65536: -EINVAL */
    uint32_t window_us; /* wait so long for a batch to fill; 0: 10,000 */
    uint64_t
        queue_bytes; /* bound on what waits to be taken out; 0: 16 MiB. Beyond: dropped and counted */
};

/** @opts may be NULL. Returns 0, -EINVAL, -ENOMEM or -EAGAIN (no thread). */
KV_API int kvbm_events_create(const struct kvbm_events_opts *opts, struct kvbm_events **ret);
/**
 * Hand out what waits, stop, close the sinks. Returns 0 (also for NULL); -EBUSY while a registry uses it
 * and -EDEADLK from a sink's callback: then nothing is done.
 */
KV_API int kvbm_events_destroy(struct kvbm_events *events);

/** Which changes a sink gets. */
enum kvbm_event_scope {
    KVBM_EVENTS_PER_TIER,    /* all */
    KVBM_EVENTS_CONSOLIDATED /* STORED that are first, REMOVED that are last */
};

/**
 * fn(arg, events, n, lost) gets every batch, on the manager's thread, one at a time. @lost: events dropped
 * right before this batch because the queue was full (those of any scope); told once, and with n = 0 when
 * nothing in the sink's scope came behind them. It may use registries and pools, but neither add nor
 * remove sinks. At most 16 sinks. Returns an id > 0; -EINVAL, -ENOSPC, -ENOMEM, -EDEADLK (from a callback).
 */
typedef void (*kvbm_event_fn)(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost);
KV_API int kvbm_events_add_callback(struct kvbm_events *events, enum kvbm_event_scope scope,
                                    kvbm_event_fn fn, void *arg);

/**
 * A ring of the latest events, at most @bytes of them (0: 1 MiB; an event takes 48 bytes and its tokens), to
 * poll from one thread. It lives until its sink is removed or the manager destroyed.
 */
struct kvbm_event_ring;
KV_API int kvbm_events_add_ring(struct kvbm_events *events, enum kvbm_event_scope scope,
                                uint64_t bytes, struct kvbm_event_ring **ret);
/**
 * Take up to @max events out, oldest first; @lost (may be NULL): how many were overwritten or dropped since
 * the last time (their numbers are missing). Returns how many were taken.
 */
KV_API long kvbm_event_ring_drain(struct kvbm_event_ring *ring, struct kvbm_event *ret, size_t max,
                                  uint64_t *lost);

struct kvbm_zmq_opts {
    size_t size;
    const struct kve_publisher_opts *publisher; /* required; endpoint, replay, topic, rank... */
    enum kvbm_event_scope scope;
    uint32_t block_size;                /* required: tokens per block, as the events say */
    const char *lora_name, *cache_salt; /* UTF-8; NULL: none; of all events */
};
/**
 * Publish in the engines' format. A key of 8 bytes is its number in this machine's order, another one the
 * big-endian number of its (last 8) bytes. Consecutive stored blocks of one chain become one event, as do
 * consecutive removals from one tier. Consolidated events have one medium for all tiers, the device's.
 * Stored blocks of another size than block_size, which their tokens tell, are left out. After a loss (of this
 * manager's queue or of the publisher's) followers are told that the cache was cleared, and see a sequence gap: from
 * then on they know less than there is, not more.
 * @ret (may be NULL) gets the publisher, to ask for its endpoints and numbers: it is the sink's and goes with it.
 * Returns an id as kvbm_events_add_callback, -EINVAL also for names that aren't UTF-8, or an error of
 * kve_publisher_create.
 */
KV_API int kvbm_events_add_zmq(struct kvbm_events *events, const struct kvbm_zmq_opts *opts,
                               struct kve_publisher **ret);

/**
 * Take a sink out; when this returns it isn't running and won't again (so hold no lock that it waits for).
 * Returns 0; -ENOENT: removed before, or never added; -EINVAL: @events is NULL, or @id isn't above 0, as what a failed
 * add returned; -EDEADLK (from a callback).
 */
KV_API int kvbm_events_remove_sink(struct kvbm_events *events, int id);

/**
 * Wait until all that was written before has been handed to every sink. Returns 0, -ETIMEDOUT or -EDEADLK (from
 * a callback).
 */
KV_API int kvbm_events_flush(struct kvbm_events *events, uint32_t timeout_ms);

struct kvbm_events_stats {
    size_t size;               /* the caller's */
    uint64_t written, dropped; /* events; dropped ones were written, too */
    uint64_t batches;          /* handed out */
    uint64_t queued_bytes;     /* waiting to be taken out */
};
/** Returns 0; -EINVAL for a NULL, and for a struct without its size. */
KV_API int kvbm_events_get_stats(struct kvbm_events *events, struct kvbm_events_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
