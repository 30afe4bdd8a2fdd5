// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay/cache.h"
#include "cli/replay/random.h"
#include "kv_event.h"

/*
 * Limit of queued events. A prompt makes two; wait for the publisher before its queue could
 * overflow and drop some.
 */
#define QUEUE_EVENTS 8192
#define FLUSH_AFTER (QUEUE_EVENTS / 4)
#define FLUSH_MS 10000

struct kc_engine {
    struct kc_engine_opts opts;
    pthread_mutex_t lock; /* guards cache, names and the order of publishing */
    struct kc_cache *cache;
    struct kve_publisher *publisher;
    uint64_t *names;
    size_t names_capacity;
    uint32_t unflushed;
    uint64_t stored_blocks, evicted_blocks;
    struct kve_publisher_stats before; /* statistics at the last reset: counting starts there */
};

int kc_engine_create(const struct kc_engine_opts *opts, struct kc_engine **ret,
                     struct kv_error *error)
{
    struct kve_publisher_opts publisher = {
        .size = sizeof(publisher),
        .endpoint = "tcp://127.0.0.1:*",
        .replay_endpoint = "tcp://127.0.0.1:*",
        .topic = "kv-events",
        .buffer_batches = opts->buffer_batches,
        .queue_events = QUEUE_EVENTS,
    };
    struct kc_engine *engine = calloc(1, sizeof(*engine));
    int rc = -ENOMEM;

    if (!engine)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_init(&engine->lock, NULL);
    engine->opts = *opts;
    rc = kc_cache_create(opts->capacity, KC_LEAF_FIRST, &engine->cache);
    if (rc < 0)
        kv_fail(error, rc, 0, "out of memory");
    else if ((rc = kve_publisher_create(&publisher, &engine->publisher)) < 0)
        kv_fail(error, rc, 0, "can't publish events on %s: %s", publisher.endpoint, strerror(-rc));
    if (rc < 0) {
        kc_engine_destroy(engine);
        return rc;
    }
    *ret = engine;
    return 0;
}

void kc_engine_destroy(struct kc_engine *engine)
{
    if (!engine)
        return;
    kve_publisher_destroy(engine->publisher);
    kc_cache_destroy(engine->cache);
    pthread_mutex_destroy(&engine->lock);
    free(engine->names);
    free(engine);
}

const char *kc_engine_endpoint(const struct kc_engine *engine)
{
    return kve_publisher_endpoint(engine->publisher);
}

const char *kc_engine_replay_endpoint(const struct kc_engine *engine)
{
    return kve_publisher_replay_endpoint(engine->publisher);
}

/* Write the engine's own names of @n prefixes to @ret: a bijection, so they are as unique. */
static void put_names(const struct kc_engine *engine, const uint64_t *chain, size_t n,
                      uint64_t *ret)
{
    for (size_t i = 0; i < n; i++)
        ret[i] = engine->opts.salt ? kc_mix(chain[i] ^ engine->opts.salt) : chain[i];
}

static int reserve_names(struct kc_engine *engine, size_t n)
{
    uint64_t *names;

    if (n <= engine->names_capacity)
        return 0;
    names = realloc(engine->names, 2 * n * sizeof(*names));
    if (!names)
        return -ENOMEM;
    engine->names = names;
    engine->names_capacity = 2 * n;
    return 0;
}

/*
 * Publish events. Dropped ones (-EAGAIN) are no failure: the publisher leaves a gap and counts
 * them.
 */
static int publish(struct kc_engine *engine, const struct kve_event *events, size_t n)
{
    int rc = n > 0 ? kve_publisher_publish(engine->publisher, events, n) : 0;

    engine->unflushed += (uint32_t)n;
    if (engine->unflushed >= FLUSH_AFTER) {
        kve_publisher_flush(engine->publisher, FLUSH_MS);
        engine->unflushed = 0;
    }
    return rc == -EAGAIN ? 0 : rc;
}

/*
 * Publish as vLLM does: first the evicted blocks, then the new ones as one run under their parent.
 */
static int publish_use(struct kc_engine *engine, const struct kc_prompt *prompt,
                       const struct kc_cache_use *use)
{
    uint32_t size = engine->opts.block_size;
    size_t n_stored = use->end - use->held, n = 0;
    struct kve_event events[2];
    uint64_t *evicted = engine->names, *stored = evicted + use->n_evicted, parent = 0;

    put_names(engine, use->evicted, use->n_evicted, evicted);
    put_names(engine, prompt->chain + use->held, n_stored, stored);
    if (use->held > 0)
        put_names(engine, prompt->chain + use->held - 1, 1, &parent);
    if (use->n_evicted > 0)
        events[n++] = (struct kve_event){.size = sizeof(events[0]),
                                         .type = KVE_REMOVED,
                                         .hashes = evicted,
                                         .n_hashes = use->n_evicted,
                                         .group = -1};
    if (n_stored > 0)
        events[n++] = (struct kve_event){.size = sizeof(events[0]),
                                         .type = KVE_STORED,
                                         .hashes = stored,
                                         .n_hashes = n_stored,
                                         .parent = use->held > 0 ? &parent : NULL,
                                         .tokens = prompt->tokens + use->held * size,
                                         .n_tokens = n_stored * size,
                                         .block_size = size,
                                         .group = -1};
    return publish(engine, events, n);
}

int kc_engine_serve(struct kc_engine *engine, const struct kc_prompt *prompt, struct kc_served *ret)
{
    struct kc_cache_use use;
    int rc;

    pthread_mutex_lock(&engine->lock);
    /* no more blocks are evicted than added */
    rc = reserve_names(engine, 2 * prompt->n_blocks);
    if (rc == 0)
        rc = kc_cache_use(engine->cache, prompt->chain, prompt->n_blocks, &use);
    if (rc == 0)
        rc = publish_use(engine, prompt, &use);
    if (rc == 0) {
        *ret = (struct kc_served){use.held, use.end - use.held, use.n_evicted};
        engine->stored_blocks += ret->stored;
        engine->evicted_blocks += ret->evicted;
    }
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

int kc_engine_reset(struct kc_engine *engine)
{
    struct kve_event event = {.size = sizeof(event), .type = KVE_CLEARED, .group = -1};
    int rc;

    pthread_mutex_lock(&engine->lock);
    kc_cache_clear(engine->cache);
    engine->stored_blocks = engine->evicted_blocks = 0;
    rc = publish(engine, &event, 1);
    kve_publisher_flush(engine->publisher, FLUSH_MS);
    engine->before.size = sizeof(engine->before);
    kve_publisher_get_stats(engine->publisher, &engine->before);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

void kc_engine_truth(struct kc_engine *engine, const struct kc_prompt *prompt, size_t *ret_held,
                     uint64_t *ret_blocks)
{
    pthread_mutex_lock(&engine->lock);
    *ret_held = kc_cache_lookup(engine->cache, prompt->chain, prompt->n_blocks);
    *ret_blocks = kc_cache_len(engine->cache);
    pthread_mutex_unlock(&engine->lock);
}

int kc_engine_tick(struct kc_engine *engine)
{
    const uint64_t never = 0;
    struct kve_event event = {
        .size = sizeof(event), .type = KVE_REMOVED, .hashes = &never, .n_hashes = 1, .group = -1};
    int rc;

    pthread_mutex_lock(&engine->lock);
    rc = publish(engine, &event, 1);
    pthread_mutex_unlock(&engine->lock);
    return rc;
}

int kc_engine_flush(struct kc_engine *engine, uint32_t timeout_ms)
{
    return kve_publisher_flush(engine->publisher, timeout_ms);
}

void kc_engine_get_stats(struct kc_engine *engine, struct kc_engine_stats *ret)
{
    struct kve_publisher_stats stats = {.size = sizeof(stats)};

    kve_publisher_get_stats(engine->publisher, &stats);
    pthread_mutex_lock(&engine->lock);
    *ret = (struct kc_engine_stats){
        .batches = stats.batches - engine->before.batches,
        .events = stats.events - engine->before.events,
        .dropped_events = stats.dropped_events - engine->before.dropped_events,
        .replay_requests = stats.replay_requests - engine->before.replay_requests,
        .replayed_batches = stats.replayed_batches - engine->before.replayed_batches,
        .stored_blocks = engine->stored_blocks,
        .evicted_blocks = engine->evicted_blocks,
        .blocks = kc_cache_len(engine->cache)};
    pthread_mutex_unlock(&engine->lock);
}
