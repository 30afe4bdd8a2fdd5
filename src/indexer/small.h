// SPDX-License-Identifier: Apache-2.0
/**
 * Cache groups whose blocks are smaller than the registered ones: blocks of 16 tokens in a sliding
 * window beside blocks of 32 in full attention.
 *
 *     registered block    [            H            ]
 *     blocks of the group [     A     ] [     H     ]    parts 0 and 1: the last part has H's hash
 *
 * The index has a window for each part (struct kvi_window), which holds registered blocks by their
 * hashes: block H is in window 0 while the group has A, and in window 1 while the group has H. The
 * table here knows which A belongs to H, and counts the group's copies of both. Several registered
 * blocks may begin with one A; events name it once for each copy, whichever block it was for.
 *
 * An event that leaves blocks out must leave out exactly those that can't serve any match. Where it
 * leaves out others, or doesn't tell which part it begins with, the view becomes partial.
 *
 * Caller-locked.
 */
#ifndef KV_INDEXER_SMALL_H
#define KV_INDEXER_SMALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_event.h"
#include "kv_index.h"

/** Blocks of a stream's table at most; the view becomes partial beyond. */
#define KI_MAX_SMALL (1u << 20)

/** A block of a group: the last part of a registered one, or another. */
struct ki_small_block {
    uint64_t hash;
    uint64_t above; /* hash of the part before it, of the same registered block; 0: none */
    uint32_t rank, group;
    uint32_t copies; /* in the group */
    uint32_t links;  /* the first one */
    uint32_t next;   /* in its bucket, or of the free ones */
    uint8_t part;
    bool whole; /* the last part */
    bool used;
};

/** A registered block has a part. */
struct ki_small_link {
    uint32_t part, whole; /* blocks; whole: the last part */
    uint32_t next_of_part, next_of_whole;
};

struct ki_small {
    struct ki_small_block *blocks;
    struct ki_small_link *links;
    uint32_t *buckets;
    size_t n, n_whole;        /* blocks in use */
    size_t n_blocks, n_links; /* ever used */
    size_t blocks_capacity, links_capacity, n_buckets;
    uint32_t free_block, free_link;
    bool lost; /* what the group has isn't known: partial until a clear */
};

/** The group of an operation. */
struct ki_small_group {
    struct kve_source source;
    uint32_t numbers[KVE_MAX_PARTS]; /* window of each part */
    bool drops;                      /* the engine gives the last matched block of the group up */
};

void ki_small_init(struct ki_small *s);
void ki_small_fini(struct ki_small *s);
/** Forget all, or the blocks of @rank. */
void ki_small_clear(struct ki_small *s);
void ki_small_clear_rank(struct ki_small *s, uint32_t rank);

/** Count a copy of each block that @op stores on the device. Returns 0, or kvi_window_add's error with
 * s->lost. */
int ki_small_store(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                   const struct ki_small_group *group, const struct kve_op *op);
/** Take a copy of each block that @op removes. Returns as ki_small_store. */
int ki_small_take(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                  const struct ki_small_group *group, const struct kve_op *op);
/** The registered blocks @hashes have left the main group: forget their parts where nothing needs them.
 * Returns as ki_small_store. */
int ki_small_forget(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                    const struct ki_small_group *group, const uint64_t *hashes, size_t n);

#endif
