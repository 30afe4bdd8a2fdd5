// SPDX-License-Identifier: Apache-2.0
/** A message of a publisher as it came, whatever it holds. */
#ifndef KV_CLI_EVENTS_MESSAGE_H
#define KV_CLI_EVENTS_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/json/json.h"
#include "event/wire/frames.h"

/** Longest address of a publisher, in bytes. */
#define KC_MAX_FROM 512

/** All pointers are valid during the call that hands the message over. */
struct kc_message {
    uint64_t time_ns;   /* since the epoch */
    struct kv_str from; /* the publisher's address */
    size_t n_frames;    /* more than KVE_MAX_FRAMES: too many, and frames has the first ones */
    struct kve_span frames[KVE_MAX_FRAMES];
};

/** Take a message. Returns 0 to go on; another value ends the run that handed it over. */
typedef int (*kc_message_fn)(void *arg, const struct kc_message *message);

#endif
