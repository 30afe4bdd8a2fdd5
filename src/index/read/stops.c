// SPDX-License-Identifier: Apache-2.0
/* Tell people where each holder's part of a prompt ends, and what the holder has there. */
#include <errno.h>
#include <stdlib.h>

#include "index/tree/kids.h"

/* Parked blocks that are looked at, of all holders together: bounds the time under the lock. */
#define MOST_PARKED 262144u

/* Note the holders of one chain, whose first @m blocks are those of the prompt from @depth on. */
static void note_chain(const struct kvi_index *ix, const struct kvi_chain *chain, uint32_t depth,
                       uint32_t m, struct kvi_stop *stops)
{
    uint32_t n = kvi_who_count(chain), all = kvi_chain_run(chain).len;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t entry = kvi_who_get(kvi_who_at(chain, i));
        uint32_t len = kvi_entry_len(entry);
        struct kvi_stop *stop = &stops[kvi_entry_holder(entry)];

        stop->reach = depth + KV_MIN(len, m);
        stop->goes_on = len > m || (len == all && kvi_entry_kids(ix, entry) > 0);
    }
}

static void walk(const struct kvi_index *ix, const uint64_t *hashes, size_t n,
                 struct kvi_stop *stops)
{
    const struct kvi_chain *chain = &ix->root;
    size_t depth = 0;

    while (depth < n) {
        const struct kvi_chain *kid = kvi_kids_find(chain, hashes[depth]);
        struct kvi_run run;
        const uint64_t *locals;
        uint32_t m = 0;

        if (!kid)
            return;
        run = kvi_chain_run(kid);
        locals = kvi_arena_locals(&ix->arena, run.pos);
        while (m < run.len && depth + m < n && locals[m] == hashes[depth + m])
            m++;
        if (m)
            note_chain(ix, kid, (uint32_t)depth, m, stops);
        if (m < run.len)
            return;
        depth += m;
        chain = kid;
    }
}

/* Return true when a parked block of the holder has the tokens @local. */
static bool has_parked(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t local,
                       size_t *budget)
{
    const struct kvi_parked *parked;

    if (!holder->n_parked)
        return false;
    for (uint32_t i = holder->newest; i != KVI_NO_RECORD && *budget; i = parked->older) {
        parked = &ix->parking.items[i];
        --*budget;
        if (parked->local == local)
            return true;
    }
    return false;
}

long kvi_find_stops(struct kvi_index *index, const uint64_t *hashes, size_t n,
                    struct kvi_stop **ret)
{
    size_t budget = MOST_PARKED;
    struct kvi_stop *stops;
    long n_stops = 0;

    kvi_lock(index);
    stops = calloc((size_t)index->holders.n_used + 1, sizeof(*stops));
    if (!stops) {
        pthread_mutex_unlock(&index->lock);
        return -ENOMEM;
    }
    for (uint32_t id = 0; id < index->holders.n_used; id++) {
        const struct kvi_holder *holder = kvi_dir_get(&index->holders, id);

        stops[id].goes_on = holder && atomic_load_explicit(&holder->blocks, memory_order_relaxed);
    }
    walk(index, hashes, n, stops);
    for (uint32_t id = 0; id < index->holders.n_used; id++) {
        const struct kvi_holder *holder = kvi_dir_get(&index->holders, id);
        struct kvi_stop stop = stops[id];

        if (!holder || holder->main)
            continue;
        stop.holder = holder->key;
        stop.waits =
            stop.reach + 1 < n && has_parked(index, holder, hashes[stop.reach + 1], &budget);
        stops[n_stops++] = stop;
    }
    pthread_mutex_unlock(&index->lock);
    *ret = stops;
    return n_stops;
}
