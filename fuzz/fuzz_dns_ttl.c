// SPDX-License-Identifier: Apache-2.0
/* Times to live in the message of a name server's answer. */
#include <stdint.h>

#include "indexer/discover/dns_ask.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint32_t ttl = ki_dns_ttl(data, size, 7);

    if (size < 12 && ttl != 7)
        abort();
    return 0;
}
