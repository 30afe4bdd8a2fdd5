// SPDX-License-Identifier: Apache-2.0
/* A whole conversation of the S3 plugin with a malicious server, whose answers are the input. The
 * functions of libcurl that drive connections are replaced by ones that read answers. */
#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <strings.h>

#include "talk.h"

#undef curl_easy_setopt
#undef curl_easy_getinfo
#undef curl_multi_setopt

/* A request, known to the plugin as CURL. */
struct easy {
    struct easy *next;
    void *private_data, *head_arg, *body_arg, *read_arg;
    curl_write_callback on_head, on_body;
    curl_read_callback on_read;
    bool nobody, upload;
    long status;
    CURLcode result;
};

/* CURLM. */
struct multi {
    struct easy *running, *done;
    CURLMsg message;
    pthread_mutex_t lock;
    pthread_cond_t woken;
    bool wake;
};

CURL *curl_easy_init(void)
{
    return calloc(1, sizeof(struct easy));
}

void curl_easy_cleanup(CURL *easy)
{
    free(easy);
}

CURLcode curl_easy_setopt(CURL *curl, CURLoption option, ...)
{
    struct easy *easy = curl;
    va_list args;

    va_start(args, option);
    switch (option) {
    case CURLOPT_PRIVATE:
        easy->private_data = va_arg(args, void *);
        break;
    case CURLOPT_HEADERFUNCTION:
        easy->on_head = va_arg(args, curl_write_callback);
        break;
    case CURLOPT_HEADERDATA:
        easy->head_arg = va_arg(args, void *);
        break;
    case CURLOPT_WRITEFUNCTION:
        easy->on_body = va_arg(args, curl_write_callback);
        break;
    case CURLOPT_WRITEDATA:
        easy->body_arg = va_arg(args, void *);
        break;
    case CURLOPT_READFUNCTION:
        easy->on_read = va_arg(args, curl_read_callback);
        break;
    case CURLOPT_READDATA:
        easy->read_arg = va_arg(args, void *);
        break;
    case CURLOPT_NOBODY:
        easy->nobody = va_arg(args, long);
        break;
    case CURLOPT_UPLOAD:
        easy->upload = va_arg(args, long);
        break;
    default:
        break;
    }
    va_end(args);
    return CURLE_OK;
}

CURLcode curl_easy_getinfo(CURL *curl, CURLINFO info, ...)
{
    struct easy *easy = curl;
    va_list args;

    va_start(args, info);
    if (info == CURLINFO_PRIVATE)
        *va_arg(args, char **) = easy->private_data;
    else
        *va_arg(args, long *) = info == CURLINFO_RESPONSE_CODE ? easy->status : 0;
    va_end(args);
    return CURLE_OK;
}

/* Hand out the lines of a head. Returns the bytes read, 0: it is none. @ret_len: Content-Length. */
static size_t read_head(struct easy *easy, const char *text, size_t len, size_t *ret_len)
{
    size_t at = 0;
    char line[256];

    *ret_len = SIZE_MAX;
    if (len < 13 || memcmp(text, "HTTP/1.", 7) != 0)
        return 0;
    easy->status = strtol((snprintf(line, sizeof(line), "%.3s", text + 9), line), NULL, 10);
    while (at < len) {
        const char *end = memchr(text + at, '\n', len - at);
        size_t n = end ? (size_t)(end - (text + at)) + 1 : len - at;

        snprintf(line, sizeof(line), "%.*s", (int)KV_MIN(n, sizeof(line) - 1), text + at);
        if (strncasecmp(line, "content-length:", 15) == 0)
            *ret_len = strtoul(line + 15, NULL, 10);
        if (easy->on_head && easy->on_head((char *)text + at, 1, n, easy->head_arg) != n)
            return 0;
        at += n;
        if (end && (n == 1 || (n == 2 && line[0] == '\r')))
            return at;
    }
    return 0;
}

static CURLcode exchange(struct easy *easy)
{
    char sent[65536];
    const uint8_t *answer;
    size_t len, at = 0, head, want;

    while (easy->upload && easy->on_read(sent, 1, sizeof(sent), easy->read_arg) > 0)
        ;
    talk_next(&answer, &len);
    do {
        head = read_head(easy, (const char *)answer + at, len - at, &want);
        if (head == 0)
            return at || len ? CURLE_WEIRD_SERVER_REPLY : CURLE_GOT_NOTHING;
        at += head;
    } while (easy->status / 100 == 1);
    len = easy->nobody ? 0 : KV_MIN(len - at, want);
    for (size_t piece = len / 2; len; piece = len) { /* in two pieces */
        piece = piece ? piece : len;
        if (easy->on_body((char *)answer + at, 1, piece, easy->body_arg) != piece)
            return CURLE_WRITE_ERROR;
        at += piece;
        len -= piece;
        want -= want == SIZE_MAX ? 0 : piece;
    }
    return !easy->nobody && want != SIZE_MAX && want > 0 ? CURLE_PARTIAL_FILE : CURLE_OK;
}

/* -- many at once ------------------------------------------------------------------------------ */

CURLM *curl_multi_init(void)
{
    struct multi *multi = calloc(1, sizeof(*multi));

    if (multi) {
        pthread_mutex_init(&multi->lock, NULL);
        pthread_cond_init(&multi->woken, NULL);
    }
    return multi;
}

CURLMcode curl_multi_cleanup(CURLM *curl)
{
    struct multi *multi = curl;

    REQUIRE(!multi->running && !multi->done);
    pthread_mutex_destroy(&multi->lock);
    pthread_cond_destroy(&multi->woken);
    free(multi);
    return CURLM_OK;
}

CURLMcode curl_multi_setopt(CURLM *curl, CURLMoption option, ...)
{
    (void)curl, (void)option;
    return CURLM_OK;
}

CURLMcode curl_multi_add_handle(CURLM *curl, CURL *easy)
{
    struct multi *multi = curl;

    ((struct easy *)easy)->next = multi->running;
    multi->running = easy;
    return CURLM_OK;
}

static bool unlink_easy(struct easy **at, struct easy *easy)
{
    for (; *at; at = &(*at)->next)
        if (*at == easy) {
            *at = easy->next;
            return true;
        }
    return false;
}

CURLMcode curl_multi_remove_handle(CURLM *curl, CURL *easy)
{
    struct multi *multi = curl;

    if (!unlink_easy(&multi->running, easy))
        unlink_easy(&multi->done, easy);
    return CURLM_OK;
}

CURLMcode curl_multi_perform(CURLM *curl, int *running)
{
    struct multi *multi = curl;
    struct easy *easy;

    while ((easy = multi->running)) {
        multi->running = easy->next;
        easy->result = exchange(easy);
        easy->next = multi->done;
        multi->done = easy;
    }
    *running = 0;
    return CURLM_OK;
}

CURLMsg *curl_multi_info_read(CURLM *curl, int *left)
{
    struct multi *multi = curl;
    struct easy *easy = multi->done;

    *left = 0;
    if (!easy)
        return NULL;
    multi->done = easy->next;
    multi->message = (CURLMsg){.msg = CURLMSG_DONE, .easy_handle = easy};
    multi->message.data.result = easy->result;
    return &multi->message;
}

/* Wait for another thread, or let the time pass until a request is tried again. */
CURLMcode curl_multi_poll(CURLM *curl, struct curl_waitfd *fds, unsigned n, int timeout_ms,
                          int *ret)
{
    struct multi *multi = curl;
    struct timespec until;

    (void)fds, (void)n, (void)ret;
    __real_clock_gettime(CLOCK_REALTIME, &until);
    until = kv_timespec(kv_timespec_ns(&until) + 2 * KV_NS_PER_MS);
    pthread_mutex_lock(&multi->lock);
    if (!multi->wake && timeout_ms > 0 &&
        (timeout_ms < 1000 ||
         pthread_cond_timedwait(&multi->woken, &multi->lock, &until) == ETIMEDOUT))
        atomic_fetch_add(&talk_skipped_ns, (uint64_t)timeout_ms * KV_NS_PER_MS);
    multi->wake = false;
    pthread_mutex_unlock(&multi->lock);
    return CURLM_OK;
}

CURLMcode curl_multi_wakeup(CURLM *curl)
{
    struct multi *multi = curl;

    pthread_mutex_lock(&multi->lock);
    multi->wake = true;
    pthread_cond_signal(&multi->woken);
    pthread_mutex_unlock(&multi->lock);
    return CURLM_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
    talk(data, size, "s3://b/p?endpoint=http://127.0.0.1:1&timeout=1",
         "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    return 0;
}
