// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the files of one event stream. Everybody else includes stream.h.
 *
 *   stream.c         state: position, digests, losses, restarts, connections, deadlines
 *   stream_first.c   whether a batch 0 preceded batch 1
 *   stream_live.c    live batches
 *   stream_replay.c  replays: requests and answers
 *   stream_judge.c   phantoms: blocks whose removal was lost
 */
#ifndef KV_INDEXER_STREAM_STREAM_IMPL_H
#define KV_INDEXER_STREAM_STREAM_IMPL_H

#include "indexer/stream/stream.h"

/*
 * Highest number of a publisher's first batch. vLLM, SGLang and TensorRT-LLM begin with 0, the
 * Mooncake master with 1. See stream_first.c.
 */
#define FIRST_SEQUENCE_MAX 1

/* Batches after a restart in which the stream watches for the old numbering to go on. */
#define MERGE_WATCH 256

/** Content of the window for a batch number: nothing, this digest, another digest. */
enum ki_known { KI_UNKNOWN, KI_SAME, KI_OTHER };

/* -- stream.c ---------------------------------------------------------------------------------- */

/** Look the number and digest of batch @id up in the window of recent batches. */
enum ki_known ki_stream_lookup(const struct kh_stream *s, const struct ki_batch_id *id);
/** Return the batch's timestamp in seconds, 0 for an unusable one. */
double ki_stream_time(const struct ki_batch_id *id);
/** Return true when both the position and batch @id have a timestamp. */
bool ki_stream_has_times(const struct kh_stream *s, const struct ki_batch_id *id);
/** Note that something may be missing from now on: @why is of KI_REASONS_LOST. */
static inline void ki_stream_be_partial(struct kh_stream *s, ki_reasons why)
{
    s->reasons |= why;
    s->losses++;
}
/** Set reasons, or take them away. */
static inline void ki_stream_set(struct kh_stream *s, ki_reasons reasons, bool on)
{
    s->reasons = on ? s->reasons | reasons : s->reasons & ~reasons;
}
/** Forget that the publisher's cache is empty. */
static inline void ki_stream_not_empty(struct kh_stream *s)
{
    if (s->base == KI_BASE_EMPTY)
        s->base = KI_BASE_NONE;
}
/** Return the highest number that the publisher's first batch may have. */
uint64_t ki_stream_first_max(const struct kh_stream *s);
/** Make batch @id the stream's position and remember its digest. */
void ki_stream_accept(struct kh_stream *s, const struct ki_batch_id *id);
/** Note lost batches: they may have removed blocks that the index still holds. */
void ki_stream_lose(struct kh_stream *s, uint64_t now_ns);
/** Note that all blocks of the index are real: forget losses and evidence of phantoms. */
void ki_stream_be_sound(struct kh_stream *s);
/** Mark the view as partial. Where there is a replay service, try later to get a whole one. */
void ki_stream_now_partial(struct kh_stream *s, ki_reasons why, uint64_t now_ns);
/** Forget the position and everything learned of the publisher's process. */
void ki_stream_forget(struct kh_stream *s);
/** Take note of a new connection, which may lead to another process. */
void ki_stream_meet(struct kh_stream *s);
/** Start anew after the publisher's restart. Returns the steps PURGE and RESET. */
unsigned ki_stream_restarted(struct kh_stream *s);

/* -- stream_first.c ---------------------------------------------------------------------------- */

/** Note the first batch that is applied. */
void ki_stream_note_first(struct kh_stream *s, const struct ki_batch_id *id);
/** Note that nothing depends on a batch 0 any more, or that it has come. */
void ki_stream_end_doubt_of_first(struct kh_stream *s);
/** Plan the next request, if batch 0 is in doubt. Call after anything that the stream was told. */
void ki_stream_plan_proof(struct kh_stream *s, uint64_t now_ns);
/** Ask what was planned. Returns steps. */
unsigned ki_stream_begin_proof(struct kh_stream *s, uint64_t now_ns);
/** The first batch of the answer, its end when it has none, no answer. Return steps. */
unsigned ki_stream_proof_batch(struct kh_stream *s, const struct ki_batch_id *id, uint64_t now_ns);
unsigned ki_stream_proof_end(struct kh_stream *s);
unsigned ki_stream_proof_failed(struct kh_stream *s, uint64_t now_ns);

/* -- stream_live.c ----------------------------------------------------------------------------- */

/** Return true when the position may belong to another process than the next batch. */
bool ki_stream_must_verify(const struct kh_stream *s);

/* -- stream_replay.c --------------------------------------------------------------------------- */

/**
 * Return true while a replay must wait for a connection: there is none, or one that the stream hasn't
 * heard of. Who answers may be another process than the one whose batches come.
 */
bool ki_stream_awaits_connection(const struct kh_stream *s);
/** Return true when the replay service may be asked now. */
bool ki_stream_may_replay(const struct kh_stream *s, uint64_t now_ns);
/** Begin a replay of @kind from batch number @from on. Returns the step REQUEST. */
unsigned ki_stream_begin_replay(struct kh_stream *s, enum ki_replay_kind kind, uint64_t from,
                                uint64_t now_ns);
/** Hold live batch @id until the replay has ended. Returns the step HOLD. */
unsigned ki_stream_hold(struct kh_stream *s, const struct ki_batch_id *id);
/** End the replay. Returns the step RESUME. */
unsigned ki_stream_finish_replay(struct kh_stream *s);
/** End the replay before its end: the next connection's goes on at the position. Returns the step RESUME. */
unsigned ki_stream_break_off_replay(struct kh_stream *s);
/** Ask again, or give up after the last attempt. Returns steps. */
unsigned ki_stream_retry(struct kh_stream *s, uint64_t now_ns);

#endif
