// SPDX-License-Identifier: Apache-2.0
/**
 * Make the names in a directory durable, where the file system can: older CIFS, 9p, vboxsf and some
 * FUSE file systems refuse fsync(2) of a directory.
 */
#ifndef KV_BASE_SYNC_DIR_H
#define KV_BASE_SYNC_DIR_H

#include <stdatomic.h>
#include <stdbool.h>

/**
 * Sync directory @fd. Returns 0 or a negative errno. Also returns 0 where the file system can't
 * sync a directory (EINVAL, ENOTSUP, ENOSYS): then names may be lost in a power cut, never bytes.
 * The first time, *@told false, one warning says so with @component and path @dir. Any thread.
 */
int kv_sync_dir(int fd, _Atomic bool *told, const char *component, const char *dir);

#endif
