// SPDX-License-Identifier: Apache-2.0
/*
 * Verify the end state of a run, after the last event. For every worker and prompt the indexer must
 * name exactly the blocks of the prefix, and all blocks, that the worker holds.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/client/prom.h"
#include "cli/replay/replay.h"

#define TICK_EVERY_NS (500 * KV_NS_PER_MS)

uint32_t kc_replay_compare(struct kc_replay *replay, const struct kc_prompt *prompt,
                           const struct kc_belief *beliefs, char *why, size_t size)
{
    uint32_t wrong = 0;

    for (uint32_t w = 0; w < replay->opts.workers; w++) {
        const struct kc_belief *belief = &beliefs[w];
        uint64_t blocks;
        size_t held;

        kc_engine_truth(replay->engines[w], prompt, &held, &blocks);
        /* An answer has total blocks only for workers that hold the prompt's first block. */
        if (belief->overlap == held && (held == 0 || belief->blocks == blocks))
            continue;
        if (wrong++ == 0)
            snprintf(why, size,
                     "worker %" PRIu32 " holds %zu of %zu blocks of a prompt (%" PRIu64
                     " in all), the indexer says %" PRIu32 " (%" PRIu64 ")",
                     w + 1, held, prompt->n_blocks, blocks, belief->overlap, belief->blocks);
    }
    return wrong;
}

/*
 * Ask for one prompt until the answer is right or the deadline passes. Returns the number of wrong
 * workers. An indexer that comes back during this has as much time as it had at first.
 */
static int verify_prompt(struct kc_replay *replay, struct kc_client *client, uint64_t number,
                         struct kc_prompt *prompt, struct kc_belief *beliefs, uint64_t *deadline_ns,
                         struct kv_error *error)
{
    const struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    struct kc_verdict *verdict = &replay->verdict;
    uint64_t tick_ns = kv_now_ns() + TICK_EVERY_NS, generation;
    char why[sizeof(verdict->first)];
    uint32_t wrong;
    int rc = kc_replay_prompt(replay, number, prompt);

    while (rc == 0) {
        generation = replay->generation; /* the other clients have ended */
        rc = kc_replay_ask(replay, client, prompt, beliefs, NULL, error);
        if (rc < 0)
            break;
        if (replay->generation != generation)
            *deadline_ns = kv_now_ns() + replay->opts.settle_ms * KV_NS_PER_MS;
        wrong = kc_replay_compare(replay, prompt, beliefs, why, sizeof(why));
        if (wrong == 0 || kv_now_ns() >= *deadline_ns || kc_replay_interrupted()) {
            if (wrong > 0 && verdict->wrong == 0)
                memcpy(verdict->first, why, sizeof(why));
            return (int)wrong;
        }
        /*
         * A follower notices events lost at the very end of a stream only when another batch
         * follows.
         */
        for (uint32_t w = 0; w < replay->opts.workers && kv_now_ns() >= tick_ns; w++)
            rc = kc_engine_tick(replay->engines[w]);
        if (kv_now_ns() >= tick_ns)
            tick_ns = kv_now_ns() + TICK_EVERY_NS;
        nanosleep(&pause, NULL);
    }
    return rc;
}

/*
 * Choose the prompts to verify: the last one of each worker, whose total is then compared, too. Of
 * the others, half are from the end of the run, half from anywhere.
 */
static uint64_t sample(struct kc_replay *replay, uint64_t i, struct kc_rng *rng)
{
    uint64_t n = replay->counts.requests, recent = KV_MIN(n, replay->opts.workers * 16);

    if (i < replay->opts.workers)
        return replay->last_prompt[i];
    n = KV_MIN(n, UINT32_MAX);
    return i % 2 ? kc_rng_below(rng, (uint32_t)n)
                 : replay->counts.requests - 1 - kc_rng_below(rng, (uint32_t)recent);
}

int kc_replay_verify(struct kc_replay *replay, struct kc_client *client, struct kv_error *error)
{
    struct kc_belief *beliefs = calloc(replay->opts.workers, sizeof(*beliefs));
    struct kc_rng rng = {.state = kc_mix(replay->opts.seed + 3)};
    struct kc_verdict *verdict = &replay->verdict;
    uint64_t start_ns = kv_now_ns(), deadline_ns, settled_ns = start_ns;
    struct kc_prompt prompt = {0};
    int rc = 0;

    if (!beliefs)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    deadline_ns = start_ns + replay->opts.settle_ms * KV_NS_PER_MS;
    for (uint64_t w = 0; w < replay->opts.workers; w++)
        kc_engine_flush(replay->engines[w], 1000);
    for (uint64_t i = 0; i < replay->opts.verify && rc >= 0 && replay->counts.requests > 0; i++) {
        uint64_t number = sample(replay, i, &rng);

        if (number == UINT64_MAX) /* this worker got no prompt */
            continue;
        rc = verify_prompt(replay, client, number, &prompt, beliefs, &deadline_ns, error);
        if (rc < 0 || kc_replay_interrupted())
            break;
        verdict->prompts++;
        verdict->comparisons += replay->opts.workers;
        verdict->wrong += (uint64_t)rc;
        if (i < replay->opts.workers)
            settled_ns = kv_now_ns();
    }
    replay->interrupted = kc_replay_interrupted();
    if (replay->interrupted && rc == -EINTR)
        rc = 0;
    verdict->done = rc >= 0 && verdict->prompts > 0;
    verdict->settle_ms = (settled_ns - start_ns) / KV_NS_PER_MS;
    kc_prompt_fini(&prompt);
    free(beliefs);
    return rc < 0 ? rc : 0;
}

/* -- what the indexer says of itself ---------------------------------------------------------- */

static uint64_t rss_of(int pid)
{
    unsigned long long pages = 0;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/statm", pid);
    file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%*u %llu", &pages) != 1) // NOLINT(cert-err34-c): the kernel wrote it
        pages = 0;
    fclose(file);
    return pages * 4096;
}

/* True for figures of this run: other programs may use the same indexer. */
static bool is_ours(const struct kc_replay *replay, const struct kc_sample *sample)
{
    char model[256], tenant[256];

    return kc_sample_label(sample, "model", model, sizeof(model)) &&
           strcmp(model, replay->opts.model) == 0 &&
           kc_sample_label(sample, "tenant", tenant, sizeof(tenant)) &&
           strcmp(tenant, replay->tenant) == 0;
}

void kc_replay_read_metrics(struct kc_replay *replay, struct kc_client *client)
{
    struct kc_index_figures *index = &replay->index;
    const struct kv_buf *body;
    struct kc_sample sample;
    struct kc_prom prom;

    if (replay->child && kc_child_pid(replay->child) > 0)
        index->rss = rss_of(kc_child_pid(replay->child));
    if (kc_http_request(kc_client_http(client), "/metrics", KC_BODY_NONE, NULL, 0, &body, NULL) !=
        200)
        return;
    kc_prom_init(&prom, body->data, body->len);
    while (kc_prom_next(&prom, &sample)) {
        if (!is_ours(replay, &sample))
            continue;
        if (kv_str_eq(sample.name, "kv_indexer_index_bytes")) {
            index->bytes = (uint64_t)sample.value;
            index->known = true;
        } else if (kv_str_eq(sample.name, "kv_indexer_index_blocks")) {
            index->blocks = (uint64_t)sample.value;
        } else if (kv_str_eq(sample.name, "kv_indexer_index_holder_blocks")) {
            index->holder_blocks = (uint64_t)sample.value;
        } else if (kv_str_eq(sample.name, "kv_indexer_stream_gaps_total")) {
            index->gaps += (uint64_t)sample.value;
        } else if (kv_str_eq(sample.name, "kv_indexer_stream_replayed_batches_total")) {
            index->replayed += (uint64_t)sample.value;
        }
    }
}
