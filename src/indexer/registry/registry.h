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
#ifndef KV_INDEXER_REGISTRY_REGISTRY_H
#define KV_INDEXER_REGISTRY_REGISTRY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/args/args.h"
#include "base/args/instance.h"
#include "base/core/buf.h"
#include "base/core/error.h"
#include "event/wire/media.h"
#include "index/tree/facts.h"
#include "indexer/model/model.h"
#include "indexer/stream/snapshot.h"
#include "indexer/stream/worker.h"
#include "kv_event.h"

struct ki_listener;
struct ki_names;
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
/** Note that a peer's dump is asked for: connections that are made from now on may be younger. */
void ki_registry_await_dump(struct ki_registry *registry);

/* -- models ------------------------------------------------------------------------------------ */

/** Find a model; NULL: unknown. Release with ki_model_release. */
struct ki_model *ki_registry_model(struct ki_registry *registry, const char *name,
                                   const char *tenant);

/** Note forms of a model's blocks (see ki_model_note_forms). An unknown model is ignored. */
void ki_registry_note_forms(struct ki_registry *registry, const char *name, const char *tenant,
                            uint64_t forms);

/** List all models, each with a reference. Free *ret after releasing them. Returns their number. */
long ki_registry_models(struct ki_registry *registry, struct ki_model ***ret);

/* -- registrations ----------------------------------------------------------------------------- */

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

/**
 * Return the listener of a registered rank, with a reference for the caller, so that it can be fed; NULL:
 * there is none.
 */
struct ki_listener *ki_registry_listener(struct ki_registry *registry, uint64_t instance,
                                         uint32_t rank);

/** Return true while the blocks of @instance are leaving: its next change would wait. */
bool ki_registry_is_leaving(struct ki_registry *registry, uint64_t instance);

/** List the registrations by instance, then rank. Returns the number, or -ENOMEM. */
long ki_registry_workers(struct ki_registry *registry, struct ki_worker_info **ret);
void ki_worker_infos_free(struct ki_worker_info *infos, long n);

/** Worth of an answer's numbers of a rank. */
struct ki_view {
    struct kv_holder holder;
    enum ki_listener_status status;
    ki_reasons reasons; /* 0: whole */
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

/**
 * Withdraw a rank, or end that: answers leave its blocks out while its stream goes on. Returns 0 or
 * -ENOENT.
 */
int ki_registry_withdraw(struct ki_registry *registry, uint64_t instance, uint32_t rank,
                         bool withdrawn);

/* -- names of instances ------------------------------------------------------------------------ */

#define KI_INSTANCE_TEXT (KV_INSTANCE_NAME_MAX + 1)

/**
 * Note the name by which a client calls an instance (NULL: a number), so that answers call it so.
 * Registrations bring theirs along. Returns 0; -EEXIST when another instance's name has the number,
 * or -ENOMEM, with @error.
 */
int ki_registry_name_instance(struct ki_registry *registry, uint64_t instance, const char *name,
                              struct kv_error *error);
/** Note a name from a peer's dump, if the instance has blocks or a registration here. */
void ki_registry_adopt_name(struct ki_registry *registry, uint64_t instance, const char *name);
/** Return the table of names, to read from. */
struct ki_names *ki_registry_names(struct ki_registry *registry);
/** Copy the name of an instance, or its number without one, into @text. Returns @text. */
const char *ki_registry_instance_text(struct ki_registry *registry, uint64_t instance,
                                      char text[KI_INSTANCE_TEXT]);

/** Name of an instance in a list. */
struct ki_instance_name {
    uint64_t instance;
    char *name;
};
/**
 * List the names of the instances that feed @model, or that have blocks of a peer's dump in it.
 * Returns their number or -ENOMEM.
 */
long ki_registry_names_of(struct ki_registry *registry, const struct ki_model *model,
                          struct ki_instance_name **ret);
void ki_instance_names_free(struct ki_instance_name *names, long n);

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

/**
 * Replace the model's (still empty) index by a complete one from a peer's dump. @marks has one mark for
 * every holder in @index, and @snapshots (sorted by ki_snapshot_compare) the streams that bring them:
 * those go on behind their snapshots. The registry must still be held. Blocks of instances that are
 * registered under another model here are left out. Takes @index over on success, and snapshots of
 * workers that may register: they become NULL. Returns -EEXIST when the model has another block size,
 * or blocks already; -ENOMEM.
 */
int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index, const struct ki_mark *marks,
                      size_t n, struct ki_snapshot **snapshots, size_t n_snapshots,
                      struct kv_error *error);

#endif
