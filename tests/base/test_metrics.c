// SPDX-License-Identifier: Apache-2.0

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/metrics/metrics.h"
#include "base/unit.h"

static const double bounds[] = {0.0001, 0.0002, 1.5};
static const struct kv_metric_def requests = {"x_requests_total",
                                              "Total \\ of\nrequests",
                                              KV_METRIC_COUNTER,
                                              {"endpoint", "method"},
                                              NULL,
                                              0};
static const struct kv_metric_def models = {"x_models", "Models", KV_METRIC_GAUGE, {NULL}, NULL, 0};
static const struct kv_metric_def seconds = {"x_seconds",  "Latency", KV_METRIC_HISTOGRAM,
                                             {"endpoint"}, bounds,    3};
static const struct kv_metric_def lag = {"x_lag", "Lag", KV_METRIC_GAUGE, {"worker"}, NULL, 0};

static void test_exposition(void **state)
{
    struct kv_metrics *metrics;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_metric *r, *m, *h;
    const char *query[] = {"/query", "POST"}, *odd[] = {"a\"b\\c\nd", "GET"};
    const double values[] = {0.0001, 0.00015, 2, 1.5};

    (void)state;
    assert_int_equal(kv_metrics_create(&metrics), 0);
    r = kv_metrics_add(metrics, &requests);
    m = kv_metrics_add(metrics, &models);
    h = kv_metrics_add(metrics, &seconds);
    kv_metrics_render(metrics, &out);
    assert_string_equal(kv_buf_cstr(&out),
                        "# HELP x_models Models\n# TYPE x_models gauge\nx_models 0\n");

    kv_series_add(kv_metric_get(r, query), 2);
    kv_series_add(kv_metric_get(r, query), 1);
    kv_series_add(kv_metric_get(r, odd), 1);
    kv_series_set(kv_metric_get(m, NULL), 2.5);
    for (size_t i = 0; i < 4; i++)
        kv_series_observe(kv_metric_get(h, query), values[i]);
    kv_buf_clear(&out);
    kv_metrics_render(metrics, &out);
    assert_string_equal(kv_buf_cstr(&out),
                        "# HELP x_requests_total Total \\\\ of\\nrequests\n"
                        "# TYPE x_requests_total counter\n"
                        "x_requests_total{endpoint=\"/query\",method=\"POST\"} 3\n"
                        "x_requests_total{endpoint=\"a\\\"b\\\\c\\nd\",method=\"GET\"} 1\n"
                        "# HELP x_models Models\n# TYPE x_models gauge\nx_models 2.5\n"
                        "# HELP x_seconds Latency\n# TYPE x_seconds histogram\n"
                        "x_seconds_bucket{endpoint=\"/query\",le=\"0.0001\"} 1\n"
                        "x_seconds_bucket{endpoint=\"/query\",le=\"0.0002\"} 2\n"
                        "x_seconds_bucket{endpoint=\"/query\",le=\"1.5\"} 3\n"
                        "x_seconds_bucket{endpoint=\"/query\",le=\"+Inf\"} 4\n"
                        "x_seconds_sum{endpoint=\"/query\"} 3.50025\n"
                        "x_seconds_count{endpoint=\"/query\"} 4\n");
    kv_buf_fini(&out);
    kv_metrics_destroy(metrics);
}

static void set_lag(struct kv_metric *lags, int worker, double value)
{
    char name[32];
    const char *labels[] = {name};

    snprintf(name, sizeof(name), "%d", worker);
    kv_series_set(kv_metric_get(lags, labels), value);
}

static const char *rendered(struct kv_metrics *metrics, struct kv_buf *out)
{
    kv_buf_clear(out);
    kv_metrics_render(metrics, out);
    return kv_buf_cstr(out);
}

static void test_reset_and_bound(void **state)
{
    struct kv_metrics *metrics;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_metric *g;
    const char *text;

    (void)state;
    assert_int_equal(kv_metrics_create(&metrics), 0);
    g = kv_metrics_add(metrics, &lag);
    for (int i = 0; i < KV_METRIC_MAX_SERIES + 10; i++)
        set_lag(g, i, i);
    text = rendered(metrics, &out);
    assert_non_null(strstr(text, "x_lag{worker=\"4095\"} 4095\n"));
    assert_null(strstr(text, "x_lag{worker=\"4096\"}"));
    assert_non_null(strstr(text, "x_lag{worker=\"other\"} 4105\n"));

    kv_metric_reset(g);
    set_lag(g, 7, 1);
    text = rendered(metrics, &out);
    assert_non_null(strstr(text, "x_lag{worker=\"7\"} 1\n"));
    assert_null(strstr(text, "worker=\"8\""));
    assert_null(strstr(text, "worker=\"other\""));
    kv_buf_fini(&out);
    kv_metrics_destroy(metrics);
}

/* Workers come and go for ever: the bound is on those alive at once. */
static void test_churn(void **state)
{
    struct kv_metrics *metrics;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_metric *g;

    (void)state;
    assert_int_equal(kv_metrics_create(&metrics), 0);
    g = kv_metrics_add(metrics, &lag);
    for (int scrape = 0; scrape < 300; scrape++) {
        char last[32];

        kv_metric_reset(g);
        for (int i = 0; i < 100; i++) {
            set_lag(g, scrape * 50 + i, i);
            set_lag(g, scrape * 50 + i, i + 1); /* the same one */
        }
        snprintf(last, sizeof(last), "{worker=\"%d\"} 100\n", scrape * 50 + 99);
        assert_non_null(strstr(rendered(metrics, &out), last));
        assert_null(strstr(kv_buf_cstr(&out), "other"));
    }
    assert_true(out.len < 100 * 32);
    kv_metric_reset(g);
    assert_string_equal(rendered(metrics, &out), "");
    kv_buf_fini(&out);
    kv_metrics_destroy(metrics);
}

static void *add_many(void *arg)
{
    struct kv_metric **families = arg;
    const char *value[] = {"/q", "GET"};

    for (int i = 0; i < 20000; i++) {
        kv_series_add(kv_metric_get(families[0], value), 1);
        kv_series_observe(kv_metric_get(families[1], value), 1);
    }
    return NULL;
}

static void test_concurrent_updates(void **state)
{
    struct kv_metrics *metrics;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_metric *families[2];
    pthread_t threads[3];

    (void)state;
    assert_int_equal(kv_metrics_create(&metrics), 0);
    families[0] = kv_metrics_add(metrics, &requests);
    families[1] = kv_metrics_add(metrics, &seconds);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_many, families), 0);
    for (int i = 0; i < 20; i++) {
        kv_buf_clear(&out);
        kv_metrics_render(metrics, &out);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    kv_buf_clear(&out);
    kv_metrics_render(metrics, &out);
    assert_non_null(strstr(kv_buf_cstr(&out), "method=\"GET\"} 60000\n"));
    assert_non_null(strstr(kv_buf_cstr(&out), "x_seconds_sum{endpoint=\"/q\"} 60000\n"));
    kv_buf_fini(&out);
    kv_metrics_destroy(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exposition),
        cmocka_unit_test(test_reset_and_bound),
        cmocka_unit_test(test_churn),
        cmocka_unit_test(test_concurrent_updates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
