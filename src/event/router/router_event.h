// SPDX-License-Identifier: Apache-2.0
/**
 * RouterEvent: the JSON in which indexers exchange their contents (/dump, recovery).
 *
 *     {"worker_id":1,"event":{"event_id":0,"data":{"stored":{"parent_hash":null,"blocks":[
 *        {"block_hash":7,"tokens_hash":9,"mm_extra_info":null}]}},"dp_rank":0},"storage_tier":"host_pinned"}
 *
 * Other data: {"removed":{"block_hashes":[7]}} and the bare string "cleared". The writer uses the
 * oldest form, with storage_tier only where it isn't the device. The reader accepts all forms:
 * stored events of many blocks, storage_tier, start_position, and unknown keys (passed over).
 * Defaults when reading: dp_rank 0, storage_tier device, parent_hash null.
 */
#ifndef KV_EVENT_ROUTER_ROUTER_EVENT_H
#define KV_EVENT_ROUTER_ROUTER_EVENT_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h"
#include "kv_event.h"

/** One RouterEvent. Its arrays belong to the caller (write) or to the scratch (read). */
struct kve_router_event {
    struct kv_holder holder;
    uint64_t event_id;
    enum kve_op_type type; /* KVE_OP_STORE, KVE_OP_REMOVE or KVE_OP_CLEAR */
    enum kv_tier tier;
    bool has_parent;
    uint64_t parent;
    const struct kv_block *blocks; /* KVE_OP_STORE */
    const uint64_t *hashes;        /* KVE_OP_REMOVE */
    size_t n;
};

/** Memory of a read event's arrays, used again for the next event. Zero-initialise. */
struct kve_router_scratch {
    struct kv_buf items; /* its limit bounds one event: 16 bytes a block, 8 a removed hash */
    struct kv_buf text;
};
void kve_router_scratch_fini(struct kve_router_scratch *scratch);

/**
 * Read one event where @json stands. Returns 0, or the reader's sticky error: missing worker_id,
 * event or data; unknown data or storage_tier; an event above the limit of scratch->items; -ENOMEM.
 * @ret stays valid until the next read with the same scratch.
 */
int kve_router_event_read(struct kv_json *json, struct kve_router_scratch *scratch,
                          struct kve_router_event *ret);

/** Append one event as a JSON value. */
void kve_router_event_write(struct kv_json_writer *writer, const struct kve_router_event *event);

/** Return "device", "host_pinned", "disk" or "external". */
const char *kve_tier_name(enum kv_tier tier);

#endif
