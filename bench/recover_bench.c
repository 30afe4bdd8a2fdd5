// SPDX-License-Identifier: Apache-2.0
/*
 * Recovery between two real kv-indexer processes: the time until a fresh one serves its peer's
 * blocks, and the memory that this takes besides the index. The first process is filled over ZMQ (4
 * workers, prompts of 32 blocks of 16 tokens, none shared); the second starts with --peers. Time
 * ends with its first answer. The workers have gone by then, so the time includes no wait for
 * subscriptions (200 ms with workers).
 *
 * Memory besides the index is the peak resident size of the whole process less the index's own
 * figure: code, stacks, buffers and the allocator's waste.
 *
 * Yardstick: the same dump fetched over HTTP and dropped. Usage: recover_bench [BLOCKS]
 */
#include <arpa/inet.h>
#include <curl/curl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/json/msgpack.h"
#include "event/wire/frames.h"
#include "support.h"

enum { WORKERS = 4, BLOCK_TOKENS = 16, PROMPT_BLOCKS = 32, BATCH_PROMPTS = 4, PATIENCE_S = 300 };

struct indexer {
    pid_t pid;
    char url[64];
};

static struct indexer indexers[2];

static void die(const char *what)
{
    fprintf(stderr, "recover_bench: %s\n", what);
    for (int i = 0; i < 2; i++)
        if (indexers[i].pid > 0)
            kill(indexers[i].pid, SIGKILL);
    exit(1);
}

/* -- processes and HTTP ------------------------------------------------------------------------ */

static int free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    if (fd < 0 || bind(fd, (struct sockaddr *)&address, len) ||
        getsockname(fd, (struct sockaddr *)&address, &len))
        die("no free port");
    close(fd);
    return ntohs(address.sin_port);
}

/* Start the program beside our own directory: build/bench/../bin/kv-indexer. */
static void start(struct indexer *x, const char *peer)
{
    char program[PATH_MAX], port[16], *slash;
    ssize_t len = readlink("/proc/self/exe", program, sizeof(program) - 32);

    program[len > 0 ? len : 0] = '\0';
    for (int i = 0; i < 2; i++)
        if ((slash = strrchr(program, '/')) != NULL)
            *slash = '\0';
    strcat(program, "/bin/kv-indexer");
    snprintf(port, sizeof(port), "%d", free_port());
    snprintf(x->url, sizeof(x->url), "http://127.0.0.1:%s", port);
    x->pid = fork();
    if (x->pid < 0)
        die("can't fork");
    if (x->pid == 0) {
        execl(program, program, "--host", "127.0.0.1", "--port", port, "--log-level", "warn",
              peer ? "--peers" : NULL, peer, NULL);
        _exit(127);
    }
}

static void stop(struct indexer *x)
{
    kill(x->pid, SIGTERM);
    waitpid(x->pid, NULL, 0);
    x->pid = 0;
}

static size_t keep(char *data, size_t size, size_t n, void *arg)
{
    kv_buf_append(arg, data, size * n);
    return size * n;
}

static size_t throw_away(char *data, size_t size, size_t n, void *arg)
{
    (void)data;
    *(uint64_t *)arg += size * n;
    return size * n;
}

/* Make a request; @post NULL: GET. Returns the status, 0 when the connection failed. */
static long http(const struct indexer *x, const char *path, const char *post,
                 curl_write_callback fn, void *arg)
{
    CURL *curl = curl_easy_init();
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    char url[128];
    long status = 0;

    snprintf(url, sizeof(url), "%s%s", x->url, path);
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_PROXY, "");
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, fn);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, arg);
    if (post) {
        curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, post);
    }
    if (curl_easy_perform(curl) == CURLE_OK)
        curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl);
    return status;
}

static void wait_ready(const struct indexer *x)
{
    uint64_t until = kv_now_ns() + PATIENCE_S * KV_NS_PER_S;
    struct kv_buf body = KV_BUF_INIT;

    while (http(x, "/health", NULL, keep, &body) != 200) {
        if (kv_now_ns() > until || waitpid(x->pid, NULL, WNOHANG) != 0)
            die("kv-indexer doesn't start");
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    kv_buf_fini(&body);
}

/* Return the value of the first series of a family; labels here have no spaces. */
static uint64_t metric(const struct indexer *x, const char *name)
{
    struct kv_buf body = KV_BUF_INIT;
    size_t len = strlen(name);
    uint64_t value = 0;
    char *line, *rest = NULL;

    if (http(x, "/metrics", NULL, keep, &body) != 200 || !kv_buf_cstr(&body)[0])
        die("no metrics");
    for (line = strtok_r(body.data, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (strncmp(line, name, len) == 0 && (line[len] == '{' || line[len] == ' ')) {
            value = strtoull(strrchr(line, ' '), NULL, 10);
            break;
        }
    kv_buf_fini(&body);
    return value;
}

/* Read VmHWM or VmRSS, in bytes. */
static uint64_t memory(const struct indexer *x, const char *what)
{
    char path[64], line[256];
    uint64_t kib = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)x->pid);
    file = fopen(path, "r");
    while (file && fgets(line, sizeof(line), file))
        if (strncmp(line, what, strlen(what)) == 0)
            kib = strtoull(line + strlen(what) + 1, NULL, 10);
    if (file)
        fclose(file);
    return kib * 1024;
}

/* CPU time of the whole process so far, kernel included. */
static double cpu_s(const struct indexer *x)
{
    unsigned long user = 0, kernel = 0;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)x->pid);
    file = fopen(path, "r");
    if (!file || fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                        &kernel) != 2)
        die("no CPU times");
    fclose(file);
    return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

/* -- filling the first process ----------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static void put_prompt(struct kv_buf *out, uint64_t *state)
{
    kv_msgpack_put_array(out, 7);
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_array(out, PROMPT_BLOCKS);
    for (int i = 0; i < PROMPT_BLOCKS; i++)
        kv_msgpack_put_u64(out, next_random(state));
    kv_msgpack_put_nil(out);
    kv_msgpack_put_array(out, PROMPT_BLOCKS * BLOCK_TOKENS);
    for (int i = 0; i < PROMPT_BLOCKS * BLOCK_TOKENS; i++)
        kv_msgpack_put_u64(out, next_random(state) % 200000);
    kv_msgpack_put_u64(out, BLOCK_TOKENS);
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "GPU");
}

static void send_batch(void *socket, uint64_t seq, struct kv_buf *batch, uint64_t *state)
{
    uint8_t bytes[KVE_SEQUENCE_BYTES];

    kv_buf_clear(batch);
    kv_msgpack_put_array(batch, 3);
    kv_msgpack_put_double(batch, 1757500000 + (double)seq);
    kv_msgpack_put_array(batch, BATCH_PROMPTS);
    for (int i = 0; i < BATCH_PROMPTS; i++)
        put_prompt(batch, state);
    kv_msgpack_put_nil(batch);
    kve_sequence_put(bytes, seq);
    if (batch->error || zmq_send(socket, "", 0, ZMQ_SNDMORE) < 0 ||
        zmq_send(socket, bytes, sizeof(bytes), ZMQ_SNDMORE) < 0 ||
        zmq_send(socket, batch->data, batch->len, 0) < 0)
        die("can't send");
}

static void *open_worker(void *zmq, const struct indexer *x, int instance)
{
    void *socket = zmq_socket(zmq, ZMQ_XPUB);
    char endpoint[64], body[256], byte;
    size_t size = sizeof(endpoint);
    struct kv_buf reply = KV_BUF_INIT;

    zmq_setsockopt(socket, ZMQ_XPUB_NODROP, &(int){1}, sizeof(int)); /* wait instead of dropping */
    if (zmq_bind(socket, "tcp://127.0.0.1:*") ||
        zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &size))
        die("can't bind");
    snprintf(body, sizeof(body),
             "{\"instance_id\":%d,\"endpoint\":\"%s\",\"model_name\":\"m\",\"block_size\":%d}",
             instance, endpoint, BLOCK_TOKENS);
    if (http(x, "/register", body, keep, &reply) != 201 || zmq_recv(socket, &byte, 1, 0) != 1)
        die("can't register");
    kv_buf_fini(&reply);
    return socket;
}

static void fill(const struct indexer *x, uint64_t n_blocks)
{
    const uint64_t batch_blocks = BATCH_PROMPTS * PROMPT_BLOCKS;
    uint64_t state = 88172645463325252, until = kv_now_ns() + PATIENCE_S * KV_NS_PER_S;
    struct kv_buf batch = KV_BUF_INIT;
    void *zmq = zmq_ctx_new(), *workers[WORKERS];

    for (int i = 0; i < WORKERS; i++)
        workers[i] = open_worker(zmq, x, i + 1);
    for (uint64_t b = 0; b < n_blocks / batch_blocks; b++)
        send_batch(workers[b % WORKERS], b / WORKERS, &batch, &state);
    while (metric(x, "kv_indexer_index_holder_blocks") < n_blocks) {
        if (kv_now_ns() > until)
            die("blocks are missing");
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    for (int i = 0; i < WORKERS; i++)
        zmq_close(workers[i]);
    zmq_ctx_term(zmq);
    kv_buf_fini(&batch);
}

/* -- the figures ------------------------------------------------------------------------------- */

static double since_s(uint64_t started_ns)
{
    return (double)(kv_now_ns() - started_ns) / KV_NS_PER_S;
}

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[BLOCKS]");

    const uint64_t unit = WORKERS * BATCH_PROMPTS * PROMPT_BLOCKS;
    uint64_t n_blocks = bench_number(argc, argv, 1, 10000000), bytes = 0;
    uint64_t started, index, peer_index, peak, peer_peak, holder_blocks;
    double recover_s, dump_s, own_cpu_s, peer_cpu_s;

    n_blocks = (n_blocks + unit - 1) / unit * unit;
    curl_global_init(CURL_GLOBAL_DEFAULT);
    start(&indexers[0], NULL);
    wait_ready(&indexers[0]);
    fill(&indexers[0], n_blocks);
    peer_peak = memory(&indexers[0], "VmHWM:");

    peer_cpu_s = cpu_s(&indexers[0]);
    started = kv_now_ns();
    start(&indexers[1], indexers[0].url);
    wait_ready(&indexers[1]);
    recover_s = since_s(started);
    own_cpu_s = cpu_s(&indexers[1]);
    peer_cpu_s = cpu_s(&indexers[0]) - peer_cpu_s;
    peak = memory(&indexers[1], "VmHWM:");
    index = metric(&indexers[1], "kv_indexer_index_bytes");
    holder_blocks = metric(&indexers[1], "kv_indexer_index_holder_blocks");
    if (holder_blocks != n_blocks)
        die("the recovered index isn't the same");
    peer_peak = memory(&indexers[0], "VmHWM:") - peer_peak; /* VmHWM may be a page too low */
    peer_peak = (int64_t)peer_peak < 0 ? 0 : peer_peak;
    peer_index = metric(&indexers[0], "kv_indexer_index_bytes");

    started = kv_now_ns();
    if (http(&indexers[0], "/dump", NULL, throw_away, &bytes) != 200)
        die("no dump");
    dump_s = since_s(started);
    bench_line("recover",
               "'figure':'dump_and_recover','unit':'s','value':%.2f,'blocks':%" PRIu64
               ",'memory_above_index_mib':%.1f,'peak_rss_mib':%.1f,'index_mib':%.1f,'peer_index_"
               "mib':%.1f,'peer_peak_growth_mib':%.1f,'cpu_s':%.2f,'peer_cpu_s':%.2f,'yardstick_"
               "fetched_and_thrown_away_s':%.2f,'dump_mib':%.1f",
               recover_s, n_blocks, ((double)peak - (double)index) / (1 << 20),
               (double)peak / (1 << 20), (double)index / (1 << 20), (double)peer_index / (1 << 20),
               (double)peer_peak / (1 << 20), own_cpu_s, peer_cpu_s, dump_s,
               (double)bytes / (1 << 20));
    stop(&indexers[1]);
    stop(&indexers[0]);
    return 0;
}
