// SPDX-License-Identifier: Apache-2.0
/* kv-indexer: follow KV cache events and answer which worker holds a prompt's prefix. */
#include "indexer/service.h"

int main(int argc, char **argv)
{
    struct ki_options options;

    return ki_main(NULL, NULL, argc, argv, &options);
}
