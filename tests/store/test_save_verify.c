// SPDX-License-Identifier: Apache-2.0
/* Saves that verify: a chunk that the store has, with other bytes, is stored anew, or the save fails. */
#include "backends.h"
#include "base/unit.h"

enum { BYTES = 300000 };

static uint8_t object[BYTES];

static void no_log(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static int set_up(void **state)
{
    uint64_t rng = 7;

    kvs_set_log(no_log, NULL);
    for (size_t i = 0; i < BYTES; i++)
        object[i] = (uint8_t)unit_below(&rng, 256);
    return backends_set_up(state);
}

static const char *uri_of(enum backend which)
{
    return which == PARTS     ? "memory://parts"
           : which == BATCHES ? "memory://all"
           : which == SINGLE  ? "memory://gets1"
                              : "memory://bare";
}

static int save(struct kvs_store *store, bool verify, struct kvs_result *ret)
{
    const struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 4096, .verify = verify};

    return kvs_save_buffer(store, "o", object, BYTES, &opts, ret);
}

static int restored(struct kvs_store *store)
{
    void *data;
    size_t len;
    int rc = kvs_restore_buffer(store, "o", &data, &len, NULL);

    if (rc == 0) {
        assert_int_equal(len, BYTES);
        assert_memory_equal(data, object, BYTES);
        free(data);
    }
    return rc;
}

/* Change every third chunk in place, at its length. The memory backend takes any bytes for right. */
static size_t damage(enum backend which)
{
    struct memory_object *o = memory_space(uri_of(which))->chunks;
    size_t n = 0;

    for (size_t i = 0; o; o = o->next, i++) {
        if (i % 3)
            continue;
        o->data[o->len / 2] ^= 1;
        n++;
    }
    return n;
}

static void test_mended(void **state)
{
    struct kvs_result result = KVS_RESULT_INIT;

    (void)state;
    for (enum backend which = PARTS; which < BARE; which++) {
        struct kvs_store *store = backends_open(which);
        size_t n;

        assert_int_equal(save(store, true, &result), 0);
        assert_int_equal(restored(store), 0);
        n = damage(which);
        assert_true(n > 5);
        assert_int_equal(save(store, false, NULL), 0);
        assert_int_equal(restored(store), -EBADMSG); /* by default the backend judges */
        assert_int_equal(save(store, true, &result), 0);
        assert_int_equal(result.new_chunks, n);
        assert_int_equal(restored(store), 0);
        assert_int_equal(save(store, true, &result), 0);
        assert_int_equal(result.new_chunks, 0);
        kvs_close(store);
    }
}

/* Without a way to delete a chunk nothing can replace it: the save says so. */
static void test_cannot_be_mended(void **state)
{
    struct kvs_store *store = backends_open(BARE);
    struct kvs_manifest *before, *after;
    size_t n;

    (void)state;
    assert_int_equal(save(store, true, NULL), 0);
    assert_int_equal(kvs_manifest_get(store, "o", &before), 0);
    object[1]++;
    damage(BARE);
    assert_int_equal(save(store, true, NULL), -EBADMSG);
    object[1]--;
    assert_int_equal(kvs_manifest_get(store, "o", &after), 0); /* the object of before */
    assert_memory_equal(kvs_manifest_chunks(before, &n), kvs_manifest_chunks(after, &n),
                        sizeof(struct kvs_chunk_ref));
    kvs_manifest_free(before);
    kvs_manifest_free(after);
    kvs_close(store);
}

/* A store that can't be read can't be verified. */
static void test_unreadable(void **state)
{
    (void)state;
    for (enum backend which = PARTS; which < BARE; which++) {
        struct kvs_store *store = backends_open(which);
        struct memory_space *space = memory_space(uri_of(which));

        space->fail_gets = -EACCES;
        assert_int_equal(save(store, true, NULL), -EACCES);
        assert_int_equal(save(store, false, NULL), 0);
        space->fail_gets = 0;
        assert_int_equal(save(store, true, NULL), 0);
        kvs_close(store);
    }
}

/* File stores verify anyway; the option reads once more, and changes nothing. */
static void test_files(void **state)
{
    struct kvs_result result = KVS_RESULT_INIT;

    (void)state;
    for (enum backend which = FILES; which <= SIDE_CARS; which++) {
        struct kvs_store *store = backends_open(which);

        assert_int_equal(save(store, true, NULL), 0);
        assert_int_equal(save(store, true, &result), 0);
        assert_int_equal(result.new_chunks, 0);
        assert_int_equal(restored(store), 0);
        kvs_close(store);
    }
}

/* Callers that were built before the option don't have it. */
static void test_older_options(void **state)
{
    struct kvs_save_opts opts = {.size = offsetof(struct kvs_save_opts, verify), .verify = true};
    struct kvs_store *store = backends_open(PARTS);

    (void)state;
    memory_space("memory://parts")->fail_gets = -EACCES;
    assert_int_equal(kvs_save_buffer(store, "o", object, BYTES, &opts, NULL), 0);
    memory_space("memory://parts")->fail_gets = 0;
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_mended, set_up, backends_tear_down),
        cmocka_unit_test_setup_teardown(test_cannot_be_mended, set_up, backends_tear_down),
        cmocka_unit_test_setup_teardown(test_unreadable, set_up, backends_tear_down),
        cmocka_unit_test_setup_teardown(test_files, set_up, backends_tear_down),
        cmocka_unit_test_setup_teardown(test_older_options, set_up, backends_tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
