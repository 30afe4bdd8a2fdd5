// SPDX-License-Identifier: Apache-2.0
/**
 * A lock in etcd, with a fencing token: one holder at a time among the programs that know its name.
 *
 *     PREFIX/lock           the holder's key, under its lease. Its create revision is the token: later holders have
 *                           greater ones
 *     PREFIX/notes/TOKEN    what a holder is about to do that can't be undone; outlives the holder
 *
 * A holder believes in its lock for the lease's time from the moment at which it asked etcd to keep it alive, by
 * a clock that runs while the machine sleeps. A holder that was frozen finds on waking that it doesn't hold
 * the lock any more. A request that it had begun when it froze may still be under way: so it tells of that in a note
 * before, which etcd takes only from the holder. The next holder reads the notes of those before it.
 *
 * Threads: open and close by the owner; notes by one thread; the token from any.
 */
#ifndef KV_PLANE_ETCD_LOCK_H
#define KV_PLANE_ETCD_LOCK_H

#include "base/core/error.h"
#include "plane/etcd.h"

struct kvp_etcd_lock;

struct kvp_etcd_lock_opts {
    /* etcd://HOST:PORT[,HOST:PORT...][/NAME] or etcds:, and credentials behind a question mark (etcd_auth.h) */
    const char *url;
    const char *prefix; /* of its keys, without a name; 100 bytes at most */
    const char *name;   /* where the URL has none */
    uint32_t ttl_s;     /* of the lease, 2 at least */
};

/**
 * Start to ask for the lock. Returns 0; -EINVAL; -ENOTSUP (no libkvbm_http); -ENOMEM; an
 * error of the password's file; with @error.
 */
int kvp_etcd_lock_open(const struct kvp_etcd_lock_opts *opts, struct kvp_etcd_lock **ret,
                       struct kv_error *error);
/** Give the lock back. NULL is a no-op. */
void kvp_etcd_lock_close(struct kvp_etcd_lock *lock);

/** Return the token while the lock is held, else 0. */
uint64_t kvp_etcd_lock_token(struct kvp_etcd_lock *lock);

/**
 * Note what the holder of @token is about to do; replaces its note. Returns 0; -ESTALE: it doesn't hold the lock any
 * more; -EIO: no server answers, and the note may be there or not.
 */
int kvp_etcd_lock_note(struct kvp_etcd_lock *lock, uint64_t token, const void *data, size_t len);
/** Remove the note of @token, whoever holds the lock. Returns 0 or -EIO. */
int kvp_etcd_lock_unnote(struct kvp_etcd_lock *lock, uint64_t token);

typedef void (*kvp_etcd_note_fn)(void *arg, uint64_t token, const void *data, size_t len);
/** Call @fn for all notes. Returns 0 or -EIO. */
int kvp_etcd_lock_notes(struct kvp_etcd_lock *lock, kvp_etcd_note_fn fn, void *arg);

#endif
