// SPDX-License-Identifier: Apache-2.0
/** Room on a disk for files whose size is known: reserved when they are made, so that a full disk is noticed then. */
#ifndef KV_BASE_ROOM_H
#define KV_BASE_ROOM_H

#include <stdint.h>

/**
 * Whether the file system of @fd has @bytes more free. Asked for before anything is reserved: to
 * try would take all that there is until it fails, from everybody else on that disk. 0 (also where
 * the file system doesn't know) or -ENOSPC.
 */
int kv_room_for(int fd, uint64_t bytes);

/** Bytes that @fd has blocks for on the disk. */
uint64_t kv_room_had(int fd);

/**
 * Make the file of @fd at least @bytes large, with blocks for all of it; those that it has keep
 * what is in them. A file system that can't reserve gets a file with holes, and the log says so as
 * @component. Returns 0, -ENOSPC, -EFBIG (a limit of the process, or of the file system) or another
 * error; the file is as it was then.
 */
int kv_room_reserve(int fd, uint64_t bytes, const char *component);

#endif
