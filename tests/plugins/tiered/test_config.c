// SPDX-License-Identifier: Apache-2.0
/* Configuration files of tiered stores: what is read, and each refusal with its line and reason. */
#include "../../support.h"

#include <limits.h>

#include "tiered/config.h"

static char folder[PATH_MAX], path[PATH_MAX + 16];

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void refused(const char *text, const char *line, const char *reason)
{
    struct trd_config config;
    struct kv_error error = {0};
    char begin[PATH_MAX + 32];

    write_file(text);
    assert_int_equal(trd_config_read(path, &config, &error), -EINVAL);
    snprintf(begin, sizeof(begin), "%s:%s%s", path, line, *line ? ": " : " ");
    if (strncmp(error.text, begin, strlen(begin)) != 0 || !strstr(error.text, reason))
        fail_msg("\"%s\", not \"%s...%s\"", error.text, begin, reason);
}

static void test_all_options(void **state)
{
    struct trd_config c;
    struct kv_error error = {0};
    (void)state;

    write_file("# where puts go\nputs = nvme\nputs = bucket # what is left\nmanifests = bucket\n"
               "linger = 250ms\nplaces = 5000\n"
               "[nvme]\nuri = /var/kv?limit=1GiB\ncapacity = 800GiB\ndeadline = 2s\ncost-gib-month "
               "= 0.08\n"
               "[redis]\nuri = redis://host\nread-only = yes\n"
               "[bucket]\nuri = s3://b/p\ncost_gib_month = 0.023\ncost-request = 0.0000004\n");
    assert_int_equal(trd_config_read(path, &c, &error), 0);
    assert_int_equal(c.n_members, 3);
    assert_string_equal(c.members[0].name, "nvme");
    assert_string_equal(c.members[0].uri, "/var/kv?limit=1GiB");
    assert_true(c.members[0].capacity == UINT64_C(800) << 30);
    assert_int_equal(c.members[0].gib_month_nano, 80000000);
    assert_int_equal(c.members[0].request_nano, 0);
    assert_true(c.members[1].read_only && !c.members[0].read_only);
    assert_true(c.members[1].capacity == UINT64_MAX);
    assert_int_equal(c.members[0].deadline_ms, 2000);
    assert_int_equal(c.members[2].gib_month_nano, 23000000);
    assert_int_equal(c.members[2].request_nano, 400);
    assert_int_equal(c.n_puts, 2);
    assert_int_equal(c.puts[0], 0);
    assert_int_equal(c.puts[1], 2);
    assert_int_equal(c.manifests, 2);
    assert_int_equal(c.linger_ms, 250);
    assert_int_equal(c.places, 5000);
    trd_config_fini(&c);
}

static void test_defaults(void **state)
{
    struct trd_config c;
    (void)state;

    write_file("[a]\nuri = /a\nread-only = true\n[b]\nuri = /b\n[c]\nuri = /c\n");
    assert_int_equal(trd_config_read(path, &c, NULL), 0);
    assert_int_equal(c.n_puts, 2);
    assert_int_equal(c.puts[0], 1);
    assert_int_equal(c.puts[1], 2);
    assert_int_equal(c.manifests, 1);
    assert_int_equal(c.linger_ms, 10000);
    assert_int_equal(c.places, 1000000);
    trd_config_fini(&c);
    write_file("manifests = b\n[a]\nuri = /a\nread-only = true\n[b]\nuri = /b\nread-only = true\n");
    assert_int_equal(trd_config_read(path, &c, NULL), 0); /* a store that is only read */
    assert_int_equal(c.n_puts, 0);
    assert_int_equal(c.manifests, 1);
    trd_config_fini(&c);
}

static void test_refusals(void **state)
{
    char many[1024] = "";
    (void)state;

    for (int i = 0; i < 17; i++)
        sprintf(many + strlen(many), "[m%d]\nuri = /m%d\n", i, i);
    refused("", "", "no members");
    refused("\n\nno equals\n", "3", "expected `name = value`");
    refused("uri = /a\n", "", "no members");
    refused("[a]\nurl = /a\n", "2", "did you mean `uri`?");
    refused("[a]\nuri = /a\nputs = a\n", "3", "`puts` is of no section");
    refused("[a]\nuri = /a\nuri = /b\n", "3", "given on line 2");
    refused("[a\nuri = /a\n", "1", "expected `[NAME]`");
    refused("[]\nuri = /a\n", "1", "without a name");
    refused("[a b]\nuri = /a\n", "1", "letters, digits");
    refused("[abcdefghijklmnopqrstuvwxyzabcdefg]\nuri = /a\n", "1", "letters, digits");
    refused("[a]\n[b]\nuri = /b\n", "1", "a member without a `uri`: `a`");
    refused("[a]\nuri =\n", "2", "not a URI of a store: `empty`");
    refused("[a]\nuri = redis:6379\n", "2", "not a URI of a store: `neither");
    refused("[a]\nuri = redis://u:geheim@h\n", "2", "`password in the URI`");
    refused("[a]\nuri = kv\n", "2", "absolute path");
    refused("[a]\nuri = tiered:/etc/kv.conf\n", "2", "can't be a tiered store");
    refused("[a]\nuri = /a\n[a]\nuri = /b\n", "3", "two members are called `a`");
    refused("[a]\nuri = /a\n[b]\nuri = /a\n", "4", "also that of `a`");
    refused("[a]\nuri = /a\ncapacity = much\n", "3", "is not a size");
    refused("[a]\nuri = /a\ncapacity = 0\n", "3", "less than 1");
    refused("[a]\nuri = /a\ndeadline = 2h\n", "3", "outside");
    refused("[a]\nuri = /a\ncost-request = 1e-9\n", "3", "is not a decimal");
    refused("[a]\nuri = /a\ncost-request = 0.1234567891\n", "3", "is not a decimal");
    refused("[a]\nuri = /a\ncost-request = 1.\n", "3", "is not a decimal");
    refused("[a]\nuri = /a\nread-only = maybe\n", "3", "is not true or false");
    refused("puts = a\nputs = c\n[a]\nuri = /a\n", "2", "there is no member `c`");
    refused("puts = a\nputs = a\n[a]\nuri = /a\n", "2", "puts go there already: `a`");
    refused("puts = a\n[a]\nuri = /a\nread-only = yes\n", "1", "read-only: `a`");
    refused("\nmanifests = b\n[a]\nuri = /a\n", "2", "there is no member `b`");
    refused("linger = 0\n[a]\nuri = /a\n", "1", "outside 1..3600000 ms");
    refused("places = 0\n[a]\nuri = /a\n", "1", "outside 1..");
    refused(many, "", "17 members, and 16 are the limit");
}

static void test_files(void **state)
{
    struct trd_config config;
    struct kv_error error = {0};
    (void)state;

    assert_int_equal(trd_config_read("/nosuch/kv.conf", &config, &error), -ENOENT);
    assert_non_null(strstr(error.text, "/nosuch/kv.conf"));
    assert_int_equal(trd_config_read(folder, &config, &error), -EISDIR);
    assert_string_equal(trd_config_path("tiered:/x y?z"), "/x y?z");
    assert_string_equal(trd_config_path("tiered:///x"), "/x");
    assert_null(trd_config_path("tiered://x"));
    assert_null(trd_config_path("tiered:x"));
    assert_null(trd_config_path("/x"));
}

static int make_folder(void **state)
{
    (void)state;
    if (temp_dir(folder, sizeof(folder)) < 0)
        return -1;
    snprintf(path, sizeof(path), "%s/kv.conf", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    return remove_dir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_options), cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_files)};

    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
