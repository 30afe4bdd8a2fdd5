// SPDX-License-Identifier: Apache-2.0
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file/room.h"
#include "skip.h"

static int file_of(const char *text)
{
    char path[] = "/tmp/kv-room-XXXXXX";
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    unlink(path);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    return fd;
}

static off_t size_of(int fd)
{
    struct stat st;

    assert_int_equal(fstat(fd, &st), 0);
    return st.st_size;
}

static void test_reserve(void **state)
{
    char text[6] = {0};
    int fd = file_of("bytes");

    (void)state;
    assert_int_equal(kv_room_reserve(fd, 100000, "test"), 0);
    assert_int_equal(size_of(fd), 100000);
    assert_int_equal(kv_room_reserve(fd, 50000, "test"), 0); /* never smaller */
    assert_int_equal(size_of(fd), 100000);
    assert_int_equal(pread(fd, text, 5, 0), 5);
    assert_string_equal(text, "bytes");
    close(fd);
}

static void test_too_large(void **state)
{
    int fd = file_of("bytes"), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    struct statvfs fs;

    (void)state;
    assert_int_equal(fstatvfs(fd, &fs), 0);
    if (!fs.f_blocks)
        skip_because("the file system of /tmp doesn't say how large it is");
    assert_int_equal(kv_room_for(fd, 1), 0);
    assert_int_equal(kv_room_for(fd, UINT64_MAX), -ENOSPC);
    assert_int_equal(kv_room_for(fd, (uint64_t)fs.f_blocks * fs.f_frsize + fs.f_frsize), -ENOSPC);
    assert_int_equal(kv_room_reserve(fd, (uint64_t)fs.f_blocks * fs.f_frsize * 2, "test"), -ENOSPC);
    assert_int_equal(size_of(fd), 5);
    assert_int_equal(kv_room_reserve(fd, UINT64_MAX, "test"), -EFBIG);
    assert_true(kv_room_reserve(null, 10, "test") < 0);
    assert_int_equal(kv_room_for(-1, 1), 0); /* whoever uses it will be told */
    close(fd);
    close(null);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_reserve),
                                       cmocka_unit_test(test_too_large)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
