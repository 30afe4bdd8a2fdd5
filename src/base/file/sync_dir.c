// SPDX-License-Identifier: Apache-2.0
#include "base/file/sync_dir.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/core/log.h"

int kv_sync_dir(int fd, _Atomic bool *told, const char *component, const char *dir)
{
    char where[512];
    int error;

    do
        error = fsync(fd) < 0 ? errno : 0;
    while (error == EINTR);
    if (error != EINVAL && error != ENOTSUP && error != ENOSYS)
        return -error;
    if (!atomic_exchange_explicit(told, true, memory_order_relaxed))
        kv_log_warn(component,
                    "this file system can't sync a directory (fsync): a power cut may lose the "
                    "names of files stored last",
                    "dir=%s error=\"%s\"", kv_log_quote(where, sizeof(where), dir),
                    strerror(error));
    return 0;
}
