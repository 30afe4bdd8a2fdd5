// SPDX-License-Identifier: Apache-2.0
/* The follower beside publishers that lose, repeat, lie and stop in the middle; the server is real. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/le.h"
#include "plane/follow.h"
#include "plane/nats_unit.h"
#include "plane/record.h"

#define PUBLISHER "kvasir.c.m.t.w"
#define N_KEYS 64

static struct nats_server server;

/* Keys that the follower says the publisher has, and how it learned of them. */
static struct {
    pthread_mutex_t lock;
    bool has[N_KEYS], whole;
    atomic_bool wants; /* publishers are followed */
    atomic_uint n_heard;
    unsigned resets;
} view = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A publisher that does as the test says. */
static struct {
    pthread_mutex_t lock;
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    char reply[64];
    uint64_t request; /* of the last request */
    unsigned n_requests;
    uint64_t incarnation;
} self = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool heard(void *arg, const char *publisher, bool first)
{
    (void)arg, (void)publisher, (void)first;
    view.n_heard++;
    return view.wants;
}

static void reset(void *arg, const char *publisher)
{
    (void)arg;
    assert_string_equal(publisher, PUBLISHER);
    pthread_mutex_lock(&view.lock);
    memset(view.has, 0, sizeof(view.has));
    view.resets++;
    pthread_mutex_unlock(&view.lock);
}

static void record(void *arg, const struct kvp_header *header, const struct kvp_record *r)
{
    (void)arg;
    assert_string_equal(header->publisher, PUBLISHER);
    pthread_mutex_lock(&view.lock);
    view.has[*(const uint8_t *)r->key % N_KEYS] = r->event == KVP_STORE;
    pthread_mutex_unlock(&view.lock);
}

static void whole(void *arg, const char *publisher, bool is)
{
    (void)arg, (void)publisher;
    pthread_mutex_lock(&view.lock);
    view.whole = is;
    pthread_mutex_unlock(&view.lock);
}

static bool is_whole(void)
{
    bool is;

    pthread_mutex_lock(&view.lock);
    is = view.whole;
    pthread_mutex_unlock(&view.lock);
    return is;
}

static bool has(uint8_t key)
{
    bool is;

    pthread_mutex_lock(&view.lock);
    is = view.has[key];
    pthread_mutex_unlock(&view.lock);
    return is;
}

static void on_request(void *arg, const struct kvp_nats_msg *msg)
{
    (void)arg;
    assert_int_equal(msg->len, 8);
    pthread_mutex_lock(&self.lock);
    self.request = kv_get_le64(msg->data);
    self.n_requests++;
    snprintf(self.reply, sizeof(self.reply), "%s", msg->reply);
    pthread_mutex_unlock(&self.lock);
}

static unsigned requests(void)
{
    unsigned n;

    pthread_mutex_lock(&self.lock);
    n = self.n_requests;
    pthread_mutex_unlock(&self.lock);
    return n;
}

/* Send a message with records of the keys in @keys, upper case: stored, lower case: removed. */
static void send_as(const char *publisher, const char *subject, struct kvp_header header,
                    const char *keys)
{
    struct kv_buf out = KV_BUF_INIT;
    uint32_t n = 0;

    header.size = sizeof(header);
    snprintf(header.publisher, sizeof(header.publisher), "%s", publisher);
    header.incarnation = self.incarnation;
    kvp_begin(&out, &header);
    for (; *keys; keys++, n++) {
        bool stored = *keys < 'a';
        uint8_t key[8] = {(uint8_t)((*keys | 32) - 'a')};

        kvp_put(&out, &(struct kvp_record){
                          .event = stored ? KVP_STORE : KVP_REMOVE, .key_len = 8, .key = key});
    }
    assert_int_equal(kvp_end(&out, n), 0);
    assert_int_equal(kvp_nats_publish(self.nats, &(struct kvp_nats_msg){.subject = subject,
                                                                        .data = out.data,
                                                                        .len = out.len}),
                     0);
    kv_buf_fini(&out);
}

static void events(uint64_t sequence, const char *keys)
{
    send_as(PUBLISHER, PUBLISHER, (struct kvp_header){.kind = KVP_EVENTS, .sequence = sequence},
            keys);
}

static void alive(uint64_t sequence)
{
    send_as(PUBLISHER, PUBLISHER, (struct kvp_header){.kind = KVP_ALIVE, .sequence = sequence}, "");
}

static void part_of(uint64_t request, uint64_t number, bool last, uint64_t sequence,
                    const char *keys)
{
    send_as(PUBLISHER, self.reply,
            (struct kvp_header){.kind = KVP_SNAPSHOT,
                                .part = number,
                                .last = last,
                                .request = request,
                                .sequence = sequence},
            keys);
}

/* Send a part of the answer to the last request. */
static void part(uint64_t number, bool last, uint64_t sequence, const char *keys)
{
    uint64_t request;

    pthread_mutex_lock(&self.lock);
    request = self.request;
    pthread_mutex_unlock(&self.lock);
    part_of(request, number, last, sequence, keys);
}

static struct kvp_follow *start(struct kvp_follow_opts opts)
{
    static const struct kvp_follow_ops ops = {
        .heard = heard, .reset = reset, .record = record, .whole = whole};
    struct kvp_nats_opts from = {.size = sizeof(from), .reconnect_ms = 20};
    struct kvp_follow_stats stats;
    struct kvp_follow *follow;

    nats_or_skip();
    nats_make(&server, "");
    nats_start(&server);
    memset(view.has, 0, sizeof(view.has));
    view.whole = false;
    view.wants = true;
    view.n_heard = 0;
    view.resets = self.n_requests = 0;
    self.incarnation = 1;
    self.nats = nats_client(&server);
    assert_int_equal(
        kvp_nats_subscribe(self.nats, "kvasir.*.*.*.*.snapshot", 0, on_request, NULL, &self.sub),
        0);
    assert_int_equal(kvp_nats_flush(self.nats, 30000), 0);
    from.url = server.url;
    opts.server = &from;
    opts.retry_ms = opts.retry_ms ? opts.retry_ms : 20;
    assert_int_equal(kvp_follow_open(&opts, &ops, NULL, &follow), 0);
    do { /* until it has subscribed: it then hears this */
        send_as("kvasir.c", "kvasir.0.0.0.0", (struct kvp_header){.kind = KVP_ALIVE}, "");
        usleep(1000);
        kvp_follow_get_stats(follow, &stats);
    } while (!stats.bad);
    return follow;
}

static struct kvp_follow_stats stats_of(struct kvp_follow *follow)
{
    struct kvp_follow_stats stats;

    kvp_follow_get_stats(follow, &stats);
    return stats;
}

static struct kvp_follow_stats finish(struct kvp_follow *follow)
{
    struct kvp_follow_stats stats;

    kvp_follow_get_stats(follow, &stats);
    kvp_follow_close(follow);
    kvp_nats_unsubscribe(self.sub);
    kvp_nats_close(self.nats, 0);
    nats_end(&server);
    return stats;
}

/* Messages before the snapshot's number are in it, those behind are applied once and in order. */
static void test_snapshot_and_live(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.subject = NULL});
    struct kvp_follow_stats stats;

    (void)state;
    events(5, "A");
    wait_until(requests() == 1);
    events(6, "aB");
    part(0, false, 6, "AC"); /* A is removed by message 6, which comes behind */
    part(1, true, 6, "D");
    wait_until(is_whole() && !has(0) && has(1));
    assert_true(has(2) && has(3));
    events(6, "c"); /* again: not applied */
    events(7, "E");
    wait_until(has(4));
    assert_true(has(2) && is_whole());
    stats = finish(follow);
    assert_int_equal(stats.gaps, 0);
    assert_int_equal(stats.snapshots, 1);
}

/* A gap shows at the next message or ALIVE, and a snapshot closes it. */
static void test_gaps(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.subject = NULL});

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    part(0, true, 0, "A");
    wait_until(is_whole());
    events(1, "B"); /* 0 is missing */
    wait_until(requests() == 2);
    assert_false(is_whole());
    part(0, true, 2, "B");
    wait_until(is_whole());
    assert_true(has(1) && !has(0));
    alive(2);
    events(2, "C");
    wait_until(has(2));
    assert_int_equal(requests(), 2);
    alive(4); /* 3 is missing */
    wait_until(requests() == 3);
    part(0, true, 4, "A");
    wait_until(is_whole());
    assert_true(has(0) && !has(1) && !has(2));
    assert_int_equal(finish(follow).gaps, 2);
}

/* Parts that are lost, repeated, of another request or of another start: the follower asks again. */
static void test_lost_parts(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.subject = NULL});

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    part(0, false, 0, "A");
    part(2, true, 0, "C");   /* 1 is missing */
    while (requests() < 2) { /* at a message, when nothing has come for a while */
        alive(0);
        usleep(5000);
    }
    assert_false(is_whole());
    part_of(1, 0, true, 0, "D"); /* of the first request */
    self.incarnation = 2;
    part(0, true, 0, "D"); /* of another start */
    self.incarnation = 1;
    do { /* again if a late ALIVE made it ask once more */
        part(0, false, 0, "A");
        part(0, false, 0, "B"); /* part 0 twice */
        part(1, true, 0, "C");
        usleep(5000);
    } while (!is_whole());
    assert_true(has(0) && !has(1) && has(2) && !has(3));
    (void)finish(follow);
}

/* Another start of the publisher, in the middle of a snapshot and later. */
static void test_incarnations(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.subject = NULL});

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    part(0, false, 0, "A");
    self.incarnation = 2;
    events(0, "B");
    wait_until(requests() == 2);
    events(1, "D");
    part(0, true, 1, "BC");
    wait_until(is_whole() && has(3));
    assert_true(!has(0) && has(1) && has(2));
    self.incarnation = 3;
    alive(7);
    wait_until(requests() == 3);
    assert_false(is_whole());
    part(0, true, 7, "");
    wait_until(is_whole());
    assert_true(!has(1) && !has(2));
    assert_int_equal(finish(follow).restarts, 2);
}

/* Messages that aren't of the plane, or in another publisher's name, change nothing. */
static void test_lies(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.max_publishers = 1});
    struct kvp_follow_stats before, stats;

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    part(0, true, 0, "A");
    wait_until(is_whole());
    kvp_follow_get_stats(follow, &before);
    assert_int_equal(
        kvp_nats_publish(self.nats,
                         &(struct kvp_nats_msg){.subject = PUBLISHER, .data = "garbage", .len = 7}),
        0);
    send_as(PUBLISHER, "kvasir.c.m.t.x", (struct kvp_header){.kind = KVP_EVENTS}, "a");
    send_as(PUBLISHER, PUBLISHER, (struct kvp_header){.kind = KVP_SNAPSHOT, .last = true}, "a");
    send_as("kvasir.c.m.t.y", "kvasir.c.m.t.y", (struct kvp_header){.kind = KVP_EVENTS}, "a");
    events(0, "B");
    wait_until(has(1));
    assert_true(has(0) && is_whole());
    assert_int_equal(requests(), 1);
    stats = finish(follow);
    assert_int_equal(stats.bad - before.bad, 3);
    assert_int_equal(stats.refused, 1); /* it follows one publisher at most */
}

/* Answer the last request, each time that it is called; return true when the view is whole. */
static bool answered(uint64_t sequence, const char *keys)
{
    if (is_whole())
        return true;
    part(0, true, sequence, keys);
    usleep(5000);
    return is_whole();
}

/* Live messages that don't fit while a snapshot comes leave a gap, which the next snapshot closes. */
static void test_overflow(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.buffer_bytes = 1000});
    struct kvp_follow_stats stats;

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    for (uint64_t i = 0; i < 10; i++)
        events(i, "A");
    do
        kvp_follow_get_stats(follow, &stats);
    while (!stats.overflows);
    part(0, true, 0, "");
    for (uint64_t i = 10; requests() < 2; i++, usleep(5000))
        events(i, "a");
    wait_until(answered(1000000, "B"));
    assert_true(!has(0) && has(1));
    stats = finish(follow);
    assert_int_equal(stats.buffered_bytes, 0);
}

/*
 * A publisher that answers one request after the other, more slowly than the follower asks again: the
 * answer to the first request does, and one to a later request replaces an answer that lacks a part.
 */
static void test_slow_answers(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.subject = NULL});
    uint64_t first;

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    pthread_mutex_lock(&self.lock);
    first = self.request;
    pthread_mutex_unlock(&self.lock);
    while (requests() < 4) {
        alive(0);
        usleep(5000);
    }
    part_of(first, 0, false, 0, "A"); /* part 1 is lost */
    part_of(first + 1, 0, false, 0, "B");
    part_of(first + 1, 1, true, 0, "C");
    wait_until(is_whole());
    assert_true(!has(0) && has(1) && has(2));
    (void)finish(follow);
}

/* A message that found no room, and that nothing behind it shows: the snapshot before it isn't all. */
static void test_overflow_at_the_end(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.buffer_bytes = 1000});
    struct kvp_follow_stats stats;
    unsigned first;

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    events(0, "AAAAAAAAAAAAAAAAAAAA"); /* 20 records of 40 bytes and more */
    do
        kvp_follow_get_stats(follow, &stats);
    while (!stats.overflows);
    first = requests(); /* 2 where the machine was slow: it has asked again by then */
    part(0, true, 0, "");
    wait_until(requests() > first); /* no message has asked for that one */
    assert_false(is_whole());
    wait_until(answered(1, "A"));
    assert_true(has(0));
    (void)finish(follow);
}

/* A publisher that never answers: its messages don't keep the buffer from the others. */
static void test_mute_publisher(void **state)
{
    static const char mute[] = "kvasir.c.m.t.mute";
    struct kvp_follow *follow = start((struct kvp_follow_opts){.buffer_bytes = 1000});
    struct kvp_follow_stats stats = {.buffered_bytes = 0};
    uint64_t n = 0;
    unsigned asked;
    size_t size;

    (void)state;
    do { /* until there is no room for a further one */
        size_t before = stats.buffered_bytes;

        send_as(mute, mute, (struct kvp_header){.kind = KVP_EVENTS, .sequence = n++}, "B");
        do
            kvp_follow_get_stats(follow, &stats);
        while (stats.buffered_bytes == before);
        size = stats.buffered_bytes - before;
    } while (stats.buffered_bytes + size <= 1000);
    assert_int_equal(kvp_nats_flush(self.nats, 30000), 0);
    asked = requests();
    alive(0);
    wait_until(requests() > asked);
    events(0, "A");
    do { /* again if it was the mute one's request */
        part(0, true, 0, "");
        usleep(5000);
    } while (!is_whole());
    assert_true(has(0));
    (void)finish(follow);
}

#define HOUR_MS 3600000

/* A gap behind each snapshot, and snapshots that lack messages: the next request waits for a pause. */
static void test_pauses(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.retry_ms = HOUR_MS});

    (void)state;
    alive(0);
    wait_until(requests() == 1);
    events(1000, "A"); /* the snapshot lacks those before it */
    wait_until(stats_of(follow).buffered_bytes > 0);
    part(0, true, 0, "A");
    wait_until(stats_of(follow).snapshots == 1);
    for (uint64_t i = 1; i <= 200; i++)
        events(2 * i, "A");
    wait_until(view.n_heard == 202);
    assert_int_equal(stats_of(follow).buffered_bytes, 0); /* the next snapshot has all of them */
    part(0, true, 1000, "");                              /* answers no request that counts */
    kvp_follow_forget(follow, PUBLISHER);                 /* known anew, it is asked at once */
    alive(0);
    wait_until(requests() == 2);
    part(0, true, 0, "A");
    wait_until(is_whole());
    alive(1);
    wait_until(!is_whole());
    assert_int_equal(finish(follow).asked, 2);
}

/* Two publishers under one subject, each of which answers: they take turns in vain. */
static void test_twins(void **state)
{
    struct kvp_follow *follow = start((struct kvp_follow_opts){.retry_ms = HOUR_MS});
    struct kvp_follow_stats stats;

    (void)state;
    for (unsigned i = 0; i < 200; i++) {
        self.incarnation = 1 + i % 3;
        alive(0);
        if (requests())
            part(0, true, 0, "A");
    }
    wait_until(stats_of(follow).restarts == 199);
    stats = finish(follow);
    assert_int_equal(stats.asked, 1);
    assert_int_equal(stats.twins, 197);
}

/* Pauses double up to a bound, and spread. */
static void test_length_of_pauses(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (unsigned n = 0; n < 100; n++) {
        uint64_t least = (uint64_t)2000 << KV_MIN(n, 4u);

        for (int i = 0; i < 100; i++)
            assert_in_range(kvp_follow_pause(2000, n, unit_random(&seed)), least, least * 3 / 2);
        assert_int_equal(kvp_follow_pause(2000, n, 0), least);
        assert_int_equal(kvp_follow_pause(2000, n, least / 2), least * 3 / 2);
    }
}

/* Publishers that find no place, or that the owner doesn't want, are left out; a place is given back. */
static void test_places(void **state)
{
    struct kvp_follow *follow =
        start((struct kvp_follow_opts){.max_publishers = 1, .retry_ms = HOUR_MS});
    static const char other[] = "kvasir.c.m.t.other";

    (void)state;
    view.wants = false;
    for (int i = 0; i < 3; i++)
        alive(0);
    wait_until(stats_of(follow).unwanted == 3);
    assert_int_equal(stats_of(follow).publishers, 0);
    view.wants = true;
    send_as(other, other, (struct kvp_header){.kind = KVP_ALIVE}, "");
    wait_until(requests() == 1);
    alive(0);
    wait_until(stats_of(follow).refused == 1);
    kvp_follow_forget(follow, other);
    alive(0);
    wait_until(requests() == 2);
    view.wants = false; /* a known one, too */
    alive(0);
    wait_until(stats_of(follow).publishers == 0);
    assert_int_equal(finish(follow).unwanted, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_snapshot_and_live),
        cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_lost_parts),
        cmocka_unit_test(test_incarnations),
        cmocka_unit_test(test_lies),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_slow_answers),
        cmocka_unit_test(test_overflow_at_the_end),
        cmocka_unit_test(test_mute_publisher),
        cmocka_unit_test(test_pauses),
        cmocka_unit_test(test_twins),
        cmocka_unit_test(test_length_of_pauses),
        cmocka_unit_test(test_places),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
