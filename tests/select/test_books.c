// SPDX-License-Identifier: Apache-2.0
/*
 * Books beside a naive model: random operations with ids used twice, double frees, unknown ids and
 * workers that come and go. After each step the loads are what a sum over the live bookings says.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "index/random.h"
#include "kv_select.h"

#define WORKERS 5
#define IDS 40
#define CHAINS 6
#define BLOCKS 12 /* of a chain */
#define SECOND UINT64_C(1000000000)

struct booking {
    bool live, first;
    int worker, prefill; /* equal: no pair */
    int chain, n_blocks;
    uint64_t tokens, uncovered, output, progress;
};

static struct booking model[IDS];
static uint64_t chains[CHAINS][BLOCKS];
static bool known[WORKERS];

static struct kv_holder holder_of(int i)
{
    return (struct kv_holder){100 + (uint64_t)i, (uint32_t)i % 2};
}

/* Chains share their first half in pairs: 0 and 1, 2 and 3, 4 and 5. */
static void make_chains(void)
{
    for (int c = 0; c < CHAINS; c++)
        for (int i = 0; i < BLOCKS; i++)
            chains[c][i] = (uint64_t)((i < BLOCKS / 2 ? c / 2 * 2 : c) * 1000 + i + 1);
}

/* True when @booking's block @i of chain @c is one of its own. */
static bool has_block(const struct booking *b, int c, int i)
{
    return i < b->n_blocks && chains[b->chain][i] == chains[c][i];
}

static uint64_t distinct_blocks(int worker)
{
    bool seen[CHAINS][BLOCKS] = {{false}};
    uint64_t n = 0;

    for (int id = 0; id < IDS; id++) {
        const struct booking *b = &model[id];

        if (!b->live || (b->worker != worker && (b->first || b->prefill != worker)))
            continue;
        n += (b->tokens + 15) / 16 - (uint64_t)b->n_blocks; /* the tail is its own */
        for (int i = 0; i < b->n_blocks; i++) {
            int c = i < BLOCKS / 2 ? b->chain / 2 * 2 : b->chain;

            n += !seen[c][i];
            seen[c][i] = true;
            assert_true(has_block(b, b->chain, i));
        }
    }
    return n;
}

static void compare(struct kvsel *s)
{
    for (int w = 0; w < WORKERS; w++) {
        struct kvsel_load load = {0}, want = {0};
        int rc = kvsel_get_load(s, holder_of(w), &load);
        bool any = known[w];

        for (int id = 0; id < IDS; id++) {
            const struct booking *b = &model[id];
            bool decodes = b->live && b->worker == w;
            bool computes = b->live && !b->first && b->prefill == w;

            if (!decodes && !computes)
                continue;
            any = true;
            want.requests++;
            want.context += b->tokens + b->output;
            want.waiting += computes ? b->uncovered : 0;
            want.queued += computes;
        }
        assert_int_equal(rc, any ? 0 : -ENOENT);
        if (!any)
            continue;
        assert_int_equal(load.known, known[w]);
        assert_int_equal(load.requests, want.requests);
        assert_int_equal(load.context, want.context);
        assert_int_equal(load.waiting, want.waiting);
        assert_int_equal(load.queued, want.queued);
        assert_int_equal(load.blocks, distinct_blocks(w));
    }
}

static void text_of(int id, char text[16])
{
    snprintf(text, 16, "id-%d", id);
}

static void book(struct kvsel *s, struct rng *random, int id, uint64_t now)
{
    int worker = (int)rng_below(random, WORKERS);
    int prefill = rng_below(random, 3) ? worker : (int)rng_below(random, WORKERS);
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct booking b = {.live = true, .worker = worker, .prefill = prefill, .progress = now};
    char text[16];
    int rc;

    b.chain = (int)rng_below(random, CHAINS);
    b.n_blocks = (int)rng_below(random, BLOCKS + 1);
    b.tokens = (uint64_t)b.n_blocks * 16 + rng_below(random, 40);
    b.uncovered = rng_below(random, (uint32_t)b.tokens + 1);
    request.tokens = b.tokens;
    request.hashes = chains[b.chain];
    request.n_hashes = (size_t)b.n_blocks;
    choice.worker = holder_of(worker);
    choice.prefill = holder_of(prefill);
    choice.paired = worker != prefill;
    choice.uncovered = b.uncovered;
    text_of(id, text);
    rc = kvsel_book(s, text, strlen(text), &request, &choice, now);
    assert_int_equal(rc, model[id].live ? -EEXIST : 0);
    if (rc == 0)
        model[id] = b;
}

static void end(struct kvsel *s, struct rng *random, int id, uint64_t now)
{
    enum kvsel_end how = rng_below(random, 2) ? KVSEL_DONE : KVSEL_LOST;
    char text[16];

    text_of(id, text);
    assert_int_equal(kvsel_free(s, text, strlen(text), how, now), model[id].live ? 0 : -ENOENT);
    model[id].live = false;
}

static void move_on(struct kvsel *s, struct rng *random, int id, uint64_t now)
{
    struct booking *b = &model[id];
    char text[16];

    text_of(id, text);
    if (rng_below(random, 2)) {
        assert_int_equal(kvsel_first_token(s, text, strlen(text), now), b->live ? 0 : -ENOENT);
        b->first = true;
    } else {
        uint64_t n = rng_below(random, 30);

        assert_int_equal(kvsel_output(s, text, strlen(text), n, now), b->live ? 0 : -ENOENT);
        b->output += n;
    }
    b->progress = now;
}

static void change_worker(struct kvsel *s, struct rng *random, int w, uint64_t now)
{
    struct kvsel_worker worker = KVSEL_WORKER_INIT;
    uint64_t what = rng_below(random, 3);

    worker.holder = holder_of(w);
    if (what == 0) {
        assert_int_equal(kvsel_set_worker(s, &worker), 0);
        known[w] = true;
    } else if (what == 1) {
        assert_int_equal(kvsel_remove_worker(s, worker.holder), known[w] ? 0 : -ENOENT);
        known[w] = false;
    } else {
        assert_int_equal(kvsel_fail_worker(s, worker.holder, now + SECOND), known[w] ? 0 : -ENOENT);
    }
}

struct told {
    uint64_t now, n;
};

static void expired(void *arg, const struct kvsel_booking *booking)
{
    struct told *told = arg;
    char text[16] = "";
    int id = -1;

    memcpy(text, booking->id, booking->id_len);
    assert_int_equal(sscanf(text, "id-%d", &id), 1);
    assert_true(model[id].live);
    assert_true(told->now - model[id].progress >= 20 * SECOND);
    assert_int_equal(booking->tokens, model[id].tokens);
    assert_int_equal(booking->first_token, model[id].first);
    model[id].live = false;
    told->n++;
}

/* Let time pass; what no progress has kept must go. */
static void pass_time(struct kvsel *s, struct rng *random, uint64_t *now)
{
    struct told told = {.now = *now += rng_below(random, 15) * SECOND};

    size_t n = kvsel_expire(s, *now, expired, &told);

    assert_int_equal(n, told.n);
    for (int id = 0; id < IDS; id++)
        assert_true(!model[id].live || *now - model[id].progress < 20 * SECOND);
}

/* Choose for a random prompt, which ends predictions and changes no load. */
static void choose(struct kvsel *s, struct rng *random, uint64_t now)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    int chain = (int)rng_below(random, CHAINS);
    struct kvi_match match = {.holder = holder_of((int)rng_below(random, WORKERS + 1))};
    const char *policy = kvsel_policy_name(rng_below(random, 7));
    int rc;

    match.reach[0] = (uint32_t)rng_below(random, BLOCKS);
    for (int t = 1; t < KV_N_TIERS; t++)
        match.reach[t] = match.reach[t - 1];
    request.tokens = BLOCKS * 16;
    request.hashes = chains[chain];
    request.n_hashes = BLOCKS;
    request.matches = &match;
    request.n_matches = rng_below(random, 2);
    request.policy = policy;
    rc = kvsel_select(s, &request, now, &choice);
    assert_true(rc == 0 || rc == -EHOSTUNREACH);
    if (rc == 0) {
        assert_string_equal(choice.policy, policy);
        assert_true(known[choice.worker.worker - 100]);
        assert_true(choice.uncovered <= request.tokens);
    }
}

static void test_random(void **state)
{
    struct rng random = {test_seed()};
    struct kvsel_opts opts = KVSEL_OPTS_INIT;
    struct kvsel *s = NULL;
    uint64_t now = SECOND;

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    make_chains();
    memset(model, 0, sizeof(model));
    memset(known, 0, sizeof(known));
    opts.stride = 1;
    opts.expiry_ns = 20 * SECOND;
    assert_int_equal(kvsel_create(&opts, &s), 0);
    for (long i = 0; i < test_rounds(20000); i++) {
        int id = (int)rng_below(&random, IDS);
        uint64_t what = rng_below(&random, 20);

        now += rng_below(&random, (uint32_t)(SECOND / 10));
        if (what < 6)
            book(s, &random, id, now);
        else if (what < 10)
            end(s, &random, id, now);
        else if (what < 14)
            move_on(s, &random, id, now);
        else if (what < 16)
            change_worker(s, &random, (int)rng_below(&random, WORKERS), now);
        else if (what < 19)
            choose(s, &random, now);
        else
            pass_time(s, &random, &now);
        compare(s);
    }
    kvsel_destroy(s);
}

/* Ids are any bytes: none, zeros, long ones. A NULL is refused. */
static void test_ids(void **state)
{
    static const char zeros[] = "a\0b", long_id[5000] = "x";
    struct kvsel_request request = {
        .size = sizeof(request), .tokens = 10, .origin = 7, .stamp = UINT64_MAX};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = {1, 0}, .uncovered = 99};
    struct kvsel_booking booking = KVSEL_BOOKING_INIT;
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    struct kvsel_load load;
    struct kvsel *s = NULL;

    (void)state;
    assert_int_equal(kvsel_create(NULL, &s), 0);
    assert_int_equal(kvsel_book(s, "", 0, &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, zeros, 3, &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, zeros, 1, &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, long_id, sizeof(long_id), &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, NULL, 0, &request, &choice, 1), -EINVAL);
    assert_int_equal(kvsel_book(s, zeros, 3, &request, &choice, 1), -EEXIST);
    assert_int_equal(kvsel_get_booking(s, zeros, 3, &booking), 0);
    assert_int_equal(booking.uncovered, 10); /* no more than the prompt has */
    assert_int_equal(booking.origin, 7);
    assert_int_equal(booking.stamp, UINT64_MAX);
    assert_int_equal(kvsel_get_load(s, choice.worker, &load), 0);
    assert_int_equal(load.requests, 4);
    assert_false(load.known);
    assert_int_equal(kvsel_free(s, "", 0, KVSEL_DONE, 2), 0);
    assert_int_equal(kvsel_free(s, "", 0, KVSEL_DONE, 2), -ENOENT);
    assert_int_equal(kvsel_free(s, zeros, 3, KVSEL_DONE, 2), 0);
    assert_int_equal(kvsel_free(s, zeros, 1, KVSEL_DONE, 2), 0);
    assert_int_equal(kvsel_free(s, long_id, sizeof(long_id), KVSEL_DONE, 2), 0);
    assert_int_equal(kvsel_get_load(s, choice.worker, &load), -ENOENT);
    assert_int_equal(kvsel_get_stats(s, &stats), 0);
    assert_int_equal(stats.booked, 4);
    assert_int_equal(stats.freed, 4);
    assert_int_equal(stats.duplicates, 1);
    assert_int_equal(stats.unknown, 1);
    kvsel_destroy(s);
}

/* Beyond max_bookings and max_workers nothing is half booked. */
static void test_limits(void **state)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .max_bookings = 2, .max_workers = 1};
    struct kvsel_request request = {.size = sizeof(request), .tokens = 10};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = {1, 0}};
    struct kvsel_load load;
    struct kvsel *s = NULL;

    (void)state;
    assert_int_equal(kvsel_create(&opts, &s), 0);
    choice.paired = true;
    choice.prefill = (struct kv_holder){2, 0};
    assert_int_equal(kvsel_book(s, "pair", 4, &request, &choice, 1), -ENOSPC);
    assert_int_equal(kvsel_get_load(s, choice.worker, &load), -ENOENT);
    choice.paired = false;
    assert_int_equal(kvsel_book(s, "a", 1, &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, "b", 1, &request, &choice, 1), 0);
    assert_int_equal(kvsel_book(s, "c", 1, &request, &choice, 1), -ENOSPC);
    assert_int_equal(kvsel_get_load(s, choice.worker, &load), 0);
    assert_int_equal(load.requests, 2);
    kvsel_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
