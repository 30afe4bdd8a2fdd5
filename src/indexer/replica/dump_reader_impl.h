// SPDX-License-Identifier: Apache-2.0
/**
 * Parts of the reader of dumps (dump_reader.h) that its files share. Where something can't be read,
 * they fail @json.
 */
#ifndef KV_INDEXER_REPLICA_DUMP_READER_IMPL_H
#define KV_INDEXER_REPLICA_DUMP_READER_IMPL_H

#include <stdbool.h>
#include <stdint.h>

#include "indexer/replica/dump_reader.h"

int ki_dump_make_index(const struct ki_dump_reader *reader, uint64_t expected_blocks,
                       struct kvi_index **ret);
/** Whether the models read so far take more than reader->max_bytes. */
bool ki_dump_is_too_large(const struct ki_dump_reader *reader, const struct ki_dumped_model *m);

/**
 * Return the entry of a holder, made when it is missing. Valid until the next call. NULL: too many
 * holders; @json has failed.
 */
struct ki_mark *ki_dump_mark(struct ki_dump_reader *reader, struct kv_json *json,
                             struct ki_dumped_model *m, struct kv_holder holder);
/** Read a stream: its snapshot, and the blocks that it has brought. */
void ki_dump_read_stream(struct ki_dump_reader *reader, struct kv_json *json,
                         struct ki_dumped_model *m);
/**
 * Judge which streams must be read from their beginning, once the model is read: those that lack
 * blocks, and holders of no stream, where the peer tells streams.
 */
void ki_dump_judge_streams(struct ki_dump_reader *reader, struct ki_dumped_model *m);

/**
 * Read the peer's number of distinct blocks, which precedes the events, and make room for all at
 * once. A peer that names too many gets no more room than --recovery-memory allows.
 */
void ki_dump_read_expected_blocks(struct ki_dump_reader *reader, struct kv_json *json,
                                  struct ki_dumped_model *m);
void ki_dump_read_events(struct ki_dump_reader *reader, struct kv_json *json,
                         struct ki_dumped_model *m);
void ki_dump_read_packed_events(struct ki_dump_reader *reader, struct kv_json *json,
                                struct ki_dumped_model *m);

/** Read a fact that events can't say. */
void ki_dump_read_extra(struct ki_dump_reader *reader, struct kv_json *json,
                        struct ki_dumped_model *m);

#endif
