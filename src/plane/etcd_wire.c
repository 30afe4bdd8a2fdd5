// SPDX-License-Identifier: Apache-2.0
#include "plane/etcd_wire.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/error.h"
#include "base/json/json.h"

/* ---- base64 ---- */

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void etcd_put_base64(struct kv_buf *out, const void *data, size_t len)
{
    const uint8_t *p = data;

    for (size_t i = 0; i < len; i += 3) {
        size_t n = KV_MIN(len - i, (size_t)3);
        uint32_t bits =
            (uint32_t)p[i] << 16 | (n > 1 ? (uint32_t)p[i + 1] << 8 : 0) | (n > 2 ? p[i + 2] : 0);

        for (size_t k = 0; k < 4; k++)
            kv_buf_putc(out, k <= n ? letters[bits >> (18 - 6 * k) & 63] : '=');
    }
}

static int sextet(char c)
{
    const char *at = c ? strchr(letters, c) : NULL;

    return at ? (int)(at - letters) : -1;
}

long etcd_read_base64(const char *text, size_t len, void *ret)
{
    uint8_t *out = ret;
    size_t padding = len && text[len - 1] == '=' ? 1 + (len > 1 && text[len - 2] == '=') : 0;
    uint32_t bits = 0;

    if (len % 4)
        return -EPROTO;
    for (size_t i = 0; i < len; i++) {
        int value = i < len - padding ? sextet(text[i]) : 0;

        if (value < 0)
            return -EPROTO;
        bits = bits << 6 | (unsigned)value;
        if (i % 4 == 3) {
            const uint8_t three[] = {(uint8_t)(bits >> 16), (uint8_t)(bits >> 8), (uint8_t)bits};
            size_t n = i + 1 == len ? 3 - padding : 3;

            memcpy(out, three, n);
            out += n;
            if (n < 3 && bits & (n == 1 ? 0xffff : 0xff)) /* more than one spelling */
                return -EPROTO;
            bits = 0;
        }
    }
    return (long)(len / 4 * 3 - padding);
}

/* ---- requests ---- */

/* "KEY":"<base64 of @text>" */
static void put_bytes(struct kv_buf *out, const char *key, const void *text, size_t len)
{
    kv_buf_printf(out, "\"%s\":\"", key);
    etcd_put_base64(out, text, len);
    kv_buf_putc(out, '"');
}

/* All keys that begin with @prefix, which doesn't end in the byte ff. */
static void put_range(struct kv_buf *out, const char *prefix)
{
    char end[ETCD_MAX_PREFIX + 2];
    size_t len = strlen(prefix);

    snprintf(end, sizeof(end), "%s", prefix);
    end[len - 1]++;
    put_bytes(out, "key", prefix, len);
    kv_buf_putc(out, ',');
    put_bytes(out, "range_end", end, len);
}

void etcd_write_login(struct kv_buf *out, const char *user, const char *password)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "name", user);
    kv_json_member_str(&w, "password", password);
    kv_json_end_object(&w);
}

void etcd_write_grant(struct kv_buf *out, uint32_t ttl_s)
{
    kv_buf_printf(out, "{\"TTL\":\"%" PRIu32 "\"}", ttl_s);
}

void etcd_write_lease(struct kv_buf *out, uint64_t lease)
{
    kv_buf_printf(out, "{\"ID\":\"%" PRIu64 "\"}", lease);
}

void etcd_write_put(struct kv_buf *out, const char *key, const void *value, size_t len,
                    uint64_t lease)
{
    kv_buf_putc(out, '{');
    put_bytes(out, "key", key, strlen(key));
    kv_buf_putc(out, ',');
    put_bytes(out, "value", value, len);
    kv_buf_printf(out, ",\"lease\":\"%" PRIu64 "\"}", lease);
}

void etcd_write_delete(struct kv_buf *out, const char *key)
{
    kv_buf_putc(out, '{');
    put_bytes(out, "key", key, strlen(key));
    kv_buf_putc(out, '}');
}

void etcd_write_put_if(struct kv_buf *out, const char *guard, uint64_t created, const char *key,
                       const void *value, size_t len, uint64_t lease)
{
    kv_buf_puts(out, "{\"compare\":[{");
    put_bytes(out, "key", guard, strlen(guard));
    kv_buf_printf(out,
                  ",\"target\":\"CREATE\",\"result\":\"EQUAL\",\"create_revision\":\"%" PRIu64
                  "\"}],\"success\":[",
                  created);
    if (key) {
        kv_buf_puts(out, "{\"request_put\":");
        etcd_write_put(out, key, value, len, lease);
        kv_buf_putc(out, '}');
    }
    kv_buf_puts(out, "]}");
}

void etcd_write_range(struct kv_buf *out, const char *prefix, uint32_t limit)
{
    kv_buf_putc(out, '{');
    put_range(out, prefix);
    kv_buf_printf(out, ",\"limit\":\"%" PRIu32 "\"}", limit);
}

void etcd_write_watch(struct kv_buf *out, const char *prefix, uint64_t revision)
{
    kv_buf_puts(out, "{\"create_request\":{");
    put_range(out, prefix);
    kv_buf_printf(out, ",\"start_revision\":\"%" PRIu64 "\"}}", revision);
}

/* ---- answers ---- */

struct reading {
    struct kv_json j;
    struct kv_buf scratch, bytes;
    const struct etcd_limits *limits;
    struct etcd_answer *answer;
    etcd_key_fn fn;
    void *arg;
};

/* A number, or a string of digits. */
static uint64_t read_number(struct reading *r)
{
    struct kv_str text;
    uint64_t value = 0;

    if (kv_json_peek(&r->j) != KV_JSON_STRING)
        return kv_json_u64(&r->j, UINT64_MAX);
    text = kv_json_str(&r->j, &r->scratch);
    for (size_t i = 0; i < text.len; i++) {
        unsigned digit = (unsigned)text.p[i] - '0';

        if (digit > 9 || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, digit, &value)) {
            kv_json_fail(&r->j, -ERANGE, "not a number");
            return 0;
        }
    }
    return value;
}

/* Read a text in base64, at most @max bytes, into r->bytes behind @at. Returns its length. */
static size_t read_bytes(struct reading *r, size_t at, size_t max)
{
    struct kv_str text = kv_json_str(&r->j, &r->scratch);
    long len;

    r->bytes.len = at;
    if (text.len / 4 * 3 > max + 2 || kv_buf_reserve(&r->bytes, text.len) < 0) {
        kv_json_fail(&r->j, r->bytes.error ? -ENOMEM : -EMSGSIZE, "too long");
        return 0;
    }
    len = etcd_read_base64(text.p, text.len, r->bytes.data + at);
    if (len < 0 || (size_t)len > max) {
        kv_json_fail(&r->j, -EPROTO, "not base64");
        return 0;
    }
    return (size_t)len;
}

static void read_kv(struct reading *r, bool deleted)
{
    size_t key_len = 0, value_len = 0;
    bool has_value = false;
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "key") && !has_value) /* etcd writes the key first */
            key_len = read_bytes(r, 0, r->limits->key);
        else if (kv_str_eq(key, "value") && !has_value) {
            value_len = read_bytes(r, key_len, r->limits->value);
            has_value = true;
        } else
            kv_json_skip(&r->j);
    }
    if (!kv_json_failed(&r->j) && key_len && r->fn)
        r->fn(r->arg, (struct kv_str){r->bytes.data, key_len},
              (struct kv_str){r->bytes.data + key_len, deleted ? 0 : value_len}, deleted);
}

static void read_event(struct reading *r)
{
    bool deleted = false;
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "type")) /* absent: PUT; etcd writes it before kv */
            deleted = kv_str_eq(kv_json_str(&r->j, &r->scratch), "DELETE");
        else if (kv_str_eq(key, "kv"))
            read_kv(r, deleted);
        else
            kv_json_skip(&r->j);
    }
}

static void read_header(struct reading *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "revision"))
            r->answer->revision = read_number(r);
        else
            kv_json_skip(&r->j);
    }
}

/* Note why the server refuses: the value, when it is a text. */
static void read_reason(struct reading *r)
{
    struct kv_str text;

    if (kv_json_peek(&r->j) != KV_JSON_STRING) {
        kv_json_skip(&r->j);
        return;
    }
    text = kv_json_str(&r->j, &r->scratch);
    snprintf(r->answer->error, sizeof(r->answer->error), "%.*s", (int)KV_MIN(text.len, (size_t)95),
             text.p);
}

/* Note that the server refuses: "error" is a text, or (streams) an object with a message. Gateways
 * of the second generation (etcd 3.6, Debian's 3.5) have no "error" but in streams: the message
 * stands in the answer itself. */
static void read_error(struct reading *r)
{
    struct kv_str key;

    snprintf(r->answer->error, sizeof(r->answer->error), "refused");
    if (kv_json_peek(&r->j) == KV_JSON_STRING) {
        read_reason(r);
        return;
    }
    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "message"))
            read_reason(r);
        else
            kv_json_skip(&r->j);
    }
}

static void read_members(struct reading *r, bool outer)
{
    struct etcd_answer *a = r->answer;
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "result") && outer) /* messages of streams */
            read_members(r, false);
        else if (kv_str_eq(key, "header"))
            read_header(r);
        else if (kv_str_eq(key, "ID"))
            a->id = read_number(r);
        else if (kv_str_eq(key, "TTL"))
            a->ttl = read_number(r);
        else if (kv_str_eq(key, "token"))
            kv_json_copy_str(&r->j, &r->scratch, a->token, sizeof(a->token));
        else if (kv_str_eq(key, "error"))
            read_error(r);
        else if (kv_str_eq(key, "message"))
            read_reason(r);
        else if (kv_str_eq(key, "created"))
            a->created = kv_json_bool(&r->j);
        else if (kv_str_eq(key, "canceled"))
            a->canceled = kv_json_bool(&r->j);
        else if (kv_str_eq(key, "succeeded"))
            a->succeeded = kv_json_bool(&r->j);
        else if (kv_str_eq(key, "more"))
            a->more = kv_json_bool(&r->j);
        else if (kv_str_eq(key, "kvs")) {
            kv_json_array(&r->j);
            while (kv_json_next_item(&r->j))
                read_kv(r, false);
        } else if (kv_str_eq(key, "events")) {
            kv_json_array(&r->j);
            while (kv_json_next_item(&r->j))
                read_event(r);
        } else
            kv_json_skip(&r->j);
    }
}

int etcd_read(const void *json, size_t len, const struct etcd_limits *limits,
              struct etcd_answer *ret, etcd_key_fn fn, void *arg)
{
    struct reading r = {.limits = limits, .answer = ret, .fn = fn, .arg = arg};
    int err;

    *ret = (struct etcd_answer){0};
    r.scratch.limit = len + 1;
    kv_json_init(&r.j, json, len);
    read_members(&r, true);
    err = kv_json_finish_foreign(&r.j);
    kv_buf_fini(&r.scratch);
    kv_buf_fini(&r.bytes);
    return err;
}
