// SPDX-License-Identifier: Apache-2.0
#include "s3/exchange.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/core/clock.h"
#include "s3/xml.h"

#define MAX_ERROR_BODY 65536
#define MAX_SIGNED 9                   /* headers */
#define MUCH_SKEW_S 300                /* seconds; servers accept 900 */
#define MAX_TRUSTED_LENGTH (64u << 20) /* bodies above this are allocated as they arrive */

/* -- What curl calls ------------------------------------------------------------------------- */

static uint64_t max_body(const struct s3_request *request)
{
    return request->max_body ? request->max_body : S3_MAX_ANSWER;
}

/* Put bytes of the body where they belong. There is room: max_body is that of the parts. */
static void scatter(struct s3_request *request, const char *data, size_t len)
{
    while (len > 0 && request->part < request->n_parts) {
        const struct iovec *part = &request->parts[request->part];
        size_t n = KV_MIN(len, part->iov_len - request->part_at);

        if (n)
            memcpy((char *)part->iov_base + request->part_at, data, n);
        data += n;
        len -= n;
        request->part_at += n;
        if (request->part_at == part->iov_len) {
            request->part++;
            request->part_at = 0;
        }
    }
}

static size_t on_body(char *data, size_t size, size_t n, void *arg)
{
    struct s3_request *request = arg;
    size_t len = size * n, want = request->data_len + len;
    long status = 0;

    curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status >= 300 ? want > MAX_ERROR_BODY : want > max_body(request)) {
        request->cut = status >= 300; /* the error's code has been read */
        request->too_big = !request->cut;
        return 0;
    }
    if (request->parts && status == 206) {
        scatter(request, data, len);
        request->data_len = want;
        return len;
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

/* curl sends again by itself when a kept connection turns out to be dead */
static int on_seek(void *arg, curl_off_t offset, int origin)
{
    struct s3_request *request = arg;

    if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > request->len)
        return CURL_SEEKFUNC_FAIL;
    request->sent = (size_t)offset;
    return CURL_SEEKFUNC_OK;
}

void s3_exchange_forget(struct s3_request *request)
{
    request->status = 0;
    if (request->error != -ETIMEDOUT && request->code[0])
        memcpy(request->before, request->code, sizeof(request->before));
    request->code[0] = request->etag[0] = request->got_sum[0] = request->region[0] = '\0';
    request->modified_s = request->server_s = request->retry_at_s = 0;
    request->pause_ns = 0;
    request->length = request->got_at = UINT64_MAX;
    request->got_end = 0;
    request->data_len = request->part = request->part_at = 0;
    request->too_big = request->cut = request->no_memory = request->refused = false;
}

/* Parse Retry-After: seconds, or a date by the server's clock, whose own header may come later. */
static void read_retry_after(struct s3_request *request, const char *value)
{
    char *end;
    unsigned long seconds = strtoul(value, &end, 10);

    if (*value >= '0' && *value <= '9' && !*end)
        request->pause_ns = KV_MIN(seconds, 86400UL) * KV_NS_PER_S;
    else
        request->retry_at_s = KV_MAX((int64_t)curl_getdate(value, NULL), 0);
}

/* Parse Content-Range: "bytes FIRST-LAST/TOTAL", with digits or "*" as the total. */
static void read_content_range(struct s3_request *request, const char *value)
{
    uint64_t first, last;
    char *end;

    if (kv_ncasecmp(value, "bytes ", 6) != 0 || value[6] < '0' || value[6] > '9')
        return;
    first = strtoull(value + 6, &end, 10);
    if (*end != '-' || end[1] < '0' || end[1] > '9')
        return;
    last = strtoull(end + 1, &end, 10);
    if (*end != '/' || last < first || last == UINT64_MAX)
        return;
    request->got_at = first;
    request->got_end = last;
}

static size_t on_header(char *data, size_t size, size_t n, void *arg)
{
    struct s3_request *request = arg;
    char line[256], *value;
    size_t len = size * n, keep = KV_MIN(len, sizeof(line) - 1);

    memcpy(line, data, keep);
    line[keep] = '\0';
    if (strncmp(line, "HTTP/", 5) == 0) { /* the final status follows a 100 */
        s3_exchange_forget(request);
        return len;
    }
    line[strcspn(line, "\r\n")] = '\0';
    value = strchr(line, ':');
    if (!value)
        return len;
    *value++ = '\0';
    value += strspn(value, " \t");
    if (kv_casecmp(line, "etag") == 0)
        snprintf(request->etag, sizeof(request->etag), "%.95s", value);
    else if (kv_casecmp(line, S3_SUM_HEADER) == 0)
        snprintf(request->got_sum, sizeof(request->got_sum), "%.63s", value);
    else if (kv_casecmp(line, "x-amz-bucket-region") == 0)
        snprintf(request->region, sizeof(request->region), "%.63s", value);
    else if (kv_casecmp(line, "last-modified") == 0)
        request->modified_s = KV_MAX((int64_t)curl_getdate(value, NULL), 0);
    else if (kv_casecmp(line, "date") == 0)
        request->server_s = KV_MAX((int64_t)curl_getdate(value, NULL), 0);
    else if (kv_casecmp(line, "content-length") == 0 && *value >= '0' && *value <= '9')
        request->length = strtoull(value, NULL, 10);
    else if (kv_casecmp(line, "content-range") == 0)
        read_content_range(request, value);
    else if (kv_casecmp(line, "retry-after") == 0)
        read_retry_after(request, value);
    return len;
}

/* -- The request ------------------------------------------------------------------------------- */

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

/* Ask for a part of the object. The header needn't be signed. */
static int add_range(struct curl_slist **list, const struct s3_request *request)
{
    char text[64];

    snprintf(text, sizeof(text), "bytes=%" PRIu64 "-%" PRIu64, request->range_at,
             request->range_at + request->range_len - 1);
    return add_header(list, "range", text);
}

/* List the headers that are signed, sorted by name as the signature lists them. */
static size_t list_signed(const struct s3_config *config, const struct s3_request *request,
                          const char *stamp, struct s3_header headers[MAX_SIGNED])
{
    size_t n = 0;

    headers[n++] = (struct s3_header){"host", config->host};
    if (request->if_match[0])
        headers[n++] = (struct s3_header){"if-match", request->if_match};
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
    return n;
}

/* Make the headers and the signature. */
static int make_headers(const struct s3_config *config, int64_t skew_s, struct s3_request *request,
                        struct curl_slist **list)
{
    struct kv_buf authorization = KV_BUF_INIT;
    struct s3_header headers[MAX_SIGNED];
    char stamp[S3_STAMP];
    size_t n;
    int error;

    request->signed_s = (int64_t)(kv_wall_ns() / KV_NS_PER_S) + skew_s;
    s3_stamp((time_t)request->signed_s, stamp);
    n = list_signed(config, request, stamp, headers);
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
    if (!error && request->range_len)
        error = add_range(list, request);
    if (!error)
        /* without it, servers that ignore Expect cost a second's wait */
        error = add_header(list, "expect", "");
    kv_buf_fini(&authorization);
    return error;
}

static void set_options(const struct s3_config *config, struct s3_request *request)
{
    CURL *easy = request->easy;
    bool sends = strcmp(request->method, "PUT") == 0 || strcmp(request->method, "POST") == 0;
    long stall_s = (long)(config->stall_ms / 1000);

    curl_easy_setopt(easy, CURLOPT_PRIVATE, request);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "kvasir");
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 256L << 10);
    curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)config->stall_ms);
#if LIBCURL_VERSION_NUM >= 0x075700
    /* a slow name server blocks its own thread only */
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
#endif
    if (!request->root) {
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1024L);
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, KV_MAX(stall_s, 1L));
    }
    if (config->cacert)
        curl_easy_setopt(easy, CURLOPT_CAINFO, config->cacert);
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

int s3_exchange_begin(const struct s3_config *config, int64_t skew_s, struct s3_request *request)
{
    struct curl_slist *headers = NULL;
    struct kv_buf url = KV_BUF_INIT;
    int error;

    s3_exchange_forget(request);
    request->sent = 0;
    request->easy = curl_easy_init();
    error = make_headers(config, skew_s, request, &headers);
    request->headers = headers;
    kv_buf_printf(&url, "%s%s%s%s", config->endpoint, request->path, request->query ? "?" : "",
                  request->query ? request->query : "");
    if (!request->easy || url.error)
        error = -ENOMEM;
    if (!error) {
        set_options(config, request);
        error = curl_easy_setopt(request->easy, CURLOPT_URL, kv_buf_cstr(&url)) ? -ENOMEM : 0;
    }
    kv_buf_fini(&url);
    if (error)
        s3_exchange_end(request);
    return error;
}

void s3_exchange_end(struct s3_request *request)
{
    curl_easy_cleanup(request->easy);
    curl_slist_free_all(request->headers);
    request->easy = request->headers = NULL;
}

/* -- What an answer means -------------------------------------------------------------------- */

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

/* True when a refusal is due to our clock. The answer to a HEAD has no reason: compare its date. */
static bool blames_clock(const struct s3_request *request)
{
    if (!request->server_s)
        return false;
    if (strcmp(request->code, "RequestTimeTooSkewed") == 0)
        return true;
    return request->status == 403 && strcmp(request->method, "HEAD") == 0 &&
           llabs(request->server_s - request->signed_s) > MUCH_SKEW_S;
}

bool s3_keys_expired(const struct s3_request *request)
{
    return strcmp(request->code, "ExpiredToken") == 0 ||
           strcmp(request->code, "ExpiredTokenException") == 0 ||
           strcmp(request->code, "TokenRefreshRequired") == 0;
}

static enum s3_verdict judge_status(struct s3_request *request)
{
    static const struct {
        int status, error;
        enum s3_verdict verdict;
    } table[] = {{404, -ENOENT, S3_FINAL},    {401, -EACCES, S3_FINAL}, {403, -EACCES, S3_FINAL},
                 {501, -ENOTSUP, S3_FINAL},   {413, -EFBIG, S3_FINAL},  {416, -ERANGE, S3_FINAL},
                 {408, -ETIMEDOUT, S3_AGAIN}, {409, -EIO, S3_AGAIN},    {429, -EBUSY, S3_AGAIN}};

    /* Only a condition of ours can have failed: any other 412 is a failure like others. */
    if (request->status == 412 && (request->if_none_match || request->if_match[0])) {
        request->error = -EEXIST;
        return S3_FINAL;
    }
    /* only once: after that the clock isn't the cause */
    if (blames_clock(request) && !request->skewed) {
        request->error = -EACCES;
        return S3_SKEWED;
    }
    if (request->status == 501 && request->if_none_match) {
        request->error = -ENOTSUP;
        return S3_PLAIN;
    }
    for (size_t i = 0; i < KV_COUNT(table); i++)
        if (table[i].status == request->status) {
            request->error = table[i].error;
            return table[i].verdict;
        }
    request->error = s3_keys_expired(request) ? -EACCES : -EIO;
    return request->status >= 500 || strcmp(request->code, "RequestTimeout") == 0 ? S3_AGAIN
                                                                                  : S3_FINAL;
}

/* Judge an answer's body. Don't look into objects. Any element other than the one of success is a
 * failure. */
static enum s3_verdict judge_body(struct s3_request *request)
{
    request->error = 0;
    if (!request->root || s3_check_root(request->data, request->data_len, request->root) == 0)
        return S3_FINAL;
    if (!s3_read_error(request->data, request->data_len, request->code, sizeof(request->code)))
        snprintf(request->code, sizeof(request->code), "no %s", request->root);
    request->error = -EIO;
    return S3_AGAIN;
}

enum s3_verdict s3_exchange_judge(struct s3_request *request, int curl_code)
{
    CURLcode code = (CURLcode)curl_code;
    long status = 0;

    curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &status);
    if (request->cut && status >= 300)
        code = CURLE_OK;
    request->status = code == CURLE_OK ? (int)status : 0;
    if (request->retry_at_s > request->server_s && request->server_s)
        request->pause_ns =
            (uint64_t)KV_MIN(request->retry_at_s - request->server_s, INT64_C(86400)) * KV_NS_PER_S;
    if (code != CURLE_OK) {
        long system = 0;

        curl_easy_getinfo(request->easy, CURLINFO_OS_ERRNO, &system);
        request->refused = code == CURLE_COULDNT_CONNECT && system == ECONNREFUSED;
        request->error = request->too_big                   ? -EFBIG
                         : request->no_memory               ? -ENOMEM
                         : code == CURLE_OUT_OF_MEMORY      ? -ENOMEM
                         : code == CURLE_OPERATION_TIMEDOUT ? -ETIMEDOUT
                         : request->refused                 ? -ECONNREFUSED
                                                            : -EIO;
        snprintf(request->code, sizeof(request->code), "%.60s", curl_easy_strerror(code));
        return may_pass(code) ? S3_AGAIN : S3_FINAL;
    }
    if (status >= 200 && status < 300)
        return judge_body(request);
    s3_read_error(request->data, request->data_len, request->code, sizeof(request->code));
    if (!request->region[0])
        s3_read_element(request->data, request->data_len, "Region", request->region,
                        sizeof(request->region));
    return judge_status(request);
}
