// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks by UCX or NIXL. Leases, checks and requests stay those of the session; a carrier moves the
 * bytes.
 *
 *   reader                                             owner
 *   KVBM_ASK_UCX: address of its node ───────────────► peer_create
 *   receive_start(tag), KVBM_ASK_PUSH: tag, places ──► send from the leased blocks
 *          ◄════════════ UCX: a message per block ════
 *          ◄── reply: checksums, once all is sent ───  the lease is in use until then
 *
 * By NIXL likewise, with KVBM_ASK_NIXL and KVBM_ASK_NIXL_PUSH. A reader that gives up hears of the
 * end by KVBM_TELL_PUSHED.
 */
#ifndef KVBM_PEER_SESSION_CARRIER_H
#define KVBM_PEER_SESSION_CARRIER_H

#include "kvbm_remote.h"
#include "peer/module/carrier_abi.h"

/** Carriers, the preferred one first. */
enum kvbm_by { KVBM_BY_UCX, KVBM_BY_NIXL, KVBM_N_CARRIERS };

struct kvbm_carrier {
    const struct kvbm_carrier_abi *abi; /* NULL: the agent doesn't have it */
    struct kvbm_carrier_node *node;
};

/** Blocks by a carrier, as the reader of a session has them. Under the session's lock. */
struct kvbm_link {
    bool asking;           /* a thread waits for the peer's answer, or tells it of a failure */
    bool refused;          /* the peer doesn't have the carrier */
    bool on;               /* the peer has been asked to connect, and nothing has failed since */
    bool proven;           /* a block has come */
    uint64_t turn;         /* number of this connection */
    uint64_t off_until_ns; /* after a failure: not before */
};

struct kvbm_agent;
struct kvbm_session;

/** Load libkvbm_ucx, once. Returns its calls, or NULL with one log line at the first call. */
const struct kvbm_carrier_abi *kvbm_ucx_load(void);

/** Load NIXL, once; otherwise as kvbm_ucx_load. */
const struct kvbm_carrier_abi *kvbm_nixl_load(void);

/**
 * Give an agent the nodes that its options ask for, before it has sessions. Returns 0; -ENOTSUP (one
 * that is required can't be used); -EINVAL (options); -ENOMEM.
 */
int kvbm_carriers_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts);

/** Free an agent's nodes, after its sessions have ended. Waits until nothing is sent any more. */
void kvbm_carriers_destroy(struct kvbm_agent *agent);

/** Return a carrier of an agent, or NULL. */
const struct kvbm_carrier *kvbm_agent_carrier(const struct kvbm_agent *agent, enum kvbm_by by);

/* ---- link.c ---- */

/**
 * Have the peer of a session connect to this agent's node, unless it has. Returns the number of the
 * connection, or 0: no blocks by this carrier now.
 */
uint64_t kvbm_link_agree(struct kvbm_session *session, enum kvbm_by by, uint64_t deadline_ns);

/** Tell whether a block has come over connection @turn. */
bool kvbm_link_is_proven(struct kvbm_session *session, enum kvbm_by by, uint64_t turn);

/** Note that all of a request has come over connection @turn. */
void kvbm_link_worked(struct kvbm_session *session, enum kvbm_by by, uint64_t turn);

/** Give connection @turn up: the peer closes it, and the next read asks for another. */
void kvbm_link_failed(struct kvbm_session *session, enum kvbm_by by, uint64_t turn);

#endif
