// SPDX-License-Identifier: Apache-2.0
/* The JSON reader. It accepts exactly the RFC's grammar; a stream in odd pieces gives the same as
 * one buffer; reading a whole array gives the same as reading its items. */
#include "../tests/base/json_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void walk_one(const uint8_t *data, size_t size, enum walk walk, struct kv_buf *out)
{
    struct kv_json j;

    kv_buf_clear(out);
    kv_json_init(&j, data, size);
    walk_document(&j, walk, out);
}

static void walk_stream(const uint8_t *data, size_t size, enum walk walk, size_t piece,
                        struct kv_buf *out)
{
    struct pieces pieces = {(const char *)data, size, piece, (uint32_t)size};
    struct kv_json j;
    char *buf = malloc(size + 1);

    require(buf != NULL);
    kv_buf_clear(out);
    kv_json_init_stream(&j, buf, size + 1, next_piece, &pieces);
    walk_document(&j, walk, out);
    free(buf);
}

static void same(const struct kv_buf *a, const struct kv_buf *b)
{
    require(a->error == 0 && b->error == 0);
    require(a->len == b->len && memcmp(a->data, b->data, a->len) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_buf walks[N_WALKS] = {KV_BUF_INIT}, stream = KV_BUF_INIT;
    struct kv_json j;

    kv_json_init(&j, data, size);
    kv_json_skip(&j);
    require((kv_json_finish(&j) == 0) == model_accepts(data, size));
    for (int walk = 0; walk < N_WALKS; walk++) {
        walk_one(data, size, (enum walk)walk, &walks[walk]);
        walk_stream(data, size, (enum walk)walk, size ? data[0] % 17 : 0, &stream);
        same(&stream, &walks[walk]);
    }
    same(&walks[WALK_ITEMS], &walks[WALK_U32S]);
    same(&walks[WALK_HASHES], &walks[WALK_BITS64S]);
    for (int walk = 0; walk < N_WALKS; walk++)
        kv_buf_fini(&walks[walk]);
    kv_buf_fini(&stream);
    return 0;
}
