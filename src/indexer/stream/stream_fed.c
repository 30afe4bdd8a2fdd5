// SPDX-License-Identifier: Apache-2.0
/*
 * Streams that are fed: another part of the program sees losses and restarts, and tells all blocks anew
 * after each. Their batches are numbered here, from 0 on; there is no replay.
 */
#include "indexer/stream/stream_impl.h"

unsigned ki_stream_fed_anew(struct kh_stream *s)
{
    uint64_t next = ki_stream_has_position(s) ? s->position + 1 : s->before_next;

    ki_stream_forget(s);
    s->losses++;
    s->behind = true;
    if (next)
        ki_stream_remember(s, next - 1); /* numbers go on: a replica takes no old one for new */
    return KI_STEP_PURGE | KI_STEP_RESET;
}

void ki_stream_fed(struct kh_stream *s)
{
    s->position = ki_stream_has_position(s) ? s->position + 1 : s->before_next;
    s->base = KI_BASE_OWN;
    s->before_next = 0;
}

void ki_stream_fed_whole(struct kh_stream *s, bool whole)
{
    s->behind = !whole;
    if (whole && !ki_stream_has_blocks(s))
        s->base = KI_BASE_EMPTY;
}

void ki_stream_fed_link(struct kh_stream *s, bool up, uint64_t now_ns)
{
    if (!up) {
        ki_stream_disconnected(s, now_ns);
        return;
    }
    s->connected = s->met = true;
    s->absent_ns = 0;
    s->contact = KI_CONTACT_MET;
}

void ki_stream_fed_reconnected(struct kh_stream *s)
{
    ki_stream_not_empty(s);
    if (ki_stream_has_blocks(s))
        s->reasons |= KI_BECAUSE(RECONNECTED);
}
