// SPDX-License-Identifier: Apache-2.0
#include "indexer/options.h"

#include "base/unit.h"

#define LIST(text) ((const struct kv_arg_list){{text}, 1})

static int parse(struct ki_options *options, struct kv_error *error, int argc,
                 const char *const *args)
{
    char *argv[32] = {(char *)"kv-indexer"};

    for (int i = 0; i < argc; i++)
        argv[i + 1] = (char *)args[i];
    memset(error, 0, sizeof(*error));
    return ki_options_parse(NULL, argc + 1, argv, options, error);
}
#define PARSE(...)                                                               \
    parse(&options, &error, (int)KV_COUNT(((const char *const[]){__VA_ARGS__})), \
          (const char *const[]){__VA_ARGS__})

static void defaults(void **state)
{
    struct ki_options options;
    struct kv_error error;

    (void)state;
    assert_int_equal(parse(&options, &error, 0, NULL), 0);
    assert_int_equal(options.port, 8090);
    assert_int_equal(options.threads, 4);
    assert_string_equal(options.model_name, "default");
    assert_string_equal(options.tenant_id, "default");
    assert_int_equal(options.workers.n, 0);
    assert_int_equal(options.peers.n, 0);
    assert_int_equal(options.block_size, 0);
    assert_int_equal(options.max_body, 8 << 20);
}

static void every_flag_of_the_original(void **state)
{
    struct ki_options options;
    struct kv_error error;

    (void)state;
    assert_int_equal(PARSE("--port", "9000", "--threads=1", "--block-size", "16", "--workers",
                           "1=tcp://h:5557", "--model-name", "m", "--tenant-id", "t", "--peers",
                           "http://p:1"),
                     0);
    assert_int_equal(options.port, 9000);
    assert_int_equal(options.threads, 1);
    assert_int_equal(options.block_size, 16);
    assert_int_equal(options.workers.n, 1);
    assert_string_equal(options.workers.items[0], "1=tcp://h:5557");
    assert_string_equal(options.model_name, "m");
    assert_string_equal(options.tenant_id, "t");
    assert_string_equal(options.peers.items[0], "http://p:1");
    assert_int_equal(PARSE("--routing-group", "g"), 0);
    assert_string_equal(options.tenant_id, "g");
}

static void combinations_that_make_no_sense(void **state)
{
    struct ki_options options;
    struct kv_error error;

    (void)state;
    assert_int_equal(PARSE("--workers", "1=tcp://h:1"), -EINVAL);
    assert_string_equal(error.text, "--block-size is required when --workers is specified");
    assert_int_equal(PARSE("--workers", ""), 0);
    assert_int_equal(PARSE("--tls-cert", "c"), -EINVAL);
    assert_int_equal(PARSE("--tls-key", "k"), -EINVAL);
    assert_int_equal(PARSE("--insecure", "--auth-token-file", "f"), -EINVAL);
    assert_int_equal(PARSE("--port", "65536"), -EINVAL);
    assert_int_equal(PARSE("--threads", "0"), -EINVAL);
    assert_int_equal(PARSE("--log-format", "xml"), -EINVAL);
    assert_int_equal(PARSE("--model-name", ""), -EINVAL);
    assert_int_equal(PARSE("--model-name", "m\xff"), -EINVAL);
    assert_int_equal(PARSE("--tenant-id", "\xc3"), -EINVAL);
    assert_int_equal(PARSE("--routing-group", "\xc3"), -EINVAL);
    assert_int_equal(PARSE("--workers", "1=ipc:///run/\xff", "--block-size", "4"), -EINVAL);
    assert_int_equal(PARSE("--model-name", "m\xc3\xa9"), 0);
    assert_int_equal(PARSE("extra"), -EINVAL);
}

static void environment(void **state)
{
    struct ki_options options;
    struct kv_error error;

    (void)state;
    setenv("KV_INDEXER_PORT", "7000", 1);
    setenv("KV_INDEXER_IDLE_TIMEOUT", "2s", 1);
    assert_int_equal(parse(&options, &error, 0, NULL), 0);
    assert_int_equal(options.port, 7000);
    assert_int_equal(options.idle_timeout_ms, 2000);
    assert_int_equal(PARSE("--port", "7001"), 0);
    assert_int_equal(options.port, 7001);
    unsetenv("KV_INDEXER_PORT");
    unsetenv("KV_INDEXER_IDLE_TIMEOUT");
}

static void workers(void **state)
{
    struct ki_worker_spec *specs;
    struct kv_error error = {0};

    (void)state;
    assert_int_equal(
        ki_worker_specs_parse(&LIST("1=tcp://host:5557,2:1=tcp://host:5558"), &specs, &error), 2);
    assert_int_equal(specs[0].instance, 1);
    assert_int_equal(specs[0].rank, 0);
    assert_string_equal(specs[0].endpoint, "tcp://host:5557");
    assert_null(specs[0].replay_endpoint);
    assert_int_equal(specs[1].instance, 2);
    assert_int_equal(specs[1].rank, 1);
    assert_string_equal(specs[1].endpoint, "tcp://host:5558");
    ki_worker_specs_free(specs, 2);

    assert_int_equal(
        ki_worker_specs_parse(&LIST(" 18446744073709551615:4294967295=tcp://[::1]:1 ,\n"
                                    "3=ipc:///tmp/a+b+tcp://h:9"),
                              &specs, &error),
        2);
    assert_true(specs[0].instance == UINT64_MAX);
    assert_true(specs[0].rank == UINT32_MAX);
    assert_string_equal(specs[0].endpoint, "tcp://[::1]:1");
    assert_string_equal(specs[1].endpoint, "ipc:///tmp/a+b");
    assert_string_equal(specs[1].replay_endpoint, "tcp://h:9");
    assert_null(specs[0].name);
    ki_worker_specs_free(specs, 2);

    assert_int_equal(ki_worker_specs_parse(&LIST("pod-a=tcp://h:1,pod-a:2=tcp://h:2+tcp://h:3,"
                                                 "host:80:0=tcp://h:4"),
                                           &specs, &error),
                     3);
    assert_string_equal(specs[0].name, "pod-a");
    assert_true(specs[0].instance == UINT64_C(0x8646c1aac08e7b41));
    assert_true(specs[1].instance == specs[0].instance);
    assert_int_equal(specs[1].rank, 2);
    assert_string_equal(specs[2].name, "host:80");
    assert_int_equal(specs[2].rank, 0);
    ki_worker_specs_free(specs, 3);
}

/* Lists add up, of one source; a stronger source replaces them. Anything else is given once. */
static void given_twice(void **state)
{
    struct ki_options options;
    struct ki_worker_spec *specs;
    struct kv_error error;

    (void)state;
    assert_int_equal(PARSE("--block-size", "16", "--workers", "1=tcp://a:1,2=tcp://b:1",
                           "--workers=3=tcp://c:1", "--peers", "http://p:1", "--peers",
                           "http://q:1"),
                     0);
    assert_int_equal(ki_worker_specs_parse(&options.workers, &specs, &error), 3);
    assert_int_equal(specs[2].instance, 3);
    ki_worker_specs_free(specs, 3);
    assert_int_equal(options.peers.n, 2);
    assert_int_equal(PARSE("--port", "1", "--port=2"), -EINVAL);
    assert_string_equal(error.text, "--port: given twice, `1` and `2`: choose one");
    assert_int_equal(PARSE("--insecure", "--insecure"), -EINVAL);
    assert_string_equal(error.text, "--insecure: given twice");
    assert_int_equal(PARSE("--workers", "1=tcp://a:1", "--workers", ""), -EINVAL); /* block size */
    assert_int_equal(PARSE("--workers", "", "--workers", " , "), 0);
}

static void no_workers(void **state)
{
    static const char *const nothing[] = {"", " ", ",", " , ,"};
    struct ki_worker_spec *specs;
    struct kv_error error = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(nothing); i++) {
        assert_int_equal(ki_worker_specs_parse(&LIST(nothing[i]), &specs, &error), 0);
        ki_worker_specs_free(specs, 0);
    }
}

static void bad_workers(void **state)
{
    static const struct {
        const char *text, *message;
    } bad[] = {
        {"1", "expected instance_id"},
        {"1=tcp://h:1,", "expected instance_id"},
        {"1=tcp://h:1,,2=tcp://h:2", "expected instance_id"},
        {"=tcp://h:1", "instance id: a name has 1 to 253 bytes"},
        {"a\tb=tcp://h:1", "instance id: a name is UTF-8 without control characters"},
        {"07=tcp://h:1", "instance id: digits alone are a number"},
        {"18446744073709551616=tcp://h:1", "instance id: digits alone are a number"},
        {"pod:x=tcp://h:1", "dp_rank must be a number"},
        {"1:=tcp://h:1", "dp_rank must be a number"},
        {"1:x=tcp://h:1", "dp_rank must be a number"},
        {"1:4294967296=tcp://h:1", "dp_rank must be a number"},
        {"1=", "invalid ZMQ endpoint"},
        {"1=host:5557", "invalid ZMQ endpoint: missing scheme"},
        {"1=tcp://host", "invalid ZMQ endpoint: missing TCP port"},
        {"1=udp://host:1", "invalid ZMQ endpoint: unsupported scheme"},
        {"1=tcp://h:1+tcp://h", "invalid ZMQ endpoint: missing TCP port"},
    };
    struct ki_worker_spec *specs;
    struct kv_error error;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        memset(&error, 0, sizeof(error));
        if (ki_worker_specs_parse(&LIST(bad[i].text), &specs, &error) != -EINVAL)
            fail_msg("accepted: %s", bad[i].text);
        if (!strstr(error.text, bad[i].message))
            fail_msg("%s: message '%s'", bad[i].text, error.text);
    }
}

static void peers(void **state)
{
    static const char *const bad[] = {"a:1",       "ftp://a:1",  "http://a b",    "http://:1",
                                      "http://?x", "http://a:b", "http://a:65536"};
    struct kv_error error = {0};
    char **urls;

    (void)state;
    assert_int_equal(ki_urls_parse(&LIST(" http://a:1/ ,https://b:2//,"), &urls, &error), 2);
    assert_string_equal(urls[0], "http://a:1");
    assert_string_equal(urls[1], "https://b:2");
    ki_urls_free(urls, 2);
    assert_int_equal(ki_urls_parse(&LIST(""), &urls, &error), 0);
    ki_urls_free(urls, 0);
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        memset(&error, 0, sizeof(error));
        if (ki_urls_parse(&LIST(bad[i]), &urls, &error) != -EINVAL)
            fail_msg("accepted: %s", bad[i]);
        assert_non_null(strstr(error.text, bad[i]));
        assert_non_null(strstr(error.text, "expected http://HOST:PORT or https://HOST:PORT"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(every_flag_of_the_original),
        cmocka_unit_test(combinations_that_make_no_sense),
        cmocka_unit_test(environment),
        cmocka_unit_test(workers),
        cmocka_unit_test(given_twice),
        cmocka_unit_test(no_workers),
        cmocka_unit_test(bad_workers),
        cmocka_unit_test(peers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
