// SPDX-License-Identifier: Apache-2.0
/* Libraries that are opened on first use: found in each place, and refused with one log line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/module/module.h"
#include "base/unit.h"
#include "peer/module/tls_abi.h"

static const struct kv_module tls = {
    .component = "kvbm",
    .library = KVBM_TLS_LIBRARY,
    .variable = "KV_TEST_LIBRARY",
    .symbol = KVBM_TLS_SYMBOL,
    .missing = "nothing works",
    .head = {sizeof(struct kvbm_tls_abi), KVBM_TLS_ABI},
};

static char line[1024];
static unsigned n_lines;

static void keep_line(void *arg, int level, const char *text)
{
    (void)arg, (void)level;
    snprintf(line, sizeof(line), "%s", text);
    n_lines++;
}

static void refuses(const struct kv_module *module, const char *why)
{
    n_lines = 0;
    assert_null(kv_module_open(module));
    assert_int_equal(n_lines, 1);
    assert_non_null(strstr(line, "nothing works"));
    assert_non_null(strstr(line, why));
}

/* The library of this build, in ../lib beside this program. */
static void test_beside(void **state)
{
    const struct kv_module_head *head;

    (void)state;
    unsetenv(tls.variable);
    n_lines = 0;
    head = kv_module_open(&tls);
    assert_non_null(head);
    assert_int_equal(head->size, sizeof(struct kvbm_tls_abi));
    assert_int_equal(n_lines, 0);
    assert_ptr_equal(kv_module_open(&tls), head);
}

/* Run this program as a shell that found it in PATH does, or one that lies about where it is. */
static void starts_as(const char *argv0)
{
    int status = -1;
    pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0) {
        execl("/proc/self/exe", argv0, "open", (char *)NULL);
        _exit(126);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* The program's place on the disk counts, whatever its caller says that it is called. */
static void test_names_of_the_program(void **state)
{
    (void)state;
    unsetenv(tls.variable);
    starts_as("kvasir");
    starts_as("/nonexistent/bin/kvasir");
    starts_as("");
}

/* The variable decides alone: a wrong path isn't made good by a library elsewhere. */
static void test_variable(void **state)
{
    (void)state;
    setenv(tls.variable, "/nonexistent/" KVBM_TLS_LIBRARY, 1);
    refuses(&tls, "/nonexistent/");
    setenv(tls.variable, "libc.so.6", 1); /* opens, and has no table */
    refuses(&tls, "another version");
    setenv(tls.variable, "", 1); /* counts as unset */
    assert_non_null(kv_module_open(&tls));
    unsetenv(tls.variable);
}

static void test_other_builds(void **state)
{
    struct kv_module module = tls;

    (void)state;
    module.head.size += 8;
    refuses(&module, "another version");
    module = tls;
    module.head.abi++;
    refuses(&module, "another version");
    module = tls;
    module.symbol = "kvbm_nothing_get_abi";
    refuses(&module, "another version");
    module = tls;
    module.library = "libkvbm_nothing.so.0";
    refuses(&module, "libkvbm_nothing.so.0");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside),
        cmocka_unit_test(test_names_of_the_program),
        cmocka_unit_test(test_variable),
        cmocka_unit_test(test_other_builds),
    };

    if (argc == 2 && strcmp(argv[1], "open") == 0)
        return !kv_module_open(&tls);
    kv_log_set_user(keep_line, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
