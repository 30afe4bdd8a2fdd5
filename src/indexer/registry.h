// SPDX-License-Identifier: Apache-2.0
/**
 * The registry: which models are indexed, which workers feed them, and the listeners that follow
 * the workers' event streams.
 *
 * A model here is a (model_name, tenant_id) pair with its own prefix index and block size; pairs
 * are isolated from one another. A registration is one (instance_id, dp_rank) with one ZMQ
 * endpoint, and owns one listener. All functions are thread-safe; none waits for the network.
 * Unregistering waits for the blocks to leave the index (a million a second or so), and so does the
 * instance's next change; others don't.
 */
#ifndef KV_INDEXER_REGISTRY_H
#define KV_INDEXER_REGISTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/args.h"
#include "base/error.h"
#include "indexer/habits.h"
#include "kv_event.h"
#include "kv_index.h"

struct ki_registry;

struct ki_registry_opts {
    uint32_t threads;                /* event threads; listeners are spread over them. 0: 4 */
    uint32_t max_registrations;      /* refuse more; 0: 4096 */
    const struct kv_arg_list *allow; /* --allow-endpoint rules; NULL, empty: every endpoint */
    uint64_t replay_timeout_ms; /* a replay that brings nothing for so long is given up; 0: 5000 */
    uint64_t worker_blocks;     /* num_blocks of registrations that don't say; 0: unknown */
    uint64_t max_blocks;        /* distinct blocks of a model's index; 0: no bound but kvi's */
    uint64_t backlog_bytes;     /* live batches that wait for replays, of all streams; one may have
                                   a quarter. 0: 256 MiB */
    bool ignore_mm_keys;        /* see kve_reader_opts */
    bool ignore_mm_offsets;     /* likewise */
    bool start_held;            /* listeners connect but apply nothing until ki_registry_go */
    struct kv_wake *drained;    /* signalled after each burst of events; may be NULL */
};

int ki_registry_create(const struct ki_registry_opts *opts, struct ki_registry **ret);
void ki_registry_destroy(struct ki_registry *registry); /* stops and joins everything */
void ki_registry_go(struct ki_registry *registry);

/* -- models ------------------------------------------------------------------------------------ */

/**
 * One (model_name, tenant_id). Reference-counted and immutable (the index behind it is not):
 * adopting a peer's index replaces the model, and holders of the old one finish with the old one. A
 * model goes when its last registration has left and its index is empty.
 */
struct ki_model {
    const char *name;
    const char *tenant;
    uint32_t block_size;
    _Atomic uint64_t forms; /* KI_FORM (lookup.h) of each in which its workers hash blocks */
    struct kvi_index *index;
};

/** NULL when there is none; release with ki_model_release. */
struct ki_model *ki_registry_model(struct ki_registry *registry, const char *name,
                                   const char *tenant);
void ki_model_release(struct ki_model *model);

/** Tokens after a block that its hash may cover, at most. */
#define KI_MAX_LOOKAHEAD 31

/**
 * Blocks of a model come in these forms, too (see ki_model_note_forms). An unknown model is passed
 * over.
 */
void ki_registry_note_forms(struct ki_registry *registry, const char *name, const char *tenant,
                            uint64_t forms);

/** All models, each with a reference; free(*ret) after releasing them. Returns their number. */
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
    uint64_t num_blocks; /* the engine has room for so many, in all tiers; 0: unknown */
    struct ki_habits habits;
    uint64_t version; /* when it was made (registry_peers.c). 0: now; 1: configured, so that news of
                         peers override it */
    bool by_peer;     /* a peer told it */
};

/**
 * Checked in this order: endpoint syntax, block size 0 (-EINVAL), endpoint not allowed (-EACCES),
 * the instance belongs to another model or tenant, its rank is registered, the model has another
 * block size (all -EEXIST), too many registrations (-ENOSPC), -ENOMEM. @error has the text for the
 * client. Nothing is left behind by a refusal. Returns 0 or one of those.
 */
int ki_registry_register(struct ki_registry *registry, const struct ki_registration *registration,
                         struct kv_error *error);

/**
 * Remove one rank (@rank not NULL) or the whole instance, from @tenant or (NULL) whatever its
 * tenant. Its blocks have left the index when this returns, of a whole instance (or its last rank)
 * also those of ranks that were never registered; the position in its stream is remembered. An
 * instance known only from a peer's dump can be removed too. Returns 0, or -ENOENT with @error's
 * text.
 */
int ki_registry_unregister(struct ki_registry *registry, uint64_t instance, const char *model,
                           const char *tenant, const uint32_t *rank, struct kv_error *error);

/** Whether the blocks of @instance are leaving: its next change would wait for them. */
bool ki_registry_is_leaving(struct ki_registry *registry, uint64_t instance);

enum ki_listener_status {
    KI_PENDING,   /* not connected yet, or held until recovery is over */
    KI_ACTIVE,    /* following the stream */
    KI_REPLAYING, /* fetching missed batches; live ones wait */
    KI_PAUSED,
    KI_FAILED /* can't connect, or no longer; tried again. last_error says why */
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
    struct ki_habits habits;
    char *endpoint;
    char *replay_endpoint; /* or NULL */
    char *model;
    char *tenant;
    enum ki_listener_status status;
    bool connected;   /* to a publisher, as far as is known */
    char *last_error; /* or NULL */
    bool has_sequence;
    uint64_t last_sequence;              /* of the last batch applied */
    uint64_t last_event_ns;              /* wall clock; 0: none yet */
    uint64_t batches, events, blocks;    /* applied (blocks: stored and removed) */
    uint64_t bytes;                      /* of their payloads */
    uint64_t gaps, missed_batches;       /* gaps seen; batches that no replay brought back */
    uint64_t replays, failed_replays;    /* asked for; given up */
    uint64_t replayed_batches, overruns; /* overruns: the publisher's ring no longer had them */
    uint64_t restarts;                   /* the engine started over: its blocks were forgotten */
    uint64_t resyncs;                    /* blocks forgotten because too many weren't real */
    uint64_t reopened;                   /* connections that libzmq had given up, made anew */
    uint64_t duplicates;                 /* batches dropped because they were applied before */
    uint64_t malformed;                  /* messages and payloads that can't be understood */
    uint64_t orphans;                    /* stored events whose parent this rank doesn't have */
    uint64_t rejected;                   /* stored events that the index refused (full, invalid) */
    uint64_t skipped[KVE_N_SKIPS];       /* events left out by the reader, by reason */
    bool partial; /* events are known to be missing: the view may be incomplete */
};
/** Sorted by instance, then rank. Returns the number, or -ENOMEM. */
long ki_registry_workers(struct ki_registry *registry, struct ki_worker_info **ret);
void ki_worker_infos_free(struct ki_worker_info *infos, long n);

/**
 * Test hooks: pause disconnects a listener from its stream, so that what is published meanwhile is
 * lost to it; resume connects again. @rank NULL: all ranks of the instance. Returns 0, -ENOENT, or
 * -EALREADY when it (all of them) is in that state.
 */
int ki_registry_pause(struct ki_registry *registry, uint64_t instance, const uint32_t *rank);
int ki_registry_resume(struct ki_registry *registry, uint64_t instance, const uint32_t *rank);

/* -- registrations shared with peers ----------------------------------------------------------- */

/** One that was unregistered within the last hour. */
struct ki_removed {
    uint64_t instance;
    uint32_t rank;
    uint64_t version;
    bool by_peer; /* a peer told it, and no client has asked for it here */
};

/** Return the identifier of this process among peers. */
uint64_t ki_registry_id(struct ki_registry *registry);
/** Another number after each change of registrations. */
uint64_t ki_registry_revision(struct ki_registry *registry);
/** free(*ret). Returns their number or -ENOMEM. */
long ki_registry_removed(struct ki_registry *registry, struct ki_removed **ret);

/** A peer has this registration, of @registration->version. No-op when we know newer. Returns 0 or
 * what ki_registry_register returns. */
int ki_registry_merge(struct ki_registry *registry, const struct ki_registration *registration,
                      struct kv_error *error);
/** A peer has unregistered this rank. */
void ki_registry_merge_removed(struct ki_registry *registry, uint64_t instance, uint32_t rank,
                               uint64_t version);

/** Ranks of @model whose blocks came with a peer's dump and that no stream keeps true. */
uint64_t ki_registry_unfollowed(struct ki_registry *registry, const struct ki_model *model);
/** Forget such blocks after @age_ns. Returns the number of ranks. */
uint64_t ki_registry_forget_unfollowed(struct ki_registry *registry, uint64_t age_ns);

/* -- snapshots for peers ----------------------------------------------------------------------- */

/** How far a rank's stream has been applied; travels with a dump (docs/formats.md). */
struct ki_watermark {
    struct kv_holder holder;
    uint64_t sequence;
    double timestamp;     /* of that batch, as its publisher stamped it; 0: it didn't */
    bool partial;         /* what the stream brought is known to be incomplete */
    bool torn;            /* the dump may lack blocks that the stream had brought by then */
    bool no_position;     /* the peer knows none: only holder and torn mean something */
    bool has_stream;      /* the next is told */
    uint32_t stream_rank; /* registered rank whose stream brings this rank's blocks */
    bool has_end;         /* the next is told */
    uint64_t end;         /* the dump has nothing of later batches; what it has of those up to this
                             one, after the sequence, may be a part */
    uint64_t generation;  /* another one after all of the stream's blocks were forgotten at once;
                             not in a dump */
    uint64_t turns;       /* dumper's: of the rank, see kvi_holder_info; not in a dump */
};
/**
 * Watermarks of all streams that feed @model, also of workers known only from a peer's dump. Take
 * them before the dump: then the dump has at least what they say, of those whose generation is the
 * same afterwards. Sorted by holder. free(*ret). Returns their number or -ENOMEM.
 */
long ki_registry_watermarks(struct ki_registry *registry, const struct ki_model *model,
                            struct ki_watermark **ret);

/**
 * Put a complete index, built from a peer's dump, in place of the model's (still empty) one, with
 * the positions at which live streams go on: one watermark (a no_position one where the peer told
 * none) for every holder in @index. The registry must still be held. Blocks of instances that are
 * registered under another model here are left out. Takes @index over on success. -EEXIST: the
 * model has another block size, or blocks already; -ENOMEM.
 */
int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index,
                      const struct ki_watermark *watermarks, size_t n, struct kv_error *error);

#endif
