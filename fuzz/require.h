// SPDX-License-Identifier: Apache-2.0
/** What fuzz targets need that state more than "it doesn't crash". */
#ifndef KV_FUZZ_REQUIRE_H
#define KV_FUZZ_REQUIRE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** What must hold of every input; the fuzzer keeps the one of which it doesn't. */
#define REQUIRE(condition) \
    do {                   \
        if (!(condition))  \
            abort();       \
    } while (0)

#endif
