// SPDX-License-Identifier: Apache-2.0
/* Gets of prefetched chunks while a second thread reads the same chunks. */
#include <pthread.h>
#include <sys/wait.h>

#include "store/file_unit.h"

enum { N = 200, BYTES = 9000 };

static uint8_t blob[N + BYTES];

static int setup(void **state)
{
    uint64_t rng = 11;
    kv_store_v1 *h;
    int rc;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    rc = unit_make_dir(state);
    h = unit_open("");
    for (uint64_t i = 0; i < N; i++)
        assert_int_equal(unit_put(h, i, blob + i, BYTES - i), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    kvs_file_vtable()->close(h);
    return rc;
}

static void prefetch(kv_store_v1 *h, uint64_t from, uint64_t n)
{
    uint8_t keys[N][8];

    for (uint64_t i = 0; i < n; i++)
        unit_key(keys[i], from + i);
    assert_int_equal(kvs_file_vtable()->prefetch_chunks(h, keys[0], 8, n), 0);
}

static int get(kv_store_v1 *h, uint64_t n)
{
    return unit_get(h, n, blob + n, BYTES - n);
}

/* The reader needs a moment to be ahead: gets that come at once don't show what it gives. */
static void let_it_read(kv_store_v1 *h)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    for (int i = 0; i < 100; i++) {
        assert_int_equal(kvs_file_ext()->stats(h, &stats), 0);
        if (stats.bytes_read > 10 * (uint64_t)(BYTES - N))
            return;
        usleep(2000);
    }
}

static void in_order(void **state)
{
    kv_store_v1 *h = unit_open("");
    (void)state;

    for (int round = 0; round < 3; round++) {
        prefetch(h, 0, N);
        if (round)
            let_it_read(h);
        for (uint64_t i = 0; i < N; i++)
            assert_int_equal(get(h, i), 0);
    }
    kvs_file_vtable()->close(h);
}

/* Some twice, some never, some long before their turn; and a prefetch that another replaces. */
static void in_any_order(void **state)
{
    kv_store_v1 *h = unit_open("");
    uint64_t rng = unit_seed();
    (void)state;

    for (size_t round = 0; round < unit_rounds(30); round++) {
        prefetch(h, 0, N - unit_below(&rng, N - 1));
        for (uint64_t i = 0; i < N; i += unit_below(&rng, 4)) {
            assert_int_equal(get(h, i), 0);
            if (unit_below(&rng, 20) == 0)
                assert_int_equal(get(h, unit_below(&rng, N)), 0);
        }
    }
    kvs_file_vtable()->close(h);
}

/* A chunk that was deleted on this handle isn't there, though the reader had it; a damaged one is bad. */
static void gone_and_bad(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    uint8_t key[8];
    int fd;
    (void)state;

    unit_path(path, 12);
    fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "?????", 5, 1000), 5);
    close(fd);
    prefetch(h, 0, N);
    let_it_read(h);
    unit_key(key, 10);
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, 8), 0);
    for (uint64_t i = 0; i < N; i++)
        assert_int_equal(get(h, i), i == 10 ? -ENOENT : i == 12 ? -EBADMSG : 0);
    assert_int_equal(unit_count(".kvasir/bad"), 1);
    for (uint64_t i = 10; i <= 12; i += 2)
        assert_int_equal(unit_put(h, i, blob + i, BYTES - i), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    kvs_file_vtable()->close(h);
}

static void *get_all(void *h)
{
    for (uint64_t i = 0; i < N; i++) {
        if (i % 50 == 0)
            prefetch(h, i, N - i);
        if (get(h, i) != 0)
            return "get";
    }
    return NULL;
}

static void threads(void **state)
{
    kv_store_v1 *h = unit_open("");
    pthread_t all[4];
    void *failed;
    (void)state;

    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&all[i], NULL, get_all, h), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(all[i], &failed);
        assert_null(failed);
    }
    kvs_file_vtable()->close(h);
}

/* Chunks that nobody took go with the handle; a forked child closes without the thread. */
static void closed_early(void **state)
{
    kv_store_v1 *h;
    pid_t child;
    int status;
    (void)state;

    for (int i = 0; i < 20; i++) {
        h = unit_open("");
        prefetch(h, 0, N);
        assert_int_equal(get(h, 0), 0);
        kvs_file_vtable()->close(h);
    }
    h = unit_open("");
    prefetch(h, 0, N);
    child = fork();
    if (child == 0) {
        kvs_file_vtable()->close(h);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(get(h, 1), 0);
    kvs_file_vtable()->close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order), cmocka_unit_test(in_any_order), cmocka_unit_test(gone_and_bad),
        cmocka_unit_test(threads),  cmocka_unit_test(closed_early),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
