// SPDX-License-Identifier: Apache-2.0
/* Shared memory, the reader's side: trust nothing that another process can change. */
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "peer/set/shared_header.h"

#define PAGE 4096u /* smallest page of the owner, whose mapping begins with one */
#define MAX_BYTES (UINT64_C(1) << 62)
#define LITTLE (UINT64_C(1) << 20) /* bytes of a set whose pages may be missing */
#define TIMES 4 /* all that is mapped may be so many times the machine's memory */

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

static _Atomic uint64_t mapped_bytes; /* of this process, from all peers */

bool kvbm_layout_lies_in(const struct kvbm_layout *layout, uint64_t addr, uint64_t bytes)
{
    for (uint32_t i = 0; i < layout->n; i++) {
        uint64_t from = layout->places[i].addr - addr;

        if (layout->places[i].addr < addr || from > bytes ||
            layout->shape.data_bytes > bytes - from)
            return false;
    }
    return true;
}

static int refuse(const char *why)
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "a peer's shared memory is refused", "why=\"%s\"", why);
    return -EPROTO;
}

/*
 * Check the kind of file before anything is mapped. Only a sealed memfd keeps its length; its pages
 * are the kernel's own tmpfs, whose holes read as zeros. A hole in huge pages, which the owner may
 * punch at any time, would be SIGBUS: they are refused.
 */
static int check_file(int fd, uint64_t *ret)
{
    struct statfs fs;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return refuse("not a memfd that can't shrink");
    if (fstatfs(fd, &fs) < 0 || (uint64_t)fs.f_type != TMPFS_MAGIC)
        return refuse("not ordinary memory");
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size < 0 ||
        (uint64_t)st.st_size > MAX_BYTES)
        return refuse("not a file of a length");
    *ret = (uint64_t)st.st_size;
    return 0;
}

/* Check a copy of the header, which the owner can't change any more. */
static const char *wrong_with(const struct kvbm_shared_header *h, uint64_t len)
{
    if (memcmp(h->magic, KVBM_SHARED_MAGIC, sizeof(h->magic)) != 0 ||
        h->version != KVBM_SHARED_VERSION || h->header_bytes != sizeof(*h))
        return "another format or version";
    if (h->sum != kvbm_shared_header_sum(h))
        return "a damaged header";
    if (h->total_bytes != len || h->table_at < sizeof(*h) || h->table_at % 8 || h->table_at > len ||
        h->n_blocks > (len - h->table_at) / 8)
        return "a table beyond its end";
    if (h->data_at > len || h->data_bytes > len - h->data_at ||
        h->owner_addr > UINT64_MAX - h->data_bytes)
        return "data beyond its end";
    if ((h->owner_addr - h->data_at) % PAGE)
        return "data that is aligned otherwise here";
    return NULL;
}

/* Make the storage of place @i: the memory of its blocks, as this process has it. */
static int move_place(const struct kvbm_mapped *mapped, struct kvbm_layout *layout, uint32_t i)
{
    struct kvbm_place *place = &layout->places[i];
    const char *memory =
        (const char *)((uintptr_t)mapped->data + (place->addr - mapped->owner_addr));
    const struct kvbm_storage_opts opts = {.size = sizeof(opts),
                                           .kind = KVBM_STORAGE_EXTERNAL,
                                           .bytes = layout->shape.data_bytes,
                                           .memory = (void *)(uintptr_t)memory};

    *place = (struct kvbm_place){.addr = (uintptr_t)memory,
                                 .storage_addr = (uintptr_t)memory,
                                 .storage_bytes = opts.bytes,
                                 .kind = KVBM_STORAGE_SYSTEM};
    return kvbm_storage_create(&opts, &place->storage);
}

/* Make a set's layout with this process's addresses. */
static int move_layout(struct kvbm_mapped *mapped, const struct kvbm_layout *theirs)
{
    size_t bytes = sizeof(*theirs) + theirs->n * sizeof(theirs->places[0]);
    int err = 0;

    mapped->layout = malloc(bytes);
    if (!mapped->layout)
        return -ENOMEM;
    memcpy(mapped->layout, theirs, bytes); /* no place of a peer's layout has a storage */
    mapped->layout->owns_storages = true;
    for (uint32_t i = 0; err == 0 && i < theirs->n; i++)
        err = move_place(mapped, mapped->layout, i);
    return err;
}

/* ---- mapping what a layout needs ---- */

/* A range of the memfd. */
struct range {
    uint64_t from, to;
};

/* Find the pages that hold bytes [from, from + len) of the memfd. */
static struct range pages_of(uint64_t from, uint64_t len)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (struct range){from / page * page, (from + len + page - 1) / page * page};
}

/* Find the pages of a layout that lies within the region. */
static struct range pages_of_layout(const struct kvbm_shared_header *h,
                                    const struct kvbm_layout *layout)
{
    uint64_t from = UINT64_MAX, to = 0;

    for (uint32_t i = 0; i < layout->n; i++) {
        from = KV_MIN(from, layout->places[i].addr);
        to = KV_MAX(to, layout->places[i].addr + layout->shape.data_bytes);
    }
    return pages_of(h->data_at + (from - h->owner_addr), to - from);
}

static uint64_t machine_bytes(void)
{
    struct sysinfo info;

    return sysinfo(&info) == 0 ? ((uint64_t)info.totalram + info.totalswap) * info.mem_unit
                               : UINT64_MAX / TIMES;
}

/* Tell whether a memfd can be kept from holes: kernels before 5.1 have no such seal. */
static bool knows_the_seal(void)
{
    int fd = memfd_create("kvbm-seal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool knows = fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0;

    if (fd >= 0)
        close(fd);
    return knows;
}

/*
 * Refuse memory that isn't there. Its owner would have this process's reads allocate it, up to all that
 * the machine has; pages that the owner can punch out would be allocated again and again.
 */
static const char *missing(int fd, uint64_t bytes)
{
    struct stat st;

    if (bytes > machine_bytes())
        return "more than the machine has";
    if (bytes <= LITTLE)
        return NULL;
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_blocks * 512 < bytes)
        return "its pages aren't there";
    if (!(fcntl(fd, F_GET_SEALS) & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) && knows_the_seal())
        return "its owner can punch holes";
    return NULL;
}

static int map_range(int fd, struct range range, struct kvbm_mapping *ret)
{
    size_t len = range.to - range.from;
    void *memory;

    if (atomic_fetch_add_explicit(&mapped_bytes, len, memory_order_relaxed) + len >
        machine_bytes() * TIMES) {
        atomic_fetch_sub_explicit(&mapped_bytes, len, memory_order_relaxed);
        return refuse("peers have this process map too much");
    }
    memory = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, (off_t)range.from);
    if (memory == MAP_FAILED) {
        int err = errno;

        atomic_fetch_sub_explicit(&mapped_bytes, len, memory_order_relaxed);
        return err == ENOMEM ? -ENOMEM : refuse("it can't be mapped");
    }
    *ret = (struct kvbm_mapping){memory, len};
    return 0;
}

static void unmap_range(struct kvbm_mapping *mapping)
{
    if (!mapping->memory)
        return;
    munmap((void *)(uintptr_t)mapping->memory, mapping->len);
    atomic_fetch_sub_explicit(&mapped_bytes, mapping->len, memory_order_relaxed);
}

/* Map what a checked header and a layout within it name. */
static int map_parts(int fd, const struct kvbm_shared_header *h, const struct kvbm_layout *layout,
                     struct kvbm_mapped *ret)
{
    struct range table = pages_of(h->table_at, layout->config.num_blocks * 8);
    struct range data = pages_of_layout(h, layout);
    const char *why = missing(fd, data.to - data.from + (table.to - table.from));
    int err = why ? refuse(why) : map_range(fd, table, &ret->generations);

    if (err == 0)
        err = map_range(fd, data, &ret->memory);
    if (err < 0)
        return err;
    ret->table = (const kvbm_generation_t *)(const void *)(ret->generations.memory + h->table_at -
                                                           table.from);
    /* May lie before the mapping: only the layout's addresses are used. */
    ret->data = (const char *)((uintptr_t)ret->memory.memory + h->data_at - data.from);
    return move_layout(ret, layout);
}

int kvbm_shared_map(int fd, const uint8_t id[KVBM_SHARED_ID], const struct kvbm_layout *layout,
                    struct kvbm_mapped *ret)
{
    struct kvbm_shared_header header;
    const char *wrong;
    uint64_t len = 0;
    int err = check_file(fd, &len);

    if (err < 0)
        return err;
    if (pread(fd, &header, sizeof(header), 0) != (ssize_t)sizeof(header))
        return refuse("no header");
    wrong = wrong_with(&header, len);
    if (!wrong && memcmp(header.id, id, sizeof(header.id)) != 0)
        wrong = "not the memory of its set";
    if (!wrong && (layout->config.num_blocks > header.n_blocks ||
                   !kvbm_layout_lies_in(layout, header.owner_addr, header.data_bytes)))
        wrong = "its set lies beyond it";
    if (wrong)
        return refuse(wrong);
    *ret = (struct kvbm_mapped){.n_blocks = header.n_blocks,
                                .data_bytes = header.data_bytes,
                                .owner_addr = header.owner_addr};
    memcpy(ret->id, header.id, sizeof(ret->id));
    err = map_parts(fd, &header, layout, ret);
    if (err < 0)
        kvbm_shared_unmap(ret);
    return err;
}

void kvbm_shared_unmap(struct kvbm_mapped *mapped)
{
    kvbm_layout_destroy(mapped->layout);
    unmap_range(&mapped->generations);
    unmap_range(&mapped->memory);
    memset(mapped, 0, sizeof(*mapped));
}
