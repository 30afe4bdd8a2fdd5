// SPDX-License-Identifier: Apache-2.0
/* The mover over two folders, and what it asks of the feed before it deletes anything. */
#include "../support.h"

#include <limits.h>

#include "advisor/index/policy.h"
#include "advisor/mover.h"
#include "store/backend/store.h"

enum { LEN = 1000, LONG = 10 << 20 };

struct fixture {
    char dir[PATH_MAX];
    struct kva_volumes volumes;
    struct kva_world world;
};

static void key_of(unsigned i, uint8_t ret[KVA_KEY])
{
    memset(ret, 0, KVA_KEY);
    memcpy(ret, &i, sizeof(i));
}

static void begin(struct fixture *f)
{
    char path[PATH_MAX + 16];
    struct kva_index_opts opts = {.policy = kva_policy_find("lru")};
    const struct kva_volumes_opts open = {.path = path};
    FILE *file;

    memset(f, 0, sizeof(*f));
    assert_int_equal(disk_dir(f->dir, sizeof(f->dir)), 0);
    snprintf(path, sizeof(path), "%s/kv.conf", f->dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "linger = 1ms\n[fast]\nuri = %s/fast\n[cold]\nuri = %s/cold\n", f->dir, f->dir);
    fclose(file);
    assert_int_equal(kva_volumes_open(&open, &f->volumes, NULL), 0);
    pthread_mutex_init(&f->world.lock, NULL);
    kva_volumes_index_opts(&f->volumes, 100, &opts);
    assert_int_equal(kva_index_create(&opts, &f->world.index), 0);
    assert_int_equal(kva_feed_create(f->world.index, &f->world.feed), 0);
}

static void end(struct fixture *f)
{
    kva_feed_destroy(f->world.feed);
    kva_index_destroy(f->world.index);
    kva_volumes_close(&f->volumes);
    pthread_mutex_destroy(&f->world.lock);
    remove_dir(f->dir);
}

static void put(struct fixture *f, unsigned member, unsigned i)
{
    uint8_t key[KVA_KEY], data[LEN] = {(uint8_t)i};

    key_of(i, key);
    assert_int_equal(kvs_put_chunk(f->volumes.stores[member], key, KVA_KEY, data, LEN), 0);
    assert_int_equal(kvs_put_manifest(f->volumes.stores[member], "m", "", 0), 0);
}

static bool has(struct fixture *f, unsigned member, unsigned i)
{
    uint8_t key[KVA_KEY], state;

    key_of(i, key);
    assert_int_equal(kvs_look(f->volumes.stores[member], key, KVA_KEY, 1, &state), 0);
    return state == KVS_THERE;
}

static void tell(struct fixture *f, unsigned i)
{
    uint8_t key[KVA_KEY];
    const struct kva_told told = {.key = key, .bytes = LEN, .now_s = 1};

    key_of(i, key);
    pthread_mutex_lock(&f->world.lock);
    assert_true(kva_index_tell(f->world.index, &told) >= 0);
    pthread_mutex_unlock(&f->world.lock);
}

/* Told long ago and removed, and in the fast member. */
static void tell_and_untell(struct fixture *f, unsigned i)
{
    uint8_t key[KVA_KEY];

    tell(f, i);
    key_of(i, key);
    assert_int_equal(kva_index_found(f->world.index, 0, key, LEN, 0), 0);
    kva_index_untell(f->world.index, key, 0, 1);
}

static void scan(struct fixture *f)
{
    atomic_bool stop = false;

    assert_int_equal(kva_volumes_scan(&f->volumes, &f->world, &stop), 2);
}

/* -- deletion ---------------------------------------------------------------------------------- */

static struct fixture *of_hook;
static int (*delete_of)(kv_store_v1 *, const uint8_t *, size_t, const uint8_t *, size_t);

/* While one of the blobs 0 and 1 is deleted, the other is stored again. */
static int delete_and_tell(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    unsigned i;

    memcpy(&i, hash, sizeof(i));
    tell(of_hook, 1 - i);
    return delete_of(self, hash, hash_len, data, len);
}

static uint64_t idle_passes(struct kva_mover *mover)
{
    struct kva_mover_stats stats;

    kva_mover_get_stats(mover, &stats);
    return stats.passes;
}

static void test_told_before_its_deletion(void **state)
{
    struct kva_mover_opts opts = {.limits.left_s = 1, .interval_ms = 1};
    struct kva_mover *mover;
    struct fixture f;
    (void)state;

    begin(&f);
    scan(&f);
    for (unsigned i = 0; i < 2; i++) {
        put(&f, 0, i);
        tell_and_untell(&f, i);
    }
    of_hook = &f;
    delete_of = f.volumes.stores[0]->ext.delete_chunk_if;
    f.volumes.stores[0]->ext.delete_chunk_if = delete_and_tell;
    opts.volumes = &f.volumes;
    opts.world = &f.world;
    assert_int_equal(kva_mover_create(&opts, &mover), 0);
    wait_until(idle_passes(mover) > 0);
    kva_mover_destroy(mover);
    assert_int_equal(has(&f, 0, 0) + has(&f, 0, 1), 1);
    end(&f);
}

/* Let it be @minute of the local day now. */
static void set_local(int minute)
{
    int west = (int)(time(NULL) / 60 % 1440) - minute;
    char zone[32];

    snprintf(zone, sizeof(zone), "XYZ%c%d:%d", west < 0 ? '-' : '+', abs(west) / 60,
             abs(west) % 60);
    setenv("TZ", zone, 1);
    tzset();
}

static int delete_and_wait(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    set_local(12 * 60);
    return delete_of(self, hash, hash_len, data, len);
}

static bool is_quiet(struct kva_mover *mover)
{
    struct kva_mover_stats stats;

    kva_mover_get_stats(mover, &stats);
    return stats.quiet;
}

/* Quiet hours begin in the middle of a pass: it goes on behind them. */
static void test_quiet_hours(void **state)
{
    struct kva_mover_opts opts = {
        .limits = {.left_s = 1, .quiet_from = 11 * 60, .quiet_to = 13 * 60}, .interval_ms = 1};
    struct kva_mover *mover;
    struct fixture f;
    (void)state;

    begin(&f);
    scan(&f);
    for (unsigned i = 0; i < 2; i++) {
        put(&f, 0, i);
        tell_and_untell(&f, i);
    }
    set_local(6 * 60);
    delete_of = f.volumes.stores[0]->ext.delete_chunk_if;
    f.volumes.stores[0]->ext.delete_chunk_if = delete_and_wait;
    opts.volumes = &f.volumes;
    opts.world = &f.world;
    assert_int_equal(kva_mover_create(&opts, &mover), 0);
    wait_until(is_quiet(mover));
    kva_mover_destroy(mover);
    assert_int_equal(has(&f, 0, 0) + has(&f, 0, 1), 1);
    end(&f);
}

/* -- removals ---------------------------------------------------------------------------------- */

static int (*get_of)(kv_store_v1 *, const uint8_t *, size_t, size_t, uint8_t **, size_t *);
static atomic_size_t most;

static int get_few(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                   uint8_t **out_data, size_t *out_len)
{
    most = n > most ? n : most;
    return get_of(self, hashes, hash_len, n, out_data, out_len);
}

/* Before a second copy is removed the first is read: of long blobs not many at once. */
static void test_long_blobs(void **state)
{
    uint8_t key[KVA_KEY], *data = calloc(1, LONG);
    struct kva_mover_opts opts = {.interval_ms = 1};
    struct kva_mover *mover;
    struct fixture f;
    (void)state;

    begin(&f);
    for (unsigned i = 0; i < 6; i++)
        for (unsigned m = 0; m < 2; m++) {
            key_of(i, key);
            assert_int_equal(kvs_put_chunk(f.volumes.stores[m], key, KVA_KEY, data, LONG), 0);
            assert_int_equal(kvs_put_manifest(f.volumes.stores[m], "m", "", 0), 0);
        }
    free(data);
    scan(&f);
    for (unsigned i = 0; i < 6; i++)
        tell(&f, i);
    get_of = f.volumes.stores[0]->ext.get_chunks;
    f.volumes.stores[0]->ext.get_chunks = get_few;
    opts.volumes = &f.volumes;
    opts.world = &f.world;
    assert_int_equal(kva_mover_create(&opts, &mover), 0);
    wait_until(idle_passes(mover) > 0);
    kva_mover_destroy(mover);
    for (unsigned i = 0; i < 6; i++)
        assert_true(has(&f, 0, i) && !has(&f, 1, i));
    assert_in_range(most, 1, 2);
    end(&f);
}

/* -- listings ---------------------------------------------------------------------------------- */

static int (*list_of)(kv_store_v1 *, kv_store_each_fn, void *);

struct untelling {
    kv_store_each_fn each;
    void *arg;
};

static int without_len(void *arg, const kv_store_entry *entry)
{
    struct untelling *u = arg;
    kv_store_entry untold = *entry;

    untold.len = UINT64_MAX;
    return u->each(u->arg, &untold);
}

/* As Redis lists: without sizes. */
static int list_without_len(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return list_of(self, without_len, &(struct untelling){each, arg});
}

static int list_nothing(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    (void)self, (void)each, (void)arg;
    return -EIO;
}

/* Into a member that couldn't be listed nothing is copied: what it has room for isn't known. */
static void test_unlisted(void **state)
{
    struct kva_mover_opts opts = {.interval_ms = 1};
    struct kva_mover *mover;
    atomic_bool stop = false;
    struct fixture f;
    (void)state;

    begin(&f);
    put(&f, 1, 0);
    list_of = f.volumes.stores[0]->ext.list_chunks;
    f.volumes.stores[0]->ext.list_chunks = list_nothing;
    assert_int_equal(kva_volumes_scan(&f.volumes, &f.world, &stop), 1);
    tell(&f, 0);
    opts.volumes = &f.volumes;
    opts.world = &f.world;
    assert_int_equal(kva_mover_create(&opts, &mover), 0);
    wait_until(has(&f, 0, 0) || idle_passes(mover) > 0);
    assert_false(has(&f, 0, 0));
    f.volumes.stores[0]->ext.list_chunks = list_of;
    scan(&f);
    wait_until(has(&f, 0, 0));
    kva_mover_destroy(mover);
    end(&f);
}

/* The size that an event tells counts where the listing tells none. */
static void test_untold_sizes(void **state)
{
    struct kva_index_stats stats;
    struct fixture f;
    (void)state;

    begin(&f);
    list_of = f.volumes.stores[0]->ext.list_chunks;
    f.volumes.stores[0]->ext.list_chunks = list_without_len;
    for (unsigned i = 0; i < 2; i++)
        put(&f, 0, i);
    tell(&f, 0);
    for (int i = 0; i < 2; i++) {
        scan(&f);
        kva_index_get_stats(f.world.index, &stats);
        assert_int_equal(stats.members[0].have, 2);
        assert_int_equal(stats.members[0].have_bytes, 65536 + LEN / KVA_UNIT * KVA_UNIT + KVA_UNIT);
    }
    end(&f);
}

/* -- publishers -------------------------------------------------------------------------------- */

/* While the server is away a publisher may tell what nobody hears: its view isn't whole. */
static void test_away(void **state)
{
    struct fixture f;
    (void)state;

    begin(&f);
    assert_true(kva_feed_is_whole(f.world.feed));
    kva_feed_heard(f.world.feed, "a", 1);
    kva_feed_heard(f.world.feed, "b", 1);
    assert_false(kva_feed_is_whole(f.world.feed));
    kva_feed_whole(f.world.feed, "a", true);
    kva_feed_whole(f.world.feed, "b", true);
    assert_true(kva_feed_is_whole(f.world.feed));
    kva_feed_all_heard(f.world.feed, 2);
    assert_false(kva_feed_is_whole(f.world.feed));
    kva_feed_heard(f.world.feed, "a", 3);
    assert_false(kva_feed_is_whole(f.world.feed));
    kva_feed_heard(f.world.feed, "b", 3);
    assert_true(kva_feed_is_whole(f.world.feed));
    end(&f);
}

/* Two URIs of one folder: a move would remove the only copy. */
static void test_one_store_twice(void **state)
{
    char dir[PATH_MAX], path[PATH_MAX + 16];
    const struct kva_volumes_opts opts = {.path = path};
    struct kva_volumes volumes;
    struct kv_error error = {0};
    FILE *file;
    (void)state;

    assert_int_equal(temp_dir(dir, sizeof(dir)), 0);
    snprintf(path, sizeof(path), "%s/kv.conf", dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "[a]\nuri = %s/x\nread-only = yes\n[b]\nuri = %s/x/\n", dir, dir);
    fclose(file);
    strcat(dir, "/x");
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(kva_volumes_open(&opts, &volumes, &error), -EINVAL);
    assert_string_equal(error.text, "members b and a are one store");
    *strrchr(dir, '/') = '\0';
    remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_told_before_its_deletion),
        cmocka_unit_test(test_quiet_hours),
        cmocka_unit_test(test_long_blobs),
        cmocka_unit_test(test_unlisted),
        cmocka_unit_test(test_untold_sizes),
        cmocka_unit_test(test_away),
        cmocka_unit_test(test_one_store_twice),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
