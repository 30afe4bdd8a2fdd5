// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir store bench`: durable saves and verified restores, beside the disk's speed with the same
 * bytes in one plain file. Each round uses other noise, so that a cold save is cold.
 */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/format.h"
#include "cli/store/store.h"
#include "store/backend/uri.h"

#define MAX_ROUNDS 99

enum figure { RAW_WRITE, COLD, WARM, RAW_READ, RESTORE, N_FIGURES };
static const char *const FIGURES[N_FIGURES] = {"raw_write", "cold", "warm", "raw_read", "restore"};
static const char *const WORDS[N_FIGURES] = {"plain file, write + fdatasync", "save, all of it new",
                                             "save, all there already", "plain file, read",
                                             "restore, verified"};

struct bench {
    struct kc_store_call *call;
    char *data;
    size_t len, at;
    char folder[4096], name[64];
    double seconds[N_FIGURES][MAX_ROUNDS];
    uint64_t n_chunks;
};

static void fill(struct bench *b, uint64_t seed)
{
    uint64_t state = seed * 2 + 1;

    for (size_t i = 0; i < b->len; i += sizeof(state)) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(b->data + i, &state, KV_MIN(sizeof(state), b->len - i));
    }
}

static int64_t read_data(void *arg, void *buf, size_t cap)
{
    struct bench *b = arg;
    size_t n = KV_MIN(cap, b->len - b->at);

    memcpy(buf, b->data + b->at, n);
    b->at += n;
    return (int64_t)n;
}

static int compare_data(void *arg, const void *data, size_t len)
{
    struct bench *b = arg;

    if (len > b->len - b->at || memcmp(b->data + b->at, data, len) != 0)
        return -EBADMSG;
    b->at += len;
    return 0;
}

static int save(struct bench *b, double *ret)
{
    struct kvs_save_opts opts = {.size = sizeof(opts),
                                 .format = KVS_FORMAT_BYTES,
                                 .chunk_bytes = (uint32_t)b->call->opts.chunk,
                                 .total_bytes = b->len,
                                 .progress = kc_bar_progress,
                                 .progress_arg = &b->call->bar};
    struct kvs_result result = {.size = sizeof(result)};
    uint64_t start_ns = kv_now_ns();
    int rc;

    b->call->bar.start_ns = 0;
    b->at = 0;
    rc = kvs_save(b->call->store, b->name, read_data, b, &opts, &result);
    *ret = (double)(kv_now_ns() - start_ns) / 1e9;
    b->n_chunks = result.n_chunks;
    return rc;
}

static int restore(struct bench *b, double *ret)
{
    struct kvs_restore_opts opts = {
        .size = sizeof(opts), .progress = kc_bar_progress, .progress_arg = &b->call->bar};
    uint64_t start_ns = kv_now_ns();
    int rc;

    b->call->bar.start_ns = 0;
    b->at = 0;
    rc = kvs_restore(b->call->store, b->name, compare_data, b, &opts, NULL);
    *ret = (double)(kv_now_ns() - start_ns) / 1e9;
    return rc;
}

static int write_all(int fd, const char *data, size_t len)
{
    while (len > 0) {
        ssize_t n = write(fd, data, KV_MIN(len, (size_t)1 << 20));

        if (n < 0)
            return -errno;
        data += n;
        len -= (size_t)n;
    }
    return 0;
}

/* Read the bytes back and compare them, as a restore does. */
static int read_all(struct bench *b, int fd)
{
    char *buf = malloc(1 << 20);
    ssize_t n = 1;
    int rc = buf ? 0 : -ENOMEM;

    b->at = 0;
    if (rc == 0 && lseek(fd, 0, SEEK_SET) < 0)
        rc = -errno;
    while (rc == 0 && n > 0) {
        n = read(fd, buf, 1 << 20);
        rc = n < 0 ? -errno : compare_data(b, buf, (size_t)n);
    }
    free(buf);
    return rc;
}

static int yardstick(struct bench *b, double *write_s, double *read_s)
{
    char path[4200];
    uint64_t start_ns;
    int fd, rc;

    snprintf(path, sizeof(path), "%s/kvasir-bench-XXXXXX", b->folder);
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    unlink(path);
    start_ns = kv_now_ns();
    rc = write_all(fd, b->data, b->len);
    if (rc == 0 && fdatasync(fd) != 0)
        rc = -errno;
    *write_s = (double)(kv_now_ns() - start_ns) / 1e9;
    start_ns = kv_now_ns();
    if (rc == 0)
        rc = read_all(b, fd);
    *read_s = (double)(kv_now_ns() - start_ns) / 1e9;
    close(fd);
    return rc;
}

/* Remove the object and, where the backend can, its chunks: no other object has such noise. */
static void clean_up(struct bench *b)
{
    struct kvs_store *store = b->call->store;
    const struct kvs_chunk_ref *chunks;
    struct kvs_manifest *m;
    size_t n;

    if (kvs_manifest_get(store, b->name, &m) == 0) {
        chunks = kvs_manifest_chunks(m, &n);
        kvs_delete_manifest(store, b->name);
        for (size_t i = 0; i < n; i++)
            if (kvs_delete_chunk(store, chunks[i].key, sizeof(chunks[i].key)) == -ENOTSUP)
                break;
        kvs_manifest_free(m);
    }
}

static int run_round(struct bench *b, size_t round)
{
    uint64_t seed = kv_wall_ns() ^ ((uint64_t)getpid() << 32);
    int rc;

    snprintf(b->name, sizeof(b->name), "kvasir-bench-%d-%zu", (int)getpid(), round);
    fill(b, seed);
    rc = yardstick(b, &b->seconds[RAW_WRITE][round], &b->seconds[RAW_READ][round]);
    if (rc == 0)
        rc = save(b, &b->seconds[COLD][round]);
    if (rc == 0)
        rc = save(b, &b->seconds[WARM][round]);
    if (rc == 0)
        rc = restore(b, &b->seconds[RESTORE][round]);
    clean_up(b);
    return rc == 0 && kc_bar_interrupted() ? -ECANCELED : rc;
}

/*
 * Choose a folder for the plain file: on the disk of the store, if it has one, but outside of it.
 */
static void choose_folder(struct bench *b)
{
    const char *uri = b->call->uri, *tmp = getenv("TMPDIR"), *question = strchr(uri, '?');
    size_t len = question ? (size_t)(question - uri) : strlen(uri);
    struct kvs_uri parts;

    if (b->call->opts.yardstick)
        snprintf(b->folder, sizeof(b->folder), "%s", b->call->opts.yardstick);
    else if (kvs_uri_parse(uri, &parts, NULL) == 0 && parts.path && len < sizeof(b->folder) - 4)
        snprintf(b->folder, sizeof(b->folder), "%.*s/..", (int)len, uri);
    else
        snprintf(b->folder, sizeof(b->folder), "%s", tmp ? tmp : "/tmp");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static int report(struct bench *b, size_t rounds)
{
    struct kc_store_call *call = b->call;
    double median[N_FIGURES];

    for (unsigned i = 0; i < N_FIGURES; i++) {
        qsort(b->seconds[i], rounds, sizeof(double), by_value);
        median[i] = b->seconds[i][rounds / 2];
    }
    if (call->opts.json) {
        kc_store_json_begin(call);
        kc_store_json_u64(call, "bytes", b->len);
        kc_store_json_u64(call, "chunks", b->n_chunks);
        kc_store_json_u64(call, "rounds", rounds);
        for (unsigned i = 0; i < N_FIGURES; i++) {
            char key[32];

            snprintf(key, sizeof(key), "%s_s", FIGURES[i]);
            kc_store_json_double(call, key, median[i]);
        }
        return kc_store_json_end(call, stdout, KC_STORE_OK);
    }
    printf("%s in %s chunks, median of %zu:\n\n", kc_bytes((double)b->len).s,
           kc_count(b->n_chunks).s, rounds);
    for (unsigned i = 0; i < N_FIGURES; i++) {
        double plain = median[i >= RAW_READ ? RAW_READ : RAW_WRITE];

        printf("  %-31s %8s  %10s/s", WORDS[i], kc_duration((uint64_t)(median[i] * 1e9)).s,
               kc_bytes((double)b->len / median[i]).s);
        if (i != RAW_READ && i != RAW_WRITE)
            printf("  %.2f times the plain file", median[i] / plain);
        putchar('\n');
    }
    return KC_STORE_OK;
}

int kc_store_bench(struct kc_store_call *call)
{
    size_t rounds = call->opts.rounds ? call->opts.rounds : 3;
    struct bench *b = calloc(1, sizeof(*b));
    int rc, status;

    if (!b)
        return kc_store_fail(call, call->label, -ENOMEM);
    b->call = call;
    b->len = call->opts.size ? call->opts.size : 96 << 20;
    b->data = malloc(b->len);
    rc = b->data ? 0 : -ENOMEM;
    choose_folder(b);
    for (size_t i = 0; i < rounds && rc == 0; i++)
        rc = run_round(b, i);
    kc_bar_finish(&call->bar);
    status = rc < 0 ? kc_store_fail(call, call->label, rc) : report(b, rounds);
    free(b->data);
    free(b);
    return status;
}
