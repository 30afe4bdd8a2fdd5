// SPDX-License-Identifier: Apache-2.0
/**
 * Epoch-based reclamation: readers walk shared memory without locks, writers free it when no reader
 * can still see it.
 *
 * Readers bracket a walk with kv_epoch_enter and kv_epoch_exit (a few nanoseconds; never waits; may
 * be nested). A writer unlinks an object, hands it to its kv_limbo, and the limbo frees it once
 * every reader that was inside at that time has left.
 *
 * Why not liburcu: Debian 12 has 0.13, whose inline assembly barriers thread sanitizer can't see,
 * so that every free would be reported, or nothing. Here all synchronisation is C11 atomics without
 * fences (which sanitizers don't model either); the argument stands in epoch.c.
 *
 * Threads: enter and exit from any thread; a thread registers itself on its first enter and gives
 * its slot back when it ends. A kv_limbo belongs to whoever holds its owner's lock.
 */
#ifndef KV_BASE_EPOCH_H
#define KV_BASE_EPOCH_H

#include <stddef.h>
#include <stdint.h>

/** Begin reading. Returns 0, or -ENOMEM when this thread's first call can't register it. */
int kv_epoch_enter(void);
void kv_epoch_exit(void);

/** The link that a retired object carries, 8 bytes; a kind of 0..7 lies in its low bits. */
struct kv_retired {
    uintptr_t word;
};

typedef void (*kv_retired_free_fn)(void *arg, struct kv_retired *object, unsigned kind);

/** Objects that wait for readers. Intrusive: retiring never allocates and can't fail. */
struct kv_limbo {
    struct kv_limbo_bag {
        uint64_t stamp;
        struct kv_retired *head;
        size_t bytes;
    } bags[3], fresh;
    size_t bytes; /* all bags */
    size_t soft;  /* below it, collecting isn't worth the look at the readers */
    size_t hard;  /* above it, the writer waits for readers: memory stays bounded */
    kv_retired_free_fn free_fn;
    void *arg;
};

void kv_limbo_init(struct kv_limbo *limbo, size_t soft, size_t hard, kv_retired_free_fn free_fn,
                   void *arg);
/** Free everything at once; no reader may be left. */
void kv_limbo_fini(struct kv_limbo *limbo);

/** Take an object that new readers can't reach any more. @bytes is what it weighs against the
 * limits. */
void kv_limbo_retire(struct kv_limbo *limbo, struct kv_retired *object, unsigned kind,
                     size_t bytes);

/**
 * Free what no reader can see. Call it at the end of each write. With @eager, look at the readers
 * even when little is waiting; much (16 times the soft limit) is collected as eagerly. Waits
 * (yielding) only while more than the hard limit is waiting, and never for itself: inside a read
 * section of the calling thread it leaves the rest for a later call.
 */
void kv_limbo_collect(struct kv_limbo *limbo, int eager);

#endif
