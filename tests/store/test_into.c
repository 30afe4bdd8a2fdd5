// SPDX-License-Identifier: Apache-2.0
/* Batches into and from the caller's memory, on the file store and on backends that have batches,
 * single calls only, or no extensions. A naive model (an array of values) gives the expected result
 * of each call; guard bytes around each part detect writes outside it. */
#include <fcntl.h>

#include "backends.h"
#include "base/core/error.h"

enum { KEYS = 24, LEN_MAX = 300000, PARTS_MAX = 9, GUARD = 16, KEY = 8 };

static uint8_t values[KEYS][LEN_MAX];
static size_t lens[KEYS];
static bool there[KEYS];

/* Parts of @len bytes in memory with guards between, or @room more than that. */
struct places {
    uint8_t *memory;
    size_t size, n;
    struct iovec parts[PARTS_MAX];
};

static void cut(uint64_t *rng, size_t len, struct places *ret)
{
    size_t at = GUARD;

    ret->n = 1 + unit_random(rng) % PARTS_MAX;
    if (len == 0 && unit_random(rng) % 2)
        ret->n = 0;
    ret->size = len + (PARTS_MAX + 1) * GUARD;
    ret->memory = malloc(ret->size);
    memset(ret->memory, 0xa5, ret->size);
    for (size_t i = 0; i < ret->n; i++) {
        size_t some = i + 1 == ret->n ? len : len ? unit_random(rng) % (len + 1) : 0;

        ret->parts[i] = (struct iovec){some ? ret->memory + at : NULL, some};
        at += some + GUARD;
        len -= some;
    }
}

static void check_places(const struct places *p, const uint8_t *want, size_t len)
{
    const uint8_t *at = p->memory;

    for (size_t i = 0; i < p->n; i++) {
        size_t some = KV_MIN(len, p->parts[i].iov_len);

        if (!p->parts[i].iov_len)
            continue;
        for (; at < (uint8_t *)p->parts[i].iov_base; at++)
            assert_int_equal(*at, 0xa5);
        assert_memory_equal(at, want, some);
        at += some;
        want += some;
        len -= some;
    }
    for (; at < p->memory + p->size; at++)
        assert_int_equal(*at, 0xa5);
}

/* A batch of chunks and their places. */
struct unit_batch {
    size_t n;
    uint8_t keys[KEYS][KEY];
    size_t which[KEYS];
    struct places places[KEYS];
    struct iovec parts[KEYS * PARTS_MAX];
    uint32_t n_parts[KEYS];
};

static void add(struct unit_batch *b, uint64_t *rng, size_t k, size_t room)
{
    struct places *p = &b->places[b->n];
    size_t before = 0;

    for (size_t i = 0; i < b->n; i++)
        before += b->n_parts[i];
    backends_key(b->keys[b->n], k);
    b->which[b->n] = k;
    cut(rng, room, p);
    memcpy(b->parts + before, p->parts, p->n * sizeof(*p->parts));
    b->n_parts[b->n++] = (uint32_t)p->n;
}

static void drop(struct unit_batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        free(b->places[i].memory);
    b->n = 0;
}

static void fill_value(uint64_t *rng, size_t k)
{
    static const size_t some[] = {0, 1, 4096, 131072, 131073, 262144};

    lens[k] =
        unit_random(rng) % 3 ? unit_random(rng) % LEN_MAX : some[unit_random(rng) % KV_COUNT(some)];
    for (size_t i = 0; i < lens[k]; i++)
        values[k][i] = (uint8_t)(i % 7 ? i / 100 : unit_random(rng));
}

static void random_puts(struct kvs_store *store, struct unit_batch *b, uint64_t *rng)
{
    int each[KEYS];

    for (size_t n = unit_random(rng) % 8; b->n < n;) {
        size_t k = unit_random(rng) % KEYS, at = 0;

        add(b, rng, k, lens[k]);
        for (size_t i = 0; i < b->places[b->n - 1].n; i++) {
            struct iovec *part = &b->places[b->n - 1].parts[i];

            if (part->iov_len)
                memcpy(part->iov_base, values[k] + at, part->iov_len);
            at += part->iov_len;
        }
    }
    assert_int_equal(kvs_put_chunks_from(store, b->keys, KEY, b->n, b->parts, b->n_parts, each), 0);
    for (size_t i = 0; i < b->n; i++) {
        assert_int_equal(each[i], there[b->which[i]]);
        there[b->which[i]] = true;
    }
    drop(b);
}

static void random_gets(struct kvs_store *store, struct unit_batch *b, uint64_t *rng)
{
    int64_t each[KEYS];
    int found = 0;

    for (size_t n = unit_random(rng) % KEYS; b->n < n;) {
        size_t k = unit_random(rng) % KEYS, room = lens[k];

        if (unit_random(rng) % 4 == 0)
            room = unit_random(rng) % 2 ? room + 1 + unit_random(rng) % 9000 : room / 2;
        add(b, rng, k, room);
    }
    for (size_t i = 0; i < b->n; i++) {
        size_t room = b->places[i].size - (PARTS_MAX + 1) * GUARD;

        found += there[b->which[i]] && room >= lens[b->which[i]];
    }
    assert_int_equal(kvs_get_chunks_into(store, b->keys, KEY, b->n, b->parts, b->n_parts, each),
                     found);
    for (size_t i = 0; i < b->n; i++) {
        size_t k = b->which[i], room = b->places[i].size - (PARTS_MAX + 1) * GUARD;

        assert_int_equal(each[i], !there[k]        ? -ENOENT
                                  : room < lens[k] ? -EMSGSIZE
                                                   : (int64_t)lens[k]);
        check_places(&b->places[i], values[k], each[i] >= 0 ? lens[k] : 0);
    }
    drop(b);
}

static void run_model(enum backend which)
{
    uint64_t rng = unit_seed();
    struct kvs_store *store = backends_open(which);
    struct unit_batch *b = calloc(1, sizeof(*b));

    memset(there, 0, sizeof(there));
    for (size_t k = 0; k < KEYS; k++)
        fill_value(&rng, k);
    for (size_t i = 0; i < unit_rounds(30); i++) {
        random_puts(store, b, &rng);
        random_gets(store, b, &rng);
        if (i % 5 == 0)
            assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
    }
    kvs_close(store);
    free(b);
    memory_forget_all();
}

static void test_model_files(void **state)
{
    (void)state;
    run_model(FILES);
}

static void test_model_zstd(void **state)
{
    (void)state;
    run_model(ZSTD);
}

static void test_model_side_cars(void **state)
{
    (void)state;
    run_model(SIDE_CARS);
}

static void test_model_parts(void **state)
{
    (void)state;
    run_model(PARTS);
}

static void test_model_batches(void **state)
{
    (void)state;
    run_model(BATCHES);
}

static void test_model_single(void **state)
{
    (void)state;
    run_model(SINGLE);
}

static void test_model_bare(void **state)
{
    (void)state;
    run_model(BARE);
}

/* Change a byte of the file of key @k. */
static void damage(size_t k)
{
    char path[512];
    uint8_t key[KEY], byte = 0;
    int fd, at;

    backends_key(key, k);
    at = snprintf(path, sizeof(path), "%s/files/chunks/%x/", backends_dir, key[0] >> 4);
    for (int i = 0; i < KEY; i++)
        at += snprintf(path + at, sizeof(path) - (size_t)at, "%02x", key[i]);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, 5000), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, 5000), 1);
    close(fd);
}

/* One chunk of a batch is damaged, one is missing: those beside them arrive. */
static void test_damage_in_the_middle(void **state)
{
    enum { N = 5, LEN = 200000 };
    struct kvs_store *store = backends_open(FILES);
    static uint8_t from[N][LEN], to[N][LEN];
    struct iovec parts[N];
    uint8_t keys[N][KEY];
    int64_t each[N];
    (void)state;

    for (size_t i = 0; i < N; i++) {
        memset(from[i], (int)i + 1, LEN);
        backends_key(keys[i], i);
        parts[i] = (struct iovec){from[i], LEN};
    }
    assert_int_equal(kvs_put_chunks_from(store, keys, KEY, N - 1, parts, NULL, NULL), 0);
    assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
    damage(2);
    for (size_t i = 0; i < N; i++)
        parts[i].iov_base = to[i];
    assert_int_equal(kvs_get_chunks_into(store, keys, KEY, N, parts, NULL, each), 3);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(each[i], i == 2 ? -EBADMSG : i == 4 ? -ENOENT : LEN);
        if (each[i] > 0)
            assert_memory_equal(to[i], from[i], LEN);
    }
    assert_int_equal(kvs_get_chunks_into(store, keys, KEY, N, parts, NULL, each), 3);
    assert_int_equal(each[2], -ENOENT); /* set aside */
    parts[2].iov_base = from[2];
    assert_int_equal(kvs_put_chunks_from(store, keys[2], KEY, 1, &parts[2], NULL, NULL), 0);
    parts[2].iov_base = to[2];
    assert_int_equal(kvs_get_chunks_into(store, keys[2], KEY, 1, &parts[2], NULL, each), 1);
    assert_memory_equal(to[2], from[2], LEN);
    kvs_close(store);
}

/* Parts of a chunk that share memory hold other bytes than the chunk, which is good all the same:
 * pending it can still be published, and in place it stays. */
static void test_parts_overlap(void **state)
{
    enum { LEN = 2 * 70000 };
    static const enum backend which[] = {FILES, ZSTD, SIDE_CARS, PARTS};
    static uint8_t from[LEN], to[LEN];
    uint32_t n_parts = 2;
    uint8_t key[KEY];
    int64_t each;
    (void)state;

    backends_key(key, 1);
    for (size_t i = 0; i < LEN; i++)
        from[i] = (uint8_t)(i / 1000);
    for (size_t w = 0; w < KV_COUNT(which); w++) {
        struct kvs_store *store = backends_open(which[w]);
        struct iovec whole = {from, LEN}, shared[] = {{to, LEN / 2}, {to, LEN / 2}};

        assert_int_equal(kvs_put_chunks_from(store, key, KEY, 1, &whole, NULL, NULL), 0);
        whole.iov_base = to;
        for (int published = 0; published < 2; published++) {
            assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, shared, &n_parts, &each), 1);
            assert_int_equal(each, LEN);
            assert_memory_equal(to, from + LEN / 2, LEN / 2);
            assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
            assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &whole, NULL, &each), 1);
            assert_memory_equal(to, from, LEN);
        }
        kvs_close(store);
        memory_forget_all();
    }
}

/* Without parts a get asks whether a chunk is empty, and fetches nothing else. */
static void test_no_parts(void **state)
{
    static const enum backend which[] = {FILES, ZSTD, SIDE_CARS, BATCHES, PARTS, SINGLE, BARE};
    uint8_t keys[3][KEY], byte = 7;
    struct iovec part = {&byte, 1};
    uint32_t n_parts[] = {0, 0, 0};
    int64_t each[3];
    (void)state;

    for (size_t i = 0; i < 3; i++)
        backends_key(keys[i], i);
    for (size_t w = 0; w < KV_COUNT(which); w++) {
        struct kvs_store *store = backends_open(which[w]);

        assert_int_equal(kvs_put_chunks_from(store, keys[0], KEY, 1, &part, NULL, NULL), 0);
        assert_int_equal(kvs_put_chunks_from(store, keys[1], KEY, 1, NULL, n_parts, NULL), 0);
        for (int published = 0; published < 2; published++) {
            assert_int_equal(kvs_get_chunks_into(store, keys, KEY, 3, NULL, n_parts, each), 1);
            assert_int_equal(each[0], -EMSGSIZE);
            assert_int_equal(each[1], 0);
            assert_int_equal(each[2], -ENOENT);
            assert_int_equal(kvs_put_manifest(store, "m", "x", 1), 0);
        }
        kvs_close(store);
        memory_forget_all();
    }
}

/* As many parts as 80 layers of K and V have, and more than one readv takes. */
static void test_many_parts(void **state)
{
    enum { N = 2500, SOME = 300 };
    struct kvs_store *store = backends_open(FILES);
    static uint8_t from[N][SOME], to[N][SOME];
    struct iovec parts[N];
    uint8_t key[KEY];
    uint32_t n_parts = N;
    uint64_t rng = unit_seed();
    int64_t each;
    size_t len = 0;
    int rc;
    (void)state;

    backends_key(key, 1);
    for (size_t i = 0; i < N; i++) {
        parts[i] = (struct iovec){from[i], unit_below(&rng, SOME + 1)};
        memset(from[i], (int)unit_random(&rng), parts[i].iov_len);
        len += parts[i].iov_len;
    }
    assert_int_equal(kvs_put_chunks_from(store, key, KEY, 1, parts, &n_parts, &rc), 0);
    assert_int_equal(rc, 0);
    for (size_t i = 0; i < N; i++)
        parts[i].iov_base = to[i];
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, parts, &n_parts, &each), 1);
    assert_int_equal(each, len);
    assert_memory_equal(to, from, sizeof(to));
    kvs_close(store);
}

static void test_arguments(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    uint8_t key[KEY] = {1}, byte = 7;
    struct iovec part = {&byte, 1}, none = {NULL, 1}, huge = {&byte, SIZE_MAX};
    uint32_t too_many = KVS_PARTS_MAX + 1, zero = 0;
    int64_t each = 5;
    (void)state;

    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 0, NULL, NULL, NULL), 0);
    assert_int_equal(kvs_put_chunks_from(store, key, KEY, 0, NULL, NULL, NULL), 0);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &part, NULL, NULL), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &none, NULL, &each), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &huge, NULL, &each), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &part, &too_many, &each), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, NULL, NULL, &each), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(store, key, 0, 1, &part, NULL, &each), -EINVAL);
    assert_int_equal(kvs_get_chunks_into(NULL, key, KEY, 1, &part, NULL, &each), -EINVAL);
    assert_int_equal(kvs_put_chunks_from(store, key, KEY, 1, &none, NULL, NULL), -EINVAL);
    assert_int_equal(each, 5);
    assert_int_equal(kvs_put_chunks_from(store, key, KEY, 1, NULL, &zero, NULL), 0);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, NULL, &zero, &each), 1);
    assert_int_equal(each, 0);
    kvs_close(store);
}

/* A server that is gone is asked once, not once for each chunk; room that is gone fails only what is
 * put after it. */
static void test_failures(void **state)
{
    enum { N = 4 };
    static const enum backend which[] = {BATCHES, SINGLE};
    static const char *const uris[] = {"memory://all", "memory://gets1"};
    uint8_t keys[N][KEY], bytes[N] = {1, 2, 3, 4};
    struct iovec parts[N];
    int64_t each[N];
    int put[N];
    (void)state;

    for (size_t i = 0; i < N; i++) {
        backends_key(keys[i], i);
        parts[i] = (struct iovec){&bytes[i], 1};
    }
    for (size_t w = 0; w < KV_COUNT(which); w++) {
        struct kvs_store *store = backends_open(which[w]);
        struct memory_space *space = memory_space(uris[w]);

        space->fail_puts_after = 2;
        space->fail_puts = -ENOSPC;
        assert_int_equal(kvs_put_chunks_from(store, keys, KEY, N, parts, NULL, put), -ENOSPC);
        for (int i = 0; i < N; i++)
            assert_int_equal(put[i], i < 2 ? 0 : -ENOSPC);
        space->fail_puts = 0;
        space->fail_gets = -ECONNREFUSED;
        assert_int_equal(kvs_get_chunks_into(store, keys, KEY, N, parts, NULL, each), 0);
        for (int i = 0; i < N; i++)
            assert_int_equal(each[i], -ECONNREFUSED);
        space->fail_gets = 0;
        assert_int_equal(kvs_get_chunks_into(store, keys, KEY, N, parts, NULL, each), 2);
        kvs_close(store);
    }
}

static int lying_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts, size_t *len)
{
    (void)self, (void)hash, (void)hash_len, (void)parts, (void)n_parts;
    *len = 100;
    return 0;
}

/* A backend says that it wrote more than there was room for. */
static void test_lying_backend(void **state)
{
    kv_store_ext ext = *memory_ext();
    uint8_t key[KEY] = {1}, byte = 7;
    struct iovec part = {&byte, 1};
    struct kvs_store *store;
    int64_t each;
    (void)state;

    ext.get_parts = lying_get;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://lies", false, &store), 0);
    assert_int_equal(kvs_get_chunks_into(store, key, KEY, 1, &part, NULL, &each), 0);
    assert_int_equal(each, -EPROTO);
    kvs_close(store);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, backends_set_up, backends_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_model_files),   TEST(test_model_zstd),           TEST(test_model_side_cars),
        TEST(test_model_batches), TEST(test_model_parts),          TEST(test_model_single),
        TEST(test_model_bare),    TEST(test_damage_in_the_middle), TEST(test_parts_overlap),
        TEST(test_no_parts),      TEST(test_many_parts),           TEST(test_arguments),
        TEST(test_failures),      TEST(test_lying_backend),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
