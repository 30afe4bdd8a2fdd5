// SPDX-License-Identifier: Apache-2.0
/* GPU memory, and host memory locked for GPUs. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/core/error.h"
#include "bm/storage/cuda.h"
#include "bm/storage/storage.h"

/* ---- pinned: mapped and touched by several threads, then locked (faster than cuMemHostAlloc)
 * ---- */

static int pinned_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    struct kvbm_storage_opts system = *opts;
    uint32_t device;
    int err = kvbm_cuda_enter_any(opts->device_id, &device);

    if (err < 0) /* before gigabytes are touched in vain */
        return err;
    if (!system.touch_threads)
        system.touch_threads = (uint32_t)KV_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L);
    err = kvbm_storage_system.open(storage, &system);
    if (err == 0) {
        err = kvbm_cuda_pin((void *)(uintptr_t)storage->addr, storage->mapped);
        if (err < 0)
            kvbm_storage_system.close(storage);
    }
    kvbm_cuda_leave();
    storage->device_id = 0; /* host memory belongs to every device */
    storage->pinned_by = device;
    return err;
}

static void pinned_close(struct kvbm_storage *storage)
{
    if (kvbm_cuda_enter(storage->pinned_by) == 0) {
        kvbm_cuda_unpin((void *)(uintptr_t)storage->addr);
        kvbm_cuda_leave();
    }
    kvbm_storage_system.close(storage);
}

const struct kvbm_storage_ops kvbm_storage_pinned = {.open = pinned_open, .close = pinned_close};

/* ---- device ---- */

static int device_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    int err = kvbm_cuda_enter(opts->device_id);

    if (err < 0)
        return err;
    err = kvbm_cuda_alloc(opts->bytes, &storage->addr);
    if (err == 0) {
        err = kvbm_cuda_zero(storage->addr, opts->bytes);
        if (err < 0)
            kvbm_cuda_free(storage->addr);
    }
    kvbm_cuda_leave();
    storage->device_id = opts->device_id;
    return err;
}

static void device_close(struct kvbm_storage *storage)
{
    if (kvbm_cuda_enter((uint32_t)storage->device_id) < 0)
        return;
    kvbm_cuda_free(storage->addr);
    kvbm_cuda_leave();
}

static int device_read(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len)
{
    int err = kvbm_cuda_enter((uint32_t)storage->device_id);

    if (err < 0)
        return err;
    err = kvbm_cuda_to_host(to, storage->addr + offset, len);
    kvbm_cuda_leave();
    return err;
}

static int device_write(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len)
{
    int err = kvbm_cuda_enter((uint32_t)storage->device_id);

    if (err < 0)
        return err;
    err = kvbm_cuda_to_device(storage->addr + offset, from, len);
    kvbm_cuda_leave();
    return err;
}

const struct kvbm_storage_ops kvbm_storage_device = {
    .open = device_open, .close = device_close, .read = device_read, .write = device_write};
const struct kvbm_storage_ops kvbm_storage_external_device = {.read = device_read,
                                                              .write = device_write};
