// SPDX-License-Identifier: Apache-2.0
/** Shared by tests that apply batches of one stream, written as text (event/pack.h), to an index. */
#ifndef KV_TEST_INDEXER_APPLIER_UNIT_H
#define KV_TEST_INDEXER_APPLIER_UNIT_H

#include "base/unit.h"

#include "event/pack.h"
#include "event/reader/reader.h"
#include "indexer/view/apply.h"

struct stream {
    struct kvi_index *index;
    struct ki_applier applier;
};

/** Begin a stream whose registration tells that there are no reports of held blocks. */
static inline void begin_sized(struct stream *s, uint32_t block_size)
{
    assert_int_equal(kvi_create(NULL, &s->index), 0);
    assert_int_equal(ki_applier_init(&s->applier, 7, 0, block_size, KI_MM_PLACED), 0);
    ki_applier_set_habits(&s->applier, &(struct ki_habits){.report_mode = KI_REPORTS_INCREMENTAL});
}

static inline void end(struct stream *s)
{
    ki_applier_fini(&s->applier);
    kvi_destroy(s->index);
}

static inline void put(struct stream *s, const char *events)
{
    struct kv_buf bytes = KV_BUF_INIT;

    pack(&bytes, "[1.0, [%s], 0]", events);
    assert_int_not_equal(ki_applier_apply(&s->applier, s->index, bytes.data, bytes.len),
                         KI_APPLIED_PART);
    kv_buf_fini(&bytes);
}

/** Return how many of the prompt's first @n blocks, by their local hashes, the worker has in the tier. */
static inline uint32_t reach_of(struct stream *s, const uint64_t *hashes, size_t n,
                                enum kv_tier tier)
{
    struct kvi_matches matches = {0};
    uint32_t blocks = 0;

    assert_int_equal(kvi_find(s->index, hashes, n, &matches), 0);
    if (matches.n)
        blocks = matches.items[0].reach[tier];
    kvi_matches_fini(&matches);
    return blocks;
}

static inline bool is_partial(const struct stream *s)
{
    return ki_applier_reasons(&s->applier);
}

#endif
