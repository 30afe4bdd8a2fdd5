// SPDX-License-Identifier: Apache-2.0
/**
 * A simulated LLM engine: a bounded prefix cache, and a real publisher that announces stored and
 * removed blocks over ZMQ, as vLLM does. Internally locked; any thread may call.
 */
#ifndef KV_CLI_REPLAY_ENGINE_H
#define KV_CLI_REPLAY_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"
#include "cli/replay/prompt.h"

struct kc_engine;

struct kc_engine_opts {
    uint64_t capacity; /* blocks; 0: unlimited */
    uint32_t block_size;
    uint32_t buffer_batches; /* batches kept for replay */
    uint64_t salt;           /* not 0: the engine's block hashes differ from other engines' */
};

int kc_engine_create(const struct kc_engine_opts *opts, struct kc_engine **ret,
                     struct kv_error *error);
void kc_engine_destroy(struct kc_engine *engine);
const char *kc_engine_endpoint(const struct kc_engine *engine);
const char *kc_engine_replay_endpoint(const struct kc_engine *engine);

/** Effect of serving a prompt on the engine, in blocks. */
struct kc_served {
    size_t held;    /* found in the cache */
    size_t stored;  /* computed and kept */
    size_t evicted; /* dropped to make room */
};

/** Serve a prompt and publish the changes. Returns 0 or -ENOMEM. */
int kc_engine_serve(struct kc_engine *engine, const struct kc_prompt *prompt,
                    struct kc_served *ret);

/** Drop all blocks and publish AllBlocksCleared, like an engine that resets its prefix cache. */
int kc_engine_reset(struct kc_engine *engine);

/** Return the truth: leading blocks of @prompt in the cache, and all its blocks. */
void kc_engine_truth(struct kc_engine *engine, const struct kc_prompt *prompt, size_t *ret_held,
                     uint64_t *ret_blocks);

/**
 * Publish an event without effect (the removal of a block that never existed), so that a loss at
 * the end of the stream shows as a sequence gap.
 */
int kc_engine_tick(struct kc_engine *engine);

/** Wait until all events are handed to ZMQ. */
int kc_engine_flush(struct kc_engine *engine, uint32_t timeout_ms);

struct kc_engine_stats {
    uint64_t batches, events, dropped_events, replay_requests, replayed_batches;
    uint64_t stored_blocks, evicted_blocks, blocks;
};
void kc_engine_get_stats(struct kc_engine *engine, struct kc_engine_stats *ret);

#endif
