// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of transfers: random pairs of layouts, and a model of a transfer's effect on
 * the target's bytes, element by element. Usable without cmocka: the includer then defines
 * MUST(condition).
 */
#ifndef KV_TEST_TRANSFER_UNIT_H
#define KV_TEST_TRANSFER_UNIT_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "index/random.h"
#include "kvbm_transfer.h"
#include "support.h"

#ifndef MUST
#define MUST(condition) assert_true(condition)
#endif

/* ---- layouts ---- */

/** All bytes of a layout's storages, one behind the other. */
struct bytes {
    unsigned char *at;
    size_t len, each;
    uint32_t n;
};

static inline struct kvbm_layout *unit_layout(const struct kvbm_layout_config *config,
                                              const struct kvbm_storage_opts *like)
{
    struct kvbm_allocator allocator = kvbm_allocator_of(like);
    struct kvbm_layout *layout = NULL;

    MUST(kvbm_layout_allocate(config, &allocator, &layout) == 0);
    return layout;
}

static inline uint32_t unit_storages(const struct kvbm_layout *layout)
{
    return kvbm_layout_get_shape(layout)->n_storages;
}

static inline struct bytes unit_snapshot(const struct kvbm_layout *layout)
{
    struct bytes bytes = {.n = unit_storages(layout)};

    bytes.each = (size_t)kvbm_storage_bytes(kvbm_layout_storage(layout, 0));
    bytes.len = bytes.each * bytes.n;
    bytes.at = malloc(bytes.len);
    MUST(bytes.at != NULL);
    for (uint32_t i = 0; i < bytes.n; i++)
        MUST(kvbm_storage_read(kvbm_layout_storage(layout, i), 0, bytes.at + i * bytes.each,
                               bytes.each) == 0);
    return bytes;
}

static inline void unit_put(struct kvbm_layout *layout, const struct bytes *bytes)
{
    for (uint32_t i = 0; i < bytes->n; i++)
        MUST(kvbm_storage_write(kvbm_layout_storage(layout, i), 0, bytes->at + i * bytes->each,
                                bytes->each) == 0);
}

/* ---- elements ---- */

struct place {
    uint32_t block, layer, outer, token, head, dim;
};

/** Where an element is in the snapshot of its layout. */
static inline size_t unit_at(const struct kvbm_layout *layout, const struct place *p,
                             uint32_t heads)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    uint32_t dims = c->inner_dim / heads;
    uint64_t row = c->order == KVBM_ORDER_HND ? (uint64_t)p->head * c->page_size + p->token
                                              : (uint64_t)p->token * heads + p->head;
    struct kvbm_storage *storage = kvbm_layout_storage(layout, p->layer);
    struct kvbm_view view;

    MUST(kvbm_layout_region(layout, p->block, p->layer, p->outer, &view) == 0);
    return (size_t)(view.storage * kvbm_storage_bytes(storage) + view.addr -
                    kvbm_storage_addr(storage) + (row * dims + p->dim) * c->dtype_width_bytes);
}

/** The small whole number @v, 0 to 15, as an element: all dtypes have them exactly. */
static inline uint32_t unit_encode(kvx_dtype_t dtype, uint32_t v)
{
    uint32_t exponent = 0, mantissa;

    if (!v)
        return 0;
    while (v >> (exponent + 1))
        exponent++;
    mantissa = v - (1u << exponent); /* of @exponent bits */
    switch (dtype) {
    case KVX_DTYPE_F32:
        return (127 + exponent) << 23 | mantissa << (23 - exponent);
    case KVX_DTYPE_BF16:
        return (127 + exponent) << 7 | mantissa << (7 - exponent);
    case KVX_DTYPE_F16:
        return (15 + exponent) << 10 | mantissa << (10 - exponent);
    default:
        return (7 + exponent) << 3 | mantissa << (3 - exponent); /* F8_E4M3 */
    }
}

/* ---- a transfer by hand ---- */

/** Apply a transfer to the target's bytes @before. */
static inline void unit_apply(const struct kvbm_transfer *t, const struct bytes *from,
                              struct bytes *to, const bool *left_out)
{
    const struct kvbm_layout_config *s = kvbm_layout_get_config(t->src),
                                    *d = kvbm_layout_get_config(t->dst);
    uint32_t s_heads = s->num_heads ? s->num_heads : d->num_heads ? d->num_heads : 1;
    uint32_t d_heads = d->num_heads ? d->num_heads : s_heads;
    uint32_t heads = t->n_heads ? t->n_heads : s_heads, dims = s->inner_dim / s_heads;
    uint32_t layers = t->n_layers ? t->n_layers : s->num_layers - t->first_layer;
    bool convert = s->dtype && d->dtype && s->dtype != d->dtype;

    for (uint32_t i = 0; i < t->n; i++) {
        uint64_t n = (uint64_t)layers * s->outer_dim * s->page_size * heads * dims;

        for (uint64_t e = 0; e < n && !(left_out && left_out[i]); e++) {
            struct place p = {.dim = (uint32_t)(e % dims)};
            uint64_t rest = e / dims;
            size_t a, b;

            p.head = (uint32_t)(rest % heads), rest /= heads;
            p.token = (uint32_t)(rest % s->page_size), rest /= s->page_size;
            p.outer = (uint32_t)(rest % s->outer_dim);
            p.layer = t->first_layer + (uint32_t)(rest / s->outer_dim);
            p.block = t->src_blocks[i];
            p.head += t->src_head;
            a = unit_at(t->src, &p, s_heads);
            p.block = t->dst_blocks[i];
            p.head += t->dst_head - t->src_head;
            b = unit_at(t->dst, &p, d_heads);
            if (convert) {
                uint32_t small, bits = 0, want;

                memcpy(&bits, from->at + a, s->dtype_width_bytes);
                for (small = 0; small < 16 && unit_encode(s->dtype, small) != bits; small++)
                    ;
                MUST(small < 16);
                want = unit_encode(d->dtype, small);
                memcpy(to->at + b, &want, d->dtype_width_bytes);
            } else {
                memcpy(to->at + b, from->at + a, s->dtype_width_bytes);
            }
        }
    }
}

/**
 * Random bytes everywhere, between blocks, too; of a layout to be converted from, small numbers
 * where elements are.
 */
static inline void unit_fill(struct kvbm_layout *layout, struct rng *rng, bool numbers)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    struct bytes bytes = unit_snapshot(layout);

    for (size_t i = 0; i < bytes.len; i++)
        bytes.at[i] = (unsigned char)rng_next(rng);
    for (uint32_t block = 0; numbers && block < c->num_blocks; block++) {
        for (uint32_t layer = 0; layer < c->num_layers; layer++) {
            for (uint64_t e = 0; e < (uint64_t)c->outer_dim * c->page_size * c->inner_dim; e++) {
                struct place p = {.block = block, .layer = layer};
                uint32_t v = unit_encode(c->dtype, rng_below(rng, 16));
                uint32_t region = c->page_size * c->inner_dim;

                p.outer = (uint32_t)(e / region);
                memcpy(bytes.at + unit_at(layout, &p, 1) + e % region * c->dtype_width_bytes, &v,
                       c->dtype_width_bytes);
            }
        }
    }
    unit_put(layout, &bytes);
    free(bytes.at);
}

/* ---- random pairs of layouts ---- */

static inline uint32_t unit_power(struct rng *rng, uint32_t most)
{
    return 1u << rng_below(rng, most + 1);
}

/** Two forms of one model's blocks. */
static inline void unit_configs(struct rng *rng, struct kvbm_layout_config c[2])
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};
    static const kvx_dtype_t dtypes[] = {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F16, KVX_DTYPE_BF16,
                                         KVX_DTYPE_F32};
    static const uint32_t widths[] = {1, 2, 2, 4};
    uint32_t heads = 1 + rng_below(rng, 4), dims = 1 + rng_below(rng, 9), pick = rng_below(rng, 4);
    bool convert = rng_below(rng, 4) == 0, split = rng_below(rng, 4) == 0;
    bool known = convert || rng_below(rng, 2);
    bool wide = rng_below(rng, 4) == 0, many = rng_below(rng, 16) == 0; /* not both: time */

    if (wide) /* rows whose halves are aligned */
        dims = 16 * (1 + rng_below(rng, 4));
    c[0] = (struct kvbm_layout_config){
        .size = sizeof(c[0]),
        .num_layers = many && !wide ? 31 + rng_below(rng, 40) : 1 + rng_below(rng, 5),
        .outer_dim = 1 + rng_below(rng, 2),
        .page_size = unit_power(rng, 4),
        .dtype_width_bytes = known ? widths[pick] : unit_power(rng, 3),
        .dtype = known ? dtypes[pick] : 0,
        .num_heads = heads,
    };
    c[1] = c[0];
    for (int i = 0; i < 2; i++) {
        c[i].kind = kinds[rng_below(rng, 3)];
        c[i].num_blocks = 1 + rng_below(rng, 12);
        c[i].order = rng_below(rng, 2) ? KVBM_ORDER_HND : KVBM_ORDER_NHD;
        c[i].alignment = unit_power(rng, 12);
    }
    if (convert) {
        pick = rng_below(rng, 4);
        c[1].dtype = dtypes[pick];
        c[1].dtype_width_bytes = widths[pick];
        for (int i = 0; i < 2; i++)
            c[i].alignment = c[i].alignment < 4 ? 4 : c[i].alignment;
    }
    if (split)
        c[rng_below(rng, 2)].num_heads = 1 + rng_below(rng, 4);
    for (int i = 0; i < 2; i++)
        c[i].inner_dim = c[i].num_heads * dims;
    if (!known && c[0].num_heads == c[1].num_heads && c[1].order == KVBM_ORDER_NHD &&
        rng_below(rng, 2))
        c[1].num_heads = 0; /* what one side doesn't say, the other does */
}

static inline uint32_t unit_least(uint64_t a, uint64_t b)
{
    return (uint32_t)(a < b ? a : b);
}

/** Which blocks, layers, heads: @src and @dst have room for 64. */
static inline void unit_ranges(struct rng *rng, struct kvbm_transfer *t, uint32_t *src,
                               uint32_t *dst)
{
    const struct kvbm_layout_config *s = kvbm_layout_get_config(t->src),
                                    *d = kvbm_layout_get_config(t->dst);
    uint32_t most = unit_least(s->num_heads, d->num_heads), stride = 1 + rng_below(rng, 2);

    t->n = 1 + rng_below(rng, (uint32_t)d->num_blocks);
    for (uint32_t i = 0; i < d->num_blocks; i++)
        dst[i] = i;
    for (uint32_t i = 0; i < d->num_blocks;
         i++) { /* often neighbours, so that there is what to join */
        uint32_t a = rng_below(rng, (uint32_t)d->num_blocks), swap = dst[i];

        if (stride == 2) {
            dst[i] = dst[a];
            dst[a] = swap;
        }
        src[i] =
            stride == 2 ? rng_below(rng, (uint32_t)s->num_blocks) : i % (uint32_t)s->num_blocks;
    }
    t->src_blocks = src;
    t->dst_blocks = dst;
    if (rng_below(rng, 2)) {
        t->first_layer = rng_below(rng, s->num_layers);
        t->n_layers = rng_below(rng, s->num_layers - t->first_layer + 1);
    }
    if (!most || (s->num_heads == d->num_heads && rng_below(rng, 2)))
        return;
    t->n_heads = 1 + rng_below(rng, most);
    t->src_head = rng_below(rng, s->num_heads - t->n_heads + 1);
    t->dst_head = rng_below(rng, d->num_heads - t->n_heads + 1);
}

/**
 * Do it and compare: everything that was to be written, and everything else. Returns the job's
 * status.
 */
static inline int unit_round(struct kvbm_copier *copier, struct kvbm_transfer *t, struct rng *rng)
{
    const struct kvbm_layout_config *s = kvbm_layout_get_config(t->src),
                                    *d = kvbm_layout_get_config(t->dst);
    struct bytes from, want, got;
    struct kvbm_done done;
    uint8_t ok[64 / 8 + 1];
    int64_t id;

    unit_fill((struct kvbm_layout *)(uintptr_t)t->src, rng, s->dtype && s->dtype != d->dtype);
    unit_fill((struct kvbm_layout *)(uintptr_t)t->dst, rng, false);
    from = unit_snapshot(t->src);
    want = unit_snapshot(t->dst);
    memset(ok, 0xAA, sizeof(ok));
    t->size = sizeof(*t);
    t->ok = ok;
    id = kvbm_copier_submit(copier, t);
    if (id > 0) {
        unit_apply(t, &from, &want, NULL);
        MUST(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done) == 0);
        MUST(done.status == 0 && done.n == t->n && done.n_ok == t->n);
        for (uint32_t i = 0; i < t->n; i++)
            MUST(ok[i / 8] >> i % 8 & 1);
        MUST(ok[(t->n + 7) / 8] == 0xAA);
    }
    got = unit_snapshot(t->dst);
    MUST(memcmp(got.at, want.at, got.len) == 0);
    free(got.at);
    got = unit_snapshot(t->src);
    MUST(memcmp(got.at, from.at, got.len) == 0);
    free(from.at), free(want.at), free(got.at);
    return id > 0 ? 0 : (int)id;
}

#endif
