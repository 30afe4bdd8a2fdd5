// SPDX-License-Identifier: Apache-2.0
#include "s3/ref_keys.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/xxh.h"

#define MAX_KEYS_BYTES (48u << 20) /* limit for one publication: three million chunks */

void s3_ref_keys_free(struct s3_ref_keys *keys)
{
    if (!keys)
        return;
    kv_buf_fini(&keys->records);
    free(keys->slots);
    free(keys);
}

/* Compare records. One with another length may be shorter, so compare the length first. */
static bool is_same(const char *a, const uint8_t *b)
{
    return (uint8_t)*a == *b && memcmp(a + 1, b + 1, *b) == 0;
}

/* Return the slot of the record at @record, or the free slot where it belongs. */
static uint32_t *slot_of(const struct s3_ref_keys *keys, const uint8_t *record)
{
    size_t i = XXH3_64bits(record, 1 + (size_t)record[0]) & (keys->capacity - 1);

    while (keys->slots[i] && !is_same(keys->records.data + keys->slots[i] - 1, record))
        i = (i + 1) & (keys->capacity - 1);
    return &keys->slots[i];
}

static int grow(struct s3_ref_keys *keys)
{
    size_t capacity = keys->capacity ? 2 * keys->capacity : 64;
    uint32_t *slots = calloc(capacity, sizeof(*slots));

    if (!slots)
        return -ENOMEM;
    free(keys->slots);
    keys->slots = slots;
    keys->capacity = capacity;
    for (size_t at = 0; at < keys->records.len; at += 1 + (size_t)(uint8_t)keys->records.data[at])
        *slot_of(keys, (const uint8_t *)keys->records.data + at) = (uint32_t)at + 1;
    return 0;
}

void s3_ref_keys_add(struct s3_ref_keys *keys, const uint8_t *record)
{
    size_t len = 1 + (size_t)record[0], at = keys->records.len;
    uint32_t *slot;

    if (keys->overflow)
        return;
    if (at + len > MAX_KEYS_BYTES || (2 * keys->n >= keys->capacity && grow(keys)) ||
        kv_buf_reserve(&keys->records, len)) {
        keys->overflow = true;
        return;
    }
    slot = slot_of(keys, record);
    if (*slot)
        return;
    kv_buf_append(&keys->records, record, len);
    *slot = (uint32_t)at + 1;
    keys->n++;
}

void s3_ref_keys_merge(struct s3_ref_keys *keys, const struct s3_ref_keys *more)
{
    const uint8_t *records = (const uint8_t *)more->records.data;

    for (size_t at = 0; at < more->records.len; at += 1 + (size_t)records[at])
        s3_ref_keys_add(keys, records + at);
    keys->overflow |= more->overflow;
}

size_t s3_ref_keys_fresh_bytes(const struct s3_ref_keys *keys, const struct s3_ref_keys *in)
{
    const uint8_t *records = (const uint8_t *)keys->records.data;
    size_t fresh = 0;

    for (size_t at = 0; at < keys->records.len; at += 1 + (size_t)records[at])
        if (in->capacity == 0 || *slot_of(in, records + at) == 0)
            fresh += 1 + (size_t)records[at];
    return fresh;
}

size_t s3_ref_keys_bytes(const struct s3_ref_keys *keys)
{
    return keys->records.capacity + keys->capacity * sizeof(*keys->slots);
}
