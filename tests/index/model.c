// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#define MODEL_DOUBT 64 /* see copies.c */

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

struct model *model_new(void)
{
    struct model *m = calloc(1, sizeof(*m));

    if (!m)
        abort();
    m->n_places = 1;
    m->places_capacity = 16;
    m->places = calloc(m->places_capacity, sizeof(*m->places));
    return m;
}

void model_free(struct model *m)
{
    for (size_t i = 0; i < m->n_holders; i++)
        free(m->holders[i].blocks);
    free(m->holders);
    free(m->places);
    free(m);
}

uint32_t model_child(struct model *m, uint32_t parent, uint64_t local)
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

struct model_holder *model_holder(struct model *m, struct kv_holder key, bool add)
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

static struct model_block *model_in_tree(const struct model_holder *h, uint64_t name)
{
    struct model_block *b = model_by_name(h, name);

    return b && !b->parked ? b : NULL;
}

static struct model_block *model_by_place(const struct model_holder *h, uint32_t place)
{
    for (size_t i = 0; h && i < h->n; i++)
        if (!h->blocks[i].parked && h->blocks[i].place == place)
            return &h->blocks[i];
    return NULL;
}

static size_t model_count(const struct model_holder *h, bool parked)
{
    size_t n = 0;

    for (size_t i = 0; h && i < h->n; i++)
        n += h->blocks[i].parked == parked;
    return n;
}

static struct model_block *model_new_block(struct model_holder *h, uint64_t name)
{
    h->blocks = model_grow(h->blocks, &h->capacity, h->n + 1, sizeof(*h->blocks));
    h->blocks[h->n] = (struct model_block){.name = name};
    return &h->blocks[h->n++];
}

static void model_delete(struct model_holder *h, struct model_block *b)
{
    *b = h->blocks[--h->n];
}

/* Forget @place and all below it. */
static void model_forget_below(const struct model *m, struct model_holder *h, uint32_t place)
{
    size_t kept = 0;

    for (size_t i = 0; i < h->n; i++)
        if (h->blocks[i].parked || !model_is_above(m, place, h->blocks[i].place))
            h->blocks[kept++] = h->blocks[i];
    h->n = kept;
}

/* -- copies ------------------------------------------------------------------------------------ */

static void model_imply(struct model_holder *h, int tier, uint32_t source)
{
    for (size_t i = 0; i < h->n; i++)
        if (h->blocks[i].parked || h->blocks[i].mask >> tier & 1)
            return;
    h->tier[tier].implied = source;
}

/* The copies of a block about which nothing is known. */
static void model_reset_copies(const struct model_holder *h, struct model_block *b, uint32_t mask)
{
    for (int t = 0; t < KV_N_TIERS; t++) {
        if (!(mask >> t & 1))
            continue;
        memset(b->copies[t], 0, sizeof(b->copies[t]));
        b->copies[t][h->tier[t].implied] = 1;
        b->taken[t] = false;
    }
}

static void model_add_copy(struct model_holder *h, struct model_block *b, int tier, uint32_t source,
                           bool had, bool counted)
{
    uint32_t *count = &b->copies[tier][source];

    if (!had) {
        memset(b->copies[tier], 0, sizeof(b->copies[tier]));
        b->taken[tier] = false;
        *count = 1;
        return;
    }
    if (!counted) {
        *count = *count ? *count : 1;
        return;
    }
    if (source == 0 && *count && b->taken[tier]) {
        b->taken[tier] = false;
        if (!h->tier[tier].each)
            ++h->tier[tier].n_stored_again;
    }
    if (!*count || source == 0)
        ++*count;
}

/* Returns whether the source had one; *@ret_last: nobody has one any more. */
static bool model_take_copy(struct model_holder *h, struct model_block *b, int tier,
                            uint32_t source, uint32_t left, bool *ret_last)
{
    uint32_t *count = &b->copies[tier][source], others = 0, before = *count;

    for (uint32_t s = 0; s < MODEL_SOURCES; s++)
        others += s == source ? 0 : b->copies[tier][s];
    *ret_last = false;
    if (!before)
        return false;
    if (left == UINT32_MAX) {
        left = before - 1;
        if (source == 0 && b->taken[tier])
            h->tier[tier].each = true;
        b->taken[tier] = b->taken[tier] || (source == 0 && left);
    } else if (source == 0 && left) { /* with a record: see copies.c */
        b->taken[tier] = b->taken[tier] || before > 1 || others || h->tier[tier].implied != source;
    }
    if (source == 0 && !left)
        b->taken[tier] = false;
    *count = left;
    *ret_last = !left && !others;
    return true;
}

/* -- a block leaves ---------------------------------------------------------------------------- */

static void model_park_below(struct model *m, struct model_holder *h, uint32_t place)
{
    for (size_t i = 0; i < h->n; i++) { /* names of parents first: they go, too */
        struct model_block *b = &h->blocks[i];

        if (!b->parked && b->place != place && model_is_above(m, place, b->place))
            b->parent = model_by_place(h, m->places[b->place].parent)->name;
    }
    for (size_t i = 0; i < h->n; i++) {
        struct model_block *b = &h->blocks[i];

        if (b->parked || b->place == place || !model_is_above(m, place, b->place))
            continue;
        b->local = m->places[b->place].local;
        b->seq = ++m->seq;
        b->parked = true;
    }
}

static void model_lose(struct model *m, struct model_holder *h, uint64_t name, int tier)
{
    struct model_block *b = model_by_name(h, name);

    b->mask &= ~(1u << tier);
    memset(b->copies[tier], 0, sizeof(b->copies[tier]));
    b->taken[tier] = false;
    if (b->mask)
        return;
    if (!b->parked && m->forgets) {
        model_forget_below(m, h, b->place);
        return;
    }
    if (!b->parked)
        model_park_below(m, h, b->place);
    model_delete(h, b);
}

/* Tiers in which nothing has shown that each copy's removal is announced, but much that not. */
uint64_t model_doubted(const struct model_holder *h)
{
    uint64_t n = 0;

    for (int t = 0; t < KV_N_TIERS; t++)
        n += !h->tier[t].each && h->tier[t].n_stored_again >= MODEL_DOUBT;
    return n;
}

/* -- stores ------------------------------------------------------------------------------------ */

struct model_store_args {
    struct model *m;
    struct kv_holder key;
    int tier;
    uint32_t source;
    bool counted;
    struct kvi_stored *ret;
};

/* @name, in the tree at its place now: @b is the block that had the place, or NULL; @parked the one
 * that had the name, or NULL. Returns the block. */
static struct model_block *model_put(struct model_holder *h, uint32_t place, uint64_t name)
{
    struct model_block *b = model_by_place(h, place), *parked = model_by_name(h, name), old;

    if (parked && !parked->parked)
        parked = NULL; /* of the path, and gets another name */
    if (!b && parked) {
        parked->parked = false;
        parked->place = place;
        return parked;
    }
    if (!b) {
        b = model_new_block(h, name);
        b->place = place;
        return b;
    }
    if (b->name != name)
        model_reset_copies(h, b, b->mask);
    b->name = name;
    if (parked) {
        old = *parked;
        for (int t = 0; t < KV_N_TIERS; t++) {
            if (old.mask >> t & 1) {
                memcpy(b->copies[t], old.copies[t], sizeof(b->copies[t]));
                b->taken[t] = old.taken[t];
            }
        }
        b->mask |= old.mask;
        model_delete(h, parked);
    }
    return model_by_place(h, place);
}

static void model_attach(struct model *m, struct model_holder *h, uint64_t name)
{
    for (;;) {
        const struct model_block *above = model_in_tree(h, name);
        struct model_block *first = NULL;
        uint32_t place;
        uint64_t child;

        for (size_t i = 0; above && i < h->n; i++) {
            struct model_block *b = &h->blocks[i];

            if (b->parked && b->parent == name && (!first || b->seq < first->seq))
                first = b;
        }
        if (!first)
            return;
        place = model_child(m, above->place, first->local);
        child = first->name;
        (void)model_put(h, place, child);
        model_attach(m, h, child);
    }
}

/* One chain below a parent in the tree. */
static int model_store_part(struct model_store_args *a, const uint64_t *parent,
                            const struct kv_block *blocks, size_t n)
{
    struct model *m = a->m;
    struct model_holder *h = model_holder(m, a->key, false);
    const struct model_block *above = parent ? model_in_tree(h, *parent) : NULL;
    uint32_t top = above ? above->place : 0, *path = malloc((n + 1) * sizeof(*path));
    uint32_t *gone = malloc((n + 1) * sizeof(*gone));
    size_t n_gone = 0;
    int rc = parent && !above ? -ENOENT : 0;

    for (size_t i = 0; i < n && !rc; i++) {
        path[i] = model_child(m, i ? path[i - 1] : top, blocks[i].tokens_hash);
        if (parent && blocks[i].hash == *parent)
            rc = -EINVAL;
        for (size_t k = 0; k < i; k++)
            if (blocks[k].hash == blocks[i].hash)
                rc = -EINVAL;
    }
    for (size_t i = 0; i < n && !rc; i++) {
        const struct model_block *old = model_in_tree(h, blocks[i].hash);
        bool on_path = false;

        for (size_t k = 0; old && k < n; k++)
            on_path = on_path || path[k] == old->place;
        if (old && model_is_above(m, old->place, top))
            rc = -EINVAL;
        else if (old && !on_path)
            gone[n_gone++] = old->place;
    }
    if (!rc && n) {
        h = model_holder(m, a->key, true);
        model_imply(h, a->tier, a->source);
    }
    for (size_t i = 0; i < n_gone && !rc; i++)
        model_forget_below(m, h, gone[i]);
    /* Names first: none of the path's is in the way of another. */
    for (size_t i = 0; i < n && !rc; i++) {
        struct model_block *b = model_by_place(h, path[i]);

        if (b && b->name != blocks[i].hash) {
            a->ret->renamed++;
            model_reset_copies(h, b, b->mask);
            b->name = UINT64_MAX - i;
        }
    }
    for (size_t i = 0; i < n && !rc; i++) {
        const struct model_block *was = model_by_name(h, blocks[i].hash),
                                 *at = model_by_place(h, path[i]);
        bool in_tree = at && at->mask >> a->tier & 1;
        bool had = in_tree || (was && was->mask >> a->tier & 1);
        struct model_block *b = model_put(h, path[i], blocks[i].hash);

        model_add_copy(h, b, a->tier, a->source, had, a->counted);
        a->ret->added += !in_tree;
        a->ret->duplicate += in_tree;
        b->mask |= 1u << a->tier;
    }
    for (size_t i = n; i-- > 0 && !rc;)
        model_attach(m, h, blocks[i].hash);
    free(path);
    free(gone);
    return rc;
}

/* Block by block: below a parent that isn't in the tree, or in a lower tier. */
static int model_store_parts(struct model_store_args *a, const uint64_t *parent,
                             const struct kv_block *blocks, size_t n)
{
    struct model *m = a->m;
    struct model_holder *h = model_holder(m, a->key, true);
    bool keeps = a->tier != KV_TIER_DEVICE;
    int rc = 0;

    model_imply(h, a->tier, a->source);
    for (size_t i = 0; i < n && !rc; i++) {
        struct model_block *b = model_by_name(h, blocks[i].hash);
        bool hangs = parent && !model_in_tree(h, *parent), had;

        if (b && (keeps || (hangs && !b->parked))) {
            had = b->mask >> a->tier & 1;
            a->ret->added += !had;
            a->ret->duplicate += had;
        } else if (hangs) {
            if (!b)
                b = model_new_block(h, blocks[i].hash);
            had = b->mask >> a->tier & 1;
            b->parked = true;
            b->parent = *parent;
            b->local = blocks[i].tokens_hash;
            b->seq = ++m->seq;
            a->ret->parked++;
        } else {
            size_t run = 1;

            while (i + run < n && !(keeps && model_by_name(h, blocks[i + run].hash)))
                run++;
            rc = model_store_part(a, parent, blocks + i, run);
            i += run - 1;
            parent = &blocks[i].hash;
            continue;
        }
        model_add_copy(h, b, a->tier, a->source, had, a->counted);
        b->mask |= 1u << a->tier;
        parent = &blocks[i].hash;
    }
    return rc;
}

int model_add(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
              bool counted, const uint64_t *parent, const struct kv_block *blocks, size_t n,
              struct kvi_stored *ret)
{
    struct model_store_args a = {m, key, (int)tier, source, counted, ret};
    int rc = -ENOENT;

    *ret = (struct kvi_stored){0};
    if (tier == KV_TIER_DEVICE || !model_holder(m, key, false))
        rc = model_store_part(&a, parent, blocks, n);
    if (rc == -ENOENT &&
        !(m->forgets && (tier == KV_TIER_DEVICE || !model_holder(m, key, false)))) {
        for (size_t i = 0; i < n; i++) {
            if (parent && blocks[i].hash == *parent)
                return -EINVAL;
            for (size_t k = 0; k < i; k++)
                if (blocks[k].hash == blocks[i].hash)
                    return -EINVAL;
        }
        if (m->forgets && parent && !model_in_tree(model_holder(m, key, false), *parent))
            return -ENOENT;
        rc = model_store_parts(&a, parent, blocks, n);
    }
    return rc;
}

int model_store(struct model *m, struct kv_holder key, enum kv_tier tier, const uint64_t *parent,
                const struct kv_block *blocks, size_t n, struct kvi_stored *ret)
{
    return model_add(m, key, tier, 0, false, parent, blocks, n, ret);
}

long model_add_known(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
                     bool counted, const uint64_t *hashes, size_t n)
{
    struct model_holder *h = model_holder(m, key, false);
    long found = 0;

    if (h)
        model_imply(h, (int)tier, source);
    for (size_t i = 0; i < n; i++) {
        struct model_block *b = model_by_name(h, hashes[i]);
        bool had = b && b->mask >> tier & 1;

        found += b != NULL;
        if (b)
            model_add_copy(h, b, (int)tier, source, had, counted);
        if (b)
            b->mask |= 1u << tier;
    }
    return found;
}

long model_store_known(struct model *m, struct kv_holder key, enum kv_tier tier,
                       const uint64_t *hashes, size_t n)
{
    return model_add_known(m, key, tier, 0, false, hashes, n);
}

long model_take(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
                const uint64_t *hashes, const uint32_t *left, size_t n)
{
    struct model_holder *h = model_holder(m, key, false);
    long found = 0;

    for (size_t i = 0; i < n; i++) {
        struct model_block *b = model_by_name(h, hashes[i]);
        bool last;

        if (!b || !(b->mask >> tier & 1) ||
            !model_take_copy(h, b, (int)tier, source, left ? left[i] : UINT32_MAX, &last))
            continue;
        found++;
        if (last)
            model_lose(m, h, hashes[i], (int)tier);
    }
    return found;
}

long model_remove(struct model *m, struct kv_holder key, enum kv_tier tier, const uint64_t *hashes,
                  size_t n)
{
    return model_take(m, key, tier, 0, hashes, NULL, n);
}

static void model_forget_doubt(struct model_holder *h)
{
    for (int t = 0; t < KV_N_TIERS; t++)
        h->tier[t].n_stored_again = 0;
}

void model_clear(struct model *m, struct kv_holder key)
{
    struct model_holder *h = model_holder(m, key, false);

    if (!h)
        return;
    h->n = 0;
    model_forget_doubt(h);
}

void model_clear_tiers(struct model *m, struct kv_holder key, uint32_t tiers, uint32_t source)
{
    struct model_holder *h = model_holder(m, key, false);
    bool again = h != NULL, last;

    while (again) {
        again = false;
        for (size_t i = 0; i < h->n && !again; i++) {
            for (int t = 0; t < KV_N_TIERS && !again; t++) {
                struct model_block *b = &h->blocks[i];

                if (!(tiers >> t & 1) || !(b->mask >> t & 1) ||
                    !model_take_copy(h, b, t, source, 0, &last))
                    continue;
                again = true;
                if (last)
                    model_lose(m, h, b->name, t);
            }
        }
    }
    if (h && !h->n)
        model_forget_doubt(h);
}

int model_remove_holders(struct model *m, uint64_t worker, const uint32_t *rank)
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

void model_find(struct model *m, const struct model_holder *h, const uint64_t *hashes, size_t n,
                uint32_t reach[KV_N_TIERS])
{
    uint32_t place = 0;

    memset(reach, 0, KV_N_TIERS * sizeof(*reach));
    for (uint32_t i = 0; i < n; i++) {
        const struct model_block *b;

        place = model_child(m, place, hashes[i]);
        b = model_by_place(h, place);
        if (!b)
            break;
        reach[0] += reach[0] == i && b->mask & 1;
        for (int t = 1; t < KV_N_TIERS; t++)
            if (reach[t] == i && (reach[0] > i || b->mask & ((2u << t) - 2)))
                reach[t] = i + 1;
    }
}

/* -- comparing: each returns NULL or what differs ---------------------------------------------- */

char model_text[256];

const char *model_compare_find(struct model *m, struct kvi_index *ix, struct kvi_matches *matches,
                               const uint64_t *hashes, size_t n)
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
        if (found && found->blocks != model_count(h, false))
            return MODEL_DIFFERS("holder %zu: %zu blocks, model %zu", i, (size_t)found->blocks,
                                 model_count(h, false));
    }
    return expected == matches->n ? NULL
                                  : MODEL_DIFFERS("%zu matches, model %zu", matches->n, expected);
}

const char *model_compare_stats(struct model *m, struct kvi_index *ix)
{
    bool *seen = calloc(m->n_places, 1);
    struct kvi_stats got = KVI_STATS_INIT, want = {.size = sizeof(want), .holders = m->n_holders};

    for (size_t i = 0; i < m->n_holders; i++) {
        const struct model_holder *h = &m->holders[i];

        want.parked += model_count(h, true);
        for (size_t k = 0; k < h->n; k++) {
            if (h->blocks[k].parked)
                continue;
            want.holder_blocks++;
            want.blocks += !seen[h->blocks[k].place];
            seen[h->blocks[k].place] = true;
            for (int t = 0; t < KV_N_TIERS; t++)
                want.tier_blocks[t] += h->blocks[k].mask >> t & 1;
        }
    }
    free(seen);
    kvi_get_stats(ix, &got);
    for (size_t i = 0; i < m->n_holders; i++)
        if (kvi_holder_blocks(ix, m->holders[i].key) != model_count(&m->holders[i], false))
            return MODEL_DIFFERS("kvi_holder_blocks of %zu", i);
    if (got.holders != want.holders)
        return MODEL_DIFFERS("holders %zu, model %zu", (size_t)got.holders, (size_t)want.holders);
    if (got.blocks != want.blocks)
        return MODEL_DIFFERS("blocks %zu, model %zu", (size_t)got.blocks, (size_t)want.blocks);
    if (got.holder_blocks != want.holder_blocks)
        return MODEL_DIFFERS("holder_blocks %zu, model %zu", (size_t)got.holder_blocks,
                             (size_t)want.holder_blocks);
    if (got.parked != want.parked)
        return MODEL_DIFFERS("parked %zu, model %zu", (size_t)got.parked, (size_t)want.parked);
    if (memcmp(got.tier_blocks, want.tier_blocks, sizeof(want.tier_blocks)) != 0)
        return MODEL_DIFFERS("tier_blocks differ");
    return NULL;
}
