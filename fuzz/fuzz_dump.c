// SPDX-License-Identifier: Apache-2.0
/* A peer's dump: any bytes, arriving in pieces of any size. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json/json.h"
#include "indexer/replica/dump_reader.h"

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

static int read_pieces(const uint8_t *data, size_t size, size_t piece,
                       struct ki_dump_reader *reader)
{
    struct source source = {data, size, piece};
    char buffer[16384]; /* a packed event of any size must fit */
    struct kv_json json;

    kv_json_init_stream(&json, buffer, sizeof(buffer), refill, &source);
    return ki_dump_read(reader, &json);
}

/* True when both dumps have the same streams for the holders. */
static bool same_marks(const struct ki_dumped_model *a, const struct ki_dumped_model *b)
{
    const struct ki_mark *x = (const struct ki_mark *)a->marks.data;
    const struct ki_mark *y = (const struct ki_mark *)b->marks.data;

    if (a->marks.len != b->marks.len || a->n_snapshots != b->n_snapshots)
        return false;
    for (size_t i = 0; i < a->marks.len / sizeof(*x); i++)
        if (x[i].has_position != y[i].has_position || x[i].sequence != y[i].sequence ||
            x[i].torn != y[i].torn)
            return false;
    for (size_t i = 1; i < a->n_snapshots; i++) /* one per stream */
        if (ki_snapshot_compare(&a->snapshots[i - 1], &a->snapshots[i]) >= 0)
            return false;
    for (size_t i = 0; i < a->n_snapshots; i++)
        if (a->snapshots[i]->state.reasons != b->snapshots[i]->state.reasons ||
            a->snapshots[i]->ranges.len != b->snapshots[i]->ranges.len)
            return false;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ki_dump_reader a = {.max_bytes = 64u << 20}, b = {.max_bytes = 64u << 20};
    int rc = read_pieces(data, size, 512, &a);

    /* The sizes of the pieces must not matter. */
    if (read_pieces(data, size, 1 + size % 7, &b) != rc || a.n != b.n || a.events != b.events ||
        a.blocks != b.blocks || a.orphans != b.orphans)
        abort();
    for (size_t i = 0; !rc && i < a.n; i++)
        if (!same_marks(&a.models[i], &b.models[i]))
            abort();
    ki_dump_reader_fini(&a);
    ki_dump_reader_fini(&b);
    return 0;
}
