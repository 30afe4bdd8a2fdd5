// SPDX-License-Identifier: Apache-2.0
/** First page of shared memory (docs/formats.md, "Shared memory"), in the machine's byte order. */
#ifndef KVBM_PEER_SET_SHARED_HEADER_H
#define KVBM_PEER_SET_SHARED_HEADER_H

#include <stddef.h>

#include "base/core/xxh.h"
#include "bm/storage/layout.h"
#include "peer/set/shared.h"

#define KVBM_SHARED_MAGIC "KVBMSHM" /* with its NUL: 8 bytes */
#define KVBM_SHARED_VERSION 1
#define KVBM_SHARED_TABLE_AT 4096

struct kvbm_shared_header {
    char magic[8];
    uint32_t version, header_bytes;
    uint8_t id[KVBM_SHARED_ID];
    uint64_t total_bytes;
    uint64_t table_at, n_blocks;
    uint64_t data_at, data_bytes;
    uint64_t owner_addr; /* of data_at, in the owner: its layouts name addresses from there on */
    uint64_t sum;        /* XXH3-64, seed 0, of all before */
};

static inline uint64_t kvbm_shared_header_sum(const struct kvbm_shared_header *header)
{
    return kv_xxh64(header, offsetof(struct kvbm_shared_header, sum), 0);
}

/** True when all storages of a layout lie within @bytes from @addr on. */
bool kvbm_layout_lies_in(const struct kvbm_layout *layout, uint64_t addr, uint64_t bytes);

#endif
