// SPDX-License-Identifier: Apache-2.0
/*
 * Readers beside a writer, a packer and a collector: no blob is ever missing. Each round the writer puts some
 * blobs that stay and twice as many that nobody needs. The packer packs them, and the collector rewrites
 * the packs without the latter. So each blob goes from a file into one pack, then into another one.
 */
#include "tiered_unit.h"

#include <pthread.h>

#include "tiered/pack_sweep.h"

enum { A_ROUND = 6, LINGER_MS = 20 };

#define NOT_NEEDED UINT64_C(1000000) /* numbers of blobs from here on */

struct storm {
    struct world w;
    size_t reads; /* of each reader */
    _Atomic uint64_t written, false_misses, unsure, got;
    atomic_uint readers;
    atomic_int read_rc;
    _Atomic uint64_t packs, rewritten;
};

/* Every second read asks for several blobs. */
static int read_some(struct kvs_store *store, uint64_t first, uint64_t written)
{
    uint8_t keys[4 * 16], data[LEN];
    void *many[4];
    size_t len[4];
    int found;

    if (first % 2)
        return get_blob(store, first);
    for (uint64_t i = 0; i < 4; i++)
        make_blob((first + i) % written, keys + i * 16, data);
    found = kvs_get_chunks(store, keys, 16, 4, many, len);
    for (size_t i = 0; i < 4 && found >= 0; i++)
        free(many[i]);
    return found < 0 ? found : found == 4 ? 0 : -ENOENT;
}

static void *read_all(void *arg)
{
    struct storm *s = arg;
    struct kvs_store *store = open_store(s->w.uri);
    uint64_t state = (uintptr_t)&store | 1;

    /* The packing may begin late: until there was something to read. */
    for (size_t i = 0; i < s->reads || s->packs <= 3 || !s->rewritten; i++) {
        uint64_t written = s->written;
        int rc = read_some(store, unit_below(&state, written), written);

        s->got += rc == 0;
        s->false_misses += rc == -ENOENT;
        s->unsure += rc == -EIO; /* packs changed three times meanwhile: no miss */
        if (rc != 0 && rc != -ENOENT && rc != -EIO)
            s->read_rc = rc;
        if (i % 5000 == 4999) { /* a handle that knows nothing */
            kvs_close(store);
            store = open_store(s->w.uri);
        }
    }
    kvs_close(store);
    s->readers--;
    return NULL;
}

static int is_needed(void *arg, const uint8_t *hash, size_t hash_len)
{
    uint64_t n;

    (void)arg, (void)hash_len;
    memcpy(&n, hash, sizeof(n));
    return n < NOT_NEEDED;
}

/* Write a round's blobs, in the order in which they are packed. */
static void write_round(struct storm *s, uint64_t round, uint8_t *ret_keys)
{
    uint8_t data[LEN];

    for (uint64_t i = 0; i < 3 * A_ROUND; i++) {
        uint64_t n = i % 3 == 0 ? round * A_ROUND + i / 3 : NOT_NEEDED + round * 3 * A_ROUND + i;

        assert_true(put_blob(s->w.store, n) >= 0);
        make_blob(n, ret_keys + i * 16, data);
    }
    publish(s->w.store, "m");
    s->written = (round + 1) * A_ROUND;
}

/* Pack them, and drop the single ones when readers have had their time. */
static void pack_round(struct storm *s, const uint8_t *keys)
{
    int each[3 * A_ROUND];
    struct trd_packing p;

    assert_int_equal(trd_packing_init(&p, s->w.cold, s->w.cold), 0);
    p.min_bytes = LEN;
    p.max_bytes = 10 * LEN;
    assert_int_equal(trd_pack_write(&p, keys, 16, 3 * A_ROUND, each), 3 * A_ROUND);
    usleep(LINGER_MS * 1000);
    assert_int_equal(trd_pack_drop(&p, keys, 16, 3 * A_ROUND, each), 3 * A_ROUND);
    s->packs += p.n_packs;
    trd_packing_fini(&p);
}

static void collect_round(struct storm *s)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_packing p;

    assert_int_equal(trd_packing_init(&p, s->w.cold, s->w.cold), 0);
    assert_int_equal(
        trd_sweep_packs_of(&p, LINGER_MS * UINT64_C(1000000), 0, is_needed, NULL, &swept), 0);
    assert_int_equal(swept.errors, 0);
    s->rewritten += swept.deleted;
    trd_packing_fini(&p);
}

static void test_storm(void **state)
{
    struct storm s = {.reads = unit_rounds(400000), .readers = 2};
    uint8_t keys[3 * A_ROUND * 16];
    pthread_t threads[2];
    (void)state;

    world_open(&s.w, "puts = cold\nlinger = 20ms\nplaces = 16\n", "");
    write_round(&s, 0, keys);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_all, &s), 0);
    for (uint64_t round = 1; s.readers; round++) {
        pack_round(&s, keys);
        collect_round(&s);
        write_round(&s, round, keys);
    }
    for (size_t i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    print_message("reads=%llu packs=%llu rewritten=%llu unsure=%llu false_misses=%llu\n",
                  (unsigned long long)s.got, (unsigned long long)s.packs,
                  (unsigned long long)s.rewritten, (unsigned long long)s.unsure,
                  (unsigned long long)s.false_misses);
    assert_int_equal(s.false_misses, 0);
    assert_int_equal(s.read_rc, 0);
    assert_true(s.packs > 3 && s.rewritten > 0 && s.got > s.reads);
    world_close(&s.w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_storm)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
