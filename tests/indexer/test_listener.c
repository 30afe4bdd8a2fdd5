// SPDX-License-Identifier: Apache-2.0
/* A listener without sockets: batches are offered to it, and other threads' calls are looked at. */
#include "base/unit.h"

#include "event/pack.h"
#include "event/reader/reader.h"
#include "indexer/model/model.h"
#include "indexer/registry/registry.h"
#include "indexer/stream/listener_impl.h"

/* Blocks of group 1, of @size tokens; the registered ones have 4. */
#define WINDOW_BLOCKS(size, hashes)                                                                \
    "{'type': 'BlockStored', 'block_size': " #size ", 'group_idx': 1, 'kv_cache_spec_kind': "      \
    "'sliding_window', 'kv_cache_spec_sliding_window': 5, 'medium': 'GPU', 'token_ids': [1,2,3,4]" \
    ", 'block_hashes': [" hashes "]}"
#define MAIN_BLOCKS                                                                        \
    "{'type': 'BlockStored', 'block_size': 4, 'group_idx': 0, 'kv_cache_spec_kind': "      \
    "'full_attention', 'medium': 'GPU', 'token_ids': [1,2,3,4,5,6,7,8], 'block_hashes': [" \
    "11, 12]}"

struct world {
    struct ki_listener_env env;
    struct ki_listener *l;
    uint64_t process, sequence;
};

static void world_init(struct world *w, struct kvi_index *index)
{
    struct ki_registration reg = {.instance = 7,
                                  .block_size = 4,
                                  .endpoint = "tcp://127.0.0.1:1",
                                  .model = "m",
                                  .tenant = "default"};
    struct ki_model *model;

    memset(w, 0, sizeof(*w));
    assert_int_equal(ki_model_create("m", "default", 4, index, &model), 0);
    assert_int_equal(ki_listener_create(&w->env, &reg, model, &w->l), 0);
    ki_stream_start(&w->l->stream, 1);
}

static void offer(struct world *w, const char *events)
{
    struct kv_buf payload = KV_BUF_INIT;
    struct ki_live batch = {
        .id = {.sequence = w->sequence, .digest = w->process << 32 | w->sequence}};

    w->sequence++;
    pack(&payload, "[1.5, [%s], 0]", events);
    batch.payload = (struct kve_span){payload.data, payload.len};
    assert_int_equal(ki_listener_offer_live(w->l, &batch, 1, 1), 1);
    kv_buf_fini(&payload);
}

static struct ki_state state_of(const struct world *w)
{
    struct ki_state state;

    ki_state_take(w->l, &state);
    return state;
}

struct dump {
    struct world *world;
    size_t runs, windows;
};

/* Once the first run is written, the group gets blocks of another size. */
static int take_run(void *arg, const struct kvi_dump_run *run)
{
    struct dump *dump = arg;

    (void)run;
    if (!dump->runs++)
        offer(dump->world, WINDOW_BLOCKS(4, "11"));
    return 0;
}

static int take_extra(void *arg, const struct kvi_extra *extra)
{
    struct dump *dump = arg;

    dump->windows += extra->kind == KVI_EXTRA_WINDOW;
    return 0;
}

/* A copy of blocks from before a purge and windows from after it isn't taken for one of one batch. */
static void test_purge_while_held(void **state)
{
    struct ki_snapshot *snapshot;
    struct dump dump = {0};
    uint64_t generation;
    struct world w;

    (void)state;
    world_init(&w, NULL);
    dump.world = &w;
    offer(&w, MAIN_BLOCKS "," WINDOW_BLOCKS(2, "10, 11"));
    assert_int_equal(ki_listener_hold(w.l, &snapshot, &generation), 0);
    ki_snapshot_free(snapshot);
    offer(&w, WINDOW_BLOCKS(2, "10, 11")); /* as a thread that doesn't ask */
    assert_true(ki_listener_let_go(w.l, generation));
    assert_int_equal(ki_listener_hold(w.l, &snapshot, &generation), 0);
    ki_snapshot_free(snapshot);
    assert_int_equal(kvi_dump(w.l->model->index, take_run, &dump), 0);
    assert_int_equal(kvi_dump_extras(w.l->model->index, take_extra, &dump), 0);
    assert_int_equal(dump.runs, 1);
    assert_int_equal(dump.windows, 1);
    assert_false(ki_listener_let_go(w.l, generation));
    ki_listener_release(w.l);
}

struct told {
    struct world *world;
    size_t times;
    struct ki_loss loss;
};

static void tell(void *arg, const struct ki_listener *l, const struct ki_loss *loss)
{
    struct told *told = arg;

    assert_ptr_equal(l, told->world->l);
    told->times++;
    told->loss = *loss;
    assert_int_equal(pthread_mutex_trylock(&told->world->l->lock), 0);
    pthread_mutex_unlock(&told->world->l->lock);
}

/* Streams that bring the same ranks learn that their blocks have left, once the lock is free. */
static void test_losses_are_told(void **state)
{
    struct told told = {0};
    struct world w;

    (void)state;
    world_init(&w, NULL);
    told.world = &w;
    w.env.lost = tell;
    w.env.lost_arg = &told;
    offer(&w, MAIN_BLOCKS "," WINDOW_BLOCKS(2, "10, 11"));
    offer(&w, WINDOW_BLOCKS(2, "12, 13"));
    assert_int_equal(told.times, 0);
    offer(&w, WINDOW_BLOCKS(4, "11")); /* of another size: all is forgotten */
    assert_int_equal(told.times, 1);
    assert_int_equal(told.loss.of, KI_RANKS_MANY);
    assert_false(told.loss.own);
    assert_true(told.loss.blocks > 0);
    offer(&w, MAIN_BLOCKS);
    assert_int_equal(told.times, 1);
    offer(&w, "['AllBlocksCleared']");
    assert_int_equal(told.times, 2);
    assert_int_equal(told.loss.of, KI_RANKS_ONE);
    assert_int_equal(told.loss.rank, 0);
    assert_int_equal(told.loss.blocks, 2);
    offer(&w, MAIN_BLOCKS);
    w.process = 1; /* the engine starts over */
    w.sequence = 0;
    offer(&w, MAIN_BLOCKS);
    assert_int_equal(told.times, 3);
    assert_int_equal(told.loss.of, KI_RANKS_MANY);
    assert_int_equal(told.loss.blocks, 2);
    ki_listener_release(w.l);
}

/* Operators see why a view is partial: how many blocks a limit has left out. */
static void test_left_out(void **state)
{
    const struct kvi_opts opts = {.size = sizeof(opts), .max_parked_holder = 1};
    struct ki_worker_info *info = calloc(1, sizeof(*info));
    struct kvi_index *index;
    struct world w;

    (void)state;
    assert_non_null(info);
    assert_int_equal(kvi_create(&opts, &index), 0);
    world_init(&w, index);
    for (int i = 0; i < 3; i++) {
        char text[256];

        snprintf(
            text, sizeof(text),
            "{'type': 'BlockStored', 'block_size': 4, 'medium': 'GPU', 'token_ids': [1,2,3,4], "
            "'block_hashes': [%d], 'parent_block_hash': 9}",
            20 + i);
        offer(&w, text);
    }
    ki_listener_info(w.l, info);
    assert_int_equal(info->left_out, 2);
    assert_true(info->reasons & KI_BECAUSE(LEFT_OUT));
    /* Removing these blocks contradicts nothing: a resync would forget known ones. */
    offer(&w, "{'type': 'BlockRemoved', 'medium': 'GPU', 'block_hashes': [20, 21]}");
    assert_int_equal(ki_applier_unexplained(&w.l->applier), 0);
    ki_worker_infos_free(info, 1);
    ki_listener_release(w.l);
}

static bool is_partial(struct world *w)
{
    struct ki_worker_info *info = calloc(1, sizeof(*info));
    bool partial;

    assert_non_null(info);
    ki_listener_info(w->l, info);
    partial = info->reasons;
    ki_worker_infos_free(info, 1);
    return partial;
}

/*
 * Without a connection the engine may have started over, and a replica may be connected to the new
 * process. The replica is partial until the position is proved.
 */
static void test_dumps_without_a_connection(void **state)
{
    enum { BACKLOG, REPLAY, NEXT, PROOFS };

    (void)state;
    for (unsigned i = 0; i < 2 * PROOFS; i++) {
        struct ki_batch_id position = {.sequence = 0, .digest = 1, .timestamp = 1.5},
                           next = position;
        bool lost = i >= PROOFS;
        struct ki_snapshot *snapshot;
        struct world a, b;

        world_init(&a, NULL);
        assert_int_equal(ki_stream_connected(&a.l->stream, false, 1), 0);
        offer(&a, MAIN_BLOCKS);
        if (lost)
            ki_stream_disconnected(&a.l->stream, kv_now_ns());
        a.l->stream.timestamp = position.timestamp;
        assert_int_equal(ki_snapshot_take(a.l, &snapshot), 0);
        assert_int_equal((snapshot->state.facts & KI_FACT_ADRIFT) != 0, lost);
        assert_false(snapshot->state.reasons);
        ki_stream_reachable(&a.l->stream, 1); /* what came before may still be waiting */
        assert_true(state_of(&a).facts & KI_FACT_ADRIFT);
        world_init(&b, NULL);
        b.l->stream.opts.can_replay = i % PROOFS == REPLAY;
        b.l->stream.opts.timeout_ns = 1;
        ki_snapshot_give(snapshot, b.l);
        ki_snapshot_free(snapshot);
        assert_true(state_of(&b).facts & KI_FACT_ADRIFT);
        (void)ki_stream_connected(&b.l->stream, false, 1);
        assert_false(state_of(&b).facts & KI_FACT_ADRIFT);
        assert_int_equal(is_partial(&b), lost);
        next.sequence++;
        next.digest++;
        if (i % PROOFS == BACKLOG)
            assert_int_equal(ki_stream_live(&b.l->stream, &position, false, 1), KI_STEP_DROP);
        else if (i % PROOFS == REPLAY)
            assert_int_equal(ki_stream_replayed(&b.l->stream, &position, 1), KI_STEP_DROP);
        else
            assert_int_equal(ki_stream_live(&b.l->stream, &next, false, 1), KI_STEP_APPLY);
        assert_int_equal(is_partial(&b), lost && i % PROOFS == NEXT);
        ki_listener_release(a.l);
        ki_listener_release(b.l);
    }
}

#define CLEAR(rank) "{'type': 'AllBlocksCleared', 'dp_rank': " #rank "}"
/* An engine whose clears empty all tiers: it has blocks in each, by names that vLLM doesn't use. */
#define IN_TIER(hash, medium)                                      \
    "{'type': 'BlockStored', 'block_size': 4, 'token_ids': [" hash \
    ",2,3,4], 'block_hashes': [" hash "], 'medium': '" medium "'}"
#define IN_ALL_TIERS \
    IN_TIER("9", "CPU_PINNED") "," IN_TIER("8", "DISK") "," IN_TIER("7", "EXTERNAL")
/* Left out, for a hash that comes twice. */
#define TWICE(more)                                                                             \
    "{'type': 'BlockStored', 'block_size': 4, 'token_ids': [1,2,3,4,5,6,7,8], 'block_hashes': " \
    "[1, 1]" more "}"
#define OF_RANK_5 ", 'dp_rank': 5"

/* The ranks of events that are left out are in doubt until each of them is cleared, and no others. */
static void test_ranks_of_left_out_events(void **state)
{
    static const struct {
        const char *events;
        uint32_t ranks[3], n; /* that are in doubt */
    } cases[] = {
        {TWICE(OF_RANK_5) "," TWICE(OF_RANK_5), {5}, 1},
        {TWICE(OF_RANK_5) "," TWICE(", 'dp_rank': 3"), {5, 3}, 2}, /* neither has had a block */
        {TWICE(OF_RANK_5) "," CLEAR(5), {5}, 1}, /* the clear may have come first */
        /* Events whose reading stopped before their rank, or that have none. */
        {"{'type': 'BlockSplit'" OF_RANK_5 "}", {5}, 1},
        {"{'type': 'BlockSplit', 'block_hashes': 1" OF_RANK_5 "}", {5}, 1},
        {"{'dp_rank': 5, 'type': 'BlockStored', 'block_hashes': 1}", {5}, 1},
        {"{'type': 'BlockStored', 'block_hashes': 1, 'dp_rank': nil}", {0}, 1},
        {"['BlockStored', 1, nil, [1,2,3,4], 4]", {0}, 1},
        {"17", {0}, 1},
        /* Beyond the limit. */
        {CLEAR(0) "," CLEAR(0) "," CLEAR(0) "," CLEAR(5) ", 17", {5, 0}, 2},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct world w;

        world_init(&w, NULL);
        w.l->applier.reader->max_events = 3;
        offer(&w, IN_ALL_TIERS);
        assert_false(ki_listener_reasons(w.l) & KI_BECAUSE(UNKNOWN_BLOCKS));
        offer(&w, cases[i].events);
        for (uint32_t k = 0; k < cases[i].n; k++) {
            char clear[64];

            assert_true(ki_listener_reasons(w.l) & KI_BECAUSE(UNKNOWN_BLOCKS));
            snprintf(clear, sizeof(clear), "{'type': 'AllBlocksCleared', 'dp_rank': %u}",
                     cases[i].ranks[k]);
            offer(&w, clear);
        }
        assert_false(ki_listener_reasons(w.l) & KI_BECAUSE(UNKNOWN_BLOCKS));
        ki_listener_release(w.l);
    }
}

/* An event that is left out leaves its rank and owner in doubt, and only their clears end that. */
static void test_left_out_of_whom(void **state)
{
    static const struct {
        const char *events, *clear, *its_clear;
    } cases[] = {
        {TWICE(OF_RANK_5) "," TWICE(""), CLEAR(0), CLEAR(5)},
        {TWICE("") "," TWICE(OF_RANK_5), CLEAR(5), CLEAR(0)},
        /* The rank comes behind what is malformed. */
        {"{'type': 'BlockStored', 'block_hashes': '1', 'medium': 'GPU'" OF_RANK_5 "}", CLEAR(0),
         CLEAR(5)},
        {TWICE(", 'ownership': 'a', 'medium': 'CPU_PINNED'"), CLEAR(0),
         "{'type': 'AllBlocksCleared', 'ownership': 'a'}"},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct world w;

        world_init(&w, NULL);
        offer(&w, IN_ALL_TIERS);
        assert_false(is_partial(&w));
        offer(&w, cases[i].events);
        assert_true(is_partial(&w));
        offer(&w, cases[i].clear);
        assert_true(is_partial(&w));
        offer(&w, cases[i].its_clear);
        assert_false(is_partial(&w));
        ki_listener_release(w.l);
    }
}

#define PART(medium)                                                                  \
    "{'type': 'BlockStored', 'block_size': 2, 'group_idx': 0, 'kv_cache_spec_kind': " \
    "'full_attention', 'medium': '" medium "', 'token_ids': [1,2], 'block_hashes': [9]}"

/* Parts of blocks are passed over where whole ones come, too: of full attention, in the same tier. */
static void test_parts_alone(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, NULL);
    offer(&w, PART("GPU"));
    assert_true(is_partial(&w));
    offer(&w, WINDOW_BLOCKS(4, "11"));
    assert_true(is_partial(&w));
    offer(&w, MAIN_BLOCKS);
    assert_false(is_partial(&w));
    offer(&w, PART("GPU"));
    assert_false(is_partial(&w));
    offer(&w, PART("CPU"));
    assert_true(is_partial(&w));
    ki_listener_release(w.l);
}

#define OF_POOL IN_TIER("20", "CPU', 'locality': 'LOCAL")
#define ROOT(hash) IN_TIER(hash, "GPU")
#define BELOW(hash, parent) IN_TIER(hash, "GPU', 'parent_block_hash': " parent ", 'lora_name': '")
#define REMOVED(hash) "{'type': 'BlockRemoved', 'medium': 'GPU', 'block_hashes': [" hash "]}"

/* After a reset of the device and of a pool below it, an event shows whose the second clear was. */
static void test_clears_of_both_pools(void **state)
{
    static const struct {
        const char *first, *second;
        bool partial;
    } cases[] = {
        {BELOW("3", "2"), NULL, false},     {REMOVED("2"), NULL, false},
        {REMOVED("1"), NULL, false},        {ROOT("5"), BELOW("3", "2"), false},
        {ROOT("2"), REMOVED("2"), true}, /* stored anew */
        {ROOT("5"), BELOW("6", "5"), true}, {REMOVED("9"), NULL, true},
        {CLEAR(0), REMOVED("1"), true},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct world w;

        world_init(&w, NULL);
        offer(&w, ROOT("9") "," OF_POOL);
        assert_false(is_partial(&w));
        offer(&w, CLEAR(0) "," ROOT("1") "," BELOW("2", "1") "," CLEAR(0));
        assert_true(is_partial(&w));
        offer(&w, cases[i].first);
        if (cases[i].second) {
            assert_true(is_partial(&w));
            offer(&w, cases[i].second);
        }
        assert_int_equal(is_partial(&w), cases[i].partial);
        ki_listener_release(w.l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dumps_without_a_connection),
        cmocka_unit_test(test_ranks_of_left_out_events),
        cmocka_unit_test(test_left_out_of_whom),
        cmocka_unit_test(test_parts_alone),
        cmocka_unit_test(test_clears_of_both_pools),
        cmocka_unit_test(test_purge_while_held),
        cmocka_unit_test(test_losses_are_told),
        cmocka_unit_test(test_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
