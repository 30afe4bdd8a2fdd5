// SPDX-License-Identifier: Apache-2.0
/**
 * A listener follows one registration's event stream: a SUB socket, a DEALER while a replay runs,
 * the rules of stream.h between them and the index.
 *
 *      engine PUB ----> SUB --+                       +--> kvi_store / kvi_remove / kvi_clear
 *                             +--> stream --> apply --+
 *      engine ROUTER -> DEALER+    (rules)    (decode)
 *
 * Threads. Sockets, and what only concerns them, belong to the listener's event thread (pump.h).
 * The stream, the counters and the way into the index are guarded by the listener's lock, which is
 * held for the batches of one read at a time (at most 64, or 1 MiB and one message more): whoever
 * marks the listener gone under it knows that nothing of its stream enters the index afterwards.
 *
 * Batches that must wait (held at start, a replay under way) are copied to the backlog (backlog.h),
 * which is bounded in bytes; beyond that they are dropped, and the gap shows.
 */
#ifndef KV_INDEXER_LISTENER_H
#define KV_INDEXER_LISTENER_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <zmq.h>

#include "indexer/apply.h"
#include "indexer/backlog.h"
#include "indexer/link.h"
#include "indexer/registry.h"
#include "indexer/stream.h"
#include "indexer/target.h"

/**
 * Messages that libzmq reads ahead while the event thread is busy, before TCP and then the
 * publisher have to queue. libzmq counts messages, not bytes, so few.
 */
#define KI_RECEIVE_QUEUE 64
/**
 * The same for a replay. Few, as a ring may hold large ones: a ROUTER drops, without a word, what
 * its peer has no room for, the hole is asked for again. More here would hardly help: a ROUTER's
 * own queue, 1000 messages by default, is full before.
 */
#define KI_REPLAY_QUEUE 64
/** Larger messages end the connection, which is made anew (they show as a gap). */
#define KI_MAX_MESSAGE (INT64_C(64) << 20)

/** Shared by all listeners. */
struct ki_listener_env {
    void *zmq;
    struct kv_resolver *resolver;
    uint64_t replay_timeout_ms;
    uint64_t worker_blocks; /* --worker-blocks */
    struct ki_backlog_budget backlog;
    enum ki_mm_keys mm_keys;
    atomic_bool held;             /* connect, but read nothing */
    _Atomic uint64_t generations; /* the last one given to a listener */
};

struct ki_pump;

/** A live batch on its way to the stream. */
struct ki_live {
    struct ki_batch_id id;
    bool reconnected; /* over another connection than the batch before */
    zmq_msg_t payload;
};

struct ki_listener {
    /* Set once. */
    struct ki_listener_env *env;
    struct ki_pump *pump;
    uint64_t instance;
    uint32_t rank;
    uint64_t num_blocks;              /* the engine's capacity, per rank; 0: unknown */
    uint64_t told_blocks;             /* of it, what the registration said */
    char *endpoint, *replay_endpoint; /* the latter may be NULL */
    _Atomic uint32_t refs;

    pthread_mutex_t lock; /* guards from here... */
    struct ki_model *model;
    struct ki_stream stream;
    struct ki_applier applier;
    uint64_t last_event_ns;
    uint64_t generation; /* of its blocks: see ki_watermark */
    bool has_overlap_end;
    uint64_t overlap_end; /* a peer's dump may have batches up to this one; has_overlap_end */
    bool gone, paused, started;
    bool connected; /* to a publisher, by the last that was heard */
    uint64_t reopened;
    uint64_t version; /* of the registration; written under the registry's admin lock as well */
    bool by_peer;     /* a peer told it */
    char last_error[120];
    /* ...to here. */

    /* The event thread's. */
    void *sub, *dealer;
    bool sub_ready, dealer_ready, link_ready; /* may have messages */
    bool detached;                            /* paused: sockets are closed */
    bool queued;                              /* in the pump's list of those that are ready */
    int epoll_fd;
    size_t turn_bytes;    /* read in this turn */
    uint64_t deadline_ns; /* call ki_listener_tick then; 0: never */

    /* Batches that wait. */
    bool holding;
    struct ki_live held;
    struct ki_backlog backlog; /* behind the held batch, or the start */

    /* The connection behind sub. */
    struct ki_link link;
    uint64_t ups_at_start, ups_told; /* link.ups: at the start of reading; as told to the stream */
    bool has_connection;
    zmq_msg_t connection;            /* a message of the connection that the last batch came over */
    const char *connection_property; /* of that message, valid as long as it is kept */
    enum { KI_TOLD_NOTHING, KI_TOLD_UP, KI_TOLD_DOWN } link_told; /* last line in the log */
    uint64_t silent_ns; /* without a connection: say so then; 0: not yet known */

    /* Where to connect to. Times are for the next try; 0: none. */
    struct ki_target target, replay_target;
    bool was_up;              /* target.where has answered */
    uint64_t retry_at_ns;     /* to connect */
    uint64_t lost_ns;         /* since when there is no connection */
    uint64_t look_again_ns;   /* without a connection: to ask where the endpoint is */
    uint64_t replay_again_ns; /* to ask where the replay endpoint is */
    TAILQ_ENTRY(ki_listener) all, ready;
};

/** One reference, the caller's. Strings are copied; @model's reference is the listener's on
 * success. */
int ki_listener_create(struct ki_listener_env *env, const struct ki_registration *registration,
                       struct ki_model *model, struct ki_listener **ret);
/** A number that no listener has had. */
uint64_t ki_listener_new_generation(struct ki_listener_env *env);
struct ki_listener *ki_listener_acquire(struct ki_listener *l);
void ki_listener_release(struct ki_listener *l);

/* -- any thread -------------------------------------------------------------------------------- */

/** Whether @mark tells a position in this listener's stream. */
bool ki_mark_is_of(const struct ki_watermark *mark, const struct ki_listener *l);
/** The index has what the stream brought up to @mark. Before it starts. */
void ki_listener_seed(struct ki_listener *l, const struct ki_watermark *mark);
/** Blocks of another rank, from a dump, are this stream's from now on; or forgotten, when it has too
 * many ranks. Before it starts. */
void ki_listener_adopt_rank(struct ki_listener *l, const struct ki_watermark *mark);
/** Whether the stream writes @rank's blocks. */
bool ki_listener_brings(struct ki_listener *l, uint32_t rank);
/** Nothing of the stream enters the index any more. Returns whether there is a position. */
bool ki_listener_retire(struct ki_listener *l, struct ki_watermark *ret_position);
/** Returns 0 or -EALREADY. The caller wakes the pump. */
int ki_listener_set_paused(struct ki_listener *l, bool paused);
/** Whether @model is this listener's. */
bool ki_listener_feeds(struct ki_listener *l, const struct ki_model *model);
void ki_listener_info(struct ki_listener *l, struct ki_worker_info *ret);
/** Whether a replica that goes on with the stream's blocks may lack some or have too many. Caller-locked. */
bool ki_listener_is_partial_in_dumps(const struct ki_listener *l);
/** Append a struct ki_watermark for each rank that the stream writes. */
void ki_listener_watermarks(struct ki_listener *l, struct kv_buf *ret);

/* -- the event thread -------------------------------------------------------------------------- */

/** Open, pause, resume, time-outs, whatever is due. Sets deadline_ns. False: gone, close it. */
bool ki_listener_tick(struct ki_listener *l, uint64_t now_ns);
/** Read and apply a bounded number of messages. Sets deadline_ns. True when there may be more. */
bool ki_listener_service(struct ki_listener *l, uint64_t now_ns);
void ki_listener_close(struct ki_listener *l);

#endif
