// SPDX-License-Identifier: Apache-2.0
/**
 * The mover: a thread that takes the steps which the index asks for, within limits.
 *
 *     KVA_LOOK    ask the members for blobs that are told and not found yet
 *     KVA_COPY    copy, publish, read back and compare (tiered/move.h)
 *     KVA_REMOVE  wait for the store's linger, then remove the copy from where it isn't wanted
 *     KVA_DELETE  remove a blob from all members: every publisher that told of it has removed it
 *
 * When none is left it packs cold blobs (packer.h).
 *
 * No journal: a step leaves a blob in one member or in both. After a kill the scan finds it, and the
 * steps begin anew. What a member doesn't take, or doesn't answer, is tried again later: a pair of
 * members rests for 1 s, doubling to 60 s, a blob for 60 s.
 *
 * Threads: create and destroy by the owner; all else from any thread.
 */
#ifndef KV_ADVISOR_MOVER_H
#define KV_ADVISOR_MOVER_H

#include "advisor/packer.h"
#include "advisor/volumes.h"

struct kva_mover;

struct kva_limits {
    uint64_t bytes_per_s;    /* copied; 0: no limit */
    uint64_t requests_per_s; /* blobs copied or removed; 0: no limit */
    uint32_t quiet_from,
        quiet_to;    /* minutes of the local day between which nothing moves; equal: never */
    uint32_t left_s; /* delete what all publishers have removed for so long; 0: never */
};

struct kva_mover_opts {
    struct kva_volumes *volumes;
    struct kva_world *world;
    struct kva_leader *leader; /* NULL: nobody else moves blobs; borrowed */
    void (*scan)(void *arg);   /* with a leader: list the members now */
    void *scan_arg;
    struct kva_limits limits;
    struct kva_packing packing;
    uint64_t interval_ms; /* between two passes that find nothing, at least; 0: 200 */
};

/** Start the thread. It moves nothing before the first whole scan. Returns 0; -ENOMEM; -EAGAIN. */
int kva_mover_create(const struct kva_mover_opts *opts, struct kva_mover **ret);
/** Stop: end the call to a member that is under way, and the thread. NULL is a no-op. */
void kva_mover_destroy(struct kva_mover *mover);

struct kva_mover_stats {
    uint64_t copied[KVA_MEMBERS], copied_bytes[KVA_MEMBERS]; /* into a member */
    uint64_t removed[KVA_MEMBERS];                           /* from a member */
    uint64_t deleted, bad, failed; /* bad: sources that didn't verify; failed: calls and blobs */
    uint64_t lingering;            /* blobs that wait for their removal now */
    uint64_t passes;               /* whole passes over the index that found nothing to do */
    bool quiet;                    /* quiet hours now */
    struct kva_packer_stats packer;
};
void kva_mover_get_stats(struct kva_mover *mover, struct kva_mover_stats *ret);

/** Whether minute @at of the day lies between @from and @to, which may be on the next day. */
bool kva_is_quiet(uint32_t from, uint32_t to, uint32_t at);

#endif
