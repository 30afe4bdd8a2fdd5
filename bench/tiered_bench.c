// SPDX-License-Identifier: Apache-2.0
/*
 * Gets through a tiered store of a blob in its fast member, in CPU time of the calling thread. The
 * yardstick is the same get from that member alone. Both handles are open at once, and take turns. Bytes come
 * from the page cache, so the difference is the tiered store's own time. Printed: the median of the
 * rounds' ratios, with the least and the greatest.
 *
 * Works in $KV_BENCH_DIR, else $TMPDIR, else the current directory.
 */
#include <ftw.h>
#include <limits.h>

#include "store_measure.h"

enum { RUN = 200, RUNS = 6 };

static char dir[PATH_MAX - 128];

static struct kvs_store *open_store(const char *uri)
{
    struct kvs_store *store;
    int rc = kvs_open(uri, &store);

    if (rc)
        bench_die(uri, rc);
    return store;
}

/* Open the folder alone, and a tiered store that has it as its first member. */
static void open_both(struct kvs_store **ret_alone, struct kvs_store **ret_tiered)
{
    char path[PATH_MAX], uri[PATH_MAX + 16];
    FILE *file;

    snprintf(path, sizeof(path), "%s/kv.conf", dir);
    file = fopen(path, "w");
    if (!file)
        bench_die(path, -errno);
    fprintf(file, "[fast]\nuri = %s/fast\n[cold]\nuri = %s/cold\n", dir, dir);
    fclose(file);
    snprintf(uri, sizeof(uri), "tiered:%s", path);
    *ret_tiered = open_store(uri);
    snprintf(path, sizeof(path), "%s/fast", dir);
    *ret_alone = open_store(path);
}

typedef void (*get_fn)(struct kvs_store *store, const struct load *load, size_t i);

static void get_whole(struct kvs_store *store, const struct load *load, size_t i)
{
    void *got;
    size_t len;
    int rc = kvs_get_chunk(store, load->keys + i * KEY, KEY, &got, &len);

    if (rc < 0 || len != load->len)
        bench_die("get", rc < 0 ? rc : -EBADMSG);
    free(got);
}

static void get_into(struct kvs_store *store, const struct load *load, size_t i)
{
    static uint8_t memory[1 << 20];
    const struct iovec part = {memory, load->len};
    int64_t len;

    if (kvs_get_chunks_into(store, load->keys + i * KEY, KEY, 1, &part, NULL, &len) != 1 ||
        (size_t)len != load->len)
        bench_die("get", (int)len);
}

/* CPU time of the calling thread for @n gets, in nanoseconds each. */
static double gets(struct kvs_store *store, const struct load *load, get_fn get, size_t n)
{
    uint64_t begin = bench_thread_cpu_ns();

    for (size_t i = 0; i < n; i++)
        get(store, load, i % load->n);
    return (double)(bench_thread_cpu_ns() - begin) / (double)n;
}

static void compare(struct kvs_store *alone, struct kvs_store *tiered, const struct load *load,
                    const char *name, get_fn get)
{
    size_t n = load->len > 100000 ? RUN / 10 : RUN;
    struct bench_samples ratios = {.n = 0}, ours = {.n = 0}, theirs = {.n = 0};
    double ratio;

    for (int i = 0; i < BENCH_ROUNDS_MAX; i++) {
        double t = 0, a = 0;

        for (int k = 0; k < RUNS;
             k++) { /* short runs in turn: a noisy machine disturbs both alike */
            t += gets(tiered, load, get, n);
            a += gets(alone, load, get, n);
            a += gets(alone, load, get, n);
            t += gets(tiered, load, get, n);
        }
        bench_sample(&ratios, t / a);
        bench_sample(&ours, t / (2 * RUNS));
        bench_sample(&theirs, a / (2 * RUNS));
    }
    ratio = bench_middle(&ratios); /* and sorts them */
    bench_line("tiered get",
               "'call': '%s', 'bytes': %zu, 'cpu_us': %.2f, 'alone_cpu_us': %.2f, "
               "'of_alone': %.3f, 'least': %.3f, 'greatest': %.3f",
               name, load->len, bench_middle(&ours) / 1e3, bench_middle(&theirs) / 1e3, ratio,
               ratios.of[0], ratios.of[ratios.n - 1]);
}

static void bench_len(struct kvs_store *alone, struct kvs_store *tiered, size_t n, size_t len)
{
    struct load load;
    size_t hits;

    load_init(&load, n, len);
    load_next(&load);
    load_save(tiered, &load, &hits);
    compare(alone, tiered, &load, "kvs_get_chunk", get_whole);
    compare(alone, tiered, &load, "kvs_get_chunks_into", get_into);
    load_fini(&load);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

int main(int argc, char **argv)
{
    const char *place = getenv("KV_BENCH_DIR") ? getenv("KV_BENCH_DIR") : getenv("TMPDIR");
    struct kvs_store *alone, *tiered;
    char here[PATH_MAX - 256];

    bench_usage(argc, argv, NULL);
    if (!place && !(place = getcwd(here, sizeof(here))))
        bench_die("the current directory", -errno);
    snprintf(dir, sizeof(dir), "%s/kv-tiered-bench-XXXXXX", place);
    if (!mkdtemp(dir))
        bench_die(dir, -errno);
    open_both(&alone, &tiered);
    bench_len(alone, tiered, 256, 64 << 10);
    bench_len(alone, tiered, 32, 1 << 20);
    kvs_close(tiered);
    kvs_close(alone);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}
