// SPDX-License-Identifier: Apache-2.0
/**
 * An open prefix cache inside the room. Immutable, so any thread may use it.
 *
 * A *layout* is what a reader must know before it finds anything: the shape of the states that were
 * saved with this fingerprint, or that they can't be cut. Up to KVL_LAYOUTS_MAX of them are chunks
 * of the store, under keys made of fingerprint, block size, form and number. Readers get all of them
 * in one call. Blocks of a layout are chained from its root:
 *
 *     root     = H(fingerprint, block size, shape)
 *     block i  = H(hash of block i - 1 or root, tokens of block i)
 *     snapshot = H(... H(H(root), token 0) ..., token n - 1)
 *
 * Blocks that a load of n tokens needs, by the rule of struct kv_cache_group:
 *
 *     one cache            KV_NEEDS_ALL     blocks
 *     pair: the first      KV_NEEDS_ALL     blocks
 *           the second     KV_NEEDS_RUN     blocks under a root of their own, or in place of these
 *           its tail       KV_NEEDS_STATE   a snapshot of what follows the last block, and of the window
 *     can't be cut         KV_NEEDS_STATE   a snapshot at each token that was saved: block_size 1
 */
#ifndef KVL_CACHE_H
#define KVL_CACHE_H

#include "base/core/cache_group.h"
#include "base/hash/prefix_block.h"
#include "kv_store.h"
#include "llama/shape.h"

/** Name of the object that saves publish. */
#define KVL_OBJECT "kvasir-llama"

enum { KVL_LAYOUTS_MAX = 8, KVL_N_FORMS = 2 };

/** How the states of a layout are stored. The numbers are those of its chunk. */
enum kvl_cut {
    KVL_CUT_BLOCKS = 1,   /* one cache, in blocks */
    KVL_CUT_SNAPSHOT = 2, /* can't be cut: no shapes */
    KVL_CUT_PAIR = 3      /* two caches in blocks, the second with a window */
};

struct kvl_layout {
    enum kvl_cut cut;
    enum kvl_form form;
    struct kvl_shape shape;
    struct kvl_shape second; /* of a pair, as the next three: shape of its second cache */
    uint32_t span;           /* tokens of the window */
    uint8_t second_root[KV_PREFIX_HASH], tail_root[KV_PREFIX_HASH];
    const void *whole; /* of snapshots: kvl_whole_identity; not kept after the root is made */
    size_t whole_len;
    uint8_t root[KV_PREFIX_HASH];
    uint8_t key[KV_PREFIX_KEY]; /* of its chunk */
    bool is_new;                /* kvl_layout_note has put the chunk, which isn't durable yet */
};

struct kvl_cache {
    struct kvs_store *store;
    char *fingerprint;
    uint32_t block_tokens;
    uint32_t window;         /* tokens of the model's windows, as the caller told; 0: it didn't */
    struct kvl_libllama lib; /* functions may be NULL */
};

/** Describe the first cache of a layout that can be cut. */
static inline struct kv_cache_group kvl_group_of_all(const struct kvl_cache *c)
{
    return (struct kv_cache_group){.needs = KV_NEEDS_ALL, .block_size = c->block_tokens};
}

/** Describe the second cache of a pair. */
static inline struct kv_cache_group kvl_group_of_window(const struct kvl_cache *c,
                                                        const struct kvl_layout *layout)
{
    return (struct kv_cache_group){
        .needs = KV_NEEDS_RUN, .block_size = c->block_tokens, .span = layout->span};
}

/** Describe states that can't be cut: a block is what a token adds. */
static inline struct kv_cache_group kvl_group_of_states(void)
{
    return (struct kv_cache_group){.needs = KV_NEEDS_STATE, .block_size = 1};
}

/** Layouts as a call found them. */
struct kvl_layouts {
    struct kvl_layout at[KVL_LAYOUTS_MAX];
    size_t n;
};

/** true when all functions of libllama are there; else logs which is missing, for -ENOSYS */
bool kvl_has_libllama(const struct kvl_cache *c);

/** Read the layouts of @form. Free with kvl_layouts_fini. Returns 0 or an error. */
int kvl_layouts_read(struct kvl_cache *c, enum kvl_form form, struct kvl_layouts *ret);
void kvl_layouts_fini(struct kvl_layouts *l);

/**
 * Make sure that the store has @layout: all but root, key and is_new, which it sets. Marks it as used.
 * Layouts of one root that begin in other ways (versions of llama.cpp) are layouts of their own.
 * Returns 0; -ENOSPC when KVL_LAYOUTS_MAX others are there; another error.
 */
int kvl_layout_note(struct kvl_cache *c, struct kvl_layout *layout);

/** Compute the keys of @n blocks: @ret has room for n * KV_PREFIX_KEY bytes. */
void kvl_block_keys(const struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                    const int32_t *tokens, size_t n, uint8_t *ret);

/** Hash of the key before block @i of @keys. */
static inline const uint8_t *kvl_parent(const uint8_t *root, const uint8_t *keys, size_t i)
{
    return i ? keys + (i - 1) * KV_PREFIX_KEY + KV_PREFIX_TAG : root;
}

/** Write a token as keys hash it. */
static inline void kvl_put_token(uint8_t ret[4], int32_t token)
{
    for (int i = 0; i < 4; i++)
        ret[i] = (uint8_t)((uint32_t)token >> 8 * i);
}

/**
 * Ask by a get whether the store has a chunk, for backends that can't tell otherwise (kvs_exists is
 * -ENOTSUP). Returns 1, 0, or an error.
 */
int kvl_is_there(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY]);

/** Count the blocks at the beginning of @keys that the store has. Returns their number, an error. */
int64_t kvl_blocks_present(struct kvl_cache *c, const uint8_t *keys, size_t n);

/**
 * Mark blocks as used, the last first: a store that evicts by last use then takes the ends of chains,
 * not the beginnings that the rest can't be loaded without.
 */
void kvl_blocks_touch(struct kvl_cache *c, const uint8_t *keys, size_t n);

/**
 * Put the blocks [first, end) of @view that the store lacks; mark the others as used. @keys and @tokens
 * are those of the prompt from its beginning. Adds to @ret. Returns 0 or an error.
 */
int kvl_blocks_put(struct kvl_cache *c, const struct kvl_view *view,
                   const uint8_t root[KV_PREFIX_HASH], const uint8_t *keys, const int32_t *tokens,
                   size_t first, size_t end, struct kvl_result *ret);

/**
 * Read the blocks [first, end) into a state that kvl_views_make made. @keys and @tokens are those of the
 * prompt from its beginning. Returns @end; the first block that is missing or damaged; an error.
 */
int64_t kvl_blocks_fill(struct kvl_cache *c, const struct kvl_view *v,
                        const uint8_t root[KV_PREFIX_HASH], const uint8_t *keys,
                        const int32_t *tokens, size_t first, size_t end);

/**
 * Put the blocks of @view that the store lacks, of the first @n tokens. Marks the others as used.
 * Makes them and the noted @layout durable. Adds to @ret. Returns the number of tokens in blocks, or
 * an error.
 */
int64_t kvl_blocks_save(struct kvl_cache *c, const struct kvl_view *view,
                        const struct kvl_layout *layout, const int32_t *tokens, size_t n,
                        struct kvl_result *ret);

/**
 * Read up to @n blocks into a new state for sequence @seq. Returns the number of blocks in it, which
 * is lower when some are missing or damaged (0: *@ret isn't set), or an error.
 */
int64_t kvl_blocks_load(struct kvl_cache *c, const struct kvl_layout *layout, int32_t seq,
                        const uint8_t *keys, const int32_t *tokens, size_t n, struct kvl_view *ret);

/**
 * Put the blocks of both caches of a pair that the store lacks, of the first @n tokens. Where the window's
 * beginning is gone, so that no load ends at the last of them, save a tail, too. Makes all this and the
 * noted @layout durable. Adds to @ret. Returns the tokens that a load would restore now, or an error.
 */
int64_t kvl_pair_save(struct kvl_cache *c, const struct kvl_view views[KVL_CACHES_MAX],
                      const struct kvl_layout *layout, const int32_t *tokens, size_t n,
                      struct kvl_result *ret);

/**
 * Find the longest prefix of @n tokens that a load can restore. Returns its tokens, 0, or an error.
 */
int64_t kvl_pair_find(struct kvl_cache *c, const struct kvl_layout *layout, const int32_t *tokens,
                      size_t n);

/**
 * Read the longest such prefix of @n tokens into a new state for sequence @seq: @ret[0].data, to free
 * with kvl_views_fini. Returns its tokens, and sets @result; 0: nothing, and @ret isn't set; an error.
 */
int64_t kvl_pair_load(struct kvl_cache *c, const struct kvl_layout *layout, int32_t seq,
                      const int32_t *tokens, size_t n, struct kvl_view ret[KVL_CACHES_MAX],
                      struct kvl_result *result);

/**
 * Make what a save has put durable. @is_new: it has put something. The store then also publishes an
 * object of no bytes, always of the same name: until a manifest comes, a file store's limit and gc
 * keep chunks that were put, and Redis carries their keys along. A manifest of our own format notes
 * nothing, so it keeps no chunk alive. Returns 0 or an error.
 */
int kvl_make_durable(struct kvl_cache *c, bool is_new);

/**
 * Delete the snapshot of exactly @n tokens and its parts; a part that another snapshot has, too, makes
 * that one a miss. Returns 1; 0 when there is none; an error.
 */
int kvl_snapshot_discard(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                         const int32_t *tokens, size_t n);

/**
 * Save a state that can't be cut, of @n tokens, and make it and the noted @layout durable. Returns @n
 * or an error.
 */
int64_t kvl_snapshot_save(struct kvl_cache *c, const struct kvl_layout *layout,
                          const int32_t *tokens, size_t n, const uint8_t *state, size_t len,
                          struct kvl_result *ret);

/** Find the longest stored snapshot of at most @n tokens. Returns its tokens, 0 or an error. */
int64_t kvl_snapshot_find(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                          const int32_t *tokens, size_t n);

/**
 * Read the snapshot of @n tokens. Returns 1 and a malloc'd state; 0 when it is missing or damaged
 * (and deleted then); an error.
 */
int kvl_snapshot_load(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                      const int32_t *tokens, size_t n, uint8_t **ret, size_t *ret_len);

/** Delete a chunk that didn't verify, so that the next save writes it again; logs it. */
void kvl_drop_damaged(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY]);

#endif
