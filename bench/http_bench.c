// SPDX-License-Identifier: Apache-2.0
/*
 * /query over keep-alive HTTP: requests per second of the real handlers on a filled index. Two
 * yardsticks use the same HTTP server, process and run: `echo` sends the body back, `sink` reads
 * the body and sends a reply as short as /query's. Closed loop: one client thread, HTTP_CONNECTIONS
 * connections, each with one request out. Rounds of all servers are interleaved; figures are
 * medians of the rounds. On a busy machine trust the server's CPU time per request.
 *
 * At the end, the CPU time of a hybrid's /query, of the one with full attention alone. The hybrid has
 * a window and a state beside, with what vLLM keeps of them by default.
 *
 * Usage: http_bench [ROUNDS [MS_PER_ROUND]]
 */
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/core/log.h"
#include "base/json/msgpack.h"
#include "http_load.h"
#include "indexer/service.h"
#include "kv_event.h"
#include "support.h"

#define PROMPTS 64
#define WORKERS 64
#define BLOCK 16
#define MAX_TOKENS 8192
#define VOCABULARY 150000
#define MAX_ROUNDS 101
#define WINDOW 8 /* blocks of a hybrid's window */

/* A model: the workers that hold each prompt, and whether it is a hybrid. */
struct fleet {
    const char *model;
    uint32_t holders;
    bool hybrid;
};

enum { FEW, HYBRID_FEW, MANY, HYBRID_MANY, N_FLEETS };

static const struct fleet fleets[N_FLEETS] = {
    [FEW] = {BENCH_MODEL, 4, false},
    [HYBRID_FEW] = {"few-hybrid", 4, true},
    [MANY] = {"many", 64, false},
    [HYBRID_MANY] = {"many-hybrid", 64, true},
};

/* Make prompt @p, the same for the server's index and the client's requests. */
static void make_prompt(size_t p, uint32_t *tokens)
{
    uint64_t state = p * UINT64_C(0x9e3779b97f4a7c15) + 1;

    for (size_t i = 0; i < MAX_TOKENS; i++)
        tokens[i] = (uint32_t)(next_random(&state) % VOCABULARY);
}

/* -- the server, in a child process ------------------------------------------------------------ */

static void serve_echo(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg;
    kv_buf_append(&reply->body, request->body.p, request->body.len);
}

static void serve_sink(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    (void)arg;
    (void)request;
    for (int i = 0; i < 8; i++)
        kv_buf_puts(&reply->body, "{\"status\":\"ok\"},{\"status\":\"ok\"}");
}

static void observe(void *arg, const struct kh_request *request, unsigned status)
{
    ki_telemetry_request(((struct ki_service *)arg)->telemetry, request, status);
}

/* Give a hybrid's window and state what they have where a prompt ends behind @n blocks. */
static void fill_groups(struct kvi_index *index, struct kv_holder holder,
                        const struct kv_block *blocks, size_t n)
{
    uint64_t names[WINDOW];

    for (size_t i = 0; i < WINDOW; i++)
        names[i] = blocks[n - WINDOW + i].hash;
    require(kvi_add_known(index, kvi_window_of(holder, KV_TIER_DEVICE, 0, 0), names, WINDOW) >= 0 &&
                kvi_add_known(index, kvi_window_of(holder, KV_TIER_DEVICE, 0, 1),
                              names + WINDOW - 1, 1) >= 0,
            "a hybrid's groups");
}

static void set_groups(struct kvi_index *index)
{
    const struct kvi_window window = {.group = 1, .window = 128, .need = WINDOW, .stride = 1},
                            state = {.group = 2, .need = 1, .stride = 1, .needs = KV_NEEDS_STATE};

    for (uint64_t worker = 0; worker < WORKERS; worker++) {
        struct kv_holder holder = {.worker = worker};

        require(kvi_set_window(index, holder, &window) == 0 &&
                    kvi_set_window(index, holder, &state) == 1,
                "a hybrid's windows");
    }
}

/* Fill the index: some workers hold each prompt whole, and every worker holds other prompts as
 * well. */
static void fill(struct kvi_index *index, const struct fleet *fleet)
{
    static uint32_t tokens[MAX_TOKENS];
    static uint64_t hashes[MAX_TOKENS / BLOCK];
    static struct kv_block blocks[MAX_TOKENS / BLOCK];
    size_t n = MAX_TOKENS / BLOCK;

    if (fleet->hybrid)
        set_groups(index);
    for (size_t p = 0; p < PROMPTS; p++) {
        make_prompt(p, tokens);
        kve_hash_tokens(KVE_SEED, tokens, MAX_TOKENS, BLOCK, false, hashes);
        for (size_t i = 0; i < n; i++)
            blocks[i] = (struct kv_block){.hash = (uint64_t)p << 32 | i, .tokens_hash = hashes[i]};
        for (uint64_t h = 0; h < fleet->holders; h++) {
            struct kv_holder holder = {.worker = (p + h * 7) % WORKERS, .rank = 0};

            require(kvi_store(index, holder, KV_TIER_DEVICE, NULL, blocks, n, NULL) == 0, "fill");
            for (size_t end = 512 / BLOCK; fleet->hybrid && end <= n; end *= 2)
                fill_groups(index, holder, blocks, end);
        }
    }
}

/* Register a worker of the fleet's model, and fill its index. */
static void add_fleet(struct ki_registry *registry, const struct fleet *fleet)
{
    const struct ki_registration worker = {.instance = 1 + (uint64_t)(fleet - fleets),
                                           .block_size = BLOCK,
                                           .endpoint = "ipc:///nonexistent/kv-bench",
                                           .model = (char *)fleet->model,
                                           .tenant = "default"};
    struct kv_error error = {0};
    struct ki_model *model;

    require(ki_registry_register(registry, &worker, &error) == 0, error.text);
    model = ki_registry_model(registry, worker.model, worker.tenant);
    require(model != NULL, "model");
    fill(model->index, fleet);
    ki_model_release(model);
}

static struct kh_http *start_server(struct ki_service *service, uint16_t *ret_port)
{
    static struct kh_route routes[] = {
        {"POST", "/echo", serve_echo, 8 << 20, 0},
        {"POST", "/sink", serve_sink, 8 << 20, 0},
        {"POST", "/query", ki_api_query, 8 << 20, 0},
        {"POST", "/query_by_hash", ki_api_query_by_hash, 8 << 20, 0},
    };
    const struct ki_registry_opts registry = {.threads = 1};
    const struct kh_http_opts opts = {
        .threads = 2,
        .max_connections = 100,
        .idle_timeout_ms = 60000,
        .bodies_bytes = 256 << 20,
        .max_streams = 1,
        .routes = routes,
        .n_routes = KV_COUNT(routes),
        .observe = observe,
        .arg = service,
    };
    struct kv_error error = {0};
    struct kh_http *http;
    int fd;

    pthread_mutex_init(&service->lock, NULL);
    require(ki_telemetry_create(routes, KV_COUNT(routes), &service->telemetry) == 0, "telemetry");
    require(ki_registry_create(&registry, &service->registry) == 0, "registry");
    for (size_t i = 0; i < N_FLEETS; i++)
        add_fleet(service->registry, &fleets[i]);
    require(kh_http_bind("127.0.0.1", 0, &fd, ret_port, &error) == 0, error.text);
    require(kh_http_start(fd, &opts, &http, &error) == 0, error.text);
    return http;
}

/* Print the port, then answer each byte with the CPU time used so far. Ends with its parent. */
static void run_server(int in, int out)
{
    struct ki_service service = {0};
    uint16_t port;
    char byte;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    start_server(&service, &port);
    require(write(out, &port, sizeof(port)) == sizeof(port), "write");
    while (read(in, &byte, 1) == 1) {
        double seconds = bench_cpu_ns() / 1e9;

        require(write(out, &seconds, sizeof(seconds)) == sizeof(seconds), "write");
    }
    _exit(0);
}

struct server {
    pid_t pid;
    int to, from;
    uint16_t port;
};

static struct server spawn_server(void)
{
    struct server server;
    int to[2], from[2];

    require(pipe(to) == 0 && pipe(from) == 0, "pipe");
    server.pid = fork();
    require(server.pid >= 0, "fork");
    if (server.pid == 0) {
        close(to[1]);
        close(from[0]);
        run_server(to[0], from[1]);
    }
    close(to[0]);
    close(from[1]);
    server.to = to[1];
    server.from = from[0];
    require(read(server.from, &server.port, sizeof(server.port)) == sizeof(server.port), "start");
    return server;
}

static double cpu_seconds(const struct server *server)
{
    double seconds;

    require(write(server->to, "", 1) == 1, "write");
    require(read(server->from, &seconds, sizeof(seconds)) == sizeof(seconds), "read");
    return seconds;
}

/* -- requests ---------------------------------------------------------------------------------- */

static void write_msgpack(struct kv_buf *body, const uint32_t *tokens, size_t n)
{
    kv_buf_clear(body);
    kv_msgpack_put_map(body, 2);
    kv_msgpack_put_str(body, "model_name");
    kv_msgpack_put_str(body, BENCH_MODEL);
    kv_msgpack_put_str(body, "token_ids");
    kv_msgpack_put_bin(body, tokens, n * sizeof(*tokens));
}

enum { SINK, ECHO, QUERY, N_SERVERS };
static const char *const paths[N_SERVERS] = {"/sink", "/echo", "/query"};

static void make_requests(struct request requests[N_SERVERS][PROMPTS], size_t n, bool packed)
{
    static uint32_t tokens[MAX_TOKENS];
    struct kv_buf body = KV_BUF_INIT;

    for (size_t p = 0; p < PROMPTS; p++) {
        make_prompt(p, tokens);
        if (packed)
            write_msgpack(&body, tokens, n);
        else
            write_query(&body, BENCH_MODEL, tokens, n);
        for (int s = 0; s < N_SERVERS; s++)
            request_make(&requests[s][p], paths[s],
                         packed ? "application/msgpack" : "application/json", &body);
    }
    kv_buf_fini(&body);
}

/* Check an answer before measuring its speed. */
static void check_answer(const struct server *server, const struct request *request, size_t n)
{
    struct kv_buf reply = KV_BUF_INIT;
    char wanted[32];

    require(http_ask(server->port, request, &reply) == 200, "the query");
    snprintf(wanted, sizeof(wanted), "{\"0\":%zu}", n / BLOCK * BLOCK);
    require(strstr(kv_buf_cstr(&reply), wanted) != NULL, reply.data);
    kv_buf_fini(&reply);
}

/* -- figures ----------------------------------------------------------------------------------- */

static void run_case(const struct server *server, const char *name, size_t n, bool packed,
                     size_t rounds, uint64_t ms)
{
    static struct request requests[N_SERVERS][PROMPTS];
    static double rate[N_SERVERS][MAX_ROUNDS], cpu[N_SERVERS][MAX_ROUNDS];
    double r[N_SERVERS], c[N_SERVERS];

    make_requests(requests, n, packed);
    check_answer(server, &requests[QUERY][3], n);
    for (size_t i = 0; i < rounds; i++)
        for (int s = 0; s < N_SERVERS; s++) {
            double before = cpu_seconds(server), seconds;
            uint64_t n_done = http_load(server->port, requests[s], PROMPTS, ms, 0, &seconds);

            rate[s][i] = (double)n_done / seconds;
            cpu[s][i] = (cpu_seconds(server) - before) * 1e6 / (double)n_done;
        }
    for (int s = 0; s < N_SERVERS; s++) {
        r[s] = bench_median(rate[s], rounds);
        c[s] = bench_median(cpu[s], rounds);
    }
    bench_line(
        "http_query",
        "'case':'%s','tokens':%zu,'body_bytes':%zu,'connections':%d,'rounds':%zu,'query_per_s':%."
        "0f,'echo_per_s':%.0f,'sink_per_s':%.0f,'of_echo':%.3f,'of_sink':%.3f,'query_cpu_us':%.1f,'"
        "echo_cpu_us':%.1f,'sink_cpu_us':%.1f,'cpu_of_echo':%.3f,'cpu_of_sink':%.3f",
        name, n, requests[QUERY][0].text.len, HTTP_CONNECTIONS, rounds, r[QUERY], r[ECHO], r[SINK],
        r[QUERY] / r[ECHO], r[QUERY] / r[SINK], c[QUERY], c[ECHO], c[SINK], c[ECHO] / c[QUERY],
        c[SINK] / c[QUERY]);
    for (int s = 0; s < N_SERVERS; s++)
        for (size_t p = 0; p < PROMPTS; p++)
            kv_buf_fini(&requests[s][p].text);
}

/* CPU time of a hybrid's /query, of the plain model's next to it; the same prompts, in turns. */
static void run_hybrid(const struct server *server, const struct fleet *pair, size_t n,
                       size_t rounds, uint64_t ms)
{
    static struct request requests[2][PROMPTS];
    static double cpu[2][MAX_ROUNDS];
    static uint32_t tokens[MAX_TOKENS];
    struct kv_buf body = KV_BUF_INIT;
    double seconds;

    for (size_t p = 0; p < PROMPTS; p++) {
        make_prompt(p, tokens);
        for (int k = 0; k < 2; k++) {
            write_query(&body, pair[k].model, tokens, n);
            request_make(&requests[k][p], "/query", "application/json", &body);
        }
    }
    for (int k = 0; k < 2; k++)
        check_answer(server, &requests[k][3], n);
    for (size_t i = 0; i < rounds; i++)
        for (int k = 0; k < 2; k++) {
            double before = cpu_seconds(server);
            uint64_t n_done = http_load(server->port, requests[k], PROMPTS, ms, 0, &seconds);

            cpu[k][i] = (cpu_seconds(server) - before) * 1e6 / (double)n_done;
        }
    bench_line("http_hybrid",
               "'holders':%u,'tokens':%zu,'rounds':%zu,'plain_cpu_us':%.1f,'hybrid_cpu_us':%.1f,"
               "'hybrid_to_plain':%.3f",
               pair->holders, n, rounds, bench_median(cpu[0], rounds), bench_median(cpu[1], rounds),
               bench_median(cpu[1], rounds) / bench_median(cpu[0], rounds));
    for (int k = 0; k < 2; k++)
        for (size_t p = 0; p < PROMPTS; p++)
            kv_buf_fini(&requests[k][p].text);
    kv_buf_fini(&body);
}

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[ROUNDS [MS_PER_ROUND]]");

    size_t rounds = KV_MIN(bench_number(argc, argv, 1, 9), (uint64_t)MAX_ROUNDS);
    uint64_t ms = bench_number(argc, argv, 2, 300);
    struct server server;

    kv_log_set_level(KV_LOG_ERROR);
    require(rounds > 0 && ms > 0, "usage: http_bench [ROUNDS [MS_PER_ROUND]]");
    server = spawn_server();
    run_case(&server, "json", 512, false, rounds, ms);
    run_case(&server, "json", 8192, false, rounds, ms);
    run_case(&server, "msgpack_bin", 512, true, rounds, ms);
    run_case(&server, "msgpack_bin", 8192, true, rounds, ms);
    run_hybrid(&server, &fleets[FEW], 512, rounds, ms);
    run_hybrid(&server, &fleets[MANY], 1024, rounds, ms);
    run_hybrid(&server, &fleets[MANY], 8192, rounds, ms);
    close(server.to);
    waitpid(server.pid, NULL, 0);
    return 0;
}
