// SPDX-License-Identifier: Apache-2.0
/* Pieces for the copy engines. A call costs some microseconds, in which a GPU copies 100 KiB or
 * more, so pieces are collected and queued together (cuMemcpyBatchAsync, CUDA 12.8). CUDA 13
 * changed the call's arguments, under the same name in cuda.h. In the library the two forms have
 * different symbols, and each symbol keeps its arguments. */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "tier/transfer/cuda.h"

#define CUDA_INVALID_VALUE 1
#define CUDA_OUT_OF_MEMORY 2
#define CUDA_NOT_SUPPORTED 801
#define SOURCE_IN_STREAM_ORDER 1 /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */

struct tier_cuda_calls tier_cuda_calls;

static const struct {
    const char *name;
    void *slot;
} symbols[] =
    {
        {"cuStreamCreate", &tier_cuda_calls.stream_create},
        {"cuStreamDestroy_v2", &tier_cuda_calls.stream_destroy},
        {"cuStreamSynchronize", &tier_cuda_calls.stream_sync},
        {"cuMemcpyAsync", &tier_cuda_calls.copy},
        {"cuEventCreate", &tier_cuda_calls.event_create},
        {"cuEventDestroy_v2", &tier_cuda_calls.event_destroy},
        {"cuEventRecord", &tier_cuda_calls.event_record},
        {"cuEventQuery", &tier_cuda_calls.event_query},
        {"cuEventSynchronize", &tier_cuda_calls.event_sync},
},
  newer[] = {
      {"cuMemcpyBatchAsync_v2", &tier_cuda_calls.batch},
      {"cuMemcpyBatchAsync", &tier_cuda_calls.batch_12},
};

static bool available; /* written once */

static bool find(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);

    memcpy(slot, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    for (size_t i = 0; library && i < KV_COUNT(symbols); i++) {
        if (!find(library, symbols[i].name, symbols[i].slot)) {
            kv_log_warn("kvbm", "the CUDA driver is too old", "missing=%s", symbols[i].name);
            return;
        }
    }
    for (size_t i = 0; library && i < KV_COUNT(newer); i++)
        find(library, newer[i].name, newer[i].slot);
    available = library != NULL; /* stays loaded, as in bm/storage/cuda.c */
}

bool tier_cuda_usable(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return available;
}

bool tier_cuda_batches(void)
{
    return tier_cuda_usable() && (tier_cuda_calls.batch || tier_cuda_calls.batch_12);
}

int tier_cuda_check(const char *call, tier_cuda_result code)
{
    static struct kv_log_rate rate;

    if (code == 0)
        return 0;
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "CUDA call failed", "call=%s code=%d", call, code);
    return code == CUDA_OUT_OF_MEMORY ? -ENOMEM : -EIO;
}

/* ---- pieces ---- */

#define BATCH 128 /* 8 MiB of 64 KiB pieces */

struct batch {
    uint64_t to[BATCH], from[BATCH];
    size_t len[BATCH];
    size_t n;
};

static tier_cuda_result call_batch(struct batch *b, void *stream)
{
    struct tier_cuda_attributes attributes = {.source_order = SOURCE_IN_STREAM_ORDER};
    size_t first = 0, failed = 0;

    if (tier_cuda_calls.batch)
        return tier_cuda_calls.batch(b->to, b->from, b->len, b->n, &attributes, &first, 1, stream);
    return tier_cuda_calls.batch_12(b->to, b->from, b->len, b->n, &attributes, &first, 1, &failed,
                                    stream);
}

/* True for errors that copying one by one may avoid: a driver may refuse these addresses in one
 * batch. */
static bool refused(tier_cuda_result code)
{
    return code == CUDA_INVALID_VALUE || code == CUDA_NOT_SUPPORTED;
}

/* Queue a batch; if the driver refuses it, queue each piece. Pieces queued before the refusal are
 * queued twice, which copies the same bytes to the same place. */
static int put_batch(struct batch *b, void *stream, bool *single)
{
    int err = 0;

    if (b->n > 1 && !*single) {
        tier_cuda_result code = call_batch(b, stream);

        if (!refused(code))
            return tier_cuda_check("cuMemcpyBatchAsync", code);
        kv_log_info("kvbm", "the driver refuses batches of copies: one by one from now on",
                    "code=%d", code);
        *single = true;
    }
    for (size_t i = 0; err == 0 && i < b->n; i++)
        err = tier_cuda_check("cuMemcpyAsync",
                              tier_cuda_calls.copy(b->to[i], b->from[i], b->len[i], stream));
    return err;
}

int tier_cuda_copy_pieces(struct tier_chunk *chunk, void *stream, bool *single)
{
    bool can = tier_cuda_batches() && chunk->job->plan.reached;
    bool never = true, *alone = can ? single : &never;
    struct batch batch;
    struct tier_walk walk;
    struct tier_piece piece;
    int err = 0;

    batch.n = 0;
    tier_walk_begin(&walk, chunk, 0);
    while (err == 0 && tier_walk_next(&walk, &piece)) {
        batch.to[batch.n] = piece.dst;
        batch.from[batch.n] = piece.src;
        batch.len[batch.n++] = (size_t)piece.len;
        chunk->pieces++;
        if (batch.n == BATCH) {
            err = put_batch(&batch, stream, alone);
            batch.n = 0;
        }
    }
    return err < 0 ? err : put_batch(&batch, stream, alone);
}
