// SPDX-License-Identifier: Apache-2.0
#include "extproc/tokenize.h"

#include <curl/curl.h>
#include <pthread.h>

#include "base/core/breaker.h"
#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "extproc/prompt.h"

#define MAX_ANSWER ((size_t)32 << 20)
#define MAX_CALLS 64     /* transfers at a time */
#define MAX_WAITING 4096 /* questions that wait for a transfer */

struct kx_tokenizer {
    CURLM *multi;
    struct curl_slist *headers;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards waiting, n_waiting, stop, breaker */
    struct kx_question *waiting, **end;
    size_t n_waiting;
    bool stop;
    struct kv_breaker breaker;
    struct kx_question *running; /* the thread's */
    uint32_t n_running;
};

static size_t take_answer(char *data, size_t size, size_t n, void *arg)
{
    struct kx_question *q = arg;

    kv_buf_append(&q->answer, data, size * n);
    return q->answer.error ? 0 : size * n;
}

static void finish(struct kx_tokenizer *t, struct kx_question *q, int rc)
{
    static struct kv_log_rate rate;
    bool opened = false;

    if (rc != -ECANCELED) {
        pthread_mutex_lock(&t->lock);
        opened = kv_breaker_tell(&t->breaker, !kv_breaker_counts(rc), q->probe, kv_now_ns());
        pthread_mutex_unlock(&t->lock);
    }
    if (opened && kv_log_allowed(&rate, 1))
        kv_log_warn("ext-proc", "an engine doesn't tokenize: load alone decides", "url=%s error=%d",
                    q->url, -rc);
    kv_buf_fini(&q->answer);
    q->fn(q, rc);
}

static bool set_options(struct kx_tokenizer *t, struct kx_question *q, uint64_t now_ns)
{
    CURL *e = q->easy;
    bool ok = true;

    ok &= curl_easy_setopt(e, CURLOPT_URL, q->url) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)q->request.len) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_POSTFIELDS, q->request.data) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->headers) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, take_answer) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_WRITEDATA, q) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_PRIVATE, q) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_PROXY, "") == CURLE_OK; /* ignore the environment's */
    ok &= curl_easy_setopt(e, CURLOPT_USERAGENT, "kvasir") == CURLE_OK;
    ok &= curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, (long)kv_ms_until(q->deadline_ns, now_ns)) ==
          CURLE_OK;
#if CURL_AT_LEAST_VERSION(7, 87, 0) /* don't wait for a silent name server */
    ok &= curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L) == CURLE_OK;
#endif
#if CURL_AT_LEAST_VERSION(7, 85, 0)
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
#else
    ok &= curl_easy_setopt(e, CURLOPT_PROTOCOLS, CURLPROTO_HTTP | CURLPROTO_HTTPS) == CURLE_OK;
#endif
    return ok && curl_multi_add_handle(t->multi, e) == CURLM_OK;
}

static void begin(struct kx_tokenizer *t, struct kx_question *q, uint64_t now_ns)
{
    if (q->deadline_ns <= now_ns) {
        finish(t, q, -ETIMEDOUT);
        return;
    }
    q->answer.limit = MAX_ANSWER;
    q->easy = curl_easy_init();
    if (!q->easy || !set_options(t, q, now_ns)) {
        curl_easy_cleanup(q->easy);
        finish(t, q, -ENOMEM);
        return;
    }
    q->next = t->running;
    t->running = q;
    t->n_running++;
}

/* Take a question that waits. Those that are too late are taken even when no transfer is free. */
static struct kx_question *take(struct kx_tokenizer *t, uint64_t now_ns)
{
    struct kx_question *q;

    pthread_mutex_lock(&t->lock);
    q = t->waiting;
    if (q && t->n_running >= MAX_CALLS && q->deadline_ns > now_ns)
        q = NULL;
    if (q) {
        t->waiting = q->next;
        if (!t->waiting)
            t->end = &t->waiting;
        t->n_waiting--;
    }
    pthread_mutex_unlock(&t->lock);
    return q;
}

static void leave(struct kx_tokenizer *t, struct kx_question *q)
{
    struct kx_question **at = &t->running;

    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    t->n_running--;
    curl_multi_remove_handle(t->multi, q->easy);
    curl_easy_cleanup(q->easy);
}

static int judge(struct kx_question *q, CURLcode result)
{
    long status = 0;

    if (result == CURLE_OPERATION_TIMEDOUT)
        return -ETIMEDOUT;
    if (result != CURLE_OK)
        return -EIO;
    curl_easy_getinfo((CURL *)q->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status == 400 || status == 422)
        return -EINVAL; /* the client's prompt is bad, not the engine: the breaker stays closed */
    int rc = status == 200 ? kx_tokens_read(q->answer.data, q->answer.len, &q->tokens) : -EPROTO;

    return rc == 0 && q->tokens.len == 0 ? -EINVAL
                                         : rc; /* no prompt is nothing: guess its length */
}

static void take_done(struct kx_tokenizer *t)
{
    CURLMsg *message;
    int left;

    while ((message = curl_multi_info_read(t->multi, &left))) {
        char *private = NULL;

        if (message->msg != CURLMSG_DONE)
            continue;
        CURLcode result = message->data.result;

        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &private);
        struct kx_question *q = (void *)private;
        int rc = judge(q, result);

        leave(t, q);
        finish(t, q, rc);
    }
}

static bool is_stopped(struct kx_tokenizer *t)
{
    pthread_mutex_lock(&t->lock);
    bool stop = t->stop;

    pthread_mutex_unlock(&t->lock);
    return stop;
}

static void *run(void *arg)
{
    struct kx_tokenizer *t = arg;

    while (!is_stopped(t)) {
        uint64_t now_ns = kv_now_ns();
        struct kx_question *q;
        int n;

        while ((q = take(t, now_ns)))
            begin(t, q, now_ns);
        curl_multi_perform(t->multi, &n);
        take_done(t);
        /* With questions that wait for a transfer, their deadlines are looked at. */
        curl_multi_poll(t->multi, NULL, 0, t->n_running >= MAX_CALLS ? 10 : 1000, NULL);
    }
    while (t->running) {
        struct kx_question *q = t->running;

        leave(t, q);
        finish(t, q, -ECANCELED);
    }
    return NULL;
}

int kx_tokenizer_create(struct kx_tokenizer **ret)
{
    struct kx_tokenizer *t = calloc(1, sizeof(*t));
    struct curl_slist *more;
    int rc = -ENOMEM;

    if (!t)
        return -ENOMEM;
    pthread_mutex_init(&t->lock, NULL);
    t->end = &t->waiting;
    t->breaker = (struct kv_breaker){
        .max_failures = 8, .first_wait_ns = KV_NS_PER_S, .max_wait_ns = 15 * KV_NS_PER_S};
    curl_global_init(CURL_GLOBAL_DEFAULT);
    t->multi = curl_multi_init();
    t->headers = curl_slist_append(NULL, "Content-Type: application/json");
    more = curl_slist_append(t->headers, "Expect:"); /* no pause before large bodies */
    if (!t->multi || !t->headers || !more)
        goto fail;
    rc = kv_thread_start(&t->thread, "kv-tokenize", run, t);
    if (rc < 0)
        goto fail;
    t->started = true;
    *ret = t;
    return 0;
fail:
    kx_tokenizer_destroy(t);
    return rc;
}

void kx_tokenizer_destroy(struct kx_tokenizer *t)
{
    if (!t)
        return;
    if (t->started) {
        pthread_mutex_lock(&t->lock);
        t->stop = true;
        pthread_mutex_unlock(&t->lock);
        curl_multi_wakeup(t->multi);
        pthread_join(t->thread, NULL);
    }
    while (t->waiting) {
        struct kx_question *q = t->waiting;

        t->waiting = q->next;
        finish(t, q, -ECANCELED);
    }
    curl_slist_free_all(t->headers);
    curl_multi_cleanup(t->multi);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

int kx_tokenizer_ask(struct kx_tokenizer *t, struct kx_question *q)
{
    bool taken = false;

    pthread_mutex_lock(&t->lock);
    if (!t->stop && t->n_waiting < MAX_WAITING) {
        enum kv_gate gate = kv_breaker_ask(&t->breaker, kv_now_ns());

        taken = gate != KV_GATE_REFUSE;
        q->probe = gate == KV_GATE_PROBE;
    }
    if (taken) {
        q->next = NULL;
        *t->end = q;
        t->end = &q->next;
        t->n_waiting++;
    }
    pthread_mutex_unlock(&t->lock);
    if (taken)
        curl_multi_wakeup(t->multi);
    return taken ? 0 : -EAGAIN;
}
