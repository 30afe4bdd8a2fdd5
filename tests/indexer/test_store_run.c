// SPDX-License-Identifier: Apache-2.0
/* Stored events held back to be joined with following ones (store_run.h), against the model: the
 * same events, each put into the index at once. Both must end with the same blocks, tiers, copies,
 * parked blocks and counts. Cases: continued runs, refused events, removals in between, and blocks
 * below a missing block. */
#include "base/unit.h"

#include <inttypes.h>

#include "base/core/log.h"
#include "base/json/msgpack.h"
#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "indexer/view/apply.h"

#define BLOCK_SIZE 4
#define HASHES 60 /* few, so that blocks come again, elsewhere too */
#define FEW_TOKENS 5
#define EVENTS 400

struct side {
    struct kvi_index *index;
    struct ki_applier applier;
    size_t n_part;
};

static void side_init(struct side *s, const struct kvi_opts *opts)
{
    memset(s, 0, sizeof(*s));
    assert_int_equal(kvi_create(opts, &s->index), 0);
    assert_int_equal(ki_applier_init(&s->applier, 7, 0, BLOCK_SIZE, KI_MM_PLACED), 0);
}

static void side_fini(struct side *s)
{
    ki_applier_fini(&s->applier);
    kvi_destroy(s->index);
}

/* -- events ------------------------------------------------------------------------------------ */

struct event {
    enum { STORE, REMOVE, CLEAR } type;
    bool root, host, window; /* of a sliding window's group */
    uint32_t rank;
    uint64_t parent, hashes[4];
    size_t n;
    uint32_t salt; /* other tokens than usual */
    bool few;      /* kinds of tokens, so that siblings have the same ones */
};

static void put_event(struct kv_buf *out, const struct event *e)
{
    kv_msgpack_put_map(out, (e->type == STORE ? 7u : e->type == REMOVE ? 4u : 2u) + 3u * e->window);
    if (e->window) {
        kv_msgpack_put_str(out, "group_idx");
        kv_msgpack_put_u64(out, 1);
        kv_msgpack_put_str(out, "kv_cache_spec_kind");
        kv_msgpack_put_str(out, "sliding_window");
        kv_msgpack_put_str(out, "kv_cache_spec_sliding_window");
        kv_msgpack_put_u64(out, BLOCK_SIZE + 1);
    }
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, e->type == STORE    ? "BlockStored"
                            : e->type == REMOVE ? "BlockRemoved"
                                                : "AllBlocksCleared");
    kv_msgpack_put_str(out, "dp_rank");
    kv_msgpack_put_u64(out, e->rank);
    if (e->type == CLEAR)
        return;
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, e->host ? "CPU" : "GPU");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, (uint32_t)e->n);
    for (size_t i = 0; i < e->n; i++)
        kv_msgpack_put_u64(out, e->hashes[i]);
    if (e->type == REMOVE)
        return;
    kv_msgpack_put_str(out, "parent_block_hash");
    if (e->root)
        kv_msgpack_put_nil(out);
    else
        kv_msgpack_put_u64(out, e->parent);
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, (uint32_t)e->n * BLOCK_SIZE);
    for (size_t i = 0; i < e->n * BLOCK_SIZE; i++) {
        uint64_t kind = e->hashes[i / BLOCK_SIZE] % (e->few ? FEW_TOKENS : HASHES + 1);

        kv_msgpack_put_u64(out, kind * 10 + i % BLOCK_SIZE + e->salt);
    }
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, BLOCK_SIZE);
}

static struct event make_event(uint64_t *random, uint64_t *last, bool few)
{
    struct event e = {.type = STORE, .parent = *last, .n = 1 + unit_below(random, 3), .few = few};
    uint64_t dice = unit_below(random, 100);

    if (dice >= 90)
        e.type = dice == 99 ? CLEAR : REMOVE;
    else if (dice >= 82)
        e.root = true;
    else if (dice >= 70)
        e.parent = 1 + unit_below(random, HASHES + 5); /* some are never stored */
    e.host = unit_below(random, 12) == 0;
    e.rank = unit_below(random, 10) == 0;
    e.salt = unit_below(random, 30) == 0 ? 7 : 0;
    for (size_t i = 0; i < e.n; i++)
        e.hashes[i] = 1 + unit_below(random, HASHES);
    if (e.type == STORE)
        *last = e.hashes[e.n - 1];
    return e;
}

/* A batch of @n events. */
static void make_batch(struct kv_buf *out, const struct event *events, size_t n)
{
    kv_msgpack_put_array(out, 2);
    kv_msgpack_put_double(out, 1.5);
    kv_msgpack_put_array(out, (uint32_t)n);
    for (size_t i = 0; i < n; i++)
        put_event(out, &events[i]);
    assert_int_equal(out->error, 0);
}

/* -- what an index says ------------------------------------------------------------------------ */

struct facts {
    struct fact {
        uint64_t word[8];
    } * items;
    size_t n, capacity;
};

static void add_fact(struct facts *facts, struct fact fact)
{
    if (facts->n == facts->capacity) {
        facts->capacity = facts->capacity ? 2 * facts->capacity : 256;
        facts->items = realloc(facts->items, facts->capacity * sizeof(*facts->items));
        assert_non_null(facts->items);
    }
    facts->items[facts->n++] = fact;
}

static int add_run(void *arg, const struct kvi_dump_run *run)
{
    uint64_t parent = run->parent ? *run->parent : 0;

    for (size_t i = 0; i < run->n; i++) {
        add_fact(arg, (struct fact){{1, run->holder.rank, run->tier, parent, run->blocks[i].hash,
                                     run->blocks[i].tokens_hash}});
        parent = run->blocks[i].hash;
    }
    return 0;
}

static int add_extra(void *arg, const struct kvi_extra *extra)
{
    add_fact(arg, (struct fact){{2 + extra->kind, extra->holder.rank, extra->hash, extra->parent,
                                 extra->tokens_hash, extra->tiers, extra->tier, extra->copies}});
    return 0;
}

static int compare_facts(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct fact));
}

static struct facts facts_of(struct kvi_index *index)
{
    struct facts facts = {0};

    assert_int_equal(kvi_dump(index, add_run, &facts), 0);
    assert_int_equal(kvi_dump_extras(index, add_extra, &facts), 0);
    if (facts.n)
        qsort(facts.items, facts.n, sizeof(*facts.items), compare_facts);
    return facts;
}

static void compare_sides(struct side *a, struct side *b)
{
    struct facts x = facts_of(a->index), y = facts_of(b->index);
    struct kvi_stats p = {.size = sizeof(p)}, q = {.size = sizeof(q)};

    assert_int_equal(x.n, y.n);
    if (x.n)
        assert_memory_equal(x.items, y.items, x.n * sizeof(*x.items));
    assert_int_equal(kvi_get_stats(a->index, &p), 0);
    assert_int_equal(kvi_get_stats(b->index, &q), 0);
    assert_int_equal(p.refused, q.refused);
    assert_int_equal(p.holder_blocks, q.holder_blocks);
    assert_int_equal(a->applier.stats.orphans, b->applier.stats.orphans);
    assert_int_equal(a->applier.stats.rejected, b->applier.stats.rejected);
    assert_int_equal(a->applier.stats.events, b->applier.stats.events);
    assert_int_equal(a->applier.stats.blocks, b->applier.stats.blocks);
    free(x.items);
    free(y.items);
}

/* Compare reports and blocks in doubt, which streams know beside the index. */
static void compare_doubts(const struct ki_applier *a, const struct ki_applier *b)
{
    assert_int_equal(a->reports.seen, b->reports.seen);
    assert_int_equal(a->reports.suspects, b->reports.suspects);
    assert_int_equal(a->ranges.n, b->ranges.n);
    assert_int_equal(a->ranges.n_open, b->ranges.n_open);
}

/* -- tests ------------------------------------------------------------------------------------- */

#define COUNTERS 32

/* The values of the process's event counts, in the order of their lines. */
static size_t read_counts(uint64_t *ret)
{
    struct kv_buf text = KV_BUF_INIT;
    size_t n = 0;

    ki_event_counts_render(&text);
    for (const char *p = kv_buf_cstr(&text); (p = strstr(p, "\"} ")) != NULL && n < COUNTERS;)
        ret[n++] = strtoull(p += 3, NULL, 10);
    kv_buf_fini(&text);
    return n;
}

/* One batch an event, and never two in a row that may wait. */
static void run_model(struct side *s, const struct event *events, size_t n)
{
    struct kv_buf batch = KV_BUF_INIT;

    for (size_t i = 0; i < n; i++) {
        kv_buf_clear(&batch);
        make_batch(&batch, &events[i], 1);
        s->n_part +=
            ki_applier_apply(&s->applier, s->index, batch.data, batch.len) == KI_APPLIED_PART;
    }
    kv_buf_fini(&batch);
}

/* Batches of some events, of which only the first may be without a parent; flushed now and then. */
static void run_waiting(struct side *s, const struct event *events, size_t n, uint64_t *random)
{
    struct kv_buf batch = KV_BUF_INIT;
    size_t wanted = 1 + unit_below(random, 30), step;

    for (size_t i = 0; i < n; i += step) {
        bool several = unit_below(random, 2);

        step = 1;
        while (several && !events[i].root && step < 6 && i + step < n && !events[i + step].root)
            step++;
        kv_buf_clear(&batch);
        make_batch(&batch, &events[i], step);
        s->n_part +=
            ki_applier_put(&s->applier, s->index, batch.data, batch.len) == KI_APPLIED_PART;
        if (--wanted == 0) {
            s->n_part += ki_applier_flush(&s->applier, s->index) == KI_APPLIED_PART;
            wanted = 1 + unit_below(random, 30);
        }
    }
    s->n_part += ki_applier_flush(&s->applier, s->index) == KI_APPLIED_PART;
    kv_buf_fini(&batch);
}

/* Limits that are met now and then. */
static struct kvi_opts make_limits(uint64_t *random)
{
    struct kvi_opts opts = KVI_OPTS_INIT;

    if (unit_below(random, 3) == 0)
        opts.max_holder_blocks = 5 + unit_below(random, 40);
    if (unit_below(random, 3) == 0)
        opts.max_blocks = 10 + unit_below(random, 60);
    if (unit_below(random, 3) == 0)
        opts.max_parked_holder = 1 + unit_below(random, 12);
    if (unit_below(random, 3) == 0)
        opts.max_copies = 1 + unit_below(random, 12);
    return opts;
}

static void waiting_changes_nothing(void **state)
{
    uint64_t random = unit_seed(), before[COUNTERS], model[COUNTERS], waiting[COUNTERS];
    static struct event events[EVENTS];
    (void)state;

    kv_log_set_level(KV_LOG_ERROR); /* refusals are part of it */
    for (size_t round = unit_rounds(300); round--;) {
        struct kvi_opts opts = make_limits(&random);
        bool few = unit_below(&random, 2);
        uint64_t last = 1;
        struct side a, b;
        size_t n = 0;

        side_init(&a, &opts);
        side_init(&b, &opts);
        for (size_t i = 0; i < EVENTS; i++)
            events[i] = make_event(&random, &last, few);
        run_model(&a, events, EVENTS); /* so that all counts have appeared */
        side_fini(&a);
        side_init(&a, &opts);
        n = read_counts(before);
        run_model(&a, events, EVENTS);
        assert_int_equal(read_counts(model), n);
        run_waiting(&b, events, EVENTS, &random);
        assert_int_equal(read_counts(waiting), n);
        compare_sides(&a, &b);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(waiting[i] - model[i], model[i] - before[i]);
        assert_int_equal(a.n_part > 0, b.n_part > 0);
        side_fini(&a);
        side_fini(&b);
    }
}

/*
 * Batches as engines send them: prompts from the root in several events, old prompts again, reports of
 * held blocks among them. One side stores each event at once.
 */
static void make_prompts(struct event *events, size_t n, uint64_t *random)
{
    uint64_t last = 1, prompt = 1;
    size_t left = 0;

    for (size_t i = 0; i < n; i++) {
        if (!left) {
            left = 1 + unit_below(random, 4);
            prompt = 1 + unit_below(random, 12); /* its blocks: 4 * prompt, 4 * prompt + 1, ... */
            events[i] = (struct event){.type = STORE, .root = true};
            last = 4 * prompt;
        } else {
            events[i] = (struct event){.type = STORE, .parent = last - 1};
        }
        left--;
        events[i].n = 1 + unit_below(random, 2);
        for (size_t k = 0; k < events[i].n; k++)
            events[i].hashes[k] = last++;
        if (unit_below(random, 8) == 0)
            events[i] = make_event(random, &(uint64_t){prompt}, false);
    }
}

static void put_batch(struct side *s, const struct event *events, size_t n, bool flush)
{
    struct kv_buf batch = KV_BUF_INIT;
    enum ki_applied applied;

    make_batch(&batch, events, n);
    applied = ki_applier_put(&s->applier, s->index, batch.data, batch.len);
    s->n_part = applied == KI_APPLIED_CLEARED ? 0 : s->n_part + (applied == KI_APPLIED_PART);
    if (flush)
        s->n_part += ki_applier_flush(&s->applier, s->index) == KI_APPLIED_PART;
    kv_buf_fini(&batch);
}

static void prompts_that_wait_change_nothing(void **state)
{
    uint64_t random = unit_seed();
    static struct event events[EVENTS];
    size_t n_waited = 0, n_reports = 0, n_suspects = 0;
    (void)state;

    kv_log_set_level(KV_LOG_ERROR);
    for (size_t round = unit_rounds(600); round--;) {
        struct kvi_opts opts = make_limits(&random);
        size_t until = unit_below(&random, EVENTS), n;
        struct side a, b;

        side_init(&a, &opts);
        side_init(&b, &opts);
        a.applier.run.off = true;
        make_prompts(events, EVENTS, &random);
        for (size_t i = 0; i < until; i += n) {
            n = KV_MIN(1 + unit_below(&random, 12), until - i);
            put_batch(&a, events + i, n, true);
            put_batch(&b, events + i, n, unit_below(&random, 4) == 0);
            n_waited += b.applier.run.n_chains > 1;
        }
        b.n_part += ki_applier_flush(&b.applier, b.index) == KI_APPLIED_PART;
        compare_sides(&a, &b);
        assert_int_equal(a.n_part > 0, b.n_part > 0);
        compare_doubts(&a.applier, &b.applier);
        n_reports += a.applier.reports.seen;
        n_suspects += a.applier.ranges.n > 0;
        side_fini(&a);
        side_fini(&b);
    }
    assert_true(n_waited > 0 && n_reports > 0 && n_suspects > 0);
}

/* -- Dynamo's events, of which each means one copy --------------------------------------------- */

static void pack_event(struct kv_buf *out, const struct event *e, uint64_t event_id)
{
    struct kv_block blocks[4];
    const struct kve_router_event routed = {
        .holder = {7, e->rank},
        .event_id = event_id,
        .type = e->type == STORE    ? KVE_OP_STORE
                : e->type == REMOVE ? KVE_OP_REMOVE
                                    : KVE_OP_CLEAR,
        .tier = e->host ? KV_TIER_HOST : KV_TIER_DEVICE,
        .has_parent = !e->root,
        .parent = e->parent,
        .blocks = blocks,
        .hashes = e->hashes,
        .n = e->n,
    };

    for (size_t i = 0; i < e->n; i++) {
        uint64_t kind = e->hashes[i] % (e->few ? FEW_TOKENS : HASHES + 1);

        blocks[i] = (struct kv_block){.hash = e->hashes[i], .tokens_hash = 1000 + kind + e->salt};
    }
    kve_router_event_pack(out, &routed);
}

/* @ids: the last event_id of each rank. */
static void put_envelope(struct side *s, const struct event *events, size_t n, uint64_t ids[2],
                         bool flush)
{
    struct kv_buf payload = KV_BUF_INIT, message = KV_BUF_INIT;
    struct kve_envelope envelope = {.publisher = 1,
                                    .topic = {KVE_ENVELOPE_TOPIC, strlen(KVE_ENVELOPE_TOPIC)}};
    enum ki_applied applied;

    kv_msgpack_put_array(&payload, (uint32_t)n);
    for (size_t i = 0; i < n; i++)
        pack_event(&payload, &events[i], ++ids[events[i].rank]);
    envelope.payload = (struct kv_str){payload.data, payload.len};
    kve_envelope_write(&message, &envelope);
    applied = ki_applier_put(&s->applier, s->index, message.data, message.len);
    s->n_part = applied == KI_APPLIED_CLEARED ? 0 : s->n_part + (applied == KI_APPLIED_PART);
    if (flush)
        s->n_part += ki_applier_flush(&s->applier, s->index) == KI_APPLIED_PART;
    kv_buf_fini(&payload);
    kv_buf_fini(&message);
}

/* Blocks that are told again, below other blocks, in other tiers, and above the limits of the index. */
static void single_stores_that_wait_change_nothing(void **state)
{
    uint64_t random = unit_seed();
    static struct event events[EVENTS];
    size_t n_waited = 0, n_again = 0;
    (void)state;

    kv_log_set_level(KV_LOG_ERROR);
    for (size_t round = unit_rounds(600); round--;) {
        struct kvi_opts opts = make_limits(&random);
        size_t until = unit_below(&random, EVENTS), n;
        uint64_t ids[2][2] = {{0}}, last = 1;
        bool few = unit_below(&random, 2), any = unit_below(&random, 2);
        struct side a, b;

        side_init(&a, &opts);
        side_init(&b, &opts);
        a.applier.run.off = true;
        a.applier.unordered = b.applier.unordered = unit_below(&random, 2);
        make_prompts(events, EVENTS, &random);
        for (size_t i = 0; i < EVENTS && any; i++)
            events[i] = make_event(&random, &last, few);
        for (size_t i = 0; i < until; i += n) {
            n = KV_MIN(1 + unit_below(&random, 12), until - i);
            put_envelope(&a, events + i, n, ids[0], true);
            put_envelope(&b, events + i, n, ids[1], unit_below(&random, 4) == 0);
            n_waited += b.applier.run.n_chains > 1;
        }
        b.n_part += ki_applier_flush(&b.applier, b.index) == KI_APPLIED_PART;
        compare_sides(&a, &b);
        assert_int_equal(a.n_part > 0, b.n_part > 0);
        /* A doubt about moved blocks from before a clear may be noticed behind it. */
        assert_int_equal(ki_applier_reasons(&a.applier) & ~ki_applier_reasons(&b.applier), 0);
        n_again += a.applier.stats.rejected + a.applier.stats.orphans;
        side_fini(&a);
        side_fini(&b);
    }
    assert_true(n_waited > 0 && n_again > 0);
}

/* Put batches of @ends into a side that waits and one that doesn't, and compare them. */
static void compare_waiting(const struct event *events, const size_t *ends, size_t n)
{
    struct kvi_opts opts = KVI_OPTS_INIT;
    struct side a, b;

    side_init(&a, &opts);
    side_init(&b, &opts);
    a.applier.run.off = true;
    for (size_t i = 0, from = 0; i < n; from = ends[i++]) {
        put_batch(&a, events + from, ends[i] - from, true);
        put_batch(&b, events + from, ends[i] - from, false);
    }
    b.n_part += ki_applier_flush(&b.applier, b.index) == KI_APPLIED_PART;
    compare_sides(&a, &b);
    compare_doubts(&a.applier, &b.applier);
    assert_int_equal(a.n_part, b.n_part);
    side_fini(&a);
    side_fini(&b);
}

/*
 * Streams of engines whose hashes don't tell places: blocks that may have been reports come again
 * elsewhere, and a block of the root waits below another one.
 */
static void blocks_in_two_places_change_nothing(void **state)
{
    const struct event suspects[] = {
        {.root = true, .hashes = {40, 41}, .n = 2}, {.root = true, .hashes = {40, 41}, .n = 2},
        {.root = true, .hashes = {36}, .n = 1},     {.parent = 36, .hashes = {37, 38}, .n = 2},
        {.parent = 38, .hashes = {39, 40}, .n = 2}, {.parent = 38, .hashes = {39, 40}, .n = 2},
        {.parent = 40, .hashes = {41}, .n = 1},
    };
    const struct event below[] = {
        {.root = true, .host = true, .hashes = {24, 48}, .n = 2},
        {.parent = 23, .hashes = {24}, .n = 1},
        {.parent = 24, .hashes = {25, 26}, .n = 2},
        {.root = true, .hashes = {24, 25}, .n = 2},
        {.parent = 25, .hashes = {26}, .n = 1},
    };
    (void)state;

    compare_waiting(suspects, (const size_t[]){1, 5, 7}, 3);
    compare_waiting(below, (const size_t[]){2, 5}, 2);
}

/* A window is declared while stores wait, some of which the index refuses. */
static void windows_that_come_later_are_declared(void **state)
{
    uint64_t random = unit_seed();
    static struct event events[EVENTS];
    size_t n_refused = 0;
    (void)state;

    kv_log_set_level(KV_LOG_ERROR);
    for (size_t round = unit_rounds(300); round--;) {
        struct kvi_opts opts = make_limits(&random);
        size_t until = unit_below(&random, EVENTS), from = unit_below(&random, EVENTS), n;
        struct side a, b;

        side_init(&a, &opts);
        side_init(&b, &opts);
        a.applier.run.off = true;
        make_prompts(events, EVENTS, &random);
        for (size_t i = from; i < EVENTS; i++)
            events[i].window = events[i].type == STORE && unit_below(&random, 3) == 0;
        for (size_t i = 0; i < until; i += n) {
            n = KV_MIN(1 + unit_below(&random, 4), until - i);
            put_batch(&a, events + i, n, true);
            put_batch(&b, events + i, n, unit_below(&random, 8) == 0);
        }
        b.n_part += ki_applier_flush(&b.applier, b.index) == KI_APPLIED_PART;
        compare_sides(&a, &b);
        assert_int_equal(a.applier.has_windows, b.applier.has_windows);
        assert_int_equal(a.n_part > 0, b.n_part > 0);
        n_refused += a.applier.has_windows && a.n_part > 0;
        side_fini(&a);
        side_fini(&b);
    }
    assert_true(n_refused > 0);
}

/* A long chain told block by block: one store for all its blocks. */
static void chains_are_stored_at_once(void **state)
{
    struct kvi_stats stats = {.size = sizeof(stats)};
    struct kvi_opts opts = KVI_OPTS_INIT;
    struct kv_buf batch = KV_BUF_INIT;
    struct side s;
    (void)state;

    side_init(&s, &opts);
    for (uint64_t i = 1; i <= KI_RUN_EVENTS; i++) {
        struct event e = {.type = STORE, .root = i == 1, .parent = i - 1, .hashes = {i}, .n = 1};

        kv_buf_clear(&batch);
        make_batch(&batch, &e, 1);
        assert_int_equal(ki_applier_put(&s.applier, s.index, batch.data, batch.len), KI_APPLIED);
        assert_int_equal(kvi_get_stats(s.index, &stats), 0);
        assert_int_equal(stats.blocks, 0);
    }
    assert_int_equal(ki_applier_flush(&s.applier, s.index), KI_APPLIED);
    assert_int_equal(kvi_get_stats(s.index, &stats), 0);
    assert_int_equal(stats.blocks, KI_RUN_EVENTS);
    assert_int_equal(s.applier.stats.blocks, KI_RUN_EVENTS);
    kv_buf_fini(&batch);
    side_fini(&s);
}

/* A purge forgets stores that wait, too: the stream is told of them as of all others. */
static void blocks_that_wait_are_held(void **state)
{
    struct kvi_opts opts = KVI_OPTS_INIT;
    struct kv_buf batch = KV_BUF_INIT;
    struct side s;
    (void)state;

    side_init(&s, &opts);
    for (uint64_t i = 1; i <= 10; i++) {
        struct event e = {.type = STORE, .root = i == 1, .parent = i - 1, .hashes = {i}, .n = 1};

        kv_buf_clear(&batch);
        make_batch(&batch, &e, 1);
        assert_int_equal(ki_applier_put(&s.applier, s.index, batch.data, batch.len), KI_APPLIED);
        assert_int_equal(ki_applier_held(&s.applier, s.index), i);
    }
    assert_int_equal(s.applier.run.n_blocks, 10);
    assert_int_equal(ki_applier_flush(&s.applier, s.index), KI_APPLIED);
    assert_int_equal(ki_applier_held(&s.applier, s.index), 10);
    ki_applier_purge(&s.applier, s.index, false);
    assert_int_equal(ki_applier_held(&s.applier, s.index), 0);
    kv_buf_fini(&batch);
    side_fini(&s);
}

/*
 * A block that waits below the first of a run has the tokens of the second. One by one it takes the
 * place below the first, and the second shares that.
 */
static void a_parked_child_comes_before_the_rest_of_the_run(void **state)
{
    static const struct event events[] = {
        {.type = STORE, .parent = 2, .hashes = {53}, .n = 1, .few = true},
        {.type = STORE, .root = true, .hashes = {1}, .n = 1, .few = true},
        {.type = STORE, .parent = 1, .hashes = {2}, .n = 1, .few = true},
        {.type = STORE, .parent = 2, .hashes = {3}, .n = 1, .few = true},
        {.type = REMOVE, .hashes = {3}, .n = 1},
    };
    struct kvi_opts opts = KVI_OPTS_INIT;
    struct kv_buf batch = KV_BUF_INIT;
    struct side a, b;
    (void)state;

    for (size_t n = KV_COUNT(events) - 1; n <= KV_COUNT(events); n++) {
        side_init(&a, &opts);
        side_init(&b, &opts);
        run_model(&a, events, n);
        kv_buf_clear(&batch);
        make_batch(&batch, events, n);
        assert_int_equal(ki_applier_apply(&b.applier, b.index, batch.data, batch.len), KI_APPLIED);
        compare_sides(&a, &b);
        side_fini(&a);
        side_fini(&b);
    }
    kv_buf_fini(&batch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chains_are_stored_at_once),
        cmocka_unit_test(blocks_that_wait_are_held),
        cmocka_unit_test(a_parked_child_comes_before_the_rest_of_the_run),
        cmocka_unit_test(waiting_changes_nothing),
        cmocka_unit_test(prompts_that_wait_change_nothing),
        cmocka_unit_test(single_stores_that_wait_change_nothing),
        cmocka_unit_test(blocks_in_two_places_change_nothing),
        cmocka_unit_test(windows_that_come_later_are_declared),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
