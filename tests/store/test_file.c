// SPDX-License-Identifier: Apache-2.0
#include "store/file_unit.h"

#include <sys/wait.h>

static uint8_t blob[300000];

static int setup(void **state)
{
    uint64_t rng = 7;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

static void puts_and_gets(void **state)
{
    static const size_t sizes[] = {0, 1, 255, 256, 4096, 131072, 131073, 300000};
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    (void)state;

    assert_int_equal(unit_get(h, 0, blob, 0), -ENOENT);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        assert_int_equal(unit_put(h, i, blob, sizes[i]), 0);
        assert_int_equal(unit_put(h, i, blob, sizes[i]), 1);
        assert_int_equal(unit_get(h, i, blob, sizes[i]), 0);
    }
    assert_int_equal(unit_publish(h, "first", "text"), 0);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        assert_int_equal(unit_get(other, i, blob, sizes[i]), 0);
        assert_int_equal(unit_put(other, i, blob, sizes[i]), 1);
    }
    kvs_file_vtable()->close(h);
    h = unit_open("");
    for (size_t i = 0; i < KV_COUNT(sizes); i++)
        assert_int_equal(unit_get(h, i, blob, sizes[i]), 0);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    kvs_file_vtable()->close(h);
    assert_int_equal(unit_count(".kvasir/writers"), 0);
    kvs_file_vtable()->close(NULL);
}

static void keys_of_all_lengths(void **state)
{
    kv_store_v1 *h = unit_open("");
    const kv_store_vtable *t = kvs_file_vtable();
    uint8_t key[KVS_FILE_KEY_MAX + 1] = {1, 2, 3};
    (void)state;

    for (size_t len = 1; len <= KVS_FILE_KEY_MAX; len++)
        assert_int_equal(t->put_chunk(h, key, len, (uint8_t *)&len, sizeof(len)), 0);
    assert_int_equal(t->put_chunk(h, key, KVS_FILE_KEY_MAX + 1, key, 1), -EINVAL);
    assert_int_equal(t->put_chunk(h, key, 0, key, 1), -EINVAL);
    assert_int_equal(unit_publish(h, "m", ""), 0);
    for (size_t len = 1; len <= KVS_FILE_KEY_MAX; len++) {
        uint8_t *data;
        size_t got;

        assert_int_equal(t->get_chunk(h, key, len, &data, &got), 0);
        assert_int_equal(got, sizeof(len));
        assert_memory_equal(data, &len, sizeof(len));
        free(data);
    }
    t->close(h);
}

static void manifests(void **state)
{
    static const char *const names[] = {"a",     "chunks", ".",     "..",   ".kvasir", "a/b",
                                        "x.tmp", "%2F",    "/",     "%",    "100%",    "a%2fb",
                                        "\x01",  "%%2F",   "a%2Fb", ".tmp", "é.x",     "CHUNKS"};
    const kv_store_vtable *t = kvs_file_vtable();
    kv_store_v1 *h = unit_open("");
    char longest[300];
    uint8_t *data;
    size_t len;
    (void)state;

    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < KV_COUNT(names); i++)
            assert_int_equal(unit_publish(h, names[i], round ? names[i] : "old"), 0);
    }
    for (size_t i = 0; i < KV_COUNT(names); i++) {
        assert_int_equal(t->get_manifest(h, names[i], &data, &len), 0);
        assert_int_equal(len, strlen(names[i]));
        assert_memory_equal(data, names[i], len);
        free(data);
    }
    for (size_t i = 0; i < KV_COUNT(names); i++) {
        assert_int_equal(t->delete_manifest(h, names[i]), 0);
        assert_int_equal(t->delete_manifest(h, names[i]), 0);
        assert_int_equal(t->get_manifest(h, names[i], &data, &len), -ENOENT);
    }
    assert_int_equal(unit_publish(h, "", "x"), -EINVAL);
    memset(longest, 'n', sizeof(longest));
    longest[256] = '\0';
    assert_int_equal(unit_publish(h, longest, "x"), -ENAMETOOLONG);
    longest[255] = '\0';
    assert_int_equal(unit_publish(h, longest, "x"), 0);
    assert_int_equal(t->put_manifest(h, "empty", NULL, 0), 0);
    assert_int_equal(t->get_manifest(h, "empty", &data, &len), 0);
    assert_non_null(data);
    assert_int_equal(len, 0);
    free(data);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    t->close(h);
}

/* Random names over an alphabet of trouble: what encodes decodes to itself, and never to
 * another. */
static void names_are_injective(void **state)
{
    static const char letters[] = "%/2F.ctmp\x01hunks5";
    uint64_t rng = unit_seed();
    (void)state;

    for (size_t i = 0; i < unit_rounds(200000); i++) {
        char name[12] = "", file[KVS_FILE_NAME], back[KVS_FILE_NAME];
        size_t len = 1 + unit_below(&rng, 9);

        for (size_t k = 0; k < len; k++)
            name[k] = letters[unit_below(&rng, sizeof(letters) - 1)];
        assert_int_equal(kvs_file_name_encode(file, name), 0);
        assert_int_equal(kvs_file_name_decode(back, file), 0);
        assert_string_equal(back, name);
        assert_null(strchr(file, '/'));
        assert_true(file[0] != '.' && strcmp(file, "chunks") != 0);
        if (kvs_file_name_decode(back, name) == 0) { /* as a file name */
            assert_int_equal(kvs_file_name_encode(file, back), 0);
            assert_string_equal(file, name);
        }
    }
}

enum damage { TRUNCATED, EMPTIED, ZEROED, FLIPPED, SWAPPED, N_DAMAGES };

static void damage_file(enum damage how, const char *path, const char *other)
{
    static const uint8_t zero[sizeof(blob)];
    char aside[600];
    int fd;

    if (how == SWAPPED) {
        snprintf(aside, sizeof(aside), "%s-", path);
        assert_int_equal(rename(path, aside), 0);
        assert_int_equal(rename(other, path), 0);
        assert_int_equal(rename(aside, other), 0);
        return;
    }
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    if (how == TRUNCATED || how == EMPTIED)
        assert_int_equal(ftruncate(fd, how == TRUNCATED ? 99999 : 0), 0);
    else if (how == ZEROED)
        assert_int_equal(pwrite(fd, zero, 100000, 0), 100000);
    else
        assert_int_equal(pwrite(fd, &(char){(char)(blob[70000] ^ 4)}, 1, 70000), 1);
    close(fd);
}

/* Never wrong bytes; set aside; and the next put repairs, also when no get came first, and when the
 * handle had seen the chunk whole. */
static void damage_is_a_miss(void **state)
{
    const char *options[] = {"", "?sums=files", ""};
    (void)state;

    for (uint64_t i = 0; i < KV_COUNT(options) * N_DAMAGES; i++) {
        enum damage how = (enum damage)(i % N_DAMAGES);
        kv_store_v1 *h = unit_open(options[i / N_DAMAGES]);
        char path[512], other[512];

        assert_int_equal(unit_put(h, 100 + 2 * i, blob, 100000), 0);
        assert_int_equal(unit_put(h, 101 + 2 * i, blob + 1, 100000), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        if (i / N_DAMAGES == 2) {
            assert_int_equal(unit_put(h, 100 + 2 * i, blob, 100000), 1);
            assert_int_equal(unit_put(h, 101 + 2 * i, blob + 1, 100000), 1);
            assert_int_equal(unit_publish(h, "m", "x"), 0);
        }
        unit_path(path, 100 + 2 * i);
        unit_path(other, 101 + 2 * i);
        damage_file(how, path, other);
        if (how != FLIPPED) /* which only a read can tell */
            assert_int_equal(unit_put(h, 100 + 2 * i, blob, 100000), 0);
        else
            assert_int_equal(unit_get(h, 100 + 2 * i, blob, 100000), -EBADMSG);
        if (how == FLIPPED)
            assert_int_equal(unit_put(h, 100 + 2 * i, blob, 100000), 0);
        if (how == SWAPPED)
            assert_int_equal(unit_get(h, 101 + 2 * i, blob, 100000), -EBADMSG);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_get(h, 100 + 2 * i, blob, 100000), 0);
        assert_true(unit_count(".kvasir/bad") > 0);
        kvs_file_vtable()->close(h);
    }
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

static void bad_manifest(void **state)
{
    kv_store_v1 *h = unit_open("");
    uint8_t *data;
    size_t len;
    char path[256];
    (void)state;

    assert_int_equal(unit_publish(h, "torn", "a manifest"), 0);
    snprintf(path, sizeof(path), "%s/torn", unit_dir);
    assert_int_equal(truncate(path, 3), 0);
    assert_int_equal(kvs_file_vtable()->get_manifest(h, "torn", &data, &len), -EBADMSG);
    /* it stays, so that collection goes on seeing it, until it is published again */
    assert_int_equal(kvs_file_vtable()->get_manifest(h, "torn", &data, &len), -EBADMSG);
    assert_int_equal(unit_publish(h, "torn", "a manifest"), 0);
    assert_int_equal(kvs_file_vtable()->get_manifest(h, "torn", &data, &len), 0);
    free(data);
    kvs_file_vtable()->close(h);
}

/* Files of others who use the layout: read, hit and marked, replaced when torn. */
static void foreign_files(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    (void)state;

    unit_path(path, 500);
    unit_write(path, blob, 5000);
    assert_int_equal(unit_get(h, 500, blob, 5000), 0);
    assert_int_equal(unit_put(h, 500, blob, 5000), 1);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    unit_path(path, 501);
    unit_write(path, blob, 100);
    assert_int_equal(unit_put(h, 501, blob, 5000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(h, 501, blob, 5000), 0);
    unit_path(path, 502);
    unit_write(path, "", 0);
    assert_int_equal(unit_get(h, 502, blob, 0), -EBADMSG);
    unit_path(path, 503);
    unit_write(path, "\0\0\0\0", 4);
    assert_int_equal(unit_get(h, 503, blob, 4), -EBADMSG);
    kvs_file_vtable()->close(h);
}

/* The first bytes under a key stay: chunks are immutable. */
static void first_put_stays(void **state)
{
    kv_store_v1 *a = unit_open(""), *b = unit_open("");
    (void)state;

    assert_int_equal(unit_put(a, 600, blob, 1000), 0);
    assert_int_equal(unit_put(b, 600, blob + 7, 1000), 0); /* neither knows of the other */
    assert_int_equal(unit_publish(a, "a", "x"), 0);
    assert_int_equal(unit_publish(b, "b", "x"), 0);
    assert_int_equal(unit_get(b, 600, blob, 1000), 0);
    assert_int_equal(unit_put(b, 600, blob + 9, 1000), 1);
    assert_int_equal(unit_put(b, 600, blob + 9, 10), 1);
    assert_int_equal(unit_get(b, 600, blob, 1000), 0);
    kvs_file_vtable()->close(a);
    kvs_file_vtable()->close(b);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* A handle that knows a chunk neither keeps other bytes under its key nor takes others for the
 * same. */
static void known_chunks_stay_what_they_are(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    char path[512];
    (void)state;

    for (int round = 0; round < 3; round++) {
        assert_int_equal(unit_put(h, 750, blob, 1000), round > 0);
        assert_int_equal(unit_put(h, 751, blob, 0), round > 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
    }
    for (int round = 0; round < 2; round++) {
        assert_int_equal(unit_put(h, 750, blob + 1, 1000), 1); /* other bytes, another length */
        assert_int_equal(unit_put(h, 751, blob, 10), 1);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_get(h, 750, blob, 1000), 0);
        assert_int_equal(unit_get(h, 751, blob, 0), 0);
    }
    unit_path(path, 750);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_put(h, 750, blob + 1, 1000), 0); /* gone: now others are the first */
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(other, 750, blob + 1, 1000), 0);
    assert_int_equal(unit_put(h, 750, blob, 1000), 1);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
}

/* A chunk that was hit by a link is there after the publication, also when somebody deleted it meanwhile. */
static void hits_are_pinned(void **state)
{
    kv_store_v1 *h = unit_open("?sums=files");
    char path[512];
    (void)state;

    assert_int_equal(unit_put(h, 700, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_put(h, 700, blob, 1000), 1);
    unit_path(path, 700);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unit_get(h, 700, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(access(path, F_OK), 0);
    kvs_file_vtable()->close(h);
}

/* A chunk that another writer replaced while ours is pending, flushed or not, is read as everybody reads it. When the other's is
 * damaged, ours is read. */
static void replaced_while_pending(void **state)
{
    static const char *const options[] = {"", "?sums=files"};
    (void)state;

    for (uint64_t n = 710; n < 714; n++) {
        kv_store_v1 *h = unit_open(options[n % 2]), *other = unit_open(options[n % 2]);
        char path[512];
        uint8_t key[8];

        assert_int_equal(unit_put(h, n, blob, 1000), 0);
        if (n < 712) {
            assert_int_equal(kvs_file_publish(h, NULL, NULL, 0), 0);
            unit_key(key, n);
            assert_int_equal(kvs_file_delete_chunk(other, key, sizeof(key)), 0);
        }
        assert_int_equal(unit_put(other, n, blob + 5000, 900), 0);
        assert_int_equal(unit_get(h, n, blob, 1000), 0);
        assert_int_equal(unit_publish(other, "o", "x"), 0);
        assert_int_equal(unit_get(other, n, blob + 5000, 900), 0);
        assert_int_equal(unit_get(h, n, blob + 5000, 900), 0);
        unit_path(path, n);
        if (n != 711) {                  /* the side-car of what was flushed is theirs now */
            unit_write(path, blob, 900); /* damages theirs */
            assert_int_equal(unit_get(h, n, blob, 1000), 0);
            assert_int_equal(unit_publish(h, "m", "x"), 0);
            assert_int_equal(unit_get(other, n, blob, 1000), 0);
        }
        kvs_file_vtable()->close(h);
        kvs_file_vtable()->close(other);
    }
}

/* One that only a lease keeps fails the publication when it is deleted by hand, and the next save stores it. */
static void deleted_hits_fail_the_publication(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    (void)state;

    unit_path(path, 701);
    for (int found_out = 0; found_out < 2; found_out++) {
        unit_put(h, 701, blob, 1000);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_put(h, 701, blob, 1000), 1);
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
        assert_int_equal(unlink(path), 0);
        if (found_out)
            assert_int_equal(unit_get(h, 701, blob, 1000), -ENOENT);
        assert_int_equal(unit_publish(h, "m", "y"), -EIO);
        assert_int_equal(unit_put(h, 701, blob, 1000), 0);
        assert_int_equal(unit_publish(h, "m", "y"), 0);
        assert_int_equal(unit_get(h, 701, blob, 1000), 0);
    }
    kvs_file_vtable()->close(h);
}

static void dead_writers_are_swept(void **state)
{
    kv_store_v1 *h;
    int status;
    pid_t child = fork();
    (void)state;

    if (child == 0) {
        h = unit_open("");
        _exit(unit_put(h, 800, blob, 1000) == 0 ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(unit_count(".kvasir/tmp"), 1);
    assert_int_equal(unit_count(".kvasir/writers"), 1);
    h = unit_open("");
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/writers"), 1); /* ours */
    assert_int_equal(unit_put(h, 800, blob, 1000), 0);
    kv_store_v1 *second = unit_open(""); /* does not sweep the living */
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(second, 800, blob, 1000), 0);
    kvs_file_vtable()->close(second);
    kvs_file_vtable()->close(h);
}

static void a_child_leaves_the_handle_alone(void **state)
{
    kv_store_v1 *h = unit_open("");
    int status;
    pid_t child;
    (void)state;

    assert_int_equal(unit_put(h, 810, blob, 1000), 0);
    child = fork();
    if (child == 0) {
        int rc = unit_put(h, 811, blob, 10) == -ECHILD && unit_publish(h, "m", "x") == -ECHILD;

        kvs_file_vtable()->close(h);
        _exit(rc ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(h, 810, blob, 1000), 0);
    kvs_file_vtable()->close(h);
}

static void options(void **state)
{
    static const char *const bad[] = {
        "?limit=x", "?limit=-1", "?limit=1Q", "?limit=1Gi", "?limit=17179869184GiB",
        "?zstd=20", "?sync=no",  "?a=b",      "?limit=",    "?zstd=1&x=1"};
    static const struct {
        const char *text;
        uint64_t bytes;
    } sizes[] = {
        {"7", 7},          {"7B", 7},          {"3K", 3 << 10}, {"3KiB", 3 << 10},
        {"5MiB", 5 << 20}, {"1GiB", 1 << 30},  {"1G", 1 << 30}, {"2TiB", UINT64_C(2) << 40},
        {"5MB", 5000000},  {"1GB", 1000000000}};
    kv_store_v1 *h;
    char uri[256];
    (void)state;

    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        snprintf(uri, sizeof(uri), "%s%s", unit_dir, bad[i]);
        assert_null(kvs_file_vtable()->open(uri));
    }
    assert_null(kvs_file_vtable()->open(""));
    assert_null(kvs_file_vtable()->open(NULL));
    assert_null(kvs_file_vtable()->open("/dev/null"));
    h = unit_open("?limit=10M&zstd=3&sync=fs");
    assert_int_equal(h->opts.limit, 10 << 20);
    assert_int_equal(h->opts.zstd, 3);
    assert_int_equal(h->opts.sync, KVS_FILE_SYNC_FS);
    kvs_file_vtable()->close(h);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        char option[32];

        snprintf(option, sizeof(option), "?limit=%s", sizes[i].text);
        h = unit_open(option);
        assert_int_equal(h->opts.limit, sizes[i].bytes);
        kvs_file_vtable()->close(h);
    }
    h = unit_open("/deep/er/wh?t/");
    assert_int_equal(unit_put(h, 1, "x", 1), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    kvs_file_vtable()->close(h);
}

static void zstd(void **state)
{
    kv_store_v1 *h = unit_open("?zstd=3"), *plain;
    uint8_t *text = calloc(1, 200000);
    struct stat st;
    char path[512];
    (void)state;

    for (size_t i = 0; i < 200000; i++)
        text[i] = (uint8_t)(i / 1000);
    assert_int_equal(unit_put(h, 900, text, 200000), 0);
    assert_int_equal(unit_put(h, 901, blob, 200000), 0); /* doesn't compress: raw */
    assert_int_equal(unit_put(h, 902, blob, 0), 0);
    assert_int_equal(unit_get(h, 900, text, 200000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    unit_path(path, 900);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size < 20000);
    plain = unit_open("");
    assert_int_equal(unit_get(plain, 900, text, 200000), 0);
    assert_int_equal(unit_get(plain, 901, blob, 200000), 0);
    assert_int_equal(unit_get(plain, 902, blob, 0), 0);
    assert_int_equal(unit_put(plain, 900, text, 200000), 1);
    assert_int_equal(truncate(path, st.st_size - 1), 0);
    assert_int_equal(unit_get(plain, 900, text, 200000), -EBADMSG);
    kvs_file_vtable()->close(plain);
    kvs_file_vtable()->close(h);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(puts_and_gets),
        cmocka_unit_test(keys_of_all_lengths),
        cmocka_unit_test(manifests),
        cmocka_unit_test(names_are_injective),
        cmocka_unit_test(damage_is_a_miss),
        cmocka_unit_test(bad_manifest),
        cmocka_unit_test(foreign_files),
        cmocka_unit_test(first_put_stays),
        cmocka_unit_test(known_chunks_stay_what_they_are),
        cmocka_unit_test(hits_are_pinned),
        cmocka_unit_test(replaced_while_pending),
        cmocka_unit_test(deleted_hits_fail_the_publication),
        cmocka_unit_test(dead_writers_are_swept),
        cmocka_unit_test(a_child_leaves_the_handle_alone),
        cmocka_unit_test(options),
        cmocka_unit_test(zstd),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
