// SPDX-License-Identifier: Apache-2.0
/*
 * Commits of the disk store's thread: what makes written blocks durable, and known.
 *
 *   written blocks of a volume ─► barrier(slots) ─► records ─► barrier(index) ─► done
 *
 * A volume has one commit at a time; while it runs, bytes of the next one are written. A commit
 * begins when a batch is completely written (a caller waits for it), when no write runs, or when
 * many written blocks wait.
 */
#include <string.h>

#include "base/core/error.h"
#include "tier/disk/impl.h"

enum { COMMIT_AT = 256 }; /* written blocks that start a commit */

static bool only_retries(const struct kvbm_disk_list *list)
{
    const struct kvbm_disk_op *op = list->first;

    while (op && kvbm_disk_is_retry(op))
        op = op->next;
    return list->first && !op;
}

static void commit_ended(struct kvbm_disk *disk, struct kvbm_disk_volume *volume, int status)
{
    struct kvbm_disk_list list = volume->committing;
    struct kvbm_disk_op *op;

    volume->committing = (struct kvbm_disk_list){0};
    volume->commit_running = false;
    if (status == 0 || !only_retries(&list))
        kvbm_disk_judge(volume, status);
    /* After a failed barrier the kernel may have dropped what was written before it, and the next
     * barrier succeeds nevertheless. All operations that began before the failure fail, too. */
    volume->n_lost += status < 0;
    while (status < 0 && (op = kvbm_disk_shift(&volume->written)))
        kvbm_disk_push(&list, op);
    while ((op = kvbm_disk_shift(&list))) {
        if (status < 0) /* the bytes on the disk are unknown: drop the block's record in memory */
            kvbm_disk_zero_record(disk, op->io->slot);
        kvbm_disk_end_write(disk, op, status);
    }
}

static void barrier(struct kvbm_disk *disk, struct kvbm_disk_volume *volume, int fd)
{
    volume->barrier = (struct kvbm_aio_req){
        .op = KVBM_AIO_SYNC, .fd = fd, .done = kvbm_disk_io_done, .arg = disk};
    kvbm_disk_hand_in(disk, &volume->barrier);
}

/* Go on when all records of a commit are written to the index file: sync it, or end the commit. */
static void records_written(struct kvbm_disk *disk, struct kvbm_disk_volume *volume)
{
    if (disk->volatile_ || !volume->committing.n)
        commit_ended(disk, volume, 0);
    else
        barrier(disk, volume, volume->index_fd);
}

static void record_written(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);

    if (op->req.status == 0) {
        kvbm_disk_push(&volume->committing, op);
    } else {
        kvbm_disk_judge(volume, op->req.status);
        kvbm_disk_zero_record(disk, op->io->slot);
        kvbm_disk_end_write(disk, op, op->req.status);
    }
    if (--volume->n_records == 0)
        records_written(disk, volume);
}

/* Write the records of a commit, whose blocks are durable. */
static void write_records(struct kvbm_disk *disk, struct kvbm_disk_volume *volume)
{
    struct kvbm_disk_list list = volume->committing;
    struct kvbm_disk_op *op;

    volume->committing = (struct kvbm_disk_list){0};
    volume->n_records = 1; /* until all are handed in */
    disk->commit++;
    while ((op = kvbm_disk_shift(&list))) {
        struct kvbm_disk_entry entry;

        if (!kvbm_disk_is_write(op)) {
            kvbm_disk_push(&volume->committing, op);
            continue;
        }
        entry = (struct kvbm_disk_entry){
            .commit = disk->commit,
            .len = op->io->len,
            .position = op->io->position,
            .group = op->io->group,
            .has_parent = op->io->parent != NULL,
            .key = op->io->key,
            .parent = op->io->parent,
            .tokens = kvbm_disk_keeps_tokens(disk, volume) ? op->io->tokens : NULL};
        memcpy(entry.sum, op->sum, sizeof(entry.sum));
        kvbm_disk_record_write(&volume->header, op->io->slot / disk->n_volumes, &entry, op->record);
        pthread_mutex_lock(&disk->image_lock);
        memcpy(kvbm_disk_record_at(disk, op->io->slot), op->record, volume->header.record_bytes);
        pthread_mutex_unlock(&disk->image_lock);
        volume->n_records++;
        kvbm_disk_write_record(disk, op, record_written);
    }
    if (--volume->n_records == 0)
        records_written(disk, volume);
}

void kvbm_disk_barrier_done(struct kvbm_disk *disk, struct kvbm_aio_req *req)
{
    struct kvbm_disk_volume *volume =
        (struct kvbm_disk_volume *)((char *)req - offsetof(struct kvbm_disk_volume, barrier));

    if (req->status < 0 || req->fd == volume->index_fd)
        commit_ended(disk, volume, req->status);
    else
        write_records(disk, volume);
}

static void begin_commit(struct kvbm_disk *disk, struct kvbm_disk_volume *volume)
{
    bool bytes = false;

    volume->committing = volume->written;
    volume->written = (struct kvbm_disk_list){0};
    volume->commit_running = true;
    volume->commit_wanted = false;
    for (const struct kvbm_disk_op *op = volume->committing.first; op && !bytes; op = op->next)
        bytes = kvbm_disk_is_write(op);
    if (bytes && !disk->volatile_)
        barrier(disk, volume, volume->slots_fd);
    else
        write_records(disk, volume);
}

void kvbm_disk_commits(struct kvbm_disk *disk)
{
    for (uint32_t i = 0; i < disk->n_volumes; i++) {
        struct kvbm_disk_volume *volume = &disk->volumes[i];

        if (volume->written.n && !volume->commit_running &&
            (volume->commit_wanted || !volume->n_writing || volume->written.n >= COMMIT_AT))
            begin_commit(disk, volume);
    }
}
