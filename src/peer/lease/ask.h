// SPDX-License-Identifier: Apache-2.0
/** Questions of the room tier to sessions: who is there, whose blocks fit, lookups without waiting. */
#ifndef KVBM_PEER_LEASE_ASK_H
#define KVBM_PEER_LEASE_ASK_H

#include "kvbm_directory.h"
#include "peer/session/session.h"

/**
 * List open sessions, at most one of each peer and at most @max: of several that of a unix socket.
 * The caller drops the references. Returns their number.
 */
size_t kvbm_sessions_list(struct kvbm_agent *agent, struct kvbm_session **ret, size_t max);

/** Return the length of an agent's keys. */
uint32_t kvbm_agent_key_len(const struct kvbm_agent *agent);

/** Find the peer of an open session that was opened at @endpoint. Returns its worker, or 0. */
uint64_t kvbm_agent_worker_at(struct kvbm_agent *agent, const char *endpoint);

/** As kvbm_agent_worker_at, at any endpoint that the directory names. NULL @follower: 0. */
uint64_t kvbm_follower_worker_at(struct kvbm_follower *follower, const char *endpoint);

/**
 * Tell whether a peer has exported a set whose blocks are as those of @like. Returns 0; -ENOENT (no
 * such set); -ESTALE; -EMEDIUMTYPE (other blocks, or other heads than this agent's set of that id or
 * @own has; the log says so once). NULL or zeros for @own: the set alone tells.
 */
int kvbm_session_fits(struct kvbm_session *session, uint32_t set, const struct kvbm_layout *like,
                      const struct kvbm_shard *own);

/** Begin kvbm_session_lookup. kvbm_lookup_wait ends the call. Errors as kvbm_session_lookup. */
int kvbm_lookup_start(struct kvbm_session *session, uint32_t set, uint32_t group, const void *keys,
                      size_t n, struct kvbm_call **ret);

/** End a lookup of @n keys. Returns as kvbm_session_lookup. */
int kvbm_lookup_wait(struct kvbm_call *call, size_t n, uint64_t deadline_ns, uint8_t *tiers);

/* ---- leased blocks, read where they lie ---- */

/**
 * Return the number of blocks of a peer's set if they lie in memory that this process can map, as far
 * as is known; else 0.
 */
uint64_t kvbm_session_shares(struct kvbm_session *session, uint32_t set);

/**
 * Return the layout of a lease's set in the shared memory, with this process's addresses: only to be
 * read. It lives as long as the lease. NULL: the lease isn't shared (kvbm_lease_is_shared).
 */
const struct kvbm_layout *kvbm_lease_layout(const struct kvbm_lease *lease);

/**
 * Tell whether the block of key @i of a shared lease hasn't changed since it was leased; the key has
 * a block. Bytes that were copied before the call are right then, also when the lease has ended or
 * its owner is dead.
 */
bool kvbm_lease_is_intact(const struct kvbm_lease *lease, size_t i);

#endif
