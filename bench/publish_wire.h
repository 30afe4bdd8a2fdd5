// SPDX-License-Identifier: Apache-2.0
/*
 * A publisher that writes ZMTP frames into its subscribers' connections itself. libzmq's costs more
 * CPU a message than a good indexer does; on few cores a benchmark would measure the publishers.
 */
#ifndef KV_BENCH_PUBLISH_WIRE_H
#define KV_BENCH_PUBLISH_WIRE_H

#include <arpa/inet.h>
#include <endian.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "event/wire/frames.h"

enum { WIRE_BATCHES = 128, WIRE_BYTES = 256 << 10 }; /* of one call of the kernel, at most */

static inline bool wire_listen(int *ret_fd, char endpoint[128])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);

    *ret_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*ret_fd < 0 || bind(*ret_fd, (struct sockaddr *)&address, len) || listen(*ret_fd, 16) ||
        getsockname(*ret_fd, (struct sockaddr *)&address, &len))
        return false;
    snprintf(endpoint, 128, "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    return true;
}

static inline bool wire_read(int fd, void *to, size_t len)
{
    return recv(fd, to, len, MSG_WAITALL) == (ssize_t)len;
}

/* Read a short frame. Returns the length of its body, or -1. */
static inline int wire_read_frame(int fd, uint8_t body[256], bool *ret_command)
{
    uint8_t header[2];

    if (!wire_read(fd, header, sizeof(header)) || header[0] & 2)
        return -1;
    *ret_command = header[0] & 4;
    return header[1] == 0 || wire_read(fd, body, header[1]) ? header[1] : -1;
}

/* Accept a subscriber, and wait for its subscription. Returns its descriptor, or -1. */
static inline int wire_accept(int server)
{
    static const uint8_t greeting[64] = {0xff, 0,    0, 0, 0,   0,   0,   0,
                                         1,    0x7f, 3, 0, 'N', 'U', 'L', 'L'};
    static const char ready[] = "\4\31\5READY\13Socket-Type\0\0\0\3PUB";
    uint8_t body[256];
    bool command;
    int fd = accept(server, NULL, NULL), len;

    if (fd < 0 || send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL) < 0 ||
        !wire_read(fd, body, sizeof(greeting)) ||
        send(fd, ready, sizeof(ready) - 1, MSG_NOSIGNAL) < 0 ||
        wire_read_frame(fd, body, &command) < 0)
        return -1;
    do
        len = wire_read_frame(fd, body, &command);
    while (len >= 0 &&
           !(command ? len > 9 && memcmp(body, "\11SUBSCRIBE", 10) == 0 : len > 0 && body[0] == 1));
    return len >= 0 ? fd : -1;
}

/* Write the frames of a message before its payload. Returns their length. */
static inline size_t wire_header(uint8_t header[32], uint64_t sequence, uint64_t len)
{
    uint64_t be = htobe64(len);

    memcpy(header, "\1\0\1\10", 4);
    kve_sequence_put(header + 4, sequence);
    header[12] = len > 255 ? 2 : 0;
    header[13] = (uint8_t)len;
    if (len <= 255)
        return 14;
    memcpy(header + 13, &be, sizeof(be));
    return 21;
}

static inline bool wire_write(int fd, struct iovec *parts, size_t n)
{
    while (n > 0) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = n};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);

        if (sent < 0)
            return false;
        for (; n > 0 && (size_t)sent >= parts->iov_len; parts++, n--)
            sent -= (ssize_t)parts->iov_len;
        if (n > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
    return true;
}

/* Send batch @first and as many behind it as fit one call, of @n with these @offsets. Returns how
 * many; 0: failed. */
static inline size_t wire_send(int fd, const uint8_t *payloads, const size_t *offsets, size_t n,
                               size_t first)
{
    static _Thread_local uint8_t headers[WIRE_BATCHES][32];
    struct iovec parts[2 * WIRE_BATCHES];
    size_t i = 0, bytes = 0;

    for (; i < WIRE_BATCHES && first + i < n && bytes < WIRE_BYTES; i++) {
        size_t at = offsets[first + i], len = offsets[first + i + 1] - at;

        parts[2 * i] = (struct iovec){headers[i], wire_header(headers[i], first + i, len)};
        parts[2 * i + 1] = (struct iovec){(uint8_t *)(uintptr_t)(payloads + at), len};
        bytes += len;
    }
    return wire_write(fd, parts, 2 * i) ? i : 0;
}

#endif
