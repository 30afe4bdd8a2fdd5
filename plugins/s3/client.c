// SPDX-License-Identifier: Apache-2.0
#include "s3/client.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "s3/exchange.h"

#define EMPTY_SHA256 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define FIRST_PAUSE_MS 50
#define MAX_PAUSE_MS 5000
#define EARNS_A_SECOND (1u << 20) /* bytes that earn a try another second */

struct s3_client {
    const struct s3_config *config;
    CURLM *multi;
    pthread_t thread;
    bool started;

    pthread_mutex_t lock; /* guards inbox, stop and every request's finished */
    pthread_cond_t finished;
    struct s3_request *inbox, **inbox_end;
    bool stop;

    struct s3_request *waiting, **waiting_end; /* used by the client's thread only, from here on */
    struct s3_request *active;
    unsigned n_active;
    uint64_t random;
    int64_t skew_s; /* the server's clock minus ours */
    bool told_long;
    bool answered;      /* a server has answered once */
    bool unconditional; /* the server refuses If-None-Match; putters then look before they put */
    _Atomic uint64_t trips;
    /* skew_s for other threads: set by every answer, and never used to sign */
    _Atomic int64_t offset_s;
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;

static void init_curl(void)
{
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

/* -- Tries ----------------------------------------------------------------------------------- */

static void end_try(struct s3_client *client, struct s3_request *request)
{
    struct s3_request **at;

    for (at = &client->active; *at && *at != request; at = &(*at)->next)
        ;
    if (*at) {
        *at = request->next;
        client->n_active--;
        curl_multi_remove_handle(client->multi, request->easy);
    }
    s3_exchange_end(request);
}

static int begin_try(struct s3_client *client, struct s3_request *request)
{
    int error;

    if (request->deadline_ns == 0)
        request->deadline_ns = kv_now_ns() + client->config->timeout_ms * KV_NS_PER_MS;
    request->tries++;
    if (client->unconditional)
        request->if_none_match = false;
    error = s3_exchange_begin(client->config, client->skew_s, request);
    if (error)
        return error;
    if (curl_multi_add_handle(client->multi, request->easy)) {
        s3_exchange_end(request);
        return -ENOMEM;
    }
    atomic_fetch_add_explicit(&client->trips, 1, memory_order_relaxed);
    request->next = client->active;
    client->active = request;
    client->n_active++;
    return 0;
}

/* -- The thread ------------------------------------------------------------------------------ */

static const char *explain(const struct s3_config *config, const struct s3_request *request)
{
    if (request->region[0] && strcmp(request->region, config->region) != 0)
        return "the bucket is in another region: set region=, or AWS_REGION";
    if (s3_keys_expired(request))
        return "the keys have expired: set new ones (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
               "AWS_SESSION_TOKEN) and open the store again";
    return request->status / 100 == 3 ? "redirected: wrong region or endpoint" : "request failed";
}

static void log_failure(struct s3_client *client, const struct s3_request *request)
{
    static struct kv_log_rate rate;
    char path[200], code[80], before[80], region[80];

    if (request->error == 0 ||
        (request->error == -ENOENT && strcmp(request->code, "NoSuchBucket") != 0))
        return;
    if (request->error == -EEXIST || request->error == -ECANCELED || !kv_log_allowed(&rate, 10))
        return;
    if (request->too_big) {
        if (!client->told_long)
            kv_log_error("s3", "an answer exceeds the limit (logged once)",
                         "method=%s path=%s limit=%" PRIu64, request->method,
                         kv_log_quote(path, sizeof(path), request->path),
                         request->max_body ? request->max_body : S3_MAX_ANSWER);
        client->told_long = true;
        return;
    }
    kv_log_error("s3", explain(client->config, request),
                 "method=%s path=%s status=%d code=%s before=%s tries=%u region=%s%s%s",
                 request->method, kv_log_quote(path, sizeof(path), request->path), request->status,
                 kv_log_quote(code, sizeof(code), request->code),
                 kv_log_quote(before, sizeof(before), request->before), request->tries,
                 client->config->region, request->region[0] ? " region_of_bucket=" : "",
                 request->region[0] ? kv_log_quote(region, sizeof(region), request->region) : "");
}

static void finish(struct s3_client *client, struct s3_request *request)
{
    s3_done_fn done = request->done;

    log_failure(client, request);
    if (request->error == 0 && !request->data) { /* an empty object is not a missing one */
        request->data = malloc(1);
        request->error = request->data ? 0 : -ENOMEM;
    }
    if (done) {
        done(request->arg, request);
        return;
    }
    pthread_mutex_lock(&client->lock);
    request->finished = true; /* from here on the request belongs to its owner */
    pthread_cond_broadcast(&client->finished);
    pthread_mutex_unlock(&client->lock);
}

static void queue(struct s3_client *client, struct s3_request *request)
{
    request->next = NULL;
    *client->waiting_end = request;
    client->waiting_end = &request->next;
}

/* Return a random pause up to a bound that doubles, so that many clients don't retry at the same
 * moment. */
static uint64_t pause_ns(struct s3_client *client, unsigned tries)
{
    uint64_t bound = FIRST_PAUSE_MS << KV_MIN(tries - 1, 10u);

    client->random ^= client->random << 13;
    client->random ^= client->random >> 7;
    client->random ^= client->random << 17;
    bound = KV_MIN(bound, (uint64_t)MAX_PAUSE_MS) * KV_NS_PER_MS;
    return bound / 4 + client->random % (bound - bound / 4);
}

static void correct_clock(struct s3_client *client, struct s3_request *request)
{
    request->skewed = true;
    client->skew_s = request->server_s - (int64_t)(kv_wall_ns() / KV_NS_PER_S);
    kv_log_warn("s3", "the clocks differ; using the server's", "offset_s=%" PRId64, client->skew_s);
}

/* Return the time at which a request is given up while connections are refused. */
static uint64_t end_of_refusals(const struct s3_client *client, const struct s3_request *request)
{
    uint64_t begin_ns = request->deadline_ns - client->config->timeout_ms * KV_NS_PER_MS;
    uint64_t ms = client->answered ? client->config->stall_ms : S3_REFUSED_MS;

    return KV_MIN(begin_ns + ms * KV_NS_PER_MS, request->deadline_ns);
}

static void settle(struct s3_client *client, struct s3_request *request, CURLcode code)
{
    enum s3_verdict verdict = s3_exchange_judge(request, (int)code);
    uint64_t now = kv_now_ns();

    end_try(client, request);
    client->answered |= request->status != 0;
    if (request->server_s)
        atomic_store_explicit(&client->offset_s,
                              request->server_s - (int64_t)(kv_wall_ns() / KV_NS_PER_S),
                              memory_order_relaxed);
    if (verdict == S3_SKEWED)
        correct_clock(client, request);
    if (verdict == S3_PLAIN)
        client->unconditional = true;
    if (verdict != S3_FINAL) {
        request->due_ns = now;
        if (verdict == S3_AGAIN)
            request->due_ns += KV_MAX(pause_ns(client, request->tries), request->pause_ns);
        if (request->due_ns <
            (request->refused ? end_of_refusals(client, request) : request->deadline_ns)) {
            kv_log_debug("s3", "trying again", "method=%s status=%d tries=%u", request->method,
                         request->status, request->tries);
            queue(client, request);
            return;
        }
    }
    finish(client, request);
}

/* Return the time at which a try must end. Transferred bytes earn more time, but too little for a
 * very slow server. */
static uint64_t end_of_time(const struct s3_request *request)
{
    return request->deadline_ns +
           (request->data_len + request->sent) * KV_NS_PER_S / EARNS_A_SECOND;
}

/* End tries that are late. Returns the time to sleep, at most @sleep_ms. */
static int expire(struct s3_client *client, int sleep_ms)
{
    struct s3_request *request, *next;
    uint64_t now = kv_now_ns();

    for (request = client->active; request; request = next) {
        uint64_t end = end_of_time(request);

        next = request->next;
        if (end > now) {
            sleep_ms = (int)KV_MIN((int64_t)sleep_ms, kv_ms_until(end, now));
            continue;
        }
        end_try(client, request);
        request->status = 0;
        request->error = -ETIMEDOUT;
        snprintf(request->code, sizeof(request->code), "time is up");
        finish(client, request);
    }
    return sleep_ms;
}

static void fail_all(struct s3_client *client)
{
    struct s3_request *request;

    while ((request = client->active)) {
        end_try(client, request);
        request->error = -ECANCELED;
        finish(client, request);
    }
    while ((request = client->waiting)) {
        client->waiting = request->next;
        request->error = -ECANCELED;
        finish(client, request);
    }
    client->waiting_end = &client->waiting;
}

/* Begin due requests while connections are free. Returns the time to sleep, at most @sleep_ms. */
static int begin_due(struct s3_client *client)
{
    struct s3_request **at = &client->waiting, *request;
    uint64_t now = kv_now_ns();
    int64_t sleep_ms = 1000;
    int error;

    while ((request = *at) && client->n_active < client->config->connections) {
        if (request->due_ns > now) {
            sleep_ms = KV_MIN(sleep_ms, kv_ms_until(request->due_ns, now));
            at = &request->next;
            continue;
        }
        *at = request->next;
        if (!*at)
            client->waiting_end = at;
        error = begin_try(client, request);
        if (error) {
            request->error = error;
            finish(client, request);
            at = &client->waiting; /* finish may have called back, which may have queued more */
        }
    }
    return (int)sleep_ms;
}

static bool take_inbox(struct s3_client *client)
{
    struct s3_request *list;
    bool stop;

    pthread_mutex_lock(&client->lock);
    list = client->inbox;
    client->inbox = NULL;
    client->inbox_end = &client->inbox;
    stop = client->stop;
    pthread_mutex_unlock(&client->lock);
    while (list) {
        struct s3_request *next = list->next;

        queue(client, list);
        list = next;
    }
    return stop;
}

static void *drive(void *arg)
{
    struct s3_client *client = arg;
    int running, left, sleep_ms;
    CURLMsg *message;

    while (!take_inbox(client)) {
        sleep_ms = begin_due(client);
        curl_multi_perform(client->multi, &running);
        while ((message = curl_multi_info_read(client->multi, &left)))
            if (message->msg == CURLMSG_DONE) {
                CURLcode code = message->data.result;
                char *request;

                curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &request);
                settle(client, (struct s3_request *)(void *)request, code);
                sleep_ms = 0;
            }
        sleep_ms = expire(client, sleep_ms);
        curl_multi_poll(client->multi, NULL, 0, sleep_ms, NULL);
    }
    while (client->active || client->waiting) {
        fail_all(client);
        take_inbox(client);
    }
    return NULL;
}

/* -- Calls of other threads -------------------------------------------------------------------- */

int s3_client_create(const struct s3_config *config, struct s3_client **ret)
{
    struct s3_client *client = calloc(1, sizeof(*client));
    int error;

    if (!client)
        return -ENOMEM;
    pthread_once(&curl_once, init_curl);
    pthread_mutex_init(&client->lock, NULL);
    pthread_cond_init(&client->finished, NULL);
    client->config = config;
    client->inbox_end = &client->inbox;
    client->waiting_end = &client->waiting;
    client->random = (kv_wall_ns() ^ (uint64_t)(uintptr_t)client) | 1;
    client->multi = curl_multi_init();
    error = client->multi ? 0 : -ENOMEM;
    if (!error) {
        curl_multi_setopt(client->multi, CURLMOPT_MAXCONNECTS, (long)config->connections);
        error = kv_thread_start(&client->thread, "kv-s3", drive, client);
        client->started = !error;
    }
    if (error) {
        s3_client_destroy(client);
        return error;
    }
    *ret = client;
    return 0;
}

void s3_client_destroy(struct s3_client *client)
{
    if (!client)
        return;
    if (client->started) {
        pthread_mutex_lock(&client->lock);
        client->stop = true;
        pthread_mutex_unlock(&client->lock);
        curl_multi_wakeup(client->multi);
        pthread_join(client->thread, NULL);
    }
    if (client->multi)
        curl_multi_cleanup(client->multi);
    pthread_cond_destroy(&client->finished);
    pthread_mutex_destroy(&client->lock);
    free(client);
}

void s3_submit(struct s3_client *client, struct s3_request *request)
{
    request->next = NULL;
    if (request->sha256[0] == '\0') {
        if (request->len == 0)
            memcpy(request->sha256, EMPTY_SHA256, S3_SHA256_HEX);
        else if (s3_sha256_hex(request->body, request->len, request->sha256))
            request->sha256[0] = '\0'; /* the server will refuse the wrong hash */
    }
    pthread_mutex_lock(&client->lock);
    *client->inbox_end = request;
    client->inbox_end = &request->next;
    pthread_mutex_unlock(&client->lock);
    curl_multi_wakeup(client->multi);
}

int s3_wait(struct s3_client *client, struct s3_request *request)
{
    pthread_mutex_lock(&client->lock);
    while (!request->finished)
        pthread_cond_wait(&client->finished, &client->lock);
    pthread_mutex_unlock(&client->lock);
    return request->error;
}

int s3_run(struct s3_client *client, struct s3_request *request)
{
    s3_submit(client, request);
    return s3_wait(client, request);
}

void s3_request_reset(struct s3_request *request)
{
    s3_exchange_forget(request);
    free(request->data);
    request->data = NULL;
    request->capacity = 0;
    request->deadline_ns = request->due_ns = 0;
    request->tries = 0;
    request->error = 0;
    request->finished = request->skewed = false;
}

void s3_request_fini(struct s3_request *request)
{
    free(request->path);
    free(request->query);
    free(request->copy_source);
    free(request->data);
    memset(request, 0, sizeof(*request));
}

uint64_t s3_client_trips(const struct s3_client *client)
{
    return atomic_load_explicit(&client->trips, memory_order_relaxed);
}

int64_t s3_client_offset_s(const struct s3_client *client)
{
    return atomic_load_explicit(&client->offset_s, memory_order_relaxed);
}

int64_t s3_client_now_s(const struct s3_client *client)
{
    return (int64_t)(kv_wall_ns() / KV_NS_PER_S) + s3_client_offset_s(client);
}
