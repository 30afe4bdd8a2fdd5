// SPDX-License-Identifier: Apache-2.0
/**
 * Registered blocks of one cache group of one rank, and the smaller blocks that are their parts.
 *
 *     registered block   slots                       last part
 *     H                  [ part 0: A ] [ part 1: B ] H itself
 *     K                  [ part 0: A ] [ part 1: - ] K itself
 *
 * Registered blocks and parts are records of two sets. A registered block has one slot for each
 * part before the last, and a slot names one part or none. A part has the list of the slots that
 * name it, linked both ways: no other list goes through a slot, and each link is undone in O(1).
 * Each part has one index, and only slots of that index name it.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_VIEW_SMALL_PARTS_H
#define KV_INDEXER_VIEW_SMALL_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** No record, no slot. */
#define KI_NO_PART UINT32_MAX

/** A registered block, or a part. */
struct ki_block {
    uint64_t hash;
    uint64_t above;  /* of a part: hash of the part before it, 0: none */
    uint32_t copies; /* in the group */
    uint32_t first;  /* of a part: first slot that names it */
    uint32_t next;   /* in its bucket, or of the free ones */
    uint8_t index;   /* of a part */
    bool used;
};

/** Records by their hashes. */
struct ki_blocks {
    struct ki_block *items;
    uint32_t *buckets;
    size_t n, n_used, capacity, n_buckets; /* records; ever used */
    uint32_t free;
};

/** Place of one part in a registered block. */
struct ki_slot {
    uint32_t part, prev, next; /* part: KI_NO_PART: none */
};

struct ki_parts {
    uint32_t n_parts; /* parts of a registered block, 2 or more */
    struct ki_blocks wholes, parts;
    struct ki_slot *slots; /* n_parts - 1 for each record of wholes */
    size_t slots_capacity;
};

void ki_parts_init(struct ki_parts *p, uint32_t n_parts);
void ki_parts_fini(struct ki_parts *p);

/** Return the number of records. */
static inline size_t ki_parts_count(const struct ki_parts *p)
{
    return p->wholes.n + p->parts.n;
}

/** Find a record by its hash. Returns its number, or KI_NO_PART. */
uint32_t ki_whole_find(const struct ki_parts *p, uint64_t hash);
uint32_t ki_part_find(const struct ki_parts *p, uint64_t hash);

/** Add a record, which the set lacks. Returns its number, or KI_NO_PART: out of memory. */
uint32_t ki_whole_add(struct ki_parts *p, uint64_t hash);
uint32_t ki_part_add(struct ki_parts *p, uint64_t hash, uint64_t above, uint32_t index);

/**
 * Note that registered block @whole has @part. Returns 0; -ENOENT when it has another one of that
 * index.
 */
int ki_part_link(struct ki_parts *p, uint32_t part, uint32_t whole);

/** Remove a registered block, its links, and the parts that nothing needs any more. */
void ki_whole_remove(struct ki_parts *p, uint32_t whole);

/** Remove a part that has neither copies nor links; else do nothing. */
void ki_part_tidy(struct ki_parts *p, uint32_t part);

/** Return the first slot of a registered block. */
static inline uint32_t ki_whole_slot(const struct ki_parts *p, uint32_t whole)
{
    return whole * (p->n_parts - 1);
}

/** Return the registered block whose slot it is. */
static inline struct ki_block *ki_slot_whole(const struct ki_parts *p, uint32_t slot)
{
    return &p->wholes.items[slot / (p->n_parts - 1)];
}

#endif
