// SPDX-License-Identifier: Apache-2.0
/* Blobs that move while they are read and written: none is ever missing. */
#include "tiered_unit.h"

#include <pthread.h>

#include "tiered/move.h"

enum { KEYS = 16 };

static void keys_of(uint64_t first, size_t n, uint8_t *ret)
{
    uint8_t data[LEN];

    for (size_t i = 0; i < n; i++)
        make_blob(first + i, ret + i * 16, data);
}

static void test_steps(void **state)
{
    uint8_t keys[4 * 16], data[LEN];
    struct world w;
    int each[4];
    (void)state;

    world_open(&w, "puts = fast\n", "");
    for (uint64_t n = 0; n < 3; n++)
        assert_int_equal(put_blob(w.store, n), 0);
    publish(w.store, "m");
    keys_of(0, 4, keys); /* the last one is nowhere */
    make_blob(77, keys + 4 * 16 - 16, data);
    assert_int_equal(kvs_put_chunk(w.cold, keys + 16, 16, "other", 5), 0);
    publish(w.cold, "x");
    assert_int_equal(trd_move_copy(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 4, each), 2);
    assert_int_equal(each[0], 0);
    assert_int_equal(each[1], -EEXIST); /* the target has other bytes: nothing is removed */
    assert_int_equal(each[2], 0);
    assert_int_equal(each[3], -ENOENT);
    assert_int_equal(
        trd_move_remove(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 4, each, NULL, NULL), 2);
    assert_int_equal(each[0], 1);
    assert_int_equal(each[1], 0);
    assert_int_equal(each[2], 1);
    assert_int_equal(each[3], -ENOENT);
    assert_int_equal(get_blob(w.fast, 0), -ENOENT);
    assert_int_equal(get_blob(w.fast, 1), 0);
    for (uint64_t n = 0; n < 3; n++)
        assert_int_equal(get_blob(w.store, n), 0);
    assert_int_equal(
        trd_move_remove(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 1, each, NULL, NULL),
        0); /* again */
    assert_int_equal(trd_move_copy(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 0, NULL), 0);
    world_close(&w);
}

static bool may_once(void *arg)
{
    return ++*(int *)arg == 1;
}

/* A mover that is stopped within a call removes nothing more. */
static void test_stopped_within(void **state)
{
    uint8_t keys[3 * 16];
    int each[3], asked = 0;
    struct world w;
    (void)state;

    world_open(&w, "puts = fast\n", "");
    for (uint64_t n = 0; n < 3; n++)
        assert_int_equal(put_blob(w.store, n), 0);
    publish(w.store, "m");
    keys_of(0, 3, keys);
    assert_int_equal(trd_move_copy(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 3, each), 3);
    assert_int_equal(
        trd_move_remove(trd_alone(w.fast), trd_alone(w.cold), keys, 16, 3, each, may_once, &asked),
        1);
    assert_int_equal(asked, 2);
    assert_int_equal(each[0], 1);
    assert_int_equal(each[1], -ECANCELED);
    assert_int_equal(each[2], -ECANCELED);
    assert_int_equal(get_blob(w.fast, 0), -ENOENT);
    assert_int_equal(get_blob(w.fast, 1), 0);
    assert_int_equal(get_blob(w.fast, 2), 0);
    world_close(&w);
}

/* A writer's put met the blob in the source. The mover takes it away before the writer publishes. */
static void test_hit_that_moves(void **state)
{
    static const char manifest[] = "of unknown format";
    struct kvs_store *writer;
    uint8_t key[16];
    struct world w;
    int each;
    (void)state;

    world_open(&w, "puts = fast\n", "");
    assert_int_equal(put_blob(w.store, 1), 0);
    publish(w.store, "m");
    writer = open_store(w.uri);
    assert_int_equal(put_blob(writer, 1), 1);
    assert_int_equal(put_blob(writer, 2), 0);
    keys_of(1, 1, key);
    assert_int_equal(trd_move_copy(trd_alone(w.fast), trd_alone(w.cold), key, 16, 1, &each), 1);
    assert_int_equal(
        trd_move_remove(trd_alone(w.fast), trd_alone(w.cold), key, 16, 1, &each, NULL, NULL), 1);
    assert_int_equal(kvs_put_manifest(writer, "n", manifest, sizeof(manifest)), 0);
    assert_int_equal(get_blob(writer, 1), 0);
    assert_int_equal(get_blob(w.fast, 1), 0); /* put again, as the publication promised */
    kvs_close(writer);
    world_close(&w);
}

/* -- all at once ------------------------------------------------------------------------------- */

struct storm {
    struct world w;
    pthread_barrier_t begin;
    size_t reads; /* of each reader */
    _Atomic uint64_t written, false_misses, unsure, got;
    atomic_uint readers;
    atomic_int read_rc, write_rc;
    uint64_t moves;
};

static void *read_all(void *arg)
{
    struct storm *s = arg;
    struct kvs_store *store = open_store(s->w.uri);
    uint64_t state = (uintptr_t)&store | 1;

    pthread_barrier_wait(&s->begin);
    for (size_t i = 0; i < s->reads; i++) {
        int rc = get_blob(store, unit_below(&state, s->written));

        s->got += rc == 0;
        s->false_misses += rc == -ENOENT;
        s->unsure += rc == -EIO; /* answers took longer than linger, three times: no miss */
        if (rc != 0 && rc != -ENOENT && rc != -EIO)
            s->read_rc = rc;
    }
    kvs_close(store);
    s->readers--;
    return NULL;
}

/* A failed call of the writer; the first one counts. */
static void note(struct storm *s, int rc)
{
    int none = 0;

    if (rc < 0)
        atomic_compare_exchange_strong(&s->write_rc, &none, rc);
}

static void *write_more(void *arg)
{
    struct storm *s = arg;
    struct kvs_store *store = open_store(s->w.uri);
    char name[32];

    pthread_barrier_wait(&s->begin);
    for (uint64_t n = KEYS; s->readers; n++) {
        snprintf(name, sizeof(name), "m%u", (unsigned)n % 10);
        for (uint64_t again = n - KEYS; again < n; again++) /* mostly hits, of blobs that move */
            note(s, put_blob(store, again));
        note(s, put_blob(store, n));
        note(s, kvs_put_manifest(store, name, "", 0));
        s->written = n + 1;
        usleep(20000);
    }
    kvs_close(store);
    return NULL;
}

/* Move all blobs to the other member and back, as fast as linger allows. */
static void move_all(struct storm *s, uint64_t linger_ms)
{
    struct kvs_store *from = s->w.fast, *to = s->w.cold, *other;

    while (s->readers) {
        size_t n = s->written;
        uint8_t *keys = malloc(n * 16);
        int *each = calloc(n, sizeof(*each));

        keys_of(0, n, keys);
        if (trd_move_copy(trd_alone(from), trd_alone(to), keys, 16, n, each) > 0) {
            usleep((unsigned)linger_ms * 1000);
            s->moves += (uint64_t)KV_MAX(
                trd_move_remove(trd_alone(from), trd_alone(to), keys, 16, n, each, NULL, NULL), 0);
        }
        free(keys);
        free(each);
        other = from;
        from = to;
        to = other;
    }
}

static void test_storm(void **state)
{
    struct storm s = {.reads = unit_rounds(200000), .written = KEYS, .readers = 2};
    pthread_t threads[3];
    (void)state;

    world_open(&s.w, "puts = fast\nlinger = 50ms\nplaces = 16\n",
               ""); /* most places are forgotten */
    for (uint64_t n = 0; n < KEYS; n++)
        assert_int_equal(put_blob(s.w.store, n), 0);
    publish(s.w.store, "m");
    pthread_barrier_init(&s.begin, NULL, 4);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, i < 2 ? read_all : write_more, &s), 0);
    pthread_barrier_wait(&s.begin);
    move_all(&s, 50);
    for (size_t i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&s.begin);
    print_message("reads=%llu moves=%llu unsure=%llu\n", (unsigned long long)s.got,
                  (unsigned long long)s.moves, (unsigned long long)s.unsure);
    assert_int_equal(s.false_misses, 0);
    assert_int_equal(s.read_rc, 0);
    assert_int_equal(s.write_rc, 0);
    assert_true(s.moves > 0 && s.got > s.reads);
    world_close(&s.w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps), cmocka_unit_test(test_stopped_within),
        cmocka_unit_test(test_hit_that_moves), cmocka_unit_test(test_storm)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
