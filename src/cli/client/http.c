// SPDX-License-Identifier: Apache-2.0
#include "cli/client/http.h"

#include <curl/curl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ANSWER ((size_t)256 << 20)

struct kc_http {
    CURL *curl;
    struct curl_slist *none, *json, *msgpack; /* headers by kind of body */
    struct kv_buf body;
    bool has_token;
    CURLcode code; /* of the last request */
    int64_t date;  /* of the last answer, in seconds since the epoch; -1: none */
    char url[512];
    char shown[512]; /* without user and password */
    char error[CURL_ERROR_SIZE];
};

static size_t on_data(char *data, size_t size, size_t n, void *arg)
{
    struct kc_http *http = arg;

    kv_buf_append(&http->body, data, size * n);
    return http->body.error ? 0 : size * n;
}

/* Note the Date of an answer. @data is one header line, without a NUL. */
static size_t on_header(char *data, size_t size, size_t n, void *arg)
{
    struct kc_http *http = arg;
    char date[64];
    size_t len = size * n;

    if (len > 5 && len - 5 < sizeof(date) && curl_strnequal(data, "Date:", 5)) {
        memcpy(date, data + 5, len - 5);
        date[len - 5] = '\0';
        http->date = curl_getdate(date, NULL);
    }
    return len;
}

/*
 * Build the headers. "Expect:" is empty: libcurl would otherwise ask before it sends a body above a
 * megabyte.
 */
static struct curl_slist *headers(const char *authorization, const char *content_type)
{
    const char *const lines[] = {"Expect:", authorization, content_type};
    struct curl_slist *list = NULL, *longer;

    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        if (!lines[i])
            continue;
        longer = curl_slist_append(list, lines[i]);
        if (!longer) {
            curl_slist_free_all(list);
            return NULL;
        }
        list = longer;
    }
    return list;
}

static bool set_headers(struct kc_http *http, const char *token)
{
    char line[512] = "Authorization: Bearer ";

    if (token)
        strncat(line, token, sizeof(line) - strlen(line) - 1);
    http->has_token = token;
    http->none = headers(token ? line : NULL, NULL);
    http->json = headers(token ? line : NULL, "Content-Type: application/json");
    http->msgpack = headers(token ? line : NULL, "Content-Type: application/msgpack");
    explicit_bzero(line, sizeof(line));
    return http->none && http->json && http->msgpack;
}

/* Copy the URL without user and password, which reports and messages don't tell. */
static void copy_shown(const char *url, char *ret)
{
    const char *host = strstr(url, "://"), *at;

    host = host ? host + 3 : url;
    at = memrchr(host, '@', strcspn(host, "/?#"));
    memcpy(ret, url, (size_t)(host - url));
    strcpy(ret + (host - url), at ? at + 1 : host);
}

int kc_http_create(const char *url, const char *token, struct kc_http **ret)
{
    struct kc_http *http = calloc(1, sizeof(*http));
    size_t len = strlen(url);

    if (!http)
        return -ENOMEM;
    while (len > 0 && url[len - 1] == '/')
        len--;
    if (len == 0 || len + 128 > sizeof(http->url)) {
        free(http);
        return -EINVAL;
    }
    memcpy(http->url, url, len);
    copy_shown(http->url, http->shown);
    http->body.limit = MAX_ANSWER;
    http->curl = curl_easy_init();
    if (!http->curl || !set_headers(http, token)) {
        kc_http_destroy(http);
        return -ENOMEM;
    }
    curl_easy_setopt(http->curl, CURLOPT_ERRORBUFFER, http->error);
    curl_easy_setopt(http->curl, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(http->curl, CURLOPT_WRITEDATA, http);
    curl_easy_setopt(http->curl, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(http->curl, CURLOPT_HEADERDATA, http);
    curl_easy_setopt(http->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(http->curl, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    kc_http_set_timeout(http, KC_HTTP_TIMEOUT_MS);
#if LIBCURL_VERSION_NUM >= 0x075700
    curl_easy_setopt(http->curl, CURLOPT_QUICK_EXIT, 1L); /* do not wait for a silent name server */
#endif
    curl_easy_setopt(http->curl, CURLOPT_NOPROXY, "*"); /* never use the environment's proxy */
    curl_easy_setopt(http->curl, CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
    *ret = http;
    return 0;
}

void kc_http_destroy(struct kc_http *http)
{
    if (!http)
        return;
    curl_easy_cleanup(http->curl);
    curl_slist_free_all(http->none);
    curl_slist_free_all(http->json);
    curl_slist_free_all(http->msgpack);
    kv_buf_fini(&http->body);
    free(http);
}

void kc_http_set_timeout(struct kc_http *http, uint64_t timeout_ms)
{
    curl_easy_setopt(http->curl, CURLOPT_TIMEOUT_MS, (long)KV_MAX(timeout_ms, 1u));
}

void kc_http_set_cacert(struct kc_http *http, const char *file)
{
    curl_easy_setopt(http->curl, CURLOPT_CAINFO, file);
}

const char *kc_http_url(const struct kc_http *http)
{
    return http->shown;
}

enum kc_http_trouble kc_http_trouble(const struct kc_http *http)
{
    switch (http->code) {
    case CURLE_OK:
        return KC_HTTP_FINE;
    case CURLE_COULDNT_RESOLVE_HOST:
        return KC_HTTP_NAME;
    case CURLE_COULDNT_CONNECT:
        return KC_HTTP_REFUSED;
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_PARTIAL_FILE:
        return KC_HTTP_HUNG_UP;
    case CURLE_OPERATION_TIMEDOUT:
        return KC_HTTP_SILENT;
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        return KC_HTTP_TLS;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY:
        return KC_HTTP_NO_HTTP;
    default:
        return KC_HTTP_FAILED;
    }
}

int64_t kc_http_date(const struct kc_http *http)
{
    return http->date;
}

const char *kc_http_advice(const struct kc_http *http, int status)
{
    if (status != 401)
        return "";
    return http->has_token ? "; it doesn't know the token of --auth-token-file"
                           : "; give the token with --auth-token-file";
}

static int explain(struct kc_http *http, CURLcode code, struct kv_error *error)
{
    const char *why = http->error[0] ? http->error : curl_easy_strerror(code);

    switch (code) {
    case CURLE_COULDNT_CONNECT:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_PARTIAL_FILE:
        return kv_fail(error, -ECONNREFUSED, 0, "%.80s: %.100s", http->shown, why);
    case CURLE_OPERATION_TIMEDOUT:
        return kv_fail(error, -ETIMEDOUT, 0, "%.80s: %.100s", http->shown, why);
    case CURLE_OUT_OF_MEMORY:
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    case CURLE_WRITE_ERROR:
        return kv_fail(error, http->body.error ? http->body.error : -EIO, 0,
                       "%.80s: the answer is too long", http->shown);
    default:
        return kv_fail(error, -EIO, 0, "%.80s: %.100s", http->shown, why);
    }
}

int kc_http_request(struct kc_http *http, const char *path, enum kc_body type, const void *body,
                    size_t len, const struct kv_buf **ret_body, struct kv_error *error)
{
    char url[sizeof(http->url) + 64];
    long status = 0;
    CURLcode code;

    if (strlen(path) >= 64)
        return kv_fail(error, -EINVAL, 0, "path too long");
    strcpy(stpcpy(url, http->url), path);
    curl_easy_setopt(http->curl, CURLOPT_URL, url);
    if (type == KC_BODY_NONE) {
        curl_easy_setopt(http->curl, CURLOPT_HTTPGET, 1L);
        curl_easy_setopt(http->curl, CURLOPT_HTTPHEADER, http->none);
    } else {
        curl_easy_setopt(http->curl, CURLOPT_POST, 1L);
        curl_easy_setopt(http->curl, CURLOPT_HTTPHEADER,
                         type == KC_BODY_JSON ? http->json : http->msgpack);
        curl_easy_setopt(http->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)len);
        curl_easy_setopt(http->curl, CURLOPT_POSTFIELDS, body);
    }
    kv_buf_clear(&http->body);
    http->error[0] = '\0';
    http->date = -1;
    http->code = code = curl_easy_perform(http->curl);
    if (code != CURLE_OK)
        return explain(http, code, error);
    curl_easy_getinfo(http->curl, CURLINFO_RESPONSE_CODE, &status);
    *ret_body = &http->body;
    return (int)status;
}
