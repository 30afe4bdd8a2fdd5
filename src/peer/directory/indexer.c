// SPDX-License-Identifier: Apache-2.0
/* Requests to kv-indexer by libkvbm_http, on the callers' threads, behind a breaker. */
#include "peer/directory/indexer.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/net/endpoint.h"
#include "base/thread/thread.h"
#include "peer/directory/directory.h"
#include "plane/http_abi.h"

#define MAX_REQUESTS 64u
#define MAX_TOKEN 256    /* as kv-indexer takes them */
#define CONNECT_MS 60000 /* talk ends requests */
#define MAX_FAILURES 3u
#define FIRST_PAUSE_NS KV_NS_PER_S
#define MAX_PAUSE_NS (30 * KV_NS_PER_S)

/* A client and its request. One thread at a time has it. */
struct client {
    struct kvbm_http *http; /* NULL: not opened yet */
    bool busy;
    struct kv_buf request, answer;
    bool ended;
    unsigned status; /* of HTTP; 0: failed, and why */
    char why[160];
};

struct kvbm_indexer {
    const struct kvbm_http_abi *abi;
    char *url, *model, *tenant, *authorization, *tls_ca;
    uint64_t timeout_ns, salt;
    uint32_t n_clients;
    struct kv_wake wake; /* signalled while interrupted */
    atomic_bool interrupted;

    pthread_mutex_t lock; /* all below, and busy */
    struct client *clients;
    bool open, probing; /* the breaker */
    uint32_t failures;
    uint64_t next_ns, pause_ns;
    struct kvbm_indexer_stats stats;
};

/* ---- the breaker; with the lock ---- */

static bool passes(struct kvbm_indexer *indexer)
{
    if (!indexer->open)
        return true;
    if (indexer->probing || kv_now_ns() < indexer->next_ns)
        return false;
    indexer->probing = true;
    return true;
}

/* Open the breaker, or keep it open for longer. Returns whether it was closed. */
static bool open_breaker(struct kvbm_indexer *indexer)
{
    bool was_closed = !indexer->open;

    indexer->open = true;
    indexer->probing = false;
    indexer->pause_ns = was_closed ? FIRST_PAUSE_NS : KV_MIN(2 * indexer->pause_ns, MAX_PAUSE_NS);
    indexer->next_ns = kv_now_ns() + indexer->pause_ns;
    indexer->stats.opened += was_closed;
    return was_closed;
}

/* Note how a request has ended; @hard: it had all its time. Returns whether the breaker opened. */
static bool note_end(struct kvbm_indexer *indexer, long rc, bool hard)
{
    if (rc == -ECANCELED || rc == -ENOMEM) {
        indexer->probing = false;
        return false;
    }
    if (rc >= 0) {
        indexer->open = indexer->probing = false;
        indexer->failures = 0;
        return false;
    }
    indexer->stats.failed++;
    if (indexer->open && !indexer->probing) /* a request from before the breaker opened */
        return false;
    if (indexer->open || hard || ++indexer->failures >= MAX_FAILURES)
        return open_breaker(indexer);
    return false;
}

/* ---- requests ---- */

static bool on_data(void *arg, unsigned slot, const void *data, size_t len)
{
    struct client *client = arg;

    (void)slot;
    kv_buf_append(&client->answer, data, len);
    return !client->answer.error;
}

static void on_end(void *arg, unsigned slot, unsigned status, const char *why)
{
    struct client *client = arg;

    (void)slot;
    client->ended = true;
    client->status = status;
    snprintf(client->why, sizeof(client->why), "%s", why);
}

static int post(const struct kvbm_indexer *indexer, struct client *client)
{
    const struct kvbm_http_opts opts = {
        .ca = indexer->tls_ca, .data = on_data, .end = on_end, .arg = client};
    const struct kvbm_http_post request = {.url = indexer->url,
                                           .authorization = indexer->authorization,
                                           .body = client->request.data,
                                           .len = client->request.len,
                                           .connect_ms = CONNECT_MS};
    int err = client->http ? 0 : indexer->abi->open(&opts, &client->http);

    client->ended = false;
    client->status = 0;
    kv_buf_clear(&client->answer);
    client->answer.error = 0;
    client->answer.limit = KVBM_INDEXER_MAX_ANSWER;
    return err < 0 ? err : indexer->abi->post(client->http, 0, &request);
}

/* Send the request and wait for its end. Returns 0 or an error. */
static int talk(struct kvbm_indexer *indexer, struct client *client, uint64_t until_ns)
{
    int err = post(indexer, client);

    while (err == 0 && !client->ended) {
        int64_t left = kv_ms_until(until_ns, kv_now_ns());

        if (atomic_load_explicit(&indexer->interrupted, memory_order_acquire))
            err = -ECANCELED;
        else if (left <= 0)
            err = -ETIMEDOUT;
        else
            indexer->abi->poll(client->http, indexer->wake.fd, (uint32_t)left);
    }
    if (err < 0 && client->http)
        indexer->abi->cancel(client->http, 0);
    if (err == 0 && !client->status)
        err = -EIO;
    if (err == -ETIMEDOUT)
        snprintf(client->why, sizeof(client->why), "no answer in time");
    return err;
}

/* Read what the indexer has answered. */
static long conclude(const struct kvbm_indexer *indexer, struct client *client,
                     struct kvbm_holding *ret, size_t max)
{
    long n;

    if (client->status == 404) /* of this model and tenant it knows no worker yet */
        return 0;
    if (client->status != 200) {
        snprintf(client->why, sizeof(client->why), "HTTP status %u", client->status);
        return -EIO;
    }
    n = kvbm_indexer_read(client->answer.data ? client->answer.data : "", client->answer.len,
                          indexer->salt, ret, max);
    if (n < 0)
        snprintf(client->why, sizeof(client->why), "an answer that makes no sense");
    return n;
}

/* Take a client that is free, if something may be asked now. */
static int take(struct kvbm_indexer *indexer, struct client **ret)
{
    int err = -EAGAIN;

    pthread_mutex_lock(&indexer->lock);
    for (uint32_t i = 0; err == -EAGAIN && i < indexer->n_clients; i++) {
        if (indexer->clients[i].busy)
            continue;
        err = passes(indexer) ? 0 : -EHOSTDOWN;
        if (err == 0) {
            *ret = &indexer->clients[i];
            (*ret)->busy = true;
            indexer->stats.asked++;
        }
    }
    pthread_mutex_unlock(&indexer->lock);
    return err;
}

static void give(struct kvbm_indexer *indexer, struct client *client, long rc, bool hard)
{
    char why[2 * sizeof(client->why)];
    bool opened;

    kv_log_quote(why, sizeof(why), client->why);
    pthread_mutex_lock(&indexer->lock);
    opened = note_end(indexer, rc, hard);
    client->busy = false;
    pthread_mutex_unlock(&indexer->lock);
    if (opened)
        kv_log_warn("kvbm", "kv-indexer doesn't answer: peers are asked without it for a while",
                    "url=%s reason=%s", indexer->url, why);
}

long kvbm_indexer_ask(struct kvbm_indexer *indexer, const void *keys, uint32_t key_len, size_t n,
                      uint64_t deadline_ns, struct kvbm_holding *ret, size_t max)
{
    uint64_t most = kv_now_ns() + indexer->timeout_ns, until = KV_MIN(deadline_ns, most);
    struct client *client;
    long rc = take(indexer, &client);

    if (rc < 0)
        return rc;
    kv_buf_clear(&client->request);
    kvbm_indexer_write(&client->request, indexer->model, indexer->tenant, keys, key_len, n);
    rc = client->request.error ? client->request.error : talk(indexer, client, until);
    if (rc == 0)
        rc = conclude(indexer, client, ret, max);
    give(indexer, client, rc, rc == -ETIMEDOUT && until == most);
    return rc;
}

void kvbm_indexer_interrupt(struct kvbm_indexer *indexer, bool on)
{
    if (!indexer)
        return;
    atomic_store_explicit(&indexer->interrupted, on, memory_order_release);
    if (on)
        kv_wake_signal(&indexer->wake);
    else
        kv_wake_clear(&indexer->wake);
}

void kvbm_indexer_get_stats(struct kvbm_indexer *indexer, struct kvbm_indexer_stats *ret)
{
    pthread_mutex_lock(&indexer->lock);
    *ret = indexer->stats;
    ret->down = indexer->open;
    pthread_mutex_unlock(&indexer->lock);
}

/* ---- open and close ---- */

static int refuse(const char *why)
{
    kv_log_error("kvbm", "the options of an indexer are refused", "why=\"%s\"", why);
    return -EINVAL;
}

static int copy(const char *text, char **ret)
{
    *ret = text ? strdup(text) : NULL;
    return text && !*ret ? -ENOMEM : 0;
}

/* Read "http://HOST:PORT", with a slash or without. */
static int read_url(struct kvbm_indexer *indexer, const char *text)
{
    bool tls = text && strncmp(text, "https://", 8) == 0;
    struct kv_endpoint endpoint;
    char tcp[300], url[340];
    const char *why;
    size_t len;

    if (!tls && (!text || strncmp(text, "http://", 7) != 0))
        return refuse("indexer begins with http:// or https://");
    text += tls ? 8 : 7;
    len = strlen(text);
    len -= len && text[len - 1] == '/';
    if (snprintf(tcp, sizeof(tcp), "tcp://%.*s", (int)KV_MIN(len, sizeof(tcp)), text) >=
        (int)sizeof(tcp))
        return refuse("indexer is too long");
    if (kv_endpoint_parse_peer(tcp, &endpoint, &why) < 0)
        return refuse(why);
    snprintf(url, sizeof(url), "http%s%s/query_by_hash", tls ? "s" : "", tcp + strlen("tcp"));
    return copy(url, &indexer->url);
}

static int read_token(struct kvbm_indexer *indexer, const char *path)
{
    char header[MAX_TOKEN + 16];
    struct kv_buf text = KV_BUF_INIT;
    int err = path ? peer_file_read(path, 4096, &text) : 0;
    size_t len;

    if (!path)
        return 0;
    if (err < 0)
        kv_log_error("kvbm", "the indexer's token can't be read", "error=\"%s\"", strerror(-err));
    len = err == 0 ? strcspn(kv_buf_cstr(&text), "\r\n") : 0;
    if (err == 0 && (!len || len > MAX_TOKEN))
        err = refuse("indexer_token_file has no token of 1 to 256 bytes in its first line");
    if (err == 0) {
        snprintf(header, sizeof(header), "Bearer %.*s", (int)len, kv_buf_cstr(&text));
        err = copy(header, &indexer->authorization);
        explicit_bzero(header, sizeof(header));
    }
    if (text.data)
        explicit_bzero(text.data, text.capacity);
    kv_buf_fini(&text);
    return err;
}

static int read_opts(struct kvbm_indexer *indexer, const struct kvbm_indexer_opts *opts)
{
    int err;

    if (!opts->model || !*opts->model)
        return refuse("indexer needs indexer_model");
    err = read_url(indexer, opts->url);
    if (err == 0)
        err = copy(opts->model, &indexer->model);
    if (err == 0)
        err = copy(opts->tenant, &indexer->tenant);
    if (err == 0)
        err = copy(opts->tls_ca, &indexer->tls_ca);
    return err < 0 ? err : read_token(indexer, opts->token_file);
}

static int prepare(struct kvbm_indexer *indexer, const struct kvbm_indexer_opts *opts)
{
    int err = read_opts(indexer, opts);

    if (err < 0)
        return err;
    if (getrandom(&indexer->salt, sizeof(indexer->salt), 0) != (ssize_t)sizeof(indexer->salt))
        return -EAGAIN;
    indexer->timeout_ns = (opts->timeout_ms ? opts->timeout_ms : 100) * KV_NS_PER_MS;
    indexer->n_clients = opts->max_requests ? KV_MIN(opts->max_requests, MAX_REQUESTS) : 4;
    indexer->clients = calloc(indexer->n_clients, sizeof(*indexer->clients));
    if (!indexer->clients)
        return -ENOMEM;
    indexer->abi = kvbm_http_load();
    return indexer->abi ? kv_wake_open(&indexer->wake) : -ENOTSUP;
}

int kvbm_indexer_open(const struct kvbm_indexer_opts *opts, struct kvbm_indexer **ret)
{
    struct kvbm_indexer *indexer = calloc(1, sizeof(*indexer));
    int err;

    if (!indexer)
        return -ENOMEM;
    indexer->wake.fd = -1;
    pthread_mutex_init(&indexer->lock, NULL);
    err = prepare(indexer, opts);
    if (err < 0)
        kvbm_indexer_close(indexer);
    else
        *ret = indexer;
    return err;
}

void kvbm_indexer_close(struct kvbm_indexer *indexer)
{
    if (!indexer)
        return;
    for (uint32_t i = 0; indexer->clients && i < indexer->n_clients; i++) {
        if (indexer->clients[i].http)
            indexer->abi->close(indexer->clients[i].http);
        kv_buf_fini(&indexer->clients[i].request);
        kv_buf_fini(&indexer->clients[i].answer);
    }
    free(indexer->clients);
    kv_wake_close(&indexer->wake);
    pthread_mutex_destroy(&indexer->lock);
    if (indexer->authorization)
        explicit_bzero(indexer->authorization, strlen(indexer->authorization));
    free(indexer->authorization);
    free(indexer->url);
    free(indexer->model);
    free(indexer->tenant);
    free(indexer->tls_ca);
    free(indexer);
}
