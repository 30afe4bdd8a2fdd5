// SPDX-License-Identifier: Apache-2.0
/* The object tier's streams and publications when a store hangs or fails in the middle of one. */
#include "tier/object_unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>

/* -- streams ----------------------------------------------------------------------------------- */

/* A stream that hangs between two pieces: the memory is the caller's again, and stays it when the
 * rest comes. */
static void test_hanging_stream(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    shaky->ext = 4;
    opts.breaker_failures = 1000;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 4, 0);
    for (int at = 1; at <= 6; at++) { /* of values in six pieces */
        struct job *late, *cancelled;
        int streams = shaky->streams;

        shaky->hang_at = at;
        cancelled = submit(o, KVBM_OBJECT_GET, 2, 2, 0);
        wait_until(shaky->streams == streams + 1);
        late = submit(o, KVBM_OBJECT_GET, 0, 2, 40);
        ends(late, -ETIMEDOUT);
        kvbm_object_cancel(o, &cancelled->batch);
        ends(cancelled, -ECANCELED);
        shaky->hang_at = 0;
        wait_until(stats_of(o).left_behind == 0 && shaky->inside == 0);
        expect(o, KVBM_OBJECT_GET, 0, 4, 0);
    }
    kvbm_object_close(o);
}

/* -- what is damaged ---------------------------------------------------------------------------- */

static void chunk_key_of(uint64_t number, uint8_t ret[KVBM_OBJECT_CHUNK_KEY])
{
    struct kvbm_object_format f;
    uint8_t key[KVBM_MAX_KEY];

    block_key(number, key);
    kvbm_object_format_init(&f, "model-a/fp16/16", KEY_LEN, BLOCK);
    kvbm_object_chunk_key(&f, 0, key, ret);
}

static void flip_on_disk(uint64_t number, off_t at)
{
    uint8_t key[KVBM_OBJECT_CHUNK_KEY], byte;
    char path[200], hex[2 * sizeof(key) + 1];
    int fd;

    chunk_key_of(number, key);
    for (size_t i = 0; i < sizeof(key); i++)
        snprintf(hex + 2 * i, 3, "%02x", key[i]);
    snprintf(path, sizeof(path), "%s/chunks/%c/%s", folder, hex[0], hex);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 16;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static int set_aside(void)
{
    char path[200];
    struct dirent *e;
    int n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "%s/.kvasir/bad", folder);
    dir = opendir(path);
    while (dir && (e = readdir(dir)))
        n += e->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return n;
}

/* The store judges a damaged file, wherever the damage is, and sets it aside: the tier deletes
 * nothing, so what is put next stays. */
static void test_damaged_file(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    static const off_t places[] = {0, 10, KVBM_OBJECT_HEADER - 1, KVBM_OBJECT_HEADER, BLOCK};
    struct kvbm_object *o;
    (void)state;

    shaky->ext = 4;
    o = open_with(&opts);
    for (size_t i = 0; i < KV_COUNT(places); i++) {
        expect(o, KVBM_OBJECT_PUT, i, 1, 0);
        flip_on_disk(i, places[i]);
        expect(o, KVBM_OBJECT_GET, i, 1, -EBADMSG);
        expect(o, KVBM_OBJECT_PUT, i, 1, 0);
        assert_int_equal(set_aside(), i + 1);
    }
    expect(o, KVBM_OBJECT_GET, 0, KV_COUNT(places), 0);
    kvbm_object_close(o);
    assert_int_equal(shaky->deletes, 0);
}

/* Store what isn't block @number's value under its key: the store has nothing against it. */
static void put_foreign(uint64_t number)
{
    uint8_t key[KVBM_OBJECT_CHUNK_KEY];
    struct kvs_store *store;

    chunk_key_of(number, key);
    assert_int_equal(kvs_open(folder, &store), 0);
    assert_int_equal(kvs_put_chunk(store, key, sizeof(key), "foreign", 7), 0);
    assert_int_equal(kvs_put_manifest(store, "other", "", 0), 0);
    kvs_close(store);
}

/* A value that only the tier refuses is deleted before its get ends, for a put may follow. */
static void test_deleted_before_the_end(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    (void)state;

    for (int ext = 0; ext <= 4; ext += 4) { /* batches, streams */
        struct kvbm_object *o;
        struct job *get;

        fresh_folder(state);
        shaky->ext = ext;
        o = open_with(&opts);
        expect(o, KVBM_OBJECT_PUT, 1, 1, 0);
        put_foreign(0);
        shaky->hang_deletes = true;
        get = submit(o, KVBM_OBJECT_GET, 0, 2, 0);
        wait_until(shaky->deletes == 1);
        assert_int_equal(get->done, 0);
        shaky->hang_deletes = false;
        job_wait(get);
        assert_int_equal(get->ios[0].status, -EBADMSG);
        assert_int_equal(get->ios[1].status, 0);
        job_free(get);
        expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
        expect(o, KVBM_OBJECT_GET, 0, 2, 0);
        kvbm_object_close(o);
    }
}

/* Of two gets of one bad value, the later deletion leaves a block alone that was put in between. */
static void test_deleted_once(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    (void)state;

    for (int ext = 0; ext <= 4; ext += 4) { /* batches, streams */
        struct kvbm_object *o;
        struct job *gets[2];

        fresh_folder(state);
        shaky->ext = ext;
        o = open_with(&opts);
        put_foreign(0);
        shaky->hang_deletes = true;
        for (int i = 0; i < 2; i++)
            gets[i] = submit(o, KVBM_OBJECT_GET, 0, 1, 60000);
        wait_until(shaky->deletes == 2);
        shaky->pass = 1;
        wait_until(gets[0]->done + gets[1]->done == 1);
        expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
        shaky->hang_deletes = false;
        for (int i = 0; i < 2; i++)
            ends(gets[i], -EBADMSG);
        expect(o, KVBM_OBJECT_GET, 0, 1, 0);
        kvbm_object_close(o);
    }
}

/* A value that is wrong on its way once stays where it is. */
static void test_wrong_on_the_way(void **state)
{
    struct kvbm_object *o;
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    (void)state;

    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 2, 0);
    shaky->lie = 1;
    expect(o, KVBM_OBJECT_GET, 0, 2, -EBADMSG);
    shaky->lie = 0;
    expect(o, KVBM_OBJECT_GET, 0, 2, 0);
    kvbm_object_close(o);
}

/* -- publications ------------------------------------------------------------------------------ */

static struct kvbm_object *open_patient(void)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);

    opts.breaker_failures = 1000;
    opts.timeout_ms = 60000;
    return open_with(&opts);
}

/* Batches whose puts end while a publication is under way share the next one. */
static void test_shared_publication(void **state)
{
    struct kvbm_object *o = open_patient();
    bool shared = false;
    (void)state;

    for (uint64_t round = 0; round < 50 && !shared; round++) { /* a waiting thread can be late */
        int seen = shaky->publications, puts = shaky->put_batches;
        struct job *jobs[3];

        shaky->hang_publications = true;
        for (uint64_t i = 0; i < 3; i++)
            jobs[i] = submit(o, KVBM_OBJECT_PUT, round * 30 + i * 10, 5, 0);
        wait_until(shaky->put_batches == puts + 3 && shaky->inside == 1);
        usleep(20000);
        assert_int_equal(shaky->publications, seen + 1);
        shaky->hang_publications = false;
        for (uint64_t i = 0; i < 3; i++)
            ends(jobs[i], 0);
        assert_in_range(shaky->publications, seen + 2, seen + 3);
        shared = shaky->publications == seen + 2;
    }
    assert_true(shared);
    kvbm_object_close(o);
}

/* A publication that hangs holds others up until its batch ends; one that waits can be cancelled. */
static void test_hanging_publication(void **state)
{
    struct kvbm_object *o = open_patient();
    struct job *hanging, *waiting, *cancelled;
    int seen = shaky->publications, puts;
    (void)state;

    shaky->hang_publications = true;
    hanging = submit(o, KVBM_OBJECT_PUT, 0, 5, 0);
    wait_until(shaky->publications == seen + 1);
    puts = shaky->put_batches;
    waiting = submit(o, KVBM_OBJECT_PUT, 10, 5, 0);
    cancelled = submit(o, KVBM_OBJECT_PUT, 20, 5, 0);
    wait_until(shaky->put_batches == puts + 2 && shaky->inside == 1);
    usleep(20000); /* until they wait */
    kvbm_object_cancel(o, &cancelled->batch);
    ends(cancelled, -ECANCELED);
    assert_int_equal(shaky->publications, seen + 1);
    kvbm_object_cancel(o, &hanging->batch);
    ends(hanging, -ECANCELED);
    wait_until(shaky->publications == seen + 2); /* while the first still hangs */
    shaky->hang_publications = false;
    ends(waiting, 0);
    expect(o, KVBM_OBJECT_GET, 10, 5, 0);
    kvbm_object_close(o);
    wait_until(shaky->inside == 0 && shaky->opens == shaky->closes);
}

/* A publication that hangs has its turn for a part of timeout_ms; those that wait then go on, though
 * its batch has a minute. Should it end after all, its batch succeeds. */
static void test_turns_end(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    struct job *hanging;
    (void)state;

    opts.breaker_failures = 1000;
    opts.timeout_ms = 8000; /* a turn is 2 s */
    o = open_with(&opts);
    shaky->hang_publication = shaky->publications + 1;
    hanging = submit(o, KVBM_OBJECT_PUT, 0, 5, 60000);
    wait_until(shaky->publications == shaky->hang_publication);
    expect(o, KVBM_OBJECT_PUT, 10, 5, 0);
    expect(o, KVBM_OBJECT_PUT, 20, 5, 0);
    assert_int_equal(hanging->done, 0);
    shaky->hang_publication = 0;
    ends(hanging, 0);
    kvbm_object_close(o);
}

/* A publication that fails is its own batch's: the next one tries again. */
static void test_failing_publication(void **state)
{
    struct kvbm_object *o = open_patient();
    int seen = shaky->publications, puts = shaky->put_batches, failed = 0;
    struct job *jobs[3];
    (void)state;

    shaky->hang_publications = true;
    shaky->fail_publications = 1;
    for (uint64_t i = 0; i < 3; i++)
        jobs[i] = submit(o, KVBM_OBJECT_PUT, i * 10, 5, 0);
    wait_until(shaky->put_batches == puts + 3 && shaky->publications == seen + 1);
    shaky->hang_publications = false;
    for (uint64_t i = 0; i < 3; i++) {
        job_wait(jobs[i]);
        failed += jobs[i]->ios[0].status == -EIO;
        job_free(jobs[i]);
    }
    assert_int_equal(failed, 1);
    kvbm_object_close(o);
}

/* A chunk that isn't published doesn't exist, though the handle that put it has it: no other would find it. */
static void test_unpublished(void **state)
{
    struct kvbm_object *o = open_patient();
    int seen = shaky->publications;
    struct job *job;
    (void)state;

    shaky->fail_publications_rc = -ENOSPC; /* the chunks found room, the manifest doesn't */
    shaky->fail_publications = 2;
    expect(o, KVBM_OBJECT_PUT, 0, 5, -ENOSPC);
    expect(o, KVBM_OBJECT_EXISTS, 0, 5, -ENOENT);
    expect(o, KVBM_OBJECT_GET, 0, 5, -ENOENT);
    expect(o, KVBM_OBJECT_PUT, 0, 20, -ENOSPC);
    expect(o, KVBM_OBJECT_EXISTS, 0, 20, -ENOENT);
    shaky->hang_publications = true;
    job = submit(o, KVBM_OBJECT_PUT, 1000, 5, 0);
    wait_until(shaky->publications == seen + 3);
    expect(o, KVBM_OBJECT_EXISTS, 1000, 5, -ENOENT); /* the put goes on */
    shaky->hang_publications = false;
    ends(job, 0);
    expect(o, KVBM_OBJECT_EXISTS, 1000, 5, 0);
    expect(o, KVBM_OBJECT_EXISTS, 0, 20, 0); /* published with those */
    expect(o, KVBM_OBJECT_GET, 0, 20, 0);
    for (uint64_t i = 2000; i < 2400; i += 20) {
        expect(o, KVBM_OBJECT_PUT, i, 20, 0);
        expect(o, KVBM_OBJECT_EXISTS, i, 20, 0);
    }
    expect(o, KVBM_OBJECT_EXISTS, 2000, 20, 0);
    kvbm_object_close(o);
}

/* Of two batches that put one chunk, the later finds what the earlier has put: that isn't published yet. */
static void test_unpublished_twice(void **state)
{
    struct kvbm_object *o = open_patient();
    (void)state;

    for (uint64_t i = 0; i < 16; i++) {
        int seen = shaky->publications, puts = shaky->put_batches;
        struct job *jobs[2];

        shaky->hang_publications = true;
        shaky->hang_puts = true;
        for (int k = 0; k < 2; k++)
            jobs[k] = submit(o, KVBM_OBJECT_PUT, i, 1, 0);
        wait_until(shaky->put_batches == puts + 2);
        shaky->hang_puts = false;
        wait_until(shaky->publications == seen + 1 && shaky->inside == 1);
        expect(o, KVBM_OBJECT_EXISTS, i, 1, -ENOENT);
        shaky->hang_publications = false;
        for (int k = 0; k < 2; k++)
            ends(jobs[k], 0);
        expect(o, KVBM_OBJECT_EXISTS, i, 1, 0);
        expect(o, KVBM_OBJECT_DELETE, i, 1, 0);
        expect(o, KVBM_OBJECT_EXISTS, i, 1, -ENOENT);
    }
    kvbm_object_close(o);
}

static int remove_chunk(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)at;
    return kind == FTW_F && strstr(path, "/chunks/") ? unlink(path) : 0;
}

/* A chunk that was published, swept by another process and put anew is as unpublished as a new one. */
static void test_unpublished_after_a_sweep(void **state)
{
    struct kvbm_object *o = open_patient();
    (void)state;

    for (uint64_t round = 0; round < 3; round++) {
        expect(o, KVBM_OBJECT_PUT, 0, 20, 0);
        expect(o, KVBM_OBJECT_EXISTS, 0, 20, 0);
        assert_int_equal(nftw(folder, remove_chunk, 20, FTW_PHYS), 0);
        shaky->fail_publications_rc = -ENOSPC;
        shaky->fail_publications = 1;
        expect(o, KVBM_OBJECT_PUT, 0, 20, -ENOSPC);
        expect(o, KVBM_OBJECT_EXISTS, 0, 20, -ENOENT);
        expect(o, KVBM_OBJECT_GET, 0, 20, -ENOENT);
        expect(o, KVBM_OBJECT_PUT, 100 + round, 1, 0);
        expect(o, KVBM_OBJECT_EXISTS, 0, 20, 0); /* published with that */
    }
    kvbm_object_close(o);
}

/* A put that fails may have made the store drop blocks that were put before: their batch publishes
 * itself, to learn of it. */
static void test_own_publication(void **state)
{
    struct kvbm_object *o = open_patient();
    int seen = shaky->publications, puts;
    struct job *jobs[3];
    (void)state;

    shaky->hang_publications = true;
    jobs[0] = submit(o, KVBM_OBJECT_PUT, 0, 5, 0);
    wait_until(shaky->publications == seen + 1);
    puts = shaky->put_batches;
    shaky->fail_last_rc = -ENOSPC;
    for (uint64_t i = 1; i < 3; i++)
        jobs[i] = submit(o, KVBM_OBJECT_PUT, i * 10, 5, 0);
    wait_until(shaky->put_batches == puts + 2 && shaky->inside == 1);
    usleep(20000); /* until they wait; without it the test sees less */
    shaky->hang_publications = false;
    for (uint64_t i = 0; i < 3; i++) {
        job_wait(jobs[i]);
        assert_int_equal(jobs[i]->ios[0].status, 0);
        assert_int_equal(jobs[i]->ios[4].status, i > 0 ? -ENOSPC : 0);
        job_free(jobs[i]);
    }
    shaky->fail_last_rc = 0;
    assert_int_equal(shaky->publications, seen + 3);
    kvbm_object_close(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_hanging_stream, fresh_folder),
        cmocka_unit_test_setup(test_damaged_file, fresh_folder),
        cmocka_unit_test_setup(test_deleted_before_the_end, fresh_folder),
        cmocka_unit_test_setup(test_deleted_once, fresh_folder),
        cmocka_unit_test_setup(test_wrong_on_the_way, fresh_folder),
        cmocka_unit_test_setup(test_shared_publication, fresh_folder),
        cmocka_unit_test_setup(test_hanging_publication, fresh_folder),
        cmocka_unit_test_setup(test_turns_end, fresh_folder),
        cmocka_unit_test_setup(test_failing_publication, fresh_folder),
        cmocka_unit_test_setup(test_unpublished, fresh_folder),
        cmocka_unit_test_setup(test_unpublished_twice, fresh_folder),
        cmocka_unit_test_setup(test_unpublished_after_a_sweep, fresh_folder),
        cmocka_unit_test_setup(test_own_publication, fresh_folder),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
