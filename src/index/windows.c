// SPDX-License-Identifier: Apache-2.0
/* Windows of holders, and the parts of the tree that hold their blocks: see windows.h. */
#include "index/windows.h"

#include <limits.h>
#include <string.h>

#include "index/kids.h"
#include "index/store.h"

#define MAX_LAG_WAIT (1u << 12) /* stores */
#define MIN_SWEEP 256u          /* blocks */

/* -- descriptions ------------------------------------------------------------------------------ */

/* Copy the holder's windows, to change and publish them. NULL: out of memory. */
static struct kvi_windows *copy_windows(struct kvi_index *ix, const struct kvi_holder *holder)
{
    const struct kvi_windows *old = kvi_windows_of(holder);
    struct kvi_windows *windows = kvi_mem_alloc(&ix->mem, sizeof(*windows));

    if (windows && old)
        *windows = *old;
    return windows;
}

static void publish(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_windows *windows)
{
    struct kvi_windows *old = kvi_windows_of(holder);

    atomic_store_explicit(&holder->windows, windows, memory_order_release);
    atomic_store_explicit(&holder->windowed, true, memory_order_release);
    /*
     * Disturb walks that have passed the holder without windows: they must not end with blocks
     * stored after.
     */
    atomic_fetch_add_explicit(&ix->windows_version, 1, memory_order_release);
    if (old)
        kvi_retire_memory(ix, &old->retired, sizeof(*old));
}

static void sort_groups(struct kvi_windows *windows)
{
    for (uint32_t i = 0; i < windows->n; i++) {
        uint32_t at = i;

        for (; at && windows->items[windows->order[at - 1]].group > windows->items[i].group; at--)
            windows->order[at] = windows->order[at - 1];
        windows->order[at] = (uint8_t)i;
    }
}

/* Return true when the holder's windows of that group have blocks of another size. */
static bool is_reshaped(const struct kvi_windows *windows, const struct kvi_window *window)
{
    for (uint32_t i = 0; windows && i < windows->n; i++)
        if (windows->items[i].group == window->group &&
            (windows->items[i].stride != window->stride ||
             kvi_window_parts(&windows->items[i]) != kvi_window_parts(window)))
            return true;
    return false;
}

/* Count the windows that the holder lacks of the window's group, whose blocks have the same size. */
static uint32_t count_missing(const struct kvi_windows *windows, const struct kvi_window *window)
{
    uint32_t n = kvi_window_parts(window);

    for (uint32_t i = 0; windows && i < windows->n; i++)
        n -= windows->items[i].group == window->group;
    return n;
}

static int set_window(struct kvi_index *ix, struct kvi_holder *holder,
                      const struct kvi_window *window)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    uint32_t i = 0;

    if (is_reshaped(windows, window))
        return -EEXIST;
    while (windows && i < windows->n &&
           (windows->items[i].group != window->group || windows->items[i].part != window->part))
        i++;
    if (windows && i < windows->n && memcmp(&windows->items[i], window, sizeof(*window)) == 0)
        return (int)i;
    if ((!windows || i == windows->n) && i + count_missing(windows, window) > KVI_MAX_WINDOWS)
        return -ENOSPC;
    windows = copy_windows(ix, holder);
    if (!windows)
        return -ENOMEM;
    windows->items[i] = *window;
    windows->n = KV_MAX(windows->n, i + 1);
    sort_groups(windows);
    publish(ix, holder, windows);
    return (int)i;
}

int kvi_begin(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret)
{
    kvi_lock(ix);
    *ret = kvi_holder_await(ix, key);
    return *ret ? 0 : kvi_holder_add(ix, key, ret);
}

int kvi_set_window(struct kvi_index *index, struct kv_holder key, const struct kvi_window *window)
{
    struct kvi_holder *holder;
    int rc;

    if (!window->need || !window->stride || window->part >= kvi_window_parts(window) ||
        window->parts > KVI_MAX_WINDOW_PARTS || (window->stride > 1 && window->parts > 1))
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = set_window(index, holder, window);
    kvi_unlock(index);
    return rc;
}

int kvi_get_windows(struct kvi_index *index, struct kv_holder key, struct kvi_window *ret)
{
    const struct kvi_holder *holder;
    const struct kvi_windows *windows;
    int n = -ENOENT;

    kvi_lock(index);
    holder = kvi_holder_find(index, key);
    windows = holder ? kvi_windows_of(holder) : NULL;
    if (holder)
        n = windows ? (int)windows->n : 0;
    for (int i = 0; i < n; i++)
        ret[i] = windows->items[i];
    pthread_mutex_unlock(&index->lock);
    return n;
}

/* -- parts ------------------------------------------------------------------------------------- */

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
    if (ix->copies.doubted == part)
        ix->copies.doubted = NULL;
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

/* Return the holder or part that knows the most places. */
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

/*
 * Remove places without blocks of the holder: from before its main group was known, or of blocks
 * forgotten at a limit.
 */
static void forget_places(struct kvi_index *ix, const struct kvi_holder *holder,
                          struct kvi_holder *part)
{
    uint64_t *names = NULL;
    size_t n = kvi_list_names(ix, part, &names);

    kvi_settle(ix); /* the queue of dirty chains belongs to one holder at a time */
    while (n--)
        if (!kvi_tiers_of(ix, holder, names[n]))
            (void)kvi_take_one(ix, part, KVI_PLACED, 0, names[n], 0);
    kvi_mem_free(&ix->mem, names);
    kvi_settle(ix);
    part->swept_to = part_size(part) + part->n_parked;
}

/* Return true when the part has doubled since the last sweep: such places may be the cause. */
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
        forget_places(ix, holder, part);
        freed |= part_size(part) < before;
    }
    return freed;
}

/*
 * Note that the part lacks blocks of its holder. A later store copies all of them. The number of
 * stores until then doubles with each failure.
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
        forget_places(ix, holder, part);
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
    windows = copy_windows(ix, holder);
    if (!windows)
        return -ENOMEM;
    slot = &windows->parts[tier][number / KVI_PART_WINDOWS];
    rc = add_part(ix, holder, slot);
    if (rc) {
        kvi_mem_free(&ix->mem, windows);
        return rc;
    }
    publish(ix, holder, windows);
    *ret = *slot;
    return 0;
}

/* -- a window's blocks ------------------------------------------------------------------------- */

/* Add a copy of a block; not @counted: make it at least one. Returns 0 or -ENOMEM. */
static int give(struct kvi_index *ix, struct kvi_holder *part, enum kv_tier bit, uint32_t source,
                bool counted, uint64_t hash)
{
    const struct kv_block block = {hash, 0};

    if (kvi_tiers_of(ix, part, hash))
        return kvi_known(ix, part, bit, source, counted, &hash, 1) < 0 ? -ENOMEM : 0;
    if (kvi_park(ix, part, kvi_placeless_parent(hash), block, 1u << bit) &&
        !kvi_copies_add(ix, part, bit, source, hash, false, counted))
        kvi_unpark(ix, part, kvi_parked_find(ix, part, hash));
    return 0;
}

int kvi_window_add(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                   uint32_t number, uint32_t source, bool counted, const uint64_t *hashes, size_t n)
{
    enum kv_tier bit = (enum kv_tier)kvi_window_tier(number);
    struct kvi_holder *holder, *part;
    int rc;

    if ((unsigned)tier >= KV_N_TIERS || source > KVI_MAX_SOURCE)
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = kvi_part_find(index, holder, tier, number, true, &part);
    if (!rc)
        rc = kvi_known_reserve(index, part, bit, hashes, n);
    if (!rc)
        kvi_copies_imply(part, bit, source);
    for (size_t i = 0; i < n && !rc; i++)
        rc = give(index, part, bit, source, counted, hashes[i]);
    kvi_copies_settle(index);
    kvi_unlock(index);
    return rc;
}

int kvi_window_place(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                     uint32_t number, const uint64_t *parent, const struct kv_block *blocks,
                     size_t n)
{
    struct kvi_holder *holder, *part;
    int rc;

    if ((unsigned)tier >= KV_N_TIERS || (n && !blocks) || n > UINT32_MAX / 2)
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = kvi_part_find(index, holder, tier, number, true, &part);
    if (!rc && kvi_parts_store(index, holder, tier != KV_TIER_DEVICE, parent, blocks, n) &&
        part->lagging)
        rc = -ENOMEM;
    kvi_unlock(index);
    return rc;
}

/* Return true when only the place of @place is known, and no other block is below it. */
static bool is_ghost(const struct kvi_index *ix, struct kvi_place place)
{
    uint64_t entry = kvi_who_get(place.entry);

    return kvi_mask_at(ix, entry, place.off) == 1u << KVI_PLACED &&
           kvi_entry_len(entry) == place.off + 1 && !kvi_entry_kids(ix, entry);
}

/* Return true when any part of the holder has the block in a window. */
static bool is_in_window(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash)
{
    struct kvi_holder *part;

    KVI_EACH_PART(kvi_windows_of(holder), part)
    {
        if (kvi_tiers_of(ix, part, hash) & ~(1u << KVI_PLACED))
            return true;
    }
    return false;
}

static void tidy_part(struct kvi_index *ix, struct kvi_holder *part, uint64_t hash)
{
    struct kvi_parked *parked = kvi_parked_find(ix, part, hash);
    struct kvi_place place;

    if (parked && parked->mask == 1u << KVI_PLACED)
        kvi_unpark(ix, part, parked);
    while (kvi_locate(ix, part, hash, &place, NULL) && is_ghost(ix, place)) {
        const struct kvi_chain *above = place.off ? place.chain : place.chain->parent;
        bool top = !above->parent;

        if (!top)
            hash = kvi_name_of(ix, part,
                               kvi_chain_run(above).pos +
                                   (place.off ? place.off : kvi_chain_run(above).len) - 1);
        kvi_cut(ix, part, place.chain, place.entry, place.off, false);
        if (top || is_in_window(ix, part->main, hash))
            break;
    }
}

void kvi_part_tidy(struct kvi_index *ix, struct kvi_holder *part, uint64_t hash)
{
    struct kvi_holder *main = part->main, *each;

    if (!kvi_windows_of(main)->alone || is_in_window(ix, main, hash))
        return;
    kvi_settle(ix); /* the queue of dirty chains belongs to one holder at a time */
    KVI_EACH_PART(kvi_windows_of(main), each)
    {
        tidy_part(ix, each, hash);
        kvi_settle(ix);
    }
}

long kvi_window_take(struct kvi_index *index, struct kv_holder key, enum kv_tier tier,
                     uint32_t number, uint32_t source, const uint64_t *hashes, const uint32_t *left,
                     size_t n)
{
    enum kv_tier bit = (enum kv_tier)kvi_window_tier(number);
    struct kvi_holder *holder, *part = NULL;
    long found = 0;

    if ((unsigned)tier >= KV_N_TIERS || source > KVI_MAX_SOURCE || n > LONG_MAX)
        return -EINVAL;
    kvi_lock(index);
    holder = kvi_holder_await(index, key);
    if (holder)
        (void)kvi_part_find(index, holder, tier, number, false, &part);
    for (size_t i = 0; part && i < n; i++) {
        int rc =
            kvi_take_one(index, part, bit, source, hashes[i], left ? left[i] : KVI_COPIES_UNSAID);

        if (rc < 0) {
            found = rc;
            break;
        }
        found += rc;
        kvi_part_tidy(index, part, hashes[i]);
    }
    kvi_unlock(index);
    return found;
}

/* -- how lookups of a holder go ---------------------------------------------------------------- */

/* The rule of a holder without windows is all zero. */
struct rule {
    bool alone, drops, main_keeps;
    uint64_t kept_groups;
};

static struct rule rule_of(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);

    return windows ? (struct rule){windows->alone, windows->drops, windows->main_keeps,
                                   windows->kept_groups}
                   : (struct rule){0};
}

static int set_rule(struct kvi_index *ix, struct kvi_holder *holder, struct rule rule)
{
    struct rule old = rule_of(holder);
    struct kvi_windows *windows;
    struct kvi_holder *part;
    bool has_main = old.alone && !rule.alone;

    if (old.alone == rule.alone && old.drops == rule.drops && old.main_keeps == rule.main_keeps &&
        old.kept_groups == rule.kept_groups)
        return 0;
    windows = copy_windows(ix, holder);
    if (!windows)
        return -ENOMEM;
    windows->alone = rule.alone;
    windows->drops = rule.drops;
    windows->main_keeps = rule.main_keeps;
    windows->kept_groups = rule.kept_groups;
    publish(ix, holder, windows);
    KVI_EACH_PART(has_main ? windows : NULL, part)
    {
        forget_places(ix, holder, part);
    }
    return 0;
}

int kvi_set_alone(struct kvi_index *index, struct kv_holder key, bool alone)
{
    struct kvi_holder *holder;
    int rc = kvi_begin(index, key, &holder);

    if (!rc) {
        struct rule rule = rule_of(holder);

        rule.alone = alone;
        rc = set_rule(index, holder, rule);
    }
    kvi_unlock(index);
    return rc;
}

int kvi_set_drops(struct kvi_index *index, struct kv_holder key)
{
    struct kvi_holder *holder;
    int rc = kvi_begin(index, key, &holder);

    if (!rc) {
        struct rule rule = rule_of(holder);

        rule.drops = true;
        rc = set_rule(index, holder, rule);
    }
    kvi_unlock(index);
    return rc;
}

int kvi_set_keeps(struct kvi_index *index, struct kv_holder key, bool main, uint64_t groups)
{
    struct kvi_holder *holder;
    int rc = kvi_begin(index, key, &holder);

    if (!rc)
        rc = set_rule(index, holder, (struct rule){rule_of(holder).alone, true, main, groups});
    kvi_unlock(index);
    return rc;
}

uint64_t kvi_windows_blocks(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *part;
    uint64_t blocks = 0;

    KVI_EACH_PART(windows && windows->alone ? windows : NULL, part)
    blocks = KV_MAX(blocks, atomic_load_explicit(&part->blocks, memory_order_relaxed));
    return blocks;
}
