// SPDX-License-Identifier: Apache-2.0
#include "bm/pool/slab.h"

static int add_chunk(struct kvbm_slab *slab)
{
    uint32_t first = (uint32_t)(slab->n_chunks * KVBM_SLAB_CHUNK) + 1;
    uint32_t *chunk;

    if (slab->n_chunks == slab->capacity) {
        size_t capacity = slab->capacity ? slab->capacity * 2 : 16;
        uint32_t **chunks = realloc(slab->chunks, capacity * sizeof(*chunks));

        if (!chunks)
            return -ENOMEM;
        slab->chunks = chunks;
        slab->capacity = capacity;
    }
    chunk = malloc(sizeof(*chunk) * slab->n_words * KVBM_SLAB_CHUNK);
    if (!chunk)
        return -ENOMEM;
    slab->chunks[slab->n_chunks++] = chunk;
    for (uint32_t i = KVBM_SLAB_CHUNK; i-- > 0;)
        kvbm_slab_put(slab, first + i);
    return 0;
}

int kvbm_slab_reserve(struct kvbm_slab *slab, size_t n)
{
    while (slab->n_free < n) {
        if (add_chunk(slab) < 0)
            return -ENOMEM;
    }
    return 0;
}

void kvbm_slab_fini(struct kvbm_slab *slab)
{
    for (size_t i = 0; i < slab->n_chunks; i++)
        free(slab->chunks[i]);
    free(slab->chunks);
}
