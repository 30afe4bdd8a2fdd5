// SPDX-License-Identifier: Apache-2.0
/*
 * A decode rank reads a prompt's blocks from two prefill ranks that hold half of the heads each: the
 * plan of kvbm_reshape.c, run over sessions. One process plays all three ranks here.
 *
 *     cc -std=gnu11 kvbm_reshape_read.c $(pkg-config --cflags --libs kvbm)
 */
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, DIM = 8, PAGE = 4, BLOCKS = 4, RANKS = 2 };

/* A prefill rank: its heads of each block, and what lends them. */
struct rank {
    struct kvbm_layout *layout;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    struct kvbm_shard shard;
    char at[64];
};

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static struct kvbm_layout *blocks_of(uint32_t heads, enum kvbm_block_order order)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = BLOCKS,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = PAGE,
                                              .inner_dim = heads * DIM,
                                              .num_heads = heads,
                                              .dtype = KVX_DTYPE_BF16,
                                              .dtype_width_bytes = 2,
                                              .order = order};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

/* First element of a head of the last token, of V in layer 1. */
static unsigned short *element(const struct kvbm_layout *layout, uint32_t block, uint32_t head)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    uint32_t at =
        c->order == KVBM_ORDER_HND ? head * PAGE + PAGE - 1 : (PAGE - 1) * c->num_heads + head;
    struct kvbm_view view;

    must(kvbm_layout_region(layout, block, 1, 1, &view), "region");
    return (unsigned short *)(uintptr_t)view.addr + (size_t)at * DIM;
}

/* Compute this rank's heads of a block, and let other requests find it under its key. */
static void compute(struct rank *r, uint64_t key)
{
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};
    struct kvbm_mutable block;
    struct kvbm_immutable held;

    must(kvbm_pool_allocate(r->pool, 1, &block, NULL), "allocate");
    for (uint32_t head = 0; head < HEADS / RANKS; head++)
        *element(r->layout, block.handle.block, head) =
            (unsigned short)(key + r->shard.first_head + head);
    must(kvbm_pool_register_chain(r->pool, &block, 1, &chain, &held), "register");
    must(kvbm_immutable_release(&held), "release");
}

static void lend(struct rank *r, uint32_t number)
{
    const char *any = "tcp:127.0.0.1:0";
    char name[16];
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = name, .fingerprint = "example", .listen = &any, .n_listen = 1};
    const struct kvbm_pool_opts pool = {
        .size = sizeof(pool), .tier = KV_TIER_HOST, .n_blocks = BLOCKS, .block_size = PAGE};
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};
    struct kvbm_block_source source;

    snprintf(name, sizeof(name), "prefill-%u", number);
    r->shard = (struct kvbm_shard){.rank = number,
                                   .n_ranks = RANKS,
                                   .axis = KVBM_SHARD_HEADS,
                                   .first_head = number * HEADS / RANKS,
                                   .total_heads = HEADS};
    r->layout = blocks_of(HEADS / RANKS, KVBM_ORDER_HND);
    must(kvbm_registry_create(NULL, &r->registry), "registry");
    must(kvbm_pool_create(r->registry, &pool, &r->pool), "pool");
    must(kvbm_agent_create(&who, &r->agent), "agent");
    must(kvbm_agent_endpoint(r->agent, 0, r->at, sizeof(r->at), NULL), "endpoint");
    source = kvbm_pool_source(r->pool);
    what.layout = r->layout;
    what.source = &source;
    what.shard = r->shard;
    must(kvbm_blockset_export(r->agent, &what, &r->set), "export");
}

static void end(struct rank *r)
{
    kvbm_blockset_destroy(r->set);
    must(kvbm_agent_destroy(r->agent), "agent");
    must(kvbm_pool_destroy(r->pool), "pool");
    must(kvbm_registry_destroy(r->registry), "registry");
    kvbm_layout_destroy(r->layout);
}

/* Read blocks of @keys into blocks 0 and 1 of @to. Returns how many are whole. */
static long read_from(const struct rank *ranks, struct kvbm_layout *to, const uint64_t *keys,
                      uint32_t n)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "decode", .fingerprint = "example"};
    const struct kvbm_plan_rank mine = {kvbm_layout_get_config(to),
                                        {0, 1, KVBM_SHARD_HEADS, 0, HEADS, {0}}};
    const uint32_t blocks[] = {0, 1};
    struct kvbm_plan_rank theirs[RANKS];
    struct kvbm_plan_source sources[RANKS];
    struct kvbm_plan_read_opts opts = {.size = sizeof(opts),
                                       .sources = sources,
                                       .keys = keys,
                                       .to = to,
                                       .to_blocks = blocks,
                                       .n = n};
    struct kvbm_plan_heads missing;
    struct kvbm_agent *agent;
    struct kvbm_plan *plan;
    long n_whole;

    must(kvbm_agent_create(&who, &agent), "agent");
    must(kvbm_copier_create(NULL, &opts.copier), "copier");
    for (uint32_t i = 0; i < RANKS; i++) {
        sources[i] = (struct kvbm_plan_source){.set = 1};
        must(kvbm_session_open(agent, ranks[i].at, NULL, &sources[i].session), "session");
        theirs[i] = (struct kvbm_plan_rank){kvbm_layout_get_config(ranks[i].layout),
                                            ranks[i].shard}; /* else from the imported set */
    }
    must(kvbm_plan_create(&mine, theirs, RANKS, &missing, &plan), "plan");
    n_whole = kvbm_plan_read(plan, &opts);
    must(n_whole, "read");
    kvbm_plan_destroy(plan);
    for (uint32_t i = 0; i < RANKS; i++)
        must(kvbm_session_close(sources[i].session), "close");
    kvbm_copier_destroy(opts.copier);
    must(kvbm_agent_destroy(agent), "agent");
    return n_whole;
}

int main(void)
{
    const uint64_t keys[] = {100, 200};
    struct kvbm_layout *decode = blocks_of(HEADS, KVBM_ORDER_NHD);
    struct rank ranks[RANKS];
    bool same = true;
    long n;

    for (uint32_t i = 0; i < RANKS; i++) {
        lend(&ranks[i], i);
        compute(&ranks[i], keys[0]);
        compute(&ranks[i], keys[1]);
    }
    n = read_from(ranks, decode, keys, 2);
    for (uint32_t block = 0; block < 2; block++)
        for (uint32_t head = 0; head < HEADS; head++)
            same = same && *element(decode, block, head) == keys[block] + head;
    printf("%ld of 2 blocks came whole, with %d heads from %d ranks\n", n, HEADS, RANKS);
    for (uint32_t i = 0; i < RANKS; i++)
        end(&ranks[i]);
    kvbm_layout_destroy(decode);
    return n != 2 || !same;
}
