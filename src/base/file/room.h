// SPDX-License-Identifier: Apache-2.0
/**
 * Reserve disk space for files of known size when they are made, so that a full disk is noticed
 * then.
 */
#ifndef KV_BASE_ROOM_H
#define KV_BASE_ROOM_H

#include <stdint.h>

/**
 * Check that the file system of @fd has @bytes more free, before anything is reserved. A
 * reservation that fails half-way would first take all free space from every other program on that
 * disk. Returns 0 (also where the file system doesn't know) or -ENOSPC.
 */
int kv_room_for(int fd, uint64_t bytes);

/** Return the number of bytes for which @fd has blocks on the disk. */
uint64_t kv_room_had(int fd);

/**
 * Make the file of @fd at least @bytes large, with blocks for all of it. Existing blocks keep their
 * contents. On a file system that can't reserve, the file gets holes, and the log says so as
 * @component. Returns 0, -ENOSPC, -EFBIG (a limit of the process, or of the file system) or another
 * error; on error the file is unchanged.
 */
int kv_room_reserve(int fd, uint64_t bytes, const char *component);

#endif
