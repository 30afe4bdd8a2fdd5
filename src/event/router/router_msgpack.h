// SPDX-License-Identifier: Apache-2.0
/**
 * RouterEvent in msgpack, as Dynamo's event plane carries it: the payload of an envelope is an array
 * of these.
 *
 *     {"worker_id": u64, "storage_tier": "device", "residency_domain": "worker",
 *      "event": {"event_id": u64, "data": DATA, "dp_rank": u32}}
 *
 *     DATA   {"stored": {"parent_hash": u64 | nil, "start_position": nil,
 *                        "blocks": [{"block_hash", "tokens_hash", "mm_extra_info": nil}, ...]}}
 *            {"removed": {"block_hashes": [u64, ...]}}
 *            "cleared"
 *
 * The reader takes members in any order, passes over unknown ones, and has the JSON's defaults:
 * dp_rank 0, storage_tier device, residency_domain worker, parent_hash nil. A hash may be a negative
 * number: its bits count. Source of the format: Dynamo 1.6.1.
 */
#ifndef KV_EVENT_ROUTER_ROUTER_MSGPACK_H
#define KV_EVENT_ROUTER_ROUTER_MSGPACK_H

#include "base/core/buf.h"
#include "base/json/msgpack.h"
#include "event/router/router_event.h"

/**
 * Read one event where @m stands. Returns 0; KVE_SKIP_RC(...), with @m at any place inside the
 * event; or -ENOMEM. The reasons: MALFORMED; UNKNOWN_TYPE (other data); MEDIUM (an unknown
 * storage_tier); REMOTE (no worker's residency_domain); TOO_LARGE (above the limit of
 * scratch->items). Of a skipped event *@ret has what was read before. @ret stays valid until the next
 * read with the same scratch.
 */
int kve_router_event_unpack(struct kv_msgpack *m, struct kve_router_scratch *scratch,
                            struct kve_router_event *ret);

/** Append one event, byte for byte as Dynamo writes it. Errors stick in @out. */
void kve_router_event_pack(struct kv_buf *out, const struct kve_router_event *event);

#endif
