// SPDX-License-Identifier: Apache-2.0
/**
 * The registry's two tables, both sorted arrays: models by (name, tenant), listeners by (instance,
 * rank). They are small (thousands), searched by bisection, and already in display order.
 *
 * Two locks. `admin` is held through a whole change (register, unregister, adopt), but released
 * while a worker's blocks leave the index, which may take seconds: the instance is among `leaving`
 * then, and its next change waits. `lock` is held only to look an item up, insert or remove it, so
 * a query never waits for a change. The tables are written under both locks, so either is enough
 * for reading. Order: admin, a listener's turn, lock, a
 * listener's lock, a pump's. The lock of the names comes last.
 */
#ifndef KV_INDEXER_REGISTRY_TABLES_H
#define KV_INDEXER_REGISTRY_TABLES_H

#include "indexer/model/model.h"
#include "indexer/registry/names.h"
#include "indexer/registry/positions.h"
#include "indexer/registry/registry.h"
#include "indexer/registry/removals.h"
#include "indexer/stream/listener.h"
#include "indexer/stream/pump.h"

/** An instance whose blocks are leaving the index. On the stack of the thread that removes them. */
struct ki_leaving {
    struct ki_leaving *next;
    uint64_t instance;
};

struct ki_registry {
    struct ki_listener_env env;
    const struct kv_arg_list *allow;
    uint32_t max_registrations;
    uint64_t max_blocks;
    struct ki_pump **pumps;
    uint32_t n_pumps;

    pthread_mutex_t admin, lock;
    pthread_cond_t left;        /* used with admin: an instance has left `leaving` */
    struct ki_leaving *leaving; /* under admin */
    struct ki_model **models;
    size_t n_models, models_capacity;
    struct ki_listener **listeners;
    size_t n_listeners, listeners_capacity;
    struct ki_positions positions; /* under admin alone */
    pthread_mutex_t copies;        /* held by the dump that holds streams; taken before admin */
    struct ki_names names;         /* written under admin; read under a lock of its own */
    /*
     * Registrations shared with peers (registry_peers.c); under admin alone, except for revision.
     */
    struct ki_removals removals;
    uint64_t id, last_version;
    _Atomic uint64_t revision; /* relaxed: a peer that reads an old one asks again */
};

/* -- under either lock ------------------------------------------------------------------------- */

/** Return the first model not before (name, tenant); *ret is the model itself, or NULL. */
size_t ki_model_bound(const struct ki_registry *r, const char *name, const char *tenant);
struct ki_model *ki_model_find(const struct ki_registry *r, const char *name, const char *tenant);

/** Return the first listener not before (instance, rank); *ret is the listener itself, or NULL. */
size_t ki_listener_bound(const struct ki_registry *r, uint64_t instance, uint32_t rank);
struct ki_listener *ki_listener_find(const struct ki_registry *r, uint64_t instance, uint32_t rank);
/** Find the listeners of an instance, which are neighbours: [*ret_first, returned). */
size_t ki_instance_range(const struct ki_registry *r, uint64_t instance, size_t *ret_first);

/* -- under admin; each takes lock -------------------------------------------------------------- */

/**
 * Make room for one more model and listener, so that inserting can't fail. Returns 0 or -ENOMEM.
 */
int ki_tables_reserve(struct ki_registry *r);

/** Insert or remove an item with its reference. */
void ki_tables_put_model(struct ki_registry *r, struct ki_model *model);
void ki_tables_replace_model(struct ki_registry *r, struct ki_model *model); /* of the same name */
void ki_tables_take_model(struct ki_registry *r, const struct ki_model *model);
void ki_tables_put_listener(struct ki_registry *r, struct ki_listener *l);
struct ki_listener *ki_tables_take_listener(struct ki_registry *r, size_t at);

/** Lock admin for a change of @instance, after earlier changes of it have ended. */
void ki_registry_lock_for(struct ki_registry *r, uint64_t instance);
/** ki_registry_is_leaving under admin. */
bool ki_registry_is_leaving_locked(const struct ki_registry *r, uint64_t instance);
int ki_registry_register_locked(struct ki_registry *r, const struct ki_registration *reg,
                                struct kv_error *error);
/**
 * Unregister under admin (ki_registry_lock_for). Releases admin while the blocks leave, and takes
 * it again.
 */
int ki_registry_unregister_locked(struct ki_registry *r, uint64_t instance, const char *name,
                                  const char *tenant, const uint32_t *rank, struct kv_error *error);
/** Drop @model when it has no listener and no blocks. */
void ki_registry_drop_if_empty(struct ki_registry *r, struct ki_model *model);
uint64_t ki_registry_next_version(struct ki_registry *r);
/** Change the revision, so that peers fetch all registrations again. */
void ki_registry_changed(struct ki_registry *r);
/**
 * Note the name of an instance; NULL: it has none. Returns 0; -EEXIST when another name that is
 * needed has the number, or -ENOMEM, with @error.
 */
int ki_registry_note_name(struct ki_registry *r, uint64_t instance, const char *name,
                          struct kv_error *error);
void ki_registry_note_removed(struct ki_registry *r, uint64_t instance, uint32_t rank,
                              uint64_t version, bool by_peer);
/**
 * Return true when a peer's news registered just this before the client. The registration becomes
 * the client's.
 */
bool ki_registry_is_peers(struct ki_registry *r, const struct ki_registration *reg);

/* -- under none -------------------------------------------------------------------------------- */

/**
 * Copy the listeners with references, so that no thread waits for `lock` while a batch is applied.
 * Returns their number or -ENOMEM.
 */
long ki_tables_snapshot(struct ki_registry *r, struct ki_listener ***ret);
void ki_tables_snapshot_free(struct ki_listener **listeners, long n);

/** Compare marks by holder, for qsort and bsearch. */
int ki_holder_compare(const struct kv_holder *x, const struct kv_holder *y);
int ki_marks_compare(const void *a, const void *b);

/** Tell the siblings of a listener that blocks of its ranks have left: ki_listener_env.lost. */
void ki_registry_note_loss(void *arg, const struct ki_listener *l, const struct ki_loss *loss);

/** Set the names in @infos. Returns false when out of memory. */
bool ki_registry_name_infos(struct ki_registry *r, struct ki_worker_info *infos, long n);

/** Wake every event thread to check its listeners again. */
void ki_registry_wake(struct ki_registry *r);

#endif
