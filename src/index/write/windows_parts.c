// SPDX-License-Identifier: Apache-2.0
/*
 * The parts of the tree that hold the blocks of windows: see windows.h. A part is a hidden holder
 * that has a place wherever its main holder has a block:
 *
 *     main holder    a ── b ── c          windows' bits in the part
 *     its part       a ── b ── c          a: -    b: W1    c: W1 W2
 *
 * Invariant: a part may have fewer places than its main holder, and then a match is shorter. It may
 * have more, and then only memory is lost: lookups walk the main holder's blocks. Later stores
 * repair both:
 *
 *     fewer    the part lags; a later store copies all places anew (lag, copy_places)
 *     more     the main holder forgot blocks at a limit; a sweep removes their places
 */
#include "index/tree/windows.h"

#include "index/tree/kids.h"
#include "index/write/store.h"

#define MAX_LAG_WAIT (1u << 12) /* stores */
#define MIN_SWEEP 256u          /* blocks */

/* Twice the main holder's limit: places of forgotten blocks may fill half until the next sweep. */
static uint64_t part_limit(const struct kvi_holder *holder)
{
    return holder->max_blocks > UINT64_MAX / 2 ? UINT64_MAX : 2 * holder->max_blocks;
}

void kvi_parts_lose(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash)
{
    struct kvi_holder *part;

    /* The queue of dirty chains belongs to one holder at a time: see kvi_drop_below_queued. */
    kvi_settle(ix);
    KVI_EACH_PART(kvi_windows_of(holder), part)
    {
        (void)kvi_take_one(ix, part, KVI_PLACED, 0, hash, 0);
        kvi_settle(ix);
    }
}

static void drop_part(struct kvi_index *ix, struct kvi_holder *part)
{
    kvi_dir_remove(&ix->holders, part->id);
    kvi_retire_memory(ix, &part->retired, sizeof(*part));
    ix->n_parts--;
}

void kvi_parts_drop(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder *part;

    if (!windows)
        return;
    atomic_store_explicit(&holder->windows, NULL, memory_order_release);
    KVI_EACH_PART(windows, part)
    drop_part(ix, part);
    kvi_retire_memory(ix, &windows->retired, sizeof(*windows));
}

/* The chains of a holder, parents first. */
struct chains {
    struct kvi_index *ix;
    uint32_t holder;
    const struct kvi_chain **items;
    size_t n, capacity;
    bool failed;
};

static bool list_chain(void *arg, struct kvi_chain *chain)
{
    struct chains *chains = arg;

    if (!kvi_who_find(chain, chains->holder))
        return true;
    if (kvi_mem_grow(&chains->ix->mem, (void **)(void *)&chains->items, &chains->capacity,
                     chains->n + 1, sizeof(chains->items[0])))
        chains->failed = true;
    else
        chains->items[chains->n++] = chain;
    return !chains->failed;
}

/*
 * Store the holder's blocks of one chain in the part, under the holder's names. The part has the
 * block above already: chains come parents first.
 */
static int copy_chain(struct kvi_index *ix, const struct kvi_holder *holder,
                      struct kvi_holder *part, const struct kvi_chain *chain)
{
    uint32_t len = kvi_entry_len(kvi_who_get(kvi_who_find(chain, holder->id)));
    uint32_t pos = kvi_chain_run(chain).pos;
    const uint64_t *locals = kvi_arena_locals(&ix->arena, pos);
    struct kv_block blocks[KVI_CHAIN_MAX];
    uint64_t parent = 0;

    if (chain->parent->parent) {
        struct kvi_run above = kvi_chain_run(chain->parent);

        parent = kvi_name_of(ix, holder, above.pos + above.len - 1);
    }
    for (uint32_t i = 0; i < len; i++)
        blocks[i] = (struct kv_block){kvi_name_of(ix, holder, pos + i), locals[i]};
    return kvi_store_places(ix, part, false, chain->parent->parent ? &parent : NULL, blocks, len);
}

/* Copy the places of a holder's blocks into its new part. Returns 0 or an error of kvi_store. */
static int copy_places(struct kvi_index *ix, const struct kvi_holder *holder,
                       struct kvi_holder *part)
{
    struct chains chains = {.ix = ix, .holder = holder->id};
    struct kvi_place place;
    uint32_t at = holder->oldest;
    int rc = 0;

    if (holder->n_roots)
        kvi_kids_each(&ix->root, list_chain, &chains);
    for (size_t i = 0; i < chains.n && !chains.failed && !rc; i++) {
        rc = copy_chain(ix, holder, part, chains.items[i]);
        kvi_kids_each(chains.items[i], list_chain, &chains);
    }
    kvi_mem_free(&ix->mem, (void *)chains.items);
    for (size_t i = 0; i < holder->n_parked; i++) {
        struct kvi_parked parked = ix->parking.items[at];

        const struct kv_block block = {parked.hash, parked.local};

        if (!kvi_is_placeless(holder, &parked) && !kvi_locate(ix, part, parked.hash, &place, NULL))
            (void)kvi_store_places(ix, part, false, &parked.parent, &block, 1);
        at = ix->parking.items[at].newer;
    }
    return chains.failed ? -ENOMEM : rc;
}

static uint64_t part_size(const struct kvi_holder *part)
{
    return atomic_load_explicit(&part->blocks, memory_order_relaxed);
}

/*
 * Return the holder or part that knows the most places. With windows alone, the main holder has no
 * block; the parts know the places, and one that lagged knows fewer.
 */
static const struct kvi_holder *knows_places(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *part, *best = NULL;

    KVI_EACH_PART(windows && windows->alone ? windows : NULL, part)
    {
        if (!best || part_size(part) > part_size(best))
            best = part;
    }
    return best ? best : holder;
}

void kvi_part_forget_places(struct kvi_index *ix, const struct kvi_holder *holder,
                            struct kvi_holder *part)
{
    uint64_t *names = NULL;
    size_t n;

    (void)kvi_list_names(ix, part, &names, &n); /* places that it lacks stay until the next sweep */
    kvi_settle(ix); /* the queue of dirty chains belongs to one holder at a time */
    while (n--)
        if (!kvi_tiers_of(ix, holder, names[n]))
            (void)kvi_take_one(ix, part, KVI_PLACED, 0, names[n], 0);
    kvi_mem_free(&ix->mem, names);
    kvi_settle(ix);
    part->swept_to = part_size(part) + part->n_parked;
}

/*
 * Return true when the part has doubled since the last sweep: such places may be the cause. A sweep
 * reads the whole part, so its cost is spread over as many stores as the part had blocks.
 */
static bool needs_sweep(const struct kvi_holder *part)
{
    return part_size(part) + part->n_parked > 2 * part->swept_to + MIN_SWEEP;
}

bool kvi_parts_sweep(struct kvi_index *ix, const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder *part;
    bool freed = false;

    KVI_EACH_PART(windows && !windows->alone ? windows : NULL, part)
    {
        uint64_t before = part_size(part);

        if (before + part->n_parked <= part->swept_to)
            continue;
        kvi_part_forget_places(ix, holder, part);
        freed |= part_size(part) < before;
    }
    return freed;
}

/*
 * Note that the part lacks blocks of its holder. A later store copies all of them: a list of those
 * missing would need the memory that lacks. The number of stores until then doubles with each
 * failure, since each attempt reads all of the holder.
 */
static void lag(struct kvi_holder *part)
{
    part->lag_wait = part->lagging ? KV_MIN(2 * part->lag_wait + 1, MAX_LAG_WAIT) : 0;
    part->lag_left = part->lag_wait;
    part->lagging = true;
}

/* Return true when a lagging part that may have been full has room again. */
static bool has_shrunk(const struct kvi_holder *part)
{
    return part->swept_to && 2 * (part_size(part) + part->n_parked) < part->swept_to;
}

/*
 * Store the holder's blocks in its part. A lagging part first copies all the others when its time
 * has come.
 */
static void store_in_part(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_holder *part,
                          bool keeps, const uint64_t *parent, const struct kv_block *blocks,
                          size_t n)
{
    int rc;

    part->max_blocks = part_limit(holder);
    if (part->lagging && part->lag_left && !has_shrunk(part)) {
        part->lag_left--;
        return;
    }
    if (!kvi_windows_of(holder)->alone && (part->lagging || needs_sweep(part)))
        kvi_part_forget_places(ix, holder, part);
    if (part->lagging)
        rc = copy_places(ix, knows_places(holder), part);
    else
        rc = kvi_store_places(ix, part, keeps, parent, blocks, n);
    if (rc == -ENOMEM || rc == -ENOSPC) /* other errors: the main holder reports them */
        lag(part);
    else
        part->lagging = false;
}

size_t kvi_parts_store(struct kvi_index *ix, struct kvi_holder *holder, bool keeps,
                       const uint64_t *parent, const struct kv_block *blocks, size_t n)
{
    struct kvi_holder *part;
    size_t lagging = 0;

    KVI_EACH_PART(kvi_windows_of(holder), part)
    {
        store_in_part(ix, holder, part, keeps, parent, blocks, n);
        lagging += part->lagging;
    }
    return lagging;
}

/* Make a part and fill it. Lookups see it when the caller publishes windows that have it. */
static int add_part(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_holder **slot)
{
    struct kvi_holder *part = kvi_mem_alloc(&ix->mem, sizeof(*part));
    int rc;

    if (!part)
        return -ENOMEM;
    part->key = holder->key;
    part->main = holder;
    atomic_init(&part->windowed, true);
    part->max_blocks = part_limit(holder);
    rc = kvi_dir_add(&ix->holders, part, KVI_MAX_HOLDERS, &part->id);
    if (rc) {
        kvi_mem_free(&ix->mem, part);
        return rc;
    }
    ix->n_parts++;
    *slot = part;
    if (copy_places(ix, knows_places(holder), part))
        lag(part);
    return 0;
}

struct kvi_holder *kvi_part_at(const struct kvi_index *ix, struct kv_holder key, uint32_t at)
{
    const struct kvi_holder *holder = kvi_holder_find(ix, key);
    const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;

    return windows ? windows->parts[at / KVI_PARTS][at % KVI_PARTS] : NULL;
}

int kvi_part_find(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                  uint32_t number, bool add, struct kvi_holder **ret)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder **slot;
    int rc;

    if (!windows || number >= windows->n)
        return -EINVAL;
    *ret = windows->parts[tier][number / KVI_PART_WINDOWS];
    if (*ret || !add)
        return 0;
    windows = kvi_windows_copy(ix, holder);
    if (!windows)
        return -ENOMEM;
    slot = &windows->parts[tier][number / KVI_PART_WINDOWS];
    rc = add_part(ix, holder, slot);
    if (rc) {
        kvi_mem_free(&ix->mem, windows);
        return rc;
    }
    kvi_windows_publish(ix, holder, windows);
    *ret = *slot;
    return 0;
}
