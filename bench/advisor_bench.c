// SPDX-License-Identifier: Apache-2.0
/*
 * The advisor's index and policies.
 *
 *     advisor_bench [TRACE.jsonl ...]    Mooncake format; without one, events alone
 *
 * "events": messages of NATS (binary records of kv_plane.h) read and applied to an index, in CPU time of
 * one thread; memory a tracked block. It runs with the curves of /advise, and without them. The keys of blobs in
 * the store are computed. Three quarters of the records store new blocks, a quarter uses old ones.
 *
 * "moves": blobs of 1 MiB from one file store to another, verified, in GB/s; yardstick: cp
 * --reflink=never and fsync of the same files, in turns, in $KV_BENCH_DIR or the current folder.
 *
 * "save": the state of 10 million blobs into a file. The pause is the time for which events and moves wait;
 * without a copy of the process that were the time of the whole save.
 *
 * "hit rate": share of a trace's references that find their block in the fast member. It has room for 5,
 * 10 and 20 % of all blocks, and a used block is there at once. Yardsticks in the same run: LRU, and
 * Belady's bound (the block whose next use is farthest leaves, or isn't taken in). A request looks its
 * whole prompt up, then uses its blocks from the last to the first, as in advisor/worth/curve.h.
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "advisor/advice.h"
#include "advisor/feed.h"
#include "advisor/index/index.h"
#include "advisor/index/policy.h"
#include "advisor/state.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "cli/replay/trace.h"
#include "plane/record.h"
#include "support.h"
#include "tiered/move.h"

enum { BLOCK_BYTES = 65536, SIZES = 3, SAMPLES = 65536 };
static const unsigned percents[SIZES] = {5, 10, 20};

/* -- hit rates --------------------------------------------------------------------------------- */

struct load {
    struct kc_trace trace;
    uint64_t *names;
    uint32_t *next; /* request that uses the same block next; UINT32_MAX: none */
    uint32_t *ids;  /* blocks numbered from 0, as trace.ids */
    uint32_t n_blocks;
};

static int by_name(const void *a, const void *b)
{
    uint64_t x = **(const uint64_t *const *)a, y = **(const uint64_t *const *)b;

    return x < y ? -1 : x > y;
}

/* Number the blocks, and find the next use of each reference. */
static void number(struct load *load)
{
    size_t n = load->trace.n_ids;
    uint64_t **order = malloc(n * sizeof(*order));
    uint32_t *last;

    load->ids = malloc(n * sizeof(*load->ids));
    load->next = malloc(n * sizeof(*load->next));
    if (!order || !load->ids || !load->next)
        bench_die("a trace", -ENOMEM);
    for (size_t i = 0; i < n; i++)
        order[i] = load->names + i;
    qsort(order, n, sizeof(*order), by_name);
    for (size_t i = 0; i < n; i++) {
        load->n_blocks += i == 0 || *order[i] != *order[i - 1];
        load->ids[order[i] - load->names] = load->n_blocks - 1;
    }
    free(order);
    last = malloc(load->n_blocks * sizeof(*last));
    if (last)
        memset(last, 0xff, load->n_blocks * sizeof(*last));
    else
        bench_die("a trace", -ENOMEM);
    for (size_t r = load->trace.n_requests; r-- > 0;)
        for (uint32_t i = 0; i < load->trace.requests[r].n; i++) {
            size_t at = load->trace.requests[r].first + i;

            load->next[at] = last[load->ids[at]];
            last[load->ids[at]] = (uint32_t)r;
        }
    free(last);
}

static void read_load(struct load *load, const char *path)
{
    struct kv_error error = {0};
    int rc = kc_trace_read(path, &load->trace, &error);

    if (rc)
        bench_die(error.text[0] ? error.text : "a trace", rc);
    load->names = malloc(load->trace.n_ids * sizeof(*load->names));
    if (!load->names)
        bench_die("names", -ENOMEM);
    kc_trace_names(&load->trace, load->names);
    number(load);
}

static void key_of(uint64_t name, uint8_t ret[KVA_KEY])
{
    XXH128_hash_t hash = XXH3_128bits(&name, sizeof(name));

    memcpy(ret, &hash, KVA_KEY);
}

static double play(const struct load *load, const char *policy, uint64_t room)
{
    struct kva_index_opts opts = {.n_members = 2,
                                  .limit = {room * BLOCK_BYTES, UINT64_MAX},
                                  .policy = kva_policy_find(policy)};
    uint8_t key[KVA_KEY];
    struct kva_told told = {.key = key, .bytes = BLOCK_BYTES};
    struct kva_index *index;
    uint64_t hits = 0;
    int rc = kva_index_create(&opts, &index);

    for (size_t r = 0; r < load->trace.n_requests && !rc; r++) {
        const struct kc_request *request = &load->trace.requests[r];

        for (uint32_t i = 0; i < request->n; i++) {
            const struct kva_block *b;

            key_of(load->names[request->first + i], key);
            b = kva_index_find(index, key);
            hits += b && b->want == 0;
        }
        for (uint32_t i = request->n; i-- > 0;) {
            told.now_s = (uint32_t)(request->timestamp_ms / 1000);
            key_of(load->names[request->first + i], key);
            if (!kva_index_use(index, key, told.now_s) && kva_index_tell(index, &told) < 0)
                rc = -ENOMEM;
        }
    }
    if (rc)
        bench_die("an index", rc);
    kva_index_destroy(index);
    return (double)hits / (double)load->trace.n_ids;
}

/* -- Belady's bound ---------------------------------------------------------------------------- */

/* Resident blocks in a heap: the one used farthest in the future on top. */
struct heap {
    uint32_t *items, *place, *key; /* place: of a block in items, + 1; 0: none */
    uint32_t n, room;
};

static void heap_swap(struct heap *h, uint32_t a, uint32_t b)
{
    uint32_t item = h->items[a];

    h->items[a] = h->items[b];
    h->items[b] = item;
    h->place[h->items[a]] = a + 1;
    h->place[h->items[b]] = b + 1;
}

static void heap_settle(struct heap *h, uint32_t at)
{
    while (at && h->key[h->items[(at - 1) / 2]] < h->key[h->items[at]]) {
        heap_swap(h, at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t left = 2 * at + 1, most = at;

        if (left < h->n && h->key[h->items[left]] > h->key[h->items[most]])
            most = left;
        if (left + 1 < h->n && h->key[h->items[left + 1]] > h->key[h->items[most]])
            most = left + 1;
        if (most == at)
            return;
        heap_swap(h, at, most);
        at = most;
    }
}

static void heap_use(struct heap *h, uint32_t block, uint32_t next)
{
    h->key[block] = next;
    if (h->place[block]) {
        heap_settle(h, h->place[block] - 1);
    } else if (h->n < h->room) {
        h->items[h->n] = block;
        h->place[block] = ++h->n;
        heap_settle(h, h->n - 1);
    } else if (h->key[h->items[0]] > next) {
        h->place[h->items[0]] = 0;
        h->items[0] = block;
        h->place[block] = 1;
        heap_settle(h, 0);
    }
}

static double bound(const struct load *load, uint32_t room)
{
    struct heap h = {.items = malloc((room + 1) * sizeof(uint32_t)),
                     .place = calloc(load->n_blocks, sizeof(uint32_t)),
                     .key = calloc(load->n_blocks, sizeof(uint32_t)),
                     .room = room};
    uint64_t hits = 0;

    if (!h.items || !h.place || !h.key)
        bench_die("a heap", -ENOMEM);
    for (size_t r = 0; r < load->trace.n_requests; r++) {
        const struct kc_request *request = &load->trace.requests[r];

        for (uint32_t i = 0; i < request->n; i++)
            hits += h.place[load->ids[request->first + i]] != 0;
        for (uint32_t i = request->n; i-- > 0;)
            heap_use(&h, load->ids[request->first + i], load->next[request->first + i]);
    }
    free(h.items);
    free(h.place);
    free(h.key);
    return (double)hits / (double)load->trace.n_ids;
}

static void judge(const char *path)
{
    static const char *const names[] = {"lru", "lfu", "sieve", "s3fifo", "cost"};
    struct load load = {.names = NULL};

    read_load(&load, path);
    for (int i = 0; i < SIZES; i++) {
        uint64_t room = (uint64_t)load.n_blocks * percents[i] / 100;
        double most = bound(&load, (uint32_t)room), lru = play(&load, "lru", room);

        for (size_t k = 0; k < KV_COUNT(names); k++) {
            double hits = k ? play(&load, names[k], room) : lru;

            bench_line("advisor",
                       "'figure':'hit rate','trace':'%s','percent':%u,'policy':'%s','hits':%.4f,"
                       "'of_lru':%.3f,'of_bound':%.3f",
                       kc_trace_title(path), percents[i], names[k], hits, hits / lru, hits / most);
        }
    }
    kc_trace_fini(&load.trace);
    free(load.names);
    free(load.next);
    free(load.ids);
}

/* -- events ------------------------------------------------------------------------------------ */

enum { EVENTS = 10000000, A_MESSAGE = 1000, OLD = 4 /* every fourth uses an old block */ };

static void take(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    kva_feed_take(arg, header, record);
}

/* Write a message of events; *@next is the key of the next new block. */
static void write_message(struct kv_buf *out, const struct kvp_header *header, uint64_t *next,
                          uint64_t *random)
{
    kvp_begin(out, header);
    for (uint32_t i = 0; i < A_MESSAGE; i++) {
        uint64_t key, parent = *next - 1;
        bool old = i % OLD == 0 && *next > 1;
        struct kvp_record record = {.event = KVP_STORE,
                                    .tier = old ? KV_TIER_HOST : KV_TIER_EXTERNAL,
                                    .key_len = sizeof(key),
                                    .key = &key,
                                    .block_bytes = BLOCK_BYTES};

        *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407;
        key = old ? 1 + (*random >> 20) % (*next - 1) : (*next)++;
        if (!old && parent % 64) {
            record.parent = &parent;
            record.position = (uint32_t)(parent % 64);
        }
        record.has_prefix = true;
        record.prefix = key / 64;
        kvp_put(out, &record);
    }
    if (kvp_end(out, A_MESSAGE) < 0)
        bench_die("a message", -ENOMEM);
}

static void apply(const char *policy, bool advise)
{
    struct kva_index_opts opts = {.n_members = 2,
                                  .limit = {(uint64_t)EVENTS / 10 * BLOCK_BYTES, UINT64_MAX},
                                  .policy = kva_policy_find(policy)};
    struct kvp_header header = {.size = sizeof(header),
                                .kind = KVP_EVENTS,
                                .publisher = "kvasir.c.m.t.w",
                                .fingerprint = {1}};
    struct kva_index_stats stats;
    struct kv_buf out = KV_BUF_INIT;
    uint64_t next = 1, random = 1, n = 0;
    struct kva_index *index;
    struct kva_feed *feed;
    struct kva_advice *advice;
    double ns = 0;
    int rc = kva_index_create(&opts, &index);

    if (rc || kva_feed_create(index, &feed) || kva_advice_create(SAMPLES, &advice))
        bench_die("an index", -ENOMEM);
    if (advise)
        kva_feed_set_advice(feed, advice);
    for (; n < EVENTS; n += A_MESSAGE) {
        double start;

        header.time_ns = n * 1000;
        write_message(&out, &header, &next, &random);
        start = bench_cpu_ns();
        rc = kvp_read(out.data, out.len, NULL, take, feed);
        kva_feed_flush(feed);
        ns += bench_cpu_ns() - start;
        if (rc)
            bench_die("a message", rc);
    }
    kva_index_get_stats(index, &stats);
    bench_line("advisor",
               "'figure':'events','policy':'%s','advice':%s,'events':%llu,'events_per_s':%.0f,'"
               "blocks':%llu,"
               "'bytes_a_block':%.1f",
               policy, advise ? "true" : "false", (unsigned long long)n, (double)n / ns * 1e9,
               (unsigned long long)stats.blocks, (double)stats.memory / (double)stats.blocks);
    kva_feed_destroy(feed);
    kva_advice_destroy(advice);
    kva_index_destroy(index);
    kv_buf_fini(&out);
}

/* -- moves ------------------------------------------------------------------------------------- */

enum { FILES = 256, FILE_BYTES = 1 << 20, ROUNDS = 5, A_CALL = 16 };

static char dir[PATH_MAX - 128];

static struct kvs_store *open_member(const char *name)
{
    char path[PATH_MAX];
    struct kvs_store *store;
    int rc;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    rc = kvs_open(path, &store);
    if (rc)
        bench_die(path, rc);
    return store;
}

static void fill(struct kvs_store *store, uint8_t *keys, uint8_t *data)
{
    for (unsigned i = 0; i < FILES; i++) {
        key_of(i, keys + (size_t)i * KVA_KEY);
        for (unsigned k = 0; k < FILE_BYTES; k += 8)
            memcpy(data + k, &(uint64_t){(uint64_t)i << 32 | k}, 8);
        if (kvs_put_chunk(store, keys + (size_t)i * KVA_KEY, KVA_KEY, data, FILE_BYTES) < 0)
            bench_die("put", -EIO);
    }
    if (kvs_put_manifest(store, "kvbm-object-bench", "", 0))
        bench_die("publish", -EIO);
}

/* Copy, publish, read back and compare, as the mover does. Returns GB/s. */
static double move_all(struct kvs_store *from, unsigned round, const uint8_t *keys)
{
    char name[32];
    struct kvs_store *to;
    int each[A_CALL];
    uint64_t begin;
    double ns;

    snprintf(name, sizeof(name), "to%u", round);
    to = open_member(name);
    begin = kv_now_ns();
    for (unsigned i = 0; i < FILES; i += A_CALL)
        if (trd_move_copy(trd_alone(from), trd_alone(to), keys + (size_t)i * KVA_KEY, KVA_KEY,
                          A_CALL, each) != A_CALL)
            bench_die("a copy", -EIO);
    ns = (double)(kv_now_ns() - begin);
    kvs_close(to);
    return (double)FILES * FILE_BYTES / ns;
}

/* Copy the same files by cp, and sync each. Returns GB/s. */
static double copy_all(unsigned round)
{
    char command[3 * PATH_MAX + 200];
    uint64_t begin = kv_now_ns();

    snprintf(command, sizeof(command),
             "cp -r --reflink=never %s/from/chunks %s/cp%u && find %s/cp%u -type f -print0 | "
             "xargs -0 sync",
             dir, dir, round, dir, round);
    if (system(command)) /* NOLINT(cert-env33-c): the yardstick is cp itself */
        bench_die("cp", 0);
    return (double)FILES * FILE_BYTES / (double)(kv_now_ns() - begin);
}

static void moves(void)
{
    const char *where = getenv("KV_BENCH_DIR");
    struct bench_samples ours = {.n = 0}, cp = {.n = 0}, ratios = {.n = 0};
    uint8_t *keys = malloc(FILES * KVA_KEY), *data = malloc(FILE_BYTES);
    char command[PATH_MAX + 16];
    struct kvs_store *from;

    snprintf(dir, sizeof(dir), "%s/advisor-bench-XXXXXX", where ? where : ".");
    if (!keys || !data || !mkdtemp(dir))
        bench_die("a folder", -errno);
    from = open_member("from");
    fill(from, keys, data);
    for (unsigned round = 0; round < ROUNDS; round++) {
        double a = move_all(from, round, keys), b = copy_all(round);

        bench_sample(&ours, a);
        bench_sample(&cp, b);
        bench_sample(&ratios, a / b);
    }
    kvs_close(from);
    bench_line("advisor",
               "'figure':'moves','blobs':%d,'bytes':%d,'gb_s':%.2f,'cp_gb_s':%.2f,'of_cp':%.2f",
               FILES, FILE_BYTES, bench_middle(&ours), bench_middle(&cp), bench_middle(&ratios));
    snprintf(command, sizeof(command), "rm -rf %s", dir);
    if (system(command)) /* NOLINT(cert-env33-c): a folder of this program's own */
        fprintf(stderr, "%s stays\n", dir);
    free(keys);
    free(data);
}

/* -- saving the state -------------------------------------------------------------------------- */

enum { TRACKED = 10000000, SAVES = 3 };

static void saves(void)
{
    const char *where = getenv("KV_BENCH_DIR");
    const struct kva_index_opts opts = {
        .n_members = 2, .limit = {UINT64_MAX, UINT64_MAX}, .policy = kva_policy_find("lru")};
    struct bench_samples pauses = {.n = 0}, whole = {.n = 0};
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct kva_state_save save = {.lock = &lock, .policy = "lru"};
    struct kva_index *index;
    char path[PATH_MAX];

    if (kva_index_create(&opts, &index))
        bench_die("an index", -ENOMEM);
    save.index = index;
    for (uint64_t i = 0; i < TRACKED; i++) {
        uint8_t key[KVA_KEY];
        const struct kva_told told = {.key = key, .bytes = BLOCK_BYTES, .now_s = 1};

        key_of(i + 1, key);
        if (kva_index_tell(index, &told) < 0)
            bench_die("an index", -ENOMEM);
    }
    snprintf(path, sizeof(path), "%s/advisor-bench-state", where ? where : ".");
    for (unsigned i = 0; i < SAVES; i++) {
        uint64_t start = kv_now_ns(), pause_ns;
        int rc = kva_state_save(path, &save, &pause_ns);

        if (rc)
            bench_die("a state", rc);
        bench_sample(&pauses, (double)pause_ns / 1e6);
        bench_sample(&whole, (double)(kv_now_ns() - start) / 1e6);
    }
    remove(path);
    bench_line("advisor", "'figure':'save','blobs':%d,'pause_ms':%.1f,'whole_ms':%.0f", TRACKED,
               bench_middle(&pauses), bench_middle(&whole));
    kva_index_destroy(index);
}

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[TRACE.jsonl ...]");
    apply("lru", true);
    apply("cost", true);
    apply("cost", false);
    moves();
    saves();
    for (int i = 1; i < argc; i++)
        judge(argv[i]);
    return 0;
}
