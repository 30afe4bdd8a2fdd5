// SPDX-License-Identifier: Apache-2.0
/* Shared memory as a hostile owner may fill it: a sealed memfd that begins with the input, with its
 * own checksum and with a correct one. Whatever is accepted holds every block of the set. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/core/log.h"
#include "peer/set/shared_header.h"
#include "require.h"

#define LENGTH 16384

static struct kvbm_layout *told;

/* A set of 6 blocks at a fixed address, as a peer tells it. */
static void make_layout(void)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = 6,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 4,
                                              .inner_dim = 32,
                                              .dtype_width_bytes = 2};
    const struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = KVBM_STORAGE_NULL};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout *layout = NULL;
    uint8_t bytes[4096];
    long len;

    REQUIRE(kvbm_layout_allocate(&config, &allocator, &layout) == 0);
    len = kvbm_layout_serialise(layout, bytes, sizeof(bytes), NULL);
    REQUIRE(len > 0 && kvbm_layout_deserialise(bytes, (size_t)len, &told) == 0);
    kvbm_layout_destroy(layout);
}

static void map(const uint8_t *data, size_t len)
{
    struct kvbm_mapped mapped = {0};
    uint8_t id[KVBM_SHARED_ID] = {0};
    struct kvbm_view view;
    uint64_t sum = 0;
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    REQUIRE(fd >= 0 && pwrite(fd, data, len, 0) == (ssize_t)len);
    REQUIRE(ftruncate(fd, LENGTH) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    if (kvbm_shared_map(fd, id, told, &mapped) == 0) {
        for (uint32_t block = 0; block < 6; block++) {
            REQUIRE(kvbm_layout_block(mapped.layout, block, &view) == 0);
            for (uint64_t i = 0; i < view.len; i++)
                sum += ((const uint8_t *)(uintptr_t)view.addr)[i];
            sum += atomic_load(&mapped.table[block]);
        }
        REQUIRE(sum != 1); /* it was read */
        kvbm_shared_unmap(&mapped);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvbm_shared_header header;
    uint8_t copy[LENGTH];

    if (!told) {
        kv_log_set_level(KV_LOG_ERROR);
        make_layout();
    }
    if (size > LENGTH)
        return 0;
    map(data, size);
    if (size < sizeof(header))
        return 0;
    memcpy(copy, data, size);
    memcpy(&header, copy, sizeof(header));
    header.sum = kvbm_shared_header_sum(&header);
    memcpy(copy, &header, sizeof(header));
    map(copy, size);
    return 0;
}
