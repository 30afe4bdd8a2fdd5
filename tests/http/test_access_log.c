// SPDX-License-Identifier: Apache-2.0
/* The access log in a file that may not grow, as on a full disk, and later may again. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/core/log.h"
#include "http/access_log.h"
#include "support.h"

#define FULL 1000 /* bytes of the file when the disk is full; more than six lines */
#define LINES 20

struct file {
    char path[40];
    char text[16384];
    unsigned whole, broken; /* lines */
};

static void look(struct file *f)
{
    FILE *file = fopen(f->path, "r");

    f->whole = f->broken = 0;
    assert_non_null(file);
    while (fgets(f->text, sizeof(f->text), file)) {
        bool whole = strncmp(f->text, "{\"ts\":", 6) == 0 && strstr(f->text, "}\n") &&
                     !strstr(f->text + 1, "{\"ts\":");

        f->whole += whole;
        f->broken += !whole;
    }
    fclose(file);
}

static void allow_bytes(rlim_t bytes)
{
    struct rlimit limit;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = KV_MIN(bytes, limit.rlim_max);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void put(struct kh_access_log *log, int n)
{
    struct kh_access access = {.method = "GET", .path = "/health", .status = 200};

    while (n--)
        kh_access_log_put(log, &access);
}

static bool all_told(struct kh_access_log *log, struct file *f, unsigned n)
{
    uint64_t dropped = kh_access_log_dropped(log);

    look(f);
    return f->whole + dropped == n;
}

/* Wait until each of @n lines is in the file or counted as dropped. */
static void wait_for(struct kh_access_log *log, struct file *f, unsigned n)
{
    wait_until(all_told(log, f, n));
}

static void open_file(struct file *f)
{
    int fd;

    snprintf(f->path, sizeof(f->path), "/tmp/kv-access-log-XXXXXX");
    fd = mkstemp(f->path);
    assert_true(fd >= 0);
    close(fd);
}

static void a_full_disk_breaks_one_line(void **state)
{
    struct kh_access_log *log;
    struct kv_error error;
    struct file f;
    unsigned before;

    (void)state;
    kv_log_set_level(KV_LOG_ERROR);
    open_file(&f);
    allow_bytes(FULL);
    assert_int_equal(kh_access_log_open(f.path, &log, &error), 0);
    put(log, LINES);
    wait_for(log, &f, LINES);
    assert_in_range(f.whole, 1, LINES - 1);
    assert_int_equal(f.broken, 1);
    before = f.whole;
    allow_bytes(RLIM_INFINITY);
    put(log, 3);
    wait_for(log, &f, LINES + 3);
    assert_int_equal(f.whole, before + 3);
    assert_int_equal(f.broken, 1);
    kh_access_log_close(log);
    unlink(f.path);
}

/* A new file begins with a line, and a line that an earlier process broke off ends first. */
static void files_begin_with_a_line(void **state)
{
    struct kh_access_log *log;
    struct kv_error error;
    struct file f, old;

    (void)state;
    open_file(&f);
    allow_bytes(FULL);
    assert_int_equal(kh_access_log_open(f.path, &log, &error), 0);
    put(log, LINES);
    wait_for(log, &f, LINES);
    allow_bytes(RLIM_INFINITY);
    old = f;
    snprintf(old.path, sizeof(old.path), "%.30s.1", f.path);
    assert_int_equal(rename(f.path, old.path), 0);
    assert_int_equal(kh_access_log_reopen(log, &error), 0);
    put(log, 1);
    kh_access_log_close(log);
    look(&f);
    assert_int_equal(f.whole, 1);
    assert_int_equal(f.broken, 0);
    /* The old one again, by another process. */
    look(&old);
    assert_int_equal(old.broken, 1);
    assert_int_equal(kh_access_log_open(old.path, &log, &error), 0);
    put(log, 1);
    kh_access_log_close(log);
    f.whole = old.whole + 1;
    look(&old);
    assert_int_equal(old.whole, f.whole);
    assert_int_equal(old.broken, 1);
    unlink(f.path);
    unlink(old.path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_disk_breaks_one_line),
        cmocka_unit_test(files_begin_with_a_line),
    };

    signal(SIGXFSZ, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
