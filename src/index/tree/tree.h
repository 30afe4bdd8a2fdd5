// SPDX-License-Identifier: Apache-2.0
/**
 * The tree inside an index: its structures, and the rules by which one writer changes them under
 * many readers. docs/index.md has the drawing and the argument.
 *
 * A chain is a run of blocks without a branch: a path-compressed node. Its blocks lie side by side
 * in the arena. Its holders are a list of words, one per holder: "holder H has the first LEN blocks
 * of this chain, all in tiers MASK". A holder that has a place also has the place's parents. A
 * holder in a chain therefore has all of the chain above.
 *
 * How the writer changes what readers see: 1. One step at a time. Every change of content is one
 * release store of one word (an entry, a
 *    count, a pointer), and every such store leaves the tree in a valid state.
 * 2. After each step the writer increments the chain's version. A chain that is replaced or removed
 *    gets an odd version, its last, after the pointer to it is gone.
 * 3. The writer retires what it has unlinked, and frees it when no reader can see it any more.
 *
 * Readers note a chain's version before they read the chain, and compare it at the end. When no
 * version on their path has changed, all they read was true at one moment. A writer that sleeps
 * between two steps disturbs no reader. A writer that changes this very path again and again makes
 * the reader begin anew; after KVI_FIND_TRIES times the reader takes the lock for one walk.
 */
#ifndef KV_INDEX_TREE_TREE_H
#define KV_INDEX_TREE_TREE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"
#include "base/thread/epoch.h"
#include "index/memory/arena.h"
#include "index/memory/dir.h"
#include "index/memory/mem.h"
#include "index/memory/table.h"
#include "index/tree/copies.h"
#include "index/tree/facts.h"
#include "index/tree/parked.h"

/** Most blocks in a chain: bounds the copying of a split or a move. */
#define KVI_CHAIN_MAX 256u
/** Walks of a lookup that the writer may disturb before the lookup takes the lock. */
#define KVI_FIND_TRIES 64
#define KVI_MAX_HOLDERS (1u << 24)

/** Kinds of garbage in limbo. */
enum kvi_kind {
    KVI_KIND_MEMORY, /* memory of kvi_mem_alloc */
    KVI_KIND_CHAIN,
    KVI_KIND_EXTENT /* an extent: the object is the header's engine word */
};

/* -- entries: one holder's part of one chain --------------------------------------------------- */

/*  63      62..37                          36..33  32..24  23..0
 *  valid | aux: children of this chain   |  mask |  len  | holder
 *        |      that the holder is in,   |       |       |
 *        |      or the number of a tmap  |  0    |       | */
#define KVI_ENTRY_VALID (UINT64_C(1) << 63)
#define KVI_AUX_MAX ((1u << 26) - 1)

static inline uint64_t kvi_entry(uint32_t holder, uint32_t len, uint32_t mask, uint32_t aux)
{
    return KVI_ENTRY_VALID | (uint64_t)aux << 37 | (uint64_t)mask << 33 | (uint64_t)len << 24 |
           holder;
}
static inline uint32_t kvi_entry_holder(uint64_t e)
{
    return (uint32_t)e & 0xffffff;
}
static inline uint32_t kvi_entry_len(uint64_t e)
{
    return (uint32_t)(e >> 24) & 0x1ff;
}
/** Return the tiers of all blocks of the entry, a bit per tier; 0: they differ, see the tmap. */
static inline uint32_t kvi_entry_mask(uint64_t e)
{
    return (uint32_t)(e >> 33) & 0xf;
}
static inline uint32_t kvi_entry_aux(uint64_t e)
{
    return (uint32_t)(e >> 37) & KVI_AUX_MAX;
}

/** Tiers of each block, four bits each, for an entry whose blocks differ. */
struct kvi_tmap {
    struct kv_retired retired;
    uint32_t number; /* in index->tmaps */
    uint32_t kids;   /* number of children, which aux holds for other entries */
    uint32_t capacity;
    uint32_t reserved;
    _Atomic uint64_t word[]; /* 16 blocks each */
};

/**
 * Entries of a chain with more than two holders. Dense, for readers; large lists have a hash index
 * for the writer.
 */
struct kvi_list {
    struct kv_retired retired;
    _Atomic uint32_t n;
    uint32_t capacity;
    uint32_t *index; /* 2 * capacity values of slot + 1, behind the entries; NULL when small */
    _Atomic uint64_t entry[];
};

/* -- chains ------------------------------------------------------------------------------------ */

enum kvi_chain_flags {
    KVI_DIRTY = 1,   /* in the index's queue of chains to settle */
    KVI_ALIASED = 2, /* some holder may have another name for a block here */
    /* Some block's hash may be missing from the table (too many places share it). */
    KVI_UNNAMED = 4,
    KVI_MIXED = 8, /* some entry may have a tmap */
    KVI_TWINS = 16 /* some block's hash may also be in the slot of another place */
};

struct kvi_chain {
    _Atomic uint64_t run;     /* position of the first block << 32 | number of blocks */
    _Atomic uint32_t version; /* even; odd: dead */
    uint32_t n_full;          /* number of holders with all blocks */
    _Atomic uintptr_t kids;   /* see kids.h */
    _Atomic uint64_t who[2];  /* two entries, or in who[0] a struct kvi_list * (bit 63 clear) */
    struct kvi_chain *parent; /* the root's is NULL */
    struct kv_retired link;   /* in limbo, and in the queue of dirty chains */
    uint16_t capacity;        /* blocks for which the extent has room */
    uint8_t flags;
    uint8_t reserved;
    uint32_t kid_hint; /* while dropping a subtree: number of children that the holder was in */
};
_Static_assert(sizeof(struct kvi_chain) == 64, "a chain is a cache line");

struct kvi_run {
    uint32_t pos, len;
};
static inline struct kvi_run kvi_chain_run(const struct kvi_chain *chain)
{
    uint64_t run = atomic_load_explicit(&chain->run, memory_order_acquire);

    return (struct kvi_run){(uint32_t)(run >> 32), (uint32_t)run};
}
static inline void kvi_chain_set_run(struct kvi_chain *chain, uint32_t pos, uint32_t len)
{
    atomic_store_explicit(&chain->run, (uint64_t)pos << 32 | len, memory_order_release);
}
/**
 * Test hook, called after every step, in place of a reader that looks at that moment; else NULL.
 */
extern void (*kvi_step_hook)(void);

/**
 * Increment the version: rule 2. Pairs with the readers' acquire loads before and after reading.
 */
static inline void kvi_chain_bump(struct kvi_chain *chain)
{
    atomic_store_explicit(&chain->version,
                          atomic_load_explicit(&chain->version, memory_order_relaxed) + 2,
                          memory_order_release);
    if (KV_UNLIKELY(kvi_step_hook != NULL))
        kvi_step_hook();
}

/* -- the index --------------------------------------------------------------------------------- */

/** Whether a holder's stream has shown that it announces the removal of each copy in a tier. */
enum kvi_counts { KVI_COUNTS_UNKNOWN, KVI_COUNTS_EACH };

struct kvi_holder {
    struct kv_retired retired;
    struct kv_holder key;
    uint32_t id;
    _Atomic uint64_t blocks;
    struct kvi_holder_tier {
        uint64_t blocks;
        uint32_t n_stored_again; /* stores after a removal that left copies: see copies.c */
        uint16_t implied;        /* source of blocks without a record */
        uint8_t counts;          /* enum kvi_counts */
    } tier[KV_N_TIERS];
    uint64_t n_roots;   /* number of top-level chains with blocks of the holder */
    uint64_t n_aliases; /* see names.h */
    uint64_t n_copies;  /* records in copies.h */
    uint64_t n_parked;  /* records in parked.h, in a list */
    uint64_t n_lost;    /* see kvi_holder_info; an overlay's are its main holder's */
    uint64_t n_moved;   /* see kvi_holder_info */
    bool lost_more;     /* ... and others that nobody has counted */
    uint32_t oldest, newest;
    uint64_t max_blocks, n_refused;
    uint32_t lag_wait, lag_left; /* a lagging overlay: stores until the next attempt to catch up */
    bool lagging;                /* the overlay lacks blocks of its main holder */
    uint64_t swept_to;           /* size of the overlay when it was last swept */
    /* Call that clears the holder, slice by slice; other writers of the holder wait. */
    const void *clearing;
    _Atomic bool windowed; /* the holder has windows, or is an overlay */
    /* Hidden from lookups while a large tree is dropped from below: clear.c. */
    _Atomic bool hidden;
    struct kvi_holder *main;             /* of an overlay: its main holder; see windows.h */
    struct kvi_windows *_Atomic windows; /* NULL: none */
};

/** Note that @n blocks or copies of the holder were left out at a limit, or for want of memory. */
static inline void kvi_note_lost(struct kvi_holder *holder, uint64_t n)
{
    (holder->main ? holder->main : holder)->n_lost += n;
}

/** Note that the holder lacks blocks or copies, nobody knows how many. */
static inline void kvi_note_lost_more(struct kvi_holder *holder)
{
    struct kvi_holder *main = holder->main ? holder->main : holder;

    main->n_lost++;
    main->lost_more = true;
}

/**
 * Note that the engine removed @n copies that the holder lacks: they are some of those left out.
 * With the last one the index lacks nothing any more.
 */
static inline void kvi_note_gone(struct kvi_holder *holder, uint64_t n)
{
    struct kvi_holder *main = holder->main ? holder->main : holder;

    if (!main->lost_more)
        main->n_lost -= n < main->n_lost ? n : main->n_lost;
}

/** A holder's own name for a place that has another name in its slot. */
struct kvi_alias {
    uint64_t hash;
    uint32_t holder;
    uint32_t pos;
};

/** Place of a dump or a clear. Writers that replace or remove the chain correct it (shape.c). */
struct kvi_cursor {
    struct kvi_cursor *next;
    struct kvi_chain *at;
    uint32_t emitted; /* number of blocks at the chain's start that are done */
    uint32_t upto;    /* blocks up to here are done for holders with ids below `holder` */
    uint32_t holder;  /* 0: the chain isn't begun */
    bool after;       /* children up to `order` are done */
    uint64_t order;
};

struct kvi_slab;
struct kvi_windows;

/**
 * Add a cursor to the index's list. The caller holds the lock, as does every user of the cursor.
 */
void kvi_cursor_add(struct kvi_index *ix, struct kvi_cursor *cursor);
void kvi_cursor_remove(struct kvi_index *ix, const struct kvi_cursor *cursor);

struct kvi_index {
    /* Fields for readers. */
    struct kvi_chain root; /* no blocks, no holders */
    struct kvi_arena arena;
    struct kvi_dir holders; /* id -> struct kvi_holder */
    struct kvi_dir tmaps;   /* number -> struct kvi_tmap */

    /*
     * Test hook, else NULL: called with each chain that a walk is about to read, and with NULL
     * before the walk is judged.
     */
    void (*find_hook)(void *arg, const struct kvi_chain *chain);
    void *find_hook_arg;

    _Atomic uint64_t windows_version; /* increments when a holder's windows change */

    /* Counters that the writer changes and any thread reads, on cache lines of their own. */
    _Alignas(64) _Atomic uint64_t n_holders;
    _Atomic uint64_t n_chains, n_blocks, n_holder_blocks, n_tier_blocks[KV_N_TIERS];
    _Atomic uint64_t n_walks_alone; /* lookups that had to lock out the writer */
    /* Set by kvi_unlock. */
    _Atomic uint64_t n_parked, n_parked_forgotten, n_copies, n_copies_uncounted, n_doubts;
    _Atomic uint64_t n_refused, n_moved;
    struct kvi_mem mem;

    /* Fields for the writer, under the lock. */
    _Alignas(64) pthread_mutex_t lock;
    pthread_mutex_t gate;   /* held by the first of the threads that wait for the lock */
    pthread_cond_t cleared; /* signals that a holder's clear has ended */
    struct kv_limbo limbo;
    struct kvi_table names;      /* engine hash -> position */
    struct kvi_table holder_ids; /* worker, rank -> id */
    struct kvi_alias *aliases;   /* dense */
    uint32_t n_overlays;         /* number of holders that are overlays: see windows.h */
    size_t n_aliases, aliases_capacity;
    struct kvi_table alias_names; /* holder, hash -> index in aliases */
    /* Holder, name in the place's slot -> index in aliases. */
    struct kvi_table alias_places;
    struct kvi_slab *slabs, *full_slabs; /* of chains */
    struct kvi_chain *dirty_head, *dirty_tail;
    struct kvi_copies copies;
    struct kvi_parking parking;
    struct kvi_cursor *cursors;
    uint64_t max_blocks, max_holder_blocks;
    struct kvi_scratch *scratch; /* of kvi_store */
};

/** Add to a counter. Only one writer: no read-modify-write needed. */
static inline void kvi_count(_Atomic uint64_t *counter, uint64_t more)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

static inline void kvi_retire_memory(struct kvi_index *ix, struct kv_retired *object, size_t bytes)
{
    kv_limbo_retire(&ix->limbo, object, KVI_KIND_MEMORY, bytes);
}

static inline struct kvi_holder *kvi_holder_at(const struct kvi_index *ix, uint32_t id)
{
    return kvi_dir_get(&ix->holders, id);
}

/** Return the chain of the block at @pos. For the writer only. */
static inline struct kvi_chain *kvi_owner(const struct kvi_index *ix, uint32_t pos)
{
    return (struct kvi_chain *)(uintptr_t)*kvi_arena_engines(&ix->arena,
                                                             kvi_arena_start(&ix->arena, pos));
}

/* -- index.c ----------------------------------------------------------------------------------- */

/** Begin a write. */
void kvi_lock(struct kvi_index *ix);
/**
 * Begin a write behind all threads that wait for the lock now, for a call that lets others go
 * first.
 */
void kvi_lock_in_turn(struct kvi_index *ix);
struct kvi_holder *kvi_holder_find(const struct kvi_index *ix, struct kv_holder key);
/** Find the holder for a write. While the holder is being cleared, waits without the lock. */
struct kvi_holder *kvi_holder_await(struct kvi_index *ix, struct kv_holder key);
/** Add a holder. Returns 0, -ENOMEM or -ENOSPC. */
int kvi_holder_add(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret);
/**
 * Take the lock and find the holder, or make it. The lock is held afterwards in any case. Returns
 * 0, -ENOMEM or -ENOSPC.
 */
int kvi_begin(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret);
/** Remove a holder without blocks, and its overlays (windows.h). */
void kvi_holder_drop(struct kvi_index *ix, struct kvi_holder *holder);
/** End a write: settle dirty chains, free garbage, unlock. */
void kvi_unlock(struct kvi_index *ix);

/* -- chain.c: memory of chains, who holds them ------------------------------------------------- */

struct kvi_chain *kvi_chain_new(struct kvi_index *ix);
void kvi_chain_free(struct kvi_index *ix, struct kvi_chain *chain); /* frees only the struct */
/* Frees a chain that no reader has seen. */
void kvi_chain_discard(struct kvi_index *ix, struct kvi_chain *chain);
/** Mark the chain as dead and retire it with its list. The caller retires its extent and tmaps. */
void kvi_chain_retire(struct kvi_index *ix, struct kvi_chain *chain);
void kvi_slabs_fini(struct kvi_index *ix);

uint32_t kvi_who_count(const struct kvi_chain *chain);
/** Return the i-th entry. Entries have no order. */
_Atomic uint64_t *kvi_who_at(const struct kvi_chain *chain, uint32_t i);
_Atomic uint64_t *kvi_who_find(const struct kvi_chain *chain, uint32_t holder);
/**
 * Make room for one more entry (or @n in a new chain), without a visible change. Returns 0 or
 * -ENOMEM.
 */
int kvi_who_reserve(struct kvi_index *ix, struct kvi_chain *chain, uint32_t n);
void kvi_who_add(struct kvi_chain *chain, uint64_t entry);
void kvi_who_remove(struct kvi_chain *chain, _Atomic uint64_t *entry);
/** Shrink the list. Best effort. */
void kvi_who_shrink(struct kvi_index *ix, struct kvi_chain *chain);

/** Change an entry: one step. */
static inline void kvi_who_set(struct kvi_chain *chain, _Atomic uint64_t *entry, uint64_t value)
{
    atomic_store_explicit(entry, value, memory_order_release);
    kvi_chain_bump(chain);
}
static inline uint64_t kvi_who_get(const _Atomic uint64_t *entry)
{
    return atomic_load_explicit(entry, memory_order_acquire);
}

/* -- tiers.c: the tiers of an entry's blocks --------------------------------------------------- */

static inline struct kvi_tmap *kvi_tmap_at(const struct kvi_index *ix, uint64_t entry)
{
    return kvi_dir_get(&ix->tmaps, kvi_entry_aux(entry));
}
static inline uint32_t kvi_tmap_get(const struct kvi_tmap *tmap, uint32_t i)
{
    return (uint32_t)(atomic_load_explicit(&tmap->word[i / 16], memory_order_acquire) >>
                      (i % 16 * 4)) &
           0xf;
}
/** Return the tiers of block @i of an entry. */
static inline uint32_t kvi_mask_at(const struct kvi_index *ix, uint64_t entry, uint32_t i)
{
    return kvi_entry_mask(entry) ? kvi_entry_mask(entry) : kvi_tmap_get(kvi_tmap_at(ix, entry), i);
}
/** Make a tmap for @capacity blocks, each with tiers @mask. Returns NULL when out of memory. */
struct kvi_tmap *kvi_tmap_new(struct kvi_index *ix, uint32_t capacity, uint32_t mask);
/* Frees a tmap that no reader has seen. */
void kvi_tmap_free(struct kvi_index *ix, struct kvi_tmap *tmap);
/* Retires a tmap that no entry refers to. */
void kvi_tmap_retire(struct kvi_index *ix, struct kvi_tmap *tmap);
/** Add @tier to blocks from..to of the tmap, or remove it. Deepest first; each word is a step. */
void kvi_tmap_set(struct kvi_chain *chain, struct kvi_tmap *tmap, uint32_t from, uint32_t to,
                  uint32_t mask, bool on);
/**
 * Give the entry a tmap with room for @capacity blocks, without a visible change. Returns 0 or
 * -ENOMEM.
 */
int kvi_entry_mix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry,
                  uint32_t capacity);
/** Remove the tmap of an entry whose blocks all have the same tiers, without a visible change. */
void kvi_entry_unmix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry);
uint32_t kvi_entry_kids(const struct kvi_index *ix, uint64_t entry);
/** Set the number of children. Readers don't use it, so this is no step. */
void kvi_entry_set_kids(struct kvi_index *ix, _Atomic uint64_t *entry, uint32_t kids);
void kvi_entry_count_kid(struct kvi_index *ix, _Atomic uint64_t *entry, int more);
/** Add blocks from..to of an entry, with their tiers, to all totals, or subtract them. */
void kvi_entry_account(struct kvi_index *ix, struct kvi_holder *holder, uint64_t entry,
                       uint32_t from, uint32_t to, bool more);
/** Count @n places that a holder gained or (negative) lost. */
static inline void kvi_account_places(struct kvi_index *ix, struct kvi_holder *holder, uint64_t n)
{
    kvi_count(&holder->blocks, n);
    if (!holder->main)
        kvi_count(&ix->n_holder_blocks, n);
}
/** Count @n blocks that enter or leave one tier. */
void kvi_account_tier(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                      uint64_t n);

/* -- names.c: engine hashes to places ---------------------------------------------------------- */

int kvi_names_init(struct kvi_index *ix, uint64_t expected_blocks);
void kvi_names_fini(struct kvi_index *ix);

/** A block's place in a chain and, on request, the holder's entry there. */
struct kvi_place {
    struct kvi_chain *chain;
    uint32_t off;
    _Atomic uint64_t *entry;
};
static inline uint32_t kvi_place_pos(struct kvi_place place)
{
    return kvi_chain_run(place.chain).pos + place.off;
}

/**
 * Find the place that @holder calls @hash. *@ret_n_same (may be NULL) is the number of places in
 * the table under that hash.
 */
bool kvi_locate(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash,
                struct kvi_place *ret, uint32_t *n_same);
/** Return the name that @holder, which has the place, gives it. */
uint64_t kvi_name_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint32_t pos);
/**
 * Prefetch for kvi_locate. Call before each of its calls for @n hashes, @stride bytes apart, in
 * order. Works in two rounds, since the first round's data tell the addresses of the second.
 */
void kvi_locate_ahead(const struct kvi_index *ix, const void *hashes, size_t stride, size_t i,
                      size_t n);
/** Run only the first of the two rounds, where other work follows. */
void kvi_locate_soon(const struct kvi_index *ix, const void *hashes, size_t stride, size_t n);

bool kvi_name_in_table(const struct kvi_index *ix, uint64_t hash, uint32_t pos);
/**
 * Mark the chains of all places in the table under @hash with KVI_TWINS, before another place gets
 * that hash.
 */
void kvi_names_note_twins(const struct kvi_index *ix, uint64_t hash);
int kvi_name_insert(struct kvi_index *ix, uint64_t hash, uint32_t pos);
/** Remove the names of @n blocks from the table. Missing names are ignored. */
void kvi_names_erase(struct kvi_index *ix, uint32_t pos, uint32_t n);
/**
 * Update names and aliases of @n blocks that moved from @from to @to, where their hashes are
 * already. Covers the chain's holders and @extra (UINT32_MAX: none).
 */
void kvi_names_move(struct kvi_index *ix, const struct kvi_chain *chain, uint32_t extra,
                    uint32_t from, uint32_t to, uint32_t n);

/** Index of the alias, or -1. */
long kvi_alias_of_place(const struct kvi_index *ix, uint32_t holder, uint32_t pos);
long kvi_alias_find(const struct kvi_index *ix, uint32_t holder, uint64_t hash, uint32_t pos);
/**
 * Prepare an alias. With @replaces the place has an alias already, which stays valid until the
 * commit.
 */
int kvi_alias_prepare(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      bool replaces);
/** Let the prepared alias replace the one called @old_hash. */
void kvi_alias_commit(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      uint64_t old_hash);
/** Remove a prepared alias. */
void kvi_alias_rollback(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash,
                        uint32_t pos, bool replaces);
/** Forget @holder's names for @n places. */
void kvi_aliases_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t pos, uint32_t n);

/* -- shape.c: splitting and joining chains; settle.c ------------------------------------------- */

/** Everything that a split needs, allocated in advance; kvi_split_commit can't fail. */
struct kvi_split {
    struct kvi_chain *chain, *head, *tail;
    uint32_t at;
    uint32_t holder; /* a holder that may have aliases there before it enters the chain */
    uint32_t extent; /* extent for the smaller half */
};
/** Prepare a split of the chain. @holder's entry stays mixed. Returns 0 or -ENOMEM. */
int kvi_split_prepare(struct kvi_index *ix, struct kvi_chain *chain, uint32_t at, uint32_t holder,
                      struct kvi_split *ret);
void kvi_split_cancel(struct kvi_index *ix, struct kvi_split *split);
/** Replace ->chain by @split->head and ->tail. */
void kvi_split_commit(struct kvi_index *ix, struct kvi_split *split);

/**
 * Move a chain to an extent with room for @capacity blocks, without a visible change. Returns 0 or
 * -ENOMEM.
 */
int kvi_chain_move(struct kvi_index *ix, struct kvi_chain *chain, uint32_t capacity);

/** Queue @chain, which lost holders, for kvi_settle. */
void kvi_mark_dirty(struct kvi_index *ix, struct kvi_chain *chain);
/** Trim, remove and join the queued chains. Never fails. */
void kvi_settle(struct kvi_index *ix);

/* -- remove.c ---------------------------------------------------------------------------------- */

/**
 * Cut @holder's part of the chain to its first @len blocks, and drop all below. With @forget, the
 * copies of all these blocks are forgotten. Else the blocks below block @len are parked with their
 * copies, and the caller is responsible for those of block @len.
 */
void kvi_cut(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
             _Atomic uint64_t *entry, uint32_t len, bool forget);
/** Add the tiers of @bits to the place. Best effort. */
void kvi_give(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t bits);
/** Return the tiers of a block, in the tree or parked; 0: the holder doesn't have it. */
uint32_t kvi_tiers_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash);
/**
 * Add a copy of each block that the holder knows by its hash; not @counted: make it at least one. A
 * overlay parks blocks that it doesn't know. Returns the number of hashes found or parked, or
 * -ENOMEM.
 */
long kvi_known(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint32_t source,
               bool counted, const uint64_t *hashes, size_t n);
/**
 * Remove a copy of one block, like kvi_take. Returns 1 when the source had a copy, else 0, or
 * -ENOMEM.
 */
int kvi_take_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                 uint32_t source, uint64_t hash, uint32_t left);
/** Remove the tier from the block, in the tree or parked. */
void kvi_lose(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint64_t hash);
/** Allocate the memory that the kvi_lose call right after needs. Returns 0 or -ENOMEM. */
int kvi_lose_reserve(struct kvi_index *ix, const struct kvi_holder *holder, enum kv_tier tier,
                     uint64_t hash);

/* -- store.c, clear.c, clear_tiers.c ----------------------------------------------------------- */

/**
 * Store into an overlay (windows.h), like kvi_store. @keeps: a lower tier, where blocks keep their
 * places.
 */
int kvi_store_places(struct kvi_index *ix, struct kvi_holder *overlay, bool keeps,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n);
/**
 * Clear a holder and its overlays (windows.h). The caller holds the lock, which is released between
 * slices, and has marked the holder (`clearing`), so that its other writers wait. The queue of
 * dirty chains is empty.
 */
void kvi_clear_marked(struct kvi_index *ix, struct kvi_holder *holder);
/**
 * List all names of a holder: parents first, parked ones last. The caller frees the list with
 * kvi_mem_free. Returns 0; -ENOMEM with a list that lacks names for which memory was short.
 */
int kvi_list_names(struct kvi_index *ix, struct kvi_holder *holder, uint64_t **ret, size_t *ret_n);

/* -- attach.c: between the tree and the parked blocks ------------------------------------------ */

/**
 * Park @holder's blocks below block @off of the chain. They stay in the tree until the caller cuts.
 */
void kvi_park_below(struct kvi_index *ix, struct kvi_holder *holder, const struct kvi_chain *chain,
                    uint32_t off);
/** Attach the blocks parked below @blocks, which have just been stored. */
void kvi_attach(struct kvi_index *ix, struct kvi_holder *holder, const struct kv_block *blocks,
                size_t n);
/** Store a run of blocks that were parked and are taken out. Returns like kvi_store. */
int kvi_store_again(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t parent, const struct kv_block *blocks, size_t n);

/** State of removing a holder from whole chains and all chains below them. */
struct kvi_drop {
    struct kvi_index *ix;
    struct kvi_holder *holder;
    uint64_t left; /* children with blocks of the holder that are still to be visited */
    bool parked;   /* the blocks are parked: their copies stay */
};
/**
 * Remove the holder from the child, if it is there, and queue the child. The caller counts the
 * parent's children. Returns false after the last one.
 */
bool kvi_drop_kid(void *drop, struct kvi_chain *kid);
/** Remove the holder from the chains below those queued after @seen (NULL: all queued ones). */
void kvi_drop_below_queued(struct kvi_drop *drop, const struct kvi_chain *seen);

/* -- for tests --------------------------------------------------------------------------------- */

/**
 * Walk the whole index and check its invariants. Returns NULL, or a description of the first
 * violation.
 */
const char *kvi_check(struct kvi_index *ix);

#endif
