// SPDX-License-Identifier: Apache-2.0
#include "store/backend/parts.h"

#include <string.h>

#include "base/core/error.h"

bool kvs_parts_len(const struct iovec *parts, size_t n, size_t max, size_t *ret)
{
    size_t len = 0;

    for (size_t i = 0; i < n; i++) {
        if (parts[i].iov_len > max - len || (!parts[i].iov_base && parts[i].iov_len))
            return false;
        len += parts[i].iov_len;
    }
    *ret = len;
    return true;
}

int kvs_parts_pieces(const struct iovec *parts, size_t n, struct kvs_cursor at, size_t max,
                     struct iovec *ret, int room, size_t *ret_len)
{
    int pieces = 0;

    *ret_len = 0;
    for (; at.part < n && pieces < room && *ret_len < max; at.part++, at.offset = 0) {
        size_t some = KV_MIN(parts[at.part].iov_len - at.offset, max - *ret_len);

        if (!some)
            continue;
        ret[pieces].iov_base = (char *)parts[at.part].iov_base + at.offset;
        ret[pieces++].iov_len = some;
        *ret_len += some;
    }
    return pieces;
}

void kvs_parts_skip(const struct iovec *parts, size_t n, struct kvs_cursor *at, size_t len)
{
    while (at->part < n && len >= parts[at->part].iov_len - at->offset) {
        len -= parts[at->part++].iov_len - at->offset;
        at->offset = 0;
    }
    if (at->part < n)
        at->offset += len;
}

void kvs_parts_scatter(const struct iovec *parts, size_t n, struct kvs_cursor *at, const void *from,
                       size_t len)
{
    while (len) {
        struct iovec to;
        size_t some;

        if (!kvs_parts_pieces(parts, n, *at, len, &to, 1, &some))
            return;
        memcpy(to.iov_base, from, some);
        kvs_parts_skip(parts, n, at, some);
        from = (const char *)from + some;
        len -= some;
    }
}

void kvs_parts_gather(const struct iovec *parts, size_t n, void *to)
{
    for (size_t i = 0; i < n; i++) {
        if (parts[i].iov_len)
            memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to = (char *)to + parts[i].iov_len;
    }
}

bool kvs_parts_equal(const struct iovec *parts, size_t n, const void *data)
{
    for (size_t i = 0; i < n; i++) {
        if (parts[i].iov_len && memcmp(data, parts[i].iov_base, parts[i].iov_len) != 0)
            return false;
        data = (const char *)data + parts[i].iov_len;
    }
    return true;
}
