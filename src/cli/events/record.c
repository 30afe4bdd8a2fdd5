// SPDX-License-Identifier: Apache-2.0
#include "cli/events/record.h"

#include <errno.h>
#include <string.h>

#include "base/core/le.h"
#include "base/core/xxh.h"

#define HEAD 8   /* bytes of len and check */
#define FIXED 12 /* bytes of time, n_from and n */

static const char magic[8] = "kvevents";

static void put_le(uint8_t *out, uint64_t value, size_t bytes)
{
    uint8_t all[8];

    kv_put_le64(all, value);
    memcpy(out, all, bytes);
}

static uint32_t check_of(const void *data, size_t len)
{
    return (uint32_t)kv_xxh64(data, len, 0);
}

/* -- writing ----------------------------------------------------------------------------------- */

static int write_all(FILE *file, const void *data, size_t len)
{
    errno = 0;
    return fwrite(data, 1, len, file) == len ? 0 : errno ? -errno : -EIO;
}

int kc_record_begin(FILE *file)
{
    uint8_t header[KC_RECORD_HEADER] = {0};

    memcpy(header, magic, sizeof(magic));
    put_le(header + 8, 1, 4);
    return write_all(file, header, sizeof(header));
}

int kc_record_write(FILE *file, const struct kc_message *message)
{
    size_t n = KV_MIN(message->n_frames, (size_t)KVE_MAX_FRAMES);
    size_t from = KV_MIN(message->from.len, (size_t)KC_MAX_FROM);
    uint8_t fixed[FIXED + 4 * KVE_MAX_FRAMES], head[HEAD];
    struct kv_buf out = KV_BUF_INIT;
    int rc;

    put_le(fixed, message->time_ns, 8);
    put_le(fixed + 8, from, 2);
    put_le(fixed + 10, n, 2);
    out.limit = KC_RECORD_MAX;
    for (size_t i = 0; i < n; i++)
        put_le(fixed + FIXED + 4 * i, message->frames[i].len, 4);
    kv_buf_append(&out, fixed, FIXED + 4 * n);
    kv_buf_append(&out, message->from.p, from);
    for (size_t i = 0; i < n; i++)
        kv_buf_append(&out, message->frames[i].data, message->frames[i].len);
    rc = out.error;
    put_le(head, out.len, 4);
    put_le(head + 4, check_of(out.data, out.len), 4);
    if (rc == 0)
        rc = write_all(file, head, sizeof(head));
    if (rc == 0)
        rc = write_all(file, out.data, out.len);
    kv_buf_fini(&out);
    return rc;
}

/* -- reading ----------------------------------------------------------------------------------- */

static int reject(const char **ret_why, const char *why)
{
    *ret_why = why;
    return -EPROTO;
}

int kc_record_check(const void *data, size_t len, const char **ret_why)
{
    const uint8_t *p = data;

    if (len < KC_RECORD_HEADER || memcmp(p, magic, sizeof(magic)) != 0)
        return reject(ret_why, "no recording: it doesn't begin with \"kvevents\"");
    if (kv_get_le(p + 8, 4) != 1)
        return reject(ret_why, "a recording of a later version");
    return 0;
}

/* Set @ret's spans to what lies behind the lengths. Returns false when they don't add up to @len. */
static bool set_spans(struct kc_message *ret, const uint8_t *p, size_t len)
{
    size_t from = kv_get_le(p + 8, 2), at = FIXED + 4 * ret->n_frames;

    if (from > KC_MAX_FROM || at > len || from > len - at)
        return false;
    ret->from = (struct kv_str){(const char *)p + at, from};
    at += from;
    for (size_t i = 0; i < ret->n_frames; i++) {
        size_t n = kv_get_le(p + FIXED + 4 * i, 4);

        if (n > len - at)
            return false;
        ret->frames[i] = (struct kve_span){p + at, n};
        at += n;
    }
    return at == len;
}

long kc_record_read(const void *data, size_t len, struct kc_message *ret, const char **ret_why)
{
    const uint8_t *p = data;
    size_t n;

    if (!len)
        return 0;
    if (len < HEAD)
        return reject(ret_why, "the last record is cut off");
    n = kv_get_le(p, 4);
    if (n < FIXED || n > KC_RECORD_MAX)
        return reject(ret_why, "a record of an impossible length");
    if (n > len - HEAD)
        return reject(ret_why, "the last record is cut off");
    if (check_of(p + HEAD, n) != kv_get_le(p + 4, 4))
        return reject(ret_why, "a damaged record");
    p += HEAD;
    memset(ret, 0, sizeof(*ret));
    ret->time_ns = kv_get_le64(p);
    ret->n_frames = kv_get_le(p + 10, 2);
    if (ret->n_frames > KVE_MAX_FRAMES || !set_spans(ret, p, n))
        return reject(ret_why, "a record whose lengths don't add up");
    return (long)(HEAD + n);
}
