// SPDX-License-Identifier: Apache-2.0
/*
 * A tensor-parallel engine of two ranks, each a process with its own part of every block. The leader
 * decides which blocks leave the device, and each rank moves its part: one call, one result.
 * docs/kvbm-tiers.md explains it ("Leader and workers").
 *
 *     cc -std=gnu11 kvbm_tensor_parallel.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvbm.h"
#include "kvbm_group.h"

enum { RANKS = 2, DEVICE = 0, HOST = 1, DEVICE_BLOCKS = 8, HOST_BLOCKS = 32, MOVED = 4 };
#define WAIT_MS 20000

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* ---- a rank ---- */

/* The rank's part of blocks: here 4 of the model's heads. Memory of this process stands for the GPU's. */
static struct kvbm_layout *part_of_blocks(uint64_t n)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = n,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 16,
                                              .inner_dim = 4 * 64,
                                              .dtype_width_bytes = 2};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

static unsigned char *bytes_of(const struct kvbm_layout *layout, uint64_t block, uint64_t *len)
{
    struct kvbm_view view;

    must(kvbm_layout_block(layout, block, &view), "block");
    *len = view.len;
    return (unsigned char *)(uintptr_t)view.addr;
}

/*
 * Join when the leader listens, which a byte in @leads tells, and serve its transfers until @leads
 * closes; then look at what came back.
 */
static int work(uint32_t rank, const char *endpoint, int leads)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = rank ? "rank1" : "rank0", .fingerprint = "example"};
    const struct kvbm_session_opts soon = {.size = sizeof(soon), .timeout_ms = WAIT_MS};
    struct kvbm_layout *device = part_of_blocks(DEVICE_BLOCKS), *host = part_of_blocks(HOST_BLOCKS);
    const struct kvbm_group_place places[] = {{.id = DEVICE, .layout = device},
                                              {.id = HOST, .layout = host}};
    struct kvbm_worker_opts opts = {.size = sizeof(opts),
                                    .rank = rank,
                                    .n_ranks = RANKS,
                                    .places = places,
                                    .n_places = 2,
                                    .timeout_ms = WAIT_MS};
    struct kvbm_agent *agent;
    struct kvbm_session *leader;
    struct kvbm_worker *worker;
    uint64_t len;
    char byte;
    int wrong = 0;

    for (uint64_t block = 0; block < MOVED; block++) {
        unsigned char *bytes = bytes_of(device, block, &len);

        memset(bytes, (int)(1 + 10 * rank + block), len);
    }
    must(read(leads, &byte, 1) == 1 ? 0 : -EPIPE, "leader");
    must(kvbm_copier_create(NULL, &opts.copier), "copier");
    must(kvbm_agent_create(&who, &agent), "agent");
    must(kvbm_session_open(agent, endpoint, &soon, &leader), "session");
    must(kvbm_worker_join(leader, &opts, &worker), "join");
    /* The pools of the whole group are sized by the least that any rank has. */
    printf("rank %u: all ranks have %d host blocks\n", rank, (int)kvbm_worker_blocks(worker, HOST));
    fflush(stdout);
    while (read(leads, &byte, 1) > 0)
        ;
    for (uint64_t block = 0; block < MOVED; block++)
        wrong += bytes_of(device, MOVED + block, &len)[len - 1] != 1 + 10 * rank + block;

    kvbm_worker_leave(worker);
    must(kvbm_session_close(leader), "close");
    must(kvbm_agent_destroy(agent), "agent");
    kvbm_copier_destroy(opts.copier);
    kvbm_layout_destroy(device);
    kvbm_layout_destroy(host);
    return wrong != 0;
}

/* ---- the leader ---- */

/* Move blocks on all ranks, and wait until they are whole on each. */
static void move(struct kvbm_leader *leader, uint32_t from, const uint32_t *src, uint32_t to,
                 const uint32_t *dst)
{
    const struct kvbm_group_transfer transfer = {.size = sizeof(transfer),
                                                 .from = from,
                                                 .to = to,
                                                 .src_blocks = src,
                                                 .dst_blocks = dst,
                                                 .n = MOVED,
                                                 .flow = to == HOST ? KVBM_OFFLOAD : KVBM_ONBOARD};
    struct kvbm_group_done done;
    int64_t id = kvbm_leader_submit(leader, &transfer);
    int rc;

    must(id, "submit");
    rc = kvbm_leader_wait(leader, (uint64_t)id, WAIT_MS, &done);
    if (rc == -ETIMEDOUT) { /* the request can wait no longer: take what has come by now */
        (void)kvbm_leader_cancel(leader, (uint64_t)id); /* -ENOENT: it has just ended */
        rc = kvbm_leader_wait(leader, (uint64_t)id, WAIT_MS, &done);
    }
    must(rc, "wait");
    must(done.status, "transfer");
    printf("leader: place %u to place %u: %u of %u blocks whole on %d ranks\n", from, to, done.n_ok,
           done.n, RANKS);
    /* Had a rank been late: its blocks may be used again only when it has answered or is gone. */
    must(done.n_late ? kvbm_leader_over(leader, (uint64_t)id, WAIT_MS) : 0, "over");
}

static void lead(const char *endpoint, int ranks)
{
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = "leader",
                                        .fingerprint = "example",
                                        .listen = &endpoint,
                                        .n_listen = 1};
    const struct kvbm_leader_opts opts = {.size = sizeof(opts), .n_ranks = RANKS};
    const uint32_t computed[MOVED] = {0, 1, 2, 3}, freed[MOVED] = {4, 5, 6, 7};
    uint32_t kept[MOVED];
    struct kvbm_agent *agent;
    struct kvbm_leader *leader;
    char why[200];

    must(kvbm_agent_create(&who, &agent), "agent");
    must(kvbm_leader_create(agent, &opts, &leader), "leader");
    must(write(ranks, "..", RANKS) == RANKS ? 0 : -EPIPE, "ranks"); /* each takes one byte */
    if (kvbm_leader_ready(leader, WAIT_MS, why, sizeof(why)) < 0) {
        fprintf(stderr, "not all ranks came: %s\n", why);
        exit(1);
    }
    for (uint32_t i = 0; i < MOVED; i++)
        kept[i] = (uint32_t)kvbm_leader_blocks(leader, HOST) - 1 - i;
    move(leader, DEVICE, computed, HOST, kept); /* a request has ended: keep its blocks */
    move(leader, HOST, kept, DEVICE, freed);    /* another one begins alike: bring them back */
    must(kvbm_leader_destroy(leader), "leader");
    must(kvbm_agent_destroy(agent), "agent");
}

static pid_t start(uint32_t rank, const char *endpoint, const int leads[2])
{
    pid_t pid = fork();

    if (pid == 0) {
        close(leads[1]);
        exit(work(rank, endpoint, leads[0]));
    }
    return pid;
}

int main(void)
{
    char endpoint[64];
    pid_t ranks[RANKS];
    int leads[2], status, failed = 0;

    snprintf(endpoint, sizeof(endpoint), "unix:/tmp/kvbm-group-%d", (int)getpid());
    if (pipe(leads) < 0)
        return 1;
    for (uint32_t rank = 0; rank < RANKS; rank++)
        ranks[rank] = start(rank, endpoint, leads);
    close(leads[0]);
    lead(endpoint, leads[1]);
    close(leads[1]);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        failed |= waitpid(ranks[rank], &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status);
    return failed;
}
