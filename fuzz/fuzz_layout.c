// SPDX-License-Identifier: Apache-2.0
/* Layouts. The first byte chooses. Even: a configuration; every region must lie in its storage,
 * and the layout must survive writing and reading. Odd: a descriptor as another process may send
 * it, with its own checksum and with a correct one; an accepted descriptor encodes to the same
 * bytes. */
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "kvbm_layout.h"
#include "require.h"

/* Check regions of the first and last blocks, layers and outers: each inside its storage, none
 * overlapping. */
static void check_regions(const struct kvbm_layout *layout)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct kvbm_view views[8];
    size_t n = 0;

    for (unsigned i = 0; i < 8; i++) {
        uint64_t block = i & 1 ? c->num_blocks - 1 : 0;
        uint32_t layer = i & 2 ? c->num_layers - 1 : 0, outer = i & 4 ? c->outer_dim - 1 : 0;

        if ((i & 1 && c->num_blocks == 1) || (i & 2 && c->num_layers == 1) ||
            (i & 4 && c->outer_dim == 1))
            continue; /* the same region */
        REQUIRE(kvbm_layout_region(layout, block, layer, outer, &views[n]) == 0);
        REQUIRE(views[n].len && views[n].addr + views[n].len > views[n].addr);
        for (size_t j = 0; j < n; j++)
            REQUIRE(views[j].storage != views[n].storage ||
                    views[j].addr + views[j].len <= views[n].addr ||
                    views[n].addr + views[n].len <= views[j].addr);
        n++;
    }
    REQUIRE(kvbm_layout_region(layout, c->num_blocks, 0, 0, &views[0]) == -ERANGE);
    REQUIRE(kvbm_layout_region(layout, 0, c->num_layers, 0, &views[0]) == -ERANGE);
    REQUIRE(kvbm_layout_region(layout, 0, 0, c->outer_dim, &views[0]) == -ERANGE);
    (void)kvbm_layout_layer(layout, 0, 0, &views[0]);
    (void)kvbm_layout_block(layout, c->num_blocks - 1, &views[0]);
}

/* @bytes: the layout's source, or NULL. */
static void check_written(const struct kvbm_layout *layout, const uint8_t *bytes, size_t len)
{
    struct kvbm_layout *back = NULL;
    size_t needed;
    uint8_t *again;

    REQUIRE(kvbm_layout_serialise(layout, NULL, 0, &needed) == -ENOSPC);
    again = malloc(needed);
    REQUIRE(again && kvbm_layout_serialise(layout, again, needed, NULL) == (long)needed);
    REQUIRE(!bytes || (needed == len && memcmp(again, bytes, len) == 0));
    REQUIRE(kvbm_layout_deserialise(again, needed, &back) == 0);
    REQUIRE(memcmp(kvbm_layout_get_shape(back), kvbm_layout_get_shape(layout),
                   sizeof(struct kvbm_layout_shape)) == 0);
    kvbm_layout_destroy(back);
    free(again);
}

static void take_config(const uint8_t *data, size_t size)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = KVBM_STORAGE_NULL};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_config c = {0};
    struct kvbm_layout_shape shape;
    struct kvbm_layout *layout = NULL;
    int rc;

    memcpy((char *)&c + sizeof(c.size), data, KV_MIN(size, sizeof(c) - sizeof(c.size)));
    c.size = sizeof(c);
    rc = kvbm_layout_compute(&c, &shape);
    REQUIRE(rc == 0 || rc == -EINVAL || rc == -EOVERFLOW);
    if (rc < 0 || shape.n_storages > 64)
        return;
    REQUIRE(kvbm_layout_allocate(&c, &allocator, &layout) == 0);
    for (uint32_t i = 0; i < shape.n_storages; i++) {
        struct kvbm_storage *storage = kvbm_layout_storage(layout, i);
        uint64_t end = kvbm_storage_addr(storage) + kvbm_storage_bytes(storage);
        struct kvbm_view last;

        REQUIRE(kvbm_layout_region(layout, c.num_blocks - 1,
                                   shape.n_storages == 1 ? c.num_layers - 1 : i, c.outer_dim - 1,
                                   &last) == 0);
        REQUIRE(last.addr >= kvbm_storage_addr(storage) && last.addr + last.len <= end);
    }
    check_regions(layout);
    check_written(layout, NULL, 0);
    kvbm_layout_destroy(layout);
}

static void take_descriptor(const uint8_t *data, size_t size)
{
    struct kvbm_layout *layout = NULL;
    int rc = kvbm_layout_deserialise(data, size, &layout);

    REQUIRE(rc == 0 || rc == -EPROTO || rc == -EPROTONOSUPPORT);
    if (rc < 0)
        return;
    check_regions(layout);
    check_written(layout, data, size);
    kvbm_layout_destroy(layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy;
    uint64_t sum;

    kv_log_set_level(KV_LOG_ERROR); /* each refusal gives its reason */
    if (!size)
        return 0;
    if (data[0] % 2 == 0) {
        take_config(data + 1, size - 1);
        return 0;
    }
    size--;
    copy = malloc(size ? size : 1); /* of exactly this size, for the sanitizer */
    REQUIRE(copy);
    memcpy(copy, data + 1, size);
    take_descriptor(copy, size);
    if (size >= 24) { /* with a correct length and checksum */
        for (int i = 0; i < 4; i++)
            copy[12 + i] = (uint8_t)(size >> 8 * i);
        sum = kv_xxh64(copy, size - 8, 0);
        memcpy(copy + size - 8, &sum, 8);
        take_descriptor(copy, size);
    }
    free(copy);
    return 0;
}
