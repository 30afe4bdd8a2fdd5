// SPDX-License-Identifier: Apache-2.0
/*
 * Count copies (copies.h), and note whether the engine may announce fewer removals than that takes.
 *
 * An engine announces each copy's removal (vLLM), or only the last one's. For the second kind,
 * counted copies become phantoms: blocks whose count never reaches 0. Two removals of one block
 * without a store in between show the first kind. Nothing shows the second: an engine that stores
 * one prompt again and again, and evicts an old copy each time, sends the same events. So copies
 * are always counted. After DOUBT stores behind removals that left copies, and no such pair of
 * removals, the tier's answers are in doubt: kvi_holder_info says so.
 */
#include "index/tree/copies.h"

#include <string.h>

#include "index/tree/windows.h"

#define DOUBT 64u
/**
 * Number of the main source. Other sources are stores keyed by hash: announcing a block twice adds
 * no copy.
 */
#define MAIN 0u

static uint64_t mix_key(uint32_t holder, uint32_t tier, uint64_t hash)
{
    return kv_mix(kv_mix(hash) + ((uint64_t)tier << 32 | holder));
}

static uint64_t copy_mix(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;
    const struct kvi_copy *copy = &ix->copies.items[i];

    return mix_key(copy->holder, copy->tier, copy->hash);
}

static void copy_prefetch(const void *arg, uint32_t i)
{
    const struct kvi_index *ix = arg;

    __builtin_prefetch(&ix->copies.items[i]);
}

int kvi_copies_init(struct kvi_index *ix)
{
    return kvi_table_init(&ix->copies.by_hash, &ix->mem, copy_mix, copy_prefetch, ix);
}

void kvi_copies_fini(struct kvi_index *ix)
{
    kvi_table_fini(&ix->copies.by_hash);
    kvi_mem_free(&ix->mem, ix->copies.items);
}

/* -- records ----------------------------------------------------------------------------------- */

#define ANY UINT32_MAX

/*
 * Find the record of @source (ANY: the first). *@ret_n, unless NULL, is the block's number of
 * records.
 */
static struct kvi_copy *find(const struct kvi_index *ix, const struct kvi_holder *holder,
                             uint32_t tier, uint64_t hash, uint32_t source, uint32_t *ret_n)
{
    struct kvi_copy *found = NULL;
    struct kvi_probe probe;
    uint32_t i, n = 0;

    kvi_probe_init(&probe, &ix->copies.by_hash, mix_key(holder->id, tier, hash));
    while (kvi_probe_next(&probe, &i)) {
        struct kvi_copy *copy = &ix->copies.items[i];

        if (copy->hash != hash || copy->holder != holder->id || copy->tier != tier)
            continue;
        n++;
        if (!found && (source == ANY || copy->source == source))
            found = copy;
        if (found && !ret_n)
            break;
    }
    if (ret_n)
        *ret_n = n;
    return found;
}

bool kvi_copies_have_room(struct kvi_index *ix, size_t n)
{
    struct kvi_copies *copies = &ix->copies;

    return copies->n + n <= copies->max &&
           !kvi_mem_grow(&ix->mem, (void **)&copies->items, &copies->capacity, copies->n + n,
                         sizeof(copies->items[0]));
}

void kvi_copies_lost(struct kvi_index *ix, struct kvi_holder *holder, uint64_t n)
{
    ix->copies.uncounted += n;
    kvi_note_lost(holder, n);
}

static bool put(struct kvi_index *ix, struct kvi_holder *holder, uint32_t tier, uint64_t hash,
                uint32_t source, uint32_t count)
{
    struct kvi_copies *copies = &ix->copies;
    uint32_t i = (uint32_t)copies->n;

    if (!kvi_copies_have_room(ix, 1)) {
        kvi_copies_lost(ix, holder, 1);
        return false;
    }
    copies->items[i] = (struct kvi_copy){.hash = hash,
                                         .holder = holder->id,
                                         .count = count,
                                         .source = (uint16_t)source,
                                         .tier = (uint8_t)tier};
    if (kvi_table_insert(&copies->by_hash, mix_key(holder->id, tier, hash), i)) {
        kvi_copies_lost(ix, holder, 1);
        return false;
    }
    copies->n++;
    holder->n_copies++;
    return true;
}

/* Remove a record; the last one moves into its place. */
static void drop(struct kvi_index *ix, struct kvi_holder *holder, const struct kvi_copy *copy)
{
    struct kvi_copies *copies = &ix->copies;
    uint32_t i = (uint32_t)(copy - copies->items), last = (uint32_t)--copies->n;

    kvi_table_erase(&copies->by_hash, copy_mix(ix, i), i);
    if (i != last) {
        kvi_table_replace(&copies->by_hash, copy_mix(ix, last), last, i);
        copies->items[i] = copies->items[last];
    }
    holder->n_copies--;
    if (copies->n == 0) {
        kvi_mem_free(&ix->mem, copies->items);
        copies->items = NULL;
        copies->capacity = 0;
    }
}

/*
 * Return true when a record is redundant: one copy of the implied source alone. A record whose last
 * event was a removal stays, as evidence of the engine's kind.
 */
static bool says_nothing(const struct kvi_holder *holder, const struct kvi_copy *copy)
{
    const struct kvi_holder_tier *t = &holder->tier[copy->tier];

    return copy->count == 1 && copy->source == t->implied &&
           (!copy->taken || t->counts != KVI_COUNTS_UNKNOWN);
}

static void tidy(struct kvi_index *ix, struct kvi_holder *holder, uint32_t tier, uint64_t hash)
{
    uint32_t n = 0;
    const struct kvi_copy *copy = find(ix, holder, tier, hash, ANY, &n);

    if (n == 1 && says_nothing(holder, copy))
        drop(ix, holder, copy);
}

/* -- the engine's habits ----------------------------------------------------------------------- */

static void note_store(struct kvi_index *ix, struct kvi_holder *holder, uint32_t tier,
                       struct kvi_copy *copy)
{
    struct kvi_holder_tier *t = &holder->tier[tier];

    if (!copy->taken)
        return;
    copy->taken = false;
    if (t->counts == KVI_COUNTS_UNKNOWN && ++t->n_stored_again == DOUBT)
        ix->copies.doubts++;
}

uint64_t kvi_copies_doubted(const struct kvi_holder *holder)
{
    uint64_t n = 0;

    for (uint32_t tier = 0; tier < KV_N_TIERS; tier++)
        n += holder->tier[tier].counts == KVI_COUNTS_UNKNOWN &&
             holder->tier[tier].n_stored_again >= DOUBT;
    return n;
}

void kvi_copies_forget_doubt(struct kvi_holder *holder)
{
    for (uint32_t tier = 0; tier < KV_N_TIERS; tier++)
        holder->tier[tier].n_stored_again = 0;
}

/* -- copies come and go ------------------------------------------------------------------------ */

void kvi_copies_imply(struct kvi_holder *holder, enum kv_tier tier, uint32_t source)
{
    if (holder->tier[tier].implied == source || holder->tier[tier].blocks || holder->n_parked)
        return;
    holder->tier[tier].implied = (uint16_t)source;
}

bool kvi_copies_add(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint32_t source, uint64_t hash, bool had, bool counted)
{
    uint32_t implied = holder->tier[tier].implied, n = 0;
    struct kvi_copy *copy;

    if (!had)
        return source == implied || put(ix, holder, tier, hash, source, 1);
    copy = holder->n_copies ? find(ix, holder, tier, hash, source, &n) : NULL;
    if (copy) {
        if (source != MAIN || !counted)
            return true;
        note_store(ix, holder, tier, copy);
        copy->count++;
    } else if (n == 0 && source == implied) {
        if (source == MAIN && counted)
            (void)put(ix, holder, tier, hash, source, 2);
    } else if (n || put(ix, holder, tier, hash, implied, 1)) {
        (void)put(ix, holder, tier, hash, source, 1);
    }
    return true;
}

enum kvi_taken kvi_copies_take(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                               uint32_t source, uint64_t hash, uint32_t left)
{
    struct kvi_holder_tier *t = &holder->tier[tier];
    uint32_t n = 0;
    struct kvi_copy *copy = holder->n_copies ? find(ix, holder, tier, hash, source, &n) : NULL;

    if (!copy) {
        if (n || source != t->implied)
            return KVI_TAKEN_NONE;
        if (left == KVI_COPIES_UNSAID || left == 0)
            return KVI_TAKEN_LAST;
        if (left > 1)
            (void)put(ix, holder, tier, hash, source, left);
        return KVI_TAKEN_SOME;
    }
    if (left == KVI_COPIES_UNSAID) {
        left = copy->count - 1;
        if (copy->taken && source == MAIN && t->counts == KVI_COUNTS_UNKNOWN)
            t->counts = KVI_COUNTS_EACH;
    }
    if (left) {
        copy->count = left;
        copy->taken = source == MAIN;
    } else {
        drop(ix, holder, copy);
        if (n == 1)
            return KVI_TAKEN_LAST;
    }
    tidy(ix, holder, tier, hash);
    return KVI_TAKEN_SOME;
}

void kvi_copies_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t mask,
                       uint64_t hash)
{
    for (uint32_t tier = 0; tier < KV_N_TIERS && holder->n_copies; tier++) {
        struct kvi_copy *copy;

        while (mask >> tier & 1 && (copy = find(ix, holder, tier, hash, ANY, NULL)) != NULL)
            drop(ix, holder, copy);
    }
}

uint32_t kvi_copies_count(const struct kvi_index *ix, const struct kvi_holder *holder,
                          enum kv_tier tier, uint32_t source, uint64_t hash)
{
    uint32_t n = 0;
    const struct kvi_copy *copy =
        holder->n_copies ? find(ix, holder, tier, hash, source, &n) : NULL;

    if (copy)
        return copy->count;
    return n == 0 && source == holder->tier[tier].implied;
}

uint64_t kvi_copies_total(const struct kvi_index *ix, const struct kvi_holder *holder,
                          uint32_t mask, uint64_t hash)
{
    uint64_t total = 0;

    for (uint32_t tier = holder->main ? 1 : 0; tier < KV_N_TIERS;
         tier++) { /* of an overlay, no place */
        uint64_t before = total;
        struct kvi_probe probe;
        uint32_t i;

        if (!(mask >> tier & 1))
            continue;
        kvi_probe_init(&probe, &ix->copies.by_hash, mix_key(holder->id, tier, hash));
        while (holder->n_copies && kvi_probe_next(&probe, &i)) {
            const struct kvi_copy *copy = &ix->copies.items[i];

            if (copy->hash == hash && copy->holder == holder->id && copy->tier == tier)
                total += copy->count;
        }
        total += total == before; /* no record: one copy */
    }
    return total;
}

/* -- in dumps ---------------------------------------------------------------------------------- */

enum kvi_said kvi_copies_say(const struct kvi_index *ix, const struct kvi_copy *copy)
{
    const struct kvi_holder *holder = kvi_holder_at(ix, copy->holder);
    uint32_t n = 0;

    (void)find(ix, holder, copy->tier, copy->hash, ANY, &n);
    if (n > 1)
        return KVI_SAID_SOURCES;
    if (says_nothing(holder, copy))
        return KVI_SAID_NOTHING;
    return copy->source == MAIN && !copy->taken && holder->tier[copy->tier].implied == MAIN
               ? KVI_SAID_COUNT
               : KVI_SAID_SOURCES;
}

void kvi_copies_each(const struct kvi_index *ix, const struct kvi_copy *copy,
                     void (*fn)(void *arg, const struct kvi_copy *copy), void *arg)
{
    struct kvi_probe probe;
    uint32_t i;

    kvi_probe_init(&probe, &ix->copies.by_hash, mix_key(copy->holder, copy->tier, copy->hash));
    while (kvi_probe_next(&probe, &i)) {
        const struct kvi_copy *other = &ix->copies.items[i];

        if (other->hash == copy->hash && other->holder == copy->holder && other->tier == copy->tier)
            fn(arg, other);
    }
}

bool kvi_copies_set(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t hash, const struct kvi_source_copies *sources, size_t n)
{
    bool held = false;

    kvi_copies_forget(ix, holder, 1u << tier, hash);
    for (size_t i = 0; i < n; i++) {
        if (find(ix, holder, tier, hash, sources[i].source, NULL))
            continue;
        held |= sources[i].source == holder->tier[tier].implied;
        if (sources[i].copies == KVI_COPIES_UNSAID) {
            kvi_copies_lost(ix, holder, 1);
            continue;
        }
        if (!put(ix, holder, tier, hash, sources[i].source, KV_MAX(sources[i].copies, 1u)))
            continue;
        held = true;
        ix->copies.items[ix->copies.n - 1].taken = sources[i].taken;
    }
    tidy(ix, holder, tier, hash);
    return held;
}

void kvi_copies_restore_tier(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                             const struct kvi_extra *extra)
{
    struct kvi_holder_tier *t = &holder->tier[tier];

    t->implied = (uint16_t)extra->implied;
    t->counts = (uint8_t)extra->counting;
    t->n_stored_again = extra->stored_again;
    ix->copies.doubts += kvi_copies_doubted(holder) > 0;
}
