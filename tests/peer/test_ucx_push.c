// SPDX-License-Identifier: Apache-2.0
/* Limits of what one request may ask of an owner's event thread by UCX. */
#define CARRIER ucx
#define CARRIER_REQUIRED KVBM_UCX_REQUIRED
#include "base/unit.h"
#include "carrier_unit.h"
#include "peer/lease/borrow.h"

#ifndef HAS_UCX
#define HAS_UCX 0 /* libkvbm_ucx was built */
#endif
#define NOBODYS_TAG 1234567 /* the reader's node throws its messages away */

static int32_t push(const struct kvbm_lease *lease, const uint32_t *places, uint32_t n)
{
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_reply reply;
    int32_t status;

    kvbm_pushed_write(&body, lease->id, true, NOBODYS_TAG, places, n);
    assert_int_equal(body.error, 0);
    assert_true(kvbm_session_call(lease->session, KVBM_ASK_PUSH, body.data, body.len, -1, soon(),
                                  &reply) >= 0);
    status = reply.status;
    kvbm_reply_fini(&reply);
    kv_buf_fini(&body);
    return status;
}

/* A request names blocks of 2 MiB, or one of them many times: 8 MiB go, as readers ask for. */
static void test_bytes_of_a_request(void **state)
{
    static uint32_t places[KVBM_MAX_ASKED];
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, MIB2);
    struct kvbm_agent *agent = carried_agent("reader", NULL);
    struct reading r = {.n = 4};
    struct kvbm_lease *lease;
    struct lending l;
    uint64_t keys[4];

    (void)state;
    setenv("UCX_TLS", "posix,sysv,self", 1);
    lend_carried(&l, "owner", config);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    open_carried(agent, endpoint_of(l.agent), &r);
    lend_wait_idle(&l);
    for (uint32_t i = 0; i < 4; i++) {
        keys[i] = 1 + i;
        places[i] = i;
    }
    assert_int_equal(kvbm_session_lease(r.session, 1, 0, keys, 4, 60000, soon(), &lease), 0);
    assert_int_equal(push(lease, places, 4), 0);
    assert_int_equal(push(lease, places, 1), 0);
    assert_int_equal(push(lease, places, 5), -EMSGSIZE);
    assert_int_equal(push(lease, places, KVBM_MAX_ASKED), -EMSGSIZE);
    assert_int_equal(push(lease, places, 4), 0); /* the lease is as it was */
    kvbm_lease_release(lease);
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
    kvbm_layout_destroy(r.to);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_of_a_request),
    };

    return begin_with_ucx(HAS_UCX) ? cmocka_run_group_tests(tests, NULL, NULL) : 0;
}
