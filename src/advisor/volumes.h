// SPDX-License-Identifier: Apache-2.0
/**
 * The members of a tiered store, as the advisor uses them: opened one by one, locked against other
 * advisors, listed into the index.
 *
 * Of the advisors that run for members, each member has one at a time: it holds a lock (flock) on a file
 * of the member itself, .kvasir/advisor.lock, so that neither a copy of the configuration nor a new file
 * in its place lets a second one in. Members that aren't folders are locked by a file in a folder of this
 * machine, named by the URI.
 *
 * Threads: open and close by the owner; all else from any thread. The world's lock is taken inside, for
 * some hundred blobs at a time.
 */
#ifndef KV_ADVISOR_VOLUMES_H
#define KV_ADVISOR_VOLUMES_H

#include <pthread.h>
#include <stdatomic.h>

#include "advisor/feed.h"
#include "advisor/index/index.h"
#include "base/core/error.h"
#include "kv_store.h"
#include "tiered/bound.h"
#include "tiered/catalog.h"
#include "tiered/config.h"
#include "tiered/move.h"

/** The index and its feed, which all threads share. */
struct kva_world {
    pthread_mutex_t lock; /* guards what follows */
    struct kva_index *index;
    struct kva_feed *feed; /* NULL: no events */
};

struct kva_volumes_opts {
    const char *path;        /* of the tiered store's configuration */
    const char *lock_folder; /* for members that aren't folders; NULL: these aren't locked */
    bool look_only;          /* take no locks, and make no folder that is missing */
    bool lock_later;         /* take locks by kva_volumes_lock: another lock comes first */
};

/** A pack's chunk that no manifest names: it is being written, or its writer has died. */
struct kva_stray {
    uint8_t key[TRD_PACK_KEY];
    uint64_t since_ns; /* kv_now_ns of the first scan that met it */
};
enum { KVA_STRAYS = 64 }; /* noted of a member; more are met when these are gone */

/** A member that isn't open. */
enum kva_absent {
    KVA_UNTRIED, /* also: open */
    KVA_DOWN,    /* tried again */
    KVA_REFUSED  /* it is one store with another member: never opened */
};

struct kva_volumes {
    struct trd_config config;
    struct kva_volumes_opts opts;
    _Atomic(struct kvs_store *) stores[KVA_MEMBERS]; /* NULL: can't be opened; set once */
    struct trd_bound *bounds[KVA_MEMBERS];           /* of members with a deadline */
    enum kva_absent absent[KVA_MEMBERS];             /* of the thread that scans */
    atomic_bool usable[KVA_MEMBERS]; /* it is open, and locked where it may be written to */
    bool said_locked[KVA_MEMBERS];   /* the log has that another advisor has it */
    int locks[KVA_MEMBERS];          /* descriptors; -1: none */
    _Atomic uint64_t scans;          /* whole ones so far */
    _Atomic uint64_t unlisted;       /* members that the last scan couldn't list */
    struct trd_catalog packs[KVA_MEMBERS];
    struct {
        struct kva_stray of[KVA_STRAYS];
        size_t n;
    } strays[KVA_MEMBERS];           /* guarded by the world's lock */
    atomic_bool listed[KVA_MEMBERS]; /* once at least: what it has is known */
    _Atomic uint64_t
        foreign[KVA_MEMBERS]; /* blobs with keys of other lengths, as of the last scan */
};

/**
 * Read the configuration, open the members, and lock them. A member that can't be opened joins later
 * (kva_volumes_join), with a log line. Strings of @opts are borrowed until close. Returns 0; -EBUSY: another advisor has a member; -EINVAL: two are one store; an error of reading the
 * configuration; -EHOSTDOWN: no member can be opened; with @error.
 */
int kva_volumes_open(const struct kva_volumes_opts *opts, struct kva_volumes *ret,
                     struct kv_error *error);
void kva_volumes_close(struct kva_volumes *volumes);

/**
 * Open the members that couldn't be opened before, unless another advisor has them. Sets *@ret_missing to the
 * number of those still to be tried. Returns the number that joined. By the thread that scans.
 */
int kva_volumes_join(struct kva_volumes *volumes, size_t *ret_missing);

/**
 * With lock_later: lock the open members that aren't locked yet. Those that another advisor of this machine has
 * aren't usable until a later call. unlock gives all locks back. By the thread that moves.
 */
void kva_volumes_lock(struct kva_volumes *volumes);
void kva_volumes_unlock(struct kva_volumes *volumes);

/** Return a member as trd_move_copy takes it. It is open. */
struct trd_place kva_volumes_place(struct kva_volumes *volumes, unsigned member);
/** Ask an open member for a blob, by itself or in a pack. Returns KVS_THERE, KVS_MISSING or KVS_UNKNOWN. */
uint8_t kva_volumes_look(struct kva_volumes *volumes, unsigned member, const uint8_t *key);

/** Return a number of the members: of their URIs. */
uint64_t kva_volumes_id(const struct kva_volumes *volumes);

/** Fill the members of an index's options: each may have @share percent of its capacity. Members that are down count:
 * blobs wait for them where they are. */
void kva_volumes_index_opts(const struct kva_volumes *volumes, unsigned share,
                            struct kva_index_opts *ret);

/** List all members into the index; *@stop ends it early. Returns the number of members listed; -ENOMEM;
 * -ECANCELED. One call at a time. */
int kva_volumes_scan(struct kva_volumes *volumes, struct kva_world *world, atomic_bool *stop);

#endif
