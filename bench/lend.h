// SPDX-License-Identifier: Apache-2.0
/**
 * Figures of leases for lend_bench: a reader and an owner in a process of its own.
 *
 *   shm    copy leased blocks from shared memory. Yardstick: memcpy of as many blocks as scattered
 *   tcp    fetch leased blocks over loopback. Yardstick: a raw pair, writev and read, two requests
 *          under way
 *   lease  lease and release. Yardstick: an empty round trip in the same session
 *
 * Yardstick and figure alternate within each round.
 */
#ifndef BENCH_LEND_H
#define BENCH_LEND_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../tests/peer/certificates.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_lease.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend.h"
#include "support.h"

#define LEND_ROUNDS 9
#define LEND_BYTES (UINT64_C(128) << 20) /* of each side's blocks */

/* Blocks of a figure, as both sides have them. */
struct lend_case {
    const char *name;
    uint64_t block_bytes;
    uint32_t batch;    /* blocks of a lease */
    uint32_t n_blocks; /* of each side */
    bool tcp;
    bool ucx;                       /* both sides use it; with tcp */
    const struct certificates *tls; /* of both sides; with tcp. NULL: none */
    /* Move bytes of the raw pair; NULL: readv and writev. */
    bool (*move)(int fd, struct iovec *pieces, int n, bool out);
};

struct lend_bench {
    struct lend_case of;
    pid_t owner;
    int raw;         /* socket of the raw pair */
    double setup_ms; /* to create the agent and to open the session */
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *to;
    char *yard; /* memory of the yardstick's source, as large as the owner's */
    uint64_t *keys;
    uint32_t *to_blocks;
};

static struct kvbm_layout_config lend_config_of(const struct lend_case *of)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = of->n_blocks,
                                       .num_layers = 2,
                                       .outer_dim = 2,
                                       .page_size = 16,
                                       .inner_dim = (uint32_t)(of->block_bytes / 4 / 16 / 2),
                                       .dtype_width_bytes = 2,
                                       .alignment = 4096};
}

static void lend_must(long rc, const char *what)
{
    if (rc < 0)
        bench_die(what, (int)rc);
}

/* Number of block @i in an order that visits all, scattered. */
static uint32_t lend_scattered(const struct lend_case *of, uint32_t i)
{
    return (uint32_t)((uint64_t)i * 7919 % of->n_blocks);
}

/* ---- the owner's process ---- */

static void lend_fill_pool(struct kvbm_pool *pool, const struct kvbm_layout *layout, uint32_t n)
{
    for (uint64_t key = 1; key <= n; key++) {
        const struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};
        struct kvbm_mutable block;
        struct kvbm_complete complete;
        struct kvbm_immutable held;
        struct kvbm_view view;

        lend_must(kvbm_pool_allocate(pool, 1, &block, NULL), "allocate");
        lend_must(kvbm_layout_block(layout, block.handle.block, &view), "block");
        memset((void *)(uintptr_t)view.addr, (int)(key | 1), view.len);
        lend_must(kvbm_pool_complete(pool, &block, 1, &chain, &complete), "complete");
        lend_must(kvbm_pool_register(pool, &complete, 1, &held), "register");
        lend_must(kvbm_immutable_release(&held), "release");
    }
}

static bool lend_move(const struct lend_case *of, int fd, struct iovec *pieces, int n, bool out)
{
    if (of->move)
        return of->move(fd, pieces, n, out);
    while (n > 0) {
        ssize_t len =
            out ? writev(fd, pieces, KV_MIN(n, 1024)) : readv(fd, pieces, KV_MIN(n, 1024));

        if (len <= 0)
            return false;
        for (; n > 0 && (size_t)len >= pieces->iov_len; pieces++, n--)
            len -= (ssize_t)pieces->iov_len;
        if (n > 0) {
            pieces->iov_base = (char *)pieces->iov_base + len;
            pieces->iov_len -= (size_t)len;
        }
    }
    return true;
}

/* Serve the raw pair: each request is a batch of block numbers, its answer their bytes. */
static void *lend_serve_raw(void *arg)
{
    void **given = arg;
    const struct kvbm_layout *layout = given[0];
    const struct lend_case *of = given[1];
    int fd = *(int *)given[2];
    uint32_t *blocks = malloc(of->batch * sizeof(*blocks));
    struct iovec *pieces = malloc(of->batch * sizeof(*pieces));

    while (blocks && pieces) {
        struct iovec request = {blocks, of->batch * sizeof(*blocks)};
        struct kvbm_view view;

        if (!lend_move(of, fd, &request, 1, false))
            break;
        for (uint32_t i = 0; i < of->batch; i++) {
            (void)kvbm_layout_block(layout, blocks[i], &view);
            pieces[i] = (struct iovec){(void *)(uintptr_t)view.addr, view.len};
        }
        if (!lend_move(of, fd, pieces, (int)of->batch, true))
            break;
    }
    free(blocks);
    free(pieces);
    return NULL;
}

/* Options that both sides have alike. */
static void lend_choose(struct kvbm_agent_opts *who, const struct lend_case *of)
{
    who->ucx = of->ucx ? KVBM_UCX_REQUIRED : KVBM_UCX_OFF;
    if (!of->tls)
        return;
    who->tls_cert = of->tls->cert;
    who->tls_key = of->tls->key;
    who->tls_ca = of->tls->ca;
}

static _Noreturn void lend_own(const struct lend_case *of, int ready, int raw)
{
    const struct kvbm_layout_config config = lend_config_of(of);
    const char *at = "tcp:127.0.0.1:0";
    char path[96], endpoint[128] = "";
    struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "owner", .listen = &at, .n_listen = 1};
    struct kvbm_shared_opts memory = {.size = sizeof(memory), .n_blocks = of->n_blocks};
    struct kvbm_pool_opts pool_opts = {
        .size = sizeof(pool_opts), .n_blocks = of->n_blocks, .block_size = 16};
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};
    struct kvbm_block_source source;
    struct kvbm_allocator allocator;
    struct kvbm_layout_shape shape;
    struct kvbm_registry *registry;
    struct kvbm_shared *shared;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    struct kvbm_agent *agent;
    struct kvbm_pool *pool;
    pthread_t thread;
    void *given[3];

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(path, sizeof(path), "unix:/tmp/kvbm-bench-%d", (int)getpid());
    if (!of->tcp)
        at = path;
    lend_choose(&who, of);
    pool_opts.tier = KV_TIER_HOST;
    lend_must(kvbm_layout_compute(&config, &shape), "compute");
    memory.bytes = shape.required_bytes;
    lend_must(kvbm_shared_create(&memory, &shared), "shared memory");
    allocator = kvbm_shared_allocator(shared);
    lend_must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    lend_must(kvbm_registry_create(NULL, &registry), "registry");
    lend_must(kvbm_pool_create(registry, &pool_opts, &pool), "pool");
    lend_fill_pool(pool, layout, of->n_blocks);
    lend_must(kvbm_agent_create(&who, &agent), "agent");
    source = kvbm_pool_source(pool);
    what.layout = layout;
    what.source = &source;
    what.shared = shared;
    lend_must(kvbm_blockset_export(agent, &what, &set), "export");
    given[0] = layout;
    given[1] = (void *)(uintptr_t)of;
    given[2] = &raw;
    if (pthread_create(&thread, NULL, lend_serve_raw, given) != 0)
        bench_die("no thread", 0);
    lend_must(kvbm_agent_endpoint(agent, 0, endpoint, sizeof(endpoint), NULL), "endpoint");
    if (write(ready, endpoint, sizeof(endpoint)) != (ssize_t)sizeof(endpoint))
        exit(1);
    for (;;)
        pause();
}

/* ---- the reader ---- */

/* Make a connected pair of tcp sockets, tuned as sessions are. */
static void lend_tcp_pair(int pair[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

    pair[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&at, sizeof(at)) < 0 || listen(listener, 1) < 0 ||
        getsockname(listener, (struct sockaddr *)&at, &len) < 0 ||
        connect(pair[0], (struct sockaddr *)&at, sizeof(at)) < 0)
        bench_die("no tcp pair", -errno);
    pair[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int i = 0; i < 2; i++)
        (void)setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static void lend_open(struct lend_bench *b)
{
    const struct kvbm_layout_config config = lend_config_of(&b->of);
    struct kvbm_agent_opts who = {.size = sizeof(who), .name = "reader"};
    const struct kvbm_storage_opts memory = {
        .size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM, .touch_threads = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    char endpoint[128];
    int ready[2], pair[2];
    uint64_t begin;

    lend_tcp_pair(pair);
    if (pipe(ready) < 0)
        bench_die("no pipe", -errno);
    b->owner = fork();
    if (b->owner == 0)
        lend_own(&b->of, ready[1], pair[1]);
    close(pair[1]);
    close(ready[1]);
    b->raw = pair[0];
    if (read(ready[0], endpoint, sizeof(endpoint)) != (ssize_t)sizeof(endpoint))
        bench_die("the owner has ended", 0);
    close(ready[0]);
    lend_must(kvbm_layout_allocate(&config, &allocator, &b->to), "layout");
    lend_choose(&who, &b->of);
    begin = kv_now_ns();
    lend_must(kvbm_agent_create(&who, &b->agent), "agent");
    lend_must(kvbm_session_open(b->agent, endpoint, NULL, &b->session), "session");
    b->setup_ms = (double)(kv_now_ns() - begin) / 1e6;
    b->yard = malloc(b->of.n_blocks * b->of.block_bytes);
    b->keys = malloc(b->of.n_blocks * sizeof(*b->keys));
    b->to_blocks = malloc(b->of.n_blocks * sizeof(*b->to_blocks));
    if (!b->yard || !b->keys || !b->to_blocks)
        bench_die("no memory", 0);
    memset(b->yard, 5, b->of.n_blocks * b->of.block_bytes);
    for (uint32_t i = 0; i < b->of.n_blocks; i++) {
        b->keys[i] = 1 + lend_scattered(&b->of, i);
        b->to_blocks[i] = lend_scattered(&b->of, i * 3 + 1);
    }
}

static void lend_close(struct lend_bench *b)
{
    lend_must(kvbm_session_close(b->session), "close");
    lend_must(kvbm_agent_destroy(b->agent), "destroy");
    kvbm_layout_destroy(b->to);
    kill(b->owner, SIGKILL);
    waitpid(b->owner, NULL, 0);
    if (!b->of.tcp) {
        char path[96];

        snprintf(path, sizeof(path), "/tmp/kvbm-bench-%d", (int)b->owner);
        (void)unlink(path);
    }
    close(b->raw);
    free(b->yard);
    free(b->keys);
    free(b->to_blocks);
}

static double lend_cpu_of(pid_t pid)
{
    struct timespec ts;
    clockid_t clock;

    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &ts) != 0)
        bench_die("no clock of the owner", 0);
    return (double)kv_timespec_ns(&ts);
}

static uint64_t lend_later(void)
{
    return kv_now_ns() + 60 * KV_NS_PER_S;
}

static void *lend_at(const struct kvbm_layout *layout, uint32_t block)
{
    struct kvbm_view view;

    lend_must(kvbm_layout_block(layout, block, &view), "block");
    return (void *)(uintptr_t)view.addr;
}

/* Seconds and CPU of both sides for a pass over all blocks. */
struct lend_cost {
    double wall_ns, reader_ns, owner_ns;
};

struct lend_costs {
    struct bench_samples gbs, cpu, owner;
};

static void lend_add(struct lend_costs *costs, const struct lend_bench *b, struct lend_cost cost)
{
    double bytes = (double)b->of.n_blocks * (double)b->of.block_bytes;

    bench_sample(&costs->gbs, bytes / cost.wall_ns);
    bench_sample(&costs->cpu, (cost.reader_ns + cost.owner_ns) / (bytes / 1024));
    bench_sample(&costs->owner, cost.owner_ns / (bytes / 1024));
}

static void lend_begin(const struct lend_bench *b, struct lend_cost *cost)
{
    *cost = (struct lend_cost){.reader_ns = bench_cpu_ns(), .owner_ns = lend_cpu_of(b->owner)};
}

static void lend_end(const struct lend_bench *b, struct lend_cost *cost)
{
    cost->reader_ns = bench_cpu_ns() - cost->reader_ns;
    cost->owner_ns = lend_cpu_of(b->owner) - cost->owner_ns;
}

/* A pass of the yardstick of shared memory. */
static struct lend_cost lend_pass_memcpy(struct lend_bench *b)
{
    struct lend_cost cost;
    uint64_t begin;

    lend_begin(b, &cost);
    begin = kv_now_ns();
    for (uint32_t i = 0; i < b->of.n_blocks; i++)
        memcpy(lend_at(b->to, b->to_blocks[i]), b->yard + (b->keys[i] - 1) * b->of.block_bytes,
               b->of.block_bytes);
    cost.wall_ns = (double)(kv_now_ns() - begin);
    lend_end(b, &cost);
    return cost;
}

/* A pass of leases and reads; the time of the leases counts only with @leases. */
static struct lend_cost lend_pass_read(struct lend_bench *b, bool leases, bool sums)
{
    struct lend_cost all = {0};

    for (uint32_t i = 0; i < b->of.n_blocks; i += b->of.batch) {
        struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                            .to = b->to,
                                            .to_blocks = b->to_blocks + i,
                                            .n = b->of.batch,
                                            .no_checksums = !sums,
                                            .deadline_ns = lend_later()};
        struct kvbm_lease *lease;
        struct lend_cost cost;
        uint64_t begin = kv_now_ns();

        if (leases)
            lend_begin(b, &cost);
        lend_must(kvbm_session_lease(b->session, 1, 0, b->keys + i, b->of.batch, 60000,
                                     lend_later(), &lease),
                  "lease");
        if (!leases) {
            lend_begin(b, &cost);
            begin = kv_now_ns();
        }
        if (kvbm_lease_read(lease, &opts) != (long)b->of.batch)
            bench_die("blocks are missing", 0);
        all.wall_ns += (double)(kv_now_ns() - begin);
        lend_end(b, &cost);
        all.reader_ns += cost.reader_ns;
        all.owner_ns += cost.owner_ns;
        kvbm_lease_release(lease);
    }
    return all;
}

static void lend_shm(struct lend_case of)
{
    struct lend_bench b = {.of = of};
    struct lend_costs yard = {.gbs = {.n = 0}}, shm = yard, with = yard;

    b.of.n_blocks = (uint32_t)(LEND_BYTES / of.block_bytes);
    lend_open(&b);
    (void)lend_pass_read(&b, false, true); /* maps the pages */
    (void)lend_pass_memcpy(&b);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        lend_add(&yard, &b, lend_pass_memcpy(&b));
        lend_add(&shm, &b, lend_pass_read(&b, false, true));
        lend_add(&with, &b, lend_pass_read(&b, true, true));
    }
    bench_line("peer_shm",
               "'case':'%s','gbs':%.2f,'with_lease_gbs':%.2f,'memcpy_gbs':%.2f,'ratio':%.2f,"
               "'cpu_ns_kib':%.0f,'memcpy_cpu_ns_kib':%.0f,'owner_cpu_ns_kib':%.2f",
               of.name, bench_middle(&shm.gbs), bench_middle(&with.gbs), bench_middle(&yard.gbs),
               bench_middle(&shm.gbs) / bench_middle(&yard.gbs), bench_middle(&shm.cpu),
               bench_middle(&yard.cpu), bench_middle(&shm.owner));
    lend_close(&b);
}

/* ---- through sockets ---- */

static void lend_ask_raw(struct lend_bench *b, uint32_t first)
{
    uint32_t numbers[64];
    struct iovec request = {numbers, b->of.batch * sizeof(*numbers)};

    for (uint32_t i = 0; i < b->of.batch; i++)
        numbers[i] = (uint32_t)(b->keys[first + i] - 1);
    if (!lend_move(&b->of, b->raw, &request, 1, true))
        bench_die("the raw pair has ended", 0);
}

static struct lend_cost lend_pass_raw(struct lend_bench *b)
{
    struct iovec pieces[64];
    struct lend_cost cost;
    uint64_t begin;

    lend_begin(b, &cost);
    begin = kv_now_ns();
    lend_ask_raw(b, 0);
    for (uint32_t first = 0; first < b->of.n_blocks; first += b->of.batch) {
        if (first + b->of.batch < b->of.n_blocks)
            lend_ask_raw(b, first + b->of.batch);
        for (uint32_t i = 0; i < b->of.batch; i++)
            pieces[i] = (struct iovec){lend_at(b->to, b->to_blocks[first + i]), b->of.block_bytes};
        if (!lend_move(&b->of, b->raw, pieces, (int)b->of.batch, false))
            bench_die("the raw pair has ended", 0);
    }
    cost.wall_ns = (double)(kv_now_ns() - begin);
    lend_end(b, &cost);
    return cost;
}

static void lend_print_fetch(const char *bench, const char *by, const struct lend_bench *b,
                             struct lend_costs *yard, struct lend_costs *plain,
                             struct lend_costs *summed)
{
    double raw = bench_middle(&yard->gbs);

    bench_line(bench,
               "'case':'%s','by':'%s','gbs':%.2f,'summed_gbs':%.2f,'raw_gbs':%.2f,'ratio':%.2f,"
               "'summed_ratio':%.2f,'cpu_ns_kib':%.0f,'summed_cpu_ns_kib':%.0f,"
               "'raw_cpu_ns_kib':%.0f",
               b->of.name, by, bench_middle(&plain->gbs), bench_middle(&summed->gbs), raw,
               bench_middle(&plain->gbs) / raw, bench_middle(&summed->gbs) / raw,
               bench_middle(&plain->cpu), bench_middle(&summed->cpu), bench_middle(&yard->cpu));
}

static void lend_tcp(struct lend_case of)
{
    struct lend_bench b = {.of = of};
    struct lend_costs yard = {.gbs = {.n = 0}}, plain = yard, summed = yard;

    b.of.tcp = true;
    b.of.n_blocks = (uint32_t)(LEND_BYTES / of.block_bytes);
    lend_open(&b);
    (void)lend_pass_read(&b, true, true);
    (void)lend_pass_raw(&b);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        lend_add(&yard, &b, lend_pass_raw(&b));
        lend_add(&plain, &b, lend_pass_read(&b, false, false));
        lend_add(&summed, &b, lend_pass_read(&b, false, true));
    }
    lend_print_fetch("peer_tcp", "tcp", &b, &yard, &plain, &summed);
    lend_close(&b);
}

/* ---- leases ---- */

/* Microseconds of an empty round trip: to release a lease that isn't there. */
static double lend_trip(struct lend_bench *b)
{
    struct kv_buf body = KV_BUF_INIT;
    uint64_t begin = kv_now_ns();
    struct kvbm_reply reply;

    kvbm_number_write(&body, 0);
    lend_must(kvbm_session_call(b->session, KVBM_ASK_RELEASE, body.data, body.len, -1, lend_later(),
                                &reply),
              "call");
    kvbm_reply_fini(&reply);
    kv_buf_fini(&body);
    return (double)(kv_now_ns() - begin) / 1e3;
}

static double lend_lease(struct lend_bench *b, uint32_t n)
{
    uint64_t begin = kv_now_ns();
    struct kvbm_lease *lease;

    lend_must(kvbm_session_lease(b->session, 1, 0, b->keys, n, 60000, lend_later(), &lease),
              "lease");
    if (kvbm_lease_count(lease) != n)
        bench_die("a short lease", 0);
    kvbm_lease_release(lease);
    return (double)(kv_now_ns() - begin) / 1e3;
}

static void lend_leases(void)
{
    struct lend_bench b = {.of = {.block_bytes = 4096, .batch = 64, .n_blocks = 2048}};
    enum { TURNS = 200 };
    struct bench_samples trip = {.n = 0}, one = trip, many = trip;

    lend_open(&b);
    (void)lend_lease(&b, 1024);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        double trips[TURNS], ones[TURNS], lots[TURNS];

        for (int i = 0; i < TURNS; i++) {
            trips[i] = lend_trip(&b);
            ones[i] = lend_lease(&b, 1);
            lots[i] = lend_lease(&b, 1024);
        }
        bench_sample(&trip, bench_median(trips, TURNS));
        bench_sample(&one, bench_median(ones, TURNS));
        bench_sample(&many, bench_median(lots, TURNS));
    }
    bench_line("peer_lease",
               "'trip_us':%.1f,'one_us':%.1f,'ratio':%.2f,'of_1024_us':%.0f,'us_per_block':%.3f",
               bench_middle(&trip), bench_middle(&one), bench_middle(&one) / bench_middle(&trip),
               bench_middle(&many), bench_middle(&many) / 1024);
    lend_close(&b);
}

#endif
