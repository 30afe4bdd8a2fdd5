// SPDX-License-Identifier: Apache-2.0
/* Open libkvbm_ucx. libkvbm doesn't link UCX: most programs never need it. */
#include "ucx.h"

#include <pthread.h>
#include <signal.h>

#include "agent.h"
#include "base/log.h"

/* ---- the library ---- */

enum { N_SIGNALS = 32 }; /* UCX takes none of the real-time ones */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvbm_ucx_abi *loaded; /* written once, before pthread_once returns */

/* UCX installs handlers of signals as it is loaded (SIGSEGV, SIGHUP ...). They are the program's. */
static void load(void)
{
    static const struct kvbm_module module = {
        .library = KVBM_UCX_LIBRARY,
        .variable = "KVBM_UCX_LIBRARY",
        .symbol = KVBM_UCX_SYMBOL,
        .missing = "UCX needs " KVBM_UCX_LIBRARY,
        .head = {sizeof(*loaded), KVBM_UCX_ABI},
    };
    struct sigaction before[N_SIGNALS], now;
    bool known[N_SIGNALS];

    for (int i = 1; i < N_SIGNALS; i++)
        known[i] = sigaction(i, NULL, &before[i]) == 0;
    loaded = (const struct kvbm_ucx_abi *)kvbm_module_open(&module);
    for (int i = 1; i < N_SIGNALS; i++) {
        if (known[i] && sigaction(i, NULL, &now) == 0 && now.sa_sigaction != before[i].sa_sigaction)
            (void)sigaction(i, &before[i], NULL);
    }
}

static void log_line(bool error, const char *text)
{
    static struct kv_log_rate rate;
    char quoted[800];

    (void)error; /* the caller that meets the failure logs it as one */
    if (kv_log_allowed(&rate, 5))
        kv_log_info("kvbm", "UCX says", "line=%s", kv_log_quote(quoted, sizeof(quoted), text));
}

/* ---- nodes of agents ---- */

static int make_node(const struct kvbm_agent_opts *opts, struct kvbm_ucx *ucx)
{
    /* As for endpoints: beyond this machine only where the program has said that it means it. */
    const struct kvbm_ucx_opts node = {.loopback = !KV_OPT(opts, token_file, NULL) &&
                                                   !KV_OPT(opts, tls_ca, NULL) &&
                                                   !KV_OPT(opts, unprotected, false),
                                       .log = log_line};
    char why[200] = "", quoted[400];
    int err;

    (void)pthread_once(&once, load);
    if (!loaded)
        return -ENOTSUP;
    ucx->abi = loaded;
    err = loaded->node_create(&node, &ucx->node, why, sizeof(why));
    if (err < 0)
        kv_log_error("kvbm", "UCX can't be used", "agent=%s why=%s", opts->name,
                     kv_log_quote(quoted, sizeof(quoted), why));
    return err;
}

int kvbm_ucx_create(struct kvbm_agent *agent, const struct kvbm_agent_opts *opts)
{
    uint32_t use = KV_OPT(opts, ucx, KVBM_UCX_OFF);
    struct kvbm_ucx *ucx;
    int err;

    if (use == KVBM_UCX_OFF)
        return 0;
    if (use > KVBM_UCX_REQUIRED) {
        kv_log_error("kvbm", "an agent's options are out of range", "agent=%s ucx=%u", agent->name,
                     use);
        return -EINVAL;
    }
    ucx = calloc(1, sizeof(*ucx));
    if (!ucx)
        return -ENOMEM;
    err = make_node(opts, ucx);
    if (err == 0)
        agent->ucx = KV_STEAL(ucx);
    free(ucx);
    return err == -ENOTSUP && use == KVBM_UCX_IF_THERE ? 0 : err;
}

void kvbm_ucx_destroy(struct kvbm_agent *agent)
{
    struct kvbm_ucx *ucx = KV_STEAL(agent->ucx);

    if (!ucx)
        return;
    ucx->abi->node_destroy(ucx->node);
    free(ucx);
}
