// SPDX-License-Identifier: Apache-2.0
/**
 * One event stream: decide which batches to apply, drop or hold back, when to ask for a replay, and
 * when the publisher has started over. Pure: no sockets, no clock, no memory of its own. The driver
 * (the listener) carries out the returned steps. docs/kv-indexer-streams.md has the rules and their
 * reasons.
 *
 *              gap, restart, connected, idle            replayed up to the held batch,
 *       LIVE ------------------------------> REPLAYING  end marker, or given up
 *        ^                                    |   ^  |
 *        |                          end too   v   |  |
 *        |                           early  WAITING   |
 *        +--------------------------------------------+
 *
 * Thread-confined or caller-locked.
 */
#ifndef KV_INDEXER_STREAM_STREAM_H
#define KV_INDEXER_STREAM_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "indexer/view/reasons.h"

#define KI_STREAM_WINDOW 128 /* batches whose digest is remembered; a power of two */

/** Identity of a batch. */
struct ki_batch_id {
    uint64_t sequence;
    uint64_t digest;  /* of the payload */
    double timestamp; /* the publisher's, in seconds; 0: unknown */
};

/** Steps to take, a set. The caller takes them in this order: PURGE, APPLY, REQUEST, RESUME. */
enum ki_step {
    KI_STEP_PURGE = 1,    /* forget all blocks that this stream brought */
    KI_STEP_RESET = 2,    /* forget the reader's state, too: the publisher is another process */
    KI_STEP_APPLY = 4,    /* apply this batch */
    KI_STEP_DROP = 8,     /* this batch needs no further work */
    KI_STEP_HOLD = 16,    /* keep this live batch and read no further; offer it again on RESUME */
    KI_STEP_REQUEST = 32, /* ask for a replay from stream->request on, over a new socket */
    KI_STEP_RESUME = 64   /* the replay has ended: close its socket, continue with live batches */
};

struct ki_stream_opts {
    bool can_replay;       /* there is a replay endpoint */
    bool one_process;      /* each message names the process that sent it, and others are refused */
    uint32_t max_attempts; /* consecutive requests without a batch before giving up */
    uint64_t timeout_ns;   /* silence that ends one attempt */
    uint64_t retry_delay_ns; /* pause after a replay that ended too early */
    uint64_t cooldown_ns;    /* after giving up: time without replays */
    /* Blocks from before a loss are forgotten after this time; 0: never. */
    uint64_t resync_ns;
    /* Silence after which a new connection's replay service is asked once more. */
    uint64_t idle_ns;
    /* Without a connection the view is partial, and its blocks are forgotten, after this time; 0: never. */
    uint64_t stale_ns, forget_ns;
};

enum ki_stream_state { KI_STREAM_LIVE, KI_STREAM_REPLAYING, KI_STREAM_WAITING };

/**
 * Foundation of the stream's blocks and position. In this order: from UNPLACED on there are blocks,
 * from PEER on there is a position.
 */
enum ki_base {
    KI_BASE_NONE,     /* nothing has told yet what the publisher has */
    KI_BASE_EMPTY,    /* the replay service had no batch: the publisher's cache is empty */
    KI_BASE_UNPLACED, /* state from elsewhere without a position: the first batch sets it */
    KI_BASE_PEER,     /* position is a peer's, and no batch has shown that it is of this process */
    KI_BASE_OWN       /* position is of a batch of this process, as far as batches can tell */
};

/** The number with which the publisher's batches begin. BATCH_0 (reasons) asks for more. */
enum ki_first {
    KI_FIRST_OPEN,      /* not known */
    KI_FIRST_ZERO,      /* with 0: the publisher has sent such a batch, so never with 1 */
    KI_FIRST_UNPROVABLE /* not known, and the replay service's ring can't tell any more */
};

/** A live batch that waits for the current replay, at the driver. */
enum ki_held {
    KI_HELD_NONE,
    KI_HELD_ANY,
    KI_HELD_NEXT /* it came over the connection that brought the position */
};

/** Content of the answer to the current request so far. In this order. */
enum ki_answer {
    KI_ANSWER_NONE,
    KI_ANSWER_BATCHES,
    KI_ANSWER_POSITION /* the batch at position: the process is the known one */
};

/** Whether the process whose batches came last is known to be at the other end of the connection. */
enum ki_contact {
    KI_CONTACT_MET, /* it is, as far as batches can tell; or there is none */
    /* There is no connection, or one that the stream hasn't heard of: that process may have gone. */
    KI_CONTACT_ADRIFT,
    KI_CONTACT_STALE /* the same, and for so long that a view with a position is partial */
};

/** Reason of a replay; decides what its first answer means. */
enum ki_replay_kind {
    KI_REPLAY_GAP, /* get the batches between position and trigger */
    /*
     * Get the same and the batch at position, which tells whether the process is still the known
     * one.
     */
    KI_REPLAY_VERIFY,
    KI_REPLAY_START, /* get everything from the beginning */
    /* Get everything from the beginning, to replace a partial view by a whole one. */
    KI_REPLAY_HEAL,
    KI_REPLAY_PROOF /* learn whether a batch 0 preceded the first one, 1: see stream_first.c */
};

struct ki_stream_stats {
    uint64_t gaps, missed, duplicates, restarts;
    uint64_t replays, failed_replays, replayed, overruns;
    uint64_t absences; /* times that the blocks were forgotten for want of a connection */
    /* Times that the blocks were forgotten because too many had to be phantoms. */
    uint64_t resyncs;
    uint64_t contradictions; /* those of resyncs in a view without known losses */
};

struct kh_stream {
    struct ki_stream_opts opts;
    enum ki_stream_state state;
    enum ki_base base;
    uint64_t position; /* number of the last batch applied */
    double timestamp;
    struct {
        uint64_t next; /* number behind the batch's; 0: none is here */
        uint64_t digest;
    } window[KI_STREAM_WINDOW];
    /*
     * Batches behind the position are missing. The replay under way, or the next connection's, ends that;
     * where nobody can be asked, the next batch, which shows how many.
     */
    bool behind;
    /* Number behind the newest batch that was dropped with a lost connection; 0: none. */
    uint64_t dropped_next;

    /* Number behind the last live batch over this connection that was applied or dropped; 0: none. */
    uint64_t live_next;

    enum ki_first first;
    uint64_t one_digest; /* BATCH_0: of batch 1 */
    /* No batch beyond this number was published when the ring began with 1; 0: unknown. */
    uint64_t proof_bound;
    uint64_t proof_end;    /* last batch that the ring had when it was asked what it begins with */
    uint64_t proof_at_ns;  /* LIVE: time of the next request; 0: never */
    uint32_t proof_misses; /* requests that brought no bound */

    /*
     * Reasons that events of the stream have set: ki_stream_reasons adds those that follow from the
     * rest of the state. BATCH_0: the first batch applied was 1, and a batch 0 may be missing.
     * RECONNECTED: the connection was made after the last batch. TWO_PUBLISHERS: two publishers
     * behind one endpoint, which look like restarts in alternation. UNPROVED: nothing tells whose
     * the blocks are: the stream went on at the next number over a new connection and nobody could
     * be asked, or behind state without a position, or behind a peer's without a connection (until
     * the position is proved to be this process's).
     */
    ki_reasons reasons;
    uint64_t losses; /* rises when something may be missing: clears before it have not ended that */
    /* A clear has ended a loss. It leaves some tiers alone, of which the stream had shown no block. */
    bool healed;
    bool torn;      /* state came from elsewhere and is incomplete: get a whole view first */
    bool ahead;     /* a replay has overtaken the live backlog, or came from a newer process */
    bool connected; /* the publisher is connected, so its replay service may be asked */
    bool met;       /* connections are reported: a batch alone doesn't prove one */
    enum ki_contact contact;
    uint64_t absent_ns; /* time since which there is no connection; 0: there is one, or not known */
    /* Number behind the position of an earlier registration, whose blocks are forgotten; 0: none. */
    uint64_t before_next;

    /* The current replay. */
    enum ki_replay_kind kind;
    uint64_t request;  /* first batch number to ask for */
    enum ki_held held; /* the batch numbered trigger */
    uint64_t trigger, trigger_digest;
    double trigger_timestamp;
    bool gap_counted; /* the held batch's gap is counted already */
    enum ki_answer answer;
    uint32_t attempts;
    uint32_t turnovers;     /* restarts seen during this replay */
    uint64_t replay_end_ns; /* time at which the replay is given up in any case */
    /* Deadline of the request, or of the pause before the next; 0 when LIVE. */
    uint64_t deadline_ns;

    uint64_t idle_at_ns;     /* LIVE: time to ask for missed batches once more; 0: never */
    uint64_t heal_at_ns;     /* LIVE: time to try to get a whole view; 0: never */
    uint64_t cooldown_to_ns; /* no replays before this time */

    /* Phantoms: blocks whose removal was lost. */
    bool lossy;            /* batches were lost since the blocks were last known to be real */
    uint64_t resync_at_ns; /* lossy: time to forget the blocks; 0: never */
    /* Removals of blocks that the index lacked, since the loss or, without one, recently. */
    uint64_t unexplained;
    /* Removals of blocks that the index had; halved together with unexplained. */
    uint64_t explained;
    uint64_t excused; /* expected removals of blocks that the index has forgotten */

    uint64_t replaced; /* position before the last restart */
    uint32_t watch;    /* batches left in which to watch for the old numbering to go on */
    uint32_t strikes;

    struct ki_stream_stats stats;
};

/** Return true when the stream has a position. */
static inline bool ki_stream_has_position(const struct kh_stream *s)
{
    return s->base >= KI_BASE_PEER;
}

/** Return true when the index may have blocks of the stream, with or without a position. */
static inline bool ki_stream_has_blocks(const struct kh_stream *s)
{
    return s->base >= KI_BASE_UNPLACED;
}

void ki_stream_init(struct kh_stream *s, const struct ki_stream_opts *opts);

/** Seed the stream with the state of a peer up to and including batch @sequence. */
void ki_stream_seed(struct kh_stream *s, uint64_t sequence, double timestamp, bool partial);
/** Seed the stream with state that has no position: the first batch continues it. */
void ki_stream_seed_cursorless(struct kh_stream *s);
/**
 * Note that the peer's state is incomplete: the stream is partial, and asks for all batches again
 * as soon as reading starts. Call before ki_stream_start.
 */
void ki_stream_seed_torn(struct kh_stream *s);
/** Note the position of an earlier registration, whose blocks are gone. */
void ki_stream_remember(struct kh_stream *s, uint64_t sequence);

/** Start reading. */
void ki_stream_start(struct kh_stream *s, uint64_t now_ns);

/**
 * Report a connection to the publisher. All that earlier connections brought has been offered, and
 * no replay runs. @anew: the connection is younger than the stream's state, so another process may
 * answer. Asks the replay service at once, since batches published before the subscription arrives
 * are lost. Returns steps.
 */
unsigned ki_stream_connected(struct kh_stream *s, bool anew, uint64_t now_ns);
/**
 * Report a connection before its messages are read. A running replay ends with its next tick, as it may
 * wait for a process that has gone: ki_stream_connected asks for the rest.
 */
void ki_stream_reachable(struct kh_stream *s, uint64_t now_ns);
/**
 * Report the loss of the connection: until ki_stream_connected or the next connection's first batch no
 * replay is requested, and none counts as failed. Batches that need one are dropped: the next connection's
 * asks for all from the position on. The publisher has not been heard of since @since_ns.
 */
void ki_stream_disconnected(struct kh_stream *s, uint64_t since_ns);

/**
 * Somebody is connected who may be the lost publisher, and has said nothing. The view stays partial;
 * the time after which blocks are forgotten begins anew, from opts.stale_ns on.
 */
void ki_stream_may_be_back(struct kh_stream *s, uint64_t now_ns);

/**
 * Judge the time without a connection. After opts.stale_ns the view is partial. After opts.forget_ns
 * the stream forgets its blocks and position, and learns them anew over the next connection. Ends a
 * replay: the driver drops what it holds back. Returns steps: PURGE and RESET, or none.
 */
unsigned ki_stream_tick_absence(struct kh_stream *s, uint64_t now_ns);
/** Return true when the time without a connection is at least opts.stale_ns. */
bool ki_stream_is_absent(const struct kh_stream *s, uint64_t now_ns);
/** Return the time at which to call ki_stream_tick_absence; 0: never. */
uint64_t ki_stream_absence_deadline(const struct kh_stream *s);

/**
 * Offer a live batch. @reconnected: over another connection than the batch before. Returns steps.
 */
unsigned ki_stream_live(struct kh_stream *s, const struct ki_batch_id *id, bool reconnected,
                        uint64_t now_ns);
/**
 * Note that the driver had no room for live batches, of which the newest is before @next: no later batch
 * may show the gap.
 */
void ki_stream_dropped(struct kh_stream *s, uint64_t next, uint64_t now_ns);
/**
 * Offer a batch of the replay, its end marker (may purge, too), or report an invalid answer. Return
 * steps.
 */
unsigned ki_stream_replayed(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns);
unsigned ki_stream_replay_end(struct kh_stream *s, uint64_t now_ns);
unsigned ki_stream_replay_failed(struct kh_stream *s, uint64_t now_ns);

/**
 * Of a stream without messages of its own, which is fed (stream_fed.c). anew: all blocks will be told
 * again, and the view is partial until fed_whole; returns PURGE and RESET. fed: a batch is applied.
 * link: the publisher is heard of, or isn't any more.
 */
unsigned ki_stream_fed_anew(struct kh_stream *s);
void ki_stream_fed(struct kh_stream *s);
void ki_stream_fed_whole(struct kh_stream *s, bool whole);
void ki_stream_fed_link(struct kh_stream *s, bool up, uint64_t now_ns);
/** Of a stream whose messages are fed: some may have been lost behind the last one. */
void ki_stream_fed_reconnected(struct kh_stream *s);

/** Return the time at which to call ki_stream_tick; 0: never. */
uint64_t ki_stream_deadline(const struct kh_stream *s);
unsigned ki_stream_tick(struct kh_stream *s, uint64_t now_ns);

/** Return the reasons of the stream for which the view may lack blocks or have too many. */
ki_reasons ki_stream_reasons(const struct kh_stream *s);

/** Return true when an event of the stream has set one of @reasons. */
static inline bool ki_stream_has(const struct kh_stream *s, ki_reasons reasons)
{
    return s->reasons & reasons;
}

/** Evidence in an applied batch about the index's view, over all ranks of the stream. */
struct ki_evidence {
    uint64_t held;     /* blocks of the stream's ranks in the index now, parked ones included */
    uint64_t capacity; /* blocks for which the engine has room; 0: unknown */
    uint64_t unknown;  /* blocks removed from the device that the index lacked */
    uint64_t removed;  /* blocks removed from the device that the index had */
    bool full;         /* the index had no room */
};

/**
 * Judge whether too many of the blocks can't be real. A lost batch loses removals, which no later
 * event repeats. It loses about as many stores, whose removal later names blocks that the index
 * lacks. In a view without losses such removals contradict the view, and make it partial. Call
 * after each applied batch. Returns KI_STEP_PURGE (forget the blocks and learn them anew; the view
 * is partial) or 0.
 */
unsigned ki_stream_judge(struct kh_stream *s, const struct ki_evidence *e, uint64_t now_ns);

/** Note that the driver lost the contents of a batch (undecodable, out of memory). */
void ki_stream_lose_contents(struct kh_stream *s, uint64_t now_ns);
/**
 * Note that @held of the stream's blocks, which the engine still has, are about to leave the index:
 * the view is partial. Returns false, and changes nothing, when the stream has brought no batch.
 */
bool ki_stream_expect_loss(struct kh_stream *s, uint64_t held);
/**
 * The same for blocks that have left. The replay service is asked for all batches at once, for a
 * whole view.
 */
void ki_stream_learn_anew(struct kh_stream *s, uint64_t held, uint64_t now_ns);
/** Note that the publisher cleared all that the stream brought: no batch is missing any more. */
void ki_stream_mark_whole(struct kh_stream *s);
/**
 * Note that the publisher has blocks in tiers that its clears leave alone, or of a rank that wasn't
 * cleared: a loss before the last clear may have been of such blocks.
 */
void ki_stream_note_more(struct kh_stream *s, uint64_t now_ns);

/** Note that the driver closed both connections (paused): a held batch is forgotten. */
void ki_stream_detach(struct kh_stream *s);

#endif
