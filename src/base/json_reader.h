// SPDX-License-Identifier: Apache-2.0
/** Between json.c and json_array.c; nobody else includes this. */
#ifndef KV_BASE_JSON_READER_H
#define KV_BASE_JSON_READER_H

#include "base/json.h"

/**
 * The integer at j->p (a digit or a minus), within [-2^63, 2^64). Returns false with the error set
 * when it isn't one; *ret_at is where it began.
 */
bool kv_json_integer_(struct kv_json *j, bool *ret_negative, uint64_t *ret_magnitude,
                      uint64_t *ret_at);

/** Record an error at an offset, unless there is one already. */
void kv_json_fail_at_(struct kv_json *j, uint64_t at, int code, const char *text);

static inline uint64_t kv_json_offset_(const struct kv_json *j)
{
    return j->consumed + (uint64_t)(j->p - j->start);
}

#endif
