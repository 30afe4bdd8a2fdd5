// SPDX-License-Identifier: Apache-2.0
/* A snapshot's manifest: any bytes, and any bytes under a correct checksum. */
#include <stdlib.h>
#include <string.h>

#include "base/file/own_manifest.h"
#include "store/object/manifest.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Backends find the chunks of an accepted manifest, and never read outside of any. */
static void check_chunks(const uint8_t *data, size_t size, const struct kvs_manifest *m)
{
    struct kv_own_chunks chunks;
    bool found = kv_own_manifest_chunks(data, size, &chunks);

    if (found && (chunks.first < data || chunks.n > size / KV_OWN_CHUNK ||
                  chunks.first + chunks.n * KV_OWN_CHUNK + KV_OWN_SUM > data + size))
        abort();
    if (!m)
        return;
    if (!found || chunks.n != m->n_chunks)
        abort();
    for (size_t i = 0; i < chunks.n; i++)
        if (memcmp(chunks.first + i * KV_OWN_CHUNK, m->chunks[i].key, KV_OWN_KEY) != 0)
            abort();
}

/* An accepted manifest must encode to one that reads the same. */
static void check(const uint8_t *data, size_t size)
{
    struct kvs_manifest *m = NULL, *again;
    struct kv_buf bytes = KV_BUF_INIT;
    int rc = kvs_manifest_decode(data, size, &m);

    check_chunks(data, size, rc ? NULL : m);
    if (rc)
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
