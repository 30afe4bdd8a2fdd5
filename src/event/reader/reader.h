// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the files of the reader and by the indexer. Everybody else includes kv_event.h.
 *
 *   reader.c          life, batches, operations
 *   reader_rules.c    whose cache an event is about, and in which tier
 *   reader_stored.c   stored events: salts, hashes
 *   reader_removed.c  removed and cleared events
 *   reader_routed.c   batches of Dynamo's event plane
 *   reader_state.c    state between batches, for replicas
 */
#ifndef KV_EVENT_READER_READER_H
#define KV_EVENT_READER_READER_H

#include "kv_event.h"

#include "event/reader/salts.h"
#include "event/reader/sources.h"
#include "event/router/router_event.h"
#include "event/wire/media.h"
#include "event/wire/raw_event.h"
#include "event/wire/unique.h"

/** Most entries of events that a batch left out, by rank and source. */
#define KVE_MAX_LOST 16

#define KVE_ANY_SOURCE UINT32_MAX

#define KVE_CHUNK_VARIES UINT32_MAX

/** An event that was left out may have changed what the publisher has there, and a query can ask for. */
struct kve_lost {
    uint32_t rank;
    uint32_t source; /* KVE_ANY_SOURCE: unknown */
    uint32_t tiers;  /* bit per tier; all while it isn't known */
};

/** An event before any rule is applied. All pointers are valid during the call that shows it. */
struct kve_seen {
    const struct kve_raw_event *ev;
    const uint64_t *hashes; /* ev->n_hashes; NULL for none */
    uint32_t rank;
    bool has_worker; /* the event names its worker, as those of envelopes do */
    uint64_t worker;
};

/**
 * See each event of a batch that has the form of one. A batch that can't be read to its end
 * (kve_reader_decode fails) has shown its first events, too.
 */
typedef void (*kve_watch_fn)(void *arg, const struct kve_seen *seen);

/** Whose envelopes and events a reader takes: see kve_reader_expect. */
struct kve_expected {
    bool given;
    uint64_t publisher, worker;
    uint32_t rank;
};

struct kve_reader {
    uint32_t block_size;
    uint32_t rank;
    uint32_t max_events;
    kve_watch_fn watch; /* NULL: nobody looks on */
    void *watch_arg;

    struct kve_scratch scratch; /* its hashes are part of the batch */
    struct kve_unique unique;
    uint64_t *locals;
    size_t locals_capacity;

    struct kve_op *ops;
    /* Start of each op in blocks or scratch.hashes; an index, since both move while they grow */
    size_t *starts;
    size_t n_ops, ops_capacity, starts_capacity;
    struct kv_block *blocks;
    size_t n_blocks, blocks_capacity;
    /* Copies left, parallel to scratch.hashes; set for removals that have the field */
    uint32_t *remaining;
    size_t remaining_capacity;
    /* State of the batch since its last device event: see kve_add_cleared. */
    uint32_t n_clears;
    bool pool_began;
    bool device_cleared; /* the batch has a clear that was certainly the device's */
    /* Events of the batch that were left out: what they were about. */
    struct kve_lost lost[KVE_MAX_LOST];
    uint32_t n_lost;
    uint32_t lost_beyond;  /* tiers of further ones, of any rank and source */
    struct kve_lost event; /* what the current event is about */

    struct kve_expected expected;
    struct kve_router_scratch routed; /* of events in envelopes */
    bool has_event_id;                /* event_id is of the expected rank's last event */
    uint64_t event_id;
    bool misses_events; /* by their event_ids, events before the last batch's end never came */

    /* State between batches, from here on. Replicas receive it, too (reader_state.c). */
    struct kve_sources sources;
    bool ignore_mm_keys, ignore_mm_offsets;
    bool saw_salt, saw_adapter, saw_objects; /* since the last reset */
    /* Bit per tier in which full attention has announced parts of blocks; blocks of the registered
     * size. Replicas see them anew. */
    uint32_t part_tiers, whole_tiers;
    /* Bit per tier that the publisher clears together with its device tier */
    uint32_t engine_tiers;
    /* Bit per tier of which nothing tells whether the publisher's clear empties it */
    uint32_t unclear_tiers;
    uint32_t pool_tiers; /* bit per tier in which a connector has a block pool of its own */
    bool saw_offload;    /* a lower tier without a pool of its own was seen */
    bool names_ranks;    /* batches or events have named ranks: there may be more of them */
    bool names_zero;     /* a stored block has hash 0: as a parent, 0 means that block */
    uint32_t components; /* of stored blocks: see kve_raw_components */
    /* Blocks of each stored event of a connector's tier: 0: none yet, or KVE_CHUNK_VARIES. Where all
     * have as many, and more than one, the connector loads all of them or none. */
    uint32_t chunk[KV_N_TIERS];
    struct kve_salts salts;

    /* For people. */
    struct kve_unknown_media unknown_media;
    uint64_t other_block_size; /* of the last event left out for its block size; 0: none */
};

/**
 * Do as kve_reader_reset, and number sources from 1 again: no block is held under the old numbers.
 * Otherwise owners with a name of each process would use up the numbers.
 */
void kve_reader_renew(struct kve_reader *reader);

/**
 * Take envelopes (kve_reader_decode) of this publisher alone, and of their events those of this worker
 * and rank. Other envelopes are no batch (-EPROTO); other events are left out (KVE_SKIP_REMOTE).
 * Engines' own batches are read as before.
 */
void kve_reader_expect(struct kve_reader *reader, uint64_t publisher, uint64_t worker,
                       uint32_t rank);

/** Return true when the publisher, or another owner, has shown blocks in tiers that its clears leave alone. */
bool kve_reader_has_lower(const struct kve_reader *reader);

/**
 * Tell whether @rank has shown a full-attention group, or blocks that name no group. Without one a
 * match consists of its windows' blocks alone.
 */
bool kve_reader_has_main(const struct kve_reader *reader, uint32_t rank);

/** Return true when a group of @rank lives below the device, and its blocks count as there. -1: no group. */
bool kve_reader_lives_below(const struct kve_reader *reader, uint32_t rank, int64_t group);

/**
 * Tell whether matches may be others than the engine's, for cache groups:
 * - some rank has stored blocks of a group that the reader leaves out (KVE_SKIP_GROUP): of an unknown
 *   kind, of chunks whose length nobody told, with blocks that are neither a whole number nor a small
 *   fraction of the registered ones, or beyond those that it can remember (64 each of 1024 ranks);
 * - the engine resumes inside of registered blocks, at states that end there, or a group has shown a
 *   part of one and nothing else yet;
 * - full attention has shown only parts of blocks of the registered size in some tier;
 * - a group has shown blocks below the device alone and nothing tells whether it lives there (groups.h),
 *   or one lives there, and another is offloaded to such a tier;
 * - a rank has chunked attention without full attention: its engine resumes at the start of any chunk,
 *   of prompts that it has never seen, too; or above a connector's block pool, which serves nothing
 *   where the device's hit ends within a chunk.
 */
bool kve_reader_skips_group(const struct kve_reader *reader);

/** Return the current event's hashes in the scratch; NULL when no event has had any. */
static inline const uint64_t *kve_event_hashes(const struct kve_reader *r)
{
    return r->scratch.hashes ? r->scratch.hashes + r->scratch.n_hashes : NULL;
}

/** Return the hash of block @i of an operation on blocks. */
static inline uint64_t kve_op_hash(const struct kve_op *op, size_t i)
{
    return op->type == KVE_OP_STORE ? op->blocks[i].hash : op->hashes[i];
}

/** Return true when @op's source is a window group. */
static inline bool kve_is_window(const struct kve_reader *r, const struct kve_op *op)
{
    return op->source && r->sources.items[op->source].kind == KVE_SOURCE_WINDOW;
}

/** Note that what the publisher has in the current event's tiers can't be told from its events. */
void kve_note_lost(struct kve_reader *reader);

/** Append @op, whose blocks or hashes begin at @start. Returns 0 or -ENOMEM. */
int kve_add_op(struct kve_reader *reader, const struct kve_op *op, size_t start);
/**
 * Append @op on the current event's @n hashes, which become part of the batch. Returns 0 or -ENOMEM.
 */
int kve_add_hashes_op(struct kve_reader *reader, struct kve_op *op, size_t n);

/**
 * Apply the rules that stored and removed events share: set @op's source and tier. Returns 0 or
 * KVE_SKIP_RC(...).
 */
int kve_apply_rules(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op);
/** At the end of a batch: settle where groups live, and move the batch's operations on them there. */
void kve_settle_groups(struct kve_reader *reader);
/** Return true for a tier of a connector, below the engine's own. */
bool kve_is_connector_tier(const struct kve_medium *medium);
/** Find a medium. Returns 0 or KVE_SKIP_RC(MEDIUM), which is counted by the name. */
int kve_find_medium(struct kve_reader *reader, struct kv_str name, const struct kve_medium **ret);
/** Return true when the publisher doesn't hold what the event is about. */
bool kve_is_elsewhere(const struct kve_raw_event *ev);
/** Return true for a window group beside a main group, which has its blocks' salts and places. */
bool kve_is_beside_main(const struct kve_reader *reader, const struct kve_op *op);
/** Return true when a window group's event is the only one that tells where its blocks lie. */
bool kve_places_window(const struct kve_reader *reader, const struct kve_raw_event *ev,
                       const struct kve_op *op);

/** Add the operation of one event. Returns 0, KVE_SKIP_RC(...) or -ENOMEM. */
int kve_add_stored(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op);
int kve_add_removed(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op);
int kve_add_cleared(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op);
/** Add the operations of the envelope at @data. Returns 0, -EPROTO or -ENOMEM. */
int kve_read_routed(struct kve_reader *reader, const void *data, size_t len,
                    struct kve_batch *batch);

#endif
