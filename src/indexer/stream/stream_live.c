// SPDX-License-Identifier: Apache-2.0
/*
 * Live batches: apply, drop or hold each one; find gaps, restarts and merged publishers.
 * docs/kv-indexer-streams.md has the table of all cases. With a position P, number n says:
 *
 *     n = P + 1   the next one, or another process's: over a new connection the service is asked
 *     n > P + 1   a gap: held until a replay has brought what is between
 *     n <= P      a duplicate, or a new count (restart): the digest decides, else the connection,
 *                 else the timestamps, else how far live numbers fall back
 *
 * Invariants: batches are decided in the order of their coming, and none behind a held one before
 * that one. Where somebody can be asked, no batch is applied on blocks that may be of another
 * process; where nobody can, the view is partial with a name for it.
 */
#include "indexer/stream/stream_impl.h"

/* Number of times the old numbering must go on after a restart to prove two publishers. */
#define MERGE_STRIKES 4

static void accept_gap(struct kh_stream *s, const struct ki_batch_id *id, uint64_t expected,
                       uint64_t now_ns)
{
    if (!s->gap_counted)
        s->stats.gaps++;
    s->stats.missed += id->sequence - expected;
    ki_stream_now_partial(s, KI_BECAUSE(MISSED), now_ns);
    if (ki_stream_has_position(s)) /* without a position the index has no blocks to lose */
        ki_stream_lose(s, now_ns);
    ki_stream_accept(s, id);
}

/*
 * The connection is new, or the position is a peer's and the time before our connection is unknown.
 */
bool ki_stream_must_verify(const struct kh_stream *s)
{
    return s->base == KI_BASE_PEER || ki_stream_has(s, KI_BECAUSE(RECONNECTED));
}

/* Drop a batch that nobody can place before the next connection: its replay brings the batch again. */
static unsigned leave_to_replay(struct kh_stream *s, const struct ki_batch_id *id)
{
    s->behind = true;
    if (id->sequence >= s->dropped_next)
        s->dropped_next = id->sequence + 1;
    return KI_STEP_DROP;
}

void ki_stream_dropped(struct kh_stream *s, uint64_t next, uint64_t now_ns)
{
    if (!s->opts.can_replay) {
        ki_stream_be_partial(s, KI_BECAUSE(MISSED));
        if (ki_stream_has_blocks(s))
            ki_stream_lose(s, now_ns);
        return;
    }
    s->behind = true;
    if (next > s->dropped_next)
        s->dropped_next = next;
    s->idle_at_ns = now_ns; /* ask now, or once the replay under way has ended */
}

/*
 * Handle the first batch behind state without a position. Batch 0 is the beginning of a process, so
 * that everything before it belongs to another one. Nothing tells which batches precede a later one.
 */
static unsigned live_first_of_cursorless(struct kh_stream *s, const struct ki_batch_id *id,
                                         uint64_t now_ns)
{
    unsigned steps = 0;

    if (id->sequence == 0) {
        ki_stream_forget(s);
        steps = KI_STEP_PURGE | KI_STEP_RESET;
    } else {
        s->reasons |= KI_BECAUSE(UNPROVED);
        if (s->opts.can_replay)
            ki_stream_now_partial(s, KI_BECAUSE(UNANSWERED), now_ns);
    }
    ki_stream_accept(s, id);
    return steps | KI_STEP_APPLY;
}

static unsigned live_first(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    uint64_t expected = s->before_next <= id->sequence ? s->before_next : 0;

    if (id->sequence > 0 && ki_stream_awaits_connection(s))
        return leave_to_replay(s, id);
    if (s->base == KI_BASE_UNPLACED)
        return live_first_of_cursorless(s, id, now_ns);
    if (id->sequence == 0) {
        ki_stream_accept(s, id);
        return KI_STEP_APPLY;
    }
    if (ki_stream_may_replay(s, now_ns)) {
        if (id->sequence > ki_stream_first_max(s)) {
            s->stats.gaps += !s->gap_counted && id->sequence > expected;
            s->gap_counted = true;
        }
        return ki_stream_hold(s, id) | ki_stream_begin_replay(s, KI_REPLAY_START, 0, now_ns);
    }
    if (id->sequence <= ki_stream_first_max(s)) {
        ki_stream_accept(s, id);
        /* A replay can bring a missing 0 later. */
        if (s->opts.can_replay && ki_stream_has(s, KI_BECAUSE(BATCH_0)))
            ki_stream_now_partial(s, KI_BECAUSE(UNANSWERED), now_ns);
        return KI_STEP_APPLY;
    }
    s->gap_counted |= id->sequence == expected;
    accept_gap(s, id, expected, now_ns);
    return KI_STEP_APPLY;
}

static unsigned live_gap(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    bool verify = ki_stream_must_verify(s);

    if (ki_stream_awaits_connection(s))
        return leave_to_replay(s, id);
    if (!ki_stream_may_replay(s, now_ns)) {
        accept_gap(s, id, s->position + 1, now_ns);
        return KI_STEP_APPLY;
    }
    s->stats.gaps += !s->gap_counted;
    s->gap_counted = true;
    if (verify)
        return ki_stream_hold(s, id) |
               ki_stream_begin_replay(s, KI_REPLAY_VERIFY, s->position, now_ns);
    return ki_stream_hold(s, id) |
           ki_stream_begin_replay(s, KI_REPLAY_GAP, s->position + 1, now_ns);
}

static unsigned live_next(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    if (ki_stream_must_verify(s) && ki_stream_awaits_connection(s))
        return leave_to_replay(s, id);
    /* The next number may be another process's: ask the replay service, if there is one. */
    if (ki_stream_must_verify(s) && ki_stream_may_replay(s, now_ns))
        return ki_stream_hold(s, id) |
               ki_stream_begin_replay(s, KI_REPLAY_VERIFY, s->position, now_ns);
    /* No answer: go on, and call the view partial until a replay has shown that it is whole. */
    if (ki_stream_must_verify(s) && s->opts.can_replay)
        ki_stream_now_partial(s, KI_BECAUSE(UNANSWERED), now_ns);
    if (ki_stream_has(s, KI_BECAUSE(RECONNECTED)) && !s->opts.can_replay && !s->opts.one_process)
        s->reasons |= KI_BECAUSE(UNPROVED);
    s->behind = false;
    ki_stream_accept(s, id);
    return KI_STEP_APPLY;
}

/*
 * Judge without timestamps. A publisher counts upwards and repeats nothing, so rising live numbers
 * are a backlog, however long, that a replay or a peer's dump has overtaken. Another count is
 * certain only when the numbers fall behind what the live socket itself has brought.
 */
static bool falls_back(const struct kh_stream *s, const struct ki_batch_id *id)
{
    if (!s->live_next || id->sequence >= s->live_next - 1)
        return false;
    return id->sequence <= FIRST_SEQUENCE_MAX ||
           s->live_next - 1 - id->sequence >= KI_STREAM_WINDOW;
}

/* Decide whether a number at or below our position is a repetition or the start of a new count. */
static bool is_restart(const struct kh_stream *s, const struct ki_batch_id *id)
{
    enum ki_known known = ki_stream_lookup(s, id);

    if (known != KI_UNKNOWN)
        return known == KI_OTHER;
    if (ki_stream_has(s, KI_BECAUSE(RECONNECTED)))
        return true; /* a publisher repeats no batch over a new connection */
    if (ki_stream_has_times(s, id))
        return ki_stream_time(id) > s->timestamp;
    /*
     * A batch 0 begins a count, of the old process or a new one: only later batches can be known.
     */
    if (s->base == KI_BASE_PEER && id->sequence == 0)
        return true;
    return falls_back(s, id);
}

/* Return true for a batch of a backlog that a replay has overtaken: a number of the old process. */
static bool is_overtaken(const struct kh_stream *s, const struct ki_batch_id *id)
{
    return ki_stream_lookup(s, id) == KI_SAME ||
           (id->sequence <= s->position && ki_stream_has_times(s, id) &&
            ki_stream_time(id) < s->timestamp);
}

/*
 * Return true when the numbering from before the last "restart" goes on: there are two publishers.
 */
static bool is_merged(struct kh_stream *s, const struct ki_batch_id *id)
{
    if (s->watch && !is_overtaken(s, id) && id->sequence == s->replaced + 1 &&
        id->sequence != s->position + 1 && id->sequence != s->live_next) {
        s->replaced = id->sequence;
        s->watch = MERGE_WATCH;
        ki_stream_set(s, KI_BECAUSE(TWO_PUBLISHERS), ++s->strikes >= MERGE_STRIKES);
    }
    return ki_stream_has(s, KI_BECAUSE(TWO_PUBLISHERS));
}

/* Handle a batch of several interleaved publishers, whose numbers don't tell what is missing. */
static unsigned live_merged(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    if (ki_stream_lookup(s, id) == KI_SAME) {
        s->stats.duplicates++;
        return KI_STEP_DROP;
    }
    ki_stream_be_partial(s, KI_BECAUSE(MISSED));
    ki_stream_lose(s, now_ns);
    ki_stream_accept(s, id);
    return KI_STEP_APPLY;
}

/*
 * Note a batch 0 that is dropped. It is missing where the stream began with 1: the replay service's
 * ring had lost it, and what came later can't be undone.
 */
static void note_late_zero(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    if (id->sequence != 0)
        return;
    s->first = KI_FIRST_ZERO;
    if (!ki_stream_has(s, KI_BECAUSE(BATCH_0)))
        return;
    ki_stream_end_doubt_of_first(s);
    s->stats.gaps++;
    s->stats.missed++;
    ki_stream_now_partial(s, KI_BECAUSE(MISSED), now_ns);
}

/* Drop a live batch at or before our position: the known process sent it. */
static unsigned live_repeated(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    note_late_zero(s, id, now_ns);
    if (ki_stream_lookup(s, id) == KI_SAME) {
        s->reasons &= ~KI_BECAUSE(RECONNECTED);
        s->base = KI_BASE_OWN;
    }
    if (ki_stream_has_times(s, id) && s->base == KI_BASE_PEER) {
        s->reasons &= ~KI_BECAUSE(UNPROVED);
        s->base = KI_BASE_OWN;
    }
    s->stats.duplicates++;
    return KI_STEP_DROP;
}

static unsigned live_decide(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    unsigned steps = 0;

    if (ki_stream_has_position(s) && is_merged(s, id))
        return live_merged(s, id, now_ns);
    if (ki_stream_has_position(s) && id->sequence <= s->position) {
        if (!is_restart(s, id)) {
            if (s->base == KI_BASE_PEER && !ki_stream_has_times(s, id) &&
                ki_stream_may_replay(s, now_ns))
                return ki_stream_hold(s, id) |
                       ki_stream_begin_replay(s, KI_REPLAY_VERIFY, s->position, now_ns);
            return live_repeated(s, id, now_ns);
        }
        steps = ki_stream_restarted(s);
    }
    if (!ki_stream_has_position(s))
        return steps | live_first(s, id, now_ns);
    if (id->sequence == s->position + 1)
        return live_next(s, id, now_ns);
    return live_gap(s, id, now_ns);
}

/*
 * Return true for a live batch that a replay has overtaken. The batch is of the old process when
 * the replay came from a newer one, or it is older than the publisher's ring. Without timestamps,
 * rising numbers decide.
 */
static bool is_left_behind(struct kh_stream *s, const struct ki_batch_id *id, bool reconnected)
{
    if (!s->ahead)
        return false;
    if (reconnected)
        s->ahead = false;
    else if (ki_stream_has_times(s, id))
        s->ahead = ki_stream_time(id) < s->timestamp;
    else
        s->ahead = id->sequence <= s->position && id->sequence >= s->live_next;
    return s->ahead;
}

/*
 * Handle a live batch during a replay that no live batch caused. A batch that continues the stream
 * ends the replay. Any other batch waits for it.
 */
static unsigned live_while_replaying(struct kh_stream *s, const struct ki_batch_id *id,
                                     uint64_t now_ns)
{
    if (s->kind == KI_REPLAY_HEAL)
        return ki_stream_hold(s, id);
    if (ki_stream_has_position(s) ? id->sequence == s->position + 1 && !ki_stream_must_verify(s)
                                  : id->sequence == 0) {
        ki_stream_accept(s, id);
        return s->kind == KI_REPLAY_PROOF ? KI_STEP_APPLY
                                          : KI_STEP_APPLY | ki_stream_finish_replay(s);
    }
    if (ki_stream_has_position(s) && id->sequence <= s->position && !is_restart(s, id))
        return live_repeated(s, id, now_ns);
    return ki_stream_hold(s, id);
}

static unsigned live(struct kh_stream *s, const struct ki_batch_id *id, bool reconnected,
                     uint64_t now_ns)
{
    unsigned steps;

    if (is_left_behind(s, id, reconnected)) {
        note_late_zero(s, id, now_ns);
        s->stats.duplicates++;
        return KI_STEP_DROP;
    }
    if (s->state != KI_STREAM_LIVE)
        return live_while_replaying(s, id, now_ns);
    steps = live_decide(s, id, now_ns);
    if (steps & (KI_STEP_APPLY | KI_STEP_DROP))
        s->gap_counted = false;
    return steps;
}

unsigned ki_stream_live(struct kh_stream *s, const struct ki_batch_id *id, bool reconnected,
                        uint64_t now_ns)
{
    unsigned steps;

    s->connected |= reconnected || !s->met;
    if (s->connected)
        s->absent_ns = 0;
    if (!s->met || reconnected || (s->base == KI_BASE_PEER && s->connected))
        s->contact = KI_CONTACT_MET;
    s->met |= s->connected;
    s->idle_at_ns = 0; /* the subscription has arrived */
    if (reconnected)
        ki_stream_meet(s);
    if (s->state == KI_STREAM_LIVE && !ki_stream_awaits_connection(s))
        s->behind = false; /* this is what was held, or a connection's first: judged below */
    steps = live(s, id, reconnected, now_ns);
    if (!(steps & (KI_STEP_APPLY | KI_STEP_DROP)))
        return steps; /* held, and offered again later */
    s->live_next = id->sequence + 1;
    ki_stream_plan_proof(s, now_ns);
    return steps;
}
