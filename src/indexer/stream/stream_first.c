// SPDX-License-Identifier: Apache-2.0
/*
 * Streams that begin with batch 1: find out whether there was a batch 0. Most publishers begin with 0;
 * the Mooncake master and llm-d's simulator begin with 1. Both look alike where batch 0 was published
 * before the subscription, and the replay service's ring has lost it. Until it is known, the view is
 * partial.
 *
 * Timestamps in milliseconds are the Mooncake master's. Of others the ring tells, which has begun with 1
 * when it was first asked:
 *
 *   1. Ask for batches beyond number B. None: the ring ended with B or before.
 *   2. Once a batch beyond B has come live, ask for all, and look at the first one, F.
 *
 * A ring that had lost batch 0 was full, so of B batches at most, and each further one loses another.
 * F = 1, or a ring that has become longer than B, therefore shows that it had lost nothing.
 */
#include "indexer/stream/stream_impl.h"

/* Smallest timestamp that can't be in seconds: they would be in the year 5138. */
#define MILLISECONDS 1e11

#define TRIES 4         /* requests for batches beyond the position itself */
#define FIRST_MARGIN 64 /* batches; a busy publisher's newest ones come while it answers */
#define MAX_GROWTH 8    /* times that the margin grows fourfold */
#define RECHECK 10      /* pauses between attempts, to wait for a far bound */

static void forget_proof(struct kh_stream *s)
{
    s->proof_bound = s->proof_at_ns = 0;
    s->proof_misses = 0;
    if (s->first == KI_FIRST_UNPROVABLE)
        s->first = KI_FIRST_OPEN;
}

/* Return the number of batches behind the position that the next request leaves out. */
static uint64_t margin_of(const struct kh_stream *s)
{
    return s->proof_misses < TRIES ? 0 : (uint64_t)FIRST_MARGIN << 2 * (s->proof_misses - TRIES);
}

void ki_stream_note_first(struct kh_stream *s, const struct ki_batch_id *id)
{
    ki_stream_set(s, KI_BECAUSE(BATCH_0),
                  id->sequence == 1 && s->first != KI_FIRST_ZERO && !ki_stream_has_blocks(s) &&
                      ki_stream_time(id) < MILLISECONDS);
    s->one_digest = id->digest;
    forget_proof(s);
}

void ki_stream_end_doubt_of_first(struct kh_stream *s)
{
    s->reasons &= ~KI_BECAUSE(BATCH_0);
    forget_proof(s);
}

void ki_stream_plan_proof(struct kh_stream *s, uint64_t now_ns)
{
    bool waits = s->proof_bound && s->position <= s->proof_bound;

    if (!ki_stream_has(s, KI_BECAUSE(BATCH_0)) || !s->opts.can_replay ||
        s->state != KI_STREAM_LIVE || s->proof_at_ns || s->first == KI_FIRST_UNPROVABLE ||
        ki_stream_has(s, KI_BECAUSE(TWO_PUBLISHERS)) || ki_stream_must_verify(s))
        return;
    if (!waits)
        s->proof_at_ns = now_ns + s->opts.retry_delay_ns;
    else if (margin_of(s)) /* the publisher may have become slower: ask for a nearer bound */
        s->proof_at_ns = now_ns + RECHECK * s->opts.retry_delay_ns;
}

unsigned ki_stream_begin_proof(struct kh_stream *s, uint64_t now_ns)
{
    s->proof_at_ns = 0;
    if (!ki_stream_has(s, KI_BECAUSE(BATCH_0)) || ki_stream_must_verify(s))
        return 0;
    if (now_ns < s->cooldown_to_ns) {
        s->proof_at_ns = s->cooldown_to_ns;
        return 0;
    }
    if (s->proof_bound && s->position <= s->proof_bound) {
        s->proof_bound = 0;
        s->proof_misses = 0;
    }
    s->proof_end = s->position;
    return ki_stream_begin_replay(s, KI_REPLAY_PROOF,
                                  s->proof_bound ? 0 : s->position + 1 + margin_of(s), now_ns);
}

/*
 * Return true when the ring, which begins with @id, had lost nothing when it began with 1. Batches that
 * came live behind the request don't count as the ring's: it may have answered before it had them, and
 * a full ring would look longer than it is.
 */
static bool is_proof(const struct kh_stream *s, const struct ki_batch_id *id)
{
    if (id->sequence > s->proof_end)
        return false;
    if (id->sequence == 1)
        return id->digest == s->one_digest;
    return s->proof_end - id->sequence + 1 > s->proof_bound;
}

/* End a proof that shows nothing. A batch 0 may have come meanwhile. */
static void end_unproved(struct kh_stream *s)
{
    if (s->first != KI_FIRST_ZERO)
        s->first = KI_FIRST_UNPROVABLE;
}

/* Return true when another process has answered: its connection's batches are still to come. */
static bool is_of_another(const struct kh_stream *s, const struct ki_batch_id *id)
{
    enum ki_known known = ki_stream_lookup(s, id);

    if (id->sequence == 1)
        return id->digest != s->one_digest;
    if (known != KI_UNKNOWN || id->sequence > s->position || !ki_stream_has_times(s, id))
        return known == KI_OTHER;
    return ki_stream_time(id) > s->timestamp;
}

unsigned ki_stream_proof_batch(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns)
{
    if (ki_stream_must_verify(s))
        return KI_STEP_DROP | ki_stream_finish_replay(s);
    if (is_of_another(
            s, id)) /* or the clock was set back: later its first batch may be an older one */
        return KI_STEP_DROP | ki_stream_proof_failed(s, now_ns);
    if (s->request)
        s->proof_misses += s->proof_misses < TRIES + MAX_GROWTH;
    else if (is_proof(s, id))
        ki_stream_end_doubt_of_first(s);
    else
        end_unproved(s); /* the ring was full, or has lost batch 1 since */
    return KI_STEP_DROP | ki_stream_finish_replay(s);
}

unsigned ki_stream_proof_end(struct kh_stream *s)
{
    if (s->request && !ki_stream_must_verify(s))
        s->proof_bound = s->request - 1;
    else if (!s->request)
        end_unproved(s); /* an empty ring: another process's */
    return ki_stream_finish_replay(s);
}

unsigned ki_stream_proof_failed(struct kh_stream *s, uint64_t now_ns)
{
    s->proof_at_ns = now_ns + s->opts.cooldown_ns;
    return ki_stream_finish_replay(s);
}
