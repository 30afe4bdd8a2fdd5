// SPDX-License-Identifier: Apache-2.0
/*
 * A program with a manager of the tiers that its environment names (KVBM_*), for
 * test_manager_kill.py and test_manager_faults.py. Block i of sequence s has key s * 1000 + i, and
 * bytes that follow from it.
 *
 *   manager_client write SEQUENCES THREADS SEED
 *       stores and loads until it is killed; lines, each written at once:
 *       "OPEN", "USE s n" before blocks [0, n) of s are asked for or stored, "LOOK t" before thread t uses
 *       blocks and asks where they are, "ON t s i" for each that was on the disk then,
 *       "KEPT t s i" for each that a durable store has counted
 *   manager_client check SEQUENCES
 *       loads all: "HAVE s i" for each that is there, and in the end "OK wrong=0 bad=0 ..."
 *   manager_client talk
 *       does what its input says, and answers each line with one:
 *       store|load FIRST N MS    sequences [FIRST, FIRST + N), each job has that long
 *       where FIRST N            how many of their blocks are where
 *       prompt_store|prompt_load|prompt_where SEQUENCE   as these, of one sequence of 128 blocks
 *       forget                   what is in the host tier goes down and is forgotten there
 *       traffic FIRST N MS       two threads store ever new sequences, two load these, for so long
 *       remove FIRST N           removes these sequences' keys from every tier
 *       drain MS, stats
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_manager.h"
#include "say.h"

enum {
    LENGTH = 8,
    PROMPT = 128,
    MAX_THREADS = 16,
    LAYERS = 3,
    PAGE = 8,
    INNER = 64,
    MAX_TIMES = 200000
};
enum { WORDS = LAYERS * 2 * PAGE * INNER / 4 }; /* of eight bytes, in a block of 16-bit elements */

static struct kvbm_manager *manager;
static struct kvbm_layout *layout;
static struct kvbm_cache *cache;
static uint64_t n_sequences, seed;
static uint8_t *memory; /* of the cache's block 0 */
static uint64_t stride;

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t *words_of(uint32_t block)
{
    return (uint64_t *)(memory + block * stride);
}

static void fill(uint32_t block, uint64_t key)
{
    for (uint64_t i = 0; i < WORDS; i++)
        words_of(block)[i] = mix(key * 977 + i);
}

static bool holds(uint32_t block, uint64_t key)
{
    for (uint64_t i = 0; i < WORDS; i++) {
        if (words_of(block)[i] != mix(key * 977 + i))
            return false;
    }
    return true;
}

static uint32_t pick(uint64_t *random, uint64_t n)
{
    return (uint32_t)(mix(*random += UINT64_C(0x9e3779b97f4a7c15)) % n);
}

/* ---- the manager ---- */

static int open_all(void)
{
    const struct kvbm_layout_config block = {.size = sizeof(block),
                                             .kind = KVBM_FULLY_CONTIGUOUS,
                                             .num_blocks = (MAX_THREADS + 1) * LENGTH,
                                             .num_layers = LAYERS,
                                             .outer_dim = 2,
                                             .page_size = PAGE,
                                             .inner_dim = INNER,
                                             .dtype_width_bytes = 2};
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_manager_opts opts = {
        .size = sizeof(opts), .block = &block, .fingerprint = "fault", .copy_threads = 2};
    struct kvbm_cache_opts attach = {.size = sizeof(attach)};
    struct kvbm_view first, second;
    char *strings = NULL;
    int rc = kvbm_layout_allocate(&block, &allocator, &layout);

    if (rc == 0)
        rc = kvbm_layout_block(layout, 0, &first);
    if (rc == 0)
        rc = kvbm_layout_block(layout, 1, &second);
    if (rc == 0)
        rc = kvbm_manager_configure(&opts, NULL, &strings);
    if (rc == 0)
        rc = kvbm_manager_create(&opts, &manager);
    free(strings);
    attach.layout = layout;
    if (rc == 0)
        rc = kvbm_cache_attach(manager, &attach, &cache);
    if (rc == 0) {
        memory = (uint8_t *)(uintptr_t)first.addr; // NOLINT(performance-no-int-to-ptr)
        stride = second.addr - first.addr;
    }
    return rc;
}

static int close_all(void)
{
    int rc = kvbm_cache_detach(cache);

    if (rc == 0)
        rc = kvbm_registry_check(kvbm_manager_registry(manager));
    if (rc == 0)
        rc = kvbm_manager_destroy(manager, 3000);
    kvbm_layout_destroy(layout);
    return rc;
}

struct result {
    uint32_t ok, wrong;
    uint8_t bits; /* which of the blocks are there */
    int status;   /* of the job, or why there was none */
    uint64_t us;
};

static void keys_of(uint64_t sequence, uint64_t keys[LENGTH])
{
    for (uint64_t i = 0; i < LENGTH; i++)
        keys[i] = sequence * 1000 + i;
}

/* Blocks [0, n) of @sequence, through blocks @base.. of the cache. @ms 0: without a deadline. */
static struct result move(bool store, uint64_t sequence, uint32_t n, uint32_t base, uint64_t ms)
{
    uint64_t keys[LENGTH], begin = kv_now_ns(), deadline = ms ? begin + ms * KV_NS_PER_MS : 0;
    uint32_t blocks[LENGTH];
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = deadline};
    struct result result = {0};
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = cache,
                           .blocks = blocks,
                           .deadline_ns = deadline,
                           .ok = &result.bits};
    struct kvbm_done done = {0};
    int64_t id;

    keys_of(sequence, keys);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = base + i;
        fill(base + i, store ? keys[i] : 0);
    }
    id = store ? kvbm_manager_prepare_store(manager, &chain, n, &job.pin)
               : kvbm_manager_prepare_load(manager, &chain, n, &opts, &job.pin);
    if (id >= 0) {
        id = kvbm_manager_submit(manager, &job);
        kvbm_pin_release(job.pin);
    }
    result.status = (int)KV_MIN(id, (int64_t)0);
    if (id > 0 && kvbm_manager_wait(manager, (uint64_t)id, 60000, &done) < 0)
        abort(); /* a job that doesn't end */
    if (id > 0)
        result.status = done.status;
    result.us = (kv_now_ns() - begin) / 1000;
    for (uint32_t i = 0; i < n; i++) {
        bool there = result.bits >> i & 1;

        result.ok += there;
        result.wrong += there && !store && !holds(base + i, keys[i]);
    }
    return result;
}

/* ---- write ---- */

/* The blocks are used, and those that are on the disk then said to be. */
static void look(unsigned number, uint64_t sequence)
{
    uint64_t keys[LENGTH];
    uint8_t tiers[LENGTH];
    char text[LENGTH * 40];
    int len = snprintf(text, sizeof(text), "LOOK %u\n", number);

    keys_of(sequence, keys);
    say(text, (size_t)len);
    if (kvbm_manager_touch(manager, 0, keys, LENGTH) < 0)
        exit(2);
    kvbm_registry_locate(kvbm_manager_registry(manager), 0, keys, LENGTH, tiers);
    len = 0;
    for (uint32_t i = 0; i < LENGTH; i++) {
        if (tiers[i] >> KV_TIER_DISK & 1)
            len += snprintf(text + len, sizeof(text) - (size_t)len, "ON %u %" PRIu64 " %u\n",
                            number, sequence, i);
    }
    say(text, (size_t)len);
}

/* Store durably: every block that the call counts is on the disk, until that evicts it. */
static void keep(unsigned number, uint64_t sequence, uint32_t n)
{
    const struct kvbm_store_opts opts = {
        .size = sizeof(opts), .timeout_ms = 60000, .durable = true};
    uint64_t keys[LENGTH];
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    uint32_t blocks[LENGTH];
    char text[LENGTH * 40];
    int len = 0;
    long kept;

    keys_of(sequence, keys);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = number * LENGTH + i;
        fill(blocks[i], keys[i]);
    }
    kept = kvbm_cache_store_with(cache, &chain, n, blocks, &opts);
    if (kept < 0)
        exit(2);
    for (long i = 0; i < kept; i++)
        len += snprintf(text + len, sizeof(text) - (size_t)len, "KEPT %u %" PRIu64 " %ld\n", number,
                        sequence, i);
    say(text, (size_t)len);
}

static void *writer(void *arg)
{
    unsigned number = (unsigned)(uintptr_t)arg;
    uint64_t random = seed + number;

    for (unsigned round = 1;; round++) {
        uint64_t sequence = 1 + pick(&random, n_sequences);
        uint32_t n = 1 + pick(&random, LENGTH);
        bool store = pick(&random, 8) < 5;
        char text[60];
        int len = snprintf(text, sizeof(text), "USE %" PRIu64 " %u\n", sequence, n);

        say(text, (size_t)len);
        if (store && pick(&random, 3) == 0) {
            keep(number, sequence, n);
            look(number, sequence);
            continue;
        }
        if (move(store, sequence, n, number * LENGTH, 0).wrong) {
            say("WRONG\n", 6);
            exit(1);
        }
        if (round % 8 == 0 && kvbm_manager_drain(manager, 1) != -ECHILD)
            look(number, sequence);
        else if (round % 3 == 0)
            look(number, 1 + pick(&random, n_sequences));
    }
    return NULL;
}

static int write_all(unsigned n_threads)
{
    pthread_t threads[MAX_THREADS];

    if (!n_threads || n_threads > MAX_THREADS)
        return 2;
    say("OPEN\n", 5);
    for (unsigned i = 0; i < n_threads; i++) {
        if (pthread_create(&threads[i], NULL, writer, (void *)(uintptr_t)i) != 0)
            return 2;
    }
    for (unsigned i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    return 2;
}

/* ---- check ---- */

static struct kvbm_manager_stats stats_now(void)
{
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};

    if (kvbm_manager_get_stats(manager, &stats) < 0)
        exit(2);
    return stats;
}

static int check_all(void)
{
    struct kvbm_manager_stats stats = stats_now();
    uint64_t listed = stats.disk.used, wrong = 0, have = 0;

    for (uint64_t sequence = 1; sequence <= n_sequences; sequence++) {
        struct result result = move(false, sequence, LENGTH, 0, 0);

        wrong += result.wrong;
        have += result.ok;
        for (int i = 0; i < LENGTH; i++) {
            if (result.bits >> i & 1)
                printf("HAVE %" PRIu64 " %d\n", sequence, i);
        }
    }
    stats = stats_now();
    printf("%s have=%" PRIu64 " listed=%" PRIu64 " wrong=%" PRIu64 " bad=%" PRIu64
           " failed=%" PRIu64 "\n",
           wrong ? "FAILED" : "OK", have, listed, wrong, stats.disk.bad, stats.disk.failed);
    return wrong > 0;
}

/* ---- talk ---- */

static void move_many(bool store, uint64_t first, uint64_t n, uint64_t ms)
{
    uint64_t ok = 0, wrong = 0, late = 0, slowest = 0;

    for (uint64_t i = 0; i < n; i++) {
        struct result result = move(store, first + i, LENGTH, MAX_THREADS * LENGTH, ms);

        ok += result.ok;
        wrong += result.wrong;
        late += result.status == -ETIMEDOUT;
        slowest = KV_MAX(slowest, result.us);
    }
    printf("ok=%" PRIu64 " wrong=%" PRIu64 " late=%" PRIu64 " slowest_ms=%" PRIu64 "\n", ok, wrong,
           late, slowest / 1000);
}

static void where(uint64_t first, uint64_t n)
{
    uint64_t keys[LENGTH], counts[KVBM_BUSY + 1] = {0}, on_disk = 0, remote = 0;
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    uint8_t at[LENGTH], tiers[LENGTH];

    for (uint64_t i = 0; i < n; i++) {
        keys_of(first + i, keys);
        kvbm_registry_locate(kvbm_manager_registry(manager), 0, keys, LENGTH, tiers);
        kvbm_manager_lookup(manager, &chain, LENGTH, at);
        for (int k = 0; k < LENGTH; k++) {
            counts[at[k]]++;
            on_disk += tiers[k] >> KV_TIER_DISK & 1;
            remote += tiers[k] >> KV_TIER_EXTERNAL & 1;
        }
    }
    printf("ready=%" PRIu64 " miss=%" PRIu64 " disk=%" PRIu64 " object=%" PRIu64 "\n",
           counts[KVBM_READY], counts[KVBM_MISS], on_disk, remote);
}

static void prompt_where(struct kvbm_chain *chain)
{
    uint32_t counts[KVBM_BUSY + 1] = {0};
    uint8_t at[PROMPT];
    long prefix = kvbm_manager_lookup(manager, chain, PROMPT, at);

    for (uint32_t i = 0; i < PROMPT; i++)
        counts[at[i]]++;
    printf("prefix=%ld pending=%u remote=%u miss=%u\n", prefix, counts[KVBM_PENDING],
           counts[KVBM_REMOTE], counts[KVBM_MISS]);
}

/* One job of a whole prompt. */
static void prompt_move(struct kvbm_chain *chain, const uint64_t *keys, bool store)
{
    uint8_t ok[PROMPT / 8] = {0};
    uint32_t blocks[PROMPT], n_ok = 0, wrong = 0;
    struct kvbm_job job = {.size = sizeof(job), .cache = cache, .blocks = blocks, .ok = ok};
    struct kvbm_done done = {0};
    long prefix;
    int64_t id;

    for (uint32_t i = 0; i < PROMPT; i++) {
        blocks[i] = i;
        fill(i, store ? keys[i] : 0);
    }
    prefix = store ? kvbm_manager_prepare_store(manager, chain, PROMPT, &job.pin)
                   : kvbm_manager_prepare_load(manager, chain, PROMPT, NULL, &job.pin);
    id = prefix < 0 ? prefix : kvbm_manager_submit(manager, &job);
    if (id < 0 || kvbm_manager_wait(manager, (uint64_t)id, 60000, &done) < 0)
        abort();
    kvbm_pin_release(job.pin);
    for (uint32_t i = 0; i < PROMPT; i++) {
        bool there = ok[i / 8] >> (i % 8) & 1;

        n_ok += there;
        wrong += there && !holds(i, keys[i]);
    }
    printf("prefix=%ld ok=%u wrong=%u\n", prefix, n_ok, wrong);
}

static void prompt(const char *what, uint64_t sequence)
{
    uint64_t keys[PROMPT];
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};

    for (uint64_t i = 0; i < PROMPT; i++)
        keys[i] = sequence * 1000 + i;
    if (!strcmp(what, "where"))
        prompt_where(&chain);
    else
        prompt_move(&chain, keys, !strcmp(what, "store"));
}

struct traffic {
    pthread_t thread;
    uint64_t first, n, until_ns, random, wrong, ok, missing;
    uint32_t number, n_times;
    uint32_t *times; /* microseconds of each load */
};

static _Atomic uint64_t next_new = 1000000;

static void *storer(void *arg)
{
    struct traffic *t = arg;

    while (kv_now_ns() < t->until_ns) {
        t->ok += move(true, next_new++, LENGTH, t->number * LENGTH, 0).ok;
        usleep(20000);
    }
    return NULL;
}

static void *loader(void *arg)
{
    struct traffic *t = arg;

    while (kv_now_ns() < t->until_ns && t->n_times < MAX_TIMES) {
        struct result result =
            move(false, t->first + pick(&t->random, t->n), LENGTH, t->number * LENGTH, 0);

        t->times[t->n_times++] = (uint32_t)result.us;
        t->ok += result.ok;
        t->wrong += result.wrong;
        t->missing += LENGTH - result.ok;
        usleep(500);
    }
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

static void traffic(uint64_t first, uint64_t n, uint64_t ms)
{
    struct traffic all[4];
    uint64_t wrong = 0, missing = 0;
    uint32_t *times = malloc(2 * MAX_TIMES * sizeof(*times)), n_times = 0;

    for (uint32_t i = 0; i < 4; i++) {
        all[i] = (struct traffic){.first = first,
                                  .n = n,
                                  .until_ns = kv_now_ns() + ms * KV_NS_PER_MS,
                                  .random = i,
                                  .number = i};
        all[i].times = malloc(MAX_TIMES * sizeof(*times));
        if (!times || !all[i].times ||
            pthread_create(&all[i].thread, NULL, i < 2 ? storer : loader, &all[i]))
            abort();
    }
    for (uint32_t i = 0; i < 4; i++) {
        pthread_join(all[i].thread, NULL);
        memcpy(times + n_times, all[i].times, all[i].n_times * sizeof(*times));
        n_times += all[i].n_times;
        wrong += all[i].wrong;
        missing += all[i].missing;
        free(all[i].times);
    }
    qsort(times, n_times, sizeof(*times), by_value);
    printf("loads=%u stored=%" PRIu64 " wrong=%" PRIu64 " missing=%" PRIu64
           " median_us=%u p99_us=%u max_us=%u\n",
           n_times, all[0].ok + all[1].ok, wrong, missing, n_times ? times[n_times / 2] : 0,
           n_times ? times[n_times * 99ul / 100] : 0, n_times ? times[n_times - 1] : 0);
    free(times);
}

static void forget(void)
{
    int rc = kvbm_manager_drain(manager, 20000);

    kvbm_pool_reset_inactive(kvbm_manager_pool(manager, KV_TIER_HOST));
    printf("rc=%d used=%" PRIu64 "\n", -rc, stats_now().host.used);
}

static void remove_sequences(uint64_t first, uint64_t n)
{
    struct kvbm_remove_result ret = KVBM_REMOVE_RESULT_INIT;
    uint64_t *keys = malloc((n * LENGTH + 1) * sizeof(*keys));
    int rc;

    for (uint64_t i = 0; keys && i < n * LENGTH; i++)
        keys[i] = (first + i / LENGTH) * 1000 + i % LENGTH;
    rc = keys ? kvbm_manager_remove(manager, 0, keys, n * LENGTH, 60000, &ret) : -ENOMEM;
    printf("rc=%d host=%" PRIu64 " disk=%" PRIu64 " object=%" PRIu64 " held=%" PRIu64 "\n", -rc,
           ret.host, ret.disk, ret.object, ret.held);
    free(keys);
}

static void tell_stats(void)
{
    struct kvbm_manager_stats s = stats_now();
    const struct kvbm_tier_stats *d = &s.disk, *o = &s.object;

    printf("disk_used=%" PRIu64 " disk_in=%" PRIu64 " disk_out=%" PRIu64 " disk_bad=%" PRIu64
           " disk_failed=%" PRIu64 " disk_dropped=%" PRIu64 " disk_queued=%" PRIu64
           " volumes_down=%u object_in=%" PRIu64 " object_out=%" PRIu64 " object_failed=%" PRIu64
           " object_dropped=%" PRIu64 " object_queued=%" PRIu64 " object_down=%d pins=%" PRIu64
           " jobs=%" PRIu64 "\n",
           d->used, d->blocks_in, d->blocks_out, d->bad, d->failed, d->dropped, d->queued,
           s.volumes_down, o->blocks_in, o->blocks_out, o->failed, o->dropped, o->queued,
           s.object_down, s.pins_now, s.jobs_now);
}

static void obey(const char *line)
{
    uint64_t a = 0, b = 0, c = 0;
    char word[16] = "";

    if (sscanf(line, "%15s %" SCNu64 " %" SCNu64 " %" SCNu64, word, &a, &b, &c) < 1)
        return;
    if (!strcmp(word, "store") || !strcmp(word, "load"))
        move_many(*word == 's', a, b, c);
    else if (!strncmp(word, "prompt_", 7))
        prompt(word + 7, a);
    else if (!strcmp(word, "where"))
        where(a, b);
    else if (!strcmp(word, "traffic"))
        traffic(a, b, c);
    else if (!strcmp(word, "forget"))
        forget();
    else if (!strcmp(word, "remove"))
        remove_sequences(a, b);
    else if (!strcmp(word, "drain"))
        printf("rc=%d\n", -kvbm_manager_drain(manager, (uint32_t)a));
    else if (!strcmp(word, "stats"))
        tell_stats();
    else
        printf("what=1\n");
    fflush(stdout);
}

static int talk(void)
{
    char line[200];

    printf("OPEN\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin))
        obey(line);
    return 0;
}

int main(int argc, char **argv)
{
    int rc = argc < 2 ? -EINVAL : open_all();

    if (rc < 0) {
        printf("FAILED open: %s\n", strerror(-rc));
        return 3;
    }
    n_sequences = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : 1;
    if (!strcmp(argv[1], "write") && argc == 5)
        rc = write_all((unsigned)strtoul(argv[3], NULL, 10));
    else if (!strcmp(argv[1], "check") && argc == 3)
        rc = check_all();
    else
        rc = strcmp(argv[1], "talk") == 0 ? talk() : 2;
    if (close_all() < 0) {
        printf("FAILED close\n");
        return 1;
    }
    return rc;
}
