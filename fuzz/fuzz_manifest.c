// SPDX-License-Identifier: Apache-2.0
/* A snapshot's manifest: any bytes, and any bytes under a correct checksum. */
#include <stdlib.h>
#include <string.h>

#include "store/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An accepted manifest must encode to one that reads the same. */
static void check(const uint8_t *data, size_t size)
{
    struct kvs_manifest *m, *again;
    struct kv_buf bytes = KV_BUF_INIT;

    if (kvs_manifest_decode(data, size, &m))
        return;
    if (kvs_manifest_encode(m, &bytes) || kvs_manifest_decode(bytes.data, bytes.len, &again))
        abort();
    if (again->bytes != m->bytes || again->n_chunks != m->n_chunks ||
        again->n_weaves != m->n_weaves || strcmp(again->fingerprint, m->fingerprint) != 0)
        abort();
    kvs_manifest_free(again);
    kvs_manifest_free(m);
    kv_buf_fini(&bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *signed_ = malloc(size + 16);

    check(data, size);
    memcpy(signed_, data, size);
    kvs_chunk_key(data, size, signed_ + size);
    check(signed_, size + 16);
    free(signed_);
    return 0;
}
