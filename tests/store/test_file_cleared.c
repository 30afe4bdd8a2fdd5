// SPDX-License-Identifier: Apache-2.0
/* The store's folder is cleared, removed, replaced or moved beneath open handles. */
#include <pthread.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "store/file_unit.h"

static uint8_t blob[100000];
static _Atomic int n_lines;
static char last_line[2000];

static void keep_line(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* threads log at the same time */

    (void)arg;
    if (level > KV_LOG_WARN)
        return;
    pthread_mutex_lock(&lock);
    snprintf(last_line, sizeof(last_line), "%.*s", (int)len, line);
    n_lines++;
    pthread_mutex_unlock(&lock);
}

/* Run a command of the shell on the store's folder, $D. */
static void run(const char *what)
{
    char text[600];

    snprintf(text, sizeof(text), "D='%s'; %s", unit_dir, what);
    assert_int_equal(system(text), 0);
}

static int flush(kv_store_v1 *h)
{
    return kvs_file_ext()->flush(h);
}

static const char *const clearings[] = {
    "rm -rf $D/* $D/.kvasir", /* all that is in it */
    "rm -rf $D/*",            /* as most people write it: .kvasir stays */
    "rm -rf $D",
    "rm -rf $D; mkdir $D",
    "rm -rf $D/.kvasir",
    "rm -rf $D/chunks",
    "rm -rf $D/chunks/*",
    "rm -rf $D/.kvasir/*",
    "rm -rf $D/.kvasir/tmp",
    "rm -rf $D/.kvasir/writers",
    "rm -rf $D/.kvasir/writers/*",
    "mkdir $D.t; mv $D/chunks $D.t; rm -rf $D.t",
    "mkdir $D.t; mv $D/* $D/.kvasir $D.t",
    "mv $D $D.old; mkdir $D",
    "mv $D $D.old; mkdir $D; rm -rf $D.old",
};

static void new_folder(void)
{
    run("rm -rf $D $D.old $D.t; mkdir $D");
}

static void what_is_stored_later_is_kept(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(clearings); i++) {
        kv_store_v1 *h, *other;

        new_folder();
        h = unit_open("");
        other = unit_open("");
        for (uint64_t n = 0; n < 20; n++)
            assert_int_equal(unit_put(h, n, blob, 1000 + n), 0);
        assert_int_equal(unit_publish(h, "old", "x"), 0);
        run(clearings[i]);
        n_lines = 0;
        for (uint64_t n = 20; n < 40; n++)
            assert_int_equal(unit_put(h, n, blob, 1000 + n), 0);
        assert_int_equal(unit_publish(h, "new", "x"), 0);
        assert_int_equal(n_lines, 1);
        for (uint64_t n = 20; n < 40; n++) {
            assert_int_equal(unit_get(h, n, blob, 1000 + n), 0);
            assert_int_equal(unit_get(other, n, blob, 1000 + n), 0);
        }
        assert_int_equal(unit_put(other, 50, blob, 50), 0);
        assert_int_equal(unit_publish(other, "others", "x"), 0);
        assert_int_equal(unit_get(h, 50, blob, 50), 0);
        kvs_file_vtable()->close(h);
        kvs_file_vtable()->close(other);
        h = unit_open("?create=no"); /* all is where a new handle looks for it */
        for (uint64_t n = 20; n < 40; n++)
            assert_int_equal(unit_get(h, n, blob, 1000 + n), 0);
        assert_int_equal(unit_get(h, 50, blob, 50), 0);
        assert_int_equal(unit_count(".kvasir/tmp"), 0);
        kvs_file_vtable()->close(h);
    }
}

/* Chunks that are put and not published go with the folder: no publication that may need one
 * succeeds. */
static void pending_chunks_are_told(void **state)
{
    static const char own[] = "?sync=files";
    (void)state;
    for (int with_flush = 0; with_flush < 2; with_flush++)
        for (size_t i = 0; i < 4; i++) {
            bool kept = i == 1; /* tmp/ is left, with what was put */
            kv_store_v1 *h;

            new_folder();
            h = unit_open(own);
            assert_int_equal(unit_put(h, 1, blob, 1000), 0);
            run(clearings[i]);
            if (with_flush)
                assert_int_equal(flush(h), kept ? 0 : -EIO);
            else
                assert_int_equal(unit_publish(h, "m", "x"), kept ? 0 : -EIO);
            assert_int_equal(unit_get(h, 1, blob, 1000), kept ? 0 : -ENOENT);
            assert_int_equal(unit_put(h, 2, blob, 2000), 0);
            assert_int_equal(with_flush ? flush(h) : unit_publish(h, "m", "x"), 0);
            assert_int_equal(unit_get(h, 2, blob, 2000), 0);
            kvs_file_vtable()->close(h);
        }
}

/* A hit is a promise, too. */
static void hits_are_told(void **state)
{
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        kv_store_v1 *h, *other;

        new_folder();
        other = unit_open("");
        assert_int_equal(unit_put(other, 1, blob, 1000), 0);
        assert_int_equal(unit_publish(other, "theirs", "x"), 0);
        h = unit_open("");
        assert_int_equal(unit_put(h, 1, blob, 1000), 1);
        run(clearings[i]);
        assert_int_equal(unit_publish(h, "m", "x"), -EIO);
        assert_int_equal(unit_put(h, 1, blob, 1000), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        assert_int_equal(unit_get(other, 1, blob, 1000), 0);
        kvs_file_vtable()->close(h);
        kvs_file_vtable()->close(other);
    }
}

static void a_moved_folder_is_used_on(void **state)
{
    kv_store_v1 *h;
    (void)state;

    new_folder();
    h = unit_open("");
    assert_int_equal(unit_put(h, 1, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    run("mv $D $D.old");
    n_lines = 0;
    assert_int_equal(unit_put(h, 2, blob, 2000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(h, 1, blob, 1000), 0);
    assert_int_equal(n_lines, 1);
    assert_non_null(strstr(last_line, "was moved"));
    run("test ! -e $D; mv $D.old $D"); /* nobody made another one, so it can be moved back */
    assert_int_equal(unit_get(h, 2, blob, 2000), 0);
    assert_int_equal(n_lines, 1);
    kvs_file_vtable()->close(h);
}

static void another_folder_is_followed(void **state)
{
    kv_store_v1 *h, *other;
    (void)state;

    new_folder();
    h = unit_open("");
    assert_int_equal(unit_put(h, 1, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "old", "x"), 0);
    run("mv $D $D.old; mkdir $D");
    other = unit_open("");
    assert_int_equal(unit_put(other, 2, blob, 2000), 0);
    assert_int_equal(unit_publish(other, "new", "x"), 0);
    n_lines = 0;
    assert_int_equal(unit_get(h, 2, blob, 2000), 0);
    assert_int_equal(n_lines, 1);
    assert_non_null(strstr(last_line, "another folder"));
    assert_int_equal(unit_get(h, 1, blob, 1000), -ENOENT);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

/* A tool that must not make a store doesn't. */
static void nothing_is_made_without_leave(void **state)
{
    kv_store_v1 *h;
    (void)state;

    new_folder();
    kvs_file_vtable()->close(unit_open(""));
    h = unit_open("?create=no");
    run("rm -rf $D");
    assert_int_equal(unit_get(h, 1, blob, 1000), -ENOENT);
    assert_int_equal(unit_put(h, 1, blob, 1000), -EIO);
    run("test ! -e $D");
    kvs_file_vtable()->close(h);
    new_folder();
}

/* -- Threads of a moment ------------------------------------------------------------------------- */

struct moment {
    kv_store_v1 *h;
    uint64_t n;
    int rc;
};

static void *save_once(void *arg)
{
    struct moment *m = arg;

    m->rc = unit_put(m->h, m->n, blob, 500);
    if (m->rc >= 0)
        m->rc = flush(m->h);
    return NULL;
}

static int save_by_a_thread(kv_store_v1 *h, uint64_t n)
{
    struct moment m = {h, n, 0};
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, save_once, &m), 0);
    pthread_join(thread, NULL);
    return m.rc;
}

/* A program with a thread for each save goes on: its threads come after the loss, but for a moment. */
static void short_threads_save_on(void **state)
{
    kv_store_v1 *h;
    (void)state;

    new_folder();
    h = unit_open("");
    assert_int_equal(unit_put(h, 1, blob, 1000), 0);
    run("rm -rf $D/* $D/.kvasir");
    assert_int_equal(save_by_a_thread(h, 2), -EIO); /* it may end the save of chunk 1 */
    h->places.lost_ns -= 11 * KV_NS_PER_S;
    for (uint64_t n = 100; n < 400; n++)
        assert_int_equal(save_by_a_thread(h, n), 0);
    assert_int_equal(flush(h), -EIO); /* this thread has put chunk 1 */
    assert_int_equal(flush(h), 0);
    kvs_file_vtable()->close(h);
}

enum { MANY = 100 };

static pthread_barrier_t all_there;

/* Save, wait for the loss, save until it is heard of, and save again. */
static void *save_on(void *arg)
{
    struct moment *m = arg;

    m->rc = unit_put(m->h, m->n, blob, 500);
    pthread_barrier_wait(&all_there);
    pthread_barrier_wait(&all_there);
    for (int i = 0; i < 3; i++) {
        pthread_barrier_wait(&all_there); /* all flush in turns */
        m->rc = unit_put(m->h, m->n + 1000 + (uint64_t)i, blob, 500);
        m->rc = m->rc < 0 ? m->rc : flush(m->h);
    }
    return NULL;
}

/* Each of many threads hears of the loss once. */
static void many_threads_save_on(void **state)
{
    struct moment m[MANY];
    pthread_t threads[MANY];
    kv_store_v1 *h;
    (void)state;

    new_folder();
    h = unit_open("");
    assert_int_equal(pthread_barrier_init(&all_there, NULL, MANY + 1), 0);
    for (uint64_t i = 0; i < MANY; i++) {
        m[i] = (struct moment){h, 10000 * (i + 1), 0};
        assert_int_equal(pthread_create(&threads[i], NULL, save_on, &m[i]), 0);
    }
    pthread_barrier_wait(&all_there);
    run("rm -rf $D/* $D/.kvasir");
    for (int i = 0; i < 4; i++)
        pthread_barrier_wait(&all_there);
    for (uint64_t i = 0; i < MANY; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(m[i].rc, 0);
    }
    pthread_barrier_destroy(&all_there);
    kvs_file_vtable()->close(h);
}

/* -- With threads ------------------------------------------------------------------------------- */

enum { THREADS = 4, TURNS = 60, LAST = 1000 };

static kv_store_v1 *shared;
static _Atomic bool cleared_last;
static _Atomic int first, strange;

/* Put and flush until all is quiet; afterwards each flush must keep what was put before it. */
static void *save(void *arg)
{
    uint64_t n = (uint64_t)(uintptr_t)arg * 100000;

    (void)arg;
    while (!cleared_last) {
        int rc = unit_put(shared, ++n, blob, 500);

        strange = rc < 0 && rc != -EIO ? rc : strange;
        rc = flush(shared);
        strange = rc < 0 && rc != -EIO ? rc : strange;
        first++;
    }
    return NULL;
}

static void cleared_while_threads_save(void **state)
{
    pthread_t threads[THREADS];
    (void)state;

    new_folder();
    shared = unit_open("");
    cleared_last = false;
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, save, (void *)(i + 1)), 0);
    for (int i = 0; i < TURNS; i++) {
        int before = first;

        run(i % 2 ? "find $D -mindepth 1 -delete 2>/dev/null; true"
                  : "mv $D $D.old && mkdir -p $D && rm -rf $D.old; rm -rf $D.old; true");
        wait_until(first >= before + 3);
    }
    cleared_last = true;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(strange, 0);
    for (int i = 0; i < 3 && flush(shared) < 0; i++)
        ; /* this thread may be told, too */
    for (uint64_t n = LAST; n < LAST + 50; n++) {
        assert_int_equal(unit_put(shared, n, blob, 500), 0);
        assert_int_equal(flush(shared), 0);
        assert_int_equal(unit_get(shared, n, blob, 500), 0);
    }
    kvs_file_vtable()->close(shared);
    shared = unit_open("?create=no");
    for (uint64_t n = LAST; n < LAST + 50; n++)
        assert_int_equal(unit_get(shared, n, blob, 500), 0);
    kvs_file_vtable()->close(shared);
}

static int setup(void **state)
{
    uint64_t rng = 13;
    int rc = unit_make_dir(state);

    kv_log_set_sink(keep_line, NULL);
    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return rc;
}

static int teardown(void **state)
{
    run("rm -rf $D.old $D.t");
    return unit_rm_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_stored_later_is_kept),
        cmocka_unit_test(pending_chunks_are_told),
        cmocka_unit_test(hits_are_told),
        cmocka_unit_test(a_moved_folder_is_used_on),
        cmocka_unit_test(another_folder_is_followed),
        cmocka_unit_test(nothing_is_made_without_leave),
        cmocka_unit_test(short_threads_save_on),
        cmocka_unit_test(many_threads_save_on),
        cmocka_unit_test(cleared_while_threads_save),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
