// SPDX-License-Identifier: Apache-2.0
/* Command lines: each line of the input is an argument; `NAME=value` lines before a line `--` go to
 * the environment. Accepted values are within the table's bounds; a refusal has a reason. */
#include <stdio.h>

#include "base/args/args.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct values {
    bool flag;
    const char *text, *level;
    struct kv_arg_list peers;
    uint64_t port, memory, wait;
};

#define ROW(field) offsetof(struct values, field)
static const struct kv_arg rows[] = {
    {.name = "Group", .type = KV_ARG_GROUP},
    {.name = "flag", .type = KV_ARG_FLAG, .offset = ROW(flag), .help = "A flag."},
    {.name = "text", .type = KV_ARG_STR, .offset = ROW(text), .value = "TEXT", .help = "Text."},
    {.name = "level",
     .type = KV_ARG_CHOICE,
     .offset = ROW(level),
     .value = "LEVEL",
     .help = "A choice.",
     .choices = "error|warn|info"},
    {.name = "peer", .type = KV_ARG_LIST, .offset = ROW(peers), .value = "URL", .help = "A list."},
    {.name = "port",
     .type = KV_ARG_U64,
     .offset = ROW(port),
     .value = "PORT",
     .help = "A number.",
     .min = 1,
     .max = 65535},
    {.name = "max-memory",
     .type = KV_ARG_SIZE,
     .offset = ROW(memory),
     .value = "SIZE",
     .help = "."},
    {.name = "wait-time",
     .type = KV_ARG_TIME,
     .offset = ROW(wait),
     .value = "TIME",
     .help = "A time.",
     .min = 10,
     .hidden = true},
};
static const struct kv_args_program program = {.name = "fuzz",
                                               .usage = "[OPTION ...]",
                                               .brief = "parse anything",
                                               .summary = "A program.",
                                               .env = "FUZZ",
                                               .args = rows,
                                               .n_args = KV_COUNT(rows)};

static void require(bool ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    require(freopen("/dev/null", "w", stdout) != NULL); /* --help */
    return 0;
}

static void check_numbers(const char *text)
{
    uint64_t value = 0, again;
    char back[32];

    if (kv_parse_u64(text, &value) == 0) {
        require(strtoull(text, NULL, 10) == value);
        snprintf(back, sizeof(back), "%llu", (unsigned long long)value);
        require(kv_parse_u64(back, &again) == 0 && again == value);
    }
    if (kv_parse_size(text, &value) == 0) {
        snprintf(back, sizeof(back), "%lluB", (unsigned long long)value);
        require(kv_parse_size(back, &again) == 0 && again == value);
    }
    if (kv_parse_time_ms(text, &value) == 0) {
        snprintf(back, sizeof(back), "%llums", (unsigned long long)value);
        require(kv_parse_time_ms(back, &again) == 0 && again == value);
    }
}

static void check_values(const struct values *values, const struct kv_arg_list *rest)
{
    require(values->port >= 1 && values->port <= 65535);
    require(values->wait >= 10);
    require(strcmp(values->level, "error") == 0 || strcmp(values->level, "warn") == 0 ||
            strcmp(values->level, "info") == 0);
    require(values->peers.n <= KV_ARG_LIST_MAX && rest->n <= KV_ARG_LIST_MAX);
    for (size_t i = 0; i < values->peers.n; i++)
        require(values->peers.items[i] != NULL);
    for (size_t i = 0; i < rest->n; i++)
        require(rest->items[i] != NULL);
}

static const char *const environment[] = {"FUZZ_FLAG",     "FUZZ_TEXT", "FUZZ_LEVEL",
                                          "FUZZ_PEER",     "FUZZ_PORT", "FUZZ_MAX_MEMORY",
                                          "FUZZ_WAIT_TIME"};

/* Set the variables of `FUZZ_NAME=value` lines at the front. Returns the index of the first other
 * line. */
static int set_environment(char **lines, int n)
{
    int i = 0;

    for (size_t k = 0; k < KV_COUNT(environment); k++)
        unsetenv(environment[k]);
    for (; i < n; i++) {
        bool known = false;

        for (size_t k = 0; k < KV_COUNT(environment); k++) {
            size_t len = strlen(environment[k]);

            if (strncmp(lines[i], environment[k], len) == 0 && lines[i][len] == '=') {
                setenv(environment[k], lines[i] + len + 1, 1);
                known = true;
            }
        }
        if (!known)
            break;
    }
    return i;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct values values = {.level = "info", .port = 8090, .wait = 1000};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {.code = 0};
    char text[4096], *lines[200], *save = NULL;
    char *argv[KV_COUNT(lines) + 2] = {(char[]){"fuzz"}};
    int n = 0, argc = 1, rc;

    if (size >= sizeof(text))
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *line = strtok_r(text, "\n", &save); line && n < (int)KV_COUNT(lines);
         line = strtok_r(NULL, "\n", &save))
        lines[n++] = line;
    for (int i = 0; i < n; i++)
        check_numbers(lines[i]);
    for (int i = set_environment(lines, n); i < n; i++)
        argv[argc++] = lines[i];
    rc = kv_args_parse(&program, argc, argv, &values, data && size % 2 ? &rest : NULL, &error);
    require(rc == 0 || rc == 1 || (rc == -EINVAL && error.code == rc && error.text[0] != '\0'));
    if (rc == 0)
        check_values(&values, &rest);
    return 0;
}
