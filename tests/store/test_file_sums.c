// SPDX-License-Identifier: Apache-2.0
/* Checksums and encodings where extended attributes don't work, or were lost. */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/xattr.h>

#include "kv_store.h"
#include "store/file_unit.h"

static uint8_t text[100000], blob[100000];

/* Run once, at the next opening or renaming to a path of this kind, or writing of a checksum. */
static void (*_Atomic at_open)(void);
static void (*_Atomic at_write)(void);
static void (*_Atomic at_rename)(void);
static const char *open_prefix = "", *rename_to = "";

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static void call(void (*_Atomic *hook)(void))
{
    void (*now)(void) = atomic_exchange(hook, NULL);

    if (now)
        now();
}

/* Whether @path in directory @at is below "sums/", as far as open_prefix goes. */
static bool is_awaited(int at, const char *path)
{
    char link[64], full[1024];
    ssize_t n;

    if (strncmp(path, open_prefix, strlen(open_prefix)) != 0)
        return false;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", at);
    n = readlink(link, full, sizeof(full));
    return n > 5 && memcmp(full + n - 5, "/sums", 5) == 0;
}

int openat(int at, const char *path, int flags, ...)
{
    mode_t mode = 0;
    va_list args;

    va_start(args, flags);
    if (flags & (O_CREAT | O_TMPFILE))
        mode = va_arg(args, mode_t);
    va_end(args);
    if (atomic_load(&at_open) && is_awaited(at, path))
        call(&at_open);
    return REAL(int, openat, (int, const char *, int, ...))(at, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t len)
{
    if (len == KVS_FILE_SUM_BYTES)
        call(&at_write);
    return REAL(ssize_t, write, (int, const void *, size_t))(fd, data, len);
}

int renameat(int a, const char *from, int b, const char *to)
{
    if (atomic_load(&at_rename) && strcmp(to, rename_to) == 0)
        call(&at_rename);
    return REAL(int, renameat, (int, const char *, int, const char *))(a, from, b, to);
}

static void forget_sums(uint64_t n)
{
    char path[512], side_car[512], hex[KVS_FILE_HEX];
    uint8_t key[8];

    unit_path(path, n);
    removexattr(path, "user.kvasir.chunk");
    unit_key(key, n);
    kvs_file_hex(hex, key, 8);
    snprintf(side_car, sizeof(side_car), "%s/.kvasir/sums/%s", unit_dir, hex);
    unlink(side_car);
}

static void put_byte(uint64_t n, off_t at, uint8_t byte)
{
    char path[512];
    int fd;

    unit_path(path, n);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* A compressed chunk says so itself: without its checksum it is still no other program's. */
static void compressed_chunks_describe_themselves(void **state)
{
    static const char *const options[] = {"?zstd=3", "?zstd=3&sums=files"};
    (void)state;

    for (uint64_t i = 0; i < KV_COUNT(options); i++) {
        kv_store_v1 *h = unit_open(options[i]);
        uint64_t n = 10 + 10 * i;
        char path[512], other[512];
        struct stat st;

        for (uint64_t k = 0; k < 3; k++)
            assert_int_equal(unit_put(h, n + k, text, sizeof(text)), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        for (uint64_t k = 0; k < 3; k++)
            forget_sums(n + k);
        unit_path(path, n);
        assert_int_equal(stat(path, &st), 0);
        assert_true(st.st_size < 20000);
        assert_int_equal(unit_get(h, n, text, sizeof(text)), 0);
        assert_int_equal(unit_put(h, n, text, sizeof(text)), 1);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        put_byte(n, 5, 2); /* an encoding that this version doesn't know */
        assert_int_equal(unit_get(h, n, text, sizeof(text)), -EBADMSG);
        assert_int_equal(unit_put(h, n, text, sizeof(text)), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        forget_sums(n);
        unit_path(path, n + 1); /* under a wrong name, or cut, it is nothing */
        unit_path(other, n + 2);
        assert_int_equal(rename(path, other), 0);
        assert_int_equal(unit_get(h, n + 2, text, sizeof(text)), -EBADMSG);
        unit_path(path, n);
        assert_int_equal(truncate(path, st.st_size - 1), 0);
        assert_true(unit_get(h, n, text, sizeof(text)) < 0);
        kvs_file_vtable()->close(h);
    }
}

static uint64_t bad_chunks(kv_store_v1 *h)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvs_file_ext()->stats(h, &stats), 0);
    return stats.bad_chunks;
}

/* The first in place keeps its checksum, whoever else had put that key. */
static void two_writers_of_a_key(void **state)
{
    kv_store_v1 *a = unit_open("?sums=files"), *b = unit_open("?sums=files&zstd=3");
    (void)state;

    assert_int_equal(unit_put(a, 50, text, sizeof(text)), 0); /* as it is, then compressed */
    assert_int_equal(unit_put(b, 50, text, sizeof(text)), 0);
    assert_int_equal(unit_put(b, 51, text, sizeof(text)), 0); /* the other way round */
    assert_int_equal(unit_put(a, 52, blob, 1000), 0);         /* other bytes */
    assert_int_equal(unit_put(b, 52, blob + 7, 2000), 0);
    assert_int_equal(unit_put(a, 51, text, sizeof(text)), 0);
    assert_int_equal(unit_publish(a, "a", "x"), 0);
    assert_int_equal(unit_publish(b, "b", "x"), 0);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(unit_get(a, 50, text, sizeof(text)), 0);
        assert_int_equal(unit_get(a, 51, text, sizeof(text)), 0);
        assert_int_equal(unit_get(a, 52, blob, 1000), 0);
    }
    assert_int_equal(bad_chunks(a), 0);
    assert_int_equal(unit_count(".kvasir/bad"), 0);
    kvs_file_vtable()->close(a);
    kvs_file_vtable()->close(b);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* -- At the worst moment --------------------------------------------------------------------------- */

static kv_store_v1 *other;
static pthread_t thread;

static void read_60(void)
{
    assert_int_equal(unit_get(other, 60, blob, 5000), 0);
}

/* The checksum of a file of another program appears whole, or not at all. */
static void adoption(void **state)
{
    kv_store_v1 *h = unit_open("?sums=files");
    char path[512];
    (void)state;

    other = unit_open("?sums=files");
    unit_path(path, 60);
    unit_write(path, blob, 5000);
    atomic_store(&at_write, read_60);
    assert_int_equal(unit_put(h, 60, blob, 5000), 1);
    assert_null(atomic_load(&at_write));
    assert_int_equal(unit_get(other, 60, blob, 5000), 0);
    assert_int_equal(unit_count(".kvasir/bad"), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

static void replace_61(void)
{
    uint8_t key[8];

    unit_key(key, 61);
    assert_int_equal(kvs_file_ext()->delete_chunk(other, key, 8), 0);
    assert_int_equal(unit_put(other, 61, blob + 9, 6000), 0);
    assert_int_equal(unit_publish(other, "other", "x"), 0);
}

/* Between opening a chunk and its checksum both are replaced. */
static void chunks_replaced_while_read(void **state)
{
    kv_store_v1 *h = unit_open("?sums=files");
    (void)state;

    other = unit_open("?sums=files");
    assert_int_equal(unit_put(h, 61, blob, 5000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    open_prefix = "";
    atomic_store(&at_open, replace_61);
    assert_int_equal(unit_get(h, 61, blob + 9, 6000), 0);
    assert_null(atomic_load(&at_open));
    assert_int_equal(unit_count(".kvasir/bad"), 0);
    assert_int_equal(bad_chunks(h), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

static void check_manifest(kv_store_v1 *h, const char *name, const char *a, const char *b)
{
    uint8_t *data;
    size_t len;

    assert_int_equal(kvs_file_vtable()->get_manifest(h, name, &data, &len), 0);
    assert_true((len == strlen(a) && memcmp(data, a, len) == 0) ||
                (len == strlen(b) && memcmp(data, b, len) == 0));
    free(data);
}

static void *publish_theirs(void *arg)
{
    (void)arg;
    return unit_publish(other, "both", "of the other") < 0 ? "failed" : NULL;
}

static void start_publishing(void)
{
    assert_int_equal(pthread_create(&thread, NULL, publish_theirs, NULL), 0);
    usleep(100000); /* it comes through in this time, or waits for us */
}

/* Two processes publish one name: a manifest and its checksum come together. */
static void manifests_published_at_once(void **state)
{
    kv_store_v1 *h = unit_open("?sums=files");
    void *failed;
    (void)state;

    other = unit_open("?sums=files");
    assert_int_equal(unit_publish(h, "both", "before"), 0);
    rename_to = "both";
    atomic_store(&at_rename, start_publishing);
    assert_int_equal(unit_publish(h, "both", "of this one"), 0);
    pthread_join(thread, &failed);
    assert_null(failed);
    check_manifest(h, "both", "of this one", "of the other");
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

static void publish_twice(void)
{
    assert_int_equal(unit_publish(other, "read", "second"), 0);
    assert_int_equal(unit_publish(other, "read", "third, which is longer"), 0);
}

static void manifests_replaced_while_read(void **state)
{
    kv_store_v1 *h = unit_open("?sums=files");
    (void)state;

    other = unit_open("?sums=files");
    assert_int_equal(unit_publish(h, "read", "first"), 0);
    open_prefix = "m-read";
    atomic_store(&at_open, publish_twice);
    check_manifest(h, "read", "first", "third, which is longer");
    assert_null(atomic_load(&at_open));
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

static int setup(void **state)
{
    uint64_t rng = 15;

    for (size_t i = 0; i < sizeof(blob); i++) {
        blob[i] = (uint8_t)unit_random(&rng);
        text[i] = (uint8_t)(i / 1000);
    }
    return unit_make_dir(state);
}

static int64_t count_read(void *arg, void *buf, size_t len)
{
    (void)buf, (void)len;
    ++*(int *)arg;
    return 0;
}

/* Where checksums are files, "m-" goes before a name: the longest ones are refused before an object
 * is read. Manifests of such names, of before, can be read. */
static void names_that_no_side_car_has(void **state)
{
    char uri[200], old[256], new[256];
    struct kvs_store *store;
    void *data;
    size_t len;
    (void)state;

    for (int side_car = 0; side_car < 2; side_car++) {
        snprintf(uri, sizeof(uri), "%s%s", unit_dir, side_car ? "?sums=files" : "");
        assert_int_equal(kvs_open(uri, &store), 0);
        for (int n = 253; n < 256; n++) {
            int want = side_car && n > 253 ? -ENAMETOOLONG : 0, reads = 0;

            memset(old, '0', (size_t)n);
            old[n] = '\0';
            memcpy(new, old, (size_t)n + 1);
            new[n - 1] = (char)('0' + side_car);
            assert_int_equal(kvs_save(store, new, count_read, &reads, NULL, NULL), want);
            assert_int_equal(reads > 0, want == 0);
            assert_int_equal(kvs_put_manifest(store, new, "m", 1), want);
            assert_int_equal(kvs_get_manifest(store, old, &data, &len), 0);
            free(data);
            assert_int_equal(kvs_delete_manifest(store, new), 0);
            assert_int_equal(kvs_put_manifest(store, old, "m", 1), want);
        }
        kvs_close(store);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_writers_of_a_key),
        cmocka_unit_test(adoption),
        cmocka_unit_test(chunks_replaced_while_read),
        cmocka_unit_test(manifests_published_at_once),
        cmocka_unit_test(manifests_replaced_while_read),
        cmocka_unit_test(compressed_chunks_describe_themselves),
        cmocka_unit_test(names_that_no_side_car_has),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
