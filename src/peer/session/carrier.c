// SPDX-License-Identifier: Apache-2.0
/* Carriers of an agent: which ones its options ask for. */
#include "peer/session/carrier.h"

#include <inttypes.h>

#include "base/core/log.h"
#include "peer/session/agent.h"

/* Log lines of one carrier come from all its threads: at most 5 a second. */
static void log_ucx(bool error, const char *text)
{
    static struct kv_log_rate rate;
    char quoted[800];

    (void)error; /* the caller that meets the failure logs it as one */
    if (kv_log_allowed(&rate, 5))
        kv_log_info("kvbm", "UCX says", "line=%s", kv_log_quote(quoted, sizeof(quoted), text));
}

static void log_nixl(bool error, const char *text)
{
    static struct kv_log_rate rate;
    char quoted[800];

    (void)error;
    if (kv_log_allowed(&rate, 5))
        kv_log_info("kvbm", "NIXL says", "line=%s", kv_log_quote(quoted, sizeof(quoted), text));
}

static const struct {
    const struct kvbm_carrier_abi *(*load)(void);
    void (*log)(bool error, const char *text);
    const char *unusable, *risky; /* events of the log */
} kinds[KVBM_N_CARRIERS] = {
    [KVBM_BY_UCX] = {kvbm_ucx_load, log_ucx, "UCX can't be used", "UCX may end this process"},
    [KVBM_BY_NIXL] = {kvbm_nixl_load, log_nixl, "NIXL can't be used", "NIXL has a risk"},
};

static int make_node(const struct kvbm_agent *agent, const struct kvbm_agent_opts *opts,
                     enum kvbm_by by, struct kvbm_carrier *carrier)
{
    char name[KVBM_MAX_AGENT_NAME + 20], why[200] = "", quoted[400];
    /* As for endpoints: beyond this machine only where the program has said that it means it. */
    const struct kvbm_carrier_opts node = {.loopback = !KV_OPT(opts, token_file, NULL) &&
                                                       !KV_OPT(opts, tls_ca, NULL) &&
                                                       !KV_OPT(opts, unprotected, false),
                                           .log = kinds[by].log,
                                           .name = name};
    const struct kvbm_carrier_abi *abi = kinds[by].load();
    int err;

    if (!abi)
        return -ENOTSUP;
    snprintf(name, sizeof(name), "%s.%016" PRIx64, agent->name, agent->incarnation);
    err = abi->node_create(&node, &carrier->node, why, sizeof(why));
    if (err < 0)
        kv_log_error("kvbm", kinds[by].unusable, "agent=%s why=%s", agent->name,
                     kv_log_quote(quoted, sizeof(quoted), why));
    else
        carrier->abi = abi;
    if (err == 0 && why[0])
        kv_log_warn("kvbm", kinds[by].risky, "agent=%s why=%s", agent->name,
                    kv_log_quote(quoted, sizeof(quoted), why));
    return err;
}

int kvbm_carriers_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts)
{
    const uint32_t uses[KVBM_N_CARRIERS] = {
        [KVBM_BY_UCX] = KV_OPT(opts, ucx, KVBM_UCX_OFF),
        [KVBM_BY_NIXL] = KV_OPT(opts, nixl, KVBM_NIXL_OFF),
    };

    if (uses[KVBM_BY_UCX] > KVBM_UCX_REQUIRED || uses[KVBM_BY_NIXL] > KVBM_NIXL_REQUIRED) {
        kv_log_error("kvbm", "an agent's options are out of range", "agent=%s ucx=%u nixl=%u",
                     agent->name, uses[KVBM_BY_UCX], uses[KVBM_BY_NIXL]);
        return -EINVAL;
    }
    for (int by = 0; by < KVBM_N_CARRIERS; by++) {
        int err = uses[by] ? make_node(agent, opts, by, &agent->carriers[by]) : 0;

        if (err < 0 && (err != -ENOTSUP || uses[by] == KVBM_UCX_REQUIRED))
            return err;
    }
    return 0;
}

void kvbm_carriers_destroy(struct kvbm_agent *agent)
{
    for (int by = 0; by < KVBM_N_CARRIERS; by++) {
        struct kvbm_carrier *carrier = &agent->carriers[by];

        if (carrier->abi)
            carrier->abi->node_destroy(carrier->node);
        *carrier = (struct kvbm_carrier){0};
    }
}

const struct kvbm_carrier *kvbm_agent_carrier(const struct kvbm_agent *agent, enum kvbm_by by)
{
    return agent->carriers[by].abi ? &agent->carriers[by] : NULL;
}
