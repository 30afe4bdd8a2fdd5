// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file/beneath.h"
#include "skip.h"

enum { NOBODY = 65534 };

static char dir[64];
static int at = -1;

static void put_file(int where, const char *path, const char *text)
{
    int fd = openat(where, path, O_WRONLY | O_CREAT | O_EXCL, 0666);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

/*
 *   victim            a file outside            in/file  in/sub/file
 *   in/out -> ..      in/sub/up -> ../../victim          in/link -> file
 */
static int set_up(void **state)
{
    int top;

    (void)state;
    if (temp_dir(dir, sizeof(dir)) < 0 || chmod(dir, 0755) < 0)
        return -1;
    top = open(dir, O_RDONLY | O_DIRECTORY);
    put_file(top, "victim", "victim");
    assert_int_equal(mkdirat(top, "in", 0777), 0);
    at = openat(top, "in", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    close(top);
    put_file(at, "file", "bytes");
    assert_int_equal(mkdirat(at, "sub", 0777), 0);
    put_file(at, "sub/file", "more");
    assert_int_equal(symlinkat("..", at, "out"), 0);
    assert_int_equal(symlinkat("../../victim", at, "sub/up"), 0);
    assert_int_equal(symlinkat("file", at, "link"), 0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    close(at);
    return remove_dir(dir);
}

static void expect(int want, const char *path, int flags)
{
    int (*const ways[])(int, const char *, int, mode_t) = {kv_beneath_open, kv_beneath_steps};

    for (size_t i = 0; i < 2; i++) {
        int fd = ways[i](at, path, flags, 0666), rc = fd < 0 ? fd : 0;

        if (rc != want)
            fail_msg("way %zu, \"%s\" flags %#x: %d, not %d", i, path, flags, rc, want);
        if (fd >= 0) {
            assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
            close(fd);
        }
    }
}

static void test_both_ways(void **state)
{
    char deep[600] = "";

    (void)state;
    expect(0, "file", O_RDONLY);
    expect(0, "./file", O_RDONLY);
    expect(0, "sub/file", O_RDONLY);
    expect(0, "sub//file", O_RDWR);
    expect(0, "sub/.", O_RDONLY | O_DIRECTORY);
    expect(0, ".", O_RDONLY | O_DIRECTORY);
    expect(0, "sub/new", O_RDWR | O_CREAT);
    expect(-EEXIST, "sub/new", O_RDWR | O_CREAT | O_EXCL);
    expect(-ENOENT, "", O_RDONLY);
    expect(-ENOENT, "none", O_RDONLY);
    expect(-ENOENT, "none/file", O_RDONLY);
    expect(-ENOTDIR, "file/x", O_RDONLY);
    expect(-ENOTDIR, "file", O_RDONLY | O_DIRECTORY);
    expect(-EISDIR, "sub", O_WRONLY);
    expect(-ELOOP, "link", O_RDONLY);
    expect(-ELOOP, "link", O_RDWR | O_CREAT);
    expect(-ELOOP, "out", O_RDONLY | O_DIRECTORY);
    expect(-ELOOP, "out/victim", O_RDWR);
    expect(-ELOOP, "sub/up", O_RDWR | O_TRUNC);
    expect(-EXDEV, "..", O_RDONLY);
    expect(-EXDEV, "../victim", O_RDONLY);
    expect(-EXDEV, "/etc/hostname", O_RDONLY);
    for (int i = 0; i < 100; i++)
        strcat(deep, "sub/.");
    expect(-ENOENT, deep, O_RDONLY); /* "sub/.sub" */
}

/* A number of symbolic links, "..", and names, at random: both ways say the same. */
static void test_random_paths(void **state)
{
    static const char *const parts[] = {"sub", "file", "out", "link", "up", ".", "none", ""};
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t i = 0; i < unit_rounds(3000); i++) {
        char path[128] = "";
        int a, b;

        for (size_t n = 1 + unit_below(&seed, 4); n > 0; n--) {
            strcat(path, parts[unit_below(&seed, 8)]);
            if (n > 1)
                strcat(path, "/");
        }
        a = kv_beneath_open(at, path, O_RDONLY, 0);
        b = kv_beneath_steps(at, path, O_RDONLY, 0);
        if ((a < 0 ? a : 0) != (b < 0 ? b : 0))
            fail_msg("\"%s\": %d and %d", path, a, b);
        if (a >= 0)
            close(a);
        if (b >= 0)
            close(b);
    }
}

static int open_file(const char *path, int flags, unsigned allow)
{
    int fd = kv_beneath_file(at, path, flags, 0666, allow, NULL);

    if (fd < 0)
        return fd;
    assert_int_equal(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    close(fd);
    return 0;
}

static void test_types(void **state)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct stat st;

    (void)state;
    assert_int_equal(mkfifoat(at, "fifo", 0666), 0);
    snprintf(name.sun_path, sizeof(name.sun_path), "%s/in/socket", dir);
    assert_int_equal(bind(s, (struct sockaddr *)&name, sizeof(name)), 0);
    close(s);
    assert_int_equal(open_file("file", O_RDWR, 0), 0);
    assert_int_equal(open_file("made", O_RDWR | O_CREAT, 0), 0);
    assert_int_equal(open_file("sub/file", O_RDONLY, 0), 0);
    assert_int_equal(open_file("sub", O_RDONLY, 0), -EISDIR);
    assert_int_equal(open_file("sub", O_RDWR, 0), -EISDIR);
    assert_int_equal(open_file("fifo", O_RDONLY, 0), -ENXIO);
    assert_int_equal(open_file("fifo", O_WRONLY, 0), -ENXIO);
    assert_int_equal(open_file("fifo", O_RDWR | O_CREAT, 0), -ENXIO);
    assert_int_equal(open_file("socket", O_RDWR, 0), -ENXIO);
    assert_int_equal(open_file("link", O_RDWR | O_TRUNC, 0), -ELOOP);
    assert_int_equal(fstatat(at, "file", &st, 0), 0);
    assert_int_equal(st.st_size, 5);
}

/* A file with another name may be anybody's: it isn't emptied on the way to finding out. */
static void test_links(void **state)
{
    struct stat st;
    int fd;

    (void)state;
    assert_int_equal(linkat(at, "../victim", at, "hard", 0), 0);
    assert_int_equal(open_file("hard", O_RDWR | O_CREAT | O_TRUNC, 0), -EMLINK);
    assert_int_equal(fstatat(at, "hard", &st, 0), 0);
    assert_int_equal(st.st_size, 6);
    assert_int_equal(open_file("hard", O_RDONLY, KV_BENEATH_ANY_LINKS), 0);
    fd = kv_beneath_file(at, "sub/file", O_RDWR | O_TRUNC, 0, 0, &st);
    assert_true(fd >= 0);
    assert_int_equal(st.st_size, 4);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 0);
    close(fd);
}

static void test_owners(void **state)
{
    (void)state;
    if (geteuid() != 0)
        skip_because("only root can give files away");
    assert_int_equal(fchownat(at, "file", NOBODY, NOBODY, 0), 0);
    assert_int_equal(open_file("file", O_RDWR, 0), -EPERM);
    assert_int_equal(open_file("file", O_RDWR, KV_BENEATH_ANY_OWNER), 0);
    assert_int_equal(fchownat(at, "sub", NOBODY, NOBODY, 0), 0);
    assert_int_equal(fchownat(at, "sub/file", NOBODY, NOBODY, 0), 0);
    assert_int_equal(open_file("sub/file", O_RDWR, 0), 0); /* all of that directory is theirs */
    assert_int_equal(fchownat(at, "sub/file", NOBODY - 1, NOBODY, 0), 0);
    assert_int_equal(open_file("sub/file", O_RDWR, 0), -EPERM);
}

static void test_directories(void **state)
{
    bool made = false;
    int fd;

    (void)state;
    assert_int_equal(kv_beneath_dir(at, "fresh", 0, &made), -ENOENT);
    assert_false(made);
    fd = kv_beneath_dir(at, "fresh", 0777, &made);
    assert_true(fd >= 0 && made);
    close(fd);
    made = false;
    fd = kv_beneath_dir(at, "fresh", 0777, &made);
    assert_true(fd >= 0 && !made);
    close(fd);
    assert_int_equal(kv_beneath_dir(at, "out", 0777, &made), -ELOOP);
    assert_int_equal(symlinkat("nowhere", at, "dangling"), 0);
    assert_int_equal(kv_beneath_dir(at, "dangling", 0777, &made), -ELOOP);
    assert_int_equal(kv_beneath_dir(at, "file", 0777, &made), -ENOTDIR);
    assert_false(made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_both_ways, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_random_paths, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_types, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_links, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_owners, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_directories, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
