// SPDX-License-Identifier: Apache-2.0
/**
 * A stream at one batch: what a replica needs beside the blocks to go on behind that batch. Part of
 * dumps (docs/formats.md); kept beside the position of a worker that isn't registered yet.
 */
#ifndef KV_INDEXER_STREAM_SNAPSHOT_H
#define KV_INDEXER_STREAM_SNAPSHOT_H

#include "base/core/buf.h"
#include "base/json/json.h"
#include "indexer/stream/state.h"
#include "indexer/view/ranges.h"

struct ki_listener;
struct kve_reader;

struct ki_snapshot {
    uint64_t instance;
    uint32_t rank;     /* rank of the registration */
    bool has_position; /* the state is of a batch; false: only the ranks are known */
    bool torn;         /* blocks may be missing: the stream must be read from its beginning */
    bool unusable;     /* read from a dump, but no stream of this version can have such a state */
    struct ki_state state;
    struct kve_reader *reader; /* a copy: event/reader/reader_state.h */
    struct kv_buf ranks;       /* uint32_t: ranks whose blocks the stream brings */
    struct kv_buf ranges;      /* struct ki_range: of the ranks' blocks */
};

/** Returns 0 or -ENOMEM; free *@ret with ki_snapshot_free. */
int ki_snapshot_create(struct ki_snapshot **ret);
void ki_snapshot_free(struct ki_snapshot *s);
int ki_snapshot_copy(const struct ki_snapshot *s, struct ki_snapshot **ret);

static inline size_t ki_snapshot_n_ranks(const struct ki_snapshot *s)
{
    return s->ranks.len / sizeof(uint32_t);
}
static inline uint32_t ki_snapshot_rank(const struct ki_snapshot *s, size_t i)
{
    return ((const uint32_t *)(const void *)s->ranks.data)[i];
}

static inline size_t ki_snapshot_n_ranges(const struct ki_snapshot *s)
{
    return s->ranges.len / sizeof(struct ki_range);
}
static inline const struct ki_range *ki_snapshot_range(const struct ki_snapshot *s, size_t i)
{
    return &((const struct ki_range *)(const void *)s->ranges.data)[i];
}

/** Copy what @l knows now. Returns 0, -ENOMEM; -ENODATA: it has brought nothing. Caller-locked. */
int ki_snapshot_take(const struct ki_listener *l, struct ki_snapshot **ret);
/** Let @l, which hasn't started, go on behind the snapshot. Uses @s up, but for freeing it. */
void ki_snapshot_give(struct ki_snapshot *s, struct ki_listener *l);

/** Write it, except salts (event/reader/reader_state.h) and ranges, into @w's object. */
void ki_snapshot_write(const struct ki_snapshot *s, struct kv_json_writer *w);
/** Write the range of one block. */
void ki_snapshot_write_range(const struct ki_range *range, struct kv_json_writer *w);
/**
 * Read member @key, if it is one of a snapshot. Returns false when it isn't: nothing is read. A state
 * that is impossible here is unusable. Malformed text sets @json's error.
 */
bool ki_snapshot_read(struct ki_snapshot *s, struct kv_json *json, struct kv_str key);

/** Compare by instance and rank, for qsort of pointers. */
int ki_snapshot_compare(const void *a, const void *b);
/** Find the snapshot of a stream among @n sorted ones (may be NULL with n 0). NULL: there is none. */
struct ki_snapshot *ki_snapshot_find(struct ki_snapshot *const *snapshots, size_t n,
                                     uint64_t instance, uint32_t rank);

#endif
