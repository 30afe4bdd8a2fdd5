// SPDX-License-Identifier: Apache-2.0
/**
 * Facts of a block that the registry doesn't keep: the first block of its chain, and the hash of its
 * tokens. An open-addressing table by a 64-bit hash of group and key; a removal closes its gap.
 *
 * A block whose removal was lost stays, until a sweep: begin one, see all blocks that live, and remove
 * what was neither seen nor entered since.
 */
#ifndef KVBM_BM_EVENTS_CHAINS_H
#define KVBM_BM_EVENTS_CHAINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvbm_chain_of {
    uint64_t id;          /* 0: an empty slot */
    uint64_t prefix;      /* kvp_key_number of the chain's first block */
    uint64_t tokens_hash; /* 0: not known */
    bool has_prefix, has_tokens;
    uint32_t seen; /* sweep that was the last to begin when it was entered or seen */
};

struct kvbm_chains {
    struct kvbm_chain_of *slots; /* [1 << bits]; NULL: none yet */
    unsigned bits;
    size_t n, max;
    uint32_t sweep; /* number of the last one */
};

/** Return the id of a block. */
uint64_t kvbm_chain_id(uint32_t group, const void *key, uint32_t len);

/** Ask for the memory of a block that will be looked for. */
static inline void kvbm_chains_prefetch(const struct kvbm_chains *chains, uint64_t id)
{
    if (chains->slots)
        __builtin_prefetch(&chains->slots[id & (((size_t)1 << chains->bits) - 1)]);
}

/** Find a block; NULL: not known. Valid until the next enter or take. */
const struct kvbm_chain_of *kvbm_chains_find(const struct kvbm_chains *chains, uint64_t id);

/** Find a block or add one of which nothing is known yet; NULL: there is no room. Valid as long. */
struct kvbm_chain_of *kvbm_chains_enter(struct kvbm_chains *chains, uint64_t id);

/** Remove a block, and write it to @ret. Returns false when it isn't there. */
bool kvbm_chains_take(struct kvbm_chains *chains, uint64_t id, struct kvbm_chain_of *ret);

/** Begin a sweep. */
void kvbm_chains_begin_sweep(struct kvbm_chains *chains);
/** Note that a block lives; one that isn't known is passed over. */
void kvbm_chains_see(struct kvbm_chains *chains, uint64_t id);
/**
 * Look at up to @n slots from place *@at on (0: the first), and move *@at behind them; 0: that was the
 * end. Removes blocks that weren't seen since the sweep began. A table that grows meanwhile may keep
 * some until the next sweep.
 */
void kvbm_chains_sweep(struct kvbm_chains *chains, size_t *at, size_t n);

/** Forget all blocks. max stays. */
void kvbm_chains_clear(struct kvbm_chains *chains);

void kvbm_chains_fini(struct kvbm_chains *chains);

#endif
