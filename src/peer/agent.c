// SPDX-License-Identifier: Apache-2.0
/* Agents: who this process is among its peers. */
#include "peer/session/agent.h"

#include <sys/random.h>

#include "base/args/instance.h"
#include "base/core/log.h"
#include "base/core/utf8.h"
#include "peer/lease/lend.h"
#include "peer/session/net.h"

#define MAX_SETS (1u << 20)
#define MAX_BYTES (UINT64_C(256) << 20)

/* Read the agent's number among workers; 0: it is to be drawn. */
static int read_worker(const struct kvbm_agent_opts *opts, struct kvbm_agent *agent)
{
    const char *name = KV_OPT(opts, worker_name, NULL), *why = NULL;
    int kind;

    agent->worker = KV_OPT(opts, worker, 0);
    if (!name)
        return 0;
    if (agent->worker)
        why = "there are worker and worker_name";
    kind = why ? -EINVAL : kv_instance_parse(name, strlen(name), &agent->worker, &why);
    if (kind >= 0 && !agent->worker)
        why = "0 stands for none";
    if (!why)
        return 0;
    kv_log_error("kvbm", "an agent's worker_name is refused", "agent=%s reason=\"%s\"", opts->name,
                 why);
    return -EINVAL;
}

static int read_opts(const struct kvbm_agent_opts *opts, struct kvbm_agent *agent)
{
    const char *fingerprint = KV_OPT(opts, fingerprint, "");
    size_t len;

    if (!kvbm_agent_name_is_valid(opts->name, strlen(opts->name))) {
        kv_log_error("kvbm", "an agent's name has 1 to 63 of A-Z a-z 0-9 . _ -", NULL);
        return -EINVAL;
    }
    if (read_worker(opts, agent) < 0)
        return -EINVAL;
    len = strlen(fingerprint);
    agent->key_len = KV_OPT(opts, key_len, 8);
    agent->max_sets = KV_OPT(opts, max_sets, 4096);
    agent->max_bytes = KV_OPT(opts, max_bytes, MAX_BYTES);
    if (len > KVBM_MAX_FINGERPRINT || !kv_utf8_valid(fingerprint) || agent->key_len < 4 ||
        agent->key_len > 64 || agent->max_sets > MAX_SETS) {
        kv_log_error("kvbm", "an agent's options are out of range",
                     "agent=%s fingerprint_bytes=%zu key_len=%u max_sets=%u", opts->name, len,
                     agent->key_len, agent->max_sets);
        return -EINVAL;
    }
    memcpy(agent->name, opts->name, strlen(opts->name) + 1);
    memcpy(agent->fingerprint, fingerprint, len + 1);
    return 0;
}

/* Draw a number that isn't 0, unless there is one. */
static int draw(uint64_t *number)
{
    while (*number == 0) {
        if (getrandom(number, sizeof(*number), 0) != (ssize_t)sizeof(*number))
            return -EAGAIN;
    }
    return 0;
}

/* Free an agent, also one that is half built. */
static void agent_free(struct kvbm_agent *agent)
{
    kvbm_net_destroy(agent->net);
    kvbm_carriers_destroy(agent);
    kvbm_lender_destroy(agent->lender);
    while (agent->n_peers)
        (void)kvbm_drop_peer(agent, agent->n_peers - 1);
    pthread_mutex_destroy(&agent->lock);
    free(agent->peers);
    free(agent->exports);
    free(agent);
}

int kvbm_agent_create(const struct kvbm_agent_opts *opts, struct kvbm_agent **ret)
{
    struct kvbm_agent *agent;
    int err;

    if (!ret || !kv_sized(opts, "kvbm_agent_opts") || !opts->name)
        return -EINVAL;
    agent = calloc(1, sizeof(*agent));
    if (!agent)
        return -ENOMEM;
    pthread_mutex_init(&agent->lock, NULL);
    err = read_opts(opts, agent);
    if (err == 0)
        err = draw(&agent->incarnation);
    if (err == 0)
        err = draw(&agent->worker);
    if (err == 0)
        err = kvbm_carriers_create(agent, opts);
    if (err == 0)
        err = kvbm_net_create(agent, opts);
    if (err < 0)
        agent_free(agent);
    else
        *ret = agent;
    return err;
}

int kvbm_agent_destroy(struct kvbm_agent *agent)
{
    if (!agent)
        return 0;
    pthread_mutex_lock(&agent->lock);
    if (agent->n_users) {
        kv_log_error("kvbm", "an agent is in use and stays", "agent=%s users=%u", agent->name,
                     agent->n_users);
        pthread_mutex_unlock(&agent->lock);
        return -EBUSY;
    }
    pthread_mutex_unlock(&agent->lock);
    agent_free(agent);
    return 0;
}
