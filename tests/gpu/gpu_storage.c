// SPDX-License-Identifier: Apache-2.0
/* Storages in a GPU's memory and in host memory locked for it: initial contents, visibility of
 * writes to every stream, refusals, and the caller's device, which stays current. */
#include <errno.h>
#include <stdint.h>

#include "gpu.h"
#include "kvbm_layout.h"

enum { BYTES = (8 << 20) + 12345, ROUNDS = 50 }; /* rounds: KV_TEST_SCALE percent of them */

static struct kvbm_storage_opts options(enum kvbm_storage_kind kind, uint64_t bytes)
{
    return (struct kvbm_storage_opts){
        .size = sizeof(struct kvbm_storage_opts), .kind = kind, .bytes = bytes};
}

static void *address(const struct kvbm_storage *storage)
{
    return (void *)(uintptr_t)kvbm_storage_addr(storage);
}

static int all(const unsigned char *bytes, size_t n, unsigned char value)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != value)
            return 0;
    }
    return 1;
}

/* Pieces of any size, written and read beside an array of the host's. */
static void check_contents(struct kvbm_storage *storage)
{
    struct dice d = {(uint64_t)kvbm_storage_get_kind(storage)};
    unsigned char *model = calloc(1, BYTES), *got = malloc(BYTES);

    MUST(model && got);
    MUST(kvbm_storage_read(storage, 0, got, BYTES) == 0 && all(got, BYTES, 0));
    for (int i = 0; i < 40; i++) {
        size_t at = (size_t)(roll(&d) % BYTES), len = (size_t)(roll(&d) % (BYTES - at));

        random_bytes(&d, (char *)model + at, len);
        MUST(kvbm_storage_write(storage, at, model + at, len) == 0);
        at = (size_t)(roll(&d) % BYTES);
        MUST(kvbm_storage_read(storage, at, got, BYTES - at) == 0);
        MUST(memcmp(got, model + at, BYTES - at) == 0);
    }
    MUST(kvbm_storage_read(storage, BYTES, got, 1) == -ERANGE);
    free(model);
    free(got);
}

/*
 * Memory that held something else a moment ago comes zeroed, and small writes are there when they
 * return: seen by a stream that doesn't wait for the default one.
 */
static void check_other_streams(void)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DEVICE, (uint64_t)64 << 20);
    unsigned char *got = NULL, mark[512];
    int rounds = (int)(ROUNDS * case_setting("KV_TEST_SCALE", 100) / 100) + 1;
    cudaStream_t other;
    void *dirty;

    GPU(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    GPU(cudaHostAlloc((void **)&got, (size_t)opts.bytes, 0));
    for (int i = 0; i < rounds; i++) {
        struct kvbm_storage *storage;

        GPU(cudaMalloc(&dirty, (size_t)opts.bytes));
        GPU(cudaMemset(dirty, 0xAA, (size_t)opts.bytes));
        GPU(cudaDeviceSynchronize());
        GPU(cudaFree(dirty));
        MUST(kvbm_storage_create(&opts, &storage) == 0);
        GPU(cudaMemcpyAsync(got, (char *)address(storage) + opts.bytes - 4096, 4096,
                            cudaMemcpyDeviceToHost, other));
        GPU(cudaStreamSynchronize(other));
        MUST(all(got, 4096, 0));
        memset(mark, i + 1, sizeof(mark));
        MUST(kvbm_storage_write(storage, 7, mark, sizeof(mark)) == 0);
        GPU(cudaMemcpyAsync(got, (char *)address(storage) + 7, sizeof(mark), cudaMemcpyDeviceToHost,
                            other));
        GPU(cudaStreamSynchronize(other));
        MUST(all(got, sizeof(mark), (unsigned char)(i + 1)));
        kvbm_storage_destroy(storage);
    }
    GPU(cudaFreeHost(got));
    GPU(cudaStreamDestroy(other));
}

static void check_device(void)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DEVICE, BYTES);
    struct cudaPointerAttributes what;
    struct kvbm_storage *storage = NULL, *borrowed = NULL;

    MUST(kvbm_storage_create(&opts, &storage) == 0);
    GPU(cudaPointerGetAttributes(&what, address(storage)));
    MUST(what.type == cudaMemoryTypeDevice && what.device == 0);
    MUST(!kvbm_storage_host_memory(storage));
    check_contents(storage);
    opts = options(KVBM_STORAGE_EXTERNAL, BYTES); /* an engine's tensor */
    opts.of = KVBM_STORAGE_DEVICE;
    opts.memory = address(storage);
    MUST(kvbm_storage_create(&opts, &borrowed) == 0);
    GPU(cudaMemset(address(storage), 0, BYTES));
    GPU(cudaDeviceSynchronize());
    check_contents(borrowed);
    kvbm_storage_destroy(borrowed);
    GPU(cudaPointerGetAttributes(&what, address(storage))); /* and nothing of it was freed */
    MUST(what.type == cudaMemoryTypeDevice);
    kvbm_storage_destroy(storage);
}

static void check_pinned(void)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_PINNED, BYTES);
    struct cudaPointerAttributes what;
    struct kvbm_storage *storage = NULL;

    MUST(kvbm_storage_create(&opts, &storage) == 0);
    GPU(cudaPointerGetAttributes(&what, address(storage)));
    MUST(what.type == cudaMemoryTypeHost);
    MUST(kvbm_storage_host_memory(storage) == address(storage));
    check_contents(storage);
    kvbm_storage_destroy(storage);
}

static void check_refusals(void)
{
    static const enum kvbm_storage_kind kinds[] = {KVBM_STORAGE_DEVICE, KVBM_STORAGE_PINNED};

    for (int i = 0; i < 2; i++) {
        struct kvbm_storage_opts opts = options(kinds[i], (uint64_t)1 << 50);
        struct kvbm_storage *storage = NULL;

        MUST(kvbm_storage_create(&opts, &storage) == -ENOMEM && !storage);
        opts.bytes = 4096;
        opts.device_id = 63;
        MUST(kvbm_storage_create(&opts, &storage) == -ENODEV && !storage);
        opts.device_id = UINT32_MAX;
        MUST(kvbm_storage_create(&opts, &storage) == -ENODEV && !storage);
    }
}

int main(void)
{
    int device = -1;

    gpu_need();
    GPU(cudaSetDevice(0));
    check_device();
    check_other_streams();
    check_pinned();
    check_refusals();
    GPU(cudaGetDevice(&device));
    MUST(device == 0);
    GPU(cudaGetLastError());
    printf("device and pinned storages: ok\n");
    return 0;
}
