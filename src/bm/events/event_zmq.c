// SPDX-License-Identifier: Apache-2.0
/*
 * ZMQ sink: publish changes in the engines' format. Consecutive stored blocks of one chain become
 * one event, as do consecutive removals from one tier.
 *
 * Lost events may include removals, and a follower would then count blocks that are gone. After a
 * loss the sink publishes a cleared cache and leaves a sequence gap. From there on the follower
 * knows too few blocks, never too many, and sees the loss by the gap.
 *
 * A block may enter its first tier without tokens: an object store was found to have it, or a disk whose
 * files have no room for them. Followers can't place it. The registry writes it again when its tokens are
 * known; consolidated, it is published once more then.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/utf8.h"
#include "bm/events/chains.h"
#include "bm/events/events.h"

#define MAX_EVENT (4u << 20) /* upper limit for tokens and hashes, see struct kve_event */
#define MEND_MS 1000         /* longest wait for room to publish a loss */
/* Blocks remembered as published without tokens. Beyond these, others aren't published again. */
#define MAX_UNPLACED ((size_t)1 << 24)

struct zmq_sink {
    struct kve_publisher *publisher;
    enum kvbm_event_scope scope;
    uint32_t block_size;
    uint64_t lost;     /* events lost and not yet reported to followers */
    bool told_foreign; /* a block of another size was logged */
    char *lora_name, *cache_salt;
    uint64_t *hashes; /* buffer for the event being built */
    uint32_t *tokens;
    size_t capacity; /* in blocks */
    /* Consolidated: blocks published without tokens alone; the batch's changes that are published */
    struct kvbm_chains unplaced;
    struct kvbm_event *chosen;
    size_t max_chosen;
};

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
    uint64_t parent = run->parent ? kvp_key_number(run->parent, run->key_len) : 0;
    struct kve_event event = {
        .size = sizeof(event),
        .type = run->type == KVBM_EVENT_STORED ? KVE_STORED : KVE_REMOVED,
        /* consolidated: followers know one tier, since a block may leave a different tier than the
         * one that it entered first */
        .tier = sink->scope == KVBM_EVENTS_PER_TIER ? run->tier : KV_TIER_DEVICE,
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
        sink->hashes[i] = kvp_key_number(run[i].key, run[i].key_len);
        if (run->n_tokens)
            memcpy(sink->tokens + i * sink->block_size, run[i].tokens,
                   sink->block_size * sizeof(*sink->tokens));
    }
    return kve_publisher_publish(sink->publisher, &event, 1);
}

/* Forget which blocks were published: followers forget them, too. */
static void forget(struct zmq_sink *sink)
{
    kvbm_chains_fini(&sink->unplaced);
    sink->unplaced.max = MAX_UNPLACED;
}

/* Publish a loss. Wait for room first, since the next event may be far off. */
static int mend(struct zmq_sink *sink)
{
    struct kve_event cleared = {.size = sizeof(cleared), .type = KVE_CLEARED, .group = -1};
    int err;

    if (!sink->lost)
        return 0;
    kve_publisher_flush(sink->publisher, MEND_MS);
    err = kve_publisher_publish(sink->publisher, &cleared, 1);
    if (err < 0)
        return err;
    kve_publisher_lost(sink->publisher, sink->lost);
    sink->lost = 0;
    forget(sink);
    return 0;
}

/* True for stored blocks of another size than the sink's: these followers can't use them. */
static bool is_foreign(struct zmq_sink *sink, const struct kvbm_event *event)
{
    if (!event->n_tokens || event->n_tokens == sink->block_size)
        return false;
    if (!sink->told_foreign)
        kv_log_warn("kvbm", "blocks of another size aren't published",
                    "group=%u block_size=%u published=%u", event->group, event->n_tokens,
                    sink->block_size);
    sink->told_foreign = true;
    return true;
}

/* Tell whether consolidated followers get a change. */
static bool is_consolidated(struct kvbm_chains *unplaced, const struct kvbm_event *event)
{
    uint64_t id = kvbm_chain_id(event->group, event->key, event->key_len);
    struct kvbm_chain_of was;

    if (event->type == KVBM_EVENT_REMOVED) {
        if (event->last)
            (void)kvbm_chains_take(unplaced, id, &was);
        return event->last;
    }
    if (event->n_tokens)
        return kvbm_chains_take(unplaced, id, &was) || event->first;
    if (event->first)
        (void)kvbm_chains_enter(unplaced, id);
    return event->first;
}

/* Choose the changes of a batch that consolidated followers get. Returns their number, or -ENOMEM. */
static long choose(struct zmq_sink *sink, const struct kvbm_event *events, size_t n)
{
    struct kvbm_event *chosen = sink->chosen;
    long kept = 0;

    if (n > sink->max_chosen) {
        chosen = reallocarray(sink->chosen, n, sizeof(*chosen));
        if (!chosen)
            return -ENOMEM;
        sink->chosen = chosen;
        sink->max_chosen = n;
    }
    for (size_t i = 0; i < n; i++) {
        if (is_consolidated(&sink->unplaced, &events[i]))
            chosen[kept++] = events[i];
    }
    return kept;
}

static void publish_batch(struct zmq_sink *sink, const struct kvbm_event *events, size_t n)
{
    bool ready = reserve(sink, n) == 0;

    for (size_t i = 0, len; i < n; i += len) {
        len = kvbm_event_run(events + i, KV_MIN(n - i, (size_t)(MAX_EVENT / sink->block_size)));
        if (is_foreign(sink, events + i))
            continue;
        if (!ready || mend(sink) < 0 || publish_run(sink, events + i, len) < 0)
            sink->lost += len;
    }
    mend(sink);
}

static void publish(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct zmq_sink *sink = arg;
    long chosen = (long)n;

    sink->lost += lost;
    if (sink->lost)
        forget(sink);
    if (sink->scope == KVBM_EVENTS_CONSOLIDATED) {
        chosen = choose(sink, events, n);
        events = sink->chosen;
    }
    if (chosen < 0) {
        sink->lost += n;
        chosen = 0;
    }
    publish_batch(sink, events, (size_t)chosen);
}

static void zmq_free(void *arg)
{
    struct zmq_sink *sink = arg;

    kve_publisher_destroy(sink->publisher);
    free(sink->lora_name);
    free(sink->cache_salt);
    free(sink->hashes);
    free(sink->tokens);
    free(sink->chosen);
    kvbm_chains_fini(&sink->unplaced);
    free(sink);
}

/* True when followers can read @name: strings of msgpack are UTF-8. */
static bool is_text(const char *name)
{
    return !name || kv_utf8_valid(name);
}

static int copy_name(const char *name, char **ret)
{
    *ret = name ? strdup(name) : NULL;
    return name && !*ret ? -ENOMEM : 0;
}

int kvbm_events_add_zmq(struct kvbm_events *events, const struct kvbm_zmq_opts *opts,
                        struct kve_publisher **ret)
{
    static const struct kvbm_sink_ops ops = {.fn = publish, .again = true, .close = zmq_free};
    const struct kve_publisher_opts *publisher = KV_OPT(opts, publisher, NULL);
    struct zmq_sink *sink;
    int err;

    if (!events || !kv_sized(opts, "kvbm_zmq_opts") || !publisher || !KV_OPT(opts, block_size, 0) ||
        opts->block_size > MAX_EVENT ||
        (unsigned)KV_OPT(opts, scope, KVBM_EVENTS_PER_TIER) > KVBM_EVENTS_CONSOLIDATED)
        return -EINVAL;
    if (!is_text(KV_OPT(opts, lora_name, NULL)) || !is_text(KV_OPT(opts, cache_salt, NULL)))
        return -EINVAL;
    sink = calloc(1, sizeof(*sink));
    if (!sink)
        return -ENOMEM;
    sink->block_size = opts->block_size;
    sink->scope = KV_OPT(opts, scope, KVBM_EVENTS_PER_TIER);
    forget(sink);
    err = copy_name(KV_OPT(opts, lora_name, NULL), &sink->lora_name);
    if (err == 0)
        err = copy_name(KV_OPT(opts, cache_salt, NULL), &sink->cache_salt);
    if (err == 0)
        err = kve_publisher_create(publisher, &sink->publisher);
    if (err == 0)
        err = kvbm_events_add_sink(events, KVBM_EVENTS_PER_TIER, &ops, sink);
    if (err < 0)
        zmq_free(sink);
    else if (ret)
        *ret = sink->publisher;
    return err;
}
