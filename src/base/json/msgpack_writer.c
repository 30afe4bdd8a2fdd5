// SPDX-License-Identifier: Apache-2.0
/* Writes each value in its shortest form; msgpack.c has the first bytes. */
#include "base/json/msgpack.h"

#include <endian.h>

static void put_code(struct kv_buf *out, uint8_t code)
{
    kv_buf_append(out, &code, 1);
}

static void put_number(struct kv_buf *out, uint8_t code, uint64_t value, unsigned width)
{
    uint8_t bytes[9];
    uint64_t be = htobe64(value);

    bytes[0] = code;
    memcpy(bytes + 1, (const uint8_t *)&be + (8 - width), width);
    kv_buf_append(out, bytes, 1 + width);
}

void kv_msgpack_put_nil(struct kv_buf *out)
{
    put_code(out, 0xc0);
}

void kv_msgpack_put_bool(struct kv_buf *out, bool value)
{
    put_code(out, value ? 0xc3 : 0xc2);
}

void kv_msgpack_put_u64(struct kv_buf *out, uint64_t value)
{
    if (value < 0x80)
        put_code(out, (uint8_t)value);
    else if (value <= UINT8_MAX)
        put_number(out, 0xcc, value, 1);
    else if (value <= UINT16_MAX)
        put_number(out, 0xcd, value, 2);
    else if (value <= UINT32_MAX)
        put_number(out, 0xce, value, 4);
    else
        put_number(out, 0xcf, value, 8);
}

void kv_msgpack_put_i64(struct kv_buf *out, int64_t value)
{
    if (value >= 0)
        kv_msgpack_put_u64(out, (uint64_t)value);
    else if (value >= -32)
        put_code(out, (uint8_t)value);
    else if (value >= INT8_MIN)
        put_number(out, 0xd0, (uint64_t)value, 1);
    else if (value >= INT16_MIN)
        put_number(out, 0xd1, (uint64_t)value, 2);
    else if (value >= INT32_MIN)
        put_number(out, 0xd2, (uint64_t)value, 4);
    else
        put_number(out, 0xd3, (uint64_t)value, 8);
}

void kv_msgpack_put_double(struct kv_buf *out, double value)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof(bits));
    put_number(out, 0xcb, bits, 8);
}

/* Write a length of 8, 16 or 32 bits. Longer data has no encoding and fails. */
static bool put_length(struct kv_buf *out, uint8_t code8, size_t len)
{
    if (len <= UINT8_MAX)
        put_number(out, code8, len, 1);
    else if (len <= UINT16_MAX)
        put_number(out, code8 + 1, len, 2);
    else if (len <= UINT32_MAX)
        put_number(out, code8 + 2, len, 4);
    else if (!out->error)
        out->error = -EMSGSIZE;
    return len <= UINT32_MAX;
}

void kv_msgpack_put_strn(struct kv_buf *out, const char *text, size_t len)
{
    if (len < 32)
        put_code(out, (uint8_t)(0xa0 | len));
    else if (!put_length(out, 0xd9, len))
        return;
    kv_buf_append(out, text, len);
}

void kv_msgpack_put_str(struct kv_buf *out, const char *text)
{
    kv_msgpack_put_strn(out, text, strlen(text));
}

void kv_msgpack_put_bin(struct kv_buf *out, const void *data, size_t len)
{
    if (put_length(out, 0xc4, len))
        kv_buf_append(out, data, len);
}

static void put_count(struct kv_buf *out, uint8_t fix, uint8_t code16, uint32_t n)
{
    if (n < 16)
        put_code(out, (uint8_t)(fix | n));
    else if (n <= UINT16_MAX)
        put_number(out, code16, n, 2);
    else
        put_number(out, code16 + 1, n, 4);
}

void kv_msgpack_put_array(struct kv_buf *out, uint32_t n)
{
    put_count(out, 0x90, 0xdc, n);
}

void kv_msgpack_put_map(struct kv_buf *out, uint32_t n)
{
    put_count(out, 0x80, 0xde, n);
}

/* Write the shortest form of @value at @p, which has room for 9 bytes. Returns its length. */
static inline size_t write_u64(uint8_t *p, uint64_t value)
{
    unsigned code = value <= UINT8_MAX ? 0 : value <= UINT16_MAX ? 1 : value <= UINT32_MAX ? 2 : 3;
    uint64_t be = htobe64(value << (64 - (8u << code)));

    if (value < 0x80) {
        p[0] = (uint8_t)value;
        return 1;
    }
    p[0] = (uint8_t)(0xcc + code);
    memcpy(p + 1, &be, sizeof(be));
    return 1 + (1u << code);
}

void kv_msgpack_put_u32s(struct kv_buf *out, const uint32_t *values, size_t n)
{
    uint8_t *p;

    /*
     * Each value is written as 9 bytes, of which at most 5 count; hence the 4 spare bytes at the
     * end.
     */
    if (out->error || kv_buf_reserve(out, n * 5 + 4) < 0)
        return;
    p = (uint8_t *)out->data + out->len;
    for (size_t i = 0; i < n; i++)
        p += write_u64(p, values[i]);
    out->len = (size_t)(p - (uint8_t *)out->data);
}

void kv_msgpack_put_u64s(struct kv_buf *out, const uint64_t *values, size_t n)
{
    uint8_t *p;

    if (out->error || kv_buf_reserve(out, n * 9) < 0)
        return;
    p = (uint8_t *)out->data + out->len;
    for (size_t i = 0; i < n; i++)
        p += write_u64(p, values[i]);
    out->len = (size_t)(p - (uint8_t *)out->data);
}
