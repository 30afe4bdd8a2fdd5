// SPDX-License-Identifier: Apache-2.0
#include "store/file_unit.h"

#include <sys/file.h>
#include <sys/wait.h>
#include <utime.h>

#include "base/core/clock.h"

static uint8_t blob[100000];

static int setup(void **state)
{
    uint64_t rng = 9;

    for (size_t i = 0; i < sizeof(blob); i++)
        blob[i] = (uint8_t)unit_random(&rng);
    return unit_make_dir(state);
}

static void age(uint64_t n, time_t seconds)
{
    struct utimbuf times = {time(NULL) - seconds, time(NULL) - seconds};
    char path[512];

    unit_path(path, n);
    assert_int_equal(utime(path, &times), 0);
}

static int count(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 0;
}

static int stop(void *arg, const kv_store_entry *entry)
{
    (void)arg;
    (void)entry;
    return 42;
}

static int n_refs(kv_store_v1 *h, const char *name)
{
    int n = 0, rc = kvs_file_ext()->list_refs(h, name, count, &n);

    return rc < 0 ? rc : n;
}

/* arg: a key that must stay. */
static int is_key(void *arg, const uint8_t *hash, size_t hash_len)
{
    return hash_len == 8 && memcmp(arg, hash, 8) == 0;
}

static kv_store_swept sweep(kv_store_v1 *h, uint64_t min_age_s, kv_store_live_fn live, void *arg)
{
    kv_store_swept swept = {.size = sizeof(swept)};

    assert_int_equal(kvs_file_ext()->sweep_chunks(h, min_age_s, live, arg, &swept), 0);
    return swept;
}

/* Eviction goes by the order of touches, of one call too. */
static void touches_have_an_order(void **state)
{
    kv_store_v1 *h = unit_open("");
    uint8_t keys[64][8];
    int64_t before = 0;
    int n_times = 0;
    (void)state;

    for (uint64_t i = 0; i < KV_COUNT(keys); i++) {
        unit_key(keys[i], i * 37 % KV_COUNT(keys));
        assert_int_equal(unit_put(h, i, blob, 10), 0);
    }
    assert_int_equal(unit_publish(h, "a", "x"), 0);
    assert_int_equal(kvs_file_ext()->touch_chunks(h, keys[0], 8, KV_COUNT(keys)), KV_COUNT(keys));
    for (uint64_t i = 0; i < KV_COUNT(keys); i++) {
        char path[512];
        struct stat st;
        int64_t at;

        unit_path(path, i * 37 % KV_COUNT(keys));
        assert_int_equal(stat(path, &st), 0);
        at = (int64_t)kv_timespec_ns(&st.st_mtim);
        assert_true(at >= before);
        n_times += at > before;
        before = at;
    }
    assert_true(n_times > 32); /* the kernel's own clock of files ticks once in them all */
    kvs_file_vtable()->close(h);
}

static void lists_and_numbers(void **state)
{
    const kv_store_ext *x = kvs_file_ext();
    kv_store_stats stats = {.size = sizeof(stats)};
    kv_store_v1 *h = unit_open("");
    uint8_t keys[3][8], present[3], *data[3];
    size_t len[3];
    int n = 0;
    (void)state;

    for (uint64_t i = 0; i < 3; i++)
        unit_key(keys[i], i);
    assert_int_equal(unit_put(h, 0, blob, 100), 0);
    assert_int_equal(unit_put(h, 1, blob, 0), 0);
    assert_int_equal(x->exists_chunks(h, keys[0], 8, 3, present), 0);
    assert_memory_equal(present, "\1\1\0", 3);
    assert_int_equal(unit_publish(h, "a/b", "x"), 0);
    assert_int_equal(x->exists_chunks(h, keys[0], 8, 3, present), 0);
    assert_memory_equal(present, "\1\1\0", 3);
    assert_int_equal(x->get_chunks(h, keys[0], 8, 3, data, len), 2);
    assert_int_equal(len[0], 100);
    assert_non_null(data[1]);
    assert_null(data[2]);
    free(data[0]);
    free(data[1]);
    assert_int_equal(x->list_chunks(h, count, &n), 0);
    assert_int_equal(n, 2);
    assert_int_equal(x->list_manifests(h, stop, NULL), 42);
    assert_int_equal(x->list_chunks(h, stop, NULL), 42);
    assert_int_equal(x->touch_chunks(h, keys[0], 8, 3), 2);
    assert_int_equal(x->stats(h, &stats), 0);
    assert_int_equal(stats.n_chunks, 2);
    assert_int_equal(stats.n_manifests, 1);
    assert_int_equal(stats.bytes, 100);
    assert_int_equal(stats.puts, 2);
    assert_int_equal(x->delete_chunk(h, keys[0], 8), 0);
    assert_int_equal(x->delete_chunk(h, keys[0], 8), 0);
    assert_int_equal(unit_get(h, 0, blob, 100), -ENOENT);
    kvs_file_vtable()->close(h);
}

/* A chunk goes when its content is what the caller saw; a pending put, and other content, stay. */
static void deletes_if_same(void **state)
{
    const kv_store_ext *x = kvs_file_ext();
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    const uint8_t *bytes = (const uint8_t *)blob;
    uint8_t key[8];
    (void)state;

    unit_key(key, 0);
    assert_int_equal(x->delete_chunk_if(h, key, 8, bytes, 100), 0); /* none */
    assert_int_equal(unit_put(h, 0, blob, 100), 0);
    assert_int_equal(x->delete_chunk_if(h, key, 8, bytes, 100), 0); /* not published */
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(x->delete_chunk_if(other, key, 8, bytes, 99), 0);
    assert_int_equal(x->delete_chunk_if(other, key, 8, bytes + 1, 100), 0);
    assert_int_equal(unit_get(other, 0, blob, 100), 0);
    assert_int_equal(unit_put(other, 0, blob, 100), 1);
    assert_int_equal(x->delete_chunk_if(other, key, 8, bytes, 100), 0); /* a hit, not published */
    assert_int_equal(unit_publish(other, "n", "x"), 0);
    assert_int_equal(unit_get(h, 0, blob, 100), 0);
    assert_int_equal(x->delete_chunk_if(other, key, 8, bytes, 100), 1);
    assert_int_equal(unit_get(h, 0, blob, 100), -ENOENT);
    assert_int_equal(x->delete_chunk_if(other, key, 8, bytes, 100), 0);
    assert_int_equal(unit_put(h, 0, blob, 100), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    assert_int_equal(unit_get(other, 0, blob, 100), 0);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

struct taken {
    uint8_t data[sizeof(blob)];
    size_t len, n; /* of pieces */
    int stop;
};

static int take_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct taken *t = arg;

    if (offset == 0)
        t->len = t->n = 0;
    assert_int_equal(offset, t->len);
    assert_true(len <= sizeof(t->data) - t->len);
    memcpy(t->data + t->len, piece, len);
    t->len += len;
    t->n++;
    return t->stop;
}

static int stream(kv_store_v1 *h, uint64_t n, size_t room, struct taken *ret)
{
    uint8_t key[8], buf[4096];

    unit_key(key, n);
    ret->len = ret->n = 0;
    return kvs_file_ext()->stream_chunk(h, key, 8, buf, room, take_piece, ret);
}

static kv_store_stats stats_of(kv_store_v1 *h)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvs_file_ext()->stats(h, &stats), 0);
    return stats;
}

/* Chunks in pieces: pending ones and published ones, packed and foreign ones (which come whole). */
static void streams(void **state)
{
    kv_store_v1 *h = unit_open(""), *packed = unit_open("?zstd=1");
    static struct taken t;
    char path[512];
    (void)state;

    assert_int_equal(unit_put(h, 100, blob, sizeof(blob)), 0);
    assert_int_equal(unit_put(h, 101, blob, 0), 0);
    for (int published = 0; published < 2; published++) {
        for (size_t room = 1000; room <= 4096; room += 1548) {
            assert_int_equal(stream(h, 100, room, &t), 0);
            assert_int_equal(t.n, (sizeof(blob) + room - 1) / room);
            assert_int_equal(t.len, sizeof(blob));
            assert_memory_equal(t.data, blob, sizeof(blob));
        }
        assert_int_equal(stream(h, 101, 9, &t), 0);
        assert_int_equal(t.n, 1);
        assert_int_equal(t.len, 0);
        assert_int_equal(stream(h, 102, 9, &t), -ENOENT);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
    }
    memset(t.data, 7, 5000);
    assert_int_equal(unit_put(packed, 103, t.data, 5000), 0);
    assert_int_equal(stream(packed, 103, 100, &t), 0);
    assert_int_equal(t.n, 1);
    assert_int_equal(t.len, 5000);
    unit_path(path, 104);
    unit_write(path, blob, 3000);
    assert_int_equal(stream(h, 104, 100, &t), 0);
    assert_int_equal(t.n, 1);
    assert_memory_equal(t.data, blob, 3000);
    kvs_file_vtable()->close(packed);
    kvs_file_vtable()->close(h);
}

/* A damaged chunk is set aside, whatever was given of it. One whose consumer stops is not, and
 * whatever the consumer returns is its own. */
static void stopped_streams(void **state)
{
    static const int stops[] = {1, -EBADMSG, -ENOENT, -EAGAIN, -EIO};
    kv_store_v1 *h = unit_open("");
    static struct taken t;
    char path[512];
    int fd;
    (void)state;

    assert_int_equal(unit_put(h, 105, blob, sizeof(blob)), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    for (size_t i = 0; i < KV_COUNT(stops); i++) {
        t.stop = stops[i];
        assert_int_equal(stream(h, 105, 1000, &t), stops[i]);
        assert_int_equal(t.n, 1);
    }
    t.stop = 0;
    assert_int_equal(stats_of(h).bad_chunks, 0);
    assert_int_equal(stats_of(h).errors, 0);
    assert_int_equal(stream(h, 105, 1000, &t), 0);
    unit_path(path, 105);
    fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, "x", 1, 99990), 1);
    close(fd);
    assert_int_equal(stream(h, 105, 1000, &t), -EBADMSG);
    assert_int_equal(t.n, 100);
    assert_int_equal(stats_of(h).bad_chunks, 1);
    assert_int_equal(stream(h, 105, 1000, &t), -ENOENT);
    kvs_file_vtable()->close(h);
}

/* Noted chunks of a manifest grow with each publication, over handles, also past a torn end. */
static void refs_are_a_union(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[256];
    int fd;
    (void)state;

    assert_int_equal(n_refs(h, "index"), -ENOENT);
    assert_int_equal(unit_put(h, 50, blob, 10), 0);
    assert_int_equal(unit_publish(h, "index", ""), 0);
    assert_int_equal(n_refs(h, "index"), 1);
    snprintf(path, sizeof(path), "%s/.kvasir/refs/index", unit_dir);
    fd = open(path, O_WRONLY | O_APPEND);
    assert_int_equal(write(fd, "\x08torn", 5), 5);
    close(fd);
    kvs_file_vtable()->close(h);
    h = unit_open("");
    assert_int_equal(unit_put(h, 50, blob, 10), 1);
    assert_int_equal(unit_put(h, 51, blob, 10), 0);
    assert_int_equal(kvs_file_ext()->flush(h), 0); /* which must not lose what is to be noted */
    assert_int_equal(unit_publish(h, "index", ""), 0);
    assert_int_equal(n_refs(h, "index"), 3);
    assert_int_equal(unit_put(h, 52, blob, 10), 0);
    assert_int_equal(unit_publish_own(h, "ours"), 0);
    assert_int_equal(n_refs(h, "ours"), -ENOENT);
    assert_int_equal(kvs_file_vtable()->delete_manifest(h, "index"), 0);
    assert_int_equal(n_refs(h, "index"), -ENOENT);
    kvs_file_vtable()->close(h);
}

static void refs_are_compacted(void **state)
{
    kv_store_v1 *h = unit_open("");
    struct stat st;
    char path[256];
    (void)state;

    for (int round = 0; round < 60; round++) {
        for (uint64_t i = 1000; i < 1200; i++)
            assert_int_equal(unit_put(h, i, blob, 10), round > 0);
        assert_int_equal(unit_publish(h, "many", ""), 0);
    }
    snprintf(path, sizeof(path), "%s/.kvasir/refs/many", unit_dir);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size < 80 * 1024); /* 60 * 200 * 13 bytes were appended */
    assert_true(n_refs(h, "many") >= 200);
    kvs_file_vtable()->close(h);
}

static void sweeps_what_is_old_and_free(void **state)
{
    kv_store_v1 *h = unit_open(""), *other = unit_open("");
    kv_store_swept swept;
    uint8_t key[8];
    (void)state;

    sweep(h, 0, NULL, NULL);
    for (uint64_t i = 0; i < 6; i++)
        assert_int_equal(unit_put(h, i, blob, 1000), 0);
    assert_int_equal(unit_publish(h, "m", "x"), 0);
    for (uint64_t i = 0; i < 5; i++)
        age(i, 1000);
    assert_int_equal(unit_put(other, 0, blob, 1000), 1); /* leased: new from now on */
    age(1, -5000); /* from the future: the clock was set back */
    unit_key(key, 2);
    swept = sweep(h, 500, is_key, key);
    assert_int_equal(swept.deleted, 2);
    assert_int_equal(swept.deleted_bytes, 2000);
    assert_int_equal(swept.kept, 4);
    assert_int_equal(unit_get(h, 3, blob, 1000), -ENOENT);
    assert_int_equal(unit_get(h, 5, blob, 1000), 0);
    age(1, 1000);
    swept = sweep(h, 0, is_key, key); /* whatever the age, the lease alone must do */
    assert_int_equal(swept.deleted, 2);
    assert_int_equal(swept.kept, 2);
    assert_int_equal(unit_get(h, 0, blob, 1000), 0);
    assert_int_equal(unit_publish(other, "o", "x"), 0); /* ends the lease */
    age(0, 1000);
    assert_int_equal(sweep(h, 500, is_key, key).deleted, 1);
    kvs_file_vtable()->close(h);
    kvs_file_vtable()->close(other);
}

static uint64_t stored(kv_store_v1 *h)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvs_file_ext()->stats(h, &stats), 0);
    return stats.bytes;
}

/* Two handles share one limit; what was used longest ago goes first. */
static void limit_evicts_the_oldest(void **state)
{
    kv_store_v1 *a = unit_open("?limit=1000000"), *b = unit_open("?limit=1000000");
    (void)state;

    sweep(a, 0, NULL, NULL);
    for (uint64_t i = 0; i < 9; i++) {
        assert_int_equal(unit_put(i % 2 ? a : b, 2000 + i, blob, 100000), 0);
        assert_int_equal(unit_publish(i % 2 ? a : b, "m", "x"), 0);
        age(2000 + i, 1000 - (time_t)i);
    }
    assert_int_equal(unit_get(a, 2000, blob, 100000), 0); /* a read counts as use */
    assert_int_equal(unit_put(b, 2009, blob, 100000), 0);
    assert_int_equal(unit_put(b, 2010, blob, 100000), 0);
    assert_int_equal(unit_publish(b, "m", "x"), 0);
    assert_true(stored(a) <= 1000000);
    assert_int_equal(unit_get(a, 2000, blob, 100000), 0);
    assert_int_equal(unit_get(a, 2001, blob, 100000), -ENOENT);
    assert_int_equal(unit_get(a, 2008, blob, 100000), 0);
    assert_int_equal(unit_get(a, 2010, blob, 100000), 0);
    for (uint64_t i = 0; i < 15; i++) /* one save larger than the limit is kept whole */
        assert_int_equal(unit_put(a, 3000 + i, blob, 100000), 0);
    assert_int_equal(unit_publish(a, "m", "x"), 0);
    assert_int_equal(stored(a), 1500000);
    assert_int_equal(unit_put(b, 4000, blob, 100000), 0);
    assert_int_equal(unit_publish(b, "m", "x"), 0);
    assert_true(stored(a) <= 1000000);
    kvs_file_vtable()->close(a);
    kvs_file_vtable()->close(b);
}

/* -- Model: random calls on two handles that are opened anew now and then ---------------------- */

enum { CHUNKS = 40, NAMES = 4 };

struct model {
    bool stored[CHUNKS], pending[2][CHUNKS];
    int manifest[NAMES]; /* a number, or -1 */
};

static size_t model_len(uint64_t n)
{
    return n * n * 37 % 70000;
}

static void model_publish(kv_store_v1 *h, struct model *m, int who, uint64_t name, int number)
{
    char text[2][16];

    snprintf(text[0], 16, "n%d", (int)name);
    snprintf(text[1], 16, "%d", number);
    assert_int_equal(unit_publish(h, text[0], text[1]), 0);
    m->manifest[name] = number;
    for (int i = 0; i < CHUNKS; i++) {
        m->stored[i] |= m->pending[who][i];
        m->pending[who][i] = false;
    }
}

static void model_check(kv_store_v1 *h, const struct model *m, uint64_t name)
{
    char text[16];
    uint8_t *data;
    size_t len;
    int rc;

    snprintf(text, sizeof(text), "n%d", (int)name);
    rc = kvs_file_vtable()->get_manifest(h, text, &data, &len);
    assert_int_equal(rc, m->manifest[name] < 0 ? -ENOENT : 0);
    if (rc < 0)
        return;
    snprintf(text, sizeof(text), "%d", m->manifest[name]);
    assert_int_equal(len, strlen(text));
    assert_memory_equal(data, text, len);
    free(data);
}

static void model_step(kv_store_v1 *h[2], struct model *m, uint64_t *rng, int step)
{
    static const char *const options[] = {"", "?zstd=1", "?sync=files", "?sync=fs"};
    uint64_t n = unit_below(rng, CHUNKS), name = unit_below(rng, NAMES);
    int who = (int)unit_below(rng, 2);
    bool there = m->stored[n] || m->pending[who][n];
    uint8_t key[8];
    char text[16];

    unit_key(key, n);
    switch (unit_below(rng, 16)) {
    case 0:
        model_publish(h[who], m, who, name, step);
        break;
    case 1:
        snprintf(text, sizeof(text), "n%d", (int)name);
        assert_int_equal(kvs_file_vtable()->delete_manifest(h[who], text), 0);
        m->manifest[name] = -1;
        break;
    case 2:
        if (m->pending[!who][n]) /* it may come back */
            break;
        assert_int_equal(kvs_file_ext()->delete_chunk(h[who], key, 8), 0);
        m->stored[n] = m->pending[who][n] = false;
        break;
    case 3:
        kvs_file_vtable()->close(h[who]);
        h[who] = unit_open(options[unit_below(rng, KV_COUNT(options))]);
        memset(m->pending[who], 0, sizeof(m->pending[who]));
        break;
    case 4:
        model_check(h[who], m, name);
        break;
    case 5:
    case 6:
    case 7:
    case 8:
    case 9:
        assert_int_equal(unit_get(h[who], n, blob + n, model_len(n)), there ? 0 : -ENOENT);
        break;
    default:
        assert_int_equal(unit_put(h[who], n, blob + n, model_len(n)), there);
        m->pending[who][n] = true;
    }
}

static void like_the_model(void **state)
{
    struct model m = {.manifest = {-1, -1, -1, -1}};
    uint64_t rng = unit_seed();
    kv_store_v1 *h[2] = {unit_open(""), unit_open("")};
    (void)state;

    sweep(h[0], 0, NULL, NULL);
    for (size_t i = 0; i < unit_rounds(4000); i++)
        model_step(h, &m, &rng, (int)i);
    kvs_file_vtable()->close(h[0]);
    kvs_file_vtable()->close(h[1]);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/writers"), 0);
    assert_int_equal(unit_count(".kvasir/bad"), 0);
}

/* -- Threads: saves, gets and sweeps on one handle and on two ---------------------------------- */

static _Atomic bool storm_over;
static kv_store_v1 *storm_handle[2];

/* Each round puts chunks that others put and sweep, too; after put_manifest all must be there: in
 * the pins' terms, until the next sweep, so ages guard them then. */
static void *storm_save(void *arg)
{
    uint64_t me = (uint64_t)(uintptr_t)arg, rng = me * 77 + 1;

    for (int round = 0; round < 40; round++) {
        kv_store_v1 *h = storm_handle[me % 2];
        uint64_t at[8];
        char name[16];

        for (int i = 0; i < 8; i++) {
            at[i] = 5000 + unit_below(&rng, 30);
            if (unit_put(h, at[i], blob + at[i] % 100, 5000) < 0)
                return "put";
        }
        snprintf(name, sizeof(name), "s%d", (int)me);
        if (unit_publish(h, name, "x") < 0)
            return "publish";
        for (int i = 0; i < 8; i++) {
            if (unit_get(h, at[i], blob + at[i] % 100, 5000) < 0)
                return "get";
        }
    }
    return NULL;
}

/* Seconds that a busy machine may hold a thread up between its put and its publication: only age keeps
 * what another thread published in between. */
enum { STALL_S = 10 };

/* As a deleter looks at it: under the flock, neither pinned nor leased, nor used just now. */
static void age_unless_kept(kv_store_v1 *h, uint64_t n)
{
    struct utimbuf times = {time(NULL) - 900, time(NULL) - 900};
    char path[512];
    struct stat st;
    uint8_t key[8];
    int fd;

    unit_key(key, n);
    fd = openat(h->fan[kvs_file_fan(key)], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    unit_path(path, n);
    if (stat(path, &st) == 0 && st.st_nlink == 1 && st.st_mtime < time(NULL) - STALL_S &&
        kvs_file_see(&st).mtime_ns < kvs_file_leased_since(h))
        utime(path, &times);
    close(fd);
}

static void *storm_sweep(void *arg)
{
    while (!atomic_load(&storm_over)) {
        for (uint64_t i = 5000; i < 5030; i += 3) /* chunks whose last use was long ago... */
            age_unless_kept(arg, i);
        sweep(arg, 600, NULL, NULL); /* ...go */
    }
    return NULL;
}

static void threads(void **state)
{
    pthread_t savers[4], sweeper;
    void *failed;
    (void)state;

    atomic_store(&storm_over, false);
    storm_handle[0] = unit_open("");
    storm_handle[1] = unit_open("");
    assert_int_equal(pthread_create(&sweeper, NULL, storm_sweep, storm_handle[0]), 0);
    for (uintptr_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&savers[i], NULL, storm_save, (void *)i), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(savers[i], &failed);
        if (failed)
            print_message("saver %d: %s\n", i, (const char *)failed);
        assert_null(failed);
    }
    atomic_store(&storm_over, true);
    pthread_join(sweeper, NULL);
    kvs_file_vtable()->close(storm_handle[0]);
    kvs_file_vtable()->close(storm_handle[1]);
    assert_int_equal(unit_count(".kvasir/tmp"), 0);
    assert_int_equal(unit_count(".kvasir/bad"), 0);
}

/* A sanitizer makes verifying slower; it must end between two uses now and then. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { USE_US = 20000, USES = 50 };
#else
enum { USE_US = 300, USES = 300 };
#endif

static atomic_bool used_enough;

/* As other processes do that publish the same chunk. */
static void *use(void *arg)
{
    const char *path = arg;

    while (!atomic_load(&used_enough)) {
        utimensat(AT_FDCWD, path, NULL, 0);
        usleep(USE_US);
    }
    return NULL;
}

/* A chunk that others use while it is verified is as good as before. */
static void used_while_verified(void **state)
{
    kv_store_v1 *h = unit_open("");
    char path[512];
    pthread_t user;
    (void)state;

    assert_true(unit_put(h, 4000, blob, sizeof(blob)) >= 0);
    assert_int_equal(unit_publish(h, "u", "x"), 0);
    unit_path(path, 4000);
    atomic_store(&used_enough, false);
    assert_int_equal(pthread_create(&user, NULL, use, path), 0);
    for (int i = 0; i < USES; i++) {
        assert_true(unit_put(h, 4000, blob, sizeof(blob)) >= 0);
        assert_int_equal(unit_publish(h, "u", "x"), 0);
    }
    atomic_store(&used_enough, true);
    pthread_join(user, NULL);
    kvs_file_vtable()->close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_and_numbers),
        cmocka_unit_test(deletes_if_same),
        cmocka_unit_test(used_while_verified),
        cmocka_unit_test(refs_are_a_union),
        cmocka_unit_test(refs_are_compacted),
        cmocka_unit_test(sweeps_what_is_old_and_free),
        cmocka_unit_test(limit_evicts_the_oldest),
        cmocka_unit_test(touches_have_an_order),
        cmocka_unit_test(like_the_model),
        cmocka_unit_test(threads),
        cmocka_unit_test(streams),
        cmocka_unit_test(stopped_streams),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
