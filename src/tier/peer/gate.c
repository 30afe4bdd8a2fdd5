// SPDX-License-Identifier: Apache-2.0
/* Breakers of peers: only peers that have failed lately have one. */
#include "base/core/log.h"
#include "tier/peer/impl.h"

#define MAX_FAILURES 3u
#define FIRST_PAUSE_NS KV_NS_PER_S
#define MAX_PAUSE_NS (30 * KV_NS_PER_S)

static struct kvbm_gate *find(const struct kvbm_peers *peers, uint64_t worker)
{
    for (uint32_t i = 0; i < peers->n_gates; i++) {
        if (peers->gates[i].worker == worker)
            return (struct kvbm_gate *)&peers->gates[i];
    }
    return NULL;
}

bool kvbm_gate_would_pass(const struct kvbm_peers *peers, uint64_t worker, uint64_t now_ns)
{
    const struct kvbm_gate *gate = find(peers, worker);

    return !gate || !gate->open || (!gate->probing && now_ns >= gate->next_ns);
}

bool kvbm_gate_passes(struct kvbm_peers *peers, uint64_t worker, uint64_t now_ns)
{
    struct kvbm_gate *gate = find(peers, worker);

    if (!kvbm_gate_would_pass(peers, worker, now_ns))
        return false;
    if (gate && gate->open)
        gate->probing = true;
    return true;
}

/* Make a breaker; with too many, the oldest one's peer counts as fine again. */
static struct kvbm_gate *make(struct kvbm_peers *peers, uint64_t worker)
{
    if (peers->n_gates == KVBM_MAX_GATES) {
        memmove(peers->gates, peers->gates + 1, sizeof(peers->gates) - sizeof(peers->gates[0]));
        peers->n_gates--;
    }
    peers->gates[peers->n_gates] = (struct kvbm_gate){.worker = worker};
    return &peers->gates[peers->n_gates++];
}

static void open_gate(struct kvbm_peers *peers, struct kvbm_gate *gate)
{
    if (!gate->open) {
        peers->stats.opened++;
        kv_log_warn("kvbm", "a peer doesn't answer: nothing is asked of it for a while",
                    "worker=%llu", (unsigned long long)gate->worker);
    }
    gate->open = true;
    gate->probing = false;
    gate->pause_ns = gate->pause_ns ? KV_MIN(2 * gate->pause_ns, MAX_PAUSE_NS) : FIRST_PAUSE_NS;
    gate->next_ns = kv_now_ns() + gate->pause_ns;
}

void kvbm_gate_release(struct kvbm_peers *peers, uint64_t worker)
{
    struct kvbm_gate *gate = find(peers, worker);

    if (gate)
        gate->probing = false;
}

void kvbm_gate_tell(struct kvbm_peers *peers, uint64_t worker, bool ok, bool hard)
{
    struct kvbm_gate *gate = find(peers, worker);

    if (ok) {
        if (gate) /* the order of the others is that of their first failures */
            memmove(gate, gate + 1,
                    (size_t)(peers->gates + --peers->n_gates - gate) * sizeof(*gate));
        return;
    }
    if (!gate)
        gate = make(peers, worker);
    if (gate->open && !gate->probing) /* a call from before the breaker opened */
        return;
    if (gate->open || hard || ++gate->failures >= MAX_FAILURES)
        open_gate(peers, gate);
}
