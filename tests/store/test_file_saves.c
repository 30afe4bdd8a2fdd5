// SPDX-License-Identifier: Apache-2.0
/* Several saves on one handle: each publication leaves the others what they count on. */
#include "base/core/clock.h"
#include "kv_store.h"
#include "store/file/commit/commit.h"
#include "store/file_unit.h"
#include "store/object/manifest.h"

enum { BYTES = 1000 };

static uint8_t blob[BYTES + 256];
static kv_store_v1 *h, *other;
static uint64_t noise = 7;

static int setup(void **state)
{
    uint64_t rng = 5;
    int rc = unit_make_dir(state);

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    if (rc == 0) {
        h = unit_open("");
        other = unit_open("");
    }
    return rc;
}

static int teardown(void **state)
{
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    return unit_rm_dir(state);
}

static void key_of(uint8_t key[16], uint8_t n)
{
    memset(key, n, 16);
}

static int put(kv_store_v1 *handle, uint8_t n)
{
    uint8_t key[16];

    key_of(key, n);
    return kvs_file_vtable()->put_chunk(handle, key, sizeof(key), blob + n, BYTES);
}

/* Publish a manifest of our own format that names the chunks in @names. */
static int publish(const char *name, const char *names)
{
    struct kvs_manifest m = {.format = KVS_FORMAT_BYTES};
    struct kv_buf buf = KV_BUF_INIT;
    uint8_t key[16];
    int rc;

    for (; *names; names++) {
        key_of(key, (uint8_t)*names);
        assert_int_equal(kvs_manifest_add(&m, key, BYTES), 0);
    }
    assert_int_equal(kvs_manifest_encode(&m, &buf), 0);
    rc = kvs_file_vtable()->put_manifest(h, name, (const uint8_t *)buf.data, buf.len);
    kv_buf_fini(&buf);
    free(m.chunks);
    return rc;
}

/* Delete what no handle holds, whatever its age; returns how many chunks that were. */
static int sweep(void)
{
    kv_store_swept swept = {.size = sizeof(swept)};

    assert_int_equal(kvs_file_ext()->sweep_chunks(other, 0, NULL, NULL, &swept), 0);
    return (int)swept.deleted;
}

static bool is_there(uint8_t n)
{
    uint8_t key[16], *data;
    size_t len;

    key_of(key, n);
    if (kvs_file_vtable()->get_chunk(other, key, sizeof(key), &data, &len) < 0)
        return false;
    free(data);
    return true;
}

/* Path of chunk @n, whose age becomes an hour. */
static const char *make_old(uint8_t n)
{
    static char path[512];
    struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    char hex[KVS_FILE_HEX];
    uint8_t key[16];

    key_of(key, n);
    kvs_file_hex(hex, key, sizeof(key));
    snprintf(path, sizeof(path), "%s/chunks/%c/%s", unit_dir, *hex, hex);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    return path;
}

/* Chunks that a manifest doesn't name are durable, and still pinned for the save they are of. */
static void others_chunks_stay_pinned(void **state)
{
    (void)state;
    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(put(h, 'b'), 0);
    assert_int_equal(publish("a", "a"), 0);
    assert_true(is_there('b'));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(sweep(), i == 0); /* a */
        assert_int_equal(put(h, 'c'), 0);
        assert_int_equal(publish("c", "c"), 0);
        assert_int_equal(sweep(), 1); /* c */
    }
    assert_int_equal(put(other, 'd'), 0);
    assert_int_equal(unit_publish(other, "d", "x"), 0);
    assert_int_equal(put(h, 'd'), 1); /* a hit is leased as long */
    assert_int_equal(publish("b", "b"), 0);
    assert_int_equal(h->leases, 1);
    assert_int_equal(publish("d", "d"), 0);
    assert_int_equal(h->leases, 0);
    assert_int_equal(sweep(), 2);
}

/* Two saves of one chunk: the second one's manifest releases it, or one that may need anything. */
static void shared_chunks_stay_for_the_last(void **state)
{
    (void)state;
    for (int opaque = 0; opaque < 2; opaque++) {
        assert_int_equal(put(h, 'a'), 0);
        assert_int_equal(put(h, 'a'), 1); /* an object that has it twice */
        assert_int_equal(put(h, 'a'), 1); /* another save */
        assert_int_equal(publish("one", "aa"), 0);
        assert_int_equal(sweep(), 0);
        assert_int_equal(opaque ? unit_publish(h, "two", "x") : publish("two", "aaa"), 0);
        assert_int_equal(sweep(), 1);
    }
}

/* A manifest of unknown format releases all. A save that runs on finds its chunks, or fails. */
static void named_chunks_are_looked_at(void **state)
{
    uint8_t zero = 0;
    int fd;
    (void)state;

    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(put(h, 'b'), 0);
    assert_int_equal(unit_publish(h, "opaque", "x"), 0);
    assert_int_equal(put(h, 'c'), 0);
    make_old('a');
    assert_int_equal(publish("one", "abcab"), 0);
    fd = open(make_old('a'), O_WRONLY);
    assert_int_equal(pwrite(fd, &zero, 1, 0), 1);
    close(fd);
    assert_int_equal(publish("two", "bab"), -EIO);
    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(publish("two", "bab"), 0);
    assert_int_equal(sweep(), 3);
    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(publish("three", "ab"), -EIO);
    assert_int_equal(kvs_file_ext()->flush(h), 0); /* b was not put, so nothing of ours is lost */
    assert_int_equal(put(h, 'b'), 0);
    assert_int_equal(publish("three", "ab"), 0);
    assert_true(is_there('a') && is_there('b'));
}

/* A flush, or another save, uses only chunks that were put since they were put into place. */
static void flushes_use_what_is_new(void **state)
{
    const char *path;
    struct stat st;
    time_t hour_ago;
    (void)state;

    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(kvs_file_ext()->flush(h), 0);
    path = make_old('a');
    hour_ago = time(NULL) - 1800;
    assert_int_equal(put(h, 'b'), 0);
    assert_int_equal(kvs_file_ext()->flush(h), 0);
    assert_int_equal(put(h, 'c'), 0);
    assert_int_equal(publish("c", "c"), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_mtime < hour_ago);
    assert_int_equal(st.st_nlink, 2);
    assert_int_equal(put(h, 'a'), 1);
    assert_int_equal(kvs_file_ext()->flush(h), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_mtime > hour_ago);
    assert_int_equal(unit_publish(h, "opaque", "x"), 0);
    assert_int_equal(sweep(), 3);
}

/* Take a put back for a save that began at @releases. */
static void take_back_since(uint8_t n, uint64_t releases)
{
    uint8_t key[16];

    key_of(key, n);
    kvs_file_take_back(h, key, sizeof(key), releases);
}

static void take_back(uint8_t n)
{
    take_back_since(n, kvs_file_releases(h));
}

/* Puts that a publication or a deletion has released aren't taken back: later ones may be there. */
static void released_puts_are_not_taken_back(void **state)
{
    uint64_t before = kvs_file_releases(h);
    uint8_t key[16];

    (void)state;
    assert_int_equal(put(h, 'a'), 0); /* of the save that fails */
    assert_int_equal(unit_publish(h, "empty", ""), 0);
    assert_int_equal(sweep(), 1);
    assert_int_equal(put(h, 'a'), 0); /* of another one */
    take_back_since('a', before);
    assert_int_equal(publish("a", "a"), 0);
    assert_true(is_there('a'));
    before = kvs_file_releases(h);
    assert_int_equal(put(h, 'b'), 0);
    key_of(key, 'b');
    assert_int_equal(kvs_file_ext()->delete_chunk(h, key, sizeof(key)), 0);
    assert_int_equal(put(h, 'b'), 0);
    take_back_since('b', before);
    assert_int_equal(publish("b", "b"), 0);
    assert_true(is_there('b'));
}

/* Run a publication of everything by its steps, with @between behind the first one. */
static void publish_around(void (*between)(void))
{
    struct kvs_file_commit c;

    assert_int_equal(kvs_file_commit_collect(h, &c, NULL, false), 0);
    between();
    assert_int_equal(kvs_file_commit_prepare(h, &c), 0);
    for (size_t i = 0; i < c.n; i++)
        assert_int_equal(kvs_file_place(h, c.entries[i]), 0);
    kvs_file_commit_pin(h, &c, false);
    kvs_file_commit_finish(h, &c);
    free(c.entries);
    free(c.fds);
    free(c.tmps);
}

static uint64_t puts_of(uint8_t n)
{
    const struct kvs_file_pending *e;
    uint8_t key[16];

    key_of(key, n);
    e = kvs_file_map_find(&h->map, key, sizeof(key));
    return e ? e->puts : 0;
}

static uint64_t releases_before;

static void fail_then_put(void)
{
    take_back_since('a', releases_before);
    assert_int_equal(put(h, 'a'), 1);
}

static void put_anew(void)
{
    assert_int_equal(put(h, 'b'), 0);
}

/* Puts during a publication stay counted, whoever fails or replaces the entry meanwhile. */
static void puts_during_a_publication_count(void **state)
{
    uint8_t key[16];

    (void)state;
    releases_before = kvs_file_releases(h);
    assert_int_equal(put(h, 'a'), 0);
    publish_around(fail_then_put);
    assert_int_equal(puts_of('a'), 1);
    assert_int_equal(unit_publish(h, "empty", ""), 0);
    assert_int_equal(put(h, 'b'), 0);
    key_of(key, 'b');
    kvs_file_map_find(&h->map, key, sizeof(key))->state = KVS_FILE_SUSPECT; /* its sync failed */
    publish_around(put_anew);
    assert_int_equal(puts_of('b'), 1);
    assert_int_equal(unit_publish(h, "empty", ""), 0);
    assert_int_equal(h->map.n, 0);
}

/* A save that failed takes back its puts; chunks that others put as well stay. */
static void puts_are_taken_back(void **state)
{
    (void)state;
    assert_int_equal(put(h, 'a'), 0);
    assert_int_equal(put(h, 'b'), 0);
    assert_int_equal(put(h, 'a'), 1);
    assert_int_equal(unit_count(".kvasir/tmp"), 2);
    take_back('a');
    take_back('b');
    assert_int_equal(unit_count(".kvasir/tmp"), 1);
    take_back('b'); /* is gone */
    assert_int_equal(publish("a", "a"), 0);
    take_back('a');
    assert_true(is_there('a') && !is_there('b'));
    assert_int_equal(put(h, 'c'), 0);
    assert_int_equal(kvs_file_ext()->flush(h), 0);
    take_back('c'); /* in place by now, and as good as any other */
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(sweep(), 2);
    assert_int_equal(put(other, 'd'), 0);
    assert_int_equal(unit_publish(other, "d", "x"), 0);
    assert_int_equal(put(h, 'd'), 1);
    assert_int_equal(h->leases, 1);
    take_back('d');
    assert_int_equal(h->leases, 0);
}

/* An object of noise that can't be read to its end. */
static int64_t read_some(void *arg, void *buf, size_t cap)
{
    uint64_t *left = arg;
    size_t n = KV_MIN(cap, (size_t)*left);

    for (size_t i = 0; i < n; i++)
        ((uint8_t *)buf)[i] = (uint8_t)unit_random(&noise);
    *left -= n;
    return n ? (int64_t)n : -EIO;
}

/* A save that failed leaves no file on the disk until the handle is closed. */
static void failed_saves_hold_no_room(void **state)
{
    struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 4096};
    struct kvs_store *store;
    uint64_t left = 1 << 20;
    (void)state;

    assert_int_equal(kvs_open(unit_dir, &store), 0);
    opts.format = KVS_FORMAT_BYTES;
    assert_int_equal(kvs_save(store, "failed", read_some, &left, &opts, NULL), -EIO);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(kvs_save_buffer(store, "saved", blob, BYTES, NULL, NULL), 0);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(others_chunks_stay_pinned, setup, teardown),
        cmocka_unit_test_setup_teardown(shared_chunks_stay_for_the_last, setup, teardown),
        cmocka_unit_test_setup_teardown(named_chunks_are_looked_at, setup, teardown),
        cmocka_unit_test_setup_teardown(flushes_use_what_is_new, setup, teardown),
        cmocka_unit_test_setup_teardown(puts_are_taken_back, setup, teardown),
        cmocka_unit_test_setup_teardown(released_puts_are_not_taken_back, setup, teardown),
        cmocka_unit_test_setup_teardown(puts_during_a_publication_count, setup, teardown),
        cmocka_unit_test_setup_teardown(failed_saves_hold_no_room, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
