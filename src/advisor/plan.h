// SPDX-License-Identifier: Apache-2.0
/** A plan: the steps that the index asks for now, added up, and what they cost. */
#ifndef KV_ADVISOR_PLAN_H
#define KV_ADVISOR_PLAN_H

#include "advisor/packer.h"
#include "base/json/json.h"
#include "tiered/pack_sweep.h"

struct kva_plan {
    struct {
        uint64_t blobs, bytes;
    } copy[KVA_MEMBERS][KVA_MEMBERS]; /* from, to */
    struct {
        uint64_t blobs, bytes;
    } remove[KVA_MEMBERS]; /* copies that are in a better place already */
    uint64_t deleted, deleted_bytes, unfound;
    struct trd_weight packs[KVA_MEMBERS];
    uint64_t packed,
        packed_bytes; /* single blobs that go into packs, where they are enough for one */
    double request_cost,
        month_cost; /* of the copies' requests; of what lies elsewhere then, a month */
};

/** Add up the steps. Takes the world's lock for 65536 blobs at a time. */
void kva_plan_make(struct kva_volumes *volumes, struct kva_world *world, uint32_t left_s,
                   const struct kva_packing *packing, struct kva_plan *ret);

/** Write plan and members as members of an object. */
void kva_plan_json(const struct kva_volumes *volumes, const struct kva_index_stats *stats,
                   const struct kva_plan *plan, struct kv_json_writer *w);
/** Append them as text for people. */
void kva_plan_text(const struct kva_volumes *volumes, const struct kva_index_stats *stats,
                   const struct kva_plan *plan, struct kv_buf *out);

#endif
