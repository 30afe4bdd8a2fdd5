// SPDX-License-Identifier: Apache-2.0
/** Inside of a storage: what every kind does in its own way. */
#ifndef KVBM_BM_STORAGE_H
#define KVBM_BM_STORAGE_H

#include <pthread.h>

#include "kvbm_layout.h"

struct kvbm_registration {
    struct kvbm_registration *next; /* registered before it */
    void (*release)(void *arg);
    void *arg;
    char name[];
};

/** A kind: NULL functions where it has nothing of its own to do. */
struct kvbm_storage_ops {
    /** Get the memory; on failure nothing is left. */
    int (*open)(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts);
    void (*close)(struct kvbm_storage *storage);
    /** Copies; the range has been checked. NULL: addr is the CPU's. */
    int (*read)(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len);
    int (*write)(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len);
};

struct kvbm_storage {
    const struct kvbm_storage_ops *ops;
    enum kvbm_storage_kind kind; /* EXTERNAL memory says what it is */
    uint64_t addr;
    uint64_t bytes;
    uint64_t device_id;
    size_t mapped;      /* system, pinned */
    uint32_t pinned_by; /* device whose context locked it */
    int fd;             /* disk; else -1 */
    char *path;         /* disk: to be removed */
    bool direct;
    pthread_mutex_t lock; /* of the registrations */
    struct kvbm_registration *registrations;
};

extern const struct kvbm_storage_ops kvbm_storage_system, kvbm_storage_disk, kvbm_storage_pinned,
    kvbm_storage_device, kvbm_storage_external_device;

/** Touch every page of fresh memory from @n_threads threads, so that it is there and near them. */
void kvbm_first_touch(void *memory, size_t len, uint32_t n_threads);

/** Ask for the memory's pages on one NUMA node. 0, -ENODEV. */
int kvbm_bind_to_node(void *memory, size_t len, uint32_t node);

#endif
