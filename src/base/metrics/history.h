// SPDX-License-Identifier: Apache-2.0
/**
 * The rule for publications that a store's handle remembers: one for all backends.
 *
 * A publication takes every chunk that was put on its handle, by any thread. So a snapshot, or
 * another thread's manifest, may take chunks that a later manifest of unknown format needs:
 *
 *     thread 1   put a                put b     publish M: a, b (and c, which does no harm)
 *     thread 2          put c  publish N: a, c
 *
 * Such a manifest is therefore noted to need the chunks of
 *  - the publications since the same thread's previous manifest of unknown format;
 *  - on a handle that several threads use, the last KV_HISTORY_ANYWAY publications, as a save may
 *    wander between threads.
 *
 * A handle remembers KV_HISTORY_PUBLICATIONS, of KV_HISTORY_BYTES of keys, and always the latest.
 */
#ifndef KV_BASE_HISTORY_H
#define KV_BASE_HISTORY_H

#include <stdbool.h>
#include <stddef.h>

enum { KV_HISTORY_PUBLICATIONS = 256, KV_HISTORY_ANYWAY = 16 };
#define KV_HISTORY_BYTES ((size_t)4 << 20)

/** A walk over the publications of a handle, from the latest one back. */
struct kv_history_walk {
    bool shared; /* several threads use the handle */
    bool met;    /* the walk has passed the thread's previous manifest of unknown format */
    size_t n;    /* publications passed */
};

/**
 * Step to the next older publication. @own_opaque: the calling thread published it, as a manifest
 * of unknown format. Returns whether its chunks count; false ends the walk.
 */
static inline bool kv_history_counts(struct kv_history_walk *walk, bool own_opaque)
{
    walk->n++;
    walk->met |= own_opaque;
    return !walk->met || (walk->shared && walk->n <= KV_HISTORY_ANYWAY);
}

/** Whether the oldest of @n publications with @bytes of keys is forgotten. */
static inline bool kv_history_is_full(size_t n, size_t bytes)
{
    return n > KV_HISTORY_PUBLICATIONS || (n > 1 && bytes > KV_HISTORY_BYTES);
}

#endif
