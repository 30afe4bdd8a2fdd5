// SPDX-License-Identifier: Apache-2.0
/* Signatures that Amazon publishes for its example keys, request by request. */
#include "../../base/unit.h"
#include "s3/sign.h"

#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define BUCKET "examplebucket.s3.amazonaws.com"
#define WHEN "20130524T000000Z"

static void check_signature(struct s3_signing in, const char *signature)
{
    struct kv_buf text = KV_BUF_INIT;

    in.region = "us-east-1";
    in.access_key = "AKIAIOSFODNN7EXAMPLE";
    in.secret_key = in.secret_key ? in.secret_key : "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
    assert_int_equal(s3_sign(&in, &text), 0);
    assert_non_null(strstr(kv_buf_cstr(&text), "Signature="));
    assert_string_equal(strstr(kv_buf_cstr(&text), "Signature=") + 10, signature);
    kv_buf_fini(&text);
}

static void the_general_suite(void **state)
{
    const struct s3_header headers[] = {{"host", "example.amazonaws.com"},
                                        {"x-amz-date", "20150830T123600Z"}};

    (void)state;
    check_signature((struct s3_signing){.method = "GET",
                                        .path = "/",
                                        .query = "",
                                        .headers = headers,
                                        .n_headers = 2,
                                        .payload_sha256 = EMPTY,
                                        .stamp = "20150830T123600Z",
                                        .service = "service",
                                        .secret_key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"},
                    "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
}

static void get_with_a_range(void **state)
{
    const struct s3_header headers[] = {{"host", BUCKET},
                                        {"range", "bytes=0-9"},
                                        {"x-amz-content-sha256", EMPTY},
                                        {"x-amz-date", WHEN}};

    (void)state;
    check_signature((struct s3_signing){.method = "GET",
                                        .path = "/test.txt",
                                        .query = "",
                                        .headers = headers,
                                        .n_headers = 4,
                                        .payload_sha256 = EMPTY,
                                        .stamp = WHEN,
                                        .service = "s3"},
                    "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

static void put_of_a_body(void **state)
{
    char sum[S3_SHA256_HEX];
    const struct s3_header headers[] = {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                        {"host", BUCKET},
                                        {"x-amz-content-sha256", sum},
                                        {"x-amz-date", WHEN},
                                        {"x-amz-storage-class", "REDUCED_REDUNDANCY"}};
    struct kv_buf path = KV_BUF_INIT;

    (void)state;
    s3_encode(&path, "/test$file.text", strlen("/test$file.text"), 1);
    assert_int_equal(s3_sha256_hex("Welcome to Amazon S3.", 21, sum), 0);
    check_signature((struct s3_signing){.method = "PUT",
                                        .path = kv_buf_cstr(&path),
                                        .query = "",
                                        .headers = headers,
                                        .n_headers = 5,
                                        .payload_sha256 = sum,
                                        .stamp = WHEN,
                                        .service = "s3"},
                    "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
    kv_buf_fini(&path);
}

static void queries(void **state)
{
    const struct s3_header headers[] = {
        {"host", BUCKET}, {"x-amz-content-sha256", EMPTY}, {"x-amz-date", WHEN}};
    struct s3_signing in = {.method = "GET",
                            .path = "/",
                            .query = "lifecycle=",
                            .headers = headers,
                            .n_headers = 3,
                            .payload_sha256 = EMPTY,
                            .stamp = WHEN,
                            .service = "s3"};

    (void)state;
    check_signature(in, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    in.query = "max-keys=2&prefix=J";
    check_signature(in, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

static void encoding_and_stamps(void **state)
{
    struct kv_buf text = KV_BUF_INIT;
    char stamp[S3_STAMP];

    (void)state;
    s3_encode(&text, "a/b +~%\xc3\xa9", 9, 0);
    assert_string_equal(kv_buf_cstr(&text), "a%2Fb%20%2B~%25%C3%A9");
    kv_buf_fini(&text);
    s3_stamp(1369353600, stamp);
    assert_string_equal(stamp, WHEN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_general_suite),   cmocka_unit_test(get_with_a_range),
        cmocka_unit_test(put_of_a_body),       cmocka_unit_test(queries),
        cmocka_unit_test(encoding_and_stamps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
