// SPDX-License-Identifier: Apache-2.0
/**
 * A tracked blob, and orders of them: what index.c keeps and policies (policy.h) read and write.
 *
 *     record  52 bytes, in pages of 65536        slots  4 bytes each, 1.15 to 1.7 a record
 *
 * A record is named by its number, which stays until the blob is dropped. Thread-confined, as the index is.
 */
#ifndef KV_ADVISOR_INDEX_BLOCK_H
#define KV_ADVISOR_INDEX_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KVA_KEY = 16, KVA_MEMBERS = 16, KVA_LISTS = 8, KVA_PAGE = 65536 };
#define KVA_NONE UINT32_MAX
#define KVA_UNIT 64 /* bytes that a blob's size is counted in */

enum kva_flags {
    KVA_NEW = 1,     /* came since the last scan began */
    KVA_VISITED = 2, /* of policies: used since the hand, or the queue, passed it */
    KVA_GHOST = 4,   /* of policies: left the fast member's order, and @stamp is of that */
    KVA_LINGER = 8,  /* waits for its removal from a member */
    KVA_LEFT = 16,   /* removed by the last publisher that told of it, at @used_s or later */
    KVA_PACKED = 32  /* the last member has it in packs alone, as far as known */
};

struct kva_block {
    uint8_t key[KVA_KEY];
    uint32_t prev, next; /* in its order's list; next also chains free records */
    uint32_t parent;     /* record of the parent; KVA_NONE: a first block, or not told. It may be
                          * another block's by now: believe it where @chain is equal. */
    uint32_t chain;      /* low half of the number of the chain's first key; 0: not told */
    uint32_t units;      /* size in KVA_UNIT, rounded up, at least 1; 0: a free record */
    uint32_t used_s;     /* last use, seconds since the epoch */
    uint32_t stamp;      /* number of the reference that used it last, modulo 2^32 */
    uint32_t told;       /* publishers that have it: bit KVA_TELLERS stands for all beyond */
    uint16_t have;       /* members that have it, as far as known */
    uint8_t heat;        /* uses, decayed: 16 * log2(1 + heat), as of used_s */
    uint8_t gap;         /* references between the last two uses: 4 * log2; 255: used once */
    uint8_t want;        /* member in whose order it is */
    uint8_t list;        /* list of that order */
    uint8_t count;       /* uses, up to 255 */
    uint8_t flags;       /* enum kva_flags */
};

/** Publishers that are told apart. */
enum { KVA_TELLERS = 31 };

struct kva_list {
    uint32_t head, tail; /* newest, oldest; KVA_NONE: empty */
    uint64_t n, units;
};

/** Why a blob comes into an order. */
enum kva_why {
    KVA_COLD,    /* found in a member: no use is known */
    KVA_DEMOTED, /* from the order of a faster member */
    KVA_USED
};

struct kva_index;

/** The blobs that shall lie in one member, in the policy's order. */
struct kva_order {
    struct kva_index *index;
    const struct kva_policy *policy;
    struct kva_list lists[KVA_LISTS];
    uint64_t n, units, limit; /* limit in units */
    uint32_t hand;      /* SIEVE: where the search for a victim goes on; KVA_NONE: at the tail */
    uint32_t evictions; /* so far, modulo 2^32 */
    uint32_t bonus;     /* "cost": references that a blob used again counts as younger by */
    struct kva_shadows *shadows; /* NULL: none */
};

struct kva_block *kva_block_at(const struct kva_index *index, uint32_t at);
/** Number of the latest reference. */
uint32_t kva_clock(const struct kva_index *index);

/* Lists of an order. */
void kva_list_push(struct kva_order *order, unsigned list, uint32_t at);
void kva_list_push_old(struct kva_order *order, unsigned list, uint32_t at); /* as the oldest */
void kva_list_take(struct kva_order *order, uint32_t at);

#endif
