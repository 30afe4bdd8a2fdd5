// SPDX-License-Identifier: Apache-2.0
/**
 * The tree inside an index: its structures, and the rules by which one writer changes them under
 * many readers. docs/index.md has the drawing and the argument.
 *
 * A chain is a run of blocks without a branch: a path-compressed node. Its blocks lie side by side
 * in the arena. Who holds it is a list of words, one per holder: "holder H has the first LEN blocks
 * of this chain, all in tiers MASK". Because a holder's places are closed under parents, whoever is
 * in a chain has all of the chain above.
 *
 * How the writer changes what readers see:
 * 1. One step at a time. Every change of content is one release store of one word (an entry, a
 *    count, a pointer), and every such store leaves the tree in a state that may be shown.
 * 2. After each step the chain's version goes up. A chain that is replaced or removed gets an odd
 *    version, its last, after the pointer to it is gone.
 * 3. What has been unlinked is retired, and freed when no reader is left that could see it.
 * Readers note a chain's version before they read it, and look again at the end: when none on their
 * path has changed, what they read was true all at once. So a writer that is put to sleep between
 * two steps disturbs nobody; one that changes this very path again and again makes the reader begin
 * anew, and after KVI_FIND_TRIES times the reader takes the lock for one walk.
 */
#ifndef KV_INDEX_TREE_H
#define KV_INDEX_TREE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/epoch.h"
#include "base/error.h"
#include "index/arena.h"
#include "index/copies.h"
#include "index/dir.h"
#include "index/mem.h"
#include "index/parked.h"
#include "index/table.h"
#include "kv_index.h"

/** Blocks in a chain at most: bounds what a split or a move has to copy. */
#define KVI_CHAIN_MAX 256u
/** Walks of a lookup that the writer may disturb before it is asked to wait. */
#define KVI_FIND_TRIES 64
#define KVI_MAX_HOLDERS (1u << 24)

/** Kind of garbage in limbo. */
enum kvi_kind {
    KVI_KIND_MEMORY, /* from kvi_mem_alloc */
    KVI_KIND_CHAIN,
    KVI_KIND_EXTENT /* the object is the header's engine word */
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
/** The tiers of all its blocks, bit per tier; 0: they differ, see the tmap. */
static inline uint32_t kvi_entry_mask(uint64_t e)
{
    return (uint32_t)(e >> 33) & 0xf;
}
static inline uint32_t kvi_entry_aux(uint64_t e)
{
    return (uint32_t)(e >> 37) & KVI_AUX_MAX;
}

/** Tiers block by block, four bits each, for an entry whose blocks differ. */
struct kvi_tmap {
    struct kv_retired retired;
    uint32_t number; /* in index->tmaps */
    uint32_t kids;   /* what aux is otherwise */
    uint32_t capacity;
    uint32_t reserved;
    _Atomic uint64_t word[]; /* 16 blocks each */
};

/** More than two holders. Dense, so that readers walk it; large ones have a hash index for the
 * writer. */
struct kvi_list {
    struct kv_retired retired;
    _Atomic uint32_t n;
    uint32_t capacity;
    uint32_t *index; /* of slot + 1, 2 * capacity of them, behind the entries; NULL when small */
    _Atomic uint64_t entry[];
};

/* -- chains ------------------------------------------------------------------------------------ */

enum kvi_chain_flags {
    KVI_DIRTY = 1,   /* in the index's queue of chains to settle */
    KVI_ALIASED = 2, /* some holder may call a block here by another name */
    KVI_UNNAMED = 4, /* some block's hash may not be in the table (too many share it) */
    KVI_MIXED = 8,   /* some entry may have a tmap */
    KVI_TWINS = 16   /* some block's hash in its slot may be in the slot of another place, too */
};

struct kvi_chain {
    _Atomic uint64_t run;     /* position of the first block << 32 | number of blocks */
    _Atomic uint32_t version; /* even; odd: dead */
    uint32_t n_full;          /* holders that have all of it */
    _Atomic uintptr_t kids;   /* see kids.h */
    _Atomic uint64_t who[2];  /* two entries, or in who[0] a struct kvi_list * (bit 63 clear) */
    struct kvi_chain *parent; /* the root's is NULL */
    struct kv_retired link;   /* in limbo, and in the queue of dirty chains */
    uint16_t capacity;        /* blocks its extent has room for */
    uint8_t flags;
    uint8_t reserved;
    uint32_t kid_hint; /* while dropping a subtree: children that the holder was in */
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
/** For tests: called after every step, as a reader that looks just then. NULL otherwise. */
extern void (*kvi_step_hook)(void);

/** Rule 2. Pairs with the readers' acquire loads of version before and after reading. */
static inline void kvi_chain_bump(struct kvi_chain *chain)
{
    atomic_store_explicit(&chain->version,
                          atomic_load_explicit(&chain->version, memory_order_relaxed) + 2,
                          memory_order_release);
    if (KV_UNLIKELY(kvi_step_hook != NULL))
        kvi_step_hook();
}

/* -- the index --------------------------------------------------------------------------------- */

/** Which copies' removals a holder announces in a tier, as far as its stream has told. */
enum kvi_counts { KVI_COUNTS_UNKNOWN, KVI_COUNTS_EACH, KVI_COUNTS_ONE };

struct kvi_holder {
    struct kv_retired retired;
    struct kv_holder key;
    uint32_t id;
    _Atomic uint64_t blocks;
    struct kvi_holder_tier {
        uint64_t blocks;
        uint32_t n_stored_again; /* after a removal that left copies: see copies.c */
        uint16_t implied;        /* source of the blocks without a record */
        uint8_t counts;          /* enum kvi_counts */
        bool settle;             /* see kvi_copies_settle */
    } tier[KV_N_TIERS];
    uint64_t n_roots;   /* top-level chains it is in */
    uint64_t n_aliases; /* see names.h */
    uint64_t n_copies;  /* records in copies.h */
    uint64_t n_parked;  /* records in parked.h, in a list */
    uint64_t turns;     /* changes of what all of a tier's blocks mean: see kvi_holder_info */
    uint32_t oldest, newest;
    uint64_t max_blocks, n_refused;
    uint32_t lag_wait,
        lag_left;            /* of a part that is lagging: stores until it tries to learn again */
    bool lagging;            /* a part that lacks blocks of its main holder */
    uint64_t swept_to;       /* of a part: its size when it was last swept */
    const void *clearing;    /* the call that empties it, slice by slice; its other writers wait */
    _Atomic bool windowed;   /* it has windows, or is a part */
    _Atomic bool hidden;     /* from lookups, while a large tree of it goes from below: clear.c */
    struct kvi_holder *main; /* of a part: whose windows it has; see windows.h */
    struct kvi_windows *_Atomic windows; /* NULL: none */
};

/** One holder's own name for a place that is known under another. */
struct kvi_alias {
    uint64_t hash;
    uint32_t holder;
    uint32_t pos;
};

/**
 * Where a dump, or a clear, stands; writers that replace or remove the chain put it right
 * (shape.c).
 */
struct kvi_cursor {
    struct kvi_cursor *next;
    struct kvi_chain *at;
    uint32_t emitted; /* its first blocks, which are done */
    uint32_t upto;    /* ... and the next ones, done for holders with ids below `holder` */
    uint32_t holder;  /* 0: not begun */
    bool after;       /* its children up to `order` are done */
    uint64_t order;
};

struct kvi_slab;
struct kvi_windows;

/** While the lock is held, as for all who move it. */
void kvi_cursor_add(struct kvi_index *ix, struct kvi_cursor *cursor);
void kvi_cursor_remove(struct kvi_index *ix, const struct kvi_cursor *cursor);

struct kvi_index {
    /* Used by readers. */
    struct kvi_chain root; /* no blocks, no holders */
    struct kvi_arena arena;
    struct kvi_dir holders; /* id -> struct kvi_holder */
    struct kvi_dir tmaps;   /* number -> struct kvi_tmap */

    /* Tests only, else NULL: called with the chain that a walk has found and not yet looked at, and
     * with NULL before the walk is judged. */
    void (*find_hook)(void *arg, const struct kvi_chain *chain);
    void *find_hook_arg;

    _Atomic uint64_t windows_version; /* rises when a holder's windows change */

    /* Counters that the writer changes and any thread reads; on cache lines of their own. */
    _Alignas(64) _Atomic uint64_t n_holders;
    _Atomic uint64_t n_chains, n_blocks, n_holder_blocks, n_tier_blocks[KV_N_TIERS];
    _Atomic uint64_t n_walks_alone; /* lookups that had to stop the writer */
    _Atomic uint64_t n_parked, n_parked_forgotten, n_copies, n_copies_uncounted; /* kvi_unlock */
    _Atomic uint64_t n_refused;
    struct kvi_mem mem;

    /* Used by the writer, under the lock. */
    _Alignas(64) pthread_mutex_t lock;
    pthread_mutex_t gate;   /* who finds the lock taken waits for it holding the gate */
    pthread_cond_t cleared; /* a holder is not being cleared any more */
    struct kv_limbo limbo;
    struct kvi_table names;      /* engine hash -> position */
    struct kvi_table holder_ids; /* worker, rank -> id */
    struct kvi_alias *aliases;   /* dense */
    uint32_t n_parts;            /* holders that are parts of others: see windows.h */
    size_t n_aliases, aliases_capacity;
    struct kvi_table alias_names;        /* holder, hash -> index in aliases */
    struct kvi_table alias_places;       /* holder, the place's first name -> index in aliases */
    struct kvi_slab *slabs, *full_slabs; /* of chains */
    struct kvi_chain *dirty_head, *dirty_tail;
    struct kvi_copies copies;
    struct kvi_parking parking;
    struct kvi_cursor *cursors;
    uint64_t max_blocks, max_holder_blocks;
    struct kvi_scratch *scratch; /* of kvi_store */
};

/** Single writer: no read-modify-write needed. */
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

/** The chain that the block at @pos belongs to. Writer only. */
static inline struct kvi_chain *kvi_owner(const struct kvi_index *ix, uint32_t pos)
{
    return (struct kvi_chain *)(uintptr_t)*kvi_arena_engines(&ix->arena,
                                                             kvi_arena_start(&ix->arena, pos));
}

/* -- index.c ----------------------------------------------------------------------------------- */

/** Begin a write. */
void kvi_lock(struct kvi_index *ix);
/** The same, behind all who are waiting for the lock now: for a call that lets others go first. */
void kvi_lock_in_turn(struct kvi_index *ix);
struct kvi_holder *kvi_holder_find(const struct kvi_index *ix, struct kv_holder key);
/**
 * The same for who is about to write: waits, without the lock, while the holder is being cleared.
 */
struct kvi_holder *kvi_holder_await(struct kvi_index *ix, struct kv_holder key);
/** Returns 0, -ENOMEM or -ENOSPC. */
int kvi_holder_add(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret);
/** The holder, new if need be, with the lock, which is held in any case. Returns 0, -ENOMEM, -ENOSPC. */
int kvi_begin(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret);
/** Forget a holder that holds no block any more, and its parts (windows.h). */
void kvi_holder_drop(struct kvi_index *ix, struct kvi_holder *holder);
/** End of a write: settle what is dirty, free what can be freed, unlock. */
void kvi_unlock(struct kvi_index *ix);

/* -- chain.c: memory of chains, who holds them ------------------------------------------------- */

struct kvi_chain *kvi_chain_new(struct kvi_index *ix);
void kvi_chain_free(struct kvi_index *ix, struct kvi_chain *chain);    /* the struct alone */
void kvi_chain_discard(struct kvi_index *ix, struct kvi_chain *chain); /* nobody has seen it */
/** Mark dead and retire, with its list; its extent and tmaps are the caller's. */
void kvi_chain_retire(struct kvi_index *ix, struct kvi_chain *chain);
void kvi_slabs_fini(struct kvi_index *ix);

uint32_t kvi_who_count(const struct kvi_chain *chain);
/** The i-th entry, in no order. */
_Atomic uint64_t *kvi_who_at(const struct kvi_chain *chain, uint32_t i);
_Atomic uint64_t *kvi_who_find(const struct kvi_chain *chain, uint32_t holder);
/** Room for one more entry (or @n in a new chain). Neutral: nothing that can be seen changes. */
int kvi_who_reserve(struct kvi_index *ix, struct kvi_chain *chain, uint32_t n);
void kvi_who_add(struct kvi_chain *chain, uint64_t entry);
void kvi_who_remove(struct kvi_chain *chain, _Atomic uint64_t *entry);
/** Best effort. */
void kvi_who_shrink(struct kvi_index *ix, struct kvi_chain *chain);

/** Change an entry: a step. */
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
/** Tiers of block @i of an entry. */
static inline uint32_t kvi_mask_at(const struct kvi_index *ix, uint64_t entry, uint32_t i)
{
    return kvi_entry_mask(entry) ? kvi_entry_mask(entry) : kvi_tmap_get(kvi_tmap_at(ix, entry), i);
}
/** A tmap for @capacity blocks, all of them @mask. Returns NULL when there is no memory. */
struct kvi_tmap *kvi_tmap_new(struct kvi_index *ix, uint32_t capacity, uint32_t mask);
void kvi_tmap_free(struct kvi_index *ix, struct kvi_tmap *tmap);   /* nobody has seen it */
void kvi_tmap_retire(struct kvi_index *ix, struct kvi_tmap *tmap); /* no entry has it any more */
/** Give @tier (or take) blocks from..to; they are part of the tmap. Deepest first, each word a
 * step. */
void kvi_tmap_set(struct kvi_chain *chain, struct kvi_tmap *tmap, uint32_t from, uint32_t to,
                  uint32_t mask, bool on);
/** Make the entry a mixed one with room for @capacity blocks. Neutral. Returns 0 or -ENOMEM. */
int kvi_entry_mix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry,
                  uint32_t capacity);
/** When all blocks of a mixed entry have the same tiers: do without the tmap. Neutral. */
void kvi_entry_unmix(struct kvi_index *ix, struct kvi_chain *chain, _Atomic uint64_t *entry);
uint32_t kvi_entry_kids(const struct kvi_index *ix, uint64_t entry);
/** Readers don't look at it: no step. */
void kvi_entry_set_kids(struct kvi_index *ix, _Atomic uint64_t *entry, uint32_t kids);
void kvi_entry_count_kid(struct kvi_index *ix, _Atomic uint64_t *entry, int more);
/** Count blocks from..to of an entry into (or out of) all totals, with their tiers. */
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

/** A block of a chain, and (when asked for) the holder's entry there. */
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
 * The place that @holder calls @hash. Also counts how many places in the table bear that hash
 * (@n_same may be NULL).
 */
bool kvi_locate(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash,
                struct kvi_place *ret, uint32_t *n_same);
/** Return the name that @holder, which has the place, gives it. */
uint64_t kvi_name_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint32_t pos);
/**
 * Before each of kvi_locate's calls for @n hashes, @stride bytes apart, in order: brings what they
 * will read close, in two rounds, since where to look in the second depends on what the first
 * brought.
 */
void kvi_locate_ahead(const struct kvi_index *ix, const void *hashes, size_t stride, size_t i,
                      size_t n);
/** The first of the two rounds, where there is other work to do in the meantime. */
void kvi_locate_soon(const struct kvi_index *ix, const void *hashes, size_t stride, size_t n);

bool kvi_name_in_table(const struct kvi_index *ix, uint64_t hash, uint32_t pos);
/** Mark the chains of all places in the table under @hash with KVI_TWINS: another one is to come. */
void kvi_names_note_twins(const struct kvi_index *ix, uint64_t hash);
int kvi_name_insert(struct kvi_index *ix, uint64_t hash, uint32_t pos);
/** Take the names of @n blocks out of the table (a name that isn't there is passed over). */
void kvi_names_erase(struct kvi_index *ix, uint32_t pos, uint32_t n);
/**
 * Blocks @n from @from now lie at @to, where their hashes are already: names and aliases follow,
 * those of the chain's holders and of @extra (UINT32_MAX: nobody else).
 */
void kvi_names_move(struct kvi_index *ix, const struct kvi_chain *chain, uint32_t extra,
                    uint32_t from, uint32_t to, uint32_t n);

/** Index of the alias, or -1. */
long kvi_alias_of_place(const struct kvi_index *ix, uint32_t holder, uint32_t pos);
long kvi_alias_find(const struct kvi_index *ix, uint32_t holder, uint64_t hash, uint32_t pos);
/** A new alias; with @replaces the place has one already, which keeps the place until the commit.
 */
int kvi_alias_prepare(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      bool replaces);
/** The prepared alias takes the place from the one called @old_hash, which goes. */
void kvi_alias_commit(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t pos,
                      uint64_t old_hash);
/** Take a prepared alias back. */
void kvi_alias_rollback(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash,
                        uint32_t pos, bool replaces);
/** Forget @holder's names for @n places. */
void kvi_aliases_forget(struct kvi_index *ix, struct kvi_holder *holder, uint32_t pos, uint32_t n);

/* -- shape.c: splitting and joining chains; settle.c ------------------------------------------- */

/** Everything a split needs, allocated; kvi_split_commit can't fail. */
struct kvi_split {
    struct kvi_chain *chain, *head, *tail;
    uint32_t at;
    uint32_t holder; /* who may have aliases there without being in the chain yet */
    uint32_t extent; /* for the smaller half */
};
/** @holder's entry stays mixed where it is. Returns 0 or -ENOMEM. */
int kvi_split_prepare(struct kvi_index *ix, struct kvi_chain *chain, uint32_t at, uint32_t holder,
                      struct kvi_split *ret);
void kvi_split_cancel(struct kvi_index *ix, struct kvi_split *split);
/** @split->head and ->tail take the place of ->chain. */
void kvi_split_commit(struct kvi_index *ix, struct kvi_split *split);

/** Move a chain to an extent with room for @capacity blocks. Neutral. Returns 0 or -ENOMEM. */
int kvi_chain_move(struct kvi_index *ix, struct kvi_chain *chain, uint32_t capacity);

/** @chain lost holders: look at it at the end of the call. */
void kvi_mark_dirty(struct kvi_index *ix, struct kvi_chain *chain);
/** Trim, remove and join what the queue holds. Never fails. */
void kvi_settle(struct kvi_index *ix);

/* -- remove.c ---------------------------------------------------------------------------------- */

/** @holder keeps the first @len blocks of the chain, and so nothing below it. Copies of block @len are
 * the caller's; with @forget, those of the blocks below go, else they are parked. */
void kvi_cut(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_chain *chain,
             _Atomic uint64_t *entry, uint32_t len, bool forget);
/** The place gets those tiers of @bits that it lacks. Best effort. */
void kvi_give(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash, uint32_t bits);
/** The tiers of a block, in the tree or parked; 0: the holder doesn't have it. */
uint32_t kvi_tiers_of(const struct kvi_index *ix, const struct kvi_holder *holder, uint64_t hash);
/** One more copy of each block that the holder knows by its hash; not @counted: at least one.
 * Returns the number of hashes found or -ENOMEM. */
long kvi_known(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint32_t source,
               bool counted, const uint64_t *hashes, size_t n);
/** Get the memory that kvi_known needs, right before it. Returns 0 or -ENOMEM. */
int kvi_known_reserve(struct kvi_index *ix, const struct kvi_holder *holder, enum kv_tier tier,
                      const uint64_t *hashes, size_t n);
/** kvi_take of one block. Returns whether the source had a copy, or -ENOMEM. */
int kvi_take_one(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                 uint32_t source, uint64_t hash, uint32_t left);
/** The block loses the tier: in the tree or parked. */
void kvi_lose(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier, uint64_t hash);
/** Get the memory that kvi_lose needs, right before it. Returns 0 or -ENOMEM. */
int kvi_lose_reserve(struct kvi_index *ix, const struct kvi_holder *holder, enum kv_tier tier,
                     uint64_t hash);

/* -- store.c, clear_tiers.c -------------------------------------------------------------------- */

/** kvi_store into a part (windows.h); @keeps: in a lower tier, where blocks keep their places. */
int kvi_store_places(struct kvi_index *ix, struct kvi_holder *part, bool keeps,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n);
/** All names of a holder, parents first, parked ones last, for kvi_mem_free. Returns their number; what
 * finds no memory is left out. */
size_t kvi_list_names(struct kvi_index *ix, struct kvi_holder *holder, uint64_t **ret);

/* -- attach.c: between the tree and the parked blocks ------------------------------------------ */

/** Park what @holder has below block @off of the chain. It stays in the tree: the caller cuts. */
void kvi_park_below(struct kvi_index *ix, struct kvi_holder *holder, const struct kvi_chain *chain,
                    uint32_t off);
/** Put into the tree what is parked below @blocks, which have just been stored there. */
void kvi_attach(struct kvi_index *ix, struct kvi_holder *holder, const struct kv_block *blocks,
                size_t n);
/** Store a run of parked blocks that have been taken out. Returns 0 or what kvi_store does. */
int kvi_store_again(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t parent, const struct kv_block *blocks, size_t n);

/** A holder that leaves whole chains, and all that is below them. */
struct kvi_drop {
    struct kvi_index *ix;
    struct kvi_holder *holder;
    uint64_t left; /* children that the holder is in, not yet seen */
    bool parked;   /* the blocks are: their copies stay */
};
/** Leave the child, when the holder is in it, and queue it. The parent's count is the caller's.
 * Returns whether any is left. */
bool kvi_drop_kid(void *drop, struct kvi_chain *kid);
/** Leave what is below the chains that were queued after @seen (NULL: all of them). */
void kvi_drop_below_queued(struct kvi_drop *drop, const struct kvi_chain *seen);

/* -- for tests --------------------------------------------------------------------------------- */

/** Walk everything and compare it with what must hold; NULL, or what is wrong. */
const char *kvi_check(struct kvi_index *ix);

#endif
