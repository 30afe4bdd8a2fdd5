// SPDX-License-Identifier: Apache-2.0
/** A follower that recovers from another one's dump, and a comparison of the two. */
#ifndef KV_TESTS_MODELS_REPLICA_H
#define KV_TESTS_MODELS_REPLICA_H

#include <stdlib.h>

#include "base/core/mix.h"
#include "event/reader/reader_state.h"
#include "index/memory/mem.h"
#include "models/follow.h"

/* -- recovery ---------------------------------------------------------------------------------- */

/* Give @to the state of @from's reader, as a dump tells it. */
static inline void replica_read(struct follower *to, const struct follower *from)
{
    struct kve_reader *copy = kve_reader_copy(from->applier.reader), *told;
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 1};
    struct kv_buf text = KV_BUF_INIT;
    struct kv_json_writer w;
    struct kv_json json;
    struct kv_str key;
    size_t at = 0;

    assert_non_null(copy);
    kv_json_writer_init(&w, &text);
    kv_json_begin_object(&w);
    kve_reader_write(copy, &w);
    kv_json_key(&w, "salts");
    kv_json_begin_array(&w);
    while (kve_reader_write_salts(copy, &at, &w))
        ;
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    assert_int_equal(kve_reader_create(&opts, &told), 0);
    kv_json_init(&json, text.data, text.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        assert_int_equal(kve_reader_read(told, &json, key), 1);
    assert_int_equal(kv_json_finish(&json), 0);
    assert_int_equal(kve_reader_take_over(to->applier.reader, told), 0);
    to->applier.has_windows = from->applier.has_windows;
    kve_reader_destroy(told);
    kve_reader_destroy(copy);
    kv_buf_fini(&text);
}

static inline void replica_load(struct follower *to, const struct follower *from)
{
    assert_int_equal(kvi_dump(from->index, follow_copy_run, to->index), 0);
    assert_int_equal(kvi_dump_extras(from->index, follow_copy_extra, to->index), 0);
    to->applier.forms = from->applier.forms;
}

/* -- comparison -------------------------------------------------------------------------------- */

enum { FACT_WORDS = 14 };

/* Everything that a dump tells, in an order that doesn't depend on how it came about. */
struct facts {
    uint64_t (*items)[FACT_WORDS];
    size_t n, capacity;
};

static inline uint64_t *facts_add(struct facts *facts)
{
    if (facts->n == facts->capacity) {
        facts->capacity = 2 * facts->capacity + 64;
        facts->items = realloc(facts->items, facts->capacity * sizeof(facts->items[0]));
        assert_non_null(facts->items);
    }
    memset(facts->items[facts->n], 0, sizeof(facts->items[0]));
    return facts->items[facts->n++];
}

static inline int facts_run(void *arg, const struct kvi_dump_run *run)
{
    for (size_t i = 0; i < run->n; i++) {
        uint64_t *f = facts_add(arg);
        const uint64_t *parent = i ? &run->blocks[i - 1].hash : run->parent;

        f[0] = 100 + run->tier;
        f[1] = run->holder.worker;
        f[2] = run->holder.rank;
        f[3] = run->blocks[i].hash;
        f[4] = run->blocks[i].tokens_hash;
        f[5] = parent ? *parent : 0;
        f[6] = parent != NULL;
    }
    return 0;
}

static inline int facts_extra(void *arg, const struct kvi_extra *e)
{
    uint64_t *f = facts_add(arg);

    f[0] = (uint64_t)e->kind << 8 | e->tier;
    f[1] = e->holder.worker;
    f[2] = e->holder.rank;
    f[3] = e->hash;
    f[4] = e->tokens_hash;
    f[5] = e->parent;
    f[6] = (uint64_t)e->has_parent | (uint64_t)e->alone << 1 | (uint64_t)e->drops << 2 |
           (uint64_t)e->in_window << 3;
    f[7] = (uint64_t)e->copies << 32 | e->tiers;
    f[8] = (uint64_t)e->window.group << 32 | e->window.part << 24 | e->window.parts << 20 |
           e->window.window;
    f[9] = (uint64_t)e->window.need << 32 | e->window.stride << 2 | e->window.needs;
    f[10] = (uint64_t)e->implied << 32 | e->counting;
    f[11] = e->stored_again ^ e->kept_groups ^ (uint64_t)e->main_keeps << 63;
    f[12] = e->n_sources;
    for (size_t i = 0; i < e->n_sources; i++)
        f[13] += kv_mix((uint64_t)e->sources[i].source << 33 | (uint64_t)e->sources[i].copies << 1 |
                        e->sources[i].taken);
    return 0;
}

static inline int facts_compare(const void *a, const void *b)
{
    return memcmp(a, b, FACT_WORDS * sizeof(uint64_t));
}

static inline struct facts facts_of(struct kvi_index *ix)
{
    struct facts facts = {0};
    size_t kept = 0;

    assert_int_equal(kvi_dump(ix, facts_run, &facts), 0);
    assert_int_equal(kvi_dump_extras(ix, facts_extra, &facts), 0);
    if (facts.n)
        qsort(facts.items, facts.n, sizeof(facts.items[0]), facts_compare);
    for (size_t i = 0; i < facts.n; i++) /* copies of one block are told once or more */
        if (!kept || facts_compare(facts.items[kept - 1], facts.items[i]))
            memmove(facts.items[kept++], facts.items[i], sizeof(facts.items[0]));
    facts.n = kept;
    return facts;
}

static inline void replica_expect_equal(const struct follower *a, const struct follower *b)
{
    struct facts x = facts_of(a->index), y = facts_of(b->index);

    for (size_t i = 0; i < KV_MIN(x.n, y.n); i++)
        for (size_t k = 0; k < FACT_WORDS; k++)
            if (x.items[i][k] != y.items[i][k])
                fail_msg("fact %zu of %zu, %zu: word %zu is %" PRIx64 " and %" PRIx64
                         " (kinds %" PRIx64 ", %" PRIx64 ")",
                         i, x.n, y.n, k, x.items[i][k], y.items[i][k], x.items[i][0],
                         y.items[i][0]);
    assert_int_equal(x.n, y.n);
    free(x.items);
    free(y.items);
}

#endif
