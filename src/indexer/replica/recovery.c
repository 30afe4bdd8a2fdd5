// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/recovery.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/json/json.h"
#include "base/thread/thread.h"
#include "indexer/replica/dump_reader.h"
#include "indexer/replica/fetch.h"
#include "indexer/replica/follow.h"
#include "indexer/replica/peers.h"

/* Bytes of the document in memory at a time. */
#define READ_BUFFER (256u << 10)
#define AT_ONCE 8 /* peers that are asked at a time */
#define ASK_NS (10 * KV_NS_PER_S)
#define HEAD_START_NS (500 * KV_NS_PER_MS)
#define TURN_MS 5

static bool is_stopped(const struct ki_recovery_opts *opts)
{
    const _Atomic int *stop = KV_OPT(opts, stop, NULL);

    return stop && *stop;
}

/* Time for a subscription to reach the publisher after the connection is made. */
#define SUBSCRIBE_NS (200 * KV_NS_PER_MS)
#define POLL_NS (10 * KV_NS_PER_MS)

/*
 * Count the workers that are being connected to in *@ret_joining. *@ret_joined: any is connected.
 */
static void count_joins(struct ki_registry *registry, long *ret_joining, bool *ret_joined)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(registry, &infos);

    *ret_joining = n < 0 ? 1 : 0;
    *ret_joined = false;
    for (long i = 0; i < n; i++) {
        *ret_joining += !infos[i].connected && infos[i].status == KI_PENDING;
        *ret_joined = *ret_joined || infos[i].connected;
    }
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}

/*
 * Wait for the sockets that connect now, not for workers that refuse. A dump taken too early would
 * miss batches published before the subscription, which then show as a gap.
 */
static void wait_for_joins(struct ki_registry *registry, const struct ki_recovery_opts *opts)
{
    uint64_t now_ns = kv_now_ns();
    uint64_t until_ns = now_ns + KV_OPT(opts, slow_join_ms, 1000) * KV_NS_PER_MS;
    bool joined = false;
    long joining;

    for (;; now_ns = kv_now_ns()) {
        count_joins(registry, &joining, &joined);
        if (!joining || now_ns >= until_ns || is_stopped(opts))
            break;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    ki_registry_await_dump(registry);
    until_ns = KV_MIN(until_ns, now_ns + (joined ? SUBSCRIBE_NS : 0));
    while (kv_now_ns() < until_ns && !is_stopped(opts))
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

static int read_dump(struct ki_fetch *fetch, struct ki_dump_reader *reader, char *why, size_t size)
{
    char *buffer = malloc(READ_BUFFER);
    struct kv_json json;
    int rc;

    if (!buffer)
        return -ENOMEM;
    kv_json_init_stream(&json, buffer, READ_BUFFER, ki_fetch_read, fetch);
    rc = ki_dump_read(reader, &json);
    if (rc < 0)
        snprintf(why, size, "%s",
                 ki_fetch_error(fetch)[0] ? ki_fetch_error(fetch) : json.error.text);
    free(buffer);
    return rc;
}

static void log_failure(const char *peer, const struct ki_fetch *fetch, const char *why)
{
    char quoted[400];

    kv_log_warn("recovery", "recovery from a peer failed", "peer=%s bytes=%" PRIu64 " error=%s",
                peer, fetch ? ki_fetch_bytes(fetch) : 0, kv_log_quote(quoted, sizeof(quoted), why));
}

/* Begin to fetch the dump of a peer. Returns NULL on failure, logged. */
static struct ki_fetch *open_dump(const char *peer, const struct ki_recovery_opts *opts)
{
    struct ki_fetch_opts fetch_opts = {
        .token = KV_OPT(opts, token, NULL),
        .accept = KI_DUMP_PACKED_TYPE,
        .ca_file = KV_OPT(opts, ca_file, NULL),
        .connect_ms = KV_OPT(opts, connect_ms, 5000),
        .stall_ms = KV_OPT(opts, stall_ms, 10000),
        .total_ms = KV_OPT(opts, total_ms, 600000),
        .stop = KV_OPT(opts, stop, NULL),
    };
    struct ki_fetch *fetch = NULL;
    char *url = ki_peer_url(peer, "/dump");

    fetch_opts.url = url;
    if (!url || ki_fetch_open(&fetch_opts, &fetch) < 0)
        log_failure(peer, NULL, "out of memory");
    free(url);
    return fetch;
}

/* ---- several peers at once ---- */

/*
 * Dumps that are being fetched. The peers are asked in their order; when those before don't send, the
 * next one is asked beside them after HEAD_START_NS. The first that sends is read.
 */
struct race {
    const char *const *urls;
    size_t n;
    bool *over; /* [n] peers that have failed */
    const struct ki_recovery_opts *opts;
    struct ki_fetch *fetches[AT_ONCE];
    size_t peers[AT_ONCE]; /* of each fetch */
    size_t n_fetches;
};

static bool is_asked(const struct race *r, size_t peer)
{
    for (size_t i = 0; i < r->n_fetches; i++)
        if (r->peers[i] == peer)
            return true;
    return false;
}

/* Ask the next peer. Returns false when there is none, or no room. */
static bool ask_next(struct race *r)
{
    size_t peer = 0;

    while (peer < r->n && (r->over[peer] || is_asked(r, peer)))
        peer++;
    if (peer == r->n || r->n_fetches == AT_ONCE)
        return false;
    r->fetches[r->n_fetches] = open_dump(r->urls[peer], r->opts);
    if (!r->fetches[r->n_fetches])
        r->over[peer] = true;
    else
        r->peers[r->n_fetches++] = peer;
    return true;
}

static void close_all(struct race *r)
{
    while (r->n_fetches)
        ki_fetch_close(r->fetches[--r->n_fetches]);
}

/* Wait for a peer that sends its dump, or that fails. Returns its place; -ENOENT: none is left, or a stop. */
static long first_to_send(struct race *r)
{
    uint64_t next_ns = 0;

    while (!is_stopped(r->opts)) {
        uint64_t now_ns = kv_now_ns();

        if (now_ns >= next_ns || !r->n_fetches) {
            next_ns = now_ns + HEAD_START_NS;
            if (!ask_next(r) && !r->n_fetches)
                break;
        }
        for (size_t i = 0; i < r->n_fetches; i++)
            if (ki_fetch_proceeds(r->fetches[i], TURN_MS))
                return (long)i;
    }
    return -ENOENT;
}

/* Take the peer at a place out of the race. */
static void end_fetch(struct race *r, size_t at)
{
    r->over[r->peers[at]] = true;
    ki_fetch_close(r->fetches[at]);
    r->n_fetches--;
    memmove(r->fetches + at, r->fetches + at + 1, (r->n_fetches - at) * sizeof(r->fetches[0]));
    memmove(r->peers + at, r->peers + at + 1, (r->n_fetches - at) * sizeof(r->peers[0]));
}

/*
 * Fetch the whole dump of one peer into fresh indexes. The others wait meanwhile; after a failure that took
 * long they are asked anew. Returns the peer's number, or -ENOENT.
 */
static long fetch_dump(struct race *r, struct ki_dump_reader *reader,
                       const struct ki_dump_reader *limits, uint64_t *ret_bytes)
{
    long at, peer = -ENOENT;

    while (peer < 0 && (at = first_to_send(r)) >= 0) {
        struct ki_fetch *fetch = r->fetches[at];
        uint64_t started_ns = kv_now_ns();
        char why[320] = "out of memory";

        *reader = *limits;
        if (read_dump(fetch, reader, why, sizeof(why)) == 0) {
            *ret_bytes = ki_fetch_bytes(fetch);
            peer = (long)r->peers[at];
            break;
        }
        log_failure(r->urls[r->peers[at]], fetch, why);
        ki_dump_reader_fini(reader);
        end_fetch(r, (size_t)at);
        if (kv_now_ns() - started_ns > HEAD_START_NS)
            close_all(r);
    }
    close_all(r);
    return peer;
}

static uint64_t half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);

    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size / 2 : 0;
}

static uint64_t count_torn(const struct ki_dumped_model *m)
{
    const struct ki_mark *marks = (const struct ki_mark *)m->marks.data;
    uint64_t torn = 0;

    for (size_t i = 0; i < m->marks.len / sizeof(*marks); i++)
        torn += marks[i].torn;
    return torn;
}

/* Take over the names of the instances that have blocks or streams here. */
static void adopt_names(struct ki_registry *registry, const struct ki_dumped_model *m)
{
    const char *p = m->names.data, *end = p + m->names.len;

    while (p < end) {
        uint64_t instance;

        memcpy(&instance, p, sizeof(instance));
        p += sizeof(instance);
        ki_registry_adopt_name(registry, instance, p);
        p += strlen(p) + 1;
    }
}

static void adopt_model(struct ki_registry *registry, struct ki_dumped_model *m,
                        struct ki_recovery_result *result)
{
    struct kv_error error = {.text = "the peer couldn't dump it"};
    char name[200], text[400];
    int rc = -EIO;

    if (!m->failed)
        rc = ki_registry_adopt(registry, m->name, m->tenant, m->block_size, m->index,
                               (const struct ki_mark *)(const void *)m->marks.data,
                               m->marks.len / sizeof(struct ki_mark), m->snapshots, m->n_snapshots,
                               &error);
    if (rc < 0) {
        kv_log_warn("recovery", "a model of the peer's dump was left out", "model=%s error=%s",
                    kv_log_quote(name, sizeof(name), m->name),
                    kv_log_quote(text, sizeof(text), error.text));
        result->skipped_models++;
        return;
    }
    m->index = NULL; /* now owned by the registry */
    adopt_names(registry, m);
    ki_registry_note_forms(registry, m->name, m->tenant,
                           m->forms | (m->forms & UINT32_MAX ? 0 : 1));
    result->torn += count_torn(m);
    result->models++;
}

static void adopt_all(struct ki_registry *registry, struct ki_dump_reader *reader,
                      struct ki_recovery_result *result)
{
    for (size_t i = 0; i < reader->n; i++)
        adopt_model(registry, &reader->models[i], result);
    result->events = reader->events;
    result->blocks = reader->blocks;
    result->orphans = reader->orphans;
}

/* ---- registrations ---- */

/* Peers whose registrations are asked for, by several threads. */
struct asking {
    struct ki_registry *registry;
    const char *const *urls;
    size_t n;
    const struct ki_recovery_opts *opts;
    _Atomic size_t next, n_done;
    _Atomic int over;
};

static void take_registrations(struct asking *a, const char *peer)
{
    uint64_t id = 0, revision = 0;
    struct kv_error error = {0};
    char text[400];

    if (ki_follow_ask(a->registry, peer, KV_OPT(a->opts, token, NULL),
                      KV_OPT(a->opts, ca_file, NULL), &a->over, &id, &revision, &error) < 0)
        kv_log_info("recovery", "a peer doesn't list its registrations", "peer=%s error=%s", peer,
                    kv_log_quote(text, sizeof(text), error.text));
}

static void *ask_peers(void *arg)
{
    struct asking *a = arg;

    for (size_t i; !a->over && (i = a->next++) < a->n;)
        take_registrations(a, a->urls[i]);
    a->n_done++;
    return NULL;
}

/*
 * Follow the peers' registrations before a dump is taken, so that no batch is lost in between. Several
 * are asked at once, and all of them together for ASK_NS: later they are asked again and again.
 */
static void take_all_registrations(struct ki_registry *registry, const char *const *urls, size_t n,
                                   const struct ki_recovery_opts *opts)
{
    struct asking a = {.registry = registry, .urls = urls, .n = n, .opts = opts};
    uint64_t until_ns = kv_now_ns() + ASK_NS;
    pthread_t threads[AT_ONCE];
    size_t n_threads = 0;

    while (n_threads < KV_MIN(n, (size_t)AT_ONCE) &&
           kv_thread_start(&threads[n_threads], "ki-ask", ask_peers, &a) == 0)
        n_threads++;
    if (!n_threads)
        ask_peers(&a);
    while (a.n_done < n_threads) {
        if (is_stopped(opts) || kv_now_ns() >= until_ns)
            a.over = 1;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    for (size_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
}

/* ---- recovery ---- */

/* Fill the registry from the first peer that sends a whole dump. Returns 0 or a negative errno. */
static int take_dump(struct ki_registry *registry, const char *const *urls, size_t n,
                     const struct ki_recovery_opts *opts, struct ki_recovery_result *result)
{
    const struct ki_dump_reader limits = {.max_bytes = KV_OPT(opts, max_bytes, half_of_memory()),
                                          .max_blocks = KV_OPT(opts, max_blocks, 0)};
    struct race race = {.urls = urls, .n = n, .opts = opts, .over = calloc(n + 1, sizeof(bool))};
    struct ki_dump_reader reader;
    long peer = race.over ? fetch_dump(&race, &reader, &limits, &result->bytes) : -ENOMEM;

    free(race.over);
    if (peer < 0)
        return (int)peer;
    snprintf(result->peer, sizeof(result->peer), "%s", urls[peer]);
    adopt_all(registry, &reader, result);
    ki_dump_reader_fini(&reader);
    return 0;
}

int ki_recover(struct ki_registry *registry, const char *const *urls, size_t n,
               const struct ki_recovery_opts *opts, struct ki_recovery_result *ret)
{
    struct ki_recovery_result result = {0};
    uint64_t started = kv_now_ns();

    curl_global_init(CURL_GLOBAL_DEFAULT);
    take_all_registrations(registry, urls, n, opts);
    wait_for_joins(registry, opts);
    if (take_dump(registry, urls, n, opts, &result) < 0)
        return is_stopped(opts) ? -ECANCELED : -ENOENT;
    result.seconds = (double)(kv_now_ns() - started) / KV_NS_PER_S;
    if (ret)
        *ret = result;
    return 0;
}
