// SPDX-License-Identifier: Apache-2.0
/* Directory reads and looks at files that fail: nothing that is there may count as missing. These
 * definitions replace libc's in the whole program. */
#include <dlfcn.h>

#include "kv_store.h"
#include "store/file_unit.h"

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static ino_t unreadable;     /* directory whose reads fail after the first entries; 0: none */
static int readable_entries; /* how many those are */
static char bad_stat[KVS_FILE_NAME];

struct dirent *readdir(DIR *dir)
{
    struct stat st;

    if (unreadable && fstat(dirfd(dir), &st) == 0 && st.st_ino == unreadable &&
        readable_entries-- <= 0) {
        errno = EIO;
        return NULL;
    }
    return REAL(struct dirent *, readdir, (DIR *))(dir);
}

int fstatat(int at, const char *name, struct stat *ret, int flags)
{
    if (*bad_stat && strcmp(bad_stat, name) == 0) {
        errno = EIO;
        return -1;
    }
    return REAL(int, fstatat, (int, const char *, struct stat *, int))(at, name, ret, flags);
}

/* Let reads of a folder of the store fail after @n entries. */
static void fail_reads(const char *folder, int n)
{
    char path[512];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", unit_dir, folder);
    assert_int_equal(stat(path, &st), 0);
    readable_entries = n;
    unreadable = st.st_ino;
}

static struct kvs_store *open_with_objects(void)
{
    struct kvs_store *store;

    assert_int_equal(kvs_open(unit_dir, &store), 0);
    for (char name[] = "a"; *name <= 'c'; (*name)++)
        assert_int_equal(kvs_save_buffer(store, name, name, 1, NULL, NULL), 0);
    return store;
}

static void assert_all_there(struct kvs_store *store)
{
    for (char name[] = "a"; *name <= 'c'; (*name)++) {
        void *data;
        size_t len;

        assert_int_equal(kvs_restore_buffer(store, name, &data, &len, NULL), 0);
        free(data);
    }
}

static int count(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 0;
}

/* Collection must see every manifest, or delete nothing. */
static void gc_without_a_directory(void **state)
{
    const struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = KVS_GC_NO_GRACE};
    struct kvs_store *store = open_with_objects();
    int n = 0;
    (void)state;

    for (int readable = 0; readable < 4; readable++) {
        fail_reads(".", readable);
        assert_int_equal(kvs_gc(store, &opts, NULL), -EIO);
        fail_reads(".", readable);
        assert_int_equal(kvs_list(store, count, &n), -EIO);
    }
    unreadable = 0;
    strcpy(bad_stat, "b");
    assert_int_equal(kvs_gc(store, &opts, NULL), -EIO);
    *bad_stat = 0;
    assert_all_there(store);
    assert_int_equal(kvs_gc(store, &opts, NULL), 0);
    assert_all_there(store);
    kvs_close(store);
}

/* Listings, counts and sweeps of chunks say that they aren't whole. */
static void chunks_without_a_directory(void **state)
{
    const struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = KVS_GC_NO_GRACE};
    kv_store_stats stats = {.size = sizeof(stats)};
    struct kvs_store *store = open_with_objects();
    int n = 0;
    (void)state;

    fail_reads("chunks/0", 0);
    assert_int_equal(kvs_list_chunks(store, count, &n), -EIO);
    assert_int_equal(kvs_stats(store, &stats), -EIO);
    assert_int_equal(kvs_gc(store, &opts, NULL), -EIO);
    unreadable = 0;
    assert_int_equal(kvs_stats(store, &stats), 0);
    assert_int_equal(stats.n_manifests, 3);
    assert_int_equal(stats.n_chunks, 3);
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(gc_without_a_directory, unit_make_dir, unit_rm_dir),
        cmocka_unit_test_setup_teardown(chunks_without_a_directory, unit_make_dir, unit_rm_dir),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
