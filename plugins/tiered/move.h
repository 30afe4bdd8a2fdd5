// SPDX-License-Identifier: Apache-2.0
/**
 * Moving blobs between members, for programs that place them (a mover). It opens the members itself
 * (config.h, kvs_open), and follows these steps for a batch of blobs:
 *
 *   1. trd_move_copy;
 *   2. wait for linger_ms of the configuration, at least;
 *   3. trd_move_remove.
 *
 * Readers of any handle find the blobs all the time (store.h says why), and writers' publications
 * succeed: one whose put met a blob that is removed then puts it again. A mover that dies between the
 * steps leaves blobs in both members, which does no harm. Two movers may copy and remove the same
 * blobs in the same direction; they must not move one blob in opposite directions at once.
 *
 * Any thread. The blobs of a call are in memory, twice: pass some MiB at a time.
 */
#ifndef KV_TIERED_MOVE_H
#define KV_TIERED_MOVE_H

#include "tiered/catalog.h"

/** A member that blobs move from or to. */
struct trd_place {
    struct kvs_store *store;
    struct trd_catalog
        *packs; /* packs: their blobs are the member's; NULL: its single blobs alone */
};

static inline struct trd_place trd_alone(struct kvs_store *store)
{
    return (struct trd_place){.store = store};
}

/**
 * Copy @n blobs from member @from to @to, make them durable there, read them back and compare. Keys of
 * @hash_len bytes follow each other. Returns the number of blobs that both have, or an error of a member:
 * then nothing is known about any. ret_each[i] becomes
 *   0         both members have the blob
 *   -ENOENT   the source lacks it
 *   -EBADMSG  the source's bytes don't verify
 *   -EEXIST   the target has other bytes under this key
 *   -EIO      the target didn't return what it got, or the source's pack can't be read for now
 *   another error of the put.
 */
int trd_move_copy(struct trd_place from, struct trd_place to, const void *hashes, size_t hash_len,
                  size_t n, int *ret_each);

typedef bool (*trd_may_fn)(void *arg);
/**
 * Remove from @from, its packs included, the blobs that @to has with the same bytes. Returns the number
 * removed, or an error of the target: then nothing was removed. ret_each[i] becomes
 *   1         removed
 *   0         the source's blob is missing, has other bytes, or was put on this handle and isn't
 *             published
 *   -ENOENT, -EBADMSG  the target lacks it: it stays in the source
 *   -EIO      the target's pack can't be read for now: it stays
 *   -ECANCELED  @may, asked before each removal, has refused this one or one before; NULL: never asked
 *   another error of the removal.
 */
int trd_move_remove(struct trd_place from, struct trd_place to, const void *hashes, size_t hash_len,
                    size_t n, int *ret_each, trd_may_fn may, void *arg);

/**
 * Whether two members are one store by two URIs: what is removed from one isn't in the other then. Writes
 * a manifest to @a, and deletes it. Returns 1, 0 or an error.
 */
int trd_is_same_store(struct kvs_store *a, struct kvs_store *b);

#endif
