// SPDX-License-Identifier: Apache-2.0
/* Notes of the chunks that manifests of unknown format may need: complete, also with several
 * publishers. */
#include <dlfcn.h>
#include <pthread.h>

#include "kv_store.h"
#include "store/file_unit.h"

static uint8_t blob[4096];

/* Run once, at the next call of a kind: another process' doings at the worst moment. */
static void (*_Atomic at_sync)(void);
static void (*_Atomic at_rename)(void);

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static void call(void (*_Atomic *hook)(void))
{
    void (*now)(void) = atomic_exchange(hook, NULL);

    if (now)
        now();
}

int fsync(int fd)
{
    call(&at_sync);
    return REAL(int, fsync, (int))(fd);
}

int renameat(int a, const char *from, int b, const char *to)
{
    call(&at_rename);
    return REAL(int, renameat, (int, const char *, int, const char *))(a, from, b, to);
}

static char unopenable[KVS_FILE_HEX];
static int n_refused, refusal;

int openat(int at, const char *path, int flags, ...)
{
    mode_t mode = 0;
    va_list args;

    va_start(args, flags);
    if (flags & (O_CREAT | O_TMPFILE))
        mode = va_arg(args, mode_t);
    va_end(args);
    if (*unopenable && strcmp(path, unopenable) == 0) {
        n_refused++;
        errno = refusal;
        return -1;
    }
    return REAL(int, openat, (int, const char *, int, ...))(at, path, flags, mode);
}

struct wanted {
    uint64_t n;
    int found;
};

static int is_wanted(void *arg, const kv_store_entry *entry)
{
    struct wanted *w = arg;
    uint8_t key[8];

    unit_key(key, w->n);
    w->found += entry->hash_len == 8 && memcmp(entry->hash, key, 8) == 0;
    return 0;
}

static int count_one(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 0;
}

/* How often chunk @n is noted for manifest @name; negative: list_refs failed. */
static int noted(kv_store_v1 *h, const char *name, uint64_t n)
{
    struct wanted w = {n, 0};
    int rc = kvs_file_ext()->list_refs(h, name, is_wanted, &w);

    return rc < 0 ? rc : w.found;
}

/* -- Compaction -------------------------------------------------------------------------------- */

static kv_store_v1 *first, *second;

static void fill(int rounds)
{
    for (int round = 0; round < rounds; round++) {
        for (uint64_t i = 1000; i < 1200; i++)
            assert_true(unit_put(first, i, blob, 10) >= 0);
        assert_int_equal(unit_publish(first, "many", ""), 0);
    }
}

static void fill_beyond(void)
{
    fill(6);
}

/* The second process has noted its chunk, and not yet put it into place, when the first
 * compacts. */
static void compaction_spares_what_others_publish(void **state)
{
    struct stat before, after;
    char path[256];
    (void)state;

    first = unit_open("?sync=files");
    second = unit_open("?sync=files");
    snprintf(path, sizeof(path), "%s/.kvasir/refs/many", unit_dir);
    fill(23); /* 200 records of 13 bytes each: just below 64 KiB */
    assert_int_equal(stat(path, &before), 0);
    assert_true(before.st_size < 64 << 10);
    assert_int_equal(unit_put(second, 5000, blob, 100), 0);
    atomic_store(&at_sync, fill_beyond);
    assert_int_equal(unit_publish(second, "many", ""), 0);
    assert_null(atomic_load(&at_sync));
    assert_int_equal(stat(path, &after), 0);
    assert_true(after.st_size < 64 << 10); /* it was compacted */
    assert_true(noted(first, "many", 5000) > 0);
    assert_true(noted(first, "many", 1100) > 0);
    kvs_file_vtable()->close(first);
    kvs_file_vtable()->close(second);
}

/* Chunks that are gone are forgotten with the next compaction. */
static void compaction_forgets_what_is_gone(void **state)
{
    uint8_t key[8];
    (void)state;

    first = unit_open("");
    assert_int_equal(unit_put(first, 5001, blob, 100), 0);
    assert_int_equal(unit_publish(first, "many", ""), 0);
    unit_key(key, 5001);
    assert_int_equal(kvs_file_ext()->delete_chunk(first, key, 8), 0);
    assert_int_equal(noted(first, "many", 5001), 1);
    fill(60);
    assert_int_equal(noted(first, "many", 5001), 0);
    assert_true(noted(first, "many", 1100) > 0);
    kvs_file_vtable()->close(first);
}

/* A file that can't be opened now, whatever the reason, does not count as missing. */
static void compaction_of_what_does_not_open(void **state)
{
    static const int errors[] = {EMFILE, EIO, EACCES, ESTALE};
    uint8_t key[8], present;
    (void)state;

    first = unit_open("");
    for (size_t i = 0; i < KV_COUNT(errors); i++) {
        uint64_t n = 5002 + i;

        assert_int_equal(unit_put(first, n, blob, 100), 0);
        assert_int_equal(unit_publish(first, "many", ""), 0);
        unit_key(key, n);
        kvs_file_hex(unopenable, key, 8);
        refusal = errors[i];
        n_refused = 0;
        fill(60);
        assert_true(n_refused > 0); /* it was compacted, or tried */
        assert_int_equal(kvs_file_ext()->exists_chunks(first, key, 8, 1, &present), -errors[i]);
        *unopenable = '\0';
        assert_true(noted(first, "many", n) > 0);
    }
    kvs_file_vtable()->close(first);
}

/* -- Deletion ---------------------------------------------------------------------------------- */

static pthread_t deleter;

static void *delete_it(void *arg)
{
    (void)arg;
    return kvs_file_vtable()->delete_manifest(second, "again") < 0 ? "failed" : NULL;
}

static void start_deleting(void)
{
    assert_int_equal(pthread_create(&deleter, NULL, delete_it, NULL), 0);
    usleep(100000); /* it comes through in this time, or waits for the publication */
}

/* Either order is right; a manifest without its notes is not. */
static void deletion_beside_publication(void **state)
{
    uint8_t *data = NULL;
    void *failed;
    size_t len;
    int rc;
    (void)state;

    first = unit_open("");
    second = unit_open("");
    assert_int_equal(unit_put(first, 5100, blob, 100), 0);
    assert_int_equal(unit_publish(first, "again", "old"), 0);
    assert_int_equal(unit_put(first, 5101, blob, 100), 0);
    atomic_store(&at_rename, start_deleting);
    assert_int_equal(unit_publish(first, "again", "new"), 0);
    pthread_join(deleter, &failed);
    assert_null(failed);
    rc = kvs_file_vtable()->get_manifest(first, "again", &data, &len);
    assert_int_equal(noted(first, "again", 5101), rc == 0 ? 1 : -ENOENT);
    free(data);
    kvs_file_vtable()->close(first);
    kvs_file_vtable()->close(second);
}

/* -- Shared handles ---------------------------------------------------------------------------- */

static void collect_all(void)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = KVS_GC_NO_GRACE};
    struct kvs_gc_result result = {.size = sizeof(result)};
    struct kvs_store *store;

    assert_int_equal(kvs_open(unit_dir, &store), 0);
    assert_int_equal(kvs_gc(store, &opts, &result), 0);
    kvs_close(store);
}

static void *save_another(void *arg)
{
    if (unit_put(arg, 5201, blob, 100) < 0)
        return "put";
    return unit_publish(arg, "other", "x") < 0 ? "publish" : NULL;
}

/* A thread publishes in the middle of another's save: both manifests keep all that was put for
 * them. */
static void threads_share_a_handle(void **state)
{
    kv_store_v1 *h = unit_open("");
    pthread_t thread;
    void *failed;
    (void)state;

    assert_int_equal(unit_put(h, 5200, blob, 100), 0);
    assert_int_equal(pthread_create(&thread, NULL, save_another, h), 0);
    pthread_join(thread, &failed);
    assert_null(failed);
    assert_int_equal(unit_put(h, 5202, blob, 100), 0);
    assert_int_equal(unit_publish(h, "mine", "x"), 0);
    assert_true(noted(h, "mine", 5200) > 0);
    assert_true(noted(h, "mine", 5202) > 0);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "other"), 0);
    kvs_file_vtable()->close(h);
    collect_all();
    h = unit_open("");
    assert_int_equal(unit_get(h, 5200, blob, 100), 0);
    assert_int_equal(unit_get(h, 5202, blob, 100), 0);
    kvs_file_vtable()->close(h);
}

static void *save_many(void *arg)
{
    for (uint64_t i = 0; i < 20; i++)
        if (unit_put(arg, 7210 + i, blob, 100) < 0 || unit_publish(arg, "other", "x") < 0)
            return "save";
    return NULL;
}

static void in_thread(void *(*run)(void *), void *arg)
{
    pthread_t thread;
    void *failed;

    assert_int_equal(pthread_create(&thread, NULL, run, arg), 0);
    pthread_join(thread, &failed);
    assert_null(failed);
}

/* A snapshot between a thread's puts, and many publications of another one after it, take nothing
 * away from the manifest of unknown format that the thread publishes then. */
static void snapshot_amid_a_save(void **state)
{
    kv_store_v1 *h = unit_open("");
    (void)state;

    assert_int_equal(unit_publish(h, "before", "x"), 0);
    assert_int_equal(unit_put(h, 7200, blob, 100), 0);
    in_thread(save_another, h); /* takes the chunk */
    assert_int_equal(unit_publish_own(h, "snapshot"), 0);
    in_thread(save_many, h);
    assert_int_equal(unit_put(h, 7202, blob, 100), 0);
    assert_int_equal(unit_publish(h, "mine", "x"), 0);
    assert_true(noted(h, "mine", 7202) > 0);
    assert_true(noted(h, "mine", 7200) > 0);
    kvs_file_vtable()->close(h);
}

/* A snapshot of ours names its chunks, and says nothing of what else was put on its handle. */
static void snapshots_claim_nothing(void **state)
{
    kv_store_v1 *h = unit_open("");
    (void)state;

    assert_int_equal(unit_put(h, 5300, blob, 100), 0);
    assert_int_equal(unit_publish_own(h, "snapshot"), 0);
    assert_int_equal(noted(h, "snapshot", 5300), -ENOENT);
    assert_int_equal(unit_publish(h, "opaque", "x"), 0);
    assert_int_equal(noted(h, "opaque", 5300), 1);
    assert_int_equal(unit_put(h, 5301, blob, 100), 0);
    assert_int_equal(unit_publish(h, "next", "x"), 0); /* one thread: only what is new */
    assert_int_equal(noted(h, "next", 5300), 0);
    assert_int_equal(noted(h, "next", 5301), 1);
    /* A version that this collector can't read is one of unknown format. */
    assert_int_equal(unit_put(h, 5302, blob, 100), 0);
    assert_int_equal(unit_publish(h, "later", "KVS-OBJ\n\2\1"), 0);
    assert_int_equal(noted(h, "later", 5302), 1);
    kvs_file_vtable()->close(h);
}

static int n_noted(kv_store_v1 *h, const char *name)
{
    int n = 0, rc = kvs_file_ext()->list_refs(h, name, count_one, &n);

    return rc < 0 ? rc : n;
}

/* Publish on a handle of its own, which has put nothing. */
static void publish_alone(const char *name, const char *text)
{
    kv_store_v1 *h = unit_open("");

    assert_int_equal(unit_publish(h, name, text), 0);
    kvs_file_vtable()->close(h);
}

/* An empty manifest of a handle that put nothing needs nothing. One with bytes may need any chunk,
 * also when it replaces an empty one. */
static void manifests_of_idle_handles(void **state)
{
    kv_store_v1 *h = unit_open("");
    (void)state;

    for (int i = 0; i < 2; i++) {
        publish_alone("idle", "");
        assert_int_equal(n_noted(h, "idle"), 0);
    }
    publish_alone("idle", "x");
    assert_int_equal(n_noted(h, "idle"), -ENOENT);
    publish_alone("idle", "");
    assert_int_equal(n_noted(h, "idle"), 0);
    assert_int_equal(unit_put(h, 5310, blob, 100), 0);
    assert_int_equal(unit_publish(h, "idle", "x"), 0);
    assert_int_equal(noted(h, "idle", 5310), 1);
    publish_alone("idle", "");
    assert_int_equal(noted(h, "idle", 5310), 1);
    publish_alone("copy", "x");
    assert_int_equal(n_noted(h, "copy"), -ENOENT);
    publish_alone("copy", ""); /* its notes begin here */
    assert_int_equal(n_noted(h, "copy"), 0);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "copy"), 0);
    kvs_file_vtable()->close(h);
}

/* -- Damage ------------------------------------------------------------------------------------ */

static size_t refs_load(const char *path, uint8_t *ret, size_t cap)
{
    FILE *file = fopen(path, "rb");
    size_t n;

    assert_non_null(file);
    n = fread(ret, 1, cap, file);
    fclose(file);
    return n;
}

/* Save chunk @n under the name, and count how often it is noted. */
static int save_and_note(kv_store_v1 *h, const char *name, uint64_t n)
{
    assert_true(unit_put(h, n, blob, 100) >= 0);
    assert_int_equal(unit_publish(h, name, "x"), 0);
    return noted(h, name, n);
}

/* A list with a damaged record may lack a chunk that is needed: it isn't complete, for good. */
static void damage_makes_a_list_incomplete(void **state)
{
    kv_store_v1 *h = unit_open("");
    uint8_t whole[256], broken[256];
    char path[256];
    size_t len;
    (void)state;

    snprintf(path, sizeof(path), "%s/.kvasir/refs/frail", unit_dir);
    for (uint64_t n = 5500; n < 5503; n++)
        assert_int_equal(save_and_note(h, "frail", n), 1);
    len = refs_load(path, whole, sizeof(whole));
    assert_int_equal(len, 3 * 13);
    for (size_t at = 0; at < len; at++) {
        memcpy(broken, whole, len);
        broken[at] ^= 1;
        unit_write(path, broken, len);
        assert_int_equal(noted(h, "frail", 5500), -ENOENT);
        assert_int_equal(save_and_note(h, "frail", 5503), -ENOENT);
    }
    unit_write(path, "", 0);
    assert_int_equal(noted(h, "frail", 5500), -ENOENT);
    unit_write(path, whole, len);
    assert_int_equal(noted(h, "frail", 5500), 1);
    kvs_file_vtable()->close(h);
}

/* A note that nothing is needed is no note any more once it is damaged or torn. */
static void damage_of_an_empty_note(void **state)
{
    uint8_t whole[16], broken[16];
    kv_store_v1 *h;
    char path[256];
    (void)state;

    publish_alone("none", "");
    h = unit_open("");
    snprintf(path, sizeof(path), "%s/.kvasir/refs/none", unit_dir);
    assert_int_equal(refs_load(path, whole, sizeof(whole)), 5);
    for (size_t at = 0; at < 5; at++) {
        memcpy(broken, whole, 5);
        broken[at] ^= 1;
        unit_write(path, broken, 5);
        assert_int_equal(n_noted(h, "none"), -ENOENT);
        unit_write(path, whole, at);
        assert_int_equal(n_noted(h, "none"), -ENOENT);
    }
    memset(broken, 0, 5);
    unit_write(path, broken, 5);
    publish_alone("none", "");
    assert_int_equal(n_noted(h, "none"), 0);
    kvs_file_vtable()->close(h);
}

/* The beginning of a record that a crash leaves is no publication's: the next one cuts it off. */
static void torn_ends_are_cut_off(void **state)
{
    kv_store_v1 *h = unit_open("");
    uint8_t whole[256] = {0};
    char path[256];
    size_t len;
    (void)state;

    snprintf(path, sizeof(path), "%s/.kvasir/refs/torn", unit_dir);
    for (uint64_t n = 5600; n < 5602; n++)
        assert_int_equal(save_and_note(h, "torn", n), 1);
    len = refs_load(path, whole, sizeof(whole));
    assert_int_equal(len, 26);
    memcpy(whole + len, whole, 13);
    for (size_t more = 1; more < 13; more++) {
        unit_write(path, whole, len + more);
        assert_int_equal(noted(h, "torn", 5600), -ENOENT);
        assert_int_equal(save_and_note(h, "torn", 5602), 1);
        assert_int_equal(noted(h, "torn", 5601), 1);
    }
    memset(whole + len, 0, 100);
    unit_write(path, whole, len + 100);
    assert_int_equal(save_and_note(h, "torn", 5603), 1);
    unit_write(path, whole + len, 100); /* nothing but zeros */
    assert_int_equal(save_and_note(h, "torn", 5604), 1);
    assert_int_equal(noted(h, "torn", 5600), 0);
    kvs_file_vtable()->close(h);
}

/* -- Foreign writers --------------------------------------------------------------------------- */

/* Another program replaced the manifest: what was noted for the one before says nothing of it. */
static void foreign_manifests(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[256], aside[300];
    (void)state;

    assert_int_equal(unit_put(h, 5400, blob, 100), 0);
    assert_int_equal(unit_publish(h, "theirs", "x"), 0);
    assert_int_equal(noted(h, "theirs", 5400), 1);
    snprintf(path, sizeof(path), "%s/theirs", unit_dir);
    snprintf(aside, sizeof(aside), "%s.tmp", path);
    unit_write(aside, "y", 1);
    assert_int_equal(rename(aside, path), 0);
    assert_int_equal(noted(h, "theirs", 5400), -ENOENT);
    assert_int_equal(unit_put(h, 5401, blob, 100), 0); /* nor does what is noted from then on */
    assert_int_equal(unit_publish(h, "theirs", "z"), 0);
    assert_int_equal(noted(h, "theirs", 5401), -ENOENT);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "theirs"), 0);
    assert_int_equal(unit_put(h, 5402, blob, 100), 0);
    assert_int_equal(unit_publish(h, "theirs", "z"), 0);
    assert_int_equal(noted(h, "theirs", 5402), 1);
    kvs_file_vtable()->close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compaction_spares_what_others_publish),
        cmocka_unit_test(compaction_forgets_what_is_gone),
        cmocka_unit_test(compaction_of_what_does_not_open),
        cmocka_unit_test(deletion_beside_publication),
        cmocka_unit_test(threads_share_a_handle),
        cmocka_unit_test(snapshot_amid_a_save),
        cmocka_unit_test(snapshots_claim_nothing),
        cmocka_unit_test(manifests_of_idle_handles),
        cmocka_unit_test(damage_makes_a_list_incomplete),
        cmocka_unit_test(damage_of_an_empty_note),
        cmocka_unit_test(torn_ends_are_cut_off),
        cmocka_unit_test(foreign_manifests),
    };

    return cmocka_run_group_tests(tests, unit_make_dir, unit_rm_dir);
}
