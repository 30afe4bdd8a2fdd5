// SPDX-License-Identifier: Apache-2.0
/**
 * Packing: blobs of one store become entries of packs in a store, the same one or another. For the call of
 * the tiered store and for programs that place blobs themselves. They open both stores (kvs_open), and
 * follow these steps for a list of blobs:
 *
 *   1. trd_pack_write;
 *   2. wait for linger_ms of the configuration, at least;
 *   3. trd_pack_drop.
 *
 * A pack goes through these steps; a program may die at any of them:
 *
 *     written     its chunk is durable, and nothing names it: a collection removes it
 *     verified    its bytes were read back and are those meant
 *     published   its manifest is there: it counts. This is the step that commits it
 *     told        the mark says that packs have come: readers look
 *     dropped     single blobs that it has, with the same bytes, are removed one by one
 *
 * The same call, made again, goes on: blobs that a pack of the last hour has aren't packed again.
 * Two programs may pack the same blobs; then some lie in two packs, which does no harm.
 */
#ifndef KV_TIERED_PACK_H
#define KV_TIERED_PACK_H

#include "tiered/catalog.h"

enum trd_pack_step {
    TRD_PACK_WRITTEN,
    TRD_PACK_VERIFIED,
    TRD_PACK_PUBLISHED,
    TRD_PACK_TOLD,
    TRD_PACK_DROPPED, /* after each blob */
    TRD_PACK_REMOVED  /* an old pack: after its manifest, and again after its chunk */
};

struct trd_packing {
    struct kvs_store *from, *to; /* single blobs; packs. May be one store */
    uint64_t min_bytes,
        max_bytes;      /* of blobs in a pack. 0: TRD_PACK_MIN_BYTES, TRD_PACK_MAX_BYTES */
    uint64_t max_blobs; /* in packs of the member */
    void (*step)(void *arg, enum trd_pack_step step); /* NULL: nobody asks */
    bool (*may)(
        void *arg); /* asked before each removal; false ends the call with -ECANCELED. NULL: yes */
    bool (*wait)(void *arg, uint64_t ns); /* false likewise. NULL: sleep */
    /* Asked before the live blobs of an old pack are copied; false likewise. NULL: yes */
    bool (*pay)(void *arg, uint64_t blobs, uint64_t bytes);
    void *arg;
    struct trd_catalog
        *catalog; /* of `to`: `own`, unless the caller sets one after trd_packing_init */
    struct trd_catalog own;
    uint64_t n_packs, n_bytes; /* written so far */
};

#define TRD_PACK_MIN_BYTES ((uint64_t)8 << 20)
#define TRD_PACK_MAX_BYTES ((uint64_t)64 << 20)

/** Begin to pack. Returns 0; -ENOTSUP: `to` can't have packs; -EINVAL. End with trd_packing_fini. */
int trd_packing_init(struct trd_packing *p, struct kvs_store *from, struct kvs_store *to);
void trd_packing_fini(struct trd_packing *p);

/**
 * Write @n blobs into packs, in this order, as many to a pack as fit. Keys of @hash_len bytes follow each
 * other; what comes twice is packed twice. Returns the number of blobs that are in published packs now,
 * or an error after which the packs published before it stay (-EFBIG: the member would have too many
 * blobs in packs). ret_each[i] becomes
 *   0         in a published pack
 *   -ENOENT   the source lacks it
 *   -EBADMSG  the source's bytes don't verify
 *   -EMSGSIZE longer than 16 MiB: packs don't take it
 *   -EAGAIN   too few blobs were left for a pack of min_bytes
 *   -EIO      not answered, after an error
 */
int trd_pack_write(struct trd_packing *p, const void *hashes, size_t hash_len, size_t n,
                   int *ret_each);

/**
 * Remove from `from` the single blobs that a published pack of the last hour has with the same bytes.
 * Returns the number removed, or an error. ret_each[i] becomes 1: removed; 0: the source's blob is
 * missing, has other bytes, or isn't published yet; -ENOENT: no pack has it; another error.
 */
int trd_pack_drop(struct trd_packing *p, const void *hashes, size_t hash_len, size_t n,
                  int *ret_each);

/* -- for rewriting packs (pack_sweep.c) -- */

/** A pack that is being filled. */
struct trd_filling {
    struct trd_pack_builder builder;
    uint64_t bytes;     /* of blobs */
    uint64_t created_s; /* it is at least so young: younger than the packs that it replaces */
};

/** Write, verify, publish and tell the pack, and begin the next. Returns 0 or an error. */
int trd_pack_publish(struct trd_packing *p, struct trd_filling *filling);

/** Sleep, or ask p->wait. Returns 0; -ECANCELED. */
int trd_packing_wait(const struct trd_packing *p, uint64_t ns);

/** Remove a pack: its manifest, then its chunk, then the notes of deleted entries. */
int trd_pack_remove(struct trd_packing *p, const struct trd_pack *pack);

#endif
