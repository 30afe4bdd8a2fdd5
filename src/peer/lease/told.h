// SPDX-License-Identifier: Apache-2.0
/**
 * Keys that peers were told about: when one leaves its registry, the peers hear of it.
 *
 *   lookup ──► kvbm_told_key ──► attachment of the key ──► last tier drops the key
 *                                                              │ on that thread, without its lock
 *   peers ◄── KVBM_TELL_GONE ◄── the lender's thread ◄── kvbm_lender_gone_from
 *
 * Each lender of the same registry has attachments of its own, one a key for all its sets, of one type:
 * a registry has few types. They outlive sets and agents: they refer to a struct that does, too.
 */
#ifndef KVBM_PEER_LEASE_TOLD_H
#define KVBM_PEER_LEASE_TOLD_H

#include "kvbm_pool.h"

struct kvbm_lender;
struct kvbm_told;

/** Make the record of a lender. Returns NULL when out of memory. */
struct kvbm_told *kvbm_told_create(struct kvbm_lender *lender);

/** Let the lender go: no call to it runs afterwards. NULL is a no-op. */
void kvbm_told_end(struct kvbm_told *told);

/** Name the attachments in a registry. Returns 0 or an error: nothing will be told. */
int kvbm_told_type(struct kvbm_registry *registry, uint32_t *ret);

/** Remember that peers know a key of the lender's sets. Does nothing where that isn't possible. */
void kvbm_told_key(struct kvbm_told *told, struct kvbm_registry *registry, uint32_t type,
                   uint32_t group, const void *key, uint32_t key_len);

#endif
