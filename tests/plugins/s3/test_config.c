// SPDX-License-Identifier: Apache-2.0
/* s3:// URIs and the environment: targets of requests, and refused values. */
#include "../../base/unit.h"

#include "s3/config.h"

static void set_keys(void)
{
    static const char *const others[] = {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL",
                                         "AWS_REGION",          "AWS_DEFAULT_REGION",
                                         "AWS_SESSION_TOKEN",   "AWS_CA_BUNDLE"};

    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        unsetenv(others[i]);
    setenv("AWS_ACCESS_KEY_ID", "id", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "hidden", 1);
}

static void check_place(const char *uri, const char *endpoint, const char *base, const char *root)
{
    struct kv_error why = {0};
    struct s3_config config;
    int error = s3_config_read(uri, &config, &why);

    if (error)
        print_error("%s: %s\n", uri, why.text);
    assert_int_equal(error, 0);
    assert_string_equal(config.endpoint, endpoint);
    assert_string_equal(config.base, base);
    assert_string_equal(config.root, root);
    assert_string_equal(config.host, strstr(endpoint, "://") + 3);
    s3_config_fini(&config);
}

static void places(void **state)
{
    (void)state;
    set_keys();
    check_place("s3://b/p/q", "https://b.s3.us-east-1.amazonaws.com", "/p/q/", "/");
    check_place("s3://b.c/", "https://s3.us-east-1.amazonaws.com", "/b.c/", "/b.c/");
    check_place("s3://b?region=eu-west-1&style=path", "https://s3.eu-west-1.amazonaws.com", "/b/",
                "/b/");
    check_place("s3://b//p q/?endpoint=http://h:9000/", "http://h:9000", "/b/p%20q/", "/b/");
    check_place("s3://b?endpoint=http%3A%2F%2Fh%3A80", "http://h", "/b/", "/b/");
    check_place("s3://b/p?endpoint=https://h:443&style=virtual", "https://b.h", "/p/", "/");
    setenv("AWS_ENDPOINT_URL", "http://one:1", 1);
    setenv("AWS_REGION", "", 1);
    check_place("s3://b", "http://one:1", "/b/", "/b/");
    setenv("AWS_ENDPOINT_URL_S3", "http://two:2", 1);
    check_place("s3://b", "http://two:2", "/b/", "/b/");
}

static void refusals(void **state)
{
    static const char *const bad[] = {"",
                                      "s3:",
                                      "s4://b",
                                      "s3://",
                                      "s3:///p",
                                      "s3://id:hidden@b/p",
                                      "s3://b:9000/p",
                                      "s3://.b",
                                      "s3://b/p/../q",
                                      "s3://b/./",
                                      "s3://b/p//q",
                                      "s3://b?endpoint=h:80",
                                      "s3://b?endpoint=",
                                      "s3://b?endpoint=http://h/path",
                                      "s3://b?endpoint=http://u@h",
                                      "s3://b?endpoint=ftp://h",
                                      "s3://b?style=other",
                                      "s3://b?connections=0",
                                      "s3://b?connections=257",
                                      "s3://b?cacert=",
                                      "s3://b?cacert=/nowhere/ca.pem",
                                      "s3://b?timeout=x",
                                      "s3://b?part=4",
                                      "s3://b?secret=1",
                                      "s3://b?region",
                                      "s3://b?region=a/b",
                                      "s3://b?region=a%0db",
                                      "s3://b?region=a%2",
                                      "s3://b?=x"};

    (void)state;
    set_keys();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct kv_error why = {0};
        struct s3_config config;
        int error = s3_config_read(bad[i], &config, &why);

        if (!error)
            print_error("taken: %s\n", bad[i]);
        assert_int_equal(error, -EINVAL);
        assert_string_not_equal(why.text, "");
        assert_null(strstr(why.text, "hidden"));
    }
}

static void keys_are_needed(void **state)
{
    struct kv_error why = {0};
    struct s3_config config;

    (void)state;
    set_keys();
    unsetenv("AWS_SECRET_ACCESS_KEY");
    assert_int_equal(s3_config_read("s3://b", &config, &why), -EINVAL);
    setenv("AWS_SECRET_ACCESS_KEY", "s", 1);
    setenv("AWS_SESSION_TOKEN", "t\nx-evil: 1", 1);
    assert_int_equal(s3_config_read("s3://b", &config, &why), -EINVAL);
    setenv("AWS_SESSION_TOKEN", "t", 1);
    assert_int_equal(s3_config_read("s3://b", &config, &why), 0);
    assert_string_equal(config.token, "t");
    assert_int_equal(config.connections, 16);
    s3_config_fini(&config);
}

static void authorities(void **state)
{
    struct kv_error why = {0};
    struct s3_config config;

    (void)state;
    set_keys();
    assert_int_equal(s3_config_read("s3://b", &config, &why), 0);
    assert_null(config.cacert);
    s3_config_fini(&config);
    setenv("AWS_CA_BUNDLE", "/dev/null", 1);
    assert_int_equal(s3_config_read("s3://b", &config, &why), 0);
    assert_string_equal(config.cacert, "/dev/null");
    s3_config_fini(&config);
    assert_int_equal(s3_config_read("s3://b?cacert=%2Fdev/zero", &config, &why), 0);
    assert_string_equal(config.cacert, "/dev/zero");
    s3_config_fini(&config);
    setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem", 1);
    assert_int_equal(s3_config_read("s3://b", &config, &why), -EINVAL);
    assert_non_null(strstr(why.text, "/nowhere/ca.pem"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places),
        cmocka_unit_test(refusals),
        cmocka_unit_test(keys_are_needed),
        cmocka_unit_test(authorities),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
