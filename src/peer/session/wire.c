// SPDX-License-Identifier: Apache-2.0
/*
 * Frames and greetings as bytes (docs/formats.md, "Sessions"): little-endian, fixed width. A reader
 * refuses whatever a writer of the same version wouldn't write.
 */
#include "peer/session/wire.h"

#include "base/core/le.h"
#include "base/core/utf8.h"
#include "peer/set/blockset.h"

static const uint8_t magic[4] = {'K', 'V', 'P', 1};

static void put(uint8_t *to, uint64_t value, size_t bytes)
{
    uint8_t le[8];

    kv_put_le64(le, value);
    memcpy(to, le, bytes);
}

/* ---- frames ---- */

void kvbm_frame_write(const struct kvbm_frame *frame, uint8_t to[KVBM_FRAME_BYTES])
{
    memcpy(to, magic, sizeof(magic));
    put(to + 4, frame->type, 2);
    put(to + 6, frame->flags, 2);
    put(to + 8, frame->id, 8);
    put(to + 16, (uint32_t)frame->status, 4);
    put(to + 20, frame->len, 4);
    put(to + 24, frame->total, 8);
    put(to + 32, frame->offset, 8);
}

/* Return the longest body of a request or note. */
static uint64_t body_limit(const struct kvbm_frame *frame)
{
    if (frame->type < KVBM_PING)
        return KVBM_MAX_HELLO_BYTES;
    if (frame->type == KVBM_SET)
        return KVBM_MAX_SET_BYTES;
    return frame->type < KVBM_FIRST_SERVICE ? 16 : KVBM_MAX_REQUEST_BYTES;
}

/* A chunk begins at a multiple of the chunk size and ends at the next one, or at the end. */
static bool is_chunk(const struct kvbm_frame *frame)
{
    if (frame->flags & KVBM_FRAME_CUT)
        return frame->total == 0 && frame->offset == 0 && frame->len == 0;
    return frame->total <= KVBM_MAX_REPLY_TOTAL && frame->offset % KVBM_CHUNK_BYTES == 0 &&
           (frame->total ? frame->offset < frame->total : frame->offset == 0) &&
           frame->len == KV_MIN(frame->total - frame->offset, (uint64_t)KVBM_CHUNK_BYTES);
}

int kvbm_frame_parse(const uint8_t from[KVBM_FRAME_BYTES], struct kvbm_frame *ret)
{
    struct kvbm_frame frame = {.type = (uint16_t)kv_get_le(from + 4, 2),
                               .flags = (uint16_t)kv_get_le(from + 6, 2),
                               .id = kv_get_le64(from + 8),
                               .status = (int32_t)(uint32_t)kv_get_le(from + 16, 4),
                               .len = (uint32_t)kv_get_le(from + 20, 4),
                               .total = kv_get_le64(from + 24),
                               .offset = kv_get_le64(from + 32)};
    bool reply = frame.flags & KVBM_FRAME_REPLY;

    if (memcmp(from, magic, sizeof(magic)) != 0 || frame.flags > KVBM_FRAME_FLAGS ||
        frame.type == 0 || frame.type >= KVBM_N_TYPES || frame.status < -4095)
        return -EPROTO;
    if (reply && (frame.id == 0 || frame.type < KVBM_FIRST_SERVICE || !is_chunk(&frame)))
        return -EPROTO;
    if (!reply && (frame.len > body_limit(&frame) || frame.total != frame.len || frame.offset ||
                   frame.flags & KVBM_FRAME_CUT))
        return -EPROTO;
    *ret = frame;
    return 0;
}

/* ---- greetings ---- */

#define HAS_TOKEN 1u

static void append(struct kv_buf *to, uint64_t value, size_t bytes)
{
    uint8_t le[8];

    kv_put_le64(le, value);
    kv_buf_append(to, le, bytes);
}

void kvbm_hello_write(const struct kvbm_hello *hello, struct kv_buf *to)
{
    size_t name_len = strlen(hello->who.name), fingerprint_len = strlen(hello->fingerprint);

    append(to, hello->oldest, 2);
    append(to, hello->newest, 2);
    append(to, hello->has_token ? HAS_TOKEN : 0, 4);
    kv_buf_append(to, hello->nonce, sizeof(hello->nonce));
    kv_buf_append(to, hello->join, sizeof(hello->join));
    append(to, hello->who.worker, 8);
    append(to, hello->who.incarnation, 8);
    append(to, hello->key_len, 4);
    append(to, hello->max_requests, 4);
    append(to, hello->layers, 4);
    append(to, hello->outer, 4);
    append(to, hello->page_size, 4);
    append(to, name_len, 2);
    append(to, fingerprint_len, 2);
    kv_buf_append(to, hello->who.name, name_len);
    kv_buf_append(to, hello->fingerprint, fingerprint_len);
}

#define HELLO_HEAD 96 /* up to the name */

/* Copy text of @len bytes, without a NUL within. Returns false unless it fits @size. */
static bool take_text(const uint8_t *from, size_t len, char *ret, size_t size)
{
    if (len >= size || memchr(from, 0, len))
        return false;
    memcpy(ret, from, len);
    ret[len] = '\0';
    return true;
}

int kvbm_hello_parse(const void *from, size_t len, struct kvbm_hello *ret)
{
    const uint8_t *at = from;
    struct kvbm_hello hello = {0};
    size_t name_len, fingerprint_len;
    uint64_t flags;

    if (len < HELLO_HEAD)
        return -EPROTO;
    hello.oldest = (uint16_t)kv_get_le(at, 2);
    hello.newest = (uint16_t)kv_get_le(at + 2, 2);
    flags = kv_get_le(at + 4, 4);
    hello.has_token = flags & HAS_TOKEN;
    memcpy(hello.nonce, at + 8, sizeof(hello.nonce));
    memcpy(hello.join, at + 40, sizeof(hello.join));
    hello.who.worker = kv_get_le64(at + 56);
    hello.who.incarnation = kv_get_le64(at + 64);
    hello.key_len = (uint32_t)kv_get_le(at + 72, 4);
    hello.max_requests = (uint32_t)kv_get_le(at + 76, 4);
    hello.layers = (uint32_t)kv_get_le(at + 80, 4);
    hello.outer = (uint32_t)kv_get_le(at + 84, 4);
    hello.page_size = (uint32_t)kv_get_le(at + 88, 4);
    name_len = kv_get_le(at + 92, 2);
    fingerprint_len = kv_get_le(at + 94, 2);
    if (len != HELLO_HEAD + name_len + fingerprint_len || flags > HAS_TOKEN ||
        !take_text(at + HELLO_HEAD, name_len, hello.who.name, sizeof(hello.who.name)) ||
        !take_text(at + HELLO_HEAD + name_len, fingerprint_len, hello.fingerprint,
                   sizeof(hello.fingerprint)))
        return -EPROTO;
    if (!kvbm_agent_name_is_valid(hello.who.name, name_len) || !kv_utf8_valid(hello.fingerprint) ||
        !hello.oldest || hello.newest < hello.oldest || !hello.who.worker ||
        !hello.who.incarnation || !hello.max_requests)
        return -EPROTO;
    *ret = hello;
    return 0;
}

void kvbm_challenge_write(const struct kvbm_challenge *challenge, uint8_t to[KVBM_CHALLENGE_BYTES])
{
    memset(to, 0, KVBM_CHALLENGE_BYTES);
    put(to, challenge->version, 2);
    put(to + 4, challenge->has_token ? HAS_TOKEN : 0, 4);
    memcpy(to + 8, challenge->nonce, KVBM_NONCE_BYTES);
}

int kvbm_challenge_parse(const void *from, size_t len, struct kvbm_challenge *ret)
{
    const uint8_t *at = from;
    uint64_t flags;

    if (len != KVBM_CHALLENGE_BYTES || kv_get_le(at + 2, 2))
        return -EPROTO;
    flags = kv_get_le(at + 4, 4);
    if (flags > HAS_TOKEN)
        return -EPROTO;
    ret->version = (uint16_t)kv_get_le(at, 2);
    ret->has_token = flags & HAS_TOKEN;
    memcpy(ret->nonce, at + 8, KVBM_NONCE_BYTES);
    return 0;
}
