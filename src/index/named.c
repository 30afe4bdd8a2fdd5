// SPDX-License-Identifier: Apache-2.0
/*
 * Look a prompt up by the engine's hashes. They lead to a place, the place to the local hashes above
 * it, and these to the holders, as for any prompt (find.c).
 */
#include <stdlib.h>

#include "index/tree.h"

#define MAX_OTHERS 16u /* holders whose own names are tried, beside the names of the table */

struct named {
    const struct kvi_index *ix;
    const uint64_t *hashes;
    uint32_t others[MAX_OTHERS]; /* ids of holders that have aliases for some of the hashes */
    uint32_t n_others;
};

/* Return a position that some holder calls @hash, or KVI_NO_POS. */
static uint32_t place_of(const struct named *named, uint64_t hash)
{
    const struct kvi_index *ix = named->ix;
    struct kvi_probe probe;
    uint32_t pos;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while (kvi_probe_next(&probe, &pos)) {
        if (*kvi_arena_engines(&ix->arena, pos) == hash)
            return pos;
    }
    for (uint32_t k = 0; k < named->n_others; k++) {
        long i = kvi_alias_find(ix, named->others[k], hash, KVI_NO_POS);

        if (i >= 0)
            return ix->aliases[i].pos;
    }
    return KVI_NO_POS;
}

/* Find holders that have another name for a place than the first one: their name for @hash. */
static void find_others(struct named *named, uint64_t hash)
{
    const struct kvi_index *ix = named->ix;

    for (uint32_t id = 0; id < ix->holders.n_used && named->n_others < MAX_OTHERS; id++) {
        const struct kvi_holder *holder = kvi_dir_get(&ix->holders, id);

        if (holder && holder->n_aliases && kvi_alias_find(ix, id, hash, KVI_NO_POS) >= 0)
            named->others[named->n_others++] = id;
    }
}

/* Find the deepest place that some holder names by one of @n hashes: known ones come first. */
static uint32_t deepest(struct named *named, size_t n)
{
    size_t known = 0, unknown = n;
    uint32_t pos, best = KVI_NO_POS;

    if (!n)
        return KVI_NO_POS;
    find_others(named, named->hashes[0]);
    best = place_of(named, named->hashes[n - 1]);
    while (best == KVI_NO_POS && known < unknown) { /* hashes[..known) known, [unknown..) not */
        size_t middle = known + (unknown - known) / 2;

        pos = place_of(named, named->hashes[middle]);
        if (pos == KVI_NO_POS)
            unknown = middle;
        else
            known = middle + 1;
    }
    return best != KVI_NO_POS ? best : known ? place_of(named, named->hashes[known - 1]) : best;
}

/* Copy the local hashes from the root to the block at @pos. Returns their number or -ENOMEM. */
static long copy_path(const struct kvi_index *ix, uint32_t pos, uint64_t **ret)
{
    const struct kvi_chain *last = kvi_owner(ix, pos);
    uint32_t end = pos - kvi_chain_run(last).pos + 1;
    uint64_t *locals;
    size_t n = 0, at;

    for (const struct kvi_chain *chain = last; chain->parent; chain = chain->parent)
        n += chain == last ? end : kvi_chain_run(chain).len;
    locals = malloc(KV_MAX(n, (size_t)1) * sizeof(*locals));
    if (!locals)
        return -ENOMEM;
    at = n;
    for (const struct kvi_chain *chain = last; chain->parent; chain = chain->parent) {
        struct kvi_run run = kvi_chain_run(chain);
        uint32_t len = chain == last ? end : run.len;

        at -= len;
        memcpy(locals + at, kvi_arena_locals(&ix->arena, run.pos), len * sizeof(*locals));
    }
    *ret = locals;
    return (long)n;
}

int kvi_find_named(struct kvi_index *index, const uint64_t *hashes, size_t n,
                   struct kvi_matches *matches)
{
    struct named named = {.ix = index, .hashes = hashes};
    uint64_t *locals = NULL;
    uint32_t pos;
    long len = 0;
    int rc;

    kvi_lock(index);
    pos = deepest(&named, n);
    if (pos != KVI_NO_POS)
        len = copy_path(index, pos, &locals);
    pthread_mutex_unlock(&index->lock);
    matches->n = 0;
    rc = len < 0 ? (int)len : kvi_find(index, locals, (size_t)len, matches);
    free(locals);
    return rc;
}
