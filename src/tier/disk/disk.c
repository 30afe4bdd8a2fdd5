// SPDX-License-Identifier: Apache-2.0
/* The disk tier's store: one thread that receives batches and completed requests and owns the state
 * of all running operations. work.c moves the bytes; volume.c and format.c handle the files. */
#include "tier/disk/disk.h"

#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tier/disk/impl.h"

enum {
    MAX_BLOCKS = 65536, /* blocks waiting and running, in all batches */
    LOOK_AT_DEADLINES_MS = 20
};

/* ---- lists ---- */

void kvbm_disk_push(struct kvbm_disk_list *list, struct kvbm_disk_op *op)
{
    op->next = NULL;
    if (list->last)
        list->last->next = op;
    else
        list->first = op;
    list->last = op;
    list->n++;
}

struct kvbm_disk_op *kvbm_disk_shift(struct kvbm_disk_list *list)
{
    struct kvbm_disk_op *op = list->first;

    if (op) {
        list->first = op->next;
        if (!list->first)
            list->last = NULL;
        list->n--;
        op->next = NULL;
    }
    return op;
}

/* Insert @op behind the last op of equal or higher priority. @hint: an op of the same batch that
 * was just inserted, where the search may begin; NULL: search from the first. */
static void push_in_order(struct kvbm_disk_list *list, struct kvbm_disk_op *op,
                          struct kvbm_disk_op *hint)
{
    int32_t priority = op->work->batch->priority;
    struct kvbm_disk_op **at = hint ? &hint->next : &list->first;

    if (list->last && list->last->work->batch->priority >= priority)
        at = &list->last->next;
    while (*at && (*at)->work->batch->priority >= priority)
        at = &(*at)->next;
    op->next = *at;
    *at = op;
    if (!op->next)
        list->last = op;
    list->n++;
}

static void append(struct kvbm_disk_list *list, struct kvbm_disk_list *more)
{
    if (!more->first)
        return;
    if (list->last)
        list->last->next = more->first;
    else
        list->first = more->first;
    list->last = more->last;
    list->n += more->n;
    *more = (struct kvbm_disk_list){0};
}

/* ---- requests ---- */

void kvbm_disk_io_done(struct kvbm_aio_req *req)
{
    struct kvbm_disk *disk = req->arg;

    pthread_mutex_lock(&disk->lock);
    req->next = disk->ended;
    disk->ended = req;
    if (!req->next)
        pthread_cond_signal(&disk->wake);
    pthread_mutex_unlock(&disk->lock);
}

void kvbm_disk_hand_in(struct kvbm_disk *disk, struct kvbm_aio_req *req)
{
    req->next = disk->submits;
    disk->submits = req;
}

static struct kvbm_aio_req *reversed(struct kvbm_aio_req *list)
{
    struct kvbm_aio_req *ret = NULL;

    while (list) {
        struct kvbm_aio_req *next = list->next;

        list->next = ret;
        ret = list;
        list = next;
    }
    return ret;
}

/* ---- ends ---- */

static void count_op(struct kvbm_disk *disk, const struct kvbm_disk_op *op, int status)
{
    struct kvbm_disk_stats *stats = &disk->stats;

    disk->n_blocks--;
    if (status == -EBADMSG)
        stats->bad++;
    else if (status < 0 && status != -ENOENT && status != -ECANCELED)
        stats->failed++;
    if (status < 0 || op->work->kind == KVBM_DISK_FORGET)
        return;
    if (op->work->kind == KVBM_DISK_WRITE) {
        stats->writes++;
        stats->bytes_written += op->io->len;
    } else {
        stats->reads++;
        stats->bytes_read += op->io->len;
    }
}

/* A forget request, on the caller's stack. */
struct forget {
    struct kvbm_disk_batch batch;
    sem_t sem;
    struct kvbm_disk_io ios[];
};

void kvbm_disk_finish(struct kvbm_disk *disk, struct kvbm_disk_op *op, int status)
{
    struct kvbm_disk_work *work = op->work;
    struct kvbm_disk_batch *batch = work->batch;
    bool last;

    op->io->status = status;
    free(op->bounce);
    op->bounce = NULL;
    pthread_mutex_lock(&disk->lock);
    count_op(disk, op, status);
    last = --work->n_left == 0;
    if (last) {
        if (work->prev)
            work->prev->next = work->next;
        else
            disk->works = work->next;
        if (work->next)
            work->next->prev = work->prev;
        disk->stats.queued--;
    }
    pthread_mutex_unlock(&disk->lock);
    if (last) {
        free(work);
        batch->done(batch);
    }
}

/* ---- the thread ---- */

/* Wait for work. Returns false when the store is closing and all work is done. */
static bool wait_for_work(struct kvbm_disk *disk, struct kvbm_disk_list *arrived,
                          struct kvbm_aio_req **ended, bool *sweep)
{
    uint64_t until_ns;

    pthread_mutex_lock(&disk->lock);
    while (!disk->arrived.first && !disk->ended && !disk->sweep && !(disk->stop && !disk->works)) {
        if (!disk->deadlines) {
            pthread_cond_wait(&disk->wake, &disk->lock);
            continue;
        }
        until_ns = kv_now_ns() + LOOK_AT_DEADLINES_MS * KV_NS_PER_MS;
        if (kv_cond_wait_until(&disk->wake, &disk->lock, until_ns) == -ETIMEDOUT)
            disk->sweep = true;
    }
    *arrived = disk->arrived;
    disk->arrived = (struct kvbm_disk_list){0};
    *ended = disk->ended;
    disk->ended = NULL;
    *sweep = disk->sweep;
    disk->sweep = false;
    pthread_mutex_unlock(&disk->lock);
    return arrived->first || *ended || *sweep;
}

/* True for requests of a volume: a barrier or a flush. */
static bool is_of_volume(const struct kvbm_disk *disk, const struct kvbm_aio_req *req)
{
    const char *at = (const char *)req;

    return at >= (const char *)disk->volumes &&
           at < (const char *)(disk->volumes + disk->n_volumes);
}

static void take_ended(struct kvbm_disk *disk, struct kvbm_aio_req *ended)
{
    for (ended = reversed(ended); ended;) {
        struct kvbm_aio_req *req = ended;

        ended = req->next;
        if (is_of_volume(disk, req)) {
            pthread_mutex_lock(&disk->lock);
            disk->stats.barriers += req->op == KVBM_AIO_SYNC;
            pthread_mutex_unlock(&disk->lock);
            if (req->op == KVBM_AIO_FLUSH)
                kvbm_disk_flush_done(disk, req);
            else
                kvbm_disk_barrier_done(disk, req);
        } else {
            struct kvbm_disk_op *op =
                (struct kvbm_disk_op *)((char *)req - offsetof(struct kvbm_disk_op, req));

            op->step(disk, op);
        }
    }
}

static void take_arrived(struct kvbm_disk *disk, struct kvbm_disk_list *arrived)
{
    struct kvbm_disk_op *op, *last = NULL;

    while ((op = kvbm_disk_shift(arrived))) {
        bool reads = op->work->kind == KVBM_DISK_READ;
        struct kvbm_disk_list *list =
            &(reads ? disk->reads : disk->writes)[op->work->batch->flow == KVBM_ONBOARD];

        disk->deadlines |= op->work->deadline_ns != 0;
        if (reads)
            push_in_order(list, op, last && last->work == op->work ? last : NULL);
        else
            kvbm_disk_push(list, op);
        last = op;
    }
}

void *kvbm_disk_run(void *arg)
{
    struct kvbm_disk *disk = arg;
    struct kvbm_disk_list arrived;
    struct kvbm_aio_req *ended, *submits;
    bool sweep;

    while (wait_for_work(disk, &arrived, &ended, &sweep)) {
        take_arrived(disk, &arrived);
        take_ended(disk, ended);
        if (sweep)
            kvbm_disk_sweep(disk);
        kvbm_disk_begin(disk);
        kvbm_disk_commits(disk);
        submits = reversed(disk->submits);
        disk->submits = NULL;
        kvbm_aio_submit(disk->aio, submits);
        kvbm_disk_sums(disk);
    }
    return NULL;
}

/* ---- batches ---- */

static int check_batch(const struct kvbm_disk *disk, const struct kvbm_disk_batch *batch)
{
    if (!batch->done || !batch->n || !batch->ios || batch->flow > KVBM_ONBOARD)
        return -EINVAL;
    for (uint32_t i = 0; i < batch->n; i++) {
        const struct kvbm_disk_io *io = &batch->ios[i];

        if (io->slot >= disk->n_slots || io->group >= KVBM_MAX_GROUPS || !io->key || !io->data ||
            !io->len || io->len > disk->volumes[0].header.slot_bytes)
            return -EINVAL;
    }
    return 0;
}

static int submit(struct kvbm_disk *disk, struct kvbm_disk_batch *batch, enum kvbm_disk_kind kind)
{
    size_t each = sizeof(((struct kvbm_disk_work *)0)->ops[0]) + disk->record_bytes;
    struct kvbm_disk_work *work = calloc(1, sizeof(*work) + batch->n * each);
    struct kvbm_disk_list list = {0};
    int err = 0;

    if (!work)
        return -ENOMEM;
    work->batch = batch;
    work->kind = kind;
    work->deadline_ns = batch->deadline_ns;
    work->n_left = batch->n;
    work->n_unwritten = kind == KVBM_DISK_READ ? 0 : batch->n;
    for (uint32_t i = 0; i < batch->n; i++) {
        work->ops[i].work = work;
        work->ops[i].io = &batch->ios[i];
        work->ops[i].record = (uint8_t *)&work->ops[batch->n] + (size_t)i * disk->record_bytes;
        kvbm_disk_push(&list, &work->ops[i]);
    }
    pthread_mutex_lock(&disk->lock);
    if (disk->stop)
        err = -ESHUTDOWN;
    else if (disk->n_blocks && disk->n_blocks + batch->n > MAX_BLOCKS)
        err = -EAGAIN;
    if (err == 0) {
        work->next = disk->works;
        if (work->next)
            work->next->prev = work;
        disk->works = work;
        disk->n_blocks += batch->n;
        disk->stats.queued++;
        append(&disk->arrived, &list);
        pthread_cond_signal(&disk->wake);
    }
    pthread_mutex_unlock(&disk->lock);
    if (err < 0)
        free(work);
    return err;
}

int kvbm_disk_submit(struct kvbm_disk *disk, struct kvbm_disk_batch *batch)
{
    int err;

    if (getpid() != disk->process)
        return -ESHUTDOWN;
    err = check_batch(disk, batch);
    return err < 0 ? err : submit(disk, batch, batch->write ? KVBM_DISK_WRITE : KVBM_DISK_READ);
}

void kvbm_disk_cancel(struct kvbm_disk *disk, struct kvbm_disk_batch *batch)
{
    if (getpid() != disk->process)
        return;
    pthread_mutex_lock(&disk->lock);
    for (struct kvbm_disk_work *at = disk->works; at; at = at->next) {
        if (at->batch != batch)
            continue;
        atomic_store_explicit(&at->cancelled, true, memory_order_relaxed);
        disk->sweep = true;
        pthread_cond_signal(&disk->wake);
        break;
    }
    pthread_mutex_unlock(&disk->lock);
}

static void forgotten(struct kvbm_disk_batch *batch)
{
    sem_post(&((struct forget *)batch)->sem);
}

int kvbm_disk_forget(struct kvbm_disk *disk, const uint32_t *slots, const uint64_t *commits,
                     size_t n)
{
    struct forget *forget;
    int err;

    if (getpid() != disk->process)
        return -ESHUTDOWN;
    if (n == 0)
        return 0;
    for (size_t i = 0; i < n; i++)
        if (slots[i] >= disk->n_slots)
            return -EINVAL;
    forget = calloc(1, sizeof(*forget) + n * sizeof(forget->ios[0]));
    if (!forget)
        return -ENOMEM;
    sem_init(&forget->sem, 0, 0);
    forget->batch = (struct kvbm_disk_batch){
        .write = true, .ios = forget->ios, .n = (uint32_t)n, .done = forgotten};
    for (size_t i = 0; i < n; i++)
        forget->ios[i] =
            (struct kvbm_disk_io){.slot = slots[i], .commit_ = commits ? commits[i] : 0};
    err = submit(disk, &forget->batch, KVBM_DISK_FORGET);
    while (err == 0 && sem_wait(&forget->sem) < 0)
        ; /* EINTR */
    for (size_t i = 0; i < n && err == 0; i++)
        err = forget->ios[i].status;
    sem_destroy(&forget->sem);
    free(forget);
    return err;
}
