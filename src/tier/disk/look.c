// SPDX-License-Identifier: Apache-2.0
/* Tell whose files a directory has, without opening a tier. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/beneath.h"
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

/* Look into the subdirectories that volumes make beside files of another fingerprint. Closes @at. */
static void look_below(int at, const char *file, const uint8_t sum[16], struct kvbm_disk_seen *ret)
{
    DIR *folder = fdopendir(at);
    const struct dirent *entry;

    if (!folder) {
        close(at);
        return;
    }
    while (!ret->ours && (entry = readdir(folder)) != NULL) {
        struct kvbm_disk_seen one;
        char path[640];

        if (strncmp(entry->d_name, "kvbm-", 5) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", entry->d_name, file);
        if (read_header(at, path, sum, &one) && (one.ours || !ret->found))
            *ret = one;
    }
    closedir(folder);
}

int kvbm_disk_look(const char *directory, const char *name, const char *fingerprint,
                   struct kvbm_disk_seen *ret)
{
    int at = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint8_t sum[16];
    char file[256];

    *ret = (struct kvbm_disk_seen){.found = false};
    if (at < 0)
        return -errno;
    snprintf(file, sizeof(file), "kvbm-%s.slots", name ? name : "cache");
    kvbm_disk_sum(fingerprint, strlen(fingerprint), sum);
    (void)read_header(at, file, sum, ret);
    if (ret->ours)
        close(at);
    else
        look_below(at, file, sum, ret);
    return 0;
}
