// SPDX-License-Identifier: Apache-2.0
/* Collection: the chunks that it deletes, those that it must keep, and concurrent saves that lose
 * nothing. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/error.h"
#include "store/memory_backend.h"
#include "support.h"

#define URI "memory://gc"
#define OBJECT 60000
#define DAY_S 86400

/* -- Objects of noise that only their number decides ---------------------------------------------- */

struct object {
    uint8_t data[OBJECT];
    size_t at;
};

static void make(struct object *o, uint64_t number)
{
    uint64_t state = number * 2 + 1;

    for (size_t i = 0; i < OBJECT; i += 8) {
        uint64_t part = unit_random(&state);

        memcpy(o->data + i, &part, 8);
    }
    o->at = 0;
}

static int64_t take(void *arg, void *buf, size_t cap)
{
    struct object *o = arg;
    size_t n = KV_MIN(cap, OBJECT - o->at);

    memcpy(buf, o->data + o->at, n);
    o->at += n;
    return (int64_t)n;
}

static int match(void *arg, const void *data, size_t len)
{
    struct object *o = arg;

    if (len > OBJECT - o->at || memcmp(o->data + o->at, data, len) != 0)
        return -EILSEQ;
    o->at += len;
    return 0;
}

static int save(struct kvs_store *store, const char *name, uint64_t number)
{
    const struct kvs_save_opts opts = {.size = sizeof(opts), .chunk_bytes = 8192};
    struct object *o = malloc(sizeof(*o));
    int rc;

    make(o, number);
    rc = kvs_save(store, name, take, o, &opts, NULL);
    free(o);
    return rc;
}

/* 0 when what is under @name is object @number, all of it. */
static int check(struct kvs_store *store, const char *name, uint64_t number)
{
    struct object *o = malloc(sizeof(*o));
    int rc;

    make(o, number);
    rc = kvs_restore(store, name, match, o, NULL, NULL);
    if (rc == 0 && o->at != OBJECT)
        rc = -EILSEQ;
    free(o);
    return rc;
}

static int count(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(size_t *)arg;
    return 0;
}

static size_t n_chunks(struct kvs_store *store)
{
    size_t n = 0;

    assert_int_equal(kvs_list_chunks(store, count, &n), 0);
    return n;
}

/* -- One caller ------------------------------------------------------------------------------------ */

static struct kvs_store *fresh(void)
{
    struct kvs_store *store;

    memory_forget_all();
    assert_int_equal(memory_store(URI, &store), 0);
    return store;
}

static struct kvs_gc_result collect(struct kvs_store *store, const struct kvs_gc_opts *opts)
{
    struct kvs_gc_result result = {.size = sizeof(result)};

    assert_int_equal(kvs_gc(store, opts, &result), 0);
    assert_int_equal(result.errors, 0);
    return result;
}

/* One object whose chunks nobody needs, one that stays, both two days old. */
static struct kvs_store *with_garbage(size_t *dead)
{
    struct kvs_store *store = fresh();
    size_t all;

    assert_int_equal(save(store, "stays", 1), 0);
    *dead = n_chunks(store);
    assert_int_equal(save(store, "goes", 2), 0);
    all = n_chunks(store);
    *dead = all - *dead;
    assert_in_range(*dead, 2, all - 2);
    assert_int_equal(kvs_delete_manifest(store, "goes"), 0);
    memory_space(URI)->now_s += 2 * DAY_S;
    return store;
}

struct watched {
    enum kvs_gc_phase phase;
    uint64_t done, total;
    unsigned calls, stop_in_mark, stop_in_sweep; /* at this call of the phase; 0: never */
};

static int watch(void *arg, enum kvs_gc_phase phase, uint64_t done, uint64_t total)
{
    struct watched *w = arg;
    bool next = phase != w->phase;

    assert_true(phase >= w->phase && (next || done >= w->done));
    assert_true(total == 0 || done <= total);
    w->phase = phase;
    w->done = done;
    w->total = total;
    w->calls = next ? 1 : w->calls + 1;
    return phase == KVS_GC_MARK ? w->calls == w->stop_in_mark : w->calls == w->stop_in_sweep;
}

/* Stopped in the middle, a collection has deleted some of what nobody needs, has said how much, and
 * the next one does the rest; by the backend's own sweep and by listing. */
static void test_gives_up(void **state)
{
    kv_store_ext by_list = *memory_ext();
    (void)state;

    by_list.sweep_chunks = NULL;
    for (int own = 0; own < 2; own++) {
        struct kvs_gc_result r = {.size = sizeof(r)};
        struct watched w = {.stop_in_mark = 1};
        struct kvs_gc_opts opts = {.size = sizeof(opts), .progress = watch, .progress_arg = &w};
        size_t dead, all;
        struct kvs_store *store = with_garbage(&dead);

        if (!own) {
            kvs_close(store);
            assert_int_equal(kvs_open_with(memory_vtable(), &by_list, URI, false, &store), 0);
        }
        all = n_chunks(store);
        assert_int_equal(kvs_gc(store, &opts, &r), -ECANCELED);
        assert_int_equal(r.deleted_chunks, 0);
        assert_int_equal(n_chunks(store), all);
        w = (struct watched){.stop_in_sweep = (unsigned)all - (own ? 1 : 0)};
        if (!own) /* the listing is done by then: it deletes */
            w.stop_in_sweep += 2;
        assert_int_equal(kvs_gc(store, &opts, &r), -ECANCELED);
        assert_int_equal(n_chunks(store), all - r.deleted_chunks);
        assert_true(r.deleted_chunks < dead);
        if (!own)
            assert_int_equal(r.deleted_chunks, 1);
        assert_int_equal(check(store, "stays", 1), 0);
        w = (struct watched){0};
        assert_int_equal(kvs_gc(store, &opts, &r), 0);
        assert_int_equal(w.phase, KVS_GC_SWEEP);
        assert_true(w.done > 0 && w.total > 0);
        assert_int_equal(n_chunks(store), all - dead);
        assert_int_equal(check(store, "stays", 1), 0);
        kvs_close(store);
    }
    memory_forget_all();
}

/* A backend that can't delete says so, rather than that each chunk failed. */
static void test_nothing_to_delete_with(void **state)
{
    kv_store_ext ext = *memory_ext();
    struct kvs_gc_opts dry = {.size = sizeof(dry), .dry_run = true};
    struct kvs_gc_result r = {.size = sizeof(r)};
    struct kvs_store *store;
    size_t dead;
    (void)state;

    kvs_close(with_garbage(&dead));
    ext.sweep_chunks = NULL;
    ext.delete_chunk = NULL;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, URI, false, &store), 0);
    assert_int_equal(kvs_gc(store, NULL, NULL), -ENOTSUP);
    assert_int_equal(kvs_gc(store, &dry, &r), 0);
    assert_int_equal(r.deleted_chunks, dead);
    kvs_close(store);
    memory_forget_all();
}

static void test_dead_go_live_stay(void **state)
{
    size_t dead, before;
    struct kvs_store *store = with_garbage(&dead);
    struct kvs_gc_opts dry = {.size = sizeof(dry), .dry_run = true};
    struct kvs_gc_result would, did;

    (void)state;
    before = n_chunks(store);
    would = collect(store, &dry);
    assert_int_equal(n_chunks(store), before);
    did = collect(store, NULL);
    assert_int_equal(did.deleted_chunks, dead);
    assert_int_equal(did.live_chunks, before - dead);
    assert_int_equal(did.deleted_bytes, OBJECT);
    assert_int_equal(would.deleted_chunks, did.deleted_chunks);
    assert_int_equal(would.deleted_bytes, did.deleted_bytes);
    assert_int_equal(n_chunks(store), before - dead);
    assert_int_equal(check(store, "stays", 1), 0);
    assert_int_equal(collect(store, NULL).deleted_chunks, 0);
    kvs_close(store);
}

static void test_young_ones_stay(void **state)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = 3 * DAY_S};
    size_t dead, before;
    struct kvs_store *store = with_garbage(&dead);

    (void)state;
    before = n_chunks(store);
    assert_int_equal(collect(store, &opts).deleted_chunks, 0);
    assert_int_equal(n_chunks(store), before);
    memory_space(URI)->now_s -= 2 * DAY_S; /* used this very second */
    opts.grace_s = KVS_GC_NO_GRACE;
    assert_int_equal(collect(store, &opts).deleted_chunks, dead);
    assert_int_equal(check(store, "stays", 1), 0);
    kvs_close(store);
}

/* A saver found a dead chunk there and counts on it, but has not published yet. */
static void test_a_hit_refreshes(void **state)
{
    size_t dead;
    struct kvs_store *store = with_garbage(&dead);

    (void)state;
    assert_int_equal(save(store, "again", 2), 0);
    assert_int_equal(kvs_delete_manifest(store, "again"), 0); /* as before put_manifest */
    assert_int_equal(collect(store, NULL).deleted_chunks, 0);
    kvs_close(store);
}

static void test_a_damaged_manifest_stops_it(void **state)
{
    size_t dead, before, len;
    struct kvs_store *store = with_garbage(&dead);
    struct kvs_gc_result result = {.size = sizeof(result), .deleted_chunks = 77};
    void *manifest;

    (void)state;
    before = n_chunks(store);
    assert_int_equal(kvs_get_manifest(store, "stays", &manifest, &len), 0);
    ((uint8_t *)manifest)[len - 1] ^= 1;
    assert_int_equal(kvs_put_manifest(store, "stays", manifest, len), 0);
    free(manifest);
    assert_int_equal(kvs_gc(store, NULL, &result), -EBADMSG);
    assert_int_equal(result.deleted_chunks, 77); /* outputs on success only */
    assert_int_equal(n_chunks(store), before);
    kvs_close(store);
}

static void test_an_unreadable_store_stops_it(void **state)
{
    size_t dead, before;
    struct kvs_store *store = with_garbage(&dead);

    (void)state;
    before = n_chunks(store);
    memory_space(URI)->fail_gets = -EIO;
    assert_int_equal(kvs_gc(store, NULL, NULL), -EIO);
    memory_space(URI)->fail_gets = 0;
    assert_int_equal(n_chunks(store), before);
    kvs_close(store);
}

/* Another program's object: chunks under its own keys, a manifest that means nothing to us. */
static void save_opaque(struct kvs_store *store)
{
    struct kvs_store *other;

    assert_int_equal(memory_store(URI, &other), 0);
    assert_int_equal(kvs_put_chunk(other, "8 bytes!", 8, "theirs", 6), 0);
    assert_int_equal(kvs_put_chunk(other, "more of!", 8, "theirs, too", 11), 0);
    assert_int_equal(kvs_put_manifest(other, "opaque", "\0\1\2", 3), 0);
    kvs_close(other);
    (void)store;
    memory_space(URI)->now_s += 2 * DAY_S;
}

static void test_opaque_manifests_protect(void **state)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .opaque_too = true};
    size_t dead;
    struct kvs_store *store = with_garbage(&dead);
    struct kvs_gc_result result;

    (void)state;
    save_opaque(store);
    result = collect(store, NULL);
    assert_int_equal(result.opaque_manifests, 1);
    assert_int_equal(result.deleted_chunks, dead);
    result = collect(store, &opts);
    assert_int_equal(result.deleted_chunks, 2);
    assert_int_equal(result.deleted_bytes, 17);
    assert_int_equal(check(store, "stays", 1), 0);
    kvs_close(store);
}

/* The backend can't say what an opaque manifest needs: it may be anything. */
static void test_unknown_needs_stop_deletion(void **state)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .opaque_too = true};
    size_t dead, before;
    struct kvs_store *store = with_garbage(&dead), *limited;
    kv_store_ext ext = *memory_ext();

    (void)state;
    save_opaque(store);
    ext.list_refs = NULL;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, URI, false, &limited), 0);
    before = n_chunks(store);
    assert_int_equal(collect(limited, NULL).deleted_chunks, 0);
    assert_int_equal(n_chunks(store), before);
    assert_int_equal(collect(limited, &opts).deleted_chunks, dead + 2);
    kvs_close(limited);
    kvs_close(store);
}

static void test_without_sweep(void **state)
{
    size_t dead, before;
    struct kvs_store *store = with_garbage(&dead), *limited;
    kv_store_ext ext = *memory_ext();
    struct kvs_gc_result result;

    (void)state;
    before = n_chunks(store);
    ext.sweep_chunks = NULL;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, URI, false, &limited), 0);
    result = collect(limited, NULL); /* by this machine's clock, where 1970 is long ago */
    assert_int_equal(result.deleted_chunks, dead);
    assert_int_equal(result.deleted_bytes, OBJECT);
    assert_int_equal(result.live_chunks, before - dead);
    assert_int_equal(n_chunks(store), before - dead);
    memory_space(URI)->now_s = (uint64_t)time(NULL);
    assert_int_equal(save(store, "goes", 2), 0);
    assert_int_equal(kvs_delete_manifest(store, "goes"), 0);
    assert_int_equal(collect(limited, NULL).deleted_chunks, 0); /* used just now */
    memory_space(URI)->now_s = 0;                               /* age unknown: young */
    assert_int_equal(save(store, "goes", 2), 0);
    assert_int_equal(kvs_delete_manifest(store, "goes"), 0);
    assert_int_equal(collect(limited, NULL).deleted_chunks, 0);
    assert_int_equal(check(store, "stays", 1), 0);
    kvs_close(limited);
    kvs_close(store);
}

static void test_without_lists(void **state)
{
    struct kvs_store *limited;

    (void)state;
    memory_forget_all();
    assert_int_equal(kvs_open_with(memory_vtable(), NULL, URI, false, &limited), 0);
    assert_int_equal(kvs_gc(limited, NULL, NULL), -ENOTSUP);
    kvs_close(limited);
}

/* -- Savers beside it ------------------------------------------------------------------------------ */

#define N_OBJECTS 12
#define N_SAVERS 3

/* A store that several use at once; its chunks can be made old. */
struct world {
    int (*open)(struct world *w, struct kvs_store **ret);
    void (*make_old)(struct world *w); /* while nobody saves */
    char uri[200];
    unsigned round;
    _Atomic unsigned running;
};

/* Each round starts from chunks that are all there, all dead and all old: every save is hits. */
static void start_round(struct world *w, unsigned round)
{
    struct kvs_store *store;
    char name[32];

    w->round = round;
    assert_int_equal(w->open(w, &store), 0);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        for (unsigned s = 0; s < N_SAVERS; s++) {
            snprintf(name, sizeof(name), "object-%u-%u", s, i);
            kvs_delete_manifest(store, name);
        }
        assert_int_equal(save(store, "all", i), 0);
    }
    assert_int_equal(kvs_delete_manifest(store, "all"), 0);
    kvs_close(store);
    w->make_old(w);
}

/* Saver @s publishes its objects in an order of its own. Returns how many saves failed. */
static unsigned save_all(struct world *w, unsigned s)
{
    struct kvs_store *store;
    unsigned failed = 0;
    char name[32];

    if (w->open(w, &store) < 0)
        return N_OBJECTS;
    usleep(w->round % 4 * 2000); /* the collection is ahead, or they are */
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        unsigned number = (i * 5 + s * 3 + w->round) % N_OBJECTS;

        snprintf(name, sizeof(name), "object-%u-%u", s, number);
        if (save(store, name, number) < 0 && save(store, name, number) < 0)
            failed++;
        else if (check(store, name, number) < 0)
            failed += 100;
    }
    kvs_close(store);
    return failed;
}

static uint64_t collect_once(struct world *w)
{
    struct kvs_gc_opts opts = {.size = sizeof(opts), .grace_s = 3600};
    struct kvs_gc_result result = {.size = sizeof(result)};
    struct kvs_store *store;

    assert_int_equal(w->open(w, &store), 0);
    assert_int_equal(kvs_gc(store, &opts, &result), 0);
    kvs_close(store);
    return result.deleted_chunks;
}

static void check_all(struct world *w)
{
    struct kvs_store *store;
    char name[32];

    assert_int_equal(w->open(w, &store), 0);
    for (unsigned s = 0; s < N_SAVERS; s++)
        for (unsigned i = 0; i < N_OBJECTS; i++) {
            snprintf(name, sizeof(name), "object-%u-%u", s, i);
            assert_int_equal(check(store, name, i), 0);
        }
    kvs_close(store);
}

struct saver {
    struct world *world;
    unsigned number, failed;
    pthread_t thread;
};

static void *saver_main(void *arg)
{
    struct saver *me = arg;

    me->failed = save_all(me->world, me->number);
    atomic_fetch_sub(&me->world->running, 1);
    return NULL;
}

/* Some rounds; more of them while a busy machine let no collection come between the savers. */
static bool go_on(size_t round, size_t rounds, uint64_t deleted)
{
    return round < rounds || (deleted == 0 && round < 50 * rounds);
}

static void race_threads(struct world *w, size_t rounds)
{
    struct saver savers[N_SAVERS];
    uint64_t deleted = 0;

    for (size_t round = 0; go_on(round, rounds, deleted); round++) {
        start_round(w, (unsigned)round);
        atomic_store(&w->running, N_SAVERS);
        for (unsigned s = 0; s < N_SAVERS; s++) {
            savers[s] = (struct saver){.world = w, .number = s};
            assert_int_equal(pthread_create(&savers[s].thread, NULL, saver_main, &savers[s]), 0);
        }
        do
            deleted += collect_once(w);
        while (atomic_load(&w->running) > 0);
        for (unsigned s = 0; s < N_SAVERS; s++) {
            pthread_join(savers[s].thread, NULL);
            assert_int_equal(savers[s].failed, 0);
        }
        check_all(w);
    }
    print_message("%zu rounds, %llu chunks deleted\n", rounds, (unsigned long long)deleted);
    assert_true(deleted > 0); /* else there was no race */
}

static void race_processes(struct world *w, size_t rounds)
{
    uint64_t deleted = 0;

    for (size_t round = 0; go_on(round, rounds, deleted); round++) {
        pid_t children[N_SAVERS];
        unsigned running = N_SAVERS;

        start_round(w, (unsigned)round);
        for (unsigned s = 0; s < N_SAVERS; s++) {
            children[s] = fork();
            if (children[s] == 0)
                _exit(save_all(w, s) ? 1 : 0);
            assert_true(children[s] > 0);
        }
        while (running > 0) {
            deleted += collect_once(w);
            for (unsigned s = 0; s < N_SAVERS; s++) {
                int status;

                if (children[s] == 0 || waitpid(children[s], &status, WNOHANG) <= 0)
                    continue;
                assert_true(WIFEXITED(status));
                assert_int_equal(WEXITSTATUS(status), 0);
                children[s] = 0;
                running--;
            }
        }
        check_all(w);
    }
    print_message("%zu rounds, %llu chunks deleted\n", rounds, (unsigned long long)deleted);
    assert_true(deleted > 0);
}

static int memory_world_open(struct world *w, struct kvs_store **ret)
{
    return memory_store(w->uri, ret);
}

static void memory_world_old(struct world *w)
{
    memory_space(w->uri)->now_s += 2 * DAY_S;
}

static void test_threads_beside_it(void **state)
{
    struct world w = {.open = memory_world_open, .make_old = memory_world_old, .uri = URI};

    (void)state;
    memory_forget_all();
    race_threads(&w, unit_rounds(20));
}

static int file_world_open(struct world *w, struct kvs_store **ret)
{
    return kvs_open(w->uri, ret);
}

/* All chunk files were last used the day before yesterday. */
static void file_world_old(struct world *w)
{
    const struct timespec times[2] = {{.tv_sec = time(NULL) - 2 * DAY_S},
                                      {.tv_sec = time(NULL) - 2 * DAY_S}};
    char path[600];

    for (unsigned digit = 0; digit < 16; digit++) {
        struct dirent *entry;
        DIR *dir;

        snprintf(path, sizeof(path), "%s/chunks/%x", w->uri, digit);
        dir = opendir(path);
        while (dir && (entry = readdir(dir)))
            if (entry->d_name[0] != '.')
                assert_int_equal(utimensat(dirfd(dir), entry->d_name, times, 0), 0);
        if (dir)
            closedir(dir);
    }
}

static void file_world(struct world *w)
{
    *w = (struct world){.open = file_world_open, .make_old = file_world_old};
    assert_int_equal(temp_dir(w->uri, sizeof(w->uri)), 0);
}

static void test_file_store_threads(void **state)
{
    struct world w;

    (void)state;
    file_world(&w);
    race_threads(&w, unit_rounds(3));
    assert_int_equal(remove_dir(w.uri), 0);
}

static void test_file_store_processes(void **state)
{
    struct world w;

    (void)state;
    file_world(&w);
    race_processes(&w, unit_rounds(3));
    assert_int_equal(remove_dir(w.uri), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dead_go_live_stay),
        cmocka_unit_test(test_gives_up),
        cmocka_unit_test(test_nothing_to_delete_with),
        cmocka_unit_test(test_young_ones_stay),
        cmocka_unit_test(test_a_hit_refreshes),
        cmocka_unit_test(test_a_damaged_manifest_stops_it),
        cmocka_unit_test(test_an_unreadable_store_stops_it),
        cmocka_unit_test(test_opaque_manifests_protect),
        cmocka_unit_test(test_unknown_needs_stop_deletion),
        cmocka_unit_test(test_without_sweep),
        cmocka_unit_test(test_without_lists),
        cmocka_unit_test(test_threads_beside_it),
        cmocka_unit_test(test_file_store_processes), /* before there are threads to fork */
        cmocka_unit_test(test_file_store_threads),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);

    memory_forget_all();
    return rc;
}
