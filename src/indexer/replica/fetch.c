// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/fetch.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "http/conns.h"

#define WAITING_MAX (256u << 10)
#define ENOUGH (64u << 10) /* bytes that show that a server sends, unless the body is shorter */
#define POLL_MS 50         /* how soon a stop is noticed, in milliseconds */

struct ki_fetch {
    struct ki_fetch_opts opts;
    CURLM *multi;
    CURL *easy;
    struct curl_slist *headers;
    bool added, done, paused;
    int rc; /* result, once done */
    uint64_t deadline_ns, heard_ns, bytes;
    uint64_t waited_ns, waited_bytes; /* of the pace that is measured now: see check_pace */
    char waiting[WAITING_MAX];
    size_t start, end; /* bounds of the bytes not read yet */
    char curl_text[CURL_ERROR_SIZE];
    char text[CURL_ERROR_SIZE + 64];
};

static size_t receive(char *data, size_t size, size_t n, void *arg)
{
    struct ki_fetch *f = arg;
    size_t len = size * n;
    long status = 0;

    curl_easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200)
        return len; /* text of an error reply, for people; the status decides */
    if (f->start == f->end)
        f->start = f->end = 0;
    if (len > WAITING_MAX - f->end) {
        f->paused = true;
        return CURL_WRITEFUNC_PAUSE;
    }
    memcpy(f->waiting + f->end, data, len);
    f->end += len;
    f->bytes += len;
    f->heard_ns = kv_now_ns();
    return len;
}

static bool set_options(struct ki_fetch *f)
{
    const struct ki_fetch_opts *o = &f->opts;
    CURL *e = f->easy;
    bool ok = true;

    ok &= curl_easy_setopt(e, CURLOPT_URL, o->url) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, receive) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEDATA, f) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_ERRORBUFFER, f->curl_text) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 64L << 10) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, (long)o->connect_ms) == CURLE_OK;
    /* Peers are neighbours: don't use a proxy, which is meant for outside hosts. */
    ok &= curl_easy_setopt(e, CURLOPT_PROXY, "") == CURLE_OK;
#if LIBCURL_VERSION_NUM >= 0x075500
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
#else
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS, CURLPROTO_HTTP | CURLPROTO_HTTPS) == CURLE_OK;
#endif
#if LIBCURL_VERSION_NUM >= 0x075700
    /* Don't wait for a slow name server. */
    ok &= curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L) == CURLE_OK;
#endif
    if (o->ca_file)
        ok &= curl_easy_setopt(e, CURLOPT_CAINFO, o->ca_file) == CURLE_OK;
    if (f->headers)
        ok &= curl_easy_setopt(e, CURLOPT_HTTPHEADER, f->headers) == CURLE_OK;
    return ok;
}

/* Add the header "@name@value" to the request. */
static int add_header(struct ki_fetch *f, const char *name, const char *value)
{
    size_t size = strlen(name) + strlen(value) + 1;
    struct curl_slist *longer = NULL;
    char *line = malloc(size);

    if (line) {
        snprintf(line, size, "%s%s", name, value);
        longer = curl_slist_append(f->headers, line);
    }
    free(line);
    if (!longer)
        return -ENOMEM;
    f->headers = longer;
    return 0;
}

int ki_fetch_open(const struct ki_fetch_opts *opts, struct ki_fetch **ret)
{
    struct ki_fetch *f = calloc(1, sizeof(*f));
    int rc = -ENOMEM;

    if (!f)
        return -ENOMEM;
    f->opts = *opts;
    f->heard_ns = kv_now_ns();
    f->deadline_ns = f->heard_ns + opts->total_ms * KV_NS_PER_MS;
    f->multi = curl_multi_init();
    f->easy = curl_easy_init();
    if (!f->multi || !f->easy)
        goto fail;
    if (opts->token && add_header(f, "Authorization: Bearer ", opts->token) < 0)
        goto fail;
    if (opts->accept && add_header(f, "Accept: ", opts->accept) < 0)
        goto fail;
    rc = -EINVAL;
    if (!set_options(f) || curl_multi_add_handle(f->multi, f->easy) != CURLM_OK)
        goto fail;
    f->added = true;
    *ret = f;
    return 0;
fail:
    ki_fetch_close(f);
    return rc;
}

void ki_fetch_close(struct ki_fetch *fetch)
{
    if (!fetch)
        return;
    if (fetch->added)
        curl_multi_remove_handle(fetch->multi, fetch->easy);
    curl_easy_cleanup(fetch->easy);
    curl_multi_cleanup(fetch->multi);
    curl_slist_free_all(fetch->headers);
    free(fetch);
}

static int fail(struct ki_fetch *f, int rc, const char *text)
{
    f->done = true;
    f->rc = rc;
    snprintf(f->text, sizeof(f->text), "%s", text);
    return rc;
}

/* Return what the user can do about a refusal of the peer. */
static const char *advice(const struct ki_fetch *f, long status)
{
    if (status == 403)
        return ": the peer admits only its own machine; start it with --auth-token-file or "
               "--insecure";
    if (status == 401)
        return f->opts.token ? ": the peer doesn't know the first token of --auth-token-file"
                             : ": give the peer's token with --auth-token-file";
    return "";
}

static void finish(struct ki_fetch *f, CURLcode code)
{
    long status = 0;
    char text[160];

    curl_easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &status);
    if (code != CURLE_OK) {
        fail(f, -EIO, f->curl_text[0] ? f->curl_text : curl_easy_strerror(code));
    } else if (status != 200) {
        snprintf(text, sizeof(text), "HTTP status %ld%s", status, advice(f, status));
        fail(f, -EIO, text);
    } else {
        f->done = true;
    }
}

/*
 * Note that this side has waited for @ns. In each stall_ms of waiting the server must send at least at
 * the slowest pace that our own server asks of its clients. Time that the reader takes doesn't count,
 * and speed from before is no credit.
 */
static int check_pace(struct ki_fetch *f, uint64_t ns)
{
    uint64_t ms;

    if (f->opts.trickles)
        return 0;
    f->waited_ns += ns;
    ms = f->waited_ns / KV_NS_PER_MS;
    if (ms < f->opts.stall_ms)
        return 0;
    if (f->bytes - f->waited_bytes < ms * KH_SLOWEST_BYTES_PER_MS) {
        bool silent = kv_now_ns() - f->heard_ns >= f->opts.stall_ms * KV_NS_PER_MS / 2;

        return fail(f, -ETIMEDOUT, silent ? "it has stopped sending" : "it sends too slowly");
    }
    f->waited_ns = 0;
    f->waited_bytes = f->bytes;
    return 0;
}

static int check_time(struct ki_fetch *f)
{
    uint64_t now_ns = kv_now_ns();

    if (f->opts.stop && *f->opts.stop)
        return fail(f, -ECANCELED, "stopped");
    if (now_ns >= f->deadline_ns)
        return fail(f, -ETIMEDOUT, "it takes too long altogether");
    if (now_ns >= f->heard_ns + f->opts.stall_ms * KV_NS_PER_MS)
        return fail(f, -ETIMEDOUT, "it has stopped sending");
    return 0;
}

/* Let libcurl do what it can at once. */
static void step(struct ki_fetch *f)
{
    CURLMsg *message;
    int running, left;

    if (check_time(f) < 0)
        return;
    if (f->paused && f->start == f->end) {
        f->paused = false;
        curl_easy_pause(f->easy, CURLPAUSE_CONT);
    }
    if (curl_multi_perform(f->multi, &running) != CURLM_OK) {
        fail(f, -EIO, "libcurl failed");
        return;
    }
    while ((message = curl_multi_info_read(f->multi, &left)) != NULL)
        if (message->msg == CURLMSG_DONE)
            finish(f, message->data.result);
}

/* Wait for bytes for up to @ms, unless the transfer has ended. */
static void await(struct ki_fetch *f, int ms)
{
    uint64_t from_ns = kv_now_ns();

    if (f->done)
        return;
    curl_multi_poll(f->multi, NULL, 0, ms, NULL);
    (void)check_pace(f, kv_now_ns() - from_ns);
}

/* Let libcurl work until bytes can be read, or the transfer has ended. */
static void work(struct ki_fetch *f)
{
    while (!f->done && f->start == f->end) {
        step(f);
        if (f->start == f->end)
            await(f, POLL_MS);
    }
}

bool ki_fetch_proceeds(struct ki_fetch *fetch, int ms)
{
    if (!fetch->done && !fetch->paused && fetch->end - fetch->start < ENOUGH) {
        await(fetch, ms);
        step(fetch);
    }
    return fetch->done || fetch->paused || fetch->end - fetch->start >= ENOUGH;
}

long ki_fetch_read(void *fetch, char *data, size_t size)
{
    struct ki_fetch *f = fetch;
    size_t n;

    if (f->start == f->end) {
        /* The reader's own time doesn't count against the peer. */
        f->heard_ns = KV_MAX(f->heard_ns, kv_now_ns());
        work(f);
    }
    n = KV_MIN(size, f->end - f->start);
    if (n == 0)
        return f->rc;
    memcpy(data, f->waiting + f->start, n);
    f->start += n;
    return (long)n;
}

uint64_t ki_fetch_bytes(const struct ki_fetch *fetch)
{
    return fetch->bytes;
}

const char *ki_fetch_error(const struct ki_fetch *fetch)
{
    return fetch->text;
}
