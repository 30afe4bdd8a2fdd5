// SPDX-License-Identifier: Apache-2.0
#include "kvx/compile.h"
#include "kvx/compile_parts.h"
#include "kvx/validate.h"

static kvx_status_t write_tensor(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                 int kv, struct kvx_plan *p)
{
    const kvx_tensor_desc_t *io = kv ? &write->io.value : &write->io.key;
    const kvx_tensor_desc_t *paged = kv ? &cache->v : &cache->k;

    p->side[kv].src = kvx_io_map(io, p);
    p->side[kv].dst = kvx_cache_map(cache, paged);
    p->layer[0].src[kv] = io->data;
    p->layer[0].dst[kv] = paged->data;
    if (!p->convert || !kvx_is_fp8(p->dst_dtype))
        return KVX_STATUS_OK;
    return kvx_scale_map(kv ? &write->v_scale_desc : &write->k_scale_desc,
                         kv ? write->v_scale : write->k_scale, cache, &p->side[kv].dst_scale,
                         &p->layer[0].dst_scale[kv]);
}

kvx_status_t kvx_compile_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                               const kvx_options_t *options, struct kvx_plan *ret)
{
    struct kvx_hull caches[2], reads[3];
    int64_t shape[3];

    if (!cache || !write || write->size < sizeof(*write))
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(kvx_check_cache(cache, caches));
    TRY(kvx_check_io(&write->io, cache));
    shape[0] = write->io.num_tokens;
    shape[1] = cache->num_kv_heads;
    shape[2] = cache->head_dim;
    TRY(kvx_check_io_tensor(&write->io.key, 3, shape, false, &reads[0]));
    TRY(kvx_check_io_tensor(&write->io.value, 3, shape, false, &reads[1]));
    TRY(kvx_check_slots(&write->slots, write->io.num_tokens));
    TRY(kvx_array_hull(write->slots.slots, write->slots.token_count,
                       kvx_index_size(write->slots.dtype), &reads[2]));
    TRY(kvx_check_apart(reads, 3, caches));

    kvx_plan_start(ret, KVX_OP_WRITE, cache, options);
    ret->src_dtype = write->io.key.dtype;
    ret->dst_dtype = cache->k.dtype;
    ret->convert = ret->src_dtype != ret->dst_dtype;
    ret->n_tokens = write->io.num_tokens;
    ret->slots = write->slots.slots;
    ret->slots_wide = write->slots.dtype == KVX_DTYPE_S64;
    ret->invalid_slot = write->slots.invalid_slot;
    ret->n_slots = (uint64_t)cache->num_blocks * cache->block_size;
    TRY(write_tensor(cache, write, 0, ret));
    TRY(write_tensor(cache, write, 1, ret));
    return kvx_check_two(ret);
}
