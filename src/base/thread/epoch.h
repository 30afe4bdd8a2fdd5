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

/** Link in a retired object, 8 bytes. The low bits hold a kind of 0..7. */
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
    size_t bytes; /* bytes in all bags */
    size_t soft;  /* below this many bytes kv_limbo_collect does nothing */
    size_t hard;  /* above this many bytes the writer waits for readers: memory stays bounded */
    kv_retired_free_fn free_fn;
    void *arg;
};

void kv_limbo_init(struct kv_limbo *limbo, size_t soft, size_t hard, kv_retired_free_fn free_fn,
                   void *arg);
/** Free all objects at once. No reader may be left. */
void kv_limbo_fini(struct kv_limbo *limbo);

/** Take an object that new readers can't reach any more. @bytes counts against the limits. */
void kv_limbo_retire(struct kv_limbo *limbo, struct kv_retired *object, unsigned kind,
                     size_t bytes);

/**
 * Free the objects that no reader can see. Call it at the end of each write. @eager looks at the
 * readers even when little is waiting; 16 times the soft limit has the same effect. Waits
 * (yielding) only while more than the hard limit is waiting. Inside a read section of the calling
 * thread, leaves the rest for a later call.
 */
void kv_limbo_collect(struct kv_limbo *limbo, int eager);

#endif
