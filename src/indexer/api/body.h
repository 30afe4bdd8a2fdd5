// SPDX-License-Identifier: Apache-2.0
/**
 * Request bodies, JSON or msgpack, read by one table of fields.
 *
 * A handler names the fields that it requires and those that it takes. The reader passes over all
 * other fields, known or not. An optional field may be null. Reading is one pass; token ids go from
 * the text straight into an array.
 */
#ifndef KV_INDEXER_API_BODY_H
#define KV_INDEXER_API_BODY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/json/json.h"
#include "event/reader/told.h"

#define KI_MAX_NAME 1024 /* bytes of a string in a request; URLs and endpoints: 2048 */

enum ki_field {
    KI_INSTANCE_ID = 1 << 0,
    KI_ENDPOINT = 1 << 1,
    KI_REPLAY_ENDPOINT = 1 << 2,
    KI_MODEL_NAME = 1 << 3,
    KI_TENANT_ID = 1 << 4, /* routing_group is another name for it, and overrides it */
    KI_BLOCK_SIZE = 1 << 5,
    KI_DP_RANK = 1 << 6,
    KI_LORA_NAME = 1 << 7,
    KI_CACHE_SALT = 1 << 8,
    KI_TOKEN_IDS = 1 << 9,
    KI_BLOCK_HASHES = 1 << 10,
    KI_EXPLAIN = 1 << 11,
    KI_URL = 1 << 12,
    KI_NUM_BLOCKS = 1 << 14,
    KI_MM_OBJECTS = 1 << 15,
    KI_BLOCK_MM_INFOS = 1 << 16,
    KI_HASH_LOOKAHEAD = 1 << 17,
    KI_EAGLE_DROP = 1 << 18,
    KI_SILENT_WINDOWS = 1 << 19,
    KI_REPORT_MODE = 1 << 20,
    KI_EAGLE_GROUPS = 1 << 21,
    KI_GROUPS = 1 << 23,
    KI_SEQUENCE_HASHES = 1 << 22, /* where both are taken, stands for a required KI_BLOCK_HASHES */
    KI_ROUTING_GROUP = 1 << 13,   /* ki_body_parse's own: read into tenant_id */
};

/** A parsed request body, used again for the next request. Zero-initialise. Thread-confined. */
struct ki_body {
    uint32_t present; /* enum ki_field bits: fields that are there and not null */
    uint64_t instance_id, block_size, num_blocks, dp_rank, hash_lookahead;
    const char *instance_name; /* of instance_id, where that was a name; like the strings below */
    bool explain, eagle_drop, silent_windows;
    /* C strings, NULL when absent; valid until the next parse. */
    const char *endpoint, *replay_endpoint, *model_name, *tenant_id, *lora_name, *cache_salt, *url,
        *routing_group, *report_mode, *eagle_groups;
    struct kve_told groups;
    struct kv_buf token_ids;          /* raw uint32_t */
    struct kv_buf block_hashes;       /* raw uint64_t; with KI_SEQUENCE_HASHES: these */
    struct kv_buf mm_objects;         /* raw struct ki_mm_object, in the order of the request */
    struct kv_buf strings, unescaped; /* buffers of the parser */
};
void ki_body_fini(struct ki_body *body);

enum ki_media { KI_MEDIA_JSON, KI_MEDIA_MSGPACK, KI_MEDIA_OTHER };
/**
 * Classify a Content-Type: application/json, anything with +json, application/msgpack, x-msgpack,
 * vnd.msgpack.
 */
enum ki_media ki_media_of(const char *content_type);

/**
 * Read @text. Returns 0; -EBADMSG: malformed, @error has the offset; -EINVAL: well-formed but a
 * field is missing, repeated, or of the wrong type or range (@error names it); -ENOMEM.
 */
int ki_body_parse(enum ki_media media, struct kv_str text, uint32_t required, uint32_t optional,
                  struct ki_body *ret, struct kv_error *error);

#endif
