// SPDX-License-Identifier: Apache-2.0
/*
 * Dump the state beside the tree, one slice per lock: of all holders, or of chosen ones. Items that
 * stay are reported; items that come or go meanwhile may be reported or not.
 *
 * A holder's parked blocks are reported from the oldest on: the order in which they are attached or
 * forgotten. Records of copies are reported from the last to the first: a record that moves into a
 * dropped one's place is then reported later, or again. Each record brings all copies of its block,
 * so that a block whose copies change is reported as it was at one moment. Consecutive records of
 * one block are reported once, as the lock is held between them.
 */
#include <string.h>

#include "index/dump/chosen.h"

#define SLICE 256u
#define SWEEP 4096u /* holders or records that one step looks at */

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

/* Copy the names of the next chosen holder from id *@id on. Returns 1, 0 at the end, or -ENOMEM. */
static int next_parked(struct kvi_index *ix, const struct kvi_chosen *chosen, size_t *id,
                       struct parked_names *names)
{
    const struct kvi_holder *holder = NULL;
    uint32_t at;

    names->n = 0;
    for (; *id < ix->holders.n_used && !(holder && holder->n_parked && !holder->main); ++*id)
        holder = kvi_is_chosen(chosen, (uint32_t)*id) ? kvi_holder_at(ix, (uint32_t)*id) : NULL;
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

/* Return a fact about a tier of a holder or, for an overlay, about one of its windows. */
static struct kvi_extra fact_of(const struct kvi_holder *holder, uint32_t tier)
{
    const struct kvi_windows *windows = holder->main ? kvi_windows_of(holder->main) : NULL;
    const struct kvi_window *window;
    struct kvi_extra extra = {.holder = holder->key, .tier = (enum kv_tier)tier};
    uint32_t at = 0;

    if (!windows)
        return extra;
    while (windows->overlays[at / KVI_OVERLAYS][at % KVI_OVERLAYS] != holder)
        at++;
    extra.tier = (enum kv_tier)(at / KVI_OVERLAYS);
    extra.in_window = true;
    window = &windows->items[at % KVI_OVERLAYS * KVI_OVERLAY_WINDOWS + tier - kvi_window_tier(0)];
    extra.window.group = window->group;
    extra.window.part = window->part;
    return extra;
}

static bool has_tier(const struct kvi_holder *holder, uint32_t tier)
{
    const struct kvi_holder_tier *t = &holder->tier[tier];

    return t->implied || t->counts || t->n_stored_again;
}

/* Add the facts about the tiers of a holder, such as an overlay of a rank. */
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
static bool copy_tiers(const struct kvi_index *ix, const struct kvi_chosen *chosen, size_t *at,
                       struct slice *slice)
{
    size_t end = KV_MIN(ix->holders.n_used, *at + SWEEP);

    for (; *at < end && slice->n + KV_N_TIERS <= SLICE; ++*at) {
        const struct kvi_holder *holder =
            kvi_is_chosen(chosen, (uint32_t)*at) ? kvi_holder_at(ix, (uint32_t)*at) : NULL;

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
static bool copy_copies(const struct kvi_index *ix, const struct kvi_chosen *chosen, size_t *left,
                        struct slice *slice)
{
    *left = KV_MIN(*left, ix->copies.n);
    for (size_t n = SWEEP; n && *left && slice->n < SLICE && !slice->rc; n--) {
        const struct kvi_copy *copy = &ix->copies.items[--*left];

        if (kvi_is_chosen(chosen, copy->holder))
            copy_one(ix, copy, slice);
    }
    return *left > 0;
}

/* -- telling ----------------------------------------------------------------------------------- */

typedef bool (*copy_fn)(const struct kvi_index *ix, const struct kvi_chosen *chosen, size_t *at,
                        struct slice *slice);

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
static int dump_all(struct kvi_index *ix, const struct kvi_chosen *chosen, copy_fn copy, size_t at,
                    struct slice *slice, kvi_extra_fn fn, void *arg)
{
    bool more = true;
    int rc = 0;

    while (more && !rc) {
        kvi_lock(ix);
        more = copy(ix, chosen, &at, slice);
        pthread_mutex_unlock(&ix->lock);
        rc = tell(slice, fn, arg);
    }
    return rc;
}

static int dump_parked(struct kvi_index *index, const struct kvi_chosen *chosen,
                       struct slice *slice, kvi_extra_fn fn, void *arg)
{
    struct parked_names names = {.n = 0};
    int rc = 0, more = 1;
    size_t id = 0;

    while (more > 0 && !rc) {
        kvi_lock(index);
        more = next_parked(index, chosen, &id, &names);
        pthread_mutex_unlock(&index->lock);
        for (size_t i = 0; names.n && i < names.n && !rc;) {
            kvi_lock(index);
            copy_parked(index, &names, &i, slice);
            pthread_mutex_unlock(&index->lock);
            rc = tell(slice, fn, arg);
        }
    }
    kvi_lock(index);
    kvi_mem_free(&index->mem, names.items);
    pthread_mutex_unlock(&index->lock);
    return rc ? rc : KV_MIN(more, 0);
}

static int dump_extras(struct kvi_index *index, const struct kvi_chosen *chosen, kvi_extra_fn fn,
                       void *arg)
{
    struct slice *slice = calloc(1, sizeof(*slice));
    int rc;

    if (!slice)
        return -ENOMEM;
    rc = dump_parked(index, chosen, slice, fn, arg);
    if (!rc)
        rc = kvi_dump_windows(index, chosen, fn, arg);
    if (!rc)
        rc = dump_all(index, chosen, copy_tiers, 0, slice, fn, arg);
    if (!rc)
        rc = dump_all(index, chosen, copy_copies, SIZE_MAX, slice, fn, arg);
    free(slice->sources);
    free(slice);
    return rc;
}

int kvi_dump_extras(struct kvi_index *index, kvi_extra_fn fn, void *arg)
{
    return dump_extras(index, NULL, fn, arg);
}

/* -- some holders ------------------------------------------------------------------------------ */

static void choose(struct kvi_chosen *chosen, const struct kvi_holder *holder)
{
    chosen->bits[holder->id / 64] |= UINT64_C(1) << holder->id % 64;
}

/* Choose the holders of @keys and their overlays. Returns 0 or -ENOMEM. */
static int choose_all(struct kvi_index *ix, const struct kv_holder *keys, size_t n,
                      struct kvi_chosen *ret)
{
    kvi_lock(ix);
    ret->n = ix->holders.n_used;
    ret->bits = calloc(ret->n / 64 + 1, sizeof(*ret->bits));
    for (size_t i = 0; ret->bits && i < n; i++) {
        const struct kvi_holder *holder = kvi_holder_find(ix, keys[i]);
        const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;
        const struct kvi_holder *overlay;

        if (holder)
            choose(ret, holder);
        KVI_EACH_OVERLAY(windows, overlay)
        choose(ret, overlay);
    }
    pthread_mutex_unlock(&ix->lock);
    return ret->bits ? 0 : -ENOMEM;
}

int kvi_dump_holders(struct kvi_index *index, const struct kv_holder *holders, size_t n,
                     kvi_dump_fn fn, kvi_extra_fn extra_fn, void *arg)
{
    struct kvi_chosen chosen;
    int rc = choose_all(index, holders, n, &chosen);

    if (!rc)
        rc = kvi_dump_runs(index, &chosen, fn, arg);
    if (!rc)
        rc = dump_extras(index, &chosen, extra_fn, arg);
    free(chosen.bits);
    return rc;
}
