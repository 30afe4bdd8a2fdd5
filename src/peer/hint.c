// SPDX-License-Identifier: Apache-2.0
/*
 * kv.fetch hints. Members of a JSON object come in any order, and an action's type may follow its
 * payload. So each object is read in two steps: note where its members are, then read those that
 * count. Of equal keys the last counts.
 */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/json/json.h"
#include "base/net/endpoint.h"
#include "kvbm_remote.h"

#define MAX_TEXT 1024 /* of strings that are read, escapes resolved */

/* A value's text within the hint; NULL: no such member. */
typedef struct kv_str value;

/* Skip a value and return its text. */
static value take(struct kv_json *j)
{
    value v = {0};

    if (kv_json_peek(j) != KV_JSON_NONE)
        v.p = j->p;
    kv_json_skip(j);
    if (v.p)
        v.len = (size_t)(j->p - v.p);
    return v;
}

/* Note where the values of @keys[@n] are in an object. */
static int members(value object, const char *const *keys, value *ret, size_t n)
{
    struct kv_json j;
    struct kv_str key;

    memset(ret, 0, n * sizeof(*ret));
    if (!object.p)
        return -EPROTO;
    kv_json_init(&j, object.p, object.len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        size_t i = 0;

        while (i < n && !kv_str_eq(key, keys[i]))
            i++;
        if (i < n)
            ret[i] = take(&j);
        else
            kv_json_skip(&j);
    }
    return kv_json_finish_foreign(&j);
}

/* Copy a string to @ret, of @size with its NUL. */
static int text_of(value v, char *ret, size_t size)
{
    struct kv_buf scratch = {.limit = MAX_TEXT};
    struct kv_str text;
    struct kv_json j;
    int err;

    if (!v.p)
        return -EPROTO;
    kv_json_init(&j, v.p, v.len);
    text = kv_json_str(&j, &scratch);
    err = kv_json_finish_foreign(&j);
    if (err == 0 && text.len >= size)
        err = -EPROTO;
    if (err == 0) {
        memcpy(ret, text.p, text.len);
        ret[text.len] = '\0';
    }
    kv_buf_fini(&scratch);
    return err;
}

static bool is_null(value v)
{
    return v.len >= 4 && memcmp(v.p, "null", 4) == 0;
}

/* ---- the payload ---- */

static bool can_be_dialled(const struct kv_endpoint *e)
{
    static const uint8_t any4[16] = {[10] = 0xff, [11] = 0xff}, any6[16] = {0};
    uint8_t address[16];

    if (e->scheme != KV_SCHEME_TCP || e->wildcard || e->any_port)
        return false;
    return !kv_endpoint_address(e, address) ||
           (memcmp(address, any4, 16) != 0 && memcmp(address, any6, 16) != 0);
}

static int read_endpoint(value v, struct kvbm_hint *ret)
{
    struct kv_endpoint endpoint;
    char text[sizeof(endpoint.host) + 16];
    int err;

    if (!v.p || is_null(v))
        return 0;
    err = text_of(v, text, sizeof(text));
    if (err < 0)
        return err;
    if (kv_endpoint_parse(text, &endpoint, NULL) < 0 || !can_be_dialled(&endpoint))
        return -EPROTO;
    memcpy(ret->host, endpoint.host, sizeof(ret->host));
    ret->port = endpoint.port;
    return 0;
}

static int read_mode(value mode, value no_retain, struct kvbm_hint *ret)
{
    char text[8] = "copy";
    int err = mode.p ? text_of(mode, text, sizeof(text)) : 0;

    if (err < 0)
        return err;
    ret->move = strcmp(text, "move") == 0;
    if (!ret->move && strcmp(text, "copy") != 0)
        return -EPROTO;
    if (no_retain.p) {
        struct kv_json j;

        kv_json_init(&j, no_retain.p, no_retain.len);
        ret->no_retain = kv_json_bool(&j);
        if (kv_json_finish(&j) < 0)
            return -EPROTO;
    }
    return 0;
}

/* Read the first 16 hexadecimal digits of a digest. */
static uint64_t read_hex(struct kv_json *j, struct kv_buf *scratch)
{
    struct kv_str text = kv_json_str(j, scratch);
    uint64_t bits = 0;

    for (size_t i = 0; i < text.len; i++) {
        char c = text.p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;

        if (digit < 0)
            kv_json_fail(j, -EINVAL, "a hash must be hexadecimal");
        else if (i < 16)
            bits = bits << 4 | (unsigned)digit;
    }
    if (!text.len)
        kv_json_fail(j, -EINVAL, "an empty hash");
    return bits;
}

static long read_hashes(value v, uint64_t *hashes, size_t cap)
{
    struct kv_buf scratch = {.limit = MAX_TEXT};
    struct kv_json j;
    size_t n = 0;
    int err;

    if (!v.p)
        return -EPROTO;
    kv_json_init(&j, v.p, v.len);
    kv_json_array(&j);
    while (kv_json_next_item(&j)) {
        bool hex = kv_json_peek(&j) == KV_JSON_STRING;
        uint64_t hash = hex ? read_hex(&j, &scratch) : kv_json_bits64(&j);

        if (n < cap)
            hashes[n] = hash;
        n++;
    }
    err = kv_json_finish_foreign(&j);
    kv_buf_fini(&scratch);
    return err < 0 ? err : n ? (long)n : -EPROTO;
}

static long read_payload(value payload, struct kvbm_hint *ret, uint64_t *hashes, size_t cap)
{
    static const char *const keys[] = {"source_control_endpoint", "block_hashes", "mode",
                                       "no_retain"};
    value v[KV_COUNT(keys)];
    int err = members(payload, keys, v, KV_COUNT(keys));

    if (err == 0)
        err = read_endpoint(v[0], ret);
    if (err == 0)
        err = read_mode(v[2], v[3], ret);
    return err < 0 ? err : read_hashes(v[1], hashes, cap);
}

/* ---- the envelope ---- */

/* Return 1 with its payload when @action is a kv.fetch of version 1, 0 when it is another one. */
static int read_action(value action, value *ret_payload)
{
    static const char *const keys[] = {"action_type", "action_version", "payload"};
    value v[KV_COUNT(keys)];
    char type[MAX_TEXT] = "", version[32];
    int err = members(action, keys, v, KV_COUNT(keys));

    if (err == 0)
        err = text_of(v[0], type, sizeof(type));
    if (err < 0 || strcmp(type, "kv.fetch") != 0)
        return err;
    err = text_of(v[1], version, sizeof(version));
    if (err < 0)
        return err;
    *ret_payload = v[2];
    return strncmp(version, "1.", 2) == 0 ? 1 : -EPROTONOSUPPORT;
}

/* Find the first kv.fetch of version 1. */
static int find_fetch(value actions, value *ret_payload)
{
    struct kv_json j;
    int found = 0, newer = -ENOENT;

    if (!actions.p)
        return -EPROTO;
    kv_json_init(&j, actions.p, actions.len);
    kv_json_array(&j);
    while (found == 0 && kv_json_next_item(&j)) {
        found = read_action(take(&j), ret_payload);
        if (found == -EPROTONOSUPPORT) {
            newer = found;
            found = 0;
        }
    }
    if (found == 0)
        found = kv_json_finish_foreign(&j);
    return found ? found : newer;
}

static int find_payload(value json, value *ret)
{
    static const char *const keys[] = {"protocol_version", "actions", "block_hashes"};
    value v[KV_COUNT(keys)];
    char version[32];
    int err = members(json, keys, v, KV_COUNT(keys));

    if (err < 0)
        return err;
    if (v[2].p && !v[1].p) { /* a bare payload */
        *ret = json;
        return 0;
    }
    err = text_of(v[0], version, sizeof(version));
    if (err < 0)
        return err;
    if (strcmp(version, "0.1") != 0)
        return -EPROTONOSUPPORT;
    err = find_fetch(v[1], ret);
    return KV_MIN(err, 0);
}

long kvbm_hint_parse(const void *json, size_t len, struct kvbm_hint *ret, uint64_t *hashes,
                     size_t cap)
{
    struct kvbm_hint hint = {.size = sizeof(hint)};
    value payload = {0};
    long n;

    if (!json || !kv_sized(ret, "kvbm_hint") || (cap && !hashes))
        return -EINVAL;
    n = find_payload((value){json, len}, &payload);
    if (n == 0)
        n = read_payload(payload, &hint, hashes, cap);
    if (n > 0)
        KV_GIVE(ret, &hint);
    return n;
}
