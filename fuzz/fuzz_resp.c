// SPDX-License-Identifier: Apache-2.0
/* Replies of a Redis server. Parsed in one piece, byte by byte, and with payloads received in
 * place, the same bytes give the same verdict, length and value. Skipping payloads for lack of room
 * changes neither completeness nor length. */
#include <stdbool.h>
#include <stdio.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "redis/resp.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void show(const struct resp_value *v, struct kv_buf *out) // NOLINT(misc-no-recursion)
{
    kv_buf_printf(out, "%d %lld %zu %zu ", (int)v->type, (long long)v->num, v->len, v->n);
    if (v->str && v->str[v->len] != '\0')
        abort();
    if (v->str) /* NULL: it was skipped */
        kv_buf_append(out, v->str, v->len);
    for (size_t i = 0; i < v->n; i++)
        show(&v->items[i], out);
}

/* Parse, and return the verdict with the number of bytes used and the value as text. */
static int parse(const uint8_t *data, size_t size, size_t step, bool direct, uint64_t limit,
                 size_t *ret_used, struct kv_buf *out)
{
    static struct resp_parser parser;
    struct resp_value value = {0};
    int rc = 0;

    resp_init(&parser);
    parser.room = &limit;
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

/* Parse as a whole and in pieces. */
static int check(const uint8_t *data, size_t size, uint64_t limit, size_t *ret_used)
{
    struct kv_buf first = KV_BUF_INIT, other = KV_BUF_INIT;
    size_t used_other;
    int rc = parse(data, size, size, false, limit, ret_used, &first);

    for (int i = 0; i < 3; i++) {
        kv_buf_clear(&other);
        if (parse(data, size, i == 0 ? 1 : 7, i > 0, limit, &used_other, &other) != rc)
            abort();
        if (rc == 1 && (*ret_used != used_other || first.len != other.len ||
                        memcmp(first.data, other.data, first.len) != 0))
            abort();
    }
    kv_buf_fini(&first);
    kv_buf_fini(&other);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t used, used_other;
    int rc = check(data, size, UINT64_MAX, &used);

    /* Skipping detects a payload's wrong end one byte earlier than reading does. */
    if ((check(data, size, size > 0 ? data[size - 1] % 8 : 0, &used_other) == 1) != (rc == 1) ||
        (rc == 1 && used != used_other))
        abort();
    return 0;
}
