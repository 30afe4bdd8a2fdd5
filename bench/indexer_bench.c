// SPDX-License-Identifier: Apache-2.0
/*
 * Several indexers side by side, each a process that speaks the HTTP interface of kv-indexer and
 * Dynamo. They get the same client, publishers and requests, in turns.
 *
 *   indexer_bench [-r ROUNDS] [-m MS] [-c REQUESTS] [-n SCALE%] [-f FIGURES] [-w]
 *                 [NAME=COMMAND | NAME=URL,PID]...
 *
 * COMMAND runs in a shell, with {port} replaced by a free port; URL is a running indexer. Without
 * any: the kv-indexer beside this program. All others are compared with the last one. FIGURES: some
 * of query,ingest,single,memory. Example:
 *
 *   indexer_bench kvasir='build/bin/kv-indexer --port {port}' \
 *                 dynamo='python -m dynamo.indexer --port {port}'
 *
 *   query    /query over 8 keep-alive connections, 512 and 8192 ids, 4 and 64 holders a prompt
 *   ingest   4 publishers, batches of 16 events of 8 blocks, all prompts different: from the first
 *            batch until /query finds the last prompt of each
 *   single   the same with one event of one block a batch
 *   memory   resident bytes a holder-block, 30 % of the prompts held by all 4 workers: 1 s after
 *            the last block has become visible, the peak until then, and 15 s later
 *
 * -w: the publishers write their frames into TCP connections themselves instead of using libzmq.
 * On few cores, libzmq's publishers take more CPU than the indexers; these take a tenth of it.
 *
 * Values are medians of the rounds; `ratio` and `cpu_ratio` are medians of the rounds' own ratios,
 * above 1 when better than the last indexer. CPU is the whole process's, kernel included.
 */
#include <inttypes.h>
#include <limits.h>

#include "publish_load.h"
#include "server.h"
#include "support.h"

enum {
    MAX_INDEXERS = 8,
    MAX_ROUNDS = 101,
    WORKERS = 64, /* of the queries */
    PROMPTS = 32,
    PROMPT_TOKENS = 8192,
    PUBLISHERS = 4, /* of the events */
    EVENT_BLOCKS = 8,
    BATCH_EVENTS = 16,
    CHAIN_BLOCKS = 32, /* a prompt of the events */
    SETTLE_S = 15,
};

static struct server indexers[MAX_INDEXERS];
static size_t n_indexers, rounds = 5, scale = 100;
static uint64_t round_ms = 1000, round_requests = 1000000; /* whichever ends first */
static void *zmq;

/* -- processes --------------------------------------------------------------------------------- */

/* Read a line of /proc/PID/status ("VmRSS:", "VmHWM:"), in bytes. */
static double memory_of(const struct server *x, const char *line)
{
    char path[64], text[256];
    double bytes = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)x->pid);
    file = fopen(path, "r");
    require(file != NULL, path);
    while (fgets(text, sizeof(text), file))
        if (strncmp(text, line, strlen(line)) == 0)
            bytes = strtod(text + strlen(line), NULL) * 1024;
    fclose(file);
    return bytes;
}

/* -- HTTP -------------------------------------------------------------------------------------- */

static void change_worker(const struct server *x, const char *path, uint64_t worker,
                          const char *model, const char *endpoint)
{
    struct kv_buf body = KV_BUF_INIT, reply = KV_BUF_INIT;
    struct request request = {.text = KV_BUF_INIT};
    int status;

    kv_buf_printf(&body, "{\"instance_id\":%" PRIu64 ",\"model_name\":\"%s\"", worker, model);
    if (endpoint)
        kv_buf_printf(&body, ",\"block_size\":%d,\"endpoint\":\"%s\"", BLOCK_TOKENS, endpoint);
    kv_buf_puts(&body, "}");
    request_make(&request, path, "application/json", &body);
    status = http_ask(x->port, &request, &reply);
    require(status == 200 || status == 201, kv_buf_cstr(&reply));
    kv_buf_fini(&body);
    kv_buf_fini(&reply);
    kv_buf_fini(&request.text);
}

/* Count the workers with a score of @tokens at rank 0. */
static size_t count_scores(struct kv_buf *reply, size_t tokens)
{
    const char *p = strstr(kv_buf_cstr(reply), "\"scores\":");
    char wanted[32];
    size_t n = 0;
    int depth = 0;

    require(p != NULL, "scores in a reply");
    snprintf(wanted, sizeof(wanted), "{\"0\":%zu}", tokens);
    p += strlen("\"scores\":");
    do {
        n += strncmp(p, wanted, strlen(wanted)) == 0;
        depth += (*p == '{') - (*p == '}');
    } while (*p++ && depth > 0);
    return n;
}

static size_t holders_of(const struct server *x, const struct request *request, size_t tokens)
{
    struct kv_buf reply = KV_BUF_INIT;
    int status = http_ask(x->port, request, &reply);
    size_t n = status == 200 ? count_scores(&reply, tokens) : 0;

    require(status == 200 || status == 404, kv_buf_cstr(&reply));
    kv_buf_fini(&reply);
    return n;
}

static void await_holders(const struct server *x, const struct request *request, size_t tokens,
                          size_t n)
{
    uint64_t until = kv_now_ns() + PATIENCE_S * KV_NS_PER_S;

    while (holders_of(x, request, tokens) != n) {
        require(kv_now_ns() < until, "what was published is visible");
        nanosleep(&(struct timespec){.tv_nsec = 250000}, NULL); /* the shortest figure is 50 ms */
    }
}

/* -- figures ----------------------------------------------------------------------------------- */

struct figure {
    double rate[MAX_INDEXERS][MAX_ROUNDS], cpu[MAX_INDEXERS][MAX_ROUNDS];
};

static double median(const double *values)
{
    double sorted[MAX_ROUNDS];

    memcpy(sorted, values, rounds * sizeof(*values));
    return bench_median(sorted, rounds);
}

static double median_ratio(const double *a, const double *b)
{
    double ratio[MAX_ROUNDS];

    for (size_t i = 0; i < rounds; i++)
        ratio[i] = a[i] / b[i];
    return median(ratio);
}

/* @conditions: further members of the line, or "". */
static void print_figure(const struct figure *f, const char *name, const char *conditions,
                         const char *what)
{
    size_t last = n_indexers - 1;

    for (size_t x = 0; x < n_indexers; x++) {
        bench_begin(
            "indexer",
            "'figure':'%s'%s,'indexer':'%s','%s_per_s':%.0f,'server_cpu_us':%.2f,'rounds':%zu",
            name, conditions, indexers[x].name, what, median(f->rate[x]), median(f->cpu[x]),
            rounds);
        if (x != last)
            bench_more("'of':'%s','ratio':%.2f,'cpu_ratio':%.2f", indexers[last].name,
                       median_ratio(f->rate[x], f->rate[last]),
                       median_ratio(f->cpu[last], f->cpu[x]));
        bench_end();
    }
}

/* -- queries ----------------------------------------------------------------------------------- */

/* 4 workers hold the prompts below PROMPTS, all workers the same number of others. */
static const size_t n_holders[2] = {4, WORKERS};

static bool holds(size_t worker, size_t prompt)
{
    return prompt >= PROMPTS || (worker + WORKERS - prompt) % WORKERS % 16 == 0;
}

static void make_prompt(uint64_t number, uint32_t *tokens, size_t n)
{
    uint64_t state = (number + 1) * UINT64_C(0x9e3779b97f4a7c15);

    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint32_t)(next_random(&state) % 200000);
}

static void make_worker(size_t worker, struct batches *ret)
{
    static uint32_t tokens[PROMPT_TOKENS];

    batches_init(ret, 2 * PROMPTS);
    for (size_t p = 0; p < 2 * (size_t)PROMPTS; p++) {
        if (!holds(worker, p))
            continue;
        make_prompt(p, tokens, PROMPT_TOKENS);
        batch_begin(ret, 1);
        put_store(&ret->payloads, 1 + p * PROMPT_TOKENS, PROMPT_TOKENS / BLOCK_TOKENS, true,
                  tokens);
        batch_end(ret);
    }
}

static void make_queries(struct request *ret, size_t first, size_t n_tokens)
{
    static uint32_t tokens[PROMPT_TOKENS];
    struct kv_buf body = KV_BUF_INIT;

    for (size_t p = 0; p < PROMPTS; p++) {
        make_prompt(first + p, tokens, PROMPT_TOKENS);
        write_query(&body, BENCH_MODEL, tokens, n_tokens);
        request_make(&ret[p], "/query", "application/json", &body);
    }
    kv_buf_fini(&body);
}

/* Check every answer before measuring the speed. */
static void query_case(size_t n_tokens, int holders)
{
    static struct request requests[PROMPTS];
    static struct figure f;
    char conditions[128];

    make_queries(requests, holders ? PROMPTS : 0, n_tokens);
    for (size_t x = 0; x < n_indexers; x++)
        for (size_t p = 0; p < PROMPTS; p++)
            await_holders(&indexers[x], &requests[p], n_tokens, n_holders[holders]);
    for (size_t i = 0; i < rounds; i++)
        for (size_t k = 0; k < n_indexers; k++) {
            size_t x = (i + k) % n_indexers;
            double before = server_cpu_us(&indexers[x]), seconds;
            uint64_t done =
                http_load(indexers[x].port, requests, PROMPTS, round_ms, round_requests, &seconds);

            f.rate[x][i] = (double)done / seconds;
            f.cpu[x][i] = (server_cpu_us(&indexers[x]) - before) / (double)done;
        }
    snprintf(conditions, sizeof(conditions),
             ",\"tokens\":%zu,\"holders\":%zu,\"body_bytes\":%zu,\"connections\":%d", n_tokens,
             n_holders[holders], requests[0].text.len, HTTP_CONNECTIONS);
    print_figure(&f, "query", conditions, "requests");
}

static void queries(void)
{
    static struct publisher publishers[WORKERS];
    static struct batches batches[WORKERS];

    for (size_t x = 0; x < n_indexers; x++)
        server_start(&indexers[x]);
    for (size_t w = 0; w < WORKERS; w++) {
        make_worker(w, &batches[w]);
        publisher_open(&publishers[w], zmq, "tcp://127.0.0.1:*");
        for (size_t x = 0; x < n_indexers; x++)
            change_worker(&indexers[x], "/register", w, BENCH_MODEL, publishers[w].endpoint);
    }
    for (size_t w = 0; w < WORKERS; w++) {
        publisher_await(&publishers[w], n_indexers);
        publisher_start(&publishers[w], &batches[w]);
    }
    for (int holders = 0; holders < 2; holders++) {
        query_case(512, holders);
        query_case(PROMPT_TOKENS, holders);
    }
    for (size_t x = 0; x < n_indexers; x++) {
        for (size_t w = 0; w < WORKERS && !indexers[x].command; w++)
            change_worker(&indexers[x], "/unregister", w, BENCH_MODEL, NULL);
        server_stop(&indexers[x]);
    }
    for (size_t w = 0; w < WORKERS; w++) {
        publisher_close(&publishers[w]);
        batches_fini(&batches[w]);
    }
}

/* -- events ------------------------------------------------------------------------------------ */

struct events {
    uint32_t event_blocks, batch_events;
    size_t n_batches; /* per publisher */
    size_t shared;    /* number of prompts of 10 that all publishers have */
};

/* Make prompts of CHAIN_BLOCKS and cut them into events. *ret_last: the last prompt. */
static void make_events(const struct events *e, size_t publisher, struct batches *ret,
                        uint64_t *ret_last)
{
    uint32_t tokens[CHAIN_BLOCKS * BLOCK_TOKENS];
    uint64_t n_prompts = e->n_batches * e->batch_events * e->event_blocks / CHAIN_BLOCKS;
    uint64_t block = 0, id = 0;

    batches_init(ret, e->n_batches);
    for (size_t b = 0; b < e->n_batches; b++) {
        batch_begin(ret, e->batch_events);
        for (uint32_t i = 0; i < e->batch_events; i++, block += e->event_blocks) {
            uint64_t prompt = block / CHAIN_BLOCKS, at = block % CHAIN_BLOCKS;

            if (at == 0) {
                id = prompt; /* shared by all; never the last */
                if (prompt % 10 >= e->shared || prompt + 1 == n_prompts)
                    id |= (publisher + 1) << 40;
                make_prompt(1000 + id, tokens, KV_COUNT(tokens));
            }
            put_store(&ret->payloads, 1 + id * CHAIN_BLOCKS + at, e->event_blocks, at == 0,
                      tokens + at * BLOCK_TOKENS);
        }
        batch_end(ret);
    }
    *ret_last = id;
}

struct feed {
    struct batches batches[PUBLISHERS];
    struct request last[PUBLISHERS];
    double blocks; /* of all publishers */
};

static void make_feed(const struct events *e, struct feed *ret)
{
    uint32_t tokens[CHAIN_BLOCKS * BLOCK_TOKENS];
    struct kv_buf body = KV_BUF_INIT;

    memset(ret, 0, sizeof(*ret));
    for (size_t p = 0; p < PUBLISHERS; p++) {
        uint64_t last;

        make_events(e, p, &ret->batches[p], &last);
        make_prompt(1000 + last, tokens, KV_COUNT(tokens));
        write_query(&body, BENCH_MODEL, tokens, KV_COUNT(tokens));
        request_make(&ret->last[p], "/query", "application/json", &body);
    }
    ret->blocks = (double)PUBLISHERS * (double)e->n_batches * e->batch_events * e->event_blocks;
    kv_buf_fini(&body);
}

static void feed_fini(struct feed *feed)
{
    for (size_t p = 0; p < PUBLISHERS; p++) {
        batches_fini(&feed->batches[p]);
        kv_buf_fini(&feed->last[p].text);
    }
}

/* Publish all batches and wait until the last is found. Returns the seconds taken. */
static double burst(const struct server *x, const struct feed *feed)
{
    struct publisher publishers[PUBLISHERS];
    uint64_t started = UINT64_MAX, ended;

    for (size_t p = 0; p < PUBLISHERS; p++) {
        publisher_open(&publishers[p], zmq, "tcp://127.0.0.1:*");
        change_worker(x, "/register", p, BENCH_MODEL, publishers[p].endpoint);
    }
    for (size_t p = 0; p < PUBLISHERS; p++)
        publisher_await(&publishers[p], 1);
    /* wait for the work that registration starts */
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    for (size_t p = 0; p < PUBLISHERS; p++)
        publisher_start(&publishers[p], &feed->batches[p]);
    for (size_t p = 0; p < PUBLISHERS; p++)
        await_holders(x, &feed->last[p], CHAIN_BLOCKS * BLOCK_TOKENS, 1);
    ended = kv_now_ns();
    for (size_t p = 0; p < PUBLISHERS; p++) {
        started = KV_MIN(started, publishers[p].started_ns);
        publisher_close(&publishers[p]);
    }
    return (double)(ended - started) / 1e9;
}

static void forget(const struct server *x)
{
    for (size_t p = 0; p < PUBLISHERS && !x->command; p++)
        change_worker(x, "/unregister", p, BENCH_MODEL, NULL);
}

static void ingest(const char *name, const struct events *e)
{
    static struct figure f;
    struct feed feed;
    char conditions[128];

    make_feed(e, &feed);
    for (size_t i = 0; i < rounds; i++)
        for (size_t k = 0; k < n_indexers; k++) {
            size_t x = (i + k) % n_indexers;
            double before, seconds;

            server_start(&indexers[x]);
            before = server_cpu_us(&indexers[x]);
            seconds = burst(&indexers[x], &feed);
            f.cpu[x][i] = (server_cpu_us(&indexers[x]) - before) / feed.blocks;
            f.rate[x][i] = feed.blocks / seconds;
            forget(&indexers[x]);
            server_stop(&indexers[x]);
        }
    snprintf(conditions, sizeof(conditions),
             ",\"publishers\":%d,\"sender\":\"%s\",\"event_blocks\":%u,\"batch_events\":%u,"
             "\"blocks\":%.0f",
             PUBLISHERS, zmq ? "libzmq" : "frames", e->event_blocks, e->batch_events, feed.blocks);
    print_figure(&f, name, conditions, "blocks");
    feed_fini(&feed);
}

static void memory(const struct events *e)
{
    struct feed feed;

    make_feed(e, &feed);
    for (size_t i = 0; i < n_indexers; i++) {
        struct server *x = &indexers[i];
        double before, after, peak, settled;

        server_start(x);
        before = memory_of(x, "VmRSS:");
        burst(x, &feed);
        peak = memory_of(x, "VmHWM:") - before;
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        after = memory_of(x, "VmRSS:") - before;
        nanosleep(&(struct timespec){.tv_sec = SETTLE_S}, NULL);
        settled = memory_of(x, "VmRSS:") - before;
        bench_line("indexer",
                   "'figure':'memory','indexer':'%s','holder_blocks':%.0f,'shared':0.3,'empty_mib':"
                   "%.1f,'settled_bytes':%.1f,'after_burst_bytes':%.1f,'peak_bytes':%.1f,'after_"
                   "burst_of_settled':%.2f,'peak_of_settled':%.2f",
                   x->name, feed.blocks, before / 1048576, settled / feed.blocks,
                   after / feed.blocks, peak / feed.blocks, after / settled, peak / settled);
        forget(x);
        server_stop(x);
    }
    feed_fini(&feed);
}

/* -- the command line -------------------------------------------------------------------------- */

/* Parse NAME=COMMAND or NAME=http://127.0.0.1:PORT,PID. */
static void add_indexer(const char *text)
{
    struct server *x = &indexers[n_indexers];
    const char *equals = strchr(text, '=');
    int pid;

    require(n_indexers < MAX_INDEXERS && equals, "NAME=COMMAND or NAME=URL,PID");
    n_indexers++;
    snprintf(x->name, sizeof(x->name), "%.*s", (int)(equals - text), text);
    if (sscanf(equals + 1, "http://127.0.0.1:%hu,%d", &x->port, &pid) == 2)
        x->pid = pid;
    else
        x->command = equals + 1;
}

/* Add the kv-indexer of this build: build/bench/../bin/kv-indexer. */
static void add_our_own(void)
{
    static char text[PATH_MAX + 128];
    char program[PATH_MAX], *slash;
    ssize_t len = readlink("/proc/self/exe", program, sizeof(program) - 1);

    program[len > 0 ? len : 0] = '\0';
    for (int i = 0; i < 2; i++)
        if ((slash = strrchr(program, '/')) != NULL)
            *slash = '\0';
    snprintf(text, sizeof(text),
             "kvasir=%s/bin/kv-indexer --host 127.0.0.1 --port {port} --log-level warn", program);
    add_indexer(text);
}

int main(int argc, char **argv)
{
    struct events e = {.event_blocks = EVENT_BLOCKS, .batch_events = BATCH_EVENTS};
    const char *figures = "query,ingest,single,memory";
    bool wire = false;
    int option;

    bench_usage(argc, argv,
                "[-r ROUNDS] [-m MS] [-c REQUESTS] [-n SCALE%] [-f FIGURES] [-w] "
                "[NAME=COMMAND|NAME=URL,PID]...");
    while ((option = getopt(argc, argv, "r:m:c:n:f:w")) != -1) {
        if (option == 'r')
            rounds = KV_MIN(strtoul(optarg, NULL, 10), (unsigned long)MAX_ROUNDS);
        else if (option == 'm')
            round_ms = strtoul(optarg, NULL, 10);
        else if (option == 'c')
            round_requests = strtoul(optarg, NULL, 10);
        else if (option == 'n')
            scale = strtoul(optarg, NULL, 10);
        else if (option == 'f')
            figures = optarg;
        else if (option == 'w')
            wire = true;
        else
            return 2;
    }
    require(rounds > 0 && round_ms > 0 && round_requests > 0 && scale > 0, "numbers above 0");
    for (int i = optind; i < argc; i++)
        add_indexer(argv[i]);
    if (n_indexers == 0)
        add_our_own();
    zmq = wire ? NULL : zmq_ctx_new();
    if (strstr(figures, "query"))
        queries();
    if (strstr(figures, "ingest")) {
        e.n_batches = 4096 * scale / 100;
        ingest("ingest", &e);
    }
    if (strstr(figures, "single")) {
        struct events one = {1, 1, 1600 * scale / 100 * CHAIN_BLOCKS, 0};

        ingest("ingest_single", &one);
    }
    if (strstr(figures, "memory")) {
        e.n_batches = 8192 * scale / 100;
        e.shared = 3;
        memory(&e);
    }
    if (zmq)
        zmq_ctx_term(zmq);
    return 0;
}
