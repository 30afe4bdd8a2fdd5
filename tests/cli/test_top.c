// SPDX-License-Identifier: Apache-2.0
/* `kvasir top` and the metrics reader, on answers of a kv-indexer and on malformed ones. */
#include "base/unit.h"
#include "cli/client/prom.h"
#include "cli/top/top.h"

static const char WORKERS[] =
    "[{\"instance_id\":7,\"source\":\"zmq\",\"status\":\"active\",\"model_name\":\"m\\u0041\","
    "\"tenant_id\":\"default\",\"block_size\":16,\"endpoints\":{\"0\":\"tcp://h:1\",\"1\":\"tcp://"
    "h:2\"},"
    "\"listeners\":{\"1\":{\"endpoint\":\"tcp://"
    "h:2\",\"status\":\"failed\",\"last_error\":\"no\\u001b[2J\","
    "\"partial\":true,\"partial_reasons\":[\"missed_batches\",\"stale\"]},\"0\":{\"endpoint\":"
    "\"tcp://"
    "h:1\",\"status\":\"active\",\"blocks\":5000,\"partial\":false}}},"
    "{\"model_name\":\"b\",\"listeners\":{\"0\":{\"status\":\"pending\"}},\"instance_id\":3}]";

static const char METRICS[] =
    "# HELP kv_indexer_index_bytes Memory\n"
    "kv_indexer_index_bytes{model=\"mA\",tenant=\"a}\\\"b\"} 2000\n"
    "kv_indexer_index_bytes{model=\"b\",tenant=\"t\"} 24\n"
    "kv_indexer_index_holder_blocks{model=\"mA\",tenant=\"t\"} 100\n"
    "dynamo_kvindexer_workers 2\n"
    "kv_indexer_queries_total{result=\"hit\"} 3\n"
    "kv_indexer_queries_total{result=\"miss\"} 1\n"
    "kv_indexer_stream_last_seq{model=\"mA\",tenant=\"t\",instance=\"7\",dp_rank=\"1\"} 41\n"
    "kv_indexer_stream_blocks_total{model=\"mA\",tenant=\"t\",instance=\"7\",dp_rank=\"0\"} 7e3\n"
    "kv_indexer_stream_gaps_total{model=\"x\",tenant=\"t\",instance=\"99\",dp_rank=\"0\"} 5\n"
    "nonsense\n{\n}{\nx{a=\"1} 2\ny 1e\n";

static struct kv_buf text(const char *s)
{
    struct kv_buf buf = KV_BUF_INIT;

    kv_buf_puts(&buf, s);
    return buf;
}

static void test_read(void **state)
{
    struct kv_buf workers = text(WORKERS), metrics = text(METRICS);
    struct kc_top top = {0};

    (void)state;
    for (int i = 0; i < 2; i++) { /* again into the same */
        assert_int_equal(kc_top_read(&workers, &metrics, &top, NULL), 0);
        assert_int_equal(top.n_rows, 3);
        assert_int_equal(top.rows[0].instance, 3);
        assert_string_equal(top.rows[0].model, "b");
        assert_string_equal(top.rows[0].status, "pending");
        assert_int_equal(top.rows[1].instance, 7);
        assert_int_equal(top.rows[1].rank, 0);
        assert_string_equal(top.rows[1].model, "mA");
        assert_int_equal(top.rows[1].blocks, 5000);
        assert_true(top.rows[1].changes == 7000);
        assert_false(top.rows[1].has_seq);
        assert_int_equal(top.rows[2].rank, 1);
        assert_string_equal(top.rows[2].reasons, "missed_batches,stale");
        assert_true(top.rows[2].has_seq && top.rows[2].last_seq == 41);
        assert_string_equal(top.rows[2].last_error, "no?[2J"); /* no escapes to the terminal */
        assert_true(top.index_bytes == 2024);
        assert_true(top.queries == 4);
        assert_true(top.workers == 2);
    }
    kc_top_fini(&top);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
}

static void test_print(void **state)
{
    struct kv_buf workers = text(WORKERS), metrics = text(METRICS);
    struct kc_top before = {0}, now = {0};
    char *out = NULL;
    size_t len;
    FILE *file = open_memstream(&out, &len);

    (void)state;
    assert_non_null(file);
    assert_int_equal(kc_top_read(&workers, &metrics, &before, NULL), 0);
    assert_int_equal(kc_top_read(&workers, &metrics, &now, NULL), 0);
    before.at_ns = 1;
    now.at_ns = 2000000001;
    now.rows[1].changes += 3000;
    now.queries += 10;
    memset(now.rows[0].model, 'm', sizeof(now.rows[0].model) - 1);
    kc_top_print(&now, &before, "http://x", 2, SIZE_MAX, file);
    fclose(file);
    assert_non_null(strstr(out, "20.2 bytes per holder-block"));
    assert_non_null(strstr(out, "14, 5/s"));
    assert_non_null(strstr(out, " 1500 "));
    assert_non_null(strstr(out, now.rows[0].model)); /* whole: a file has room */
    assert_non_null(strstr(out, "and 1 more"));
    assert_null(strstr(out, "partial"));
    free(out);
    kc_top_fini(&before);
    kc_top_fini(&now);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
}

/* Names come behind numbers, whole where the line has room, else their ends. */
static void test_names(void **state)
{
    static const char named[] =
        "[{\"instance_id\":\"vllm-7b-5d9f4c-b\",\"model_name\":\"m\",\"listeners\":{\"0\":{}}},"
        "{\"instance_id\":9,\"model_name\":\"m\",\"listeners\":{\"0\":{}}},"
        "{\"instance_id\":\"\\u00e4\",\"model_name\":\"m\",\"listeners\":{\"0\":{}}},"
        "{\"instance_id\":\"vllm-7b-5d9f4c-a\",\"model_name\":\"m\",\"listeners\":{\"0\":{}}}]";
    static const char samples[] =
        "kv_indexer_stream_gaps_total{instance=\"vllm-7b-5d9f4c-b\",dp_rank=\"0\"} 5\n"
        "kv_indexer_stream_gaps_total{instance=\"9\",dp_rank=\"0\"} 7\n";
    static const struct {
        size_t columns;
        const char *rows[4];
    } cases[] = {
        {70, {"\n       9 ", "\n..9f4c-a ", "\n..9f4c-b ", "\n       \u00e4 "}},
        {78, {"\n               9 ", "\nvllm-7b-5d9f4c-a ", "\nvllm-7b-5d9f4c-b ", NULL}},
        {140, {"\n               9 ", "\nvllm-7b-5d9f4c-a ", "\nvllm-7b-5d9f4c-b ", NULL}},
    };
    struct kv_buf workers = text(named), metrics = text(samples), json = KV_BUF_INIT;
    struct kc_top top = {0};

    (void)state;
    assert_int_equal(kc_top_read(&workers, &metrics, &top, NULL), 0);
    assert_int_equal(top.n_rows, 4);
    assert_true(top.rows[0].gaps == 7 && top.rows[2].gaps == 5);
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        const char *before = NULL;
        char *out = NULL;
        size_t len;
        FILE *file = open_memstream(&out, &len);

        assert_non_null(file);
        kc_top_print(&top, NULL, "http://x", SIZE_MAX, cases[i].columns, file);
        fclose(file);
        for (size_t k = 0; k < 4 && cases[i].rows[k]; k++) {
            const char *at = strstr(out, cases[i].rows[k]);

            if (!at || at < before)
                fail_msg("%zu columns, %s:\n%s", cases[i].columns, cases[i].rows[k], out);
            before = at;
        }
        free(out);
    }
    kc_top_write_json(&top, NULL, &json);
    assert_non_null(strstr(kv_buf_cstr(&json), "{\"instance_id\":9,"));
    assert_non_null(strstr(kv_buf_cstr(&json), "{\"instance_id\":\"vllm-7b-5d9f4c-a\","));
    kc_top_fini(&top);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
    kv_buf_fini(&json);
}

/* A line of 140 columns has room for 22 characters more of a model's name, and not for all. */
static void test_wide(void **state)
{
    struct kv_buf workers = text(WORKERS), metrics = text(METRICS);
    struct kc_top now = {0};
    char *out = NULL, *line, *rest;
    size_t len;
    FILE *file = open_memstream(&out, &len);

    (void)state;
    assert_non_null(file);
    assert_int_equal(kc_top_read(&workers, &metrics, &now, NULL), 0);
    memset(now.rows[1].model, 'm', sizeof(now.rows[1].model) - 1);
    kc_top_print(&now, NULL, "http://x", SIZE_MAX, 140, file);
    fclose(file);
    assert_non_null(strstr(out, " mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm"));
    for (line = strtok_r(out, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        assert_true(strlen(line) <= 140);
    free(out);
    kc_top_fini(&now);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
}

/* Every line of the narrow table fits 70 columns, also with a long model, error and large numbers. */
static void test_narrow(void **state)
{
    struct kv_buf workers = text(WORKERS), metrics = text(METRICS);
    struct kc_top now = {0};
    char *out = NULL, *line, *rest;
    size_t len;
    FILE *file = open_memstream(&out, &len);

    (void)state;
    assert_non_null(file);
    assert_int_equal(kc_top_read(&workers, &metrics, &now, NULL), 0);
    memset(now.rows[0].model, 'm', sizeof(now.rows[0].model) - 1);
    memset(now.rows[0].last_error, 'e', sizeof(now.rows[0].last_error) - 1);
    strcpy(now.rows[0].reasons, "stale");
    memcpy(now.rows[0].last_error, "no answer: nobody listens there", 31);
    now.rows[1].last_seq = 123456789;
    kc_top_print(&now, NULL, "http://127.0.0.1:8090", SIZE_MAX, 70, file);
    fclose(file);
    assert_non_null(strstr(out, "MISSED"));
    assert_null(strstr(out, "REPLAYED"));
    assert_non_null(
        strstr(out, "\n               partial: stale  no answer: nobody listens there"));
    for (line = strtok_r(out, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        assert_true(strlen(line) <= 70);
    free(out);
    file = open_memstream(&out, &len);
    assert_non_null(file);
    kc_top_print(&now, NULL, "http://127.0.0.1:8090", 1, 70, file); /* the first one takes two */
    fclose(file);
    assert_non_null(strstr(out, "... and 3 more"));
    free(out);
    kc_top_fini(&now);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
}

static void test_json(void **state)
{
    struct kv_buf workers = text(WORKERS), metrics = text(METRICS), out = KV_BUF_INIT;
    struct kc_top before = {0}, now = {0};

    (void)state;
    assert_int_equal(kc_top_read(&workers, &metrics, &before, NULL), 0);
    assert_int_equal(kc_top_read(&workers, &metrics, &now, NULL), 0);
    before.at_ns = 1;
    now.at_ns = 2000000001;
    now.rows[1].changes += 3000;
    kc_top_write_json(&now, &before, &out);
    kv_buf_putc(&out, '\0');
    assert_non_null(strstr((char *)out.data, "\"changes_per_second\":1500"));
    assert_non_null(strstr((char *)out.data, "\"index_holder_blocks\""));
    assert_non_null(strstr((char *)out.data, "]}\n"));
    kv_buf_fini(&out);
    kc_top_fini(&before);
    kc_top_fini(&now);
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
}

static void test_nonsense(void **state)
{
    static const char *const cases[] = {
        "", "{}", "[", "[1]", "[{\"listeners\":3}]", "[{\"instance_id\":-1}]"};
    struct kv_buf none = KV_BUF_INIT;
    struct kc_top top = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kv_buf workers = text(cases[i]);
        struct kv_error error = {0};

        assert_true(kc_top_read(&workers, &none, &top, &error) < 0);
        assert_non_null(strstr(error.text, "/workers"));
        kv_buf_fini(&workers);
    }
    kc_top_fini(&top);
}

static void test_labels(void **state)
{
    static const char line[] = "f{a=\"x\\\\y\",bc=\"1,2=\\\"3\\\"\",d=\"\"} 7 1700000000\n";
    struct kc_sample sample;
    struct kc_prom prom;
    char value[8];

    (void)state;
    kc_prom_init(&prom, line, strlen(line));
    assert_true(kc_prom_next(&prom, &sample));
    assert_true(sample.value == 7);
    assert_true(kc_sample_label(&sample, "a", value, sizeof(value)));
    assert_string_equal(value, "x\\y");
    assert_true(kc_sample_label(&sample, "bc", value, sizeof(value)));
    assert_string_equal(value, "1,2=\"3\"");
    assert_true(kc_sample_label(&sample, "bc", value, 3));
    assert_string_equal(value, "1,");
    assert_true(kc_sample_label(&sample, "d", value, sizeof(value)));
    assert_string_equal(value, "");
    assert_false(kc_sample_label(&sample, "c", value, sizeof(value)));
    assert_false(kc_prom_next(&prom, &sample));
    kc_prom_init(&prom, NULL, 0);
    assert_false(kc_prom_next(&prom, &sample));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),     cmocka_unit_test(test_print),
        cmocka_unit_test(test_names),    cmocka_unit_test(test_wide),
        cmocka_unit_test(test_narrow),   cmocka_unit_test(test_json),
        cmocka_unit_test(test_nonsense), cmocka_unit_test(test_labels),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
