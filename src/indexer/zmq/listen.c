// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/listen.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void set_address(const struct kv_endpoint *endpoint, struct sockaddr_in6 *ret)
{
    *ret = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(endpoint->port)};
    if (!endpoint->wildcard)
        kv_endpoint_address(endpoint, ret->sin6_addr.s6_addr);
}

int ki_listen(const struct kv_endpoint *endpoint)
{
    struct sockaddr_in6 v6;
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(endpoint->port)};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1, off = 0, rc;
    bool has_v6 = fd >= 0;

    set_address(endpoint, &v6);
    memcpy(&v4.sin_addr, v6.sin6_addr.s6_addr + 12, 4);
    if (!has_v6)
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    rc = has_v6 ? bind(fd, (struct sockaddr *)&v6, sizeof(v6))
                : bind(fd, (struct sockaddr *)&v4, sizeof(v4));
    if (rc == 0)
        rc = listen(fd, 256);
    if (rc == 0)
        return fd;
    rc = -errno;
    close(fd);
    return rc;
}
