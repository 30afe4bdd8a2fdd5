// SPDX-License-Identifier: Apache-2.0
/* Completion (blocks get their keys) and registration (lookups find them). */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/pool/lookup.h"
#include "bm/pool/moves.h"

/* ---- to Complete ---- */

/* Find or make the entry of a key. An entry keeps the position under which it was first named;
 * another one is refused. A parent is thus always one position before its child, and no block is
 * its own ancestor. */
static inline uint32_t intern_at(struct kvbm_registry *r, uint32_t group, const void *key,
                                 uint32_t tag, uint32_t position)
{
    uint32_t i = kvbm_intern(r, group, key, tag);
    struct kvbm_entry *e = kvbm_entry(r, i);

    if (!e->n_slots && !e->n_children)
        e->position = position;
    return e->position == position ? i : 0;
}

/* Name slot @i by the key, which follows entry @parent. Room for an entry was reserved. */
static inline int name_slot(struct kvbm_pool *pool, uint32_t i, uint32_t group, const void *key,
                            uint32_t tag, uint32_t parent, uint32_t position)
{
    uint32_t entry = intern_at(pool->registry, group, key, tag, position);

    if (!entry)
        return -EEXIST;
    kvbm_entry_get(pool->registry, entry, parent, position);
    pool->slots[i].entry = entry;
    return 0;
}

/*
 * Name the first slot of a chain, which follows the key @parent (NULL: none). The parent gets an
 * entry when the slot's key has none yet or is a ghost. A known key keeps its first parent.
 */
static int name_first(struct kvbm_pool *pool, uint32_t i, uint32_t group, const void *key,
                      uint32_t tag, const void *parent, uint32_t position)
{
    struct kvbm_registry *r = pool->registry;
    uint32_t above;
    int err;

    if (!parent)
        return name_slot(pool, i, group, key, tag, 0, position);
    above = intern_at(r, group, parent, kvbm_tag(r, group, parent), position - 1);
    if (!above)
        return -EEXIST;
    /* keeps its position, so that the key can't be its own parent */
    kvbm_entry(r, above)->n_children++;
    err = name_slot(pool, i, group, key, tag, above, position);
    kvbm_entry(r, above)->n_children--;
    kvbm_entry_drop_unnamed(r, above);
    return err;
}

static void becomes_complete(struct kvbm_pool *pool, uint32_t i)
{
    pool->slots[i].state = KVBM_COMPLETE;
    pool->slots[i].flags &= (uint8_t)~SLOT_CLAIMED;
    pool->slots[i].generation++;
    pool->stats.stagings++;
}

int kvbm_stage(struct kvbm_pool *pool, uint32_t i, uint32_t group, const void *key,
               const void *parent, uint32_t position)
{
    struct kvbm_registry *r = pool->registry;
    int err = kvbm_reserve(r, 2);

    if (err == 0)
        err = name_first(pool, i, group, key, kvbm_tag(r, group, key), parent, position);
    if (err == 0)
        becomes_complete(pool, i);
    return err;
}

static int check_chain(const struct kvbm_pool *pool, size_t n, const struct kvbm_chain *chain)
{
    if (!kv_sized(chain, "kvbm_chain") || chain->size < offsetof(struct kvbm_chain, tokens) ||
        (n && !chain->keys))
        return -EINVAL;
    if (chain->group >= KVBM_MAX_GROUPS || !(pool->groups >> chain->group & 1))
        return -EINVAL;
    if (!chain->parent != !chain->position || n > UINT32_MAX - chain->position ||
        (kvbm_chain_scattered(chain) && chain->parent))
        return -EINVAL;
    return 0;
}

/* Hash the keys from @at on, up to the number of one lookup, and prefetch what naming slots by them
 * touches. */
static void hash_some(const struct kvbm_registry *r, const struct kvbm_chain *chain, size_t n,
                      size_t at, uint32_t *tags)
{
    const uint8_t *keys = chain->keys;

    if (at == 0 && chain->parent)
        kvbm_prefetch_home(r, kvbm_tag(r, chain->group, chain->parent));
    kvbm_hash_keys(r, chain->group, keys + at * r->key_len, KV_MIN(n - at, (size_t)KVBM_LOOKUP),
                   tags);
}

/* Name all slots, or none. @tags: those of the first keys. */
static int name_chain(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n,
                      const struct kvbm_chain *chain, uint32_t *tags)
{
    bool scattered = kvbm_chain_scattered(chain);
    struct kvbm_registry *r = pool->registry;
    const uint8_t *keys = chain->keys;
    uint32_t above = 0;
    size_t done = 0;
    int err = 0;

    for (; done < n && err == 0; done += err == 0) {
        const uint8_t *key = keys + done * r->key_len;
        uint32_t i = handles[done].block + 1;

        if (done % KVBM_LOOKUP == 0) {
            if (done)
                hash_some(r, chain, n, done, tags);
            kvbm_fetch_entries(r, tags, KV_MIN(n - done, (size_t)KVBM_LOOKUP));
        }
        if (done == 0)
            err = name_first(pool, i, chain->group, key, tags[0], chain->parent, chain->position);
        else
            err =
                name_slot(pool, i, chain->group, key, tags[done % KVBM_LOOKUP],
                          scattered ? 0 : above, scattered ? 0 : chain->position + (uint32_t)done);
        above = pool->slots[i].entry;
    }
    while (err < 0 && done > 0) {
        struct kvbm_slot *slot = &pool->slots[handles[--done].block + 1];

        kvbm_entry_put(r, slot->entry);
        slot->entry = 0;
    }
    return err;
}

static void keep_tokens(struct kvbm_pool *pool, uint32_t i, const uint32_t *tokens)
{
    struct kvbm_slot *slot = &pool->slots[i];

    slot->tokens = kvbm_slab_get(&pool->tokens);
    memcpy(kvbm_slot_tokens(pool, slot), tokens, pool->block_size * sizeof(*tokens));
}

/* Complete a chain. Prefetch the table's memory while the handles are checked. */
static int complete_locked(struct kvbm_pool *pool, const struct kvbm_handle *handles, size_t n,
                           const struct kvbm_chain *chain, const uint32_t *tokens)
{
    uint32_t tags[KVBM_LOOKUP];
    int err;

    hash_some(pool->registry, chain, n, 0, tags);
    err = kvbm_claim(pool, handles, n, KVBM_RESET, KVBM_RESET, false);
    if (err < 0)
        return err;
    err = kvbm_reserve(pool->registry, n + 1);
    if (err == 0 && tokens)
        err = kvbm_slab_reserve(&pool->tokens, n);
    if (err == 0)
        err = name_chain(pool, handles, n, chain, tags);
    for (size_t i = 0; err == 0 && i < n; i++) {
        becomes_complete(pool, handles[i].block + 1);
        if (tokens)
            keep_tokens(pool, handles[i].block + 1, tokens + i * pool->block_size);
    }
    if (err < 0)
        kvbm_unclaim(pool, handles, n);
    return err;
}

int kvbm_pool_complete(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                       const struct kvbm_chain *chain, struct kvbm_complete *ret)
{
    int err;

    if (!pool || (n && (!blocks || !ret)))
        return -EINVAL;
    err = check_chain(pool, n, chain);
    if (err < 0 || !n)
        return err;
    kvbm_lock(pool->registry);
    err = complete_locked(pool, &blocks->handle, n, chain, KV_OPT(chain, tokens, NULL));
    for (size_t i = 0; err == 0 && i < n; i++) {
        ret[i].handle = kvbm_handle_of(pool, blocks[i].handle.block + 1);
        blocks[i].handle = (struct kvbm_handle){0};
    }
    kvbm_unlock(pool->registry);
    return err;
}

/* ---- to Registered ---- */

/* Return the tokens for the event of a slot: its own, or kept ones that no event has told yet. */
static const uint32_t *tokens_to_tell(const struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    const struct kvbm_registry *r = pool->registry;

    if (slot->tokens)
        return kvbm_slot_tokens(pool, slot);
    if (kvbm_slot_entry(pool, slot)->flags & KVBM_TOLD || pool->block_size != r->kept_tokens)
        return NULL;
    return kvbm_kept_tokens(r, slot->entry);
}

static void publish_stored(struct kvbm_pool *pool, const struct kvbm_slot *slot)
{
    struct kvbm_registry *r = pool->registry;
    const struct kvbm_entry *e = kvbm_slot_entry(pool, slot);
    const uint32_t *tokens = tokens_to_tell(pool, slot);
    struct kvbm_event event = {
        .type = KVBM_EVENT_STORED,
        .tier = pool->tier,
        .first = !(e->tiers & ~(1u << pool->tier)),
        .group = e->group,
        .key_len = r->key_len,
        .key = e->key,
        .parent = e->parent ? kvbm_entry(r, e->parent)->key : NULL,
        .position = e->position,
        .n_tokens = tokens ? pool->block_size : 0,
        .tokens = tokens,
    };

    kvbm_publish(r, &event);
    if (tokens)
        kvbm_learn_tokens(r, slot->entry, tokens, pool->block_size);
    else
        kvbm_note_untold(r, slot->entry, pool->tier);
}

static void drop_tokens(struct kvbm_pool *pool, struct kvbm_slot *slot)
{
    kvbm_slab_put(&pool->tokens, slot->tokens);
    slot->tokens = 0;
}

static void becomes_registered(struct kvbm_pool *pool, struct kvbm_slot *slot)
{
    drop_tokens(pool, slot);
    slot->state = KVBM_REGISTERED;
    slot->flags &= (uint8_t)~SLOT_CLAIMED;
    slot->generation++;
    pool->n_mutable--;
    pool->n_immutable++;
}

static uint32_t register_first(struct kvbm_pool *pool, uint32_t i)
{
    struct kvbm_slot *slot = &pool->slots[i];
    struct kvbm_entry *e = kvbm_slot_entry(pool, slot);

    e->slot[pool->tier] = i;
    e->tiers |= (uint8_t)(1u << pool->tier);
    if (pool->registry->events)
        publish_stored(pool, slot);
    becomes_registered(pool, slot);
    pool->stats.registrations++;
    return i;
}

static uint32_t register_again(struct kvbm_pool *pool, uint32_t i, uint32_t primary)
{
    struct kvbm_slot *slot = &pool->slots[i];

    if (pool->slots[primary].refs)
        pool->slots[primary].refs++;
    else
        kvbm_slot_revive(pool, primary);
    pool->stats.registration_dedup++;
    if (slot->tokens && pool->registry->events)
        kvbm_learn_tokens(pool->registry, slot->entry, kvbm_slot_tokens(pool, slot),
                          pool->block_size);
    if (pool->reject_duplicates) {
        kvbm_entry_put(pool->registry, slot->entry);
        kvbm_slot_free(pool, i);
        pool->n_mutable--;
        return primary;
    }
    becomes_registered(pool, slot);
    slot->flags |= SLOT_DUPLICATE;
    slot->prev = primary;
    pool->slots[primary].next++;
    pool->stats.duplicate_blocks++;
    return i;
}

static uint32_t register_one(struct kvbm_pool *pool, uint32_t i)
{
    const struct kvbm_entry *e = kvbm_slot_entry(pool, &pool->slots[i]);
    uint32_t primary = e->slot[pool->tier];

    if (pool->sketch.words)
        kvbm_sketch_use(&pool->sketch, e->tag);
    return primary ? register_again(pool, i, primary) : register_first(pool, i);
}

int kvbm_pool_register(struct kvbm_pool *pool, struct kvbm_complete *blocks, size_t n,
                       struct kvbm_immutable *ret)
{
    void *caller = __builtin_return_address(0);
    int err;

    if (!pool || !n || !blocks || !ret)
        return -EINVAL;
    kvbm_lock(pool->registry);
    err = kvbm_claim(pool, &blocks->handle, n, KVBM_COMPLETE, KVBM_COMPLETE, false);
    for (size_t i = 0; err == 0 && i < n; i++) {
        uint32_t slot = register_one(pool, blocks[i].handle.block + 1);

        kvbm_track(pool, slot, caller);
        ret[i].handle = kvbm_handle_of(pool, slot);
        blocks[i].handle = (struct kvbm_handle){0};
    }
    kvbm_unlock(pool->registry);
    return err;
}

int kvbm_pool_register_chain(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                             const struct kvbm_chain *chain, struct kvbm_immutable *ret)
{
    void *caller = __builtin_return_address(0);
    int err = pool && n && blocks && ret ? check_chain(pool, n, chain) : -EINVAL;
    struct kvbm_handle *from, *to; /* may be the same */

    if (err < 0)
        return err;
    from = &blocks->handle;
    to = &ret->handle;
    kvbm_lock(pool->registry);
    err = complete_locked(pool, from, n, chain, KV_OPT(chain, tokens, NULL));
    for (size_t i = 0; err == 0 && i < n; i++) {
        uint32_t slot = register_one(pool, from[i].block + 1);

        kvbm_track(pool, slot, caller);
        from[i] = (struct kvbm_handle){0};
        to[i] = kvbm_handle_of(pool, slot);
    }
    kvbm_unlock(pool->registry);
    return err;
}

/* ---- copying from one tier to another ---- */

static int check_like(const struct kvbm_pool *pool, const struct kvbm_immutable *like)
{
    struct kvbm_pool *from = like->handle.pool;
    int64_t i;

    if (from && from->registry != pool->registry)
        return -EXDEV;
    i = from ? kvbm_slot_of(from, &like->handle) : -EINVAL;
    if (i < 0)
        return (int)i;
    if (from->slots[i].state != KVBM_REGISTERED)
        return -EBADFD;
    if (from->block_size != pool->block_size)
        return -EINVAL;
    return pool->groups >> kvbm_slot_entry(from, &from->slots[i])->group & 1 ? 0 : -EINVAL;
}

/* Return the block that carries the priority of slot @i's key. Drop a priority that has ended, so
 * that it isn't copied. */
static uint32_t prioritised(struct kvbm_pool *pool, uint32_t i)
{
    uint32_t primary = kvbm_primary_of(pool, i);

    kvbm_retain_expire_one(pool, primary);
    return primary;
}

/* Give slot @i's key the priority, and its end, of @from's slot @source, unless it has one. */
static void adopt_priority(struct kvbm_pool *pool, uint32_t i, struct kvbm_pool *from,
                           uint32_t source)
{
    uint64_t end;

    i = prioritised(pool, i); /* held, so in no list */
    source = prioritised(from, source);
    if (pool->slots[i].priority != KVBM_PRIORITY_DEFAULT ||
        from->slots[source].priority == KVBM_PRIORITY_DEFAULT)
        return;
    end = kvbm_retain_end(from, source);
    pool->slots[i].priority = from->slots[source].priority;
    if (end)
        kvbm_retain_adopt(pool, i, from, source);
    else
        kvbm_retain_drop(pool, i);
}

static uint32_t adopt_one(struct kvbm_pool *pool, uint32_t i, const struct kvbm_immutable *like,
                          const uint32_t *tokens)
{
    struct kvbm_pool *from = like->handle.pool;
    uint32_t source = like->handle.block + 1, entry = from->slots[source].entry, slot;

    kvbm_entry_get(pool->registry, entry, 0, 0); /* the entry exists: parent and position stay */
    pool->slots[i].entry = entry;
    becomes_complete(pool, i);
    if (tokens)
        keep_tokens(pool, i, tokens);
    slot = register_one(pool, i);
    adopt_priority(pool, slot, from, source);
    return slot;
}

/* Reserve room for the ends of priorities that come with @n blocks. */
static int reserve_ends(struct kvbm_pool *pool, const struct kvbm_immutable *like, size_t n)
{
    bool any = false;

    for (size_t i = 0; i < n && !any; i++)
        any = like[i].handle.pool->retained.n > 0;
    return any ? kvbm_retain_reserve(pool, n) : 0;
}

/* @tokens: of all blocks, or NULL */
static int adopt(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                 const struct kvbm_immutable *like, const uint32_t *tokens,
                 struct kvbm_immutable *ret, void *caller)
{
    int err = 0;

    kvbm_lock(pool->registry);
    for (size_t i = 0; err == 0 && i < n; i++)
        err = check_like(pool, &like[i]);
    if (err == 0)
        err = reserve_ends(pool, like, n);
    if (err == 0 && tokens)
        err = kvbm_slab_reserve(&pool->tokens, n);
    if (err == 0)
        err = kvbm_claim(pool, &blocks->handle, n, KVBM_RESET, KVBM_RESET, false);
    for (size_t i = 0; err == 0 && i < n; i++) {
        uint32_t slot = adopt_one(pool, blocks[i].handle.block + 1, &like[i],
                                  tokens ? tokens + i * pool->block_size : NULL);

        kvbm_track(pool, slot, caller);
        ret[i].handle = kvbm_handle_of(pool, slot);
        blocks[i].handle = (struct kvbm_handle){0};
    }
    kvbm_unlock(pool->registry);
    return err;
}

int kvbm_pool_adopt(struct kvbm_pool *pool, struct kvbm_mutable *blocks, size_t n,
                    const struct kvbm_immutable *like, struct kvbm_immutable *ret)
{
    if (!pool || (n && (!blocks || !like || !ret)))
        return -EINVAL;
    return n ? adopt(pool, blocks, n, like, NULL, ret, __builtin_return_address(0)) : 0;
}

int kvbm_pool_adopt_tokens(struct kvbm_pool *pool, struct kvbm_mutable *block,
                           const struct kvbm_immutable *like, const uint32_t *tokens,
                           struct kvbm_immutable *ret)
{
    return adopt(pool, block, 1, like, tokens, ret, __builtin_return_address(0));
}
