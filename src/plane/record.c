// SPDX-License-Identifier: Apache-2.0
#include "plane/record.h"

#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/xxh.h"

uint64_t kvp_volume(const char *name)
{
    return name ? kv_xxh64(name, strlen(name), 0) : 0;
}

uint64_t kvp_key_number(const void *key, uint32_t len)
{
    const uint8_t *bytes = key;
    uint64_t number = 0;

    if (len == sizeof(number)) {
        memcpy(&number, key, sizeof(number));
        return number;
    }
    for (uint32_t i = len < 8 ? 0 : len - 8; i < len; i++)
        number = number << 8 | bytes[i];
    return number;
}

static size_t pad(size_t n)
{
    return (n + 7) & ~(size_t)7;
}

/* ---- writing ---- */

/* Append @n bytes, to be written. Returns where they are, or NULL. */
static inline uint8_t *extend(struct kv_buf *out, size_t n)
{
    uint8_t *at;

    if (kv_buf_reserve(out, n) < 0)
        return NULL;
    at = (uint8_t *)out->data + out->len;
    out->len += n;
    return at;
}

/* Write a key of @len bytes, and zeros up to @padded. */
static inline void put_key(uint8_t *at, const void *key, uint32_t len, size_t padded)
{
    if (KV_LIKELY(len == 8)) {
        memcpy(at, key, 8);
        return;
    }
    memcpy(at, key, len);
    memset(at + len, 0, padded - len);
}

void kvp_begin(struct kv_buf *out, const struct kvp_header *header)
{
    size_t len = strlen(header->publisher), bytes = KVP_FIXED + pad(len + 1);
    uint8_t *at;

    kv_buf_clear(out);
    at = extend(out, bytes);
    if (!at)
        return;
    memset(at, 0, bytes);
    memcpy(at, KVP_MAGIC, 4);
    at[4] = KVP_VERSION;
    at[5] = (uint8_t)header->kind;
    at[6] = (uint8_t)bytes;
    at[7] = (uint8_t)(bytes >> 8);
    at[20] = header->last;
    at[22] = (uint8_t)len;
    at[23] = (uint8_t)(len >> 8);
    kv_put_le64(at + 24, header->incarnation);
    kv_put_le64(at + 32, header->sequence);
    kv_put_le64(at + 40, header->part);
    kv_put_le64(at + 48, header->request);
    kv_put_le64(at + 56, header->time_ns);
    memcpy(at + 64, header->fingerprint, sizeof(header->fingerprint));
    memcpy(at + KVP_FIXED, header->publisher, len);
}

void kvp_put(struct kv_buf *out, const struct kvp_record *record)
{
    size_t key = pad(record->key_len);
    uint8_t *at = extend(out, KVP_RECORD + key * (record->parent ? 2 : 1));

    if (!at)
        return;
    at[0] = (uint8_t)record->event;
    at[1] = (uint8_t)record->tier;
    at[2] = (uint8_t)((record->first ? KVP_FIRST : 0) | (record->last ? KVP_LAST : 0) |
                      (record->parent ? KVP_PARENT : 0) | (record->has_prefix ? KVP_PREFIX : 0) |
                      (record->has_tokens_hash ? KVP_TOKENS : 0));
    at[3] = (uint8_t)record->key_len;
    kv_put_le32(at + 4, record->position);
    kv_put_le64(at + 8, record->block_bytes);
    kv_put_le64(at + 16, record->volume);
    kv_put_le64(at + 24, record->prefix);
    kv_put_le64(at + 32, record->tokens_hash);
    kv_put_le32(at + 40, record->group);
    kv_put_le32(at + 44, 0);
    put_key(at + KVP_RECORD, record->key, record->key_len, key);
    if (record->parent)
        put_key(at + KVP_RECORD + key, record->parent, record->key_len, key);
}

void kvp_set_last(struct kv_buf *out)
{
    if (!out->error)
        out->data[20] = 1;
}

/* Checksum of a message with zeros in its place. */
static uint64_t checksum(const uint8_t *data, size_t len)
{
    uint8_t head[16];

    memcpy(head, data, sizeof(head));
    memset(head + 8, 0, 8);
    return kv_xxh64(data + 16, len - 16, kv_xxh64(head, 16, 0));
}

int kvp_end(struct kv_buf *out, uint32_t n)
{
    uint8_t *data = (uint8_t *)out->data;

    if (out->error)
        return out->error;
    kv_put_le32(data + 16, n);
    kv_put_le64(data + 8, checksum(data, out->len));
    return 0;
}

/* ---- reading ---- */

bool kvp_is_subject(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (text[i] <= ' ' || text[i] > '~' || text[i] == '*' || text[i] == '>')
            return false;
    }
    return len > 0 && len < KVP_MAX_SUBJECT;
}

static bool are_zeros(const uint8_t *at, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (at[i])
            return false;
    }
    return true;
}

/* Read the fixed part and the publisher. Returns the bytes before the records, or an error. */
static long read_header(const uint8_t *data, size_t len, struct kvp_header *ret)
{
    size_t bytes, name;

    if (len < KVP_FIXED || memcmp(data, KVP_MAGIC, 4) != 0)
        return -EBADMSG;
    if (data[4] != KVP_VERSION)
        return data[4] > KVP_VERSION ? -EPROTONOSUPPORT : -EBADMSG;
    bytes = kv_get_le(data + 6, 2);
    name = kv_get_le(data + 22, 2);
    if (bytes > len || bytes != KVP_FIXED + pad(name + 1))
        return -EBADMSG;
    if (data[5] < KVP_EVENTS || data[5] > KVP_ALIVE || data[20] > 1 || data[21] ||
        !are_zeros(data + 80, KVP_FIXED - 80) ||
        !kvp_is_subject((const char *)data + KVP_FIXED, name) ||
        !are_zeros(data + KVP_FIXED + name, bytes - KVP_FIXED - name))
        return -EBADMSG;
    *ret = (struct kvp_header){
        .size = sizeof(*ret),
        .kind = data[5],
        .n_records = kv_get_le32(data + 16),
        .incarnation = kv_get_le64(data + 24),
        .sequence = kv_get_le64(data + 32),
        .part = kv_get_le64(data + 40),
        .last = data[20],
        .request = kv_get_le64(data + 48),
        .time_ns = kv_get_le64(data + 56),
    };
    memcpy(ret->fingerprint, data + 64, sizeof(ret->fingerprint));
    memcpy(ret->publisher, data + KVP_FIXED, name);
    if (!kvp_header_is_valid(ret))
        return -EBADMSG;
    return (long)bytes;
}

bool kvp_header_is_valid(const struct kvp_header *header)
{
    return header->kind == KVP_SNAPSHOT || (!header->part && !header->request && !header->last);
}

bool kvp_record_is_valid(const struct kvp_record *r)
{
    return (r->event == KVP_STORE || r->event == KVP_REMOVE) && (unsigned)r->tier < KV_N_TIERS &&
           r->key_len >= 4 && r->key_len <= KVP_MAX_KEY && (!r->first || r->event == KVP_STORE) &&
           (!r->last || r->event == KVP_REMOVE) && (r->has_prefix || !r->prefix) &&
           (r->has_tokens_hash || !r->tokens_hash);
}

/* Read the record at @at, before @end. Returns its bytes, or 0 when it isn't valid. */
static size_t read_record(const uint8_t *at, const uint8_t *end, struct kvp_record *ret)
{
    size_t key, bytes;

    if (end - at < KVP_RECORD)
        return 0;
    key = pad(at[3]);
    bytes = KVP_RECORD + key * (at[2] & KVP_PARENT ? 2 : 1);
    if (bytes > (size_t)(end - at) || at[2] & ~KVP_KNOWN || kv_get_le32(at + 44))
        return 0;
    *ret = (struct kvp_record){
        .event = at[0],
        .tier = at[1],
        .first = at[2] & KVP_FIRST,
        .last = at[2] & KVP_LAST,
        .has_prefix = at[2] & KVP_PREFIX,
        .has_tokens_hash = at[2] & KVP_TOKENS,
        .group = kv_get_le32(at + 40),
        .key_len = at[3],
        .key = at + KVP_RECORD,
        .parent = at[2] & KVP_PARENT ? at + KVP_RECORD + key : NULL,
        .position = kv_get_le32(at + 4),
        .prefix = kv_get_le64(at + 24),
        .tokens_hash = kv_get_le64(at + 32),
        .block_bytes = kv_get_le64(at + 8),
        .volume = kv_get_le64(at + 16),
    };
    if (!kvp_record_is_valid(ret) || !are_zeros(at + KVP_RECORD + at[3], key - at[3]) ||
        (ret->parent && !are_zeros(at + KVP_RECORD + key + at[3], key - at[3])))
        return 0;
    return bytes;
}

/* Check all records. Returns 0 or -EBADMSG. */
static int check_records(const uint8_t *at, const uint8_t *end, uint32_t n)
{
    struct kvp_record record;

    for (; n; n--) {
        size_t bytes = read_record(at, end, &record);

        if (!bytes)
            return -EBADMSG;
        at += bytes;
    }
    return at == end ? 0 : -EBADMSG;
}

int kvp_read(const void *data, size_t len, struct kvp_header *ret, kvp_record_fn fn, void *arg)
{
    const uint8_t *at = data;
    struct kvp_header header;
    struct kvp_record record;
    long bytes;

    if (!kv_sized_or_null(ret, "kvp_header") || (len && !data))
        return -EINVAL;
    if (len && *at == '{')
        return kvp_read_json(data, len, ret, fn, arg);
    bytes = read_header(at, len, &header);
    if (bytes < 0)
        return (int)bytes;
    if (kv_get_le64(at + 8) != checksum(at, len) ||
        check_records(at + bytes, at + len, header.n_records) < 0)
        return -EBADMSG;
    at += bytes;
    for (uint32_t i = 0; fn && i < header.n_records; i++) {
        at += read_record(at, (const uint8_t *)data + len, &record);
        fn(arg, &header, &record);
    }
    if (ret)
        KV_GIVE(ret, &header);
    return 0;
}

int kvp_peek(const void *data, size_t len, struct kvp_header *ret)
{
    long bytes;

    if (len && *(const char *)data == '{')
        return kvp_read_json(data, len, ret, NULL, NULL);
    bytes = read_header(data, len, ret);
    return bytes < 0 ? (int)bytes : 0;
}
