// SPDX-License-Identifier: Apache-2.0
/**
 * The bytes of one chunk, in several parts of a caller's memory (struct iovec), which follow each
 * other. A part of no bytes may have a NULL address. Any thread.
 */
#ifndef KV_STORE_BACKEND_PARTS_H
#define KV_STORE_BACKEND_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/** Place within parts; zero is their beginning. */
struct kvs_cursor {
    size_t part, offset;
};

/** Sum up the parts' lengths into *@ret. False: a NULL address with bytes, or more than @max. */
bool kvs_parts_len(const struct iovec *parts, size_t n, size_t max, size_t *ret);

/**
 * Name up to @max bytes from @at on, in up to @room pieces, without moving @at. Returns the number
 * of pieces; *@ret_len is the number of their bytes.
 */
int kvs_parts_pieces(const struct iovec *parts, size_t n, struct kvs_cursor at, size_t max,
                     struct iovec *ret, int room, size_t *ret_len);

/** Move @at by @len bytes, at most to the parts' end. */
void kvs_parts_skip(const struct iovec *parts, size_t n, struct kvs_cursor *at, size_t len);

/** Copy @len bytes into the parts from @at on, which moves. The parts have room for them. */
void kvs_parts_scatter(const struct iovec *parts, size_t n, struct kvs_cursor *at, const void *from,
                       size_t len);

/** Copy all bytes of the parts to @to. */
void kvs_parts_gather(const struct iovec *parts, size_t n, void *to);

/** Whether the parts' bytes are those at @data, which has as many. */
bool kvs_parts_equal(const struct iovec *parts, size_t n, const void *data);

#endif
