// SPDX-License-Identifier: Apache-2.0
/** Ask an engine's replay endpoint for the batches that it has kept. Thread-confined. */
#ifndef KV_CLI_EVENTS_ASK_H
#define KV_CLI_EVENTS_ASK_H

#include "base/core/error.h"
#include "cli/events/message.h"

/**
 * Ask @url (tcp://HOST:PORT or ipc://PATH) for batches from number @from on, and hand each to @fn as the
 * live message that it repeats. Waits up to @timeout_ms for each answer. Returns 0 at the end of the
 * replay; what @fn returned, if not 0, which ends it; or with @error: -EINVAL (no usable URL),
 * -ETIMEDOUT (no answer), -EINTR (^C), -ECONNREFUSED (no connection can be made) or another errno.
 */
int kc_ask_replays(const char *url, uint64_t from, uint64_t timeout_ms, kc_message_fn fn, void *arg,
                   struct kv_error *error);

#endif
