// SPDX-License-Identifier: Apache-2.0
/** Shared by the disk tier's tests: a folder per test, and batches with a wait. */
#ifndef KV_TESTS_TIER_DISK_UNIT_H
#define KV_TESTS_TIER_DISK_UNIT_H

#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <semaphore.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "skip.h"
#include "tier/disk/disk.h"

static char disk_dirs[4][256]; /* volumes */
static const char *disk_dir_names[4] = {disk_dirs[0], disk_dirs[1], disk_dirs[2], disk_dirs[3]};
static char disk_root[200];

static inline int disk_setup(void **state)
{
    (void)state;
    kv_log_set_level(KV_LOG_ERROR);
    if (disk_dir(disk_root, sizeof(disk_root)) < 0)
        return -1;
    for (int i = 0; i < 4; i++) {
        snprintf(disk_dirs[i], sizeof(disk_dirs[i]), "%s/%d", disk_root, i);
        mkdir(disk_dirs[i], 0700);
    }
    return 0;
}

static inline int disk_teardown(void **state)
{
    (void)state;
    return remove_dir(disk_root);
}

/* True when the tests' directories are on tmpfs. */
static inline bool disk_in_memory(void)
{
    struct statfs fs;

    assert_int_equal(statfs(disk_root, &fs), 0);
    return fs.f_type == TMPFS_MAGIC;
}

static inline struct kvbm_disk_opts disk_opts(uint32_t n_volumes, uint32_t n_slots)
{
    return (struct kvbm_disk_opts){.size = sizeof(struct kvbm_disk_opts),
                                   .directories = disk_dir_names,
                                   .n_directories = n_volumes,
                                   .fingerprint = "model",
                                   .key_len = 8,
                                   .slot_bytes = 8192,
                                   .n_slots = n_slots,
                                   .io_depth = 8};
}

static inline struct kvbm_disk *disk_open(const struct kvbm_disk_opts *opts)
{
    struct kvbm_disk *disk = NULL;

    assert_int_equal(kvbm_disk_open(opts, &disk), 0);
    return disk;
}

struct disk_wait {
    struct kvbm_disk_batch batch;
    sem_t sem;
};

static inline void disk_done(struct kvbm_disk_batch *batch)
{
    sem_post(batch->arg);
}

static inline void disk_await(sem_t *sem)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    assert_int_equal(sem_timedwait(sem, &until), 0);
}

static inline void disk_run(struct kvbm_disk *disk, bool writing, struct kvbm_disk_io *ios,
                            uint32_t n)
{
    sem_t sem;
    struct kvbm_disk_batch batch = {.write = writing,
                                    .flow = writing ? KVBM_OFFLOAD : KVBM_ONBOARD,
                                    .ios = ios,
                                    .n = n,
                                    .done = disk_done,
                                    .arg = &sem};

    sem_init(&sem, 0, 0);
    assert_int_equal(kvbm_disk_submit(disk, &batch), 0);
    disk_await(&sem);
    sem_destroy(&sem);
}

static inline int disk_write(struct kvbm_disk *disk, uint32_t slot, uint64_t key, void *data,
                             uint64_t len)
{
    struct kvbm_disk_io io = {.slot = slot,
                              .group = 1,
                              .position = slot,
                              .key = &key,
                              .data = data,
                              .len = len,
                              .status = 1};

    disk_run(disk, true, &io, 1);
    return io.status;
}

static inline int disk_read(struct kvbm_disk *disk, uint32_t slot, uint64_t key, void *data,
                            uint64_t len)
{
    struct kvbm_disk_io io = {
        .slot = slot, .group = 1, .key = &key, .data = data, .len = len, .status = 1};

    disk_run(disk, false, &io, 1);
    return io.status;
}

static inline void *disk_pages(size_t bytes)
{
    void *memory = NULL;

    assert_int_equal(posix_memalign(&memory, 4096, bytes), 0);
    memset(memory, 0, bytes);
    return memory;
}

static inline void disk_fill(void *memory, size_t len, uint64_t seed)
{
    uint64_t random = seed * 2 + 1;

    for (size_t i = 0; i < len; i++)
        ((uint8_t *)memory)[i] = (uint8_t)(unit_random(&random) >> 24);
}

#endif
