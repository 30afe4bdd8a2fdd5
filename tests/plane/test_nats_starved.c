// SPDX-License-Identifier: Apache-2.0
/*
 * NATS without memory: a client, a follower and a sink with each allocation refused in turn leave nothing
 * behind. A subscription for which libnats has no memory is made later.
 */
#include <dlfcn.h>
#include <stdatomic.h>

#include "kvbm_events.h"
#include "plane/follow.h"
#include "plane/nats_abi.h"
#include "plane/nats_unit.h"
#include "starve.h"

static struct nats_server server;
static atomic_int to_refuse; /* calls from now on */

#ifdef HAS_NATS
#include <nats/nats.h>

typedef natsStatus subscribe_fn(natsSubscription **sub, natsConnection *connection,
                                const char *subject, natsMsgHandler fn, void *arg);

/* libkv_nats finds this function before that of libnats, since programs come first. */
__attribute__((visibility("default"))) NATS_EXTERN natsStatus
natsConnection_Subscribe(natsSubscription **sub, natsConnection *connection, const char *subject,
                         natsMsgHandler fn, void *arg)
{
    void *library = dlopen(KVP_NATS_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
    subscribe_fn *real;

    assert_non_null(library);
    *(void **)&real = dlsym(library, "natsConnection_Subscribe");
    dlclose(library);
    assert_non_null(real);
    if (atomic_load(&to_refuse) > 0) {
        atomic_fetch_sub(&to_refuse, 1);
        return NATS_NO_MEMORY;
    }
    return real(sub, connection, subject, fn, arg);
}
#endif

static void take(void *arg, const struct kvp_nats_msg *msg)
{
    (void)msg;
    atomic_fetch_add((atomic_uint *)arg, 1);
}

/* Both subscriptions take a message that is published now. */
static bool both_hear(struct kvp_nats *nats, atomic_uint *n)
{
    atomic_store(n, 0);
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a"}), 0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    usleep(1000);
    return atomic_load(n) == 2;
}

static int stop(void **state)
{
    (void)state;
    nats_end(&server);
    return 0;
}

static void test_subscribe(void **state)
{
    struct kvp_nats_sub *subs[2];
    struct kvp_nats_stats stats;
    struct kvp_nats *nats;
    atomic_uint n = 0;

    (void)state;
    nats_or_skip();
    nats_make(&server, "");
    nats_start(&server);
    nats = nats_client(&server);
    atomic_store(&to_refuse, 3);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &n, &subs[0]), 0);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &n, &subs[1]), 0);
    wait_until(atomic_load(&to_refuse) == 0);
    kvp_nats_get_stats(nats, &stats);
    assert_non_null(strstr(stats.error, "memory"));
    wait_until(both_hear(nats, &n));
    kvp_nats_get_stats(nats, &stats);
    assert_int_equal(stats.connections, 1);
    atomic_store(&to_refuse, 1000000); /* one that never gets there can be ended */
    kvp_nats_unsubscribe(subs[0]);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &n, &subs[0]), 0);
    wait_until(atomic_load(&to_refuse) < 1000000);
    kvp_nats_unsubscribe(subs[0]);
    kvp_nats_unsubscribe(subs[1]);
    kvp_nats_close(nats, 0);
}

/* ---- allocations of this thread ---- */

static const struct kvp_nats_opts nowhere = {
    .size = sizeof(nowhere), .url = "nats://127.0.0.1:1", .user = "u", .password = "p"};
static struct kvbm_events *events;

static int make_client(void)
{
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    int err = kvp_nats_open(&nowhere, NULL, NULL, &nats);

    if (err < 0)
        return err;
    err = kvp_nats_subscribe(nats, "a", 0, take, NULL, &sub);
    if (err == 0)
        kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
    return err;
}

static int make_follower(void)
{
    static const struct kvp_follow_ops ops = {.heard = NULL};
    struct kvp_follow_opts opts = {.server = &nowhere};
    struct kvp_follow *follow;
    int err = kvp_follow_open(&opts, &ops, NULL, &follow);

    if (err == 0)
        kvp_follow_close(follow);
    return err;
}

static int make_sink(void)
{
    struct kvbm_nats_opts opts = {.size = sizeof(opts), .server = &nowhere, .worker = "w"};
    int id = kvbm_events_add_nats(events, &opts, NULL);

    return id < 0 ? id : kvbm_events_remove_sink(events, id);
}

static void test_refused(void **state)
{
    static int (*const makes[])(void) = {make_client, make_follower, make_sink};

    (void)state;
    nats_or_skip();
    assert_int_equal(kvbm_events_create(NULL, &events), 0);
    for (size_t i = 0; i < KV_COUNT(makes); i++) {
        long n = 0;
        int rc;

        do {
            starve_at(++n);
            rc = makes[i]();
            assert_int_equal(rc, starved() ? -ENOMEM : 0);
        } while (starved());
        starve_at(0);
        assert_true(n > 5);
    }
    assert_int_equal(kvbm_events_destroy(events), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test_teardown(test_subscribe, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
