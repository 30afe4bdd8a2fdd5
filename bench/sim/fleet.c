// SPDX-License-Identifier: Apache-2.0
/* A run: requests arrive, selectors choose and book, engines compute. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim/sim.h"

#define IN_FLIGHT 48 /* requests a worker, where the workload is run as fast as it goes */
#define MAX_REPLICAS 8
#define SCRAPE_S 0.05

/* A booking's step, told to the other replicas after a delay. */
enum step { STEP_BOOK, STEP_FIRST, STEP_FREE };

struct message {
    double at;
    uint32_t request, from;
    enum step step;
};

struct track {
    double at, first, end, least;
    struct kvsel_choice choice;
    uint32_t replica;
};

struct fleet {
    const struct sim_workload *w;
    const struct sim_settings *set;
    struct sim_engine *engines[SIM_MAX_WORKERS];
    struct kvsel *selectors[MAX_REPLICAS];
    uint32_t replicas;
    uint64_t *hashes; /* of the prompt at hand, by block */
    bool *seen;       /* ids that any engine has ever computed */
    struct track *tracks;
    struct message *messages;
    size_t first_message, n_messages, message_capacity;
    uint32_t given[SIM_MAX_WORKERS]; /* requests */
    uint64_t *sent;                  /* for each id: workers that were sent it, as bits */
    double tree[SIM_MAX_WORKERS];    /* distinct ids sent */
    double scrape_at, scraped_queue[SIM_MAX_WORKERS], scraped_use[SIM_MAX_WORKERS];
    size_t next; /* request that has not arrived */
    size_t ended;
    double now, scale;
    double decision_s;
    size_t decisions;
};

static void check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "select_sim: %s\n", what);
        abort();
    }
}

static uint64_t ns_of(double seconds)
{
    return (uint64_t)(seconds * 1e9) + 1;
}

static double cpu_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* ---- requests as selectors see them ---- */

static struct kvsel_request request_of(struct fleet *f, uint32_t number)
{
    const struct sim_request *r = &f->w->requests[number];
    struct kvsel_request request = {.size = sizeof(request), .tokens = r->prompt};

    for (uint32_t i = 0; i < r->n; i++) /* the selector reads the last of each SIM_UNIT_BLOCKS */
        f->hashes[(i + 1) * SIM_UNIT_BLOCKS - 1] = f->w->ids[r->first + i] + UINT64_C(1);
    request.hashes = f->hashes;
    request.n_hashes = r->prompt / SIM_UNIT * SIM_UNIT_BLOCKS;
    request.params = f->set->params;
    return request;
}

static void fill_matches(const struct fleet *f, uint32_t number, struct kvi_match *matches)
{
    for (uint32_t i = 0; i < f->set->workers; i++) {
        uint32_t held = sim_engine_held(f->engines[i], number, f->now - f->set->late_s);

        matches[i] = (struct kvi_match){.holder = {i, 0}};
        for (int t = 0; t < KV_N_TIERS; t++)
            matches[i].reach[t] = held / SIM_BLOCK;
    }
}

/* ---- rules that the library doesn't have ---- */

/* The rule of a router that weighs a running request as 256 tokens, one without a first token as 64. */
static void order_costs(struct fleet *f, uint32_t number, const struct kvsel_candidate *c,
                        double *cost)
{
    (void)number;
    for (uint32_t i = 0; i < f->set->workers; i++)
        cost[i] = c[i].uncovered + c[i].waiting + 256 * (c[i].requests - c[i].queued) +
                  64.0 * c[i].queued;
}

/* Waiting and uncovered tokens times running requests: LMetric's product. */
static void product_costs(struct fleet *f, uint32_t number, const struct kvsel_candidate *c,
                          double *cost)
{
    (void)number;
    for (uint32_t i = 0; i < f->set->workers; i++)
        cost[i] = (c[i].waiting + c[i].uncovered) * (c[i].requests + 1);
}

/* Scores 2, 1, 1 of llm-d over metrics that are scraped each SCRAPE_S. */
static void llmd_costs(struct fleet *f, uint32_t number, const struct kvsel_candidate *c,
                       double *cost)
{
    double all = ceil(f->w->requests[number].prompt / (double)SIM_BLOCK), least = INFINITY,
           most = 0;

    if (f->now >= f->scrape_at) {
        f->scrape_at = floor(f->now / SCRAPE_S) * SCRAPE_S + SCRAPE_S;
        for (uint32_t i = 0; i < f->set->workers; i++) {
            f->scraped_queue[i] = sim_engine_waiting(f->engines[i]);
            f->scraped_use[i] = sim_engine_use(f->engines[i]);
        }
    }
    for (uint32_t i = 0; i < f->set->workers; i++) {
        least = fmin(least, f->scraped_queue[i]);
        most = fmax(most, f->scraped_queue[i]);
    }
    for (uint32_t i = 0; i < f->set->workers; i++) {
        double queue = most > least ? (most - f->scraped_queue[i]) / (most - least) : 1;

        cost[i] = -(2 * (double)(c[i].held) / SIM_BLOCK / all + queue + 1 - f->scraped_use[i]);
    }
}

/* Return how many of a prompt's units worker @i was sent at any time. */
static uint32_t sent_units(const struct fleet *f, const struct sim_request *r, uint32_t i)
{
    uint32_t n = 0;

    while (n < r->n && (f->sent[f->w->ids[r->first + n]] >> i & 1))
        n++;
    return n;
}

/* The rule of cache_aware (0.3, 64, 1.5), whose trees have all that was sent, evicted or not. */
static void smg_costs(struct fleet *f, uint32_t number, const struct kvsel_candidate *c,
                      double *cost)
{
    const struct sim_request *r = &f->w->requests[number];
    double least = INFINITY, most = 0, longest = 0;

    for (uint32_t i = 0; i < f->set->workers; i++) {
        least = fmin(least, c[i].requests);
        most = fmax(most, c[i].requests);
        longest = fmax(longest, sent_units(f, r, i));
    }
    for (uint32_t i = 0; i < f->set->workers; i++)
        cost[i] = most - least > 64 && most > 1.5 * least ? c[i].requests
                  : longest > .3 * r->n                   ? -(double)sent_units(f, r, i)
                                                          : f->tree[i];
}

static void oracle_costs(struct fleet *f, uint32_t number, const struct kvsel_candidate *c,
                         double *cost)
{
    double weight = strcmp(f->set->policy, "oracle3") == 0 ? 3 : 0;
    uint32_t prompt = f->w->requests[number].prompt;

    for (uint32_t i = 0; i < f->set->workers; i++)
        cost[i] = sim_engine_forecast(f->engines[i], number, f->now) +
                  weight * sim_compute_s((double)c[i].held, prompt);
}

static const struct extra {
    const char *name;
    void (*costs)(struct fleet *f, uint32_t number, const struct kvsel_candidate *c, double *cost);
} extras[] = {{"order", order_costs}, {"product", product_costs}, {"llm-d", llmd_costs},
              {"smg", smg_costs},     {"oracle", oracle_costs},   {"oracle3", oracle_costs}};

/* Return a rule of this file, or NULL. */
static const struct extra *extra_of(const char *name)
{
    for (size_t i = 0; i < sizeof(extras) / sizeof(*extras); i++)
        if (strcmp(extras[i].name, name) == 0)
            return &extras[i];
    return NULL;
}

/* Choose by a rule of this file. Ties go to the worker that was given fewest requests. */
static void choose_extra(struct fleet *f, struct kvsel *s, const struct kvsel_request *request,
                         uint32_t number, struct kvsel_choice *choice)
{
    struct kvsel_candidate candidates[SIM_MAX_WORKERS];
    double cost[SIM_MAX_WORKERS];
    uint32_t best = 0;

    check(kvsel_explain(s, request, ns_of(f->now), choice, candidates, SIM_MAX_WORKERS) ==
              (long)f->set->workers,
          "candidates");
    extra_of(f->set->policy)->costs(f, number, candidates, cost);
    for (uint32_t i = 1; i < f->set->workers; i++)
        if (cost[i] < cost[best] || (cost[i] == cost[best] && f->given[i] < f->given[best]))
            best = i;
    check(kvsel_reckon(s, request, candidates[best].holder, ns_of(f->now), choice) == 0, "reckon");
}

/* ---- bookings ---- */

static void tell_others(struct fleet *f, uint32_t number, uint32_t from, enum step step)
{
    struct message *m;

    if (f->replicas < 2 || f->set->delay_s < 0)
        return;
    if (f->first_message + f->n_messages == f->message_capacity) {
        f->message_capacity = f->message_capacity * 2 + 1024;
        m = calloc(f->message_capacity, sizeof(*m));
        check(m, "memory");
        if (f->n_messages)
            memcpy(m, f->messages + f->first_message, f->n_messages * sizeof(*m));
        free(f->messages);
        f->messages = m;
        f->first_message = 0;
    }
    f->messages[f->first_message + f->n_messages++] =
        (struct message){f->now + f->set->delay_s, number, from, step};
}

static void do_step(struct fleet *f, struct kvsel *s, uint32_t number, enum step step)
{
    struct kvsel_request request;
    int rc;

    if (step == STEP_BOOK) {
        request = request_of(f, number);
        rc = kvsel_book(s, (char *)&number, sizeof(number), &request, &f->tracks[number].choice,
                        ns_of(f->now));
    } else if (step == STEP_FIRST) {
        rc = kvsel_first_token(s, (char *)&number, sizeof(number), ns_of(f->now));
    } else {
        rc = kvsel_free(s, (char *)&number, sizeof(number), KVSEL_DONE, ns_of(f->now));
    }
    check(rc == 0, "a booking failed");
}

static void deliver(struct fleet *f)
{
    struct message m = f->messages[f->first_message++];

    f->n_messages--;
    f->now = m.at;
    for (uint32_t i = 0; i < f->replicas; i++)
        if (i != m.from)
            do_step(f, f->selectors[i], m.request, m.step);
}

/* ---- the walk of a request ---- */

static void give(struct fleet *f, uint32_t number, uint32_t worker)
{
    const struct sim_request *r = &f->w->requests[number];

    for (uint32_t i = 0; i < r->n; i++) {
        uint64_t *sent = &f->sent[f->w->ids[r->first + i]], bit = UINT64_C(1) << worker;

        f->tree[worker] += !(*sent & bit);
        *sent |= bit;
    }
    f->given[worker]++;
    sim_engine_add(f->engines[worker], number, f->now);
}

/* Choose for a request, book it and give it to its engine; or hold it. */
static void place(struct fleet *f, uint32_t number, bool released)
{
    struct track *track = &f->tracks[number];
    struct kvsel *s = f->selectors[track->replica];
    struct kvi_match matches[SIM_MAX_WORKERS];
    struct kvsel_request request = request_of(f, number);
    double before;
    int rc;

    fill_matches(f, number, matches);
    request.matches = matches;
    request.n_matches = f->set->workers;
    request.released = released;
    track->choice.size = sizeof(track->choice);
    before = cpu_s();
    if (!extra_of(f->set->policy)) {
        rc = kvsel_select(s, &request, ns_of(f->now), &track->choice);
        if (rc == -EAGAIN) {
            check(kvsel_queue_put(s, number, &request, ns_of(f->now)) == 0, "queue");
            return;
        }
        check(rc == 0, "no worker");
    } else {
        choose_extra(f, s, &request, number, &track->choice);
    }
    do_step(f, s, number, STEP_BOOK);
    f->decision_s += cpu_s() - before;
    f->decisions++;
    tell_others(f, number, track->replica, STEP_BOOK);
    give(f, number, (uint32_t)track->choice.worker.worker);
}

/* Return the tokens of a prompt that some engine has computed at some time. */
static uint32_t ever_held(const struct fleet *f, const struct sim_request *r)
{
    uint32_t n = 0;

    while (n < r->n && f->seen[f->w->ids[r->first + n]])
        n++;
    n *= SIM_UNIT;
    return n < r->prompt ? n : (r->prompt - 1) / SIM_BLOCK * SIM_BLOCK;
}

static void arrive(struct fleet *f)
{
    uint32_t number = (uint32_t)f->next++;
    const struct sim_request *r = &f->w->requests[number];
    struct track *track = &f->tracks[number];

    track->at = f->now;
    track->replica = number % f->replicas;
    track->least = sim_compute_s(ever_held(f, r), r->prompt);
    place(f, number, false);
}

static void release(struct fleet *f)
{
    uint64_t ticket;

    for (uint32_t i = 0; f->set->queue_waiting && i < f->replicas; i++)
        while (kvsel_queue_next(f->selectors[i], ns_of(f->now), &ticket) == 0)
            place(f, (uint32_t)ticket, true);
}

static void on_event(void *arg, uint32_t number, bool first_token, double now)
{
    struct fleet *f = arg;
    const struct sim_request *r = &f->w->requests[number];
    struct track *track = &f->tracks[number];
    enum step step = first_token ? STEP_FIRST : STEP_FREE;

    f->now = now;
    do_step(f, f->selectors[track->replica], number, step);
    tell_others(f, number, track->replica, step);
    if (first_token) {
        track->first = now;
        for (uint32_t i = 0; i < r->n; i++)
            f->seen[f->w->ids[r->first + i]] = true;
    } else {
        track->end = now;
        f->ended++;
        if (f->set->rate <= 0 && f->next < f->w->n)
            arrive(f);
    }
    release(f);
}

/* ---- the run ---- */

static void make_selector(struct fleet *f, uint32_t number)
{
    struct kvsel_opts opts = {.size = sizeof(opts),
                              .policy = extra_of(f->set->policy) ? NULL : f->set->policy,
                              .seed = f->set->seed * 100 + number,
                              .block_size = SIM_BLOCK,
                              .stride = SIM_UNIT_BLOCKS,
                              .predict_ns = f->set->predict ? 0 : UINT64_MAX,
                              .expiry_ns = UINT64_MAX / 2,
                              .queue_waiting = f->set->queue_waiting,
                              .queue_order = f->set->order,
                              .queue_max = 1 << 30,
                              .queue_max_tokens = UINT64_C(1) << 50,
                              .equal_speed = !f->set->learn};

    check(kvsel_create(&opts, &f->selectors[number]) == 0, "selector");
    for (uint32_t i = 0; i < f->set->workers; i++) {
        struct kvsel_worker worker = {.size = sizeof(worker), .holder = {i, 0}};

        worker.capacity = (uint64_t)f->set->blocks * SIM_BLOCK;
        check(kvsel_set_worker(f->selectors[number], &worker) == 0, "worker");
    }
}

static void run(struct fleet *f)
{
    const struct sim_workload *w = f->w;

    for (size_t i = 0; f->set->rate <= 0 && i < f->set->workers * IN_FLIGHT && i < w->n; i++)
        arrive(f);
    while (f->ended < w->n) {
        double step = INFINITY, at = INFINITY, message = INFINITY;
        uint32_t engine = 0;

        for (uint32_t i = 0; i < f->set->workers; i++) {
            if (sim_engine_next(f->engines[i]) < step) {
                step = sim_engine_next(f->engines[i]);
                engine = i;
            }
        }
        if (f->set->rate > 0 && f->next < w->n)
            at = (w->requests[f->next].at - w->requests[0].at) * f->scale;
        if (f->n_messages)
            message = f->messages[f->first_message].at;
        if (message <= step && message <= at) {
            deliver(f);
        } else if (at <= step) {
            f->now = at;
            arrive(f);
        } else {
            check(isfinite(step), "requests are left, and nothing happens");
            f->now = step;
            sim_engine_step(f->engines[engine], on_event, f);
        }
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double percentile(double *values, size_t n, double part)
{
    qsort(values, n, sizeof(*values), by_value);
    return values[(size_t)(part * (double)(n - 1))];
}

static void measure(const struct fleet *f, struct sim_result *ret)
{
    size_t from = f->w->n / 10, n = f->w->n - from, n_token = 0;
    double *ttft = calloc(n + 1, sizeof(double)), *over = calloc(n + 1, sizeof(double));
    double computed = 0, found = 0, most = 0, end = 0;

    check(ttft && over, "memory");
    *ret = (struct sim_result){0};
    for (size_t i = 0; i < n; i++) {
        const struct track *t = &f->tracks[from + i];
        uint32_t output = f->w->requests[from + i].output;

        ttft[i] = t->first - t->at;
        over[i] = ttft[i] - t->least;
        ret->ttft += ttft[i] / (double)n;
        ret->over += over[i] / (double)n;
        end = t->end > end ? t->end : end;
        if (output > 1) {
            ret->token_s += (t->end - t->first) / (output - 1);
            n_token++;
        }
    }
    for (uint32_t i = 0; i < f->set->workers; i++) {
        double of_one, found_by_one;

        sim_engine_count(f->engines[i], &of_one, &found_by_one);
        computed += of_one;
        found += found_by_one;
        most = of_one > most ? of_one : most;
    }
    ret->ttft_p99 = percentile(ttft, n, .99);
    ret->over_p99 = percentile(over, n, .99);
    ret->token_s /= n_token ? (double)n_token : 1;
    ret->hits = found / (found + computed);
    ret->busiest = most / computed * f->set->workers;
    ret->rate = (double)f->w->n / end;
    ret->decision_s = f->decisions ? f->decision_s / (double)f->decisions : 0;
    free(ttft);
    free(over);
}

void sim_run(const struct sim_workload *w, const struct sim_settings *set, struct sim_result *ret)
{
    struct fleet f = {.w = w, .set = set, .replicas = set->replicas ? set->replicas : 1};
    double span = w->requests[w->n - 1].at - w->requests[0].at;
    uint32_t longest = 0;

    for (size_t i = 0; i < w->n; i++)
        longest = w->requests[i].n > longest ? w->requests[i].n : longest;
    f.scale = set->rate > 0 ? (double)w->n / set->rate / span : 0;
    f.hashes = calloc((size_t)longest * SIM_UNIT_BLOCKS + 1, sizeof(*f.hashes));
    f.seen = calloc(w->n_ids + 1, sizeof(*f.seen));
    f.sent = calloc(w->n_ids + 1, sizeof(*f.sent));
    f.tracks = calloc(w->n + 1, sizeof(*f.tracks));
    check(f.hashes && f.seen && f.sent && f.tracks && set->workers <= SIM_MAX_WORKERS &&
              f.replicas <= MAX_REPLICAS,
          "memory");
    for (uint32_t i = 0; i < set->workers; i++)
        f.engines[i] = sim_engine_create(w, set->blocks, i < set->slow ? 2 : 1);
    for (uint32_t i = 0; i < f.replicas; i++)
        make_selector(&f, i);
    run(&f);
    measure(&f, ret);
    for (uint32_t i = 0; i < set->workers; i++)
        sim_engine_destroy(f.engines[i]);
    for (uint32_t i = 0; i < f.replicas; i++)
        kvsel_destroy(f.selectors[i]);
    free(f.hashes);
    free(f.seen);
    free(f.sent);
    free(f.tracks);
    free(f.messages);
}
