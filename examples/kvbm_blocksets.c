// SPDX-License-Identifier: Apache-2.0
/*
 * Block sets without a session: an owner says in bytes where its blocks lie, and a reader that has
 * imported them turns numbers of blocks into addresses. The bytes travel by the program's own control
 * plane, and an RDMA read of its own follows; one process plays both sides here. Programs that let
 * agents talk to each other need none of this: see kvbm_share.c.
 *
 *     cc -std=gnu11 kvbm_blocksets.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 32, SET = 1, PREFILL = 3, MAX_BYTES = 4096 };

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static struct kvbm_agent *make_agent(const char *name, uint64_t worker)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = name, .worker = worker, .fingerprint = "example"};
    struct kvbm_agent *agent;

    must(kvbm_agent_create(&who, &agent), "agent");
    return agent;
}

static struct kvbm_layout *make_layout(void)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = BLOCKS,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 16,
                                              .inner_dim = 64};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

/* Let the reader know what the set says now, as the control plane would. */
static struct kvbm_remote_set *carry(const struct kvbm_blockset *set, struct kvbm_agent *reader)
{
    struct kvbm_remote_set *imported;
    unsigned char bytes[MAX_BYTES];
    long len = kvbm_blockset_serialise(set, bytes, sizeof(bytes), NULL);

    must(len, "serialise");
    must(kvbm_blockset_import(reader, bytes, (size_t)len, &imported), "import");
    printf("generation %llu: %ld bytes\n", (unsigned long long)kvbm_blockset_generation(set), len);
    return imported;
}

/* Read K of layer 0 of block i. The address is the owner's, and so this process's. */
static int first_byte(const struct kvbm_remote_blocks *blocks, size_t i)
{
    struct kvbm_view view;

    must(kvbm_remote_blocks_view(blocks, i, 0, 0, &view), "view");
    return *(const unsigned char *)(uintptr_t)view.addr;
}

/* A router's hint in a request: who has the prompt's beginning, under which hashes. */
static void read_hint(void)
{
    static const char text[] =
        "{\"source_control_endpoint\": \"tcp://10.0.0.7:25000\","
        " \"block_hashes\": [15760518052499183552, -42], \"mode\": \"copy\"}";
    struct kvbm_hint hint = KVBM_HINT_INIT;
    uint64_t hashes[8];
    long n = kvbm_hint_parse(text, sizeof(text) - 1, &hint, hashes, 8);

    must(n, "hint");
    printf("hint: %ld blocks at %s port %u\n", n, hint.host, hint.port);
}

int main(void)
{
    static const char rdma[] = "worker address and packed remote key";
    const struct kvbm_transport_key by = {KVBM_TRANSPORT_UCX, sizeof(rdma), rdma};
    const struct kvbm_block_at wanted[] = {{PREFILL, SET, 4}, {PREFILL, SET, 9}};
    struct kvbm_agent *owner = make_agent("prefill-3", PREFILL), *reader = make_agent("decode", 8);
    struct kvbm_layout *layout = make_layout();
    struct kvbm_blockset_opts what = {
        .size = sizeof(what), .id = SET, .layout = layout, .transports = &by, .n_transports = 1};
    struct kvbm_remote_blocks *blocks, *later;
    struct kvbm_remote_set *imported;
    struct kvbm_blockset *set;
    struct kvbm_view block;
    char key[64];

    read_hint();
    must(kvbm_layout_region(layout, 9, 0, 0, &block), "region");
    *(unsigned char *)(uintptr_t)block.addr = 99;
    must(kvbm_blockset_export(owner, &what, &set), "export");
    imported = carry(set, reader);
    must(kvbm_remote_set_transport(imported, KVBM_TRANSPORT_UCX, key, sizeof(key), NULL), "key");
    must(kvbm_remote_blocks_immutable(reader, wanted, 2, &blocks), "blocks");
    if (strcmp(key, rdma) != 0 || first_byte(blocks, 1) != 99 ||
        kvbm_remote_blocks_mutable(reader, wanted, 2, &later) != -EPERM)
        return 1;
    must(kvbm_remote_blocks_check(blocks), "check"); /* after the read: it was of this generation */

    /* The owner lets peers write from now on. Lists of the earlier generation are stale. */
    what.writable = true;
    must(kvbm_blockset_update(set, &what), "update");
    imported = carry(set, reader);
    must(kvbm_remote_blocks_mutable(reader, wanted, 2, &later), "blocks");
    if (kvbm_remote_blocks_check(blocks) != -ESTALE || first_byte(later, 1) != 99)
        return 1;

    kvbm_blockset_destroy(set);
    kvbm_remote_set_invalidate(imported); /* the owner has withdrawn it, and said so */
    if (kvbm_remote_blocks_check(later) != -ESTALE)
        return 1;
    kvbm_remote_blocks_destroy(later);
    kvbm_remote_blocks_destroy(blocks);
    must(kvbm_agent_forget(reader, "prefill-3"), "forget"); /* its process has ended */
    must(kvbm_agent_destroy(owner), "agent");
    must(kvbm_agent_destroy(reader), "agent");
    kvbm_layout_destroy(layout);
    return 0;
}
