// SPDX-License-Identifier: Apache-2.0
/* Each policy's formula, by costs computed by hand, and the constraints that leave workers out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kv_select.h"

#define WORKERS 3

static struct kv_holder holder_of(uint64_t worker)
{
    return (struct kv_holder){worker, 0};
}

static struct kvsel *make(const char *policy)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .policy = policy, .seed = 1, .stride = 1};
    struct kvsel *s = NULL;

    assert_int_equal(kvsel_create(&opts, &s), 0);
    for (uint64_t w = 1; w <= WORKERS; w++) {
        struct kvsel_worker worker = {.size = sizeof(worker), .holder = holder_of(w)};

        worker.capacity = 10000;
        assert_int_equal(kvsel_set_worker(s, &worker), 0);
    }
    return s;
}

/* Book a request of @tokens, of which @uncovered are to compute, at @worker. */
static void book(struct kvsel *s, const char *id, uint64_t worker, uint64_t tokens,
                 uint64_t uncovered, const uint64_t *hashes)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = tokens, .hashes = hashes};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = holder_of(worker)};

    request.n_hashes = hashes ? (size_t)tokens / 16 : 0;
    choice.uncovered = uncovered;
    assert_int_equal(kvsel_book(s, id, strlen(id), &request, &choice, 1), 0);
}

static struct kvi_match match_of(uint64_t worker, uint32_t device, uint32_t host, uint32_t disk)
{
    return (struct kvi_match){.holder = holder_of(worker), .reach = {device, host, disk, disk}};
}

/* Costs of the three workers for 160 tokens: 1 holds 8 blocks, 2 holds 4, two more in host memory. */
static void costs(struct kvsel *s, const struct kvsel_request *like, double cost[WORKERS])
{
    struct kvi_match matches[] = {match_of(1, 8, 8, 8), match_of(2, 4, 6, 6)};
    struct kvsel_candidate candidates[WORKERS];
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel_request request = *like;

    request.tokens = 160;
    request.matches = matches;
    request.n_matches = 2;
    assert_int_equal(kvsel_explain(s, &request, 2, &choice, candidates, WORKERS), WORKERS);
    for (int i = 0; i < WORKERS; i++) {
        assert_int_equal(candidates[i].holder.worker, i + 1);
        cost[i] = candidates[i].cost;
    }
    assert_true(choice.cost <= cost[0] && choice.cost <= cost[1] && choice.cost <= cost[2]);
}

static void expect(const double cost[WORKERS], double one, double two, double three)
{
    assert_float_equal(cost[0], one, 1e-9);
    assert_float_equal(cost[1], two, 1e-9);
    assert_float_equal(cost[2], three, 1e-9);
}

/* Loads: 1 has 100 waiting of 200 tokens; 2 runs 400 tokens past its first token; 3 is idle. */
static void load(struct kvsel *s, const uint64_t *hashes)
{
    book(s, "a", 1, 200, 100, NULL);
    book(s, "b", 2, 400, 300, hashes);
    assert_int_equal(kvsel_first_token(s, "b", 1, 2), 0);
}

static void test_adaptive(void **state)
{
    struct kvsel_params fixed = {.size = sizeof(fixed), .own_weight = 4, .context_weight = .1};
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make(NULL);
    double cost[WORKERS], weight;

    (void)state;
    load(s, NULL);
    costs(s, &request, cost);
    weight = 1 / (1 - 1.0 / 3 / 200); /* one of three is busy, at the first of 200 decisions */
    expect(cost, 100 + weight * 32 + .05 * 200, weight * (160 - 64 - .75 * 32) + .05 * 400,
           weight * 160);
    request.params = &fixed;
    costs(s, &request, cost);
    expect(cost, 100 + 4 * 32 + 20, 4 * 72 + 40, 4 * 160);
    kvsel_destroy(s);
}

/* While all are busy the request's own tokens come to weigh 6 times. */
static void test_adaptive_busy(void **state)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("adaptive");
    double cost[WORKERS];

    (void)state;
    book(s, "a", 1, 100, 100, NULL);
    book(s, "b", 2, 100, 100, NULL);
    book(s, "c", 3, 100, 100, NULL);
    for (int i = 0; i < 2000; i++)
        costs(s, &request, cost);
    expect(cost, 105 + 6 * 32, 105 + 6 * 72, 105 + 6 * 160);
    kvsel_destroy(s);
}

/* Idle workers: the weight is 1, no matter how much of the prompts is held. */
static void test_adaptive_idle(void **state)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("adaptive");
    double cost[WORKERS];

    (void)state;
    for (int i = 0; i < 100; i++)
        costs(s, &request, cost);
    expect(cost, 32, 72, 160);
    kvsel_destroy(s);
}

/* Requests that find most of their tokens are hurt more by tokens to compute. */
static void test_adaptive_missing(void **state)
{
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("adaptive");
    double cost[WORKERS], weight = 1 + .5 / .2; /* busy 1/3, missing 32 of 160 tokens */

    (void)state;
    assert_int_equal(kvsel_get_stats(s, &stats), 0);
    assert_float_equal(stats.missing, 1, 0); /* no choice yet */
    book(s, "a", 3, 100, 100, NULL);
    for (int i = 0; i < 8000; i++)
        costs(s, &request, cost);
    expect(cost, weight * 32, weight * 72, 105 + weight * 160);
    assert_int_equal(kvsel_get_stats(s, &stats), 0);
    assert_float_equal(stats.missing, .2, 1e-12);
    assert_float_equal(stats.busy, 1 / 3.0, 1e-12);
    kvsel_destroy(s);
}

static void test_dynamo(void **state)
{
    struct kvsel_params other = {.size = sizeof(other), .overlap_credit = .5, .request_weight = 2};
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("dynamo");
    uint64_t hashes[25];
    double cost[WORKERS];

    (void)state;
    for (uint64_t i = 0; i < 25; i++)
        hashes[i] = i + 1;
    load(s, hashes);
    request.hashes = hashes;
    request.n_hashes = 10;
    costs(s, &request, cost);
    /* 13 blocks run on 1 and 25 on 2; of the prompt's 10 all run on 2, which so holds them soon. */
    expect(cost, (100 + 32) / 16.0 + 13 + 10, 0 + 25, 160 / 16.0 + 10);
    request.params = &other;
    costs(s, &request, cost);
    expect(cost, (100 + 32 + 64) / 16.0 + 23 + 2, 80 / 16.0 + 25 + 2, 10 + 10);
    kvsel_destroy(s);
}

static void test_plain(void **state)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("least");
    double cost[WORKERS];

    (void)state;
    load(s, NULL);
    costs(s, &request, cost);
    expect(cost, 1, 1, 0);
    request.policy = "round-robin"; /* 3 was chosen just now */
    costs(s, &request, cost);
    expect(cost, 0, 1, 2);
    costs(s, &request, cost);
    expect(cost, 2, 0, 1);
    request.policy = "prefix";
    costs(s, &request, cost);
    expect(cost, 1 / 1048576.0 - 128, 1 / 1048576.0 - 96, 0);
    request.policy = "cache-aware";
    costs(s, &request, cost);
    expect(cost, 1 / 1048576.0 - 128, 1 / 1048576.0 - 96, 0);
    kvsel_destroy(s);
}

/* A look at the loads changes no choice: no turn, no smoothed share, no count. */
static void test_look(void **state)
{
    struct kvi_match match = match_of(2, 4, 4, 4);
    struct kvsel_request request = {
        .size = sizeof(request), .tokens = 160, .matches = &match, .n_matches = 1};
    struct kvsel_stats before = KVSEL_STATS_INIT, after = KVSEL_STATS_INIT;
    struct kvsel_candidate candidates[WORKERS];
    struct kvsel *s = make("round-robin"), *twin = make("round-robin");
    double cost[WORKERS], of_twin[WORKERS];

    (void)state;
    load(s, NULL);
    load(twin, NULL);
    assert_int_equal(kvsel_get_stats(s, &before), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(kvsel_look(s, &request, 2, candidates, WORKERS), WORKERS);
    assert_int_equal(kvsel_look(s, &request, 2, NULL, 0), WORKERS);
    assert_int_equal(kvsel_look(s, &request, 2, NULL, 1), -EINVAL);
    assert_int_equal(kvsel_get_stats(s, &after), 0);
    assert_memory_equal(&before, &after, sizeof(before));
    assert_float_equal(candidates[0].waiting, 100, 0);
    assert_float_equal(candidates[1].uncovered, 160 - 64, 0);
    assert_float_equal(candidates[2].cost, 0, 0);
    for (int i = 0; i < 2; i++) {
        request.policy = i ? "adaptive" : NULL;
        costs(s, &request, cost);
        costs(twin, &request, of_twin);
        assert_memory_equal(cost, of_twin, sizeof(cost));
    }
    kvsel_destroy(s);
    kvsel_destroy(twin);
}

/* Apart by 65 requests, the load decides; below, and without a match, the context. */
static void test_cache_aware_load(void **state)
{
    struct kvsel_params some = {.size = sizeof(some), .match_threshold = .9};
    struct kvsel_request request = {.size = sizeof(request), .params = &some};
    struct kvsel *s = make("cache-aware");
    double cost[WORKERS];

    (void)state;
    for (int i = 0; i < 65; i++) {
        char id[16];

        if (i == 64) {
            costs(s, &request, cost);
            expect(cost, 6400 + 64 / 1048576.0, 0, 0);
        }
        snprintf(id, sizeof(id), "%d", i);
        book(s, id, 1, 100, 0, NULL);
    }
    costs(s, &request, cost);
    expect(cost, 65, 0, 0);
    kvsel_destroy(s);
}

static void test_scored(void **state)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("scored");
    double cost[WORKERS];

    (void)state;
    load(s, NULL);
    costs(s, &request,
          cost); /* blocks 8, 6, 0 of 10; queues 1, 0, 0; 200 and 400 of 10,000 tokens */
    expect(cost, -(2 * .8 + 0 + .98), -(2 * .6 + 1 + .96), -(0 + 1 + 1));
    request.lora = "l";
    assert_int_equal(kvsel_set_lora(s, holder_of(3), "l", true), 0);
    costs(s, &request, cost);
    expect(cost, -(1.6 + .98 + .8), -(1.2 + 1.96 + .8), -(2 + 1));
    kvsel_destroy(s);
}

/* A worker that isn't trusted has less; one with an unknown adapter is charged. */
static void test_charges(void **state)
{
    struct kvsel_preference preferred = {"zone=a", 2};
    struct kvsel_worker worker = {.size = sizeof(worker), .holder = holder_of(2), .max_loras = 1};
    const char *labels[] = {"zone=a", "gpu=h100"}, *loras[] = {"other"};
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("adaptive");
    double cost[WORKERS];

    (void)state;
    assert_int_equal(kvsel_trust_worker(s, holder_of(1), .5), 0);
    costs(s, &request, cost);
    expect(cost, 160 - .5 * 128, 72, 160);
    worker.labels = labels;
    worker.n_labels = 2;
    worker.loras = loras;
    worker.n_loras = 1;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    request.preferred = &preferred;
    request.n_preferred = 1;
    costs(s, &request, cost);
    expect(cost, 96 + 2048, 72, 160 + 2048);
    request.n_preferred = 0;
    request.lora = "mine";
    costs(s, &request, cost);
    expect(cost, 96 + 2048, 72 + 4096, 160 + 2048);
    kvsel_destroy(s);
}

/* Of a worker without a limit the latest 1024 adapters are noted: their names come from clients. */
static void test_many_loras(void **state)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make("scored");
    double cost[WORKERS], noted;
    char name[16];

    (void)state;
    load(s, NULL);
    for (int i = 0; i < 1025; i++) {
        snprintf(name, sizeof(name), "l%d", i);
        assert_int_equal(kvsel_set_lora(s, holder_of(3), name, true), 0);
    }
    request.lora = name;
    costs(s, &request, cost);
    noted = cost[2];
    snprintf(name, sizeof(name), "l1");
    costs(s, &request, cost);
    assert_true(cost[2] == noted);
    snprintf(name, sizeof(name), "l0");
    costs(s, &request, cost);
    assert_true(cost[2] > noted);
    kvsel_destroy(s);
}

/* ---- constraints ---- */

/* Reasons of the three workers for a request of 10 tokens. */
static int reasons(struct kvsel *s, struct kvsel_request *request, const char *expected)
{
    struct kvsel_candidate candidates[WORKERS];
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    char text[128] = "";

    request->tokens = 10;
    assert_int_equal(kvsel_explain(s, request, 5, &choice, candidates, WORKERS), WORKERS);
    for (int i = 0; i < WORKERS; i++) {
        strcat(text, i ? " " : "");
        strcat(text, kvsel_reason_name(candidates[i].reason));
        assert_true(isinf(candidates[i].cost) == (candidates[i].reason != KVSEL_FITS));
    }
    assert_string_equal(text, expected);
    assert_int_equal(kvsel_select(s, request, 5, &choice), choice.candidates ? 0 : -EHOSTUNREACH);
    return choice.candidates ? (int)choice.worker.worker : 0;
}

static void test_constraints(void **state)
{
    const struct kv_holder two = holder_of(2), stranger = holder_of(9);
    const uint64_t allowed[] = {3, 9};
    const char *required[] = {"gpu=h100"};
    struct kvsel_worker worker = {.size = sizeof(worker), .holder = two};
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel *s = make(NULL);

    (void)state;
    request.pinned = &two;
    assert_int_equal(reasons(s, &request, "pinned fits pinned"), 2);
    request.pinned = &stranger;
    assert_int_equal(reasons(s, &request, "pinned pinned pinned"), 0);
    request.pinned = NULL;
    request.allowed = allowed;
    request.n_allowed = 2;
    assert_int_equal(reasons(s, &request, "denied denied fits"), 3);
    request.n_allowed = 0; /* a list of nobody */
    assert_int_equal(reasons(s, &request, "denied denied denied"), 0);
    request.allowed = NULL;
    request.avoided = &two;
    request.n_avoided = 1;
    reasons(s, &request, "fits avoided fits");
    request.n_avoided = 0;
    request.required = required;
    request.n_required = 1;
    assert_int_equal(reasons(s, &request, "label label label"), 0);
    worker.labels = required;
    worker.n_labels = 1;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    assert_int_equal(reasons(s, &request, "label fits label"), 2);
    request.n_required = 0;
    worker.draining = true;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    reasons(s, &request, "fits draining fits");
    worker.draining = false;
    worker.max_requests = 1;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    reasons(s, &request, "fits fits fits");
    book(s, "one", 2, 10, 10, NULL);
    reasons(s, &request, "fits full fits");
    assert_int_equal(kvsel_fail_worker(s, holder_of(1), 6), 0);
    assert_int_equal(reasons(s, &request, "failed full fits"), 3);
    assert_int_equal(kvsel_fail_worker(s, holder_of(1), 5), 0); /* it is 5 now: over */
    reasons(s, &request, "fits full fits");
    assert_int_equal(kvsel_remove_worker(s, two), 0); /* its booking keeps it in sight */
    reasons(s, &request, "fits gone fits");
    kvsel_destroy(s);
}

static void set_role(struct kvsel *s, uint64_t worker, uint32_t roles, const char *zone)
{
    struct kvsel_worker w = {.size = sizeof(w), .holder = holder_of(worker), .roles = roles};

    w.labels = &zone;
    w.n_labels = 1;
    assert_int_equal(kvsel_set_worker(s, &w), 0);
}

/* A pair: 1 decodes, 2 and 3 compute prompts. Both legs are booked as one, and freed as one. */
static void test_pair(void **state)
{
    struct kvi_match match = match_of(1, 60, 60, 60);
    struct kvsel_request request = {.size = sizeof(request), .tokens = 1000, .stage = KVSEL_PAIR};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel_load load;
    struct kvsel *s = make(NULL);

    (void)state;
    set_role(s, 1, KVSEL_DECODE, "zone=a");
    set_role(s, 2, KVSEL_PREFILL, "zone=a");
    set_role(s, 3, KVSEL_PREFILL, "zone=b");
    book(s, "busy", 2, 100, 100, NULL);
    assert_int_equal(kvsel_select(s, &request, 1, &choice), 0);
    assert_true(choice.paired);
    assert_int_equal(choice.worker.worker, 1);
    assert_int_equal(choice.prefill.worker, 3);
    request.domain = "zone="; /* required */
    assert_int_equal(kvsel_select(s, &request, 1, &choice), 0);
    assert_int_equal(choice.prefill.worker, 2);
    request.domain_weight = .01; /* preferred, for ten tokens */
    assert_int_equal(kvsel_select(s, &request, 1, &choice), 0);
    assert_int_equal(choice.prefill.worker, 3);
    assert_int_equal(choice.uncovered, 1000);
    assert_int_equal(kvsel_book(s, "pair", 4, &request, &choice, 1), 0);
    assert_int_equal(kvsel_get_load(s, holder_of(3), &load), 0);
    assert_int_equal(load.waiting, 1000);
    assert_int_equal(kvsel_get_load(s, holder_of(1), &load), 0);
    assert_int_equal(load.waiting, 0);
    assert_int_equal(load.context, 1000);
    assert_int_equal(kvsel_first_token(s, "pair", 4, 2), 0);
    assert_int_equal(kvsel_get_load(s, holder_of(3), &load), 0);
    assert_int_equal(load.context, 0);
    assert_int_equal(kvsel_free(s, "pair", 4, KVSEL_DONE, 3), 0);
    assert_int_equal(kvsel_get_load(s, holder_of(1), &load), 0);
    assert_int_equal(load.context, 0);
    request.matches = &match; /* 40 tokens are left: not worth another worker */
    request.n_matches = 1;
    assert_int_equal(kvsel_select(s, &request, 4, &choice), 0);
    assert_false(choice.paired);
    request.n_matches = 0;
    assert_int_equal(kvsel_remove_worker(s, holder_of(2)), 0);
    assert_int_equal(kvsel_remove_worker(s, holder_of(3)), 0);
    assert_int_equal(kvsel_select(s, &request, 4, &choice), -EHOSTUNREACH);
    assert_int_equal(kvsel_explain(s, &request, 4, &choice, NULL, 0), 2);
    assert_int_equal(choice.candidates, 0); /* there is none: 1 alone can't compute it */
    request.stage = KVSEL_WHOLE;            /* nobody has both roles */
    assert_int_equal(kvsel_select(s, &request, 4, &choice), -EHOSTUNREACH);
    kvsel_destroy(s);
}

/* Equal costs are drawn: each of three comes within 10 % of a third, and one seed is one sequence. */
static void test_ties(void **state)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT, again = KVSEL_CHOICE_INIT;
    struct kvsel *s = make(NULL), *same = make(NULL);
    int n[WORKERS + 1] = {0};

    (void)state;
    for (int i = 0; i < 9000; i++) {
        assert_int_equal(kvsel_select(s, &request, 1, &choice), 0);
        assert_int_equal(kvsel_select(same, &request, 1, &again), 0);
        assert_int_equal(choice.worker.worker, again.worker.worker);
        assert_int_equal(choice.why, KVSEL_BY_TIE);
        n[choice.worker.worker]++;
    }
    for (int w = 1; w <= WORKERS; w++)
        assert_in_range(n[w], 2700, 3300);
    kvsel_destroy(s);
    kvsel_destroy(same);
}

/* At temperature 1, costs 0 and most are e to 1 apart. */
static void test_temperature(void **state)
{
    struct kvsel_params warm = {.size = sizeof(warm), .temperature = 1};
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100, .params = &warm};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = make("least");
    int n[WORKERS + 1] = {0};

    (void)state;
    book(s, "a", 1, 100, 100, NULL);
    for (int i = 0; i < 10000; i++) {
        assert_int_equal(kvsel_select(s, &request, 1, &choice), 0);
        assert_int_equal(choice.why, KVSEL_BY_CHANCE);
        n[choice.worker.worker]++;
    }
    assert_in_range(n[1], 1400, 1700); /* 1 / (1 + 2 e) = 15.5 % */
    assert_in_range(n[2], 4000, 4450);
    kvsel_destroy(s);
}

static void test_refused(void **state)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .policy = "best"};
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100, .policy = "best"};
    struct kvsel_worker worker = KVSEL_WORKER_INIT;
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    const char *nothing = NULL;
    struct kvsel *s = NULL;

    (void)state;
    assert_int_equal(kvsel_create(&opts, &s), -EINVAL);
    s = make(NULL);
    assert_int_equal(kvsel_select(s, &request, 1, &choice), -EINVAL);
    request.policy = NULL;
    request.n_matches = 1;
    assert_int_equal(kvsel_select(s, &request, 1, &choice), -EINVAL);
    request.n_matches = 0;
    request.required = worker.labels = &nothing;
    request.n_required = worker.n_labels = 1;
    assert_int_equal(kvsel_select(s, &request, 1, &choice), -EINVAL);
    assert_int_equal(kvsel_set_worker(s, &worker), -EINVAL);
    request.n_required = 0;
    request.tokens = UINT64_MAX;
    assert_int_equal(kvsel_select(s, &request, 1, &choice), -EINVAL);
    assert_int_equal(kvsel_trust_worker(s, holder_of(1), 2), -EINVAL);
    assert_int_equal(kvsel_trust_worker(s, holder_of(9), 1), -ENOENT);
    assert_null(kvsel_policy_name(100));
    assert_null(kvsel_reason_name((enum kvsel_reason)100));
    kvsel_destroy(s);
}

static void test_no_workers(void **state)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = NULL;

    (void)state;
    assert_int_equal(kvsel_create(NULL, &s), 0);
    for (size_t i = 0; (request.policy = kvsel_policy_name(i)); i++)
        assert_int_equal(kvsel_select(s, &request, 1, &choice), -EHOSTUNREACH);
    kvsel_destroy(s);
}

/* Numbers that no cost can be reckoned with are refused: NaN would make the first worker the best. */
static void test_not_finite(void **state)
{
    const double bad[] = {NAN, INFINITY, -INFINITY};
    struct kvsel_preference wish = {.label = "zone=a"};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = make(NULL), *none = NULL;

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct kvsel_params params = {.size = sizeof(params), .own_weight = bad[i]};
        struct kvsel_opts opts = {.size = sizeof(opts), .params = &params};
        struct kvsel_worker worker = {.size = sizeof(worker), .speed = bad[i]};
        struct kvsel_request r = {.size = sizeof(r), .tokens = 100, .params = &params};

        assert_int_equal(kvsel_create(&opts, &none), -EINVAL);
        assert_int_equal(kvsel_set_worker(s, &worker), -EINVAL);
        assert_int_equal(kvsel_select(s, &r, 1, &choice), -EINVAL);
        r.params = NULL;
        r.domain_weight = bad[i];
        assert_int_equal(kvsel_select(s, &r, 1, &choice), -EINVAL);
        r.domain_weight = 0;
        r.jump_s = bad[i];
        assert_int_equal(kvsel_queue_put(s, 1, &r, 1), -EINVAL);
        r.jump_s = 0;
        r.preferred = &wish;
        r.n_preferred = 1;
        wish.weight = bad[i];
        assert_int_equal(kvsel_select(s, &r, 1, &choice), -EINVAL);
    }
    kvsel_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_adaptive),      cmocka_unit_test(test_adaptive_busy),
        cmocka_unit_test(test_adaptive_idle), cmocka_unit_test(test_adaptive_missing),
        cmocka_unit_test(test_dynamo),        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_look),          cmocka_unit_test(test_cache_aware_load),
        cmocka_unit_test(test_scored),        cmocka_unit_test(test_charges),
        cmocka_unit_test(test_many_loras),    cmocka_unit_test(test_constraints),
        cmocka_unit_test(test_pair),          cmocka_unit_test(test_ties),
        cmocka_unit_test(test_temperature),   cmocka_unit_test(test_refused),
        cmocka_unit_test(test_not_finite),    cmocka_unit_test(test_no_workers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
