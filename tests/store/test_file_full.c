// SPDX-License-Identifier: Apache-2.0
/* A file system without room for more files (injected ENOSPC, EDQUOT): stored objects can be read
 * and deleted, and a handle writes again once there is room. tests/e2e/test_store_full.py has real
 * ones. */
#include "base/odd_disk.h"
#include "file_unit.h"

static _Atomic int refusal; /* the errno of whatever would make a file or folder */

int openat(int at, const char *path, int flags, ...)
{
    int (*real)(int, const char *, int, ...) =
        (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat");
    mode_t mode = 0;
    va_list args;

    va_start(args, flags);
    if (flags & (O_CREAT | O_TMPFILE))
        mode = va_arg(args, mode_t);
    va_end(args);
    if ((flags & O_CREAT) && atomic_load(&refusal)) {
        errno = atomic_load(&refusal);
        return -1;
    }
    return real(at, path, flags, mode);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    int (*real)(int, const char *, mode_t) =
        (int (*)(int, const char *, mode_t))dlsym(RTLD_NEXT, "mkdirat");

    if (atomic_load(&refusal)) {
        errno = atomic_load(&refusal);
        return -1;
    }
    return real(at, path, mode);
}

static uint8_t blob[5000];

static void make_store(void)
{
    kv_store_v1 *h = unit_open("");

    for (uint64_t i = 0; i < 8; i++)
        assert_int_equal(unit_put(h, i, blob, sizeof(blob) - i), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    kvs_file_vtable()->close(h);
}

static void check_full(int error, const char *missing)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    char path[512];
    uint8_t key[8];
    kv_store_v1 *h;

    make_store();
    if (missing) {
        snprintf(path, sizeof(path), "%s/%s", unit_dir, missing);
        assert_int_equal(rmdir(path), 0);
    }
    atomic_store(&refusal, error);
    h = unit_open("");
    for (uint64_t i = 0; i < 8; i++)
        assert_int_equal(unit_get(h, i, blob, sizeof(blob) - i), 0);
    assert_int_equal(unit_put(h, 100, blob, 100), -error);
    assert_int_equal(unit_publish(h, "n", "x"), -error);
    unit_key(key, 0);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, 8), 0);
    assert_int_equal(unit_get(h, 0, blob, 0), -ENOENT);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "m"), 0);
    assert_int_equal(kvs_file_ext()->sweep_chunks(h, 0, NULL, NULL, &swept), 0);
    assert_int_equal(swept.deleted, 7);
    atomic_store(&refusal, 0);
    if (missing) { /* a folder is made by the next open */
        assert_int_equal(unit_put(h, 100, blob, 100), -error);
        kvs_file_vtable()->close(h);
        h = unit_open("");
    }
    assert_int_equal(unit_put(h, 100, blob, 100), 0);
    assert_int_equal(unit_publish(h, "n", "x"), 0);
    assert_int_equal(unit_get(h, 100, blob, 100), 0);
    unit_key(key, 100);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, 8), 0);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/writers"), 0);
}

static void no_room_for_a_writer(void **state)
{
    (void)state;
    check_full(ENOSPC, NULL);
    check_full(EDQUOT, NULL);
}

static void no_room_for_a_folder(void **state)
{
    (void)state;
    check_full(ENOSPC, ".kvasir/bad");
    check_full(EDQUOT, ".kvasir/sums");
}

/* Other errors say what they are, and nothing is deleted through such a handle. */
static void no_permission(void **state)
{
    uint8_t key[8];
    kv_store_v1 *h;

    (void)state;
    make_store();
    atomic_store(&refusal, EACCES);
    h = unit_open("");
    assert_int_equal(unit_put(h, 100, blob, 100), -EACCES);
    assert_int_equal(unit_publish(h, "n", "x"), -EACCES);
    unit_key(key, 0);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, 8), -EACCES);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "m"), -EACCES);
    kvs_file_vtable()->close(h);
    atomic_store(&refusal, EMFILE); /* of this process: nothing can be said of the store */
    assert_null(kvs_file_vtable()->open(unit_dir));
    assert_int_equal(errno, EMFILE);
    atomic_store(&refusal, 0);
}

/* A folder that is replaced by one which can't be written to is not made again, and the log doesn't say
 * that it was. Once it can, puts work. */
static void replaced_by_what_refuses(void **state)
{
    char command[700];
    kv_store_v1 *h;
    (void)state;

    snprintf(command, sizeof(command), "rm -rf '%s'; mkdir '%s'", unit_dir, unit_dir);
    h = unit_open("");
    assert_int_equal(system(command), 0);
    no_lines();
    kv_log_set_sink(keep_odd_lines, NULL);
    atomic_store(&refusal, EACCES);
    assert_int_equal(unit_put(h, 100, blob, 100), -EACCES);
    assert_non_null(strstr(lines, "can't be made again"));
    atomic_store(&refusal, 0);
    kv_log_set_sink(NULL, NULL);
    kvs_file_vtable()->close(h);
}

static int setup(void **state)
{
    memset(blob, 'b', sizeof(blob));
    return unit_make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_room_for_a_writer),
        cmocka_unit_test(no_room_for_a_folder),
        cmocka_unit_test(no_permission),
        cmocka_unit_test(replaced_by_what_refuses),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
