// SPDX-License-Identifier: Apache-2.0
/*
 * A session picks an application (Zipf: few are popular), whose system prompt all its sessions
 * share. It asks its first question, often with a document attached. Each further turn sends all of
 * the session so far, the answer, and a new question:
 *
 *     turn 1   | common | system prompt of the app | question 1 |
 *     turn 2   | common | system prompt of the app | question 1 | answer 1 | question 2 |
 *              '-------- whole 512-token blocks reused --------'
 *
 * As in the real traces, an id names the content of a block. The last, partly filled block of a
 * turn therefore has another id than the full block in its place in the next turn.
 */
#include "cli/replay/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay/random.h"

/*
 * Parameters fitted by hand to the conversation trace: mean and median input, reuse, spread of
 * lengths.
 */
#define N_APPS 1000
#define ZIPF_EXPONENT 0.9
#define MEAN_GAP_MS 455.0    /* between starts of sessions */
#define MS_PER_REQUEST 295.0 /* length of a trace per request; real ones are cut off, too */
#define MORE_TURNS 0.38      /* probability that a session continues */
#define MEAN_THINK_MS 200e3  /* between an answer and the next question */
#define MS_PER_TOKEN 20.0    /* time per output token */
#define MAX_INPUT 131072
#define MAX_OUTPUT 2000

/* Median and sigma of a log-normal number of tokens. */
struct spread {
    double median, sigma;
};
static const struct spread SYSTEM = {300, 0.9};
static const struct spread QUESTION = {3400, 1.33};
static const struct spread FOLLOW_UP = {2200, 1.4};
static const struct spread ANSWER = {280, 0.65};

struct app {
    double popularity; /* cumulative */
    uint32_t tokens;   /* tokens of its system prompt */
    uint64_t first_id; /* first id of its whole blocks */
};

struct generator {
    struct kc_rng rng;
    struct app apps[N_APPS];
    uint64_t next_id;
    struct kc_trace *trace;
    size_t n_requests;
};

static double normal(struct kc_rng *rng)
{
    double radius = sqrt(-2 * log(kc_rng_unit(rng)));

    return radius * cos(2 * 3.14159265358979323846 * kc_rng_unit(rng));
}

static uint32_t tokens(struct kc_rng *rng, struct spread spread, uint32_t max)
{
    double n = spread.median * exp(spread.sigma * normal(rng));

    return n < 1 ? 1 : n > max ? max : (uint32_t)n;
}

static double exponential(struct kc_rng *rng, double mean)
{
    return -mean * log(kc_rng_unit(rng));
}

static void make_apps(struct generator *g)
{
    double sum = 0;

    g->next_id = 1; /* 0 is the common first block */
    for (size_t i = 0; i < N_APPS; i++) {
        struct app *app = &g->apps[i];

        sum += pow((double)(i + 1), -ZIPF_EXPONENT);
        app->popularity = sum;
        app->tokens = KC_TRACE_BLOCK + tokens(&g->rng, SYSTEM, MAX_INPUT / 4);
        app->first_id = g->next_id;
        g->next_id += app->tokens / KC_TRACE_BLOCK;
    }
    for (size_t i = 0; i < N_APPS; i++)
        g->apps[i].popularity /= sum;
}

static const struct app *pick_app(struct generator *g)
{
    double x = kc_rng_unit(&g->rng);
    size_t low = 0, high = N_APPS - 1;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (g->apps[middle].popularity < x)
            low = middle + 1;
        else
            high = middle;
    }
    return &g->apps[low];
}

/* List the whole blocks at the start of an application's prompts. */
static uint32_t app_ids(const struct app *app, uint64_t *ids)
{
    uint32_t n = app->tokens / KC_TRACE_BLOCK;

    ids[0] = 0;
    for (uint32_t i = 1; i < n; i++)
        ids[i] = app->first_id + i;
    return n;
}

/*
 * Add one turn of @input tokens at @ms. *ids holds the session's *whole known blocks and gets the
 * new ones. The partly filled last block gets an id that is never used again.
 */
static int add_turn(struct generator *g, double ms, uint32_t input, uint32_t output, uint64_t *ids,
                    uint32_t *whole)
{
    struct kc_request request = {.timestamp_ms = (uint64_t)ms,
                                 .input_length = input,
                                 .output_length = output,
                                 .n = (input + KC_TRACE_BLOCK - 1) / KC_TRACE_BLOCK};
    uint64_t *room;
    int rc = kc_trace_add(g->trace, &request, &room);

    if (rc < 0)
        return rc;
    while (*whole < input / KC_TRACE_BLOCK)
        ids[(*whole)++] = g->next_id++;
    memcpy(room, ids, *whole * sizeof(*ids));
    if (*whole < request.n)
        room[*whole] = g->next_id++;
    return 0;
}

static int add_session(struct generator *g, double ms)
{
    uint64_t ids[MAX_INPUT / KC_TRACE_BLOCK + 1];
    const struct app *app = pick_app(g);
    uint32_t input = app->tokens + tokens(&g->rng, QUESTION, MAX_INPUT - app->tokens);
    uint32_t whole = app_ids(app, ids);

    while (g->trace->n_requests < g->n_requests) {
        uint32_t output = tokens(&g->rng, ANSWER, MAX_OUTPUT);
        int rc = add_turn(g, ms, input, output, ids, &whole);

        if (rc < 0)
            return rc;
        if (kc_rng_unit(&g->rng) > MORE_TURNS)
            break;
        input += output + tokens(&g->rng, FOLLOW_UP, MAX_INPUT);
        ms += output * MS_PER_TOKEN + exponential(&g->rng, MEAN_THINK_MS);
        if (input > MAX_INPUT || ms > (double)g->n_requests * MS_PER_REQUEST)
            break;
    }
    return 0;
}

static int compare_requests(const void *a, const void *b)
{
    const struct kc_request *x = a, *y = b;

    if (x->timestamp_ms != y->timestamp_ms)
        return x->timestamp_ms < y->timestamp_ms ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

int kc_generate(const struct kc_generate_opts *opts, struct kc_trace *ret)
{
    struct kc_trace trace = {0};
    struct generator *g;
    double ms = 0;
    int rc = 0;

    if (opts->n_requests == 0)
        return -EINVAL;
    g = calloc(1, sizeof(*g));
    if (!g)
        return -ENOMEM;
    g->rng.state = kc_mix(opts->seed);
    g->trace = &trace;
    g->n_requests = opts->n_requests;
    make_apps(g);
    while (rc == 0 && trace.n_requests < opts->n_requests) {
        rc = add_session(g, ms);
        ms += exponential(&g->rng, MEAN_GAP_MS);
    }
    free(g);
    if (rc < 0) {
        kc_trace_fini(&trace);
        return rc;
    }
    qsort(trace.requests, trace.n_requests, sizeof(*trace.requests), compare_requests);
    *ret = trace;
    return 0;
}
