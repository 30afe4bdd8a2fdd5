// SPDX-License-Identifier: Apache-2.0
/* Shared memory, the reader's side: trust nothing that another process can change. */
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "shared_header.h"

#define PAGE 4096u /* smallest page of the owner, whose mapping begins with one */
#define MAX_BYTES (UINT64_C(1) << 62)

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
    const char *memory = mapped->data + (place->addr - mapped->owner_addr);
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

int kvbm_shared_map(int fd, const uint8_t id[KVBM_SHARED_ID], const struct kvbm_layout *layout,
                    struct kvbm_mapped *ret)
{
    struct kvbm_shared_header header;
    const char *wrong;
    uint64_t len = 0;
    void *memory;
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
    memory = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return errno == ENOMEM ? -ENOMEM : refuse("it can't be mapped");
    *ret = (struct kvbm_mapped){.memory = memory,
                                .len = len,
                                .n_blocks = header.n_blocks,
                                .data_bytes = header.data_bytes,
                                .owner_addr = header.owner_addr};
    ret->data = ret->memory + header.data_at;
    ret->table = (const kvbm_generation_t *)(const void *)(ret->memory + header.table_at);
    memcpy(ret->id, header.id, sizeof(ret->id));
    err = move_layout(ret, layout);
    if (err < 0)
        kvbm_shared_unmap(ret);
    return err;
}

void kvbm_shared_unmap(struct kvbm_mapped *mapped)
{
    kvbm_layout_destroy(mapped->layout);
    if (mapped->memory)
        munmap((void *)(uintptr_t)mapped->memory, mapped->len);
    memset(mapped, 0, sizeof(*mapped));
}
