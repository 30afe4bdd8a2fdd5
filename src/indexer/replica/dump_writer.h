// SPDX-License-Identifier: Apache-2.0
/**
 * Write a dump (docs/formats.md) piece by piece into a reply's pipe. However large the index and slow
 * the client, a dump needs one buffer, one pipe, and the copy of some streams (dump_copy.h). No lock and
 * no stream is held while the pipe is full.
 */
#ifndef KV_INDEXER_REPLICA_DUMP_WRITER_H
#define KV_INDEXER_REPLICA_DUMP_WRITER_H

#include "base/json/json.h"
#include "event/router/packed_event.h"
#include "http/pipe.h"
#include "indexer/registry/registry.h"

#define KI_DUMP_FLUSH_AT (64u << 10)

enum ki_dump_form {
    KI_DUMP_FLAT,   /* the original's: events alone */
    KI_DUMP_JSON,   /* streams, as JSON */
    KI_DUMP_PACKED, /* streams; their events are packed */
};

struct ki_dump_writer {
    struct kh_pipe *pipe;
    struct kv_buf buf;
    struct kv_json_writer w;
    enum ki_dump_form form;
    uint64_t event_id;
    struct kve_packed *packed; /* KI_DUMP_PACKED */
};

/** Hand the buffer to the pipe once it has @at bytes. Returns 0 or a negative errno. */
int ki_dump_flush(struct ki_dump_writer *d, size_t at);

/** Write one model, from the key of its member on. @escaped: write the name's colons as %3A. */
int ki_dump_write_model(struct ki_registry *registry, struct ki_dump_writer *d,
                        const struct ki_model *model, bool escaped);

/** Write one object of a stream's `extras` (dump_writer_extras.c). */
void ki_dump_write_extra(struct ki_dump_writer *d, const struct kvi_extra *extra);

#endif
