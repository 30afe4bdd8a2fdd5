// SPDX-License-Identifier: Apache-2.0
/**
 * Reading a dump (docs/formats.md) into fresh indexes. All or nothing: the models are the caller's
 * to use only when the whole document was one valid dump.
 */
#ifndef KV_INDEXER_DUMP_READER_H
#define KV_INDEXER_DUMP_READER_H

#include "base/buf.h"
#include "base/json.h"
#include "indexer/handover.h"
#include "indexer/registry.h"

#define KI_DUMP_MAX_MODELS 65536

/** Accept header that asks for a dump whose events are packed (event/packed_event.h). */
#define KI_DUMP_PACKED_TYPE "application/vnd.kvasir.dump"

/** One model of a dump. */
struct ki_dumped_model {
    char *name, *tenant;
    uint32_t block_size;
    uint64_t forms; /* KI_FORM of each form of its hashes */
    bool failed;    /* the peer had an error instead */
    struct kvi_index *index;
    struct kv_buf marks;            /* struct ki_watermark, one per holder that the dump names */
    bool has_marks;                 /* the peer tells positions */
    struct ki_handover **handovers; /* of its streams */
    size_t n_handovers;
    uint32_t *slots; /* hash table over marks: index + 1; 0: free */
    size_t n_slots;  /* 0 or a power of two, more than twice the marks */
};

struct ki_dump_reader {
    struct ki_dumped_model *models;
    size_t n, capacity;
    uint64_t events, blocks, orphans;
    uint64_t max_bytes;    /* the indexes may take so much memory; 0: whatever they need */
    uint64_t max_blocks;   /* distinct blocks of each index; 0: no bound */
    uint64_t done_bytes;   /* taken by the models before the current one */
    uint64_t check_at;     /* compare with max_bytes when so many blocks have been read */
    uint64_t secret;       /* of the hash tables */
    struct kv_buf sources; /* of the block being read */
};

/**
 * Read the dump that @json (just initialised) stands before. Returns 0 or the reader's error; in
 * either case release with ki_dump_reader_fini. Zero-initialise @reader, but for max_bytes; beyond
 * that it is -EFBIG.
 */
int ki_dump_read(struct ki_dump_reader *reader, struct kv_json *json);
void ki_dump_reader_fini(struct ki_dump_reader *reader);

#endif
