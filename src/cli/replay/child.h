// SPDX-License-Identifier: Apache-2.0
/** A kv-indexer that the replay starts for itself, on a port that the system chooses. */
#ifndef KV_CLI_REPLAY_CHILD_H
#define KV_CLI_REPLAY_CHILD_H

#include <stdbool.h>

#include "base/core/error.h"

struct kc_child;

/** Options of a kv-indexer; zeros mean the defaults. */
struct kc_child_opts {
    const char *path;        /* NULL: "kv-indexer" next to this program, else on the PATH */
    unsigned port;           /* 0: one that the system chooses */
    const char *const *more; /* further arguments, at most 16, then NULL; NULL: none */
};

/**
 * Start a kv-indexer and wait until it listens. Variables KV_INDEXER_* and DYN_* of the environment
 * don't reach it. It ends with this program, however that ends. Returns 0 or a negative errno with
 * @error.
 */
int kc_child_start(const struct kc_child_opts *opts, struct kc_child **ret, struct kv_error *error);

const char *kc_child_url(const struct kc_child *child);
int kc_child_pid(const struct kc_child *child);

/** Return false when it has ended; @error then has the reason and the last lines of its log. */
bool kc_child_alive(struct kc_child *child, struct kv_error *error);

/** Copy the end of the child's stderr to @buf, NUL-terminated, at most @size bytes. */
void kc_child_log(struct kc_child *child, char *buf, unsigned long size);

/** Stop it: SIGTERM, after five seconds SIGKILL. NULL is a no-op. */
void kc_child_stop(struct kc_child *child);

#endif
