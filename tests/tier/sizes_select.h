// SPDX-License-Identifier: Apache-2.0
/** For test_sizes.c: calls of libkvselect that take a struct, their rows, and those of the index. */
#ifndef KV_TEST_TIER_SIZES_SELECT_H
#define KV_TEST_TIER_SIZES_SELECT_H

#include "kv_select.h"

#define SELECT_STRUCTS(FROZEN, PLAIN) \
    PLAIN(kvi_match)                  \
    PLAIN(kvi_matches)                \
    PLAIN(kvi_group_match)            \
    PLAIN(kvi_group_matches)          \
    PLAIN(kvi_window)                 \
    PLAIN(kvi_cache)                  \
    PLAIN(kvsel_load)                 \
    PLAIN(kvsel_preference)           \
    PLAIN(kvsel_candidate)

static const char *const select_labels[] = {"zone=a"};
static struct kvsel_params select_params = {.tier_cost = {0, .5}, .balance_relative = 2};
static struct kvsel_opts select_opts = {
    .policy = "dynamo", .seed = 3, .block_size = 16, .queue_waiting = 100, .equal_speed = true};
static struct kvsel_worker select_worker = {
    .holder = {7, 0}, .capacity = 1000, .labels = select_labels, .n_labels = 1};
static struct kvsel_request select_request = {.tokens = 100, .lora = "a", .released = true};
static struct kvsel_choice select_choice = {.worker = {7, 0}, .uncovered = 50};

/* Run @call with a selector that has one worker and one booking. */
static int with_selector(int (*call)(struct kvsel *selector, void *struct_), void *struct_)
{
    struct kvsel_worker worker = {.size = sizeof(worker), .holder = {7, 0}};
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = {7, 0}, .uncovered = 50};
    struct kvsel *selector = NULL;
    int rc = kvsel_create(NULL, &selector);

    assert_int_equal(rc, 0);
    assert_int_equal(kvsel_set_worker(selector, &worker), 0);
    assert_int_equal(kvsel_book(selector, "there", 5, &request, &choice, 5), 0);
    rc = call(selector, struct_);
    kvsel_destroy(selector);
    return rc;
}

static int select_opts_(void *opts)
{
    struct kvsel *made = NULL;
    int rc = kvsel_create(opts, &made);

    kvsel_destroy(made);
    return rc;
}

static int select_params_(void *params)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .params = params};

    return select_opts_(&opts);
}

static int set_worker(struct kvsel *selector, void *worker)
{
    return kvsel_set_worker(selector, worker);
}

static int select_(struct kvsel *selector, void *request)
{
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    return kvsel_select(selector, request, 5, &choice);
}

static int choose(struct kvsel *selector, void *choice)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};

    return kvsel_select(selector, &request, 5, choice);
}

static int book(struct kvsel *selector, void *choice)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};

    return kvsel_book(selector, "new", 3, &request, choice, 5);
}

static int booking(struct kvsel *selector, void *ret)
{
    static char id[] = "there"; /* the id that is written is the selector's, another each time */
    int rc = kvsel_get_booking(selector, id, 5, ret);
    struct kvsel_booking *told = ret;

    if (rc == 0)
        told->id = id;
    if (rc == 0 && told->size >= offsetof(struct kvsel_booking, n_hashes))
        told->hashes = NULL;
    return rc;
}

static int select_stats(struct kvsel *selector, void *ret)
{
    return kvsel_get_stats(selector, ret);
}

#define SELECT_CALL(name)                    \
    static int call_##name(void *struct_)    \
    {                                        \
        return with_selector(name, struct_); \
    }
SELECT_CALL(set_worker)
SELECT_CALL(select_)
SELECT_CALL(choose)
SELECT_CALL(book)
SELECT_CALL(booking)
SELECT_CALL(select_stats)

#define SELECT_ROWS                                                                              \
    {"kvi_opts", sizeof(index_opts), OPTIONAL, &index_opts, index_, 0},                          \
        {"kvi_stats", sizeof(struct kvi_stats), LEAST, NULL, index_stats, 0},                    \
        {"kvi_holder_info", sizeof(struct kvi_holder_info), LEAST, NULL, index_holder, 0},       \
        {"kvsel_opts", sizeof(select_opts), OPTIONAL, &select_opts, select_opts_, 0},            \
        {"kvsel_params", sizeof(select_params), OPTIONAL, &select_params, select_params_, 0},    \
        {"kvsel_worker", sizeof(select_worker), OPTIONAL, &select_worker, call_set_worker, 0},   \
        {"kvsel_request", sizeof(select_request), OPTIONAL, &select_request, call_select_, 0},   \
        {"kvsel_choice, booked", sizeof(select_choice), OPTIONAL, &select_choice, call_book, 0}, \
        {"kvsel_choice", sizeof(struct kvsel_choice), LEAST, NULL, call_choose, 0},              \
        {"kvsel_booking", sizeof(struct kvsel_booking), LEAST, NULL, call_booking, 0},           \
    {                                                                                            \
        "kvsel_stats", sizeof(struct kvsel_stats), LEAST, NULL, call_select_stats, 0             \
    }

#endif
