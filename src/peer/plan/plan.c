// SPDX-License-Identifier: Apache-2.0
/*
 * Plans between tensor-parallel layouts: check that all ranks hold one model's blocks, and cover
 * the local heads by those of the remote ranks.
 *
 * The cover is greedy: from the first head that no part covers, take the remote rank that reaches
 * furthest. Intervals are covered so by the fewest parts, and every rank gives at most one.
 */
#include "peer/plan/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "peer/lease/borrow.h"
#include "peer/set/blockset.h"

static int refuse(int err, const char *reason, size_t rank)
{
    kv_log_warn("kvbm", "no plan between these ranks", "reason=\"%s\" remote=%zd", reason,
                (ssize_t)rank);
    return err;
}

#define LOCAL SIZE_MAX /* instead of a remote rank's index; logged as -1 */

/* ---- what each rank holds ---- */

static int read_side(const struct kvbm_plan_rank *rank, size_t index, struct plan_side *ret)
{
    int err = rank->layout ? kvbm_layout_compute(rank->layout, &ret->shape) : -EINVAL;

    if (err == 0)
        err = kvbm_layout_config_read(rank->layout, &ret->config);
    if (err < 0)
        return err;
    ret->width = ret->config.dtype_width_bytes;
    if (!kvbm_shard_fits(&rank->shard, &ret->config))
        return refuse(-EINVAL, "the shard contradicts the layout", index);
    return 0;
}

/* Return the size of a head by the first layout that knows its heads; 0: no layout does. */
static uint64_t head_dim(const struct plan_side *sides, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (sides[i].config.num_heads)
            return sides[i].config.inner_dim / sides[i].config.num_heads;
    }
    return 0;
}

/* Fill in the heads of a side. A layout without num_heads has heads of the others' size. */
static int find_heads(const struct kvbm_plan_rank *rank, size_t index, uint64_t dim,
                      struct plan_side *side)
{
    struct kvbm_layout_config *c = &side->config;

    if (!dim || c->inner_dim % dim || (c->num_heads && c->num_heads != c->inner_dim / dim))
        return refuse(-EMEDIUMTYPE, "heads of another size", index);
    c->num_heads = (uint32_t)(c->inner_dim / dim);
    side->dim = dim;
    side->total = c->num_heads;
    if (rank->shard.axis == KVBM_SHARD_HEADS) {
        side->first = rank->shard.first_head;
        side->total = rank->shard.total_heads;
    }
    side->end = side->first + c->num_heads; /* at most total: kvbm_shard_fits */
    return 0;
}

/* True when bytes of @a are bytes of @b. An unknown dtype counts as the other layout's. */
static bool same_elements(const struct kvbm_layout_config *a, const struct kvbm_layout_config *b)
{
    return a->dtype_width_bytes == b->dtype_width_bytes &&
           (a->dtype == b->dtype || !a->dtype || !b->dtype);
}

/* Compare a remote side with the local one. */
static int compare(const struct plan_side *l, const struct plan_side *r, size_t index)
{
    const struct kvbm_layout_config *a = &l->config, *b = &r->config;

    if (a->num_layers != b->num_layers || a->outer_dim != b->outer_dim ||
        a->page_size != b->page_size)
        return refuse(-EMEDIUMTYPE, "blocks of other layers, outers or pages", index);
    if (l->total != r->total)
        return refuse(-EMEDIUMTYPE, "models of other numbers of heads", index);
    if (!same_elements(a, b) && (!kvbm_dtype_is_float(a->dtype) || !kvbm_dtype_is_float(b->dtype)))
        return refuse(-ENOTSUP, "elements that aren't converted, or of unknown dtype", index);
    return 0;
}

/* Read all sides, the local one first. *@ret_known: some layout knows its heads. */
static int read_sides(const struct kvbm_plan_rank *local, const struct kvbm_plan_rank *remotes,
                      size_t n, struct plan_side *sides, bool *ret_known)
{
    uint64_t dim;
    int err = read_side(local, LOCAL, &sides[0]);

    for (size_t i = 0; i < n && err == 0; i++)
        err = read_side(&remotes[i], i, &sides[1 + i]);
    if (err < 0)
        return err;
    dim = head_dim(sides, n + 1);
    *ret_known = dim != 0;
    if (!dim)
        dim = sides[0].config.inner_dim; /* one head */
    err = find_heads(local, LOCAL, dim, &sides[0]);
    for (size_t i = 0; i < n && err == 0; i++) {
        err = find_heads(&remotes[i], i, dim, &sides[1 + i]);
        if (err == 0)
            err = compare(&sides[0], &sides[1 + i], i);
    }
    return err;
}

/* ---- the cover ---- */

static bool holds(const struct plan_side *side, uint32_t head)
{
    return side->first <= head && head < side->end;
}

/* Return the rank that reaches furthest from @head. Of @k equal ones take number @turn modulo k, so
 * that the ranks of a group read from different replicas. Returns @n when no rank holds it. */
static size_t furthest(const struct plan_side *remotes, size_t n, uint32_t head, uint32_t last,
                       uint32_t turn)
{
    uint32_t end = head, equal = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t reach = KV_MIN(remotes[i].end, last);

        if (!holds(&remotes[i], head) || reach < end)
            continue;
        equal = reach > end ? 1 : equal + 1;
        end = reach;
    }
    if (!equal)
        return n;
    turn %= equal;
    for (size_t i = 0; i < n; i++) {
        if (holds(&remotes[i], head) && KV_MIN(remotes[i].end, last) == end && turn-- == 0)
            return i;
    }
    return n; /* not reached */
}

/* Find the first heads from @head on that no rank holds. */
static struct kvbm_plan_heads gap_at(const struct plan_side *remotes, size_t n, uint32_t head,
                                     uint32_t last)
{
    uint32_t end = last;

    for (size_t i = 0; i < n; i++) {
        if (remotes[i].first > head)
            end = KV_MIN(end, remotes[i].first);
    }
    return (struct kvbm_plan_heads){.first = head, .n = end - head};
}

static int cover(struct kvbm_plan *plan, const struct plan_side *local,
                 const struct plan_side *remotes, uint32_t turn, struct kvbm_plan_heads *missing)
{
    for (uint32_t head = local->first; head < local->end;) {
        size_t rank = furthest(remotes, plan->n_ranks, head, local->end, turn);
        struct kvbm_plan_part *part = &plan->parts[plan->n_parts];

        if (rank == plan->n_ranks) {
            struct kvbm_plan_heads gap = gap_at(remotes, plan->n_ranks, head, local->end);

            kv_log_warn("kvbm", "no remote rank holds some heads",
                        "first=%" PRIu32 " n=%" PRIu32 " of=%" PRIu32, gap.first, gap.n,
                        local->total);
            if (missing)
                *missing = gap;
            return -ENODATA;
        }
        *part = (struct kvbm_plan_part){.rank = (uint32_t)rank,
                                        .remote_head = head - remotes[rank].first,
                                        .local_head = head - local->first};
        part->n_heads = KV_MIN(remotes[rank].end, local->end) - head;
        head += part->n_heads;
        plan->n_parts++;
    }
    return 0;
}

bool kvbm_plan_side_fits(const struct plan_side *side, const struct kvbm_layout_config *layout,
                         const struct kvbm_shard *shard)
{
    const struct kvbm_layout_config *c = &side->config;
    bool divided = shard->axis == KVBM_SHARD_HEADS;

    return kvbm_same_blocks(c, layout) && c->dtype == layout->dtype &&
           side->first == (divided ? shard->first_head : 0) &&
           (!divided || side->total == shard->total_heads);
}

/* ---- plans ---- */

static int make(struct kvbm_plan *plan, const struct kvbm_plan_rank *local,
                const struct kvbm_plan_rank *remotes, struct plan_side *sides,
                struct kvbm_plan_heads *missing)
{
    bool known = false;
    int err = read_sides(local, remotes, plan->n_ranks, sides, &known);

    if (err < 0)
        return err;
    err = cover(plan, &sides[0], sides + 1, local->shard.rank, missing);
    if (err < 0)
        return err;
    plan->local_blocks = sides[0].config.num_blocks;
    for (size_t i = 0; i < plan->n_ranks; i++)
        plan->remote_blocks[i] = sides[1 + i].config.num_blocks;
    for (size_t i = 0; i < plan->n_parts; i++)
        plan->converts |= !same_elements(&sides[0].config, &sides[1 + plan->parts[i].rank].config);
    err = kvbm_plan_fill(plan, &sides[0], sides + 1);
    for (size_t i = 0; !known && i < plan->n_parts; i++)
        plan->parts[i].n_heads = 0;
    return err;
}

int kvbm_plan_create(const struct kvbm_plan_rank *local, const struct kvbm_plan_rank *remotes,
                     size_t n, struct kvbm_plan_heads *missing, struct kvbm_plan **ret)
{
    struct kvbm_plan *plan;
    int err = -ENOMEM;

    if (!local || !remotes || !ret || !n || n > KVBM_MAX_PLAN_RANKS)
        return -EINVAL;
    plan = calloc(1, sizeof(*plan));
    if (!plan)
        return -ENOMEM;
    plan->n_ranks = n;
    plan->sides = calloc(n + 1, sizeof(*plan->sides));
    plan->parts = calloc(n, sizeof(*plan->parts));
    plan->remote_blocks = calloc(n, sizeof(*plan->remote_blocks));
    if (plan->sides && plan->parts && plan->remote_blocks)
        err = make(plan, local, remotes, plan->sides, missing);
    if (err == 0)
        *ret = KV_STEAL(plan);
    kvbm_plan_destroy(plan);
    return err;
}

void kvbm_plan_destroy(struct kvbm_plan *plan)
{
    if (!plan)
        return;
    free(plan->sides);
    free(plan->parts);
    free(plan->copies);
    free(plan->remote_blocks);
    free(plan);
}
