// SPDX-License-Identifier: Apache-2.0
/**
 * The children of a chain, keyed by the first tokens hash of each: none, one (a bare pointer), a
 * small hash table, or for wide roots a fan of 256 such sets by the next eight bits of the key.
 *
 *     kids -> 0 | chain | table { key, chain }* | fan { kids[256] }
 *
 * An insert therefore rebuilds at most TABLE_MAX entries, however wide the root is.
 *
 * Threads: kvi_kids_find from readers inside an epoch, the rest under the owner's lock.
 */
#ifndef KV_INDEX_KIDS_H
#define KV_INDEX_KIDS_H

#include "index/tree.h"

/**
 * The child whose first block is @key. For a reader it is a proposal: it has to compare the chain's
 * blocks (a lone child is given whatever its key; a slot may be on its way from one child to
 * another).
 */
struct kvi_chain *kvi_kids_find(const struct kvi_chain *parent, uint64_t key);

/** Make room for one more child with @key. Neutral. Returns 0 or -ENOMEM. */
int kvi_kids_reserve(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key);
/** There must be room, or no child at all. */
void kvi_kids_add(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key,
                  struct kvi_chain *kid);
void kvi_kids_replace(struct kvi_chain *parent, uint64_t key, struct kvi_chain *kid);
void kvi_kids_remove(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key);

/** The only child, or NULL. */
struct kvi_chain *kvi_kids_only(const struct kvi_chain *parent);
uint64_t kvi_kids_count(const struct kvi_chain *parent);

/** Call @fn for every child until it returns false. It must not add or remove children. */
void kvi_kids_each(const struct kvi_chain *parent, bool (*fn)(void *arg, struct kvi_chain *kid),
                   void *arg);

/**
 * The same for a part of the children: the set (of hundreds) that holds those with the order
 * *@order, or all when they are few. Moves *@order on behind them, to 0 at the end; it stays where
 * it is when @fn returned false. Writers may go on in between: a child that is there all the while
 * is met.
 */
void kvi_kids_some(const struct kvi_chain *parent, uint64_t *order,
                   bool (*fn)(void *arg, struct kvi_chain *kid), void *arg);

/**
 * Children in a fixed order that doesn't depend on their number: the first whose order is above
 * *@order (any, when @order is NULL), or NULL.
 */
struct kvi_chain *kvi_kids_next(const struct kvi_index *ix, const struct kvi_chain *parent,
                                const uint64_t *order, uint64_t *ret_order);

/** A child by its first tokens hash, and its place in that order. */
struct kvi_kid_key {
    uint64_t order, key;
};
/**
 * The next children of many in that order, at most @max: those of one set, none of which was left
 * out. Returns their number; 0 when the set of the next child is small.
 */
size_t kvi_kids_ahead(const struct kvi_chain *parent, uint64_t order, struct kvi_kid_key *ret,
                      size_t max);

/** Free the sets (not the children) of a chain that nobody uses any more. */
void kvi_kids_free(struct kvi_index *ix, uintptr_t kids);
static inline uint64_t kvi_kids_order(uint64_t key)
{
    return kvi_mix(key);
}

#endif
