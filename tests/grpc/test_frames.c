// SPDX-License-Identifier: Apache-2.0
/* Messages cut at any byte come out as they went in; broken ones are refused; timeouts are read. */
#include "grpc/frames.h"

#include "grpc/impl.h"
#include "support.h"

#define MAX_MESSAGES 64

struct got {
    size_t n, lens[MAX_MESSAGES];
    uint64_t sums[MAX_MESSAGES];
    size_t stop_after; /* 0: never */
};

static uint64_t sum_of(const void *data, size_t len)
{
    const uint8_t *p = data;
    uint64_t sum = len;

    for (size_t i = 0; i < len; i++)
        sum = sum * 1099511628211U + p[i];
    return sum;
}

static bool take(void *arg, const void *data, size_t len)
{
    struct got *got = arg;

    assert_true(got->n < MAX_MESSAGES);
    got->lens[got->n] = len;
    got->sums[got->n++] = sum_of(data, len);
    return got->n != got->stop_after;
}

static void test_cut_anywhere(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(300); round++) {
        struct kg_frames frames = {.max = 1 << 20};
        struct kv_buf wire = KV_BUF_INIT;
        struct got wanted = {0}, got = {0};
        size_t n = 1 + unit_random(&seed) % 8;

        for (size_t i = 0; i < n; i++) {
            static const size_t lens[] = {0, 1, 5, 100, 3000, 100000};
            size_t len = lens[unit_random(&seed) % 6];
            uint8_t head[KG_HEAD];

            kg_frame_head(head, (uint32_t)len);
            kv_buf_append(&wire, head, sizeof(head));
            size_t at = wire.len;

            for (size_t k = 0; k < len; k++)
                kv_buf_putc(&wire, (char)(unit_random(&seed) & 0xFF));
            take(&wanted, wire.data + at, len);
        }
        for (size_t at = 0; at < wire.len;) {
            size_t some = 1 + unit_random(&seed) % (round % 2 ? 7 : 70000);

            some = KV_MIN(some, wire.len - at);
            /* A copy of exact size: the sanitizer sees reads beyond it. */
            char *piece = malloc(some);

            memcpy(piece, wire.data + at, some);
            assert_int_equal(kg_frames_feed(&frames, piece, some, take, &got), 0);
            free(piece);
            at += some;
        }
        assert_true(kg_frames_whole(&frames));
        assert_memory_equal(&got, &wanted, sizeof(got));
        kv_buf_fini(&frames.body);
        kv_buf_fini(&wire);
    }
}

static void test_refused(void **state)
{
    struct got got = {.stop_after = 1};
    struct kg_frames frames = {.max = 10};

    (void)state;
    assert_int_equal(kg_frames_feed(&frames,
                                    "\0\0\0\0\x0a"
                                    "0123456789",
                                    15, take, &got),
                     0);
    assert_int_equal(got.n, 1);
    assert_int_equal(kg_frames_feed(&frames, "\0\0\0\0", 4, take, &got), 0);
    assert_false(kg_frames_whole(&frames));
    assert_int_equal(kg_frames_feed(&frames, "\x0b", 1, take, &got), -EMSGSIZE);
    frames = (struct kg_frames){.max = 10};
    assert_int_equal(kg_frames_feed(&frames, "\1\0\0\0\0", 5, take, &got), -EPROTO);
    frames = (struct kg_frames){.max = SIZE_MAX};
    assert_int_equal(kg_frames_feed(&frames, "\0\xff\xff\xff\xff", 5, take, &got), 0);
    assert_int_equal(frames.want, UINT32_MAX);
    assert_int_equal(frames.body.capacity, 0); /* nothing is kept for what hasn't come */
}

/* The receiver takes no more: what follows isn't handed out. */
static void test_stopped(void **state)
{
    struct got got = {.stop_after = 1};
    struct kg_frames frames = {.max = 10};

    (void)state;
    assert_int_equal(kg_frames_feed(&frames, "\0\0\0\0\0\0\0\0\0\0", 10, take, &got), 0);
    assert_int_equal(got.n, 1);
}

static void test_timeouts(void **state)
{
    static const struct {
        const char *text;
        uint64_t ns;
    } cases[] = {{"1H", 3600000000000U},
                 {"2M", 120000000000U},
                 {"3S", 3000000000U},
                 {"100m", 100000000U},
                 {"99999999u", 99999999000U},
                 {"7n", 7},
                 {"0S", 0},
                 {"99999999H", 359999996400000000U * 1000U},
                 {"", UINT64_MAX},
                 {"S", UINT64_MAX},
                 {"1", UINT64_MAX},
                 {"1s", UINT64_MAX},
                 {"-1S", UINT64_MAX},
                 {"1.5S", UINT64_MAX},
                 {"123456789S", UINT64_MAX}};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        uint64_t ns = kg_timeout_parse(cases[i].text, strlen(cases[i].text));

        if (strcmp(cases[i].text, "99999999H") == 0)
            assert_true(ns == UINT64_MAX || ns > UINT64_C(1) << 60); /* beyond what is counted */
        else
            assert_true(ns == cases[i].ns);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_timeouts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
