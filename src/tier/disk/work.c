// SPDX-License-Identifier: Apache-2.0
/*
 * Work of the disk store's thread.
 *
 *   read    bytes ─► verified ─► done
 *             └► damaged: as forget, then done
 *   write   [old record zeroed ─►] bytes ─► written ─┐ commit of a volume, for all written blocks
 *   forget  record zeroed ─────────────────► written ─┘ (commit.c)
 *
 * An old record is zeroed before its slot's bytes change, without a barrier of its own. After
 * SIGKILL the record is zero. After a power cut the old record may be back, over bytes that don't
 * verify, which is a miss.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "tier/disk/impl.h"

enum {
    DOWN_AFTER = 8, /* errors in a row that take a volume out of use */
    AHEAD = 4       /* ops begun beyond the executor's depth: depth / AHEAD */
};

/* Judge a volume by the result of an operation: count failures, take it out of use after too
 * many. */
void kvbm_disk_judge(struct kvbm_disk_volume *volume, int status)
{
    static struct kv_log_rate rate;

    if (status == 0) {
        volume->errors = 0;
        return;
    }
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a disk tier's block failed", "volume=%u errno=%d", volume->number,
                    -status);
    if (status == -ENOSPC || status == -EDQUOT || status == -EFBIG || status == -ENOMEM)
        return; /* the error isn't the device's */
    if (++volume->errors >= DOWN_AFTER &&
        !atomic_load_explicit(&volume->down, memory_order_relaxed)) {
        atomic_store_explicit(&volume->down, true, memory_order_relaxed);
        kv_log_error("kvbm", "a disk tier's volume fails: unused until the tier is reopened",
                     "volume=%u errno=%d", volume->number, -status);
    }
}

static uint64_t slot_offset(const struct kvbm_disk *disk, uint32_t slot)
{
    return KVBM_DISK_PAGE + slot / disk->n_volumes * disk->stride;
}

/* Zero a slot's record in memory. The file's is unknown until a commit has the slot. */
void kvbm_disk_zero_record(struct kvbm_disk *disk, uint32_t slot)
{
    pthread_mutex_lock(&disk->image_lock);
    memset(kvbm_disk_record_at(disk, slot), 0,
           kvbm_disk_volume_of(disk, slot)->header.record_bytes);
    *kvbm_disk_unknown_at(disk, slot) = 1;
    pthread_mutex_unlock(&disk->image_lock);
}

/* Note that memory and file hold the same record of a slot. */
static void know_record(struct kvbm_disk *disk, uint32_t slot)
{
    pthread_mutex_lock(&disk->image_lock);
    *kvbm_disk_unknown_at(disk, slot) = 0;
    pthread_mutex_unlock(&disk->image_lock);
}

/* Write op->record to the index, then step. */
void kvbm_disk_write_record(struct kvbm_disk *disk, struct kvbm_disk_op *op,
                            void (*step)(struct kvbm_disk *disk, struct kvbm_disk_op *op))
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    uint32_t bytes = volume->header.record_bytes;

    op->step = step;
    op->req = (struct kvbm_aio_req){.op = KVBM_AIO_WRITE,
                                    .urgent = true, /* a small write that many blocks wait for */
                                    .fd = volume->index_fd,
                                    .data = op->record,
                                    .len = bytes,
                                    .offset = KVBM_DISK_PAGE +
                                              (uint64_t)(op->io->slot / disk->n_volumes) * bytes,
                                    .done = kvbm_disk_io_done,
                                    .arg = disk};
    kvbm_disk_hand_in(disk, &op->req);
}

/* Read or write a block's bytes, through a buffer where direct I/O can't use the caller's
 * memory. */
static int transfer(struct kvbm_disk *disk, struct kvbm_disk_op *op, enum kvbm_aio_op kind,
                    void (*step)(struct kvbm_disk *disk, struct kvbm_disk_op *op))
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    uint64_t len = op->io->len;

    if (volume->direct && (((uintptr_t)op->io->data | len) % KVBM_DISK_PAGE)) {
        len = (len + KVBM_DISK_PAGE - 1) / KVBM_DISK_PAGE * KVBM_DISK_PAGE;
        if (posix_memalign(&op->bounce, KVBM_DISK_PAGE, len) != 0)
            return -ENOMEM;
        if (kind == KVBM_AIO_WRITE) {
            memcpy(op->bounce, op->io->data, op->io->len);
            memset((char *)op->bounce + op->io->len, 0, len - op->io->len);
        }
    }
    op->step = step;
    op->req = (struct kvbm_aio_req){.op = kind,
                                    .urgent = op->work->batch->flow == KVBM_ONBOARD,
                                    .fd = volume->slots_fd,
                                    .data = op->bounce ? op->bounce : op->io->data,
                                    .len = len,
                                    .offset = slot_offset(disk, op->io->slot),
                                    .sum = kind == KVBM_AIO_WRITE ? op->sum : op->got,
                                    .sum_len = op->io->len,
                                    .cached = !volume->direct,
                                    .done = kvbm_disk_io_done,
                                    .arg = disk};
    kvbm_disk_hand_in(disk, &op->req);
    return 0;
}

/* ---- reads ---- */

static void invalidated(struct kvbm_disk *disk, struct kvbm_disk_op *op);

/* Remove the record of a slot whose bytes don't verify. Do it durably and before the reader gets
 * its result, so that a restart doesn't find the record. Returns false when the record has changed
 * since the read began, or another operation works on it. */
static bool forget_bad(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    uint8_t *busy = &volume->busy[op->io->slot / disk->n_volumes];
    struct kvbm_disk_entry entry;

    if (*busy ||
        !kvbm_disk_record_of(disk, op->io->slot, kvbm_disk_record_at(disk, op->io->slot), &entry) ||
        memcmp(entry.sum, op->sum, sizeof(op->sum)) != 0)
        return false;
    *busy = 1;
    disk->n_writing++;
    volume->n_writing++;
    op->lost_before = volume->n_lost;
    op->work->n_unwritten++; /* alone in its batch: the commit begins at once */
    kvbm_disk_zero_record(disk, op->io->slot);
    memset(op->record, 0, disk->record_bytes);
    kvbm_disk_write_record(disk, op, invalidated);
    return true;
}

static void read_done(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    const void *data = op->bounce ? op->bounce : op->io->data;
    int status = op->req.status;

    disk->n_reading--;
    if (op->req.ended) /* another program has cut the file; the device is fine */
        status = -EBADMSG;
    else
        kvbm_disk_judge(kvbm_disk_volume_of(disk, op->io->slot), status);
    if (status == 0) {
        if (disk->sums)
            kvbm_disk_sum(data, op->io->len, op->got);
        if (memcmp(op->got, op->sum, sizeof(op->got)) != 0)
            status = -EBADMSG;
    }
    if (status == 0 && op->bounce)
        memcpy(op->io->data, op->bounce, op->io->len);
    if (status == -EBADMSG && forget_bad(disk, op))
        return;
    kvbm_disk_finish(disk, op, status);
}

static int begin_read(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    const struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    struct kvbm_disk_entry entry;

    if (!kvbm_disk_record_of(disk, op->io->slot, kvbm_disk_record_at(disk, op->io->slot), &entry) ||
        entry.group != op->io->group || memcmp(entry.key, op->io->key, volume->header.key_len) != 0)
        return -ENOENT;
    if (entry.len != op->io->len)
        return -EBADMSG;
    memcpy(op->sum, entry.sum, sizeof(op->sum));
    return transfer(disk, op, KVBM_AIO_READ, read_done);
}

/* ---- writes and forgets ---- */

/* Count a written operation of its batch. The last one makes the volumes commit. */
static void count_written(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    kvbm_disk_volume_of(disk, op->io->slot)->n_writing--;
    if (--op->work->n_unwritten)
        return;
    for (uint32_t i = 0; i < disk->n_volumes; i++)
        disk->volumes[i].commit_wanted |= disk->volumes[i].written.n > 0;
}

/* Queue the operations that wait for slots once more. */
static void unblock(struct kvbm_disk *disk)
{
    struct kvbm_disk_op *op;

    if (!disk->blocked.n)
        return;
    while ((op = kvbm_disk_shift(&disk->blocked)))
        kvbm_disk_push(&disk->writes[op->work->batch->flow == KVBM_ONBOARD], op);
    pthread_mutex_lock(&disk->lock);
    disk->sweep = true; /* the thread looks at them again before it waits */
    pthread_mutex_unlock(&disk->lock);
}

void kvbm_disk_end_write(struct kvbm_disk *disk, struct kvbm_disk_op *op, int status)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);

    volume->busy[op->io->slot / disk->n_volumes] = 0;
    if (status == 0)
        know_record(disk, op->io->slot);
    unblock(disk);
    kvbm_disk_finish(disk, op, op->work->kind == KVBM_DISK_READ ? -EBADMSG : status);
}

static void written(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    int status = op->req.status;

    disk->n_writing--;
    if (status < 0 && !kvbm_disk_is_retry(op)) /* a retry says nothing new of the volume */
        kvbm_disk_judge(volume, status);
    if (status == 0 && op->lost_before != volume->n_lost) /* see commit.c */
        status = -EIO;
    if (status == 0)
        kvbm_disk_push(&volume->written, op);
    if (status == 0 && kvbm_disk_is_write(op))
        kvbm_disk_note_dirty(disk, volume, op->io->len);
    count_written(disk, op);
    if (status < 0)
        kvbm_disk_end_write(disk, op, status);
}

static void invalidated(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    int status = op->req.status;

    if (status < 0 || !kvbm_disk_is_write(op)) {
        written(disk, op);
        return;
    }
    status = transfer(disk, op, KVBM_AIO_WRITE, written);
    if (status < 0) {
        op->req.status = status;
        written(disk, op);
        return;
    }
    if (disk->sums)
        kvbm_disk_push(&disk->to_sum, op);
}

/* Begin a write or a forget: zero the slot's record, in the file too if it may have one there.
 * -EBUSY: another operation works on the slot. -ENOENT: the record to forget isn't there any
 * more. */
static int begin_write(struct kvbm_disk *disk, struct kvbm_disk_op *op)
{
    struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, op->io->slot);
    uint8_t *busy = &volume->busy[op->io->slot / disk->n_volumes];
    struct kvbm_disk_entry entry;
    bool there =
        kvbm_disk_record_of(disk, op->io->slot, kvbm_disk_record_at(disk, op->io->slot), &entry);
    bool unknown = *kvbm_disk_unknown_at(disk, op->io->slot);

    if (*busy)
        return -EBUSY;
    if (kvbm_disk_is_write(op) && !kvbm_disk_is_backed(disk, op->io->slot))
        return -ENOSPC;
    if (!kvbm_disk_is_write(op) && op->io->commit_ && !unknown &&
        (!there || entry.commit != op->io->commit_))
        return -ENOENT;
    *busy = 1;
    disk->n_writing++;
    volume->n_writing++;
    op->lost_before = volume->n_lost;
    if (there || unknown || !kvbm_disk_is_write(op)) {
        kvbm_disk_zero_record(disk, op->io->slot);
        memset(op->record, 0, disk->record_bytes);
        kvbm_disk_write_record(disk, op, invalidated);
    } else {
        op->req.status = 0;
        invalidated(disk, op);
    }
    return 0;
}

/* Compute the checksums of blocks while the device writes them. */
void kvbm_disk_sums(struct kvbm_disk *disk)
{
    struct kvbm_disk_op *op;

    while ((op = kvbm_disk_shift(&disk->to_sum)))
        kvbm_disk_sum(op->io->data, op->io->len, op->sum);
}

/* ---- scheduling ---- */

/* Return the error that keeps an operation from beginning, or 0. */
static int why_not(const struct kvbm_disk *disk, const struct kvbm_disk_op *op, uint64_t now)
{
    const struct kvbm_disk_work *work = op->work;

    if (atomic_load_explicit(&work->cancelled, memory_order_relaxed))
        return -ECANCELED;
    if (work->deadline_ns && now >= work->deadline_ns)
        return -ETIMEDOUT;
    return atomic_load_explicit(&kvbm_disk_volume_of(disk, op->io->slot)->down,
                                memory_order_relaxed)
               ? -EIO
               : 0;
}

/* End an operation that hasn't begun. */
static void leave_out(struct kvbm_disk *disk, struct kvbm_disk_op *op, int status)
{
    if (op->work->kind != KVBM_DISK_READ) {
        kvbm_disk_volume_of(disk, op->io->slot)->n_writing++;
        count_written(disk, op);
    }
    kvbm_disk_finish(disk, op, status);
}

/* Begin a few operations more than the executor gives to the device. When one ends, the executor
 * has the next at hand, and the device needn't wait for this thread to wake. */
static void begin_some(struct kvbm_disk *disk, struct kvbm_disk_list lists[2],
                       const uint32_t *running, uint64_t now)
{
    uint32_t most = disk->depth + disk->depth / AHEAD + 1;

    for (int flow = KVBM_ONBOARD; flow >= KVBM_OFFLOAD; flow--) {
        while (*running < most && lists[flow].first &&
               !(lists == disk->writes && kvbm_disk_is_dirty(disk))) {
            struct kvbm_disk_op *op = kvbm_disk_shift(&lists[flow]);
            int status = why_not(disk, op, now);

            if (status == 0 && op->work->kind == KVBM_DISK_READ) {
                status = begin_read(disk, op);
                disk->n_reading += status == 0;
            } else if (status == 0) {
                status = begin_write(disk, op);
                if (status == -EBUSY) {
                    kvbm_disk_push(&disk->blocked, op);
                    continue;
                }
                status = status == -ENOENT ? 1 : status;
            }
            if (status)
                leave_out(disk, op, KV_MIN(status, 0));
        }
    }
}

void kvbm_disk_begin(struct kvbm_disk *disk)
{
    uint64_t now = kv_now_ns();

    begin_some(disk, disk->reads, &disk->n_reading, now);
    begin_some(disk, disk->writes, &disk->n_writing, now);
}

/* End the queued operations that are cancelled, late, or on a volume out of use. */
void kvbm_disk_sweep(struct kvbm_disk *disk)
{
    struct kvbm_disk_list *lists[] = {&disk->reads[0], &disk->reads[1], &disk->writes[0],
                                      &disk->writes[1]};
    uint64_t now = kv_now_ns();

    disk->deadlines = false;
    for (size_t i = 0; i < KV_COUNT(lists); i++) {
        struct kvbm_disk_list list = *lists[i];
        struct kvbm_disk_op *op;

        *lists[i] = (struct kvbm_disk_list){0};
        while ((op = kvbm_disk_shift(&list))) {
            int status = why_not(disk, op, now);

            if (status < 0) {
                leave_out(disk, op, status);
                continue;
            }
            disk->deadlines |= op->work->deadline_ns != 0;
            kvbm_disk_push(lists[i], op);
        }
    }
}
