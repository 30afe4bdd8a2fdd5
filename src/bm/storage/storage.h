// SPDX-License-Identifier: Apache-2.0
/** Internals of a storage: the functions of its kind. */
#ifndef KVBM_BM_STORAGE_STORAGE_H
#define KVBM_BM_STORAGE_STORAGE_H

#include <pthread.h>

#include "kvbm_layout.h"

struct kvbm_registration {
    struct kvbm_registration *next; /* registered before it */
    void (*release)(void *arg);
    void *arg;
    char name[];
};

/** Functions of a kind; NULL where the kind needs none. */
struct kvbm_storage_ops {
    /** Allocate the memory. A failure leaves nothing allocated. */
    int (*open)(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts);
    void (*close)(struct kvbm_storage *storage);
    /** Copy; the range has been checked. NULL: the CPU can access addr. */
    int (*read)(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len);
    int (*write)(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len);
};

struct kvbm_storage {
    const struct kvbm_storage_ops *ops;
    enum kvbm_storage_kind kind; /* EXTERNAL memory states its own kind */
    uint64_t addr;
    uint64_t bytes;
    uint64_t device_id;
    size_t mapped;      /* bytes; system and pinned memory */
    uint32_t pinned_by; /* device whose context locked it */
    int fd;             /* file of a disk storage; else -1 */
    char *path;         /* path of a disk storage's file, removed at the end */
    bool direct;
    pthread_mutex_t lock; /* guards the registrations */
    struct kvbm_registration *registrations;
};

extern const struct kvbm_storage_ops kvbm_storage_system, kvbm_storage_disk, kvbm_storage_pinned,
    kvbm_storage_device, kvbm_storage_external_device;

/**
 * Touch every page of fresh memory from @n_threads threads, so that pages exist and are near them.
 */
void kvbm_first_touch(void *memory, size_t len, uint32_t n_threads);

/**
 * Touch every page of memory that is in use, from @n_threads threads, without changing a byte.
 * Returns 0, also when the kernel can't (before Linux 5.14, or a driver's memory); -ENOSPC (no page:
 * behind the end of a file, a full file system, no memory); another error.
 */
int kvbm_touch(void *memory, size_t len, uint32_t n_threads);

/** Bind the memory's pages to one NUMA node. Returns 0 or -ENODEV. */
int kvbm_bind_to_node(void *memory, size_t len, uint32_t node);

#endif
