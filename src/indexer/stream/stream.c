// SPDX-License-Identifier: Apache-2.0
/*
 * State of a stream: its position, what is lost, restarts, connections, and timers. The other files
 * of stream_impl.h decide about batches and replays by it.
 *
 *     NONE       nothing is known                 ─┐
 *     EMPTY      the replay service has no batch   ├─► OWN, with the first batch that is applied
 *     UNPLACED   a peer's blocks, no position      │
 *     PEER       a peer's position                ─┘
 *     a restart or --forget-after leads back to NONE
 *
 * Invariants:
 * - An OWN position is that of the last batch applied, and its digest is in the window.
 * - A reason of KI_REASONS_LOST ends with a whole view only (docs/exactness.md). `losses` rises
 *   with each, so that a clear published before it doesn't end it.
 * - Steps that forget blocks are returned where the state changes. The driver purges under the same
 *   hold of the lock: no batch is applied in between, on blocks of another process.
 */
#include "indexer/stream/stream_impl.h"

#include <math.h>
#include <string.h>

void ki_stream_init(struct kh_stream *s, const struct ki_stream_opts *opts)
{
    memset(s, 0, sizeof(*s));
    s->opts = *opts;
}

void ki_stream_seed(struct kh_stream *s, uint64_t sequence, double timestamp, bool partial)
{
    s->base = KI_BASE_PEER;
    s->position = sequence;
    /* The number comes from another program's dump: a NaN would make every comparison false. */
    s->timestamp = isfinite(timestamp) && timestamp > 0 ? timestamp : 0;
    ki_stream_set(s, KI_BECAUSE(PEER), partial);
    s->contact = KI_CONTACT_ADRIFT;
}

void ki_stream_seed_cursorless(struct kh_stream *s)
{
    if (!ki_stream_has_position(s))
        s->base = KI_BASE_UNPLACED;
}

void ki_stream_seed_torn(struct kh_stream *s)
{
    s->torn = true;
    s->reasons |= KI_BECAUSE(TORN);
    ki_stream_seed_cursorless(s); /* what came from elsewhere goes when a whole view comes */
}

void ki_stream_remember(struct kh_stream *s, uint64_t sequence)
{
    s->before_next = sequence + 1;
}

/* Further losses don't move resync_at_ns: with some every hour, it would never come. */
void ki_stream_lose(struct kh_stream *s, uint64_t now_ns)
{
    if (s->lossy)
        return;
    s->lossy = true;
    s->resync_at_ns = s->opts.resync_ns ? now_ns + s->opts.resync_ns : 0;
}

void ki_stream_be_sound(struct kh_stream *s)
{
    s->lossy = false;
    s->resync_at_ns = 0;
    s->unexplained = s->explained = s->excused = 0;
}

void ki_stream_start(struct kh_stream *s, uint64_t now_ns)
{
    if (ki_stream_has(s, KI_REASONS_LOST)) /* the peer's view was partial */
        ki_stream_lose(s, now_ns);
    if (s->opts.can_replay &&
        ki_stream_has(s, KI_REASONS_LOST)) /* a replay may bring a better view than the peer's */
        s->heal_at_ns = s->torn ? now_ns : now_ns + s->opts.cooldown_ns;
}

ki_reasons ki_stream_reasons(const struct kh_stream *s)
{
    ki_reasons reasons = s->reasons;

    if (s->base == KI_BASE_NONE || s->base == KI_BASE_UNPLACED)
        reasons |= KI_BECAUSE(NOTHING_YET);
    if (s->contact == KI_CONTACT_STALE && ki_stream_has_position(s))
        reasons |= KI_BECAUSE(STALE);
    /* A replica that goes on at the position lacks them, too, and ends that by itself: KI_FACT_BEHIND. */
    if (s->behind)
        reasons |= KI_BECAUSE(REPLAYING);
    return reasons;
}

void ki_stream_lose_contents(struct kh_stream *s, uint64_t now_ns)
{
    ki_stream_be_partial(s, KI_BECAUSE(UNREADABLE));
    ki_stream_lose(s, now_ns);
}

void ki_stream_mark_whole(struct kh_stream *s)
{
    s->healed |= ki_reasons_told(ki_stream_reasons(s), KI_TOLD_ALWAYS) != 0;
    /* Beside a second publisher, the next batch may be of the other one and contradict this. */
    if (!ki_stream_has(s, KI_BECAUSE(TWO_PUBLISHERS)))
        s->reasons &= ~KI_REASONS_LOST;
    s->reasons &= ~KI_BECAUSE(UNPROVED);
    s->heal_at_ns = 0;
    ki_stream_end_doubt_of_first(s);
    ki_stream_be_sound(s);
}

/* The clear that ended a loss can't have ended it in a tier or rank that nobody knew of. */
void ki_stream_note_more(struct kh_stream *s, uint64_t now_ns)
{
    if (!s->healed)
        return;
    s->healed = false;
    ki_stream_now_partial(s, KI_BECAUSE(UNCLEARED), now_ns);
    ki_stream_lose(s, now_ns);
}

/* -- what is known of a batch number ----------------------------------------------------------- */

/*
 * A number that comes again with the same digest is a duplicate. With another one it is a batch of
 * another process, or of a second publisher: numbers alone can't tell.
 */
enum ki_known ki_stream_lookup(const struct kh_stream *s, const struct ki_batch_id *id)
{
    uint32_t at = id->sequence % KI_STREAM_WINDOW;

    if (!s->window[at].next || s->window[at].next != id->sequence + 1)
        return KI_UNKNOWN;
    return s->window[at].digest == id->digest ? KI_SAME : KI_OTHER;
}

double ki_stream_time(const struct ki_batch_id *id)
{
    return isfinite(id->timestamp) && id->timestamp > 0 ? id->timestamp : 0;
}

bool ki_stream_has_times(const struct kh_stream *s, const struct ki_batch_id *id)
{
    return s->timestamp != 0 && ki_stream_time(id) != 0;
}

uint64_t ki_stream_first_max(const struct kh_stream *s)
{
    return s->first == KI_FIRST_ZERO ? 0 : FIRST_SEQUENCE_MAX;
}

void ki_stream_accept(struct kh_stream *s, const struct ki_batch_id *id)
{
    uint32_t at = id->sequence % KI_STREAM_WINDOW;

    if (id->sequence == 0)
        s->first = KI_FIRST_ZERO;
    if (!ki_stream_has_position(s))
        ki_stream_note_first(s, id);
    if (!ki_stream_has_blocks(s) && id->sequence == 0)
        s->reasons &=
            ~KI_REASONS_LOST; /* nothing is missing before batch 0; a 1 may come behind a lost one */
    s->window[at].next = id->sequence + 1;
    s->window[at].digest = id->digest;
    s->base = KI_BASE_OWN;
    s->position = id->sequence;
    if (ki_stream_time(id) != 0)
        s->timestamp = ki_stream_time(id);
    s->reasons &= ~KI_BECAUSE(RECONNECTED);
    s->before_next = 0;
    if (s->watch && --s->watch == 0)
        s->strikes = 0;
}

void ki_stream_now_partial(struct kh_stream *s, ki_reasons why, uint64_t now_ns)
{
    ki_stream_be_partial(s, why);
    if (s->opts.can_replay && !s->heal_at_ns)
        s->heal_at_ns = now_ns + s->opts.cooldown_ns;
}

/* -- restarts ---------------------------------------------------------------------------------- */

void ki_stream_forget(struct kh_stream *s)
{
    memset(s->window, 0, sizeof(s->window));
    s->base = KI_BASE_NONE;
    s->timestamp = 0;
    s->reasons &= ~(KI_REASONS_LOST | KI_BECAUSE(RECONNECTED) | KI_BECAUSE(UNPROVED));
    s->gap_counted = s->healed = s->torn = s->behind = false;
    s->dropped_next = 0;
    ki_stream_end_doubt_of_first(s); /* that was the process before */
    s->heal_at_ns = 0;
    ki_stream_be_sound(s);
}

/* The connection may lead to another process, so failures of the old one don't count. */
void ki_stream_meet(struct kh_stream *s)
{
    s->live_next = 0;
    ki_stream_not_empty(s);
    s->reasons &= ~KI_BECAUSE(TWO_PUBLISHERS);
    s->strikes = s->watch = 0;
    s->cooldown_to_ns = 0;
    if (ki_stream_has_blocks(s))
        s->reasons |= KI_BECAUSE(RECONNECTED);
    s->losses++;
}

/* The publisher is another process than the one whose batches were applied; its cache is empty. */
unsigned ki_stream_restarted(struct kh_stream *s)
{
    s->stats.restarts++;
    s->replaced = s->position;
    s->watch = MERGE_WATCH;
    s->live_next = 0;
    s->cooldown_to_ns = 0; /* the old process didn't answer; the new one may */
    ki_stream_forget(s);
    return KI_STEP_PURGE | KI_STEP_RESET;
}

/* -- connections ------------------------------------------------------------------------------- */

/*
 * Ask for the batches published before the subscription arrived, and learn which process sent them.
 */
static unsigned ask(struct kh_stream *s, uint64_t now_ns)
{
    if (ki_stream_has_position(s) && !s->torn)
        return ki_stream_begin_replay(s, KI_REPLAY_VERIFY, s->position, now_ns);
    return ki_stream_begin_replay(s, ki_stream_has_blocks(s) ? KI_REPLAY_HEAL : KI_REPLAY_START, 0,
                                  now_ns);
}

unsigned ki_stream_connected(struct kh_stream *s, bool anew, uint64_t now_ns)
{
    s->connected = s->met = true;
    s->absent_ns = 0;
    s->contact = KI_CONTACT_MET;
    if (anew)
        ki_stream_meet(s);
    if (!s->opts.can_replay)
        return 0;
    /* The answer may be older than the subscription: ask again unless a batch comes. */
    s->idle_at_ns = s->opts.idle_ns ? now_ns + s->opts.idle_ns : 0;
    return ask(s, now_ns);
}

/*
 * The connection is gone, or new and not yet reported. A stale view stays so. Before the first connection
 * there is no process but a peer's.
 */
static void be_adrift(struct kh_stream *s)
{
    if (!s->met && !ki_stream_has_position(s))
        s->contact = KI_CONTACT_MET;
    else if (s->contact == KI_CONTACT_MET)
        s->contact = KI_CONTACT_ADRIFT;
}

void ki_stream_reachable(struct kh_stream *s, uint64_t now_ns)
{
    be_adrift(s);
    s->connected = s->met = true;
    s->absent_ns = 0;
    if (s->state != KI_STREAM_LIVE)
        s->deadline_ns = now_ns;
}

void ki_stream_disconnected(struct kh_stream *s, uint64_t since_ns)
{
    s->connected = false;
    if (!s->absent_ns)
        s->absent_ns = since_ns;
    be_adrift(s);
}

void ki_stream_detach(struct kh_stream *s)
{
    if (s->state != KI_STREAM_LIVE)
        ki_stream_break_off_replay(s);
    s->gap_counted = s->connected = false;
    s->live_next = 0;
    be_adrift(s);
    if (ki_stream_has_position(s))
        s->reasons |= KI_BECAUSE(RECONNECTED);
}

/* -- absence ----------------------------------------------------------------------------------- */

/* Return the earlier of two times, of which 0 is none. */
static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a && (!b || a < b) ? a : b;
}

/* Nothing tells any more whether the engine still has the blocks, or lives. */
static unsigned forget_absent(struct kh_stream *s)
{
    uint64_t position = s->position;
    bool had = ki_stream_has_position(s);

    /* The same process never sends its first numbers again. */
    if (s->base == KI_BASE_UNPLACED || position == 0)
        s->first = KI_FIRST_ZERO;
    ki_stream_detach(s);
    ki_stream_forget(s);
    be_adrift(s);
    if (had)
        ki_stream_remember(s, position);
    s->stats.absences++;
    return KI_STEP_PURGE | KI_STEP_RESET;
}

void ki_stream_may_be_back(struct kh_stream *s, uint64_t now_ns)
{
    if (!s->connected && s->absent_ns && now_ns > s->absent_ns + s->opts.stale_ns)
        s->absent_ns = now_ns - s->opts.stale_ns;
}

unsigned ki_stream_tick_absence(struct kh_stream *s, uint64_t now_ns)
{
    uint64_t gone_ns;

    if (s->connected)
        return 0;
    if (!s->absent_ns)
        s->absent_ns = now_ns;
    gone_ns = now_ns - s->absent_ns;
    if (s->opts.stale_ns && gone_ns >= s->opts.stale_ns) {
        ki_stream_not_empty(s);
        if (s->contact == KI_CONTACT_ADRIFT)
            s->contact = KI_CONTACT_STALE;
    }
    if (!s->opts.forget_ns || gone_ns < s->opts.forget_ns || !ki_stream_has_blocks(s))
        return 0;
    return forget_absent(s);
}

bool ki_stream_is_absent(const struct kh_stream *s, uint64_t now_ns)
{
    return !s->connected && s->absent_ns && s->opts.stale_ns &&
           now_ns >= s->absent_ns + s->opts.stale_ns;
}

uint64_t ki_stream_absence_deadline(const struct kh_stream *s)
{
    bool has = ki_stream_has_blocks(s);
    bool fresh = s->base == KI_BASE_EMPTY || s->contact == KI_CONTACT_ADRIFT;

    if (s->connected || !s->absent_ns)
        return 0;
    if (s->opts.stale_ns && fresh)
        return earlier(s->absent_ns + s->opts.stale_ns,
                       s->opts.forget_ns && has ? s->absent_ns + s->opts.forget_ns : 0);
    return s->opts.forget_ns && has ? s->absent_ns + s->opts.forget_ns : 0;
}

/* -- time -------------------------------------------------------------------------------------- */

uint64_t ki_stream_deadline(const struct kh_stream *s)
{
    if (s->state != KI_STREAM_LIVE)
        return s->deadline_ns;
    if (ki_stream_awaits_connection(s))
        return 0;
    return earlier(s->proof_at_ns, earlier(s->idle_at_ns, s->heal_at_ns));
}

/*
 * Ask what is due, one replay at a time. Without a connection nobody would answer: a request would
 * only use up its attempts.
 */
static unsigned tick_live(struct kh_stream *s, uint64_t now_ns)
{
    if (ki_stream_awaits_connection(s))
        return 0;
    if (s->idle_at_ns && now_ns >= s->idle_at_ns) {
        s->idle_at_ns = 0;
        return ask(s, now_ns);
    }
    if (s->heal_at_ns && now_ns >= s->heal_at_ns) {
        s->heal_at_ns = 0;
        if (ki_stream_has(s, KI_REASONS_LOST) && !ki_stream_has(s, KI_BECAUSE(TWO_PUBLISHERS)))
            return ki_stream_begin_replay(
                s, ki_stream_has_blocks(s) ? KI_REPLAY_HEAL : KI_REPLAY_START, 0, now_ns);
    }
    if (s->proof_at_ns && now_ns >= s->proof_at_ns)
        return ki_stream_begin_proof(s, now_ns);
    return 0;
}

unsigned ki_stream_tick(struct kh_stream *s, uint64_t now_ns)
{
    if (s->state == KI_STREAM_LIVE)
        return tick_live(s, now_ns);
    if (now_ns < s->deadline_ns)
        return 0;
    return ki_stream_retry(s, now_ns);
}
