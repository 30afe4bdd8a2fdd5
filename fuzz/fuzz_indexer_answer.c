// SPDX-License-Identifier: Apache-2.0
/* Answers of kv-indexer. Workers that are accepted come longest first, and whoever reads fewer
 * reads the first of them. */
#include "peer/directory/indexer.h"
#include "require.h"

#define MAX 16

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvbm_holding all[MAX], few[MAX];
    long n = kvbm_indexer_read(data, size, 7, all, MAX);

    REQUIRE(n <= MAX && (n >= 0 || n == -EPROTO));
    for (long i = 0; i < n; i++)
        REQUIRE(all[i].tokens && (!i || all[i - 1].tokens >= all[i].tokens));
    for (long max = 0; max <= n; max++) {
        REQUIRE(kvbm_indexer_read(data, size, 7, few, (size_t)max) == max);
        REQUIRE(!max || memcmp(all, few, (size_t)max * sizeof(*all)) == 0);
    }
    return 0;
}
