// SPDX-License-Identifier: Apache-2.0
/**
 * Read a dump (docs/formats.md) into fresh indexes. All or nothing: the caller may use the models
 * only when the whole document was one valid dump.
 */
#ifndef KV_INDEXER_REPLICA_DUMP_READER_H
#define KV_INDEXER_REPLICA_DUMP_READER_H

#include "base/core/buf.h"
#include "base/json/json.h"
#include "indexer/registry/registry.h"

#define KI_DUMP_MAX_MODELS 65536

/** Accept header that asks for a dump whose events are packed (event/router/packed_event.h). */
#define KI_DUMP_PACKED_TYPE "application/vnd.kvasir.dump"
/** The same as JSON text, for people and tests. */
#define KI_DUMP_JSON_TYPE "application/vnd.kvasir.dump+json"

/** One model of a dump. */
struct ki_dumped_model {
    char *name, *tenant;
    uint32_t block_size;
    uint64_t forms; /* KI_FORM of each form of the model's hashes */
    bool failed;    /* the peer wrote an error in place of the model */
    struct kvi_index *index;
    struct kv_buf marks;            /* struct ki_mark, one per holder that the dump names */
    bool has_streams;               /* the peer tells streams: each holder should be of one */
    struct ki_snapshot **snapshots; /* of the streams; sorted once the model is read */
    size_t n_snapshots;
    struct kv_buf names; /* of instances: each a uint64_t, not aligned, and a NUL-terminated text */
    uint32_t *slots;     /* hash table over marks: index + 1; 0: free */
    size_t n_slots;      /* 0 or a power of two, more than twice the marks */
};

struct ki_dump_reader {
    struct ki_dumped_model *models;
    size_t n, capacity;
    uint64_t events, blocks, orphans;
    uint64_t max_bytes;    /* limit of the indexes' memory; 0: none */
    uint64_t max_blocks;   /* limit of distinct blocks of each index; 0: none */
    uint64_t done_bytes;   /* memory of the models before the current one */
    uint64_t check_at;     /* number of blocks at which to compare with max_bytes next */
    uint64_t secret;       /* secret of the hash tables */
    struct kv_buf sources; /* sources of the block being read */
};

/**
 * Read the dump before which @json (just initialised) stands. Returns 0 or the reader's error,
 * -EFBIG beyond max_bytes. Release with ki_dump_reader_fini in either case. Zero-initialise
 * @reader, except for max_bytes.
 */
int ki_dump_read(struct ki_dump_reader *reader, struct kv_json *json);
void ki_dump_reader_fini(struct ki_dump_reader *reader);

#endif
