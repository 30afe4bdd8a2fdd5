// SPDX-License-Identifier: Apache-2.0
/* Tell whose files a directory has, without opening a tier. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file/beneath.h"
#include "tier/disk/impl.h"

/* Read the header of @path in @at. Returns false when it is no slots file of a disk tier. */
static bool read_header(int at, const char *path, const uint8_t sum[16], struct kvbm_disk_seen *ret)
{
    struct kvbm_disk_header header;
    uint8_t page[KVBM_DISK_PAGE];
    uint64_t stride;
    struct stat st;
    int fd = kv_beneath_file(at, path, O_RDONLY, 0, 0, &st);
    bool is_tier;

    if (fd < 0)
        return false;
    is_tier = kvbm_disk_read_all(fd, page, sizeof(page), 0) == (long)sizeof(page) &&
              kvbm_disk_header_read(page, KVBM_DISK_SLOTS, &header) == 0 && header.slot_bytes;
    close(fd);
    if (!is_tier)
        return false;
    stride = (header.slot_bytes + KVBM_DISK_PAGE - 1) / KVBM_DISK_PAGE * KVBM_DISK_PAGE;
    *ret = (struct kvbm_disk_seen){
        .found = true,
        .ours = memcmp(header.fingerprint, sum, sizeof(header.fingerprint)) == 0,
        .key_len = header.key_len,
        .n_slots = (uint32_t)(((uint64_t)st.st_size - KVBM_DISK_PAGE) / stride),
        .slot_bytes = header.slot_bytes};
    return true;
}

/* Read the headers of a directory's files. @below: its path in @at, with a slash, or "". Returns false
 * when there is no slots file of a disk tier. */
static bool read_headers(int at, const char *below, const char *name, const uint8_t sum[16],
                         struct kvbm_disk_seen *ret)
{
    struct kvbm_disk_seen more;
    char path[640], file[300];

    for (uint32_t i = 0; i < KVBM_DISK_MAX_FILES; i++) {
        if (kvbm_disk_file_name(file, sizeof(file), name, i, "slots") < 0)
            return false;
        snprintf(path, sizeof(path), "%s%s", below, file);
        if (!read_header(at, path, sum, i ? &more : ret)) {
            if (i == 0)
                return false;
        } else if (i && more.ours == ret->ours && more.slot_bytes == ret->slot_bytes) {
            ret->n_slots += more.n_slots;
        }
    }
    return true;
}

/* Look into the subdirectories that volumes make beside files of another fingerprint. Closes @at. */
static void look_below(int at, const char *name, const uint8_t sum[16], struct kvbm_disk_seen *ret)
{
    DIR *folder = fdopendir(at);
    const struct dirent *entry;

    if (!folder) {
        close(at);
        return;
    }
    while (!ret->ours && (entry = readdir(folder)) != NULL) {
        struct kvbm_disk_seen one;
        char below[300];

        if (strncmp(entry->d_name, "kvbm-", 5) != 0)
            continue;
        snprintf(below, sizeof(below), "%s/", entry->d_name);
        if (read_headers(at, below, name, sum, &one) && (one.ours || !ret->found))
            *ret = one;
    }
    closedir(folder);
}

int kvbm_disk_look(const char *directory, const char *name, const char *fingerprint,
                   struct kvbm_disk_seen *ret)
{
    int at = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint8_t sum[16];

    name = name ? name : "cache";
    *ret = (struct kvbm_disk_seen){.found = false};
    if (at < 0)
        return -errno;
    kvbm_disk_sum(fingerprint, strlen(fingerprint), sum);
    (void)read_headers(at, "", name, sum, ret);
    if (ret->ours)
        close(at);
    else
        look_below(at, name, sum, ret);
    return 0;
}
