// SPDX-License-Identifier: Apache-2.0
/** Little-endian integers, as our files hold them, on any machine. */
#ifndef KV_BASE_LE_H
#define KV_BASE_LE_H

#include <stddef.h>
#include <stdint.h>

static inline void kv_put_le64(uint8_t out[8], uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> 8 * i);
}

/** Read an integer of @bytes bytes, at most 8. */
static inline uint64_t kv_get_le(const uint8_t *in, size_t bytes)
{
    uint64_t value = 0;

    for (size_t i = bytes; i-- > 0;)
        value = value << 8 | in[i];
    return value;
}

static inline uint64_t kv_get_le64(const uint8_t in[8])
{
    return kv_get_le(in, 8);
}

#endif
