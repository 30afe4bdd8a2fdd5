// SPDX-License-Identifier: Apache-2.0
#include "peer/session/endpoints.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdio.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define UNIX_BUFFER (1 << 20) /* bytes; the kernel may grant less */

static int read_unix(const char *path, struct kvbm_endpoint *ret, const char **why)
{
    ret->is_unix = true;
    ret->path.sun_family = AF_UNIX;
    *why = "the path doesn't begin with /";
    if (path[0] != '/')
        return -EINVAL;
    *why = "the path has more than 107 bytes";
    if (strlen(path) >= sizeof(ret->path.sun_path))
        return -EINVAL;
    memcpy(ret->path.sun_path, path, strlen(path) + 1);
    return 0;
}

int kvbm_endpoint_read(const char *text, struct kvbm_endpoint *ret, const char **why)
{
    char uri[300];

    memset(ret, 0, sizeof(*ret));
    if (strncmp(text, "unix:", 5) == 0)
        return read_unix(text + 5, ret, why);
    *why = "unix:/PATH or tcp:HOST:PORT is expected";
    if (strncmp(text, "tcp:", 4) != 0)
        return -EINVAL;
    *why = "too long";
    if (snprintf(uri, sizeof(uri), "tcp://%s", text + 4) >= (int)sizeof(uri))
        return -EINVAL;
    return kv_endpoint_parse(uri, &ret->tcp, why);
}

int kvbm_endpoint_parse(const char *text, struct kvbm_endpoint *ret)
{
    const char *why = NULL;
    char quoted[256];
    int err;

    memset(ret, 0, sizeof(*ret));
    if (!text)
        return -EINVAL;
    err = kvbm_endpoint_read(text, ret, &why);
    if (err < 0)
        kv_log_error("kvbm", "not an endpoint: unix:/PATH or tcp:HOST:PORT",
                     "endpoint=%s why=\"%s\"", kv_log_quote(quoted, sizeof(quoted), text), why);
    return err;
}

socklen_t kvbm_address(const struct kv_address *address, uint16_t port,
                       struct sockaddr_storage *ret)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)ret;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)ret;
    char text[sizeof(address->text)];
    char *zone;

    memset(ret, 0, sizeof(*ret));
    ret->ss_family = (sa_family_t)address->family;
    memcpy(text, address->text, sizeof(text));
    if (address->family == AF_INET) {
        v4->sin_port = htons(port);
        (void)inet_pton(AF_INET, text, &v4->sin_addr);
        return sizeof(*v4);
    }
    zone = strchr(text, '%');
    if (zone) {
        *zone = '\0';
        v6->sin6_scope_id = if_nametoindex(zone + 1);
    }
    v6->sin6_port = htons(port);
    (void)inet_pton(AF_INET6, text, &v6->sin6_addr);
    return sizeof(*v6);
}

int kvbm_socket(int family)
{
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    return fd < 0 ? -errno : fd;
}

void kvbm_tune(int fd, bool is_unix)
{
    const int on = 1, buffer = UNIX_BUFFER;

    if (is_unix)
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    else
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}
