// SPDX-License-Identifier: Apache-2.0
/**
 * Memory of an owner that readers of the same machine map: a sealed memfd.
 *
 *   0            header page: magic, sizes, random id, checksum (docs/formats.md)
 *   table_at     one 64-bit generation per block: grows whenever the owner may change the block
 *   data_at      the memory of a layout's storages
 *
 * The owner maps it writable, a reader read-only. A reader copies a block, and then compares the
 * block's generation with the one that its lease named. The owner stores a new generation before it
 * lets anyone write into the block. A reader that saw a new byte therefore sees a new generation.
 */
#ifndef KVBM_PEER_SET_SHARED_H
#define KVBM_PEER_SET_SHARED_H

#include <stdatomic.h>

#include "kvbm_lease.h"

#define KVBM_SHARED_ID 16 /* bytes of a region's random id */

/** Generation of a block. In the memfd, so without locks. */
typedef _Atomic uint64_t kvbm_generation_t;

struct kvbm_shared {
    int fd;
    char *memory; /* the whole memfd, writable */
    size_t mapped;
    kvbm_generation_t *table;
    uint32_t n_blocks;
    char *data;
    uint64_t bytes;
    uint64_t taken; /* by kvbm_shared_allocator */
    uint8_t id[KVBM_SHARED_ID];
};

/** A part of a memfd as a reader has it. */
struct kvbm_mapping {
    const char *memory; /* read-only */
    size_t len;
};

/** A region as a reader has it: the generations and the memory of one layout, not more. */
struct kvbm_mapped {
    struct kvbm_mapping generations, memory;
    const kvbm_generation_t *table;
    uint64_t n_blocks;
    const char *data; /* a byte at owner_addr + x in the owner is at data + x here */
    uint64_t data_bytes;
    uint64_t owner_addr;
    struct kvbm_layout *layout; /* of the set, with this process's addresses: only to be read */
    uint8_t id[KVBM_SHARED_ID];
};

/**
 * Map a descriptor that a peer sent, which stays the caller's. It must be a memfd that can't shrink,
 * with a sound header that names @id. All of @layout (a peer's, deserialised) must lie within it, and
 * that part is mapped. Returns 0; -EPROTO (a descriptor that another process could use to hurt this
 * one, or more than the machine's memory; logged); -ENOMEM.
 */
int kvbm_shared_map(int fd, const uint8_t id[KVBM_SHARED_ID], const struct kvbm_layout *layout,
                    struct kvbm_mapped *ret);

/** Unmap; no-op for a zeroed struct. */
void kvbm_shared_unmap(struct kvbm_mapped *mapped);

/** True when all of a layout's memory lies within a region of this process. */
bool kvbm_shared_holds(const struct kvbm_shared *shared, const struct kvbm_layout *layout);

#endif
