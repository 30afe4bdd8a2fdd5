// SPDX-License-Identifier: Apache-2.0
/* The msgpack reader: skipping and reading agree on where values end; tokens are the same one by
 * one and all at once; the writer's output for the values reads as the same. */

#include "../tests/base/msgpack_copy.h"
#include "require.h"

static void check_rewriting(const uint8_t *data, size_t size)
{
    struct kv_buf once = KV_BUF_INIT, twice = KV_BUF_INIT;
    struct kv_msgpack walk, skip, again;

    kv_msgpack_init(&walk, data, size);
    kv_msgpack_init(&skip, data, size);
    kv_msgpack_skip(&skip);
    if (msgpack_copy(&walk, &once)) {
        REQUIRE(!kv_msgpack_failed(&skip) && skip.p == walk.p);
        REQUIRE(once.len <= (size_t)(walk.p - walk.start) * 2); /* float32 becomes float64 */
        kv_msgpack_init(&again, once.data, once.len);
        REQUIRE(msgpack_copy(&again, &twice) && again.p == again.end);
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
