// SPDX-License-Identifier: Apache-2.0
/* Predictions: a booked worker counts as holding the prompt, and how that ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <string.h>

#include "kv_select.h"

#define SECOND UINT64_C(1000000000)
#define BLOCKS 32

static uint64_t hashes[BLOCKS];
static const struct kv_holder one = {1, 0}, two = {2, 0};

static struct kvsel *make(uint64_t predict_ns)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .predict_ns = predict_ns, .seed = 1};
    struct kvsel_worker worker = KVSEL_WORKER_INIT;
    struct kvsel *s = NULL;

    for (uint64_t i = 0; i < BLOCKS; i++)
        hashes[i] = 1000 + i;
    assert_int_equal(kvsel_create(&opts, &s), 0);
    worker.holder = one;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    worker.holder = two;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    return s;
}

static struct kvsel_request request_of(size_t blocks)
{
    return (struct kvsel_request){.size = sizeof(struct kvsel_request),
                                  .tokens = blocks * 16,
                                  .hashes = hashes,
                                  .n_hashes = blocks};
}

static void book(struct kvsel *s, const char *id, struct kv_holder holder, size_t blocks,
                 uint64_t now)
{
    struct kvsel_request request = request_of(blocks);
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = holder};

    choice.uncovered = request.tokens;
    assert_int_equal(kvsel_book(s, id, strlen(id), &request, &choice, now), 0);
}

/* Tokens of a prompt of all blocks that @holder is predicted to hold; no match beside. */
static uint64_t predicted(struct kvsel *s, struct kv_holder holder, uint64_t now)
{
    struct kvsel_request request = request_of(BLOCKS);
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    assert_int_equal(kvsel_reckon(s, &request, holder, now, &choice), 0);
    assert_int_equal(choice.uncovered, request.tokens - choice.predicted);
    return choice.predicted;
}

/* Steps are of 4 blocks: of 11 blocks, 8 count. The prediction lasts 2 s, also after the end. */
static void test_time(void **state)
{
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    struct kvsel *s = make(0);

    (void)state;
    book(s, "a", one, 11, SECOND);
    assert_int_equal(predicted(s, one, SECOND), 8 * 16);
    assert_int_equal(predicted(s, two, SECOND), 0);
    assert_int_equal(kvsel_free(s, "a", 1, KVSEL_DONE, SECOND), 0);
    assert_int_equal(predicted(s, one, 3 * SECOND - 1), 8 * 16);
    assert_int_equal(predicted(s, one, 3 * SECOND), 0);
    assert_int_equal(kvsel_get_stats(s, &stats), 0);
    assert_int_equal(stats.outlived, 1);
    assert_int_equal(stats.predictions, 0);
    kvsel_destroy(s);
}

/* The longest prediction counts; each end leaves the others. */
static void test_several(void **state)
{
    struct kvsel *s = make(0);

    (void)state;
    book(s, "long", one, 32, SECOND);
    book(s, "short", one, 16, SECOND);
    book(s, "other", two, 16, SECOND);
    assert_int_equal(predicted(s, one, SECOND), 32 * 16);
    assert_int_equal(kvsel_free(s, "long", 4, KVSEL_LOST, SECOND), 0);
    assert_int_equal(predicted(s, one, SECOND), 16 * 16);
    assert_int_equal(kvsel_fail_worker(s, one, 9 * SECOND), 0);
    assert_int_equal(predicted(s, one, SECOND), 0);
    assert_int_equal(predicted(s, two, SECOND), 16 * 16);
    assert_int_equal(kvsel_remove_worker(s, two), 0);
    assert_int_equal(predicted(s, two, SECOND), 0);
    kvsel_destroy(s);
}

/* An event for the last counted block ends it; one for another block, or another worker, does not. */
static void test_event(void **state)
{
    struct kvsel *s = make(0);

    (void)state;
    book(s, "a", one, 16, SECOND);
    assert_int_equal(kvsel_announced(s, one, hashes[3]), 0);
    assert_int_equal(kvsel_announced(s, one, hashes[14]), 0);
    assert_int_equal(kvsel_announced(s, two, hashes[15]), 0);
    assert_int_equal(kvsel_announced(s, (struct kv_holder){9, 0}, hashes[15]), 0);
    assert_int_equal(predicted(s, one, SECOND), 16 * 16);
    assert_int_equal(kvsel_announced(s, one, hashes[15]), 1);
    assert_int_equal(kvsel_announced(s, one, hashes[15]), 0);
    assert_int_equal(predicted(s, one, SECOND), 0);
    kvsel_destroy(s);
}

/* A match that covers a prediction ends it, so that an eviction is believed. */
static void test_match(void **state)
{
    struct kvsel_request request = request_of(BLOCKS);
    struct kvi_match match = {.holder = one, .reach = {16, 16, 16, 16}};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = make(0);

    (void)state;
    book(s, "a", one, 16, SECOND);
    request.matches = &match;
    request.n_matches = 1;
    match.reach[0] = match.reach[1] = match.reach[2] = match.reach[3] = 15;
    assert_int_equal(kvsel_reckon(s, &request, one, SECOND, &choice), 0);
    assert_int_equal(choice.predicted, 16 * 16);
    match.reach[3] = 16; /* in any tier */
    assert_int_equal(kvsel_reckon(s, &request, one, SECOND, &choice), 0);
    assert_int_equal(choice.predicted, 0);
    assert_int_equal(predicted(s, one, SECOND), 0);
    kvsel_destroy(s);
}

/* Twins meet at one worker while others are busy, and spread without predictions. */
static void test_twins(void **state)
{
    struct kvsel_request request = request_of(BLOCKS);
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = make(0), *blind = make(UINT64_MAX);

    (void)state;
    book(s, "busy", two, 0, SECOND);
    book(s, "first", one, BLOCKS, SECOND);
    assert_int_equal(kvsel_first_token(s, "first", 5, SECOND), 0); /* its events are under way */
    assert_int_equal(kvsel_select(s, &request, SECOND, &choice), 0);
    assert_int_equal(choice.worker.worker, 1);
    assert_int_equal(choice.uncovered, 0);
    book(blind, "first", one, BLOCKS, SECOND);
    assert_int_equal(kvsel_first_token(blind, "first", 5, SECOND), 0);
    assert_int_equal(kvsel_select(blind, &request, SECOND, &choice), 0);
    assert_int_equal(choice.worker.worker, 2);
    kvsel_destroy(s);
    kvsel_destroy(blind);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_time),  cmocka_unit_test(test_several), cmocka_unit_test(test_event),
        cmocka_unit_test(test_match), cmocka_unit_test(test_twins),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
