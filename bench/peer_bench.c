// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions between agents of two processes. One JSON line per figure, its yardstick in the same run.
 *
 *     peer_bench [FIGURE]      setup, trip, bulk, idle; all of them
 *
 *   setup   open a session, the peer's set included; unix socket and tcp
 *   trip    an empty request and its reply; yardstick: one byte there and back by blocking sockets
 *   bulk    scattered blocks of the owner into scattered blocks here, two requests under way:
 *           32 blocks of 2 MiB, 64 of 64 KiB; yardstick: the same by writev and readv, blocking
 *   idle    CPU time of an agent with 16 quiet peers
 *
 * Rounds of a figure and of its yardstick take turns; medians. CPU time is of both processes: on a
 * machine with other work it says more than the clock.
 */
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_layout.h"
#include "peer/session/session.h"
#include "support.h"

#define MEMORY ((size_t)256 << 20) /* of each side: more than caches hold */
#define EMPTY 60
#define FETCH 61
#define MAX_BLOCKS 64
#define ROUNDS 9
#define PEERS 16
#define IDLE_S 5

/** Request of FETCH, and of the yardstick: blocks of @block bytes, from a seed. */
struct ask {
    uint32_t block, n, seed, pad;
};

static uint8_t *memory;
static char unix_at[108], tcp_at[64], raw_path[108];
static int raw_port;
static pid_t owner;

static void must(bool ok, const char *what)
{
    if (!ok)
        bench_die(what, -errno);
}

/* Name @n scattered blocks: equal ones on both sides for equal seeds. */
static size_t scatter(const struct ask *ask, struct iovec to[MAX_BLOCKS])
{
    size_t blocks = MEMORY / ask->block;
    uint64_t at = ask->seed;

    for (uint32_t i = 0; i < ask->n; i++) {
        at = at * UINT64_C(6364136223846793005) + 1442695040888963407u;
        to[i] = (struct iovec){memory + (at >> 33) % blocks * ask->block, ask->block};
    }
    return (size_t)ask->block * ask->n;
}

static void touch(void)
{
    memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED, "no memory");
    memset(memory, 1, MEMORY);
}

/* ---- the owner's process ---- */

static void serve_empty(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    (void)kvbm_session_reply(session, request->id, 0, NULL, 0, -1);
}

static void serve_fetch(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct iovec from[MAX_BLOCKS];
    struct ask ask;

    (void)arg;
    memcpy(&ask, request->body, sizeof(ask));
    (void)scatter(&ask, from);
    (void)kvbm_session_reply_from(session, request->id, 0, from, ask.n, NULL, NULL);
}

static int move_all(int fd, struct iovec *at, size_t n, bool out)
{
    for (size_t i = 0; i < n;) {
        ssize_t done = out ? writev(fd, at + i, (int)(n - i)) : readv(fd, at + i, (int)(n - i));

        if (done <= 0)
            return -1;
        while (i < n && (size_t)done >= at[i].iov_len)
            done -= (ssize_t)at[i++].iov_len;
        if (i < n) {
            at[i].iov_base = (char *)at[i].iov_base + done;
            at[i].iov_len -= (size_t)done;
        }
    }
    return 0;
}

/* Serve the yardstick on one connection: blocks by writev, or one byte for each empty request. */
static void *raw_main(void *arg)
{
    int fd = (int)(intptr_t)arg;
    struct iovec blocks[MAX_BLOCKS];
    struct ask ask;
    struct iovec request = {&ask, sizeof(ask)};

    while (move_all(fd, &request, 1, false) == 0) {
        request = (struct iovec){&ask, sizeof(ask)};
        if (ask.n)
            (void)scatter(&ask, blocks);
        else
            blocks[0] = (struct iovec){memory, 1};
        if (move_all(fd, blocks, ask.n ? ask.n : 1, true) < 0)
            break;
    }
    close(fd);
    return NULL;
}

static void *raw_accept_main(void *arg)
{
    for (;;) {
        int fd = accept((int)(intptr_t)arg, NULL, NULL);
        pthread_t thread;

        if (fd < 0)
            return NULL;
        must(pthread_create(&thread, NULL, raw_main, (void *)(intptr_t)fd) == 0, "no thread");
        pthread_detach(thread);
    }
}

static int raw_listen(bool is_unix)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    socklen_t len = sizeof(in);
    int fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    pthread_t thread;

    snprintf(un.sun_path, sizeof(un.sun_path), "%s", raw_path);
    must(bind(fd, is_unix ? (void *)&un : (void *)&in, is_unix ? sizeof(un) : sizeof(in)) == 0,
         "bind");
    must(listen(fd, 16) == 0, "listen");
    if (!is_unix)
        must(getsockname(fd, (struct sockaddr *)&in, &len) == 0, "getsockname");
    must(pthread_create(&thread, NULL, raw_accept_main, (void *)(intptr_t)fd) == 0, "no thread");
    return ntohs(in.sin_port);
}

static void export_set(struct kvbm_agent *agent)
{
    const struct kvbm_storage_opts storage = {.size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_layout_config config = {.size = sizeof(config),
                                        .kind = KVBM_FULLY_CONTIGUOUS,
                                        .num_blocks = 64,
                                        .num_layers = 32,
                                        .outer_dim = 2,
                                        .page_size = 16,
                                        .inner_dim = 8,
                                        .dtype_width_bytes = 2};
    struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_blockset_opts opts = {.size = sizeof(opts), .id = 1};
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;

    must(kvbm_layout_allocate(&config, &allocator, &layout) == 0, "no layout");
    opts.layout = layout;
    must(kvbm_blockset_export(agent, &opts, &set) == 0, "no set");
}

/* Serve until the parent ends. @ready gets the ports. */
static _Noreturn void owner_main(int ready)
{
    const char *const at[] = {unix_at, "tcp:127.0.0.1:0"};
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = "owner", .worker = 1, .listen = at, .n_listen = 2};
    struct kvbm_agent *agent;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    touch();
    must(kvbm_agent_create(&opts, &agent) == 0, "no agent");
    export_set(agent);
    must(kvbm_agent_serve(agent, EMPTY, serve_empty, NULL) == 0, "no service");
    must(kvbm_agent_serve(agent, FETCH, serve_fetch, NULL) == 0, "no service");
    (void)raw_listen(true);
    raw_port = raw_listen(false);
    must(kvbm_agent_endpoint(agent, 1, tcp_at, sizeof(tcp_at), NULL) > 0, "no endpoint");
    must(write(ready, tcp_at, sizeof(tcp_at)) == sizeof(tcp_at), "pipe");
    must(write(ready, &raw_port, sizeof(raw_port)) == sizeof(raw_port), "pipe");
    for (;;)
        pause();
}

static pid_t start_owner(void)
{
    int ready[2];
    pid_t pid;

    snprintf(unix_at, sizeof(unix_at), "unix:/tmp/peer-bench-%d", (int)getpid());
    snprintf(raw_path, sizeof(raw_path), "/tmp/peer-bench-%d-raw", (int)getpid());
    must(pipe(ready) == 0, "pipe");
    pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0)
        owner_main(ready[1]);
    must(read(ready[0], tcp_at, sizeof(tcp_at)) == sizeof(tcp_at), "the owner has ended");
    must(read(ready[0], &raw_port, sizeof(raw_port)) == sizeof(raw_port), "the owner has ended");
    return pid;
}

/* ---- this process ---- */

static struct kvbm_agent *make_agent(const char *name)
{
    struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = name};
    struct kvbm_agent *agent;

    must(kvbm_agent_create(&opts, &agent) == 0, "no agent");
    return agent;
}

static struct kvbm_session *open_at(struct kvbm_agent *agent, const char *at, uint32_t n_data)
{
    const struct kvbm_session_opts opts = {.size = sizeof(opts), .n_data = n_data};
    struct kvbm_session *session;
    int rc = kvbm_session_open(agent, at, &opts, &session);

    if (rc < 0)
        bench_die("no session", rc);
    return session;
}

static int raw_connect(bool is_unix)
{
    struct sockaddr_in in = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)raw_port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    int fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM, 0);

    snprintf(un.sun_path, sizeof(un.sun_path), "%s", raw_path);
    must(connect(fd, is_unix ? (void *)&un : (void *)&in, is_unix ? sizeof(un) : sizeof(in)) == 0,
         "connect");
    return fd;
}

/* CPU time of both processes in nanoseconds. */
static double both_cpu_ns(void)
{
    struct timespec ts;
    clockid_t clock;

    must(clock_getcpuclockid(owner, &clock) == 0 && clock_gettime(clock, &ts) == 0, "no clock");
    return bench_cpu_ns() + (double)kv_timespec_ns(&ts);
}

static uint64_t later(void)
{
    return kv_now_ns() + 60 * KV_NS_PER_S;
}

static void bench_setup(struct kvbm_agent *agent, bool is_unix)
{
    double each[101];

    for (size_t i = 0; i < KV_COUNT(each); i++) {
        uint64_t start = kv_now_ns();
        struct kvbm_session *session = open_at(agent, is_unix ? unix_at : tcp_at, 0);

        each[i] = (double)(kv_now_ns() - start) / 1e6;
        (void)kvbm_session_close(session);
    }
    bench_line("peer_setup", "'over': '%s', 'ms': %.3f, 'target_ms': 5", is_unix ? "unix" : "tcp",
               bench_median(each, KV_COUNT(each)));
}

#define TRIPS 2000

static double our_trips(struct kvbm_session *session)
{
    uint64_t start = kv_now_ns();

    for (int i = 0; i < TRIPS; i++) {
        struct kvbm_reply reply;
        int rc = kvbm_session_call(session, EMPTY, NULL, 0, -1, later(), &reply);

        must(rc == 0, "no reply");
        kvbm_reply_fini(&reply);
    }
    return (double)(kv_now_ns() - start) / TRIPS / 1e3;
}

static double raw_trips(int fd)
{
    const struct ask ask = {0};
    uint64_t start = kv_now_ns();
    uint8_t byte;

    for (int i = 0; i < TRIPS; i++) {
        must(write(fd, &ask, sizeof(ask)) == sizeof(ask), "write");
        must(read(fd, &byte, 1) == 1, "read");
    }
    return (double)(kv_now_ns() - start) / TRIPS / 1e3;
}

static void bench_trip(struct kvbm_agent *agent, bool is_unix)
{
    struct kvbm_session *session = open_at(agent, is_unix ? unix_at : tcp_at, 0);
    double ours[ROUNDS], raw[ROUNDS];
    int fd = raw_connect(is_unix);

    for (int i = 0; i < ROUNDS; i++) {
        raw[i] = raw_trips(fd);
        ours[i] = our_trips(session);
    }
    close(fd);
    (void)kvbm_session_close(session);
    bench_line("peer_trip", "'over': '%s', 'us': %.1f, 'raw_us': %.1f, 'ratio': %.2f",
               is_unix ? "unix" : "tcp", bench_median(ours, ROUNDS), bench_median(raw, ROUNDS),
               bench_median(ours, ROUNDS) / bench_median(raw, ROUNDS));
}

/** Speed of a round, and CPU time of both sides. */
struct speed {
    double gb_s, ns_kib;
};

static struct speed speed_of(size_t bytes, uint64_t start_ns, double start_cpu_ns)
{
    return (struct speed){(double)bytes / (double)(kv_now_ns() - start_ns),
                          (both_cpu_ns() - start_cpu_ns) / ((double)bytes / 1024)};
}

/* Fetch @n_requests with two under way. */
static struct speed our_bulk(struct kvbm_session *session, struct ask ask, int n_requests)
{
    double cpu = both_cpu_ns();
    uint64_t start = kv_now_ns();
    struct kvbm_call *calls[2];
    size_t sum = 0;

    for (int i = 0; i < n_requests + 2; i++) {
        struct iovec to[MAX_BLOCKS];
        long rc;

        if (i >= 2) {
            rc = kvbm_call_wait(calls[i % 2], later(), NULL);
            must(rc > 0, "no bytes");
            sum += (size_t)rc;
        }
        if (i >= n_requests)
            continue;
        ask.seed++;
        (void)scatter(&ask, to);
        must(kvbm_call_start(session, FETCH, &ask, sizeof(ask), -1, to, ask.n, &calls[i % 2]) == 0,
             "no call");
    }
    return speed_of(sum, start, cpu);
}

static struct speed raw_bulk(int fd, struct ask ask, int n_requests)
{
    double cpu = both_cpu_ns();
    uint64_t start = kv_now_ns();
    struct iovec to[3][MAX_BLOCKS];
    size_t sum = 0;

    for (int i = 0; i < n_requests + 2; i++) {
        if (i < n_requests) {
            ask.seed++;
            (void)scatter(&ask, to[i % 3]);
            must(write(fd, &ask, sizeof(ask)) == sizeof(ask), "write");
        }
        if (i < 2)
            continue;
        must(move_all(fd, to[(i - 2) % 3], ask.n, false) == 0, "read");
        sum += (size_t)ask.block * ask.n;
    }
    return speed_of(sum, start, cpu);
}

static void bench_bulk(struct kvbm_agent *agent, bool is_unix, uint32_t n_data, uint32_t block,
                       uint32_t n)
{
    struct kvbm_session *session = open_at(agent, is_unix ? unix_at : tcp_at, n_data);
    struct ask ask = {.block = block, .n = n};
    int n_requests = (int)(MEMORY / block / n), fd = raw_connect(is_unix);
    double ours[ROUNDS], raw[ROUNDS], our_cpu[ROUNDS], raw_cpu[ROUNDS];

    n_requests = n_requests > 64 ? 64 : n_requests;
    for (int i = 0; i < ROUNDS; i++) {
        struct speed their = raw_bulk(fd, ask, n_requests);
        struct speed our = our_bulk(session, ask, n_requests);

        raw[i] = their.gb_s;
        raw_cpu[i] = their.ns_kib;
        ours[i] = our.gb_s;
        our_cpu[i] = our.ns_kib;
    }
    close(fd);
    (void)kvbm_session_close(session);
    bench_begin("peer_bulk", "'over': '%s', 'block': %u, 'blocks': %u, 'data_connections': %u",
                is_unix ? "unix" : "tcp", block, n, n_data);
    bench_more("'gb_s': %.2f, 'raw_gb_s': %.2f, 'ratio': %.2f, 'target': 0.9",
               bench_median(ours, ROUNDS), bench_median(raw, ROUNDS),
               bench_median(ours, ROUNDS) / bench_median(raw, ROUNDS));
    bench_more("'cpu_ns_kib': %.0f, 'raw_cpu_ns_kib': %.0f", bench_median(our_cpu, ROUNDS),
               bench_median(raw_cpu, ROUNDS));
    bench_end();
}

static void bench_idle(void)
{
    struct kvbm_session *sessions[PEERS];
    struct kvbm_agent *agents[PEERS];
    struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = "hub"};
    const char *at = "tcp:127.0.0.1:0";
    char endpoint[128], name[32];
    struct kvbm_agent *hub;
    double before;

    opts.listen = &at;
    opts.n_listen = 1;
    must(kvbm_agent_create(&opts, &hub) == 0, "no agent");
    must(kvbm_agent_endpoint(hub, 0, endpoint, sizeof(endpoint), NULL) > 0, "no endpoint");
    for (int i = 0; i < PEERS; i++) {
        snprintf(name, sizeof(name), "peer-%d", i);
        agents[i] = make_agent(name);
        sessions[i] = open_at(agents[i], endpoint, 0);
    }
    before = bench_cpu_ns();
    sleep(IDLE_S);
    bench_line("peer_idle",
               "'agents': %d, 'peers_of_hub': %d, 'percent_of_core_all': %.4f, "
               "'target_percent_of_hub': 0.1",
               PEERS + 1, PEERS, (bench_cpu_ns() - before) / IDLE_S / 1e7);
    for (int i = 0; i < PEERS; i++) {
        (void)kvbm_session_close(sessions[i]);
        (void)kvbm_agent_destroy(agents[i]);
    }
    (void)kvbm_agent_destroy(hub);
}

int main(int argc, char **argv)
{
    struct kvbm_agent *agent;

    bench_usage(argc, argv, "[setup|trip|bulk|idle]...");
    owner = start_owner();
    touch();
    agent = make_agent("reader");
    for (int is_unix = 1; is_unix >= 0; is_unix--) {
        if (bench_chosen(argc, argv, "setup"))
            bench_setup(agent, is_unix);
        if (bench_chosen(argc, argv, "trip"))
            bench_trip(agent, is_unix);
        for (uint32_t n_data = 0; n_data < 3 && bench_chosen(argc, argv, "bulk"); n_data += 2) {
            bench_bulk(agent, is_unix, n_data, 2u << 20, 32);
            bench_bulk(agent, is_unix, n_data, 64u << 10, 64);
        }
    }
    if (bench_chosen(argc, argv, "idle"))
        bench_idle();
    (void)kvbm_agent_destroy(agent);
    (void)kill(owner, SIGKILL);
    (void)waitpid(owner, NULL, 0);
    unlink(unix_at + strlen("unix:"));
    unlink(raw_path);
    return 0;
}
