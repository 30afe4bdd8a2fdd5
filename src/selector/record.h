// SPDX-License-Identifier: Apache-2.0
/**
 * Records of workers, as POST and PATCH /workers tell them: what the registry of event streams has no
 * place for. A worker that only --workers, --discover, a peer or POST /register names has no record.
 */
#ifndef KV_SELECTOR_RECORD_H
#define KV_SELECTOR_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/core/error.h"
#include "base/json/json.h"

#define KSEL_MAX_RANKS 1024 /* ranks of a record */

/** State of a worker: what it lacks, or that it takes requests. */
enum ksel_lifecycle {
    KSEL_INCOMPLETE = 0,
    KSEL_SCHEDULABLE = 1,
    KSEL_DRAINING = 2,
    KSEL_UNSCHEDULABLE = 3
};
const char *ksel_lifecycle_name(enum ksel_lifecycle lifecycle);

/** Event endpoint of a rank. */
struct ksel_stream {
    uint32_t rank;
    char *endpoint;
};

/** Texts that a record owns. */
struct ksel_texts {
    char **items;
    size_t n;
};

struct ksel_record {
    uint64_t worker;
    char *name; /* of the worker, where its id is none of digits; else NULL */
    char *model, *group;
    char *endpoint; /* where requests go; NULL: not told */
    char *replay_endpoint, *stable_routing_id;
    char *transfer_domain, *transfer_enforcement;
    uint32_t block_size; /* 0: not told */
    struct ksel_stream *streams;
    size_t n_streams;
    bool one_stream; /* told as kv_events_endpoint, for the first rank */
    bool adopted;    /* streams and ranks are the registry's: no client of this API has told them */
    uint32_t start_rank, n_ranks;
    uint64_t max_batched_tokens, total_blocks; /* 0: not told */
    double transfer_weight;
    bool has_transfer_weight, is_eagle, draining;
    struct ksel_texts taints;
    struct ksel_texts domains; /* as KEY=VALUE */
    char *refused;             /* why the registry took a rank not; NULL: it took all */
};

/** Create a record with the defaults. Returns NULL when out of memory. */
struct ksel_record *ksel_record_create(void);
/** NULL is a no-op. */
void ksel_record_destroy(struct ksel_record *record);
/** Copy a record but for refused. Returns NULL when out of memory. */
struct ksel_record *ksel_record_copy(const struct ksel_record *record);

/** Move the streams and ranks of @from to @to, in place of those there are. */
void ksel_record_move_streams(struct ksel_record *from, struct ksel_record *to);

/**
 * Read @text into the record: its fields replace those there are, null changes nothing. @create: worker_id
 * is required; else it is passed over. Returns as ksel_body_parse.
 */
int ksel_record_parse(struct kv_str text, bool create, struct ksel_record *record,
                      struct kv_error *error);

/** Add a rank's event endpoint. Returns 0 or -ENOMEM. */
int ksel_record_add_stream(struct ksel_record *record, uint32_t rank, const char *endpoint);

/** Return the event endpoint of a rank, or NULL. */
const char *ksel_record_stream(const struct ksel_record *record, uint32_t rank);

/** Return the state that follows from the record's fields and what the registry said. */
enum ksel_lifecycle ksel_record_lifecycle(const struct ksel_record *record);

/** Write the members of the record, beginning with its lifecycle, to the object that @w is in. */
void ksel_record_write(const struct ksel_record *record, enum ksel_lifecycle lifecycle,
                       struct kv_json_writer *w);

/** Write a worker's id: a name, or (NULL) its number. */
void ksel_write_worker(struct kv_json_writer *w, uint64_t worker, const char *name);

#endif
