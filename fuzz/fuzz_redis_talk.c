// SPDX-License-Identifier: Apache-2.0
/* A whole conversation of the redis plugin with a malicious server, whose answers are the input. */
#include "talk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    talk(data, size, "redis://127.0.0.1:%d/?timeout_ms=100", "-ERR enough\r\n");
    return 0;
}
