// SPDX-License-Identifier: Apache-2.0
#include "indexer/recovery.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "indexer/dump_reader.h"
#include "indexer/fetch.h"
#include "indexer/follow.h"
#include "indexer/peers.h"

/* Bytes of the document in memory at a time. */
#define READ_BUFFER (256u << 10)

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

/* Fetch the whole dump of one peer into fresh indexes. */
static int fetch_dump(const char *peer, const struct ki_recovery_opts *opts,
                      struct ki_dump_reader *reader, uint64_t *ret_bytes)
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
    char why[320] = "out of memory", quoted[400];
    char *url = ki_peer_url(peer, "/dump");
    int rc = -ENOMEM;

    fetch_opts.url = url;
    if (url)
        rc = ki_fetch_open(&fetch_opts, &fetch);
    if (rc == 0) {
        rc = read_dump(fetch, reader, why, sizeof(why));
        *ret_bytes = ki_fetch_bytes(fetch);
    }
    if (rc < 0)
        kv_log_warn("recovery", "recovery from a peer failed", "peer=%s bytes=%" PRIu64 " error=%s",
                    peer, fetch ? *ret_bytes : 0, kv_log_quote(quoted, sizeof(quoted), why));
    ki_fetch_close(fetch);
    free(url);
    return rc;
}

static uint64_t half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);

    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size / 2 : 0;
}

static uint64_t count_torn(const struct ki_dumped_model *m)
{
    const struct ki_watermark *marks = (const struct ki_watermark *)m->marks.data;
    uint64_t torn = 0;

    for (size_t i = 0; i < m->marks.len / sizeof(*marks); i++)
        torn += marks[i].torn;
    return torn;
}

static void adopt_model(struct ki_registry *registry, struct ki_dumped_model *m,
                        struct ki_recovery_result *result)
{
    struct kv_error error = {.text = "the peer couldn't dump it"};
    char name[200], text[400];
    int rc = -EIO;

    if (!m->failed)
        rc = ki_registry_adopt(registry, m->name, m->tenant, m->block_size, m->index,
                               (const struct ki_watermark *)m->marks.data,
                               m->marks.len / sizeof(struct ki_watermark), &error);
    if (rc < 0) {
        kv_log_warn("recovery", "a model of the peer's dump was left out", "model=%s error=%s",
                    kv_log_quote(name, sizeof(name), m->name),
                    kv_log_quote(text, sizeof(text), error.text));
        result->skipped_models++;
        return;
    }
    m->index = NULL; /* now owned by the registry */
    ki_registry_hand_over(registry, m->name, m->tenant, m->handovers, m->n_handovers);
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

/* Follow the peer's registrations before its dump is taken, so that no batch is lost in between. */
static void take_registrations(struct ki_registry *registry, const char *peer,
                               const struct ki_recovery_opts *opts)
{
    uint64_t id = 0, revision = 0;
    struct kv_error error = {0};
    char text[400];

    if (ki_follow_ask(registry, peer, KV_OPT(opts, token, NULL), KV_OPT(opts, ca_file, NULL),
                      KV_OPT(opts, stop, NULL), &id, &revision, &error) < 0)
        kv_log_info("recovery", "a peer doesn't list its registrations", "peer=%s error=%s", peer,
                    kv_log_quote(text, sizeof(text), error.text));
}

int ki_recover(struct ki_registry *registry, const char *const *urls, size_t n,
               const struct ki_recovery_opts *opts, struct ki_recovery_result *ret)
{
    struct ki_recovery_result result = {0};
    uint64_t max_bytes = KV_OPT(opts, max_bytes, half_of_memory());
    uint64_t started = kv_now_ns();
    int rc = -ENOENT;

    curl_global_init(CURL_GLOBAL_DEFAULT);
    for (size_t i = 0; i < n && !is_stopped(opts); i++)
        take_registrations(registry, urls[i], opts);
    wait_for_joins(registry, opts);
    for (size_t i = 0; i < n && rc < 0 && !is_stopped(opts); i++) {
        struct ki_dump_reader reader = {.max_bytes = max_bytes,
                                        .max_blocks = KV_OPT(opts, max_blocks, 0)};

        rc = fetch_dump(urls[i], opts, &reader, &result.bytes);
        if (rc == 0) {
            snprintf(result.peer, sizeof(result.peer), "%s", urls[i]);
            adopt_all(registry, &reader, &result);
        }
        ki_dump_reader_fini(&reader);
    }
    if (rc < 0)
        return is_stopped(opts) ? -ECANCELED : -ENOENT;
    result.seconds = (double)(kv_now_ns() - started) / KV_NS_PER_S;
    if (ret)
        *ret = result;
    return 0;
}
