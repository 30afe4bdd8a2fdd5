// SPDX-License-Identifier: Apache-2.0
/* A backend with libkvx_cuda's interface, on host memory and one element at a time: the work of a
 * GPU's threads, with the same resolving functions. The matrix runs through it, so the plan and its
 * address arithmetic are tested without a GPU. KVX_MODEL=refuse makes it a library of another
 * version. */
#include <stdlib.h>
#include <string.h>

#include "kvx/backend.h"

static void move(const struct kvx_plan *p, uint32_t kv, const char *src, char *dst, const char *s,
                 const char *t)
{
    const struct kvx_map *from = &p->side[kv].src, *to = &p->side[kv].dst;

    for (uint32_t h = 0; h < p->n_heads; h++) {
        float src_scale = kvx_scale_at(s, &p->side[kv].src_scale, 0, h);
        float dst_scale = kvx_scale_at(t, &p->side[kv].dst_scale, 0, h);

        for (uint32_t d = 0; d < p->head_dim; d++) {
            const char *in = src + h * from->head + kvx_map_dim(from, d);
            char *out = dst + h * to->head + kvx_map_dim(to, d);

            if (p->convert)
                kvx_encode(p->dst_dtype, kvx_decode(p->src_dtype, in) * src_scale / dst_scale, out);
            else
                memcpy(out, in, kvx_float_size(p->src_dtype));
        }
    }
}

static void zero(const struct kvx_plan *p, uint32_t kv, char *dst)
{
    const struct kvx_map *to = &p->side[kv].dst;

    for (uint32_t h = 0; h < p->n_heads; h++) {
        for (uint32_t d = 0; d < p->head_dim; d++)
            memset(dst + h * to->head + kvx_map_dim(to, d), 0, kvx_float_size(p->dst_dtype));
    }
}

static const char *at_block(const char *scale, const struct kvx_scale_map *map, int64_t block)
{
    return scale ? scale + block * map->block : NULL;
}

static void write_token(const struct kvx_plan *p, uint32_t l, uint32_t kv, uint32_t token)
{
    const struct kvx_plan_side *side = &p->side[kv];
    const struct kvx_layer *layer = &p->layer[l];
    struct kvx_place place;
    enum kvx_row row = kvx_slot_place(p, token, &place);

    if (row == KVX_ROW_DROP && l == 0 && kv == 0 && p->dropped)
        ++*p->dropped;
    if (row == KVX_ROW_MOVE)
        move(p, kv, layer->src[kv] + kvx_map_row(&side->src, 0, 0, token, 0),
             layer->dst[kv] + kvx_map_row(&side->dst, place.block, 0, place.offset, 0), NULL,
             at_block(layer->dst_scale[kv], &side->dst_scale, place.block));
}

static void gather_token(const struct kvx_plan *p, uint32_t l, uint32_t kv, uint64_t index)
{
    const struct kvx_plan_side *side = &p->side[kv];
    const struct kvx_layer *layer = &p->layer[l];
    uint32_t pos = (uint32_t)(index % p->max_seq_len), w, s;
    struct kvx_place place;
    uint64_t start;
    enum kvx_row row = KVX_ROW_NONE;
    char *dst;

    index /= p->max_seq_len;
    w = (uint32_t)(index % p->n_beams);
    s = (uint32_t)(index / p->n_beams);
    dst = layer->dst[kv] + kvx_map_row(&side->dst, s, w, pos, 0);
    if (pos < kvx_sequence_length(p, s, &start))
        row = kvx_table_place(p, kv, s, w, pos, start, &place);
    if (row == KVX_ROW_DROP && l == 0 && p->dropped &&
        kvx_table_drop_counts(p, kv, s, w, pos, start))
        ++*p->dropped;
    if (row == KVX_ROW_MOVE)
        move(p, kv,
             (place.pool ? layer->src_pool : layer->src[kv]) +
                 kvx_map_row(&side->src, place.block, 0, place.offset, 0),
             dst, at_block(layer->src_scale[kv], &side->src_scale, place.block), NULL);
    else if (p->zero_padding)
        zero(p, kv, dst);
}

static void copy_pair(const struct kvx_plan *p, uint32_t l, uint32_t kv, uint32_t i)
{
    const struct kvx_plan_side *side = &p->side[kv];
    const struct kvx_layer *layer = &p->layer[l];
    int64_t src, dst;
    enum kvx_row row = kvx_pair_place(p, i, &src, &dst);

    if (row == KVX_ROW_DROP && l == 0 && kv == 0 && p->dropped)
        ++*p->dropped;
    for (uint32_t offset = 0; row == KVX_ROW_MOVE && offset < p->block_size.value; offset++)
        move(p, kv, layer->src[kv] + kvx_map_row(&side->src, src, 0, offset, 0),
             layer->dst[kv] + kvx_map_row(&side->dst, dst, 0, offset, 0),
             at_block(layer->src_scale[kv], &side->src_scale, src),
             at_block(layer->dst_scale[kv], &side->dst_scale, dst));
}

static kvx_status_t run(const struct kvx_plan *plan, void *stream)
{
    struct kvx_plan copy = *plan; /* as a kernel's argument is one */
    uint64_t n = copy.op == KVX_OP_WRITE ? copy.n_tokens
                 : copy.op == KVX_OP_GATHER
                     ? (uint64_t)copy.n_sequences * copy.n_beams * copy.max_seq_len
                     : copy.n_pairs;

    if (!copy.device || copy.size != sizeof(copy) || (stream && *(int *)stream != 42))
        return KVX_STATUS_INTERNAL_ERROR;
    for (uint32_t l = 0; l < copy.n_layers; l++) {
        for (uint64_t i = 0; i < 2 * n; i++) {
            if (copy.op == KVX_OP_WRITE)
                write_token(&copy, l, i & 1, (uint32_t)(i / 2));
            else if (copy.op == KVX_OP_GATHER)
                gather_token(&copy, l, i & 1, i / 2);
            else
                copy_pair(&copy, l, i & 1, (uint32_t)(i / 2));
        }
    }
    if (stream)
        ++*(int *)stream;
    return KVX_STATUS_OK;
}

const struct kvx_backend *kvx_backend_v1(void)
{
    static struct kvx_backend backend = {sizeof(backend), KVX_BACKEND_ABI, sizeof(struct kvx_plan),
                                         "model", run};
    const char *mode = getenv("KVX_MODEL");

    if (mode && strcmp(mode, "refuse") == 0)
        backend.plan_size--;
    return &backend;
}
