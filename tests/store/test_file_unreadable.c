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
static ino_t bad_file; /* reads of this file fail; 0: none */

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

ssize_t pread(int fd, void *buf, size_t len, off_t offset)
{
    struct stat st;

    if (bad_file && fstat(fd, &st) == 0 && st.st_ino == bad_file) {
        errno = EIO;
        return -1;
    }
    return REAL(ssize_t, pread, (int, void *, size_t, off_t))(fd, buf, len, offset);
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

/* A chunk that can't be read for now may be good. It stays until a put of it is published. */
static void put_of_what_is_not_readable(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    struct stat st;
    (void)state;

    assert_int_equal(unit_put(h, 0, "bytes", 5), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    kvs_file_vtable()->close(h);
    unit_path(path, 0);
    assert_int_equal(stat(path, &st), 0);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/.kvasir/verified", unit_dir);
        unlink(path);
        h = unit_open("");
        bad_file = st.st_ino;
        assert_int_equal(unit_put(h, 0, "bytes", 5), 0);
        assert_int_equal(unit_get(h, 0, "bytes", 5), 0); /* the put's */
        if (i)                                           /* replaces the other */
            assert_int_equal(unit_publish(h, "n", "x"), 0);
        kvs_file_vtable()->close(h);
        bad_file = i ? st.st_ino : 0;
        h = unit_open("");
        assert_int_equal(unit_get(h, 0, "bytes", 5), 0);
        kvs_file_vtable()->close(h);
    }
    bad_file = 0;
    assert_int_equal(unit_count(".kvasir/bad"), 0);
}

/* The same, of a chunk in the middle of an object, with saves that verify: also where an earlier save
 * noted that the chunk was verified. */
static void verifying_save_of_what_is_not_readable(void **state)
{
    const struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 4096, .verify = true};
    const struct kvs_chunk_ref *chunks;
    char path[512], hex[KVS_FILE_HEX];
    struct kvs_manifest *manifest;
    static uint8_t object[50000];
    struct kvs_store *store;
    uint64_t rng = 3;
    struct stat st;
    void *data;
    size_t n;
    (void)state;

    for (size_t i = 0; i < sizeof(object); i++)
        object[i] = (uint8_t)unit_random(&rng);
    assert_int_equal(kvs_open(unit_dir, &store), 0);
    assert_int_equal(kvs_save_buffer(store, "o", object, sizeof(object), &opts, NULL), 0);
    assert_int_equal(kvs_manifest_get(store, "o", &manifest), 0);
    chunks = kvs_manifest_chunks(manifest, &n);
    assert_true(n > 4);
    kvs_file_hex(hex, chunks[n / 2].key, sizeof(chunks->key));
    snprintf(path, sizeof(path), "%s/chunks/%c/%s", unit_dir, hex[0], hex);
    assert_int_equal(stat(path, &st), 0);
    bad_file = st.st_ino;
    assert_int_equal(kvs_restore_buffer(store, "o", &data, &n, NULL), -EIO);
    kvs_close(store);
    assert_int_equal(kvs_open(unit_dir, &store), 0);
    assert_int_equal(kvs_save_buffer(store, "o", object, sizeof(object), &opts, NULL), 0);
    assert_int_equal(kvs_restore_buffer(store, "o", &data, &n, NULL), 0);
    assert_memory_equal(data, object, sizeof(object));
    bad_file = 0;
    free(data);
    kvs_manifest_free(manifest);
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(gc_without_a_directory, unit_make_dir, unit_rm_dir),
        cmocka_unit_test_setup_teardown(chunks_without_a_directory, unit_make_dir, unit_rm_dir),
        cmocka_unit_test_setup_teardown(put_of_what_is_not_readable, unit_make_dir, unit_rm_dir),
        cmocka_unit_test_setup_teardown(verifying_save_of_what_is_not_readable, unit_make_dir,
                                        unit_rm_dir),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
