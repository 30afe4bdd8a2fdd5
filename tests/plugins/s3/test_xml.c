// SPDX-License-Identifier: Apache-2.0
/* Listings, errors and keys as servers write them, cut, and wrong. */
#include "../../base/unit.h"

#include <errno.h>

#include "s3/object.h"

struct seen {
    struct s3_listed objects[4];
    size_t n;
    int stop;
};

static int collect(void *arg, const struct s3_listed *object)
{
    struct seen *seen = arg;

    assert_true(seen->n < 4);
    seen->objects[seen->n++] = *object;
    return seen->stop;
}

/* From a copy of the exact length: a sanitizer sees a read behind it. */
static int read_list(const char *text, size_t len, struct seen *seen, char *next)
{
    char *copy = malloc(len);
    int ret;

    memcpy(copy, text, len);
    ret = s3_read_listing(copy, len, collect, seen, next, 32);
    free(copy);
    return ret;
}

static const char page[] =
    "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"u\"><Prefix>p/&amp;</Prefix>"
    "<Contents><Key>p/c/a&lt;b</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>"
    "<Size>42</Size><Owner><Name>n</Name></Owner></Contents><Contents>"
    "<Size>7</Size><Key><![CDATA[x<y]]></Key></Contents><CommonPrefixes/>"
    "<NextContinuationToken>a&#43;b=</NextContinuationToken></ListBucketResult>";

static void a_listing(void **state)
{
    struct seen seen = {.n = 0};
    char next[32];

    (void)state;
    assert_int_equal(read_list(page, strlen(page), &seen, next), 0);
    assert_int_equal(seen.n, 2);
    assert_string_equal(next, "a+b=");
    assert_string_equal(seen.objects[0].key, "p/c/a<b");
    assert_int_equal(seen.objects[0].len, 42);
    assert_int_equal(seen.objects[0].modified_s, 1767323045);
    assert_string_equal(seen.objects[1].key, "x<y");
    assert_int_equal(seen.objects[1].modified_s, 0);
    seen = (struct seen){.stop = 9};
    assert_int_equal(read_list(page, strlen(page), &seen, next), 9);
    assert_int_equal(seen.n, 1);
}

static void every_cut_is_noticed(void **state)
{
    char next[32];

    (void)state;
    for (size_t len = 1; len < strlen(page); len++) {
        struct seen seen = {.n = 0};

        assert_int_equal(read_list(page, len, &seen, next), -EPROTO);
    }
}

static void what_is_no_listing(void **state)
{
#define IN(text) "<ListBucketResult>" text "</ListBucketResult>"
    static const char *const bad[] = {
        "x",
        "<a/>",
        "<a></b>",
        "<Error/>",
        "<!DOCTYPE a><ListBucketResult/>",
        "<ListBucketResult/><ListBucketResult/>",
        "<ListBucketResult><!--",
        "</a>",
        IN("<Contents><Size>1</Size></Contents>"),
        IN("<Contents><Key>a&nbsp;</Key></Contents>"),
        IN("<Contents><Key>a&#0;</Key></Contents>"),
        IN("<a b='>"),
        IN("<!ENTITY x>"),
        IN("<Contents><Key>a</Key><Size>-x</Size></Contents>"),
        IN("<a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a></a></a></a></a></a></a></a></a></a>"
           "</a></a></a></a></a></a></a>"),
        IN("<NextContinuationToken>00000000000000000000000000000000</NextContinuationToken>")};
#undef IN
    char next[32];

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct seen seen = {.n = 0};
        int ret = read_list(bad[i], strlen(bad[i]), &seen, next);

        if (ret >= 0)
            print_error("taken: %s\n", bad[i]);
        assert_true(ret == -EPROTO || ret == -ENOSPC);
    }
}

static void errors_and_elements(void **state)
{
    static const char error[] = "<?xml?><Error><Code>SlowDown</Code><Message>m</Message></Error>";
    static const char upload[] = " <s:Init><s:UploadId>ab</s:UploadId></s:Init>";
    char text[16];

    (void)state;
    assert_true(s3_read_error(error, strlen(error), text, sizeof(text)));
    assert_string_equal(text, "SlowDown");
    assert_true(s3_read_error("<Error/>", 8, text, sizeof(text)));
    assert_string_equal(text, "unknown");
    assert_false(s3_read_error(upload, strlen(upload), text, sizeof(text)));
    assert_false(s3_read_error(NULL, 0, text, sizeof(text)));
    assert_int_equal(s3_read_element(upload, strlen(upload), "UploadId", text, 16), 0);
    assert_string_equal(text, "ab");
    assert_int_equal(s3_read_element(upload, strlen(upload), "UploadId", text, 2), -ENOSPC);
    assert_int_equal(s3_read_element(upload, strlen(upload), "Other", text, 16), -ENOENT);
}

static void keys(void **state)
{
    char good[] = "a%2Fb%25", cut[] = "a%2", bad[] = "a%zz";
    uint8_t hash[S3_MAX_HASH];

    (void)state;
    assert_int_equal(s3_chunk_of_key("0a/0aff", hash), 2);
    assert_int_equal(hash[1], 0xff);
    assert_int_equal(s3_chunk_of_key("0a/0bff", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/0af", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/0AFF", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/", hash), 0);
    assert_true(s3_decode(good));
    assert_string_equal(good, "a/b%");
    assert_false(s3_decode(cut));
    assert_false(s3_decode(bad));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_listing),
        cmocka_unit_test(every_cut_is_noticed),
        cmocka_unit_test(what_is_no_listing),
        cmocka_unit_test(errors_and_elements),
        cmocka_unit_test(keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
