// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_plan.h: plans between tensor-parallel layouts (docs/kvbm-remote.md). A rank of one group reads
 * its heads from the ranks of another group, which may be larger or smaller, and may lay out blocks
 * in another way.
 *
 *   heads     0 1 2 3 4 5 6 7
 *   remote    └─0─┘└─1─┘└─2─┘└─3─┘     TP4
 *   local     └───0───┘└────1────┘     TP2: rank 1 has two parts, from remote ranks 2 and 3
 *
 * A plan is made once per pair of groups. It knows no addresses and no blocks: parts say which
 * heads come from which rank, copies say where their bytes lie in any block. kvbm_plan_read runs a
 * plan over sessions. Programs that can address the remote memory may also submit each part as a
 * kvbm_transfer; others move the copies.
 *
 * Errors are negative errno values, with the reason in the log. A plan is immutable after creation:
 * any thread may use it; nothing may while another thread destroys it.
 */
#ifndef KVBM_PLAN_H
#define KVBM_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_layout.h"
#include "kvbm_remote.h"

#ifdef __cplusplus
extern "C" {
#endif

/** One rank's part of the blocks. In arrays; never grows. */
struct kvbm_plan_rank {
    const struct kvbm_layout_config *layout; /* as kvbm_remote_set_layout reads it */
    struct kvbm_shard shard;                 /* as kvbm_remote_set_get_info reads it */
};

/** Heads that one remote rank gives: src_head, dst_head and n_heads of kvbm_transfer. */
struct kvbm_plan_part {
    uint32_t rank;        /* index among the remote ranks */
    uint32_t remote_head; /* first head, counted from the remote layout's first */
    uint32_t local_head;  /* first head, counted from the local layout's first */
    uint32_t n_heads;     /* 0: whole blocks of layouts without num_heads */
};

/** Axes along which the runs of a copy repeat. */
#define KVBM_PLAN_AXES 3

/**
 * Runs of bytes, the same for every block. Run (i, j, k) begins at
 *   offset + block * block_stride + i * stride[0] + j * stride[1] + k * stride[2]
 * from the aligned address of the storage, on both sides. Runs of one copy don't overlap.
 */
struct kvbm_plan_copy {
    uint32_t part;                          /* index among the plan's parts */
    uint32_t remote_storage, local_storage; /* number of the layout's storage */
    uint64_t count[KVBM_PLAN_AXES];         /* runs along each axis, outermost first; 1 or more */
    uint64_t remote_offset, local_offset;   /* of block 0 */
    uint64_t remote_len, local_len; /* bytes of a run; they differ when elements are converted */
    uint64_t remote_block_stride, local_block_stride;
    uint64_t remote_stride[KVBM_PLAN_AXES], local_stride[KVBM_PLAN_AXES];
};

/** One copy of one block: where its first run begins. */
struct kvbm_plan_piece {
    uint32_t copy;  /* index among the plan's copies */
    uint32_t block; /* index among the blocks given to kvbm_plan_apply */
    uint64_t remote_offset, local_offset;
};

/** Heads of the model, [first, first + n). */
struct kvbm_plan_heads {
    uint32_t first, n;
};

/** A plan. Immutable after creation: any thread. */
struct kvbm_plan;

/** Most remote ranks of a plan, and most copies. */
#define KVBM_MAX_PLAN_RANKS 4096
#define KVBM_MAX_PLAN_COPIES (1 << 20)

/**
 * Plan how @local reads its part of each block from @remotes[@n]. The parts cover every local head
 * once; of several ranks that hold a head, ranks of the local group choose different ones. num_heads,
 * dtype or both that a layout doesn't know are taken to be the others'. @missing may be NULL. The
 * caller frees *@ret with kvbm_plan_destroy. Returns 0, or
 *   -EINVAL       a shard that contradicts its layout; no ranks, or more than KVBM_MAX_PLAN_RANKS
 *   -EMEDIUMTYPE  blocks of another model: layers, outers, page size, heads or their size (logged)
 *   -ENODATA      no remote rank holds some of the heads; *@missing becomes the first ones (logged)
 *   -ENOTSUP      elements that kvbm_transfer can't convert (logged)
 *   -EOVERFLOW    a layout beyond 2^62 bytes, or more than KVBM_MAX_PLAN_COPIES copies
 *   -ENOMEM
 */
KV_API int kvbm_plan_create(const struct kvbm_plan_rank *local,
                            const struct kvbm_plan_rank *remotes, size_t n,
                            struct kvbm_plan_heads *missing, struct kvbm_plan **ret);

/** Free a plan. NULL is a no-op. */
KV_API void kvbm_plan_destroy(struct kvbm_plan *plan);

/** Return the parts in the order of the local heads, and their number in *@n. The plan owns them. */
KV_API const struct kvbm_plan_part *kvbm_plan_parts(const struct kvbm_plan *plan, size_t *n);

/** Return the copies, those of a part together, and their number in *@n. The plan owns them. */
KV_API const struct kvbm_plan_copy *kvbm_plan_copies(const struct kvbm_plan *plan, size_t *n);

/**
 * Return true when elements change their dtype on the way: whoever moves copies must convert them.
 * kvbm_transfer does.
 */
KV_API bool kvbm_plan_converts(const struct kvbm_plan *plan);

/**
 * List what to copy for @n blocks: local block local_blocks[i] from block remote_blocks[r][i] of
 * each remote rank r that has a part (NULL for the others). Pieces of a copy lie together, in the
 * order of the blocks. Returns their number; -ERANGE (a block beyond a layout); -ENOSPC (@cap is
 * less than @n times the copies); -EINVAL (no blocks for a rank that has a part).
 */
KV_API long kvbm_plan_apply(const struct kvbm_plan *plan, const uint32_t *local_blocks,
                            const uint32_t *const *remote_blocks, size_t n,
                            struct kvbm_plan_piece *to, size_t cap);

/* ---- reading ---- */

struct kvbm_copier;

/** Where a remote rank's blocks are. In arrays; never grows. */
struct kvbm_plan_source {
    struct kvbm_session *session; /* NULL: nowhere; the rank gives nothing */
    uint32_t set;                 /* id of its block set */
    uint32_t reserved;            /* 0 */
};

/** Request of kvbm_plan_read; set size to sizeof(struct kvbm_plan_read_opts), zero: the default. */
struct kvbm_plan_read_opts {
    size_t size;
    struct kvbm_copier *copier;             /* required: copies and converts (kvbm_transfer.h) */
    const struct kvbm_plan_source *sources; /* required: one of each remote rank of the plan */
    uint32_t group;
    const void *keys;             /* required: [n] packed, as kvbm_session_lease takes them */
    const struct kvbm_layout *to; /* required: the plan's local layout, in memory of the copier's */
    const uint32_t *to_blocks;    /* required: [n] blocks of to, each once */
    uint32_t n;                   /* required */
    int32_t priority;             /* of the copies */
    uint64_t deadline_ns;         /* CLOCK_MONOTONIC; 0: in 10 s */
    uint8_t
        *ok; /* [(n + 7) / 8] bit i: to_blocks[i] has its key's bytes of all parts; may be NULL */
    bool no_checksums, no_shared; /* as kvbm_lease_read_opts */
    /* Asked between requests and copies, by several threads at a time: true ends the call soon. A
     * request to a peer that doesn't answer ends at the deadline. NULL: not wanted. */
    bool (*cancelled)(void *arg);
    void *arg; /* of cancelled */
};
#define KVBM_PLAN_READ_OPTS_INIT KV_INIT_(kvbm_plan_read_opts)

/**
 * Read blocks of several ranks into the local layout, and wait for it: lease each part's blocks of
 * its rank, copy or receive them, and place their heads, converted where layouts differ. Up to 16
 * parts are read at a time, by threads of the call. A block is right when every part of it is:
 * generations are compared after a copy from shared memory, checksums after a session. Nothing writes
 * into to after the return, which is at the deadline at the latest, but for copies that are under way.
 *
 * Returns the number of right blocks, 0 and more, also when ranks have died, freeze, lend too little
 * or have exported other blocks than the plan's; -EINVAL (also: a block twice); -ERANGE (a block
 * beyond to); -ENOMEM. Not to be called from callbacks of an agent.
 */
KV_API long kvbm_plan_read(const struct kvbm_plan *plan, const struct kvbm_plan_read_opts *opts);

#ifdef __cplusplus
}
#endif
#endif
