// SPDX-License-Identifier: Apache-2.0
/**
 * A storm of loads: processes that read one owner, which overwrites its blocks meanwhile. Every
 * block that a reader calls right is compared byte by byte with what its key says. After each call
 * the reader's memory is poisoned and watched: nothing may arrive late.
 */
#ifndef KV_TEST_STORM_H
#define KV_TEST_STORM_H

// clang-format off
#include "base/unit.h"
// clang-format on

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "index/random.h"
#include "lend_unit.h"

#define STORM_KEYS (3 * N_BLOCKS) /* keys 1 to STORM_KEYS exist */
/* For a loaded machine beyond a call's deadline; what hangs, hangs longer. */
#define STORM_SLACK_NS (UINT64_C(20) * KV_NS_PER_S)

/** Seen by all processes of a storm. */
struct storm {
    char unix_endpoint[96];
    const char *host;          /* of the owner's tcp endpoint */
    bool only_tcp;             /* readers leave the unix socket alone */
    uint32_t keepalive_ms;     /* of all agents */
    uint32_t open_ms;          /* that readers give a session to open */
    int owner_net, reader_net; /* network namespaces; 0: the one that all have */
    atomic_int port;           /* of the owner's tcp endpoint */
    atomic_bool stop;
    atomic_uint_fast64_t owner_turns;  /* of the running owner */
    atomic_uint_fast64_t owner_pinned; /* blocks that it holds for readers */
    atomic_uint_fast64_t shared_right, sent_right, misses, reads;
    atomic_uint_fast64_t wrong, late_bytes, late_calls, odd_errors;
    atomic_uint_fast64_t latest_ns;     /* that a call ended after its deadline */
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

/** Tell all to end, and wait until readers and owner have, all well. */
void storm_end(pid_t owner, const pid_t *readers, int n);

#endif
