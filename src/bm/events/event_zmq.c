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
 * known; consolidated, it is published once more then. Behind a loss followers know no block, so the
 * consolidated sink publishes each again with the first tokens that come, and remembers which it has.
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
/* Blocks that a consolidated sink remembers. Beyond these, others aren't published again. */
#define MAX_BLOCKS ((size_t)1 << 24)

struct zmq_sink {
    struct kve_publisher *publisher;
    enum kvbm_event_scope scope;
    uint32_t block_size;
    uint64_t lost;     /* events lost and not yet reported to followers */
    bool told_foreign; /* a block of another size was logged */
    char *lora_name, *cache_salt;
    /* the event being built, of at most capacity blocks */
    const struct kvbm_event **run;
    uint64_t *hashes;
    uint32_t *tokens;
    size_t capacity;
    /*
     * Consolidated: blocks in some tier, and whether they were published with tokens. @knows_all: all
     * blocks that were published since the last loss. Else those that were published without tokens alone,
     * and others count as published with them.
     */
    struct kvbm_chains blocks;
    bool knows_all;
};

static int reserve(struct zmq_sink *sink, size_t n)
{
    const struct kvbm_event **run;
    uint64_t *hashes;
    uint32_t *tokens;

    if (n <= sink->capacity)
        return 0;
    run = reallocarray(sink->run, n, sizeof(*run));
    if (!run)
        return -ENOMEM;
    sink->run = run;
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

/* Publish the event being built, of @n changes. */
static int publish_event(struct zmq_sink *sink, size_t n)
{
    const struct kvbm_event *first = sink->run[0];
    uint64_t parent = first->parent ? kvp_key_number(first->parent, first->key_len) : 0;
    struct kve_event event = {
        .size = sizeof(event),
        .type = first->type == KVBM_EVENT_STORED ? KVE_STORED : KVE_REMOVED,
        /* consolidated: followers know one tier, since a block may leave a different tier than the
         * one that it entered first */
        .tier = sink->scope == KVBM_EVENTS_PER_TIER ? first->tier : KV_TIER_DEVICE,
        .hashes = sink->hashes,
        .n_hashes = n,
        .parent = first->parent ? &parent : NULL,
        .tokens = first->n_tokens ? sink->tokens : NULL,
        .n_tokens = first->n_tokens ? n * sink->block_size : 0,
        .block_size = sink->block_size,
        .lora_name = sink->lora_name,
        .cache_salt = sink->cache_salt,
        .group = first->group ? (int32_t)first->group : -1,
    };

    for (size_t i = 0; i < n; i++) {
        const struct kvbm_event *change = sink->run[i];

        sink->hashes[i] = kvp_key_number(change->key, change->key_len);
        if (first->n_tokens)
            memcpy(sink->tokens + i * sink->block_size, change->tokens,
                   sink->block_size * sizeof(*sink->tokens));
    }
    return kve_publisher_publish(sink->publisher, &event, 1);
}

/* Note that @n changes are lost, and forget which blocks were published: followers forget them, too. */
static void lose(struct zmq_sink *sink, uint64_t n)
{
    sink->lost += n;
    kvbm_chains_clear(&sink->blocks);
    sink->knows_all = true;
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

/* Tell whether followers get a change. */
static bool wants(const struct zmq_sink *sink, const struct kvbm_event *event)
{
    const struct kvbm_chain_of *block;

    if (sink->scope == KVBM_EVENTS_PER_TIER)
        return true;
    if (event->type == KVBM_EVENT_REMOVED)
        return event->last;
    if (event->first || !event->n_tokens)
        return event->first;
    block =
        kvbm_chains_find(&sink->blocks, kvbm_chain_id(event->group, event->key, event->key_len));
    return block ? !block->has_tokens : sink->knows_all;
}

/* Remember a change that followers get. */
static void note(struct zmq_sink *sink, const struct kvbm_event *event)
{
    uint64_t id = kvbm_chain_id(event->group, event->key, event->key_len);
    struct kvbm_chain_of *block, was;

    if (event->type == KVBM_EVENT_REMOVED || (event->n_tokens && !sink->knows_all)) {
        (void)kvbm_chains_take(&sink->blocks, id, &was);
        return;
    }
    block = kvbm_chains_enter(&sink->blocks, id);
    if (block)
        block->has_tokens = event->n_tokens;
    else
        sink->knows_all = false; /* publish rather too little: followers count copies */
}

/* Publish the event being built, behind a loss that isn't published yet. */
static void end_event(struct zmq_sink *sink, size_t n)
{
    if (n && (mend(sink) < 0 || publish_event(sink, n) < 0))
        lose(sink, n);
}

static void publish(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct zmq_sink *sink = arg;
    size_t most = KV_MIN(n, (size_t)(MAX_EVENT / sink->block_size)), len = 0;

    if (lost)
        lose(sink, lost);
    if (reserve(sink, most) < 0) {
        lose(sink, n);
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        if (is_foreign(sink, &events[i]) || !wants(sink, &events[i]))
            continue;
        if (len == most || (len && (!kvbm_event_follows(sink->run[len - 1], &events[i]) ||
                                    sink->run[0]->n_tokens != events[i].n_tokens))) {
            end_event(sink, len);
            len = 0;
        }
        if (sink->scope == KVBM_EVENTS_CONSOLIDATED)
            note(sink, &events[i]); /* behind a loss that the event before may be */
        sink->run[len++] = &events[i];
    }
    end_event(sink, len);
    mend(sink);
}

static void zmq_free(void *arg)
{
    struct zmq_sink *sink = arg;

    kve_publisher_destroy(sink->publisher);
    free(sink->lora_name);
    free(sink->cache_salt);
    free(sink->run);
    free(sink->hashes);
    free(sink->tokens);
    kvbm_chains_fini(&sink->blocks);
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
    sink->blocks.max = MAX_BLOCKS;
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
