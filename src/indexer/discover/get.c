// SPDX-License-Identifier: Apache-2.0
#include "indexer/discover/get.h"

#include <curl/curl.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"

#define MAX_TOKEN 16384
#define MAX_REFUSAL 4096 /* bytes kept of the body of a refusal */
#define REFUSAL_MS 10000 /* longest wait for its end */
#define MAX_HEADERS ((size_t)1 << 20)

struct transfer {
    const struct ki_get *get;
    CURL *easy;
    struct kv_buf *refusal;
    uint64_t began_ns, heard_ns, refused_ns; /* refused_ns: 0 unless it is a refusal */
    size_t n_headers;                        /* bytes of headers */
    bool begun, ended;                       /* ended: data returned false */
};

static size_t receive(char *data, size_t size, size_t n, void *arg)
{
    struct transfer *t = arg;
    size_t len = size * n;
    long status = 0;

    t->heard_ns = kv_now_ns();
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200) {
        t->refused_ns = t->refused_ns ? t->refused_ns : t->heard_ns;
        kv_buf_append(t->refusal, data, KV_MIN(len, MAX_REFUSAL - t->refusal->len));
        return t->refusal->len < MAX_REFUSAL ? len : 0;
    }
    if (!t->get->data(t->get->arg, data, len)) {
        t->ended = true;
        return 0;
    }
    return len;
}

/* Note the end of the headers of a 200: a watch that has nothing to tell yet has no body. */
static size_t receive_header(char *line, size_t size, size_t n, void *arg)
{
    struct transfer *t = arg;
    long status = 0;

    t->heard_ns = kv_now_ns();
    t->n_headers += size * n;
    if (t->n_headers > MAX_HEADERS)
        return 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status == 200 && !t->begun && size * n <= 2 && *line == '\r') {
        t->begun = true;
        if (t->get->begins)
            t->get->begins(t->get->arg);
    }
    return size * n;
}

static bool set_options(struct transfer *t, struct curl_slist *headers, char *text)
{
    const struct ki_get *get = t->get;
    CURL *e = t->easy;
    bool ok = true;

    ok &= curl_easy_setopt(e, CURLOPT_URL, get->url) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, receive) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEDATA, t) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, receive_header) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HEADERDATA, t) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_ERRORBUFFER, text) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)get->connect_ms) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_TCP_KEEPALIVE, 1L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_TCP_KEEPIDLE, 10L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_TCP_KEEPINTVL, 5L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_USERAGENT, "kvasir") == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_PROXY, "") == CURLE_OK; /* ignore the environment's */
#if LIBCURL_VERSION_NUM >= 0x075500
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
#else
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS, CURLPROTO_HTTP | CURLPROTO_HTTPS) == CURLE_OK;
#endif
#if LIBCURL_VERSION_NUM >= 0x075700
    ok &= curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L) == CURLE_OK;
#endif
    if (get->ca_file)
        ok &= curl_easy_setopt(e, CURLOPT_CAINFO, get->ca_file) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HTTPHEADER, headers) == CURLE_OK;
    return ok;
}

/* Make the headers, with the token. Returns NULL without memory. */
static struct curl_slist *make_headers(const struct ki_get *get)
{
    char line[MAX_TOKEN + 32];
    struct curl_slist *list = curl_slist_append(NULL, "accept: application/json"), *more;

    if (!list || !get->token)
        return list;
    snprintf(line, sizeof(line), "authorization: Bearer %s", get->token);
    more = curl_slist_append(list, line);
    explicit_bzero(line, sizeof(line));
    if (!more)
        curl_slist_free_all(list);
    return more;
}

/* Return what the transfer has come to, or 1 while it goes on. */
static int collect(struct transfer *t, CURLM *multi, const char *text, struct kv_error *error)
{
    CURLMsg *message;
    int left;

    while ((message = curl_multi_info_read(multi, &left))) {
        CURLcode code = message->data.result;
        long status = 0;

        if (message->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
        if (t->ended)
            return kv_fail(error, -ECANCELED, 0, "stopped");
        if (code == CURLE_OK || t->refused_ns)
            return (int)status;
        return kv_fail(error, -EIO, 0, "%.180s", *text ? text : curl_easy_strerror(code));
    }
    return 1;
}

/* Return what a transfer that goes on too long has come to, or 1 for others. */
static int look_at_clock(struct transfer *t, struct kv_error *error)
{
    uint64_t now_ns = kv_now_ns(), whole_ns = t->get->whole_ms * KV_NS_PER_MS;
    long status = 0;

    if (t->refused_ns && now_ns > t->refused_ns + REFUSAL_MS * KV_NS_PER_MS) {
        curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
        return (int)status;
    }
    if (now_ns > t->heard_ns + t->get->silence_ms * KV_NS_PER_MS)
        return kv_fail(error, -ETIMEDOUT, 0, "the server is silent");
    if (whole_ns && now_ns > t->began_ns + whole_ns)
        return kv_fail(error, -ETIMEDOUT, 0, "the answer doesn't end");
    return 1;
}

static int work(struct ki_source *source, struct transfer *t, CURLM *multi, const char *text,
                struct kv_error *error)
{
    struct curl_waitfd stop = {.fd = source->wake.fd, .events = CURL_WAIT_POLLIN};
    int running, rc = 1;

    while (rc == 1) {
        if (ki_source_is_stopped(source))
            return kv_fail(error, -ECANCELED, 0, "stopped");
        if (curl_multi_perform(multi, &running) != CURLM_OK)
            return kv_fail(error, -EIO, 0, "libcurl failed");
        rc = collect(t, multi, text, error);
        if (rc != 1)
            break;
        rc = look_at_clock(t, error);
        if (rc != 1)
            break;
        (void)curl_multi_poll(multi, &stop, 1, 1000, NULL);
    }
    return rc;
}

int ki_get_run(struct ki_source *source, const struct ki_get *get, struct kv_buf *ret_body,
               struct kv_error *error)
{
    const uint64_t now_ns = kv_now_ns();
    struct transfer t = {.get = get,
                         .easy = curl_easy_init(),
                         .refusal = ret_body,
                         .began_ns = now_ns,
                         .heard_ns = now_ns};
    struct curl_slist *headers = make_headers(get);
    CURLM *multi = curl_multi_init();
    char text[CURL_ERROR_SIZE] = "";
    int rc;

    kv_buf_clear(ret_body);
    if (!t.easy || !headers || !multi || !set_options(&t, headers, text) ||
        curl_multi_add_handle(multi, t.easy) != CURLM_OK) {
        rc = kv_fail(error, -ENOMEM, 0, "libcurl: no memory, or an URL that makes no sense");
    } else {
        rc = work(source, &t, multi, text, error);
        curl_multi_remove_handle(multi, t.easy);
    }
    curl_easy_cleanup(t.easy);
    curl_multi_cleanup(multi);
    curl_slist_free_all(headers);
    return rc;
}
