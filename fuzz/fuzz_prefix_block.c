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
    const struct kvl_shape *shape;
    struct kvl_shape again;

    if (kvl_view_parse(data, size, form, &is) < 0)
        return;
    kvl_shape_encode(&is.shape, &text);
    REQUIRE(!text.error);
    REQUIRE(kvl_shape_decode((uint8_t *)text.data, text.len, form, &again) == 0);
    REQUIRE(again.token_bytes == is.shape.token_bytes);
    made = (struct kvl_view){.n_cells = is.n_cells};
    shape = &again;
    REQUIRE(kvl_views_make(&shape, 1, 0, &made) == 0);
    REQUIRE(made.len == is.len);
    for (size_t i = 0; i < kvl_shape_n_rows(&is.shape); i++)
        REQUIRE(made.rows[i] - made.cells == is.rows[i] - is.cells);
    kvl_shape_fini(&again);
    kvl_view_fini(&made, true);
    kvl_view_fini(&is, false);
    kv_buf_fini(&text);
}

/* A pair of caches, or the tail of one, put together again, is as long. */
static void check_pair(const uint8_t *data, size_t size, enum kvl_form form, uint32_t first)
{
    struct kvl_view is[KVL_CACHES_MAX], made[KVL_CACHES_MAX];
    const struct kvl_shape *shapes[KVL_CACHES_MAX];

    if (kvl_pair_parse(data, size, form, first, is) < 0)
        return;
    REQUIRE(is[0].first == first);
    REQUIRE(is[1].first + is[1].n_cells == first + is[0].n_cells);
    for (size_t i = 0; i < KVL_CACHES_MAX; i++) {
        shapes[i] = &is[i].shape;
        made[i] = (struct kvl_view){.first = is[i].first, .n_cells = is[i].n_cells};
    }
    REQUIRE(kvl_views_make(shapes, KVL_CACHES_MAX, 0, made) == 0);
    REQUIRE(made[0].len == size);
    for (size_t i = 0; i < KVL_CACHES_MAX; i++)
        kvl_copy_cells(&made[i], &is[i], is[i].first, is[i].n_cells);
    kvl_views_fini(made, KVL_CACHES_MAX, true);
    kvl_views_fini(is, KVL_CACHES_MAX, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvl_shape shape;

    check_chunk(data, size);
    check_state(data, size, KVL_FORM_SEQUENCE);
    check_state(data, size, KVL_FORM_CONTEXT);
    for (uint32_t first = 0; first <= 64; first += 64) {
        check_pair(data, size, KVL_FORM_SEQUENCE, first);
        check_pair(data, size, KVL_FORM_CONTEXT, first);
    }
    check_whole(data, size, KVL_FORM_SEQUENCE);
    check_whole(data, size, KVL_FORM_CONTEXT);
    kvl_streams_of(data, size);
    if (kvl_shape_decode(data, size, KVL_FORM_SEQUENCE, &shape) == 0)
        kvl_shape_fini(&shape);
    return 0;
}
