// SPDX-License-Identifier: Apache-2.0
/*
 * Bytes that a store may give back to libkvasir_llama, and states that libllama may give it: chunks
 * under any key, layouts, states of both forms. What a state is taken apart into must make it again.
 */
#include "base/core/le.h"
#include "base/hash/prefix_block.h"
#include "llama/shape.h"
#include "require.h"

static void check_chunk(const uint8_t *data, size_t size)
{
    struct kv_prefix_parts parts;
    uint64_t sum = 0;

    if (size < KV_PREFIX_KEY || !kv_prefix_is_key(data, KV_PREFIX_KEY) ||
        kv_prefix_check(data, data + KV_PREFIX_KEY, size - KV_PREFIX_KEY) < 0 ||
        data[3] != KV_PREFIX_SNAPSHOT)
        return;
    REQUIRE(kv_prefix_parts(data + KV_PREFIX_KEY, size - KV_PREFIX_KEY, &parts) == 0);
    for (size_t i = 0; i < parts.n; i++)
        sum += kv_get_le(parts.first + i * KV_PREFIX_PART_REF + KV_PREFIX_HASH, 4);
    REQUIRE(sum == parts.state_bytes);
}

/* Bytes that begin with a cache tell one identity, and cells that are there. */
static void check_whole(const uint8_t *data, size_t size, enum kvl_form form)
{
    struct kv_buf identity = KV_BUF_INIT;
    uint32_t cells;
    int rc = kvl_whole_identity(data, size, form, &identity, &cells);

    REQUIRE(rc == 0 || rc == -ESTALE);
    REQUIRE((cells != 0) == (identity.len != 0));
    REQUIRE(rc == 0 || !cells);
    REQUIRE((uint64_t)cells * 12 <= size);
    kv_buf_fini(&identity);
}

/* A state that can be cut, put together again from its rows, is the same but for the sequence. */
static void check_state(const uint8_t *data, size_t size, enum kvl_form form)
{
    struct kvl_view is, made;
    struct kv_buf text = KV_BUF_INIT;
    struct kvl_shape again;

    if (kvl_view_parse(data, size, form, &is) < 0)
        return;
    kvl_shape_encode(&is.shape, &text);
    REQUIRE(!text.error);
    REQUIRE(kvl_shape_decode((uint8_t *)text.data, text.len, form, &again) == 0);
    REQUIRE(again.token_bytes == is.shape.token_bytes);
    REQUIRE(kvl_view_make(&again, is.n_cells, 0, &made) == 0);
    REQUIRE(made.len == is.len);
    for (size_t i = 0; i < kvl_shape_n_rows(&is.shape); i++)
        REQUIRE(made.rows[i] - made.cells == is.rows[i] - is.cells);
    kvl_shape_fini(&again);
    kvl_view_fini(&made, true);
    kvl_view_fini(&is, false);
    kv_buf_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvl_shape shape;

    check_chunk(data, size);
    check_state(data, size, KVL_FORM_SEQUENCE);
    check_state(data, size, KVL_FORM_CONTEXT);
    check_whole(data, size, KVL_FORM_SEQUENCE);
    check_whole(data, size, KVL_FORM_CONTEXT);
    kvl_streams_of(data, size);
    if (kvl_shape_decode(data, size, KVL_FORM_SEQUENCE, &shape) == 0)
        kvl_shape_fini(&shape);
    return 0;
}
