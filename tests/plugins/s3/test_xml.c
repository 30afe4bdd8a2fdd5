// SPDX-License-Identifier: Apache-2.0
/* Listings, errors and keys as servers write them, cut off, and malformed. */
#include "../../base/unit.h"

#include <errno.h>

#include "s3/keys.h"
#include "s3/xml.h"

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
    "<Size>7</Size><Key><![CDATA[x<y+%41]]></Key></Contents><CommonPrefixes/>"
    "<IsTruncated>true</IsTruncated>"
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
    assert_string_equal(seen.objects[1].key, "x<y+%41");
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
        assert_int_equal(seen.n, 0); /* all or nothing */
    }
}

#define IN(text) "<ListBucketResult>" text "</ListBucketResult>"
#define LAST "<IsTruncated>false</IsTruncated>"
#define TOKEN "<NextContinuationToken>t</NextContinuationToken>"

/* How keys are written depends on what the page says, wherever in it. */
static void keys_as_they_are(void **state)
{
    static const struct {
        const char *text, *key;
    } cases[] = {
        {IN("<Contents><Key>a+b%2B%25&amp;%3C</Key></Contents>" LAST), "a+b%2B%25&%3C"},
        {IN("<Contents><Key>a+b%2B%25&amp;%3c</Key></Contents>" LAST
            "<EncodingType>url</EncodingType>"),
         "a b+%&<"},
        {IN("<EncodingType>url</EncodingType><Contents><Key>%C3%A9%20</Key></Contents>" LAST),
         "\xc3\xa9 "},
        {IN("<Contents><Key>&#233;&#x65E5;&#x1F600;&#43;</Key></Contents>" LAST),
         "\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80+"},
    };
    char next[32];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct seen seen = {.n = 0};

        assert_int_equal(read_list(cases[i].text, strlen(cases[i].text), &seen, next), 0);
        assert_int_equal(seen.n, 1);
        assert_string_equal(seen.objects[0].key, cases[i].key);
    }
}

static void where_a_listing_ends(void **state)
{
    static const struct {
        const char *text, *next;
        int ret;
    } cases[] = {
        {IN(LAST), "", 0},
        {IN(LAST TOKEN), "", 0},
        {IN("<IsTruncated>true</IsTruncated>" TOKEN), "t", 0},
        {IN(LAST "<Contents><Key>k</Key>" TOKEN "</Contents>"), "", 0},
        {IN("<IsTruncated>true</IsTruncated>"), NULL, -EPROTO}, /* version 1's answer */
        {IN(TOKEN), NULL, -EPROTO},
        {IN(""), NULL, -EPROTO},
        {IN("<IsTruncated>maybe</IsTruncated>"), NULL, -EPROTO},
        {IN("<x>" LAST "</x>"), NULL, -EPROTO},
    };
    char next[32];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct seen seen = {.n = 0};
        int ret = read_list(cases[i].text, strlen(cases[i].text), &seen, next);

        if (ret != cases[i].ret)
            print_error("%s: %d\n", cases[i].text, ret);
        assert_int_equal(ret, cases[i].ret);
        if (cases[i].next)
            assert_string_equal(next, cases[i].next);
    }
}

static void what_is_no_listing(void **state)
{
    static const char *const bad[] = {
        "x",
        "<a/>",
        "<a></b>",
        "<Error/>",
        "<!DOCTYPE a><ListBucketResult/>",
        "<ListBucketResult/><ListBucketResult/>",
        "<ListBucketResult><!--",
        "</a>",
        IN("<Contents><Size>1</Size></Contents>" LAST),
        IN("<Contents><Key>a&nbsp;</Key></Contents>" LAST),
        IN("<Contents><Key>a&#0;</Key></Contents>" LAST),
        IN(LAST "<EncodingType>url</EncodingType><Contents><Key>a%</Key></Contents>"),
        IN(LAST "<EncodingType>url</EncodingType><Contents><Key>a%2</Key></Contents>"),
        IN(LAST "<EncodingType>url</EncodingType><Contents><Key>a%00b</Key></Contents>"),
        IN(LAST "<EncodingType>url</EncodingType><Contents><Key>a% 1</Key></Contents>"),
        IN("<Contents><Key>a&#xd800;</Key></Contents>" LAST),
        IN("<Contents><Key>a&#1114112;</Key></Contents>" LAST),
        IN("<a b='>"),
        IN("<!ENTITY x>"),
        IN("<Contents><Key>a</Key><Size>-x</Size></Contents>" LAST),
        IN("<Contents><Key>a</Key><Size>99999999999999999999999999</Size></Contents>" LAST),
        IN("<Contents><Key>a</Key><Size>18446744073709551615</Size></Contents>" LAST),
        IN("<a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a></a></a></a></a></a></a></a></a></a>"
           "</a></a></a></a></a></a></a>"),
        IN("<NextContinuationToken>00000000000000000000000000000000</NextContinuationToken>")};
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

/* Of what answers 200, nothing but the element that tells success passes. */
static void roots(void **state)
{
    static const char good[] = "<?xml version=\"1.0\"?>\n<s:Done><a>1</a></s:Done>\n";
    static const char *const bad[] = {"",
                                      " ",
                                      "<Error/>",
                                      "<?xml?><Error/>",
                                      "<!DOCTYPE x><Done/>",
                                      "<!DOCTYPE Error><Error/>",
                                      "\xff<Error/>",
                                      "<html>Done</html>",
                                      "<Done>",
                                      "<Done/><Error/>",
                                      "<Error><Done/></Error>",
                                      "<Done><Error></Done>",
                                      "<?xml <Done/>",
                                      "<?xmlx?><Error/>"};

    (void)state;
    assert_int_equal(s3_check_root(good, strlen(good), "Done"), 0);
    assert_int_equal(s3_check_root(good, strlen(good), "Other"), -EPROTO);
    assert_int_equal(s3_check_root("\0<Done/>", 8, "Done"), -EPROTO);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (s3_check_root(bad[i], strlen(bad[i]), "Done") != -EPROTO)
            fail_msg("taken: %s", bad[i]);
    for (size_t len = 0; len < strlen(good) - 1; len++)
        assert_int_equal(s3_check_root(good, len, "Done"), -EPROTO);
}

/* A page of @n elements, or attributes of one element, each with a name of its own. */
static int many(size_t n, bool attributes)
{
    size_t size = 100 + n * 32, len;
    char *text = malloc(size), next[32];
    struct seen seen = {.n = 0};
    int ret;

    assert_non_null(text);
    len = (size_t)sprintf(text, "<ListBucketResult%s", attributes ? "" : ">");
    for (size_t i = 0; i < n; i++)
        len += (size_t)sprintf(text + len, attributes ? " a%zu=''" : "<a%zu/>", i);
    len += (size_t)sprintf(text + len, "%s<IsTruncated>false</IsTruncated></ListBucketResult>",
                           attributes ? ">" : "");
    ret = read_list(text, len, &seen, next);
    free(text);
    return ret;
}

static void more_than_any_server_sends(void **state)
{
    (void)state;
    assert_int_equal(many(100000, false), 0);
    assert_int_equal(many(200000, false), -EPROTO);
    assert_int_equal(many(2000, true), 0);
    assert_int_equal(many(20000, true), -EPROTO);
}

static void keys(void **state)
{
    static const char *const strange[] = {"a%2",  "a%zz", "a+b", "a b", "a%2fb",
                                          "a%41", ".a",   "",    "a/b"};
    char good[] = "a%2Fb%25", dot[] = "%2E.%2B", key[16];
    uint8_t hash[S3_MAX_HASH];

    (void)state;
    assert_int_equal(s3_chunk_of_key("0a/0aff", hash), 2);
    assert_int_equal(hash[1], 0xff);
    assert_int_equal(s3_chunk_of_key("0a/0bff", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/0af", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/0AFF", hash), 0);
    assert_int_equal(s3_chunk_of_key("0a/", hash), 0);
    assert_true(s3_name_of_key(good));
    assert_string_equal(good, "a/b%");
    assert_true(s3_name_of_key(dot));
    assert_string_equal(dot, "..+");
    for (size_t i = 0; i < sizeof(strange) / sizeof(strange[0]); i++) { /* we write none so */
        snprintf(key, sizeof(key), "%s", strange[i]);
        assert_false(s3_name_of_key(key));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_listing),
        cmocka_unit_test(every_cut_is_noticed),
        cmocka_unit_test(keys_as_they_are),
        cmocka_unit_test(where_a_listing_ends),
        cmocka_unit_test(what_is_no_listing),
        cmocka_unit_test(errors_and_elements),
        cmocka_unit_test(roots),
        cmocka_unit_test(more_than_any_server_sends),
        cmocka_unit_test(keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
