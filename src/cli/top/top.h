// SPDX-License-Identifier: Apache-2.0
/** `kvasir top`: the state of a running kv-indexer. Internal to the room; tests look inside. */
#ifndef KV_CLI_TOP_TOP_H
#define KV_CLI_TOP_TOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/args/instance.h"
#include "base/core/buf.h"
#include "base/core/error.h"

struct kc_top_row {
    uint64_t instance;
    char name[KV_INSTANCE_NAME_MAX + 1]; /* of the instance; "": its number */
    uint32_t rank;
    char model[128];
    char status[16];
    char last_error[80];
    char reasons[120]; /* names of the reasons for which the view is partial; "": it is whole */
    bool has_seq, has_age;
    double last_seq, age;
    double events, changes, gaps, missed, replayed, restarts; /* changes: blocks stored, removed */
    uint64_t blocks;                                          /* that the worker has now */
};

/** State of a kv-indexer at one moment. */
struct kc_top {
    struct kc_top_row *rows; /* by number, then by name, then by rank */
    size_t n_rows, capacity;
    double models, workers;
    double index_blocks, holder_blocks, index_bytes;
    double queries, query_blocks, matched_blocks;
    uint64_t at_ns;
};

/**
 * Fill @ret from GET /workers and GET /metrics; @ret may be used again. Returns 0, -EPROTO with
 * @error, or -ENOMEM.
 */
int kc_top_read(const struct kv_buf *workers, const struct kv_buf *metrics, struct kc_top *ret,
                struct kv_error *error);
void kc_top_fini(struct kc_top *top);

/**
 * Print the table, at most @max_lines of workers, in lines of at most @columns (70 or more; below
 * 118 without CHANGES/s, GAPS and REPLAYED, and with errors on lines of their own). Names of models
 * are cut only where the lines have no room. @before: an earlier state, for rates per second (NULL:
 * totals only).
 */
void kc_top_print(const struct kc_top *top, const struct kc_top *before, const char *url,
                  size_t max_lines, size_t columns, FILE *out);

/** Write the state as one line of JSON, all workers; rates as kc_top_print has them. */
void kc_top_write_json(const struct kc_top *top, const struct kc_top *before, struct kv_buf *out);

#endif
