// SPDX-License-Identifier: Apache-2.0
/* An acknowledged save can be restored: all bytes of its hits were verified since their last
 * change. */
#include <sys/utsname.h>
#include <time.h>

#include "file_unit.h"

enum { CHUNKS = 24, BIG = 64 * 1024 };

static uint8_t blob[CHUNKS * 64 + BIG];
static uint64_t rng;

static size_t len_of(uint64_t n)
{
    return n % 3 == 0 ? BIG : 500 + 37 * n;
}

/* Returns how many were hits. */
static int save(kv_store_v1 *h, const char *name)
{
    int hits = 0;

    for (uint64_t i = 0; i < CHUNKS; i++) {
        int rc = unit_put(h, i, blob + i, len_of(i));

        assert_true(rc == 0 || rc == 1);
        hits += rc;
    }
    assert_int_equal(unit_publish_own(h, name), 0);
    return hits;
}

static void check_restored(kv_store_v1 *h)
{
    for (uint64_t i = 0; i < CHUNKS; i++)
        assert_int_equal(unit_get(h, i, blob + i, len_of(i)), 0);
}

static uint64_t bytes_read(kv_store_v1 *h)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvs_file_ext()->stats(h, &stats), 0);
    return stats.bytes_read;
}

/* Change @len bytes of chunk @n in place; @hide: its mtime is as it was. */
static void damage(uint64_t n, size_t at, size_t len, bool hide)
{
    struct timespec times[2];
    char path[512];
    struct stat st;
    int fd;

    unit_path(path, n);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    for (size_t i = 0; i < len; i++) {
        uint8_t byte = (uint8_t)~blob[n + at + i];

        assert_int_equal(pwrite(fd, &byte, 1, (off_t)(at + i)), 1);
    }
    times[0] = st.st_atim;
    times[1] = st.st_mtim;
    if (hide)
        assert_int_equal(futimens(fd, times), 0);
    close(fd);
}

static void side_car_path(char path[512], uint64_t n)
{
    char hex[KVS_FILE_HEX];
    uint8_t key[8];

    unit_key(key, n);
    kvs_file_hex(hex, key, sizeof(key));
    snprintf(path, 512, "%s/.kvasir/sums/%s", unit_dir, hex);
}

/* Change a byte of the file that holds the chunk's checksum, if it has one. */
static void damage_side_car(uint64_t n)
{
    uint8_t byte;
    char path[512];
    off_t at = (off_t)unit_below(&rng, KVS_FILE_SUM_BYTES);
    int fd;

    side_car_path(path, n);
    fd = open(path, O_RDWR);
    if (fd < 0)
        return;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void damage_any(bool hide)
{
    for (uint64_t n = 0; n < CHUNKS; n += 1 + unit_below(&rng, 4)) {
        if (unit_below(&rng, 3) == 0) {
            damage_side_car(n);
        } else {
            size_t len = 1 + unit_below(&rng, unit_below(&rng, 2) ? 4 : len_of(n));

            damage(n, unit_below(&rng, len_of(n) - len + 1), len, hide);
        }
    }
}

static void await_tick(void)
{
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};

    nanosleep(&pause, NULL);
}

/* Before Linux 6.13 ctime has the resolution of a timer's tick: what is changed within the tick of
 * the save and hidden by setting mtime back can't be seen. */
static void next_tick(void)
{
    int major = 0, minor = 0;
    struct utsname name;

    assert_int_equal(uname(&name), 0);
    (void)sscanf(name.release, "%d.%d", &major, &minor);
    if (major < 6 || (major == 6 && minor < 13))
        await_tick();
}

static void damage_between_saves(void **state)
{
    const char *const options[] = {"", "?sums=files", "?zstd=1"};
    (void)state;

    for (size_t round = 0; round < unit_rounds(60); round++) {
        const char *option = options[round % 3];
        bool same_handle = unit_below(&rng, 2);
        kv_store_v1 *h = unit_open(option);

        save(h, "a");
        if (!same_handle) {
            kvs_file_vtable()->close(h);
            h = unit_open(option);
        }
        next_tick();
        damage_any(unit_below(&rng, 2));
        if (unit_below(&rng, 2))
            save(h, "a");
        save(h, "b");
        check_restored(h);
        kvs_file_vtable()->close(h);
        h = unit_open(option);
        check_restored(h);
        kvs_file_vtable()->close(h);
        unit_rm_dir(NULL);
        mkdir(unit_dir, 0777);
    }
}

/* A get notes no use of a chunk that was written to after it was read: its note of verification would
 * hold for what was written. */
static void damage_between_read_and_use(void **state)
{
    const struct timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    (void)state;

    for (int round = 0; round < 3; round++) {
        kv_store_v1 *h = unit_open("");
        char hex[KVS_FILE_HEX];
        uint8_t key[8], *data;
        struct stat st;
        size_t len;
        int fan;

        save(h, "a");
        unit_key(key, 1);
        kvs_file_hex(hex, key, 8);
        fan = h->fan[kvs_file_fan(key)];
        assert_int_equal(utimensat(fan, hex, old, 0), 0);
        assert_int_equal(
            kvs_file_read(h, fan, hex, "", kvs_file_owner(key, 8, false), &data, &len, &st), 0);
        free(data);
        next_tick();
        if (round)
            damage(1, 5, 4, round == 2);
        assert_int_equal(kvs_file_note_use(h, fan, hex, &st), round == 0);
        kvs_file_vtable()->close(h);
        unit_rm_dir(NULL);
        mkdir(unit_dir, 0777);
    }
}

/* Between put and publication: the publication fails, or what it needs is there. */
static void damage_before_publication(void **state)
{
    size_t failed = 0;
    (void)state;

    for (size_t round = 0; round < unit_rounds(40); round++) {
        kv_store_v1 *h = unit_open(""), *other;
        int rc;

        save(h, "a");
        for (uint64_t i = 0; i < CHUNKS; i++)
            assert_int_equal(unit_put(h, i, blob + i, len_of(i)), 1);
        if (round % 4)
            damage_any(false);
        rc = unit_publish_own(h, "b");
        assert_true(rc == 0 || round % 4);
        failed += rc < 0;
        if (rc == 0) {
            other = unit_open("");
            check_restored(other);
            kvs_file_vtable()->close(other);
        }
        save(h, "c"); /* puts everything again: mended */
        check_restored(h);
        kvs_file_vtable()->close(h);
    }
    assert_true(failed > 0);
}

/* A save reads no chunk that any handle has written or verified. */
static void warm_saves_read_nothing(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    (void)state;

    unit_rm_dir(NULL);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    mkdir(unit_dir, 0777);
    h = unit_open("");
    other = unit_open("");
    assert_int_equal(save(h, "a"), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(save(h, "b"), CHUNKS);
        assert_int_equal(save(other, "c"), CHUNKS);
    }
    assert_int_equal(bytes_read(h) + bytes_read(other), 0);
    kvs_file_vtable()->close(other);
    other = unit_open("");
    assert_int_equal(save(other, "d"), CHUNKS);
    assert_int_equal(bytes_read(other), 0);
    check_restored(other); /* a reader's note of use, a minute later, ends nothing */
    for (uint64_t i = 0; i < CHUNKS; i++) {
        struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
        char path[512];

        unit_path(path, i);
        assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    }
    assert_int_equal(save(h, "e"), CHUNKS); /* somebody set the times: all is verified again */
    assert_int_equal(bytes_read(h), bytes_read(other));
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

/* Where files hold their checksums, side-cars that appear later change nothing; where side-cars hold
 * them, each handle looks at those. */
static void side_cars_count_where_they_are_needed(void **state)
{
    kv_store_v1 *h, *other;
    char path[512];
    (void)state;

    unit_rm_dir(NULL);
    mkdir(unit_dir, 0777);
    h = unit_open("");
    save(h, "a");
    for (uint64_t i = 0; i < CHUNKS; i++) {
        int fd;

        side_car_path(path, i);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, blob, KVS_FILE_SUM_BYTES), KVS_FILE_SUM_BYTES);
        close(fd);
    }
    assert_int_equal(save(h, "b"), CHUNKS);
    assert_int_equal(bytes_read(h), 0);
    check_restored(h);
    kvs_file_vtable()->close(h);

    unit_rm_dir(NULL);
    mkdir(unit_dir, 0777);
    other = unit_open("?sums=files");
    h = unit_open("");
    save(other, "a");
    assert_int_equal(save(h, "b"), CHUNKS);
    assert_int_equal(bytes_read(h), 0);
    await_tick(); /* also since 6.13, for a file whose ctime nobody has asked for */
    damage_side_car(3);
    assert_int_equal(save(h, "c"), CHUNKS - 1); /* put anew */
    check_restored(h);
    check_restored(other);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

/* The file of notes is a hint: cut, torn, full of noise or away, saves stay right. */
static void notes_are_a_hint(void **state)
{
    char path[256];
    uint8_t noise[1000];
    (void)state;

    snprintf(path, sizeof(path), "%s/.kvasir/verified", unit_dir);
    for (size_t round = 0; round < unit_rounds(40); round++) {
        kv_store_v1 *h = unit_open("");
        struct stat st;
        int fd;

        save(h, "a");
        kvs_file_vtable()->close(h);
        assert_int_equal(stat(path, &st), 0);
        fd = open(path, O_RDWR);
        for (size_t i = 0; i < sizeof(noise); i++)
            noise[i] = (uint8_t)unit_random(&rng);
        switch (unit_below(&rng, 4)) {
        case 0:
            assert_int_equal(ftruncate(fd, (off_t)unit_below(&rng, (uint64_t)st.st_size)), 0);
            break;
        case 1:
            assert_true(pwrite(fd, noise, 1 + unit_below(&rng, 999), st.st_size) > 0);
            break;
        case 2:
            (void)!pwrite(fd, noise, sizeof(noise), (off_t)unit_below(&rng, (uint64_t)st.st_size));
            break;
        default:
            assert_int_equal(ftruncate(fd, (off_t)1 << 40), 0);
            break;
        }
        close(fd);
        if (round % 2) {
            next_tick();
            damage_any(true);
        }
        h = unit_open("");
        save(h, "b");
        check_restored(h);
        kvs_file_vtable()->close(h);
    }
}

/* The notes are bounded, whichever handle appends to them. */
static void notes_are_bounded(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    static uint8_t record[4096];
    char path[256];
    struct stat st;
    int fd;
    (void)state;

    save(h, "a");
    save(other, "a");
    snprintf(path, sizeof(path), "%s/.kvasir/verified", unit_dir);
    fd = open(path, O_WRONLY | O_APPEND);
    for (int i = 0; i < 1024; i++)
        assert_int_equal(write(fd, record, sizeof(record)), sizeof(record));
    close(fd);
    save(h, "b");
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size > 0 && st.st_size < 1 << 20);
    save(other, "b"); /* finds the new one */
    assert_int_equal(save(h, "c"), CHUNKS);
    check_restored(other);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static int setup(void **state)
{
    rng = unit_seed();
    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damage_between_saves),
        cmocka_unit_test(damage_before_publication),
        cmocka_unit_test(warm_saves_read_nothing),
        cmocka_unit_test(notes_are_a_hint),
        cmocka_unit_test(notes_are_bounded),
        cmocka_unit_test(damage_between_read_and_use),
        cmocka_unit_test(side_cars_count_where_they_are_needed),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
