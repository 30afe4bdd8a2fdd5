// SPDX-License-Identifier: Apache-2.0
/*
 * The registry: each key once, with the block that holds it in each tier.
 *
 *   table (table.h)                        entries: one a key, 64 bytes or more
 *   ┌──────┬───────┐                       ┌───────────────────────────────────────────┐
 *   │ tag  │ entry ├──────────────────────►│ parent ─► entry of the block before       │
 *   ├──────┼───────┤                       │ slot[tier]: block of the pool that serves │
 *   │  …   │   …   │                       │   (tier, group), 0: not in that tier      │
 *   └──────┴───────┘                       │ n_slots, n_children: number of references │
 *                                          └───────────────────────────────────────────┘
 *
 * An entry exists as long as a slot names it (staged, registered, duplicate) or it is the direct
 * parent of such an entry. Such a parent without a slot is a ghost: only its key is kept, and its
 * own parent is forgotten. So there are never more than two entries a block. Lookups go by tiers,
 * and a ghost is in none.
 *
 * All numbers of slots and entries start at 1, so that zeroed memory says "none".
 *
 * A table (table.h) that has become too small isn't copied in one go. It becomes the old table, and
 * each call that adds entries moves a few of its cells: 4 per entry and 64 more, so that it is
 * empty long before the new one is full. Until then a key that isn't in the new table may be in the
 * old one. A cell that was moved, or whose entry was freed, is GONE there: no entry is added to the
 * old table, so no gap needs closing.
 */
#ifndef KVBM_BM_REGISTRY_REGISTRY_H
#define KVBM_BM_REGISTRY_REGISTRY_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/xxh.h"
#include "bm/events/events.h"
#include "bm/registry/table.h"
#include "kvbm_events.h"
#include "kvbm_pool.h"
#include "kvbm_tokens.h"

struct kvbm_entry {
    uint32_t n_slots;    /* blocks of any pool that name it: staged, registered, duplicates */
    uint32_t n_children; /* entries with blocks whose parent it is */
    uint32_t parent;
    uint32_t slot[KV_N_TIERS];
    uint32_t position;
    uint32_t link; /* attachments; of a free entry, the next free one */
    uint32_t tag;  /* upper half of the key's hash; its top bits are the home bucket */
    uint8_t group;
    uint8_t tiers;  /* bit per tier with a slot */
    uint8_t untold; /* bits of tiers whose stored event had no tokens; 0 with KVBM_TOLD (told.c) */
    uint8_t flags;  /* KVBM_TOLD, KVBM_HAS_TOKENS */
    uint8_t key[];  /* of key_len bytes */
};

/* A stored event of the key had its tokens, and the key has been in some tier ever since. */
#define KVBM_TOLD 1
#define KVBM_HAS_TOKENS 2 /* the registry keeps the key's tokens */

#define KVBM_LINE 64 /* bytes of a cache line: an entry with a key of up to 20 bytes fills one */

#define KVBM_GONE UINT32_MAX /* replaces an entry in the old table */

/* The table that cells are moved out of. */
struct kvbm_old_table {
    struct kvbm_bucket *buckets; /* NULL: all cells have moved */
    uint32_t bits;
    size_t at;    /* next cell to move: a bucket's first */
    char *memory; /* memory still mapped: returned in pieces, too */
    size_t mapped;
};

/*
 * Attachments of a key (attach.c): a list of the types that it has values of, and for each a ring
 * of values.
 *
 *   entry.link ──► type ──next──► type            one node a type, at most KVBM_MAX_TYPES
 *                   │ last
 *                   ▼
 *        ┌──next── newest ◄──next── ... ◄──next── oldest
 *        └────────────────────────────────────────►┘
 */
struct kvbm_attachment {
    uint32_t next;
    uint32_t type;
    union {
        void *value;
        struct {
            uint32_t last;
            uint32_t n_values;
        };
    };
};

/* A build without NDEBUG checks at the end of every call what takes constant time. From time to
 * time it checks everything, in registries small enough for that. A fault is logged, and the
 * process aborted. */
#ifndef NDEBUG
#define KVBM_CHECKED 1
#define KVBM_CHECK_EVERY 64     /* calls between full checks */
#define KVBM_CHECK_ENTRIES 1024 /* upper limit for entries and blocks */
#endif

#define KVBM_MAX_TYPES 64
#define KVBM_MAX_TOUCH 8
#define KVBM_MAX_POOLS (KV_N_TIERS * KVBM_MAX_GROUPS)

struct kvbm_registry {
    pthread_mutex_t lock;
    uint32_t key_len;
    uint32_t entry_bytes;
    struct kvbm_events *events;
    struct kvbm_event_source source; /* this registry, as events knows it */
    bool publishing;                 /* the event queue is open for writing */
    uint64_t seed;                   /* seed of key hashes, so that nobody can choose collisions */

    uint8_t *entries;          /* [n_entries + 1] * entry_bytes, reserved for 2 * n_blocks */
    uint32_t max_entries;      /* reserved */
    uint32_t n_entries;        /* numbers ever used */
    uint32_t live_entries;     /* entries in the table */
    uint32_t free_entry;       /* first of the list */
    struct kvbm_bucket *table; /* 2^table_bits cells */
    /* bits and mask of bucket numbers; shift from a tag to its home bucket */
    uint32_t table_bits, table_mask, table_shift;
    struct kvbm_old_table old;
    size_t entries_mapped, table_mapped;

    uint32_t kept_tokens; /* tokens that are kept of a block of this size, for events; 0: none */
    uint32_t *tokens;     /* [n_entries + 1] * kept_tokens, reserved as entries */
    size_t tokens_mapped;
    uint32_t n_untold; /* entries with untold tiers */

    struct kvbm_pool *pool[KV_N_TIERS][KVBM_MAX_GROUPS];
    struct kvbm_pool *pools; /* list of all pools */
    uint64_t n_blocks;       /* blocks of all pools */

    struct kvbm_attachment *attachments; /* [n_attachments], 0 unused */
    uint32_t n_attachments, max_attachments, free_attachment;
    uint32_t dead; /* types with values to destroy once the lock is released */
    struct {
        char name[64];
        bool multiple;
        void (*destroy)(void *value);
    } types[KVBM_MAX_TYPES];
    uint32_t n_types;
    struct {
        kvbm_touch_fn fn;
        void *arg;
    } touch[KVBM_MAX_TOUCH];
    _Atomic uint32_t n_touch; /* entries of touch below it don't change */
#ifdef KVBM_CHECKED
    uint64_t calls;
    int64_t told; /* published stores minus published removals */
    /* The check at the end of a call allocates nothing. */
    uint32_t tally[2 * (KVBM_CHECK_ENTRIES + 1)];
#endif
};

static inline struct kvbm_entry *kvbm_entry(const struct kvbm_registry *r, uint32_t i)
{
    return (struct kvbm_entry *)(r->entries + (size_t)i * r->entry_bytes);
}

static inline void kvbm_lock(struct kvbm_registry *r)
{
    pthread_mutex_lock(&r->lock);
}

/** Write an event. The queue stays this thread's until the lock is released. */
void kvbm_publish(struct kvbm_registry *r, const struct kvbm_event *event);

/**
 * Call destroy for the values of a list of types. Called with the lock held; returns without it.
 */
void kvbm_destroy_dead(struct kvbm_registry *r, uint32_t dead);

#ifdef KVBM_CHECKED
/** Check at the end of a call, with the lock held: abort if an invariant is broken (check.c). */
void kvbm_check_call(struct kvbm_registry *r);
#endif

/** Release the lock, then destroy the values of keys removed meanwhile. Every call ends here. */
void kvbm_unlock(struct kvbm_registry *r);

static inline uint32_t kvbm_tag_of(const void *key, size_t len, uint64_t seed)
{
    return (uint32_t)(kv_xxh64(key, len, seed) >> 32);
}

/** Compute the table's tag, a hash of the key. Keys of 8 bytes are the usual ones. */
static inline uint32_t kvbm_tag(const struct kvbm_registry *r, uint32_t group, const void *key)
{
    uint64_t seed = r->seed + group;

    return r->key_len == 8 ? kvbm_tag_of(key, 8, seed) : kvbm_tag_of(key, r->key_len, seed);
}

static inline bool kvbm_is_key(const struct kvbm_registry *r, uint32_t entry, uint32_t group,
                               const void *key)
{
    const struct kvbm_entry *e = kvbm_entry(r, entry);

    if (e->group != group)
        return false;
    return r->key_len == 8 ? !memcmp(e->key, key, 8) : !memcmp(e->key, key, r->key_len);
}

static inline uint32_t kvbm_home(const struct kvbm_registry *r, uint32_t tag)
{
    return tag >> r->table_shift;
}

static inline void kvbm_prefetch_home(const struct kvbm_registry *r, uint32_t tag)
{
    __builtin_prefetch(&r->table[kvbm_home(r, tag)], 1);
}

static inline void kvbm_prefetch_entry(const struct kvbm_registry *r, uint32_t i)
{
    const uint8_t *e = r->entries + (size_t)i * r->entry_bytes;

    __builtin_prefetch(e, 1);
    if (r->entry_bytes > KVBM_LINE)
        __builtin_prefetch(e + r->entry_bytes - 1, 1);
}

/** As kvbm_guess, in the old table, which exists. */
uint32_t kvbm_guess_old(const struct kvbm_registry *r, uint32_t tag);

/**
 * Return the first entry in probe order with the same tag, most likely that of the key, for a
 * prefetch. 0: the key is not in the table.
 */
static inline uint32_t kvbm_guess(const struct kvbm_registry *r, uint32_t tag)
{
    for (uint32_t at = kvbm_home(r, tag);; at = (at + 1) & r->table_mask) {
        const struct kvbm_bucket *bucket = &r->table[at];

        for (uint32_t hits = kvbm_bucket_match(bucket->tag, tag); hits; hits &= hits - 1) {
            uint32_t entry = bucket->entry[__builtin_ctz(hits)];

            if (KV_LIKELY(entry))
                return entry;
        }
        if (KV_LIKELY(kvbm_bucket_empty(bucket)))
            break;
    }
    return KV_UNLIKELY(r->old.buckets != NULL) ? kvbm_guess_old(r, tag) : 0;
}

/** Find the entry of a key; 0 when there is none. */
uint32_t kvbm_find(const struct kvbm_registry *r, uint32_t group, const void *key, uint32_t tag);

/** Make room for @n more entries, so that kvbm_intern doesn't fail. Returns 0 or -ENOMEM. */
int kvbm_reserve(struct kvbm_registry *r, size_t n);

/** Find or make the entry of a key. Call kvbm_reserve before. */
uint32_t kvbm_intern(struct kvbm_registry *r, uint32_t group, const void *key, uint32_t tag);

/**
 * Count one more block that names entry @i, which follows entry @parent (0: first of a sequence) at
 * @position. The first block's parent and position stay.
 */
static inline void kvbm_entry_get(struct kvbm_registry *r, uint32_t i, uint32_t parent,
                                  uint32_t position)
{
    struct kvbm_entry *e = kvbm_entry(r, i);

    if (e->n_slots++ > 0)
        return;
    e->parent = parent;
    e->position = position;
    if (parent)
        kvbm_entry(r, parent)->n_children++;
}

/** Free entry @i (0: none) if no block or child names it: it was interned in vain. */
void kvbm_entry_drop_unnamed(struct kvbm_registry *r, uint32_t i);

/** Drop a block's reference to entry @i. Entries without references are freed. */
void kvbm_entry_put(struct kvbm_registry *r, uint32_t i);

/**
 * Return the upper limit for entries with @n_blocks more blocks; never less than the present limit.
 */
uint64_t kvbm_entries_for(const struct kvbm_registry *r, uint64_t n_blocks);

struct kvbm_span {
    void *at;
    size_t bytes;
};

/**
 * Make room for the entries of @n_blocks more blocks. @fresh: new memory that will be used; touch
 * it (kvbm_populate) after releasing the lock. Returns 0, -EINVAL (more than can be numbered) or
 * -ENOMEM.
 */
int kvbm_registry_grow(struct kvbm_registry *r, uint64_t n_blocks, struct kvbm_span fresh[2]);

/**
 * Detach the values of an entry that no tier holds any more; they are destroyed later (attach.c).
 */
void kvbm_detach_all(struct kvbm_registry *r, struct kvbm_entry *e);

/* told.c */
/**
 * Keep the tokens of blocks of @n tokens while a tier has them, so that all copies and the disk's
 * records have them. Call before pools exist. Returns 0; -EBUSY: there are pools.
 */
int kvbm_registry_keep_tokens(struct kvbm_registry *r, uint32_t n);
/** Reserve kept tokens for @entries entries. Returns 0 or -ENOMEM. */
int kvbm_tokens_grow(struct kvbm_registry *r, uint64_t entries);
/** Return the kept tokens of entry @i, or NULL. */
static inline uint32_t *kvbm_kept_tokens(const struct kvbm_registry *r, uint32_t i)
{
    return kvbm_entry(r, i)->flags & KVBM_HAS_TOKENS ? r->tokens + (size_t)i * r->kept_tokens
                                                     : NULL;
}
/**
 * Learn the tokens of entry @i, which is in some tier and may be told already. Writes an event for each
 * tier whose stored event had none.
 */
void kvbm_learn_tokens(struct kvbm_registry *r, uint32_t i, const uint32_t *tokens, uint32_t n);
/** Note that tier @tier of entry @i was told without tokens. */
void kvbm_note_untold(struct kvbm_registry *r, uint32_t i, enum kv_tier tier);
/** Note that entry @e left @tier. */
void kvbm_note_left(struct kvbm_registry *r, struct kvbm_entry *e, enum kv_tier tier);
/**
 * Learn the tokens of a chain of @n keys, of @n_tokens each, where some tier has them. Does nothing
 * without chain->tokens, or when all copies are told.
 */
void kvbm_registry_tell(struct kvbm_registry *r, const struct kvbm_chain *chain, size_t n,
                        uint32_t n_tokens);
/** Copy the kept tokens of a key to @ret (kept_tokens of them). Returns false when it has none. */
bool kvbm_registry_tokens(struct kvbm_registry *r, uint32_t group, const void *key, uint32_t *ret);

/** Key that a chain names at another position than the registry knows. */
struct kvbm_misplaced {
    int64_t index;            /* of the chain; -1: its parent */
    uint32_t position, known; /* as named now, and before */
};
/**
 * True when the registry knows the parent of @chain, or one of its @n keys, at another position: *@ret
 * tells the first.
 */
bool kvbm_registry_misplaced(struct kvbm_registry *r, const struct kvbm_chain *chain, size_t n,
                             struct kvbm_misplaced *ret);

#endif
