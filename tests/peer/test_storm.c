// SPDX-License-Identifier: Apache-2.0
/*
 * A storm of loads from processes that read one owner, which is killed, frozen and started again at
 * random moments on the same endpoints, with other blocks. Readers are frozen and killed, too.
 */
#include "storm.h"

#include <signal.h>
#include <sys/wait.h>

#include "base/core/log.h"

#define MAX_READERS 7

static void run(uint32_t n_readers, long rounds)
{
    struct rng rng = {test_seed()};
    pid_t owner, readers[MAX_READERS];

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    storm_init();
    owner = storm_start_owner(&rng);
    for (uint32_t i = 0; i < n_readers; i++)
        readers[i] = storm_start_reader((int)i, &rng);
    storm_let_read(20);
    for (long i = 0; i < rounds; i++) {
        storm_disturb(&owner, readers, n_readers, true, &rng);
        storm_let_read(10);
    }
    wait_until(atomic_load(&storm->shared_right) && atomic_load(&storm->sent_right));
    storm_kill(readers[0]); /* with whatever it has leased */
    storm_end(owner, readers + 1, (int)n_readers - 1);
    storm_fini();
}

static void test_storm(void **state)
{
    (void)state;
    run(3, test_rounds(20));
}

/* Eight processes. */
static void test_many(void **state)
{
    (void)state;
    run(MAX_READERS, test_rounds(8));
}

/* ---- an owner that is gone or frozen, and its memory ---- */

struct frozen {
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *to;
    pid_t owner;
};

static void frozen_init(struct frozen *f, struct rng *rng)
{
    const struct kvbm_layout_config config = lend_config(KVBM_FULLY_CONTIGUOUS);

    storm_init();
    f->owner = storm_start_owner(rng);
    f->agent = agent_at("reader", NULL);
    f->to = allocate(&config, KVBM_STORAGE_SYSTEM);
    wait_until(open_with(f->agent, storm->unix_endpoint, 0, NULL, &f->session) == 0);
}

static void frozen_fini(struct frozen *f)
{
    assert_int_equal(kvbm_session_close(f->session), 0);
    assert_int_equal(kvbm_agent_destroy(f->agent), 0);
    kvbm_layout_destroy(f->to);
    storm_fini();
}

/* Lease what the owner has now of some keys, for long. */
static struct kvbm_lease *lease_some(struct frozen *f, uint64_t *keys, uint32_t n)
{
    struct kvbm_lease *lease = NULL;
    int err = -ENOENT;

    for (uint64_t end = soon(), first = 1; err == -ENOENT; first = first % STORM_KEYS + 1) {
        assert_true(kv_now_ns() < end);
        for (uint32_t i = 0; i < n; i++)
            keys[i] = first + i;
        err = kvbm_session_lease(f->session, 1, 0, keys, n, 60000, soon(), &lease);
    }
    assert_int_equal(err, 0);
    return lease;
}

static uint32_t there(struct kvbm_lease *lease)
{
    struct kvbm_block_at at;
    uint32_t n = 0;

    for (size_t i = 0; i < kvbm_lease_count(lease); i++)
        n += kvbm_lease_block(lease, i, &at) == 0;
    return n;
}

/* Shared memory is read on, whether its owner is frozen or dead; what is sent is a miss in time. */
static void test_without_the_owner(void **state)
{
    const uint32_t blocks[] = {0, 1, 2, 3};
    struct rng rng = {test_seed()};

    (void)state;
    for (int dead = 0; dead < 2; dead++) {
        struct kvbm_lease_read_opts opts = {.size = sizeof(opts), .to_blocks = blocks};
        uint64_t keys[4], before;
        struct kvbm_lease *lease;
        uint8_t ok[1];
        struct frozen f;

        frozen_init(&f, &rng);
        lease = lease_some(&f, keys, 4);
        assert_true(kvbm_lease_is_shared(lease));
        opts.to = f.to;
        opts.ok = ok;
        opts.n = (uint32_t)kvbm_lease_count(lease);
        if (dead)
            storm_kill(f.owner);
        else
            unit_freeze(f.owner);
        for (int again = 0; again < 3; again++) {
            assert_int_equal(kvbm_lease_read(lease, &opts), there(lease));
            for (uint32_t i = 0; i < opts.n; i++)
                assert_true(!(ok[0] >> i & 1) || lend_holds(f.to, i, keys[i]));
        }
        opts.no_shared = true;
        opts.deadline_ns = kv_now_ns() + 50 * KV_NS_PER_MS;
        before = opts.deadline_ns;
        assert_int_equal(kvbm_lease_read(lease, &opts), 0);
        assert_true(kv_now_ns() < before + SOON_NS / 2); /* the storm looks closer */
        kvbm_lease_release(lease);
        if (!dead)
            storm_kill(f.owner);
        frozen_fini(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_the_owner),
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_many),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
