// SPDX-License-Identifier: Apache-2.0
/**
 * Write a dump (docs/formats.md) piece by piece into a reply's pipe. However large the index and slow
 * the client, a dump needs one buffer, one pipe, a slice of the index, and a copy of one stream's
 * state at a time. No lock is held while the pipe is full.
 */
#ifndef KV_INDEXER_REPLICA_DUMP_WRITER_H
#define KV_INDEXER_REPLICA_DUMP_WRITER_H

#include "base/json.h"
#include "event/router/packed_event.h"
#include "indexer/http/pipe.h"
#include "indexer/registry/registry.h"
#include "indexer/view/unsure.h"

#define KI_DUMP_FLUSH_AT (64u << 10)

struct ki_dump_writer {
    struct ki_pipe *pipe;
    struct kv_buf buf;
    struct kv_json_writer w;
    uint64_t event_id;
    struct kve_packed *packed; /* NULL: events are JSON */
};

/** Hand the buffer to the pipe once it has @at bytes. Returns 0 or a negative errno. */
int ki_dump_flush(struct ki_dump_writer *d, size_t at);

/**
 * Write one model, from the key of its member on. Takes and writes its watermarks before its events,
 * so that the events are at least as new. @escaped: write the name's colons as %3A.
 */
int ki_dump_write_model(struct ki_registry *registry, struct ki_dump_writer *d,
                        const struct ki_model *model, bool escaped);

/* -- dump_writer_extras.c: callbacks that write one object of a list; @arg is the writer -------- */

int ki_dump_write_extra(void *arg, const struct kvi_extra *extra);
int ki_dump_write_doubt(void *arg, const struct ki_unsure_told *told);

#endif
