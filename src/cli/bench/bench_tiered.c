// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir bench tiered`: what a tiered store costs, and what packs gain.
 *
 *   gets    of a blob in the fast member, through the tiered store and from that member alone: two handles
 *           of one folder, in turn, CPU time of the thread
 *   packs   a prompt's blobs, one by one in batches and packed, from the member --member names
 *
 * Every blob that comes is compared. All that was stored is removed in the end.
 */
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

#include "base/args/args.h"
#include "base/core/clock.h"
#include "base/json/json.h"
#include "cli/commands.h"
#include "cli/show/format.h"
#include "store/backend/store.h"

enum { KEY = 16, ROUNDS_MAX = 99, RUN = 40, RUNS = 24 };

struct opts {
    const char *member, *folder;
    uint64_t blobs, blob, rounds;
    bool json;
};

#define AT(field) offsetof(struct opts, field)
static const struct kv_arg ARGS[] = {
    {.name = "member",
     .type = KV_ARG_STR,
     .offset = AT(member),
     .value = "URI",
     .help = "Member that holds the prompt: a bucket, or a folder by its absolute path. Default: "
             "a folder."},
    {.name = "blobs",
     .type = KV_ARG_U64,
     .offset = AT(blobs),
     .value = "N",
     .min = 2,
     .max = 4096,
     .help = "Blobs of the prompt. Default: 256."},
    {.name = "blob",
     .type = KV_ARG_SIZE,
     .offset = AT(blob),
     .value = "SIZE",
     .min = 64,
     .max = 4 << 20,
     .help = "Bytes of each. Default: 64KiB."},
    {.name = "rounds",
     .type = KV_ARG_U64,
     .offset = AT(rounds),
     .value = "N",
     .min = 1,
     .max = ROUNDS_MAX,
     .help = "Number of runs; their medians are shown. Default: 9."},
    {.name = "folder",
     .type = KV_ARG_STR,
     .offset = AT(folder),
     .value = "DIR",
     .help = "Where folders of the store are made. Default: $TMPDIR or /tmp."},
    {.name = "json", .type = KV_ARG_FLAG, .offset = AT(json), .help = "One JSON object."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir bench tiered",
    .usage = "[OPTION ...]",
    .brief = "gets through a tiered store, and packs",
    .summary = "Compares gets through a tiered store with gets from its fast member alone, and a\n"
               "prompt read from packs with the same read chunk by chunk in batches.",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

struct bench {
    struct opts opts;
    char dir[PATH_MAX - 256];
    char member[PATH_MAX];            /* URI of the prompt's member */
    struct kvs_store *alone, *tiered; /* of that member */
    uint8_t *data;
    /* [0]: 64 KiB, [1]: 1 MiB */
    double of_alone[2], least[2], get_us[2], alone_us[2];
    double singly_ms, packed_ms, first_ms;
    uint64_t singly_requests, packed_requests, first_requests, packs;
};

static int fail(const char *what, int rc)
{
    fprintf(stderr, "kvasir bench tiered: %s: %s\n", what, strerror(-rc));
    return rc;
}

/* -- stores ------------------------------------------------------------------------------------ */

static int open_tiered(const struct bench *b, const char *name, const char *first,
                       const char *second, struct kvs_store **ret)
{
    char path[PATH_MAX], uri[PATH_MAX + 16];
    FILE *file;
    int rc;

    snprintf(path, sizeof(path), "%s/%s.conf", b->dir, name);
    file = fopen(path, "we");
    if (!file)
        return fail(path, -errno);
    fprintf(file, "linger = 200ms\n[first]\nuri = %s\n", first);
    if (second)
        fprintf(file, "[second]\nuri = %s\n", second);
    if (fclose(file) != 0)
        return fail(path, -errno);
    snprintf(uri, sizeof(uri), "tiered:%s", path);
    rc = kvs_open(uri, ret);
    return rc < 0 ? fail(uri, rc) : 0;
}

/* Bytes of blob @n; no two are alike. */
static void fill(uint8_t *data, size_t len, uint64_t n)
{
    uint64_t x = n * UINT64_C(0x9e3779b97f4a7c15) + 1;

    for (size_t i = 0; i < len; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(data + i, &x, KV_MIN(len - i, sizeof(x)));
    }
}

/* Store @n blobs of @len bytes, and make their keys. Returns the keys, or NULL. */
static uint8_t *store_blobs(struct bench *b, struct kvs_store *store, size_t n, size_t len)
{
    uint8_t *keys = malloc(n * KEY);
    int rc = keys && getrandom(keys, n * KEY > 256 ? 256 : n * KEY, 0) > 0 ? 0 : -ENOMEM;

    for (size_t i = 0; i < n && rc >= 0; i++) {
        if (i)
            memcpy(keys + i * KEY, keys, KEY);
        memcpy(keys + i * KEY + KEY - sizeof(uint32_t), &(uint32_t){(uint32_t)i}, sizeof(uint32_t));
        fill(b->data, len, i);
        rc = kvs_put_chunk(store, keys + i * KEY, KEY, b->data, len);
    }
    if (rc >= 0)
        rc = kvs_put_manifest(store, "kvasir-bench-tiered", "", 0);
    if (rc >= 0)
        return keys;
    fail("can't store blobs", rc);
    free(keys);
    return NULL;
}

/* -- gets -------------------------------------------------------------------------------------- */

static uint64_t cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * KV_NS_PER_S + (uint64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *of, size_t n)
{
    qsort(of, n, sizeof(*of), by_value);
    return of[n / 2];
}

/* Add the CPU time of @n gets to *@ret, in microseconds each. */
static int time_gets(struct kvs_store *store, const uint8_t *keys, size_t n, size_t len,
                     double *ret)
{
    uint64_t begin = cpu_ns();

    for (size_t i = 0; i < n; i++) {
        size_t got = 0;
        void *data;
        int rc = kvs_get_chunk(store, keys + i * KEY, KEY, &data, &got);

        if (rc < 0 || got != len)
            return fail("get", rc < 0 ? rc : -EBADMSG);
        free(data);
    }
    *ret += (double)(cpu_ns() - begin) / 1e3 / (double)n;
    return 0;
}

/* Short runs in turn: what disturbs the machine disturbs both. */
static int compare_gets(struct bench *b, struct kvs_store *alone, struct kvs_store *tiered,
                        size_t at, size_t n, size_t len)
{
    uint8_t *keys = store_blobs(b, tiered, n, len);
    double ratios[ROUNDS_MAX], ours[ROUNDS_MAX], theirs[ROUNDS_MAX];
    size_t rounds = (size_t)b->opts.rounds;
    int rc = keys ? 0 : -EIO;

    for (size_t i = 0; i < rounds && rc == 0; i++) {
        double t = 0, a = 0;

        for (int k = 0; k < RUNS && rc == 0; k++) {
            rc = time_gets(k % 2 ? alone : tiered, keys, n, len, k % 2 ? &a : &t);
            rc = rc ? rc : time_gets(k % 2 ? tiered : alone, keys, n, len, k % 2 ? &t : &a);
        }
        ours[i] = t / RUNS;
        theirs[i] = a / RUNS;
        ratios[i] = t / a;
    }
    free(keys);
    if (rc < 0)
        return rc;
    b->of_alone[at] = median(ratios, rounds);
    b->least[at] = ratios[0];
    b->get_us[at] = median(ours, rounds);
    b->alone_us[at] = median(theirs, rounds);
    return 0;
}

static int bench_gets(struct bench *b)
{
    char fast[PATH_MAX], slow[PATH_MAX];
    struct kvs_store *alone = NULL, *tiered = NULL;
    int rc;

    snprintf(fast, sizeof(fast), "%s/fast", b->dir);
    snprintf(slow, sizeof(slow), "%s/slow", b->dir);
    rc = open_tiered(b, "gets", fast, slow, &tiered);
    if (rc == 0) {
        rc = kvs_open(fast, &alone);
        if (rc < 0)
            fail(fast, rc);
    }
    if (rc == 0)
        rc = compare_gets(b, alone, tiered, 0, RUN, 64 << 10);
    if (rc == 0)
        rc = compare_gets(b, alone, tiered, 1, RUN / 4, 1 << 20);
    kvs_close(alone);
    kvs_close(tiered);
    return rc;
}

/* -- packs ------------------------------------------------------------------------------------- */

static uint64_t requests_of(struct kvs_store *store)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    return kvs_stats(store, &stats) < 0 ? 0 : stats.round_trips;
}

/* Read the prompt by one batch, and compare. Sets milliseconds and requests. */
static int read_prompt(struct bench *b, struct kvs_store *store, const uint8_t *keys,
                       double *ret_ms, uint64_t *ret_requests)
{
    size_t n = (size_t)b->opts.blobs, len = (size_t)b->opts.blob, *lens = calloc(n, sizeof(*lens));
    void **data = calloc(n, sizeof(*data));
    uint64_t begin = kv_now_ns(), requests = requests_of(store);
    int rc = data && lens ? kvs_get_chunks(store, keys, KEY, n, data, lens) : -ENOMEM;

    *ret_ms = (double)(kv_now_ns() - begin) / 1e6;
    *ret_requests = requests_of(store) - requests;
    if (rc >= 0 && (size_t)rc != n)
        rc = -ENOENT;
    for (size_t i = 0; data && i < n; i++) {
        fill(b->data, len, i);
        if (rc >= 0 && (lens[i] != len || memcmp(data[i], b->data, len) != 0))
            rc = -EBADMSG;
        free(data[i]);
    }
    free(data);
    free(lens);
    return rc < 0 ? fail("a prompt can't be read", rc) : 0;
}

static int pack(struct bench *b, const uint8_t *keys)
{
    kv_store_pack_opts opts = {.size = sizeof(opts), .to = "first", .min_bytes = 1};
    kv_store_packed packed = {.size = sizeof(packed)};
    int rc = kvs_pack_chunks(b->tiered, &opts, keys, KEY, (size_t)b->opts.blobs, &packed);

    if (rc == 0 && packed.removed != b->opts.blobs)
        rc = -EIO;
    b->packs = packed.packs;
    return rc < 0 ? fail("the prompt can't be packed", rc) : 0;
}

/* Read both prompts in turn. The first packed read is by a handle that knows nothing of packs. */
static int compare_reads(struct bench *b, const uint8_t *single, const uint8_t *packed)
{
    double singly[ROUNDS_MAX], together[ROUNDS_MAX];
    struct kvs_store *fresh = NULL;
    int rc = open_tiered(b, "fresh", b->member, NULL, &fresh);

    if (rc == 0)
        rc = read_prompt(b, fresh, packed, &b->first_ms, &b->first_requests);
    for (size_t i = 0; i < b->opts.rounds && rc == 0; i++) {
        rc = read_prompt(b, b->alone, single, &singly[i], &b->singly_requests);
        rc = rc ? rc : read_prompt(b, fresh, packed, &together[i], &b->packed_requests);
    }
    if (rc == 0) {
        b->singly_ms = median(singly, (size_t)b->opts.rounds);
        b->packed_ms = median(together, (size_t)b->opts.rounds);
    }
    kvs_close(fresh);
    return rc;
}

/* True for keys of other programs. All of a prompt's begin alike. */
static int is_other(void *arg, const uint8_t *hash, size_t hash_len)
{
    const uint8_t *const *keys = arg;
    bool ours = false;

    for (size_t i = 0; i < 2; i++)
        ours |= keys[i] && hash_len == KEY && memcmp(hash, keys[i], KEY - sizeof(uint32_t)) == 0;
    return !ours;
}

/* Delete single blobs and packs of both prompts, and nothing else. */
static void clean_up(struct bench *b, const uint8_t *single, const uint8_t *packed)
{
    const uint8_t *keys[2] = {single, packed};
    kv_store_swept swept = {.size = sizeof(swept)};

    kvs_delete_manifest(b->alone, "kvasir-bench-tiered");
    kvs_close(b->alone); /* a handle protects what it put */
    kvs_close(b->tiered);
    b->alone = b->tiered = NULL;
    if (open_tiered(b, "packs", b->member, NULL, &b->tiered) == 0)
        b->tiered->ext.sweep_chunks(b->tiered->backend, 0, is_other, keys, &swept);
    kvs_close(b->tiered);
}

static int bench_packs(struct bench *b)
{
    size_t n = (size_t)b->opts.blobs, len = (size_t)b->opts.blob;
    uint8_t *single = NULL, *packed = NULL;
    int rc;

    if (b->opts.member)
        snprintf(b->member, sizeof(b->member), "%s", b->opts.member);
    else
        snprintf(b->member, sizeof(b->member), "%s/prompt", b->dir);
    rc = kvs_open(b->member, &b->alone);
    if (rc < 0)
        return fail("--member", rc);
    rc = open_tiered(b, "packs", b->member, NULL, &b->tiered);
    if (rc == 0)
        rc = (single = store_blobs(b, b->alone, n, len)) ? 0 : -EIO;
    if (rc == 0)
        rc = (packed = store_blobs(b, b->alone, n, len)) ? 0 : -EIO;
    if (rc == 0)
        rc = pack(b, packed);
    if (rc == 0)
        rc = compare_reads(b, single, packed);
    clean_up(b, single, packed);
    free(single);
    free(packed);
    return rc;
}

/* -- output ------------------------------------------------------------------------------------ */

static void print(const struct bench *b)
{
    static const char *const LENS[] = {"64 KiB", "1 MiB"};

    printf("gets from the fast member, CPU time, median of %" PRIu64 " rounds:\n", b->opts.rounds);
    for (size_t i = 0; i < 2; i++)
        printf("  %-7s  through tiered: %8.2f us   alone %8.2f us   %.3f times (least %.3f)\n",
               LENS[i], b->get_us[i], b->alone_us[i], b->of_alone[i], b->least[i]);
    printf("a prompt of %" PRIu64 " blobs of %s:\n", b->opts.blobs,
           kc_bytes((double)b->opts.blob).s);
    printf("  chunk by chunk, a batch   %9.2f ms  %5" PRIu64 " requests\n", b->singly_ms,
           b->singly_requests);
    printf("  %" PRIu64 " packs                   %9.2f ms  %5" PRIu64
           " requests  %.3f of the time\n",
           b->packs, b->packed_ms, b->packed_requests, b->packed_ms / b->singly_ms);
    printf("  the first of a handle     %9.2f ms  %5" PRIu64 " requests\n", b->first_ms,
           b->first_requests);
}

static void print_json(const struct bench *b)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_double(&json, "of_alone_64k", b->of_alone[0]);
    kv_json_member_double(&json, "of_alone_1m", b->of_alone[1]);
    kv_json_member_double(&json, "get_us_64k", b->get_us[0]);
    kv_json_member_double(&json, "get_us_1m", b->get_us[1]);
    kv_json_member_u64(&json, "blobs", b->opts.blobs);
    kv_json_member_u64(&json, "blob_bytes", b->opts.blob);
    kv_json_member_u64(&json, "packs", b->packs);
    kv_json_member_double(&json, "singly_ms", b->singly_ms);
    kv_json_member_u64(&json, "singly_requests", b->singly_requests);
    kv_json_member_double(&json, "packed_ms", b->packed_ms);
    kv_json_member_u64(&json, "packed_requests", b->packed_requests);
    kv_json_member_double(&json, "first_ms", b->first_ms);
    kv_json_member_u64(&json, "first_requests", b->first_requests);
    kv_json_end_object(&json);
    puts(kv_buf_cstr(&out));
    kv_buf_fini(&out);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int run(struct bench *b)
{
    const char *place = b->opts.folder ? b->opts.folder : getenv("TMPDIR");
    int rc;

    snprintf(b->dir, sizeof(b->dir), "%s/kvasir-bench-XXXXXX", place ? place : "/tmp");
    if (b->dir[0] != '/')
        return fail("--folder is no absolute path", -EINVAL);
    if (!mkdtemp(b->dir))
        return fail(b->dir, -errno);
    b->data = malloc(KV_MAX(b->opts.blob, UINT64_C(1) << 20) + 8);
    rc = b->data ? bench_gets(b) : -ENOMEM;
    if (rc == 0)
        rc = bench_packs(b);
    free(b->data);
    nftw(b->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return rc;
}

int kc_bench_tiered_main(int argc, char **argv)
{
    struct bench b = {.opts = {.blobs = 256, .blob = 64 << 10, .rounds = 9}};
    struct kv_error error = {0};
    int rc = kv_args_parse(&PROGRAM, argc, argv, &b.opts, NULL, &error);

    if (rc < 0)
        fprintf(stderr, "kvasir bench tiered: %s\n", error.text);
    if (rc != 0)
        return rc < 0 ? 2 : 0;
    if (run(&b) < 0)
        return 1;
    if (b.opts.json)
        print_json(&b);
    else
        print(&b);
    return 0;
}
