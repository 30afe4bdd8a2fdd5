// SPDX-License-Identifier: Apache-2.0
/**
 * The packer: cold blobs of the last member go into packs (tiered/pack.h), the blobs of a prefix side by
 * side; packs with few live blobs are rewritten; half-written ones are removed. The mover's thread runs it
 * when nothing is left to move.
 *
 *     idle ──► gather cold blobs, order them by their prefixes ──► write, pack by pack
 *      ▲                                                                │
 *      └── remove the single blobs that packs have ◄── wait for linger ─┘
 *
 * No journal. After a kill the scan finds blobs that lie in a pack and by themselves: they are gathered
 * again, and those that a pack of the last hour has go on with the wait. Others are packed once more, and
 * the older pack's copy counts as dead when packs are rewritten.
 *
 * Threads: the mover's, but for kva_packer_get_stats.
 */
#ifndef KV_ADVISOR_PACKER_H
#define KV_ADVISOR_PACKER_H

#include "advisor/leader.h"
#include "advisor/volumes.h"

struct kva_packer;

/** Blobs to pack, and when. */
struct kva_packing {
    uint32_t idle_s; /* blobs that weren't used for so long; 0: nothing is packed */
    uint64_t min_bytes,
        max_bytes;     /* of a pack's blobs. 0: TRD_PACK_MIN_BYTES, TRD_PACK_MAX_BYTES */
    uint64_t grace_ms; /* a pack that nobody publishes for so long is removed; 0: 1 h */
};

struct kva_packer_opts {
    struct kva_volumes *volumes;
    struct kva_world *world;
    struct kva_leader *leader;
    struct kva_packing packing;
    /* of the mover: wait for the limits, until a time (false: end, or quiet hours); blobs that are left alone */
    bool (*pay)(void *arg, uint64_t n, uint64_t bytes);
    bool (*wait)(void *arg, uint64_t until_ns);
    bool (*rests)(void *arg, const uint8_t *key);
    void (*rest)(void *arg, const uint8_t *key);
    void *arg;
};

int kva_packer_create(const struct kva_packer_opts *opts, struct kva_packer **ret); /* 0; -ENOMEM */
void kva_packer_destroy(struct kva_packer *packer); /* NULL is a no-op */

/** Take the next step. Returns false: there is none now. */
bool kva_packer_turn(struct kva_packer *packer);
/** Whether it has found nothing to do since the last scan. */
bool kva_packer_is_idle(const struct kva_packer *packer);
/** Forget what is under way: another advisor may be at work. */
void kva_packer_reset(struct kva_packer *packer);

struct kva_packer_stats {
    uint64_t packs, blobs, bytes; /* written */
    uint64_t dropped;             /* single blobs removed */
    uint64_t rewritten;           /* packs with few live blobs: rewritten, or removed */
    uint64_t strays;              /* half-written packs removed */
    uint64_t failed;
};
void kva_packer_get_stats(struct kva_packer *packer, struct kva_packer_stats *ret);

/** Which blobs are cold at @now_s. */
struct kva_cold_opts kva_cold_opts(const struct kva_packing *packing, uint32_t now_s);
/** Order @n blobs, which come by their records, so that each follows its parent where that is among them. */
int kva_order_cold(const struct kva_cold *cold, size_t n, uint32_t *ret); /* 0; -ENOMEM */
/** Return the member whose blobs are packed: the last that may be written to. */
unsigned kva_pack_member(const struct kva_volumes *volumes);

#endif
