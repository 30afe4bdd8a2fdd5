// SPDX-License-Identifier: Apache-2.0
/*
 * Arrays of integers. The vector code of json_array.h reads simple stretches, in the widest form
 * that the processor has; the scalar reader reads all else value by value. KV_JSON_PORTABLE (for
 * the tests) leaves only the portable form.
 */
#include "base/json/json_array.h"

#include <stdatomic.h>

#if HAVE_SSE2

_Atomic unsigned kv_json_vector_bits_;

/* Return the width of usable vectors in bits. Concurrent first calls get the same answer. */
static unsigned vector_bits(void)
{
    unsigned bits = atomic_load_explicit(&kv_json_vector_bits_, memory_order_relaxed);

    if (KV_LIKELY(bits))
        return bits;
    bits = 128;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2"))
        bits = 256;
    if (bits == 256 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi2"))
        bits = 512;
    atomic_store_explicit(&kv_json_vector_bits_, bits, memory_order_relaxed);
    return bits;
}

static size_t take_best(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    switch (vector_bits()) {
    case 512:
        return kv_json_take_avx512_(j, ret, wide);
    case 256:
        return kv_json_take_avx2_(j, ret, wide);
    default:
        return take_many(j, ret, wide);
    }
}

#else

static size_t take_best(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    return take_many(j, ret, wide);
}

#endif

static bool take_one(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    bool negative;
    uint64_t value, at;

    if (*j->p != '-' && (*j->p < '0' || *j->p > '9')) {
        kv_json_u64(j, 0); /* sets the error */
        return false;
    }
    if (!kv_json_integer_(j, &negative, &value, &at))
        return false;
    if (!wide && (negative || value > UINT32_MAX)) {
        kv_json_fail_at_(j, at, -ERANGE, "number out of range");
        return false;
    }
    if (wide) {
        value = negative ? 0 - value : value;
        kv_buf_append(ret, &value, sizeof(value));
    } else {
        uint32_t low = (uint32_t)value;

        kv_buf_append(ret, &low, sizeof(low));
    }
    if (ret->error)
        kv_json_fail_at_(j, at, ret->error, "the array is too long");
    return !ret->error;
}

static size_t take_array(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    /* Values to read one by one: the bytes between the first two show the separator */
    unsigned scalar = 1;
    size_t n = 0;

    if (!kv_json_array(j))
        return 0;
    while (kv_json_next_item(j)) {
        if (scalar > 0) {
            scalar--;
        } else {
            size_t taken = take_best(j, ret, wide);

            n += taken;
            if (taken < MANY)
                scalar = SCALAR_RUN;
            if (taken > 0)
                continue;
        }
        if (!take_one(j, ret, wide))
            break;
        n++;
    }
    return n;
}

size_t kv_json_u32_array(struct kv_json *j, struct kv_buf *ret)
{
    return take_array(j, ret, false);
}

size_t kv_json_bits64_array(struct kv_json *j, struct kv_buf *ret)
{
    return take_array(j, ret, true);
}
