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
#ifndef KV_INDEX_TREE_KIDS_H
#define KV_INDEX_TREE_KIDS_H

#include "index/tree/tree.h"

/**
 * Find the child whose first block is @key. For a reader the result is a guess, and the reader must
 * compare the chain's blocks: a lone child is returned for any key, and a slot may be changing from
 * one child to another.
 */
struct kvi_chain *kvi_kids_find(const struct kvi_chain *parent, uint64_t key);

/** Make room for one more child with @key, without a visible change. Returns 0 or -ENOMEM. */
int kvi_kids_reserve(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key);
/** Add a child. kvi_kids_reserve must have made room, unless there is no child yet. */
void kvi_kids_add(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key,
                  struct kvi_chain *kid);
void kvi_kids_replace(struct kvi_chain *parent, uint64_t key, struct kvi_chain *kid);
void kvi_kids_remove(struct kvi_index *ix, struct kvi_chain *parent, uint64_t key);

/** Return the only child, or NULL. */
struct kvi_chain *kvi_kids_only(const struct kvi_chain *parent);
uint64_t kvi_kids_count(const struct kvi_chain *parent);

/** Call @fn for every child until it returns false. @fn must not add or remove children. */
void kvi_kids_each(const struct kvi_chain *parent, bool (*fn)(void *arg, struct kvi_chain *kid),
                   void *arg);

/**
 * Call @fn for some children: those of the set (of hundreds) that contains order *@order, or all
 * when they are few. Moves *@order behind them, to 0 at the end; leaves it when @fn returned false.
 * Writers may change children between calls: a child that stays is visited.
 */
void kvi_kids_some(const struct kvi_chain *parent, uint64_t *order,
                   bool (*fn)(void *arg, struct kvi_chain *kid), void *arg);

/**
 * Return the first child whose order is above *@order (NULL: the first of all), or NULL. The order
 * is fixed and doesn't depend on the number of children.
 */
struct kvi_chain *kvi_kids_next(const struct kvi_index *ix, const struct kvi_chain *parent,
                                const uint64_t *order, uint64_t *ret_order);

/** A child's first tokens hash, and its place in the order of kvi_kids_next. */
struct kvi_kid_key {
    uint64_t order, key;
};
/**
 * List the next children in that order, at most @max. Returns their number; 0 also when there are few
 * children, or the next set has no room.
 */
size_t kvi_kids_ahead(const struct kvi_index *ix, const struct kvi_chain *parent, uint64_t order,
                      struct kvi_kid_key *ret, size_t max);

/** Free the sets (not the children) of a chain that no reader can see. */
void kvi_kids_free(struct kvi_index *ix, uintptr_t kids);
static inline uint64_t kvi_kids_order(uint64_t key)
{
    return kv_mix(key);
}

#endif
