// SPDX-License-Identifier: Apache-2.0
/** Presence: knowledge of which keys the object store has. */
#ifndef KVBM_TIER_MANAGER_PRESENCE_H
#define KVBM_TIER_MANAGER_PRESENCE_H

#include "tier/manager/state/manager.h"

/** Knowledge about a key that the object store's pool lacks. */
enum kvbm_presence {
    KVBM_PRESENCE_UNKNOWN, /* not asked yet */
    KVBM_PRESENCE_ASKED,   /* an answer, or another question, will come */
    KVBM_PRESENCE_ABSENT   /* absent, or without an answer in time */
};
/**
 * Remember that the object store has the first key of @chain. @like (may be NULL) is a block with
 * that key. Returns false when it can't be remembered.
 */
bool kvbm_presence_add(struct kvbm_manager *m, const struct kvbm_chain *chain,
                       const struct kvbm_immutable *like);
/** Remember that the object store lacks a key; @sure false: it gave no answer in time. */
void kvbm_presence_absent(struct kvbm_manager *m, uint32_t group, const void *key, bool sure);
/** Forget that a key is absent from the object store: it has been put. */
void kvbm_presence_not_absent(struct kvbm_manager *m, uint32_t group, const void *key);
/**
 * Note that a key was put. A question or get under way may have looked before: ignore its "absent".
 */
void kvbm_presence_stored(struct kvbm_manager *m, uint32_t group, const void *key);
/**
 * Note that a key was deleted. A question or get under way may have looked before: ignore its
 * "present".
 */
void kvbm_presence_removed(struct kvbm_manager *m, uint32_t group, const void *key);
/** True when the object store was asked lately and lacks the key, or doesn't answer. */
bool kvbm_presence_known_absent(const struct kvbm_manager *m, uint64_t hash);
/** Return what is known of a key that the object store's pool lacks. */
enum kvbm_presence kvbm_presence_of(const struct kvbm_manager *m, uint64_t hash);
/**
 * Ask the object store for keys [i, i + n) of the chain. Bit k of @unknown: key i + k is unknown.
 * Returns 0; -EHOSTDOWN (breaker open); -EAGAIN, -ENOMEM and others: ask again later.
 */
int kvbm_presence_ask(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i, uint32_t n,
                      uint32_t unknown);

#endif
