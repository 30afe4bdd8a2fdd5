// SPDX-License-Identifier: Apache-2.0
/**
 * One event stream: which batches to apply, drop or hold back, when to ask for a replay, and when
 * the publisher has started over. Pure: no sockets, no clock, no memory of its own; whoever drives
 * it does what the returned steps say. The rules and why: docs/kv-indexer-streams.md.
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
#ifndef KV_INDEXER_STREAM_H
#define KV_INDEXER_STREAM_H

#include <stdbool.h>
#include <stdint.h>

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
    KI_STEP_RESET = 2,    /* and what the reader remembers: it is another process now */
    KI_STEP_APPLY = 4,    /* apply this batch */
    KI_STEP_DROP = 8,     /* this batch is done with */
    KI_STEP_HOLD = 16,    /* keep this live batch, read no further; offer it again on RESUME */
    KI_STEP_REQUEST = 32, /* ask for a replay from stream->request, on a new socket */
    KI_STEP_RESUME = 64   /* the replay is over: close its socket, go on with live batches */
};

struct ki_stream_opts {
    bool can_replay;         /* there is a replay endpoint */
    uint32_t max_attempts;   /* requests in a row that bring nothing, before giving up */
    uint64_t timeout_ns;     /* silence that ends one attempt */
    uint64_t retry_delay_ns; /* after a replay that ended too early */
    uint64_t cooldown_ns;    /* after giving up, live goes on without replays for so long */
    uint64_t resync_ns;      /* blocks from before a loss are forgotten after so long; 0: never */
    uint64_t idle_ns;        /* a connection that brings nothing for so long is asked once more */
};

enum ki_stream_state { KI_STREAM_LIVE, KI_STREAM_REPLAYING, KI_STREAM_WAITING };

/** Why a replay was asked for; decides what its first answer means. */
enum ki_replay_kind {
    KI_REPLAY_GAP,    /* the batches between position and trigger */
    KI_REPLAY_VERIFY, /* the same, and the batch at position too: is it the one that we know? */
    KI_REPLAY_START,  /* everything from the beginning */
    KI_REPLAY_HEAL    /* the same, to get from a partial view to a whole one */
};

struct ki_stream_stats {
    uint64_t gaps, missed, duplicates, restarts;
    uint64_t replays, failed_replays, replayed, overruns;
    uint64_t resyncs;        /* blocks forgotten because too many of them had to be phantoms */
    uint64_t contradictions; /* of these: in a view that had lost nothing */
};

struct ki_stream {
    struct ki_stream_opts opts;
    enum ki_stream_state state;
    /* The last batch applied. */
    bool has_position;
    uint64_t position;
    double timestamp;
    struct {
        bool used;
        uint64_t sequence, digest;
    } window[KI_STREAM_WINDOW];

    /* The last number that came live over this connection and was done with. */
    bool has_live;
    uint64_t last_live;

    bool partial;
    bool seeded;     /* position is a peer's, and nothing has shown yet that it is this process's */
    bool cursorless; /* state came from elsewhere without a position: the first batch sets it */
    bool doubtful;   /* events don't tell all of the engine's cache: the driver says so */
    bool torn;       /* state came from elsewhere and lacks something: become whole first */
    bool ahead;     /* a replay has taken us beyond, or to a newer process than, the live backlog */
    bool connected; /* there is a connection to the publisher, so its replay service may be asked */
    bool met;       /* connections are told: a batch alone doesn't show that there is one */
    bool unverified; /* the connection was made anew since the last batch */
    bool has_before; /* the position of an earlier registration, whose blocks are forgotten */
    uint64_t before;

    /* A replay. */
    enum ki_replay_kind kind;
    uint64_t request; /* ask from here */
    bool holding;     /* the driver holds the live batch numbered trigger */
    uint64_t trigger, trigger_digest;
    double trigger_timestamp;
    bool gap_counted; /* the held batch's gap is in the statistics already */
    bool answered;    /* this request has brought a batch */
    uint32_t attempts;
    uint32_t turnovers;     /* restarts that this replay has shown */
    uint64_t replay_end_ns; /* however it goes, it is given up then */
    uint64_t deadline_ns;   /* of the request, or of the wait before the next; 0 when LIVE */

    uint64_t idle_at_ns;     /* LIVE: ask once more what was published by then; 0: never */
    uint64_t heal_at_ns;     /* LIVE: try to become whole then; 0: never */
    uint64_t cooldown_to_ns; /* no replays until then */

    /* Phantoms: blocks whose removal was lost. */
    bool lossy;            /* batches were lost since the blocks were last known to be real */
    uint64_t resync_at_ns; /* lossy: forget the blocks then; 0: never */
    uint64_t unexplained;  /* removals of blocks that we hadn't, since then or without a loss */
    uint64_t explained;    /* removals of others; halved together with these */
    uint64_t excused;      /* so many such removals are to come: we forgot the blocks */

    /* Two publishers behind one endpoint look like restarts in alternation. */
    bool merged;
    uint64_t replaced; /* position before the last restart */
    uint32_t watch;    /* so many batches are checked for the old numbering going on */
    uint32_t strikes;

    struct ki_stream_stats stats;
};

void ki_stream_init(struct ki_stream *s, const struct ki_stream_opts *opts);

/** The state behind the stream came from a peer, up to and with this batch. */
void ki_stream_seed(struct ki_stream *s, uint64_t sequence, double timestamp, bool partial);
/** The same without a position: whatever comes first continues it. */
void ki_stream_seed_cursorless(struct ki_stream *s);
/** Note that the state from a peer lacks something: the stream is partial, and asks for all batches again
 * as soon as reading starts. Call it before ki_stream_start. */
void ki_stream_seed_torn(struct ki_stream *s);
/** Note the position of an earlier registration, whose blocks are gone. */
void ki_stream_remember(struct ki_stream *s, uint64_t sequence);

/** Reading starts. */
void ki_stream_start(struct ki_stream *s, uint64_t now_ns);

/**
 * A connection to the publisher is there, everything that earlier ones brought has been offered,
 * and no replay runs. @anew: made after the state behind the stream was; another process may
 * answer. Asks the replay service at once: subscribing takes a moment, and what is published before
 * is lost. Returns steps.
 */
unsigned ki_stream_connected(struct ki_stream *s, bool anew, uint64_t now_ns);
/** A connection was made, and nothing is said yet of what came over it: replays may be asked for, and
 * the next attempt of one that runs is due, as it may wait for a process that is gone. */
void ki_stream_reachable(struct ki_stream *s, uint64_t now_ns);
/** The connection is lost: nobody is asked before there is another one. */
void ki_stream_disconnected(struct ki_stream *s);

/** A live batch; @reconnected: over another connection than the one before. Returns steps. */
unsigned ki_stream_live(struct ki_stream *s, const struct ki_batch_id *id, bool reconnected,
                        uint64_t now_ns);
/** A batch of the replay; its end marker (may purge too); an answer that makes no sense. */
unsigned ki_stream_replayed(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns);
unsigned ki_stream_replay_end(struct ki_stream *s, uint64_t now_ns);
unsigned ki_stream_replay_failed(struct ki_stream *s, uint64_t now_ns);

/** When ki_stream_tick wants to be called; 0: never. */
uint64_t ki_stream_deadline(const struct ki_stream *s);
unsigned ki_stream_tick(struct ki_stream *s, uint64_t now_ns);

/** Whether the view may lack blocks or have too many: batches are missing, or nothing has shown yet
 * that the publisher is still the process whose batches were applied. */
bool ki_stream_is_partial(const struct ki_stream *s);

/** Evidence in an applied batch about the index's view, over all ranks of the stream. */
struct ki_evidence {
    uint64_t held;     /* blocks that the stream's ranks have in the index now, parked ones too */
    uint64_t capacity; /* that the engine has room for; 0: unknown */
    uint64_t unknown;  /* blocks it removed from the device that we hadn't */
    uint64_t removed;  /* ... and that we had */
    bool full;         /* the index had no room */
};

/**
 * Judge whether too many of the blocks can't be real. A lost batch loses removals, and nothing ever
 * tells of those; but it loses about as many stores, whose removal later names blocks that we
 * haven't. In a view that lost nothing such removals contradict it, and make it partial. Call after
 * each applied batch. Returns KI_STEP_PURGE (forget the blocks and learn them anew; the view is
 * partial) or 0.
 */
unsigned ki_stream_judge(struct ki_stream *s, const struct ki_evidence *e, uint64_t now_ns);

/** The driver lost the contents of a batch (undecodable, out of memory). */
void ki_stream_mark_partial(struct ki_stream *s, uint64_t now_ns);
/** All that the stream brought was cleared by the publisher itself: nothing is missing any more. */
void ki_stream_mark_whole(struct ki_stream *s);

/** The driver lost both connections (paused): a held batch, if any, is forgotten. */
void ki_stream_detach(struct ki_stream *s);

#endif
