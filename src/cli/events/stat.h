// SPDX-License-Identifier: Apache-2.0
/** `kvasir events stat`: what came in a while, for people and programs. */
#ifndef KV_CLI_EVENTS_STAT_H
#define KV_CLI_EVENTS_STAT_H

#include "cli/events/follow.h"
#include "cli/events/source.h"

/** A look at a source. */
struct kc_look {
    const char *url;
    double seconds;  /* since the source was opened */
    uint64_t now_ns; /* since the epoch */
    struct kc_source_state state;
};

/**
 * Append the report: how the connection does, a row for each publisher with rates over all of
 * look->seconds, and, as long as nothing has come, what to look at.
 */
void kc_stat_text(struct kv_buf *out, const struct kc_follower *follower,
                  const struct kc_look *look);
/** Append the same as one line of JSON. */
void kc_stat_json(struct kv_buf *out, const struct kc_follower *follower,
                  const struct kc_look *look);

#endif
