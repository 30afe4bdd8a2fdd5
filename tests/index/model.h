// SPDX-License-Identifier: Apache-2.0
/**
 * What kv_index.h says, written down as plainly as possible: for each holder an unordered list of
 * the places it has, each with its tiers and name; everything is found by looking through the list.
 * Slow, and easy to see through. Used by the tests and the fuzzer.
 */
#ifndef KV_TEST_INDEX_MODEL_H
#define KV_TEST_INDEX_MODEL_H

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv_index.h"

/* Places are interned: a number for each path that was ever mentioned. 0 is the root. */
struct model_place {
    uint32_t parent;
    uint64_t local;
    uint32_t next_same; /* hash chain */
};

struct model_block {
    uint32_t place;
    uint32_t mask;
    uint64_t name;
};

struct model_holder {
    struct kv_holder key;
    struct model_block *blocks;
    size_t n, capacity;
};

#define MODEL_BUCKETS 65536
struct model {
    struct model_place *places;
    uint32_t n_places, places_capacity;
    uint32_t bucket[MODEL_BUCKETS];
    struct model_holder *holders;
    size_t n_holders;
};

static void *model_grow(void *array, size_t *capacity, size_t n, size_t size)
{
    if (n <= *capacity)
        return array;
    *capacity = n * 2;
    array = realloc(array, *capacity * size);
    if (!array)
        abort();
    return array;
}

static struct model *model_new(void)
{
    struct model *m = calloc(1, sizeof(*m));

    if (!m)
        abort();
    m->n_places = 1;
    m->places_capacity = 16;
    m->places = calloc(m->places_capacity, sizeof(*m->places));
    return m;
}

static void model_free(struct model *m)
{
    for (size_t i = 0; i < m->n_holders; i++)
        free(m->holders[i].blocks);
    free(m->holders);
    free(m->places);
    free(m);
}

static uint32_t model_child(struct model *m, uint32_t parent, uint64_t local)
{
    uint32_t *bucket = &m->bucket[(uint32_t)((parent * UINT64_C(0x9e3779b97f4a7c15) ^
                                              local * UINT64_C(0xc2b2ae3d27d4eb4f)) >>
                                             40) %
                                  MODEL_BUCKETS];
    size_t capacity = m->places_capacity;

    for (uint32_t p = *bucket; p; p = m->places[p].next_same)
        if (m->places[p].parent == parent && m->places[p].local == local)
            return p;
    m->places = model_grow(m->places, &capacity, m->n_places + 1, sizeof(*m->places));
    m->places_capacity = (uint32_t)capacity;
    m->places[m->n_places] = (struct model_place){parent, local, *bucket};
    *bucket = m->n_places;
    return m->n_places++;
}

static bool model_is_above(const struct model *m, uint32_t upper, uint32_t place)
{
    for (; place; place = m->places[place].parent)
        if (place == upper)
            return true;
    return false;
}

static struct model_holder *model_holder(struct model *m, struct kv_holder key, bool add)
{
    for (size_t i = 0; i < m->n_holders; i++)
        if (m->holders[i].key.worker == key.worker && m->holders[i].key.rank == key.rank)
            return &m->holders[i];
    if (!add)
        return NULL;
    m->holders = realloc(m->holders, (m->n_holders + 1) * sizeof(*m->holders));
    m->holders[m->n_holders] = (struct model_holder){.key = key};
    return &m->holders[m->n_holders++];
}

static struct model_block *model_by_name(const struct model_holder *h, uint64_t name)
{
    for (size_t i = 0; h && i < h->n; i++)
        if (h->blocks[i].name == name)
            return &h->blocks[i];
    return NULL;
}

static struct model_block *model_by_place(const struct model_holder *h, uint32_t place)
{
    for (size_t i = 0; h && i < h->n; i++)
        if (h->blocks[i].place == place)
            return &h->blocks[i];
    return NULL;
}

static void model_remove_below(const struct model *m, struct model_holder *h, uint32_t place)
{
    size_t kept = 0;

    for (size_t i = 0; i < h->n; i++)
        if (!model_is_above(m, place, h->blocks[i].place))
            h->blocks[kept++] = h->blocks[i];
    h->n = kept;
}

static int model_store(struct model *m, struct kv_holder key, enum kv_tier tier,
                       const uint64_t *parent, const struct kv_block *blocks, size_t n,
                       struct kvi_stored *ret)
{
    struct model_holder *h = model_holder(m, key, false);
    const struct model_block *above = parent ? model_by_name(h, *parent) : NULL;
    uint32_t top = above ? above->place : 0, *path = malloc((n + 1) * sizeof(*path));
    uint32_t *gone = malloc((n + 1) * sizeof(*gone));
    size_t n_gone = 0;
    int rc = parent && !above ? -ENOENT : 0;

    *ret = (struct kvi_stored){0};
    for (size_t i = 0; i < n && !rc; i++) {
        path[i] = model_child(m, i ? path[i - 1] : top, blocks[i].tokens_hash);
        if (parent && blocks[i].hash == *parent)
            rc = -EINVAL;
        for (size_t k = 0; k < i; k++)
            if (blocks[k].hash == blocks[i].hash)
                rc = -EINVAL;
    }
    for (size_t i = 0; i < n && !rc; i++) {
        const struct model_block *old = model_by_name(h, blocks[i].hash);
        bool on_path = false;

        for (size_t k = 0; old && k < n; k++)
            on_path = on_path || path[k] == old->place;
        if (old && model_is_above(m, old->place, top))
            rc = -EINVAL;
        else if (old && !on_path)
            gone[n_gone++] = old->place;
    }
    if (!rc && n)
        h = model_holder(m, key, true);
    for (size_t i = 0; i < n && !rc; i++) {
        struct model_block *b = model_by_place(h, path[i]);

        if (!b) {
            h->blocks = model_grow(h->blocks, &h->capacity, h->n + 1, sizeof(*h->blocks));
            b = &h->blocks[h->n++];
            *b = (struct model_block){path[i], 0, blocks[i].hash};
        }
        ret->renamed += b->name != blocks[i].hash;
        b->name = blocks[i].hash;
        ret->added += !(b->mask >> tier & 1);
        ret->duplicate += b->mask >> tier & 1;
        b->mask |= 1u << tier;
    }
    for (size_t i = 0; i < n_gone && !rc; i++)
        model_remove_below(m, h, gone[i]);
    free(path);
    free(gone);
    return rc;
}

static long model_store_known(struct model *m, struct kv_holder key, enum kv_tier tier,
                              const uint64_t *hashes, size_t n)
{
    const struct model_holder *h = model_holder(m, key, false);
    long found = 0;

    for (size_t i = 0; i < n; i++) {
        struct model_block *b = model_by_name(h, hashes[i]);

        found += b != NULL;
        if (b)
            b->mask |= 1u << tier;
    }
    return found;
}

static long model_remove(struct model *m, struct kv_holder key, enum kv_tier tier,
                         const uint64_t *hashes, size_t n)
{
    struct model_holder *h = model_holder(m, key, false);
    long found = 0;

    for (size_t i = 0; i < n; i++) {
        struct model_block *b = model_by_name(h, hashes[i]);

        if (!b || !(b->mask >> tier & 1))
            continue;
        found++;
        b->mask &= ~(1u << tier);
        if (!b->mask)
            model_remove_below(m, h, b->place);
    }
    return found;
}

static void model_clear(struct model *m, struct kv_holder key)
{
    struct model_holder *h = model_holder(m, key, false);

    if (h)
        h->n = 0;
}

static int model_remove_holders(struct model *m, uint64_t worker, const uint32_t *rank)
{
    size_t kept = 0, n = m->n_holders;

    for (size_t i = 0; i < n; i++) {
        struct model_holder *h = &m->holders[i];

        if (h->key.worker == worker && (!rank || h->key.rank == *rank))
            free(h->blocks);
        else
            m->holders[kept++] = *h;
    }
    m->n_holders = kept;
    return kept < n ? 0 : -ENOENT;
}

/* One holder's answer. */
static void model_find(struct model *m, const struct model_holder *h, const uint64_t *hashes,
                       size_t n, uint32_t reach[KV_N_TIERS])
{
    uint32_t place = 0;

    memset(reach, 0, KV_N_TIERS * sizeof(*reach));
    for (uint32_t i = 0; i < n; i++) {
        const struct model_block *b;

        place = model_child(m, place, hashes[i]);
        b = model_by_place(h, place);
        if (!b)
            break;
        for (int t = 0; t < KV_N_TIERS; t++)
            if (reach[t] == i && b->mask & ((2u << t) - 1))
                reach[t] = i + 1;
    }
}

/* -- comparing: each returns NULL or what differs ---------------------------------------------- */

static char model_text[256];
#define MODEL_DIFFERS(...) (snprintf(model_text, sizeof(model_text), __VA_ARGS__), model_text)

static const char *model_compare_find(struct model *m, struct kvi_index *ix,
                                      struct kvi_matches *matches, const uint64_t *hashes, size_t n)
{
    size_t expected = 0;

    if (kvi_find(ix, hashes, n, matches))
        return MODEL_DIFFERS("kvi_find failed");
    for (size_t i = 0; i < m->n_holders; i++) {
        const struct model_holder *h = &m->holders[i];
        const struct kvi_match *found = NULL;
        uint32_t reach[KV_N_TIERS];

        model_find(m, h, hashes, n, reach);
        expected += reach[KV_N_TIERS - 1] > 0;
        for (size_t k = 0; k < matches->n; k++)
            if (matches->items[k].holder.worker == h->key.worker &&
                matches->items[k].holder.rank == h->key.rank)
                found = &matches->items[k];
        if (!found && reach[KV_N_TIERS - 1])
            return MODEL_DIFFERS("holder %zu not found, model has %u", i, reach[KV_N_TIERS - 1]);
        if (found && memcmp(found->reach, reach, sizeof(reach)) != 0)
            return MODEL_DIFFERS("holder %zu: reach %u %u %u %u, model %u %u %u %u", i,
                                 found->reach[0], found->reach[1], found->reach[2], found->reach[3],
                                 reach[0], reach[1], reach[2], reach[3]);
        if (found && found->blocks != h->n)
            return MODEL_DIFFERS("holder %zu: %zu blocks, model %zu", i, (size_t)found->blocks,
                                 h->n);
    }
    return expected == matches->n ? NULL
                                  : MODEL_DIFFERS("%zu matches, model %zu", matches->n, expected);
}

static const char *model_compare_stats(struct model *m, struct kvi_index *ix)
{
    bool *seen = calloc(m->n_places, 1);
    struct kvi_stats got, want = {.holders = m->n_holders};

    for (size_t i = 0; i < m->n_holders; i++) {
        const struct model_holder *h = &m->holders[i];

        want.holder_blocks += h->n;
        for (size_t k = 0; k < h->n; k++) {
            want.blocks += !seen[h->blocks[k].place];
            seen[h->blocks[k].place] = true;
            for (int t = 0; t < KV_N_TIERS; t++)
                want.tier_blocks[t] += h->blocks[k].mask >> t & 1;
        }
    }
    free(seen);
    kvi_get_stats(ix, &got);
    for (size_t i = 0; i < m->n_holders; i++)
        if (kvi_holder_blocks(ix, m->holders[i].key) != m->holders[i].n)
            return MODEL_DIFFERS("kvi_holder_blocks of %zu", i);
    if (got.holders != want.holders)
        return MODEL_DIFFERS("holders %zu, model %zu", (size_t)got.holders, (size_t)want.holders);
    if (got.blocks != want.blocks)
        return MODEL_DIFFERS("blocks %zu, model %zu", (size_t)got.blocks, (size_t)want.blocks);
    if (got.holder_blocks != want.holder_blocks)
        return MODEL_DIFFERS("holder_blocks %zu, model %zu", (size_t)got.holder_blocks,
                             (size_t)want.holder_blocks);
    if (memcmp(got.tier_blocks, want.tier_blocks, sizeof(want.tier_blocks)) != 0)
        return MODEL_DIFFERS("tier_blocks differ");
    return NULL;
}

#endif
