// SPDX-License-Identifier: Apache-2.0
/* Memory shared by clients, beside a plain list of their shares. */
#include "http/budget.h"

#include "base/core/error.h"
#include "base/unit.h"

#define MIB ((size_t)1 << 20)

static void address(uint8_t ret[16], unsigned number)
{
    memset(ret, 0, 16);
    ret[10] = ret[11] = 0xff;
    ret[12] = 10;
    ret[15] = (uint8_t)number;
}

static struct kh_client *join(struct kh_budget *budget, unsigned number)
{
    struct kh_client *client;
    uint8_t bytes[16];

    address(bytes, number);
    client = kh_budget_join(budget, bytes);
    assert_non_null(client);
    return client;
}

static void half_of_what_is_left(void **state)
{
    struct kh_client *one, *two, *three;
    struct kh_budget *budget;

    (void)state;
    assert_int_equal(kh_budget_create(256 * MIB, &budget), 0);
    one = join(budget, 1);
    two = join(budget, 2);
    three = join(budget, 3);
    assert_true(kh_budget_take(budget, one, 128 * MIB));
    assert_false(kh_budget_take(budget, one, 1));
    assert_true(kh_budget_take(budget, two, 64 * MIB));
    assert_false(kh_budget_take(budget, two, 1));
    assert_true(kh_budget_take(budget, three, 32 * MIB));
    assert_false(kh_budget_take(budget, three, 1));
    kh_budget_give(budget, one, 128 * MIB);
    assert_true(kh_budget_take(budget, three, 32 * MIB));
    assert_false(kh_budget_take(budget, one, SIZE_MAX));
    assert_false(kh_budget_take(budget, one, 256 * MIB));
    kh_budget_give(budget, two, 64 * MIB);
    kh_budget_give(budget, three, 64 * MIB);
    assert_int_equal(kh_budget_used(budget), 0);
    kh_budget_leave(budget, one);
    kh_budget_leave(budget, two);
    kh_budget_leave(budget, three);
    kh_budget_destroy(budget);
    kh_budget_destroy(NULL);
}

/* One machine may have 2^64 addresses of an IPv6 network, and one of IPv4. */
static void who_is_one_client(void **state)
{
    uint8_t a[16] = {0x20, 0x01, 0x0d, 0xb8, [15] = 1}, b[16] = {0x20, 0x01, 0x0d, 0xb8, [8] = 9},
            c[16] = {0x20, 0x01, 0x0d, 0xb8, [7] = 1}, local[16] = {[15] = 1}, v4[16], other[16];
    struct kh_budget *budget;
    struct kh_client *clients[6];

    (void)state;
    address(v4, 1);
    address(other, 2);
    assert_int_equal(kh_budget_create(MIB, &budget), 0);
    clients[0] = kh_budget_join(budget, a);
    clients[1] = kh_budget_join(budget, b);
    clients[2] = kh_budget_join(budget, c);
    clients[3] = kh_budget_join(budget, local);
    clients[4] = kh_budget_join(budget, v4);
    clients[5] = kh_budget_join(budget, other);
    assert_ptr_equal(clients[0], clients[1]);
    assert_int_equal(kh_budget_clients(budget), 5);
    for (size_t i = 0; i < KV_COUNT(clients); i++)
        kh_budget_leave(budget, clients[i]);
    assert_int_equal(kh_budget_clients(budget), 0);
    kh_budget_destroy(budget);
}

static void like_a_list(void **state)
{
    enum { CLIENTS = 40, TOTAL = 1000 };
    struct kh_client *clients[CLIENTS] = {NULL};
    size_t has[CLIENTS] = {0}, used = 0;
    uint64_t seed = unit_seed();
    struct kh_budget *budget;

    (void)state;
    assert_int_equal(kh_budget_create(TOTAL, &budget), 0);
    for (size_t round = 0; round < unit_rounds(20000); round++) {
        unsigned i = (unsigned)unit_below(&seed, CLIENTS);
        size_t n = unit_below(&seed, 200);
        bool fits;

        if (!clients[i]) {
            clients[i] = join(budget, i);
        } else if (unit_below(&seed, 3)) {
            fits = used + n <= TOTAL && has[i] + n <= TOTAL - used - n;
            assert_int_equal(kh_budget_take(budget, clients[i], n), fits);
            has[i] += fits ? n : 0;
            used += fits ? n : 0;
        } else {
            kh_budget_give(budget, clients[i], has[i]);
            used -= has[i];
            has[i] = 0;
            if (unit_below(&seed, 2)) {
                kh_budget_leave(budget, clients[i]);
                clients[i] = NULL;
            }
        }
        assert_int_equal(kh_budget_used(budget), used);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        if (clients[i])
            kh_budget_leave(budget, clients[i]);
    kh_budget_destroy(budget);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_of_what_is_left),
        cmocka_unit_test(who_is_one_client),
        cmocka_unit_test(like_a_list),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
