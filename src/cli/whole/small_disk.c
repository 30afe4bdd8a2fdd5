// SPDX-License-Identifier: Apache-2.0
/*
 * A file system of the run's own for --full-disk: a tmpfs over its temporary folder, in a mount
 * namespace that the run's processes share. To fill it, it is given the size that it uses: every write
 * that needs a new page fails with ENOSPC, and no memory is taken for that. A user without privileges
 * needs a user namespace, which a kernel or a container may refuse.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "bm/storage/memory.h"
#include "cli/whole/whole.h"

#define STORE_BYTES ((uint64_t)256 << 20) /* least room beside the disk tiers */

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC), rc = 0;

    if (fd < 0)
        return -errno;
    if (write(fd, text, strlen(text)) < 0)
        rc = -errno;
    close(fd);
    return rc;
}

/* Enter a user namespace in which this user is the same, and may mount. */
static int enter_user_namespace(void)
{
    char uid[64], gid[64];
    int rc;

    snprintf(uid, sizeof(uid), "%u %u 1", geteuid(), geteuid());
    snprintf(gid, sizeof(gid), "%u %u 1", getegid(), getegid());
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        return -errno;
    rc = write_file("/proc/self/setgroups", "deny");
    rc = rc == 0 ? write_file("/proc/self/uid_map", uid) : rc;
    return rc == 0 ? write_file("/proc/self/gid_map", gid) : rc;
}

static int mount_sized(const struct kc_whole *w, uint64_t bytes, unsigned long more)
{
    char size[64];

    snprintf(size, sizeof(size), "size=%" PRIu64 ",mode=0700", bytes);
    return mount("kvasir-replay", w->plan.dir, "tmpfs", MS_NOSUID | MS_NODEV | more, size) < 0
               ? -errno
               : 0;
}

static void refuse(struct kc_whole *w, const char *what, int rc)
{
    snprintf(w->small.why, sizeof(w->small.why), "%s: %s", what, strerror(-rc));
}

void kc_small_disk_enter(struct kc_whole *w)
{
    uint64_t room = kvbm_memory_available("") / 2, disks = w->opts.workers * w->opts.g3;
    int rc;

    if (!(w->opts.faults & 1u << KC_FAULT_FULL_DISK))
        return;
    if (w->opts.dir) {
        snprintf(w->small.why, sizeof(w->small.why), "--dir is kept");
        return;
    }
    if (room < disks + disks / 8 + STORE_BYTES) {
        refuse(w, "memory for a tmpfs", -ENOMEM);
        return;
    }
    rc = unshare(CLONE_NEWNS) < 0 ? enter_user_namespace() : 0;
    if (rc == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        rc = -errno;
    if (rc < 0)
        refuse(w, "namespace", rc);
    w->small.bytes = rc == 0 ? room : 0;
}

void kc_small_disk_mount(struct kc_whole *w)
{
    int rc = w->small.bytes ? mount_sized(w, w->small.bytes, 0) : 0;

    if (rc < 0) {
        refuse(w, "tmpfs", rc);
        w->small.bytes = 0;
    }
}

bool kc_small_disk_fill(struct kc_whole *w, bool full)
{
    struct statvfs fs;
    uint64_t used;

    if (!w->small.bytes || statvfs(w->plan.dir, &fs) < 0)
        return false;
    used = (fs.f_blocks - fs.f_bfree) * fs.f_frsize;
    return mount_sized(w, full ? used : w->small.bytes, MS_REMOUNT) == 0;
}
