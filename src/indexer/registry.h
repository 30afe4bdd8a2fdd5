// SPDX-License-Identifier: Apache-2.0
/**
 * The registry: which models are indexed, which workers feed them, and the listeners that follow
 * the workers' event streams.
 *
 * A model here is a (model_name, tenant_id) pair with its own prefix index and block size; pairs
 * are isolated from one another. A registration is one (instance_id, dp_rank) with one ZMQ
 * endpoint, and owns one listener. All functions are thread-safe; none waits for the network.
 * Unregistering waits until the blocks have left the index (about a million a second), and so does
 * the instance's next change. Changes of other instances don't wait.
 */
#ifndef KV_INDEXER_REGISTRY_H
#define KV_INDEXER_REGISTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/args.h"
#include "base/buf.h"
#include "base/error.h"
#include "event/media.h"
#include "indexer/habits.h"
#include "kv_event.h"
#include "kv_index.h"

struct ki_registry;

struct ki_registry_opts {
    /* Number of event threads, which share the listeners; 0: 4. */
    uint32_t threads;
    uint32_t max_registrations;      /* limit of registrations; 0: 4096 */
    const struct kv_arg_list *allow; /* --allow-endpoint rules; NULL, empty: every endpoint */
    uint64_t replay_timeout_ms;      /* silence that ends a replay, in milliseconds; 0: 5000 */
    uint64_t stale_after_ms;         /* without a connection, a view is partial; 0: never */
    uint64_t forget_after_ms;        /* without a connection, its blocks are forgotten; 0: never */
    uint64_t worker_blocks;          /* default of a registration's num_blocks; 0: unknown */
    uint64_t max_blocks;             /* limit of distinct blocks of a model's index; 0: kvi's own */
    /* Limit of waiting live batches of all streams; one may use a quarter. 0: 256 MiB. */
    uint64_t backlog_bytes;
    bool ignore_mm_keys;     /* see kve_reader_opts */
    bool ignore_mm_offsets;  /* see kve_reader_opts */
    bool start_held;         /* listeners connect but apply nothing until ki_registry_go */
    struct kv_wake *drained; /* signalled after each burst of events; may be NULL */
};

int ki_registry_create(const struct ki_registry_opts *opts, struct ki_registry **ret);
void ki_registry_destroy(struct ki_registry *registry); /* stops and joins all threads */
void ki_registry_go(struct ki_registry *registry);

/* -- models ------------------------------------------------------------------------------------ */

/**
 * One (model_name, tenant_id). Reference-counted and immutable, unlike its index. Adopting a peer's
 * index replaces the model; holders of the old model keep using the old one. A model is dropped
 * when its last registration has left and its index is empty.
 */
struct ki_model {
    const char *name;
    const char *tenant;
    uint32_t block_size;
    _Atomic uint32_t n_odd; /* streams that aren't active, or have a partial view */
    _Atomic uint64_t forms; /* KI_FORM (lookup.h) of each form in which its workers hash blocks */
    struct kvi_index *index;
    struct ki_chunks *chunks; /* of its workers' lower tiers */
};

/** Find a model; NULL: unknown. Release with ki_model_release. */
struct ki_model *ki_registry_model(struct ki_registry *registry, const char *name,
                                   const char *tenant);
void ki_model_release(struct ki_model *model);

/** Most tokens after a block that its hash may cover. */
#define KI_MAX_LOOKAHEAD 31

/** Note forms of a model's blocks (see ki_model_note_forms). An unknown model is ignored. */
void ki_registry_note_forms(struct ki_registry *registry, const char *name, const char *tenant,
                            uint64_t forms);

/** List all models, each with a reference. Free *ret after releasing them. Returns their number. */
long ki_registry_models(struct ki_registry *registry, struct ki_model ***ret);

/* -- registrations ----------------------------------------------------------------------------- */

struct ki_registration {
    uint64_t instance;
    uint32_t rank;
    uint32_t block_size;
    const char *endpoint;
    const char *replay_endpoint; /* NULL: gaps can't be replayed */
    const char *model;
    const char *tenant;
    uint64_t num_blocks; /* blocks for which the engine has room, in all tiers; 0: unknown */
    struct ki_habits habits;
    /*
     * Time of registration (registry_peers.c). 0: now; 1: configured, so that news of peers
     * overrides it.
     */
    uint64_t version;
    bool by_peer; /* known from a peer */
};

/**
 * Register a worker. Checks in this order: endpoint syntax, block size 0 (-EINVAL), endpoint not
 * allowed (-EACCES); the instance belongs to another model or tenant, its rank is registered, the
 * model has another block size (all -EEXIST); too many registrations (-ENOSPC), -ENOMEM. @error has
 * the text for the client. A refusal changes nothing. Returns 0 or one of those.
 */
int ki_registry_register(struct ki_registry *registry, const struct ki_registration *registration,
                         struct kv_error *error);

/**
 * Check what ki_registry_register checks of a registration alone: endpoints and block size. Returns 0,
 * -EINVAL or -EACCES with @error's text. Any thread.
 */
int ki_registry_check(const struct ki_registry *registry,
                      const struct ki_registration *registration, struct kv_error *error);

/**
 * Remove one rank (@rank not NULL) or the whole instance, from @tenant or (NULL) from any. On
 * return its blocks have left the index; for a whole instance (or its last rank) also those of
 * ranks that were never registered. The position in its stream is kept. An instance known only from
 * a peer's dump can be removed, too. Returns 0, or -ENOENT with @error's text.
 */
int ki_registry_unregister(struct ki_registry *registry, uint64_t instance, const char *model,
                           const char *tenant, const uint32_t *rank, struct kv_error *error);

/** Return true while the blocks of @instance are leaving: its next change would wait. */
bool ki_registry_is_leaving(struct ki_registry *registry, uint64_t instance);

enum ki_listener_status {
    KI_PENDING,   /* not connected yet, or held until recovery has ended */
    KI_ACTIVE,    /* following the stream */
    KI_REPLAYING, /* fetching missed batches; live ones wait */
    KI_PAUSED,
    KI_FAILED,      /* no connection; retried. last_error has the reason */
    KI_UNREGISTERED /* of a view: blocks of a peer's dump that no stream keeps up to date */
};
const char *ki_listener_status_name(enum ki_listener_status status);

/** A snapshot of one registration, for GET /workers and the metrics. Strings are owned by the list.
 */
struct ki_worker_info {
    uint64_t instance;
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
    bool connected;     /* connected to a publisher, by the latest news */
    bool stale;         /* without a connection for so long that the view is partial for it */
    uint64_t absent_ms; /* milliseconds without a connection */
    char *last_error;   /* or NULL */
    bool has_sequence;
    uint64_t last_sequence;           /* of the last batch applied */
    uint64_t last_event_ns;           /* wall clock; 0: none yet */
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
    uint64_t left_out; /* blocks and copies that limits of the index leave out at present */
    bool partial;      /* some events are known to be missing: the view may be incomplete */
    bool unnumbered;   /* messages have no sequence numbers: the view stays partial */
    /* Frames of the last message that was none of an event stream; 0: none */
    uint32_t odd_frames;
    uint64_t event_block_size; /* of events left out because it isn't the registered one; 0: none */
    struct kve_unknown_media unknown_media;
};
/** List the registrations by instance, then rank. Returns the number, or -ENOMEM. */
long ki_registry_workers(struct ki_registry *registry, struct ki_worker_info **ret);
void ki_worker_infos_free(struct ki_worker_info *infos, long n);

/** Worth of an answer's numbers of a rank. */
struct ki_view {
    struct kv_holder holder;
    enum ki_listener_status status;
    bool partial;
};
/**
 * Append a struct ki_view for each rank of @model whose stream isn't active or whose view is partial,
 * in the order of holders. Ask after the lookup: blocks leave the index after their view is partial.
 * Costs two loads when there is none.
 */
void ki_registry_views(struct ki_registry *registry, const struct ki_model *model,
                       struct kv_buf *ret);

/**
 * Pause or resume a listener, for tests. A paused one is disconnected and loses the batches
 * published meanwhile. @rank NULL: all ranks of the instance. Returns 0, -ENOENT, or -EALREADY when
 * it (all of them) is in that state.
 */
int ki_registry_pause(struct ki_registry *registry, uint64_t instance, const uint32_t *rank);
int ki_registry_resume(struct ki_registry *registry, uint64_t instance, const uint32_t *rank);

/* -- registrations shared with peers ----------------------------------------------------------- */

/** A registration that was removed within the last hour. */
struct ki_removed {
    uint64_t instance;
    uint32_t rank;
    uint64_t version;
    bool by_peer; /* a peer removed it, and no client has removed it here */
};

/** Return the identifier of this process among peers. */
uint64_t ki_registry_id(struct ki_registry *registry);
/** Return a number that changes with each change of registrations. */
uint64_t ki_registry_revision(struct ki_registry *registry);
/** List the removals; the caller frees *ret. Returns their number or -ENOMEM. */
long ki_registry_removed(struct ki_registry *registry, struct ki_removed **ret);

/**
 * Merge what a peer's registration changes in ours of the same rank, if that is older: the same one
 * gets its version, one of another model, tenant or block size is unregistered. Done for a whole
 * list before ki_registry_merge, which refuses an instance or a model while others hold the old.
 */
void ki_registry_merge_known(struct ki_registry *registry,
                             const struct ki_registration *registration);
/**
 * Merge a peer's registration of version @registration->version. No-op when a newer version is
 * known. Returns 0, an error of ki_registry_register, or -EAGAIN when its version is more than a
 * day ahead of our clock.
 */
int ki_registry_merge(struct ki_registry *registry, const struct ki_registration *registration,
                      struct kv_error *error);
/** Merge a peer's removal of this rank. */
void ki_registry_merge_removed(struct ki_registry *registry, uint64_t instance, uint32_t rank,
                               uint64_t version);

/**
 * Return the number of ranks of @model whose blocks came with a peer's dump and that no stream
 * keeps up to date.
 */
uint64_t ki_registry_unfollowed(struct ki_registry *registry, const struct ki_model *model);
/** Forget such blocks after @age_ns. Returns the number of ranks. */
uint64_t ki_registry_forget_unfollowed(struct ki_registry *registry, uint64_t age_ns);

/* -- snapshots for peers ----------------------------------------------------------------------- */

/** Position of a rank's stream; part of a dump (docs/formats.md). */
struct ki_watermark {
    struct kv_holder holder;
    uint64_t sequence;
    double timestamp;     /* the publisher's timestamp of that batch; 0: none */
    bool partial;         /* some of the stream's batches are known to be missing */
    bool adrift;          /* the process of the position may have gone: see struct ki_stream */
    bool torn;            /* the dump may lack blocks that the stream had brought by then */
    bool no_position;     /* the peer knows none: only holder and torn count */
    bool has_stream;      /* stream_rank is set */
    uint32_t stream_rank; /* registered rank whose stream brings this rank's blocks */
    bool has_end;         /* end is set */
    /*
     * The dump has nothing of batches later than this one; of those between the sequence and this
     * one, it may have a part.
     */
    uint64_t end;
    bool has_copies;   /* the dump tells all copies, as they were at end; these, too: */
    bool end_partial;  /* the view was partial */
    bool end_reports;  /* the stream had shown a report */
    bool end_suspects; /* some events may have been reports */
    bool has_doubts;   /* the dump tells the possible copies at its end; these, too: */
    bool end_beside;   /* the view was partial for other reasons than these */
    bool end_trusted;  /* events that may be reports counted as copies */
    uint32_t end_real; /* see struct ki_unsure */
    /* Changes when all of the stream's blocks are forgotten at once; not in a dump. */
    uint64_t generation;
    uint64_t turns; /* of the rank, see kvi_holder_info; for the dumper, not in a dump */
};
/**
 * Take the watermarks of all streams that feed @model, also of workers known only from a peer's
 * dump. Take them before the dump: the dump then has at least their batches, of streams whose
 * generation is the same afterwards. Sorted by holder; the caller frees *ret. Returns their number
 * or -ENOMEM.
 */
long ki_registry_watermarks(struct ki_registry *registry, const struct ki_model *model,
                            struct ki_watermark **ret);

/**
 * Pass the copies of each stream's ranks to @fn, and the possible ones to @doubt_fn, with the stream
 * held at one batch, and append the watermarks at that batch to @marks; also those of workers known
 * only from a peer's dump. For the end of a dump. A non-zero return of a function stops. Returns that
 * value, 0 or -ENOMEM.
 */
struct ki_unsure_told;
typedef int (*ki_doubt_fn)(void *arg, const struct ki_unsure_told *told);
int ki_registry_ends(struct ki_registry *registry, const struct ki_model *model,
                     struct kv_buf *marks, kvi_extra_fn fn, ki_doubt_fn doubt_fn, void *arg);

/**
 * Replace the model's (still empty) index by a complete one from a peer's dump. @marks has the
 * position at which each live stream continues: one watermark (a no_position one where the peer
 * gave none) for every holder in @index. The registry must still be held. Blocks of instances that
 * are registered under another model here are left out. Takes @index over on success. Returns
 * -EEXIST when the model has another block size, or blocks already; -ENOMEM.
 */
int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index,
                      const struct ki_watermark *watermarks, size_t n, struct kv_error *error);

#endif
