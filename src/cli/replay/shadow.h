// SPDX-License-Identifier: Apache-2.0
/**
 * Count in the same run what the same requests would find in other caches: in as many equally large
 * caches with random routing, and in one without a limit. Thread-confined.
 */
#ifndef KV_CLI_REPLAY_SHADOW_H
#define KV_CLI_REPLAY_SHADOW_H

#include <stddef.h>
#include <stdint.h>

#include "cli/replay/random.h"

struct kc_cache;

struct kc_shadow {
    struct kc_cache **workers;
    struct kc_cache *unlimited;
    uint32_t n_workers;
    uint64_t pass;
    struct kc_rng rng;
    uint64_t asked, found_random, found_unlimited; /* trace blocks */
};

/** Start with @capacity trace blocks per worker, 0: unlimited. Returns 0 or -ENOMEM. */
int kc_shadow_init(struct kc_shadow *shadow, uint32_t n_workers, uint64_t capacity, uint64_t seed);
void kc_shadow_fini(struct kc_shadow *shadow);

/** Serve one prompt, given by the names of its prefixes. Different @pass numbers share no block. */
int kc_shadow_serve(struct kc_shadow *shadow, const uint64_t *chain, size_t n, uint64_t pass);

#endif
