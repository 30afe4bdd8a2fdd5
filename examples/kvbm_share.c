// SPDX-License-Identifier: Apache-2.0
/*
 * Two processes of one machine: an owner with blocks in shared memory, and a reader that leases them
 * by their keys and copies them without the owner. docs/kvbm-remote.md explains each step.
 *
 *     cc -std=gnu11 kvbm_share.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvbm.h"

#define N_BLOCKS 64

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static uint64_t seconds_from_now(uint64_t s)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec + s) * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Blocks of both processes: 2 layers, K and V, 16 tokens of 64 elements of 2 bytes. */
static struct kvbm_layout_config blocks_of(uint64_t n)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = n,
                                       .num_layers = 2,
                                       .outer_dim = 2,
                                       .page_size = 16,
                                       .inner_dim = 64,
                                       .dtype_width_bytes = 2};
}

/* ---- the owner ---- */

/* Put a block into the pool, as an engine does when a prompt has been computed. */
static void store(struct kvbm_pool *pool, const struct kvbm_layout *layout, uint64_t key)
{
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    struct kvbm_view view;

    must(kvbm_pool_allocate(pool, 1, &block, NULL), "allocate");
    must(kvbm_layout_block(layout, block.handle.block, &view), "block");
    memset((void *)(uintptr_t)view.addr, (int)key, view.len);
    must(kvbm_pool_complete(pool, &block, 1, &chain, &complete), "complete");
    must(kvbm_pool_register(pool, &complete, 1, &held), "register");
    must(kvbm_immutable_release(&held), "release");
}

static void own(const char *endpoint, int ready, int end)
{
    const struct kvbm_layout_config config = blocks_of(N_BLOCKS);
    struct kvbm_agent_opts who = {.size = sizeof(who),
                                  .name = "owner",
                                  .fingerprint = "example",
                                  .listen = &endpoint,
                                  .n_listen = 1};
    struct kvbm_shared_opts memory = {.size = sizeof(memory), .n_blocks = N_BLOCKS};
    struct kvbm_pool_opts of = {
        .size = sizeof(of), .tier = KV_TIER_HOST, .n_blocks = N_BLOCKS, .block_size = 16};
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1};
    struct kvbm_block_source source;
    struct kvbm_allocator allocator;
    struct kvbm_layout_shape shape;
    struct kvbm_shared *shared;
    struct kvbm_layout *layout;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    char byte = 0;

    /* Memory that readers may map, a layout in it, and a pool that knows which key is where. */
    must(kvbm_layout_compute(&config, &shape), "compute");
    memory.bytes = shape.required_bytes;
    must(kvbm_shared_create(&memory, &shared), "shared memory");
    allocator = kvbm_shared_allocator(shared);
    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    must(kvbm_registry_create(NULL, &registry), "registry");
    must(kvbm_pool_create(registry, &of, &pool), "pool");
    for (uint64_t key = 1; key <= 10; key++)
        store(pool, layout, key);

    /* Let peers see and lease the blocks. */
    must(kvbm_agent_create(&who, &agent), "agent");
    source = kvbm_pool_source(pool);
    what.layout = layout;
    what.source = &source;
    what.shared = shared;
    must(kvbm_blockset_export(agent, &what, &set), "export");
    if (write(ready, &byte, 1) != 1 || read(end, &byte, 1) < 0)
        exit(1);

    kvbm_blockset_destroy(set); /* first: it ends all leases */
    must(kvbm_agent_destroy(agent), "agent");
    must(kvbm_pool_destroy(pool), "pool");
    must(kvbm_registry_destroy(registry), "registry");
    kvbm_layout_destroy(layout);
    kvbm_shared_destroy(shared);
    exit(0);
}

/* ---- the reader ---- */

static void read_blocks(const char *endpoint)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "reader", .fingerprint = "example"};
    const struct kvbm_layout_config config = blocks_of(4);
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    const uint64_t keys[] = {3, 4, 99, 5};
    const uint32_t to_blocks[] = {0, 1, 2, 3};
    struct kvbm_lease_read_opts what = {.size = sizeof(what), .to_blocks = to_blocks};
    struct kvbm_session *session;
    struct kvbm_agent *agent;
    struct kvbm_layout *layout;
    struct kvbm_lease *lease;
    struct kvbm_view view;
    uint8_t ok[1];
    long n;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    must(kvbm_agent_create(&who, &agent), "agent");
    must(kvbm_session_open(agent, endpoint, NULL, &session), "session");

    /* The owner keeps these blocks for 5 s, unless they are released before. */
    must(kvbm_session_lease(session, 1, 0, keys, 4, 5000, seconds_from_now(5), &lease), "lease");
    what.to = layout;
    what.n = (uint32_t)kvbm_lease_count(lease);
    what.ok = ok;
    n = kvbm_lease_read(lease, &what);
    must(n, "read");
    kvbm_lease_release(lease);

    for (uint32_t i = 0; i < what.n; i++) {
        must(kvbm_layout_block(layout, i, &view), "block");
        if (ok[0] >> i & 1)
            printf("key %d: a block of bytes %d\n", (int)keys[i],
                   *(const unsigned char *)(uintptr_t)view.addr);
        else
            printf("key %d: a miss\n", (int)keys[i]); /* compute it */
    }
    must(kvbm_session_close(session), "close");
    must(kvbm_agent_destroy(agent), "agent");
    kvbm_layout_destroy(layout);
    if (n != 3)
        exit(1);
}

int main(void)
{
    char endpoint[64], byte;
    int ready[2], end[2], status;
    pid_t owner;

    snprintf(endpoint, sizeof(endpoint), "unix:/tmp/kvbm-share-%d", (int)getpid());
    if (pipe(ready) < 0 || pipe(end) < 0)
        return 1;
    owner = fork();
    if (owner == 0) {
        close(end[1]); /* the reader's end: its death is seen */
        own(endpoint, ready[1], end[0]);
    }
    close(ready[1]);
    if (owner < 0 || read(ready[0], &byte, 1) != 1)
        return 1;
    read_blocks(endpoint);
    close(end[1]);
    return waitpid(owner, &status, 0) == owner && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
