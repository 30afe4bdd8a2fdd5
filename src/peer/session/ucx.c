// SPDX-License-Identifier: Apache-2.0
/* Open libkvbm_ucx. libkvbm doesn't link UCX: most programs never need it. */
#include <pthread.h>

#include "base/module/module.h"
#include "peer/session/carrier.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvbm_carrier_abi *loaded; /* written once, before pthread_once returns */

static void load(void)
{
    static const struct kv_module module = {
        .component = "kvbm",
        .library = KVBM_UCX_LIBRARY,
        .variable = "KVBM_UCX_LIBRARY",
        .symbol = KVBM_UCX_SYMBOL,
        .missing = "UCX needs " KVBM_UCX_LIBRARY,
        .head = {sizeof(*loaded), KVBM_CARRIER_ABI},
    };
    struct kv_signals signals;

    kv_signals_note(&signals);
    loaded = (const struct kvbm_carrier_abi *)kv_module_open(&module);
    kv_signals_restore(&signals);
}

const struct kvbm_carrier_abi *kvbm_ucx_load(void)
{
    (void)pthread_once(&once, load);
    return loaded;
}
