// SPDX-License-Identifier: Apache-2.0
/*
 * A storm of loads between hosts with a bad network between them: packets are lost, late, twice,
 * out of order, damaged, and for a while there are none at all. The owner's blocks change meanwhile.
 */
#include "storm.h"

#include <string.h>

#include "base/core/log.h"
#include "cable.h"

#define OWNER_HOST "10.11.12.1"
#define READER_HOST "10.11.12.2"
#define N_READERS 2

struct network {
    struct cable *cable;
    struct cable_faults *faults;
    pid_t owner, readers[N_READERS];
    struct rng rng;
};

/* Returns false, with the reason printed, where no network can be made. */
static bool network_init(struct network *n)
{
    struct cable_end owner, reader;
    int err = cable_end_open(&owner, OWNER_HOST);

    if (!err)
        err = cable_end_open(&reader, READER_HOST);
    if (err) {
        print_message("no network namespaces with TUN devices here: %s\n", strerror(-err));
        return false;
    }
    n->rng.state = test_seed();
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)n->rng.state);
    storm_init();
    storm->host = OWNER_HOST;
    storm->only_tcp = true;
    storm->keepalive_ms = 1000;
    storm->open_ms = 1000;
    storm->owner_net = owner.net;
    storm->reader_net = reader.net;
    n->cable = cable_start(&owner, &reader, n->rng.state);
    assert_non_null(n->cable);
    n->faults = cable_faults(n->cable);
    n->owner = storm_start_owner(&n->rng);
    for (int i = 0; i < N_READERS; i++)
        n->readers[i] = storm_start_reader(i, &n->rng);
    return true;
}

static void set_faults(struct network *n, unsigned lost, unsigned repeated, unsigned damaged,
                       unsigned delay_us)
{
    atomic_store(&n->faults->lost, lost);
    atomic_store(&n->faults->repeated, repeated);
    atomic_store(&n->faults->damaged, damaged);
    atomic_store(&n->faults->delay_us, delay_us);
}

/* Readers get right blocks again. */
static void let_be_right(uint64_t more)
{
    uint64_t from = atomic_load(&storm->sent_right);

    wait_until(atomic_load(&storm->sent_right) >= from + more);
}

/* Cut the cable for a moment: sessions live on. */
static void blink(struct network *n)
{
    atomic_store(&n->faults->cut, true);
    usleep(1000 * (1 + rng_below(&n->rng, 300)));
    atomic_store(&n->faults->cut, false);
}

/* Cut it for longer than the keepalive: the owner takes back what it had leased for 30 s. */
static void part(struct network *n)
{
    atomic_store(&n->faults->cut, true);
    wait_until(atomic_load(&storm->owner_pinned) == 0);
    atomic_store(&n->faults->cut, false);
}

static void worsen(struct network *n)
{
    switch (rng_below(&n->rng, 5)) {
    case 0:
        set_faults(n, 1 + rng_below(&n->rng, 50), 0, 0, 0);
        return;
    case 1:
        set_faults(n, 0, rng_below(&n->rng, 100), 0, 1 + rng_below(&n->rng, 20000));
        return;
    case 2:
        set_faults(n, 0, 0, rng_below(&n->rng, 50), 0);
        return;
    case 3:
        blink(n);
        return;
    default:
        set_faults(n, rng_below(&n->rng, 20), rng_below(&n->rng, 20), rng_below(&n->rng, 20), 3000);
    }
}

static void test_bad_network(void **state)
{
    struct network n;
    uint64_t carried;

    (void)state;
    if (!network_init(&n))
        skip();
    let_be_right(20);
    for (long i = 0; i < test_rounds(12); i++) {
        worsen(&n);
        storm_let_read(5);
        set_faults(&n, 0, 0, 0, 0);
    }
    part(&n);
    carried = cable_carried(n.cable);
    let_be_right(10);
    assert_true(cable_carried(n.cable) > carried);
    storm_kill(n.owner); /* its machine is gone: nothing answers, not even with a reset */
    n.owner = storm_start_owner(&n.rng);
    let_be_right(10);
    storm_end(n.owner, n.readers, N_READERS);
    assert_true(storm->misses > 0);
    assert_true(storm->shared_right == 0);
    storm_fini();
    cable_stop(n.cable);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_network),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
