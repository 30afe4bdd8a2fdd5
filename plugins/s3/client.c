// SPDX-License-Identifier: Apache-2.0
#include "s3/client.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "s3/xml.h"

#define EMPTY_SHA256 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define FIRST_PAUSE_MS 50
#define MAX_PAUSE_MS 5000
#define MAX_ERROR_BODY 65536
#define MAX_TRUSTED_LENGTH (64u << 20) /* more than this is allocated as it comes */

struct s3_client {
    const struct s3_config *config;
    CURLM *multi;
    pthread_t thread;
    bool started;

    pthread_mutex_t lock; /* guards inbox, stop and every request's finished */
    pthread_cond_t finished;
    struct s3_request *inbox, **inbox_end;
    bool stop;

    struct s3_request *waiting, **waiting_end; /* the thread's own from here */
    struct s3_request *active;
    unsigned n_active;
    uint64_t random;
    int64_t skew_s; /* the server's clock minus ours */
    _Atomic uint64_t trips;
};

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;

static void init_curl(void)
{
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

/* -- One try --------------------------------------------------------------------------------- */

static size_t on_body(char *data, size_t size, size_t n, void *arg)
{
    struct s3_request *request = arg;
    size_t len = size * n, want = request->data_len + len;
    long status = 0;

    curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status >= 300 && want > MAX_ERROR_BODY)
        return len;
    if (want > S3_MAX_BODY) {
        request->too_big = true;
        return 0;
    }
    if (want > request->capacity) {
        size_t capacity = KV_MAX(want, request->capacity * 2);
        uint8_t *bigger;

        if (request->data_len == 0 && request->length <= MAX_TRUSTED_LENGTH)
            capacity = KV_MAX(want, (size_t)request->length);
        bigger = realloc(request->data, capacity);
        if (!bigger) {
            request->no_memory = true;
            return 0;
        }
        request->data = bigger;
        request->capacity = capacity;
    }
    memcpy(request->data + request->data_len, data, len);
    request->data_len = want;
    return len;
}

static size_t on_send(char *ret, size_t size, size_t n, void *arg)
{
    struct s3_request *request = arg;
    size_t len = KV_MIN(size * n, request->len - request->sent);

    if (len)
        memcpy(ret, (const char *)request->body + request->sent, len);
    request->sent += len;
    return len;
}

/* curl starts over by itself when a kept connection turns out to be dead. */
static int on_seek(void *arg, curl_off_t offset, int origin)
{
    struct s3_request *request = arg;

    if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > request->len)
        return CURL_SEEKFUNC_FAIL;
    request->sent = (size_t)offset;
    return CURL_SEEKFUNC_OK;
}

static void forget_answer(struct s3_request *request)
{
    request->status = 0;
    request->code[0] = request->etag[0] = request->got_sum[0] = '\0';
    request->modified_s = request->server_s = 0;
    request->length = UINT64_MAX;
    request->data_len = 0;
    request->too_big = request->no_memory = false;
}

static size_t on_header(char *data, size_t size, size_t n, void *arg)
{
    struct s3_request *request = arg;
    char line[256], *value;
    size_t len = size * n, keep = KV_MIN(len, sizeof(line) - 1);

    memcpy(line, data, keep);
    line[keep] = '\0';
    if (strncmp(line, "HTTP/", 5) == 0) { /* after a 100 comes the real one */
        forget_answer(request);
        return len;
    }
    line[strcspn(line, "\r\n")] = '\0';
    value = strchr(line, ':');
    if (!value)
        return len;
    *value++ = '\0';
    value += strspn(value, " \t");
    if (strcasecmp(line, "etag") == 0)
        snprintf(request->etag, sizeof(request->etag), "%.95s", value);
    else if (strcasecmp(line, S3_SUM_HEADER) == 0)
        snprintf(request->got_sum, sizeof(request->got_sum), "%.63s", value);
    else if (strcasecmp(line, "last-modified") == 0)
        request->modified_s = KV_MAX((int64_t)curl_getdate(value, NULL), 0);
    else if (strcasecmp(line, "date") == 0)
        request->server_s = KV_MAX((int64_t)curl_getdate(value, NULL), 0);
    else if (strcasecmp(line, "content-length") == 0 && *value >= '0' && *value <= '9')
        request->length = strtoull(value, NULL, 10);
    return len;
}

static int add_header(struct curl_slist **list, const char *name, const char *value)
{
    struct kv_buf line = KV_BUF_INIT;
    struct curl_slist *longer = NULL;

    kv_buf_printf(&line, "%s: %s", name, value);
    if (!line.error)
        longer = curl_slist_append(*list, kv_buf_cstr(&line));
    kv_buf_fini(&line);
    if (!longer)
        return -ENOMEM;
    *list = longer;
    return 0;
}

/* Headers in order of their names, as the signature lists them, and the signature. */
static int make_headers(struct s3_client *client, struct s3_request *request,
                        struct curl_slist **list)
{
    const struct s3_config *config = client->config;
    struct kv_buf authorization = KV_BUF_INIT;
    struct s3_header headers[8];
    char stamp[S3_STAMP];
    size_t n = 0;
    int error = 0;

    s3_stamp((time_t)((int64_t)(kv_wall_ns() / KV_NS_PER_S) + client->skew_s), stamp);
    headers[n++] = (struct s3_header){"host", config->host};
    if (request->if_none_match)
        headers[n++] = (struct s3_header){"if-none-match", "*"};
    headers[n++] = (struct s3_header){"x-amz-content-sha256", request->sha256};
    if (request->copy_source)
        headers[n++] = (struct s3_header){"x-amz-copy-source", request->copy_source};
    headers[n++] = (struct s3_header){"x-amz-date", stamp};
    if (request->sum[0])
        headers[n++] = (struct s3_header){S3_SUM_HEADER, request->sum};
    if (request->copy_source)
        headers[n++] = (struct s3_header){"x-amz-metadata-directive", "REPLACE"};
    if (config->token)
        headers[n++] = (struct s3_header){"x-amz-security-token", config->token};
    error = s3_sign(&(struct s3_signing){.method = request->method,
                                         .path = request->path,
                                         .query = request->query ? request->query : "",
                                         .headers = headers,
                                         .n_headers = n,
                                         .payload_sha256 = request->sha256,
                                         .stamp = stamp,
                                         .region = config->region,
                                         .service = "s3",
                                         .access_key = config->access_key,
                                         .secret_key = config->secret_key},
                    &authorization);
    for (size_t i = 0; i < n && !error; i++)
        error = add_header(list, headers[i].name, headers[i].value);
    if (!error)
        error = add_header(list, "authorization", kv_buf_cstr(&authorization));
    if (!error)
        error = add_header(list, "expect", ""); /* else a second's wait on servers that ignore it */
    kv_buf_fini(&authorization);
    return error;
}

static void set_options(struct s3_client *client, struct s3_request *request)
{
    CURL *easy = request->easy;
    bool sends = strcmp(request->method, "PUT") == 0 || strcmp(request->method, "POST") == 0;
    long stall_s = (long)(client->config->stall_ms / 1000);

    curl_easy_setopt(easy, CURLOPT_PRIVATE, request);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "kvasir");
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 256L << 10);
    curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)client->config->stall_ms);
    if (request->slow) {
        curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)client->config->timeout_ms);
    } else {
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1024L);
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, KV_MAX(stall_s, 1L));
    }
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, request->headers);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, request);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, request);
    if (strcmp(request->method, "HEAD") == 0)
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    if (sends) {
        curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE, (curl_off_t)request->len);
        curl_easy_setopt(easy, CURLOPT_READFUNCTION, on_send);
        curl_easy_setopt(easy, CURLOPT_READDATA, request);
        curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, on_seek);
        curl_easy_setopt(easy, CURLOPT_SEEKDATA, request);
    }
    if (strcmp(request->method, "POST") == 0 || strcmp(request->method, "DELETE") == 0)
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request->method);
}

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
    curl_easy_cleanup(request->easy);
    curl_slist_free_all(request->headers);
    request->easy = request->headers = NULL;
}

static int begin_try(struct s3_client *client, struct s3_request *request)
{
    struct curl_slist *headers = NULL;
    struct kv_buf url = KV_BUF_INIT;
    int error;

    if (request->deadline_ns == 0)
        request->deadline_ns = kv_now_ns() + client->config->timeout_ms * KV_NS_PER_MS;
    forget_answer(request);
    request->sent = 0;
    request->tries++;
    request->easy = curl_easy_init();
    error = make_headers(client, request, &headers);
    request->headers = headers;
    kv_buf_printf(&url, "%s%s%s%s", client->config->endpoint, request->path,
                  request->query ? "?" : "", request->query ? request->query : "");
    if (!request->easy || url.error)
        error = -ENOMEM;
    if (!error) {
        set_options(client, request);
        error = curl_easy_setopt(request->easy, CURLOPT_URL, kv_buf_cstr(&url)) ? -ENOMEM : 0;
    }
    kv_buf_fini(&url);
    if (!error && curl_multi_add_handle(client->multi, request->easy))
        error = -ENOMEM;
    if (error) {
        end_try(client, request);
        return error;
    }
    atomic_fetch_add_explicit(&client->trips, 1, memory_order_relaxed);
    request->next = client->active;
    client->active = request;
    client->n_active++;
    return 0;
}

/* -- What an answer means -------------------------------------------------------------------- */

enum verdict { FINAL, AGAIN };

static bool may_pass(CURLcode code)
{
    switch (code) {
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_SEND_FAIL_REWIND:
    case CURLE_WEIRD_SERVER_REPLY:
        return true;
    default:
        return false;
    }
}

static enum verdict judge_status(struct s3_client *client, struct s3_request *request)
{
    static const struct {
        int status, error;
        enum verdict verdict;
    } table[] = {{404, -ENOENT, FINAL},    {412, -EEXIST, FINAL},  {401, -EACCES, FINAL},
                 {403, -EACCES, FINAL},    {501, -ENOTSUP, FINAL}, {413, -EFBIG, FINAL},
                 {408, -ETIMEDOUT, AGAIN}, {409, -EIO, AGAIN},     {429, -EBUSY, AGAIN}};

    if (strcmp(request->code, "RequestTimeTooSkewed") == 0 && !request->skewed &&
        request->server_s) {
        request->skewed = true; /* once: then it isn't the clock */
        client->skew_s = request->server_s - (int64_t)(kv_wall_ns() / KV_NS_PER_S);
        kv_log_warn("s3", "the clocks differ; using the server's", "offset_s=%" PRId64,
                    client->skew_s);
        request->error = -EACCES;
        request->due_ns = 0;
        return AGAIN;
    }
    for (size_t i = 0; i < KV_COUNT(table); i++)
        if (table[i].status == request->status) {
            request->error = table[i].error;
            return table[i].verdict;
        }
    request->error = -EIO;
    return request->status >= 500 || strcmp(request->code, "RequestTimeout") == 0 ? AGAIN : FINAL;
}

static enum verdict judge(struct s3_client *client, struct s3_request *request, CURLcode code)
{
    long status = 0;

    curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
    request->status = code == CURLE_OK ? (int)status : 0;
    if (code != CURLE_OK) {
        request->error = request->too_big                   ? -EFBIG
                         : request->no_memory               ? -ENOMEM
                         : code == CURLE_OUT_OF_MEMORY      ? -ENOMEM
                         : code == CURLE_OPERATION_TIMEDOUT ? -ETIMEDOUT
                                                            : -EIO;
        snprintf(request->code, sizeof(request->code), "%.60s", curl_easy_strerror(code));
        return may_pass(code) ? AGAIN : FINAL;
    }
    /* Copies and completed uploads answer 200 first and may fail in the body; objects never are
     * looked into. */
    if (status >= 300 || (request->slow && request->data_len))
        if (s3_read_error(request->data, request->data_len, request->code, sizeof(request->code)) &&
            status < 300) {
            request->error = -EIO;
            return AGAIN;
        }
    if (status >= 200 && status < 300) {
        request->error = 0;
        return FINAL;
    }
    return judge_status(client, request);
}

/* -- The thread ------------------------------------------------------------------------------ */

static void log_failure(const struct s3_request *request)
{
    static struct kv_log_rate rate;
    char path[200], code[80];

    if (request->error == 0 ||
        (request->error == -ENOENT && strcmp(request->code, "NoSuchBucket") != 0))
        return;
    if (request->error == -EEXIST || request->error == -ECANCELED || !kv_log_allowed(&rate, 10))
        return;
    kv_log_error("s3",
                 request->status / 100 == 3 ? "redirected: wrong region or endpoint"
                                            : "request failed",
                 "method=%s path=%s status=%d code=%s tries=%u", request->method,
                 kv_log_quote(path, sizeof(path), request->path), request->status,
                 kv_log_quote(code, sizeof(code), request->code), request->tries);
}

static void finish(struct s3_client *client, struct s3_request *request)
{
    s3_done_fn done = request->done;

    log_failure(request);
    if (request->error == 0 && !request->data) { /* empty is not missing */
        request->data = malloc(1);
        request->error = request->data ? 0 : -ENOMEM;
    }
    if (done) {
        done(request->arg, request);
        return;
    }
    pthread_mutex_lock(&client->lock);
    request->finished = true; /* the request is its owner's again from here */
    pthread_cond_broadcast(&client->finished);
    pthread_mutex_unlock(&client->lock);
}

static void queue(struct s3_client *client, struct s3_request *request)
{
    request->next = NULL;
    *client->waiting_end = request;
    client->waiting_end = &request->next;
}

/* A random pause up to a bound that doubles, so that many clients don't come back together. */
static uint64_t pause_ns(struct s3_client *client, unsigned tries)
{
    uint64_t bound = FIRST_PAUSE_MS << KV_MIN(tries - 1, 10u);

    client->random ^= client->random << 13;
    client->random ^= client->random >> 7;
    client->random ^= client->random << 17;
    bound = KV_MIN(bound, (uint64_t)MAX_PAUSE_MS) * KV_NS_PER_MS;
    return bound / 4 + client->random % (bound - bound / 4);
}

static void settle(struct s3_client *client, struct s3_request *request, CURLcode code)
{
    bool was_skewed = request->skewed;
    enum verdict verdict = judge(client, request, code);
    uint64_t now = kv_now_ns();

    end_try(client, request);
    if (verdict == AGAIN) {
        request->due_ns =
            now + (request->skewed != was_skewed ? 0 : pause_ns(client, request->tries));
        if (request->due_ns < request->deadline_ns) {
            kv_log_debug("s3", "trying again", "method=%s status=%d tries=%u", request->method,
                         request->status, request->tries);
            queue(client, request);
            return;
        }
    }
    finish(client, request);
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

/* Begin what is due while connections are free; returns how long to sleep at most, in ms. */
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
            at = &client->waiting; /* finish may have called back, and more be queued */
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
        curl_multi_poll(client->multi, NULL, 0, sleep_ms, NULL);
    }
    while (client->active || client->waiting) {
        fail_all(client);
        take_inbox(client);
    }
    return NULL;
}

/* -- For everybody else ---------------------------------------------------------------------- */

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
            request->sha256[0] = '\0'; /* the server will refuse it */
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
    forget_answer(request);
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
