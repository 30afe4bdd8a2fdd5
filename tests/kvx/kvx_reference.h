// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_reference.h: a naive KVX, element by element, after the specification's text.
 *
 * Shares no code with src/kvx: addresses come from the specification's formulas, conversions from
 * the definition of rounding (in double precision). Descriptors are taken to be well-formed; what
 * their arrays contain is checked as docs/kvx.md says.
 */
#ifndef KVX_REFERENCE_H
#define KVX_REFERENCE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvx_abi.h"
#include "kvx_ext.h"

/* --------------------------------------------------------------------------------------------- */
/* Numbers */

struct ref_format {
    int mantissa, min_exponent; /* bits; of normal numbers */
    double max;
    bool saturates;
    unsigned bytes;
};

static inline struct ref_format ref_format(kvx_dtype_t dtype)
{
    switch (dtype) {
    case KVX_DTYPE_F16:
        return (struct ref_format){10, -14, 65504, false, 2};
    case KVX_DTYPE_BF16:
        return (struct ref_format){7, -126, 0x1.fep127, false, 2};
    case KVX_DTYPE_F32:
        return (struct ref_format){23, -126, 0x1.fffffep127, false, 4};
    case KVX_DTYPE_F8_E4M3:
        return (struct ref_format){3, -6, 448, true, 1};
    case KVX_DTYPE_F8_E5M2:
        return (struct ref_format){2, -14, 57344, true, 1};
    default:
        abort();
    }
}

static inline uint32_t ref_load(const void *from, unsigned bytes)
{
    uint32_t bits = 0;

    memcpy(&bits, from, bytes);
    return bits;
}

static inline double ref_decode(kvx_dtype_t dtype, uint32_t bits)
{
    struct ref_format f = ref_format(dtype);
    int width = (int)f.bytes * 8, exponent_bits = width - 1 - f.mantissa;
    uint32_t sign = bits >> (width - 1) & 1, mantissa = bits & ((1U << f.mantissa) - 1);
    uint32_t exponent = bits >> f.mantissa & ((1U << exponent_bits) - 1);
    uint32_t top = (1U << exponent_bits) - 1;
    double value;

    if (dtype == KVX_DTYPE_F8_E4M3 ? exponent == top && mantissa == 7 : exponent == top && mantissa)
        return NAN;
    if (exponent == top && dtype != KVX_DTYPE_F8_E4M3)
        value = INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, f.min_exponent - f.mantissa);
    else
        value =
            ldexp(mantissa + (1U << f.mantissa), f.min_exponent - f.mantissa + (int)exponent - 1);
    return sign ? -value : value;
}

/* @a (positive, finite) in units of @quantum, to the nearest integer, ties to even. */
static inline uint64_t ref_round(double a, double quantum)
{
    double units = a / quantum;
    uint64_t n = (uint64_t)units;
    double rest = units - (double)n;

    return n + (rest > 0.5 || (rest == 0.5 && (n & 1)));
}

static inline uint32_t ref_encode(kvx_dtype_t dtype, float value)
{
    struct ref_format f = ref_format(dtype);
    unsigned width = f.bytes * 8;
    uint32_t sign = signbit(value) ? 1U << (width - 1) : 0;
    uint32_t nan = (uint32_t)((UINT64_C(1) << (width - 1)) - 1);
    uint32_t infinity = nan >> f.mantissa << f.mantissa, bits;
    double a = fabs((double)value), rounded;
    int exponent;

    if (isnan(value))
        return nan;
    if (a == 0)
        return sign;
    if (!isinf(value)) {
        (void)frexp(a, &exponent);
        exponent = exponent - 1 < f.min_exponent ? f.min_exponent : exponent - 1;
        rounded = (double)ref_round(a, ldexp(1, exponent - f.mantissa));
        rounded = ldexp(rounded, exponent - f.mantissa);
    } else {
        rounded = INFINITY;
    }
    if (rounded > f.max) {
        if (!f.saturates)
            return sign | infinity;
        rounded = f.max;
    }
    if (rounded == 0)
        return sign;
    (void)frexp(rounded, &exponent);
    exponent--;
    if (exponent < f.min_exponent)
        return sign | (uint32_t)ldexp(rounded, f.mantissa - f.min_exponent);
    /* the mantissa's leading one adds the last bit of the exponent */
    bits = (uint32_t)(exponent - f.min_exponent) << f.mantissa;
    bits += (uint32_t)ldexp(rounded, f.mantissa - exponent);
    return sign | bits;
}

/* One element from @src to @dst. @raw: bits as they are. */
static inline void ref_move(const void *src, kvx_dtype_t from, void *dst, kvx_dtype_t to, bool raw,
                            const float *src_scale, const float *dst_scale)
{
    uint32_t bits = ref_load(src, ref_format(from).bytes);

    if (!raw) {
        volatile float value = (float)ref_decode(from, bits);

        if (src_scale)
            value = value * *src_scale;
        if (dst_scale)
            value = value / *dst_scale;
        bits = ref_encode(to, value);
    }
    memcpy(dst, &bits, ref_format(to).bytes);
}

/* --------------------------------------------------------------------------------------------- */
/* Addresses: specification 4.2 */

static inline char *ref_at(const kvx_tensor_desc_t *t, const int64_t *index)
{
    int64_t element = 0;

    for (uint32_t i = 0; i < t->ndim; i++) {
        if (index[i] < 0 || index[i] >= t->shape[i])
            abort(); /* the reference itself went wrong */
        element += index[i] * t->stride[i];
    }
    return (char *)t->data + element * ref_format(t->dtype).bytes;
}

static inline char *ref_cache_at(const kvx_tensor_desc_t *t, int64_t block, int64_t offset,
                                 int64_t head, int64_t dim)
{
    int64_t pack = t->ndim == 5 ? t->shape[4] : 1;
    int64_t nhd[] = {block, offset, head, dim}, hnd[] = {block, head, offset, dim};
    int64_t packed[] = {block, head, dim / pack, offset, dim % pack};

    if (t->ndim == 5)
        return ref_at(t, packed);
    return ref_at(t, t->layout == KVX_LAYOUT_BLOCK_HND ? hnd : nhd);
}

/* Row @row = (sequence * beams + beam) * max_seq_len + position, whatever the rank. */
static inline char *ref_io_at(const kvx_tensor_desc_t *t, int64_t row, int64_t head, int64_t dim)
{
    int64_t index[KVX_MAX_TENSOR_DIMS];
    uint32_t i = t->ndim - 3;

    index[t->ndim - 1] = dim;
    index[t->ndim - 2] = head;
    for (;; i--) {
        index[i] = i ? row % t->shape[i] : row;
        if (i == 0)
            break;
        row /= t->shape[i];
    }
    return ref_at(t, index);
}

static inline int64_t ref_index(const void *array, kvx_dtype_t dtype, uint64_t i)
{
    return dtype == KVX_DTYPE_S64 ? ((const int64_t *)array)[i] : ((const int32_t *)array)[i];
}

static inline const float *ref_scale(const kvx_scale_desc_t *scale, const void *plain,
                                     int64_t block, int64_t head)
{
    const float *data;

    if (!scale || !scale->data)
        return plain;
    data = scale->data;
    switch (scale->granularity) {
    case KVX_SCALE_PER_TENSOR:
        return data;
    case KVX_SCALE_PER_BLOCK:
        return data + block * scale->stride[0];
    case KVX_SCALE_PER_HEAD:
        return data + head * scale->stride[0];
    case KVX_SCALE_PER_BLOCK_HEAD:
        return data + block * scale->stride[0] + head * scale->stride[1];
    default:
        abort();
    }
}

static inline bool ref_is_fp8(kvx_dtype_t dtype)
{
    return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2;
}

/* --------------------------------------------------------------------------------------------- */
/* Write */

static inline kvx_status_t ref_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                     bool drop, uint64_t *dropped)
{
    uint64_t n_slots = (uint64_t)cache->num_blocks * cache->block_size;
    kvx_dtype_t from = write->io.key.dtype, to = cache->k.dtype;

    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t t = 0; t < write->io.num_tokens; t++) {
            int64_t slot = ref_index(write->slots.slots, write->slots.dtype, t);
            int64_t block = slot / cache->block_size, offset = slot % cache->block_size;

            if (slot < 0 || slot == write->slots.invalid_slot)
                continue;
            if ((uint64_t)slot >= n_slots) {
                if (!drop)
                    return KVX_STATUS_OUT_OF_RANGE;
                *dropped += pass;
                continue;
            }
            for (uint32_t h = 0; pass && h < cache->num_kv_heads; h++) {
                const float *ks = ref_scale(&write->k_scale_desc, write->k_scale, block, h);
                const float *vs = ref_scale(&write->v_scale_desc, write->v_scale, block, h);

                ks = ref_is_fp8(to) ? ks : NULL;
                vs = ref_is_fp8(to) ? vs : NULL;
                for (uint32_t d = 0; d < cache->head_dim; d++) {
                    ref_move(ref_io_at(&write->io.key, t, h, d), from,
                             ref_cache_at(&cache->k, block, offset, h, d), to, from == to, NULL,
                             ks);
                    ref_move(ref_io_at(&write->io.value, t, h, d), from,
                             ref_cache_at(&cache->v, block, offset, h, d), to, from == to, NULL,
                             vs);
                }
            }
        }
    }
    return KVX_STATUS_OK;
}

/* --------------------------------------------------------------------------------------------- */
/* Gather */

enum ref_found { REF_BLOCK, REF_NOTHING, REF_BAD };

struct ref_block {
    int64_t id;
    const char *pool; /* KV_OFFSETS */
};

static inline enum ref_found ref_lookup(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *g,
                                        const kvx_options_t *o, int kv, uint32_t s, uint32_t w,
                                        uint32_t pos, struct ref_block *ret)
{
    const kvx_block_table_t *t = &g->block_table;
    int64_t logical = pos / cache->block_size, index;
    uint64_t limit;

    ret->pool = NULL;
    if (t->format == KVX_BLOCK_TABLE_RAGGED) {
        index = ref_index(t->indices, t->index_dtype,
                          (uint64_t)ref_index(t->indptr, t->indptr_dtype, s) + pos);
    } else if (logical >= t->max_blocks_per_seq) {
        return REF_BAD;
    } else if (t->format == KVX_BLOCK_TABLE_PACKED) {
        index = ref_index(t->indices, t->index_dtype,
                          (uint64_t)s * t->max_blocks_per_seq + (uint64_t)logical);
    } else {
        uint64_t row = ((uint64_t)s * t->beam_width + w) * 2 + (uint64_t)kv;

        index =
            ref_index(t->indices, KVX_DTYPE_S32, row * t->max_blocks_per_seq + (uint64_t)logical);
        if (index == -1)
            return REF_NOTHING;
        ret->pool = index < 0 ? cache->pool.secondary : cache->pool.primary;
        limit = index < 0 ? o->secondary_blocks : o->primary_blocks;
        ret->id = index & 0x7fffffff;
        return !ret->pool || (limit && (uint64_t)ret->id >= limit) ? REF_BAD : REF_BLOCK;
    }
    ret->id = index;
    if (index < 0)
        return REF_NOTHING;
    return (uint64_t)index >= cache->num_blocks ? REF_BAD : REF_BLOCK;
}

static inline int64_t ref_length(const kvx_gather_desc_t *g, uint32_t s, int64_t *covered)
{
    const kvx_block_table_t *t = &g->block_table;
    int64_t length = ref_index(g->seq_lens.lengths, g->seq_lens.dtype, s);

    *covered = INT64_MAX;
    if (t->format == KVX_BLOCK_TABLE_RAGGED)
        *covered =
            ref_index(t->indptr, t->indptr_dtype, s + 1) - ref_index(t->indptr, t->indptr_dtype, s);
    return length < g->max_seq_len ? length : g->max_seq_len;
}

static inline void ref_gather_row(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *g,
                                  const kvx_options_t *o, int kv, int64_t row, int64_t offset,
                                  const struct ref_block *block)
{
    const kvx_tensor_desc_t *paged = kv ? &cache->v : &cache->k;
    const kvx_tensor_desc_t *io = kv ? &g->io.value : &g->io.key;
    const kvx_scale_desc_t *const *scales = kv ? o->v_scales : o->k_scales;
    bool raw = paged->dtype == io->dtype;

    for (uint32_t h = 0; h < cache->num_kv_heads; h++) {
        for (uint32_t d = 0; d < cache->head_dim; d++) {
            char *to = ref_io_at(io, row, h, d);
            const char *from;
            const float *scale = NULL;

            if (!block) {
                memset(to, 0, ref_format(io->dtype).bytes);
                continue;
            }
            if (block->pool) {
                from = block->pool + block->id * (int64_t)cache->pool.bytes_per_block;
                from += ref_cache_at(paged, 0, offset, h, d) - (char *)paged->data;
            } else {
                from = ref_cache_at(paged, block->id, offset, h, d);
            }
            if (scales && ref_is_fp8(paged->dtype))
                scale = ref_scale(scales[0], NULL, block->id, h);
            ref_move(from, paged->dtype, to, io->dtype, raw, scale, NULL);
        }
    }
}

/* @move false: find out whether an index is bad. */
static inline bool ref_gather_pass(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *g,
                                   const kvx_options_t *o, bool move, uint64_t *dropped)
{
    const kvx_block_table_t *t = &g->block_table;
    bool good = true, zero = (o->flags & KVX_OPTION_ZERO_PADDING) != 0;

    for (uint64_t row = 0; row < g->io.num_tokens; row++) {
        uint32_t pos = (uint32_t)(row % g->max_seq_len);
        uint32_t s = (uint32_t)(row / g->max_seq_len / t->beam_width);
        uint32_t w = (uint32_t)(row / g->max_seq_len % t->beam_width);
        int64_t covered, length = ref_length(g, s, &covered);
        bool bad = false;

        for (int kv = 0; kv < 2; kv++) {
            struct ref_block block;
            enum ref_found found = REF_NOTHING;

            if (pos < length && pos < covered)
                found = ref_lookup(cache, g, o, kv, s, w, pos, &block);
            bad = bad || found == REF_BAD;
            if (move && (found == REF_BLOCK || zero))
                ref_gather_row(cache, g, o, kv, (int64_t)row, pos % cache->block_size,
                               found == REF_BLOCK ? &block : NULL);
        }
        *dropped += bad;
        good = good && !bad && length <= covered;
    }
    return good;
}

static inline kvx_status_t ref_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *g,
                                      const kvx_options_t *o, uint64_t *dropped)
{
    uint64_t ignored = 0;

    if (!ref_gather_pass(cache, g, o, false, &ignored) &&
        !(o->flags & KVX_OPTION_DROP_OUT_OF_RANGE))
        return KVX_STATUS_OUT_OF_RANGE;
    ref_gather_pass(cache, g, o, true, dropped);
    return KVX_STATUS_OK;
}

/* --------------------------------------------------------------------------------------------- */
/* Copy */

static inline void ref_copy_block(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                                  const kvx_block_copy_t *c, int kv, int64_t from, int64_t to)
{
    const kvx_tensor_desc_t *a = kv ? &src->v : &src->k, *b = kv ? &dst->v : &dst->k;
    const kvx_scale_desc_t *a_scale = kv ? c->src_v_scale : c->src_k_scale;
    const kvx_scale_desc_t *b_scale = kv ? c->dst_v_scale : c->dst_k_scale;
    uint32_t n = c->num_heads ? c->num_heads : src->num_kv_heads;
    bool none = !c->src_k_scale && !c->src_v_scale && !c->dst_k_scale && !c->dst_v_scale;

    for (uint32_t o = 0; o < src->block_size; o++) {
        for (uint32_t h = 0; h < n; h++) {
            uint32_t ah = c->src_head + h, bh = c->dst_head + h;

            for (uint32_t d = 0; d < src->head_dim; d++)
                ref_move(ref_cache_at(a, from, o, ah, d), a->dtype, ref_cache_at(b, to, o, bh, d),
                         b->dtype, a->dtype == b->dtype && (none || !ref_is_fp8(a->dtype)),
                         ref_is_fp8(a->dtype) ? ref_scale(a_scale, NULL, from, ah) : NULL,
                         ref_is_fp8(b->dtype) ? ref_scale(b_scale, NULL, to, bh) : NULL);
        }
    }
}

static inline kvx_status_t ref_copy(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                                    const kvx_block_copy_t *c, bool drop, uint64_t *dropped)
{
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < c->count; i++) {
            int64_t from = ref_index(c->src_blocks, c->index_dtype, i);
            int64_t to = ref_index(c->dst_blocks, c->index_dtype, i);

            if (from < 0 || to < 0)
                continue;
            if (from >= src->num_blocks || to >= dst->num_blocks) {
                if (!drop)
                    return KVX_STATUS_OUT_OF_RANGE;
                *dropped += pass;
                continue;
            }
            for (int kv = 0; pass && kv < 2; kv++)
                ref_copy_block(src, dst, c, kv, from, to);
        }
    }
    return KVX_STATUS_OK;
}

#endif
