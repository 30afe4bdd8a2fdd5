// SPDX-License-Identifier: Apache-2.0
/*
 * A listener without sockets follows a vLLM engine (models/vllm.h) over a network that loses batches
 * and connections, while the engine resets its pool and starts over; with a replay service, which may
 * be away, and without. Whenever the view isn't partial, answers equal the engine's own lookups. With
 * the service back, no view stays partial.
 */
#include "models/follow.h"
#include "models/vllm.h"

#include "base/core/log.h"
#include "indexer/model/model.h"
#include "indexer/registry/registry.h"
#include "indexer/stream/listener_impl.h"

#define MOST 2048u /* batches of a process */

struct world {
    uint64_t *random;
    struct prompts prompts;
    struct vllm vllm;
    struct vllm_opts opts;
    struct ki_listener_env env;
    struct ki_listener *l;
    struct follower f; /* asks the listener's index */
    uint64_t process, sequence;
    bool reconnected; /* the next batch is the first of its connection */
    bool untold;      /* the stream hears of the connection once no replay runs and nothing waits */
    bool behind;      /* the last batch was lost */
    uint32_t loss;    /* per mille */
    uint64_t now_ns;
    bool can_replay, serves;
    uint64_t kept;                /* newest batches that the service has */
    struct kv_buf ring[MOST];     /* the process's batches */
    struct kv_buf forgotten;      /* struct kv_buf: of processes before, which may still wait */
    struct ki_live waiting[MOST]; /* behind a batch that is held */
    size_t n_waiting;
    size_t asked, partial, over, under;
};

static struct ki_listener *new_listener(struct world *w, struct kvi_index *index)
{
    struct ki_registration reg = {.instance = 7,
                                  .block_size = VLLM_BLOCK,
                                  .endpoint = "tcp://127.0.0.1:1",
                                  .model = "m",
                                  .tenant = "default",
                                  .habits = {.report_mode = KI_REPORTS_INCREMENTAL}};
    struct ki_listener *l;
    struct ki_model *model;

    assert_int_equal(ki_model_create("m", "default", VLLM_BLOCK, index, &model), 0);
    assert_int_equal(ki_listener_create(&w->env, &reg, model, &l), 0);
    l->stream.opts.can_replay = w->can_replay;
    l->stream.opts.timeout_ns = KV_NS_PER_S;
    return l;
}

static void tell_connection(struct world *w, bool anew)
{
    unsigned steps = ki_stream_connected(&w->l->stream, anew, w->now_ns);

    assert_int_equal(steps, w->can_replay ? KI_STEP_REQUEST : 0);
    w->untold = false;
}

/* @anew: the connection is younger than the stream's state. */
static void connect_listener(struct world *w, bool anew)
{
    ki_stream_reachable(&w->l->stream, w->now_ns);
    w->untold = w->l->stream.state != KI_STREAM_LIVE || w->n_waiting;
    if (!w->untold)
        tell_connection(w, anew);
}

static void open_listener(struct world *w)
{
    w->now_ns = 1;
    w->l = new_listener(w, NULL);
    ki_stream_start(&w->l->stream, w->now_ns);
    connect_listener(w, true);
}

static struct ki_batch_id id_of(const struct world *w, uint64_t sequence)
{
    return (struct ki_batch_id){.sequence = sequence,
                                .digest = w->process << 32 | sequence,
                                .timestamp = (double)(w->process << 20 | sequence) + 1};
}

/* The whole answer to a request, or what the stream wants of it. */
static void answer(struct world *w)
{
    uint64_t request = w->l->stream.stats.replays;
    uint64_t first = w->sequence - KV_MIN(w->sequence, w->kept);
    const struct kve_message end = {.is_end = true};

    for (uint64_t i = KV_MAX(first, w->l->stream.request); i < w->sequence; i++) {
        struct ki_batch_id id = id_of(w, i);
        const struct kve_message batch = {.sequence = i,
                                          .payload = {w->ring[i].data, w->ring[i].len}};

        ki_listener_offer_replayed(w->l, &id, &batch, w->now_ns);
        if (w->l->stream.state != KI_STREAM_REPLAYING || w->l->stream.stats.replays != request)
            return;
    }
    ki_listener_offer_replayed(w->l, &(struct ki_batch_id){0}, &end, w->now_ns);
}

/* Let the service answer, time pass, and batches go on that waited. */
static void settle(struct world *w)
{
    struct ki_listener *l = w->l;

    do {
        for (int i = 0; l->stream.state != KI_STREAM_LIVE; i++) {
            assert_true(i < 1000);
            if (w->serves && l->stream.state == KI_STREAM_REPLAYING) {
                answer(w);
            } else {
                w->now_ns = KV_MAX(w->now_ns, ki_stream_deadline(&l->stream));
                ki_listener_tick_stream(l, w->now_ns);
            }
        }
        for (size_t i = 0; i < w->n_waiting && !l->holding; i++) {
            assert_int_equal(ki_listener_offer_live(l, &w->waiting[i], 1, w->now_ns), 1);
            if (i + 1 == w->n_waiting || l->holding) {
                memmove(w->waiting, w->waiting + i + 1,
                        (w->n_waiting - i - 1) * sizeof(w->waiting[0]));
                w->n_waiting -= i + 1;
                break;
            }
        }
        if (l->stream.state == KI_STREAM_LIVE && !w->n_waiting && w->untold)
            tell_connection(w, true);
    } while (l->stream.state != KI_STREAM_LIVE || w->n_waiting);
}

static void forget_ring(struct world *w)
{
    kv_buf_append(&w->forgotten, w->ring, w->sequence * sizeof(w->ring[0]));
    assert_int_equal(w->forgotten.error, 0);
    w->sequence = 0;
}

static void free_batches(struct world *w)
{
    struct kv_buf *batches = (struct kv_buf *)(void *)w->forgotten.data;

    for (size_t i = 0; i < w->forgotten.len / sizeof(*batches); i++)
        kv_buf_fini(&batches[i]);
    kv_buf_fini(&w->forgotten);
}

static void publish(struct world *w, bool lost)
{
    struct kv_buf *payload = &w->ring[w->sequence];
    struct ki_live batch = {.id = id_of(w, w->sequence), .reconnected = w->reconnected};

    assert_true(w->sequence < MOST);
    *payload = vllm_take(&w->vllm);
    batch.payload = (struct kve_span){payload->data, payload->len};
    w->sequence++;
    w->behind = lost;
    if (lost)
        return;
    if (w->reconnected)
        w->untold = false;
    w->reconnected = false;
    if (w->l->holding || w->n_waiting)
        w->waiting[w->n_waiting++] = batch;
    else
        assert_int_equal(ki_listener_offer_live(w->l, &batch, 1, w->now_ns), 1);
}

static void act(struct world *w)
{
    struct vllm *v = &w->vllm;
    struct vllm_request *r = &v->requests[unit_below(w->random, VLLM_MAX_REQUESTS)];
    uint64_t what = unit_below(w->random, 100);

    if (what < 35 || !r->used) {
        struct prompt p = prompts_next(&w->prompts, VLLM_BLOCK);

        if (vllm_start(v, &p, false))
            prompts_remember(&w->prompts, &p);
    } else if (what < 65) {
        vllm_generate(v, r, (uint32_t)unit_below(w->random, 3));
        prompts_remember(&w->prompts, &r->prompt);
    } else if (what < 80 && v->opts.host_blocks) {
        vllm_offload_request(v, r, w->random);
    } else if (what < 96) {
        vllm_finish(v, r);
    } else {
        vllm_reset(v);
        if (unit_below(w->random, 2))
            vllm_reset_host(v);
    }
}

static void connect_anew(struct world *w)
{
    w->untold = false;
    ki_stream_disconnected(&w->l->stream, kv_now_ns());
    if (unit_below(w->random,
                   2)) /* what waits is offered, and running replays end, without a connection */
        settle(w);
    if (unit_below(w->random, 2)) {
        connect_listener(w, true);
        /* Told once or twice. A connection that isn't told waits: its first batch tells of it then. */
        w->reconnected = w->untold || unit_below(w->random, 2);
    } else {
        w->reconnected = w->behind = true; /* the batch tells of the connection */
    }
}

/* Another process, which may have published before it is heard. */
static void start_over(struct world *w)
{
    vllm_fini(&w->vllm);
    vllm_init(&w->vllm, &w->opts);
    w->process++;
    forget_ring(w);
    ki_stream_disconnected(&w->l->stream, kv_now_ns());
    for (uint64_t n = unit_below(w->random, 3) ? 0 : unit_below(w->random, 40); n > 0; n--) {
        act(w);
        publish(w, true);
    }
    w->behind = w->sequence > 0;
}

static void restart(struct world *w)
{
    start_over(w);
    connect_anew(w);
}

/*
 * Go on with a replica. Its connection is older than the dump of the listener, which may have lost
 * its own: then the engine may be another process than the dump's.
 */
static void recover(struct world *w)
{
    struct ki_listener *from = w->l, *to;
    struct ki_snapshot *snapshot;
    struct kvi_index *index;
    uint64_t generation;

    if (unit_below(w->random, 2))
        start_over(w);
    else if (unit_below(w->random, 2))
        ki_stream_disconnected(&from->stream, kv_now_ns());
    assert_int_equal(ki_listener_hold(from, &snapshot, &generation), 0);
    if (!snapshot || !snapshot->has_position) {
        assert_true(ki_listener_let_go(from, generation));
        ki_snapshot_free(snapshot);
        connect_anew(w);
        return;
    }
    assert_int_equal(kvi_create(NULL, &index), 0);
    assert_int_equal(kvi_dump(from->model->index, follow_copy_run, index), 0);
    assert_int_equal(kvi_dump_extras(from->model->index, follow_copy_extra, index), 0);
    to = new_listener(w, index);
    to->applier.forms = from->applier.forms;
    assert_true(ki_listener_let_go(from, generation));
    ki_snapshot_give(snapshot, to);
    ki_snapshot_free(snapshot);
    ki_listener_release(from);
    w->l = to;
    ki_stream_start(&to->stream, w->now_ns);
    w->reconnected = false;
    if (unit_below(w->random, 2))
        connect_listener(w, false);
    else
        ki_stream_reachable(&to->stream, w->now_ns); /* a batch comes before it is told */
}

static bool is_partial(const struct world *w)
{
    struct ki_worker_info *info = calloc(1, sizeof(*info));
    bool partial;

    assert_non_null(info);
    ki_listener_info(w->l, info);
    partial = info->reasons;
    ki_worker_infos_free(info, 1);
    return partial;
}

static void compare(struct world *w)
{
    bool partial = is_partial(w);

    if (w->behind) /* a lost batch shows with the next one */
        return;
    w->f.index = w->l->model->index;
    w->f.applier.forms = w->l->applier.forms;
    for (int i = 0; i < 4; i++) {
        struct prompt p = prompts_next(&w->prompts, VLLM_BLOCK);
        /* Blocks that a clear has left below the device show with the first event about them. */
        bool host = i % 2 && w->opts.host_blocks && !w->l->stream.healed;
        size_t truth = host ? vllm_host_lookup(&w->vllm, &p) : vllm_lookup(&w->vllm, &p);
        size_t claimed = follow_ask(&w->f, &p, host ? KV_TIER_HOST : KV_TIER_DEVICE);

        w->asked++;
        w->partial += partial;
        w->over += !partial && claimed > truth;
        w->under += !partial && claimed < truth;
    }
}

/* With the service back, all is repaired. */
static void make_peace(struct world *w)
{
    w->serves = true;
    for (int i = 0; i < 3; i++) {
        settle(w);
        act(w);
        publish(w, false);
        settle(w);
        w->now_ns = KV_MAX(w->now_ns, ki_stream_deadline(&w->l->stream));
        ki_listener_tick_stream(w->l, w->now_ns);
    }
    settle(w);
    if (w->kept == MOST)
        assert_false(is_partial(w));
    compare(w);
}

/* No replay runs, and no batch waits for one. */
static bool is_at_rest(const struct world *w)
{
    return w->l->stream.state == KI_STREAM_LIVE && !w->n_waiting;
}

static void history(struct world *w)
{
    open_listener(w);
    vllm_init(&w->vllm, &w->opts);
    w->process = w->sequence = 0;
    w->reconnected = w->behind = false;
    for (int i = 0; i < 300; i++) {
        act(w);
        /* A block stays on the device until its copy below is announced. */
        if (!w->vllm.host_events.len && unit_below(w->random, 3) == 0)
            act(w);
        publish(w, unit_below(w->random, 1000) < w->loss);
        compare(w);
        if (unit_below(w->random, 50) == 0)
            w->serves = !w->serves;
        if (unit_below(w->random, 4) == 0)
            settle(w);
        if (unit_below(w->random, 150) == 0)
            connect_anew(w);
        if (unit_below(w->random, 100) == 0)
            restart(w);
        if (is_at_rest(w) && unit_below(w->random, 100) == 0)
            recover(w);
        compare(w);
    }
    if (w->can_replay)
        make_peace(w);
    forget_ring(w);
    free_batches(w);
    vllm_fini(&w->vllm);
    ki_listener_release(w->l);
}

static void run_histories(const char *what, const struct vllm_opts *opts, bool can_replay)
{
    uint64_t random = unit_seed();
    static struct world w;

    w = (struct world){.random = &random, .can_replay = can_replay};
    for (size_t i = unit_rounds(40); i > 0; i--) {
        w.opts = *opts;
        w.opts.n_blocks = (uint16_t)(opts->n_groups * (24 + unit_below(&random, 30)));
        w.opts.names_no_rank = i % 4 > 0;
        w.prompts = (struct prompts){.random = &random, .namespaces = i % 2, .images = i % 2};
        w.kept = unit_below(&random, 3) ? MOST : 1 + unit_below(&random, 100);
        w.loss = i % 3 ? (uint32_t)unit_below(&random, 20) : 0;
        w.f = (struct follower){.block_size = VLLM_BLOCK};
        history(&w);
        ki_lookup_fini(&w.f.lookup);
    }
    print_message("%-24s %zu asked, %zu while partial, %zu over, %zu under\n", what, w.asked,
                  w.partial, w.over, w.under);
    assert_int_equal(w.over + w.under, 0);
    assert_true(w.partial < w.asked);
}

#define FULL .n_groups = 1, .groups = {{VLLM_FULL, 0}}

static void run_both(const char *what, const struct vllm_opts *opts)
{
    run_histories(what, opts, false);
    run_histories(what, opts, true);
}

static void test_device(void **state)
{
    (void)state;
    run_both("device", &(struct vllm_opts){FULL});
    run_both("window",
             &(struct vllm_opts){.n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_SLIDING, 7}}});
}

static void test_lower_tiers(void **state)
{
    (void)state;
    run_both("a group in host memory",
             &(struct vllm_opts){
                 .n_groups = 2, .groups = {{VLLM_FULL, 0}, {VLLM_FULL, 0}}, .lives_below = 1});
    run_both("offload", &(struct vllm_opts){FULL, .host_blocks = 30});
    run_both("offload, by name",
             &(struct vllm_opts){FULL, .host_blocks = 30, .host_placeholders = true});
    run_both("two owners", &(struct vllm_opts){FULL, .host_blocks = 30, .host_owner = true});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_lower_tiers),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
