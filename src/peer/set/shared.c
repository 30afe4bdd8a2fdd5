// SPDX-License-Identifier: Apache-2.0
/* Shared memory, the owner's side: a memfd that is sealed before anybody else can have it. */
#include "peer/set/shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/storage/layout.h"
#include "bm/storage/memory.h"
#include "bm/storage/storage.h"
#include "peer/set/shared_header.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define PAGE UINT64_C(4096)
#define HUGE_PAGE (UINT64_C(2) << 20)
#define MAX_BYTES (UINT64_C(1) << 62)

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* Reserve every page now: one that can't be had later would end a reader or the owner (SIGBUS). */
static int reserve(struct kvbm_shared *shared, uint32_t threads)
{
    int err = kvbm_touch(shared->memory, shared->mapped, threads ? threads : 1);

    if (err == 0) /* before Linux 5.14 the pages weren't touched */
        err = -posix_fallocate(shared->fd, 0, (off_t)shared->mapped);
    if (err < 0)
        kv_log_warn("kvbm", "shared memory has no room for its pages", "bytes=%zu errno=%d",
                    shared->mapped, -err);
    return err;
}

/*
 * Seal the size, and the seals. F_SEAL_FUTURE_WRITE leaves this process's mapping the only writable
 * one; kernels before 5.1 lack it, and a reader could then reopen the descriptor for writing.
 */
static int seal(int fd)
{
    const int size = F_SEAL_SHRINK | F_SEAL_GROW;

    if (fcntl(fd, F_ADD_SEALS, size | F_SEAL_FUTURE_WRITE) < 0 && fcntl(fd, F_ADD_SEALS, size) < 0)
        return -errno;
    return fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) < 0 ? -errno : 0;
}

static void write_header(struct kvbm_shared *shared)
{
    struct kvbm_shared_header header = {.magic = KVBM_SHARED_MAGIC,
                                        .version = KVBM_SHARED_VERSION,
                                        .header_bytes = sizeof(header),
                                        .total_bytes = shared->mapped,
                                        .table_at = KVBM_SHARED_TABLE_AT,
                                        .n_blocks = shared->n_blocks,
                                        .data_at = (uint64_t)(shared->data - shared->memory),
                                        .data_bytes = shared->bytes,
                                        .owner_addr = (uintptr_t)shared->data};

    memcpy(header.id, shared->id, sizeof(header.id));
    header.sum = kvbm_shared_header_sum(&header);
    memcpy(shared->memory, &header, sizeof(header));
}

static int map_memory(struct kvbm_shared *shared, bool huge)
{
    void *memory;

    shared->fd = memfd_create("kvbm-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (shared->fd < 0 || ftruncate(shared->fd, (off_t)shared->mapped) < 0)
        return -errno;
    memory = mmap(NULL, shared->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, shared->fd, 0);
    if (memory == MAP_FAILED)
        return -errno;
    shared->memory = memory;
    if (huge && madvise(memory, shared->mapped, MADV_HUGEPAGE) < 0)
        kv_log_info("kvbm", "no huge pages", "errno=%d", errno);
    return 0;
}

static int fill(struct kvbm_shared *shared, const struct kvbm_shared_opts *opts)
{
    bool huge = KV_OPT(opts, huge_pages, false);
    uint64_t data_at =
        round_up(KVBM_SHARED_TABLE_AT + (uint64_t)shared->n_blocks * 8, huge ? HUGE_PAGE : PAGE);
    int err;

    shared->mapped = data_at + round_up(shared->bytes, huge ? HUGE_PAGE : PAGE);
    if (!kvbm_memory_is_there(shared->mapped, "shared memory"))
        return -ENOMEM;
    if (getrandom(shared->id, sizeof(shared->id), 0) != (ssize_t)sizeof(shared->id))
        return -EAGAIN;
    err = map_memory(shared, huge);
    if (err == 0)
        err = reserve(shared, KV_OPT(opts, touch_threads, 8));
    if (err < 0)
        return err;
    shared->data = shared->memory + data_at;
    shared->table = (kvbm_generation_t *)(void *)(shared->memory + KVBM_SHARED_TABLE_AT);
    for (uint32_t i = 0; i < shared->n_blocks; i++)
        atomic_store_explicit(&shared->table[i], 1, memory_order_relaxed);
    write_header(shared);
    return seal(shared->fd);
}

int kvbm_shared_create(const struct kvbm_shared_opts *opts, struct kvbm_shared **ret)
{
    struct kvbm_shared *shared;
    int err;

    if (!ret || !kv_sized(opts, "kvbm_shared_opts"))
        return -EINVAL;
    shared = calloc(1, sizeof(*shared));
    if (!shared)
        return -ENOMEM;
    shared->fd = -1;
    shared->bytes = KV_OPT(opts, bytes, 0);
    shared->n_blocks = KV_OPT(opts, n_blocks, 0);
    err = shared->bytes && shared->bytes <= MAX_BYTES && shared->n_blocks ? fill(shared, opts)
                                                                          : -EINVAL;
    if (err < 0) {
        kv_log_warn("kvbm", "shared memory not created", "bytes=%llu blocks=%u errno=%d",
                    (unsigned long long)shared->bytes, shared->n_blocks, -err);
        kvbm_shared_destroy(shared);
        return err;
    }
    *ret = shared;
    return 0;
}

void kvbm_shared_destroy(struct kvbm_shared *shared)
{
    if (!shared)
        return;
    if (shared->memory)
        munmap(shared->memory, shared->mapped);
    if (shared->fd >= 0)
        close(shared->fd);
    free(shared);
}

/* ---- layouts in it ---- */

static int take_piece(void *arg, uint64_t bytes, struct kvbm_storage **ret)
{
    struct kvbm_shared *shared = arg;
    struct kvbm_storage_opts opts = {.size = sizeof(opts),
                                     .kind = KVBM_STORAGE_EXTERNAL,
                                     .of = KVBM_STORAGE_SYSTEM,
                                     .bytes = bytes};
    int err;

    if (!shared)
        return -EINVAL;
    if (bytes > shared->bytes - shared->taken)
        return -ENOSPC;
    opts.memory = shared->data + shared->taken;
    err = kvbm_storage_create(&opts, ret);
    if (err == 0)
        shared->taken += KV_MIN(round_up(bytes, 64), shared->bytes - shared->taken);
    return err;
}

struct kvbm_allocator kvbm_shared_allocator(struct kvbm_shared *shared)
{
    return (struct kvbm_allocator){
        .size = sizeof(struct kvbm_allocator), .allocate = take_piece, .arg = shared};
}

bool kvbm_shared_holds(const struct kvbm_shared *shared, const struct kvbm_layout *layout)
{
    return layout->config.num_blocks <= shared->n_blocks &&
           kvbm_layout_lies_in(layout, (uintptr_t)shared->data, shared->bytes);
}
