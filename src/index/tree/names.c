// SPDX-License-Identifier: Apache-2.0
/*
 * Find places by the engine's hashes.
 *
 * Every block's slot holds the hash that its first holder gave it. One table, shared by all
 * holders, leads from hashes to slots. The chain tells whether a holder has the block. So a block
 * costs one table entry however many holders have it.
 *
 * A holder with another name for a place (engines seed their hashes differently) has an alias. An
 * alias is a record of 16 bytes, found by (holder, its hash), and by (holder, the slot's hash) when
 * the place is known. The slot's hash stays when blocks move, so a move only writes the record's
 * position.
 *
 * At most SAME_MAX places enter the table under one hash, since engines that number their blocks 1,
 * 2, 3 would fill it with equal keys. The holders of further places have aliases. See kvi_store.
 */
#include "index/tree/tree.h"

static uint64_t mix_pair(uint32_t holder, uint64_t hash)
{
    return kv_mix(kv_mix(hash) + holder);
}

static uint64_t name_mix(const void *arg, uint32_t pos)
{
    const struct kvi_index *ix = arg;

    return kv_mix(*kvi_arena_engines(&ix->arena, pos));
}

static void name_prefetch(const void *arg, uint32_t pos)
{
    const struct kvi_index *ix = arg;

    __builtin_prefetch(kvi_arena_engines(&ix->arena, pos));
}

static uint64_t alias_name_mix(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    return mix_pair(ix->aliases[i].holder, ix->aliases[i].hash);
}

static uint64_t alias_place_mix(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    return mix_pair(ix->aliases[i].holder, *kvi_arena_engines(&ix->arena, ix->aliases[i].pos));
}

static void alias_prefetch(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    __builtin_prefetch(&ix->aliases[i]);
}

int kvi_names_init(struct kvi_index *ix, uint64_t expected_blocks)
{
    int rc = kvi_table_init(&ix->names, &ix->mem, name_mix, name_prefetch, ix);

    if (!rc)
        rc = kvi_table_reserve(&ix->names, expected_blocks);
    if (!rc)
        rc = kvi_table_init(&ix->alias_names, &ix->mem, alias_name_mix, alias_prefetch, ix);
    if (!rc)
        rc = kvi_table_init(&ix->alias_places, &ix->mem, alias_place_mix, alias_prefetch, ix);
    return rc;
}

void kvi_names_fini(struct kvi_index *ix)
{
    kvi_table_fini(&ix->names);
    kvi_table_fini(&ix->alias_names);
    kvi_table_fini(&ix->alias_places);
    kvi_mem_free(&ix->mem, ix->aliases);
}

/* -- aliases ----------------------------------------------------------------------------------- */

long kvi_alias_of_place(const struct kvi_index *ix, uint32_t holder, uint32_t pos)
{
    struct kvi_probe probe;
    uint32_t i;

    kvi_probe_init(&probe, &ix->alias_places,
                   mix_pair(holder, *kvi_arena_engines(&ix->arena, pos)));
    while (kvi_probe_next(&probe, &i))
        if (ix->aliases[i].pos == pos && ix->aliases[i].holder == holder)
            return i;
    return -1;
}

/* Find an alias of @holder at position @pos; KVI_NO_POS: at any place. */
long kvi_alias_find(const struct kvi_index *ix, uint32_t holder, uint64_t hash, uint32_t pos)
{
    struct kvi_probe probe;
    uint32_t i;

    kvi_probe_init(&probe, &ix->alias_names, mix_pair(holder, hash));
    while (kvi_probe_next(&probe, &i)) {
        const struct kvi_alias *alias = &ix->aliases[i];

        if (alias->hash == hash && alias->holder == holder &&
            (pos == KVI_NO_POS || alias->pos == pos))
            return i;
    }
    return -1;
}

/* Remove record @i, which no table refers to: the last record moves into its place. */
static void drop_record(struct kvi_index *ix, uint32_t i)
{
    uint32_t last = (uint32_t)--ix->n_aliases;

    if (i != last) {
        kvi_table_replace(&ix->alias_names, alias_name_mix(ix, last), last, i);
        kvi_table_replace(&ix->alias_places, alias_place_mix(ix, last), last, i);
        ix->aliases[i] = ix->aliases[last];
    }
    if (ix->n_aliases == 0) {
        kvi_mem_free(&ix->mem, ix->aliases);
        ix->aliases = NULL;
        ix->aliases_capacity = 0;
    }
}

static void alias_remove(struct kvi_index *ix, struct kvi_holder *holder, uint32_t i,
                         bool in_places)
{
    kvi_table_erase(&ix->alias_names, alias_name_mix(ix, i), i);
    if (in_places)
        kvi_table_erase(&ix->alias_places, alias_place_mix(ix, i), i);
    drop_record(ix, i);
    holder->n_aliases--;
}

int kvi_alias_prepare(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      bool replaces)
{
    uint32_t i = (uint32_t)ix->n_aliases;
    int rc;

    if (i == UINT32_MAX - 1)
        return -ENOSPC;
    rc = kvi_mem_grow(&ix->mem, (void **)&ix->aliases, &ix->aliases_capacity, ix->n_aliases + 1,
                      sizeof(ix->aliases[0]));
    if (rc)
        return rc;
    ix->aliases[i] = (struct kvi_alias){hash, holder->id, pos};
    rc = kvi_table_insert(&ix->alias_names, mix_pair(holder->id, hash), i);
    if (rc)
        return rc;
    if (!replaces)
        rc = kvi_table_insert(&ix->alias_places, alias_place_mix(ix, i), i);
    if (rc) {
        kvi_table_erase(&ix->alias_names, mix_pair(holder->id, hash), i);
        return rc;
    }
    ix->n_aliases++;
    holder->n_aliases++;
    return 0;
}

void kvi_alias_commit(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      uint64_t old_hash)
{
    uint32_t fresh = (uint32_t)kvi_alias_find(ix, holder->id, hash, pos);
    uint32_t old = (uint32_t)kvi_alias_find(ix, holder->id, old_hash, pos);

    kvi_table_replace(&ix->alias_places, alias_place_mix(ix, old), old, fresh);
    alias_remove(ix, holder, old, false);
}

void kvi_alias_rollback(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash,
                        uint32_t pos, bool replaces)
{
    alias_remove(ix, holder, (uint32_t)kvi_alias_find(ix, holder->id, hash, pos), !replaces);
}

void kvi_aliases_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t pos, uint32_t n)
{
    for (uint32_t k = 0; k < n && holder->n_aliases; k++) {
        long i = kvi_alias_of_place(ix, holder->id, pos + k);

        if (i >= 0)
            alias_remove(ix, holder, (uint32_t)i, true);
    }
}

/* -- names ------------------------------------------------------------------------------------- */

/* Return true when @holder has the block at @pos under the slot's own name. */
static bool holds(const struct kvi_index *ix, const struct kvi_holder *holder, uint32_t pos,
                  struct kvi_place *ret)
{
    struct kvi_chain *chain = kvi_owner(ix, pos);
    uint32_t off = pos - kvi_chain_run(chain).pos;
    _Atomic uint64_t *entry = kvi_who_find(chain, holder->id);

    if (!entry || kvi_entry_len(kvi_who_get(entry)) <= off)
        return false;
    if (holder->n_aliases && kvi_alias_of_place(ix, holder->id, pos) >= 0)
        return false;
    *ret = (struct kvi_place){chain, off, entry};
    return true;
}

bool kvi_locate(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash,
                struct kvi_place *ret, uint32_t *n_same)
{
    struct kvi_probe probe;
    uint32_t pos, same = 0;
    bool found = false;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while ((n_same || !found) && kvi_probe_next(&probe, &pos)) {
        if (*kvi_arena_engines(&ix->arena, pos) != hash)
            continue;
        same++;
        found = found || holds(ix, holder, pos, ret);
    }
    if (!found && holder->n_aliases) {
        long i = kvi_alias_find(ix, holder->id, hash, KVI_NO_POS);

        if (i >= 0) {
            pos = ix->aliases[i].pos;
            ret->chain = kvi_owner(ix, pos);
            ret->off = pos - kvi_chain_run(ret->chain).pos;
            ret->entry = kvi_who_find(ret->chain, holder->id);
            found = true;
        }
    }
    if (n_same)
        *n_same = same;
    return found;
}

uint64_t kvi_name_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint32_t pos)
{
    long i = holder->n_aliases ? kvi_alias_of_place(ix, holder->id, pos) : -1;

    return i >= 0 ? ix->aliases[i].hash : *kvi_arena_engines(&ix->arena, pos);
}

#define AHEAD ((size_t)16) /* hashes per round of prefetching */
#define FIRST ((size_t)64) /* lead of the first round over the second */
#define ERASE_AHEAD 24u    /* names to prefetch when a run of them is erased */

static uint64_t hash_at(const void *hashes, size_t stride, size_t i)
{
    return *(const uint64_t *)(const void *)((const char *)hashes + i * stride);
}

/* The chunk is in the cache: prefetch what the search will read next. */
static void prefetch_hits(const struct kvi_index *ix, uint64_t hash)
{
    struct kvi_probe probe;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    if (kvi_chunk_passed(probe.chunk, probe.tag))
        __builtin_prefetch(probe.chunks + kvi_chunk_after((uint32_t)(probe.chunk - probe.chunks),
                                                          probe.tag, probe.n_chunks));
    for (; probe.hits; probe.hits &= probe.hits - 1) {
        uint32_t pos = probe.chunk->value[__builtin_ctz(probe.hits)];

        __builtin_prefetch(kvi_arena_engines(&ix->arena, pos));
    }
}

void kvi_locate_soon(const struct kvi_index *ix, const void *hashes, size_t stride, size_t n)
{
    for (size_t k = 0; k < KV_MIN(n, FIRST); k++)
        kvi_table_prefetch(&ix->names, kv_mix(hash_at(hashes, stride, k)));
}

void kvi_locate_ahead(const struct kvi_index *ix, const void *hashes, size_t stride, size_t i,
                      size_t n)
{
    if (i % AHEAD)
        return;
    if (i == 0)
        kvi_locate_soon(ix, hashes, stride, n);
    for (size_t k = i + FIRST; k < KV_MIN(n, i + FIRST + AHEAD); k++)
        kvi_table_prefetch(&ix->names, kv_mix(hash_at(hashes, stride, k)));
    for (size_t k = i ? i + AHEAD : 0; k < KV_MIN(n, i + 2 * AHEAD); k++)
        prefetch_hits(ix, hash_at(hashes, stride, k));
}

bool kvi_name_in_table(const struct kvi_index *ix, uint64_t hash, uint32_t pos)
{
    struct kvi_probe probe;
    uint32_t other;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while (kvi_probe_next(&probe, &other))
        if (other == pos)
            return true;
    return false;
}

void kvi_names_note_twins(const struct kvi_index *ix, uint64_t hash)
{
    struct kvi_probe probe;
    uint32_t pos;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while (kvi_probe_next(&probe, &pos))
        if (*kvi_arena_engines(&ix->arena, pos) == hash)
            kvi_owner(ix, pos)->flags |= KVI_TWINS;
}

int kvi_name_insert(struct kvi_index *ix, uint64_t hash, uint32_t pos)
{
    return kvi_table_insert(&ix->names, kv_mix(hash), pos);
}

void kvi_names_erase(struct kvi_index *ix, uint32_t pos, uint32_t n)
{
    const uint64_t *engines = kvi_arena_engines(&ix->arena, pos);

    for (uint32_t i = 0; i < KV_MIN(n, ERASE_AHEAD); i++)
        kvi_table_prefetch(&ix->names, kv_mix(engines[i]));
    for (uint32_t i = 0; i < n; i++) {
        if (i + ERASE_AHEAD < n)
            kvi_table_prefetch(&ix->names, kv_mix(engines[i + ERASE_AHEAD]));
        kvi_table_erase(&ix->names, kv_mix(engines[i]), pos + i);
    }
}

static void move_aliases(struct kvi_index *ix, uint32_t holder, uint32_t from, uint32_t to,
                         uint32_t n)
{
    if (!kvi_holder_at(ix, holder)->n_aliases)
        return;
    for (uint32_t i = 0; i < n; i++) {
        long alias = kvi_alias_of_place(ix, holder, from + i);

        if (alias >= 0)
            ix->aliases[alias].pos = to + i;
    }
}

void kvi_names_move(struct kvi_index *ix, const struct kvi_chain *chain, uint32_t extra,
                    uint32_t from, uint32_t to, uint32_t n)
{
    const uint64_t *engines = kvi_arena_engines(&ix->arena, from);

    for (uint32_t i = 0; i < n; i++) {
        if (i + 8 < n)
            kvi_table_prefetch(&ix->names, kv_mix(engines[i + 8]));
        kvi_table_replace(&ix->names, kv_mix(engines[i]), from + i, to + i);
    }
    if (!(chain->flags & KVI_ALIASED) || !ix->n_aliases)
        return;
    for (uint32_t w = 0; w < kvi_who_count(chain); w++)
        move_aliases(ix, kvi_entry_holder(kvi_who_get(kvi_who_at(chain, w))), from, to, n);
    if (extra != UINT32_MAX)
        move_aliases(ix, extra, from, to, n);
}
