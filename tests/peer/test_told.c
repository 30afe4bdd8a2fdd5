// SPDX-License-Identifier: Apache-2.0
/* Keys that are gone, of owners with many sets over one registry. */
#include <stdatomic.h>

#include "base/core/le.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "lend_unit.h"
#include "peer/lease/lease_wire.h"

#define SETS 100

static struct {
    struct lending owner;
    struct kvbm_agent *reader;
    atomic_uint told[SETS + 1]; /* keys, by set */
} t;

static void take_gone(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_asked gone;

    (void)arg, (void)session;
    assert_int_equal(kvbm_asked_read(request->body, request->len, 8, &gone), 0);
    assert_true(gone.set <= SETS);
    for (uint32_t i = 0; i < gone.n; i++)
        assert_int_equal(kv_get_le64(gone.keys + (size_t)i * 8), 5);
    atomic_fetch_add(&t.told[gone.set], gone.n);
}

static void begin(void)
{
    const char *endpoint = unix_endpoint();
    const struct kvbm_agent_opts opts = session_opts("owner", &endpoint);

    memset(&t, 0, sizeof(t));
    lend_init(&t.owner, &opts, KVBM_FULLY_CONTIGUOUS, false);
    t.reader = agent_at("reader", NULL);
    assert_int_equal(kvbm_agent_serve(t.reader, KVBM_TELL_GONE, take_gone, NULL), 0);
}

static struct kvbm_blockset *export_as(uint32_t id)
{
    const struct kvbm_block_source source = kvbm_pool_source(t.owner.pool);
    const struct kvbm_blockset_opts opts = {
        .size = sizeof(opts), .id = id, .layout = t.owner.layout, .source = &source};
    struct kvbm_blockset *set = NULL;

    assert_int_equal(kvbm_blockset_export(t.owner.agent, &opts, &set), 0);
    return set;
}

static void look(struct kvbm_session *session, uint32_t set)
{
    const uint64_t key = 5;
    uint8_t tier;

    assert_int_equal(kvbm_session_lookup(session, set, 0, &key, 1, soon(), &tier), 0);
    assert_int_equal(tier, KV_TIER_HOST);
}

/* However many sets there have been, the last ones tell, and the program has types for itself. */
static void test_many_sets(void **state)
{
    struct kvbm_session *session;
    struct kvbm_blockset *last;
    const uint64_t key = 5;
    uint32_t type;

    (void)state;
    begin();
    for (uint32_t id = 2; id < SETS; id++)
        kvbm_blockset_destroy(export_as(id));
    last = export_as(SETS);
    assert_int_equal(kvbm_attachment_type(t.owner.registry, "mine", false, NULL, &type), 0);
    session = open_session(t.reader, t.owner.agent, 0);
    look(session, 1);
    look(session, SETS);
    assert_int_equal(kvbm_pool_reset_keys(t.owner.pool, 0, &key, 1, NULL), 0);
    wait_until(t.told[1] && t.told[SETS]);
    assert_int_equal(t.told[1], 1);
    assert_int_equal(t.told[SETS], 1);
    assert_int_equal(kvbm_session_close(session), 0);
    kvbm_blockset_destroy(last);
    lend_fini(&t.owner);
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_sets),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
