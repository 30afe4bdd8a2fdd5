// SPDX-License-Identifier: Apache-2.0
/* Tags of receives by NIXL, which need no NIXL: whoever knows one may say that the receive is over. */
#include <errno.h>
#include <string.h>

#include "base/unit.h"
#include "peer/nixl/node.h"

static struct kvbm_carrier_node node;

static void begin(void)
{
    memset(&node, 0, sizeof(node));
    pthread_mutex_init(&node.lock, NULL);
    pthread_cond_init(&node.changed, NULL);
    LIST_INIT(&node.receives);
    LIST_INIT(&node.given_up);
}

static struct kvbm_carrier_receive *receive(uint64_t *tag)
{
    static uint8_t memory[16];
    static const struct iovec piece = {memory, sizeof(memory)};
    static const struct kvbm_carrier_message message = {&piece, 1};
    struct kvbm_carrier_receive *one = NULL;

    assert_int_equal(kvbm_nixl_receive_start(&node, &message, 1, tag, &one), 0);
    return one;
}

/* Another peer knows its own tags, and guesses the next ones: a receive that was given up stays lost. */
static void test_next_tags(void **state)
{
    struct kvbm_carrier_receive *one, *other;
    uint64_t known, tag;

    (void)state;
    begin();
    one = receive(&known);
    other = receive(&tag);
    assert_int_equal(known & 0xffff, 0); /* places in the arena */
    assert_int_equal(tag & 0xffff, 1);
    assert_int_equal(kvbm_nixl_receive_end(other, false, 0), -ETIMEDOUT);
    assert_int_equal(kvbm_nixl_receive_end(one, false, 0), -ETIMEDOUT);
    assert_int_equal(node.n_lost, 2);
    kvbm_nixl_receive_over(&node, known);
    assert_int_equal(node.n_lost, 1);
    for (uint64_t number = 0; number < 1000; number++) {
        kvbm_nixl_receive_over(&node, number << 16 | 1);
        kvbm_nixl_receive_over(&node, ((known >> 16) + number) << 16 | 1);
    }
    assert_int_equal(node.n_lost, 1);
    kvbm_nixl_receive_over(&node, tag);
    assert_int_equal(node.n_lost, 0);
    assert_int_equal(node.n_used, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_next_tags),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
