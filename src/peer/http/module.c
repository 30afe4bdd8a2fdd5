// SPDX-License-Identifier: Apache-2.0
/* libkvbm_http: POST requests by libcurl, two at a time, driven by the caller's thread. */
#include <curl/curl.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "kv_types.h"
#include "plane/http_abi.h"

/* A request of this slot; easy is NULL between requests. */
struct slot {
    struct kvbm_http *http;
    CURL *easy;
    struct curl_slist *headers;
    char error[CURL_ERROR_SIZE];
    unsigned number;
};

struct kvbm_http {
    CURLM *multi;
    struct kvbm_http_opts opts;
    char *ca, *cert, *key;
    bool told; /* data or end was called since poll began */
    struct slot slots[KVBM_HTTP_SLOTS];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static CURLcode ready;

static void initialise(void)
{
    ready = curl_global_init(CURL_GLOBAL_ALL);
}

static size_t on_data(char *data, size_t size, size_t n, void *arg)
{
    struct slot *slot = arg;
    const struct kvbm_http_opts *opts = &slot->http->opts;

    slot->http->told = true;
    return opts->data(opts->arg, slot->number, data, size * n) ? size * n : 0;
}

static void http_cancel(struct kvbm_http *http, unsigned number)
{
    struct slot *slot = &http->slots[number];

    if (!slot->easy)
        return;
    curl_multi_remove_handle(http->multi, slot->easy);
    curl_easy_cleanup(slot->easy);
    curl_slist_free_all(slot->headers);
    slot->easy = NULL;
    slot->headers = NULL;
}

static void http_close(struct kvbm_http *http)
{
    if (!http)
        return;
    for (unsigned i = 0; i < KVBM_HTTP_SLOTS; i++)
        http_cancel(http, i);
    if (http->multi)
        curl_multi_cleanup(http->multi);
    free(http->ca);
    free(http->cert);
    free(http->key);
    free(http);
}

static int copy(const char *text, char **ret)
{
    *ret = text ? strdup(text) : NULL;
    return text && !*ret ? -ENOMEM : 0;
}

static int http_open(const struct kvbm_http_opts *opts, struct kvbm_http **ret)
{
    struct kvbm_http *http = calloc(1, sizeof(*http));

    pthread_once(&once, initialise);
    if (!http || ready != CURLE_OK)
        goto fail;
    http->opts = *opts;
    for (unsigned i = 0; i < KVBM_HTTP_SLOTS; i++) {
        http->slots[i].http = http;
        http->slots[i].number = i;
    }
    http->multi = curl_multi_init();
    if (!http->multi || copy(opts->ca, &http->ca) < 0 || copy(opts->cert, &http->cert) < 0 ||
        copy(opts->key, &http->key) < 0)
        goto fail;
    *ret = http;
    return 0;
fail:
    http_close(http);
    return -ENOMEM;
}

/* Headers: JSON, no "Expect", and whose request it is. */
static int add_headers(struct slot *slot, const char *authorization)
{
    static const char *const fixed[] = {"content-type: application/json", "expect:"};
    struct curl_slist *more;
    char line[4096];

    for (size_t i = 0; i < KV_COUNT(fixed); i++) {
        more = curl_slist_append(slot->headers, fixed[i]);
        if (!more)
            return -ENOMEM;
        slot->headers = more;
    }
    if (!authorization)
        return 0;
    snprintf(line, sizeof(line), "authorization: %s", authorization);
    more = curl_slist_append(slot->headers, line);
    if (!more)
        return -ENOMEM;
    slot->headers = more;
    return 0;
}

static void set_options(struct slot *slot, const struct kvbm_http_post *post)
{
    const struct kvbm_http *http = slot->http;
    CURL *easy = slot->easy;

    curl_easy_setopt(easy, CURLOPT_URL, post->url);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, slot);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, slot->error);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROXY, ""); /* ignore the environment's */
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "kvasir");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPIDLE, 10L);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPINTVL, 5L);
#if LIBCURL_VERSION_NUM >= 0x075700
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L); /* don't wait for a slow name server */
#endif
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, slot->headers);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE, (long)post->len);
    curl_easy_setopt(easy, CURLOPT_COPYPOSTFIELDS, post->body);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)post->connect_ms);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)post->timeout_ms);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, slot);
    if (http->ca)
        curl_easy_setopt(easy, CURLOPT_CAINFO, http->ca);
    if (http->cert)
        curl_easy_setopt(easy, CURLOPT_SSLCERT, http->cert);
    if (http->cert)
        curl_easy_setopt(easy, CURLOPT_SSLKEY, http->key ? http->key : http->cert);
}

static int http_post(struct kvbm_http *http, unsigned number, const struct kvbm_http_post *post)
{
    struct slot *slot = &http->slots[number];

    http_cancel(http, number);
    slot->error[0] = '\0';
    slot->easy = curl_easy_init();
    if (!slot->easy)
        return -ENOMEM;
    if (add_headers(slot, post->authorization) < 0)
        goto fail;
    set_options(slot, post);
    if (curl_multi_add_handle(http->multi, slot->easy) == CURLM_OK)
        return 0;
    curl_easy_cleanup(slot->easy);
    slot->easy = NULL;
fail:
    http_cancel(http, number);
    curl_slist_free_all(slot->headers);
    slot->headers = NULL;
    return -ENOMEM;
}

static void collect(struct kvbm_http *http)
{
    CURLMsg *msg;
    int left;

    while ((msg = curl_multi_info_read(http->multi, &left)) != NULL) {
        struct slot *slot = NULL;
        char why[CURL_ERROR_SIZE];
        CURLcode code = msg->data.result;
        long status = 0;

        if (msg->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(msg->easy_handle, CURLINFO_PRIVATE, (char **)&slot);
        curl_easy_getinfo(msg->easy_handle, CURLINFO_RESPONSE_CODE, &status);
        snprintf(why, sizeof(why), "%s", *slot->error ? slot->error : curl_easy_strerror(code));
        http_cancel(http, slot->number);
        http->told = true;
        http->opts.end(http->opts.arg, slot->number, code == CURLE_OK ? (unsigned)status : 0, why);
    }
}

static void http_poll(struct kvbm_http *http, int fd, uint32_t timeout_ms)
{
    struct curl_waitfd extra = {.fd = fd, .events = CURL_WAIT_POLLIN};
    int running;

    http->told = false;
    (void)curl_multi_perform(http->multi, &running);
    collect(http);
    if (http->told) /* the caller may not want to wait any more */
        return;
    (void)curl_multi_poll(http->multi, &extra, fd >= 0, (int)timeout_ms, NULL);
    (void)curl_multi_perform(http->multi, &running);
    collect(http);
}

KV_API const struct kv_module_head *kvbm_http_get_abi(void);

const struct kv_module_head *kvbm_http_get_abi(void)
{
    static const struct kvbm_http_abi abi = {.head = {sizeof(abi), KVBM_HTTP_ABI},
                                             .open = http_open,
                                             .close = http_close,
                                             .post = http_post,
                                             .cancel = http_cancel,
                                             .poll = http_poll};

    return &abi.head;
}
