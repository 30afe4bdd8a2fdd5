// SPDX-License-Identifier: Apache-2.0
/* kvasir events' queue of NATS messages, beside a real server: bounded in memory, not in payload. */
#include "base/unit.h"
#include "cli/events/source_impl.h"
#include "plane/nats_unit.h"

#define QUEUE ((size_t)64 << 20) /* bytes that wait for the command, as source_nats.c has it */
#define N 3000000                /* messages, of which the queue takes fewer */

static struct nats_server server;

static int stop(void **state)
{
    (void)state;
    nats_end(&server);
    return 0;
}

static int count(void *arg, const struct kc_message *message)
{
    size_t *n = arg;

    assert_int_equal(message->n_frames, 2);
    assert_int_equal(message->frames[0].len, 1);
    assert_int_equal(message->frames[1].len, 0);
    ++*n;
    return 0;
}

static uint64_t missed(const struct kc_source *source)
{
    struct kc_source_state now;

    kc_source_state(source, &now);
    return now.missed;
}

/* Messages without bytes take memory, too: nobody takes them out, and the rest is missed. */
static void test_small_messages(void **state)
{
    struct kvp_nats_args args = {.user = NULL};
    struct kv_error error = {0};
    struct kc_source_state now;
    struct kc_source *source;
    struct kvp_nats *nats;
    char url[80];
    size_t n = 0;

    (void)state;
    nats_or_skip();
    nats_make(&server, "");
    nats_start(&server);
    snprintf(url, sizeof(url), "%s/>", server.url);
    assert_int_equal(kc_source_open(url, &args, NULL, &source, &error), 0);
    do
        kc_source_state(source, &now);
    while (!now.connected);
    nats = nats_client(&server);
    for (int i = 1; i <= N && !missed(source); i++) {
        assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "k"}), 0);
        if (i % 10000 == 0) /* no more than libnats keeps */
            assert_int_equal(kvp_nats_flush(nats, 60000), 0);
    }
    wait_until(missed(source) > 0);
    kvp_nats_close(nats, 0);
    nats_kill(&server); /* nothing comes any more */
    do
        kc_source_state(source, &now);
    while (now.connected);
    assert_int_equal(kc_source_run(source, kv_ns_after(kv_now_ns(), 2000), count, &n), 0);
    assert_true(n > 0 && n * 32 <= QUEUE); /* the least that one takes */
    kc_source_close(source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_small_messages, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
