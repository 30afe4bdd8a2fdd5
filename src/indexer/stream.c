// SPDX-License-Identifier: Apache-2.0
#include "indexer/stream.h"

#include <math.h>
#include <string.h>

/*
 * vLLM, SGLang and TensorRT-LLM number their first batch 0, the Mooncake master 1. Whether a 1 that
 * comes first is a beginning only a replay can show; where there is none, it is taken for one.
 */
#define FIRST_SEQUENCE_MAX 1

/* limit of a replay, in time-outs, even if messages keep dripping in */
#define REPLAY_TIMEOUTS 60

/* Batches after a restart in which the old numbering may still appear, and how often it may. */
#define MERGE_WATCH 256
#define MERGE_STRIKES 4

/* Phantoms that are tolerated: this many, or a part of the held blocks (or of the capacity). */
#define PHANTOMS 64
#define PHANTOM_PART 8
#define EXPLAINED 4096 /* removals that halve the weight of those before them */
#define CAPACITY_PART 16

void ki_stream_init(struct ki_stream *s, const struct ki_stream_opts *opts)
{
    memset(s, 0, sizeof(*s));
    s->opts = *opts;
}

void ki_stream_seed(struct ki_stream *s, uint64_t sequence, double timestamp, bool partial)
{
    s->has_position = true;
    s->position = sequence;
    s->timestamp = isfinite(timestamp) && timestamp > 0 ? timestamp : 0;
    s->partial = partial;
    s->seeded = true;
}

void ki_stream_seed_cursorless(struct ki_stream *s)
{
    s->cursorless = true;
}

void ki_stream_seed_torn(struct ki_stream *s)
{
    s->partial = s->torn = true;
}

void ki_stream_remember(struct ki_stream *s, uint64_t sequence)
{
    s->has_before = true;
    s->before = sequence;
}

/* Note lost batches: they may have removed blocks that the index still holds. */
static void lose(struct ki_stream *s, uint64_t now_ns)
{
    if (s->lossy)
        return;
    s->lossy = true;
    s->resync_at_ns = s->opts.resync_ns ? now_ns + s->opts.resync_ns : 0;
}

static void be_sound(struct ki_stream *s)
{
    s->lossy = false;
    s->resync_at_ns = 0;
    s->unexplained = s->explained = s->excused = 0;
}

void ki_stream_start(struct ki_stream *s, uint64_t now_ns)
{
    if (s->partial) /* as the peer's view was */
        lose(s, now_ns);
    if (s->opts.can_replay && s->partial) /* the peer's view was, too: a replay may do better */
        s->heal_at_ns = s->torn ? now_ns : now_ns + s->opts.cooldown_ns;
}

bool ki_stream_is_partial(const struct ki_stream *s)
{
    return s->partial || s->unverified || s->doubtful;
}

void ki_stream_mark_partial(struct ki_stream *s, uint64_t now_ns)
{
    s->partial = true;
    lose(s, now_ns);
}

void ki_stream_mark_whole(struct ki_stream *s)
{
    if (!s->merged)
        s->partial = false;
    s->heal_at_ns = 0;
    be_sound(s);
}

/* -- what is known of a batch number ----------------------------------------------------------- */

enum known { UNKNOWN, SAME, OTHER };

static enum known window_lookup(const struct ki_stream *s, const struct ki_batch_id *id)
{
    uint32_t at = id->sequence % KI_STREAM_WINDOW;

    if (!s->window[at].used || s->window[at].sequence != id->sequence)
        return UNKNOWN;
    return s->window[at].digest == id->digest ? SAME : OTHER;
}

static double timestamp_of(const struct ki_batch_id *id)
{
    return isfinite(id->timestamp) && id->timestamp > 0 ? id->timestamp : 0;
}

static bool has_times(const struct ki_stream *s, const struct ki_batch_id *id)
{
    return s->timestamp != 0 && timestamp_of(id) != 0;
}

/* True when the batch with the number of our position is the one that brought us there. */
static bool is_position(const struct ki_stream *s, const struct ki_batch_id *id)
{
    enum known known = window_lookup(s, id);

    if (known != UNKNOWN)
        return known == SAME;
    if (!has_times(s, id))
        return true; /* without a timestamp: believe the number */
    return timestamp_of(id) == s->timestamp;
}

static void accept(struct ki_stream *s, const struct ki_batch_id *id)
{
    uint32_t at = id->sequence % KI_STREAM_WINDOW;

    s->window[at].used = true;
    s->window[at].sequence = id->sequence;
    s->window[at].digest = id->digest;
    s->has_position = true;
    s->position = id->sequence;
    if (timestamp_of(id) != 0)
        s->timestamp = timestamp_of(id);
    s->unverified = s->cursorless = s->seeded = s->has_before = false;
    if (s->watch && --s->watch == 0)
        s->strikes = 0;
}

/* Mark the view as partial. Where there is a replay service, try later to get a whole one. */
static void now_partial(struct ki_stream *s, uint64_t now_ns)
{
    s->partial = true;
    if (s->opts.can_replay && !s->heal_at_ns)
        s->heal_at_ns = now_ns + s->opts.cooldown_ns;
}

static void accept_gap(struct ki_stream *s, const struct ki_batch_id *id, uint64_t expected,
                       uint64_t now_ns)
{
    if (!s->gap_counted)
        s->stats.gaps++;
    s->stats.missed += id->sequence - expected;
    now_partial(s, now_ns);
    if (s->has_position) /* without a position there is nothing to remove */
        lose(s, now_ns);
    accept(s, id);
}

/* -- replays ----------------------------------------------------------------------------------- */

static bool may_replay(const struct ki_stream *s, uint64_t now_ns)
{
    return s->opts.can_replay && s->connected && now_ns >= s->cooldown_to_ns;
}

static unsigned request(struct ki_stream *s, uint64_t from, uint64_t now_ns)
{
    s->state = KI_STREAM_REPLAYING;
    s->request = from;
    s->answered = false;
    s->deadline_ns = now_ns + s->opts.timeout_ns;
    s->stats.replays++;
    return KI_STEP_REQUEST;
}

static unsigned begin(struct ki_stream *s, enum ki_replay_kind kind, uint64_t from, uint64_t now_ns)
{
    if (s->state == KI_STREAM_LIVE) {
        s->replay_end_ns = now_ns + REPLAY_TIMEOUTS * s->opts.timeout_ns;
        s->turnovers = 0;
    }
    s->kind = kind;
    s->attempts = 1;
    if (kind == KI_REPLAY_HEAL) {
        s->heal_at_ns = 0; /* once only */
        s->torn = false;
    }
    return request(s, from, now_ns);
}

static unsigned hold(struct ki_stream *s, const struct ki_batch_id *id)
{
    s->holding = true;
    s->trigger = id->sequence;
    s->trigger_digest = id->digest;
    s->trigger_timestamp = timestamp_of(id);
    return KI_STEP_HOLD;
}

static unsigned finish(struct ki_stream *s)
{
    s->state = KI_STREAM_LIVE;
    s->holding = false;
    s->deadline_ns = 0;
    return KI_STEP_RESUME;
}

static unsigned give_up(struct ki_stream *s, uint64_t now_ns)
{
    s->stats.failed_replays++;
    /* A held batch shows itself which batches are missing. Without one the end is unknown. */
    if (!s->holding && s->has_position)
        s->partial = true;
    s->cooldown_to_ns = now_ns + s->opts.cooldown_ns;
    if (s->partial)
        s->heal_at_ns = s->cooldown_to_ns;
    else if (!s->holding)
        s->idle_at_ns = s->cooldown_to_ns;
    return finish(s);
}

/* Ask again. The answer comes over a new connection, so check again which process sent it. */
static unsigned retry(struct ki_stream *s, uint64_t now_ns)
{
    if (s->attempts >= s->opts.max_attempts)
        return give_up(s, now_ns);
    s->attempts++;
    if (!s->has_position || s->kind == KI_REPLAY_HEAL)
        return request(s, 0, now_ns);
    s->kind = KI_REPLAY_VERIFY;
    return request(s, s->position, now_ns);
}

static unsigned retry_later(struct ki_stream *s, uint64_t now_ns)
{
    if (s->attempts >= s->opts.max_attempts)
        return give_up(s, now_ns);
    s->state = KI_STREAM_WAITING;
    s->deadline_ns = now_ns + s->opts.retry_delay_ns;
    return 0;
}

/*
 * True when the position may belong to another process than the next batch. The connection is new,
 * or the position is a peer's and nothing is known of the time before our connection.
 */
static bool must_verify(const struct ki_stream *s)
{
    return s->unverified || s->seeded;
}

/* True when everything missed before the held batch has arrived. */
static bool reached_trigger(const struct ki_stream *s)
{
    if (!s->holding || s->ahead)
        return false;
    return s->has_position ? s->position + 1 >= s->trigger : s->trigger == 0;
}

/* -- restarts ---------------------------------------------------------------------------------- */

static void forget(struct ki_stream *s)
{
    memset(s->window, 0, sizeof(s->window));
    s->has_position = false;
    s->timestamp = 0;
    s->unverified = s->cursorless = s->seeded = s->partial = s->gap_counted = false;
    s->heal_at_ns = 0;
    be_sound(s);
}

/*
 * Take note of a new connection. It may lead to another process, so failures of the old one don't
 * count against it.
 */
static void meet(struct ki_stream *s)
{
    s->has_live = s->merged = false;
    s->strikes = s->watch = 0;
    s->cooldown_to_ns = 0;
    s->unverified |= s->has_position || s->cursorless;
}

/*
 * Start anew: the publisher is another process than the one whose batches were applied, and its
 * cache is empty.
 */
static unsigned restarted(struct ki_stream *s)
{
    s->stats.restarts++;
    s->replaced = s->position;
    s->watch = MERGE_WATCH;
    s->has_live = false;
    s->cooldown_to_ns = 0; /* it was the old process that didn't answer */
    forget(s);
    return KI_STEP_PURGE | KI_STEP_RESET;
}

/* -- live batches ------------------------------------------------------------------------------ */

static unsigned live_first(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    uint64_t expected = s->has_before && s->before < id->sequence ? s->before + 1 : 0;

    if (s->cursorless || id->sequence == 0) {
        accept(s, id);
        return KI_STEP_APPLY;
    }
    if (may_replay(s, now_ns)) {
        if (id->sequence > FIRST_SEQUENCE_MAX) {
            s->stats.gaps += !s->gap_counted && id->sequence > expected;
            s->gap_counted = true;
        }
        return hold(s, id) | begin(s, KI_REPLAY_START, 0, now_ns);
    }
    if (id->sequence <= FIRST_SEQUENCE_MAX) {
        accept(s, id);
        if (s->opts.can_replay) /* a 0 may be missing; a replay can bring it later */
            now_partial(s, now_ns);
        return KI_STEP_APPLY;
    }
    s->gap_counted |= id->sequence == expected;
    accept_gap(s, id, expected, now_ns);
    return KI_STEP_APPLY;
}

static unsigned live_gap(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    bool verify = must_verify(s);

    if (!may_replay(s, now_ns)) {
        accept_gap(s, id, s->position + 1, now_ns);
        return KI_STEP_APPLY;
    }
    s->stats.gaps += !s->gap_counted;
    s->gap_counted = true;
    if (verify)
        return hold(s, id) | begin(s, KI_REPLAY_VERIFY, s->position, now_ns);
    return hold(s, id) | begin(s, KI_REPLAY_GAP, s->position + 1, now_ns);
}

static unsigned live_next(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    /* The next number may be another process's: ask the replay service, if there is one. */
    if (must_verify(s) && may_replay(s, now_ns))
        return hold(s, id) | begin(s, KI_REPLAY_VERIFY, s->position, now_ns);
    /* No answer: go on, and call the view partial until a replay has shown that it is whole. */
    if (must_verify(s) && s->opts.can_replay)
        now_partial(s, now_ns);
    accept(s, id);
    return KI_STEP_APPLY;
}

/*
 * Without timestamps: a publisher counts upwards and repeats nothing, so live numbers that still
 * rise are a backlog that a replay or a peer's dump has overtaken, however long it is. Only where
 * they fall behind what the live socket itself has brought is it another count.
 */
static bool falls_back(const struct ki_stream *s, const struct ki_batch_id *id)
{
    if (!s->has_live || id->sequence >= s->last_live)
        return false;
    return id->sequence <= FIRST_SEQUENCE_MAX || s->last_live - id->sequence >= KI_STREAM_WINDOW;
}

/* Decide whether a number at or below our position is a repetition or the start of a new count. */
static bool is_restart(const struct ki_stream *s, const struct ki_batch_id *id)
{
    enum known known = window_lookup(s, id);

    if (known != UNKNOWN)
        return known == OTHER;
    if (s->unverified)
        return true; /* a publisher repeats nothing to a new connection */
    if (has_times(s, id))
        return timestamp_of(id) > s->timestamp;
    /*
     * A batch 0 is the beginning of a count, of the old process or a new one: what follows is all
     * that can be known.
     */
    if (s->seeded && id->sequence == 0)
        return true;
    return falls_back(s, id);
}

/* True for a backlog that a replay has overtaken: numbers of the old process. */
static bool is_overtaken(const struct ki_stream *s, const struct ki_batch_id *id)
{
    return window_lookup(s, id) == SAME ||
           (id->sequence <= s->position && has_times(s, id) && timestamp_of(id) < s->timestamp);
}

/* True when the numbering from before the last "restart" goes on: there are two publishers. */
static bool is_merged(struct ki_stream *s, const struct ki_batch_id *id)
{
    if (s->watch && !is_overtaken(s, id) && id->sequence == s->replaced + 1 &&
        id->sequence != s->position + 1) {
        s->replaced = id->sequence;
        s->watch = MERGE_WATCH;
        s->merged = ++s->strikes >= MERGE_STRIKES;
    }
    return s->merged;
}

/* Handle a batch of several interleaved publishers, whose numbers don't tell what is missing. */
static unsigned live_merged(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    if (window_lookup(s, id) == SAME) {
        s->stats.duplicates++;
        return KI_STEP_DROP;
    }
    s->partial = true;
    lose(s, now_ns);
    accept(s, id);
    return KI_STEP_APPLY;
}

/*
 * Handle a live batch at or before our position: the process behind the connection is the known
 * one.
 */
static unsigned live_repeated(struct ki_stream *s, const struct ki_batch_id *id)
{
    if (window_lookup(s, id) == SAME)
        s->unverified = s->seeded = false;
    if (has_times(s, id))
        s->seeded = false;
    s->stats.duplicates++;
    return KI_STEP_DROP;
}

static unsigned live_decide(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    unsigned steps = 0;

    if (s->has_position && is_merged(s, id))
        return live_merged(s, id, now_ns);
    if (s->has_position && id->sequence <= s->position) {
        if (!is_restart(s, id)) {
            if (s->seeded && !has_times(s, id) && may_replay(s, now_ns))
                return hold(s, id) | begin(s, KI_REPLAY_VERIFY, s->position, now_ns);
            return live_repeated(s, id);
        }
        steps = restarted(s);
    }
    if (!s->has_position)
        return steps | live_first(s, id, now_ns);
    if (id->sequence == s->position + 1)
        return live_next(s, id, now_ns);
    return live_gap(s, id, now_ns);
}

/*
 * True for a live batch that a replay has overtaken: of the old process when the replay came from a
 * newer one, or older than the publisher's ring. Without timestamps rising numbers tell.
 */
static bool is_left_behind(struct ki_stream *s, const struct ki_batch_id *id, bool reconnected)
{
    if (!s->ahead)
        return false;
    if (reconnected)
        s->ahead = false;
    else if (has_times(s, id))
        s->ahead = timestamp_of(id) < s->timestamp;
    else
        s->ahead = id->sequence <= s->position && !(s->has_live && id->sequence <= s->last_live);
    return s->ahead;
}

/*
 * A replay that no live batch asked for is under way. What continues the stream ends it; else the
 * batch waits for it, as if it had asked.
 */
static unsigned live_while_replaying(struct ki_stream *s, const struct ki_batch_id *id)
{
    if (s->kind == KI_REPLAY_HEAL)
        return hold(s, id);
    if (s->has_position ? id->sequence == s->position + 1 && !must_verify(s) : id->sequence == 0) {
        accept(s, id);
        return KI_STEP_APPLY | finish(s);
    }
    if (s->has_position && id->sequence <= s->position && !is_restart(s, id))
        return live_repeated(s, id);
    return hold(s, id);
}

static unsigned live(struct ki_stream *s, const struct ki_batch_id *id, bool reconnected,
                     uint64_t now_ns)
{
    unsigned steps;

    if (is_left_behind(s, id, reconnected)) {
        s->stats.duplicates++;
        return KI_STEP_DROP;
    }
    if (s->state != KI_STREAM_LIVE)
        return live_while_replaying(s, id);
    steps = live_decide(s, id, now_ns);
    if (steps & (KI_STEP_APPLY | KI_STEP_DROP))
        s->gap_counted = false;
    return steps;
}

unsigned ki_stream_live(struct ki_stream *s, const struct ki_batch_id *id, bool reconnected,
                        uint64_t now_ns)
{
    unsigned steps;

    s->connected |= reconnected || !s->met;
    s->idle_at_ns = 0; /* the subscription has arrived */
    if (reconnected)
        meet(s);
    steps = live(s, id, reconnected, now_ns);
    if (!(steps & (KI_STEP_APPLY | KI_STEP_DROP)))
        return steps; /* it is held, and will be offered again */
    s->has_live = true;
    s->last_live = id->sequence;
    return steps;
}

/* -- replayed batches -------------------------------------------------------------------------- */

static unsigned replay_restarted(struct ki_stream *s, uint64_t now_ns)
{
    unsigned steps = KI_STEP_DROP | restarted(s);

    if (reached_trigger(s))
        return steps | finish(s);
    if (++s->turnovers > s->opts.max_attempts) {
        s->partial = true;
        return steps | give_up(s, now_ns);
    }
    return steps | begin(s, KI_REPLAY_START, 0, now_ns);
}

/* Handle a hole in a replay: the publisher's ring begins later than asked, or a reply was lost. */
static unsigned replay_hole(struct ki_stream *s, const struct ki_batch_id *id, uint64_t expected,
                            bool first, uint64_t now_ns)
{
    unsigned steps = 0;

    if (first) {
        s->stats.overruns++;
        steps = KI_STEP_PURGE;
        be_sound(s);
    } else {
        lose(s, now_ns);
    }
    s->stats.missed += id->sequence - expected;
    now_partial(s, now_ns);
    return steps;
}

/* Heal a partial view: replace it only by a whole one. */
static unsigned replay_heal(struct ki_stream *s, const struct ki_batch_id *id)
{
    if (id->sequence > FIRST_SEQUENCE_MAX)
        return KI_STEP_DROP | finish(s);
    forget(s);
    s->kind = KI_REPLAY_START;
    return KI_STEP_PURGE | KI_STEP_RESET;
}

/*
 * True when @id contradicts the held batch: an earlier number with a later time, or the same number
 * with other contents. Another process is publishing then.
 */
static bool contradicts_trigger(const struct ki_stream *s, const struct ki_batch_id *id)
{
    if (!s->holding || s->ahead || id->sequence > s->trigger)
        return false;
    if (id->sequence == s->trigger)
        return id->digest != s->trigger_digest;
    return s->trigger_timestamp != 0 && timestamp_of(id) > s->trigger_timestamp;
}

/*
 * Handle a ring that begins behind even the held batch: the batches in our socket are older than
 * the ring.
 */
static unsigned replay_beyond(struct ki_stream *s, const struct ki_batch_id *id)
{
    accept(s, id);
    s->stats.replayed++;
    s->ahead = true;
    return finish(s);
}

unsigned ki_stream_replayed(struct ki_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    bool first = !s->answered;
    unsigned steps = 0;
    uint64_t expected;

    if (s->state != KI_STREAM_REPLAYING)
        return KI_STEP_DROP;
    if (now_ns >= s->replay_end_ns)
        return KI_STEP_DROP | give_up(s, now_ns);
    s->deadline_ns = now_ns + s->opts.timeout_ns;
    if (s->kind == KI_REPLAY_HEAL) {
        steps = replay_heal(s, id);
        if (steps & KI_STEP_DROP)
            return steps;
    }
    if (contradicts_trigger(s, id)) {
        s->ahead = true;
        if (s->has_position)
            return replay_restarted(s, now_ns);
    }
    expected = s->has_position ? s->position + 1 : 0;
    if (id->sequence < expected) {
        bool other =
            id->sequence == s->position ? !is_position(s, id) : window_lookup(s, id) == OTHER;

        if (other)
            return replay_restarted(s, now_ns);
        if (id->sequence == s->position && s->kind == KI_REPLAY_VERIFY) {
            s->kind = KI_REPLAY_GAP;
            s->answered = true;
            s->unverified = s->seeded = false;
            if (reached_trigger(s))
                return KI_STEP_DROP | finish(s);
        }
        return KI_STEP_DROP;
    }
    if (s->kind == KI_REPLAY_VERIFY) {
        s->kind = KI_REPLAY_GAP;
        now_partial(s, now_ns); /* the batch that would have told which process this is has gone */
    }
    if (id->sequence > expected && (s->has_position || id->sequence > FIRST_SEQUENCE_MAX)) {
        if (!first && s->attempts < s->opts.max_attempts)
            return KI_STEP_DROP | retry(s, now_ns);
        steps |= replay_hole(s, id, expected, first, now_ns);
    } else {
        s->attempts = 1; /* progress */
    }
    s->answered = true;
    if (s->holding && id->sequence > s->trigger)
        return steps | KI_STEP_APPLY | replay_beyond(s, id);
    accept(s, id);
    s->stats.replayed++;
    steps |= KI_STEP_APPLY;
    if (reached_trigger(s))
        steps |= finish(s);
    return steps;
}

unsigned ki_stream_replay_end(struct ki_stream *s, uint64_t now_ns)
{
    if (s->state != KI_STREAM_REPLAYING)
        return 0;
    /* A process keeps its last batch, and a ROUTER that drops replies never drops the first: who
     * has none from position on is another process. */
    if (!s->holding && s->kind == KI_REPLAY_VERIFY && !s->answered)
        return replay_restarted(s, now_ns);
    if (!s->holding || s->ahead || s->kind == KI_REPLAY_HEAL)
        return finish(s);
    /* The held batch's publisher hasn't reached the peer's position: it is another process. */
    if (s->kind == KI_REPLAY_VERIFY && s->seeded && s->trigger <= s->position)
        return replay_restarted(s, now_ns);
    return retry_later(s, now_ns);
}

/* End a replay that failed: the publisher's state is as unknown as after no answer. */
unsigned ki_stream_replay_failed(struct ki_stream *s, uint64_t now_ns)
{
    if (s->state != KI_STREAM_REPLAYING)
        return 0;
    return retry_later(s, now_ns);
}

/* -- connections ------------------------------------------------------------------------------- */

/* Ask for the batches published before the subscription arrived, and learn which process sent
 * them. */
static unsigned ask(struct ki_stream *s, uint64_t now_ns)
{
    if (s->has_position && !s->torn)
        return begin(s, KI_REPLAY_VERIFY, s->position, now_ns);
    return begin(s, s->has_position || s->cursorless ? KI_REPLAY_HEAL : KI_REPLAY_START, 0, now_ns);
}

unsigned ki_stream_connected(struct ki_stream *s, bool anew, uint64_t now_ns)
{
    s->connected = s->met = true;
    if (anew)
        meet(s);
    if (!s->opts.can_replay)
        return 0;
    /* The answer may be older than the subscription: ask again unless a batch comes. */
    s->idle_at_ns = s->opts.idle_ns ? now_ns + s->opts.idle_ns : 0;
    return ask(s, now_ns);
}

void ki_stream_reachable(struct ki_stream *s, uint64_t now_ns)
{
    s->connected = s->met = true;
    if (s->state == KI_STREAM_LIVE)
        return;
    s->attempts = 0;
    s->deadline_ns = now_ns;
}

void ki_stream_disconnected(struct ki_stream *s)
{
    s->connected = false;
}

/* -- phantoms ---------------------------------------------------------------------------------- */

static bool are_too_many(const struct ki_stream *s, const struct ki_evidence *e)
{
    uint64_t part = e->held / PHANTOM_PART;

    if (e->full)
        return true;
    if (e->capacity && e->held > e->capacity + e->capacity / CAPACITY_PART + PHANTOMS)
        return true;
    return s->unexplained > (part > PHANTOMS ? part : PHANTOMS);
}

/* Learn anew. The engine still has most of the forgotten blocks, and will remove them. */
static unsigned resync(struct ki_stream *s, uint64_t held)
{
    uint64_t phantoms = s->unexplained < held ? s->unexplained : held;
    uint64_t excused = s->excused + held - phantoms;

    s->stats.resyncs++;
    be_sound(s);
    s->excused = excused;
    s->partial = true;
    return KI_STEP_PURGE;
}

/*
 * Whether removals of blocks that we hadn't contradict a view without losses. Engines have odd
 * moments: only many in a short time count.
 */
static bool contradicts(struct ki_stream *s, const struct ki_evidence *e)
{
    s->explained += e->removed;
    if (s->explained >= EXPLAINED) {
        s->explained /= 2;
        s->unexplained /= 2;
    }
    return s->unexplained > 0;
}

unsigned ki_stream_judge(struct ki_stream *s, const struct ki_evidence *e, uint64_t now_ns)
{
    uint64_t known = e->unknown < s->excused ? e->unknown : s->excused;

    s->excused -= known;
    if (!s->lossy && (s->partial || s->seeded))
        return 0;
    s->unexplained += e->unknown - known;
    if (!s->lossy && !contradicts(s, e))
        return 0;
    /* A replay is bringing a whole view, or may soon. */
    if (s->state != KI_STREAM_LIVE || !e->held)
        return 0;
    if (!are_too_many(s, e) && !(s->resync_at_ns && now_ns >= s->resync_at_ns))
        return 0;
    if (!s->lossy) {
        s->stats.contradictions++;
        now_partial(s, now_ns);
    }
    return resync(s, e->held);
}

/* -- time -------------------------------------------------------------------------------------- */

uint64_t ki_stream_deadline(const struct ki_stream *s)
{
    if (s->state != KI_STREAM_LIVE)
        return s->deadline_ns;
    if (!s->connected)
        return 0;
    if (s->idle_at_ns && s->heal_at_ns)
        return s->idle_at_ns < s->heal_at_ns ? s->idle_at_ns : s->heal_at_ns;
    return s->idle_at_ns ? s->idle_at_ns : s->heal_at_ns;
}

static unsigned tick_live(struct ki_stream *s, uint64_t now_ns)
{
    if (!s->connected)
        return 0;
    if (s->idle_at_ns && now_ns >= s->idle_at_ns) {
        s->idle_at_ns = 0;
        return ask(s, now_ns);
    }
    if (s->heal_at_ns && now_ns >= s->heal_at_ns) {
        s->heal_at_ns = 0;
        if (s->partial && !s->merged)
            return begin(s, s->has_position || s->cursorless ? KI_REPLAY_HEAL : KI_REPLAY_START, 0,
                         now_ns);
    }
    return 0;
}

unsigned ki_stream_tick(struct ki_stream *s, uint64_t now_ns)
{
    if (s->state == KI_STREAM_LIVE)
        return tick_live(s, now_ns);
    if (now_ns < s->deadline_ns)
        return 0;
    return retry(s, now_ns);
}

void ki_stream_detach(struct ki_stream *s)
{
    if (s->state != KI_STREAM_LIVE)
        finish(s);
    s->gap_counted = s->has_live = s->connected = false;
    if (s->has_position)
        s->unverified = true;
}
