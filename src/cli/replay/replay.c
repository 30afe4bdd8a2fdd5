// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/replay.h"
#include "cli/commands.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"

#define TICK_NS (50 * KV_NS_PER_MS)
#define END_MS 5000 /* from a child's closed sockets to its end */

static atomic_int signals; /* number of SIGINT and SIGTERM received */

/* End the run in order, with its table, at the first signal; end the program at the second. */
static void on_signal(int number)
{
    (void)number;
    if (atomic_fetch_add(&signals, 1) >= 2)
        _exit(130);
}

bool kc_replay_interrupted(void)
{
    return atomic_load_explicit(&signals, memory_order_relaxed) > 0;
}

static void sleep_ns(uint64_t ns)
{
    const struct timespec pause = {(time_t)(ns / KV_NS_PER_S), (long)(ns % KV_NS_PER_S)};

    nanosleep(&pause, NULL);
}

int kc_replay_prompt(const struct kc_replay *replay, uint64_t number, struct kc_prompt *prompt)
{
    const struct kc_request *request = &replay->trace.requests[number % replay->trace.n_requests];

    return kc_prompt_expand(prompt, replay->trace.ids + request->first, request->n,
                            number / replay->trace.n_requests, (uint32_t)replay->opts.block_size);
}

static double request_ms(const struct kc_replay *replay, uint64_t number)
{
    const struct kc_request *requests = replay->trace.requests;
    size_t n = replay->trace.n_requests;
    uint64_t pass = number / n;

    return (double)(requests[number % n].timestamp_ms - requests[0].timestamp_ms) +
           (double)pass * (double)replay->span_ms;
}

/* -- serving ---------------------------------------------------------------------------------- */

struct client_state {
    struct kc_replay *replay;
    struct kc_client *client;
    struct kc_belief *beliefs;
    struct kc_prompt prompt;
    pthread_t thread;
    bool started;
};

static int wait_for_turn(struct kc_replay *replay, double ms)
{
    uint64_t due_ns;

    if (replay->opts.rate == 0)
        return 0;
    due_ns = replay->start_ns + (uint64_t)(ms * (double)KV_NS_PER_MS / (double)replay->opts.rate);
    for (uint64_t now_ns = kv_now_ns(); now_ns < due_ns; now_ns = kv_now_ns()) {
        if (atomic_load_explicit(&replay->stop, memory_order_relaxed))
            return -EINTR;
        sleep_ns(KV_MIN(due_ns - now_ns, TICK_NS));
    }
    return 0;
}

/* Count how right an answer is about all workers, not only about the chosen one. */
static void count_beliefs(struct kc_replay *replay, const struct kc_prompt *prompt,
                          const struct kc_belief *beliefs)
{
    uint64_t believed = 0, held = 0, blocks;
    bool exact = true;
    size_t one;

    for (uint32_t w = 0; w < replay->opts.workers; w++) {
        kc_engine_truth(replay->engines[w], prompt, &one, &blocks);
        exact = exact && one == beliefs[w].overlap;
        believed += beliefs[w].overlap;
        held += one;
    }
    pthread_mutex_lock(&replay->lock);
    replay->counts.all_exact += exact;
    replay->counts.believed += believed;
    replay->counts.held += held;
    pthread_mutex_unlock(&replay->lock);
}

static uint32_t route(struct kc_replay *replay, double ms, const struct kc_prompt *prompt,
                      const struct kc_belief *beliefs)
{
    uint32_t worker;
    size_t overlap;

    pthread_mutex_lock(&replay->lock);
    worker = kc_router_pick(&replay->router, ms, prompt->n_blocks, beliefs);
    overlap = KV_MIN(beliefs[worker].overlap, prompt->n_blocks);
    kc_router_assign(&replay->router, worker, ms, prompt->n_blocks - overlap);
    pthread_mutex_unlock(&replay->lock);
    return worker;
}

static int count(struct kc_replay *replay, uint64_t number, uint32_t worker,
                 const struct kc_prompt *prompt, const struct kc_belief *belief,
                 const struct kc_served *served)
{
    struct kc_counts *counts = &replay->counts;
    int rc;

    pthread_mutex_lock(&replay->lock);
    counts->requests++;
    counts->tokens += prompt->n_tokens;
    counts->asked += prompt->n_blocks;
    counts->found += served->held;
    counts->exact += belief->overlap == served->held;
    if (belief->overlap > served->held) {
        counts->over++;
        counts->over_blocks += belief->overlap - served->held;
    } else if (belief->overlap < served->held) {
        counts->under++;
        counts->under_blocks += served->held - belief->overlap;
    }
    counts->trace_ms = KV_MAX(counts->trace_ms, request_ms(replay, number));
    replay->last_prompt[worker] = number;
    rc = kc_shadow_serve(&replay->shadow, prompt->trace_chain, prompt->n_trace_blocks,
                         number / replay->trace.n_requests);
    pthread_mutex_unlock(&replay->lock);
    atomic_fetch_add_explicit(&replay->asked_blocks, prompt->n_blocks, memory_order_relaxed);
    atomic_fetch_add_explicit(&replay->found_blocks, served->held, memory_order_relaxed);
    atomic_fetch_add_explicit(&replay->served, 1, memory_order_relaxed);
    return rc;
}

/*
 * Settle for --lockstep: the last answer must have been exact for all workers; wait until the next
 * one can be.
 */
static int settle_one(struct client_state *state, struct kv_error *error)
{
    struct kc_replay *replay = state->replay;
    uint64_t deadline_ns = kv_now_ns() + replay->opts.settle_ms * KV_NS_PER_MS, generation;
    char why[sizeof(replay->verdict.first)];
    int rc;

    for (;;) {
        generation = replay->generation; /* there is one client */
        rc = kc_replay_ask(replay, state->client, &state->prompt, state->beliefs, NULL, error);
        if (rc < 0 ||
            kc_replay_compare(replay, &state->prompt, state->beliefs, why, sizeof(why)) == 0)
            return rc;
        if (replay->generation != generation)
            deadline_ns = kv_now_ns() + replay->opts.settle_ms * KV_NS_PER_MS;
        if (kv_now_ns() > deadline_ns)
            return kv_fail(error, -ETIMEDOUT, 0, "the index does not settle: %s", why);
    }
}

static int serve_one(struct client_state *state, uint64_t number, struct kv_error *error)
{
    struct kc_replay *replay = state->replay;
    double ms = request_ms(replay, number);
    char why[sizeof(replay->verdict.first)];
    struct kc_served served;
    uint32_t worker;
    uint64_t ns = 0;
    int rc = wait_for_turn(replay, ms);

    if (rc == 0)
        rc = kc_replay_prompt(replay, number, &state->prompt);
    if (rc == 0)
        rc = kc_replay_ask(replay, state->client, &state->prompt, state->beliefs, &ns, error);
    if (rc < 0)
        return rc;
    kc_hist_record(&replay->latency, ns);
    if (replay->opts.lockstep &&
        kc_replay_compare(replay, &state->prompt, state->beliefs, why, sizeof(why)) > 0) {
        if (replay->counts.lockstep_wrong++ == 0)
            memcpy(replay->verdict.first, why, sizeof(why));
    }
    count_beliefs(replay, &state->prompt, state->beliefs);
    worker = route(replay, ms, &state->prompt, state->beliefs);
    rc = kc_engine_serve(replay->engines[worker], &state->prompt, &served);
    if (rc == 0)
        rc = count(replay, number, worker, &state->prompt, &state->beliefs[worker], &served);
    if (rc == 0 && replay->opts.lockstep)
        rc = settle_one(state, error);
    return rc;
}

static void *run_client(void *arg)
{
    struct client_state *state = arg;
    struct kc_replay *replay = state->replay;
    struct kv_error error = {0};
    int rc = 0;

    while (rc == 0 && !atomic_load_explicit(&replay->stop, memory_order_relaxed)) {
        uint64_t number = atomic_fetch_add_explicit(&replay->next, 1, memory_order_relaxed);

        if (number >= replay->limit)
            break;
        rc = serve_one(state, number, &error);
    }
    if (rc < 0 && rc != -EINTR) {
        pthread_mutex_lock(&replay->lock);
        if (!replay->failure.code)
            kv_fail(&replay->failure, rc, 0, "%s",
                    error.code      ? error.text
                    : rc == -ENOMEM ? "out of memory"
                                    : strerror(-rc));
        pthread_mutex_unlock(&replay->lock);
        atomic_store_explicit(&replay->stop, true, memory_order_relaxed);
    }
    atomic_fetch_sub_explicit(&replay->running, 1, memory_order_release);
    return NULL;
}

static int start_clients(struct kc_replay *replay, struct client_state *states,
                         struct kv_error *error)
{
    for (uint64_t i = 0; i < replay->opts.clients; i++) {
        struct client_state *state = &states[i];
        int rc;

        state->replay = replay;
        state->beliefs = calloc(replay->opts.workers, sizeof(*state->beliefs));
        if (!state->beliefs)
            return kv_fail(error, -ENOMEM, 0, "out of memory");
        rc = kc_client_create(&replay->client, &state->client, error);
        if (rc < 0)
            return rc;
        atomic_fetch_add_explicit(&replay->running, 1, memory_order_relaxed);
        rc = kv_thread_start(&state->thread, "client", run_client, state);
        if (rc < 0) {
            atomic_fetch_sub_explicit(&replay->running, 1, memory_order_relaxed);
            return kv_fail(error, rc, 0, "can't start a thread: %s", strerror(-rc));
        }
        state->started = true;
    }
    return 0;
}

static void end_clients(struct kc_replay *replay, struct client_state *states)
{
    for (uint64_t i = 0; i < replay->opts.clients; i++) {
        if (states[i].started)
            pthread_join(states[i].thread, NULL);
        kc_client_destroy(states[i].client);
        kc_prompt_fini(&states[i].prompt);
        free(states[i].beliefs);
    }
    free(states);
}

/* Watch the clients: progress, ^C, the time limit. */
static void watch(struct kc_replay *replay)
{
    uint64_t limit_ns = replay->opts.seconds * KV_NS_PER_S;

    while (atomic_load_explicit(&replay->running, memory_order_acquire) > 0) {
        sleep_ns(TICK_NS);
        if (kc_replay_interrupted())
            replay->interrupted = true;
        if (replay->interrupted || (limit_ns > 0 && kv_now_ns() - replay->start_ns >= limit_ns))
            atomic_store_explicit(&replay->stop, true, memory_order_relaxed);
        if (!replay->opts.quiet)
            kc_progress(replay, false);
    }
}

static int serve_all(struct kc_replay *replay, struct kv_error *error)
{
    struct client_state *states = calloc(replay->opts.clients, sizeof(*states));
    int rc;

    if (!states)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    replay->start_ns = kv_now_ns();
    rc = start_clients(replay, states, error);
    if (rc < 0)
        atomic_store_explicit(&replay->stop, true, memory_order_relaxed);
    watch(replay);
    end_clients(replay, states);
    replay->end_ns = kv_now_ns();
    if (!replay->opts.quiet)
        kc_progress(replay, true);
    if (rc == 0 && replay->failure.code)
        rc = kv_fail(error, replay->failure.code, 0, "%s", replay->failure.text);
    return rc;
}

/* -- the whole run ---------------------------------------------------------------------------- */

static int start_engines(struct kc_replay *replay, struct kv_error *error)
{
    replay->engines = calloc(replay->opts.workers, sizeof(struct kc_engine *));
    replay->last_prompt = malloc(replay->opts.workers * sizeof(uint64_t));
    if (!replay->engines || !replay->last_prompt)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (uint64_t w = 0; w < replay->opts.workers; w++) {
        struct kc_engine_opts opts = {
            .capacity = replay->opts.blocks,
            .block_size = (uint32_t)replay->opts.block_size,
            .buffer_batches = (uint32_t)replay->opts.buffer_batches,
            .salt = replay->opts.own_hashes ? kc_mix(w + 1) : 0,
        };
        int rc = kc_engine_create(&opts, &replay->engines[w], error);

        if (rc < 0)
            return rc;
        replay->last_prompt[w] = UINT64_MAX;
    }
    return 0;
}

static int prepare(struct kc_replay *replay, struct kv_error *error)
{
    const struct kc_replay_opts *opts = &replay->opts;
    uint64_t capacity = opts->blocks * opts->block_size / KC_TRACE_BLOCK;

    replay->limit = opts->requests  ? opts->requests
                    : opts->seconds ? UINT64_MAX
                                    : replay->trace.n_requests;
    /* One mean gap lies between the last request of one pass and the first of the next. */
    replay->span_ms = replay->stats.span_ms + replay->stats.span_ms / replay->trace.n_requests + 1;
    kc_router_init(&replay->router, opts->policy, (uint32_t)opts->workers,
                   (double)opts->prefill / (double)opts->block_size / 1000, opts->seed);
    if (kc_shadow_init(&replay->shadow, (uint32_t)opts->workers,
                       opts->blocks ? KV_MAX(capacity, UINT64_C(1)) : 0, opts->seed) < 0)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    return start_engines(replay, error);
}

static int run(struct kc_replay *replay, struct kv_error *error)
{
    struct kc_client *client = NULL;
    int rc = prepare(replay, error), rc_report;
    bool served = false;

    if (rc == 0)
        rc = kc_replay_connect(replay, &client, error);
    if (rc == 0) {
        rc = serve_all(replay, error);
        served = true;
    }
    atomic_store_explicit(&replay->stop, false, memory_order_relaxed); /* for --seconds */
    if (rc == 0 && !replay->interrupted)
        rc = kc_replay_verify(replay, client, error);
    if (client && rc == 0)
        kc_replay_read_metrics(replay, client);
    if (served) {
        rc_report = kc_report(replay, rc == 0 ? error : NULL);
        rc = rc == 0 ? rc_report : rc;
    }
    if (client && replay->opts.url)
        kc_replay_leave(replay, client);
    kc_client_destroy(client);
    return rc;
}

static void fini(struct kc_replay *replay)
{
    kc_child_stop(replay->child); /* first, so that the engines have no follower to send to */
    for (uint64_t w = 0; replay->engines && w < replay->opts.workers; w++)
        kc_engine_destroy(replay->engines[w]);
    kc_shadow_fini(&replay->shadow);
    kc_trace_fini(&replay->trace);
    free(replay->engines);
    free(replay->last_prompt);
    pthread_mutex_destroy(&replay->recovery);
    pthread_mutex_destroy(&replay->lock);
    free(replay);
}

static int load_workload(struct kc_replay *replay, struct kv_error *error)
{
    const struct kc_generate_opts generate = {.seed = replay->opts.seed,
                                              .n_requests = KC_GENERATE_REQUESTS};
    int rc = replay->opts.trace ? kc_trace_read(replay->opts.trace, &replay->trace, error)
                                : kc_generate(&generate, &replay->trace);

    if (rc == 0)
        rc = kc_trace_measure(&replay->trace, &replay->stats);
    if (rc == -ENOMEM)
        kv_fail(error, rc, 0, "out of memory");
    return rc;
}

/*
 * A connection that failed may be the first sign that our kv-indexer ended: waitpid tells it a moment
 * later. Write to *@error how it ended, if it did.
 */
static void find_end(struct kc_replay *replay, struct kv_error *error)
{
    uint64_t until_ns = kv_now_ns() + END_MS * KV_NS_PER_MS;

    if (!replay->child || error->code != -ECONNREFUSED)
        return;
    while (kc_child_alive(replay->child, error) && kv_now_ns() < until_ns)
        usleep(10000);
}

static void say_failure(struct kc_replay *replay, const struct kv_error *error)
{
    char log[1200];

    fprintf(stderr, "kvasir replay --only index: %s\n", error->text);
    if (error->code == -EADDRINUSE)
        fprintf(stderr, "  no free TCP port on 127.0.0.1: too many sockets?\n");
    if (error->code == -ECONNREFUSED && replay->opts.url)
        fprintf(stderr, "  is a kv-indexer running at %s? without --url, one is started\n",
                replay->opts.url);
    if (!replay->child || (error->code != -ECHILD && error->code != -ETIMEDOUT &&
                           error->code != -ECONNREFUSED && error->code != -EPROTO))
        return;
    kc_child_log(replay->child, log, sizeof(log));
    if (log[0])
        fprintf(stderr, "  the end of its log:\n%s", log);
}

static int exit_status(const struct kc_replay *replay)
{
    if (replay->interrupted)
        return 130;
    return replay->verdict.wrong > 0 || replay->counts.lockstep_wrong > 0;
}

int kc_replay_index_main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = on_signal};
    struct kc_replay *replay = calloc(1, sizeof(*replay));
    struct kv_error error = {0};
    int rc, status;

    if (!replay)
        return 1;
    pthread_mutex_init(&replay->lock, NULL);
    pthread_mutex_init(&replay->recovery, NULL);
    rc = kc_replay_options(argc, argv, &replay->opts, &error);
    if (rc != 0) {
        if (rc < 0)
            fprintf(stderr, "kvasir replay --only index: %s\n", error.text);
        fini(replay);
        return rc < 0 ? 2 : 0;
    }
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    rc = load_workload(replay, &error);
    if (rc == 0 && replay->opts.check_hits) {
        status = kc_check_hits(&replay->trace, &replay->stats,
                               replay->opts.trace ? replay->opts.trace : "a generated workload");
        fini(replay);
        return status;
    }
    if (rc == 0)
        rc = run(replay, &error);
    if (rc < 0 && rc != -EINTR) {
        find_end(replay, &error);
        say_failure(replay, &error);
    }
    status = rc == -EINTR ? 130 : rc < 0 ? 1 : exit_status(replay);
    fini(replay);
    return status;
}
