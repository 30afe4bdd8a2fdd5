// SPDX-License-Identifier: Apache-2.0
/* A llama.cpp state, or other bytes: for any input the chunks put together are the object. */
#include <stdlib.h>
#include <string.h>

#include "store/object/cut.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct reading {
    const uint8_t *data;
    size_t len, at, step;
};

static int64_t read_some(void *arg, void *buf, size_t cap)
{
    struct reading *r = arg;
    size_t n = KV_MIN(KV_MIN(cap, r->step), r->len - r->at);

    memcpy(buf, r->data + r->at, n);
    r->at += n;
    return (int64_t)n;
}

static void unweave(const struct kvs_manifest *m, uint8_t *all)
{
    for (size_t i = 0; i < m->n_weaves; i++) {
        const struct kvs_weave *w = &m->weaves[i];
        size_t len = kvs_weave_region(w);
        uint8_t *plain = malloc(len);

        for (uint32_t j = 0; j < w->n; j++) {
            kvs_weave_out_of(w, all + w->offset + j * len, plain);
            memcpy(all + w->offset + j * len, plain, len);
        }
        free(plain);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvs_save_opts opts = {.size = sizeof(opts),
                                 .format = size % 2 ? KVS_FORMAT_LLAMA : KVS_FORMAT_AUTO,
                                 .chunk_bytes = 4096,
                                 .chunk_tokens = 4};
    struct reading reading = {.data = data, .len = size, .step = 1 + size % 1000};
    uint8_t *all = malloc(size + 1);
    struct kvs_manifest m = {0};
    struct kvs_cutter c;
    const uint8_t *chunk;
    size_t at = 0, len;
    int rc;

    if (kvs_cutter_init(&c, &opts, read_some, &reading))
        abort();
    while ((rc = kvs_cutter_next(&c, &m, &chunk, &len)) == 1) {
        if (!len || len > size - at)
            abort();
        memcpy(all + at, chunk, len);
        at += len;
    }
    unweave(&m, all);
    if (c.parsed > size || (c.parsed && c.format != KVS_FORMAT_LLAMA))
        abort();
    if (rc || at != size || memcmp(all, data, size) != 0)
        abort();
    kvs_cutter_fini(&c);
    free(m.weaves);
    free(all);
    return 0;
}
