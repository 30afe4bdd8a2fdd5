// SPDX-License-Identifier: Apache-2.0
/* Packs: written, read, resumed after a kill at each step, collected; and readers beside all of it. */
#include "tiered_unit.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "tiered/pack_sweep.h"

enum { BLOBS = 60, KILLED = 24, LINGER_MS = 50 };

static uint8_t *keys_of(uint64_t first, size_t n)
{
    uint8_t *keys = malloc(n * 16), data[LEN];

    for (size_t i = 0; i < n; i++)
        make_blob(first + i, keys + i * 16, data);
    return keys;
}

static void put_blobs(struct kvs_store *store, uint64_t first, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        assert_true(put_blob(store, first + i) >= 0);
    publish(store, name);
}

/* Pack blobs of one folder, with small packs. Returns what trd_pack_write did. */
static int pack_only(struct kvs_store *store, uint64_t first, size_t n, int *each)
{
    struct trd_packing p;
    uint8_t *keys = keys_of(first, n);
    int rc;

    assert_int_equal(trd_packing_init(&p, store, store), 0);
    p.min_bytes = 4 * LEN;
    p.max_bytes = 20 * LEN;
    rc = trd_pack_write(&p, keys, 16, n, each);
    trd_packing_fini(&p);
    free(keys);
    return rc;
}

static int drop_only(struct kvs_store *store, uint64_t first, size_t n, int *each)
{
    struct trd_packing p;
    uint8_t *keys = keys_of(first, n);
    int rc;

    assert_int_equal(trd_packing_init(&p, store, store), 0);
    rc = trd_pack_drop(&p, keys, 16, n, each);
    trd_packing_fini(&p);
    free(keys);
    return rc;
}

static void pack_all(struct kvs_store *store, uint64_t first, size_t n)
{
    int *each = calloc(n, sizeof(*each));

    assert_int_equal(pack_only(store, first, n, each), n);
    usleep(LINGER_MS * 1000);
    assert_true(drop_only(store, first, n, each) >= 0);
    free(each);
}

static void all_there(struct kvs_store *store, uint64_t first, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (get_blob(store, first + i) != 0)
            fail_msg("blob %zu: %s", i, strerror(-get_blob(store, first + i)));
}

static int count_chunk(void *arg, const kv_store_entry *entry)
{
    ((size_t *)arg)[trd_is_pack_key(entry->hash, entry->hash_len)]++;
    return 0;
}

/* Count a store's single blobs and its pack chunks, published or not. */
static void count(struct kvs_store *store, size_t *ret_singles, size_t *ret_packs)
{
    size_t n[2] = {0};

    assert_int_equal(kvs_list_chunks(store, count_chunk, n), 0);
    *ret_singles = n[0];
    *ret_packs = n[1];
}

static size_t n_published(struct kvs_store *store)
{
    struct trd_keys keys = {0};
    size_t n;

    assert_int_equal(trd_published_packs(store, &keys), 0);
    n = keys.n;
    trd_keys_fini(&keys);
    return n;
}

static void open_world(struct world *w)
{
    world_open(w, "puts = cold\nlinger = 50ms\n", "");
}

/* -- the calls --------------------------------------------------------------------------------- */

static void test_calls(void **state)
{
    uint8_t *keys = keys_of(0, BLOBS + 1), present[BLOBS + 1], data[LEN], key[16];
    void *many[BLOBS + 1];
    size_t lens[BLOBS + 1], singles, packs;
    struct kvs_store *other;
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, BLOBS, "m");
    all_there(w.store, 0, BLOBS); /* this handle knows single blobs */
    pack_all(w.cold, 0, BLOBS);
    count(w.cold, &singles, &packs);
    assert_int_equal(singles, 0);
    assert_int_equal(packs, 3);
    all_there(w.store, 0, BLOBS);
    other = open_store(w.uri);
    all_there(other, 0, BLOBS);
    assert_int_equal(get_blob(other, BLOBS), -ENOENT);
    assert_int_equal(kvs_exists(other, keys, 16, BLOBS + 1, present), 0);
    for (size_t i = 0; i <= BLOBS; i++)
        assert_int_equal(present[i], i < BLOBS);
    assert_int_equal(kvs_get_chunks(other, keys, 16, BLOBS + 1, many, lens), BLOBS);
    for (size_t i = 0; i < BLOBS; i++) {
        make_blob(i, key, data);
        assert_int_equal(lens[i], LEN);
        assert_memory_equal(many[i], data, LEN);
        free(many[i]);
    }
    assert_null(many[BLOBS]);
    assert_int_equal(kvs_touch(other, keys, 16, BLOBS + 1), BLOBS);
    count(other, &singles, &packs);
    assert_int_equal(singles, BLOBS); /* as blobs, each once */
    assert_int_equal(packs, 0);
    assert_int_equal(put_blob(other, 3), 0); /* a put makes a single one */
    publish(other, "m2");
    count(other, &singles, &packs);
    assert_int_equal(singles, BLOBS);
    kvs_close(other);
    free(keys);
    world_close(&w);
}

/* Objects that begin alike name the same chunks: each is packed once, and counted once. */
static void test_named_twice(void **state)
{
    kv_store_pack_opts opts = {
        .size = sizeof(opts), .to = "cold", .min_bytes = LEN, .max_bytes = 20 * LEN};
    kv_store_packed packed = {.size = sizeof(packed)};
    uint8_t keys[18 * 16], data[LEN];
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.cold, 0, 8, "m");
    for (size_t i = 0; i < 16; i++)
        make_blob(i % 8, keys + i * 16, data);
    for (size_t i = 16; i < 18; i++)
        make_blob(99, keys + i * 16, data);
    assert_int_equal(kvs_pack_chunks(w.store, &opts, keys, 16, 18, &packed), 0);
    assert_int_equal(packed.packed_bytes, 8 * LEN);
    assert_int_equal(packed.packed, 8);
    assert_int_equal(packed.removed, 8);
    assert_int_equal(packed.missing, 1);
    assert_int_equal(packed.errors, 0);
    all_there(w.store, 0, 8);
    world_close(&w);
}

/* Small blobs fill the index first: a pack whose index is too long would be read by nobody. */
static void test_small_blobs(void **state)
{
    struct trd_pack_builder b;
    struct trd_pack_name name;
    char text[TRD_PACK_NAME];
    uint64_t key[2] = {0};
    (void)state;

    assert_int_equal(trd_pack_begin(&b), 0);
    for (; key[0] < 1000000 && !trd_pack_is_full(&b, sizeof(key)); key[0]++)
        trd_pack_add(&b, key, sizeof(key), "", 0);
    assert_in_range(key[0], 700000, 999999);
    assert_int_equal(trd_pack_end(&b, 1), 0);
    trd_pack_write_name(&b.name, text);
    assert_true(trd_pack_read_name(text, &name));
    assert_int_equal(name.tail_len, b.name.tail_len);
    trd_pack_builder_fini(&b);
}

/* More blobs than readers take would make all of them unreadable. */
static void test_too_many_blobs(void **state)
{
    uint8_t *keys = keys_of(20, 20);
    struct trd_packing p;
    struct world w;
    int each[20];
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 40, "m");
    pack_all(w.cold, 0, 20);
    assert_int_equal(trd_packing_init(&p, w.cold, w.cold), 0);
    p.min_bytes = 1;
    p.max_blobs = 30;
    assert_int_equal(trd_pack_write(&p, keys, 16, 20, each), -EFBIG);
    assert_int_equal(each[0], -EIO);
    assert_int_equal(n_published(w.cold), 1);
    assert_int_equal(trd_pack_write(&p, keys, 16, 10, each), 10);
    all_there(w.store, 0, 40);
    trd_packing_fini(&p);
    free(keys);
    world_close(&w);
}

static void test_deletion(void **state)
{
    uint8_t key[16], data[LEN];
    struct kvs_store *other;
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 20, "m");
    pack_all(w.cold, 0, 20);
    other = open_store(w.uri);
    all_there(other, 0, 20);
    make_blob(5, key, data);
    assert_int_equal(kvs_delete_chunk_if(w.store, key, 16, "other", 5), 0);
    assert_int_equal(kvs_delete_chunk_if(w.store, key, 16, data, LEN), 1);
    assert_int_equal(get_blob(w.store, 5), -ENOENT);
    make_blob(6, key, data);
    assert_int_equal(kvs_delete_chunk(w.store, key, 16), 0);
    assert_int_equal(get_blob(w.store, 6), -ENOENT);
    usleep(2 * LINGER_MS * 1000);
    assert_int_equal(get_blob(other, 7), 0);
    assert_int_equal(get_blob(other, 99), -ENOENT); /* a miss reads what has changed */
    assert_int_equal(get_blob(other, 5), -ENOENT);
    assert_int_equal(get_blob(other, 6), -ENOENT);
    kvs_close(other);
    other = open_store(w.uri);
    assert_int_equal(get_blob(other, 5), -ENOENT);
    assert_int_equal(put_blob(other, 5), 0);
    publish(other, "again");
    all_there(w.store, 7, 13);
    assert_int_equal(get_blob(w.store, 5), 0);
    kvs_close(other);
    world_close(&w);
}

static void test_reserved_keys(void **state)
{
    uint8_t id[TRD_PACK_ID] = {1}, key[TRD_PACK_KEY];
    struct world w;
    (void)state;

    open_world(&w);
    trd_pack_key(id, key);
    assert_int_equal(kvs_put_chunk(w.store, key, sizeof(key), "x", 1), -EINVAL);
    world_close(&w);
}

/* Blobs that can't be packed are left, and told. */
static void test_left(void **state)
{
    int each[8];
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 3, "m");
    assert_int_equal(pack_only(w.cold, 0, 3, each), 0);
    assert_int_equal(each[0], -EAGAIN); /* three are too few for a pack */
    put_blobs(w.store, 3, 4, "m");
    assert_int_equal(pack_only(w.cold, 0, 8, each), 7);
    assert_int_equal(each[0], 0);
    assert_int_equal(each[7], -ENOENT);
    assert_int_equal(drop_only(w.cold, 0, 8, each), 7);
    assert_int_equal(drop_only(w.cold, 0, 8, each), 0); /* again */
    assert_int_equal(pack_only(w.cold, 0, 7, each), 7); /* they are in packs of this hour */
    assert_int_equal(n_published(w.cold), 1);
    world_close(&w);
}

/* A writer's put met the single blob; it is dropped in favour of the pack before the writer publishes. */
static void test_hit_that_is_dropped(void **state)
{
    struct kvs_store *writer, *late;
    int each[20];
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 20, "m");
    writer = open_store(w.uri);
    assert_int_equal(pack_only(w.cold, 0, 20, each), 20);
    for (uint64_t n = 0; n < 20; n++)
        assert_int_equal(put_blob(writer, n), 1);
    assert_int_equal(drop_only(w.cold, 0, 20, each), 20);
    assert_int_equal(kvs_put_manifest(writer, "n", "of unknown format", 17), 0);
    all_there(writer, 0, 20);
    late = open_store(w.uri);
    all_there(late, 0, 20);
    all_there(w.cold, 0, 20); /* put again, as the publication promised */
    kvs_close(late);
    kvs_close(writer);
    world_close(&w);
}

/* -- killed at each step ----------------------------------------------------------------------- */

struct killer {
    unsigned at, n; /* killed at the step of this number */
};

static void maybe_die(void *arg, enum trd_pack_step step)
{
    struct killer *killer = arg;

    (void)step;
    if (killer->n++ == killer->at)
        raise(SIGKILL);
}

/* Pack in a process of its own, which is killed at its step @at. Returns false when it had fewer. */
static bool pack_killed(const struct world *w, unsigned at)
{
    pid_t child = fork();
    int status;

    assert_true(child >= 0);
    if (child == 0) {
        struct kvs_store *store = open_member(w, "cold");
        struct killer killer = {.at = at};
        uint8_t *keys = keys_of(0, KILLED);
        int each[KILLED];
        struct trd_packing p;

        if (trd_packing_init(&p, store, store) < 0)
            _exit(1);
        p.min_bytes = 4 * LEN;
        p.max_bytes = 12 * LEN;
        p.step = maybe_die;
        p.arg = &killer;
        if (trd_pack_write(&p, keys, 16, KILLED, each) != KILLED)
            _exit(2);
        usleep(LINGER_MS * 1000);
        _exit(trd_pack_drop(&p, keys, 16, KILLED, each) >= 0 ? 0 : 3);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
        fail_msg("the packer ended with %d", WEXITSTATUS(status));
    return WIFSIGNALED(status);
}

static int nothing_is_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    (void)arg, (void)hash, (void)hash_len;
    return 0;
}

static int all_is_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    (void)arg, (void)hash, (void)hash_len;
    return 1;
}

static kv_store_swept sweep(struct kvs_store *store, kv_store_live_fn live, void *arg)
{
    kv_store_swept swept = {.size = sizeof(swept)};

    assert_int_equal(store->ext.sweep_chunks(store->backend, 0, live, arg, &swept), 0);
    return swept;
}

static void test_killed(void **state)
{
    unsigned at = 0;
    bool killed = true;
    (void)state;

    for (; killed; at++) {
        struct kvs_store *fresh;
        size_t singles, packs;
        struct world w;

        open_world(&w);
        put_blobs(w.store, 0, KILLED, "m");
        all_there(w.store, 0, 1);
        killed = pack_killed(&w, at);
        all_there(w.store, 0, KILLED);
        fresh = open_store(w.uri);
        all_there(fresh, 0, KILLED);
        kvs_close(fresh);
        sweep(w.store, all_is_live, NULL); /* half-written packs go */
        count(w.cold, &singles, &packs);
        assert_int_equal(packs, n_published(w.cold));
        all_there(w.store, 0, KILLED);
        pack_all(w.cold, 0, KILLED); /* goes on */
        count(w.cold, &singles, &packs);
        assert_int_equal(singles, 0);
        all_there(w.store, 0, KILLED);
        world_close(&w);
        at += at > 9 ? 7 : 0; /* of the blobs that are dropped one by one, some */
    }
    print_message("killed at %u steps\n", at - 1);
    assert_true(at > 10);
}

/* -- collection -------------------------------------------------------------------------------- */

static int is_below(void *arg, const uint8_t *hash, size_t hash_len)
{
    uint64_t n;

    (void)hash_len;
    memcpy(&n, hash, sizeof(n));
    return n < *(uint64_t *)arg;
}

static void test_collection(void **state)
{
    uint64_t below = 45;
    kv_store_swept swept;
    struct kvs_store *reader;
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, BLOBS, "m");
    pack_all(w.cold, 0, BLOBS); /* 0-19, 20-39, 40-59 */
    reader = open_store(w.uri);
    all_there(reader, 0, BLOBS);
    swept = sweep(w.store, is_below, &below);
    assert_int_equal(swept.deleted, 15); /* of the last pack, which has 5 live ones */
    assert_int_equal(swept.kept, 45);
    assert_int_equal(swept.errors, 0);
    assert_int_equal(n_published(w.cold), 3);
    all_there(reader, 0, 45); /* knows the old pack */
    assert_int_equal(get_blob(reader, 50), -ENOENT);
    all_there(w.store, 0, 45);
    below = 15;
    swept = sweep(w.store, is_below, &below); /* 15 of 20 live in the first: it stays as it is */
    assert_int_equal(swept.deleted, 25);
    assert_int_equal(swept.kept, 20);
    assert_int_equal(n_published(w.cold), 1);
    all_there(reader, 0, 15);
    swept = sweep(w.store, nothing_is_live, NULL);
    assert_int_equal(swept.deleted, 20);
    assert_int_equal(n_published(w.cold), 0);
    assert_int_equal(get_blob(reader, 1), -ENOENT);
    kvs_close(reader);
    world_close(&w);
}

/* The member is full for the first pack that is written. */
static int (*flush_of)(kv_store_v1 *self);
static unsigned n_flushes;

static int full_once(kv_store_v1 *self)
{
    return n_flushes++ ? flush_of(self) : -ENOSPC;
}

static int is_sixth(void *arg, const uint8_t *hash, size_t hash_len)
{
    uint64_t n;

    (void)arg, (void)hash_len;
    memcpy(&n, hash, sizeof(n));
    return n % 20 < 6;
}

/* Live blobs of several packs were to go into one that couldn't be written: none of those packs may go. */
static void test_full_while_rewriting(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_packing p;
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, BLOBS, "m");
    pack_all(w.cold, 0, BLOBS);
    assert_int_equal(trd_packing_init(&p, w.cold, w.cold), 0);
    p.max_bytes = 8 * LEN; /* full in the middle of the second pack, and of the third */
    flush_of = w.cold->ext.flush;
    w.cold->ext.flush = full_once;
    n_flushes = 0;
    assert_int_equal(trd_sweep_packs_of(&p, 0, 0, is_sixth, NULL, &swept), -ENOSPC);
    w.cold->ext.flush = flush_of;
    trd_packing_fini(&p);
    for (uint64_t i = 0; i < BLOBS; i += 20)
        all_there(w.store, i, 6);
    assert_int_equal(n_published(w.cold), 3);
    swept = sweep(w.store, is_sixth, NULL);
    assert_int_equal(swept.deleted, 42);
    assert_int_equal(n_published(w.cold), 1);
    for (uint64_t i = 0; i < BLOBS; i += 20)
        all_there(w.store, i, 6);
    world_close(&w);
}

struct repacking {
    struct world *w;
    bool done;
};

/* While live blobs of the last pack are copied: delete them, put them anew, and pack them. */
static void repack(void *arg, enum trd_pack_step step)
{
    struct repacking *r = arg;
    struct trd_catalog catalog;
    uint8_t *keys = keys_of(40, 5);

    if (!r->done && step == TRD_PACK_VERIFIED) {
        r->done = true;
        trd_catalog_init(&catalog);
        for (size_t i = 0; i < 5; i++)
            assert_int_equal(trd_catalog_delete(&catalog, r->w->cold, keys + i * 16, 16, NULL, 0),
                             1);
        trd_catalog_fini(&catalog);
        put_blobs(r->w->store, 40, 4, "anew"); /* not the fifth */
        pack_all(r->w->cold, 40, 4);
    }
    free(keys);
}

/* A blob that was deleted while it was copied goes from the copy, and stays in a pack that has it since. */
static void test_repacked_while_rewriting(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    uint64_t below = 45;
    struct trd_packing p;
    size_t singles, packs;
    struct world w;
    struct repacking r = {.w = &w};
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, BLOBS, "m");
    pack_all(w.cold, 0, BLOBS);
    assert_int_equal(trd_packing_init(&p, w.cold, w.cold), 0);
    p.step = repack;
    p.arg = &r;
    assert_int_equal(trd_sweep_packs_of(&p, 0, 0, is_below, &below, &swept), 0);
    trd_packing_fini(&p);
    assert_true(r.done);
    count(w.cold, &singles, &packs);
    assert_int_equal(singles, 0);
    assert_int_equal(packs, 4);
    all_there(w.store, 0, 44);
    assert_int_equal(get_blob(w.store, 44), -ENOENT);
    world_close(&w);
}

/* By a clock that runs ahead the old pack is younger than now: all new ones must be younger still. */
static void test_rewritten_is_younger(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_filling filling = {.created_s = kv_wall_ns() / KV_NS_PER_S + 3600};
    uint64_t ahead = filling.created_s, below = 9;
    struct trd_catalog catalog;
    struct trd_packs *packs;
    struct trd_packing p;
    struct world w;
    (void)state;

    open_world(&w);
    assert_int_equal(trd_packing_init(&p, w.cold, w.cold), 0);
    assert_int_equal(trd_pack_begin(&filling.builder), 0);
    for (uint64_t i = 0; i < 20; i++) {
        uint8_t key[16], data[LEN];

        make_blob(i, key, data);
        trd_pack_add(&filling.builder, key, sizeof(key), data, LEN);
    }
    assert_int_equal(trd_pack_publish(&p, &filling), 0);
    trd_pack_builder_fini(&filling.builder);
    p.max_bytes = 4 * LEN; /* three new packs */
    assert_int_equal(trd_sweep_packs_of(&p, 0, 0, is_below, &below, &swept), 0);
    trd_packing_fini(&p);
    trd_catalog_init(&catalog);
    assert_int_equal(trd_catalog_read(&catalog, w.cold, 0, NULL), 0);
    packs = trd_catalog_hold(&catalog);
    assert_int_equal(packs->n, 3);
    for (size_t i = 0; i < packs->n; i++)
        assert_true(packs->of[i]->index.created_s > ahead);
    trd_packs_release(packs);
    trd_catalog_fini(&catalog);
    all_there(w.store, 0, 9);
    world_close(&w);
}

/* Age protects the blobs of a pack, dead ones too. */
static void test_young_packs_stay(void **state)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 20, "m");
    pack_all(w.cold, 0, 20);
    assert_int_equal(
        w.store->ext.sweep_chunks(w.store->backend, 3600, nothing_is_live, NULL, &swept), 0);
    assert_int_equal(swept.deleted, 0);
    assert_int_equal(swept.kept, 20);
    all_there(w.store, 0, 20);
    world_close(&w);
}

/* The collection of the member alone spares its packs, whatever it thinks of single blobs. */
static void test_collection_of_the_member(void **state)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = KVS_GC_NO_GRACE};
    struct kvs_gc_result result = {.size = sizeof(result)};
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 20, "m");
    pack_all(w.cold, 0, 20);
    assert_int_equal(kvs_gc(w.cold, &opts, &result), 0);
    all_there(w.store, 0, 20);
    world_close(&w);
}

/* -- damage ------------------------------------------------------------------------------------ */

struct file {
    char path[PATH_MAX + 128];
};

static int note_path(void *arg, const kv_store_entry *entry)
{
    struct file *file = arg;
    char *at = file->path + strlen(file->path);

    if (!trd_is_pack_key(entry->hash, entry->hash_len))
        return 0;
    at += sprintf(at, "/%x/", entry->hash[0] >> 4);
    for (size_t i = 0; i < entry->hash_len; i++)
        at += sprintf(at, "%02x", entry->hash[i]);
    return 1;
}

static void flip(const struct world *w, long offset, int whence)
{
    struct file file;
    int fd;
    char c;

    snprintf(file.path, sizeof(file.path), "%s/cold/chunks", w->dir);
    assert_int_equal(kvs_list_chunks(w->cold, note_path, &file), 1);
    fd = open(file.path, O_RDWR);
    assert_true(fd >= 0);
    offset = lseek(fd, offset, whence);
    assert_int_equal(pread(fd, &c, 1, offset), 1);
    c ^= 4;
    assert_int_equal(pwrite(fd, &c, 1, offset), 1);
    close(fd);
}

static void test_damage(void **state)
{
    struct kvs_store *fresh;
    struct world w;
    (void)state;

    open_world(&w);
    put_blobs(w.store, 0, 20, "m");
    pack_all(w.cold, 0, 20);
    all_there(w.store, 0, 20);
    flip(&w, TRD_PACK_HEAD + 100, SEEK_SET); /* a byte of the first blob */
    assert_int_equal(get_blob(w.store, 0), -EBADMSG);
    all_there(w.store, 1, 19);
    flip(&w, TRD_PACK_HEAD + 100, SEEK_SET);
    all_there(w.store, 0, 20);
    flip(&w, -100, SEEK_END);  /* of the index */
    all_there(w.store, 0, 20); /* it has been read */
    fresh = open_store(w.uri);
    assert_int_equal(get_blob(fresh, 0), -ENOENT);
    sweep(w.store, nothing_is_live, NULL); /* no proof that nothing in it is needed */
    assert_int_equal(n_published(w.cold), 1);
    flip(&w, -100, SEEK_END);
    usleep(2 * LINGER_MS * 1000);
    all_there(fresh, 0, 20); /* read again */
    kvs_close(fresh);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_named_twice),
        cmocka_unit_test(test_small_blobs),
        cmocka_unit_test(test_too_many_blobs),
        cmocka_unit_test(test_deletion),
        cmocka_unit_test(test_reserved_keys),
        cmocka_unit_test(test_left),
        cmocka_unit_test(test_hit_that_is_dropped),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_collection),
        cmocka_unit_test(test_full_while_rewriting),
        cmocka_unit_test(test_repacked_while_rewriting),
        cmocka_unit_test(test_rewritten_is_younger),
        cmocka_unit_test(test_young_packs_stay),
        cmocka_unit_test(test_collection_of_the_member),
        cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
