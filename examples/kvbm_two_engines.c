// SPDX-License-Identifier: Apache-2.0
/*
 * Two engines of one machine that share their blocks: each has tiers of its own, lends its blocks,
 * and takes from the other what its own tiers lack. docs/peers.md explains it; between machines only
 * the endpoints differ.
 *
 *     cc -std=gnu11 kvbm_two_engines.c $(pkg-config --cflags --libs kvbm)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvbm.h"

#define PROMPT 8 /* blocks that the first engine computes */
#define REPLY 2  /* further ones, of the second engine */
#define CACHE 16 /* blocks of an engine's own cache */
#define WAIT_MS 5000

/* An engine: its cache, its tiers, and its agent among the others. */
struct engine {
    const char *name;
    struct kvbm_layout *layout;
    struct kvbm_manager *manager;
    struct kvbm_cache *cache;
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
};

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* Make an engine that listens at @endpoint and follows @peers, which may name itself, too. */
static void start(struct engine *e, const char *name, const char *endpoint, const char *peers)
{
    const struct kvbm_layout_config block = {.size = sizeof(block),
                                             .kind = KVBM_FULLY_CONTIGUOUS,
                                             .num_blocks = CACHE,
                                             .num_layers = 2,
                                             .outer_dim = 2,
                                             .page_size = 16,
                                             .inner_dim = 64,
                                             .dtype_width_bytes = 2};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    /* Model, revision, parallel rank: all that makes equal keys mean equal bytes. */
    const char *fingerprint = "example-model@1 tp0of1";
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .fingerprint = fingerprint,
                                        .listen = &endpoint,
                                        .n_listen = 1,
                                        .layout = &block};
    struct kvbm_manager_opts tiers = {.size = sizeof(tiers),
                                      .block = &block,
                                      .fingerprint = fingerprint,
                                      .host_bytes = 4 << 20,
                                      .host_shared =
                                          true, /* local peers copy without this process */
                                      .peers = peers};
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1};
    struct kvbm_block_source source;

    e->name = name;
    must(kvbm_layout_allocate(&block, &allocator, &e->layout), "layout");
    must(kvbm_agent_create(&who, &e->agent), "agent");
    tiers.agent = e->agent;
    must(kvbm_manager_create(&tiers, &e->manager), "manager");
    cache.layout = e->layout;
    must(kvbm_cache_attach(e->manager, &cache, &e->cache), "cache");

    source = kvbm_manager_source(e->manager);
    what.layout = kvbm_manager_host_layout(e->manager);
    what.source = &source;
    what.shared = kvbm_manager_shared(e->manager);
    must(kvbm_blockset_export(e->agent, &what, &e->set), "export");
}

static void stop(struct engine *e)
{
    kvbm_blockset_destroy(e->set); /* first: it ends all leases */
    must(kvbm_cache_detach(e->cache), "detach");
    must(kvbm_manager_destroy(e->manager, WAIT_MS), "manager");
    must(kvbm_agent_destroy(e->agent), "agent");
    kvbm_layout_destroy(e->layout);
}

/* ---- what an engine does ---- */

static void *block_of(const struct engine *e, uint32_t block)
{
    struct kvbm_view view;

    must(kvbm_layout_block(e->layout, block, &view), "block");
    return (void *)(uintptr_t)view.addr;
}

/* Compute blocks @from to @to of the prompt, and store them. Key and bytes are made up here. */
static void compute(struct engine *e, uint32_t from, uint32_t to)
{
    uint64_t keys[PROMPT + REPLY];
    uint32_t blocks[PROMPT + REPLY];
    const struct kvbm_chain chain = {.size = sizeof(chain),
                                     .keys = keys + from,
                                     .parent = from ? &keys[from - 1] : NULL,
                                     .position = from};

    for (uint32_t i = 0; i < to; i++) {
        keys[i] = 100 + i;
        blocks[i] = i;
    }
    for (uint32_t i = from; i < to; i++)
        memset(block_of(e, i), (int)keys[i], 8192);
    must(kvbm_cache_store(e->cache, &chain, to - from, blocks + from, WAIT_MS), "store");
    printf("%s: computed blocks %u to %u\n", e->name, from, to - 1);
}

/* Load the first @n blocks of the prompt, from whichever tier or peer. Returns how many came. */
static long load(struct engine *e, uint32_t n)
{
    uint64_t keys[PROMPT + REPLY];
    uint32_t blocks[PROMPT + REPLY];
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};
    long came = 0;

    for (uint32_t i = 0; i < n; i++) {
        keys[i] = 100 + i;
        blocks[i] = i;
    }
    /* Sessions open in the background: an engine that has just started finds its peers soon. */
    for (int tries = 0; came < (long)n && tries < 500; tries++) {
        came = kvbm_cache_load(e->cache, &chain, n, blocks, WAIT_MS);
        must(came, "load");
        if (came < (long)n)
            (void)usleep(10000);
    }
    for (uint32_t i = 0; i < (uint32_t)came; i++)
        if (*(const unsigned char *)block_of(e, i) != keys[i])
            return -1;
    must(kvbm_manager_get_stats(e->manager, &stats), "stats");
    printf("%s: loaded %ld of %u blocks, %llu of them from its peer\n", e->name, came, n,
           (unsigned long long)stats.peer.blocks_out);
    return came;
}

/* ---- two processes, which take turns ---- */

static void next(int fd)
{
    char byte = 0;

    if (fflush(stdout) != 0 || write(fd, &byte, 1) != 1)
        exit(1);
}

static void await(int fd)
{
    char byte;

    if (read(fd, &byte, 1) != 1)
        exit(1);
}

int main(void)
{
    char endpoints[2][64], peers[160];
    struct engine e = {.name = NULL};
    int there[2], back[2], status = 0;
    bool ok;
    pid_t other;

    snprintf(endpoints[0], sizeof(endpoints[0]), "unix:/tmp/kvbm-prefill-%d", (int)getpid());
    snprintf(endpoints[1], sizeof(endpoints[1]), "unix:/tmp/kvbm-decode-%d", (int)getpid());
    snprintf(peers, sizeof(peers), "%s, %s", endpoints[0], endpoints[1]);
    if (pipe(there) < 0 || pipe(back) < 0)
        return 1;
    other = fork();
    if (other < 0)
        return 1;
    if (other == 0) {
        close(there[1]);
        close(back[0]);
        start(&e, "decode", endpoints[1], peers);
        await(there[0]);
        ok = load(&e, PROMPT) == PROMPT; /* nothing was computed here: all of it is the peer's */
        compute(&e, PROMPT, PROMPT + REPLY);
        next(back[1]);
        await(there[0]); /* until the peer has what it wants */
        stop(&e);
        exit(!ok);
    }
    close(there[0]);
    close(back[1]);
    start(&e, "prefill", endpoints[0], peers);
    compute(&e, 0, PROMPT);
    next(there[1]);
    await(back[0]);
    ok = load(&e, PROMPT + REPLY) == PROMPT + REPLY;
    next(there[1]);
    stop(&e);
    return waitpid(other, &status, 0) == other && WIFEXITED(status) && ok ? WEXITSTATUS(status) : 1;
}
