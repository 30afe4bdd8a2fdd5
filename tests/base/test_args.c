// SPDX-License-Identifier: Apache-2.0
#include "base/args/args.h"

#include <ctype.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/unit.h"

struct values {
    bool verbose;
    const char *name, *level;
    struct kv_arg_list allow;
    uint64_t port, size, time;
};

#define ROW(n, t, field) .name = (n), .type = (t), .offset = offsetof(struct values, field)
static const struct kv_arg rows[] = {
    {.name = "Things", .type = KV_ARG_GROUP},
    {ROW("verbose", KV_ARG_FLAG, verbose), .help = "Say more."},
    {ROW("name", KV_ARG_STR, name), .value = "NAME", .help = "A name."},
    {ROW("log-level", KV_ARG_CHOICE, level), .value = "L", .choices = "warn|info",
     .help = "How much."},
    {ROW("allow", KV_ARG_LIST, allow), .value = "PATTERN", .help = "May be given repeatedly."},
    {ROW("port", KV_ARG_U64, port), .value = "PORT", .max = 65535, .help = "Listen here."},
    {ROW("max-body", KV_ARG_SIZE, size), .value = "SIZE", .min = 1024, .help = "Limit."},
    {ROW("timeout", KV_ARG_TIME, time), .value = "TIME", .help = "Give up after."},
    {ROW("pause", KV_ARG_TIME, time), .value = "TIME", .min = 5, .max = 500, .help = "Rest."},
    {ROW("secret", KV_ARG_STR, name), .hidden = true, .help = "x"},
};
static const struct kv_args_program program = {.name = "prog",
                                               .usage = "[OPTION ...]",
                                               .brief = "do things",
                                               .summary = "Does things.",
                                               .footer = "The end.",
                                               .env = "PROG",
                                               .args = rows,
                                               .n_args = KV_COUNT(rows),
                                               .config = true,
                                               .env_others = "MINE"};

static int parse(struct values *values, struct kv_arg_list *rest, struct kv_error *error,
                 const char *const *words)
{
    char *argv[32] = {(char *)"prog"};
    int argc = 1;

    while (words[argc - 1]) {
        argv[argc] = (char *)words[argc - 1];
        argc++;
    }
    return kv_args_parse(&program, argc, argv, values, rest, error);
}
#define PARSE(v, rest, e, ...) parse(v, rest, e, (const char *const[]){__VA_ARGS__, NULL})

static void test_all_kinds(void **state)
{
    struct values v = {.port = 8090};
    struct kv_arg_list rest = {0};
    struct kv_error e;

    (void)state;
    assert_int_equal(PARSE(&v, &rest, &e, "--verbose", "--name", "x y", "--log-level=info",
                           "--allow", "a", "--allow=b", "file", "--max-body=2KiB", "--timeout",
                           "250ms", "--", "--port"),
                     0);
    assert_true(v.verbose);
    assert_string_equal(v.name, "x y");
    assert_string_equal(v.level, "info");
    assert_int_equal(v.allow.n, 2);
    assert_string_equal(v.allow.items[1], "b");
    assert_int_equal(v.port, 8090);
    assert_int_equal(v.size, 2048);
    assert_int_equal(v.time, 250);
    assert_int_equal(rest.n, 2);
    assert_string_equal(rest.items[1], "--port");
}

static void test_errors_teach(void **state)
{
    static const struct {
        const char *word, *next, *text;
    } cases[] = {
        {"--prot=1", NULL, "unknown option --prot; did you mean --port?"},
        {"--zzzzzzzzz", NULL, "unknown option --zzzzzzzzz (see --help)"},
        {"--secrt", NULL, "unknown option --secrt (see --help)"},
        {"-p", NULL, "unknown option -p (see --help)"},
        {"--port", NULL, "--port needs a value (PORT)"},
        {"--port", "65536", "--port: 65536 is outside 0..65535"},
        {"--port", "-1", "--port: `-1` is not a number"},
        {"--port", "1x", "--port: `1x` is not a number"},
        {"--port=", NULL, "--port: `` is not a number"},
        {"--port", "99999999999999999999", "--port: `99999999999999999999` is not a number"},
        {"--max-body", "64mb", "--max-body: `64mb` is not a size such as 64MiB"},
        {"--max-body", "16777216TiB", "--max-body: `16777216TiB` is not a size such as 64MiB"},
        {"--max-body", "12", "--max-body: 12 is less than 1024 bytes"},
        {"--pause", "1s", "--pause: 1s is outside 5..500 ms"},
        {"--log-level", "inf", "--log-level: `inf` is not one of warn|info"},
        {"--verbose=1", NULL, "--verbose takes no value"},
        {"stray", NULL, "unexpected argument `stray`"},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct values v = {0};
        struct kv_error e = {0};

        assert_int_equal(PARSE(&v, NULL, &e, cases[i].word, cases[i].next), -EINVAL);
        assert_string_equal(e.text, cases[i].text);
    }
}

static void test_environment(void **state)
{
    struct values v = {0};
    struct kv_error e = {0};

    (void)state;
    setenv("PROG_PORT", "1", 1);
    setenv("PROG_VERBOSE", "no", 1);
    setenv("PROG_ALLOW", "env", 1);
    setenv("PROG_MAX_BODY", "1MiB", 1);
    assert_int_equal(PARSE(&v, NULL, &e, "--port=2", "--allow=cli"), 0);
    assert_int_equal(v.port, 2);
    assert_false(v.verbose);
    assert_int_equal(v.size, 1 << 20);
    assert_int_equal(v.allow.n, 1);
    assert_string_equal(v.allow.items[0], "cli");
    setenv("PROG_PORT", "tcp://10.0.0.1:8090", 1); /* Kubernetes' link to a service named prog */
    v.port = 8090;
    assert_int_equal(PARSE(&v, NULL, &e, "--verbose"), 0);
    assert_int_equal(v.port, 8090);
    setenv("PROG_PORT", "8x", 1);
    assert_int_equal(PARSE(&v, NULL, &e, "--verbose"), -EINVAL);
    setenv("PROG_PORT", "1", 1);
    setenv("PROG_TIMEOUT", "soon", 1);
    assert_int_equal(PARSE(&v, NULL, &e, "--port=2"), -EINVAL);
    assert_string_equal(e.text,
                        "PROG_TIMEOUT: --timeout: `soon` is not a time such as 250ms, 5s or 2m");
    unsetenv("PROG_PORT");
    unsetenv("PROG_VERBOSE");
    unsetenv("PROG_ALLOW");
    unsetenv("PROG_MAX_BODY");
    unsetenv("PROG_TIMEOUT");
}

static void write_config(char *path, const char *text)
{
    int fd;

    strcpy(path, "/tmp/kv-args-XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

/* A misspelt flag is an error, so that none is on, or off, by mistake. */
static void test_flags_in_words(void **state)
{
    static const struct {
        const char *text;
        int value; /* -1: refused */
    } cases[] = {{"1", 1},  {"true", 1}, {"Yes", 1},    {"ON", 1}, {"0", 0},      {"False", 0},
                 {"no", 0}, {"OFF", 0},  {"flase", -1}, {"2", -1}, {"true ", -1}, {"tru", -1}};
    char path[32], text[64];
    struct kv_error e = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct values v = {.verbose = cases[i].value == 0};

        setenv("PROG_VERBOSE", cases[i].text, 1);
        assert_int_equal(PARSE(&v, NULL, &e, "--port=1"), cases[i].value < 0 ? -EINVAL : 0);
        assert_true(cases[i].value < 0 || v.verbose == cases[i].value);
    }
    setenv("PROG_VERBOSE", "flase", 1);
    assert_int_equal(PARSE(&(struct values){0}, NULL, &e, "--port=1"), -EINVAL);
    assert_string_equal(e.text, "PROG_VERBOSE: --verbose: `flase` is not true or false");
    unsetenv("PROG_VERBOSE");
    for (size_t i = 0; i <= KV_COUNT(cases); i++) {
        /* Blanks at the end are no part of a line's value; an empty one is false. */
        int wanted = i == KV_COUNT(cases) ? 0 : strcmp(cases[i].text, "true ") ? cases[i].value : 1;
        struct values v = {.verbose = wanted == 0};

        snprintf(text, sizeof(text), "verbose = %s\n", i < KV_COUNT(cases) ? cases[i].text : "");
        write_config(path, text);
        assert_int_equal(PARSE(&v, NULL, &e, "--config", path), wanted < 0 ? -EINVAL : 0);
        assert_true(wanted < 0 || v.verbose == wanted);
        unlink(path);
    }
}

static void empty_variables(bool set)
{
    for (size_t i = 1; i < KV_COUNT(rows); i++) {
        char name[40] = "PROG_";

        for (const char *c = rows[i].name; *c; c++)
            name[strlen(name)] = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        if (set)
            setenv(name, "", 1);
        else
            unsetenv(name);
    }
}

/* As compose files give variables without a value: the file and the defaults count. */
static void test_empty_variables_are_unset(void **state)
{
    struct values v = {.port = 8090, .level = "warn"};
    struct kv_error e = {0};
    char path[32];

    (void)state;
    empty_variables(true);
    setenv("PROG_CONFIG", "", 1);
    assert_int_equal(PARSE(&v, NULL, &e, "--name=x"), 0);
    assert_int_equal(v.port, 8090);
    assert_string_equal(v.level, "warn");
    assert_int_equal(v.allow.n, 0);
    write_config(path, "verbose = true\nallow = a\nport = 5\nname = y\n");
    setenv("PROG_CONFIG", path, 1);
    assert_int_equal(PARSE(&v, NULL, &e, "--timeout=1s"), 0);
    assert_true(v.verbose);
    assert_int_equal(v.allow.n, 1);
    assert_int_equal(v.port, 5);
    assert_string_equal(v.name, "y");
    unlink(path);
    unsetenv("PROG_CONFIG");
    empty_variables(false);
}

static void test_units(void **state)
{
    uint64_t n;

    (void)state;
    assert_int_equal(kv_parse_u64("18446744073709551615", &n), 0);
    assert_true(n == UINT64_MAX);
    assert_int_equal(kv_parse_u64("18446744073709551616", &n), -EINVAL);
    assert_int_equal(kv_parse_u64("", &n), -EINVAL);
    assert_int_equal(kv_parse_u64(" 1", &n), -EINVAL);
    assert_int_equal(kv_parse_time_ms("2", &n), 0);
    assert_int_equal(n, 2000);
    assert_int_equal(kv_parse_time_ms("2m", &n), 0);
    assert_int_equal(n, 120000);
    assert_int_equal(kv_parse_size("2K", &n), 0);
    assert_int_equal(n, 2048);
    assert_int_equal(kv_parse_size("2kB", &n), 0);
    assert_int_equal(n, 2000);
    assert_int_equal(kv_parse_size("3GiB", &n), 0);
    assert_true(n == UINT64_C(3) << 30);
    assert_int_equal(kv_parse_nano("0.023", &n), 0);
    assert_int_equal(n, 23000000);
    assert_int_equal(kv_parse_nano("3", &n), 0);
    assert_int_equal(n, 3000000000);
    assert_int_equal(kv_parse_nano("1.000000001", &n), 0);
    assert_int_equal(n, 1000000001);
    assert_int_equal(kv_parse_nano("18446744072", &n), 0);
    assert_int_equal(kv_parse_nano("18446744073", &n), -EINVAL);
    assert_int_equal(kv_parse_nano("1.0000000001", &n), -EINVAL);
    assert_int_equal(kv_parse_nano(".5", &n), -EINVAL);
    assert_int_equal(kv_parse_nano("1.", &n), -EINVAL);
    assert_int_equal(kv_parse_nano("-1", &n), -EINVAL);
}

/* Run @body with standard output going to a file, which is returned, rewound. */
static FILE *printed(const char *word)
{
    int saved = dup(1);
    FILE *file = tmpfile();
    struct values v = {0};

    fflush(stdout);
    dup2(fileno(file), 1);
    assert_int_equal(PARSE(&v, NULL, NULL, word), 1);
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    rewind(file);
    return file;
}

static void test_config_comes_first(void **state)
{
    struct values v = {0};
    struct kv_error e = {0};
    char path[32];

    (void)state;
    write_config(path, "# all of it\n\nport = 1\nmax_body=2MiB # bytes\nname = a#b c\n"
                       "allow = x\nallow = y\nverbose = true\ntimeout = 1d\n");
    assert_int_equal(PARSE(&v, NULL, &e, "--config", path), 0);
    assert_int_equal(v.port, 1);
    assert_int_equal(v.size, 2 << 20);
    assert_string_equal(v.name, "a#b c");
    assert_int_equal(v.allow.n, 2);
    assert_true(v.verbose);
    assert_int_equal(v.time, 86400000);

    setenv("PROG_CONFIG", path, 1);
    setenv("PROG_PORT", "2", 1);
    setenv("PROG_VERBOSE", "no", 1);
    setenv("PROG_ALLOW", "env", 1);
    v = (struct values){0};
    assert_int_equal(PARSE(&v, NULL, &e, "--max-body=4KiB"), 0);
    assert_int_equal(v.port, 2);
    assert_false(v.verbose);
    assert_int_equal(v.allow.n, 1);
    assert_string_equal(v.allow.items[0], "env");
    assert_int_equal(v.size, 4096);
    unsetenv("PROG_CONFIG");
    unsetenv("PROG_PORT");
    unsetenv("PROG_VERBOSE");
    unsetenv("PROG_ALLOW");
    unlink(path);
}

static void test_config_errors_name_the_line(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"port = 1\nprot = 2\n", ":2: unknown key `prot`; did you mean `port`?"},
        {"port\n", ":1: expected `name = value`"},
        {"port = 1\n\n# port\nport = 1", ":4: --port: given on line 1, too: choose one"},
        {"\n\nport = x", ":3: --port: `x` is not a number"},
    };
    char path[32];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct values v = {0};
        struct kv_error e = {0};

        write_config(path, cases[i].text);
        assert_int_equal(PARSE(&v, NULL, &e, "--config", path), -EINVAL);
        assert_memory_equal(e.text, path, strlen(path));
        assert_string_equal(e.text + strlen(path), cases[i].error);
        unlink(path);
        assert_int_equal(PARSE(&v, NULL, &e, "--config", path), -ENOENT);
        assert_int_equal(PARSE(&v, NULL, &e, "--config"), -EINVAL);
    }
}

static int n_warnings;
static char last_warning[200];

static void take_line(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    n_warnings += level == KV_LOG_WARN;
    snprintf(last_warning, sizeof(last_warning), "%.*s", (int)len, line);
}

static void test_unknown_variables_are_warned_of(void **state)
{
    struct values v = {0};

    (void)state;
    setenv("PROG_TIMEOUTS", "5s", 1);
    setenv("PROG_SERVICE_HOST", "10.0.0.1", 1); /* Kubernetes */
    setenv("PROG_PORT_8090_TCP", "tcp://10.0.0.1:8090", 1);
    setenv("PROG_MINE", "1", 1);
    setenv("PROGRAM", "1", 1);
    kv_log_set_sink(take_line, NULL);
    assert_int_equal(PARSE(&v, NULL, NULL, "--verbose"), 0);
    kv_log_set_sink(NULL, NULL);
    assert_int_equal(n_warnings, 1);
    assert_non_null(strstr(last_warning, "PROG_TIMEOUTS"));
    unsetenv("PROG_TIMEOUTS");
    unsetenv("PROG_SERVICE_HOST");
    unsetenv("PROG_PORT_8090_TCP");
    unsetenv("PROG_MINE");
    unsetenv("PROGRAM");
}

static void test_misspelt_variables(void **state)
{
    static const char *const words[] = {"LIBRARY_PATH", "REDIS_USER"};

    (void)state;
    setenv("KVT_LIBARY_PATH", "/plugins", 1);
    setenv("KVT_REDIS_USER", "me", 1);
    setenv("KVT_SWIFT_REGION", "here", 1); /* of somebody's plugin */
    n_warnings = 0;
    kv_log_set_sink(take_line, NULL);
    kv_args_warn_misspelt("prog", "KVT_", words, KV_COUNT(words));
    kv_log_set_sink(NULL, NULL);
    assert_int_equal(n_warnings, 1);
    assert_non_null(strstr(last_warning, "variable=KVT_LIBARY_PATH nearest=KVT_LIBRARY_PATH"));
    unsetenv("KVT_LIBARY_PATH");
    unsetenv("KVT_REDIS_USER");
    unsetenv("KVT_SWIFT_REGION");
}

static void test_man_and_words(void **state)
{
    static const struct {
        const char *word, *wanted;
    } cases[] = {{"--help-man", "prog \\- do things\n"},
                 {"--help-man", "\\fB\\-\\-max\\-body\\fR \\fISIZE\\fR\n"},
                 {"--help-options", "--max-body=\n"},
                 {"--help-options", "--verbose\n"},
                 {"--help-options", "--config=\n"},
                 {"-V", "prog "}};
    char line[512];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        FILE *file = printed(cases[i].word);
        bool found = false;

        while (fgets(line, sizeof(line), file)) {
            assert_null(strstr(line, "secret"));
            found = found || strncmp(line, cases[i].wanted, strlen(cases[i].wanted)) == 0;
        }
        if (!found)
            fail_msg("%s prints no line %s", cases[i].word, cases[i].wanted);
        fclose(file);
    }
}

static void test_nearest_word(void **state)
{
    static const char *const words[] = {"bench", "replay", "store"};

    (void)state;
    assert_string_equal(kv_args_nearest("stor", 4, words, 3), "store");
    assert_string_equal(kv_args_nearest("relpay", 6, words, 3), "replay");
    assert_null(kv_args_nearest("xyzzyplugh", 10, words, 3));
}

static void test_help_fits(void **state)
{
    char line[512];
    struct values v = {0};
    int saved = dup(1), lines = 0;
    FILE *file = tmpfile();

    (void)state;
    fflush(stdout);
    dup2(fileno(file), 1);
    assert_int_equal(PARSE(&v, NULL, NULL, "--help"), 1);
    assert_int_equal(PARSE(&v, NULL, NULL, "--version"), 1);
    fflush(stdout);
    dup2(saved, 1);
    close(saved);
    rewind(file);
    while (fgets(line, sizeof(line), file)) {
        if (strlen(line) > 81)
            fail_msg("too wide: %s", line);
        assert_null(strstr(line, "secret"));
        lines++;
    }
    assert_true(lines > 12);
    fclose(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_kinds),
        cmocka_unit_test(test_errors_teach),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_flags_in_words),
        cmocka_unit_test(test_empty_variables_are_unset),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_help_fits),
        cmocka_unit_test(test_config_comes_first),
        cmocka_unit_test(test_config_errors_name_the_line),
        cmocka_unit_test(test_unknown_variables_are_warned_of),
        cmocka_unit_test(test_misspelt_variables),
        cmocka_unit_test(test_man_and_words),
        cmocka_unit_test(test_nearest_word),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
