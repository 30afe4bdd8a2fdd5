// SPDX-License-Identifier: Apache-2.0
/* A peer's list of registrations: any bytes, arriving in pieces of any size. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json/json.h"
#include "indexer/replica/follow.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct source {
    const uint8_t *data;
    size_t left, piece;
};

static long refill(void *arg, char *data, size_t size)
{
    struct source *s = arg;
    size_t n = KV_MIN(KV_MIN(size, s->piece), s->left);

    memcpy(data, s->data, n);
    s->data += n;
    s->left -= n;
    return (long)n;
}

static int read_pieces(const uint8_t *data, size_t size, size_t piece, struct ki_peer_document *d)
{
    struct source source = {data, size, piece};
    char buffer[512];
    struct kv_json json;

    kv_json_init_stream(&json, buffer, sizeof(buffer), refill, &source);
    return ki_peer_document_read(d, &json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ki_peer_document a = {0}, b = {0};
    int rc = read_pieces(data, size, 512, &a);

    if (read_pieces(data, size, 1 + size % 7, &b) != rc || a.n != b.n)
        abort();
    for (size_t i = 0; rc == 0 && i < a.n; i++)
        if (!a.entries[i].removed &&
            (!a.entries[i].registration.endpoint || !a.entries[i].registration.model ||
             !a.entries[i].registration.version))
            abort();
    ki_peer_document_fini(&a);
    ki_peer_document_fini(&b);
    return 0;
}
