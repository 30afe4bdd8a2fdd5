// SPDX-License-Identifier: Apache-2.0
/** A worker's rank: as it is registered, as it is seen, and its position in its stream. */
#ifndef KV_INDEXER_STREAM_WORKER_H
#define KV_INDEXER_STREAM_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "event/reader/sources.h"
#include "event/wire/media.h"
#include "indexer/view/habits.h"
#include "indexer/view/reasons.h"
#include "kv_event.h"
#include "kv_index.h"

struct ki_registration {
    uint64_t instance;
    const char *name; /* of the instance; NULL: its number */
    uint32_t rank;
    uint32_t block_size;
    const char *endpoint;
    const char *replay_endpoint; /* NULL: gaps can't be replayed */
    const char *model;
    const char *tenant;
    /* There is no connection: operations come by ki_listener_feed or, of a stream with a publisher,
     * messages by ki_listener_feed_message. endpoint is for people. */
    bool fed;
    uint64_t num_blocks; /* blocks for which the engine has room, in all tiers; 0: unknown */
    /* The stream is of Dynamo's event plane: only this publisher's messages, and their events of
     * this instance and rank count. */
    bool has_publisher;
    uint64_t publisher;
    struct ki_habits habits;
    /*
     * Time of registration (registry_peers.c). 0: now; 1: configured, so that news of peers
     * overrides it.
     */
    uint64_t version;
    bool by_peer; /* known from a peer */
};

enum ki_listener_status {
    KI_PENDING,   /* not connected yet, or held until recovery has ended */
    KI_ACTIVE,    /* following the stream */
    KI_REPLAYING, /* fetching missed batches; live ones wait */
    KI_PAUSED,
    KI_FAILED,      /* no connection; retried. last_error has the reason */
    KI_WITHDRAWN,   /* no source of --discover names it any more: answers leave its blocks out */
    KI_UNREGISTERED /* of a view: blocks of a peer's dump that no stream keeps up to date */
};
const char *ki_listener_status_name(enum ki_listener_status status);

/** A snapshot of one registration, for GET /workers and the metrics. Strings are owned by the list.
 */
struct ki_worker_info {
    uint64_t instance;
    char *name; /* of the instance, or NULL */
    uint32_t rank;
    uint32_t block_size;
    uint64_t version;
    uint64_t num_blocks;
    struct ki_habits habits;                 /* as registered */
    enum ki_report_mode learned_report_mode; /* of the stream, where it isn't registered */
    char *endpoint;
    char *replay_endpoint; /* or NULL */
    char *model;
    char *tenant;
    enum ki_listener_status status;
    bool fed;           /* see ki_registration */
    bool connected;     /* connected to a publisher, by the latest news */
    bool stale;         /* without a connection for so long that the view is partial for it */
    uint64_t absent_ms; /* milliseconds without a connection */
    char *last_error;   /* or NULL */
    bool has_sequence;
    uint64_t last_sequence; /* of the last batch applied */
    uint64_t last_event_ns; /* wall clock; 0: none yet */
    /* The last batch was applied so long after the time in it: by the two machines' clocks. */
    bool has_lag;
    int64_t lag_ms;
    uint64_t batches, events, blocks; /* applied (blocks: stored and removed) */
    uint64_t held;                    /* blocks that the index has of this rank now */
    uint64_t bytes;                   /* bytes of their payloads */
    uint64_t gaps, missed_batches;    /* gaps seen; batches that no replay brought back */
    uint64_t replays, failed_replays; /* replays requested; given up */
    /* Overruns: the publisher's ring no longer had the batches. */
    uint64_t replayed_batches, overruns;
    uint64_t restarts; /* restarts of the engine: its blocks were forgotten */
    uint64_t absences; /* times that its blocks were forgotten for want of a connection */
    /* Times that the blocks were forgotten because too many weren't real. */
    uint64_t resyncs;
    /* Connections made anew after the publisher broke the protocol. */
    uint64_t reopened;
    uint64_t duplicates; /* batches dropped because they were applied before */
    uint64_t malformed;  /* messages and payloads that can't be parsed */
    uint64_t orphans;    /* stored events whose parent this rank doesn't have */
    /* Stored events that the index refused (full, invalid). */
    uint64_t rejected;
    uint64_t skipped[KVE_N_SKIPS]; /* events that the reader skipped, by reason */
    uint64_t left_out;  /* blocks and copies that limits of the index leave out at present */
    ki_reasons reasons; /* for which the view is partial; 0: it is whole */
    bool unnumbered;    /* messages have no sequence numbers */
    /* Frames of the last message that was none of an event stream; 0: none */
    uint32_t odd_frames;
    uint64_t event_block_size; /* of events left out because it isn't the registered one; 0: none */
    struct kve_unknown_media unknown_media;
    struct kve_listed_group *groups; /* as events and the registration tell them; NULL: none */
    uint32_t n_groups;
};

/** A rank with blocks of a dump, or of a past registration, and the stream that brings its blocks. */
struct ki_mark {
    struct kv_holder holder;
    bool has_position;    /* the stream has one; false: only holder and torn count */
    bool torn;            /* blocks may be missing: the stream must be read from its beginning */
    uint32_t stream_rank; /* registered rank of the stream */
    uint64_t sequence;    /* of the stream's last batch */
};

#endif
