// SPDX-License-Identifier: Apache-2.0
/** Options of a NATS client: checked, with their defaults, as copies. */
#ifndef KV_PLANE_NATS_OPTS_H
#define KV_PLANE_NATS_OPTS_H

#include "kv_plane.h"

/**
 * Check @opts and write a copy with all defaults filled in, whose strings belong to the copy. Returns
 * 0; -EINVAL with a log line; -ENOMEM.
 */
int kvp_nats_opts_copy(const struct kvp_nats_opts *opts, struct kvp_nats_opts *ret);

/** Free the strings of a copy, and overwrite secrets. A zeroed struct is a no-op. */
void kvp_nats_opts_fini(struct kvp_nats_opts *opts);

#endif
