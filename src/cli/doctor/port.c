// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor/port.h"

#include <endian.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/ascii.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/net/resolve.h"

enum { GREETING = 64, COMMAND = 4, LONG_COMMAND = 6 };

/* -- what a peer says -------------------------------------------------------------------------- */

static int is_other(struct kc_port_answer *ret, const uint8_t *bytes, size_t len)
{
    size_t n = 0;
    char text[41];

    while (n < len && n < sizeof(text) - 1 && bytes[n] >= ' ' && bytes[n] < 0x7f) {
        text[n] = (char)bytes[n];
        n++;
    }
    text[n] = '\0';
    ret->what = KC_PORT_OTHER;
    if (n >= 4)
        snprintf(ret->said, sizeof(ret->said), "it says \"%s\"", text);
    else
        snprintf(ret->said, sizeof(ret->said), "its first byte is %02x, ZMTP 3 begins with ff",
                 bytes[0]);
    return 1;
}

/* Copy the Socket-Type of READY's properties. */
static void read_type(const uint8_t *p, size_t len, struct kc_port_answer *ret)
{
    while (len > 0) {
        size_t name = p[0], value;
        uint32_t be;

        if (len < 1 + name + sizeof(be))
            return;
        memcpy(&be, p + 1 + name, sizeof(be));
        value = be32toh(be);
        if (value > len - 1 - name - sizeof(be))
            return;
        if (name == 11 && kv_ncasecmp((const char *)p + 1, "Socket-Type", 11) == 0 &&
            value < sizeof(ret->type)) {
            memcpy(ret->type, p + 1 + name + sizeof(be), value);
            ret->type[value] = '\0';
            for (char *c = ret->type; *c; c++)
                if (*c < ' ' || *c > '~')
                    *c = '?';
        }
        p += 1 + name + sizeof(be) + value;
        len -= 1 + name + sizeof(be) + value;
    }
}

int kc_port_read(const uint8_t *bytes, size_t len, struct kc_port_answer *ret)
{
    static const char null_mechanism[20] = "NULL";
    size_t body;

    if (len == 0)
        return 0;
    if (bytes[0] != 0xff || (len > 9 && !(bytes[9] & 1)))
        return is_other(ret, bytes, len);
    if (len < GREETING)
        return 0;
    ret->what = KC_PORT_ZMTP;
    if (bytes[10] < 3 || memcmp(bytes + 12, null_mechanism, sizeof(null_mechanism)) != 0) {
        ret->what = KC_PORT_OTHER;
        snprintf(ret->said, sizeof(ret->said),
                 bytes[10] < 3 ? "it speaks ZMTP %u, of ZeroMQ before 4.0"
                               : "it speaks ZMTP %u, but wants credentials (CURVE, PLAIN)",
                 bytes[10]);
        return 1;
    }
    if (len < GREETING + 2)
        return 0;
    if (bytes[GREETING] != COMMAND)
        return is_other(ret, bytes + GREETING, len - GREETING);
    body = bytes[GREETING + 1];
    if (len < GREETING + 2 + body)
        return 0;
    if (body >= 6 && memcmp(bytes + GREETING + 2, "\5READY", 6) == 0)
        read_type(bytes + GREETING + 8, body - 6, ret);
    snprintf(ret->said, sizeof(ret->said), "a ZMQ socket of type %s answers",
             ret->type[0] ? ret->type : "unknown");
    return 1;
}

/* -- asking ------------------------------------------------------------------------------------ */

static int wait_for(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    int64_t ms = kv_ms_until(deadline_ns, kv_now_ns());
    int n;

    do
        n = poll(&p, 1, (int)ms);
    while (n < 0 && errno == EINTR);
    return n == 0 ? -ETIMEDOUT : n < 0 ? -errno : 0;
}

static int connect_to(const struct sockaddr *address, socklen_t len, uint64_t deadline_ns,
                      int *ret_fd)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), rc = 0;
    int error = 0;
    socklen_t size = sizeof(error);

    if (fd < 0)
        return -errno;
    if (connect(fd, address, len) < 0) {
        rc = errno == EINPROGRESS ? wait_for(fd, POLLOUT, deadline_ns) : -errno;
        if (rc == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0)
            rc = -error;
    }
    if (rc < 0) {
        close(fd);
        return rc;
    }
    *ret_fd = fd;
    return 0;
}

static int connect_ipc(const char *path, uint64_t deadline_ns, int *ret_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t len = strlen(path);

    if (len >= sizeof(address.sun_path))
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, len + 1);
    if (path[0] == '@')
        address.sun_path[0] = '\0';
    return connect_to((struct sockaddr *)&address,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + (path[0] != '@')),
                      deadline_ns, ret_fd);
}

/* Try each address of the host. Returns 0, -ENOENT for a name without one, or the last errno. */
static int connect_tcp(const struct kv_endpoint *endpoint, uint64_t deadline_ns, int *ret_fd)
{
    struct kv_addresses found = {0};
    int rc = kv_lookup_system(NULL, endpoint->host, &found);

    if (rc < 0)
        return -ENOENT;
    rc = -ECONNREFUSED;
    for (unsigned i = 0; i < found.n; i++) {
        const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                                       .ai_socktype = SOCK_STREAM};
        struct addrinfo *info;
        char port[8];

        snprintf(port, sizeof(port), "%u", (unsigned)endpoint->port);
        if (getaddrinfo(found.items[i].text, port, &hints, &info) != 0)
            continue;
        rc = connect_to(info->ai_addr, info->ai_addrlen, deadline_ns, ret_fd);
        freeaddrinfo(info);
        if (rc == 0)
            return 0;
    }
    return rc;
}

static void greet(int fd, uint64_t timeout_ms, struct kc_port_answer *ret)
{
    static const uint8_t greeting[GREETING] = {0xff, 0,    0, 0, 0,   0,   0,   0,
                                               1,    0x7f, 3, 0, 'N', 'U', 'L', 'L'};
    uint64_t deadline_ns = kv_ns_after(kv_now_ns(), timeout_ms);
    uint8_t bytes[KC_PORT_BYTES];
    size_t len = 0;
    ssize_t n = send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL);

    while (len < sizeof(bytes) && wait_for(fd, POLLIN, deadline_ns) == 0) {
        n = recv(fd, bytes + len, sizeof(bytes) - len, 0);
        if (n <= 0)
            break;
        len += (size_t)n;
        if (kc_port_read(bytes, len, ret))
            return;
    }
    if (len > 0 && bytes[0] == 0xff) {
        ret->what = KC_PORT_OTHER;
        snprintf(ret->said, sizeof(ret->said), "it begins as ZMTP, and ends after %zu bytes", len);
    } else if (len > 0) {
        is_other(ret, bytes, len);
    } else if (n <= 0) {
        ret->what = KC_PORT_HANGS_UP;
        snprintf(ret->said, sizeof(ret->said), "closed before it sent a byte");
    } else {
        ret->what = KC_PORT_OTHER;
        snprintf(ret->said, sizeof(ret->said), "it said nothing in %.1f s",
                 (double)timeout_ms / 1e3);
    }
}

void kc_port_ask(const struct kv_endpoint *endpoint, uint64_t timeout_ms,
                 struct kc_port_answer *ret)
{
    uint64_t deadline_ns = kv_ns_after(kv_now_ns(), timeout_ms);
    int fd = -1, rc;

    *ret = (struct kc_port_answer){.what = KC_PORT_REFUSED};
    rc = endpoint->scheme == KV_SCHEME_IPC ? connect_ipc(endpoint->host, deadline_ns, &fd)
                                           : connect_tcp(endpoint, deadline_ns, &fd);
    if (rc == -ENOENT && endpoint->scheme == KV_SCHEME_TCP) {
        ret->what = KC_PORT_NAME;
        snprintf(ret->said, sizeof(ret->said), "the name %.80s has no address", endpoint->host);
    } else if (rc == -ETIMEDOUT) {
        snprintf(ret->said, sizeof(ret->said), "no answer in %.1f s: a firewall, or no such host",
                 (double)timeout_ms / 1e3);
    } else if (rc < 0) {
        snprintf(ret->said, sizeof(ret->said), "connect: %s", strerror(-rc));
    } else {
        greet(fd, timeout_ms, ret);
        close(fd);
    }
}
