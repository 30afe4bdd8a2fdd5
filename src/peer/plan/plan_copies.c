// SPDX-License-Identifier: Apache-2.0
/*
 * The copies of a plan: where a part's bytes lie in any block, on both sides.
 *
 * A part is a box of five axes: layer, outer, two of (token, head) in the local order, and the
 * elements of a head. Each axis has a count and a stride on each side. Axes that continue the run
 * on both sides become part of the run; axes that continue their neighbour's steps are merged with
 * the neighbour. For equal orders one axis remains, for others three:
 *
 *   NHD → NHD   run: heads of the part       axes: (layer, outer, token)
 *   HND → HND   run: the part of a region    axes: (layer, outer)
 *   NHD → HND   run: one head of a token     axes: (layer, outer), head, token
 *
 * A layout with a storage per layer has copies of its own for each layer.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/core/error.h"
#include "peer/plan/plan.h"

struct axis {
    uint64_t count;
    uint64_t remote, local; /* strides in bytes */
};

struct strides {
    uint64_t token, head, outer, layer;
};

static struct strides strides_of(const struct plan_side *s)
{
    bool hnd = s->config.order == KVBM_ORDER_HND;
    uint64_t head = s->dim * s->width;

    return (struct strides){.token = hnd ? head : head * s->config.num_heads,
                            .head = hnd ? head * s->config.page_size : head,
                            .outer = s->shape.outer_stride,
                            .layer = s->shape.layer_stride};
}

/* Add an axis outside of the others, or merge it with the run or the neighbour. */
static void add_axis(struct kvbm_plan_copy *copy, struct axis axes[KVBM_PLAN_AXES], size_t *n,
                     struct axis axis)
{
    struct axis *inner = *n ? &axes[*n - 1] : NULL;

    if (axis.count == 1)
        return;
    if (!inner && axis.remote == copy->remote_len && axis.local == copy->local_len) {
        copy->remote_len *= axis.count;
        copy->local_len *= axis.count;
    } else if (inner && axis.remote == inner->remote * inner->count &&
               axis.local == inner->local * inner->count) {
        inner->count *= axis.count;
    } else {
        axes[(*n)++] = axis;
    }
}

/* The runs of a part in one layer, or in all when both sides have one storage. */
static struct kvbm_plan_copy runs_of(const struct kvbm_plan_part *part, const struct plan_side *l,
                                     const struct plan_side *r, uint32_t layers)
{
    struct strides ls = strides_of(l), rs = strides_of(r);
    const struct kvbm_layout_config *c = &l->config;
    struct axis token = {c->page_size, rs.token, ls.token};
    struct axis head = {part->n_heads, rs.head, ls.head};
    bool hnd = c->order == KVBM_ORDER_HND;
    struct axis axes[KVBM_PLAN_AXES + 1];
    struct kvbm_plan_copy copy = {.remote_len = r->dim * r->width,
                                  .local_len = l->dim * l->width,
                                  .remote_offset = part->remote_head * rs.head,
                                  .local_offset = part->local_head * ls.head,
                                  .remote_block_stride = r->shape.block_stride,
                                  .local_block_stride = l->shape.block_stride};
    size_t n = 0;

    add_axis(&copy, axes, &n, hnd ? token : head);
    add_axis(&copy, axes, &n, hnd ? head : token);
    add_axis(&copy, axes, &n, (struct axis){c->outer_dim, rs.outer, ls.outer});
    add_axis(&copy, axes, &n, (struct axis){layers, rs.layer, ls.layer});
    for (size_t i = 0; i < KVBM_PLAN_AXES; i++) {
        struct axis axis = i < n ? axes[n - 1 - i] : (struct axis){.count = 1};

        copy.count[i] = axis.count;
        copy.remote_stride[i] = axis.remote;
        copy.local_stride[i] = axis.local;
    }
    return copy;
}

/* Copies of a part: one, or one for each layer when either side has a storage per layer. */
static uint32_t copies_of(const struct plan_side *l, const struct plan_side *r)
{
    return l->shape.n_storages == 1 && r->shape.n_storages == 1 ? 1 : l->config.num_layers;
}

/* Move a side of a copy to a layer. */
static void at_layer(const struct plan_side *side, uint32_t layer, uint32_t *storage,
                     uint64_t *offset)
{
    if (side->shape.n_storages > 1)
        *storage = layer;
    else
        *offset += layer * side->shape.layer_stride;
}

int kvbm_plan_fill(struct kvbm_plan *plan, const struct plan_side *local,
                   const struct plan_side *remotes)
{
    size_t total = 0;

    for (size_t i = 0; i < plan->n_parts; i++)
        total += copies_of(local, &remotes[plan->parts[i].rank]);
    if (!total || total > KVBM_MAX_PLAN_COPIES) /* a layout has heads, and so a part */
        return -EOVERFLOW;
    plan->copies = calloc(total, sizeof(*plan->copies));
    if (!plan->copies)
        return -ENOMEM;
    for (size_t i = 0; i < plan->n_parts; i++) {
        const struct plan_side *remote = &remotes[plan->parts[i].rank];
        uint32_t layers = local->config.num_layers, n = copies_of(local, remote);
        struct kvbm_plan_copy runs = runs_of(&plan->parts[i], local, remote, layers / n);

        runs.part = (uint32_t)i;
        for (uint32_t layer = 0; layer < n; layer++) {
            struct kvbm_plan_copy *copy = &plan->copies[plan->n_copies++];

            *copy = runs;
            at_layer(remote, layer, &copy->remote_storage, &copy->remote_offset);
            at_layer(local, layer, &copy->local_storage, &copy->local_offset);
        }
    }
    return 0;
}

const struct kvbm_plan_part *kvbm_plan_parts(const struct kvbm_plan *plan, size_t *n)
{
    if (!plan || !n)
        return NULL;
    *n = plan->n_parts;
    return plan->parts;
}

const struct kvbm_plan_copy *kvbm_plan_copies(const struct kvbm_plan *plan, size_t *n)
{
    if (!plan || !n)
        return NULL;
    *n = plan->n_copies;
    return plan->copies;
}

bool kvbm_plan_converts(const struct kvbm_plan *plan)
{
    return plan && plan->converts;
}

/* ---- blocks ---- */

static int check_blocks(const uint32_t *blocks, size_t n, uint64_t num_blocks)
{
    if (!blocks)
        return -EINVAL;
    for (size_t i = 0; i < n; i++) {
        if (blocks[i] >= num_blocks)
            return -ERANGE;
    }
    return 0;
}

long kvbm_plan_apply(const struct kvbm_plan *plan, const uint32_t *local_blocks,
                     const uint32_t *const *remote_blocks, size_t n, struct kvbm_plan_piece *to,
                     size_t cap)
{
    struct kvbm_plan_piece *piece = to;
    int err;

    if (!plan || !remote_blocks || n > UINT32_MAX)
        return -EINVAL;
    err = check_blocks(local_blocks, n, plan->local_blocks);
    for (size_t i = 0; i < plan->n_parts && err == 0; i++) {
        uint32_t rank = plan->parts[i].rank;

        err = check_blocks(remote_blocks[rank], n, plan->remote_blocks[rank]);
    }
    if (err < 0)
        return err;
    if (cap / plan->n_copies < n || (n && !to))
        return -ENOSPC;
    for (size_t c = 0; c < plan->n_copies; c++) {
        const struct kvbm_plan_copy *copy = &plan->copies[c];
        const uint32_t *remote = remote_blocks[plan->parts[copy->part].rank];

        for (size_t i = 0; i < n; i++)
            *piece++ = (struct kvbm_plan_piece){
                .copy = (uint32_t)c,
                .block = (uint32_t)i,
                .remote_offset = copy->remote_offset + remote[i] * copy->remote_block_stride,
                .local_offset = copy->local_offset + local_blocks[i] * copy->local_block_stride};
    }
    return (long)(n * plan->n_copies);
}
