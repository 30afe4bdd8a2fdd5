// SPDX-License-Identifier: Apache-2.0
/** Shared by the files of the index: table.c records and lists, index.c events, walk.c passes. */
#ifndef KV_ADVISOR_INDEX_IMPL_H
#define KV_ADVISOR_INDEX_IMPL_H

#include "advisor/index/index.h"
#include "advisor/index/policy.h"

struct kva_index {
    struct kva_index_opts opts;
    struct kva_block **pages;
    uint32_t n_pages, n_records; /* records ever made: those of pages in use */
    uint32_t free, n_blocks;     /* first free record; records in use */
    uint32_t *slots;             /* record + 1; 0: free */
    uint32_t n_slots;
    uint32_t clock;
    uint64_t references, bytes, refused;
    uint16_t *seen; /* during a scan: members that a listing names, by record; NULL: none */
    uint32_t n_seen;
    float heats[UINT8_MAX + 1]; /* that a record's byte stands for */
    /* Members that blobs may be moved to, fastest first; the last is the sink, without an order. */
    uint8_t places[KVA_MEMBERS];
    size_t n_places;
    struct kva_order orders[KVA_MEMBERS]; /* by member */
    struct {
        uint64_t have, have_units, want, want_units, hits, reserved;
    } members[KVA_MEMBERS];
};

/* -- table.c ----------------------------------------------------------------------------------- */

/** Return the record of @key; KVA_NONE. */
uint32_t kva_table_find(const struct kva_index *index, const uint8_t *key);
/** Make a record for a key that has none, all zeros but for the key. 0; -ENOSPC; -ENOMEM. */
int kva_table_add(struct kva_index *index, const uint8_t *key, uint32_t *ret);
/** Free a record, which is in no list. */
void kva_table_drop(struct kva_index *index, uint32_t at);

/* -- index.c ----------------------------------------------------------------------------------- */

/** Let a blob want @member: put it into that order, and pass on what exceeds the limit. */
void kva_want(struct kva_index *index, uint32_t at, unsigned member, enum kva_why why);
/** Take a blob out of its order. */
void kva_unwant(struct kva_index *index, uint32_t at);
void kva_set_have(struct kva_index *index, uint32_t at, unsigned member, bool has);
/** Forget a blob that neither a member nor a publisher has. */
void kva_drop_unless_held(struct kva_index *index, uint32_t at);
/** Forget a blob. */
void kva_drop(struct kva_index *index, uint32_t at);
static inline uint32_t kva_units(uint64_t bytes)
{
    uint64_t units = bytes / KVA_UNIT + (bytes % KVA_UNIT != 0);

    return units == 0 ? 1 : units > UINT32_MAX ? UINT32_MAX : (uint32_t)units;
}
/** True for the last member that blobs are moved to: the one whose blobs are packed. */
static inline bool kva_is_sink(const struct kva_index *index, unsigned member)
{
    return member == index->places[index->n_places - 1];
}
static inline bool kva_is_fixed(const struct kva_index *index, unsigned member)
{
    return index->opts.fixed >> member & 1;
}

#endif
