// SPDX-License-Identifier: Apache-2.0
/* The client of NATS beside a real server: messages, requests, losses, bounds. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/log.h"
#include "plane/nats_unit.h"

static struct nats_server server;

/* Messages that a subscription has received. */
struct inbox {
    pthread_mutex_t lock;
    size_t n;
    char last[64], subject[64];
    uint64_t sum;
    bool in_order;
    uint64_t next;
    atomic_bool block; /* the callback waits */
    struct kvp_nats *answer_with;
};

static void take(void *arg, const struct kvp_nats_msg *msg)
{
    struct inbox *inbox = arg;
    uint64_t number;

    while (atomic_load(&inbox->block))
        usleep(1000);
    pthread_mutex_lock(&inbox->lock);
    inbox->n++;
    snprintf(inbox->last, sizeof(inbox->last), "%.*s", (int)msg->len, (const char *)msg->data);
    snprintf(inbox->subject, sizeof(inbox->subject), "%s", msg->subject);
    if (msg->len >= sizeof(number)) {
        memcpy(&number, msg->data, sizeof(number));
        inbox->in_order &= number >= inbox->next;
        inbox->next = number + 1;
    }
    pthread_mutex_unlock(&inbox->lock);
    if (inbox->answer_with && msg->reply)
        assert_int_equal(kvp_nats_publish(inbox->answer_with,
                                          &(struct kvp_nats_msg){
                                              .subject = msg->reply, .data = "pong", .len = 4}),
                         0);
}

#define INBOX                                               \
    {                                                       \
        .lock = PTHREAD_MUTEX_INITIALIZER, .in_order = true \
    }

static size_t received(struct inbox *inbox)
{
    size_t n;

    pthread_mutex_lock(&inbox->lock);
    n = inbox->n;
    pthread_mutex_unlock(&inbox->lock);
    return n;
}

static uint64_t next_of(struct inbox *inbox)
{
    uint64_t next;

    pthread_mutex_lock(&inbox->lock);
    next = inbox->next;
    pthread_mutex_unlock(&inbox->lock);
    return next;
}

static int say(struct kvp_nats *nats, const char *subject, const char *text)
{
    return kvp_nats_publish(
        nats, &(struct kvp_nats_msg){.subject = subject, .data = text, .len = strlen(text)});
}

static struct kvp_nats_stats stats_of(struct kvp_nats *nats)
{
    struct kvp_nats_stats stats;

    kvp_nats_get_stats(nats, &stats);
    return stats;
}

static void start(const char *more)
{
    nats_or_skip();
    nats_make(&server, more);
    nats_start(&server);
}

static int stop(void **state)
{
    (void)state;
    nats_end(&server);
    return 0;
}

static void test_publish_and_subscribe(void **state)
{
    struct inbox all = INBOX, one = INBOX;
    struct kvp_nats *nats;
    struct kvp_nats_sub *subs[2];

    (void)state;
    start("");
    nats = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(nats, "a.>", 0, take, &all, &subs[0]), 0);
    assert_int_equal(kvp_nats_subscribe(nats, "a.b", 0, take, &one, &subs[1]), 0);
    assert_int_equal(say(nats, "a.b", "one"), 0);
    assert_int_equal(say(nats, "a.c.d", "two"), 0);
    assert_int_equal(say(nats, "b", "three"), 0);
    assert_int_equal(say(nats, "", "four"), -EINVAL);
    wait_until(received(&all) == 2);
    assert_string_equal(all.last, "two");
    assert_string_equal(all.subject, "a.c.d");
    wait_until(received(&one) == 1);
    assert_string_equal(one.last, "one");
    assert_int_equal(kvp_nats_flush(nats, 10000), 0);
    assert_int_equal(stats_of(nats).published, 3);
    assert_int_equal(stats_of(nats).received, 3);
    assert_int_equal(stats_of(nats).connections, 1);
    assert_int_equal(stats_of(nats).max_payload, 1 << 20);
    assert_non_null(strstr(stats_of(nats).url, "127.0.0.1:"));
    kvp_nats_unsubscribe(subs[1]);
    assert_int_equal(say(nats, "a.b", "five"), 0);
    wait_until(received(&all) == 3);
    assert_int_equal(received(&one), 1);
    kvp_nats_unsubscribe(subs[0]);
    kvp_nats_close(nats, 1000);
}

static void test_requests(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats, *other;
    struct kvp_nats_sub *sub;
    size_t len = 0;
    void *answer = NULL;

    (void)state;
    start("");
    nats = nats_client(&server);
    other = nats_client(&server);
    assert_int_equal(kvp_nats_request(nats, "ask", "ping", 4, 30000, &answer, &len), -ENOENT);
    inbox.answer_with = other;
    assert_int_equal(kvp_nats_subscribe(other, "ask", 0, take, &inbox, &sub), 0);
    assert_int_equal(kvp_nats_flush(other, 30000), 0);
    assert_int_equal(kvp_nats_request(nats, "ask", "ping", 4, 30000, &answer, &len), 0);
    assert_int_equal(len, 4);
    assert_memory_equal(answer, "pong", 4);
    assert_string_equal(inbox.last, "ping");
    free(answer);
    kvp_nats_unsubscribe(sub);

    inbox.answer_with = NULL; /* hears, and doesn't answer */
    assert_int_equal(kvp_nats_subscribe(other, "ask", 0, take, &inbox, &sub), 0);
    assert_int_equal(kvp_nats_flush(other, 30000), 0);
    assert_int_equal(kvp_nats_request(nats, "ask", "ping", 4, 20, &answer, &len), -ETIMEDOUT);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
    kvp_nats_close(other, 0);
}

/* Messages published while there is no server arrive in order when there is one, and subscriptions
 * outlive the loss. */
static void test_restart(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;

    (void)state;
    start("");
    nats = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &inbox, &sub), 0);
    assert_int_equal(say(nats, "a", "before"), 0);
    wait_until(received(&inbox) == 1);
    for (unsigned round = 1; round <= 3; round++) {
        nats_kill(&server);
        wait_until(!nats_connected(nats));
        for (uint64_t i = 0; i < 100; i++)
            assert_int_equal(
                kvp_nats_publish(
                    nats, &(struct kvp_nats_msg){.subject = "a", .data = &i, .len = sizeof(i)}),
                0);
        pthread_mutex_lock(&inbox.lock);
        inbox.next = 0;
        pthread_mutex_unlock(&inbox.lock);
        nats_start(&server);
        wait_until(received(&inbox) == 1 + round * 100);
        assert_true(inbox.in_order);
        assert_int_equal(stats_of(nats).connections, 1 + round);
    }
    assert_int_equal(stats_of(nats).dropped, 0);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* Without a server the queue fills, and no call waits. */
static void test_bounded_queue(void **state)
{
    struct kvp_nats_opts opts = {.size = sizeof(opts),
                                 .url = "nats://127.0.0.1:1",
                                 .queue_bytes = 100000,
                                 .reconnect_ms = 20};
    struct kvp_nats_stats stats;
    struct kvp_nats *nats;
    char text[1000] = "";
    size_t n = 0;
    int err = 0;

    (void)state;
    nats_or_skip();
    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), 0);
    for (; err == 0 && n < 1000; n += err == 0)
        err = kvp_nats_publish(
            nats, &(struct kvp_nats_msg){.subject = "a", .data = text, .len = sizeof(text)});
    assert_int_equal(err, -EAGAIN);
    assert_in_range(n, 80, 100);
    wait_until(*stats_of(nats).error);
    stats = stats_of(nats);
    assert_int_equal(stats.dropped, 1);
    assert_in_range(stats.queued_bytes, 99000, 100000);
    assert_false(stats.connected);
    assert_int_equal(kvp_nats_flush(nats, 1), -ETIMEDOUT);
    kvp_nats_close(nats, 1);
}

/* Subjects that would be commands to the server are refused: libnats writes them as they are. */
static void test_subjects(void **state)
{
    static const char command[] = "a 0\r\n\r\nPUB b";
    struct inbox inbox = INBOX;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;

    (void)state;
    start("");
    nats = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(nats, "b", 0, take, &inbox, &sub), 0);
    (void)say(nats, command, "injected");
    assert_int_equal(say(nats, "b", "mine"), 0);
    wait_until(received(&inbox) > 0 && strcmp(inbox.last, "mine") == 0);
    assert_int_equal(received(&inbox), 1);
    assert_int_equal(say(nats, command, ""), -EINVAL);
    assert_int_equal(say(nats, "a b", ""), -EINVAL);
    assert_int_equal(say(nats, "a\t", ""), -EINVAL);
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a", .reply = "b c"}),
                     -EINVAL);
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a", .reply = ""}),
                     -EINVAL);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* Messages that the server can't take are refused, and those behind them go on. */
static void test_too_large(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    char *large = calloc(1, 2 << 20);

    (void)state;
    assert_non_null(large);
    start("");
    nats = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &inbox, &sub), 0);
    assert_int_equal(
        kvp_nats_publish(nats,
                         &(struct kvp_nats_msg){.subject = "a", .data = large, .len = 2 << 20}),
        0);
    assert_int_equal(say(nats, "a", "behind"), 0);
    wait_until(received(&inbox) == 1);
    assert_string_equal(inbox.last, "behind");
    assert_int_equal(stats_of(nats).refused, 1);
    assert_non_null(strstr(stats_of(nats).error, "larger"));
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
    free(large);
}

/* A subscriber that is too slow misses messages, which are counted; what it gets is in order. */
static void test_slow_subscriber(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats, *other;
    struct kvp_nats_sub *sub;
    char data[1024] = "";

    (void)state;
    start("");
    nats = nats_client(&server);
    other = nats_client(&server);
    atomic_store(&inbox.block, true);
    assert_int_equal(kvp_nats_subscribe(other, "a", 100 << 10, take, &inbox, &sub), 0);
    assert_int_equal(kvp_nats_flush(other, 30000), 0);
    for (uint64_t i = 0; i < 1000; i++) {
        memcpy(data, &i, sizeof(i));
        assert_int_equal(
            kvp_nats_publish(
                nats, &(struct kvp_nats_msg){.subject = "a", .data = data, .len = sizeof(data)}),
            0);
    }
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    wait_until(stats_of(other).missed > 0);
    assert_int_equal(kvp_nats_flush(other, 30000), 0); /* all has come, or was dropped */
    atomic_store(&inbox.block, false);
    wait_until(received(&inbox) + stats_of(other).missed == 1000);
    assert_true(inbox.in_order);
    kvp_nats_unsubscribe(sub);
    assert_int_equal(stats_of(other).missed + stats_of(other).received, 1000);
    kvp_nats_close(nats, 0);
    kvp_nats_close(other, 0);
}

/* Messages without bytes take memory, too: a subscriber that is too slow for them misses the rest. */
static void test_empty_messages(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;

    (void)state;
    start("");
    nats = nats_client(&server);
    atomic_store(&inbox.block, true);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 8 << 10, take, &inbox, &sub), 0);
    for (unsigned i = 0; i < 1000; i++)
        assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a"}), 0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    wait_until(stats_of(nats).missed > 900);
    atomic_store(&inbox.block, false);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* A server that is frozen holds no publisher up, and when it goes on all that was queued arrives. */
static void test_frozen_server(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats_opts opts = {.size = sizeof(opts), .reconnect_ms = 20, .timeout_ms = 200};
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    size_t n = 0, bytes = 256 << 10;
    char *data = calloc(1, bytes);

    (void)state;
    assert_non_null(data);
    start("");
    opts.url = server.url;
    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), 0);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &inbox, &sub), 0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    unit_freeze(server.pid);
    for (uint64_t i = 0;; i++, n++) { /* until the queue is full: more than any socket takes */
        memcpy(data, &i, sizeof(i));
        if (kvp_nats_publish(
                nats, &(struct kvp_nats_msg){.subject = "a", .data = data, .len = bytes}) < 0)
            break;
    }
    assert_true(n > 200);
    wait_until(!nats_connected(nats)); /* a write has met its deadline */
    assert_int_equal(kill(server.pid, SIGCONT), 0);
    wait_until(next_of(&inbox) == n);
    assert_true(stats_of(nats).connections > 1);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
    free(data);
}

/* A flush that a frozen server doesn't answer is over for the client's thread, too, when its caller goes:
 * what comes next (also the end) doesn't wait until the server is given up, after 15 s. */
static void test_flush_of_a_frozen_server(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats_opts opts = {.size = sizeof(opts), .reconnect_ms = 20, .timeout_ms = 3600000};
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;

    (void)state;
    start("");
    opts.url = server.url;
    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), 0);
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &inbox, &sub), 0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    unit_freeze(server.pid);
    assert_int_equal(say(nats, "a", "one"), 0);
    assert_int_equal(kvp_nats_flush(nats, 10), -ETIMEDOUT);
    kvp_nats_unsubscribe(sub);
    assert_true(nats_connected(nats));
    assert_int_equal(kvp_nats_subscribe(nats, "a", 0, take, &inbox, &sub), 0);
    assert_int_equal(kill(server.pid, SIGCONT), 0);
    assert_int_equal(say(nats, "a", "two"), 0); /* goes out as if nothing had been */
    wait_until(received(&inbox) == 1);
    assert_string_equal(inbox.last, "two");
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    assert_int_equal(stats_of(nats).connections, 1);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* ---- streams ---- */

/* A message of one id is in the stream once, however often it was published; it waits for a stream. */
static void test_jetstream(void **state)
{
    struct kvp_nats *nats;

    (void)state;
    nats_or_skip();
    nats_make_streams(&server);
    nats_start(&server);
    nats = nats_client(&server);
    for (unsigned i = 0; i < 5; i++)
        assert_int_equal(
            kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "k.a",
                                                          .data = "x",
                                                          .len = 1,
                                                          .id = i < 3 ? "same" : "other"}),
            0);
    wait_until(strstr(stats_of(nats).error, "no JetStream stream"));
    assert_int_equal(stats_of(nats).published, 0);
    {
        struct kvp_nats *admin = nats_client(&server);

        nats_ask_stream(admin, "CREATE", "{\"name\":\"EVENTS\",\"subjects\":[\"k.>\"]}",
                        "\"created\"");
        assert_int_equal(kvp_nats_flush(nats, 30000), 0);
        assert_int_equal(stats_of(nats).published, 5);
        nats_ask_stream(admin, "INFO", "", "\"messages\":2,");
        nats_kill(&server); /* a stream outlives its server */
        nats_start(&server);
        assert_int_equal(
            kvp_nats_publish(
                nats,
                &(struct kvp_nats_msg){.subject = "k.a", .data = "y", .len = 1, .id = "third"}),
            0);
        assert_int_equal(kvp_nats_flush(nats, 30000), 0);
        nats_ask_stream(admin, "INFO", "", "\"messages\":3,");
        kvp_nats_close(admin, 0);
    }
    kvp_nats_close(nats, 0);
}

/* A stream refuses a message for good: that one is left out, the connection stays, what comes behind goes on. */
static void test_refused_by_a_stream(void **state)
{
    static const char large[1000];
    struct kvp_nats *nats;

    (void)state;
    nats_or_skip();
    nats_make_streams(&server);
    nats_start(&server);
    nats = nats_client(&server);
    nats_ask_stream(nats, "CREATE",
                    "{\"name\":\"EVENTS\",\"subjects\":[\"k.>\"],\"max_msg_size\":100}",
                    "\"created\"");
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "k.a",
                                                                   .data = large,
                                                                   .len = sizeof(large),
                                                                   .id = "1"}),
                     0);
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "k.a", .id = "2"}),
                     0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    assert_int_equal(stats_of(nats).refused, 1);
    assert_int_equal(stats_of(nats).published, 2); /* the request was one */
    assert_int_equal(stats_of(nats).connections, 1);
    nats_ask_stream(nats, "INFO", "", "\"messages\":1,");
    kvp_nats_close(nats, 0);
}

/* libnats ignores SIGPIPE for the whole process; the client gives the program's handler back. */
static void on_pipe(int signal)
{
    (void)signal;
}

static void test_signals(void **state)
{
    struct sigaction mine = {.sa_handler = on_pipe}, now;
    struct kvp_nats *nats;

    (void)state;
    assert_int_equal(sigaction(SIGPIPE, &mine, NULL), 0);
    start("");
    nats = nats_client(&server);
    wait_until(nats_connected(nats));
    assert_int_equal(sigaction(SIGPIPE, NULL, &now), 0);
    assert_true(now.sa_handler == on_pipe);
    kvp_nats_close(nats, 0);
}

static void refuses(struct kvp_nats_opts opts)
{
    struct kvp_nats *nats;

    opts.size = sizeof(opts);
    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), -EINVAL);
}

static void test_options(void **state)
{
    (void)state;
    kv_log_set_level(KV_LOG_ERROR - 1);
    refuses((struct kvp_nats_opts){.url = NULL});
    refuses((struct kvp_nats_opts){.url = "http://a:1"});
    refuses((struct kvp_nats_opts){.url = "nats://a:1,b:2"});
    refuses((struct kvp_nats_opts){.url = "nats://a:1,"});
    refuses((struct kvp_nats_opts){.url = "nats://a:1", .user = "u"});
    refuses((struct kvp_nats_opts){.url = "nats://a:1", .password = "p"});
    refuses((struct kvp_nats_opts){.url = "nats://a:1", .token = "t", .creds_file = "f"});
    refuses((struct kvp_nats_opts){
        .url = "nats://a:1", .user = "u", .password = "p", .nkey_file = "f"});
    refuses((struct kvp_nats_opts){.url = "tls://a:1", .tls_cert = "c"});
    kv_log_set_level(KV_LOG_WARN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_signals, stop), /* first: libnats is opened once */
        cmocka_unit_test_teardown(test_publish_and_subscribe, stop),
        cmocka_unit_test_teardown(test_requests, stop),
        cmocka_unit_test_teardown(test_restart, stop),
        cmocka_unit_test(test_bounded_queue),
        cmocka_unit_test_teardown(test_subjects, stop),
        cmocka_unit_test_teardown(test_too_large, stop),
        cmocka_unit_test_teardown(test_slow_subscriber, stop),
        cmocka_unit_test_teardown(test_empty_messages, stop),
        cmocka_unit_test_teardown(test_frozen_server, stop),
        cmocka_unit_test_teardown(test_flush_of_a_frozen_server, stop),
        cmocka_unit_test_teardown(test_jetstream, stop),
        cmocka_unit_test_teardown(test_refused_by_a_stream, stop),
        cmocka_unit_test(test_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
