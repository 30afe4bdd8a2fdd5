// SPDX-License-Identifier: Apache-2.0
/*
 * Replies of a Redis server. In one piece, byte by byte, and with payloads put where they belong,
 * the same bytes give the same verdict, use and value.
 */
#include <stdbool.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/error.h"
#include "redis/resp.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void show(const struct resp_value *v, struct kv_buf *out) // NOLINT(misc-no-recursion)
{
    kv_buf_printf(out, "%d %lld %zu %zu ", (int)v->type, (long long)v->num, v->len, v->n);
    if (v->str && v->str[v->len] != '\0')
        abort();
    kv_buf_append(out, v->str, v->len);
    for (size_t i = 0; i < v->n; i++)
        show(&v->items[i], out);
}

/* The verdict; what was used and what was understood. */
static int parse(const uint8_t *data, size_t size, size_t step, bool direct, size_t *ret_used,
                 struct kv_buf *out)
{
    static struct resp_parser parser;
    struct resp_value value = {0};
    int rc = 0;

    resp_init(&parser);
    *ret_used = 0;
    while (rc == 0 && *ret_used < size) {
        size_t take = KV_MIN(step, size - *ret_used), used = 0, room;
        void *to = NULL;

        room = direct ? resp_direct(&parser, &to) : 0;
        if (room > 0) {
            used = KV_MIN(room, take);
            memcpy(to, data + *ret_used, used);
            rc = resp_filled(&parser, used, &value);
        } else {
            rc = resp_feed(&parser, (const char *)data + *ret_used, take, &used, &value);
        }
        *ret_used += used;
    }
    if (rc == 1)
        show(&value, out);
    resp_value_fini(&value);
    resp_fini(&parser);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_buf first = KV_BUF_INIT, other = KV_BUF_INIT;
    size_t used, used_other;
    int rc = parse(data, size, size, false, &used, &first);

    for (int i = 0; i < 3; i++) {
        kv_buf_clear(&other);
        if (parse(data, size, i == 0 ? 1 : 7, i > 0, &used_other, &other) != rc)
            abort();
        if (rc == 1 && (used != used_other || first.len != other.len ||
                        memcmp(first.data, other.data, first.len) != 0))
            abort();
    }
    kv_buf_fini(&first);
    kv_buf_fini(&other);
    return 0;
}
