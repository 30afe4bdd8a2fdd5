// SPDX-License-Identifier: Apache-2.0
/**
 * Packed events: stored blocks of a dump in binary, for indexers that ask for this form
 * (docs/formats.md).
 *
 * One record is 24 bytes of header and 16 bytes a block, all numbers little-endian:
 *
 *     0        8        16      20   22     23
 *     | worker | parent | rank  | n  | tier | flags |  n × (hash, tokens hash)
 *
 * Flags: PARENT (the parent field is set), REPEAT (no blocks follow: they are the first n of the
 * record before, as when several ranks hold one prompt). A record without blocks ends the sequence.
 */
#ifndef KV_EVENT_ROUTER_PACKED_EVENT_H
#define KV_EVENT_ROUTER_PACKED_EVENT_H

#include "event/router/router_event.h"

/** Most blocks of a record. */
#define KVE_PACKED_BLOCKS 512
#define KVE_PACKED_HEADER 24

/**
 * Blocks of the latest two records, which the next record may repeat. Zero-initialise for each
 * sequence.
 */
struct kve_packed {
    size_t n;
    unsigned last;
    struct kv_block blocks[2][KVE_PACKED_BLOCKS];
};

/** Append a store of 1 to KVE_PACKED_BLOCKS blocks to @out. */
void kve_packed_write(struct kve_packed *p, struct kv_buf *out,
                      const struct kve_router_event *event);
/** Append the end of the sequence. */
void kve_packed_end(struct kv_buf *out);

/**
 * Read one record of the raw bytes where @json stands (kv_json_raw_open). Returns 1; 0 at the end
 * of the sequence; or the reader's sticky error (cut off, or -EPROTO for an invalid header).
 * @ret->blocks stays valid until the call after the next.
 */
int kve_packed_read(struct kve_packed *p, struct kv_json *json, struct kve_router_event *ret);

#endif
