// SPDX-License-Identifier: Apache-2.0
/**
 * A listener follows one registration's event stream. It has a connection to the publisher (sub.h),
 * a DEALER while a replay runs, and the rules of stream.h between these and the index.
 *
 *      engine PUB ----> SUB --+                       +--> kvi_store / kvi_remove / kvi_clear
 *                             +--> stream --> apply --+
 *      engine ROUTER -> DEALER+    (rules)    (decode)
 *
 * Threads. Only the listener's event thread (pump.h) uses its sockets and their state. The
 * listener's lock guards the stream, the counters and the way into the index. It is held for the
 * batches of one read (at most 64, or 1 MiB and one message more). A thread that marks the listener
 * as gone under the lock knows that no later batch enters the index.
 *
 * The backlog (backlog.h) keeps copies of batches that must wait (held at start, a replay under
 * way, a dump that copies the stream's blocks). Beyond its bound in bytes they are dropped, and show
 * as a gap.
 *
 * A dump has each stream as it is at one batch. It takes the listener's turn, between two turns of the
 * event thread, and sets `copying` (ki_listener_hold). Until ki_listener_let_go the event thread goes
 * on reading live messages, and applies nothing: no batch, no replay, no time-out.
 */
#ifndef KV_INDEXER_STREAM_LISTENER_H
#define KV_INDEXER_STREAM_LISTENER_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <zmq.h>

#include "indexer/model/model.h"
#include "indexer/stream/backlog.h"
#include "indexer/stream/snapshot.h"
#include "indexer/stream/stream.h"
#include "indexer/stream/worker.h"
#include "indexer/view/apply.h"
#include "indexer/zmq/sub.h"
#include "indexer/zmq/target.h"

/**
 * Messages of a replay that libzmq reads ahead. Small, as a ring may hold large ones. A ROUTER
 * silently drops messages for which its peer has no room, and the stream asks for the hole again. A
 * larger queue would hardly help: a ROUTER's own queue, 1000 messages by default, fills first.
 */
#define KI_REPLAY_QUEUE 64
/** A larger message ends the connection, which is made anew; the message shows as a gap. */
#define KI_MAX_MESSAGE (INT64_C(64) << 20)

struct ki_listener;

/** Shared by all listeners. */
struct ki_listener_env {
    void *zmq;
    struct kv_resolver *resolver;
    uint64_t replay_timeout_ms;
    uint64_t stale_after_ms, forget_after_ms; /* --stale-after, --forget-after; 0: never */
    uint64_t worker_blocks;                   /* --worker-blocks */
    struct ki_backlog_budget backlog;
    struct ki_sub_limits arriving;
    enum ki_mm_keys mm_keys;
    /*
     * Called by an event thread, without locks, when blocks of @l's ranks have left the index; NULL:
     * nobody asks. The listener's ranks may be read there.
     */
    void (*lost)(void *arg, const struct ki_listener *l, const struct ki_loss *loss);
    void *lost_arg;
    atomic_bool held;             /* connect, but read no messages */
    atomic_bool awaits_dump;      /* a peer copies its streams from now on */
    _Atomic uint64_t generations; /* last generation given to a listener */
};

struct ki_pump;
struct ki_hub;
struct ki_hubs;

/** A live batch on its way to the stream. */
struct ki_live {
    struct ki_batch_id id;
    bool reconnected; /* came over another connection than the batch before */
    struct kve_span payload;
};

struct ki_listener {
    /* Set once. */
    struct ki_listener_env *env;
    struct ki_pump *pump;
    uint64_t instance;
    uint32_t rank;
    char *who;            /* the instance in log lines: its name, quoted, or its number */
    uint64_t num_blocks;  /* capacity of the engine in blocks, per rank; 0: unknown */
    uint64_t told_blocks; /* the part of num_blocks that the registration gave */
    char *endpoint, *replay_endpoint; /* replay_endpoint may be NULL */
    bool has_publisher;               /* messages of others than this publisher are passed over */
    uint64_t publisher;
    bool fed; /* batches come by ki_listener_feed; there is no connection */
    _Atomic uint32_t refs;

    /* The view that /query tells: 0 when it is active and whole, or gone. See ki_listener_show. */
    _Atomic uint64_t view;

    /* Held by the event thread for a turn or tick; taken before lock, by ki_listener_begin_turn. */
    pthread_mutex_t turn;
    pthread_mutex_t gate; /* held by the thread that waits for the turn */
    /* Dumps that copy the stream's blocks; rises between turns only. */
    _Atomic uint32_t copying;

    pthread_mutex_t lock; /* guards from here..; release it by ki_listener_unlock */
    struct ki_model *model;
    struct kh_stream stream;
    struct ki_applier applier;
    uint64_t last_event_ns;
    uint64_t generation; /* changes when blocks leave that no event of the stream has removed */
    bool gone, paused, withdrawn, started;
    /* The connection to the publisher, by the latest news. NEW: the stream has not heard of it. */
    enum { KI_LINK_DOWN, KI_LINK_NEW, KI_LINK_UP } link;
    uint64_t reopened;
    /* Version of the registration; written under the registry's admin lock as well. */
    uint64_t version;
    bool by_peer; /* known from a peer */
    char last_error[240];
    uint32_t odd_frames; /* frames of the last message that was none of an event stream; 0: none */
    uint32_t told_chunk[KV_N_TIERS]; /* as the model's table has it, ... */
    uint32_t told_ranks;             /* ... for the first ranks of the stream */
    /* ...to here. */

    /* For the event thread only. */
    struct ki_sub sub;            /* the connection to the publisher */
    struct ki_sub_room *room;     /* shared by the thread's listeners, for one turn each */
    struct ki_hubs *hubs;         /* the thread's */
    struct ki_hub *hub;           /* the address on which it listens; NULL: it connects */
    void *dealer;                 /* NULL: no replay runs */
    bool sub_ready, dealer_ready; /* may have messages */
    bool detached;                /* paused: sockets are closed */
    bool queued;                  /* in the pump's list of ready listeners */
    int epoll_fd;
    size_t turn_bytes;    /* bytes read in this turn */
    uint64_t deadline_ns; /* time for ki_listener_tick; 0: never */

    /* Connected while the dump was on its way: it may have been copied before. */
    bool is_late;

    /* Batches that wait. */
    bool holding;
    struct ki_live held;
    void *held_bytes;          /* payload of the held batch */
    struct ki_backlog backlog; /* batches behind the held one, or since the start */

    /* sub.ups at the start of reading, as last reported to the stream, and at the last batch. */
    uint64_t ups_at_start, ups_told, ups_of_batch;
    uint64_t unnumbered; /* messages without a number over the current connection */
    enum { KI_TOLD_NOTHING, KI_TOLD_UP, KI_TOLD_DOWN } link_told; /* last line in the log */
    uint64_t silent_ns; /* without a connection: time to log that; 0: not yet known */

    /* Addresses to connect to. Times are of the next attempt; 0: none. */
    struct ki_target target, replay_target;
    bool was_up;              /* target.where has answered before */
    uint64_t retry_at_ns;     /* time to connect */
    uint64_t lost_ns;         /* time since which there is no connection */
    uint64_t look_again_ns;   /* without a connection: time to resolve the endpoint again */
    uint64_t replay_again_ns; /* time to resolve the replay endpoint again */
    TAILQ_ENTRY(ki_listener) all, ready;
    LIST_ENTRY(ki_listener) at_hub;
    struct in6_addr source; /* from where its last publisher connected to the hub */
};

/**
 * Create a listener with one reference, for the caller. Strings are copied; on success the listener
 * owns @model's reference.
 */
int ki_listener_create(struct ki_listener_env *env, const struct ki_registration *registration,
                       struct ki_model *model, struct ki_listener **ret);
/** Return a generation that no listener has had. */
uint64_t ki_listener_new_generation(struct ki_listener_env *env);
struct ki_listener *ki_listener_acquire(struct ki_listener *l);
void ki_listener_release(struct ki_listener *l);

/* -- any thread -------------------------------------------------------------------------------- */

/** Publish the listener's view for /query. Caller-locked. */
void ki_listener_show(struct ki_listener *l);
/** Publish that blocks are leaving the index: partial until the lock is released. Caller-locked. */
void ki_listener_show_loss(struct ki_listener *l);
/** Publish the view, and release the lock. */
void ki_listener_unlock(struct ki_listener *l);
/** Read the published view, at any time. Returns false when it is active and whole, or gone. */
bool ki_listener_view(const struct ki_listener *l, enum ki_listener_status *ret_status,
                      ki_reasons *ret_reasons);
/** Move the listener to @model, whose reference it takes over. */
void ki_listener_change_model(struct ki_listener *l, struct ki_model *model);
/** The stream brings its registered rank if the index has blocks of it. Caller-locked. */
void ki_listener_name_rank(struct ki_listener *l);
/**
 * Give the stream another rank's blocks from a dump, before it starts. With too many ranks the
 * blocks are forgotten.
 */
void ki_listener_adopt_rank(struct ki_listener *l, const struct ki_mark *mark);
/** Return true when the stream writes @rank's blocks. */
bool ki_listener_brings(struct ki_listener *l, uint32_t rank);
/**
 * Note that the blocks of the @n @ranks are about to leave the index, and that @left have left. If
 * the stream brings any of these ranks, its view is partial from now on. Call ki_listener_learn_anew
 * when they have left and no other stream brings them any more.
 */
void ki_listener_expect_loss(struct ki_listener *l, const uint32_t *ranks, uint32_t n,
                             uint64_t left);
/**
 * Forget the stream's blocks of those of the @n @ranks that it brings, as another stream brought
 * them, too, and learn them anew: the view is partial until then. Returns false, and does
 * nothing, when the stream brings none of the ranks. The caller wakes the pump.
 */
bool ki_listener_learn_anew(struct ki_listener *l, const uint32_t *ranks, uint32_t n);
/** Retire the listener: no later batch enters the index. Returns true when there is a position. */
bool ki_listener_retire(struct ki_listener *l, struct ki_mark *ret_position);
/** Pause or resume. Returns 0 or -EALREADY. The caller wakes the pump. */
int ki_listener_set_paused(struct ki_listener *l, bool paused);
/** Withdraw the rank from answers, or end that. Its stream goes on. */
void ki_listener_set_withdrawn(struct ki_listener *l, bool withdrawn);
void ki_listener_info(struct ki_listener *l, struct ki_worker_info *ret);
/** Return the reasons for which the view is partial. Caller-locked. */
ki_reasons ki_listener_reasons(const struct ki_listener *l);
/**
 * Return the reasons for which a replica that goes on with the stream's blocks is partial, but for
 * blocks in doubt: a snapshot names these. Caller-locked.
 */
ki_reasons ki_listener_reasons_of_replicas(const struct ki_listener *l);
/** Take the turn, before a thread that asks later. End it by unlocking `turn`. */
void ki_listener_begin_turn(struct ki_listener *l);
/**
 * Hold the stream at its last batch for a dump, and copy what it knows there; *@ret is NULL when it has
 * brought nothing. Calls nest. Waits for a turn of the event thread at most. Returns 0; -ENOMEM, or
 * -ENODATA for a retired listener: it isn't held then.
 */
int ki_listener_hold(struct ki_listener *l, struct ki_snapshot **ret, uint64_t *ret_generation);
/**
 * Let the stream go on, with the batches that wait. Returns true when its blocks were those of that
 * batch all the time: it wasn't retired, nor lost any. The caller wakes the pump.
 */
bool ki_listener_let_go(struct ki_listener *l, uint64_t generation);

/* -- a fed listener: one thread of the feeder at a time (listener_fed.c) -------------------------- */

/*
 * Each waits while a dump copies the stream's blocks, and until the listener has started. Returns 0, or
 * -ENOENT for a retired listener.
 */

/** Forget the stream's blocks: they will be told anew. Partial until ki_listener_feed_whole. */
int ki_listener_feed_anew(struct ki_listener *l);
/** Apply operations; @lost_tiers: bit per tier of which something was left out. */
int ki_listener_feed(struct ki_listener *l, const struct kve_batch *batch, uint32_t lost_tiers);
/** Note whether the blocks that were told are all that the publisher has. */
int ki_listener_feed_whole(struct ki_listener *l, bool whole);
/** Note that the publisher is heard of, or (@problem) why it isn't. */
int ki_listener_feed_link(struct ki_listener *l, const char *problem);

/* -- a fed listener with a publisher: numbered messages, of which some may be lost ----------------- */

/** Return true once messages may be fed: a recovery has ended. Keep them until then. */
bool ki_listener_has_started(struct ki_listener *l);
/** Offer a message of the registration's publisher to the stream, as if a connection had brought it. */
int ki_listener_feed_message(struct ki_listener *l, const struct kve_message *message);
/**
 * Note that messages may have been lost behind the last one: the view is partial until the next one's
 * number tells.
 */
int ki_listener_feed_reconnected(struct ki_listener *l);

/** Tell the model of new sizes of chunks in the stream's lower tiers. Caller-locked. */
void ki_listener_tell_chunks(struct ki_listener *l);

/* -- the event thread -------------------------------------------------------------------------- */

/**
 * Do what is due: open, pause, resume, time-outs. Sets deadline_ns. Returns false for a retired
 * listener, which must be closed.
 */
bool ki_listener_tick(struct ki_listener *l, uint64_t now_ns);
/**
 * Read and apply a bounded number of messages. Sets deadline_ns. Returns true when there may be
 * more.
 */
bool ki_listener_service(struct ki_listener *l, uint64_t now_ns);
void ki_listener_close(struct ki_listener *l);

#endif
