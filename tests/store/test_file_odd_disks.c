// SPDX-License-Identifier: Apache-2.0
/* File systems that can't sync a directory, have no locks, or show a lock to one host only. */
#include "base/odd_disk.h"
#include "store/file_unit.h"

static uint8_t blob[300000];

/* Everything that syncs a directory: new folders, chunks, manifests, notes, deletions. */
static void use_all(kv_store_v1 *h)
{
    uint8_t key[8];

    for (uint64_t n = 0; n < 10; n++) {
        assert_int_equal(unit_put(h, n, blob, 1000 + n), 0);
        assert_int_equal(unit_publish(h, "opaque", "x"), 0);
    }
    assert_int_equal(unit_publish_own(h, "own"), 0);
    assert_int_equal(kvs_file_ext()->flush(h), 0);
    unit_key(key, 1);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, sizeof(key)), 0);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "own"), 0);
    for (uint64_t n = 2; n < 10; n++)
        assert_int_equal(unit_get(h, n, blob, 1000 + n), 0);
}

static void directories_that_cannot_be_synced(void **state)
{
    static const int errors[] = {EINVAL, ENOTSUP, ENOSYS};
    static const char *const options[] = {"?sync=files", "?sync=files&sums=files", "?sync=fs",
                                          "?sync=auto"};
    char name[64], dir[128], again[64];
    (void)state;

    memcpy(dir, unit_dir, sizeof(dir));
    for (size_t i = 0; i < KV_COUNT(errors); i++)
        for (size_t k = 0; k < KV_COUNT(options); k++) {
            kv_store_v1 *h;

            snprintf(unit_dir, sizeof(unit_dir), "%.90s/n%zu-%zu", dir, i, k); /* made by open */
            dir_sync_error = errors[i];
            no_lines();
            h = unit_open(options[k]);
            use_all(h);
            assert_int_equal(n_lines, 1);
            assert_non_null(strstr(lines, "fsync"));
            assert_non_null(strstr(lines, "power cut"));
            snprintf(name, sizeof(name), "n%zu-%zu", i, k);
            assert_non_null(strstr(lines, name));
            kvs_file_vtable()->close(h);
            dir_sync_error = 0;
            snprintf(again, sizeof(again), "%s&create=no", options[k]);
            h = unit_open(again);
            assert_int_equal(unit_get(h, 5, blob, 1005), 0);
            kvs_file_vtable()->close(h);
        }
    memcpy(unit_dir, dir, sizeof(dir));
}

/* A sync that fails is a failure, as everywhere. */
static void directories_whose_sync_fails(void **state)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT};
    kv_store_v1 *h = unit_open("?sync=files");
    (void)state;

    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        assert_int_equal(unit_put(h, i, blob, 3000), 0);
        dir_sync_error = errors[i];
        assert_int_equal(unit_publish(h, "m", "x"), -errors[i]);
        dir_sync_error = 0;
        assert_int_equal(unit_publish(h, "m", "x"), 0);
    }
    kvs_file_vtable()->close(h);
}

static void no_locks(void **state)
{
    static const int errors[] = {ENOSYS, ENOLCK, EOPNOTSUPP, 0};
    (void)state;

    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        kv_store_v1 *h, *other;
        int before;

        flock_error = errors[i];
        flock_excludes_nobody = !errors[i];
        no_lines();
        h = unit_open("");
        assert_int_equal(n_lines, 1);
        assert_non_null(strstr(lines, "locks"));
        assert_non_null(strstr(lines, unit_dir));
        assert_int_equal(unit_put(h, 100 + i, blob, 2000), 0);
        before = unit_count(".kvasir/tmp");
        other = unit_open(""); /* can't know that the other handle lives */
        assert_int_equal(unit_count(".kvasir/tmp"), before);
        assert_int_equal(unit_count(".kvasir/writers"), 2);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_get(other, 100 + i, blob, 2000), 0);
        kvs_file_vtable()->close(other);
        kvs_file_vtable()->close(h);
        flock_error = 0;
        flock_excludes_nobody = false;
    }
}

/* -- Two hosts ---------------------------------------------------------------------------------- */

static void make_file(const char *folder, const char *name)
{
    char path[400];

    snprintf(path, sizeof(path), "%s/.kvasir/%s/%s", unit_dir, folder, name);
    unit_write(path, "", strcmp(folder, "tmp") == 0);
}

/* Files of a writer whose flock nobody here sees; @id: its name. */
static void make_writer(const char *id)
{
    char name[40];

    make_file("writers", id);
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof(name), "%s.%d%s", id, i, i ? ".s" : "");
        make_file("tmp", name);
    }
}

/* The name of a living writer of this host, with hex digit @at changed. */
static void other_id(char ret[17], const kv_store_v1 *h, int at)
{
    memcpy(ret, h->writer, 17);
    ret[at] = ret[at] == '7' ? '8' : '7';
}

static void files_of_another_host_stay(void **state)
{
    kv_store_v1 *h = unit_open(""), *tool;
    char host[17], mount[17], reboot[17], same[17];
    (void)state;

    other_id(host, h, 0); /* another boot of another machine */
    host[6] = host[6] == '7' ? '8' : '7';
    other_id(mount, h, 11);          /* the same boot, the file system mounted once more */
    other_id(reboot, h, 0);          /* this machine before it was started again */
    other_id(same, h, 15);           /* a process here that has ended */
    make_writer("0123456789abcdef"); /* of a host, a boot and a mount that nobody here knows */
    make_writer(host);
    make_writer(mount);
    make_writer(reboot);
    make_writer(same);
    tool = unit_open("?create=no");                     /* kvasir store ls */
    assert_int_equal(unit_count(".kvasir/writers"), 5); /* both handles, and three */
    assert_int_equal(unit_count(".kvasir/tmp"), 6);
    kvs_file_vtable()->close(tool);
    tool = unit_open("");
    tool->born_s += KVS_FILE_FOREIGN_S - 100;
    kvs_file_sweep_writers(tool);
    assert_int_equal(unit_count(".kvasir/tmp"), 6);
    tool->born_s += 200; /* a week without a change */
    kvs_file_sweep_writers(tool);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/writers"), 2);
    kvs_file_vtable()->close(tool);
    kvs_file_vtable()->close(h);
}

/* A living writer of another host, whose file has gone old: what it makes stays, and it goes on. */
static void a_writer_that_was_taken_for_dead(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    char path[400], id[17];
    (void)state;

    assert_int_equal(unit_put(h, 500, blob, 2000), 0);
    memcpy(id, h->writer, sizeof(id));
    snprintf(path, sizeof(path), "%s/.kvasir/writers/%s", unit_dir, id);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(unit_get(other, 500, blob, 2000), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/writers"), 0);
}

static int setup(void **state)
{
    int rc = unit_make_dir(state);

    kv_log_set_sink(keep_odd_lines, NULL);
    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)(i * 7 + i / 256);
    return rc;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(directories_that_cannot_be_synced),
        cmocka_unit_test(directories_whose_sync_fails),
        cmocka_unit_test(no_locks),
        cmocka_unit_test(files_of_another_host_stay),
        cmocka_unit_test(a_writer_that_was_taken_for_dead),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
