// SPDX-License-Identifier: Apache-2.0
/* Chunks whose bytes go bad before publication, and pins that the system refuses. */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/xattr.h>
#include <utime.h>

#include "store/file_unit.h"
#include "store/object/manifest.h"

#include "skip.h"

static uint8_t blob[200000];

static _Atomic int fsync_error, rename2_error, link_error, rename_error_once;
static _Atomic bool others_are_protected; /* as fs.protected_hardlinks, and their times, too */
static void (*_Atomic at_sync)(void);
static void (*_Atomic at_mark)(void); /* before a new chunk's checksum, behind its bytes */

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static bool fails(int error)
{
    errno = error;
    return error != 0;
}

/* False for a manifest and for the notes of what manifests name. */
static bool is_chunk(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_size == 100000;
}

int fsync(int fd)
{
    void (*hook)(void) = atomic_exchange(&at_sync, NULL);

    if (hook)
        hook();
    return fails(is_chunk(fd) ? fsync_error : 0) ? -1 : REAL(int, fsync, (int))(fd);
}

int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags)
{
    void (*hook)(void) = atomic_load(&at_mark);

    if (hook && is_chunk(fd)) {
        atomic_store(&at_mark, NULL);
        hook();
    }
    return REAL(int, fsetxattr, (int, const char *, const void *, size_t, int))(fd, name, value,
                                                                                size, flags);
}

int renameat(int a, const char *from, int b, const char *to)
{
    if (fails(atomic_exchange(&rename_error_once, 0)))
        return -1;
    return REAL(int, renameat, (int, const char *, int, const char *))(a, from, b, to);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    if (fails(rename2_error))
        return -1;
    return REAL(int, renameat2, (int, const char *, int, const char *, unsigned))(a, from, b, to,
                                                                                  flags);
}

static bool protected(int fd, const char *name)
{
    struct stat st;
    int rc = name ? fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW) : fstat(fd, &st);

    return others_are_protected && rc == 0 && st.st_uid != geteuid() && fails(EPERM);
}

int linkat(int a, const char *from, int b, const char *to, int flags)
{
    if (fails(link_error) || protected(a, from))
        return -1;
    return REAL(int, linkat, (int, const char *, int, const char *, int))(a, from, b, to, flags);
}

int futimens(int fd, const struct timespec times[2])
{
    if (protected(fd, NULL))
        return -1;
    return REAL(int, futimens, (int, const struct timespec[2]))(fd, times);
}

int utimensat(int at, const char *path, const struct timespec times[2], int flags)
{
    if (protected(at, path))
        return -1;
    return REAL(int, utimensat, (int, const char *, const struct timespec[2], int))(at, path, times,
                                                                                    flags);
}

/* Flip a byte that no sample looks at. */
static void damage(const char *path)
{
    int fd = open(path, O_RDWR);
    char c;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &c, 1, 70000), 1);
    c ^= 4;
    assert_int_equal(pwrite(fd, &c, 1, 70000), 1);
    close(fd);
}

static void damage_pending(void)
{
    char folder[256], path[600];
    struct dirent *e;
    DIR *dir;

    snprintf(folder, sizeof(folder), "%s/.kvasir/tmp", unit_dir);
    dir = opendir(folder);
    assert_non_null(dir);
    while ((e = readdir(dir))) {
        struct stat st;

        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        if (stat(path, &st) == 0 && st.st_size == 100000)
            damage(path);
    }
    closedir(dir);
}

/* Chunk @n is pending, and lost: its sync failed, and its bytes don't verify any more. */
static kv_store_v1 *open_with_lost(uint64_t n)
{
    kv_store_v1 *h = unit_open("?sync=files");

    assert_int_equal(unit_put(h, n, blob, 100000), 0);
    fsync_error = EIO;
    assert_int_equal(unit_publish_own(h, "first"), -EIO);
    fsync_error = 0;
    damage_pending();
    return h;
}

static void every_publication_is_told(void **state)
{
    kv_store_v1 *h = open_with_lost(1);
    uint8_t *data;
    size_t len;
    (void)state;

    assert_int_equal(unit_publish(h, "one", "x"), -EIO);
    assert_int_equal(unit_publish(h, "two", "x"), -EIO);
    assert_int_equal(kvs_file_vtable()->get_manifest(h, "two", &data, &len), -ENOENT);
    assert_int_equal(unit_put(h, 1, blob, 100000), 0); /* the bytes are back */
    assert_int_equal(unit_publish(h, "one", "x"), 0);
    assert_int_equal(unit_publish(h, "two", "x"), 0);
    assert_int_equal(unit_get(h, 1, blob, 100000), 0);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* As kvs_save writes it for no bytes: an object of our format without chunks. */
static int publish_empty(kv_store_v1 *h, const char *name)
{
    struct kvs_manifest m = {.format = KVS_FORMAT_BYTES};
    struct kv_buf buf = KV_BUF_INIT;
    int rc;

    assert_int_equal(kvs_manifest_encode(&m, &buf), 0);
    rc = kvs_file_vtable()->put_manifest(h, name, (const uint8_t *)buf.data, buf.len);
    kv_buf_fini(&buf);
    return rc;
}

/* An empty snapshot stands for all that was put, as a flush does. */
static void an_empty_snapshot_is_told(void **state)
{
    kv_store_v1 *h = open_with_lost(4);
    (void)state;

    assert_int_equal(publish_empty(h, "empty"), -EIO);
    assert_int_equal(publish_empty(h, "empty"), -EIO);
    assert_int_equal(unit_put(h, 4, blob, 100000), 0);
    assert_int_equal(publish_empty(h, "empty"), 0);
    assert_int_equal(unit_get(h, 4, blob, 100000), 0);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* A put after a failed sync writes its own bytes: those of the put before may be gone. */
static void put_after_a_failed_sync(void **state)
{
    kv_store_v1 *h = open_with_lost(5);
    uint8_t key[8], there = 1;
    (void)state;

    unit_key(key, 5);
    assert_int_equal(kvs_file_ext()->exists_chunks(h, key, 8, 1, &there), 0);
    assert_int_equal(there, 0);
    assert_int_equal(unit_put(h, 5, blob, 100000), 0);
    assert_int_equal(unit_put(h, 5, blob, 100000), 1);
    assert_int_equal(unit_publish(h, "one", "x"), 0);
    assert_int_equal(unit_get(h, 5, blob, 100000), 0);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static void another_writer_had_it(void **state)
{
    kv_store_v1 *h = open_with_lost(2), *other = unit_open("");
    char path[512];
    (void)state;

    unit_path(path, 2);
    unit_write(path, blob, 100000); /* another program's: who knows whether it was synced */
    assert_int_equal(unit_publish(h, "one", "x"), -EIO);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_put(other, 2, blob, 100000), 0);
    assert_int_equal(unit_publish(other, "other", "x"), 0);
    assert_int_equal(unit_publish(h, "one", "x"), 0);
    assert_int_equal(unit_get(h, 2, blob, 100000), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static void giving_a_chunk_up(void **state)
{
    kv_store_v1 *h = open_with_lost(3);
    uint8_t key[8];
    (void)state;

    assert_int_equal(unit_publish(h, "one", "x"), -EIO);
    unit_key(key, 3);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, 8), 0);
    assert_int_equal(unit_publish(h, "one", "x"), 0);
    kvs_file_vtable()->close(h);
}

/* -- While a publication works on it --------------------------------------------------------------- */

static kv_store_v1 *busy;
static pthread_t reader;
static uint64_t busy_n;
static bool put_again;

static void *read_it(void *arg)
{
    (void)arg;
    return (void *)(intptr_t)unit_get(busy, busy_n, blob, 100000);
}

static bool is_lost(void)
{
    const struct kvs_file_pending *e;
    uint8_t key[8];
    bool lost;

    unit_key(key, busy_n);
    pthread_mutex_lock(&busy->lock);
    e = kvs_file_map_find(&busy->map, key, sizeof(key));
    lost = e && e->state == KVS_FILE_LOST;
    pthread_mutex_unlock(&busy->lock);
    return lost;
}

static void lose_it(void)
{
    damage_pending();
    assert_int_equal(pthread_create(&reader, NULL, read_it, NULL), 0);
    wait_until(is_lost()); /* it notices, and waits for the publication to set the file aside */
    if (put_again)
        assert_int_equal(unit_put(busy, busy_n, blob, 100000), 0);
}

static void publish_while_lost(uint64_t n, bool again)
{
    void *rc;

    busy = unit_open("?sync=files");
    busy_n = n;
    put_again = again;
    assert_int_equal(unit_put(busy, n, blob, 100000), 0);
    atomic_store(&at_sync, lose_it);
    assert_true(unit_publish_own(busy, "busy") < 0);
    pthread_join(reader, &rc);
    assert_int_equal((intptr_t)rc, -EBADMSG);
}

static void new_bytes_beside_a_publication(void **state)
{
    (void)state;
    publish_while_lost(10, true);
    assert_int_equal(unit_publish(busy, "busy", "x"), 0);
    assert_int_equal(unit_get(busy, 10, blob, 100000), 0);
    kvs_file_vtable()->close(busy);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static void lost_is_not_placed(void **state)
{
    (void)state;
    publish_while_lost(11, false);
    assert_int_equal(unit_publish(busy, "busy", "x"), -EIO);
    assert_int_equal(unit_get(busy, 11, blob, 100000), -ENOENT);
    kvs_file_vtable()->close(busy);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static void put_busy(void)
{
    assert_int_equal(unit_put(busy, busy_n, blob, 100000), 0);
}

/* New bytes while a publication writes those anew whose sync had failed. */
static void new_bytes_beside_a_second_try(void **state)
{
    (void)state;
    busy = unit_open("?sync=files");
    busy_n = 12;
    assert_int_equal(unit_put(busy, 12, blob, 100000), 0);
    fsync_error = EIO;
    assert_int_equal(unit_publish(busy, "first", "x"), -EIO);
    fsync_error = 0;
    atomic_store(&at_mark, put_busy);
    assert_int_equal(unit_publish_own(busy, "second"), 0);
    assert_null(atomic_load(&at_mark));
    assert_int_equal(unit_publish(busy, "third", "x"), 0);
    assert_int_equal(unit_get(busy, 12, blob, 100000), 0);
    kvs_file_vtable()->close(busy);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* -- Hits on what is bad --------------------------------------------------------------------------- */

static void a_bad_hit_is_set_aside(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    (void)state;

    assert_int_equal(unit_put(h, 20, blob, 100000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_put(h, 20, blob, 100000), 1);
    unit_path(path, 20);
    damage(path);
    assert_int_equal(unit_get(h, 20, blob, 100000), -EBADMSG);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(unit_put(h, 20, blob, 100000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(h, 20, blob, 100000), 0);
    kvs_file_vtable()->close(h);
}

static void a_bad_hit_is_not_brought_back(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    char path[512];
    (void)state;

    assert_int_equal(unit_put(h, 21, blob, 100000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_put(h, 21, blob, 100000), 1);
    unit_path(path, 21);
    damage(path);
    assert_int_equal(unit_get(other, 21, blob, 100000), -EBADMSG);
    assert_int_equal(unit_publish(h, "m", "y"), -EIO);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(unit_put(h, 21, blob, 100000), 0);
    assert_int_equal(unit_publish(h, "m", "y"), 0);
    assert_int_equal(unit_get(other, 21, blob, 100000), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

/* -- Without links --------------------------------------------------------------------------------- */

/* vfat, exfat: new chunks, hits, chunks that another writer published first, bad ones in place. */
static void no_hard_links(void **state)
{
    kv_store_v1 *a, *b;
    char path[512];
    (void)state;

    for (int round = 0; round < 2; round++) {
        uint64_t n = 30 + 10 * (uint64_t)round;

        link_error = EPERM;
        rename2_error = round ? EINVAL : 0;
        a = unit_open("");
        b = unit_open("");
        for (uint64_t i = 0; i < 4; i++) {
            assert_int_equal(unit_put(a, n + i, blob + i, 100000), 0);
            assert_int_equal(unit_put(b, n + i, blob + i, 100000), 0);
        }
        assert_int_equal(unit_publish(a, "a", "x"), 0);
        unit_path(path, n + 3);
        assert_int_equal(truncate(path, 5), 0);
        assert_int_equal(unit_publish(b, "b", "x"), 0);
        for (uint64_t i = 0; i < 4; i++) {
            assert_int_equal(unit_get(a, n + i, blob + i, 100000), 0);
            assert_int_equal(unit_put(b, n + i, blob + i, 100000), 1);
        }
        assert_int_equal(unit_publish(b, "b", "y"), 0);
        kvs_file_vtable()->close(a);
        kvs_file_vtable()->close(b);
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
    }
    link_error = rename2_error = 0;
}

static void belongs_to_another(uint64_t n, time_t age_s)
{
    struct utimbuf times = {time(NULL) - age_s, time(NULL) - age_s};
    char path[512];

    unit_path(path, n);
    assert_int_equal(utime(path, &times), 0);
    assert_int_equal(chown(path, 65534, 65534), 0);
}

/* fs.protected_hardlinks: another user's file can be read, not linked to, nor its time set. */
static void two_users(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    kv_store_swept swept = {.size = sizeof(swept)};
    char path[512];
    struct stat st;
    (void)state;

    if (geteuid() != 0) {
        kvs_file_vtable()->close(h);
        kvs_file_vtable()->close(other);
        skip_because("only root can give files away");
    }
    others_are_protected = true;
    assert_int_equal(unit_put(h, 50, blob, 100000), 0); /* theirs comes while ours is pending */
    assert_int_equal(unit_put(other, 50, blob, 100000), 0);
    for (uint64_t i = 51; i < 53; i++)
        assert_int_equal(unit_put(other, i, blob, 100000), 0);
    assert_int_equal(unit_publish(other, "o", "x"), 0);
    belongs_to_another(50, 0);
    belongs_to_another(51, 5000);
    belongs_to_another(52, 5000);
    assert_int_equal(unit_put(h, 51, blob, 100000), 1); /* old: a sweep may take them any moment */
    assert_int_equal(unit_put(h, 52, blob, 100000), 1);
    unit_path(path, 52);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_publish(h, "h", "x"), 0);
    assert_int_equal(kvs_file_ext()->sweep_chunks(other, 1000, NULL, NULL, &swept), 0);
    for (uint64_t i = 50; i < 53; i++)
        assert_int_equal(unit_get(other, i, blob, 100000), 0);
    unit_path(path, 51);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_uid, 0);
    assert_int_equal(unit_put(h, 51, blob, 100000), 1); /* our own are leased as ever */
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_mtime > time(NULL) - 900);
    others_are_protected = false;
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* A rename that fails while a chunk is settled leaves nothing behind that is in the way of the next. */
static void a_failed_settling_is_repeated(void **state)
{
    (void)state;

    for (uint64_t n = 60; n < 62; n++) {
        kv_store_v1 *h = unit_open(""), *other = unit_open("");
        char path[512];

        assert_int_equal(unit_put(h, n, blob, 100000), 0);
        assert_int_equal(unit_put(other, n, blob, 100000), 0);
        assert_int_equal(unit_publish(other, "other", "x"), 0);
        unit_path(path, n);
        if (n == 61) /* ours takes its place, else theirs stays */
            assert_int_equal(truncate(path, 5), 0);
        rename_error_once = ENOSPC;
        assert_int_equal(unit_publish_own(h, "m"), -ENOSPC);
        assert_int_equal(rename_error_once, 0);
        assert_int_equal(unit_publish_own(h, "m"), 0);
        assert_int_equal(unit_get(other, n, blob, 100000), 0);
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
        kvs_file_vtable()->close(h);
        kvs_file_vtable()->close(other);
    }
}

static int setup(void **state)
{
    uint64_t rng = 13;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_publication_is_told),
        cmocka_unit_test(an_empty_snapshot_is_told),
        cmocka_unit_test(put_after_a_failed_sync),
        cmocka_unit_test(another_writer_had_it),
        cmocka_unit_test(giving_a_chunk_up),
        cmocka_unit_test(new_bytes_beside_a_publication),
        cmocka_unit_test(lost_is_not_placed),
        cmocka_unit_test(new_bytes_beside_a_second_try),
        cmocka_unit_test(a_bad_hit_is_set_aside),
        cmocka_unit_test(a_bad_hit_is_not_brought_back),
        cmocka_unit_test(no_hard_links),
        cmocka_unit_test(two_users),
        cmocka_unit_test(a_failed_settling_is_repeated),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
