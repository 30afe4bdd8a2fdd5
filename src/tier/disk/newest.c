// SPDX-License-Identifier: Apache-2.0
/* Keep only the newest of several records of one key. An older one belongs to a slot that couldn't
 * be read, or was forgotten in memory only; then the key was stored again in another slot. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/core/xxh.h"
#include "tier/disk/impl.h"

/* Table of the newest slot of each key, with open addressing: 0 or 1 + a slot. */
struct seen {
    struct kvbm_disk *disk;
    uint32_t *slots;
    uint64_t mask;
    uint64_t n_older, n_kept; /* n_kept: older records that couldn't be removed from their file */
};

static bool entry_of(const struct kvbm_disk *disk, uint32_t slot, struct kvbm_disk_entry *ret)
{
    return kvbm_disk_record_of(disk, slot, kvbm_disk_record_at(disk, slot), ret);
}

/* Zero a record, in the index file too. No barrier: if a power cut restores the record, it is still
 * the older one. A removal of the key writes it again, durably: the slot's record is unknown. */
static void drop(struct seen *seen, uint32_t slot)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(seen->disk, slot);
    uint32_t bytes = volume->header.record_bytes;
    uint8_t *record = kvbm_disk_record_at(seen->disk, slot);

    memset(record, 0, bytes);
    *kvbm_disk_unknown_at(seen->disk, slot) = 1;
    seen->n_older++;
    if (pwrite(volume->index_fd, record, bytes,
               (off_t)(KVBM_DISK_PAGE + (uint64_t)(record - volume->image))) != (ssize_t)bytes)
        seen->n_kept++;
}

static void add(struct seen *seen, uint32_t slot, const struct kvbm_disk_entry *entry)
{
    uint32_t key_len = seen->disk->volumes[0].header.key_len;
    uint64_t at = kv_xxh64(entry->key, key_len, entry->group);
    struct kvbm_disk_entry other;

    for (; seen->slots[at & seen->mask]; at++) {
        uint32_t there = seen->slots[at & seen->mask] - 1;

        if (!entry_of(seen->disk, there, &other) || other.group != entry->group ||
            memcmp(other.key, entry->key, key_len) != 0)
            continue;
        if (other.commit > entry->commit) {
            drop(seen, slot);
            return;
        }
        drop(seen, there);
        break;
    }
    seen->slots[at & seen->mask] = slot + 1;
}

int kvbm_disk_keep_newest(struct kvbm_disk *disk)
{
    struct seen seen = {.disk = disk, .mask = 1};
    struct kvbm_disk_entry entry;

    while (seen.mask < (uint64_t)disk->n_slots * 2)
        seen.mask *= 2;
    seen.slots = calloc(seen.mask, sizeof(seen.slots[0]));
    if (!seen.slots)
        return -ENOMEM;
    seen.mask--;
    for (uint32_t slot = 0; slot < disk->n_slots; slot++)
        if (entry_of(disk, slot, &entry))
            add(&seen, slot, &entry);
    free(seen.slots);
    if (seen.n_older)
        kv_log_info("kvbm", "older records of a disk tier's blocks were dropped",
                    "records=%" PRIu64 " not_written=%" PRIu64, seen.n_older, seen.n_kept);
    return 0;
}
