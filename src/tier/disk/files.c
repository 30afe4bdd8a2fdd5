// SPDX-License-Identifier: Apache-2.0
/*
 * How many files the slots of a directory lie in, and how these are written.
 *
 * The kernel lets one thread at a time write to a file. In the page cache, where writing is copying,
 * a directory of one file is therefore as slow as one thread. Each file has an index of its own: it
 * is a volume of the store. Files on a device with direct I/O or barriers stay one: more would only
 * mean more barriers.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <stdio.h>
#include <sys/vfs.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "tier/disk/impl.h"

#define EACH_AT_LEAST (UINT64_C(64) << 20) /* bytes of a file, unless its directory has one only */

/* True for files in memory: on tmpfs. */
static bool is_in_memory(int fd)
{
    struct statfs fs;

    return fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

void kvbm_disk_go_direct(struct kvbm_disk_volume *volume, bool buffered)
{
    int flags = fcntl(volume->slots_fd, F_GETFL);

    if (is_in_memory(volume->slots_fd)) /* direct I/O would only ask for whole pages */
        return;
    volume->direct =
        !buffered && flags >= 0 && fcntl(volume->slots_fd, F_SETFL, flags | O_DIRECT) == 0;
    volume->paged = !volume->direct;
    if (volume->paged && !buffered)
        kv_log_info("kvbm", "the file system has no direct I/O: through the page cache", "errno=%d",
                    errno);
}

int kvbm_disk_file_name(char *ret, size_t size, const char *name, uint32_t file, const char *kind)
{
    int len = file ? snprintf(ret, size, "kvbm-%s.%u.%s", name, file + 1, kind)
                   : snprintf(ret, size, "kvbm-%s.%s", name, kind);

    return len < 0 || (size_t)len >= size ? -ENAMETOOLONG : 0;
}

/* Count the files of this tier in a directory. *@most: files that it can have, where other models'
 * are in the way. */
static uint32_t count_in(const struct kvbm_disk_volume *first, const char *name, uint32_t *most)
{
    uint32_t n = first->fresh ? 0 : 1;

    for (uint32_t file = 1; file < KVBM_DISK_MAX_FILES; file++) {
        enum kvbm_disk_owner owner = kvbm_disk_files_owner(first, name, file);

        if (owner == KVBM_DISK_OTHERS) {
            *most = KV_MIN(*most, file);
            break;
        }
        if (owner == KVBM_DISK_OURS)
            n = file + 1;
    }
    return n;
}

/* True when the bytes of all directories are copied to the page cache, and nothing syncs them. */
static bool all_are_copied(const struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    bool paged = KV_OPT(opts, buffered, false) && KV_OPT(opts, volatile_, false), all = true;

    for (uint32_t i = 0; i < disk->n_directories; i++)
        all &= disk->volumes[i].missing || paged || is_in_memory(disk->volumes[i].slots_fd);
    return all;
}

static uint32_t fastest(const struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    uint64_t bytes = disk->n_slots / KV_MAX(disk->n_directories, 1u) * disk->stride;
    cpu_set_t set;
    uint32_t n = sched_getaffinity(0, sizeof(set), &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;

    if (!all_are_copied(disk, opts))
        return 1;
    n = KV_MIN(n, (uint32_t)KVBM_DISK_MAX_FILES);
    return (uint32_t)KV_MAX(UINT64_C(1), KV_MIN(bytes / EACH_AT_LEAST, (uint64_t)n));
}

uint32_t kvbm_disk_choose_files(const struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    const char *name = KV_OPT(opts, name, "cache");
    uint32_t there = 0, most = KVBM_DISK_MAX_FILES, wanted = KV_OPT(opts, n_files, 0);

    for (uint32_t i = 0; i < disk->n_directories; i++)
        if (!disk->volumes[i].missing)
            there = KV_MAX(there, count_in(&disk->volumes[i], name, &most));
    if (!there)
        there = wanted ? wanted : fastest(disk, opts);
    return KV_MIN(there, most);
}
