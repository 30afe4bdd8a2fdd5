// SPDX-License-Identifier: Apache-2.0
/*
 * Cost of a choice for a server that speaks the selection API: kv-selector, and others beside it.
 *
 *     selector_bench [kvasir='build/bin/kv-selector --port {port}' dynamo='... {port}']
 *
 * A cycle is select_and_reserve, prefill_complete and DELETE; each worker holds half of 64 prompts. The
 * figure is the server's CPU time a cycle, kernel included, over 8 connections.
 */
#include <inttypes.h>

#include "publish_load.h"
#include "server.h"
#include "support.h"

enum { MAX_SERVERS = 4, WORKERS_MAX = 64, PROMPTS = 64, CYCLES = 512, TOKENS_MAX = 8192 };
enum { ROUNDS = 5, ROUND_MS = 1000 };

static struct server servers[MAX_SERVERS];
static size_t n_servers;

/* -- the servers ------------------------------------------------------------------------------- */

/* Send one request. Returns its status. */
static int ask(const struct server *x, const char *method, const char *path, const char *body,
               struct kv_buf *reply)
{
    struct request request = {.text = KV_BUF_INIT};
    int status;

    kv_buf_printf(&request.text,
                  "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                  "Content-Length: %zu\r\n\r\n%s",
                  method, path, strlen(body), body);
    status = http_ask(x->port, &request, reply);
    kv_buf_fini(&request.text);
    return status;
}

/* -- workers and prompts ----------------------------------------------------------------------- */

static void make_prompt(uint64_t number, uint32_t *tokens, size_t n)
{
    uint64_t state = (number + 1) * UINT64_C(0x9e3779b97f4a7c15);

    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint32_t)(next_random(&state) % 200000);
}

static bool holds(size_t worker, size_t prompt)
{
    return (worker + prompt) % 2 == 0;
}

static void make_worker(size_t worker, struct batches *ret)
{
    static uint32_t tokens[TOKENS_MAX];

    batches_init(ret, PROMPTS);
    for (size_t p = 0; p < PROMPTS; p++) {
        if (!holds(worker, p))
            continue;
        make_prompt(p, tokens, TOKENS_MAX);
        batch_begin(ret, 1);
        put_store(&ret->payloads, 1 + p * TOKENS_MAX, TOKENS_MAX / BLOCK_TOKENS, true, tokens);
        batch_end(ret);
    }
}

static void add_worker(const struct server *x, size_t worker, const char *endpoint)
{
    struct kv_buf body = KV_BUF_INIT, reply = KV_BUF_INIT;

    kv_buf_printf(&body,
                  "{\"worker_id\":%zu,\"model_name\":\"" BENCH_MODEL "\",\"block_size\":%d,"
                  "\"endpoint\":\"http://127.0.0.1:1\",\"kv_events_endpoint\":\"%s\"}",
                  worker + 1, BLOCK_TOKENS, endpoint);
    require(ask(x, "POST", "/workers", kv_buf_cstr(&body), &reply) == 201, kv_buf_cstr(&reply));
    kv_buf_fini(&body);
    kv_buf_fini(&reply);
}

/* Wait until the server finds all of the last prompt at half of the workers. */
static void await_holders(const struct server *x, size_t n_workers)
{
    static uint32_t tokens[TOKENS_MAX];
    uint64_t until = kv_now_ns() + PATIENCE_S * KV_NS_PER_S;
    struct kv_buf body = KV_BUF_INIT, reply = KV_BUF_INIT;
    char wanted[48];
    size_t n = 0;

    snprintf(wanted, sizeof(wanted), "\"device_blocks\":%d,", TOKENS_MAX / BLOCK_TOKENS);
    while (n < n_workers) {
        n = 0;
        for (size_t p = PROMPTS - 2; p < PROMPTS; p++) {
            make_prompt(p, tokens, TOKENS_MAX);
            write_query(&body, BENCH_MODEL, tokens, TOKENS_MAX);
            (void)ask(x, "POST", "/overlap_scores", kv_buf_cstr(&body), &reply);
            for (const char *at = kv_buf_cstr(&reply); (at = strstr(at, wanted)); at++)
                n++;
        }
        require(kv_now_ns() < until, "what was published is visible");
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    kv_buf_fini(&body);
    kv_buf_fini(&reply);
}

/* -- cycles ------------------------------------------------------------------------------------ */

static void make_plain(struct request *ret, const char *method, size_t id, const char *tail)
{
    kv_buf_clear(&ret->text);
    kv_buf_printf(&ret->text,
                  "%s /reservations/request-%zu%s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                  "Content-Length: 0\r\n\r\n",
                  method, id, tail);
}

static void make_cycles(struct request *ret, size_t n_tokens)
{
    static uint32_t tokens[TOKENS_MAX];
    struct kv_buf body = KV_BUF_INIT, whole = KV_BUF_INIT;

    for (size_t i = 0; i < CYCLES; i++) {
        make_prompt(i % PROMPTS, tokens, n_tokens);
        write_query(&body, BENCH_MODEL, tokens, n_tokens);
        kv_buf_clear(&whole);
        kv_buf_printf(&whole, "{\"selection_id\":\"request-%zu\",%s", i, kv_buf_cstr(&body) + 1);
        request_make(&ret[3 * i], "/select_and_reserve", "application/json", &whole);
        make_plain(&ret[3 * i + 1], "POST", i, "/prefill_complete");
        make_plain(&ret[3 * i + 2], "DELETE", i, "");
    }
    kv_buf_fini(&body);
    kv_buf_fini(&whole);
}

/*
 * Free the bookings that the end of a round cut off, until none is left: the server may still be at the last
 * requests.
 */
static void free_all(const struct server *x)
{
    struct kv_buf reply = KV_BUF_INIT;
    char path[64];
    size_t freed;

    do {
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        freed = 0;
        for (size_t i = 0; i < CYCLES; i++) {
            snprintf(path, sizeof(path), "/reservations/request-%zu", i);
            freed += ask(x, "DELETE", path, "", &reply) == 200;
        }
    } while (freed > 0);
    kv_buf_fini(&reply);
}

static void run_round(const struct server *x, const struct request *requests, double *ret_rate,
                      double *ret_cpu)
{
    double before = server_cpu_us(x), seconds;
    double done =
        (double)http_load_of(x->port, requests, (size_t)3 * CYCLES, true, ROUND_MS, 0, &seconds) /
        3;

    *ret_cpu = (server_cpu_us(x) - before) / done;
    *ret_rate = done / seconds;
    free_all(x);
}

static void measure(size_t n_workers, size_t n_tokens)
{
    static struct request requests[3 * CYCLES];
    double rate[MAX_SERVERS][ROUNDS], cpu[MAX_SERVERS][ROUNDS];

    make_cycles(requests, n_tokens);
    for (size_t i = 0; i < ROUNDS; i++)
        for (size_t k = 0; k < n_servers; k++) {
            size_t x = (i + k) % n_servers;

            run_round(&servers[x], requests, &rate[x][i], &cpu[x][i]);
        }
    for (size_t x = 0; x < n_servers; x++)
        bench_line("selector",
                   "'figure':'cycle','server':'%s','workers':%zu,'tokens':%zu,"
                   "'cycles_per_s':%.0f,'server_cpu_us':%.1f,'connections':%d",
                   servers[x].name, n_workers, n_tokens, bench_median(rate[x], ROUNDS),
                   bench_median(cpu[x], ROUNDS), HTTP_CONNECTIONS);
}

static void run_fleet(size_t n_workers)
{
    static struct publisher publishers[WORKERS_MAX];
    static struct batches batches[WORKERS_MAX];

    for (size_t w = 0; w < n_workers; w++) {
        publisher_open(&publishers[w], NULL, NULL);
        make_worker(w, &batches[w]);
    }
    for (size_t x = 0; x < n_servers; x++)
        server_start(&servers[x]);
    for (size_t w = 0; w < n_workers; w++) {
        for (size_t x = 0; x < n_servers; x++)
            add_worker(&servers[x], w, publishers[w].endpoint);
        publisher_await(&publishers[w], n_servers);
        publisher_start(&publishers[w], &batches[w]);
    }
    for (size_t x = 0; x < n_servers; x++)
        await_holders(&servers[x], n_workers);
    measure(n_workers, 512);
    measure(n_workers, TOKENS_MAX);
    for (size_t x = 0; x < n_servers; x++)
        server_stop(&servers[x]);
    for (size_t w = 0; w < n_workers; w++) {
        publisher_close(&publishers[w]);
        batches_fini(&batches[w]);
    }
}

static void add_server(const char *text)
{
    struct server *x = &servers[n_servers];
    const char *equals = strchr(text, '=');

    require(equals && n_servers < MAX_SERVERS && equals - text < (long)sizeof(x->name),
            "NAME=COMMAND");
    memcpy(x->name, text, (size_t)(equals - text));
    x->command = equals + 1;
    n_servers++;
}

int main(int argc, char **argv)
{
    static char own[512];
    char folder[400];
    ssize_t n = readlink("/proc/self/exe", folder, sizeof(folder) - 1);
    const char *end;

    bench_usage(argc, argv, "[NAME='COMMAND --port {port}' ...]");
    signal(SIGPIPE, SIG_IGN);
    for (int i = 1; i < argc; i++)
        add_server(argv[i]);
    if (argc == 1) { /* build/bench/selector_bench: the program is in build/bin */
        require(n > 0, "the place of this program");
        folder[n] = '\0';
        end = strrchr(folder, '/');
        snprintf(own, sizeof(own), "kvasir=%.*s/../bin/kv-selector --host 127.0.0.1 --port {port}",
                 (int)(end - folder), folder);
        add_server(own);
    }
    run_fleet(4);
    run_fleet(WORKERS_MAX);
    return 0;
}
