// SPDX-License-Identifier: Apache-2.0
/* Buffers for the tokens of blocks being filled. Few are in use at a time, so they are allocated in
 * chunks when first needed, and reused through a list. Numbers start at 1. */
#ifndef KVBM_BM_POOL_SLAB_H
#define KVBM_BM_POOL_SLAB_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define KVBM_SLAB_CHUNK 256

struct kvbm_slab {
    uint32_t **chunks;
    size_t n_chunks, capacity;
    uint32_t n_words; /* words of a buffer */
    uint32_t free;    /* list: a buffer's first word is the next one's number */
    size_t n_free;
};

static inline uint32_t *kvbm_slab_at(const struct kvbm_slab *slab, uint32_t i)
{
    return slab->chunks[(i - 1) / KVBM_SLAB_CHUNK] +
           (size_t)((i - 1) % KVBM_SLAB_CHUNK) * slab->n_words;
}

static inline void kvbm_slab_put(struct kvbm_slab *slab, uint32_t i)
{
    if (!i)
        return;
    *kvbm_slab_at(slab, i) = slab->free;
    slab->free = i;
    slab->n_free++;
}

static inline uint32_t kvbm_slab_get(struct kvbm_slab *slab)
{
    uint32_t i = slab->free;

    slab->free = *kvbm_slab_at(slab, i);
    slab->n_free--;
    return i;
}

/** Reserve nodes so that the next @n gets succeed. Returns 0 or -ENOMEM. */
int kvbm_slab_reserve(struct kvbm_slab *slab, size_t n);
void kvbm_slab_fini(struct kvbm_slab *slab);

#endif
