// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body_msgpack.h"

#include "base/core/error.h"

bool ki_msgpack_expect(struct kv_msgpack *m, bool fits, const char *text)
{
    if (fits || kv_msgpack_failed(m))
        return fits;
    if (kv_msgpack_peek(m) == KV_MSGPACK_NONE)
        kv_msgpack_skip(m); /* fails, and sets the reason */
    else
        kv_msgpack_fail(m, -EINVAL, text);
    return false;
}

uint64_t ki_msgpack_uint(struct kv_msgpack *m, uint64_t max)
{
    uint64_t value;

    if (!ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_UINT,
                           "expected an unsigned integer"))
        return 0;
    value = kv_msgpack_u64(m);
    if (value > max)
        kv_msgpack_fail(m, -ERANGE, "number out of range");
    return value;
}

struct kv_str ki_msgpack_str(struct kv_msgpack *m)
{
    if (!ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_STR, "expected a string"))
        return (struct kv_str){"", 0};
    return kv_msgpack_str(m);
}

bool ki_msgpack_bool(struct kv_msgpack *m)
{
    return ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_BOOL, "expected true or false") &&
           kv_msgpack_bool(m);
}

/* Read packed little-endian integers of @width bytes, as one bin. */
static void msgpack_packed(struct kv_buf *ret, struct kv_msgpack *m, size_t width)
{
    struct kv_str bin = kv_msgpack_bin(m);

    if (bin.len % width != 0)
        kv_msgpack_fail(m, -EINVAL, "length of the packed integers isn't a multiple of their size");
    else
        kv_buf_append(ret, bin.p, bin.len);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (size_t i = 0; i + width <= ret->len; i += width)
        if (width == 4)
            ((uint32_t *)ret->data)[i / 4] = __builtin_bswap32(((uint32_t *)ret->data)[i / 4]);
        else
            ((uint64_t *)ret->data)[i / 8] = __builtin_bswap64(((uint64_t *)ret->data)[i / 8]);
#endif
}

/* Return true when reading integers stopped at a whole element of another type, not at the end. */
static bool is_other_type(const struct kv_msgpack *m)
{
    const uint8_t *at = m->start + m->error.offset;

    return m->error.code == -EPROTO && at<m->end && * at> 0x7f && *at < 0xe0 &&
           (*at < 0xcc || *at > 0xd3);
}

void ki_msgpack_u32s(struct kv_buf *ret, struct kv_msgpack *m)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    uint32_t n;

    if (type == KV_MSGPACK_BIN) {
        msgpack_packed(ret, m, sizeof(uint32_t));
        return;
    }
    if (!ki_msgpack_expect(m, type == KV_MSGPACK_ARRAY, "expected an array or packed integers"))
        return;
    n = kv_msgpack_array(m); /* bounded by the bytes that follow */
    if (kv_msgpack_failed(m) || n == 0)
        return;
    if (kv_buf_reserve(ret, n * sizeof(uint32_t)) < 0) {
        kv_msgpack_fail(m, -ENOMEM, "out of memory");
        return;
    }
    if (kv_msgpack_u32s(m, n, (uint32_t *)(void *)(ret->data + ret->len)))
        ret->len += n * sizeof(uint32_t);
    else if (is_other_type(m))
        m->error.code = -EINVAL;
}

void ki_msgpack_bits64s(struct kv_buf *ret, struct kv_msgpack *m)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    uint32_t n;

    if (type == KV_MSGPACK_BIN) {
        msgpack_packed(ret, m, sizeof(uint64_t));
        return;
    }
    if (!ki_msgpack_expect(m, type == KV_MSGPACK_ARRAY, "expected an array or packed integers"))
        return;
    n = kv_msgpack_array(m);
    if (kv_msgpack_failed(m) || kv_buf_reserve(ret, n * sizeof(uint64_t)) < 0)
        n = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t value;

        type = kv_msgpack_peek(m);
        if (!ki_msgpack_expect(m, type == KV_MSGPACK_UINT || type == KV_MSGPACK_INT,
                               "expected an integer"))
            break;
        value = kv_msgpack_bits64(m);
        kv_buf_append(ret, &value, sizeof(value));
    }
}
