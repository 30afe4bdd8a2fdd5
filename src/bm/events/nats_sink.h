// SPDX-License-Identifier: Apache-2.0
/**
 * Insides of the NATS sink.
 *
 *   events' thread ──► message being filled ──► client ──► SUBJECT
 *   request on SUBJECT.snapshot ──► walk of the registries ──► client of its own ──► reply subject
 *
 * A snapshot names S, the number of the message being filled when the walk begins. Messages before S
 * tell of changes before the walk. A follower that applies the messages from S on behind the snapshot
 * has what the registries have: of each block and tier the last change counts.
 *
 * The first snapshot behind a loss of events also removes from chains what no registry has: removals may
 * be among the lost events.
 */
#ifndef KVBM_BM_EVENTS_NATS_SINK_H
#define KVBM_BM_EVENTS_NATS_SINK_H

#include <pthread.h>
#include <stdatomic.h>

#include "bm/events/chains.h"
#include "bm/events/events.h"
#include "plane/nats.h"
#include "plane/record.h"

#define KVBM_SNAPSHOT_PART (64u << 10)          /* bytes of a part */
#define KVBM_SNAPSHOT_MS 60000                  /* longest time for one */
#define KVBM_SNAPSHOT_QUEUE ((uint64_t)4 << 20) /* bytes of parts that wait for the server */

struct kvbm_nats_sink {
    struct kvbm_events *events;
    struct kvp_nats *nats, *snapshots; /* clients: of messages, of answers */
    struct kvp_nats_sub *sub;
    struct kvp_header header; /* like for all messages */
    uint64_t volumes[KV_N_TIERS];
    uint64_t block_bytes, seed, window_ns;
    uint32_t max_bytes;
    bool json, jetstream;
    atomic_bool closing;

    pthread_mutex_t lock; /* all below */
    uint64_t sequence;    /* number of the message being filled */
    struct kv_buf out, text;
    uint32_t n;        /* records in it */
    uint64_t since_ns; /* since when the first waits */
    uint64_t quiet_ns; /* since when no message was sent */
    struct kvbm_chains chains;
    uint64_t tidy;                 /* stats.lost, as it was when chains were last swept */
    struct kvbm_chain_of previous; /* block stored last: most often the parent of the next one */
    struct kvbm_nats_stats stats;
};

/** Fill in what the sink knows of a block beside its keys. @chain may be NULL. */
void kvbm_nats_describe(const struct kvbm_nats_sink *sink, const struct kvbm_chain_of *chain,
                        struct kvp_record *record);

/** Answer a request for a snapshot: a kvp_nats_fn, whose @arg is the sink. */
void kvbm_nats_snapshot(void *arg, const struct kvp_nats_msg *msg);

#endif
