// SPDX-License-Identifier: Apache-2.0
#include "http/auth.h"

#include <unistd.h>

#include "base/unit.h"

static char file[] = "/tmp/kv-test-auth-XXXXXX";
static struct kh_reply reply;
static const struct kh_route open_route = {"GET", "/health", NULL, 0, KH_ROUTE_OPEN};
static const struct kh_route tokenless = {"GET", "/ui/page.js", NULL, 0, KH_ROUTE_TOKENLESS};
static const struct kh_route route = {"GET", "/workers", NULL, 0, 0};

static int make_file(void **state)
{
    int fd = mkstemp(file);

    (void)state;
    return fd < 0 || close(fd) < 0;
}

static int remove_file(void **state)
{
    (void)state;
    kv_buf_fini(&reply.body);
    return unlink(file);
}

static void write_file(const char *text)
{
    FILE *f = fopen(file, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static unsigned ask(struct kh_auth *auth, const struct kh_route *to, bool loopback,
                    const char *authorization)
{
    const struct kh_request request = {
        .route = to, .loopback = loopback, .authorization = authorization};

    reply.status = 200;
    reply.n_headers = 0;
    kv_buf_clear(&reply.body);
    return kh_auth_admit(auth, &request, &reply) ? 200 : reply.status;
}

static void without_anything_only_this_machine(void **state)
{
    struct kh_auth *auth;

    (void)state;
    assert_int_equal(kh_auth_create(NULL, false, &auth, NULL), 0);
    assert_int_equal(ask(auth, &route, true, NULL), 200);
    assert_int_equal(ask(auth, &route, false, NULL), 403);
    assert_non_null(strstr(kv_buf_cstr(&reply.body), "--auth-token-file"));
    assert_int_equal(ask(auth, NULL, false, NULL), 403);
    assert_int_equal(ask(auth, &open_route, false, NULL), 200);
    assert_int_equal(ask(auth, &tokenless, true, NULL), 200);
    assert_int_equal(ask(auth, &tokenless, false, NULL), 403);
    assert_null(kh_auth_first_token(auth));
    kh_auth_destroy(auth);

    assert_int_equal(kh_auth_create(NULL, true, &auth, NULL), 0);
    assert_int_equal(ask(auth, &route, false, NULL), 200);
    kh_auth_destroy(auth);
}

static unsigned ask_from(struct kh_auth *auth, const char *host, const char *origin)
{
    const struct kh_request request = {
        .route = &route, .loopback = true, .host = host, .origin = origin};

    reply.status = 200;
    kv_buf_clear(&reply.body);
    return kh_auth_admit(auth, &request, &reply) ? 200 : reply.status;
}

/* DNS rebinding: the connection comes from this machine, the page behind it doesn't. */
static void host_and_origin_name_this_machine(void **state)
{
    static const char *const good[] = {
        "localhost",    "LocalHost:8090", "localhost.:1", "127.0.0.1",  "127.0.0.1:8090",
        "127.1.2.3:80", "[::1]:8090",     "[::1]",        "[0:0::1]:1", "[::ffff:127.0.0.1]",
        "localhost:",   "0.0.0.0:8090",   "[::]"};
    static const char *const bad[] = {"",
                                      "evil.example.com",
                                      "localhost.evil.example.com",
                                      "evil.localhost",
                                      "127.0.0.1.evil.example.com",
                                      "127.0.0.1.",
                                      "127.1",
                                      "0x7f000001",
                                      "2130706433",
                                      "0177.0.0.1",
                                      "0.0.0.1",
                                      "10.0.0.1",
                                      "128.0.0.1",
                                      "[::2]",
                                      "[::127.0.0.1]",
                                      "[::ffff:10.0.0.1]",
                                      "[::1%eth0]",
                                      "[::1",
                                      "[::1]x",
                                      "::1",
                                      "localhost:80:80",
                                      "localhost:80x",
                                      "localhost@evil.example.com",
                                      "evil.example.com:80@localhost",
                                      "user@127.0.0.1",
                                      "localhost,evil.example.com",
                                      " localhost",
                                      "localhost/"};
    struct kh_auth *auth;
    char origin[300];

    (void)state;
    assert_int_equal(kh_auth_create(NULL, false, &auth, NULL), 0);
    assert_int_equal(ask_from(auth, NULL, NULL), 200); /* HTTP/1.0 */
    for (size_t i = 0; i < KV_COUNT(good); i++) {
        if (ask_from(auth, good[i], NULL) != 200)
            fail_msg("Host: %s", good[i]);
        snprintf(origin, sizeof(origin), "%s://%s", i % 2 ? "HTTPS" : "http", good[i]);
        if (ask_from(auth, "localhost", origin) != 200)
            fail_msg("Origin: %s", origin);
    }
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        if (ask_from(auth, bad[i], NULL) != 403)
            fail_msg("Host: %s", bad[i]);
        assert_non_null(strstr(kv_buf_cstr(&reply.body), "the Host header"));
        snprintf(origin, sizeof(origin), "http://%s", bad[i]);
        if (ask_from(auth, "localhost", origin) != 403)
            fail_msg("Origin: %s", origin);
        assert_non_null(strstr(kv_buf_cstr(&reply.body), "Origin"));
    }
    assert_int_equal(ask_from(auth, "localhost", "null"), 403);
    assert_int_equal(ask_from(auth, "localhost", "localhost"), 403);
    assert_int_equal(ask_from(auth, "localhost", "file://localhost"), 403);
    assert_int_equal(ask_from(auth, "localhost", "http://localhost http://evil.example.com"), 403);
    kh_auth_destroy(auth);

    assert_int_equal(kh_auth_create(NULL, true, &auth, NULL), 0);
    assert_int_equal(ask_from(auth, "evil.example.com", "http://evil.example.com"), 200);
    kh_auth_destroy(auth);
}

static void tokens(void **state)
{
    struct kh_auth *auth;
    struct kv_error error = {0};
    char *first;

    (void)state;
    write_file("# comment\n\n  first \r\nsecond\nthird-without-newline");
    assert_int_equal(kh_auth_create(file, false, &auth, &error), 0);
    assert_int_equal(ask(auth, &route, true, NULL), 401);
    assert_int_equal(reply.n_headers, 1);
    assert_string_equal(reply.headers[0].name, "WWW-Authenticate");
    assert_int_equal(ask(auth, NULL, true, NULL), 401);
    assert_int_equal(ask(auth, &open_route, false, NULL), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 200);
    assert_int_equal(ask(auth, &route, false, "bearer second"), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer  third-without-newline "), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer firs"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer first2"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearerfirst"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer # comment"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer "), 401);
    assert_int_equal(ask(auth, &route, false, "Basic first"), 401);
    first = kh_auth_first_token(auth);
    assert_string_equal(first, "first");
    free(first);

    write_file("");
    assert_true(kh_auth_reload(auth, &error) < 0);
    assert_non_null(strstr(error.text, "no token"));
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 200);
    write_file("new\n");
    assert_int_equal(kh_auth_reload(auth, &error), 0);
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer new"), 200);
    kh_auth_destroy(auth);
}

static void bad_files(void **state)
{
    struct kh_auth *auth;
    struct kv_error error = {0};
    char longest[KH_TOKEN_MAX + 3];

    (void)state;
    assert_int_equal(kh_auth_create("/nonexistent/tokens", false, &auth, &error), -ENOENT);
    assert_non_null(strstr(error.text, "/nonexistent/tokens"));
    memset(longest, 'x', sizeof(longest));
    longest[KH_TOKEN_MAX] = '\n';
    longest[KH_TOKEN_MAX + 1] = '\0';
    write_file(longest);
    assert_int_equal(kh_auth_create(file, false, &auth, &error), 0);
    kh_auth_destroy(auth);
    longest[KH_TOKEN_MAX] = 'x';
    write_file(longest);
    assert_int_equal(kh_auth_create(file, false, &auth, &error), -EMSGSIZE);
    write_file("first\nsecond # of another team\n");
    assert_int_equal(kh_auth_create(file, false, &auth, &error), -EINVAL);
    assert_non_null(strstr(error.text, "line 2"));
}

/* Lines are read in pieces: the end of a long comment must not pass for a token. */
static void long_comments(void **state)
{
    struct kh_auth *auth;
    struct kv_error error = {0};
    char text[4096 + 64];

    (void)state;
    memset(text, 'x', sizeof(text));
    memcpy(text, "good\n#", 6);
    memcpy(text + 5 + 4095, "sneaky\n", 8);
    write_file(text);
    assert_int_equal(kh_auth_create(file, false, &auth, &error), -EMSGSIZE);
    assert_non_null(strstr(error.text, "line 2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_anything_only_this_machine),
        cmocka_unit_test(host_and_origin_name_this_machine),
        cmocka_unit_test(tokens),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(long_comments),
    };

    return cmocka_run_group_tests(tests, make_file, remove_file);
}
