// SPDX-License-Identifier: Apache-2.0
/* Memory of this process: mapped, optionally bound to a NUMA node and touched by several
 * threads. */
#include <errno.h>
#include <inttypes.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "bm/storage/memory.h"
#include "bm/storage/storage.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define MAX_THREADS 64
#define SLICE ((size_t)16 << 20) /* bytes that a thread touches before it takes more */

/* ---- first touch ---- */

struct touch {
    char *memory;
    size_t len;
    size_t page;
    bool keep; /* the bytes */
    _Atomic size_t next;
    _Atomic int err; /* of keep */
};

/* Touch a slice. Returns 0 or -errno. */
static int touch_slice(const struct touch *touch, size_t from, size_t end)
{
    int err;

    for (size_t at = from; !touch->keep && at < end; at += touch->page)
        ((volatile char *)touch->memory)[at] = 0;
    if (!touch->keep)
        return 0;
    do
        err = kvbm_populate(touch->memory + from, end - from);
    while (err == -EINTR);
    return err == -EINVAL ? 0 : err; /* the kernel can't: the first users touch it */
}

static void *touch_slices(void *arg)
{
    struct touch *touch = arg;

    for (;;) {
        size_t from = atomic_fetch_add_explicit(&touch->next, SLICE, memory_order_relaxed);
        size_t end = from < touch->len ? KV_MIN(from + SLICE, touch->len) : 0;
        int err = end ? touch_slice(touch, from, end) : 0;

        if (err < 0)
            atomic_store_explicit(&touch->err, err, memory_order_relaxed);
        if (!end || err < 0)
            return NULL;
    }
}

static void touch_all(struct touch *touch, uint32_t n_threads)
{
    pthread_t threads[MAX_THREADS];
    uint32_t n = 0;

    n_threads = KV_MIN(n_threads, (uint32_t)MAX_THREADS);
    while (n + 1 < n_threads &&
           kv_thread_start(&threads[n], "kvbm-touch", touch_slices, touch) == 0)
        n++;
    touch_slices(touch);
    while (n > 0)
        pthread_join(threads[--n], NULL);
}

void kvbm_first_touch(void *memory, size_t len, uint32_t n_threads)
{
    struct touch touch = {.memory = memory, .len = len, .page = (size_t)sysconf(_SC_PAGESIZE)};

    touch_all(&touch, n_threads);
}

int kvbm_touch(void *memory, size_t len, uint32_t n_threads)
{
    struct touch touch = {.memory = memory, .len = len, .keep = true};

    touch_all(&touch, n_threads);
    return touch.err == -EFAULT || touch.err == -ENOMEM ? -ENOSPC : touch.err;
}

/* ---- NUMA: one system call, so no library ---- */

/* False for a NUMA node that doesn't exist. Without information from the kernel only node 0
 * does. */
static bool node_exists(uint32_t node)
{
    char path[64];

    snprintf(path, sizeof(path), "/sys/devices/system/node/node%" PRIu32, node);
    return node == 0 || access(path, F_OK) == 0;
}

int kvbm_bind_to_node(void *memory, size_t len, uint32_t node)
{
    unsigned long nodes[16] = {0};
    size_t bits = sizeof(nodes) * 8;

    if (node >= bits || !node_exists(node))
        return -ENODEV;
    nodes[node / (sizeof(long) * 8)] |= 1ul << (node % (sizeof(long) * 8));
    if (syscall(SYS_mbind, memory, len, MPOL_BIND, nodes, bits, 0) == 0)
        return 0;
    if (errno == EINVAL || errno == ENODEV)
        return -ENODEV;
    kv_log_info("kvbm", "memory is not bound to its node", "node=%u errno=%d", node, errno);
    return 0; /* a sandbox forbids mbind: use the node that the kernel chooses */
}

/* ---- the storage ---- */

/* Map memory, aligned to huge pages where it is large enough for them. */
static char *map_aligned(size_t len, size_t alignment)
{
    size_t mapped = len + alignment;
    char *memory = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t before;

    if (memory == MAP_FAILED)
        return NULL;
    before = (alignment - (uintptr_t)memory % alignment) % alignment;
    if (before)
        munmap(memory, before);
    munmap(memory + before + len, mapped - before - len);
    return memory + before;
}

static int system_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    size_t page = opts->huge_pages ? HUGE_PAGE : (size_t)sysconf(_SC_PAGESIZE);
    size_t len = (opts->bytes + page - 1) / page * page;
    char *memory = NULL;
    int err = 0;

    if (kvbm_memory_is_there(len, "a storage") &&
        (!opts->use_numa || kvbm_node_has(len, opts->numa_node, "a storage on its node")))
        memory = map_aligned(len, page);
    if (!memory)
        return -ENOMEM;
    if (opts->huge_pages && madvise(memory, len, MADV_HUGEPAGE) < 0)
        kv_log_info("kvbm", "no huge pages", "errno=%d", errno);
    if (opts->use_numa)
        err = kvbm_bind_to_node(memory, len, opts->numa_node);
    if (err < 0) {
        munmap(memory, len);
        return err;
    }
    if (opts->touch_threads)
        kvbm_first_touch(memory, len, opts->touch_threads);
    storage->addr = (uintptr_t)memory;
    storage->mapped = len;
    return 0;
}

static void system_close(struct kvbm_storage *storage)
{
    munmap((void *)(uintptr_t)storage->addr, storage->mapped);
}

const struct kvbm_storage_ops kvbm_storage_system = {.open = system_open, .close = system_close};
