// SPDX-License-Identifier: Apache-2.0
#include "base/net/bind.h"

#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

static int open_bound(const struct addrinfo *address)
{
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1, off = 0;
    int rc;

    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address->ai_family == AF_INET6) /* "::" serves IPv4 too */
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind(fd, address->ai_addr, address->ai_addrlen) < 0) {
        rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

static uint16_t bound_port(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } address;
    socklen_t len = sizeof(address);

    memset(&address, 0, sizeof(address));
    if (getsockname(fd, &address.any, &len) < 0)
        return 0;
    return ntohs(address.any.sa_family == AF_INET6 ? address.in6.sin6_port : address.in.sin_port);
}

int kv_bind(const char *host, uint16_t port, int *ret_fd, uint16_t *ret_port,
            struct kv_error *error)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *list = NULL;
    char service[8];
    int rc, fd = -EADDRNOTAVAIL;

    snprintf(service, sizeof(service), "%u", port);
    rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0)
        return kv_fail(error, -EADDRNOTAVAIL, 0, "can't resolve host '%.100s': %s", host,
                       gai_strerror(rc));
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next)
        fd = open_bound(a);
    freeaddrinfo(list);
    if (fd < 0)
        return kv_fail(error, fd, 0, "can't listen on %.100s:%u: %s", host, port, strerror(-fd));
    *ret_fd = fd;
    *ret_port = bound_port(fd);
    return 0;
}
