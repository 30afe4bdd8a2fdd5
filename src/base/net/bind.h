// SPDX-License-Identifier: Apache-2.0
/** Sockets of servers. */
#ifndef KV_BASE_BIND_H
#define KV_BASE_BIND_H

#include <stdint.h>

#include "base/core/error.h"

/**
 * Make a TCP socket that is bound to @host:@port (0: any port) and doesn't listen yet: clients are refused. @host is
 * a name or an address; "::" serves IPv4, too. It doesn't block and is closed on exec. Returns 0 or a negative errno
 * with @error.
 */
int kv_bind(const char *host, uint16_t port, int *ret_fd, uint16_t *ret_port,
            struct kv_error *error);

#endif
