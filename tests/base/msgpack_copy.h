// SPDX-License-Identifier: Apache-2.0
/** Copy one value, nested ones included, from a msgpack reader to the writer. */
#ifndef KV_TESTS_BASE_MSGPACK_COPY_H
#define KV_TESTS_BASE_MSGPACK_COPY_H

#include "base/json/msgpack.h"

/* One value without what it contains. Returns how many values that is, or -1 where the writer has no
 * form for it. */
static inline int64_t msgpack_copy_head(struct kv_msgpack *m, struct kv_buf *out)
{
    struct kv_str s;
    uint32_t n;

    switch (kv_msgpack_peek(m)) {
    case KV_MSGPACK_NIL:
        kv_msgpack_nil(m);
        kv_msgpack_put_nil(out);
        return 0;
    case KV_MSGPACK_BOOL:
        kv_msgpack_put_bool(out, kv_msgpack_bool(m));
        return 0;
    case KV_MSGPACK_UINT:
        kv_msgpack_put_u64(out, kv_msgpack_u64(m));
        return 0;
    case KV_MSGPACK_INT:
        kv_msgpack_put_i64(out, kv_msgpack_i64(m));
        return 0;
    case KV_MSGPACK_FLOAT:
        kv_msgpack_put_double(out, kv_msgpack_double(m));
        return 0;
    case KV_MSGPACK_STR:
        s = kv_msgpack_str(m);
        kv_msgpack_put_strn(out, s.p, s.len);
        return 0;
    case KV_MSGPACK_BIN:
        s = kv_msgpack_bin(m);
        kv_msgpack_put_bin(out, s.p, s.len);
        return 0;
    case KV_MSGPACK_ARRAY:
        n = kv_msgpack_array(m);
        kv_msgpack_put_array(out, n);
        return n;
    case KV_MSGPACK_MAP:
        n = kv_msgpack_map(m);
        kv_msgpack_put_map(out, n);
        return 2 * (int64_t)n;
    default:
        return -1;
    }
}

/** In a flat loop: what nests deeper than a stack is copied too. False where the reader fails, or the
 * writer has no form. */
static inline bool msgpack_copy(struct kv_msgpack *m, struct kv_buf *out)
{
    for (uint64_t due = 1; due; due--) {
        int64_t inside = msgpack_copy_head(m, out);

        if (inside < 0 || kv_msgpack_failed(m))
            return false;
        due += (uint64_t)inside;
    }
    return true;
}

#endif
