// SPDX-License-Identifier: Apache-2.0
/*
 * Dump and restore the state beside the tree, one slice per lock. Items that stay are reported;
 * items that come or go meanwhile may be reported or not.
 *
 * A holder's parked blocks are reported from the oldest on: the order in which they are attached or
 * forgotten. Records of copies are reported from the last to the first: a record that moves into a
 * dropped one's place is then reported later, or again. Each record brings all copies of its block,
 * so that a block whose copies change is reported as it was at one moment. Consecutive records of
 * one block are reported once, as the lock is held between them.
 */
#include <string.h>

#include "index/windows.h"

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

/* Add facts about the tiers of holders from id *@at on. Returns true when more follow. */
static bool copy_tiers(const struct kvi_index *ix, size_t *at, struct slice *slice)
{
    for (; *at < ix->holders.n_used && slice->n + KV_N_TIERS <= SLICE; ++*at) {
        const struct kvi_holder *holder = kvi_holder_at(ix, (uint32_t)*at);

        for (uint32_t t = 0; holder && t < KV_N_TIERS; t++) {
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

/* -- restoring --------------------------------------------------------------------------------- */

/*
 * Find the holder or part that a fact is about, and its tier there. Returns 0; *@ret is NULL when
 * there is none.
 */
static int subject(struct kvi_index *ix, const struct kvi_extra *extra, bool make,
                   struct kvi_holder **ret, enum kv_tier *ret_tier)
{
    struct kvi_holder *holder = *ret;
    int number;

    *ret_tier = extra->tier;
    if (!extra->in_window)
        return 0;
    *ret = NULL;
    number = kvi_window_number(holder, &extra->window);
    if (number < 0)
        return 0;
    *ret_tier = (enum kv_tier)kvi_window_tier((uint32_t)number);
    return kvi_part_find(ix, holder, extra->tier, (uint32_t)number, make, ret);
}

static int restore_tier(struct kvi_index *index, const struct kvi_extra *extra)
{
    struct kvi_holder *holder;
    enum kv_tier tier;
    int rc;

    if (extra->implied > KVI_MAX_SOURCE || extra->counting > KVI_COUNTS_ONE)
        return -EINVAL;
    rc = kvi_begin(index, extra->holder, &holder);
    if (!rc)
        rc = subject(index, extra, true, &holder, &tier);
    if (!rc && holder)
        kvi_copies_restore_tier(holder, tier, extra);
    kvi_unlock(index);
    return rc;
}

static int set_copies(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kvi_source_copies plain = {0, extra->copies, false};
    struct kvi_holder *holder;
    enum kv_tier tier;
    int rc = 0;

    for (size_t i = 0; i < extra->n_sources; i++)
        if (extra->sources[i].source > KVI_MAX_SOURCE)
            return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, extra->holder);
    if (holder)
        rc = subject(index, extra, false, &holder, &tier);
    if (!rc && holder && kvi_tiers_of(index, holder, extra->hash) >> tier & 1) {
        bool held = true;

        if (extra->n_sources)
            held =
                kvi_copies_set(index, holder, tier, extra->hash, extra->sources, extra->n_sources);
        else if (extra->copies)
            held = kvi_copies_set(index, holder, tier, extra->hash, &plain, 1);
        if (!held)
            rc = KV_MIN(
                kvi_take_one(index, holder, tier, holder->tier[tier].implied, extra->hash, 0), 0);
        if (!held && !rc && holder->main)
            kvi_part_tidy(index, holder, extra->hash);
    }
    kvi_unlock(index);
    return rc;
}

/* Store a parked block whose parent was in the tree at the time of the dump. */
static int attach(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    int rc = 0;

    for (uint32_t t = 0; t < KV_N_TIERS && !rc; t++)
        if (extra->tiers >> t & 1)
            rc = kvi_store(index, extra->holder, (enum kv_tier)t, &extra->parent, &block, 1, NULL);
    return rc;
}

/*
 * Park a block as in the dumped index. A block that is in the tree was there when the dump passed:
 * the stream tells its fate.
 */
static int park(struct kvi_index *index, const struct kvi_extra *extra)
{
    const struct kv_block block = {extra->hash, extra->tokens_hash};
    struct kvi_holder *holder;
    struct kvi_parked *parked;
    struct kvi_place place;
    bool attaches = false;
    int rc = kvi_begin(index, extra->holder, &holder);

    if (!rc) {
        parked = kvi_parked_find(index, holder, extra->hash);
        if (parked)
            parked->mask |= extra->tiers;
        else if (!kvi_tiers_of(index, holder, extra->hash))
            attaches = kvi_locate(index, holder, extra->parent, &place, NULL);
        if (!parked && !attaches && !kvi_tiers_of(index, holder, extra->hash))
            (void)kvi_park(index, holder, extra->parent, block, extra->tiers);
    }
    kvi_unlock(index);
    return attaches ? attach(index, extra) : rc;
}

int kvi_restore_extra(struct kvi_index *index, const struct kvi_extra *extra)
{
    if ((unsigned)extra->tier >= KV_N_TIERS || extra->tiers >> KV_N_TIERS)
        return -EINVAL;
    if (extra->kind == KVI_EXTRA_TIER)
        return restore_tier(index, extra);
    if (extra->kind == KVI_EXTRA_COPIES)
        return set_copies(index, extra);
    if (extra->kind != KVI_EXTRA_BLOCK)
        return kvi_restore_window(index, extra);
    return extra->tiers ? park(index, extra) : set_copies(index, extra);
}
