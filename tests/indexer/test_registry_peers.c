// SPDX-License-Identifier: Apache-2.0
/* Registrations shared among three replicas in random order, beside a map in which the last change wins. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "indexer/registry/registry.h"
#include "indexer/registry/tables.h"
#include "indexer/stream/listener.h"

#define N 3
#define RANKS 6
#define MANY 4300 /* registrations of a large fleet */

static uint64_t random_state;

static uint64_t draw(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

static struct ki_registration registration(uint32_t rank, int port)
{
    static char endpoint[32];

    snprintf(endpoint, sizeof(endpoint), "tcp://127.0.0.1:%d", port);
    return (struct ki_registration){.instance = 1,
                                    .rank = rank,
                                    .block_size = 4,
                                    .endpoint = endpoint,
                                    .model = "m",
                                    .tenant = "default"};
}

/* @to hears all that @from knows. */
static void tell(struct ki_registry *from, struct ki_registry *to)
{
    struct ki_removed *removed;
    struct ki_worker_info *infos;
    struct kv_error error;
    long n = ki_registry_workers(from, &infos);

    assert_true(n >= 0);
    for (long i = 0; i < n; i++) {
        struct ki_registration reg = {.instance = infos[i].instance,
                                      .rank = infos[i].rank,
                                      .block_size = infos[i].block_size,
                                      .endpoint = infos[i].endpoint,
                                      .model = infos[i].model,
                                      .tenant = infos[i].tenant,
                                      .version = infos[i].version,
                                      .by_peer = true};

        assert_int_equal(ki_registry_merge(to, &reg, &error), 0);
    }
    ki_worker_infos_free(infos, n);
    n = ki_registry_removed(from, &removed);
    assert_true(n >= 0);
    for (long i = 0; i < n; i++)
        ki_registry_merge_removed(to, removed[i].instance, removed[i].rank, removed[i].version);
    free(removed);
}

/* The port that @r follows @rank at; 0: it isn't registered. */
static int port_of(struct ki_registry *r, uint32_t rank)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(r, &infos);
    int port = 0;

    for (long i = 0; i < n; i++)
        if (infos[i].rank == rank)
            port = atoi(strrchr(infos[i].endpoint, ':') + 1);
    ki_worker_infos_free(infos, n);
    return port;
}

static void change(struct ki_registry *r, uint32_t rank, int *truth)
{
    struct kv_error error;
    int port = 1 + (int)draw(4);
    struct ki_registration reg = registration(rank, port);

    if (draw(2)) {
        if (ki_registry_register(r, &reg, &error) == 0)
            *truth = port;
    } else if (port_of(r, rank) &&
               ki_registry_unregister(r, 1, "m", "default", &rank, &error) == 0) {
        *truth = 0;
    }
    nanosleep(&(struct timespec){.tv_nsec = 2000}, NULL); /* versions are microseconds */
}

static void the_last_change_wins(void **state)
{
    const char *seed = getenv("KV_TEST_SEED");
    struct ki_registry_opts opts = {.threads = 1, .max_registrations = 64};
    struct ki_registry *r[N];
    int truth[RANKS] = {0};

    (void)state;
    random_state = seed ? strtoull(seed, NULL, 10) : 20261122;
    print_message("seed %" PRIu64 "\n", random_state);
    for (int i = 0; i < N; i++)
        assert_int_equal(ki_registry_create(&opts, &r[i]), 0);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 20; i++) {
            uint32_t rank = (uint32_t)draw(RANKS);

            if (draw(2))
                change(r[draw(N)], rank, &truth[rank]);
            else
                tell(r[draw(N)], r[draw(N)]);
        }
        /* In a ring, twice around: also what only a neighbour's neighbour did. */
        for (int i = 0; i < 2 * N; i++)
            tell(r[i % N], r[(i + 1) % N]);
        for (int i = 0; i < N; i++)
            for (uint32_t rank = 0; rank < RANKS; rank++)
                assert_int_equal(port_of(r[i], rank), truth[rank]);
    }
    for (int i = 0; i < N; i++)
        ki_registry_destroy(r[i]);
}

static void odd_versions(void **state)
{
    struct ki_registry_opts opts = {.threads = 1, .max_registrations = 64};
    struct ki_registration reg = registration(0, 1);
    uint64_t now = kv_wall_ns() / 1000;
    struct kv_error error;
    struct ki_registry *r;

    (void)state;
    assert_int_equal(ki_registry_create(&opts, &r), 0);
    /* From the far future: it could never be changed again. */
    reg.version = UINT64_MAX;
    assert_int_equal(ki_registry_merge(r, &reg, &error), -EAGAIN);
    ki_registry_merge_removed(r, 1, 0, UINT64_MAX);
    /* A little ahead: what is done here afterwards is newer all the same. */
    reg.version = now + 3600u * 1000000;
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_int_equal(ki_registry_unregister(r, 1, "m", NULL, NULL, &error), 0);
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_int_equal(port_of(r, 0), 0);
    /* Configured: a peer's news are newer. */
    reg.version = 1;
    reg.rank = 1;
    assert_int_equal(ki_registry_register(r, &reg, &error), 0);
    ki_registry_merge_removed(r, 1, 1, now);
    assert_int_equal(port_of(r, 1), 0);
    /* Removed longer ago than anybody remembers. */
    reg.rank = 2;
    reg.version = 0;
    assert_int_equal(ki_registry_register(r, &reg, &error), 0);
    ki_registry_merge_removed(r, 1, 3, now - UINT64_C(7200) * 1000000);
    reg.rank = 3;
    reg.version = now - UINT64_C(7300) * 1000000;
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_int_equal(port_of(r, 3), 1);
    /* The rules of admission hold for peers' workers, too. */
    reg.endpoint = "inproc://monitor-1";
    reg.version = now;
    reg.rank = 4;
    assert_int_equal(ki_registry_merge(r, &reg, &error), -EINVAL);
    ki_registry_destroy(r);
}

/* A mode that the stream has shown is no part of its registration: the same one again changes nothing. */
static void learned_modes_are_not_registered(void **state)
{
    struct ki_registry_opts opts = {.threads = 1, .max_registrations = 64};
    struct ki_registration reg = registration(0, 1);
    uint64_t now = kv_wall_ns() / 1000;
    struct ki_worker_info *infos;
    struct ki_listener *l;
    struct kv_error error;
    struct ki_registry *r;

    (void)state;
    assert_int_equal(ki_registry_create(&opts, &r), 0);
    reg.version = now;
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    l = ki_listener_find(r, 1, 0);
    assert_non_null(l);
    pthread_mutex_lock(&l->lock);
    l->applier.reports.seen = true;
    assert_int_equal(ki_applier_learned_mode(&l->applier), KI_REPORTS_FULL);
    ki_applier_contradicted(&l->applier);
    pthread_mutex_unlock(&l->lock);
    assert_int_equal(ki_registry_workers(r, &infos), 1);
    assert_int_equal(infos[0].habits.report_mode, KI_REPORTS_UNKNOWN);
    assert_int_equal(infos[0].learned_report_mode, KI_REPORTS_INCREMENTAL);
    ki_worker_infos_free(infos, 1);
    reg.version = now + 1;
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_ptr_equal(ki_listener_find(r, 1, 0), l);
    assert_int_equal(ki_applier_learned_mode(&l->applier), KI_REPORTS_INCREMENTAL);
    ki_registry_destroy(r);
}

/* A whole fleet is unregistered at one replica before the other asks again: none of it comes back. */
static void many_removals_at_once(void **state)
{
    struct ki_registry_opts opts = {.threads = 1, .max_registrations = MANY, .start_held = true};
    struct ki_registration reg = registration(0, 1);
    struct ki_worker_info *infos;
    struct ki_registry *r[2];
    struct kv_error error;

    (void)state;
    reg.endpoint = "ipc:///nobody/listens";
    for (int i = 0; i < 2; i++)
        assert_int_equal(ki_registry_create(&opts, &r[i]), 0);
    for (reg.instance = 1; reg.instance <= MANY; reg.instance++)
        assert_int_equal(ki_registry_register(r[0], &reg, &error), 0);
    tell(r[0], r[1]);
    for (reg.instance = 1; reg.instance <= MANY; reg.instance++)
        assert_int_equal(ki_registry_unregister(r[0], reg.instance, "m", NULL, NULL, &error), 0);
    for (int i = 0; i < 2; i++) {
        tell(r[i], r[1 - i]);
        assert_int_equal(ki_registry_workers(r[i], &infos), 0);
        ki_worker_infos_free(infos, 0);
    }
    assert_int_equal(ki_registry_workers(r[1], &infos), 0);
    ki_worker_infos_free(infos, 0);
    for (int i = 0; i < 2; i++)
        ki_registry_destroy(r[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_change_wins),
        cmocka_unit_test(odd_versions),
        cmocka_unit_test(learned_modes_are_not_registered),
        cmocka_unit_test(many_removals_at_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
