// SPDX-License-Identifier: Apache-2.0
/**
 * The object tier's internals, shared by its files.
 *
 *   submit ──> queue[onboard] ──┐                     ┌──> store (kvs_…)
 *              queue[offload] ──┴──> workers ── call ─┤
 *                    │                  │             └──> hangs: the worker is lost, and
 *                    │                  │                  another one started
 *                    └─ late, cancelled ┴──> ended ──> watcher ──> done
 *
 * A batch is in a queue, with a worker, or in the list of ended ones. A worker touches the caller's
 * memory only between calls into the store (in_call false), while no other thread may end its
 * batch. During a call the worker has only copies, and the watcher, a cancellation or close may end
 * the batch; the worker learns that when the call returns.
 *
 * One lock guards everything except the workers' own buffers. It is held during no call into a
 * store and no callback.
 */
#ifndef KVBM_TIER_OBJECT_IMPL_H
#define KVBM_TIER_OBJECT_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/core/breaker.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "kv_store.h"
#include "tier/object/object.h"

/* -- format (value.c) -------------------------------------------------------------------- */

enum { KVBM_OBJECT_HEADER = 128, KVBM_OBJECT_CHUNK_KEY = 16 };

struct kvbm_object_format {
    uint8_t fingerprint[16]; /* XXH3-128 of the fingerprint */
    uint32_t key_len;
    uint64_t block_bytes;
};

void kvbm_object_format_init(struct kvbm_object_format *ret, const char *fingerprint,
                             uint32_t key_len, uint64_t block_bytes);
/** Compute the key in the store of block (@group, @key). */
void kvbm_object_chunk_key(const struct kvbm_object_format *f, uint32_t group, const void *key,
                           uint8_t ret[KVBM_OBJECT_CHUNK_KEY]);
size_t kvbm_object_value_bytes(const struct kvbm_object_format *f);
/** Write the value for a block: kvbm_object_value_bytes bytes. */
void kvbm_object_seal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                      const void *block, uint8_t *ret);
/** Return the block in a value, or NULL unless the value is complete and this block's. */
const void *kvbm_object_unseal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                               const void *value, size_t len);
/** Whether a value is that of the block whose key in the store is @chunk_key, and is whole. */
bool kvbm_object_fits(const struct kvbm_object_format *f, const uint8_t *chunk_key,
                      const void *value, size_t len);

/** A value arriving in pieces, verified while its block is copied to its place. */
struct kvbm_object_opening {
    const struct kvbm_object_format *format;
    uint8_t want[KVBM_OBJECT_HEADER]; /* the expected header, without the checksum */
    uint8_t header[KVBM_OBJECT_HEADER];
    uint8_t *to;
    uint64_t got;
    bool wrong; /* the value is not this block's, whatever follows */
    XXH3_state_t state;
};
/** Begin a value, or begin it again. @to: receives block_bytes; NULL: verify only. */
void kvbm_object_open_value(struct kvbm_object_opening *ret, const struct kvbm_object_format *f,
                            uint32_t group, const void *key, void *to);
/** Take the next piece. False: `wrong`. Copies nothing until the header has proved right. */
bool kvbm_object_open_piece(struct kvbm_object_opening *value, const void *piece, size_t len);
/** Return true when all pieces were the value of this block; sets `wrong` otherwise. */
bool kvbm_object_value_whole(struct kvbm_object_opening *value);

/* -- the tier ---------------------------------------------------------------------------------- */

/* Results of a put before its publication; the caller gets 0. */
enum { KVBM_OBJECT_STORED = 1, KVBM_OBJECT_ALREADY = 2 };

#define KVBM_OBJECT_MAX_BLOCK (UINT64_C(1) << 32)
#define KVBM_OBJECT_FINGERPRINT_MAX 4096 /* upper limit for the fingerprint of a manifest */

enum {
    KVBM_OBJECT_SLICE = 256,            /* blocks of one call */
    KVBM_OBJECT_SLICE_BYTES = 16 << 20, /* bytes of one call, unless one block is larger */
    KVBM_OBJECT_NEAR_BYTES =
        /* of local files: summed, copied, read and written while in the CPU's cache */
    1 << 20,
    KVBM_OBJECT_PIECE = 128 << 10, /* of a file's value: stays in the second-level cache */
    KVBM_OBJECT_NOTES = 1024,      /* hits, and bad values, of a batch that are marked or deleted */
    KVBM_OBJECT_TOUCHED = 1 << 13, /* hits remembered, so as not to mark them as used again soon */
    KVBM_OBJECT_TOUCH_S = 3600,
    KVBM_OBJECT_DAMAGED = 1 << 10, /* damaged chunks remembered, so as to count each once */
};

/* One opened store. Its last user closes it. */
struct kvbm_object_handle {
    struct kvs_store *store;
    const kv_store_ext *ext; /* NULL: no extensions */
    uint32_t refs;           /* under the tier's lock */
};

struct kvbm_object_list {
    struct kvbm_object_batch *head, *tail;
    uint32_t n;
};

/* Keys in the store of blocks, for calls that follow those that read the blocks. */
struct kvbm_object_notes {
    uint32_t n;
    uint8_t keys[KVBM_OBJECT_NOTES][KVBM_OBJECT_CHUNK_KEY];
};

struct kvbm_object_worker {
    struct kvbm_object *object;
    struct kvbm_object_worker *next;
    pthread_t thread;

    /* under the tier's lock */
    struct kvbm_object_batch *batch; /* NULL: none, or ended while the worker was in a call */
    bool opener;                     /* must open the store before anything else */
    bool opens;                      /* is opening the store now */
    bool in_call, lost, gone, detached, offloading, cancelled;
    uint64_t publication;   /* number of the publication that it carries out */
    bool parted;            /* its batch was ended during a call, and the worker is not lost */
    bool called;            /* the store was asked for this batch */
    uint64_t begun;         /* when the call began */
    uint64_t until;         /* when the call is late */
    bool told;              /* lost: the breaker knows of the call */
    _Atomic bool abandoned; /* the rest of the call is useless: relaxed, a hint */

    /* used by the worker only */
    struct kvbm_object_handle *handle;
    int opened;      /* result of the last kvs_open */
    int trouble;     /* first result of the batch that counts for the breaker */
    bool put_failed; /* a put of the batch did: no other batch's publication counts for it */
    uint8_t *value;  /* values to put; pieces being got */
    size_t value_bytes;
    void *kept; /* the value at the highest address of those got last: see drop in calls.c */
    uint8_t keys[KVBM_OBJECT_SLICE][KVBM_OBJECT_CHUNK_KEY];
    void *data[KVBM_OBJECT_SLICE];
    size_t len[KVBM_OBJECT_SLICE];
    int rc[KVBM_OBJECT_SLICE];
    uint8_t present[KVBM_OBJECT_SLICE];
    struct kvbm_object_notes hits, bad;
    uint32_t n_deleted; /* number of bad values deleted */
    uint64_t *putting;  /* names of the batch's chunks that were put: see unpublished.c */
    size_t n_putting;
    bool fresh[KVBM_OBJECT_SLICE]; /* of this slice: the tier didn't know the chunk */
};

/* Chunks that were put and may not be published: a hash table, see unpublished.c. */
struct kvbm_object_unpublished {
    struct kvbm_object_slot *slots;
    size_t n, capacity; /* slots in use; a power of two, or 0 */
};

struct kvbm_object {
    pthread_mutex_t lock;
    pthread_cond_t work;  /* wakes workers */
    pthread_cond_t watch; /* wakes the watcher */
    pthread_cond_t idle;  /* wakes open and close */
    pthread_cond_t turn;  /* wakes workers that wait to publish */
    pthread_t watcher;
    bool watching, stopping;
    pid_t pid;

    struct kvbm_object_format format;
    char *uri, *fingerprint, *label;
    char manifest[40];
    uint32_t n_threads, max_queue;
    uint64_t timeout_ns;
    bool folder;                /* a file store, whose deletions a flush makes durable */
    uint32_t slice, near_slice; /* blocks of one call; of a call that moves bytes on this machine */

    struct kvbm_object_list queue[2], ended; /* queue: by enum kvbm_flow */
    struct kvbm_object_worker *workers;
    uint32_t n_workers, n_able, n_offloading;
    uint64_t watch_ns; /* time of the watcher's next check */
    struct kv_breaker breaker;
    struct kvbm_object_worker *publisher; /* worker whose turn it is to publish; NULL: none */
    uint64_t turn_until;                  /* end of its turn: another may publish beside it */
    /* number begun; number of the latest that succeeded */
    uint64_t publications, published;
    const struct kvbm_object_handle *published_by; /* handle whose puts that one included */
    struct kvbm_object_unpublished unpublished;
    struct kvbm_object_handle *handle;
    bool opening, opening_hangs, closing, said_down;
    int open_rc;   /* result of the last open; -EINPROGRESS before */
    uint32_t refs; /* threads, and the owner */
    struct kvbm_object_stats stats;
    struct {
        uint64_t key;
        uint64_t at_s;
    } touched[KVBM_OBJECT_TOUCHED];
    uint64_t damaged[KVBM_OBJECT_DAMAGED]; /* by their keys' first bytes; 0: none */
};

/* batch.c; all with the lock held */

/** Set and count the statuses that the caller will see: blocks without a result get @rc. */
void kvbm_object_settle(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc);
/** Hand an ended batch to the watcher, which calls done. */
void kvbm_object_ended(struct kvbm_object *o, struct kvbm_object_batch *batch);
/** Settle and end a batch that no worker had. */
void kvbm_object_end(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc);
/**
 * Report a result to the breaker. When that opens, waiting batches fail. @rc 0: the store works.
 */
void kvbm_object_tell(struct kvbm_object *o, bool probe, int rc);
/** Let the next call open a new handle, unless @h isn't that in use. The last call that uses @h
 * closes it. */
void kvbm_object_retire(struct kvbm_object *o, const struct kvbm_object_handle *h);
/** Report that the probe never reached the store: another one may go. */
void kvbm_object_release(struct kvbm_object *o);
struct kvbm_object_batch *kvbm_object_pop(struct kvbm_object_list *list);
bool kvbm_object_unqueue(struct kvbm_object_list *list, const struct kvbm_object_batch *batch);
/** End all queued batches with @rc, with or without the breaker's probe. */
void kvbm_object_end_queued(struct kvbm_object *o, int rc, bool probes_too);

/* object.c */

/** Drop a reference, and release the lock, which the caller holds. */
void kvbm_object_unref_unlock(struct kvbm_object *o);

/* worker.c */

int kvbm_object_worker_start(struct kvbm_object *o, bool opener); /* with the lock held */
void kvbm_object_worker_free(struct kvbm_object_worker *w);
/** Return for how long the store must be silent until that counts as a failure. */
uint64_t kvbm_object_patience_ns(const struct kvbm_object *o);
/** Give up a worker whose call hangs or is useless: its batch ends with @rc. A late call in which
 * the store has been silent counts for the breaker. With the lock held. */
void kvbm_object_worker_lose(struct kvbm_object_worker *w, int rc);
/**
 * End a worker's batch with @rc while it is in a call; the worker serves other batches when the
 * call returns. With the lock held.
 */
void kvbm_object_worker_part(struct kvbm_object_worker *w, int rc);
/**
 * Call before and after a call into the store. enter returns 0, or the status that the batch ends
 * with; leave returns true while someone waits for the batch. Without a batch, @until is when the
 * call counts as hanging.
 */
int kvbm_object_enter(struct kvbm_object_worker *w);
bool kvbm_object_leave(struct kvbm_object_worker *w);

/* calls.c */

/**
 * Carry out one batch, by a worker that has a handle. Returns 0, or the status for the rest of the
 * blocks.
 */
int kvbm_object_run(struct kvbm_object_worker *w, struct kvbm_object_batch *batch);
/** Finish a batch after its done: mark the chunks that were read as used. */
void kvbm_object_after(struct kvbm_object_worker *w);

/* publish.c */

/**
 * Make durable the chunks that the worker has put for its batch. Returns 0, or the status that the
 * batch ends with.
 */
int kvbm_object_publish(struct kvbm_object_worker *w, uint64_t until_ns);

/** End the worker's publication, if it has one: let the next worker publish, and when @published,
 * tell the batches that it covers. With the lock held. */
void kvbm_object_end_turn(struct kvbm_object_worker *w, bool published);

/* unpublished.c */

/** Note that the worker puts the chunks of its first @n keys. Returns 0 or -ENOMEM. */
int kvbm_object_put_begins(struct kvbm_object_worker *w, uint32_t n);
/** Note that the call of the store is over, and by the worker's results which of them the store had
 * before, and which it wrote. */
void kvbm_object_put_found(struct kvbm_object_worker *w, uint32_t n);
/** Note that the worker's puts have ended, and whether a publication has included them. */
void kvbm_object_put_ends(struct kvbm_object_worker *w, bool published);
/** Note that the chunks of the worker's first @n keys were deleted. */
void kvbm_object_deleted(struct kvbm_object_worker *w, uint32_t n);
/** True when the chunk was put, and no publication has included it. With the lock. */
bool kvbm_object_is_unpublished(const struct kvbm_object *o, const uint8_t *key);

/* watch.c */

void *kvbm_object_watch(void *arg);

#endif
