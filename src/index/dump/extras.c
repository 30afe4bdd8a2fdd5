// SPDX-License-Identifier: Apache-2.0
/*
 * Dump the state beside the tree, one slice per lock. Items that stay are reported;
 * items that come or go meanwhile may be reported or not.
 *
 * A holder's parked blocks are reported from the oldest on: the order in which they are attached or
 * forgotten. Records of copies are reported from the last to the first: a record that moves into a
 * dropped one's place is then reported later, or again. Each record brings all copies of its block,
 * so that a block whose copies change is reported as it was at one moment. Consecutive records of
 * one block are reported once, as the lock is held between them.
 */
#include <string.h>

#include "index/tree/windows.h"

#define SLICE 256u

struct slice {
    struct kvi_extra items[SLICE];
    uint32_t n;
    struct kvi_source_copies *sources; /* sources of the items, one after the other */
    size_t n_sources, capacity;
    int rc;
};

static void add(struct slice *slice, struct kvi_extra extra)
{
    slice->items[slice->n++] = extra;
}

/* -- parked blocks ----------------------------------------------------------------------------- */

/* The parked blocks of one holder by name, oldest first. */
struct parked_names {
    struct kv_holder key;
    uint64_t *items;
    size_t n, capacity;
};

/* Copy the names of the next holder from id *@id on. Returns 1, 0 at the end, or -ENOMEM. */
static int next_parked(struct kvi_index *ix, size_t *id, struct parked_names *names)
{
    const struct kvi_holder *holder = NULL;
    uint32_t at;

    names->n = 0;
    for (; *id < ix->holders.n_used && !(holder && holder->n_parked && !holder->main); ++*id)
        holder = kvi_holder_at(ix, (uint32_t)*id);
    if (!holder || !holder->n_parked || holder->main)
        return 0;
    if (kvi_mem_grow(&ix->mem, (void **)&names->items, &names->capacity, holder->n_parked,
                     sizeof(names->items[0])))
        return -ENOMEM;
    names->key = holder->key;
    at = holder->oldest;
    for (; names->n < holder->n_parked; at = ix->parking.items[at].newer)
        names->items[names->n++] = ix->parking.items[at].hash;
    return 1;
}

/* Add the blocks that are still parked, of the names from *@i on. */
static void copy_parked(const struct kvi_index *ix, const struct parked_names *names, size_t *i,
                        struct slice *slice)
{
    const struct kvi_holder *holder = kvi_holder_find(ix, names->key);

    for (; *i < names->n && slice->n < SLICE; ++*i) {
        const struct kvi_parked *parked =
            holder ? kvi_parked_find(ix, holder, names->items[*i]) : NULL;

        if (parked)
            add(slice, (struct kvi_extra){.holder = names->key,
                                          .hash = parked->hash,
                                          .parent = parked->parent,
                                          .tokens_hash = parked->local,
                                          .tiers = parked->mask});
    }
}

/* -- sources ----------------------------------------------------------------------------------- */

/* Return a fact about a tier of a holder or, for a part, about one of its windows. */
static struct kvi_extra fact_of(const struct kvi_holder *holder, uint32_t tier)
{
    const struct kvi_windows *windows = holder->main ? kvi_windows_of(holder->main) : NULL;
    const struct kvi_window *window;
    struct kvi_extra extra = {.holder = holder->key, .tier = (enum kv_tier)tier};
    uint32_t at = 0;

    if (!windows)
        return extra;
    while (windows->parts[at / KVI_PARTS][at % KVI_PARTS] != holder)
        at++;
    extra.tier = (enum kv_tier)(at / KVI_PARTS);
    extra.in_window = true;
    window = &windows->items[at % KVI_PARTS * KVI_PART_WINDOWS + tier - kvi_window_tier(0)];
    extra.window.group = window->group;
    extra.window.part = window->part;
    return extra;
}

static bool has_tier(const struct kvi_holder *holder, uint32_t tier)
{
    const struct kvi_holder_tier *t = &holder->tier[tier];

    return t->implied || t->counts || t->n_stored_again;
}

/* Add the facts about the tiers of a holder, such as a part of a rank. */
static void copy_facts(const struct kvi_holder *holder, struct slice *slice)
{
    for (uint32_t t = 0; t < KV_N_TIERS; t++) {
        struct kvi_extra extra;

        if (!has_tier(holder, t))
            continue;
        extra = fact_of(holder, t);
        extra.kind = KVI_EXTRA_TIER;
        extra.implied = holder->tier[t].implied;
        extra.counting = holder->tier[t].counts;
        extra.stored_again = holder->tier[t].n_stored_again;
        add(slice, extra);
    }
}

/* Add facts about the tiers of holders from id *@at on. Returns true when more follow. */
static bool copy_tiers(const struct kvi_index *ix, size_t *at, struct slice *slice)
{
    for (; *at < ix->holders.n_used && slice->n + KV_N_TIERS <= SLICE; ++*at) {
        const struct kvi_holder *holder = kvi_holder_at(ix, (uint32_t)*at);

        if (holder)
            copy_facts(holder, slice);
    }
    return *at < ix->holders.n_used;
}

static void add_source(void *arg, const struct kvi_copy *copy)
{
    struct slice *slice = arg;
    struct kvi_source_copies *grown = slice->sources;

    if (slice->n_sources == slice->capacity) {
        slice->capacity = KV_MAX(2 * slice->capacity, (size_t)SLICE);
        grown = realloc(grown, slice->capacity * sizeof(*grown));
    }
    if (!grown) {
        slice->rc = -ENOMEM;
        slice->capacity /= 2;
        return;
    }
    slice->sources = grown;
    grown[slice->n_sources++] = (struct kvi_source_copies){copy->source, copy->count, copy->taken};
    slice->items[slice->n - 1].n_sources++;
    if (!copy->source)
        slice->items[slice->n - 1].copies = copy->count;
}

/* Return true when the last item of the slice is @extra's block with all its sources. */
static bool is_told(const struct slice *slice, const struct kvi_extra *extra)
{
    const struct kvi_extra *last = slice->n ? &slice->items[slice->n - 1] : NULL;

    return last && last->kind == extra->kind && last->hash == extra->hash &&
           last->tier == extra->tier && last->holder.worker == extra->holder.worker &&
           last->holder.rank == extra->holder.rank && last->in_window == extra->in_window &&
           last->window.group == extra->window.group && last->window.part == extra->window.part;
}

static void copy_one(const struct kvi_index *ix, const struct kvi_copy *copy, struct slice *slice)
{
    const struct kvi_holder *holder = kvi_holder_at(ix, copy->holder);
    enum kvi_said said = kvi_copies_say(ix, copy);
    bool plain = said == KVI_SAID_COUNT;
    struct kvi_extra extra;

    if (said == KVI_SAID_NOTHING || (plain && holder->main)) /* reported with the window */
        return;
    extra = fact_of(holder, copy->tier);
    extra.kind = plain ? KVI_EXTRA_BLOCK : KVI_EXTRA_COPIES;
    extra.hash = copy->hash;
    extra.copies = plain ? copy->count : 0;
    if (!plain && is_told(slice, &extra))
        return;
    add(slice, extra);
    if (!plain)
        kvi_copies_each(ix, copy, add_source, slice);
}

/* Add records of copies below number *@left. Returns true when more follow. */
static bool copy_copies(const struct kvi_index *ix, size_t *left, struct slice *slice)
{
    *left = KV_MIN(*left, ix->copies.n);
    while (*left && slice->n < SLICE && !slice->rc)
        copy_one(ix, &ix->copies.items[--*left], slice);
    return *left > 0;
}

/* -- telling ----------------------------------------------------------------------------------- */

typedef bool (*copy_fn)(const struct kvi_index *ix, size_t *at, struct slice *slice);

static int tell(struct slice *slice, kvi_extra_fn fn, void *arg)
{
    const struct kvi_source_copies *sources = slice->sources;
    int rc = slice->rc;

    for (uint32_t i = 0; i < slice->n && !rc; i++) {
        slice->items[i].sources = sources;
        sources += slice->items[i].n_sources;
        rc = fn(arg, &slice->items[i]);
    }
    slice->n = 0;
    slice->n_sources = 0;
    return rc;
}

/* Dump all records of a kind. */
static int dump_all(struct kvi_index *ix, copy_fn copy, size_t at, struct slice *slice,
                    kvi_extra_fn fn, void *arg)
{
    bool more = true;
    int rc = 0;

    while (more && !rc) {
        kvi_lock(ix);
        more = copy(ix, &at, slice);
        pthread_mutex_unlock(&ix->lock);
        rc = tell(slice, fn, arg);
    }
    return rc;
}

int kvi_dump_parked(struct kvi_index *index, kvi_extra_fn fn, void *arg)
{
    struct slice *slice = calloc(1, sizeof(*slice));
    struct parked_names names = {.n = 0};
    size_t id = 0;
    int rc = slice ? 0 : -ENOMEM, more = slice != NULL;

    while (more > 0 && !rc) {
        kvi_lock(index);
        more = next_parked(index, &id, &names);
        pthread_mutex_unlock(&index->lock);
        for (size_t i = 0; i < names.n && !rc;) {
            kvi_lock(index);
            copy_parked(index, &names, &i, slice);
            pthread_mutex_unlock(&index->lock);
            rc = tell(slice, fn, arg);
        }
    }
    kvi_lock(index);
    kvi_mem_free(&index->mem, names.items);
    pthread_mutex_unlock(&index->lock);
    free(slice);
    return rc ? rc : KV_MIN(more, 0);
}

int kvi_dump_extras(struct kvi_index *index, kvi_extra_fn fn, void *arg)
{
    struct slice *slice = calloc(1, sizeof(*slice));
    int rc;

    if (!slice)
        return -ENOMEM;
    rc = kvi_dump_parked(index, fn, arg);
    if (!rc)
        rc = kvi_dump_windows(index, fn, arg);
    if (!rc)
        rc = dump_all(index, copy_tiers, 0, slice, fn, arg);
    if (!rc)
        rc = dump_all(index, copy_copies, SIZE_MAX, slice, fn, arg);
    free(slice->sources);
    free(slice);
    return rc;
}

/* -- copies of one rank at one moment ---------------------------------------------------------- */

#define SWEEP 4096u /* records that one step looks at */

void kvi_keep_copies(struct kvi_index *index, bool keep)
{
    size_t left = SIZE_MAX;

    kvi_lock(index);
    index->copies.keepers += keep ? 1 : UINT32_MAX;
    if (!index->copies.keepers)
        kvi_missed_clear(index);
    while (!keep && left && !index->copies.keepers) {
        left = KV_MIN(left, index->copies.n);
        kvi_copies_sweep(index, left, left - KV_MIN(left, SWEEP));
        left -= KV_MIN(left, SWEEP);
        pthread_mutex_unlock(&index->lock);
        kvi_lock(index);
    }
    pthread_mutex_unlock(&index->lock);
}

/* Add the facts about all tiers of a rank from its @at-th part on. Returns true when more follow. */
static bool copy_rank(const struct kvi_index *ix, struct kv_holder key, size_t *at,
                      struct slice *slice)
{
    const struct kvi_holder *holder = kvi_holder_find(ix, key), *part;
    const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;

    if (!holder)
        return false;
    if (!*at)
        copy_facts(holder, slice);
    for (; windows && *at < KV_N_TIERS * KVI_PARTS && slice->n + KV_N_TIERS <= SLICE; ++*at) {
        part = windows->parts[*at / KVI_PARTS][*at % KVI_PARTS];
        if (part)
            copy_facts(part, slice);
    }
    return windows && *at < KV_N_TIERS * KVI_PARTS;
}

/* Add records of a rank's copies below number *@left. Returns true when more follow. */
static bool copy_records(const struct kvi_index *ix, struct kv_holder key, size_t *left,
                         struct slice *slice)
{
    *left = KV_MIN(*left, ix->copies.n);
    for (size_t steps = SWEEP; *left && steps && slice->n < SLICE && !slice->rc; steps--) {
        const struct kvi_copy *copy = &ix->copies.items[--*left];
        const struct kvi_holder *holder = kvi_holder_at(ix, copy->holder);
        struct kvi_extra extra;

        if (holder->key.worker != key.worker || holder->key.rank != key.rank)
            continue;
        extra = fact_of(holder, copy->tier);
        extra.kind = KVI_EXTRA_COPIES;
        extra.hash = copy->hash;
        if (is_told(slice, &extra))
            continue;
        add(slice, extra);
        kvi_copies_each(ix, copy, add_source, slice);
    }
    return *left > 0;
}

/* Add a block that the dump may have missed, or that is gone, if it still is. */
static void copy_missed(const struct kvi_index *ix, const struct kvi_holder *holder,
                        const struct kvi_missed_block *block, struct slice *slice)
{
    const struct kvi_copy last = {.source = block->source};
    uint32_t mask = kvi_tiers_of(ix, holder, block->hash);
    struct kvi_extra extra = {.holder = holder->key, .hash = block->hash, .tiers = mask};

    if (block->is_placed && mask) {
        extra.parent = block->parent;
        extra.tokens_hash = block->local;
        add(slice, extra);
    } else if (!block->is_placed && !(mask & block->mask)) {
        extra = fact_of(holder, (uint32_t)__builtin_ctz(block->mask));
        extra.kind = KVI_EXTRA_COPIES;
        extra.hash = block->hash;
        add(slice, extra);
        add_source(slice, &last);
    }
}

/* Add those of a rank from number *@at on. Returns true when more follow. */
static bool copy_all_missed(const struct kvi_index *ix, struct kv_holder key, bool placed,
                            size_t *at, struct slice *slice)
{
    for (size_t steps = SWEEP; *at < ix->missed.n && steps && slice->n < SLICE; steps--) {
        const struct kvi_missed_block *block = &ix->missed.items[(*at)++];
        const struct kvi_holder *holder = kvi_dir_get(&ix->holders, block->holder);

        if (holder && block->is_placed == placed && holder->key.worker == key.worker &&
            holder->key.rank == key.rank)
            copy_missed(ix, holder, block, slice);
    }
    return *at < ix->missed.n;
}

static int dump_missed(struct kvi_index *index, struct kv_holder key, bool placed,
                       struct slice *slice, kvi_extra_fn fn, void *arg)
{
    bool more = true;
    size_t at = 0;
    int rc = 0;

    while (more && !rc) {
        kvi_lock(index);
        more = copy_all_missed(index, key, placed, &at, slice);
        pthread_mutex_unlock(&index->lock);
        rc = tell(slice, fn, arg);
    }
    return rc;
}

/* Blocks first: the first one of a tier decides on its implied source, which the facts correct. */
int kvi_dump_copies(struct kvi_index *index, struct kv_holder key, kvi_extra_fn fn, void *arg)
{
    struct slice *slice = calloc(1, sizeof(*slice));
    bool more = true;
    size_t at = 0;
    int rc;

    if (!slice)
        return -ENOMEM;
    rc = dump_missed(index, key, true, slice, fn, arg);
    while (more && !rc) {
        kvi_lock(index);
        more = copy_rank(index, key, &at, slice);
        pthread_mutex_unlock(&index->lock);
        rc = tell(slice, fn, arg);
    }
    if (!rc)
        rc = dump_missed(index, key, false, slice, fn, arg);
    at = SIZE_MAX;
    for (more = true; more && !rc; rc = tell(slice, fn, arg)) {
        kvi_lock(index);
        more = copy_records(index, key, &at, slice);
        pthread_mutex_unlock(&index->lock);
    }
    free(slice->sources);
    free(slice);
    return rc;
}
