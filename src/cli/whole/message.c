// SPDX-License-Identifier: Apache-2.0
#include "cli/whole/message.h"

#include <errno.h>
#include <sys/socket.h>

int kc_message_send(int fd, const struct kc_message *message)
{
    ssize_t n;

    do
        n = send(fd, message, sizeof(*message), MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*message) ? 0 : n < 0 ? -errno : -EPROTO;
}

int kc_message_receive(int fd, struct kc_message *ret)
{
    ssize_t n;

    do
        n = recv(fd, ret, sizeof(*ret), 0);
    while (n < 0 && errno == EINTR);
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return -EPIPE;
    return n == (ssize_t)sizeof(*ret) ? 0 : n < 0 ? -errno : -EPROTO;
}
