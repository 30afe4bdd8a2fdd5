// SPDX-License-Identifier: Apache-2.0
/*
 * Keep blocks in a volume of a program's own choice, here a directory: register it, put, register it
 * anew as another process would, get. What doesn't verify any more is a miss.
 *
 *     cc -std=gnu11 kvbm_volume.c $(pkg-config --cflags --libs kvbm)
 *     ./kvbm_volume /nvme/kv
 */
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

enum { N = 4, TIMEOUT_MS = 10000 };

/* The memory of block @i, whose number is one of the layout's. */
static struct iovec memory_of(const struct kvbm_layout *layout, uint32_t i)
{
    struct kvbm_view view;

    if (kvbm_layout_block(layout, i, &view) < 0)
        abort();
    return (struct iovec){(void *)(uintptr_t)view.addr, (size_t)view.len};
}

static int is_equal(struct iovec a, struct iovec b)
{
    return a.iov_len > 0 && a.iov_len == b.iov_len &&
           memcmp(a.iov_base, b.iov_base, a.iov_len) == 0;
}

static int put_and_get(const struct kvbm_volume_opts *opts, const struct kvbm_layout *layout)
{
    const uint64_t keys[N] = {11, 12, 13, 14}; /* as kvbm_hash_tokens computes them */
    const uint32_t blocks[N] = {0, 1, 2, 3}, others[N] = {4, 5, 6, 7};
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_volume_io io = {
        .size = sizeof(io), .chain = &chain, .n = N, .layout = layout, .blocks = blocks};
    struct kvbm_volume_info info = KVBM_VOLUME_INFO_INIT;
    struct kvbm_volume *volume;
    long kept, found;

    for (uint32_t i = 0; i < 2 * N; i++) { /* nothing in the second half */
        struct iovec at = memory_of(layout, i);

        memset(at.iov_base, i < N ? (int)i + 1 : 0, at.iov_len);
    }
    if (kvbm_volume_register(opts, &volume) < 0)
        return -1;
    kept = kvbm_volume_put(volume, &io); /* durable when it returns */
    if (kvbm_volume_unregister(volume, TIMEOUT_MS) < 0 || kvbm_volume_register(opts, &volume) < 0)
        return -1;
    io.blocks = others;
    found = kvbm_volume_get(volume, &io);
    if (kvbm_volume_get_info(volume, &info) < 0)
        return -1;
    printf("%s: kept %ld of %d, got %ld; %llu of %llu blocks in use\n", info.name, kept, N, found,
           (unsigned long long)info.used, (unsigned long long)info.capacity);
    if (kvbm_volume_unregister(volume, TIMEOUT_MS) < 0 || kept != N || found != N)
        return -1;
    for (uint32_t i = 0; i < N; i++)
        if (!is_equal(memory_of(layout, i), memory_of(layout, N + i)))
            return -1;
    return 0;
}

int main(int argc, char **argv)
{
    const struct kvbm_storage_opts memory = {
        .size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_layout_config block = {.size = sizeof(block),
                                             .kind = KVBM_FULLY_CONTIGUOUS,
                                             .num_blocks = 2 * N,
                                             .num_layers = 2,
                                             .outer_dim = 2,
                                             .page_size = 16,
                                             .inner_dim = 64};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    char own[] = "/tmp/kvbm-volume-XXXXXX", command[64];
    struct kvbm_volume_opts opts = {.size = sizeof(opts),
                                    .name = "documents",
                                    .block = &block,
                                    .fingerprint = "model@revision",
                                    .file_bytes = 1 << 20};
    struct kvbm_layout *layout;
    int rc;

    opts.files = argc > 1 ? argv[1] : mkdtemp(own);
    if (!opts.files || kvbm_layout_allocate(&block, &allocator, &layout) < 0)
        return 1;
    rc = put_and_get(&opts, layout);
    kvbm_layout_destroy(layout);
    if (argc < 2) {
        snprintf(command, sizeof(command), "rm -r %s", own);
        rc = system(command) ? 1 : rc; /* NOLINT(cert-env33-c): fixed words */
    }
    return rc != 0;
}
