// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/shadow.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay/cache.h"

int kc_shadow_init(struct kc_shadow *shadow, uint32_t n_workers, uint64_t capacity, uint64_t seed)
{
    int rc;

    memset(shadow, 0, sizeof(*shadow));
    shadow->rng.state = kc_mix(seed + 2);
    shadow->workers = calloc(n_workers, sizeof(struct kc_cache *));
    if (!shadow->workers)
        return -ENOMEM;
    shadow->n_workers = n_workers;
    rc = kc_cache_create(0, KC_LEAF_FIRST, &shadow->unlimited);
    for (uint32_t w = 0; w < n_workers && rc == 0; w++)
        rc = kc_cache_create(capacity, KC_LEAF_FIRST, &shadow->workers[w]);
    if (rc < 0)
        kc_shadow_fini(shadow);
    return rc;
}

void kc_shadow_fini(struct kc_shadow *shadow)
{
    for (uint32_t w = 0; w < shadow->n_workers; w++)
        kc_cache_destroy(shadow->workers[w]);
    free(shadow->workers);
    kc_cache_destroy(shadow->unlimited);
    memset(shadow, 0, sizeof(*shadow));
}

int kc_shadow_serve(struct kc_shadow *shadow, const uint64_t *chain, size_t n, uint64_t pass)
{
    struct kc_cache *worker = shadow->workers[kc_rng_below(&shadow->rng, shadow->n_workers)];
    struct kc_cache_use use;
    int rc;

    /* No block of earlier passes comes back: clear the caches to bound memory. */
    if (pass > shadow->pass) {
        kc_cache_clear(shadow->unlimited);
        shadow->pass = pass;
    }
    rc = kc_cache_use(shadow->unlimited, chain, n, &use);
    if (rc < 0)
        return rc;
    shadow->found_unlimited += use.held;
    rc = kc_cache_use(worker, chain, n, &use);
    if (rc < 0)
        return rc;
    shadow->found_random += use.held;
    shadow->asked += n;
    return 0;
}
