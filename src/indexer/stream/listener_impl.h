// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the files of a listener. No other file uses it.
 *
 *   listener.c          life, and the calls of other threads
 *   listener_turn.c     turns and ticks: what the event thread does next, and when
 *   listener_read.c     messages, from sockets and backlog to the stream
 *   listener_stream.c   the stream's decisions: writes to the index, replays, the held batch
 *   listener_link.c     the connection to the publisher: opened, lost, looked for, told
 *   listener_fed.c      batches of a listener without a connection
 *
 * All functions here belong to the event thread.
 */
#ifndef KV_INDEXER_STREAM_LISTENER_IMPL_H
#define KV_INDEXER_STREAM_LISTENER_IMPL_H

#include "base/core/clock.h"
#include "event/wire/frames.h"
#include "indexer/stream/listener.h"

#define KI_RESOLVE_POLL_NS (50 * KV_NS_PER_MS) /* interval while a host name is being resolved */

/** Return true while there is a connection, or attempts to make one. */
static inline bool ki_listener_is_open(const struct ki_listener *l)
{
    return l->sub.state != KI_SUB_CLOSED;
}

/** Return true when a batch of the backlog may be offered. */
static inline bool ki_listener_has_backlog(const struct ki_listener *l)
{
    return l->started && !l->holding && !l->copying && !STAILQ_EMPTY(&l->backlog.items);
}

/* -- listener_read.c --------------------------------------------------------------------------- */

/** Return number, digest and time of a message. */
struct ki_batch_id ki_listener_identify(const struct kve_message *message);
/** Read a bounded number of messages. Returns true when there may be more. */
bool ki_listener_read(struct ki_listener *l, uint64_t now_ns);

/* -- listener_stream.c ------------------------------------------------------------------------- */

/**
 * Offer live batches in order, until the stream wants more than to apply or drop one; then carry
 * that out. A batch that must be held is moved away. Returns the number of finished batches.
 */
size_t ki_listener_offer_live(struct ki_listener *l, struct ki_live *batches, size_t n,
                              uint64_t now_ns);
/** Offer a batch of a replay, or its end. @message NULL: an invalid answer. */
void ki_listener_offer_replayed(struct ki_listener *l, const struct ki_batch_id *id,
                                const struct kve_message *message, uint64_t now_ns);
/**
 * Judge the time without a connection. Forgets the stream's blocks, and what waits for a replay, after
 * --forget-after.
 */
void ki_listener_tick_absence(struct ki_listener *l, uint64_t now_ns);
/** Run the stream's due timers. */
void ki_listener_tick_stream(struct ki_listener *l, uint64_t now_ns);
/**
 * Carry out the steps in @steps that concern sockets; offer the held batch again after a replay.
 */
void ki_listener_follow(struct ki_listener *l, unsigned steps, uint64_t now_ns);
/** Ask for the replay that the stream wants, on a new socket. */
void ki_listener_open_replay(struct ki_listener *l, uint64_t now_ns);
void ki_listener_close_replay(struct ki_listener *l);
/** Drop the held batch and the backlog. */
void ki_listener_drop_held(struct ki_listener *l);

/** Note, under the lock, how a batch or the waiting stores changed the completeness of the view. */
void ki_listener_note_applied(struct ki_listener *l, enum ki_applied applied, uint64_t now_ns);
/** End a series of writes, before the lock is released. */
void ki_listener_end_writes(struct ki_listener *l, bool applied, uint64_t now_ns);
/** Behind the lock: tell those who may have lost blocks with this stream's. */
void ki_listener_tell_loss(struct ki_listener *l);

/* -- listener_link.c --------------------------------------------------------------------------- */

/** Resolve the endpoint and connect, or set the time to try again. */
void ki_listener_connect(struct ki_listener *l, uint64_t now_ns);
void ki_listener_disconnect(struct ki_listener *l);
/** Run the connection's timers, or look for the publisher at another address. */
void ki_listener_reconnect(struct ki_listener *l, uint64_t now_ns);
/** Note what has become of the connection. Call after each use of l->sub that may change it. */
void ki_listener_note_link(struct ki_listener *l, uint64_t now_ns);
/** Note that a batch reports the new connection to the stream. */
void ki_listener_note_told(struct ki_listener *l);
/** Tell the stream that the newest batches were dropped, after those before have been offered. */
void ki_listener_tell_dropped(struct ki_listener *l, uint64_t now_ns);
/** Report a new connection to the stream, after all that earlier ones brought has been read. */
void ki_listener_tell_connection(struct ki_listener *l, uint64_t now_ns);

#endif
