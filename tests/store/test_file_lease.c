// SPDX-License-Identifier: Apache-2.0
/* Leases of hits: how long they protect, against which deleters, and the loss when they end too
 * early. */
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/resource.h>

#include "base/core/clock.h"
#include "store/file_unit.h"
#include "store/object/manifest.h"

enum { BYTES = 10000 };

static uint8_t blob[BYTES + 100];
static kv_store_v1 *put_at_unlock; /* the next publication of this handle puts chunk 0 once more */

/* Stand between the store and the kernel: a publication unlocks its fan-outs after it has pinned. */
int flock(int fd, int how)
{
    kv_store_v1 *h = put_at_unlock;

    for (int i = 0; h && how == LOCK_UN && i < KVS_FILE_FANS; i++) {
        if (fd != h->fan[i])
            continue;
        put_at_unlock = NULL;
        assert_int_equal(unit_put(h, 0, blob, BYTES), 1);
    }
    return ((int (*)(int, int))(uintptr_t)dlsym(RTLD_NEXT, "flock"))(fd, how);
}

static int setup(void **state)
{
    uint64_t rng = 5;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

static void close_all(kv_store_v1 *a, kv_store_v1 *b)
{
    kvs_file_vtable()->close(a);
    if (b)
        kvs_file_vtable()->close(b);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    unit_rm_dir(NULL);
    mkdir(unit_dir, 0777);
}

/* A store of chunks 0 to @n - 1, used an hour ago. */
static void make_store(uint64_t n)
{
    struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    kv_store_v1 *h = unit_open("");
    char path[512];

    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(unit_put(h, i, blob + i, BYTES), 0);
    assert_int_equal(unit_publish(h, "base", "x"), 0);
    for (uint64_t i = 0; i < n; i++) {
        unit_path(path, i);
        assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    }
    kvs_file_vtable()->close(h);
}

static void hit(kv_store_v1 *h, uint64_t i)
{
    assert_int_equal(unit_put(h, i, blob + i, BYTES), 1);
}

/* As if the handle's lease had begun @seconds ago. */
static void age_lease(kv_store_v1 *h, int64_t seconds)
{
    int64_t ns = (int64_t)kv_wall_ns() - seconds * (int64_t)KV_NS_PER_S;
    struct timespec times[2];

    assert_true(h->leases > 0);
    h->lease_ns = ns;
    times[0].tv_sec = (time_t)(ns / (int64_t)KV_NS_PER_S);
    times[0].tv_nsec = (long)(ns % (int64_t)KV_NS_PER_S);
    times[1] = times[0];
    assert_int_equal(utimensat(h->writers, h->writer, times, 0), 0);
}

static uint64_t sweep(kv_store_v1 *h)
{
    kv_store_swept swept = {.size = sizeof(swept)};

    assert_int_equal(kvs_file_ext()->sweep_chunks(h, 0, NULL, NULL, &swept), 0);
    return swept.deleted;
}

/* Sweeps go by whole seconds: a hit of the second before gets a new time when it is published. */
static void publications_note_use(void **state)
{
    int64_t second = (int64_t)(kv_wall_ns() / KV_NS_PER_S);
    struct timespec times[2] = {{.tv_sec = (time_t)second - 1, .tv_nsec = 999999999},
                                {.tv_sec = (time_t)second - 1, .tv_nsec = 999999999}};
    kv_store_v1 *h;
    uint8_t key[8];
    char path[512];
    struct stat st;
    (void)state;

    make_store(1);
    h = unit_open("");
    hit(h, 0);
    unit_path(path, 0);
    unit_key(key, 0);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    kvs_file_map_find(&h->map, key, 8)->seen.mtime_ns = second * (int64_t)KV_NS_PER_S - 1;
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_mtime >= second);
    close_all(h, NULL);
}

/* Hits behind a lease that is about to end, or has ended, are linked. */
static void late_hits_are_linked(void **state)
{
    static const int64_t ages[] = {KVS_FILE_LEASE_S / 2 + 1, KVS_FILE_LEASE_S * 5};
    (void)state;

    for (size_t i = 0; i < KV_COUNT(ages); i++) {
        kv_store_v1 *h, *other;
        char path[512];

        make_store(2);
        h = unit_open("");
        other = unit_open("");
        hit(h, 0);
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
        age_lease(h, ages[i]);
        hit(h, 1);
        assert_int_equal(unit_count(".kvasir/tmp"), 1);
        age_lease(h, KVS_FILE_LEASE_S + 1);
        assert_int_equal(sweep(other), 1);
        unit_path(path, 1);
        assert_int_equal(access(path, F_OK), 0);
        assert_int_equal(unit_publish(h, "m", "x"), -EIO); /* 0 is lost */
        assert_int_equal(unit_put(h, 0, blob, BYTES), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        close_all(h, other);
    }
}

/* A handle evicts and sweeps nothing that its own saves hit, however long ago. */
static void own_hits_stay(void **state)
{
    kv_store_v1 *h;
    (void)state;

    make_store(8);
    h = unit_open("?limit=100000");
    for (uint64_t i = 0; i < 8; i++)
        hit(h, i);
    for (uint64_t i = 8; i < 13; i++)
        assert_int_equal(unit_put(h, i, blob + i, BYTES), 0);
    age_lease(h, KVS_FILE_LEASE_S + 1);
    assert_int_equal(sweep(h), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    for (uint64_t i = 0; i < 13; i++)
        assert_int_equal(unit_get(h, i, blob + i, BYTES), 0);
    assert_true(sweep(h) > 0);
    close_all(h, NULL);
}

/* A deleter that has no descriptor left for reading leases deletes nothing. */
static void leases_that_cannot_be_read(void **state)
{
    kv_store_v1 *h, *other;
    struct rlimit old, few = {256, 256};
    int fds[256] = {0}, n = 0;
    (void)state;

    make_store(2);
    h = unit_open("");
    other = unit_open("");
    hit(h, 0);
    hit(h, 1);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    few.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (n < 256 && (fds[n] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        n++;
    assert_int_equal(kvs_file_leased_since(other), INT64_MIN);
    close(fds[--n]); /* for the fan-out's entries */
    assert_int_equal(sweep(other), 0);
    while (n > 0)
        close(fds[--n]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(sweep(other), 2);
    close_all(h, other);
}

/* A handle whose file in writers/ somebody deleted links what it hits. */
static void writer_without_a_file(void **state)
{
    kv_store_v1 *h;
    (void)state;

    make_store(1);
    h = unit_open("");
    assert_int_equal(unlinkat(h->writers, h->writer, 0), 0);
    hit(h, 0);
    assert_int_equal(unit_count(".kvasir/tmp"), 1);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    close_all(h, NULL);
}

/* Only empty files of writers are leases. */
static void other_files_are_no_leases(void **state)
{
    kv_store_v1 *h;
    int fd;
    (void)state;

    make_store(1);
    h = unit_open("");
    assert_int_equal(mkfifoat(h->writers, "0000000000000001", 0666), 0);
    assert_int_equal(symlinkat("/etc/passwd", h->writers, "0000000000000002"), 0);
    assert_int_equal(mkdirat(h->writers, "0000000000000003", 0777), 0);
    fd = openat(h->writers, "0000000000000004", O_WRONLY | O_CREAT, 0666);
    assert_int_equal(write(fd, "x", 1), 1);
    close(fd);
    assert_true(kvs_file_leased_since(h) == INT64_MAX);
    assert_int_equal(sweep(h), 1);
    close_all(h, NULL);
}

/* A manifest of our own format that names chunk @n alone, by a key of 16 bytes. */
static int publish_one(kv_store_v1 *h, uint64_t n)
{
    struct kvs_manifest m = {.format = KVS_FORMAT_BYTES};
    struct kv_buf buf = KV_BUF_INIT;
    uint8_t key[16];
    int rc;

    memset(key, (int)n, sizeof(key));
    assert_int_equal(kvs_manifest_add(&m, key, BYTES), 0);
    assert_int_equal(kvs_manifest_encode(&m, &buf), 0);
    rc = kvs_file_vtable()->put_manifest(h, "own", (const uint8_t *)buf.data, buf.len);
    kv_buf_fini(&buf);
    free(m.chunks);
    return rc;
}

static int put_one(kv_store_v1 *h, uint64_t n)
{
    uint8_t key[16];

    memset(key, (int)n, sizeof(key));
    return kvs_file_vtable()->put_chunk(h, key, sizeof(key), blob + n, BYTES);
}

/* Hits of a save that was given up are deleted: only manifests that may need them fail. */
static void lost_hits_fail_what_needs_them(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    (void)state;

    for (uint64_t i = 1; i < 3; i++)
        assert_int_equal(put_one(other, i), 0);
    assert_int_equal(unit_publish(other, "opaque", "x"), 0);
    for (uint64_t i = 1; i < 3; i++)
        assert_int_equal(put_one(h, i), 1);
    age_lease(h, KVS_FILE_LEASE_S + 1);
    assert_int_equal(sweep(other), 2);
    for (uint64_t i = 10; i < 12; i++) {
        assert_int_equal(put_one(h, i), 0);
        assert_int_equal(publish_one(h, i), 0);
        assert_int_equal(h->leases, 0); /* nothing is left that it could keep */
    }
    assert_int_equal(publish_one(h, 2), -EIO);
    assert_int_equal(kvs_file_ext()->flush(h), -EIO);
    assert_int_equal(unit_publish(h, "opaque", "x"), -EIO);
    for (uint64_t i = 1; i < 3; i++)
        assert_int_equal(put_one(h, i), 0);
    assert_int_equal(publish_one(h, 2), 0);
    assert_int_equal(unit_publish(h, "opaque", "x"), 0);
    close_all(h, other);
}

/* A flush keeps hits until the handle publishes, however old the lease; also after another save of
 * the handle was published. */
static void flushed_hits_are_linked(void **state)
{
    (void)state;
    for (int saves = 0; saves < 2; saves++) {
        kv_store_v1 *h, *other;

        make_store(2);
        h = unit_open("");
        other = unit_open("");
        hit(h, 0);
        if (saves) {
            assert_int_equal(put_one(h, 10), 0);
            assert_int_equal(publish_one(h, 10), 0);
        }
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
        assert_int_equal(kvs_file_ext()->flush(h), 0);
        assert_int_equal(unit_count(".kvasir/tmp"), 1);
        assert_int_equal(h->leases, 0);
        assert_int_equal(sweep(other), 1 + saves);
        hit(h, 0);
        assert_int_equal(kvs_file_ext()->flush(h), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_get(h, 0, blob, BYTES), 0);
        close_all(h, other);
    }
}

/* A chunk that another thread puts while its publication ends is pinned for the next one. */
static void put_again_at_the_end(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    char path[512];
    struct stat st;
    (void)state;

    assert_int_equal(unit_put(h, 0, blob, BYTES), 0);
    put_at_unlock = h;
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_null(put_at_unlock);
    unit_path(path, 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_nlink, 2);
    assert_int_equal(sweep(other), 0);
    assert_int_equal(unit_publish(h, "n", "x"), 0);
    assert_int_equal(sweep(other), 1);
    close_all(h, other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(publications_note_use),
        cmocka_unit_test(late_hits_are_linked),
        cmocka_unit_test(own_hits_stay),
        cmocka_unit_test(leases_that_cannot_be_read),
        cmocka_unit_test(writer_without_a_file),
        cmocka_unit_test(other_files_are_no_leases),
        cmocka_unit_test(lost_hits_fail_what_needs_them),
        cmocka_unit_test(flushed_hits_are_linked),
        cmocka_unit_test(put_again_at_the_end),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
