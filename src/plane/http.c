// SPDX-License-Identifier: Apache-2.0
/* Open libkvbm_http. libkvbm doesn't link libcurl: most programs never need it. */
#include <pthread.h>

#include "plane/http_abi.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvbm_http_abi *http; /* written once, before pthread_once returns */

static void load(void)
{
    static const struct kv_module module = {
        .component = "kvbm",
        .library = KVBM_HTTP_LIBRARY,
        .variable = "KVBM_HTTP_LIBRARY",
        .symbol = KVBM_HTTP_SYMBOL,
        .missing = "etcd and kv-indexer need " KVBM_HTTP_LIBRARY,
        .head = {sizeof(*http), KVBM_HTTP_ABI},
    };

    http = (const struct kvbm_http_abi *)kv_module_open(&module);
}

const struct kvbm_http_abi *kvbm_http_load(void)
{
    pthread_once(&once, load);
    return http;
}
