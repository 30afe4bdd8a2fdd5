// SPDX-License-Identifier: Apache-2.0
/**
 * The index of kv-advisor: what is where. It knows each blob by its key in the stores, which members of
 * a tiered store have it, which publishers of events tell of it, how it is used, and in which member it
 * shall lie.
 *
 *     events ──► tell, use, untell ─┐                 ┌──► moves: what a member shall have and lacks,
 *                                   ├──► record ──────┤           and what it has and shall not have
 *     listings ► found, gone ───────┘   have │ want   └──► explain
 *
 * A blob's place (want) follows from its uses alone. A use puts it into the order of the fastest member;
 * what exceeds a member's limit goes from there, by the policy, to the next slower one; the last has no
 * order and no limit. So the index is a simulated hierarchy of caches, and moving blobs until have equals
 * want makes the members follow it, at whatever speed. Blobs that no event tells of are found by listings,
 * and enter the order of the member that has them as its coldest.
 *
 * A blob is forgotten when neither a member nor a publisher has it. What is told but in no member after a
 * whole scan is forgotten, too: publishers die, and blobs are collected.
 *
 * Threads: thread-confined; callers share it under a lock of their own.
 */
#ifndef KV_ADVISOR_INDEX_H
#define KV_ADVISOR_INDEX_H

#include "advisor/index/block.h"

struct kva_policy;

struct kva_index_opts {
    size_t n_members;            /* fastest first, 1 to KVA_MEMBERS */
    uint16_t fixed;              /* members that are read-only: nothing goes there or leaves */
    uint64_t limit[KVA_MEMBERS]; /* bytes that shall lie in a member; UINT64_MAX: no limit */
    const struct kva_policy *policy;
    uint32_t max_blocks;  /* 0: 2^31; blobs beyond are left out, and counted */
    uint32_t half_life_s; /* of heat; 0: 3600 */
};

/** Create an index. Returns 0; -EINVAL (no member that may be written to); -ENOMEM. */
int kva_index_create(const struct kva_index_opts *opts, struct kva_index **ret);
void kva_index_destroy(struct kva_index *index); /* NULL is a no-op */

/** A blob as an event tells of it. */
struct kva_told {
    const uint8_t *key;
    const uint8_t *parent; /* NULL: none, or not told */
    uint64_t bytes;
    uint32_t chain; /* 0: not told */
    uint8_t teller; /* number of the publisher; KVA_TELLERS and more are one */
    bool known;     /* of a snapshot: that the publisher has it, and not that it was used now */
    uint32_t now_s;
};

/** A publisher has stored the blob. Told again it is no use. Returns 1 (a use), 0; -ENOSPC; -ENOMEM. */
int kva_index_tell(struct kva_index *index, const struct kva_told *told);
/** A publisher has used the blob: read it back into memory. Returns 1; 0: it isn't tracked. */
int kva_index_use(struct kva_index *index, const uint8_t *key, uint32_t now_s);
/** A publisher has removed the blob, by its own account. */
void kva_index_untell(struct kva_index *index, const uint8_t *key, uint8_t teller, uint32_t now_s);
/** Forget what a publisher has told. Time: one pass over all blobs. */
void kva_index_forget(struct kva_index *index, uint8_t teller);

/**
 * A member has the blob: a listing, or a copy, says so. @bytes UINT64_MAX: not known, and then the blob must
 * be tracked, or the call does nothing. @used_s: last use, 0: not known. Returns 0; -ENOSPC; -ENOMEM.
 */
int kva_index_found(struct kva_index *index, unsigned member, const uint8_t *key, uint64_t bytes,
                    uint32_t used_s);
/**
 * As kva_index_found, for a blob in a pack of the member. In a scan the member's packs come behind its
 * listing, so that a blob which is there twice is told from one that is only packed.
 */
int kva_index_found_packed(struct kva_index *index, unsigned member, const uint8_t *key,
                           uint64_t bytes);
/** The member has removed the single blob: a pack has it. */
void kva_index_packed(struct kva_index *index, unsigned member, const uint8_t *key);
/** A member lacks the blob. */
void kva_index_gone(struct kva_index *index, unsigned member, const uint8_t *key);

/**
 * A scan of all members: what kva_index_found doesn't name between begin and end isn't in @members any
 * more, unless it came since begin. Members that couldn't be listed are left out of @members.
 */
int kva_index_scan_begin(struct kva_index *index); /* 0; -ENOMEM */
void kva_index_scan_end(struct kva_index *index, uint16_t members);

/** Bytes of blobs that the index can't track (other keys) and that take a member's room. */
void kva_index_reserve(struct kva_index *index, unsigned member, uint64_t bytes);

/** Hint that @key is looked up soon: first its slot, somewhat later (@record) its record. */
void kva_index_prefetch(const struct kva_index *index, const uint8_t *key, bool record);

/** Return the record of a blob, until the next change; NULL: it isn't tracked. */
const struct kva_block *kva_index_find(const struct kva_index *index, const uint8_t *key);
/** Whether all publishers that told of a blob have removed it for @left_s. */
bool kva_index_is_left(const struct kva_block *block, uint32_t now_s, uint32_t left_s);
/** Set or clear KVA_LINGER. No-op for a blob that isn't tracked. */
void kva_index_linger(struct kva_index *index, const uint8_t *key, bool on);
/** Decayed uses of a blob at @now_s. */
double kva_heat(const struct kva_index *index, const struct kva_block *block, uint32_t now_s);
/** Walk the chain upwards: the parent of @block, or NULL as far as known. */
const struct kva_block *kva_parent(const struct kva_index *index, const struct kva_block *block);

/** Kinds of move. */
enum kva_move_kind { KVA_LOOK, KVA_COPY, KVA_REMOVE, KVA_DELETE };
/** One step towards the wanted places. */
struct kva_move {
    uint8_t key[KVA_KEY];
    enum kva_move_kind kind;
    uint8_t from, to; /* COPY: both; REMOVE: from, and to has it */
    uint64_t bytes;
};

/**
 * Write up to @n moves that are due, from record *@at on (at first 0; the caller keeps it). At most
 * KVA_PAGE records are looked at. @left_s: blobs that all publishers have removed for so long are
 * KVA_DELETE; 0: never. Returns their number; *@at is 0 again when all records have been seen.
 */
size_t kva_index_moves(const struct kva_index *index, uint32_t *at, uint32_t now_s, uint32_t left_s,
                       struct kva_move *ret, size_t n);

/** Which blobs of the last member are to be packed. */
struct kva_cold_opts {
    uint32_t before_s;    /* used last before that second */
    uint64_t max_bytes;   /* longer ones stay single */
    uint32_t part, parts; /* of the chains' numbers: whole chains, when all don't fit into memory */
};
/** A blob to be packed. Records are numbered as in the index, and good for sorting only. */
struct kva_cold {
    uint8_t key[KVA_KEY];
    uint32_t at, parent; /* records of the blob and its parent; KVA_NONE: not known */
    uint32_t chain;
    uint64_t bytes;
};
/** Write up to @n of them, as kva_index_moves does: blobs of a known chain, in the last member alone. */
size_t kva_index_cold(const struct kva_index *index, uint32_t *at, const struct kva_cold_opts *opts,
                      struct kva_cold *ret, size_t n);
/** Whether a blob is still one of them. */
bool kva_index_is_cold(const struct kva_index *index, const uint8_t *key,
                       const struct kva_cold_opts *opts);

/** Walk all records, for a snapshot: members from the slowest, and each order from the coldest on. */
typedef int (*kva_each_fn)(void *arg, const struct kva_block *block);
int kva_index_each(const struct kva_index *index, kva_each_fn fn, void *arg);
/**
 * Put back a record of kva_index_each, in its order; in that order it becomes the newest. Its stamp counts
 * from the clock that kva_index_set_clock sets before. What has it and tells of it isn't known: the next
 * scan forgets it unless it is found. Returns 0; -EEXIST; -EINVAL: no such member, no size, or a list that
 * the policy doesn't have; -ENOSPC; -ENOMEM.
 */
int kva_index_restore(struct kva_index *index, const struct kva_block *block);
void kva_index_set_clock(struct kva_index *index, uint32_t clock);

struct kva_index_stats {
    uint64_t blocks, bytes, memory; /* memory: bytes of the index */
    uint64_t clock;                 /* references so far */
    uint64_t refused;               /* blobs left out: too many, or no memory */
    struct {
        uint64_t have, have_bytes; /* blobs that it has */
        uint64_t want, want_bytes; /* that it shall have */
        uint64_t hits;             /* references to blobs that were to lie there */
        uint64_t limit;            /* bytes; UINT64_MAX: none */
        uint64_t reserved;         /* bytes of other blobs */
    } members[KVA_MEMBERS];
    uint32_t bonus; /* of the first order, where the policy has one */
};
void kva_index_get_stats(const struct kva_index *index, struct kva_index_stats *ret);

#endif
