// SPDX-License-Identifier: Apache-2.0
/** Support for fuzz targets that check more than "no crash". */
#ifndef KV_FUZZ_REQUIRE_H
#define KV_FUZZ_REQUIRE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** Require a condition for every input; the fuzzer keeps an input that violates it. */
#define REQUIRE(condition) \
    do {                   \
        if (!(condition))  \
            abort();       \
    } while (0)

#endif
