// SPDX-License-Identifier: Apache-2.0
/*
 * Copies in the loop of an engine: its tensors, as its kernels know them, become a layout; a copier
 * moves blocks between them and a host tier; poll() tells when copies have ended.
 *
 *     cc -std=gnu11 kvbm_copy_loop.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <kvbm.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 64, LAYERS = 2, JOBS = 3, WAIT_MS = 60000 };

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static struct kvbm_layout *allocate(void)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS,
                                              .num_blocks = BLOCKS,
                                              .num_layers = LAYERS,
                                              .outer_dim = 2,
                                              .page_size = 16,
                                              .inner_dim = 128,
                                              .num_heads = 2,
                                              .dtype = KVX_DTYPE_BF16,
                                              .dtype_width_bytes = 2};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

/* Make a layout over the engine's tensors, which its kernels describe as one KVX cache a layer. */
static struct kvbm_layout *adopt(const struct kvbm_layout *tensors)
{
    kvx_cache_desc_t layers[LAYERS];
    const kvx_cache_desc_t *list[LAYERS];
    struct kvbm_layout *layout;

    for (uint32_t i = 0; i < LAYERS; i++) {
        must(kvbm_layout_to_kvx(tensors, i, &layers[i]), "to_kvx");
        list[i] = &layers[i];
    }
    must(kvbm_layout_from_kvx(list, LAYERS, &layout), "from_kvx");
    return layout;
}

static void unpin(void *arg)
{
    printf("%s: registration released\n", (const char *)arg);
}

static void describe(const struct kvbm_layout *layout)
{
    const struct kvbm_layout_shape *shape = kvbm_layout_get_shape(layout);
    const struct kvbm_storage *memory = kvbm_layout_storage(layout, 0);

    printf("%u storages of kind %d on device %llu, %llu bytes a block and layer\n",
           shape->n_storages, (int)kvbm_storage_get_kind(memory),
           (unsigned long long)kvbm_storage_device_id(memory),
           (unsigned long long)shape->block_stride);
}

/* Queue a copy of 8 blocks, tagged. Returns its id. */
static uint64_t copy(struct kvbm_copier *copier, const struct kvbm_layout *src,
                     const struct kvbm_layout *dst, uint32_t first, uint64_t tag)
{
    uint32_t blocks[8];
    const struct kvbm_transfer transfer = {.size = sizeof(transfer),
                                           .src = src,
                                           .dst = dst,
                                           .src_blocks = blocks,
                                           .dst_blocks = blocks,
                                           .n = 8,
                                           .tag = tag};
    int64_t id;

    for (uint32_t i = 0; i < 8; i++)
        blocks[i] = first + i;
    id = kvbm_copier_submit(copier, &transfer);
    must(id, "submit");
    return (uint64_t)id;
}

/* The engine's loop: sleep until copies have ended, then take them. Returns the blocks that came. */
static uint32_t take_all(struct kvbm_copier *copier)
{
    struct pollfd ended = {.fd = kvbm_copier_fd(copier), .events = POLLIN};
    struct kvbm_done done[JOBS];
    uint32_t n_ok = 0;

    must(ended.fd, "fd");
    for (long left = JOBS, n; left > 0; left -= n) {
        must(poll(&ended, 1, WAIT_MS) > 0 ? 0 : -ETIMEDOUT, "poll");
        n = kvbm_copier_poll(copier, done, JOBS);
        must(n, "poll");
        for (long i = 0; i < n; i++) {
            printf("copy %llu: %u of %u blocks, %s\n", (unsigned long long)done[i].tag,
                   done[i].n_ok, done[i].n, done[i].status ? strerror(-done[i].status) : "done");
            n_ok += done[i].n_ok;
        }
    }
    return n_ok;
}

int main(void)
{
    struct kvbm_layout *tensors = allocate(), *device = adopt(tensors), *host = allocate();
    struct kvbm_storage *memory = kvbm_layout_storage(host, 0);
    struct kvbm_copier_stats stats = KVBM_COPIER_STATS_INIT;
    struct kvbm_copier *copier;
    struct kvbm_view from, to;
    static char nic[] = "mlx5_0";
    uint64_t refused;
    uint32_t n_ok;

    describe(device);
    /* A user of registered memory ties the registration to it: destroy releases that first. */
    must(kvbm_storage_register(memory, nic, unpin, nic), "register");
    if (kvbm_storage_registration(memory, nic) != nic)
        return 1;

    must(kvbm_layout_layer(device, 3, 1, &from), "layer"); /* K and V of block 3 */
    memset((void *)(uintptr_t)from.addr, 7, from.len);
    must(kvbm_copier_create(NULL, &copier), "copier");
    (void)copy(copier, device, host, 0, 1);
    (void)copy(copier, device, host, 8, 2);
    refused = copy(copier, device, host, 16, 3);
    (void)kvbm_copier_cancel(copier, refused); /* its client has gone; -ENOENT: it has ended */
    n_ok = take_all(copier);
    must(kvbm_copier_get_stats(copier, &stats), "stats");
    printf("%llu jobs, %llu bytes\n", (unsigned long long)stats.submitted,
           (unsigned long long)stats.bytes);

    /* No transfer uses the memory any more: it may go. */
    must(kvbm_copier_stop(copier, WAIT_MS), "stop");
    kvbm_copier_destroy(copier);
    must(kvbm_layout_layer(host, 3, 1, &to), "layer");
    if (n_ok < 16 || to.len != from.len ||
        memcmp((const void *)(uintptr_t)to.addr, (const void *)(uintptr_t)from.addr, to.len) != 0)
        return 1;
    must(kvbm_storage_unregister(memory, nic), "unregister");
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(device);
    kvbm_layout_destroy(tensors);
    return 0;
}
