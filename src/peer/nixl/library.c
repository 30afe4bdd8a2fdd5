// SPDX-License-Identifier: Apache-2.0
/* Open NIXL. Nothing of it is linked: its UCX must stay out of the global scope. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/core/log.h"
#include "base/module/module.h"
#include "peer/nixl/node.h"
#include "peer/session/carrier.h"

struct kvbm_nixl_api kvbm_nixl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool usable; /* written once, before pthread_once returns */

/* Find all functions. Returns the name of the first one that isn't there, or NULL. */
static const char *find_functions(void *library)
{
    const struct {
        const char *name;
        void *slot;
    } functions[] = {
#define FUNCTION(name, arguments) {"nixl_capi_" #name, &kvbm_nixl.name},
        KVBM_NIXL_FUNCTIONS(FUNCTION)
#undef FUNCTION
    };

    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *symbol = dlsym(library, functions[i].name);

        if (!symbol)
            return functions[i].name;
        memcpy(functions[i].slot, &symbol, sizeof(symbol));
    }
    return NULL;
}

static void load(void)
{
    void *library = kv_library_open(KVBM_NIXL_LIBRARY, KVBM_NIXL_VARIABLE);
    const char *lacks = library ? find_functions(library) : NULL;
    char why[300], quoted[600];

    usable = library && !lacks;
    if (usable) {
        /* NIXL's wheel brings a libnl of its own, to which the system's would be bound if it came
         * later: by RDMA drivers of the UCX backend. The process then crashes in exit(). */
        (void)dlopen("libnl-route-3.so.200", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        return;
    }
    if (lacks)
        snprintf(why, sizeof(why), "it has no %s", lacks);
    else
        snprintf(why, sizeof(why), "%s", dlerror());
    kv_log_error("kvbm", "NIXL needs " KVBM_NIXL_LIBRARY, "reason=%s",
                 kv_log_quote(quoted, sizeof(quoted), why));
}

const struct kvbm_carrier_abi *kvbm_nixl_load(void)
{
    static const struct kvbm_carrier_abi abi = {.head = {sizeof(abi), KVBM_CARRIER_ABI},
                                                .node_create = kvbm_nixl_node_create,
                                                .node_destroy = kvbm_nixl_node_destroy,
                                                .node_address = kvbm_nixl_node_address,
                                                .peer_create = kvbm_nixl_peer_create,
                                                .peer_close = kvbm_nixl_peer_close,
                                                .send = kvbm_nixl_send,
                                                .receive_start = kvbm_nixl_receive_start,
                                                .receive_end = kvbm_nixl_receive_end,
                                                .receive_over = kvbm_nixl_receive_over};

    (void)pthread_once(&once, load);
    return usable ? &abi : NULL;
}
