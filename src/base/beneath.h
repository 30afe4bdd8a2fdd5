// SPDX-License-Identifier: Apache-2.0
/**
 * Files below a directory that other programs, or other users, can write to. A path is resolved
 * below a directory's descriptor; no symbolic link is followed, and nothing outside is reached.
 */
#ifndef KV_BASE_BENEATH_H
#define KV_BASE_BENEATH_H

#include <stdbool.h>
#include <sys/stat.h>
#include <sys/types.h>

enum {
    KV_BENEATH_ANY_OWNER = 1, /* users share the directory: the file may belong to another one */
    KV_BENEATH_ANY_LINKS = 2  /* the program makes hard links of its own */
};

/**
 * Open @path below directory @at; @flags and @mode as for open(2), O_CLOEXEC is added. Returns a
 * descriptor, -ELOOP: @path or a part of it is a symbolic link, -EXDEV: @path is absolute or leads
 * out of @at by "..", or another negative errno of open(2). O_TRUNC and O_CREAT act on what is
 * there, whatever it is; kv_beneath_file looks first.
 */
int kv_beneath_open(int at, const char *path, int flags, mode_t mode);

/** The same without openat2(2), one part of @path after the other: for kernels and containers
 * without that call. kv_beneath_open falls back to it by itself. */
int kv_beneath_steps(int at, const char *path, int flags, mode_t mode);

/**
 * Open the regular file @path below @at, which is this program's to change. Nothing is waited for
 * (a FIFO has no writer), and O_TRUNC acts after these checks:
 *   -ELOOP   a symbolic link is on the way
 *   -EISDIR  a directory
 *   -ENXIO   a FIFO, socket or device
 *   -EMLINK  it has other names as well, so it may be another program's; not with
 *            KV_BENEATH_ANY_LINKS in @allow
 *   -EPERM   its owner is neither this process' user nor the owner of the file's directory; not with
 *            KV_BENEATH_ANY_OWNER in @allow
 * @ret_st (may be NULL) is what fstat says, before a truncation. Returns a descriptor, one of
 * these, or what kv_beneath_open returns.
 */
int kv_beneath_file(int at, const char *path, int flags, mode_t mode, unsigned allow,
                    struct stat *ret_st);

/**
 * Open directory @name (one part, no '/') in @at for reading; make it when it is missing and
 * @make_mode isn't 0, and set *ret_made then. Returns a descriptor, -ELOOP: a symbolic link,
 * -ENOTDIR: another kind of file, or another negative errno.
 */
int kv_beneath_dir(int at, const char *name, mode_t make_mode, bool *ret_made);

#endif
