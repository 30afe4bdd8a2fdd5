// SPDX-License-Identifier: Apache-2.0
/*
 * Look a prompt up by the engine's hashes. They lead to a place, the place to the local hashes above
 * it, and these to the holders, as for any prompt (find.c).
 */
#include <stdlib.h>

#include "index/tree/tree.h"

#define NOBODY UINT32_MAX

struct named {
    const struct kvi_index *ix;
    const uint64_t *hashes;
    size_t n;
};

/*
 * Return a position that the table of names, or @holder by an alias, calls @hash; else KVI_NO_POS.
 * NOBODY: look in the table alone.
 */
static uint32_t place_of(const struct kvi_index *ix, uint32_t holder, uint64_t hash)
{
    struct kvi_probe probe;
    uint32_t pos;
    long i = -1;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while (kvi_probe_next(&probe, &pos)) {
        if (*kvi_arena_engines(&ix->arena, pos) == hash)
            return pos;
    }
    if (holder != NOBODY)
        i = kvi_alias_find(ix, holder, hash, KVI_NO_POS);
    return i >= 0 ? ix->aliases[i].pos : KVI_NO_POS;
}

/*
 * Return how many leading hashes name places, by the table or aliases of @holder, when the first
 * @known do: known ones come first. *@ret is the place of the last one, unless that is of before.
 * Without known ones, look at the last hash first: often all are known. Else go on from @known in
 * growing steps: most holders know few more than the one before.
 */
static size_t count_known(const struct named *named, uint32_t holder, size_t known, uint32_t *ret)
{
    size_t unknown = named->n + 1, middle = known ? known + 1 : named->n, step = 1;

    while (known + 1 < unknown) { /* the first @known hashes are, the first @unknown aren't */
        uint32_t pos = place_of(named->ix, holder, named->hashes[middle - 1]);

        if (pos == KVI_NO_POS) {
            unknown = middle;
        } else {
            known = middle;
            *ret = pos;
        }
        if (unknown <= named->n) {
            middle = known + (unknown - known) / 2;
        } else {
            step *= 2;
            middle = KV_MIN(known + step, named->n);
        }
    }
    return known;
}

/*
 * Find the deepest place that some holder names by one of the hashes.
 *
 * The table knows a holder's names of some blocks, the aliases those of the others. The holder of a
 * deeper place than the ones found so far has all above it, too: an alias for the first hash that the
 * table doesn't know tells such a holder.
 */
static uint32_t deepest(const struct named *named, size_t *ret_known)
{
    const struct kvi_index *ix = named->ix;
    uint32_t best = KVI_NO_POS;
    size_t known = count_known(named, NOBODY, 0, &best);

    for (uint32_t id = 0; ix->n_aliases && id < ix->holders.n_used && known < named->n; id++) {
        const struct kvi_holder *holder = kvi_dir_get(&ix->holders, id);
        long i = -1;

        if (holder && holder->n_aliases)
            i = kvi_alias_find(ix, id, named->hashes[known], KVI_NO_POS);
        if (i < 0)
            continue;
        best = ix->aliases[i].pos;
        known = count_known(named, id, known + 1, &best);
    }
    *ret_known = known;
    return best;
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

long kvi_named_path(struct kvi_index *index, const uint64_t *hashes, size_t n, uint64_t **ret,
                    size_t *ret_known)
{
    const struct named named = {.ix = index, .hashes = hashes, .n = n};
    uint32_t pos;
    long len = 0;

    *ret = NULL;
    kvi_lock(index);
    pos = deepest(&named, ret_known);
    if (pos != KVI_NO_POS)
        len = copy_path(index, pos, ret);
    pthread_mutex_unlock(&index->lock);
    return len;
}

int kvi_find_named(struct kvi_index *index, const uint64_t *hashes, size_t n,
                   struct kvi_matches *matches)
{
    uint64_t *locals;
    size_t known;
    long len = kvi_named_path(index, hashes, n, &locals, &known);
    int rc;

    matches->n = 0;
    rc = len < 0 ? (int)len : kvi_find(index, locals, (size_t)len, matches);
    free(locals);
    return rc;
}
