// SPDX-License-Identifier: Apache-2.0
/*
 * The msgpack reader: skipping and reading agree on where values end, tokens are the same one by
 * one and all at once, and what the writer makes of the values reads as the same.
 */
#include <stdlib.h>

#include "base/msgpack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(condition) \
    do {                   \
        if (!(condition))  \
            abort();       \
    } while (0)

/* Walks all values in a flat loop and writes them anew. Returns false where the writer has no form.
 */
static bool rewrite(struct kv_msgpack *m, struct kv_buf *out)
{
    for (uint64_t due = 1; due; due--) {
        struct kv_str s;
        uint32_t n;

        switch (kv_msgpack_peek(m)) {
        case KV_MSGPACK_NIL:
            REQUIRE(kv_msgpack_nil(m));
            kv_msgpack_put_nil(out);
            break;
        case KV_MSGPACK_BOOL:
            kv_msgpack_put_bool(out, kv_msgpack_bool(m));
            break;
        case KV_MSGPACK_UINT:
            kv_msgpack_put_u64(out, kv_msgpack_u64(m));
            break;
        case KV_MSGPACK_INT:
            kv_msgpack_put_i64(out, kv_msgpack_i64(m));
            break;
        case KV_MSGPACK_FLOAT:
            kv_msgpack_put_double(out, kv_msgpack_double(m));
            break;
        case KV_MSGPACK_STR:
            s = kv_msgpack_str(m);
            kv_msgpack_put_strn(out, s.p, s.len);
            break;
        case KV_MSGPACK_BIN:
            s = kv_msgpack_bin(m);
            kv_msgpack_put_bin(out, s.p, s.len);
            break;
        case KV_MSGPACK_ARRAY:
            n = kv_msgpack_array(m);
            kv_msgpack_put_array(out, n);
            due += n;
            break;
        case KV_MSGPACK_MAP:
            n = kv_msgpack_map(m);
            kv_msgpack_put_map(out, n);
            due += 2 * (uint64_t)n;
            break;
        default:
            return false;
        }
        if (kv_msgpack_failed(m))
            return false;
    }
    return true;
}

static void check_rewriting(const uint8_t *data, size_t size)
{
    struct kv_buf once = KV_BUF_INIT, twice = KV_BUF_INIT;
    struct kv_msgpack walk, skip, again;

    kv_msgpack_init(&walk, data, size);
    kv_msgpack_init(&skip, data, size);
    kv_msgpack_skip(&skip);
    if (rewrite(&walk, &once)) {
        REQUIRE(!kv_msgpack_failed(&skip) && skip.p == walk.p);
        REQUIRE(once.len <= (size_t)(walk.p - walk.start) * 2); /* float32 becomes float64 */
        kv_msgpack_init(&again, once.data, once.len);
        REQUIRE(rewrite(&again, &twice) && again.p == again.end);
        REQUIRE(twice.len == once.len && memcmp(twice.data, once.data, once.len) == 0);
    }
    if (!kv_msgpack_failed(&skip))
        REQUIRE(skip.p > skip.start && skip.p <= skip.end);
    kv_buf_fini(&once);
    kv_buf_fini(&twice);
}

static void check_tokens(const uint8_t *data, size_t size)
{
    uint32_t n = size ? data[0] : 0, all[256], one;
    struct kv_msgpack fast, slow;
    bool good;

    kv_msgpack_init(&fast, data, size);
    kv_msgpack_init(&slow, data, size);
    good = kv_msgpack_u32s(&fast, n, all);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t value = kv_msgpack_u64(&slow);

        if (kv_msgpack_failed(&slow) || value > UINT32_MAX) {
            REQUIRE(!good);
            return;
        }
        one = (uint32_t)value;
        REQUIRE(!good || all[i] == one);
    }
    REQUIRE(good && fast.p == slow.p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check_rewriting(data, size);
    check_tokens(data, size);
    return 0;
}
