// SPDX-License-Identifier: Apache-2.0
/**
 * A storm of loads: processes that read one owner, which overwrites its blocks meanwhile. Every
 * block that a reader calls right is compared byte by byte with what its key says. After each call
 * the reader's memory is poisoned and watched: nothing may arrive late. Every call comes back by its
 * deadline + 100 ms, stalls of the process aside (base/stalls.h).
 */
#ifndef KV_TEST_STORM_H
#define KV_TEST_STORM_H

// clang-format off
#include "support.h"
// clang-format on

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "index/random.h"
#include "lend_unit.h"

#define STORM_KEYS (3 * N_BLOCKS) /* keys 1 to STORM_KEYS exist */

/** Seen by all processes of a storm. */
struct storm {
    char unix_endpoint[96];
    const char *host;          /* of the owner's tcp endpoint */
    bool only_tcp;             /* readers leave the unix socket alone */
    bool no_shared;            /* readers leave shared memory alone */
    uint32_t ucx, nixl;        /* of all agents: enum kvbm_ucx_use, enum kvbm_nixl_use */
    uint32_t keepalive_ms;     /* of all agents */
    uint32_t open_ms;          /* that readers give a session to open */
    int owner_net, reader_net; /* network namespaces; 0: the one that all have */
    atomic_int port;           /* of the owner's tcp endpoint */
    atomic_bool stop;
    atomic_uint_fast64_t owner_turns;  /* of the running owner */
    atomic_uint_fast64_t owner_pinned; /* blocks that it holds for readers */
    atomic_uint_fast64_t shared_right, sent_right, misses, reads;
    atomic_uint_fast64_t carried_right; /* of sent_right: over sessions that have a carrier */
    atomic_uint_fast64_t wrong, late_bytes, late_calls, odd_errors;
    atomic_uint_fast64_t latest_ns;     /* that a call ended after its deadline, without stalls */
    atomic_uint_fast64_t pinned_at_end; /* what a frozen and killed crowd has left pinned; + 1 */
};

/** The storm of this program; NULL before storm_init. */
extern struct storm *storm;

void storm_init(void);

/** Print what was read, and assert that nothing of it was wrong, late or odd. */
void storm_fini(void);

/** Start an owner on the endpoints of the one before, with other blocks. */
pid_t storm_start_owner(struct rng *rng);

pid_t storm_start_reader(int i, struct rng *rng);

/** Wait until readers have read so much more. */
void storm_let_read(uint64_t more);

void storm_kill(pid_t pid);

/**
 * Kill a process and start another one in its place, or (@freezes) freeze it for a while; the owner more
 * often than a reader. Chooses by @rng.
 */
void storm_disturb(pid_t *owner, pid_t *readers, uint32_t n, bool freezes, struct rng *rng);

/** Tell all to end, and wait until readers and owner have, all well. */
void storm_end(pid_t owner, const pid_t *readers, int n);

#endif
