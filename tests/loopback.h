// SPDX-License-Identifier: Apache-2.0
/** Helpers for unit tests that start a server on loopback. */
#ifndef KV_TESTS_LOOPBACK_H
#define KV_TESTS_LOOPBACK_H

#include "base/unit.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

/** Return a port of loopback on which nobody listens. */
static inline unsigned free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&at, len), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    close(fd);
    return ntohs(at.sin_port);
}

/** Return true when somebody listens on a port of loopback. */
static inline bool port_answers(unsigned port)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr = {htonl(INADDR_LOOPBACK)},
                             .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool ok = connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0;

    close(fd);
    return ok;
}

#endif
