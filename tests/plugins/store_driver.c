// SPDX-License-Identifier: Apache-2.0
/*
 * Driver for the end-to-end tests of plugins. Reads commands from standard input, runs them on the
 * backend of the URI in argv[1], and prints one line for each: the returned value, then the result.
 * With --conformance URI it runs the conformance kit instead. SIZE and SEED stand for a value's
 * bytes, which are made and compared here. Built with sanitizers, it checks the plugin as well.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/hash/hash.h"
#include "kv_store.h"

#define MAX_WORDS 2048
#define MAX_LINE 65536
#define MAX_KEY 128

static kv_store_v1 *store;
static const kv_store_vtable *vtable;
static const kv_store_ext *ext;
static _Thread_local char *words[MAX_WORDS];
static _Thread_local size_t n_words;
static pthread_t background;
static bool in_background;

static uint8_t *make_bytes(size_t len, uint64_t seed)
{
    uint8_t *ret = malloc(len + 8);

    seed = seed * 2654435761u + 1;
    for (size_t i = 0; i < len; i += 8) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        memcpy(ret + i, &seed, 8);
    }
    return ret;
}

static size_t read_hash(const char *hex, uint8_t *ret)
{
    size_t len = strlen(hex) / 2;
    unsigned byte = 0;

    for (size_t i = 0; i < len && i < MAX_KEY; i++) {
        sscanf(hex + 2 * i, "%2x", &byte);
        ret[i] = (uint8_t)byte;
    }
    return len;
}

static const char *word(size_t i)
{
    return i < n_words ? words[i] : "";
}

static unsigned long number(size_t i)
{
    return strtoul(word(i), NULL, 10);
}

static bool asked(const char *what)
{
    return strcmp(words[0], what) == 0;
}

/* "same", "other" or "-" (nothing came) against SIZE and SEED at word @at. */
static const char *compare(int ret, uint8_t *data, size_t len, size_t at)
{
    uint8_t *wanted = make_bytes(number(at), number(at + 1));
    bool same = ret == 0 && len == number(at) && memcmp(data, wanted, len) == 0;

    free(wanted);
    if (ret == 0)
        free(data);
    return ret != 0 ? "-" : same ? "same" : "other";
}

static void put(bool manifest)
{
    uint8_t *data = make_bytes(number(2), number(3)), hash[MAX_KEY];
    size_t len = manifest ? 0 : read_hash(word(1), hash);

    printf("%d\n", manifest ? vtable->put_manifest(store, word(1), data, number(2))
                            : vtable->put_chunk(store, hash, len, data, number(2)));
    free(data);
}

static void delete_if(void)
{
    uint8_t *data = make_bytes(number(2), number(3)), hash[MAX_KEY];
    size_t len = read_hash(word(1), hash);

    printf("%d\n", ext->delete_chunk_if(store, hash, len, data, number(2)));
    free(data);
}

static void get(bool manifest)
{
    uint8_t *data = NULL, hash[MAX_KEY];
    size_t len = 0, hash_len = manifest ? 0 : read_hash(word(1), hash);
    int ret = manifest ? vtable->get_manifest(store, word(1), &data, &len)
                       : vtable->get_chunk(store, hash, hash_len, &data, &len);

    printf("%d %s\n", ret, compare(ret, data, len, 2));
}

/* Every @step-th word from the first is a key, all of one length. */
static uint8_t *read_hashes(size_t step, size_t *ret_len, size_t *ret_n)
{
    uint8_t *hashes = calloc(n_words + 1, MAX_KEY);

    *ret_n = *ret_len = 0;
    for (size_t i = 1; i < n_words; i += step)
        *ret_len = read_hash(words[i], hashes + *ret_len * (*ret_n)++);
    return hashes;
}

static void many(void)
{
    uint8_t present[MAX_WORDS] = {0}, *hashes;
    size_t len, n;

    hashes = read_hashes(1, &len, &n);
    if (asked("exists")) {
        printf("%d", ext->exists_chunks(store, hashes, len, n, present));
        for (size_t i = 0; i < n; i++)
            printf(" %d", present[i]);
    } else {
        printf("%d", asked("prefetch") ? vtable->prefetch_chunks(store, hashes, len, n)
                     : asked("touch")  ? ext->touch_chunks(store, hashes, len, n)
                                       : ext->delete_chunk(store, hashes, len));
    }
    printf("\n");
    free(hashes);
}

/* putmany|getmany KEY SIZE SEED KEY SIZE SEED ... */
static void many_values(void)
{
    static uint8_t *data[MAX_WORDS];
    static size_t lens[MAX_WORDS];
    static int each[MAX_WORDS];
    size_t len, n;
    uint8_t *hashes = read_hashes(3, &len, &n);
    int ret;

    if (asked("putmany")) {
        for (size_t i = 0; i < n; i++) {
            lens[i] = number(2 + 3 * i);
            data[i] = make_bytes(lens[i], number(3 + 3 * i));
        }
        ret = ext->put_chunks(store, hashes, len, n, (const uint8_t *const *)data, lens, each);
        printf("%d", ret);
        for (size_t i = 0; i < n; i++) {
            printf(" %d", each[i]);
            free(data[i]);
        }
    } else {
        ret = ext->get_chunks(store, hashes, len, n, data, lens);
        printf("%d", ret);
        for (size_t i = 0; ret >= 0 && i < n; i++)
            printf(" %s", compare(data[i] ? 0 : -1, data[i], lens[i], 2 + 3 * i));
    }
    printf("\n");
    free(hashes);
}

static int print_entry(void *arg, const kv_store_entry *entry)
{
    size_t *left = arg;

    if (entry->name)
        printf("%s:%" PRIu64 " ", entry->name, entry->len);
    for (size_t i = 0; i < entry->hash_len; i++)
        printf("%02x%s", entry->hash[i], i + 1 == entry->hash_len ? " " : "");
    return --*left == 0 ? 7 : 0;
}

/* Keys after the age stay. */
static int is_live(void *arg, const uint8_t *hash, size_t len)
{
    uint8_t wanted[MAX_KEY];

    (void)arg;
    for (size_t i = 2; i < n_words; i++)
        if (read_hash(words[i], wanted) == len && memcmp(wanted, hash, len) == 0)
            return 1;
    return 0;
}

static void list(void)
{
    size_t left = n_words > 1 ? number(1) : SIZE_MAX;

    printf("%d\n", asked("list") ? ext->list_manifests(store, print_entry, &left)
                                 : ext->list_chunks(store, print_entry, &left));
}

static void list_refs(void)
{
    size_t left = SIZE_MAX;

    printf("%d\n", ext->list_refs(store, word(1), print_entry, &left));
}

static void sweep(void)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    int ret = ext->sweep_chunks(store, number(1), is_live, NULL, &swept);

    printf("%d kept=%" PRIu64 " deleted=%" PRIu64 " errors=%" PRIu64 "\n", ret, swept.kept,
           swept.deleted, swept.errors);
}

static void print_stats(void)
{
    kv_store_stats stats = {.size = sizeof(stats)};
    int ret = ext->stats(store, &stats);

    printf("%d puts=%" PRIu64 " hits=%" PRIu64 " gets=%" PRIu64 " misses=%" PRIu64 " bad=%" PRIu64
           " errors=%" PRIu64 " trips=%" PRIu64 "\n",
           ret, stats.puts, stats.put_hits, stats.gets, stats.get_misses, stats.bad_chunks,
           stats.errors, stats.round_trips);
}

/* A snapshot of a later version: whole, but only its beginning and its checksum are known. */
static int put_later(uint8_t version)
{
    uint8_t text[256] = "KVS-OBJ\n";

    text[8] = version;
    kv_hash(text, sizeof(text) - 16, text + sizeof(text) - 16);
    return vtable->put_manifest(store, word(1), text, sizeof(text));
}

/* A manifest that begins as a snapshot's does: all that a backend looks at. */
static void put_snapshot(void)
{
    static const char text[] = "KVS-OBJ\n\1\0 and more";

    if (n_words > 2) {
        printf("%d\n", put_later((uint8_t)number(2)));
        return;
    }

    printf("%d\n", vtable->put_manifest(store, word(1), (const uint8_t *)text, sizeof(text) - 1));
}

static void run_line(void);

struct errand {
    size_t n;
    char *words[MAX_WORDS];
};

static void *run_errand(void *arg)
{
    struct errand *errand = arg;

    n_words = errand->n;
    memcpy(words, errand->words, sizeof(words));
    run_line();
    fflush(stdout);
    for (size_t i = 0; i < errand->n; i++)
        free(errand->words[i]);
    free(errand);
    return NULL;
}

static void join_background(void)
{
    if (in_background)
        pthread_join(background, NULL);
    in_background = false;
}

/* thread|background LINE: run the rest of the line on a thread of its own. "background" returns at
 * once; the line's result is printed when it ends. One runs at a time. */
static void run_in_thread(void)
{
    struct errand *errand = calloc(1, sizeof(*errand));

    join_background();
    for (size_t i = 1; i < n_words; i++)
        errand->words[errand->n++] = strdup(words[i]);
    in_background = pthread_create(&background, NULL, run_errand, errand) == 0;
    if (!asked("background"))
        join_background();
}

/* child LINE: run the rest of the line in a forked child, which then closes the store, and print
 * what it prints and its status. It has 20 s. */
static void run_in_child(void)
{
    int status = -1;
    pid_t pid;

    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        alarm(20);
        memmove(words, words + 1, --n_words * sizeof(*words));
        run_line();
        vtable->close(store);
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    printf("child %d\n", status);
}

struct publications {
    const char *name, *key;
    unsigned long times;
    int ret;
};

static void *publish_often(void *arg)
{
    struct publications *of = arg;
    uint8_t hash[MAX_KEY];
    size_t len = read_hash(of->key, hash);

    for (unsigned long i = 0; i < of->times; i++)
        if (vtable->put_chunk(store, hash, len, hash, len) < 0 ||
            vtable->put_manifest(store, of->name, hash, 0) < 0)
            of->ret = -1;
    return NULL;
}

/* publishbytwo NAME TIMES KEY: two threads at once, each puts the chunk and the manifest. */
static void publish_by_two(void)
{
    struct publications mine = {word(1), word(3), number(2), 0}, its = mine;
    pthread_t thread;

    if (pthread_create(&thread, NULL, publish_often, &its) != 0)
        its.ret = -1;
    else {
        publish_often(&mine);
        pthread_join(thread, NULL);
    }
    printf("%d %d\n", mine.ret, its.ret);
}

static void run_line(void)
{
    if (asked("thread") || asked("background"))
        run_in_thread();
    else if (asked("child"))
        run_in_child();
    else if (asked("publishbytwo"))
        publish_by_two();
    else if (asked("snapshot"))
        put_snapshot();
    else if (asked("put") || asked("publish"))
        put(asked("publish"));
    else if (asked("get") || asked("manifest"))
        get(asked("manifest"));
    else if (asked("deleteif"))
        delete_if();
    else if (asked("putmany") || asked("getmany"))
        many_values();
    else if (asked("prefetch") || asked("touch") || asked("delete") || asked("exists"))
        many();
    else if (asked("list") || asked("chunks"))
        list();
    else if (asked("refs"))
        list_refs();
    else if (asked("unpublish"))
        printf("%d\n", vtable->delete_manifest(store, word(1)));
    else if (asked("flush"))
        printf("%d\n", ext->flush(store));
    else if (asked("sweep"))
        sweep();
    else if (asked("stats"))
        print_stats();
    else
        printf("what?\n");
}

static void print_check(void *arg, const char *check, enum kvs_verdict verdict, const char *detail)
{
    (void)arg;
    printf("%s %s: %s\n",
           verdict == KVS_PASS     ? "ok"
           : verdict == KVS_FAIL   ? "FAILED"
           : verdict == KVS_ADVICE ? "advised"
                                   : "skipped",
           check, detail ? detail : "");
}

int main(int argc, char **argv)
{
    static char line[MAX_LINE];
    struct kvs_store *opened = NULL;
    int error;

    if (argc == 3 && strcmp(argv[1], "--conformance") == 0)
        return kvs_conformance(argv[2], print_check, NULL) != 0;
    error = argc == 2 ? kvs_open(argv[1], &opened) : -EINVAL;

    printf("%d\n", error);
    fflush(stdout);
    if (error)
        return 1;
    store = kvs_backend(opened, &vtable, &ext);
    while (fgets(line, sizeof(line), stdin)) {
        n_words = 0;
        for (char *at = strtok(line, " \n"); at && n_words < MAX_WORDS; at = strtok(NULL, " \n"))
            words[n_words++] = at;
        if (n_words)
            run_line();
        fflush(stdout);
    }
    join_background();
    kvs_close(opened);
    return 0;
}
