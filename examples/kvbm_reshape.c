// SPDX-License-Identifier: Apache-2.0
/*
 * Two prefill ranks with half of the heads each, one decode rank with all of them: a plan says which
 * heads come from whom, and where their bytes lie in any block. Whoever can address the other side's
 * memory moves the pieces; kvbm_reshape_read.c reads them over sessions.
 *
 *     cc -std=c11 kvbm_reshape.c $(pkg-config --cflags --libs kvbm)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbm.h"
#include "kvbm_plan.h"

enum { HEADS = 4, DIM = 8, BLOCKS = 4, PREFILL = 2, MAX_PIECES = 64 };

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* Blocks of a rank with @heads heads: 2 layers, K and V, 4 tokens, elements of 2 bytes. */
static struct kvbm_layout *blocks_of(uint32_t heads, enum kvbm_block_order order)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = BLOCKS,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 4,
                                              .inner_dim = heads * DIM,
                                              .num_heads = heads,
                                              .dtype_width_bytes = 2,
                                              .order = order};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

static unsigned char *memory_of(const struct kvbm_layout *layout, uint32_t storage)
{
    return (unsigned char *)(uintptr_t)kvbm_storage_addr(kvbm_layout_storage(layout, storage));
}

/* Move what one piece names: runs along three axes, with strides of their own on both sides. */
static void move(const struct kvbm_plan_copy *c, const struct kvbm_plan_piece *piece,
                 const struct kvbm_layout *from, const struct kvbm_layout *to)
{
    const unsigned char *src = memory_of(from, c->remote_storage) + piece->remote_offset;
    unsigned char *dst = memory_of(to, c->local_storage) + piece->local_offset;

    for (uint64_t i = 0; i < c->count[0]; i++)
        for (uint64_t j = 0; j < c->count[1]; j++)
            for (uint64_t k = 0; k < c->count[2]; k++)
                memcpy(dst + i * c->local_stride[0] + j * c->local_stride[1] +
                           k * c->local_stride[2],
                       src + i * c->remote_stride[0] + j * c->remote_stride[1] +
                           k * c->remote_stride[2],
                       c->local_len);
}

/* Element of a head in a region [head][token][dim] or [token][head][dim]. */
static unsigned short *element(const struct kvbm_layout *layout, uint64_t block, uint32_t head,
                               uint32_t token)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    uint32_t at =
        c->order == KVBM_ORDER_HND ? head * c->page_size + token : token * c->num_heads + head;
    struct kvbm_view view;

    must(kvbm_layout_region(layout, block, 1, 1, &view), "region");
    return (unsigned short *)(uintptr_t)view.addr + (size_t)at * DIM;
}

int main(void)
{
    /* The prefill engine's kernels want [head][token], the decode engine's [token][head]. */
    struct kvbm_layout *prefill[PREFILL] = {blocks_of(HEADS / 2, KVBM_ORDER_HND),
                                            blocks_of(HEADS / 2, KVBM_ORDER_HND)};
    struct kvbm_layout *decode = blocks_of(HEADS, KVBM_ORDER_NHD);
    const struct kvbm_plan_rank mine = {kvbm_layout_get_config(decode),
                                        {0, 1, KVBM_SHARD_HEADS, 0, HEADS, {0}}};
    const struct kvbm_plan_rank theirs[PREFILL] = {
        {kvbm_layout_get_config(prefill[0]), {0, 2, KVBM_SHARD_HEADS, 0, HEADS, {0}}},
        {kvbm_layout_get_config(prefill[1]), {1, 2, KVBM_SHARD_HEADS, HEADS / 2, HEADS, {0}}}};
    const uint32_t to[] = {3, 1}, at_0[] = {0, 2}, at_1[] = {1, 0};
    const uint32_t *const from[PREFILL] = {at_0, at_1};
    struct kvbm_plan_piece pieces[MAX_PIECES];
    struct kvbm_plan_heads missing;
    const struct kvbm_plan_part *parts;
    const struct kvbm_plan_copy *copies;
    struct kvbm_plan *plan;
    size_t n_parts, n_copies;
    long n;

    for (uint32_t head = 0; head < HEADS;
         head++) /* the first prompt block, where each rank has it */
        *element(prefill[head / 2], from[head / 2][0], head % 2, 3) = (unsigned short)(100 + head);

    must(kvbm_plan_create(&mine, theirs, PREFILL, &missing, &plan), "plan");
    parts = kvbm_plan_parts(plan, &n_parts);
    for (size_t i = 0; i < n_parts; i++)
        printf("heads %u to %u come from rank %u\n", parts[i].local_head,
               parts[i].local_head + parts[i].n_heads - 1, parts[i].rank);
    copies = kvbm_plan_copies(plan, &n_copies);
    n = kvbm_plan_apply(plan, to, from, 2, pieces, MAX_PIECES);
    must(n, "apply");
    for (long i = 0; i < n && !kvbm_plan_converts(plan); i++)
        move(&copies[pieces[i].copy], &pieces[i], prefill[parts[copies[pieces[i].copy].part].rank],
             decode);
    printf("%ld pieces of %zu copies moved\n", n, n_copies);

    for (uint32_t head = 0; head < HEADS; head++)
        if (*element(decode, to[0], head, 3) != 100 + head)
            return 1;
    kvbm_plan_destroy(plan);
    kvbm_layout_destroy(decode);
    kvbm_layout_destroy(prefill[0]);
    kvbm_layout_destroy(prefill[1]);
    return 0;
}
