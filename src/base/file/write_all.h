// SPDX-License-Identifier: Apache-2.0
/** Write all bytes to a descriptor. */
#ifndef KV_BASE_WRITE_ALL_H
#define KV_BASE_WRITE_ALL_H

#include <errno.h>
#include <stddef.h>
#include <unistd.h>

/** Returns 0 or a negative errno. Safe in signal handlers, and between fork and exec. */
static inline int kv_write_all(int fd, const void *data, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, (const char *)data + done, len - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        done += (size_t)n;
    }
    return 0;
}

#endif
