// SPDX-License-Identifier: Apache-2.0
/**
 * An engine worker of the whole system: a process with G1 in memory, tiers below, events and an
 * agent. One thread serves requests; the tiers have their own.
 */
#ifndef KV_CLI_WHOLE_WORKER_H
#define KV_CLI_WHOLE_WORKER_H

#include "cli/whole/message.h"
#include "cli/whole/stage.h"
#include "kvbm.h"

struct kc_worker {
    const struct kc_plan *plan;
    uint32_t number;
    struct kvbm_events *events;
    struct kve_publisher *publisher; /* of events */
    struct kvbm_agent *agent;        /* NULL: no peers */
    struct kvbm_manager *manager;
    struct kvbm_layout *layout; /* of G1 */
    struct kvbm_pool *pool;     /* G1 */
    struct kvbm_cache *cache;
    struct kvbm_blockset *set;
    kvx_cache_desc_t *layers; /* [layers] G1 as kvx sees it */
    char *rows[2];            /* K and V of some blocks, for writing and gathering */
    uint32_t *tokens;
    uint64_t *keys;
    struct kvbm_immutable *blocks[2]; /* of the request, in each group */
    uint32_t first[2], held[2];       /* blocks [first, held) of these are held */
    struct kvbm_mutable *fresh;
    struct kc_done_message done; /* of the request, and counters since the start */
    bool flipped;                /* the plan's flip is done */
    struct kc_stage_page *stage; /* what it does, for the director */
};

/** Make events and agent: all that the others have to know before the first block. 0 or errno. */
int kc_worker_open(struct kc_worker *worker, struct kc_message *ret_ready);
/** Make the tiers. Blocks of an existing disk tier are there, and published. 0 or errno. */
int kc_worker_go(struct kc_worker *worker);
/** Destroy all of it. */
void kc_worker_close(struct kc_worker *worker);

/** Serve a request: worker->done has its figures. */
void kc_worker_serve(struct kc_worker *worker, const struct kc_request_message *request);

/** Write K and V of blocks [first, n) of the request, which have keys, into G1. 0 or errno. */
int kc_rows_write(struct kc_worker *worker, uint32_t group, uint32_t first, uint32_t n);
/** Write token @at of the decode's block @block, whose key is @key. 0 or errno. */
int kc_rows_write_token(struct kc_worker *worker, uint32_t group, uint32_t block, uint64_t key,
                        uint32_t at);
/**
 * Gather the blocks before block @n of the request that the group attends to, and @extra tokens of block
 * @tail whose key is @key, and compare every byte. Returns 0 or errno of the gather; differences are
 * counted in worker->done.
 */
int kc_rows_compare(struct kc_worker *worker, uint32_t group, uint32_t n, uint32_t tail,
                    uint64_t key, uint32_t extra);

/** The main function of a worker's process, which talks with the director over @fd. */
int kc_worker_main(int fd);

#endif
