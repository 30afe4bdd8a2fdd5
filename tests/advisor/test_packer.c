// SPDX-License-Identifier: Apache-2.0
/* The packer over two folders: cold blobs go into packs in the order of their prefixes, come out again when they are
 * used, and packs that nobody needs go. */
#include "../support.h"

#include <limits.h>

#include "advisor/index/policy.h"
#include "advisor/mover.h"
#include "tiered/pack_sweep.h"

enum { LEN = 1000, N = 40, PACK = 16384 };

struct fixture {
    char dir[PATH_MAX];
    struct kva_volumes volumes;
    struct kva_world world;
    struct kva_mover *mover;
};

static void key_of(unsigned i, uint8_t ret[KVA_KEY])
{
    memset(ret, 0, KVA_KEY);
    memcpy(ret, &i, sizeof(i));
}

static void make_blob(unsigned i, uint8_t ret[LEN])
{
    for (unsigned k = 0; k < LEN; k++)
        ret[k] = (uint8_t)(i * 31 + k * 7);
}

static void put(struct fixture *f, unsigned i)
{
    uint8_t key[KVA_KEY], data[LEN];

    key_of(i, key);
    make_blob(i, data);
    assert_true(kvs_put_chunk(f->volumes.stores[1], key, KVA_KEY, data, LEN) >= 0);
    assert_int_equal(kvs_put_manifest(f->volumes.stores[1], "m", "", 0), 0);
}

static void scan(struct fixture *f)
{
    atomic_bool stop = false;

    assert_int_equal(kva_volumes_scan(&f->volumes, &f->world, &stop), 2);
}

/* Tell that a publisher has blob @i, the child of @parent, without a use of it. */
static void tell(struct fixture *f, unsigned i, int parent)
{
    uint8_t key[KVA_KEY], parent_key[KVA_KEY];
    struct kva_told told = {.key = key, .bytes = LEN, .chain = 7, .known = true};

    key_of(i, key);
    key_of((unsigned)parent, parent_key);
    told.parent = parent < 0 ? NULL : parent_key;
    pthread_mutex_lock(&f->world.lock);
    assert_true(kva_index_tell(f->world.index, &told) >= 0);
    pthread_mutex_unlock(&f->world.lock);
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
    for (unsigned i = 0; i < N; i++)
        put(f, i);
    scan(f);
    for (unsigned i = N; i-- > 0;) /* children before their parents */
        tell(f, i, -1);
    for (unsigned i = 0; i < N; i++)
        tell(f, i, i < 2 ? -1 : (int)i - 2); /* two branches: the even ones and the odd ones */
}

static void start(struct fixture *f, uint64_t grace_ms)
{
    const struct kva_mover_opts opts = {
        .volumes = &f->volumes,
        .world = &f->world,
        .interval_ms = 1,
        .packing = {.idle_s = 1, .min_bytes = PACK / 2, .max_bytes = PACK, .grace_ms = grace_ms}};

    assert_int_equal(kva_mover_create(&opts, &f->mover), 0);
}

static void stop(struct fixture *f)
{
    kva_mover_destroy(f->mover);
    f->mover = NULL;
}

static void end(struct fixture *f)
{
    kva_mover_destroy(f->mover);
    kva_index_destroy(f->world.index);
    kva_volumes_close(&f->volumes);
    pthread_mutex_destroy(&f->world.lock);
    remove_dir(f->dir);
}

static struct kva_packer_stats stats_of(struct fixture *f)
{
    struct kva_mover_stats stats;

    kva_mover_get_stats(f->mover, &stats);
    return stats.packer;
}

/* List the members again: the packer looks for cold blobs then. */
static bool scanned(struct fixture *f)
{
    scan(f);
    return true;
}

static bool single(struct fixture *f, unsigned member, unsigned i)
{
    uint8_t key[KVA_KEY], state;

    key_of(i, key);
    assert_int_equal(kvs_look(f->volumes.stores[member], key, KVA_KEY, 1, &state), 0);
    return state == KVS_THERE;
}

static size_t singles(struct fixture *f, unsigned member)
{
    size_t n = 0;

    for (unsigned i = 0; i < N; i++)
        n += single(f, member, i);
    return n;
}

/* Every blob is in some member, by itself or in a pack, with its bytes. */
static void all_there(struct fixture *f)
{
    for (unsigned i = 0; i < N; i++) {
        uint8_t key[KVA_KEY], data[LEN];
        int rc = -ENOENT;

        key_of(i, key);
        make_blob(i, data);
        for (unsigned m = 0; m < 2 && rc != 0; m++) {
            void *got = NULL;
            size_t len = 0;

            rc = kvs_get_chunk(f->volumes.stores[m], key, KVA_KEY, &got, &len);
            if (rc == -ENOENT)
                rc = trd_catalog_get(&f->volumes.packs[m], f->volumes.stores[m], key, KVA_KEY, &got,
                                     &len);
            if (rc == 0) {
                assert_int_equal(len, LEN);
                assert_memory_equal(got, data, LEN);
            }
            free(got);
        }
        assert_int_equal(rc, 0);
    }
}

static bool is_packed(struct fixture *f, unsigned i)
{
    uint8_t key[KVA_KEY];
    const struct kva_block *b;
    bool ret;

    key_of(i, key);
    pthread_mutex_lock(&f->world.lock);
    b = kva_index_find(f->world.index, key);
    ret = b && b->flags & KVA_PACKED && b->have == 2;
    pthread_mutex_unlock(&f->world.lock);
    return ret;
}

static size_t packed(struct fixture *f)
{
    size_t n = 0;

    for (unsigned i = 0; i < N; i++)
        n += is_packed(f, i);
    return n;
}

static struct trd_weight weigh(struct fixture *f)
{
    struct trd_packs *packs;
    struct trd_weight ret;

    assert_int_equal(trd_catalog_read(&f->volumes.packs[1], f->volumes.stores[1], 0, NULL), 0);
    packs = trd_catalog_hold(&f->volumes.packs[1]);
    trd_weigh_packs(packs, &ret);
    trd_packs_release(packs);
    return ret;
}

/* Entries of all packs, those in two packs twice. */
static size_t entries(struct fixture *f)
{
    struct trd_packs *packs = trd_catalog_hold(&f->volumes.packs[1]);
    size_t n = packs ? packs->n_entries : 0;

    trd_packs_release(packs);
    return n;
}

/* Number of steps in the packs where the next entry is the blob's child. */
static unsigned children_next(struct fixture *f)
{
    struct trd_packs *packs = trd_catalog_hold(&f->volumes.packs[1]);
    unsigned n = 0;

    for (size_t p = 0; p < packs->n; p++)
        for (uint32_t i = 0; i + 1 < packs->of[p]->index.n; i++) {
            unsigned a, b;
            size_t len;

            memcpy(&a, trd_pack_entry_key(&packs->of[p]->index, i, &len), sizeof(a));
            memcpy(&b, trd_pack_entry_key(&packs->of[p]->index, i + 1, &len), sizeof(b));
            n += b == a + 2;
        }
    trd_packs_release(packs);
    return n;
}

static void pack_all(struct fixture *f)
{
    wait_until(scanned(f) && packed(f) >= 32 && entries(f) == packed(f));
    all_there(f);
}

static void test_packs(void **state)
{
    struct fixture f;
    size_t n;
    (void)state;

    begin(&f);
    start(&f, 0);
    pack_all(&f);
    stop(&f); /* perhaps between the steps of a further pack */
    n = packed(&f);
    assert_true(weigh(&f).blobs >= n && N - singles(&f, 1) >= n);
    /* a step is lost at each pack's end, and where branches end */
    assert_true(children_next(&f) + 3 * weigh(&f).packs >= entries(&f));
    scan(&f); /* the packs alone tell it */
    assert_true(packed(&f) >= n);
    all_there(&f);
    end(&f);
}

/* Blobs that are used come out of their packs; packs without blobs go. */
static void test_used_again(void **state)
{
    struct fixture f;
    (void)state;

    begin(&f);
    start(&f, 0);
    pack_all(&f);
    for (unsigned i = 0; i < N; i++) {
        uint8_t key[KVA_KEY];

        key_of(i, key);
        pthread_mutex_lock(&f.world.lock);
        assert_int_equal(kva_index_use(f.world.index, key, 1), 1);
        pthread_mutex_unlock(&f.world.lock);
    }
    wait_until(singles(&f, 0) == N && singles(&f, 1) == 0 && packed(&f) == 0);
    wait_until(scanned(&f) && weigh(&f).packs == 0);
    assert_int_equal(stats_of(&f).failed, 0);
    all_there(&f);
    end(&f);
}

static void write_pack(struct fixture *f, unsigned first, size_t n)
{
    uint8_t keys[N * KVA_KEY];
    struct trd_packing p;
    int each[N];

    for (unsigned i = 0; i < n; i++)
        key_of(first + i, keys + (size_t)i * KVA_KEY);
    assert_int_equal(trd_packing_init(&p, f->volumes.stores[1], f->volumes.stores[1]), 0);
    p.min_bytes = 1;
    assert_int_equal(trd_pack_write(&p, keys, KVA_KEY, n, each), (int)n);
    trd_packing_fini(&p);
}

/* A packer died before it removed the single blobs, too few for a pack of their own: the next one goes on. */
static void test_goes_on(void **state)
{
    struct fixture f;
    (void)state;

    begin(&f);
    write_pack(&f, 0, 3);
    scan(&f);
    assert_int_equal(packed(&f), 0);
    start(&f, 0);
    /* each in one pack: what was packed before isn't packed again */
    wait_until(scanned(&f) && packed(&f) >= 3 + 29 && entries(&f) == packed(&f));
    for (unsigned i = 0; i < 3; i++)
        assert_true(is_packed(&f, i));
    all_there(&f);
    end(&f);
}

/* A half-written pack goes when nobody has finished it for the grace time; a whole one stays. */
static void test_half_written(void **state)
{
    uint8_t id[TRD_PACK_ID] = {1, 2, 3}, key[TRD_PACK_KEY], there = KVS_THERE;
    struct fixture f;
    (void)state;

    begin(&f);
    write_pack(&f, 0, 3);
    trd_pack_key(id, key);
    assert_int_equal(kvs_put_chunk(f.volumes.stores[1], key, sizeof(key), "half", 4), 0);
    assert_int_equal(kvs_flush(f.volumes.stores[1]), 0);
    scan(&f);
    start(&f, 3600000);
    wait_until(scanned(&f) && stats_of(&f).dropped >= 32);
    stop(&f);
    assert_int_equal(kvs_look(f.volumes.stores[1], key, sizeof(key), 1, &there), 0);
    assert_int_equal(there, KVS_THERE);
    start(&f, 1);
    wait_until(scanned(&f) && stats_of(&f).strays == 1);
    assert_int_equal(kvs_look(f.volumes.stores[1], key, sizeof(key), 1, &there), 0);
    assert_int_equal(there, KVS_MISSING);
    all_there(&f);
    end(&f);
}

/* A sweep that died behind its new packs left all blobs in two: the older ones go, and nothing else. */
static void test_twins(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_filling filling = {.created_s = kv_wall_ns() / KV_NS_PER_S + 5};
    struct trd_packing p;
    struct fixture f;
    (void)state;

    begin(&f);
    write_pack(&f, 0, N);
    assert_int_equal(trd_packing_init(&p, f.volumes.stores[1], f.volumes.stores[1]), 0);
    assert_int_equal(trd_pack_begin(&filling.builder), 0);
    for (unsigned i = 0; i < N; i++) {
        uint8_t key[KVA_KEY], data[LEN];

        key_of(i, key);
        make_blob(i, data);
        trd_pack_add(&filling.builder, key, KVA_KEY, data, LEN);
    }
    assert_int_equal(trd_pack_publish(&p, &filling), 0);
    trd_pack_builder_fini(&filling.builder);
    assert_int_equal(weigh(&f).packs, 2);
    assert_int_equal(weigh(&f).blobs, N);
    assert_int_equal(trd_rewrite_packs(&p, 1000, &swept), 0);
    assert_int_equal(weigh(&f).packs, 1);
    assert_int_equal(weigh(&f).blobs, N);
    assert_int_equal(p.n_packs, 1); /* nothing was written again */
    trd_packing_fini(&p);
    end(&f);
}

/* Parents stand before their children, whatever the records' numbers, and a ring of links ends. */
static void test_order(void **state)
{
    const struct kva_cold cold[] = {
        {.at = 2, .parent = 9, .chain = 1},   {.at = 4, .parent = KVA_NONE, .chain = 2},
        {.at = 5, .parent = 4, .chain = 2},   {.at = 6, .parent = 5, .chain = 2},
        {.at = 7, .parent = 4, .chain = 2},   {.at = 9, .parent = 100, .chain = 1},
        {.at = 10, .parent = 11, .chain = 3}, {.at = 11, .parent = 10, .chain = 3}};
    const uint32_t wanted[] = {5, 0, 1, 2, 3, 4, 6, 7};
    uint32_t order[8];
    (void)state;

    assert_int_equal(kva_order_cold(cold, 8, order), 0);
    assert_memory_equal(order, wanted, sizeof(wanted));
    assert_int_equal(kva_order_cold(cold, 0, order), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packs),   cmocka_unit_test(test_used_again),
        cmocka_unit_test(test_goes_on), cmocka_unit_test(test_half_written),
        cmocka_unit_test(test_twins),   cmocka_unit_test(test_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
