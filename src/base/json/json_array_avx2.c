// SPDX-License-Identifier: Apache-2.0
/* The vector code of json_array.h for processors with vectors of 256 bits; see CMakeLists.txt. */
#ifdef __x86_64__
#include "base/json/json_array.h"

size_t kv_json_take_avx2_(struct kv_json *j, struct kv_buf *ret, bool wide)
{
    return take_many(j, ret, wide);
}
#endif
