// SPDX-License-Identifier: Apache-2.0
#include "indexer/auth.h"

#include <unistd.h>

#include "base/unit.h"

static char file[] = "/tmp/kv-test-auth-XXXXXX";
static struct ki_reply reply;
static const struct ki_route open_route = {"GET", "/health", NULL, 0, KI_ROUTE_OPEN};
static const struct ki_route route = {"GET", "/workers", NULL, 0, 0};

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

static unsigned ask(struct ki_auth *auth, const struct ki_route *to, bool loopback,
                    const char *authorization)
{
    const struct ki_request request = {
        .route = to, .loopback = loopback, .authorization = authorization};

    reply.status = 200;
    reply.n_headers = 0;
    kv_buf_clear(&reply.body);
    return ki_auth_admit(auth, &request, &reply) ? 200 : reply.status;
}

static void without_anything_only_this_machine(void **state)
{
    struct ki_auth *auth;

    (void)state;
    assert_int_equal(ki_auth_create(NULL, false, &auth, NULL), 0);
    assert_int_equal(ask(auth, &route, true, NULL), 200);
    assert_int_equal(ask(auth, &route, false, NULL), 403);
    assert_non_null(strstr(kv_buf_cstr(&reply.body), "--auth-token-file"));
    assert_int_equal(ask(auth, NULL, false, NULL), 403);
    assert_int_equal(ask(auth, &open_route, false, NULL), 200);
    assert_null(ki_auth_first_token(auth));
    ki_auth_destroy(auth);

    assert_int_equal(ki_auth_create(NULL, true, &auth, NULL), 0);
    assert_int_equal(ask(auth, &route, false, NULL), 200);
    ki_auth_destroy(auth);
}

static void tokens(void **state)
{
    struct ki_auth *auth;
    struct kv_error error = {0};
    char *first;

    (void)state;
    write_file("# comment\n\n  first \r\nsecond\nthird without newline");
    assert_int_equal(ki_auth_create(file, false, &auth, &error), 0);
    assert_int_equal(ask(auth, &route, true, NULL), 401);
    assert_int_equal(reply.n_headers, 1);
    assert_string_equal(reply.headers[0].name, "WWW-Authenticate");
    assert_int_equal(ask(auth, NULL, true, NULL), 401);
    assert_int_equal(ask(auth, &open_route, false, NULL), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 200);
    assert_int_equal(ask(auth, &route, false, "bearer second"), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer  third without newline "), 200);
    assert_int_equal(ask(auth, &route, false, "Bearer firs"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer first2"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearerfirst"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer # comment"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer "), 401);
    assert_int_equal(ask(auth, &route, false, "Basic first"), 401);
    first = ki_auth_first_token(auth);
    assert_string_equal(first, "first");
    free(first);

    write_file("");
    assert_true(ki_auth_reload(auth, &error) < 0);
    assert_non_null(strstr(error.text, "no token"));
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 200);
    write_file("new\n");
    assert_int_equal(ki_auth_reload(auth, &error), 0);
    assert_int_equal(ask(auth, &route, false, "Bearer first"), 401);
    assert_int_equal(ask(auth, &route, false, "Bearer new"), 200);
    ki_auth_destroy(auth);
}

static void bad_files(void **state)
{
    struct ki_auth *auth;
    struct kv_error error = {0};
    char longest[KI_TOKEN_MAX + 3];

    (void)state;
    assert_int_equal(ki_auth_create("/nonexistent/tokens", false, &auth, &error), -ENOENT);
    assert_non_null(strstr(error.text, "/nonexistent/tokens"));
    memset(longest, 'x', sizeof(longest));
    longest[KI_TOKEN_MAX] = '\n';
    longest[KI_TOKEN_MAX + 1] = '\0';
    write_file(longest);
    assert_int_equal(ki_auth_create(file, false, &auth, &error), 0);
    ki_auth_destroy(auth);
    longest[KI_TOKEN_MAX] = 'x';
    write_file(longest);
    assert_int_equal(ki_auth_create(file, false, &auth, &error), -EMSGSIZE);
}

/* Lines are read in pieces: the end of a long comment must not pass for a token. */
static void long_comments(void **state)
{
    struct ki_auth *auth;
    struct kv_error error = {0};
    char text[4096 + 64];

    (void)state;
    memset(text, 'x', sizeof(text));
    memcpy(text, "good\n#", 6);
    memcpy(text + 5 + 4095, "sneaky\n", 8);
    write_file(text);
    assert_int_equal(ki_auth_create(file, false, &auth, &error), -EMSGSIZE);
    assert_non_null(strstr(error.text, "line 2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_anything_only_this_machine),
        cmocka_unit_test(tokens),
        cmocka_unit_test(bad_files),
        cmocka_unit_test(long_comments),
    };

    return cmocka_run_group_tests(tests, make_file, remove_file);
}
