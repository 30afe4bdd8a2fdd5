// SPDX-License-Identifier: Apache-2.0
/* The event reader, on two payloads one after the other, so that its memory of the first is
 * exercised too. For any input a batch's counts agree with each other and all its memory can be
 * read. */
#include <string.h>

#include "event/reader/reader.h"
#include "require.h"

static uint64_t sum; /* keeps the reading of results alive */

/* Ranks below 64 whose stores showed a main group: none of their windows' stores has places then. */
static uint64_t with_main;

static void check_window(const struct kve_op *op, enum kve_source_kind kind)
{
    uint64_t rank = op->rank < 64 ? UINT64_C(1) << op->rank : 0;

    if (op->type != KVE_OP_STORE)
        return;
    REQUIRE(kind != KVE_SOURCE_WINDOW || !(with_main & rank));
    if (kind == KVE_SOURCE_MAIN)
        with_main |= rank;
}

static void check_op(const struct kve_reader *reader, const struct kve_op *op)
{
    struct kve_source source;

    REQUIRE(kve_reader_source(reader, op->source, &source) == 0);
    REQUIRE((op->source == 0) == (source.kind == KVE_SOURCE_MAIN));
    REQUIRE(source.kind != KVE_SOURCE_WINDOW || (source.need && source.stride));
    check_window(op, source.kind);
    REQUIRE(source.parts >= 1 && source.parts <= KVE_MAX_PARTS);
    REQUIRE(op->lookahead < 32 && (op->type == KVE_OP_STORE || source.parts > 1 || !op->lookahead));
    REQUIRE((op->type == KVE_OP_CLEAR) == (op->tiers != 0));
    REQUIRE(!op->remaining || op->type == KVE_OP_REMOVE);
    for (size_t i = 0; op->remaining && i < op->n; i++)
        sum += op->remaining[i];
    REQUIRE((unsigned)op->tier < KV_N_TIERS);
    REQUIRE((unsigned)op->type <= KVE_OP_CLEAR);
    REQUIRE(op->n > 0 || op->type == KVE_OP_CLEAR ||
            (op->type == KVE_OP_STORE_KNOWN && source.kind == KVE_SOURCE_WINDOW));
    REQUIRE(op->n == 0 || op->type != KVE_OP_CLEAR);
    for (size_t i = 0; i < op->n; i++)
        sum += op->type == KVE_OP_STORE ? op->blocks[i].hash + op->blocks[i].tokens_hash
                                        : op->hashes[i];
    if (op->type == KVE_OP_STORE && op->has_parent) {
        for (size_t i = 0; i < op->n; i++)
            REQUIRE(op->blocks[i].hash != op->parent);
    }
}

static void decode(struct kve_reader *reader, const uint8_t *data, size_t size)
{
    struct kve_batch batch;
    size_t blocks = 0, skipped = 0;
    int rc = kve_reader_decode(reader, data, size, &batch);

    REQUIRE(rc == 0 || rc == -71 /* EPROTO */);
    if (rc)
        return;
    for (size_t i = 0; i < batch.n_ops; i++) {
        check_op(reader, &batch.ops[i]);
        blocks += batch.ops[i].n;
    }
    for (int i = 0; i < KVE_N_SKIPS; i++)
        skipped += batch.skipped[i];
    REQUIRE(blocks == batch.n_blocks);
    REQUIRE(skipped <= batch.n_events);
    REQUIRE(batch.n_ops <= batch.n_events);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .max_events = 64, .max_salted = 32};
    struct kve_reader *reader;
    size_t split;

    if (size < 2)
        return 0;
    /* The first byte: the block size, whether groups are told, and where the first payload ends. */
    opts.block_size = 1 + (data[0] & 7);
    split = data[0] < 128 ? size - 1 : (size - 1) * (data[0] & 127) / 127;
    REQUIRE(kve_reader_create(&opts, &reader) == 0);
    if (data[0] & 8) {
        const struct kve_told_group groups[] = {
            {.group = KVE_ANY_GROUP, .kind = KVE_KIND_CHUNKED, .chunk = 12 * opts.block_size},
            {.group = 1, .kind = KVE_KIND_SLIDING, .window = 9, .block_size = 2}};

        for (size_t i = 0; i < KV_COUNT(groups); i++)
            REQUIRE(!kve_told_add(&reader->sources.told, &groups[i]));
    }
    with_main = 0;
    decode(reader, data + 1, split);
    decode(reader, data + 1 + split, size - 1 - split);
    decode(reader, data + 1, size - 1);
    kve_reader_destroy(reader);
    return 0;
}
