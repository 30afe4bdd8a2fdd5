// SPDX-License-Identifier: Apache-2.0
/* The backlog of live batches beside a naive list: order, contents, bounds, one budget for several streams. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>

#include "indexer/stream/backlog.h"

static int put(struct ki_backlog *b, struct ki_backlog_budget *budget, uint64_t sequence,
               bool reconnected, size_t len)
{
    static char data[1 << 20];
    struct ki_batch_id id = {.sequence = sequence};

    memset(data, (int)sequence, len);
    return ki_backlog_put(b, budget, &id, reconnected, data, len);
}

static void in_order_and_whole(void **state)
{
    struct ki_backlog_budget budget = {.max_bytes = 64 << 20, .max_stream_bytes = 16 << 20};
    struct ki_backlog_item *item;
    struct ki_backlog b;

    (void)state;
    ki_backlog_init(&b);
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(put(&b, &budget, i, i == 7, i * 100), 0);
    assert_int_equal(budget.used, b.bytes);
    for (uint64_t i = 0; i < 100; i++) {
        item = ki_backlog_take(&b);
        assert_int_equal(item->id.sequence, i);
        assert_int_equal(item->reconnected, i == 7);
        assert_int_equal(item->len, i * 100);
        for (size_t k = 0; k < i * 100; k++)
            assert_int_equal((char)item->data[k], (char)i);
        ki_backlog_free(&b, &budget, item);
    }
    assert_null(ki_backlog_take(&b));
    assert_int_equal(budget.used, 0);
}

static void bounded_in_bytes(void **state)
{
    struct ki_backlog_budget budget = {.max_bytes = 5 << 20, .max_stream_bytes = 3 << 20};
    struct ki_backlog a, b;
    int taken = 0;

    (void)state;
    ki_backlog_init(&a);
    ki_backlog_init(&b);
    for (uint64_t i = 0; i < 10; i++)
        taken += put(&a, &budget, i, false, (1 << 20) - 4096) == 0;
    assert_int_equal(taken, 3); /* its own share */
    for (uint64_t i = 0; i < 10; i++)
        taken += put(&b, &budget, i, false, (1 << 20) - 4096) == 0;
    assert_int_equal(taken, 5); /* what the other one has left */
    assert_in_range(budget.used, 0, budget.max_bytes);
    /* Small ones count, too: not only their contents. */
    ki_backlog_clear(&a, &budget);
    ki_backlog_clear(&b, &budget);
    assert_int_equal(budget.used, 0);
    for (taken = 0; put(&a, &budget, 1, false, 0) == 0;)
        taken++;
    assert_in_range(taken, 1000, (3 << 20) / 64);
    ki_backlog_clear(&a, &budget);
    assert_int_equal(budget.used, 0);
}

/* A dropped batch may have been the first of its connection: the next one says so. */
static void a_dropped_reconnect_is_told(void **state)
{
    struct ki_backlog_budget budget = {.max_bytes = 1 << 20, .max_stream_bytes = 1 << 20};
    struct ki_backlog_item *item;
    struct ki_backlog b;

    (void)state;
    ki_backlog_init(&b);
    assert_int_equal(put(&b, &budget, 1, false, 600000), 0);
    assert_int_equal(put(&b, &budget, 2, true, 600000), -ENOBUFS);
    assert_int_equal(put(&b, &budget, 3, false, 10), 0);
    for (uint64_t i = 1; i <= 3; i += 2) {
        item = ki_backlog_take(&b);
        assert_int_equal(item->id.sequence, i);
        assert_int_equal(item->reconnected, i == 3);
        ki_backlog_free(&b, &budget, item);
    }
    ki_backlog_clear(&b, &budget);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_and_whole),
        cmocka_unit_test(bounded_in_bytes),
        cmocka_unit_test(a_dropped_reconnect_is_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
