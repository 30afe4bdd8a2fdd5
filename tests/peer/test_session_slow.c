// SPDX-License-Identifier: Apache-2.0
/*
 * Peers whose chunks come in drips over tcp, or end in the middle: a socket that tells of whole chunks
 * (SO_RCVLOWAT) must keep nothing back.
 */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>

#include "base/core/log.h"
#include "index/random.h"
#include "raw_peer.h"

#define C KVBM_CHUNK_BYTES

static struct raw raw;
static int listener;
/* How the peer is to answer: each request says so, and the peer's thread has a copy of its own. */
static struct how {
    uint32_t last;     /* bytes of the second of two chunks */
    uint32_t drip;     /* most bytes at a time; 0: all */
    uint32_t pause_us; /* between drips */
    uint32_t end_at;   /* closes behind so many bytes of a chunk; 0: doesn't */
} how;
static struct how how_now; /* the peer's thread */

static struct kvbm_session *session;
static struct kvbm_agent *reader;
static pthread_t thread;
static uint8_t got[2 * C];

static uint8_t byte_at(uint32_t i)
{
    return (uint8_t)(i * 7 + i / 256);
}

static void say_drops(const uint8_t *bytes, uint32_t len, struct rng *rng)
{
    for (uint32_t at = 0, n; at < len; at += n) {
        n = how_now.drip ? KV_MIN(1 + rng_below(rng, how_now.drip), len - at) : len;
        raw_bytes(&raw, bytes + at, n);
        if (how_now.drip)
            usleep(how_now.pause_us);
    }
}

/* Send a chunk of the reply. Returns false when the peer ends there. */
static bool say_chunk(uint64_t id, uint32_t offset, uint32_t len, struct rng *rng)
{
    static uint8_t chunk[KVBM_FRAME_BYTES + C];
    const struct kvbm_frame frame = {.type = ECHO,
                                     .flags = KVBM_FRAME_REPLY,
                                     .id = id,
                                     .offset = offset,
                                     .len = len,
                                     .total = C + how_now.last};

    kvbm_frame_write(&frame, chunk);
    for (uint32_t i = 0; i < len; i++)
        chunk[KVBM_FRAME_BYTES + i] = byte_at(offset + i);
    if (!how_now.end_at) {
        say_drops(chunk, KVBM_FRAME_BYTES + len, rng);
        return true;
    }
    say_drops(chunk, how_now.end_at, rng);
    close(raw.fd);
    return false;
}

/* Answer each request with two chunks, and a small frame right behind them. */
static void *peer_main(void *arg)
{
    struct rng rng = {test_seed()};
    int one = 1;

    (void)arg;
    raw.fd = accept(listener, NULL, NULL);
    assert_true(raw.fd >= 0);
    (void)setsockopt(raw.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    raw_welcome(&raw, "slow");
    while (raw_until(&raw, ECHO)) {
        uint64_t id = raw.frame.id;

        assert_int_equal(raw.frame.len, sizeof(how_now));
        memcpy(&how_now, raw.body, sizeof(how_now));
        if (!say_chunk(id, 0, C, &rng) || !say_chunk(id, C, how_now.last, &rng))
            return NULL;
        raw_say(&raw, KVBM_PONG, 0, NULL, 0);
    }
    close(raw.fd);
    return NULL;
}

static void open_slow(uint32_t keepalive_ms)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct kvbm_agent_opts opts = session_opts("reader", NULL);
    struct kvbm_session_opts how_to = {.size = sizeof(how_to),
                                       .timeout_ms = SOON_NS / KV_NS_PER_MS};
    socklen_t len = sizeof(at);
    char endpoint[64];

    if (keepalive_ms)
        opts.keepalive_ms = keepalive_ms;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&at, len), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&at, &len), 0);
    snprintf(endpoint, sizeof(endpoint), "tcp:127.0.0.1:%d", ntohs(at.sin_port));
    reader = agent_of(&opts);
    assert_int_equal(pthread_create(&thread, NULL, peer_main, NULL), 0);
    assert_int_equal(kvbm_session_open(reader, endpoint, &how_to, &session), 0);
}

static void close_slow(void)
{
    assert_int_equal(kvbm_session_close(KV_STEAL(session)), 0);
    pthread_join(thread, NULL);
    close(listener);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
}

static long ask(void)
{
    struct iovec to = {got, C + how.last};

    memset(got, 0, sizeof(got));
    return kvbm_session_call_into(session, ECHO, &how, sizeof(how), &to, 1, soon(), NULL);
}

static void expect_right(void)
{
    uint32_t wrong = 0;

    assert_int_equal(ask(), C + how.last);
    for (uint32_t i = 0; i < C + how.last; i++)
        wrong += got[i] != byte_at(i);
    assert_int_equal(wrong, 0);
}

/* Second chunks of all sizes around those that get a mark, at once and in drips. */
static void test_drips(void **state)
{
    static const uint32_t lasts[] = {1,        4000,           4096 + 24, (16 << 10) - 1, 16 << 10,
                                     20 << 10, (32 << 10) + 1, 200000,    C - 1,          C};
    static const uint32_t drips[] = {0, 100000, 30000, 9000};
    uint64_t began;

    (void)state;
    memset(&how, 0, sizeof(how));
    open_slow(0);
    for (size_t i = 0; i < KV_COUNT(drips); i++) {
        for (size_t j = 0; j < KV_COUNT(lasts); j++) {
            how.drip = drips[i];
            how.last = lasts[j];
            how.pause_us = 100;
            began = kv_now_ns();
            expect_right();
            assert_true(kv_now_ns() - began < SOON_NS / 8); /* before the keepalive looks */
        }
    }
    close_slow();
}

/* A peer that closes amid a chunk is gone at once, not at the deadline. */
static void test_end(void **state)
{
    static const uint32_t ends[] = {1, KVBM_FRAME_BYTES, 5000, 100000, C};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(ends); i++) {
        uint64_t began = kv_now_ns();

        memset(&how, 0, sizeof(how));
        how.last = C;
        how.end_at = ends[i];
        open_slow(0);
        assert_int_equal(ask(), -EPIPE);
        assert_true(kv_now_ns() - began < SOON_NS / 2);
        close_slow();
    }
}

/* A chunk that takes longer than the keepalive is no silence, as long as something comes. */
static void test_slower_than_keepalive(void **state)
{
    (void)state;
    memset(&how, 0, sizeof(how));
    how.last = 1;
    how.drip = 2000;
    how.pause_us = 30000; /* 260 drips of 1000 bytes on average: 8 s */
    open_slow(4000);
    expect_right();
    close_slow();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drips),
        cmocka_unit_test(test_end),
        cmocka_unit_test(test_slower_than_keepalive),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
