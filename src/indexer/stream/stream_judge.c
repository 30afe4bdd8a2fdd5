// SPDX-License-Identifier: Apache-2.0
/*
 * Phantoms: blocks that the index holds although the engine has removed them, in a batch that was
 * lost. Nothing ever tells which blocks these are. Their number shows: a full cache removes a block
 * for each one that it stores, so the lost batches removed about as many as they stored. Each block
 * stored there is removed one day, and the index lacks it. Such removals are counted, and beyond a
 * bound all blocks are forgotten and learned anew.
 */
#include "indexer/stream/stream_impl.h"

/* Tolerated phantoms: this many, or a part of the held blocks (or of the capacity). */
#define PHANTOMS 64
#define PHANTOM_PART 8
#define EXPLAINED 4096 /* removals that halve the weight of earlier ones */
#define CAPACITY_PART 16

static bool are_too_many(const struct kh_stream *s, const struct ki_evidence *e)
{
    uint64_t part = e->held / PHANTOM_PART;

    if (e->full)
        return true;
    if (e->capacity && e->held > e->capacity + e->capacity / CAPACITY_PART + PHANTOMS)
        return true;
    return s->unexplained > (part > PHANTOMS ? part : PHANTOMS);
}

/*
 * Prepare for the index to forget the blocks. The engine still has them, but for the phantoms, and
 * will announce their removals one day. @excused is the number of such removals: they find no block
 * in the index, and are no evidence of a loss.
 */
static void forget_blocks(struct kh_stream *s, uint64_t excused)
{
    excused += s->excused;
    ki_stream_be_sound(s);
    s->excused = excused;
    ki_stream_be_partial(s, KI_BECAUSE(PHANTOMS));
}

/*
 * Forget the blocks and learn them anew. The engine still has most of them, and will remove them.
 */
static unsigned resync(struct kh_stream *s, uint64_t held)
{
    uint64_t phantoms = s->unexplained < held ? s->unexplained : held;

    forget_blocks(s, held - phantoms);
    s->stats.resyncs++;
    return KI_STEP_PURGE;
}

bool ki_stream_expect_loss(struct kh_stream *s, uint64_t held)
{
    if (!ki_stream_has_blocks(s)) /* it has brought nothing that could be missing */
        return false;
    s->excused += held;
    ki_stream_be_partial(s, KI_BECAUSE(TAKEN));
    return true;
}

void ki_stream_learn_anew(struct kh_stream *s, uint64_t held, uint64_t now_ns)
{
    if (!ki_stream_expect_loss(s, held))
        return;
    s->torn = true;
    if (s->opts.can_replay)
        s->heal_at_ns = now_ns;
}

/*
 * Return true when removals of blocks that the index lacked contradict a view without losses.
 * Engines make such removals now and then: only many in a short time count.
 */
static bool contradicts(struct kh_stream *s, const struct ki_evidence *e)
{
    s->explained += e->removed;
    if (s->explained >= EXPLAINED) {
        s->explained /= 2;
        s->unexplained /= 2;
    }
    return s->unexplained > 0;
}

unsigned ki_stream_judge(struct kh_stream *s, const struct ki_evidence *e, uint64_t now_ns)
{
    uint64_t known = e->unknown < s->excused ? e->unknown : s->excused;

    s->excused -= known;
    if (!s->lossy &&
        (s->base == KI_BASE_PEER || ki_stream_has(s, KI_REASONS_LOST | KI_BECAUSE(BATCH_0))))
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
        ki_stream_now_partial(s, KI_BECAUSE(PHANTOMS), now_ns);
    }
    return resync(s, e->held);
}
