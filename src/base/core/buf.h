// SPDX-License-Identifier: Apache-2.0
/**
 * A growable byte buffer. Errors stick: a failed append leaves the buffer as it was, and later
 * appends do nothing. Writers call kv_buf_error once at the end.
 */
#ifndef KV_BASE_BUF_H
#define KV_BASE_BUF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/core/error.h"

struct kv_buf {
    char *data; /* not NUL-terminated; see kv_buf_cstr */
    size_t len;
    size_t capacity;
    size_t limit; /* largest len; beyond it appends fail with -EMSGSIZE; 0: no limit */
    int error;    /* 0 or the first error, a negative errno */
};

#define KV_BUF_INIT \
    {               \
        0           \
    }

void kv_buf_fini(struct kv_buf *buf); /* frees the memory; the buffer can be used again */
/* Empties the buffer, clears its error, keeps its memory */
void kv_buf_clear(struct kv_buf *buf);
int kv_buf_grow_(struct kv_buf *buf, size_t more); /* slow path of kv_buf_reserve */

/** Make room for @more bytes beyond len. Returns 0 or the buffer's error. */
static inline int kv_buf_reserve(struct kv_buf *buf, size_t more)
{
    if (KV_UNLIKELY(buf->error))
        return buf->error;
    if (KV_LIKELY(more <= buf->capacity - buf->len))
        return 0;
    return kv_buf_grow_(buf, more);
}

static inline void kv_buf_append(struct kv_buf *buf, const void *data, size_t len)
{
    if (len == 0 || kv_buf_reserve(buf, len) < 0)
        return;
    memcpy(buf->data + buf->len, data, len);
    buf->len += len;
}

static inline void kv_buf_putc(struct kv_buf *buf, char c)
{
    if (kv_buf_reserve(buf, 1) == 0)
        buf->data[buf->len++] = c;
}

void kv_buf_puts(struct kv_buf *buf, const char *text);
void kv_buf_printf(struct kv_buf *buf, const char *fmt, ...) KV_PRINTF(2, 3);
void kv_buf_put_u64(struct kv_buf *buf, uint64_t value); /* decimal */
#define KV_U64_TEXT_MAX 20
/** Write @value in decimal to @ret, which has room for KV_U64_TEXT_MAX. Returns the length. */
size_t kv_u64_text(char *ret, uint64_t value);
void kv_buf_put_i64(struct kv_buf *buf, int64_t value);
/** The shortest decimal that reads back as the same finite double: 0.0001, 1, 1e+100. */
void kv_buf_put_double(struct kv_buf *buf, double value);
/** Return the contents as a C string; "" when the buffer is empty or has failed. */
const char *kv_buf_cstr(struct kv_buf *buf);

#endif
