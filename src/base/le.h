// SPDX-License-Identifier: Apache-2.0
/** Little-endian integers of 64 bits, as our files hold them, on any machine. */
#ifndef KV_BASE_LE_H
#define KV_BASE_LE_H

#include <stdint.h>

static inline void kv_put_le64(uint8_t out[8], uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> 8 * i);
}

static inline uint64_t kv_get_le64(const uint8_t in[8])
{
    uint64_t value = 0;

    for (int i = 7; i >= 0; i--)
        value = value << 8 | in[i];
    return value;
}

#endif
