// SPDX-License-Identifier: Apache-2.0
/* Pools: creation and destruction, and the moves of a slot between free, held and inactive. */
#include "bm/pool/pool.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/utf8.h"
#include "bm/events/events.h"
#include "bm/pool/moves.h"

static const char *const tier_names[KV_N_TIERS] = {"device", "host", "disk", "external"};

const char *kvbm_tier_name(enum kv_tier tier)
{
    return (size_t)tier < KV_N_TIERS ? tier_names[tier] : "unknown";
}

const char *kvbm_state_name(enum kvbm_state state)
{
    static const char *const names[] = {"reset", "partial", "complete", "registered"};

    return (size_t)state < KV_COUNT(names) ? names[state] : "unknown";
}

/* ---- creation and destruction ---- */

static bool power_of_two(uint32_t n)
{
    return n && !(n & (n - 1));
}

static bool thresholds_ascend(const uint8_t t[3])
{
    if (!t[0] && !t[1] && !t[2])
        return true;
    return t[0] && t[0] < t[1] && t[1] < t[2] && t[2] <= KVBM_SKETCH_MAX;
}

static const char *what_is_wrong(const struct kvbm_pool_opts *opts)
{
    if (opts->tier < 0 || opts->tier >= KV_N_TIERS)
        return "no such tier";
    if (!opts->n_blocks || opts->n_blocks >= INT32_MAX)
        return "n_blocks must be 1 to 2^31 - 2";
    if (!power_of_two(opts->block_size) || opts->block_size > KVBM_MAX_BLOCK_SIZE)
        return "block_size must be a power of two, 1 to 1024";
    if ((unsigned)opts->eviction > KVBM_EVICT_LINEAGE)
        return "no such eviction policy";
    if (!thresholds_ascend(opts->lfu_thresholds))
        return "lfu_thresholds must ascend, 1 to 15";
    if (opts->name && strlen(opts->name) >= sizeof(((struct kvbm_pool *)0)->name))
        return "the name is longer than 31 bytes";
    if (opts->name && !kv_utf8_valid(opts->name))
        return "the name isn't UTF-8";
    if (opts->layout && kvbm_layout_get_config(opts->layout)->num_blocks < opts->n_blocks)
        return "the layout has fewer blocks";
    if (opts->layout && kvbm_layout_get_config(opts->layout)->page_size != opts->block_size)
        return "block_size isn't the layout's page_size";
    return NULL;
}

/*
 * Name the pool for logs and metrics: @name, or the tier's name, with the first group if the pool
 * doesn't serve all groups. Names in a registry differ, since equal ones would share a metrics
 * series.
 */
static void name_pool(struct kvbm_pool *pool, const char *name)
{
    if (name && *name)
        snprintf(pool->name, sizeof(pool->name), "%s", name);
    else if (pool->groups == UINT64_MAX)
        snprintf(pool->name, sizeof(pool->name), "%s", tier_names[pool->tier]);
    else
        snprintf(pool->name, sizeof(pool->name), "%s-g%d", tier_names[pool->tier],
                 __builtin_ctzll(pool->groups));
}

static bool name_taken(const struct kvbm_registry *r, const char *name)
{
    for (const struct kvbm_pool *p = r->pools; p; p = p->next) {
        if (!strcmp(p->name, name))
            return true;
    }
    return false;
}

static bool groups_taken(const struct kvbm_registry *r, enum kv_tier tier, uint64_t groups)
{
    for (; groups; groups &= groups - 1) {
        if (r->pool[tier][__builtin_ctzll(groups)])
            return true;
    }
    return false;
}

/*
 * Compute the memory that a pool of these options can use: its own arrays, an entry a block, the
 * table. Entries of parents that were never registered come on top.
 */
static uint64_t bytes_of(const struct kvbm_pool *pool, const struct kvbm_pool_opts *opts)
{
    uint64_t each = sizeof(struct kvbm_slot) + sizeof(uint32_t) + pool->registry->entry_bytes +
                    2 * sizeof(struct kvbm_bucket) / KVBM_BUCKET;

    each += opts->eviction == KVBM_EVICT_LFU ? 8 : 0;
    each += opts->eviction == KVBM_EVICT_LINEAGE ? sizeof(uint32_t) : 0;
    each += pool->registry->kept_tokens * sizeof(uint32_t);
    each += opts->track_handles ? sizeof(void *) : 0;
    return each * opts->n_blocks;
}

static int map_all(struct kvbm_pool *pool, const struct kvbm_pool_opts *opts)
{
    size_t n = (size_t)opts->n_blocks + 1, ends;

    if (!kvbm_memory_is_there(bytes_of(pool, opts), pool->name))
        return -ENOMEM;
    if (kvbm_evict_init(&pool->evict, opts) < 0)
        return -ENOMEM;
    ends = kvbm_evict_ends(&pool->evict);
    pool->slots = kvbm_map_dense((n + ends) * sizeof(*pool->slots), n * sizeof(*pool->slots),
                                 &pool->slots_mapped);
    pool->free = kvbm_map(n * sizeof(*pool->free), &pool->free_mapped);
    if (!pool->slots || !pool->free)
        return -ENOMEM;
    if (pool->evict.policy == KVBM_EVICT_LFU && kvbm_sketch_init(&pool->sketch, opts->n_blocks) < 0)
        return -ENOMEM;
#ifdef NDEBUG
    if (!opts->track_handles)
        return 0;
#endif
    pool->acquired = kvbm_map(n * sizeof(*pool->acquired), &pool->acquired_mapped);
    return pool->acquired ? 0 : -ENOMEM;
}

static void pool_free(struct kvbm_pool *pool)
{
    kvbm_unmap(pool->slots, pool->slots_mapped);
    kvbm_unmap(pool->free, pool->free_mapped);
    kvbm_unmap(pool->acquired, pool->acquired_mapped);
    kvbm_evict_fini(&pool->evict);
    kvbm_sketch_fini(&pool->sketch);
    kvbm_retain_fini(&pool->retained);
    kvbm_slab_fini(&pool->tokens);
    free(pool);
}

/* Add a pool to the registry. Call with the lock. Lineage pools count children by entry, and the
 * registry is about to get more entries. */
static int join(struct kvbm_registry *r, struct kvbm_pool *pool, struct kvbm_span fresh[2])
{
    uint64_t entries = kvbm_entries_for(r, pool->n_blocks);
    int err;

    if (groups_taken(r, pool->tier, pool->groups) || name_taken(r, pool->name))
        return -EEXIST;
    if (kvbm_evict_grow(&pool->evict, entries) < 0)
        return -ENOMEM;
    for (struct kvbm_pool *p = r->pools; p; p = p->next) {
        if (kvbm_evict_grow(&p->evict, entries) < 0)
            return -ENOMEM;
    }
    err = kvbm_registry_grow(r, pool->n_blocks, fresh);
    if (err < 0)
        return err;
    for (uint64_t left = pool->groups; left; left &= left - 1)
        r->pool[pool->tier][__builtin_ctzll(left)] = pool;
    pool->next = r->pools;
    r->pools = pool;
    return 0;
}

/* Allocate a pool with what @o says, outside its registry. */
static struct kvbm_pool *pool_of(struct kvbm_registry *r, const struct kvbm_pool_opts *o)
{
    struct kvbm_pool *pool = calloc(1, sizeof(*pool));

    if (!pool)
        return NULL;
    pool->registry = r;
    pool->tier = o->tier;
    pool->groups = o->groups ? o->groups : UINT64_MAX;
    name_pool(pool, o->name);
    pool->n_blocks = o->n_blocks;
    pool->block_size = o->block_size;
    pool->tokens.n_words =
        KVBM_START_WORDS + (o->block_size + 1) / 2 * 2; /* starts are aligned to 8 bytes */
    pool->reject_duplicates = o->reject_duplicates;
    pool->reset_on_release = o->reset_on_release;
    pool->layout = o->layout;
    return pool;
}

int kvbm_pool_create(struct kvbm_registry *r, const struct kvbm_pool_opts *opts,
                     struct kvbm_pool **ret)
{
    struct kvbm_pool_opts o = {0};
    struct kvbm_span fresh[2] = {{0}};
    struct kvbm_pool *pool;
    const char *wrong;
    int err;

    if (!r || !kv_sized(opts, "kvbm_pool_opts") || !ret ||
        opts->size < offsetof(struct kvbm_pool_opts, eviction))
        return -EINVAL;
    memcpy(&o, opts, KV_MIN(opts->size, sizeof(o)));
    if (o.eviction == KVBM_EVICT_DEFAULT)
        o.eviction = KVBM_EVICT_LRU;
    wrong = what_is_wrong(&o);
    if (wrong) {
        kv_log_warn("kvbm", "pool not created", "reason=\"%s\"", wrong);
        return -EINVAL;
    }
    pool = pool_of(r, &o);
    if (!pool)
        return -ENOMEM;
    err = map_all(pool, &o);
    if (err == 0) {
        kvbm_pool_start(pool);
        kvbm_lock(r);
        err = join(r, pool, fresh);
        kvbm_unlock(r);
        kvbm_populate(fresh[0].at, fresh[0].bytes);
        kvbm_populate(fresh[1].at, fresh[1].bytes);
    }
    if (err < 0) {
        pool_free(pool);
        return err;
    }
    *ret = pool;
    return 0;
}

/* Make all blocks free, in order. */
void kvbm_pool_start(struct kvbm_pool *pool)
{
    for (uint32_t i = 1; i <= pool->n_blocks; i++) {
        pool->slots[i].priority = KVBM_PRIORITY_DEFAULT;
        pool->free[i - 1] = i;
    }
    pool->free_head = 0;
    pool->n_free = pool->n_blocks;
}

uint64_t kvbm_pool_handles(struct kvbm_pool *pool)
{
    uint64_t n;

    kvbm_lock(pool->registry);
    n = pool->n_mutable;
    for (uint32_t i = 1; pool->n_immutable && i <= pool->n_blocks; i++) {
        const struct kvbm_slot *slot = &pool->slots[i];

        if (slot->state == KVBM_REGISTERED && slot->refs)
            n += slot->refs - slot->next; /* duplicates that reference it */
    }
    kvbm_unlock(pool->registry);
    return n;
}

int kvbm_pool_destroy(struct kvbm_pool *pool)
{
    struct kvbm_registry *r;
    struct kvbm_pool **at;

    if (!pool)
        return 0;
    r = pool->registry;
    kvbm_lock(r);
    if (pool->n_mutable || pool->n_immutable) {
        uint64_t mutable = pool->n_mutable, immutable = pool->n_immutable;

        kvbm_unlock(r);
        kvbm_report_leaks(pool, mutable, immutable);
        return -EBUSY;
    }
    kvbm_forget_inactive(pool);
    for (uint64_t left = pool->groups; left; left &= left - 1)
        r->pool[pool->tier][__builtin_ctzll(left)] = NULL;
    for (at = &r->pools; *at != pool; at = &(*at)->next)
        ;
    *at = pool->next;
    r->n_blocks -= pool->n_blocks;
    kvbm_unlock(r);
    pool_free(pool);
    return 0;
}

/* ---- state changes of a slot ---- */

void kvbm_slot_free(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint64_t at = (uint64_t)pool->free_head + pool->n_free;

    kvbm_slab_put(&pool->tokens, slot->tokens);
    slot->tokens = 0;
    slot->entry = 0;
    slot->refs = 0;
    slot->generation++;
    slot->state = KVBM_RESET;
    slot->flags = 0;
    slot->priority = KVBM_PRIORITY_DEFAULT;
    pool->free[at < pool->n_blocks ? at : at - pool->n_blocks] = i;
    pool->n_free++;
}

static void publish_removed(struct kvbm_pool *pool, const struct kvbm_entry *e)
{
    struct kvbm_registry *r = pool->registry;
    struct kvbm_event event = {
        .type = KVBM_EVENT_REMOVED,
        .tier = pool->tier,
        .last = !e->tiers,
        .group = e->group,
        .key_len = r->key_len,
        .key = e->key,
        .position = e->position,
    };

    kvbm_publish(r, &event);
}

/* Take the key off a slot, which is in no list. */
static void unregister(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    struct kvbm_registry *r = pool->registry;
    struct kvbm_entry *e = kvbm_entry(r, slot->entry);

    e->slot[pool->tier] = 0;
    e->tiers &= (uint8_t) ~(1u << pool->tier);
    if (r->events) {
        publish_removed(pool, e);
        kvbm_note_left(r, e, pool->tier);
    }
    if (!e->tiers && e->link)
        kvbm_detach_all(r, e);
    kvbm_entry_put(r, slot->entry);
    if (KV_UNLIKELY(slot->flags & SLOT_RETAINED))
        kvbm_retain_drop(pool, i);
    slot->entry = 0;
    slot->life++;
}

void kvbm_slot_forget(struct kvbm_pool *pool, uint32_t i)
{
    unregister(pool, i);
    kvbm_slot_free(pool, i);
}

static void duplicate_gone(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    uint32_t primary = slot->prev;

    kvbm_entry_put(pool->registry, slot->entry);
    kvbm_slot_free(pool, i);
    pool->slots[primary].next--;
    kvbm_slot_put(pool, primary);
}

void kvbm_slot_put_other(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];

    if (--slot->refs > slot->next)
        return;
    /* only duplicates reference it: new holders get handles of another generation */
    if (slot->refs) {
        slot->generation++;
        return;
    }
    pool->n_immutable--;
    if (slot->flags & SLOT_DUPLICATE) {
        duplicate_gone(pool, i);
    } else if (pool->reset_on_release) {
        kvbm_slot_forget(pool, i);
    } else {
        slot->generation++;
        pool->n_inactive++;
        kvbm_evict_insert(pool, i);
    }
}

static void count_lost(struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    pool->n_lost +=
        !(slot->flags & SLOT_LEAVING) && !(kvbm_slot_entry(pool, slot)->tiers & pool->watched);
}

/* Evict in several passes, so that the cache misses of several blocks overlap: slots, entries,
 * cells of the table. The call before has fetched the first ones (kvbm_evict_fetch). Removing the
 * last child of an entry without a block removes the entry. */
static void evict_some(struct kvbm_pool *pool, uint32_t *ret, size_t n)
{
    struct kvbm_registry *r = pool->registry;
    struct kvbm_slot *slots = pool->slots;

    kvbm_evict_pop(pool, ret, n);
    for (size_t i = 0; n > 1 && i < n; i++) {
        const struct kvbm_entry *e = kvbm_entry(r, slots[ret[i]].entry);

        kvbm_prefetch_home(r, e->tag);
        kvbm_prefetch_entry(r, e->parent);
    }
    for (size_t i = 0; i < n; i++) {
        struct kvbm_slot *slot = &slots[ret[i]];

        if (KV_UNLIKELY(pool->watched))
            count_lost(pool, slot);
        unregister(pool, ret[i]);
        slot->flags = 0;
        slot->priority = KVBM_PRIORITY_DEFAULT;
        slot->state = KVBM_RESET;
    }
}

void kvbm_evict_blocks(struct kvbm_pool *pool, uint32_t *ret, size_t n)
{
    /* Lineage has prefetched everything and follows entries one by one: take single blocks. */
    size_t some = pool->evict.policy == KVBM_EVICT_LINEAGE ? 1 : n;

    if (n)
        kvbm_retain_expire(pool, n + KVBM_RETAIN_MORE);
    for (size_t done = 0; done < n; done += some)
        evict_some(pool, ret + done, some);
    pool->n_inactive -= n;
    pool->stats.evictions += n;
    if (n && pool->n_inactive)
        kvbm_evict_fetch(pool, n);
}

size_t kvbm_forget_inactive(struct kvbm_pool *pool)
{
    size_t n = pool->n_inactive;

    for (size_t i = 0; i < n; i++) {
        uint32_t first;

        kvbm_evict_pop(pool, &first, 1);
        kvbm_slot_forget(pool, first);
    }
    pool->n_inactive = 0;
    return n;
}

/* ---- arrays of handles ---- */

void kvbm_unclaim(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (handles[i].pool) /* a hole's number may be anything */
            pool->slots[handles[i].block + 1].flags &= (uint8_t)~SLOT_CLAIMED;
    }
}

int kvbm_claim_refused(struct kvbm_pool *pool, const struct kvbm_handle *handle, bool holes)
{
    int64_t i;

    if (holes && !handle->pool)
        return 0;
    i = kvbm_slot_of(pool, handle);
    if (i < 0)
        return (int)i;
    return pool->slots[i].flags & SLOT_CLAIMED ? -EINVAL : -EBADFD;
}
