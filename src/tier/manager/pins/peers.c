// SPDX-License-Identifier: Apache-2.0
/*
 * Peers of a manager: its agent, the directory that it follows, and lookups that ask peers in the
 * background.
 *
 * The caller gives an agent, or the manager makes one of its own that opens sessions and lends
 * nothing. A lookup (where.c) asks peers for keys that no tier has, and answers KVBM_PENDING
 * meanwhile; what peers answer is kept by the peers' room (tier/peer), which the next lookup reads.
 * At most KVBM_MAX_PEER_ASKS questions run at a time: beyond these, peers aren't asked.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "base/core/log.h"
#include "kvbm_directory.h"
#include "peer/lease/ask.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/state/manager.h"

/* ---- opening ---- */

/* Make an agent that opens sessions and lends nothing. */
static int make_agent(struct kvbm_manager *m)
{
    char name[KVBM_MAX_AGENT_NAME + 1];
    uint64_t number;
    const struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                         .name = name,
                                         .fingerprint = m->opts.fingerprint,
                                         .key_len = m->key_len,
                                         .token_file = m->opts.peer_token_file,
                                         .layout = kvbm_layout_get_config(m->layout)};

    if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
        return -EAGAIN;
    snprintf(name, sizeof(name), "manager-%016" PRIx64, number);
    return kvbm_agent_create(&opts, &m->own_agent);
}

/* Open sessions with the peers that the option `peers` names, now and as they come and go. */
static int follow(struct kvbm_manager *m, struct kvbm_agent *agent)
{
    const struct kvbm_directory_opts directory = {.size = sizeof(directory),
                                                  .peers = m->opts.peers};
    const struct kvbm_follow_opts opts = {.size = sizeof(opts), .directory = &directory};

    return m->opts.peers ? kvbm_agent_follow(agent, &opts, &m->follower) : 0;
}

int kvbm_manager_open_peers(struct kvbm_manager *m)
{
    const struct kvbm_indexer_opts indexer = {.url = m->opts.indexer,
                                              .model = m->opts.indexer_model,
                                              .tenant = m->opts.indexer_tenant,
                                              .token_file = m->opts.indexer_token_file,
                                              .tls_ca = m->opts.indexer_ca,
                                              .timeout_ms = m->opts.indexer_timeout_ms};
    struct kvbm_peers_opts opts = {.size = sizeof(opts),
                                   .indexer = m->opts.indexer ? &indexer : NULL,
                                   .agent = m->opts.agent,
                                   .like = m->layout,
                                   .shard = &m->opts.shard,
                                   .has_object_store = m->opts.object,
                                   .key_len = m->key_len,
                                   .set = m->opts.peer_set,
                                   .timeout_ms = m->opts.peer_timeout_ms};
    int rc = 0;

    if (!m->opts.agent && !m->opts.peers)
        return 0;
    if (!m->opts.agent) {
        rc = make_agent(m);
        opts.agent = m->own_agent;
    }
    if (rc == 0)
        rc = follow(m, opts.agent);
    return rc < 0 ? rc : kvbm_peers_open(&opts, &m->peers);
}

void kvbm_manager_close_peers(struct kvbm_manager *m)
{
    kvbm_peers_close(m->peers);
    m->peers = NULL;
    (void)kvbm_follower_close(m->follower);
    m->follower = NULL;
    if (m->own_agent && kvbm_agent_destroy(m->own_agent) < 0)
        kv_log_error("kvbm", "the agent of a manager is left behind", NULL);
    m->own_agent = NULL;
}

/* ---- lookups ---- */

/* Free a question that has ended. Its answers are kept already (tier/peer). */
static void answered(struct kvbm_manager *m, void *ask)
{
    m->mover.running--;
    m->n_peer_asks--;
    free(ask);
    pthread_cond_broadcast(&m->changed);
}

static void ask_done(struct kvbm_peer_batch *batch)
{
    struct kvbm_peer_ask *ask = batch->arg;

    kvbm_note(ask->manager, answered, ask);
}

/* Copy the wanted keys of a chain into a question: the caller's memory may go before the answer. */
static void fill(struct kvbm_peer_ask *ask, const struct kvbm_chain *chain, size_t first,
                 uint64_t wanted)
{
    const struct kvbm_manager *m = ask->manager;
    uint32_t n = 0;

    for (; wanted; wanted &= wanted - 1) {
        size_t i = first + (size_t)__builtin_ctzll(wanted);
        uint8_t *key = ask->keys + (size_t)n * m->key_len;

        memcpy(key, (const uint8_t *)chain->keys + i * m->key_len, m->key_len);
        ask->ios[n++] =
            (struct kvbm_peer_io){.key = key, .hash = kvbm_key_hash(m, chain->group, key)};
    }
    ask->batch = (struct kvbm_peer_batch){.op = KVBM_PEER_ASK,
                                          .group = chain->group,
                                          .ios = ask->ios,
                                          .n = n,
                                          .done = ask_done,
                                          .arg = ask};
}

int kvbm_peers_look(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                    uint64_t wanted)
{
    struct kvbm_peer_ask *ask = m->n_peer_asks < KVBM_MAX_PEER_ASKS ? malloc(sizeof(*ask)) : NULL;
    int rc = ask ? 0 : -EAGAIN;

    if (rc == 0) {
        ask->manager = m;
        fill(ask, chain, i, wanted);
        rc = kvbm_peers_submit(m->peers, &ask->batch);
    }
    if (rc < 0) {
        free(ask);
        return rc;
    }
    m->n_peer_asks++;
    m->mover.running++;
    return 0;
}

/* ---- hints ---- */

uint64_t kvbm_peers_hinted(struct kvbm_manager *m, const struct kvbm_hint *hint)
{
    struct kvbm_agent *agent = m->opts.agent ? m->opts.agent : m->own_agent;
    char endpoint[sizeof(hint->host) + 32];
    uint64_t worker;

    if (!m->peers || !hint || hint->size < offsetof(struct kvbm_hint, move) || !hint->host[0] ||
        !memchr(hint->host, '\0', sizeof(hint->host)))
        return 0;
    snprintf(endpoint, sizeof(endpoint), strchr(hint->host, ':') ? "tcp:[%s]:%u" : "tcp:%s:%u",
             hint->host, hint->port);
    worker = kvbm_follower_worker_at(m->follower, endpoint);
    return worker ? worker : kvbm_agent_worker_at(agent, endpoint);
}
