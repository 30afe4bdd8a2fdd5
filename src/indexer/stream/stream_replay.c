// SPDX-License-Identifier: Apache-2.0
/*
 * Replays: ask for missed batches, check which process answers, apply what it sends. The answer to
 * a request shows, by its first batch,
 *
 *     batch P itself            the known process: what follows fills the gap
 *     another batch called P    another process: a restart, and everything is asked for
 *     a number behind P + 1     the ring has lost what is between: its blocks can't be known
 *     an end, without a batch   from P on: another process, as each keeps its last batch
 *     nothing                   asked again, max_attempts times; then the stream goes on without
 *
 * Invariant: a replay ends at the held batch, at the end marker, or by giving up, however slowly
 * its answers come (replay_end_ns). Each returns RESUME, so the held batch is offered again.
 */
#include "indexer/stream/stream_impl.h"

/* limit of a replay in time-outs, even if messages keep trickling in */
#define REPLAY_TIMEOUTS 60

/* -- requests ---------------------------------------------------------------------------------- */

bool ki_stream_awaits_connection(const struct kh_stream *s)
{
    return s->opts.can_replay && (!s->connected || s->contact != KI_CONTACT_MET);
}

bool ki_stream_may_replay(const struct kh_stream *s, uint64_t now_ns)
{
    return s->opts.can_replay && !ki_stream_awaits_connection(s) && now_ns >= s->cooldown_to_ns;
}

static unsigned request(struct kh_stream *s, uint64_t from, uint64_t now_ns)
{
    s->state = KI_STREAM_REPLAYING;
    s->request = from;
    s->answer = KI_ANSWER_NONE;
    s->deadline_ns = now_ns + s->opts.timeout_ns;
    s->stats.replays++;
    return KI_STEP_REQUEST;
}

unsigned ki_stream_begin_replay(struct kh_stream *s, enum ki_replay_kind kind, uint64_t from,
                                uint64_t now_ns)
{
    if (s->state == KI_STREAM_LIVE) {
        s->replay_end_ns = now_ns + REPLAY_TIMEOUTS * s->opts.timeout_ns;
        s->turnovers = 0;
    }
    s->kind = kind;
    s->attempts = 1;
    if (kind == KI_REPLAY_HEAL) {
        s->heal_at_ns = 0; /* only once */
        s->torn = false;
    }
    return request(s, from, now_ns);
}

/* Return true when the connection that offers a batch has brought the position. */
static bool follows(const struct kh_stream *s)
{
    return ki_stream_has_position(s) && s->live_next && s->live_next == s->position + 1 &&
           !ki_stream_must_verify(s) && !ki_stream_has(s, KI_BECAUSE(TWO_PUBLISHERS));
}

unsigned ki_stream_hold(struct kh_stream *s, const struct ki_batch_id *id)
{
    s->trigger = id->sequence;
    s->trigger_digest = id->digest;
    s->trigger_timestamp = ki_stream_time(id);
    s->held = follows(s) ? KI_HELD_NEXT : KI_HELD_ANY;
    s->behind = true;
    return KI_STEP_HOLD;
}

static unsigned end_replay(struct kh_stream *s)
{
    s->state = KI_STREAM_LIVE;
    s->held = KI_HELD_NONE;
    s->deadline_ns = 0;
    return KI_STEP_RESUME;
}

unsigned ki_stream_break_off_replay(struct kh_stream *s)
{
    if (s->kind == KI_REPLAY_HEAL)
        s->heal_at_ns = s->deadline_ns; /* it has brought nothing */
    return end_replay(s);
}

unsigned ki_stream_finish_replay(struct kh_stream *s)
{
    s->behind = s->held != KI_HELD_NONE; /* until that batch is offered again */
    s->dropped_next = 0;
    return end_replay(s);
}

static unsigned give_up(struct kh_stream *s, uint64_t now_ns)
{
    if (ki_stream_awaits_connection(s)) /* nobody has failed */
        return ki_stream_break_off_replay(s);
    s->stats.failed_replays++;
    /* A held batch shows which batches are missing. Without one the end is unknown. */
    if (!s->held && ki_stream_has_position(s))
        ki_stream_be_partial(s, KI_BECAUSE(UNANSWERED));
    if (!s->held)
        ki_stream_not_empty(s); /* that was an earlier answer */
    s->cooldown_to_ns = now_ns + s->opts.cooldown_ns;
    if (ki_stream_has(s, KI_REASONS_LOST))
        s->heal_at_ns = s->cooldown_to_ns;
    else if (!s->held)
        s->idle_at_ns = s->cooldown_to_ns;
    return ki_stream_finish_replay(s);
}

/* Ask again. The answer comes over a new connection, so check again which process sent it. */
unsigned ki_stream_retry(struct kh_stream *s, uint64_t now_ns)
{
    if (ki_stream_awaits_connection(s))
        return ki_stream_break_off_replay(s);
    if (s->kind == KI_REPLAY_PROOF)
        return ki_stream_proof_failed(s, now_ns);
    if (s->attempts >= s->opts.max_attempts)
        return give_up(s, now_ns);
    s->attempts++;
    if (!ki_stream_has_position(s) || s->kind == KI_REPLAY_HEAL)
        return request(s, 0, now_ns);
    s->kind = KI_REPLAY_VERIFY;
    return request(s, s->position, now_ns);
}

static unsigned retry_later(struct kh_stream *s, uint64_t now_ns)
{
    if (s->attempts >= s->opts.max_attempts)
        return give_up(s, now_ns);
    s->state = KI_STREAM_WAITING;
    s->deadline_ns = now_ns + s->opts.retry_delay_ns;
    return 0;
}

/* -- answers ----------------------------------------------------------------------------------- */

/* Return true when the batch with the position's number is the batch of the position. */
static bool is_position(const struct kh_stream *s, const struct ki_batch_id *id)
{
    enum ki_known known = ki_stream_lookup(s, id);

    if (known != KI_UNKNOWN)
        return known == KI_SAME;
    if (!ki_stream_has_times(s, id))
        return true; /* without a timestamp: believe the number */
    return ki_stream_time(id) == s->timestamp;
}

/* Return true when all batches before the held one have arrived. */
static bool reached_trigger(const struct kh_stream *s)
{
    if (!s->held || s->ahead)
        return false;
    return ki_stream_has_position(s) ? s->position + 1 >= s->trigger : s->trigger == 0;
}

static unsigned replay_restarted(struct kh_stream *s, uint64_t now_ns)
{
    unsigned steps = KI_STEP_DROP | ki_stream_restarted(s);

    if (reached_trigger(s))
        return steps | ki_stream_finish_replay(s);
    if (ki_stream_awaits_connection(s)) /* a held batch is of the process before */
        return steps | ki_stream_break_off_replay(s);
    if (++s->turnovers > s->opts.max_attempts) {
        ki_stream_be_partial(s, KI_BECAUSE(UNANSWERED));
        return steps | give_up(s, now_ns);
    }
    return steps | ki_stream_begin_replay(s, KI_REPLAY_START, 0, now_ns);
}

/* Handle a hole in a replay: the publisher's ring begins later than asked, or a reply was lost. */
static unsigned replay_hole(struct kh_stream *s, const struct ki_batch_id *id, uint64_t expected,
                            bool first, uint64_t now_ns)
{
    unsigned steps = 0;

    if (first) {
        s->stats.overruns++;
        steps = KI_STEP_PURGE;
        ki_stream_be_sound(s);
    } else {
        ki_stream_lose(s, now_ns);
    }
    s->stats.missed += id->sequence - expected;
    ki_stream_now_partial(s, KI_BECAUSE(MISSED), now_ns);
    return steps;
}

/* Begin to heal a partial view; only a whole one replaces it. */
static unsigned replay_heal(struct kh_stream *s, const struct ki_batch_id *id)
{
    if (id->sequence > ki_stream_first_max(s))
        return KI_STEP_DROP | ki_stream_finish_replay(s);
    ki_stream_forget(s);
    s->kind = KI_REPLAY_START;
    return KI_STEP_PURGE | KI_STEP_RESET;
}

/*
 * Return true when @id contradicts the held batch: an earlier number with a later time, or the same
 * number with other contents. Another process is publishing then.
 */
static bool contradicts_trigger(const struct kh_stream *s, const struct ki_batch_id *id)
{
    if (!s->held || s->ahead || id->sequence > s->trigger)
        return false;
    if (id->sequence == s->trigger)
        return id->digest != s->trigger_digest;
    return s->trigger_timestamp != 0 && ki_stream_time(id) > s->trigger_timestamp;
}

/*
 * Return true when a later time of an earlier number is no contradiction: the engine's clock was set
 * back. The held batch is of the known process then, and so is the service that answers.
 */
static bool was_clock_set_back(const struct kh_stream *s, const struct ki_batch_id *id)
{
    return s->held == KI_HELD_NEXT && id->sequence < s->trigger &&
           (s->answer == KI_ANSWER_POSITION ||
            (ki_stream_has_position(s) && id->sequence <= s->position));
}

/* Return true when asking for the position shows whether the clock was set back. */
static bool may_confirm(const struct kh_stream *s, const struct ki_batch_id *id)
{
    return s->held == KI_HELD_NEXT && id->sequence < s->trigger && ki_stream_has_position(s) &&
           s->kind == KI_REPLAY_GAP && s->answer == KI_ANSWER_NONE;
}

/*
 * Handle a ring that begins behind even the held batch: the batches in our socket are older than
 * the ring.
 */
static unsigned replay_beyond(struct kh_stream *s, const struct ki_batch_id *id)
{
    ki_stream_accept(s, id);
    s->stats.replayed++;
    s->ahead = true;
    return ki_stream_finish_replay(s);
}

/*
 * Handle a batch from before the expected one: the process that answers is the one of the position,
 * or another.
 */
static unsigned replay_known(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    bool at_position = id->sequence == s->position;

    if (at_position ? !is_position(s, id) : ki_stream_lookup(s, id) == KI_OTHER)
        return replay_restarted(s, now_ns);
    if (!at_position || s->kind != KI_REPLAY_VERIFY)
        return KI_STEP_DROP;
    s->kind = KI_REPLAY_GAP;
    s->answer = KI_ANSWER_POSITION;
    s->reasons &= ~(KI_BECAUSE(RECONNECTED) | (s->base == KI_BASE_PEER ? KI_BECAUSE(UNPROVED) : 0));
    s->base = KI_BASE_OWN;
    return reached_trigger(s) ? KI_STEP_DROP | ki_stream_finish_replay(s) : KI_STEP_DROP;
}

/* Apply the batch with the @expected number, or one behind it. */
static unsigned replay_next(struct kh_stream *s, const struct ki_batch_id *id, uint64_t expected,
                            uint64_t now_ns)
{
    bool first = s->answer == KI_ANSWER_NONE;
    unsigned steps = 0;

    if (s->kind == KI_REPLAY_VERIFY) {
        s->kind = KI_REPLAY_GAP;
        /* The ring no longer has the batch at position, which would have identified the process. */
        ki_stream_now_partial(s, KI_BECAUSE(UNANSWERED), now_ns);
    }
    if (id->sequence > expected &&
        (ki_stream_has_position(s) || id->sequence > ki_stream_first_max(s))) {
        if (!first && s->attempts < s->opts.max_attempts)
            return KI_STEP_DROP | ki_stream_retry(s, now_ns);
        steps = replay_hole(s, id, expected, first, now_ns);
    } else {
        s->attempts = 1; /* progress */
    }
    if (first)
        s->answer = KI_ANSWER_BATCHES;
    s->behind |= s->kind == KI_REPLAY_START;
    if (s->held && id->sequence > s->trigger)
        return steps | KI_STEP_APPLY | replay_beyond(s, id);
    ki_stream_accept(s, id);
    s->stats.replayed++;
    steps |= KI_STEP_APPLY;
    if (reached_trigger(s))
        steps |= ki_stream_finish_replay(s);
    return steps;
}

static unsigned replayed(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    unsigned steps = 0;
    uint64_t expected;

    if (s->state != KI_STREAM_REPLAYING)
        return KI_STEP_DROP;
    if (s->kind == KI_REPLAY_PROOF && id->sequence == 0 && !s->request)
        s->kind = KI_REPLAY_HEAL; /* so there is a batch 0 */
    if (s->kind == KI_REPLAY_PROOF)
        return ki_stream_proof_batch(s, id, now_ns);
    if (now_ns >= s->replay_end_ns)
        return KI_STEP_DROP | give_up(s, now_ns);
    s->deadline_ns = now_ns + s->opts.timeout_ns;
    if (s->kind == KI_REPLAY_HEAL) {
        steps = replay_heal(s, id);
        if (steps & KI_STEP_DROP)
            return steps;
    }
    if (contradicts_trigger(s, id) && !was_clock_set_back(s, id)) {
        if (may_confirm(s, id)) {
            s->kind = KI_REPLAY_VERIFY;
            return KI_STEP_DROP | request(s, s->position, now_ns);
        }
        s->ahead = true;
        if (ki_stream_has_position(s))
            return replay_restarted(s, now_ns);
    }
    expected = ki_stream_has_position(s) ? s->position + 1 : 0;
    if (id->sequence < expected)
        return replay_known(s, id, now_ns);
    return steps | replay_next(s, id, expected, now_ns);
}

unsigned ki_stream_replayed(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    unsigned steps = replayed(s, id, now_ns);

    ki_stream_plan_proof(s, now_ns);
    return steps;
}

static unsigned replay_end(struct kh_stream *s, uint64_t now_ns)
{
    if (s->state != KI_STREAM_REPLAYING)
        return 0;
    if (s->kind == KI_REPLAY_PROOF)
        return ki_stream_proof_end(s);
    /*
     * A process keeps its last batch, and a ROUTER that drops replies never drops the first. A
     * process without batches from position on is another one.
     */
    if (!s->held && s->kind == KI_REPLAY_VERIFY && s->answer == KI_ANSWER_NONE)
        return replay_restarted(s, now_ns);
    if (s->kind == KI_REPLAY_START && !s->held && !ki_stream_has_blocks(s)) {
        s->base = KI_BASE_EMPTY;
        s->reasons &= ~KI_REASONS_LOST; /* of nothing, nothing is missing */
    }
    /* The last replies were lost; or the batch was of a process before the first one known. */
    if (!s->held && ki_stream_has_position(s) && s->dropped_next > s->position + 1)
        return retry_later(s, now_ns);
    if (!s->held || s->ahead || s->kind == KI_REPLAY_HEAL)
        return ki_stream_finish_replay(s);
    /* The held batch's publisher hasn't reached the peer's position: another process. */
    if (s->kind == KI_REPLAY_VERIFY && s->base == KI_BASE_PEER && s->trigger <= s->position)
        return replay_restarted(s, now_ns);
    return retry_later(s, now_ns);
}

unsigned ki_stream_replay_end(struct kh_stream *s, uint64_t now_ns)
{
    unsigned steps = replay_end(s, now_ns);

    ki_stream_plan_proof(s, now_ns);
    return steps;
}

/* The publisher's state is as unknown as without an answer. */
unsigned ki_stream_replay_failed(struct kh_stream *s, uint64_t now_ns)
{
    if (s->state != KI_STREAM_REPLAYING)
        return 0;
    return retry_later(s, now_ns);
}
