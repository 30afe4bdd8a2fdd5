// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks by UCX. Leases, checks and requests stay those of the session; UCX moves the bytes.
 *
 *   reader                                             owner
 *   KVBM_ASK_UCX: address of its node ───────────────► peer_create
 *   receive_start(tag), KVBM_ASK_PUSH: tag, places ──► send from the leased blocks
 *          ◄════════════ UCX: a message per block ════
 *          ◄── reply: checksums, once all is sent ───  the lease is in use until then
 */
#ifndef KVBM_PEER_UCX_H
#define KVBM_PEER_UCX_H

#include "kvbm_remote.h"
#include "ucx_abi.h"

struct kvbm_ucx {
    const struct kvbm_ucx_abi *abi;
    struct kvbm_ucx_node *node;
};

/**
 * Give an agent its node, if the options ask for one, before it has sessions. Without libkvbm_ucx
 * agent->ucx stays NULL. Returns 0; -ENOTSUP (KVBM_UCX_REQUIRED); -EINVAL (options); -ENOMEM.
 */
int kvbm_ucx_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts);

/** Free an agent's node, after its sessions have ended. Waits until nothing is sent any more. */
void kvbm_ucx_destroy(struct kvbm_agent *agent);

/**
 * Have the peer of a session connect to this agent's node, unless it has. Returns the number of the
 * connection, or 0: no blocks by UCX now.
 */
uint64_t kvbm_ucx_agree(struct kvbm_session *session, uint64_t deadline_ns);

/** Tell whether a block has come over connection @turn. */
bool kvbm_ucx_is_proven(struct kvbm_session *session, uint64_t turn);

/** Note that all of a request has come over connection @turn. */
void kvbm_ucx_worked(struct kvbm_session *session, uint64_t turn);

/** Give connection @turn up: the peer closes it, and the next read asks for another. */
void kvbm_ucx_failed(struct kvbm_session *session, uint64_t turn);

#endif
