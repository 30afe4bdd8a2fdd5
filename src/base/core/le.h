// SPDX-License-Identifier: Apache-2.0
/** Little-endian integers, as our files hold them, on any machine. */
#ifndef KV_BASE_LE_H
#define KV_BASE_LE_H

#include <endian.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline void kv_put_le64(uint8_t out[8], uint64_t value)
{
    value = htole64(value);
    memcpy(out, &value, sizeof(value));
}

static inline void kv_put_le32(uint8_t out[4], uint32_t value)
{
    value = htole32(value);
    memcpy(out, &value, sizeof(value));
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
    uint64_t value;

    memcpy(&value, in, sizeof(value));
    return le64toh(value);
}

static inline uint32_t kv_get_le32(const uint8_t in[4])
{
    uint32_t value;

    memcpy(&value, in, sizeof(value));
    return le32toh(value);
}

#endif
