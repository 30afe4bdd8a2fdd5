// SPDX-License-Identifier: Apache-2.0
/* The disk tier's store: one thread that receives batches and completed requests and owns the state
 * of all running operations. work.c moves the bytes; volume.c and format.c handle the files. */
#include "tier/disk/disk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "tier/disk/impl.h"

enum {
    MAX_BLOCKS = 65536, /* blocks waiting and running, in all batches */
    DEFAULT_DEPTH = 64,
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
    if (status < 0)
        return;
    if (op->work->kind == KVBM_DISK_WRITE) {
        stats->writes++;
        stats->bytes_written += op->io->len;
    } else {
        stats->reads++;
        stats->bytes_read += op->io->len;
    }
}

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

static bool is_barrier(const struct kvbm_disk *disk, const struct kvbm_aio_req *req)
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
        if (is_barrier(disk, req)) {
            pthread_mutex_lock(&disk->lock);
            disk->stats.barriers++;
            pthread_mutex_unlock(&disk->lock);
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

static void *work(void *arg)
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
    struct kvbm_disk_work *work = calloc(1, sizeof(*work) + batch->n * sizeof(work->ops[0]));
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

/* ---- committed blocks ---- */

struct found {
    uint64_t commit;
    uint32_t slot;
};

static int by_commit(const void *a, const void *b)
{
    const struct found *x = a, *y = b;

    if (x->commit != y->commit)
        return x->commit < y->commit ? -1 : 1;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Copy and decode the record of a slot. Returns false when it has none. */
static bool look(struct kvbm_disk *disk, uint32_t slot, uint8_t record[KVBM_DISK_MAX_RECORD],
                 struct kvbm_disk_entry *ret)
{
    const struct kvbm_disk_header *header = &kvbm_disk_volume_of(disk, slot)->header;

    pthread_mutex_lock(&disk->image_lock);
    memcpy(record, kvbm_disk_record_at(disk, slot), header->record_bytes);
    pthread_mutex_unlock(&disk->image_lock);
    return kvbm_disk_record_of(disk, slot, record, ret);
}

long kvbm_disk_each(struct kvbm_disk *disk,
                    int (*each)(void *arg, const struct kvbm_disk_record *record), void *arg)
{
    struct found *found = malloc((disk->n_slots + (size_t)1) * sizeof(found[0]));
    uint8_t record[KVBM_DISK_MAX_RECORD];
    struct kvbm_disk_entry entry;
    size_t n = 0;
    long rc = 0, told = 0;

    if (!found)
        return -ENOMEM;
    for (uint32_t slot = 0; slot < disk->n_slots; slot++) {
        if (look(disk, slot, record, &entry))
            found[n++] = (struct found){.commit = entry.commit, .slot = slot};
    }
    qsort(found, n, sizeof(found[0]), by_commit);
    for (size_t i = 0; i < n && rc == 0; i++) {
        if (!look(disk, found[i].slot, record, &entry) || entry.commit != found[i].commit)
            continue; /* written since the index was read */
        rc = each(arg, &(struct kvbm_disk_record){.slot = found[i].slot,
                                                  .group = entry.group,
                                                  .position = entry.position,
                                                  .commit = entry.commit,
                                                  .len = entry.len,
                                                  .key = entry.key,
                                                  .parent = entry.parent});
        told++;
    }
    free(found);
    return rc ? rc : told;
}

void kvbm_disk_get_stats(struct kvbm_disk *disk, struct kvbm_disk_stats *ret)
{
    struct kvbm_aio_stats aio;

    pthread_mutex_lock(&disk->lock);
    *ret = disk->stats;
    pthread_mutex_unlock(&disk->lock);
    kvbm_aio_get_stats(disk->aio, &aio);
    ret->registered_bytes = aio.registered_bytes;
    ret->fixed = aio.fixed;
    ret->volumes = disk->n_volumes;
    ret->volumes_down = 0;
    for (uint32_t i = 0; i < disk->n_volumes; i++)
        ret->volumes_down += atomic_load_explicit(&disk->volumes[i].down, memory_order_relaxed);
}

bool kvbm_disk_usable(struct kvbm_disk *disk, uint32_t slot)
{
    return slot < disk->n_slots &&
           !atomic_load_explicit(&kvbm_disk_volume_of(disk, slot)->down, memory_order_relaxed);
}

/* ---- life ---- */

static int check_opts(const struct kvbm_disk_opts *opts)
{
    const char *name = KV_OPT(opts, name, "cache");
    uint32_t n = KV_OPT(opts, n_directories, 0);

    if (!KV_OPT(opts, directories, NULL) || !n || n > KVBM_MAX_VOLUMES || !*name ||
        strchr(name, '/') || strlen(name) > 200)
        return -EINVAL;
    if (!KV_OPT(opts, key_len, 0) || opts->key_len > KVBM_MAX_KEY || !KV_OPT(opts, slot_bytes, 0) ||
        opts->slot_bytes > UINT64_C(1) << 30 || KV_OPT(opts, n_slots, 0) < n)
        return -EINVAL;
    return 0;
}

static int open_parts(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    struct kvbm_aio_opts aio = {.size = sizeof(aio),
                                .io = KV_OPT(opts, io, KVBM_IO_AUTO),
                                .depth = disk->depth,
                                .memory = KV_OPT(opts, memory, NULL),
                                .memory_bytes = KV_OPT(opts, memory_bytes, 0)};
    int err = kvbm_disk_volumes_open(disk, opts);

    if (err == 0)
        err = kvbm_disk_keep_newest(disk);
    if (err == 0)
        err = kvbm_aio_create(&aio, &disk->aio);
    if (err == 0)
        err = kv_thread_start(&disk->thread, "kvbm-disk", work, disk);
    disk->started = err == 0;
    return err;
}

static void init_wake(struct kvbm_disk *disk)
{

    kv_cond_init(&disk->wake);
    pthread_mutex_init(&disk->lock, NULL);
    pthread_mutex_init(&disk->image_lock, NULL);
}

int kvbm_disk_open(const struct kvbm_disk_opts *opts, struct kvbm_disk **ret)
{
    struct kvbm_disk *disk;
    int err = check_opts(opts);

    if (err < 0)
        return err;
    disk = calloc(1, sizeof(*disk));
    if (!disk)
        return -ENOMEM;
    init_wake(disk);
    disk->process = getpid();
    disk->depth = KV_OPT(opts, io_depth, DEFAULT_DEPTH);
    disk->n_volumes = opts->n_directories;
    disk->n_slots = opts->n_slots;
    disk->stride =
        (opts->slot_bytes + KVBM_DISK_PAGE - 1) / KVBM_DISK_PAGE * (uint64_t)KVBM_DISK_PAGE;
    disk->volatile_ = KV_OPT(opts, volatile_, false);
    err = open_parts(disk, opts);
    if (err < 0) {
        kv_log_warn("kvbm", "a disk tier can't be opened", "errno=%d", -err);
        kvbm_disk_close(disk);
        return err;
    }
    *ret = disk;
    return 0;
}

void kvbm_disk_close(struct kvbm_disk *disk)
{
    if (!disk)
        return;
    if (disk->started && getpid() == disk->process) {
        pthread_mutex_lock(&disk->lock);
        disk->stop = true;
        pthread_cond_signal(&disk->wake);
        pthread_mutex_unlock(&disk->lock);
        pthread_join(disk->thread, NULL);
    }
    kvbm_aio_destroy(disk->aio);
    kvbm_disk_volumes_close(disk);
    if (getpid() == disk->process) {
        pthread_cond_destroy(&disk->wake);
        pthread_mutex_destroy(&disk->lock);
        pthread_mutex_destroy(&disk->image_lock);
    }
    free(disk);
}
