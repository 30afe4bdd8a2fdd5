// SPDX-License-Identifier: Apache-2.0
/* Durable consumers of a JetStream stream, beside a real server. */
#include <pthread.h>

#include "plane/nats_unit.h"

static struct nats_server server;

/* Texts that a subscription has received, with a comma behind each. */
struct inbox {
    pthread_mutex_t lock;
    char got[256];
    const char *refuse; /* a text that is to come once more; NULL: none */
};
#define INBOX                              \
    {                                      \
        .lock = PTHREAD_MUTEX_INITIALIZER, \
    }

static void take(void *arg, const struct kvp_nats_msg *msg)
{
    struct inbox *inbox = arg;
    size_t len;

    assert_non_null(msg->again);
    assert_null(msg->reply);
    pthread_mutex_lock(&inbox->lock);
    len = strlen(inbox->got);
    assert_true(len + msg->len + 2 < sizeof(inbox->got));
    snprintf(inbox->got + len, sizeof(inbox->got) - len, "%.*s,", (int)msg->len,
             (const char *)msg->data);
    if (inbox->refuse && strlen(inbox->refuse) == msg->len &&
        !memcmp(inbox->refuse, msg->data, msg->len)) {
        *msg->again = true;
        inbox->refuse = NULL;
    }
    pthread_mutex_unlock(&inbox->lock);
}

static bool has(struct inbox *inbox, const char *texts)
{
    bool equal;

    pthread_mutex_lock(&inbox->lock);
    equal = strcmp(inbox->got, texts) == 0;
    pthread_mutex_unlock(&inbox->lock);
    return equal;
}

static bool ends_in(struct inbox *inbox, const char *texts)
{
    size_t len = strlen(texts), got;
    bool ends;

    pthread_mutex_lock(&inbox->lock);
    got = strlen(inbox->got);
    ends = got >= len && strcmp(inbox->got + got - len, texts) == 0;
    pthread_mutex_unlock(&inbox->lock);
    return ends;
}

static void say(struct kvp_nats *nats, const char *text)
{
    assert_int_equal(kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "k.a",
                                                                   .data = text,
                                                                   .len = strlen(text),
                                                                   .id = text}),
                     0);
}

static struct kvp_nats_sub *subscribe(struct kvp_nats *nats, const char *stream, const char *name,
                                      struct inbox *inbox)
{
    const struct kvp_nats_durable durable = {stream, name};
    struct kvp_nats_sub *sub = NULL;

    assert_int_equal(kvp_nats_subscribe_durable(nats, "k.>", &durable, take, inbox, &sub), 0);
    return sub;
}

static bool reports(struct kvp_nats *nats, const char *text)
{
    struct kvp_nats_stats stats;

    kvp_nats_get_stats(nats, &stats);
    return strstr(stats.error, text) != NULL;
}

static struct kvp_nats *start(void)
{
    struct kvp_nats *nats;

    nats_or_skip();
    nats_make_streams(&server);
    nats_start(&server);
    nats = nats_client(&server);
    nats_ask_stream(nats, "CREATE", "{\"name\":\"EVENTS\",\"subjects\":[\"k.>\"]}", "\"created\"");
    return nats;
}

static int stop(void **state)
{
    (void)state;
    nats_end(&server);
    return 0;
}

/* A durable consumer gets the messages that were published while nobody listened, once for each id, also
 * behind the end of its client and its server. A message that it doesn't take comes again. */
static void test_goes_on(void **state)
{
    struct inbox first = INBOX, second = INBOX, other = INBOX;
    struct kvp_nats *nats = start();
    struct kvp_nats_sub *sub;

    (void)state;
    say(nats, "a");
    say(nats, "a");
    say(nats, "b");
    say(nats, "c");
    first.refuse = "b";
    sub = subscribe(nats, "EVENTS", "D", &first);
    wait_until(has(&first, "a,b,b,c,"));
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0); /* with the last acknowledgement */
    nats = nats_client(&server);
    say(nats, "d");
    sub = subscribe(nats, "EVENTS", "D", &second);
    wait_until(has(&second, "d,"));
    nats_kill(
        &server); /* beside a subscription; it may not have stored the last acknowledgements */
    nats_start(&server);
    say(nats, "e");
    wait_until(ends_in(&second, ",e,"));
    kvp_nats_unsubscribe(sub);
    sub = subscribe(nats, "EVENTS", "E", &other);
    wait_until(has(&other, "a,b,c,d,e,"));
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* One at a time has the messages of a name; another one takes over. */
static void test_one_at_a_time(void **state)
{
    struct inbox first = INBOX, second = INBOX;
    struct kvp_nats *nats = start(), *later = nats_client(&server);
    struct kvp_nats_sub *subs[2];

    (void)state;
    subs[0] = subscribe(nats, "EVENTS", "D", &first);
    say(nats, "a");
    wait_until(has(&first, "a,"));
    subs[1] = subscribe(later, "EVENTS", "D", &second);
    wait_until(reports(later, "another subscriber"));
    say(nats, "b");
    wait_until(has(&first, "a,b,"));
    kvp_nats_unsubscribe(subs[0]);
    kvp_nats_close(nats, 0);
    say(later, "c");
    wait_until(has(&second, "c,"));
    kvp_nats_unsubscribe(subs[1]);
    kvp_nats_close(later, 0);
}

/* A stream that is made later. */
static void test_no_stream(void **state)
{
    static const struct kvp_nats_durable bad[] = {{NULL, "D"},       {"EVENTS", NULL},
                                                  {"EVENTS", "a.b"}, {"EV*NTS", "D"},
                                                  {"", "D"},         {"EVENTS", "a b"}};
    struct inbox inbox = INBOX;
    struct kvp_nats *nats = start();
    struct kvp_nats_sub *sub;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(kvp_nats_subscribe_durable(nats, "k.>", &bad[i], take, &inbox, &sub),
                         -EINVAL);
    nats_ask_stream(nats, "DELETE", "", "\"success\"");
    sub = subscribe(nats, "EVENTS", "D", &inbox);
    wait_until(reports(nats, "no such stream"));
    nats_ask_stream(nats, "CREATE", "{\"name\":\"EVENTS\",\"subjects\":[\"k.>\"]}", "\"created\"");
    say(nats, "a");
    wait_until(has(&inbox, "a,"));
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

/* The stream goes and comes beside a subscription, and its consumer with it: the client makes that anew. */
static void test_stream_made_anew(void **state)
{
    struct inbox inbox = INBOX;
    struct kvp_nats *nats = start(), *other = nats_client(&server);
    struct kvp_nats_sub *sub = subscribe(nats, "EVENTS", "D", &inbox);

    (void)state;
    say(other, "a");
    wait_until(has(&inbox, "a,"));
    nats_ask_stream(other, "DELETE", "", "\"success\"");
    nats_ask_stream(other, "CREATE", "{\"name\":\"EVENTS\",\"subjects\":[\"k.>\"]}", "\"created\"");
    say(other, "b");
    wait_until(has(&inbox, "a,b,"));
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
    kvp_nats_close(other, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_goes_on, stop),
        cmocka_unit_test_teardown(test_one_at_a_time, stop),
        cmocka_unit_test_teardown(test_no_stream, stop),
        cmocka_unit_test_teardown(test_stream_made_anew, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
