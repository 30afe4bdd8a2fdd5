// SPDX-License-Identifier: Apache-2.0
/*
 * Connections of a replay with its indexer: start, registration, and recovery when either goes
 * away.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/mix.h"
#include "cli/replay/replay.h"

#define HEALTHY_MS 5000 /* time for a running indexer to answer */
#define SILENT_MS 10000 /* time for a running indexer to answer one /health */
#define FOLLOW_MS 20000 /* time until the indexer follows every worker */
#define AWAY_MS 60000   /* longest absence of the indexer during a run */
#define ALIVE_MS 200    /* interval at which a child indexer is checked meanwhile */

static void pause_ms(long ms)
{
    const struct timespec pause = {.tv_nsec = ms * 1000 * 1000};

    nanosleep(&pause, NULL);
}

static int register_all(struct kc_replay *replay, struct kc_client *client, struct kv_error *error)
{
    for (uint32_t w = 0; w < replay->opts.workers; w++) {
        int rc = kc_client_register(client, w, kc_engine_endpoint(replay->engines[w]),
                                    kc_engine_replay_endpoint(replay->engines[w]), error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

void kc_replay_leave(struct kc_replay *replay, struct kc_client *client)
{
    for (uint32_t w = 0; w < replay->opts.workers && replay->joined; w++) {
        int rc = kc_client_unregister(client, w, NULL);

        if (rc == -ECONNREFUSED || rc == -ETIMEDOUT)
            return;
    }
}

/* -- joining ---------------------------------------------------------------------------------- */

/*
 * A prompt that no client asks for. The engines announce it to find out whether the indexer
 * listens.
 */
struct probe {
    struct kc_prompt prompt;
    struct kc_belief *beliefs;
    bool stored; /* the engines announce it as stored, else as removed */
};

/* Make every engine's cache hold the probe alone, or nothing, and publish that. */
static int set_probe(struct kc_replay *replay, const struct probe *probe)
{
    struct kc_served served;
    int rc = 0;

    for (uint32_t w = 0; w < replay->opts.workers && rc == 0; w++) {
        rc = kc_engine_reset(replay->engines[w]);
        if (rc == 0 && probe->stored)
            rc = kc_engine_serve(replay->engines[w], &probe->prompt, &served);
    }
    return rc;
}

/*
 * Publish the state of the probe until the index shows it for every worker. Repeat it: a batch sent
 * before a subscription has arrived is lost, and no error says so.
 */
static int wait_for_probe(struct kc_replay *replay, struct kc_client *client, struct probe *probe,
                          bool stored, struct kv_error *error)
{
    uint64_t deadline_ns = kv_now_ns() + FOLLOW_MS * KV_NS_PER_MS;
    uint32_t wanted = (uint32_t)replay->opts.workers;

    probe->stored = stored;
    if (stored) /* usually enough for the subscriptions to arrive, so that no event is lost */
        pause_ms(100);
    for (unsigned round = 0;; round++) {
        uint32_t right = 0;
        int rc = round % 16 == 0 ? set_probe(replay, probe) : 0;

        if (rc == 0)
            rc = kc_client_query(client, probe->prompt.tokens, probe->prompt.n_tokens,
                                 probe->beliefs, NULL, error);
        if (rc < 0)
            return rc;
        for (uint32_t w = 0; w < wanted; w++)
            right += (probe->beliefs[w].overlap > 0) == stored;
        if (right == wanted)
            return 0;
        if (kc_replay_interrupted())
            return -EINTR;
        if (kv_now_ns() > deadline_ns)
            return kv_fail(error, -ETIMEDOUT, 0,
                           "the indexer follows only %" PRIu32 " of %" PRIu32
                           " workers; its log and "
                           "GET /workers say why",
                           right, wanted);
        pause_ms(20);
    }
}

static int wait_until_followed(struct kc_replay *replay, struct kc_client *client,
                               struct kv_error *error)
{
    const uint64_t id = UINT64_MAX - 1; /* not in any trace */
    struct probe probe = {.beliefs = calloc(replay->opts.workers, sizeof(*probe.beliefs))};
    int rc = -ENOMEM;

    if (probe.beliefs)
        rc = kc_prompt_expand(&probe.prompt, &id, 1, 0, (uint32_t)replay->opts.block_size);
    if (rc == 0)
        rc = wait_for_probe(replay, client, &probe, true, error);
    if (rc == 0)
        rc = wait_for_probe(replay, client, &probe, false, error);
    kc_prompt_fini(&probe.prompt);
    free(probe.beliefs);
    return rc == -ENOMEM ? kv_fail(error, rc, 0, "out of memory") : rc;
}

/*
 * Wait until the indexer answers. Check in each round that our child lives: it closes its sockets a
 * moment before waitpid reports its end.
 */
static int wait_until_there(struct kc_replay *replay, struct kc_client *client,
                            uint64_t deadline_ns, struct kv_error *error)
{
    uint64_t request_ms = replay->child ? KC_HTTP_TIMEOUT_MS : SILENT_MS;
    int rc;

    do {
        uint64_t until_ns = kv_now_ns() + ALIVE_MS * KV_NS_PER_MS;

        if (replay->child && !kc_child_alive(replay->child, error))
            return -ECHILD;
        if (kc_replay_interrupted()) /* nobody sets `stop` once the requests are done */
            return -EINTR;
        rc = kc_client_wait_healthy(client, KV_MIN(until_ns, deadline_ns), request_ms,
                                    &replay->stop, error);
    } while (rc == -ETIMEDOUT && kv_now_ns() < deadline_ns);
    return rc;
}

/*
 * Choose the tenant and instance_ids of this run. A running indexer may have workers of the model
 * which serve, and those of another replay: they must not be touched. Instance_ids are from 2^52 to
 * 2^53, far from those that people number by hand.
 */
static void choose_names(struct kc_replay *replay)
{
    uint64_t number = kv_secret() >> 12;

    snprintf(replay->tenant, sizeof(replay->tenant), "kvasir-replay-%013" PRIx64, number);
    replay->client.tenant = replay->tenant;
    replay->client.first_instance = (UINT64_C(1) << 52) + number / KC_MAX_WORKERS * KC_MAX_WORKERS;
}

int kc_replay_connect(struct kc_replay *replay, struct kc_client **ret, struct kv_error *error)
{
    int rc = 0;

    if (!replay->opts.url)
        rc = kc_child_start(&(struct kc_child_opts){.path = replay->opts.indexer}, &replay->child,
                            error);
    if (rc < 0)
        return rc;
    replay->client = (struct kc_client_opts){
        .url = replay->child ? kc_child_url(replay->child) : replay->opts.url,
        .token = replay->opts.token[0] ? replay->opts.token : NULL,
        .cacert = replay->opts.cacert,
        .model = replay->opts.model,
        .block_size = (uint32_t)replay->opts.block_size,
        .n_workers = (uint32_t)replay->opts.workers,
        .msgpack = replay->opts.msgpack,
    };
    choose_names(replay);
    rc = kc_client_create(&replay->client, ret, error);
    if (rc == 0)
        rc = wait_until_there(replay, *ret, kv_now_ns() + HEALTHY_MS * KV_NS_PER_MS, error);
    replay->joined = rc == 0;
    if (rc == 0)
        rc = register_all(replay, *ret, error);
    if (rc == 0)
        rc = wait_until_followed(replay, *ret, error);
    return rc;
}

/* -- coming back ------------------------------------------------------------------------------ */

/*
 * Return true for errors that are worth another try: absent, too slow, or restarted without our
 * registration.
 */
static bool is_away(int rc)
{
    return rc == -ENOENT || rc == -ECONNREFUSED || rc == -ETIMEDOUT;
}

static uint64_t current_generation(struct kc_replay *replay)
{
    uint64_t generation;

    pthread_mutex_lock(&replay->recovery);
    generation = replay->generation;
    pthread_mutex_unlock(&replay->recovery);
    return generation;
}

/*
 * Wait for the indexer and register again, unless another client has registered since @generation.
 */
static int bring_back(struct kc_replay *replay, struct kc_client *client, uint64_t generation,
                      uint64_t deadline_ns, struct kv_error *error)
{
    int rc = 0;

    pthread_mutex_lock(&replay->recovery);
    if (replay->generation == generation) {
        rc = wait_until_there(replay, client, deadline_ns, error);
        if (rc == 0)
            rc = register_all(replay, client, error);
        replay->generation += rc == 0;
    }
    pthread_mutex_unlock(&replay->recovery);
    return rc;
}

int kc_replay_ask(struct kc_replay *replay, struct kc_client *client,
                  const struct kc_prompt *prompt, struct kc_belief *beliefs, uint64_t *ret_ns,
                  struct kv_error *error)
{
    uint64_t deadline_ns = 0, generation;
    int rc;

    for (;;) {
        generation = current_generation(replay);
        rc = kc_client_query(client, prompt->tokens, prompt->n_tokens, beliefs, ret_ns, error);
        if (!is_away(rc))
            return rc;
        if (deadline_ns == 0)
            deadline_ns = kv_now_ns() + AWAY_MS * KV_NS_PER_MS;
        if (kv_now_ns() > deadline_ns)
            return rc;
        rc = bring_back(replay, client, generation, deadline_ns, error);
        if (rc < 0 && !is_away(rc))
            return rc;
    }
}
