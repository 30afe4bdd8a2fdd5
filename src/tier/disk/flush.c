// SPDX-License-Identifier: Apache-2.0
/*
 * Early write-back of blocks in the page cache, for a store without barriers.
 *
 * Left alone, the kernel collects dirty pages for seconds and up to a fifth of the memory. Other
 * programs' syncs and reads of that device then wait behind them. So one request at a time writes a
 * volume's pages, from FLUSH_AT bytes on. New blocks wait while the store has more than max_dirty
 * bytes. No block is sure to survive a power cut.
 */
#include <errno.h>
#include <unistd.h>

#include "base/core/error.h"
#include "tier/disk/impl.h"

#define FLUSH_AT (UINT64_C(64) << 20)
#define MAX_DIRTY (UINT64_C(2) << 30)
enum { OF_MEMORY = 16 }; /* at most this part is dirty, too; the kernel begins at a tenth */

void kvbm_disk_flush_init(struct kvbm_disk *disk)
{
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    disk->max_dirty = KV_MIN(MAX_DIRTY, memory / OF_MEMORY);
    /* Writes wait only while a flush runs: dirty pages that none writes yet are at most half. */
    disk->flush_at = KV_MIN(FLUSH_AT, disk->max_dirty / (2 * disk->n_volumes));
}

/* Write the pages of a volume's slots, and count them as clean when that has ended. */
static void begin_flush(struct kvbm_disk *disk, struct kvbm_disk_volume *volume)
{
    volume->flushing = volume->dirty;
    volume->dirty = 0;
    volume->flush = (struct kvbm_aio_req){
        .op = KVBM_AIO_FLUSH, .fd = volume->slots_fd, .done = kvbm_disk_io_done, .arg = disk};
    kvbm_disk_hand_in(disk, &volume->flush);
}

void kvbm_disk_note_dirty(struct kvbm_disk *disk, struct kvbm_disk_volume *volume, uint64_t bytes)
{
    if (!disk->volatile_ || !volume->paged)
        return;
    disk->dirty += bytes;
    volume->dirty += bytes;
    if (volume->dirty >= disk->flush_at && !volume->flushing)
        begin_flush(disk, volume);
}

void kvbm_disk_flush_done(struct kvbm_disk *disk, struct kvbm_aio_req *req)
{
    struct kvbm_disk_volume *volume =
        (struct kvbm_disk_volume *)((char *)req - offsetof(struct kvbm_disk_volume, flush));

    if (req->status == -EIO) /* of blocks that have ended: reading them tells */
        kvbm_disk_judge(volume, req->status);
    disk->dirty -= volume->flushing;
    volume->flushing = 0;
    if (volume->dirty >= disk->flush_at)
        begin_flush(disk, volume);
}
