// SPDX-License-Identifier: Apache-2.0
/** News of publishers as lines: for people, and as JSON. Each is a kc_write_fn. */
#ifndef KV_CLI_EVENTS_SAY_H
#define KV_CLI_EVENTS_SAY_H

#include "cli/events/follow.h"

/** The line above the columns of kc_say_text. */
extern const char kc_say_head[];
void kc_say_text(struct kv_buf *out, const struct kc_news *news);
void kc_say_json(struct kv_buf *out, const struct kc_news *news);

/** Append a publisher's address and topic as plain text. */
void kc_say_publisher(struct kv_buf *out, const struct kc_publisher *publisher);

#endif
