// SPDX-License-Identifier: Apache-2.0
/* Open and close a disk tier's store, list its committed blocks, read its statistics. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tier/disk/disk.h"
#include "tier/disk/impl.h"

enum {
    DEFAULT_DEPTH = 64,
    COPY_THREADS = 8,   /* for volumes in the page cache: more would wait for the memory */
    FIND_AT_ONCE = 4096 /* slots searched without releasing the lock */
};

/* ---- committed blocks ---- */

struct found {
    uint64_t commit;
    uint32_t slot, position;
};

static int by_position(const void *a, const void *b)
{
    const struct found *x = a, *y = b;

    if (x->position != y->position)
        return x->position < y->position ? -1 : 1;
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
    uint32_t tokens[KVBM_DISK_MAX_RECORD / sizeof(uint32_t)];
    struct kvbm_disk_entry entry;
    size_t n = 0;
    long rc = 0, told = 0;

    if (!found)
        return -ENOMEM;
    for (uint32_t slot = 0; slot < disk->n_slots; slot++) {
        if (look(disk, slot, record, &entry))
            found[n++] =
                (struct found){.commit = entry.commit, .slot = slot, .position = entry.position};
    }
    qsort(found, n, sizeof(found[0]), by_position);
    for (size_t i = 0; i < n && rc == 0; i++) {
        if (!look(disk, found[i].slot, record, &entry) || entry.commit != found[i].commit)
            continue; /* written since the index was read */
        if (!kvbm_disk_keeps_tokens(disk, kvbm_disk_volume_of(disk, found[i].slot)))
            entry.tokens = NULL;
        if (entry.tokens)
            kvbm_disk_tokens(entry.tokens, disk->block_tokens, tokens);
        rc = each(arg, &(struct kvbm_disk_record){.slot = found[i].slot,
                                                  .group = entry.group,
                                                  .position = entry.position,
                                                  .commit = entry.commit,
                                                  .len = entry.len,
                                                  .key = entry.key,
                                                  .parent = entry.parent,
                                                  .tokens = entry.tokens ? tokens : NULL});
        told++;
    }
    free(found);
    return rc ? rc : told;
}

size_t kvbm_disk_find(struct kvbm_disk *disk, uint32_t group,
                      bool (*wanted)(const void *arg, const void *key), const void *arg,
                      uint32_t *slot, struct kvbm_disk_found *ret, size_t max)
{
    uint32_t key_len = disk->volumes[0].header.key_len, at = *slot;
    size_t n = 0;

    while (at < disk->n_slots && n < max) {
        pthread_mutex_lock(&disk->image_lock);
        for (uint32_t end = at + KV_MIN(disk->n_slots - at, (uint32_t)FIND_AT_ONCE);
             at < end && n < max; at++) {
            const uint8_t *record = kvbm_disk_record_at(disk, at);
            const uint8_t *key = kvbm_disk_record_key(record, group);
            struct kvbm_disk_entry entry;

            if (*kvbm_disk_unknown_at(disk, at)) {
                ret[n++] = (struct kvbm_disk_found){.slot = at, .commit = KVBM_DISK_UNKNOWN};
                continue;
            }
            if (!key || !wanted(arg, key) || !kvbm_disk_record_of(disk, at, record, &entry))
                continue;
            ret[n] = (struct kvbm_disk_found){.slot = at, .commit = entry.commit};
            memcpy(ret[n++].key, key, key_len);
        }
        pthread_mutex_unlock(&disk->image_lock);
    }
    *slot = at;
    return n;
}

/* True when a file of the directory is missing or out of use. */
static bool is_directory_down(const struct kvbm_disk *disk, uint32_t directory)
{
    bool down = false;

    for (uint32_t i = directory; i < disk->n_volumes; i += disk->n_directories)
        down |= atomic_load_explicit(&disk->volumes[i].down, memory_order_relaxed);
    return down;
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
    ret->volumes = disk->n_directories;
    ret->volumes_down = 0;
    for (uint32_t i = 0; i < disk->n_directories; i++)
        ret->volumes_down += is_directory_down(disk, i);
}

bool kvbm_disk_usable(struct kvbm_disk *disk, uint32_t slot)
{
    return slot < disk->n_slots && kvbm_disk_is_backed(disk, slot) &&
           !atomic_load_explicit(&kvbm_disk_volume_of(disk, slot)->down, memory_order_relaxed);
}

/* ---- opening and closing ---- */

static int check_opts(const struct kvbm_disk_opts *opts)
{
    const char *name = KV_OPT(opts, name, "cache");
    uint32_t n = KV_OPT(opts, n_directories, 0);

    if (!KV_OPT(opts, directories, NULL) || !n || n > KVBM_MAX_VOLUMES || !*name ||
        strchr(name, '/') || strlen(name) > 200)
        return -EINVAL;
    if (!KV_OPT(opts, key_len, 0) || opts->key_len > KVBM_MAX_KEY || !KV_OPT(opts, slot_bytes, 0) ||
        opts->slot_bytes > UINT64_C(1) << 30 || KV_OPT(opts, n_slots, 0) < n ||
        KV_OPT(opts, n_files, 0) > KVBM_DISK_MAX_FILES)
        return -EINVAL;
    return 0;
}

/*
 * Choose the executor. Bytes in the page cache are copied by whoever asks for them: io_uring would
 * copy all of them on its one thread.
 */
static enum kvbm_io executor(const struct kvbm_disk *disk, enum kvbm_io wanted)
{
    if (wanted != KVBM_IO_AUTO)
        return wanted;
    for (uint32_t i = 0; i < disk->n_volumes; i++)
        if (disk->volumes[i].direct)
            return KVBM_IO_AUTO;
    return KVBM_IO_THREADS;
}

static int open_executor(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    enum kvbm_io wanted = KV_OPT(opts, io, KVBM_IO_AUTO);
    void *memory = KV_OPT(opts, memory, NULL); /* only io_uring can register it */
    struct kvbm_aio_opts aio = {.size = sizeof(aio),
                                .io = memory ? wanted : executor(disk, wanted),
                                .depth = disk->depth,
                                .memory = memory,
                                .memory_bytes = KV_OPT(opts, memory_bytes, 0)};
    /* each keeps a thread */
    uint32_t n_flushes = disk->volatile_ ? KV_MIN(disk->n_volumes, (uint32_t)COPY_THREADS) : 0;
    int err;

    if (aio.io != wanted)
        aio.n_threads = KV_MIN(disk->depth, COPY_THREADS + n_flushes);
    err = kvbm_aio_create(&aio, &disk->aio);
    disk->sums = err == 0 && kvbm_aio_kind(disk->aio) != KVBM_IO_THREADS;
    return err;
}

static int open_parts(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    int err = kvbm_disk_volumes_open(disk, opts);

    if (err == 0)
        err = kvbm_disk_keep_newest(disk);
    if (err == 0)
        kvbm_disk_flush_init(disk);
    if (err == 0)
        err = open_executor(disk, opts);
    if (err == 0)
        err = kv_thread_start(&disk->thread, "kvbm-disk", kvbm_disk_run, disk);
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
    disk->n_directories = opts->n_directories;
    disk->n_slots = opts->n_slots;
    disk->block_tokens = KV_OPT(opts, block_tokens, 0);
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
