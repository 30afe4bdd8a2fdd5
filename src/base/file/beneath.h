// SPDX-License-Identifier: Apache-2.0
/**
 * Open files below a directory that other programs, or other users, can write to. Paths are
 * resolved below a directory's descriptor. Symbolic links are never followed, and nothing outside
 * the directory is reached.
 */
#ifndef KV_BASE_BENEATH_H
#define KV_BASE_BENEATH_H

#include <stdbool.h>
#include <sys/stat.h>
#include <sys/types.h>

enum {
    KV_BENEATH_ANY_OWNER = 1, /* accept files of any owner: users share the directory */
    KV_BENEATH_ANY_LINKS = 2  /* accept files with several hard links: the program makes them */
};

/**
 * Open @path below directory @at. @flags and @mode are those of open(2); O_CLOEXEC is added.
 * Returns a descriptor, or
 *   -ELOOP  @path or a part of it is a symbolic link
 *   -EXDEV  @path is absolute, or leads out of @at by ".."
 *   another negative errno of open(2)
 *
 * O_TRUNC and O_CREAT act on any existing file; kv_beneath_file checks the file first.
 */
int kv_beneath_open(int at, const char *path, int flags, mode_t mode);

/**
 * Open like kv_beneath_open, but without openat2(2): one part of @path after the other.
 * kv_beneath_open falls back to this function on kernels and in containers without that call.
 */
int kv_beneath_steps(int at, const char *path, int flags, mode_t mode);

/**
 * Open the regular file @path below @at after checking that this program may change it. Never
 * waits, not even for a FIFO's writer. O_TRUNC acts after the checks. Returns a descriptor, or
 *   -ELOOP   a symbolic link is on the way
 *   -EISDIR  @path is a directory
 *   -ENXIO   @path is a FIFO, socket or device
 *   -EMLINK  the file has other names, so it may be another program's;
 *            KV_BENEATH_ANY_LINKS in @allow accepts it
 *   -EPERM   the file's owner is neither this process' user nor the owner of the file's directory;
 *            KV_BENEATH_ANY_OWNER in @allow accepts it
 *   another error of kv_beneath_open
 *
 * @ret_st (may be NULL) is the file's state before a truncation.
 */
int kv_beneath_file(int at, const char *path, int flags, mode_t mode, unsigned allow,
                    struct stat *ret_st);

/**
 * Open directory @name (one part, no '/') in @at for reading. When it is missing and @make_mode
 * isn't 0, make it and set *ret_made. Returns a descriptor; -ELOOP: a symbolic link; -ENOTDIR:
 * another kind of file; or another negative errno.
 */
int kv_beneath_dir(int at, const char *name, mode_t make_mode, bool *ret_made);

#endif
