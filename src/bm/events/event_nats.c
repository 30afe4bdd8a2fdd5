// SPDX-License-Identifier: Apache-2.0
/* NATS sink: messages of records, by size and time (nats_sink.h). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "bm/events/nats_sink.h"
#include "kv_hash.h"

#define WINDOW_MS 10000
#define MAX_BYTES (64u << 10)
#define MAX_BLOCKS ((uint64_t)1 << 24)
#define BATCH 256u
#define CLOSE_MS 1000 /* longest wait for a server at the end */

/* ---- messages ---- */

/* Queue the message in sink->out, whose records are ended. */
static int queue_message(struct kvbm_nats_sink *sink, const char *id)
{
    struct kvp_nats_msg msg = {.subject = sink->header.publisher, .id = id};
    const struct kv_buf *out = &sink->out;
    int err;

    if (sink->json) {
        err = kvp_to_json(sink->out.data, sink->out.len, &sink->text);
        if (err < 0)
            return err;
        out = &sink->text;
    }
    msg.data = out->data;
    msg.len = out->len;
    err = kvp_nats_publish(sink->nats, &msg);
    if (err == 0) {
        sink->stats.messages++;
        sink->stats.bytes += out->len;
    }
    return err;
}

static void begin_message(struct kvbm_nats_sink *sink, enum kvp_kind kind)
{
    sink->header.kind = kind;
    sink->header.sequence = sink->sequence;
    sink->header.time_ns = kv_wall_ns();
    kvp_begin(&sink->out, &sink->header);
}

/* Send the message being filled. One that is dropped leaves a gap: its number is used up. */
static void send_events(struct kvbm_nats_sink *sink)
{
    char id[40];
    int err;

    if (!sink->n)
        return;
    snprintf(id, sizeof(id), "%016llx-%llu", (unsigned long long)sink->header.incarnation,
             (unsigned long long)sink->sequence);
    err = kvp_end(&sink->out, sink->n);
    if (err == 0)
        err = queue_message(sink, sink->jetstream ? id : NULL);
    if (err == 0)
        sink->stats.records += sink->n;
    else
        sink->stats.dropped += sink->n;
    sink->sequence++;
    sink->n = 0;
    sink->quiet_ns = kv_now_ns();
}

static void send_alive(struct kvbm_nats_sink *sink)
{
    begin_message(sink, KVP_ALIVE);
    if (kvp_end(&sink->out, 0) == 0)
        (void)queue_message(sink, NULL); /* the next one says the same */
    sink->quiet_ns = kv_now_ns();
}

/* ---- records ---- */

void kvbm_nats_describe(const struct kvbm_nats_sink *sink, const struct kvbm_chain_of *chain,
                        struct kvp_record *record)
{
    record->block_bytes = sink->block_bytes;
    record->volume = sink->volumes[record->tier];
    if (!chain)
        return;
    record->has_prefix = chain->has_prefix;
    record->prefix = chain->prefix;
    record->has_tokens_hash = chain->has_tokens;
    record->tokens_hash = chain->tokens_hash;
}

/* Learn the chain of a block from its parent's. */
static void find_prefix(const struct kvbm_nats_sink *sink, const struct kvbm_event *event,
                        bool continues, struct kvbm_chain_of *block)
{
    const struct kvbm_chain_of *parent = &sink->previous;
    uint64_t id;

    if (!event->parent) {
        block->has_prefix = true;
        block->prefix = kvp_key_number(event->key, event->key_len);
        return;
    }
    id = continues ? parent->id : kvbm_chain_id(event->group, event->parent, event->key_len);
    if (parent->id != id)
        parent = kvbm_chains_find(&sink->chains, id);
    if (parent && parent->has_prefix) {
        block->has_prefix = true;
        block->prefix = parent->prefix;
    }
}

/* Remember the chain and tokens of a stored block, and write them to @ret. @continues: its parent is the
 * block stored last. */
static void remember(struct kvbm_nats_sink *sink, const struct kvbm_event *event, uint64_t id,
                     bool continues, struct kvbm_chain_of *ret)
{
    struct kvbm_chain_of *block = kvbm_chains_enter(&sink->chains, id);

    if (block)
        *ret = *block;
    else
        sink->stats.forgotten++;
    ret->id = id;
    if (!ret->has_prefix)
        find_prefix(sink, event, continues, ret);
    if (event->n_tokens && !ret->has_tokens) {
        ret->has_tokens = true;
        ret->tokens_hash = kve_hash_block(sink->seed, event->tokens, event->n_tokens, NULL, 0);
    }
    if (block)
        *block = *ret;
    sink->previous = *ret;
}

/* Find what is remembered of a removed block, for the last time when no tier has it any more. */
static void recall(struct kvbm_nats_sink *sink, const struct kvbm_event *event, uint64_t id,
                   struct kvbm_chain_of *ret)
{
    const struct kvbm_chain_of *block;

    if (event->last) {
        (void)kvbm_chains_take(&sink->chains, id, ret);
        return;
    }
    block = kvbm_chains_find(&sink->chains, id);
    if (block)
        *ret = *block;
}

/* True when @b is stored as the next block of @a's chain. */
static bool is_next(const struct kvbm_event *a, const struct kvbm_event *b)
{
    return b->type == KVBM_EVENT_STORED && kvbm_event_follows(a, b);
}

static void put_event(struct kvbm_nats_sink *sink, const struct kvbm_event *event, uint64_t id,
                      bool continues)
{
    bool stored = event->type == KVBM_EVENT_STORED;
    struct kvp_record record = {
        .event = stored ? KVP_STORE : KVP_REMOVE,
        .tier = event->tier,
        .first = event->first,
        .last = event->last,
        .group = event->group,
        .key_len = event->key_len,
        .key = event->key,
        .parent = event->parent,
        .position = event->position,
    };
    struct kvbm_chain_of chain = {0};

    if (sink->out.len + KVP_MAX_RECORD > sink->max_bytes)
        send_events(sink);
    if (!sink->n) {
        begin_message(sink, KVP_EVENTS);
        sink->since_ns = kv_now_ns();
    }
    if (stored)
        remember(sink, event, id, continues, &chain);
    else
        recall(sink, event, id, &chain);
    kvbm_nats_describe(sink, &chain, &record);
    kvp_put(&sink->out, &record);
    sink->n++;
}

/* Put up to BATCH events. Their slots may lie anywhere in memory: all are asked for before the first is
 * read. */
static void put_events(struct kvbm_nats_sink *sink, const struct kvbm_event *events, size_t n)
{
    uint64_t ids[BATCH];

    for (size_t i = 0; i < n; i++) {
        ids[i] = kvbm_chain_id(events[i].group, events[i].key, events[i].key_len);
        kvbm_chains_prefetch(&sink->chains, ids[i]);
    }
    for (size_t i = 0; i < n; i++)
        put_event(sink, &events[i], ids[i], i && is_next(&events[i - 1], &events[i]));
}

static void on_events(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct kvbm_nats_sink *sink = arg;

    pthread_mutex_lock(&sink->lock);
    if (lost) {
        send_events(sink);
        sink->sequence++; /* the gap */
        sink->stats.lost += lost;
    }
    for (size_t i = 0; i < n; i += BATCH)
        put_events(sink, events + i, KV_MIN(n - i, (size_t)BATCH));
    pthread_mutex_unlock(&sink->lock);
}

static uint64_t on_tick(void *arg, bool now)
{
    struct kvbm_nats_sink *sink = arg;
    uint64_t time_ns = kv_now_ns(), next;

    pthread_mutex_lock(&sink->lock);
    if (sink->n && (now || time_ns >= sink->since_ns + sink->window_ns))
        send_events(sink);
    if (!sink->n && time_ns >= sink->quiet_ns + sink->window_ns)
        send_alive(sink);
    next = (sink->n ? sink->since_ns : sink->quiet_ns) + sink->window_ns;
    pthread_mutex_unlock(&sink->lock);
    return next;
}

/* ---- creation and destruction ---- */

static void nats_free(void *arg)
{
    struct kvbm_nats_sink *sink = arg;

    atomic_store_explicit(&sink->closing, true, memory_order_relaxed); /* ends a snapshot soon */
    kvp_nats_unsubscribe(sink->sub);
    kvp_nats_close(sink->snapshots, 0);
    if (sink->nats) {
        pthread_mutex_lock(&sink->lock);
        send_events(sink);
        pthread_mutex_unlock(&sink->lock);
        kvp_nats_close(sink->nats, CLOSE_MS);
    }
    kvbm_chains_fini(&sink->chains);
    kv_buf_fini(&sink->out);
    kv_buf_fini(&sink->text);
    pthread_mutex_destroy(&sink->lock);
    free(sink);
}

static void fill_volumes(struct kvbm_nats_sink *sink, const struct kvbm_nats_opts *opts)
{
    static const char *const tiers[] = {"device", "host", "disk", "external"};
    const char *cluster = KV_OPT(opts, cluster, "");
    char name[2 * KVP_MAX_SUBJECT];

    for (int i = 0; i < KV_N_TIERS; i++) {
        const char *given =
            opts->size >= offsetof(struct kvbm_nats_opts, volumes) + sizeof(opts->volumes)
                ? opts->volumes[i]
                : NULL;

        snprintf(name, sizeof(name), "%s/%s/%s", cluster, opts->worker, tiers[i]);
        sink->volumes[i] = kvp_volume(given ? given : name);
    }
}

static int fill(struct kvbm_nats_sink *sink, const struct kvbm_nats_opts *opts)
{
    const char *print = KV_OPT(opts, fingerprint, NULL), *lora = KV_OPT(opts, lora_name, NULL);
    const char *salt = KV_OPT(opts, cache_salt, NULL);
    XXH128_canonical_t sum;
    long len = kvp_subject(KV_OPT(opts, cluster, NULL), KV_OPT(opts, model, NULL),
                           KV_OPT(opts, tenant, NULL), opts->worker, sink->header.publisher);

    if (len < 0)
        return (int)len;
    if (print) {
        XXH128_canonicalFromHash(&sum, XXH3_128bits(print, strlen(print)));
        memcpy(sink->header.fingerprint, sum.digest, sizeof(sink->header.fingerprint));
    }
    if (getrandom(&sink->header.incarnation, sizeof(uint64_t), 0) != sizeof(uint64_t))
        return -EIO;
    fill_volumes(sink, opts);
    sink->seed = kve_seed(lora, lora ? strlen(lora) : 0, salt, salt ? strlen(salt) : 0);
    sink->block_bytes = KV_OPT(opts, block_bytes, 0);
    sink->window_ns = KV_OPT(opts, window_ms, WINDOW_MS) * KV_NS_PER_MS;
    sink->max_bytes = KV_OPT(opts, max_bytes, MAX_BYTES);
    sink->chains.max = (size_t)KV_OPT(opts, max_blocks, MAX_BLOCKS);
    sink->json = KV_OPT(opts, json, false);
    sink->jetstream = KV_OPT(opts, jetstream, false);
    sink->quiet_ns = kv_now_ns() - KV_MIN(kv_now_ns(), sink->window_ns); /* an ALIVE at once */
    return sink->max_bytes < 1024 || sink->max_bytes > 512 << 10 ? -EINVAL : 0;
}

static int connect_sink(struct kvbm_nats_sink *sink, const struct kvp_nats_opts *server)
{
    struct kvp_nats_opts own = KVP_NATS_OPTS_INIT;
    char subject[KVP_MAX_SUBJECT + 16];
    int err = kvp_nats_open(server, NULL, NULL, &sink->nats);

    if (err < 0)
        return err;
    memcpy(&own, server, KV_MIN(server->size, sizeof(own)));
    own.size = sizeof(own);
    own.queue_bytes = KVBM_SNAPSHOT_QUEUE;
    err = kvp_nats_open(&own, NULL, NULL, &sink->snapshots);
    if (err < 0)
        return err;
    snprintf(subject, sizeof(subject), "%s.snapshot", sink->header.publisher);
    return kvp_nats_subscribe(sink->snapshots, subject, 8 << 10, kvbm_nats_snapshot, sink,
                              &sink->sub);
}

int kvbm_events_add_nats(struct kvbm_events *events, const struct kvbm_nats_opts *opts,
                         struct kvbm_nats_sink **ret)
{
    static const struct kvbm_sink_ops ops = {
        .fn = on_events, .again = true, .tick = on_tick, .close = nats_free};
    const struct kvp_nats_opts *server = KV_OPT(opts, server, NULL);
    struct kvbm_nats_sink *sink;
    int err;

    if (!events || !kv_sized(opts, "kvbm_nats_opts") || !server || !KV_OPT(opts, worker, NULL))
        return -EINVAL;
    sink = calloc(1, sizeof(*sink));
    if (!sink)
        return -ENOMEM;
    sink->events = events;
    sink->header.size = sizeof(sink->header);
    pthread_mutex_init(&sink->lock, NULL);
    err = fill(sink, opts);
    if (err == 0)
        err = connect_sink(sink, server);
    if (err == 0)
        err = kvbm_events_add_sink(events, KVBM_EVENTS_PER_TIER, &ops, sink);
    if (err < 0)
        nats_free(sink);
    else if (ret)
        *ret = sink;
    return err;
}
