// SPDX-License-Identifier: Apache-2.0
/*
 * Events in the engines' format: what is stored one behind the other in one chain becomes one event, and so
 * do removals from one tier.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "events.h"

struct zmq_sink {
    struct kve_publisher *publisher;
    uint32_t block_size;
    char *lora_name, *cache_salt;
    uint64_t *hashes; /* of the event that is being put together */
    uint32_t *tokens;
    size_t capacity; /* blocks */
};

/* A key as engines name blocks: its number, of long keys that of the last 8 bytes. */
static uint64_t hash_of(const void *key, uint32_t len)
{
    const uint8_t *bytes = key;
    uint64_t hash = 0;

    if (len == sizeof(hash)) {
        memcpy(&hash, key, sizeof(hash));
        return hash;
    }
    for (uint32_t i = len < 8 ? 0 : len - 8; i < len; i++)
        hash = hash << 8 | bytes[i];
    return hash;
}

/* Does @b go on where @a ends? */
static bool follows(const struct kvbm_event *a, const struct kvbm_event *b)
{
    if (a->type != b->type || a->tier != b->tier || a->group != b->group)
        return false;
    if (a->type != KVBM_EVENT_STORED)
        return true;
    return b->parent && a->key_len == b->key_len && !memcmp(a->key, b->parent, a->key_len) &&
           !a->n_tokens == !b->n_tokens;
}

static int reserve(struct zmq_sink *sink, size_t n)
{
    uint64_t *hashes;
    uint32_t *tokens;

    if (n <= sink->capacity)
        return 0;
    hashes = reallocarray(sink->hashes, n, sizeof(*hashes));
    if (!hashes)
        return -ENOMEM;
    sink->hashes = hashes;
    tokens = reallocarray(sink->tokens, n * sink->block_size, sizeof(*tokens));
    if (!tokens)
        return -ENOMEM;
    sink->tokens = tokens;
    sink->capacity = n;
    return 0;
}

static int publish_run(struct zmq_sink *sink, const struct kvbm_event *run, size_t n)
{
    uint64_t parent = run->parent ? hash_of(run->parent, run->key_len) : 0;
    struct kve_event event = {
        .size = sizeof(event),
        .type = run->type == KVBM_EVENT_STORED    ? KVE_STORED
                : run->type == KVBM_EVENT_REMOVED ? KVE_REMOVED
                                                  : KVE_CLEARED,
        .tier = run->tier,
        .hashes = sink->hashes,
        .n_hashes = n,
        .parent = run->parent ? &parent : NULL,
        .tokens = run->n_tokens ? sink->tokens : NULL,
        .n_tokens = run->n_tokens ? n * sink->block_size : 0,
        .block_size = sink->block_size,
        .lora_name = sink->lora_name,
        .cache_salt = sink->cache_salt,
        .group = run->group ? (int32_t)run->group : -1,
    };

    for (size_t i = 0; i < n; i++) {
        sink->hashes[i] = hash_of(run[i].key, run[i].key_len);
        if (run->n_tokens)
            memcpy(sink->tokens + i * sink->block_size, run[i].tokens,
                   sink->block_size * sizeof(*sink->tokens));
    }
    return kve_publisher_publish(sink->publisher, &event, 1);
}

static void publish(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct zmq_sink *sink = arg;
    size_t len;

    if (lost)
        kve_publisher_lost(sink->publisher, lost);
    if (reserve(sink, n) < 0) {
        kve_publisher_lost(sink->publisher, n);
        return;
    }
    for (size_t i = 0; i < n; i += len) {
        len = 1;
        while (i + len < n && follows(&events[i + len - 1], &events[i + len]))
            len++;
        if (events[i].n_tokens && events[i].n_tokens != sink->block_size) {
            kve_publisher_lost(sink->publisher, len); /* a pool with another block size */
            continue;
        }
        publish_run(sink, events + i, len); /* what it can't take it counts, and leaves a gap for */
    }
}

static void zmq_free(void *arg)
{
    struct zmq_sink *sink = arg;

    kve_publisher_destroy(sink->publisher);
    free(sink->lora_name);
    free(sink->cache_salt);
    free(sink->hashes);
    free(sink->tokens);
    free(sink);
}

static int copy_name(const char *name, char **ret)
{
    *ret = name ? strdup(name) : NULL;
    return name && !*ret ? -ENOMEM : 0;
}

int kvbm_events_add_zmq(struct kvbm_events *events, const struct kvbm_zmq_opts *opts,
                        struct kve_publisher **ret)
{
    const struct kve_publisher_opts *publisher = KV_OPT(opts, publisher, NULL);
    struct zmq_sink *sink;
    int err;

    if (!events || !publisher || !KV_OPT(opts, block_size, 0))
        return -EINVAL;
    sink = calloc(1, sizeof(*sink));
    if (!sink)
        return -ENOMEM;
    sink->block_size = opts->block_size;
    err = copy_name(KV_OPT(opts, lora_name, NULL), &sink->lora_name);
    if (err == 0)
        err = copy_name(KV_OPT(opts, cache_salt, NULL), &sink->cache_salt);
    if (err == 0)
        err = kve_publisher_create(publisher, &sink->publisher);
    if (err == 0)
        err = kvbm_events_add_sink(events, KV_OPT(opts, scope, KVBM_EVENTS_PER_TIER), publish,
                                   zmq_free, sink);
    if (err < 0)
        zmq_free(sink);
    else if (ret)
        *ret = sink->publisher;
    return err;
}
