// SPDX-License-Identifier: Apache-2.0
/** Shared by the files of a follower: follow.c (batches) and follow_records.c (KVEvent records). */
#ifndef KV_CLI_EVENTS_FOLLOW_IMPL_H
#define KV_CLI_EVENTS_FOLLOW_IMPL_H

#include "cli/events/follow.h"

/** Write news of the current message's publisher. */
void kc_write_news(struct kc_follower *follower, struct kc_news *news);
/** Compare follower->batch with the number before it: a gap, or a restart? */
void kc_check_number(struct kc_follower *follower);
/** Count and write that the batches from @first to @last are missing. */
void kc_note_gap(struct kc_follower *follower, uint64_t first, uint64_t last);
/** Count and write that the current message is none; the publisher's `why` says why. */
void kc_note_unreadable(struct kc_follower *follower, size_t bytes);

/** Return true when @message may be KVEvent records, as block managers publish them over NATS. */
bool kc_are_records(const struct kc_message *message);
/** Read such a message, whose publisher is found. Returns 0. */
int kc_read_records(struct kc_follower *follower, const struct kve_message *m, size_t bytes);

#endif
