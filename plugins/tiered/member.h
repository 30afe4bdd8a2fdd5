// SPDX-License-Identifier: Apache-2.0
/**
 * A member of a tiered store: a store of libkvstore behind a breaker. It may be down when the tiered
 * store is opened, and is opened later then. Any thread, unless a comment says otherwise.
 *
 * Every call on it stands between trd_enter and trd_leave:
 *
 *     if (!trd_enter(member, &use))
 *         return -EHOSTDOWN;
 *     rc = trd_leave(member, use, kvs_get_chunk(use.store, ...));
 */
#ifndef KV_TIERED_MEMBER_H
#define KV_TIERED_MEMBER_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/core/breaker.h"
#include "store/backend/store.h"
#include "tiered/bound.h"
#include "tiered/catalog.h"
#include "tiered/config.h"
#include "tiered/keys.h"

/** Beginning of the names of manifests that the tiered store itself publishes in its members. */
#define TRD_OWN_NAMES "kv-tiered-"

struct trd_member {
    const struct trd_member_config *config;
    struct trd_bound *bound;           /* NULL: calls have no deadline */
    _Atomic(struct kvs_store *) store; /* NULL until it has been opened; closed by close alone */
    atomic_bool down;                  /* ask the breaker first */
    atomic_uint failures;              /* in a row */

    struct trd_catalog catalog; /* its packs */

    pthread_mutex_t lock; /* guards what follows */
    struct kv_breaker breaker;
    uint64_t n_failures; /* since it was told that the member is down */
    bool said_down;
    struct trd_pending pending;
    bool owed; /* chunks were flushed for no manifest yet: they want a companion */
    uint64_t looked_ns;
    bool full; /* beyond its capacity, as of looked_ns */

    pthread_mutex_t commit; /* one publication at a time; taken before `lock` */
};

/** A call that was let through. */
struct trd_use {
    struct kvs_store *store;
    bool probe;
};

/**
 * Begin a member: find its plugin, and open it. A member that can't be reached is down, and no
 * error. Returns 0, or what makes the configuration useless: -EINVAL, -ENOENT (no plugin), -EPROTO.
 */
int trd_member_init(struct trd_member *member, const struct trd_member_config *config);

/** End it; also after trd_member_init failed. What isn't published is dropped. No other call may run. */
void trd_member_fini(struct trd_member *member);

/** Let a call through. False: the member is down. */
bool trd_enter(struct trd_member *member, struct trd_use *ret);

/** Report how the call ended, for the breaker. Returns @rc. */
int trd_leave(struct trd_member *member, struct trd_use use, int rc);

/** True when a put should go elsewhere: the member has its capacity. Looks once a second. */
bool trd_is_full(struct trd_member *member);

/** Note that a chunk was put there, and waits for a publication. */
void trd_note_put(struct trd_member *member, const void *hash, size_t hash_len);

/** True when a member's answer says nothing about the blob: another one may have it. */
static inline bool trd_unanswered(int rc)
{
    return rc < 0 && rc != -ENOENT && rc != -EBADMSG;
}

/**
 * Get a chunk from the member's store, as kvs_get_chunk does. A backend without extensions doesn't
 * tell a miss from a failure: it must prove that it works, or the answer is -EIO.
 */
int trd_get_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void **ret,
                  size_t *ret_len);

#endif
