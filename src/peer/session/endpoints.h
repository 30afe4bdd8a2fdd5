// SPDX-License-Identifier: Apache-2.0
/** Endpoints of agents: unix:/PATH, tcp:HOST:PORT, tcp:[V6]:PORT. */
#ifndef KVBM_PEER_SESSION_ENDPOINTS_H
#define KVBM_PEER_SESSION_ENDPOINTS_H

#include <sys/socket.h>
#include <sys/un.h>

#include "base/net/endpoint.h"
#include "base/net/resolve.h"

struct kvbm_endpoint {
    bool is_unix;
    struct sockaddr_un path; /* unix */
    struct kv_endpoint tcp;
};

/** Parse an endpoint. Returns 0; -EINVAL with the reason in *@why. */
int kvbm_endpoint_read(const char *text, struct kvbm_endpoint *ret, const char **why);

/** Parse an endpoint, or NULL. Returns 0; -EINVAL, with a log line unless @text is NULL. */
int kvbm_endpoint_parse(const char *text, struct kvbm_endpoint *ret);

/** Make a socket address of a numeric address and a port. Returns its length. */
socklen_t kvbm_address(const struct kv_address *address, uint16_t port,
                       struct sockaddr_storage *ret);

/** Make a non-blocking socket. Returns a descriptor or an error. */
int kvbm_socket(int family);

/** Set a connection up for small frames at once and large ones fast. */
void kvbm_tune(int fd, bool is_unix);

#endif
