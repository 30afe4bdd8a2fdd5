// SPDX-License-Identifier: Apache-2.0
/**
 * The one of several advisors that may move blobs, by a lock in etcd (plane/etcd_lock.h).
 *
 *     frozen ──── removes a batch ──┊ frozen ┊── wakes: no lock, so it stops; one removal was under way
 *                 noted in etcd                    │
 *     next                          takes the lock, reads the note, leaves these blobs alone
 *
 * Before a batch of removals the holder notes their keys. One removal at most is under way when a holder
 * freezes, as it asks before each whether it has the lock. The next holder neither moves nor deletes a blob
 * of a note of those before it, so that the copies which such a late removal needs stay. A note goes when its
 * writer has woken, or after a day.
 *
 * Threads: the mover's, but for open, close and kva_leader_is.
 */
#ifndef KV_ADVISOR_LEADER_H
#define KV_ADVISOR_LEADER_H

#include "advisor/index/block.h"
#include "plane/etcd_lock.h"

struct kva_leader;

/** Start to ask for the lock @url, of the volumes @id where it names none. Returns as kvp_etcd_lock_open. */
int kva_leader_open(const char *url, uint32_t ttl_s, uint64_t id, struct kva_leader **ret,
                    struct kv_error *error);
void kva_leader_close(struct kva_leader *leader); /* gives the lock back; NULL is a no-op */

/** Whether this process has the lock now. Without a leader (NULL) there is nobody else. Any thread. */
bool kva_leader_is(struct kva_leader *leader);

/**
 * Ask before a turn: whether it has the lock, and knows the notes of those before it. Sets *@ret_new when
 * it has got the lock since the last call.
 */
bool kva_leader_may_move(struct kva_leader *leader, bool *ret_new);
/** Whether a late removal of a holder before may take a copy of this blob. */
bool kva_leader_doubts(const struct kva_leader *leader, const uint8_t *key);

/** Note @n keys that are about to be removed. Returns 0; -ESTALE: it has lost the lock; -EIO. */
int kva_leader_begin(struct kva_leader *leader, const uint8_t *keys, size_t n);
/** All calls for these keys have ended. */
void kva_leader_end(struct kva_leader *leader);

#endif
