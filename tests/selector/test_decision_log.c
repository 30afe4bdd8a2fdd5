// SPDX-License-Identifier: Apache-2.0
/* The decision log where its disk is full: no line is cut, and none is lost once there is room. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/unit.h"
#include "selector/decision_log.h"

/* Let files grow to @size. Returns the limit there was. */
static rlim_t limit_files(rlim_t size)
{
    struct rlimit limit;
    rlim_t before;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    before = limit.rlim_cur;
    limit.rlim_cur = size;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    return before;
}

static void put(struct ksel_log *log, const char *event)
{
    ksel_log_event(log, event, "a", 1);
}

static size_t read_all(int fd, char *ret, size_t size)
{
    ssize_t n = read(fd, ret, size - 1);

    assert_true(n > 0);
    ret[n] = '\0';
    return (size_t)n;
}

/* Check that @text is two lines, of these events. */
static void expect_lines(const char *text, const char *first, const char *second)
{
    char head[32];
    const char *end = strchr(text, '\n');

    assert_non_null(end);
    snprintf(head, sizeof(head), "{\"event\":\"%s\"", first);
    assert_memory_equal(text, head, strlen(head));
    snprintf(head, sizeof(head), "{\"event\":\"%s\"", second);
    assert_memory_equal(end + 1, head, strlen(head));
    assert_ptr_equal(strchr(end + 1, '\n'), text + strlen(text) - 1);
}

static void test_full_disk(void **state)
{
    char path[] = "/tmp/kv-decisions-XXXXXX", text[1024];
    int fd = mkstemp(path);
    struct ksel_log *log;
    struct kv_error error;
    rlim_t before;

    (void)state;
    assert_true(fd >= 0);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(ksel_log_open(path, 1, &log, &error), 0);
    put(log, "first");
    before = limit_files((rlim_t)lseek(fd, 0, SEEK_END) + 20);
    put(log, "second");
    put(log, "third");
    limit_files(before);
    put(log, "fourth");
    assert_int_equal(ksel_log_dropped(log), 2);
    ksel_log_close(log);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    read_all(fd, text, sizeof(text));
    expect_lines(text, "first", "fourth");
    close(fd);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_full_disk)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
