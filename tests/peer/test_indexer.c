// SPDX-License-Identifier: Apache-2.0
/* The client of kv-indexer: what it asks, what it makes of right, wrong, late and missing answers. */
#include "base/core/clock.h"
#include "base/stalls.h"
#include "lying_indexer.h"
#include "peer/directory/indexer.h"
#include "plane/http_abi.h"
#include "support.h"

#define SLACK_MS 2000u /* beside what the machine loses */

static struct lying_indexer server;

static struct kvbm_indexer *open_at(const char *url, uint32_t timeout_ms)
{
    const struct kvbm_indexer_opts opts = {
        .url = url, .model = "a \"model\"", .tenant = "t", .timeout_ms = timeout_ms};
    struct kvbm_indexer *indexer = NULL;

    assert_int_equal(kvbm_indexer_open(&opts, &indexer), 0);
    return indexer;
}

static long ask(struct kvbm_indexer *indexer, struct kvbm_holding *ret, size_t max)
{
    const uint64_t keys[] = {1, UINT64_MAX, 3};

    return kvbm_indexer_ask(indexer, keys, 8, 3, UINT64_MAX, ret, max);
}

static struct kvbm_indexer_stats stats_of(struct kvbm_indexer *indexer)
{
    struct kvbm_indexer_stats stats;

    kvbm_indexer_get_stats(indexer, &stats);
    return stats;
}

/* ---- the wire ---- */

static void test_answers(void **state)
{
    static const struct {
        const char *json;
        long n;
        struct kvbm_holding first;
    } cases[] = {
        {"{\"instances\":{}}", 0, {0}},
        {"{\"scores\":{\"9\":{\"0\":8}},\"instances\":{\"7\":{\"longest_matched\":16}}}",
         1,
         {7, 16}},
        {"{\"instances\":{\"7\":{\"longest_matched\":16},\"8\":{\"gpu\":1,\"longest_matched\":17,"
         "\"dp\":{}}}}",
         2,
         {8, 17}},
        {"{\"instances\":{\"18446744073709551615\":{\"longest_matched\":1}}}", 1, {UINT64_MAX, 1}},
        {"{\"instances\":{\"7\":{\"longest_matched\":0},\"6\":{}}}", 0, {0}},
        {"{\"instances\":{\"7\":{\"longest_matched\":16}},\"instances\":{}}", 0, {0}},
        {"{\"scores\":{}}", -EPROTO, {0}},
        {"{\"instances\":null}", -EPROTO, {0}},
        {"{\"instances\":{\"pod-a\":{\"longest_matched\":16}}}",
         1,
         {UINT64_C(0x8646c1aac08e7b41), 16}},
        {"{\"instances\":{\"07\":{\"longest_matched\":16}}}", -EPROTO, {0}},
        {"{\"instances\":{\"\":{\"longest_matched\":16}}}", -EPROTO, {0}},
        {"{\"instances\":{\"18446744073709551616\":{\"longest_matched\":1}}}", -EPROTO, {0}},
        {"{\"instances\":{\"7\":{\"longest_matched\":-16}}}", -EPROTO, {0}},
        {"{\"instances\":{\"7\":16}}", -EPROTO, {0}},
        {"{\"instances\":{\"7\":{\"longest_matched\":16}}", -EPROTO, {0}},
        {"[]", -EPROTO, {0}},
        {"", -EPROTO, {0}},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kvbm_holding holdings[4];

        assert_int_equal(kvbm_indexer_read(cases[i].json, strlen(cases[i].json), 1, holdings, 4),
                         cases[i].n);
        if (cases[i].n > 0) {
            assert_int_equal(holdings[0].worker, cases[i].first.worker);
            assert_int_equal(holdings[0].tokens, cases[i].first.tokens);
        }
    }
}

/* Of many workers the ones with the longest match; of equal ones others for another salt. */
static void test_order(void **state)
{
    struct kv_buf json = KV_BUF_INIT;
    struct kvbm_holding holdings[8], others[8];
    bool differ = false;

    (void)state;
    kv_buf_puts(&json, "{\"instances\":{");
    for (unsigned i = 0; i < 100; i++)
        kv_buf_printf(&json, "%s\"%u\":{\"longest_matched\":%u}", i ? "," : "", i,
                      i % 10 == 9 ? 32 : i % 7 + 1);
    kv_buf_puts(&json, "}}");
    assert_int_equal(kvbm_indexer_read(json.data, json.len, 1, holdings, 8), 8);
    assert_int_equal(kvbm_indexer_read(json.data, json.len, 2, others, 8), 8);
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(holdings[i].tokens, 32);
        assert_int_equal(holdings[i].worker % 10, 9);
        for (size_t k = 0; k < i; k++)
            assert_true(holdings[k].worker != holdings[i].worker);
        differ = differ || holdings[i].worker != others[i].worker;
    }
    assert_true(differ);
    kv_buf_fini(&json);
}

/* Keys go as their events name them. */
static void test_request(void **state)
{
    static const uint8_t keys[] = {0, 0, 0, 0, 9, 9, 9, 9, 0, 0, 0, 0, 0, 0, 1, 2};
    struct kv_buf out = KV_BUF_INIT;
    uint64_t key = 258;

    (void)state;
    kvbm_indexer_write(&out, "m\n", NULL, keys, 16, 1);
    assert_string_equal(kv_buf_cstr(&out), "{\"model_name\":\"m\\n\",\"sequence_hashes\":[258]}");
    kv_buf_clear(&out);
    kvbm_indexer_write(&out, "m", "t", &key, 8, 1);
    assert_string_equal(kv_buf_cstr(&out),
                        "{\"model_name\":\"m\",\"tenant_id\":\"t\",\"sequence_hashes\":[258]}");
    kv_buf_fini(&out);
}

/* ---- requests ---- */

static void test_asks(void **state)
{
    struct kvbm_indexer *indexer = open_at(server.url, 60000);
    struct kvbm_holding holdings[4];

    (void)state;
    atomic_store(&server.lie, INDEXER_HONEST);
    lying_indexer_set(&server, "{\"instances\":{\"7\":{\"longest_matched\":48},"
                               "\"9\":{\"longest_matched\":16}}}");
    for (int i = 0; i < 5; i++) {
        assert_int_equal(ask(indexer, holdings, 4), 2);
        assert_int_equal(holdings[0].worker, 7);
        assert_int_equal(holdings[1].worker, 9);
    }
    assert_int_equal(lying_indexer_connections(&server), 1); /* it is kept */
    pthread_mutex_lock(&server.lock);
    assert_non_null(strstr(server.request, "POST /query_by_hash HTTP/1.1\r\n"));
    assert_non_null(strstr(server.request,
                           "{\"model_name\":\"a \\\"model\\\"\",\"tenant_id\":\"t\","
                           "\"sequence_hashes\":[1,18446744073709551615,3]}"));
    pthread_mutex_unlock(&server.lock);
    atomic_store(&server.lie, INDEXER_UNKNOWN_MODEL);
    for (int i = 0; i < 5; i++)
        assert_int_equal(ask(indexer, holdings, 4), 0);
    assert_int_equal(stats_of(indexer).failed, 0);
    assert_int_equal(stats_of(indexer).asked, 10);
    kvbm_indexer_close(indexer);
}

static bool take_data(void *arg, unsigned slot, const void *data, size_t len)
{
    (void)arg, (void)slot, (void)data, (void)len;
    return true;
}

static void take_end(void *arg, unsigned slot, unsigned status, const char *why)
{
    (void)slot, (void)why;
    *(unsigned *)arg = status;
}

/* An answer that is there before the client waits: the client doesn't wait for another one. */
static void test_early_answer(void **state)
{
    const struct kvbm_http_abi *abi = kvbm_http_load();
    unsigned status = 0;
    const struct kvbm_http_opts opts = {.data = take_data, .end = take_end, .arg = &status};
    const struct kvbm_http_post post = {
        .url = server.url, .body = "{}", .len = 2, .connect_ms = 60000};
    uint32_t before = atomic_load(&server.n_requests);
    struct kvbm_http *http = NULL;
    uint64_t begun;

    (void)state;
    atomic_store(&server.lie, INDEXER_STATUS);
    assert_int_equal(abi->open(&opts, &http), 0);
    assert_int_equal(abi->post(http, 0, &post), 0);
    while (atomic_load(&server.n_requests) == before)
        abi->poll(http, -1, 0);
    usleep(50000);
    begun = kv_now_ns();
    while (!status)
        abi->poll(http, -1, 60000);
    assert_int_equal(status, 503);
    assert_true(kv_now_ns() - begun < 30 * KV_NS_PER_S);
    abi->close(http);
}

/* Each lie ends at the deadline, as an error; and then the breaker is open until a probe is answered. */
static void test_lies(void **state)
{
    struct kvbm_holding holdings[4];

    (void)state;
    lying_indexer_set(&server, "{\"instances\":{\"7\":{\"longest_matched\":48}}}");
    for (int lie = INDEXER_SILENT; lie < INDEXER_N_LIES; lie++) {
        bool late = lie == INDEXER_SILENT || lie == INDEXER_DRIPS;
        struct kvbm_indexer *indexer = open_at(server.url, late ? 150 : 60000);
        struct stalls stalled = stalls_so_far();
        uint64_t begun = kv_now_ns();

        atomic_store(&server.lie, lie);
        for (int i = 0; i < (late ? 1 : 3); i++)
            assert_int_equal(ask(indexer, holdings, 4), late ? -ETIMEDOUT
                                                        : lie == INDEXER_NOT_JSON ||
                                                                lie == INDEXER_OTHER_JSON ||
                                                                lie == INDEXER_WRONG_TYPES
                                                            ? -EPROTO
                                                            : -EIO);
        assert_true(stalls_lateness(begun + (late ? 150 : 28000) * KV_NS_PER_MS, &stalled) <
                    SLACK_MS * KV_NS_PER_MS);
        assert_true(stats_of(indexer).down);
        assert_int_equal(stats_of(indexer).opened, 1);
        begun = stats_of(indexer).asked;
        assert_int_equal(ask(indexer, holdings, 4), -EHOSTDOWN);
        assert_int_equal(stats_of(indexer).asked, begun);
        if (lie == INDEXER_SILENT) { /* a probe, after a second */
            atomic_store(&server.lie, INDEXER_HONEST);
            wait_until(ask(indexer, holdings, 4) >= 0); /* the first ones may be late, too */
            assert_false(stats_of(indexer).down);
        }
        kvbm_indexer_close(indexer);
    }
}

/* A deadline of the caller before the client's ends the request, and doesn't open the breaker. */
static void test_deadline(void **state)
{
    struct kvbm_indexer *indexer = open_at(server.url, 60000);
    struct stalls stalled = stalls_so_far();
    uint64_t key = 1, begun = kv_now_ns();
    struct kvbm_holding holding;

    (void)state;
    atomic_store(&server.lie, INDEXER_SILENT);
    assert_int_equal(kvbm_indexer_ask(indexer, &key, 8, 1, begun + 50 * KV_NS_PER_MS, &holding, 1),
                     -ETIMEDOUT);
    assert_true(stalls_lateness(begun + 50 * KV_NS_PER_MS, &stalled) < SLACK_MS * KV_NS_PER_MS);
    assert_false(stats_of(indexer).down);
    kvbm_indexer_close(indexer);
}

static struct kvbm_indexer *interrupted;

static void *asks_long(void *arg)
{
    struct kvbm_holding holding;

    *(long *)arg = ask(interrupted, &holding, 1);
    return NULL;
}

static void test_interrupt(void **state)
{
    pthread_t threads[4];
    struct kvbm_holding holding;
    long results[4];

    (void)state;
    atomic_store(&server.lie, INDEXER_SILENT);
    interrupted = open_at(server.url, 60000);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, asks_long, &results[i]), 0);
    wait_until(stats_of(interrupted).asked >= 4);
    assert_int_equal(ask(interrupted, &holding, 1), -EAGAIN);
    kvbm_indexer_interrupt(interrupted, true);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(results[i], -ECANCELED);
    }
    assert_int_equal(ask(interrupted, &holding, 1), -ECANCELED);
    kvbm_indexer_interrupt(interrupted, false);
    atomic_store(&server.lie, INDEXER_HONEST);
    assert_int_equal(ask(interrupted, &holding, 1), 1);
    assert_false(stats_of(interrupted).down);
    assert_int_equal(stats_of(interrupted).failed, 0);
    kvbm_indexer_close(interrupted);
}

/* Nobody listens: refused at once, and not asked any more after three times. */
static void test_nobody(void **state)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t len = sizeof(at);
    struct kvbm_indexer *indexer;
    struct kvbm_holding holding;
    char url[64];

    (void)state;
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0); /* and doesn't listen */
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%u/", ntohs(at.sin_port));
    indexer = open_at(url, 60000);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ask(indexer, &holding, 1), -EIO);
    assert_int_equal(ask(indexer, &holding, 1), -EHOSTDOWN);
    kvbm_indexer_close(indexer);
    close(fd);
}

/* ---- options ---- */

static void test_token(void **state)
{
    char path[] = "/tmp/kvtest-token-XXXXXX";
    int fd = mkstemp(path);
    const struct kvbm_indexer_opts opts = {
        .url = server.url, .model = "m", .token_file = path, .timeout_ms = 60000};
    struct kvbm_indexer *indexer = NULL;
    struct kvbm_holding holding;
    bool told = false;

    (void)state;
    assert_int_equal(kvbm_indexer_open(&opts, &indexer), -EINVAL); /* empty */
    assert_int_equal(write(fd, "secret\nmore\n", 12), 12);
    close(fd);
    assert_int_equal(kvbm_indexer_open(&opts, &indexer), 0);
    unlink(path);
    atomic_store(&server.lie, INDEXER_HONEST);
    /* Again if need be: the server may get to an earlier test's last request behind this one. */
    for (int i = 0; i < 20 && !told; i++) {
        assert_int_equal(ask(indexer, &holding, 1), 1);
        pthread_mutex_lock(&server.lock);
        told = strcasestr(server.request, "authorization: Bearer secret\r\n") != NULL;
        pthread_mutex_unlock(&server.lock);
    }
    assert_true(told);
    kvbm_indexer_close(indexer);
    assert_int_equal(kvbm_indexer_open(&opts, &indexer), -ENOENT);
}

static void test_options(void **state)
{
    static const char *const wrong[] = {
        NULL,           "",           "127.0.0.1:1",   "ftp://127.0.0.1:1", "http://",
        "http://host",  "http://*:1", "http://host:0", "http://host:*",     "http://host:99999",
        "http://h:1/x",
    };
    struct kvbm_indexer_opts opts = {.model = "m"};
    struct kvbm_indexer *indexer = NULL;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(wrong); i++) {
        opts.url = wrong[i];
        assert_int_equal(kvbm_indexer_open(&opts, &indexer), -EINVAL);
    }
    opts = (struct kvbm_indexer_opts){.url = "http://127.0.0.1:1"};
    assert_int_equal(kvbm_indexer_open(&opts, &indexer), -EINVAL);
    opts = (struct kvbm_indexer_opts){.url = "https://[::1]:8443", .model = "m"};
    assert_int_equal(kvbm_indexer_open(&opts, &indexer), 0);
    kvbm_indexer_close(indexer);
    kvbm_indexer_close(NULL);
}

static int begin(void **state)
{
    (void)state;
    lying_indexer_init(&server);
    return 0;
}

static int end(void **state)
{
    (void)state;
    lying_indexer_fini(&server);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers),      cmocka_unit_test(test_order),
        cmocka_unit_test(test_request),      cmocka_unit_test(test_asks),
        cmocka_unit_test(test_lies),         cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_interrupt),    cmocka_unit_test(test_nobody),
        cmocka_unit_test(test_token),        cmocka_unit_test(test_options),
        cmocka_unit_test(test_early_answer),
    };

    stalls_begin();
    return cmocka_run_group_tests(tests, begin, end);
}
