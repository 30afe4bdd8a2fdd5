// SPDX-License-Identifier: Apache-2.0
/*
 * Configuration files. An accepted file gives values within the ranges of the table; a refused one
 * gives an error that names the file.
 */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/args/args.h"
#include "require.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct values {
    bool flag;
    const char *text, *choice;
    struct kv_arg_list list;
    uint64_t number, bytes, time;
};

#define ROW(n, t, field) .name = (n), .type = (t), .offset = offsetof(struct values, field)
static const struct kv_arg rows[] = {
    {.name = "Group", .type = KV_ARG_GROUP},
    {ROW("flag", KV_ARG_FLAG, flag)},
    {ROW("text", KV_ARG_STR, text)},
    {ROW("choice", KV_ARG_CHOICE, choice), .choices = "a|bc|d"},
    {ROW("list", KV_ARG_LIST, list)},
    {ROW("a-number", KV_ARG_U64, number), .max = 65535},
    {ROW("bytes", KV_ARG_SIZE, bytes), .min = 10, .max = 1 << 30},
    {ROW("time", KV_ARG_TIME, time)},
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct kv_args_program program = {
        .name = "fuzz", .args = rows, .n_args = KV_COUNT(rows), .config = true};
    struct values v = {.bytes = 10};
    struct kv_error error = {0};
    int fd = memfd_create("config", MFD_CLOEXEC), rc;
    char path[64], option[] = "--config";
    char *argv[] = {(char *)"fuzz", option, path, NULL};

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        return -1;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    rc = kv_args_parse(&program, 3, argv, &v, NULL, &error);
    if (rc < 0) {
        REQUIRE(rc == -EINVAL || rc == -EFBIG);
        REQUIRE(strstr(error.text, path) != NULL);
    } else {
        REQUIRE(v.number <= 65535 && v.bytes >= 10 && v.bytes <= 1 << 30);
        REQUIRE(v.list.n <= KV_ARG_LIST_MAX);
        REQUIRE(!v.choice || strstr("a|bc|d", v.choice));
    }
    kv_args_free_config();
    close(fd);
    return 0;
}
