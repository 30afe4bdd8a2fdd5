// SPDX-License-Identifier: Apache-2.0
/*
 * A picker as a process, for tests and benchmarks of src/extproc: libkvselect chooses among workers that the
 * command line names, without an index; a prompt that was sent to a worker is predicted there.
 *
 *     picker_node [--tokenize URL] [--tokenize-ms N] [--max-body N] [--max-requests N] [--drain-ms N]
 *                 [--queue TOKENS] ENDPOINT[,FALLBACK...] ...
 *
 * Prints "port N". Commands on standard input, one a line, each answered by one line or a text that ends in an
 * empty line: loads, metrics. Ends when standard input does. Exit status 1: bookings were left when all streams
 * were over.
 */
#include <pthread.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/json/json.h"
#include "extproc/extproc.h"
#include "kv_hash.h"
#include "kv_select.h"

#define BLOCK 16
#define MAX_WORKERS 64

struct node {
    pthread_mutex_t lock;
    struct kvsel *books;
    const char *endpoints[MAX_WORKERS]; /* of worker i: its own, then fallbacks */
    uint32_t max_requests;
    size_t n;
    uint64_t tokens;       /* of all asks */
    enum kx_source source; /* of the last one */
};

static bool is_allowed(const struct kx_ask *ask, const char *endpoints)
{
    size_t len = strcspn(endpoints, ",");

    for (size_t i = 0; i < ask->n_candidates; i++) {
        if (strlen(ask->candidates[i]) == len && memcmp(ask->candidates[i], endpoints, len) == 0)
            return true;
    }
    return false;
}

static int pick(struct node *node, const struct kx_ask *ask, const uint64_t *hashes,
                size_t n_hashes, char *ret)
{
    struct kvsel_request request = KVSEL_REQUEST_INIT;
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    uint64_t allowed[MAX_WORKERS], now_ns = kv_now_ns();
    int rc;

    request.tokens = ask->n_tokens;
    request.hashes = hashes;
    request.n_hashes = n_hashes;
    request.session = ask->session;
    for (size_t i = 0; ask->limited && i < node->n; i++) {
        if (is_allowed(ask, node->endpoints[i]))
            allowed[request.n_allowed++] = i;
    }
    if (ask->limited && request.n_allowed == 0)
        return -EHOSTUNREACH;
    request.allowed = ask->limited ? allowed : NULL;
    pthread_mutex_lock(&node->lock);
    node->tokens += ask->n_tokens;
    node->source = ask->source;
    rc = kvsel_select(node->books, &request, now_ns, &choice);
    if (rc == 0)
        rc = kvsel_book(node->books, ask->id, strlen(ask->id), &request, &choice, now_ns);
    pthread_mutex_unlock(&node->lock);
    if (rc == 0)
        snprintf(ret, KX_MAX_ENDPOINTS, "%s", node->endpoints[choice.worker.worker]);
    return rc;
}

static int choose(void *arg, const struct kx_ask *ask, char ret[KX_MAX_ENDPOINTS])
{
    size_t n = ask->tokens ? ask->n_tokens / BLOCK : 0;
    uint64_t *hashes;
    int rc;

    if (ask->model[0] && strcmp(ask->model, "m") != 0)
        return -ENOENT;
    hashes = calloc(n + 1, sizeof(*hashes));
    if (!hashes)
        return -ENOMEM;
    if (n > 0) {
        kve_hash_tokens(KVE_SEED, ask->tokens, ask->n_tokens, BLOCK, 0, hashes);
        kve_sequence_hashes(hashes, n, hashes);
    }
    rc = pick(arg, ask, hashes, n, ret);
    free(hashes);
    return rc;
}

static void first_token(void *arg, const char *id)
{
    struct node *node = arg;

    pthread_mutex_lock(&node->lock);
    kvsel_first_token(node->books, id, strlen(id), kv_now_ns());
    pthread_mutex_unlock(&node->lock);
}

static void output(void *arg, const char *id, uint64_t n)
{
    struct node *node = arg;

    pthread_mutex_lock(&node->lock);
    kvsel_output(node->books, id, strlen(id), n, kv_now_ns());
    pthread_mutex_unlock(&node->lock);
}

static void end(void *arg, const char *id, bool lost)
{
    struct node *node = arg;

    pthread_mutex_lock(&node->lock);
    kvsel_free(node->books, id, strlen(id), lost ? KVSEL_LOST : KVSEL_DONE, kv_now_ns());
    pthread_mutex_unlock(&node->lock);
}

static bool is_ready(void *arg)
{
    return ((struct node *)arg)->n > 0;
}

static int set_worker(struct node *node, size_t i)
{
    struct kvsel_worker worker = KVSEL_WORKER_INIT;

    worker.holder.worker = i;
    worker.max_requests = node->max_requests;
    return kvsel_set_worker(node->books, &worker);
}

static void write_loads(struct node *node, struct kv_buf *out)
{
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    pthread_mutex_lock(&node->lock);
    kvsel_get_stats(node->books, &stats);
    kv_json_begin_object(&w);
    kv_json_member_u64(&w, "bookings", stats.bookings);
    kv_json_member_u64(&w, "booked", stats.booked);
    kv_json_member_u64(&w, "freed", stats.freed);
    kv_json_member_u64(&w, "lost", stats.lost);
    kv_json_member_u64(&w, "unknown", stats.unknown);
    kv_json_member_u64(&w, "tokens", node->tokens);
    kv_json_member_str(&w, "source", kx_source_name(node->source));
    kv_json_key(&w, "workers");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < node->n; i++) {
        struct kvsel_load load;

        kvsel_get_load(node->books, (struct kv_holder){.worker = i}, &load);
        kv_json_begin_object(&w);
        kv_json_member_u64(&w, "waiting", load.waiting);
        kv_json_member_u64(&w, "context", load.context);
        kv_json_member_u64(&w, "requests", load.requests);
        kv_json_member_u64(&w, "queued", load.queued);
        kv_json_end_object(&w);
    }
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    pthread_mutex_unlock(&node->lock);
}

static void obey(struct node *node, struct kx_server *server, const char *line)
{
    struct kv_buf out = KV_BUF_INIT;

    if (strcmp(line, "loads") == 0)
        write_loads(node, &out);
    else if (strcmp(line, "metrics") == 0)
        kx_server_metrics(server, &out);
    puts(kv_buf_cstr(&out));
    fflush(stdout);
    kv_buf_fini(&out);
}

static int serve(struct node *node, struct kx_opts opts)
{
    const struct kx_picker picker = {.arg = node,
                                     .choose = choose,
                                     .first_token = first_token,
                                     .output = output,
                                     .end = end,
                                     .ready = is_ready};
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    struct kx_server *server;
    struct kv_error error;
    char line[512];

    opts.host = "127.0.0.1";
    opts.picker = &picker;
    if (kx_server_start(&opts, &server, &error) < 0) {
        fprintf(stderr, "%s\n", error.text);
        return 2;
    }
    printf("port %u\n", (unsigned)kx_server_port(server));
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        obey(node, server, line);
    }
    kx_server_stop(server);
    kvsel_get_stats(node->books, &stats);
    return stats.bookings ? 1 : 0;
}

int main(int argc, char **argv)
{
    struct node node = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct kvsel_opts books = KVSEL_OPTS_INIT;
    struct kx_opts opts = {0};
    int i, rc;

    for (i = 1; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2) {
        uint64_t n = strtoull(argv[i + 1], NULL, 10);

        if (strcmp(argv[i], "--tokenize") == 0)
            opts.tokenize = argv[i + 1];
        else if (strcmp(argv[i], "--tokenize-ms") == 0)
            opts.tokenize_ms = n;
        else if (strcmp(argv[i], "--max-body") == 0)
            opts.max_body = n;
        else if (strcmp(argv[i], "--max-requests") == 0)
            node.max_requests = (uint32_t)n;
        else if (strcmp(argv[i], "--drain-ms") == 0)
            opts.drain_ms = n;
        else if (strcmp(argv[i], "--queue") == 0)
            books.queue_waiting = n;
        else
            return 2;
    }
    books.stride = 1;
    if (kvsel_create(&books, &node.books) < 0)
        return 2;
    for (; i < argc && node.n < MAX_WORKERS; i++) {
        node.endpoints[node.n++] = argv[i];
        if (set_worker(&node, node.n - 1) < 0)
            return 2;
    }
    rc = serve(&node, opts);
    kvsel_destroy(node.books);
    return rc;
}
