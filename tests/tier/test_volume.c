// SPDX-License-Identifier: Apache-2.0
/*
 * Volumes: what is put into files and stores comes back, also after another registration; what is
 * lent comes to a peer that knows the volume's name; whatever fails, no wrong byte and a word of it.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm.h"
#include "kvbm_directory.h"
#include "support.h"

#define N 100u /* blocks: several parts of a call */
#define FILE_BYTES (4u << 20)
#define SLOT 8192 /* bytes of a block of 4608, whole pages */

static char folder[64];
static struct kvbm_layout *from, *to;
static uint64_t keys[N];
static uint32_t blocks[N];

static struct kvbm_layout_config form(uint64_t n, enum kvbm_layout_kind kind)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kind,
                                       .num_blocks = n,
                                       .num_layers = 3,
                                       .outer_dim = 2,
                                       .page_size = 16,
                                       .inner_dim = 24,
                                       .dtype_width_bytes = 2};
}

static struct kvbm_layout *memory_of(enum kvbm_layout_kind kind)
{
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    const struct kvbm_layout_config config = form(N, kind);
    struct kvbm_layout *layout;

    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    return layout;
}

/* Fill block @i for its key, or with zeros; or count the bytes that differ from the key's. */
static size_t visit(struct kvbm_layout *layout, uint32_t i, uint64_t key, bool write)
{
    size_t differ = 0;

    for (uint32_t layer = 0; layer < 3; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            struct kvbm_view view;
            uint8_t *at;

            assert_int_equal(kvbm_layout_region(layout, i, layer, outer, &view), 0);
            at = (uint8_t *)(uintptr_t)view.addr;
            for (uint64_t k = 0; k < view.len; k++) {
                uint8_t byte = key ? (uint8_t)(key * 7 + layer * 31 + outer * 13 + k * 3) : 0;

                if (write)
                    at[k] = byte;
                differ += at[k] != byte;
            }
        }
    }
    return differ;
}

static void begin(void)
{
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = 1000 + i;
        blocks[i] = (i * 37 + 5) % N;
        (void)visit(from, blocks[i], keys[i], true);
        (void)visit(to, blocks[i], 0, true);
    }
}

static struct kvbm_volume_opts in_files(const char *name)
{
    static struct kvbm_layout_config block;

    block = form(1, KVBM_FULLY_CONTIGUOUS);
    return (struct kvbm_volume_opts){.size = sizeof(struct kvbm_volume_opts),
                                     .name = name,
                                     .block = &block,
                                     .fingerprint = "volume test",
                                     .files = folder,
                                     .file_bytes = FILE_BYTES};
}

static struct kvbm_volume *open_volume(const struct kvbm_volume_opts *opts)
{
    struct kvbm_volume *volume = NULL;

    assert_int_equal(kvbm_volume_register(opts, &volume), 0);
    return volume;
}

static const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};

static long put(struct kvbm_volume *volume, uint32_t n, uint8_t *ok)
{
    const struct kvbm_volume_io io = {.size = sizeof(io),
                                      .chain = &chain,
                                      .n = n,
                                      .layout = from,
                                      .blocks = blocks,
                                      .ok = ok,
                                      .deadline_ns = kv_now_ns() + 60 * KV_NS_PER_S};

    return kvbm_volume_put(volume, &io);
}

/* Get @n blocks, and check that each of them is right or a miss. Returns how many came. */
static long get(struct kvbm_volume *volume, uint32_t n)
{
    uint8_t ok[(N + 7) / 8];
    const struct kvbm_volume_io io = {.size = sizeof(io),
                                      .chain = &chain,
                                      .n = n,
                                      .layout = to,
                                      .blocks = blocks,
                                      .ok = ok,
                                      .deadline_ns = kv_now_ns() + 60 * KV_NS_PER_S};
    long came = kvbm_volume_get(volume, &io), right = 0;

    for (uint32_t i = 0; i < n && came >= 0; i++) {
        if (!(ok[i / 8] >> (i % 8) & 1))
            continue;
        assert_int_equal(visit(to, blocks[i], keys[i], false), 0);
        right++;
    }
    assert_true(came < 0 || came == right);
    return came;
}

static struct kvbm_volume_info info_of(struct kvbm_volume *volume)
{
    struct kvbm_volume_info info = KVBM_VOLUME_INFO_INIT;

    assert_int_equal(kvbm_volume_get_info(volume, &info), 0);
    return info;
}

static int make_folder(void **state)
{
    (void)state;
    if (temp_dir(folder, sizeof(folder)) < 0)
        return -1;
    from = memory_of(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS);
    to = memory_of(KVBM_FULLY_CONTIGUOUS);
    begin();
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    kvbm_layout_destroy(from);
    kvbm_layout_destroy(to);
    return remove_dir(folder);
}

/* ---- files and stores ---- */

/* Put, get, register anew, get again: of a place that @opts names. */
static void lives_on(const struct kvbm_volume_opts *opts)
{
    struct kvbm_volume *volume = open_volume(opts);
    uint8_t ok[(N + 7) / 8];
    struct kvbm_volume_info info;

    assert_int_equal(get(volume, 5), 0);
    assert_int_equal(put(volume, 60, ok), 60);
    assert_true((ok[0] & ok[6]) == 0xff && ok[7] == 0x0f);
    assert_int_equal(get(volume, N), 60);
    assert_int_equal(put(volume, N, NULL), N); /* the first 60 are there */
    assert_int_equal(get(volume, N), N);
    info = info_of(volume);
    assert_string_equal(info.name, opts->name);
    assert_int_equal(info.health, KVBM_VOLUME_UP);
    assert_int_equal(info.block_bytes, 3 * 2 * 16 * 24 * 2);
    assert_int_equal(info.used, N);
    assert_true(info.writable);
    assert_int_equal(info.gets, 5 + N + N);
    assert_int_equal(info.hits, 60 + N);
    assert_int_equal(info.puts, 60 + N);
    assert_int_equal(info.kept, 60 + N);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
    begin(); /* zeros in `to` */
    volume = open_volume(opts);
    assert_int_equal(get(volume, N), N);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

static void test_files(void **state)
{
    struct kvbm_volume_opts opts = in_files("fast-1");
    struct kvbm_volume *volume;

    (void)state;
    lives_on(&opts);
    volume = open_volume(&opts);
    assert_int_equal(info_of(volume).capacity, FILE_BYTES / SLOT);
    assert_int_equal(info_of(volume).used, N);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

static void test_store(void **state)
{
    struct kvbm_volume_opts opts = in_files("bucket");
    char uri[96];

    (void)state;
    snprintf(uri, sizeof(uri), "%s/store", folder);
    opts.files = NULL;
    opts.file_bytes = 0;
    opts.store = uri;
    lives_on(&opts);
}

/* A full volume drops what was used longest ago; what is left is right. */
static void test_full(void **state)
{
    struct kvbm_volume_opts opts = in_files("small");
    struct kvbm_volume *volume;
    long n;

    (void)state;
    opts.file_bytes = UINT64_C(40) * SLOT;
    volume = open_volume(&opts);
    (void)put(volume, N, NULL);
    n = get(volume, N);
    assert_true(n > 0 && n <= 40);
    assert_int_equal(info_of(volume).capacity, 40);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

/* Damaged bytes are misses. */
static void test_damaged(void **state)
{
    struct kvbm_volume_opts opts = in_files("damaged");
    struct kvbm_volume *volume = open_volume(&opts);
    static const uint8_t wrong[512] = {1, 2, 3};
    char path[128];
    int fd;

    (void)state;
    assert_int_equal(put(volume, N, NULL), N);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", folder);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    for (off_t slot = 0; slot < 7; slot++)
        assert_int_equal(pwrite(fd, wrong, sizeof(wrong), 4096 + slot * SLOT + 1024), 512);
    close(fd);
    volume = open_volume(&opts);
    assert_int_equal(get(volume, N), N - 7);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

/* Health: a directory that is missing, and a store that nobody can reach. */
static void test_health(void **state)
{
    struct kvbm_volume_opts opts = in_files("two");
    struct kvbm_volume *volume;
    char both[160];

    (void)state;
    snprintf(both, sizeof(both), "%s/a:%s/absent", folder, folder);
    both[strlen(folder) + 2] = '\0';
    assert_int_equal(mkdir(both, 0700), 0);
    both[strlen(folder) + 2] = ':';
    opts.files = both;
    volume = open_volume(&opts);
    assert_int_equal(info_of(volume).health, KVBM_VOLUME_DEGRADED);
    (void)put(volume, N, NULL);
    assert_true(get(volume, N) > 0);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
    snprintf(both, sizeof(both), "%s/absent", folder);
    assert_int_equal(kvbm_volume_register(&opts, &volume), -ENOENT);
}

/* ---- peers ---- */

static struct kvbm_agent *agent_of(const char *name, const char *at, const char *fingerprint)
{
    const struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                         .name = name,
                                         .fingerprint = fingerprint,
                                         .listen = &at,
                                         .n_listen = at ? 1 : 0};
    struct kvbm_agent *agent;

    assert_int_equal(kvbm_agent_create(&opts, &agent), 0);
    return agent;
}

static struct kvbm_volume *open_of_peer(struct kvbm_agent *agent, const char *peer)
{
    struct kvbm_volume_opts opts = in_files("far");

    opts.files = NULL;
    opts.file_bytes = 0;
    opts.fingerprint = NULL;
    opts.peer = peer;
    opts.agent = agent;
    return open_volume(&opts);
}

static void wait_up(struct kvbm_volume *volume)
{
    wait_until(info_of(volume).health == KVBM_VOLUME_UP);
}

/* A volume of files that is lent: another agent finds it by its owner's name in a file of peers. */
static void test_peer(void **state)
{
    char at[96], list[96], peers[112];
    struct kvbm_volume_opts opts = in_files("near");
    struct kvbm_directory_opts directory = {.size = sizeof(directory), .reread_ms = 20};
    const struct kvbm_follow_opts follow = {.size = sizeof(follow), .directory = &directory};
    struct kvbm_volume *near, *far, *stranger;
    struct kvbm_agent *owner, *reader;
    struct kvbm_follower *follower;
    FILE *file;

    (void)state;
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    snprintf(list, sizeof(list), "%s/peers", folder);
    snprintf(peers, sizeof(peers), "file:%s", list);
    file = fopen(list, "we");
    assert_non_null(file);
    fprintf(file, "%s\n", at);
    assert_int_equal(fclose(file), 0);
    owner = agent_of("storage-1", at, "volume test");
    reader = agent_of("decode-1", NULL, "volume test");
    opts.agent = owner;
    opts.lend = true;
    near = open_volume(&opts);
    assert_int_equal(put(near, N, NULL), N);

    far = open_of_peer(reader, "storage-1");
    stranger = open_of_peer(reader, "storage-2");
    assert_int_equal(info_of(far).health, KVBM_VOLUME_DOWN); /* no session yet */
    assert_int_equal(get(far, N), 0);
    directory.peers = peers;
    assert_int_equal(kvbm_agent_follow(reader, &follow, &follower), 0);
    wait_up(far);
    assert_int_equal(get(far, N), N);
    assert_int_equal(put(far, N, NULL), -EROFS);
    assert_false(info_of(far).writable);
    assert_int_equal(info_of(far).hits, N);
    assert_int_equal(get(stranger, N), 0); /* another name: not the one that is there */
    assert_int_equal(info_of(stranger).health, KVBM_VOLUME_DOWN);

    assert_int_equal(kvbm_volume_unregister(near, 10000), 0); /* withdrawn: misses, no old blocks */
    for (uint64_t end = kv_now_ns() + 60 * KV_NS_PER_S; info_of(far).health != KVBM_VOLUME_DOWN;)
        assert_true(kv_now_ns() < end);
    assert_int_equal(get(far, N), 0);
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_int_equal(kvbm_volume_unregister(far, 0), 0);
    assert_int_equal(kvbm_volume_unregister(stranger, 0), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

/* A volume has the last 10 of 30 blocks, and lends 16 at a time: a reader of all 30 gets the 10. */
static void test_peer_lends_less(void **state)
{
    const struct kvbm_chain tail = {.size = sizeof(tail), .keys = keys + 20, .scattered = true},
                            all = {.size = sizeof(all), .keys = keys, .scattered = true};
    struct kvbm_volume_io io = {.size = sizeof(io),
                                .chain = &tail,
                                .n = 10,
                                .layout = from,
                                .blocks = blocks + 20,
                                .deadline_ns = kv_now_ns() + 60 * KV_NS_PER_S};
    struct kvbm_volume_opts opts = in_files("near");
    struct kvbm_agent *owner, *reader;
    struct kvbm_volume *near, *far;
    struct kvbm_session *session;
    char at[96];

    (void)state;
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    owner = agent_of("storage-1", at, "volume test");
    reader = agent_of("decode-1", NULL, "volume test");
    opts.agent = owner;
    opts.lend = true;
    near = open_volume(&opts);
    assert_int_equal(kvbm_volume_put(near, &io), 10);
    assert_int_equal(kvbm_session_open(reader, at, NULL, &session), 0);
    far = open_of_peer(reader, "storage-1");
    wait_up(far);
    io.chain = &all;
    io.n = 30;
    io.layout = to;
    io.blocks = blocks;
    assert_int_equal(kvbm_volume_get(far, &io), 10);
    for (uint32_t i = 20; i < 30; i++)
        assert_int_equal(visit(to, blocks[i], keys[i], false), 0);
    assert_int_equal(kvbm_volume_unregister(far, 0), 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_volume_unregister(near, 10000), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

/* An owner process that lends a volume, until it is killed. */
static void own(int ready)
{
    char at[96];
    struct kvbm_volume_opts opts = in_files("near");
    char byte = 0;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    opts.agent = agent_of("storage-1", at, "volume test");
    opts.lend = true;
    if (put(open_volume(&opts), N, NULL) != (long)N || write(ready, &byte, 1) != 1)
        _exit(1);
    for (;;)
        pause();
}

/* The owner is killed while a reader reads: right blocks or misses, and then the volume is down. */
static void test_peer_killed(void **state)
{
    struct kvbm_volume *far;
    struct kvbm_agent *reader;
    struct kvbm_session *session;
    char at[96], byte;
    int ready[2];
    pid_t owner;

    (void)state;
    assert_int_equal(pipe(ready), 0);
    owner = fork();
    if (owner == 0)
        own(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    reader = agent_of("decode-1", NULL, "volume test");
    assert_int_equal(kvbm_session_open(reader, at, NULL, &session), 0);
    far = open_of_peer(reader, "storage-1");
    for (int i = 0; i < 20; i++)
        assert_int_equal(get(far, N), N);
    kill(owner, SIGKILL);
    while (get(far, N) > 0)
        ;
    waitpid(owner, NULL, 0);
    assert_int_equal(get(far, N), 0);
    assert_int_equal(info_of(far).health, KVBM_VOLUME_DOWN);
    assert_int_equal(kvbm_volume_unregister(far, 0), 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    close(ready[0]);
    close(ready[1]);
}

/* A peer's blocks of another form: misses, never other bytes. */
static void test_peer_of_another_form(void **state)
{
    char at[96];
    struct kvbm_volume_opts opts = in_files("near");
    struct kvbm_layout_config other = form(1, KVBM_FULLY_CONTIGUOUS);
    struct kvbm_agent *owner, *reader;
    struct kvbm_session *session;
    struct kvbm_volume *near, *far;

    (void)state;
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    owner = agent_of("storage-1", at, "volume test");
    reader = agent_of("decode-1", NULL, "volume test");
    other.num_layers = 6;
    opts.block = &other;
    opts.agent = owner;
    opts.lend = true;
    near = open_volume(&opts);
    assert_int_equal(kvbm_session_open(reader, at, NULL, &session), 0);
    far = open_of_peer(reader, "storage-1");
    assert_int_equal(info_of(far).health, KVBM_VOLUME_DOWN);
    assert_int_equal(get(far, N), 0);
    assert_int_equal(kvbm_volume_unregister(far, 0), 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_volume_unregister(near, 10000), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

/* ---- misuse ---- */

static void refused(struct kvbm_volume_opts opts)
{
    struct kvbm_volume *volume = NULL;

    assert_int_equal(kvbm_volume_register(&opts, &volume), -EINVAL);
    assert_null(volume);
}

/* ---- more gets at a time than there are buffers ---- */

#define THREADS 4u
#define EACH (N / THREADS)

struct getter {
    struct kvbm_volume *volume;
    uint32_t first;
    long missed;
};

static void *get_often(void *arg)
{
    struct getter *g = arg;
    const struct kvbm_chain own = {.size = sizeof(own), .keys = keys + g->first, .scattered = true};
    struct kvbm_volume_io io = {
        .size = sizeof(io), .chain = &own, .n = EACH, .layout = to, .blocks = blocks + g->first};

    for (uint32_t i = 0; i < 20; i++) {
        io.deadline_ns = kv_now_ns() + 60 * KV_NS_PER_S;
        g->missed += EACH - kvbm_volume_get(g->volume, &io);
    }
    return NULL;
}

static void test_gets_wait(void **state)
{
    const struct kvbm_volume_opts opts = in_files("busy");
    struct kvbm_volume *volume = open_volume(&opts);
    struct getter getters[THREADS];
    pthread_t threads[THREADS];

    (void)state;
    assert_int_equal(put(volume, N, NULL), N);
    for (uint32_t i = 0; i < THREADS; i++) {
        getters[i] = (struct getter){.volume = volume, .first = i * EACH};
        assert_int_equal(pthread_create(&threads[i], NULL, get_often, &getters[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(getters[i].missed, 0);
    }
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(visit(to, blocks[i], keys[i], false), 0);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

/* A volume that lends through less memory than its gets and puts have keys. */
static void test_lends_little(void **state)
{
    char at[96];
    struct kvbm_volume_opts opts = in_files("little");
    struct kvbm_volume *volume;

    (void)state;
    snprintf(at, sizeof(at), "unix:%s/s", folder);
    opts.agent = agent_of("storage-1", at, "volume test");
    opts.lend = true;
    opts.lend_bytes = 8u * SLOT;
    volume = open_volume(&opts);
    assert_int_equal(put(volume, N, NULL), N);
    assert_int_equal(get(volume, N), N);
    assert_int_equal(get(volume, N), N);
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
    assert_int_equal(kvbm_agent_destroy(opts.agent), 0);
}

static void test_misuse(void **state)
{
    struct kvbm_volume_opts opts = in_files("a/b"), good = in_files("good");
    struct kvbm_volume *volume;
    struct kvbm_volume_io io = {.size = sizeof(io)};
    uint32_t wrong[N];

    (void)state;
    refused(opts);
    opts = good;
    opts.block = NULL;
    refused(opts);
    opts = good;
    opts.store = "/tmp/x";
    refused(opts);
    opts = good;
    opts.files = NULL;
    refused(opts);
    opts = good;
    opts.file_bytes = 0;
    refused(opts);
    opts = good;
    opts.fingerprint = NULL;
    refused(opts);
    opts = good;
    opts.lend = true; /* without an agent */
    refused(opts);
    opts = good;
    opts.files = NULL;
    opts.peer = "storage-1"; /* likewise */
    refused(opts);
    opts = good;
    opts.key_len = 65;
    refused(opts);
    assert_int_equal(kvbm_volume_register(&good, NULL), -EINVAL);
    assert_int_equal(kvbm_volume_unregister(NULL, 0), 0);
    volume = open_volume(&good);
    assert_int_equal(kvbm_volume_get(volume, NULL), -EINVAL);
    assert_int_equal(kvbm_volume_get(volume, &io), -EINVAL);
    assert_int_equal(kvbm_volume_put(NULL, &io), -EINVAL);
    begin();
    assert_int_equal(put(volume, N, NULL), N);
    io = (struct kvbm_volume_io){
        .size = sizeof(io), .chain = &chain, .n = N, .layout = to, .blocks = wrong};
    memcpy(wrong, blocks, sizeof(wrong));
    wrong[N - 1] = N; /* out of range */
    assert_int_equal(kvbm_volume_get(volume, &io), -EINVAL);
    assert_int_equal(kvbm_volume_put(volume, &io), -EINVAL);
    wrong[N - 1] = wrong[0]; /* a target for two keys, of two parts of the call */
    assert_int_equal(kvbm_volume_get(volume, &io), -EINVAL);
    assert_int_equal(kvbm_volume_put(volume, &io), N); /* they are there: it reads no block */
    assert_int_equal(kvbm_volume_unregister(volume, 10000), 0);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        CASE(test_files),       CASE(test_store),           CASE(test_full),
        CASE(test_damaged),     CASE(test_health),          CASE(test_peer),
        CASE(test_peer_killed), CASE(test_peer_lends_less), CASE(test_peer_of_another_form),
        CASE(test_misuse),      CASE(test_gets_wait),       CASE(test_lends_little),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
