// SPDX-License-Identifier: Apache-2.0
/**
 * The object tier inside: what its files share.
 *
 *   submit ──> queue[onboard] ──┐                     ┌──> store (kvs_…)
 *              queue[offload] ──┴──> workers ── call ─┤
 *                    │                  │             └──> hangs: the worker is lost, another
 *                                       started
 *                    └─ late, cancelled ┴──> ended ──> watcher ──> done
 *
 * A batch is in a queue, with a worker, or among the ended. A worker touches the caller's memory
 * only between calls into the store (in_call false), when nobody else may end its batch; in a call
 * it has only copies, and the watcher, a cancellation or close may end the batch under it, which it
 * learns when the call returns.
 *
 * One lock for all of it but the workers' own buffers; it is held for no call into a store and no
 * callback.
 */
#ifndef KVBM_TIER_OBJECT_IMPL_H
#define KVBM_TIER_OBJECT_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/xxh.h"
#include "kv_store.h"
#include "tier/object/object.h"

/* -- format (value.c) -------------------------------------------------------------------- */

enum { KVBM_OBJECT_HEADER = 128, KVBM_OBJECT_CHUNK_KEY = 16 };

struct kvbm_object_format {
    uint8_t fingerprint[16]; /* XXH3-128 of it */
    uint32_t key_len;
    uint64_t block_bytes;
};

void kvbm_object_format_init(struct kvbm_object_format *ret, const char *fingerprint,
                             uint32_t key_len, uint64_t block_bytes);
/** The key in the store of block (@group, @key). */
void kvbm_object_chunk_key(const struct kvbm_object_format *f, uint32_t group, const void *key,
                           uint8_t ret[KVBM_OBJECT_CHUNK_KEY]);
size_t kvbm_object_value_bytes(const struct kvbm_object_format *f);
/** The value for a block, kvbm_object_value_bytes of them. */
void kvbm_object_seal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                      const void *block, uint8_t *ret);
/** The block in a value, or NULL when that isn't this block's, whole. */
const void *kvbm_object_unseal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                               const void *value, size_t len);

/** A value that comes in pieces, and is verified on its way to where its block belongs. */
struct kvbm_object_opening {
    const struct kvbm_object_format *format;
    uint8_t want[KVBM_OBJECT_HEADER]; /* but for the checksum */
    uint8_t header[KVBM_OBJECT_HEADER];
    uint8_t *to;
    uint64_t got;
    bool wrong; /* it can't be this block's value, whatever follows */
    XXH3_state_t state;
};
/** Begin, or begin anew. @to: block_bytes that pieces are copied to; NULL: nowhere. */
void kvbm_object_open_value(struct kvbm_object_opening *ret, const struct kvbm_object_format *f,
                            uint32_t group, const void *key, void *to);
/** Take the next piece. False: `wrong`. Nothing is copied before the header is known to be right. */
bool kvbm_object_open_piece(struct kvbm_object_opening *value, const void *piece, size_t len);
/** Whether all pieces were the value of this block; sets `wrong`. */
bool kvbm_object_value_whole(struct kvbm_object_opening *value);

/* -- breaker (breaker.c) ------------------------------------------------------------------ */

struct kvbm_breaker {
    uint32_t max_failures;
    uint64_t first_wait_ns, max_wait_ns;
    uint32_t failures; /* in a row */
    bool open, probing;
    uint64_t wait_ns, next_ns; /* while open: when the next one is let through */
    uint64_t opened;
};

enum kvbm_gate { KVBM_GATE_REFUSE, KVBM_GATE_PASS, KVBM_GATE_PROBE };
/** May a call be made? A probe must end with tell or release. */
enum kvbm_gate kvbm_breaker_ask(struct kvbm_breaker *b, uint64_t now_ns);
/** How a call ended. Returns whether the breaker opened (again) by it. */
bool kvbm_breaker_tell(struct kvbm_breaker *b, bool ok, bool probe, uint64_t now_ns);
/** The probe never reached the store: the next one may be let through. */
void kvbm_breaker_release(struct kvbm_breaker *b);
/**
 * Whether this result says that the store doesn't work, rather than something of what was asked.
 */
bool kvbm_breaker_counts(int rc);

/* -- the tier ---------------------------------------------------------------------------------- */

/* Results of a put before its publication; the caller sees 0. */
enum { KVBM_OBJECT_STORED = 1, KVBM_OBJECT_ALREADY = 2 };

#define KVBM_OBJECT_MAX_BLOCK (UINT64_C(1) << 32)
#define KVBM_OBJECT_FINGERPRINT_MAX 4096 /* of a manifest's */

enum {
    KVBM_OBJECT_SLICE = 256,            /* blocks of one call */
    KVBM_OBJECT_SLICE_BYTES = 16 << 20, /* likewise, unless one block is more */
    KVBM_OBJECT_NEAR_BYTES =
        1 << 20,                   /* of files: summed, copied, read and written while in cache */
    KVBM_OBJECT_PIECE = 128 << 10, /* of a file's value: stays in the second-level cache */
    KVBM_OBJECT_NOTES = 1024,      /* hits and bad ones of a batch that are seen to */
    KVBM_OBJECT_TOUCHED = 1 << 13, /* hits that are remembered not to touch them again soon */
    KVBM_OBJECT_TOUCH_S = 3600,
};

/* One opened store; the last user closes it. */
struct kvbm_object_handle {
    struct kvs_store *store;
    const kv_store_ext *ext; /* NULL: none */
    uint32_t refs;           /* under the tier's lock */
};

struct kvbm_object_list {
    struct kvbm_object_batch *head, *tail;
    uint32_t n;
};

/* Keys in the store of blocks, for calls that come after those that read them. */
struct kvbm_object_notes {
    uint32_t n;
    uint8_t keys[KVBM_OBJECT_NOTES][KVBM_OBJECT_CHUNK_KEY];
};

struct kvbm_object_worker {
    struct kvbm_object *object;
    struct kvbm_object_worker *next;
    pthread_t thread;

    /* under the tier's lock */
    struct kvbm_object_batch *batch; /* NULL: none, or it was ended under it */
    bool opener;                     /* opens the store before anything else */
    bool opens;                      /* is the one that opens it now */
    bool in_call, lost, gone, detached, offloading, cancelled;
    uint64_t publication;   /* number of the one that it carries out */
    bool parted;            /* its batch was ended under it, and it is not lost */
    bool called;            /* the store was asked for this batch */
    uint64_t until;         /* when the call counts as hanging */
    _Atomic bool abandoned; /* nobody wants the rest of the call: relaxed, a hint */

    /* the worker's own */
    struct kvbm_object_handle *handle;
    int opened;     /* what kvs_open said last */
    int trouble;    /* of the batch: the first result that counts for the breaker */
    uint8_t *value; /* values to put, pieces of those that are got */
    size_t value_bytes;
    void *kept; /* of the values got last, that at the highest address: see drop in calls.c */
    uint8_t keys[KVBM_OBJECT_SLICE][KVBM_OBJECT_CHUNK_KEY];
    void *data[KVBM_OBJECT_SLICE];
    size_t len[KVBM_OBJECT_SLICE];
    int rc[KVBM_OBJECT_SLICE];
    uint8_t present[KVBM_OBJECT_SLICE];
    struct kvbm_object_notes hits, bad;
    uint32_t n_deleted; /* of the bad ones */
};

struct kvbm_object {
    pthread_mutex_t lock;
    pthread_cond_t work;  /* for workers */
    pthread_cond_t watch; /* for the watcher */
    pthread_cond_t idle;  /* for open and close */
    pthread_cond_t turn;  /* for workers that are to publish */
    pthread_t watcher;
    bool watching, stopping;
    pid_t pid;

    struct kvbm_object_format format;
    char *uri, *fingerprint, *label;
    char manifest[40];
    uint32_t n_threads, max_queue;
    uint64_t timeout_ns;
    uint32_t slice, near_slice; /* blocks of one call; of one that moves bytes on this machine */

    struct kvbm_object_list queue[2], ended; /* by enum kvbm_flow */
    struct kvbm_object_worker *workers;
    uint32_t n_workers, n_able, n_offloading;
    uint64_t watch_ns; /* when the watcher looks next */
    struct kvbm_breaker breaker;
    struct kvbm_object_worker *publisher;          /* NULL: no publication is under way */
    uint64_t publications, published;              /* begun; the latest that succeeded, and */
    const struct kvbm_object_handle *published_by; /* the handle whose puts it took */
    struct kvbm_object_handle *handle;
    bool opening, opening_hangs, closing, said_down;
    int open_rc;   /* of the last time; -EINPROGRESS before */
    uint32_t refs; /* threads, and the owner */
    struct kvbm_object_stats stats;
    struct {
        uint64_t key;
        uint64_t at_s;
    } touched[KVBM_OBJECT_TOUCHED];
};

/* batch.c; all with the lock held */

/** Statuses as the caller sees them, counted: blocks without a result get @rc. */
void kvbm_object_settle(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc);
/** The watcher is to call done. */
void kvbm_object_ended(struct kvbm_object *o, struct kvbm_object_batch *batch);
/** Both, for a batch that no worker had. */
void kvbm_object_end(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc);
/** Tells the breaker; what waits fails when it opens. @rc 0: the store works. */
void kvbm_object_tell(struct kvbm_object *o, bool probe, int rc);
/** Let the next call open a new handle, unless @h isn't that in use. The last call that uses @h
 * closes it. */
void kvbm_object_retire(struct kvbm_object *o, const struct kvbm_object_handle *h);
/** The probe never got to the store: another may go. */
void kvbm_object_release(struct kvbm_object *o);
struct kvbm_object_batch *kvbm_object_pop(struct kvbm_object_list *list);
bool kvbm_object_unqueue(struct kvbm_object_list *list, const struct kvbm_object_batch *batch);
/** End all queued batches with @rc, with or without the breaker's probe. */
void kvbm_object_end_queued(struct kvbm_object *o, int rc, bool probes_too);

/* object.c */

/** Gives up a reference, and the lock, which is held. */
void kvbm_object_unref_unlock(struct kvbm_object *o);

/* worker.c */

int kvbm_object_worker_start(struct kvbm_object *o, bool opener); /* with the lock held */
void kvbm_object_worker_free(struct kvbm_object_worker *w);
/** Its call hangs, or is of no use any more: whoever waits is told @rc. With the lock held. */
void kvbm_object_worker_lose(struct kvbm_object_worker *w, int rc);
/** The same, but the worker serves others when its call returns. With the lock held. */
void kvbm_object_worker_part(struct kvbm_object_worker *w, int rc);
/**
 * Around calls into the store. enter returns 0, or what the batch ends with; leave whether somebody
 * still waits for the batch. Without a batch, @until is when it counts as hanging.
 */
int kvbm_object_enter(struct kvbm_object_worker *w);
bool kvbm_object_leave(struct kvbm_object_worker *w);

/* calls.c */

/** One batch, by a worker that has a handle. Returns 0, or what the rest of it ends with. */
int kvbm_object_run(struct kvbm_object_worker *w, struct kvbm_object_batch *batch);
/** Finish a batch after its done: mark the chunks that were read as used. */
void kvbm_object_after(struct kvbm_object_worker *w);

/* publish.c */

/** Make durable what the worker has put for its batch. Returns 0, or what the batch ends with. */
int kvbm_object_publish(struct kvbm_object_worker *w, uint64_t until_ns);
/** Let the next worker publish. A no-op unless it is this worker's turn. With the lock held. */
void kvbm_object_end_turn(struct kvbm_object_worker *w, bool published);

/* watch.c */

void *kvbm_object_watch(void *arg);

#endif
